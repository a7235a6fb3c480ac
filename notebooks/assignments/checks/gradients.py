"""Assignment 3, backward: D, one tile's gradients, the whole backward under the meter, grouped heads, dropout."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from fa2_lab.machine import io_model
from fa2_lab.reference import heads

from . import slips, truth
from .guard import call
from .meter import Run, metered
from .report import Report, as_numbers, equal, in_order, parts, step, tile_place
from .tiled import check_moved, check_operations, fitting, on_chip
from .truth import Case

CASES = [
    Case(N_q=12, N_k=12, d=4, B_r=4, B_c=3, seed=11),
    Case(N_q=11, N_k=7, d=3, B_r=4, B_c=3, seed=12),
    Case(N_q=12, N_k=12, d=4, B_r=4, B_c=2, causal=True, seed=13),
    Case(N_q=9, N_k=13, d=4, B_r=4, B_c=3, causal=True, seed=14),
    Case(N_q=13, N_k=6, d=4, B_r=3, B_c=2, causal=True, seed=15),
]
METERED = [Case(24, 24, 8, 4, 4, seed=16), Case(22, 27, 8, 8, 4, causal=True, seed=18)]
METERED_HIDDEN = Case(24, 24, 8, 4, 4, causal=True, seed=17)


@step
def row_dots(report: Report, function, seed: int = 0) -> None:
    """D: one number for each row, from dO and O."""
    dO, O = np.random.default_rng(seed).standard_normal((2, 7, 4))
    hint = "Sum along each row of O, not along each column, so that D has one number per row."
    with report.check("D has one number for each row", hint):
        equal("D", call(function, dO, O), (dO * O).sum(axis=1))
    with report.check("O and dO are square: still the sum of each row", "Along which axis do you sum?"):
        equal("D", call(function, dO[:4], O[:4]), (dO[:4] * O[:4]).sum(axis=1))


def check_parts(
    report: Report, claim: str, hints: dict, function, arguments: list, want: tuple, place=None, known=None
) -> None:
    """A check for each of a function's results: {name: hint}. `known(arguments, name, result)` has slips."""
    for number, (name, hint) in enumerate(hints.items()):
        with report.check(f"{name}: {claim}", hint):
            got = parts(f"({', '.join(hints)})", call(function, *arguments), len(hints))
            in_order(f"({', '.join(hints)})", got, want)
            explained = partial(known, arguments, name, got[number]) if known else dict
            equal(name, got[number], want[number], place=place, slips=explained)


# One tile -------------------------------------------------------------------------------------------------------

TILE = {
    "dq": "dq = τ · ds k, so the scale appears once more.",
    "dk": "dk = τ · dsᵀ q. Which operand is transposed?",
    "dv": "Compute p from the scores and L alone, without a maximum and without a row sum.",
}
NO_KEY = "exp(−inf − (−inf)) is NaN, but P has to be 0 in a row whose L is −inf."


@step
def tile_gradients(report: Report, function, seed: int = 0) -> None:
    """dv_j, dk_j and dq_i of one tile, P computed again from L."""
    for claim, is_masked, first in (("all visible", False, 21), ("half of it masked", True, 22)):
        arguments, want = tile_case(Case(5, 4, 3, seed=first + seed), is_masked)
        check_parts(report, claim, TILE, function, arguments, want, known=slips.of_tile)
    with report.check("a row that sees no key: no NaN, no infinity"):
        arguments, want = tile_case(Case(5, 4, 3, seed=23 + seed), empty_row=2)
        for name, got, true in zip(TILE, parts("(dq, dk, dv)", call(function, *arguments), 3), want, strict=True):
            is_finite = np.isfinite(as_numbers(name, got, true.shape)).all()
            explained = partial(slips.of_tile, arguments, name, got) if is_finite else dict
            equal(name, got, true, hint=TILE[name] if is_finite else NO_KEY, slips=explained)


def tile_case(case: Case, is_masked: bool = False, empty_row: int | None = None) -> tuple[list, tuple]:
    """A tile that is all there is, so that its gradients are those of dense attention."""
    Q, K, V, dO = case.tensors()
    seen = np.tri(case.N_q, case.N_k, 0 if is_masked else case.N_k, dtype=bool)
    if empty_row is not None:
        seen[empty_row] = False
    O, L, *want = truth.attended(Q, K, V, dO, scale=case.tau, mask=seen[None, None]).values()
    return [Q, K, V, dO, L, (dO * O).sum(axis=1), seen, case.tau], tuple(want)


# The whole backward ---------------------------------------------------------------------------------------------


def run(function, case: Case) -> Run:
    """The student's backward on watched tensors; D, dQ, dK and dV start as NaN."""
    Q, K, V, dO = case.tensors()
    O, L = (truth.outputs(case)[name].copy() for name in "OL")  # a student's code may write to them
    inputs = {"Q": (Q, "i"), "K": (K, "j"), "V": (V, "j"), "O": (O, "i"), "L": (L, "i"), "dO": (dO, "i")}
    nan = {"D": (len(Q), "i"), "dQ": (Q.shape, "i"), "dK": (K.shape, "j"), "dV": (V.shape, "j")}
    outputs = {name: (np.full(shape, np.nan), axis) for name, (shape, axis) in nan.items()}
    return metered(function, case, inputs, outputs, tau=case.tau, causal=case.causal)


GROWS = "{0}_j is summed over the row blocks and stored once, after the last one."
HINTS = {
    "dQ": "Every column block adds its part to dQ. Does dQ start at 0, and is every part added?",
    "dK": GROWS.format("dk"),
    "dV": GROWS.format("dv"),
}


@step
def backward(report: Report, function, seed: int = 0) -> None:
    """dQ, dK and dV of the whole backward, gradient by gradient."""
    cases = [truth.varied(case, seed) for case in CASES]
    passes = slips.Passes(lambda case: fitting(on_chip(run(function, case))).outputs, cases)
    for case, name in product(cases, HINTS):
        with report.check(f"{name}: {case}"):
            check_gradient(passes, case, name)


def check_gradient(passes: slips.Passes, case: Case, name: str) -> None:
    """One gradient against the dense one."""
    outputs = passes[case]
    place = tile_place(case.B_r) if name == "dQ" else tile_place(case.B_c, "key")
    hint = HINTS[name]
    if np.isnan(outputs[name]).any():
        hint = "The gradients start as NaN. Was this row stored, and was everything stored that it is computed from?"
    equal(
        name, outputs[name], truth.outputs(case)[name], place=place, hint=hint, slips=partial(passes.known, name, case)
    )


def correct(report: Report, function, case: Case) -> Run:
    """A metered run whose counts mean something: its gradients are right, or wrong by slips that are known.

    Where D was not stored, dQ and dK are NaN, which costs points in step 3, and dV alone shows that the work was done.
    """
    ran = run(function, case)
    lacks_D = all(np.isnan(ran.outputs[name]).any() for name in ("D", "dQ", "dK"))
    for name in ("dV",) if lacks_D else HINTS:
        passes = slips.Passes(lambda _: ran.outputs, [case])
        report.unless_known(partial(check_gradient, passes, case, name))
    return ran


@step
def traffic(report: Report, function, cases=tuple(METERED)) -> None:
    """What the backward moves, and that it skips what the mask hides."""
    runs = slips.Passes(partial(correct, report, function), truth.unforeseen(cases))
    for case in runs.ran:
        form = io_model.fa2_backward(case.tiling, case.d)
        for tensors in (("K", "V"), ("Q", "L", "dO"), ("dQ", "dK", "dV"), ("O", "D")):
            with report.check(f"{', '.join(tensors)} moved: {case}"):
                check_moved(runs[case], form, tensors, may_move_less="O D dO")


@step
def operations(report: Report, function, cases=tuple(METERED)) -> None:
    """Five products and one exponential for each score of a visited tile."""
    runs = slips.Passes(partial(correct, report, function), truth.unforeseen(cases))
    for case in runs.ran:
        cut = case.tiling
        ops = io_model.operations("fa2", "backward", cut, case.d)
        other = io_model.other_operations(ops) + 2 * io_model.scores_visited(cut)
        products = "Each visited tile needs five products, namely s, dp, and one per gradient."
        limits = {
            "matmul FLOPs": (ops["matmul"], ops["matmul"], products),
            "exponentials": (ops["exp"], ops["exp"], "P = exp(S − L) needs one exponential per score and no maximum."),
            "everything else": (1, other, "Is D computed once, before the loops? Is there still a division?"),
        }
        check_operations(report, runs, case, limits)


# Grouped heads --------------------------------------------------------------------------------------------------


@step
def grouped(report: Report, function, seed: int = 0) -> None:
    """dQ, dK and dV where several query heads share a key head."""
    for q_heads, k_heads, causal in ((4, 2, True), (6, 2, False), (3, 1, True)):
        draw = np.random.default_rng(seed + q_heads).standard_normal
        q, dO = draw((2, q_heads, 5, 4))
        k, v = draw((2, k_heads, 7, 4))
        batch, how = (q[None], k[None], v[None]), dict(stage="naive", causal=causal, scale=0.4)
        O, L = heads.forward(*batch, **how)
        want = [x[0] for x in heads.backward(*batch, O, L, dO[None], **how)]
        adds = f"All {q_heads // k_heads} query heads of a group read this key head, so their gradients add up."
        adds += " If dq is wrong as well, look at backward first."
        reads = f"Query head h reads key head h // {q_heads // k_heads}."
        hints = dict(dq=f"{reads} If even head 0 is wrong, look at backward first.", dk=adds, dv=adds)
        shared = f"{k_heads} key heads" if k_heads > 1 else "a key head"
        claim = f"{q_heads} query heads that share {shared}{', causal' if causal else ''}"
        arguments = [q, k, v, O[0], L[0], dO, 0.4, causal]
        check_parts(report, claim, hints, function, arguments, want, lambda at: f"head {at[0]}, row {at[1]}")


# Dropout --------------------------------------------------------------------------------------------------------

INSIDE = "z belongs in dp = z ∘ (do vᵀ). The p before the bracket in ds is not dropped, and D stays as it is."
DROPPED = {
    "o": "Weights that are kept grow by 1 / (1 − p), once. L counts all keys, dropped or not.",
    "dq": INSIDE,
    "dk": INSIDE,
    "dv": "dv = (z ∘ p)ᵀ do, because the output was computed from z ∘ p.",
}


@step
def dropped(report: Report, function, seed: int = 0) -> None:
    """o, dq, dk and dv of one tile whose probabilities are dropped."""
    for p in (0.25, 0.6):
        check_parts(report, f"p = {p:g}", DROPPED, function, *dropped_case(Case(6, 5, 3, seed=24 + seed), p))


def dropped_case(case: Case, p: float) -> tuple[list, tuple]:
    """A tile that is all there is, and what dropout makes of it."""
    Q, K, V, dO = case.tensors()
    kept = np.random.default_rng([case.seed, 7]).random((case.N_q, case.N_k)) >= p
    O, L, *want = truth.attended(Q, K, V, dO, scale=case.tau, kept=kept[None, None], dropout=p).values()
    return [Q, K, V, dO, L, (dO * O).sum(axis=1), kept, p, case.tau], (O, *want)
