"""Which block sizes fit: shared memory, registers, and on which chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import budget, chips
from fa2_lab.plots import style
from fa2_lab.records import recorded

# Data -----------------------------------------------------------------------------------------------------------

BLOCKS = (32, 64, 128, 256)


def data(stages: int = 2) -> dict:
    """What the forward needs at every block size and on which chips it fits; spills from figures/data/compiled.json."""
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


def compiled_spills() -> dict[int, dict[tuple[int, int], int]] | None:
    """{d: {(B_r, B_c): spill instructions}} of the compiled forward, if it has been recorded."""
    record = recorded("compiled")
    if record is None:
        return None
    spills: dict[int, dict[tuple[int, int], int]] = {}
    for row in record["forward"]:
        spills.setdefault(row["d"], {})[row["B_r"], row["B_c"]] = row["spills"]
    return spills


# Drawing --------------------------------------------------------------------------------------------------------

CUT = 1.25  # bars that are longer end there
VERDICTS = {"registers": "spills", "shared memory": "too large", "threads": "too large"}


@style.picture
def draw(
    sizes: Sequence[int],
    stages: int,
    cells: Mapping[int, Mapping[tuple[int, int], Mapping]],
    limits: Mapping[str, int],
    compiled: Mapping[int, Mapping[tuple[int, int], int]] | None = None,
) -> tuple[Figure, str]:
    """A square of block sizes for each d; a cell says what the forward needs and where it fits.

    cells: {d: {(B_r, B_c): dict(shared, registers, warps, limit, fits_on)}}. limits: {chip: bytes for one block}, the
    smallest first. compiled: {d: {(B_r, B_c): spill instructions}}, where somebody compiled it.
    """
    title = "Fewer block sizes fit as d grows: registers spill, shared memory runs out"
    figure, axes = style.new_figure(4.7, title, ncols=len(cells))
    for ax, (d, table) in zip(axes, cells.items(), strict=True):
        _square(ax, sizes, table, limits, (compiled or {}).get(d, {}))
        ax.set_title(f"d = {d}: {sum(bool(c['fits_on']) for c in table.values())} of {len(table)} fit")
    room = ", ".join(f"{size // 1024} on {chip}" for chip, size in limits.items())
    setting = f"Forward, 16-bit, {stages} stages, 4 warps (8 where 4 do not fit)."
    seen = f" ×: spills when compiled for {list(limits)[-1]}." if compiled else ""
    bars = f"Upper bar: registers a thread, at most 255. Lower bar: KiB of shared memory, at most {room}."
    figure.supxlabel(f"{setting}{seen} Bars end at {CUT} times the last mark.\n{bars}", fontsize=style.SMALL)
    told = "; ".join(f"d = {d}: {_summary(table, limits)}" for d, table in cells.items())
    source = "A cross where the compiled kernel spills" if compiled else "By the model: no compilation is recorded yet"
    alt = (
        f"For each head dimension a grid of block sizes {', '.join(map(str, sizes))}, B_r down and B_c right; in each"
        f" cell two bars, registers per thread and shared memory, beside marks for what there is: the greyer the"
        f" cell, the fewer chips have room. {told}. {source}."
    )
    return figure, alt


def verdict(cell: Mapping, limits: Mapping[str, int]) -> str:
    """In one or two words: where the block size fits, or what stops it."""
    if not cell["fits_on"]:
        return VERDICTS[cell["limit"]]
    if len(cell["fits_on"]) == len(limits):
        return "all chips"
    return ", ".join(cell["fits_on"])


def _summary(table: Mapping[tuple[int, int], Mapping], limits: Mapping[str, int]) -> str:
    verdicts = [verdict(cell, limits) for cell in table.values()]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))


def _square(ax: Axes, sizes: Sequence[int], table: Mapping, limits: Mapping[str, int], compiled: Mapping) -> None:
    for (B_r, B_c), cell in table.items():
        y, x, look = sizes.index(B_r), sizes.index(B_c), _look(cell, limits)
        style.box(ax, x, y, 1, 1, **look)
        ink = style.ink_on(look["fill"])
        _bar(ax, x, y + 0.1, "registers", cell["registers"], [255], ink)
        _bar(ax, x, y + 0.38, "shared", cell["shared"] // 1024, [size // 1024 for size in limits.values()], ink)
        if cell["fits_on"] != tuple(limits):
            words = verdict(cell, limits)
            ax.text(x + 0.5, y + 0.8, words, ha="center", va="center", color=ink, fontsize=style.SMALL)
        if compiled.get((B_r, B_c)):
            ax.plot(x + 0.93, y + 0.2, "x", color=ink, markersize=4.5, gid="spilled")
    ticks = [n + 0.5 for n in range(len(sizes))]
    ax.set(xlim=(-0.03, len(sizes) + 0.03), ylim=(len(sizes) + 0.03, -0.03), aspect="equal")
    ax.set(xticks=ticks, xticklabels=sizes, yticks=ticks, yticklabels=sizes, xlabel="B_c →", ylabel="← B_r")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _bar(ax: Axes, x: float, y: float, name: str, needs: int, most: Sequence[int], ink: str) -> None:
    """A number and its bar, with a mark for each limit."""
    ax.text(x + 0.3, y + 0.1, f"{needs}", ha="right", va="center", color=ink, fontsize=style.SMALL)
    unit = 0.4 / most[-1]
    style.box(ax, x + 0.34, y, unit * min(needs, CUT * most[-1]), 0.2, fill=style.worker(1), linewidth=0, gid=name)
    for limit in most:
        ax.plot([x + 0.34 + unit * limit] * 2, [y - 0.03, y + 0.23], color=ink, linewidth=0.8)


def _look(cell: Mapping, limits: Mapping[str, int]) -> dict:
    """The fewer chips can run it, the greyer; darkest where none can."""
    missing = len(limits) - len(cell["fits_on"])
    if missing == len(limits):
        return dict(fill=style.tint(style.INK, 0.32), gid="fits nowhere")
    return dict(fill=style.tint(style.INK, 0.14 * missing), gid=f"fits on {len(cell['fits_on'])}")
