"""Plot of the block sizes that fit on each chip, with the shared memory and the registers that each size needs."""

from fa2_lab.machine import budget, chips
from fa2_lab.plots import style
from fa2_lab.records import read_json

BLOCKS = (32, 64, 128, 256)


def data(stages: int = 2) -> dict:
    """Return the arguments of draw(): what each block size needs in the forward pass, and the recorded spills.

    Shared memory holds `stages` tiles of K and `stages` tiles of V. For num_stages = n, Triton keeps n tiles of each on
    Hopper, and n − 1 tiles of each on older chips.
    """
    chips_by_name = {"RTX 4090": chips.RTX_4090, "A100": chips.A100, "H100": chips.H100}
    cells = {d: _needs_and_fit(chips_by_name, d, stages) for d in (64, 128)}
    limits = {name: chip.shared_per_block for name, chip in chips_by_name.items()}
    for row in (read_json("compiled") or {}).get("forward", ()):
        cells[row["d"]][row["B_r"], row["B_c"]]["registers"] = row["registers"]  # replaces the estimate
    return dict(sizes=BLOCKS, stages=stages, cells=cells, limits=limits, compiled=compiled_spills())


def _needs_and_fit(chips_by_name: dict, d: int, stages: int) -> dict[tuple[int, int], dict]:
    """Return {(B_r, B_c): needs} for head dimension d.

    `chips_by_name` is {name: chip}. `needs` lists the resources used on the last chip in this dictionary, the number of
    warps (4 or 8), and the names of the chips on which the block size fits.
    """
    tables = {name: budget.best_fits(chip, d, sizes=BLOCKS, stages=stages) for name, chip in chips_by_name.items()}
    cells = {}
    for blocks, (W, fit) in list(tables.values())[-1].items():
        fits_on = tuple(name for name in chips_by_name if tables[name][blocks][1].ok)
        needs = dict(shared=fit.shared_bytes, registers=fit.registers, warps=W, limit=fit.limit)
        cells[blocks] = needs | dict(fits_on=fits_on)
    return cells


def compiled_spills() -> dict[tuple[int, int, int], int]:
    """Return {(d, B_r, B_c): number of spill instructions in the forward kernel} for the recorded block sizes."""
    rows = (read_json("compiled") or {}).get("forward", ())
    return {(row["d"], row["B_r"], row["B_c"]): row["spills"] for row in rows}


def verdict(cell: dict, limits: dict[str, int], spills: int) -> str:
    """Return a label that names the chips on which a block size fits, or "too large" if it fits on none of them.

    The label is "spills" if the block size fits but needs too many registers. `spills` is the number of spill
    instructions in the compiled kernel, `cell` holds the resources that the kernel needs according to the model, and
    `limits` is {chip: bytes of shared memory per block}.
    """
    fits = [name for name, room in limits.items() if cell["shared"] <= room]
    if not fits:
        return "too large"
    if spills or cell["limit"] == "registers":
        return "spills"
    return (
        "fits all"
        if len(fits) == len(limits)
        else f"{fits[-1]} only"
        if len(fits) == 1
        else f"not {next(iter(limits)).split()[-1]}"
    )


@style.picture
def draw(sizes: tuple, stages: int, cells: dict, limits: dict[str, int], compiled: dict) -> style.Drawn:
    """For each d, draw a grid of block sizes, with the resources that each size needs and the chips on which it fits.

    `cells` is {d: {(B_r, B_c): dict(shared, registers, warps, limit, fits_on)}}. `limits` is {chip: bytes of shared
    memory per block}, with the smallest limit first. `compiled` is {(d, B_r, B_c): spill instructions}, for the sizes
    that were compiled.
    """
    room = ", ".join(f"{size // 1024} KiB on {chip}" for chip, size in limits.items())
    verdicts = {
        d: {blocks: verdict(cell, limits, compiled.get((d, *blocks), 0)) for blocks, cell in table.items()}
        for d, table in cells.items()
    }
    fit = {
        d: sum(words not in ("spills", "too large") for words in outcomes.values()) for d, outcomes in verdicts.items()
    }
    (d, most), *smaller_fits = fit.items()
    summary = f"{most} of {len(sizes) ** 2} block sizes run without spilling at d = {d}" + "".join(
        f", but only {n} at d = {d}" for d, n in smaller_fits
    )
    caption = (
        f"{summary}. In each cell are the registers per thread that the compiler takes for an {list(limits)[-1]} (at"
        f" most 255) and the shared memory (at most {room}). If 255 are not enough, the kernel spills. Forward, 16"
        f" bits, with 4 warps, or 8 if 4 do not fit (4 w, 8 w), and room for {stages} tiles of K and {stages} of V"
        f" (num_stages = {stages} on an H100, {stages + 1} on the others)."
    )
    figure, axes = style.new_stacked_figure(4.1 if style.is_narrow() else 3.4, caption, ncols=len(cells))
    for ax, (d, table) in zip(axes.flat, cells.items(), strict=True):
        _draw_grid(ax, sizes, table, verdicts[d])
        ax.set_title(f"d = {d}: {fit[d]} run without spilling")
    alt = (
        f"For each head dimension a grid of block sizes {', '.join(map(str, sizes))}, B_r down and B_c right; in each"
        f" cell warps, registers of a thread, KiB of shared memory, and where it fits. {summary}."
    )
    return figure, alt


# A dashed edge means that the block size fits on only some chips.
VERDICT_WORDS = {"fits all": "fits", "spills": "spills", "too large": "no room"}
VERDICT_STYLES = {
    "fits all": dict(fill=style.worker_color(3), linewidth=1.4),
    "spills": dict(fill=style.MASKED, hatch=style.MASK_HATCH, edgecolor=style.QUIET),
    "too large": dict(fill=style.PAPER, edgecolor=style.QUIET, linewidth=0.6),
}


def _draw_grid(ax: style.Axes, sizes: list[int], table: dict, verdicts: dict) -> None:
    """Draw a cell for each block size, with its verdict, registers and shared memory."""
    partly = dict(fill=style.worker_color(3), linewidth=2.2, linestyle=style.DASHED)
    for (B_r, B_c), cell in table.items():
        y, x, outcome = sizes.index(B_r), sizes.index(B_c), verdicts[B_r, B_c]
        registers = f", {cell['warps']} w\n{cell['registers']} regs" * (outcome != "too large")
        words = f"{VERDICT_WORDS.get(outcome, 'fits')}{registers}\n{cell['shared'] // 1024} KiB"
        style.box(ax, x + 0.03, y + 0.03, 0.94, 0.94, words, **VERDICT_STYLES.get(outcome, partly))
    ticks = [n + 0.5 for n in range(len(sizes))]
    style.strip_axes(ax, (-0.03, len(sizes) + 0.03), (-0.03, len(sizes) + 0.03), xticks=ticks, yticks=ticks)
    dashed = sorted({outcome for outcome in verdicts.values() if outcome not in VERDICT_WORDS})
    notes = [f"dashed edge: fits, but {words.replace('not', 'not on a')}" for words in dashed]
    ax.set(xticklabels=sizes, yticklabels=sizes, xlabel="\n".join(["B_c →", *notes]), ylabel="← B_r")
