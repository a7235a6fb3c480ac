"""The ladder as measured: the speed of every rung, from three kernels to one ahead of its peers, one change a rung."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.kernels import ladder
from fa2_lab.plots import style
from fa2_lab.records import compared_with, load

# Data -----------------------------------------------------------------------------------------------------------


class Rung(NamedTuple):
    """One rung in one shape, without a mask and under the causal mask, in TFLOP/s."""

    number: str
    name: str
    full: float
    causal: float


def data(N: int = 4096, d: int = 128) -> dict:
    """What `fa2-lab bench ladder` has measured in the shape that fills the GPU."""
    record = load("ladder")
    rows = {
        row.problem["causal"]: {name: row.flops / ms[0] / 1e9 for name, ms in row.values.items()}
        for row in record.rows
        if row.direction == "forward" and (row.problem["N_q"], row.problem["d"]) == (N, d)
        if row.problem["batch"] * N == 16384
    }
    full, causal = rows[False], rows[True]
    rungs = [Rung(r[1:3], ladder.change(r)[0], full[r], causal[r]) for r in ladder.RUNGS if r in full and r in causal]
    peer = compared_with(full.keys() & causal.keys())
    setting = f"{record.made()}; forward, 16,384 tokens, N = {N:,}, d = {d}, {2048 // d} heads"
    return dict(rungs=rungs, peer=(peer, full[peer], causal[peer]), setting=setting)


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(rungs: Sequence[Rung], peer: tuple[str, float, float], setting: str) -> tuple[Figure, str]:
    """A bar for each rung without a mask, a dot for the causal mask, and the peer as a line behind them."""
    name, full, causal = peer
    first, last = rungs[0].full / full, rungs[-1].full / full
    title = f"From {first:.0%} to {last:.0%} of {name} in {len(rungs) - 1} changes"
    figure, ax = style.new_figure(0.27 * len(rungs) + 1.1, title)
    for y, rung in enumerate(rungs):
        better = y == 0 or rung.full > rungs[y - 1].full
        fill = style.tint(style.INK, 0.32 if better else 0.12)
        style.box(ax, 0, y - 0.36, rung.full, 0.72, gid=f"rung {rung.number}", fill=fill)
        ax.text(1.13 * full, y, f"{rung.full:.0f}", va="center", ha="right", fontsize=style.SMALL)
    ax.plot([r.causal for r in rungs], range(len(rungs)), "o", color=style.INK, markersize=4, gid="causal")
    for x, other, mask in ((full, causal, "no mask"), (causal, full, "causal")):
        ax.axvline(x, color=style.QUIET, linewidth=0.9, linestyle="--" if mask == "causal" else "-", zorder=0)
        side = dict(ha="left", x=x + 4) if x > other else dict(ha="right", x=x - 4)
        label = f"{name}, {mask}, {x:.0f}" if x < other else f"{mask} {x:.0f}"
        ax.text(y=-0.75, s=label, va="bottom", fontsize=style.SMALL, color=style.QUIET, **side)
    _axes(ax, rungs, max(full, *(r.full for r in rungs)))
    figure.supxlabel(f"{setting}. Pale: a change that loses here", fontsize=style.SMALL, color=style.QUIET)
    told = "; ".join(f"{r.number} {r.name} {r.full:.0f} and {r.causal:.0f}" for r in rungs)
    alt = f"TFLOP/s of each rung without a mask and causal: {told}. {name}: {full:.0f} and {causal:.0f}. {setting}."
    return figure, alt


def _axes(ax: Axes, rungs: Sequence[Rung], most: float) -> None:
    ax.set(xlim=(0, 1.16 * most), ylim=(len(rungs) - 0.4, -1.6))
    ax.set_yticks(range(len(rungs)), [f"{r.number}  {r.name}" for r in rungs], fontsize=style.SMALL)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("TFLOP/s (bar: no mask, dot: causal)")
