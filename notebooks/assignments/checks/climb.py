"""Assignment 9, up the ladder: rung 03 goes in, a better kernel comes out, judged by the meter and the compiled code.

No GPU is needed: Triton's interpreter counts what a call does, and the compiler shows what the loop became for Hopper.
A student writes the kernel and chooses its sizes; what launches it is written here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from fa2_lab.tiles import cdiv
from fa2_lab.tools.xray.loops import Loop, loops

from . import guard, slips, truth
from .listing import of_kernel
from .report import Failed, Report, at_most, equal, step
from .truth import Case

TOLERANCE = 4e-3  # fp16: O is rounded to 11 bits, and so is p
CHIP = "sm_90"

RIGHT = [
    ("whole tiles", Case(128, 128, 64, 64, 64, seed=91)),
    ("causal and ragged", Case(150, 150, 32, 64, 64, causal=True, seed=92)),
    ("causal, more keys than queries", Case(70, 190, 16, 64, 64, causal=True, size=2.0, seed=93)),
    ("causal, rows that see no key", Case(170, 90, 16, 64, 64, causal=True, seed=94)),
    ("keys that do not fill their tiles", Case(65, 77, 64, 64, 64, seed=95)),
]
LONG = Case(372, 372, 16, 64, 64, causal=True, seed=96)
SCORED = Case(384, 384, 64, 64, 64, causal=True, seed=98, size=6.0)  # what is compiled, and run as compiled
SIZES = dict(B_r=(16, 32, 64, 128, 256), B_c=(16, 32, 64, 128, 256), num_warps=(1, 2, 4, 8), num_stages=range(1, 9))
FORWARD = """

def forward(q, k, v, causal):
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    O, L = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if triton.knobs.runtime.interpret:
        O, L = O.fill_(float("nan")), L.fill_(float("nan"))
    grid = triton.cdiv(N_q, {B_r}), batch * heads
    {name}[grid](q, k, v, O, L, N_q, N_k, d**-0.5, CAUSAL=causal, d=d, B_r={B_r}, B_c={B_c},
                 num_warps={num_warps}, num_stages={num_stages})
    return O, L
"""


def program(kernel, sizes, d: int) -> tuple[str, dict]:
    """A student's kernel and what launches it with their sizes, as the one text that is run and compiled; the sizes."""
    text, chosen = of_kernel(kernel), guard.call(sizes, d)
    if not isinstance(chosen, dict) or set(chosen) != set(SIZES):
        raise Failed(f"a dict with {', '.join(SIZES)}", f"{chosen!r}"[:120])
    for name, allowed in SIZES.items():
        if type(chosen[name]) is not int or chosen[name] not in allowed:
            raise Failed(f"{name}: one of {', '.join(map(str, allowed))}", f"{chosen[name]!r}"[:80])
    return text + FORWARD.format(name=guard.name_of(kernel), **chosen), chosen


def call(report: Report, kernel, made: tuple[str, dict], case: Case, heads: int = 2) -> dict:
    """A program run in the interpreter and held to float64; what the meter counted.

    With two heads it is step 1. With one head it is counted. A slip that is known has been paid for in step 1, and so
    have a wrong L, because O shows that the work was done, and what is read from behind the end of Q, K and V.
    """
    from . import probes_triton

    draw = np.random.default_rng([9, case.seed]).standard_normal
    shapes = ((case.N_q, case.size), (case.N_k, case.size), (case.N_k, 1.0))
    q, k, v = (np.float16(size * draw((1, heads, n, case.d))) for n, size in shapes)
    beyond = math.nan if heads > 1 else 0.0
    O, L, counted = guard.apart(probes_triton.run, kernel, made[0], q, k, v, case.causal, beyond)
    for h in range(heads):
        given = [np.float64(x[0, h]) for x in (q, k, v)]
        want = truth.attended(*given, scale=case.d**-0.5, causal=case.causal).values()
        cut = replace(case, tau=case.d**-0.5, B_r=made[1]["B_r"], B_c=made[1]["B_c"])
        asked = slips.asked(cut, [*given, given[0]])
        both = list(zip("OL", (O, L), want, (NAN if np.isnan(O).any() else "", L_HINT), strict=True))
        for name, came, true, hint in both if heads > 1 else both[:1]:
            mine = np.asarray(came, dtype=np.float64)[0, h]
            known = partial(slips.in_halves, asked, name, mine, true, TOLERANCE)
            compare = partial(equal, f"{name} of head {h}", mine, true, TOLERANCE, hint, slips=known)
            compare() if heads > 1 else report.unless_known(compare)
    scores = heads * int(case.seen.sum())
    if counted.get("multiplications of products", 0) < 2 * scores * case.d:
        raise Failed("two products for each score", "fewer", hint="Compute S = Q Kᵀ and P V with tl.dot.")
    counted["loaded"] -= heads * case.N_q * case.d  # Q, once
    return counted


L_HINT = "L is a natural logarithm, and it is −∞ in a row that sees no key."
NAN = "NaN comes from a row that was not stored, from memory past the end of K or V, or from −inf − (−inf)."


# The steps ------------------------------------------------------------------------------------------------------


@step
def right(report: Report, kernel, sizes, cases=tuple(RIGHT), seed: int = 0) -> None:
    """O and L against float64, in fp16."""
    for claim, case in cases:
        case = truth.varied(case, seed)
        with report.check(f"{claim}: {case}", "Start from rung 03, which is correct, and change one thing at a time."):
            call(report, kernel, program(kernel, sizes, case.d), case)


@step
def meter(report: Report, kernel, sizes, seed: int = 0) -> None:
    """What one causal call does, counted in the interpreter."""
    case = truth.varied(LONG, seed)
    keys, _ = tiles_needed(case)
    limits = {
        "loaded": (2 * case.d * sum(min(n, case.N_k) for n in keys), "elements of K and V loaded",
                   "Tiles above the diagonal need not be visited (rung 07)."),
        "exponentials": (64 * sum(n + n // 64 for n in keys), "exponentials",
                         "A visited tile needs one exponential per score and one per row (rungs 05 and 07)."),
        "masked entries": (64 * len(keys) * 200, "entries under a mask",
                           "The diagonal cuts only a few tiles, so the others need no tl.where (rung 08)."),
    }  # fmt: skip
    run = partial(call, report, kernel, heads=1)
    counted = slips.Passes(lambda case: run(program(kernel, sizes, case.d), case), [case])
    for kind, (most, what, hint) in limits.items():
        with report.check(f"{what}: {case}", hint):
            at_most(what, counted[case].get(kind, 0), most, hint)
    with report.check("no more divisions for 256 keys than for 128", "The division can wait until the end (rung 05)."):
        made = program(kernel, sizes, d=16)
        few, many = (run(made, Case(64, n, 16, 64, 64, seed=97)) for n in (128, 256))
        at_most("divisions", many.get("divisions", 0), few.get("divisions", 0))


# Instructions of a thread for one score, and what gets there. Rungs 03, 05, 06, 08, 09: 19.6, 17.1, 11.9, 10.2, 9.3.
STEPS = [
    (17.8, "Divide once, at the end (rung 05)."),
    (12.5, "Fold τ and log₂ e into one FMA before tl.exp2 (rung 06)."),
    (10.4, "Give the full tiles a loop of their own, without mask and without bounds (rungs 08 and 09)."),
]


@step
def compiled(report: Report, kernel, sizes, seed: int = 0) -> None:
    """What the loop became for Hopper, without a Hopper: instructions for a score, and copies under way."""
    ran = slips.Passes(partial(costs, report, kernel), [sizes])  # compiled once: all checks fail by the same
    for most, hint in STEPS:
        with report.check(f"at most {most:g} thread instructions per score", hint):
            if (per_score := ran[sizes][0]) > most:
                raise Failed(f"at most {most:g}", f"{per_score:.2f}")
    hint = "num_stages sets how many tiles are copied ahead (rung 10)."
    with report.check("copies of K and V are under way while a tile is computed", hint):
        per_score, registers, copies = ran[sizes]
        print(f"  {per_score:.2f} thread instructions per score, {registers} registers, {copies} copies per iteration")
        if not copies:
            wanted = "asynchronous copies in the loop (LDGSTS or UTMALDG)"
            raise Failed(wanted, "none, so the loop waits for every load")


def costs(report: Report, kernel, sizes) -> tuple[float, int, int]:
    """Instructions a score, registers and copies of the loop that does most of a call's work.

    What is compiled is run here, too, on scores so large that no maximum can be left out.
    """
    from . import probes_triton

    made = program(kernel, sizes, SCORED.d)
    counted = call(report, kernel, made, SCORED, heads=1)
    numbers, sass, lines = guard.apart(probes_triton.compiled, kernel, made[0], CHIP, SCORED.d, SCORED.N_q)
    check_shares(counted, sorted(lines))
    loop = main_loop(loops(str(sass)), lines, counted["products"])
    if numbers["spills"]:
        came, hint = f"{numbers['spills']} instructions that spill", "Use smaller tiles or more warps."
        raise Failed("no spills", came, hint=hint)
    return loop.per_score(SCORED.d), numbers["registers"], loop.copies


def main_loop(found: list[Loop], lines: list, products: list) -> Loop:
    """The loop that does most.

    Each loop has both products of its scores, in the order of the text. Where that does not tell which loop is which,
    the dearest counts.
    """
    for loop in found:
        if 32 * loop.exponentials < loop.scores(SCORED.d):
            wanted = "two products and an exponential for each score in each loop that has products"
            came = f"{32 * loop.exponentials} exponentials for {loop.scores(SCORED.d):g} scores"
            raise Failed(wanted, came, hint=WHOLE)
    work = {tuple(place): n for place, n in products}
    shares = [work[place] for place in sorted({tuple(place) for place in lines})]
    if 2 * len(found) < len(shares):
        wanted = f"{len(shares) / 2:g} loops in the machine code, with two products each"
        raise Failed(wanted, f"{len(found)}", hint=WHOLE)
    if not found:
        hint = "Multiply fp16 tiles with tl.dot."
        raise Failed("a loop with products on tensor cores", "none in the compiled code", hint=hint)
    if 2 * len(found) > len(shares):
        return max(found, key=lambda loop: loop.per_score(SCORED.d))
    return max(zip(shares[::2], found, strict=True), key=lambda one: one[0])[1]


WHOLE = "S, its exponentials and P V belong in one loop, because work that is moved out of it is not saved."
SHARE = 8  # diagonal tiles of 32 keys have a seventh of all multiplications of SCORED in each of their two products


def check_shares(counted: dict, compiled: list) -> None:
    """The products that were compiled are those that ran, each does more than an eighth, and none is for nothing."""
    total = counted["multiplications of products"]
    ran = sorted(list(place) for place, n in counted["products"] if SHARE * n > total)
    hint = "Write one tl.dot for each product, and none that is not needed, or loops that hardly run would count."
    if ran != compiled:
        raise Failed(f"each tl.dot does more than 1/{SHARE} of a causal call's multiplications",
                     f"{len(ran)} of them do, but the machine code has {len(compiled)}", hint=hint)  # fmt: skip
    keys, needed = tiles_needed(SCORED)
    loaded = counted["loaded"] / (2 * SCORED.d * sum(min(n, SCORED.N_k) for n in keys))
    at_most("multiplications for the K and V that were loaded", total, int(needed * max(1, 1.05 * loaded)), hint)


def tiles_needed(case: Case) -> tuple[list[int], int]:
    """Keys that each 64 rows need under the causal mask, in tiles of up to 128, and their multiplications."""
    keys = [cdiv(64 * (i + 1), 128) * 128 for i in range(cdiv(case.N_q, 64))]
    return keys, 2 * 64 * case.d * sum(keys)
