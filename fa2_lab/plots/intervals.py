"""Masks as intervals of keys: causal, windows, padding, packed documents, a sink; and the tiles that each visits."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import causal_tiles, style
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 32, B: int = 4, left: int = 8, documents: tuple[int, ...] = (14, 6, 12)) -> dict:
    """Six masks over N queries and N keys. A mask is a list of (where its rows and columns begin, tiling): packed
    documents are several small problems one after the other, all others are one."""

    def one(mask: Mask) -> list[tuple[int, Tiling]]:
        return [(0, Tiling(N, N, B, B, mask))]

    starts = np.cumsum([0, *documents[:-1]]).tolist()
    window = Mask(causal=True, window=(left, None))
    masks = {
        "causal": one(CAUSAL),
        f"causal, {left} to the left": one(window),
        f"window ({left}, {left // 2})": one(Mask(window=(left, left // 2))),
        "causal, padded": one(Mask(causal=True, key_length=N * 5 // 8)),
        f"{len(documents)} documents, causal": [
            (start, Tiling(n, n, B, B, CAUSAL)) for start, n in zip(starts, documents, strict=True)
        ],
        f"causal, {left} to the left, sink": one(window),
    }
    return dict(masks=masks, N=N, B=B, row=N * 3 // 4 - 1)


# Drawing --------------------------------------------------------------------------------------------------------

SINK = -5  # where the sink's column stands, left of the keys
MEANING = {
    Tile.FULL: "FULL: computed, no mask",
    Tile.DIAGONAL: "DIAGONAL: computed, then masked",
    Tile.SKIP: "SKIP: never visited",
}


@style.picture
def draw(masks: dict[str, list[tuple[int, Tiling]]], N: int, B: int, row: int) -> tuple[Figure, str]:
    """Each mask's tiles by kind, the lines where intervals begin and end, and one row's interval in numbers."""
    title = "Six masks, each an interval in every row: the keys from first up to last"
    figure, axes = style.new_figure(5.9, title, nrows=3, ncols=3, height_ratios=[1, 1, 0.12])
    for ax, (name, parts) in zip(axes[:2].flat, masks.items(), strict=True):
        visited = _tiles(ax, parts)
        tiles = f"of {(N // B) ** 2} tiles" if len(parts) == 1 else "tiles of their own"
        ax.set_title(f"{name}\n{visited} {tiles}")
        ax.set(xlim=(SINK - 1.5, N + 1), ylim=(N + 1, -1), aspect="equal", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        if "sink" in name:
            _sink(ax, N)
        _row(ax, parts, row)
    for ax in axes[:2, 0]:
        ax.set_ylabel("← queries", labelpad=-8)
        ax.text(-0.6, row + 0.5, f"row {row}", ha="right", va="center", fontsize=style.SMALL)
    for ax in axes[1]:
        ax.set_xlabel("keys →")
    _legend(figure, axes[2])
    told = "; ".join(f"{name}: {visited_tiles(parts)}" for name, parts in masks.items())
    alt = (
        f"Six score matrices of {N} queries and {N} keys in tiles of {B} × {B}, queries down, keys right. Tiles are"
        f" FULL, DIAGONAL or SKIP. Two lines show where each row's interval begins and ends. Visited: {told}."
        f" Documents stand as triangles along the diagonal, each with tiles of its own. The sink is one more column"
        f" beside the keys, seen by every row. In each, row {row} is drawn as a bar with its first and last key."
    )
    return figure, alt


def visited_tiles(parts: list[tuple[int, Tiling]]) -> int:
    """Tiles that are computed."""
    counts = [tiling.counts() for _, tiling in parts]
    return sum(n[Tile.FULL] + n[Tile.DIAGONAL] for n in counts)


def _tiles(ax: Axes, parts: list[tuple[int, Tiling]]) -> int:
    N = sum(tiling.N_q for _, tiling in parts)
    look = dict(linewidth=0.5, edgecolor=style.QUIET)
    if len(parts) > 1:
        style.box(ax, 0, 0, N, N, "", style.MASKED, hatch=style.MASK_HATCH, gid="outside", **look)
    for start, tiling in parts:
        for i in range(tiling.T_r):
            for j in range(tiling.T_c):
                rows, cols, kind = tiling.rows(i), tiling.cols(j), tiling.kind(i, j)
                hatch = style.MASK_HATCH if kind is Tile.SKIP else None
                corner = start + cols.start, start + rows.start, cols.stop - cols.start, rows.stop - rows.start
                style.box(ax, *corner, "", causal_tiles.FILLS[kind], hatch=hatch, gid=kind.name, **look)
        row = np.arange(tiling.N_q)
        for ends in tiling.interval(row):
            ax.stairs(start + ends, start + np.arange(tiling.N_q + 1), orientation="horizontal", baseline=None, **EDGE)
    return visited_tiles(parts)


EDGE = dict(color=style.INK, linewidth=1.3)


def _sink(ax: Axes, N: int) -> None:
    style.box(ax, SINK, 0, 3, N, "", style.fill("m"), edgecolor=style.hue("m"), gid="sink")
    ax.text(SINK + 1.5, N / 2, "sink: a score, no value", rotation=90, ha="center", va="center", fontsize=style.SMALL)


def _row(ax: Axes, parts: list[tuple[int, Tiling]], row: int) -> None:
    """One row's interval as a bar, with its numbers beside it."""
    start, tiling = next((s, t) for s, t in parts if s <= row < s + t.N_q)
    first, last = (int(start + end) for end in tiling.interval(row - start))
    style.box(ax, first, row, last - first, 1, "", style.INK, linewidth=0, gid="row")
    text = ax.text(first - 0.6, row + 0.5, f"[{first}, {last})", ha="right", va="center", fontsize=style.SMALL)
    if first < 8:  # no room on the left
        text.set(position=(last + 0.6, row + 0.5), ha="left")
    text.set_bbox(dict(facecolor=style.PAPER, edgecolor="none", pad=1.0))


def _legend(figure: Figure, axes) -> None:
    for ax, (kind, meaning) in zip(axes, MEANING.items(), strict=True):
        hatch = style.MASK_HATCH if kind is Tile.SKIP else None
        style.box(ax, 0, 0, 0.09, 1, "", causal_tiles.FILLS[kind], hatch=hatch, linewidth=0.5, edgecolor=style.QUIET)
        ax.text(0.12, 0.5, meaning, va="center", fontsize=style.SMALL)
        ax.set(xlim=(0, 1), ylim=(-0.2, 1.2), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
