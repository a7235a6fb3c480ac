"""The timetable of the Hopper kernel: every job once and in order, and a forgotten release is found out."""

from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest

from fa2_lab.machine import asynchrony, chips, hopper
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Barrier, Block, Deadlock


def end(block):
    return max(job.ended for job in block.jobs)


# Jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("visit", [hopper.look_ahead, hopper.in_sequence])
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("stages, tensor", [(1, SHARED), (2, IN_ORDER), (3, SHARED)])
def test_every_tile_has_its_products_and_its_copies_come_first(stages, tensor, consumers, visit):
    block = hopper.forward(7, consumers, stages, visit, tensor=tensor)
    kinds = Counter(job.label.split()[0] for job in block.jobs)
    assert kinds["S"] == kinds["PV"] == kinds["P"] == 7 * consumers and kinds["K"] == kinds["V"] == 7
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


@pytest.mark.parametrize("tensor", "KV")
def test_a_forgotten_release_ends_in_a_deadlock_that_names_the_ring(tensor):
    with without(hopper.Ring, "release", 1, tensor), pytest.raises(Deadlock, match=f"producer waits for {tensor} empt"):
        hopper.forward(8)


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
            block = hopper.forward(16, consumers=1, visit=visit, costs=price)
            assert end(block) == price.copy + clocks
            assert block.busy("tensor") == pytest.approx(16 * 2 * product / (price.copy + clocks))


def test_no_unit_works_on_more_than_it_can():
    block = hopper.forward(16, consumers=3, tensor=IN_ORDER)
    for unit in ("tensor", "exp"):
        total = sum(job.clocks for job in block.jobs if job.unit == unit)
        assert total <= end(block) * (1 + 1e-9)
    spans = sorted((j.begun, j.ended) for j in block.jobs if j.unit == "tensor")
    assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans)), "in order means one at a time"
