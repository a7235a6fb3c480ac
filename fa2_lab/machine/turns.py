"""Additions to dQ in a fixed order: a model of who waits for whom, and how long.

Column blocks are handed out one after the other to programs that take the next when they are done, and go through the
row blocks that see them. At every row block they add in one order, whoever is quicker, as
kernels/hopper/backward/turns.py has it: the last column block first. Time is counted in steps, one row block each.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from fa2_lab.tiles import Tiling


@dataclass(frozen=True)
class Item:
    """A column block of a head, and the row blocks that it adds to, in this order."""

    head: int
    block: int
    rows: list[int]


def handed_out(tiling: Tiling, heads: int, at_once: int, last_column_first: bool = True) -> Iterator[Item]:
    """All column blocks in the order of the tile scheduler, which has so many heads side by side."""
    blocks = [(block, tiling.visited_rows(block)) for block in range(tiling.T_c)]
    for begin in range(0, heads, at_once):
        for block, rows in blocks[:: -1 if last_column_first else 1]:
            for head in range(begin, min(begin + at_once, heads)):
                yield Item(head, block, rows)


def time(items: Iterator[Item], SMs: int, in_turn: bool, handover: float = 1.5, ends: float = 3.0) -> float:
    """Steps until all is done. At one place an addition ends `handover` steps after the one before it, or later.

    `ends` is what a column block takes besides its steps. Whoever is waited for was handed out before, so column blocks
    are timed one after the other.
    """
    free = [0.0] * SMs
    ended: dict[tuple[int, int], float] = {}
    for item in items:
        now = heapq.heappop(free) + ends
        for i in item.rows:
            now += 1
            if in_turn:
                now = max(now, ended.get((item.head, i), 0.0))
                ended[item.head, i] = now + handover
        heapq.heappush(free, now)
    return max(free)
