"""Atomics against two passes over time: which worker writes which block of dQ, and when."""

from collections.abc import Mapping
from dataclasses import dataclass

from fa2_lab.machine import grid
from fa2_lab.plots import style
from fa2_lab.tiles import Tiling

ONE_PASS = 5  # products of a tile: S, dP, dV, dK, dQ
FIRST, SECOND = 4, 3  # over columns S, dP, dV, dK; over rows S, dP, dQ


@dataclass(frozen=True)
class Visit:
    """One tile of one thread block: its SM, its worker, its time in matrix products, and the rows it computes with."""

    SM: int
    worker: str
    start: float
    end: float
    rows: int
    adds: bool  # into dQ in memory, when it ends


def data(T: int = 4, B: int = 32, SMs: int = 4) -> dict:
    """Every tile and every write of dQ as scheduled on SMs, for one head of T × T tiles."""
    tiling = Tiling(T * B, T * B, B, B)
    columns, rows = grid.fa2_grid(1, tiling, "backward"), grid.fa2_grid(1, tiling, "forward")
    atomics = visits(tiling, columns, SMs, ONE_PASS, "column", True)
    two = visits(tiling, columns, SMs, FIRST, "column", False)
    own = visits(tiling, rows, SMs, SECOND, "row", False, max(v.end for v in two))
    ends = {v.rows: v.end for v in own}  # the last tile of a row block comes last
    ways = {
        "One pass, atomic adds": dict(visits=atomics, writes=[(v.rows, v.end, v.worker) for v in atomics]),
        "Two passes": dict(visits=two + own, writes=[(i, end, f"row {i}") for i, end in ends.items()]),
    }
    return dict(ways=ways, T=T, SMs=SMs)


def visits(
    tiling: Tiling, blocks: list[grid.Block], SMs: int, products: int, kind: str, adds: bool, since: float = 0
) -> list[Visit]:
    """The tiles of blocks that run as the schedule says, each for so many products, the first one from `since` on."""
    found = []
    for placed in grid.schedule(blocks, SMs).placed:
        n = blocks[placed.block].index
        mine = tiling.visited_rows(n) if kind == "column" else [n] * len(tiling.visited_cols(n))
        for step, i in enumerate(mine):
            start = since + products * (placed.start + step)
            found.append(Visit(placed.SM, f"{kind} {n}", start, start + products, i, adds))
    return found


@style.picture
def draw(ways: dict[str, Mapping], T: int, SMs: int) -> style.Drawn:
    """For each way the SMs over time, tile by tile, and beneath them dQ's blocks with a mark for every write.

    ways: {name: dict(visits: each Visit, writes: (block of dQ, time, worker) each)}.
    """
    caption = (
        "Atomic adds meet in dQ, several at once; with two passes each block has one writer, and a later one. A box"
    )
    caption += " is one tile, with what it adds to, in memory (+) or on chip; a mark is a write of dQ, with its writer."
    figure, axes = style.new_figure(5.4, caption, nrows=len(ways), sharex=True)
    lines = []
    for ax, (name, way) in zip(axes, ways.items(), strict=True):
        end, most = max(v.end for v in way["visits"]), _most_at_once(way["writes"])
        _work(ax, way["visits"])
        _writes(ax, way["writes"], SMs)
        ax.axvline(end, color=style.QUIET, linewidth=0.8, linestyle=":", zorder=0)
        ax.set_yticks([k + 0.5 for k in range(SMs)] + [SMs + 0.8 + i for i in range(T)],
                      [f"SM {k}" for k in range(SMs)] + [f"dQ {i}" for i in range(T)])  # fmt: skip
        ax.set(ylim=(SMs + T + 0.35, -0.1))
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        times = f"up to {most} at once into the same" if most > 1 else "one each"
        lines.append(f"{name}: {end:g} products long, {len(way['writes'])} writes of a block, {times}")
        ax.set_title(f"{name}: {end:g} products, {len(way['writes'])} writes" + f", up to {most} at once" * (most > 1))
    last = max(v.end for way in ways.values() for v in way["visits"])
    axes[-1].set(xlim=(0, last + 0.6), xlabel="time in matrix products of one tile →")
    alt = (
        f"{SMs} SMs over time, twice, with {T} blocks of dQ beneath. {'. '.join(lines)}. With atomic adds all column"
        f" programs start at the same rows, so their additions meet, in an order that differs from run to run. With two"
        " passes the column programs leave dQ alone, and then each row program sums its block on chip and writes it."
    )
    return figure, alt


def _most_at_once(writes: list[tuple[int, float, str]]) -> int:
    """The largest number of writes into one block at one time."""
    places = [(i, time) for i, time, _ in writes]
    return max(places.count(place) for place in places)


def _work(ax: style.Axes, visits: list[Visit]) -> None:
    """A box for every tile, in its worker's colour, with what it adds to."""
    for v in visits:
        label = f"+ dQ {v.rows}" if v.adds else f"dQ {v.rows}" if v.worker.startswith("row") else "dK, dV"
        n = int(v.worker.split()[1])
        box = (v.start, v.SM + 0.06, v.end - v.start, 0.88)
        style.box(ax, *box, label, style.worker(n), edgecolor=style.PAPER)


def _writes(ax: style.Axes, writes: list[tuple[int, float, str]], SMs: int) -> None:
    """A mark for every time at which a block is written: its writer's number, or how many write at that time."""
    at: dict[tuple[int, float], list[str]] = {}
    for i, time, worker in writes:
        at.setdefault((i, time), []).append(worker)
    for (i, time), workers in at.items():
        n, several = int(workers[0].split()[1]), len(workers) > 1
        label, width = (f"× {len(workers)}", 1.5) if several else (str(n), 0.9)
        look = dict(edgecolor=style.hue("dQ"), linewidth=1.2)
        ground = style.fill("dQ") if several else style.worker(n)
        style.box(ax, time - width, SMs + 0.42 + i, width, 0.76, label, ground, **look)
