"""Pictures of the book as a whole."""

from __future__ import annotations

from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips, grid, io, warps
from fa2_lab.plots import ladder_map
from fa2_lab.plots.ladder_map import Rung
from fa2_lab.tiles import CAUSAL, Tile, Tiling

HBM = "elements through HBM"
ABOVE = ("08–11", "On a GPU", "the same lines as kernels: written, measured, and taken to Hopper")


def ladder_data(N: int = 8192, d: int = 64, B: int = 128, heads: int = 32, W: int = 4) -> dict:
    """What each change saves, in closed form: one head, square tiles; `heads` heads at batch 1 on an H100."""
    tiling, chip = Tiling(N, N, B, B), chips.H100
    standard, fa1, fa2 = (moved(name, tiling, d) for name in ("standard", "fa1", "fa2"))
    work = {name: io.not_matmul(io.tile_operations(name, "forward", B, B, d)) for name in ("fa1", "fa2")}
    visited = tiles_of(tiling) - Tiling(N, N, B, B, CAUSAL).counts()[Tile.SKIP]
    idle = [1 - grid.schedule(blocks(heads, tiling), chip.SMs).utilisation for blocks in (grid.fa1_grid, grid.fa2_grid)]
    rungs = [
        Rung("01", "Naive attention", "S, P and O, one after the other", HBM, standard),
        Rung("02", "Online softmax", "a row is finished block by block", "numbers a row keeps", {"S": N}, state(d)),
        Rung("03", "FlashAttention", "tiles; S and P never leave the chip", HBM, standard, fa1),
        Rung("04", "FA2: loops swapped", "o, l and m stay on chip until done", HBM, fa1, fa2),
        Rung("04", "FA2: divide once", "not in every tile, but after the last", "FP32 FLOPs in a tile",
             {"": work["fa1"]}, {"": work["fa2"]}),
        Rung("04", "FA2: one statistic", "L = m + log l instead of m and l", "numbers stored per row",
             {"m": 1, "l": 1}, {"L": 1}),
        Rung("04", "FA2: causal tiles", "tiles above the diagonal are skipped", "tiles visited",
             {"S": tiles_of(tiling)}, {"S": visited}),
        Rung("05", "Backward", "P is computed again, not kept", "numbers kept", {"P": N * N}, {"L": N}),
        Rung("06", "Parallelism", "a thread block per row block, not head", "of an H100 idle",
             {"": idle[0]}, {"": idle[1]}),
        Rung("07", "Warps", "each warp takes rows, not keys", "bytes, shared memory",
             through_shared_memory("split_k", B, d, W), through_shared_memory("split_q", B, d, W)),
    ]  # fmt: skip
    sizes = f"One head, N = {N:,}, d = {d}, tiles {B} × {B}; 06: {heads} heads; 07: one tile, {W} warps"
    setting = f"Upper bar before, lower bar after. {sizes}"
    return dict(rungs=rungs, above=ABOVE, setting=setting)


def moved(algorithm: str, tiling: Tiling, d: int) -> dict[str, int]:
    """Elements that a forward moves, loads and stores together, tensor by tensor, the largest first."""
    traffic = io.traffic(algorithm, "forward", tiling, d)
    both = {t: traffic.loads.get(t, 0) + traffic.stores.get(t, 0) for t in [*traffic.loads, *traffic.stores]}
    return dict(sorted(both.items(), key=lambda item: -item[1]))


def state(d: int) -> dict[str, int]:
    """What a row needs to go on: m, l and o."""
    return {"m": 1, "l": 1, "o": d}


def tiles_of(tiling: Tiling) -> int:
    """All tiles, whatever the mask."""
    return tiling.T_r * tiling.T_c


def through_shared_memory(scheme: str, B: int, d: int, W: int) -> dict[str, int]:
    """Bytes that one tile moves through shared memory, by tensor; what crosses warps goes to o, m and l."""
    hues = {"PV": "o", "max": "m", "sum": "l"}
    bytes_of: dict[str, int] = {}
    for (_, tensor), n in warps.tile_accesses(scheme, B, B, d, W).items():
        name = hues.get(tensor, tensor)
        bytes_of[name] = bytes_of.get(name, 0) + n * warps.BYTES[tensor]
    return dict(sorted(bytes_of.items(), key=lambda item: -item[1]))


PICTURES = [
    Picture(
        "ladder",
        "What each chapter changes in attention, and what becomes smaller by it; the result stays the same.",
        "00_start",
        ladder_map.ladder,
        ladder_data,
    ),
]
