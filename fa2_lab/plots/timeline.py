"""Copies, tensor cores and exponentials of one SM over time, for two warpgroups that work in four manners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips, hopper
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED
from fa2_lab.plots import style
from fa2_lab.plots.pipes import small

# Data -----------------------------------------------------------------------------------------------------------

FOUR_WAYS = {
    "Neither": (hopper.in_sequence, SHARED),
    "Within: P V of the tile before runs under the exponentials": (hopper.look_ahead, SHARED),
    "Between: one warpgroup multiplies while the other exponentiates": (hopper.in_sequence, IN_ORDER),
    "Both": (hopper.look_ahead, IN_ORDER),
}


def data(d: int = 64, T: int = 16, window: float = 5400) -> dict:
    """Two warpgroups on T tiles of 64 × 128 each, with and without the two overlaps."""
    price = hopper.costs(chips.H200, 64, 128, d)
    panels = []
    for name, (visit, tensor) in FOUR_WAYS.items():
        block = small(2, T, visit=visit, tensor=tensor, costs=price).block
        jobs = [(j.unit, owner(j), j.label, j.begun, j.ended) for j in block.jobs if j.label[0] != "Q"]
        panels.append(dict(name=name, share=block.busy("tensor", since=price.copy), jobs=sorted(jobs, key=str)))
    return dict(window=window, panels=panels, setting=f"schematic: H200, d = {d}, two tiles of 64 × 128 at a time")


def owner(job) -> int | None:
    """The number of the consumer whose job it is; copies are nobody's."""
    return int(job.actor.split()[1]) if job.actor.startswith("consumer") else None


# Drawing --------------------------------------------------------------------------------------------------------

HUE = {"S": "S", "PV": "O", "P": "P"}
LANES = (("copy", None), ("tensor", 0), ("tensor", 1), ("exp", 0), ("exp", 1))
NAMES = {"copy": "copies of K, V", "tensor": "tensor cores", "exp": "exponentials"}


@style.picture
def draw(window: float, panels: Sequence[Mapping], setting: str) -> tuple[Figure, str]:
    """panels: name, share of the tensor cores' time, jobs as (unit, consumer or None, label, from, to), in clocks."""
    title = "Exponentials can hide under products in two ways, and they go together"
    figure, axes = style.new_figure(7.6, title, nrows=len(panels), sharex=True)
    for ax, panel in zip(axes, panels, strict=True):
        _panel(ax, panel, window)
    axes[-1].set(xlim=(-0.17 * window, window), xticks=range(0, int(window), 1000))
    axes[-1].set_xlabel(f"clocks of one SM → ({setting})")
    told = "; ".join(f"{p['name']}: tensor cores busy {p['share']:.0%} of the time" for p in panels)
    alt = (
        f"Four timelines of one SM, one above the other ({setting}). Each has a lane for copies, two for the tensor"
        f" cores and two for exponentials, one for each warpgroup. Over the whole run: {told}. In the first both"
        " warpgroups multiply at the same time and then both exponentiate; in the last they take turns."
    )
    return figure, alt


def _panel(ax: Axes, panel: Mapping, window: float) -> None:
    for lane, (unit, consumer) in enumerate(LANES):
        for job in panel["jobs"]:
            if job[:2] == (unit, consumer) and job[3] < window:
                _job(ax, lane, *job[2:], window)
    for lane, (unit, consumer) in enumerate(LANES):
        words = NAMES[unit] if consumer is None else f"{NAMES[unit]}, {consumer}"
        ax.text(-0.012 * window, lane + 0.5, words, ha="right", va="center", fontsize=style.SMALL)
    ax.set(ylim=(len(LANES), 0), yticks=[])
    ax.spines["left"].set_visible(False)
    ax.set_title(f"{panel['name']}: tensor cores busy {panel['share']:.0%}")


def _job(ax: Axes, lane: int, label: str, begun: float, ended: float, window: float) -> None:
    """One job as a box; copies are thin, K's above V's, and each slot has a height of its own."""
    kind, number = label.split()
    ended = min(ended, window)
    if kind in ("K", "V"):
        top = lane + 0.08 + 0.42 * (kind == "V") + 0.2 * (int(number) % 2)
        style.tensor_box(ax, begun, top, ended - begun, 0.18, kind, gid="copy", linewidth=0.8)
        return
    wide = ended - begun > 0.035 * window
    words = f"{kind}{number}" if wide else ""
    style.tensor_box(ax, begun, lane + 0.08, ended - begun, 0.84, HUE[kind], words, gid=kind, linewidth=0.8)
