"""The decode kernels, in which a few queries attend to a long KV cache.

Two kernels read the keys, and a third merges the results.

    split_kv_kernel        every row block has the same number of programs
    stream_k_kernel        every program has an equal share of the work of all row blocks, and may finish one row block
                           and start the next
    merge_partials_kernel  merges the partial results (m, ℓ, o) of each row block whose keys were read by several
                           programs

split_rules.py determines the number of programs per row block, and plan.py launches the kernels. The query heads of a
group are rows of the same tile, so each key is read only once for all of them. If there are few queries, a K/V head has
a single row block. The cache is either one tensor or a set of pages listed in a block table. Ranges are half-open, as
in Python. In all functions, `length` is the number of real keys in a sequence, `table` points to the block table or is
None, and `scratch` points to the partial results.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fa2_lab.kernels.common.constants import LN2, LOG2E, NEG_INF
from fa2_lab.kernels.common.softmax import apply_softcap
from fa2_lab.kernels.common.tile import col_bounds, head_ptr, in_col_bounds, key_length, load_rows

# Arguments of the kernels -----------------------------------------------------------------------------------------


class Strides(NamedTuple):
    """The strides of Q, K, V and O, as passed to the decode kernels.

    Each tensor has strides for batch entries, heads and rows. In a paged cache, K and V have strides for pages, heads
    and keys instead.
    """

    Q: tuple
    K: tuple
    V: tuple
    O: tuple


class DecodeConstants(NamedTuple):
    """The compile-time constants of the decode kernels. Each field is a tl.constexpr."""

    d: int
    d_pad: int  # d padded for the tensor cores
    B_r: int
    B_c: int
    page_size: int  # keys per page, or 0 if the cache is not paged
    masked: bool  # whether columns are compared with row bounds, which is unnecessary if every row sees all keys
    convert_q_in_loop: bool  # whether q is converted to the tensor cores' layout inside the loop, as stream-K requires
    early_merge: bool  # whether the merge kernel may start before this kernel ends (programmatic dependent launch)
    upcast: bool  # whether tiles are converted to fp32, as Triton's interpreter requires for bf16


class DecodeSizes(NamedTuple):
    """The sizes of a call, as they are passed to the decode kernels.

    Triton compiles different kernels for a size of 1, for multiples of 16, and for all other sizes.
    """

    H: int  # query heads
    group: int  # query heads that share a K/V head
    N_q: int
    row_blocks: int  # number of row blocks per K/V head, which together cover its group · N_q query rows
    row_blocks_per_sequence: int  # number of row blocks over all K/V heads of a sequence
    R: int  # rows per partial result
    pages: int  # number of pages in a paged cache
    table_stride: int  # block-table entries per sequence
    left: int  # number of columns that a row sees to the left of its diagonal, or None for no limit
    right: int  # number of columns to the right of the diagonal (0 for the causal mask), or None for no limit


# Without this list, Triton would recompile the kernels whenever one of these numbers becomes 1 or a multiple of 16. The
# list applies only to plain arguments, so these numbers must not be packed in a tuple.
UNSPECIALIZED = ["N_k", "batch", "programs", "share", "splits"]


class Strided(NamedTuple):
    """A pointer to a tensor and the strides of that tensor."""

    ptr: tl.tensor
    strides: tuple


class QueryOutput(NamedTuple):
    """The queries, their sinks, and the tensors to which O and L are written."""

    sinks: tl.tensor  # one sink per query head, or None
    Q: Strided
    O: Strided
    L: tl.tensor


class KVCache(NamedTuple):
    """The keys and the values, along with the block table that lists their pages (None if the cache is not paged)."""

    K: Strided
    V: Strided
    table: tl.tensor
    pages: tl.tensor  # number of pages


class DecodeRowBlock(NamedTuple):
    """Row block i of a K/V head in sequence b.

    The query heads that share this K/V head have group · N_q rows in total. The block consists of B_r of these rows,
    starting at row i · B_r.
    """

    b: tl.tensor
    kv_head: tl.tensor
    i: tl.tensor
    length: tl.tensor  # number of real keys in the sequence
    diagonal_end: tl.tensor  # column at which the diagonal ends (N_k, or `length` if the cache is paged)


class Span(NamedTuple):
    """The keys that a program reads for a row block.

    The program's tiles start at the keys begin, begin + step, and so on, as long as these are below end.
    """

    begin: tl.tensor
    end: tl.tensor
    step: tl.tensor
    is_first: tl.tensor  # whether this is the row block's first span, which is the one that includes the sink
    is_complete: tl.tensor  # whether the span contains all of the row block's tiles, so that no merge is needed


class Part(NamedTuple):
    """The n-th partial result in the scratch memory.

    Each row of a partial result consists of o, m, ℓ and two unused elements, which keep o aligned.
    """

    scratch: tl.tensor
    n: tl.tensor


class Work(NamedTuple):
    """The work that stream-K divides among programs: the row blocks of all sequences, one after another.

    The tuple is flat because Triton 3.6 replaces sizes of 1 inside loops with None if they are nested two tuples deep.
    """

    key_lengths: tl.tensor  # pointer to the number of real keys in each sequence, or None
    N_k: tl.tensor  # largest possible number of keys in a sequence
    batch: tl.tensor
    row_blocks_per_sequence: tl.tensor
    N_q: tl.tensor
    left: tl.tensor  # number of columns that a row sees to the left of its diagonal, or None for no limit
    programs: tl.tensor
    share: tl.tensor  # work units per program, or a lower bound if there are key_lengths


# Keys and values ------------------------------------------------------------------------------------------------


@triton.jit
def page_and_row(cache, first, length, const):
    """Return the pages of the keys first:first + B_c, and the row of each key within its page.

    If a single page contains the whole tile, return only this page and the row of the first key.
    """
    if const.page_size % const.B_c == 0:
        first = tl.cast(first, tl.int32)  # `first` is a Python int in Triton's interpreter
        page, row = tl.load(cache.table + first // const.page_size), first % const.page_size
    else:
        col = first + tl.arange(0, const.B_c)
        page, row = tl.load(cache.table + col // const.page_size, mask=col < length, other=0), col % const.page_size
    return tl.minimum(tl.maximum(page, 0), cache.pages - 1).to(tl.int64), row


@triton.jit
def load_keys(X, page_row, first, key_begin, length, const):
    """Load keys (or values) first:first + B_c of a head as a (B_c, d_pad) tile.

    Keys at or beyond `length`, and keys before `key_begin` if it is given, are filled with zeros instead of being read.
    `page_row` is the result of page_and_row(), or None if the cache is not paged.
    """
    stride = X.strides[2]
    if const.page_size == 0:
        return load_rows(
            X.ptr, first, stride, length, const.B_c, const.d, const.d_pad, const.masked, const.upcast, key_begin
        )
    elif const.page_size % const.B_c == 0:
        page, row = page_row
        end = length - first + row  # end of the sequence, as a row index in this page
        begin = None if key_begin is None else key_begin - first + row
        at = X.ptr + page * X.strides[0]
        return load_rows(at, row, stride, end, const.B_c, const.d, const.d_pad, RAGGED=True, UPCAST=const.upcast,
                         begin=begin)  # fmt: skip
    else:
        page, row = page_row
        e = tl.arange(0, const.d_pad)
        col = first + tl.arange(0, const.B_c)
        real = col < length if key_begin is None else (col >= key_begin) & (col < length)
        real = real[:, None] & (e < const.d)[None, :]
        at = X.ptr + (page * X.strides[0] + row.to(tl.int64) * stride)[:, None] + e[None, :]
        x = tl.load(at, mask=real, other=0.0)
        return x.to(tl.float32) if const.upcast else x  # (B_c, d_pad)


# One row block ----------------------------------------------------------------------------------------------------


@triton.jit
def visit_keys(q_i, cache, span, keys, bounds, sink, window, scales, const):
    """Process a span's tiles for a row block, and return the state m_i (B_r,), l_i (B_r,) and o_i (B_r, d_pad).

    `keys` consists of the first key that any row of the block sees and the number of real keys. `bounds` is (begin,
    end), the bounds of the columns that each row sees. `sink` contains each row's sink, or is None.

    If B_r is 16, there are enough registers for one partial row sum per column. In this case, the warps, which own
    different columns, exchange row sums only once, after the loop.
    """
    FEW_ROWS: tl.constexpr = const.B_r == 16
    o_i = tl.zeros((const.B_r, const.d_pad), tl.float32)  # FA2.A1.L5
    m_i = tl.full((const.B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((const.B_r, const.B_c) if FEW_ROWS else (const.B_r,), tl.float32)  # FA2.A1.L5
    if sink is not None:  # a sink acts like a key without a value; one program per row block includes it
        m_i = tl.where(span.is_first, sink * tl.div_rn(LOG2E, scales.scale_log2), m_i)
        one = tl.where(tl.arange(0, const.B_c) == 0, 1.0, 0.0)[None, :] if FEW_ROWS else 1.0
        l_i += tl.where(span.is_first, one, 0.0)
    begin, end = bounds
    first_key, length = keys
    key_begin = None if window[0] is None else first_key
    common_end, common_begin = tl.min(end, 0), tl.max(begin, 0)  # all rows see the columns common_begin:common_end
    for col0 in range(span.begin, span.end, span.step):  # FA2.A1.L6
        col = col0 + tl.arange(0, const.B_c)  # (B_c,)
        page_row = page_and_row(cache, col0, length, const) if const.page_size else None
        k_j = load_keys(cache.K, page_row, col0, key_begin, length, const)  # (B_c, d)  FA2.A1.L7
        # `col0 < span.end` is always true. The condition only keeps the compiler from converting q's layout before the
        # loop. A q converted there would occupy registers in every iteration.
        q_j = tl.where(col0 < span.end, q_i, 0.0) if FEW_ROWS and const.convert_q_in_loop else q_i
        s_ij = tl.dot(q_j, k_j.T, input_precision="ieee")  # (B_r, B_c)  FA2.A1.L8
        s_ij = apply_softcap(s_ij, scales.softcap_factor)
        past_end = col0 + const.B_c > common_end
        cut = past_end if window[0] is None else past_end | (col0 < common_begin)
        if const.masked and (not FEW_ROWS or cut):
            s_ij = tl.where(in_col_bounds(begin[:, None], end[:, None], col[None, :], window), s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
        m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)  # −∞ − (−∞) would be NaN in a row that has seen no key
        p_ij = tl.exp2((s_ij - m_safe[:, None]) * scales.scale_log2)  # (B_r, B_c)  FA2.A1.L9
        alpha = tl.exp2((m_i - m_safe) * scales.scale_log2)  # (B_r,)  FA2.A1.L9
        l_i = alpha[:, None] * l_i + p_ij if FEW_ROWS else alpha * l_i + tl.sum(p_ij, 1)  # FA2.A1.L9
        m_i = m_new
        v_j = load_keys(cache.V, page_row, col0, key_begin, length, const)  # (B_c, d)  FA2.A1.L7
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, alpha[:, None] * o_i, input_precision="ieee")  # (B_r, d)  FA2.A1.L10
    return m_i, tl.sum(l_i, 1) if FEW_ROWS else l_i, o_i


@triton.jit
def finalize(m, l, scale_log2):
    """Return the divisor for o and the value of L, given the m and ℓ of a row's final state.

    For a row that sees no key, the divisor is 1, which gives O = 0, and L is −∞.
    """
    divisor = tl.where(l == 0.0, 1.0, l)
    return divisor, (m * scale_log2 + tl.log2(divisor)) * LN2  # FA2.A1.L13


@triton.jit
def group_rows(X, block, row, sizes, const):
    """Return (B_r, d_pad) pointers to rows of X (Q or O). `row` contains the indices of these rows in their group.

    Row r of a group is query r % N_q of the group's query head r // N_q.
    """
    at = (block.kv_head * sizes.group + row // sizes.N_q).to(tl.int64) * X.strides[1]
    at += (row % sizes.N_q).to(tl.int64) * X.strides[2]
    at = X.ptr + tl.cast(block.b, tl.int64) * X.strides[0] + at
    return at[:, None] + tl.arange(0, const.d_pad)[None, :]  # (B_r, d)


@triton.jit
def part_rows(part, r, sizes, const):
    """Return pointers to rows r of a partial result in the scratch memory. Each row contains o, followed by m and ℓ."""
    return part.scratch + (tl.cast(part.n, tl.int64) * sizes.R + r) * (const.d_pad + 4)


@triton.jit
def attend(queries, cache, block, span, part, scales, sizes, const):
    """Compute a row block's attention to a span of keys. `queries` is the QueryOutput of the call.

    If the span contains all of the row block's keys, write O and L. Otherwise, write a partial result to `part`.
    """
    r, e = tl.arange(0, const.B_r), tl.arange(0, const.d_pad)
    row = block.i * const.B_r + r
    real = row < sizes.group * sizes.N_q
    inside = real[:, None] & (e < const.d)[None, :]
    q_i = tl.load(group_rows(queries.Q, block, row, sizes, const), mask=inside, other=0.0)  # (B_r, d)  FA2.A1.L4
    if const.upcast:
        q_i = q_i.to(tl.float32)
    window = sizes.left, sizes.right
    bounds = col_bounds(row % sizes.N_q, sizes.N_q, block.diagonal_end, block.length, window)  # (B_r,) each
    keys = col_bounds(0 * block.i, sizes.N_q, block.diagonal_end, block.length, window)[0], block.length
    sink = None
    if queries.sinks is not None:
        head = block.kv_head * sizes.group + row // sizes.N_q
        sink = tl.load(queries.sinks + head, mask=real, other=0.0).to(tl.float32)  # (B_r,)
    # In a paged cache, strides[0] is the distance between pages, so it must not be multiplied by the sequence's index.
    b = 0 * block.b if const.page_size else block.b
    K_h = Strided(head_ptr(cache.K.ptr, cache.K.strides, b, block.kv_head), cache.K.strides)
    V_h = Strided(head_ptr(cache.V.ptr, cache.V.strides, b, block.kv_head), cache.V.strides)
    table_b = cache.table + tl.cast(block.b, tl.int64) * sizes.table_stride if const.page_size else cache.table
    cache_h = KVCache(K_h, V_h, table_b, cache.pages)
    m_i, l_i, o_i = visit_keys(q_i, cache_h, span, keys, bounds, sink, window, scales, const)
    if const.early_merge:  # the merge kernel may start now, but it waits until this kernel has ended
        tl.extra.cuda.gdc_launch_dependents()

    if span.is_complete:
        divisor, L_i = finalize(m_i, l_i, scales.scale_log2)
        O_i = (o_i * (1.0 / divisor)[:, None]).to(queries.O.ptr.dtype.element_ty)  # (B_r, d)  FA2.A1.L12
        tl.store(group_rows(queries.O, block, row, sizes, const), O_i, mask=inside)  # FA2.A1.L14
        L_at = (block.b * sizes.H + block.kv_head * sizes.group).to(tl.int64) * sizes.N_q + row
        tl.store(queries.L + L_at, L_i, mask=real)  # FA2.A1.L15
    else:
        at = part_rows(part, r, sizes, const)  # (B_r,)
        tl.store(at[:, None] + e[None, :], o_i, mask=real[:, None])
        tl.store(at + const.d_pad, m_i, mask=real)
        tl.store(at + const.d_pad + 1, l_i, mask=real)


@triton.jit
def find_row_block(row_block_id, key_lengths, table, N_k, sizes):
    """Return the DecodeRowBlock with index `row_block_id` among the row blocks of all sequences."""
    b, in_sequence = row_block_id // sizes.row_blocks_per_sequence, row_block_id % sizes.row_blocks_per_sequence
    kv_head, i = in_sequence // sizes.row_blocks, in_sequence % sizes.row_blocks
    length = key_length(key_lengths, b, N_k)
    return DecodeRowBlock(b, kv_head, i, length, N_k if table is None else length)


@triton.jit
def first_tile(N_k, N_q, left, const):
    """Return the index of the first key tile seen by any query of a sequence."""
    if left is None:
        return 0 * N_k
    else:
        return tl.maximum(N_k - N_q - left, 0) // const.B_c


# Split-KV: the same number of programs for every row block --------------------------------------------------------


@triton.jit(do_not_specialize=UNSPECIALIZED)
def split_kv_kernel(Q, K, V, O, L, scratch, sinks, key_lengths, table, strides, N_k, splits, scales, sizes, const,
                    WHOLE: tl.constexpr):  # fmt: skip
    """Process split w of a row block, which consists of tiles w, w + splits, w + 2 · splits, and so on.

    Each program processes one split. If WHOLE is true, each row block has a single split with all of its tiles, so O
    and L are written directly.
    """
    w, row_block_id = tl.program_id(0) % splits, tl.program_id(0) // splits
    queries = QueryOutput(sinks, Strided(Q, strides.Q), Strided(O, strides.O), L)
    cache = KVCache(Strided(K, strides.K), Strided(V, strides.V), table, sizes.pages)
    block = find_row_block(row_block_id, key_lengths, table, N_k, sizes)
    begin = (first_tile(block.diagonal_end, sizes.N_q, sizes.left, const) + w) * const.B_c
    span = Span(begin, block.length, splits * const.B_c, w == 0, WHOLE)
    attend(queries, cache, block, span, Part(scratch, w + row_block_id * (splits + 1)), scales, sizes, const)


# Stream-K: an equal share of the work for every program -----------------------------------------------------------

CHUNK = tl.constexpr(256)  # number of key_lengths loaded at a time


@triton.jit
def units_in_row_block(length, work, const):
    """Return the number of work units in a row block: one per tile, plus one for starting the row block.

    The additional unit ensures that O and L are also written for rows that see no key.
    """
    if work.left is None:
        return tl.cdiv(length, const.B_c) + 1
    else:
        first = first_tile(work.N_k if const.page_size == 0 else length, work.N_q, work.left, const)
        return tl.maximum(tl.cdiv(length, const.B_c) - first, 0) + 1


@triton.jit
def units_in_sequences(work, first, end, const):
    """Return the number of work units in each of the sequences first:first + CHUNK.

    The number is 0 for sequences at or beyond `end`."""
    index = first + tl.arange(0, CHUNK)
    length = tl.load(work.key_lengths + index, mask=index < end, other=0)
    length = tl.minimum(tl.maximum(length, 0), work.N_k).to(tl.int32)
    units = work.row_blocks_per_sequence * units_in_row_block(length, work, const)
    return tl.where(index < end, units, 0)  # (CHUNK,)


@triton.jit
def units_before(b, work, const):
    """Return the number of work units in all sequences before sequence b.

    Every program computes this sum itself because the host does not know key_lengths.
    """
    if work.key_lengths is None:
        return b * work.row_blocks_per_sequence * units_in_row_block(work.N_k, work, const)
    else:
        units = 0 * b
        for first in range(0, b, CHUNK):
            units += tl.sum(units_in_sequences(work, first, b, const), 0)
        return units


@triton.jit
def find_sequence(unit, work, const):
    """Return the index of the sequence that contains a work unit, and the index of this sequence's first unit."""
    if work.key_lengths is None:
        units = work.row_blocks_per_sequence * units_in_row_block(work.N_k, work, const)
        return unit // units, unit // units * units
    else:
        b, begin, before = 0 * unit, 0 * unit, 0 * unit
        for first in range(0, work.batch, CHUNK):
            units = units_in_sequences(work, first, work.batch, const)
            over = (before + tl.cumsum(units, 0) <= unit) & (first + tl.arange(0, CHUNK) < work.batch)
            b += tl.sum(over.to(tl.int32), 0)
            begin += tl.sum(tl.where(over, units, 0), 0)
            before += tl.sum(units, 0)
        return b, begin


@triton.jit
def share_of(total, work):
    """Return the number of work units per program when `total` units are divided among all programs."""
    return work.share if work.key_lengths is None else tl.maximum(tl.cdiv(total, work.programs), work.share)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def stream_k_kernel(Q, K, V, O, L, scratch, sinks, key_lengths, table, strides, N_k, batch, share, scales, sizes,
                    const):  # fmt: skip
    """Process work units w · share:(w + 1) · share as program w.

    These units may include the end of one row block, complete row blocks, and the start of another row block. If a
    program processes only some of a row block's units, it writes a partial result with index w + row_block_id. The
    indices are unique because w or row_block_id increases from one partial result to the next.
    """
    w, programs = tl.program_id(0), tl.num_programs(0)
    queries = QueryOutput(sinks, Strided(Q, strides.Q), Strided(O, strides.O), L)
    cache = KVCache(Strided(K, strides.K), Strided(V, strides.V), table, sizes.pages)
    work = Work(key_lengths, N_k, batch, sizes.row_blocks_per_sequence, sizes.N_q, sizes.left, programs, share)

    total = units_before(batch, work, const)
    unit = w * share_of(total, work)
    remaining = tl.minimum(unit + share_of(total, work), total) - unit  # number of units left for this program
    b, sequence_begin = find_sequence(unit, work, const)
    units = units_in_row_block(key_length(key_lengths, tl.minimum(b, batch - 1), N_k), work, const)
    row_block_id = b * sizes.row_blocks_per_sequence + (unit - sequence_begin) // units
    skipped = (unit - sequence_begin) % units  # number of units of this row block assigned to earlier programs
    while remaining > 0:
        block = find_row_block(row_block_id, key_lengths, table, N_k, sizes)
        units = units_in_row_block(block.length, work, const)
        done = tl.minimum(remaining, units - skipped)
        tile = first_tile(block.diagonal_end, sizes.N_q, sizes.left, const)
        begin = (tile + tl.maximum(skipped - 1, 0)) * const.B_c  # the first unit of a row block has no tile
        end = (tile + skipped + done - 1) * const.B_c
        span = Span(begin, end, const.B_c, skipped == 0, done == units)
        attend(queries, cache, block, span, Part(scratch, w + row_block_id), scales, sizes, const)
        remaining, row_block_id, skipped = remaining - done, row_block_id + 1, 0


# The merge --------------------------------------------------------------------------------------------------------


@triton.jit
def merge_partials(m, l, o, m_w, l_w, o_w, scale_log2):
    """Merge the state m, l (scalars), o (d,) with PARTS other states m_w (PARTS,), l_w (PARTS,), o_w (PARTS, d).

    The formulas are the same as in SoftmaxState.merge (reference/online_softmax.py), applied to PARTS states at once.
    """
    m_new = tl.maximum(m, tl.max(m_w, 0))
    m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)
    alpha, beta = tl.exp2((m - m_safe) * scale_log2), tl.exp2((m_w - m_safe) * scale_log2)
    l = alpha * l + tl.sum(beta * l_w, 0)
    o = alpha * o + tl.sum(beta[:, None] * o_w, 0)
    return m_new, l, o


@triton.jit
def programs_of_row_block(b, in_sequence, work, const, SPLIT_KV: tl.constexpr):
    """Return the indices of the first and last programs that read keys for a row block of sequence b.

    The programs belong to split_kv_kernel if SPLIT_KV is true, and to stream_k_kernel otherwise.
    """
    if SPLIT_KV:
        splits = work.programs // (work.batch * work.row_blocks_per_sequence)
        first = (b * work.row_blocks_per_sequence + in_sequence) * splits
        return first, first + splits - 1
    else:
        share = share_of(units_before(work.batch, work, const), work)
        units = units_in_row_block(key_length(work.key_lengths, b, work.N_k), work, const)
        begin = units_before(b, work, const) + in_sequence * units
        return begin // share, (begin + units - 1) // share


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_partials_kernel(O, L, scratch, key_lengths, strides, N_k, batch, share, programs, scales, sizes, const,
                 SPLIT_KV: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Merge the partial results of a row, PARTS at a time and in a fixed order.

    Each program writes WIDTH columns of the row's O, and one of these programs also writes the row's L.
    """
    pid, piece = tl.program_id(0) // (const.d_pad // WIDTH), tl.program_id(0) % (const.d_pad // WIDTH)
    b, head, n = pid // (sizes.H * sizes.N_q), pid // sizes.N_q % sizes.H, pid % sizes.N_q
    row = head % sizes.group * sizes.N_q + n
    in_sequence = head // sizes.group * sizes.row_blocks + row // const.B_r
    work = Work(key_lengths, N_k, batch, sizes.row_blocks_per_sequence, sizes.N_q, sizes.left, programs, share)
    first, last = programs_of_row_block(b, in_sequence, work, const, SPLIT_KV)
    if const.early_merge:
        tl.extra.cuda.gdc_wait()
    if first == last:
        return  # a single program has already written this row
    e = piece * WIDTH + tl.arange(0, WIDTH)
    m, l, o = -float("inf"), 0.0, tl.zeros((WIDTH,), tl.float32)
    for w in range(first, last + 1, PARTS):
        reader = w + tl.arange(0, PARTS)  # (PARTS,)
        real = reader <= last
        part = Part(scratch, reader + b * sizes.row_blocks_per_sequence + in_sequence)
        at = part_rows(part, row % const.B_r, sizes, const)  # (PARTS,)
        m_w = tl.load(at + const.d_pad, mask=real, other=NEG_INF)
        l_w = tl.load(at + const.d_pad + 1, mask=real, other=0.0)
        o_w = tl.load(at[:, None] + e[None, :], mask=real[:, None], other=0.0)  # (PARTS, WIDTH)
        m, l, o = merge_partials(m, l, o, m_w, l_w, o_w, scales.scale_log2)

    divisor, L_i = finalize(m, l, scales.scale_log2)
    O_i = (o / divisor).to(O.dtype.element_ty)  # (WIDTH,)  FA2.A1.L12
    O_n = head_ptr(O, strides.O, b, head) + tl.cast(n, tl.int64) * strides.O[2]
    tl.store(O_n + e, O_i, mask=e < const.d)  # FA2.A1.L14
    tl.store(L + pid, L_i, mask=piece == 0)  # FA2.A1.L15
