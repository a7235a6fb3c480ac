"""A model that predicts from a thread block's shared memory and registers whether a block size fits on an SM.

Shared memory holds the loaded tiles. A tile loaded only once has a single buffer, whereas each tile loaded in a loop
has `stages` buffers, so that the next tiles can arrive while the kernel works on the current ones. With num_stages = s,
Triton uses s stages on Hopper if a block has at least 64 rows, and s − 1 stages otherwise and on other GPUs.

Registers hold the fp32 accumulators and the scores, spread evenly over the threads. They also hold a 16-bit copy of the
scores, which is an operand of the next matmul, and a fixed number of values for addresses, the loop and row statistics.
A compiler can use more or fewer registers. We compared the model with 96 compilations of this package's Triton kernels
(Triton 3.8.0, sm_80 and sm_90, d = 64 and 128, blocks of 64 and 128, 4 and 8 warps). For 84 of them, the model predicts
correctly whether registers spill. The kernels for which it wrongly predicts no spills have at most about 100 spill
instructions, whereas other compilations have up to 12,000. The predicted amount of shared memory is within 20% of what
the compiled kernel uses.

The model covers four kernels:

forward   the forward pass, which keeps a row block on chip and loops over K and V
backward  the backward pass in one kernel (FA2's Algorithm 2), which keeps a column block, loops over Q and dO, and adds
          to dQ
dkdv      one of the two kernels of a split backward pass: it computes dK and dV in the loop of `backward`, but not dQ
dq        the other kernel of a split backward pass: it computes dQ, keeps a row block, and loops over K and V
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from fa2_lab.machine.chips import Chip, KiB, check_chip
from fa2_lab.tiles import cdiv, whole_number

FIXED_REGISTERS = 40  # registers per thread for addresses, loop counters, masks, m and l
RESERVED_SHARED_BYTES = 1 * KiB  # bytes of shared memory that the system reserves per resident block
WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
FP32_BYTES = 4  # bytes per entry of L or D


@dataclass(frozen=True)
class Fit:
    """The resources that a thread block needs. If the block cannot run without spills, `limit` names the reason."""

    ok: bool
    limit: str  # "shared memory" if the block cannot run, "registers" if it runs but spills, otherwise ""
    shared_bytes: int
    registers: int  # the number needed per thread, even if it exceeds the limit
    blocks_per_sm: int  # 0 if the block cannot run


# What a block holds -----------------------------------------------------------------------------------------

KERNELS = ("forward", "backward", "dkdv", "dq")


def shared_bytes(kernel: str, B_r: int, B_c: int, d: int, stages: int = 2, itemsize: int = 2) -> int:
    """Return the number of bytes of shared memory that one thread block of `kernel` needs.

    Each tile loaded in a loop has `stages` buffers, and each element has `itemsize` bytes.
    """
    if kernel in ("forward", "dq"):  # Q_i (and dO_i for "dq"), plus K_j and V_j per stage; O_i reuses Q_i's buffer
        kept_rows = B_r if kernel == "forward" else 2 * B_r
        return (kept_rows + stages * 2 * B_c) * d * itemsize
    streamed = 2 * B_r * (d * itemsize + FP32_BYTES)  # Q_i and dO_i, plus L_i and D_i in fp32; K_j and V_j stay on chip
    transposed = B_r * B_c * itemsize if kernel == "backward" else 0  # buffer for dS, which one matmul needs transposed
    return 2 * B_c * d * itemsize + stages * streamed + transposed


def registers(kernel: str, B_r: int, B_c: int, d: int, warps: int = 4, itemsize: int = 2) -> int:
    """Return the number of registers per thread that `kernel` needs in a thread block of `warps` warps.

    Most of them hold accumulators, scores, and a copy of the scores with `itemsize` bytes per element, which serves as
    an operand of the next matmul.
    """
    scores = B_r * B_c
    held = {
        "forward": B_r * d + scores,  # o and s
        "dq": B_r * d + 2 * scores,  # dq, p and dp
        "dkdv": 2 * B_c * d + 2 * scores,  # dk, dv, p and dp
        "backward": 2 * B_c * d + max(2 * scores, B_r * d),  # dk and dv; dq reuses the registers of p and dp
    }
    operand = cdiv(scores * itemsize, 4)
    return FIXED_REGISTERS + cdiv(held[kernel] + operand, WARP_SIZE * whole_number("warps", warps, low=1, high=32))


forward_shared_bytes, forward_registers = partial(shared_bytes, "forward"), partial(registers, "forward")


# Does it fit? -----------------------------------------------------------------------------------------------


def fit(
    chip: Chip,
    B_r: int,
    B_c: int,
    d: int,
    stages: int = 2,
    warps: int = 4,
    *,
    itemsize: int = 2,
    kernel: str = "forward",
) -> Fit:
    """Return the Fit that shows whether a thread block of this size can run on the chip without spills.

    Each tile loaded in a loop has `stages` buffers, and each element has `itemsize` bytes.
    """
    check_chip(chip)
    for name, value in (("B_r", B_r), ("B_c", B_c), ("d", d), ("stages", stages), ("itemsize", itemsize)):
        whole_number(name, value, low=1)
    if kernel not in KERNELS:
        raise ValueError(f"kernel: got {kernel!r}; it takes one of {', '.join(KERNELS)}")
    shared = shared_bytes(kernel, B_r, B_c, d, stages, itemsize)
    needed, most = registers(kernel, B_r, B_c, d, warps, itemsize), register_limit(chip, warps)
    resident = blocks_per_sm(chip, shared, min(needed, most), warps)
    limit = "registers" if needed > most else ""
    if shared > chip.shared_per_block:
        limit, resident = "shared memory", 0
    return Fit(not limit, limit, shared, needed, resident)


def best_fits(
    chip: Chip, d: int, sizes: Sequence[int] = (64, 128), warps: Sequence[int] = (4, 8), **more: Any
) -> dict[tuple[int, int], tuple[int, Fit]]:
    """Return {(B_r, B_c): (number of warps, Fit)} for all pairs of block sizes in `sizes`.

    The number of warps is the first entry of `warps` with which the block fits, or the last entry if the block fits
    with none of them. `more` is passed on to fit().
    """
    best = {}
    for B_r, B_c in product(sizes, sizes):
        tried = [(W, fit(chip, B_r, B_c, d, warps=W, **more)) for W in warps]
        best[B_r, B_c] = next((one for one in tried if one[1].ok), tried[-1])
    return best


def register_limit(chip: Chip, warps: int) -> int:
    """Return the largest number of registers per thread with which a block of `warps` warps still fits on an SM."""
    threads = WARP_SIZE * whole_number("warps", warps, low=1, high=MAX_THREADS_PER_BLOCK // WARP_SIZE)
    return min(chip.registers_per_thread, chip.registers_per_sm // threads // 8 * 8)


def blocks_per_sm(chip: Chip, shared_bytes: int, registers: int, warps: int) -> int:
    """Return the number of blocks that can be resident on an SM at the same time.

    An SM limits the number of blocks and warps, the shared memory, and the registers. Each block has `warps` warps,
    `shared_bytes` bytes of shared memory, and `registers` registers per thread.
    """
    per_warp = cdiv(registers, 8) * 8 * WARP_SIZE  # registers are allocated in units of eight per thread
    return min(
        chip.blocks_per_sm,
        chip.warps_per_sm // warps,
        chip.shared_per_sm // (shared_bytes + RESERVED_SHARED_BYTES),
        chip.registers_per_sm // (per_warp * warps),
    )
