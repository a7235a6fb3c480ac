"""Softmax over keys that are processed in blocks: a state with three fields and the operations on this state.

The same operation, `merge`, combines results across loop iterations, across the warps of a thread block, across key
splits on one GPU, and across the GPUs in a ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fa2_lab.reference.dropout import dropped


def finite(m: np.ndarray) -> np.ndarray:
    """Return the row maxima m, with 0 instead of −∞ for a row that has seen no key.

    The replacement is needed because exp(−∞ − 0) is 0, but exp(−∞ − (−∞)) is NaN.
    """
    return np.where(np.isneginf(m), 0.0, m)


def nonzero(l: np.ndarray) -> np.ndarray:
    """Return the row sums l, with 1 instead of 0 for a row that has seen no key, so that its O is 0 / 1 = 0."""
    return np.where(l == 0, 1.0, l)


def initial_state(sink: float | None = None) -> tuple[float, float]:
    """Return the initial (m, l) of a row: (−∞, 0) without a sink. With a sink, m = sink and l = exp(sink − m) = 1."""
    return (-np.inf, 0.0) if sink is None else (float(sink), 1.0)


@dataclass(frozen=True, eq=False)
class SoftmaxState:
    """The softmax state (o, m, l) of a set of rows after some of their keys have been processed.

    update() adds keys, and finalize() returns the output (o, L).
    """

    m: np.ndarray  # (B_r,)    the largest score so far
    l: np.ndarray  # (B_r,)    Σ exp(s − m)
    o: np.ndarray  # (B_r, d)  Σ exp(s − m) v, not divided by l

    @classmethod
    def empty(cls, rows: int, d: int, sink: float | None = None) -> SoftmaxState:
        """Return the state of `rows` rows that have seen no key.

        Without a sink, this state is the identity element of merge().
        """
        m, l = initial_state(sink)
        return cls(np.full(rows, m), np.full(rows, l), np.zeros((rows, d)))

    @classmethod
    def from_output(cls, o: np.ndarray, L: np.ndarray) -> SoftmaxState:
        """Return the state that is equivalent to an output o and its log-sum-exp L: m = L, l = 1, and o unchanged."""
        return cls(L, np.where(np.isneginf(L), 0.0, 1.0), o)

    def update(self, s: np.ndarray, v: np.ndarray, z: np.ndarray | None = None) -> SoftmaxState:
        """Return the state after one more block of scores s (B_r, B_c) and values v (B_c, d).

        z contains the dropout factors (B_r, B_c) and is None if there is no dropout.
        """
        m = np.maximum(self.m, s.max(axis=1))  # (B_r,)
        p = np.exp(s - finite(m)[:, None])  # (B_r, B_c)
        alpha = np.exp(self.m - finite(m))  # (B_r,): 1 unless the maximum grows
        l = alpha * self.l + p.sum(axis=1)  # (B_r,)
        o = alpha[:, None] * self.o + dropped(p, z) @ v  # (B_r, d)
        return SoftmaxState(m, l, o)

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Return the state that has seen the keys of both states. Merging is associative and commutative."""
        m = np.maximum(self.m, other.m)
        alpha, beta = np.exp(self.m - finite(m)), np.exp(other.m - finite(m))
        l = alpha * self.l + beta * other.l
        o = alpha[:, None] * self.o + beta[:, None] * other.o
        return SoftmaxState(m, l, o)

    def finalize(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (o, L): the output rows and their log-sum-exp. Rows that have seen no key have o = 0 and L = −∞."""
        l = nonzero(self.l)
        o = (1 / l)[:, None] * self.o  # (B_r, d)
        L = self.m + np.log(l)  # (B_r,)
        return o, L


def incremental(blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> SoftmaxState:
    """Return the softmax state after processing all blocks one after another, as in FlashAttention.

    A block is (s, v): the scores (B_r, B_c) and the values (B_c, d).
    """
    state = None
    for s, v in blocks:
        state = (state or SoftmaxState.empty(len(s), v.shape[1])).update(s, v)
    if state is None:
        raise ValueError("blocks: got none; it takes at least one pair (s, v)")
    return state
