"""The look of every picture, and the only place where a colour exists.

Hue says which tensor; P has the hue of S, but paler. A worker (thread block, warp, rank) is one of four greys, blue to
pale, with its name printed on it. Hatched means masked, and nothing else is hatched. Queries run down, keys run right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from io import BytesIO
from xml.sax.saxutils import escape

import matplotlib
import numpy as np

matplotlib.use("Agg", force=False)
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text

WIDTH = 7.6  # inches: the width of a notebook's text column, so that a point in the figure is a point on the page
SMALL, NORMAL, LARGE = 7.5, 8.5, 10.0  # text sizes in points

INK, BLACK, QUIET, PAPER, MASKED = "#222222", "#000000", "#6A6A6A", "#FFFFFF", "#EEEEEE"
BLUE, ORANGE, GREEN, PINK, VERMILION, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
PALE_PINK = "#E3B8D0"
HUES = dict(Q=BLUE, K=ORANGE, V=GREEN, S=PINK, P=PALE_PINK, O=VERMILION, m=SKY, l=SKY, L=SKY, D=SKY)
WORKERS = ("#1F2F46", "#586A7E", "#93A1AE", "#CDD2D8")  # grey blue, in equal steps of lightness
MASK_HATCH = "////"
GRADIENT_DASH = (0, (3, 1.5))

RC = {
    "font.family": "DejaVu Sans",
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": NORMAL,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "text.hinting": "none",  # or a word would be narrower where it is measured than in the SVG
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "figure.facecolor": PAPER,
    "figure.titlesize": LARGE,
    "figure.titleweight": "bold",
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "fa2_lab",
    "svg.fonttype": "none",
}


def picture(draw: Callable) -> Callable:
    """Mark a figure function: it draws in this style, ℓ is ℓ, and its layout is settled once and for all."""

    @wraps(draw)
    def drawn(*args, **kwargs) -> tuple[Figure, str]:
        with matplotlib.rc_context(RC):
            figure, alt = draw(*args, **kwargs)
            for text in figure.findobj(Text):
                text.set_text(ell(text.get_text()))
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        return figure, ell(alt)

    return drawn


def ell(words: str) -> str:
    """The letter that the code writes l, as the papers write it."""
    return re.sub(r"(?<!\w)l(?![A-Za-z0-9_])", "ℓ", words)


def hue(tensor: str) -> str:
    """The colour of a tensor; a gradient (dQ) and a part (q_i) have their tensor's."""
    letter = tensor.removeprefix("d").split("_")[0]
    letter = letter if letter in HUES else letter.upper()
    if letter not in HUES:
        raise ValueError(
            f"tensor: got {tensor!r}; it takes one of {', '.join(HUES)}, or one with d before or _i behind"
        )
    return HUES[letter]


def worker(k: int, of: int = 4) -> str:
    """The colour of worker k among `of`; from the fifth on they repeat, so its name must be printed on it."""
    steps = {1: (0,), 2: (0, 3), 3: (0, 1, 3)}.get(of, (0, 1, 2, 3))
    return WORKERS[steps[k % len(steps)]]


def luminance(color: str) -> float:
    """Relative luminance as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG contrast ratio of two colours, 1 to 21."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink_on(fill: str) -> str:
    """Ink, or else paper, or else black: the first that reads well on this fill."""
    return next(ink for ink in (INK, PAPER, BLACK) if contrast(ink, fill) >= 4.5)


def tint(color: str, strength: float = 0.3) -> str:
    """The colour mixed with paper: 1 is the colour itself, 0 is paper."""
    mixed = [strength * c + (1 - strength) for c in colors.to_rgb(color)]
    return colors.to_hex(mixed)


def fill(tensor: str) -> str:
    """The ground of a tensor's box: its hue, tinted so that any label reads; S stays stronger than P."""
    return tint(hue(tensor), {PINK: 0.7, PALE_PINK: 0.5}.get(hue(tensor), 0.3))


def new_figure(height: float, title: str, **subplots) -> tuple[Figure, Axes | Sequence[Axes]]:
    """A figure of notebook width with its one message as title, and its axes (arguments as for plt.subplots)."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.subplots(**subplots)


def box(ax: Axes, x: float, y: float, w: float, h: float, label: str = "", fill: str = PAPER, **look) -> Rectangle:
    """A filled rectangle with its label in the middle, in an ink that reads on the fill."""
    size = look.pop("size", SMALL)
    look = dict(edgecolor=INK, linewidth=0.8) | look
    patch = ax.add_patch(Rectangle((x, y), w, h, facecolor=fill, **look))
    if label:
        text = ax.text(x + w / 2, y + h / 2, label, ha="center", va="center", color=ink_on(fill), fontsize=size)
        patch.label_text = text
        if look.get("hatch"):
            text.set_bbox(dict(facecolor=fill, edgecolor="none", pad=1.0))
    return patch


def bars(ax: Axes, rectangles: Sequence[tuple[float, float, float, float]], fill: str, **look) -> PathPatch:
    """Many rectangles (x, y, width, height) of one look as one patch: one by one they would make a large file."""
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)])
    places = np.reshape(rectangles, (-1, 4))[:, None]
    codes = [Path.MOVETO, *3 * [Path.LINETO], Path.CLOSEPOLY] * len(places)
    path = Path((places[..., :2] + places[..., 2:] * corners).reshape(-1, 2), codes or None)
    return ax.add_patch(PathPatch(path, **dict(facecolor=fill, linewidth=0) | look))


def tensor_box(ax: Axes, x: float, y: float, w: float, h: float, tensor: str, label: str = "", **look) -> Rectangle:
    """A box in its tensor's colours; the edge of a gradient is dashed."""
    edge = dict(edgecolor=hue(tensor), linewidth=1.4, linestyle=GRADIENT_DASH if tensor.startswith("d") else "-")
    return box(ax, x, y, w, h, label, fill(tensor), **edge | look)


def tile_axes(ax: Axes, T_r: int, T_c: int) -> None:
    """Axes for a tile grid: row block 0 on top, queries down, keys right, no ticks."""
    ax.set(xlim=(-0.05, T_c + 0.05), ylim=(T_r + 0.05, -0.05), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_xlabel("keys →")
    ax.set_ylabel("← queries")
    ax.xaxis.set_label_position("top")


def texts(figure: Figure) -> list[Text]:
    """Every text of a figure that is drawn. (Labels of ticks beyond an axis' ends exist, but never are.)"""
    beyond = {label for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for label in _labels_beyond(axis)}
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in beyond]


def _labels_beyond(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    margin = 1e-9 * (high - low)
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    outside = [tick for tick in ticks if not low - margin <= tick.get_loc() <= high + margin]
    return [label for tick in outside for label in (tick.label1, tick.label2)]


CARD = 10  # points of paper around a picture, so that it can stand on a dark page
FONTS = "'DejaVu Sans', 'Bitstream Vera Sans', Verdana, Geneva, sans-serif"  # the first one's widths fit the others


SHORTER = {  # what matplotlib writes: what says the same
    r"<!--.*?-->": "",
    r"font-family: 'DejaVu Sans'; ": "",
    r' transform="rotate\(-0 [^"]*"': "",
    r'<path [^>]*style="fill: none"/>': "",
    r'<g id="[^"]*"': "<g",
    r"(?s)<g>\s*</g>": "",
    r"(\.\d\d)\d+(?=[^<>]*>)": r"\1",
    r"\s*\n\s*": "\n",
}


def svg(figure: Figure, alt: str = "", fingerprint: str = "") -> bytes:
    """The figure as SVG on a card: text as text, with title and description; the same figure gives the same bytes."""
    with matplotlib.rc_context(RC):
        out = BytesIO()
        plain = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=plain, transparent=True)
    drawn = out.getvalue().decode()
    body = drawn[drawn.index("<defs") : drawn.rindex("</svg>")]
    for wordy, short in SHORTER.items():
        body = re.sub(wordy, short, body)
    width, height = (72 * inches + 2 * CARD for inches in figure.get_size_inches())
    title = " ".join(figure.get_suptitle().split())
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" role="img"'
        f' width="{width:g}pt" height="{height:g}pt" viewBox="{-CARD} {-CARD} {width:g} {height:g}"'
        f' font-family="{FONTS}" text-rendering="geometricPrecision">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(alt)}</desc>\n"
        f'<!-- {fingerprint} -->\n<rect x="{1 - CARD}" y="{1 - CARD}" width="{width - 2:g}" height="{height - 2:g}"'
        f' rx="8" fill="{PAPER}" stroke="{MASKED}"/>\n'
    )
    return f"{head}{body}</svg>\n".encode()
