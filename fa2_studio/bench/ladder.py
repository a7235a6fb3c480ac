"""The ladder of kernels, timed rung by rung next to the fastest other implementations, with hardware counters."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from fa2_lab.api.attention import attention
from fa2_lab.kernels import ladder
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import files
from fa2_studio.bench import counters, experiments, implementations
from fa2_studio.bench.compare import Plan, compare, measure_ceilings, wrong_result_reason
from fa2_studio.bench.peers import dense
from fa2_studio.bench.precompile import run_in_processes
from fa2_studio.bench.problem import Problem, relative_error_of_gradients, relative_error_of_O, sampled_gradients
from fa2_studio.bench.protocol import KERNEL_PROTOCOL, SUSTAINED_PROTOCOL, measure_kernels, measure_sustained
from fa2_studio.bench.recording import environment
from fa2_studio.bench.registry import LADDER_PARTS

OVER_N, RUNGS_OVER_N = "over N", ladder.RUNGS[:2]  # the direction of the rows that time these rungs over N
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# The problem with which the table begins, and for which the counters are read.
MAIN_PROBLEM = Problem.square(4096, 128, causal=False)
SIDE_PROBLEM = Problem.square(4096, 64, causal=False)  # the problem on which the side rungs s00 and s01 are timed


def problems() -> list[Problem]:
    """Return problems with 16,384 tokens and hidden size 2,048, and problems with eight heads, for each d and mask."""
    squares = [Problem.square(4096, d, causal) for d in (128, 64) for causal in (False, True)]
    return squares + [Problem(1, 8, 8, 4096, 4096, d, causal) for d in (128, 64) for causal in (False, True)]


def names_to_time(problem: Problem) -> tuple[str, ...]:
    """Return the names of every rung and of the implementations in the suite, which include attention()."""
    return ladder.RUNGS + (ladder.SIDE if problem == SIDE_PROBLEM else ()) + implementations.names("ladder")


# {problem: names whose counters are read}
NAMES_TO_COUNT = {SIDE_PROBLEM: ("r09_free_loads", *ladder.SIDE), MAIN_PROBLEM: names_to_time(MAIN_PROBLEM)}


def run(beside: Path | None = None, part: Sequence[str] = LADDER_PARTS) -> Plan:
    """Time every rung on every problem, run the experiments, and read the hardware counters.

    `beside` is a file that defines one more implementation, forward(q, k, v, causal), which returns O or a tuple that
    begins with O.
    """
    main_problems = [replace(MAIN_PROBLEM, causal=causal) for causal in (False, True)]
    experiments_of = experiments.problems_to_time()
    side = [(rung, SIDE_PROBLEM) for rung in ladder.SIDE]
    compiling = {
        "rungs": [
            *((rung, problem) for rung in ladder.RUNGS[::-1] for problem in problems()),
            *side,
        ],  # the slowest first
        "experiments": [(name, problem) for problem, names in experiments_of.items() for name in names],
        "backward": [(rung, problem) for rung in ladder.BACKWARD for problem in main_problems],
    }
    jobs = {
        "rungs": [partial(time_kernels, p, "forward", names_to_time(p), beside=beside) for p in problems()],
        "experiments": [
            partial(time_kernels, problem, "experiments", names) for problem, names in experiments_of.items()
        ],
        "lengths": [partial(time_kernels, Problem.square(N, 128, causal=False), OVER_N, RUNGS_OVER_N) for N in LENGTHS],
        "sustained": [
            partial(time_kernels, p, "forward", names_to_time(p), beside=beside, timing=measure_sustained)
            for p in main_problems
        ],
        "backward": [partial(time_backward, problem, "backward") for problem in main_problems],
        "counters": [
            partial(measure_counters, problem, name) for problem, names in NAMES_TO_COUNT.items() for name in names
        ],
    }
    run_in_processes(call_once, [call for name in part for call in compiling.get(name, ())])
    record = Record("ladder", environment(), KERNEL_PROTOCOL, measure_ceilings(), sustained_protocol=SUSTAINED_PROTOCOL)
    sustained = jobs.pop("sustained") if "sustained" in part else ()
    return Plan(record, [job for name in jobs if name in part for job in jobs[name]], sustained)


def call_once(name: str, problem: Problem) -> None:
    """Call a rung or an experiment once, which stores its compiled kernel on disk before it is timed."""
    q, k, v, dO = (x.detach() for x in problem.tensors(grad=True))
    if name in ladder.BACKWARD:
        L = torch.zeros(q.shape[:3], device=q.device)
        ladder.load(name).backward(q, k, v, q, L, dO, problem.causal)
    else:
        experiments.forward_of(name)(q, k, v, problem.causal)


def forward_call(problem: Problem, name: str | Path, tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a call that runs an implementation, a rung, an experiment or a file, and returns O."""
    if name in implementations.IMPLEMENTATIONS:
        return partial(implementations.prepare(name, problem), *tensors)
    forward = files.module_at(name).forward if isinstance(name, Path) else experiments.forward_of(name)
    return lambda: dense.O_of(forward(*tensors, problem.causal))


def time_kernels(
    problem: Problem,
    direction: str,
    names: Sequence[str],
    beside: Path | None = None,
    timing: Callable = measure_kernels,
) -> Measurement:
    """Time rungs, experiments and implementations on one problem, alternating or each for a second."""
    tensors = problem.tensors()
    every = {name: name for name in names} | ({beside.stem: beside} if beside else {})
    prepare_by_name = {name: partial(forward_call, problem, who, tensors) for name, who in every.items()}
    return time_checked(
        problem, direction, prepare_by_name, lambda O: relative_error_of_O(O, *tensors, problem.causal), timing
    )


def time_backward(problem: Problem, direction: str) -> Measurement:
    """Time the rungs of the backward pass, attention() and its portable kernels."""
    q, k, v, dO = problem.tensors(grad=True)
    truth = sampled_gradients(q, k, v, dO, problem.causal)
    with torch.no_grad():
        O, L = attention(q, k, v, causal=problem.causal, return_lse=True)
    given = *(x.detach() for x in (q, k, v)), O, L, dO, problem.causal

    def ours(name: str) -> Callable:
        kept = implementations.prepare(name, problem)(q, k, v)
        return partial(torch.autograd.grad, kept, (q, k, v), dO, retain_graph=True)

    prepare_by_name = {rung: lambda rung=rung: partial(ladder.load(rung).backward, *given) for rung in ladder.BACKWARD}
    prepare_by_name |= {name: partial(ours, name) for name in ("fa2_lab portable", "fa2_lab")}
    return time_checked(
        problem, direction, prepare_by_name, lambda gradients: relative_error_of_gradients(gradients, truth)
    )


def time_checked(
    problem: Problem,
    direction: str,
    prepare_by_name: Mapping[str, Callable[[], Callable]],
    error_of: Callable,
    timing: Callable = measure_kernels,
) -> Measurement:
    """Check and time the calls that the functions in `prepare_by_name` return, and return their row."""

    def checked(prepare: Callable[[], Callable]):
        call = prepare()
        return wrong_result_reason([error_of(call())]) or call

    prepared = {name: partial(checked, prepare) for name, prepare in prepare_by_name.items()}
    flops = problem.flops("backward" if direction == "backward" else "forward")
    return compare(problem.as_dict(), direction, prepared, flops, timing)


def measure_counters(problem: Problem, rung: str) -> Measurement:
    """Measure the hardware counters of one call of a rung or another implementation, and return the row."""
    counts, reason = counters_of(problem)
    values = {metric: [number] for metric, number in counts.get(rung, {}).items()}
    failed = {"ncu": reason} if reason else {}
    return Measurement(problem.as_dict() | dict(rung=rung), "counters", values, failed, unit="count")


@cache
def counters_of(problem: Problem) -> tuple[dict[str, dict[str, float]], str]:
    """Return ({name: counters}, "") for the names in NAMES_TO_COUNT[problem], or ({}, reason) if ncu fails."""
    try:
        return counters.read_counters(__name__, problem, NAMES_TO_COUNT[problem]), ""
    except RuntimeError as failure:
        return {}, str(failure)


if __name__ == "__main__":
    shape, *asked_for = Problem(**json.loads(sys.argv[1])), *sys.argv[2:]
    made, given = cache(forward_call), shape.tensors()
    counters.run_under_ncu({name: lambda name=name: made(shape, name, given)() for name in asked_for}, asked_for)
