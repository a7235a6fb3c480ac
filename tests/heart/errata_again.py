"""Every erratum computed a second time, beside the words that say it.

Each row has the words of the wrong version and of the right one, as they stand in the erratum, and what they come to,
computed here from the inputs alone: a formula by reading the words themselves, anything else by loops, by torch's
autograd or by counting. A row is reviewed as a whole: whoever changes words changes what stands beside them.
"""

import re
from typing import NamedTuple

import numpy as np
import torch
from paper_words import Values, python_of

from fa2_lab.errata.cases import Case
from fa2_lab.reference.dropout import keep_mask

CASE, SQUARE, MASKED = Case(N=8, d=4), Case(N=5, d=5), Case(N=8, d=4, causal=True)
CUT = 3  # the keys of block 1 in the examples with two blocks


class Again(NamedTuple):
    """One erratum: the words of its wrong version and what they come to, and the same of its right version."""

    claim: str
    wrong: object
    instead: str
    right: object


# Formulas, read as they are worded ------------------------------------------------------------------------------

SUPERSCRIPTS = {"ℓ¹": "l1", "ℓ²": "l2", "m¹": "m1", "m²": "m2", "S¹": "S1", "S²": "S2", "V¹": "V1", "V²": "V2"}
SUPERSCRIPTS |= {"O¹": "O1", "s¹": "s1", "s²": "s2", "ℓ": "l2", "m^(j−1)": "m1", "m^(j)": "m2", "O^(j−1)": "o1"}
SUPERSCRIPTS |= {"V_j": "V2"}


def read(formula: str, **names) -> np.ndarray:
    """The right-hand side of a formula for given variables; diag(x)⁻¹ divides rows."""
    formula = formula.split(" = ", 1)[1].rstrip(".,")
    for printed, name in sorted(SUPERSCRIPTS.items(), key=lambda pair: -len(pair[0])):
        formula = formula.replace(printed, name)
    formula = re.sub(r"diag(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))⁻¹", r"(1 / \1)", formula)
    formula = re.sub(r"diag(?=\()", "", formula)
    functions = {"exp": lambda a: Values(np.exp(a.x)), "number": Values}
    return eval(python_of(formula), functions | {name: Values(x) for name, x in names.items()}).x


def two_blocks() -> dict:
    """Scores, values and statistics of the two-block example, row by row, key by key."""
    S = CASE.tau * CASE.Q @ CASE.K.T
    s1, s2 = S[:, :CUT], S[:, CUT:]
    m1, m2 = (np.array([max(row) for row in s]) for s in (s1, S))
    l1 = np.array([sum(np.exp(x - m) for x in row) for row, m in zip(s1, m1, strict=True)])
    l2 = np.array([sum(np.exp(x - m) for x in row) for row, m in zip(S, m2, strict=True)])
    V1, V2 = CASE.V[:CUT], CASE.V[CUT:]
    o1 = np.array([sum(np.exp(x - m) * v for x, v in zip(r, V1, strict=True)) for r, m in zip(s1, m1, strict=True)])
    P = np.array([[np.exp(x - m) for x in row] for row, m in zip(s2, m2, strict=True)])
    one_row = dict(s1=np.tile(s1[0], (8, 1)), s2=np.tile(s2[0], (8, 1)))  # a small s: row 0 for every row
    return dict(S1=s1, S2=s2, V1=V1, V2=V2, m1=m1, m2=m2, m=m2, l1=l1, l2=l2, o1=o1, O1=o1 / l1[:, None], P=P) | one_row


def unscaled(formula: str) -> np.ndarray:
    """A formula for the un-scaled output, divided by ℓ² at the end."""
    names = two_blocks()
    return read(formula, **names) / names["l2"][:, None]


def with_P_tilde(formula: str) -> np.ndarray:
    """A formula for P̃², used in the un-scaled update."""
    names = two_blocks()
    part = read(formula, **names) @ names["V2"]
    return (np.exp(names["m1"] - names["m2"])[:, None] * names["o1"] + part) / names["l2"][:, None]


def each(words: str, **names) -> tuple:
    """Several formulas, as in "S = τ Q Kᵀ, dQ = τ dS K"."""
    return tuple(read(formula, **names) for formula in re.split(r", | and ", words.rstrip(".")))


# The dense result and its gradients, by torch -------------------------------------------------------------------


def by_torch(case: Case) -> dict:
    """S, P, O and the gradients of Σ dO ∘ O with respect to S, Q, K and V."""
    Q, K, V, dO = (torch.tensor(x, requires_grad=True) for x in (case.Q, case.K, case.V, case.dO))
    S = (case.tau * Q @ K.T).masked_fill(~torch.tensor(case.visible), -torch.inf)
    P = torch.softmax(S, dim=1)
    O = P @ V
    dS, dQ, dK, dV = torch.autograd.grad((dO * O).sum(), (S, Q, K, V))
    found = dict(S=S, P=P, O=O, dS=dS, dQ=dQ, dK=dK, dV=dV)
    return {name: x.detach().numpy() for name, x in found.items()}


def scaled(words: str) -> tuple:
    return each(words, Q=CASE.Q, K=CASE.K, dS=by_torch(CASE)["dS"], tau=CASE.tau)


def unscaled_gradient(words: str) -> np.ndarray:
    case = Case(N=5, d=5, tau=1.0)
    return read(words, Q=case.Q, dS=by_torch(case)["dS"])


def gradients_with_column_sums() -> tuple:
    """dQ and dK entry by entry, with D_j = Σ_i dO_ij O_ij, a vector of d numbers."""
    found, dP = by_torch(SQUARE), SQUARE.dO @ SQUARE.V.T
    D = [sum(SQUARE.dO[i, c] * found["O"][i, c] for i in range(5)) for c in range(5)]
    dS = np.array([[found["P"][i, j] * (dP[i, j] - D[j]) for j in range(5)] for i in range(5)])
    return SQUARE.tau * np.einsum("ij,jc->ic", dS, SQUARE.K), SQUARE.tau * np.einsum("ij,ic->jc", dS, SQUARE.Q)


def last_block_alone() -> np.ndarray:
    """dQ when the last of four column blocks overwrites the others: what its two keys contribute."""
    dS = by_torch(CASE)["dS"]
    return CASE.tau * sum(np.outer(dS[:, j], CASE.K[j]) for j in (6, 7))


# Masks ----------------------------------------------------------------------------------------------------------


def causal(visible) -> np.ndarray:
    """Attention of the masked case where visible(row, column) says so, row by row."""
    O = np.zeros((8, 4))
    for r in range(8):
        seen = [c for c in range(8) if visible(r, c)]
        weights = np.array([np.exp(MASKED.tau * MASKED.Q[r] @ MASKED.K[c]) for c in seen])
        O[r] = weights @ MASKED.V[seen] / weights.sum()
    return O


def zero_votes() -> np.ndarray:
    """Every hidden key counts as a score of zero."""
    score = np.where(np.tri(8), MASKED.tau * MASKED.Q @ MASKED.K.T, 0.0)
    return np.stack([np.exp(s) @ MASKED.V / np.exp(s).sum() for s in score])


def block(index: int) -> int:
    return index // 2  # tiles of 2 × 2


# Counting -------------------------------------------------------------------------------------------------------


def loops(order: str, N: int, B: int, snippet=False) -> int:
    """Elements that FA1's or FA2's loops move, block by block, with d = B_r = B_c = B."""
    moved, blocks = 0, range(N // B)
    if order == "fa1":
        moved += N * B + 2 * N  # O, l and m are cleared
        for _ in blocks:
            moved += 2 * B * B  # k, v
            for _ in blocks:
                moved += (B * B) + 2 * (B * B + 2 * B)  # q in; o, l, m in and out
        return moved
    for _ in blocks:
        moved += B * B + B * B + (0 if snippet else B)  # q in; o and L out
        for _ in blocks:
            moved += 2 * B * B
    return moved


def empty_first_tile() -> float:
    """A row that sees only two keys, with scores 1 and 2 and values 1 and 3."""
    a, b = np.exp(1.0), np.exp(2.0)
    return np.array([(a * 1 + b * 3) / (a + b)])


def largest(fits) -> int:
    return max(B for B in range(1, 129) if fits(B))


def one_generator(order: str) -> np.ndarray:
    """A dropout mask of 12 × 12 from a sequential generator, drawn in tiles of 4 × 3."""
    draw, keep = np.random.default_rng(0).random, np.zeros((12, 12), dtype=bool)
    tiles = (
        [(i, j) for i in range(3) for j in range(4)] if order == "fa2" else [(i, j) for j in range(4) for i in range(3)]
    )
    for i, j in tiles:
        keep[4 * i : 4 * i + 4, 3 * j : 3 * j + 3] = draw((4, 3)) >= 0.5
    return keep


def keyed_generator() -> np.ndarray:
    """The mask of the generator that is keyed by row and column, drawn as a whole."""
    return keep_mask(0.5, 0, 0, 0, np.arange(12), np.arange(12))


def forward_traffic(B_r: int, N=8, d=4) -> int:
    """FA2's forward: Q, O and L once, K and V once for each row block."""
    return N * d + N * d + N + (N // B_r) * 2 * N * d


def least_busy(share) -> float:
    return min(share(n) for n in range(80, 217))


def four_blocks(divide: bool) -> np.ndarray:
    """FA2's loop over four blocks of two keys, one row at a time; divided in every step or at the end."""
    S, O = CASE.tau * CASE.Q @ CASE.K.T, np.zeros((8, 4))
    for r in range(8):
        m, l, o = -np.inf, 0.0, np.zeros(4)
        for j in range(0, 8, 2):
            m_new = max(m, S[r, j], S[r, j + 1])
            shrink = np.exp(m - m_new)
            m, l, o = m_new, l * shrink, o * shrink
            for c in (j, j + 1):
                l, o = l + np.exp(S[r, c] - m), o + np.exp(S[r, c] - m) * CASE.V[c]
            o = o / l if divide else o
        O[r] = o if divide else o / l
    return O


FOUR_WARPS = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
S_OF_CASE = np.einsum("ic,jc->ij", CASE.tau * CASE.Q, CASE.K)
L_OF_CASE = np.array([sum(np.exp(x) for x in row) for row in S_OF_CASE])
TWEAK_1 = "Õ² = diag(ℓ¹)⁻¹ O¹ + exp(S² − m²) V²", "Õ² = diag(ℓ¹ e^(m¹ − m²)) O¹ + exp(S² − m²) V²"
TWO_TERMS = (
    "O² = diag(ℓ¹ / ℓ²)⁻¹ O¹ + diag(ℓ²)⁻¹ exp(S² − m²) V²",
    "O² = diag((ℓ¹ / ℓ²) e^(m¹ − m²)) O¹ + diag(ℓ²)⁻¹ exp(S² − m²) V²",
)
P_TILDE = "P̃² = diag(ℓ²)⁻¹ exp(S² − m²)", "P̃² = exp(S² − m²)"
SMALL_S = "Õ² = e^(s¹ − m) V¹ + e^(s² − m) V²", "Õ² = e^(S¹ − m) V¹ + e^(S² − m) V²"
SCALE = "S = Q Kᵀ, dQ = dS K and dK = dSᵀ Q", "S = τ Q Kᵀ, dQ = τ dS K, dK = τ dSᵀ Q"
SECOND = "O = diag(ℓ)⁻¹ e^(S¹ − m) V¹ + e^(S² − m) V²", "O = diag(ℓ)⁻¹ (e^(S¹ − m) V¹ + e^(S² − m) V²)"
INVERSE = (
    "O^(j) = diag(exp(m^(j−1) − m^(j)))⁻¹ O^(j−1) + P V_j",
    "O^(j) = diag(exp(m^(j−1) − m^(j))) O^(j−1) + P V_j",
)

AGAIN = {
    "fa2-dK": Again("dK = Q dSᵀ", unscaled_gradient("dK = Q dSᵀ"), "dK = dSᵀ Q", unscaled_gradient("dK = dSᵀ Q")),
    "fa2-dO": Again(
        "dO is the gradient of O with respect to the loss: ∂O/∂φ",
        CASE.dO**-1,
        "dO is the gradient of the loss with respect to O",
        CASE.dO,
    ),
    "fa2-second-block": Again(SECOND[0], read(SECOND[0], **two_blocks()), SECOND[1], read(SECOND[1], **two_blocks())),
    "fa2-tweak1": Again(TWEAK_1[0], unscaled(TWEAK_1[0]), TWEAK_1[1], unscaled(TWEAK_1[1])),
    "fa2-two-terms": Again(
        TWO_TERMS[0], read(TWO_TERMS[0], **two_blocks()), TWO_TERMS[1], read(TWO_TERMS[1], **two_blocks())
    ),
    "fa2-P-tilde": Again(P_TILDE[0], with_P_tilde(P_TILDE[0]), P_TILDE[1], with_P_tilde(P_TILDE[1])),
    "fa2-small-s": Again(SMALL_S[0], unscaled(SMALL_S[0]), SMALL_S[1], unscaled(SMALL_S[1])),
    "fa2-mask-blocks": Again(
        "row indices are all smaller than their column indices need no causal mask",
        causal(lambda r, c: c <= r or block(c) > block(r)),
        "largest column index is at most the smallest row index",
        causal(lambda r, c: c <= r),
    ),
    "fa2-causal-speedup": Again("about 1.7 to 1.8 times", (1.7 + 1.8) / 2, "2T / (T + 1), here for T = 64", 128 / 65),
    "fa2-inverse": Again(INVERSE[0], unscaled(INVERSE[0]), INVERSE[1], unscaled(INVERSE[1])),
    "fa2-block-index": Again("blocks O_i, …, O_{T_r}", 12 - 3, "O_1, …, O_{T_r}", 12),
    "fa2-D-shape": Again(
        "a vector of R^d", gradients_with_column_sums(), "D ∈ R^N", (by_torch(SQUARE)["dQ"], by_torch(SQUARE)["dK"])
    ),
    "fa2-loads": Again(
        "Q_i, O_i, dO_i, dQ_i, L_i and D_i", 4 * 4 + 2, "Q_i, dO_i, L_i and D_i: 2d + 2 elements", 2 * 4 + 2
    ),
    "fa2-dQ-race": Again("column blocks run in parallel", last_block_alone(), "Add atomically", by_torch(CASE)["dQ"]),
    "fa2-scale": Again(SCALE[0], scaled(SCALE[0]), SCALE[1], scaled(SCALE[1])),
    "fa2-S-index": Again(
        "exp(S_ij − L_i)",
        np.array([[np.exp(S_OF_CASE[1, 2]) / L_OF_CASE[r]] * 2 for r in (2, 3)]),
        "exp(S_i^(j) − L_i), with the tile",
        by_torch(CASE)["P"][2:4, 4:6],
    ),
    "fa2-eighty-heads": Again(
        "80 heads or more",
        least_busy(lambda n: min(1, n / 108)),
        "n / (108 ⌈n / 108⌉)",
        least_busy(lambda n: n / (108 * (2 - (n <= 108)))),
    ),
    "fa1-columns": Again(
        "columns of Q, K, V and O",
        np.einsum("ci,cj->ij", SQUARE.Q, SQUARE.K),
        "They are rows",
        np.einsum("ic,jc->ij", SQUARE.Q, SQUARE.K),
    ),
    "fa1-block-size": Again(
        "B_c = ⌈M / 4d⌉ and B_r = min(B_c, d)",
        (48, 48),
        "4Bd + B² + 2B ≤ M (forward), 8Bd + 2B² + 2B ≤ M (backward)",
        (
            largest(lambda B: 4 * B * 128 + B * B + 2 * B <= 24576),
            largest(lambda B: 8 * B * 128 + 2 * B * B + 2 * B <= 24576),
        ),
    ),
    "fa1-flops": Again("O(N²) FLOPs", 1, "O(N² d) FLOPs", 2),
    "fa1-L": Again(
        "L_i = Σ_j exp(S_ij)", np.exp(S_OF_CASE - L_OF_CASE[:, None]), "L_i = log Σ_j exp(S_ij)", by_torch(CASE)["P"]
    ),
    "fa1-dropout-order": Again(
        "Saving the random generator's state is enough",
        (one_generator("fa2"), one_generator("fa1")),
        "by (seed, batch, head, row, column)",
        (keyed_generator(), keyed_generator()),
    ),
    "fa1-empty-rows": Again(
        "P̃ = exp(S − m) with m = max(m, rowmax(S))", np.array([np.nan]), "Subtract 0 instead of m", empty_first_tile()
    ),
    "fa1-theorem5": Again(
        "standard attention is Algorithm 0", 4 * 8 * 8 + 4 * 8 * 4, "7N² + 8Nd", 7 * 8 * 8 + 8 * 8 * 4
    ),
    "fa1-memory": Again(
        "necessarily mean that less memory",
        forward_traffic(4) / forward_traffic(2),
        "one can be had without the other",
        1.0,
    ),
    "notes-every-loop": Again("at the end of every loop", four_blocks(True), "after its last tile", four_blocks(False)),
    "notes-warps": Again("warps in a thread communicate", 1 / 32, "warps in a thread block", 128 / 32),
    "article-traffic": Again("traffic is O(N)", 2, "Θ(N² d² / M)", loops("fa2", 256, 16) / loops("fa2", 128, 16)),
    "article-same-io": Again("is identical", 1, "about 3/2 times", loops("fa1", 128, 16) / loops("fa2", 128, 16)),
    "article-fa1-snippet": Again(
        "one row block against all key blocks",
        loops("fa2", 128, 16, snippet=True),
        "Algorithm 2 of the FA1 paper",
        loops("fa1", 128, 16),
    ),
    "article-rescales": Again(
        "64 rescales of the accumulator become a single one",
        1 / 64,
        "128 scalings of a B_r × d block become 65",
        65 / 128,
    ),
    "article-exp-cost": Again("16 times as much", 16, "About 128 times on an A100, 256 times on an H100", 2048 // 16),
    "article-parallel-keys": Again(
        "undo the reason for FlashAttention's existence",
        sum(2 * 64 for _ in ("S", "P")),  # each of the 64 scores and probabilities of the row, written and read
        "d + 1 numbers for each row, which are read once",
        4 * 2 * (16 + 1),  # four parts, each written and read: a row of O and one L
    ),
    "article-split-K": Again(
        "partial scores are summed before the softmax",
        sum(S_OF_CASE[:, keys] for keys in FOUR_WARPS),
        "The slices of S stand side by side",
        S_OF_CASE,
    ),
    "article-smem": Again(
        "every warp needs the whole K/V block", 4 * 2 * 8 * 4, "the same 2 B_c d elements", 2 * 8 * 4
    ),
    "article-228": Again("up to 228 KiB", 228, "227 KiB for one block", 227),
    "article-skip": Again(
        "j · B_kv > (i + 1) · B_q",
        causal(lambda r, c: c <= r or block(c) == block(r) + 1),
        "j · B_kv ≥ (i + 1) · B_q",
        causal(lambda r, c: c <= r),
    ),
    "article-mask-zero": Again(
        "masked to zero before the softmax", zero_votes(), "set to −∞ before the softmax", causal(lambda r, c: c <= r)
    ),
    "article-one-diagonal": Again("N / B_q in all", 512 // 128, "N / B_kv in all", 512 // 64),
    "bilingual-writes": Again("after the loops", 2, "last four steps of each pass of loop i", 8),
    "bilingual-warp": Again("翘曲", "翘曲", "线程束", "线程束"),
}

# Numbers that the reasons give, and what they are counted to be.
BUSY = {n: n / (108 * -(-n // 108)) for n in (80, 109, 2048)}
NUMBERS = {
    "fa2-causal-speedup": ("1.75 is the ratio for T = 7", [1.75, 7], [2 * 7 / 8, 7]),
    "fa2-loads": ("2d + 2 elements for each row instead of 4d + 2", [2, 2, 4, 2], [2, 2, 4, 2]),
    "fa2-eighty-heads": (
        "74% at 80, 50% at 109, 99.8% at 2,048",
        [74, 80, 50, 109, 99.8, 2048],
        [round(100 * BUSY[80]), 80, round(100 * BUSY[109]), 109, round(100 * BUSY[2048], 1), 2048],
    ),
    "fa1-theorem5": ("it moves 4N² + 4Nd elements", [4, 4], [4, 4]),
    "article-rescales": ("128 scalings of a B_r × d block become 65", [128, 65], [2 * 64, 64 + 1]),
    "article-exp-cost": ("16 = 312 / 19.5", [16, 312, 19.5], [312 / 19.5, 312, 19.5]),
    "article-skip": ("13 tiles of 16 instead of 10", [13, 16, 10], [10 + 3, 4 * 4, 1 + 2 + 3 + 4]),
}


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
