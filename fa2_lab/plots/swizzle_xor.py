"""The swizzle as XOR: a chunk's place from its number and its row, bit by bit, and the bank conflicts counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import CHUNK_BYTES, LINE_BYTES, Shared, bank_conflicts
from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


def data(chunk: int = 2, itemsize: int = 2) -> dict:
    """The place of every chunk in lines of eight, rows one after the other and swizzled; what a read of each costs."""
    vec, places = CHUNK_BYTES // itemsize, LINE_BYTES // CHUNK_BYTES
    found, steps = {}, {}
    for name, layout in {"One after the other": Shared(vec, 1, 1), "Swizzled": Shared(vec, 1, places)}.items():
        offsets = layout.offsets((places, places * vec))[:, ::vec]
        found[name] = offsets * itemsize % LINE_BYTES // CHUNK_BYTES
        steps[name] = [bank_conflicts(offsets[:, c], itemsize) for c in range(places)]
    return dict(places=found, steps=steps, chunk=chunk)


# Drawing --------------------------------------------------------------------------------------------------------

FIRST, SECOND = 13.0, 26.4  # where the two grids begin


@style.picture
def draw(places: Mapping[str, np.ndarray], steps: Mapping[str, list[int]], chunk: int) -> tuple[Figure, str]:
    """Left: row XOR chunk = place, in bits. Then both layouts in memory, and the reads of each group of banks.

    places: {layout: place of [row, chunk] in its line}. steps: {layout: steps to read each chunk of all rows}.
    """
    plain, swizzled = places
    title = f"Place = chunk XOR row: {steps[plain][chunk]} reads from one group of banks become one from each"
    figure, ax = style.new_figure(3.9, title)
    rows, across = places[swizzled].shape
    _bits(ax, places[swizzled], chunk)
    for (name, where), x in zip(places.items(), (FIRST, SECOND), strict=True):
        _memory(ax, x, where, chunk)
        n = steps[name][chunk]
        ax.text(x, -1.5, f"{name}: {n} step{'s' if n > 1 else ''}", weight="bold", va="center")
    ax.text(FIRST - 0.35, rows + 1.1, "reads", ha="right", va="center", fontsize=style.SMALL)
    ax.set(xlim=(-0.2, SECOND + 1.4 * across + 0.2), ylim=(rows + 2.4, -2.1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_xlabel(
        "A line is a row of K, 128 bytes; a box is 16 bytes of it, with its chunk's number, in its group of four banks."
        f"\nDark: chunk {chunk} of every row, read together. A group serves one read at a time.",
        fontsize=style.SMALL,
    )
    every = {name: sorted(set(n)) for name, n in steps.items()}
    lines = ", ".join(f"row {r}: place {p}" for r, p in enumerate(places[swizzled][:, chunk]))
    alt = (
        f"Chunk {chunk} of {rows} rows of K. Its place is its number XOR the row, bit by bit: {lines}."
        f" One after the other, all {rows} reads want one group of banks: {_told(every[plain])} for any chunk."
        f" Swizzled, each wants another group: {_told(every[swizzled])} for any chunk."
    )
    return figure, alt


def _told(steps: list[int]) -> str:
    return " or ".join(f"{n} step{'s' if n > 1 else ''}" for n in steps)


def _bits(ax: Axes, where: np.ndarray, chunk: int) -> None:
    """For every row: row XOR chunk = place, with three bits each."""
    ax.text(0, -1.5, "XOR of their bits", weight="bold", va="center")
    columns = dict(row=1.5, chunk=5.3, place=9.1)
    for name, x in columns.items():
        ax.text(x, -0.5, name, ha="center", va="center", fontsize=style.SMALL)
    for row, place in enumerate(where[:, chunk].tolist()):
        y = row + 0.5
        for name, n in dict(row=row, chunk=chunk, place=place).items():
            ax.text(columns[name], y, f"{n} = {n:03b}", ha="center", va="center", gid=f"{name} of {row}")
        ax.text(3.4, y, "⊕", ha="center", va="center")
        ax.text(7.2, y, "→", ha="center", va="center")


def _memory(ax: Axes, x: float, where: np.ndarray, chunk: int) -> None:
    """Every chunk at its place; above, the groups of banks; beneath, how many of the marked reads each has to serve."""
    wide = 1.4
    for place in range(where.shape[1]):
        ax.text(x + wide * (place + 0.5), -0.5, f"{place}", ha="center", va="center", fontsize=style.SMALL)
        reads = int((where[:, chunk] == place).sum())
        full = style.tint(style.hue("K"), reads and 0.4 + 0.6 * (reads > 1))
        style.box(ax, x + wide * place, len(where) + 0.6, wide, 1, str(reads), full, gid=f"reads {place}")
    for (row, c), place in np.ndenumerate(where):
        look = dict(edgecolor=style.PAPER, gid=f"chunk {row} {c}")
        fill = style.tint(style.hue("K"), 1.0 if c == chunk else 0.15)
        style.box(ax, x + wide * place, row, wide, 1, str(c), fill, **look)
