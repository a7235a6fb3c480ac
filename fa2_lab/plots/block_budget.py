"""Which block sizes fit: shared memory, registers, and on which chips."""

from fa2_lab.machine import budget, chips
from fa2_lab.plots import style
from fa2_lab.records import recorded

BLOCKS = (32, 64, 128, 256)


def data(stages: int = 2) -> dict:
    """What the forward needs at every block size and on which chips it fits; spills from figures/data/compiled.json.

    `stages` tiles of K and as many of V are in shared memory. Triton keeps num_stages of them on Hopper, and one fewer
    on older chips.
    """
    where = {"RTX 4090": chips.RTX_4090, "A100": chips.A100, "H100": chips.H100}
    cells = {d: _cells(where, d, stages) for d in (64, 128)}
    limits = {name: chip.shared_per_block for name, chip in where.items()}
    return dict(sizes=BLOCKS, stages=stages, cells=cells, limits=limits, compiled=compiled_spills())


def _cells(where: dict, d: int, stages: int) -> dict[tuple[int, int], dict]:
    """For each block size: its needs, and on which chips it fits with 4 or 8 warps (needs: as on the last chip)."""
    tables = {name: budget.table(chip, d, sizes=BLOCKS, stages=stages) for name, chip in where.items()}
    cells = {}
    for blocks, (W, fit) in list(tables.values())[-1].items():
        fits_on = tuple(name for name in where if tables[name][blocks][1].ok)
        needs = dict(shared=fit.shared_bytes, registers=fit.registers, warps=W, limit=fit.limit)
        cells[blocks] = needs | dict(fits_on=fits_on)
    return cells


def compiled_spills() -> dict[tuple[int, int, int], int]:
    """{(d, B_r, B_c): spill instructions} of the compiled forward, where it has been recorded."""
    rows = (recorded("compiled") or {}).get("forward", ())
    return {(row["d"], row["B_r"], row["B_c"]): row["spills"] for row in rows}


SHADES = (0.03, 0.2, 0.4, 0.75)  # of cells that fit on all chips, on all but one, …
VERDICTS = {"registers": "spills", "shared memory": "too large"}


@style.picture
def draw(sizes: tuple, stages: int, cells: dict, limits: dict[str, int], compiled: dict) -> style.Drawn:
    """A heatmap of block sizes for each d. A cell says what the forward needs; the fewer chips have it, the stronger
    its fill.

    cells: {d: {(B_r, B_c): dict(shared, registers, warps, limit, fits_on)}}. limits: {chip: bytes for one block}, the
    smallest first. compiled: {(d, B_r, B_c): spill instructions}, where somebody compiled it.
    """
    room = ", ".join(f"{size // 1024} KiB on {chip}" for chip, size in limits.items())
    caption = (
        "Fewer block sizes fit as d grows: registers spill, shared memory runs out. In a cell: registers a"
        f" thread (at most 255) and KiB of shared memory (at most {room}). The stronger the fill,"
        " the fewer of these have room."
    )
    caption += f" ×: spills when compiled for {list(limits)[-1]}." if compiled else ""
    caption += f" Forward, 16-bit, 4 warps (8 where 4 do not fit), room for {stages} tiles of K and {stages} of V"
    caption += f" (num_stages = {stages} on an H100, {stages + 1} on the others)."
    figure, axes = style.stacked(3.3, caption, ncols=len(cells))
    for ax, (d, table) in zip(axes[0], cells.items(), strict=True):
        spilling = [(B_r, B_c) for B_r, B_c in table if compiled.get((d, B_r, B_c))]
        _square(ax, sizes, table, limits, spilling)
        ax.set_title(f"d = {d}: {sum(bool(c['fits_on']) for c in table.values())} of {len(table)} fit by the sum")
    fit = ", ".join(f"{sum(bool(c['fits_on']) for c in table.values())} at d = {d}" for d, table in cells.items())
    alt = (
        f"For each head dimension a grid of block sizes {', '.join(map(str, sizes))}, B_r down and B_c right; in each"
        f" cell registers per thread and KiB of shared memory: the stronger a cell's fill, the fewer chips have room."
        f" Of {len(sizes) ** 2} block sizes a chip has room for {fit}."
    )
    return figure, alt


def _square(ax: style.Axes, sizes: list[int], table: dict, limits: dict[str, int], spilling: list) -> None:
    for (B_r, B_c), cell in table.items():
        y, x = sizes.index(B_r), sizes.index(B_c)
        missing = len(limits) - len(cell["fits_on"])
        cross = " ×" if (B_r, B_c) in spilling else ""
        words = f"{cell['registers']}{cross}\n{cell['shared'] // 1024} KiB"
        words += "" if cell["fits_on"] else f"\n{VERDICTS[cell['limit']]}"
        style.box(ax, x, y, 1, 1, words, style.tint(style.INK, SHADES[missing]))
    ticks = [n + 0.5 for n in range(len(sizes))]
    style.bare(ax, (-0.03, len(sizes) + 0.03), (-0.03, len(sizes) + 0.03), aspect="equal", xticks=ticks, yticks=ticks)
    ax.set(xticklabels=sizes, yticklabels=sizes, xlabel="B_c →", ylabel="← B_r")
