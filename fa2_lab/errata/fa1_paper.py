"""Mistakes in the FlashAttention paper, appendices B and C."""

from collections.abc import Callable

import numpy as np

from fa2_lab.errata.cases import Small, TwoBlocks, distance
from fa2_lab.errata.erratum import Erratum
from fa2_lab.reference import fa1
from fa2_lab.reference.dropout import Dropout, sequential_mask
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.tiles import Tiling, cdiv
from fa2_lab.trace import Trace

CASE = Small(N=8, d=4)
SQUARE = Small(N=5, d=5)
TWO = TwoBlocks(CASE, cut=3)


def scores(q_of: Callable[[int], np.ndarray], k_of: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return the matrix S_ij = q_i · k_j, with q_i = q_of(i) and k_j = k_of(j)."""
    return np.array([[q_of(i) @ k_of(j) for j in range(SQUARE.N)] for i in range(SQUARE.N)])


COLUMNS = Erratum(
    id="fa1-columns",
    source="FA1 paper, appendix B.1",
    claim="q_i, k_j, v_j and o_i are columns of Q, K, V and O.",
    why="Q is N × d, with one query per row. With columns, S_ij = q_i · k_j gives Qᵀ K, a d × d matrix.",
    instead="They are rows.",
    met="Dao-AILab/flash-attention #786",
    wrong=lambda: scores(lambda i: SQUARE.Q[:, i], lambda j: SQUARE.K[:, j]),
    right=lambda: scores(lambda i: SQUARE.Q[i], lambda j: SQUARE.K[j]),
    error=lambda S: distance(SQUARE.tau * S, SQUARE.S),
)

PROOF = Erratum(
    id="fa1-proof",
    source="FA1 paper, appendix C, proof of Theorem 1",
    claim="After j column blocks, P V = diag(ℓ) exp(S − m) V.",
    why="Softmax divides by its sum. The next steps of the proof also need the inverse, so that diag(ℓ) cancels.",
    instead="P V = diag(ℓ)⁻¹ exp(S − m) V.",
    met="Dao-AILab/flash-attention #273, #301, #439, #627",
    wrong=lambda: TWO.l1 * (TWO.e1 @ TWO.V1),  # the claimed value after the first of two blocks
    right=lambda: TWO.e1 @ TWO.V1 / TWO.l1,
    error=lambda O: distance(O, safe_softmax(TWO.S1) @ TWO.V1),
)


M_ON_CHIP, HEAD = 24_576, 128  # 96 KiB of fp32


def needed_on_chip(B: int, backward: bool) -> int:
    """Return the number of elements that a step with B × B tiles keeps on chip: q, o, k, v, s, l and m.

    A step of the backward pass also keeps do, dq, dk, dv and dp.
    """
    blocks, tiles = (8, 2) if backward else (4, 1)
    return blocks * B * HEAD + tiles * B * B + 2 * B


def largest_block(backward: bool) -> int:
    """Return the largest B for which a step with B × B tiles fits on chip."""
    return max(B for B in range(1, HEAD + 1) if needed_on_chip(B, backward) <= M_ON_CHIP)


def misfit(B: int, backward: bool) -> float:
    """Return how far B is from the largest block size that fits on chip, as a fraction of M, or 0 if B is that size.

    If B is too large, the result is the overflow. If B is too small, it is the memory that B + 1 would leave unused.
    """
    over, under = needed_on_chip(B, backward) - M_ON_CHIP, M_ON_CHIP - needed_on_chip(B + 1, backward)
    return max(0, over, under) / M_ON_CHIP


BLOCK_SIZE = Erratum(
    id="fa1-block-size",
    source="FA1 paper, appendices B.3 and B.4, Algorithms 2 and 4, line 2",
    claim="Blocks of B_c = ⌈M / 4d⌉ and B_r = min(B_c, d) rows fit in M elements of on-chip memory, forward and "
    "backward.",
    why="Four blocks alone fill M. The score tile comes on top, and the backward pass holds eight blocks and two "
    "tiles.",
    instead="M / 4d up to a constant, namely the largest B with 4Bd + B² + 2B ≤ M (forward), 8Bd + 2B² + 2B ≤ M "
    "(backward).",
    met="Dao-AILab/flash-attention #618, #1704",
    wrong=lambda: (cdiv(M_ON_CHIP, 4 * HEAD), cdiv(M_ON_CHIP, 4 * HEAD)),
    right=lambda: (largest_block(backward=False), largest_block(backward=True)),
    error=lambda B: max(misfit(B[0], backward=False), misfit(B[1], backward=True)),
    unit="of M",
    tolerance=0.0,
)


def backward_flops(d: int) -> int:
    """Return the number of matmul FLOPs that the meter counts in FA1's Algorithm 4."""
    case, meter = Small(N=8, d=d), Trace()
    O, l, m = fa1.forward(case.Q, case.K, case.V, B_r=4, B_c=4)
    fa1.backward(case.Q, case.K, case.V, O, l, m, case.dO, B_r=4, B_c=4, trace=meter)
    return meter.matmul_flops


FLOPS = Erratum(
    id="fa1-flops",
    source="FA1 paper, appendix B.4; article on FA2, introduction",
    claim="The backward pass takes O(N²) FLOPs, so its cost does not depend on d.",
    why="Every entry of S is a dot product of length d. Doubling d doubles the metered matmul FLOPs.",
    instead="O(N² d) FLOPs.",
    wrong=lambda: (16 / 8) ** 0,  # the claimed growth of the FLOPs if d doubles
    right=lambda: (16 / 8) ** 1,
    error=lambda factor: abs(factor - backward_flops(16) / backward_flops(8)),
    unit="in the factor",
)

L_NAME = Erratum(
    id="fa1-L",
    source="FA1 paper, appendix B.1, beside FA2 paper, section 3.1.2, Algorithm 2, line 11",
    claim="L_i = Σ_j exp(S_ij), the same letter that FA2 subtracts inside the exponential.",
    why="FA1 divides by its L, whereas FA2 subtracts its L, which is the logarithm of FA1's. With FA1's L, P = exp(S − "
    "L) is wrong.",
    instead="L_i = log Σ_j exp(S_ij) throughout this project.",
    met="Dao-AILab/flash-attention #404, #1012",
    wrong=lambda: np.exp(CASE.S - np.exp(CASE.S).sum(axis=1, keepdims=True)),
    right=lambda: np.exp(CASE.S - np.log(np.exp(CASE.S).sum(axis=1, keepdims=True))),
    error=lambda P: distance(P, CASE.P),
)


GRID = Tiling(N_q=12, N_k=12, B_r=4, B_c=3)


def keyed_mask(order: str) -> np.ndarray:
    """Return a dropout mask from random numbers keyed by (row, column), drawn in the loop order of "fa1" or "fa2"."""
    dropout, kept = Dropout(p=0.5, seed=0), np.empty((GRID.N_q, GRID.N_k), dtype=bool)
    tiles = [(i, j) for i in range(GRID.T_r) for j in range(GRID.T_c)]
    for i, j in sorted(tiles, key=lambda tile: tile[::-1]) if order == "fa1" else tiles:
        place = GRID.rows(i), GRID.cols(j)
        kept[place] = dropout.drop(np.ones(kept[place].shape), *place) > 0
    return kept


DROPOUT_ORDER = Erratum(
    id="fa1-dropout-order",
    source="FA1 paper, appendices B.3 and B.4, Algorithms 2 and 4, line 1",
    claim="Saving the random generator's state is enough to draw the same dropout mask again in the backward pass.",
    why="A sequential generator only repeats itself if both passes visit the tiles in the same order. FA2's forward "
    "pass has rows in the outer loop and its backward pass has columns, so at p = 0.5 about half of the mask differs.",
    instead="Derive each random number from (seed, batch, head, row, column), so that the order does not matter.",
    met="Dao-AILab/flash-attention #612",
    wrong=lambda: tuple(sequential_mask(GRID, 0.5, seed=0, order=order) for order in ("fa2", "fa1")),
    right=lambda: (keyed_mask("fa2"), keyed_mask("fa1")),
    error=lambda masks: float((masks[0] != masks[1]).mean()),
    unit="of the entries",
    tolerance=0.0,
)


def empty_row(m_for_exp: Callable[[float], float]) -> np.ndarray:
    """Return the output of a row whose first tile is fully masked.

    The exponentials use m_for_exp(m) in place of the row maximum m.
    """
    s, v = np.array([-np.inf, -np.inf, 1.0, 2.0]), np.array([5.0, 5.0, 1.0, 3.0])
    m, l, o = -np.inf, 0.0, 0.0
    for tile in (slice(0, 2), slice(2, 4)):
        m_new = max(m, s[tile].max())
        p, alpha = np.exp(s[tile] - m_for_exp(m_new)), np.exp(m - m_for_exp(m_new))
        m, l, o = m_new, alpha * l + p.sum(), alpha * o + p @ v[tile]
    return np.array([o / l])


EMPTY_ROWS = Erratum(
    id="fa1-empty-rows",
    source="FA1 paper, appendix B.3, Algorithm 2, line 12; FA2 paper, section 3.1.1, Algorithm 1, line 9",
    claim="P̃ = exp(S − m) with m = max(m, rowmax(S)), even if a mask hides the whole first tile of a row.",
    why="In that case m is −∞, and the exponent −∞ − (−∞) = NaN spreads to every later tile.",
    instead="Subtract 0 instead of m while m is −∞. Then exp(−∞ − 0) = 0, and a row that sees no key gets O = 0, L = "
    "−∞.",
    met="flashinfer-ai/flashinfer #4401; tracel-ai/burn #4697",
    wrong=lambda: empty_row(lambda m: m),
    right=lambda: empty_row(lambda m: 0.0 if np.isneginf(m) else m),
    error=lambda o: distance(o, [(np.exp(1) * 1 + np.exp(2) * 3) / (np.exp(1) + np.exp(2))]),
)


ERRATA = (COLUMNS, PROOF, BLOCK_SIZE, FLOPS, L_NAME, DROPOUT_ORDER, EMPTY_ROWS)
