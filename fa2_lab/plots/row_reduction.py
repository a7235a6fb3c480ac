"""64 rows of S by warp, lane and register, and a row's maximum on its way through four lanes."""

import numpy as np

from fa2_lab.machine.layouts import Owners, parse
from fa2_lab.plots import style
from fa2_lab.records import layouts_record


def data(row: int = 21, d: int = 128) -> dict:
    """Owners of what one wgmma computes, as compiled, and the maximum that each lane of a row knows step by step."""
    record = layouts_record()
    (kernel,) = [k for k in record["layouts"] if k["target"] == "sm_90" and k["d"] == d]
    shape = (64, kernel["B_c"])
    owners = parse(kernel["S"]["layout"]).owners(shape)
    tile = f"tile {kernel['B_r']} × {kernel['B_c']}, {kernel['warps']} warps"
    made = f"Triton {record['made_by']['triton']}, {tile}"
    scores = np.random.default_rng(2).integers(-99, 100, shape[1])
    lane = owners.lane[row]
    lanes = np.unique(lane)
    known = [np.array([scores[lane == t].max() for t in lanes])]
    for step in (1, 2):
        known.append(np.maximum(known[-1], known[-1][np.searchsorted(lanes, lanes ^ step)]))
    return dict(owners=owners, row=row, scores=scores, known=known, made=made)


OBSERVED = "Observed (read from the compiled kernel)"
LEFT, HIGH = 0.95, 1.5  # the whole accumulator, in inches
PAGE = (4.2, (8, 6))  # inches across it; columns of the row that are drawn, the first and the last ones
PHONE = (2.5, (6, 3))
CELL, GAP = 0.3, 0.3
TONES = (1.0, 0.65, 0.4, 0.2)


@style.picture
def draw(owners: Owners, row: int, scores: np.ndarray, known: list[np.ndarray], made: str) -> style.Drawn:
    """From above: the accumulator by warp, with all of one lane; a row of it by lane and register; its maximum.

    scores: the numbers of the row. known: the maximum that each of its lanes knows, at first and after each exchange.
    """
    rows, cols = owners.lane.shape
    lanes, warp = np.unique(owners.lane[row]), int(owners.warp[row, 0])
    each = int((owners.lane[row] == lanes[0]).sum())
    caption = (
        f"A {rows} × {cols} accumulator in registers: {len(lanes)} lanes share a row; two shuffles find its maximum."
    )
    figure, ax = style.new_figure(5.2, f"{caption} {OBSERVED}: {made}. The numbers are made up.")
    _whole(ax, owners, row, int(lanes[0]))
    _row(ax, 2.25, owners, row, scores)
    _reduction(ax, 3.7, row, lanes, known, each)
    style.bare(ax, (0, style.width() - 0.08), (-0.28, 4.95))
    steps = "; ".join(", ".join(map(str, numbers)) for numbers in known)
    alt = (
        f"{OBSERVED}. An accumulator of {rows} by {cols} in strips of {rows // 4} rows, a warp each. Lane {lanes[0]} of"
        f" warp {warp} holds pairs of columns of rows {row} and {row + 8}. Row {row} belongs to lanes"
        f" {', '.join(map(str, lanes))}, {each} numbers each. The maximum that they know, at first, after exchanging"
        f" with lane XOR 1 and after lane XOR 2: {steps}."
    )
    return figure, alt


def _tone(k: int) -> str:
    return style.tint(style.hue("S"), TONES[k])


def _whole(ax: style.Axes, owners: Owners, row: int, lane: int) -> None:
    """The accumulator to scale: a strip for each warp, all numbers of one lane, and a frame around the row."""
    rows, cols = owners.lane.shape
    WIDE, _ = PHONE if style.narrow() else PAGE
    wide, high, warp = WIDE / cols, HIGH / rows, owners.warp[row, 0]
    for w in np.unique(owners.warp):
        top, bottom = np.flatnonzero(owners.warp[:, 0] == w)[[0, -1]]
        strip = (LEFT, top * high, WIDE, (bottom + 1 - top) * high)
        style.box(ax, *strip, "", style.tint(style.INK, 0.12), edgecolor=style.PAPER)
        style.note(ax, LEFT - 0.08, (top + bottom + 1) / 2 * high, f"warp {w}: {top}–{bottom}", ha="right")
    held = np.argwhere((owners.warp == warp) & (owners.lane == lane))
    style.bars(ax, [(LEFT + c * wide, r * high, wide, high) for r, c in held], _tone(0))
    style.box(ax, LEFT, row * high, WIDE, high, fill="none", linewidth=0.5)
    style.note(ax, LEFT + WIDE + 0.08, (row + 0.5) * high, f"← row {row}")
    words = f"One product. Filled: lane {lane} of warp {warp}, {len(held)} registers"
    style.note(ax, 0, -0.14, words, weight="bold")


def _row(ax: style.Axes, y: float, owners: Owners, row: int, scores: np.ndarray) -> None:
    """The first and the last columns of the row: number, lane and register of each."""
    cols, lanes = len(scores), np.unique(owners.lane[row]).tolist()
    style.note(ax, 0, y - 0.42, f"Row {row}, column by column", weight="bold")
    for k, name in enumerate(("column", "number", "lane", "register")):
        style.note(ax, LEFT - 0.08, y - 0.14 + 0.27 * k, name, ha="right")
    _, (first, last) = PHONE if style.narrow() else PAGE
    for n, c in enumerate([*range(first), *range(cols - last, cols)]):
        x = LEFT + CELL * n + (GAP if n >= first else 0)
        style.note(ax, x + CELL / 2, y - 0.14, str(c), ha="center")
        for k, numbers in enumerate((scores, owners.lane[row], owners.register[row])):
            tone = _tone(lanes.index(owners.lane[row, c]))
            words = str(numbers[c]).replace("-", "−")
            style.box(ax, x, y + 0.27 * k, CELL, 0.27, words, tone, edgecolor=style.PAPER)
    style.note(ax, LEFT + CELL * first + GAP / 2, y + 0.4, "…", ha="center")


def _reduction(ax: style.Axes, y: float, row: int, lanes: np.ndarray, known: list[np.ndarray], each: int) -> None:
    """What every lane knows, a line for each step; two strokes come from the lanes that were compared."""
    style.note(ax, 0, y - 0.42, f"The maximum of row {row}: what each lane knows", weight="bold")
    steps = [f"of its {each}\nnumbers", "after lane\nXOR 1", "after lane\nXOR 2"]
    left = LEFT + 0.78 * np.arange(len(lanes))
    for step, numbers in enumerate(known):
        top = y + 0.1 + 0.42 * step
        for k, number in enumerate(numbers):
            style.box(ax, left[k], top, 0.6, 0.25, str(number), _tone(k))
            if step:
                for source in (k, int(np.searchsorted(lanes, lanes[k] ^ step))):
                    ax.plot([left[source] + 0.3, left[k] + 0.3], [top - 0.17, top], color=style.QUIET, linewidth=1)
        style.note(ax, LEFT - 0.08, top + 0.125, steps[step], ha="right")
    for k, lane in enumerate(lanes):
        style.note(ax, left[k] + 0.3, y - 0.06, f"lane {lane}", ha="center")
