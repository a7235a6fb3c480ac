"""A model of decode: how the keys of a long cache are split among programs, and how long the programs take.

A single query forms one row block, so one program per head would leave most SMs idle, and the few busy SMs could not
use the whole bandwidth. The module models three ways to launch the programs, each as a list of blocks for
grid.schedule(): one block per head; the same number of splits for every head (split-KV); and equal shares of the tiles
of all heads (stream-K), so that a program may finish one head and start the next. Equal shares need no second wave,
even if the sequences have different lengths. The kernels choose among the three by the rules in
kernels/decode/split_rules.py. Time is counted in units of work: one unit to read a tile, and one unit to start a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa2_lab.machine import grid
from fa2_lab.tiles import cdiv, real_number, whole_number

# Stream-K ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """The stream-K split: the work of all heads, laid end to end, is cut into equal shares, one per program.

    The work of a head is one unit to start the head (load its queries and fill the pipeline), plus one unit per tile.
    Program w executes the units from w · share to (w + 1) · share − 1.
    """

    tiles: tuple[int, ...]  # the number of tiles in each head
    programs: int
    min_share: int = 1

    def __post_init__(self) -> None:
        whole_number("programs", self.programs, low=1)
        whole_number("min_share", self.min_share, low=1)
        if not self.tiles:
            raise ValueError("tiles: got none; it takes the tiles of at least one head")
        for n in self.tiles:
            whole_number("tiles", n, low=0)

    @property
    def work(self) -> int:
        """The total work of all heads, in units."""
        return sum(self.tiles) + len(self.tiles)

    @property
    def share(self) -> int:
        return max(cdiv(self.work, self.programs), self.min_share)

    @property
    def busy_programs(self) -> int:
        """The number of programs that have at least one unit of work."""
        return cdiv(self.work, self.share)

    def first_unit(self, head: int) -> int:
        """Return the index of a head's first unit of work."""
        return sum(self.tiles[:head]) + head

    def spans(self, w: int) -> list[tuple[int, int, int]]:
        """Return the work of program w, in order, as a list of (head, begin, end).

        The program reads tiles begin … end − 1 of the head.
        """
        parts = []
        for head, n in enumerate(self.tiles):
            first = self.first_unit(head)
            begin, end = max(w * self.share - first, 0), min((w + 1) * self.share - first, 1 + n)
            if begin < end:  # unit 0 starts the head, and unit n + 1 is its tile n
                parts.append((head, max(begin - 1, 0), end - 1))
        return parts

    def readers(self, head: int) -> range:
        """Return the range of programs that work on a head.

        If a single program works on the head, it stores the result. Otherwise, each program stores a partial result.
        """
        first = self.first_unit(head)
        return range(first // self.share, (first + self.tiles[head]) // self.share + 1)

    def blocks(self) -> list[grid.BlockWork]:
        """Return a list with one block per share, as an argument for grid.schedule()."""
        return [
            grid.BlockWork(w, index=None, cost=min(self.share, self.work - w * self.share))
            for w in range(self.busy_programs)
        ]


# Split-KV ---------------------------------------------------------------------------------------------------------


def same_splits(tiles: Sequence[int], splits: int) -> list[grid.BlockWork]:
    """Return a list of blocks for grid.schedule(), in which every head is cut into `splits` nearly equal pieces."""
    whole_number("splits", splits, low=1)
    cut = [[len(part) for part in np.array_split(range(n), min(splits, max(n, 1)))] for n in tiles]
    return [grid.BlockWork(head, k, n + 1) for head, part in enumerate(cut) for k, n in enumerate(part)]


# Time -------------------------------------------------------------------------------------------------------------


def read_seconds(
    tiles: tuple[int, ...], tile_bytes: int, programs: int, slots: int, lone_rate: float, bandwidth: float
) -> float:
    """Return the time in seconds that `programs` programs take to read all tiles in equal shares.

    The time does not include launch overhead. `tiles` lists the number of tiles in each head, and a tile has
    `tile_bytes` bytes. A program that runs alone reads `lone_rate` bytes per second. Concurrent programs share the
    total of `bandwidth` bytes per second equally. `slots` is the number of programs that can run concurrently.
    """
    blocks = Shares(tiles, programs).blocks()
    lone_rate = real_number("lone_rate", lone_rate, "a number above 0", lambda x: 0 < x < math.inf)
    rate = min(lone_rate, bandwidth / min(len(blocks), slots))
    return grid.schedule(blocks, slots).makespan * tile_bytes / rate
