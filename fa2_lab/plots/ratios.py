"""A picture of fa2_lab's speed divided by the speed of other implementations, suite by suite, with a line at 1."""

from statistics import median

from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from fa2_lab.plots import style
from fa2_lab.records import Measurement, load

RIVALS = {  # the fastest of the other implementations: each has a lane in every row
    "FlashAttention-3": dict(color=style.BLUE, marker="o", markersize=7),
    "cuDNN": dict(color=style.VERMILION, marker="^", markersize=7.5),
}
FAR = ("FlexAttention", "torch flash")  # each has a column of numbers
LOW, HIGH = 0.75, 1.8  # the ratios at the ends of the scale
TICKS = {0.8: "0.8×", 0.9: "0.9×", 1: "equal", 1.1: "1.1×", 1.2: "1.2×", 1.4: "1.4×", 1.6: "1.6×", 1.8: "1.8×"}
KEY = ("Speed of fa2_lab ÷ speed of another implementation.", "Mark and number: median. Bar: all problems of a row.")
LINE = 0.168  # inches of a line of small letters
Ratios = tuple[str, str, dict[str, list[float]]]  # group, name, {implementation: ratios}


def data() -> dict:
    """Return the speed ratios over each implementation, from the suites that the picture shows."""
    paper, sweep = load("paper"), load("sweep")
    rows: list[Ratios] = []
    for direction in ("forward", "backward"):
        for d in (64, 128):
            for causal in (False, True):
                mask = "causal" if causal else "non-causal"
                found = [m for m in of(paper.rows, direction) if (m.problem["d"], m.problem["causal"]) == (d, causal)]
                rows.append((f"The FA2 paper's grid, {direction}", f"d = {d}, {mask}", against(found)))
    rows += by_direction("The FA2 paper's grid, sustained", paper.sustained)
    rows += by_direction("64 query heads, 8 K/V heads", load("nvidia").rows)
    rows += by_direction("Causal, windows, softcap, sinks", load("masks").rows)
    rows += by_direction("Packed sequences", load("packed").rows)
    rows.append(("One query, a long cache", "decode", against(of(load("decode").rows, "decode"))))
    rows += by_direction("200 random shapes", sweep.rows)
    rows += by_direction("200 random shapes, with host time", sweep.sustained)
    return dict(rows=rows, setting=paper.made())


def of(rows: list[Measurement], direction: str) -> list[Measurement]:
    """Return the measurements in `rows` that have this direction ("forward", "backward" or "decode")."""
    return [row for row in rows if row.direction == direction]


def against(rows: list[Measurement]) -> dict[str, list[float]]:
    """Return {implementation: list of ratios}: fa2_lab's speed divided by the implementation's speed."""
    found = {name: [m.ratio("fa2_lab", name) for m in rows if name in m.values] for name in (*RIVALS, *FAR)}
    return {name: ratios for name, ratios in found.items() if ratios}


def by_direction(group: str, rows: list[Measurement]) -> list[Ratios]:
    """Return two rows of the picture for these measurements, one for the forward and one for the backward."""
    return [(group, direction, against(of(rows, direction))) for direction in ("forward", "backward")]


@style.picture
def draw(rows: list[Ratios], setting: str) -> style.Drawn:
    """Draw a row for each setting, with a lane for each of the fastest implementations.

    A lane has a mark at the median ratio, a bar over the range of the ratios, and the number of problems on which
    fa2_lab is slower. For the other implementations, the row has only the medians, as numbers.
    """
    ahead = sum(all(median(found) > 1 for found in ratios.values()) for _, _, ratios in rows)
    settings = f"all {len(rows)}" if ahead == len(rows) else f"{ahead} of {len(rows)}"
    gpu, dtype, *versions = setting.split(", ")
    caption = (
        f"By the median ratio, fa2_lab is the fastest in {settings} settings. "
        f"The ratio is the speed of fa2_lab divided by the speed of the other implementation, on a logarithmic scale. "
        f"An arrow at the end of a bar gives a ratio beyond the scale. "
        f"We measured on an {gpu}, in {dtype}, with {' and '.join(versions)}."
    )
    groups = list(dict.fromkeys(row[0] for row in rows))
    stacks = style.narrow()  # then the name and the numbers of a row are above its lanes
    high = 3.1 if stacks else 2.1  # of a row, in lines
    top, bottom = -3.4 if stacks else -1.2, (high + 0.25) * len(rows) + 1.5 * len(groups)
    figure, ax = style.new_figure((bottom - top + 4) * LINE * style.width() / style.across(), caption)
    ends = dict(zip(FAR, (0.75, 0.99) if stacks else (0.875, 0.992), strict=True))  # of the columns of numbers
    across = blended_transform_factory(ax.transAxes, ax.transData)
    for peer, end in ends.items():
        style.note(ax, end, -0.5, peer, ha="right", transform=across)
    for (peer, look), start in zip(RIVALS.items(), (0.015, 0.42 if stacks else 0.2), strict=True):
        ax.plot([start], [-1.7 if stacks else -0.5], linestyle="none", transform=across, **look)
        style.note(ax, start + (0.03 if stacks else 0.018), -1.7 if stacks else -0.5, peer, transform=across)
    style.beside(ax, "← slower", (1, top + 0.7), (-6, 0), ha="right")
    style.beside(ax, "fa2_lab is faster →", (1, top + 0.7), (6, 0))
    y = 0.0
    for group in groups:
        style.note(ax, 0, y + 0.75, group, fontweight="bold", transform=across)
        y += 1.5
        for k, (_, name, ratios) in enumerate(row for row in rows if row[0] == group):
            style.bars(ax, [(0, y, 1, high)], style.MASKED, transform=across, zorder=0)
            at = y + (0.6 if stacks else high / 2)
            style.note(ax, 0.01, at, name, transform=across)
            for peer, end in ends.items():
                words = f"{median(ratios[peer]):.2f}×" if peer in ratios else "–"
                style.note(ax, end, at, words, ha="right", transform=across)
            for lane, (peer, look) in enumerate(RIVALS.items(), start=-1):
                if peer in ratios:
                    draw_lane(ax, y + high - 0.55 + lane, ratios[peer], look, "" if k else peer)
            lanes = [y + stacks, y + high]
            ax.vlines(list(TICKS), *lanes, color=style.PAPER, linewidth=0.8, zorder=0.5)
            ax.plot([1, 1], lanes, color=style.INK, linewidth=1.2, zorder=1.5)
            y += high + 0.25
    ax.set(xscale="log", xlim=(LOW, HIGH) if stacks else (0.56, 2.57), ylim=(bottom, top), yticks=[])
    shown = [x for x in TICKS if not stacks or x not in (1.1, 1.8)]
    style.log_ticks(ax.xaxis, shown, [TICKS[x] for x in shown])
    ax.tick_params(axis="x", top=True, labeltop=True, labelbottom=True)
    ax.xaxis.set_label_position("top")
    ax.set_xlabel(("\n" if stacks else " ").join(KEY), loc="left", fontsize=style.SMALL, labelpad=8)
    ax.spines[:].set_visible(False)
    medians = "; ".join(f"{group}: {spread(rows, group)}" for group in groups)
    return figure, f"Speed ratios, one row for each setting. Medians: {medians}."


def draw_lane(ax: Axes, y: float, found: list[float], look: dict, name: str) -> None:
    """Draw the ratios over one implementation: their range, their median, and the number of ratios below 1."""
    least, most, middle = min(found), max(found), median(found)
    low, high, color = max(least, LOW), min(most, HIGH), style.tint(look["color"], 0.55)
    style.bars(ax, [(low, y - 0.42, high - low, 0.84)], color, zorder=1)
    ax.plot([middle], [y], linestyle="none", markeredgecolor=style.PAPER, zorder=3, **look)
    if slower := sum(x < 1 for x in found):
        words = f"{slower} of {len(found)} slower"
        if least < LOW:
            words = f"← {least:.2f}, {words.removesuffix(' slower') if style.narrow() else words}"
        style.beside(ax, words, (1, y), (-4, -0.5), ha="right")
    beyond = f"{most:.2f} →" if most > HIGH else ""
    if middle > 1.5:  # little room is left on the right
        style.beside(
            ax, f"{middle:.2f} (to {beyond})" if beyond else f"{middle:.2f}", (middle, y), (-6, -0.5), ha="right"
        )
    else:
        style.beside(ax, f"{middle:.2f}", (middle, y), (6, -0.5))
        style.beside(ax, beyond or (name if most < 1.36 else ""), (HIGH, y), (-2, -0.5), ha="right")


def spread(rows: list[Ratios], group: str) -> str:
    """Return as text, for each implementation, the smallest and the largest median in the rows of a group."""
    every: dict[str, list[float]] = {}
    for _, _, ratios in (row for row in rows if row[0] == group):
        for name, found in ratios.items():
            every.setdefault(name, []).append(median(found))
    return ", ".join(f"{min(found):.2f} to {max(found):.2f} × {name}" for name, found in every.items())


def won(rows: list[Ratios], name: str) -> tuple[int, int]:
    """Return (wins, problems) of fa2_lab against the implementation `name`."""
    found = [x for _, _, ratios in rows for x in ratios.get(name, ())]
    return sum(x > 1 for x in found), len(found)
