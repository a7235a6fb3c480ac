"""The suite `bandwidth`: the bandwidths at which a GPU reads from shared memory, from L2 and from DRAM.

The module also provides a call that only reads, which other suites use as a baseline for kernels.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.records import Record
from fa2_studio.bench.compare import Plan, measure_ceilings
from fa2_studio.bench.protocol import describe_kernel_timing, measure_kernels
from fa2_studio.bench.recording import environment

REPEATS, BLOCK, WARPS = 9, 2048, 4  # BLOCK is a number of four-byte elements; each thread loads four of them at a time
LOADS = 512  # number of blocks read by each worker
SIZES = (8, 16, 24, 32, 48, 64, 128, 1024, 8192)  # MiB of the buffer
IN_L2, IN_DRAM = 16, 8192
STAGES, ROWS, COLUMNS, ROUNDS = 2, 64, 128, 4096


@triton.jit
def read_kernel(X, out, blocks, loads, BLOCK: tl.constexpr):
    """Read a buffer repeatedly, assigning blocks to workers round-robin. The modifier ".cg" bypasses the L1 cache."""
    worker, workers, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(loads):
        block = ((worker + k * workers) % blocks).to(tl.int64)
        total += tl.load(X + block * BLOCK + lane, cache_modifier=".cg")
    tl.store(out + worker, tl.sum(total, 0))


@gluon.jit
def read_shared_kernel(out, rounds, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Read shared memory repeatedly. Each warp reads whole rows of 512 bytes, which avoids bank conflicts."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, COLUMNS], plain)
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for stage in gl.static_range(STAGES):
        memory.index(stage).store(total)
    for k in range(rounds):
        total += memory.index(k % STAGES).load(layout)
    at = gl.arange(0, ROWS, rows)[:, None] * COLUMNS + gl.arange(0, COLUMNS, columns)[None, :]
    gl.store(out + gl.program_id(0) * ROWS * COLUMNS + at, total)


def run() -> Plan:
    """Measure the three bandwidths and the speed at each buffer size, and return the finished record."""
    SMs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    workers = 8 * SMs
    X = torch.zeros(max(SIZES) * 2**18, device="cuda")
    out = torch.empty(workers, device="cuda")
    calls: dict = {size: partial(read, X, out, size, workers) for size in SIZES}
    calls["shared"] = read_shared(SMs)
    timings = measure_kernels(calls, repeats=REPEATS)
    failed = {name: why for name, why in timings.items() if isinstance(why, str)}
    if failed:
        raise RuntimeError(f"bandwidth: {failed}")
    moved = dict.fromkeys(SIZES, 4 * BLOCK * LOADS * workers) | {"shared": shared_bytes(SMs)}
    speed = {name: moved[name] / timings[name].median / 1e9 for name in calls}
    bandwidths = {
        "shared TB/s": speed["shared"],
        "L2 TB/s": speed[IN_L2],
        "DRAM TB/s": speed[IN_DRAM],
    } | measure_ceilings()
    over_size = {f"read from {size} MiB, TB/s": [speed[size]] for size in SIZES}
    return Plan(Record("bandwidth", environment(), describe_kernel_timing(REPEATS), bandwidths, curves=over_size))


def read(X: torch.Tensor, out: torch.Tensor, size: int, workers: int) -> None:
    """Let each worker read LOADS blocks of the first `size` MiB of X."""
    blocks = size * 2**18 // BLOCK
    read_kernel[(workers,)](X, out, blocks, LOADS, BLOCK=BLOCK, num_warps=WARPS)


def read_call(X: torch.Tensor, block: int = 4096) -> Callable[[], torch.Tensor]:
    """Return a call that reads X once and sums each block of `block` numbers. No kernel that reads X can be faster.

    The call launches one small program per block, which lets the hardware balance the load. The size of X must be a
    multiple of the block size, in four-byte numbers.
    """
    numbers = X.view(-1).view(torch.float32)
    blocks = numbers.numel() // block
    out = torch.empty(blocks, device=X.device)

    def call() -> torch.Tensor:
        read_kernel[(blocks,)](numbers, out, blocks, 1, BLOCK=block, num_warps=WARPS)
        return out

    return call


def read_shared(SMs: int) -> Callable[[], object]:
    """Return a call that reads shared memory with two workers per SM, one of which can load while the other adds."""
    out = torch.empty(2 * SMs * ROWS * COLUMNS, device="cuda")
    sizes = dict(STAGES=STAGES, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return lambda: read_shared_kernel[(2 * SMs,)](out, ROUNDS, **sizes)


def shared_bytes(SMs: int) -> int:
    """Return the number of bytes read by all workers during one call made by `read_shared`."""
    return 2 * SMs * ROUNDS * ROWS * COLUMNS * 4
