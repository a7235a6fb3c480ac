"""Windows, and gradients with the same bits, by Hopper's own kernels: right on such a GPU."""

from itertools import product

import pytest
import torch
from hopper_gpu import DTYPES, backward_of, check, draw, lengths_of
from kernel_truth import dense, dense_for, hopper, judge, run  # before Triton
from slices import once

pytest.importorskip("triton")

from fa2_lab import attention
from fa2_lab.kernels import choice
from fa2_lab.kernels.hopper.backward import sizes
from fa2_lab.kernels.prepared import Options

PAIRS = [(1, 239), (113, 203), (300, 50), (192, 192), (127, 513), (1023, 1024), (2100, 1999), (1100, 1100)]
WINDOWS = [(0, 0), (7, 0), (200, 0), (None, 40), (64, None), (130, 127), (1000, 0), (70, 300)]


def options_of(window, d) -> Options:
    left, right = window
    return Options(right == 0, d**-0.5, left=left, right=right or None)


def cases(d, dtype, window, pair, padded, heads=(6, 2)):
    (N_q, N_k), (H, H_kv) = pair, heads
    Q, dO = draw(2, H, N_q, d, dtype), draw(2, H, N_q, d, dtype, seed=1)
    K, V = draw(2, H_kv, N_k, d, dtype, seed=2), draw(2, H_kv, N_k, d, dtype, seed=3)
    return Q, K, V, dO, options_of(window, d), lengths_of(N_k // 3, N_k) if padded else None


# Windows ------------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("d, window", [*product((64, 128), WINDOWS), *once((32, 96), WINDOWS)], ids=str)
def test_windows(d, window):
    for pair, dtype, padded in once(PAIRS, DTYPES, (False, True)):
        check(*cases(d, dtype, window, pair, padded))


@hopper
@pytest.mark.parametrize("d", (64, 128))
def test_windows_over_long_rows_and_column_blocks_in_parts(d, monkeypatch):
    for window, padded, parts in once(WINDOWS, (False, True), (1, 4, 100)):
        monkeypatch.setattr(sizes, "parts_for", lambda *_, parts=parts: parts)
        check(*cases(d, torch.bfloat16, window, (4100, 3900), padded, heads=(2, 1)))


# The same bits ------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("d", (64, 96, 128))
def test_gradients_in_turn_are_right(d, monkeypatch):
    masks = ((None, None), (None, 0), (130, 127), (200, 0))
    for pair, dtype, window, padded, parts in once(PAIRS, DTYPES, masks, (False, True), (1, 1, 3, 100)):
        monkeypatch.setattr(sizes, "parts_for", lambda *_, parts=parts: parts)
        check(*cases(d, dtype, window, pair, padded), same_bits=True)


@hopper
@pytest.mark.parametrize("busy", (False, True), ids=("alone", "beside other work"))
@pytest.mark.parametrize(
    "d, N, H_kv, causal", [*product((64, 128), (1000, 4096), (8,), (False, True)), (128, 4096, 1, True)]
)
def test_the_same_bits_200_times(d, N, H_kv, causal, busy):
    """Also where another stream keeps SMs busy, so that programs start late and in another order."""
    given = (draw(2, H, N, d, torch.bfloat16, seed=seed) for seed, H in enumerate((8, H_kv, H_kv, 8)))
    call = backward_of(*given, Options(causal, 0.1), same_bits=True)
    first = call()
    differ, beside = torch.zeros((), dtype=torch.bool, device="cuda"), torch.cuda.Stream()
    A = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(200):
        if busy:
            with torch.cuda.stream(beside):
                A @ A
        for x, y in zip(call(), first, strict=True):
            differ |= (x != y).any()
            x.fill_(float("nan"))
    assert not differ


@hopper
def test_behind_the_public_call(monkeypatch):
    """attention() has Hopper's own kernels do it."""
    monkeypatch.setattr(choice, "portable_backward", None)
    q, k, v, dO = cases(128, torch.bfloat16, (None, 0), (1100, 1100), padded=False)[:4]
    for window, same_bits in (((200, 0), False), ((None, 0), True), ((200, 0), True)):
        torch.use_deterministic_algorithms(same_bits)
        try:
            got = run(attention, *(x.clone().requires_grad_() for x in (q, k, v)), dO, window=window)
        finally:
            torch.use_deterministic_algorithms(False)
        truth = dense_for(got[0], q, k, v, dO, window=window)
        judge(got, truth, dense(q, k, v, dO, window=window, dtype=q.dtype), f"{window} {same_bits}")
