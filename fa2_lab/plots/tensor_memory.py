"""Diagram of where S, P and O are stored: in registers on Hopper, and in tensor memory on Blackwell."""

from fa2_lab.plots import style

KiB = 1024


def data(B: int = 128, d: int = 128, lanes: int = 128, columns: int = 512) -> dict:
    """Return the KiB of registers that each tensor takes for 64 rows (Hopper), and its columns of tensor memory."""
    registers = {"S": 64 * B * 4 // KiB, "P": 64 * B * 2 // KiB, "O": 64 * d * 4 // KiB}
    words = {"S 0": B, "S 1": B, "O 0": d, "O 1": d}  # number of 4-byte columns; a lane holds one row of a row block
    return dict(registers=registers, words=words, columns=columns, room=lanes * columns * 4 // KiB, B=B)


@style.picture
def draw(registers: dict[str, int], words: dict[str, int], columns: int, room: int, B: int) -> style.Drawn:
    """Draw a Hopper SM and a Blackwell SM, from shared memory at the top to the exponential units at the bottom.

    `registers` is {tensor: KiB of registers on Hopper}, and `words` is {tensor: columns of tensor memory on Blackwell}.
    Tensor memory has `columns` columns, which hold `room` KiB. A row block has B rows.
    """
    caption = (
        "Hopper keeps S and O in registers, and Blackwell has a tensor memory for them. On Hopper, a consumer keeps"
        f" 64 rows of S, P and O in its registers. On Blackwell, two row blocks of {B} fill the tensor memory of an SM:"
        f" {' + '.join(str(n) for n in words.values())} = {columns} columns, {room} KiB. P overwrites S."
    )
    figure, axes = style.new_stacked_figure(2.7, caption, ncols=2)
    hopper, blackwell = axes[0]
    _draw_hopper(hopper, registers)
    _draw_blackwell(blackwell, words, room)
    sizes = ", ".join(f"{name} {n} KiB" for name, n in registers.items())
    alt = (
        "Two drawings. On Hopper, shared memory with Q, K and V feeds the tensor cores, and these leave S and O in"
        f" the registers of a consumer ({sizes}), which takes the exponentials there. On Blackwell, the tensor cores"
        f" leave S and O in tensor memory, which {', '.join(words)} fill. Warps load S from there into registers, take"
        " the exponentials, and store P back."
    )
    return figure, alt


def _draw_operands(ax: style.Axes, top: float = 0) -> None:
    """Draw shared memory with its tiles, and the tensor cores below it."""
    style.box(ax, 0, top, 10, 2.1, edgecolor=style.QUIET)
    style.note(ax, 0.3, top + 0.5, "shared memory")
    for n, tensor in enumerate("QKV"):
        style.tensor_box(ax, 0.3 + 3.2 * n, top + 0.95, 3, 0.95, tensor, tensor)
    style.arrow(ax, (5, top + 2.1), (5, top + 2.8))
    style.box(ax, 2, top + 2.8, 6, 0.95, "tensor cores", style.tint(style.INK, 0.12))
    style.arrow(ax, (5, top + 3.75), (5, top + 4.45))


def _draw_hopper(ax: style.Axes, registers: dict[str, int]) -> None:
    _draw_operands(ax)
    style.box(ax, 0, 4.45, 10, 5.35, edgecolor=style.INK, linewidth=1.8)
    style.note(ax, 0.3, 4.95, "registers of a consumer, 64 rows", weight="bold")
    for n, (tensor, size) in enumerate(registers.items()):
        style.tensor_box(ax, 0.3 + 3.2 * n, 5.4, 3, 0.95, tensor, f"{tensor}, {size} KiB")
    style.note(ax, 5, 8.1, "S → maximum, $2^x$ → P", ha="center")
    style.strip_axes(ax, (-0.2, 10.2), (-0.2, 10.2), title="Hopper, an SM")


def _draw_blackwell(ax: style.Axes, words: dict[str, int], room: int) -> None:
    _draw_operands(ax)
    style.box(ax, 0, 4.45, 10, 2.4, edgecolor=style.INK, linewidth=1.8)
    style.note(ax, 0.3, 4.95, f"tensor memory, {room} KiB", weight="bold")
    x, wide = 0.3, 9.4 / sum(words.values())
    for name, n in words.items():
        style.tensor_box(ax, x, 5.4, wide * n, 1.2, name[0], name)
        x += wide * n
    style.arrow(ax, (2.6, 6.85), (2.6, 7.6))
    style.arrow(ax, (7.4, 7.6), (7.4, 6.85))
    style.note(ax, 2.9, 7.2, "S")
    style.note(ax, 7.1, 7.2, "P", ha="right")
    style.box(ax, 0, 7.6, 10, 2.2, edgecolor=style.QUIET)
    style.note(ax, 0.3, 8.1, "registers, one row per thread")
    style.note(ax, 5, 9.1, "S → maximum, $2^x$ → P", ha="center")
    style.strip_axes(ax, (-0.2, 10.2), (-0.2, 10.2), title="Blackwell, an SM")
