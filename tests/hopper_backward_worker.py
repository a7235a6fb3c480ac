"""Compiles the Hopper backward for sm_90 without a GPU and prints a line of JSON for each kernel of a kind of call."""

import json
from itertools import product
from multiprocessing import get_context

import torch
from compiling import Compiling

KERNELS = ("before_kernel", "backward_kernel", "after_kernel")
JOBS = [*product((64, 128), (1024,), (False, True), (False, True)), (64, 1000, True, False), (96, 1000, True, False)]


def pretend() -> None:
    """Have a Hopper GPU, as far as compiling goes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fa2_lab.kernels import offline
    from fa2_lab.kernels.hopper import backward, host

    driver.set_active(offline.Absent(GPUTarget("cuda", 90, 32)))
    host.multiprocessors = lambda device: 132
    host.fits = lambda *kind: True
    backward.counter_of = lambda device, stream: torch.zeros(2, dtype=torch.int32)
    for name in KERNELS:
        setattr(backward, name, Compiling(getattr(backward, name)))


def compile_one(job) -> list[str]:
    """One call of backward() as far as the launches."""
    from fa2_lab.kernels import offline
    from fa2_lab.kernels.hopper import backward

    d, N, causal, keys = job
    Q, L = torch.empty(2, 4, N, d, dtype=torch.bfloat16), torch.empty(2, 4, N)
    lengths = torch.ones(2, dtype=torch.int64) if keys else None
    backward.backward(Q, L if causal else None, Q, Q, Q, Q, L, lengths, causal, d**-0.5)
    lines = []
    for name in KERNELS:
        made = getattr(backward, name).made
        found = offline.report(made) | dict(waits=name == "backward_kernel" and offline.serialized(made))
        lines.append(json.dumps(dict(kernel=name, d=d, N=N, causal=causal, keys=keys) | found))
    return lines


if __name__ == "__main__":
    with get_context("spawn").Pool(2, initializer=pretend) as pool:
        for lines in pool.imap(compile_one, JOBS):
            print(*lines, sep="\n", flush=True)
