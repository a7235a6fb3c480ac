"""The ring as measured: how many times faster than one GPU, and how much memory each GPU needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style
from fa2_lab.plots.speed import short
from fa2_lab.records import Record, load

# Data -----------------------------------------------------------------------------------------------------------


def data() -> dict:
    """What `fa2-lab bench ring` has measured: forward and backward together."""
    record = load("ring")
    rows = [r for r in record.rows if "layout" not in r.problem]
    by_length = {r.problem["N_q"]: r.values for r in rows if r.direction == "both"}
    sizes = sorted({gpus(name) for values in by_length.values() for name in values})
    curves = {n: sorted((N, ratio(v, n)) for N, v in by_length.items() if name_of(n) in v) for n in sizes if n > 1}
    longest = max(by_length)
    peak = next(r for r in rows if r.direction == "peak memory" and r.problem["N_q"] == longest).values
    return dict(
        curves=curves,
        contiguous=contiguous(record, by_length),
        memory={gpus(name): mib for name, (mib,) in peak.items()},
        setting=f"{record.made()}; forward and backward, causal, 16 heads of 128; memory at {longest:,} tokens",
    )


def contiguous(record: Record, by_length: dict) -> tuple[int, int, float] | None:
    """(GPUs, N, times faster) of the other layout, if it was measured."""
    for row in record.rows:
        if row.problem.get("layout") == "contiguous" and row.direction == "both":
            (name, (ms, *_)), N = next(iter(row.values.items())), row.problem["N_q"]
            return gpus(name), N, by_length[N][name_of(1)][0] / ms
    return None


def gpus(name: str) -> int:
    return int(name.split()[0])


def name_of(n: int) -> str:
    return f"{n} GPU" + "s" * (n > 1)


def ratio(values: dict, n: int) -> float:
    """How many times as fast as one GPU."""
    return values[name_of(1)][0] / values[name_of(n)][0]


# Drawing --------------------------------------------------------------------------------------------------------

MARKERS = {2: "s", 4: "o", 8: "D"}


@style.picture
def draw(
    curves: Mapping[int, Sequence[tuple[int, float]]],
    contiguous: tuple[int, int, float] | None,
    memory: Mapping[int, float],
    setting: str,
) -> tuple[Figure, str]:
    """Left: speed over that of one GPU, by length; right: peak memory of each GPU at the longest.

    curves: {GPUs: (N, times faster)}; contiguous: (GPUs, N, times faster) in the other layout; memory: {GPUs: MiB}.
    """
    longest = max(N for curve in curves.values() for N, _ in curve)
    shares = {n: dict(curve)[longest] / n for n, curve in curves.items()}
    share = f"{max(curves)} GPUs at {shares[max(curves)]:.1%} of linear speed, {short(longest)} tokens"
    title = f"Long sequences share out: {share}"
    figure, axes = style.new_figure(3.9, title, ncols=2, width_ratios=[2.2, 1])
    _speeds(axes[0], curves, contiguous)
    _memory(axes[1], memory)
    figure.supxlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    told = "; ".join(f"{n} GPUs " + ", ".join(f"{x:.2f} at {short(N)}" for N, x in curves[n]) for n in curves)
    beside = f" In contiguous layout {contiguous[0]} GPUs are {contiguous[2]:.2f} times as fast." if contiguous else ""
    kept = ", ".join(f"{mib:,.0f} on {n}" for n, mib in memory.items())
    times = f"Speed of forward and backward as a multiple of one GPU's: {told}.{beside}"
    return figure, f"{times} Peak MiB of a GPU: {kept}. {setting}."


def _speeds(ax: Axes, curves: Mapping, contiguous: tuple | None) -> None:
    lengths = sorted({N for curve in curves.values() for N, _ in curve})
    end = 1.12 * lengths[-1]
    for n, curve in curves.items():
        ax.plot([lengths[0], lengths[-1]], [n, n], color=style.QUIET, linewidth=0.8, linestyle="--", zorder=0)
        ax.text(lengths[0], n + 0.06, f"{n} times: linear", color=style.QUIET, fontsize=style.SMALL, va="bottom")
        ax.plot(*zip(*curve, strict=True), color=style.INK, marker=MARKERS.get(n, "^"), markersize=4, label=f"{n}")
        ax.text(end, curve[-1][1], f"{n} GPUs\n{curve[-1][1]:.2f}", va="center")
    if contiguous:
        n, N, times = contiguous
        ax.plot([N], [times], marker="x", color=style.INK, linestyle="none", label="contiguous")
        ax.text(N / 1.1, times + 0.12, f"{n} GPUs, contiguous, {times:.2f}", ha="right", va="bottom")
    ax.set(xscale="log", xlim=(lengths[0] / 1.15, 1.75 * lengths[-1]), ylim=(0, 1.14 * max(curves)))
    ax.set_xticks(lengths, [short(N) for N in lengths])
    ax.minorticks_off()
    ax.set_title("times as fast as one GPU", pad=3)
    ax.set_xlabel("tokens in all")


def _memory(ax: Axes, memory: Mapping[int, float]) -> None:
    for place, (n, mib) in enumerate(memory.items()):
        style.box(ax, place - 0.35, 0, 0.7, mib / 1024, gid=f"{n} GPUs", fill=style.tint(style.INK, 0.25))
        ax.text(place, mib / 1024, f"{mib / 1024:.1f}", ha="center", va="bottom")
    ax.set(xlim=(-0.6, len(memory) - 0.4), ylim=(0, 1.15 * max(memory.values()) / 1024))
    ax.set_xticks(range(len(memory)), [f"{n} GPU" + "s" * (n > 1) for n in memory])
    ax.set_title("peak GiB of each GPU", pad=3)
