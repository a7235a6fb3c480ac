"""The ladder of kernels, measured rung by rung beside the fastest peer, with what the hardware counts."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from fa2_lab.api.attention import attention
from fa2_lab.kernels import ladder
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import files
from fa2_studio.bench import contestants, counters, experiments
from fa2_studio.bench.ahead import elsewhere
from fa2_studio.bench.contest import Plan, ceilings, contest, refused
from fa2_studio.bench.peers import dense
from fa2_studio.bench.problem import Problem, error, gradient_error, gradients_by_definition
from fa2_studio.bench.protocol import PROTOCOL, SUSTAINED, measure, sustain
from fa2_studio.bench.registry import PARTS
from fa2_studio.bench.results import machine

OVER_N, ALONE = "over N", ladder.RUNGS[:2]  # the direction of rows in which these are timed while N grows
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MAIN = Problem.square(4096, 128, causal=False)  # where the table begins, and where the counters are read
WARPS = Problem.square(4096, 64, causal=False)  # where the side rungs s00 and s01 take part
COUNTED = ("r09_free_loads", *ladder.SIDE)  # whose counters are read there


def grid() -> list[Problem]:
    """16,384 tokens of hidden size 2,048, both head dimensions, both masks; and eight heads alone."""
    squares = [Problem.square(4096, d, causal) for d in (128, 64) for causal in (False, True)]
    return squares + [Problem(1, 8, 8, 4096, 4096, d, causal) for d in (128, 64) for causal in (False, True)]


def longer() -> list[Problem]:
    """The problems without a mask of the paper's grid at d = 128: 16,384 tokens in ever longer sequences."""
    return [Problem.square(N, 128, causal=False) for N in LENGTHS]


def run(beside: Path | None = None, part: Sequence[str] = PARTS) -> Plan:
    """Time every rung on every problem, ask the experiments, and read what the hardware counts.

    `beside` is a file with one more contestant: forward(q, k, v, causal), which returns O, or O and more.
    """
    down_here = [replace(MAIN, causal=causal) for causal in (False, True)]
    asked = experiments.problems()
    side = [(rung, WARPS) for rung in ladder.SIDE]
    compiling = {
        "rungs": [*((rung, problem) for rung in ladder.RUNGS[::-1] for problem in grid()), *side],  # the slowest first
        "experiments": [(name, problem) for problem, names in asked.items() for name in names],
        "backward": [(rung, problem) for rung in ladder.BACKWARD for problem in down_here],
    }
    jobs = {
        "rungs": [partial(climb, problem, beside=beside) for problem in grid()],
        "experiments": [partial(ask, problem, names=names) for problem, names in asked.items()],
        "lengths": [partial(ask, problem, OVER_N, names=ALONE) for problem in longer()],
        "sustained": [partial(climb, problem, beside=beside, timing=sustain) for problem in down_here],
        "backward": [partial(down, problem) for problem in down_here],
        "counters": [partial(count, problem, name) for problem in (WARPS, MAIN) for name in counted_here(problem)],
    }
    elsewhere(call_once, [call for name in part for call in compiling.get(name, ())])
    record = Record("ladder", machine(), PROTOCOL, ceilings(), sustained_protocol=SUSTAINED)
    sustained = jobs.pop("sustained") if "sustained" in part else ()
    return Plan(record, [job for name in jobs if name in part for job in jobs[name]], sustained)


def call_once(name: str, problem: Problem) -> None:
    """One call of a rung or an experiment, so that what it compiles lies on disk when it is timed."""
    q, k, v, dO = (x.detach() for x in problem.tensors(grad=True))
    if name in ladder.BACKWARD:
        L = torch.zeros(q.shape[:3], device=q.device)
        ladder.load(name).backward(q, k, v, q, L, dO, problem.causal)
    else:
        experiments.forward(name)(q, k, v, problem.causal)


def climb(problem: Problem, beside: Path | None = None, timing: Callable = measure) -> Measurement:
    """Milliseconds of every rung and of its peers on one problem, in turn or each for a second without a pause."""
    tensors = problem.tensors()
    calls = everybody(problem, tensors)
    if beside:
        mine = files.module_at(beside).forward
        calls.append((beside.stem, lambda: dense.O_of(mine(*tensors, problem.causal))))

    def check(O: torch.Tensor) -> float:
        return error(O, *tensors, problem.causal)

    return timed(problem, "forward", calls, check, timing)


def ask(problem: Problem, direction: str = "experiments", *, names: Sequence[str]) -> Measurement:
    """Milliseconds of experiments and rungs."""
    tensors = problem.tensors()
    forward = cache(experiments.forward)  # made when it is called first, so that its failure is its own

    def call(name: str) -> torch.Tensor:
        return forward(name)(*tensors, problem.causal)[0]

    calls = [(name, partial(call, name)) for name in names]
    return timed(problem, direction, calls, lambda O: error(O, *tensors, problem.causal))


def down(problem: Problem) -> Measurement:
    """Milliseconds of the backward's rungs, beside attention() and its portable kernels."""
    q, k, v, dO = problem.tensors(grad=True)
    truth = gradients_by_definition(q, k, v, dO, problem.causal)
    with torch.no_grad():
        O, L = attention(q, k, v, causal=problem.causal, return_lse=True)
    given = [x.detach() for x in (q, k, v)]
    calls = [(rung, partial(ladder.load(rung).backward, *given, O, L, dO, problem.causal)) for rung in ladder.BACKWARD]
    for name in ("fa2_lab portable", "fa2_lab"):
        O_kept = contestants.prepare(name, problem)(q, k, v)
        calls.append((name, partial(torch.autograd.grad, O_kept, (q, k, v), dO, retain_graph=True)))
    return timed(problem, "backward", calls, lambda gradients: gradient_error(gradients, truth))


def forward_of(rung: str, tensors, causal: bool):
    return ladder.load(rung).forward(*tensors, causal)[0]


def timed(
    problem: Problem, direction: str, calls: list[tuple], error_of: Callable, timing: Callable = measure
) -> Measurement:
    """Milliseconds of each (name, call), checked first."""

    def checked(call: Callable):
        return refused([error_of(call())]) or call

    prepared = {name: partial(checked, call) for name, call in calls}
    flops = problem.flops("backward" if direction == "backward" else "forward")
    return contest(problem.as_dict(), direction, prepared, flops, timing)


def everybody(problem: Problem, tensors) -> list[tuple]:
    """(name, call) of every rung, of what attention() runs, and of the peers that are installed; each returns O."""
    rungs = ladder.RUNGS + (ladder.SIDE if problem == WARPS else ())
    calls = [(rung, partial(forward_of, rung, tensors, problem.causal)) for rung in rungs]
    for name in contestants.names("ladder"):
        try:
            call = contestants.prepare(name, problem)
        except dense.Missing:
            continue
        calls.append((name, lambda call=call: call(*tensors)))
    return calls


def count(problem: Problem, rung: str) -> Measurement:
    """The hardware's counters for one call of a rung or a peer."""
    counts, reason = counted(problem)
    values = {metric: [number] for metric, number in counts.get(rung, {}).items()}
    failed = {"ncu": reason} if reason else {}
    return Measurement(problem.as_dict() | dict(rung=rung), "counters", values, failed, unit="count")


def counted_here(problem: Problem) -> list[str]:
    """Whose counters are read."""
    return [name for name, _ in everybody(problem, tensors=None) if problem == MAIN or name in COUNTED]


@cache
def counted(problem: Problem) -> tuple[dict[str, dict[str, float]], str]:
    """Their counters, or why there are none."""
    try:
        return counters.read(__name__, problem, counted_here(problem)), ""
    except RuntimeError as failure:
        return {}, str(failure)


if __name__ == "__main__":
    shape = Problem(**json.loads(sys.argv[1]))
    counters.watched(dict(everybody(shape, shape.tensors())), sys.argv[2:])
