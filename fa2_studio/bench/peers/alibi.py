"""ALiBi as a bias of attention(), in two forms that differ by a constant per row, so the softmax is the same."""

import triton
import triton.language as tl


@triton.jit
def distance(head, row, column):
    """Return −slope · (row − column), with the slopes of 16 heads.

    Rows and columns are converted to floats before the subtraction, which is cheaper than converting every difference.
    """
    return -tl.exp2(-0.5 * (head + 1)) * (row.to(tl.float32) - column.to(tl.float32))


@triton.jit
def column(head, row, column):
    """Return slope · column, which is computed once per key instead of once per score."""
    return tl.exp2(-0.5 * (head + 1)) * column
