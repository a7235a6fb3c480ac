"""Assignment 7, the backward in Triton: D, one tile, column blocks, row blocks, and one pass with atomic adds."""

from __future__ import annotations

from itertools import product

import numpy as np

from fa2_lab.machine import io_model

from . import slips, truth
from .report import Failed, Report, at_most, equal, step, tile_place
from .triton_steps import hold, launch, note_past, of_memory, past
from .truth import Case

__all__ = ["Case", "columns", "one_pass", "row_dots", "rows", "tile"]
TOLERANCE = 1e-4  # fp32: an exponent of 100 has an error of 1e-5, and so has p

DOTS = [Case(64, 64, 16, 32, 32, seed=71, tau=0.3), Case(45, 45, 32, 16, 16, seed=72, tau=0.3)]
ONE_TILE = [Case(16, 32, 16, 16, 32, seed=73, tau=0.3), Case(16, 64, 32, 16, 64, size=3.0, seed=74, tau=0.2)]
CASES = [
    ("whole tiles", Case(64, 48, 32, 32, 16, seed=75, tau=0.3)),
    ("queries and keys that do not fill their tiles", Case(40, 51, 32, 32, 16, seed=76, tau=0.3)),
    ("causal", Case(64, 64, 32, 32, 16, causal=True, seed=77, tau=0.3)),
    ("causal and ragged, more keys than queries", Case(19, 45, 16, 16, 32, causal=True, seed=78, tau=0.3)),
    ("causal, rows that see no key", Case(45, 40, 64, 16, 32, causal=True, seed=79, tau=0.3)),
    ("all scores near −100", Case(40, 56, 16, 16, 32, seed=80, tau=0.3, shift=4.5)),
]
METER = Case(72, 72, 16, 16, 32, causal=True, seed=81, tau=0.3)
HINT = {
    False: "Loads past the end need mask= and other=. A row or key that does not exist must have p = 0.",
    True: "Row r sees column c if c ≤ r + N_k − N_q. Is every tile visited in which a row sees a key? "
    "A row that sees no key has L = −∞, but p = 0, not exp(∞).",
}


def held(case: Case) -> list[np.ndarray]:
    """Q, K, V and dO as fp32 holds them."""
    return [np.float32(x).astype(np.float64) for x in case.tensors()]


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Q, K, V, dO, L and D of one head."""
    Q, K, V, dO = held(case)
    O, L = truth.attended(Q, K, V, scale=case.tau, causal=case.causal).values()
    return dict(Q=Q, K=K, V=V, dO=dO, L=L, D=(dO * O).sum(axis=1))


def compare(names: tuple[str, ...], passes: slips.Passes, case: Case, *more) -> None:
    """Gradients against float64, and more checks; a slip that is known is named."""
    ran, want = passes[case], truth.attended(*held(case), scale=case.tau, causal=case.causal)

    def hint(name: str) -> str:
        nan = "This row was stored, but as NaN, which comes from ∞ − ∞ or from 0 · ∞. Unseen keys need p = 0."
        return nan if np.isnan(ran[name]).any() else ""

    hold(ran, case, want, names, lambda _: TOLERANCE, lambda name: passes.known(name, case), hint, *more)


def unwritten(case: Case, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Outputs full of NaN; dQ of the one pass starts at zero and is passed apart."""
    rows = dict(dQ=case.N_q, dK=case.N_k, dV=case.N_k)
    return {name: np.full((rows[name], case.d), np.nan) for name in names}


def run(kernel, case: Case, names: tuple[str, ...], zero: str = "") -> dict:
    """One launch with lengths and mask: the outputs, and the meter. dQ alone has a program a row block."""
    programs = case.tiling.T_r if names == ("dQ",) else case.tiling.T_c
    outputs = unwritten(case, names)
    if zero:
        outputs[zero] = np.zeros_like(outputs[zero])
    sizes = dict(N_q=case.N_q, N_k=case.N_k, tau=case.tau, CAUSAL=case.causal, B_r=case.B_r, B_c=case.B_c, d=case.d)
    got, meter = launch(kernel, programs, inputs(case), outputs, sizes)
    return got | dict(meter=meter)


def looped(report: Report, kernel, names: tuple[str, ...], cases, seed: int, zero: str = "") -> None:
    """The cases of one step, each against float64."""
    cases = [(claim, truth.varied(case, seed)) for claim, case in cases]
    passes = slips.Passes(lambda case: run(kernel, case, names, zero), [case for _, case in cases])
    for claim, case in cases:
        with report.check(f"{claim}: {case}", HINT[case.causal]):
            if zero:
                no_race(passes[case]["meter"], zero)
            compare(names, passes, case)


def check_meter(kernel, case: Case, names: tuple[str, ...], loads: dict, products: int, zero: str = "") -> None:
    """Right, and by no more loads and products than the closed form has; what is added to has no other access."""
    passes = slips.Passes(lambda case: run(kernel, case, names, zero), [case])
    meter = passes[case]["meter"]
    one, tiles = case.B_r * case.B_c * case.d, int(io_model.tiles_per_row(case.tiling).sum())
    came = meter["operations"]["multiplications of products"]

    def check() -> None:
        for name, most in loads.items():
            hint = past(meter, name) or "Which tiles does no row see?"
            at_most(f"elements of {name} loaded", meter["loads"][name], most, hint)
        if came < products * tiles * one:
            raise Failed(f"{products} products with tl.dot for each of {tiles} tiles", f"{came / one:g} in all")
        hint = "Is a product computed twice, or for a tile that no row sees?"
        at_most("products of tiles", came // one, products * tiles, hint)
        if zero:
            no_race(meter, zero)
            hint = past(meter, zero) or f"Add to {zero} once per visited tile."
            at_most(f"elements added to {zero}", meter["adds"][zero], io_model.rows_visited(case.tiling) * case.d, hint)

    compare(names, passes, case, check)


def no_race(meter: dict, name: str) -> None:
    """Programs that run at the same time may only add to what they share."""
    hint = f"If a program loads, adds and stores, another program can change {name} in between."
    at_most(f"elements of {name} loaded", meter["loads"][name], 0, hint)
    at_most(f"elements of {name} stored by tl.store", meter["stores"][name], 0, hint)


# The steps ------------------------------------------------------------------------------------------------------


@step
def row_dots(report: Report, kernel, cases=tuple(DOTS), seed: int = 0) -> None:
    """D = rowsum(dO ∘ O)."""
    for case in (truth.varied(case, seed) for case in cases):
        with report.check(str(case), "D has one number per row, which is the sum over d of dO times O."):
            given = inputs(case)
            O = truth.attended(given["Q"], given["K"], given["V"], scale=case.tau)["O"]
            tensors, out = dict(O=O, dO=given["dO"]), dict(D=np.full(case.N_q, np.nan))
            sizes = dict(N_q=case.N_q, B_r=case.B_r, d=case.d)
            got, meter = launch(kernel, case.tiling.T_r, tensors, out, sizes)
            hint = of_memory(meter, "D", got["D"], given["D"], case)
            equal("D", got["D"], given["D"], TOLERANCE, hint, tile_place(case.B_r))
            note_past(meter)


@step
def tile(report: Report, kernel, cases=tuple(ONE_TILE), seed: int = 0) -> None:
    """All queries and keys in one tile: five products."""
    hints = dict(dV="dV = Pᵀ dO", dK="dK = τ dSᵀ Q", dQ="dQ = τ dS K")

    def run(case: Case) -> dict:
        sizes = dict(tau=case.tau, B_r=case.B_r, B_c=case.B_c, d=case.d)
        got, meter = launch(kernel, 1, inputs(case), unwritten(case, ("dQ", "dK", "dV")), sizes)
        return got | dict(meter=meter)

    passes = slips.Passes(run, [truth.varied(case, seed) for case in cases])
    for case, (name, hint) in product(passes.ran, hints.items()):
        with report.check(f"{name}: {case}", f"Use P = exp(τ Q Kᵀ − L), dP = dO Vᵀ, dS = P ∘ (dP − D) and {hint}."):
            compare((name,), passes, case)


@step
def columns(report: Report, kernel, cases=tuple(CASES), seed: int = 0) -> None:
    """A program for each column block: dK_j and dV_j."""
    looped(report, kernel, ("dK", "dV"), cases, seed)
    hint = "Load K_j and V_j once, and Q, dO, L and D once per visited tile."
    with report.check("loads, and four products per tile", hint):
        case = truth.varied(METER, seed)
        visited = io_model.rows_visited(case.tiling)
        loads = dict(K=case.N_k * case.d, V=case.N_k * case.d, Q=visited * case.d, dO=visited * case.d)
        check_meter(kernel, case, ("dK", "dV"), loads | dict(L=visited, D=visited), products=4)


@step
def rows(report: Report, kernel, cases=tuple(CASES), seed: int = 0) -> None:
    """A program for each row block: dQ_i."""
    looped(report, kernel, ("dQ",), cases, seed)
    hint = "Load Q_i, dO_i, L_i and D_i once, and K and V once per visited tile."
    with report.check("loads, and three products per tile", hint):
        case = truth.varied(METER, seed)
        visited, own = io_model.cols_visited(case.tiling), case.N_q
        loads = dict(K=visited * case.d, V=visited * case.d, Q=own * case.d, dO=own * case.d, L=own, D=own)
        check_meter(kernel, case, ("dQ",), loads, products=3)


@step
def one_pass(report: Report, kernel, cases=tuple(CASES[1:4]), seed: int = 0) -> None:
    """Column blocks that also add their parts to dQ."""
    looped(report, kernel, ("dQ", "dK", "dV"), cases, seed, zero="dQ")
    hint = "The meter counts tl.atomic_add neither as a load nor as a store."
    with report.check("five products per tile, and dQ by atomic adds alone", hint):
        check_meter(kernel, truth.varied(METER, seed), ("dQ", "dK", "dV"), {}, products=5, zero="dQ")
