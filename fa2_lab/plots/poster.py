"""The poster: an algorithm of FlashAttention-2 on one sheet, line by line: words, NumPy, Triton, work for the machine.

Words and code come from `fa2_lab.paper.where`, so that they cannot go stale; the work adds up to what the meter counts.
"""

import re
from textwrap import wrap
from typing import NamedTuple

from matplotlib.figure import Figure

from fa2_lab.paper import ALGORITHMS, Algorithm, Place, triton_file, where
from fa2_lab.plots import style

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


WORK: dict[str, dict[int, dict[str, str]]] = {  # by line: what it moves and computes each time that it runs
    "FA2.A1": {
        4: dict(load="B_r d"),
        7: dict(load="2 B_c d"),
        8: dict(matmul="2 B_r B_c d", other="B_r B_c"),
        9: dict(exp="B_r B_c + B_r", other="3 B_r B_c + 4 B_r"),
        10: dict(matmul="2 B_r B_c d", other="2 B_r d"),
        12: dict(other="B_r d + B_r"),
        13: dict(other="2 B_r"),
        14: dict(store="B_r d"),
        15: dict(store="B_r"),
    },
    "FA2.A2": {
        3: dict(store="N d"),
        4: dict(load="2 N d", store="N", other="2 N d"),
        6: dict(load="2 B_c d"),
        9: dict(load="2 B_r d + 2 B_r"),
        10: dict(matmul="2 B_r B_c d", other="B_r B_c"),
        11: dict(exp="B_r B_c", other="B_r B_c"),
        12: dict(matmul="2 B_r B_c d", other="B_c d"),
        13: dict(matmul="2 B_r B_c d"),
        14: dict(other="2 B_r B_c"),
        15: dict(load="B_r d", store="B_r d", matmul="2 B_r B_c d", other="2 B_r d"),
        16: dict(matmul="2 B_r B_c d", other="2 B_c d"),
        18: dict(store="2 B_c d"),
    },
}


def data(tag: str = "FA2.A1") -> dict:
    """Every line of an algorithm of FA2 that computes something, with its words, its code and its work."""
    algorithm = ALGORITHMS[tag]
    rows = []
    for line in algorithm.lines:
        if line.computes:
            found, work = where(algorithm.tag_of(line)), WORK[tag].get(line.number, {})
            both = code(found.first_numpy), code(found.first_triton)
            rows.append(Row(line.number, line.depth, line.text, *both, work))
    return dict(algorithm=algorithm, rows=rows, files=(algorithm.numpy, triton_file(algorithm)))


def code(places: tuple[Place, ...]) -> tuple[str, ...]:
    """The lines without their comments; of lines that a kernel has twice, for two loops, the first."""
    lines = [place.text.split("  #")[0] for place in places]
    once = {re.split(r" = | in ", line)[0]: line for line in reversed(lines)}
    return tuple(line for line in lines if line in once.values())


SHEET = (420 / 25.4, 297 / 25.4)  # A3, in inches
MARGIN, TOP = 0.5, 2.75
COLUMNS = {"words": 0.42, "numpy": 3.55, "triton": 7.5, "work": 12.15}  # inches from the margin
LANE, STEP = 0.68, 0.28  # the width of a lane of work; how far a loop sets its lines in
WRAP = {"words": 45, "numpy": 57, "triton": 68}
WORDS, CODE, LEADING = 9.0, 8.0, 0.162
MONO = ["DejaVu Sans Mono", "monospace"]


@style.picture
def draw(algorithm: Algorithm, rows: list[Row], files: tuple[str, str]) -> style.Drawn:
    """A sheet of A3: the tiles of the loops, then a row for each line, the loops as nested grounds."""
    figure = Figure(figsize=SHEET)
    title = f"{algorithm.title.replace(', ', ': the ')} pass, line by line"
    figure.set_label(f"{title}: each line in words, NumPy, Triton and work for the machine.")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-MARGIN, SHEET[0] - MARGIN), ylim=(SHEET[1], 0))
    ax.set_axis_off()
    _head(ax, title, algorithm, files)
    _tiles(ax, 9.0, 1.3, algorithm.tag)
    cells = [{name: wrapped(row, name) for name in WRAP} for row in rows]
    tall = [LEADING * max(map(len, cell.values())) for cell in cells]
    gap = min(0.26, (SHEET[1] - 0.6 - TOP - sum(tall)) / len(rows))
    y = TOP
    for row, cell, height in zip(rows, cells, tall, strict=True):
        _ground(ax, row.depth, y, height + gap)
        _entry(ax, row, cell, y + (height + gap) / 2)
        y += height + gap
    twice = " Triton's inner loop stands in its file twice, with a mask and without; one is shown."
    foot = (
        "Work: what the meter counts in the NumPy code each time that a line runs, elements moved or operations."
        + twice * (algorithm.tag == "FA2.A1")
        + f" Any line: python -m fa2_lab where {algorithm.tag}.L{rows[len(rows) // 2].number}"
    )
    style.note(ax, 0, SHEET[1] - 0.32, foot, color=style.QUIET)
    alt = (
        f"A sheet of A3 with the {len(rows)} lines of {algorithm.tag} that compute something. Above, the tiles of Q, K,"
        " V and S that the loops go through. For each line: the paper's line in our words, the NumPy lines, the Triton"
        " lines, and the numbers it moves and the operations it takes."
    )
    return figure, alt


def _head(ax: style.Axes, title: str, algorithm: Algorithm, files: tuple[str, str]) -> None:
    """The title, what the letters mean, and the columns' names."""
    ax.text(0, 0.62, title, fontsize=19, weight="bold", va="center")
    under = (
        f"Algorithm {algorithm.tag[-1]} of the FlashAttention-2 paper ({algorithm.source}), in our words.\n"
        f"Needs: {formulas(algorithm.needs)}.\n"
        "$N$: length; $d$: head dimension; $B_r$, $B_c$: rows and columns of a tile; $τ$: the scale;\n"
        "$m_i$: the largest score of each row so far; $\\ell_i$: its sum of exponentials;"
        " $L_i = m_i + \\log\\,\\ell_i$.\n"
        "The ground under a number is that of the tensor which the line makes."
    )
    ax.text(0, 0.9, under, fontsize=WORDS, color=style.QUIET, va="top", linespacing=1.35)
    names = dict(words=("In words", ""), numpy=("In NumPy", files[0]), triton=("In Triton", files[1]))
    for name, (words, file) in names.items():
        ax.text(COLUMNS[name], TOP - 0.27, words, fontsize=11, weight="bold", va="center")
        ax.text(COLUMNS[name], TOP - 0.08, file, fontsize=CODE, family=MONO, color=style.QUIET, va="center")
    for k, words in enumerate(LANES.values()):
        style.note(ax, COLUMNS["work"] + LANE * (k + 0.5), TOP - 0.2, words, ha="center", linespacing=1.05)


def _tiles(ax: style.Axes, x: float, y: float, tag: str) -> None:
    """The loops as a picture: S is never stored, only its tile is there; what a worker keeps has a strong edge."""
    forward, side, wide, i, j = tag == "FA2.A1", 1.1, 0.2, 2, 3
    cell = side / 5
    outer = (x, y + i * cell, side, cell) if forward else (x + j * cell, y, cell, side)
    style.box(ax, x, y, side, side, fill=style.tint(style.INK, 0.05), edgecolor=style.QUIET, linestyle=(0, (2, 2)))
    style.box(ax, *outer, fill=style.tint(style.hue("S"), 0.15), linewidth=0)
    style.tensor_box(ax, x + j * cell, y + i * cell, cell, cell, "S", "$s_{ij}$")
    left, right, above = (("Q",), ("O", "L"), ("K", "V")) if forward else (("Q", "dO"), ("dQ",), ("K", "V", "dK", "dV"))
    places = {name: -0.3 - 0.28 * n for n, name in enumerate(left)}
    places |= {name: side + 0.1 + 0.28 * n for n, name in enumerate(right)}
    for tensor, at in places.items():
        style.box(ax, x + at, y, wide, side, edgecolor=style.hue(tensor), linewidth=0.8)
        keeps = dict(linewidth=2.4) if forward else {}
        style.tensor_box(ax, x + at, y + i * cell, wide, cell, tensor, "$i$", **keeps)
        style.note(ax, x + at + wide / 2, y + side + 0.11, tensor, ha="center")
    for n, tensor in enumerate(above):
        top = y - 0.3 - 0.26 * n
        style.box(ax, x, top, side, wide, edgecolor=style.hue(tensor), linewidth=0.8)
        keeps = {} if forward else dict(linewidth=2.4)
        style.tensor_box(ax, x + j * cell, top, cell, wide, tensor, "$j$", **keeps)
        style.note(ax, x - 0.08, top + wide / 2, tensor, ha="right")
    words = "A worker takes row block $i$, keeps it on chip\n(strong edges), and lets all $j$ stream past.\n"
    if not forward:
        words = "A worker takes column block $j$, keeps it on chip\n(strong edges), and adds to dQ for every $i$.\n"
    words += "S is never stored: only its tile $s_{ij}$ is there."
    style.note(ax, x + side + 0.95, y + 0.4, words, fontsize=WORDS, linespacing=1.35)


def formulas(words: str) -> str:
    """Words with their formulas set: q_i, B_r, m_new, p_ijᵀ and e^(m_i − m_new)."""

    def name(found: re.Match) -> str:
        letter, below, above = found.groups()
        letter, below = {"l": r"\ell"}.get(letter, letter), {"new": r"\mathrm{new}"}.get(below, below)
        return f"{letter}_{{{below}}}" + ("^{T}" if above else "")

    names = r"\b([A-Za-z]{1,2})_(new|ij|i|j|r|c)(?![A-Za-z0-9_])(ᵀ?)"
    power = re.compile(r"e\^\(([^)]*)\)")
    set_powers = power.sub(lambda f: "$e^{" + re.sub(names, name, f[1]).replace("\u00a0", " ") + "}$", words)
    parts = re.split(r"(\$[^$]*\$)", set_powers)
    return "".join(p if p.startswith("$") else re.sub(names, lambda f: f"${name(f)}$", p) for p in parts)


def wrapped(row: Row, column: str) -> list[str]:
    """A cell's text in lines that fit its column."""
    if column == "words":
        whole = re.sub(r"e\^\([^)]*\)", lambda f: f[0].replace(" ", "\u00a0"), row.words).replace(
            " × ", "\u00a0×\u00a0"
        )
        return [formulas(line) for line in wrap(whole, WRAP["words"] - 5 * row.depth)]
    return [part for line in getattr(row, column) for part in wrap(line, WRAP[column], subsequent_indent=" " * 6)]


def _ground(ax: style.Axes, depth: int, y: float, height: float) -> None:
    """The loops around a line: one ground in the other, each with a bar at its left."""
    for level in range(1, depth + 1):
        x = COLUMNS["words"] - 0.1 + STEP * (level - 1)
        fill = style.tint(style.INK, 0.035 * level)
        style.box(ax, x, y, SHEET[0] - 2 * MARGIN - x, height, fill=fill, linewidth=0)
        style.box(ax, x, y, 0.035, height, fill=style.worker(2 * level - 1), linewidth=0)


def made_of(lines: tuple[str, ...]) -> list[str]:
    """The tensors that NumPy lines assign, one of each hue."""
    found: dict[str, str] = {}
    for names in (line.split(" = ")[0] for line in lines if " = " in line):
        for name in re.findall(r"[A-Za-z]\w*(?![\w\]])", names):
            try:
                found.setdefault(style.hue(name), name)
            except ValueError:  # no tensor
                continue
    return list(found.values())


def _entry(ax: style.Axes, row: Row, cells: dict[str, list[str]], middle: float) -> None:
    """One line of the algorithm, across all columns."""
    tensors = made_of(row.numpy)
    for k, tensor in enumerate(tensors):
        strip = (0.3 * k / len(tensors), middle - 0.12, 0.3 / len(tensors), 0.24)
        style.box(ax, *strip, fill=style.fill(tensor), linewidth=0)
    ax.text(0.15, middle, str(row.number), fontsize=WORDS, weight="bold", ha="center", va="center")
    for name, lines in cells.items():
        look = dict(fontsize=WORDS) if name == "words" else dict(fontsize=CODE, family=MONO)
        for k, line in enumerate(lines):
            at = middle + LEADING * (k - (len(lines) - 1) / 2)
            indent = len(line) - len(line.lstrip())
            x = COLUMNS[name] + (STEP * row.depth if name == "words" else indent * 0.602 * CODE / 72)
            words = line if name == "words" else line.lstrip().replace("$", r"\$")
            ax.text(x, at, words, va="center", **look)
    for k, lane in enumerate(LANES):
        if lane in row.work:
            terms = [re.sub(r"B_(.)", r"B_{\1}", term).replace(" ", r"\,") for term in row.work[lane].split(" + ")]
            terms[1:] = [rf"+\,{term}" for term in terms[1:]]
            x, tall = COLUMNS["work"] + LANE * k + 0.02, 0.17 * len(terms) + 0.04
            moves = tensors if lane in ("load", "store") and len(tensors) else [""]
            for n, tensor in enumerate(moves):
                fill, wide = style.fill(tensor) if tensor else style.tint(style.INK, 0.12), (LANE - 0.04) / len(moves)
                style.box(ax, x + n * wide, middle - tall / 2, wide, tall, fill=fill, linewidth=0)
            style.note(ax, x + LANE / 2 - 0.02, middle, "\n".join(f"${term}$" for term in terms), ha="center")
