"""The model of the Hopper backward: right gradients in every order of events, and every missing wait found out."""

from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from test_machine_hopper import SHAPES

from fa2_lab.machine import chips
from fa2_lab.machine import hopper_backward as model
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Deadlock
from fa2_lab.machine.hopper import Ring
from fa2_lab.reference import naive
from fa2_lab.tiles import NO_MASK, Tiling

LATE = [model.Late(*late) for late in product((False, True), repeat=2)]


def draw(N_q, N_k, mask=NO_MASK, d=4):
    """Q, K, V, O, L, dO and the dense gradients."""
    rng = np.random.default_rng(N_q)
    Q, dO, K, V = *rng.standard_normal((2, N_q, d)), *rng.standard_normal((2, N_k, d))
    O, P = naive.forward(Q, K, V, mask=mask)[:2]
    L = naive.forward_linear_memory(Q, K, V, mask=mask)[1]
    return (Q, K, V, O, L, dO), naive.backward(Q, K, V, P, dO)


def right(run, want):
    got = run.dQ, run.dK, run.dV
    return [bool(np.allclose(x, y, rtol=1e-10, atol=1e-12)) for x, y in zip(got, want, strict=True)]


@pytest.mark.parametrize("N_q, N_k, mask", SHAPES)
def test_right_whatever_the_order(N_q, N_k, mask):
    tensors, want = draw(N_q, N_k, mask)
    all_costs = model.Costs(), model.Costs(copy=10, add=5000), model.Costs(copy=3000, softmax=2000, add=1)
    for tensor, costs, late in product((SHARED, IN_ORDER), all_costs, LATE):
        run = model.backward(*tensors, Tiling(N_q, N_k, 4, 8, mask), costs=costs, tensor=tensor, late=late)
        assert right(run, want) == [True] * 3


def test_dQ_is_wrong_if_its_place_is_written_before_it_was_read():
    tensors, want = draw(24, 32)

    def hasty(self, c, rows, cols, part, add=model.Sums.add):
        self.last[c] = None
        return add(self, c, rows, cols, part)

    with patch.object(model.Sums, "add", hasty):
        run = model.backward(*tensors, Tiling(24, 32, 4, 8), costs=model.Costs(add=5000))
    assert right(run, want) == [False, True, True]


def test_dQ_is_wrong_if_nobody_waits_for_the_others_dS():
    tensors, want = draw(24, 32)

    def both(self, n):
        return lambda: np.vstack([np.zeros((4, 4)) if ds is None else ds for ds in self.places[n % 2]])
        yield

    with patch.object(model.Exchange, "both", both):
        run = model.backward(*tensors, Tiling(24, 32, 4, 8), costs=model.Costs(slow=9))
    assert right(run, want) == [False, True, True]


def test_one_place_for_dS_is_too_few_where_consumers_are_not_equally_fast():
    tensors, want = draw(24, 32)
    for (slow, places, is_right), dk in product(((1, 1, True), (9, 1, False), (9, 2, True)), (False, True)):
        costs, late = model.Costs(slow=slow), model.Late(dk=dk)
        run = model.backward(*tensors, Tiling(24, 32, 4, 8), places, costs, late=late)
        assert right(run, want) == [is_right, True, True]


@pytest.mark.parametrize("late", LATE, ids=str)
def test_gradients_are_wrong_if_rows_are_released_before_their_last_product_has_ended(late):
    tensors, want = draw(24, 32)

    def hasty(of, dk, pipes):
        pipes.rows.release(of.n)
        yield dk.done()

    with patch.object(model, "finish_dk", hasty):
        run = model.backward(*tensors, Tiling(24, 32, 4, 8), costs=model.Costs(copy=10, product=3000), late=late)
    assert right(run, want) == [True, False, True]


@pytest.mark.parametrize("ring", ["K", "V", "rows"])
def test_a_forgotten_release_ends_in_a_deadlock_that_names_the_ring(ring):
    tensors, _ = draw(24, 32)

    def forgetful(self, n, release=Ring.release):
        if self.tensor != ring:
            release(self, n)

    with patch.object(Ring, "release", forgetful), pytest.raises(Deadlock, match=f"producer waits for {ring} emptied"):
        model.backward(*tensors, Tiling(24, 32, 4, 8))


def test_an_order_that_is_never_done_and_a_dS_that_is_not_shown_end_in_deadlocks():
    tensors, _ = draw(24, 32)
    with (
        patch.object(model.Mailbox, "release", lambda self, r: None),
        pytest.raises(Deadlock, match="producer waits for mailbox emptied"),
    ):
        model.backward(*tensors, Tiling(24, 32, 4, 8))
    with (
        patch.object(model.Exchange, "share", lambda self, c, n, ds: None),
        pytest.raises(Deadlock, match="consumer 0 waits for dS filled"),
    ):
        model.backward(*tensors, Tiling(24, 32, 4, 8))


def test_clocks_by_hand():
    """d = 128, 64 rows: every product takes 2 · 64 · 64 · 128 / 4,096 clocks, as do 64 · 64 exponentials."""
    assert model.costs(chips.H200, 64, 128) == model.Costs(600, 256, 256, 600)
    run = model.backward(*draw(40, 8)[0], Tiling(40, 8, 4, 8), costs=model.costs(chips.H200, 64, 128))
    products = [job for job in run.block.jobs if job.unit == "tensor"]
    assert len(products) == 2 * 10 * 5 and sum(job.clocks for job in products) == 100 * 256


def test_odd_blocks_and_no_place_are_refused():
    tensors, _ = draw(7, 9)
    with pytest.raises(ValueError, match="B_c: got 5; it takes an even number"):
        model.backward(*tensors, Tiling(7, 9, 4, 5))
    with pytest.raises(ValueError, match="places: got 0; it takes a whole number of at least 1"):
        model.backward(*tensors, Tiling(7, 9, 4, 8), places=0)
