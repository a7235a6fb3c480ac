"""How many bytes the N × N matrices take beside everything else, and which GPU they fill."""

from math import isqrt

import numpy as np

from fa2_lab.machine import chips
from fa2_lab.plots import style


def data(heads: int = 32, d: int = 128, width: int = 2) -> dict:
    """Bytes of one layer's tensors over N, and the largest N whose S and P fit each GPU."""
    N = np.rint(2 ** np.arange(7, 20.01, 0.125)).astype(int)
    sizes = {"S and P": 2 * width * heads * N**2, "Q, K, V, O": 4 * width * heads * N * d}
    of_size: dict[int, list[str]] = {}
    for chip in chips.CHIPS.values():
        of_size.setdefault(chip.hbm_bytes, []).append(chip.name.removeprefix("GeForce ").split(" SXM")[0])
    fits = [(", ".join(names), size, isqrt(size // (2 * width * heads))) for size, names in sorted(of_size.items())]
    setting = f"One layer, batch 1, {heads} heads, d = {d}, {width} bytes per element"
    return dict(N=N, sizes=sizes, chips=fits, setting=setting)


GiB = 2**30


@style.picture
def draw(N: np.ndarray, sizes: dict[str, np.ndarray], chips: list[tuple[str, int, int]], setting: str) -> style.Drawn:
    """Bytes over sequence length against the memory of GPUs.

    sizes: {"S and P", "Q, K, V, O": bytes at each N}; chips: (name, bytes of memory, largest N whose S and P fit).
    """
    caption = "S and P grow with N² and outgrow one GPU after another; everything else grows with N."
    figure, ax = style.new_figure(3.9, f"{caption} {setting}.")
    top = 1.1 * max(size for _, size, _ in chips) / GiB
    right = 1.06 * max(last for _, _, last in chips)
    shown = (N <= 1.1 * right) & (sizes["S and P"] <= top * GiB)
    ax.plot(N[shown], sizes["S and P"][shown] / GiB, color=style.hue("S"), linewidth=2.4)
    few = N <= right
    ax.plot(N[few], sizes["Q, K, V, O"][few] / GiB, color=style.QUIET)
    for name, size, last in chips:
        ax.plot([0, right], [size / GiB] * 2, color=style.QUIET, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.plot(last, size / GiB, "o", color=style.INK, markersize=4.5)
        style.note(ax, last - 500, size / GiB + 1.2, f"N = {last:,}", ha="right", va="bottom")
        style.note(ax, 1.015 * right, size / GiB, f"{size / GiB:.0f} GiB\n{name}")
    ax.set(xlim=(0, right), ylim=(0, top), ylabel="GiB", xlabel="sequence length N")
    ticks = range(0, int(right), 10_000)
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    style.note(ax, 0.03 * right, 0.03 * top, "Q, K, V, O", va="bottom")
    style.note(ax, 0.75 * right, 0.48 * top, "S and P", weight="bold")
    filled = "; ".join(f"{name} ({size / GiB:.0f} GiB) from N = {last + 1:,}" for name, size, last in chips)
    alt = (
        f"Bytes over sequence length N: the parabola of S and P crosses the memory of one GPU after another, while Q,"
        f" K, V and O stay at the bottom. Doubling N takes four times the bytes for S and P. Too large for: {filled}."
    )
    return figure, alt
