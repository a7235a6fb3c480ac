"""Assignment 9, up the ladder: rung 03 goes in, a better kernel comes out, judged by the meter and the compiled code.

No GPU is needed: Triton's interpreter counts what a call does, and the compiler shows what the loop became for Hopper.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fa2_lab.studio.course import guard, truth
from fa2_lab.studio.course.report import Failed, NotAllowed, Report, at_most, equal
from fa2_lab.studio.course.truth import Case
from fa2_lab.tiles import cdiv

RUNG = Path(__file__).resolve().parents[2] / "kernels" / "ladder" / "r03_row_blocks.py"
TOLERANCE = 4e-3  # fp16: O is rounded to 11 bits, and so is p
CHIP, D, N = "sm_90", 64, 4096  # what the compiled code is judged for, causal, in fp16

RIGHT = [
    ("whole tiles", Case(128, 128, 64, 64, 64, seed=91)),
    ("causal and ragged", Case(150, 150, 32, 64, 64, causal=True, seed=92)),
    ("causal, more keys than queries", Case(70, 190, 16, 64, 64, causal=True, size=2.0, seed=93)),
    ("causal, rows that see no key", Case(170, 90, 16, 64, 64, causal=True, seed=94)),
    ("keys that do not fill their tiles", Case(65, 77, 64, 64, 64, seed=95)),
]
LONG = Case(372, 372, 16, 64, 64, causal=True, seed=96)


def rung(seed: int = 0) -> str:
    """Rung 03 as a cell, without what the first cell imports. It is the same for every seed."""
    text = RUNG.read_text(encoding="utf-8")
    return text[text.index("NEG_INF = ") :].rstrip()


def call(function, case: Case, heads: int = 2) -> dict[str, int]:
    """One call in the interpreter, held to float64; what the meter counted."""
    from fa2_lab.studio.course import probes_ladder

    draw = np.random.default_rng([9, case.seed]).standard_normal
    sizes = ((case.N_q, case.size), (case.N_k, case.size), (case.N_k, 1.0))
    q, k, v = (np.float16(size * draw((1, heads, n, case.d))) for n, size in sizes)
    O, L, counted = guard.beside(probes_ladder.run, function, q, k, v, case.causal)
    for h in range(heads):
        Q, K, V = (np.float64(x[0, h]) for x in (q, k, v))
        want_O, want_L = truth.dense(Q, K, V, case.d**-0.5, case.causal)
        equal(f"O of head {h}", np.asarray(O)[0, h], want_O, TOLERANCE, nan_hint(O))
        equal(f"L of head {h}", np.asarray(L)[0, h], want_L, TOLERANCE, "L is the natural logarithm, in fp32.")
    check_by_kernel(case, heads, counted)
    return counted


def nan_hint(O) -> str:
    nan = "NaN: a row that was not stored, memory behind the end of K or V, or −inf − (−inf)."
    return nan if np.isnan(np.asarray(O, dtype=np.float64)).any() else ""


def check_by_kernel(case: Case, heads: int, counted: dict) -> None:
    """Products and loads must be the kernel's own."""
    scores = heads * int(truth.visible(case.N_q, case.N_k, case.causal).sum())
    if counted.get("multiplications of products", 0) < 2 * scores * case.d:
        raise NotAllowed("products were computed outside of a Triton kernel")
    if counted["loaded"] < 2 * heads * min(case.N_q, case.N_k) * case.d:
        raise NotAllowed("K and V were copied before a kernel loaded them, so the meter saw no load")


# The steps ------------------------------------------------------------------------------------------------------


def right(function, cases=tuple(RIGHT), seed: int = 0) -> Report:
    """O and L against float64, in fp16."""
    report = Report("right")
    for claim, case in cases:
        case = truth.varied(case, seed)
        with report.check(f"{claim}: {case}", "Start from rung 03, which is right, and change one thing at a time."):
            call(function, case)
    return report


def meter(function, seed: int = 0) -> Report:
    """What one causal call does, counted in the interpreter."""
    report, case = Report("meter"), truth.varied(LONG, seed)
    blocks = cdiv(case.N_q, 64)
    keys, _ = tiles_needed(case)
    limits = {
        "loaded": (2 * case.d * sum(min(n, case.N_k) for n in keys), "elements of K and V loaded",
                   "Tiles above the diagonal need not be visited. (Rung 06)"),
        "exponentials": (64 * sum(n + n // 64 for n in keys), "exponentials",
                         "One for each score of a visited tile, and one for each of its rows. (Rungs 04 and 06)"),
        "masked entries": (64 * blocks * 200, "entries under a mask",
                           "The diagonal cuts through few tiles; the others need no tl.where. (Rung 07)"),
    }  # fmt: skip
    counted: dict = {}
    for kind, (most, what, hint) in limits.items():
        with report.check(f"{what}: {case}", hint):
            counted = counted or call(function, case, heads=1)
            at_most(what, counted.get(kind, 0), most, hint)
    with report.check("no more divisions for 256 keys than for 128", "One division can wait until the end. (Rung 04)"):
        few, many = (call(function, Case(64, n, 16, 64, 64, seed=97), heads=1) for n in (128, 256))
        at_most("divisions", many.get("divisions", 0), few.get("divisions", 0))
    return report


STEPS = [  # instructions of a thread for one score, and what gets there; by `fa2-lab xray` the rungs have 18.9 … 9.3
    (17.8, "Divide once, at the end. (Rung 04)"),
    (12.5, "Fold τ and log₂ e into one multiply-add before tl.exp2. (Rung 05)"),
    (10.4, "Full tiles in a loop of their own, without mask and without bounds. (Rung 07)"),
]


def compiled(function, seed: int = 0) -> Report:
    """What the loop became for Hopper, without a Hopper: instructions for a score, and copies under way."""
    report, found = Report("compiled"), []

    def best():
        if not found:
            try:
                found.append(tightest(function))
            except Exception as refused:  # compiled once, whatever comes of it
                found.append(refused)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    for most, hint in STEPS:
        with report.check(f"at most {most:g} instructions of a thread for each score", hint):
            per_score, _, _ = best()
            if per_score > most:
                raise Failed(f"at most {most:g}", f"{per_score:.2f}")
    with report.check("copies of K and V are under way while a tile is computed", "num_stages. (Rung 08)"):
        _, _, copies = best()
        if not copies:
            raise Failed("asynchronous copies in the loop (LDGSTS or UTMALDG)", "none: every load is waited for")
    if found and not isinstance(found[0], Exception):
        per_score, registers, copies = found[0]
        print(f"  {CARD} {per_score:.2f} instructions a score, {registers} registers, {copies} copies in a round")
    return report


CARD = "card:"  # the line that the class's leaderboard reads


def tightest(function) -> tuple[float, int, int]:
    """Instructions a score, registers and copies of the loop that spends least, of the kernel that a call launches.

    A loop that does no work could spend as little as it likes, so every product that was compiled has to do its share.
    """
    from fa2_lab.studio.course import probes_ladder
    from fa2_lab.studio.xray import loops

    kernels = guard.beside(probes_ladder.compiled, function, CHIP, D, N)
    found = [
        (loop.per_score(D), dict(numbers), loop.copies) for numbers, sass, _ in kernels for loop in loops(str(sass))
    ]
    if not found:
        raise Failed("a loop with products on tensor cores", "none in the compiled code", hint="tl.dot of fp16 tiles.")
    check_shares(call(function, LONG, heads=1), sum(products for _, _, products in kernels))
    per_score, numbers, copies = min(found, key=lambda one: one[0])
    if numbers["spills"]:
        raise Failed("no spills", f"{numbers['spills']} instructions that spill", hint="Smaller tiles, or more warps.")
    return per_score, numbers["registers"], copies


SHARE = 8  # diagonal tiles of 32 keys have a seventh of all multiplications of LONG in each of their two products


def check_shares(counted: dict, products: int) -> None:
    """Each product in the machine code does more than an eighth of a call's multiplications, and none for nothing."""
    total = counted["multiplications of products"]
    working = sum(SHARE * one > total for one in counted["multiplications of each product"])
    hint = "Loops that hardly run would make the card. Write a tl.dot for each product, and none that is not needed."
    if working < products:
        raise Failed(f"each tl.dot does more than 1/{SHARE} of a causal call's multiplications",
                     f"{products} in the machine code, {working} that do", hint=hint)  # fmt: skip
    keys, needed = tiles_needed(LONG)
    loaded = counted["loaded"] / (2 * LONG.d * sum(min(n, LONG.N_k) for n in keys))
    at_most("multiplications for the K and V that were loaded", total, int(needed * max(1, 1.05 * loaded)), hint)


def tiles_needed(case: Case) -> tuple[list[int], int]:
    """Keys that each 64 rows need under the causal mask, in tiles of up to 128, and their multiplications."""
    keys = [cdiv(64 * (i + 1), 128) * 128 for i in range(cdiv(case.N_q, 64))]
    return keys, 2 * 64 * case.d * sum(keys)


def timed(function) -> Report:
    """On a GPU: how much faster than rung 03. Without one there is nothing to be had and nothing to be lost."""
    import torch

    from fa2_lab.studio.course import probes_ladder

    report = Report("gpu")
    if not torch.cuda.is_available():
        print("  no CUDA GPU on this machine: no extra points to be had, none lost")
        return report
    for times in (2.0, 2.8):  # rung 08 is 3.2 to 3.5 times as fast
        with report.check(f"{times:g} times as fast as rung 03", "Causal, d 64: half of the tiles, then every rung."):
            mine, theirs, apart = guard.beside(probes_ladder.timed, function, RUNG.read_text(encoding="utf-8"))
            print(f"  yours {mine:.3f} ms, rung 03 {theirs:.3f} ms (causal, fp16, d 64, N 8192, 32 heads)")
            if not math.isfinite(apart) or apart > 0.05:
                raise Failed("the same O", f"entries {apart:g} apart")
            if theirs / mine < times:
                raise Failed(f"at most {theirs / times:.3f} ms", f"{mine:.3f} ms")
    return report
