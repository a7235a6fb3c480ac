"""The live pieces of figures/live, as a notebook shows them.

`live("algorithm1")` at the end of a cell shows a piece: where scripts run (the site, a trusted notebook) the piece
itself, and elsewhere (GitHub, print) a still picture and a sentence that says what it would show.
"""

import re
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fa2_lab.plots.show import show

FOLDER = Path(__file__).resolve().parents[2] / "figures" / "live"


class Piece(NamedTuple):
    """One live piece: figures/live/NAME.html, and what stands in its place where scripts do not run."""

    title: str
    sentence: str
    still: str  # the picture of fa2_lab/plots that shows one moment of it


PIECES = {
    "algorithm1": Piece(
        "Algorithm 1, live",
        "FlashAttention-2 goes through the square of scores one tile at a time. For each query it keeps the largest "
        "score m, the sum ℓ of its weights and the weighted sum o of the values. A larger score shrinks both by α.",
        "visiting_order",
    ),
    "softmax": Piece(
        "Drag a score",
        "A row of softmax that is read in blocks. A larger score shrinks the sums of all scores before it by one "
        "factor α, and every order of the blocks ends at the same row.",
        "state_stream",
    ),
    "tiles": Piece(
        "The tile playground",
        "From N, d, the tile, the heads and the GPU follow the traffic of three algorithms, the memory on chip, and "
        "how many programs run at once.",
        "block_budget",
    ),
    "climb": Piece(
        "The climb",
        "The ladder of attention kernels, one change a rung: its speed, what limited the rung before, and the change "
        "in code.",
        "climb",
    ),
    "timetable": Piece(
        "The timetable",
        "Each SM is a lane, and each program runs on the place that is free first. The order in which programs start "
        "decides how long the last ones run alone.",
        "waves",
    ),
    "backward": Piece(
        "Backward, block by block",
        "Each worker keeps a column block of dK and dV and adds into dQ. Workers that add into the same rows at the "
        "same time need atomics; two passes avoid that for two more products a tile.",
        "dq_over_time",
    ),
}


class live:
    """`live("algorithm1")` at the end of a cell."""

    def __init__(self, name: str):
        if name not in PIECES:
            raise ValueError(f"name: got {name!r}; it takes one of {', '.join(PIECES)}")
        self.name, self.piece = name, PIECES[name]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        drawing = import_module(f"fa2_lab.plots.{self.piece.still}")
        shown, _ = show(drawing.draw(**drawing.data()))._repr_mimebundle_()
        words = f"{self.piece.title}. {self.piece.sentence}"
        still = f'<div class="still">{shown["text/html"]}<p>{escape(words)}</p></div>'
        frame = self.frame() if (FOLDER / f"{self.name}.html").is_file() else ""
        html = f'<div class="live-piece" data-piece="{self.name}">{still}{frame}</div>'
        return {"text/html": html, "text/plain": f"[live] {words}"}, {}

    def frame(self) -> str:
        """The piece in a frame; when it has come, it takes the place of the still."""
        looks = 'style="width: 100%; height: 640px; border: 0"'
        hide = 'onload="this.previousElementSibling.hidden = true"'
        return f'<iframe title="{escape(self.piece.title)}" {looks} {hide} srcdoc="{escape(page(self.name))}"></iframe>'


def page(name: str) -> str:
    """A piece with its styles and scripts inside: one document that asks for no other file."""
    html = (FOLDER / f"{name}.html").read_text(encoding="utf-8")

    def style(found: re.Match) -> str:
        return f"<style>{(FOLDER / found[1]).read_text(encoding='utf-8')}</style>"

    def script(found: re.Match) -> str:
        return f"<script>{(FOLDER / found[1]).read_text(encoding='utf-8')}</script>"

    html = re.sub(r'<link rel="stylesheet" href="([\w.]+)">', style, html)
    return re.sub(r'<script src="([\w.]+)"></script>', script, html)
