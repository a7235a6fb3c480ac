"""The ideas that change most in the Hopper forward, for better or worse."""

from fa2_lab.plots import ideas
from fa2_lab.plots.ideas import draw  # noqa: F401  a picture's file has data() and draw()


def data() -> dict:
    """The ten ideas for the forward whose worth lies furthest from 1."""
    return ideas.data("forward")
