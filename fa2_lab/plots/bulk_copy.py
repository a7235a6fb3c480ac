"""Diagram of a TMA copy: one thread starts the copy, TMA carries it out, and rows past the end of K arrive as zeros."""

from fa2_lab.plots import style


def data(N: int = 10, B_c: int = 4) -> dict:
    """Return the arguments of draw(): the length N, the index of the last tile's first row, and the rows per tile."""
    return dict(N=N, first=(N - 1) // B_c * B_c, rows=B_c)


ROW = 0.32
# In data units: (the width of K and of the tile, (left edge, width) of the thread, left edge of the tile).
PAGE = (1.4, (2.15, 1.2), 4.1)
PHONE = (0.95, (1.4, 1.05), 2.95)


@style.picture
def draw(N: int, first: int, rows: int) -> style.Drawn:
    """Draw N keys in HBM, one thread, the TMA unit, and a tile of `rows` rows that begins at row `first`."""
    caption = "One thread orders the copy of a tile, TMA makes it, and missing rows become zeros."
    figure, ax = style.new_figure(2.75, caption)
    wide, (middle, across), tile = PHONE if style.is_narrow() else PAGE
    style.note(ax, 0.06, -0.2, "K in HBM", weight="bold")
    listed = ["row 0", "⋮", f"row {first - 1}"] + [f"row {row}" for row in range(first, N)]
    for y, name in enumerate(listed):
        style.tensor_box(ax, 0.06, y * ROW, wide, ROW, "K", name, linewidth=0.6)
    top, real = (len(listed) - (N - first)) * ROW, N - first
    style.box(ax, 0, top, wide + 0.12, rows * ROW, fill="none", linewidth=1.8)
    style.note(ax, 0.06 + wide / 2, top + (real + rows) / 2 * ROW, "no such rows", ha="center")
    at = top + rows * ROW / 2
    centre = middle + across / 2
    style.box(ax, middle, 0, across, 0.62, "one thread", style.tint(style.INK, 0.12))
    style.arrow(ax, (centre, 0.62), (centre, at - 0.25), linewidth=1.4)
    order = f"orders\nrows {first} to {first + rows - 1}"
    style.note(ax, centre + 0.08, (0.62 + at - 0.25) / 2, order)
    style.box(ax, middle, at - 0.25, across, 0.5, "TMA", style.tint(style.INK, 0.12))
    style.arrow(ax, (wide + 0.14, at), (middle - 0.02, at), linewidth=1.4)
    style.arrow(ax, (middle + across + 0.02, at), (tile - 0.06, at), linewidth=1.4)
    style.note(ax, tile, top - 0.28, "the tile in\nshared memory", weight="bold")
    for row in range(rows):
        rectangle = (tile, top + row * ROW, wide, ROW)
        if row < real:
            style.tensor_box(ax, *rectangle, "K", f"row {first + row}", linewidth=0.6)
        else:
            style.box(ax, *rectangle, "0  0  …  0", linewidth=0.6)
    style.strip_axes(ax, (-0.03, style.width_in_units() - 0.1), (-0.3, top + rows * ROW + 0.05))
    alt = (
        f"On the left is K in HBM, with {N} rows and a frame around rows {first} to {first + rows - 1}, of which {real}"
        " exist. One thread orders these rows, and TMA copies them. On the right is the tile in shared memory. It has"
        f" {rows} rows, and the last {rows - real} are zeros."
    )
    return figure, alt
