"""Thread blocks on SMs over time: one block per head (FA1) against one per row block (FA2), and the causal tail."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from fa2_lab.machine import chips, grid
from fa2_lab.machine.grid import Schedule
from fa2_lab.plots import style
from fa2_lab.tiles import Mask, Tiling

# Data -----------------------------------------------------------------------------------------------------------


def data(heads: int = 32, N: int = 2048, B: int = 128) -> dict:
    """FA1 and FA2 at batch 1 on an H100, one resident block to an SM: without a mask, then causal in both orders."""
    full, causal = Tiling(N, N, B, B), Tiling(N, N, B, B, Mask(causal=True))
    grids = {
        "FA1, one block per head": grid.fa1_grid(heads, full),
        "FA2, one per row block": grid.fa2_grid(heads, full),
        "FA2 causal, launched row by row": grid.fa2_grid(heads, causal),
        "FA2 causal, heaviest blocks first": grid.fa2_grid(heads, causal, order="heaviest first"),
    }
    return dict(heads=heads, ran={name: grid.schedule(blocks, chips.H100.SMs) for name, blocks in grids.items()})


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(heads: int, ran: Mapping[str, Schedule]) -> tuple[Figure, str]:
    """Four schedules, each SM a line from left to right, each block a bar as long as its tiles.

    ran: {panel's name: Schedule}; the first two share a time axis, and so do the last two.
    """
    title = "One block per head starves the GPU; one per row block fills it"
    figure, axes = style.new_figure(5.8, title, nrows=2, ncols=2, sharey=True, sharex="row")
    for ax, (name, schedule) in zip(axes.flat, ran.items(), strict=True):
        ax.set(title=f"{name}: {schedule.utilisation:.0%} busy", ylim=(schedule.SMs, 0), yticks=[])
        ax.set_xlim(0, max(1.02 * schedule.makespan, ax.get_xlim()[1]))
        ax.spines["left"].set_visible(False)
        _bars(ax, schedule)
    for ax, schedule in zip(axes.flat, ran.values(), strict=True):
        _end(ax, schedule)
        _numbers(ax, schedule)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"the {next(iter(ran.values())).SMs} SMs")
    axes[0][0].set_xlabel("time in tiles →")
    axes[0][1].set_xlabel("number and colour: an SM's first, second, … block")
    for ax in axes[1]:
        ax.set_xlabel("time in tiles →")
    told = "; ".join(
        f"{name}: {len(s.placed)} blocks on {s.SMs_used} SMs end at {s.makespan:g}, {s.utilisation:.0%} busy"
        for name, s in ran.items()
    )
    alt = (
        f"Four charts of SMs over time, in tiles, for {heads} heads at batch 1; every bar is a thread block. {told}."
        " Launched row by row, the long causal blocks come last and leave a ragged tail; heaviest first, it is flat."
    )
    return figure, alt


def turns(schedule: Schedule) -> list[int]:
    """For each block, how many ran before it on the same slot."""
    seen: dict[tuple, int] = {}
    turn = []
    for p in schedule.placed:
        turn.append(seen.get((p.SM, p.slot), 0))
        seen[p.SM, p.slot] = turn[-1] + 1
    return turn


def _bars(ax: Axes, schedule: Schedule) -> None:
    """Every block as a bar on the line of its SM; the colour says whether it is the SM's first, second, … block."""
    high = 1 / schedule.blocks_per_sm
    corners = []
    for p in schedule.placed:
        top = p.SM + p.slot * high
        corners.append([(p.start, top), (p.end, top), (p.end, top + high), (p.start, top + high)])
    fills = [style.worker(turn) for turn in turns(schedule)]
    ax.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=fills, linewidths=0.1))


def _end(ax: Axes, schedule: Schedule) -> None:
    """A line where the last block ends, and how many SMs never had one."""
    end, last = schedule.makespan, ax.get_xlim()[1]
    ax.axvline(end, color=style.INK, linewidth=1)
    side = dict(ha="left", xytext=(4, 6)) if end < 0.8 * last else dict(ha="right", xytext=(-4, 6))
    ax.annotate(f"ends at {end:g}", (end, schedule.SMs), textcoords="offset points", va="bottom", **side)
    idle = schedule.SMs - schedule.SMs_used
    if idle:
        ax.text(end / 2, schedule.SMs - idle / 2, f"{idle} SMs never get a block", ha="center", va="center")


def _numbers(ax: Axes, schedule: Schedule) -> None:
    """Which block it is on its SM, written on one bar of each wave, where the waves are clean."""
    if len({p.end - p.start for p in schedule.placed}) == 1:
        for p, turn in zip(schedule.placed, turns(schedule), strict=True):
            if p.SM == schedule.SMs_used // 2 and p.slot == 0:
                ink = style.ink_on(style.worker(turn))
                ax.text((p.start + p.end) / 2, p.SM, f"{turn + 1}", ha="center", va="center", color=ink)
