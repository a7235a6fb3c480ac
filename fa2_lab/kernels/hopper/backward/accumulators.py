"""The fp32 gradient accumulators in HBM, and the kernels that run before and after the Hopper backward kernel.

Column blocks run in any order, and all of them add to dQ. A consumer stores its partial result for a tile in shared
memory and continues, while TMA, the copy engine, adds that result to HBM in fp32. Only bwd_postprocess reads the
accumulators, so they can keep the element order in which a matmul leaves its result in registers. Each thread stores
its elements in groups of four, without shuffles or bank conflicts, and bwd_postprocess restores row-major order.
Because rounding depends on the order of the additions, the last bits of dQ differ from run to run.

If there are too few column blocks to occupy all SMs, for example because there are few K/V heads, each column block is
divided among several programs. Each program then processes only some of the row blocks, so dK and dV also need
accumulators. During the backward pass, the accumulators take 4 bytes per element of dQ and, if column blocks are
divided, another 4 bytes per element of dK and dV. Rows are padded to whole blocks, and d is padded to 32, 64 or 128.

The accumulators of the matmuls for S and dP are initialized to −L/scale and −D instead of zero, so that the tensor
cores perform the subtractions. The kernels call these initial values `acc_init`.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fa2_lab.kernels.common.constants import LOG2E, NEG_INF
from fa2_lab.kernels.common.tile import block_count, head_ptr, load_rows, packed_block, sequence_start, store_rows


@gluon.jit
def add_tile(x, accum, at, buffer):
    """Add x, a tile of 64 rows and 32, 64 or 128 columns, to `accum` with TMA, starting at line `at`.

    A line has 32 elements. x is first stored in the shared-memory `buffer`, from which TMA reads it. If x has 128
    columns, it is stored and added in two halves.
    """
    W: gl.constexpr = x.shape[1]
    if W <= 64:
        add_lines(to_fragment_order(x), accum, at, buffer)
    else:
        left, right = to_fragment_order(x).reshape([2, W, 32]).permute([1, 2, 0]).split()
        add_lines(left, accum, at, buffer)
        add_lines(right, accum, at + W, buffer)


@gluon.jit
def add_lines(x, accum, at, buffer):
    """Store x (64 or 128 lines) in the shared-memory `buffer` and add it to `accum` with TMA, starting at line `at`."""
    tma.store_wait(0)  # wait until TMA has read the buffer's previous contents
    buffer.store(x)
    fence_async_shared()
    tma.async_atomic_add(accum, [at, 0], buffer)


@gluon.jit
def to_fragment_order(x):
    """Reshape x from (64, W) to (2 · W, 32) in the element order of a consumer's registers, so that no data moves."""
    W: gl.constexpr = x.shape[1]
    # A row index is (warp, upper or lower 8 rows, lane), and a column index is (group of 8 columns, lane, element).
    x = x.reshape([4, 2, 8, W // 8, 4, 2])
    return x.permute([3, 0, 2, 4, 1, 5]).reshape([2 * W, 32])


@triton.jit
def to_row_major(x, W: tl.constexpr):
    """Undo to_fragment_order(), and return a tile of an accumulator in row-major order, as (64, W)."""
    x = tl.reshape(x, [W // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, W])


@triton.jit
def cu_seqlens_in_order(cu_seqlens, n, sequences):
    """Return whether the cumulative lengths never decrease once sequence_start() has clamped them."""
    back = tl.zeros((128,), tl.int32)
    for b in range(0, sequences, 128):
        left = tl.minimum(b + tl.arange(0, 128), sequences - 1)
        back += (sequence_start(cu_seqlens, left + 1, n) < sequence_start(cu_seqlens, left, n)).to(tl.int32)
    return tl.sum(back) == 0


@triton.jit(do_not_specialize=["H", "N_q", "N_k", "sequences", "tiles"])
def bwd_preprocess(O, dO, L, dL, acc_init, accum, cu_seqlens_q, cu_seqlens_k, O_strides, dO_strides, H, N_q, N_k,
                   sequences, tiles, scale_log2, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr):  # fmt: skip
    """Zero all accumulators, and write the initial values of two matmuls' accumulators: −L/scale for S and −D for dP.

    For a row that sees no key or does not exist, S starts at −∞, which makes P zero. cu_seqlens_k is passed only if dQ
    is accumulated in a fixed order. In that case, if the sequence starts are not in ascending order (invalid input),
    the accumulators and the counters of semaphore.py are set to NaN instead of 0. Read as an integer, the bits of NaN
    exceed every position for which a writer waits, so no writer hangs. `tiles` is the number of (64, d_pad) tiles in
    `accum`.
    """
    gdc_launch_dependents()  # lets the next kernel start on idle SMs, where it waits for this kernel to end
    PARTS: tl.constexpr = B_r // 64
    T_r = block_count(N_q, sequences, B_r)
    block_id, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    bh, i = block_id // T_r, block_id % T_r
    zeros = tl.zeros((64 * d_pad,), tl.float32)
    if cu_seqlens_k is not None:
        in_order = cu_seqlens_in_order(cu_seqlens_q, N_q, sequences) & cu_seqlens_in_order(cu_seqlens_k, N_k, sequences)
        zeros = tl.where(in_order, zeros, float("nan"))
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tl.cast(tile, tl.int64) * (64 * d_pad) + tl.arange(0, 64 * d_pad)
        tl.store(accum + at, zeros)  # FA2.A2.L3 FA2.A2.L7

    tokens = N_q
    if cu_seqlens_q is not None:  # a packed sequence is addressed by its first row, not by a batch entry
        i, begin, N_q, _, _ = packed_block(i, cu_seqlens_q, N_q, cu_seqlens_q, N_q, sequences, B_r)
    first = i * B_r + part * 64
    batch = bh // H if cu_seqlens_q is None else begin
    O, dO = head_ptr(O, O_strides, batch, bh % H), head_ptr(dO, dO_strides, batch, bh % H)
    o_i = load_rows(O, first, O_strides[2], N_q, 64, d, d_pad, RAGGED=True, UPCAST=True)
    do_i = load_rows(dO, first, dO_strides[2], N_q, 64, d, d_pad, RAGGED=True, UPCAST=True)
    D_i = tl.sum(do_i * o_i, 1)  # (64,)  FA2.A2.L4
    row = first + tl.arange(0, 64)  # (64,)
    at = tl.cast(bh, tl.int64) * tokens + row
    if cu_seqlens_q is not None:
        at += begin
    if dL is not None:  # if the loss also depends on L, dS has the additional term P ∘ dL
        D_i -= tl.load(dL + at, mask=row < N_q, other=0.0)
    L_i = tl.load(L + at, mask=row < N_q, other=NEG_INF)
    sees_no_key = L_i == NEG_INF
    at = acc_init + tl.cast(block_id, tl.int64) * (2 * B_r) + part * 64 + tl.arange(0, 64)
    tl.store(at, tl.where(sees_no_key, NEG_INF, tl.div_rn(-L_i * LOG2E, scale_log2)))
    tl.store(at + B_r, tl.where(sees_no_key, 0.0, -D_i))


@triton.jit(do_not_specialize=["batch", "H", "H_kv", "N_q", "N_k", "sequences"])
def bwd_postprocess(accum, dQ, dK, dV, cu_seqlens_q, cu_seqlens_k, strides, batch, H, H_kv, N_q, N_k, sequences, scale,
                    d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr):  # fmt: skip
    """Reorder, scale and round one tile of the accumulated dQ (or of dK or dV, if passed), and write it to HBM."""
    gdc_wait()  # wait for all additions to finish
    T_r, T_c = block_count(N_q, sequences, B_r), block_count(N_k, sequences, 128)
    dQ_strides, dK_strides, dV_strides = strides
    row_tiles, column_tiles = 2 * T_r * batch * H, 2 * T_c * batch * H_kv
    n = tl.program_id(0)
    if n < row_tiles:
        write_tile(accum, n, dQ, dQ_strides, H, N_q, T_r, cu_seqlens_q, sequences, scale, d, d_pad, B_r)  # FA2.A2.L20
    elif dK is not None:
        n -= row_tiles
        accum += tl.cast(row_tiles, tl.int64) * (B_r * d_pad // 2)
        if n < column_tiles:
            write_tile(accum, n, dK, dK_strides, H_kv, N_k, T_c, cu_seqlens_k, sequences, scale, d, d_pad,  # FA2.A2.L18
                       128)  # fmt: skip
        else:
            accum += tl.cast(column_tiles, tl.int64) * (64 * d_pad)
            n -= column_tiles
            write_tile(accum, n, dV, dV_strides, H_kv, N_k, T_c, cu_seqlens_k, sequences, 1.0, d, d_pad,  # FA2.A2.L18
                       128)  # fmt: skip


@triton.jit
def write_tile(accum, n, X, strides, H, N, T, cu_seqlens, sequences, scale, d: tl.constexpr, d_pad: tl.constexpr,
               B: tl.constexpr):  # fmt: skip
    """Reorder and scale tile n of a completed accumulator, and write it to X.

    X has T blocks of B rows per head. Each block is covered by two tiles, one per consumer. `cu_seqlens` contains the
    cumulative lengths if sequences are packed, and is None otherwise.
    """
    W: tl.constexpr = B * d_pad // 128
    block_id, c = n // 2, n % 2
    bh, i = block_id // T, block_id % T
    if cu_seqlens is not None:
        i, begin, N, _, _ = packed_block(i, cu_seqlens, N, cu_seqlens, N, sequences, B)
    x = to_row_major(tl.load(accum + tl.cast(n, tl.int64) * (64 * W) + tl.arange(0, 64 * W)), W)
    row, col = i * B, c * W  # the two consumers split a block of 64 rows by column
    if B > 64:  # they split a block of 128 rows by row instead
        row, col = i * B + c * 64, 0
    batch = bh // H if cu_seqlens is None else begin
    store_rows(head_ptr(X, strides, batch, bh % H) + col, x * scale, row, strides[2], N, 64, d - col, W)
