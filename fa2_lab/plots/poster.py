"""The poster: an algorithm of FlashAttention-2 on one sheet, line by line: words, NumPy, Triton, work for the machine.

Words and code come from `fa2_lab.paper.where` and the amounts from the meter, so that they cannot go stale.
"""

from __future__ import annotations

import sys
from collections import Counter
from textwrap import wrap
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fa2_lab.paper import ALGORITHMS, Algorithm, Place, triton_file, where
from fa2_lab.plots import style
from fa2_lab.reference import fa2
from fa2_lab.trace import Trace

# Data -----------------------------------------------------------------------------------------------------------

B_R, B_C, D = 101, 103, 107  # primes, so that a number of elements tells what it is the product of
UNITS = {
    2 * B_R * B_C * D: "2 B_r B_c d",
    2 * B_R * D: "N d",
    2 * B_R: "N",
    B_R * B_C: "B_r B_c",
    B_R * D: "B_r d",
    B_C * D: "B_c d",
    B_R: "B_r",
}
LANES = {
    "load": "from\nHBM",
    "store": "to\nHBM",
    "matmul": "tensor\ncores",
    "exp": "exponen-\ntials",
    "other": "FP32\nunits",
}


class Row(NamedTuple):
    """One line of the algorithm and what computes it; `work` says for each lane how much, each time the line runs."""

    number: int
    depth: int
    words: str
    numpy: tuple[str, ...]
    triton: tuple[str, ...]
    work: dict[str, str]


class LineMeter(Trace):
    """A meter that notes for each step which line of reference/fa2.py took it."""

    def __init__(self):
        super().__init__()
        self.line_of: dict[int, int] = {}

    def _here(self) -> tuple:
        frame = sys._getframe()
        while frame.f_code.co_filename != fa2.__file__:
            frame = frame.f_back
        self.line_of[len(self.steps)] = frame.f_lineno
        return super()._here()


def data(tag: str = "FA2.A1") -> dict:
    """Every line of an algorithm of FA2 that computes something, with its words, its code and its work."""
    algorithm = ALGORITHMS[tag]
    work = amounts(metered(tag))
    rows = []
    for line in algorithm.lines:
        if line.computes:
            found = where(algorithm.tag_of(line))
            done: dict[str, Counter] = {}
            for place in found.first_numpy:
                for lane, counted in work.get(place.number, {}).items():
                    done.setdefault(lane, Counter()).update(counted)
            told = {
                lane: " + ".join(term(u, done[lane][u]) for u in UNITS.values() if done[lane][u])
                for lane in LANES
                if done.get(lane)
            }
            rows.append(
                Row(line.number, line.depth, line.text, *map(code, (found.first_numpy, found.first_triton)), told)
            )
    return dict(algorithm=algorithm, rows=rows, files=(algorithm.numpy, triton_file(algorithm)))


def code(places: tuple[Place, ...]) -> tuple[str, ...]:
    """The lines without their comments."""
    return tuple(place.text.split("  #")[0] for place in places)


def metered(tag: str) -> LineMeter:
    """The forward, or the backward, on two by two tiles."""
    rng, meter = np.random.default_rng(0), LineMeter()
    Q, dO = rng.standard_normal((2, 2 * B_R, D))
    K, V = rng.standard_normal((2, 2 * B_C, D))
    tiles = dict(B_r=B_R, B_c=B_C)
    if tag == "FA2.A1":
        fa2.forward(Q, K, V, **tiles, trace=meter)
    else:
        fa2.backward(Q, K, V, *fa2.forward(Q, K, V, **tiles), dO, **tiles, trace=meter)
    return meter


def amounts(meter: LineMeter) -> dict[int, dict[str, Counter]]:
    """{line of the file: {lane: {unit: how often}}}, each time that the line runs."""
    times: dict[int, set] = {}
    total: dict[int, dict[str, Counter]] = {}
    for number, step in enumerate(meter.steps):
        line = meter.line_of[number]
        times.setdefault(line, set()).add((step.worker, step.i, step.j))
        lane, n = (step.op, step.elements) if hasattr(step, "op") else (step.kind, step.operations)
        lane = lane if lane in LANES else "other"
        n = n if n in UNITS else n + np.prod(step.shape)  # a sum of n numbers takes n - 1 additions
        total.setdefault(line, {}).setdefault(lane, Counter())[UNITS[n]] += 1
    return {
        line: {lane: Counter({u: n // len(times[line]) for u, n in c.items()}) for lane, c in lanes.items()}
        for line, lanes in total.items()
    }


def term(unit: str, n: int) -> str:
    return unit if n == 1 else f"{n} {unit}"


# Drawing --------------------------------------------------------------------------------------------------------

SHEET = (420 / 25.4, 297 / 25.4)  # A3, in inches
MARGIN = 0.5
COLUMNS = {"words": 0.0, "numpy": 3.75, "triton": 7.85, "work": 12.35}  # inches from the margin
LANE = 0.64
WRAP = {"words": 48, "numpy": 66, "triton": 72}
WORDS, CODE, LEADING = 8.5, 7.3, 0.155
MONO = ["DejaVu Sans Mono", "monospace"]


@style.picture
def draw(algorithm: Algorithm, rows: list[Row], files: tuple[str, str]) -> tuple[Figure, str]:
    """A sheet of A3: a row for each line, the loops as nested grounds."""
    figure = Figure(figsize=SHEET)
    title = f"{algorithm.title.replace(', ', ': the ')} pass, line by line"
    figure.suptitle(title, x=MARGIN / SHEET[0], y=1 - 0.45 / SHEET[1], ha="left", va="top", fontsize=19)
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-MARGIN, SHEET[0] - MARGIN), ylim=(SHEET[1], 0))
    ax.set_axis_off()
    kind = NUMBER[algorithm.tag]
    under = f"{kind} of the FlashAttention-2 paper ({algorithm.source}), in our words. Needs: {algorithm.needs}."
    ax.text(0, 1.03, under, fontsize=9.5, color=style.QUIET)
    head(ax, files)
    lines = [{name: wrapped(row, name) for name in WRAP} for row in rows]
    tall = [max(0.17 * len(c["words"]), *(LEADING * len(c[k]) for k in ("numpy", "triton"))) for c in lines]
    room = SHEET[1] - 0.62 - 1.85
    gap = min(0.3, (room - sum(tall)) / len(rows))
    y = 1.85
    for row, cells, height in zip(rows, lines, tall, strict=True):
        ground(ax, row.depth, y, height + gap)
        entry(ax, row, cells, y, height + gap)
        y += height + gap
    foot = (
        "B_r, B_c: rows and columns of a tile; d: head dimension; N: length. Work is what the meter counts in the NumPy"
        " code each time that a line runs: elements moved, or operations. A row of n numbers summed counts as n."
        f" Any line: python -m fa2_lab where {algorithm.tag}.L{rows[len(rows) // 2].number}"
    )
    ax.text(0, SHEET[1] - 0.3, foot, fontsize=8, color=style.QUIET)
    alt = (
        f"A sheet of A3 with the {len(rows)} lines of {algorithm.tag} that compute something. For each: the paper's"
        " line in our words, the NumPy lines, the Triton lines, and the numbers it moves and the operations it takes."
    )
    return figure, alt


NUMBER = {"FA2.A1": "Algorithm 1", "FA2.A2": "Algorithm 2"}


def head(ax: Axes, files: tuple[str, str]) -> None:
    """The columns' names."""
    names = dict(words=("In words", ""), numpy=("In NumPy", files[0]), triton=("In Triton", files[1]))
    for name, (words, file) in names.items():
        ax.text(COLUMNS[name], 1.5, words, fontsize=11, weight="bold")
        ax.text(COLUMNS[name], 1.68, file, fontsize=CODE, family=MONO, color=style.QUIET)
    ax.text(COLUMNS["work"], 1.32, "What it does to the machine", fontsize=11, weight="bold")
    for k, words in enumerate(LANES.values()):
        x = COLUMNS["work"] + LANE * (k + 0.5)
        ax.text(x, 1.56, words, fontsize=style.SMALL, ha="center", va="center", linespacing=1.1)


def wrapped(row: Row, column: str) -> list[str]:
    """A cell's text in lines that fit its column."""
    if column == "words":
        return wrap(row.words.replace(" × ", "\u00a0×\u00a0"), WRAP["words"] - 4 * row.depth)
    return [part for line in getattr(row, column) for part in wrap(line, WRAP[column], subsequent_indent=" " * 6)]


def ground(ax: Axes, depth: int, y: float, height: float) -> None:
    """The loops around a line: one ground in the other, each with a bar at its left."""
    for level in range(1, depth + 1):
        x = 0.28 * level
        fill = style.tint(style.MASKED, 0.45 * level)
        ax.add_patch(Rectangle((x, y), SHEET[0] - 2 * MARGIN - x, height, facecolor=fill, linewidth=0))
        ax.add_patch(Rectangle((x, y), 0.035, height, facecolor=style.worker(2 * level - 1), linewidth=0))


def entry(ax: Axes, row: Row, cells: dict[str, list[str]], y: float, height: float) -> None:
    """One line of the algorithm, across all columns."""
    middle = y + height / 2
    ax.text(0.02, middle, str(row.number), fontsize=WORDS, weight="bold", va="center", color=style.QUIET)
    left = {"words": 0.28 * row.depth + 0.36 - 0.1 * (row.depth == 0)}
    for name, lines in cells.items():
        leading = 0.17 if name == "words" else LEADING
        look = dict(fontsize=WORDS) if name == "words" else dict(fontsize=CODE, family=MONO)
        for k, line in enumerate(lines):
            at = middle + leading * (k - (len(lines) - 1) / 2)
            indent = len(line) - len(line.lstrip())
            x = left.get(name, COLUMNS[name]) + indent * 0.602 * CODE / 72
            ax.text(x, at, line.lstrip().replace("$", r"\$"), va="center", **look)
    for k, lane in enumerate(LANES):
        if lane in row.work:
            terms = row.work[lane].split(" + ")
            x, tall = COLUMNS["work"] + LANE * k + 0.02, 0.13 * len(terms) + 0.06
            strength = 0.3 if lane in ("load", "store") else 0.14
            fill = style.tint(style.INK, strength)
            label = "\n+ ".join(terms).replace(" ", "\u2009")
            style.box(
                ax,
                x,
                middle - tall / 2,
                LANE - 0.04,
                tall,
                label,
                fill,
                size=6.6,
                linewidth=0,
                gid=f"{lane} {row.number}",
            )
