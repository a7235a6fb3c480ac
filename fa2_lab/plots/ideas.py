"""What each idea for the Hopper kernels was worth: bars around 1, the ones that did not help among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fa2_lab.plots import style

CUT = 1.5  # bars end here, or the small ones could not be told apart


@style.picture
def ideas(part: str, rows: Sequence[dict], setting: str) -> tuple[Figure, str]:
    """The ideas for one part. rows: idea, shape, low and high (speed with it over speed without), kept."""
    figure, ax = style.new_figure(
        0.9 + 0.38 * len(rows), f"The {len(rows)} ideas that change most in the {part}, for better or worse"
    )
    low, high = min(0.9, *(r["low"] for r in rows)), min(CUT, max(r["high"] for r in rows))
    for lane, row in enumerate(rows):
        bar(ax, lane, row)
    left, reach = low - 0.02, high + 0.16 - low
    for lane, row in enumerate(rows):
        words = f"{row['idea']}\n{row['shape']}"
        ax.text(left, lane + 0.45, words, ha="right", va="center", fontsize=style.SMALL)
    ax.axvline(1, color=style.INK, linewidth=0.8)
    ax.set(ylim=(len(rows), 0), xlim=(left - 0.6 * reach, high + 0.16), yticks=[])
    ax.set_xticks([tick for tick in np.arange(0.6, high + 0.05, 0.2).round(1) if tick >= low - 0.05])
    ax.spines[:].set_visible(False)
    ax.set_xlabel(f"speed with it over speed without; hatched: not kept ({setting})")
    kept, dropped = ([r for r in rows if r["kept"] == is_kept] for is_kept in (True, False))
    best = max(rows, key=lambda r: r["high"])
    alt = (
        f"A bar chart of {len(rows)} ideas for the {part}: speed with the idea over speed without it ({setting})."
        f" {len(kept)} were kept, {len(dropped)} were not, hatched. The largest gain: {best['idea']}, {span(best)}."
        f" Not kept: {'; '.join(row['idea'] + ' ' + span(row) for row in dropped)}."
    )
    return figure, alt[:900]


def bar(ax, lane: int, row: dict) -> None:
    """From the lowest to the highest factor, tied to 1, with both in figures."""
    end, middle = min(CUT, row["high"]), lane + 0.45
    fill, hatch = (style.tint(style.INK, 0.65), None) if row["kept"] else (style.PAPER, style.SPLIT_HATCH)
    gid = "kept" if row["kept"] else "not kept"
    style.box(ax, row["low"], lane + 0.2, max(end - row["low"], 0.004), 0.5, "", fill, hatch=hatch, gid=gid)
    nearest = min(max(1, row["low"]), end)
    ax.plot([1, nearest], [middle] * 2, color=style.INK, linewidth=1.2, solid_capstyle="butt")
    if row["high"] > CUT:
        ax.plot([CUT], [middle], marker=">", color=style.INK, gid="cut")
    ax.text(max(end, 1) + 0.012, middle, span(row), va="center", fontsize=style.SMALL)


def span(row: dict) -> str:
    """From where to where, as a text."""
    low, high = f"{row['low']:.2f}", f"{row['high']:.2f}"
    return f"× {low}" if low == high else f"× {low} to {high}"
