"""A bulk copy on its way: a tile that reaches past the end of K, its zeros, its swizzle, and the barrier it meets."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import CHUNK_BYTES, LINE_BYTES, Shared
from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 10, B_c: int = 4, d: int = 64, itemsize: int = 2) -> dict:
    """The last tile of N keys: which of its rows exist, at which place of its line each chunk lies, how many bytes."""
    vec, places = CHUNK_BYTES // itemsize, LINE_BYTES // CHUNK_BYTES
    first = (N - 1) // B_c * B_c
    offsets = Shared(vec, 1, places).offsets((places, d))[:B_c, ::vec]
    found = offsets * itemsize % LINE_BYTES // CHUNK_BYTES
    return dict(N=N, first=first, places=found, bytes=B_c * d * itemsize)


# Drawing --------------------------------------------------------------------------------------------------------

ROW, LEFT, WIDE = 0.26, 0.55, 1.7
TILE, TOP, CHUNK = 4.75, 1.72, 0.3


@style.picture
def draw(N: int, first: int, places: np.ndarray, bytes: int) -> tuple[Figure, str]:
    """N keys in HBM. places: for each row of the tile that begins at `first`, where in its line each chunk lies."""
    figure, ax = style.new_figure(3.7, "One thread starts the copy; rows that do not exist arrive as zeros")
    rows, d = len(places), 8 * places.shape[1]  # a chunk has 8 numbers
    _tensor(ax, N, first, rows)
    _tile(ax, N - first, places)
    end = (LEFT + WIDE + 0.06, (first + 0.3 + rows / 2) * ROW)  # the middle of the frame's right side
    ax.annotate("", (TILE - 0.08, TOP + rows * ROW / 2), end,
                arrowprops=dict(arrowstyle="-|>", color=style.INK, linewidth=1.2))  # fmt: skip
    ax.text(2.45, 0.0, "What the one thread names", weight="bold", va="center")
    for k, words in enumerate((f"the descriptor of K: where, {N} × {d}, tiles of {rows}", f"row {first}",
                               "the place in shared memory", "the barrier")):  # fmt: skip
        ax.text(2.45, 0.27 + 0.23 * k, f"{k + 1}. {words}", va="center")
    below = TOP + rows * ROW + 0.3
    words = f"barrier: {bytes} bytes expected,\nall there: the phase ends"
    style.box(ax, TILE, below, 8 * CHUNK, 0.46, words, gid="barrier")
    ax.set(xlim=(-0.1, 7.3), ylim=(3.65, -0.2), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    real = N - first
    alt = (
        f"Left K in HBM, {N} rows, and a frame around rows {first} to {first + rows - 1}, of which {real} exist. One"
        f" thread names a descriptor, a row, a place and a barrier. Right the tile in shared memory: {rows} rows of"
        f" {places.shape[1]} chunks; chunk c of row r lies at place c XOR r, and the last {rows - real} rows are zeros."
        f" The barrier expects {bytes} bytes, and its phase ends when all have arrived."
    )
    return figure, alt


def _tensor(ax: Axes, N: int, first: int, rows: int) -> None:
    """K in HBM row by row, and the tile's frame, which reaches past the end."""
    ax.text(LEFT, -0.1, "K in HBM", weight="bold", va="center")
    for row in range(N):
        style.tensor_box(ax, LEFT, (row + 0.3) * ROW, WIDE, ROW, "K", f"row {row}", linewidth=0.6, gid=f"row {row}")
    y = (first + 0.3) * ROW
    ax.add_patch(style.Rectangle((LEFT - 0.06, y), WIDE + 0.12, rows * ROW, fill=False, linewidth=1.8, gid="tile"))
    middle = (N + 0.3 + (first + rows - N) / 2) * ROW
    ax.text(LEFT + WIDE / 2, middle, "outside", ha="center", va="center", fontsize=style.SMALL)


def _tile(ax: Axes, real: int, places: np.ndarray) -> None:
    """The tile in shared memory: each box is 16 bytes with its chunk's number, or zeros."""
    ax.text(TILE, TOP - 0.33, "the tile in shared memory", weight="bold", va="center")
    ax.text(TILE, TOP - 0.12, "a box: 16 bytes, chunk c at c XOR row", va="center", fontsize=style.SMALL)
    for row, line in enumerate(places):
        ax.text(TILE - 0.0 + 8 * CHUNK + 0.1, TOP + (row + 0.5) * ROW, f"line {row}", va="center", fontsize=style.SMALL)
        for chunk, place in enumerate(line.tolist()):
            where = (TILE + place * CHUNK, TOP + row * ROW, CHUNK, ROW)
            if row < real:
                style.tensor_box(ax, *where, "K", str(chunk), linewidth=0.6, gid=f"chunk {row} {chunk}")
            else:
                style.box(ax, *where, "0", linewidth=0.6, gid=f"zero {row} {chunk}")
