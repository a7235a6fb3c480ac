"""Assignment 3, backward: D, one tile's gradients, the whole backward under the meter, grouped heads, dropout."""

from __future__ import annotations

import numpy as np

from fa2_lab.machine import io

from . import truth
from .guard import call
from .meter import Run, metered
from .report import Failed, Report, equal, parts, tile_place
from .tiled import LESS, MORE, first_extra, on_the_meter, tiling, within
from .truth import Case

CASES = [
    Case(N_q=12, N_k=12, d=4, B_r=4, B_c=3, seed=11),
    Case(N_q=11, N_k=7, d=3, B_r=4, B_c=3, seed=12),
    Case(N_q=12, N_k=12, d=4, B_r=4, B_c=2, causal=True, seed=13),
    Case(N_q=9, N_k=13, d=4, B_r=4, B_c=3, causal=True, seed=14),
    Case(N_q=13, N_k=6, d=4, B_r=3, B_c=2, causal=True, seed=15),
]
METERED = [Case(24, 24, 8, 4, 4, seed=16), Case(24, 24, 8, 4, 4, causal=True, seed=17)]
METERED_RAGGED = Case(22, 27, 8, 8, 4, causal=True, seed=18)


def row_dots(function, seed: int = 0) -> Report:
    """D: one number for each row, from dO and O."""
    report = Report("row_dots")
    dO, O = np.random.default_rng(seed).standard_normal((2, 7, 4))
    with report.check("D has one number for each row", "A row sum, not a column sum: D is as long as O has rows."):
        equal("D", call(function, dO, O), (dO * O).sum(axis=1))
    with report.check("as many columns as rows: still the rows", "Which axis is summed?"):
        equal("D", call(function, dO[:4], O[:4]), (dO[:4] * O[:4]).sum(axis=1))
    return report


# One tile -------------------------------------------------------------------------------------------------------


def tile(function, seed: int = 0) -> Report:
    """dv_j, dk_j and dq_i of one tile, P computed again from L."""
    report = Report("tile_gradients")
    names = ("dq", "dk", "dv")
    hints = {
        "dq": "dq = τ · ds k: the scale comes in once more.",
        "dk": "dk = τ · dsᵀ q: which side is transposed?",
        "dv": "p from the scores and L alone: no maximum, no row sum.",
    }
    cases = {
        "all visible": (Case(5, 4, 3, seed=21 + seed), None),
        "half of it masked": (Case(5, 4, 3, seed=22 + seed), 0),
    }
    for claim, (case, masked) in cases.items():
        arguments, want = tile_case(case, masked)
        for number, name in enumerate(names):
            with report.check(f"{claim}: {name}", hints[name]):
                got = parts("(dq, dk, dv)", call(function, *arguments), 3)[number]
                equal(name, got, want[number])
    with report.check(
        "a row that sees no key: no NaN, no infinity", "exp(−inf − (−inf)) is NaN: where L is −inf, P is 0."
    ):
        arguments, want = tile_case(Case(5, 4, 3, seed=23 + seed), empty_row=2)
        for name, got, true in zip(names, parts("(dq, dk, dv)", call(function, *arguments), 3), want, strict=True):
            equal(name, got, true)
    return report


def tile_case(case: Case, masked: int | None = None, empty_row: int | None = None) -> tuple[list, tuple]:
    """A tile that is all there is, so that its gradients are those of dense attention."""
    Q, K, V, dO = case.tensors()
    seen = np.ones((case.N_q, case.N_k), dtype=bool)
    if masked is not None:
        seen = np.tri(case.N_q, case.N_k, dtype=bool)
    if empty_row is not None:
        seen[empty_row] = False
    O, L, want = truth.whole(Q, K, V, dO, case.tau, seen)
    return [Q, K, V, dO, L, (dO * O).sum(axis=1), seen, case.tau], want


# The whole backward ---------------------------------------------------------------------------------------------


def run(function, case: Case) -> Run:
    """The student's backward on watched tensors; D, dQ, dK and dV start as NaN."""
    Q, K, V, dO = case.tensors()
    O, L = truth.forward(case)
    inputs = {"Q": (Q, "i"), "K": (K, "j"), "V": (V, "j"), "O": (O, "i"), "L": (L, "i"), "dO": (dO, "i")}
    nan = {"D": (len(Q), "i"), "dQ": (Q.shape, "i"), "dK": (K.shape, "j"), "dV": (V.shape, "j")}
    outputs = {name: (np.full(shape, np.nan), axis) for name, (shape, axis) in nan.items()}
    ran = metered(function, case, inputs, outputs, tau=case.tau, causal=case.causal)
    return on_the_meter(ran, ("Q", "K", "V", "dO"), "dV")


HINTS = {
    "dQ": "dQ gathers a part from every column block: does it start at 0, and is every part added?",
    "dK": "dk_j grows over the row blocks and is stored once, after the last.",
    "dV": "dv_j grows over the row blocks and is stored once, after the last.",
}


def backward(function, seed: int = 0) -> Report:
    """dQ, dK and dV of the whole backward, gradient by gradient."""
    report = Report("backward")
    for case in CASES:
        case = truth.varied(case, seed)
        for name in ("dQ", "dK", "dV"):
            with report.check(f"{name}: {case}"):
                check_gradient(run(function, case), case, name)
    return report


def check_gradient(ran: Run, case: Case, name: str) -> None:
    """One gradient against the dense one."""
    Q, K, V, dO = case.tensors()
    want = dict(zip(("dQ", "dK", "dV"), truth.gradients(Q, K, V, dO, case.tau, case.causal), strict=True))[name]
    unwritten = np.isnan(ran.outputs[name]).any()
    hint = "The gradients start as NaN: was this row stored, from something that was itself stored?"
    place = tile_place(case.B_r if name == "dQ" else case.B_c)
    if name != "dQ":
        rows = place

        def place(at):
            return rows(at).replace("row", "key", 1).replace("row block", "column block")

    equal(name, ran.outputs[name], want, place=place, hint=hint if unwritten else HINTS[name])


def correct(function, case: Case) -> Run:
    """A metered run whose counts mean something: its gradients are right."""
    ran = run(function, case)
    for name in ("dQ", "dK", "dV"):
        check_gradient(ran, case, name)
    return ran


def traffic(function, cases=tuple(METERED)) -> Report:
    """What the backward moves, and that it skips what the mask hides."""
    report = Report("traffic")
    for case in cases:
        form = io.fa2_backward(tiling(case), case.d)
        for tensors in (("K", "V"), ("Q", "L", "dO"), ("dQ", "dK", "dV"), ("O", "D")):
            with report.check(f"{', '.join(tensors)} moved: {case}"):
                check_moved(correct(function, case), form, tensors)
    return report


def check_moved(ran: Run, form, tensors: tuple) -> None:
    """The meter against FA2's closed forms. Moving less of O, D or dO than Algorithm 2 is no fault."""
    for tensor in tensors:
        for op, forms, count in (("loaded", form.loads, ran.meter.loads), ("stored", form.stores, ran.meter.stores)):
            want, got = forms.get(tensor, 0), count(tensor)
            if got > want or (got < want and tensor not in ("O", "D", "dO")):
                expected = f"{want:,} elements of {tensor} {op}"
                raise Failed(expected, f"{got:,}", first_extra(ran, tensor), MORE if got > want else LESS)


def operations(function, cases=tuple(METERED)) -> Report:
    """Five products and one exponential for each score of a visited tile."""
    report = Report("operations")
    for case in cases:
        cut = tiling(case)
        ops = io.operations("fa2", "backward", cut, case.d)
        with report.check(
            f"matmul FLOPs: {case}", "Five products for each visited tile: s, dp, and one for each gradient."
        ):
            got = correct(function, case).meter.matmul_flops
            within("matmul FLOPs", got, ops["matmul"], ops["matmul"])
        with report.check(f"exponentials: {case}", "P = exp(S − L): one for each score, and no maximum."):
            within("exponentials", correct(function, case).meter.exponentials, ops["exp"], ops["exp"])
        with report.check(
            f"everything else: {case}", "Is D computed once, before the loops? Is there still a division?"
        ):
            slack = 2 * io.scores_visited(cut)
            within("other FLOPs", correct(function, case).meter.other_flops, 1, io.not_matmul(ops) + slack)
    return report


# Grouped heads --------------------------------------------------------------------------------------------------


def grouped(function, seed: int = 0) -> Report:
    """dQ, dK and dV where several query heads share a key head."""
    report = Report("grouped")
    for q_heads, k_heads, causal in ((4, 2, True), (6, 2, False), (3, 1, True)):
        draw = np.random.default_rng(seed + q_heads).standard_normal
        q, dO = draw((2, q_heads, 5, 4))
        k, v = draw((2, k_heads, 7, 4))
        want, O, L = grouped_truth(q, k, v, dO, 0.5, causal)
        group = q_heads // k_heads
        for number, (name, hint) in enumerate(
            [
                ("dq", f"Query head h reads key head h // {group}."),
                ("dk", f"The {group} query heads of a group all read this head, so its gradients add up."),
                ("dv", f"The {group} query heads of a group all read this head, so its gradients add up."),
            ]
        ):
            with report.check(
                f"{name}: {q_heads} query heads on {k_heads} key heads{', causal' if causal else ''}", hint
            ):
                got = parts("(dq, dk, dv)", call(function, q, k, v, O, L, dO, 0.5, causal), 3)[number]
                equal(name, got, want[number], place=lambda at: f"head {at[0]}, row {at[1]}")
    return report


def grouped_truth(q, k, v, dO, tau: float, causal: bool) -> tuple[tuple, np.ndarray, np.ndarray]:
    """(dq, dk, dv), O and L by the definition: copy each key head for its group, add the copies' gradients up again."""
    group, seen = len(q) // len(k), truth.visible(q.shape[1], k.shape[1], causal)
    heads = [truth.whole(q[h], k[h // group], v[h // group], dO[h], tau, seen) for h in range(len(q))]
    dq, dk, dv = (np.array(parts) for parts in zip(*(gradients for _, _, gradients in heads), strict=True))
    dk, dv = (x.reshape(len(k), group, *k.shape[1:]).sum(axis=1) for x in (dk, dv))
    O, L = (np.array([head[n] for head in heads]) for n in range(2))
    return (dq, dk, dv), O, L


# Dropout --------------------------------------------------------------------------------------------------------


def dropped(function, seed: int = 0) -> Report:
    """o, dq, dk and dv of one tile whose probabilities are dropped."""
    report = Report("dropped")
    hints = {
        "o": "What is kept grows by 1 / (1 − p), once; L is that of all keys, dropped or not.",
        "dq": "z stands at dp = z ∘ (do vᵀ). The p before the bracket in ds is not dropped, and D stays as it is.",
        "dk": "z stands at dp = z ∘ (do vᵀ). The p before the bracket in ds is not dropped, and D stays as it is.",
        "dv": "dv = (z ∘ p)ᵀ do: what the output was made of.",
    }
    for p in (0.25, 0.6):
        arguments, want = dropped_case(Case(6, 5, 3, seed=24 + seed), p)
        for number, (name, hint) in enumerate(hints.items()):
            with report.check(f"{name}: p = {p:g}", hint):
                got = parts("(o, dq, dk, dv)", call(function, *arguments), 4)[number]
                equal(name, got, want[number])
    return report


def dropped_case(case: Case, p: float) -> tuple[list, tuple]:
    """A tile that is all there is, and what dropout makes of it, by the chain rule on whole matrices."""
    Q, K, V, dO = case.tensors()
    kept = np.random.default_rng([case.seed, 7]).random((case.N_q, case.N_k)) >= p
    O, L, gradients = truth.whole(Q, K, V, dO, case.tau, np.ones_like(kept), kept / (1 - p))
    return [Q, K, V, dO, L, (dO * O).sum(axis=1), kept, p, case.tau], (O, *gradients)
