"""The live pieces of figures/live, as a notebook shows them.

`live("algorithm1")` at the end of a cell shows a piece: where scripts run (the site, a trusted notebook) the piece
itself, and elsewhere (GitHub, print) a still picture and a sentence that says what it would show.
"""

import re
from html import escape, unescape
from importlib import import_module
from pathlib import Path
from typing import Any

from fa2_lab.plots.show import show

FOLDER = Path(__file__).resolve().parents[2] / "figures" / "live"


STILLS = {  # by piece: the picture of fa2_lab/plots that shows one moment of it
    "algorithm1": "visiting_order",
    "softmax": "state_stream",
    "tiles": "hbm_traffic",
    "climb": "climb",
    "timetable": "waves",
    "backward": "workers",
    "race": "dq_over_time",
}
WIDE = ("algorithm1", "climb")  # pieces that take the whole width of a window
HEAD = re.compile(
    r'<title>(.*?)</title>\n<meta name="description" content="(.*?)">(?:\n<meta name="still" content="(.*?)">)?'
)


def about(name: str) -> tuple[str, str, str]:
    """Return a piece's title, what it would show, and what its still shows, from its page; a wheel has no pages."""
    page = FOLDER / f"{name}.html"
    if not page.is_file():
        return "", "", ""
    title, sentence, still = HEAD.search(page.read_text(encoding="utf-8")).groups(default="")
    return unescape(title), unescape(sentence), unescape(still)


class live:
    """`live("algorithm1", ask="order=both")` at the end of a cell.

    ask: how the piece begins, as its address has it. More words go to the still picture's `data`.
    """

    def __init__(self, name: str, ask: str = "", **words: Any) -> None:
        if name not in STILLS:
            raise ValueError(f"name: got {name!r}; it takes one of {', '.join(STILLS)}")
        self.name, self.ask, self.words = name, ask, words

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        drawing = import_module(f"fa2_lab.plots.{STILLS[self.name]}")
        shown, _ = show(drawing.draw(**drawing.data(**self.words)))._repr_mimebundle_()
        title, sentence, of_still = about(self.name)
        words = " ".join(filter(None, [f"{title}. {sentence}" if title else "", of_still]))
        still = f'<div class="still">{shown["text/html"]}<p>{escape(words)}</p></div>'
        frame = self.frame(title) if title else ""
        html = f'<div class="live-piece" data-piece="{self.name}" data-ask="{escape(self.ask)}">{still}{frame}</div>'
        return {"text/html": html, "text/plain": f"[live] {words}"}, {}

    def frame(self, title: str) -> str:
        """Return the piece in a frame; when it has come, it takes the place of the still."""
        looks = 'style="width: 100%; height: 640px; border: 0"'
        hide = 'onload="this.previousElementSibling.hidden = true"'
        return f'<iframe title="{escape(title)}" {looks} {hide} srcdoc="{escape(page(self.name, self.ask))}"></iframe>'


def page(name: str, ask: str = "") -> str:
    """Return a piece with its styles and scripts inside: one document that asks for no other file."""
    html = (FOLDER / f"{name}.html").read_text(encoding="utf-8")
    html = html.replace("<html", f'<html data-ask="{escape(ask)}"', 1)

    def style(found: re.Match) -> str:
        return f"<style>{(FOLDER / found[1]).read_text(encoding='utf-8')}</style>"

    def script(found: re.Match) -> str:
        return f"<script>{(FOLDER / found[1]).read_text(encoding='utf-8')}</script>"

    html = re.sub(r'<link rel="stylesheet" href="([\w.]+)">', style, html)
    return re.sub(r'<script src="([\w.]+)"></script>', script, html)
