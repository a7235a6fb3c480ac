"""Stand-ins in Python for the language Gluon: integers, tiles, pointers, and the functions that kernels call."""

import ast
import inspect
from types import SimpleNamespace

import numpy as np


class GpuInt(int):
    """An integer whose division rounds toward zero, as on a GPU."""

    def __floordiv__(self, other):
        return GpuInt(abs(self) // abs(other) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other):
        return GpuInt(self - self.__floordiv__(other) * other)

    def to(self, dtype):
        return self


def returning_gpu_int(name):
    def operation(self, other):
        result = getattr(int, name)(self, other)
        return result if result is NotImplemented else GpuInt(result)

    return operation


for operator in ("add", "sub", "mul", "and", "radd", "rsub", "rmul"):
    setattr(GpuInt, f"__{operator}__", returning_gpu_int(f"__{operator}__"))


class Tile(np.ndarray):
    """A NumPy matrix with the methods of a Gluon tile in shared memory or in registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype):
        return self

    def permute(self, order):
        return self.transpose(order)

    def index(self, n):
        return self[n]

    def store(self, x):
        self[...] = x

    def slice(self, begin, size, dim):
        return self[begin : begin + size] if dim == 0 else self[:, begin : begin + size]


class Pointer:
    """A pointer to one element of an array, or to several elements if `at` is an array."""

    def __init__(self, numbers, at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, more):
        return Pointer(self.numbers, self.at + more)


def load(pointer):
    return GpuInt(pointer.numbers[pointer.at])


def store(pointer, x, mask=None):
    if mask is None:
        pointer.numbers[pointer.at] = x
        return
    assert np.isnan(pointer.numbers[pointer.at[mask]]).all(), "written twice"
    pointer.numbers[pointer.at[mask]] = x[mask]


def atomic_add(pointer, n, sem):
    pointer.numbers[pointer.at] += n
    return GpuInt(pointer.numbers[pointer.at] - n)


def inline_asm_elementwise(text, constraints, given, *_, **__):
    assert text == "mov.b32 $0, $1;", "the only one that is known here"
    return given[0]


def broadcast(a, b):
    if isinstance(a, Pointer):
        at, b = np.broadcast_arrays(a.at, b)
        return Pointer(a.numbers, at), b
    return np.broadcast_arrays(a, b)


def for_numbers_or_arrays(scalar, array):
    """Return a function that calls `array` if any argument is an array, and `scalar` otherwise."""
    return lambda *x: array(*x) if any(isinstance(y, np.ndarray) for y in x) else GpuInt(scalar(*x))


GLUON = SimpleNamespace(
    minimum=for_numbers_or_arrays(min, np.minimum),
    inline_asm_elementwise=inline_asm_elementwise,
    maximum=for_numbers_or_arrays(max, np.maximum),
    where=for_numbers_or_arrays(lambda condition, a, b: a if condition else b, np.where),
    cdiv=lambda a, b: GpuInt(-(-a // b)),
    cast=lambda x, dtype: x,
    arange=lambda begin, end, layout: np.arange(begin, end),
    zeros=lambda shape, dtype, layout: np.zeros(shape),
    broadcast=broadcast,
    exp2=np.exp2,
    log2=np.log2,
    sum=np.sum,
    load=load,
    store=store,
    atomic_add=atomic_add,
    convert_layout=lambda x, layout: x,
    SliceLayout=lambda *_: None,
    static_range=range,
    int32=None,
    int64=None,
    float32=None,
)


def unjitted(owner) -> dict:
    """Return {name: Python function} for the GPU functions of a module, or the GPU methods of a class."""
    return {name: x.fn for name, x in vars(owner).items() if hasattr(x, "fn") and hasattr(x, "arg_names")}


def new_aggregate(cls, fields_of: dict):
    """Return an object with the methods of one of the kernels' aggregates and with these fields."""
    aggregate = type(cls.__name__, (), unjitted(cls))()
    vars(aggregate).update({name: GpuInt(x) if type(x) is int else x for name, x in fields_of.items()})
    return aggregate


def constructor(cls, *names):
    """Return a stand-in for the constructor of an aggregate whose fields have these names."""
    return lambda *values, **named: new_aggregate(cls, dict(zip(names, values, strict=False)) | named)


def field_names(module, name: str) -> list[str]:
    """Return the names of an aggregate's fields, read from its source, because Triton 3.6 keeps no annotations."""
    (body,) = (x.body for x in ast.parse(inspect.getsource(module)).body if getattr(x, "name", "") == name)
    return [x.target.id for x in body if isinstance(x, ast.AnnAssign)]


def numpy_mma(a, b, to, use_acc=True, is_async=True):
    return ((to if use_acc else 0) + np.asarray(a) @ np.asarray(b)).view(Tile)


def mma_wait(running, deps):
    return deps[0] if len(deps) == 1 else deps


def zero_oob_rows(tile, real, BEFORE=False):
    tile[: max(0, real)] = 0 if BEFORE else tile[: max(0, real)]
    tile[max(0, real) :] = tile[max(0, real) :] if BEFORE else 0
