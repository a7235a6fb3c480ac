"""Hopper's forward on a Hopper GPU: results against float64, the same bits in every run, and repeated launches."""

import gc
import subprocess
import sys
import weakref
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from case_selection import assign_rows, covering_rows
from compile_worker import kinds_of
from hopper_gpu import DTYPES, captured_and_eager, check_kernels, counters_are_zero, random_heads
from kernel_truth import dense_truth, ints, largest_error, needs_hopper  # before Triton

pytest.importorskip("triton")

from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.hopper.forward import launch
from fa2_lab.kernels.launches import Launch

HEAD_DIMS, LENGTH_DTYPES = (32, 64, 96, 128, 192, 256), (None, torch.int64, torch.uint8)
LENGTH_PAIRS = [(1, 239), (113, 203), (127, 513), (192, 192), (1023, 1024), (1024, 1023), (300, 50), (2048, 2048)]
LENGTH_PAIRS += [(2100, 1999)]
HEAD_COUNTS = [(16, 2), (6, 2), (8, 1)]  # query heads and K/V heads


@pytest.fixture
def set_sizes(monkeypatch):
    """Return a function that makes all further calls use these sizes."""
    return lambda chosen: monkeypatch.setattr(launch.configs, "choose", lambda *_: chosen)


def check_all(d, dtype, cases, set_sizes):
    """Check all cases: ((N_q, N_k), stored as (batch, N, heads, d), (sizes, causal, with key_lengths))."""
    for (N_q, N_k), by_rows, (sizes, causal, padded) in cases:
        set_sizes(sizes)
        Q = random_heads(2, 6, N_q, d, dtype, by_rows, 0)
        K, V = (random_heads(2, 2, N_k, d, dtype, by_rows, seed) for seed in (1, 2))
        check_kernels(Q, K, V, None, Options(causal, d**-0.5), ints(N_k // 3, N_k + 9) if padded else None)


@needs_hopper
@pytest.mark.parametrize("d, dtype", covering_rows(HEAD_DIMS, DTYPES), ids=str)
def test_hopper_forward_matches_float64_for_each_shape_dtype_and_mask(d, dtype, set_sizes):
    """Every plan, mask and pair of lengths."""
    plans, masks = list(dict.fromkeys(sizes for sizes, *_ in kinds_of(d))), list(product((False, True), (False, True)))
    cases = [(turned, (sizes, *mask)) for sizes, mask, turned in covering_rows(plans, masks, (False, True))]
    check_all(d, dtype, assign_rows(LENGTH_PAIRS, cases), set_sizes)


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_hopper_forward_matches_float64_for_all_combinations(d, dtype, set_sizes):
    check_all(d, dtype, product(LENGTH_PAIRS, (False, True), kinds_of(d)), set_sizes)


@needs_hopper
@pytest.mark.parametrize("d", (64, 128, 256))
def test_hopper_forward_packs_query_heads_as_rows(d):
    """Row blocks begin in one query head and end in the next; a view of (batch, N, heads, d) cannot be taken so."""
    for (N_q, N_k), heads, by_rows in covering_rows(
        [(344, 344), (192, 192), (252, 300), (1000, 1000), (1, 700)], HEAD_COUNTS, (0, 1)
    ):
        (H, H_kv), dtype = heads, DTYPES[N_q % 3 == 0]
        Q = random_heads(2, H, N_q, d, dtype, by_rows, 0)
        K, V = (random_heads(2, H_kv, N_k, d, dtype, by_rows, seed) for seed in (1, 2))
        check_kernels(Q, K, V, None, Options(False, d**-0.5))


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_hopper_forward_is_right_while_the_row_maximum_rises(d, causal, dtype, set_sizes):
    """m lags behind the maximum: scores that grow or fall from tile to tile, in some rows and not in others."""
    direction = torch.nn.functional.normalize(random_heads(1, 1, 1, d, torch.float32, seed=3), dim=3)
    tall = torch.arange(1024, device="cuda")[:, None] % 3 != 1  # in every warp some rows climb, and some do not
    Q = tall * d**0.5 * direction + 0.3 * random_heads(1, 2, 1024, d, torch.float32)
    V = random_heads(1, 2, 1024, d, dtype, seed=2)
    plans = [sizes for sizes, masked, padded in kinds_of(d) if masked == causal and not padded]
    for sizes, height, top in product(plans, (1, 8, 40, 400, -1, -8, -40, -400), (0, 1)):
        set_sizes(sizes)
        slope = torch.linspace(-1, 1, 1024, device="cuda")[:, None] - top  # the highest score is 0, or `height`
        K = height * slope * direction + 0.1 * random_heads(1, 2, 1024, d, torch.float32, seed=1)
        check_kernels(Q.to(dtype), K.to(dtype), V, None, Options(causal, d**-0.5))


def any_run_differs(times, Q, K, V, lengths, causal):
    """Return whether any of `times` repetitions differs from the first call in a bit.

    Outputs are filled with NaN in between, because a block that is not computed would otherwise look right.
    """
    tensors = Tensors(Q, K, V, lengths)
    call = partial(launch.prepare(tensors, Options(causal, 0.1)), tensors)
    first = call()
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(times):
        for x, y in zip(call(), first, strict=True):
            differs |= (x != y).any()
            x.fill_(float("nan"))
    return bool(differs)


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d, N", ((64, 1000), (64, 250), (128, 1000), (128, 2300), (128, 250)))
def test_hopper_forward_is_bitwise_reproducible_in_a_thousand_runs(d, N, causal):
    Q, K, V = (random_heads(4, 8, N, d, torch.bfloat16, seed=seed) for seed in range(3))
    assert not any_run_differs(1000, Q, K, V, None, causal)


@needs_hopper
@pytest.mark.exhaustive
@pytest.mark.parametrize("d", (64, 128, 256))
def test_hopper_forward_is_right_for_blocks_of_few_tiles(d, set_sizes):
    """Many blocks of few tiles: the producer is as far ahead as it ever is, and so is what it fills too early."""
    for (sizes, causal, padded), (N_q, N_k) in product(kinds_of(d), ((1600, 60), (1000, 500), (1600, 1000))):
        set_sizes(sizes)
        Q = random_heads(4, 12, N_q, d, torch.bfloat16, seed=0)
        K, V = (random_heads(4, 12, N_k, d, torch.bfloat16, seed=seed) for seed in (1, 2))
        lengths = ints(0, N_k, 1, N_k // 2) if padded else None
        check_kernels(Q, K, V, None, Options(causal, d**-0.5), lengths)
        assert not any_run_differs(100, Q, K, V, lengths, causal), (d, N_q, N_k, sizes, causal, padded)


@needs_hopper
@pytest.mark.exhaustive
def test_hopper_kernels_are_right_while_processes_share_the_gpu():
    script = Path(__file__).with_name("hopper_shared_gpu.py")
    start = partial(subprocess.Popen, [sys.executable, script, "5"], stdout=subprocess.PIPE, text=True)
    outputs = [process.communicate()[0] for process in [start() for _ in range(6)]]
    assert all(line.startswith("0 of ") for line in outputs), outputs


@needs_hopper
def test_hopper_forward_replays_in_cuda_graphs():
    Q, K, V = (random_heads(2, 8, 700, 64, torch.float16, seed=seed) for seed in range(3))
    tensors = Tensors(Q, K, V)
    for captured, want in captured_and_eager(partial(launch.prepare(tensors, Options(True, 0.1)), tensors)):
        assert all(map(torch.equal, captured, want))
    assert counters_are_zero()


# Launched again -----------------------------------------------------------------------------------------------


@needs_hopper
@pytest.mark.parametrize("padded", (False, True))
def test_hopper_prepared_call_is_right_on_other_tensors(padded):
    """New addresses, another stream, lengths that are no multiple of 16 bytes away from anything."""
    call, lengths = None, ints(50, 300, 1, 0, 299)
    for seed in range(4):
        Q, K, V = (random_heads(2, 4, 300, 64, torch.float16, seed=10 * seed + i) for i in range(3))
        key_lengths = lengths[seed % 2 : seed % 2 + 2] if padded else None
        tensors = Tensors(Q, K, V, key_lengths)
        call = call or launch.prepare(tensors, Options(False, 0.125))
        with torch.cuda.stream(torch.cuda.Stream() if seed == 2 else torch.cuda.current_stream()):
            torch.cuda.synchronize()
            O, L = call(tensors)
            torch.cuda.synchronize()
        for got, want in zip((O, L), dense_truth(Q, K, V, torch.zeros_like(Q), lengths=key_lengths), strict=False):
            assert largest_error(got, want) < 2e-3


@needs_hopper
def test_relaunch_bypasses_triton_and_keeps_no_tensor_alive(monkeypatch):
    launches = []
    monkeypatch.setattr(launch, "Launch", lambda *a, **b: launches.append(Launch(*a, **b)) or launches[0])
    Q = random_heads(1, 2, 200, 64, torch.float16)
    call = launch.prepare(Tensors(Q, Q, Q), Options(False, 0.1))
    alive = [weakref.ref(x) for x in (Q, *call(Tensors(Q, Q, Q)))]
    assert launches[0].relauncher
    del Q
    gc.collect()
    assert [x() for x in alive] == [None] * 3
