"""Compiles the Hopper backward for sm_90 without a GPU and prints a line of JSON for each kernel of a kind of call."""

import json
import re
from itertools import product
from multiprocessing import get_context

import torch
from compiling import Compiling, idle_barriers

KERNELS = ("before_kernel", "backward_kernel", "after_kernel")
SIZES = [*product((64, 128), (1024,), (False, True), (False, True)), (64, 1000, True, False), (96, 1000, True, False)]
JOBS = [*product(SIZES, (1, 3))]  # in one part, and in three that share dK and dV


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
    from fa2_lab.kernels.hopper import backward, host_backward

    (d, N, causal, keys), parts = job
    host_backward.parts_for = lambda *_: parts
    host_backward.recipe.cache_clear()
    Q, L = torch.empty(2, 4, N, d, dtype=torch.bfloat16), torch.empty(2, 4, N)
    lengths = torch.ones(2, dtype=torch.int64) if keys else None
    backward.backward(Q, L if causal else None, Q, Q, Q, Q, L, lengths, causal, d**-0.5)
    lines = []
    for name in KERNELS:
        made = getattr(backward, name).made
        found = offline.report(made) | dict(early=too_early(made.asm["ttgir"]))
        specialized = name == "backward_kernel"
        found |= dict(waits=specialized and offline.serialized(made))
        found |= dict(idle=idle_barriers(made.asm["ttgir"]) if specialized else [])
        lines.append(json.dumps(dict(kernel=name, d=d, N=N, causal=causal, keys=keys, parts=parts) | found))
    return lines


def too_early(ttgir: str) -> list[str]:
    """Lines that give up, or write over, shared memory which a product or the copy engine may still be reading.

    A barrier may be arrived at while products run only to show what was just stored, right after a fence. A tile that
    the copy engine is to read is stored when it has read all it had to before, and no warp ends earlier.
    """
    found, products, shown, all_read, free = [], False, False, None, False
    for line in ttgir.splitlines():
        name, rest = re.search(r"(ttn?g\.\w+|partition\d+|$)(.*)", line).groups()
        if name == "ttng.warp_group_dot":
            products = True
        elif name == "ttng.warp_group_dot_wait" and "pendings = 0" in rest:
            products = False
        elif name == "ttng.async_tma_store_wait":
            all_read = "pendings = 0" in rest
        elif name == "ttg.local_store":
            free = all_read
        elif name in ("ttng.async_tma_reduce", "ttng.async_tma_copy_local_to_global"):
            found += [] if free else [line]
            all_read = False
        elif name == "ttng.arrive_barrier" and products and not shown:
            found.append(line)
        elif name.startswith("partition"):
            found += [line] if all_read is False else []
            all_read = None
        shown = name == "ttng.fence_async_shared" or (shown and not name)
    return found


if __name__ == "__main__":
    with get_context("spawn").Pool(2, initializer=pretend) as pool:
        for lines in pool.imap(compile_one, JOBS):
            print(*lines, sep="\n", flush=True)
