"""The roofline of a GPU with the ladder of kernels under it: what each rung reaches and what the memory allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import log10

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips
from fa2_lab.plots import style
from fa2_lab.plots.speed import apart
from fa2_lab.records import Record, load

DRAM = ("DRAM bytes read", "DRAM bytes written")
SHOWN = ("00", "01", "02", "03", "05", "08")  # rungs; the others would lie on top of these


def data(d: int = 128) -> dict:
    """Every rung in the training shape without a mask: TFLOP/s, and FLOPs per byte that DRAM moved."""
    record = load("ladder")
    row = training_row(record, d)
    moved = counted(record, d)
    rungs = [name for name in row.values if name in moved and (name[1:3] in SHOWN or name == "fa2_lab")]
    speeds = {name: row.flops / row.values[name][0] / 1e9 for name in rungs}
    points = {name: (row.flops / moved[name], speeds[name]) for name in rungs}
    chip, p = chips.named(record.machine["gpu"]), row.problem
    roof = dict(flops=record.ceilings["GEMM TFLOP/s"], bytes=record.ceilings["copy TB/s"])
    printed = dict(flops=chip.tensor_flops / 1e12, bytes=chip.hbm_per_second / 1e12)
    shape = f"forward, batch {p['batch']}, {p['heads']} heads, N = {p['N_q']:,}, d = {d}, no mask"
    return dict(points=points, measured=roof, datasheet=printed, setting=f"{record.made()}; {shape}")


def training_row(record: Record, d: int) -> dict:
    """The timed row of one head dimension with the most heads and no mask."""
    rows = [r for r in record.rows if r.direction == "forward" and r.problem["d"] == d]
    rows = [r for r in rows if not r.problem["causal"]]
    if not rows:
        raise ValueError(f"d: got {d}; the recorded ladder has no row without a mask for it")
    return max(rows, key=lambda r: r.problem["batch"] * r.problem["heads"])


def counted(record: Record, d: int, counters: tuple[str, ...] = DRAM) -> dict[str, float]:
    """{rung: bytes that DRAM, or what else the counters watch, moved in one call}, where they could be read."""
    rows = [r for r in record.rows if r.direction == "counters" and r.problem["d"] == d]
    rows_read = [r for r in rows if set(counters) <= set(r.values)]
    found = {r.problem["rung"]: sum(r.values[name][0] for name in counters) for r in rows_read}
    if not found:
        reasons = sorted({why for r in rows for why in r.failed.values()})
        raise ValueError(f"d: got {d}; the recorded ladder has no DRAM counters for it: {'; '.join(reasons) or 'none'}")
    return found


LABELS_APART = 0.085  # decades, so that two lines of text do not touch


@style.picture
def draw(
    points: Mapping[str, tuple[float, float]],
    measured: Mapping[str, float],
    datasheet: Mapping[str, float],
    setting: str,
) -> tuple[Figure, str]:
    """TFLOP/s over FLOPs per byte of DRAM traffic, on logarithmic axes.

    points: {rung: (FLOPs per DRAM byte, TFLOP/s)} from the first rung to the last.
    measured, datasheet: the roof, {"flops": TFLOP/s, "bytes": TB/s}, as reached in the same run and as printed.
    """
    caption = "The ladder under the roofline of an H200: from rung 03 on, DRAM is no longer the limit."
    caption += " Solid: measured in the same run."
    figure, ax = style.new_figure(4.2, f"{caption} {setting}.")
    left, right = 0.4 * min(x for x, _ in points.values()), 14 * max(x for x, _ in points.values())
    for roof, look in (
        (datasheet, dict(color=style.QUIET, linewidth=0.9, linestyle="--")),
        (measured, dict(color=style.INK)),
    ):
        ridge = roof["flops"] / roof["bytes"]
        ax.plot([left, ridge, right], [left * roof["bytes"], roof["flops"], roof["flops"]], **look)
    ridge = measured["flops"] / measured["bytes"]
    words = f"datasheet: {datasheet['flops']:.0f} TFLOP/s, {datasheet['bytes']:.1f} TB/s"
    style.note(ax, right / 1.05, 1.06 * datasheet["flops"], words, ha="right", va="bottom", color=style.QUIET)
    style.note(ax, 1.05 * ridge, 0.93 * measured["flops"], f"a GEMM: {measured['flops']:.0f}", va="top")
    words = f"a copy: {measured['bytes']:.2f} TB/s"
    style.note(ax, 0.4 * ridge, 0.5 * measured["flops"], words, ha="right", va="bottom")
    _points(ax, points, measured["flops"])
    low = min(y for _, y in points.values())
    ax.set(xscale="log", yscale="log", xlabel="FLOPs per byte that DRAM moved (hardware counters)", ylabel="TFLOP/s")
    style.log_ticks(ax.xaxis, [10, 100, 1000, 10000])
    style.log_ticks(ax.yaxis, [y for y in (10, 20, 50, 100, 200, 500, 1000) if y >= 0.5 * low])
    ax.set(xlim=(left, right), ylim=(0.5 * low, 1.9 * datasheet["flops"]))
    reached = "; ".join(f"{named(name)} {y:.0f} at {x:,.0f} FLOPs per byte" for name, (x, y) in points.items())
    alt = (
        f"Log-log roofline, TFLOP/s over FLOPs per DRAM byte. The roof as measured: a copy at {measured['bytes']:.2f}"
        f" TB/s up to a GEMM at {measured['flops']:.0f} TFLOP/s; dashed, the datasheet's {datasheet['bytes']:.1f} TB/s"
        f" and {datasheet['flops']:.0f}. Points, in TFLOP/s: {reached}."
    )
    return figure, alt


def _points(ax: Axes, points: Mapping[str, tuple[float, float]], roof: float) -> None:
    """A dot for each rung, its label beside it, or in a column to the right where dots crowd."""
    farthest = max(x for x, _ in points.values())
    crowd = {name: at for name, at in points.items() if at[0] > farthest / 30}
    _, *heights = apart([log10(roof), *(log10(y) for _, y in crowd.values())], LABELS_APART)
    for name, (x, y) in points.items():
        color = style.OURS if name == "fa2_lab" else style.INK
        ax.plot(x, y, "o", color=color, markersize=5)
        words, look = f"{named(name)}, {y:.0f}", dict(color=color, fontsize=style.SMALL, va="center")
        if name in crowd:
            height = 10 ** heights[list(crowd).index(name)]
            ax.plot([x, 2.2 * farthest], [y, height], color=style.QUIET, linewidth=0.6, zorder=0)
            ax.text(2.3 * farthest, height, words, **look)
        else:
            ax.annotate(words, (x, y), (8, -2), textcoords="offset points", **look)


def named(rung: str) -> str:
    """A rung's number and name, as the ladder has them."""
    return rung[1:].replace("_", " ") if re.match(r"r\d\d_", rung) else rung
