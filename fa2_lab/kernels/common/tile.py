"""Functions shared by all kernels to locate, load, mask and store tiles, and to apply dropout to them.

Names in capital letters are pointers into HBM, and lower-case names are values on the chip. A tile of S has B_r rows
and B_c columns (BLOCK_M and BLOCK_N in other implementations). d_pad is d rounded up to a power of two that is at least
16, as tensor cores require. `n` is the number of rows that exist, `stride` is the row stride in elements, and `length`
is the number of real keys. Functions with a RAGGED parameter compare row indices with n only if RAGGED is true. Callers
may set RAGGED to false if all of the tile's rows are known to exist. Ranges are half-open, as in Python.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class PortableConstants(NamedTuple):
    """The compile-time constants of a portable kernel."""

    B_r: tl.constexpr
    B_c: tl.constexpr
    d: tl.constexpr
    d_pad: tl.constexpr
    o_chunk: tl.constexpr  # number of columns of O computed by one matmul
    upcast: tl.constexpr  # whether tiles are converted to fp32 before matmuls, as bf16 requires in Triton's interpreter


class Head(NamedTuple):
    """A head of a tensor, given by its row stride in elements and by a pointer to its row 0."""

    ptr: tl.tensor
    stride: tl.tensor


class DropoutRule(NamedTuple):
    """The constants of dropout, which drops an entry of P if its random word is below `threshold`.

    Dropout multiplies all other entries by `rescale`. With 32-bit words and a dropout probability of p, `threshold` is
    p · 2³², and `rescale` is 1 / (1 − p).
    """

    threshold: int
    rescale: float


class DropoutKey(NamedTuple):
    """The values that determine, for a given row and column, whether an entry of P is dropped."""

    seed: tl.tensor  # pointer to the seed
    rule: DropoutRule
    head: tl.tensor
    batch: tl.tensor


class ColSpan(NamedTuple):
    """The columns that a row block has to process: begin:(end + skip_cols) without skip_at:(skip_at + skip_cols).

    A loop runs over begin:end in steps of B_c. From skip_at on, its tiles are shifted to the right by skip_cols so
    that the loop with masks skips the FULL tiles between a window's two edges. Without such a gap, skip_cols is 0.
    """

    begin: tl.tensor
    end: tl.tensor
    skip_at: tl.tensor
    skip_cols: tl.tensor


class RowSpan(NamedTuple):
    """The rows that a column block has to process: begin:end, followed by second_begin:second_end."""

    begin: tl.tensor
    end: tl.tensor
    second_begin: tl.tensor
    second_end: tl.tensor


class KeyBounds(NamedTuple):
    """The range of keys, begin:length, that a row block may read. No row of the block sees a key outside this range."""

    begin: tl.tensor
    length: tl.tensor  # the number of real keys


@triton.jit
def block_coord(t, T, batch_heads, l2_group):
    """Return the t-th block's index within its head, and that head's index. Each head has T blocks.

    `l2_group` heads are processed concurrently so that their K and V stay in L2. Within such a group, block 0 of every
    head precedes block 1 of any head.
    """
    section = t // (l2_group * T)
    within = t % (l2_group * T)
    width = tl.minimum(l2_group, batch_heads - section * l2_group)
    return within // width, section * l2_group + within % width


@triton.jit
def aligned_strides(strides):
    """Return the strides from launches.all_strides() so that the compiler knows if all of them are multiples of 8."""
    strides, MULTIPLES_OF_8 = strides
    if MULTIPLES_OF_8:
        strides = [[n // 8 * 8 for n in strides_of_one] for strides_of_one in strides]
    return strides


@triton.jit
def head_ptr(X, strides, batch, head):
    """Return a pointer to row 0 of a head of X.

    The offset is computed in 64 bits because a tensor may have more than 2³¹ elements.
    """
    return X + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def head_view(X, strides, batch, head):
    """Return the Head that describes a head of X."""
    return Head(head_ptr(X, strides, batch, head), strides[2])


@triton.jit
def load_tile(X, first, n, const, B: tl.constexpr, RAGGED: tl.constexpr, begin=None):
    """Load rows first:first + B of the Head X with load_rows(), using the d, d_pad and upcast of `const`."""
    return load_rows(X.ptr, first, X.stride, n, B, const.d, const.d_pad, RAGGED, const.upcast, begin)


@triton.jit
def load_columns(X, c, first, n, const, B: tl.constexpr, RAGGED: tl.constexpr, begin=None):
    """Load columns c:c + const.o_chunk of rows first:first + B of the Head X as a (B, const.o_chunk) tile."""
    d: tl.constexpr = min(const.d - c, const.o_chunk)
    return load_rows(X.ptr + c, first, X.stride, n, B, d, const.o_chunk, RAGGED, const.upcast, begin)


@triton.jit
def row_pointers(X, first, stride, B: tl.constexpr, d_pad: tl.constexpr):
    """Return (B, d_pad) pointers to rows first:first + B of a head. X is a pointer to the head's row 0."""
    row = tl.cast(tl.arange(0, B), tl.int64)[:, None]
    return X + tl.cast(first, tl.int64) * stride + (row * stride + tl.arange(0, d_pad)[None, :])


@triton.jit
def load_rows(X, first, stride, n, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, RAGGED: tl.constexpr,
              UPCAST: tl.constexpr, begin=None):  # fmt: skip
    """Load rows first:first + B of a head as a (B, d_pad) tile. X is a pointer to the head's row 0.

    If RAGGED is true, rows at or beyond n are filled with zeros instead of being read. The same applies to rows before
    `begin`, if it is given. If UPCAST is true, the tile is converted to fp32.
    """
    at = row_pointers(X, first, stride, B, d_pad)
    row = first + tl.arange(0, B)
    real = (row < n if begin is None else (row >= begin) & (row < n))[:, None]
    if d != d_pad:
        x = tl.load(at, mask=real & (tl.arange(0, d_pad) < d)[None, :], other=0.0)
    elif RAGGED:
        x = tl.load(at, mask=real, other=0.0)
    else:
        x = tl.load(at)
    if UPCAST:  # otherwise, Triton's interpreter would multiply the bit patterns of bf16 values
        x = x.to(tl.float32)
    return x  # (B, d_pad)


@triton.jit
def store_rows(X, x, first, stride, n, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr):
    """Write x (B, d_pad) to rows first:first + B of a head, except for rows at or beyond n, which do not exist."""
    real = (first + tl.arange(0, B) < n)[:, None] & (tl.arange(0, d_pad) < d)[None, :]
    tl.store(row_pointers(X, first, stride, B, d_pad), x.to(X.dtype.element_ty), mask=real)


@triton.jit
def sequence_start(cu_seqlens, b, n):
    """Return the first row of packed sequence b: 0 for b = 0, and otherwise cu_seqlens[b] clamped to 0 … n."""
    return tl.where(b == 0, 0, tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), n))


@triton.jit
def sequence_rows(cu_seqlens, b, n, sequences):
    """Return the first row and the number of rows of packed sequence b.

    If b equals `sequences`, return these numbers for the rows after the last sequence. `n` is the total number of rows.
    """
    first = sequence_start(cu_seqlens, b, n)
    end = tl.where(b < sequences, sequence_start(cu_seqlens, tl.minimum(b + 1, sequences), n), n)
    return first, tl.maximum(end - first, 0)


@triton.jit
def packed_block(t, cu_seqlens, n, other_cu_seqlens, n_other, sequences, B: tl.constexpr):
    """Return five values that describe block t of packed rows.

    The first tensor has n rows in blocks of B rows, and its cumulative lengths are `cu_seqlens`. The other tensor has
    n_other rows, and its cumulative lengths are `other_cu_seqlens`. The five values are:

    1. the block's index in its sequence
    2. the sequence's first row in the first tensor
    3. the sequence's number of rows in the first tensor
    4. the sequence's first row in the other tensor
    5. the sequence's number of rows in the other tensor

    Sequence b begins with block cu_seqlens[b] // B + b. Each sequence therefore has exactly as many blocks as it needs,
    or one more. For a block without rows, or with rows outside all sequences, the fifth value is 0.
    """
    b = 0 * t
    high = b + sequences + 1
    while high - b > 1:  # binary search: sequence b starts at or before block t, and sequence `high` starts after it
        middle = (b + high) // 2
        starts_by_t = sequence_start(cu_seqlens, middle, n) // B + middle <= t
        b = tl.where(starts_by_t, middle, b)
        high = tl.where(starts_by_t, high, middle)
    first, rows = sequence_rows(cu_seqlens, b, n, sequences)
    i = t - (first // B + b)
    first_other, other_rows = sequence_rows(other_cu_seqlens, b, n_other, sequences)
    return i, first, rows, first_other, tl.where((b < sequences) & (i * B < rows), other_rows, 0)


@triton.jit
def block_count(n, sequences, B: tl.constexpr):
    """Return the number of blocks of B rows that cover n rows. For packed sequences, return an upper bound."""
    if sequences is None:
        return tl.cdiv(n, B)
    else:
        return n // B + sequences + 1


@triton.jit
def key_length(key_lengths, batch, N_k):
    """Return the number of real keys in a batch entry, which is N_k if key_lengths is None."""
    if key_lengths is None:
        return N_k
    else:
        return tl.minimum(tl.maximum(tl.load(key_lengths + batch), 0), N_k).to(tl.int32)


@triton.jit
def keys_seen(row, N_q, N_k, length, HAS_RIGHT_BOUND: tl.constexpr):
    """Return how many keys a row sees, counting from key 0.

    If HAS_RIGHT_BOUND is true, `row` sees the keys up to its diagonal, and the last row's diagonal is at the last key.
    For a window (left, right), the caller passes row + right. No row sees key `length` or any later key.
    """
    if HAS_RIGHT_BOUND:
        return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), length)
    else:
        return length + 0 * row


@triton.jit
def col_bounds(row, N_q, N_k, length, window):
    """Return the bounds (begin, end) of the columns begin:end that a row sees.

    A window (left, right) is relative to the row's diagonal, which is column row + N_k − N_q. If a side of the window
    is None, it is unbounded.
    """
    left, right = window
    begin = 0 * row if left is None else tl.maximum(row + N_k - N_q - left, 0)
    return begin, keys_seen(row if right is None else row + right, N_q, N_k, length, right is not None)


@triton.jit
def in_col_bounds(begin, end, col, window):
    """Return whether column `col` is in begin:end, the columns that a row sees."""
    return col < end if window[0] is None else (begin <= col) & (col < end)


@triton.jit
def row_bounds(col, N_q, N_k, length, window):
    """Return the bounds (begin, end) of the rows begin:end that see column `col`."""
    left, right = window
    begin = tl.where(col < length, 0 if right is None else col + N_q - N_k - right, N_q)
    return begin, N_q + 0 * col if left is None else col + N_q - N_k + left + 1


@triton.jit
def in_row_bounds(begin, end, row, window):
    """Return whether row `row` is in begin:end, the rows that see a column. Without a left bound, `end` is ignored."""
    return row >= begin if window[0] is None else (begin <= row) & (row < end)


@triton.jit
def column_ranges(i, N_q, N_k, length, window, const):
    """Return the columns that row block i has to process, as two ColSpans.

    The first ColSpan covers the tiles that need a mask. The second covers the tiles that every row of the block sees in
    full.
    """
    begin, full = col_bounds(i * const.B_r, N_q, N_k, length, window)
    skip_at, end = col_bounds(tl.minimum(i * const.B_r + const.B_r, N_q) - 1, N_q, N_k, length, window)
    full = full // const.B_c * const.B_c  # tiles in skip_at:full need no mask because all rows see these columns
    if window[0] is None:
        return ColSpan(full, end, 0, 0), ColSpan(0, full, 0, 0)
    else:
        skip_at = tl.cdiv(skip_at, const.B_c) * const.B_c
        skip_cols = tl.maximum(full - skip_at, 0)
        masked = ColSpan(begin // const.B_c * const.B_c, end - skip_cols, skip_at, skip_cols)
        return masked, ColSpan(skip_at, full, 0, 0)


@triton.jit
def row_ranges(col, N_q, N_k, length, window, const):
    """Return the rows that must be processed for the column block starting at column `col`, as two RowSpans.

    The first RowSpan covers the rows whose tiles need a mask. The second covers the rows that see all of the block's
    columns.
    """
    left, right = window
    B_r: tl.constexpr = const.B_r
    begin = 0
    full = 0
    end = N_q
    second_begin = N_q // B_r * B_r
    if left is not None:
        end = tl.minimum(tl.maximum(col + const.B_c + N_q - N_k + left, 0), N_q)
        second_begin = tl.minimum(tl.maximum(col + 1 + N_q - N_k + left, 0), N_q) // B_r * B_r
    if right is not None:
        begin = tl.minimum(tl.maximum(col + N_q - N_k - right, 0), N_q) // B_r * B_r
        full = tl.minimum(tl.cdiv(tl.maximum(col + const.B_c - 1 + N_q - N_k - right, 0), B_r) * B_r, second_begin)
    if col + const.B_c > length:  # a ragged column block has no FULL tile
        full = second_begin
    if col >= length:  # no row sees this block
        begin = end
        full = end
        second_begin = end
    masked = RowSpan(tl.minimum(begin, second_begin), full, second_begin, end)
    return masked, RowSpan(full, second_begin, second_begin, second_begin)


@triton.jit
def apply_dropout(x, row, col, dropout):
    """Return x with dropped entries set to 0 and all other entries multiplied by 1/(1 − p) for dropout probability p.

    An entry is dropped if its random word is below the rule's threshold. This word is the first one that Philox returns
    for the counter (col, row, head, batch), with the seed as the key. Because it depends only on the seed and the
    entry's position, the backward pass drops the same entries as the forward pass, whatever the order of its loops.
    """
    zero = 0 * row + 0 * col
    word, _, _, _ = tl.philox(tl.load(dropout.seed), col + zero, row + zero, dropout.head + zero, dropout.batch + zero)
    return tl.where(word.to(tl.uint32) >= tl.cast(dropout.rule.threshold, tl.uint32), x * dropout.rule.rescale, 0.0)


@triton.jit
def accumulate_dot(acc, a, b):
    """Return acc + a @ b.

    In fp32, a @ b is summed separately before it is added to acc because a large acc would absorb small terms.
    """
    if a.dtype == tl.float32:
        # With a plain 0 instead of 0.0 * acc, the compiler would fold the addition into the matmul and accumulate a @ b
        # directly into acc.
        return acc + tl.dot(a, b, 0.0 * acc, input_precision="ieee")
    return tl.dot(a, b, acc)
