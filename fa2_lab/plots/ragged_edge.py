"""Diagram of how a program's index determines its rows, and why the tile at the end of a tensor needs a mask."""

import numpy as np

from fa2_lab.plots import style


def data(N: int = 10, d: int = 4, B_r: int = 4, i: int = 2) -> dict:
    """Return the rows of program i, the offsets of its tile's elements, and a mask that is True for existing rows."""
    rows = i * B_r + np.arange(B_r)
    return dict(N=N, i=i, rows=rows, offsets=rows[:, None] * d + np.arange(d), exist=rows < N)


@style.picture
def draw(N: int, i: int, rows: np.ndarray, offsets: np.ndarray, exist: np.ndarray) -> style.Drawn:
    """Draw Q in memory with the next head after it, the offsets in the tile, and the tile returned by a masked load.

    `exist` has one entry for each of the program's rows, which is True if Q has that row.
    """
    (B_r, d), beyond = offsets.shape, int((~exist).sum())
    caption = (
        f"Program {i} asks for {B_r} rows, but {beyond} of them belong to the next head, and the mask keeps these out."
    )
    figure, ax = style.new_figure(6 if style.is_narrow() else 4.1, caption)
    addresses = np.arange((rows[-1] + 1) * d).reshape(-1, d)
    for (row, col), n in np.ndenumerate(addresses):
        fill = style.tint(style.hue("Q"), 0.45 if row in rows else 0.2) if row < N else style.PAPER
        style.box(ax, col, row, 1, 1, str(n), fill, linewidth=0.5)
    title = dict(ha="center", va="bottom", weight="bold")
    style.note(ax, 0, -0.3, "Q in memory", **title | dict(ha="left"))
    style.note(ax, 0, len(addresses) + 0.6, "unfilled: the next head's rows", color=style.QUIET)
    for k in range(rows[-1] // B_r + 1):
        style.box(ax, -3.1, k * B_r + 0.1, 1.6, B_r - 0.2, str(k), style.worker_color(3) if k == i else style.PAPER)
    style.note(ax, -2.3, -0.3, "program", **title)
    top = len(addresses) - B_r
    if style.is_narrow():  # stack the two tiles
        places = (d + 2.6, top), (d + 2.6, 1.5)
        arrows = (
            ((d + 0.4, top + B_r / 2), (d + 1.3, top + B_r / 2)),
            ((1.5 * d + 2.6, top - 1.2), (1.5 * d + 2.6, B_r + 1.7)),
        )
    else:
        places = (d + 2.6, top), (2 * d + 5.4, top)
        arrows = tuple(((x, top + B_r / 2), (x + 0.9, top + B_r / 2)) for x in (d + 0.4, 2 * d + 3.4))
    numbers = offsets, np.where(exist[:, None], offsets, -1)
    for (x, y), values, words in zip(places, numbers, ("its offsets", "as loaded"), strict=True):
        _draw_tile(ax, x, y, rows, values, exist)
        style.note(ax, x + d / 2, y - 0.3, words, **title)
    for start, end in arrows:
        style.arrow(ax, start, end)
    words = (
        f"row = {i} · B_r + (0 … {B_r - 1}) = {', '.join(map(str, rows))}\noffset = row · d + (0 … {d - 1})\n"
        f"mask = row < N, with N = {N}\n\nhatched: masked"
    )
    at = (-4, len(addresses) + 1.6) if style.is_narrow() else (d + 2.6, 0)
    style.note(ax, *at, words, va="top")
    bottom = len(addresses) + (6.8 if style.is_narrow() else 1.1)
    style.strip_axes(ax, (-4.1, (2 * d + 3 if style.is_narrow() else 3 * d + 5.6)), (-1.1, bottom), aspect="equal")
    alt = (
        f"Q of one head in memory, {N} rows of {d} numbers, followed by the rows of the next head. Program {i} computes"
        f" rows {rows[0]} to {rows[-1]} and from them the offsets {offsets[0, 0]} to {offsets[-1, -1]}. Rows from"
        f" {N} on belong to the next head. The mask row < N lets {int(exist.sum())} rows through, and {beyond} come"
        " back as zeros."
    )
    return figure, alt


def _draw_tile(ax: style.Axes, x: float, y: float, rows: np.ndarray, values: np.ndarray, exist: np.ndarray) -> None:
    """Draw a tile with one line of boxes for each row of Q. A value of −1 is a masked element, which is shown as 0."""
    for r, numbers in enumerate(values):
        fill = style.tint(style.hue("Q"), 0.45) if exist[r] else style.PAPER
        for c, n in enumerate(numbers):
            if n < 0:
                style.masked_box(ax, x + c, y + r, label="0", linewidth=0.5)
            else:
                style.box(ax, x + c, y + r, 1, 1, str(n), fill, linewidth=0.5)
        style.note(ax, x - 0.2, y + r + 0.5, f"{rows[r]}", ha="right", color=style.QUIET)
