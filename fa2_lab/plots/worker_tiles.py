"""Diagram that shows which worker owns which tile (figure 2 of the FA2 paper), and which workers write each result."""

import numpy as np

from fa2_lab.machine import grid
from fa2_lab.plots import style
from fa2_lab.tiles import Mask, Tiling


def data(T: int = 4, B: int = 64) -> dict:
    """Return each tile's worker and the workers that add to each block of dQ, for T × T tiles of B × B scores each."""
    tilings = {causal: Tiling(T * B, T * B, B, B, Mask(causal=causal)) for causal in (False, True)}
    owners = {
        (direction, c): grid.owners(t, direction) for direction in ("forward", "backward") for c, t in tilings.items()
    }
    return dict(owners=owners, dq_writers={causal: grid.dq_writers(tiling) for causal, tiling in tilings.items()})


WIDER, DEEPER = 2.55, 0.85  # extra space to the right of the tiles for O or dQ, and below them for dK and dV


@style.picture
def draw(owners: dict[tuple[str, bool], np.ndarray], dq_writers: dict[bool, list[list[int]]]) -> style.Drawn:
    """Draw four grids of tiles: forward above and backward below, without a mask on the left and causal on the right.

    `owners` is {("forward" or "backward", causal): array (T_r, T_c)} with each tile's worker, or −1 for a skipped tile.
    `dq_writers` is {causal: a list with, for each row block, the backward workers that add to its dQ}.
    """
    caption = "In the forward pass each block of O has one writer, but in the backward pass several workers add to dQ."
    caption += (
        " A number names a worker, which owns a row of tiles in the forward pass and a column in the backward pass."
    )
    caption += " This is figure 2 of the paper."
    T_r, T_c = owners["forward", False].shape
    figure, axes = style.new_stacked_figure(5.4, caption, nrows=2, ncols=2, height_ratios=[T_r, T_r + DEEPER])
    for column, causal in enumerate((False, True)):
        forward, backward = owners["forward", causal], owners["backward", causal]
        keys = "causal" if causal else "all keys"
        _draw_tiles(axes[0][column], forward, f"Forward, {keys}")
        _draw_tiles(axes[1][column], backward, f"Backward, {keys}", DEEPER)
        _draw_writers(axes[0][column], T_c, "O", [sorted(set(row[row >= 0].tolist())) for row in forward], "written by")
        _draw_writers(axes[1][column], T_c, "dQ", dq_writers[causal], "added by")
        for j in range(T_c):  # each block of dK and dV has one writer, shown by the column's colour
            for tensor, left in (("dK", 0.02), ("dV", 0.51)):
                style.tensor_box(axes[1][column], j + left, T_r + 0.2, 0.47, 0.55, tensor, tensor, linewidth=1)
    alt = (
        f"Four grids of {T_r} by {T_c} tiles, queries down, keys right, each tile with the number of its worker."
        f" Forward: {T_r} workers take a row each and write their own O. Backward: {T_c} workers take a column each,"
        f" write their own dK and dV, and add to shared blocks of dQ: {_format_counts(dq_writers[False])} workers for"
        f" rows from top to bottom, {_format_counts(dq_writers[True])} under a causal mask, which skips the tiles above"
        " the diagonal and leaves workers with unequal numbers of tiles."
    )
    return figure, alt


def _format_counts(writers: list[list[int]]) -> str:
    return ", ".join(str(len(own_workers)) for own_workers in writers)


def _draw_tiles(ax: style.Axes, owner: np.ndarray, title: str, deeper: float = 0) -> None:
    T_r, T_c = owner.shape
    bare = dict(aspect="equal", title=title, ylabel="← queries")
    style.strip_axes(ax, (-0.05, T_c + WIDER), (-0.45, T_r + 0.05 + deeper), **bare)
    style.note(ax, T_c / 2, -0.22, "keys →", ha="center")
    style.draw_owners(ax, owner, first=1, size=style.NORMAL)


def _draw_writers(ax: style.Axes, T_c: int, tensor: str, writers: list[list[int]], verb: str) -> None:
    """Draw each block of a result next to its row of tiles, followed by the workers that write it."""
    left = T_c + 0.2
    style.note(ax, left + 0.72, -0.22, verb)
    for i, own_workers in enumerate(writers):
        style.tensor_box(ax, left, i + 0.2, 0.66, 0.6, tensor, tensor)
        for n, k in enumerate(own_workers):
            style.box(ax, left + 0.75 + 0.4 * n, i + 0.28, 0.37, 0.44, f"{k + 1}", style.worker_color(k))
