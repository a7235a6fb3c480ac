"""The timetable of the Hopper kernel: every job once and in order, and a forgotten release is found out."""

from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest

from fa2_lab.machine import asynchrony, chips, grid, hopper
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Barrier, Block, Deadlock
from fa2_lab.tiles import CAUSAL, NO_MASK, Mask, Tiling

SHAPES = [
    (16, 32, NO_MASK),
    (20, 30, CAUSAL),
    (30, 20, CAUSAL),
    (7, 9, CAUSAL),
    (13, 13, Mask(True, 5)),
    (15, 17, Mask(window=(4, 2))),
]


def end(block):
    return max(job.ended for job in block.jobs)


# Jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("visit", [hopper.look_ahead, hopper.in_sequence])
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("N_q, N_k, mask", SHAPES)
def test_every_visited_tile_has_its_products_and_its_copies_come_first(N_q, N_k, mask, consumers, visit):
    tiling = Tiling(N_q, N_k, 4, 4, mask)
    visits = sum(max(1, len(tiling.visited_cols(i))) for i in range(tiling.T_r))  # one tile is the least
    for stages, ping_pong, tensor in ((1, False, SHARED), (2, True, IN_ORDER), (3, True, SHARED)):
        block, _ = hopper.forward(tiling, consumers, stages, ping_pong, visit, tensor=tensor)
        kinds = Counter(job.label.split()[0] for job in block.jobs)
        assert kinds["S"] == kinds["PV"] == kinds["P"] == visits and kinds["K"] == kinds["V"]
        copied = {job.label: job.ended for job in block.jobs if job.unit == "copy"}
        for job in block.jobs:
            what, n = job.label.split()
            if what in ("S", "PV"):
                assert job.started >= copied[f"{dict(S='K', PV='V')[what]} {n}"]


# Faults -------------------------------------------------------------------------------------------------------


@contextmanager
def without(cls, method, nth, tensor=None):
    """The nth call of a method does nothing."""
    real, calls = getattr(cls, method), iter(range(10**6))

    def wrapped(self, *args):
        if (tensor is None or self.tensor == tensor) and next(calls) == nth:
            return None
        return real(self, *args)

    with patch.object(cls, method, wrapped):
        yield


@pytest.mark.parametrize("tensor", "QKV")
def test_a_forgotten_release_ends_in_a_deadlock_that_names_the_ring(tensor):
    with without(hopper.Ring, "release", 1, tensor), pytest.raises(Deadlock, match=f"producer waits for {tensor} empt"):
        hopper.forward(Tiling(24, 32, 4, 4))


def test_a_turn_that_is_not_passed_on_ends_in_a_deadlock():
    with without(hopper.PingPong, "pass_on", 3), pytest.raises(Deadlock, match=r"consumer \d waits for ping-pong"):
        hopper.forward(Tiling(16, 32, 4, 4), ping_pong=True)


# Barriers, units and time -------------------------------------------------------------------------------------


def test_phases():
    barrier = Barrier("x", 2)
    assert barrier.over(1).ready() and not barrier.over(0).ready(), "the phase before the first one counts as over"
    barrier.arrive("a")
    assert not barrier.over(0).ready()
    barrier.arrive("b")
    assert barrier.over(0).ready() and not barrier.over(1).ready()
    assert dict(barrier.came) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    "manner, ends", [(SHARED, (20, 20)), (IN_ORDER, (10, 20)), (asynchrony.SIDE_BY_SIDE, (10, 10))]
)
def test_units_divide_themselves(manner, ends):
    block = Block(tensor=manner)

    def actor():
        job = block.start("tensor", 10, "x")
        yield job.done()

    block.run({"a": actor(), "b": actor()})
    assert tuple(job.ended for job in sorted(block.jobs, key=lambda job: job.actor)) == ends
    assert block.busy("tensor") == 1


def test_clocks_by_hand():
    """d 64 and 128 on an H200: tiles of 64 × 128, 16 of them, one consumer."""
    for d, product in ((64, 256), (128, 512)):
        price = hopper.costs(chips.H200, 64, 128, d)
        assert (price.scores, price.values, price.softmax) == (product, product, 512)
        for visit, clocks in (
            (hopper.in_sequence, 16 * (2 * product + 512)),
            (hopper.look_ahead, product + 512 + 15 * (product + 512) + product),
        ):
            block, _ = hopper.forward(Tiling(4, 64, 4, 4), 1, visit=visit, costs=price)
            assert end(block) == price.copy + clocks
            assert block.busy("tensor") == pytest.approx(16 * 2 * product / (price.copy + clocks))


def test_no_unit_works_on_more_than_it_can():
    block, _ = hopper.forward(Tiling(24, 64, 4, 4, CAUSAL), 3, ping_pong=True, tensor=IN_ORDER)
    for unit in ("tensor", "exp"):
        total = sum(job.clocks for job in block.jobs if job.unit == unit)
        assert total <= end(block) * (1 + 1e-9)
    spans = sorted((j.begun, j.ended) for j in block.jobs if j.unit == "tensor")
    assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans)), "in order means one at a time"


# Dealt or drawn -----------------------------------------------------------------------------------------------


def test_dealt_by_hand():
    ran = hopper.dealt([4, 1, 3, 1], SMs=2)
    assert [(p.SM, p.start, p.end) for p in ran.placed] == [(0, 0, 4), (1, 0, 1), (0, 4, 7), (1, 1, 2)]
    drawn = grid.schedule([grid.Block(0, n, cost) for n, cost in enumerate([4, 1, 3, 1])], 2)
    assert (ran.makespan, drawn.makespan) == (7, 5)
