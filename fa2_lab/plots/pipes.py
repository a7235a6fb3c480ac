"""Who waits for whom inside a thread block of the Hopper forward: one row for each ring of buffers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from fa2_lab.machine import hopper
from fa2_lab.machine.asynchrony import Barrier
from fa2_lab.plots import style
from fa2_lab.tiles import Tiling

# Data -----------------------------------------------------------------------------------------------------------


def small(consumers: int, T: int, **options) -> hopper.Run:
    """The model on `T` tiles of 4 keys, 4 rows to a consumer; only the clocks are those of a real tile."""
    N_q, N_k = 4 * consumers, 4 * T
    rng = np.random.default_rng(0)
    Q, (K, V) = rng.standard_normal((N_q, 4)), rng.standard_normal((2, N_k, 4))
    return hopper.forward(Q, K, V, Tiling(N_q, N_k, 4, 4), consumers, **options)


def data(consumers: int = 2, stages: int = 2) -> dict:
    """Every barrier of a run: who waits there, who arrives, and how many arrivals end a phase."""
    run = small(consumers, 8, stages=stages, ping_pong=True)
    p = run.pipes
    alone = [*p.mailbox.filled, *p.mailbox.emptied, *p.ping_pong.begun]
    numbers = {"mailbox": 2, "Q": p.q.stages, "K": stages, "V": stages}
    return dict(stages=numbers, barriers=met(run, alone, (p.q, p.k, p.v)))


def met(run, alone: list[Barrier], rings: tuple[hopper.Ring, ...]) -> dict[str, dict]:
    """Of every barrier, by its name: who waited there, who arrived, and how many arrivals end a phase."""
    all_barriers = alone + [bar for ring in rings for bar in (*ring.filled, *ring.emptied)]
    barriers = {bar.what: dict(waits=set(), arrives=set(), expected=bar.expected) for bar in all_barriers}
    for bar in all_barriers:
        barriers[bar.what]["arrives"] |= set(bar.came) - {"the start"}
    for waited in run.block.waits:
        if waited.what in barriers:
            barriers[waited.what]["waits"].add(waited.actor)
    return {
        what: dict(waits=sorted(bar["waits"]), arrives=sorted(bar["arrives"]), expected=bar["expected"])
        for what, bar in barriers.items()
    }


# Drawing --------------------------------------------------------------------------------------------------------

PRODUCER, STAGES, CONSUMERS = (0.1, 1.2), (2.2, 4.15), (5.75, 7.15)  # from where to where, in inches
LANE, FIRST, HIGH, GAP = 1.05, 0.2, 0.42, 0.8
TOLD = {"rows": "Q, dO"}
DOES = "4 warps, 64 rows:\nQ Kᵀ, softmax,\nP V"


@style.picture
def draw(stages: Mapping[str, int], barriers: Mapping[str, Mapping]) -> tuple[Figure, str]:
    """stages: {ring: how many}. barriers: {"K filled": {"waits": [...], "arrives": [...], "expected": n}, ...}."""
    figure, ax = style.new_figure(4.9, "Every wait is for a full stage, an empty stage, or the other consumer")
    places = block(ax, stages, barriers, DOES)
    if "ping-pong" in barriers:
        between(ax, places, barriers["ping-pong"], "ping-pong:\n1 arrival")
    bare(ax, FIRST + LANE * len(stages) + 0.1)
    told = "; ".join(f"{TOLD.get(ring, ring)}: {n} stages, {emptied(barriers, ring)}" for ring, n in stages.items())
    alt = (
        f"One thread block (model). Left the producer warp, right {len(places)} consumer warpgroups, between them one"
        f" row for each ring of buffers in shared memory. {told}. In each row a solid arrow leads from the producer to"
        " the stages and from the stages to every consumer, which waits until a stage is full; a dashed arrow leads"
        " from every consumer to the stages and from there to the producer, which waits until a stage is empty. Between"
        " the consumers two arrows: each waits until the other's products have started."
    )
    return figure, alt


def block(ax: Axes, stages: Mapping[str, int], barriers: Mapping[str, Mapping], does: str) -> dict[str, tuple]:
    """The producer, the rings, the consumers and every arrow between them; gives {consumer: its top and bottom}."""
    bottom = FIRST + LANE * len(stages) - 0.1
    names = sorted({who for bar in barriers.values() for who in bar["waits"] if who.startswith("consumer")})
    high = (bottom - FIRST - GAP * (len(names) - 1)) / len(names)
    places = {who: (FIRST + n * (high + GAP), FIRST + n * (high + GAP) + high) for n, who in enumerate(names)}
    label = "producer\n\n1 warp\n\nstarts all\ncopies,\nnever waits\nfor one\nto end"
    (left, right), look = PRODUCER, dict(size=style.NORMAL)
    style.box(ax, left, FIRST, right - left, bottom - FIRST, label, style.worker(0), gid="producer", **look)
    (left, right) = CONSUMERS
    for n, (who, (top, low)) in enumerate(places.items()):
        words = f"{who}\n\n{does}"
        style.box(ax, left, top, right - left, low - top, words, style.worker(2 + n), gid=who, **look)
    for lane, (ring, number) in enumerate(stages.items()):
        top = FIRST + lane * LANE + 0.1
        _stages(ax, top, ring, number, barriers)
        _left(ax, top + HIGH / 2, ring, barriers)
        if lane == 0:
            ax.text(4.95, top + HIGH / 2 - 0.14, "take", ha="center", va="bottom", fontsize=style.SMALL)
            ax.text(4.95, top + HIGH / 2 + 0.07, "release", ha="left", va="top", fontsize=style.SMALL)
        for who, (high, low) in places.items():
            _right(ax, top + HIGH / 2, high + (lane + 0.5) * (low - high) / len(stages), ring, who, barriers)
    return places


def _stages(ax: Axes, top: float, ring: str, number: int, barriers: Mapping) -> None:
    """The stages of one ring, and beneath them what makes them full and empty."""
    left, right = STAGES
    width = (right - left) / number
    for stage in range(number):
        place = (left + stage * width, top, width - 0.06, HIGH)
        label = f"{TOLD.get(ring, ring)} {stage}"
        if ring in style.HUES:
            style.tensor_box(ax, *place, ring, label, size=style.NORMAL, gid=f"{ring} stage")
        else:
            style.box(ax, *place, label, size=style.NORMAL, gid=f"{ring} stage")
    who = "copied" if barriers[f"{ring} filled"]["arrives"] == ["copy engine"] else "written"
    words = f"full: {who}; {emptied(barriers, ring)}"
    ax.text((left + right) / 2, top + HIGH + 0.06, words, ha="center", va="top", fontsize=style.SMALL)


def emptied(barriers: Mapping, ring: str) -> str:
    """What ends the use of a stage, in words."""
    needed = barriers[f"{ring} emptied"]["expected"]
    return f"empty: after {needed} release{'s' * (needed > 1)}"


def _left(ax: Axes, y: float, ring: str, barriers: Mapping) -> None:
    """Between the producer and the stages: what it fills, and what it waits for."""
    ends = (PRODUCER[1], STAGES[0])
    arrow(ax, (ends[0], y - 0.07), (ends[1], y - 0.07), f"fill {ring}", ring)
    if "producer" in barriers[f"{ring} emptied"]["waits"]:
        arrow(ax, (ends[1], y + 0.07), (ends[0], y + 0.07), f"empty {ring}", ring, dashed=True)
    ax.text(sum(ends) / 2, y - 0.11, "fill", ha="center", va="bottom", fontsize=style.SMALL)
    ax.text(sum(ends) / 2, y + 0.11, "wait for empty", ha="center", va="top", fontsize=style.SMALL)


def _right(ax: Axes, y: float, port: float, ring: str, who: str, barriers: Mapping) -> None:
    """Between the stages and one consumer: what it takes, and what it gives back."""
    ends = (STAGES[1] - 0.06, CONSUMERS[0])
    if who in barriers[f"{ring} filled"]["waits"]:
        arrow(ax, (ends[0], y - 0.07), (ends[1], port - 0.05), f"take {ring} {who}", ring)
    if who in barriers[f"{ring} emptied"]["arrives"]:
        arrow(ax, (ends[1], port + 0.05), (ends[0], y + 0.07), f"release {ring} {who}", ring, dashed=True)


def between(ax: Axes, places: Mapping[str, tuple], barrier: Mapping, words: str) -> None:
    """What consumers hand each other: an arrow from each that arrives to each other one that waits."""
    middle = sum(CONSUMERS) / 2
    for start in barrier["arrives"]:
        for end in barrier["waits"]:
            if start != end:
                down = places[start][0] < places[end][0]
                x = middle - 0.5 if down else middle + 0.5
                y = (places[start][1], places[end][0]) if down else (places[start][0], places[end][1])
                arrow(ax, (x, y[0]), (x, y[1]), f"{start} to {end}")
    (_, top), (bottom, _) = sorted(places.values())
    ax.text(middle, (top + bottom) / 2, words, ha="center", va="center", fontsize=style.SMALL)


def arrow(ax: Axes, start: tuple, end: tuple, gid: str, ring: str = "", dashed: bool = False, **bend) -> None:
    """One arrow, in the colour of what travels along it; dashed where a stage is given back."""
    color = style.hue(ring) if ring in style.HUES else style.hue("Q") if ring == "rows" else style.INK
    look = dict(color=color, linestyle=(0, (4, 2)) if dashed else "-", linewidth=1.2, shrinkA=0, shrinkB=0)
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, gid=gid, **look | bend))


def bare(ax: Axes, bottom: float) -> None:
    ax.set(xlim=(0, style.WIDTH), ylim=(bottom, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
