"""What a causal mask leaves of the tiles: SKIP, DIAGONAL, FULL, and the share of the work that remains."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.tiles import CAUSAL, Tile, Tiling


def data(N: int = 512, B: int = 64) -> dict:
    """Two causal tilings, and the share of tiles computed over N for three block sizes, by formula and counted."""
    tilings = {
        "Square": Tiling(N, N, B, B, CAUSAL),
        "Fewer queries": Tiling(N // 2, N, B, B, CAUSAL),
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


FILLS = {Tile.SKIP: style.MASKED, Tile.DIAGONAL: style.tint(style.hue("S"), 0.35), Tile.FULL: style.hue("S")}


@style.picture
def draw(tilings: dict[str, Tiling], N: np.ndarray, shares: dict[int, tuple[np.ndarray, np.ndarray]]) -> style.Drawn:
    """The tiles of each tiling by kind with their counts, the mask's edge on them, and the share of tiles computed.

    shares: {block size: (from the formula, from counting tiles)} at each sequence length N.
    """
    caption = "Causal: whole tiles above the diagonal are never touched, and few of the others need a mask."
    figure, axes = style.new_figure(5.2, caption, nrows=2, ncols=len(tilings), height_ratios=[1.3, 1])
    for ax, (name, tiling) in zip(axes[0], tilings.items(), strict=True):
        _grid(ax, name, tiling)
    for ax in axes[1]:
        ax.remove()
    _curves(figure.add_subplot(axes[1][0].get_gridspec()[1, :]), N, shares)
    counted = "; ".join(f"{name}: {_counts(tiling)}" for name, tiling in tilings.items())
    alt = (
        f"Grids of tiles under a causal mask whose edge ends in the bottom right corner. {counted}. Beneath, the share"
        f" of tiles that are computed, (T + 1) / 2T, falls with N from 1 towards one half for blocks of"
        f" {', '.join(map(str, shares))}: smaller blocks get there sooner. Dots, from counting, lie on the curves."
    )
    return figure, alt


def hatch(kind: Tile) -> str | None:
    """The hatch of a tile of this kind."""
    return style.MASK_HATCH if kind is Tile.SKIP else None


def _counts(tiling: Tiling) -> str:
    return ", ".join(f"{tiling.counts()[kind]} {kind.name}" for kind in (Tile.FULL, Tile.DIAGONAL, Tile.SKIP))


def _grid(ax: style.Axes, name: str, tiling: Tiling) -> None:
    centres: dict[Tile, list] = {kind: [] for kind in FILLS}
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            rows, cols, kind = tiling.rows(i), tiling.cols(j), tiling.kind(i, j)
            x, y, w, h = cols.start, rows.start, cols.stop - cols.start, rows.stop - rows.start
            style.box(ax, x, y, w, h, "", FILLS[kind], hatch=hatch(kind), linewidth=0.6, edgecolor=style.QUIET)
            centres[kind].append((x + w / 2, y + h / 2))
    row = np.arange(-1, tiling.N_q)  # the line between what is seen and what is not: where each row's interval ends
    ax.plot(tiling.interval(row)[1], row + 1, color=style.INK, linewidth=1.4)
    for kind in (Tile.FULL, Tile.SKIP):
        ground = dict(facecolor=FILLS[kind], edgecolor="none", pad=1.5)
        words = f"{kind.name}\n{len(centres[kind])}"
        x, y = np.mean(centres[kind], axis=0)
        style.note(ax, x, y, words, ha="center", color=style.ink_on(FILLS[kind]), bbox=ground)
    style.bare(ax, (-4, tiling.N_k + 4), (-4, tiling.N_q + 4), aspect="equal", anchor="N", ylabel="← queries")
    ax.set_title(f"{name}, {tiling.N_q} × {tiling.N_k}")
    ax.set_xlabel(f"keys → ({len(centres[Tile.DIAGONAL])} DIAGONAL tiles, masked)", fontsize=style.SMALL)


def _curves(ax: style.Axes, N: np.ndarray, shares: dict) -> None:
    for B, (formula, counted) in shares.items():
        ax.plot(N, formula, color=style.QUIET, linewidth=1.4)
        ax.plot(N, counted, "o", color=style.INK, markersize=3.5)
        style.note(ax, 0.93 * N[0], formula[0], f"blocks of {B}", ha="right")
    ax.axhline(0.5, color=style.QUIET, linewidth=0.8, linestyle=(0, (4, 2)))
    style.note(ax, N[-1], 0.47, "one half: what the mask leaves of a long sequence", ha="right", va="top")
    ax.set(xscale="log", ylim=(0.38, 1.05), yticks=[0.5, 0.75, 1.0])
    style.log_ticks(ax.xaxis, N)
    ax.set(xlim=(N[0] / 2.7, N[-1] * 1.15), xlabel="sequence length N (N_q = N_k)")
    ax.set_title("Tiles computed, as a share of all: (T + 1) / 2T")
