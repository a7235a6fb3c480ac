"""Diagram of how a program computes the addresses of its block of Q from its two program indices."""

import numpy as np

from fa2_lab.plots import style


def data(N: int = 6, heads: int = 3, d: int = 4, B_r: int = 2, program: tuple[int, int] = (1, 2)) -> dict:
    """Return the size of the grid, the chosen program, and the memory offsets of that program's block of Q.

    `program` is (row block, head).
    """
    i, head = program
    rows = head * N + i * B_r + np.arange(B_r)
    return dict(grid=(N // B_r, heads), program=program, N=N, B_r=B_r, offsets=rows[:, None] * d + np.arange(d))


@style.picture
def draw(grid: tuple[int, int], program: tuple[int, int], N: int, B_r: int, offsets: np.ndarray) -> style.Drawn:
    """Draw the grid of programs, how one of them computes its addresses, and that program's block of Q in memory."""
    (T_r, heads), (i, head), d = grid, program, offsets.shape[1]
    caption = "From its two numbers, a row block and a head, a program computes its addresses."
    figure, ax = style.new_figure(5.2 if style.is_narrow() else 3.3, caption)
    title = dict(weight="bold", va="bottom")
    style.note(ax, 0, -0.3, "programs" if style.is_narrow() else "the grid of programs", **title)
    for (k, h), _ in np.ndenumerate(np.empty(grid)):
        chosen = dict(fill=style.worker_color(3), linewidth=2) if (k, h) == program else dict(fill=style.PAPER)
        style.box(ax, 2 * h, 1.4 * k, 1.9, 1.3, f"{k}, {h}", **chosen)
    style.note(ax, 0, 1.4 * T_r + 0.5, "row block, head")
    words = (
        f"B_r = {B_r}, N = {N}, d = {d}\ni = program_id(0) = {i}\nhead = program_id(1) = {head}\n"
        f"row = i · B_r + (0 … {B_r - 1})\naddress = Q + (head · N + row) · d + (0 … {d - 1})"
    )
    left, high = 8.2 if style.is_narrow() else 9.4, 0.62
    first, bottom = offsets[0, 0] // d * high, heads * N * high
    block = (left, first + B_r * high / 2)
    below = bottom + 4.5 if style.is_narrow() else first  # y-coordinate of the last line of text
    style.note(ax, 0, below, words, va="bottom", linespacing=1.4)
    style.note(ax, 0, below + 0.62, f"= Q + {offsets[0, 0]} … {offsets[-1, -1]}", weight="bold")
    style.note(ax, left, -0.3, "Q's offsets" if style.is_narrow() else "Q in memory, by offsets", **title)
    for row in range(heads * N):
        for c in range(d):
            n = row * d + c
            own_element = n in offsets
            fill = style.tint(style.hue("Q"), 0.45) if own_element else style.tint(style.hue("Q"), 0.12)
            style.box(ax, left + 1.5 * c, high * row, 1.5, high, str(n), fill, linewidth=0.5)
    for h in range(heads):
        style.box(ax, left, h * N * high, 1.5 * d, N * high, fill="none", linewidth=1.6)
        style.note(ax, left + 1.5 * d + 0.2, (h + 0.5) * N * high, f"head {h}")
    style.box(ax, left, first, 1.5 * d, B_r * high, fill="none", linewidth=2.4)
    start = (2 * head + 1.9, 1.4 * i + 0.65) if style.is_narrow() else (2.8, below + 0.62)
    style.arrow(ax, start, block, linewidth=1.6)
    style.strip_axes(ax, (-0.1, left + 1.5 * d + 1.5), (-1.2, max(bottom, below + 1) + 0.1))
    alt = (
        f"A grid of {T_r} row blocks by {heads} heads. Program ({i}, {head}) is framed. On the right is Q of all heads,"
        f" {heads * N} rows of {d} numbers. The block has offsets {offsets[0, 0]} to {offsets[-1, -1]}."
    )
    return figure, alt
