"""The site's first page: a moving picture, three starting points, the results, the climb, and a card per chapter."""

from html import escape
from pathlib import Path
from xml.etree import ElementTree

from fa2_lab.plots import climb, live
from fa2_lab.tools import files, ladder
from fa2_lab.tools.figures import PHONE
from fa2_studio.bench import results_page
from fa2_studio.book import cards
from fa2_studio.book.callouts import WORD_JOINER
from fa2_studio.book.cards import CARDS
from fa2_studio.book.chapters import PARTS, Chapter, written

SENTENCE = (
    "Standard attention writes down every score. FlashAttention-2 keeps one small tile of them at a time, and its "
    "answer is the same."
)
WAYS = (  # (the reader's goal, the page to begin with, a sentence)
    ("Understand", "00_start.html", "Begin with the map. The first seven chapters need Python and matrices only."),
    ("Teach", "assignments/{first}.html", "Nine assignments that grade themselves, offline and without a GPU."),
    ("Change a kernel", "08_triton_forward.html", "From the paper's line to Triton, and to the fastest of 24 kernels."),
)
LOOK_UP = (
    "You can also look up [every call of the package](API.md), [forty-one questions](questions.md) that learners ask, "
    "and [what runs where](TROUBLESHOOTING.md#what-runs-where)."
)
FIGURES = files.ROOT / "figures"
CARD_FOLDER = "small"  # the folder of the cards' pictures
POSTERS = {"poster_forward": "Algorithm 1, forward", "poster_backward": "Algorithm 2, backward"}
SHEET = "One sheet of A1, as PDF"


def front_page(assignments: list[str], toctrees: list[str], licence: str, address: str) -> str:
    """Return the page in Markdown, most of which is HTML. `address` is the site's address, needed for link previews."""
    data = climb.data()
    peer, full, _ = data["peer"]
    share = data["rungs"][-1].full / full
    title = f"From {data['rungs'][0].full / full:.0%} to {share:.0%} of {peer} in {len(data['rungs']) - 1} changes"
    claim = (
        f"Here it is built in small steps, from NumPy to a kernel with {share:.0%} of the speed of {peer} on an H200."
    )
    parts = [
        META.format(title=title, address=address),
        "# FlashAttention-2, line by line",
        html_block("hero", picture_html("hero", picture_description("hero"))),
        f"**{SENTENCE}** {claim} Every step was run, and every result was checked against plain attention in float64.",
        html_block("ways", *(way_in_html(name, target, words, assignments) for name, target, words in WAYS)),
        LOOK_UP,
        "## Results",
        "\n".join(results_page.front_page_summary()),
        "## The climb",
        "Step through the changes. The six largest jumps have their factor below the bar, and an empty bar is a "
        "change that loses speed.",
        figure_frame("climb", "brief", wide=False),
        "\n".join(ladder.markdown(ladder.load(ladder.SUITE))),
        *(part_html(name, numbers) for name, numbers in PARTS.items()),
        "## Posters",
        html_block("cards", *(poster_html(name, words) for name, words in POSTERS.items())),
        f"## Licence\n\n{licence}",
        *toctrees,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


META = """---
myst:
  html_meta:
    "description": "{title}: exact attention from NumPy to Hopper, every step executed and checked."
    "property=og:title": "FlashAttention-2, line by line"
    "property=og:description": "{title}"
    "property=og:image": "{address}figures/card.png"
    "name=twitter:card": "summary_large_image"
---"""


def picture_html(name: str, alt: str, kind: str = "") -> str:
    """Return a picture as HTML, with a separate version for phones. The files themselves adapt to dark pages."""
    phone = f'<source media="(max-width: 600px)" srcset="figures/{PHONE}/{name}.svg">'
    return f'<picture class="{kind}">{phone}<img src="figures/{name}.svg" alt="{escape(alt)}"></picture>'


def picture_description(name: str) -> str:
    """Return the description stored inside a picture in figures/."""
    return ElementTree.parse(FIGURES / f"{name}.svg").findtext("{http://www.w3.org/2000/svg}desc", "")


def figure_frame(name: str, ask: str = "", wide: bool = True) -> str:
    """Return an interactive figure in a frame, with a static figure for print and for browsers without scripts.

    With `wide=False`, even a wide figure stays within the text column.
    """
    still = picture_html(live.STILLS[name], live.page_texts(name)[1], "still")
    title, sentence, _ = map(escape, live.page_texts(name))
    address = escape(f"figures/live/{name}.html{'?' * bool(ask)}{ask}")
    frame = f'<iframe src="{address}" title="{title}" loading="lazy"></iframe>'
    own = f'<a href="{address.removesuffix("?brief")}">{title}, on a page of its own</a>'
    kind = "live-piece wide" if wide and name in live.WIDE else "live-piece"
    return f'<figure class="{kind}" id="live-{name}">{frame}{still}<figcaption>{sentence} {own}</figcaption></figure>'


def html_block(name: str, *inside: str) -> str:
    """Return a block of HTML without empty lines or indentation, which Markdown leaves unchanged."""
    return f'<div class="{name}">\n' + "\n".join(inside) + "\n</div>"


def way_in_html(name: str, target: str, words: str, assignments: list[str]) -> str:
    address = target.format(first=assignments[0].split("/")[-1] if assignments else "")
    return f'<a href="{address}"><b>{name}</b><span>{words}</span></a>'


def part_html(title: str, numbers: str) -> str:
    """Return the section for one part of the book, with a card for each chapter."""
    chapters = [chapter for chapter in written() if chapter.number in numbers.split()]
    return f"## {title}\n\n{html_block('cards', *map(card_html, chapters))}" if chapters else ""


def write_card_pictures(folder: Path) -> None:
    """Write the picture of each chapter's card, and the pictures that other sites show when a page is shared."""
    folder.mkdir(exist_ok=True)
    for chapter in written():
        files.write(folder / f"{chapter.name}.svg", cards.card_svg(chapter.name))
        files.write(folder / f"{chapter.name}.png", cards.chapter_preview(chapter))
    for name in live.STILLS:
        files.write(folder / f"{name}.png", cards.live_preview(name, live.page_texts(name)[0]))


def card_html(chapter: Chapter) -> str:
    title = escape(chapter.title).replace("FlashAttention-", f"FlashAttention-{WORD_JOINER}")
    image = f'<img src="figures/{CARD_FOLDER}/{chapter.name}.svg" alt="{escape(CARDS[chapter.name][0])}">'
    return link_card_html(image, f"{chapter.name}.html", f"{chapter.number} · {title}", escape(chapter.question))


def poster_html(name: str, title: str) -> str:
    image = f'<img src="figures/{name}.svg" alt="The upper part of the poster" class="top">'
    return link_card_html(image, f"figures/{name}.pdf", title, SHEET)


def link_card_html(image: str, address: str, title: str, words: str) -> str:
    """Return a card, which is a link with a picture."""
    return f'<a href="{address}"><i>{image}</i><b>{title}</b><span>{words}</span></a>'
