"""Pictures whose data comes from the models of the machine, held against the meter and what was recorded."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import budget, chips, grid, io, time, warps
from fa2_lab.plots import backward, flops, traffic, waves, workers
from fa2_lab.plots import budget as budget_pictures
from fa2_lab.plots import warps as warp_pictures
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


# Warps ------------------------------------------------------------------------------------------------------


def warps_data(B_r: int = 128, B_c: int = 128, d: int = 64, W: int = 4) -> dict:
    """What one more tile adds to the shared-memory counts of a thread block that runs under either scheme."""
    moved, barriers = {}, {}
    for scheme, run in warps.SCHEMES.items():
        one, two = (_block(run, tiles, B_r, B_c, d, W) for tiles in (1, 2))
        bytes_of = {key: n * warps.BYTES[key[2]] for key, n in (two.counts - one.counts).items()}
        moved[scheme] = Counter()
        for (_, op, tensor), size in bytes_of.items():
            moved[scheme][op, tensor] += size
        barriers[scheme] = two.waits - one.waits
    return dict(B_r=B_r, B_c=B_c, d=d, W=W, moved=moved, barriers=barriers)


def _block(run, tiles: int, B_r: int, B_c: int, d: int, W: int) -> warps.SharedMemory:
    """The shared memory of one thread block that has gone through so many tiles."""
    rng = np.random.default_rng(0)
    Q, (K, V) = rng.standard_normal((B_r, d)), rng.standard_normal((2, tiles * B_c, d))
    return run(Q, K, V, Tiling(B_r, tiles * B_c, B_r, B_c), 0, W).shared


# What a tile costs and needs --------------------------------------------------------------------------------


def flops_data(B_r: int = 128, B_c: int = 64, d: int = 128) -> dict:
    """Prices in matmul FLOPs, and the clocks of one forward tile with FA1's arithmetic and with FA2's."""
    named = {chip.name.split()[0]: chip for chip in (chips.A100, chips.H100)}
    prices = {n: {"matmul": 1.0, "FP32": c.flops_per_fp32, "exp": c.flops_per_exp} for n, c in named.items()}
    clocks = {}
    for name, chip in named.items():
        worth = time.tweak_1(chip, B_r, B_c, d)
        for when, tile in (("before", worth.before), ("after", worth.after)):
            clocks[name, when] = {"matmul": tile.tensor, "FP32": tile.fp32, "exp": tile.exp}
    return dict(B_r=B_r, B_c=B_c, d=d, prices=prices, clocks=clocks)


BLOCKS = (32, 64, 128, 256)


def budget_data(stages: int = 2) -> dict:
    """What the forward needs at every block size and on which chips it fits; spills from figures/data/compiled.json."""
    where = {"RTX 4090": chips.RTX_4090, "A100": chips.A100, "H100": chips.H100}
    cells = {d: _cells(where, d, stages) for d in (64, 128)}
    limits = {name: chip.shared_per_block for name, chip in where.items()}
    return dict(sizes=BLOCKS, stages=stages, cells=cells, limits=limits, compiled=compiled_spills())


def _cells(where: dict, d: int, stages: int) -> dict[tuple[int, int], dict]:
    """For each block size: its needs, and on which chips it fits with 4 or 8 warps (needs: as on the last chip)."""
    tables = {name: budget.table(chip, d, sizes=BLOCKS, stages=stages) for name, chip in where.items()}
    cells = {}
    for blocks, (W, fit) in list(tables.values())[-1].items():
        fits_on = tuple(name for name in where if tables[name][blocks][1].ok)
        needs = dict(shared=fit.shared_bytes, registers=fit.registers, warps=W, limit=fit.limit)
        cells[blocks] = needs | dict(fits_on=fits_on)
    return cells


def compiled_spills() -> dict[int, dict[tuple[int, int], int]] | None:
    """{d: {(B_r, B_c): spill instructions}} of the compiled forward, if it has been recorded."""
    record = recorded("compiled")
    if record is None:
        return None
    spills: dict[int, dict[tuple[int, int], int]] = {}
    for row in record["forward"]:
        spills.setdefault(row["d"], {})[row["B_r"], row["B_c"]] = row["spills"]
    return spills


# Backward ---------------------------------------------------------------------------------------------------


def backward_data(T: int = 4, B: int = 8, d: int = 4) -> dict:
    """The five products as FA2's Algorithm 2 runs them, with what the meter counts of them on T × T tiles."""
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, T * B, d))
    O, L = fa2.forward(Q, K, V, B_r=B, B_c=B)
    trace = Trace()
    fa2.backward(Q, K, V, O, L, dO, B_r=B, B_c=B, trace=trace)
    products = trace.matmul_flops // (T * T * 2 * B * B * d)
    passes = {
        "One pass": {"over columns": ("S", "dP", "dV", "dK", "dQ")},
        "Two passes": {"over columns": ("S", "dP", "dV", "dK"), "over rows": ("S", "dP", "dQ")},
    }
    added = sum(e.tensor == "dQ" and e.op == "store" and e.j is not None for e in trace.events)
    return dict(T=T, products=products, passes=passes, dq_additions=added)


PICTURES = [
    Picture(
        "hbm_traffic",
        "HBM traffic grows as N² for standard attention, FA1 and FA2; only FlashAttention's shrinks with memory.",
        "03_fa1",
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
    Picture(
        "warp_split",
        "The paper's figure 3: split-Q adds nothing across warps and moves under half the bytes through shared memory.",
        "07_warps",
        warp_pictures.warp_split,
        warps_data,
    ),
    Picture(
        "flop_costs",
        "One exponential costs as much as 128 to 256 matmul FLOPs; tweak 1 takes FP32 work out of the tile.",
        "04_fa2_forward",
        flops.flop_costs,
        flops_data,
    ),
    Picture(
        "block_budget",
        "Fewer block sizes fit as d grows: some need more registers than there are, some more shared memory.",
        "07_warps",
        budget_pictures.block_budget,
        budget_data,
    ),
    Picture(
        "backward_graph",
        "Backward: one of five products computes S again, which nobody kept; dQ costs atomics or two products more.",
        "05_backward",
        backward.backward_graph,
        backward_data,
    ),
]
