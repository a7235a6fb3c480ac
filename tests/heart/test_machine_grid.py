"""machine/grid.py: the schedule against a simulation clock by clock, and owners against the meter."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa2_lab.machine import grid
from fa2_lab.machine.grid import BlockWork, fa1_grid, fa2_grid, schedule
from fa2_lab.reference import fa2
from fa2_lab.tiles import CAUSAL, Mask, Tiling
from fa2_lab.trace import Trace


def simulate_ticks(costs, slots):
    """Return (start, end) of each block, simulated tick by tick: free slots take the next blocks."""
    waiting, running, times, now = list(enumerate(costs)), [], {}, 0
    while waiting or running:
        running = [(n, end) for n, end in running if end > now]
        while waiting and len(running) < slots:
            n, cost = waiting.pop(0)
            times[n] = (now, now + cost)
            if cost:
                running.append((n, now + cost))
        now += 1
    return [times[n] for n in range(len(costs))]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=25), st.integers(1, 4), st.integers(1, 3))
def test_schedule_equals_a_clock_by_clock_simulation(costs, SMs, blocks_per_sm):
    scheduled = schedule([BlockWork(0, n, cost) for n, cost in enumerate(costs)], SMs, blocks_per_sm)
    expected = simulate_ticks(costs, SMs * blocks_per_sm)
    assert [(p.start, p.end) for p in scheduled.placements] == expected
    assert scheduled.makespan == max(end for _, end in expected) and scheduled.work == sum(costs)
    for SM in range(SMs):
        for slot in range(blocks_per_sm):  # nothing overlaps on one slot
            intervals = sorted((p.start, p.end) for p in scheduled.placements if (p.SM, p.slot) == (SM, slot))
            assert all(a[1] <= b[0] for a, b in pairwise(intervals))
    assert {p.SM for p in scheduled.placements} <= set(range(SMs))


def test_blocks_fill_all_sms_before_second_slots():
    scheduled = schedule([BlockWork(n, None, 1) for n in range(5)], 4, blocks_per_sm=2)
    assert [(p.SM, p.slot) for p in scheduled.placements] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
    assert scheduled.utilisation == 5 / 8 and scheduled.SMs_used == 4
    assert schedule([BlockWork(0, None, 0)], 4).utilisation == 0  # its mask leaves no tile


def test_grids_launch_head_by_head():
    tiling = Tiling(8, 12, 4, 4, CAUSAL)  # the diagonal ends in the corner: rows see 2 and 3 column blocks
    assert fa1_grid(2, tiling) == [BlockWork(0, None, 6), BlockWork(1, None, 6)]
    assert fa2_grid(2, tiling) == [BlockWork(0, 0, 2), BlockWork(0, 1, 3), BlockWork(1, 0, 2), BlockWork(1, 1, 3)]
    assert fa2_grid(1, tiling, "backward") == [BlockWork(0, 0, 2), BlockWork(0, 1, 2), BlockWork(0, 2, 1)]


# Owners and collisions ------------------------------------------------------------------------------------------

tilings = st.builds(
    lambda N_q, N_k, B_r, B_c, causal, length, left: Tiling(
        N_q, N_k, B_r, B_c, Mask(causal, None if length is None else min(length, N_k), window=(left, None))
    ),
    *[st.integers(1, n) for n in (12, 12, 5, 5)],
    st.booleans(),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(0, 12),
)


@settings(max_examples=40, deadline=None)
@given(tilings)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tile_owners_equal_the_traced_workers(direction, tiling):
    rng = np.random.default_rng(0)
    Q, dO = rng.standard_normal((2, tiling.N_q, 2))
    K, V = rng.standard_normal((2, tiling.N_k, 2))
    blocks, trace = dict(B_r=tiling.B_r, B_c=tiling.B_c, mask=tiling.mask), Trace()
    O, L = fa2.forward(Q, K, V, **blocks, trace=trace if direction == "forward" else Trace())
    if direction == "backward":
        fa2.backward(Q, K, V, O, L, dO, **blocks, trace=trace)
    owners = np.full((tiling.T_r, tiling.T_c), -1)
    for worker, i, j, kind in trace.work:
        if kind == "matmul":
            owners[i, j] = worker[0]
    assert np.array_equal(grid.owners(tiling, direction), owners)
    per_worker = np.bincount(owners[owners >= 0], minlength=tiling.T_r if direction == "forward" else tiling.T_c)
    assert np.array_equal(grid.worker_tiles(tiling, direction), per_worker)


@settings(max_examples=40, deadline=None)
@given(tilings)
@example(Tiling(8, 8, 4, 4))  # two meet, no more
def test_dq_writers_equal_the_backward_owners(tiling):
    assert grid.dq_writers(tiling) == [row[row >= 0].tolist() for row in grid.owners(tiling, "backward")]


def test_static_schedule_equals_hand_computed_times():
    scheduled = grid.static_schedule([grid.BlockWork(0, n, cost) for n, cost in enumerate((4, 1, 3, 1))], SMs=2)
    assert [(p.SM, p.start, p.end) for p in scheduled.placements] == [(0, 0, 4), (1, 0, 1), (0, 4, 7), (1, 1, 2)]
