"""The ladder as one picture: what each stage of the book changes, and what becomes smaller by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style

RAILS, TEXT, BARS, BAR, END = (0.1, 0.62), 0.82, 3.42, 1.95, style.WIDTH - 0.1  # inches from the left
NEUTRAL = style.tint(style.INK, 0.45)


@dataclass(frozen=True)
class Rung:
    """One change. Amounts are by tensor where tensors are moved or kept, else under the name ""."""

    chapter: str
    name: str
    change: str
    unit: str
    before: Mapping[str, float]
    after: Mapping[str, float] | None = None  # None: the rung all others start from

    @property
    def factor(self) -> float:
        """How many times less there is afterwards."""
        return sum(self.before.values()) / sum(self.after.values())


@style.picture
def ladder(rungs: Sequence[Rung], above: tuple[str, str, str], setting: str) -> tuple[Figure, str]:
    """A rung for each change, from top to bottom: what changes, and two bars, before and after.

    above: (chapters, name, what they do) of the part of the book that adds no change of its own.
    """
    title = "The same result on every rung; each makes one thing smaller"
    figure, ax = style.new_figure(0.56 * (len(rungs) + 1) + 0.6, title)
    for y, rung in enumerate(rungs):
        _label(ax, y, rung.chapter, rung.name, rung.change)
        _bars(ax, y, rung)
    _label(ax, len(rungs), *above)
    bottom = len(rungs) + 1
    for x in RAILS:
        ax.plot([x, x], [0, bottom], color=style.INK, linewidth=2.2, zorder=0, solid_capstyle="round")
    ax.set(xlim=(0, END), ylim=(bottom + 0.05, -0.05), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_xlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    told = "; ".join(f"{r.name}: {r.unit} ÷ {times(r.factor)}" for r in rungs if r.after)
    alt = f"A ladder with a rung for each change and two bars beside it, before and after. {told}. {setting}."
    return figure, alt


def _label(ax: Axes, y: int, chapter: str, name: str, change: str) -> None:
    left, right = RAILS
    style.box(ax, left, y + 0.2, right - left, 0.6, chapter, style.tint(style.INK, 0.1), size=style.NORMAL)
    ax.text(TEXT, y + 0.31, name, va="center", fontweight="bold")
    ax.text(TEXT, y + 0.71, change, va="center", fontsize=style.SMALL)


def _bars(ax: Axes, y: int, rung: Rung) -> None:
    """Before above after, both to the scale of the first, then the factor and what is counted."""
    whole = sum(rung.before.values())
    for top, amounts in ((0.15, rung.before), (0.52, rung.after)):
        if amounts:
            height = 0.33 if rung.after else 0.7
            _bar(ax, y + top, height, {name: BAR * n / whole for name, n in amounts.items()})
            share, total = sum(amounts.values()) / whole, sum(amounts.values())
            ax.text(BARS + BAR * share + 0.06, y + top + height / 2, amount(total), va="center", fontsize=style.SMALL)
    right = BARS + BAR + 0.62
    if rung.after:
        ax.text(right, y + 0.31, f"÷ {times(rung.factor)}", va="center", fontweight="bold")
    ax.text(right, y + 0.71, rung.unit, va="center", fontsize=style.SMALL, color=style.QUIET)


def _bar(ax: Axes, y: float, height: float, widths: Mapping[str, float]) -> None:
    """One bar, a part for each tensor; parts too narrow for their letter go without."""
    x = BARS
    for tensor, width in widths.items():
        fill = style.tint(style.hue(tensor), 0.55) if tensor else NEUTRAL
        label = tensor if width > 0.09 * len(tensor) + 0.05 else ""
        edge = 0.5 if label or width > 0.05 else 0  # a sliver is all edge
        style.box(ax, x, y, width, height, label, fill, linewidth=edge, gid="amount")
        x += width


def amount(n: float) -> str:
    """A count with its thousands as k and M; a share as per cent."""
    if isinstance(n, float):
        return f"{n:.0%}"
    for unit, letter in ((10**6, "M"), (10**4, "k")):
        if n >= unit:
            return f"{n / (unit if letter == 'M' else 1000):.3g}{letter}"
    return f"{n:,}"


def times(factor: float) -> str:
    """A factor with two digits that matter, or whole."""
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
