"""Assignment 8, detective cases: a hang, a race and a wrong answer. Find the line, name the slip, mend it, prove it.

What a student changes is run in a process in which none of their code has run; what comes out is judged here. Which
slip a program has, and what it is called, is known to the grader alone (`planted_bugs`).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial

import numpy as np

from . import guard, probes_cases, truth
from .report import Failed, Report

CAUSES = {
    "arrivals": "a barrier expects a different number of arrivals than it gets",
    "missing arrival": "an arrival is missing",
    "phase": "a wait is for the wrong phase",
    "early release": "a stage is released while it is still being read",
    "early announcement": "a tile is announced before it has arrived",
    "overwritten": "a stage is filled, although the producer did not wait until it was empty",
    "absent keys": "keys past the end count",
    "lost tile": "a tile that rows see is not visited",
    "wrong head": "rows of another head are read",
    "corner": "the causal diagonal is aligned to the wrong corner",
}


RUN = dict(tiles=6, consumers=2, stages=2, causal=False, copy=600, scores=256, softmax=512, values=256)
SHAPE = dict(heads=2, N_q=40, N_k=40, causal=False)


# Runs -------------------------------------------------------------------------------------------------------------

LIMITS = dict(tiles=(1, 16), consumers=(1, 4), stages=(1, 4), heads=(1, 4), N_q=(1, 128), N_k=(1, 128))
CLOCKS = (0, 10_000)


def checked(run, usual: dict) -> dict:
    """A run as a student gives it, or a failure that says what is asked for."""
    if not isinstance(run, dict) or set(run) - set(usual):
        raise Failed(f"a dict with some of {', '.join(usual)}", f"{run!r}"[:120])
    if usual | run == usual:
        raise Failed("at least one size or clock that differs from its usual value", f"{run!r}"[:120])
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
    return truth.attended(Q, K, V, scale=1.0, causal=options["causal"])["O"]


def kernel_call(run: dict, seed: int = 0) -> tuple:
    """Arguments of one launch of the kernel."""
    draw, heads = np.random.default_rng([9, seed]).standard_normal, int(run["heads"])
    Q, K, V = (np.float32(draw((heads, int(n), 16))) for n in (run["N_q"], run["N_k"], run["N_k"]))
    return Q, K, V, run["causal"], 0.25


def kernel_truth(Q, K, V, causal: bool, tau: float) -> np.ndarray:
    """O, with L as one more column."""
    heads = zip(*(np.float64(x) for x in (Q, K, V)), strict=True)
    found = [truth.attended(q, k, v, scale=tau, causal=causal) for q, k, v in heads]
    return np.stack([np.column_stack((x["O"], x["L"])) for x in found])


def verdict(came: tuple, want: np.ndarray) -> str:
    """ "right", "wrong", "hang" or "error": what one run came to."""
    if came[0] != "done":
        return came[0]
    return "right" if np.shape(came[1]) == want.shape and np.allclose(came[1], want, 1e-4, 1e-4) else "wrong"


# The cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kind of program: what it needs, how it is called, what is right, and the runs that a mended one must pass."""

    header: str
    probe: object
    call: object
    true: object
    usual: dict
    runs: tuple[dict, ...]
    clocks: tuple[float, ...] = ()  # of the program that was never broken, in these runs


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
    SHAPE | dict(N_q=33, N_k=61, heads=3),
    SHAPE | dict(N_q=48, N_k=32, causal=True),
)
PIPELINE_CLOCKS = (12888, 15960, 22538, 35240, 9744, 27698)
PIPELINE_HEADER = "import numpy as np\n\nfrom fa2_lab.machine.asynchrony import Barrier, ThreadBlock\n\n\n"
KERNEL_HEADER = "import triton\nimport triton.language as tl\n\n\n"
IN_MODEL = Case(
    PIPELINE_HEADER, probes_cases.pipeline, pipeline_call, pipeline_truth, RUN, PIPELINE_RUNS, PIPELINE_CLOCKS
)
IN_TRITON = Case(KERNEL_HEADER, probes_cases.kernel, kernel_call, kernel_truth, SHAPE, KERNEL_RUNS)


FIND = {
    "hang": "Which actor waits for which barrier? Which arrivals does it wait for, and do their lines ever run?",
    "race": "Follow one tile as it is copied, announced, read and released. Which step can happen too early?",
    "wrong": "Compare one row with the dense result. Is a key missing, is one too many, or is one of another head?",
}


def text_of(program) -> str:
    """A program as it stands in its cell."""
    return inspect.getsource(getattr(program, "fn", program)).rstrip()


def answer_of(function, name: str):
    """One part of an answer, read off the text: what is written down counts, not what is computed."""
    tree = ast.parse(textwrap.dedent(guard.text(function)))
    defs = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "raise NotImplementedError" in ast.unparse(tree):
        raise NotImplementedError
    returns = [x for x in ast.walk(defs[0]) if isinstance(x, ast.Return)] if defs else []
    value = returns[0].value if len(returns) == 1 else None
    try:
        if isinstance(value, ast.Dict):
            return written(dict(zip(map(ast.literal_eval, value.keys), value.values, strict=True))[name])
        return written({k.arg: k.value for k in value.keywords}[name])
    except (ValueError, KeyError, TypeError, AttributeError):
        wanted = "a line `return dict(line=…, cause=…, mend=…, shows=…, hides=…)`, with only texts and numbers in "
        hint = "Write the values into that line, without names or computation."
        raise Failed(wanted + name, ast.unparse(value)[:120] if value else "none", hint=hint) from None


def written(node: ast.expr):
    """A literal; also dict(a=1)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    return ast.literal_eval(node)


def outcomes(case: Case, function, text: str, runs, seed: int) -> list[tuple[str, tuple]]:
    """(verdict, what came) of each run of a program."""
    calls = [case.call(run, seed) for run in runs]
    came = guard.apart(case.probe, function, case.header + text, calls)
    return [(verdict(one, case.true(*call)), one) for one, call in zip(came, calls, strict=True)]


def check_step(step: str, case: Case, function, program, seed: int = 0) -> Report:
    """Three checks: the mended program, a run that shows the slip, one that hides it."""
    report, text = Report(step), text_of(program)
    wanted = "a wrong answer" if step != "hang" else "a hang"
    with report.check("mend: right on every run, and as fast as it should be", FIND[step]):
        check_mended(case, function, mended(text, answer_of(function, "mend")), seed)
    hint = "For which sizes or clocks does the wrong line make a difference?"
    with report.check(f"prove: a run that ends in {wanted}", hint):
        run = checked(answer_of(function, "shows"), case.usual)
        ((came, what),) = outcomes(case, function, text, [run], seed)
        if came != ("hang" if step == "hang" else "wrong"):
            raise Failed(wanted, f"{in_words(came, what)}, with {run}")
    with report.check("prove: a run with more than one tile that hides the mistake"):
        run = checked(answer_of(function, "hides"), case.usual)
        if run.get("tiles", 2) < 2 or min(run.get("N_q", 17), run.get("N_k", 17)) < 17:
            raise Failed("at least two tiles of keys and 17 queries", f"{run}")
        ((came, what),) = outcomes(case, function, text, [run], seed)
        if came != "right":
            raise Failed("the right answer", f"{in_words(came, what)}, with {run}")
    return report


MOST_NEW = 26  # words and signs that a mend may bring: a line and a half


def mended(text: str, changes) -> str:
    """The program with a student's changes, given as [(what stands there, what should), …]."""
    pairs = isinstance(changes, (list, tuple)) and all(isinstance(c, (list, tuple)) and len(c) == 2 for c in changes)
    if not pairs:
        raise Failed("a list of pairs (old text, new text)", f"{changes!r}"[:120])
    new = text
    for old, better in changes:
        if not isinstance(old, str) or not isinstance(better, str) or new.count(old) != 1:
            hint = "Include a neighbouring line in the old text."
            raise Failed("text that occurs in the program exactly once", f"{old!r}"[:100], hint=hint)
        new = new.replace(old, better)
    came = brought(text, new) if len(new) < len(text) + 1000 else len(new) - len(text)  # a book would take long
    if len(changes) > 3 or came > MOST_NEW:
        hint = "Mend a line instead of writing another program."
        raise Failed(f"at most three changes and {MOST_NEW} new words and signs", f"{came:,}", hint=hint)
    if strange := sorted(names_of(new) - names_of(text)):
        raise Failed("names that the program already has", strange[0][:100])
    return new


def brought(old: str, new: str) -> int:
    """How many words and signs a text has that another has not, in their order; those in quotes count as well."""
    words = [re.findall(r"\w+|[^\w\s]", x) for x in (old, new)]
    codes = SequenceMatcher(a=words[0], b=words[1], autojunk=False).get_opcodes()
    return sum(end - first for kind, _, _, first, end in codes if kind != "equal")


def names_of(text: str) -> set[str]:
    """The names in a program, also in its f-strings: with others, such as exec, a text could be any program."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Failed("a program that can be read", f"{type(error).__name__}: {error}"[:120]) from None
    return {str(getattr(x, field)) for x in nodes for field in ("id", "attr", "arg", "name") if hasattr(x, field)}


def changed_lines(old: list[str], new: list[str]) -> set[str]:
    """The lines of a text that another one has otherwise; where a line is missing, its neighbours."""
    found = set()
    for kind, first, end, _, _ in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if kind != "equal":
            found |= {line.strip() for line in (old[first:end] or old[first - 1 : first + 1])}
    return found - {""}


def in_words(came: str, what: tuple) -> str:
    """What a run came to, in words."""
    words = {"right": "the right answer", "wrong": "a wrong answer", "hang": f"a hang ({what[1]})"}
    return words.get(came, str(what[1]))


def check_mended(case: Case, function, text: str, seed: int) -> None:
    """Right on all runs; a pipeline takes as many clocks as the one that was never broken."""
    clocks = case.clocks or (0.0,) * len(case.runs)
    for run, true, (came, what) in zip(case.runs, clocks, outcomes(case, function, text, case.runs, seed), strict=True):
        if came != "right":
            raise Failed("the right answer", in_words(came, what), f"the run {run}")
        if true and not 0.9 * true <= what[2] <= 1.02 * true:
            hint = "Copies and products must still overlap, and none of them may be missing."
            raise Failed(f"{true:,.0f} clocks, or slightly more", f"{what[2]:,.0f} clocks", f"the run {run}", hint)


hang, race, wrong = (partial(check_step, *x) for x in (("hang", IN_MODEL), ("race", IN_MODEL), ("wrong", IN_TRITON)))
