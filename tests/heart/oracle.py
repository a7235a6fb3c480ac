"""Attention by its definition, in PyTorch with autograd. It shares no code with the package that it checks."""

import numpy as np
import torch


def visible(N_q, N_k, causal=False, key_length=None, allowed=None, window=None):
    """Return the mask, computed directly from its definition: True where a row sees a key."""
    row, column = np.arange(N_q)[:, None], np.arange(N_k)
    ahead = column - (row + N_k - N_q)
    left, right = window or (None, None)
    seen = (ahead >= (-np.inf if left is None else -left)) & (ahead <= (np.inf if right is None else right))
    seen &= (ahead <= 0 if causal else True) & (column < (N_k if key_length is None else key_length))
    return seen if allowed is None else seen & allowed


def attention(inputs, dO, seen, scale=None, factors=None, dL=None, softcap=None, bias=None):
    """Return (O, L) and the gradients of all inputs, given the gradients dO and dL.

    Inputs are q, k and v of shape (batch, heads, N, d), of which k and v may have fewer heads, and perhaps sinks.
    `factors` are dropout's factors. A bias, with one number per score, is added after the softcap.
    """
    q, k, v, *sinks = inputs = [x.detach().requires_grad_() for x in inputs]
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    K, V = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    S = q @ K.mT * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    if bias is not None:
        S, seen = S + bias.to(S), seen & ~torch.isneginf(bias)
    S = S.masked_fill(~seen, -torch.inf)
    if sinks:  # a sink is one more key, in the last column, without a value
        S = torch.cat([S, sinks[0][None, :, None, None].expand(batch, heads, N_q, 1)], 3)
    empty = torch.isneginf(S).all(3)
    S = S.masked_fill(empty[..., None], 0.0)
    P = torch.softmax(S, -1)[..., :N_k].masked_fill(~seen, 0.0)
    O = (P if factors is None else P * factors.to(P)) @ V
    L = torch.logsumexp(S, -1)
    loss = (O * dO).sum()
    if dL is not None:
        loss = loss + (L.masked_fill(empty, 0.0) * dL).sum()
    return O.detach(), L.detach().masked_fill(empty, -torch.inf), *torch.autograd.grad(loss, inputs)


def one_head(Q, K, V, seen, scale=None, Z=None, dO=None, softcap=None, sink=None, bias=None):
    """Return (O, L) of one head in NumPy, or with a dO, (O, L, dQ, dK, dV), and with a sink also dsink."""
    one = [torch.tensor(x, dtype=torch.float64)[None, None] for x in (Q, K, V, np.zeros_like(Q) if dO is None else dO)]
    sinks = [] if sink is None else [torch.tensor([sink], dtype=torch.float64)]
    factors = None if Z is None else torch.tensor(Z)
    bias = None if bias is None else torch.from_numpy(bias)
    found = attention([*one[:3], *sinks], one[3], torch.tensor(seen), scale, factors, softcap=softcap, bias=bias)
    found = [x.flatten(0, 1)[0].numpy() if x.dim() > 1 else x[0].numpy() for x in found]
    return found[:2] if dO is None else found


def positions(N_q, N_k):
    """Return (row, column) of all scores. Rows are counted such that row = column on the diagonal."""
    return np.arange(N_q)[:, None] + N_k - N_q, np.arange(N_k)[None, :]


def relative_error(got, want, floor=0.0) -> float:
    """Return ‖got − want‖ / max(‖want‖, floor). It is infinite if `got` has a NaN, or an infinity in another place."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    if got.shape != want.shape or np.isnan(got).any() or not np.array_equal(np.isinf(got), np.isinf(want)):
        return np.inf
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    return float(np.linalg.norm(got - want) / (max(np.linalg.norm(want), floor) or 1.0))
