"""The chip of assignments 2 and 3, on the grader's side: arrays live here, and what is done with them is counted here.

A student's code holds numbers of arrays and asks (`probes.Block`). The meter knows from the rows that were asked for
which tile a load belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa2_lab.trace import NOT_COUNTABLE, HbmTensor, OnChip, Trace, _on_chip

from . import probes
from .guard import beside
from .probes import NotAllowed

MOST = 2**20  # elements of one operation, and of all that a chip holds
METHODS = {
    "all", "any", "argmax", "argmin", "astype", "clip", "copy", "cumsum", "fill", "flatten", "max", "mean", "min",
    "prod", "ravel", "reshape", "squeeze", "sum", "swapaxes", "transpose",
}  # fmt: skip
FUNCTIONS = METHODS - {"flatten", "fill", "astype"} | {
    "amax", "amin", "array_equal", "broadcast_to", "concatenate", "copyto", "count_nonzero", "diff", "empty_like",
    "expand_dims", "flip", "full_like", "hstack", "isneginf", "isposinf", "nan_to_num", "ones_like", "stack", "tril",
    "triu", "vstack", "where", "zeros_like",
}  # fmt: skip
NAMED = {"axis", "keepdims", "out", "where", "initial", "dtype", "copy", "order", "posinf", "neginf", "nan", "shape"}


class Placed(HbmTensor):
    """An HBM tensor: rows by a load, rows by a store.

    Each moves the meter to the block that was asked for: along queries (axis "i") or along keys (axis "j").
    """

    def __init__(self, name: str, array: np.ndarray, trace: Meter, axis: str):
        super().__init__(name, array, trace)
        self.axis = axis

    def _go_to(self, where) -> None:
        """Move the meter to these rows."""
        rows = np.arange(self.shape[0])[where[0] if isinstance(where, tuple) else where]
        if np.size(rows):
            self.trace._at[self.axis] = int(np.min(rows)) // self.trace.block[self.axis]

    def __getitem__(self, where) -> OnChip:
        self._go_to(where)
        block = super().__getitem__(where)
        self.trace.largest_load = max(self.trace.largest_load, (block.size, self.name))
        return block

    def __setitem__(self, where, value) -> None:
        self._go_to(where)
        super().__setitem__(where, value)


class Meter(Trace):
    """Counts like a Trace; i and j are read off the rows of Q and of K that were last asked for."""

    def __init__(self, B_r: int, B_c: int):
        super().__init__()
        self.block = {"i": B_r, "j": B_c}
        self.largest_load = (0, "")
        self.most_held = 0  # elements that were computed and on chip at once; loads have a check of their own
        self.peeked = 0  # elements whose numbers were taken off the chip
        self.turned = ""  # a product that fits only if its right operand is transposed, and was computed so

    def tiles(self, tensor: str) -> list[tuple[int, int]]:
        """The tiles (i, j) for which a tensor was loaded, in order."""
        return [(e.i, e.j) for e in self.events if e.op == "load" and e.tensor == tensor]


class Chip:
    """Arrays by their numbers, and all that may be done with them."""

    def __init__(self, meter: Meter, tensors: list[Placed]):
        self.meter, self.tensors, self.blocks, self.loaded, self.next = meter, tensors, {}, set(), len(tensors)

    def do(self, gone: list, name: str, args: tuple, named: dict):
        """One operation on blocks. What comes of it is a block, too."""
        for number in gone:
            self.blocks.pop(number, None)
        came = self.handed(self.done(name, args := self.near(args), self.near(named)))
        if name == "getitem" and isinstance(args[0], Placed):
            self.loaded.add(self.next - 1)
        held = sum(block.size for number, block in self.blocks.items() if number not in self.loaded)
        self.meter.most_held = max(self.meter.most_held, held)
        return came

    def done(self, name: str, args: tuple, named: dict):
        """An operation of these names alone, of a limited size."""
        ufunc, _, method = name.partition(".")
        if name == "truth":
            return {"plain": bool(args[0] if args[0].dtype == bool else self.peek(args[0]))}
        if name == "peek":
            return {"plain": self.peek(args[0])}
        args = self.turned(args) if ufunc == "matmul" else args
        self.limit(ufunc, args, named)
        if name == "getitem":
            return args[0][args[1]]
        if name == "setitem":
            args[0][args[1]] = args[2]
            return None
        if isinstance(getattr(np, ufunc, None), np.ufunc) and method in ("__call__", "reduce", "accumulate"):
            return getattr(getattr(np, ufunc), method)(*args, **named)
        if name in METHODS and isinstance(args[0], OnChip):
            return getattr(args[0], name)(*args[1:], **named)
        if name in FUNCTIONS:
            return getattr(np, name)(*args, **named)
        instead = "write matrix products with @" if name in NOT_COUNTABLE else "use operators and np.where"
        raise TypeError(f"the chip has no numpy.{name}, so {instead}")

    def turned(self, args: tuple) -> tuple:
        """The operands of a product. If one transpose was forgotten, the chip makes up for it, and step 3 tells."""
        a, b = (np.shape(x) for x in args[:2])
        if len(a) == len(b) == 2 and a[1] != b[0] and a[1] == b[1]:
            self.meter.turned = f"{a} @ {b}"
            return args[0], args[1].T, *args[2:]
        return args

    def peek(self, block) -> np.ndarray:
        """The numbers of a block, or of a whole tensor, which is a load."""
        block = block[:] if isinstance(block, Placed) else block
        self.meter.peeked += np.size(block)
        return np.array(block)

    def limit(self, name: str, args: tuple, named: dict) -> None:
        """Refuse what would become large, whatever its operands share or repeat."""
        arrays = [x for x in flat((args, named)) if isinstance(x, np.ndarray)]
        sizes = [x.size for x in arrays]
        if name in ("getitem", "setitem"):
            index = [np.size(x) for x in flat(args[1:2])]
            sizes += [math.prod(index) * math.prod(args[0].shape[1:])] if max(index, default=0) > 1 else []
        elif name == "matmul":
            sizes += [math.prod(arrays[0].shape[:-1]) * arrays[1].size // (arrays[1].shape[-2:] or (1,))[0]]
        elif name in ("broadcast_to", "full_like", "ones_like", "zeros_like", "empty_like"):
            sizes += [math.prod(x for x in flat((args[1:], named)) if isinstance(x, int) and x > 0)]
        elif name not in ("concatenate", "stack", "hstack", "vstack"):
            sizes += [math.prod(np.broadcast_shapes(*(x.shape for x in arrays)))] if name not in METHODS else []
        words = [x for x in flat((args, named)) if isinstance(x, str)]
        if set(named) - NAMED or not all(x[:1] in "bfiuCFKA" and x.isalnum() and len(x) < 8 for x in words):
            raise TypeError(f"{name} does not accept these arguments on the chip")
        if sum(sizes) > MOST or sum(x.size for x in self.blocks.values()) > MOST:
            raise ValueError(f"the chip holds at most {MOST:,} numbers")

    def near(self, x):
        """What was sent, its numbers as blocks."""
        if isinstance(x, dict) and set(x) == {"block"}:
            number = x["block"]
            return self.tensors[number] if number in range(len(self.tensors)) else self.blocks[number]
        if isinstance(x, dict):
            return {key: self.near(value) for key, value in x.items()}
        return type(x)(map(self.near, x)) if isinstance(x, (tuple, list)) else x

    def handed(self, x):
        """What is handed over: of an array its number, its shape and its type."""
        if isinstance(x, dict):
            return x["plain"]
        if isinstance(x, (tuple, list)):
            return type(x)(map(self.handed, x))
        if not isinstance(x, (np.ndarray, np.generic)):
            return x
        self.blocks[self.next] = _on_chip(np.asarray(x), self.meter) if not isinstance(x, OnChip) else x
        self.next += 1
        return {"block": (self.next - 1, x.shape, x.dtype.str)}


def flat(x) -> list:
    """What is in nested tuples, lists and dicts."""
    inside = x.values() if isinstance(x, dict) else x
    return [z for y in inside for z in flat(y)] if isinstance(x, (tuple, list, dict)) else [x]


def lending(function: Callable, given: tuple) -> Callable:
    """A right function as a student's process may call it, with values, with blocks of a chip, and with arguments that
    the student's own function was given."""
    chip = next((a.__self__ for a in given if isinstance(getattr(a, "__self__", None), Chip)), None)

    def called(args: list, named: dict) -> tuple:
        if chip is not None:
            return chip.handed(function(*chip.near(args), **chip.near(named))), ()
        args = [given[x["argument"]] if isinstance(x, dict) else x for x in args]
        return function(*args, **named), [x if isinstance(x, np.ndarray) else 0 for x in args]

    return called


@dataclass
class Run:
    """One metered run of a student's function: what it left in HBM, and the meter."""

    outputs: dict[str, np.ndarray]
    meter: Meter


def metered(function: Callable, case, inputs: dict, outputs: dict, **options) -> Run:
    """Run a student's function on watched tensors; outputs start as NaN. Both dicts: {name: (array, axis)}."""
    meter = Meter(case.B_r, case.B_c)
    placed = [Placed(name, array, meter, axis) for name, (array, axis) in (inputs | outputs).items()]
    tensors = [(number, x.shape) for number, x in enumerate(placed)]
    beside(probes.metered, function, Chip(meter, placed).do, tensors, case.B_r, case.B_c, **options)
    if meter.largest_on_chip >= case.N_q * case.N_k:  # as large as S, which the exercise is about not building
        size = f"{meter.largest_on_chip} elements in one array, and N_q × N_k = {case.N_q * case.N_k}"
        raise NotAllowed(f"the score matrix was built: {size}")
    return Run({name: array for name, (array, _) in outputs.items()}, meter)
