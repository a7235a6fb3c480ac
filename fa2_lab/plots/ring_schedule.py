"""Diagram of attention on several GPUs, showing at each step whose keys a rank holds and which scores it computes."""

from collections.abc import Mapping

from matplotlib.patches import Polygon

from fa2_lab.plots import style
from fa2_lab.reference.shards import visible_tile
from fa2_lab.tiles import Tile


def data(ranks: int = 4, rows: int = 8) -> dict:
    """Return the arguments of draw() for a causal zigzag ring in which each rank has `rows` rows."""
    lengths = [rows] * ranks
    return dict(
        cells=[[visible_cell(lengths, rank, (rank - step) % ranks) for step in range(ranks)] for rank in range(ranks)]
    )


def visible_cell(lengths: list[int], rank: int, source: int) -> dict:
    """Return the rows and columns of the scores that a rank computes with the keys of rank `source`."""
    tile = visible_tile(lengths, rank, source, "zigzag", causal=True)
    rows, cols = ((x.start / lengths[0], x.stop / lengths[0]) for x in (tile.queries, tile.keys))
    return dict(source=source, rows=rows, cols=cols, diagonal=tile.kind is Tile.DIAGONAL)


PITCH = 1.3  # distance from one cell to the next, in cell widths


@style.picture
def draw(cells: list[list[Mapping]]) -> style.Drawn:
    """Show, for each rank and step, whose keys the rank holds and which scores it computes.

    `cells[rank][step]` is dict(source, rows, cols, diagonal). `source` is the rank that owns the keys, and `rows` and
    `cols` are (start, end) as fractions of a shard.
    """
    caption = "In a zigzag ring, queries stay, and K and V travel while each rank computes."
    figure, ax = style.new_figure(
        3.9,
        f"{caption} In each square, the rank's queries run from top to bottom, and the keys that it holds in this step"
        " run from left to right. The number names the rank that owns the keys.",
    )
    ranks, pitch = len(cells), 1.75 * PITCH
    for rank, row in enumerate(cells):
        style.note(ax, -0.25, PITCH * rank + 0.5, f"rank {rank}", ha="right")
        for step, cell in enumerate(row):
            _draw_cell(ax, pitch * step, PITCH * rank, cell)
            if not step:
                continue
            above, corner = (pitch * (step - 1) + 1.05, PITCH * (rank - 1) + 0.5), (pitch * step - 0.4, 0.5)
            end = (pitch * step - 0.05, PITCH * rank + 0.5)
            style.arrow(ax, above if rank else corner, end, style.hue("K"), linewidth=1.2)
            if not rank:
                words = f"from {ranks - 1}" if style.is_narrow() else f"from rank {ranks - 1}"
                style.note(ax, pitch * step - 0.06, 0.22, words, ha="right")
            if rank == ranks - 1:  # the last rank passes K and V on to the first
                side = pitch * (step - 1) + 1.05, PITCH * rank + 0.5
                style.arrow(ax, side, (side[0] + 0.35, side[1]), style.hue("K"), linewidth=1.2)
                style.note(ax, side[0], side[1] + 0.28, "to 0" if style.is_narrow() else "to rank 0")
    for step in range(ranks):
        style.note(ax, pitch * step + 0.5, -0.22, f"step {step}", ha="center")
    foot = PITCH * ranks + 0.1
    _draw_legend(ax, foot, pitch)
    below = 2.2 if style.is_narrow() else 0.8
    style.strip_axes(ax, (-1.0, pitch * (ranks - 1) + 1.1), (-0.45, foot + below), aspect="equal")
    alt = (
        f"{ranks} ranks in {ranks} steps. Each cell is the square of a rank's queries (down) and the keys that are here"
        " (right); what is computed has the number of the keys' owner, and the rest is hatched. At step 0 each rank"
        " has its own keys. Then each block comes from the rank above."
    )
    return figure, alt


def _draw_legend(ax: style.Axes, y: float, pitch: float) -> None:
    """Draw a legend that explains filled areas, hatched areas and arrows."""
    down, across = (0.8, 0) if style.is_narrow() else (0, 3.3)
    meanings = ("scores computed with\nthe keys of rank 2", "masked:\nno work", "K and V move to\nthe next rank")
    for n, meaning in enumerate(meanings):
        x, top = -0.9 + n * across, y + n * down
        if n == 0:
            style.box(ax, x, top, 0.6, 0.6, "2", style.worker_color(2))
        elif n == 1:
            style.masked_box(ax, x, top, 0.6, 0.6)
        else:
            style.arrow(ax, (x, top + 0.05), (x + 0.6, top + 0.55), style.hue("K"), linewidth=1.2)
        style.note(ax, x + 0.75, top + 0.3, meaning.replace("\n", " ") if style.is_narrow() else meaning)


def _draw_cell(ax: style.Axes, x: float, y: float, cell: dict) -> None:
    """Draw the scores of one rank at one step as a square.

    Computed scores have the colour of the rank that owns the keys. All other scores are hatched.
    """
    style.masked_box(ax, x, y)
    (top, bottom), (left, right) = cell["rows"], cell["cols"]
    fill = style.worker_color(cell["source"])
    if cell["diagonal"]:
        corners = [(x, y), (x, y + 1), (x + 1, y + 1)]
        ax.add_patch(Polygon(corners, facecolor=fill, edgecolor=style.INK, linewidth=0.8))
        at = x + 0.3, y + 0.7
    else:
        style.box(ax, x + left, y + top, right - left, bottom - top, fill=fill)
        at = x + (left + right) / 2, y + (top + bottom) / 2
    style.note(ax, *at, f"{cell['source']}", ha="center", color=style.ink_on(fill), fontsize=style.LARGE)
