"""A picture as a notebook shows it: as wide as the text, with its caption and its alternative text."""

from base64 import b64encode
from html import escape
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from fa2_lab.plots.style import headline_of


class show:
    """`show(draw(data))` at the end of a cell displays a picture and its caption.

    Readers without images get its alternative text.
    """

    def __init__(self, drawn: tuple[Figure, str]) -> None:
        self.figure, self.alt = drawn

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
        """The picture as PNG, in letters."""
        full, png = BytesIO(), BytesIO()
        self.figure.savefig(full, format="png", dpi=192)
        Image.open(full).convert("RGB").quantize(256).save(png, format="png", optimize=True)  # a third of the bytes
        return png.getvalue()
