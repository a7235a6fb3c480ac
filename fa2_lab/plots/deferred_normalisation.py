"""Tweak 1: FA1's and FA2's arithmetic of one tile as a timeline."""

from typing import Any, NamedTuple

import numpy as np

from fa2_lab.machine import chips
from fa2_lab.plots import style
from fa2_lab.reference import fa1, fa2
from fa2_lab.trace import Operation, Trace


class Step(NamedTuple):
    """One operation of the inner loop, or of the end of a row block, in the order it ran."""

    name: str  # "" for the few operations on m, l and α: one for each row, too short for a label
    tensor: str  # whose hue it takes
    clocks: float


ONLY_FA1 = "scale p v"
FREE = ("× τ", "+")  # no clocks: × τ is part of the FMA of τ s − m, and the sum into o part of the product's


def data(B_r: int = 128, B_c: int = 64, d: int = 128, chip: chips.Chip = chips.A100) -> dict:
    """One tile of FA1 and of FA2, and FA2's end of a row block, in clocks of one SM."""
    logs = [operations(stage, B_r, B_c, d, j) for stage, j in ((fa1, 1), (fa2, 1), (fa2, None))]
    tile_1, tile_2, end = ([step(*named, chip) for named in log if named[0] not in FREE] for log in logs)
    setting = f"Tile {B_r} × {B_c}, d = {d}, one SM of {chip.name}"
    price = chip.tensor_per_clock / chip.fp32_per_clock
    return dict(price=price, loops={"FA1": tile_1, "FA2": tile_2}, end=end, setting=setting)


def operations(stage: Any, B_r: int, B_c: int, d: int, j: int | None) -> list[tuple[str, str, Operation]]:
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


HIGH = 0.62


@style.picture
def draw(price: float, loops: dict[str, list], end: list, setting: str) -> style.Drawn:
    """FA1's and FA2's steps of a tile on one time axis; what FA2 left out stands outlined at its end.

    price: matmul FLOPs that pass in an instruction of an FP32 unit; loops: {"FA1", "FA2": steps of one tile}; end:
    FA2's steps after the last tile, drawn beneath.
    """
    caption = "One division per row instead of one per tile, and one scaling of o instead of two: worth it, because an"
    caption += f" instruction on an FP32 unit takes the time of {price:g} matmul FLOPs. {setting}."
    figure, ax = style.new_figure(2.9, caption)
    total = {name: sum(s.clocks for s in steps) for name, steps in loops.items()}
    gone = next(s for s in loops["FA1"] if s.name == ONLY_FA1)
    for y, (name, steps) in enumerate(loops.items()):
        stop = _boxes(ax, y, steps)
        style.note(ax, -30, y + HIGH / 2, f"{name}\n{total[name]:,.0f}", ha="right")
    outline = dict(linestyle=(0, (2, 1.5)), linewidth=1.2)
    _box(ax, stop, 1, gone.clocks, "", style.PAPER, **outline)
    _box(ax, stop + gone.clocks, 1, total["FA1"] - total["FA2"] - gone.clocks, "", style.PAPER, **outline)
    style.note(ax, total["FA1"], 2 + HIGH / 2, "outlined: gone, scaling p v\nand ÷ l with its factors", ha="right")
    style.note(ax, 0, -0.2, "unnamed: m, l and their factors, one operation per row")
    _boxes(ax, 2, end)
    style.note(ax, -30, 2 + HIGH / 2, f"FA2, once\n{sum(s.clocks for s in end):,.0f}", ha="right")
    style.bare(ax, (-440, total["FA1"] + 15), (-0.4, 2.7), xticks=range(0, int(total["FA1"]), 1000))
    ax.set_title("Clocks of one tile, if every operation waits for the one before")
    saved = 1 - total["FA2"] / total["FA1"]
    alt = (
        f"Two rows of boxes on a time axis: FA1's inner loop takes {total['FA1']:,.0f} clocks, FA2's"
        f" {total['FA2']:,.0f}, {saved:.0%} less. FA1 scales p v as well and divides by l; these boxes are outlined at"
        f" the end of FA2's row. A third row has what FA2 does once after the last tile: one division and one scaling"
        f" of o."
    )
    return figure, alt


def _boxes(ax: style.Axes, y: float, steps: list[Step]) -> float:
    x = 0.0
    for step in steps:
        fill = style.fill(step.tensor) if step.name else style.hue(step.tensor)
        edge = dict(linewidth=2.0, zorder=3) if step.name == ONLY_FA1 else dict(linewidth=0.8 if step.name else 0)
        _box(ax, x, y, step.clocks, step.name, fill, **edge)
        x += step.clocks
    return x


def _box(ax: style.Axes, x: float, y: float, width: float, name: str, fill: str, **look: Any) -> None:
    """A box with its name, upright where the box is narrow."""
    patch = style.box(ax, x, y, width, HIGH, name.replace(" ", "\n", 1) if 200 < width < 400 else name, fill, **look)
    if len(name) > 1 and width < 200:
        patch.label_text.set_rotation(90)
