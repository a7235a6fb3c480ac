"""Bar chart of the measured ladder: each rung's speed as a fraction of FlashAttention-3's speed."""

from typing import NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.plots import style
from fa2_lab.records import ladder_baseline, load


class RungSpeeds(NamedTuple):
    """One rung's speeds in TFLOP/s on one problem, without a mask and under the causal mask."""

    number: str
    name: str
    full: float
    causal: float


def data() -> dict:
    """Return the speeds that `fa2-lab bench ladder` measured on a problem large enough to fill the GPU."""
    record = load("ladder")
    full, causal = (reasons.forward_row(record, masked, d=128) for masked in (False, True))
    names_in_both = full.values.keys() & causal.values.keys()
    rungs = [
        RungSpeeds(r[1:3], ladder.change(r)[0], full.rate(r), causal.rate(r))
        for r in ladder.RUNGS
        if r in names_in_both
    ]
    peer, shape = ladder_baseline(names_in_both), "forward, 16,384 tokens, N = 4,096, d = 128, 16 heads"
    return dict(rungs=rungs, peer=(peer, full.rate(peer), causal.rate(peer)), setting=f"{record.setup()}; {shape}")


JUMPS = {  # {last rung of a large gain: (number of changes that led to it, description)}
    "03": (3, "Scores stay on the chip, rows in parallel"),
    "05": (1, "O is divided once, so a third program fits on an SM"),
    "10": (1, "The copies of two tiles run ahead"),
    "11": (1, "The two loops are swapped, so matmuls need not wait"),
    "18": (1, "A tile has 128 keys instead of 64"),
    "20": (1, "Q Kᵀ of the next tile runs beside P V of this one"),
}
LOSES = 0.99  # if a change multiplies the speed by less than this, its bar has no fill


@style.picture
def draw(rungs: list[RungSpeeds], peer: tuple[str, float, float], setting: str) -> style.Drawn:
    """Draw the speed of each rung relative to that of `peer`.

    A bar shows the speed without a mask, and a dot shows the speed under the causal mask. The largest gains, listed in
    JUMPS, are numbered. On the bar of its last rung, each of them is labelled with its number and its speedup. The bar
    of a change that reduces the speed has no fill. `peer` is (name, TFLOP/s without a mask, TFLOP/s under the causal
    mask).
    """
    name, full, causal = peer
    first, last = rungs[0].full / full, rungs[-1].full / full
    caption = (
        f"From {first:.0%} to {last:.0%} of {name}'s speed in {len(rungs) - 1} changes. A bar shows the speed without"
        f" a mask, and a dot the speed under a causal mask. The six largest jumps are numbered, with their factors. The"
        f" first one took three changes. An open bar is a change that loses speed without a mask. {setting}."
    )
    figure, ax = style.new_figure((0.225 if style.is_narrow() else 0.18) * len(rungs) + 0.35, caption)
    for y, (before, rung) in enumerate(zip([rungs[0], *rungs], rungs, strict=False)):
        fill = style.OURS if rung.number in JUMPS else style.tint(style.INK, 0.2)
        loses = rung.full < LOSES * before.full
        look = dict(fill=style.PAPER, edgecolor=style.QUIET, linewidth=1.2) if loses else dict(fill=fill, linewidth=0)
        bar = style.box(ax, 0, y - 0.38, rung.full / full, 0.76, **look)
        if rung.number in JUMPS:
            factor = rung.full / rungs[y - JUMPS[rung.number][0]].full
            words = f"{list(JUMPS).index(rung.number) + 1}: × {factor:.2f}"
            beside = style.is_narrow() and rung.full < 0.55 * full  # true if the dot would cover the words
            place, ink = (rung.full / full, style.INK) if beside else (0, style.ink_on(fill))
            text = style.note(ax, place + 0.01, y, words, fontweight="bold", color=ink)
            if not beside:
                bar.label_text = text
    dots = dict(color=style.PAPER, markeredgecolor=style.INK, markersize=5.5, linestyle="none")
    ax.plot([r.causal / causal for r in rungs], range(len(rungs)), "o", zorder=3, **dots)
    ax.plot([first + 0.03], [0], "o", **dots)
    style.beside(ax, "causal", (first + 0.03, 0), (7, 0))
    ax.axvline(1, color=style.INK, linewidth=1.2, zorder=0)
    style.strip_axes(ax, (0, 1.06), (-0.6, len(rungs) - 0.4), xticks=[0, 0.25, 0.5, 0.75, 1])
    ax.set_xticklabels(["0", "25%", "50%", "75%", "FA3" if style.is_narrow() else name])
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(rungs)), [f"{r.number}  {r.name}" for r in rungs])
    speeds = "; ".join(f"{r.number} {r.name} {r.full:.0f} and {r.causal:.0f}" for r in rungs)
    return figure, f"TFLOP/s of each rung without a mask and causal: {speeds}. {name}: {full:.0f} and {causal:.0f}."
