"""Biases for tests: each is a Triton function for the kernels and a NumPy function for the truth."""

import numpy as np
import triton
import triton.language as tl


@triton.jit
def alibi(head, row, column):
    return -tl.exp2(-1.0 - head) * (row - column)


@triton.jit
def tree(head, row, column):
    return tl.where((row & column) == column, 0.3 * head, float("-inf"))


@triton.jit
def some_rows(head, row, column):
    return tl.where((row + head + 999) % 3 == 1, float("-inf"), 0.5)


@triton.jit
def later_tiles(head, row, column):
    return tl.where((column >= 66) & ((row + 990) % 5 != head), 0.0, float("-inf"))


@triton.jit
def nothing(head, row, column):
    return float("-inf")


@triton.jit
def two_keys(head, row, column):
    return tl.where((column == 7) | (column == 70), 1e4, column % 3 - 1.0)


@triton.jit
def eighths(head, row, column):
    return (row - column + 999) // 8


@triton.jit
def undefined_elsewhere(head, row, column):
    return tl.where((row >= column) & (row < 90), tl.sqrt(tl.abs(row - column) + 0.0), float("nan"))


def undefined_elsewhere_in_numpy(head, row, column):
    return np.where((row >= column) & (row < 90), np.sqrt(np.abs(row - column)), 0.0)


BIASES = dict(
    alibi=(alibi, lambda head, row, column: -(0.5 ** (1 + head)) * (row - column)),
    tree=(tree, lambda head, row, column: np.where((row & column) == column, 0.3 * head, -np.inf)),
    some_rows=(some_rows, lambda head, row, column: np.where((row + head + 999) % 3 == 1, -np.inf, 0.5)),
    later_tiles=(
        later_tiles,
        lambda head, row, column: np.where((column >= 66) & ((row + 990) % 5 != head), 0.0, -np.inf),
    ),
    nothing=(nothing, lambda head, row, column: -np.inf),
    two_keys=(two_keys, lambda head, row, column: np.where((column == 7) | (column == 70), 1e4, column % 3 - 1.0)),
    eighths=(eighths, lambda head, row, column: (row - column + 999) // 8),
)
# Only for calls with a causal mask and fewer than 90 keys, because this bias is NaN for hidden keys and past the end.
CAUSAL_BIAS = undefined_elsewhere, undefined_elsewhere_in_numpy
