"""A picture of what a matmul of a Hopper warpgroup reads and where its result is stored, for Q Kᵀ and P V of a tile."""

from fa2_lab.machine.layouts import Mma
from fa2_lab.plots import style

DEEP = 16  # of the dimension that is summed, in one instruction, for numbers of 16 bits
SHARED, REGISTERS = "shared memory", "registers"


def data(d: int = 128, B_c: int = 128) -> dict:
    """Return the two matmuls of a tile: the shape and the memory of each matrix, and the warp that owns each row."""
    warps = Mma(3, (4, 1), (16, B_c)).owners((64, B_c)).warp[:, 0].tolist()
    products = [
        [("Q", "q", (64, d), SHARED), ("K", "kᵀ", (d, B_c), SHARED), ("S", "s", (64, B_c), REGISTERS)],
        [("P", "p", (64, B_c), REGISTERS), ("V", "v", (B_c, d), SHARED), ("O", "o", (64, d), REGISTERS)],
    ]
    return dict(products=products, deep=DEEP, warps=warps)


PAGE = (1 / 100, (0.05, 2.05, 4.3), 0.36)  # inches: an element, where each matrix begins, the sign before it
PHONE = (1 / 112, (0.03, 1.47, 2.9), 0.15)
HIGH = 1.95


@style.picture
def draw(products: list[list[tuple]], deep: int, warps: list[int]) -> style.Drawn:
    """Draw the matmuls in `products`. Each is a list of its left operand, its right operand and its result.

    A matrix is (tensor, name, shape, memory). One instruction has a depth of `deep`, and `warps` contains the warp of
    each row.
    """
    caption = (
        "In both matmuls of a tile, the right operand comes from shared memory, and the result stays in registers."
    )
    caption += f" A frame marks what one wgmma instruction reads, with {len(warps)} rows and a depth of {deep}."
    figure, ax = style.new_figure(4.1, caption)
    lines = []
    for k, (left, right, result) in enumerate(products):
        _product(ax, k * HIGH, (left, right, result), deep, warps)
        (_, a, shape, place), (_, b, _, _), (_, c, _, _) = left, right, result
        lines.append(f"{c} = {a} {b} has {a} in {place} and takes {shape[1] // deep} instructions")
    foot, times = 2 * HIGH - 0.1, products[0][0][2][1] // deep
    style.box(ax, 0.05, foot - 0.08, 0.16, 0.16, fill="none", linewidth=1.8)
    style.note(ax, 0.3, foot, f"what one of a matmul's {times} instructions reads")
    style.bare(ax, (0, style.width() - 0.1), (-0.25, foot + 0.15), aspect="equal")
    alt = (
        f"Two matmuls of a warpgroup, drawn as left operand times right operand = result. {', and '.join(lines)}. The"
        f" right operand is in shared memory both times, and the result is in registers, with {warps.count(0)} rows in"
        f" each of {len(set(warps))} warps. A frame marks the operands of one wgmma instruction, {deep} columns of"
        f" the left operand and {deep} rows of the right one."
    )
    return figure, alt


def _product(ax: style.Axes, top: float, matrices: list[tuple], deep: int, warps: list[int]) -> None:
    """Draw left operand × right operand = result, side by side, each with its memory below it."""
    SIZE, LEFTS, before = PHONE if style.narrow() else PAGE
    middle = top + matrices[1][2][0] * SIZE / 2
    for n, ((tensor, name, shape, place), x) in enumerate(zip(matrices, LEFTS, strict=True)):
        rows, cols = (SIZE * length for length in shape)
        y = middle - rows / 2
        if place == SHARED:
            style.tensor_box(ax, x, y, cols, rows, tensor)
        else:  # in registers: a strip of rows for each warp
            each = rows / len(set(warps))
            for w in sorted(set(warps)):
                style.tensor_box(ax, x, y + w * each, cols, each, tensor, f"warp {w}", linewidth=0.8)
        if n < 2:
            wide, high = (deep * SIZE, rows) if n == 0 else (cols, deep * SIZE)
            style.box(ax, x, y, wide, high, fill="none", linewidth=1.8)
        style.note(ax, x, y - 0.11, f"{name}  {shape[0]} × {shape[1]}", weight="bold")
        style.note(ax, x, y + rows + 0.11, f"in {place}")
    for sign, x in zip("×=", LEFTS[1:], strict=True):
        style.note(ax, x - before, middle, sign, ha="center", fontsize=style.LARGE)
