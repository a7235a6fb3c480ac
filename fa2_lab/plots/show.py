"""A picture as a notebook shows it: crisp, as wide as the text, and with its alternative text."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure
from PIL import Image


class show:
    """`show(draw(data))` at the end of a cell displays a picture; readers without images get its alternative text.

    `moving` is the same picture as an animated SVG; where that cannot be shown, the picture stands still.
    """

    def __init__(self, drawn: tuple[Figure, str], moving: str = ""):
        self.figure, self.alt = drawn
        self.moving = moving

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        full, png = BytesIO(), BytesIO()
        self.figure.savefig(full, format="png", dpi=192)
        Image.open(full).convert("RGB").quantize(256).save(png, format="png", optimize=True)  # a third of the bytes
        width = round(96 * self.figure.get_figwidth())
        data = {"image/png": png.getvalue(), "text/plain": f"[figure] {self.alt}"}
        if self.moving:
            data["image/svg+xml"] = self.moving
        return data, {"image/png": {"width": width, "alt": self.alt}}
