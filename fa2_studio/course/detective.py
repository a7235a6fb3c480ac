"""Assignment 8, detective cases: a hang, a race and a wrong answer. Find the line, name the slip, mend it, prove it.

The programs are right as they stand in suspect_pipeline.py and suspect_kernel.py. A slip replaces text, and a seed
decides which. What a student changes is run beside their code; what comes out is judged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from fa2_studio.course import guard, probes_cases, truth
from fa2_studio.course.report import Failed, Report

PIPELINE, KERNEL = (Path(__file__).with_name(f"suspect_{name}.py") for name in ("pipeline", "kernel"))
CAUSES = {
    "arrivals": "a barrier expects another number of arrivals than come",
    "missing arrival": "an arrival is left out",
    "phase": "a wait names the wrong phase",
    "early release": "a stage is released while it is still read",
    "early announcement": "a tile is announced before it is there",
    "overwritten": "a stage is filled although nobody waited until it was empty",
    "absent keys": "keys behind the end count",
    "lost tile": "a tile that rows see is not visited",
    "wrong head": "rows of another head are read",
    "corner": "the causal diagonal begins in the wrong corner",
}


@dataclass(frozen=True)
class Slip:
    """A slip: what it is, the right text, the wrong one, and what of a run has to change to show it, or to hide it."""

    cause: str
    right: str
    wrong: str
    shows: dict
    hides: dict


RUN = dict(tiles=6, consumers=2, stages=2, causal=False, copy=600, scores=256, softmax=512, values=256)
FEW, SLOW, FAST = dict(tiles=2), dict(copy=4000), dict(copy=100)
RELEASE = "            emptied[stage].arrive(block.actor)\n"
UNSEEN = "                emptied[stage].arrive(block.actor)\n                continue\n"
AWAIT = "            yield pv.done()\n"
EMPTY = "            yield emptied[stage].over(phase ^ 1)\n"
HANGS = [
    Slip("arrivals", 'emptied", consumers)', 'emptied", consumers + 1)', {}, FEW),
    Slip("missing arrival", UNSEEN, "                continue\n", dict(causal=True), {}),
    Slip("phase", EMPTY, EMPTY.replace("phase", "n & 1"), {}, dict(stages=1)),
    Slip("missing arrival", AWAIT + RELEASE, f"{AWAIT}            if n + stages < tiles - 1:\n    {RELEASE}", {}, FEW),
]


def moved(line: str, above: str) -> tuple[str, str]:
    """The stretch of the pipeline from `above` to `line`, as it is, and with the line right above `above`."""
    text = PIPELINE.read_text(encoding="utf-8")
    first = text.index(above)
    right = text[first : text.index(line, first) + len(line)]
    spaces = above[: len(above) - len(above.lstrip())]
    return right, f"{spaces}{line.lstrip()}{right.removesuffix(line)}"


RACES = [
    Slip("early release", *moved(RELEASE, AWAIT), FAST, {}),
    Slip(
        "early announcement",
        *moved('        filled[stage].arrive("copy engine")\n', "            block.start("),
        {},
        FAST,
    ),
    Slip("early release", *moved(RELEASE, "            s = np.where("), {}, SLOW),
]
SHAPE = dict(heads=2, N_q=40, N_k=40, causal=False)
WRONG = [
    Slip("absent keys", "(col < N_k)[None, :]", "(col <= N_k)[None, :]", {}, dict(N_k=48)),
    Slip("lost tile", "for j in range(0, end, B_c):", "for j in range(0, end // B_c * B_c, B_c):", {}, dict(N_k=48)),
    Slip("wrong head", "(head * N_k + col[:, None])", "(head * N_q + col[:, None])", dict(N_k=56), {}),
    Slip(
        "corner",
        "seen & (col[None, :] <= row[:, None] + N_k - N_q)",
        "seen & (col[None, :] <= row[:, None])",
        dict(N_k=56, causal=True),
        dict(causal=True),
    ),
]


# What a seed plants ---------------------------------------------------------------------------------------------


def planted(slips: list[Slip], seed: int) -> Slip:
    """The slip of a seed; seed 0 has the first."""
    return slips[seed * 2654435761 % 2**32 * len(slips) >> 32]


def broken(path: Path, slip: Slip) -> str:
    """A program with a slip in it."""
    text = path.read_text(encoding="utf-8")
    if text.count(slip.right) != 1:
        raise LookupError(f"{path.name}: {slip.right!r} stands there {text.count(slip.right)} times")
    return text.replace(slip.right, slip.wrong)


def hanging(seed: int = 0) -> str:
    """The program that hangs, as a cell."""
    return broken(PIPELINE, planted(HANGS, seed)).rstrip()


def racing(seed: int = 0) -> str:
    """The program with a race, as a cell."""
    return broken(PIPELINE, planted(RACES, seed + 1 if seed else 0)).rstrip()


def ragged(seed: int = 0) -> str:
    """The kernel with a wrong answer, as a cell."""
    return broken(KERNEL, planted(WRONG, seed + 2 if seed else 0)).rstrip()


def wrong_lines(path: Path, slip: Slip) -> set[str]:
    """The lines that may be named: those that differ, and where a line is missing, its neighbours."""
    right, wrong = path.read_text(encoding="utf-8").splitlines(), broken(path, slip).splitlines()
    found = set()
    for kind, _, _, first, end in SequenceMatcher(a=right, b=wrong, autojunk=False).get_opcodes():
        if kind != "equal":
            found |= {line.strip() for line in (wrong[first:end] or wrong[first - 1 : first + 1])}
    return found - {""}


# Runs -------------------------------------------------------------------------------------------------------------

LIMITS = dict(tiles=(1, 16), consumers=(1, 4), stages=(1, 4), heads=(1, 4), N_q=(1, 128), N_k=(1, 128))
CLOCKS = (0, 10_000)


def checked(run, usual: dict) -> dict:
    """A run as a student gives it, or a failure that says what is asked for."""
    if not isinstance(run, dict) or set(run) - set(usual):
        raise Failed(f"a dict with some of {', '.join(usual)}", f"{run!r}"[:120])
    run = usual | run
    for name, value in run.items():
        low, high = (0, 1) if name == "causal" else LIMITS.get(name, CLOCKS)
        if not isinstance(value, (bool, int, float)) or not low <= value <= high:
            raise Failed(f"{name} from {low} to {high}", f"{value!r}"[:80])
    return run | dict(causal=bool(run["causal"]))


def pipeline_call(run: dict, seed: int = 0) -> tuple:
    """Arguments of one run of the pipeline."""
    draw, B_c, d = np.random.default_rng([8, seed]).standard_normal, 4, 4
    Q, K, V = (draw((n, d)) for n in (12 * run["consumers"], B_c * run["tiles"], B_c * run["tiles"]))
    rest = {name: value for name, value in run.items() if name != "tiles"}
    return Q, K, V, rest | dict(consumers=int(run["consumers"]), stages=int(run["stages"]))


def pipeline_truth(Q, K, V, options: dict) -> np.ndarray:
    return truth.dense(Q, K, V, 1.0, options["causal"])[0]


def kernel_call(run: dict, seed: int = 0) -> tuple:
    """Arguments of one launch of the kernel."""
    draw, heads = np.random.default_rng([9, seed]).standard_normal, int(run["heads"])
    Q, K, V = (np.float32(draw((heads, int(n), 16))) for n in (run["N_q"], run["N_k"], run["N_k"]))
    return Q, K, V, run["causal"], 0.25


def kernel_truth(Q, K, V, causal: bool, tau: float) -> np.ndarray:
    heads = zip(*(np.float64(x) for x in (Q, K, V)), strict=True)
    return np.stack([truth.dense(q, k, v, tau, causal)[0] for q, k, v in heads])


def verdict(came: tuple, want: np.ndarray) -> str:
    """ "right", "wrong", "hang" or "error": what one run came to."""
    if came[0] != "done":
        return came[0]
    return "right" if np.shape(came[1]) == want.shape and np.allclose(came[1], want, 1e-4, 1e-4) else "wrong"


# The cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kind of program: its text, how it is called, what is right, and the runs that every mended one must pass."""

    path: Path
    probe: object
    call: object
    true: object
    usual: dict
    runs: tuple[dict, ...]


PIPELINE_RUNS = (
    RUN,
    RUN | dict(causal=True, tiles=9),
    RUN | dict(copy=10, stages=3, tiles=11),
    RUN | dict(copy=5000, tiles=9),
    RUN | dict(consumers=1, stages=1),
    RUN | dict(consumers=3, causal=True, copy=50, tiles=12),
)
KERNEL_RUNS = (
    SHAPE,
    SHAPE | dict(N_k=51, causal=True),
    SHAPE | dict(N_q=33, N_k=64, heads=3),
    SHAPE | dict(N_q=48, N_k=32, causal=True),
)
IN_MODEL = Case(PIPELINE, probes_cases.pipeline, pipeline_call, pipeline_truth, RUN, PIPELINE_RUNS)
IN_TRITON = Case(KERNEL, probes_cases.kernel, kernel_call, kernel_truth, SHAPE, KERNEL_RUNS)


FIND = {
    "hang": "Who waits for which barrier? Whose arrival is it waiting for, and does that line ever run?",
    "race": "Follow one tile: copied, announced, read, released. Which of these can come too early?",
    "wrong": "Compare one row with the dense result: is a key missing, one too many, or is it another head's?",
}


def outcomes(case: Case, function, text: str, runs, seed: int) -> list[tuple[str, tuple]]:
    """(verdict, what came) of each run of a program, which runs beside the student's code."""
    calls = [case.call(run, seed) for run in runs]
    came = guard.beside(case.probe, function, text, calls)
    return [(verdict(one, case.true(*call)), one) for one, call in zip(came, calls, strict=True)]


def judge(step: str, case: Case, slip: Slip, function, seed: int) -> Report:
    """Five checks: the line, the cause, the mended program, a run that shows the slip, one that hides it."""
    report, text = Report(step), broken(case.path, slip).rstrip()
    wanted = "a wrong answer" if step != "hang" else "a hang"

    def part(name: str):
        answer = guard.call(function)
        if not isinstance(answer, dict) or name not in answer:
            raise Failed(f"a dict with line, cause, mend, shows and hides, so with {name!r}", f"{answer!r}"[:120])
        return answer[name]

    with report.check("find: the line", FIND[step]):
        line = str(part("line")).strip()
        if line not in {one.strip() for one in text.splitlines()}:
            raise Failed("one line of the program, as it stands there", f"{line!r}"[:120])
        if line not in wrong_lines(case.path, slip):
            raise Failed("the line that is wrong", f"{line!r}, which is right")
    with report.check("name: the cause", "What does the line do to the tile, the barrier or the row?"):
        cause = part("cause")
        if cause not in CAUSES:
            raise Failed(f"one of {', '.join(CAUSES)}", f"{cause!r}"[:80])
        if cause != slip.cause:
            raise Failed("the cause of this slip", f"{cause!r}: {CAUSES[cause]}")
    with report.check("mend: right on every run, and not slower than it was meant"):
        check_mended(case, function, mended(text, part("mend")), seed)
    with report.check(f"prove: a run that ends in {wanted}", "Which sizes or clocks bring the line into play?"):
        run = checked(part("shows"), case.usual)
        ((came, what),) = outcomes(case, function, text, [run], seed)
        if came != ("hang" if step == "hang" else "wrong"):
            raise Failed(wanted, f"{told(came, what)}, with {run}")
    with report.check("prove: a run with more than one tile in which nobody would notice"):
        run = checked(part("hides"), case.usual)
        if run.get("tiles", 2) < 2 or min(run.get("N_q", 17), run.get("N_k", 17)) < 17:
            raise Failed("at least two tiles of keys and 17 queries", f"{run}")
        ((came, what),) = outcomes(case, function, text, [run], seed)
        if came != "right":
            raise Failed("the right answer", f"{told(came, what)}, with {run}")
    return report


def mended(text: str, changes) -> str:
    """The program with a student's changes, given as [(what stands there, what should), …]."""
    pairs = isinstance(changes, (list, tuple)) and all(isinstance(c, (list, tuple)) and len(c) == 2 for c in changes)
    if not pairs:
        raise Failed("a list of pairs (what stands there, what should)", f"{changes!r}"[:120])
    for old, new in changes:
        if not isinstance(old, str) or not isinstance(new, str) or text.count(old) != 1:
            raise Failed(
                "text that stands in the program once", f"{old!r}"[:100], hint="Take a neighbouring line along."
            )
        text = text.replace(old, new)
    if len(changes) > 3:
        raise Failed("at most three changes", f"{len(changes)}", hint="A mended line, not another program.")
    return text


def told(came: str, what: tuple) -> str:
    """What a run came to, in words."""
    words = {"right": "the right answer", "wrong": "a wrong answer", "hang": f"a hang ({what[1]})"}
    return words.get(came, str(what[1]))


def check_mended(case: Case, function, text: str, seed: int) -> None:
    """Right on all runs; a pipeline may take no more clocks than the one that was never broken."""
    never_broken = case.path.read_text(encoding="utf-8")
    right = [None] * len(case.runs)
    if case is IN_MODEL:
        right = case.probe(None, never_broken, [case.call(run, seed) for run in case.runs])
    for run, true, (came, what) in zip(case.runs, right, outcomes(case, function, text, case.runs, seed), strict=True):
        if came != "right":
            raise Failed("the right answer", told(came, what), f"the run {run}")
        if true and what[2] > 1.02 * true[2]:
            hint = "Copies and products must still overlap."
            raise Failed(f"at most {true[2]:,.0f} clocks", f"{what[2]:,.0f} clocks", f"the run {run}", hint)


def hang(function, seed: int = 0) -> Report:
    return judge("hang", IN_MODEL, planted(HANGS, seed), function, seed)


def race(function, seed: int = 0) -> Report:
    return judge("race", IN_MODEL, planted(RACES, seed + 1 if seed else 0), function, seed)


def wrong(function, seed: int = 0) -> Report:
    return judge("wrong", IN_TRITON, planted(WRONG, seed + 2 if seed else 0), function, seed)
