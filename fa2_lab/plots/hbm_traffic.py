"""HBM traffic of standard attention, FA1 and FA2: over the sequence length, and over the size of the on-chip memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fa2_lab.machine import chips, io
from fa2_lab.plots import style
from fa2_lab.plots.roofline import DRAM
from fa2_lab.records import load
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import Tiling
from fa2_lab.trace import Trace

# Data -----------------------------------------------------------------------------------------------------------

FA2 = "r07_two_loops"  # the rung of the ladder whose counters are shown


def data(N: int = 1024, M: int = 2**15, d: int = 64) -> dict:
    """Closed forms of the three, metered where that takes a moment; FA2's hardware counters as recorded."""
    lengths, sizes = [2**k for k in range(9, 15)], [2**k for k in range(12, 19)]
    over_N, over_M = {}, {}
    for name in ("standard", "FA1", "FA2"):
        over_N[name] = dict(
            form=[(n, moved_by_form(name, n, M, d)) for n in lengths],
            meter=[(n, moved_by_meter(name, n, M, d)) for n in lengths if n <= N],
        )
        over_M[name] = dict(
            form=[(m, moved_by_form(name, N, m, d)) for m in sizes],
            meter=[(m, moved_by_meter(name, N, m, d)) for m in sizes if m >= M // 2],
        )
    memories = {chip.name.split()[0]: chip.shared_per_block for chip in (chips.A100, chips.H100)}
    return dict(N=N, M=M, d=d, over_N=over_N, over_M=over_M, memories=memories, counters=counters(d))


def counters(d: int) -> dict | None:
    """What a GPU's counters say of FA2, in elements that one head moves; None if nobody has measured it for this d.

    Only FA2's rung has one item size throughout (L in fp32 is a number per row); standard and FA1 keep S or O in fp32.
    """
    record = load("ladder")
    for row in record.rows:
        p, read = row.problem, row.values
        if row.direction == "counters" and (p["d"], p["rung"]) == (d, FA2) and {"L2 bytes", *DRAM} <= set(read):
            heads, width = p["batch"] * p["heads"], 2  # bytes of a bf16 element
            moved = dict(L2=read["L2 bytes"][0], DRAM=sum(read[name][0] for name in DRAM))
            points = {memory: (p["N_q"], round(x / heads / width)) for memory, x in moved.items()}
            source = f"{record.machine['gpu']}, FA2, {heads} heads at once"
            return dict(source=source, points=points)
    return None


def block_sizes(name: str, M: int, d: int) -> dict[str, int]:
    """FA1's rule for both: the block that stays on chip gets a quarter of M, the one that streams at most d rows."""
    inner, outer = fa1.block_sizes(M, d)
    return dict(B_r=outer, B_c=inner) if name == "FA2" else dict(B_r=inner, B_c=outer)


def moved_by_form(name: str, N: int, M: int, d: int) -> int:
    """Elements that the forward of one head moves, in closed form."""
    return io.traffic(name.lower(), "forward", Tiling(N, N, **block_sizes(name, M, d)), d).total


@cache
def moved_by_meter(name: str, N: int, M: int, d: int) -> int:
    """The same, counted while the algorithm runs."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    trace = Trace()
    if name == "standard":
        naive.forward(Q, K, V, trace=trace)
    else:
        {"FA1": fa1, "FA2": fa2}[name].forward(Q, K, V, **block_sizes(name, M, d), trace=trace)
    return trace.hbm_elements


# Drawing --------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[int, int]]  # (N or M, elements moved)
LOOKS = {
    "standard": dict(color=style.QUIET, linestyle=":"),
    "FA1": dict(color=style.INK, linestyle="--"),
    "FA2": dict(color=style.INK, linestyle="-"),
}


@style.picture
def draw(
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
    counters: {"source": "H200, FA2", "points": {"L2" and "DRAM": (N, elements)}} as hardware counted them, if it did.
    """
    title = "What the chip asks for grows as N²; a larger tile asks for less, and L2 answers most of it"
    figure, (left, right) = style.new_figure(3.8, title, ncols=2)
    for ax, curves in ((left, over_N), (right, over_M)):
        for name, curve in curves.items():
            _curve(ax, name, curve)
        _floor(ax, [(x, 4 * (x if ax is left else N) * d) for x, _ in curves["FA2"]["form"]])
        ax.set(xscale="log", yscale="log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(short))
    _over_N(left, M, over_N)
    _over_M(right, N, over_M, memories)
    left.set_ylabel(f"elements, one head, d = {d}")
    for memory, point in (counters or {}).get("points", {}).items():
        left.plot(*point, "x", color=style.INK, markersize=7, markeredgewidth=2, label=f"{memory} counter")
        line = dict(arrowstyle="-", color=style.QUIET, shrinkB=5)
        left.annotate(memory, point, (16, -30), textcoords="offset points", fontweight="bold", arrowprops=line)
    if counters:
        figure.supxlabel(f"crosses: counted at L2 and at DRAM ({counters['source']})", fontsize=style.SMALL)
    told = [f"{memory} {short(y)} at N = {x:,}" for memory, (x, y) in (counters or {}).get("points", {}).items()]
    counted = (
        f"crosses are hardware counters of {counters['source']}: {', '.join(told)}" if counters else "no counters yet"
    )
    last = {name: curve["form"][-1][1] for name, curve in over_N.items()}
    alt = (
        f"Two log-log charts of elements moved by one head. Over N, with on-chip memory of {M:,} elements, three"
        f" parallel lines of slope 2: at N = {over_N['FA2']['form'][-1][0]:,} standard attention moves"
        f" {short(last['standard'])}, FA1 {short(last['FA1'])}, FA2 {short(last['FA2'])}. Over memory, at N = {N:,},"
        f" standard stays flat while FA1 and FA2 fall in proportion, from above it to far below. A thin line is the"
        f" floor, 4 N d: each of Q, K, V and O once. Lines are closed form; dots are the meter and lie on the lines;"
        f" {counted}."
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


def _floor(ax: Axes, points: Points) -> None:
    """Each of Q, K, V and O once: less is not possible."""
    ax.plot(*zip(*points, strict=True), color=style.QUIET, linewidth=0.9, label="floor")
    level = points[0][1] == points[-1][1]
    at, shift, va = (points[1], (-12, 3), "bottom") if level else (points[-1], (5, 0), "center")
    ax.annotate("floor: 4 N d", at, shift, textcoords="offset points", va=va, fontsize=style.SMALL, color=style.QUIET)


def _over_N(ax: Axes, M: int, curves: Mapping[str, Mapping[str, Points]]) -> None:
    lengths = [x for x, _ in curves["FA2"]["form"]]
    for name, curve in curves.items():
        x, y = curve["form"][-1]
        ax.annotate(name, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=style.NORMAL)
    ax.set_xlim(lengths[0] / 1.2, lengths[-1] * 3.2)
    ax.set_xticks(lengths, [short(x) if x < 1024 else f"{x // 1024}k" for x in lengths])
    ax.set(xlabel="sequence length N", title=f"M = {M:,} elements of 2 bytes, {M * 2 // 1024} KiB")


def _over_M(ax: Axes, N: int, curves: Mapping[str, Mapping[str, Points]], memories: Mapping[str, int]) -> None:
    sizes = [x for x, _ in curves["FA2"]["form"]]
    places = {"standard": (3, (-4, 6)), "FA1": (1, (6, 5)), "FA2": (1, (-28, -14))}
    for name, (n, shift) in places.items():
        ax.annotate(name, curves[name]["form"][n], shift, textcoords="offset points", fontsize=style.NORMAL)
    for chip, size in memories.items():
        ax.axvline(size // 2, color=style.QUIET, linewidth=0.8, zorder=0)
        ax.annotate(chip, (size // 2, 0.97), (-3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                    rotation=90, ha="right", va="top", fontsize=style.SMALL, color=style.QUIET)  # fmt: skip
    ax.set_xticks(sizes, [f"{2 * x // 1024}" for x in sizes])
    ax.set(xlabel="room for M elements of 2 bytes, in KiB", title=f"N = {N:,}: line = closed form, dot = meter")
