"""Slips in the lecture notes on FlashAttention-2."""

from __future__ import annotations

import numpy as np

from fa2_lab.errata.cases import Case, TwoBlocks, central_differences, distance
from fa2_lab.errata.erratum import Erratum

CASE = Case(N=8, d=4)
SQUARE = Case(N=5, d=5, tau=1.0)  # N = d, so that Q dSᵀ exists at all; the notes have no scale
TWO = TwoBlocks(CASE, cut=3)

DK = Erratum(
    id="notes-dK",
    source="lecture notes on FA2, standard attention",
    claim="dK = Q dSᵀ.",
    why="The shapes only fit when N = d, and even then the numbers are others: dK_j sums dS_ij q_i over the queries i.",
    instead="dK = dSᵀ Q.",
    wrong=lambda: SQUARE.Q @ SQUARE.dS.T,
    right=lambda: SQUARE.dS.T @ SQUARE.Q,
    error=lambda dK: distance(dK, SQUARE.dK),
    tolerance=1e-7,
)


def both_blocks(second_factor) -> np.ndarray:
    """diag(ℓ)⁻¹ e^(S¹ − m) V¹ plus the second block times a factor."""
    return np.exp(TWO.S1 - TWO.m2) @ TWO.V1 / TWO.l2 + second_factor * (TWO.e2 @ TWO.V2)


SECOND_BLOCK = Erratum(
    id="notes-second-block",
    source="lecture notes on FA2, online softmax",
    claim="O = diag(ℓ)⁻¹ e^(S¹ − m) V¹ + e^(S² − m) V².",
    why="P = diag(ℓ)⁻¹ [e^(S¹ − m), e^(S² − m)]: both halves are divided by ℓ.",
    instead="O = diag(ℓ)⁻¹ (e^(S¹ − m) V¹ + e^(S² − m) V²).",
    wrong=lambda: both_blocks(1.0),
    right=lambda: both_blocks(1 / TWO.l2),
    error=lambda O: distance(O, TWO.O),
)


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


def loss(O: np.ndarray) -> float:
    """Any scalar loss of the output will do."""
    return float((CASE.dO * O).sum())


DO = Erratum(
    id="notes-dO",
    source="lecture notes on FA2, standard attention",
    claim="dO is the gradient of O with respect to the loss: ∂O/∂φ.",
    why="It says how the loss answers to O, not O to the loss. Central differences of the loss give ∂φ/∂O.",
    instead="dO is the gradient of the loss with respect to O.",
    wrong=lambda: 1 / CASE.dO,  # what ∂O/∂φ would be, entry by entry
    right=lambda: CASE.dO,
    error=lambda dO: distance(dO, central_differences(loss, CASE.O)),
    tolerance=1e-7,
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

ERRATA = (DK, SECOND_BLOCK, EVERY_LOOP, DO, WARPS)
