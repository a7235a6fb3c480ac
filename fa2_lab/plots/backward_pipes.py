"""Who waits for whom inside a thread block of the Hopper backward: one row for each ring of buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import hopper_backward
from fa2_lab.plots import style
from fa2_lab.plots.pipes import CONSUMERS, FIRST, LANE, PRODUCER, TOLD, arrow, bare, between, block, met
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
    adds = sorted({job.actor for job in run.block.jobs if job.unit == "copy" and job.label.startswith("dQ")})
    return dict(stages=stages, barriers=barriers, places=len(p.ds.places), adds=adds)


# Drawing --------------------------------------------------------------------------------------------------------

DOES = "4 warps, 64 columns:\nSᵀ, dPᵀ, dV, dK,\nhalf of dQ"


@style.picture
def draw(
    stages: Mapping[str, int], barriers: Mapping[str, Mapping], places: int, adds: Sequence[str]
) -> tuple[Figure, str]:
    """As the forward's, but the consumers also meet at dS, in so many places, and hand dQ over to be added.

    adds: who hands over parts of dQ.
    """
    figure, ax = style.new_figure(6.3, "Two consumers meet at dS; nobody waits for dQ to be added")
    consumers = block(ax, stages, barriers, DOES)
    between(ax, consumers, barriers["dS filled"], f"dS: {places} places,\n{barriers['dS filled']['expected']} arrivals")
    _sums(ax, FIRST + LANE * len(stages) + 0.35, consumers, adds)
    bare(ax, FIRST + LANE * len(stages) + 1.55)
    told = "; ".join(f"{TOLD.get(ring, ring)}: {n} stage{'s' if n > 1 else ''}" for ring, n in stages.items())
    alt = (
        f"One thread block of the backward (model). Left the producer warp, right {len(consumers)} consumer warpgroups"
        f" of 64 columns each, between them a row for each ring in shared memory ({told}), each filled by the producer,"
        " taken by both consumers and empty again after 2 releases. Two arrows between the consumers: both write their"
        f" dS into one of {places} places, and wait until both have. Beneath, an arrow from each consumer to a place"
        " for its part of dQ; from there the copy engine adds it to the sums in HBM, and a consumer waits only before"
        " it writes the place again."
    )
    return figure, alt


def _sums(ax: Axes, top: float, consumers: Mapping[str, tuple], adds: Sequence[str]) -> None:
    """From each consumer to its place for dQ, and from there, by the copy engine, to HBM."""
    (_, right), wide, high = CONSUMERS, 0.62, 0.36
    centres = {who: right + 0.13 - 1.1 * n for n, who in enumerate(adds)}  # the upper one's arrow passes the lower box
    for who, x in centres.items():
        box = (x - wide / 2, top, wide, high)
        style.tensor_box(ax, *box, "dQ", f"dQ of {who[-1]}", gid=f"dQ place {who}")
        direct = x < right
        start = (x, consumers[who][1]) if direct else (right, sum(consumers[who]) / 2)
        bend = {} if direct else dict(connectionstyle="angle,angleA=0,angleB=90,rad=0")
        arrow(ax, start, (x, top), f"store dQ {who}", "Q", **bend)
        arrow(ax, (x, top + high), (x, top + 0.75), f"add dQ {who}", "Q")
    x, width = PRODUCER[0], right + 0.13 + wide / 2 - PRODUCER[0]
    style.tensor_box(ax, x, top + 0.75, width, high, "dQ", "sums of dQ in HBM, fp32", size=style.NORMAL, gid="dQ sums")
    words = "a place for each, written again once it has been read;\nthe copy engine adds"
    ax.text(min(centres.values()) - 0.45, top + high / 2, words, ha="right", va="center", fontsize=style.SMALL)
