"""The interactive figures in figures/live, as shown in a notebook.

`live("algorithm1")` at the end of a cell shows the interactive figure if scripts can run, as they can on the site or in
a trusted notebook. Elsewhere, for example on GitHub or in print, it shows a static figure and a caption with a link.
"""

import re
from html import escape, unescape
from importlib import import_module
from pathlib import Path
from typing import Any

from fa2_lab.plots.show import show

FOLDER = Path(__file__).resolve().parents[2] / "figures" / "live"


STILLS = {  # {interactive figure: picture used as its static version}
    "algorithm1": "visiting_order",
    "softmax": "state_stream",
    "tiles": "hbm_traffic",
    "climb": "climb",
    "timetable": "waves",
    "backward": "worker_tiles",
    "race": "dq_over_time",
}
WIDE = ("algorithm1", "climb", "tiles")  # interactive figures that are as wide as the window
HEAD = re.compile(
    r'<title>(.*?)</title>\n<meta name="description" content="(.*?)">(?:\n<meta name="still" content="(.*?)">)?'
)


def page_texts(name: str) -> tuple[str, str, str]:
    """Return an interactive figure's title, its description, and the description of its static version.

    The texts are read from the figure's page. All three are empty if there is no such page.
    """
    page = FOLDER / f"{name}.html"
    if not page.is_file():
        return "", "", ""
    title, sentence, still = HEAD.search(page.read_text(encoding="utf-8")).groups(default="")
    return unescape(title), unescape(sentence), unescape(still)


class live:
    """An interactive figure. To show it, end a notebook cell with, for example, `live("algorithm1", ask="order=both")`.

    `name` is a key of STILLS. `ask` holds the figure's initial settings as a URL query. Further keyword arguments are
    passed to the static figure's data().
    """

    def __init__(self, name: str, ask: str = "", **words: Any) -> None:
        if name not in STILLS:
            raise ValueError(f"name: got {name!r}; it takes one of {', '.join(STILLS)}")
        self.name, self.ask, self.words = name, ask, words

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        drawing = import_module(f"fa2_lab.plots.{STILLS[self.name]}")
        picture_html, _ = show(drawing.draw(**drawing.data(**self.words)))._repr_mimebundle_()
        title, sentence, of_still = page_texts(self.name)
        words = " ".join(filter(None, [f"{title}. {sentence}" if title else "", of_still]))
        own_page = f"figures/live/{self.name}.html"
        link = f'<a href="../{own_page}{escape("?" * bool(self.ask) + self.ask)}">{own_page}</a>'
        to_play = f"The interactive figure is {link}, which opens in any browser." if title else ""
        caption = " ".join(filter(None, [escape(of_still), to_play]))  # the caption of the static figure
        still = f'<div class="still">{picture_html["text/html"]}<figcaption>{caption}</figcaption></div>'
        frame = self.frame(title) if title else ""
        html = f'<div class="live-piece" data-piece="{self.name}" data-ask="{escape(self.ask)}">{still}{frame}</div>'
        return {"text/html": html, "text/plain": f"[live] {words}"}, {}

    def frame(self, title: str) -> str:
        """Return the interactive figure as an iframe with this title. Once loaded, it hides the static figure."""
        looks = 'style="width: 100%; height: 640px; border: 0"'
        hide = 'onload="this.previousElementSibling.hidden = true"'
        return f'<iframe title="{escape(title)}" {looks} {hide} srcdoc="{escape(page(self.name, self.ask))}"></iframe>'


def page(name: str, ask: str = "") -> str:
    """Return an interactive figure's page as a single HTML document, with its styles and scripts inlined."""
    html = (FOLDER / f"{name}.html").read_text(encoding="utf-8")
    html = html.replace("<html", f'<html data-ask="{escape(ask)}"', 1)

    def inline_style(match: re.Match) -> str:
        return f"<style>{(FOLDER / match[1]).read_text(encoding='utf-8')}</style>"

    def inline_script(match: re.Match) -> str:
        return f"<script>{(FOLDER / match[1]).read_text(encoding='utf-8')}</script>"

    html = re.sub(r'<link rel="stylesheet" href="([\w.]+)">', inline_style, html)
    return re.sub(r'<script src="([\w.]+)"></script>', inline_script, html)
