"""Diagram of the lanes and registers that hold a row of S, and of the exchanges that yield the row's maximum."""

import numpy as np

from fa2_lab.machine.layouts import Owners, parse
from fa2_lab.plots import style
from fa2_lab.records import layouts_record


def data(row: int = 21, d: int = 128) -> dict:
    """Return the arguments of draw() for one row of S in the compiled kernel with head dimension d.

    The arguments include the lane and register that hold each score of a wgmma result, and the maximum that each lane
    of the row holds after each step.
    """
    record = layouts_record()
    (kernel,) = [k for k in record["layouts"] if k["target"] == "sm_90" and k["d"] == d]
    shape = (64, kernel["B_c"])
    owners = parse(kernel["S"]["layout"]).owners(shape)
    tile = f"tile {kernel['B_r']} × {kernel['B_c']}, {kernel['warps']} warps"
    compiler = f"Triton {record['made_by']['triton']}, {tile}"
    scores = np.random.default_rng(2).integers(-99, 100, shape[1])
    lane = owners.lane[row]
    lanes = np.unique(lane)
    maxima = [np.array([scores[lane == t].max() for t in lanes])]
    for step in (1, 2):
        maxima.append(np.maximum(maxima[-1], maxima[-1][np.searchsorted(lanes, lanes ^ step)]))
    return dict(owners=owners, row=row, scores=scores, maxima=maxima, compiler=compiler)


OBSERVED = "Observed (read from the compiled kernel)"
LEFT, CELL, GAP = 0.95, 0.32, 0.3
PAGE, PHONE = (8, 6), (6, 2)  # number of columns drawn from the row's start and from its end
TONES = (1.0, 0.65, 0.4, 0.2)


@style.picture
def draw(owners: Owners, row: int, scores: np.ndarray, maxima: list[np.ndarray], compiler: str) -> style.Drawn:
    """Draw, from top to bottom, a row of the accumulator by lane and register, and the reduction to its maximum.

    `scores` are the row's scores. `maxima` lists the maximum that each lane of the row holds, at the start and after
    each exchange. `compiler` describes the compiled kernel.
    """
    rows, cols = owners.lane.shape
    lanes, warp = np.unique(owners.lane[row]), int(owners.warp[row, 0])
    numbers_per_lane = int((owners.lane[row] == lanes[0]).sum())
    caption = f"{len(lanes)} lanes share a row of scores, so two exchanges find its maximum."
    setting = (
        f"This is row {row} of {rows} × {cols} scores in registers. {OBSERVED}: {compiler}. The numbers are made up."
    )
    figure, ax = style.new_figure(3.4, f"{caption} {setting}")
    _draw_row(ax, 0.42, owners, row, scores)
    _draw_reduction(ax, 1.95, lanes, maxima, numbers_per_lane)
    style.strip_axes(ax, (0, style.width_in_units() - 0.08), (-0.15, 3.3))
    steps = "; ".join(", ".join(map(str, numbers)) for numbers in maxima)
    alt = (
        f"{OBSERVED}. Row {row} of an accumulator of {rows} by {cols}, in warp {warp}, belongs to lanes"
        f" {', '.join(map(str, lanes))}, {numbers_per_lane} numbers each. The maximum that they know, at first, after"
        f" exchanging with lane XOR 1 and after lane XOR 2: {steps}."
    )
    return figure, alt


def _tone(k: int) -> str:
    return style.tint(style.hue("S"), TONES[k])


def _draw_row(ax: style.Axes, y: float, owners: Owners, row: int, scores: np.ndarray) -> None:
    """Draw the row's first and last columns, with each score's value, lane and register."""
    cols, lanes = len(scores), np.unique(owners.lane[row]).tolist()
    style.note(ax, 0, y - 0.42, f"Row {row}, column by column", weight="bold")
    for k, name in enumerate(("column", "number", "lane", "register")):
        style.note(ax, LEFT - 0.08, y - 0.14 + 0.27 * k, name, ha="right")
    first, last = PHONE if style.is_narrow() else PAGE
    for n, c in enumerate([*range(first), *range(cols - last, cols)]):
        x = LEFT + CELL * n + (GAP if n >= first else 0)
        style.note(ax, x + CELL / 2, y - 0.14, str(c), ha="center")
        for k, numbers in enumerate((scores, owners.lane[row], owners.register[row])):
            tone = _tone(lanes.index(owners.lane[row, c]))
            words = str(numbers[c]).replace("-", "−")
            style.box(ax, x, y + 0.27 * k, CELL, 0.27, words, tone, edgecolor=style.PAPER)
    style.note(ax, LEFT + CELL * first + GAP / 2, y + 0.4, "…", ha="center")


def _draw_reduction(
    ax: style.Axes, y: float, lanes: np.ndarray, maxima: list[np.ndarray], numbers_per_lane: int
) -> None:
    """Draw one line for each step, with the maximum that each lane holds after the step.

    `maxima` lists these maxima for each step, and `numbers_per_lane` is the number of scores per lane. Two strokes
    connect each maximum to the two lanes from which it was computed.
    """
    style.note(ax, 0, y - 0.42, "Thick edge: the lane knows the maximum", weight="bold")
    steps = [f"of its {numbers_per_lane}\nnumbers", "after lane\nXOR 1", "after lane\nXOR 2"]
    wide, pitch = (0.6, 0.78) if style.is_narrow() else (0.8, 1.25)
    left = LEFT + pitch * np.arange(len(lanes))
    for step, numbers in enumerate(maxima):
        top = y + 0.1 + 0.42 * step
        for k, number in enumerate(numbers):
            knows = dict(linewidth=2.8, zorder=2) if number == maxima[-1][k] else {}
            style.box(ax, left[k], top, wide, 0.25, str(number), _tone(k), **knows)
            if step:
                for source in (k, int(np.searchsorted(lanes, lanes[k] ^ step))):
                    ax.plot(
                        [left[source] + wide / 2, left[k] + wide / 2], [top - 0.17, top], color=style.QUIET, linewidth=1
                    )
        style.note(ax, LEFT - 0.08, top + 0.125, steps[step], ha="right")
    for k, lane in enumerate(lanes):
        style.note(ax, left[k] + wide / 2, y - 0.06, f"lane {lane}", ha="center")
