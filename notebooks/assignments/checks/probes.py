"""What runs beside a student's code, in the same process: it holds no right value, it hands over what came.

A probe is `probe(theirs, *arguments)`; `guard.beside` runs it where the student's function is.
"""

from __future__ import annotations

import tracemalloc

import numpy as np

from fa2_lab.trace import HbmTensor, OnChip, Trace, _on_chip, _plain


class NotAllowed(Exception):
    """What came may be right, but was got in a way that the exercise rules out."""


class Watched(HbmTensor):
    """A tensor that lives on the grader's side: a load asks for its rows, a store sends them."""

    def __init__(self, name: str, shape: tuple, hbm, trace: Trace):
        self.name, self.shape, self.dtype = name, tuple(shape), np.dtype(np.float64)
        self.hbm, self.trace = hbm, trace

    def __getitem__(self, where) -> OnChip:
        block = np.array(self.hbm.load(_plain_index(where)))
        self.trace._record("load", self.name, block.size)
        return _on_chip(block, self.trace)

    def __setitem__(self, where, value) -> None:
        self.hbm.store(_plain_index(where), np.array(_plain(value), dtype=np.float64))

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        raise NotAllowed(f"{self.name} was read without being loaded: index it, as in q_i = Q[rows]")


def _plain_index(where):
    return tuple(map(_plain, where)) if isinstance(where, tuple) else _plain(where)


def metered(function, tensors: list, *args, **options) -> tuple[dict, int]:
    """Run a function on watched tensors, given as (name, shape, hbm): operations by kind, and the largest array."""
    trace = Trace()
    watched = [Watched(name, shape, hbm, trace) for name, shape, hbm in tensors]
    function(*watched, *args, **options)
    return dict(trace.flops), trace.largest_on_chip


def peak(function, inputs: list, outputs: list, *args, **options) -> tuple[int, list]:
    """Run a function on plain arrays; outputs, given by their shapes, start as NaN. Its most bytes, and they."""
    outputs = [np.full(shape, np.nan) for shape in outputs]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        function(*inputs, *outputs, *args, **options)
        return tracemalloc.get_traced_memory()[1] - before, outputs
    finally:
        tracemalloc.stop()
