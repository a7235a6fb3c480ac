"""Timelines of SMs that run one thread block per head (FA1) or per row block (FA2), with and without a mask."""

from collections import Counter

from matplotlib.ticker import MaxNLocator

from fa2_lab.machine import chips, grid
from fa2_lab.machine.grid import Schedule
from fa2_lab.plots import style
from fa2_lab.tiles import Mask, Tiling


def data(picture_name: str = "orders") -> dict:
    """Return the arguments of draw() for the picture that PICTURES lists under this name."""
    return PICTURES[picture_name]()


def orders(heads: int = 32, N: int = 2048, B: int = 128) -> dict:
    """Return four schedules of `heads` heads on an H100 with one resident thread block per SM.

    The schedules are those of FA1 and FA2 without a mask, and of FA2 under the causal mask in two launch orders.
    """
    full, causal = Tiling(N, N, B, B), Tiling(N, N, B, B, Mask(causal=True))
    grids = {
        "FA1, one thread block per head": grid.fa1_grid(heads, full),
        "FA2, one per row block": grid.fa2_grid(heads, full),
        "FA2 causal, as they come": grid.fa2_grid(heads, causal),
        "FA2 causal, heaviest first": grid.fa2_grid(heads, causal, order="heaviest first"),
    }
    ran = {name: grid.schedule(blocks, chips.H100.SMs) for name, blocks in grids.items()}
    idle = chips.H100.SMs - ran["FA1, one thread block per head"].SMs_used
    caption = (
        f"FA1 leaves {idle} of {chips.H100.SMs} SMs idle, but FA2 fills all of them."
        " Under a causal mask, the end comes sooner if heavy blocks run first."
        f" Batch 1, {heads} heads, N = {N:,}, row blocks of {B}. Each row is an SM. On it, thread blocks"
        " alternate between two strengths of the fill."
    )
    return dict(ran=ran, caption=caption)


def heads() -> dict:
    """Return two schedules of four heads, each with 4 × 4 tiles, on six SMs (chapter 06)."""
    costs = {"FA1, one worker per head": [16] * 4, "FA2, one worker per row block": [4] * 16}
    ran = {
        name: grid.schedule([grid.BlockWork(0, index=None, cost=cost) for cost in each], 6)
        for name, each in costs.items()
    }
    ends = [f"{schedule.makespan:.0f}" for schedule in ran.values()]
    caption = (
        f"With one worker per row block, all SMs have work, and four heads end after {ends[1]} tiles instead of"
        f" {ends[0]}. Each row is an SM, and each box is one of its thread blocks."
    )
    return dict(ran=ran, caption=caption)


def divided() -> dict:
    """Return two schedules of a backward pass on an H200 (chapter 13), with 64 column blocks and with their halves."""
    ran = {}
    for name, parts in (("Whole column blocks", 1), ("Divided in two", 2)):
        blocks = [grid.BlockWork(0, n, 64 // parts) for n in range(64 * parts)]
        ran[name] = grid.schedule(blocks, chips.H200.SMs)
    whole, halves = ran.values()
    caption = (
        f"{len(whole.placements)} column blocks leave half of the SMs idle, and {len(halves.placements)} halves take"
        f" {halves.makespan / whole.makespan:.0%} of the time. Each row is an SM of an H200, and each box is one of its"
        " programs."
    )
    return dict(ran=ran, caption=caption)


PICTURES = {"orders": orders, "heads": heads, "divided": divided}
MAX_VISIBLE_BLOCKS = 1500  # with more blocks than this, a single block is too small to see


@style.picture
def draw(ran: dict[str, Schedule], caption: str) -> style.Drawn:
    """Draw schedules one above another on the same time scale.

    Each SM is drawn as a line, and each block as a bar whose length is its number of tiles. `ran` is {panel title:
    Schedule}.
    """
    figure, axes = style.new_figure(1.2 * len(ran) + 0.3, caption, nrows=len(ran), sharex=True)
    last = max(schedule.makespan for schedule in ran.values())
    for ax, (name, schedule) in zip(axes, ran.items(), strict=True):
        style.strip_axes(ax, (0, 1.02 * last), (0, schedule.SMs), ylabel=f"{schedule.SMs} SMs", xticks=[])
        ax.set_title(f"{name}: {schedule.utilisation:.0%} busy")
        _draw_blocks(ax, schedule)
        _mark_end(ax, schedule, last)
    axes[-1].spines["bottom"].set_visible(True)
    axes[-1].xaxis.set_major_locator(MaxNLocator(6))
    axes[-1].set(xlim=(0, 1.02 * last), xlabel="time in tiles (model) →")
    runs = "; ".join(
        f"{name}: {len(x.placements)} thread blocks on {x.SMs_used} SMs end at {x.makespan:,g},"
        f" {x.utilisation:.0%} busy"
        for name, x in ran.items()
    )
    return figure, f"{len(ran)} charts of SMs over time, in tiles, on one scale; every bar is a thread block. {runs}."


def _draw_blocks(ax: style.Axes, schedule: Schedule) -> None:
    """Draw each block as a bar on its SM's line, in alternating greys."""
    if len(schedule.placements) > MAX_VISIBLE_BLOCKS:
        # Draw one bar per SM, which ends with the SM's last block.
        whole = {p.SM: (0, p.SM, p.end, 1) for p in schedule.placements}
        style.bars(ax, list(whole.values()), style.worker_color(1))
        return
    height = 1 if schedule.SMs > 32 else 0.92  # if there are few SMs, leave a gap between their lines
    begun: Counter[int] = Counter()
    greys: tuple[list, list] = [], []
    for p in schedule.placements:
        greys[begun[p.SM] % 2].append((p.start, p.SM, p.end - p.start, height))
        begun[p.SM] += 1
    for grey, places in enumerate(greys):
        style.bars(ax, places, style.worker_color(1 + grey))


def _mark_end(ax: style.Axes, schedule: Schedule, last: float) -> None:
    """Draw a line at the end of the last block, and write the number of SMs that never ran a block."""
    end = schedule.makespan
    ax.plot([end, end], [0, schedule.SMs], color=style.INK, linewidth=1, clip_on=False)
    text_left_of_end = end > 0.8 * last
    look = dict(ha="right", bbox=style.TEXT_BACKGROUND) if text_left_of_end else dict(ha="left")
    style.note(ax, end + (-0.01 if text_left_of_end else 0.01) * last, 0.85 * schedule.SMs, f"ends at {end:,g}", **look)
    idle = schedule.SMs - schedule.SMs_used
    if idle > schedule.SMs / 10:  # otherwise, there is no room for the text
        words = f"{idle} SMs never get a thread block"
        style.note(ax, 0.01 * last, schedule.SMs - idle / 2, words)
