"""Run the last stage of the NumPy reference (FA2) on torch tensors, head by head in float64.

If Options.reference is set, these functions replace those of kernels/dispatch.py, which take the same arguments and
return the same results.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.contiguous import contiguous_like, rows_contiguous
from fa2_lab.reference import heads
from fa2_lab.tiles import cdiv


def forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (O, L) with the NumPy reference's last stage (FA2), head by head in float64."""
    if tensors.cu_seqlens_q is not None:
        return packed_forward(tensors, options)
    if not tensors.q.numel():
        return torch.zeros_like(tensors.q), tensors.q.new_zeros(tensors.q.shape[:3], dtype=torch.float32)
    if tensors.block_table is not None:
        return paged_forward(tensors, options)
    tensors = with_at_least_one_key(tensors)
    q, k, v = map(to_numpy, (tensors.q, *zero_unseen_keys(tensors, options)))
    O, L = heads.forward(q, k, v, **reference_kwargs(tensors, options))
    return to_torch(O, tensors.q), torch.from_numpy(L).to(tensors.q.device, torch.float32)


def backward(
    dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, ...]:
    """Compute (dQ, dK, dV), plus dsinks if there are sinks, with the NumPy reference's backward pass in float64."""
    inputs = tensors.q, tensors.k, tensors.v
    if not O.numel():
        return tuple(torch.zeros_like(x) for x in (*inputs, tensors.sinks) if x is not None)
    if tensors.cu_seqlens_q is not None:
        return packed_backward(dO, dL, O, L, tensors, options)
    tensors, dL = with_at_least_one_key(tensors), torch.zeros_like(L) if dL is None else dL
    dL = dL.masked_fill(L == -torch.inf, value=0.0)  # the L of a row without keys is constant, so its dL has no effect
    # dL affects only D. Appending a column with dO = 1 and O = −dL turns D into rowsum(dO ∘ O) − dL.
    q, k, v = (to_numpy(pad(x, (0, 1))) for x in (tensors.q, *zero_unseen_keys(tensors, options)))
    O, dO = torch.cat([O.double(), -dL[..., None].double()], dim=3), pad(dO, (0, 1), value=1.0)
    results = [to_numpy(x) for x in (O, L, dO)]
    padded = heads.backward(q, k, v, *results, **reference_kwargs(tensors, options))
    gradients = tuple(to_torch(g[:, :, : x.shape[2], :-1], x) for g, x in zip(padded, inputs, strict=True))
    if tensors.sinks is None:
        return gradients
    dsinks = heads.sinks_backward(to_numpy(tensors.sinks), *results)
    return *gradients, torch.from_numpy(dsinks).to(tensors.sinks)


def paged_forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (O, L) for a paged cache, one sequence at a time, after copying its pages into contiguous memory."""
    q, table, lengths = tensors.q, cast(Tensor, tensors.block_table), cast(Tensor, tensors.key_lengths)
    O, L = contiguous_like(rows_contiguous(q)), q.new_empty(q.shape[:3], dtype=torch.float32)
    for b, n in enumerate(lengths.tolist()):
        used = table[b, : cdiv(n, tensors.k.shape[1])].long().clamp(0, len(tensors.k) - 1)
        k, v = (x[used].flatten(0, 1)[:n].transpose(0, 1)[None] for x in (tensors.k, tensors.v))
        sequence = tensors._replace(q=q[[b]], k=k, v=v, block_table=None, key_lengths=None)
        O[b], L[b] = (x[0] for x in forward(sequence, options))
    return O, L


def packed_forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (O, L) of packed sequences, one sequence at a time."""
    q = tensors.q
    O = contiguous_like(rows_contiguous(q)).zero_()
    L = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    for rows, _, sequence in packed_sequences(tensors):
        o, l = forward(sequence, options)
        O[rows], L[:, rows] = o[0].transpose(0, 1), l[0]
    return O, L


def packed_backward(
    dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, ...]:
    """Compute the gradients of packed sequences, one sequence at a time. dsinks is summed over sequences in float64."""
    dQ, dK, dV = gradients = [contiguous_like(rows_contiguous(x)).zero_() for x in (tensors.q, tensors.k, tensors.v)]
    dsinks: list[Tensor] = []
    for rows, keys, sequence in packed_sequences(tensors):
        dO_b, O_b = (x[None, rows].transpose(1, 2) for x in (dO, O))
        dL_b = None if dL is None else dL[None, :, rows]
        dq, dk, dv, *ds = backward(dO_b, dL_b, O_b, L[None, :, rows], sequence, options)
        for whole, part, x in ((dQ, rows, dq), (dK, keys, dk), (dV, keys, dv)):
            whole[part] = x[0].transpose(0, 1)
        dsinks += ds
    return *gradients, *([torch.stack(dsinks).sum(0).to(tensors.sinks)] if dsinks else [])


def packed_sequences(tensors: Tensors) -> Iterator[tuple[slice, slice, Tensors]]:
    """Yield (rows, keys, Tensors) for each packed sequence: the slices of its rows and keys, and its tensors.

    The rows after the last sequence form an additional sequence without keys, but they still see the sinks.
    """
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, None if tensors.sinks is None else tensors.sinks.double()
    dense = tensors._replace(cu_seqlens_q=None, cu_seqlens_k=None, sinks=sinks)
    starts, key_starts = (cast(Tensor, x).tolist() for x in (tensors.cu_seqlens_q, tensors.cu_seqlens_k))
    ends = pairwise([*starts, len(q)]), pairwise([*key_starts, key_starts[-1]])
    for rows, keys in zip(*([slice(*pair) for pair in pairs] for pairs in ends), strict=True):
        q_b, k_b, v_b = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        yield rows, keys, dense._replace(q=q_b, k=k_b, v=v_b)


def with_at_least_one_key(tensors: Tensors) -> Tensors:
    """Return `tensors`, with one masked key added if there are no keys, because the reference needs a key."""
    if tensors.k.shape[2]:
        return tensors
    k, v = (pad(x, (0, 0, 0, 1)) for x in (tensors.k, tensors.v))
    lengths = torch.zeros(k.shape[0], dtype=torch.int32, device=k.device)
    return tensors._replace(k=k, v=v, key_lengths=lengths)


def reference_kwargs(tensors: Tensors, options: Options) -> dict[str, Any]:
    """Return the call's options as keyword arguments for heads.forward() and heads.backward()."""
    kwargs: dict[str, Any] = dict(causal=options.causal, scale=options.scale, softcap=options.softcap)
    kwargs["dropout_p"] = options.dropout_p
    if options.has_window:
        kwargs["window"] = options.left, options.right
    if tensors.seed is not None:
        kwargs["seed"] = int(tensors.seed) % 2**64
    if tensors.key_lengths is not None:
        kwargs["key_lengths"] = tensors.key_lengths.cpu().numpy()
    if tensors.sinks is not None:
        kwargs["sinks"] = to_numpy(tensors.sinks)
    if options.bias is not None:
        kwargs["bias"] = getattr(options.bias, "fn", options.bias)
    return kwargs


def zero_unseen_keys(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return k and v with zeros in place of the keys and values that no row sees.

    Otherwise, a NaN in one of them would reach the result, because the reference multiplies it by 0, and 0 · NaN = NaN.
    """
    q, k, v, key_lengths = tensors.q, tensors.k, tensors.v, tensors.key_lengths
    if key_lengths is None and options.left is None:
        return k, v
    col = torch.arange(k.shape[2], device=k.device)
    padding = col[None, :] < (0 if options.left is None else k.shape[2] - q.shape[2] - options.left)  # (1, N_k)
    if key_lengths is not None:
        padding = padding | (col >= key_lengths[:, None])  # (batch, N_k)
    k, v = (x.masked_fill(padding[:, None, :, None], value=0.0) for x in (k, v))
    return k, v


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def to_torch(x: np.ndarray, template: Tensor) -> Tensor:
    """Return the array x as a tensor with `template`'s dtype, device and dimension order in memory."""
    return contiguous_like(rows_contiguous(template)).copy_(torch.from_numpy(x))
