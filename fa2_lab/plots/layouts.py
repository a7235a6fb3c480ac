"""Observed layouts: who holds which element of S and O, and where K's rows lie in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import CHUNK_BYTES, LINE_BYTES, Owners, bank_conflicts
from fa2_lab.plots import style

GAP = 22  # between tiles drawn side by side, in elements
OBSERVED = "Observed (read from the compiled kernel)"

# Accumulators -------------------------------------------------------------------------------------------------


@style.picture
def accumulators(kernels: Sequence[Mapping], corner: Mapping[str, Owners], row: int, made: str) -> tuple[Figure, str]:
    """S and O of each kernel cut up by warp, and below the corner of S by lane and by register.

    kernels: dict(target, d, S, O, instruction, gives): Owners of whole tiles, the name of the tensor cores' instruction
    and {tensor: (rows, columns)} that one of them computes.
    corner: {targets: Owners of the first elements of S}, one entry for all targets that agree. row: the one to mark.
    """
    title = "Compiled: a row of S and of O belongs to one warp, spread over four lanes"
    targets = list(dict.fromkeys(k["target"] for k in kernels))
    shape = dict(nrows=2, ncols=2 * len(corner), height_ratios=[1, 1.75])
    figure, axes = style.new_figure(6.1, title, **shape)
    for ax in axes[0]:
        ax.remove()
    grid = axes[0][0].get_gridspec()[0, :].subgridspec(1, len(targets))
    for column, target in enumerate(targets):
        _tiles(figure.add_subplot(grid[column]), target, [k for k in kernels if k["target"] == target])
    for n, (names, owners) in enumerate(corner.items()):
        _corner(axes[1][2 * n], f"S, its first corner, on {names}: lane", owners, owners.lane, row)
        _corner(axes[1][2 * n + 1], "The same: register of that lane", owners, owners.register, row)
    lanes = sorted({int(lane) for owners in corner.values() for lane in owners.lane[row]})
    figure.supxlabel(f"{OBSERVED}: {made}", fontsize=style.SMALL)
    told = "; ".join(
        f"{k['target']}, d = {k['d']}: one {k['instruction']} gives {_size(k['gives']['S'])} of S,"
        f" {_size(k['gives']['O'])} of O"
        for k in kernels
    )
    warp = next(iter(corner.values())).warp[row, 0]
    alt = (
        f"{OBSERVED}. Tiles of S and O in strips of 16 rows, each strip of one warp, the same in S and in O. {told}."
        f" Beneath, the corner of S element by element: row {row} is held by lanes {', '.join(map(str, lanes))} of warp"
        f" {warp}, each with pairs of neighbouring columns, and with the same of row {row + 8}."
    )
    return figure, alt


def _size(instruction: Sequence[int]) -> str:
    return " × ".join(map(str, instruction))


def _tiles(ax: Axes, target: str, kernels: Sequence[Mapping]) -> None:
    """S and O side by side, to scale, for each d; what the first instruction computes is framed."""
    x = 0
    for kernel in kernels:
        for tensor in ("S", "O"):
            warp = kernel[tensor].warp
            _strips(ax, x, warp)
            ax.text(x, -3, f"{tensor}, d = {kernel['d']}" if tensor == "S" else tensor, va="bottom")
            rows, cols = kernel["gives"][tensor]
            frame = dict(fill=False, edgecolor=style.hue(tensor), linewidth=1.8, gid="instruction")
            ax.add_patch(style.Rectangle((x, 0), cols, rows, **frame))
            x += warp.shape[1] + GAP
    rows = max(k["S"].warp.shape[0] for k in kernels)
    ax.set(xlim=(-2, x - GAP + 2), ylim=(rows + 2, -18), aspect="equal", xticks=[], yticks=[], anchor="N")
    ax.spines[:].set_visible(False)
    ax.set_title(f"{target}: framed, what one {kernels[0]['instruction']} gives")


def _strips(ax: Axes, x: int, warp: np.ndarray) -> None:
    """One box for every stretch of rows and columns that a warp holds."""
    rows, cols = _starts(warp[:, 0]), _starts(warp[0])
    for top, bottom in zip(rows, [*rows[1:], len(warp)], strict=True):
        for left, right in zip(cols, [*cols[1:], len(warp[0])], strict=True):
            w = int(warp[top, left])
            look = dict(edgecolor=style.PAPER, linewidth=0.8, gid=f"warp {w}")
            style.box(ax, x + left, top, right - left, bottom - top, f"warp {w}", style.worker(w), **look)


def _starts(numbers: np.ndarray) -> list[int]:
    """Where a stretch of equal numbers begins."""
    return [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]


def _corner(ax: Axes, title: str, owners: Owners, numbers: np.ndarray, row: int) -> None:
    """A number in every element; the lanes that hold the row are filled, and the first of them is darker."""
    marked, first = set(owners.lane[row].tolist()), owners.lane[row, 0]
    own = style.worker(int(owners.warp[row, 0]))
    for (i, j), number in np.ndenumerate(numbers):
        lane = owners.lane[i, j]
        fill = style.tint(own, 0.75) if lane == first else style.tint(own, 0.18) if lane in marked else style.PAPER
        style.box(ax, j, i, 1, 1, str(number), fill, edgecolor=style.QUIET, linewidth=0.4, gid=f"lane {lane}")
    rows, cols = numbers.shape
    ax.add_patch(style.Rectangle((0, row), cols, 1, fill=False, edgecolor=style.INK, linewidth=2, gid="row"))
    ax.set(xlim=(-0.1, cols + 0.1), ylim=(rows + 0.1, -0.1))
    ax.set_xlabel(f"keys →   dark: lane {first}, one of the four that hold row {row}", fontsize=style.SMALL)
    ax.set_xticks(np.arange(0, cols, 2) + 0.5, range(0, cols, 2))
    ax.set_yticks([k + 0.5 for k in (0, row, row + 8)], [0, f"row {row}", row + 8])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title)


# Shared memory ------------------------------------------------------------------------------------------------


@style.picture
def swizzled_keys(panels: Mapping[tuple[str, int], np.ndarray], chunk: int, made: str) -> tuple[Figure, str]:
    """Where 16-byte chunks of the first rows of K lie in shared memory; one chunk of every row is marked.

    panels: {(name, d): byte address of every chunk, (rows, chunks)}; names across, d down.
    """
    title = "Swizzled, one chunk of eight rows of K lies in eight different groups of banks"
    names, ds = (list(dict.fromkeys(key[k] for key in panels)) for k in (0, 1))
    heights = [max(len(_lines(panels[name, d])) for name in names) + 2 for d in ds]
    figure, axes = style.new_figure(1.75 + 0.19 * sum(heights), title, nrows=len(ds), ncols=len(names),
                                    height_ratios=heights, squeeze=False)  # fmt: skip
    clashes = {key: bank_conflicts(address[:, chunk], itemsize=1) for key, address in panels.items()}
    for (name, d), address in panels.items():
        ax = axes[ds.index(d)][names.index(name)]
        _memory(ax, address, chunk)
        ax.set_title(f"{name}, d = {d}")
        ax.set_xlabel(_said(clashes[name, d], len(address)), fontsize=style.SMALL)
    for line in axes:
        line[0].set_ylabel("128-byte line of memory")
    what = "A box: 16 bytes, as row, chunk of K; across: 8 groups of 4 banks"
    figure.supxlabel(f"{what}\nAll but row-major: {OBSERVED.lower()}: {made}", fontsize=style.SMALL)
    said = "; ".join(f"{name}, d = {d}: {_said(n, 8)}" for (name, d), n in clashes.items())
    alt = (
        f"{OBSERVED}, but for the row-major panels. The first eight rows of K in shared memory, 128 bytes a line, in"
        f" pieces of 16 bytes labelled with row and chunk; chunk {chunk} of each row is marked. {said}."
    )
    return figure, alt


def _said(clashes: int, rows: int) -> str:
    if clashes == 1:
        return f"the {rows} marked: no two in the same banks"
    return f"the {rows} marked: {clashes} in the same banks"


def _lines(address: np.ndarray) -> list[int]:
    return sorted(set((address // LINE_BYTES).ravel().tolist()))


def _memory(ax: Axes, address: np.ndarray, chunk: int) -> None:
    lines = _lines(address)
    for (row, c), byte in np.ndenumerate(address):
        line, group = lines.index(byte // LINE_BYTES), byte % LINE_BYTES // CHUNK_BYTES
        fill = style.tint(style.hue("K"), 1.0 if c == chunk else 0.15)
        gid = "marked" if c == chunk else "chunk"
        style.box(ax, group, line, 1, 1, f"{row},{c}", fill, edgecolor=style.PAPER, linewidth=0.8, gid=gid)
    groups = LINE_BYTES // CHUNK_BYTES
    ax.set(xlim=(0, groups), ylim=(len(lines), 0))
    ax.set_xticks(np.arange(groups) + 0.5, range(groups))
    ax.set_yticks([k + 0.5 for k in range(len(lines))], lines)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.xaxis.tick_top()
