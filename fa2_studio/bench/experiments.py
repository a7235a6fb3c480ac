"""Experiments with the rungs: the same kernels, launched differently, with a prediction made before the measurement.

    forward("05 at 168 registers")(q, k, v, causal=True)

A change names a constant in the rung's file, an argument of its kernel, or an option of the launch. In addition,
`shared` reserves this number of bytes of shared memory to reduce the number of programs that fit on an SM. `fa2-lab
bench ladder` times each experiment and the kernel with which it is compared.
"""

import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fa2_lab.kernels import ladder, triton_versions
from fa2_lab.records import Record
from fa2_studio.bench import recording
from fa2_studio.bench.problem import Problem

TWO_PROGRAMS = 110 * 1024  # bytes of shared memory per program that let two programs fit on an SM


class Experiment(NamedTuple):
    """An experiment and the question that it answers.

    `expected` is {(d, causal, heads of 4,096 tokens): predicted ratio}, where the ratio is None if there is no
    prediction.
    """

    changes: dict[str, Any]
    question: str
    expected: dict[tuple[int, bool, int], float | None]  # the speed relative to `baseline`
    baseline: str  # a rung, or the name of another experiment
    rung: str


SHAPES = {
    "full": (128, False, 64),  # d, mask and heads that fill the GPU
    "causal": (128, True, 64),
    "full 64": (64, False, 128),
    "causal 64": (64, True, 128),
    "few causal": (128, True, 8),
}
# name | change | rung or experiment to compare with (by default, the experiment's rung) | predictions | question
TABLE = """
# A third program on an SM, or the arithmetic?
03 at 168 registers | maxnreg=168 | | full 1.21 |
    Does a third program bring 20% even if the division is not deferred?
05 at 168 registers | maxnreg=168 | | causal 1.21 |
    Under the mask, tweak 1 does not help, because at 174 registers only two programs fit. Does it help with three?
05 at 128 registers | maxnreg=128 | r03 | causal 64 1.07 |
    The same at d = 64, where a fourth program no longer fits on rung 05
06 held to two programs | shared=TWO_PROGRAMS | r05 | causal 1.06 |
    How much do rung 06's fewer instructions help under the mask, without the third program?
07 at 168 registers | maxnreg=168 | | causal 1.2 |
    Under the mask, skipping tiles costs the third program. How much does it help to get it back?
09 at 168 registers | maxnreg=168 | | full 1.19, causal 1.19 |
    Are two loops slower because the third program no longer fits?
11 at 128 registers | maxnreg=128 | | full 64 ? |
    At d = 64, the order of the loops costs the fourth program. How much does it help to get it back?
13 at 128 registers | maxnreg=128 | | full 64 ? |
    At d = 64, the groups of heads cost the fourth program. How much does it help to get it back?
# Copies ahead, and the order of the loops
11 with one stage | num_stages=1 | r09 | full 1.0, causal 1.0 | Without copies ahead, does the loops' order matter?
14 with one stage | num_stages=1 | | full ?, causal ? |
    How much does copying ahead help if four programs can hide the copies?
15 with one stage | STAGES=1 | 14 with one stage | full 1.0, causal 1.0 |
    If Triton and Gluon do the same work in the same order, does the language make a difference?
15 with one stage, 8 heads | STAGES=1 | | few causal 0.66 |
    Do four programs also hide the copies if there are few heads?
15 with one stage, two programs | STAGES=1, shared=TWO_PROGRAMS | 15 with one stage, 8 heads | few causal 1.1 |
    Do fewer programs per SM help if all row blocks start at once?
14 with two stages | num_stages=2 | | full 64 ?, causal 64 ? |
    At d = 64, the barriers cost the fourth program. How much does it help to get it back?
18 with two stages | STAGES=2 | | full 1.0, causal 1.0 |
    How much does the third stage help, which rung 21 gives up?
20 with two stages | STAGES=2 | | full 1.0, causal 1.0 | How much does it help if matmuls overlap?
# Order, and the L2 cache
13, heavy first in each head | l2_group=1 | r12 | few causal 0.68 |
    Is it enough to launch the heavy row blocks first within each head?
13 at_once=1 | l2_group=1 | | full ?, causal ? | How many heads fit in L2 side by side?
13 at_once=2 | l2_group=2 | | full ?, causal ? | How many heads fit in L2 side by side?
13 at_once=4 | l2_group=4 | | full ?, causal ? | How many heads fit in L2 side by side?
13 at_once=16 | l2_group=16 | | full ?, causal ? | How many heads fit in L2 side by side?
23 at_once=1 | l2_group=1 | | full ?, causal ? | How many heads fit in L2 side by side?
23 at_once=2 | l2_group=2 | | full ?, causal ? | How many heads fit in L2 side by side?
23 at_once=4 | l2_group=4 | | full ?, causal ? | How many heads fit in L2 side by side?
23 at_once=16 | l2_group=16 | | full ?, causal ? | How many heads fit in L2 side by side?
# The last rungs
20 for fewer registers | sched4reg=True | | full 64 1.01 |
    With Triton 3.9, it spills at d = 64 without a mask. What does that cost?
22 that always raises m | LAG=-1e30 | r21 | full 1.02, causal 1.02 |
    Is part of rung 22's speedup due to the order of its instructions?
23 with software exponentials | rung='x23' | | full 64 1.0, causal 64 1.0 |
    If the FMA units compute one exponential in eight, is the kernel 3% faster, as if all units overlapped perfectly?
"""


def parse_experiment(line: str) -> tuple[str, Experiment]:
    """Parse a line of the table, and return the experiment's name and the experiment."""
    name, changes, baseline, expected, question = map(str.strip, line.split("|"))
    pairs = (change.split("=") for change in changes.split(", "))
    launch_options = {key: TWO_PROGRAMS if value == "TWO_PROGRAMS" else literal_eval(value) for key, value in pairs}
    factors = (shape.rsplit(" ", 1) for shape in expected.split(", "))
    ratios = {SHAPES[shape]: None if factor == "?" else float(factor) for shape, factor in factors}
    rung = launch_options.pop("rung", name[:2])
    return name, Experiment(launch_options, question, ratios, baseline or f"r{name[:2]}", rung)


EXPERIMENTS = dict(map(parse_experiment, re.findall(r"^[^#\n].*(?:\n    .*)?", TABLE, re.M)))
# {rung: numbers of heads of 4,096 tokens, which show the waves of programs}, for d = 128 without a mask.
HEADS_FOR_WAVES = {
    "r02": (8, 12, 16, 24, 32),  # to see whether K and V of all heads fit in L2 at the same time
    **dict.fromkeys(("r03", "r05", "r07", "r09"), (1, 2, 4, 6, 8, 12, 16, 20)),
}


def forward_of(name: str) -> Callable:
    """Return the function forward(q, k, v, causal) of an experiment or of a rung.

    An experiment changes a copy of its rung's module, which leaves the rung itself unchanged.
    """
    if name not in EXPERIMENTS:
        return ladder.load(name).forward
    experiment = EXPERIMENTS[name]
    if not experiment.changes:
        return ladder.load(experiment.rung).forward
    module = ladder.copied(experiment.rung)
    constants = {name for name in experiment.changes if hasattr(module, name)}
    for constant in constants:
        setattr(module, constant, type(getattr(module, constant))(experiment.changes[constant]))
    launch = {name: value for name, value in experiment.changes.items() if name not in constants}
    if launch:
        module.forward_kernel = AlteredKernel(module.forward_kernel, launch)
    return module.forward


class AlteredKernel:
    """A stand-in that launches a kernel with different arguments and options."""

    def __init__(self, kernel: Any, changes: Mapping[str, Any]) -> None:
        self.kernel, self.changes = kernel, dict(changes)
        self.shared = self.changes.pop("shared", None)

    def __getitem__(self, grid: tuple) -> Callable:
        def launch(*given: Any, **named: Any) -> None:
            names = self.kernel.arg_names
            given = [self.changes.get(name, value) for name, value in zip(names, given, strict=False)]
            named |= {name: value for name, value in self.changes.items() if name not in names[: len(given)]}
            if self.shared:
                triton_versions.reserve_shared_memory(self.kernel.warmup(*given, grid=grid, **named), self.shared)
            self.kernel[grid](*given, **named)

        return launch


def name_of_baseline(name: str) -> str:
    """Return the full name of the rung, or the name of the experiment, that serves as an experiment's baseline."""
    other = EXPERIMENTS[name].baseline
    return other if other in EXPERIMENTS else ladder.find(other)


def problems_to_time() -> dict[Problem, list[str]]:
    """Return {problem: names to time}.

    These are the names of the experiments on the problem, each preceded by its baseline, and of the rungs in
    HEADS_FOR_WAVES.
    """
    names_of: dict[Problem, dict[str, None]] = {}
    for name, experiment in EXPERIMENTS.items():
        for shape in experiment.expected:
            names_of.setdefault(problem_of(*shape), {}).update({name_of_baseline(name): None, name: None})
    for rung, head_counts in HEADS_FOR_WAVES.items():
        for heads in head_counts:
            names_of.setdefault(problem_of(128, causal=False, heads=heads), {})[ladder.find(rung)] = None
    return {problem: list(names) for problem, names in names_of.items()}


def problem_of(d: int, causal: bool, heads: int) -> Problem:
    """Return a problem with this number of heads of 4,096 tokens.

    If the heads fill the GPU, they belong to four sequences, as in the ladder's table. Otherwise, they belong to one.
    """
    filling = Problem.square(4096, d, causal)
    return filling if heads == filling.batch * filling.heads else Problem(1, heads, heads, 4096, 4096, d, causal)


# Results --------------------------------------------------------------------------------------------------------


def ratio(record: Record, name: str, d: int, causal: bool, heads: int) -> float | None:
    """Return the ratio of an experiment's speed to that of its baseline, or None if it was not measured."""
    problem, other = problem_of(d, causal, heads).as_dict(), name_of_baseline(name)
    rows = [row for row in record.rows if (row.direction, row.problem) == ("experiments", problem)]
    return next((row.ratio(name, other) for row in rows if {name, other} <= row.values.keys()), None)


def table(record: Record) -> list[str]:
    """Return a table with one line per experiment and shape: the question, the predicted and the measured ratio."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        for (d, causal, heads), expected in experiment.expected.items():
            numbers = (expected, ratio(record, name, d, causal, heads))
            cells = ["-" if x is None else f"{x:.2f}" for x in numbers]
            lines.append([name, experiment.question, experiment.baseline, f"{d}, {heads}{', causal' * causal}", *cells])
    columns = ["experiment", "question", "over", "d, heads", "expected", "measured"]
    return recording.markdown_table(columns, lines)
