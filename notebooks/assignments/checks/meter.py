"""A Trace that knows which tile a load belongs to, from the rows that were asked for: students call no loop helpers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa2_lab.trace import HbmTensor, OnChip, Trace

from . import probes
from .guard import beside
from .probes import NotAllowed
from .report import parts


class PlacedTensor(HbmTensor):
    """An HBM tensor whose every use moves the meter to the block that was asked for."""

    def __init__(self, name: str, array: np.ndarray, trace: Meter, axis: str):
        super().__init__(name, array, trace)
        self.axis = axis

    def __getitem__(self, where) -> OnChip:
        self.trace.place(self.axis, where, self.shape[0])
        block = super().__getitem__(where)
        self.trace.largest_load = max(self.trace.largest_load, (np.size(block), self.name))
        return block

    def __setitem__(self, where, value) -> None:
        self.trace.place(self.axis, where, self.shape[0])
        super().__setitem__(where, value)


class Meter(Trace):
    """Counts like a Trace; i and j are read off the rows of Q and of K that were last asked for."""

    def __init__(self, B_r: int, B_c: int):
        super().__init__()
        self.block = {"i": B_r, "j": B_c}
        self.largest_load = (0, "")

    def tensors(self, axis: str, **arrays: np.ndarray) -> list[PlacedTensor]:
        """Tensors cut along queries (axis "i") or along keys (axis "j")."""
        return [PlacedTensor(name, array, self, axis) for name, array in arrays.items()]

    def place(self, axis: str, where, length: int) -> None:
        rows = np.arange(length)[where[0] if isinstance(where, tuple) else where]
        if np.size(rows):
            self._at[axis] = int(np.min(rows)) // self.block[axis]

    def tiles(self, tensor: str) -> list[tuple[int, int]]:
        """The tiles (i, j) for which a tensor was loaded, in order."""
        return [(e.i, e.j) for e in self.events if e.op == "load" and e.tensor == tensor]


@dataclass
class Run:
    """One metered run of a student's function: what it left in HBM, and the meter."""

    outputs: dict[str, np.ndarray]
    meter: Meter


class Hbm:
    """A watched tensor as a student's code reaches it, from wherever it runs: rows by a load, rows by a store."""

    def __init__(self, tensor: PlacedTensor):
        self._tensor = tensor

    def load(self, where) -> np.ndarray:
        asked = max(np.size(x) for x in (where if isinstance(where, tuple) else (where,)))
        if asked > self._tensor.shape[0]:
            raise ValueError(f"an index of {asked:,} entries; {self._tensor.name} has {self._tensor.shape[0]} rows")
        return np.array(self._tensor[where])

    def store(self, where, value) -> None:
        self._tensor[where] = value


def metered(function: Callable, case, inputs: dict, outputs: dict, **options) -> Run:
    """Run a student's function on watched tensors; outputs start as NaN. Both dicts: {name: (array, axis)}."""
    meter = Meter(case.B_r, case.B_c)
    arrays = {name: array for name, (array, _) in (inputs | outputs).items()}
    watched = [meter.tensors(axis, **{name: array})[0] for name, (array, axis) in (inputs | outputs).items()]
    tensors = [(x.name, x.shape, Hbm(x)) for x in watched]
    operations, largest = parts("", beside(probes.metered, function, tensors, case.B_r, case.B_c, **options), 2)
    for kind, n in probes.flops_of(operations).items():
        meter.work[((), None, None, kind)] += n
    meter.largest_on_chip = int(largest)
    refuse_score_matrix(meter, case.N_q, case.N_k)
    return Run({name: arrays[name] for name in outputs}, meter)


def refuse_score_matrix(meter: Meter, N_q: int, N_k: int) -> None:
    """An array as large as S, computed in one piece: what the exercise is about not building."""
    if meter.largest_on_chip >= N_q * N_k:
        size = f"{meter.largest_on_chip} elements in one array, where N_q × N_k = {N_q * N_k}"
        raise NotAllowed(f"the score matrix was built: {size}")
