"""Copies of tensors whose strides the kernels do not take, and new tensors with the strides of others."""

from typing import Any

import torch
from torch import Tensor


def needs_copy(x: Tensor | None) -> bool:
    """Return whether kernels need a copy of x, because its rows are not contiguous or it has a pending negation."""
    if x is None:
        return False
    strided = x.stride(-1) != 1 and x.shape[-1] > 1
    return strided or (not torch.compiler.is_compiling() and x.is_neg())  # torch.compile negates before


def rows_contiguous(x: Any) -> Any:
    """Return x, or a copy with contiguous rows if x needs one, as needs_copy() tells.

    The copy is made by clone(), because contiguous() would not change a tensor without elements.
    """
    return x.clone(memory_format=torch.contiguous_format) if x is not None and needs_copy(x) else x


def contiguous_like(x: Tensor, device: str | None = None) -> Tensor:
    """Return a new tensor with the shape and the dimension order in memory of x, as torch's own operators do.

    Its rows are always contiguous, and no two of its elements share memory, even if elements of x do. On the device
    "meta", it has a shape and strides, but no memory.
    """
    made = torch.empty_like(x, device=device)
    if made.stride(-1) == 1 or made.shape[-1] <= 1:
        return made
    return torch.empty_like(x, device=device, memory_format=torch.contiguous_format)


def layout_of_result(x: Tensor) -> Tensor:
    """Return a tensor with the shape and strides of contiguous_like(x), of which nothing else may be used.

    A tensor without gaps has them itself, in (batch, heads, N, d) as well as in (batch, N, heads, d). For all others, a
    tensor on the device "meta" is made, which takes torch a tenth of a millisecond.
    """
    if x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous()):
        return x
    return contiguous_like(x, device="meta")
