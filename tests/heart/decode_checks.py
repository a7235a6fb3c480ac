"""What tests of decode share: outputs and scratch that hold NaN, and the accuracy rule."""

import pytest
import torch
from kernel_truth import DEVICE, dense, judge, poison, tensors

from fa2_lab.kernels.decode import plan
from fa2_lab.kernels.prepared import Options

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs and scratch hold NaN until they are written; the interpreter gets small tiles, so that there are many."""
    poison(monkeypatch, plan)
    monkeypatch.setattr(plan, "INTERPRETED", plan.Entry(B_c=16, warps=1, stages=1, per_SM=4))


def near(got, q, k, v, dO, what="", rough=False, **options):
    """(O, L) is as near to float64 as the accuracy rule asks."""
    judge(got, dense(q, k, v, dO, **options), dense(q, k, v, dO, dtype=q.dtype, **options), what, rough)


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
