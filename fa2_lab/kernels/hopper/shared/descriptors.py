"""Tensor descriptors, which tell TMA (the copy engine) how to load, store or accumulate a tile of a tensor.

Past a tensor's last row, TMA reads zeros and writes nothing. The kernels need the same behavior past the last row of
each packed sequence, so the coordinates are chosen such that this row is always the last one in the descriptor's shape.
If a sequence has N rows that end before row `end` of the tensor, row i of the sequence has the coordinates (FAR_ROW,
end − 1, FAR_ROW + 1 − N + i). With a row stride of s elements, the strides 2^34 − s, s and s map these coordinates to
row end − N + i of the tensor. This works because FAR_ROW · 2^34 elements are a multiple of the 2^64 bytes at which
addresses wrap around. triton.tools.ragged_tma uses the same method.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa2_lab.kernels import launches
from fa2_lab.kernels.common.constants import FAR_ROW

SIXTEEN_BIT_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def descriptor(X: torch.Tensor, rows: int, d: int) -> TensorDescriptor:
    """Return a descriptor with which TMA can copy tiles of `rows` rows and d columns to or from any head of X.

    The address of X is filled in at each launch.
    """
    shape = list(launches.dense_shape(X))
    strides = [stride if n > 1 else d for n, stride in zip(shape, launches.dense_strides(X), strict=False)]
    if X.dim() == 3:
        (_, heads, tokens, _), (_, head, row), far = shape, strides, FAR_ROW.value
        shape, strides = [far + 1, tokens, heads, far + 1, shape[3]], [2**34 - row, row, head, row]
    nowhere, block, layout = tile_of(X.dtype, len(shape), rows, d)
    return TensorDescriptor(nowhere, shape, [*strides, 1], block, layout)


@cache
def tile_of(dtype: torch.dtype, rank: int, rows: int, d: int) -> tuple[torch.Tensor, list[int], Any]:
    """Return three values that all descriptors with the same tile size share.

    1. an empty CPU tensor that stands in for the described tensor until its address is known
    2. the block shape
    3. the layout of a tile in shared memory
    """
    block = [1] * (rank - 2) + [rows, d]
    return torch.empty(0, dtype=dtype), block, gl.NVMMASharedLayout.get_default_for(block, SIXTEEN_BIT_DTYPES[dtype])


@gluon.jit
def shape_of(X):
    """Return the batch size, number of heads and number of rows of the tensor that descriptor X describes.

    For packed sequences, the batch size is 1.
    """
    if len(X.block_shape) == 4:
        return X.shape[0], X.shape[1], X.shape[2]
    else:
        return 1, X.shape[2], X.shape[1]


@gluon.jit
def tile_at(X, batch_or_end, head, row, N):
    """Return the coordinates that descriptor X uses for the tile that begins at row `row` of a head.

    `batch_or_end` is the batch entry or, for a packed sequence of N rows, the row of X at which the sequence ends.
    """
    if len(X.block_shape) == 4:
        return batch_or_end, head, row, 0
    else:
        return FAR_ROW, batch_or_end - 1, head, FAR_ROW + 1 - N + row, 0


def matrix_descriptor(shape: tuple[int, int], block: tuple[int, int], swizzle: int = 0) -> TensorDescriptor:
    """Return a descriptor with which TMA can copy blocks of an fp32 matrix of this shape, or accumulate into them.

    The address of the matrix is filled in at each launch. `swizzle` is the width of the swizzle in bytes.
    """
    nowhere, layout = matrix_block(swizzle)
    return TensorDescriptor(nowhere, list(shape), [shape[1], 1], list(block), layout)


@cache
def matrix_block(swizzle: int) -> tuple[torch.Tensor, Any]:
    """Return two values that all descriptors of fp32 matrices with the same swizzle share.

    The first value is an empty CPU tensor that stands in for the matrix until its address is known. The second value is
    the layout of a block in shared memory. `swizzle` is the width of the swizzle in bytes, or 0 for no swizzle.
    """
    return torch.empty(0), gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32, rank=2)


def copyable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether TMA can address a tensor of 16-bit elements with this shape and these strides.

    The tensor must not be empty, and its rows must be contiguous. All other strides must be 0 or multiples of 16 bytes,
    except those of dimensions of size 1.
    """
    steps = all(n == 1 or (stride >= 0 and stride % 8 == 0) for n, stride in zip(shape[:-1], strides[:-1], strict=True))
    return strides[-1] == 1 and steps and min(shape) > 0
