"""What runs beside a student's code, in the same process: it holds no right value and counts nothing.

A probe is `probe(theirs, *arguments)`; `guard.beside` runs it where the student's function is. On the meter a student's
code holds no numbers: a `Block` stands for an array on the grader's side, where all is computed and counted.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class NotAllowed(Exception):
    """What came may be right, but was got in a way that the exercise rules out."""


class Block(NDArrayOperatorsMixin):
    """An array on chip. Each operation is a question to the chip, and so is each look at a number."""

    def __init__(self, ask, number: int, shape: tuple, dtype: str):
        self.ask, self.number, self.shape, self.dtype = ask, number, tuple(shape), np.dtype(dtype)

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape)))
    T = property(lambda self: self.ask("transpose", self))

    def __array_ufunc__(self, ufunc, method, *inputs, **named):
        return self.ask(f"{ufunc.__name__}.{method}", *inputs, **named)

    def __array_function__(self, function, types, args, named):
        return self.ask(function.__name__, *args, **named)

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **named: self.ask(method, self, *args, **named)

    def __getitem__(self, where):
        return self.ask("getitem", self, where)

    def __setitem__(self, where, value) -> None:
        self.ask("setitem", self, where, value)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return self.ask("truth", self)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.ask("peek", self), dtype=dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __index__(self) -> int:
        return int(self.__array__())

    __int__ = __index__

    def __del__(self) -> None:
        self.ask.freed.append(self.number)


class Watched(Block):
    """A tensor in HBM: a load asks for its rows, a store sends them."""

    def __del__(self) -> None:
        """It stays where it is."""


class Asking:
    """How blocks are asked for: by their numbers, here or over there."""

    def __init__(self, do):
        self.do, self.freed = do, []

    def __call__(self, name: str, *args, **named):
        gone, self.freed[:] = list(self.freed), []
        return self.here(self.do(gone, name, self.there(args), self.there(named)))

    def there(self, x):
        """What is sent: a block by its number, a type by its name."""
        if isinstance(x, Block):
            return {"block": x.number}
        if isinstance(x, (tuple, list)):
            return type(x)(map(self.there, x))
        if isinstance(x, dict):
            return {key: self.there(value) for key, value in x.items()}
        return np.dtype(x).name if isinstance(x, (type, np.dtype)) else x

    def here(self, x):
        """What came: a block's number, shape and type become a block."""
        if isinstance(x, dict):
            return Block(self, *x["block"])
        return type(x)(map(self.here, x)) if isinstance(x, (tuple, list)) else x


def metered(function, do, tensors: list, *args, **options) -> None:
    """Run a function on the tensors of a chip, given as (number, shape)."""
    ask = Asking(do)
    with staying_on_chip():
        function(*(Watched(ask, number, shape, "float64") for number, shape in tensors), *args, **options)


@contextmanager
def staying_on_chip():
    """np.asarray(K) means no harm: asked of a block, NumPy's ways to make an array leave it where it is."""
    real = {name: getattr(np, name) for name in ("array", "asarray", "asanyarray", "ascontiguousarray")}

    def made(name: str, x, *args, **named):
        if not isinstance(x, Block):
            return real[name](x, *args, **named)
        return x if name != "array" else x[:] if isinstance(x, Watched) else x.copy()

    for name in real:
        setattr(np, name, partial(made, name))
    try:
        yield
    finally:
        for name, make in real.items():
            setattr(np, name, make)


def lent(function, given: tuple):
    """What stands for a right function of the grader's: values go there and come back, and so do arrays it filled.

    What is not plain goes there by its place among the arguments that the student's function was given.
    """

    def called(*args, **named):
        asking = next((x.ask for x in args if isinstance(x, Block)), Asking(None))
        places = {id(x): {"argument": n} for n, x in enumerate(given) if is_dataclass(x)}
        value, arrays = function(asking.there([places.get(id(x), x) for x in args]), asking.there(named))
        for mine, filled in zip(args, arrays, strict=False):
            if isinstance(mine, np.ndarray):
                mine[...] = filled
        return asking.here(value)

    return called
