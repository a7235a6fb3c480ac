"""ALiBi as a bias of attention(), in two forms with the same softmax: they differ by a constant in each row."""

import triton
import triton.language as tl


@triton.jit
def distance(head, row, column):
    """−slope · (row − column), with the slopes of 16 heads.

    Rows and columns become floats before they are subtracted, so each of them is converted once, and not each of their
    differences.
    """
    return -tl.exp2(-0.5 * (head + 1)) * (row.to(tl.float32) - column.to(tl.float32))


@triton.jit
def column(head, row, column):
    """slope · column, which is computed once per key and not once per score."""
    return tl.exp2(-0.5 * (head + 1)) * column
