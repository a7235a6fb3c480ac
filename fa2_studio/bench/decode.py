"""The suite `decode`: one query with long caches, for which the time depends on the number of bytes to read.

The caches are dense, paged or of different lengths, and the number of splits is chosen by the package or fixed.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations, protocol, suites
from fa2_studio.bench.compare import (
    Plan,
    Prepared,
    compare,
    measure_ceilings,
    prepare_checked_calls,
    wrong_result_reason,
)
from fa2_studio.bench.problem import Problem, relative_error
from fa2_studio.bench.protocol import REPEATS, describe_kernel_timing, l2_reading_call, measure_kernels
from fa2_studio.bench.recording import environment

PURE_READ = "reading alone"  # the name of a kernel that reads every byte of the cache and does nothing else
PAGE_SIZES = (16, 64, 256)  # page sizes in tokens
FIXED_SPLITS = (1, 4, 16, 32)  # fixed numbers of splits
# The number of programs, too few to saturate memory, and the numbers of stages to try.
LONE_PROGRAMS, STAGES = 8, (2, 3, 4, 6)
DECODE_REPEATS = 3 * REPEATS  # more repetitions, because times differ by only a microsecond
PROTOCOL = describe_kernel_timing(DECODE_REPEATS, flush="we read other data to fill the L2 cache") + (
    " The *graph* rows show the same calls, replayed from a CUDA graph, and the *host* row shows the host time of one "
    "eager call."
)


def problems() -> list[Problem]:
    """Return problems with one query, 32 query heads (mostly with 8 K/V heads), and caches of 34 MB to 2 GB."""
    shapes = [(1, 8192), (1, 32768), (1, 65536), (8, 16384), (32, 2048), (32, 8192)]
    few = [Problem(batch, 32, 8, 1, N, 128, causal=False) for batch, N in shapes]
    return [*few, Problem(4, 32, 32, 1, 16384, 128, causal=False), Problem(8, 32, 8, 1, 16384, 64, causal=False)]


def run() -> Plan:
    """Plan all rows. The ceilings and both curves are measured immediately."""
    jobs = [partial(compare_implementations, problem) for problem in problems()]
    jobs += [partial(compare_implementations, problem, "graph") for problem in problems()]
    jobs += [partial(time_on_host, problem) for problem in problems()[:1]]
    jobs += [
        partial(compare_page_sizes, problem) for problem in problems() if problem.batch * problem.N_k in (65536, 262144)
    ][:2]
    jobs += [partial(compare_lengths, problem) for problem in problems()[5:6]]
    shapes = product((4096, 16384, 65536), (1, 4, 16, 64))
    jobs += [partial(compare_splits, Problem(batch, 32, 8, 1, N, 128, causal=False)) for N, batch in shapes]
    copy = {"copy TB/s": measure_ceilings()["copy TB/s"]}
    return Plan(
        Record(
            "decode",
            environment(),
            PROTOCOL,
            copy,
            curves=curve_by_programs(problems()[2]) | curve_by_stages(problems()[2]),
        ),
        jobs,
    )


# Rows -----------------------------------------------------------------------------------------------------------


def compare_implementations(problem: Problem, what: str = "decode") -> Measurement:
    """Compare all implementations on the same cache with a kernel that only reads the cache, and return the row.

    With what="graph", each call is replayed from a CUDA graph.
    """
    from fa2_studio.bench import bandwidth  # it needs Triton

    q, k, v = problem.tensors()
    prepare_by_name = {PURE_READ: lambda: bandwidth.read_call(torch.stack([k, v]))}
    prepare_by_name |= prepare_checked_calls(problem, "forward", implementations.names("decode"), (q, k, v))

    def replayed(prepare: Callable[[], Prepared]) -> Prepared:
        call = prepare()
        return call if what == "decode" or isinstance(call, str) else capture_graph(call)

    return time_decode(problem, what, {name: partial(replayed, prepare) for name, prepare in prepare_by_name.items()})


def capture_graph(call: Callable) -> Callable:
    """Record a call as a CUDA graph, and return a function that replays it.

    The function keeps a reference to the call, because a replay reads tensors that the call owns.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda call=call: graph.replay()


def time_on_host(problem: Problem) -> Measurement:
    """Measure the host time of one eager call, and return the row."""
    row = suites.time_dense(problem, "forward", implementations.names("decode"), protocol.measure_host_time, "µs")
    return replace(row, problem=problem_fields(problem), direction="host")


def compare_page_sizes(problem: Problem) -> Measurement:
    """Compare a dense cache with the same cache in shuffled pages of several sizes, and return the row."""
    from fa2_lab.api.attention import attention
    from fa2_lab.api.paged import attention_paged

    q, k, v = problem.tensors()
    want = attention(q, k, v).double()
    lengths = torch.full((problem.batch,), problem.N_k, dtype=torch.int32, device=q.device)

    def prepared(page: int) -> Prepared:
        arguments = (q, *shuffled_pages(k, v, page), lengths)
        return wrong_result_reason([relative_error(attention_paged(*arguments), want)]) or partial(
            attention_paged, *arguments
        )

    calls = {"fa2_lab": lambda: partial(attention, q, k, v)}
    return time_decode(problem, "paged", calls | {f"page {page}": partial(prepared, page) for page in PAGE_SIZES})


def shuffled_pages(k, v, page: int) -> tuple:
    """Return (k_pages, v_pages, block_table) with the contents of a dense cache, stored in pages in random order."""
    batch, heads, N_k, d = k.shape
    count = batch * N_k // page
    table = torch.randperm(count, device=k.device).view(batch, -1)
    pages_of_kv = [torch.empty(count, page, heads, d, device=k.device, dtype=k.dtype) for _ in "kv"]
    for new, x in zip(pages_of_kv, (k, v), strict=True):
        new[table.flatten()] = x.transpose(1, 2).reshape(count, page, heads, d)
    return *pages_of_kv, table.int()


def compare_lengths(problem: Problem) -> Measurement:
    """Compare sequences of lengths 1 to N_k with sequences that all have the mean length, and return the row.

    Both batches have nearly the same total number of keys.
    """
    from fa2_lab.api.attention import attention

    q, k, v = problem.tensors()
    lengths = torch.linspace(1, problem.N_k, problem.batch, device=q.device).int()
    even = torch.full_like(lengths, int(lengths.float().mean()))
    calls = {name: partial(attention, q, k, v, key_lengths=n) for name, n in (("even", even), ("uneven", lengths))}
    return time_decode(problem, "lengths", {name: lambda call=call: call for name, call in calls.items()})


def compare_splits(problem: Problem) -> Measurement:
    """Compare the package's choice of the number of splits with fixed numbers of splits, and return the row.

    If the number of splits is fixed, a sequence's result does not depend on the batch.
    """
    from fa2_lab.api.attention import attention

    q, k, v = problem.tensors()
    want = attention(q, k, v).double()

    def prepared(n: int) -> Prepared:
        call = partial(attention, q, k, v, num_splits=n)
        return wrong_result_reason([relative_error(call(), want)]) or call

    calls = {"fa2_lab": lambda: partial(attention, q, k, v)}
    return time_decode(problem, "splits", calls | {f"{n} splits": partial(prepared, n) for n in FIXED_SPLITS})


def time_decode(problem: Problem, what: str, prepare_by_name: dict[str, Callable[[], Prepared]]) -> Measurement:
    """Time the calls whose results are right, and return their row in microseconds."""
    timing = partial(measure_kernels, repeats=DECODE_REPEATS, flushing=l2_reading_call)
    return compare(problem_fields(problem), what, prepare_by_name, timing=timing, unit="µs")


def problem_fields(problem: Problem) -> dict:
    """Return a problem's fields for a record, and the bytes of its keys and values."""
    numbers = 2 * problem.batch * problem.kv_heads * problem.N_k * problem.d
    return problem.as_dict() | dict(bytes=numbers * getattr(torch, problem.dtype).itemsize)


def curve_by_programs(problem: Problem) -> dict[str, list[float]]:
    """Return a curve of the time in µs against the number of programs, and the number that the package chooses."""
    from fa2_lab.kernels.arguments import Options, Tensors
    from fa2_lab.kernels.decode import plan

    tensors = Tensors(*problem.tensors())
    options = Options(causal=False, scale=problem.d**-0.5)
    usual = math.prod(plan.prepare(tensors, options).attend.grid)
    counts = sorted({*(2**n for n in range(3, 12)), usual})
    programs_of = {n: n for n in counts} | {usual: None}
    calls = {n: partial(plan.decode, tensors, options, programs=programs_of[n]) for n in counts}
    timings = measure_kernels(calls, flushing=l2_reading_call)
    return dict(programs=counts, microseconds=[1e3 * timings[n].median for n in counts], usual=[usual])


def curve_by_stages(problem: Problem) -> dict[str, list[float]]:
    """Return a curve of the GB/s read by each of eight programs against the number of stages in their loop.

    With n stages, n − 1 tiles are being copied while the program computes.
    """
    from fa2_lab.kernels.arguments import Options, Tensors
    from fa2_lab.kernels.decode import plan
    from fa2_lab.kernels.launches import Launch

    tensors = Tensors(*problem.tensors())
    usual = plan.prepare(tensors, Options(causal=False, scale=problem.d**-0.5), programs=LONE_PROGRAMS)

    def with_stages(stages: int) -> Callable:
        compiler_options = usual.attend.compiler_options | dict(num_stages=stages)
        attend = Launch(usual.attend.kernel, usual.attend.grid, compiler_options, **usual.attend.arguments)
        return partial(replace(usual, attend=attend), tensors)

    timings = measure_kernels({stages: with_stages(stages) for stages in STAGES}, flushing=l2_reading_call)
    size = problem_fields(problem)["bytes"] / LONE_PROGRAMS
    return {"stages": [*STAGES], "GB/s of a program": [size / timings[n].median / 1e6 for n in STAGES]}
