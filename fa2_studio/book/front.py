"""The first page of the site: a moving picture, a sentence, three ways in, the climb, and a card per chapter."""

from html import escape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from matplotlib.text import Text

from fa2_lab.plots import climb, live, style
from fa2_lab.plots.show import draw
from fa2_lab.tools import files, ladder
from fa2_lab.tools.figures import PHONE, PICTURES, caption
from fa2_studio.book import cards
from fa2_studio.book.callouts import WORD_JOINER
from fa2_studio.book.cards import CARDS
from fa2_studio.book.chapters import PARTS, Chapter, written

SENTENCE = (
    "Standard attention writes down every score. FlashAttention-2 keeps one small tile of them at a time, and its "
    "answer is the same."
)
WAYS = (  # what somebody wants, where to begin, and a sentence
    ("Understand", "00_start.html", "Begin with the map. The first seven chapters need Python and matrices only."),
    ("Teach", "assignments/{first}.html", "Nine assignments that grade themselves, offline and without a GPU."),
    ("Change a kernel", "08_triton_forward.html", "From the paper's line to Triton, and to the fastest of 24 kernels."),
)
SHOWN = {  # on a card without tiles of its own, if not the chapter's first picture
    "00_start": "nested",
    "04_fa2_forward": "causal_tiles",
    "11_workshop": "roofline",
    "12b_hopper_kernel": "stages",
    "13_hopper_backward": "backward_step",
    "B_errata": "deferred_normalisation",
}
FIGURES = files.ROOT / "figures"
SMALL = "small"  # the folder of the cards' pictures
POSTERS = {"poster_forward": "Algorithm 1, forward", "poster_backward": "Algorithm 2, backward"}


def index(assignments: list[str], toctrees: list[str], licence: str, address: str) -> str:
    """Return the page in Markdown, most of which is HTML. A link's preview needs the site's own `address`."""
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
        block("hero", f'<img src="figures/hero.svg" width="840" height="540" alt="{escape(description("hero"))}">'),
        f"**{SENTENCE}** {claim} Every step was run, and every result was checked against plain attention in float64.",
        block("ways", *(way(name, target, words, assignments) for name, target, words in WAYS)),
        "[Every call of the package](API.md), with its arguments, an example and its limits.",
        "[Forty-one questions](questions.md) that learners ask, with short answers and the place in the book.",
        "[What runs where](TROUBLESHOOTING.md#what-runs-where), from a laptop to an H200.",
        "## The climb",
        begins_at(data["rungs"]),
        framed("climb", wide=False),
        *(part(name, numbers) for name, numbers in PARTS.items()),
        "## Posters",
        block("cards", *(poster(name, words) for name, words in POSTERS.items())),
        "## Results",
        "\n".join(ladder.markdown(ladder.load(ladder.SUITE))),
        "[Every row of every record](results.md)",
        f"## Licence\n\n{licence}",
        *toctrees,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def begins_at(rungs: list[climb.RungSpeeds]) -> str:
    """Return where the climb's frame opens, which is not its first rung."""
    jumps = [new.full / old.full for old, new in pairwise(rungs)]
    n = 1 + jumps.index(max(jumps))
    return (
        f"The climb opens at rung {rungs[n].number}, where the jump is the highest. Its slider leads back to rung 00."
    )


META = """---
myst:
  html_meta:
    "description": "{title}: exact attention from NumPy to Hopper, every step executed and checked."
    "property=og:title": "FlashAttention-2, line by line"
    "property=og:description": "{title}"
    "property=og:image": "{address}figures/card.png"
    "name=twitter:card": "summary_large_image"
---"""


def picture(name: str, alt: str, kind: str = "") -> str:
    """Return a picture with its version for phones. The files themselves adapt to dark pages."""
    phone = f'<source media="(max-width: 600px)" srcset="figures/{PHONE}/{name}.svg">'
    return f'<picture class="{kind}">{phone}<img src="figures/{name}.svg" alt="{escape(alt)}"></picture>'


def description(name: str) -> str:
    """Return the description inside a picture of figures/."""
    return ElementTree.parse(FIGURES / f"{name}.svg").findtext("{http://www.w3.org/2000/svg}desc", "")


def framed(name: str, ask: str = "", wide: bool = True) -> str:
    """Return an interactive figure in a frame, with its still for print and for browsers without scripts.

    With `wide=False`, a wide figure also stays in the column of text.
    """
    still = picture(live.STILLS[name], live.about(name)[1], "still")
    title, sentence, _ = map(escape, live.about(name))
    address = escape(f"figures/live/{name}.html{'?' * bool(ask)}{ask}")
    frame = f'<iframe src="{address}" title="{title}" loading="lazy"></iframe>'
    own = f'<a href="{address}">{title}, on a page of its own</a>'
    kind = "live-piece wide" if wide and name in live.WIDE else "live-piece"
    return f'<figure class="{kind}">{frame}{still}<figcaption>{sentence} {own}</figcaption></figure>'


def block(name: str, *inside: str) -> str:
    """Return HTML that Markdown leaves alone, without empty lines or indentation."""
    return f'<div class="{name}">\n' + "\n".join(inside) + "\n</div>"


def way(name: str, target: str, words: str, assignments: list[str]) -> str:
    address = target.format(first=assignments[0].split("/")[-1] if assignments else "")
    return f'<a href="{address}"><b>{name}</b><span>{words}</span></a>'


def part(title: str, numbers: str) -> str:
    """Return a part of the book, with a card for each chapter."""
    chapters = [chapter for chapter in written() if chapter.number in numbers.split()]
    return f"## {title}\n\n{block('cards', *map(card, chapters))}" if chapters else ""


def shown(chapter: Chapter) -> str:
    """Return the name of the picture on a chapter's card: its own, or one of figures/."""
    if chapter.name in CARDS:
        return chapter.name
    return SHOWN.get(chapter.name) or next(name for name, place in PICTURES.items() if place == chapter.name)


def write_small(folder: Path) -> None:
    """Write the pictures of all cards: tiles, or the shapes of a picture without its words."""
    folder.mkdir(exist_ok=True)
    for name in map(shown, written()):
        if name in CARDS:
            alt, tiles = CARDS[name]
            files.write(folder / f"{name}.svg", style.svg(cards.draw(tiles), alt))
            continue
        figure, alt = draw(name)
        with matplotlib.rc_context(style.RC):
            for text in figure.findobj(Text):
                text.set_visible(False)
            figure.suptitle("")
            for ax in figure.axes:
                ax.set(title="", xlabel="", ylabel="", xticks=[], yticks=[])
                ax.set_title("", loc="left")
            figure.set_size_inches(cards.INCHES)
            figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03)
            figure.draw_without_rendering()
        files.write(folder / f"{name}.svg", style.svg(figure, alt))


def card(chapter: Chapter) -> str:
    name = shown(chapter)
    alt = CARDS[name][0] if name in CARDS else caption(FIGURES / f"{name}.svg")
    image = f'<img src="figures/{SMALL}/{name}.svg" alt="{escape(alt)}">'
    title = escape(chapter.title).replace("FlashAttention-", f"FlashAttention-{WORD_JOINER}")
    words = f"<b>{chapter.number} · {title}</b><span>{escape(chapter.question)}</span>"
    return f'<a href="{chapter.name}.html"><i>{image}</i>{words}</a>'


def poster(name: str, words: str) -> str:
    image = f'<img src="figures/{name}.svg#svgView(viewBox(458,20,475,336))" alt="The poster: {words}">'
    return f'<a href="figures/{name}.pdf"><i>{image}</i><b>{words}</b><span>One sheet of A2, as PDF</span></a>'
