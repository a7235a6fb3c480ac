"""Thread blocks on SMs over time: one per head (FA1) against one per row block (FA2), and the causal tail."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
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
        "FA1, one thread block per head": grid.fa1_grid(heads, full),
        "FA2, one per row block": grid.fa2_grid(heads, full),
        "FA2 causal, launched row by row": grid.fa2_grid(heads, causal),
        "FA2 causal, heaviest first": grid.fa2_grid(heads, causal, order="heaviest first"),
    }
    return dict(heads=heads, ran={name: grid.schedule(blocks, chips.H100.SMs) for name, blocks in grids.items()})


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(heads: int, ran: Mapping[str, Schedule]) -> tuple[Figure, str]:
    """Schedules one above the other on one time scale: each SM a line, each block a bar as long as its tiles.

    ran: {panel's name: Schedule}.
    """
    title = "One thread block per head starves the GPU; one per row block fills it"
    figure, axes = style.new_figure(1.6 * len(ran) + 0.6, title, nrows=len(ran), sharex=True)
    last = max(schedule.makespan for schedule in ran.values())
    for ax, (name, schedule) in zip(axes, ran.items(), strict=True):
        ax.set(title=f"{name}: {schedule.utilisation:.0%} busy", ylim=(schedule.SMs, 0), yticks=[], xlim=(0, last))
        ax.set_ylabel(f"{schedule.SMs} SMs")
        ax.spines["left"].set_visible(False)
        _bars(ax, schedule)
        _end(ax, schedule)
    axes[-1].set_xlabel(
        "time in tiles (model) → (a line for each SM; a new grey begins with each of its thread blocks)"
    )
    told = "; ".join(
        f"{name}: {len(s.placed)} thread blocks on {s.SMs_used} SMs end at {s.makespan:g}, {s.utilisation:.0%} busy"
        for name, s in ran.items()
    )
    alt = (
        f"{len(ran)} charts of SMs over time, in tiles, on one scale, for {heads} heads at batch 1; every bar is a"
        f" thread block. {told}. Launched row by row, the long causal blocks come last and leave a ragged tail;"
        " heaviest first, it is flat."
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
    """Every block as a bar on the line of its SM, in one of two greys by turns, so that neighbours differ."""
    high = 1 / schedule.blocks_per_sm
    for grey in (0, 1):
        places = [
            (p.start, p.SM + p.slot * high, p.end - p.start, high)
            for p, turn in zip(schedule.placed, turns(schedule), strict=True)
            if turn % 2 == grey
        ]
        style.bars(ax, places, style.worker(1 + grey), gid="blocks")


def _end(ax: Axes, schedule: Schedule) -> None:
    """A line where the last block ends, and how many SMs never had one."""
    end, last = schedule.makespan, ax.get_xlim()[1]
    ax.plot([end, end], [0, schedule.SMs], color=style.INK, linewidth=1, gid="end", clip_on=False)
    inside = end > 0.9 * last
    shift, align = (-5, "right") if inside else (5, "left")
    words = f"ends at {end:g}"
    ax.annotate(words, (end, schedule.SMs / 2), (shift, 0), textcoords="offset points", va="center", ha=align)
    idle = schedule.SMs - schedule.SMs_used
    if idle:
        ax.text(last / 2, schedule.SMs - idle / 2, f"{idle} SMs never get a thread block", ha="center", va="center")
