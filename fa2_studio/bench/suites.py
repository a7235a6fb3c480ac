"""The suites of dense problems, with their problems, directions and implementations."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations, protocol
from fa2_studio.bench.compare import DIRECTIONS, Plan, compare, measure_ceilings, prepare_all, prepare_checked_calls
from fa2_studio.bench.precompile import precompile_all
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.recording import environment

BOTH = (False, True)  # without a mask, and causal


def random_problems(count: int = 200, seed: int = 2811) -> list[Problem]:
    """Return problems of random shapes, which vary in batch size, heads, groups, N (with tails), d and mask.

    The seed used for the record is fixed. Block sizes were tuned on other seeds (77, 2603, 4711, 2611, 2711, 2911 and
    2912). If they are ever tuned on this seed, the record must use a new one.
    """
    draw, problems = random.Random(seed), []

    def pick(*kinds: int) -> int:
        return kinds[int(draw.random() * len(kinds))]

    def length() -> int:
        N = int(2 ** (6 + 8.5 * draw.random()))
        return pick(N, N // 64 * 64)

    while len(problems) < count:
        N = length()
        N_k = N if draw.random() < 0.75 else length()
        kv, group, d = pick(1, 2, 4, 8, 16), pick(1, 1, 2, 4, 8), pick(32, 64, 64, 64, 96, 128, 128, 128)
        causal = draw.random() < 0.5 and N <= N_k
        problem = Problem(pick(1, 2, 3, 4, 8, 16), kv * group, kv, N, N_k, d, causal)
        if 1e9 < problem.forward_flops < 2e12:  # longer than a launch, but shorter than a few seconds
            problems.append(problem)
    return problems


PAPER = [Problem.square(N, d, causal) for d in (64, 128) for causal in BOTH for N in (2**n for n in range(9, 15))]
LONG = [(False, 32768), (False, 65536), *((True, 2**n) for n in range(15, 19))]  # unmasked calls are slower
MASKS = ({}, dict(window=1024), dict(window=128), dict(softcap=50), dict(sinks=True), dict(window=128, sinks=True))
BIAS = [
    Problem(2, 16, 16, 4096, 4096, d, causal, alibi=alibi)
    for d in (64, 128)
    for causal in BOTH
    for alibi in ("", "distance", "column")  # the last two give the same softmax
]
SMALL = [Problem(1, 8, 8, N, N, d, causal=False) for d in (64, 128) for N in (128, 256, 512)]  # shorter than a launch
MEMORY = [Problem(1, 16, 16, 2**n, 2**n, 128, causal=True) for n in range(11, 17)]
SMOKE = [  # square and rectangular shapes, whole and ragged tiles, and grouped heads
    Problem(1, *shape, causal, dtype="float32")
    for shape in ((2, 2, 128, 128, 64), (4, 1, 70, 100, 32), (1, 1, 96, 96, 128))
    for causal in BOTH
]


class ProblemSet(NamedTuple):
    """The problems of a suite, the suite in implementations.py that names its implementations, and the repetitions."""

    problems: list[Problem]
    implementations: str = "dense"
    repeats: int = protocol.REPEATS


PROBLEM_SETS = dict(
    paper=ProblemSet(PAPER),
    ampere=ProblemSet(PAPER, "ampere"),
    nvidia=ProblemSet([Problem(1, 64, 8, 2**n, 2**n, 128, causal) for causal in BOTH for n in range(11, 16)]),
    long=ProblemSet([Problem(1, 1, 1, N, N, 128, causal) for causal, N in LONG]),
    heads=ProblemSet([Problem(2, 32, kv, 4096, 4096, 128, causal) for causal in BOTH for kv in (32, 8, 1)]),
    deterministic=ProblemSet([problem for problem in PAPER if problem.N_q in (2048, 8192)], "deterministic"),
    sweep=ProblemSet(random_problems(), "sweep", repeats=7),
    masks=ProblemSet([Problem(2, 16, 16, 8192, 8192, d, causal=True, **x) for d in (64, 128) for x in MASKS], "masks"),
    bias=ProblemSet(BIAS, "bias"),
)


def plan_dense(suite: str, sustained: bool = False) -> Plan:
    """Plan all implementations on all problems and directions of a suite, with kernel-only timing.

    With `sustained`, plan only the fastest implementations, timed without pauses or, for the suite "sweep", in a few
    calls in a row that include host time.
    """
    problems, kind, repeats = PROBLEM_SETS[suite]
    names = implementations.names("sustained" if sustained else kind)
    precompile_all(problems, names)
    repeated = protocol.measure_repeated, protocol.REPEATED_PROTOCOL
    without_pause, protocol_text = (
        repeated if suite == "sweep" else (protocol.measure_sustained, protocol.SUSTAINED_PROTOCOL)
    )
    timing = without_pause if sustained else partial(protocol.measure_kernels, repeats=repeats)
    jobs = [partial(time_dense, problem, direction, names, timing) for problem in problems for direction in DIRECTIONS]
    if sustained:
        return Plan(Record(suite, environment(), protocol="", sustained_protocol=protocol_text), sustained=jobs)
    return Plan(Record(suite, environment(), protocol.describe_kernel_timing(repeats), measure_ceilings()), jobs)


def time_dense(
    problem: Problem, direction: str, names: Sequence[str], timing: Callable[[dict], dict], unit: str = "ms"
) -> Measurement:
    """Measure the named implementations on the same tensors, and return their row."""
    prepare_by_name = prepare_checked_calls(problem, direction, names, problem.tensors(grad=direction != "forward"))
    flops = problem.flops(direction) if unit == "ms" else 0.0
    return compare(problem.as_dict(), direction, prepare_by_name, flops, timing, unit)


# Without a GPU ------------------------------------------------------------------------------------------------

FEW_CALLS = partial(protocol.measure_host_time, rounds=3, warm_up_calls=0, in_a_row=1)
SMOKE_PROTOCOL = (
    "On the host, we measure how many microseconds a call takes to return, and report the median of 3 calls. Before "
    "the timing starts, we check every result."
)
INTERPRETED = " Without a GPU, fa2_lab runs in Triton's interpreter, whose times say nothing about a GPU."


def smoke() -> Plan:
    """Plan the implementations that need no GPU on small problems, to show that the bench works."""
    protocol_text = SMOKE_PROTOCOL if torch.cuda.is_available() else SMOKE_PROTOCOL + INTERPRETED
    names = implementations.names("smoke")
    jobs = [
        partial(time_dense, p, direction, names, FEW_CALLS, "µs on the host") for p in SMOKE for direction in DIRECTIONS
    ]
    return Plan(Record("smoke", environment(), protocol_text), jobs)


# Host cost and memory -----------------------------------------------------------------------------------------

MEMORY_PROTOCOL = (
    "We report the peak memory that one call allocates, in MiB. The inputs and dO do not count, and we empty "
    "the allocator's cache before each call."
)


def small() -> Plan:
    """Plan host-time measurements of one warm call, either a forward pass or a forward and a backward pass together."""
    places = [
        (p, direction) for direction in ("forward", "both") for p in SMALL if direction == "forward" or p.N_q == 256
    ]
    jobs = [
        partial(time_dense, *place, implementations.names("dense"), protocol.measure_host_time, "µs")
        for place in places
    ]
    precompile_all(SMALL)
    return Plan(Record("small", environment(), protocol.HOST_PROTOCOL), jobs)


def memory() -> Plan:
    """Plan peak-memory measurements of one call for each problem and direction."""
    jobs = [partial(measure_memory, problem, direction) for problem in MEMORY for direction in ("forward", "both")]
    precompile_all(MEMORY)
    return Plan(Record("memory", environment(), MEMORY_PROTOCOL), jobs)


def measure_memory(
    problem: Problem, direction: str, names: Sequence[str] = implementations.names("dense", "memory")
) -> Measurement:
    """Measure the peak memory of one call, excluding its inputs, and return the row.

    The call is a forward pass, or a forward and a backward pass together.
    """
    values, failed = prepare_all({name: partial(extra_mebibytes, name, problem, direction) for name in names})
    return Measurement(problem.as_dict(), direction, values, failed, unit="MiB")


def extra_mebibytes(name: str, problem: Problem, direction: str) -> list[float]:
    """Return the peak memory in MiB of a second call, because the first call may compile."""
    attention = implementations.prepare(name, problem)
    tensors = problem.tensors(grad=direction != "forward")
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        O = attention(*tensors[:3])
        if direction != "forward":
            torch.autograd.grad(O, tensors[:3], tensors[3])
        peak = torch.cuda.max_memory_allocated() - before
        del O
    return [peak / 2**20]
