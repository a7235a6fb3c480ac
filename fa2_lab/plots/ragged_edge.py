"""From a program's number to its rows, their addresses, and a masked tile where the tensor ends."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 10, d: int = 4, B_r: int = 4, i: int = 2) -> dict:
    """What program i computes: its rows, the offsets of its tile's elements, and which of them exist."""
    rows = i * B_r + np.arange(B_r)
    return dict(N=N, i=i, rows=rows, offsets=rows[:, None] * d + np.arange(d), exist=rows < N)


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(N: int, i: int, rows: np.ndarray, offsets: np.ndarray, exist: np.ndarray) -> tuple[Figure, str]:
    """Q in memory, with the next head behind it; the tile's offsets; the tile as loaded under its mask."""
    (B_r, d), beyond = offsets.shape, int((~exist).sum())
    figure, ax = style.new_figure(4.3, f"Program {i} asks for {B_r} rows; {beyond} of them belong to somebody else")
    every = np.arange((rows[-1] + 1) * d).reshape(-1, d)
    for row, numbers in enumerate(every):
        mine = row in rows
        for col, n in enumerate(numbers):
            fill = style.tint(style.hue("Q"), 0.6 if mine else 0.2) if row < N else style.PAPER
            style.box(ax, col, row, 1, 1, str(n), fill, gid=f"memory {n}", linewidth=0.5)
    ax.text(d / 2, -0.35, "Q in memory", ha="center", va="bottom", weight="bold")
    ax.text(d / 2, len(every) + 0.25, "white: the next head's rows", ha="center", va="top", color=style.QUIET)
    for k in range(rows[-1] // B_r + 1):
        here = k == i
        style.box(
            ax, -2.2, k * B_r + 0.1, 1.6, B_r - 0.2, str(k), style.worker(3) if here else style.PAPER, linewidth=0.8
        )
    ax.text(-1.4, -0.35, "program", ha="center", va="bottom", weight="bold")
    top = (len(every) - B_r) / 2
    _tile(ax, d + 2.6, top, rows, offsets, exist, "offsets of its tile")
    _tile(ax, 2 * d + 6.0, top, rows, np.where(exist[:, None], offsets, -1), exist, "what the load returns")
    for x in (d + 0.4, 2 * d + 4.2):
        ax.annotate("", (x + 0.9, top + B_r / 2), (x, top + B_r / 2), arrowprops=dict(arrowstyle="->", color=style.INK))
    words = (
        f"row = {i} · B_r + (0 … {B_r - 1}) = {', '.join(map(str, rows))}\noffset = row · d + (0 … {d - 1})\n"
        f"mask = row < N, with N = {N}"
    )
    ax.text(d + 2.6, top + B_r + 0.8, words, va="top", fontsize=style.SMALL)
    ax.text(2 * d + 6.0 + d / 2, top + B_r + 0.8, "hatched: masked", va="top", ha="center", color=style.QUIET)
    ax.set(xlim=(-2.4, 3 * d + 6.3), ylim=(len(every) + 1.1, -1.1), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    alt = (
        f"Q of one head in memory, {N} rows of {d} numbers, and behind it the next head's rows. Program {i} computes"
        f" rows {rows[0]} to {rows[-1]} and from them the offsets {offsets[0, 0]} to {offsets[-1, -1]}. Rows from"
        f" {N} on lie in the next head: the mask row < N lets {int(exist.sum())} rows through, and {beyond} come"
        " back as zeros."
    )
    return figure, alt


def _tile(ax: Axes, x: float, y: float, rows: np.ndarray, values: np.ndarray, exist: np.ndarray, title: str) -> None:
    """A tile, a row for each row of Q; −1 stands for a zero that was not loaded."""
    for r, numbers in enumerate(values):
        paint = style.tint(style.hue("Q"), 0.6) if exist[r] else style.PAPER
        for c, n in enumerate(numbers):
            look = dict(fill=style.MASKED, hatch=style.MASK_HATCH) if n < 0 else dict(fill=paint)
            style.box(ax, x + c, y + r, 1, 1, str(max(n, 0)), gid=f"{title} {r} {c}", linewidth=0.5, **look)
        ax.text(x - 0.2, y + r + 0.5, f"{rows[r]}", ha="right", va="center", color=style.QUIET, fontsize=style.SMALL)
    ax.text(x + values.shape[1] / 2, y - 0.35, title, ha="center", va="bottom", weight="bold")
