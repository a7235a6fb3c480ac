"""Eleven lectures as decks, from the chapters' own headings, sentences, pictures, listings and live pieces.

One HTML file a lecture, which asks for no other: arrows turn, n shows the notes, and printed it is the handout.
"""

import re
import shutil
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import nbformat
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from fa2_lab.plots.live import WIDE as WIDE_PIECES
from fa2_lab.plots.live import page
from fa2_lab.tools import files
from fa2_lab.tools.figures import PHONE
from fa2_studio.book import front
from fa2_studio.book.callouts import mathml
from fa2_studio.book.chapters import NOTEBOOKS, Chapter, written
from fa2_studio.book.site import FIGURES, LIVE, LOOKS, drawn, is_imports

LECTURES = {  # title: its chapters; of those with several parts, which are shown
    "Attention and its cost": {"00": "", "01": ""},
    "Online softmax": {"02": ""},
    "FlashAttention": {"03": ""},
    "The forward pass of FlashAttention-2": {"04": ""},
    "The backward pass": {"05": ""},
    "Workers and warps": {"06": "", "07": ""},
    "Triton": {"08": "", "09": ""},
    "The ladder": {"10": "", "11": ""},
    "Hopper": {"12a": "1 3 4", "12b": "1", "13": "1"},
    "Decoding, rings and masks": {"14": "", "15": "", "16": ""},
    "Change it": {"17": ""},
}
LEFT_OUT = ("Exercises", "Checks", "Questions", "Part ")  # the course's, not a lecture's
ROWS, LETTERS = 15, 62  # what a slide holds: lines of words, and letters in a line
COLUMN, CODE_COLUMN, OF_TABLE = 33, 44, 80  # letters in a line beside a picture, of code there, and in a row of a table
FULL, WIDE = 19, 70  # lines of code, which are closer together, and letters in a line of code
BROAD, HALF, ROOM = 1208, 600, 620  # pixels for a picture
READ, BESIDE, LIKE_WORDS = 16, 14, 25  # letters that a room reads, those beside words, and those of words
SIZE = re.compile(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"')
PANEL = re.compile(
    r'<text style="font-weight: 700; font-size: 10\.5px[^>]*?(?:y="|translate\(\S+ )([\d.]+)'
)  # its title
TICK = re.compile(r'<text[^>]* y="([\d.]+)">([\d,]+)</text>')
VIEW = re.compile(r'height="[\d.]+" viewBox="0 0 ([\d.]+) ([\d.]+)"')
FOLD = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)
ASKED = re.compile(r"^\*\*(?:Predict|Build)\.\*\*", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COLOURS = HtmlFormatter(style="a11y-high-contrast-light", nowrap=True)
AT_NIGHT = HtmlFormatter(style="a11y-high-contrast-dark")
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
MARKDOWN.use(dollarmath_plugin, renderer=lambda tex, how: mathml(tex, "block" if how["display_mode"] else "inline"))


def rendered(text: str) -> str:
    """Markdown as HTML with its pictures inside, and of links the words alone: their files are not in a deck."""

    def inside(found: re.Match) -> str:
        picture = b64encode((NOTEBOOKS / found[1]).read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{picture}"'

    html = re.sub(r"</?a\b[^>]*>", "", MARKDOWN.render(text)).replace("<li>☐", "<li class=choice>☐")
    return re.sub(r'src="(\.\./figures/[^"]+\.svg)"', inside, html)


class Beat(NamedTuple):
    """A paragraph to be said, something to look at, a question, or its answer on a slide of its own."""

    text: str = ""
    seen: tuple[str, ...] = ()  # as HTML: blocks that are never cut
    kind: str = ""  # "asks", "answers", "live" or "picture"
    name: str = ""  # of a picture in figures/


class Slide(NamedTuple):
    """What a slide shows: blocks of words, and a picture or a live piece below or beside them."""

    title: str
    kind: str  # of its beat
    words: tuple[str, ...]
    notes: str
    seen: str = ""
    name: str = ""  # of the picture, if one slide shows all of it
    layout: str = ""  # "two" columns, or words "over" a picture


def write(folder: Path) -> list[Path]:
    """The decks; and their handouts as PDF where there is a Chromium."""
    files.check_writable(folder, "book --slides")
    folder.mkdir(parents=True, exist_ok=True)
    night = f"@media screen and (prefers-color-scheme: dark) {{\n{AT_NIGHT.get_style_defs('pre')}\n}}"
    code = f"{COLOURS.get_style_defs('pre')}\n{night}\nbody pre {{ background: none; }}\n"
    looks = (LOOKS / "slides.css").read_text(encoding="utf-8") + code
    script = (LOOKS / "slides.js").read_text(encoding="utf-8")
    browser, decks, small = next(filter(None, map(shutil.which, BROWSERS)), None), [], cards()
    for number, (title, chapters) in enumerate(LECTURES.items(), start=1):
        asked = "".join(f"<p>{escape(c.question)}</p>" for c in written() if c.number in chapters)
        cover = f"<section class=first><h1>{number} · {title}</h1>{asked}</section>" if len(chapters) > 1 else ""
        head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        head += f"<title>{title}</title><style>{looks}</style>"
        html = f"{head}<body>{cover}{''.join(deck(chapters, small))}<script>{script}</script>"
        decks.append(files.write(folder / f"lecture_{number:02}.html", html))
        if browser:
            quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
            pdf = f"--print-to-pdf={decks[-1].with_suffix('.pdf').resolve()}"
            call = [browser, *quiet, pdf, decks[-1].resolve().as_uri()]
            subprocess.run(call, capture_output=True, check=False, timeout=120)
    return decks


def cards() -> dict[str, str]:
    """Return {chapter: its picture on the site's first page}, as HTML for a title."""
    with tempfile.TemporaryDirectory() as folder:
        front.write_small(Path(folder))
        drawn_ = {c.name: Path(folder, f"{front.shown(c)}.svg").read_text(encoding="utf-8") for c in written()}
    return {name: f'<figure><img alt="" src="{data(svg)}"></figure>' for name, svg in drawn_.items()}


def deck(chapters: dict[str, str], small: dict[str, str]) -> Iterator[str]:
    """The slides of some chapters."""
    for chapter in (c for c in written() if c.number in chapters):
        yield begin(chapter, small[chapter.name])
        part = ""
        for title, beats in sections(nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)):
            part = title.split()[1] if title.startswith("Part ") else part
            now = not chapters[chapter.number] or part in chapters[chapter.number].split() or title == "Recap"
            if now and not title.startswith(LEFT_OUT):
                yield from map(slide, again(beside(merged(list(slides(title, fewer(beats)))))))


def begin(chapter: Chapter, image: str) -> str:
    """The title of a chapter: its question, and its picture."""
    words = f"<div><h1>{escape(chapter.title)}</h1><p>{escape(chapter.question)}</p></div>"
    return f"<section class=first><div class=two>{words}{image}</div></section>"


def sections(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, list[Beat]]]:
    """(heading, beats) of a chapter, in order."""
    title, beats = "", []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            more = looked_at(cell)
            if beats and beats[-1].kind == "asks" and more and not more[0].kind:  # the empty function to be filled
                beats[-1] = beats[-1]._replace(seen=beats[-1].seen + more.pop().seen)
            beats += more
            continue
        for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
            if part.startswith("## "):
                if title:
                    yield title, beats
                (title, _, part), beats = part.removeprefix("## ").partition("\n"), []
            if title:
                beats += read(part)
    yield title, beats


def fewer(beats: list[Beat]) -> list[Beat]:
    """What a lecture shows of a section: one table, and one listing that a room can read; a list if nothing else."""
    code = [beat for beat in beats if not beat.kind and beat.seen and beat.seen[0].startswith("<pre")]
    lists = [beat for beat in beats if not beat.kind and beat.seen and beat.seen[0].startswith(("<ul", "<ol"))]
    tables = [beat for beat in beats if not beat.kind and beat.seen and beat.seen[0].startswith("<table")]
    others = any(beat.seen and beat not in code + lists for beat in beats)
    short = [beat for beat in code if sum(map(height, beat.seen)) <= ROWS]
    kept = (short if others else short or code)[:1]
    left_out = [beat for beat in code if beat not in kept] + (lists if others or kept else []) + tables[1:]
    return [beat for beat in beats if beat not in left_out]


def read(text: str) -> Iterator[Beat]:
    """The paragraphs of a cell; tables, formulas and questions are looked at. Of its folds, the answers have slides."""
    for n, part in enumerate(FOLD.split(text)):  # text, title, inside, text, …
        if n % 3 == 0:
            said, *asked = re.split(ASKED, part, maxsplit=1)
            for block in blocks(said):
                look = block.startswith(("|", "![", "$$", "- ", "1. ", "```"))
                yield Beat(seen=tuple(shown(block))) if look else Beat(block)
            if asked:
                yield Beat(seen=html(ASKED.search(part)[0] + asked[0]), kind="asks")
        answers = n % 3 == 1 and part.startswith(("Answer", "A solution", "Solution"))
        if answers:
            yield Beat(seen=html(FOLD.split(text)[n + 1]), kind="answers")


def blocks(text: str) -> list[str]:
    """Paragraphs, lists, tables and listings; a list stays with the line that announces it."""
    parts = [[part] if part.startswith("```") else re.split(r"\n\s*\n", part) for part in FENCE.split(text)]
    return [part.strip() for some in parts for part in some if part.strip()]


def html(text: str) -> tuple[str, ...]:
    """All blocks of a Markdown text."""
    return tuple(piece for part in blocks(text) for piece in shown(part))


def shown(part: str) -> list[str]:
    """A block of Markdown as HTML; a listing as its own lines, in pieces if it is longer than a slide."""
    if part.startswith("```"):
        return listing(part.split("\n", 1)[1].rsplit("\n", 1)[0], part.startswith("```python"))
    if part.startswith("|"):
        head, rule, *rows = part.split("\n")
        return [rendered("\n".join([head, rule, *some])) for some in split(rows, lambda row: 1.3 + len(row) // 95)]
    return [rendered(part)]


def split(lines: list[str], rows: Callable, most: int = ROWS - 2) -> list[list[str]]:
    """Lines in parts that fit on a slide, all about as long."""
    total = sum(map(rows, lines))
    fair = total / max(1, -(-total // most))
    parts: list[list[str]] = [[]]
    for line in lines:
        if sum(map(rows, parts[-1])) >= fair:
            parts.append([])
        parts[-1].append(line)
    return parts


def listing(code: str, python: bool = True, printed: str = "") -> list[str]:
    """Code and what it prints, at a size that the last row of seats reads. Comments leave lines that are too long."""
    lines = re.sub(r"\n\n\n+", "\n\n", code.rstrip()).split("\n")
    tall = sum(map(rows_of, lines)) > ROWS + 4
    kept = [re.sub(r"\s+# .*", "", line) if tall or len(line) > WIDE else line for line in lines]
    output = split(printed.rstrip().split("\n"), lambda line: 1, FULL) if printed else []
    pieces = [pre(part, python) for part in split(kept, rows_of, FULL)]
    return pieces + [pre(part, bool(re.match(r"@|def |class ", printed)), " class=printed") for part in output]


def rows_of(line: str) -> int:
    return max(1, -(-len(line) // WIDE))


def pre(lines: list[str], python: bool, kind: str = "") -> str:
    """Each line as a block; its second row, if it has one, is indented further."""
    text = "\n".join(lines).strip("\n")
    coloured = highlight(text, PythonLexer(stripnl=False), COLOURS) if python else escape(text)
    bare = [re.sub(r'^(<span class="w">)?\s+(</span>)?', "", line) for line in coloured.removesuffix("\n").split("\n")]
    depth = [len(line) - len(line.lstrip()) for line in text.split("\n")]
    inside = "".join(f'<span style="--in: {n}ch">{line}</span>' for n, line in zip(depth, bare, strict=True))
    rows = len(lines) if kind else sum(map(rows_of, text.split("\n")))  # what was printed is never folded
    return f"<pre{kind} data-rows={rows}>{inside}</pre>"


def looked_at(cell: nbformat.NotebookNode) -> list[Beat]:
    """What a code cell shows: a picture, a live piece, or its lines and what they print."""
    seen = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    if live := LIVE.search(seen):
        still = re.search(r'<div class="still">(.*?</p>)</div>', seen, re.DOTALL)
        name, asked = map(unescape, live.groups(""))
        inside = page(name, "&".join(filter(None, [asked, "deck"])))
        frame = f'<iframe width={1240 if name in WIDE_PIECES else 900} loading=lazy srcdoc="{escape(inside)}"></iframe>'
        seen = f"{frame}<div class=still>{as_svg(still[1]) if still else ''}</div>"
        return [Beat(seen=(seen,), kind="live")]
    if picture := re.search(r'<img alt="([^"]*)"[^>]*>', seen):
        caption = re.search(r"<p[^>]*>(.*?)</p>", seen, re.DOTALL)
        name = drawn().get(unescape(picture[1]))
        shown = [image(part, name) for part in parts(name)] if name else [picture[0]]
        if name:
            shown[0] += paper(name)
        return [Beat(unescape(caption[1]) if caption else "", tuple(shown), "picture", name or "")]
    if told := [output.data["text/markdown"] for output in cell.outputs if "text/markdown" in output.get("data", {})]:
        return [Beat(seen=html(FOLD.sub("", "\n\n".join(told))))]
    if is_imports(cell) or {"hide-input", "navigation"} & set(cell.metadata.get("tags", [])):
        return []
    printed = "".join(output.get("text", "") for output in cell.outputs)
    return [Beat(seen=tuple(listing(cell.source, printed=printed)))]


def as_svg(still: str) -> str:
    """The static figure of a live piece for the handout, without the card on which a notebook shows it."""
    shown = re.search(r'<img alt="([^"]*)"[^>]*>', still)
    name = shown and drawn().get(unescape(shown[1]))
    return still.replace(shown[0], paper(name)) if name else still


def edition(name: str, folder: str = "") -> str:
    """A picture of figures/ as SVG: a page's edition, or a phone's."""
    return (FIGURES / folder / f"{name}.svg").read_text(encoding="utf-8")


def data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def image(svg: str, name: str, kind: str = "") -> str:
    """A picture, or a part of it, for a slide."""
    return f'<img{kind} alt="{escape(front.description(name))}" src="{data(svg)}">'


def paper(name: str) -> str:
    """A picture for the handout: the whole page's edition, which stays light."""
    light = re.sub(r"<style>@media.*?</style>", "", edition(name), count=1, flags=re.DOTALL)
    return image(light, name, " class=paper")


def parts(name: str) -> list[str]:
    """A picture for slides, in as few parts as leave letters that a room reads.

    It is the page's edition, which is as wide as a slide, unless the phone's has letters like those of the words.
    """
    page, phone = edition(name), edition(name, PHONE)
    ways = [[page], [phone]] + [in_parts(svg, most) for svg in (page, phone) for most in (2.8, 2, 1.4, 1)]
    read = [way for way in ways if letters(way) >= READ] or [[page]]
    return min(read, key=lambda way: (len(way), letters(way) < LIKE_WORDS))


def letters(shown: list[str], across: float = BROAD, down: float = ROOM) -> float:
    """The size in pixels of the smallest letters, which a picture has at 13, on a slide of 1280 × 720."""
    sizes = [[float(side) for side in SIZE.search(svg).groups()] for svg in shown]
    return min(13 * min(across / wide, down / high) for wide, high in sizes)


def in_parts(svg: str, most: float) -> list[str]:
    """An edition of a picture in parts of one or more panels, about `most` times as high as a slide if as wide."""
    cuts, high = sorted({float(y) for y in PANEL.findall(svg)}), float(VIEW.search(svg)[2])
    most *= ROOM / BROAD * float(VIEW.search(svg)[1])
    ends = [b - 12 for a, b in pairwise(cuts) if b - a > 20] + [high]  # closer are two lines of a title
    tops = [0.0]
    for end, after in pairwise(ends):
        if after - tops[-1] > most and end - tops[-1] > most / 4 and high - end > most / 3:
            tops.append(end)
    spans = list(pairwise([*tops, high]))
    return [piece(svg, a, b, high) for a, b in spans] if len(spans) > 1 else [svg]


def piece(page: str, top: float, end: float, high: float) -> str:
    """A picture from top to end; below it the axis at the picture's foot, if no other numbers are under the piece."""
    start, stop, width = page.index(">", page.index("<svg")) + 1, page.rindex("</svg>"), VIEW.search(page)[1]
    rows = [float(y) for y, _ in set(TICK.findall(page))]  # a number that is repeated in a row is no axis's
    axis = next((y for y in rows if y > high - 25 and rows.count(y) > 2), None)
    own = end == high or any(end - 40 < y < end and rows.count(y) > 2 for y in rows)
    foot = 0 if own or axis is None else high - axis + 12

    def part(y: float, begin: float, tall: float, inside: str) -> str:
        view = f'viewBox="0 {begin:g} {width} {tall:g}"'
        return f'<svg y="{y:g}" width="{width}" height="{tall:g}" {view}>{inside}</svg>'

    tall = end - top
    head = VIEW.sub(f'height="{(tall + foot) / 0.75:g}" viewBox="0 0 {width} {tall + foot:g}"', page[:start], count=1)
    shown = part(0, top, tall, f'<g id="all">{page[start:stop]}</g>')
    return head + shown + (part(tall, high - foot, foot, '<use href="#all"/>') if foot else "") + page[stop:]


def slides(title: str, beats: list[Beat]) -> Iterator[Slide]:
    """A slide for everything to look at, with the sentence beside it; its notes have what is said after it."""
    at = [n - announced(beats, n) for n, beat in enumerate(beats) if beat.seen]
    for start, stop in pairwise([0, *at[1:], len(beats)]):
        some = beats[start:stop]
        here = next((beat for beat in some if beat.seen), Beat())
        words = [beat.text for beat in some if not beat.seen]
        if here.kind:  # a picture has its headline inside
            said = []
        elif not here.seen:
            said = words[:3]
        elif here.seen[0].startswith(("<ul", "<ol")):
            said = words[:1] if not some[0].seen else []
        else:
            said = words[:1] or [here.text]
        shown = {text: sentences(text) for text in said if text}
        rest = [shown[text][1] if text in shown else text for text in [here.text, *words]]
        notes = rendered("\n\n".join(filter(None, rest)))
        yield from paged(title, here, [rendered(first) for first, _ in shown.values()], notes)


def announced(beats: list[Beat], n: int) -> bool:
    """Whether the paragraph before ends with a colon."""
    return n > 0 and not beats[n - 1].seen and beats[n - 1].text.endswith(":")


def paged(title: str, beat: Beat, beside: list[str], notes: str) -> Iterator[Slide]:
    """As many slides as the blocks need."""
    if beat.kind in ("picture", "live"):
        name = beat.name if len(beat.seen) == 1 else ""
        for n, seen in enumerate(beat.seen):
            yield Slide(title, "more" if n else beat.kind, tuple(beside), "" if n else notes, seen, name)
        return
    fits = not beat.seen or sum(map(height, [*beside, beat.seen[0]])) <= ROWS
    pages: list[list[str]] = [[]]
    for block in [*(beside if fits else []), *beat.seen]:
        room = ROWS + 3 * ("printed" in block[:20])  # smaller letters rather than a slide for what is printed
        if pages[-1] and sum(map(height, pages[-1])) + height(block) > room:
            pages.append([])
        pages[-1].append(block)
    for n, page_ in enumerate(pages):
        yield Slide(title, beat.kind, tuple(page_), "" if n else notes)


def merged(shown: list[Slide]) -> list[Slide]:
    """The slides of a section, of which short neighbours are one: words before a question too, but no two listings."""
    out: list[Slide] = []
    for now in shown:
        last = out[-1] if out else None
        words = last and (*last.words, *now.words)
        alike = last and last.kind == "" and now.kind in ("", "asks")
        if alike and sum("<pre data" in block for block in words) < 2 and sum(map(height, words)) <= ROWS:
            out[-1] = now._replace(words=words, notes=last.notes + now.notes)
        else:
            out.append(now)
    return out


def beside(shown: list[Slide]) -> list[Slide]:
    """The slides of a section, with a picture on the slide of the words before it, or else of those after it.

    It is never on the slide of a question before it, because it may be the answer.
    """
    out: list[Slide] = []
    for now in shown:
        last = out[-1] if out else None
        if last and now.kind == "picture" and last.kind in ("", "answers") and (both := with_picture(last, now)):
            out[-1] = both._replace(notes=last.notes + now.notes)
        elif last and last.kind == "picture" and now.kind in ("", "asks") and (both := with_picture(now, last)):
            out[-1] = both._replace(notes=last.notes + now.notes)
        else:
            out.append(now)
    return out


def again(shown: list[Slide]) -> list[Slide]:
    """The slides of a section; those of words alone show the picture that was before them once more.

    If there was none, they show the next one, unless a question comes first. Without a picture, an answer has its
    question beside it.
    """
    out = list(shown)
    for n, now in enumerate(out):
        before = [other for other in shown[:n] if other.name]
        asked = next((k for k in range(n, len(shown)) if shown[k].kind == "asks"), len(shown))
        after = [other for other in shown[n:asked] if other.name]
        if not now.seen and (near := [*before[-1:], *after[:1]]):
            out[n] = with_picture(now, near[0], once_more=True) or now
        asked = next((other for other in shown[:n][::-1] if other.kind == "asks"), None)
        if now.kind == "answers" and not out[n].seen and asked and in_column(now.words) and in_column(asked.words):
            out[n] = now._replace(seen=f"<div class=asked>{''.join(asked.words)}</div>", layout="two")
    return out


def with_picture(words: Slide, picture: Slide, once_more: bool = False) -> Slide | None:
    """A slide with both, if a room reads both; on paper a picture that is shown once more is left out."""
    if words.seen or not picture.name:
        return None
    page, phone = edition(picture.name), edition(picture.name, PHONE)
    rows = sum(map(height, words.words))
    narrow = in_column(words.words)
    for svg, layout, fits in (
        (phone, "two", narrow and letters([phone], HALF) >= BESIDE),
        (page, "two", narrow and letters([page], HALF) >= BESIDE),
        (page, "over", letters([page], BROAD, ROOM - 40 * rows) >= READ),
    ):
        if fits:
            seen = image(svg, picture.name) + ("" if once_more else paper(picture.name))
            return words._replace(seen=seen, name=picture.name, layout=layout)
    return None


def in_column(words: tuple[str, ...]) -> bool:
    """Whether blocks are readable in half of a slide's width, where letters may be a fifth smaller."""
    return all(map(fits_column, words)) and sum(height(block, COLUMN) for block in words) <= 1.5 * ROWS


def fits_column(block: str) -> bool:
    if block.startswith("<pre"):
        lines = re.findall(r'--in: (\d+)ch">(.*)', block.replace('<span style="', '\n<span style="'))
        long = [int(depth) + len(unescape(re.sub("<[^>]*>", "", line))) for depth, line in lines]
        return "printed" not in block[:20] and max(long) <= CODE_COLUMN
    cells = [unescape(re.sub("<[^>]*>", "", row)) for row in block.split("</tr>")]
    return "<table" not in block or max(map(len, cells)) <= COLUMN


def height(block: str, letters: int = LETTERS) -> float:
    """About how many rows a block takes."""
    if rows := re.search(r"data-rows=(\d+)", block):
        return 0.86 * int(rows[1]) + 0.3
    letters = OF_TABLE if block.startswith("<table") else letters
    lines = [re.sub("<[^>]*>", "", line).strip() for line in re.split(r"</(?:p|li|tr)>", block)]
    return sum(1.1 * -(-len(line) // letters) for line in lines) + 0.4


def slide(shown: Slide) -> str:
    title = f"Answer: {shown.title}" if shown.kind == "answers" else shown.title
    head = f"<h2>{MARKDOWN.renderInline(title)}</h2>"
    asked = shown.seen.startswith("<div class=asked>")
    figure = f"<figure>{shown.seen}</figure>" if shown.seen and not asked else shown.seen
    inside = f"<div>{''.join(shown.words)}</div>{figure}"
    if shown.layout:
        inside = f"<div class={shown.layout}>{inside}</div>"
    return f'<section class="{shown.kind}">{head}{inside}<aside>{shown.notes}</aside></section>'


def sentences(paragraph: str) -> tuple[str, str]:
    """As many of its first sentences as say something, and the others."""
    first, *others = re.split(r"(?<=[.?!])\s+(?=[A-Z$`*])", paragraph)
    while others and len(first) < 60:
        first = f"{first} {others.pop(0)}"
    return first, " ".join(others)
