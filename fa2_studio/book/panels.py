"""Prepare the pictures of figures/ for slides, either whole or divided into parts of one or more panels."""

import re
from base64 import b64encode
from html import escape, unescape
from itertools import pairwise

from fa2_lab.plots.style import SOURCE_HEIGHT, headline_of
from fa2_lab.tools.figures import PHONE, caption
from fa2_studio.book import front
from fa2_studio.book.site import FIGURES, figures_by_description

# The space for a picture in pixels: a slide's width, half of this width, and the height.
BROAD, HALF, ROOM = 1208, 600, 590
# Letter sizes in pixels: the smallest readable alone, the smallest readable beside text, and a large size.
READ, BESIDE, LARGE = 18, 17, 19
MOST = 2  # slides for the first parts of a picture; the handout contains all of it
SIZE = re.compile(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"')
VIEW = re.compile(r'height="[\d.]+" viewBox="0 0 ([\d.]+) ([\d.]+)"')
TITLES = (  # patterns for the titles of panels and for the titles of row groups, which begin at the left edge
    re.compile(r'<text style="font-weight: 700; font-size: 10\.5px[^>]*?(?:y="|translate\(\S+ )([\d.]+)'),
    re.compile(r'<text style="font-weight: 700; font-size: 9\.75px[^>]* x="\d\.\d*" y="([\d.]+)"'),
)
HEADLINE = re.compile(r'<text style="font-weight: 700; font-size: 12px[^>]*?(?:y="|translate\(\S+ )([\d.]+)')
TICK = re.compile(r'<text[^>]* y="([\d.]+)">([\d,]+)</text>')


def static_svg(still: str) -> str:
    """Return an interactive figure's static version for the handout, without the card drawn around it in a notebook."""
    shown = re.search(r'<img alt="([^"]*)"[^>]*>', still)
    name = shown and figures_by_description().get(unescape(shown[1]))
    return still.replace(shown[0], print_svg(name)) if name else still


def figure_svg(name: str, folder: str = "") -> str:
    """Return a picture of figures/ as SVG: the version for a page or, if `folder` is given, the one for a phone.

    The source line is left out, because it would be too small to read on a slide.
    """
    svg = (FIGURES / folder / f"{name}.svg").read_text(encoding="utf-8")
    bare = re.sub('<text class="source".*?</text>\n', "", svg)
    return bare if bare == svg else VIEW.sub(shorter, bare, count=1)


def shorter(view: re.Match) -> str:
    """Return the size attributes of a picture after its source line has been removed."""
    high = float(view[2]) - SOURCE_HEIGHT
    return f'height="{high / 0.75:g}" viewBox="0 0 {view[1]} {high:g}"'


def data_url(svg: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def image_html(svg: str, name: str, kind: str = "") -> str:
    """Return a picture, or a part of it, as an HTML image with the picture's description."""
    return f'<img{kind} alt="{escape(front.picture_description(name))}" src="{data_url(svg)}">'


def figure_headline(name: str) -> str:
    """Return the headline of a picture, which is the first sentence of its caption."""
    return headline_of(caption(FIGURES / f"{name}.svg"))


def without_headline(svg: str, *, panel: bool = False) -> str:
    """Remove the headline from a picture or from its first part, because the slide's title repeats it.

    If `panel` is set, the result begins at the panel's title, in line with the panel beside it.
    """
    start, stop = svg.index(">", svg.index("<svg")) + 1, svg.rindex("</svg>")
    lines = [float(y) for y in HEADLINE.findall(svg)]
    if not lines or re.match(r'<svg y="0"[^>]* viewBox="0 (?!0 )', svg[start:]):
        return svg
    titles = [float(y) for y in TITLES[0].findall(svg)] if panel else []
    top = max([max(lines) + 6, *(y - 12 for y in sorted(titles)[:1])])
    width, high = map(float, VIEW.search(svg).groups())
    begin = VIEW.sub(f'height="{(high - top) / 0.75:g}" viewBox="0 0 {width:g} {high - top:g}"', svg[:start], count=1)
    return f'{begin}<g transform="translate(0 -{top:g})">{svg[start:stop]}</g>{svg[stop:]}'


def print_svg(name: str) -> str:
    """Return a picture for the handout: the whole page version in light colours, and at its end if it moves."""
    light = re.sub(r"<style>@media.*?</style>", "", figure_svg(name), count=1, flags=re.DOTALL)
    still = light.replace("@media print{*{animation:none!important}}", "*{animation:none!important}")
    return image_html(still, name, " class=paper")


def parts_of_figure(name: str) -> list[str]:
    """Divide a picture into as few parts as possible whose letters are readable on a slide.

    The page version without its headline is preferred, unless it needs more parts than the phone version.
    """
    page, phone = figure_svg(name), figure_svg(name, PHONE)
    some = [split_panels(svg, titles, most) for svg in (page, phone) for titles in TITLES for most in (2.8, 2, 1.4, 1)]
    some = [[without_headline(part) for part in way] for way in [[page], *some]]
    read = [way for way in [some[0], [without_headline(phone)], *some[1:]] if letter_size(way) >= READ]
    return min(read or some, key=len)


def pages_of_figure(name: str) -> list[list[str]]:
    """Return the pictures on each slide, either a single picture or the phone version's panels in two columns."""
    some = [without_headline(part, panel=True) for part in split_panels(figure_svg(name, PHONE), TITLES[0], 0.2)]
    alone = parts_of_figure(name)
    together = len(alone) > 1 and letter_size_in_columns(some) >= LARGE
    return [some] if len(some) > 1 and together else [[part] for part in alone[:MOST]]


def can_be_divided(name: str) -> bool:
    """Return False for a picture without panels and a headline of their own, such as the animation of the README."""
    return bool(VIEW.search(figure_svg(name)))


def slides_of_figure(name: str) -> tuple[str, ...]:
    """Return what each slide shows of a picture, as HTML. The handout shows all of it on the first of them."""
    pages = pages_of_figure(name) if can_be_divided(name) else [[figure_svg(name)]]
    first, *others = (columns_html(some, name) for some in pages)
    return (first + print_svg(name), *others)


def letter_size_in_columns(shown: list[str]) -> float:
    """Return the smallest letter size in pixels if these panels are in two columns below a two-line headline."""
    sizes = [[float(side) for side in SIZE.search(svg).groups()] for svg in shown]
    rows = [max(high for _, high in sizes[n : n + 2]) for n in range(0, len(sizes), 2)]
    return 13 * min(HALF / max(wide for wide, _ in sizes), (ROOM - 40) / sum(rows))


def columns_html(shown: list[str], name: str) -> str:
    """Return one picture, or panels in two columns, which are narrowed until they fit the slide's height."""
    width = ""
    if len(shown) > 1:
        widest = max(float(SIZE.search(svg)[1]) for svg in shown)
        width = f' style="width: {letter_size_in_columns(shown) * widest / 13 / HALF:.0%}"'
    return "".join(image_html(svg, name, width) for svg in shown)


def layouts_with_text(name: str) -> list[str]:
    """Return where each slide of a picture has room for text: beside it ("two"), over it ("over"), or nowhere ("").

    A slide of the phone version has room beside the picture. Other slides need room over it for four lines.
    """
    if parts_of_figure(name) == [without_headline(figure_svg(name, PHONE))]:
        return ["two"]
    return ["over" if height_on_slide(some) < ROOM - 4 * 40 else "" for some in pages_of_figure(name)]


def height_on_slide(shown: list[str]) -> float:
    """Return the height in pixels of one picture that fills the slide's width, or of panels in two columns."""
    sizes = [[float(side) for side in SIZE.search(svg).groups()] for svg in shown]
    across = HALF if len(shown) > 1 else BROAD
    return sum(max(across * high / wide for wide, high in sizes[n : n + 2]) for n in range(0, len(sizes), 2))


def letter_size(shown: list[str], across: float = BROAD, down: float = ROOM) -> float:
    """Return the smallest letter size in pixels of these pictures on a 1280 × 720 slide.

    In the pictures themselves, the smallest letters are 13 pixels high.
    """
    sizes = [[float(side) for side in SIZE.search(svg).groups()] for svg in shown]
    return min(13 * min(across / wide, down / high) for wide, high in sizes)


def split_panels(svg: str, titles: re.Pattern, most: float) -> list[str]:
    """Divide a picture into parts of one or more panels. At a slide's width, each is about `most` slides high.

    Anything above the first group of rows, such as the axis, is repeated above each part.
    """
    cuts, high = sorted({float(y) for y in titles.findall(svg)}), float(VIEW.search(svg)[2])
    top = max(cuts[0] - 12, 0) if cuts and titles is TITLES[1] else 0.0
    most = most * ROOM / BROAD * float(VIEW.search(svg)[1]) - top
    # Titles at most 20 units apart are two lines of one title.
    ends = [b - 12 for a, b in pairwise(cuts) if b - a > 20] + [high]
    tops = [top]
    for end, after in pairwise(ends):
        if after - tops[-1] > most and end - tops[-1] > most / 4 and high - end > most / 3:
            tops.append(end)
    spans = list(pairwise([*tops, high]))
    return [cut_panel(svg, a, b, top) for a, b in spans] if len(spans) > 1 else [svg]


def cut_panel(page: str, top: float, end: float, head: float) -> str:
    """Return the part of a picture from `top` to `end`, below the picture's first `head` units.

    If the part has no axis of its own, the axis at the bottom of the picture is repeated below it.
    """
    start, stop = page.index(">", page.index("<svg")) + 1, page.rindex("</svg>")
    width, high = VIEW.search(page)[1], float(VIEW.search(page)[2])
    # Equal numbers in a row count once, because they are not an axis.
    rows = [float(y) for y, _ in set(TICK.findall(page))]
    axis = next((y for y in rows if y > high - 50 and rows.count(y) > 2), None)  # its key can have three lines
    own = end == high or any(end - 40 < y < end and rows.count(y) > 2 for y in rows)
    foot = high if own or axis is None else axis - 12
    shown, below = "", 0.0
    for n, (a, b) in enumerate(span for span in ((0, head), (top, end), (foot, high)) if span[0] < span[1]):
        inside = '<use href="#all"/>' if n else f'<g id="all">{page[start:stop]}</g>'
        view = f'viewBox="0 {a:g} {width} {b - a:g}"'
        shown += f'<svg y="{below:g}" width="{width}" height="{b - a:g}" {view}>{inside}</svg>'
        below += b - a
    begin = VIEW.sub(f'height="{below / 0.75:g}" viewBox="0 0 {width} {below:g}"', page[:start], count=1)
    return begin + shown + page[stop:]
