"""Compiles the Hopper forward for sm_90 without a GPU and prints a line of JSON for each kind of call."""

import json
import re
from multiprocessing import get_context

import torch
from compiling import Compiling, idle_barriers

FULL, CAUSAL, CAUSAL_PADDED, PADDED = (False, False), (True, False), (True, True), (False, True)
JOBS = [(d, 4096, *masks) for d in (64, 128, 256) for masks in (FULL, CAUSAL, CAUSAL_PADDED)]
JOBS += [(64, 4096, *PADDED), (64, 1024, *CAUSAL), (128, 1024, *PADDED)]
JOBS += [(128, N, *FULL) for N in (2112, 2111)]  # in blocks of 192 rows
# d 96 is compiled as 128 is, and 192 as 256


def pretend() -> None:
    """Have a Hopper GPU, as far as compiling goes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fa2_lab.kernels import offline
    from fa2_lab.kernels.hopper import forward, host

    driver.set_active(offline.Absent(GPUTarget("cuda", 90, 32)))
    host.multiprocessors = lambda device: 132
    host.fits = lambda *kind: True
    host.counter_of = lambda device, stream: torch.zeros(2, dtype=torch.int32)
    forward.forward_kernel = Compiling(forward.forward_kernel)


def compile_one(job) -> str:
    """One call of forward() as far as the launch."""
    from fa2_lab.kernels import offline
    from fa2_lab.kernels.hopper import forward

    d, N, causal, keys = job
    Q = torch.empty(2, 4, N, d, dtype=torch.bfloat16)
    forward.forward(Q, Q, Q, torch.ones(2, dtype=torch.int32) if keys else None, causal, d**-0.5)
    made = forward.forward_kernel.made
    unasked = overwrites(made.asm["ttgir"], 1 if causal else 2)
    found = offline.report(made) | dict(waits=offline.serialized(made), overwrites=unasked)
    found |= dict(idle=idle_barriers(made.asm["ttgir"]))
    return json.dumps(dict(d=d, N=N, causal=causal, keys=keys) | found)


def overwrites(ttgir: str, copies: int) -> list[str]:
    """The producer's lines that write to shared memory without asking whether all have read what is there.

    One wait stands for a whole ticket, or for so many copies: without a mask, for one of K and one of V.
    """
    (producer,) = (part for part in re.split(r"partition\d+\(", ttgir) if "async_tma_copy_global_to_local" in part)
    found, asked, made = [], False, copies
    for line in producer.splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.wait_barrier":
            asked, made = True, 0
        elif name == "ttng.arrive_barrier":
            asked = False
        elif name == "ttng.async_tma_copy_global_to_local":
            asked, made = False, made + 1
            found += [line] if made > copies else []
        elif name == "ttg.local_store" and not asked:
            found.append(line)
    return found


if __name__ == "__main__":
    with get_context("spawn").Pool(2, initializer=pretend) as pool:
        for line in pool.imap(compile_one, JOBS):
            print(line, flush=True)
