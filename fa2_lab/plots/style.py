"""The look of every picture, and the only module that defines colours.

A mark's hue identifies its tensor; P has a paler shade of the hue of S. A worker (thread block, warp or rank) is drawn
in one of four greys and labelled with its name. Measurements are grey, with two exceptions: fa2_lab's measurements have
an accent colour, and pictures that compare implementations give FlashAttention-3, FlashAttention-4 and cuDNN distinct
hues. Queries run downwards, and keys to the right. One function draws each picture both for a 784-pixel page column and
for a phone, where panels may be stacked but text never shrinks. The first sentence of the caption is also the headline
above the picture. The text never refers to a colour by name, because a label, hatching or an outline always conveys the
same information as the hue.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from io import BytesIO
from math import floor, log10
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
import numpy as np

matplotlib.use("Agg", force=False)
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.ticker import ScalarFormatter

Drawn = tuple[Figure, str]  # what a picture's draw() returns: a figure and its alternative text

WIDTH, NARROW = 784 / 96, 390 / 96  # the widths of a page's column and of a phone, in inches
UNITS = {WIDTH: 5.83, NARROW: 4.17}  # {width in inches: width in units}; lengths inside a picture are in units
SMALL, NORMAL, LARGE = 9.75, 10.5, 12.0  # font sizes in points: 13, 14 and 16 page pixels
HEADLINE_GAP, TITLE_GAP = 0.08, 0.04  # the gap below the headline and the extra gap above each panel's title, in inches

INK, QUIET, PAPER, MASKED = "#222222", "#656A70", "#FFFFFF", "#EEEEEE"
BLUE, ORANGE, GREEN, PINK, VERMILION, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
PALE_PINK = "#E3B8D0"
HUES = dict(Q=BLUE, K=ORANGE, V=GREEN, S=PINK, P=PALE_PINK, O=VERMILION, m=SKY, l=SKY, L=SKY, D=SKY)
OURS = "#6A3D9A"  # the accent for fa2_lab's own measurements
WORKERS = ("#1F2F46", "#586A7E", "#93A1AE", "#CDD2D8")  # greyish blues, in equal steps of lightness
BLACK, WHITE = "#000000", "#FEFEFE"  # for text on fills of full strength; they are the same on light and dark pages
MASK_HATCH = "////"
CARD = "#FFFFFF"  # the card's colour, which keeps pictures in notebooks readable on light and dark pages
EDGE = "#D0D7DE"  # the colour of the line around the card
# The background of text that is written across lines
TEXT_BACKGROUND = dict(facecolor=PAPER, edgecolor="none", pad=1.0)
DASHED = (0, (3, 1.5))  # for the edge of a gradient's box, and for the line of l beside that of m

# Colours on a dark page: dark and light greys are swapped, tints are mixed with a dark background, and hues of full
# strength stay the same.
DARK_PAPER = "#171B21"
DARK = {INK: "#E6E6E6", QUIET: "#A7AEB6", PAPER: DARK_PAPER, MASKED: "#2B3037", OURS: "#B48CE0"}
DARK |= dict(zip(WORKERS, ("#D8DDE3", "#A3B0BD", "#52647A", "#36465A"), strict=True))

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
    "text.hinting": "none",  # otherwise, a word would be measured as narrower than it is in the SVG
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "fa2_lab",
    "svg.fonttype": "none",
}


def picture(draw: Callable[..., Drawn]) -> Callable[..., Drawn]:
    """Wrap `draw` so that it draws in this style, shows the symbol l as ℓ in all text, and lays out the figure once.

    With `narrow=True`, the wrapped function draws a version of the figure that is sized for a phone.
    """

    @wraps(draw)
    def wrapper(*args: Any, narrow: bool = False, **kwargs: Any) -> Drawn:
        with matplotlib.rc_context(RC | {"figure.figsize": (NARROW if narrow else WIDTH, 1)}):
            figure, alt = draw(*args, **kwargs)
            for text in figure.findobj(Text):
                text.set_text(with_script_l(text.get_text()))
            for ax in figure.axes:
                group_digits(ax)
                ax.set_anchor("N")  # leaves no gap below the headline
            figure.draw_without_rendering()
            wrap_titles(figure)
            shrink_height(figure)
            figure.set_layout_engine(None)  # with the placeholder layout engine "none", savefig would draw twice
        figure.set_label(with_script_l(figure.get_label()))
        return figure, with_script_l(alt)

    return wrapper


def with_script_l(words: str) -> str:
    """Return the text with each stand-alone l (as in the code) replaced by ℓ (as in the papers)."""
    return re.sub(r"(?<!\w)l(?![A-Za-z0-9_\\])", "ℓ", words)


# Colours --------------------------------------------------------------------------------------------------------


def hue(tensor: str) -> str:
    """Return a tensor's colour. A gradient (dQ) or a block (q_i) has the colour of its tensor."""
    letter = tensor.removeprefix("d").split("_")[0]
    letter = letter if letter in HUES else letter.upper()
    if letter not in HUES:
        raise ValueError(
            f"tensor: got {tensor!r}; it takes one of {', '.join(HUES)}, or one with d before or _i behind"
        )
    return HUES[letter]


def worker_color(k: int) -> str:
    """Return worker k's colour.

    The colours repeat after four workers, so a worker must always be labelled with its name.
    """
    return WORKERS[k % len(WORKERS)]


def luminance(color: str) -> float:
    """Return a colour's relative luminance, as defined by WCAG."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Return the WCAG contrast ratio of two colours, from 1 to 21."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink_on(fill: str) -> str:
    """Return the colour in which text is readable on this fill."""
    inks = (INK, PAPER) if fill in DARK else (BLACK, WHITE)
    return max(inks, key=lambda ink: contrast(ink, fill))


def mix(color: str, background: str, strength: float) -> str:
    """Return a mixture of `color` and `background`, in which `strength` is the fraction of `color`."""
    parts = zip(colors.to_rgb(color), colors.to_rgb(background), strict=True)
    return colors.to_hex([strength * c + (1 - strength) * g for c, g in parts])


def tint(color: str, strength: float = 0.3) -> str:
    """Return the colour mixed with the paper. A strength of 1 gives the colour itself, and 0 gives the paper."""
    if strength in (0, 1):
        return color if strength else PAPER
    light = mix(color, PAPER, strength)
    DARK[light] = mix(DARK.get(color, color), DARK_PAPER, strength if color in DARK else 0.58 * strength + 0.09)
    return light


def tensor_fill(tensor: str) -> str:
    """Return the fill of a tensor's box: its hue, tinted so that any label on it is readable."""
    return tint(hue(tensor), {PINK: 0.7, PALE_PINK: 0.5}.get(hue(tensor), 0.3))


# Figures, axes, and their contents ------------------------------------------------------------------------------


def width_in_inches() -> float:
    """Return the current picture's width in inches."""
    return matplotlib.rcParams["figure.figsize"][0]


def is_narrow() -> bool:
    """Return True if the current picture is for a phone."""
    return width_in_inches() < WIDTH


def width_in_units() -> float:
    """Return the current picture's width in units (see UNITS)."""
    return UNITS[width_in_inches()]


def new_figure(
    height: float, caption: str, measured: str = "", **subplots: Any
) -> tuple[Figure, Axes | Sequence[Axes]]:
    """Return a figure with this caption, and its axes. The caption's first sentence becomes the headline.

    `height` is the height of the drawing below the headline, in the same units as width_in_units(). If the picture
    shows a model, `measured` is the corresponding measurement, which is printed below the headline. Further keyword
    arguments are passed to Figure.subplots().
    """
    figure = Figure(figsize=(width_in_inches(), height * width_in_inches() / width_in_units()), layout="constrained")
    headline = figure.suptitle(headline_of(caption), x=0.005, ha="left", fontsize=LARGE, fontweight="bold")
    wrap_text(headline, 0.99 * figure.bbox.width)
    if measured:
        words = f"This is a model. Measured: {measured}."
        caption += f" {words}"
        below = dict(xycoords=headline, xytext=(0, -4), textcoords="offset points", va="top")
        wrap_text(figure.add_artist(Annotation(words, (0, 0), fontsize=SMALL, **below)), 0.99 * figure.bbox.width)
    figure.set_label(caption)
    above = 0.23 * (1 + headline.get_text().count("\n")) + HEADLINE_GAP
    set_height(figure, figure.get_figheight() + above + TITLE_GAP * subplots.get("nrows", 1))
    return figure, figure.subplots(**subplots)


def set_height(figure: Figure, inches: float) -> None:
    """Set a figure's height in inches without changing the gap and the space for a note below its headline."""
    figure.set_figheight(inches)
    gap = HEADLINE_GAP + sum(note.get_window_extent().height for note in figure.artists) / figure.dpi
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03 + TITLE_GAP / 2, rect=(0, 0, 1, 1 - gap / inches))


def headline_of(caption: str) -> str:
    """Return a caption's first sentence, without its full stop."""
    return re.split(r"(?<=\.) ", caption)[0].removesuffix(".")


def wrap_text(text: Text, max_width: float) -> None:
    """Break a text into lines at most `max_width` pixels wide."""
    lines = text.get_text().split("\n")
    letters = max(map(len, lines))
    while text.get_window_extent().width > max_width and letters > 1:
        letters -= 1
        text.set_text("\n".join(textwrap.fill(line, letters) for line in lines))


def new_stacked_figure(
    height: float, caption: str, nrows: int = 1, ncols: int = 1, **subplots: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure with a grid of axes, as new_figure() does. On a phone, the axes of each row are stacked."""
    if not is_narrow():
        return new_figure(height, caption, nrows=nrows, ncols=ncols, squeeze=False, **subplots)
    heights = np.repeat(subplots.pop("height_ratios", [1] * nrows), ncols)
    figure, axes = new_figure(height * ncols, caption, nrows=nrows * ncols, height_ratios=heights, **subplots)
    return figure, axes.reshape(nrows, ncols)


def wrap_titles(figure: Figure) -> None:
    """Break titles into lines if they would otherwise overlap the next axes or the edge of the picture."""
    for ax in figure.axes:
        title, box = ax.set_title(ax.get_title(loc="left")), ax.get_window_extent()
        right_neighbours = [other.x0 for other in (a.get_window_extent() for a in figure.axes) if _right_of(box, other)]
        wrap_text(title, min([*right_neighbours, figure.bbox.x1]) - title.get_window_extent().x0)
    figure.draw_without_rendering()


def _right_of(box: Any, other: Any) -> bool:
    return other.x0 > box.x0 + 1 and other.y0 < box.y1 and box.y0 < other.y1


def shrink_height(figure: Figure) -> None:
    """Shrink the figure to the height of its contents."""
    content_height = figure.get_tightbbox().height + 0.1
    if content_height < figure.get_figheight() - 0.2:
        set_height(figure, content_height)
        figure.draw_without_rendering()


def strip_axes(ax: Axes, xlim: tuple[float, float], ylim: tuple[float, float], **look: Any) -> None:
    """Set the axes' limits and remove ticks and spines. `ylim` is (top, bottom)."""
    ax.set(xlim=xlim, ylim=(max(ylim), min(ylim)), **dict(xticks=[], yticks=[]) | look)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def note(ax: Axes, x: float, y: float, words: str, **look: Any) -> Text:
    """Write small text at (x, y), vertically centred."""
    return ax.text(x, y, words, **dict(fontsize=SMALL, va="center") | look)


def beside(ax: Axes, words: str, at: tuple[float, float], shift: tuple[float, float], **look: Any) -> Annotation:
    """Write text near the position `at`, shifted to the right and up by `shift` = (x, y) points."""
    return ax.annotate(words, at, shift, textcoords="offset points", **dict(fontsize=SMALL, va="center") | look)


def arrow(ax: Axes, start: tuple, end: tuple, color: str = INK, style: str = "-|>", **look: Any) -> Annotation:
    """Draw an arrow from `start` to `end`."""
    shape = dict(arrowstyle=style, color=color, shrinkA=0, shrinkB=0, linewidth=1, mutation_scale=9) | look
    return ax.annotate("", end, start, arrowprops=shape)


def box(ax: Axes, x: float, y: float, w: float, h: float, label: str = "", fill: str = PAPER, **look: Any) -> Rectangle:
    """Draw a filled rectangle, with a centred label whose colour is readable on the fill."""
    size = look.pop("size", SMALL)
    patch = ax.add_patch(Rectangle((x, y), w, h, facecolor=fill, **dict(edgecolor=INK, linewidth=0.8) | look))
    if label:
        text = ax.text(x + w / 2, y + h / 2, label, ha="center", va="center", color=ink_on(fill), fontsize=size)
        patch.label_text = text
        if look.get("hatch"):
            text.set_bbox(dict(facecolor=fill, edgecolor="none", pad=1.0))
    return patch


def masked_box(ax: Axes, x: float, y: float, w: float = 1, h: float = 1, label: str = "", **look: Any) -> Rectangle:
    """Draw a hatched box, in the style of a masked score."""
    return box(ax, x, y, w, h, label, MASKED, **dict(edgecolor=QUIET, hatch=MASK_HATCH) | look)


def bars(ax: Axes, rectangles: Sequence[tuple[float, float, float, float]], fill: str, **look: Any) -> PathPatch:
    """Draw many rectangles (x, y, width, height) in the same style, as a single patch, which keeps the file small."""
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)])
    places = np.reshape(rectangles, (-1, 4))[:, None]
    codes = [Path.MOVETO, *3 * [Path.LINETO], Path.CLOSEPOLY] * len(places)
    path = Path((places[..., :2] + places[..., 2:] * corners).reshape(-1, 2), codes=codes or None)
    return ax.add_patch(PathPatch(path, **dict(facecolor=fill, linewidth=0) | look))


def named_bars(ax: Axes, lengths: dict[str, float], words: Sequence[str], fill: str | Sequence[str]) -> None:
    """Draw a horizontal bar for each name, from top to bottom, with the name to its left and a text to its right."""
    container = ax.barh(list(lengths), list(lengths.values()), color=fill)
    ax.bar_label(container, words, padding=3, fontsize=SMALL)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_owners(ax: Axes, owner: np.ndarray, first: int = 0, **look: Any) -> None:
    """Draw each tile in the colour of its worker, with the worker's number on it.

    `owner` holds the index of each tile's worker, or −1 for a tile without a worker, which is hatched. The printed
    numbers begin at `first`.
    """
    for (i, j), k in np.ndenumerate(owner):
        if k < 0:
            masked_box(ax, j, i)
        else:
            box(ax, j, i, 1, 1, f"{k + first}", worker_color(k), **look)


def tensor_box(
    ax: Axes, x: float, y: float, w: float, h: float, tensor: str, label: str = "", **look: Any
) -> Rectangle:
    """Draw a box in a tensor's colours. A gradient's box has a dashed edge."""
    edge = dict(edgecolor=hue(tensor), linewidth=1.4, linestyle=DASHED if tensor.startswith("d") else "-")
    return box(ax, x, y, w, h, label, tensor_fill(tensor), **edge | look)


def tile_axes(ax: Axes, T_r: int, T_c: int) -> None:
    """Set up axes for a grid of T_r × T_c tiles: row block 0 on top, queries down, keys right, and no ticks."""
    strip_axes(ax, (-0.05, T_c + 0.05), (-0.05, T_r + 0.05), aspect="equal", xlabel="keys →", ylabel="← queries")
    ax.xaxis.set_label_position("top")


def count_with_noun(n: int, thing: str) -> str:
    """Return a count with its noun, such as "1 step" or "2 steps"."""
    return f"{n:,} {thing}{'s' if n != 1 else ''}"


def group_digits(ax: Axes) -> None:
    """Write tick labels with commas on axes that reach 1,000, unless the picture has set its own labels."""
    for axis in (ax.xaxis, ax.yaxis):
        if isinstance(axis.get_major_formatter(), ScalarFormatter) and max(map(abs, axis.get_view_interval())) >= 1000:
            axis.set_major_formatter(with_commas)


def with_commas(x: float, position: int | None = None) -> str:
    """Return the label of a tick at x, with commas between groups of digits."""
    return f"{x:,g}".replace("-", "−")


def log_places(low: float, high: float, max_ticks: int = 9) -> list[float]:
    """Return round numbers for the ticks of a logarithmic axis from `low` to `high`.

    The list has at most `max_ticks` numbers and, if possible, at least four.
    """
    decades = range(floor(log10(low)), floor(log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
        finer = [d * 10.0**k for k in decades for d in digits if low <= d * 10.0**k <= high]
        if len(ticks) >= 4 or len(finer) > max_ticks:
            break
        ticks = finer
    return ticks


def log_ticks(axis: Any, places: Iterable[float], labels: Iterable[str] | None = None) -> None:
    """Put ticks on a logarithmic axis at the given positions, and nowhere else."""
    places = list(places)
    axis.set_ticks(places, labels=labels or [f"{x:,g}" for x in places])
    axis.set_ticks([], minor=True)


# Files ----------------------------------------------------------------------------------------------------------

# The page's own fonts. None is wider than DejaVu Sans, whose widths determine a picture's layout.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

STYLE_SHEET = '<style type="text/css">'  # the start of matplotlib's own style sheet
# With this rule, an SVG file that is opened on its own follows the browser's dark mode.
STYLE_SHEET_WITH_SCHEME = f"{STYLE_SHEET}svg:root{{color-scheme: light dark}} "
SHORTENINGS = {  # {pattern in matplotlib's SVG: shorter text with the same meaning}
    r"<!--.*?-->": "",
    r"font-family: 'DejaVu Sans'; ": "",
    r' transform="rotate\(-0 [^"]*"': "",
    r'<path [^>]*style="fill: none"/>': "",
    r'<g id="[^"]*"': "<g",
    r"(?s)<g>\s*</g>": "",
    r"(\.\d\d)\d+(?=[^<>]*>)": r"\1",
    r"\s*\n\s*": "\n",
}
FORMULA_STYLE = r"""(y="\S+" style="[^"]*'STIX[^"]*")"""
FORMULA_LETTERS = re.compile(rf'<tspan x="\S+" {FORMULA_STYLE}>[^<]</tspan>\n(?:<tspan x="\S+" \1>[^<]</tspan>\n)*')


def merge_letters(match: re.Match) -> str:
    """Merge consecutive letters of a formula that have the same style into one element, without elements for spaces."""
    letters = [(x, letter) for x, letter in re.findall(r'x="(\S+)"[^>]*>([^<])', match[0]) if letter != " "]
    places, word = " ".join(x for x, _ in letters), "".join(letter for _, letter in letters)
    return f'<tspan x="{places}" {match[1]}>{word}</tspan>\n'.replace("General'", "General', serif") if word else ""


SOURCE_HEIGHT = 13  # the height of the source line, in the SVG file's points


def svg(figure: Figure, alt: str, source: str = "") -> bytes:
    """Return a figure as an SVG file for light and dark pages.

    The file has no background and stores letters as text instead of outlines. It includes the caption and the
    alternative text. If `source` is given, it is printed in small type below the drawing, for readers who see the file
    without its page.
    """
    with matplotlib.rc_context(RC):
        out = BytesIO()
        plain = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=plain, transparent=True)
    file = out.getvalue().decode()
    body = file[file.index("<defs") : file.rindex("</svg>")]
    for wordy, short in SHORTENINGS.items():
        body = re.sub(wordy, short, body)
    body = FORMULA_LETTERS.sub(merge_letters, body).replace(STYLE_SHEET, STYLE_SHEET_WITH_SCHEME, 1)
    width, height = (72 * inches for inches in figure.get_size_inches())
    if source:
        look = f"font-size: 7.5px; text-anchor: end; fill: {QUIET.lower()}"
        body += f'<text class="source" style="{look}" x="{width - 3:g}" y="{height + 8:g}">{source}</text>\n'
        height += SOURCE_HEIGHT
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" role="img"'
        f' width="{width / 0.75:g}" height="{height / 0.75:g}" viewBox="0 0 {width:g} {height:g}"'
        f' font-family="{FONTS}" text-rendering="geometricPrecision">\n'
        f"<title>{escape(figure.get_label())}</title>\n<desc>{escape(alt)}</desc>\n{dark_rules(body)}"
    )
    return f"{head}{body}</svg>\n".encode()


def dark_rules(body: str) -> str:
    """Return a style sheet that replaces a drawing's colours on dark pages."""
    rules = []
    for light, dark in sorted((light.lower(), dark.lower()) for light, dark in DARK.items()):
        for part in ("fill", "stroke"):
            marks = {f"{part}: {light}": f'[style*="{part}: {light}"]', f'{part}="{light}"': f'[{part}="{light}"]'}
            selectors = ",".join(selector for mark, selector in marks.items() if mark in body)
            rules += [f"{selectors}{{{part}:{dark}!important}}\n"] if selectors else []
    return f"<style>@media (prefers-color-scheme: dark) {{\n{''.join(rules)}}}</style>\n"
