"""Geometry of a sequence sharded across ranks: which rows a rank holds, and which keys of other ranks these rows see.

A rank's shard consists of one or two pieces of the sequence, depending on the layout:

contiguous   rank r holds the r-th piece of the sequence
zigzag       rank r holds the r-th piece from the front and the r-th piece from the back, which balances the causal work

Like a tile in tiles.py, the pair of one rank's queries and another rank's keys is SKIP, DIAGONAL or FULL. The rows
within a rank keep the order of the sequence. In the zigzag layout, if a rank has an odd number of rows, its front piece
is one row longer than its back piece.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fa2_lab.tiles import Tile, whole_number

LAYOUTS = ("zigzag", "contiguous")


class ShardTile(NamedTuple):
    """One kernel call of ring attention: a slice of one rank's queries, and a slice of its own or another rank's keys.

    The slices index rows within their rank, starting at 0. `kind` is SKIP, DIAGONAL or FULL, as for a tile.
    """

    queries: slice
    keys: slice
    kind: Tile


def check_layout(layout: str) -> None:
    """Raise an error unless the layout is "zigzag" or "contiguous"."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; it takes one of {', '.join(LAYOUTS)}")


def even_lengths(N: int, ranks: int) -> list[int]:
    """Return the number of rows on each rank if N rows are distributed as evenly as possible."""
    N, ranks = whole_number("N", N, low=1), whole_number("ranks", ranks, low=1)
    return [N // ranks + (rank < N % ranks) for rank in range(ranks)]


def front_length(length: int, layout: str) -> int:
    """Return the number of rows in the front piece of a rank that has `length` rows."""
    return length - length // 2 if layout == "zigzag" else length


def pieces(lengths: Sequence[int], layout: str) -> list[list[slice]]:
    """Return the pieces on each rank as slices of the sequence, given the number of rows on each rank."""
    check_layout(layout)
    ranks = range(len(lengths))
    places: list[list[slice]] = [[] for _ in ranks]
    start = 0
    for rank in ranks:
        places[rank].append(slice(start, start := start + front_length(lengths[rank], layout)))
    for rank in reversed(ranks):
        if layout == "zigzag":
            places[rank].append(slice(start, start := start + lengths[rank] // 2))
    return places


def visible_tile(lengths: Sequence[int], rank: int, source: int, layout: str, causal: bool) -> ShardTile:
    """Return the ShardTile that pairs the queries on `rank` with the keys on `source` that they see.

    A single kernel call computes the whole tile. Under a causal mask, there are three cases. A rank sees its own keys
    as in any causal sequence. All of its rows see the front piece of an earlier rank, and no other keys of that rank.
    Only the rows of its back piece see the keys of a later rank, and these rows see all of those keys. In the
    contiguous layout, the front piece is the whole shard, and there is no back piece.
    """
    queries, keys = slice(0, lengths[rank]), slice(0, lengths[source])
    kind = Tile.FULL
    if causal and rank == source:
        kind = Tile.DIAGONAL
    elif causal and source < rank:
        keys = slice(0, front_length(lengths[source], layout))
    elif causal:
        queries = slice(front_length(lengths[rank], layout), lengths[rank])
    return ShardTile(queries, keys, kind if row_count(queries) and row_count(keys) else Tile.SKIP)


def halves(length: int, causal: bool) -> list[ShardTile]:
    """Split the attention of a rank's queries to its own keys into two calls of about equal cost and return the calls.

    Under a causal mask, the first call covers the first three quarters of the rows, which account for 9/16 of the work.
    In each call, the last query is aligned with the last key, as in any causal call.
    """
    middle = length - length // (4 if causal else 2)
    kind = Tile.DIAGONAL if causal else Tile.FULL
    first = ShardTile(slice(0, middle), slice(0, middle if causal else length), kind if middle else Tile.SKIP)
    return [first, ShardTile(slice(middle, length), slice(0, length), kind if length > middle else Tile.SKIP)]


def row_count(rows: slice) -> int:
    """Return the number of rows in a slice."""
    return rows.stop - rows.start
