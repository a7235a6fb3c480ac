"""Hopper's backward: compiled code and accepted calls without a GPU, and results against float64 on a Hopper GPU."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from case_selection import compiled_by, covering_or_exhaustive, covering_rows
from hopper_gpu import DTYPES, captured_and_eager, check_kernels, counters_are_zero, prepared_backward, random_heads
from kernel_truth import (
    check_accuracy,
    dense_truth,
    dense_truth_for,
    ints,
    largest_error,
    needs_hopper,
    random_inputs,
    run_with_gradients,
)  # before Triton

pytest.importorskip("triton")

from fa2_lab import attention
from fa2_lab.kernels import dispatch
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.hopper.backward import accumulators, configs, launch
from fa2_lab.kernels.hopper.forward import launch as forward

HEAD_DIMS, LENGTH_DTYPES = (32, 64, 96, 128), (None, torch.int64, torch.uint8)
MASKS_AND_ORDERS = [*product((False, True), repeat=3)]  # causal, with key_lengths, stored as (batch, N, heads, d)
LENGTH_PAIRS = [(1, 1), (1, 239), (113, 203), (127, 513), (192, 192), (1023, 1024), (1024, 1023), (300, 50)]
LENGTH_PAIRS += [(2048, 2048)]


# Without a GPU ------------------------------------------------------------------------------------------------


@compiled_by("backward")
def test_hopper_backward_compiles_with_almost_no_spills(worker_rows, jobs):
    assert len(worker_rows) == (120 if jobs == "all" else 42)
    for name in ("causal", "keys", "parts"):
        assert len({(row["d"] > 64, row[name]) for row in worker_rows}) == 4, name
    for row in worker_rows:
        assert row["stack"] <= (48 if row.get("deterministic") else 0), row  # configs.choose() says why
        assert row["shared"] <= 227 * 1024, row
        assert (row["hgmma"] > 0) == (row["kernel"] == "backward_kernel"), row
        assert row["hmma"] == 0 and not row["waits"] and not row["races"] and not row["idle_barriers"], row
        # Each writer's count must not be seen before the sum that it counts; consumers count parts of dK and dV, too.
        in_turn = row.get("deterministic") and row["kernel"] == "backward_kernel"
        assert row["released"] == (2 * (1 + (row["parts"] > 1)) if in_turn else 0), row
        assert row["pdl"] == row["awaits"] == (row["kernel"] != "bwd_preprocess"), row


@pytest.mark.parametrize("W", (32, 64, 128))
def test_postprocess_restores_the_row_order_of_dq(W, monkeypatch):
    """to_fragment_order: each thread's elements, four together; to_row_major is its inverse. Torch runs both."""
    monkeypatch.setattr(accumulators, "tl", SimpleNamespace(reshape=torch.reshape, permute=torch.permute))
    x = torch.arange(64 * W).reshape(64, W)
    fragments = accumulators.to_fragment_order.fn(x)
    for warp, lane, group in product(range(4), range(32), range(W // 8)):
        row, col = 16 * warp + lane // 4, 8 * group + 2 * (lane % 4)
        of_thread = fragments.reshape(W // 8, 128, 4)[group, 32 * warp + lane]
        assert of_thread.tolist() == [x[row, col], x[row, col + 1], x[row + 8, col], x[row + 8, col + 1]]
    assert torch.equal(accumulators.to_row_major.fn(fragments.flatten(), W), x)


ACCEPTED = [{}, dict(d=80), dict(d=96), dict(d=128), dict(scale=2.0**-60), dict(dO_strides=(0, 3200, 64, 1))]
REFUSED = [dict(d=192), dict(d=24), dict(d=68), dict(dtype=torch.float32), dict(scale=0.0), dict(scale=2.0**-61)]
REFUSED += [dict(dO_strides=(6400, 3200, 1, 50))]


@pytest.mark.parametrize("change, accepted", [*((x, True) for x in ACCEPTED), *((x, False) for x in REFUSED)], ids=str)
def test_hopper_backward_accepts_or_refuses_each_kind_of_tensor(change, accepted):
    d, dtype, scale = change.get("d", 64), change.get("dtype", torch.float16), change.get("scale", 0.1)
    Q, K = (torch.empty(2, *shape, d, dtype=dtype, device="meta") for shape in ((2, 50), (1, 70)))
    dO = torch.empty_strided(Q.shape, change.get("dO_strides", Q.stride()), dtype=dtype, device="meta")
    assert (launch.prepare(dO, Q, Tensors(Q, K, K), Options(True, scale)) is not None) is accepted


# Right on a GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def set_parts(monkeypatch):
    """Return a function that makes the backward split each column block into this number of parts."""
    return lambda parts: monkeypatch.setattr(configs, "choose_parts", lambda *_: parts)


def check_all(cases):
    """Check all cases: (d, dtype, (N_q, N_k), (causal, with key_lengths, stored as (batch, N, heads, d)))."""
    for d, dtype, (N_q, N_k), (causal, padded, by_rows) in cases:
        Q, dO = random_heads(2, 6, N_q, d, dtype, by_rows, 0), random_heads(2, 6, N_q, d, dtype, by_rows, 3)
        K, V = (random_heads(2, 2, N_k, d, dtype, by_rows, seed) for seed in (1, 2))
        dL = random_heads(2, 6, N_q, 1, torch.float32, seed=4)[..., 0].contiguous() if by_rows else None
        lengths = ints(N_k // 3, N_k) if padded else None
        check_kernels(Q, K, V, dO, Options(causal, d**-0.5), lengths, dL=dL)


@needs_hopper
def test_hopper_backward_matches_float64_for_each_shape_dtype_and_mask():
    check_all(covering_rows(HEAD_DIMS, DTYPES, LENGTH_PAIRS, MASKS_AND_ORDERS))


ORDERS = {  # of Q and of dO in memory: together contiguous, or one of them a view of (batch, N, heads, d)
    "contiguous": (False, False),
    "Q turned": (True, False),
    "dO turned": (False, True),
}


@needs_hopper
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("d", (64, 128))
def test_hopper_backward_packs_query_heads_as_rows(d, deterministic, order, set_parts):
    """Row blocks begin in one query head and end in the next, in any number of parts; other orders keep their heads."""
    pairs, groups = [(344, 344), (192, 192), (252, 300), (1000, 1000), (708, 768), (1, 700)], [(16, 2), (6, 2), (8, 1)]
    for (N_q, N_k), (H, H_kv), parts in covering_rows(pairs, groups, (None, 1, 5)):
        if parts:
            set_parts(parts)
        dtype = DTYPES[N_q % 3 == 0]
        Q, dO = (random_heads(2, H, N_q, d, dtype, turned, 3 * seed) for seed, turned in enumerate(ORDERS[order]))
        K, V = (random_heads(2, H_kv, N_k, d, dtype, seed=seed) for seed in (1, 2))
        dL = random_heads(2, H, N_q, 1, torch.float32, seed=4)[..., 0].contiguous()
        check_kernels(Q, K, V, dO, Options(False, d**-0.5), dL=dL, deterministic=deterministic)


@needs_hopper
@pytest.mark.parametrize("d", (64, 128))
def test_hopper_backward_with_packed_query_heads_is_deterministic(d):
    tensors = (random_heads(2, H, 344, d, torch.bfloat16, seed=seed) for seed, H in enumerate((16, 2, 2, 16)))
    call = prepared_backward(*tensors, Options(False, d**-0.5), deterministic=True)
    first = call()
    assert all(torch.equal(x, y) for _ in range(50) for x, y in zip(call(), first, strict=True))


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_hopper_backward_matches_float64_for_all_combinations(d, dtype):
    check_all(product((d,), (dtype,), LENGTH_PAIRS, MASKS_AND_ORDERS))


# Several column blocks per program, so that every barrier goes round often, and another order of work
LARGE = [(4, 8, 700, 900, 8), (4, 8, 700, 900, 2)]
LARGE += [(2, 2, *pair, H_kv) for pair in ((4096, 4096), (4100, 3900)) for H_kv in (2, 1)]
SMALL = [(2, 6, *pair, H_kv) for pair in LENGTH_PAIRS[2:-1] for H_kv in (6, 2)]


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("parts", (None, 1, 2, 5, 100), ids=str)
@pytest.mark.parametrize("d", (64, 96, 128))
def test_hopper_backward_is_right_for_any_number_of_splits(d, parts, set_parts):
    """Also more parts than there are steps; a part may begin within a query head. Lengths of 0, and beyond N_k."""
    if parts:
        set_parts(parts)
    for (batch, H, N_q, N_k, H_kv), causal, padded in product(SMALL if parts else LARGE, (False, True), (False, True)):
        Q, dO = (random_heads(batch, H, N_q, d, torch.bfloat16, seed=seed) for seed in (0, 3))
        K, V = (random_heads(batch, H_kv, N_k, d, torch.bfloat16, seed=seed) for seed in (1, 2))
        lengths = ints(*[N_k // 3, N_k + 100, 0, 129][:batch], dtype=torch.int64) if padded else None
        check_kernels(Q, K, V, dO, Options(causal, 0.2), lengths)


@needs_hopper
@pytest.mark.parametrize("d", (64, pytest.param(128, marks=pytest.mark.exhaustive)))
def test_hopper_backward_is_accurate_for_large_scores(d):
    for dtype, causal in product((torch.float16, torch.bfloat16), (False, True)):
        Q, K, V, dO = (random_heads(2, 4, 500, d, dtype, seed=seed) for seed in range(4))
        check_kernels(Q * 16, K, V, dO, Options(causal, d**-0.5))


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("parts", (1, 4))
@pytest.mark.parametrize("N, causal", [(1000, False), (1000, True), (4100, True)])
@pytest.mark.parametrize("d", (64, 128))
def test_hopper_backward_has_no_race_in_a_thousand_runs(d, N, causal, parts, set_parts):
    """Undivided, dK and dV have one order of sums: the same bits. The rest stays within a rounding or two."""
    set_parts(parts)
    Q, K, V, dO = (random_heads(4, 8000 // N, N, d, torch.bfloat16, seed=seed) for seed in range(4))
    call = prepared_backward(Q, K, V, dO, Options(causal, 0.1))
    first = call()
    differs, error = torch.zeros((), dtype=torch.bool, device="cuda"), torch.zeros((), device="cuda")
    for _ in range(1000):
        got = call()
        differs |= (got[1] != first[1]).any() | (got[2] != first[2]).any()
        for x, y in zip(got, first, strict=True):
            error = torch.maximum(error, ((x - y).abs() / (y.abs() + 0.01)).max())
    assert error < 2**-6 and (parts > 1 or not differs)


@needs_hopper
@pytest.mark.parametrize("N_k, lengths", [(127, None), (255, None), (300, [127, 300]), (300, [255, 1000])])
@pytest.mark.parametrize("d", (64, pytest.param(128, marks=pytest.mark.exhaustive)))
def test_hopper_backward_ignores_rows_past_the_end_of_K(d, N_k, lengths):
    """All scores are far below 0, which is what a key of zeros would get."""
    lengths = None if lengths is None else ints(*lengths)
    for dtype, causal in product((torch.float16, torch.bfloat16), (False, True)):
        Q, K, V, dO = (random_heads(2, 4, N, d, dtype, seed=seed) for seed, N in enumerate((200, N_k, N_k, 200)))
        check_kernels(Q.abs() + 3, -K.abs() - 3, V, dO, Options(causal, d**-0.5), lengths)


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("H, H_kv, N_q, N_k", [(32, 1, 64, 16384), (1, 1, 16384, 128), (8, 2, 2048, 2048)])
@pytest.mark.parametrize("d", (64, 128))
def test_hopper_backward_gradients_cancel_exactly(d, H, H_kv, N_q, N_k):
    """All scores are 0, so that sums are exact, and all gradients cancel: a tile read too late or too early would not.

    In the first of these shapes all programs add to the same rows of dQ at the same time, which holds up the additions.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def halves(heads, N, columns):  # the lower rows are the upper ones, negative
        x = torch.zeros(1, heads, N, d, device="cuda")
        x[..., columns] = torch.randint(-9, 10, (1, heads, N, d // 2), device="cuda", generator=generator).float()
        x[:, :, N // 2 :] = -x[:, :, : N // 2]
        return x.bfloat16()

    Q, dO = (halves(H, N_q, slice(d // 2)) for _ in range(2))
    K, V = (halves(H_kv, N_k, slice(d // 2, d)) for _ in range(2))
    L = torch.full((1, H, N_q), N_k, device="cuda").log()
    dL = torch.randint(-9, 10, (1, H, N_q // 2), device="cuda", generator=generator).float().repeat(1, 1, 2)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    O = torch.zeros_like(Q)
    tensors = Tensors(Q, K, V)
    call = launch.prepare(dO, O, tensors, Options(False, 0.1))
    for _ in range(300):
        for gradient in call(dO, dL, O, L, tensors):
            wrong += gradient.count_nonzero() + gradient.isnan().sum()
    assert wrong == 0


@needs_hopper
@pytest.mark.parametrize("parts", (1, 4))
def test_hopper_backward_replays_in_cuda_graphs(parts, set_parts):
    set_parts(parts)
    tensors = (random_heads(2, 8, 700, 64, torch.float16, seed=seed) for seed in range(4))
    for captured, want in captured_and_eager(prepared_backward(*tensors, Options(True, 0.1))):
        assert all(largest_error(x, y) < 1e-2 for x, y in zip(captured, want, strict=True))
    assert counters_are_zero()


# Windows, and the same bits, by both kernels -------------------------------------------------------------------

WINDOWS = [(0, 0), (7, 0), (200, 0), (None, 40), (64, None), (130, 127), (1000, 0), (70, 300)]


def window_options(window, d) -> Options:
    left, right = window
    return Options(right == 0, d**-0.5, left=left, right=right or None)


def window_case(d, dtype, window, pair, padded, heads=(6, 2)):
    (N_q, N_k), (H, H_kv) = pair, heads
    Q, dO = random_heads(2, H, N_q, d, dtype), random_heads(2, H, N_q, d, dtype, seed=1)
    K, V = random_heads(2, H_kv, N_k, d, dtype, seed=2), random_heads(2, H_kv, N_k, d, dtype, seed=3)
    return Q, K, V, dO, window_options(window, d), ints(N_k // 3, N_k) if padded else None


@needs_hopper
@pytest.mark.parametrize("d, window", [*product((64, 128), WINDOWS), *covering_rows((32, 96), WINDOWS)], ids=str)
def test_hopper_backward_is_right_for_windows(d, window):
    for pair, dtype, padded in covering_rows(LENGTH_PAIRS[1:], DTYPES, (False, True)):
        check_kernels(*window_case(d, dtype, window, pair, padded))


@needs_hopper
@pytest.mark.parametrize("d", (64, 128))
def test_hopper_backward_is_right_for_windows_with_split_column_blocks(d, set_parts):
    for window, padded, parts in covering_rows(WINDOWS, (False, True), (1, 4, 100)):
        set_parts(parts)
        check_kernels(*window_case(d, torch.bfloat16, window, (4100, 3900), padded, heads=(2, 1)))


@needs_hopper
@pytest.mark.parametrize("d", (64, 96, 128))
def test_hopper_deterministic_gradients_match_float64(d, set_parts):
    masks = ((None, None), (None, 0), (130, 127), (200, 0))
    cases = covering_rows(LENGTH_PAIRS[1:], DTYPES, masks, (False, True), (1, 1, 3, 100))
    for pair, dtype, window, padded, parts in cases:
        set_parts(parts)
        check_kernels(*window_case(d, dtype, window, pair, padded), deterministic=True)


REPEATED_CALLS = [*product((64, 128), (1000, 4096), (8,), (False, True)), (128, 4096, 1, True)]


@needs_hopper
@pytest.mark.parametrize("busy", (False, True), ids=("alone", "beside other work"))
@pytest.mark.parametrize("d, N, H_kv, causal", REPEATED_CALLS)
def test_hopper_deterministic_gradients_are_bitwise_reproducible(d, N, H_kv, causal, busy):
    """Also where another stream keeps SMs busy, so that programs start late and in another order."""
    tensors = (random_heads(2, H, N, d, torch.bfloat16, seed=seed) for seed, H in enumerate((8, H_kv, H_kv, 8)))
    call = prepared_backward(*tensors, Options(causal, 0.1), deterministic=True)
    first = call()
    differs, stream = torch.zeros((), dtype=torch.bool, device="cuda"), torch.cuda.Stream()
    A = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(200):
        if busy:
            with torch.cuda.stream(stream):
                A @ A
        for x, y in zip(call(), first, strict=True):
            differs |= (x != y).any()
            x.fill_(float("nan"))
    assert not differs


# Behind the public call ---------------------------------------------------------------------------------------

FORWARD_CASES = covering_or_exhaustive((*HEAD_DIMS, 192, 256), (False, True), LENGTH_DTYPES)


@needs_hopper
@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize("d, causal, lengths", FORWARD_CASES, ids=str)
def test_attention_uses_the_hopper_backward(d, causal, lengths, direction, monkeypatch):
    if direction == "backward" and d > 128:
        pytest.skip("the portable backward again")
    monkeypatch.setattr(dispatch, "portable" if direction == "forward" else "portable_backward", None)
    monkeypatch.setattr(forward, "is_fastest", lambda *_: True)
    lengths = None if lengths is None else ints(213, 77, dtype=lengths)
    for scale in (None, -0.2, *([0.0] if direction == "forward" else [])):
        q, k, v, dO = random_inputs(2, 4, 2, 190, 213, d, torch.bfloat16)
        dL = torch.randn(2, 4, 190, device="cuda")
        options = dict(causal=causal, scale=scale)
        got = run_with_gradients(attention, q, k, v, dO, dL, key_lengths=lengths, **options)
        options |= dict(lengths=lengths, dL=dL)
        want = dense_truth(q, k, v, dO, **options)
        check_accuracy(got, want, dense_truth(q, k, v, dO, **options, dtype=q.dtype), f"{d} {options}")


@needs_hopper
def test_attention_uses_hopper_for_windows_and_deterministic_gradients(monkeypatch):
    """attention() has Hopper's own kernels do it."""
    monkeypatch.setattr(dispatch, "portable_backward", None)
    q, k, v, dO = window_case(128, torch.bfloat16, (None, 0), (1100, 1100), padded=False)[:4]
    for window, deterministic in (((200, 0), False), ((None, 0), True), ((200, 0), True)):
        torch.use_deterministic_algorithms(deterministic)
        try:
            got = run_with_gradients(attention, *(x.clone().requires_grad_() for x in (q, k, v)), dO, window=window)
        finally:
            torch.use_deterministic_algorithms(False)
        truth = dense_truth_for(got[0], q, k, v, dO, window=window)
        check_accuracy(got, truth, dense_truth(q, k, v, dO, window=window, dtype=q.dtype), f"{window} {deterministic}")
