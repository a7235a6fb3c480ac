"""Test the ring on real GPUs with NCCL, on 2 GPUs and on all: `torchrun --nproc-per-node 4 tests/heart/ring_gpu.py`.

Each rank checks the joined result by the rule of the kernels' tests: the error against float64 is at most 2 times (O
and L) or 3 times (gradients) the error of PyTorch in the same dtype.
"""

import os
import sys
import time
import traceback
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import kernel_truth as truths  # noqa: E402
import ring_processes as processes  # noqa: E402

from fa2_lab.distributed import ring, ring_attention  # noqa: E402

START_TIME = time.perf_counter()
FP16, BF16 = torch.float16, torch.bfloat16
CASES = [  # heads, K/V heads, N, d, dtype, causal, layout; few kinds of kernels, because each has to be compiled
    (4, 4, 4096, 128, BF16, True, "zigzag"),
    (4, 2, 2048, 128, BF16, True, "contiguous"),
    (4, 1, 2047, 64, FP16, True, "zigzag"),
    (2, 2, 1001, 128, BF16, False, "zigzag"),
    (6, 3, 777, 64, FP16, False, "contiguous"),
    (2, 2, 3, 128, BF16, True, "zigzag"),  # on four GPUs one shard is empty
]


def ring_inputs(case):
    """Return q, k, v, dO and dL, which are the same on every rank."""
    heads, kv_heads, N, d, dtype, *_ = case
    q, k, v, dO = truths.random_inputs(2, heads, kv_heads, N, N, d, dtype)
    dL = torch.randn(2, heads, N, generator=torch.Generator().manual_seed(1)).to(truths.DEVICE)
    return q.detach(), k.detach(), v.detach(), dO, dL


def run_case(case, group, inputs, **options):
    """Return (O, L, dQ, dK, dV) of the whole sequence, computed by the ring."""
    return processes.run_ring(inputs, group, causal=case[5], layout=case[6], backend="auto", **options)


def check_three_runs(case, group, message=ring.MESSAGE_BYTES):
    """Assert that three runs keep to the rule, and that O and L have the same bits in all of them."""
    inputs, options = ring_inputs(case), dict(causal=case[5], scale=-0.2)
    options["dL"] = inputs[4]
    truth, torchs = (truths.dense_truth(*inputs[:4], dtype=t, **options) for t in (torch.float64, case[4]))
    usual_bytes, ring.MESSAGE_BYTES = ring.MESSAGE_BYTES, message
    runs = [run_case(case, group, inputs, scale=-0.2) for _ in range(3)]
    ring.MESSAGE_BYTES = usual_bytes
    for got in runs:
        truths.check_accuracy(got, truth, torchs, str(case))
        assert all(map(torch.equal, got[:2], runs[0][:2])), "another run, other bits"


def check_another_stream(case, group):
    """Assert that the ring waits for inputs that the caller's own stream has not finished writing."""
    inputs = ring_inputs(case)
    want = run_case(case, group, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(x, float("nan")) for x in inputs]
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        got = run_case(case, group, late)
    stream.synchronize()
    assert all(map(torch.equal, got[:2], want[:2])), "another stream, other bits"
    errors = [truths.largest_error(x, y) / y.abs().max().item() for x, y in zip(got, want, strict=True)]
    assert max(errors) < 1e-2, f"another stream, other gradients: {errors}"


def check_different_dtypes(case, group):
    """Assert that every rank raises an error at once if one rank has another dtype, and that the next call works."""
    q = torch.randn(1, 2, 64, 64, device=truths.DEVICE, dtype=FP16 if dist.get_rank(group) == 1 else BF16)
    start = time.perf_counter()
    try:
        ring_attention(q, q, q, group, timeout=30.0)
    except ValueError as error:
        assert "do not agree on dtype" in str(error), error
    else:
        raise AssertionError("nobody noticed the dtype")
    assert time.perf_counter() - start < 10
    check_three_runs(case, group)


def run_task(number, task, case, group, *more):
    """Run a task, and return whether it succeeded. If not, print the rank and the reason."""
    try:
        task(case, group, *more)
    except Exception:
        print(f"rank {dist.get_rank()}: {task.__name__} {case} {more}\n{traceback.format_exc()}", flush=True)
        return False
    if dist.get_rank() == 0:
        seconds, gpus = time.perf_counter() - START_TIME, dist.get_world_size(group)
        print(f"ok {number}: {task.__name__}, {gpus} GPUs, {case} {more}, {seconds:.0f} s", flush=True)
    return True


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=150), device_id=torch.device("cuda", rank))
    world, number, all_passed = dist.get_world_size(), count(1), True
    for size in sorted({min(2, world), world}):
        group = dist.new_group(range(size))
        if dist.get_rank() < size:
            tasks = [(check_three_runs, case) for case in CASES]
            tasks += [(check_three_runs, CASES[0], 2**16), (check_another_stream, CASES[0])]
            tasks += [(check_different_dtypes, CASES[0])] if size > 1 else []
            passed = [run_task(next(number), task, case, group, *more) for task, case, *more in tasks]
            all_passed = all(passed) and all_passed
        dist.barrier()
    print(f"rank {dist.get_rank()}: {'all passed' if all_passed else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
