"""Causal row blocks on SMs: shared out before anything runs, or handed out by a scheduler when an SM is free."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from fa2_lab.machine import chips, grid, hopper
from fa2_lab.machine.grid import Schedule
from fa2_lab.plots import style
from fa2_lab.tiles import CAUSAL, Tiling

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 16384, d: int = 128, heads: int = 16, at_once: int = 4, B_r: int = 128) -> dict:
    """Causal row blocks on 132 SMs, shared out in two orders, or handed out in the second: `at_once` heads abreast."""
    tiles = grid.worker_tiles(Tiling(N, N, B_r, 128, CAUSAL), "forward")[::-1].tolist()  # of one head, heavy first
    head_by_head = tiles * heads
    side_by_side = [n for n in tiles for _ in range(at_once)] * (heads // at_once)
    blocks = [grid.Block(0, n, cost) for n, cost in enumerate(side_by_side)]
    SMs = chips.H200.SMs
    ran = {
        "Shared out, head by head": hopper.dealt(head_by_head, SMs),
        f"Shared out, {at_once} heads at once": hopper.dealt(side_by_side, SMs),
        "Next one when free": grid.schedule(blocks, SMs),
    }
    return dict(ran=ran, setting=f"Model: {heads} heads, N = {N:,}, d = {d}, causal, {SMs} SMs, row blocks of {B_r}")


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(ran: Mapping[str, Schedule], setting: str) -> tuple[Figure, str]:
    """How long each SM has work, panel by panel. ran: {panel's name: Schedule}."""
    title = "Row blocks handed out while the kernel runs keep every SM busy to the end"
    figure, axes = style.new_figure(3.5, title, ncols=len(ran), sharex=True, sharey=True)
    last = max(schedule.makespan for schedule in ran.values())
    for ax, (name, schedule) in zip(axes, ran.items(), strict=True):
        ax.set(title=f"{name}:\n{schedule.utilisation:.0%} busy", ylim=(schedule.SMs, 0), xlim=(0, 1.03 * last))
        ax.set(yticks=[], xticks=range(0, int(last) + 1, 500), xlabel="time in tiles →")
        ax.spines["left"].set_visible(False)
        style.bars(ax, [(0, SM, load, 1) for SM, load in enumerate(loads(schedule))], style.worker(1), gid="load")
        ax.axvline(schedule.makespan, color=style.INK, linewidth=1, gid="end")
        words, paper = f"ends at {schedule.makespan:,.0f}", dict(facecolor=style.PAPER, edgecolor="none", pad=1.5)
        at = (schedule.makespan, 0.93 * schedule.SMs)
        ax.annotate(words, at, (-5, 0), textcoords="offset points", ha="right", va="center", bbox=paper)
    axes[0].set_ylabel(f"the {next(iter(ran.values())).SMs} SMs, a bar each")
    figure.supxlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    told = "; ".join(f"{n}: ends at {s.makespan:,.0f} tiles, {s.utilisation:.0%} busy" for n, s in ran.items())
    alt = (
        f"A bar for each SM in three charts: how many tiles it works on before it is idle ({setting}). {told}."
        " Shared out beforehand, some SMs get the heavy row blocks again and again, and all wait for the slowest;"
        " handed out while the kernel runs, heavy blocks first, all SMs end together."
    )
    return figure, alt


def loads(schedule: Schedule) -> list[float]:
    """For each SM, when its last row block has ended; none of them pauses before."""
    ends = [0.0] * schedule.SMs
    for p in schedule.placed:
        ends[p.SM] = max(ends[p.SM], p.end)
    return ends
