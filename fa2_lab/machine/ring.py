"""Formulas for the bytes that each rank sends in ring attention, and for the tiles that it computes.

Each rank keeps its queries. At each step, it sends its current block of K and V to its right neighbour. In the backward
pass, the block's dK and dV follow one step later and reach the block's owner in the last step. K and V are sent in
their own dtype, and dK and dV in fp32.
"""

from collections.abc import Sequence

import numpy as np

from fa2_lab.machine.io_model import tiles_per_row
from fa2_lab.reference.shards import visible_tile
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile, Tiling

FP32_BYTES = 4  # bytes per element of dK and dV sent over the links


def bytes_sent(
    lengths: Sequence[int], rank: int, direction: str, *, kv_heads: int, d: int, itemsize: int = 2
) -> dict[str, int]:
    """Return the number of bytes that one rank sends, separately for "K V" and, in the backward pass, "dK dV".

    A rank sends K and V of every block except its right neighbour's and, in the backward pass, dK and dV of every block
    except its own. `lengths` lists the number of rows on each rank. Each element of K and V has `itemsize` bytes.
    `kv_heads` is the number of K/V heads in the whole batch.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction: got {direction!r}; it takes forward or backward")
    N, size = sum(lengths), len(lengths)
    row_elements = 2 * kv_heads * d  # elements of K and V, or of dK and dV, in one row
    if size == 1:
        return {}
    bytes_of = {"K V": (N - lengths[(rank + 1) % size]) * row_elements * itemsize}
    return bytes_of | ({"dK dV": (N - lengths[rank]) * row_elements * FP32_BYTES} if direction == "backward" else {})


def tiles_per_step(lengths: Sequence[int], layout: str, causal: bool, B_r: int = 128, B_c: int = 128) -> np.ndarray:
    """Return an array with the number of tiles per head that each rank computes in each forward step.

    The array is indexed by [rank, step]. `lengths` lists the number of rows on each rank, and `layout` is "zigzag" or
    "contiguous".
    """
    size = len(lengths)
    tiles = np.zeros((size, size), dtype=int)
    for rank, step in np.ndindex(size, size):
        seen = visible_tile(lengths, rank, (rank - step) % size, layout, causal)
        if seen.kind is not Tile.SKIP:
            n_q, n_k = (rows.stop - rows.start for rows in (seen.queries, seen.keys))
            mask = CAUSAL if seen.kind is Tile.DIAGONAL else NO_MASK
            tiles[rank, step] = tiles_per_row(Tiling(n_q, n_k, B_r, B_c, mask)).sum()
    return tiles


def busy_fraction(tiles: np.ndarray) -> float:
    """Return the fraction of time that an average rank is busy if all ranks wait for the rank with the most tiles."""
    most = tiles.sum(axis=1).max()
    return float(tiles.sum() / (len(tiles) * most)) if most else 1.0
