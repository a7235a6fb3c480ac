"""The work of a warp, clock by clock: `python -m fa2_studio.warp_timeline` profiles a small kernel with Proton.

The program needs an NVIDIA GPU, and runs as a separate process because Proton, Triton's profiler, changes how kernels
are compiled. It prints the GPU's name and Triton's version, followed by the start and the duration in microseconds of
each interval that the kernel names. figures/data/warp_timeline.txt contains the output of this command on an H200.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import triton
import triton.language as tl
import triton.profiler as proton
import triton.profiler.language as pl

pl.enable_semantic("triton")  # without this call, only Gluon kernels could name intervals


@triton.jit
def loop_kernel(K, V, O, T, B: tl.constexpr):
    """Load T tiles of K and V one after another, and run their matmuls, in a single program."""
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    o = tl.zeros((B, B), tl.float32)
    for j in range(T):
        pl.enter_scope("copies")
        k, v = tl.load(K + j * B * B + at), tl.load(V + j * B * B + at)
        pl.exit_scope("copies")
        pl.enter_scope("products")
        o += tl.dot(tl.dot(k, k.T).to(v.dtype), v)
        pl.exit_scope("products")
    tl.store(O + at, o)


def record(T: int = 4, B: int = 64) -> list[dict]:
    """Return the named intervals of one launch, sorted by their start, in Proton's format for trace viewers."""
    K, V = torch.randn(2, T, B, B, device="cuda", dtype=torch.bfloat16)
    O = torch.empty(B, B, device="cuda")
    with TemporaryDirectory() as folder:
        proton.start(f"{folder}/timeline", backend="instrumentation", data="trace")
        loop_kernel[(1,)](K, V, O, T, B=B, num_warps=4, num_stages=1)
        torch.cuda.synchronize()
        proton.finalize()
        events = json.loads(Path(folder, "timeline.chrome_trace").read_text(encoding="utf-8"))["traceEvents"]
    return sorted((e for e in events if e["name"] in ("copies", "products")), key=lambda event: event["ts"])


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}")
    for event in record():
        print(f"{event['name']:10} from {event['ts']:>10} for {event.get('dur', 0):>8}  {event.get('tid', '')}")
