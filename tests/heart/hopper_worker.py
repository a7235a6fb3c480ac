"""Compiles the Hopper forward for sm_90 without a GPU and prints a line of JSON for each kind of call."""

import json
import os
import re
import sys
from collections import Counter
from itertools import product
from multiprocessing import get_context

import torch
from compiling import Compiling, idle_barriers

PACKED = dict(packed=3)  # so many sequences
SIZES, HEADS = (60, 250, 500, 1000, 2000, 8000, 32000), (1, 8, 32, 128, 512)


def kinds(d: int) -> list[tuple]:
    """All (sizes, causal, with key_lengths) that the forward chooses somewhere for this d."""
    from fa2_lab.kernels.hopper.forward.sizes import choose

    masks = product((False, True), (False, True))
    shapes = product(masks, SIZES, (1, 2), HEADS)
    return list(dict.fromkeys((choose(d, N, n * N, H, 132, *mask), *mask) for mask, N, n, H in shapes))


def every() -> list[tuple]:
    """All kinds of calls, with whole tiles and ragged ones, and with packed sequences; 96 is as 128."""
    all_kinds = [(d, kind) for d in (64, 128, 256) for kind in kinds(d)]
    packed = [(d, 511, sizes, causal, False, PACKED) for d, (sizes, causal, keys) in all_kinds if not keys]
    return [(d, N, *kind) for d, kind in all_kinds for N in (512, 511)] + packed


def few() -> list[tuple]:
    """All sizes once, each with the mask and the length that were met least so far; and a few more of each kind."""
    from fa2_lab.kernels.hopper.forward.sizes import CAUSAL, USUAL, WIDE, WINDOW

    jobs, met = [], Counter()
    for d in (64, 128, 256):
        for sizes in dict.fromkeys(sizes for sizes, *_ in kinds(d)):
            masks = [tuple(mask) for other, *mask in kinds(d) if other == sizes]
            mask, N = min(product(masks, (512, 511)), key=met.__getitem__)
            met[mask, N] += 1
            jobs.append((d, N, sizes, *mask))
    jobs.append((128, 512, WIDE, True, False))  # met without the mask alone above
    jobs += [(d, 511 + keys, WINDOW[d], True, keys, dict(left=100)) for d, keys in ((64, True), (128, False))]
    packed = ((64, USUAL[64], False), (64, CAUSAL[64][-1][3], True), (128, WIDE, True), (128, USUAL[128], True))
    return jobs + [(d, 511, sizes, causal, False, PACKED) for d, sizes, causal in packed]


def pretend() -> None:
    """Have a Hopper GPU, as far as compiling goes."""
    from fa2_lab.kernels.hopper.forward import launch
    from fa2_lab.kernels.hopper.shared import host
    from fa2_lab.tools import offline

    offline.compile_for("sm_90")
    host.multiprocessors = lambda device: 132
    host.fits = lambda *kind: True
    host.counter_for = lambda X: torch.zeros(2, dtype=torch.int32)
    launch.forward_kernel = Compiling(launch.forward_kernel)


def compile_one(job) -> str:
    """One call of the forward as far as the launch."""
    from fa2_lab.kernels.hopper.forward import launch
    from fa2_lab.kernels.prepared import Options
    from fa2_lab.tools import offline

    d, N, sizes, causal, keys, asked = (*job, {})[:6]
    launch.sizes.choose = lambda *_: sizes
    many, options = asked.get("packed"), Options(causal, d**-0.5, left=asked.get("left"))
    Q = torch.empty((2, 4, N, d) if many is None else (N, 4, d), dtype=torch.bfloat16)
    lengths = torch.ones(2, dtype=torch.int32) if keys else None
    starts = () if many is None else 2 * (torch.zeros(many + 1, dtype=torch.int32),)
    launch.prepare(Q, Q, Q, options, lengths, many)(Q, Q, Q, lengths, *starts)
    made, chosen = launch.forward_kernel.made, launch.prepare_launch(Q, Q, Q, options, keys, many).arguments["SIZES"]
    unasked = overwrites(made.asm["ttgir"])
    found = offline.report(made) | dict(waits=offline.serialized(made), overwrites=unasked)
    found |= dict(idle=idle_barriers(made.asm["ttgir"]), hasty=hasty(made.asm["ttgir"], chosen.ping_pong))
    found |= dict(before=before_the_draw(made.asm["ttgir"]))
    return json.dumps(dict(d=d, N=N, consumers=chosen.consumers, causal=causal, keys=keys) | found)


def producer_of(ttgir: str) -> str:
    """The producer's part of a kernel."""
    (part,) = (part for part in re.split(r"partition\d+\(", ttgir) if "async_tma_copy_global_to_local" in part)
    return part


def before_the_draw(ttgir: str) -> int:
    """How many of the producer's lines that copy stand before the one that draws the next number."""
    return producer_of(ttgir).split("tt.atomic_rmw")[0].count("async_tma_copy_global_to_local")


def overwrites(ttgir: str) -> list[str]:
    """The producer's lines that write to shared memory without asking whether all have read what is there.

    One wait stands for a whole letter of the mailbox, or for a copy of K and one of V.
    """
    found, asked, made = [], False, 2
    for line in producer_of(ttgir).splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.wait_barrier":
            asked, made = True, 0
        elif name == "ttng.arrive_barrier":
            asked = False
        elif name == "ttng.async_tma_copy_global_to_local":
            asked, made = False, made + 1
            found += [line] if made > 2 else []
        elif name == "ttg.local_store" and not asked:
            found.append(line)
    return found


def hasty(ttgir: str, ping_pong: bool) -> list[str]:
    """The consumers' lines that give up a tile which a product may be reading, or hide from one what was written.

    While a product runs, nobody is told anything, but the next consumer that it may start. What was stored is fenced
    before tensor cores or the copy engine read it.
    """
    found, running, told, shown = [], 0, 0, True
    for line in ttgir.splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.warp_group_dot":
            running, told = running + 1, 0
        elif name == "ttng.warp_group_dot_wait":
            running = int(re.search(r"pendings = (\d)", line)[1])
        elif name == "ttng.arrive_barrier" and running:
            told += 1
            found += [line] if told > ping_pong else []
        elif name == "ttg.local_store":
            shown = "1xi32" in line  # a mailbox's number, which threads read
        elif name == "ttng.fence_async_shared":
            shown = True
        if name in ("ttng.warp_group_dot", "ttng.async_tma_copy_local_to_global") and not shown:
            found.append(line)
    return found


if __name__ == "__main__":
    jobs = every() if sys.argv[1] == "all" else few()
    with get_context("spawn").Pool(os.cpu_count(), initializer=pretend) as pool:
        for line in pool.imap(compile_one, jobs):
            print(line, flush=True)
