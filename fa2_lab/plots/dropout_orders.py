"""Dropout masks drawn in FA1's and in FA2's order, by a generator that remembers and by one that is keyed."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference.dropout import Dropout, sequential_mask
from fa2_lab.tiles import Tiling


def data(N: int = 16, B_r: int = 4, B_c: int = 2, p: float = 0.25, seed: int = 7) -> dict:
    """The mask that each order of the tiles draws, from one running generator and from the keyed one."""
    tiling = Tiling(N, N, B_r, B_c)
    sequential = {name: sequential_mask(tiling, p, seed, name.lower()) for name in ("FA1", "FA2")}
    keyed = {name: keyed_mask(tiling, Dropout(p, seed), tiles) for name, tiles in orders(tiling).items()}
    return dict(masks=dict(sequential=sequential, keyed=keyed), B_r=B_r, B_c=B_c, p=p)


def orders(tiling: Tiling) -> dict[str, list[tuple[int, int]]]:
    """The tiles (i, j) in the order of FA1's loops and of FA2's."""
    T_r, T_c = range(tiling.T_r), range(tiling.T_c)
    return {"FA1": [(i, j) for j in T_c for i in T_r], "FA2": [(i, j) for i in T_r for j in T_c]}


def keyed_mask(tiling: Tiling, dropout: Dropout, tiles: list[tuple[int, int]]) -> np.ndarray:
    """True where kept, drawn tile after tile in the order given."""
    keep = np.zeros((tiling.N_q, tiling.N_k), dtype=bool)
    for i, j in tiles:
        keep[tiling.rows(i), tiling.cols(j)] = dropout.z(tiling.rows(i), tiling.cols(j)) > 0
    return keep


@style.picture
def draw(masks: dict[str, dict[str, np.ndarray]], B_r: int, B_c: int, p: float) -> style.Drawn:
    """A row for each generator: the mask in FA1's order, in FA2's, and the entries where they differ.

    masks: {generator: {"FA1", "FA2": True where kept}}.
    """
    caption = "Swap the loops: sequential dropout changes its mask, keyed dropout does not (black: differs)."
    figure, axes = style.new_figure(4.3, caption, nrows=len(masks), ncols=3)
    agree = {}
    for row, (generator, orders) in zip(axes, masks.items(), strict=True):
        differ = orders["FA1"] != orders["FA2"]
        agree[generator] = f"{1 - differ.mean():.0%}"
        for ax, name in zip(row, ("FA1", "FA2"), strict=False):
            _grid(ax, orders[name], B_r, B_c, style.hue("P"), f"{name}: {orders[name].mean():.0%} kept")
        _grid(row[2], differ, B_r, B_c, style.INK, f"Same fate: {agree[generator]}")
        row[0].set_ylabel(f"{generator} generator")
    for ax, note in zip(axes[-1], ("columns outside", "rows outside", "where they differ"), strict=True):
        ax.set_xlabel(note, fontsize=style.SMALL)
    kept = {name: f"{mask.mean():.0%}" for name, mask in next(iter(masks.values())).items()}
    same = "; ".join(f"{generator}: {share} of the entries" for generator, share in agree.items())
    alt = (
        f"Dropout masks of {differ.shape[0]} × {differ.shape[1]} entries with p = {p}, a row of three grids for each"
        f" generator: the mask as FA1 draws it, column of tiles by column, as FA2 draws it, row by row, and in black"
        f" the entries whose fate differs. The sequential generator keeps {kept['FA1']} and {kept['FA2']}, but not"
        f" the same ones. Share that meets the same fate: {same}."
    )
    return figure, alt


def _grid(ax: style.Axes, filled: np.ndarray, B_r: int, B_c: int, color: str, title: str) -> None:
    """Every True entry as a square, and the borders of the tiles."""
    N_q, N_k = filled.shape
    style.bars(ax, [(j + 0.05, i + 0.05, 0.9, 0.9) for i, j in np.argwhere(filled)], color)
    border = dict(color=style.QUIET, linewidth=0.8)
    for x in range(0, N_k + 1, B_c):
        ax.plot([x, x], [0, N_q], **border)
    for y in range(0, N_q + 1, B_r):
        ax.plot([0, N_k], [y, y], **border)
    style.bare(ax, (-0.2, N_k + 0.2), (-0.2, N_q + 0.2), aspect="equal")
    ax.set_title(title)
