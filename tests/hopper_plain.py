"""Has Python run the Hopper kernels' own functions, on NumPy tiles and one warp after the other.

Who is where, who sees whom, and whose turn it is are computed by the very lines that a GPU runs. Layouts, barriers and
registers mean nothing here; and what is written in assembly is replaced by a plain line that does the same.
"""

from types import SimpleNamespace

import numpy as np


class Whole(int):
    """A whole number that divides as a GPU does: towards zero."""

    def __floordiv__(self, other):
        return Whole(abs(self) // abs(other) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other):
        return Whole(self - self.__floordiv__(other) * other)

    def __radd__(self, other):
        return self + other

    def __rmul__(self, other):
        return self * other


def whole(name):
    def operation(self, other):
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Whole(found)

    return operation


for operator in ("add", "sub", "mul", "and", "rsub"):
    setattr(Whole, f"__{operator}__", whole(f"__{operator}__"))


def least(a, b):
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else Whole(min(a, b))


def most(a, b):
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else Whole(max(a, b))


def where(condition, a, b):
    return np.where(condition, a, b) if isinstance(condition, np.ndarray) else a if condition else b


def language(**more) -> SimpleNamespace:
    """What kernels use of tl and gl."""
    return SimpleNamespace(
        minimum=least,
        maximum=most,
        where=where,
        cdiv=lambda a, b: Whole(-(-a // b)),
        cast=lambda x, dtype: x,
        int64=np.int64,
        **more,
    )


def plain(owner) -> dict:
    """The functions of a module or the methods of a class that are written for a GPU, as Python's own."""
    return {name: x.fn for name, x in vars(owner).items() if hasattr(x, "fn") and hasattr(x, "arg_names")}
