"""The suites over a grid of dense problems: which problems, in which direction, against whom."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import contestants
from fa2_studio.bench.ahead import compile_ahead
from fa2_studio.bench.contest import DIRECTIONS, all_tried, call_of, ceilings, collect, contest, ready
from fa2_studio.bench.peers import dense
from fa2_studio.bench.power import Meter
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.protocol import HOST_PROTOCOL, REPEATS, SUSTAINED, measure, rested, sustain, wall_microseconds
from fa2_studio.bench.results import machine


def paper_grid() -> list[Problem]:
    """The grid of the FA2 paper's figures: d 64 and 128, 16k tokens, causal or not."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    return [Problem.square(N, d, causal) for d in (64, 128) for causal in (False, True) for N in lengths]


def long_grid() -> list[Problem]:
    """One sequence of up to 262,144 tokens, one head of 128; without a mask, which takes longer, to 65,536."""
    shapes = [(False, N) for N in (32768, 65536)] + [(True, N) for N in (32768, 65536, 131072, 262144)]
    return [Problem(1, 1, 1, N, N, 128, causal) for causal, N in shapes]


def heads_grid() -> list[Problem]:
    """Grouped heads: 32 query heads on 32, 8 and 1 key heads."""
    return [Problem(2, 32, kv, 4096, 4096, 128, causal) for causal in (False, True) for kv in (32, 8, 1)]


def nvidia_grid() -> list[Problem]:
    """The shape in which NVIDIA publishes cuDNN's speed: one sequence, 64 query heads on 8, d 128."""
    return [Problem(1, 64, 8, N, N, 128, causal) for causal in (False, True) for N in (2048, 4096, 8192, 16384, 32768)]


def same_bits_grid() -> list[Problem]:
    """Where gradients with the same bits in every call are measured beside the fast ones."""
    return [Problem.square(N, d, causal) for d in (64, 128) for causal in (False, True) for N in (2048, 8192)]


def random_grid(count: int = 200, seed: int = 2603) -> list[Problem]:
    """Shapes that no size was chosen for: batch, heads, groups, N with tails, d, mask.

    They are drawn once and for all. (Sizes were chosen by some of those of seed 2307.)
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
        if 1e9 < problem.forward_flops < 2e12:  # neither a launch's time nor seconds
            problems.append(problem)
    return problems


class Contest(NamedTuple):
    """On which problems, who of the table (a word of contestants.py), and how often."""

    grid: Callable[[], list[Problem]]
    who: str = "grid"
    repeats: int = REPEATS


CONTESTS = dict(
    paper=Contest(paper_grid),
    nvidia=Contest(nvidia_grid),
    long=Contest(long_grid),
    heads=Contest(heads_grid),
    deterministic=Contest(same_bits_grid, "deterministic"),
    sweep=Contest(random_grid, "sweep", repeats=7),
)


def contests(suite: str, directions: Sequence[str] = DIRECTIONS, sustained: bool = False) -> Record:
    """Everybody on every problem of a grid, rested, or the fastest peers sustained."""
    grid, who, repeats = CONTESTS[suite]
    problems, names = grid(), contestants.names("sustained" if sustained else who)
    compile_ahead(problems, names)
    places = [(problem, direction) for problem in problems for direction in directions]
    if not sustained:
        jobs = [partial(row, *place, names, partial(measure, repeats=repeats)) for place in places]
        return collect(Record(suite, machine(), rested(repeats), ceilings()), jobs)
    with Meter() as meter:
        jobs = [partial(row, *place, names, partial(sustain, meter=meter)) for place in places]
        record = collect(Record(suite, machine(), protocol="", sustained_protocol=SUSTAINED), jobs)
    return replace(record, rows=[], sustained=record.rows)


def row(problem: Problem, direction: str, names: Sequence[str], timing: Callable[[dict], dict]) -> Measurement:
    """Every contestant on the same tensors."""
    prepares = ready(problem, direction, names, problem.tensors(grad=direction != "forward"))
    return contest(problem.as_dict(), direction, prepares, problem.flops(direction), timing)


# Host cost and memory -----------------------------------------------------------------------------------------

MEMORY_PROTOCOL = "MiB allocated at the peak of one call, beyond its inputs (and dO); a fresh allocator for each"


def small_grid() -> list[Problem]:
    """Problems so small that launching them is what takes the time."""
    return [Problem(1, 8, 8, N, N, d, causal=False) for d in (64, 128) for N in (128, 256, 512)]


def small() -> Record:
    """What one call costs on the host."""
    jobs = [partial(host_cost, problem, "forward") for problem in small_grid()]
    jobs += [partial(host_cost, problem, "both") for problem in small_grid() if problem.N_q == 256]
    compile_ahead(small_grid())
    return collect(Record("small", machine(), HOST_PROTOCOL), jobs)


def host_cost(problem: Problem, direction: str, names: Sequence[str] = contestants.names("grid")) -> Measurement:
    """How long the host is busy with one warm call: forward, or forward with gradients and backward."""
    tensors = problem.tensors(grad=direction != "forward")
    right, failed = all_tried(ready(problem, direction, names, tensors))
    calls, held = {}, {}
    for name in right:
        attention, held[name] = dense.bare(contestants.prepare(name, problem))
        calls[name] = call_of(attention, direction, tensors)
    values = {name: [microseconds] for name, microseconds in wall_microseconds(calls, held).items()}
    return Measurement(problem.as_dict(), direction, values, failed, unit="µs")


def memory_grid() -> list[Problem]:
    """One batch, 16 heads of 128, ever longer."""
    return [Problem(1, 16, 16, N, N, 128, causal=True) for N in (2048, 4096, 8192, 16384, 32768, 65536)]


def memory() -> Record:
    """What one call allocates at its peak."""
    jobs = [partial(peak_memory, problem, direction) for problem in memory_grid() for direction in ("forward", "both")]
    compile_ahead(memory_grid())
    return collect(Record("memory", machine(), MEMORY_PROTOCOL), jobs)


def peak_memory(
    problem: Problem, direction: str, names: Sequence[str] = contestants.names("grid", "memory")
) -> Measurement:
    """What one call allocates beyond its inputs: forward alone, or forward and backward."""
    calls = {name: partial(extra_mebibytes, name, problem, direction) for name in names}
    values, failed = all_tried(calls)
    return Measurement(problem.as_dict(), direction, values, failed, unit="MiB")


def extra_mebibytes(name: str, problem: Problem, direction: str) -> list[float]:
    """The peak of one call after a first one has compiled everything."""
    attention = contestants.prepare(name, problem)
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
