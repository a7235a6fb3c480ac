"""FlashAttention-2, backward (Algorithm 2), in one pass over column blocks, as Hopper wants it.

Each of two consumer warpgroups owns 64 columns and keeps their dK and dV in registers. All tiles are transposed, so
that P and dS are left operands straight from registers; dS also goes through shared memory, because dQ needs those of
both consumers. dQ of one row block is multiplied while the next one is exponentiated, and added by the copy engine.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime import driver

from fa2_lab.kernels import launch
from fa2_lab.kernels.hopper import host_backward as host
from fa2_lab.kernels.hopper.columns import COLS, CONSUMERS, NOBODY, Columns, Orders, Rows, orders, rows
from fa2_lab.kernels.hopper.forward import wipe
from fa2_lab.kernels.hopper.host import counter_of
from fa2_lab.kernels.hopper.pipeline import NEG_INF, Ring, accumulator, aggregate, as_operand, barriers, matrix, ring
from fa2_lab.kernels.hopper.sums import add_tile, after_kernel, before_kernel
from fa2_lab.kernels.hopper.work import Work, draw, leave

LN2 = gl.constexpr(math.log(2))
pays = host.pays


@aggregate
class Pipes:
    """The shared memory of one thread block."""

    k: Ring
    v: Ring
    rows: Rows
    ds: gl.shared_memory_descriptor  # (2, 128, B_r): dS of both consumers, of this row block and the one before
    ds_filled: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor  # (2, …): where each consumer's part of dQ waits to be added
    orders: Orders
    LATE: gl.constexpr  # whether dV's product waits for dS, which takes fewer registers
    d: gl.constexpr
    B_r: gl.constexpr
    W: gl.constexpr  # columns of a consumer's part of dQ, which has 64 rows

    @gluon.constexpr_function
    def __init__(self, k, v, rows, ds, ds_filled, dq, orders, LATE):
        self.k = k
        self.v = v
        self.rows = rows
        self.ds = ds
        self.ds_filled = ds_filled
        self.dq = dq
        self.orders = orders
        self.LATE = gl.constexpr(LATE)
        self.d = gl.constexpr(k.tiles.shape[4])
        self.B_r = gl.constexpr(rows.B_r)
        self.W = gl.constexpr(rows.B_r * k.tiles.shape[4] // 128)


# The producer warp ------------------------------------------------------------------------------------------


@gluon.jit
def producer(Q, K, V, dO, starts, counter, pipes, work, columns):
    """Give orders and start every copy as early as its slot is free."""
    n = 0  # row blocks so far
    r = 0  # column blocks so far
    t = gl.program_id(0)
    while t < work.blocks * work.heads:
        t_next = gl.num_programs(0) + draw(counter)
        block, lot = work.place(t)
        bh = lot // columns.parts
        H_kv = columns.H // columns.group
        batch, head = bh // H_kv, bh % H_kv
        col = block * CONSUMERS * COLS
        length = columns.length(batch)
        first = columns.first(col, length)
        seen = columns.T_r - first
        begin, end = columns.part(lot % columns.parts, columns.group * seen)
        if begin < end:
            full = columns.full(col, length)
            seen_from = columns.seen_from(col)
            pipes.orders.give(r, end - begin, batch, head, col, full, seen_from, length, bh * work.blocks + block)
            pipes.k.fill(r, K, batch, head, col)  # FA2.A2.L6
            pipes.v.fill(r, V, batch, head, col)  # FA2.A2.L6
            for m in range(begin, end):
                q_head = head * columns.group + m // seen
                i = first + m % seen
                number = (batch * columns.H + q_head) * columns.T_r + i
                pipes.rows.fill(n, r, Q, dO, starts, batch, q_head, i, number)  # FA2.A2.L9
                n += 1
            r += 1
        t = t_next
    pipes.orders.give(r, 0, 0, 0, 0, 0, 0, 0, 0)
    leave(counter)


# A consumer warpgroup ---------------------------------------------------------------------------------------


@gluon.jit
def consumer(c: gl.constexpr, dK, dV, sums, pipes, columns, scale):
    """Consumer c: its 64 columns of every column block that this program gets."""
    MASKED: gl.constexpr = columns.CAUSAL or columns.RAGGED
    n = 0  # row blocks so far, as the producer counts them
    r = 0
    steps = pipes.orders.steps(r)
    while steps > 0:
        _, _, col = pipes.orders.place(r)
        full, seen_from, length = pipes.orders.limits(r)
        key = c * COLS + gl.arange(0, COLS, gl.SliceLayout(1, accumulator(pipes.B_r)))  # (64,)
        seen_from += key if columns.CAUSAL else 0 * key
        if columns.RAGGED:
            seen_from = gl.where(key < length - col, seen_from, NOBODY)
        k = pipes.k.take(r)
        v = pipes.v.take(r)
        if columns.KEYS:
            wipe(k.slice(c * COLS, COLS, 0), length - col - c * COLS)
            wipe(v.slice(c * COLS, COLS, 0), length - col - c * COLS)
        dk = gl.zeros([COLS, pipes.d], gl.float32, accumulator(pipes.d))  # FA2.A2.L7
        dv = gl.zeros([COLS, pipes.d], gl.float32, accumulator(pipes.d))  # FA2.A2.L7
        dk, dv = step(c, n, dk, dv, v, seen_from, full, sums, pipes, scale, MASKED, True)
        for m in range(n + 1, n + steps):  # FA2.A2.L8
            dk, dv = step(c, m, dk, dv, v, seen_from, full, sums, pipes, scale, MASKED, False)
        n += steps
        pipes.v.release(r)
        dq = warpgroup_mma_wait(0, deps=[start_dq(c, n - 1, pipes)])
        pipes.k.release(r)
        add_dq(c, n - 1, dq, sums, pipes)
        batch, head, col = pipes.orders.place(r)
        at = (pipes.orders.number(r) * CONSUMERS + c) * (2 * pipes.d)
        pipes.orders.done(r)
        if dK.dtype == gl.float32:  # sums, since others have parts of the same columns
            add_tile(dv, dV, at, pipes.dq.index(c))  # FA2.A2.L18
            add_tile(dk, dK, at, pipes.dq.index(c))  # FA2.A2.L18
        else:
            store(c, dv, dV, batch, head, col, pipes)  # FA2.A2.L18
            store(c, dk * (scale * LN2), dK, batch, head, col, pipes)  # FA2.A2.L18
        r += 1
        steps = pipes.orders.steps(r)
    tma.store_wait(0)  # shared memory must outlive the last copy


@gluon.jit
def step(c: gl.constexpr, n, dk, dv, v, seen_from, full, sums, pipes, scale, MASKED: gl.constexpr,
         FIRST: gl.constexpr):  # fmt: skip
    """The n-th row block: add to dk and dv (64, d), and multiply dQ of the row block before."""
    rows = pipes.rows
    rows.wait(n)
    q, do = rows.tiles(n)  # (B_r, d)
    s = start_scores(c, n, q, seen_from, full, pipes, MASKED)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        dq = start_dq(c, n - 1, pipes)
        s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * scale)  # (64, B_r)  FA2.A2.L11
    if not FIRST:
        if pipes.LATE and not MASKED:  # with P here the compiler moves less of it behind: up to 7% faster
            dq, p = warpgroup_mma_wait(0, deps=[dq, p])
        else:
            dq = warpgroup_mma_wait(0, deps=[dq])
        add_dq(c, n - 1, dq, sums, pipes)
    start = spread(rows.start(n, 1))
    dp = warpgroup_mma(v.slice(c * COLS, COLS, 0), do.permute((1, 0)), start, is_async=True)  # (64, B_r)  FA2.A2.L13
    if pipes.LATE:
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * dp).to(q.dtype)  # (64, B_r)  FA2.A2.L14
        share(c, n, ds, pipes)
        p = as_operand(p, q.dtype, pipes.d)
        dv = warpgroup_mma(p, do, dv, is_async=True)  # (64, d)  FA2.A2.L12
    else:
        p_half = as_operand(p, q.dtype, pipes.d)
        dv = warpgroup_mma(p_half, do, dv, is_async=True)  # (64, d)  FA2.A2.L12
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * dp).to(q.dtype)  # (64, B_r)  FA2.A2.L14
        p = p_half
        share(c, n, ds, pipes)
    ds = as_operand(ds, q.dtype, pipes.d)
    dk = warpgroup_mma(ds, q, dk, is_async=True)  # (64, d)  FA2.A2.L16
    dv, dk, p, ds = warpgroup_mma_wait(0, deps=[dv, dk, p, ds])
    rows.release(n)
    return dk, dv


@gluon.jit
def spread(start):
    """A number for each row of a tile, as the accumulators that a product starts from."""  # (64, B_r)
    B_r: gl.constexpr = start.shape[1]
    start, _ = gl.broadcast(start, gl.zeros([COLS, B_r], gl.float32, accumulator(B_r)))
    return start


@gluon.jit
def start_scores(c: gl.constexpr, n, q, seen_from, full, pipes, MASKED: gl.constexpr):
    """Start K Qᵀ − L/scale; a masked tile starts from −∞ where a row does not see a column."""  # (64, B_r)
    B_r: gl.constexpr = pipes.B_r
    start = spread(pipes.rows.start(n, 0))
    if MASKED:
        first = pipes.rows.first(n)
        if first < full:
            row = gl.arange(0, B_r, gl.SliceLayout(0, accumulator(B_r)))[None, :]
            start = gl.where((row & ~6) >= (seen_from - first)[:, None] - (row & 6), start, NEG_INF)
    k = matrix(pipes.k.tiles.index(pipes.rows.side(n))).slice(c * COLS, COLS, 0)
    return warpgroup_mma(k, q.permute((1, 0)), start, is_async=True)  # FA2.A2.L10


@gluon.jit
def share(c: gl.constexpr, n, ds, pipes):
    """Show both consumers one's dS; they read it in the next step, so that two places are enough."""
    pipes.ds.index(n & 1).slice(c * COLS, COLS, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(pipes.ds_filled, count=1)


@gluon.jit
def start_dq(c: gl.constexpr, n, pipes):
    """Start this consumer's part of dQ, from all 128 columns: half of its columns, or of its rows if it has 128."""
    W: gl.constexpr = pipes.W
    mbarrier.wait(pipes.ds_filled, n & 1)
    k = matrix(pipes.k.tiles.index(pipes.rows.side(n)))
    ds = pipes.ds.index(n & 1)
    zero = gl.zeros([64, W], gl.float32, accumulator(W))
    if pipes.B_r == 64:
        ds = ds.permute((1, 0))
        k = k.slice(c * W, W, 1)
    else:
        ds = ds.slice(c * 64, 64, 1).permute((1, 0))
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)  # (64, W)  FA2.A2.L15


@gluon.jit
def add_dq(c: gl.constexpr, n, dq, sums, pipes):
    """Have this consumer's part of dQ added to HBM."""
    at = (pipes.rows.number(n) * CONSUMERS + c) * (2 * pipes.W)
    add_tile(dq, sums, at, pipes.dq.index(c))  # FA2.A2.L15


@gluon.jit
def store(c: gl.constexpr, x, X, batch, head, col, pipes):
    """Write x (64, d) by a bulk copy, through the place where dQ waited."""
    tile = pipes.dq.index(c)._reinterpret(X.dtype, [pipes.B_r // 64, 1, 1, COLS, pipes.d], X.layout).index(0)
    tma.store_wait(0)
    matrix(tile).store(x.to(X.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(X, [batch, head, col + c * COLS, 0], tile)


# The kernel -------------------------------------------------------------------------------------------------

RUNTIME = ["key_lengths", "H", "group", "N_q", "N_k", "T_r", "parts", "lots", "at_once", "scale"]


@gluon.jit(do_not_specialize=RUNTIME)
def backward_kernel(Q, K, V, dO, starts, sums, dK, dV, counter, key_lengths, H, group, N_q, N_k, T_r, parts,
                    lots, at_once, scale, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, LATE: gl.constexpr,
                    REGISTERS: gl.constexpr):  # fmt: skip
    """Q to dV are tensor descriptors: of (batch, heads, N, d), or for starts and sums (dK, dV may be) see sums.py."""
    KEYS: gl.constexpr = key_lengths is not None
    B_r: gl.constexpr = Q.block_shape[2]
    columns = Columns(N_k, N_q - N_k, H, group, T_r, parts, key_lengths if KEYS else counter, KEYS, RAGGED, CAUSAL, B_r)
    work = Work(gl.cdiv(N_k, CONSUMERS * COLS), lots, at_once)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMERS * COLS, B_r], Q.dtype)
    ds = gl.allocate_shared_memory(Q.dtype, [2, CONSUMERS * COLS, B_r], DS)
    part: gl.constexpr = [CONSUMERS, sums.block_shape[0], sums.block_shape[1]]
    dq = gl.allocate_shared_memory(gl.float32, part, sums.layout)
    k = ring(K, 2, CONSUMERS)
    v = ring(V, 1, CONSUMERS)
    ds_filled = barriers(1, CONSUMERS).index(0)
    pipes = Pipes(k, v, rows(Q, dO, starts), ds, ds_filled, dq, orders(), LATE)
    fence_async_shared()  # the copy engine must see the barriers
    gl.warp_specialize(
        [
            (consumer, (gl.constexpr(0), dK, dV, sums, pipes, columns, scale)),
            (consumer, (gl.constexpr(1), dK, dV, sums, pipes, columns, scale)),
            (producer, (Q, K, V, dO, starts, counter, pipes, work, columns)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def backward(dO, dL, Q, K, V, O, L, key_lengths, causal, scale):
    """dQ, dK and dV, each like its tensor; dL, the gradient of L, may be None.

    None for tensors that the copy engine cannot have. Sums are not the same bit by bit each time: see sums.py.
    """
    recipe = host.recipe_for(dO, dL, Q, K, V, O, L, key_lengths, causal, scale)
    if recipe is None:
        return None
    dQ, dK, dV = torch.empty_like(Q), torch.empty_like(K), torch.empty_like(V)
    starts, sums = (torch.empty(*shape, dtype=torch.float32, device=Q.device) for shape in (recipe.starts, recipe.sums))
    divided = recipe.shared is not None
    columns = [sums[first:] for first in recipe.shared] if divided else (dK, dV)
    with launch.on_device_of(Q):
        stream = driver.active.get_current_stream(Q.device.index)
        recipe.before.launch(before_kernel, (O, dO, L, dL, starts, sums), (launch.base_2(scale),))
        tensors = Q, K, V, dO, starts, sums, *columns
        recipe.main.launch(backward_kernel, stream, tensors, (counter_of(Q.device, stream), key_lengths))
        recipe.after.launch(after_kernel, (sums, dQ, *((dK, dV) if divided else (None, None))), (scale,))
    return dQ, dK, dV  # FA2.A2.L20
