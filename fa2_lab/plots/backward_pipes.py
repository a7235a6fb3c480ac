"""Who waits for whom inside a thread block of the Hopper backward: one row for each ring of buffers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import hopper_backward
from fa2_lab.plots import style
from fa2_lab.plots.pipes import (
    FIRST,
    LANE,
    LEFT,
    RIGHT,
    SLOTS,
    _arrow,
    _bare,
    _between,
    _consumers,
    _lane,
    _producer,
    met,
)
from fa2_lab.reference import naive
from fa2_lab.tiles import Tiling

# Data -----------------------------------------------------------------------------------------------------------


def data() -> dict:
    """The same for the backward: four row blocks, four column blocks of 8 keys."""
    rng = np.random.default_rng(0)
    Q, dO, K, V = *rng.standard_normal((2, 16, 4)), *rng.standard_normal((2, 32, 4))
    O, L = naive.forward_linear_memory(Q, K, V)
    run = hopper_backward.backward(Q, K, V, O, L, dO, Tiling(16, 32, 4, 8))
    p = run.pipes
    barriers = met(run, [*p.mailbox.filled, *p.mailbox.emptied, p.ds.filled], (p.k, p.v, p.rows))
    stages = {"mailbox": 2, "K": p.k.stages, "V": p.v.stages, "rows": p.rows.stages}
    return dict(stages=stages, barriers=barriers, places=len(p.ds.places))


# Drawing --------------------------------------------------------------------------------------------------------

BACKWARD = "4 warps, 64 columns:\nSᵀ, dPᵀ, dV, dK,\nhalf of dQ"


@style.picture
def draw(stages: Mapping[str, int], barriers: Mapping[str, Mapping], places: int) -> tuple[Figure, str]:
    """The same for the backward. Its consumers also meet at dS, in so many places, and leave dQ to the copy engine."""
    figure, ax = style.new_figure(6.2, "Two consumers meet at dS; nobody waits for dQ to be added")
    bottom = FIRST + LANE * len(stages)
    consumers = sorted(barriers["dS filled"]["waits"])
    _producer(ax, bottom)
    _consumers(ax, consumers, bottom, BACKWARD)
    _between(ax, bottom, "dS", f"dS: {places} places,\n{barriers['dS filled']['expected']} arrivals")
    for lane, (ring, number) in enumerate(stages.items()):
        _lane(ax, FIRST + lane * LANE, ring, number, barriers)
    _sums(ax, bottom + 0.35, len(consumers))
    _bare(ax, bottom + 1.05)
    told = "; ".join(f"{ring}: {number} stage{'s' if number > 1 else ''}" for ring, number in stages.items())
    alt = (
        f"A diagram of one thread block of the backward. Left the producer warp, right {len(consumers)} consumer"
        f" warpgroups of 64 columns each, between them a row for each ring in shared memory ({told}), each filled by"
        " the producer, taken by both consumers and empty again after 2 releases. Two arrows between the consumers:"
        f" both write their dS into one of {places} places, and wait until both have. Beneath, each consumer has one"
        " place for its part of dQ; from there the copy engine adds it to the sums in HBM, and a consumer waits only"
        " before it writes the place again."
    )
    return figure, alt


def _sums(ax: Axes, top: float, consumers: int) -> None:
    """From each consumer's place for dQ, by the copy engine, to HBM."""
    left, right = RIGHT
    width, high = (right - left) / consumers, 0.42
    for c in range(consumers):
        x = left + c * width
        style.tensor_box(ax, x, top, width - 0.06, high, "dQ", f"dQ {c}", size=style.NORMAL, gid="dQ place")
        _arrow(ax, (x + width / 2, top - 0.35), (x + width / 2, top), "dQ store")
    style.tensor_box(
        ax, LEFT[0], top, SLOTS[1] - LEFT[0] - 0.4, high, "dQ", "sums of dQ in HBM, fp32", size=style.NORMAL
    )
    _arrow(ax, (left, top + high / 2), (SLOTS[1] - 0.4, top + high / 2), "dQ add")
    middle = (SLOTS[1] - 0.4 + left) / 2
    ax.text(middle, top + high / 2 - 0.05, "the copy engine adds", ha="center", va="bottom", fontsize=style.SMALL)
    words = "a place for each; written again once it has been read"
    ax.text(right, top + high + 0.06, words, ha="right", va="top", fontsize=style.SMALL)
