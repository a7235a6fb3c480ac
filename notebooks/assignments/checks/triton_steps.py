"""Assignment 4, a Triton forward kernel in three steps: one tile, the loop, causal and ragged. Runs without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from . import slips, truth
from .guard import apart, name_of
from .listing import of_kernel
from .report import MISFIT, NAN, Failed, Report, all_hold, at_most, equal, step, tile_place
from .truth import Case

LOG2E = 1.4426950408889634
LOW_TOLERANCE = 1e-2  # fp32 keeps a score of −20,000 to 0.002
COARSE = "The result is right to two digits, so something is kept in 16 bits. All tiles and sums have to be fp32."
OWN_SLIPS = [
    (("scale-missing", "base-2"), "The scores are not scaled. Multiply s by scale_log2."),
    (("scale-twice", "base-2-twice"), "The scores are scaled twice. Multiply them by scale_log2 once."),
]
TOLERANCE = 2e-5  # fp32 sums in another order; the products are exact fp32 ("ieee")

ONE_TILE = [Case(32, 32, 16, 32, 32, seed=41, tau=0.3), Case(16, 64, 32, 16, 64, size=6.0, seed=42, tau=0.2)]
LOOP = [Case(64, 96, 16, 32, 32, seed=43, tau=0.3), Case(32, 64, 32, 16, 16, size=12.0, seed=44, tau=0.2)]
LOOP += [Case(32, 48, 32, 16, 16, seed=52, tau=0.3, shift=70.0)]
FULL = [
    ("keys and queries that do not fill their tiles", Case(40, 51, 32, 32, 16, seed=45, tau=0.3)),
    ("causal", Case(64, 64, 32, 32, 16, causal=True, seed=46, tau=0.3)),
    ("causal and ragged, more keys than queries", Case(19, 45, 32, 16, 16, causal=True, seed=47, tau=0.3)),
    ("scores far below zero", Case(35, 37, 32, 16, 16, seed=51, tau=0.3, shift=70.0)),
    ("rows that see no key", Case(45, 19, 32, 16, 16, causal=True, seed=48, tau=0.3)),
]
SKIPS = Case(47, 48, 32, 16, 16, causal=True, seed=53, tau=0.3)  # the last tile of a block has one key for one row


def launch(kernel, programs: int, given: dict, outputs: dict, options: dict) -> tuple[dict, dict]:
    """One launch of a student's kernel, in a process apart: the outputs in float64, and the meter.

    NaN stands behind what is given. Nothing may be written behind the outputs.
    """
    from . import probes_triton  # imports Triton, which the first cell has to set up

    text, name = of_kernel(kernel), name_of(kernel)
    if re.search(r"tl\.load\((?!.*other=).*mask=", text):
        print("  note: a tl.load with mask= but without other= returns arbitrary numbers where the mask is False")
    got, meter, spilled = apart(probes_triton.launch, kernel, text, name, programs, given, outputs, options)
    for name in spilled:
        came = f"memory past the end of {name} changed"
        raise Failed("nothing written past the last row", came, hint=past(meter, name))
    return {name: np.asarray(got[name], dtype=np.float64) for name in outputs}, {
        kind: Counter(counts) for kind, counts in meter.items()
    }


def run(kernel, case: Case, step: str, hidden: int = 0) -> dict:
    """A student's forward on one head: O, and L but for one tile, and the meter. The last `hidden` values are NaN."""
    Q, K, V, _ = case.tensors()
    V[case.N_k - hidden :] = np.nan
    outputs = dict(O=np.full(Q.shape, np.nan)) | ({} if step == "one_tile" else dict(L=np.full(case.N_q, np.nan)))
    options = dict(scale_log2=case.tau * LOG2E, B_r=case.B_r, B_c=case.B_c, d=case.d)
    options |= {} if step == "one_tile" else dict(N_k=case.N_k)
    options |= dict(N_q=case.N_q, CAUSAL=case.causal) if step == "full" else {}
    got, meter = launch(kernel, case.tiling.T_r, dict(Q=Q, K=K, V=V), outputs, options)
    check_products(sorted(meter["products"]), case)
    for name in ("K", "V"):
        hint = past(meter, name) or "Each program goes through the keys once, and carries m, l and o along."
        at_most(f"elements of {name} loaded", meter["loads"][name], case.tiling.T_r * case.N_k * case.d, hint)
    return got | dict(meter=meter)


def past(meter: dict, *names: str) -> str:
    """A hint about the first of these tensors past whose end something was reached; empty if there is none."""
    found = [name for name in names if meter["past"][name]]
    if not found:
        return ""
    row = f"{found[0]} + r{' * d' if found[0] not in 'LD' else ''}"
    return f"Memory past the end of {found[0]} is reached. Each access needs mask=, and row r begins at {row}."


def note_past(meter: dict) -> None:
    """Name memory past an end that was reached by a kernel whose results are right, which costs nothing."""
    if hint := past(meter, *"QKVOLD", "dO"):
        print(f"  note: {hint}")


def of_memory(meter: dict, name: str, got: np.ndarray, want: np.ndarray, case: Case) -> str:
    """A hint to a wrong output from the memory that was reached, or that was not; empty if that explains nothing."""
    width = got[0].size
    for row in sorted({n // width for n in meter["missed"][name] or ()}):
        if not np.array_equal(got[row], want[row]):
            return f"Nothing is written to row {row} of {name}, so it is what it was at the start."
    if np.isnan(got).any() and (hint := past(meter, *"QKVOLD", "dO")):
        return hint
    needed = dict(Q=case.seen.any(axis=1), K=case.seen.any(axis=0))
    for given, rows in (needed | dict(V=needed["K"], dO=needed["Q"])).items():
        if missed := sorted({n // case.d for n in meter["missed"][given] or ()} & set(np.flatnonzero(rows).tolist())):
            return f"Row {missed[0]} of {given} is never loaded. At which row does each tile begin?"
    with np.errstate(invalid="ignore"):
        is_coarse = np.abs(got - want).max() <= 0.02 * np.abs(want[np.isfinite(want)]).max(initial=0.0)
    return COARSE if is_coarse else ""


def check_operands(meter: dict) -> None:
    """Check that the operands of products fit, and that products are in full fp32, as the interpreter computes all."""
    for said, where in meter["misfits"].items():
        raise Failed("a result", said, where, MISFIT, known=(MISFIT,))
    if rounded := sorted({precision for *_, precision in meter["products"]} - {"ieee"}):
        raise Failed("products in full fp32", f"in {rounded[0]}", hint=IN_FULL, known=(IN_FULL,))


IN_FULL = 'Call tl.dot with fp32 tiles and input_precision="ieee".'


def check_products(products: list, case: Case) -> None:
    """The products that were computed: of tiles of these sizes."""
    tile = f"products of tiles, ({case.B_r}, {case.d}) by ({case.d}, {case.B_c}), with tl.dot"
    sizes = sorted((case.B_r, case.B_c, case.d))
    if not products:
        raise Failed(tile, "no tl.dot")
    for rows, inner, columns, _ in products:
        if sorted((rows, inner, columns)) != sizes:
            raise Failed(tile, f"({rows}, {inner}) by ({inner}, {columns})", hint="Tiles have the sizes B_r and B_c.")


def tolerance(case: Case) -> float:
    return LOW_TOLERANCE if case.shift else TOLERANCE * max(1, case.size / 3)  # large scores round more


def tried(kernel, cases, step: str) -> slips.Passes:
    return slips.Passes(lambda case: run(kernel, case, step), cases)


def check_case(passes: slips.Passes, case: Case, names: str) -> None:
    """O, or O and L, against the dense result."""
    ran, want = passes[case], truth.outputs(case)

    def known(name: str) -> dict[str, np.ndarray]:
        low = [(("maximum-zero",), "")] if case.shift else []
        first, own = (
            {slips.named(name, *x, said=said): slips.made(slips.asked(case), name, *x) for x, said in some}
            for some in (low, OWN_SLIPS)
        )
        return first | passes.known(name, case) | own | (slips.of_base_e(case) if name == "L" else {})

    def hint(name: str) -> str:
        rows = np.isnan(ran[name].reshape(case.N_q, -1)).any(axis=1)
        return why_nan(rows, want["L"], case) or (OF_L if name == "L" else "")

    hold(ran, case, want, names, lambda name: tolerance(case) if name == "O" else TOLERANCE, known, hint)


def hold(ran: dict, case: Case, want: dict, names: Iterable[str], tolerance, known, hint, *more) -> None:
    """Compare outputs with float64, and run more checks. A slip of known(name) is named; without one, hint(name)."""

    def check(name: str) -> None:
        right, is_one = want[name], name != "L" and case.tiling.T_r == case.tiling.T_c == 1
        turned = {f"{name} is stored transposed. Row r begins at {name} + r * d.": right.T.reshape(right.shape)}
        said = of_memory(ran["meter"], name, ran[name], right, case) or hint(name)
        place = tile_place(case.B_c, "key") if name in ("dK", "dV") else tile_place(case.B_r)
        equal(name, ran[name], right, tolerance(name), said, place, lambda: known(name) | (turned if is_one else {}))

    all_hold(lambda: check_operands(ran["meter"]), *(partial(check, name) for name in names), *more)
    note_past(ran["meter"])


OF_L = "L is a natural logarithm, but s times scale_log2 is in base 2. A row that sees no key has L = −∞."


def why_nan(rows: np.ndarray, want_L: np.ndarray, case: Case) -> str:
    """A hint for rows that came as NaN; empty if there are none."""
    if not rows.any():
        return ""
    if np.isneginf(want_L[rows]).all():
        return "These rows see no key, so m is −∞ and l is 0. Both −∞ − (−∞) and 0 / 0 are NaN."
    if case.shift:
        return slips.named("O", "maximum-zero")
    if case.size > 1:
        return "∞ / ∞ gives NaN. Is the maximum of each row subtracted before tl.exp2?"
    return NAN


# The steps ------------------------------------------------------------------------------------------------------


@step
def one_tile(report: Report, kernel, cases=tuple(ONE_TILE), seed: int = 0) -> None:
    """All queries and keys in one tile."""
    passes = tried(kernel, [truth.varied(case, seed) for case in cases], "one_tile")
    for case in passes.ran:
        hint = "You need s, its row maximum, exp2, the row sum, the product with v, and one division."
        with report.check(str(case), hint):
            check_case(passes, case, "O")


@step
def loop(report: Report, kernel, cases=tuple(LOOP), seed: int = 0) -> None:
    """Row blocks in parallel, column blocks in a loop, O and then L."""
    passes = tried(kernel, [truth.varied(case, seed) for case in cases], "loop")
    for case in passes.ran:
        hint = "Which row block belongs to this program? What happens to l and o when m changes?"
        with report.check(f"O: {case}", hint):
            check_case(passes, case, "O")
        with report.check(f"O and L: {case}"):
            check_case(passes, case, "OL")


@step
def full(report: Report, kernel, cases=tuple(FULL), seed: int = 0) -> None:
    """Causal and ragged."""
    hints = {
        False: "Loads past the end need mask= and other=. A key that does not exist must have the score −inf.",
        True: "Row r sees column c if c ≤ r + N_k − N_q. Is every tile visited in which a row sees a key? "
        "A row that has seen no key yet has m = −inf.",
    }
    cases = [(claim, truth.varied(case, seed)) for claim, case in cases]
    passes = tried(kernel, [*(case for _, case in cases), SKIPS], "full")
    for claim, case in cases:
        with report.check(f"{claim}: {case}", hints[case.causal]):
            check_case(passes, case, "OL")
    with report.check("tiles above the diagonal are not visited", "Where does the loop end for this row block?"):
        check_skips(kernel, passes)


def check_skips(kernel, passes: slips.Passes) -> None:
    """Keys that no row of a block sees are NaN: whoever loads their tile and multiplies shows it."""

    def check() -> None:
        O = run(kernel, replace(SKIPS, N_q=48), "full", hidden=16)["O"]  # only the last row block sees these
        for i in range(2):
            if np.isnan(O[16 * i : 16 * i + 16]).any():
                raise Failed("values 32 to 47 not loaded for rows 0 to 31", "they were loaded", f"tile ({i}, 2)")

    all_hold(lambda: check_case(passes, SKIPS, "O"), check)
