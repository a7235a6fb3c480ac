"""Compile the forward kernel for one target: jobs come in as lines of JSON, what the compiler made goes out likewise.

A process has one target from its start to its end, because Triton's kernels remember the first one they met.
"""

import json
import sys

import torch
import triton

from fa2_lab.kernels import tables
from fa2_lab.kernels.portable import forward
from fa2_lab.kernels.prepared import Options
from fa2_lab.tools import offline


class Compiling:
    """Stands in for a kernel: it is called in the same way, and only compiles."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid):
        def call(*arguments, **options) -> None:
            self.made = self.kernel.warmup(*arguments, grid=grid, **options)

        return call


def compiled(kernel: Compiling, d: int, B_r: int, B_c: int, warps: int, stages: int, **_) -> dict:
    """Registers, spill instructions, shared memory and ttgir of the forward, called as for a long sequence in fp16."""
    Q = torch.empty(1, 16, 4096, d, dtype=torch.float16, device="meta")
    blocks = tables.Blocks(B_r, B_c, warps, stages, d_pad=tables.padded(d))
    forward.prepare(Q, Q, Q, Options(causal=False, scale=d**-0.5), blocks=blocks)(Q, Q, Q, None, None)
    seen = offline.report(kernel.made)
    kept = dict(registers=seen["regs"], spills=seen["ldl"] + seen["stl"], shared=seen["shared"])
    return dict(triton=triton.__version__, ttgir=kernel.made.asm["ttgir"], **kept)


if __name__ == "__main__":
    offline.compile_for(sys.argv[1])
    forward.forward_kernel = Compiling(forward.forward_kernel)
    for line in sys.stdin:
        print(json.dumps(compiled(forward.forward_kernel, **json.loads(line))), flush=True)
