"""A picture as a notebook shows it: as wide as the text, with its caption and its alternative text."""

from base64 import b64encode
from html import escape
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from fa2_lab.plots.style import headline_of

MANY = ("limits", "pipes", "strips", "waves")  # files that draw several pictures: strips_15 is strips.data("15")


def file_of(name: str) -> tuple[str, str]:
    """Return the file of fa2_lab/plots that draws a picture, and the argument of its data() or an empty string."""
    file, _, which = name.partition("_")
    return (file, which) if file in MANY else (name, "")


def find(name: str) -> tuple[ModuleType, dict]:
    """Return the module that draws a picture, and the numbers that its data() returns for this picture."""
    file, which = file_of(name)
    picture = import_module(f"fa2_lab.plots.{file}")
    return picture, picture.data(*filter(None, [which]))


def draw(name: str, narrow: bool = False) -> tuple[Figure, str]:
    """Draw a picture of fa2_lab/plots by its name, for a page or, with `narrow`, for a phone."""
    picture, numbers = find(name)
    return picture.draw(**numbers, narrow=narrow)


class show:
    """One picture of figures/ with its caption, which `show("waves")` at the end of a cell displays.

    The argument is the name of a picture, or the result of a draw(). Readers without images get the alternative text.
    """

    def __init__(self, drawn: str | tuple[Figure, str]) -> None:
        self.figure, self.alt = draw(drawn) if isinstance(drawn, str) else drawn

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        # As HTML, because JupyterLab gives an image of its own (image/png) no alternative text.
        width = round(96 * self.figure.get_figwidth())
        image = b64encode(self.png()).decode()
        shown = f'<img alt="{escape(self.alt)}" width="{width}" src="data:image/png;base64,{image}">'
        whole = self.figure.get_label()
        caption = whole.removeprefix(headline_of(whole)).removeprefix(".").strip()  # the headline is in the picture
        shown += f'<p style="max-width:{width}px">{escape(caption)}</p>' if caption else ""
        return {"text/html": shown, "text/plain": " ".join(filter(None, ["[figure]", whole, self.alt]))}, {}

    def png(self) -> str:
        """Return the picture as the bytes of a PNG file with a palette of 256 colours."""
        full, png = BytesIO(), BytesIO()
        self.figure.savefig(full, format="png", dpi=192)
        Image.open(full).convert("RGB").quantize(256).save(png, format="png", optimize=True)  # a third of the bytes
        return png.getvalue()
