"""Geometry of a sequence that is sharded among ranks: which rows a rank holds, and which keys of another rank they see.

The module repeats tiles.py one level higher, with the same three cases: a pair of pieces is SKIP, DIAGONAL or FULL.

contiguous   rank r holds the r-th piece of the sequence
zigzag       rank r holds the r-th piece from the front and the r-th from the back, so that causal work is even

The rows of a rank are in the order of the sequence. In zigzag, the front piece is the longer one if the two pieces
differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fa2_lab.tiles import Tile, whole_number

LAYOUTS = ("zigzag", "contiguous")


class Meeting(NamedTuple):
    """The queries of one rank and the keys of one rank that meet in one kernel call.

    The slices count the rows of each rank from 0. `kind` is SKIP, DIAGONAL or FULL, as for a tile.
    """

    queries: slice
    keys: slice
    kind: Tile


def check_layout(layout: str) -> None:
    """Raise an error unless the layout is "zigzag" or "contiguous"."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; it takes one of {', '.join(LAYOUTS)}")


def even_lengths(N: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank, as even as possible.

    If N is not divisible, the first ranks get one row more.
    """
    N, ranks = whole_number("N", N, low=1), whole_number("ranks", ranks, low=1)
    return [N // ranks + (rank < N % ranks) for rank in range(ranks)]


def front(length: int, layout: str) -> int:
    """Return the number of rows in the first piece of a rank that has `length` rows."""
    return length - length // 2 if layout == "zigzag" else length


def pieces(lengths: Sequence[int], layout: str) -> list[list[slice]]:
    """Return for each rank the slices of the sequence that are its pieces, given the number of rows of each rank."""
    check_layout(layout)
    ranks = range(len(lengths))
    places: list[list[slice]] = [[] for _ in ranks]
    start = 0
    for rank in ranks:
        places[rank].append(slice(start, start := start + front(lengths[rank], layout)))
    for rank in reversed(ranks):
        if layout == "zigzag":
            places[rank].append(slice(start, start := start + lengths[rank] // 2))
    return places


def meeting(lengths: Sequence[int], rank: int, source: int, layout: str, causal: bool) -> Meeting:
    """Return which queries of `rank` see which keys of `source`.

    These queries and keys always need one kernel call or none.

    With a causal mask, the rows of a rank see its own keys as in any causal sequence. In zigzag, the rows of a rank see
    all keys in the front piece of an earlier rank, and only its back piece sees the keys of a later rank, all of them.
    """
    whole, keys = slice(0, lengths[rank]), slice(0, lengths[source])
    kind = Tile.FULL
    if causal and rank == source:
        kind = Tile.DIAGONAL
    elif causal and source < rank:
        keys = slice(0, front(lengths[source], layout))
    elif causal:
        whole = slice(front(lengths[rank], layout), lengths[rank])
    return Meeting(whole, keys, kind if size(whole) and size(keys) else Tile.SKIP)


def halves(length: int, causal: bool) -> list[Meeting]:
    """Return two calls of about equal work into which the meeting of a rank with itself is split.

    Under the causal mask, the upper three quarters of the rows have 9/16 of the work. In each call, the last query is
    aligned with the last key, as a causal call needs it.
    """
    middle = length - length // (4 if causal else 2)
    kind = Tile.DIAGONAL if causal else Tile.FULL
    first = Meeting(slice(0, middle), slice(0, middle if causal else length), kind if middle else Tile.SKIP)
    return [first, Meeting(slice(middle, length), slice(0, length), kind if length > middle else Tile.SKIP)]


def size(rows: slice) -> int:
    return rows.stop - rows.start
