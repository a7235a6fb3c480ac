"""Pictures as a notebook shows them: as wide as the text, with a caption and an alternative text."""

from base64 import b64encode
from html import escape
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from PIL import Image, ImageColor, ImageDraw

from fa2_lab.plots.style import CARD, EDGE, headline_of

SEVERAL = "pipelines", "rooflines", "rung_timeline", "waves"  # files that each draw several pictures

DENSITY = 2  # PNG pixels per page pixel
MARGIN, ROUND = 16, 14  # the card's margin around the picture and its corner radius, in page pixels
SOFT = 4  # number of palette entries with different opacities, which smooth the rounded corners


def file_and_argument(name: str) -> tuple[str, str]:
    """Return the file of fa2_lab/plots that draws a picture, and the argument for its data(), which may be empty.

    For example, rung_timeline.py draws the picture "rung_timeline_15", from data("15").
    """
    file = next((file for file in SEVERAL if name.startswith(f"{file}_")), name)
    return file, name[len(file) + 1 :]


def find_picture(name: str) -> tuple[ModuleType, dict]:
    """Return the module that draws a picture, and the arguments of its draw() for this picture."""
    file, argument = file_and_argument(name)
    picture = import_module(f"fa2_lab.plots.{file}")
    return picture, picture.data(*filter(None, [argument]))


def draw(name: str, narrow: bool = False) -> tuple[Figure, str]:
    """Draw the picture with this name, for a page or, if `narrow` is set, for a phone."""
    picture, numbers = find_picture(name)
    return picture.draw(**numbers, narrow=narrow)


class show:
    """A picture with its caption. To show it, end a notebook cell with, for example, `show("waves")`.

    The argument is a picture's name or the result of a draw(). Readers who cannot see images get the alternative text.
    """

    def __init__(self, picture_or_name: str | tuple[Figure, str]) -> None:
        self.figure, self.alt = draw(picture_or_name) if isinstance(picture_or_name, str) else picture_or_name

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        # The result is HTML because JupyterLab shows a bare image (image/png) without an alternative text.
        width = round(96 * self.figure.get_figwidth()) + 2 * MARGIN
        image = b64encode(self.png()).decode()
        html = f'<img alt="{escape(self.alt)}" width="{width}" src="data:image/png;base64,{image}">'
        whole = self.figure.get_label()
        caption = whole.removeprefix(headline_of(whole)).removeprefix(".").strip()  # the picture shows the headline
        html += f'<figcaption style="max-width:{width}px">{escape(caption)}</figcaption>' if caption else ""
        return {"text/html": html, "text/plain": " ".join(filter(None, ["[figure]", whole, self.alt]))}, {}

    def png(self) -> bytes:
        """Return the picture on a card, as the bytes of a PNG file with a palette of 256 colours."""
        full, png = BytesIO(), BytesIO()
        self.figure.savefig(full, format="png", dpi=96 * DENSITY)
        image, alpha = on_card(Image.open(full).convert("RGB"))
        image.save(png, format="png", optimize=True, transparency=alpha)  # with a palette, the file is a third as large
        return png.getvalue()


def on_card(picture: Image.Image) -> tuple[Image.Image, bytes]:
    """Return a paletted image of the picture on a card with rounded corners, and the opacity of each palette colour.

    A picture cannot tell whether it is shown on a light or a dark page. The card is as light as paper, so the picture's
    colours look the same on both. On a light page, only the card's outline is visible.
    """
    edge = 255 - SOFT  # the index of the edge's colour in the palette
    picture = picture.quantize(edge)
    paper, card = picture.getpixel((0, 0)), ImageColor.getrgb(CARD)
    colours = picture.getpalette()[: 3 * edge]
    colours += colours[:3] * (edge - len(colours) // 3)
    printed = [round(colour * card[n % 3] / 255) for n, colour in enumerate(colours)]  # like ink on coloured paper
    margin, radius = MARGIN * DENSITY, ROUND * DENSITY
    framed = Image.new("P", tuple(side + 2 * margin for side in picture.size), paper)
    framed.paste(picture, (margin, margin))
    right, bottom = (side - 1 for side in framed.size)
    ImageDraw.Draw(framed).rounded_rectangle((0, 0, right, bottom), radius, outline=edge, width=DENSITY)
    outside = corners(framed.size, radius)
    framed.paste(outside.point(lambda level: 255 - SOFT + level), mask=outside.point(lambda level: 255 * (level > 0)))
    framed.putpalette(printed + (1 + SOFT) * list(ImageColor.getrgb(EDGE)))
    return framed, bytes([255] * (256 - SOFT) + [255 - 255 * level // SOFT for level in range(1, SOFT + 1)])


def corners(size: tuple[int, int], radius: int) -> Image.Image:
    """Return a mask whose pixels range from 0 (inside a card with rounded corners) to SOFT (outside the card)."""
    fine = Image.new("L", tuple(4 * side for side in size), 255)
    ImageDraw.Draw(fine).rounded_rectangle((0, 0, fine.width - 1, fine.height - 1), 4 * radius, fill=0)
    return fine.reduce(4).point(lambda level: round(level * SOFT / 255))
