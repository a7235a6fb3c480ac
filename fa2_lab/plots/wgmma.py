"""Diagram of where the operands and results of a tile's two matmuls, Q Kᵀ and P V, are stored on Hopper."""

from fa2_lab.machine.layouts import MmaLayout
from fa2_lab.plots import style

DEPTH = 16  # number of elements that one instruction sums over, for 16-bit operands
SHARED, REGISTERS = "shared memory", "registers"


def data(d: int = 128, B_c: int = 128) -> dict:
    """Return a tile's two matmuls, with the shape and location of each matrix and the warp that owns each row."""
    warps = MmaLayout(3, (4, 1), (16, B_c)).owners((64, B_c)).warp[:, 0].tolist()
    products = [
        [("Q", "q", (64, d), SHARED), ("K", "kᵀ", (d, B_c), SHARED), ("S", "s", (64, B_c), REGISTERS)],
        [("P", "p", (64, B_c), REGISTERS), ("V", "v", (B_c, d), SHARED), ("O", "o", (64, d), REGISTERS)],
    ]
    return dict(products=products, deep=DEPTH, warps=warps)


# (width of one element, margin around a matrix, gap for the × or = sign), on a page and on a phone, in data units.
PAGE, PHONE = (1 / 100, 0.18, 0.3), (1 / 118, 0.075, 0.16)
# The distance to the second matmul, the space above the right operand (on a page and on a phone), and the space below
# it.
DOWN, ABOVE, BELOW = 1.95, (0.52, 0.86), 0.12


@style.picture
def draw(products: list[list[tuple]], deep: int, warps: list[int]) -> style.Drawn:
    """Draw the matmuls in `products`, each of which lists its left operand, right operand and result.

    A matrix is (tensor, name, shape, memory). One instruction sums over `deep` elements. `warps` lists the warp that
    owns each row.
    """
    caption = (
        "In both matmuls of a tile, the right operand comes from shared memory, and the result stays in registers."
    )
    caption += f" A frame marks what one wgmma instruction reads, with {len(warps)} rows and a depth of {deep}."
    figure, ax = style.new_figure(4.4, caption)
    size, around, between = PHONE if style.is_narrow() else PAGE
    above = ABOVE[style.is_narrow()]
    each = products[0][1][2][1] * size + 2 * around  # the width of a column of matrices
    high, lines = products[0][1][2][0] * size, []
    for n in range(3):
        x, places = n * (each + between), [product[n][3] for product in products]
        for k, place in enumerate(places if places[0] != places[1] else places[:1]):
            tall = high + (0 if places[0] != places[1] else DOWN)
            ground = style.tint(style.INK, 0.09) if place == SHARED else style.PAPER
            style.box(ax, x, k * DOWN - above, each, tall + above + BELOW, fill=ground, edgecolor=style.QUIET)
            words = place if places[0] != places[1] else f"always {place}"
            words = words.replace(" ", "\n") if style.is_narrow() else words
            style.note(ax, x + each / 2, k * DOWN - above + 0.08, words, ha="center", va="top", weight="bold")
    for k, product in enumerate(products):
        for n, matrix in enumerate(product):
            _draw_matrix(ax, n * (each + between) + around, k * DOWN + high / 2, size, matrix, n, deep)
        for n, sign in enumerate("×="):
            x = (n + 1) * (each + between) - between / 2
            style.note(ax, x, k * DOWN + high / 2, sign, ha="center", fontsize=style.LARGE)
        (_, a, shape, place), (_, b, _, _), (_, c, _, _) = product
        lines.append(f"{c} = {a} {b} has {a} in {place} and takes {shape[1] // deep} instructions")
    foot, times = DOWN + high + 0.36, products[0][0][2][1] // deep
    style.box(ax, 0, foot - 0.08, 0.16, 0.16, fill="none", linewidth=2.4)
    style.note(ax, 0.25, foot, f"what one of a matmul's {times} instructions reads")
    style.strip_axes(ax, (-0.02, 3 * each + 2 * between + 0.02), (-above - 0.02, foot + 0.15), aspect="equal")
    alt = (
        f"Two matmuls of a warpgroup, drawn as left operand times right operand = result. {', and '.join(lines)}. The"
        f" right operand is in shared memory both times, and the result is in registers, with {warps.count(0)} rows in"
        f" each of {len(set(warps))} warps. A frame marks the operands of one wgmma instruction, {deep} columns of"
        f" the left operand and {deep} rows of the right one."
    )
    return figure, alt


def _draw_matrix(ax: style.Axes, x: float, middle: float, size: float, matrix: tuple, n: int, deep: int) -> None:
    """Draw a matmul's n-th matrix and its name. A matrix in registers is drawn as four strips of rows, one per warp."""
    tensor, name, shape, place = matrix
    rows, cols = (size * length for length in shape)
    y = middle - rows / 2
    if place == SHARED:
        style.tensor_box(ax, x, y, cols, rows, tensor)
    else:
        for w in range(4):
            words = "" if style.is_narrow() else f"warp {w}"
            style.tensor_box(ax, x, y + w * rows / 4, cols, rows / 4, tensor, words, linewidth=0.8)
    if place != SHARED and style.is_narrow():
        style.note(ax, x, y + rows + 0.11, "in 4 warps")
    if n < 2:
        wide, high = (deep * size, rows) if n == 0 else (cols, deep * size)
        style.box(ax, x, y, wide, high, fill="none", linewidth=2.4, zorder=3)
    style.note(ax, x, y - 0.12, f"{name}  {shape[0]} × {shape[1]}")
