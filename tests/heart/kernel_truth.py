"""Attention by its definition in PyTorch. In float64 it is the truth; in another dtype it shows PyTorch's own error."""

import os
import sys
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch

import fa2_lab.kernels  # noqa: F401  (before Triton: it switches the interpreter on if there is no GPU)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"  # where the kernels run: on a GPU, or in the interpreter
if not GPU and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported without its interpreter")
needs_hopper = pytest.mark.gpu("Hopper")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def nan_in_empty(monkeypatch):
    """Fill memory from torch.empty with NaN, so that an unwritten output cannot pass."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def with_nan(*arguments, make=make, **options):
            x = make(*arguments, **options)
            if x.is_floating_point() and not torch.compiler.is_compiling():
                x.detach().fill_(torch.nan)
            return x

        monkeypatch.setattr(torch, name, with_nan)


def random_inputs(batch, heads, kv_heads, N_q, N_k, d, dtype=torch.float32, seed=0, size=1.0, device=DEVICE):
    """Return q, k and v, which require gradients, and dO. The numbers are the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, N_q, d), (batch, kv_heads, N_k, d), (batch, kv_heads, N_k, d), (batch, heads, N_q, d)]
    q, k, v, dO = (torch.randn(s, generator=draw).to(device, dtype) for s in shapes)
    return (q * size).requires_grad_(), (k * size).requires_grad_(), v.requires_grad_(), dO


def ints(*numbers, dtype=torch.int32):
    """Return numbers as a tensor on the kernels' device."""
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def with_gaps(x, dim: int):
    """Return a copy of x as every third element along a dimension of a larger tensor, whose others are NaN or 99."""
    size = list(x.shape)
    size[dim] = 3 * size[dim] + 1
    poison = torch.nan if x.is_floating_point() else 99
    large = torch.full(size, poison, dtype=x.dtype, device=x.device)
    place = large.narrow(dim, 1, size[dim] - 1).unflatten(dim, (x.shape[dim], 3)).select(dim % x.dim() + 1, 0)
    return place.copy_(x)


def visible_mask(N_q, N_k, causal, lengths, window, device):
    """Return a mask that is True where a query sees a key, of shape (batch or 1, 1, N_q, N_k)."""
    seen = torch.from_numpy(oracle.visible(N_q, N_k, causal, window=window)).to(device)[None, None]
    if lengths is None:
        return seen
    return seen & (torch.arange(N_k, device=device) < lengths[:, None, None, None])


def dropout_mask(p, seed, batch, heads, N_q, N_k, device):
    """Return dropout's factors by the documented rule, computed without the package's code."""
    c0, c1, c2, c3 = np.broadcast_arrays(
        np.arange(N_k)[None, None, None, :],
        np.arange(N_q)[None, None, :, None],
        np.arange(heads)[None, :, None, None],
        np.arange(batch)[:, None, None, None],
    )
    c, low = [x.astype(np.uint64) for x in (c0, c1, c2, c3)], np.uint64(2**32 - 1)
    k0, k1 = seed & (2**32 - 1), seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [b >> np.uint64(32) ^ c[1] ^ np.uint64(k0), b & low, a >> np.uint64(32) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return torch.tensor((c[0] >= int(p * 2**32)) / (1 - p), device=device)


def dense_truth(
    q, k, v, dO, causal=False, scale=None, lengths=None, p=0.0, seed=0, dL=None, dtype=torch.float64,
    window=None, softcap=None, sinks=None, bias=None,
):  # fmt: skip
    """Return (O, L, dQ, dK, dV), and with sinks also dsinks, computed in `dtype` on the device of q."""
    inputs = [x.detach().to(dtype) for x in (q, k, v, sinks) if x is not None]
    (batch, heads, N_q, _), N_k = q.shape, k.shape[2]
    seen = visible_mask(N_q, N_k, causal, lengths, window, q.device)
    factors = dropout_mask(p, seed, batch, heads, N_q, N_k, q.device) if p else None
    dO, dL = dO.to(dtype), None if dL is None else dL.to(dtype)
    if bias is not None:  # a function of (head, row, column) in NumPy
        positions = np.arange(heads)[:, None, None], *oracle.positions(N_q, N_k)
        bias = torch.from_numpy(np.broadcast_to(bias(*positions), (heads, N_q, N_k)) + 0.0).to(q.device)
    return oracle.attention(inputs, dO, seen, scale, factors, dL, softcap, bias)


def packed_truth(q, k, v, dO, cu_seqlens_q, cu_seqlens_k, dL=None, dtype=torch.float64, **options):
    """Return the same as dense_truth() for packed sequences, each computed alone. L is (heads, rows).

    The rows after the last sequence see no key, but they see the sinks.
    """
    O, dQ, dK, dV = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, q, k, v))
    L, dsinks = torch.full(q.shape[1::-1], -torch.inf, dtype=dtype, device=q.device), []
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for rows, keys in zip(pairwise([*starts, len(q)]), pairwise([*key_starts, key_starts[-1]]), strict=True):
        rows, keys = slice(*rows), slice(*keys)
        sequence = [x[at].transpose(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys), (dO, rows))]
        results = dense_truth(*sequence, dL=None if dL is None else dL[None, :, rows], dtype=dtype, **options)
        for joined, at, n in ((O, rows, 0), (dQ, rows, 2), (dK, keys, 3), (dV, keys, 4)):
            joined[at] = results[n][0].transpose(0, 1)
        L[:, rows] = results[1][0]
        dsinks.append(results[5:])
    return O, L, dQ, dK, dV, *(sum(each) for each in zip(*dsinks, strict=True))


def dense_truth_for(O, q, k, v, dO, dL=None, **options):
    """Return the same as dense_truth(), except that the gradients are those for this returned O.

    The kernels compute D = rowsum(dO ∘ O) from the stored O, which is rounded. PyTorch keeps P and has no such error.
    """
    truth = dense_truth(q, k, v, dO, dL=dL, **options)
    lost = (dO * (truth[0] - O)).sum(-1)
    return *truth[:2], *dense_truth(q, k, v, dO, dL=lost if dL is None else dL + lost, **options)[2:]


def largest_error(got, want) -> float:
    """Return the largest absolute error. It is infinite if `got` has a NaN, or an infinity in another place."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape or torch.isnan(got).any() or not torch.equal(torch.isinf(got), torch.isinf(want)):
        return float("inf")
    errors = (got - want).abs()[~torch.isinf(want)]
    return errors.max().item() if errors.numel() else 0.0


RESULTS = ("O", "L", "dQ", "dK", "dV")
ALLOWED_RATIO = dict(O=2.0, L=2.0, dQ=3.0, dK=3.0, dV=3.0)  # times torch's own error in the same dtype


def check_accuracy(got, truth, torchs, what="", rough=False) -> None:
    """Assert that errors against float64 are at most ALLOWED_RATIO times PyTorch's own errors, plus 1e-5.

    With `rough`, scores are so large that rounding them and L in fp32 costs digits of P, so more is allowed. PyTorch
    subtracts the maximum first and does not lose these digits.
    """
    lost = 2.0**-22 * truth[1].nan_to_num(0, 0, 0).abs().max().item() if rough else 0.0
    for name, a, t, b in zip(RESULTS, got, truth, torchs, strict=False):
        mine, theirs = largest_error(a, t), largest_error(b, t)
        size = max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
        allowed = ALLOWED_RATIO[name] * theirs + 1e-5 + lost * size
        assert mine <= allowed, f"{name}: {mine:.2e}, torch {theirs:.2e} {what}"


def run_with_gradients(attention, q, k, v, dO, dL=None, **options):
    """Return (O, L, dQ, dK, dV) of the call under test."""
    O, L = attention(q, k, v, return_lse=True, **options)
    outputs, grads = ((O, L), (dO, dL)) if dL is not None else ((O,), (dO,))
    return O, L, *torch.autograd.grad(outputs, (q, k, v), grads)
