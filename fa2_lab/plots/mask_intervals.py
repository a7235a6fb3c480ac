"""Diagram of masks and their tiles, for masks that let each row see a single range of keys (causal masks, windows)."""

import numpy as np

from fa2_lab.plots import causal_tiles, style
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling


def data(N: int = 32, B: int = 4, left: int = 8, documents: tuple[int, ...] = (14, 6, 12)) -> dict:
    """Return six masks over N queries and N keys.

    A mask is a list of pairs (offset, tiling), where `offset` is the index of the tiling's first row and first column.
    Packed documents have one pair per document, and every other mask has a single pair.
    """

    def single_tiling(mask: Mask) -> list[tuple[int, Tiling]]:
        return [(0, Tiling(N, N, B, B, mask))]

    starts = np.cumsum([0, *documents[:-1]]).tolist()
    window = Mask(causal=True, window=(left, None))
    masks = {
        "causal": single_tiling(CAUSAL),
        f"causal, {left} to the left": single_tiling(window),
        f"window ({left}, {left // 2})": single_tiling(Mask(window=(left, left // 2))),
        "causal, padded": single_tiling(Mask(causal=True, key_length=N * 5 // 8)),
        f"{len(documents)} documents, causal": [
            (start, Tiling(n, n, B, B, CAUSAL)) for start, n in zip(starts, documents, strict=True)
        ],
        f"causal, {left} to the left, sink": single_tiling(window),
    }
    return dict(masks=masks, N=N, B=B, row=N * 3 // 4 - 1)


SINK = -4  # the x-coordinate of the sink's column, left of the keys
MEANING = {
    Tile.FULL: "FULL: computed, not masked",
    Tile.DIAGONAL: "DIAGONAL: computed and masked",
    Tile.SKIP: "SKIP: not visited",
}


@style.picture
def draw(masks: dict[str, list[tuple[int, Tiling]]], N: int, B: int, row: int) -> style.Drawn:
    """Draw the tiles of each mask, coloured by kind, with two lines at the first and the last key of each row."""
    caption = "A row sees one interval of keys, so whole tiles can be skipped."
    caption += f" These six masks are all of this kind. The bar shows the interval of row {row}."
    rows, columns, last = (3, 2, 0.42) if style.is_narrow() else (2, 3, 0.12)
    figure, axes = style.new_figure(
        7.2 if style.is_narrow() else 4.5, caption, nrows=rows + 1, ncols=columns, height_ratios=[1] * rows + [last]
    )
    for ax, (name, parts) in zip(axes[:rows].flat, masks.items(), strict=True):
        visited = _draw_tiles(ax, parts)
        tiles = f"of {(N // B) ** 2} tiles" if len(parts) == 1 else "tiles of their own"
        ax.set_title(f"{name}:\n{visited} {tiles}")
        style.strip_axes(ax, (SINK - 0.5, N + 1), (-1, N + 1), aspect="equal")
        if "sink" in name:
            style.box(ax, SINK, 0, 3, N, "", style.tensor_fill("m"), edgecolor=style.hue("m"))
            style.note(
                ax,
                SINK + 1.5,
                N / 2,
                "sink: no value" if style.is_narrow() else "sink: a score, no value",
                rotation=90,
                ha="center",
            )
        _draw_row_range(ax, parts, row)
    figure.get_layout_engine().set(hspace=0.06)
    for ax in axes[:rows, 0]:
        ax.set_ylabel("← queries")
    for ax in axes[rows]:
        ax.remove()
    _draw_legend(figure.add_subplot(axes[rows][0].get_gridspec()[rows, :]))
    counts = "; ".join(f"{name}: {visited_tiles(parts)}" for name, parts in masks.items())
    alt = (
        f"Six score matrices of {N} queries and {N} keys in tiles of {B} × {B}, queries down, keys right. Tiles are"
        f" FULL, DIAGONAL or SKIP. Two lines show where each row's interval begins and ends. Visited: {counts}."
        f" Documents are triangles along the diagonal, each with tiles of its own. The sink is one more column"
        f" beside the keys, seen by every row. In each matrix, row {row} is drawn as a bar with its first and last key."
    )
    return figure, alt


def visited_tiles(parts: list[tuple[int, Tiling]]) -> int:
    """Return the total number of tiles that must be computed for a mask, which may consist of several tilings."""
    counts = [tiling.counts() for _, tiling in parts]
    return sum(n[Tile.FULL] + n[Tile.DIAGONAL] for n in counts)


def _draw_tiles(ax: style.Axes, parts: list[tuple[int, Tiling]]) -> int:
    N = sum(tiling.N_q for _, tiling in parts)
    if len(parts) > 1:
        style.masked_box(ax, 0, 0, N, N, linewidth=0.5)
    for start, tiling in parts:
        causal_tiles.draw_tiles(ax, tiling, start)
        edges = start + np.arange(tiling.N_q + 1)
        for ends in tiling.interval(np.arange(tiling.N_q)):
            look = dict(color=style.INK, linewidth=1.3)
            ax.stairs(start + ends, edges, orientation="horizontal", baseline=None, **look)
    return visited_tiles(parts)


def _draw_row_range(ax: style.Axes, parts: list[tuple[int, Tiling]], row: int) -> None:
    """Draw a bar for the range of keys that row `row` sees, and label its two ends below the matrix."""
    start, tiling = next((s, t) for s, t in parts if s <= row < s + t.N_q)
    begin, end = (int(start + x) for x in tiling.interval(row - start))
    style.box(ax, begin, row, end - begin, 1, "", style.INK, linewidth=0)
    ax.set_xlabel(f"keys → · row {row}: [{begin}, {end})", fontsize=style.SMALL)


def _draw_legend(ax: style.Axes) -> None:
    places, down = ((0, 0, 0), 1.3) if style.is_narrow() else ((0, 1.06, 2.34), 0)
    for n, (kind, meaning) in enumerate(MEANING.items()):
        causal_tiles.draw_tile(ax, places[n], n * down, 0.08, 1, kind)
        style.note(ax, places[n] + 0.11, n * down + 0.5, meaning)
    style.strip_axes(ax, (-0.03, 1 + places[-1]), (-0.3, 1.3 + 2 * down))
