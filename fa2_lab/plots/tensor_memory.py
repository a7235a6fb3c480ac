"""Where S, P and O are on Hopper and on Blackwell, in registers or in tensor memory; and one product of two SMs."""

from fa2_lab.plots import style

KiB = 1024


def data(B: int = 128, d: int = 128, lanes: int = 128, columns: int = 512) -> dict:
    """Return KiB of registers for a Hopper consumer's 64 rows, and columns of a Blackwell SM's tensor memory."""
    registers = {"S": 64 * B * 4 // KiB, "P": 64 * B * 2 // KiB, "O": 64 * d * 4 // KiB}
    words = {"S 0": B, "S 1": B, "O 0": d, "O 1": d}  # of 4 bytes, in each of as many lanes as a row block has rows
    return dict(registers=registers, words=words, columns=columns, room=lanes * columns * 4 // KiB, B=B)


@style.picture
def draw(registers: dict[str, int], words: dict[str, int], columns: int, room: int, B: int) -> style.Drawn:
    """Draw an SM of each kind from shared memory down to the exponentials, and the product that two SMs share."""
    caption = (
        "Blackwell keeps S and O in tensor memory, and two SMs can share a product. On Hopper, a consumer keeps"
        f" 64 rows of S, P and O in its registers. On Blackwell, two row blocks of {B} fill the tensor memory of an SM:"
        f" {' + '.join(str(n) for n in words.values())} = {columns} columns, {room} KiB. P overwrites S. In a pair,"
        " each SM copies its own rows of Q and half of the keys, and reads the other half from its partner."
    )
    figure, axes = style.stacked(2.7, caption, ncols=3)
    hopper, blackwell, pair = axes[0]
    _hopper(hopper, registers)
    _blackwell(blackwell, words, room)
    _pair(pair, B)
    sizes = ", ".join(f"{name} {n} KiB" for name, n in registers.items())
    alt = (
        "Three drawings. On Hopper, shared memory with Q, K and V feeds the tensor cores, and these leave S and O in"
        f" the registers of a consumer ({sizes}), which takes the exponentials there. On Blackwell, the tensor cores"
        f" leave S and O in tensor memory, which {', '.join(words)} fill. Warps load S from there into registers, take"
        " the exponentials, and store P back. In a pair of SMs, the upper rows of S belong to SM 0 and the lower rows"
        " to SM 1, and each of the two SMs holds half of the keys."
    )
    return figure, alt


def _operands(ax: style.Axes, top: float = 0) -> None:
    """Draw shared memory with its tiles, and the tensor cores below it."""
    style.box(ax, 0, top, 10, 2.1, edgecolor=style.QUIET)
    style.note(ax, 0.3, top + 0.5, "shared memory")
    for n, tensor in enumerate("QKV"):
        style.tensor_box(ax, 0.3 + 3.2 * n, top + 0.95, 3, 0.95, tensor, tensor)
    style.arrow(ax, (5, top + 2.1), (5, top + 2.8))
    style.box(ax, 2, top + 2.8, 6, 0.95, "tensor cores", style.tint(style.INK, 0.12))
    style.arrow(ax, (5, top + 3.75), (5, top + 4.45))


def _hopper(ax: style.Axes, registers: dict[str, int]) -> None:
    _operands(ax)
    style.box(ax, 0, 4.45, 10, 3.3, edgecolor=style.QUIET)
    style.note(ax, 0.3, 4.95, "registers of a consumer, 64 rows")
    for n, (tensor, size) in enumerate(registers.items()):
        style.tensor_box(ax, 0.3 + 3.2 * n, 5.4, 3, 0.95, tensor, f"{tensor}, {size} KiB")
    style.note(ax, 5, 7.05, "S → maximum, $2^x$ → P", ha="center")
    style.bare(ax, (-0.2, 10.2), (-0.2, 10.2), title="Hopper, an SM")


def _blackwell(ax: style.Axes, words: dict[str, int], room: int) -> None:
    _operands(ax)
    style.box(ax, 0, 4.45, 10, 2.4, edgecolor=style.QUIET)
    style.note(ax, 0.3, 4.95, f"tensor memory, {room} KiB")
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
    style.bare(ax, (-0.2, 10.2), (-0.2, 10.2), title="Blackwell, an SM")


def _pair(ax: style.Axes, B: int) -> None:
    """Draw S of two row blocks as a product of what two SMs hold."""
    left, top = 3.2, 3.2
    for n in (0, 1):
        style.tensor_box(ax, 0, top + 3.3 * n, 2.6, 3.1, "Q", f"Q\n{B} rows")
        style.tensor_box(ax, left + 3.4 * n, 0.6, 3.2, 2.2, "K", f"K, {B // 2}\nkeys")
        style.note(ax, left + 3.4 * n + 1.6, 0.1, f"SM {n}", ha="center", weight="bold")
        style.tensor_box(ax, left, top + 3.3 * n, 6.6, 3.1, "S", f"S {n}, in tensor\nmemory of SM {n}")
    style.bare(ax, (-0.2, 10.2), (-0.4, 10.2), title="Blackwell, two SMs")
