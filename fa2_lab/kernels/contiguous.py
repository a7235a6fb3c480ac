"""Copies of tensors whose strides the kernels do not support, and new tensors with the strides of a given tensor."""

from typing import Any

import torch
from torch import Tensor


def needs_copy(x: Tensor | None) -> bool:
    """Return whether kernels need a copy of x because its rows are not contiguous or torch has yet to negate it."""
    if x is None:
        return False
    strided = x.stride(-1) != 1 and x.shape[-1] > 1
    return strided or (not torch.compiler.is_compiling() and x.is_neg())  # torch.compile has already negated x


def rows_contiguous(x: Any) -> Any:
    """Return x, or a copy with contiguous rows if needs_copy() is true for x.

    The copy is made with clone() because contiguous() returns an empty tensor unchanged.
    """
    return x.clone(memory_format=torch.contiguous_format) if x is not None and needs_copy(x) else x


def contiguous_like(x: Tensor, device: str | None = None) -> Tensor:
    """Return a new tensor with x's shape and with its dimensions in the same order in memory, as torch's operators do.

    The rows of the new tensor are always contiguous, and no two of its elements share memory, even if elements of x do.
    On the device "meta", the tensor has a shape and strides, but no memory.
    """
    made = torch.empty_like(x, device=device)
    if made.stride(-1) == 1 or made.shape[-1] <= 1:
        return made
    return torch.empty_like(x, device=device, memory_format=torch.contiguous_format)


def result_stand_in(x: Tensor) -> Tensor:
    """Return a tensor on the device "meta" with the shape and strides of contiguous_like(x)."""
    return contiguous_like(x, device="meta")
