"""Slips in the lecture notes on FlashAttention-2."""

from __future__ import annotations

import numpy as np

from fa2_lab.errata.cases import Case, distance
from fa2_lab.errata.erratum import Erratum

CASE = Case(N=8, d=4)


def un_scaled_loop(divide_every_time: bool) -> np.ndarray:
    """FA2's inner loop over four tiles, dividing by ℓ at the end of each step or after the last one."""
    m, l, o = np.full((8, 1), -np.inf), np.zeros((8, 1)), np.zeros((8, 4))
    for cols in np.split(np.arange(8), 4):
        m_new = np.maximum(m, CASE.S[:, cols].max(axis=1, keepdims=True))
        p, alpha = np.exp(CASE.S[:, cols] - m_new), np.exp(m - m_new)
        m, l, o = m_new, alpha * l + p.sum(axis=1, keepdims=True), alpha * o + p @ CASE.V[cols]
        if divide_every_time:
            o = o / l
    return o if divide_every_time else o / l


EVERY_LOOP = Erratum(
    id="notes-every-loop",
    source="lecture notes on FA2, algorithm",
    claim="The un-scaled output is divided by ℓ at the end of every loop.",
    why="The next step would add an un-scaled block to a scaled one. The division waits until the last tile.",
    instead="Once for each row block, after its last tile.",
    wrong=lambda: un_scaled_loop(divide_every_time=True),
    right=lambda: un_scaled_loop(divide_every_time=False),
    error=lambda O: distance(O, CASE.O),
)


WARP_SIZE, BLOCK_OF_FIGURE_3 = 32, 128  # threads in a warp; threads in a block of four warps

WARPS = Erratum(
    id="notes-warps",
    source="lecture notes on FA2, execution model",
    claim="The warps in a thread communicate through shared memory.",
    why="A thread is a 32nd part of a warp. Figure 3 has four warps in a thread block of 128 threads.",
    instead="The warps in a thread block.",
    wrong=lambda: 1 / WARP_SIZE,  # warps in a thread
    right=lambda: BLOCK_OF_FIGURE_3 / WARP_SIZE,  # warps in a thread block
    error=lambda warps: abs(warps - 4),
)

ERRATA = (EVERY_LOOP, WARPS)
