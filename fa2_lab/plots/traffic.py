"""HBM traffic of standard attention, FA1 and FA2: over the sequence length, and over the size of the on-chip memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fa2_lab.plots import style

Points = Sequence[tuple[int, int]]  # (N or M, elements moved)
LOOKS = {
    "standard": dict(color=style.QUIET, linestyle=":"),
    "FA1": dict(color=style.INK, linestyle="--"),
    "FA2": dict(color=style.INK, linestyle="-"),
}


@style.picture
def hbm_traffic(
    N: int,
    M: int,
    d: int,
    over_N: Mapping[str, Mapping[str, Points]],
    over_M: Mapping[str, Mapping[str, Points]],
    memories: Mapping[str, int],
    counters: Mapping | None = None,
) -> tuple[Figure, str]:
    """Elements that one head's forward moves: on the left over N with M fixed, on the right over M with N fixed.

    over_N, over_M: {"FA2": {"form": points, "meter": points}, ...}. memories: {chip: bytes that a block can have}.
    counters: {"source": "H200, DRAM", "points": {"FA2": points over N}} as hardware counted them, if it was asked.
    """
    title = "Everyone's HBM traffic grows as N²; only FlashAttention's shrinks with memory"
    figure, (left, right) = style.new_figure(3.5, title, ncols=2)
    for ax, curves in ((left, over_N), (right, over_M)):
        for name, curve in curves.items():
            _curve(ax, name, curve)
        ax.set(xscale="log", yscale="log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(short))
    _over_N(left, M, over_N)
    _over_M(right, N, over_M, memories)
    left.set_ylabel(f"elements moved (one head, d = {d})")
    for name, points in (counters or {}).get("points", {}).items():
        left.plot(*zip(*points, strict=True), "x", color=LOOKS[name]["color"], markersize=7, label=f"{name} counter")
        at = dict(xytext=(0, -14), textcoords="offset points", ha="center", fontsize=style.SMALL)
        left.annotate(f"{name}'s DRAM, counted", points[-1], **at)
    counted = f"crosses are hardware counters ({counters['source']})" if counters else "no hardware counters yet"
    last = {name: curve["form"][-1][1] for name, curve in over_N.items()}
    alt = (
        f"Two log-log charts of elements moved by one head. Over N, with on-chip memory of {M:,} elements, three"
        f" parallel lines of slope 2: at N = {over_N['FA2']['form'][-1][0]:,} standard attention moves"
        f" {short(last['standard'])}, FA1 {short(last['FA1'])}, FA2 {short(last['FA2'])}. Over memory, at N = {N:,},"
        f" standard stays flat while FA1 and FA2 fall in proportion, from above it to far below. Lines are closed form;"
        f" dots are the meter and lie on the lines; {counted}."
    )
    return figure, alt


def short(count: float, _position=None) -> str:
    """A count with its thousands as k, M, G."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.3g}"


def _curve(ax: Axes, name: str, curve: Mapping[str, Points]) -> None:
    look = LOOKS[name]
    ax.plot(*zip(*curve["form"], strict=True), label=f"{name} form", **look)
    ax.plot(*zip(*curve["meter"], strict=True), "o", color=look["color"], markersize=4.5, label=f"{name} meter")


def _over_N(ax: Axes, M: int, curves: Mapping[str, Mapping[str, Points]]) -> None:
    lengths = [x for x, _ in curves["FA2"]["form"]]
    for name, curve in curves.items():
        x, y = curve["form"][-1]
        ax.annotate(name, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=style.NORMAL)
    ax.set_xlim(lengths[0] / 1.2, lengths[-1] * 3.2)
    ax.set_xticks(lengths, [short(x) if x < 1024 else f"{x // 1024}k" for x in lengths])
    ax.set(xlabel="sequence length N", title=f"M = {M * 2 // 1024} KiB (2 bytes an element)")


def _over_M(ax: Axes, N: int, curves: Mapping[str, Mapping[str, Points]], memories: Mapping[str, int]) -> None:
    sizes = [x for x, _ in curves["FA2"]["form"]]
    places = {"standard": (3, (-4, 6)), "FA1": (1, (6, 5)), "FA2": (1, (-28, -14))}
    for name, (n, shift) in places.items():
        ax.annotate(name, curves[name]["form"][n], shift, textcoords="offset points", fontsize=style.NORMAL)
    for chip, size in memories.items():
        ax.axvline(size // 2, color=style.QUIET, linewidth=0.8, zorder=0)
        ax.annotate(chip, (size // 2, 0.02), (-3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                    rotation=90, ha="right", va="bottom", fontsize=style.SMALL, color=style.QUIET)  # fmt: skip
    ax.set_xticks(sizes, [f"{2 * x // 1024}" for x in sizes])
    ax.set(xlabel="on-chip memory M (KiB)", title=f"N = {N:,}: line = closed form, dot = meter")
