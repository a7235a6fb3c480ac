"""Attention over packed sequences: of different lengths, one after the other, without padding.

    q         (total_q, heads, d): the rows of all sequences
    k, v      (total_k, kv heads, d)
    cu_q      int32 (batch + 1,): sequence b has rows cu_q[b] … cu_q[b + 1] of q; cu_q[0] = 0, cu_q[batch] = total_q
    cu_k      the same for k and v; a sequence may have no rows, no keys, or neither

No sequence sees another. Nothing is padded or copied, and nothing waits for a GPU to read the starts: there their
values are not checked but made harmless. The first start counts as 0, one outside as the nearest inside, a sequence
that ends before it begins as empty, and rows behind the last start see nothing.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fa2_lab.attention import (
    DTYPES,
    attention,
    check_masks,
    check_numbers,
    contiguous,
    described,
    for_kernels,
    kernels,
    no_second_derivative,
    rows_contiguous,
    runs_on_triton,
    traced,
    with_positive_scale,
)
from fa2_lab.kernels.prepared import Options

ROWS = "(tokens, heads, d)"


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """O (total_q, heads, d): attention within each sequence, with gradients; fp16, bf16 or fp32.

    causal, window  in each sequence the diagonal ends in the bottom right corner, at its last row and its last key
    return_lse      (O, L) with L (heads, total_q) in fp32
    softcap, sinks, scale, backend: as in attention()
    """
    check_tensors(q, k, v)
    check_starts("cu_q", cu_q, q, q.shape[0])
    check_starts("cu_k", cu_k, q, k.shape[0], like=cu_q)
    scale = check_numbers(causal, scale, q.shape[2], return_lse)
    rows = q.transpose(0, 1)[None]  # as attention() takes them, one sequence that stands for all
    options = check_masks(causal, window, softcap, sinks, rows, k.shape[0])._replace(scale=scale)
    q, options = with_positive_scale(q, options)
    if not runs_on_triton(backend, q.device.type):
        O, L = by_sequence(q, k, v, cu_q, cu_k, sinks, options)
        return (O, L) if return_lse else O
    q, options = for_kernels(q, sinks, options)
    O, L = torch.ops.fa2_lab.packed(q, k, v, cu_q, cu_k, sinks, *options)
    return (O, L) if return_lse else O


# Checks -------------------------------------------------------------------------------------------------------


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k, v of wrong kind or shapes that do not go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; it takes a torch.Tensor")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}; it takes float16, bfloat16 or float32")
        if x.dim() != 3 or x.layout != torch.strided or min(x.shape[1:]) < 1 or x.shape[2] > 256:
            raise ValueError(f"{name}: got {described(x)}; it takes {ROWS}, at least one head and d from 1 to 256")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}; it takes q's dtype, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}; it takes q's device, {q.device}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: got {described(k)}; with q {tuple(q.shape)} it takes (tokens, kv heads, {q.shape[2]})")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} heads; it takes a number that divides q's heads, {q.shape[1]}")
    if v.shape != k.shape:
        raise ValueError(f"v: got {described(v)}; it takes k's shape, {tuple(k.shape)}")


def check_starts(name: str, starts: Tensor, q: Tensor, total: int, like: Tensor | None = None) -> None:
    """Refuse starts of wrong kind or shape; and wrong values, where they can be seen without waiting for a GPU."""
    if not isinstance(starts, Tensor):
        raise TypeError(f"{name}: got {type(starts).__name__}; it takes an int32 tensor (batch + 1,)")
    if starts.dtype != torch.int32:
        raise TypeError(f"{name}: got {starts.dtype}; it takes an int32 tensor (batch + 1,)")
    if starts.dim() != 1 or starts.shape[0] < 2:
        raise ValueError(f"{name}: got {described(starts)}; it takes (batch + 1,), for at least one sequence")
    if like is not None and starts.shape != like.shape:
        raise ValueError(f"{name}: got {described(starts)}; it takes cu_q's shape, {tuple(like.shape)}")
    if starts.device != q.device:
        raise ValueError(f"{name}: got a tensor on {starts.device}; it takes q's device, {q.device}")
    if starts.device.type != "cpu" or traced(starts):
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: got {values[0]} as its first start; it takes 0")
    for before, after in pairwise(values):
        if after < before:
            raise ValueError(f"{name}: got {after} after {before}; it takes starts that never run backwards")
    if values[-1] != total:
        raise ValueError(f"{name}: got {values[-1]} as its end; it takes the number of rows, {total}")


# The kernels, as torch sees them --------------------------------------------------------------------------------


@torch.library.custom_op("fa2_lab::packed", mutates_args=())
def packed_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v, cu_q, cu_k = map(rows_contiguous, (q, k, v, cu_q, cu_k))
    options = Options(causal, scale, dropout_p, left, right, softcap)
    return kernels().forward_packed(q, k, v, cu_q, cu_k, options, contiguous(sinks))


@packed_op.register_fake
def packed_shapes(q, k, v, cu_q, cu_k, sinks, *options):
    return torch.empty_like(rows_contiguous(q)), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("fa2_lab::packed_backward", mutates_args=())
def packed_backward_op(
    dO: Tensor | None,
    dL: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    O: Tensor,
    L: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:
    q, k, v, cu_q, cu_k = map(rows_contiguous, (q, k, v, cu_q, cu_k))
    dO = torch.zeros_like(O) if dO is None else rows_contiguous(dO)
    options = Options(causal, scale, dropout_p, left, right, softcap)
    given = dO, q, k, v, O, L, cu_q, cu_k, options, contiguous(dL), contiguous(sinks)
    return list(kernels().backward_packed(*given))


@packed_backward_op.register_fake
def packed_backward_shapes(dO, dL, q, k, v, O, L, cu_q, cu_k, sinks, *options):
    found = [torch.empty_like(rows_contiguous(x)) for x in (q, k, v)]
    return found if sinks is None else [*found, torch.empty_like(contiguous(sinks))]


def save(ctx, inputs, output) -> None:
    """Keep what the backward needs: the inputs, O and L, and nothing of size N²."""
    q, k, v, cu_q, cu_k, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks)
    ctx.set_materialize_grads(False)


def gradients(ctx, dO, dL):
    """Gradients of every input of the forward."""
    found = ()
    if dO is not None or dL is not None:
        found = torch.ops.fa2_lab.packed_backward(dO, dL, *ctx.saved_tensors, *ctx.options)
    dQ, dK, dV, dsinks = (*found, *[None] * (4 - len(found)))
    return dQ, dK, dV, None, None, dsinks, *[None] * len(ctx.options)


packed_op.register_autograd(gradients, setup_context=save)
packed_backward_op.register_autograd(no_second_derivative)


# The reference --------------------------------------------------------------------------------------------------


def by_sequence(q, k, v, cu_q, cu_k, sinks, options: Options):
    """(O, L) sequence by sequence, each by attention's reference."""
    masks = dict(causal=options.causal, window=options.window, softcap=options.softcap, sinks=sinks)
    given = dict(scale=options.scale, return_lse=True, backend="reference")
    Os, Ls = [], []
    for (a, b), (c, d) in zip(pairs(cu_q), pairs(cu_k), strict=True):
        rows = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        if a < b and c < d:
            O, L = attention(*rows, **masks, **given)
        else:  # rows without a key see their sink at most
            O = torch.zeros_like(rows[0])
            unseen = q.new_full((q.shape[1],), -torch.inf, dtype=torch.float32)
            L = (unseen if sinks is None else sinks.float())[None, :, None].expand(O.shape[:3])
        Os.append(O[0].transpose(0, 1))
        Ls.append(L[0])
    return torch.cat(Os), torch.cat(Ls, 1)


def pairs(starts: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of every sequence."""
    return list(pairwise(starts.tolist()))
