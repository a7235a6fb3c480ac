"""Host code that the launches of the Hopper forward and backward kernels share."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.cache import get_or_prepare
from fa2_lab.kernels.hopper.shared.descriptors import SIXTEEN_BIT_DTYPES, copyable
from fa2_lab.kernels.launches import addresses, current_stream


def scheduler_counter(X: Tensor, in_custom_op: bool) -> Tensor:
    """Return two counters for the tile scheduler, which are 0 before and after each launch.

    One pair of counters per stream is enough because launches that use the counters never overlap on a stream. Of the
    kernels that use them, only backward_kernel can start before the preceding kernel has ended, and that preceding
    kernel, bwd_preprocess, does not use the counters. A CUDA graph gets its own counters, and so does any call that
    torch may trace (`in_custom_op`), because memory allocated while torch warms up a graph also belongs to the graph.
    """
    new = partial(torch.zeros, 2, dtype=torch.int32, device=X.device)
    if in_custom_op or torch.cuda.is_current_stream_capturing():
        return new()
    return get_or_prepare(("counter", X.device, current_stream(X)), new)


def even_l2_group(heads: int, least: int) -> int:
    """Return the number of heads to process concurrently so that the last round is as full as possible.

    The result is between `least` and 2 · `least`. If the last round contained only a few heads, their long blocks would
    run alone. In measurements, this made calls up to 23% slower.
    """
    least = min(least, heads)
    return min(range(least, 2 * least), key=lambda n: -heads % n)


def smallest_fitting(d: int, table: dict[int, Any]) -> Any:
    """Return the entry of `table` with the smallest key that is at least d. The keys are head dimensions."""
    return table[min(width for width in table if d <= width)]


def skips_last_quarter(d: int, d_pad: int) -> bool:
    """Return whether matmuls that sum over d leave out the last quarter of the d_pad columns, which is padding.

    If d_pad is above 128, they never do, because the gain was measured only up to 128.
    """
    return d_pad <= 128 and 4 * d <= 3 * d_pad


def supports(Q: Tensor, K: Tensor, V: Tensor, key_lengths: Tensor | None) -> bool:
    """Return whether the Hopper kernels support these tensors' types, shapes and strides.

    tma_aligned() checks the addresses, and the callers check the head dimension d.
    """
    return (
        Q.dtype in SIXTEEN_BIT_DTYPES
        and Q.dtype == K.dtype == V.dtype
        and K.shape == V.shape
        and all(copyable(X.shape, X.stride()) for X in (Q, K, V))
        and (key_lengths is None or key_lengths.is_contiguous())
    )


def pack_gqa(tensors: Tensors, options: Options, *others: Tensor) -> tuple[Any, ...]:
    """Return a call's tensors and `others`, with the query heads of each K/V head combined into a single head.

    `others` are tensors shaped like Q. Without a mask, all rows of these query heads see the same keys. Therefore, g
    heads of N rows can be computed as one head of g · N rows, which has fewer partly empty row blocks. If there is a
    mask, if there are key_lengths or packed sequences, or if a tensor is not contiguous, return all tensors unchanged.
    """
    Q, K = tensors.q, tensors.k
    unmasked = options.bounds == (None, None) and tensors.key_lengths is tensors.sequences is None
    if not unmasked or Q.shape[1] == K.shape[1] or not all(X.is_contiguous() for X in (Q, *others)):
        return tensors, *others
    Q, *viewed = (X.view(*K.shape[:2], -1, X.shape[3]) for X in (Q, *others))
    return tensors._replace(q=Q), *viewed


def tma_aligned(*tensors: Tensor | None) -> bool:
    """Return whether every tensor starts at a 16-byte-aligned address, as TMA requires."""
    return math.gcd(16, *addresses(tensors)) == 16
