"""Block sizes, warps and stages of the portable kernels, for each chip family and head dimension.

There are three kernels: "forward" for the forward pass, and "dkdv" (dK and dV) and "dq" (dQ) for the backward pass. The
entries for Hopper were measured on an H200. The other entries were chosen by compiling the kernels.
tests/heart/test_compile.py checks that, without a bias, the kernels fit in the chip's shared memory and spill no
registers. If several entries for compute capability 8.x at d = 64 or 128 passed this check, they were compared by
running the A100's code on an H200. The only kernels that may spill are the backward kernels for Hopper at d_pad = 256,
the kernels for fp32 at d_pad = 256 and the forward kernel for Hopper at d_pad = 64 without a mask, which may spill only
outside its loops. `fa2-lab tune` measures other entries on your GPU and prints the faster ones in the format of these
tables.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from fa2_lab.kernels import interpreter
from fa2_lab.kernels.common.tile import PortableConstants
from fa2_lab.kernels.triton_versions import by_triton, driver


@dataclass(frozen=True)
class KernelConfig:
    """A table entry with the tile size B_r × B_c, the number of warps, and the number of pipeline stages.

    Other implementations call B_r and B_c BLOCK_M and BLOCK_N.
    """

    B_r: int
    B_c: int
    warps: int
    stages: int
    registers: int | None = None  # maximum number of registers per thread; only NVIDIA's compiler accepts this limit
    low_reg_schedule: bool = False  # whether the compiler orders instructions to save registers
    d_pad: int = 0  # d padded for the tensor cores
    upcast: bool = False  # whether tiles are converted to fp32 before matmuls

    def compiler_options(self) -> dict:
        """Return the options for Triton's compiler: warps, stages and, if set, register limit and instruction order."""
        limit = {} if self.registers is None else dict(maxnreg=self.registers)
        schedule = LOW_REG_SCHEDULE if self.low_reg_schedule else {}
        return dict(num_warps=self.warps, num_stages=self.stages) | limit | schedule

    def constants(self, Q: torch.Tensor) -> PortableConstants:
        """Return the compile-time constants of a kernel for tensors like Q."""
        o_chunk = min(self.d_pad, self.B_r) if splits_head_dim(Q) else self.d_pad
        numbers = self.B_r, self.B_c, Q.shape[-1], self.d_pad, o_chunk, self.upcast
        return PortableConstants(*map(triton.language.constexpr, numbers))


USE_LOW_REG = by_triton({"3.6": False, "3.9": True})  # Triton 3.9 keeps more addresses in registers, which may spill
LOW_REG_SCHEDULE = dict(sched4reg=True)  # an instruction order that saves registers, available since Triton 3.9

# {kernel: {d_pad: entry}}, where an entry is (B_r, B_c, warps, stages[, registers[, low_reg_schedule]]). If a d_pad has
# two entries, the first is for calls without a causal mask, and the second is for causal calls.
HOPPER = dict(
    forward={
        16: (64, 64, 4, 3),
        32: (64, 64, 4, 3),
        # with 128 registers per thread, four programs fit on an SM; with 132, only three fit, which is 10% slower
        64: (64, 64, 4, 3, 128, USE_LOW_REG),
        128: (64, 64, 4, 3),
        256: (128, 32, 8, 2, None, USE_LOW_REG),
    },
    dkdv={
        16: (64, 64, 4, 2),
        32: (64, 64, 4, 2),
        64: (64, 64, 4, 3),
        # tiles of 64 × 128 are 12% faster than tiles of 32 × 128, even for grouped heads, where they spill 14 registers
        128: by_triton({"3.6": (64, 128, 8, 3), "3.7": (32, 128, 8, 3)}),
        256: (32, 64, 8, 2),
    },
    # at d = 16, tiles of 64 × 64 with two or three stages crash the ptxas of Triton 3.6 if N_q = N_k = 1
    dq={
        16: (64, 32, 4, 2),
        32: (64, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: ((64, 64, 4, 2), (128, 64, 8, 3)),
        256: (64, 32, 4, 2),
    },
)
ADA = dict[str, dict](  # sm_86 and sm_89, which have 99 KiB of shared memory
    forward={16: (128, 64, 4, 2), 32: (128, 64, 4, 2), 64: (128, 32, 4, 2), 128: (64, 64, 4, 2), 256: (64, 16, 4, 2)},
    # at d = 256, ptxas by default uses at most 168 registers on sm_80 and spills two, so the limit is raised to 255
    dkdv={16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 32, 4, 2), 128: (64, 64, 8, 2), 256: (32, 16, 4, 2, 255)},
    dq={16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (128, 64, 8, 2), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
)
AMPERE = dict(  # sm_80; these entries and FlashAttention-2's own kernels were timed as sm_80 code on an H200
    forward=ADA["forward"] | {64: (128, 64, 4, 2, None, USE_LOW_REG)},
    # at d_pad = 128, all faster entries spill registers for some d
    dkdv=ADA["dkdv"] | {64: (32, 64, 4, 2), 128: (32, 32, 4, 2)},
    dq=ADA["dq"],
)
BLACKWELL = dict(  # sm_100, and sm_120, which has 99 KiB of shared memory
    # at d = 64, ptxas by default uses at most 128 registers on sm_100 and spills four, so the limit is raised to 168
    forward=ADA["forward"] | {64: (128, 64, 8, 2, 168), 128: (128, 32, 8, 2)},
    dkdv=ADA["dkdv"],
    dq=ADA["dq"] | {128: (64, 64, 8, 2)},
)
CDNA = dict(  # AMD's MI300 family, which has 64 KiB of shared memory
    forward={16: (128, 64, 4, 1), 32: (128, 64, 4, 1), 64: (128, 64, 4, 1), 128: (64, 64, 4, 1), 256: (32, 32, 4, 1)},
    dkdv={16: (64, 64, 4, 1), 32: (64, 64, 4, 1), 64: (32, 64, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1)},
    dq={16: (64, 64, 4, 1), 32: (64, 64, 4, 1), 64: (64, 64, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1)},
)
FP32 = dict(  # fp32 matmuls use FMAs on values in registers, not the tensor cores
    forward={16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (32, 16, 4, 1)},
    dkdv={16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (16, 32, 4, 1), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)},
    dq={16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)},
)
# Triton's interpreter is fastest with a few large tiles.
INTERPRETED = dict(forward=(32, 64, 1, 1), dkdv=(64, 32, 1, 1), dq=(32, 64, 1, 1))


def chip_tables() -> dict:
    """Return the tables for the GPU's chip family or, if TRITON_OVERRIDE_ARCH is set, for the family that it names."""
    target, override = driver.active.get_current_target(), triton.knobs.runtime.override_arch
    if target.backend == "hip":
        return CDNA
    arch = int(override.removeprefix("sm")) if override else target.arch
    if arch >= 90:
        return HOPPER if arch < 100 else BLACKWELL
    return AMPERE if arch < 86 else ADA


def splits_head_dim(Q: torch.Tensor) -> bool:
    """Return whether O is computed in pieces of at most B_r columns.

    In a chain of matmuls, the last matmul determines how the warps divide a tile. If its result has at least as many
    rows as columns, each warp gets entire rows of S. Otherwise, each warp gets some of the columns in all rows, so P
    and each row's maximum and sum must be exchanged through shared memory. Hopper's wgmma and AMD's compiler always
    assign entire rows to a warp, so O is not computed in pieces on these GPUs.
    """
    return Q.dtype != torch.float32 and not interpreter.is_enabled() and chip_tables() in (AMPERE, ADA, BLACKWELL)


def padded_head_dim(d: int) -> int:
    """Return d_pad, which is d rounded up to a power of two that is at least 16, as tensor cores require."""
    return max(16, power_of_2(d))


def power_of_2(n: int) -> int:
    """Return n rounded up to a power of two."""
    return 1 << max(n - 1, 0).bit_length()


def needs_upcast(Q: torch.Tensor) -> bool:
    """Return whether tiles of Q's dtype are converted to fp32 before a matmul, as bf16 is in Triton's interpreter."""
    return Q.dtype == torch.bfloat16 and interpreter.is_enabled()


def choose_config(kernel: str, Q: torch.Tensor, causal: bool) -> KernelConfig:
    """Return the KernelConfig of a kernel ("forward", "dkdv" or "dq") for tensors like Q on this GPU."""
    fixed: dict[str, Any] = dict(d_pad=padded_head_dim(Q.shape[-1]), upcast=needs_upcast(Q))
    if interpreter.is_enabled():
        return KernelConfig(*INTERPRETED[kernel], **fixed)
    entry = (FP32 if Q.dtype == torch.float32 else chip_tables())[kernel][fixed["d_pad"]]
    if isinstance(entry[0], tuple):
        entry = entry[causal]
    return KernelConfig(*entry, **fixed)
