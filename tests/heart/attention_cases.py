"""Fixtures and a check that run attention() with the portable kernels, and again with a chip's own kernels.

Outputs hold NaN before a kernel writes them, and each result is checked against float64.
"""

import pytest
import torch
from kernel_truth import GPU, check_accuracy, dense_truth, dense_truth_for, nan_in_empty, run_with_gradients  # noqa: F401 (nan_in_empty is a fixture)

from fa2_lab.api.attention import attention
from fa2_lab.kernels import dispatch

HOPPER_FORWARD = dispatch.hopper_module("forward", torch.device("cuda", 0)) if GPU else None


@pytest.fixture(autouse=True, params=["portable", "chosen"] if HOPPER_FORWARD else ["portable"])
def kernels(request, monkeypatch):
    """Run each test with the portable kernels, and if the GPU has kernels of its own, again with those."""
    if request.param == "portable":
        monkeypatch.setattr(dispatch, "hopper_supports", lambda tensors, options: False)
        monkeypatch.setattr(dispatch.decode, "is_fastest", lambda *given: False)
    else:
        for module in (HOPPER_FORWARD, dispatch.hopper_module("backward", torch.device("cuda", 0))):
            monkeypatch.setattr(module, "is_fastest", lambda *_: True)  # also for small work
    return request.param


def check_attention(q, k, v, dO, causal=False, scale=None, lengths=None, p=0.0, seed=0, dL=None, rough=False) -> tuple:
    """Run attention() forward and backward, check the results against float64, and return them."""
    masks = dict(causal=causal, scale=scale)
    got = run_with_gradients(attention, q, k, v, dO, dL, key_lengths=lengths, dropout_p=p, seed=seed, **masks)
    truth_options = dict(lengths=lengths, p=p, seed=seed, dL=dL, **masks)
    truth = dense_truth_for(got[0], q, k, v, dO, **truth_options)
    case = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {truth_options}"
    check_accuracy(got, truth, dense_truth(q, k, v, dO, dtype=q.dtype, **truth_options), case, rough)
    return got
