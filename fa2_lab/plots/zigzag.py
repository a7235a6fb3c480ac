"""Diagram of each rank's rows if its shard is contiguous, and if its shard pairs a front piece with a back piece."""

import numpy as np

from fa2_lab.machine import ring
from fa2_lab.plots import style
from fa2_lab.reference.shards import LAYOUTS, even_lengths, pieces


def data(ranks: int = 4, N: int = 131072, B: int = 128) -> dict:
    """Return, for each layout, which rank computes each (Q piece, K piece) pair, and each rank's number of tiles."""
    owners = {layout: owners_of(ranks, layout) for layout in reversed(LAYOUTS)}
    tiles = {
        layout: ring.tiles_per_step(even_lengths(N, ranks), layout, causal=True, B_r=B, B_c=B).sum(axis=1).tolist()
        for layout in owners
    }
    return dict(owners=owners, tiles=tiles, setting=f"{N:,} tokens on {ranks} ranks, tiles of {B} × {B}, one head")


def owners_of(ranks: int, layout: str) -> np.ndarray:
    """Return an array whose entry [i, j] is the rank that holds piece i's rows, or −1 if they see no key of piece j."""
    rank_of = np.empty(2 * ranks, dtype=int)
    for rank, places in enumerate(pieces([2] * ranks, layout)):
        for place in places:
            rank_of[place] = rank
    return np.where(np.tri(2 * ranks, dtype=bool), rank_of[:, None], -1)


@style.picture
def draw(owners: dict[str, np.ndarray], tiles: dict[str, list[int]], setting: str) -> style.Drawn:
    """Show the rank that computes each part of a causal S under two layouts, and the number of tiles on each rank.

    `owners` is {layout: array with the rank that computes each pair of pieces, or −1 if nothing is visible}. `tiles` is
    {layout: number of tiles on each rank}.
    """
    caption = "Contiguous shards make causal work uneven, but a front and a back piece per rank make it even."
    figure, axes = style.new_stacked_figure(
        4.1, f"{caption} Here are {setting}.", nrows=2, ncols=2, height_ratios=[2.5, 1]
    )
    figure.get_layout_engine().set(w_pad=0.08)
    length = setting.split(" on ")[0]
    most = max(max(counts) for counts in tiles.values())
    busy = {layout: sum(counts) / (len(counts) * max(counts)) for layout, counts in tiles.items()}
    for column, (layout, owner) in enumerate(owners.items()):
        ax = axes[0][column]
        style.tile_axes(ax, *owner.shape)
        ax.set_title(layout)
        style.draw_owners(ax, owner)
        counts = {f"rank {rank}": n for rank, n in enumerate(tiles[layout])}
        words, fills = [f"{n:,}" for n in tiles[layout]], [style.worker_color(rank) for rank in range(len(counts))]
        style.named_bars(axes[1][column], counts, words, fills)
        axes[1][column].set(xlim=(0, 1.4 * most))
        axes[1][column].set_title(f"{layout}, {length}: tiles, {busy[layout]:.0%} busy")
    counts = "; ".join(
        f"{layout} {', '.join(f'{n:,}' for n in tiles[layout])}, {busy[layout]:.0%} busy" for layout in tiles
    )
    alt = (
        f"Two causal score matrices, queries down, keys right, cut into {len(next(iter(owners.values())))} pieces each"
        f" way; every visible part has the number of the rank whose queries they are. Contiguous: rank 0 has the short"
        f" rows on top, the last rank the long ones. Zigzag: each rank has a piece from the top, one from the bottom."
        f" Bars beneath count the tiles of each rank: {counts}."
    )
    return figure, alt
