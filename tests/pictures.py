"""Pictures for the tests: each drawn once, and ways to find what was drawn."""

import functools
from importlib import import_module

import matplotlib

from fa2_lab.plots import style

matplotlib.rcParams["text.hinting"] = style.RC["text.hinting"]  # texts are measured as they were laid out


@functools.cache
def drawn(name):
    """(figure, alternative text, data) of fa2_lab/plots/NAME.py."""
    picture = import_module(f"fa2_lab.plots.{name}")
    data = picture.data()
    return *picture.draw(**data), data


def tagged(artist, gid):
    """Everything in a figure or in an axes that bears this gid."""
    return artist.findobj(lambda part: part.get_gid() == gid)


def words(artist):
    """Every text in a figure or in an axes."""
    return [text.get_text() for text in artist.findobj(style.Text) if text.get_text()]
