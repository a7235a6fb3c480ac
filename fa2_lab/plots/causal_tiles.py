"""What a causal mask leaves of the tiles: SKIP, DIAGONAL, FULL, and the share of the work that remains."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style
from fa2_lab.tiles import CAUSAL, Tile, Tiling

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 512, B: int = 64) -> dict:
    """Three causal tilings, and the share of tiles computed over N for three block sizes, by formula and counted."""
    tilings = {
        "Square": Tiling(N, N, B, B, CAUSAL),
        "Tall tiles": Tiling(N, N, 2 * B, B, CAUSAL),
        "Fewer queries than keys": Tiling(N // 2, N, B, B, CAUSAL),
    }
    lengths = 2 ** np.arange(8, 15)
    shares = {}
    for size in (256, 128, 64):
        T = lengths // size
        shares[size] = (T + 1) / (2 * T), np.array([visited_share(Tiling(n, n, size, size, CAUSAL)) for n in lengths])
    return dict(tilings=tilings, N=lengths, shares=shares)


def visited_share(tiling: Tiling) -> float:
    """Tiles that are not skipped, over all tiles."""
    return 1 - tiling.counts()[Tile.SKIP] / (tiling.T_r * tiling.T_c)


# Drawing --------------------------------------------------------------------------------------------------------

FILLS = {
    Tile.SKIP: style.MASKED,
    Tile.DIAGONAL: style.tint(style.hue("S"), 0.35),
    Tile.FULL: style.hue("S"),
}


@style.picture
def draw(
    tilings: dict[str, Tiling], N: np.ndarray, shares: dict[int, tuple[np.ndarray, np.ndarray]]
) -> tuple[Figure, str]:
    """The tiles of each tiling by kind with their counts, the mask's edge on them, and the share of tiles computed.

    shares: {block size: (from the formula, from counting tiles)} at each sequence length N.
    """
    title = "Causal: whole tiles above the diagonal are never touched, and few need a mask"
    figure, axes = style.new_figure(5.6, title, nrows=2, ncols=len(tilings), height_ratios=[1.25, 1])
    for ax, (name, tiling) in zip(axes[0], tilings.items(), strict=True):
        _grid(ax, name, tiling)
    for ax in axes[1]:
        ax.remove()
    axes[0][0].set_ylabel("← queries")
    below = figure.add_subplot(axes[1][0].get_gridspec()[1, :])
    _curves(below, N, shares)
    _example(below, next(iter(tilings.values())))
    counted = "; ".join(f"{name}: {_counts(tiling)}" for name, tiling in tilings.items())
    sizes = ", ".join(str(B) for B in shares)
    alt = (
        f"Grids of tiles under a causal mask whose edge ends in the bottom right corner. {counted}. Beneath, the share"
        f" of tiles that are computed, (T + 1) / 2T, falls with N from 1 towards one half for blocks of {sizes}:"
        f" smaller blocks get there sooner. Dots, from counting tiles, lie on the curves."
    )
    return figure, alt


def _counts(tiling: Tiling) -> str:
    n = tiling.counts()
    return f"{n[Tile.FULL]} FULL, {n[Tile.DIAGONAL]} DIAGONAL, {n[Tile.SKIP]} SKIP"


def _grid(ax: Axes, name: str, tiling: Tiling) -> None:
    centres: dict[Tile, list] = {}
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            rows, cols, kind = tiling.rows(i), tiling.cols(j), tiling.kind(i, j)
            x, y, w, h = cols.start, rows.start, cols.stop - cols.start, rows.stop - rows.start
            hatch = style.MASK_HATCH if kind is Tile.SKIP else None
            style.box(ax, x, y, w, h, "", FILLS[kind], hatch=hatch, linewidth=0.6, edgecolor=style.QUIET)
            centres.setdefault(kind, []).append((x + w / 2, y + h / 2))
    _edge(ax, tiling)
    for kind in (Tile.FULL, Tile.SKIP):
        _name(ax, kind, np.array(centres[kind]))
    ax.set(xlim=(-4, tiling.N_k + 4), ylim=(tiling.N_q + 4, -4), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_title(f"{name}\n{tiling.N_q} × {tiling.N_k}, tiles {tiling.B_r} × {tiling.B_c}")
    ax.set_xlabel(f"keys → ({len(centres[Tile.DIAGONAL])} DIAGONAL, masked)", fontsize=style.SMALL)
    ax.set_anchor("N")


def _name(ax: Axes, kind: Tile, centres: np.ndarray) -> None:
    """The kind and its count, in the middle of its tiles."""
    x, y = centres.mean(axis=0)
    text = ax.text(x, y, f"{kind.name}\n{len(centres)}", ha="center", va="center", color=style.ink_on(FILLS[kind]))
    text.set_bbox(dict(facecolor=FILLS[kind], edgecolor="none", pad=1.5))


def _edge(ax: Axes, tiling: Tiling) -> None:
    """The line that separates what is seen from what is not: where each row's interval ends."""
    row = np.arange(-1, tiling.N_q)
    ax.plot(tiling.interval(row)[1], row + 1, color=style.INK, linewidth=1.4)


def _curves(ax: Axes, N: np.ndarray, shares: dict) -> None:
    for B, (formula, counted) in shares.items():
        ax.plot(N, formula, color=style.hue("S"), linewidth=1.4)
        ax.plot(N, counted, "o", color=style.INK, markersize=3.5)
        ax.text(0.93 * N[0], formula[0], f"blocks of {B}", ha="right", va="center", fontsize=style.SMALL)
    ax.axhline(0.5, color=style.QUIET, linewidth=0.8, linestyle=(0, (4, 2)))
    ax.text(N[-1], 0.485, "one half: what the mask leaves of a long sequence", ha="right", va="top")
    ax.set(xscale="log", xlim=(N[0] / 1.75, N[-1] * 1.1), ylim=(0.33, 1.05), yticks=[0.5, 0.75, 1.0])
    ax.set_xlabel("sequence length N (N_q = N_k)")
    ax.set_xticks(N, [f"{n:,}" for n in N])
    ax.minorticks_off()
    ax.set_title("Tiles computed, as a share of all: T (T + 1) / 2 of T²")


def _example(ax: Axes, tiling: Tiling) -> None:
    """The first grid's place on its curve."""
    n, total = tiling.counts(), tiling.T_r * tiling.T_c
    visited = n[Tile.FULL] + n[Tile.DIAGONAL]
    text = f"the first grid, T = {tiling.T_r}: {visited} of {total} tiles, {total / visited:.2f} times less work"
    ax.plot([tiling.N_k] * 2, [0.41, visited / total], color=style.QUIET, linewidth=0.8)
    ax.text(0.97 * tiling.N_k, 0.38, text, va="center")
