"""Pictures for the tests: each drawn once, and ways to find what was drawn."""

import functools
from importlib import import_module

import matplotlib
from matplotlib.colors import same_color
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fa2_lab.plots import style

matplotlib.rcParams["text.hinting"] = style.RC["text.hinting"]  # texts are measured as they were laid out


@functools.cache
def data_of(name):
    """What fa2_lab/plots/NAME.py draws."""
    return import_module(f"fa2_lab.plots.{name}").data()


@functools.cache
def drawn(name):
    """(figure, alternative text, data) of fa2_lab/plots/NAME.py."""
    data = data_of(name)
    return *import_module(f"fa2_lab.plots.{name}").draw(**data), data


def tagged(artist, gid):
    """Everything in a figure or in an axes that bears this gid."""
    return artist.findobj(lambda part: part.get_gid() == gid)


def words(artist):
    """Every text in a figure or in an axes."""
    return [text.get_text() for text in artist.findobj(style.Text) if text.get_text()]


# Parts of an axes -----------------------------------------------------------------------------------------------


def boxes(ax, fill=None):
    """The rectangles of an axes, without its background; of one fill only, if given."""
    found = [p for p in ax.patches if isinstance(p, Rectangle)]
    return [p for p in found if fill is None or same_color(p.get_facecolor()[:3], fill)]


def label(patch):
    return patch.label_text.get_text() if hasattr(patch, "label_text") else ""


def lines(ax):
    return [line for line in ax.lines if isinstance(line, Line2D)]


def titled(figure, start):
    """The axes whose title starts so."""
    return next(ax for ax in figure.axes if ax.get_title(loc="left").startswith(start))
