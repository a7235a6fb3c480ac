"""The roofline of a GPU: how fast a method can be at most, by the bytes that it requests and those that reach DRAM.

    show(roofline.draw(**roofline.data("standard", "FA1", "FA2", B_r=128)))    methods, with any word of prices.cost
    own = prices.cost("decode", N=8192, N_q=8)
    show(roofline.draw(**roofline.data(("8 queries", own))))                  (label, Cost): several settings

The chapters' own are in limits.py.

Names are those of prices.METHODS; cost.limit(chip) gives the slowest unit and its seconds.
Without a name `data()` is the ladder of chapter 10 as it was measured, over the bytes that hardware counters saw.
"""

import re
from math import inf, log10
from typing import Any, NamedTuple

from fa2_lab.machine import chips, reasons
from fa2_lab.machine.prices import Cost, cost, prices
from fa2_lab.plots import style
from fa2_lab.records import Record, load

DRAM = ("DRAM bytes read", "DRAM bytes written")
SHOWN = ("00", "01", "02", "03", "06", "11")  # rungs; the others would lie on top of these
PRINTED = {"FA1": "Algorithm 1 as printed,\none worker per head"}  # not the kernel of FA1's authors


class Roof(NamedTuple):
    """A bound on the speed: at most this many TFLOP/s, and TB/s times the FLOPs per byte."""

    flops: float
    bytes: float
    slope: str  # words beside the sloping part
    flat: str = ""  # and at the flat one
    dashed: bool = False


# What is drawn --------------------------------------------------------------------------------------------------


def data(
    *methods: str | tuple[str, Cost], d: int = 128, chip: chips.Chip = chips.H200, message: str = "", **sizes: Any
) -> dict:
    """Return the places of some methods under the roofs of L2 and of DRAM; without a method, the measured ladder.

    message: the headline, a sentence.
    """
    if not methods:
        return ladder(d)
    costs = dict(m if isinstance(m, tuple) else (m, cost(m, d=d, chip=chip, **sizes)) for m in methods)
    price = prices(chip)
    top, flat = price.tensor / 1e12, f"tensor cores {price.tensor / 1e12:.0f} TFLOP/s"
    roofs = [
        Roof(top, price.l2 / 1e12, f"L2 {price.l2 / 1e12:.1f} TB/s", flat),
        Roof(top, price.dram / 1e12, f"DRAM {price.dram / 1e12:.1f} TB/s"),
    ]
    points, words = {}, []
    for name, asked in costs.items():
        unit, seconds = asked.limit(chip)
        height = asked.flops / seconds / 1e12
        points[PRINTED.get(name, name)] = (asked.intensity("crossed"), height, asked.intensity("requested"))
        words.append(f"{height:.0f} TFLOP/s for {name} ({unit})")
    apart = any(requested < 0.95 * crossed for crossed, _, requested in points.values())
    bounds = f"On an {chip.name}, the upper bound is {words[0]}."
    if len(words) > 1:
        bounds = f"On an {chip.name}, the upper bounds are {listed(words)}."
    dots = "A dot counts FLOPs per byte that reaches DRAM" + (
        ", and a ring FLOPs per requested byte." if apart else "."
    )
    caption = " ".join(filter(None, [message, bounds, dots]))
    xlabel = "FLOPs per byte (ring: requested, dot: DRAM)" if apart else "FLOPs per byte from DRAM"
    return dict(points=points, roofs=roofs, caption=caption, xlabel=xlabel)


def listed(words: list[str]) -> str:
    """Return words as a list in a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def ladder(d: int) -> dict:
    """Return every rung in the training shape without a mask: TFLOP/s, and FLOPs per byte that DRAM moved."""
    record = load("ladder")
    row = reasons.timed(record, causal=False, d=d)
    moved = counted(record, d)
    rungs = [name for name in row.values if name in moved and (name[1:3] in SHOWN or name == "fa2_lab")]
    points = {name: (row.flops / moved[name], row.rate(name)) for name in rungs}
    chip, p = chips.named(record.machine["gpu"]), row.problem
    gemm, copy = record.ceilings["GEMM TFLOP/s"], record.ceilings["copy TB/s"]
    flops, speed = chip.tensor_flops / 1e12, chip.hbm_per_second / 1e12
    roofs = [
        Roof(gemm, copy, f"a copy: {copy:.2f} TB/s", f"a GEMM: {gemm:.0f}"),
        Roof(flops, speed, "", f"datasheet: {flops:.0f} TFLOP/s, {speed:.1f} TB/s", dashed=True),
    ]
    caption = (
        "From rung 03 on, DRAM no longer limits the kernels of the ladder. The solid roofline is a copy and a matmul"
        f" in the same run, and the dashed one is the datasheet of an {chip.name}. {record.made()}; forward, batch"
        f" {p['batch']}, {p['heads']} heads, N = {p['N_q']:,}, d = {d}, no mask."
    )
    xlabel = "FLOPs per byte that DRAM moved (hardware counters)"
    return dict(points=points, roofs=roofs, caption=caption, xlabel=xlabel, height=4.2)


def counted(record: Record, d: int) -> dict[str, float]:
    """Return {rung: bytes that DRAM moved in one call} for rungs whose counters could be read."""
    rows = [r for r in record.rows if r.direction == "counters" and r.problem["d"] == d and set(DRAM) <= set(r.values)]
    return {r.problem["rung"]: sum(r.values[name][0] for name in DRAM) for r in rows}


def named(rung: str) -> str:
    """Return a rung's number and name, as the ladder has them."""
    return rung[1:].replace("_", " ") if re.match(r"r\d\d_", rung) else rung


# The picture ----------------------------------------------------------------------------------------------------

Point = list[float]  # FLOPs per byte that reaches DRAM, TFLOP/s; of a method also FLOPs per byte requested
LINE = 0.2  # inches from one line of words to the next


@style.picture
def draw(points: dict[str, Point], roofs: list[Roof], caption: str, xlabel: str, height: float = 2.6) -> style.Drawn:
    """Draw TFLOP/s over FLOPs per byte, on logarithmic axes.

    points: {name: (FLOPs per byte that reaches DRAM, TFLOP/s)}, a dot; a third number, FLOPs per byte requested, is
    a ring at the same height.
    """
    figure, ax = style.new_figure(height, caption)
    top = max(roof.flops for roof in roofs)
    across = [x for place in points.values() for x in place[::2]]
    crowded = any(roof.dashed for roof in roofs)
    left, column, right = reach(min(across), max(across), crowded)
    if max(map(len, points.values())) == 2 and not crowded and max(across) < column / 60:
        right = max(300, 30 * max(across))  # all names are beside their places
    low = min(50, 0.5 * min(place[1] for place in points.values()))
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="TFLOP/s", xlim=(left, right), ylim=(low, 1.9 * top))
    last = max(2 * max(across), 1000)  # to the right of it are names
    style.log_ticks(ax.xaxis, [x for x in (1, 10, 100, 1000, 10000) if left <= x <= min(last, right)])
    style.log_ticks(ax.yaxis, [y for y in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= y <= 1.9 * top])
    for number, roof in enumerate(roofs):
        _roof(ax, roof, left, right, left_of_it=number == 0, under_it=crowded)
    _points(ax, points, column, min(roof.flops for roof in roofs))
    reached = "; ".join(f"{_read(name, place)}" for name, place in points.items())
    walls = "; ".join(f"{roof.bytes:.2f} TB/s up to {roof.flops:.0f} TFLOP/s" for roof in roofs)
    alt = f"Log-log roofline, TFLOP/s over FLOPs per byte. Roofs: {walls}. Points, in TFLOP/s: {reached}."
    return figure, alt


def reach(low: float, high: float, crowded: bool) -> tuple[float, float, float]:
    """Return where the axis begins, where the column of names begins, and where the axis ends."""
    if style.narrow() and not crowded:
        return min(1, 0.1 * low), max(4200, 1.6 * high), max(1.5e6, 700 * high)
    return min(5 if style.narrow() else 8, 0.4 * low), max(5000, 2.3 * high), max(60000, 25 * high)


def _read(name: str, point: Point) -> str:
    x, y, *requested = point
    ring = f", {requested[0]:,.0f} requested" if requested else ""
    return f"{' '.join(named(name).split())} {y:.0f} at {x:,.0f} FLOPs per byte{ring}"


def _roof(ax: style.Axes, roof: Roof, left: float, right: float, *, left_of_it: bool, under_it: bool) -> None:
    """Draw a slope and a flat roof with their names. A dashed roof is above a solid one, and is named there."""
    ridge = roof.flops / roof.bytes
    look = dict(color=style.QUIET, linewidth=0.9, linestyle="--") if roof.dashed else dict(color=style.INK)
    begin = max(left, ax.get_ylim()[0] / roof.bytes)
    ax.plot([begin, ridge, right], [begin * roof.bytes, roof.flops, roof.flops], **look)
    if left_of_it:
        words = re.sub(r":? (?=\d)", "\n", roof.slope, count=1) if style.narrow() else roof.slope
        style.note(ax, 0.4 * ridge, 0.5 * roof.flops, words, ha="right", va="bottom")
    else:
        style.note(ax, 0.16 * ridge, (0.078 if style.narrow() else 0.1) * roof.flops, roof.slope, va="top")
    if roof.dashed:
        style.note(ax, right / 1.05, 1.06 * roof.flops, roof.flat, ha="right", va="bottom", color=style.QUIET)
    elif under_it and style.narrow():
        style.note(ax, 1.1 * left, roof.flops, roof.flat)
    elif under_it:
        style.note(ax, 1.05 * ridge, 0.93 * roof.flops, roof.flat, va="top")
    else:
        style.note(ax, 1.05 * ridge, 1.12 * roof.flops, roof.flat, va="bottom")


def _points(ax: style.Axes, points: dict[str, Point], column: float, roof: float) -> None:
    """Draw each name's points, and the name in a column to the right of all or, if that is far, next to its points."""
    crowd = {name: place for name, place in points.items() if place[0] >= column / 60 or len(place) > 2}
    decades = log10(ax.get_ylim()[1] / ax.get_ylim()[0]) / ax.figure.get_figheight()
    gap = LINE * decades * max(name.count("\n") + 1 for name in points)
    heights = apart([log10(place[1]) for place in crowd.values()], gap, top=log10(roof) - 0.75 * gap)
    for name, (x, y, *requested) in points.items():
        color = style.OURS if name == "fa2_lab" else style.INK
        words = f"{named(name)}: {y:.0f}"
        for ring in requested:
            ax.plot([ring, x], [y, y], color=color, linewidth=0.8)
            ax.plot(ring, y, "o", color=color, markersize=5, markerfacecolor=style.PAPER)
        ax.plot(x, y, "o", color=color, markersize=5)
        if name in crowd:
            height = 10 ** heights[list(crowd).index(name)]
            ax.plot([x, 0.95 * column], [y, height], color=style.QUIET, linewidth=0.6, zorder=0)
            style.note(ax, column, height, words, color=color)
        else:
            below = -10 if y > 0.9 * roof else -2  # not on the roof's line
            style.beside(ax, words, (x, y), (8, below), color=color)


def apart(values: list[float], gap: float, top: float = inf) -> list[float]:
    """Return heights as near to the values as possible, in their order, at least `gap` apart, and none above `top`."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    pools: list[list[float]] = []  # neighbours that push each other: the mean of each pool stays
    for place, n in enumerate(order):
        pools.append([values[n] - gap * place])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) >= sum(pools[-1]) / len(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    highest = top - gap * (len(values) - 1)
    levels = [min(sum(pool) / len(pool), highest) for pool in pools for _ in pool]
    placed = {n: levels[place] + gap * place for place, n in enumerate(order)}
    return [placed[n] for n in range(len(values))]
