"""Slips of assignments 1, 2, 3 and 7 that are known by the values they come to: {the hint: those values}."""

from __future__ import annotations

import numpy as np

from fa2_lab.reference.naive import logsumexp, safe_softmax
from fa2_lab.reference.online_softmax import finite
from fa2_lab.tiles import cdiv

from . import truth
from .truth import Case

Slips = dict[str, np.ndarray]


def of_update(state: tuple, s: np.ndarray, v: np.ndarray, want: tuple) -> dict[str, Slips]:
    """Slips of a block that is taken into a state, for m, l and o."""
    (m, l, o), (top, true_l, true_o) = state, want
    weights = np.exp(s - finite(top)[:, None])
    early = np.exp(s - finite(m)[:, None])
    new_l, new_o = weights.sum(axis=1), weights @ v
    kept_l, kept_o = true_l - new_l, true_o - new_o
    factor = kept_l / l
    return {
        "m": {
            "m is still the old maximum: a larger score of the block has to replace it.": m,
            "The maximum so far counts as well, not the block's alone.": s.max(axis=1),
            "There is one maximum for each row, not one for all: which axis?": np.full_like(m, top.max()),
        },
        "l": {
            "l is not rescaled: it was summed under the old maximum, and m has moved.": l + new_l,
            "The factor of l is upside down: when m grows, l has to shrink.": l / factor + new_l,
            "l is set to the block's sum: what was summed before has to stay in it.": new_l,
            "The block's weights stand under the old maximum: use the new one for them.": kept_l + early.sum(axis=1),
            "The weights are powers of 2: use np.exp.": np.exp2(s - finite(top)[:, None]).sum(axis=1),
        },
        "o": {
            "o is not rescaled, though l is: both were summed under the old maximum.": o + new_o,
            "The factor of o is upside down: when m grows, o has to shrink.": o / factor[:, None] + new_o,
            "o is set to the block's part: what was summed before has to stay in it.": new_o,
            "o is divided already: finalize divides, once, at the end.": true_o / true_l[:, None],
            "The block's values are added without their weights.": kept_o + v.sum(axis=0),
        },
    }


def of_merge(a: tuple, b: tuple, want: tuple) -> dict[str, Slips]:
    """Slips of two states that are joined."""
    left, right = (np.exp(x[0] - finite(want[0])) for x in (a, b))
    slips = {
        "m": {
            "m is that of the first side: which of the two is it?": a[0],
            "m is that of the second side: which of the two is it?": b[0],
            "m is the smaller of the two: exponents would be above 0.": np.minimum(a[0], b[0]),
        }
    }
    for name, first, second, f, g in (
        ("l", a[1], b[1], left, right),
        ("o", a[2], b[2], left[:, None], right[:, None]),
    ):
        slips[name] = {
            f"{name} of the second side is not shrunk: it stands under its own maximum.": f * first + second,
            f"{name} of the first side is not shrunk: it stands under its own maximum.": first + g * second,
            f"Neither side's {name} is shrunk: each stands under its own maximum.": first + second,
            "The two factors are exchanged: each side has its own.": g * first + f * second,
        }
    return slips


def of_finalize(state: tuple) -> dict[str, Slips]:
    """Slips of the end."""
    m, l, o = state
    return {
        "o": {
            "o is not divided: it is a sum, and l is the sum of its weights.": o,
            "o is divided twice.": o / l[:, None] ** 2,
            "o is multiplied by l: it has to be divided.": o * l[:, None],
        },
        "L": {
            "The logarithm is to base 2: use np.log.": m + np.log2(l),
            "m is missing: the weights were summed under it.": np.log(l),
            "l is missing: this is the maximum alone.": m,
            "l is added as it is: take its logarithm.": m + l,
            "The logarithm of l has the wrong sign.": m - np.log(l),
        },
    }


# Assignment 2 ---------------------------------------------------------------------------------------------------------


def of_kind(case: Case, tiles: list[tuple[slice, slice]]) -> dict[str, list[str]]:
    """What a slip makes of all tiles of a tiling."""
    row, col = np.arange(case.N_q + 1)[:, None], np.arange(case.N_k + 1)[None, :]
    seen = col <= row + case.N_k - case.N_q if case.causal else np.ones((case.N_q + 1, case.N_k + 1), dtype=bool)

    def kinds(seen: np.ndarray, rows: int = 0, cols: int = 0) -> list[str]:
        cut = [seen[r.start : r.stop + rows, c.start : c.stop + cols] for r, c in tiles]
        return ["full" if x.all() else "diagonal" if x.any() else "skip" for x in cut]

    other = {"skip": "full", "full": "skip", "diagonal": "diagonal"}
    return {
        "The diagonal begins at the top left; it ends at the bottom right: N_k − N_q is missing.": kinds(col <= row),
        "N_k − N_q has the wrong sign.": kinds(col <= row + case.N_q - case.N_k),
        "One row too many is asked: the last row is row_end − 1.": kinds(seen, rows=1),
        "One column too many is asked: the last column is col_end − 1.": kinds(seen, cols=1),
        "The diagonal itself is visible: ≤, not <.": kinds(col < row + case.N_k - case.N_q),
        "The mask is not asked for: without it every tile is full.": kinds(np.ones_like(seen)),
        '"skip" and "full" are exchanged.': [other[x] for x in kinds(seen)],
        '"diagonal" is missing: some entries of a tile may be visible, and others not.': [
            "full" if x == "diagonal" else x for x in kinds(seen)
        ],
    }


def of_rows(case: Case, name: str, rows: slice = slice(None)) -> Slips:
    """What a slip makes of some rows of O or of L."""
    Q, K, V, _ = case.tensors()
    row, col = np.arange(case.N_q)[:, None], np.arange(case.N_k)[None, :]
    seen = case.seen
    S = np.where(seen, case.tau * Q @ K.T, -np.inf)
    O, L = truth.dense(Q, K, V, case.tau, case.causal)
    m = S.max(axis=1)
    l = np.exp(L - m)
    block = col[0] // case.B_c
    tops = np.stack([S[:, block <= j].max(axis=1) for j in block], axis=1)  # the maximum when a column's tile came
    early = np.exp(S - finite(tops))
    early_l = early.sum(axis=1)
    ends = np.minimum((row // case.B_r + 1) * case.B_r, case.N_q) - 1  # the last row of each row's block
    sees = ends + case.N_k - case.N_q if case.causal else case.N_k - 1
    last, not_last = block == np.minimum(sees, case.N_k - 1) // case.B_c, block < block[-1]

    def masked(seen: np.ndarray) -> tuple:
        P, L = truth.probabilities(Q, K, case.tau, seen)
        return P @ V, L

    turned = [K[j : j + case.B_c] for j in range(0, case.N_k, case.B_c)]
    turned = np.where(seen, case.tau * Q @ np.hstack([k_j.reshape(k_j.shape[::-1]) for k_j in turned]), -np.inf)

    slips = {
        "K is reshaped where it has to be transposed: k_j.T.": (safe_softmax(turned) @ V, logsumexp(turned)),
        "τ is missing: s = tau * (q_i @ k_j.T).": truth.dense(Q, K, V, 1.0, case.causal),
        "τ stands there twice.": truth.dense(Q, K, V, case.tau**2, case.causal),
        "The mask is missing: rows look into the future.": masked(np.ones_like(seen)),
        "The mask's corner is at the top left: N_k − N_q is missing.": masked(col <= row),
        "The diagonal itself is visible: ≤, not <.": masked(seen & (col < row + case.N_k - case.N_q)),
        "Only the last tile's part is here: the state is set where it has to grow.": masked(seen & last),
        "The last tile is missing.": masked(seen & not_last),
        "o and l are not rescaled when m moves.": (early @ V / early_l[:, None], m + np.log(early_l)),
        "l is not rescaled when m moves, though o is.": (O * (l / early_l)[:, None], m + np.log(early_l)),
        "o is not rescaled when m moves, though l is.": (early @ V / l[:, None], L),
        "o is not divided by l at the end.": (O * l[:, None], L),
        "L is to base 2: use np.log.": (O, m + np.log2(l)),
        "m is missing in L: the weights were summed under it.": (O, np.log(l)),
    }  # fmt: skip
    return {said: wrong["OL".index(name)][rows] for said, wrong in slips.items()}


# Gradients ----------------------------------------------------------------------------------------------------------


def gradients(given: dict, case: Case, P=None, D=None, rows=slice(None), columns=slice(None)) -> dict[str, np.ndarray]:
    """dQ, dK, dV in float64: right as it stands; other P or D, or some rows and columns alone, for slips."""
    Q, K, V, dO = (given[name] for name in ("Q", "K", "V", "dO"))
    P = truth.probabilities(Q, K, case.tau, case.seen)[0] if P is None else P
    dS = P * (dO @ V.T - (given["D"] if D is None else D)[:, None])
    part = np.zeros_like(P)
    part[rows, columns] = 1
    return dict(dQ=case.tau * (part * dS) @ K, dK=case.tau * (part * dS).T @ Q, dV=(part * P).T @ dO)


def of_gradient(name: str, given: dict, case: Case) -> Slips:
    """What the slips that chapter 05 warns of make of a gradient."""
    want, known = gradients(given, case)[name], {}
    if name != "dV":
        known["τ is missing: S = τ Q Kᵀ, so dQ and dK carry one τ each."] = want / case.tau
        known["τ stands twice: once is enough, in dS or at the end."] = want * case.tau
        known["D is missing: dS = P ∘ (dP − D)."] = gradients(given, case, D=np.zeros(case.N_q))[name]
    S = np.where(case.seen, case.tau * given["Q"] @ given["K"].T, -np.inf)
    P = np.exp2(S - finite(given["L"])[:, None])
    said = "exp2 of a natural score: L is a natural logarithm. Use tl.exp, or multiply by log₂ e."
    known[said] = gradients(given, case, P=P)[name]
    block, B, N = ("column", case.B_c, case.N_k) if name == "dQ" else ("row", case.B_r, case.N_q)
    if N > B:
        last = slice((cdiv(N, B) - 1) * B, None)
        said = f"Only the last {block} block's part is here: it is set where it has to be added."
        known[said] = gradients(given, case, **{f"{block}s": last})[name]
    return known
