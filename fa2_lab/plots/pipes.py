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

LEFT, SLOTS, RIGHT = (0.1, 1.25), (2.55, 4.6), (5.95, 7.5)  # from where to where, in inches
LANE, FIRST, GAP = 1.0, 0.42, 0.75
TOLD = {"rows": "Q, dO"}
FORWARD = "4 warps, 64 rows:\nQ Kᵀ, softmax,\nP V"


@style.picture
def draw(stages: Mapping[str, int], barriers: Mapping[str, Mapping]) -> tuple[Figure, str]:
    """stages: {ring: how many}. barriers: {"K filled": {"waits": [...], "arrives": [...], "expected": n}, ...}."""
    figure, ax = style.new_figure(5.2, "Every wait is for a stage that is full, a stage that is empty, or a turn")
    bottom = FIRST + LANE * len(stages)
    consumers = sorted({who for bar in barriers.values() for who in bar["waits"] if who.startswith("consumer")})
    _producer(ax, bottom)
    _consumers(ax, consumers, bottom, FORWARD)
    if "ping-pong" in barriers:
        _between(ax, bottom, "ping-pong", "ping-pong:\n1 arrival")
    for lane, (ring, number) in enumerate(stages.items()):
        _lane(ax, FIRST + lane * LANE, ring, number, barriers)
    _bare(ax, bottom + 0.12)
    return figure, _told(stages, barriers, consumers)


def _told(stages: Mapping, barriers: Mapping, consumers: list[str]) -> str:
    told = []
    for ring, number in stages.items():
        needed = barriers[f"{ring} emptied"]["expected"]
        told.append(f"{ring}: {number} stages, empty again after {needed} release{'s' if needed > 1 else ''}")
    return (
        f"A diagram of one thread block. Left the producer warp, right {len(consumers)} consumer warpgroups, between"
        f" them one row for each ring of buffers in shared memory. {'; '.join(told)}. In each row a solid arrow leads"
        " from the producer through the stages to the consumers: they wait until a stage is filled. A dashed arrow"
        " leads back: the producer waits until all have released the stage. Between the consumers two arrows: each"
        " waits for its turn, which the other passes on once its products have started. The producer never waits for a"
        " copy to end."
    )


def _producer(ax: Axes, bottom: float) -> None:
    left, right = LEFT
    label = "producer\n\n1 warp\n\nstarts all\ncopies,\nnever waits\nfor one\nto end"
    style.box(ax, left, 0.1, right - left, bottom - 0.1, label, style.worker(0, 3), size=style.NORMAL, gid="producer")


def _consumers(ax: Axes, names: list[str], bottom: float, does: str) -> None:
    """One box above the other."""
    left, right = RIGHT
    high = (bottom - 0.1 - GAP * (len(names) - 1)) / len(names)
    for n, who in enumerate(names):
        fill = style.worker(n + 1, 3)
        top = 0.1 + n * (high + GAP)
        style.box(ax, left, top, right - left, high, f"{who}\n\n{does}", fill, size=style.NORMAL, gid="consumer")


def _between(ax: Axes, bottom: float, gid: str, words: str) -> None:
    """What two consumers hand each other."""
    middle, top = sum(RIGHT) / 2, (bottom + 0.1 - GAP) / 2
    side = 0.6 if gid == "dS" else 0.45
    _arrow(ax, (middle - side, top), (middle - side, top + GAP), gid)
    _arrow(ax, (middle + side, top + GAP), (middle + side, top), gid)
    ax.text(middle, top + GAP / 2, words, ha="center", va="center", fontsize=style.SMALL)


def _bare(ax: Axes, bottom: float) -> None:
    ax.set(xlim=(0, style.WIDTH), ylim=(bottom, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _lane(ax: Axes, top: float, ring: str, number: int, barriers: Mapping) -> None:
    """One ring: filled from the left, taken to the right, released along the dashed arrow beneath."""
    filled, emptied = barriers[f"{ring} filled"], barriers[f"{ring} emptied"]
    (left, right), high, middle = SLOTS, 0.42, top + 0.21
    width = (right - left) / number
    for stage in range(number):
        x = left + stage * width
        label = f"{TOLD.get(ring, ring)} {stage}"
        if ring in style.HUES:
            style.tensor_box(ax, x, top, width - 0.06, high, ring, label, size=style.NORMAL, gid=f"{ring} stage")
        else:
            style.box(ax, x, top, width - 0.06, high, label, size=style.NORMAL, gid=f"{ring} stage")
    _arrow(ax, (LEFT[1], middle), (left, middle), f"{ring} fill")
    _arrow(ax, (right - 0.06, middle), (RIGHT[0], middle), f"{ring} take")
    who = "the copy" if filled["arrives"] == ["copy engine"] else "the producer"
    ax.text(1.88, middle - 0.05, "fill", ha="center", va="bottom", fontsize=style.SMALL)
    ax.text(5.25, middle - 0.05, "filled: 1 arrival,", ha="center", va="bottom", fontsize=style.SMALL)
    ax.text(5.25, middle + 0.05, who, ha="center", va="top", fontsize=style.SMALL)
    beneath = top + high + 0.16
    _arrow(ax, (RIGHT[0], beneath), (LEFT[1], beneath), f"{ring} release", dashed=True)
    needed = emptied["expected"]
    words = f"emptied: {needed} arrivals, all consumers" if needed > 1 else "emptied: 1 arrival, its consumer"
    place = ax.text(3.55, beneath, words, ha="center", va="center", fontsize=style.SMALL)
    place.set_bbox(dict(facecolor=style.PAPER, edgecolor="none", pad=1.5))


def _arrow(ax: Axes, start: tuple, end: tuple, gid: str, dashed: bool = False) -> None:
    look = dict(linestyle=(0, (4, 2)), color=style.QUIET) if dashed else dict(color=style.INK)
    arrow = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=10, shrinkA=1, shrinkB=1, linewidth=1.2, **look
    )
    arrow.set_gid(gid)
    ax.add_patch(arrow)
