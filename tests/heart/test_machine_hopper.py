"""A thread block, event by event: phases of a barrier, units shared between warps, and deadlocks."""

import pytest

from fa2_lab.machine import asynchrony
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Barrier, Deadlock, ThreadBlock
from fa2_lab.plots import overlap_timeline


def test_barrier_phases_flip_after_all_arrivals():
    barrier = Barrier("x", 2)
    assert barrier.over(1).ready() and not barrier.over(0).ready(), "the phase before the first one counts as over"
    barrier.arrive("a")
    assert not barrier.over(0).ready()
    barrier.arrive("b")
    assert barrier.over(0).ready() and not barrier.over(1).ready()
    barrier.arrive("b")
    assert dict(barrier.arrival_counts) == {"a": 1, "b": 2}


def test_missing_barrier_arrival_is_reported_as_deadlock():
    block, emptied = ThreadBlock(), Barrier("K emptied", arrivals=2)

    def actor(arrives):
        yield block.start("tensor", 10, "x").done()
        if arrives:
            emptied.arrive(block.actor)
        yield emptied.over(0)

    block.run({"a": actor(True), "b": actor(True)})
    emptied = Barrier("K emptied", arrivals=2)
    with pytest.raises(Deadlock, match="a waits for K emptied; b waits for K emptied"):
        block.run({"a": actor(True), "b": actor(False)})


@pytest.mark.parametrize(
    "manner, ends", [(SHARED, [4, 8, 12, 16]), (IN_ORDER, [10, 12, 14, 16]), (asynchrony.SIDE_BY_SIDE, [2, 4, 6, 10])]
)
def test_shared_unit_time_is_divided_between_its_users(manner, ends):
    block = ThreadBlock(tensor=manner)

    def actor(*clocks):
        for n in clocks:
            yield block.start("tensor", n, "x").done()

    block.start("copy", 20, "nobody waits for it")
    block.run({"a": actor(10), "b": actor(2, 2, 2)})
    assert [job.ended for job in block.jobs] == [*ends, 20]
    assert block.busy_fraction("tensor") == ends[-1] / 20


# Warpgroups of the Hopper kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead, clocks", [(False, 16 * (2 * 512 + 500)), (True, 512 + 500 + 15 * 2 * 512 + 512)])
def test_warpgroup_timeline_equals_hand_computed_clocks(ahead, clocks):
    """16 tiles, products of 512 clocks and exponentials of 500, which fit under a product: one warpgroup alone."""
    block = ThreadBlock()
    block.run({"0": overlap_timeline.warpgroup(block, 16, 512, 500, ahead)})
    assert max(job.ended for job in block.jobs) == clocks
    assert block.busy_fraction("tensor") == pytest.approx(16 * 2 * 512 / clocks)
