"""Attention over several GPUs: who holds whose keys when, and which rows a rank should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from fa2_lab.plots import style

PITCH = 1.5  # from one cell to the next
LANES = ("kernels", "K V", "dK dV")


# The schedule -------------------------------------------------------------------------------------------------


@style.picture
def ring_schedule(
    cells: Sequence[Sequence[Mapping]], lanes: Mapping[str, Sequence[tuple]], setting: str
) -> tuple[Figure, str]:
    """Above, for each rank and step, whose keys are here and which scores they make; below, one rank's time.

    cells: [rank][step] of dict(source, rows, cols, diagonal), with rows and cols as shares (from, to) of a shard.
    lanes: {direction: (lane, start, end, label, source or None)}, times in milliseconds.
    """
    title = "Queries stay, keys and values go round; the next block travels while this one is computed"
    figure, axes = style.new_figure(7.4, title, nrows=3, height_ratios=[5.4, 1.15, 1.6])
    ranks = len(cells)
    for rank, row in enumerate(cells):
        axes[0].text(-0.35, PITCH * rank + 0.5, f"rank {rank}", ha="right", va="center")
        for step, cell in enumerate(row):
            _cell(axes[0], PITCH * 2 * step, PITCH * rank, cell)
            if step:
                _arrow(axes[0], rank, step, ranks)
    for step in range(ranks):
        axes[0].text(PITCH * 2 * step + 0.5, -0.25, f"step {step}", ha="center", va="bottom")
    axes[0].set(xlim=(-1.7, PITCH * 2 * ranks - 1.7), ylim=(PITCH * ranks - 0.3, -0.75), aspect="equal")
    _bare(axes[0])
    for ax, (direction, spans) in zip(axes[1:], lanes.items(), strict=True):
        _lanes(ax, direction, spans)
    axes[2].set_xlabel(f"milliseconds →\n{setting}", fontsize=style.SMALL, color=style.QUIET)
    alt = (
        f"{ranks} ranks in {ranks} steps. Each cell is the square of a rank's queries (down) and the keys that are here"
        f" (right), numbered by the rank they belong to: its own first, a triangle; then those of its left neighbours,"
        f" one after the other. All rows see the front half of an earlier rank's keys, the back half of the rows sees"
        f" all keys of a later rank: half of the square each time. Below, the time of one rank: {_told(lanes)}."
    )
    return figure, alt


def _cell(ax: Axes, x: float, y: float, cell: Mapping) -> None:
    """The square of one meeting: what is computed in the colour of the keys' owner, the rest hatched."""
    style.box(ax, x, y, 1, 1, fill=style.MASKED, edgecolor=style.QUIET, hatch=style.MASK_HATCH, gid="unseen")
    (top, bottom), (left, right) = cell["rows"], cell["cols"]
    fill, gid = style.worker(cell["source"]), f"keys of {cell['source']}"
    if cell["diagonal"]:
        corners = [(x, y), (x, y + 1), (x + 1, y + 1)]
        ax.add_patch(Polygon(corners, facecolor=fill, edgecolor=style.INK, linewidth=0.8, gid=gid))
        at = x + 0.3, y + 0.7
    else:
        style.box(ax, x + left, y + top, right - left, bottom - top, fill=fill, gid=gid)
        at = x + (left + right) / 2, y + (top + bottom) / 2
    ax.text(*at, f"{cell['source']}", ha="center", va="center", color=style.ink_on(fill), fontsize=style.LARGE)


def _arrow(ax: Axes, rank: int, step: int, ranks: int) -> None:
    """The block comes from the rank above, or round the corner."""
    end = PITCH * 2 * step - 0.08, PITCH * rank + 0.5
    start = (PITCH * 2 * (step - 1) + 1.08, PITCH * (rank - 1) + 0.5) if rank else (end[0] - 0.62, end[1])
    look = dict(arrowstyle="->", color=style.hue("K"), linewidth=1.2, shrinkA=0, shrinkB=0)
    ax.annotate("", end, start, arrowprops=look)
    if rank == 0:
        ax.text(start[0] - 0.05, start[1], f"from {ranks - 1}", ha="right", va="center", fontsize=style.SMALL)


def _bare(ax: Axes) -> None:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _lanes(ax: Axes, direction: str, spans: Sequence[tuple]) -> None:
    """One rank's kernels and its two kinds of transfer, each on a line of its own."""
    used = [lane for lane in LANES if any(span[0] == lane for span in spans)]
    for lane, start, end, label, source in spans:
        y, width = used.index(lane) + 0.1, end - start
        if source is not None:
            style.box(ax, start, y, width, 0.8, label, style.worker(source), gid=lane)
        else:
            style.tensor_box(ax, start, y, width, 0.8, "dK" if lane == "dK dV" else "K", gid=lane)
    ax.set_yticks(
        [n + 0.5 for n in range(len(used))], ["keys of" if lane == "kernels" else f"{lane} →" for lane in used]
    )
    ax.set(ylim=(len(used), 0), xlim=(0, 1.01 * max(span[2] for span in spans)))
    ax.set_title(direction, pad=3)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _told(lanes: Mapping[str, Sequence[tuple]]) -> str:
    """Times in words."""
    parts = []
    for direction, spans in lanes.items():
        sums = {lane: sum(end - start for name, start, end, *_ in spans if name == lane) for lane in LANES}
        parts.append(direction + " " + ", ".join(f"{lane} {t:.2g} ms" for lane, t in sums.items() if t))
    return "; ".join(parts)


# Zigzag -------------------------------------------------------------------------------------------------------


@style.picture
def zigzag(owners: Mapping[str, np.ndarray], tiles: Mapping[str, Sequence[int]], setting: str) -> tuple[Figure, str]:
    """Which rank computes which part of a causal S under two layouts, and how many tiles that makes.

    owners: {layout: rank of each pair of pieces, −1 where nothing is visible}; tiles: {layout: of each rank}.
    """
    title = "A front and a back piece for each rank: causal work comes out even"
    figure, axes = style.new_figure(4.9, title, nrows=2, ncols=2, height_ratios=[4, 1.5])
    most = max(max(counts) for counts in tiles.values())
    busy = {layout: sum(counts) / (len(counts) * max(counts)) for layout, counts in tiles.items()}
    for column, (layout, owner) in enumerate(owners.items()):
        _pieces(axes[0][column], owner, layout)
        _bars(axes[1][column], tiles[layout], most, busy[layout])
    figure.supxlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    told = "; ".join(
        f"{layout} {', '.join(f'{n:,}' for n in tiles[layout])}, {busy[layout]:.0%} busy" for layout in tiles
    )
    alt = (
        f"Two causal score matrices, queries down, keys right, cut into {len(next(iter(owners.values())))} pieces each"
        f" way; every visible part has the colour of the rank whose queries they are. Contiguous: rank 0 has the short"
        f" rows on top, the last rank the long ones. Zigzag: each rank has a piece from the top, one from the bottom."
        f" Bars beneath count the tiles of each rank: {told}."
    )
    return figure, alt


def _pieces(ax: Axes, owner: np.ndarray, layout: str) -> None:
    style.tile_axes(ax, *owner.shape)
    ax.set_title(layout)
    for (i, j), rank in np.ndenumerate(owner):
        if rank < 0:
            style.box(ax, j, i, 1, 1, fill=style.MASKED, edgecolor=style.QUIET, hatch=style.MASK_HATCH, gid="skipped")
        else:
            style.box(ax, j, i, 1, 1, f"{rank}", style.worker(rank), gid=f"rank {rank}")


def _bars(ax: Axes, counts: Sequence[int], most: int, busy: float) -> None:
    for rank, n in enumerate(counts):
        style.box(ax, 0, rank + 0.1, n / most, 0.8, gid=f"tiles of {rank}", fill=style.worker(rank))
        ax.text(-0.02, rank + 0.5, f"rank {rank}", ha="right", va="center")
        ax.text(n / most + 0.02, rank + 0.5, f"{n:,}", ha="left", va="center", fontsize=style.SMALL)
    ax.set(xlim=(-0.2, 1.25), ylim=(len(counts), 0), xticks=[], yticks=[])
    ax.set_title(f"tiles: ranks are busy {busy:.0%} of the time", pad=3)
    ax.spines[:].set_visible(False)
