"""Tweak 1 as a timeline: FA1's and FA2's arithmetic in one pass through the inner loop, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips
from fa2_lab.plots import style
from fa2_lab.reference import fa1, fa2
from fa2_lab.trace import Operation, Trace

# Data -----------------------------------------------------------------------------------------------------------


ONLY_FA1 = "scale p v"
FREE = ("× τ", "+")  # no clocks: × τ is part of the FMA of τ s − m, and the sum into o part of the product's


def data(B_r: int = 128, B_c: int = 64, d: int = 128, chip: chips.Chip = chips.A100) -> dict:
    """The arithmetic of one tile of FA1 and FA2, and of FA2's end of a row block, in order and in clocks of one SM."""
    logs = [operations(stage, B_r, B_c, d, j) for stage, j in ((fa1, 1), (fa2, 1), (fa2, None))]
    tile_1, tile_2, end = ([step(*named, chip) for named in log if named[0] not in FREE] for log in logs)
    setting = f"Tile {B_r} × {B_c}, d = {d}, one SM of {chip.name}"
    return dict(loops={"FA1": tile_1, "FA2": tile_2}, end=end, setting=setting)


def operations(stage, B_r: int, B_c: int, d: int, j: int | None) -> list[tuple[str, str, Operation]]:
    """(name, tensor whose hue it takes, operation) of the first row block in column block j, in the order they ran."""
    if d == B_c:
        raise ValueError(f"d: got {d}; it takes another number than B_c, or a tile could not be told from its rows")
    Q, K, V = (np.random.default_rng(0).standard_normal((n, d)) for n in (B_r, 2 * B_c, 2 * B_c))
    trace = Trace()
    stage.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=trace)
    ran = [s for s in trace.steps if isinstance(s, Operation) and s.j == j]
    return [(*name(s, trace.steps, (B_r, B_c), (B_r, d)), s) for s in ran]


def name(s: Operation, steps: list, tile: tuple, rows: tuple) -> tuple[str, str]:
    """What an operation is for, told by what it makes and from what: a tile of S or P, rows of O, or a number a row."""
    of_product = any(getattr(steps[n], "kind", "") == "matmul" for n in s.operands)
    return {
        ("matmul", tile): ("q kᵀ", "S"),
        ("multiply", tile): ("× τ", "S"),
        ("add", tile): ("τs − m", "S"),
        ("exp", tile): ("exp", "P"),
        ("matmul", rows): ("p v", "O"),
        ("multiply", rows): (ONLY_FA1, "O") if of_product else ("scale o", "O"),
        ("add", rows): ("+", "O"),
    }.get((s.kind, s.shape)) or (
        {"maximum": ("max", "m"), "add": ("Σ", "l")}[s.kind] if s.operations > tile[0] else ("", "m")
    )


def step(name: str, tensor: str, ran: Operation, chip: chips.Chip) -> Step:
    """An operation with the clocks that it takes on one SM."""
    rate = {"matmul": chip.tensor_per_clock, "exp": chip.exp_per_clock}.get(ran.kind, chip.fp32_per_clock)
    return Step(name, tensor, ran.operations / rate)


# Drawing --------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One operation of the inner loop, or of the end of a row block, in the order it ran."""

    name: str  # "" for the few operations on m, l and α: one for each row, too short for a label
    tensor: str  # whose hue it takes
    clocks: float


@style.picture
def draw(loops: dict[str, Sequence[Step]], end: Sequence[Step], setting: str) -> tuple[Figure, str]:
    """Two rows of boxes on one time axis; what FA2 left out stands outlined at its end, what it does once beneath.

    loops: {"FA1", "FA2": steps of one tile}; end: FA2's steps after the last tile.
    """
    title = "One division per row instead of one per tile, and one scaling of o instead of two"
    figure, ax = style.new_figure(2.9, title)
    total = {name: sum(s.clocks for s in steps) for name, steps in loops.items()}
    gone = next(s for s in loops["FA1"] if s.name == ONLY_FA1)
    for y, (name, steps) in enumerate(loops.items()):
        stop = _boxes(ax, 0, y, steps)
        ax.text(-20, y + 0.3, f"{name}\n{total[name]:,.0f}", ha="right", va="center")
    _vanished(ax, stop, 1, gone, total["FA1"] - total["FA2"] - gone.clocks)
    _rows_note(ax, loops["FA1"])
    _boxes(ax, 0, 2, end)
    ax.text(-20, 2.3, f"FA2, once\n{sum(s.clocks for s in end):,.0f}", ha="right", va="center")
    _axes(ax, total["FA1"], setting)
    saved = 1 - total["FA2"] / total["FA1"]
    alt = (
        f"Two rows of boxes on one time axis: FA1's inner loop takes {total['FA1']:,.0f} clocks, FA2's"
        f" {total['FA2']:,.0f}, {saved:.0%} less. Both start with q kᵀ and go on to max, exp, sum, scaling o and p v;"
        f" FA1 then scales p v as well and divides by l. These boxes are outlined at the end of FA2's row. A third row"
        f" shows what FA2 does once after the last tile: one division and one scaling of o. {setting}."
    )
    return figure, alt


def _boxes(ax: Axes, x: float, y: float, steps: Sequence[Step]) -> float:
    for step in steps:
        fill = style.fill(step.tensor) if step.name else style.hue(step.tensor)
        edge = dict(linewidth=2.0, zorder=3) if step.name == ONLY_FA1 else dict(linewidth=0.8 if step.name else 0)
        _box(ax, x, y, step.clocks, step.name, fill, **edge)
        x += step.clocks
    return x


def _box(ax: Axes, x: float, y: float, width: float, name: str, fill: str, **look) -> None:
    """A box with its name, upright where the box is narrow."""
    label = name.replace(" ", "\n", 1) if 200 < width < 400 else name
    patch = style.box(ax, x, y, width, 0.62, label, fill, **look)
    if len(name) > 1 and width < 200:
        patch.label_text.set_rotation(90)


def _vanished(ax: Axes, x: float, y: float, gone: Step, small: float) -> None:
    """Outlines of what FA2 does not do, where its row ends: one step, then all small ones as one."""
    outline = dict(linestyle=(0, (2, 1.5)), linewidth=1.2)
    _box(ax, x, y, gone.clocks, gone.name, style.PAPER, **outline)
    x += gone.clocks
    _box(ax, x, y, small, "", style.PAPER, **outline)
    note = "gone: scaling p v, and\n÷ l with its factors"
    ax.annotate(
        note, (x + small / 2, y + 0.62), (x + small, y + 1.3), ha="right", va="center", arrowprops=dict(arrowstyle="-")
    )


def _rows_note(ax: Axes, steps: Sequence[Step]) -> None:
    """What the unnamed steps between the named ones are, pointed at where they are widest: before o is scaled."""
    names = [step.name for step in steps]
    last = names.index("scale o")  # before it lies the widest run of unnamed steps
    first = max(k for k in range(last) if names[k]) + 1
    begin, end = (sum(step.clocks for step in steps[:k]) for k in (first, last))
    x = (begin + end) / 2
    where, arrow = dict(ha="left", va="center", fontsize=style.SMALL), dict(arrowstyle="-", shrinkB=0)
    ax.annotate("m, l and factors, one per row; ÷ l", (x, 0), (x + 45, -0.27), arrowprops=arrow, **where)


def _axes(ax: Axes, longest: float, setting: str) -> None:
    ax.set(xlim=(-330, longest + 15), ylim=(2.7, -0.4), yticks=[], xticks=range(0, int(longest), 500))
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_bounds(0, longest)
    ax.set_xlabel(f"clocks if every operation waits for the one before. {setting}", fontsize=style.SMALL)
