"""Timeline of FA2's tweak 1: the arithmetic of one tile in FA1 and in FA2."""

from typing import NamedTuple

from fa2_lab.machine import chips, io_model, time_model
from fa2_lab.plots import climb, style


class Operation(NamedTuple):
    """One operation in the inner loop or at the end of a row block, with its duration in clock cycles."""

    name: str  # "" for the operations on m, l and α, which run once per row and are too short for a label
    tensor: str  # the tensor in whose colour the operation is drawn
    clocks: float


ONLY_FA1 = "p v ×β"


def data(B_r: int = 128, B_c: int = 64, d: int = 128, chip: chips.Chip = chips.A100) -> dict:
    """Return the operations on a tile in FA1 and FA2, and those after FA2's loop, each with its clock cycles on one SM.

    Two operations are not listed: the multiplication by τ is part of the FMA that computes τ s − m, and the addition to
    o is part of the matmul.
    """
    product = 2 * B_r * B_c * d / chip.tensor_flops_per_clock
    of_tile, of_rows = B_r * B_c / chip.fp32_per_clock, B_r * d / chip.fp32_per_clock
    softmax = 3 * of_tile + B_r * B_c / chip.exp_per_clock  # clock cycles for the maximum, τ s − m, exp and the sum
    scores = [Operation("q kᵀ", "S", product), Operation("softmax", "P", softmax)]
    sums = [Operation("o ×α", "O", of_rows), Operation("p v", "O", product)]
    loops = {"FA1": [*scores, *sums, Operation(ONLY_FA1, "O", of_rows)], "FA2": [*scores, *sums]}
    at_once = {}  # {algorithm: clock cycles per tile if all units work concurrently}
    for algorithm, steps in loops.items():
        tile = time_model.tile_clocks(chip, B_r, B_c, d, algorithm=algorithm.lower())
        other_clocks = tile.tensor + tile.fp32 + tile.exp - sum(step.clocks for step in steps)
        steps.insert(len(scores), Operation("", "m", other_clocks))
        at_once[algorithm] = max(tile.tensor, tile.fp32, tile.exp)
    once = io_model.fa2_forward_end(B_r, d)
    other_clocks = (once.total() - once["multiply"]) / chip.fp32_per_clock
    end = [Operation("", "m", other_clocks), Operation("o ÷ℓ", "O", once["multiply"] / chip.fp32_per_clock)]
    setting = f"Tile {B_r} × {B_c}, d = {d}, one SM of {chip.name}"
    speed = {rung.number: rung.full for rung in climb.data()["rungs"]}
    return dict(loops=loops, end=end, at_once=at_once, setting=setting, measured=speed["05"] / speed["04"])


ROW_HEIGHT = 0.62


@style.picture
def draw(loops: dict[str, list], end: list, at_once: dict[str, float], setting: str, measured: float) -> style.Drawn:
    """Draw the operations on one tile in FA1 and FA2, and those after FA2's loop, on a shared time axis.

    `loops` is {"FA1" or "FA2": operations on one tile}, and `end` lists the operations after FA2's loop. The last row
    shows `at_once`, which is {"FA1" or "FA2": clock cycles that a tile takes if all units work concurrently}.
    """
    total = {name: sum(s.clocks for s in steps) for name, steps in loops.items()}
    saved = 1 - total["FA2"] / total["FA1"]
    caption = (
        f"If operations take turns, dividing once per row instead of once per tile saves {saved:.0%} of the clocks."
    )
    figure, ax = style.new_figure(
        3.5,
        f"{caption} If all units work at once, the number of clocks stays the same. A kernel may gain more than this"
        f" count shows, because the change also frees registers for more programs on an SM. {setting}.",
        f"rung 05 is {measured:.2f} times as fast as rung 04 on an H200, because a third program then fits on an SM",
    )
    for y, (name, steps) in enumerate(loops.items()):
        end_of_loop = _draw_operations(ax, y, steps)
        style.note(ax, 0, y - 0.15, f"{name}, each tile: {total[name]:,.0f} clocks", weight="bold")
    style.box(ax, end_of_loop, 1, total["FA1"] - end_of_loop, ROW_HEIGHT, "", linestyle=(0, (2, 1.5)), linewidth=1.2)
    gone = (total["FA1"] + end_of_loop) / 2
    style.arrow(ax, (gone, ROW_HEIGHT + 0.03), (gone, 0.97), linewidth=1.6)
    style.note(ax, gone - 60, 0.85, "not scaled", ha="right")
    last = sum(s.clocks for s in end)
    _draw_operations(ax, 2, end)
    style.note(ax, 0, 1.85, f"FA2, once per row block: {last:,.0f} clocks", weight="bold")
    style.note(ax, last + 40, 2 + ROW_HEIGHT / 2, "the only division")
    at_once_counts = sorted({f"{clocks:,.0f}" for clocks in at_once.values()})
    counts = " and ".join(at_once_counts)
    style.note(ax, 0, 2.85, f"FA1 and FA2, if all units work at once: {counts} clocks", weight="bold")
    style.box(ax, 0, 3, max(at_once.values()), ROW_HEIGHT, "the tensor cores", style.tensor_fill("S"))
    if len(at_once_counts) == 1:
        style.note(ax, max(at_once.values()) + 40, 3 + ROW_HEIGHT / 2, "nothing is saved")
    ticks = range(0, int(total["FA1"]), 1000)
    style.strip_axes(ax, (-15, total["FA1"] + 15), (-0.3, 3.7), xticks=ticks, xlabel="clocks →")
    alt = (
        f"Two rows of boxes on a time axis: FA1's inner loop takes {total['FA1']:,.0f} clocks, FA2's"
        f" {total['FA2']:,.0f}, {saved:.0%} less. FA1 scales p v as well and divides by l; this is a dashed, empty"
        f" box at the end of FA2's row. A third row has what FA2 does once after the last tile: one division and one"
        f" scaling of o. The last row shows a tile's clocks in FA1 and in FA2 if all units work at once: {counts}."
    )
    return figure, alt


def _draw_operations(ax: style.Axes, y: float, steps: list[Operation]) -> float:
    x = 0.0
    for step in steps:
        fill = style.tensor_fill(step.tensor) if step.name else style.hue(step.tensor)
        edge = dict(linewidth=2.4, zorder=3) if step.name == ONLY_FA1 else dict(linewidth=0.8 if step.name else 0)
        slim = step.clocks < 420
        words = step.name.split()[-1] if slim and style.is_narrow() and step.name else step.name
        words = "\n".join(words.rsplit(" ", 1)) if slim else words
        style.box(ax, x, y, step.clocks, ROW_HEIGHT, words, fill, **edge)
        x += step.clocks
    return x
