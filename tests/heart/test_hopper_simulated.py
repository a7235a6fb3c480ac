"""Functions of Hopper's kernels, run by Python on NumPy tiles: which keys a row sees, and the order of dQ's sums."""

import random
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_truth import dense_truth  # before Triton

pytest.importorskip("triton")

from hopper_language import GpuInt, Pointer, new_aggregate
from hopper_simulator import initial_scores_and_dP, ordered_additions, run_backward, run_forward, simulate_on_numpy

from fa2_lab.kernels.hopper.backward.configs import choose
from fa2_lab.kernels.hopper.shared import geometry

WINDOWS = [(None, None), (None, 0), (0, 0), (7, 0), (100, 0), (70, 30), (None, 40), (64, None), (128, 127)]


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    simulate_on_numpy(monkeypatch)


# Who sees whom ------------------------------------------------------------------------------------------------


def truth_and_keys(Q, K, V, dO, window, lengths):
    """Return (O, L, dK, dV, D) in float64, and [K, V] with NaN for keys that no row of their batch entry sees."""
    N_q, N_k, lengths = Q.shape[2], K.shape[2], torch.tensor([K.shape[2]] if lengths is None else lengths)
    found = dense_truth(*map(torch.from_numpy, (Q, K, V, dO)), lengths=lengths, window=window)
    O, L, _, dK, dV = (x.numpy() for x in found)
    col, left = np.arange(N_k), N_k if window[0] is None else window[0]
    unseen = (col < N_k - N_q - left) | (col >= lengths.numpy()[:, None])  # (batch, N_k)
    return (O, L, dK, dV, (dO * O).sum(3)), [np.where(unseen[:, None, :, None], torch.nan, X) for X in (K, V)]


NUMBERED_LENGTHS = [(n, *shape) for n, shape in enumerate([(1, 239), (200, 333), (333, 200), (70, 300), (300, 300)])]


@pytest.mark.parametrize("n, N_q, N_k", NUMBERED_LENGTHS)
def test_simulated_hopper_kernels_mask_exactly_the_window(n, N_q, N_k):
    draw = np.random.default_rng(N_q)
    for w, window in enumerate(WINDOWS):
        lengths = (None, [127, N_k], [0, 130])[(n + w) % 3]
        d = (96, 8)[w % 2]
        Q, dO = draw.standard_normal((2, 2, 2, N_q, d))
        K, V = draw.standard_normal((2, 2, 1, N_k, d))
        want, (K, V) = truth_and_keys(Q, K, V, dO, window, lengths)
        with np.errstate(invalid="ignore", divide="ignore"):
            B_c, consumers = ((64, 2), (128, 1), (64, 3), (128, 2))[(n + w) % 4]
            got = run_forward(Q, K, V, window, lengths, B_c, consumers)
            sizes = choose(max(d, 64), N_q, window != (None, None), ragged=True)
            initial = initial_scores_and_dP(want[1], want[4], d, sizes.B_r)
            got += run_backward(Q, K, V, dO, initial, window, sizes, lengths)[:2]
        for name, x, y in zip(("O", "L", "dK", "dV"), got, want, strict=False):
            np.testing.assert_allclose(x, y, atol=1e-9, err_msg=f"{name} {window} {lengths}")


@pytest.mark.parametrize("N_k", (64, 192, 256, 333))
def test_simulated_hopper_kernels_ignore_rows_past_the_end_of_K(N_k):
    """All scores are far below 0, which is what a key of zeros would get: its P is not even finite."""
    draw = np.random.default_rng(N_k)
    Q, dO, K, V = (draw.standard_normal((1, 2, N, 8)) for N in (200, 200, N_k, N_k))
    Q, K = abs(Q) + 30, -abs(K) - 30
    for window in ((None, None), (None, 0)):
        want, _ = truth_and_keys(Q, K, V, dO, window, None)
        sizes = choose(64, 200, window != (None, None), ragged=N_k % 128 != 0)
        with np.errstate(over="ignore", invalid="ignore"):
            initial = initial_scores_and_dP(want[1], want[4], 8, sizes.B_r)
            dK, dV, sums = run_backward(Q, K, V, dO, initial, window, sizes)
        for x, y in ((dK, want[2]), (dV, want[3])):
            np.testing.assert_allclose(x, y, atol=1e-9)
        assert np.isfinite(sums[0]).all()


@pytest.mark.parametrize("DYNAMIC_FIRST", (False, True))
def test_tile_scheduler_visits_each_block_once_and_resets_its_counters(DYNAMIC_FIRST, monkeypatch):
    """By however many programs, in whatever order they run: the next launch counts from zero again."""
    rng, program = random.Random(0), [0]
    counter, programs = Pointer(np.zeros(2, int)), 1
    language = dict(vars(geometry.gl), program_id=lambda axis: GpuInt(program[0]))
    language |= dict(num_programs=lambda axis: GpuInt(programs))
    monkeypatch.setattr(geometry, "gl", SimpleNamespace(**language))
    for programs in (1, 3, 20):
        blocks, heads = GpuInt(5), GpuInt(7)
        scheduler = new_aggregate(
            geometry.Scheduler,
            dict(counter=counter, blocks=blocks, heads=heads, l2_group=2, DYNAMIC_FIRST=DYNAMIC_FIRST),
        )
        running, found = dict.fromkeys(range(programs)), Counter()
        while running:
            program[0] = rng.choice(list(running))
            t = running[program[0]]
            running[program[0]] = t = scheduler.first() if t is None else scheduler.next()
            if scheduler.more(t):
                found[scheduler.block_coord(t)] += 1
            else:
                scheduler.leave()
                del running[program[0]]
        assert len(found) == 35 and set(found.values()) == {1} and not counter.numbers.any()


# The order of additions ---------------------------------------------------------------------------------------


def add_in_random_order(items, programs, rng, start=0):
    """Simulate programs in random order, each of which draws items, one of them ahead, and adds their parts in order.

    Return {place: numbers of the items in the order in which they were added}. All counters begin at `begun`.
    """
    counters, order, remaining = Counter(), {}, list(enumerate(items))[::-1]
    queues = [[] for _ in range(programs)]
    while remaining or any(queues):
        for adds in rng.sample(queues, programs):
            while remaining and len({number for number, _, _ in adds}) < 2:
                number, item = remaining.pop()
                adds += [(number, place, turn) for place, turn in item]
            while adds and start + counters[adds[0][1]] >= adds[0][2] and rng.random() < 0.7:
                number, place, _ = adds.pop(0)
                counters[place] += 1
                order.setdefault(place, []).append(number)
        heads = [adds[0] for adds in queues if adds]
        assert not heads or any(start + counters[place] >= turn for _, place, turn in heads), "all wait for another"
    return order


@pytest.mark.parametrize("n, N_q, N_k", [*NUMBERED_LENGTHS, (5, 64, 700), (6, 700, 64)])
def test_dq_semaphores_keep_one_order_without_deadlock(n, N_q, N_k):
    rng = random.Random(N_q)
    for w, (window, (group, parts)) in enumerate(product(WINDOWS, ((1, 1), (2, 3), (3, 7)))):
        lengths = (None, [N_k, 0], [N_k // 3, 129])[(n + w) % 3]
        options = dict(window=window, lengths=lengths, group=group, parts=parts)
        options |= dict(B_r=(64, 128)[w % 2], l2_group=1 + w % 2)
        items = list(ordered_additions(N_q, N_k, **options))
        orders = [add_in_random_order(items, programs, rng) for programs in (1, 2, 5, 200)]
        assert all(order == orders[0] for order in orders), options
        assert sum(map(len, items)) == sum(map(len, orders[0].values())), options


@pytest.mark.parametrize("parts", (1, 3))
@pytest.mark.parametrize("N_q, N_k, causal", ((300, 300, True), (70, 300, False), (333, 200, True)))
def test_deterministic_backward_releases_every_semaphore(N_q, N_k, causal, parts):
    """And dQ, dK and dV are as without turns."""
    draw = np.random.default_rng(N_q)
    Q, dO, K, V = (draw.standard_normal((1, 2, N, 8)) for N in (N_q, N_q, N_k, N_k))
    window = (None, 0 if causal else None)
    want, _ = truth_and_keys(Q, K, V, dO, window, None)
    sizes = choose(64, N_q, causal, ragged=True, deterministic=True)
    arguments = (Q, K, V, dO, initial_scores_and_dP(want[1], want[4], 8, sizes.B_r), window, sizes, None, parts)
    (dK, dV, sums), (dK_, dV_, sums_) = (run_backward(*arguments, turns=turns) for turns in (True, False))
    for x, y in zip((dK, dV, *sums), (dK_, dV_, *sums_), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-9)
