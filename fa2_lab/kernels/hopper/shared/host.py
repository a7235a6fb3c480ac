"""What the launches of the forward and of the backward have in common."""

import math
from typing import Any

import torch
from torch import Tensor

from fa2_lab.kernels.hopper.shared.descriptors import HALVES, copyable
from fa2_lab.kernels.launch import addresses, current_stream
from fa2_lab.kernels.prepared import prepared


def counter_for(X: Tensor, traced: bool) -> Tensor:
    """Two zeros for the tile scheduler to count in, which it leaves as zeros.

    On a stream no two launches that count overlap (only backward_kernel starts early, behind bwd_preprocess), so
    there is one counter for each stream. A CUDA graph gets its own, and so does a call that torch may record: what it
    allocates in order to warm up belongs to the graph, too.
    """
    if traced or torch.cuda.is_current_stream_capturing():
        return zeros(X.device)
    return prepared(("counter", X.device, current_stream(X)), zeros, X.device)


def zeros(device: torch.device) -> Tensor:
    """A new counter."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def evenly(heads: int, least: int) -> int:
    """How many of all heads to run at a time: `least`, or up to twice as many if the last round is fuller then.

    A few that were left over would run alone, and theirs are long blocks, too: up to 23% slower.
    """
    least = min(least, heads)
    return min(range(least, 2 * least), key=lambda n: -heads % n)


def up_to(d: int, table: dict[int, Any]) -> Any:
    """The entry of a table for the least of its dimensions that is no less than d."""
    return table[min(width for width in table if d <= width)]


def fits(Q: Tensor, K: Tensor, V: Tensor, key_lengths: Tensor | None) -> bool:
    """Whether tensors of this kind can be taken, if they are aligned and the sizes know their d."""
    return (
        Q.dtype in HALVES
        and Q.dtype == K.dtype == V.dtype
        and K.shape == V.shape
        and all(copyable(X.shape, X.stride()) for X in (Q, K, V))
        and (key_lengths is None or key_lengths.is_contiguous())
    )


def aligned(*tensors: Tensor | None) -> bool:
    """Whether tensors begin where the copy engine can begin."""
    return math.gcd(16, *addresses(tensors)) == 16
