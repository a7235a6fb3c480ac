"""The suites: which problems, in which direction, against whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from tqdm import tqdm

from fa2_lab.bench import peers
from fa2_lab.bench.problem import Problem, error
from fa2_lab.bench.protocol import PROTOCOL, Timing, measure, wall_microseconds
from fa2_lab.bench.results import Results, Row, machine

DIRECTIONS = ("forward", "backward")
NAMES = ("fa2_lab", "torch flash", "cuDNN", "FlexAttention", "flash_attn")
TOLERANCE = 2e-2  # of ‖O − truth‖ / ‖truth‖ in bf16: anything wrong is far above


def paper_grid(lengths=(512, 1024, 2048, 4096, 8192, 16384)) -> list[Problem]:
    """The grid of the FA2 paper's figures: d 64 and 128, 16k tokens, causal or not."""
    return [Problem.square(N, d, causal) for d in (64, 128) for causal in (False, True) for N in lengths]


def long_grid() -> list[Problem]:
    """One sequence of up to 262,144 tokens, 16 heads of 128."""
    return [Problem(1, 16, 16, N, N, 128, causal) for causal in (False, True) for N in (32768, 65536, 131072, 262144)]


def heads_grid() -> list[Problem]:
    """Grouped heads: 32 query heads on 32, 8 and 1 key heads."""
    return [Problem(2, 32, kv, 8192, 8192, 128, causal) for causal in (False, True) for kv in (32, 8, 1)]


GRIDS: dict[str, Callable[[], list[Problem]]] = dict(
    paper=paper_grid, quick=lambda: paper_grid((1024, 4096, 16384)), long=long_grid, heads=heads_grid
)


def run(suite: str) -> Results:
    """Measure a suite. Ctrl-C keeps what is measured so far and lists the rest as missing."""
    if suite in GRIDS:
        jobs = [partial(contest, problem, direction) for problem in GRIDS[suite]() for direction in DIRECTIONS]
        return collect(Results(suite, machine(), PROTOCOL, ceilings()), jobs)
    if suite == "small":
        return collect(Results(suite, machine(), HOST_PROTOCOL), [partial(host_cost, p) for p in small_grid()])
    jobs = [partial(peak_memory, problem, direction) for problem in memory_grid() for direction in ("forward", "both")]
    return collect(Results(suite, machine(), MEMORY_PROTOCOL), jobs)


def collect(results: Results, jobs: list[partial]) -> Results:
    """Run the jobs one after the other under a progress bar."""
    try:
        for job in tqdm(jobs, desc=f"bench {results.suite}", unit="row", disable=None):
            results.rows.append(job())
    except KeyboardInterrupt:
        results.missing = [str(job.args) for job in jobs[len(results.rows) :]]
    return results


def contest(problem: Problem, direction: str, names: Sequence[str] = NAMES) -> Row:
    """One row: every contestant on the same tensors, in turn."""
    tensors = problem.tensors(grad=direction != "forward")
    calls, failed = {}, {}
    for name, call in ready(problem, direction, names, tensors):
        if isinstance(call, str):
            failed[name] = call
        else:
            calls[name] = call
    timings = measure(calls)
    failed |= {name: why for name, why in timings.items() if isinstance(why, str)}
    values = {name: [t.median, t.low, t.high] for name, t in timings.items() if isinstance(t, Timing)}
    return Row(problem.as_dict(), direction, values, failed, flops=problem.flops(direction))


def ready(problem: Problem, direction: str, names: Sequence[str], tensors) -> Iterator[tuple[str, Callable | str]]:
    """(name, call) of every contestant that gives a right answer, or (name, why not)."""
    for name in names:
        try:
            attention = peers.PEERS[name](problem)
            O = attention(*tensors[:3])
            wrong = error(O, *tensors[:3], problem.causal)
            if not wrong <= TOLERANCE:
                yield name, f"wrong: error {wrong:.1e}"
            else:
                yield name, call_of(attention, direction, tensors, O)
        except peers.Missing as why:
            yield name, str(why)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield name, "out of memory"
        except Exception as failure:  # a peer that fails is named with its reason
            yield name, f"{type(failure).__name__}: {failure}".splitlines()[0][:160]


def call_of(attention, direction: str, tensors, O: torch.Tensor) -> Callable[[], object]:
    """The call to time: forward, backward from a kept forward, or both."""
    if direction == "forward":
        return lambda: attention(*tensors)
    q, k, v, dO = tensors
    if direction == "backward":
        return lambda: torch.autograd.grad(O, (q, k, v), dO, retain_graph=True)
    return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), dO)


def ceilings() -> dict[str, float]:
    """What this GPU reaches in this run on a large product and a large copy."""
    (gemm, flops), (copy, moved) = peers.gemm_call(), peers.copy_call()
    timings = measure(dict(gemm=gemm, copy=copy))
    return {"GEMM TFLOP/s": flops / timings["gemm"].median / 1e9, "copy TB/s": moved / timings["copy"].median / 1e9}


# Host cost and memory -----------------------------------------------------------------------------------------

HOST_PROTOCOL = "microseconds on the host until a call returns, GPU idle; median of 300 calls after a warm-up"
MEMORY_PROTOCOL = "MiB allocated at the peak of one call, beyond its inputs (and dO); a fresh allocator for each"


def small_grid() -> list[Problem]:
    """Problems so small that launching them is what takes the time."""
    return [Problem(1, 8, 8, N, N, 64, causal) for causal in (False, True) for N in (128, 256, 512)]


def host_cost(problem: Problem, names: Sequence[str] = NAMES) -> Row:
    """How long the host is busy with one warm forward call."""
    values, failed = {}, {}
    for name, call in ready(problem, "forward", names, problem.tensors()):
        if isinstance(call, str):
            failed[name] = call
        else:
            values[name] = [wall_microseconds(call)]
    return Row(problem.as_dict(), "forward", values, failed, unit="µs")


def memory_grid() -> list[Problem]:
    """One batch, 16 heads of 128, ever longer."""
    return [Problem(1, 16, 16, N, N, 128, True) for N in (2048, 4096, 8192, 16384, 32768, 65536)]


def peak_memory(problem: Problem, direction: str, names: Sequence[str] = (*NAMES, "torch math")) -> Row:
    """What one call allocates beyond its inputs: forward alone, or forward and backward."""
    values, failed = {}, {}
    for name in names:
        try:
            values[name] = [extra_mebibytes(peers.PEERS[name](problem), problem, direction)]
        except torch.OutOfMemoryError:
            failed[name] = "out of memory"
        except Exception as failure:
            failed[name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:160]
    return Row(problem.as_dict(), direction, values, failed, unit="MiB")


def extra_mebibytes(attention, problem: Problem, direction: str) -> float:
    """The peak of one call after a first one has compiled everything."""
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
    return peak / 2**20
