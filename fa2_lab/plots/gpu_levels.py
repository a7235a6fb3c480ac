"""Diagram of the nested levels of a GPU (SMs, thread blocks, warps and threads) and the memory of each level."""

import textwrap

from fa2_lab.machine import chips
from fa2_lab.plots import style


def data(name: str = "H200") -> dict:
    """Return a chip's levels from the outermost to the innermost, each as (level, description of its contents)."""
    chip = chips.find(name)
    kib = 4 * chip.registers_per_sm // 1024
    levels = [
        ("GPU", f"{chip.SMs} SMs; HBM, and an L2 of {chip.l2_bytes // 2**20} MiB for all of them"),
        ("SM", f"{chip.warps_per_sm} warps at most, as thread blocks; tensor cores; {kib} KiB of registers"),
        ("thread block", f"a few warps; shared memory, up to {chip.shared_per_block // 1024} KiB"),
        ("warp", "32 threads, which execute the same instruction together"),
        ("thread", f"its own numbers, in up to {chip.registers_per_thread} registers"),
    ]
    return dict(chip=chip.name, levels=levels)


@style.picture
def draw(chip: str, levels: list[tuple[str, str]]) -> style.Drawn:
    """Draw the levels as nested boxes. The first line of each box is the level's name and description."""
    caption = "A GPU has SMs, an SM runs thread blocks, a thread block has warps, and a warp has 32 threads."
    line = 0.62 if style.is_narrow() else 0.36
    figure, ax = style.new_figure(0.2 + (line + 0.09) * len(levels), f"{caption} The numbers are those of an {chip}.")
    wide, high = style.width_in_units() - 0.12, (line + 0.08) * len(levels)
    for n, (name, has) in enumerate(levels):
        inset = 0.09 * n
        place = (inset, n * line + 0.02, wide - 2 * inset, high - n * line - inset)
        style.box(ax, *place, fill=style.tint(style.INK, 0.04 + 0.05 * n), linewidth=0.9)
        y, x = n * line + 0.2, inset + 0.1
        style.note(ax, x, y, name, weight="bold")
        if style.is_narrow():
            style.note(ax, x, y + 0.1, textwrap.fill(has, 46 - 2 * n), va="top")
        else:
            style.note(ax, 1.15 + 0.09 * len(levels), y, has)
    style.strip_axes(ax, (-0.02, style.width_in_units() - 0.1), (-0.02, high + 0.06))
    return figure, f"Boxes in each other, from the outside in: {'; '.join(f'{name}: {has}' for name, has in levels)}."
