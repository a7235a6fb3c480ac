"""A meter that counts what an algorithm loads, stores and computes, per tile and per worker.

Tensors with uppercase names are in HBM. An algorithm passes them to a `Trace`, which returns tensors that record their
use: indexing such a tensor counts as a load (`q_i = Q[rows]`), and assigning to it counts as a store (`O[rows] = o_i`).
A load returns an on-chip array, as does every NumPy operation on an on-chip array. The meter counts the operations of
each kind. Without a meter, the same lines run on plain arrays, so each algorithm is written only once, in plain NumPy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

EXPONENTIALS = {"exp", "exp2"}
KIND_OF_UFUNC = {"subtract": "add", "fmax": "maximum", "amax": "maximum"}
NOT_COUNTABLE = {"dot", "vdot", "inner", "outer", "einsum", "tensordot", "kron", "multi_dot", "solve", "inv"}


class Event(NamedTuple):
    """A single load from HBM or store to HBM.

    `i` and `j` are the loop indices at the time of the access. An index is None outside its loop.
    """

    op: str  # "load" or "store"
    tensor: str
    elements: int
    worker: tuple  # the indices of the enclosing parallel loops, which identify a thread block
    i: int | None
    j: int | None


class Trace:
    """A meter for one run of an algorithm."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.work: Counter[tuple] = Counter()  # {(worker, i, j, kind): number of operations}
        self.peak_on_chip = 0  # largest number of elements that are on chip at the same time, as declared with hold()
        self.largest_on_chip = 0  # number of elements in the largest array computed on chip
        self._at: dict[str, int] = {}
        self._parallel: list[str] = []

    # Methods that an algorithm calls ----------------------------------------------------------------------

    def hbm(self, **tensors: np.ndarray) -> Any:
        """Return the named tensors as HbmTensors in the order given, or a single HbmTensor if only one is given."""
        watched = [HbmTensor(name, array, self) for name, array in tensors.items()]
        return watched if len(watched) > 1 else watched[0]

    def parallel(self, name: str, indices: Iterable[int]) -> Iterator[int]:
        """Yield the `indices` of a loop whose iterations are independent.

        Each iteration represents one worker (a thread block). `name` is the name of the loop index, such as "i".
        """
        self._parallel.append(name)
        try:
            yield from self.serial(name, indices)
        finally:
            self._parallel.remove(name)

    def serial(self, name: str, indices: Iterable[int]) -> Iterator[int]:
        """Yield the `indices` of a loop whose iterations a worker runs one after another."""
        try:
            for index in indices:
                self._at[name] = index
                yield index
        finally:  # also after a break
            self._at.pop(name, None)

    def hold(self, *arrays: np.ndarray) -> None:
        """Record the arrays that one step of the algorithm needs on chip at the same time."""
        self.peak_on_chip = max(self.peak_on_chip, sum(np.size(a) for a in arrays))

    # Methods that return the counts -----------------------------------------------------------------------

    def loads(self, tensor: str | None = None) -> int:
        """Return the number of elements of `tensor` loaded from HBM, or of all tensors if `tensor` is None."""
        return self._moved("load", tensor)

    def stores(self, tensor: str | None = None) -> int:
        """Return the number of elements of `tensor` stored to HBM, or of all tensors if `tensor` is None."""
        return self._moved("store", tensor)

    @property
    def hbm_elements(self) -> int:
        """The number of elements moved between HBM and the chip: loads plus stores."""
        return self.loads() + self.stores()

    @property
    def flops(self) -> Counter[str]:
        """The number of operations of each kind: matmul, exp, add, multiply, divide, maximum, log."""
        total: Counter[str] = Counter()
        for (_, _, _, kind), n in self.work.items():
            total[kind] += n
        return total

    @property
    def matmul_flops(self) -> int:
        return self.flops["matmul"]

    @property
    def exponentials(self) -> int:
        return self.flops["exp"]

    @property
    def other_flops(self) -> int:
        """The number of operations that are neither exponentials nor part of a matmul."""
        return sum(n for kind, n in self.flops.items() if kind not in ("matmul", "exp"))

    def by_tile(self) -> dict[tuple, Counter]:
        """Return {(i, j): counts of loads, stores and operations} for each tile (i, j)."""
        return self._grouped(lambda worker, i, j: (i, j))

    def by_worker(self) -> dict[tuple, Counter]:
        """Return {worker: counts of loads, stores and operations}, with one entry per worker (thread block)."""
        return self._grouped(lambda worker, i, j: worker)

    # How operations and accesses are counted --------------------------------------------------------------

    def _moved(self, op: str, tensor: str | None) -> int:
        return sum(e.elements for e in self.events if e.op == op and tensor in (None, e.tensor))

    def _grouped(self, key: Callable[[tuple, int | None, int | None], tuple]) -> dict[tuple, Counter]:
        groups: dict[tuple, Counter] = {}
        for e in self.events:
            groups.setdefault(key(e.worker, e.i, e.j), Counter())[e.op] += e.elements
        for (worker, i, j, kind), n in self.work.items():
            groups.setdefault(key(worker, i, j), Counter())[kind] += n
        return groups

    def _here(self) -> tuple[tuple, int | None, int | None]:
        worker = tuple(self._at[name] for name in self._parallel)
        return worker, self._at.get("i"), self._at.get("j")

    def _record(self, op: str, tensor: str, elements: int) -> None:
        self.events.append(Event(op, tensor, elements, *self._here()))

    def _count(self, ufunc: np.ufunc, method: str, inputs: list, result: Any) -> None:
        """Count one NumPy operation, unless it is a comparison."""
        self.largest_on_chip = max(self.largest_on_chip, np.size(result))
        name = ufunc.__name__
        if name == "matmul":
            kind, n = "matmul", 2 * np.size(result) * inputs[0].shape[-1]
        elif np.asarray(result).dtype == bool:
            return  # comparisons are not arithmetic
        elif method == "reduce":
            kind, n = KIND_OF_UFUNC.get(name, name), np.size(inputs[0]) - np.size(result)
        else:
            kind, n = "exp" if name in EXPONENTIALS else KIND_OF_UFUNC.get(name, name), np.size(result)
        worker, i, j = self._here()
        self.work[worker, i, j, kind] += n


class Unwatched:
    """A stand-in for Trace that counts nothing. Its methods have the same names but return plain arrays."""

    def hbm(self, **tensors: np.ndarray) -> Any:
        return list(tensors.values()) if len(tensors) > 1 else next(iter(tensors.values()))

    def parallel(self, name: str, indices: Iterable[int]) -> Iterable[int]:
        return indices

    serial = parallel

    def hold(self, *arrays: np.ndarray) -> None:
        pass


UNWATCHED: Any = Unwatched()  # passed in place of a Trace if nothing is to be counted


class HbmTensor:
    """A tensor in HBM that reports every load and store to its Trace."""

    def __init__(self, name: str, array: np.ndarray, trace: Trace) -> None:
        self.name, self.array, self.trace = name, np.asarray(array), trace
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __getitem__(self, where: Any) -> "OnChip":
        block = np.array(self.array[where])
        self.trace._record("load", self.name, block.size)
        return _on_chip(block, self.trace)

    def __setitem__(self, where: Any, value: Any) -> None:
        self.array[where] = value
        self.trace._record("store", self.name, self.array[where].size)

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


class OnChip(np.ndarray):
    """An on-chip array, loaded from HBM or computed from other on-chip arrays. Operations on it are counted."""

    trace: Any = None  # the Trace that counts the array's operations; the name hides ndarray's method trace()

    def __array_finalize__(self, parent: Any) -> None:
        self.trace = getattr(parent, "trace", None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        trace = next(x.trace for x in (*inputs, *(out or ())) if isinstance(x, OnChip))
        plain = [_plain(x) for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(_plain(x) for x in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        if trace is not None:
            trace._count(ufunc, method, plain, result)
        return _on_chip(result, trace)

    def __array_function__(self, function: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        if function.__name__ in NOT_COUNTABLE:
            raise TypeError(f"the meter cannot count numpy.{function.__name__}, so write matrix products with @")
        return _on_chip(_plain(super().__array_function__(function, types, args, kwargs)), self.trace)


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, OnChip) else x


def _on_chip(x: Any, trace: Trace | None) -> Any:
    if type(x) is np.ndarray:
        x = x.view(OnChip)
        x.trace = trace
    return x
