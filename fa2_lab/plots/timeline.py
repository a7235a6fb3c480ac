"""Copies, tensor cores and exponentials of one SM over time, for two warpgroups that work in four manners."""

from collections.abc import Mapping
from typing import Any

from fa2_lab.machine import chips, hopper
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED
from fa2_lab.plots import style

FOUR_WAYS = {
    "Neither": (hopper.in_sequence, SHARED),
    "Within: P V of the tile before under the exponentials": (hopper.look_ahead, SHARED),
    "Between: one multiplies, the other exponentiates": (hopper.in_sequence, IN_ORDER),
    "Both": (hopper.look_ahead, IN_ORDER),
}


def data(d: int = 64, T: int = 16, window: float = 5400) -> dict:
    """Two warpgroups on T tiles of 64 × 128 each, with and without the two overlaps."""
    price = hopper.costs(chips.H200, 64, 128, d)
    panels = []
    for name, (visit, tensor) in FOUR_WAYS.items():
        block = hopper.forward(T, visit=visit, costs=price, tensor=tensor)
        jobs = [(j.unit, owner(j), j.label, j.begun, j.ended) for j in block.jobs]
        panels.append(dict(name=name, share=block.busy("tensor", since=price.copy), jobs=sorted(jobs, key=str)))
    return dict(window=window, panels=panels, setting=f"schematic: H200, d = {d}, two tiles of 64 × 128 at a time")


def owner(job: Any) -> int | None:
    """The number of the consumer whose job it is; copies are nobody's."""
    return int(job.actor.split()[1]) if job.actor.startswith("consumer") else None


HUE = {"S": "S", "PV": "O", "P": "P"}
LANES = (("copy", None), ("tensor", 0), ("tensor", 1), ("exp", 0), ("exp", 1))
NAMES = {"copy": "copies of K, V", "tensor": "tensor cores", "exp": "exponentials"}


@style.picture
def draw(window: float, panels: list[Mapping], setting: str) -> style.Drawn:
    """panels: name, share of the tensor cores' time, jobs as (unit, consumer or None, label, from, to), in clocks."""
    caption = "Exponentials can hide under products in two ways, within a warpgroup and between two, and the two go"
    caption += " together. The shares are of the tensor cores"
    figure, axes = style.new_figure(6.9, f"{caption} ({setting}).", nrows=len(panels), sharex=True)
    for ax, panel in zip(axes, panels, strict=True):
        _panel(ax, panel, window)
    axes[-1].set(xlim=(-0.21 * window, window), xticks=range(0, int(window), 1000), xlabel="clocks of one SM →")
    busy = "; ".join(f"{p['name']}: tensor cores busy {p['share']:.0%} of the time" for p in panels)
    alt = (
        f"Four timelines of one SM, one above the other. Each has a lane for copies, two for the tensor cores and two"
        f" for exponentials, one for each warpgroup. Over the whole run: {busy}. In the first both warpgroups multiply"
        " at the same time and then both exponentiate; in the last they take turns."
    )
    return figure, alt


def _panel(ax: style.Axes, panel: dict, window: float) -> None:
    for lane, (unit, consumer) in enumerate(LANES):
        for job in panel["jobs"]:
            if job[:2] == (unit, consumer) and job[3] < window:
                _job(ax, lane, *job[2:], window)
        words = NAMES[unit] if consumer is None else f"{NAMES[unit]}, {consumer}"
        style.note(ax, -0.012 * window, lane + 0.5, words, ha="right")
    ax.set(ylim=(len(LANES), 0), yticks=[])
    ax.spines["left"].set_visible(False)
    ax.set_title(f"{panel['name']}: {panel['share']:.0%} busy")


def _job(ax: style.Axes, lane: int, label: str, begun: float, ended: float, window: float) -> None:
    """One job as a box; copies are thin, K's above V's, and each slot has a height of its own."""
    kind, number = label.split()
    ended = min(ended, window)
    if kind in ("K", "V"):
        top = lane + 0.08 + 0.42 * (kind == "V") + 0.2 * (int(number) % 2)
        style.tensor_box(ax, begun, top, ended - begun, 0.18, kind, linewidth=0.8)
        return
    words = f"{kind}{number}"
    words = words if ended - begun > 0.02 * window * len(words) else ""
    style.tensor_box(ax, begun, lane + 0.08, ended - begun, 0.84, HUE[kind], words, linewidth=0.8)
