"""Host code that the launches of the Hopper forward and backward share."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa2_lab.kernels.hopper.shared.descriptors import HALVES, copyable
from fa2_lab.kernels.launch import addresses, current_stream
from fa2_lab.kernels.prepared import prepared


def counter_for(X: Tensor, traced: bool) -> Tensor:
    """Return two counters for the tile scheduler, which are 0 before and after each launch.

    Two launches that use the counters never overlap on a stream. Of these launches, only backward_kernel starts before
    the kernel in front of it has ended, and that kernel is bwd_preprocess, which uses no counter. One pair of counters
    per stream is therefore enough. A CUDA graph gets its own counters, and so does a call that torch may record,
    because memory that such a call allocates while it warms up belongs to the graph as well.
    """
    new = partial(torch.zeros, 2, dtype=torch.int32, device=X.device)
    if traced or torch.cuda.is_current_stream_capturing():
        return new()
    return prepared(("counter", X.device, current_stream(X)), new)


def evenly(heads: int, least: int) -> int:
    """Return how many heads run at a time, from `least` to 2 · `least`, so that the last round is as full as possible.

    Otherwise, a few heads would be left over and run alone, and their long blocks made a call up to 23% slower.
    """
    least = min(least, heads)
    return min(range(least, 2 * least), key=lambda n: -heads % n)


def up_to(d: int, table: dict[int, Any]) -> Any:
    """Return the table's entry for the smallest dimension that is at least d."""
    return table[min(width for width in table if d <= width)]


def fits(Q: Tensor, K: Tensor, V: Tensor, key_lengths: Tensor | None) -> bool:
    """Return whether the kernels support the types, shapes and strides of these tensors.

    Addresses are checked by aligned(), and the dimension d by the callers.
    """
    return (
        Q.dtype in HALVES
        and Q.dtype == K.dtype == V.dtype
        and K.shape == V.shape
        and all(copyable(X.shape, X.stride()) for X in (Q, K, V))
        and (key_lengths is None or key_lengths.is_contiguous())
    )


def aligned(*tensors: Tensor | None) -> bool:
    """Return whether all tensors begin at addresses that TMA can use, which are multiples of 16 bytes."""
    return math.gcd(16, *addresses(tensors)) == 16
