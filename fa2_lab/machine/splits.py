"""Decode: how the keys of a long cache are split among programs, and how much time this takes.

One query is one row block, so the heads alone leave most SMs idle, and the bandwidth that the other SMs can use sets
the pace. The module compares three launches, all as blocks for grid.schedule: one block per head, every head in the
same number of splits (split-KV), and equal shares of all tiles put end to end (stream-K), in which a program may end
one head and begin the next. Equal shares have no second wave, and unequal lengths do not matter to them.
kernels/decode/shares.py has the rules by which the kernels choose. Time is counted in units of work: one unit to read a
tile, and one to begin a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa2_lab.machine import grid
from fa2_lab.tiles import cdiv, real_number, whole_number

# The kernels' two ways --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Stream-K: the heads end to end, cut into equal shares.

    Program w does units w · share to (w + 1) · share of the work.

    A head is one unit of work to begin it (loading its queries and filling the pipeline), and one unit per tile.
    """

    tiles: tuple[int, ...]  # of each head
    programs: int
    least: int = 1

    def __post_init__(self) -> None:
        whole_number("programs", self.programs, low=1)
        whole_number("least", self.least, low=1)
        if not self.tiles:
            raise ValueError("tiles: got none; it takes the tiles of at least one head")
        for n in self.tiles:
            whole_number("tiles", n, low=0)

    @property
    def work(self) -> int:
        """The total units of work of all heads."""
        return sum(self.tiles) + len(self.tiles)

    @property
    def share(self) -> int:
        return max(cdiv(self.work, self.programs), self.least)

    @property
    def busy(self) -> int:
        """The number of programs that get any work."""
        return cdiv(self.work, self.share)

    def begin(self, head: int) -> int:
        """Return the index of the unit of work that begins a head."""
        return sum(self.tiles[:head]) + head

    def spans(self, w: int) -> list[tuple[int, int, int]]:
        """Return what program w reads, in order, as a list of (head, first tile, last tile + 1)."""
        found = []
        for head, n in enumerate(self.tiles):
            begin = self.begin(head)
            first, last = max(w * self.share, begin), min((w + 1) * self.share, begin + 1 + n)
            if first < last:
                found.append((head, max(first - begin - 1, 0), last - begin - 1))
        return found

    def readers(self, head: int) -> range:
        """Return the programs that read keys of a head.

        A single program finishes the head, and several leave partial results.
        """
        begin = self.begin(head)
        return range(begin // self.share, (begin + self.tiles[head]) // self.share + 1)

    def part(self, w: int, head: int) -> int:
        """Return the index of program w's partial result for a head.

        Indices are unique, because from one partial result to the next either w or the head grows.
        """
        return w + head

    @property
    def room(self) -> int:
        """The number of partial results that fit into the scratch buffer."""
        return self.programs + len(self.tiles)

    def blocks(self) -> list[grid.BlockWork]:
        """Return the shares as blocks for grid.schedule, whose cost is their units of work."""
        return [
            grid.BlockWork(w, index=None, cost=min(self.share, self.work - w * self.share)) for w in range(self.busy)
        ]


# The other ways ---------------------------------------------------------------------------------------------------


def same_splits(tiles: Sequence[int], splits: int) -> list[grid.BlockWork]:
    """Return the blocks for heads that are cut into `splits` splits of nearly equal length. 1 means one block per head.

    Each block needs one more unit of work to begin.
    """
    whole_number("splits", splits, low=1)
    cut = [[len(part) for part in np.array_split(range(n), min(splits, max(n, 1)))] for n in tiles]
    return [grid.BlockWork(head, k, n + 1) for head, part in enumerate(cut) for k, n in enumerate(part)]


# Time -------------------------------------------------------------------------------------------------------------


def seconds(
    tiles: tuple[int, ...], tile_bytes: int, programs: int, slots: int, alone: float, bandwidth: float
) -> float:
    """Return the seconds until the last of `programs` equal shares is read, without the time of launches.

    A program that has an SM and the memory to itself reads `alone` bytes per second. All programs that run at the same
    time share the `bandwidth`, in bytes per second, evenly. `slots` is the number of programs that can run at once.
    """
    blocks = Shares(tiles, programs).blocks()
    alone = real_number("alone", alone, "a number above 0", lambda x: 0 < x < math.inf)
    each = min(alone, bandwidth / min(len(blocks), slots))
    return grid.schedule(blocks, slots).makespan * tile_bytes / each
