"""What each idea for the Hopper kernels was worth: bars around 1, the ones that did not help among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fa2_lab.plots import style


@style.picture
def ideas(part: str, rows: Sequence[dict], setting: str) -> tuple[Figure, str]:
    """The ideas for one part. rows: idea, shape, low and high (speed with it over speed without), kept."""
    figure, ax = style.new_figure(
        0.9 + 0.34 * len(rows), f"What each idea for the {part} bought, and what did not help"
    )
    low, high = min(0.9, *(r["low"] for r in rows)), max(r["high"] for r in rows)
    for lane, row in enumerate(rows):
        width = max(row["high"] - row["low"], 0.004)
        fill = style.tint(style.INK, 0.65) if row["kept"] else style.PAPER
        hatch = None if row["kept"] else style.SPLIT_HATCH
        style.box(
            ax, row["low"], lane + 0.2, width, 0.5, "", fill, hatch=hatch, gid="kept" if row["kept"] else "not kept"
        )
        nearest = min(max(1, row["low"]), row["high"])
        ax.plot([1, nearest], [lane + 0.45] * 2, color=style.INK, linewidth=1.2, solid_capstyle="butt")
        ax.text(max(row["high"], 1) + 0.012, lane + 0.45, span(row), va="center", fontsize=style.SMALL)
    left, reach = low - 0.02, high + 0.16 - low
    for lane, row in enumerate(rows):
        words = f"{row['idea']}\n{row['shape']}"
        ax.text(left, lane + 0.45, words, ha="right", va="center", fontsize=style.SMALL)
    ax.axvline(1, color=style.INK, linewidth=0.8)
    ax.set(ylim=(len(rows), 0), xlim=(left - 0.56 * reach, high + 0.16), yticks=[])
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


def span(row: dict) -> str:
    """From where to where, as a text."""
    low, high = f"{row['low']:.3g}", f"{row['high']:.3g}"
    return f"× {low}" if low == high else f"× {low} to {high}"
