"""Diagram of decode: the tiles of all heads are divided into equal shares, which yield partial results."""

from fa2_lab.machine import splits
from fa2_lab.machine.splits import Shares
from fa2_lab.plots import style


def data() -> dict:
    """Return the equal shares of four programs that read five heads, which have 10, 3, 0, 12 and 2 tiles."""
    return dict(shares=splits.Shares((10, 3, 0, 12, 2), 4))


TILE_HEIGHT = 0.62


@style.picture
def draw(shares: Shares) -> style.Drawn:
    """Draw each head as a row of tiles, each in the colour of the program that reads it."""
    caption = "Every program gets an equal share of all tiles, and only a head that several programs have read is"
    heads, longest = len(shares.tiles), max(shares.tiles)
    figure, ax = style.new_figure(0.4 + 0.42 * heads, f"{caption} merged. The number on a tile names its program.")
    parts = longest + 1.2
    for head, n in enumerate(shares.tiles):
        style.note(ax, -0.25, head, f"head {head}", ha="right")
        if not n:
            style.note(ax, 0.1, head, "no keys", color=style.QUIET)
        for w in shares.readers(head):
            for h, begin, end in shares.spans(w):
                for tile in range(begin, end) if h == head else ():
                    style.box(
                        ax, tile, head - TILE_HEIGHT / 2, 1, TILE_HEIGHT, f"{w}", style.worker_color(w), linewidth=0.5
                    )
        _draw_partial_results(ax, shares, head, parts)
    style.note(ax, 0, -0.75, "tiles of keys and values →", color=style.QUIET)
    style.note(ax, parts, -0.75, "partial (o, m, ℓ)", color=style.QUIET)
    style.strip_axes(ax, (-2.2, parts + 8.4), (-1.1, heads - 0.5))
    alt = (
        f"{heads} heads of unequal length as rows of tiles, shared out among {shares.busy_programs} programs,"
        f" {shares.share} units of work each. Beginning a head is one unit, and so is each tile. The number names the"
        " program that reads a tile. Heads that several programs read are merged from partial results."
    )
    return figure, alt


def _draw_partial_results(ax: style.Axes, shares: Shares, head: int, x: float) -> None:
    """Draw a head's partial results and their merge, or name the program if a single program reads the head."""
    readers = shares.readers(head)
    if len(readers) > 1:
        for k, w in enumerate(readers):
            style.box(
                ax, x + 1.1 * k, head - TILE_HEIGHT / 2, 1, TILE_HEIGHT, f"{w}", style.worker_color(w), linewidth=0.5
            )
        start = x + 1.1 * len(readers)
        style.arrow(ax, (start, head), (x + 6.4, head))
        style.note(ax, (start + x + 6.3) / 2, head - 0.28, "merge", ha="center")
    else:
        style.note(ax, x, head, f"program {readers[0]}", color=style.QUIET)
    style.tensor_box(ax, x + 6.5, head - TILE_HEIGHT / 2, 1.7, TILE_HEIGHT, "O", "O, L")
