"""A picture as a notebook shows it: as wide as the text, with its caption and its alternative text."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure
from PIL import Image


class show:
    """`show(draw(data))` at the end of a cell displays a picture and its caption.

    Readers without images get its alternative text. `moving` is the same picture as an animated SVG; where that cannot
    be shown, the picture stands still.
    """

    def __init__(self, drawn: tuple[Figure, str], moving: str = ""):
        self.figure, self.alt = drawn
        self.moving = moving

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        # As HTML, because JupyterLab gives an image of its own (image/png) no alternative text.
        width = round(96 * self.figure.get_figwidth())
        shown = f'<img alt="{escape(self.alt)}" width="{width}" src="{address(self.png(), "png")}">'
        if self.moving:
            moving = address(self.moving.encode(), "svg+xml")
            shown = f'<picture><source type="image/svg+xml" srcset="{moving}">{shown}</picture>'
        caption = self.figure.get_label()
        shown += f'<p style="max-width:{width}px">{escape(caption)}</p>' if caption else ""
        return {"text/html": shown, "text/plain": " ".join(filter(None, ["[figure]", caption, self.alt]))}, {}

    def png(self) -> bytes:
        full, png = BytesIO(), BytesIO()
        self.figure.savefig(full, format="png", dpi=192)
        Image.open(full).convert("RGB").quantize(256).save(png, format="png", optimize=True)  # a third of the bytes
        return png.getvalue()


def address(image: bytes, kind: str) -> str:
    """The image itself in the place of its address."""
    return f"data:image/{kind};base64,{b64encode(image).decode()}"
