"""Questions to the rungs: the same kernels, launched in another way, each with what was expected before it was timed.

    forward("05 at 168 registers")(q, k, v, causal=True)

What a change names is looked for in three places: constants of the rung's file, arguments of its kernel, and options of
the launch. `shared` is new: so many bytes of shared memory are asked for, which keeps other programs off the SM.
`fa2-lab bench ladder` times each beside `against`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fa2_lab.kernels import ladder, triton_versions
from fa2_lab.records import Record
from fa2_studio.bench import results
from fa2_studio.bench.problem import Problem

TWO = 110 * 1024  # bytes of shared memory with which two programs fit on an SM


class Experiment(NamedTuple):
    """One question. A shape is (d, causal, heads of 4,096 tokens); None is expected where nothing was predicted."""

    changes: dict[str, Any]
    asks: str
    expected: dict[tuple[int, bool, int], float | None]  # how many times as fast as `against`
    against: str = ""  # a rung, or an experiment by its name; else its own rung
    rung: str = ""  # where it is not the one whose number the name begins with


def at(factor: float | None, *shapes: tuple[int, bool, int]) -> dict:
    return dict.fromkeys(shapes, factor)


OPEN = None  # a question without an expectation
FULL, CAUSAL = (128, False, 64), (128, True, 64)  # d, mask and heads that fill the GPU
FULL_64, CAUSAL_64 = (64, False, 128), (64, True, 128)
FEW, FEW_CAUSAL = (128, False, 8), (128, True, 8)

EXPERIMENTS = {
    # A third program on an SM, or the arithmetic?
    "03 at 168 registers": Experiment(
        dict(maxnreg=168), "Is a third program worth 20% without deferring anything?", at(1.21, FULL)
    ),
    "05 at 168 registers": Experiment(
        dict(maxnreg=168),
        "Tweak 1 gains nothing under the mask, where 174 registers are two programs. And with three?",
        at(1.21, CAUSAL),
    ),
    "05 at 128 registers": Experiment(
        dict(maxnreg=128), "The same at d = 64, where rung 05 lost a fourth program", at(1.07, CAUSAL_64), against="r03"
    ),
    "06 held to two programs": Experiment(
        dict(shared=TWO),
        "How much of rung 06 under the mask are instructions, without the third program?",
        at(1.06, CAUSAL),
        against="r05",
    ),
    "07 at 168 registers": Experiment(
        dict(maxnreg=168), "Under the mask skipping costs the third program", at(1.2, CAUSAL)
    ),
    "09 at 168 registers": Experiment(
        dict(maxnreg=168), "Is it for the third program that two loops lose?", at(1.19, FULL, CAUSAL)
    ),
    "13 at 128 registers": Experiment(dict(maxnreg=128), "At d = 64 groups cost the fourth program", at(OPEN, FULL_64)),
    # Copies ahead, and the order of the loops
    "11 with one stage": Experiment(
        dict(num_stages=1), "Without copies ahead, does the loops' order matter?", at(1.0, FULL, CAUSAL), against="r09"
    ),
    "14 with one stage": Experiment(
        dict(num_stages=1), "What are copies ahead worth, if four programs may hide them?", at(OPEN, FULL, CAUSAL)
    ),
    "15 with one stage": Experiment(
        dict(STAGES=1),
        "Triton and Gluon, the same work in the same order: is the language worth anything?",
        at(1.0, FULL, CAUSAL),
        against="14 with one stage",
    ),
    "15 with one stage, 8 heads": Experiment(
        dict(STAGES=1), "Four programs hide the copies. With few heads as well?", at(0.66, FEW_CAUSAL)
    ),
    "15 with one stage, two programs": Experiment(
        dict(STAGES=1, shared=TWO),
        "Do fewer programs help where all row blocks start at once?",
        at(1.1, FEW_CAUSAL),
        against="15 with one stage, 8 heads",
    ),
    "14 with two stages": Experiment(
        dict(num_stages=2), "At d = 64 barriers cost the fourth program", at(OPEN, FULL_64, CAUSAL_64)
    ),
    "18 with two stages": Experiment(
        dict(STAGES=2), "What is the third stage worth, which rung 21 gives away?", at(1.0, FULL, CAUSAL)
    ),
    "20 with two stages": Experiment(dict(STAGES=2), "The same where products overlap", at(1.0, FULL, CAUSAL)),
    # Order, and the L2 cache
    "13, heavy first in each head": Experiment(
        dict(at_once=1), "Is heavy first inside each head enough?", at(0.68, FEW_CAUSAL), against="r12"
    ),
    **{
        f"{rung} at_once={n}": Experiment(
            dict(at_once=n), "How many heads fit in L2 side by side?", at(OPEN, FULL, CAUSAL)
        )
        for rung in ("13", "23")
        for n in (1, 2, 4, 16)
    },
    # The last rungs
    "20 for fewer registers": Experiment(
        dict(sched4reg=True),
        "With Triton 3.9 it spills at d = 64 without a mask. What does that cost?",
        at(1.01, FULL_64),
    ),
    "22 that always raises m": Experiment(
        dict(LAG=-1e30), "Is part of rung 22 the order of its instructions?", at(1.02, FULL, CAUSAL), against="r21"
    ),
    "23 with software exponentials": Experiment(
        {},
        "One exponential in eight by the FMA units. 3% if all units overlap perfectly; they do not",
        at(1.0, FULL_64, CAUSAL_64),
        rung="x23",
    ),
}
WAVES = {  # rungs by heads of 4,096 tokens, d = 128, no mask: programs come in waves
    "r02": (8, 12, 16, 24, 32),  # K and V of all heads at the same time: do they fit in L2?
    **dict.fromkeys(("r03", "r05", "r07", "r09"), (1, 2, 4, 6, 8, 12, 16, 20)),
}


def forward(name: str) -> Callable:
    """forward(q, k, v, causal) of an experiment, in a copy of its rung; of a rung, as it is."""
    if name not in EXPERIMENTS:
        return ladder.load(name).forward
    asked = EXPERIMENTS[name]
    rung = asked.rung or name[:2]
    if not asked.changes:
        return ladder.load(rung).forward
    module = ladder.copied(rung)
    constants = {name for name in asked.changes if hasattr(module, name)}
    for constant in constants:
        setattr(module, constant, type(getattr(module, constant))(asked.changes[constant]))
    launch = {name: value for name, value in asked.changes.items() if name not in constants}
    if launch:
        module.forward_kernel = Launched(module.forward_kernel, launch)
    return module.forward


class Launched:
    """Stands in for a kernel: it is launched with other arguments and options."""

    def __init__(self, kernel: Any, changes: Mapping[str, Any]) -> None:
        self.kernel, self.changes = kernel, dict(changes)
        self.shared = self.changes.pop("shared", None)

    def __getitem__(self, grid: tuple) -> Callable:
        def launch(*given: Any, **named: Any) -> None:
            names = self.kernel.arg_names
            given = [self.changes.get(name, value) for name, value in zip(names, given, strict=False)]
            named |= {name: value for name, value in self.changes.items() if name not in names[: len(given)]}
            if self.shared:
                triton_versions.more_shared(self.kernel.warmup(*given, grid=grid, **named), self.shared)
            self.kernel[grid](*given, **named)

        return launch


def against(name: str) -> str:
    """The full name of what an experiment is compared with."""
    other = EXPERIMENTS[name].against or f"r{name[:2]}"
    return other if other in EXPERIMENTS else ladder.find(other)


def problems() -> dict[Problem, list[str]]:
    """{problem: the experiments that ask for it, each after what it is compared with, and the rungs of its wave}."""
    found: dict[Problem, dict[str, None]] = {}
    for name, asked in EXPERIMENTS.items():
        for shape in asked.expected:
            found.setdefault(problem_of(*shape), {}).update({against(name): None, name: None})
    for rung, many in WAVES.items():
        for heads in many:
            found.setdefault(problem_of(128, causal=False, heads=heads), {})[ladder.find(rung)] = None
    return {problem: list(names) for problem, names in found.items()}


def problem_of(d: int, causal: bool, heads: int) -> Problem:
    """So many heads of 4,096 tokens; those that fill the GPU are four sequences, as in the table."""
    filling = Problem.square(4096, d, causal)
    return filling if heads == filling.batch * filling.heads else Problem(1, heads, heads, 4096, 4096, d, causal)


# What came out --------------------------------------------------------------------------------------------------


def ratio(record: Record, name: str, d: int, causal: bool, heads: int) -> float | None:
    """How many times as fast an experiment was as what it is compared with; None if it was not measured."""
    problem, other = problem_of(d, causal, heads).as_dict(), against(name)
    rows = [row for row in record.rows if (row.direction, row.problem) == ("experiments", problem)]
    return next((row.ratio(name, other) for row in rows if {name, other} <= row.values.keys()), None)


def table(record: Record) -> list[str]:
    """Every question for a page: what was expected of it and what was measured, in each shape."""
    lines = []
    for name, asked in EXPERIMENTS.items():
        for (d, causal, heads), expected in asked.expected.items():
            numbers = (expected, ratio(record, name, d, causal, heads))
            cells = ["-" if x is None else f"{x:.2f}" for x in numbers]
            lines.append(
                [name, asked.asks, asked.against or f"r{name[:2]}", f"{d}, {heads}{', causal' * causal}", *cells]
            )
    columns = ["experiment", "question", "over", "d, heads", "expected", "measured"]
    return results.table(columns, lines, right=2)
