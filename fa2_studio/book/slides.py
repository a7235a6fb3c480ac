"""Make thirteen lectures from the headings, sentences, pictures, listings and interactive figures of the chapters.

Each lecture is a single, self-contained HTML file. The arrow keys turn the slides, and n shows the notes. Printing the
file gives the handout.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from html import escape, unescape
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import nbformat

from fa2_lab.plots.live import page, page_texts
from fa2_lab.tools import files
from fa2_lab.tools.figures import PHONE
from fa2_studio.book import blocks, cards, panels
from fa2_studio.book.blocks import ROWS, block_height, markdown_to_html
from fa2_studio.book.chapters import NOTEBOOKS, Chapter, written
from fa2_studio.book.site import LIVE, LOOKS_FOLDER, figures_by_description, is_import_cell

LECTURES = {  # {title: {chapter: numbers of the parts to show, or "" for the whole chapter}}
    "Attention and its cost": {"00": "", "01": ""},
    "Online softmax": {"02": ""},
    "FlashAttention": {"03": ""},
    "The forward pass of FlashAttention-2": {"04": ""},
    "The backward pass": {"05": ""},
    "Workers and warps": {"06": "", "07": ""},
    "Triton": {"08": "", "09": ""},
    "The ladder": {"10": ""},
    "The workshop": {"11": ""},
    "Hopper": {"12a": "1 3 4", "12b": "1", "13": "1"},
    "Decoding": {"14": ""},
    "Rings and masks": {"15": "", "16": ""},
    "Change it": {"17": ""},
}
LEFT_OUT = ("Exercises", "Checks", "Questions", "Part ", "What comes next?")  # belong to the course
FOLD = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)
ASKED = re.compile(r"^\*\*(?:Predict|Build)\.\*\*", re.MULTILINE)
MEASURED = re.compile(r"[^.]*\b(?:NVIDIA|Model of) .*")  # the end of a caption, which states how something was measured
UNCLEAR = re.compile(  # the beginning of a sentence that needs the one before it
    r"(?:So|Its?|This|That|These|Those|They|Their|But|And|Or|Both|Then|Thus|Here|Now|However|Instead|Otherwise|Therefore|"
    r"Each of them|The same|The others?)\b"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Beat(NamedTuple):
    """One element of a section: a paragraph, something to look at, a question, or an answer with a separate slide."""

    text: str = ""  # what the lecturer says
    seen: tuple[str, ...] = ()  # what the audience sees, as HTML blocks that are never split
    kind: str = ""  # "asks", "answers", "live" or "picture"
    name: str = ""  # name of a picture in figures/, names defined by a listing, a shortened question, or a live title


class Slide(NamedTuple):
    """The content of a slide: blocks of words, and a picture or an interactive figure below or beside them."""

    title: str
    kind: str  # the beat's kind, or "more" for further parts of a picture
    words: tuple[str, ...]
    notes: str
    seen: str = ""
    name: str = ""  # name of the picture, if the slide shows all of it, or the title of the interactive figure
    layout: str = ""  # "two" for two columns, or "over" for words over a picture
    message: str = ""  # the headline of a picture that is alone on its slide
    part: str = ""  # the section's heading, if the slide has one of its own


def write_decks(folder: Path) -> list[Path]:
    """Write the decks and, if Chromium is installed, PDF handouts. Return the decks' files."""
    files.check_writable(folder, "book --slides")
    folder.mkdir(parents=True, exist_ok=True)
    night = f"@media screen and (prefers-color-scheme: dark) {{\n{blocks.DARK_COLOURS.get_style_defs('pre')}\n}}"
    own = "body pre { background: var(--ground); line-height: 1.12; }"
    code = f"{blocks.COLOURS.get_style_defs('pre')}\n{night}\n{own}\n"
    looks = (LOOKS_FOLDER / "slides.css").read_text(encoding="utf-8") + code
    script = (LOOKS_FOLDER / "slides.js").read_text(encoding="utf-8")
    browser, decks, small = next(filter(None, map(shutil.which, BROWSERS)), None), [], card_pictures()
    for number, (title, chapters) in enumerate(LECTURES.items(), start=1):
        parts = [c for c in written() if c.number in chapters]
        asked = "".join(f"<div class=part>{small[c.name]}<p>{escape(c.question)}</p></div>" for c in parts)
        cover = f"<section class=first><h1>{number} · {title}</h1>{asked}</section>"
        head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        head += f"<title>{title}</title><style>{looks}</style>"
        html = f"{head}<body>{cover}{''.join(deck_slides(chapters, small))}<script>{script}</script>"
        decks.append(files.write(folder / f"lecture_{number:02}.html", html))
        if browser:
            quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
            pdf = f"--print-to-pdf={decks[-1].with_suffix('.pdf').resolve()}"
            call = [browser, *quiet, pdf, decks[-1].resolve().as_uri()]
            subprocess.run(call, capture_output=True, check=False, timeout=120)
    return decks


def card_pictures() -> dict[str, str]:
    """Return {chapter: HTML of its picture on the site's first page}. The pictures are used on title slides."""
    return {
        c.name: f'<figure><img alt="" src="{panels.data_url(cards.card_svg(c.name).decode())}"></figure>'
        for c in written()
    }


def deck_slides(chapters: dict[str, str], small: dict[str, str]) -> Iterator[str]:
    """Yield the slides of these chapters as HTML."""
    for chapter in (c for c in written() if c.number in chapters):
        if len(chapters) > 1:
            yield title_slide(chapter, small[chapter.name])
        part, opening = "", list[Slide]()
        for title, beats, opens in sections(nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)):
            part = title.split()[1] if title.startswith("Part ") else part
            now = not chapters[chapter.number] or part in chapters[chapter.number].split() or title == "Recap"
            if now and not title.startswith(LEFT_OUT):
                heading = blocks.MARKDOWN.renderInline(title)
                shown = [*opening, *slides_of_section(heading, drop_beats(beats))]
                opening = shown if opens and not any(beat.seen for beat in beats) else []
                if not opening:
                    placed = give_own_headings(place_pictures(merge_short_slides(shown)))
                    yield from map(slide_html, repeat_pictures(placed))


def title_slide(chapter: Chapter, image: str) -> str:
    """Return the title slide of a chapter, with its question and its picture."""
    words = f"<div><h1>{escape(chapter.title)}</h1><p>{escape(chapter.question)}</p></div>"
    return f"<section class=first><div class=two>{words}{image}</div></section>"


def sections(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, list[Beat], bool]]:
    """Yield (heading, beats, whether a subsection follows) for each section of a chapter, in order."""
    title, level, beats, asked, options = "", "", [], "", ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            more = beat_of_code_cell(cell, announced=bool(beats) and beats[-1].text.endswith(":"))
            if beats and beats[-1].kind == "asks" and more and not more[0].kind:  # the function to write
                beats[-1] = beats[-1]._replace(seen=beats[-1].seen + more.pop().seen)
            beats += more
            continue
        # Within a part of a chapter, section headings are one level lower.
        for part in re.split(r"^(?=###? )", cell.source, flags=re.MULTILINE):
            if re.match("###? ", part):
                before, level = level, part.split()[0]
                if title:
                    yield title, beats, before < level
                (title, _, part), beats, asked = part.lstrip("# ").partition("\n"), [], ""
            for beat in beats_of_markdown(part) if title else ():
                if beat.kind == "asks":
                    asked, options = beat.name, beat.seen[-1] if "class=choice" in beat.seen[-1] else ""
                elif beat.kind == "answers" and not asked:  # its question is only asked in passing
                    beat = Beat("\n\n".join([*beat.seen, beat.text]))
                elif beat.kind == "answers" and options:
                    beat, options = beat._replace(seen=blocks.mark_right_option(beat.seen, options)), ""
                elif beat.kind == "answers" and beat.seen[0].startswith("<pre"):  # a solution repeats its task
                    beat = beat._replace(seen=(asked, *beat.seen), name=asked)
                beats.append(beat)
    yield title, beats, False


def drop_beats(beats: list[Beat]) -> list[Beat]:
    """Return a section's beats, with those that a lecture leaves out replaced by empty beats.

    A lecture keeps one table (or output, unless a listing already shows some) and one listing that fits on a slide. It
    keeps lists only if there is nothing else to look at, and a longer listing only if there is nothing else but lists.
    """
    plain = [beat for beat in beats if not beat.kind and beat.seen]
    printed = [beat for beat in beats if "class=printed" in "".join(beat.seen)]
    outputs = [beat for beat in printed if beat in plain and len(beat.seen) == 1]
    tables = [beat for beat in plain if beat.seen[0].startswith("<table")] + outputs
    code = [beat for beat in plain if beat.seen[0].startswith("<pre") and beat not in tables]
    lists = [beat for beat in plain if beat.seen[0].startswith(("<ul", "<ol"))]
    others = any(beat.seen and beat not in code + lists for beat in beats)
    short = [beat for beat in code if max(map(block_height, beat.seen)) <= ROWS]
    kept = (short if others else short or code)[:1]
    left_out = [beat for beat in code if beat not in kept] + (lists if others or kept else []) + tables[1:]
    left_out += outputs if len(printed) > len(outputs) else []
    return [Beat() if beat in left_out else beat for beat in beats]


def beats_of_markdown(text: str) -> Iterator[Beat]:
    """Yield a Markdown cell's beats: paragraphs are spoken, whereas tables, formulas, lists and questions are shown.

    Among the folds of a cell, only answers and solutions become beats.
    """
    for n, part in enumerate(FOLD.split(text)):  # text, title, inside, text, …
        if n % 3 == 0:
            said, *asked = re.split(ASKED, part, maxsplit=1)
            for block in blocks.split_markdown(said):
                look = block.startswith(("|", "![", "$$", "- ", "1. ", "```"))
                block, rest = blocks.shorten_list(block)
                if drawing := re.search(r"^!\[[^]]*\]\(\.\./figures/(\w+)\.svg\)", block):
                    name = drawing[1] if panels.can_be_divided(drawing[1]) else ""
                    yield Beat("", panels.slides_of_figure(drawing[1]), "picture", name)
                else:
                    yield Beat(rest if look else block, tuple(blocks.block_to_html(block)) if look else ())
            if asked:
                name = f"<div class=asked>{markdown_to_html(blocks.first_sentences(asked[0].strip(), 60)[0])}</div>"
                whole = ASKED.search(part)[0] + asked[0]
                rest, seen = "", blocks.text_to_html_blocks(whole)
                if sum(map(block_height, seen)) > ROWS:
                    rest, seen = shorten_paragraphs(blocks.split_markdown(whole))
                yield Beat(rest, seen, "asks", name)
        answers = n % 3 == 1 and part.startswith(("Answer", "A solution", "Solution"))
        if answers:
            yield answer_beat(blocks.split_markdown(FOLD.split(text)[n + 1]))


def answer_beat(parts: list[str]) -> Beat:
    """Return an answer's beat. Its slide shows the first sentences of long paragraphs, and its notes the rest."""
    rest, seen = shorten_paragraphs(
        [re.sub(r"^\*\*[a-z](?=[a-z ])", lambda first: first[0].upper(), part) for part in parts]
    )
    return Beat(rest, seen, "answers")


def shorten_paragraphs(parts: list[str]) -> tuple[str, tuple[str, ...]]:
    """Split off the later sentences of long paragraphs, and return them, followed by what remains as HTML blocks."""
    long = {part: blocks.first_sentences(part, 120) for part in parts if len(part) > 220 and part[0] not in "|`$-"}
    seen = tuple(piece for part in parts for piece in blocks.block_to_html(long[part][0] if part in long else part))
    return "\n\n".join(rest for _, rest in long.values()), seen


def beat_of_code_cell(cell: nbformat.NotebookNode, announced: bool) -> list[Beat]:
    """Return a code cell's beat, if any: its picture, interactive figure, Markdown, or code with its output.

    Imports and hidden code produce no beat. Output without its code produces one only if a sentence announces it.
    """
    seen = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    if live := LIVE.search(seen):
        still = re.search(r'<div class="still">(.*?)</div>', seen, re.DOTALL)
        name, asked = map(unescape, live.groups(""))
        # The narrowest width that fills a slide.
        width = {"algorithm1": 1020, "climb": 880, "tiles": 640, "race": 800}.get(name, 720)
        inside = escape(page(name, "&".join(filter(None, [asked, "deck"]))))
        frame = f'<iframe width={width} loading=lazy srcdoc="{inside}"></iframe>'
        static = re.sub("</?a[^>]*>", "", still[1]) if still else ""  # a handout has no links to files
        frame += f"<div class=still>{panels.static_svg(static)}</div>"
        return [Beat(seen=(frame,), kind="live", name=page_texts(name)[0])]
    if picture := re.search(r'<img alt="([^"]*)"[^>]*>', seen):
        caption = re.search(r"<figcaption[^>]*>(.*?)</figcaption>", seen, re.DOTALL)
        name = figures_by_description().get(unescape(picture[1]))
        shown = panels.slides_of_figure(name) if name else (picture[0],)
        return [Beat(unescape(caption[1]) if caption else "", shown, "picture", name or "")]
    if told := [output.data["text/markdown"] for output in cell.outputs if "text/markdown" in output.get("data", {})]:
        return [Beat(seen=blocks.text_to_html_blocks(FOLD.sub("", "\n\n".join(told))))]
    printed = "".join(output.get("text", "") for output in cell.outputs)
    hidden = is_import_cell(cell) or {"hide-input", "navigation"} & set(cell.metadata.get("tags", []))
    lines = blocks.narrow_columns(printed).split("\n")
    # Larger outputs cannot be read on a slide.
    large = max(map(len, lines)) > blocks.MAX_PRINTED or len(lines) > 12 or printed.startswith(("{", "[["))
    printed = "" if large or printed.startswith("your turn") else printed
    if "; " in printed and len(printed.splitlines()) == 1:  # two results to compare
        printed = re.sub(r": (?=[^:]*$)|; ", "\n    ", printed)
    code = "" if hidden else blocks.shorten_cell(cell.source, printed)
    printed = printed if code or announced else ""
    names = " ".join(re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE))
    return [Beat(seen=tuple(blocks.listing_to_html(code, printed=printed)), name=names)] if code or printed else []


def slides_of_section(title: str, beats: list[Beat]) -> Iterator[Slide]:
    """Yield a section's slides: one or more for each beat to look at, with a sentence beside it.

    The notes contain the other sentences of this beat, and those of the paragraphs up to the next beat to look at.
    """
    at = [n - is_announced(beats, n) for n, beat in enumerate(beats) if beat.seen]
    for start, stop in pairwise([0, *at[1:], len(beats)]):
        some = beats[start:stop]
        here = next((beat for beat in some if beat.seen), Beat())
        words = [beat.text for beat in some if beat.text and not beat.seen]
        bare = bool(here.seen) and "class=printed" in here.seen[0]  # output without its code
        if here.kind == "picture" and here.name and any(panels.layouts_with_text(here.name)):
            said = words[:1] or [MEASURED.sub("", here.text) or here.text]
        elif here.kind:
            said = []
        elif not here.seen:
            said = words[:2]
        elif bare:  # what announces it
            said = [some[some.index(here) - 1].text]
        elif here.seen[0].startswith(("<ul", "<ol")):
            said = words[:1] if not some[0].seen else []
        else:
            said = words[:1] or [here.text]
        beside = here.kind == "picture" and here.name and "two" in panels.layouts_with_text(here.name)
        most = 60 if sum(map(block_height, here.seen)) > 9 else 100 + 80 * (beside or not here.seen)
        shown = {text: blocks.sentence_about(here.name.split(), text, most, last=bare) for text in said if text}
        rest = [shown[text][1] if text in shown else text for text in [here.text, *words]]
        notes = markdown_to_html("\n\n".join(filter(None, rest)))
        yield from slides_of_beat(title, here, [markdown_to_html(first) for first, _ in shown.values()], notes)


def is_announced(beats: list[Beat], n: int) -> bool:
    """Return True if the paragraph before beat n announces it.

    This is the case if the paragraph ends with a colon, if it names what the beat defines, or if the beat is a listing
    and no other beat needs the paragraph.
    """
    before = beats[n - 1].text if n and not beats[n - 1].seen else ""
    other = n > 1 and (beats[n - 2].kind or not beats[n - 2].seen) and beats[n].seen[0].startswith("<pre")
    named = any(f"`{name}`" in before for name in beats[n].name.split())
    return bool(before) and (before.endswith(":") or other or named)


def slides_of_beat(title: str, beat: Beat, beside: list[str], notes: str) -> Iterator[Slide]:
    """Yield the slides needed for a beat's blocks. The paragraphs `beside` are on the first slide if they fit."""
    if beat.kind == "live":
        yield Slide(title, "live", (), notes, beat.seen[0], beat.name)
        return
    if beat.kind == "picture":
        name = beat.name if len(beat.seen) == 1 else ""
        layouts = panels.layouts_with_text(beat.name) if beside else [""] * len(beat.seen)
        message = panels.figure_headline(beat.name) if beat.name else ""
        for n, (seen, layout) in enumerate(zip(beat.seen, layouts, strict=True)):
            words = tuple(beside) if layout else ()
            yield Slide(title, "more" if n else "picture", words, "" if n else notes, seen, name, layout, message)
        return
    # Code stays together with its output.
    first = beat.seen[: 1 + any("class=printed" in block for block in beat.seen[1:2])]
    fits = sum(map(block_height, [*beside, *first])) <= ROWS
    notes = notes if fits else "".join(beside) + notes
    pages: list[list[str]] = [[]]
    for block in [*(beside if fits else []), *beat.seen]:
        if pages[-1] and sum(map(block_height, pages[-1])) + block_height(block) > ROWS:
            last = pages[-1][-1]
            code = "class=printed" in block and block_height(last) + block_height(block) <= ROWS
            with_it = len(pages[-1]) > 1 and (code or last.endswith(":</p>\n") or "class=choice" in block)
            pages.append([pages[-1].pop()] if with_it else [])
        pages[-1].append(block)
    if beat.kind == "answers":  # the rest of an answer goes into the notes, unless it is a table or a listing
        later = [page for page in pages[1:] if not any(map(blocks.is_dense, page))]
        notes += "".join(chain(*later))
        pages = [page for page in pages if page not in later]
    for n, page_ in enumerate(pages[pages[0] == [beat.name] :]):
        said = ([beat.name] if beat.kind else beside) if n and page_[0].startswith("<pre") else []
        yield Slide(title, beat.kind, (*filter(None, said), *page_), "" if n else notes)


def merge_short_slides(shown: list[Slide]) -> list[Slide]:
    """Merge neighbouring short slides of a section.

    Words are also merged with a question that follows them. No slide gets two listings.
    """
    out: list[Slide] = []
    for now in shown:
        last = out[-1] if out else None
        words = last and (*last.words, *now.words)
        alike = last and last.kind == "" and now.kind in ("", "asks")
        if alike and sum("<pre" in block for block in words) < 2 and sum(map(block_height, words)) <= ROWS:
            out[-1] = now._replace(words=words, notes=last.notes + now.notes)
        else:
            out.append(now)
    return out


def place_pictures(shown: list[Slide]) -> list[Slide]:
    """Return a section's slides with each picture before a listing, and together with the preceding or following words.

    A question and its answer have no picture, so that both have the same layout.
    """
    for n in range(len(shown) - 1):
        if not shown[n].kind and shown[n + 1].kind in ("picture", "more") and any(map(blocks.is_code, shown[n].words)):
            shown[n : n + 2] = shown[n + 1], shown[n]
    out: list[Slide] = []
    for now in shown:
        last = out[-1] if out else None
        if last and now.kind == "picture" and not last.kind and (both := add_picture(last, now)):
            out[-1] = both._replace(notes=last.notes + now.notes)
        elif last and last.kind == "picture" and not now.kind and (both := add_picture(now, last)):
            out[-1] = both._replace(notes=last.notes + now.notes)
        else:
            out.append(now)
    return out


def repeat_pictures(shown: list[Slide]) -> list[Slide]:
    """Return a section's slides, in which text-only slides repeat the previous picture."""
    out = list(shown)
    for n, now in enumerate(out):
        before = [other for other in shown[:n] if other.name and other.kind != "live"]
        if before and not now.seen and not now.kind:
            out[n] = add_picture(now, before[-1], once_more=True) or now
    return out


def add_picture(words: Slide, picture: Slide, once_more: bool = False) -> Slide | None:
    """Return a slide with these words and this picture, or None if the letters would be too small to read.

    A picture that is shown `once_more` is left out of the printed handout.
    """
    if words.seen or not picture.name:
        return None
    page, phone = (panels.without_headline(panels.figure_svg(picture.name, folder)) for folder in ("", PHONE))
    rows = sum(map(block_height, words.words))
    narrow = blocks.fits_in_column(words.words)
    for svg, layout, fits in (
        (phone, "two", narrow and panels.letter_size([phone], panels.HALF) >= panels.BESIDE),
        (page, "two", narrow and panels.letter_size([page], panels.HALF) >= panels.BESIDE),
        (page, "over", panels.letter_size([page], panels.BROAD, panels.ROOM - 40 * rows) >= panels.READ),
    ):
        if fits:
            seen = panels.image_html(svg, picture.name) + ("" if once_more else panels.print_svg(picture.name))
            message = panels.figure_headline(picture.name) if not words.kind and not once_more else ""
            return words._replace(seen=seen, name=picture.name, layout=layout, message=message)
    return None


def give_own_headings(shown: list[Slide]) -> list[Slide]:
    """Return a section's slides with headings of their own, and each answer in the layout of its question.

    The first slide has the section's heading. A further slide has its question or its first sentence as its heading,
    or else a number beside the section's heading.
    """
    out, used = list[Slide](), list[str]()
    for now in shown:
        if now.kind == "answers":
            out += answer_in_place(out[-1], now)
        elif now.message:
            out.append(now._replace(part=now.title))
        else:
            own = now._replace(title=now.name) if now.kind == "live" and now.name else lift_heading(now)
            if now.title not in used or not own:
                used.append(now.title)
                times = used.count(now.title)
                own = now._replace(title=f"{now.title} <small>{times}</small>") if times > 1 else now
            out.append(own._replace(part=now.title * (own.title != now.title)))
    return out


def lift_heading(now: Slide) -> Slide | None:
    """Return a slide whose heading is its question or its first sentence, or None if neither is suitable."""
    n, block = next(((n, x) for n, x in enumerate(now.words) if "class=task" in x), (0, "".join(now.words[:1])))
    if not (paragraph := re.fullmatch(r"<p>(<b class=task>\w+</b>|)\s*(.*)</p>\s*", block, re.DOTALL)):
        return None
    said = re.split(r"(?<=[.?!])\s+(?=[A-Z(<])", paragraph[2])
    at = next((k for k, text in enumerate(said) if text.endswith("?")), 0)
    claim, rest = said.pop(at), " ".join(said)
    plain = re.sub("<[^>]*>", "", claim)
    whole = claim[-1] in ".?!" and len(re.findall("<[a-z]", claim)) == len(re.findall("</", claim))
    alone = not rest and (paragraph[1] or not now.words[1:])
    if alone or not whole or len(plain) > 100 or UNCLEAR.match(plain):
        return None
    words = [*now.words[:n], *([f"<p>{paragraph[1]} {rest}</p>"] if rest else []), *now.words[n + 1 :]]
    return now._replace(title=claim.removesuffix("."), words=tuple(words))


def answer_in_place(question: Slide, answer: Slide) -> Iterator[Slide]:
    """Yield an answer's slides: the first repeats its question's slide, with the answer in the space left free there.

    What does not fit there follows on a slide of its own, or in the notes if it is only a comment on what did fit.
    """
    answer = answer._replace(title=question.title, part=question.part)
    further = answer._replace(title=f"{question.title} <small>continued</small>")
    if question.kind != "asks":
        yield further
        return
    marked = answer.words[:1] if "<li class=" in answer.words[0] else ()
    own = [block for block in answer.words[len(marked) :] if "class=asked" not in block]
    asked = question.words[: len(question.words) - (bool(marked) or own[0].startswith("<pre"))]
    high = sum(map(block_height, [*asked, *marked]))
    here = [block for n, block in enumerate(own) if high + sum(map(block_height, own[: n + 1])) <= ROWS]
    if here and blocks.is_code(here[-1]) and "class=printed" in "".join(own[len(here) :][:1]):
        here.pop()  # code stays together with its output
    if here or marked:
        left = tuple(own[len(here) :])
        said = "".join(left) if here and not any(map(blocks.is_dense, left)) else ""
        words = (f"<div class='asked again'>{''.join(asked)}</div>", *marked, *here)
        yield answer._replace(words=words, notes=said + answer.notes)
        answer = further._replace(words=() if said else left, notes="")
    if answer.words:
        yield answer


def slide_html(now: Slide) -> str:
    """Return a slide as HTML. Except in print, a picture's headline becomes the title of its slide."""
    head = f"<h2><i>{'Answer: ' * (now.kind == 'answers')}{now.title}</i><b>{escape(now.message) or now.title}</b></h2>"
    figure = f"<figure>{now.seen}</figure>" if now.seen else ""
    inside = f"<div>{''.join(now.words)}</div>{figure}" if now.words else figure
    if now.layout:
        inside = f"<div class={now.layout}>{inside}</div>"
    part = re.sub("<[^>]*>", "", now.part)
    return f'<section class="{now.kind}" data-part="{part}">{head}{inside}<aside>{now.notes}</aside></section>'
