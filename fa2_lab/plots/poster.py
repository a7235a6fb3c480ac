"""Poster of a FlashAttention-2 algorithm: a diagram, and the algorithm's lines in words, NumPy and Triton.

The words and the code come from `fa2_lab.paper.where`, so they cannot become outdated. The work shown for each line
adds up to the totals counted by the meter (`fa2_lab.trace`).
"""

import re
from math import exp
from textwrap import wrap
from typing import NamedTuple

from matplotlib.figure import Figure

from fa2_lab.paper import ALGORITHMS, Algorithm, Place, triton_file, where
from fa2_lab.plots import style

LANES = {"load": "load", "store": "store", "matmul": "matmul", "exp": "exp", "other": "FP32"}  # {work: its label}


class Row(NamedTuple):
    """One line of the algorithm with its code.

    `work` is {kind of work: amount per execution of the line, as a formula}.
    """

    number: int
    depth: int
    words: str
    numpy: tuple[str, ...]
    triton: tuple[str, ...]
    work: dict[str, str]


# {algorithm: {line: elements moved and operations run per execution of the line}}
WORK: dict[str, dict[int, dict[str, str]]] = {
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
    """Return one of FA2's algorithms and, for each line that computes something, the line's words, code and work.

    `tag` is "FA2.A1" (forward) or "FA2.A2" (backward).
    """
    algorithm = ALGORITHMS[tag]
    rows = []
    for line in algorithm.lines:
        loop = line.text.startswith("for ")
        if line.computes and (line.depth or loop or line.number in WORK[tag]):
            code_places, work = where(algorithm.tag_of(line)), WORK[tag].get(line.number, {})
            code_cells = code_lines(code_places.first_numpy), code_lines(code_places.first_triton)
            rows.append(Row(line.number, line.depth, line.text, *code_cells, work))
    return dict(algorithm=algorithm, rows=rows, files=(algorithm.numpy, triton_file(algorithm)))


def code_lines(places: tuple[Place, ...]) -> tuple[str, ...]:
    """Return these lines of code without comments and dropout.

    If several lines assign the same name, only the first of them is kept.
    """
    lines = [place.text.split("  #")[0] for place in places if "dropped(" not in place.text]
    lines = [line.replace("p_dropped", "p_ij") for line in lines]
    once = {re.split(r" = | in ", line)[0]: line for line in reversed(lines)}
    return tuple(line for line in lines if line in once.values())


def matmuls(tag: str) -> dict[int, str]:
    """Return {line: circled digit} for the lines of an algorithm that run a matmul, with the digits in order."""
    lines = [line for line, work in WORK[tag].items() if "matmul" in work]
    return dict(zip(lines, "①②③④⑤", strict=False))


UNIT = 0.5**0.5  # units per inch; at this scale, an A1 sheet measures as many units as an A2 sheet measures inches
SHEET = (594 / 25.4, 420 / 25.4)  # width and height of the A1 sheet, in units
MARGIN, FOOT = 0.6, 1.3
TOPS = {"FA2.A1": 8.0, "FA2.A2": 7.2}  # {algorithm: y-coordinate of its first line}
# The left edges of the columns, in units from the margin.
COLUMNS = {"words": 0.66, "numpy": 5.2, "triton": 11.5, "work": 19.9}
INDENT = 0.26  # indentation per loop
WRAP = {"words": 48, "numpy": 58, "triton": 80}
TITLE, HEADING, FORMULAS, NOTES, WORDS, CODE = 76, 27, 27, 23, 20.5, 17.25  # points
MAIN, LARGER = {"FA2.A1": (9, 10), "FA2.A2": (15,)}, 1.2  # the lines with larger letters, and how much larger they are
# The distance from one line of text to the next, in units.
LEADING = {"words": 0.24, "numpy": 0.208, "triton": 0.208, "work": 0.24}
MONO = ["DejaVu Sans Mono", "monospace"]
SERIF = dict(family="STIXGeneral", math_fontfamily="stix")  # for formulas that stand alone


@style.picture
def draw(algorithm: Algorithm, rows: list[Row], files: tuple[str, str], site: str = "") -> style.Drawn:
    """Draw an A1 sheet: the tiles, the values computed from one tile, and one row for each line of the algorithm.

    `site` is the address printed on the sheet.
    """
    figure = Figure(figsize=(SHEET[0] / UNIT, SHEET[1] / UNIT))
    message, _ = HEADLINES[algorithm.tag]
    figure.set_label(f"{message}. Each line is there in words, in NumPy, in Triton and as work for the machine.")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-MARGIN, SHEET[0] - MARGIN), ylim=(SHEET[1], 0))
    ax.set_axis_off()
    _draw_head(ax, algorithm, files)
    address = site.removeprefix("https://").rstrip("/")
    forward = algorithm.tag == "FA2.A1"
    _draw_tiles(ax, *((5.9, 3.1, 4.4) if forward else (6.5, 3.7, 2.95)), algorithm.tag)
    _draw_chip(ax, COLUMNS["triton"] + INSET, 2.15, algorithm.tag)
    sizes = [LARGER if row.number in MAIN[algorithm.tag] else 1.0 for row in rows]
    cells = [
        {name: cell_lines(row, name, size) for name in WRAP} | {"work": work_lines(row, algorithm.tag)}
        for row, size in zip(rows, sizes, strict=True)
    ]
    tall = [
        size * max(LEADING[name] * len(lines) for name, lines in cell.items())
        for cell, size in zip(cells, sizes, strict=True)
    ]
    y = TOPS[algorithm.tag]
    gap = (SHEET[1] - FOOT - y - sum(tall)) / len(rows)
    for row, cell, size, height in zip(rows, cells, sizes, tall, strict=True):
        _draw_loops(ax, row.depth, y, height + gap)
        if size > 1:
            left, fill = COLUMNS["words"] - 0.1 + INDENT * row.depth, style.tensor_fill(assigned_tensors(row.numpy)[0])
            style.box(ax, left, y, SHEET[0] - 2 * MARGIN - left, height + gap, fill=fill, linewidth=0)
        style.box(ax, 0, y, SHEET[0] - 2 * MARGIN, 0.012, fill=style.tint(style.INK, 0.2), linewidth=0)
        _draw_entry(ax, row, cell, y + (height + gap) / 2, size)
        y += height + gap
    _draw_foot(ax, algorithm.tag, address)
    for text in ax.texts:
        if text.get_fontfamily() != MONO:
            alone = re.fullmatch(r"\$[^$]*\$(, stored)?", text.get_text())
            text.set(**(SERIF if alone else dict(fontsize=0.84 * text.get_fontsize())))
    alt = (
        f"A sheet of A1. Above, the tiles of Q, K, V and S that the loops of {algorithm.tag} go through, and what"
        f" becomes of one tile on the chip. Below, {len(rows)} lines: the paper's line in our words, the NumPy lines,"
        " the Triton lines, and the numbers that the line moves and the operations that it takes. The foot explains the"
        " names in the code."
    )
    return figure, alt


HEADLINES = {  # {algorithm: (headline, sentence below it)}
    "FA2.A1": (
        "The forward pass never stores the scores",
        "It uses each tile of $S$ at once, and keeps a maximum, a sum and an output for each row.",
    ),
    "FA2.A2": (
        "The backward pass computes the scores again",
        "It runs five matmuls for each tile of $S$. From the forward pass, it needs only $O$ and $L$.",
    ),
}
LETTERS = {  # {letter: its meaning}
    "$N$": "length of the sequence",
    "$d$": "head dimension",
    "$τ$": "scale of the scores",
    "$B_r,\\, B_c$": "rows and columns of a tile",
    "$T_r$": "$⌈N/B_r⌉$, the number of row blocks",
    "$T_c$": "$⌈N/B_c⌉$, the number of column blocks",
}
LETTERS_BY_ALGORITHM = {  # {algorithm: {letter: meaning}} for letters that occur in only one pass
    "FA2.A1": {
        "$m_i$": "largest score of each row so far",
        "$\\ell_i$": "sum of exponentials of each row so far",
        "$L_i$": "$m_i + \\log\\,\\ell_i$, all that is kept of both",
    },
    "FA2.A2": {
        "$L_i$": "$m_i + \\log\\,\\ell_i$, from the forward pass",
        "$D_i$": "row sum of $dO_i \\,∘\\, O_i$, entry by entry",
        "$dQ$ …": "gradients, with dashed edges ($dO$ is given)",
    },
}


def _draw_head(ax: style.Axes, algorithm: Algorithm, files: tuple[str, str]) -> None:
    """Draw the title, the meanings of the letters, and the column headings."""
    message, more = HEADLINES[algorithm.tag]
    kicker = f"FlashAttention-2 line by line: algorithm {algorithm.tag[-1]} of the paper ({algorithm.source})"
    ax.text(0, 0.45, kicker, fontsize=HEADING, color=style.QUIET)
    ax.text(0, 0.6, message, fontsize=TITLE, weight="bold", va="top")
    ax.text(0, 1.65, more, fontsize=34, va="center")
    y = 2.3
    for letter, meaning in (LETTERS | LETTERS_BY_ALGORITHM[algorithm.tag]).items():
        ax.text(0, y, letter, fontsize=NOTES, va="center")
        ax.text(0.95, y, meaning, fontsize=NOTES, va="center")
        y += 0.37
    style.box(ax, 0.02, y - 0.12, 0.5, 0.24, linewidth=3.6)
    ax.text(0.95, y, "stays on the chip, with one worker", fontsize=NOTES, va="center")
    left_out = "Lines that only cut blocks, end a loop or return are left out."
    ask = f"To ask for a line: fa2-lab where {algorithm.tag}.L10"
    ax.text(0, y + 0.35, f"{left_out}\n{ask}", fontsize=WORDS, va="top", color=style.QUIET, linespacing=1.3)
    names = dict(words=("In words", ""), numpy=("In NumPy", files[0]), triton=("In Triton", files[1]))
    for name, (words, file) in (names | dict(work=("Work", "each time it runs"))).items():
        ax.text(COLUMNS[name], TOPS[algorithm.tag] - 0.25, words, fontsize=HEADING, weight="bold", va="center")
        look = dict(family=MONO, fontsize=CODE) if file.endswith(".py") else dict(fontsize=WORDS)
        at = COLUMNS[name] + 0.205 * len(words)
        ax.text(at, TOPS[algorithm.tag] - 0.25, file, color=style.QUIET, va="center", **look)


def _draw_tiles(ax: style.Axes, x: float, y: float, side: float, tag: str) -> None:
    """Draw the tensors and the tiles that the loops visit. S is a square with sides of `side` units at (x, y).

    S is never stored, so only one of its tiles is drawn. The blocks that a worker keeps on chip have a thick edge.
    """
    forward, wide, apart, i, j = tag == "FA2.A1", 0.42, 0.54, 2, 3
    cell = side / 5
    outer = (x, y + i * cell, side, cell) if forward else (x + j * cell, y, cell, side)
    style.box(ax, x, y, side, side, fill=style.tint(style.INK, 0.05), edgecolor=style.QUIET, linestyle=(0, (2, 2)))
    style.box(ax, *outer, fill=style.tint(style.hue("S"), 0.15), linewidth=0)
    style.tensor_box(ax, x + j * cell, y + i * cell, cell, cell, "S", "$s_{ij}$", size=FORMULAS)
    ax.text(x + 1.5 * cell, y + 4 * cell, "$S$ is never stored", fontsize=NOTES, ha="center", va="center")
    left, above = (("Q",), ("V", "K")) if forward else (("Q", "dO"), ("V", "K", "dV", "dK"))
    right = {"O": wide, "L": 0.24} if forward else {"dQ": wide, "L": 0.24, "D": 0.24}  # L and D are one element wide
    places = {name: (-0.6 - apart * n, wide) for n, name in enumerate(left)}
    x_next = side + 0.18
    for name, broad in right.items():
        places[name], x_next = (x_next, broad), x_next + broad + 0.12
    for tensor, (at, broad) in places.items():
        style.box(ax, x + at, y, broad, side, edgecolor=style.hue(tensor), linewidth=1)
        keeps = dict(linewidth=3.6) if forward else {}
        style.tensor_box(ax, x + at, y + i * cell, broad, cell, tensor, "$i$", size=WORDS, **keeps)
        style.note(ax, x + at + broad / 2, y - 0.14, f"${tensor}$", ha="center", fontsize=WORDS)
    high, apart = (0.42, 0.54) if forward else (0.32, 0.39)
    for n, tensor in enumerate(above):
        top = y - high - 0.18 - apart * n
        style.box(ax, x, top, side, high, edgecolor=style.hue(tensor), linewidth=1)
        keeps = {} if forward else dict(linewidth=3.6)
        style.tensor_box(ax, x + j * cell, top, cell, high, tensor, "$j$", size=WORDS, **keeps)
        style.note(ax, x - 0.12, top + high / 2, f"${tensor}$", ha="right", fontsize=WORDS)


FLOW: dict[str, tuple[list[tuple], list[tuple[int, int]]]] = {  # boxes (line, tensor, words, column, row), and arrows
    "FA2.A1": (
        [
            (8, "S", r"$s_{ij} = τ\,q_i k_j^{T}$", 0, 0),
            (9, "m", r"$m_\mathrm{new} = \max(m_i, \mathrm{rowmax}\,s_{ij})$", 1, 0),
            (9, "P", r"$p_{ij} = e^{s_{ij} - m_\mathrm{new}}$", 1, 1),
            (10, "O", r"$o_i \leftarrow α\,o_i + p_{ij} v_j$", 2, 0),
            (9, "l", r"$\ell_i \leftarrow α\,\ell_i + \mathrm{rowsum}\,p_{ij}$", 2, 1),
            (13, "L", r"$L_i = m_i + \log\,\ell_i$, stored", 1, 2),
            (12, "O", r"$o_i \leftarrow o_i / \ell_i$, stored", 2, 2),
        ],
        [(0, 1), (0, 2), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (4, 5), (4, 6), (3, 6)],
    ),
    "FA2.A2": (
        [
            (10, "S", r"$s_{ij} = τ\,q_i k_j^{T}$", 0, 0),
            (11, "P", r"$p_{ij} = e^{s_{ij} - L_i}$", 0, 1),
            (12, "dV", r"$dv_j \leftarrow dv_j + p_{ij}^{T} do_i$", 0, 2),
            (13, "dP", r"$dp_{ij} = do_i v_j^{T}$", 1, 0),
            (14, "dS", r"$ds_{ij} = p_{ij} \,∘\,(dp_{ij} - D_i)$", 1, 1),
            (15, "dQ", r"$dQ_i \leftarrow dQ_i + τ\,ds_{ij} k_j$", 2, 1),
            (16, "dK", r"$dk_j \leftarrow dk_j + τ\,ds_{ij}^{T} q_i$", 2, 2),
            (4, "D", r"$D_i = \mathrm{rowsum}(do_i \,∘\, o_i)$", 2, 0),
        ],
        [(0, 1), (1, 2), (3, 4), (1, 4), (4, 5), (4, 6), (7, 4)],
    ),
}
LOOP = {  # (column, row) of the corners of the frame around the inner loop's boxes
    "FA2.A1": [(0, 0), (3, 0), (3, 2), (0, 2)],
    "FA2.A2": [(0, 0), (2, 0), (2, 1), (3, 1), (3, 3), (0, 3)],
}
WORKER = (  # an explanation of what the flow chart of the backward pass omits
    "A worker keeps $dk_j$ and $dv_j$ to\nthe end of its loop. It adds each\n"
    "part of $dQ_i$ in HBM, where other\nworkers add as well."
)
WIDE, HIGH, RIGHT = 3.1, 0.85, 3.5  # a box's width and height, and the distance between columns, in the sheet's units
ROW_DISTANCES = {"FA2.A1": 1.55, "FA2.A2": 1.42}  # {algorithm: the distance from one row of boxes to the next}
INSET = (RIGHT - WIDE) / 2  # distance from the frame's edge to the boxes


def _draw_chip(ax: style.Axes, x: float, y: float, tag: str) -> None:
    """Draw the values computed from one tile, each in a box with the number of the line that computes it."""
    boxes, arrows = FLOW[tag]
    down = ROW_DISTANCES[tag]
    ax.text(x, y, "What becomes of one tile", fontsize=HEADING, weight="bold", va="center")
    ax.text(x + 3.45, y, "in the frame: the inner loop", fontsize=WORDS, va="center")
    right = SHEET[0] - 2 * MARGIN
    frame = [(right if c == 3 else x + RIGHT * c - INSET, y + 0.28 + down * r) for c, r in LOOP[tag]]
    ax.fill(*zip(*frame, strict=True), facecolor=style.tint(style.INK, 0.05), edgecolor=style.QUIET, linewidth=2)
    places = [(x + RIGHT * column, y + 0.75 + down * row) for *_, column, row in boxes]
    for (number, tensor, words, *_), (left, top) in zip(boxes, places, strict=True):
        style.tensor_box(ax, left, top, WIDE, HIGH, tensor, words, size=FORMULAS)
        ax.text(left + 0.02, top - 0.16, str(number), fontsize=WORDS, weight="bold", va="center")
        if number in matmuls(tag):
            ax.text(left + WIDE, top - 0.16, f"{matmuls(tag)[number]} matmul", fontsize=WORDS, ha="right", va="center")
    for start, end in arrows:
        (x0, y0), (x1, y1) = places[start], places[end]
        if x0 == x1 and y1 > y0 + 1.5 * down:  # the arrow goes around the box in between
            side, middle = x0 + WIDE + 0.2, y1 + HIGH / 2
            ax.plot([x0 + WIDE, side, side], [y0 + HIGH / 2, y0 + HIGH / 2, middle], color=style.INK, linewidth=2)
            ends = (side, middle), (x0 + WIDE, middle)
        elif x0 == x1:
            ends = (x0 + WIDE / 2, y0 + HIGH), (x0 + WIDE / 2, y1)
        elif x0 > x1:
            ends = (x0 + 0.3, y0 + HIGH), (x1 + WIDE - 0.3, y1)
        elif y0 == y1:
            ends = (x0 + WIDE, y0 + HIGH / 2), (x1, y1 + HIGH / 2)
        elif y0 > y1:
            ends = (x0 + WIDE - 0.3, y0), (x1 + 0.6, y1 + HIGH)
            gap = [(0.8 * a + 0.2 * b, 0.2 * a + 0.8 * b) for a, b in zip(*ends, strict=True)]
            ax.plot(*gap, color=style.tint(style.INK, 0.05), linewidth=11, zorder=3)  # a bridge over the other arrow
        else:
            ends = (x0 + WIDE - 0.3, y0 + HIGH), (x1 + 1.1, y1)
        style.arrow(ax, *ends, linewidth=2, mutation_scale=23)
    if tag == "FA2.A1":
        _draw_shrinking(ax, x, y + 0.55 + down)
    else:
        ax.text(x + RIGHT, y + 0.6 + 2 * down, WORKER, fontsize=WORDS, va="top", linespacing=1.3)


def _draw_shrinking(ax: style.Axes, x: float, y: float) -> None:
    """Draw two bars from (x, y): the row sum before and after a tile whose scores raise the maximum by 1."""
    high, old, added = 0.3, 2.7, 0.9
    shrunk = old * exp(-1)
    ax.text(x, y, r"$α = e^{m_i - m_\mathrm{new}}$ shrinks old sums", fontsize=WORDS, va="center")
    style.tensor_box(ax, x, y + 0.22, old, high, "l", r"$\ell_i$ so far", size=WORDS)
    style.tensor_box(ax, x, y + 0.82, shrunk, high, "l", r"$α\,\ell_i$", size=WORDS)
    style.tensor_box(ax, x + shrunk, y + 0.82, added, high, "P", "new", size=WORDS)
    for begin, end in ((x, x), (x + old, x + shrunk)):
        ax.plot([begin, end], [y + 0.22 + high, y + 0.82], color=style.INK, linewidth=1.2, linestyle=style.DASHED)


NAMES = {  # names in the NumPy and Triton code that neither the paper nor the top of the sheet explains
    "FA2.A1": (
        "`rows` and `cols` are the rows of block $i$ and the columns of block $j$. `parallel` means that each $i$ has a"
        " worker, and `serial` that a worker takes each $j$ in turn. `visited_cols(i)` are the blocks $j$ that the mask"
        " does not hide. `m_0` and `l_0` are −∞ and 0 (with a sink: its score and 1). `finite(m)` is `m`, with 0 for"
        " −∞.",
        "`i` and `j` are a block's first row and first key, `row` its row numbers, and `at` the addresses of its o. All"
        " rows see the keys before `full`, and none sees those from `last` on. `RAGGED`: rows past the end are not"
        " read. `tau_log2` is $τ\\log_2e$, since $m$ is in base 2. `LN2` is log 2, and `LOWEST` $-10^{30}$. `empty`:"
        " rows without keys. The file also has this loop without a mask.",
    ),
    "FA2.A2": (
        "`rows` and `cols` are the rows of block $i$ and the columns of block $j$. `parallel` means that each $j$ has a"
        " worker, and `serial` that a worker takes each $i$ in turn. `visited_rows(j)` are the blocks $i$ that the mask"
        " does not hide. `finite(L)` is `L`, with 0 for −∞. Dropout is left out.",
        "`i` and `j` are a block's first row and first key, `row` its row numbers, and `first` the start of the first"
        " row block that sees a key of block $j$. `load_row_values` loads a block of $L$ or $D$. `add_rows` adds"
        " atomically. `power` is $(s_{ij}-L_i)\\log_2e$, or −∞ where the mask hides the score, and `exp2` is in base"
        " 2.",
    ),
}
HALF = {"numpy": 145, "triton": 138}  # characters per line in the notes below the two columns of code


SOURCE = (
    "fa2_lab: FlashAttention-2, line by line, an interactive book. Code: MIT licence. Text and pictures: CC BY 4.0."
)


def _draw_foot(ax: style.Axes, tag: str, address: str) -> None:
    """Draw a paragraph below each column of code that explains its names, and then the source and the licence.

    `tag` is the algorithm's tag. `address` is the address of the book's site, or empty.
    """
    style.note(ax, 0, SHEET[1] - 0.22, SOURCE, fontsize=WORDS)
    style.note(ax, SHEET[0] - 2 * MARGIN, SHEET[1] - 0.22, address, fontsize=WORDS, ha="right")
    for x, (column, room), words in zip((0, COLUMNS["triton"]), HALF.items(), NAMES[tag], strict=True):
        title = f"Names in {dict(numpy='NumPy', triton='Triton')[column]}: "
        for k, line in enumerate(wrap(title + words, room)):
            line = re.sub("`(.*?)`", lambda name: rf"$\mathbf{{{name[1].replace('_', chr(92) + '_')}}}$", line)
            style.note(ax, x, SHEET[1] - FOOT + 0.25 + LEADING["words"] * k, line, color=style.QUIET, fontsize=WORDS)


def formulas(words: str) -> str:
    """Replace formulas in `words`, such as q_i, m_new, p_ijᵀ and e^(m_i − m_new), with matplotlib's mathtext."""

    def name(match: re.Match) -> str:
        letter, below, above = match.group(1, 2, 3)
        letter, below = {"l": r"\ell"}.get(letter, letter), {"new": r"\mathrm{new}"}.get(below, below)
        return f"{letter}_{{{below}}}" + ("^{T}" if above else "")

    names = r"\b([A-Za-z]{1,2})_(new|ij|i|j|r|c)(?![A-Za-z0-9_])(ᵀ?)"
    power = re.compile(r"e\^\(([^)]*)\)")
    set_powers = power.sub(lambda f: "$e^{" + re.sub(names, name, f[1]).replace("\u00a0", " ") + "}$", words)
    parts = re.split(r"(\$[^$]*\$)", set_powers)
    either = rf"{names}|(?<![\w'])(d?[QKVOSDLN]|[ijdτ])(?![\w'_])"  # also match a letter without an index

    def formula(match: re.Match) -> str:
        return f"${name(match) if match[1] else match[4]}$"

    return "".join(p if p.startswith("$") else re.sub(either, formula, p) for p in parts)


def cell_lines(row: Row, column: str, size: float) -> list[str]:
    """Break a cell's text into lines that fit its column at this size of the letters, but never inside a formula."""
    room = int(WRAP[column] / size)
    if column == "words":
        return [
            formulas(line) for line in break_lines(with_unbroken_formulas(row.words).split(" "), room - 2 * row.depth)
        ]
    lines = join_calls([part for line in getattr(row, column) for part in split_assignment(line, room)])
    return [part for line in lines for part in wrap(line, room, subsequent_indent=" " * 4)]


def split_assignment(line: str, room: int) -> list[str]:
    """If an assignment of several values is longer than `room`, split it into one assignment per value."""
    names, _, values = line.partition(" = ")
    parts = re.split(r", (?![^()]*\))", values)
    each = list(zip(names.split(", "), parts, strict=False))
    return [f"{name} = {value}" for name, value in each] if len(line) > room and len(each) == len(parts) else [line]


def join_calls(lines: list[str]) -> list[str]:
    """Join the lines of a cell in pairs if the lines of each pair call the same function and fit on one line."""
    pairs = [lines[n : n + 2] for n in range(0, len(lines), 2)]
    called = [[re.sub(r"^(\w+ = )?([\w.]+\().*", r"\2", line) for line in pair] for pair in pairs]
    alike = all(names[0].endswith("(") and names == names[:1] * 2 for names in called)
    joined = ["; ".join(pair) for pair in pairs]
    return joined if alike and max(map(len, joined)) < WRAP["triton"] - 2 else lines


def with_unbroken_formulas(words: str) -> str:
    """Make the spaces inside formulas non-breaking."""
    words = re.sub(r" ([=←+−∘×/]) ", "\u00a0\\1\u00a0", words)
    words = re.sub(r"(?<=[τℓ⌉)]) (?=\w)|(?<=_ij) (?=[kv]_)|(?<=_ijᵀ) (?=do_|q_)|(?<=[qo]_i) (?=[kv]_)", "\u00a0", words)
    return re.sub(r"\([^()]*\)", lambda match: match[0].replace(" ", "\u00a0"), words)


def break_lines(words: list[str], room: int) -> list[str]:
    """Break the words into lines of at most `room` characters. Each character of an index or exponent counts half."""
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        small = sum(map(len, re.findall(r"_(?:new|ij|i|j|r|c)\b|\^\([^)]*\)", longer)))
        lines[-1:] = [longer] if len(longer) - small / 2 <= room else [lines[-1], word]
    return lines


def work_lines(row: Row, tag: str) -> list[str]:
    """Format a line's work as text: each formula, preceded by the kinds of work that it counts."""
    number = f"{matmuls(tag).get(row.number, '')} "
    kinds: dict[str, list[str]] = {}
    for lane, name in LANES.items():
        if lane in row.work:
            kinds.setdefault(row.work[lane], []).append(number * (lane == "matmul") + name)
    return [f"{', '.join(names)}: {sum_as_mathtext(formula)}" for formula, names in kinds.items()]


def sum_as_mathtext(formula: str) -> str:
    """Convert a formula such as 2 B_r d + B_r to matplotlib's mathtext."""
    spaced = " + ".join(term.replace(" ", r"\,") for term in formula.split(" + "))
    return f"${re.sub('B_(.)', 'B_{' + chr(92) + '1}', spaced)}$"


def _draw_loops(ax: style.Axes, depth: int, y: float, height: float) -> None:
    """Draw the loops around a line as `depth` nested backgrounds, each with a bar at its left edge."""
    for level in range(1, depth + 1):
        x = COLUMNS["words"] - 0.1 + INDENT * (level - 1)
        fill = style.tint(style.INK, 0.035 * level)
        style.box(ax, x, y, SHEET[0] - 2 * MARGIN - x, height, fill=fill, linewidth=0)
        style.box(ax, x, y, 0.035, height, fill=style.worker_color(2 * level - 1), linewidth=0)


def assigned_tensors(lines: tuple[str, ...]) -> list[str]:
    """Return the tensors assigned in these lines of NumPy code, but only the first of those that share a colour."""
    tensor_of_hue: dict[str, str] = {}
    for names in (line.split(" = ")[0] for line in lines if " = " in line):
        for name in re.findall(r"[A-Za-z]\w*(?![\w\]])", names):
            try:
                tensor_of_hue.setdefault(style.hue(name), name)
            except ValueError:  # not a tensor
                continue
    return list(tensor_of_hue.values())


def _draw_entry(ax: style.Axes, row: Row, cells: dict[str, list[str]], middle: float, size: float) -> None:
    """Draw one line of the algorithm across all columns, centred at y = `middle`, with letters `size` times as large.

    `cells` is {column: lines of text}. The line's number is drawn in the colours of the tensors that the line computes.
    """
    tensors = assigned_tensors(row.numpy)
    for k, tensor in enumerate(tensors):
        strip = (0.44 * k / len(tensors), middle - 0.15, 0.44 / len(tensors), 0.3)
        style.box(ax, *strip, fill=style.tensor_fill(tensor), linewidth=0)
    ax.text(0.22, middle, str(row.number), fontsize=size * WORDS, weight="bold", ha="center", va="center")
    for name, lines in cells.items():
        mono = dict(family=MONO, fontsize=size * CODE) if name in ("numpy", "triton") else {}
        for k, line in enumerate(lines):
            at = middle + size * LEADING[name] * (k - (len(lines) - 1) / 2)
            indent = len(line) - len(line.lstrip(" "))
            x = COLUMNS[name] + (INDENT * row.depth if name == "words" else indent * 0.602 * size * CODE / 72 * UNIT)
            words = line.lstrip().replace("$", r"\$") if mono else line
            ax.text(x, at, words, va="center", **dict(fontsize=size * WORDS) | mono)
