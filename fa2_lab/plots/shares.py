"""Decode: the tiles of all heads in equal shares, and the parts that come of it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import splits
from fa2_lab.machine.splits import Shares
from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


def data() -> dict:
    """Five heads of 10, 3, 0, 12 and 2 tiles for four programs."""
    return dict(cut=splits.Shares((10, 3, 0, 12, 2), 4))


# Drawing --------------------------------------------------------------------------------------------------------

H = 0.62  # height of a tile


@style.picture
def draw(cut: Shares) -> tuple[Figure, str]:
    """Every head a row of tiles in its program's colour, the parts that must be merged, and the output they make."""
    title = "Equal shares end anywhere; only a head that several programs have read is merged"
    heads, longest = len(cut.tiles), max(cut.tiles)
    figure, ax = style.new_figure(0.75 + 0.62 * heads, title)
    for head, n in enumerate(cut.tiles):
        ax.text(-0.25, head, f"head {head}", ha="right", va="center")
        if not n:
            ax.text(0.1, head, "no keys", ha="left", va="center", color=style.QUIET)
        _tiles(ax, cut, head)
        _parts(ax, cut, head, longest + 1.2)
    ax.text(0, -0.75, "tiles of keys and values →", va="center", color=style.QUIET)
    ax.text(longest + 1.2, -0.75, "parts (o, m, ℓ), by number", va="center", color=style.QUIET)
    ax.set(xlim=(-1.6, longest + 10.4), ylim=(heads - 0.45, -1.1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return figure, _told(cut)


def _tiles(ax: Axes, cut: Shares, head: int) -> None:
    """The tiles of a head; the program's number on each."""
    for w in cut.readers(head):
        for h, first, last in cut.spans(w):
            for tile in range(first, last) if h == head else ():
                style.box(ax, tile, head - H / 2, 1, H, f"{w}", style.worker(w), linewidth=0.5)


def _parts(ax: Axes, cut: Shares, head: int, x: float) -> None:
    """What is merged, and what comes of it."""
    readers = cut.readers(head)
    if len(readers) > 1:
        for k, w in enumerate(readers):
            style.box(
                ax, x + 1.5 * k, head - H / 2, 1.4, H, f"part {cut.part(w, head)}", style.worker(w), linewidth=0.5
            )
        ax.annotate(
            "merge",
            (x + 7.1, head),
            (x + 1.5 * len(readers) + 0.1, head),
            ha="left",
            va="center",
            arrowprops=dict(arrowstyle="->", color=style.INK),
        )
    else:
        ax.text(x, head, f"program {readers[0]} finishes it", va="center", color=style.QUIET)
    style.tensor_box(ax, x + 7.2, head - H / 2, 1.9, H, "O", f"O, L of {head}")


def _told(cut: Shares) -> str:
    lines = []
    for head, n in enumerate(cut.tiles):
        readers = cut.readers(head)
        parts = ", ".join(str(cut.part(w, head)) for w in readers)
        end = f"merged from parts {parts}" if len(readers) > 1 else f"finished by program {readers[0]}"
        lines.append(f"head {head}: {n} tiles, {end}")
    return (
        f"{len(cut.tiles)} heads of unequal length as rows of tiles, shared out among {cut.busy} programs,"
        f" {cut.share} units of work each: one to begin a head, one for each tile. Colour and number say who"
        f" reads a tile. {'; '.join(lines)}."
    )
