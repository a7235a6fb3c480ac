"""Every rung of the ladder of kernels against float64: on a GPU where there is one, else in Triton's interpreter."""

import numpy as np
import oracle
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab.kernels import interpreter  # noqa: E402
from fa2_lab.kernels import rungs as ladder  # noqa: E402

if interpreter.misfit():
    pytest.skip(interpreter.misfit(), allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(128, 128, 32, True), (70, 100, 32, True), (100, 70, 16, True), (65, 129, 16, False)]


def tensors(N_q, N_k, d, dtype=torch.float16, size=1.0):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, d, generator=draw) for n in (N_q, N_k, N_k))
    return [x.to(dtype).to(DEVICE) for x in (size * q, k, v)]


def truth(q, k, v, causal, scale):
    """O and L of both heads by their definition."""
    heads = zip(*(x[0].double().cpu().numpy() for x in (q, k, v)), strict=True)
    seen = oracle.visible(q.shape[2], k.shape[2], causal)
    O, L = zip(*(oracle.dense(*qkv, seen, scale) for qkv in heads), strict=True)
    return np.stack(O), np.stack(L)


def numbers(x):
    return x[0].double().cpu().numpy()


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty hands out NaN, so that what a kernel leaves unwritten is seen."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def with_nan(*args, make=make, **options):
            made = make(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, with_nan)


@pytest.mark.parametrize("rung", ladder.RUNGS)
@pytest.mark.parametrize(("N_q", "N_k", "d", "causal"), CASES)
def test_a_rung_is_right(rung, N_q, N_k, d, causal, poisoned):
    q, k, v = tensors(N_q, N_k, d)
    O, L = ladder.RUNGS[rung](q, k, v, causal, d**-0.5)
    want_O, want_L = truth(q, k, v, causal, d**-0.5)
    assert oracle.error(numbers(O), want_O) < 1e-3
    assert oracle.error(numbers(L), want_L) < 1e-5


@pytest.mark.parametrize("rung", ladder.RUNGS)
def test_a_rung_takes_large_scores(rung):
    q, k, v = tensors(64, 64, 16, size=300.0)
    O, _ = ladder.RUNGS[rung](q, k, v, True, 1.0)
    assert oracle.error(numbers(O), truth(q, k, v, True, 1.0)[0]) < 1e-3


@pytest.mark.parametrize("kernel", [ladder.split_keys_kernel, ladder.split_queries_kernel])
def test_both_ways_to_split_a_tile_are_right(kernel):
    q, k, v = tensors(128, 128, 32)
    O = ladder.split(kernel, q, k, v, 32**-0.5)
    assert oracle.error(numbers(O), truth(q, k, v, False, 32**-0.5)[0]) < 1e-3
