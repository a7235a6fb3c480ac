"""What each idea for the Hopper kernels and decode is worth: they run with and without it, in turn, beside cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from fa2_lab.studio.bench import ahead, peers
from fa2_lab.studio.bench.decode import MORE, microseconds
from fa2_lab.studio.bench.ideas import IDEAS
from fa2_lab.studio.bench.problem import Problem, distance, error, gradient_error, gradients_by_definition, worst
from fa2_lab.studio.bench.protocol import PROTOCOL, Timing, in_a_line, measure, reading, wall_microseconds
from fa2_lab.studio.bench.results import Results, Row, machine
from fa2_lab.studio.bench.suites import TOLERANCE, call_of, ceilings, collect
from fa2_lab.studio.bench.variants import Idea, Kernels, as_they_are, variant

TODAY, CUDNN = "today", "cuDNN"
PROTOCOL = f"{PROTOCOL}; decode: {MORE} repetitions, the L2 cache filled with other data by reading"


def run() -> Results:
    """Compile all variants, then measure every idea on each of its problems."""
    if not as_they_are().host.multiprocessors(torch.device("cuda")):
        raise ValueError(f"ideas: got {torch.cuda.get_device_name()}; it takes a Hopper GPU, whose kernels it edits")
    ahead.elsewhere(call_once, [(n,) for n in range(len(IDEAS))])
    jobs = [partial(row, problem, direction(idea), idea=idea) for idea in IDEAS for problem in idea.problems]
    return collect(Results("ideas", machine(), PROTOCOL, ceilings()), jobs)


def direction(idea: Idea) -> str:
    return idea.part if idea.part in ("backward", "decode") else "forward"


def call_once(n: int) -> None:
    """Compile an idea's variant and the kernels of today, in another process; what fails here fails again later."""
    idea = IDEAS[n]
    for problem in dict.fromkeys(idea.problems):
        try:
            inputs = inputs_of(problem, idea.part)
            for kernels in (as_they_are(), variant(idea)):
                call(kernels, problem, idea.part, inputs)()
        except Exception:  # the run that measures meets it again, and names it
            continue


def row(problem: Problem, direction: str, idea: Idea) -> Row:
    """An idea on one problem: milliseconds with it, without it, and of cuDNN, all of one run."""
    found = compared(problem, idea.part)
    today, other = ("with it", "without it") if idea.kept else ("without it", "with it")
    found = {today: found[TODAY], other: found[idea.name], CUDNN: found[CUDNN]}
    failed = {name: why for name, why in found.items() if isinstance(why, str)}
    values = {name: numbers for name, numbers in found.items() if name not in failed}
    where = problem.as_dict() | dict(part=idea.part, idea=idea.name, kept=idea.kept)
    if idea.part in ("host", "decode"):
        return Row(where, direction, values, failed, unit="µs")
    return Row(where, direction, values, failed, flops=problem.flops(direction))


@cache
def compared(problem: Problem, part: str) -> dict[str, list[float] | str]:
    """The kernels of today, every variant that is right, and cuDNN on one problem, in turn; or why there is no time."""
    inputs = inputs_of(problem, part)
    today = call(as_they_are(), problem, part, inputs)
    truth = today()
    check(problem, part, inputs, truth)
    ideas = [idea for idea in IDEAS if idea.part == part and problem in idea.problems]
    found = {idea.name: ready(idea, problem, inputs, truth) for idea in ideas}
    failed = {name: why for name, why in found.items() if isinstance(why, str)}
    calls = {name: variant for name, variant in found.items() if name not in failed}
    return timed(part, {TODAY: today, **calls, CUDNN: cudnn(problem, part, inputs)}) | failed


def ready(idea: Idea, problem: Problem, inputs, truth) -> Callable | str:
    """A call of an idea's variant, or why there is none: it fails, or its results are not those of today."""
    try:
        found = call(variant(idea), problem, idea.part, inputs)
        wrong = worst(map(distance, found(), (x.double() for x in truth)))
    except Exception as failure:  # a variant that fails is named with its reason
        return in_a_line(failure)
    return found if wrong <= TOLERANCE else f"wrong: error {wrong:.1e}"


def timed(part: str, calls: dict[str, Callable]) -> dict[str, list[float] | str]:
    """Median and quartiles on the GPU, or what a call costs the host."""
    if part == "host":
        return {name: [taken] for name, taken in wall_microseconds(calls).items()}
    if part == "decode":
        found = measure(calls, MORE, reading)
        return {name: microseconds(t) if isinstance(t, Timing) else t for name, t in found.items()}
    return {name: [t.median, t.low, t.high] if isinstance(t, Timing) else t for name, t in measure(calls).items()}


# Calls --------------------------------------------------------------------------------------------------------


def inputs_of(problem: Problem, part: str) -> tuple[torch.Tensor, ...]:
    """q, k, v; for the backward also dO, O and L."""
    if part != "backward":
        return problem.tensors()
    q, k, v, dO = (x.detach() for x in problem.tensors(grad=True))
    return q, k, v, dO, *as_they_are().forward.forward(q, k, v, None, problem.causal, problem.d**-0.5)


def call(kernels: Kernels, problem: Problem, part: str, inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call of some kernels: O and L, or dQ, dK and dV."""
    options = None, problem.causal, problem.d**-0.5
    if part == "decode":
        prepared = kernels.decode.prepare(*inputs, *options)
        return lambda: prepared(*inputs, None)
    if part != "backward":
        return lambda: kernels.forward.forward(*inputs, *options)
    q, k, v, dO, O, L = inputs
    return lambda: kernels.backward.backward(dO, None, q, k, v, O, L, *options)


def check(problem: Problem, part: str, inputs, found) -> None:
    """Hold the kernels of today, against which variants are checked, against float64."""
    q, k, v, *rest = inputs
    if part == "backward":
        wrong = gradient_error(found, gradients_by_definition(q, k, v, rest[0], problem.causal))
    else:
        wrong = error(found[0], q, k, v, problem.causal)
    if not wrong <= TOLERANCE:
        raise ArithmeticError(f"the kernels of today are wrong: error {wrong:.1e}")


def cudnn(problem: Problem, part: str, inputs) -> Callable[[], object]:
    """cuDNN on the same tensors."""
    attention = peers.PEERS[CUDNN](problem)
    if part != "backward":
        return partial(attention, *inputs)
    q, k, v = (x.requires_grad_() for x in map(torch.Tensor.detach, inputs[:3]))
    return call_of(attention, "backward", (q, k, v, inputs[3]), attention(q, k, v))
