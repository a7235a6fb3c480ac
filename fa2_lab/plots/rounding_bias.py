"""Plots of rounding errors that share a sign: their distribution between two bf16 numbers, and their sum in D."""

import numpy as np

from fa2_lab.examine.cases import rounded
from fa2_lab.machine import rounding
from fa2_lab.plots import style

ROWS_PER_POINT = 16  # number of rows between two points of a line
# The edges of the bins in ulps. The bins contain −½, −¼, 0, ¼ and ½.
BINS = np.array([-0.5, -0.375, -0.125, 0.125, 0.375, 0.5])


def data() -> dict:
    """Return the distribution of the rounding errors of o in column 0, and the running sum of D's errors over the rows.

    The errors of o are in units of the spacing between bf16 numbers.
    """
    S, V, dO = rounding.repeated_maxima()
    exact, m = rounding.exact_outputs(S, V), S.max(1, keepdims=True)
    shares = {}
    for name, at in (("m", m), ("2m", 2 * m)):
        o = np.einsum("rk,rk->r", rounded(np.exp(S - at), rounding.BF16), V[..., 0])
        step = 2.0 ** (np.frexp(o)[1] - rounding.BF16)
        counts, _ = np.histogram((rounded(o, rounding.BF16) - o) / step, BINS)
        shares[name] = counts / len(o)
    ways = {"sums in bf16": (m, rounding.BF16), "the same, with 2m": (2 * m, rounding.BF16)}
    ways["sums in fp32"] = m, rounding.FP32
    sums = {name: np.cumsum((dO * (rounding.rounded_outputs(S, V, *way) - exact)).sum(1)) for name, way in ways.items()}
    return dict(shares=shares, sums=sums)


@style.picture
def draw(shares: dict[str, np.ndarray], sums: dict[str, np.ndarray]) -> style.Drawn:
    """Draw two histograms of the rounding errors of o, and the running sum of D's errors for each way to compute O.

    `shares` is {name: fraction of the rows in each bin}, and `sums` is {way to compute O: running sum}.
    """
    ends = {name: line[-1] for name, line in sums.items()}
    caption = (
        "If two scores share the maximum, exp(s\u00a0−\u00a0m) errs mostly downwards, and the errors add up. The usual"
        " softmax computes exp(s − m). With 2m instead of m, O is mathematically the same, but its largest p differs"
        " from row to row. On the left, the errors of rounding o to bf16. Each pair of bars counts the rows whose"
        " error is near its value. On the right, the sum of the errors of D over the rows. All numbers are simulated"
        " in NumPy."
    )
    figure, axes = style.new_stacked_figure(2.9, caption, ncols=2)
    errors, lines = axes[0]
    looks = dict(m=dict(color=style.INK), **{"2m": dict(facecolor=style.PAPER, edgecolor=style.OURS, linewidth=1.6)})
    places, top = np.arange(len(BINS) - 1), shares["m"].max()
    for n, (name, share) in enumerate(shares.items()):
        bar_group = errors.bar(places + 0.42 * (n - 0.5), share, width=0.38, **looks[name])
        color, weight = (style.INK, "bold") if name == "m" else (style.OURS, "normal")
        words = [f"{part:.0%}" for part in share]
        errors.bar_label(bar_group, words, padding=2, fontsize=style.SMALL, color=color, fontweight=weight)
    errors.set(xlabel="error of o, in steps of bf16", yticks=[], ylim=(0, 1.32 * top))
    errors.set_xticks(places, labels=["−½", "−¼", "0", "¼", "½"])
    errors.spines["left"].set_visible(False)
    errors.set_title("two scores share the maximum")
    style.note(errors, 4.4, 1.26 * top, "exp(s − m): often −½, never ½", ha="right", weight="bold")
    style.note(errors, 4.4, 1.15 * top, "exp(s − 2m): both signs", ha="right", color=style.OURS)
    lines.set_title("so errors in D add up")
    lined = ((style.INK, "-", 2.6), (style.OURS, "-", 1), (style.QUIET, style.DASHED, 1))
    rows = len(next(iter(sums.values())))
    for line, (color, dashes, thick) in zip(sums.values(), lined, strict=True):
        lines.plot(
            np.arange(1, rows + 1)[::ROWS_PER_POINT],
            line[::ROWS_PER_POINT],
            color=color,
            linestyle=dashes,
            linewidth=thick,
        )
    lines.set(xlabel="rows", ylabel="sum of the errors of D", xlim=(0, rows * 1.02))
    lines.set_xticks(range(0, rows, 1000))
    biased, fixed, exact = sums
    top = ends[biased]
    style.note(lines, 0.5 * rows, 0.68 * top, f"exp(s − m),\n{biased}", ha="right", weight="bold")
    style.note(lines, rows, 0.15 * top, f"exp(s − m), {exact}", ha="right", color=style.QUIET)
    style.note(lines, 0.5 * rows, min(sums[fixed]) - 0.07 * top, "exp(s − 2m), in bf16", ha="right", color=style.OURS)
    lines.set_ylim(min(sums[fixed]) - 0.14 * top, 1.05 * top)
    alt = (
        "On the left, bars for the errors of one rounding: relative to m, they are piled up at −½ of a step"
        f" ({shares['m'][0]:.0%} of the rows) and at 0 ({shares['m'][2]:.0%}), with none at ½. Relative to 2m, they are"
        f" spread evenly from −½ to ½. On the right, the sum of the errors of D over {rows:,} rows: "
        + "; ".join(f"{name} {end:+.2f} in the end" for name, end in ends.items())
        + ". The first is a straight line, and the others stay near 0."
    )
    return figure, alt
