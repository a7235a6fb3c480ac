"""Tensor descriptors: what the copy engine must know of a tensor to fetch, store or add a tile of it."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HALVES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def descriptor(X: torch.Tensor, rows: int, d: int) -> dict:
    """What a bulk copy must know to fetch or store `rows` rows of one head of X, except where X lies."""
    block = [1, 1, rows, d]
    layout = gl.NVMMASharedLayout.get_default_for(block, HALVES[X.dtype])
    strides = [stride if n > 1 else d for n, stride in zip(X.shape[:3], X.stride()[:3], strict=True)]
    nothing = torch.empty(0, dtype=X.dtype)
    return vars(TensorDescriptor(nothing, list(X.shape), [*strides, 1], block, layout))


def lines(shape: tuple[int, int], block: tuple[int, int], swizzle: int = 0) -> dict:
    """What a bulk copy must know to fetch, or to add, a block of a matrix of fp32."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32, rank=2)
    return vars(TensorDescriptor(torch.empty(0), list(shape), [shape[1], 1], list(block), layout))


def of(X: torch.Tensor, described: dict) -> TensorDescriptor:
    """The descriptor of X, without the checks that its kind has passed already."""
    new = object.__new__(TensorDescriptor)
    vars(new).update(described, base=X)
    return new


def copyable(shape, strides) -> bool:
    """Whether the copy engine can address such a tensor: in whole steps of 16 bytes, no dimension repeated."""
    steps = all(n == 1 or (stride > 0 and stride % 8 == 0) for n, stride in zip(shape[:3], strides[:3], strict=True))
    return strides[3] == 1 and steps and min(shape) > 0
