"""Plot of the HBM traffic of FA1 and standard attention against the size of on-chip memory, with a lower bound."""

from itertools import pairwise

from fa2_lab.machine import chips, io_model
from fa2_lab.plots import style
from fa2_lab.reference import fa1
from fa2_lab.tiles import Tiling


def data(N: int = 1024, d: int = 64) -> dict:
    """Return the traffic of one head's forward pass, in two-byte elements, for a range of on-chip memory sizes M."""
    sizes = [2**k for k in range(12, 19)]
    moved = {M: count_elements("fa1", N, *fa1.block_sizes(M, d), d) for M in sizes}
    memories = {chip.name.split()[0]: chip.shared_per_block for chip in (chips.A100, chips.H100)}
    standard = count_elements("standard", N, *fa1.block_sizes(2**15, d), d)
    return dict(N=N, d=d, moved=moved, standard=standard, minimum=4 * N * d, memories=memories)


def count_elements(name: str, N: int, B_r: int, B_c: int, d: int) -> int:
    """Return how many elements the method `name` loads and stores in the forward pass of one head."""
    return io_model.requests(name, "forward", Tiling(N, N, B_r=B_r, B_c=B_c), d).total


@style.picture
def draw(N: int, d: int, moved: dict[int, int], standard: int, minimum: int, memories: dict[str, int]) -> style.Drawn:
    """Draw the traffic as a function of M, the number of elements that fit on the chip.

    `moved` is {M: elements that FA1 moves}. `standard` is the number of elements that standard attention moves, and
    `minimum` is the number moved if each of Q, K, V and O is moved once. These two numbers do not depend on M.
    `memories` is {chip: bytes of shared memory}.
    """
    gains = [before / after for before, after in pairwise(moved.values())]
    enough = min(M for M in moved if moved[M] < standard) * 2 // 1024
    caption = (
        f"With room for {enough} KiB on the chip, FA1 requests less than standard attention. Twice the room divides"
    )
    caption += f" FA1's requests by {gains[0]:.1f} at first, but by {gains[-1]:.1f} at the end."
    figure, ax = style.new_figure(
        3.2, f"{caption} One head has N = {N:,} and d = {d}. The short dashed lines mark the room on two GPUs."
    )
    sizes = list(moved)
    more, less = [[M for M in sizes if (moved[M] < standard) == below] for below in (False, True)]
    ax.plot([*more, less[0]], [moved[M] for M in (*more, less[0])], color=style.QUIET, marker="o", markersize=5)
    ax.plot(less, [moved[M] for M in less], color=style.OURS, marker="o", markersize=5, linewidth=2.4)
    sizes_shown = sizes[::2] if style.is_narrow() else sizes
    first = less[0]
    style.arrow(ax, (first, standard), (first, moved[first]), style.OURS)
    for M in {*sizes_shown, first}:
        words = format_millions(moved[M])
        if M in (sizes[0], first):
            words = f"FA1: {words}" if M == sizes[0] or style.is_narrow() else f"{words}, less than standard attention"
        look = dict(weight="bold", color=style.OURS) if M == first else {}
        style.beside(ax, words, (M, moved[M]), (6, 8), **look)
    levels = {
        f"standard attention: {format_millions(standard)}": standard,
        f"Q, K, V, O once: {format_millions(minimum)}": minimum,
    }
    for words, level in levels.items():
        M, dashes, side, shift = (sizes[-1], ":", "right", 10) if level == standard else (sizes[0], "-", "left", -12)
        ax.axhline(level, color=style.QUIET, linestyle=dashes, linewidth=1.2)
        style.beside(ax, words, (M, level), (shift, 9), ha=side, bbox=style.TEXT_BACKGROUND)
    low, high = minimum / 1.6, 1.6 * moved[sizes[0]]
    for name, size in memories.items():
        ax.plot([size / 2] * 2, [low, minimum * 1.6], color=style.QUIET, linewidth=0.8, linestyle="--")
        side = "right" if name == "A100" else "left"
        style.note(ax, size / 2 * (0.95 if side == "right" else 1.05), minimum / 1.28, name, ha=side)
    ax.set(xscale="log", yscale="log", xlabel="room for M elements of 2 bytes, in KiB")
    ax.set_ylabel(f"elements moved, N = {N:,}, d = {d}")
    ax.set(xlim=(sizes[0] / 1.5, sizes[-1] * 1.5), ylim=(low, high))
    style.log_ticks(ax.xaxis, sizes, [f"{M * 2 // 1024:g}" for M in sizes])
    counts = style.log_places(low, high)
    style.log_ticks(ax.yaxis, counts, [f"{n / 1e6:g} million" for n in counts])
    steps = ", ".join(f"{M * 2 // 1024} KiB {format_millions(n)}" for M, n in moved.items())
    alt = (
        "A log-log chart of the elements that one head moves over the room on the chip. FA1 falls, first in proportion"
        f" and then more slowly: {steps}. Standard attention stays at {format_millions(standard)}, and each of Q, K, V"
        f" and O once makes {format_millions(minimum)}."
    )
    return figure, alt


def format_millions(count: float) -> str:
    """Format a count in millions."""
    return f"{count / 1e6:.2g} M"
