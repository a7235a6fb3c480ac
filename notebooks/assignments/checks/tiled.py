"""Assignment 2, from FA1 to FA2: which tiles to visit, one row block, the whole forward, and what the meter says."""

from __future__ import annotations

from functools import partial

import numpy as np

from fa2_lab.machine import io_model

from . import slips, truth
from .guard import call
from .meter import Run, metered
from .report import MISFIT, Failed, NotAllowed, Report, as_numbers, equal, in_order, parts, step, tile_place
from .truth import Case

PLAIN = Case(N_q=12, N_k=12, d=4, B_r=4, B_c=3)
RAGGED = Case(N_q=11, N_k=7, d=3, B_r=4, B_c=3, seed=1)
CAUSAL = Case(N_q=12, N_k=12, d=4, B_r=4, B_c=2, causal=True, seed=2)
CAUSAL_RAGGED = Case(N_q=9, N_k=13, d=4, B_r=4, B_c=3, causal=True, seed=3)
EMPTY_ROWS = Case(N_q=13, N_k=6, d=4, B_r=3, B_c=2, causal=True, seed=4)
HUGE = Case(N_q=10, N_k=10, d=4, B_r=4, B_c=4, size=30.0, seed=5)
LOW = Case(N_q=7, N_k=11, d=4, B_r=4, B_c=3, shift=100.0, seed=10)
METERED = [Case(24, 24, 16, 4, 4, seed=6), Case(22, 27, 16, 8, 4, causal=True, seed=8)]
METERED_HIDDEN = Case(24, 24, 16, 4, 4, causal=True, seed=7)
LONG = Case(N_q=8, N_k=256, d=8, B_r=8, B_c=8, causal=True, seed=9)


# The steps ------------------------------------------------------------------------------------------------------


CORNERS = (
    "Two corners of a tile decide its kind. Compare the row that sees most with the first column, "
    "and the row that sees least with the last column."
)


@step
def kind(report: Report, function, groups: tuple = ((RAGGED, CAUSAL), (CAUSAL_RAGGED,), (EMPTY_ROWS,))) -> None:
    """Skip, diagonal or full, for every tile of some tilings."""
    for cases in groups:
        with report.check("every tile of " + " and of ".join(map(str, cases)), CORNERS):
            for case in cases:
                check_kinds(function, case)


def check_kinds(function, case: Case) -> None:
    """The kinds of all tiles against the truth."""
    cut = case.tiling
    at = list(np.ndindex(cut.T_r, cut.T_c))
    tiles = [(cut.rows(i), cut.cols(j)) for i, j in at]
    more = (case.N_q, case.N_k, case.causal)
    got = [call(function, rows.start, rows.stop, cols.start, cols.stop, *more) for rows, cols in tiles]
    for (i, j), (rows, cols), mine in zip(at, tiles, got, strict=True):
        if mine != (true := cut.kind(i, j).value):
            where = f"tile ({i}, {j}): rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}"
            hint = next((said for said, wrong in slips.of_kind(case, tiles).items() if wrong == got), "")
            raise Failed(repr(true), repr(mine), where, hint)


ROW_BLOCKS = [
    ("all keys visible", PLAIN, "Every tile updates m, l and o. Divide once, after the last tile."),
    ("a short last tile", RAGGED, "The last column block ends at N_k, so it can be shorter than B_c."),
    ("causal", CAUSAL, "Mask the scores before you take their maximum, and only in tiles that the diagonal cuts."),
    ("causal, more keys than queries", CAUSAL_RAGGED, "Row r sees column c if c ≤ r + N_k − N_q."),
    (
        "rows that see no key",
        EMPTY_ROWS,
        "Row r sees column c if c ≤ r + N_k − N_q. A row that sees no key ends with O = 0 and L = −inf, never NaN.",
    ),
    ("large scores", HUGE, "Is the maximum subtracted before every exponential?"),
    ("very negative scores", LOW, "m has to start at −∞, because a score can be below any other number."),
]


@step
def row_block(report: Report, function, seed: int = 0) -> None:
    """One row block through its tiles: o_i and L_i."""
    cases = [(claim, truth.varied(case, seed), hint) for claim, case, hint in ROW_BLOCKS]
    passes = slips.Passes(partial(row_blocks, function), [case for _, case, _ in cases])
    for claim, case, hint in cases:
        with report.check(f"{claim}: {case}", hint):
            for name, label in zip("OL", ("o_i", "L_i"), strict=True):
                known = partial(passes.known, name, case)
                equal(label, passes[case][name], truth.outputs(case)[name], place=tile_place(case.B_r), slips=known)


def row_blocks(function, case: Case) -> dict[str, np.ndarray]:
    """O and L, put together from the row blocks."""
    Q, K, V, _ = case.tensors()
    want, cut, found = [truth.outputs(case)[name] for name in "OL"], case.tiling, []
    for rows in map(cut.rows, range(cut.T_r)):
        got = call(function, Q[rows], K, V, rows.start, case.N_q, case.B_c, case.tau, case.causal)
        both = parts("(o_i, L_i)", got, 2)
        in_order("(o_i, L_i)", both, tuple(x[rows] for x in want))
        found.append([as_numbers(x, y, z[rows].shape) for x, y, z in zip(("o_i", "L_i"), both, want, strict=True)])
    return {name: np.concatenate(x) for name, x in zip("OL", zip(*found, strict=True), strict=True)}


def run(function, case: Case) -> Run:
    """The student's forward on watched tensors."""
    Q, K, V, _ = case.tensors()
    inputs = {"Q": (Q, "i"), "K": (K, "j"), "V": (V, "j")}
    outputs = {"O": (np.full(Q.shape, np.nan), "i"), "L": (np.full(len(Q), np.nan), "i")}
    return metered(function, case, inputs, outputs, tau=case.tau, causal=case.causal)


def on_chip(ran: Run) -> Run:
    """The run, if its numbers stayed on the chip: what is computed elsewhere is not counted."""
    if ran.meter.peeked:
        hint = "Index a tensor, as in q_i = Q[rows], and compute with this block, without float(), int() or if."
        raise Failed("no numbers taken off the chip", f"{ran.meter.peeked:,} numbers", hint=hint)
    return ran


def fitting(ran: Run) -> Run:
    """The run, if its products fit as they were written."""
    if ran.meter.turned:
        raise Failed("operands whose shapes fit", ran.meter.turned, hint=MISFIT)
    return ran


@step
def forward(report: Report, function, seed: int = 0) -> None:
    """O and L of the whole forward."""
    cases = [truth.varied(case, seed) for case in (PLAIN, RAGGED, CAUSAL, CAUSAL_RAGGED, EMPTY_ROWS, HUGE, LOW)]
    passes = slips.Passes(lambda case: fitting(on_chip(run(function, case))).outputs, cases)
    for case in cases:
        hint = "If your row_block passes, look at the rows that you load and at where you store the results."
        with report.check(str(case), hint):
            check_result(passes, case)


def check_result(passes: slips.Passes, case: Case, hint: str = "", names: str = "OL") -> None:
    """What was stored, against the dense result."""
    outputs = passes[case]
    for name in names:
        hint = "The outputs start as NaN. Was this row stored?" if np.isnan(outputs[name]).any() else hint
        known = partial(passes.known, name, case)
        equal(name, outputs[name], truth.outputs(case)[name], place=tile_place(case.B_r), hint=hint, slips=known)


@step
def traffic(report: Report, function, cases=tuple(METERED)) -> None:
    """Elements moved, tensor by tensor, and no skipped tile touched."""
    runs = slips.Passes(partial(correct, report, function), truth.unforeseen(cases))
    for case in runs.ran:
        with report.check(f"loads and stores: {case}"):
            check_moved(runs[case], io_model.fa2_forward(case.tiling, case.d), ("Q", "K", "V", "O", "L"))
        for is_extra, claim in ((True, "no tile is loaded that no row sees"), (False, "no tile is left out")):
            with report.check(f"{claim}: {case}"):
                check_tiles(runs[case], case, is_extra)
    hold_little(report, function)


MORE = {
    "loaded": "Is a block loaded more than once, or for a tile that no row sees?",
    "stored": "Is a block stored more often than needed, or for a tile that no row sees?",
}
LESS = {
    "loaded": "The chip holds one block at a time. Is more kept there, "
    "is a tensor read without indexing it, or is it never loaded?",
    "stored": "Is a block never stored?",
}


def check_moved(ran: Run, form, tensors: tuple, may_move_less: str = "") -> None:
    """The meter against FA2's closed forms, to the element."""
    for tensor in tensors:
        for op, forms, counted in (("loaded", form.loads, ran.meter.loads), ("stored", form.stores, ran.meter.stores)):
            want, got = forms.get(tensor, 0), counted(tensor)
            if got > want or (got < want and tensor not in may_move_less.split()):
                hint = (MORE if got > want else LESS)[op]
                raise Failed(f"{want:,} elements of {tensor} {op}", f"{got:,}", first_extra(ran, tensor), hint)


def first_extra(ran: Run, tensor: str) -> str:
    """The first tile for which a tensor was loaded a second time."""
    seen = set()
    for tile in ran.meter.tiles(tensor):
        if tile in seen:
            return f"tile {tile}: loaded again"
        seen.add(tile)
    return ""


TOO_MANY = "not loaded", "it was loaded", "Decide whether to skip a tile before you load it."
TOO_FEW = "loaded", "it was not", "Some row of this tile sees some of its keys."


def check_tiles(ran: Run, case: Case, is_extra: bool) -> None:
    """The tiles for which K and V were loaded, against those that the mask leaves: none too many, or none too few."""
    cut = case.tiling
    want = {(i, j) for i in range(cut.T_r) for j in cut.visited_cols(i)}
    for tensor in ("K", "V"):
        got = set(ran.meter.tiles(tensor))
        if wrong := sorted(got - want if is_extra else want - got, key=str):
            what, came, hint = TOO_MANY if is_extra else TOO_FEW
            raise Failed(f"{tensor} {what} for tile {wrong[0]}", came, f"tile {wrong[0]}", hint)


@step
def operations(report: Report, function, cases=tuple(METERED)) -> None:
    """Operations by kind: products and exponentials as in Algorithm 1, one division for each row."""
    runs = slips.Passes(partial(correct, report, function), truth.unforeseen(cases))
    for case in runs.ran:
        cut = case.tiling
        ops, rows = io_model.operations("fa2", "forward", cut, case.d), case.N_q * case.d
        exponentials, other = (
            ops["exp"] + io_model.rows_visited(cut),
            io_model.other_operations(ops) + io_model.scores_visited(cut) + rows,
        )
        limits = {
            "matmul FLOPs": (
                ops["matmul"], ops["matmul"], "Each visited tile needs two matrix products, written with @."),
            "exponentials": (
                io_model.scores_visited(cut), exponentials,
                "Each visited tile needs one exponential per score and one per row."),
            "divisions": (1, case.N_q + rows, "FA1 divides in every tile. When is one division enough?"),
            "everything else": (1, other, "What multiplies a whole block in every tile? Only α has to do that."),
        }  # fmt: skip
        check_operations(report, runs, case, limits)
    hold_little(report, function)


COUNTS = {
    "matmul FLOPs": lambda meter: meter.matmul_flops,
    "exponentials": lambda meter: meter.exponentials,
    "divisions": lambda meter: meter.flops["divide"],
    "everything else": lambda meter: meter.other_flops,
}


def check_operations(report: Report, runs: slips.Passes, case: Case, limits: dict) -> None:
    """A check for each kind of operation: {kind: (at least, at most, hint)}. What is computed off the chip can be too
    little, where something is asked for, but hides what is too much."""
    for kind, (low, high, hint) in limits.items():
        with report.check(f"{kind}: {case}", hint):
            ran = on_chip(runs[case]) if low == 1 else runs[case]
            within(kind, COUNTS[kind](ran.meter), low, high)


def within(name: str, got: int, low: int, high: int, hint: str = "") -> None:
    """A count between two bounds."""
    if not low <= got <= high:
        most = f"at most {high:,} {name}" if got > high else f"{low:,} or more"
        raise Failed(f"{low:,} {name}" if low == high else most, f"{got:,}", hint=hint)


@step
def memory(report: Report, function, cases=tuple(METERED)) -> None:
    """Nothing larger than a tile on chip, nothing of size N² anywhere."""
    runs = slips.Passes(partial(correct, report, function), truth.unforeseen(cases))
    for case in runs.ran:
        tile = max(case.B_r * case.B_c, case.B_r * case.d, case.B_c * case.d)
        with report.check(f"no load larger than a block: {case}"):
            size, name = runs[case].meter.largest_load
            within(f"elements of {name} in one load", size, 1, tile, "Load one block of B_r or B_c rows at a time.")
        with report.check(f"nothing larger than a tile computed: {case}"):
            largest = on_chip(runs[case]).meter.largest_on_chip
            within("elements in one array", largest, 1, tile, "A strip of S (B_r × N_k) is also too large.")
    hold_little(report, function)


MOST_HELD = 16 * LONG.B_r * LONG.B_c  # elements; a strip of LONG's scores alone has 32 tiles


def hold_little(report: Report, function) -> None:
    """A few tiles are held at once, no strip of scores, in whatever pieces."""
    try:
        held = run(function, LONG).meter.most_held
    except Exception:  # it is told where results are compared
        return
    if held > MOST_HELD:
        with report.check(f"no more than 16 tiles held at once: {LONG}"):
            kept = f"{held:,} elements, while 16 tiles have {MOST_HELD:,}"
            raise NotAllowed(f"a strip of scores, or more, was kept on the chip ({kept})")


def correct(report: Report, function, case: Case) -> Run:
    """A metered run whose counts mean something: O is right, or wrong by a slip that is known and paid for above.

    Steps 2 and 3 ask for O and for L. Here one is enough to show that the work was done: L if O was never stored.
    """
    ran = run(function, case)
    hint = "The meter counts only if O is right, so look at steps 2 and 3 first."
    names = "O" if ran.meter.stores("O") else "L"
    report.unless_known(lambda: check_result(slips.Passes(lambda _: ran.outputs, [case]), case, hint, names))
    return ran
