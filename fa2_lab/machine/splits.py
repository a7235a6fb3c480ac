"""Decode: how the keys of a long cache are split among programs, and what it costs.

One query is one row block, so the heads alone leave most SMs idle, and what the rest of them can read sets the pace.
Three launches are compared, all as blocks for grid.schedule: a block for each head; every head in the same number of
splits; and equal shares of all tiles laid end to end, in which a program may end one head and begin the next. The
kernels (kernels/decode) take equal shares: there is no second wave, and unequal lengths do not matter. Time is
counted in turns: reading a tile is one, and so is beginning with a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fa2_lab.machine import grid
from fa2_lab.machine.chips import Chip
from fa2_lab.tiles import cdiv, whole_number

STATISTIC = 4  # bytes of a number in a part: m, l and o are kept in fp32


@dataclass(frozen=True)
class Cache:
    """What one decoding step reads: so many keys of each sequence, and the queries that share a K/V head."""

    lengths: tuple[int, ...]
    kv_heads: int
    d: int
    rows: int = 1  # queries of one K/V head: the heads of its group, times N_q
    itemsize: int = 2
    B_c: int = 32

    def __post_init__(self):
        for name in ("kv_heads", "d", "rows", "itemsize", "B_c"):
            whole_number(name, getattr(self, name), low=1)
        if not self.lengths:
            raise ValueError("lengths: got none; it takes the number of keys of at least one sequence")
        for n in self.lengths:
            whole_number("lengths", n, low=0)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of every head, sequence by sequence."""
        return tuple(cdiv(n, self.B_c) for n in self.lengths for _ in range(self.kv_heads))

    @property
    def bytes(self) -> int:
        """Keys and values, each read once, however many queries share them."""
        return 2 * sum(self.lengths) * self.kv_heads * self.d * self.itemsize

    @property
    def tile_bytes(self) -> int:
        return 2 * self.B_c * self.d * self.itemsize

    @property
    def part_bytes(self) -> int:
        """One part (m, l, o) of one head, written and read again."""
        return 2 * self.rows * (self.d + 2) * STATISTIC

    @property
    def flops_per_byte(self) -> Fraction:
        """4 d FLOPs for each row and key, over the 2 d elements of a key and its value."""
        return Fraction(2 * self.rows, self.itemsize)


# Equal shares ---------------------------------------------------------------------------------------------------

TEAMS_FILL = 0.95  # of the slots: with fewer, equal shares for all slots are as good
WELL_FILLED = 0.9  # of the slots, over all waves: then whole heads are as good as equal shares, and need no merge


def whole(slots: int, heads: int) -> bool:
    """Whether so many heads of equal length fill the slots, so that every program may read one from end to end."""
    return heads > 0 and grid.efficiency(heads, slots) >= WELL_FILLED


def team(slots: int, heads: int, tiles: int, least: int = 1) -> int:
    """How many programs take each head's tiles in turn, of heads of one length: one where whole heads fill the slots.

    Several read close together, which memory serves sooner than shares far apart. But no program may read two heads,
    and each must have two tiles or more, worth their part: 0 where equal shares are better.
    """
    if whole(slots, heads):
        return 1
    size = slots // heads
    pays = size > 1 and size * heads >= TEAMS_FILL * slots and tiles >= 2 * least * size
    return size if pays else 0


def in_turn(w: int, size: int, tiles: int) -> tuple[int, range]:
    """The head of program w in teams of such a size, and the tiles that it takes."""
    return w // size, range(w % size, tiles, size)


def least_share(rows: int, d: int, B_c: int, itemsize: int) -> int:
    """Turns below which a share is not worth it: reading them takes no longer than writing and reading their part."""
    cache = Cache((1,), 1, d, rows, itemsize, B_c)
    return cdiv(cache.part_bytes, cache.tile_bytes)


@dataclass(frozen=True)
class Shares:
    """The heads end to end, cut into equal shares: program w takes turns w·share to (w + 1)·share.

    A head has one turn to begin it (its queries, and a pipeline that has to fill) and one for each of its tiles.
    """

    tiles: tuple[int, ...]  # of each head
    programs: int
    least: int = 1

    def __post_init__(self):
        whole_number("programs", self.programs, low=1)
        whole_number("least", self.least, low=1)
        if not self.tiles:
            raise ValueError("tiles: got none; it takes the tiles of at least one head")
        for n in self.tiles:
            whole_number("tiles", n, low=0)

    @property
    def turns(self) -> int:
        return sum(self.tiles) + len(self.tiles)

    @property
    def share(self) -> int:
        return max(cdiv(self.turns, self.programs), self.least)

    @property
    def busy(self) -> int:
        """Programs that get something."""
        return cdiv(self.turns, self.share)

    def begin(self, head: int) -> int:
        """The turn that begins a head."""
        return sum(self.tiles[:head]) + head

    def spans(self, w: int) -> list[tuple[int, int, int]]:
        """What program w reads: (head, first tile, last tile + 1), in order."""
        found = []
        for head, n in enumerate(self.tiles):
            begin = self.begin(head)
            first, last = max(w * self.share, begin), min((w + 1) * self.share, begin + 1 + n)
            if first < last:
                found.append((head, max(first - begin - 1, 0), last - begin - 1))
        return found

    def readers(self, head: int) -> range:
        """The programs that read some of a head. One finishes it by itself; several leave as many parts."""
        begin = self.begin(head)
        return range(begin // self.share, (begin + self.tiles[head]) // self.share + 1)

    def slot(self, w: int, head: int) -> int:
        """Where program w leaves its part of a head. From one part to the next w or head grows: no two meet."""
        return w + head

    @property
    def slots(self) -> int:
        return self.programs + len(self.tiles)

    @property
    def parts(self) -> int:
        """Parts that are written and merged."""
        counts = [len(self.readers(head)) for head in range(len(self.tiles))]
        return sum(n for n in counts if n > 1)

    def blocks(self) -> list[grid.Block]:
        """As thread blocks, each as long as its turns."""
        return [grid.Block(w, None, min(self.share, self.turns - w * self.share)) for w in range(self.busy)]


# The other ways ---------------------------------------------------------------------------------------------------


def same_splits(tiles: Sequence[int], splits: int) -> list[grid.Block]:
    """Every head in so many splits of nearly equal length, each with a turn to begin it; 1 is a block for each head."""
    whole_number("splits", splits, low=1)
    cut = [[len(part) for part in np.array_split(range(n), min(splits, max(n, 1)))] for n in tiles]
    return [grid.Block(head, k, n + 1) for head, part in enumerate(cut) for k, n in enumerate(part)]


def best_splits(tiles: Sequence[int], slots: int, most: int = 64) -> int:
    """The smallest number of splits that ends first, by the waves of grid.py."""
    ends = {splits: grid.schedule(same_splits(tiles, splits), slots).makespan for splits in range(1, most + 1)}
    return min(ends, key=ends.get)


# Time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How fast the bytes come: for all programs together, and for one alone, which waits for what it has asked for."""

    bandwidth: float  # bytes per second of the chip
    in_flight: int  # bytes that one program has on their way
    latency: float = 2.5e-6  # seconds from asking for a tile to being done with it, as eight programs took on an H200

    @property
    def alone(self) -> float:
        """Little's law: bytes on their way over the time that each of them takes."""
        return self.in_flight / self.latency

    def each(self, programs: int) -> float:
        """Bytes per second of each of so many programs at work."""
        return min(self.alone, self.bandwidth / programs)

    @property
    def enough(self) -> int:
        """The fewest programs that draw all of the bandwidth."""
        return int(np.ceil(self.bandwidth / self.alone))


def pace(chip: Chip, cache: Cache, stages: int, reached: float = 1.0) -> Pace:
    """A program keeps stages − 1 tiles on their way; `reached` is the share of the bandwidth that a copy gets."""
    whole_number("stages", stages, low=2)
    return Pace(reached * chip.hbm_per_second, (stages - 1) * cache.tile_bytes)


def seconds(cache: Cache, blocks: Sequence[grid.Block], slots: int, speed: Pace) -> float:
    """Until the last block ends, if all slots that ever work share the bandwidth evenly; launches are left out."""
    ran = grid.schedule(blocks, slots)
    return ran.makespan * cache.tile_bytes / speed.each(min(len(blocks), slots))
