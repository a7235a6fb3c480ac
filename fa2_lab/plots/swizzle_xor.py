"""Diagram of the swizzle as an XOR: each chunk's position is chunk XOR row, which avoids bank conflicts."""

import numpy as np

from fa2_lab.machine.layouts import CHUNK_BYTES, LINE_BYTES, SharedLayout, bank_conflicts
from fa2_lab.plots import style


def data(chunk: int = 2, itemsize: int = 2) -> dict:
    """Return the position of each chunk in its line of eight chunks, for the plain and the swizzled layout.

    Also return {layout: list whose entry c is the number of steps needed to read chunk c of all rows}.
    `chunk` is the chunk that draw() emphasises.
    """
    vec, places = CHUNK_BYTES // itemsize, LINE_BYTES // CHUNK_BYTES
    positions, steps = {}, {}
    for name, layout in {
        "One after the other": SharedLayout(vec, 1, 1),
        "Swizzled": SharedLayout(vec, 1, places),
    }.items():
        offsets = layout.offsets((places, places * vec))[:, ::vec]
        positions[name] = offsets * itemsize % LINE_BYTES // CHUNK_BYTES
        steps[name] = [bank_conflicts(offsets[:, c], itemsize) for c in range(places)]
    return dict(places=positions, steps=steps, chunk=chunk)


FIRST, SECOND = 7.2, 16.2  # the x-coordinates of the two grids


@style.picture
def draw(places: dict, steps: dict, chunk: int) -> style.Drawn:
    """Draw the bits of row XOR chunk = position, then the two layouts in memory, and the reads of each bank group.

    `places` is {layout: array of positions in a line, by row and chunk}. `steps` is {layout: list whose entry c is the
    number of steps needed to read chunk c of all rows}.
    """
    plain, swizzled = places
    caption = (
        f"A swizzle spreads a column over all banks, so reading it takes {steps[swizzled][chunk]} step instead of"
        f" {steps[plain][chunk]}. A line is a row of K with 128 bytes, and a box is 16 bytes of it, with the number of"
        f" its chunk. The swizzle stores each chunk at place chunk XOR row. The framed boxes of chunk {chunk} are read"
        f" together."
    )
    figure, ax = style.new_figure(3.1, caption)
    rows, across = places[swizzled].shape
    _draw_bits(ax, places[swizzled], chunk)
    for (name, layout), x in zip(places.items(), (FIRST, SECOND), strict=True):
        _draw_memory(ax, x, layout, chunk)
        words = name.replace(" the", "\nthe") if style.is_narrow() else name
        style.note(
            ax, x, -1.0, f"{words}:\n{style.count_with_noun(steps[name][chunk], 'step')}", weight="bold", va="bottom"
        )
    style.note(ax, FIRST - 0.3, rows + 1.1, "reads", ha="right")
    style.strip_axes(ax, (-0.1, SECOND + across + 0.1), (-3.6 if style.is_narrow() else -2.7, rows + 1.8))
    step_counts = {name: sorted(set(n)) for name, n in steps.items()}
    lines = ", ".join(f"row {r}: place {p}" for r, p in enumerate(places[swizzled][:, chunk]))
    alt = (
        f"Chunk {chunk} of {rows} rows of K. Its place is its number XOR the row, bit by bit: {lines}. One after the"
        f" other, all {rows} reads use one group of banks: {_format_steps(step_counts[plain])} for any chunk. Swizzled,"
        f" each uses another group: {_format_steps(step_counts[swizzled])} for any chunk."
    )
    return figure, alt


def _format_steps(steps: list[int]) -> str:
    return " or ".join(style.count_with_noun(n, "step") for n in steps)


def _draw_bits(ax: style.Axes, layout: np.ndarray, chunk: int) -> None:
    """Draw the equation row XOR chunk = position for each row, with three bits per number."""
    style.note(ax, 0, -1.0, "XOR", weight="bold", va="bottom")
    columns = dict(row=0.7, chunk=2.9, place=5.1)
    for name, x in columns.items():
        style.note(ax, x, -0.5, "c" if style.is_narrow() and name == "chunk" else name, ha="center")
    for row, place in enumerate(layout[:, chunk].tolist()):
        for name, n in dict(row=row, chunk=chunk, place=place).items():
            style.note(ax, columns[name], row + 0.5, f"{n:03b}", ha="center")
        style.note(ax, 1.8, row + 0.5, "⊕", ha="center")
        style.note(ax, 4.0, row + 0.5, "=", ha="center")


def _draw_memory(ax: style.Axes, x: float, layout: np.ndarray, chunk: int) -> None:
    """Draw each chunk at its position, between the bank groups' names above and their read counts below."""
    for place in range(layout.shape[1]):
        style.note(ax, x + place + 0.5, -0.5, f"{place}", ha="center")
        reads = int((layout[:, chunk] == place).sum())
        full = style.tint(style.hue("K"), reads and 0.4 + 0.6 * (reads > 1))
        style.box(ax, x + place, len(layout) + 0.6, 1, 1, str(reads), full)
    for (row, c), place in np.ndenumerate(layout):
        fill = style.tint(style.hue("K"), 1.0 if c == chunk else 0.15)
        frame = dict(edgecolor=style.INK, linewidth=1.6, zorder=3) if c == chunk else dict(edgecolor=style.PAPER)
        style.box(ax, x + place, row, 1, 1, str(c), fill, **frame)
