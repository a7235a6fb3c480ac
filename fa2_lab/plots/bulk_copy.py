"""A bulk copy on its way: a tile that reaches past the end of K, its zeros, its swizzle, and the barrier it meets."""

import numpy as np

from fa2_lab.machine.layouts import CHUNK_BYTES, LINE_BYTES, Shared
from fa2_lab.plots import style


def data(N: int = 10, B_c: int = 4, d: int = 64, itemsize: int = 2) -> dict:
    """Return the last tile of N keys: the rows that exist, the place of each chunk in its line, and the bytes."""
    vec, places = CHUNK_BYTES // itemsize, LINE_BYTES // CHUNK_BYTES
    first = (N - 1) // B_c * B_c
    offsets = Shared(vec, 1, places).offsets((places, d))[:B_c, ::vec]
    found = offsets * itemsize % LINE_BYTES // CHUNK_BYTES
    return dict(N=N, first=first, places=found, bytes=B_c * d * itemsize)


ROW, CHUNK = 0.25, 0.26
PAGE = (1.3, 1.9, 2.9)  # inches: K's width, and where the words and the tile begin
PHONE = (0.8, 1.1, 1.4)


@style.picture
def draw(N: int, first: int, places: np.ndarray, bytes: int) -> style.Drawn:
    """Draw N keys in HBM and a tile. places: for each of the tile's rows, from `first` on, its chunks' places."""
    rows, d = len(places), 8 * places.shape[1]  # a chunk has 8 numbers
    caption = "One thread starts the copy of a tile, TMA executes it, and rows that do not exist arrive as zeros."
    figure, ax = style.new_figure(4.1, caption)
    top = (first + 0.3) * ROW
    WIDE, TEXT, TILE = PHONE if style.narrow() else PAGE
    style.note(ax, 0.06, -0.1, "K in HBM", weight="bold")
    for row in range(N):
        style.tensor_box(ax, 0.06, (row + 0.3) * ROW, WIDE, ROW, "K", f"row {row}", linewidth=0.6)
    style.box(ax, 0, (first + 0.3) * ROW, WIDE + 0.12, rows * ROW, fill="none", linewidth=1.8)
    style.note(ax, 0.06 + WIDE / 2, (N + 0.3 + (first + rows - N) / 2) * ROW, "outside", ha="center")
    style.note(ax, TEXT, -0.1, "What TMA is told", weight="bold")
    names = (f"K's descriptor: address, {N} × {d}, tiles of {rows}", f"row {first}", "the buffer", "the barrier")
    for k, words in enumerate(names):
        style.note(ax, TEXT, 0.2 + 0.27 * k, f"{k + 1}. {words}")
    _tile(ax, TILE, top, N - first, places)
    middle = top + rows * ROW / 2
    style.arrow(ax, (WIDE + 0.14, middle), (TILE - 0.06, middle), linewidth=1.4)
    if not style.narrow():
        style.note(ax, (WIDE + 0.14 + TILE) / 2, middle - 0.12, "TMA", ha="center")
    words = (
        f"barrier: {bytes} bytes\nend its phase"
        if style.narrow()
        else f"barrier: {bytes} bytes expected,\nall there: the phase ends"
    )
    style.box(ax, TILE, top + rows * ROW + 0.15, 8 * CHUNK, 0.5, words)
    style.bare(ax, (-0.03, style.width() - 0.1), (-0.2, top + rows * ROW + 0.7))
    real = N - first
    alt = (
        f"On the left is K in HBM, with {N} rows and a frame around rows {first} to {first + rows - 1}, of which {real}"
        " exist. One thread passes a descriptor, a row, a buffer and a barrier to TMA. On the right is the tile in"
        f" shared memory, with {rows} rows of {places.shape[1]} chunks. Chunk c of row r is at place c XOR r, and the"
        f" last {rows - real} rows are zeros."
        f" The barrier expects {bytes} bytes, and its phase ends when all have arrived."
    )
    return figure, alt


def _tile(ax: style.Axes, TILE: float, top: float, real: int, places: np.ndarray) -> None:
    """Draw the tile in shared memory: each box is 16 bytes with its chunk's number, or zeros."""
    style.note(ax, TILE, top - 0.35, "The tile in shared memory", weight="bold")
    style.note(ax, TILE, top - 0.13, "box: 16 bytes; chunk c at c XOR row")
    for row, line in enumerate(places):
        style.note(ax, TILE + 8 * CHUNK + 0.08, top + (row + 0.5) * ROW, f"line {row}")
        for chunk, place in enumerate(line.tolist()):
            where = (TILE + place * CHUNK, top + row * ROW, CHUNK, ROW)
            if row < real:
                style.tensor_box(ax, *where, "K", str(chunk), linewidth=0.6)
            else:
                style.box(ax, *where, "0", linewidth=0.6)
