"""Small pictures of the chapters, each made of a few tiles that are large enough to read.

The cards of the first page show them, and so do the pictures that other sites show when a chapter is shared.

Each row is a string with one tile per character. A capital letter stands for a tensor with its name, a small letter for
a tensor without its name, a digit for a worker, "#" for fa2_lab, and "/" for a masked or idle tile. A square character
stands for a tile without a fill, and a full stop for an empty space. Any other character is drawn as text.
"""

from io import BytesIO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from fa2_lab.plots import style
from fa2_studio.book.chapters import Chapter

CARD_INCHES = (2.69, 1.42)  # a card's width and height
PREVIEW_INCHES = (4.5, 2.3625)  # the same for the picture shown when a chapter is shared, 1200 × 630 pixels
PREVIEW_PLACE = (0.46, 0.14, 0.51, 0.78)  # left, bottom, width and height of the tiles in it
TALLEST = 2.0  # height of a tile in widths, if a few long rows would otherwise leave much of the place empty
GRADIENTS = dict(a="dQ", b="dK", c="dV", e="dO")
PALE_TINT = 0.22  # tint of t, whose score is smaller than that of p
CARDS = {  # {chapter: (description of its picture, rows of tiles)}
    "00_start": (
        "A large memory with all of Q, K and V, and a small chip with one block of each",
        ("qqqqq.....", "kkkkk.→.QK", "vvvvv...VO"),
    ),
    "01_naive_attention": (
        "All scores between Q and K, which give O",
        ("..kkkkk....", "q.sssss...o", "q.sssss.→.o", "q.sssss...o"),
    ),
    "02_online_softmax": (
        "Three blocks of a row of scores, each of which updates O",
        ("sss□□□□□□..→.O", "tttsss□□□..→.O", "ttttttsss..→.O"),
    ),
    "03_fa1": (
        "One tile of the scores at a time, between Q, K, V and O",
        ("..KKKK..", "Q.□□□□.O", "Q.□S□□.O", "Q.□□□□.O"),
    ),
    "04_fa2_forward": (
        "Row blocks of scores under a causal mask, each with its block of O",
        ("Q.s////.O", "Q.ss///.O", "Q.sss//.O", "Q.ssss/.O"),
    ),
    "05_backward": ("Q, K and V give O, and dO gives dQ, dK and dV", ("QKV→O", ".....", "abc←e")),
    "06_parallelism": (
        "Four workers with a row block each, without and with a causal mask",
        ("0000..0///", "1111..11//", "2222..222/", "3333..3333"),
    ),
    "07_warps": (
        "Four warps that split the columns of a tile, and four that split its rows",
        ("0123..0000", "0123..1111", "0123..2222", "0123..3333"),
    ),
    "08_triton_forward": (
        "Four programs, each with a row block of Q, whose last rows are masked",
        ("0→qqqqqqqq", "1→qqqqqqqq", "2→qqqqqqqq", "3→////////"),
    ),
    "09_triton_backward": (
        "Four column blocks that add to the same blocks of dQ",
        ("bbbb..", "0123→a", "0123→a", "0123→a"),
    ),
    "10_ladder": (
        "Columns that become higher from rung to rung",
        (".......##", "....#.###", "...######", ".########"),
    ),
    "11_workshop": (
        "A trace in which matmuls wait for copies",
        ("KV//KV//KV", "//SO//SO//"),
    ),
    "12a_hopper_rungs": (
        "Copies of K and V, matmuls and exponentials, which overlap in time",
        ("KVKVKVKV...", ".SOSOSOSO..", "..P.P.P.P.."),
    ),
    "12b_hopper_kernel": (
        "One warp copies K and V, and two groups of warps alternate between matmuls and exponentials",
        ("KVKVKVKV..", ".SPSPSPSP.", "..SPSPSPSP"),
    ),
    "13_hopper_backward": (
        "Two groups of warps compute tiles, and one worker adds their parts to dQ",
        ("1ss......", "1ss→3→a", "2ss→3→a", "2ss......"),
    ),
    "14_decode": ("One query, and a long cache of K and V that four workers share", ("..00112233..", "Q.00112233.O")),
    "15_rings": ("Four GPUs, to which the blocks of K and V come in turn", ("0123", "3012", "2301", "1230")),
    "16_masks": (
        "A causal mask, a window and two documents",
        ("s////.s////.ss///", "ss///.ss///.ss///", "sss//./ss//.//sss", "ssss/.//ss/.//sss", "sssss.///ss.//sss"),
    ),
    "17_change_it": (
        "Scores under a causal mask, plus a bias that falls with distance",
        ("s///...s///", "ss//.+.ps//", "sss/...tps/", "ssss...ttps"),
    ),
    "A_lanes": (
        "A column of a tile in one memory bank, and the same column swizzled over all banks",
        ("k□□□□..k□□□□", "k□□□□..□k□□□", "k□□□□..□□k□□", "k□□□□..□□□k□", "k□□□□..□□□□k"),
    ),
    "B_errata": ("Two results that agree, and two that do not", ("O.=.O", ".....", "L.≠.L")),
    "C_package": ("attention takes Q, K and V, and returns O and L", ("Q....", "K.→.O", "V...L")),
    "D_numbers": (
        "Three results whose last digits differ",
        ("O.=.□□□□□□//", "O.=.□□□□□///", "O.=.□□□□////"),
    ),
}

LIVE_CARDS = {  # {interactive figure: (the question it answers, rows of tiles)}
    "algorithm1": (
        "What does each step of Algorithm 1 load, keep and store?",
        ("..kkKKkk...", "Q.ttpp□□..O", "Q.ttpp□□..O", "q.□□□□□□..o", "q.□□□□□□..o"),
    ),
    "softmax": ("What does a larger score shrink?", ("pppp□□□□.→.O", "ttttpppp.→.O")),
    "tiles": (
        "What does one tile of scores cost, and does it fit on the chip?",
        ("..kkkKKKkkk", "Q.□□□SSS□□□", "Q.□□□SSS□□□", "q.□□□□□□□□□"),
    ),
    "climb": ("What did each change gain?", (".......##", "....#.###", "...######", ".########")),
    "timetable": ("When are SMs idle?", ("00000000", "111111//", "22222222", "3333////")),
    "backward": ("When do workers meet in dQ?", ("0123→a", "......", "0000→a")),
    "race": ("Why does the same input give other bits?", ("3102→a", "..≠...", "1320→a")),
}


def card_svg(name: str) -> str:
    """Return the picture of a card."""
    alt, tiles = CARDS[name]
    return style.svg(draw_card(tiles), alt)


def draw_card(rows: tuple[str, ...]) -> Figure:
    """Draw these tiles as a card's picture, as large as the card allows."""
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=CARD_INCHES)
        draw_tiles(figure.add_axes((0.04, 0.06, 0.92, 0.88)), rows)
        return figure


def chapter_preview(chapter: Chapter) -> bytes:
    """Return the picture shown when a chapter is shared: its number, title and question, and its card's tiles."""
    kind = "Chapter" if chapter.number[0].isdigit() else "Appendix"
    return preview_png(f"{kind} {chapter.number}", chapter.title, chapter.question, CARDS[chapter.name][1])


def live_preview(name: str, title: str) -> bytes:
    """Return the picture shown when the page of an interactive figure is shared."""
    question, rows = LIVE_CARDS[name]
    return preview_png("Interactive figure", title, question, rows)


def preview_png(above: str, title: str, question: str, rows: tuple[str, ...]) -> bytes:
    """Return a preview as PNG: a line above the title, the title and a question on the left, and tiles on the right."""
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=PREVIEW_INCHES, dpi=1200 / PREVIEW_INCHES[0])
        ax = figure.add_axes(PREVIEW_PLACE)
        tall = ax.bbox.height / len(rows) / (ax.bbox.width / len(rows[0]))
        draw_tiles(ax, rows, min(max(tall, 1), TALLEST))
        look = dict(ha="left", va="top")
        words = title.replace("-", "\u2011")  # FlashAttention-2 is not broken
        heading = figure.text(0.035, 0.82, max(words.split(), key=len), fontsize=17, fontweight="bold", **look)
        while heading.get_window_extent().width > 0.4 * figure.bbox.width:  # no word is broken
            heading.set_fontsize(heading.get_fontsize() - 1)
        heading.set_text(words)
        style.wrap_text(heading, 0.4 * figure.bbox.width)
        end = heading.get_window_extent().y0 / figure.bbox.height
        below = figure.text(0.035, end - 0.05, question, fontsize=10.5, linespacing=1.3, **look)
        style.wrap_text(below, 0.4 * figure.bbox.width)
        figure.text(0.035, 0.94, above, fontsize=10.5, color=style.QUIET, **look)
        figure.text(0.035, 0.05, "fa2_lab", fontsize=10, fontweight="bold", color=style.OURS)
        figure.text(0.965, 0.05, "FlashAttention-2, line by line", fontsize=10, color=style.QUIET, ha="right")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return with_palette(Image.fromarray(np.asarray(canvas.buffer_rgba())))


def with_palette(image: Image.Image) -> bytes:
    """Return the picture as PNG with few colours, so that it loads quickly."""
    png = BytesIO()
    image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(png, "PNG", optimize=True)
    return png.getvalue()


def draw_tiles(ax: Axes, rows: tuple[str, ...], tall: float = 1.0) -> None:
    """Draw these tiles, `tall` times as high as wide, and as large as the axes allow."""
    style.strip_axes(ax, (-0.05, len(rows[0]) + 0.05), (-0.05, len(rows) + 0.05), aspect=tall)
    for i, row in enumerate(rows):
        for j, mark in enumerate(row):
            draw_tile(ax, j, i, mark)


def draw_tile(ax: Axes, x: int, y: int, mark: str) -> None:
    """Draw one tile of a card."""
    name = GRADIENTS.get(mark, mark.upper())
    if mark == "/":
        style.masked_box(ax, x, y)
    elif mark == "□":
        style.box(ax, x, y, 1, 1, edgecolor=style.QUIET)
    elif mark == "#":
        style.box(ax, x, y, 1, 1, fill=style.OURS)
    elif mark == "t":
        style.box(ax, x, y, 1, 1, fill=style.tint(style.hue("P"), PALE_TINT), edgecolor=style.hue("P"))
    elif mark.isdigit():
        style.box(ax, x, y, 1, 1, mark, style.worker_color(int(mark)))
    elif mark.isalpha():
        style.tensor_box(ax, x, y, 1, 1, name, name if mark in GRADIENTS or mark.isupper() else "")
    elif mark != ".":
        style.note(ax, x + 0.5, y + 0.5, mark, ha="center", fontsize=style.LARGE)
