"""A picture of fa2_lab's speed divided by the speed of other implementations, suite by suite, with a line at 1."""

from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from fa2_lab.plots import style
from fa2_lab.records import Measurement, load

LOOKS = {  # in the order of the legend; the fastest implementations have strong marks
    "FlashAttention-3": dict(color=style.INK, marker="o", markersize=5.5),
    "cuDNN": dict(color=style.INK, marker="^", markersize=5.5, markerfacecolor=style.PAPER),
    "FlexAttention": dict(color=style.QUIET, marker="D", markersize=3.5),
    "torch flash": dict(color=style.QUIET, marker="s", markersize=3.5, markerfacecolor=style.PAPER),
}
RIVALS = ("FlashAttention-3", "cuDNN")  # for these, the whole range and each loss are drawn
SLOWER = "slower on one problem"
GRID = (2, 3, 5)  # ratios with a line from top to bottom
Ratios = tuple[str, str, dict[str, list[float]]]  # group, name, {implementation: ratios}


def data() -> dict:
    """Return the speed ratios over each implementation, from all suites that compare speed."""
    paper, sweep = load("paper"), load("sweep")
    rows: list[Ratios] = []
    for direction in ("forward", "backward"):
        for d in (64, 128):
            for causal in (False, True):
                mask = "causal" if causal else "non-causal"
                found = [m for m in of(paper.rows, direction) if (m.problem["d"], m.problem["causal"]) == (d, causal)]
                rows.append((f"The FA2 paper's grid, {direction}", f"d = {d}, {mask}", against(found)))
    rows += by_direction("The same, sustained", paper.sustained)
    rows += by_direction("64 query heads, 8 K/V heads", load("nvidia").rows)
    rows += by_direction("Causal, windows, softcap, sinks", load("masks").rows)
    rows += by_direction("Packed sequences", load("packed").rows)
    rows.append(("One query, a long cache", "decode", against(of(load("decode").rows, "decode"))))
    rows += by_direction("200 random shapes", sweep.rows)
    rows += by_direction("The same, with host time", sweep.sustained)
    return dict(rows=rows, setting=paper.made())


def of(rows: list[Measurement], direction: str) -> list[Measurement]:
    """Return the measurements in `rows` that have this direction ("forward", "backward" or "decode")."""
    return [row for row in rows if row.direction == direction]


def against(rows: list[Measurement]) -> dict[str, list[float]]:
    """Return {implementation: list of ratios}: fa2_lab's speed divided by the implementation's speed."""
    found = {name: [m.ratio("fa2_lab", name) for m in rows if name in m.values] for name in LOOKS}
    return {name: ratios for name, ratios in found.items() if ratios}


def by_direction(group: str, rows: list[Measurement]) -> list[Ratios]:
    """Return two rows of the picture for these measurements, one for the forward and one for the backward."""
    return [(group, direction, against(of(rows, direction))) for direction in ("forward", "backward")]


@style.picture
def draw(rows: list[Ratios], setting: str) -> style.Drawn:
    """Draw a row for each setting that shows the median ratio over each implementation.

    For the two fastest implementations, also draw the range of ratios, and a mark for each problem on which fa2_lab is
    slower.
    """
    ahead = sum(all(median(found) > 1 for found in ratios.values()) for _, _, ratios in rows)
    settings = f"all {len(rows)}" if ahead == len(rows) else f"{ahead} of {len(rows)}"
    headline = f"By the median ratio, fa2_lab is the fastest in {settings} settings"
    ranges = f"For {' and '.join(RIVALS)}, the fastest of the other implementations, a line also shows the range"
    gpu, dtype, *versions = setting.split(", ")
    caption = (
        f"{headline}. To the right of the line marked 'equal', fa2_lab is faster. The scale is logarithmic. Each mark "
        f"shows the median ratio for one setting. {ranges} of the ratios, and each short stroke marks a problem on "
        f"which fa2_lab is slower. We measured on an {gpu}, in {dtype}, with {' and '.join(versions)}."
    )
    groups = list(dict.fromkeys(row[0] for row in rows))
    figure, ax = style.new_figure(0.7 + (0.25 if style.narrow() else 0.205) * (len(rows) + len(groups)), caption)
    left = blended_transform_factory(figure.transFigure, ax.transData)
    y, places, labels = 0.0, [], []
    for group in groups:
        style.note(ax, 0.01, y, group, fontweight="bold", transform=left).set_in_layout(False)
        first = y + 0.5
        for _, name, ratios in (row for row in rows if row[0] == group):
            y += 1
            places.append(y)
            labels.append(name)
            ax.axhline(y, color=style.MASKED, linewidth=0.8, zorder=0)
            for peer, found in ratios.items():
                lane = y + {"FlashAttention-3": -0.24, "cuDNN": 0.24}.get(peer, 0)
                if peer in RIVALS:
                    ax.plot([min(found), max(found)], [lane, lane], color=style.QUIET, linewidth=0.8)
                    if losses := [x for x in found if x < 1]:
                        look = dict(color=style.INK, markersize=8, markeredgewidth=1.3, zorder=4)
                        ax.plot(losses, [lane] * len(losses), "|", label=SLOWER, **look)
                ax.plot([median(found)], [lane], linestyle="none", label=peer, zorder=3, **LOOKS[peer])
        ax.plot([1, 1], [first, y + 0.5], color=style.INK, linewidth=1.2, zorder=1)
        y += 1
    ax.vlines(GRID, -0.1, y - 0.4, color=style.MASKED, linewidth=0.8, zorder=0)
    ax.set(xscale="log", xlim=(0.5, 6.5), ylim=(y - 0.4, -0.6), yticks=places, yticklabels=labels)
    style.note(ax, 6.4, 0, "fa2_lab is faster →", ha="right")
    ticks = {0.5: "0.5×", 0.7: "0.7×", 1: "equal", 1.5: "1.5×", 2: "2×", 3: "3×", 5: "5×"}
    shown = [x for x in ticks if x in (0.5, 1, 2, 5) or (not style.narrow() and x > 1.5)]
    style.log_ticks(ax.xaxis, shown, [ticks[x] for x in shown])
    ax.xaxis.tick_top()
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)
    legend_on_top(figure, ax)
    medians = "; ".join(f"{group}: {spread(rows, group)}" for group in groups)
    return figure, f"Speed ratios with a line at 1, one row for each setting. Medians: {medians}."


def legend_on_top(figure: Figure, ax: Axes) -> None:
    """Add the legend between the headline and the drawing, and make the figure higher by as much."""
    drawn = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    for name in filter(drawn.get, RIVALS):  # the range, behind the mark
        drawn[name] = (Line2D([], [], color=style.QUIET, linewidth=0.8), drawn[name])
    names = [name for name in (*LOOKS, SLOWER) if name in drawn]
    columns = 1 if style.narrow() else 3
    room = 0.2 * -(-len(names) // columns)
    inches = figure.get_figheight() + room
    style.set_height(figure, inches)
    figure.get_layout_engine().set(w_pad=0.08, rect=(0, 0, 1, 1 - (style.GAP + room) / inches))
    below = 0.23 * (1 + figure.get_suptitle().count("\n")) + style.GAP
    legend = figure.legend(
        [drawn[name] for name in names],
        [name if name in (*RIVALS, SLOWER) else f"{name}, median only" for name in names],
        loc="upper left",
        bbox_to_anchor=(0.012, 1 - below / inches),
        borderaxespad=0,
        borderpad=0,
        ncols=columns,
        frameon=False,
        fontsize=style.SMALL,
        handletextpad=0.3,
        columnspacing=1.2,
    )
    legend.set_in_layout(False)


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
