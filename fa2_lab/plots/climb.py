"""The ladder as measured: the speed of every rung, from three kernels to one ahead of its peers, one change a rung."""

from typing import NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.plots import style
from fa2_lab.records import compared_with, load


class Rung(NamedTuple):
    """One rung in one shape, without a mask and under the causal mask, in TFLOP/s."""

    number: str
    name: str
    full: float
    causal: float


def data() -> dict:
    """What `fa2-lab bench ladder` has measured in the shape that fills the GPU."""
    record = load("ladder")
    full, causal = (reasons.timed(record, masked, d=128) for masked in (False, True))
    both = full.values.keys() & causal.values.keys()
    rungs = [Rung(r[1:3], ladder.change(r)[0], full.rate(r), causal.rate(r)) for r in ladder.RUNGS if r in both]
    peer, shape = compared_with(both), "forward, 16,384 tokens, N = 4,096, d = 128, 16 heads"
    return dict(rungs=rungs, peer=(peer, full.rate(peer), causal.rate(peer)), setting=f"{record.made()}; {shape}")


NAMED = 1.08  # a factor from which on a jump is named, by its cause


@style.picture
def draw(rungs: list[Rung], peer: tuple[str, float, float], setting: str) -> style.Drawn:
    """A bar for each rung without a mask, a dot for the causal mask, and the peer as a line behind them."""
    name, full, causal = peer
    first, last = rungs[0].full / full, rungs[-1].full / full
    caption = (
        f"From {first:.0%} to {last:.0%} of {name} in {len(rungs) - 1} changes. Bars: no mask; dots: causal; a pale"
    )
    caption += f" bar marks a rung that is slower than the one before. {setting}."
    figure, ax = style.new_figure(0.235 * len(rungs) + 0.75, caption)
    most = max(full, *(r.full for r in rungs))
    for y, rung in enumerate(rungs):
        before = rungs[max(y - 1, 0)]
        slower, gain = rung.full < before.full, max(rung.full / before.full, rung.causal / before.causal)
        named = gain >= NAMED
        fill = style.OURS if named else style.tint(style.INK, 0.1 if slower else 0.35)
        style.box(ax, 0, y - 0.36, rung.full, 0.72, fill=fill, linewidth=0.5)
        words = f"{rung.full:.0f}"
        if named:
            mask = "" if gain == rung.full / before.full else "causal "
            words += f"   {mask}× {gain:.2f}: {reasons.REASONS[rung.number].cause}"
        style.note(ax, max(rung.full, rung.causal) + 0.02 * most, y, words, bbox=style.CLEAR)
    dots = dict(color=style.PAPER, markeredgecolor=style.INK, markersize=4.5, linestyle="none")
    ax.plot([r.causal for r in rungs], range(len(rungs)), "o", **dots)
    for x, words, dash in ((full, f"{name}, no mask {full:.0f}", "-"), (causal, f"causal {causal:.0f} ", "--")):
        ax.plot([x, x], [-0.6, len(rungs) - 0.5], color=style.QUIET, linewidth=0.9, linestyle=dash, zorder=0)
        style.note(ax, x, -1.0, words, ha="left" if dash == "-" else "right", color=style.QUIET)
    style.bare(ax, (0, 1.87 * most), (-1.5, len(rungs) - 0.4), xticks=range(0, int(most), 200))
    ax.set_yticks(range(len(rungs)), [f"{r.number}  {r.name}" for r in rungs], fontsize=style.SMALL)
    ax.set_xlabel("TFLOP/s", loc="left")
    speeds = "; ".join(f"{r.number} {r.name} {r.full:.0f} and {r.causal:.0f}" for r in rungs)
    return figure, f"TFLOP/s of each rung without a mask and causal: {speeds}. {name}: {full:.0f} and {causal:.0f}."
