"""The suite `ring`: ring attention on several GPUs of one machine, compared with a single GPU.

It measures the speed, the gain from the zigzag layout, the transfers alone, and the memory per GPU. Start it with
`torchrun --nproc-per-node 4 -m fa2_lab bench ring`. With n processes, it measures 1, 2, 4, … up to n GPUs in one run,
so all numbers come from the same machine and from within a few minutes.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from fa2_lab.distributed import ring as rings
from fa2_lab.distributed import ring_attention, shard, unshard
from fa2_lab.records import Measurement, Record
from fa2_lab.reference.shards import even_lengths
from fa2_studio.bench.compare import TOLERANCE, Plan
from fa2_studio.bench.problem import (
    Problem,
    largest_error,
    relative_error_of_gradients,
    relative_error_of_O,
    sampled_gradients,
)
from fa2_studio.bench.protocol import Timing, timing_of
from fa2_studio.bench.recording import environment, problem_text

LENGTHS = (131072, 65536, 32768, 16384, 8192)
DIRECTIONS = ("forward", "backward", "both")
REPEATS = 7
PROTOCOL = (
    "We time every GPU with CUDA events and use the time of the slowest GPU. After a warm-up, we measure "
    f"{REPEATS} repetitions and report the median. A barrier starts each repetition at the same time on all GPUs. "
    "Before the timing starts, we check O and the gradients against float64. The column for one GPU shows "
    "`fa2_lab.attention`."
)


def run() -> Plan:
    """Measure on 1, 2, 4, … GPUs. Rank 0 returns the finished record, and the other ranks exit."""
    world = join_process_group()
    groups = {n: dist.new_group(range(n)) for n in (1, 2, 4, 8) if n <= world}
    results = Record("ring", environment() | dict(gpus=world), PROTOCOL)
    for N in LENGTHS:
        problem = Problem(1, 16, 16, N, N, 128, causal=True)
        for row in measure_problem(problem, groups):
            results.rows.append(row)
            if dist.get_rank() == 0:
                print(problem_text(row), row.values, row.failed, file=sys.stderr, flush=True)
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        sys.exit(0)
    return Plan(results)


def join_process_group() -> int:
    """Join the process group, in which each process uses one GPU, and return the number of processes."""
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("ring: start it with `torchrun --nproc-per-node GPUS -m fa2_lab bench ring`")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    return dist.get_world_size()


def measure_problem(problem: Problem, groups: dict[int, dist.ProcessGroup]) -> list[Measurement]:
    """Return the rows of a problem: times per direction, for the contiguous layout and transfers, and peak memory."""
    by_name: dict[str, dict] = {name: {} for name in (*DIRECTIONS, "peak memory", "K V once round")}
    for n, group in groups.items():
        if dist.get_rank() < n:
            for name, value in measure_layout(problem, group, "zigzag").items():
                by_name[name][gpus_text(n)] = value
        dist.barrier()
    rows = [row_of_values(problem, name, values) for name, values in by_name.items() if values]
    last = max(groups)
    if last > 1 and problem.N_q == max(LENGTHS):
        times = measure_layout(problem, groups[last], "contiguous") if dist.get_rank() < last else {}
        times_by_gpus = {name: {gpus_text(last): value} for name, value in times.items() if name in DIRECTIONS}
        rows += [row_of_values(problem, name, values, layout="contiguous") for name, values in times_by_gpus.items()]
    return rows


def gpus_text(n: int) -> str:
    return f"{n} GPU" if n == 1 else f"{n} GPUs"


def row_of_values(problem: Problem, name: str, values: dict, **more) -> Measurement:
    """Return one row. Its FLOPs are set only if its name is a direction."""
    properties = problem.as_dict() | more | (dict(rung=f"{name}, {more['layout']}") if more else {})
    unit = "MiB" if name == "peak memory" else "ms"
    return Measurement(properties, name, values, unit=unit, flops=problem.flops(name) if name in DIRECTIONS else 0.0)


# One world ----------------------------------------------------------------------------------------------------


def measure_layout(problem: Problem, group: dist.ProcessGroup, layout: str) -> dict[str, list[float]]:
    """Check the results on a group of GPUs, and return {name of the row: measured numbers}."""
    whole = problem.tensors(grad=True)
    q, k, v, dO = (shard(x.detach(), group, layout=layout) for x in whole)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def attention():
        return ring_attention(*inputs, group, causal=problem.causal, layout=layout, timeout=60.0)

    O = attention()
    check_results(whole, [O, *torch.autograd.grad(O, inputs, dO, retain_graph=True)], problem.causal, group, layout)
    del whole
    calls = dict(
        forward=lambda: ring_attention(*(x.detach() for x in inputs), group, causal=problem.causal, layout=layout),
        backward=lambda O=O: torch.autograd.grad(O, inputs, dO, retain_graph=True),
        both=lambda: torch.autograd.grad(attention(), inputs, dO),
    )
    values = {name: time_slowest_rank(call, group).numbers() for name, call in calls.items()}
    del O, calls["backward"]
    values["peak memory"] = [peak_mebibytes(calls["both"], group)]
    if dist.get_world_size(group) > 1:
        values["K V once round"] = time_slowest_rank(
            lambda: transfer_once_around(problem, k, v, group), group
        ).numbers()
    return values


def check_results(whole, parts, causal: bool, group: dist.ProcessGroup, layout: str) -> None:
    """Raise RuntimeError if O or a gradient is wrong."""
    O, *gradients = (unshard(x, group, layout=layout, timeout=60.0) for x in parts)
    truth = sampled_gradients(*whole, causal)
    wrong = largest_error([relative_error_of_O(O, *whole[:3], causal), relative_error_of_gradients(gradients, truth)])
    if not wrong <= TOLERANCE:
        raise RuntimeError(f"ring: wrong on {dist.get_world_size(group)} GPUs: error {wrong:.1e}")


def time_slowest_rank(call: Callable[[], object], group: dist.ProcessGroup) -> Timing:
    """Return a call's time in milliseconds, taking the slowest GPU in each repetition."""
    times = []
    for _ in range(1 + REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    longest = torch.tensor(times[1:], device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX, group)
    return timing_of(longest.tolist())


def peak_mebibytes(call: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Return the peak memory of one call and its inputs in MiB, on the GPU that needs the most."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    most = torch.tensor(float(torch.cuda.max_memory_allocated()), device="cuda")
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return most.item() / 2**20


def transfer_once_around(problem: Problem, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Perform the transfers of a forward pass without computing anything."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = tuple(even_lengths(problem.N_k, size))
    how = dict(layout="zigzag", causal=True, scale=1.0, timeout=60.0, call_number=0, on_triton=True)
    ring = rings.RingCall(group, rank, lengths, **how)
    for _, kv_heads in rings.head_chunks(ring, k, k):
        for _ in rings.ring_steps(ring, k[:, kv_heads], v[:, kv_heads]):
            pass
