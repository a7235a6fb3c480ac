"""The ladder as one picture: what each stage of the book changes, and what becomes smaller by it."""

from dataclasses import dataclass

from fa2_lab.machine import chips, grid, io, warps
from fa2_lab.plots import style
from fa2_lab.tiles import CAUSAL, Tile, Tiling


def data(N: int = 8192, d: int = 64, B: int = 128, heads: int = 32, W: int = 4) -> dict:
    """What each change saves, in closed form: one head, square tiles; `heads` heads at batch 1 on an H100."""
    tiling, chip = Tiling(N, N, B, B), chips.H100
    standard, fa1, fa2 = (io.traffic(name, "forward", tiling, d).total for name in ("standard", "fa1", "fa2"))
    work = [io.not_matmul(io.tile_operations(name, "forward", B, B, d)) for name in ("fa1", "fa2")]
    tiles = tiling.T_r * tiling.T_c
    causal = tiles - Tiling(N, N, B, B, CAUSAL).counts()[Tile.SKIP]
    idle = [1 - grid.schedule(blocks(heads, tiling), chip.SMs).utilisation for blocks in (grid.fa1_grid, grid.fa2_grid)]
    shared = [through_shared_memory(scheme, B, d, W) for scheme in ("split_k", "split_q")]
    requested = "elements requested"
    rungs = [
        Rung("02", "Online softmax", "a row is finished block by block", "numbers of a row kept", N, d + 2),
        Rung("03", "FlashAttention", "tiles; S and P never leave the chip", requested, standard, fa1),
        Rung("04", "FA2: loops swapped", "o, l and m stay on chip until done", requested, fa1, fa2),
        Rung("04", "FA2: divide once", "not in every tile, but after the last", "FP32 work of a tile", *work),
        Rung("04", "FA2: one statistic", "L = m + log l instead of m and l", "numbers of a row stored", 2, 1),
        Rung("04", "FA2: causal tiles", "tiles above the diagonal are skipped", "tiles visited", tiles, causal),
        Rung("05", "Backward", "P is computed again, not kept", "kept for the backward", N * N, N * d + N),
        Rung("06", "Parallelism", "a thread block per row block, not head", "SMs without work", *idle),
        Rung("07", "Warps", "each warp takes rows, not keys", "shared memory bytes", *shared),
    ]
    sizes = f"One head, N = {N:,}, d = {d}, tiles {B} × {B}; 06: {heads} heads on an H100; 07: one tile, {W} warps"
    return dict(rungs=rungs, setting=sizes)


def through_shared_memory(scheme: str, B: int, d: int, W: int) -> int:
    """Bytes that one tile moves through shared memory."""
    accesses = warps.tile_accesses(scheme, B, B, d, W)
    return sum(n * warps.BYTES[tensor] for (_, tensor), n in accesses.items())


CHAPTER, TEXT, GAUGE, LENGTH, FACTOR = 0.0, 0.42, 3.05, 1.3, 4.5  # inches
HIGH = 0.46


@dataclass(frozen=True)
class Rung:
    """One change, and how much there is of what it makes less."""

    chapter: str
    name: str
    change: str
    unit: str
    before: float
    after: float

    @property
    def factor(self) -> float:
        """How many times less there is afterwards."""
        return self.before / self.after


@style.picture
def draw(rungs: list[Rung], setting: str) -> style.Drawn:
    """A line for each change, with the share that it leaves as a bar, and the factor."""
    caption = "The same result on every rung; each makes one thing smaller. A bar shows the share that is left."
    figure, ax = style.new_figure(HIGH * len(rungs) + 0.4, f"{caption} {setting}.")
    for n, rung in enumerate(rungs):
        y = HIGH * n
        style.note(ax, CHAPTER, y, rung.chapter, color=style.QUIET, weight="bold")
        style.note(ax, TEXT, y - 0.085, rung.name, weight="bold")
        style.note(ax, TEXT, y + 0.085, rung.change)
        style.box(ax, GAUGE, y - 0.1, LENGTH, 0.2, edgecolor=style.QUIET)
        style.box(ax, GAUGE, y - 0.1, LENGTH / rung.factor, 0.2, fill=style.OURS, linewidth=0)
        style.note(ax, FACTOR, y - 0.085, f"÷ {times(rung.factor)}", weight="bold")
        style.note(ax, FACTOR, y + 0.085, rung.unit)
    style.note(ax, CHAPTER, -0.36, "chapter and change", color=style.QUIET)
    style.note(ax, GAUGE, -0.36, "what is left", color=style.QUIET)
    style.note(ax, FACTOR, -0.36, "of what", color=style.QUIET)
    style.bare(ax, (0, style.WIDTH - 0.05), (-0.45, HIGH * (len(rungs) - 1) + 0.2))
    changes = "; ".join(f"{r.name}, {r.unit} ÷ {times(r.factor)}" for r in rungs)
    return figure, f"A list of changes, each with a bar for the share of something that it leaves. {changes}."


def times(factor: float) -> str:
    """A factor with two digits that matter, or whole."""
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
