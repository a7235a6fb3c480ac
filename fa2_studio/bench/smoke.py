"""For a machine without a GPU: small problems, checked, and timed on whatever is there. It shows that the bench works.

In Triton's interpreter a kernel takes thousands of times what it takes on a GPU, so these times compare nothing.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import contestants
from fa2_studio.bench.contest import DIRECTIONS, collect, contest, ready
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.protocol import Timing, summary
from fa2_studio.bench.results import machine

REPEATS, UNIT = 3, "ms on the wall"
PROTOCOL = f"wall clock until the result is there, median of {REPEATS} calls; each result is checked before it is timed"
INTERPRETED = "; without a GPU: fa2_lab in Triton's interpreter, whose times say nothing about a GPU"


def run() -> Record:
    """Every contestant that needs no GPU on every small problem."""
    protocol = PROTOCOL if torch.cuda.is_available() else PROTOCOL + INTERPRETED
    jobs = [partial(check, problem, direction) for problem in grid() for direction in DIRECTIONS]
    return collect(Record("smoke", machine(), protocol), jobs)


def grid() -> list[Problem]:
    """Square and not, with whole tiles and ragged ones, causal or not, with grouped heads."""
    shapes = [(2, 2, 128, 128, 64), (4, 1, 70, 100, 32), (1, 1, 96, 96, 128)]  # heads, kv heads, N_q, N_k, d
    return [Problem(1, *shape, causal, dtype="float32") for shape in shapes for causal in (False, True)]


def check(problem: Problem, direction: str, names: Sequence[str] = contestants.names("smoke")) -> Measurement:
    """Milliseconds of each contestant whose answer is right."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = problem.tensors(grad=direction != "forward", device=device)
    return contest(problem.as_dict(), direction, ready(problem, direction, names, tensors), timing=wall, unit=UNIT)


def wall(calls: dict[str, Callable]) -> dict[str, Timing]:
    """Each call by the clock on the wall."""
    return {name: summary([wall_milliseconds(call) for _ in range(REPEATS)]) for name, call in calls.items()}


def wall_milliseconds(call: Callable) -> float:
    """From the call to its result."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
