"""What one operation costs on each unit of a GPU, and what that makes of one tile before and after tweak 1."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips, time
from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


def data(B_r: int = 128, B_c: int = 64, d: int = 128) -> dict:
    """Prices in matmul FLOPs, and the clocks of one forward tile with FA1's arithmetic and with FA2's."""
    named = {chip.name.split()[0]: chip for chip in (chips.A100, chips.H100)}
    prices = {n: {"matmul": 1.0, "FP32": c.flops_per_fp32, "exp": c.flops_per_exp} for n, c in named.items()}
    clocks = {}
    for name, chip in named.items():
        worth = time.tweak_1(chip, B_r, B_c, d)
        for when, tile in (("before", worth.before), ("after", worth.after)):
            clocks[name, when] = {"matmul": tile.tensor, "FP32": tile.fp32, "exp": tile.exp}
    return dict(B_r=B_r, B_c=B_c, d=d, prices=prices, clocks=clocks)


# Drawing --------------------------------------------------------------------------------------------------------

FILLS = {"matmul": style.tint(style.INK, 0.8), "FP32": style.tint(style.INK, 0.45), "exp": style.tint(style.INK, 0.12)}
NAMES = {"matmul": "matmul FLOP", "FP32": "FP32 FLOP", "exp": "exponential"}


@style.picture
def draw(
    B_r: int,
    B_c: int,
    d: int,
    prices: Mapping[str, Mapping[str, float]],
    clocks: Mapping[tuple[str, str], Mapping[str, float]],
) -> tuple[Figure, str]:
    """On the left the price of each operation in matmul FLOPs, on the right the clocks of one forward tile.

    prices: {chip: {"matmul": 1, "FP32": ..., "exp": ...}}. clocks: {(chip, "before" or "after"): the same keys}.
    """
    title = "One exponential takes the time of 128 to 256 matmul FLOPs"
    figure, (left, right) = style.new_figure(3.6, title, ncols=2, width_ratios=[1, 1.45])
    _prices(left, prices)
    _clocks(right, clocks)
    left.set_title("Price in matmul FLOPs (log scale)")
    right.set_title("One forward tile, before and after tweak 1")
    right.set_xlabel(f"clocks, one unit after the other ({B_r} × {B_c}, d = {d})")
    told = "; ".join(f"{chip}: FP32 {p['FP32']:g}, exponential {p['exp']:g}" for chip, p in prices.items())
    shares = "; ".join(f"{chip} {when}: {_shares(parts)}" for (chip, when), parts in clocks.items())
    alt = (
        f"Left, bars on a log scale: the price of an operation in matmul FLOPs on the tensor cores. {told}. Right, the"
        f" clocks of one forward tile as stacked bars, before and after tweak 1 takes FP32 work out of it. {shares}."
    )
    return figure, alt


def _shares(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {n / sum(parts.values()):.0%}" for name, n in parts.items())


def _prices(ax: Axes, prices: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each operation and chip; all start at half a matmul FLOP, for a log axis has no zero."""
    start = 0.5
    for n, kind in enumerate(FILLS):
        ax.text(start, 2.9 * n - 0.55, NAMES[kind], va="bottom", fontsize=style.NORMAL)
        for m, (chip, price) in enumerate(prices.items()):
            lane = 2.9 * n + m
            style.box(ax, start, lane - 0.4, price[kind] - start, 0.8, fill=FILLS[kind], gid="price")
            ax.text(start / 1.15, lane, chip, ha="right", va="center", fontsize=style.SMALL)
            ax.text(price[kind] * 1.15, lane, f"{price[kind]:g}", va="center", fontweight="bold")
    ax.set(xscale="log", xlim=(start / 4, 1500), ylim=(7.4, -1.5), xticks=[], yticks=[])
    ax.minorticks_off()
    ax.spines[:].set_visible(False)


def _clocks(ax: Axes, clocks: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
    longest = max(sum(parts.values()) for parts in clocks.values())
    for n, ((chip, when), parts) in enumerate(clocks.items()):
        lane, left = 1.25 * n + 0.5 * (n // 2), 0.0
        ax.text(-0.02 * longest, lane, f"{chip}\n{when}", ha="right", va="center", fontsize=style.SMALL)
        for kind, size in parts.items():
            label = f"{kind}\n{size / sum(parts.values()):.0%}"
            style.box(ax, left, lane - 0.5, size, 1, label, FILLS[kind], gid=kind)
            left += size
        ax.text(left + 0.02 * longest, lane, f"{left:,.0f}", va="center", fontweight="bold")
    ax.set(xlim=(-0.17 * longest, 1.17 * longest), ylim=(lane + 0.7, -0.8), yticks=[])
    ax.set_xticks(range(0, int(longest) + 1, 1000))
    ax.spines["left"].set_visible(False)
