"""The FlashAttention-2 forward pass (Algorithm 1) for Hopper, with concurrent copies, matmuls and exponentials.

The kernel is persistent. A program stays on its SM and fetches one row block after another from the tile scheduler, so
that a row block's epilogue overlaps with the copies for the next one. Each consumer warpgroup owns 64 rows. It starts
its next tile's Q Kᵀ together with the previous tile's P V, and while the tensor cores compute both matmuls, the other
consumers compute exponentials. Tiles are processed from right to left, first the DIAGONAL ones and then the FULL ones.
With a left bound, the last tiles are DIAGONAL as well. In all functions, c is a consumer's index, n counts the tiles
that this program has processed, and r counts its row blocks.

ThunderKittens divides a kernel into load, compute and store. The corresponding functions in this file are `producer`,
`consumer` (with `process_row_block` and `step`), and `store`.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from fa2_lab.kernels.common.constants import LN2, NEG_INF
from fa2_lab.kernels.common.tile import block_count
from fa2_lab.kernels.hopper.forward.softmax import ColumnBounds, initial_state, mask, rescale_o, rounded, softmax_step
from fa2_lab.kernels.hopper.shared.descriptors import shape_of, tile_at
from fa2_lab.kernels.hopper.shared.geometry import Geometry, Scheduler
from fa2_lab.kernels.hopper.shared.mailbox import Mailbox, new_mailbox
from fa2_lab.kernels.hopper.shared.pipeline import (
    PingPong,
    TmaPipeline,
    acc_layout,
    as_operand,
    matmul_over_d,
    matrix,
    new_ping_pong,
    new_pipeline,
    opaque_smem,
    stacked,
    zero_oob_rows,
)
from fa2_lab.kernels.triton_versions import by_triton

ROWS = gl.constexpr(64)  # rows per consumer, as in a warpgroup's matmul
# The fields of a row block in the mailbox. A negative row means that no row block is left.
ROW_BLOCK_FIELDS = gl.constexpr(("row", "q_batch_or_end", "head"))
PACKED_ROW_BLOCK_FIELDS = gl.constexpr((*ROW_BLOCK_FIELDS.value, "N_q", "N_k"))
HIDE_ROW_SUM = gl.constexpr(by_triton({"3.6": False, "3.7": True, "3.8": False}))


@triton.aggregate
class ForwardSharedStorage:
    """A thread block's buffers and barriers in shared memory, and the launch's configuration."""

    q: TmaPipeline  # two stages per consumer so that the next Q arrives early, or one stage, which Q then shares with O
    k: TmaPipeline
    v: TmaPipeline
    o: gl.shared_memory_descriptor  # (consumers, …, 64, d): O before it is copied to HBM
    ping_pong: PingPong
    mailbox: Mailbox
    config: gl.constexpr


# The producer warp ------------------------------------------------------------------------------------------


@gluon.jit
def producer(Q, K, V, smem, scheduler, geometry):
    """Run the producer warp, which announces row blocks to the consumers and starts each copy once its stage is empty.

    Each tile of V is needed one step later than the corresponding tile of K, so K is copied one tile ahead of V. A
    consumer releases a tile of V together with the next tile of K. Therefore, if K's stage is empty, V's stage is empty
    as well.
    """
    CONSUMERS: gl.constexpr = smem.config.consumers
    n = 0  # number of tiles of K (and of V) loaded so far
    r = 0  # number of row blocks announced so far
    t = scheduler.first()
    while scheduler.more(t):
        block, bh = scheduler.block_coord(t)
        row, q_batch_or_end, k_batch_or_end, head, sequence = geometry.row_block(block, bh)
        if geometry.cu_seqlens_q is None or (row >= 0 and row < sequence.N_q):
            kv_head = head // geometry.group
            smem.mailbox.send(r, (row, q_batch_or_end, head, sequence.N_q, sequence.N_k))
            end = sequence.tile_end(row, sequence.B_r, sequence.length(q_batch_or_end))
            begin = sequence.tile_begin(row, end)
            T_c = end - begin
            smem.k.load(n, K, k_batch_or_end, kv_head, (end - 1) * sequence.B_c, sequence.N_k)  # FA2.A1.L7
            for c in gl.static_range(CONSUMERS):
                smem.q.load(r * CONSUMERS + c, Q, q_batch_or_end, head, row + c * ROWS, sequence.N_q)  # FA2.A1.L4
            for j in range(1, T_c):
                smem.k.load(n + j, K, k_batch_or_end, kv_head, (end - 1 - j) * sequence.B_c, sequence.N_k)  # FA2.A1.L7
                smem.v.load(n + j - 1, V, k_batch_or_end, kv_head, (end - j) * sequence.B_c, sequence.N_k)  # FA2.A1.L7
            n += T_c
            t = scheduler.next()  # fetch late for load balance, but early enough that queued copies hide the latency
            smem.k.acquire(n)
            smem.v.load(n - 1, V, k_batch_or_end, kv_head, begin * sequence.B_c, sequence.N_k)  # FA2.A1.L7
            r += 1
        else:
            t = scheduler.next()
    smem.mailbox.send(r, (-1, 0, 0, 0, 0))
    scheduler.leave()


# A consumer warpgroup ---------------------------------------------------------------------------------------


@gluon.jit
def consumer(c: gl.constexpr, O, L, smem, geometry, scale_log2):
    """Run consumer warpgroup c, which computes O and L for its 64 rows in every row block of this program."""
    n = 0  # number of tiles processed so far
    r = 0
    row, q_batch_or_end, head, N_q, N_k = receive(r, smem.mailbox, geometry)
    while row >= 0:
        sequence = geometry.of_sequence(N_q, N_k)
        length = sequence.length(q_batch_or_end)
        # Two intervals of tiles matter: all_begin … all_end − 1 for the whole row block, and begin … end − 1 for this
        # consumer. If this consumer's rows are past the last row, it has no tiles, and end = begin.
        all_end = sequence.tile_end(row, sequence.B_r, length)
        all_begin = sequence.tile_begin(row, all_end)
        row += c * ROWS
        end, begin = gl.where(row < sequence.N_q, sequence.tile_end(row, ROWS, length), all_begin), all_begin
        if sequence.left is not None:
            begin = gl.where(row < sequence.N_q, sequence.tile_begin(row, end), all_begin)
        q_tile = r * smem.config.consumers + c
        q = smem.q.wait(q_tile)
        for j in range(all_end - end):  # tiles that only later rows see, or all tiles if this consumer has no rows
            drain_tile(c, n + j, smem)
        if end > begin:
            store_row, store_geometry = row, sequence
            if geometry.cu_seqlens_q is not None:  # for store(), keep only row − N_q, which saves one register
                store_row, store_geometry = row - N_q, geometry.of_sequence(0 * N_q, 0 * N_k)
            n_first = n + all_end - end
            o, m, l = process_row_block(c, n_first, q, q_tile, row, begin, end, length, smem, sequence, scale_log2)
            if sequence.left is not None:
                for j in range(all_end - begin, all_end - all_begin):  # tiles that only earlier rows see
                    drain_tile(c, n + j, smem)
            store(O, L, o, m, l, smem.o.index(c), q_batch_or_end, head, store_row, store_geometry)
        if end == begin or not smem.config.separate_O_buffer:
            tma.store_wait(0)
            smem.q.release(q_tile)
        n += all_end - all_begin
        r += 1
        row, q_batch_or_end, head, N_q, N_k = receive(r, smem.mailbox, geometry)
    tma.store_wait(0)  # wait for the last copy because shared memory is freed when the program ends


@gluon.jit
def receive(r, mailbox, geometry):
    """Wait for this program's r-th row block, and return its first row, q_batch_or_end, head, N_q and N_k.

    q_batch_or_end is the batch entry or, for a packed sequence, the row of Q at which the sequence ends. N_q and N_k
    are the lengths of the call or of the packed sequence. If no row block is left, the first row is negative.
    """
    mailbox.wait(r)
    row, q_batch_or_end, head = mailbox.read(r, "row"), mailbox.read(r, "q_batch_or_end"), mailbox.read(r, "head")
    N_q, N_k = geometry.N_q, geometry.N_k
    if geometry.cu_seqlens_q is not None:
        N_q, N_k = mailbox.read(r, "N_q"), mailbox.read(r, "N_k")
    mailbox.release(r)
    return row, q_batch_or_end, head, N_q, N_k


@gluon.jit
def drain_tile(c: gl.constexpr, n, smem):
    """Skip the n-th tile, which consumer c's rows do not see, but advance the rings and the ping-pong."""
    smem.ping_pong.wait(c, n)
    smem.ping_pong.pass_on(c)
    smem.k.wait(n)
    smem.k.release(n)
    smem.v.wait(n)


@gluon.jit
def process_row_block(c: gl.constexpr, n, q, q_tile, row, begin, end, length, smem, geometry, scale_log2):
    """Process all tiles that 64 rows see, from right to left, and return o (64, d), and m and l, each (64, 4).

    The rows start at `row`, and their tiles have the indices begin … end − 1. q contains these rows of Q, which are
    tile `q_tile` of Q's ring. `length` is the number of real keys.
    """
    B_c: gl.constexpr = geometry.B_c
    d: gl.constexpr = smem.config.d_pad
    bounds = seen_columns(row, length, geometry)
    o = gl.zeros([ROWS, d], gl.float32, acc_layout(d))  # FA2.A1.L5

    if geometry.key_lengths is not None:  # with two stages, this wait cannot deadlock: see forward_kernel()
        zero_oob_rows(smem.v.wait(n), length - (end - 1) * B_c)
    s = start_scores(c, n, q, smem)
    smem.ping_pong.pass_on(c)
    s = warpgroup_mma_wait(0, deps=[s])
    smem.k.release(n)
    if geometry.HAS_RIGHT_BOUND or geometry.RAGGED or geometry.left is not None:
        s = mask(s, bounds, (end - 1) * B_c)
    m, row_scale, l = initial_state(s, scale_log2)  # FA2.A1.L5
    p, m, row_scale, l, _ = softmax_step(s, m, row_scale, l, scale_log2)
    p = as_operand(rounded(p, smem.q.tiles.dtype), smem.q.tiles.dtype, d)

    T_c = end - begin
    for j in range(1, T_c):  # FA2.A1.L6
        o, m, row_scale, l, p = step(
            c, n + j, o, m, row_scale, l, p, q, bounds, end - 1 - j, smem, geometry, scale_log2
        )
    if smem.config.separate_O_buffer:  # the next row block's Q can now be copied
        smem.q.release(q_tile)

    if geometry.left is not None:  # no row sees the keys to the left of the first row's interval
        zero_oob_rows(smem.v.wait(n + T_c - 1), geometry.col_begin(0) - begin * B_c, BEFORE=True)
    o = warpgroup_mma(p, smem.v.wait(n + T_c - 1), o, is_async=True)  # (64, d)  FA2.A1.L10
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    return o, m * (scale_log2 / row_scale), l


@gluon.jit
def seen_columns(row, length, geometry):
    """Return the ColumnBounds of the 64 rows that start at `row`."""
    if HIDE_ROW_SUM and geometry.B_c == 128:
        row = hide_row_sum(row)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout(geometry.B_c)))
    end = geometry.col_end(rows, length)
    end_full_tile = geometry.col_end(row, length) // geometry.B_c
    if geometry.left is None:
        return ColumnBounds(end, end_full_tile, begin=None, first_full_tile=None)
    else:
        first_full_tile = gl.cdiv(gl.maximum(geometry.col_begin(row + ROWS - 1), 0), geometry.B_c)
        return ColumnBounds(end, end_full_tile, geometry.col_begin(rows), first_full_tile)


@gluon.jit
def hide_row_sum(row):
    """Return `row` unchanged, but prevent the compiler from recognizing that `row` is a sum.

    Otherwise, the compiler would add c · 64 to each lane's row in advance and keep the results in registers. With
    Triton 3.7 at d = 64, this requires two registers more than are available. With other Triton versions, there are
    enough registers, so this function is not used, because it costs up to 1% of the speed.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row], gl.int32, is_pure=True, pack=1)


@gluon.jit
def step(c: gl.constexpr, n, o, m, row_scale, l, p, q, bounds, j, smem, geometry, scale_log2):
    """Start the n-th tile's Q Kᵀ and the previous tile's P V, and update m for the n-th tile while P V runs.

    The n-th tile is tile j of the keys. The argument p is the previous tile's P, and `bounds` is the result of
    seen_columns(). Return o, m, row_scale, l and the n-th tile's p. ptxas determines which instructions overlap with P
    V. With Triton 3.9, these are the row maxima and at most 9 of the 68 exponentials. At d = 64 under the causal mask,
    nothing overlaps, as `fa2-lab xray hopper.forward --d 64 --sass` shows.
    """
    s = start_scores(c, n, q, smem)
    o = warpgroup_mma(p, smem.v.wait(n - 1), o, is_async=True)  # (64, d)  FA2.A1.L10
    smem.ping_pong.pass_on(c)
    s = warpgroup_mma_wait(1, deps=[s])
    if geometry.HAS_RIGHT_BOUND or geometry.left is not None:
        if bounds.cuts(j):
            s = mask(s, bounds, j * geometry.B_c)
    p_next, m, row_scale, l, alpha = softmax_step(s, m, row_scale, l, scale_log2)
    p_next = as_operand(rounded(p_next, smem.q.tiles.dtype), smem.q.tiles.dtype, smem.config.d_pad)
    # ptxas moves this wait up, ahead of nearly all exponentials. Adding p_next to `deps` does not help: without a mask,
    # it has no effect, and at d = 64 under the causal mask, it causes register spills.
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    smem.k.release(n)  # also releases V's tile n − 1
    return rescale_o(o, alpha), m, row_scale, l, p_next  # FA2.A1.L10


@gluon.jit
def start_scores(c: gl.constexpr, n, q, smem):
    """Start the matmul Q Kᵀ for consumer c's n-th tile. The result is valid only after warpgroup_mma_wait()."""
    k = smem.k.wait(n)
    B_c: gl.constexpr = k.shape[0]
    zero = gl.zeros([ROWS, B_c], gl.float32, acc_layout(B_c))
    smem.ping_pong.wait(c, n)
    if smem.config.low_reg_schedule:
        q = opaque_smem(q)
    return matmul_over_d(q, k, zero, smem.config.skip_last_quarter, USE_ACC=False)  # (64, B_c)  FA2.A1.L8


@gluon.jit
def store(O, L, o, m, l, o_tile, batch_or_end, head, row, geometry):
    """Divide o by l, start the TMA copy of the result to O, and write L.

    The copy reads the shared-memory buffer o_tile and finishes while the next row block is being computed.
    """
    LANES: gl.constexpr = l.type.layout
    l = gl.sum(l, 1)  # (64,)
    empty = l == 0.0  # a row that sees no key gets O = 0 and L = −∞
    l = gl.where(empty, 1.0, l)
    o = o * gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc_layout(o.shape[1])))[:, None]  # (64, d)  FA2.A1.L12
    tma.store_wait(0)  # wait until the previous row block's copy has read o_tile
    matrix(o_tile).store(o.to(O.dtype))
    fence_async_shared()
    tma.async_store(O, tile_at(O, batch_or_end, head, row, geometry.N_q), o_tile)  # FA2.A1.L14
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LANES))[:, None]
    writes = (rows < geometry.N_q) & (gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :] == 0)
    L_i = (m + gl.log2(l)[:, None]) * LN2  # (64, 4): one of the four lanes with the same L writes it  FA2.A1.L13
    L_i = gl.where(empty[:, None], NEG_INF, L_i)
    L_i, writes = gl.broadcast(L_i, writes)
    at, writes = gl.broadcast(L + geometry.first_L_index(batch_or_end, head, O) + rows, writes)
    gl.store(at, L_i, mask=writes)  # FA2.A1.L15


# The kernel -------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["key_lengths", "cu_seqlens_q", "cu_seqlens_k", "sequences", "left", "right", "group", "l2_group"]
)
def forward_kernel(Q, K, V, O, L, counter, key_lengths, cu_seqlens_q, cu_seqlens_k, sequences, left, right, group,
                   l2_group, scale_log2, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """Compute O and L. Q, K, V and O are tensor descriptors of (batch, heads, N, d) tensors.

    left and right are the bounds of a window, or None. CAUSAL means that right is 0. If `sequences` is not None, it is
    the number of packed sequences, and cu_seqlens_q and cu_seqlens_k are the cumulative sequence lengths. `counter`
    points to the counters of the tile scheduler. CONFIG is a ForwardConfig, and RAGGED means that a tile may extend
    past the last key.
    """
    CONSUMERS: gl.constexpr = CONFIG.consumers
    PRODUCER_REGISTERS: gl.constexpr = 24 if sequences is None else 32  # finding a packed sequence takes more registers
    batch, H, N_q = shape_of(Q)
    _, _, N_k = shape_of(K)
    HAS_RIGHT_BOUND: gl.constexpr = CAUSAL or right is not None
    right = 0 if right is None else right
    geometry = Geometry(
        N_q, N_k, H, group, key_lengths, RAGGED, HAS_RIGHT_BOUND, right, left, CONFIG.rows, CONFIG.B_c, cu_seqlens_q,
        cu_seqlens_k, sequences
    )  # fmt: skip
    scheduler = Scheduler(counter, block_count(N_q, sequences, CONFIG.rows), batch * H, l2_group, DYNAMIC_FIRST=False)
    q = new_pipeline(Q, CONSUMERS * (2 if CONFIG.separate_O_buffer else 1), 1)
    if CONFIG.separate_O_buffer:
        o = gl.allocate_shared_memory(O.dtype, stacked(CONSUMERS, O.block_shape), O.layout)
    else:
        o = q.tiles
    # K and V have the same number of stages because releasing a tile of K also frees a stage of V. With key_lengths,
    # both rings need at least two stages: a consumer waits for V's first tile before it releases K's first tile, while
    # the producer fills K's second stage before V's first stage.
    k = new_pipeline(K, CONFIG.stages, CONSUMERS)
    v = new_pipeline(V, CONFIG.stages, CONSUMERS, OWN_EMPTY_BARRIERS=False)  # released together with K's tiles
    ping_pong = new_ping_pong(CONSUMERS, CONFIG.ping_pong)
    mailbox = new_mailbox(ROW_BLOCK_FIELDS if sequences is None else PACKED_ROW_BLOCK_FIELDS, CONSUMERS)
    smem = ForwardSharedStorage(q, k, v, o, ping_pong, mailbox, CONFIG)
    fence_async_shared()  # make the barriers visible to TMA
    producer_args = (Q, K, V, smem, scheduler, geometry)
    args_0 = (0, O, L, smem, geometry, scale_log2)
    args_1 = (1, O, L, smem, geometry, scale_log2)
    args_2 = (2, O, L, smem, geometry, scale_log2)
    if CONSUMERS == 1:
        gl.warp_specialize([(consumer, args_0), (producer, producer_args)], [1], [PRODUCER_REGISTERS])
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consumer, args_0), (consumer, args_1), (producer, producer_args)],
            [4, 1],
            [CONFIG.registers, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(consumer, args_0), (consumer, args_1), (consumer, args_2), (producer, producer_args)],
            [4, 4, 1],
            [CONFIG.registers, CONFIG.registers, PRODUCER_REGISTERS],
        )
