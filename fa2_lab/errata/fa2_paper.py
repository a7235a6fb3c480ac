"""Mistakes in sections 2 and 3 of the FlashAttention-2 paper. Mistakes marked "(arXiv)" are not in the ICLR version."""

import numpy as np

from fa2_lab.errata.cases import Small, TwoBlocks, central_differences, distance
from fa2_lab.errata.erratum import Erratum

CASE = Small(N=8, d=4)
SQUARE = Small(N=5, d=5)  # N = d, so that a vector of the wrong length can still be broadcast
MASKED = Small(N=8, d=4, causal=True)
UNSCALED = Small(N=5, d=5, tau=1.0)  # N = d, so that the product Q dSᵀ is defined; no scale, as in the paper
TWO = TwoBlocks(CASE, cut=3)


# 2.2 and 2.3.1: the background ----------------------------------------------------------------------------------

DK = Erratum(
    id="fa2-dK",
    source="FA2 paper, section 2.2 (arXiv); lecture notes on FA2, standard attention",
    claim="dK = Q dSᵀ.",
    why="The shapes only fit if N = d, and even then the result is wrong, because dK_j sums dS_ij q_i over the queries "
    "i. The ICLR version has dSᵀ Q.",
    instead="dK = dSᵀ Q.",
    met="Dao-AILab/flash-attention #373",
    wrong=lambda: UNSCALED.Q @ UNSCALED.dS.T,
    right=lambda: UNSCALED.dS.T @ UNSCALED.Q,
    error=lambda dK: distance(dK, UNSCALED.dK),
    tolerance=1e-7,
)


def loss(O: np.ndarray) -> float:
    """Return an arbitrarily chosen scalar loss for the output O."""
    return float((CASE.dO * O).sum())


DO = Erratum(
    id="fa2-dO",
    source="FA2 paper, section 2.2; lecture notes on FA2, standard attention",
    claim="dO is the gradient of O with respect to the loss: ∂O/∂φ.",
    why="dO measures how the loss changes with O, not how O changes with the loss. Central differences give ∂φ/∂O.",
    instead="dO is the gradient of the loss with respect to O.",
    wrong=lambda: 1 / CASE.dO,  # the implied value of ∂O/∂φ, entry by entry
    right=lambda: CASE.dO,
    error=lambda dO: distance(dO, central_differences(loss, CASE.O)),
    tolerance=1e-7,
)


def both_blocks(second_factor: float | np.ndarray) -> np.ndarray:
    """Return diag(ℓ)⁻¹ e^(S¹ − m) V¹ + second_factor · e^(S² − m) V².

    With second_factor = 1 / ℓ, this is the output of the two-block example.
    """
    return np.exp(TWO.S1 - TWO.m2) @ TWO.V1 / TWO.l2 + second_factor * (TWO.e2 @ TWO.V2)


SECOND_BLOCK = Erratum(
    id="fa2-second-block",
    source="FA2 paper, section 2.3.1; lecture notes on FA2, online softmax",
    claim="O = diag(ℓ)⁻¹ e^(S¹ − m) V¹ + e^(S² − m) V².",
    why="Since P = diag(ℓ)⁻¹ [e^(S¹ − m), e^(S² − m)], both halves must be divided by ℓ.",
    instead="O = diag(ℓ)⁻¹ (e^(S¹ − m) V¹ + e^(S² − m) V²).",
    wrong=lambda: both_blocks(1.0),
    right=lambda: both_blocks(1 / TWO.l2),
    error=lambda O: distance(O, TWO.O),
)


# 3.1.1: the first tweak and the two-block example -------------------------------------------------------------


def divided_at_the_end(factor: np.ndarray) -> np.ndarray:
    """Return (factor · O¹ + e^(S² − m²) V²) / ℓ².

    With factor = ℓ¹ e^(m¹ − m²), this is the output of the two-block example with tweak 1.
    """
    return (factor * TWO.O1 + TWO.e2 @ TWO.V2) / TWO.l2


TWEAK_1 = Erratum(
    id="fa2-tweak1",
    source="FA2 paper, section 3.1.1",
    claim="Un-scaled output after the second block: Õ² = diag(ℓ¹)⁻¹ O¹ + exp(S² − m²) V².",
    why="O¹ is already divided by ℓ¹ and is relative to the maximum m¹, so a second division makes it more wrong.",
    instead="Õ² = diag(ℓ¹ e^(m¹ − m²)) O¹ + exp(S² − m²) V², which undoes the division and rescales to m².",
    met="Dao-AILab/flash-attention #991, #1349",
    wrong=lambda: divided_at_the_end(1 / TWO.l1),
    right=lambda: divided_at_the_end(TWO.l1 * np.exp(TWO.m1 - TWO.m2)),
    error=lambda O: distance(O, TWO.O),
)


def divided_in_every_step(factor: np.ndarray) -> np.ndarray:
    """Return factor · O¹ + e^(S² − m²) V² / ℓ².

    With factor = (ℓ¹ / ℓ²) e^(m¹ − m²), this is the output of the two-block example without tweak 1.
    """
    return factor * TWO.O1 + TWO.e2 @ TWO.V2 / TWO.l2


TWO_TERMS = Erratum(
    id="fa2-two-terms",
    source="FA2 paper, section 3.1.1 (arXiv)",
    claim="Scaled output after the second block: O² = diag(ℓ¹ / ℓ²)⁻¹ O¹ + diag(ℓ²)⁻¹ exp(S² − m²) V².",
    why="The ratio is upside down, and the rescaling from the old maximum to the new one is missing. The ICLR version "
    "corrects the ratio, but the rescaling is still missing. Section 2.3.1 ends with the same equation.",
    instead="O² = diag((ℓ¹ / ℓ²) e^(m¹ − m²)) O¹ + diag(ℓ²)⁻¹ exp(S² − m²) V².",
    met="Dao-AILab/flash-attention #411, #897, #1349, #2342",
    wrong=lambda: divided_in_every_step(TWO.l2 / TWO.l1),
    right=lambda: divided_in_every_step(TWO.l1 / TWO.l2 * np.exp(TWO.m1 - TWO.m2)),
    error=lambda O: distance(O, TWO.O),
)


def with_probabilities(p2: np.ndarray) -> np.ndarray:
    """Return the output of the two-block example, with p2 as the second block's P̃²."""
    unscaled = np.exp(TWO.m1 - TWO.m2) * (TWO.e1 @ TWO.V1) + p2 @ TWO.V2
    return unscaled / TWO.l2


P_TILDE = Erratum(
    id="fa2-P-tilde",
    source="FA2 paper, section 3.1.1",
    claim="In the two-block example, P̃² = diag(ℓ²)⁻¹ exp(S² − m²).",
    why="This is FA1's definition. In FA2, it would divide the second block twice, and line 9 of Algorithm 1 does not "
    "divide.",
    instead="P̃² = exp(S² − m²), and the only division by ℓ² comes at the end.",
    met="Dao-AILab/flash-attention #991",
    wrong=lambda: with_probabilities(TWO.e2 / TWO.l2),
    right=lambda: with_probabilities(TWO.e2),
    error=lambda O: distance(O, TWO.O),
)


def from_scores(s1: np.ndarray, s2: np.ndarray) -> np.ndarray:
    """Return (e^(s1 − m) V¹ + e^(s2 − m) V²) / ℓ. s1 and s2 are the scores of whole blocks, or of a single row."""
    e1, e2 = np.exp(s1 - TWO.m2), np.exp(s2 - TWO.m2)
    return (e1 @ TWO.V1 + e2 @ TWO.V2) / TWO.l2


SMALL_S = Erratum(
    id="fa2-small-s",
    source="FA2 paper, section 3.1.1 (arXiv); lecture notes on FA2, online softmax",
    claim="Õ² = e^(s¹ − m) V¹ + e^(s² − m) V², with a small s.",
    why="A small letter is a row in these papers (q_i, k_j), and one row of scores cannot replace the whole block.",
    instead="Õ² = e^(S¹ − m) V¹ + e^(S² − m) V².",
    wrong=lambda: from_scores(TWO.S1[0], TWO.S2[0]),
    right=lambda: from_scores(TWO.S1, TWO.S2),
    error=lambda O: distance(O, TWO.O),
)


# 3.1.1: the causal mask ---------------------------------------------------------------------------------------


MASK_BLOCKS = Erratum(
    id="fa2-mask-blocks",
    source="FA2 paper, section 3.1.1; lecture notes on FA2, causal masking",
    claim="Blocks whose row indices are all smaller than their column indices need no causal mask.",
    why="All keys of such a block are in the future of every row, so it must be skipped. Computed without a mask, it "
    "leaks the future.",
    instead="A block needs no mask if its largest column index is at most its smallest row index.",
    wrong=lambda: MASKED.computed("tiles-past"),
    right=MASKED.computed,
    error=lambda O: distance(O, MASKED.O),
)


# 3.1.1 and 3.1.2: the algorithms ------------------------------------------------------------------------------


INVERSE = Erratum(
    id="fa2-inverse",
    source="FA2 paper, section 3.1.1, Algorithm 1, line 10 (arXiv); "
    "bilingual notes on FA2, Algorithm 1 (forward), line 10, in both languages",
    claim="O^(j) = diag(exp(m^(j−1) − m^(j)))⁻¹ O^(j−1) + P V_j.",
    why="The accumulator must shrink when the maximum grows, but the inverse makes it grow. At the first tile, where "
    "m^(0) = −∞, it gives 1/0 · 0 = NaN (here: the second tile). The ICLR version has no inverse, but line 21 of "
    "FlashAttention-3's Algorithm 1 had it again (Dao-AILab/flash-attention #1303).",
    instead="No inverse: O^(j) = diag(exp(m^(j−1) − m^(j))) O^(j−1) + P V_j.",
    met="Dao-AILab/flash-attention #333, #417, #991; kyegomez/FlashAttention20 #3",
    wrong=lambda: CASE.computed("o-upside-down", B=4),
    right=lambda: CASE.computed(B=4),
    error=lambda O: distance(O, TWO.O),
)


BLOCK_INDEX = Erratum(
    id="fa2-block-index",
    source="FA2 paper, section 3.1.1, Algorithm 1, line 2",
    claim="O is divided into the blocks O_i, …, O_{T_r}, and L into L_i, …, L_{T_r}.",
    why="i belongs to a loop that has not begun yet, and unless i = 1, the blocks do not cover O (here i = 2).",
    instead="O_1, …, O_{T_r} and L_1, …, L_{T_r}.",
    wrong=lambda: len(range(2, 8)),  # the number of rows of O covered by blocks of two rows
    right=lambda: len(range(0, 8)),
    error=lambda rows: abs(rows - CASE.N),
    unit="rows",
)


def gradients_with(D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return dQ and dK as computed from dS = P ∘ (dP − D) with the given D."""
    dS = SQUARE.P * (SQUARE.dO @ SQUARE.V.T - D)
    return SQUARE.tau * dS @ SQUARE.K, SQUARE.tau * dS.T @ SQUARE.Q


D_SHAPE = Erratum(
    id="fa2-D-shape",
    source="FA2 paper, section 3.1.2, Algorithm 2, line 4",
    claim="D = rowsum(dO ∘ O) is a vector of R^d.",
    why="A row sum has one number for each of the N rows, whereas a vector of d numbers would be a column sum.",
    instead="D ∈ R^N, subtracted from every entry of its row.",
    met="Dao-AILab/flash-attention #2555",
    wrong=lambda: gradients_with((SQUARE.dO * SQUARE.O).sum(axis=0)),
    right=lambda: gradients_with((SQUARE.dO * SQUARE.O).sum(axis=1)[:, None]),
    error=lambda gradients: max(map(distance, gradients, (SQUARE.dQ, SQUARE.dK))),
    tolerance=1e-7,
)


ROW_ELEMENTS = {"Q": CASE.d, "O": CASE.d, "dO": CASE.d, "dQ": CASE.d, "L": 1, "D": 1}


def inner_step(
    Q: np.ndarray, O: np.ndarray, dO: np.ndarray, dQ: np.ndarray, L: np.ndarray, D: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Run lines 10 to 16 of FA2's Algorithm 2 on one tile and return dV, dQ and dK.

    The argument dQ, which line 9 loads, is not used, because line 15 loads dQ_i itself.
    """
    P = np.exp(CASE.tau * Q @ CASE.K.T - L)
    dS = P * (dO @ CASE.V.T - D)
    return P.T @ dO, np.zeros_like(Q) + CASE.tau * dS @ CASE.K, CASE.tau * dS.T @ Q


def used_elements() -> int:
    """Return the number of elements per row that the inner step actually uses from the tensors it loads.

    A tensor counts as used if filling it with NaN changes the results.
    """
    D = (CASE.dO * CASE.O).sum(axis=1, keepdims=True)
    loaded = dict(Q=CASE.Q, O=CASE.O, dO=CASE.dO, dQ=np.zeros_like(CASE.Q), L=TWO.L, D=D)
    poisoned = {name: loaded | {name: np.full_like(loaded[name], np.nan)} for name in loaded}
    matters = [name for name in loaded if any(np.isnan(x).any() for x in inner_step(**poisoned[name]))]
    return sum(ROW_ELEMENTS[name] for name in matters)


LOADS = Erratum(
    id="fa2-loads",
    source="FA2 paper, section 3.1.2, Algorithm 2, line 9",
    claim="Each inner step loads Q_i, O_i, dO_i, dQ_i, L_i and D_i.",
    why="O_i is only needed for D, which line 4 has already computed, and dQ_i is only needed in line 15. "
    "With NaN in their place, the results do not change.",
    instead="Load Q_i, dO_i, L_i and D_i, which are 2d + 2 elements per row instead of 4d + 2. (Line 15 loads dQ_i.)",
    wrong=lambda: sum(ROW_ELEMENTS.values()),
    right=lambda: sum(ROW_ELEMENTS[name] for name in ("Q", "dO", "L", "D")),
    error=lambda elements: abs(elements - used_elements()),
    unit="elements per row",
)


DQ_RACE = Erratum(
    id="fa2-dQ-race",
    source="FA2 paper, section 3.1.2, Algorithm 2, line 15",
    claim="Algorithm 2 by itself loads dQ_i, adds to it and writes it back, while column blocks run in parallel.",
    why="Blocks that load the same old dQ_i overwrite each other, and only the last result remains. Section 3.2 of the "
    "paper does use atomic adds, but the algorithm does not mention them.",
    instead="Add atomically, or compute dQ in a separate pass with rows in the outer loop.",
    met="Dao-AILab/flash-attention #1245, #1496",
    wrong=lambda: CASE.computed("dQ-set", output="dQ"),  # workers start from 0, so only the last worker's sum remains
    right=lambda: CASE.computed(output="dQ"),
    error=lambda dQ: distance(dQ, CASE.dQ),
    tolerance=1e-7,
)

SCALE = Erratum(
    id="fa2-scale",
    source="FA2 paper, sections 3.1.1 and 3.1.2, Algorithms 1 and 2",
    claim="The algorithms by themselves have S = Q Kᵀ, dQ = dS K and dK = dSᵀ Q, without the softmax scale.",
    why="The paper leaves the scale out on purpose, as section 2.2 states. With S = τ Q Kᵀ, where τ is usually 1/√d, "
    "the chain rule also gives dQ and dK a factor of τ.",
    instead="S = τ Q Kᵀ, dQ = τ dS K, dK = τ dSᵀ Q.",
    wrong=lambda: (CASE.Q @ CASE.K.T, CASE.dS @ CASE.K, CASE.dS.T @ CASE.Q),
    right=lambda: (CASE.tau * CASE.Q @ CASE.K.T, CASE.tau * CASE.dS @ CASE.K, CASE.tau * CASE.dS.T @ CASE.Q),
    error=lambda found: max(map(distance, found, (CASE.S, CASE.dQ, CASE.dK))),
    tolerance=1e-7,
)


S_INDEX = Erratum(
    id="fa2-S-index",
    source="FA2 paper, section 3.1.2, Algorithm 2, line 11",
    claim="P_i^(j) = exp(S_ij − L_i).",
    why="Where the paper describes masks, S_ij is the single entry in row i and column j, while the tile is S_i^(j).",
    instead="P_i^(j) = exp(S_i^(j) − L_i), with the tile of line 10.",
    wrong=lambda: np.exp(CASE.S[1, 2] - TWO.L[2:4]) * np.ones((2, 2)),  # i = 1, j = 2, counted from 0
    right=lambda: np.exp(CASE.S[2:4, 4:6] - TWO.L[2:4]),
    error=lambda P: distance(P, CASE.P[2:4, 4:6]),
)


ERRATA = (
    *(DK, DO, SECOND_BLOCK, TWEAK_1, TWO_TERMS, P_TILDE, SMALL_S, MASK_BLOCKS),
    *(INVERSE, BLOCK_INDEX, D_SHAPE, LOADS, DQ_RACE, SCALE, S_INDEX),
)
