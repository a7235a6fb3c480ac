"""The timetable of the Hopper backward: every job once, in the kernel's order, and a forgotten release is found out."""

from collections import Counter
from unittest.mock import patch

import pytest
from test_machine_hopper import SHAPES

from fa2_lab.machine import chips
from fa2_lab.machine import hopper_backward as model
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Barrier, Deadlock
from fa2_lab.machine.hopper import Ring
from fa2_lab.tiles import Tiling


@pytest.mark.parametrize("N_q, N_k, mask", SHAPES)
@pytest.mark.parametrize("tensor", [SHARED, IN_ORDER])
def test_every_consumer_does_five_products_a_visited_tile_and_adds_each_dq_once(N_q, N_k, mask, tensor):
    tiling = Tiling(N_q, N_k, 4, 8, mask)
    rows = [i for j in range(tiling.T_c) for i in tiling.visited_rows(j) or [tiling.T_r - 1]]
    for costs in (model.Costs(), model.Costs(copy=10, add=5000), model.Costs(copy=3000, softmax=2000, add=1)):
        block, _ = model.backward(tiling, costs, tensor)
        for c in range(2):
            mine = [job for job in block.jobs if job.actor == f"consumer {c}"]
            assert Counter(job.label.split()[0] for job in mine if job.unit == "tensor") == dict.fromkeys(
                ("S", "dV", "dP", "dK", "dQ"), len(rows)
            )
            assert [job.label for job in mine if job.unit == "copy"] == [f"dQ {4 * i}" for i in rows]
            starts = {job.label: job.started for job in mine if job.unit != "copy"}
            for n in range(1, len(rows)):
                times = [starts[f"{what} {n}"] for what in ("S", "P", "dV", "dP", "dK")]
                assert times == sorted(times)


@pytest.mark.parametrize("ring", ["K", "V", "rows"])
def test_a_forgotten_release_ends_in_a_deadlock_that_names_the_ring(ring):
    def forgetful(self, n, release=Ring.release):
        if self.tensor != ring:
            release(self, n)

    with patch.object(Ring, "release", forgetful), pytest.raises(Deadlock, match=f"producer waits for {ring} emptied"):
        model.backward(Tiling(24, 32, 4, 8))


def test_an_order_that_is_never_done_and_a_dS_that_is_not_shown_end_in_deadlocks():
    with (
        patch.object(model.Mailbox, "release", lambda self, r: None),
        pytest.raises(Deadlock, match="producer waits for mailbox emptied"),
    ):
        model.backward(Tiling(24, 32, 4, 8))

    def silent(self, who, arrive=Barrier.arrive):
        if self.what != "dS filled":
            arrive(self, who)

    with patch.object(Barrier, "arrive", silent), pytest.raises(Deadlock, match="consumer 0 waits for dS filled"):
        model.backward(Tiling(24, 32, 4, 8))


def test_clocks_by_hand():
    """d = 128, 64 rows: every product takes 2 · 64 · 64 · 128 / 4,096 clocks, as do 64 · 64 exponentials."""
    assert model.costs(chips.H200, 64, 128) == model.Costs(600, 256, 256, 600)
    block, _ = model.backward(Tiling(40, 8, 4, 8), model.costs(chips.H200, 64, 128))
    products = [job for job in block.jobs if job.unit == "tensor"]
    assert len(products) == 2 * 10 * 5 and sum(job.clocks for job in products) == 100 * 256
