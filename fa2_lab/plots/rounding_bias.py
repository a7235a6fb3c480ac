"""A picture of rounding errors with the same sign: their distribution between two bf16 numbers, and their sum in D."""

import numpy as np

from fa2_lab.examine.cases import rounded
from fa2_lab.machine import numbers
from fa2_lab.plots import style

BINS = np.linspace(-0.5125, 0.5125, 42)  # of an ulp, with a bin around each of −½, 0 and ½


def data() -> dict:
    """Return the distribution of o's rounding errors in column 0, and the running sum of D's errors over the rows.

    The errors of o are counted in steps of bf16.
    """
    S, V, dO = numbers.repeated_maxima()
    exact, m = numbers.truth(S, V), S.max(1, keepdims=True)
    shares = {}
    for name, at in (("m", m), ("2m", 2 * m)):
        o = np.einsum("rk,rk->r", rounded(np.exp(S - at), numbers.BF16), V[..., 0])
        step = 2.0 ** (np.frexp(o)[1] - numbers.BF16)
        found, _ = np.histogram((rounded(o, numbers.BF16) - o) / step, BINS)
        shares[name] = found / len(o)
    ways = {"sums in bf16": (m, numbers.BF16), "the same, with 2m": (2 * m, numbers.BF16)}
    ways["sums in fp32"] = m, numbers.FP32
    sums = {name: np.cumsum((dO * (numbers.outputs(S, V, *way) - exact)).sum(1)) for name, way in ways.items()}
    return dict(shares=shares, sums=sums)


@style.picture
def draw(shares: dict[str, np.ndarray], sums: dict[str, np.ndarray]) -> style.Drawn:
    """Draw two histograms of the error of one rounding, and the running sum of D's errors for each way to compute O.

    `shares` is {name: share of the rows in each bin}, and `sums` is {way to compute O: running sum}.
    """
    ends = {name: line[-1] for name, line in sums.items()}
    caption = (
        "If two scores share the maximum, rounding errors do not cancel. The usual softmax computes exp(s − m). With 2m"
        " instead of m, O is mathematically the same, but its largest p differs from row to row. On the left, the"
        " error of rounding o to bf16, in steps of bf16, over all rows. On the right, the sum of the errors of D over"
        " the rows. All numbers are simulated in NumPy."
    )
    figure, axes = style.stacked(2.9, caption, ncols=2)
    errors, lines = axes[0]
    middles = (BINS[1:] + BINS[:-1]) / 2
    errors.bar(middles, shares["m"], width=0.025, color=style.INK)
    errors.plot(middles, shares["2m"], color=style.OURS, linewidth=1)
    errors.set(xlabel="error of o, in steps of bf16", ylabel="share of the rows", xlim=(-0.68, 0.68))
    errors.set_xticks([-0.5, -0.25, 0, 0.25, 0.5], labels=["−½", "−¼", "0", "¼", "½"])
    near = [shares["m"][abs(middles + x) < 0.06].sum() for x in (0.5, 0)]
    top = shares["m"].max()
    errors.set_ylim(0, 1.3 * top)
    errors.set_title("one error: mostly −½ or 0, never ½")
    for x, share in zip((-0.5, 0), near, strict=True):
        style.note(errors, x, 1.06 * top, f"{share:.0%} of\nthe rows", ha="center", va="bottom", weight="bold")
    style.note(errors, 0.42, 0.62 * top, "no row\nat ½", ha="center", va="bottom", weight="bold")
    style.arrow(errors, (0.42, 0.58 * top), (0.5, 0.1 * top))
    style.note(errors, -0.25, 0.14 * top, "with 2m:\neven", ha="center", va="bottom", color=style.OURS)
    lines.set_title("their sum in D: it grows")
    looks = ((style.INK, "-", 2.6), (style.OURS, "-", 1), (style.QUIET, style.DASHED, 1))
    rows = len(next(iter(sums.values())))
    for line, (color, dashes, thick) in zip(sums.values(), looks, strict=True):
        lines.plot(np.arange(1, rows + 1), line, color=color, linestyle=dashes, linewidth=thick)
    lines.set(xlabel="rows", ylabel="sum of the errors of D", xlim=(0, rows * 1.02))
    lines.set_xticks(range(0, rows, 1000))
    biased, fixed, exact = sums
    top = ends[biased]
    style.note(lines, 0.5 * rows, 0.68 * top, f"exp(s − m),\n{biased}", ha="right", weight="bold")
    style.note(lines, rows, 0.15 * top, f"exp(s − m), {exact}", ha="right", color=style.QUIET)
    style.note(lines, 0.5 * rows, min(sums[fixed]) - 0.07 * top, "exp(s − 2m), in bf16", ha="right", color=style.OURS)
    lines.set_ylim(min(sums[fixed]) - 0.14 * top, 1.05 * top)
    alt = (
        "On the left, the errors of one rounding: relative to m, they are piled up at −½ of a step"
        f" ({near[0]:.0%} of the rows) and at 0 ({near[1]:.0%}), and relative to 2m they are spread evenly from −½ to"
        f" ½. On the right, the sum of the errors of D over {rows:,} rows: "
        + "; ".join(f"{name} {end:+.2f} in the end" for name, end in ends.items())
        + ". The first is a straight line, and the others stay near 0."
    )
    return figure, alt
