"""Compiles the Hopper backward for sm_90 without a GPU and prints a line of JSON for each kernel of a kind of call."""

import json
import os
import re
import sys
from itertools import product
from multiprocessing import get_context

import torch
from compiling import Compiling, idle_barriers

KERNELS = ("before_kernel", "backward_kernel", "after_kernel")
SIZES = [*product((64, 128), (1024,), (False, True), (False, True))]  # d, N, causal, key_lengths
SIZES += [(64, 1000, True, False), (96, 1000, True, False), (96, 1000, False, False), (96, 1024, False, False)]
SIZES += [(128, 4096, True, False), (96, 4096, True, True)]  # long enough for dK's product in the next step
NEAR, IN_TURN = dict(left=100), dict(same_bits=True)  # a window; and additions in a fixed order
PACKED = dict(packed=3)  # so many sequences
MORE = [(SIZES[0], 3, IN_TURN), (SIZES[7], 1, IN_TURN), (SIZES[6], 1, NEAR), (SIZES[2], 3, NEAR)]
MORE += [(SIZES[2], 1, NEAR | IN_TURN), (SIZES[2], 1, PACKED), (SIZES[4], 3, PACKED | IN_TURN)]
ALL = [*product(SIZES, (1, 3), ({},)), *MORE]  # in one part, and in three that share dK and dV
FEW = [(SIZES[n], parts, {}) for n, parts in ((0, 1), (3, 3), (5, 3), (6, 1), (8, 1), (10, 3), (12, 3), (13, 1))]
FEW += MORE


def pretend() -> None:
    """Have a Hopper GPU, as far as compiling goes."""
    from fa2_lab.kernels.hopper.backward import launch
    from fa2_lab.kernels.hopper.shared import host
    from fa2_lab.tools import offline

    offline.compile_for("sm_90")
    host.multiprocessors = lambda device: 132
    host.fits = lambda *kind: True
    host.counter_for = lambda X: torch.zeros(2, dtype=torch.int32)
    for name in KERNELS:
        setattr(launch, name, Compiling(getattr(launch, name)))


def compile_one(job) -> list[str]:
    """One call of the backward as far as the launches."""
    from fa2_lab.kernels.hopper.backward import launch
    from fa2_lab.kernels.prepared import Options
    from fa2_lab.tools import offline

    (d, N, causal, keys), parts, asked = job
    launch.sizes.parts_for = lambda *_: parts
    many, options = asked.get("packed"), Options(causal, d**-0.5, left=asked.get("left"))
    Q, L = torch.empty((2, 4, N, d) if many is None else (N, 4, d), dtype=torch.bfloat16), torch.empty(2, 4, N)
    lengths = torch.ones(2, dtype=torch.int64) if keys else None
    starts = () if many is None else 2 * (torch.zeros(many + 1, dtype=torch.int32),)
    call = launch.prepare(Q, Q, Q, Q, Q, options, lengths, "same_bits" in asked, many)
    call(Q, Q, Q, Q, Q, L, L if causal else None, lengths, *starts)
    lines = []
    for name in KERNELS:
        made = getattr(launch, name).made
        found = offline.report(made) | dict(early=too_early(made.asm["ttgir"]))
        specialized = name == "backward_kernel"
        found |= dict(waits=specialized and offline.serialized(made))
        found |= dict(idle=idle_barriers(made.asm["ttgir"]) if specialized else [])
        lines.append(json.dumps(dict(kernel=name, d=d, N=N, causal=causal, keys=keys, parts=parts) | found))
    return lines


def too_early(ttgir: str) -> list[str]:
    """Lines that give up, or write over, shared memory which a product or the copy engine may still be reading.

    While products run, a barrier may be arrived at only if what the producer writes, once it need not wait there, is
    none of what they read. A tile that the copy engine is to read is stored when it has read all it had to before, or a
    consumer has said so at a barrier, and no warp ends earlier.
    """
    rewritten, found, products, all_read, free, met = written_after_waits(ttgir), [], [], None, False, set()
    for name, given, line in operations(ttgir):
        met.add(name)
        pending = int(re.findall(r"pendings = (\d+)", line + "pendings = 0")[0])
        if name == "ttng.warp_group_dot":
            products.append({*given[:2]})
        elif name == "ttng.warp_group_dot_wait":
            products = products[max(0, len(products) - pending) :]
        elif name == "ttng.async_tma_store_wait":
            all_read = pending == 0
        elif name == "ttg.local_store":
            free = all_read
        elif name == "ttng.wait_barrier" and "ttg.local_store" not in met:  # a writer: what it adds, others store
            free = all_read is not False
        elif name in ("ttng.async_tma_reduce", "ttng.async_tma_copy_local_to_global"):
            found += [] if free else [line]
            all_read = False
        elif name == "ttng.arrive_barrier" and products:
            harmless = given[0] in rewritten and rewritten[given[0]].isdisjoint(set().union(*products))
            found += [] if harmless else [line]
        elif name.startswith("partition"):
            found += [line] if products or all_read is False else []
            all_read, products, met = None, [], set()
    return found


def written_after_waits(ttgir: str) -> dict[str, set]:
    """For each barrier what the producer, or a writer, writes or has copied before it waits at another."""
    written, barrier, part = {}, None, ""
    for name, given, _ in operations(ttgir):
        part = name if name.startswith("partition") else part
        if name == "ttng.wait_barrier" and part not in ("", "partition0"):
            barrier = given[0]
            written.setdefault(barrier, set())
        elif name in ("ttg.local_store", "ttng.async_tma_copy_global_to_local") and barrier:
            written.setdefault(barrier, set()).update(given)
    return written


def operations(ttgir: str):
    """Of each line its operation and what that is given; of shared memory not a slot or a part, but the whole."""
    whole, outside = {}, []
    for line in ttgir.splitlines():
        result, name, rest = re.search(r"(?:(%\w+) = )?(ttn?g\.\w+|partition\d+|$)(.*)", line).groups()
        given = [whole.get(x, x) for x in re.findall(r"%\w+", rest.split(" : ")[0])]
        if name == "ttg.warp_specialize":
            outside = given
        elif name.startswith("partition"):
            whole = dict(zip(re.findall(r"(%\w+):", rest), outside, strict=True))
        elif name.startswith("ttg.memdesc_"):
            whole[result] = given[0]
        yield name, given, line


if __name__ == "__main__":
    with get_context("spawn").Pool(os.cpu_count(), initializer=pretend) as pool:
        for lines in pool.imap(compile_one, ALL if sys.argv[1] == "all" else FEW):
            print(*lines, sep="\n", flush=True)
