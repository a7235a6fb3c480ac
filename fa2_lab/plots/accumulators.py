"""Who holds which element of S and O, as compiled: by warp, and in one corner by lane and register."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import Mma, Owners, parse
from fa2_lab.plots import style
from fa2_lab.plots.records import compiled_by, layouts_record

# Data -----------------------------------------------------------------------------------------------------------


def data(size: int = 16, row: int = 5) -> dict:
    """Owners of S and O as compiled, and of the corner of S for the targets that agree on it."""
    record = layouts_record()
    kernels = [_kernel(k) for k in record["layouts"]]
    corners: list[tuple[list[str], Owners]] = []
    for kernel in kernels:
        corner = Owners(*(x[:size, :size] for x in kernel["S"]))
        same = [names for names, other in corners if all(map(np.array_equal, corner, other))]
        names = same[0] if same else []
        if not same:
            corners.append((names, corner))
        if kernel["target"] not in names:
            names.append(kernel["target"])
    return dict(kernels=kernels, corner={" and ".join(n): c for n, c in corners}, row=row, made=compiled_by(record))


def _kernel(found: dict) -> dict:
    """Owners of S and O, and what one instruction computes of each."""
    S, O = (parse(found[tensor]["layout"]) for tensor in "SO")
    owners = {t: layout.owners(tuple(found[t]["shape"])) for t, layout in dict(S=S, O=O).items()}
    gives = dict(S=one_instruction(S), O=one_instruction(O))
    return dict(target=found["target"], d=found["d"], instruction=found["instruction"], gives=gives, **owners)


def one_instruction(layout: Mma) -> tuple[int, int]:
    """Rows and columns that one instruction computes: mma belongs to one warp, wgmma to four below each other."""
    rows, cols = layout.instruction
    return (rows, cols) if layout.version == 2 else (4 * rows, cols)


# Drawing --------------------------------------------------------------------------------------------------------

GAP = 22  # between tiles drawn side by side, in elements
OBSERVED = "Observed (read from the compiled kernel)"


@style.picture
def draw(kernels: Sequence[Mapping], corner: Mapping[str, Owners], row: int, made: str) -> tuple[Figure, str]:
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
    ax.set_xlabel(f"keys → (dark: lane {first}, one of the four that hold row {row})", fontsize=style.SMALL)
    ax.set_xticks(np.arange(0, cols, 2) + 0.5, range(0, cols, 2))
    ax.set_yticks([k + 0.5 for k in (0, row, row + 8)], [0, f"row {row}", row + 8])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title)
