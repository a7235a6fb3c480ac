"""The cost of a stride: `python -m fa2_studio.strided` times the sum of 2²⁵ numbers, read with various strides.

The program needs an NVIDIA GPU. It prints the GPU's name and Triton's version, followed by the median time for each
stride. Times are measured as in the bench, which overwrites L2 before each call. Chapter 08 shows the output if it is
in figures/data/strided.txt.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from fa2_studio.bench.protocol import measure_kernels

NUMBERS, BLOCK, STRIDES = 2**25, 4096, (1, 2, 4, 8, 16, 32)


@triton.jit
def sum_kernel(X, Y, stride, B: tl.constexpr):
    """Sum B numbers of X per program. Successive numbers are `stride` apart in memory."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(Y + tl.program_id(0), tl.sum(tl.load(X + at * stride), 0))


def call(X: torch.Tensor, Y: torch.Tensor, stride: int) -> None:
    """Launch one program for each block of numbers."""
    sum_kernel[(len(Y),)](X, Y, stride, B=BLOCK)


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}")
    X = torch.ones(NUMBERS * max(STRIDES), device="cuda")
    Y = torch.empty(NUMBERS // BLOCK, device="cuda")
    timings = measure_kernels({f"{stride}": partial(call, X, Y, stride) for stride in STRIDES})
    for stride, timing in timings.items():
        print(f"stride {stride:4}: " + (timing if isinstance(timing, str) else f"{timing.median:.3f} ms"))
