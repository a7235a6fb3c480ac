"""Causal row blocks on SMs: dealt before anything runs, or drawn when a program is free."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from fa2_lab.machine import chips, grid, hopper
from fa2_lab.machine.grid import Schedule
from fa2_lab.plots import style
from fa2_lab.plots.waves import turns
from fa2_lab.tiles import CAUSAL, Tiling

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 16384, d: int = 128, heads: int = 16, at_once: int = 4, B_r: int = 128) -> dict:
    """Causal row blocks on 132 SMs: dealt in two orders, and drawn in the second. `at_once` heads run side by side."""
    tiles = grid.worker_tiles(Tiling(N, N, B_r, 128, CAUSAL), "forward")[::-1].tolist()  # of one head, heavy first
    head_by_head = tiles * heads
    side_by_side = [n for n in tiles for _ in range(at_once)] * (heads // at_once)
    blocks = [grid.Block(0, n, cost) for n, cost in enumerate(side_by_side)]
    SMs = chips.H200.SMs
    ran = {
        "Dealt, head by head": hopper.dealt(head_by_head, SMs),
        f"Dealt, {at_once} heads at once": hopper.dealt(side_by_side, SMs),
        "Drawn as tickets": grid.schedule(blocks, SMs),
    }
    return dict(ran=ran, setting=f"{heads} heads, N = {N:,}, d = {d}, causal, {SMs} SMs, row blocks of {B_r}")


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(ran: Mapping[str, Schedule], setting: str) -> tuple[Figure, str]:
    """ran: {panel's name: Schedule}, each SM a line from left to right, each row block a bar as long as its tiles."""
    figure, axes = style.new_figure(
        3.6, "Dealt, the unluckiest SM decides; drawn, nobody waits", ncols=3, sharex=True, sharey=True
    )
    last = max(schedule.makespan for schedule in ran.values())
    for ax, (name, schedule) in zip(axes, ran.items(), strict=True):
        ax.set(
            title=f"{name}:\n{schedule.utilisation:.0%} busy", ylim=(schedule.SMs, 0), yticks=[], xlim=(0, 1.03 * last)
        )
        ax.spines["left"].set_visible(False)
        _bars(ax, schedule)
        ax.axvline(schedule.makespan, color=style.INK, linewidth=1)
        ax.set_xlabel(f"ends at {schedule.makespan:,.0f} tiles")
    axes[0].set_ylabel(f"the {next(iter(ran.values())).SMs} SMs")
    told = "; ".join(f"{n}: ends at {s.makespan:,.0f} tiles, {s.utilisation:.0%} busy" for n, s in ran.items())
    alt = (
        f"Three charts of SMs over time, in tiles ({setting}); every bar is a row block, its colour tells one from the"
        f" next. {told}. Dealt head by head, the same SMs get the heavy blocks again and again, and the right edge is"
        " ragged; drawn as tickets, heavy blocks first, all SMs end together."
    )
    return figure, alt


def _bars(ax: Axes, schedule: Schedule) -> None:
    corners = [[(p.start, p.SM), (p.end, p.SM), (p.end, p.SM + 1), (p.start, p.SM + 1)] for p in schedule.placed]
    fills = [style.worker(turn) for turn in turns(schedule)]
    ax.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=fills, linewidths=0.1))
