"""Where things stand in a picture: what tests of places ask of its artists."""

import re
from importlib import import_module
from itertools import pairwise

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from fa2_lab.plots import style


def named(ax, text):
    """The text that reads so, which stands there once."""
    found = [t for t in ax.texts if t.get_text() == text]
    assert len(found) == 1, f"{text!r} stands there {len(found)} times"
    return found[0]


def starting(ax, words):
    """The text that begins so, which stands there once."""
    found = [t for t in ax.texts if t.get_text().startswith(words)]
    assert len(found) == 1, f"{words!r} stands there {len(found)} times"
    return found[0]


def numbers(text):
    """Every number of a text, without the commas of thousands."""
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*", text)]


def around(*artists):
    """The rectangle around things that are drawn, in pixels; a text without its arrow."""
    renderer = FigureCanvasAgg(artists[0].figure).get_renderer()
    return Bbox.union([style.Text.get_window_extent(a, renderer) if isinstance(a, style.Text)
                       else a.get_window_extent(renderer) for a in artists])  # fmt: skip


def centre(box):
    return box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2


def right(box):
    return box.get_x() + box.get_width()


def assert_over(text, parts, most=40):
    """A head stands just above its boxes and begins or lies over them."""
    head, body = around(text), around(*parts)
    assert -1 <= head.y0 - body.y1 <= most, f"{text.get_text()!r} stands {head.y0 - body.y1:.0f} pixels above its boxes"
    over = abs(head.x0 - body.x0) <= 8 or abs(head.x0 + head.x1 - body.x0 - body.x1) <= 4
    assert over, f"{text.get_text()!r} stands over other boxes"


def assert_beside(text, parts, side, most=30):
    """A name stands just left or right of its boxes, at the height of their middle."""
    name, body = around(text), around(*parts)
    gap = body.x0 - name.x1 if side == "left" else name.x0 - body.x1
    assert 0 <= gap <= most, f"{text.get_text()!r} stands {gap:.0f} pixels to the {side} of its boxes"
    assert abs(name.y0 + name.y1 - body.y0 - body.y1) <= 8, f"{text.get_text()!r} stands at another height"


def arrows(ax):
    return [t for t in ax.texts if isinstance(t, Annotation) and t.arrow_patch is not None]


def runs_through(arrow, box):
    """Whether the middle part of an arrow lies in a box."""
    way = np.linspace(arrow.xyann, arrow.xy, 101)[3:-3]
    low = np.array(box.get_xy()) + 0.01
    return bool(((way > low) & (way < low - 0.02 + [box.get_width(), box.get_height()])).all(axis=1).any())


def ticks(axis):
    """{what a tick says: where it stands}, of the ticks that are seen."""
    low, high = sorted(axis.get_view_interval())
    near = 1e-9 * (high - low)
    seen = [tick for tick in axis.get_major_ticks() if low - near <= tick.get_loc() <= high + near]
    return {tick.label1.get_text(): tick.get_loc() for tick in seen if tick.label1.get_text()}


def assert_level(text, *parts, near=6):
    """A text stands at the height of the middle of its parts."""
    apart = (sum(around(text).intervaly) - sum(around(*parts).intervaly)) / 2
    assert abs(apart) <= near, f"{text.get_text()!r} stands {apart:.0f} pixels too high"


def nearest(text, curves):
    """The curve that passes a text most closely."""
    box = around(text)

    def away(curve):
        ends = curve.get_transform().transform(curve.get_xydata())
        ends = ends[np.isfinite(ends).all(axis=1)]
        way = np.concatenate([np.linspace(a, b, 60) for a, b in pairwise(ends)] or [ends])
        return np.linalg.norm(way - np.clip(way, box.min, box.max), axis=1).min()

    return min(curves, key=away)


def points(line):
    return [tuple(map(float, xy)) for xy in line.get_xydata()]


def redrawn(name, data=(), **changes):
    """(figure, alternative text, data) of a picture whose data were made with other arguments, or changed, or both."""
    picture = import_module(f"fa2_lab.plots.{name}")
    shown = picture.data(**dict(data)) | changes
    return *picture.draw(**shown), shown
