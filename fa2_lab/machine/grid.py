"""A model that predicts when and on which SM each thread block runs, and which workers add to the same rows of dQ.

A block occupies one slot of one SM from its start to its end. Blocks start in launch order, each in the slot that
becomes free first (list scheduling). Time is measured in tiles of the forward or the backward pass. A backward tile
needs 2.5 times as many matmul FLOPs as a forward tile. The model assumes that blocks on the same SM do not slow each
other down.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa2_lab.machine.io_model import check_tiling, tiles_per_row
from fa2_lab.tiles import Tiling, cdiv, whole_number

ORDERS = ("rows", "heaviest first")


@dataclass(frozen=True)
class BlockWork:
    """The work of a thread block: its head, its row block (forward) or column block (backward), and its tile count."""

    head: int
    index: int | None  # None if the block computes the whole head, as in FA1
    cost: int  # number of tiles


@dataclass(frozen=True)
class Placement:
    """The SM and the slot in which a block ran, and the times, in tiles, at which the block started and ended."""

    SM: int
    slot: int  # the index of the slot within the SM
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The SM, slot, start time and end time of every block in a launch."""

    placements: tuple[Placement, ...]  # all blocks, in launch order
    SMs: int
    blocks_per_sm: int

    @property
    def slots(self) -> int:
        return self.SMs * self.blocks_per_sm

    @property
    def makespan(self) -> float:
        """The time, in tiles, at which the last block ends."""
        return max(p.end for p in self.placements)

    @property
    def work(self) -> float:
        return sum(p.end - p.start for p in self.placements)

    @property
    def utilisation(self) -> float:
        """The fraction of the makespan during which a slot is occupied, averaged over all slots."""
        return self.work / (self.slots * self.makespan) if self.work else 0.0

    @property
    def SMs_used(self) -> int:
        return len({p.SM for p in self.placements})

    @property
    def waves(self) -> int:
        return waves(len(self.placements), self.slots)


# Formulas for equal blocks ----------------------------------------------------------------------------------


def waves(blocks: int, slots: int) -> int:
    """Return the number of waves, which is the number of blocks that the busiest slot runs in succession."""
    return cdiv(whole_number("blocks", blocks, low=1), whole_number("slots", slots, low=1))


def efficiency(blocks: int, slots: int) -> float:
    """Return the fraction of slots that run a block, averaged over all waves."""
    return blocks / (waves(blocks, slots) * slots)


# The grids --------------------------------------------------------------------------------------------------


def fa1_grid(heads: int, tiling: Tiling) -> list[BlockWork]:
    """Return FA1's thread blocks for a forward or backward pass. Each block computes all tiles of one (batch, head)."""
    check_tiling(tiling)
    whole_number("heads", heads, low=1)
    return [BlockWork(head, index=None, cost=tiling.T_r * tiling.T_c) for head in range(heads)]


def fa2_grid(heads: int, tiling: Tiling, direction: str = "forward", order: str = "rows") -> list[BlockWork]:
    """Return the thread blocks of FA2, one per head and row block (forward) or column block (backward).

    A block's cost is the number of tiles that it computes. Skipped tiles are not counted.

    With the order "rows", the blocks are launched head by head in index order. Under a causal mask, each head then
    begins with its lightest block in the forward pass, and with its heaviest block in the backward pass. With
    "heaviest first", the blocks with the most tiles are launched first.
    """
    costs = [int(n) for n in worker_tiles(tiling, direction)]
    whole_number("heads", heads, low=1)
    blocks = [BlockWork(head, index, cost) for head in range(heads) for index, cost in enumerate(costs)]
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}; it takes one of {', '.join(ORDERS)}")
    return blocks if order == "rows" else sorted(blocks, key=lambda block: -block.cost)


def worker_tiles(tiling: Tiling, direction: str) -> np.ndarray:
    """Return the number of tiles of each FA2 worker as an array of shape (T_r,), or (T_c,) in the backward pass."""
    if direction == "forward":
        return tiles_per_row(tiling)
    return (owners(tiling, direction) >= 0).sum(axis=0)


def schedule(blocks: Sequence[BlockWork], SMs: int, blocks_per_sm: int = 1) -> Schedule:
    """Return the Schedule of blocks that start in launch order, each in the slot that becomes free first.

    An SM has `blocks_per_sm` slots. Every SM receives one block before any SM receives a second.
    """
    whole_number("SMs", SMs, low=1)
    whole_number("blocks_per_sm", blocks_per_sm, low=1)
    if not blocks:
        raise ValueError("blocks: got none; it takes at least one BlockWork")
    free = [(0.0, slot, SM) for slot in range(blocks_per_sm) for SM in range(SMs)]  # a sorted list is already a heap
    placements = []
    for block in blocks:
        start, slot, SM = heapq.heappop(free)
        placements.append(Placement(SM, slot, start, start + block.cost))
        heapq.heappush(free, (start + block.cost, slot, SM))
    return Schedule(tuple(placements), SMs, blocks_per_sm)


def static_schedule(blocks: Sequence[BlockWork], SMs: int) -> Schedule:
    """Return the Schedule of statically assigned blocks, in which SM p runs blocks p, p + SMs, p + 2 SMs and so on."""
    whole_number("SMs", SMs, low=1)
    free, placements = [0.0] * SMs, []
    for n, block in enumerate(blocks):
        SM = n % SMs
        placements.append(Placement(SM, slot=0, start=free[SM], end=free[SM] + block.cost))
        free[SM] += block.cost
    return Schedule(tuple(placements), SMs, 1)


# The worker that computes each tile, and the workers that add to the same dQ --------------------------------


def owners(tiling: Tiling, direction: str) -> np.ndarray:
    """Return an array (T_r, T_c) with the index of the worker that computes each tile, or −1 for a skipped tile.

    Workers are indexed by row block in the forward pass, and by column block in the backward pass.
    """
    check_tiling(tiling)
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction: got {direction!r}; it takes forward or backward")
    worker = np.full((tiling.T_r, tiling.T_c), -1)
    for i in range(tiling.T_r):
        for j in tiling.visited_cols(i):
            worker[i, j] = i if direction == "forward" else j
    return worker


def dq_writers(tiling: Tiling) -> list[list[int]]:
    """Return, for each row block i, a list of the backward workers that add to dQ_i.

    If several workers add to the same dQ_i, the kernel needs either atomic additions or a second pass.
    """
    check_tiling(tiling)
    return [tiling.visited_cols(i) for i in range(tiling.T_r)]
