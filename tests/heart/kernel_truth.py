"""Attention by its definition in torch: in float64 the truth, in any other dtype torch's own error."""

import os
import sys

import numpy as np
import torch

import fa2_lab  # noqa: F401  (before Triton: it switches the interpreter on where there is no GPU)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"  # where the kernels run: on a GPU, or in the interpreter
if not GPU and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported without its interpreter")


def tensors(batch, heads, kv_heads, N_q, N_k, d, dtype=torch.float32, seed=0, size=1.0, device=DEVICE):
    """q, k, v that want gradients, and dO; the same numbers on every device."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, N_q, d), (batch, kv_heads, N_k, d), (batch, kv_heads, N_k, d), (batch, heads, N_q, d)]
    q, k, v, dO = (torch.randn(s, generator=draw).to(device, dtype) for s in shapes)
    return (q * size).requires_grad_(), (k * size).requires_grad_(), v.requires_grad_(), dO


def visible(batch, N_q, N_k, causal, lengths, device):
    """True where a query may look, (batch, 1, N_q, N_k)."""
    row, col = torch.arange(N_q, device=device)[:, None], torch.arange(N_k, device=device)[None, :]
    seen = (col <= row + N_k - N_q) if causal else torch.ones(N_q, N_k, dtype=torch.bool, device=device)
    seen = seen[None].expand(batch, N_q, N_k)
    if lengths is not None:
        seen = seen & (col[None] < lengths[:, None, None])
    return seen[:, None]


def keep(p, seed, batch, heads, N_q, N_k, device):
    """Dropout's factors by the rule that the project documents, written apart from it."""
    if not p:
        return 1.0
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


def dense(q, k, v, dO, causal=False, scale=None, lengths=None, p=0.0, seed=0, dL=None, dtype=torch.float64):
    """(O, L, dQ, dK, dV) with everything in `dtype`, on the device of q."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    batch, heads, N_q, d = q.shape
    seen = visible(batch, N_q, k.shape[2], causal, lengths, q.device)
    empty = ~seen.any(-1, keepdim=True)
    group = heads // k.shape[1]
    K, V = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    S = q @ K.mT * (d**-0.5 if scale is None else scale)
    S = S.masked_fill(~seen, -torch.inf).masked_fill(empty, 0.0)
    P = torch.softmax(S, -1).masked_fill(~seen, 0.0)
    factors = keep(p, seed, batch, heads, N_q, k.shape[2], q.device)
    O = (P if not p else P * factors.to(dtype)) @ V
    L = torch.logsumexp(S, -1)
    loss = (O * dO.to(dtype)).sum()
    if dL is not None:
        loss = loss + (L.masked_fill(empty[..., 0], 0.0) * dL.to(dtype)).sum()
    gradients = torch.autograd.grad(loss, (q, k, v))
    return O.detach(), L.detach().masked_fill(empty[..., 0], -torch.inf), *gradients


def dense_for(O, q, k, v, dO, dL=None, **options):
    """dense(), but the gradients are those for this O, as it was returned.

    D = rowsum(dO ∘ O) is made from the O that is kept, which is rounded. torch keeps P and does not round there.
    """
    truth = dense(q, k, v, dO, dL=dL, **options)
    lost = (dO * (truth[0] - O)).sum(-1)
    return *truth[:2], *dense(q, k, v, dO, dL=lost if dL is None else dL + lost, **options)[2:]


def worst(got, want) -> float:
    """The largest deviation; infinite for NaN, or an infinity where there should be none."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape or torch.isnan(got).any() or not torch.equal(torch.isinf(got), torch.isinf(want)):
        return float("inf")
    off = (got - want).abs()
    return off[~torch.isinf(want)].max().item() if (~torch.isinf(want)).any() else 0.0


NAMES = ("O", "L", "dQ", "dK", "dV")
ALLOWED = dict(O=2.0, L=2.0, dQ=3.0, dK=3.0, dV=3.0)  # times torch's own error in the same dtype


def judge(got, truth, torchs, what="", rough=False) -> None:
    """The error against float64 stays within so many times torch's own, plus 1e-5.

    rough: scores so large that rounding them, and L in fp32, costs digits of P; torch takes off the maximum first.
    """
    lost = 2.0**-22 * truth[1].nan_to_num(0, 0, 0).abs().max().item() if rough else 0.0
    for name, a, t, b in zip(NAMES, got, truth, torchs, strict=True):
        mine, theirs, size = worst(a, t), worst(b, t), max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
        allowed = ALLOWED[name] * theirs + 1e-5 + lost * size
        assert mine <= allowed, f"{name}: {mine:.2e}, torch {theirs:.2e} {what}"


def run(attention, q, k, v, dO, dL=None, **options):
    """(O, L, dQ, dK, dV) of the call under test."""
    O, L = attention(q, k, v, return_lse=True, **options)
    outputs, grads = ((O, L), (dO, dL)) if dL is not None else ((O,), (dO,))
    return O, L, *torch.autograd.grad(outputs, (q, k, v), grads)


def milliseconds(call) -> float:
    """The mean time of a call on the GPU, of twenty after ten."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for n in range(30):
        if n == 10:
            begin.record()
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20
