"""What the book is about, as measured: the same attention four ways, its time and its memory, while N grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fa2_lab.plots import style
from fa2_lab.records import Record, load

# Data -----------------------------------------------------------------------------------------------------------

# Whose line is whose in the records: rungs of the ladder, and contestants of the grids over N.
RUNGS = {"standard": "r00_standard", "FA1": "r01_fa1"}
OVER_N = {"FA2": "torch flash", "ours": "fa2_lab"}
MEMORY = {"standard": "torch math", "FA2": "torch flash", "ours": "fa2_lab"}
TOKENS, d = 16384, 128


def data() -> dict:
    """Milliseconds of 16,384 tokens in texts of N, without a mask; MiB that one text of N needs beyond its inputs."""
    ladder, grid, memory = (load(suite) for suite in ("ladder", "paper", "memory"))
    time = {name: points(ladder, rung, whole=True) for name, rung in RUNGS.items()}
    time |= {name: points(grid, contestant, whole=True) for name, contestant in OVER_N.items()}
    held = {name: points(memory, contestant, whole=False) for name, contestant in MEMORY.items()}
    setting = (
        f"{grid.made()}; forward, 16 heads, d = {d}. Time: {TOKENS:,} tokens in texts of N. Memory: one text, causal"
    )
    return dict(time=time, memory=held, setting=setting)


def points(record: Record, name: str, whole: bool) -> list[tuple[int, float]]:
    """(N, value) of one contestant's forward, in rows of d = 128; whole: without a mask, 16,384 tokens in all."""
    found = {}
    for row in record.rows:
        p = row.problem
        fits = row.direction == "forward" and p["d"] == d and name in row.values
        if fits and (not whole or (not p["causal"] and p["batch"] * p["N_q"] == TOKENS)):
            found[p["N_q"]] = row.values[name][0]
    return sorted(found.items())


# Drawing --------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[int, float]]
LOOKS = {
    "standard": dict(color=style.QUIET, linestyle=":", marker="s"),
    "FA1": dict(color=style.INK, linestyle="--", marker="^"),
    "FA2": dict(color=style.INK, linestyle="-", linewidth=1.1, marker="o", markerfacecolor=style.PAPER),
    "ours": dict(color=style.INK, linestyle="-", linewidth=2.4, marker="o"),
}


@style.picture
def draw(time: Mapping[str, Points], memory: Mapping[str, Points], setting: str) -> tuple[Figure, str]:
    """Two charts over N on logarithmic axes: milliseconds on the left, MiB on the right; {name: points} for each."""
    (N, slow), (most, full) = time["standard"][-1], memory["standard"][-1]
    faster, less = slow / dict(time["ours"])[N], full / dict(memory["ours"])[most]
    title = f"At N = {N:,}: {faster:.1f} times as fast as standard attention, in 1/{less:.0f} of its memory"
    figure, (left, right) = style.new_figure(3.7, title, ncols=2)
    for ax, curves in ((left, time), (right, memory)):
        for name, curve in curves.items():
            ax.plot(*zip(*curve, strict=True), markersize=4, **LOOKS[name])
        _axes(ax, curves)
    left.set_title("Time of a forward pass, milliseconds")
    right.set_title("Memory beyond the inputs, MiB")
    for name, curve in time.items():
        _name(left, name, curve[-1])
    _name(right, "standard", memory["standard"][-1], "standard: the next\nis out of memory")
    _name(right, "FA2", memory["FA2"][-1], "FA2, ours")
    figure.supxlabel(setting.replace(". ", ".\n", 1), fontsize=style.SMALL, color=style.QUIET)
    return figure, _alt(time, memory, setting)


def _axes(ax: Axes, curves: Mapping[str, Points]) -> None:
    lengths = sorted({N for curve in curves.values() for N, _ in curve})
    ax.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.2, lengths[-1] * 4.5), xlabel="N, tokens in a text")
    named = lengths[::-2]  # from the longest on, of which the title speaks
    ax.set_xticks(named, [f"{N:,}" for N in named])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def _name(ax: Axes, name: str, at: tuple[int, float], text: str = "") -> None:
    ax.annotate(text or name, at, (7, 0), textcoords="offset points", va="center", fontsize=style.SMALL)


def _alt(time: Mapping[str, Points], memory: Mapping[str, Points], setting: str) -> str:
    told = "; ".join(f"{name} {_told(curve)}" for name, curve in time.items())
    held = "; ".join(f"{name} {_told(curve)}" for name, curve in memory.items())
    return f"Two charts over N on logarithmic axes. Milliseconds: {told}. MiB beyond the inputs: {held}. {setting}."


def _told(curve: Points) -> str:
    (first, low), (last, high) = curve[0], curve[-1]
    return f"from {low:,.3g} at N = {first:,} to {high:,.6g} at {last:,}"
