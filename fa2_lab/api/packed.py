"""Attention over packed sequences, which can have different lengths and follow one another without padding.

q             (total_q, heads, d): the rows of all sequences
k, v          (total_k, kv heads, d): the keys and values of all sequences
cu_seqlens_q  int32 (batch + 1,), the cumulative sequence lengths, from 0 to total_q. Sequence b has the rows
              cu_seqlens_q[b] … cu_seqlens_q[b + 1] − 1 of q
cu_seqlens_k  int32 (batch + 1,), the cumulative lengths of keys, from 0 to total_k. A sequence may have no rows, no
              keys, or neither

No sequence sees another, and nothing is padded or copied. On a CPU, cumulative lengths are refused if they do not begin
at 0, if they decrease, or if they do not end with the number of rows. On a GPU, their values are not checked, because
reading them would wait for the GPU. On a GPU, the first entry counts as 0, an entry out of range counts as the nearest
one in range, and rows after the last entry see nothing. If the entries decrease on a GPU, the results mean nothing.
Even then the call ends, and it reads and writes only its own tensors. Hopper's deterministic backward returns NaN in dq
in that case.
"""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.attention import attention, recall
from fa2_lab.api.bias import check_bias, kind_of
from fa2_lab.api.checks import (
    check_masks,
    check_numbers,
    check_order,
    check_packed,
    check_sinks,
    check_starts,
    runs_on_triton,
)
from fa2_lab.kernels.prepared import Options, Tensors
from fa2_lab.tiles import whole_number


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
    """Return O (total_q, heads, d), the attention within each packed sequence, with gradients.

    q is (total_q, heads, d), and k and v are (total_k, kv heads, d). The three have the same dtype, which is fp16, bf16
    or fp32. cu_seqlens_q and cu_seqlens_k are int32 (batch + 1,), the cumulative sequence lengths.

    causal, window  In each sequence, the diagonal ends in the bottom right corner, at its last row and its last key.
    bias            Its rows and columns are counted within each sequence, as in a call with that sequence alone.
    max_seqlen_q    The number of rows of the longest sequence, if you know it. With it, one long sequence among short
                    ones is up to 15% faster on Hopper. No result depends on it.
    return_lse      If True, return (O, L) with L (heads, total_q) in fp32.
    longest         The former name of max_seqlen_q, which still works and warns.
    others          These arguments mean the same as in attention().

    On Hopper, the kernels are those of attention(), but calls with a window run the portable kernels.
    """
    if longest is not None:
        warnings.warn("attention_packed: longest is now called max_seqlen_q", DeprecationWarning, stacklevel=2)
        max_seqlen_q = longest
    tensors = Tensors(q, k, v, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    one_long = max_seqlen_q is not None and mostly_one(max_seqlen_q, q, cu_seqlens_q)
    asked: tuple = causal, softcap, scale, one_long, return_lse, backend
    if bias is not None:
        asked = *asked, kind_of(bias)
    key, call = recall(tensors, window, asked)
    if call is None:
        check_packed(q, k, v)
        check_starts(cu_seqlens_q, cu_seqlens_k, q)
    check_order("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_order("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if call is not None:  # a call of its kind has passed all checks except those of values
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
    """Return whether the longest sequence needs more work than all others together, if the others have equal lengths.

    The choice of kernels uses max_seqlen_q for nothing else, so batches of other lengths share what was prepared.
    """
    longest = whole_number("max_seqlen_q", max_seqlen_q, low=0)
    if not isinstance(q, Tensor) or not isinstance(cu_seqlens_q, Tensor) or q.dim() != 3:
        return False  # the checks will refuse it
    rows, others = q.shape[0], cu_seqlens_q.numel() - 2
    longest = min(longest, rows)
    return longest**2 * others > (rows - longest) ** 2


# The reference --------------------------------------------------------------------------------------------------


def by_sequence(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (O, L) of packed sequences one at a time by the reference of attention().

    Gradients flow through the results.
    """
    asked: dict[str, Any] = dict(window=options.window, softcap=options.softcap, scale=options.scale)
    asked |= dict(sinks=tensors.sinks, bias=options.bias, return_lse=True, backend="reference")
    Os, Ls = [], []
    for (a, b), (c, d) in zip(pairs(tensors.cu_seqlens_q), pairs(tensors.cu_seqlens_k), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (tensors.q[a:b], tensors.k[c:d], tensors.v[c:d]))
        O, L = attention(q, k, v, **asked)
        Os.append(O[0].transpose(0, 1))
        Ls.append(L[0])
    return torch.cat(Os), torch.cat(Ls, dim=1)


def pairs(starts: Tensor | None) -> list[tuple[int, int]]:
    """Return for every sequence the index of its first row and the index after its last row."""
    assert starts is not None
    return list(pairwise(starts.tolist()))
