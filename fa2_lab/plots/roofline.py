"""The roofline of a GPU: the highest speed that each method can reach, given its FLOPs per byte.

    show(roofline.draw(**roofline.data("standard", "FA1", "FA2", B_r=128)))    methods, and arguments for rates.cost()
    own = rates.cost("decode", N=8192, N_q=8)
    show(roofline.draw(**roofline.data(("8 queries", own))))                  (label, Cost), for settings of your own

Methods are named as in rates.METHODS. Cost.limit(chip) returns the slowest unit and its time in seconds. If no
method is given, data() returns the measured ladder of chapter 10, with the DRAM traffic that the hardware counted.

rooflines.py defines the rooflines in the chapters.
"""

import re
from math import inf, log10
from typing import Any, NamedTuple

from fa2_lab.machine import chips, reasons
from fa2_lab.machine.rates import Cost, cost, rates
from fa2_lab.plots import style
from fa2_lab.records import Record, load

DRAM = ("DRAM bytes read", "DRAM bytes written")
# The rungs shown. The dots of the other rungs would overlap the dots of these.
DRAWN = ("00", "01", "02", "03", "06", "11", "23")
LONG_NAMES = {"FA1": "FA1 as printed"}  # the algorithm as printed in the paper, which differs from the authors' kernel


class Roof(NamedTuple):
    """A ceiling on speed: the lesser of `flops` TFLOP/s and `bytes` TB/s times the FLOPs per byte."""

    flops: float
    bytes: float
    slope: str  # the label of the sloping part
    flat: str = ""  # the label of the flat part
    dashed: bool = False


# What is drawn --------------------------------------------------------------------------------------------------


def data(
    *methods: str | tuple[str, Cost], d: int = 128, chip: chips.Chip = chips.H200, message: str = "", **sizes: Any
) -> dict:
    """Return the arguments of draw() for the given methods or, if none are given, for the ladder.

    Each method is drawn at the highest speed that the chip allows. Its x-coordinate is its FLOPs per byte of DRAM
    traffic if DRAM limits the method, and its FLOPs per requested byte otherwise. `message` is the headline and must be
    a full sentence. `sizes` are arguments of rates.cost().
    """
    if not methods:
        return ladder(d)
    costs = dict(m if isinstance(m, tuple) else (m, cost(m, d=d, chip=chip, **sizes)) for m in methods)
    rate = rates(chip)
    top, flat = rate.tensor / 1e12, f"tensor cores {rate.tensor / 1e12:.0f} TFLOP/s"
    points, words = {}, []
    for name, method in costs.items():
        unit, seconds = method.limit(chip)
        height = method.flops / seconds / 1e12
        bytes_of = "dram_bytes" if unit == "DRAM" else "requested_bytes"
        points[LONG_NAMES.get(name, name)] = (method.intensity(bytes_of), height, unit)
        words.append(f"{height:.0f} TFLOP/s for {name} ({unit})")
    slow = {unit for *_, unit in points.values()}
    roofs = [Roof(top, rate.l2 / 1e12, f"L2 {rate.l2 / 1e12:.1f} TB/s", flat)] if slow != {"DRAM"} else []
    if "DRAM" in slow:
        roofs.append(Roof(top, rate.dram / 1e12, f"DRAM {rate.dram / 1e12:.1f} TB/s", "" if roofs else flat))
    bounds = f"On an {chip.name}, the upper bound is {words[0]}."
    if len(words) > 1:
        bounds = f"On an {chip.name}, the upper bounds are {join_with_and(words)}."
    dots, xlabel = "A dot counts FLOPs per requested byte.", "FLOPs per byte requested"
    if slow == {"DRAM"}:
        dots, xlabel = "A dot counts FLOPs per byte that reaches DRAM.", "FLOPs per byte from DRAM"
    elif "DRAM" in slow:
        dots = "A dot counts FLOPs per byte that reaches DRAM if DRAM limits it, and per requested byte otherwise."
        xlabel = "FLOPs per byte"
    caption = " ".join(filter(None, [message, bounds, dots]))
    return dict(points=points, roofs=roofs, caption=caption, xlabel=xlabel)


def join_with_and(words: list[str]) -> str:
    """Join the words into an enumeration such as "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def ladder(d: int) -> dict:
    """Return the arguments of draw() for the rungs in DRAWN, measured without a mask.

    The coordinates of a rung are its FLOPs per byte of DRAM traffic and its measured TFLOP/s.
    """
    record = load("ladder")
    row = reasons.forward_row(record, causal=False, d=d)
    moved = dram_bytes(record, d)
    rungs = [name for name in row.values if name in moved and name[1:3] in DRAWN]
    points = {name: (row.flops / moved[name], row.rate(name)) for name in rungs}
    chip, p = chips.find(record.machine["gpu"]), row.problem
    gemm, copy = record.ceilings["GEMM TFLOP/s"], record.ceilings["copy TB/s"]
    flops, speed = chip.tensor_flops_per_second / 1e12, chip.hbm_bytes_per_second / 1e12
    roofs = [
        Roof(gemm, copy, f"a copy: {copy:.2f} TB/s", f"a GEMM: {gemm:.0f}"),
        Roof(flops, speed, "", f"datasheet: {flops:.0f} TFLOP/s, {speed:.1f} TB/s", dashed=True),
    ]
    caption = (
        "From rung 03 on, DRAM would allow the full speed of the tensor cores. The solid roofline is a copy and a"
        f" matmul in the same run, and the dashed one is the datasheet of an {chip.name}. {record.setup()}; forward,"
        f" batch {p['batch']}, {p['heads']} heads, N = {p['N_q']:,}, d = {d}, no mask."
    )
    xlabel = "FLOPs per byte that DRAM moved (hardware counters)"
    return dict(points=points, roofs=roofs, caption=caption, xlabel=xlabel, height=4.2)


def dram_bytes(record: Record, d: int) -> dict[str, float]:
    """Return {rung: bytes of DRAM traffic in one call} for the rungs with recorded hardware counters."""
    rows = [r for r in record.rows if r.direction == "counters" and r.problem["d"] == d and set(DRAM) <= set(r.values)]
    return {r.problem["rung"]: sum(r.values[name][0] for name in DRAM) for r in rows}


def rung_label(rung: str) -> str:
    """Return the number and name of a rung. If `rung` is not a rung, return it unchanged."""
    return rung[1:].replace("_", " ") if re.match(r"r\d\d_", rung) else rung


# The picture ----------------------------------------------------------------------------------------------------

Point = tuple[float, float] | tuple[float, float, str]  # FLOPs per byte, TFLOP/s and, for a method, the limiting unit
FILL_BELOW = style.tint(style.INK, 0.05)  # the fill below a ceiling
LONG = 20  # on a phone, a name longer than this gets more room, and its limit is not printed
LINE = 0.2  # inches from one line of text to the next


@style.picture
def draw(
    points: dict[str, Point],
    roofs: list[Roof],
    caption: str,
    xlabel: str,
    height: float = 2.6,
    limit: tuple[float, str] | None = None,
) -> style.Drawn:
    """Draw TFLOP/s as a function of FLOPs per byte, on logarithmic axes.

    `points` is {name: (FLOPs per byte, TFLOP/s)}. If a point has a third element, it names the unit that limits the
    method and is printed with the point. `limit` is (TFLOP/s, label) for a second, lower limit on the tensor
    cores.
    """
    figure, ax = style.new_figure(height + (0.5 if limit and style.is_narrow() else 0), caption)
    top = max(roof.flops for roof in roofs)
    across = [place[0] for place in points.values()]
    is_ladder = any(roof.dashed for roof in roofs)
    left, column, right = x_limits(min(across), max(across), is_ladder)
    has_units = any(len(place) > 2 for place in points.values())  # whether to print limiting units
    if has_units:
        left, column, right = min(4 if style.is_narrow() else inf, 0.1 * min(across)), inf, 2500
        if style.is_narrow() and max(map(len, points)) > LONG:
            left, right = 2, 10000
    elif not is_ladder and max(across) < column / 60:
        right = max(300, 30 * max(across))  # leaves room for every name beside its dot
    least = min(place[1] for place in points.values())
    low = 0.4 * least if has_units else min(50, 0.5 * least)
    high = (2.6 if has_units and style.is_narrow() else 1.9) * top
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="TFLOP/s", xlim=(left, right), ylim=(low, high))
    if is_ladder and style.is_narrow():
        ax.set_xlabel(xlabel.replace(" (", "\n("))
    last = max(2 * max(across), 1000)  # names are written to the right of this x-coordinate
    labels = (6 if style.is_narrow() else 14) * log10(min(last, right) / left) / log10(right / left)  # ticks that fit
    style.log_ticks(ax.xaxis, style.log_places(left, min(last, right), max_ticks=int(labels)))
    style.log_ticks(ax.yaxis, style.log_places(low, high))
    highest = max((roof for roof in roofs if not roof.dashed), key=lambda roof: roof.bytes)
    begin = max(left, low / highest.bytes)
    corners = [begin, highest.flops / highest.bytes, right], [begin * highest.bytes, highest.flops, highest.flops]
    ax.fill_between(corners[0], low, corners[1], color=FILL_BELOW, linewidth=0, zorder=-1)
    for number, roof in enumerate(roofs):
        _draw_roof(ax, roof, left, right, label_on_left=number == 0, label_below=is_ladder, has_units=has_units)
        if has_units:
            free = max(place[1] for place in points.values()) < 0.9 * top
            _label_roof(ax, roof, right, label_on_left=number == 0, flat_is_free=free, has_limit=limit is not None)
    if limit:
        flops, words = limit
        ax.plot([flops / roofs[0].bytes, right], [flops, flops], color=style.QUIET, linewidth=1, linestyle="--")
        style.note(ax, right / 1.05, 0.97 * flops, words, ha="right", va="top", color=style.QUIET)
    _draw_points(ax, points, column, min(roof.flops for roof in roofs), limit[0] if limit else 0)
    reached = "; ".join(f"{_describe_point(name, place)}" for name, place in points.items())
    walls = "; ".join(f"{roof.bytes:.2f} TB/s up to {roof.flops:.0f} TFLOP/s" for roof in roofs)
    alt = f"Log-log roofline, TFLOP/s over FLOPs per byte. Roofs: {walls}. Points, in TFLOP/s: {reached}."
    return figure, alt


def x_limits(low: float, high: float, is_ladder: bool) -> tuple[float, float, float]:
    """Return the x-coordinates where the axis begins, where the column of names begins, and where both of them end.

    All coordinates are in FLOPs per byte. `low` and `high` are the smallest and the largest x-coordinate of a method.
    `is_ladder` is True for the ladder, whose many names need more room on a phone.
    """
    if style.is_narrow() and not is_ladder:
        return min(1, 0.1 * low), max(4200, 1.6 * high), max(1.5e6, 700 * high)
    if style.is_narrow():
        return min(2, 0.1 * low), max(5000, 2.3 * high), max(3e6, 1500 * high)
    return min(8, 0.4 * low), max(5000, 2.3 * high), max(60000, 25 * high)


def _describe_point(name: str, point: Point) -> str:
    x, y, *unit = point
    limited = f", limited by {unit[0]}" if unit else ""
    return f"{' '.join(rung_label(name).split())} {y:.0f} at {x:,.0f} FLOPs per byte{limited}"


def _label_roof(
    ax: style.Axes, roof: Roof, right: float, *, label_on_left: bool, flat_is_free: bool, has_limit: bool
) -> None:
    """Write the two labels of a ceiling: one beside its sloping part, below the methods, and one on its flat part.

    `label_on_left` puts the first label to the left of the sloping part instead of to its right. `flat_is_free` is
    True if no method is on the flat part, and `has_limit` is True if a second, lower limit is drawn as well.
    """
    low = ax.get_ylim()[0]
    y = max(0.25 * roof.flops, 1.25 * low) if label_on_left else 1.2 * low
    shift, ha = (0.8, "right") if label_on_left else (1.15, "left")
    style.note(ax, shift * y / roof.bytes, y, roof.slope, ha=ha)
    flat = roof.flat if flat_is_free or not style.is_narrow() else re.sub(r" (?=\d)", "\n", roof.flat, count=1)
    if has_limit and style.is_narrow() and not flat_is_free:
        flat = ""  # the lower limit leaves no room for the label
    place = (1.08, "bottom") if flat_is_free else (0.92, "top")
    style.note(ax, right / 1.05, place[0] * roof.flops, flat, ha="right", va=place[1])


def _draw_roof(
    ax: style.Axes, roof: Roof, left: float, right: float, *, label_on_left: bool, label_below: bool, has_units: bool
) -> None:
    """Draw a ceiling's sloping part and flat part from x = left to x = right, with their labels.

    `label_on_left` puts the first label to the left of the sloping part instead of below it, and `label_below` puts the
    second label under the flat part. A dashed ceiling is above a solid one, and its label is above its line. If the
    units that limit the methods are known (`has_units`), _label_roof() writes the labels instead.
    """
    ridge = roof.flops / roof.bytes
    look = dict(color=style.QUIET, linewidth=0.9, linestyle="--") if roof.dashed else dict(color=style.INK)
    begin = max(left, ax.get_ylim()[0] / roof.bytes)
    ax.plot([begin, ridge, right], [begin * roof.bytes, roof.flops, roof.flops], **look)
    if has_units:
        return
    if label_on_left:
        words = re.sub(r":? (?=\d)", "\n", roof.slope, count=1) if style.is_narrow() else roof.slope
        style.note(ax, 0.4 * ridge, 0.5 * roof.flops, words, ha="right", va="bottom")
    else:
        style.note(ax, 0.16 * ridge, (0.078 if style.is_narrow() else 0.1) * roof.flops, roof.slope, va="top")
    if roof.dashed:
        style.note(ax, right / 1.05, 1.06 * roof.flops, roof.flat, ha="right", va="bottom", color=style.QUIET)
    elif label_below and style.is_narrow():
        style.note(ax, 0.6 * ridge, roof.flops, roof.flat, ha="right")
    elif label_below:
        style.note(ax, 1.05 * ridge, 0.93 * roof.flops, roof.flat, va="top")
    else:
        style.note(ax, 1.05 * ridge, 1.12 * roof.flops, roof.flat, va="bottom")


def _draw_points(ax: style.Axes, points: dict[str, Point], column: float, roof: float, limit: float) -> None:
    """Draw a dot for each method, and write its name in a column on the right, which begins at x = `column`.

    The name of a method that is too far from the column is written next to its dot. `roof` is the lowest ceiling,
    and `limit` is a second, lower limit on the tensor cores, or 0. Names avoid both of these lines.
    """
    crowd = {name: place for name, place in points.items() if place[0] >= column / 60}
    decades = log10(ax.get_ylim()[1] / ax.get_ylim()[0]) / ax.figure.get_figheight()
    gap = LINE * decades * max(name.count("\n") + 1 for name in points)
    heights = spread_labels([log10(place[1]) for place in crowd.values()], gap, top=log10(roof) - 0.75 * gap)
    units = {place[2] for place in points.values() if len(place) > 2}
    for name, (x, y, *unit) in points.items():
        color = style.OURS if name in ("fa2_lab", f"r{DRAWN[-1]}_wide") else style.INK
        words = f"{rung_label(name)}: {y:.0f}"
        if unit and not (style.is_narrow() and (y == limit or len(name) > LONG)):
            words += f" ({unit[0]})" if style.is_narrow() else f", limited by {unit[0]}"
        ax.plot(x, y, "o", color=color, markersize=8 if units else 5)
        for bound in (other[1] for other in points.values() if units and not unit and other[0] == x and other[1] > y):
            style.arrow(ax, (x, bound), (x, y), color, shrinkA=6, shrinkB=6, linewidth=1.6)
            words += f", {y / bound:.0%} of it"
        if name in crowd:
            height = 10 ** heights[list(crowd).index(name)]
            ax.plot([x, 0.95 * column], [y, height], color=style.QUIET, linewidth=0.6, zorder=0)
            style.note(ax, column, height, words, color=color)
        elif y > 0.9 * roof and unit:  # the name goes above the ceiling
            style.beside(ax, words.replace(" (", "\n("), (x, y), (0, 6), va="bottom", color=color)
        elif len(units) > 1 and unit == ["L2"] and "DRAM" in units:  # on the right, the DRAM line would cross the name
            style.beside(ax, words.replace(": ", ":\n"), (x, y), (-12, 4), ha="right", color=color)
        else:
            name_below = any(0.75 * y < other < y for _, other, *_ in points.values())
            shift = (8, -4)
            if y > 0.9 * roof or 0.75 * limit < y <= limit:  # the name goes below the line, not on it
                shift = (8, -10)
            elif name_below and unit and (style.is_narrow() or not limit):
                shift = (16, 4)
            style.beside(ax, words, (x, y), shift, color=color)


def spread_labels(values: list[float], gap: float, top: float = inf) -> list[float]:
    """Return heights for the labels of these values: in the same order, at least `gap` apart, and none above `top`.

    Under these conditions, the heights are as close to the values as possible.
    """
    order = sorted(range(len(values)), key=lambda n: values[n])
    pools: list[list[float]] = []  # groups of labels that touch; each group stays centred on its values
    for place, n in enumerate(order):
        pools.append([values[n] - gap * place])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) >= sum(pools[-1]) / len(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    highest = top - gap * (len(values) - 1)
    levels = [min(sum(pool) / len(pool), highest) for pool in pools for _ in pool]
    placed = {n: levels[place] + gap * place for place, n in enumerate(order)}
    return [placed[n] for n in range(len(values))]
