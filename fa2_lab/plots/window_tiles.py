"""Diagram of two sets of tiles: those needed for a window plus the first keys, and those that a causal loop visits."""

import numpy as np

from fa2_lab.plots import causal_tiles, style
from fa2_lab.tiles import Tile

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)


def data(N: int = 4096, B: int = 128, left: int = 1023, first: int = 4) -> dict:
    """Return the kind of each tile for N queries, and the numbers of tiles visited and needed for each N in LENGTHS.

    A query sees itself, the `left` keys before it, and the first `first` keys.
    """
    needed = {n: int((kinds_of(n, B, left, first) != Tile.SKIP).sum()) for n in LENGTHS}
    visited = {n: (n // B) * (n // B + 1) // 2 for n in LENGTHS}
    return dict(kinds=kinds_of(N, B, left, first), B=B, left=left, first=first, visited=visited, needed=needed)


def kinds_of(N: int, B: int, left: int, first: int) -> np.ndarray:
    """Return an array that classifies each tile as SKIP, DIAGONAL or FULL.

    The first `first` keys are all in column block 0.
    """
    begin = B * np.arange(N // B)
    top, bottom, key, last = begin[:, None], begin[:, None] + B - 1, begin[None, :], begin[None, :] + B - 1
    any_visible = (key <= bottom) & (last >= top - left)
    all_visible = (last <= top) & (key >= bottom - left)
    tile_kinds = np.where(all_visible, Tile.FULL, np.where(any_visible, Tile.DIAGONAL, Tile.SKIP))
    if first:
        tile_kinds[:, 0] = np.where(tile_kinds[:, 0] == Tile.SKIP, Tile.DIAGONAL, tile_kinds[:, 0])
    return tile_kinds


@style.picture
def draw(
    kinds: np.ndarray, B: int, left: int, first: int, visited: dict[int, int], needed: dict[int, int]
) -> style.Drawn:
    """Draw a grid of tiles styled by kind and, beside it, the numbers of tiles visited and needed as N grows."""
    caption = (
        "Under a window, a causal loop visits ever more useless tiles as N grows. The mask is a window of"
        f" {left + 1:,} keys and the first {first}, in tiles of {B} × {B}. On the left, dotted tiles are visited by a"
        " loop that knows only the causal mask, although the mask hides all of their scores."
    )
    figure, axes = style.new_stacked_figure(3.1, caption, ncols=2)
    grid, curves = axes[0]
    T = len(kinds)
    _draw_grid(grid, kinds)
    grid.set_title(f"window and first keys, N = {T * B:,}")
    style.strip_axes(grid, (-0.3, T + 0.3), (-0.3, T + 0.3), aspect="equal", ylabel="← queries", xlabel="keys →")
    _draw_curves(curves, visited, needed)
    ends = "; ".join(f"N = {n:,}: {visited[n]:,} and {needed[n]:,}" for n in visited)
    empty = T * (T + 1) // 2 - int((kinds != Tile.SKIP).sum())
    alt = (
        f"On the left, a grid of {T} × {T} tiles: a band along the diagonal and the first column hold visible scores,"
        f" {empty} tiles between them do not, and the tiles above the diagonal are skipped by causal. On the right, two"
        f" lines over the length: tiles that a causal loop visits, and tiles that are needed. {ends}."
    )
    return figure, alt


def _draw_grid(ax: style.Axes, kinds: np.ndarray) -> None:
    T = len(kinds)
    causal_part = np.tri(T, dtype=bool)
    style.masked_box(ax, 0, 0, T, T, linewidth=0.5)
    style.bars(ax, [(0, i, i + 1, 1) for i in range(T)], style.PAPER)
    for kind in (Tile.FULL, Tile.DIAGONAL):
        places = [(j, i, 1, 1) for i, j in np.argwhere(kinds == kind)]
        style.bars(ax, places, causal_tiles.FILLS[kind], edgecolor=style.QUIET, linewidth=0.4)
    empty = np.argwhere(causal_part & (kinds == Tile.SKIP))
    ax.scatter(empty[:, 1] + 0.5, empty[:, 0] + 0.5, s=1.5, color=style.QUIET, linewidths=0)
    style.note(ax, 0.7 * T, 0.2 * T, "skipped\nby causal", ha="center", bbox=style.TEXT_BACKGROUND)
    style.note(
        ax,
        0.31 * T,
        0.76 * T,
        f"{len(empty)} useless tiles:\noutside the window",
        ha="center",
        bbox=style.TEXT_BACKGROUND,
    )


def _draw_curves(ax: style.Axes, visited: dict[int, int], needed: dict[int, int]) -> None:
    lines = {
        "visited by\na causal loop": (visited, style.QUIET, style.DASHED),
        "needed for\nthe window": (needed, style.hue("S"), "-"),
    }
    for name, (counts, color, line) in lines.items():
        ax.plot(list(counts), list(counts.values()), marker="o", markersize=3, color=color, linestyle=line)
        upper = counts is visited
        n, shift = (8192, (-8, 8)) if upper else (8192, (6, -18))
        style.beside(ax, name, (n, counts[n]), shift, ha="right" if upper else "left")
        style.beside(ax, f"{counts[16384]:,} tiles", (16384, counts[16384]), (6, -9), ha="left")
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="tiles per head")
    style.log_ticks(ax.xaxis, list(visited)[::2])
    style.log_ticks(ax.yaxis, [100, 1000, 10000, 100000])
