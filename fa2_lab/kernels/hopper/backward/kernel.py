"""The FlashAttention-2 backward kernel (Algorithm 2) for Hopper, which makes one pass over the column blocks.

Each of the two consumer warpgroups owns 64 columns of a column block and keeps their dK and dV in registers. All tiles
are transposed so that P and dS can be used as left operands directly from registers. Since dQ needs the dS of both
consumers, dS is also stored in shared memory. The matmul for a row block's dQ overlaps with the exponentials of the
next row block, and TMA then adds the result to dQ in HBM.

The functions that start the matmuls are in products.py. This file determines the order in which the matmuls start and
where the consumers wait for the results. Some matmuls can start earlier or later, and configs.py lists the fastest
order for each head dimension and mask. In all functions, c is a consumer's index, n counts the row blocks that this
program has processed, and r counts its column blocks.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fa2_lab.kernels.common.constants import LN2
from fa2_lab.kernels.common.tile import block_count
from fa2_lab.kernels.hopper.backward.accumulators import add_tile
from fa2_lab.kernels.hopper.backward.products import V_REG_COLS, start_dk, start_dp, start_dq, start_dv, start_scores
from fa2_lab.kernels.hopper.backward.rows import (
    COLS,
    COLUMN_BLOCK_FIELDS,
    CONSUMERS,
    ORDERED_COLUMN_BLOCK_FIELDS,
    ORDERED_ROW_BLOCK_FIELDS,
    ROW_BLOCK_FIELDS,
    RowBlockPipeline,
    new_row_block_pipeline,
    seeing_rows,
)
from fa2_lab.kernels.hopper.backward.semaphore import Semaphore, new_semaphore
from fa2_lab.kernels.hopper.shared.descriptors import shape_of, tile_at
from fa2_lab.kernels.hopper.shared.geometry import Geometry, Scheduler
from fa2_lab.kernels.hopper.shared.mailbox import Mailbox, new_mailbox
from fa2_lab.kernels.hopper.shared.pipeline import (
    TmaPipeline,
    acc_layout,
    as_operand,
    barriers,
    matrix,
    new_pipeline,
    stacked,
    zero_oob_rows,
)


@triton.aggregate
class BackwardSharedStorage:
    """A thread block's buffers and barriers in shared memory, and the launch's configuration."""

    k: TmaPipeline
    v: TmaPipeline
    row_blocks: RowBlockPipeline
    ds: gl.shared_memory_descriptor  # (2, 128, B_r): both consumers' dS for this row block and for the previous one
    ds_filled: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor  # (2, …): each consumer's partial dQ, which TMA adds to HBM
    mailbox: Mailbox
    semaphore: Semaphore
    config: gl.constexpr


# The producer warp ------------------------------------------------------------------------------------------


@gluon.jit
def producer(Q, K, V, dO, acc_init, smem, scheduler, geometry, T_r, parts):
    """Run the producer warp, which announces column blocks to the consumers and fills each stage once it is empty.

    If column blocks are divided into parts, the scheduler treats each part of a K/V head as a head with the same number
    of column blocks. If dQ is accumulated in a fixed order, the last column block is scheduled first (semaphore.py
    explains why).
    """
    entries, heads, _ = shape_of(Q)
    all_row_blocks = entries * heads * T_r
    n = 0  # number of row blocks loaded so far
    r = 0  # number of column blocks announced so far
    t = scheduler.first()
    while scheduler.more(t):
        block, head_part = scheduler.block_coord(t)
        if smem.semaphore.USED:
            block = scheduler.blocks - 1 - block
        bh, part = head_part // parts, head_part % parts
        H_kv = geometry.H // geometry.group
        batch, head = bh // H_kv, bh % H_kv
        j, k_batch_or_end, q_batch_or_end, before, T, sequence = geometry.column_block(block, batch, T_r)
        col = j * geometry.B_c
        length = sequence.length(batch)
        first = sequence.first_row_block(col, length)
        per_head = sequence.end_of_row_blocks(col, length, T) - first  # number of row blocks per query head
        steps = geometry.group * per_head
        begin, end = steps * part // parts, steps * (part + 1) // parts
        if begin < end:
            unmasked_from, row_begin = sequence.unmasked_from(col, length), sequence.row_begin(col)
            col_block_id = bh * scheduler.blocks + block
            dkv_turn = gl.minimum(part, begin)  # number of nonempty parts that add to this dK and dV before this part
            sem_index = all_row_blocks + col_block_id  # the column blocks' counters come after those of the row blocks
            fields = end - begin, k_batch_or_end, head, col, unmasked_from, row_begin, length, col_block_id
            fields += dkv_turn, sem_index
            smem.mailbox.send(r, fields)
            keys = gl.where(sequence.N_q > 0, sequence.N_k, 0)  # 0 if there are no rows, so that K and V are zero
            smem.k.load(r, K, k_batch_or_end, head, col, keys)  # FA2.A2.L6
            smem.v.load(r, V, k_batch_or_end, head, col, keys)  # FA2.A2.L6
            gdc_wait()  # wait for the previous kernel to end, because this kernel uses its results and accumulators
            for step_index in range(begin, end):
                q_head = head * geometry.group + step_index // per_head
                i = first + (per_head - 1 - step_index % per_head if smem.config.last_first else step_index % per_head)
                row_block_id = (batch * geometry.H + q_head) * T_r + before + i
                dq_turn = sequence.last_column_block(i, length) - j
                smem.row_blocks.load(
                    n, r & 1, Q, dO, acc_init,  # FA2.A2.L9
                    q_batch_or_end, q_head, i, sequence.N_q, row_block_id, dq_turn,
                )  # fmt: skip
                n += 1
            r += 1
        t = scheduler.next()  # fetch the next block as late as possible, to balance the load
    smem.mailbox.send(r, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    scheduler.leave()


# A consumer warpgroup ---------------------------------------------------------------------------------------


@gluon.jit
def consumer(c: gl.constexpr, dK, dV, dq_accum, smem, geometry, scale_log2):
    """Run consumer warpgroup c, which computes dK and dV for its 64 columns of every column block."""
    d: gl.constexpr = smem.config.d_pad
    n = 0  # number of row blocks processed so far
    r = 0
    steps = receive(r, smem.mailbox)
    while steps > 0:
        bounds = seeing_rows(c, r, smem.mailbox, geometry)
        v = load_kv(c, r, smem, geometry)
        v_regs = load_v(v, smem)
        dk = gl.zeros([COLS, d], gl.float32, acc_layout(d))  # FA2.A2.L7
        dv = gl.zeros([COLS, d], gl.float32, acc_layout(d))  # FA2.A2.L7
        dk, dv, ds = step(c, n, dk, dv, v, v_regs, bounds, dq_accum, smem, scale_log2, ds=None)
        for n_step in range(n + 1, n + steps):  # FA2.A2.L8
            dk, dv, ds = step(c, n_step, dk, dv, v, v_regs, bounds, dq_accum, smem, scale_log2, ds)
        n += steps
        smem.v.release(r)
        if smem.config.dk_late:
            dk = wait_for_dk(n - 1, start_dk(n - 1, dk, ds, smem), ds, smem, others=0)
        dq = warpgroup_mma_wait(0, deps=[start_dq(c, n - 1, smem)])
        smem.k.release(r)
        smem.semaphore.wait_for_room(c, n - 1)
        add_dq(c, n - 1, dq, dq_accum, smem)
        smem.semaphore.wait_for_room(c, n)
        write_dk_dv(c, r, dk, dv, dK, dV, smem, scale_log2)
        r += 1
        steps = receive(r, smem.mailbox)
    tma.store_wait(0)  # wait for the last copy because shared memory is freed when the program ends


@gluon.jit
def receive(r, mailbox):
    """Wait for this program's r-th column block, and return the number of row blocks to process for it.

    Return 0 if there are no more column blocks.
    """
    mailbox.wait(r)
    return mailbox.read(r, "steps")


@gluon.jit
def load_kv(c: gl.constexpr, r, smem, geometry):
    """Wait for the r-th column block's K and V, and return consumer c's rows of V as a (64, d) tile.

    If the call has key_lengths or a window with a left bound, first zero the rows of K and V that no query sees.
    """
    k = smem.k.wait(r).slice(c * COLS, COLS, 0)
    v = smem.v.wait(r).slice(c * COLS, COLS, 0)
    # Each consumer zeroes its own 64 rows of K. For dQ, a consumer also needs the other consumer's rows, but it waits
    # at ds_filled until that consumer has zeroed them and issued a fence.
    if geometry.key_lengths is not None:
        real = smem.mailbox.read(r, "length") - smem.mailbox.read(r, "col") - c * COLS
        zero_oob_rows(k, real)
        zero_oob_rows(v, real)
    if geometry.left is not None:  # no row sees the keys to the left of the first row's interval
        unseen = geometry.col_begin(0) - smem.mailbox.read(r, "col") - c * COLS
        zero_oob_rows(k, unseen, BEFORE=True)
        zero_oob_rows(v, unseen, BEFORE=True)
    return v


@gluon.jit
def load_v(v, smem):
    """Return v (64, d). If v_in_registers is set, return only its first V_REG_COLS columns, loaded into registers."""
    if smem.config.v_in_registers:
        v = v.slice(0, V_REG_COLS, 1).load(gl.DotOperandLayout(0, acc_layout(smem.config.B_r), 2))
    return v


@gluon.jit
def step(c: gl.constexpr, n, dk, dv, v, v_regs, bounds, dq_accum, smem, scale_log2, ds):
    """Add row block n's contribution to dk and dv (64, d), and compute the previous row block's dQ.

    Return dk, dv and row block n's dS. The argument ds is the previous row block's dS, or None in the first step. v is
    the consumer's part of V in shared memory, `v_regs` is the result of load_v(), and `bounds` is the result of
    seeing_rows(). P is 2^(scale_log2 · s) for scores s. If dk_late is set, the matmul for dK is also delayed by one
    step and runs during the next row block.
    """
    FIRST: gl.constexpr = ds is None
    smem.row_blocks.wait(n)
    q, do = smem.row_blocks.tiles(n)  # (B_r, d)
    if smem.config.dk_late and not FIRST:
        dk = start_dk(n - 1, dk, ds, smem)
    s = start_scores(c, n, q, bounds, smem)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        dq = start_dq(c, n - 1, smem)
        smem.semaphore.wait_for_room(c, n - 1)
        s = warpgroup_mma_wait(1, deps=[s])
        if smem.config.dk_late:
            dk = wait_for_dk(n - 1, dk, ds, smem, others=1)
    p = gl.exp2(s * scale_log2)  # (64, B_r)  FA2.A2.L11
    if not smem.config.dv_late:
        dv, p_half = start_dv(dv, p, do)
    if not FIRST:
        if smem.config.dv_late and not bounds.CUT:
            # With p in deps, calls are 1% faster, although the exponentials are in the same order in the SASS.
            dq, p = warpgroup_mma_wait(0, deps=[dq, p])
        else:
            # Without dv_late, the matmul for dV may still be running.
            dq = warpgroup_mma_wait(0 if smem.config.dv_late else 1, deps=[dq])
        add_dq(c, n - 1, dq, dq_accum, smem)
    dp = start_dp(n, v, v_regs, do, smem)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (p * dp).to(q.dtype)  # (64, B_r)  FA2.A2.L14
    exchange_ds(c, n, ds, smem)
    if smem.config.dv_late:
        dv, p_half = start_dv(dv, p, do)
    ds = as_operand(ds, q.dtype, smem.config.d_pad)
    if smem.config.dk_late:
        dv, p_half = warpgroup_mma_wait(0, deps=[dv, p_half])
    else:
        dk = start_dk(n, dk, ds, smem)
        dv, p_half, dk, ds = warpgroup_mma_wait(0, deps=[dv, p_half, dk, ds])
        smem.row_blocks.release(n)
    return dk, dv, ds


@gluon.jit
def exchange_ds(c: gl.constexpr, n, ds, smem):
    """Store this consumer's dS for the n-th row block in shared memory.

    There are two buffers because both consumers read dS in the next step, in which they also store the next dS. The
    fence makes the stored dS visible to the tensor cores. It also orders the reads in row_blocks.load_acc_init() before
    the TMA copy that overwrites the row block once it has been released.
    """
    smem.ds.index(n & 1).slice(c * COLS, COLS, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(smem.ds_filled, count=1)


@gluon.jit
def wait_for_dk(n, dk, ds, smem, others: gl.constexpr):
    """Wait for dK's matmul and release Q and dO. Up to `others` matmuls that started later may still be running."""
    dk, ds = warpgroup_mma_wait(others, deps=[dk, ds])
    smem.row_blocks.release(n)
    return dk


@gluon.jit
def add_dq(c: gl.constexpr, n, dq, dq_accum, smem):
    """Add this consumer's partial dQ for the n-th row block to dQ's accumulator in HBM."""
    buffer = smem.dq.index(c)
    if smem.semaphore.USED:
        smem.semaphore.hand_over(c, dq, buffer)
    else:
        row = (smem.row_blocks.read(n, "row_block_id") * CONSUMERS + c) * (2 * smem.config.W)
        add_tile(dq, dq_accum, row, buffer)  # FA2.A2.L15


@gluon.jit
def write_dk_dv(c: gl.constexpr, r, dk, dv, dK, dV, smem, scale_log2):
    """Write the r-th column block's dK and dV to HBM.

    If several programs share the column block, add dK and dV to their accumulators in HBM instead.
    """
    batch_or_end, head, col = (
        smem.mailbox.read(r, "k_batch_or_end"),
        smem.mailbox.read(r, "head"),
        smem.mailbox.read(r, "col"),
    )
    if dK.dtype == gl.float32:
        at = (smem.mailbox.read(r, "col_block_id") * CONSUMERS + c) * (2 * smem.config.d_pad)
        if smem.semaphore.USED:
            sem_index = smem.mailbox.read(r, "sem_index") * CONSUMERS + c
            smem.semaphore.wait(sem_index, smem.mailbox.read(r, "dkv_turn"))
        smem.mailbox.release(r)
        add_tile(dv, dV, at, smem.dq.index(c))  # FA2.A2.L18
        add_tile(dk, dK, at, smem.dq.index(c))  # FA2.A2.L18
        if smem.semaphore.USED:
            smem.semaphore.pass_on(sem_index)
    else:
        N_k = smem.mailbox.read(r, "length")  # needed only for packed sequences
        smem.mailbox.release(r)
        store(c, dv, dV, batch_or_end, head, col, N_k, smem)  # FA2.A2.L18
        store(c, dk * (scale_log2 * LN2), dK, batch_or_end, head, col, N_k, smem)  # FA2.A2.L18


@gluon.jit
def store(c: gl.constexpr, x, X, batch_or_end, head, col, N_k, smem):
    """Write x (64, d), which is consumer c's dK or dV, to X with a TMA copy.

    The copy reads x from the consumer's shared-memory buffer for dQ.
    """
    room: gl.constexpr = stacked(smem.config.B_r // 64, X.block_shape)
    tile = smem.dq.index(c).reinterpret(X.dtype, room, X.layout).index(0)
    tma.store_wait(0)
    matrix(tile).store(x.to(X.dtype))
    fence_async_shared()
    tma.async_store(X, tile_at(X, batch_or_end, head, col + c * COLS, N_k), tile)


# The writer warps of a deterministic call ------------------------------------------------------------------


@gluon.jit
def writer(c: gl.constexpr, dq_accum, smem):
    """Run consumer c's writer warp, which adds the consumer's partial dQ to HBM with TMA, in a fixed order."""
    n = 0
    r = 0
    steps = receive(r, smem.mailbox)
    while steps > 0:
        smem.mailbox.release(r)
        for n_step in range(n, n + steps):
            smem.semaphore.add(c, n_step, smem.row_blocks, dq_accum, smem.dq.index(c))
        n += steps
        r += 1
        steps = receive(r, smem.mailbox)


# The kernel -------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["key_lengths", "cu_seqlens_q", "cu_seqlens_k", "sequences", "group", "T_r", "heads",
                              "parts", "l2_group", "left", "right", "scale_log2"])  # fmt: skip
def backward_kernel(Q, K, V, dO, acc_init, dq_accum, dK, dV, counter, key_lengths, sem_counters, cu_seqlens_q,
                    cu_seqlens_k, sequences, group, T_r, heads, parts, l2_group, left, right, scale_log2,
                    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """Compute dK and dV, and accumulate dQ in HBM.

    Q, K, V and dO are descriptors of (batch, heads, N, d) tensors. dK and dV are descriptors of such tensors or, if
    several programs share a column block, of fp32 accumulators. `acc_init` and `dq_accum` are described in
    accumulators.py. `sem_counters` points to the counters of semaphore.py, or is None if gradients may be accumulated
    in any order. `counter` points to the counters of the tile scheduler. Each column block is divided into `parts`
    parts. CONFIG is a BackwardConfig, and RAGGED means that a column block may extend past the last key.

    left and right are the bounds of a window, or None. CAUSAL means that right is 0. If `sequences` is not None, it is
    the number of packed sequences, and cu_seqlens_q and cu_seqlens_k are the cumulative sequence lengths. Integers are
    passed as separate arguments because Triton would specialize on integers in a tuple and recompile the kernel for
    many of their values.
    """
    COLUMNS: gl.constexpr = CONSUMERS * COLS
    _, heads_q, N_q = shape_of(Q)
    _, _, N_k = shape_of(K)
    HAS_RIGHT_BOUND: gl.constexpr = CAUSAL or right is not None
    right = 0 if right is None else right
    geometry = Geometry(
        N_q, N_k, heads_q, group, key_lengths, RAGGED, HAS_RIGHT_BOUND, right, left, CONFIG.B_r, COLUMNS, cu_seqlens_q,
        cu_seqlens_k, sequences
    )  # fmt: skip
    DETERMINISTIC: gl.constexpr = sem_counters is not None
    scheduler = Scheduler(counter, block_count(N_k, sequences, COLUMNS), heads, l2_group, DETERMINISTIC)
    semaphore = new_semaphore(sem_counters)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, CONFIG.B_r], Q.dtype)
    ds = gl.allocate_shared_memory(Q.dtype, [2, COLUMNS, CONFIG.B_r], DS_LAYOUT)
    DQ_SHAPE: gl.constexpr = [CONSUMERS, dq_accum.block_shape[0], dq_accum.block_shape[1]]
    dq = gl.allocate_shared_memory(gl.float32, DQ_SHAPE, dq_accum.layout)
    k, v = new_pipeline(K, 2, CONSUMERS), new_pipeline(V, 1, CONSUMERS)
    ds_filled = barriers(1, CONSUMERS).index(0)
    row_blocks = new_row_block_pipeline(
        Q, dO, acc_init, ORDERED_ROW_BLOCK_FIELDS if DETERMINISTIC else ROW_BLOCK_FIELDS
    )
    READERS: gl.constexpr = 2 * CONSUMERS if DETERMINISTIC else CONSUMERS
    DK_IN_ORDER: gl.constexpr = DETERMINISTIC and dK.dtype == gl.float32
    mailbox = new_mailbox(ORDERED_COLUMN_BLOCK_FIELDS if DK_IN_ORDER else COLUMN_BLOCK_FIELDS, READERS)
    smem = BackwardSharedStorage(k, v, row_blocks, ds, ds_filled, dq, mailbox, semaphore, CONFIG)
    fence_async_shared()  # make the barriers visible to TMA
    gdc_launch_dependents()  # lets the next kernel start on idle SMs, where it waits for this kernel to end
    # Each consumer thread gets 240 registers, and every other thread gets 24.
    producer_args = Q, K, V, dO, acc_init, smem, scheduler, geometry, T_r, parts
    if DETERMINISTIC:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), dK, dV, dq_accum, smem, geometry, scale_log2)),
                (consumer, (gl.constexpr(1), dK, dV, dq_accum, smem, geometry, scale_log2)),
                (producer, producer_args),
                (writer, (gl.constexpr(0), dq_accum, smem)),
                (writer, (gl.constexpr(1), dq_accum, smem)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), dK, dV, dq_accum, smem, geometry, scale_log2)),
                (consumer, (gl.constexpr(1), dK, dV, dq_accum, smem, geometry, scale_log2)),
                (producer, producer_args),
            ],
            [4, 1],
            [240, 24],
        )
