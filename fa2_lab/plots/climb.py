"""The ladder as measured: the speed of every rung, from three kernels to one ahead of its peers, one change a rung."""

from typing import NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.plots import style
from fa2_lab.records import compared_with, load


class RungSpeeds(NamedTuple):
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
    rungs = [RungSpeeds(r[1:3], ladder.change(r)[0], full.rate(r), causal.rate(r)) for r in ladder.RUNGS if r in both]
    peer, shape = compared_with(both), "forward, 16,384 tokens, N = 4,096, d = 128, 16 heads"
    return dict(rungs=rungs, peer=(peer, full.rate(peer), causal.rate(peer)), setting=f"{record.made()}; {shape}")


NAMED = 1.08  # a factor from which on a jump is named, by its cause


@style.picture
def draw(rungs: list[RungSpeeds], peer: tuple[str, float, float], setting: str) -> style.Drawn:
    """A bar for each rung without a mask, a dot for the causal mask, and the peer as a line behind them."""
    name, full, causal = peer
    first, last = rungs[0].full / full, rungs[-1].full / full
    caption = (
        f"From {first:.0%} to {last:.0%} of {name} in {len(rungs) - 1} changes. Bars: no mask; dots: causal; an empty"
    )
    caption += f" bar marks a rung that is slower than the one before. {setting}."
    befores = [rungs[0], *rungs]
    gains = [max(r.full / b.full, r.causal / b.causal) for b, r in zip(befores, rungs, strict=False)]
    below = [0.85 * (style.narrow() and gain >= NAMED) for gain in gains]  # room for a cause under its bar
    places = [n + sum(below[:n]) for n in range(len(rungs))]
    figure, ax = style.new_figure(0.235 * (len(rungs) + sum(below)) + 0.75, caption)
    most = max(full, *(r.full for r in rungs))
    for y, rung, before, gain in zip(places, rungs, befores, gains, strict=False):
        named = gain >= NAMED
        fill = style.OURS if named else style.tint(style.INK, 0 if rung.full < before.full else 0.35)
        style.box(ax, 0, y - 0.36, rung.full, 0.72, fill=fill, linewidth=0.5)
        end, words = max(rung.full, rung.causal) + 0.02 * most, f"{rung.full:.0f}"
        if named:
            mask = "" if gain == rung.full / before.full else "causal "
            cause = f"{mask}× {gain:.2f}: {reasons.REASONS[rung.number].cause}"
            words += "" if style.narrow() else f"   {cause}"
            if style.narrow():
                style.note(ax, -0.2 * most, y + 0.82, cause, bbox=style.CLEAR)
        style.note(ax, end, y, words, bbox=style.CLEAR)
    dots = dict(color=style.PAPER, markeredgecolor=style.INK, markersize=4.5, linestyle="none")
    ax.plot([r.causal for r in rungs], places, "o", **dots)
    for x, words, dash in ((full, f"{name}, no mask {full:.0f}", "-"), (causal, f"causal {causal:.0f} ", "--")):
        ax.plot([x, x], [-0.6, places[-1] + 0.5], color=style.QUIET, linewidth=0.9, linestyle=dash, zorder=0)
        above = style.narrow() and dash == "-"  # both do not fit on one line
        side = "left" if dash == "-" and not above else "right"
        style.note(ax, x, -1.9 if above else -1.0, words, ha=side, color=style.QUIET)
    style.bare(
        ax,
        (0, (1.15 if style.narrow() else 1.87) * most),
        (-2.4 if style.narrow() else -1.5, places[-1] + 0.6),
        xticks=range(0, int(most), 200),
    )
    ax.set_yticks(places, [f"{r.number}  {r.name}" for r in rungs], fontsize=style.SMALL)
    ax.set_xlabel("TFLOP/s", loc="left")
    speeds = "; ".join(f"{r.number} {r.name} {r.full:.0f} and {r.causal:.0f}" for r in rungs)
    return figure, f"TFLOP/s of each rung without a mask and causal: {speeds}. {name}: {full:.0f} and {causal:.0f}."
