"""Functions shared by the adapters, for tensors of shape (batch, N, heads, d) and windows with −1 for unbounded."""

import torch
from torch import Tensor

import fa2_lab


def deterministic_if(asked: bool) -> None:
    """Make PyTorch deterministic until the test ends, because autograd reads the setting again in the backward pass."""
    if asked:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)


def bounds(window_size: tuple) -> tuple[int | None, int | None] | None:
    """Convert a window to the form that attention() accepts. In `window_size`, None and −1 mean unbounded."""
    left, right = (None if x is None or int(x) < 0 else int(x) for x in window_size)
    return None if left is right is None else (left, right)


def dense(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return O and L of attention() for tensors of shape (batch, N, heads, d)."""
    O, L = fa2_lab.attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **options)
    return O.transpose(1, 2), L


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options
) -> tuple[Tensor, Tensor]:
    """Return O and L of attention_packed()."""
    return fa2_lab.attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)


def paged(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, table: Tensor, lengths: Tensor, **options) -> Tensor:
    """Return O of attention_paged() for packed queries, with one call for each number of queries per sequence."""
    O, counts = torch.empty_like(q), starts.diff()
    for N_q in counts.unique().tolist():
        chosen = (counts == N_q).nonzero().flatten()
        rows = starts[chosen, None] + torch.arange(N_q, device=q.device)
        output = fa2_lab.attention_paged(q[rows].transpose(1, 2), k, v, table[chosen], lengths[chosen], **options)
        O[rows] = output.transpose(1, 2)
    return O
