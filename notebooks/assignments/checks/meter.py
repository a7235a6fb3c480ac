"""A Trace that knows which tile a load belongs to, from the rows that were asked for: students call no loop helpers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa2_lab.trace import HbmTensor, Trace

from . import probes
from .guard import beside
from .probes import NotAllowed
from .report import parts


class Placed(HbmTensor):
    """An HBM tensor as a student's code reaches it, from wherever it runs: rows by a load, rows by a store.

    Each moves the meter to the block that was asked for: along queries (axis "i") or along keys (axis "j").
    """

    def __init__(self, name: str, array: np.ndarray, trace: Meter, axis: str):
        super().__init__(name, array, trace)
        self.axis = axis

    def _go_to(self, where) -> None:
        """Move the meter to these rows; an index is no longer than the tensor."""
        asked = max(np.size(x) for x in (where if isinstance(where, tuple) else (where,)))
        if asked > self.shape[0]:
            raise ValueError(f"an index of {asked:,} entries; {self.name} has {self.shape[0]} rows")
        rows = np.arange(self.shape[0])[where[0] if isinstance(where, tuple) else where]
        if np.size(rows):
            self.trace._at[self.axis] = int(np.min(rows)) // self.trace.block[self.axis]

    def load(self, where) -> np.ndarray:
        self._go_to(where)
        block = np.array(self[where])
        self.trace.largest_load = max(self.trace.largest_load, (block.size, self.name))
        return block

    def store(self, where, value) -> None:
        self._go_to(where)
        self[where] = value


class Meter(Trace):
    """Counts like a Trace; i and j are read off the rows of Q and of K that were last asked for."""

    def __init__(self, B_r: int, B_c: int):
        super().__init__()
        self.block = {"i": B_r, "j": B_c}
        self.largest_load = (0, "")

    def tiles(self, tensor: str) -> list[tuple[int, int]]:
        """The tiles (i, j) for which a tensor was loaded, in order."""
        return [(e.i, e.j) for e in self.events if e.op == "load" and e.tensor == tensor]


@dataclass
class Run:
    """One metered run of a student's function: what it left in HBM, and the meter."""

    outputs: dict[str, np.ndarray]
    meter: Meter


def metered(function: Callable, case, inputs: dict, outputs: dict, **options) -> Run:
    """Run a student's function on watched tensors; outputs start as NaN. Both dicts: {name: (array, axis)}."""
    meter = Meter(case.B_r, case.B_c)
    placed = [Placed(name, array, meter, axis) for name, (array, axis) in (inputs | outputs).items()]
    tensors = [(x.name, x.shape, x) for x in placed]
    operations, largest = parts("", beside(probes.metered, function, tensors, case.B_r, case.B_c, **options), 2)
    for kind, n in dict(operations).items():
        meter.work[((), None, None, str(kind))] += int(n)
    meter.largest_on_chip = int(largest)
    refuse_score_matrix(meter, case.N_q, case.N_k)
    return Run({name: array for name, (array, _) in outputs.items()}, meter)


def refuse_score_matrix(meter: Meter, N_q: int, N_k: int) -> None:
    """An array as large as S, computed in one piece: what the exercise is about not building."""
    if meter.largest_on_chip >= N_q * N_k:
        size = f"{meter.largest_on_chip} elements in one array, where N_q × N_k = {N_q * N_k}"
        raise NotAllowed(f"the score matrix was built: {size}")
