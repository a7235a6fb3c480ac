"""Softmax three ways on one row: where it overflows, how well it rounds, and its state while keys stream past."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style

METHODS = {"unsafe": (style.INK, "--"), "safe": (style.hue("P"), "-"), "online": (style.hue("m"), "-")}


@style.picture
def three_softmaxes(row: dict, scales: np.ndarray, errors: dict[str, dict[str, np.ndarray]]) -> tuple[Figure, str]:
    """One row of scores through three softmaxes number by number, and beneath it their errors over the logits' scale.

    row: s, unsafe_e, unsafe_p, safe_e, safe_p, online_p (all (N,)), sums, m, l, alpha (one for each block), dtype;
    errors: {dtype: {"unsafe", "safe", "online": largest error at each scale, NaN where the result is not finite}}.
    """
    title = "Subtract the row's maximum, or a running one, and no exponential overflows"
    figure, axes = style.new_figure(6.4, title, nrows=2, ncols=len(errors), height_ratios=[1.5, 1], sharey="row")
    for ax in axes[0]:
        ax.remove()
    _row(figure.add_subplot(axes[0][0].get_gridspec()[0, :]), row)
    for ax, (dtype, curves) in zip(axes[1], errors.items(), strict=True):
        _errors(ax, dtype, scales, curves)
    lowest = min(np.nanmin(c["safe"]) for c in errors.values())
    axes[1][0].set(ylabel="Σ |error of p|, worst row", ylim=(lowest / 40, 0.3))
    ends = "; ".join(f"{dtype} at {scales[_last(c['unsafe'])]:.1f}" for dtype, c in errors.items())
    alt = (
        f"{len(row['s'])} scores up to {row['s'].max():g} in {row['dtype']}: exp(s) overflows to inf, its sum too, and"
        f" p becomes 0 and NaN. With the maximum subtracted every number is at most 1 and the sum is"
        f" {row['safe_e'].sum():.3g}; online softmax reaches the same sum block by block with a running maximum."
        f" Beneath, the error of p over the scale of random scores: the unsafe curve ends where it overflows ({ends});"
        f" the safe and, a little above it, the online curve go on flat."
    )
    return figure, alt


def _row(ax: Axes, row: dict) -> None:
    N, blocks = len(row["s"]), len(row["m"])
    pink, sky = style.tint(style.hue("P")), style.tint(style.hue("m"))
    lines = [
        (0.0, "scores s", row["s"], ""),
        (1.4, "unsafe   exp(s)", row["unsafe_e"], _number(row["sums"]["unsafe"])),
        (2.4, "p", row["unsafe_p"], ""),
        (3.8, "safe   exp(s − m)", row["safe_e"], _number(row["sums"]["safe"])),
        (4.8, "p", row["safe_p"], ""),
        (8.1, "p", row["online_p"], ""),
    ]
    for y, name, values, total in lines:
        _numbers(ax, y, name, values, pink)
        if total:
            style.box(ax, N + 0.3, y, 1.1, 0.9, total, style.INK if total == "inf" else style.PAPER)
    for b in range(blocks):
        text = f"m = {row['m'][b]:g}\nα = {_number(row['alpha'][b])}\nl = {_number(row['l'][b])}"
        style.box(ax, b * N / blocks, 6.2, N / blocks, 1.8, text, sky)
    style.box(ax, N + 0.3, 6.2, 1.1, 1.8, _number(row["l"][-1]), style.PAPER)
    ax.text(-0.15, 7.1, f"online   blocks of {N // blocks}", ha="right", va="center")
    ax.text(N + 0.85, 0.45, "sum", ha="center", va="center", color=style.QUIET)
    ax.set(xlim=(-2.1, N + 1.5), ylim=(9.1, -0.1), xticks=[], yticks=[])
    ax.set_title(f"One row in {row['dtype']}, every operation rounded to it")
    ax.spines[:].set_visible(False)


def _numbers(ax: Axes, y: float, name: str, values: np.ndarray, fill: str) -> None:
    ax.text(-0.15, y + 0.45, name, ha="right", va="center")
    for x, value in enumerate(values):
        style.box(ax, x, y, 1, 0.9, _number(value), fill if np.isfinite(value) else style.INK)


def _number(x: float) -> str:
    if not np.isfinite(x):
        return "NaN" if np.isnan(x) else "inf"
    if x == 0 or 0.01 <= x < 1000:
        return f"{x:.3g}"
    return f"{x:,.0f}" if x >= 1000 else f"{x:.0e}".replace("e-0", "e−").replace("e-", "e−")


def _errors(ax: Axes, dtype: str, scales: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    for name in ("safe", "online", "unsafe"):
        color, dash = METHODS[name]
        ax.loglog(scales, curves[name], color=color, linestyle=dash, linewidth=2.6 if name == "safe" else 1.4)
    end = _last(curves["unsafe"])
    ax.plot(scales[end], curves["unsafe"][end], "x", color=style.INK, markersize=7, markeredgewidth=2)
    below = 0.5 * np.nanmin([curves["safe"], curves["unsafe"]])
    overflow = f"unsafe: not finite\nfrom {scales[end + 1]:.1f} on"
    ax.text(scales[0], 1.6 * curves["online"].max(), "online", va="bottom", fontsize=style.SMALL)
    ax.text(scales[-1], below, "safe", ha="right", va="top", fontsize=style.SMALL)
    ax.text(1.5 * scales[end], below, overflow, ha="right", va="top", fontsize=style.SMALL)
    ax.set_title(dtype)
    ax.set_xlabel("scale of the scores")


def _last(curve: np.ndarray) -> int:
    return int(np.flatnonzero(np.isfinite(curve))[-1])
