"""How many bytes the N × N matrices take beside everything else, and which GPU they fill."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips
from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


def data(heads: int = 32, d: int = 128, width: int = 2) -> dict:
    """Bytes of one layer's tensors over N, and the largest N whose S and P fit each GPU; L is kept in fp32."""
    N = np.rint(2 ** np.arange(7, 20.01, 0.125)).astype(int)
    sizes = {"S and P": 2 * width * heads * N**2, "Q, K, V, O": 4 * width * heads * N * d, "L": 4 * heads * N}
    of_size: dict[int, list[str]] = {}
    for chip in chips.CHIPS.values():
        of_size.setdefault(chip.hbm_bytes, []).append(chip.name.removeprefix("GeForce ").split(" SXM")[0])
    fits = [(", ".join(names), size, isqrt(size // (2 * width * heads))) for size, names in sorted(of_size.items())]
    setting = f"One layer, batch 1, {heads} heads, d = {d}, {width} bytes per element (L: 4)"
    return dict(N=N, sizes=sizes, chips=fits, setting=setting)


# Drawing --------------------------------------------------------------------------------------------------------

GiB = 2**30
COLORS = {"S and P": style.hue("S"), "Q, K, V, O": style.INK, "L": style.hue("L")}


@style.picture
def draw(
    N: np.ndarray, sizes: dict[str, np.ndarray], chips: Sequence[tuple[str, int, int]], setting: str
) -> tuple[Figure, str]:
    """Bytes over sequence length, once to scale against the memory of GPUs and once on logarithmic axes.

    sizes: {"S and P", "Q, K, V, O", "L": bytes at each N}; chips: (name, bytes of memory, largest N whose S and P fit).
    """
    title = "S and P grow with N² and fill every GPU; everything else grows with N"
    figure, (to_scale, slopes) = style.new_figure(3.5, title, ncols=2, width_ratios=[1.5, 1])
    _to_scale(to_scale, N, sizes, chips)
    _slopes(slopes, N, sizes)
    figure.supxlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    filled = "; ".join(f"{name} ({size / GiB:.0f} GiB) from N = {last + 1:,}" for name, size, last in chips)
    alt = (
        f"Left, bytes over sequence length N: the parabola of S and P crosses the memory of one GPU after another,"
        f" while Q, K, V and O stay at the bottom. Too large for: {filled}. Right, the same on logarithmic axes up to"
        f" N = {N[-1]:,}: doubling N takes four times the bytes for S and P and twice for all others. {setting}."
    )
    return figure, alt


def _to_scale(ax: Axes, N: np.ndarray, sizes: dict, chips: Sequence) -> None:
    top = 1.12 * max(size for _, size, _ in chips) / GiB
    right = 1.06 * max(last for _, _, last in chips)
    shown = N <= 1.1 * right
    for name in ("S and P", "Q, K, V, O"):
        ax.plot(N[shown], sizes[name][shown] / GiB, color=COLORS[name])
    for name, size, last in chips:
        ax.plot([0, right], [size / GiB] * 2, color=style.QUIET, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.plot(last, size / GiB, "o", color=style.INK, markersize=4.5)
        ax.text(last - 500, size / GiB + 1.2, f"N = {last:,}", ha="right", va="bottom", fontsize=style.SMALL)
        ax.text(1.015 * right, size / GiB, f"{size / GiB:.0f} GiB\n{name}", va="center", fontsize=style.SMALL)
    ax.set(xlim=(0, right), ylim=(0, top), ylabel="GiB", xticks=range(0, int(right), 10_000))
    ax.set_xticklabels(f"{n:,}" for n in ax.get_xticks())
    ax.set_xlabel("sequence length N")
    ax.set_title("To scale, with the memory of GPUs")
    ax.text(0.97 * right, 0.03 * top, "Q, K, V, O", ha="right", va="bottom", fontsize=style.SMALL)
    ax.text(0.76 * right, 0.5 * top, "S and P", fontsize=style.SMALL)


def _slopes(ax: Axes, N: np.ndarray, sizes: dict) -> None:
    labels = {"S and P": ("\n×4 when N doubles", -10, 6), "Q, K, V, O": (": ×2", 5, -5), "L": (": ×2", 5, -5)}
    for name, bytes_ in sizes.items():
        ax.loglog(N, bytes_, color=COLORS[name], base=2)
        growth, right, up = labels[name]
        where = len(N) * (5 if right < 0 else 4) // 8
        align = dict(ha="right" if right < 0 else "left", va="center", fontsize=style.SMALL)
        text, at = f"{name}{growth}", (N[where], bytes_[where])
        ax.annotate(text, at, xytext=(right, up), textcoords="offset points", **align)
    ax.set_xticks([2**7, 2**10, 2**15, 2**20], ["128", "1 Ki", "32 Ki", "1 Mi"])
    ax.set_yticks([2**20, GiB, 2**40], ["1 MiB", "1 GiB", "1 TiB"])
    ax.minorticks_off()
    ax.set_xlabel("sequence length N")
    ax.set_title("On logarithmic axes")
