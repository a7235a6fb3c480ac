"""Attention over packed sequences: of different lengths, one after the other, without padding.

q             (total_q, heads, d): the rows of all sequences
k, v          (total_k, kv heads, d)
cu_seqlens_q  int32 (batch + 1,): sequence b has rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] of q, from 0 to total_q
cu_seqlens_k  the same for k and v; a sequence may have no rows, no keys, or neither

No sequence sees another, and nothing is padded or copied. On a CPU, starts that do not begin at 0, run backwards or end
elsewhere than with the last row are refused. On a GPU nobody waits to read them, so their values are not checked. There
the first start counts as 0, a start that lies outside counts as the nearest one inside, and rows past the last start
see nothing. If starts run backwards even so, the numbers that come out mean nothing, but the call ends, and it reads
and writes only its own tensors. Hopper's deterministic backward then returns NaN in dq.
"""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.attention import by_reference, recall
from fa2_lab.api.checks import (
    check_bias,
    check_masks,
    check_max_seqlen,
    check_numbers,
    check_order,
    check_packed,
    check_sinks,
    check_starts,
    kind_of,
    runs_on_triton,
)
from fa2_lab.kernels.prepared import Options, Tensors


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Callable | None = None,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    longest: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """O (total_q, heads, d): attention within each sequence, with gradients; fp16, bf16 or fp32.

    causal, window  in each sequence the diagonal ends in the bottom right corner, at its last row and its last key
    bias            rows and columns are those of each sequence, as in a call with that sequence alone
    max_seqlen_q    the number of rows of the longest sequence, if the caller knows it. It makes one long sequence among
                    short ones up to 15% faster on Hopper, and no result depends on it
    return_lse      (O, L) with L (heads, total_q) in fp32
    longest         the former name of max_seqlen_q, still accepted with a DeprecationWarning
    others          as in attention()

    On Hopper the kernels are those of attention(), but windows are left to the portable ones.
    """
    tensors = Tensors(q, k, v, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if longest is not None:
        warnings.warn("attention_packed: longest is now called max_seqlen_q", DeprecationWarning, stacklevel=2)
        max_seqlen_q = longest
    one_long = max_seqlen_q is not None and mostly_one(check_max_seqlen(max_seqlen_q), q, cu_seqlens_q)
    asked: tuple = causal, softcap, scale, one_long, return_lse, backend
    if bias is not None:
        asked = *asked, kind_of(bias)
    key, call = recall(tensors, window, asked)
    if call is None:
        check_packed(q, k, v)
        check_starts(cu_seqlens_q, cu_seqlens_k, q)
    check_order("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_order("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if call is not None:  # one of its kind has passed all checks but those of values
        check_sinks(sinks, call.options)
        return call(tensors)
    scale = check_numbers(causal, scale, q.shape[2], return_lse)
    options = check_masks(causal, window, softcap, sinks, q, (q.shape[1], q.shape[0], k.shape[0]))
    options = options._replace(scale=scale, portable=backend == "portable", one_long=one_long, bias=bias)
    on_triton = runs_on_triton(backend, q.device.type)
    check_bias(bias, reference=not on_triton)
    check_sinks(sinks, options._replace(reference=not on_triton))
    if on_triton:
        return operators.compute(key, tensors, options, return_lse)
    O, L = by_sequence(tensors, options)
    return (O, L) if return_lse else O


def mostly_one(max_seqlen_q: int, q: Any, cu_seqlens_q: Any) -> bool:
    """Whether the longest sequence takes more work than all others, if those are equally long.

    The choice of kernels learns nothing else from max_seqlen_q, so batches of other lengths are of the same kind.
    """
    if not isinstance(q, Tensor) or not isinstance(cu_seqlens_q, Tensor) or q.dim() != 3:
        return False  # the checks will refuse it
    rows, others = q.shape[0], cu_seqlens_q.numel() - 2
    longest = min(max_seqlen_q, rows)
    return longest**2 * others > (rows - longest) ** 2


# The reference --------------------------------------------------------------------------------------------------


def by_sequence(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (O, L) sequence by sequence with attention's reference."""
    Os, Ls = [], []
    for (a, b), (c, d) in zip(pairs(tensors.cu_seqlens_q), pairs(tensors.cu_seqlens_k), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (tensors.q[a:b], tensors.k[c:d], tensors.v[c:d]))
        O, L = by_reference(Tensors(q, k, v, sinks=tensors.sinks), options)
        Os.append(O[0].transpose(0, 1))
        Ls.append(L[0])
    return torch.cat(Os), torch.cat(Ls, dim=1)


def pairs(starts: Tensor | None) -> list[tuple[int, int]]:
    """Return (begin, end) of every sequence."""
    assert starts is not None
    return list(pairwise(starts.tolist()))
