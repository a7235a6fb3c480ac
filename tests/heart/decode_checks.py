"""What tests of decode share: outputs and scratch that hold NaN, and the accuracy rule."""

import pytest
import torch
from kernel_truth import ALLOWED, DEVICE, GPU, dense, tensors, worst

from fa2_lab.kernels.decode import plan
from fa2_lab.kernels.prepared import Options

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs and scratch hold NaN until they are written; the interpreter gets small tiles, so that there are many."""

    def poison(make):
        return lambda *arguments, **options: make(*arguments, **options).fill_(NAN)

    fake = type("torch", (), {"__getattr__": lambda _, name: getattr(torch, name)})()
    fake.empty, fake.empty_like = poison(torch.empty), poison(torch.empty_like)
    monkeypatch.setattr(plan, "torch", fake)
    monkeypatch.setattr(plan, "INTERPRETED", plan.Entry(B_c=16, warps=1, stages=1, per_SM=4))


def near(got, q, k, v, dO, what="", rough=False, **options):
    """(O, L) is as near to float64 as the accuracy rule asks."""
    truth, torchs = dense(q, k, v, dO, **options), dense(q, k, v, dO, dtype=q.dtype, **options)
    lost = 2.0**-22 * truth[1].nan_to_num(0, 0, 0).abs().max().item() if rough else 0.0
    for name, a, t, b in zip("OL", got, truth, torchs, strict=False):
        mine, theirs, size = worst(a, t), worst(b, t), max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
        assert mine <= ALLOWED[name] * theirs + 1e-5 + lost * size, f"{name}: {mine:.2e}, torch {theirs:.2e} {what}"


def drawn(*shape, **more):
    return [x.detach() for x in tensors(*shape, **more)]


def decode(q, k, v, causal=False, scale=1.0, **more):
    """(O, L) by the kernels of decode."""
    return plan.decode(q, k, v, Options(causal, scale), **more)


def check(shape, dtype=torch.float32, causal=False, lengths=None, scale=None, programs=None, **more):
    q, k, v, dO = drawn(*shape, dtype=dtype)
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    size = shape[5] ** -0.5 if scale is None else scale
    got = decode(q, k, v, causal, size, key_lengths=lengths, programs=programs)
    what = f"{shape} {dtype} causal {causal} lengths {lengths} programs {programs}"
    near(got, q, k, v, dO, what, causal=causal, lengths=lengths, scale=scale, **more)
    return got
