"""Geometry of a sequence that is cut among ranks: which rank holds which rows, and which of another's keys they see.

It is tiles.py one level higher, with the same three cases: a pair of pieces is SKIP, DIAGONAL or FULL.

contiguous   rank r holds the r-th piece of the sequence
zigzag       rank r holds the r-th piece from the front and the r-th from the back, so that causal work is even

The rows of a rank are in the order of the sequence. In zigzag, the front piece is the longer half if they differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fa2_lab.tiles import Tile, whole_number

LAYOUTS = ("zigzag", "contiguous")


class Meeting(NamedTuple):
    """The queries of a rank and the keys of a block that meet in one kernel call. Each rank counts its own rows."""

    queries: slice
    keys: slice
    kind: Tile


def check_layout(layout: str) -> None:
    """Raise an error if the layout does not exist."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; it takes one of {', '.join(LAYOUTS)}")


def even_lengths(N: int, ranks: int) -> list[int]:
    """Return how many of N rows each rank gets: as evenly as possible, and one more on the first ranks if need be."""
    N, ranks = whole_number("N", N, low=1), whole_number("ranks", ranks, low=1)
    return [N // ranks + (rank < N % ranks) for rank in range(ranks)]


def front(length: int, layout: str) -> int:
    """Return how many of a rank's rows are its first piece."""
    return length - length // 2 if layout == "zigzag" else length


def pieces(lengths: Sequence[int], layout: str) -> list[list[slice]]:
    """Return for each rank the positions of its pieces in the sequence."""
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
    """Return which queries of `rank` meet which keys of `source`. This always takes one kernel call or none.

    With a causal mask, a rank sees its own rows as any sequence sees itself. In zigzag, its rows see the whole front
    piece of an earlier rank, and its back piece sees all rows of a later rank.
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
    """Split a rank's meeting with itself into two calls of about equal work. Under the causal mask, the upper three
    quarters of its rows are 9/16 of it. Both are aligned, because a causal call aligns the last query with the last
    key."""
    middle = length - length // (4 if causal else 2)
    kind = Tile.DIAGONAL if causal else Tile.FULL
    first = Meeting(slice(0, middle), slice(0, middle if causal else length), kind if middle else Tile.SKIP)
    return [first, Meeting(slice(middle, length), slice(0, length), kind if length > middle else Tile.SKIP)]


def size(rows: slice) -> int:
    return rows.stop - rows.start
