"""Pictures of attention over several GPUs: from the geometry and its model, and of what was measured."""

from __future__ import annotations

import numpy as np

from fa2_lab.gallery.measured import made, measured
from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips, ring
from fa2_lab.plots.ring import ring_schedule, zigzag
from fa2_lab.plots.ring_speed import ring_speed
from fa2_lab.reference.shards import LAYOUTS, even_lengths, meeting, pieces
from fa2_lab.tiles import Tile

REACHED = {"forward": 0.6e15, "backward": 0.4e15}  # FLOP/s of this project's kernels on an H200, rounded
SIZES = dict(heads=16, kv_heads=16, d=128, causal=True)


def schedule_data(ranks: int = 4, rows: int = 4096) -> dict:
    """Every meeting of a causal zigzag ring, and when one rank computes and sends what."""
    lengths = [rows] * ranks
    cells = [[cell(lengths, rank, (rank - step) % ranks) for step in range(ranks)] for rank in range(ranks)]
    lanes = {way: spans(way, ranks, rows, rank=1) for way in ("forward", "backward")}
    link = chips.H200.link_per_second
    setting = f"rank 1, {rows:,} rows a rank, 16 heads, d = 128; kernels at {REACHED['forward'] / 1e12:.0f} and "
    setting += f"{REACHED['backward'] / 1e12:.0f} TFLOP/s, links at the {link / 1e9:.0f} GB/s of an H200's sheet"
    return dict(cells=cells, lanes=lanes, setting=setting)


def cell(lengths: list[int], rank: int, source: int) -> dict:
    """One meeting, its rows and columns as shares of a shard."""
    seen = meeting(lengths, rank, source, "zigzag", causal=True)
    rows, cols = ((x.start / lengths[0], x.stop / lengths[0]) for x in (seen.queries, seen.keys))
    return dict(source=source, rows=rows, cols=cols, diagonal=seen.kind is Tile.DIAGONAL)


def spans(direction: str, ranks: int, rows: int, rank: int) -> list[tuple]:
    """(lane, start, end, label, source of the keys) in milliseconds; a transfer starts when its block is there."""
    options = SIZES | dict(flops=REACHED[direction], link=chips.H200.link_per_second)
    step = ring.step(rows, direction, **options)
    compute, kv = 1e3 * step.compute, 1e3 * ring.step(rows, "forward", **options).transfer
    gradients = 1e3 * step.transfer - kv
    own = [1.0] if direction == "forward" else [0.25, 0.75]  # of the own triangle, its first and second half of rows
    parts = [(rank, own[0])] + [((rank - n) % ranks, 1.0) for n in range(1, ranks)] + [(rank, x) for x in own[1:]]
    found, start = [], 0.0
    for n, (source, share) in enumerate(parts):
        end = start + share * compute
        found.append(("kernels", start, end, str(source), source))
        if n < ranks - 1:
            found.append(("K V", start, start + kv, "K V", None))
        if direction == "backward" and n > 1:
            found.append(("dK dV", start, start + gradients, "dK dV", None))
        start = end
    return found


def zigzag_data(ranks: int = 4, N: int = 131072, B: int = 128) -> dict:
    """Who computes which pair of pieces, and the tiles of each rank, counted for one head of real size."""
    owners = {layout: owners_of(ranks, layout) for layout in reversed(LAYOUTS)}
    tiles = {x: ring.work(even_lengths(N, ranks), x, True, B, B).sum(axis=1).tolist() for x in owners}
    return dict(owners=owners, tiles=tiles, setting=f"{N:,} tokens on {ranks} ranks, tiles of {B} × {B}, one head")


def owners_of(ranks: int, layout: str) -> np.ndarray:
    """[i, j]: the rank that holds rows i, if they see keys j; two pieces for each rank."""
    rank_of = np.empty(2 * ranks, dtype=int)
    for rank, places in enumerate(pieces([2] * ranks, layout)):
        for place in places:
            rank_of[place] = rank
    return np.where(np.tri(2 * ranks, dtype=bool), rank_of[:, None], -1)


def speed_data() -> dict:
    """What `fa2-lab bench ring` has measured: forward and backward together."""
    record = measured("ring")
    rows = [r for r in record["rows"] if "layout" not in r["problem"]]
    by_length = {r["problem"]["N_q"]: r["values"] for r in rows if r["direction"] == "both"}
    sizes = sorted({gpus(name) for values in by_length.values() for name in values})
    curves = {n: sorted((N, ratio(v, n)) for N, v in by_length.items() if name_of(n) in v) for n in sizes if n > 1}
    longest = max(by_length)
    peak = next(r for r in rows if r["direction"] == "peak memory" and r["problem"]["N_q"] == longest)["values"]
    return dict(
        curves=curves,
        contiguous=contiguous(record, by_length),
        memory={gpus(name): mib for name, (mib,) in peak.items()},
        setting=f"{made(record)}; forward and backward, causal, 16 heads of 128; memory at {longest:,} tokens",
    )


def contiguous(record: dict, by_length: dict) -> tuple[int, int, float] | None:
    """(GPUs, N, times faster) of the other layout, if it was measured."""
    for row in record["rows"]:
        if row["problem"].get("layout") == "contiguous" and row["direction"] == "both":
            (name, (ms, *_)), N = next(iter(row["values"].items())), row["problem"]["N_q"]
            return gpus(name), N, by_length[N][name_of(1)][0] / ms
    return None


def gpus(name: str) -> int:
    return int(name.split()[0])


def name_of(n: int) -> str:
    return f"{n} GPU" + "s" * (n > 1)


def ratio(values: dict, n: int) -> float:
    """How many times as fast as one GPU."""
    return values[name_of(1)][0] / values[name_of(n)][0]


PICTURES = [
    Picture(
        "ring_schedule",
        "Ring attention on four ranks: whose keys are where at each step, and what travels while a rank computes.",
        "15_rings",
        ring_schedule,
        schedule_data,
    ),
    Picture(
        "zigzag",
        "Contiguous shards leave causal work uneven among ranks; a front and a back piece each make it even.",
        "15_rings",
        zigzag,
        zigzag_data,
    ),
    Picture(
        "ring_speed",
        "The ring measured on 2 and 4 H200s: speed over one GPU by sequence length, and peak memory of each GPU.",
        "15_rings",
        ring_speed,
        speed_data,
    ),
]
