"""What every kernel does with a tile: find its place, load it, ask which entries are visible, drop, store.

Capital letters are pointers into HBM, lower case lives on chip. One tile of S is B_r rows by B_c columns (BLOCK_M by
BLOCK_N elsewhere). d_pad is d rounded up to a power of two of at least 16, which is what the tensor cores take.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """What a kernel is compiled for."""

    B_r: tl.constexpr
    B_c: tl.constexpr
    d: tl.constexpr
    d_pad: tl.constexpr
    causal: tl.constexpr
    upcast: tl.constexpr  # whether tiles become fp32 before they are multiplied: bf16 in Triton's interpreter


class Head(NamedTuple):
    """One head of a tensor: a pointer to its row 0, and how far apart its rows lie."""

    at: tl.tensor
    stride: tl.tensor


class Dropout(NamedTuple):
    """What decides which entries of P are dropped in one head, besides their row and column."""

    seed: tl.tensor  # pointer
    rule: tuple  # random words below the first number mean "drop"; the second is the factor of what is kept
    head: tl.tensor
    batch: tl.tensor


@triton.jit
def place(T, heads, heads_at_once):
    """This program's block and head."""
    return block_of(tl.program_id(0), T, heads, heads_at_once)


@triton.jit
def block_of(t, T, heads, heads_at_once):
    """The t-th block, of T to a head, and its head: some heads run side by side, so that what they read stays in L2.

    Of these heads, block 0 of each comes before block 1.
    """
    section = t // (heads_at_once * T)
    within = t % (heads_at_once * T)
    width = tl.minimum(heads_at_once, heads - section * heads_at_once)
    return within // width, section * heads_at_once + within % width


@triton.jit
def head_of(X, strides, batch, head):
    """Pointer to row 0 of one head, in 64 bits: a whole tensor may have more than 2^31 elements."""
    return X + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def one_head(X, strides, batch, head):
    """One head of a tensor, with the distance of its rows."""
    return Head(head_of(X, strides, batch, head), strides[2])


@triton.jit
def load_tile(X, first, n, tile, B: tl.constexpr, RAGGED: tl.constexpr):
    """load_rows() from a Head, in the sizes that the kernel is compiled for."""
    return load_rows(X.at, first, X.stride, n, B, tile.d, tile.d_pad, RAGGED, tile.upcast)


@triton.jit
def row_pointers(X, first, stride, B: tl.constexpr, d_pad: tl.constexpr):
    """Pointers to rows first … first + B of one head."""  # (B, d_pad)
    row = tl.cast(tl.arange(0, B), tl.int64)[:, None]
    return X + tl.cast(first, tl.int64) * stride + (row * stride + tl.arange(0, d_pad)[None, :])


@triton.jit
def load_rows(X, first, stride, n, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, RAGGED: tl.constexpr,
              UPCAST: tl.constexpr):  # fmt: skip
    """Rows first … first + B of one head. With RAGGED, rows from n on read as zero and their memory is not touched."""
    at = row_pointers(X, first, stride, B, d_pad)
    real = (first + tl.arange(0, B) < n)[:, None]
    if d != d_pad:
        x = tl.load(at, mask=real & (tl.arange(0, d_pad) < d)[None, :], other=0.0)
    elif RAGGED:
        x = tl.load(at, mask=real, other=0.0)
    else:
        x = tl.load(at)
    if UPCAST:  # Triton's interpreter would multiply the bit patterns of bf16
        x = x.to(tl.float32)
    return x  # (B, d_pad)


@triton.jit
def store_rows(X, x, first, stride, n, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr):
    """Write x as rows first … first + B of one head, as far as they exist."""
    real = (first + tl.arange(0, B) < n)[:, None] & (tl.arange(0, d_pad) < d)[None, :]
    tl.store(row_pointers(X, first, stride, B, d_pad), x.to(X.dtype.element_ty), mask=real)


@triton.jit
def length_of(key_lengths, batch, N_k):
    """How many keys of this batch entry are real; a length outside [0, N_k] counts as the nearest one inside."""
    if key_lengths is None:
        return N_k
    else:
        return tl.minimum(tl.maximum(tl.load(key_lengths + batch), 0), N_k).to(tl.int32)


@triton.jit
def keys_seen(row, N_q, N_k, length, CAUSAL: tl.constexpr):
    """How many keys a row sees, counted from the left: the causal diagonal ends in the bottom right corner."""
    if CAUSAL:
        return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), length)
    else:
        return length + 0 * row


@triton.jit
def drop(x, row, col, dropout):
    """x with dropout's entries zero and the others scaled up; keyed by place, so any loop order draws the same mask."""
    threshold, factor = dropout.rule
    zero = 0 * row + 0 * col
    word, _, _, _ = tl.philox(tl.load(dropout.seed), col + zero, row + zero, dropout.head + zero, dropout.batch + zero)
    return tl.where(word.to(tl.uint32) >= tl.cast(threshold, tl.uint32), x * factor, 0.0)


@triton.jit
def add_product(acc, a, b):
    """acc + a b. In fp32 a tile is summed by itself first: small terms, one by one, get lost in a large sum."""
    if a.dtype == tl.float32:
        return acc + tl.dot(a, b, 0.0 * acc, input_precision="ieee")  # from a plain 0 the compiler would sum into acc
    return tl.dot(a, b, acc)
