"""Attention by its definition, in torch float64 with autograd: written apart from the package, to judge it."""

import numpy as np
import torch


def visible(N_q, N_k, causal=False, key_length=None, allowed=None, window=None):
    """The mask entry by entry, straight from its definition."""
    seen = np.ones((N_q, N_k), dtype=bool)
    left, right = window or (None, None)
    for r in range(N_q):
        for c in range(N_k):
            ahead = c - (r + N_k - N_q)
            seen[r, c] = not (causal and ahead > 0) and not (key_length is not None and c >= key_length)
            seen[r, c] &= (left is None or -ahead <= left) and (right is None or ahead <= right)
    return seen if allowed is None else seen & allowed


def dense(Q, K, V, seen, scale=None, Z=None, dO=None, softcap=None, sink=None):
    """(O, L) and, for a given dO, (O, L, dQ, dK, dV) of one head; with a sink dsink as well."""
    Q, K, V = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, K, V))
    inputs = [Q, K, V]
    seen = torch.tensor(seen)
    S = (Q.shape[1] ** -0.5 if scale is None else scale) * Q @ K.T
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    S = S.masked_fill(~seen, -torch.inf)
    if sink is not None:  # a key of its own, in the last column, whose value is nothing
        inputs.append(torch.tensor(float(sink), dtype=torch.float64, requires_grad=True))
        S = torch.cat([S, inputs[3].expand(len(S), 1)], dim=1)
    empty = torch.isneginf(S).all(dim=1, keepdim=True)
    P = torch.softmax(S.masked_fill(empty, 0.0), dim=1)[:, : len(K)] * seen
    O = (P if Z is None else P * torch.tensor(Z)) @ V
    L = torch.logsumexp(S, dim=1)
    if dO is None:
        return O.detach().numpy(), L.detach().numpy()
    gradients = torch.autograd.grad(O, inputs, torch.tensor(dO))
    return [x.detach().numpy() for x in (O, L, *gradients)]


def central_differences(f, X, dO, h=1e-5):
    """∂(Σ f ∘ dO)/∂X, one entry at a time; f may read X."""
    G = np.empty_like(X)
    for index in np.ndindex(X.shape):
        keep = X[index]
        X[index] = keep + h
        up = (f() * dO).sum()
        X[index] = keep - h
        down = (f() * dO).sum()
        X[index] = keep
        G[index] = (up - down) / (2 * h)
    return G


def error(got, want, floor=0.0) -> float:
    """‖got − want‖ / max(‖want‖, floor), infinite where got is not a number or an infinity stands elsewhere."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    if got.shape != want.shape or np.isnan(got).any() or not np.array_equal(np.isinf(got), np.isinf(want)):
        return np.inf
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    return float(np.linalg.norm(got - want) / (max(np.linalg.norm(want), floor) or 1.0))
