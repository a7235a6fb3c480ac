"""Pictures whose data comes from the models of the machine, held against the meter and what was recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np

from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips, grid, io
from fa2_lab.plots import traffic, waves, workers
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import Trace

RECORDED = Path(__file__).resolve().parents[2] / "figures" / "data"


def recorded(name: str) -> dict | None:
    """What was measured under this name, or None if nobody has measured it yet."""
    file = RECORDED / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


# HBM traffic ------------------------------------------------------------------------------------------------


def traffic_data(N: int = 1024, M: int = 2**15, d: int = 64) -> dict:
    """Closed forms of the three, metered where that takes a moment; counters from figures/data/hbm_traffic.json."""
    lengths, sizes = [2**k for k in range(9, 15)], [2**k for k in range(12, 19)]
    over_N, over_M = {}, {}
    for name in ("standard", "FA1", "FA2"):
        over_N[name] = dict(
            form=[(n, moved_by_form(name, n, M, d)) for n in lengths],
            meter=[(n, moved_by_meter(name, n, M, d)) for n in lengths if n <= N],
        )
        over_M[name] = dict(
            form=[(m, moved_by_form(name, N, m, d)) for m in sizes],
            meter=[(m, moved_by_meter(name, N, m, d)) for m in sizes if m >= M // 2],
        )
    memories = {chip.name.split()[0]: chip.shared_per_block for chip in (chips.A100, chips.H100)}
    counters = recorded("hbm_traffic")
    return dict(N=N, M=M, d=d, over_N=over_N, over_M=over_M, memories=memories, counters=counters)


def block_sizes(name: str, M: int, d: int) -> dict[str, int]:
    """FA1's rule for both: the block that stays on chip gets a quarter of M, the one that streams at most d rows."""
    inner, outer = fa1.block_sizes(M, d)
    return dict(B_r=outer, B_c=inner) if name == "FA2" else dict(B_r=inner, B_c=outer)


def moved_by_form(name: str, N: int, M: int, d: int) -> int:
    """Elements that the forward of one head moves, in closed form."""
    return io.traffic(name.lower(), "forward", Tiling(N, N, **block_sizes(name, M, d)), d).total


@cache
def moved_by_meter(name: str, N: int, M: int, d: int) -> int:
    """The same, counted while the algorithm runs."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    trace = Trace()
    if name == "standard":
        naive.forward(Q, K, V, trace=trace)
    else:
        {"FA1": fa1, "FA2": fa2}[name].forward(Q, K, V, **block_sizes(name, M, d), trace=trace)
    return trace.hbm_elements


# Thread blocks ----------------------------------------------------------------------------------------------


def workers_data(T: int = 4, B: int = 64) -> dict:
    """Who owns which tile, and who adds into which dQ, on a square of T × T tiles."""
    tilings = {causal: Tiling(T * B, T * B, B, B, Mask(causal=causal)) for causal in (False, True)}
    owners = {(way, c): grid.owners(t, way) for way in ("forward", "backward") for c, t in tilings.items()}
    return dict(owners=owners, dq_writers={causal: grid.dq_writers(tiling) for causal, tiling in tilings.items()})


def waves_data(heads: int = 32, N: int = 2048, B: int = 128) -> dict:
    """FA1 and FA2 at batch 1 on an H100, one resident block to an SM: without a mask, then causal in both orders."""
    full, causal = Tiling(N, N, B, B), Tiling(N, N, B, B, Mask(causal=True))
    grids = {
        "FA1, one block per head": grid.fa1_grid(heads, full),
        "FA2, one per row block": grid.fa2_grid(heads, full),
        "FA2 causal, launched row by row": grid.fa2_grid(heads, causal),
        "FA2 causal, heaviest blocks first": grid.fa2_grid(heads, causal, order="heaviest first"),
    }
    return dict(heads=heads, ran={name: grid.schedule(blocks, chips.H100.SMs) for name, blocks in grids.items()})


PICTURES = [
    Picture(
        "hbm_traffic",
        "HBM traffic grows as N² for standard attention, FA1 and FA2; only FlashAttention's shrinks with memory.",
        "03_fa1_loop_order",
        traffic.hbm_traffic,
        traffic_data,
    ),
    Picture(
        "workers",
        "The paper's figure 2: forward workers own rows and never meet; backward workers own columns and meet on dQ.",
        "06_parallelism",
        workers.workers,
        workers_data,
    ),
    Picture(
        "waves",
        "At batch 1, FA1 leaves 100 of 132 SMs idle; FA2 fills them, and launching heavy blocks first trims the tail.",
        "06_parallelism",
        waves.waves,
        waves_data,
    ),
]
