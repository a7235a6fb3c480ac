"""Ten lectures as decks, from the chapters' own headings, sentences, pictures, listings and live pieces.

One HTML file a lecture, which asks for no other: arrows turn, n shows the notes, and printed it is the handout.
"""

import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import nbformat
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from fa2_lab.plots.live import page
from fa2_lab.tools import files
from fa2_studio.book.callouts import mathml
from fa2_studio.book.chapters import NOTEBOOKS, written
from fa2_studio.book.site import LIVE, LOOKS, is_imports

LECTURES = {  # title: its chapters; of those with several sittings, which are shown
    "Attention and its cost": {"00": "", "01": ""},
    "Online softmax": {"02": ""},
    "FlashAttention": {"03": ""},
    "FlashAttention-2, forward": {"04": ""},
    "The backward pass": {"05": ""},
    "Workers and warps": {"06": "", "07": ""},
    "Triton": {"08": "", "09": ""},
    "The ladder": {"10": "", "11": ""},
    "Hopper": {"12a": "1 2", "12b": "1", "13": "1"},
    "Decode, rings, masks": {"14": "", "15": "", "16": ""},
}
LEFT_OUT = ("Exercises", "Checks", "Questions", "Part IV in four", "Sitting")  # the course's, not a lecture's
LINES = 22  # of a listing with what it prints, for the last row of seats
ASKED = re.compile(r"(.*?)(\*\*(?:Predict|Build)\.\*\*.*?)(<details>.*)?", re.DOTALL)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COLOURS = HtmlFormatter(style="a11y-high-contrast-light", nowrap=True)
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
MARKDOWN.use(dollarmath_plugin, renderer=lambda tex, how: mathml(tex, "block" if how["display_mode"] else "inline"))


def rendered(text: str) -> str:
    """Markdown as HTML with its pictures inside, and of links the words alone: their files are not in a deck."""

    def inside(found: re.Match) -> str:
        picture = b64encode((NOTEBOOKS / found[1]).read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{picture}"'

    html = re.sub(r"</?a\b[^>]*>", "", MARKDOWN.render(text))
    return re.sub(r'src="(\.\./figures/[^"]+\.svg)"', inside, html)


class Beat(NamedTuple):
    """A paragraph, or something to look at."""

    text: str = ""
    seen: str = ""  # as HTML


def write(folder: Path) -> list[Path]:
    """The decks; and their handouts as PDF where there is a Chromium."""
    files.check_writable(folder, "book --slides")
    folder.mkdir(parents=True, exist_ok=True)
    looks = (LOOKS / "slides.css").read_text(encoding="utf-8") + COLOURS.get_style_defs("pre")
    script = (LOOKS / "slides.js").read_text(encoding="utf-8")
    browser, decks = next(filter(None, map(shutil.which, BROWSERS)), None), []
    for number, (title, chapters) in enumerate(LECTURES.items(), start=1):
        cover = f"<section class=first><h1>{number} · {title}</h1></section>"
        head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{looks}</style>"
        html = f"{head}<body>{cover}{''.join(deck(chapters))}<script>{script}</script>"
        decks.append(files.write(folder / f"lecture_{number:02}.html", html))
        if browser:
            quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
            pdf = f"--print-to-pdf={decks[-1].with_suffix('.pdf').resolve()}"
            call = [browser, *quiet, pdf, decks[-1].resolve().as_uri()]
            subprocess.run(call, capture_output=True, check=False, timeout=120)
    return decks


def deck(chapters: dict[str, str]) -> Iterator[str]:
    """The slides of some chapters."""
    for chapter in (c for c in written() if c.number in chapters):
        yield f"<section class=first><h1>{escape(chapter.title)}</h1><p>{escape(chapter.question)}</p></section>"
        sitting = ""
        for title, beats in sections(nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)):
            sitting = title.split()[1] if title.startswith("Sitting ") else sitting
            shown = not chapters[chapter.number] or sitting in chapters[chapter.number].split() or title == "Recap"
            if shown and not title.startswith(LEFT_OUT):
                yield from slides(title, fewer(beats))


def sections(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, list[Beat]]]:
    """(heading, beats) of a chapter, in order."""
    title, beats = "", []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            beats += looked_at(cell)
            continue
        for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
            if part.startswith("## "):
                if title:
                    yield title, beats
                (title, _, part), beats = part.removeprefix("## ").partition("\n"), []
            if title:
                beats += read(part)
    yield title, beats


def read(text: str) -> list[Beat]:
    """The paragraphs of a cell; tables, formulas and questions are looked at."""
    asked = ASKED.fullmatch(text)
    before, question, answer = asked.groups(default="") if asked else (text, "", "")
    if before.startswith("<details>"):  # a solution: for the notes
        before, answer = "", before
    beats = []
    for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", before))):
        look = paragraph.startswith(("|", "![", "$$", "- ", "1. "))
        beats.append(Beat(seen=rendered(paragraph)) if look else Beat(paragraph))
    answer = re.sub(r"</?details>|<summary>.*?</summary>", "", answer)
    return beats + ([Beat(answer, rendered(question) if question else "")] if answer or question else [])


def looked_at(cell: nbformat.NotebookNode) -> list[Beat]:
    """What a code cell shows: a picture, a live piece, or its lines and what they print."""
    shown = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    if live := LIVE.search(shown):
        still = re.search(r'<div class="still">(.*?</p>)</div>', shown, re.DOTALL)
        frame = f'<iframe loading=lazy srcdoc="{escape(page(live[1]))}"></iframe>'
        return [Beat(seen=f"{frame}<div class=still>{still[1] if still else ''}</div>")]
    if shown:
        return [Beat(seen=shown)]
    if told := [output.data["text/markdown"] for output in cell.outputs if "text/markdown" in output.get("data", {})]:
        return [Beat(seen=rendered("\n\n".join(told)))]
    if is_imports(cell) or {"hide-input", "navigation"} & set(cell.metadata.get("tags", [])):
        return []
    printed = "".join(output.get("text", "") for output in cell.outputs)
    code = highlight(cell.source, PythonLexer(), COLOURS)
    output = f"<pre class=printed>{escape(printed)}</pre>" if printed else ""
    return [Beat(seen=f"<div class=code><pre>{code}</pre>{output}</div>")]


def fewer(beats: list[Beat]) -> list[Beat]:
    """What a lecture shows of a section: one listing that a room can read; a list where there is nothing else."""
    beats = [beat for beat in beats if not beat.seen.startswith("<details")]  # folded in the chapter, too
    listings = [beat for beat in beats if "<pre" in beat.seen and not beat.text]
    lists = [beat for beat in beats if beat.seen.startswith(("<ul", "<ol"))]
    others = any(beat.seen and beat not in listings + lists for beat in beats)
    short = [beat for beat in listings if beat.seen.count("\n") <= LINES]
    shown = (short if others else short or listings)[:1]
    kept = [beat for beat in beats if beat not in listings or beat in shown]
    return [Beat(beat.seen) if beat in lists and (others or shown) else beat for beat in kept]


def slides(title: str, beats: list[Beat]) -> Iterator[str]:
    """A slide for everything to look at, with the sentence beside it; the notes of the first have the whole text."""
    notes = rendered("\n\n".join(beat.text for beat in beats if not beat.seen))
    used: set[int] = set()
    for at in [at for at, beat in enumerate(beats) if beat.seen] or [-1]:
        asks = at >= 0 and bool(beats[at].text)
        beside = [near for near in ((at - 1, at + 1) if at >= 0 else (0,)) if 0 <= near < len(beats)]
        words = [n for n in beside if not beats[n].seen and not beats[n].text.startswith("<") and not asks]
        near = next((n for n in words if n not in used), None)
        used |= {near} - {None}
        said = [] if near is None else beats[near : near + 1] if at >= 0 else beats
        beginning = "\n\n".join(sentences(beat.text) for beat in said)
        own = rendered(beats[at].text) if asks else ""
        rows = len(re.findall(r"<(?:tr|p|li)\b", beats[at].seen))
        lines = rows or beats[at].seen.count("\n") + 4  # of a table and what stands around it, or of a listing
        seen = f'<figure style="--lines: {lines}">{beats[at].seen}</figure>' if at >= 0 else ""
        head = f"<h2>{MARKDOWN.renderInline(title)}</h2>{rendered(beginning)}"
        yield f"<section>{head}{seen}<aside>{own}{notes}</aside></section>"
        notes = ""


def sentences(paragraph: str) -> str:
    """As many of its first sentences as say something."""
    first, *others = re.split(r"(?<=[.?!:])\s+(?=[A-Z$`*])", paragraph)
    while others and len(first) < 60:
        first = f"{first} {others.pop(0)}"
    return first
