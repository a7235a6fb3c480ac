"""The ladder of kernels, measured rung by rung beside the fastest peer, with what the compiler and the hardware say."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from fa2_lab.api.attention import attention
from fa2_lab.kernels import ladder
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import files
from fa2_studio.bench import contestants, counters
from fa2_studio.bench.ahead import elsewhere
from fa2_studio.bench.contest import ceilings, collect, contest, refused
from fa2_studio.bench.peers import dense
from fa2_studio.bench.problem import Problem, error, gradient_error, gradients_by_definition
from fa2_studio.bench.protocol import PROTOCOL, measure
from fa2_studio.bench.results import machine

SLOW, FEW = ("r00_standard", "r01_fa1", "r02_rows_outside"), 3  # rungs that are timed so many times only
MAIN = Problem.square(4096, 128, causal=False)  # where the table begins, and where the counters are read
WARPS = Problem.square(4096, 64, causal=False)  # where the side rungs s00 and s01 take part
COUNTED = ("r09_free_loads", *ladder.SIDE)  # whose counters are read there
FEW_HEADS = [Problem(1, 8, 8, 4096, 4096, 128, causal) for causal in (False, True)]
ON_AN_SM = dict(registers=65_536, shared=228 * 1024, warps=64)  # of compute capability 9.0


def grid() -> list[Problem]:
    """16,384 tokens of hidden size 2,048 at two lengths, both head dimensions, both masks; and eight heads alone."""
    squares = [Problem.square(N, d, causal) for N in (4096, 16384) for d in (128, 64) for causal in (False, True)]
    return squares + FEW_HEADS


def run(beside: Path | None = None) -> Record:
    """Time every rung on every problem; then read what was compiled, and the hardware's counters where allowed.

    `beside` is a file with one more contestant: forward(q, k, v, causal), which returns O, or O and more.
    """
    down_here = [replace(MAIN, causal=causal) for causal in (False, True)]
    calls = [(rung, problem) for rung in ladder.RUNGS[::-1] for problem in grid()]  # the last rungs compile longest
    calls = [(rung, problem) for rung, problem in calls if problem.N_q == MAIN.N_q or rung not in SLOW]
    calls += [(rung, WARPS) for rung in ladder.SIDE] + [(rung, p) for rung in ladder.BACKWARD for p in down_here]
    elsewhere(call_once, calls)
    shown = [(rung, WARPS if rung in ladder.SIDE else MAIN) for rung in ladder.RUNGS + ladder.SIDE + ladder.BACKWARD]
    with ThreadPoolExecutor(os.cpu_count()) as several:  # each compiles in a process of its own
        read = dict(zip(shown, several.map(compiled, *zip(*shown, strict=True)), strict=True))
    jobs = [partial(climb, problem, beside=beside) for problem in grid()]
    jobs += [partial(down, problem) for problem in down_here]
    jobs += [partial(lambda problem, rung: read[rung, problem], problem, rung) for rung, problem in shown]
    jobs += [partial(count, problem, name) for problem in (WARPS, MAIN) for name in counted_here(problem)]
    return collect(Record("ladder", machine(), PROTOCOL, ceilings()), jobs)


def call_once(rung: str, problem: Problem) -> None:
    """One call, so that what it compiles lies on disk when it is timed."""
    q, k, v, dO = (x.detach() for x in problem.tensors(grad=True))
    if rung in ladder.BACKWARD:
        L = torch.zeros(q.shape[:3], device=q.device)
        ladder.load(rung).backward(q, k, v, q, L, dO, problem.causal)
    else:
        ladder.load(rung).forward(q, k, v, problem.causal)


def climb(problem: Problem, beside: Path | None = None) -> Measurement:
    """Milliseconds of every rung and of its peers on one problem."""
    tensors = problem.tensors()
    calls = everybody(problem, tensors)
    if beside:
        mine = files.module_at(beside).forward
        calls.append((beside.stem, lambda: dense.O_of(mine(*tensors, problem.causal))))
    return timed(problem, "forward", calls, lambda O: error(O, *tensors, problem.causal))


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


def timed(problem: Problem, direction: str, calls: list[tuple], error_of: Callable) -> Measurement:
    """Milliseconds of each (name, call), checked first."""

    def checked(call: Callable):
        return refused([error_of(call())]) or call

    def timing(right: dict) -> dict:
        slow = {name: call for name, call in right.items() if name in SLOW}
        timings = measure({name: call for name, call in right.items() if name not in slow}) | measure(slow, FEW)
        return {name: timings[name] for name in right}

    prepared = {name: partial(checked, call) for name, call in calls}
    return contest(problem.as_dict(), direction, prepared, problem.flops(direction), timing)


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


def compiled(rung: str, problem: Problem) -> Measurement:
    """What the compiler made of the largest kernel of a rung, and how many of its programs fit on an SM."""
    from fa2_lab.tools.xray import xray

    try:
        kernels = xray(rung, "sm_90", d=problem.d, N=problem.N_q, causal=problem.causal)
    except ValueError as failure:
        return Measurement(problem.as_dict() | dict(rung=rung), "compiled", {}, {"xray": str(failure)}, unit="count")
    numbers = max((kernel.numbers for kernel in kernels), key=lambda numbers: numbers["registers"])
    kept = {name: [numbers[name]] for name in ("registers", "spills", "shared", "tensor", "exponential", "warps")}
    kept["programs on an SM"] = [programs_on_an_sm(**{name: numbers[name] for name in ON_AN_SM})]
    return Measurement(problem.as_dict() | dict(rung=rung), "compiled", kept, unit="count")


def programs_on_an_sm(registers: int, shared: int, warps: int) -> int:
    """How many fit at the same time; a program's shared memory has 1 KiB more than it asks for."""
    a_warp = 32 * (-(-registers // 8) * 8)  # registers are given out eight at a time
    return min(ON_AN_SM["registers"] // (a_warp * warps), ON_AN_SM["shared"] // (shared + 1024), 64 // warps)


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
