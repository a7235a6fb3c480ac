"""A 64 × 128 accumulator by warp, lane and register, and a row's maximum on its way through four lanes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import Owners, parse
from fa2_lab.plots import style
from fa2_lab.records import compiled_by, layouts_record

# Data -----------------------------------------------------------------------------------------------------------


def data(row: int = 21, shape: tuple[int, int] = (64, 128)) -> dict:
    """Owners of what one wgmma computes, as compiled, and the maximum that each lane of a row knows step by step."""
    record = layouts_record()
    (wide,) = [k for k in record["layouts"] if k["target"] == "sm_90" and k["d"] == shape[1]]
    owners = parse(wide["O"]["layout"]).owners(shape)
    scores = np.random.default_rng(2).integers(-99, 100, shape[1])
    lane = owners.lane[row]
    lanes = np.unique(lane)
    known = [np.array([scores[lane == t].max() for t in lanes])]
    for step in (1, 2):
        known.append(np.maximum(known[-1], known[-1][np.searchsorted(lanes, lanes ^ step)]))
    return dict(owners=owners, row=row, scores=scores, known=known, made=compiled_by(record))


# Drawing --------------------------------------------------------------------------------------------------------

OBSERVED = "Observed (read from the compiled kernel)"
LEFT, WIDE, HIGH = 0.9, 6.0, 1.6  # the whole accumulator, in inches
CELL, SHOWN, GAP = 0.28, (12, 8), 0.42  # columns of the row that are drawn: the first and the last ones
TONES = (1.0, 0.65, 0.4, 0.2)


@style.picture
def draw(owners: Owners, row: int, scores: np.ndarray, known: Sequence[np.ndarray], made: str) -> tuple[Figure, str]:
    """From above: the accumulator by warp, with all of one lane; a row of it by lane and register; its maximum.

    scores: the numbers of the row. known: the maximum that each of its lanes knows, at first and after each exchange.
    """
    rows, cols = owners.lane.shape
    lanes, warp = np.unique(owners.lane[row]), int(owners.warp[row, 0])
    each = int((owners.lane[row] == lanes[0]).sum())
    title = f"{rows} × {cols} numbers in registers: a row has {len(lanes)} lanes, and two shuffles find its maximum"
    figure, ax = style.new_figure(5.9, title)
    _whole(ax, owners, row, int(lanes[0]))
    _row(ax, 2.3, owners, row, scores)
    _reduction(ax, 3.8, row, lanes, known, each)
    ax.set(xlim=(0, 7.4), ylim=(5.12, -0.28), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_xlabel(f"{OBSERVED}: {made}. The numbers are made up.", fontsize=style.SMALL)
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


def _whole(ax: Axes, owners: Owners, row: int, lane: int) -> None:
    """The accumulator to scale: a strip for each warp, all numbers of one lane, and a frame around the row."""
    rows, cols = owners.lane.shape
    wide, high, warp = WIDE / cols, HIGH / rows, owners.warp[row, 0]
    for w in np.unique(owners.warp):
        top, bottom = np.flatnonzero(owners.warp[:, 0] == w)[[0, -1]]
        look = dict(edgecolor=style.PAPER, gid=f"warp {w}")
        style.box(ax, LEFT, top * high, WIDE, (bottom + 1 - top) * high, "", style.tint(style.INK, 0.12), **look)
        ax.text(
            LEFT - 0.08,
            (top + bottom + 1) / 2 * high,
            f"warp {w}: {top}–{bottom}",
            ha="right",
            va="center",
            fontsize=style.SMALL,
        )
    held = np.argwhere((owners.warp == warp) & (owners.lane == lane))
    style.bars(ax, [(LEFT + c * wide, r * high, wide, high) for r, c in held], _tone(0), gid="held")
    ax.add_patch(style.Rectangle((LEFT, row * high), WIDE, high, fill=False, linewidth=0.5, gid="row"))
    ax.annotate(f"row {row}", (LEFT + WIDE, (row + 0.5) * high), (LEFT + WIDE + 0.55, (row + 0.5) * high),
                va="center", fontsize=style.SMALL, arrowprops=dict(arrowstyle="->", color=style.INK))  # fmt: skip
    ax.text(LEFT, -0.14, f"What one wgmma computes. Filled: lane {lane} of warp {warp}, {len(held)} registers",
            weight="bold", va="center")  # fmt: skip


def _row(ax: Axes, y: float, owners: Owners, row: int, scores: np.ndarray) -> None:
    """The first and the last columns of the row: number, lane and register of each."""
    cols, lanes = len(scores), np.unique(owners.lane[row]).tolist()
    ax.text(LEFT, y - 0.42, f"Row {row}, column by column", weight="bold", va="center")
    for k, name in enumerate(("column", "number", "lane", "register")):
        ax.text(LEFT - 0.08, y - 0.14 + 0.27 * k, name, ha="right", va="center", fontsize=style.SMALL)
    first, last = SHOWN
    for n, c in enumerate([*range(first), *range(cols - last, cols)]):
        x = LEFT + CELL * n + (GAP if n >= first else 0)
        ax.text(x + CELL / 2, y - 0.14, str(c), ha="center", va="center", fontsize=style.SMALL)
        for k, numbers in enumerate((scores, owners.lane[row], owners.register[row])):
            look = dict(edgecolor=style.PAPER, gid=f"{('score', 'lane', 'register')[k]} {c}")
            fill = _tone(lanes.index(owners.lane[row, c]))
            style.box(ax, x, y + 0.27 * k, CELL, 0.27, str(numbers[c]).replace("-", "−"), fill, **look)
    ax.text(LEFT + CELL * first + GAP / 2, y + 0.4, "…", ha="center", va="center")


def _reduction(ax: Axes, y: float, row: int, lanes: np.ndarray, known: Sequence[np.ndarray], each: int) -> None:
    """What every lane knows, a line for each step; two strokes come from the lanes that were compared."""
    ax.text(LEFT, y - 0.42, f"The maximum of row {row}: what each lane knows", weight="bold", va="center")
    told = [f"of its own {each} numbers", "after shuffle with lane XOR 1", "after shuffle with lane XOR 2"]
    left = LEFT + np.arange(len(lanes))
    for step, numbers in enumerate(known):
        top = y + 0.1 + 0.42 * step
        for k, number in enumerate(numbers):
            style.box(ax, left[k], top, 0.6, 0.25, str(number), _tone(k), gid=f"known {step} {lanes[k]}")
            if step:
                for source in (k, int(np.searchsorted(lanes, lanes[k] ^ step))):
                    ax.plot([left[source] + 0.3, left[k] + 0.3], [top - 0.17, top], color=style.QUIET, linewidth=1)
        ax.text(left[-1] + 0.85, top + 0.125, told[step], va="center")
    for k, lane in enumerate(lanes):
        ax.text(left[k] + 0.3, y - 0.06, f"lane {lane}", ha="center", va="center", fontsize=style.SMALL)
