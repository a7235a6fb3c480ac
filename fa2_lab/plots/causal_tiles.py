"""Diagram of the tiles under a causal mask, each of which is SKIP, DIAGONAL or FULL."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.tiles import CAUSAL, Tile, Tiling


def data(N: int = 512, B: int = 64) -> dict:
    """Return two causal tilings: one with as many queries as keys, and one with half as many queries."""
    tilings = {"Square": Tiling(N, N, B, B, CAUSAL), "Fewer queries": Tiling(N // 2, N, B, B, CAUSAL)}
    return dict(tilings=tilings)


FILLS = {Tile.SKIP: style.MASKED, Tile.DIAGONAL: style.tint(style.hue("S"), 0.35), Tile.FULL: style.hue("S")}


@style.picture
def draw(tilings: dict[str, Tiling]) -> style.Drawn:
    """Draw the tiles of each tiling by kind, with the number of tiles per kind and the edge of the mask."""
    caption = "Under a causal mask, tiles above the diagonal are skipped, and only those on it need the mask."
    figure, axes = style.new_figure(3.3, caption, ncols=len(tilings))
    for ax, (name, tiling) in zip(axes, tilings.items(), strict=True):
        _draw_tiling(ax, name, tiling)
    counted = "; ".join(f"{name}: {_format_counts(tiling)}" for name, tiling in tilings.items())
    return figure, f"Grids of tiles under a causal mask whose edge ends in the bottom right corner. {counted}."


def _format_counts(tiling: Tiling) -> str:
    return ", ".join(f"{tiling.counts()[kind]} {kind.name}" for kind in (Tile.FULL, Tile.DIAGONAL, Tile.SKIP))


def draw_tiles(ax: style.Axes, tiling: Tiling, start: int = 0) -> dict[Tile, list[tuple[float, float]]]:
    """Draw a box for each tile, styled by the tile's kind, with the first tile at (start, start).

    Return {kind: centres of the boxes of this kind}.
    """
    middles: dict[Tile, list] = {kind: [] for kind in FILLS}
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            rows, cols, kind = tiling.rows(i), tiling.cols(j), tiling.kind(i, j)
            x, y, w, h = start + cols.start, start + rows.start, cols.stop - cols.start, rows.stop - rows.start
            draw_tile(ax, x, y, w, h, kind)
            middles[kind].append((x + w / 2, y + h / 2))
    return middles


def draw_tile(ax: style.Axes, x: float, y: float, w: float, h: float, kind: Tile) -> None:
    """Draw one tile, styled by its kind. A skipped tile is hatched."""
    hatch = style.MASK_HATCH if kind is Tile.SKIP else None
    style.box(ax, x, y, w, h, fill=FILLS[kind], hatch=hatch, linewidth=0.5, edgecolor=style.QUIET)


def _draw_tiling(ax: style.Axes, name: str, tiling: Tiling) -> None:
    middles = draw_tiles(ax, tiling)
    row = np.arange(-1, tiling.N_q)  # the border between visible and masked scores, where each row's range of keys ends
    ax.plot(tiling.interval(row)[1], row + 1, color=style.INK, linewidth=1.4)
    for kind in (Tile.FULL, Tile.SKIP):
        ground = dict(facecolor=FILLS[kind], edgecolor="none", pad=1.5)
        words = f"{kind.name}\n{len(middles[kind])}"
        x, y = np.mean(middles[kind], axis=0)
        style.note(ax, x, y, words, ha="center", color=style.ink_on(FILLS[kind]), bbox=ground)
    black, (x, y) = style.ink_on(FILLS[Tile.FULL]), middles[Tile.DIAGONAL][-1]
    size = tiling.B_c
    ground = dict(facecolor=FILLS[Tile.FULL], edgecolor="none", pad=1.5)
    words = f"DIAGONAL: {len(middles[Tile.DIAGONAL])}"
    style.arrow(ax, (x - 2.5 * size, y), (x - 0.4 * size, y), black)
    style.note(ax, x - 2.5 * size, y, words, ha="right", color=black, bbox=ground)
    style.strip_axes(ax, (-4, tiling.N_k + 4), (-4, tiling.N_q + 4), aspect="equal", anchor="N", ylabel="← queries")
    ax.set_title(f"{name}, {tiling.N_q} × {tiling.N_k}")
    ax.set_xlabel("keys →")
