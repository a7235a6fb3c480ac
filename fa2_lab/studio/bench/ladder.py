"""The ladder of kernels, measured: what each change buys, in a shape that fills the GPU and in one that does not."""

from __future__ import annotations

from functools import cache, partial

from fa2_lab.kernels import rungs as ladder
from fa2_lab.studio.bench import counters, peers
from fa2_lab.studio.bench.problem import Problem, error
from fa2_lab.studio.bench.protocol import PROTOCOL, Timing, in_a_line, measure
from fa2_lab.studio.bench.results import Results, Row, machine
from fa2_lab.studio.bench.suites import TOLERANCE, ceilings, collect

SHAPES = {"training": (4, 16), "one sequence, few heads": (1, 8)}  # batch, heads


def grid(N: int = 4096) -> list[Problem]:
    """Both shapes, causal or not, d 64 and 128."""
    return [
        Problem(batch, heads, heads, N, N, d, causal)
        for batch, heads in SHAPES.values()
        for d in (64, 128)
        for causal in (False, True)
    ]


def run() -> Results:
    """Time every rung on every problem, then read the hardware's counters where they can be read."""
    jobs = [partial(climb, problem) for problem in grid()]
    for problem in (Problem(4, 16, 16, 4096, 4096, 64, False), Problem(4, 16, 16, 4096, 4096, 128, False)):
        jobs += [partial(count, problem, name) for name, _ in everybody(problem, None)]
    return collect(Results("ladder", machine(), PROTOCOL, ceilings()), jobs)


def climb(problem: Problem) -> Row:
    """Milliseconds of every rung on one problem, at d = 64 also of the two ways to split a tile among warps."""
    tensors = problem.tensors()
    calls, failed = {}, {}
    for name, call in contestants(problem, tensors):
        try:
            wrong = error(call(), *tensors, problem.causal)
        except Exception as failure:  # a rung that does not run here is named with its reason
            failed[name] = in_a_line(failure)
            continue
        if wrong <= TOLERANCE:
            calls[name] = call
        else:
            failed[name] = f"wrong: error {wrong:.1e}"
    timings = measure(calls)
    failed |= {name: why for name, why in timings.items() if isinstance(why, str)}
    values = {name: [t.median, t.low, t.high] for name, t in timings.items() if isinstance(t, Timing)}
    return Row(problem.as_dict(), "forward", values, failed, flops=problem.flops("forward"))


def contestants(problem: Problem, tensors) -> list[tuple]:
    """(name, call) of every rung, each returning O."""
    scale = problem.d**-0.5
    calls = [(name, lambda rung=rung: rung(*tensors, problem.causal, scale)[0]) for name, rung in ladder.RUNGS.items()]
    if problem.d == 64 and not problem.causal:
        for name, kernel in (("split-K", ladder.split_keys_kernel), ("split-Q", ladder.split_queries_kernel)):
            calls.append((name, lambda kernel=kernel: ladder.split(kernel, *tensors, scale)))
    return calls


def everybody(problem: Problem, tensors) -> list[tuple]:
    """The rungs, and what the package itself runs."""
    own = {name: peers.PEERS[name](problem) for name in ("fa2_lab portable", "fa2_lab")}
    return contestants(problem, tensors) + [(name, partial(call, *(tensors or ()))) for name, call in own.items()]


def count(problem: Problem, rung: str) -> Row:
    """The hardware's counters for one call of a rung."""
    counts, reason = counted(problem)
    values = {metric: [number] for metric, number in counts.get(rung, {}).items()}
    failed = {"ncu": reason} if reason else {}
    return Row(problem.as_dict() | dict(rung=rung), "counters", values, failed, unit="count")


@cache
def counted(problem: Problem) -> tuple[dict[str, dict[str, float]], str]:
    """The counters of everybody, or why there are none."""
    try:
        return counters.read(__name__, problem, [name for name, _ in everybody(problem, None)]), ""
    except RuntimeError as failure:
        return {}, str(failure)
