"""When each program of decode ends, over the SM that it ran on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.figure import Figure

from fa2_lab.plots import style
from fa2_lab.records import load

# Data -----------------------------------------------------------------------------------------------------------


def data() -> dict:
    """The recorded clocks: when each of the programs that read a whole head has ended, and its SM."""
    record = load("ends")
    SM, ended = ([*record.curves[name]] for name in ("SM", "ended"))
    setting = f"{record.made()}; 32 × 8,192 keys, 32 query heads, 8 K/V heads, d = 128"
    return dict(SM=[int(x) for x in SM], ended=ended, setting=setting)


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(SM: Sequence[int], ended: Sequence[float], setting: str) -> tuple[Figure, str]:
    """When each program has ended, over the SM that it ran on."""
    first, half, last = min(ended), median(ended), max(ended)
    title = f"The same bytes for each: the last program ends {last / first - 1:.0%} after the first"
    figure, ax = style.new_figure(2.9, title)
    ax.plot(SM, ended, color=style.INK, marker="o", markersize=2.8, linestyle="none")
    ax.axhline(half, color=style.QUIET, linewidth=0.8)
    ax.text(max(SM) + 1, half, f" half of them\n by {half:.0f} µs", va="center", ha="left", color=style.QUIET)
    margin = 0.15 * (last - first)
    ax.set(xlim=(-2, max(SM) + 1), ylim=(first - margin, last + margin), ylabel="a program ends, µs")
    ax.set_xlabel(f"SM\n{setting}")
    alt = (
        f"A dot for each of {len(ended)} programs over the number of its SM: they end between {first:.0f} and"
        f" {last:.0f} µs, half of them by {half:.0f}. {setting}."
    )
    return figure, alt
