"""Who waits for whom inside a thread block of the Hopper forward: one row for each ring of buffers."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from fa2_lab.plots import style

LEFT, SLOTS, RIGHT = (0.1, 1.25), (2.55, 4.6), (5.95, 7.5)  # from where to where, in inches
LANE, FIRST = 1.0, 0.42
HELD = {"ticket": "row block\nnumber", "Q": "its 64 rows", "K": "a tile of K", "V": "a tile of V"}


@style.picture
def pipes(slots: Mapping[str, int], barriers: Mapping[str, Mapping]) -> tuple[Figure, str]:
    """slots: {ring: how many}. barriers: {"K filled": {"waits": [...], "arrives": [...], "expected": n}, ...}."""
    figure, ax = style.new_figure(5.2, "Every wait is for a slot that is full, a slot that is empty, or a turn")
    bottom = FIRST + LANE * len(slots)
    consumers = sorted({who for bar in barriers.values() for who in bar["waits"] if who.startswith("consumer")})
    _producer(ax, bottom)
    _consumers(ax, consumers, bottom, barriers)
    for lane, (ring, number) in enumerate(slots.items()):
        _lane(ax, FIRST + lane * LANE, ring, number, barriers)
    ax.set(xlim=(0, style.WIDTH), ylim=(bottom + 0.12, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return figure, _told(slots, barriers, consumers)


def _told(slots: Mapping, barriers: Mapping, consumers: list[str]) -> str:
    told = []
    for ring, number in slots.items():
        needed = barriers[f"{ring} emptied"]["expected"]
        told.append(f"{ring}: {number} slots, empty again after {needed} release{'s' if needed > 1 else ''}")
    return (
        f"A diagram of one thread block. Left the producer warp, right {len(consumers)} consumer warpgroups, between"
        f" them one row for each ring of buffers in shared memory. {'; '.join(told)}. In each row a solid arrow leads"
        " from the producer through the slots to the consumers: they wait until a slot is filled. A dashed arrow leads"
        " back: the producer waits until all have released the slot. Between the consumers two arrows: each waits for"
        " its turn, which the other passes on once its products have started. The producer never waits for a copy to"
        " end."
    )


def _producer(ax: Axes, bottom: float) -> None:
    left, right = LEFT
    label = "producer\n\n1 warp\n\nstarts all\ncopies,\nnever waits\nfor one\nto end"
    style.box(ax, left, 0.1, right - left, bottom - 0.1, label, style.worker(0, 3), size=style.NORMAL, gid="producer")


def _consumers(ax: Axes, names: list[str], bottom: float, barriers: Mapping) -> None:
    """One box above the other, and the turns that they pass on."""
    left, right = RIGHT
    gap = 0.75
    high = (bottom - 0.1 - gap * (len(names) - 1)) / len(names)
    for n, who in enumerate(names):
        top = 0.1 + n * (high + gap)
        label = f"{who}\n\n4 warps, 64 rows:\nQ Kᵀ, softmax,\nP V"
        fill = style.worker(n + 1, 3)
        style.box(ax, left, top, right - left, high, label, fill, size=style.NORMAL, gid="consumer")
        if n and "turn" in barriers:
            middle = (left + right) / 2
            _arrow(ax, (middle - 0.45, top - gap), (middle - 0.45, top), "turn")
            _arrow(ax, (middle + 0.45, top), (middle + 0.45, top - gap), "turn")
            ax.text(middle, top - gap / 2, "turn:\n1 arrival", ha="center", va="center", fontsize=style.SMALL)


def _lane(ax: Axes, top: float, ring: str, number: int, barriers: Mapping) -> None:
    """One ring: filled from the left, taken to the right, released along the dashed arrow beneath."""
    filled, emptied = barriers[f"{ring} filled"], barriers[f"{ring} emptied"]
    (left, right), high, middle = SLOTS, 0.42, top + 0.21
    width = (right - left) / number
    for slot in range(number):
        x = left + slot * width
        label = f"{ring} {slot}" if ring != "ticket" else f"ticket {slot}"
        if ring in style.HUES:
            style.tensor_box(ax, x, top, width - 0.06, high, ring, label, size=style.NORMAL, gid=f"{ring} slot")
        else:
            style.box(ax, x, top, width - 0.06, high, label, size=style.NORMAL, gid=f"{ring} slot")
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
