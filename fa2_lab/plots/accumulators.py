"""Which warp holds which rows of S and O, as compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import Mma, parse
from fa2_lab.plots import style
from fa2_lab.records import compiled_by, layouts_record

# Data -----------------------------------------------------------------------------------------------------------


def data() -> dict:
    """Owners of S and O in every kernel of the record."""
    record = layouts_record()
    return dict(kernels=[_kernel(k) for k in record["layouts"]], made=compiled_by(record))


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
def draw(kernels: Sequence[Mapping], made: str) -> tuple[Figure, str]:
    """S and O of each kernel cut up by warp, one row of drawings for each target.

    kernels: dict(target, d, S, O, instruction, gives): Owners of whole tiles, the name of the tensor cores' instruction
    and {tensor: (rows, columns)} that one of them computes.
    """
    targets = list(dict.fromkeys(k["target"] for k in kernels))
    figure, axes = style.new_figure(
        4.6, "Compiled: a row of S and the same row of O belong to one warp", nrows=len(targets)
    )
    for ax, target in zip(axes, targets, strict=True):
        _tiles(ax, target, [k for k in kernels if k["target"] == target])
    figure.supxlabel(f"{OBSERVED}: {made}", fontsize=style.SMALL)
    told = "; ".join(
        f"{k['target']}, d = {k['d']}: one {k['instruction']} gives {_size(k['gives']['S'])} of S,"
        f" {_size(k['gives']['O'])} of O"
        for k in kernels
    )
    alt = f"{OBSERVED}. Tiles of S and O in strips of 16 rows, each strip of one warp, the same in S and in O. {told}."
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
