"""Chart of fa2_lab's speed relative to other implementations, suite by suite, with a line at 1."""

from statistics import median

from matplotlib.axes import Axes
from matplotlib.transforms import Transform, blended_transform_factory

from fa2_lab.plots import style
from fa2_lab.records import Measurement, load

FAST_PEERS = {  # the fastest other implementations, which have separate lanes in each row
    "FlashAttention-3": dict(color=style.BLUE, marker="o", markersize=6),
    "FlashAttention-4": dict(color=style.GREEN, marker="s", markersize=5.5),
    "cuDNN": dict(color=style.VERMILION, marker="^", markersize=6.5),
}
SLOW_PEERS = ("FlexAttention", "torch flash")  # without lanes, because they are slower in almost all rows
LOW, HIGH = 0.8, 1.5  # the ratios at the ends of the scale
TICKS = {0.8: "0.8×", 0.9: "0.9×", 1: "equal", 1.1: "1.1×", 1.2: "1.2×", 1.3: "", 1.4: "1.4×", 1.5: ""}
AGAIN = 1.2, 1.4  # the ticks that each group repeats on a page
LEGEND = (
    "Ratio: the speed of fa2_lab divided by another's.\n"
    "Mark and number: median. Bar: all problems of the row.\n"
    "Arrowhead: beyond the scale, which is logarithmic.\n"
    "Outlined row: slower, by median, than at least one."
)
# The following x-coordinates are fractions of the picture's width.
SCALE = (0.22, 0.77), (0.02, 0.62)  # the scale's left and right ends, on a page and on a phone
LANE, SLOWER = (0.787, 0.66), 0.99  # a lane's median on a page and on a phone; the count of slower problems
# The x-coordinates of the legend's entries, on a page and on a phone
LEGEND_STARTS = ((0.015, 0.21, 0.405), (0.015, 0.36, 0.71))
LINE = 0.16  # inches per line of small text
Ratios = tuple[str, str, dict[str, list[float]]]  # (group, name, {implementation: ratios})


def data() -> dict:
    """Return fa2_lab's speed relative to every other implementation, for the suites that the picture shows.

    Suites that contain a setting in which fa2_lab is slower come first.
    """
    paper, sweep = load("paper"), load("sweep")
    rows: list[Ratios] = []
    for direction in ("forward", "backward"):
        for d in (64, 128):
            for causal in (False, True):
                mask = "causal" if causal else "non-causal"
                cases = [
                    m
                    for m in of_direction(paper.rows, direction)
                    if (m.problem["d"], m.problem["causal"]) == (d, causal)
                ]
                rows.append((f"The FA2 paper's grid, {direction}", f"d = {d}, {mask}", ratios_to_others(cases)))
    rows += two_directions("The FA2 paper's grid, sustained", paper.sustained)
    rows += two_directions("64 query heads, 8 K/V heads", load("nvidia").rows)
    rows += two_directions("Causal, windows, softcap, sinks", load("masks").rows)
    rows += two_directions("Packed sequences", load("packed").rows)
    rows.append(("One query, a long cache", "decode", ratios_to_others(of_direction(load("decode").rows, "decode"))))
    rows += two_directions("200 random shapes", sweep.rows)
    rows += two_directions("200 random shapes, with host time", sweep.sustained)
    rows += two_directions("Long sequences, one head", load("long").rows)
    short = load("small").rows
    names = {"forward": "forward", "both": "forward and backward"}
    rows += [
        ("Short calls, with host time", name, ratios_to_others(of_direction(short, direction)))
        for direction, name in names.items()
    ]
    losing = {group for group, _, ratios in rows if faster_implementations(ratios)}
    return dict(rows=sorted(rows, key=lambda row: row[0] not in losing), setting=paper.setup())


def of_direction(rows: list[Measurement], direction: str) -> list[Measurement]:
    """Return the measurements in `rows` that were made in one direction, for example "forward"."""
    return [row for row in rows if row.direction == direction]


def ratios_to_others(rows: list[Measurement]) -> dict[str, list[float]]:
    """Return {implementation: list of ratios of fa2_lab's speed to the implementation's speed}."""
    by_name = {
        name: [m.ratio("fa2_lab", name) for m in rows if name in m.values] for name in (*FAST_PEERS, *SLOW_PEERS)
    }
    return {name: ratios for name, ratios in by_name.items() if ratios}


def two_directions(group: str, rows: list[Measurement]) -> list[Ratios]:
    """Return two rows of the picture for these measurements, one for the forward pass and one for the backward pass."""
    return [
        (group, direction, ratios_to_others(of_direction(rows, direction))) for direction in ("forward", "backward")
    ]


@style.picture
def draw(rows: list[Ratios], setting: str) -> style.Drawn:
    """Draw a row for each setting, with a lane for each of the fastest implementations.

    In a lane, a mark shows the median ratio, and a bar shows the range of the ratios. Beside the lane are the value of
    the median and the number of problems on which fa2_lab is slower. The implementations in SLOW_PEERS have no lanes.
    The legend states in how many rows they are slower than fa2_lab.
    """
    losses = [
        (f"{group}, {name}", slower) for group, name, ratios in rows if (slower := faster_implementations(ratios))
    ]
    gpu, dtype, *versions = setting.split(", ")
    ties = sum(min(medians(ratios).values()) == 1 for *_, ratios in rows)
    counts = f"is fastest in {len(rows) - len(losses) - ties} of {len(rows)} settings"
    counts += f", ties in {ties} and loses in {len(losses)}" if ties else f" and loses in {len(losses)}"
    caption = (
        f"By median, fa2_lab {counts}."
        f" fa2_lab loses in these rows: {'; '.join(f'in “{name}”, it has {slower}' for name, slower in losses)}."
        f" The suites in which fa2_lab loses a row come first."
        f" {slower_implementations(rows)}"
        f" We measured on an {gpu}, in {dtype}, with {' and '.join(versions)}."
    )
    groups = list(dict.fromkeys(row[0] for row in rows))
    is_stacked = style.is_narrow()  # on a phone, a row's name and numbers are above its lanes
    heights = [0.1 + is_stacked + sum(peer in ratios for peer in FAST_PEERS) for *_, ratios in rows]  # in lines
    top, bottom = -2.9, sum(heights) + 0.25 * len(rows) + 1.5 * len(groups)
    figure, ax = style.new_figure((bottom - top + 6) * LINE * style.width_in_units() / style.width_in_inches(), caption)
    across = blended_transform_factory(ax.transAxes, ax.transData)
    draw_legend(ax, -0.5, across)
    style.note(ax, SLOWER, 0.75 if is_stacked else -0.5, "slower on", ha="right", transform=across, color=style.QUIET)
    style.beside(ax, "← slower", (1, top + 0.7), (-6, 0), ha="right")
    style.beside(ax, "fa2_lab is faster →", (1, top + 0.7), (6, 0))
    y, group_above = 0.0, ""
    for row, height in zip(rows, heights, strict=True):
        if row[0] != group_above:
            style.note(ax, 0, y + 0.75, row[0], fontweight="bold", transform=across)
            for x in () if is_stacked or not y else AGAIN:
                style.note(ax, x, y + 0.75, TICKS[x], ha="center", color=style.QUIET)
            y, group_above = y + 1.5, row[0]
        _draw_row(ax, y, height, row, across)
        y += height + 0.25
    _set_scale(ax, (bottom, top))
    ax.set_xlabel(LEGEND, loc="left", fontsize=style.SMALL, labelpad=8)
    middles = "; ".join(f"{group}: {median_ranges(rows, group)}" for group in groups)
    middles = middles.replace("FlashAttention-", "FA")
    return figure, f"Speed ratios, one row for each setting. FA3 is FlashAttention-3. Medians: {middles}."


def _draw_row(ax: Axes, y: float, height: float, row: Ratios, across: Transform) -> None:
    """Draw a row's background, name and lanes. The background is outlined if fa2_lab is slower than a peer."""
    (_, name, ratios), is_stacked = row, style.is_narrow()
    edge = dict(edgecolor=style.INK, linewidth=1.4 if faster_implementations(ratios) else 0)
    style.bars(ax, [(0.002, y, 0.996, height)], style.MASKED, transform=across, zorder=0, **edge)
    style.note(ax, 0.01, y + (0.6 if is_stacked else height / 2), name, transform=across)
    number_place = (LANE[is_stacked], across)
    for lane, peer in enumerate(peer for peer in FAST_PEERS if peer in ratios):
        draw_lane(ax, y + is_stacked + 0.55 + lane, ratios[peer], FAST_PEERS[peer], number_place)
    ends = [y + is_stacked, y + height]
    ax.vlines(list(TICKS), *ends, color=style.PAPER, linewidth=0.8, zorder=0.5)
    ax.plot([1, 1], ends, color=style.INK, linewidth=1.2, zorder=1.5)


def _set_scale(ax: Axes, ylim: tuple[float, float]) -> None:
    """Set the logarithmic scale of the ratios, with its ticks above and below the rows."""
    left, right = SCALE[style.is_narrow()]
    whole = (HIGH / LOW) ** (1 / (right - left))  # x at the right end of the axes divided by x at the left end
    ax.set(xscale="log", xlim=(LOW / whole**left, HIGH * whole ** (1 - right)), ylim=ylim, yticks=[])
    ticks = [x for x in TICKS if x not in (0.9, 1.1) or not style.is_narrow()]
    style.log_ticks(ax.xaxis, ticks, [TICKS[x] for x in ticks])
    ax.tick_params(axis="x", top=True, labeltop=True, labelbottom=True)
    ax.xaxis.set_label_position("top")
    ax.spines[:].set_visible(False)


def slower_implementations(rows: list[Ratios]) -> str:
    """Return a sentence that states in how many rows each of SLOW_PEERS is slower than fa2_lab by median."""
    counts = []
    for peer in SLOW_PEERS:
        found = [middles[peer] for *_, ratios in rows if peer in (middles := medians(ratios))]
        counts.append(f"{peer} in {sum(x > 1 for x in found)} of {len(found)}")
    return f"Other implementations are not drawn, but slower in almost all rows: {', '.join(counts)}."


def draw_legend(ax: Axes, y: float, across: Transform) -> None:
    """Draw the legend, with the mark and the name of each fast peer, in a line at height y."""
    narrow = style.is_narrow()
    for (peer, look), start in zip(FAST_PEERS.items(), LEGEND_STARTS[narrow], strict=True):
        ax.plot([start], [y], linestyle="none", transform=across, **look)
        style.note(ax, start + (0.03 if narrow else 0.018), y, peer, transform=across)


def draw_lane(ax: Axes, y: float, ratios: list[float], look: dict, number_place: tuple[float, Transform]) -> None:
    """Draw the range and the median of fa2_lab's speed relative to one implementation, with two numbers beside them.

    The numbers are the median, at `number_place` = (x, transform), and the number of problems on which fa2_lab is
    slower. An arrowhead marks the end of a range that continues beyond the scale. If the median is also beyond the
    scale, the arrowhead is drawn in full colour.
    """
    (x, across), middle, slower = number_place, median(ratios), sum(x < 1 for x in ratios)
    low, high = (min(max(x, LOW), HIGH) for x in (min(ratios), max(ratios)))
    color = style.tint(look["color"], 0.7)
    style.DARK[color] = style.mix(look["color"], style.DARK_PAPER, 0.5)  # makes marks stand out against a dark bar
    style.bars(ax, [(low, y - 0.42, high - low, 0.84)], color, zorder=1)
    if LOW <= middle <= HIGH:
        ax.plot([middle], [y], linestyle="none", markeredgecolor=style.INK, zorder=3, **look)
    for end, limit, marker in ((low, LOW, "<"), (high, HIGH, ">")):
        if end == limit:
            full = look["color"] if not LOW <= middle <= HIGH else color
            ax.plot([end], [y], marker, color=full, markersize=9, markeredgewidth=0, zorder=1)
    ax.plot([x], [y], linestyle="none", transform=across, **look)
    style.note(ax, x + (0.03 if style.is_narrow() else 0.015), y, f"{middle:.2f}×", transform=across)
    if slower:
        style.note(ax, SLOWER, y, f"{slower} of {len(ratios)}", ha="right", transform=across, color=style.QUIET)


def medians(ratios: dict[str, list[float]]) -> dict[str, float]:
    """Return {implementation: median ratio}, rounded to the printed precision. A ratio of 1.00 means equal speed."""
    return {name: round(median(values), 2) for name, values in ratios.items()}


def faster_implementations(ratios: dict[str, list[float]]) -> str:
    """List the implementations that are faster than fa2_lab by median, with their median ratios."""
    slower = [f"{middle:.2f} of the speed of {name}" for name, middle in medians(ratios).items() if middle < 1]
    return " and ".join(slower)


def median_ranges(rows: list[Ratios], group: str) -> str:
    """Format, for each fast peer, the smallest and the largest median ratio in the rows of `group`."""
    medians_by_name: dict[str, list[float]] = {}
    for _, _, ratios in (row for row in rows if row[0] == group):
        for name in FAST_PEERS.keys() & ratios:
            medians_by_name.setdefault(name, []).append(median(ratios[name]))
    return ", ".join(f"{name} {min(values):.2f}–{max(values):.2f}" for name, values in sorted(medians_by_name.items()))


def all_ratios(rows: list[Ratios], name: str) -> list[float]:
    """Return the ratios of fa2_lab's speed to that of the implementation `name`, for the problems in all rows."""
    return [x for _, _, ratios in rows for x in ratios.get(name, ())]
