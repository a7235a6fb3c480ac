"""A model that predicts the clock cycles of each ladder rung from its compiled code and can be checked by hand.

For each tile of its 64 rows, a warpgroup uses the units of an SM one after another: the path from L2 into shared memory
(only before rung 10, which introduces prefetching), the tensor cores, the issue slots and the exponential unit. Then
the warpgroup waits for a fixed time without using any shared unit. The warpgroups of an SM queue at every unit, and
`clocks_per_tile` is a mean-value analysis of these queues. Row blocks queue for SMs in launch order, and `makespan`
simulates this queue.

Three constants are fitted to measurements without a mask at d = 128: L2_TO_SMEM_BYTES_PER_CLOCK and STALL_CLOCKS to
rungs 07 and 09, and STALL_CLOCKS_PREFETCHED to rungs 11 to 16. All other values come from the compiled code and the
chip's datasheet. The model accounts for HBM only in rung 00, and it ignores the fact that one matmul may wait for
another.
"""

import heapq
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from fa2_lab.machine.chips import H200, Chip
from fa2_lab.tiles import cdiv

ROWS = 64  # rows per warpgroup
L2_TO_SMEM_BYTES_PER_CLOCK = 29.5  # bytes per clock per SM, from L2 through registers into shared memory
STALL_CLOCKS = 120  # clock cycles per tile spent on other waits, such as for barriers and dependent instructions
STALL_CLOCKS_PREFETCHED = 375  # like STALL_CLOCKS, but for rungs that prefetch the next tiles

# The number of the rung that introduces each change. All later rungs keep the change.
ON_CHIP, ROW_BLOCKS, SKIPPING, COPIED_AHEAD, HEAVY_FIRST = 2, 3, 7, 10, 12


class Rung(NamedTuple):
    """The properties of a rung that the model uses: its number, and counts taken from its compiled tile loop."""

    number: int
    programs: int  # programs that fit on an SM at the same time
    instructions: int  # instructions per thread per tile
    exponentials: int  # exponentials among these instructions
    d: int = 128
    keys: int = 64  # keys per tile
    consumers: int = 1  # warpgroups per program that run matmuls, each with 64 rows


# One tile -------------------------------------------------------------------------------------------------------


def unit_clocks(rung: Rung, chip: Chip = H200) -> dict[str, float]:
    """Return {unit: clock cycles that one tile of one warpgroup takes} for the units of an SM.

    A warpgroup has four warps, one on each of the SM's four schedulers.
    """
    clocks = dict(
        tensor=4 * ROWS * rung.keys * rung.d / chip.tensor_flops_per_clock,
        issue=float(rung.instructions),
        exp=128 * rung.exponentials / chip.exp_per_clock,
    )
    if rung.number < COPIED_AHEAD:
        clocks["path"] = l2_bytes_per_tile(rung) / L2_TO_SMEM_BYTES_PER_CLOCK
    return clocks


def l2_bytes_per_tile(rung: Rung) -> int:
    """Return the number of bytes that one tile moves between L2 and the SM.

    From rung 02 on, a tile loads K and V. In earlier rungs, it loads Q, and it both loads and stores O, ℓ and m in
    fp32.
    """
    if rung.number < ON_CHIP:
        return ROWS * (2 * rung.d + 4 * 2 * (rung.d + 2))
    return 2 * rung.keys * 2 * rung.d


def clocks_per_tile(rung: Rung, programs: int | None = None, chip: Chip = H200) -> float:
    """Return the clock cycles that a warpgroup takes per tile if `programs` programs share the SM.

    By default, `programs` is the largest number that fits on the SM. The function assumes that a warpgroup finds, at
    each unit, the queue that this unit would have on average if the SM ran one fewer warpgroup (mean-value analysis).
    """
    demands = unit_clocks(rung, chip)
    wait = STALL_CLOCKS if rung.number < COPIED_AHEAD else STALL_CLOCKS_PREFETCHED
    queued = dict.fromkeys(demands, 0.0)
    tile = wait + sum(demands.values())
    for warpgroups in range(1, (programs or rung.programs) * rung.consumers + 1):
        time_at = {unit: demand * (1 + queued[unit]) for unit, demand in demands.items()}
        tile = wait + sum(time_at.values())
        queued = {unit: warpgroups * time / tile for unit, time in time_at.items()}
    return tile


# One launch -----------------------------------------------------------------------------------------------------


@cache
def predicted_clocks(rung: Rung, heads: int, N: int = 4096, causal: bool = False, chip: Chip = H200) -> float:
    """Return the predicted clock cycles of one launch of a rung with `heads` heads of N queries and N keys."""
    if rung.number == 0:
        moved = heads * N * (12 * N + 8 * rung.d)  # bytes of fp32 S and 16-bit P (each written and read), Q, K, V and O
        return moved * chip.clock_hz / chip.hbm_bytes_per_second
    clocks = [clocks_per_tile(rung, k, chip) for k in range(1, rung.programs + 1)]
    return makespan(tiles_per_program(rung, heads, N, causal), clocks, chip.SMs)


def tiles_per_program(rung: Rung, heads: int, N: int, causal: bool) -> list[int]:
    """Return the number of tiles that each program computes, as a list in launch order."""
    rows = ROWS * rung.consumers
    if rung.number < ROW_BLOCKS:
        return heads * [cdiv(N, rows) * cdiv(N, rung.keys)]
    seen = [min(N, first + rows) if causal and rung.number >= SKIPPING else N for first in range(0, N, rows)]
    tiles = [cdiv(keys, rung.keys) for keys in seen]
    if rung.number < HEAVY_FIRST:
        return heads * tiles
    return [n for n in tiles[::-1] for _ in range(heads)]


def makespan(tiles: Sequence[int], clocks: Sequence[float], SMs: int = H200.SMs) -> float:
    """Return the number of clock cycles until all programs have ended.

    `tiles[p]` is the number of tiles of program p, in launch order. While k + 1 programs share an SM, each of their
    tiles takes `clocks[k]` clock cycles.
    """
    waiting = iter(tiles)
    tiles_left: list[list[float]] = [[] for _ in range(SMs)]  # tiles left in each running program, per SM
    since, plans = [0.0] * SMs, [0] * SMs  # per SM: the time of the last call to plan_end(), and the number of calls
    ends: list[tuple[float, int, int]] = []  # (predicted end of a program, its SM, plans[SM] at the prediction)

    def plan_end(SM: int, now: float) -> None:
        since[SM], plans[SM] = now, plans[SM] + 1
        if tiles_left[SM]:
            then = now + min(tiles_left[SM]) * clocks[len(tiles_left[SM]) - 1]
            # Without rounding, the order of equal times would depend on how this Python version adds floats.
            heapq.heappush(ends, (round(then, 3), SM, plans[SM]))

    for _ in clocks:
        for SM in range(SMs):
            tiles_left[SM] += [n for n in [next(waiting, 0)] if n]
    for SM in range(SMs):
        plan_end(SM, now=0.0)
    now = 0.0
    while ends:
        then, SM, planned = heapq.heappop(ends)
        if planned != plans[SM]:
            continue
        now, done = then, (then - since[SM]) / clocks[len(tiles_left[SM]) - 1]
        tiles_left[SM] = [n - done for n in tiles_left[SM] if n - done > 1e-5]
        while len(tiles_left[SM]) < len(clocks) and (n := next(waiting, 0)):
            tiles_left[SM].append(n)
        plan_end(SM, now)
    return now


def speedup(before: Rung, after: Rung, heads: int, N: int = 4096, causal: bool = False) -> float:
    """Return the speedup that the model predicts for the rung `after` over the rung `before`."""
    return predicted_clocks(before, heads, N, causal) / predicted_clocks(after, heads, N, causal)
