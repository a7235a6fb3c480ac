"""FlashAttention-2, backward (Algorithm 2), in one pass over column blocks, as Hopper wants it.

Each of two consumer warpgroups owns 64 columns and keeps their dK and dV in registers. All tiles are transposed, so
that P and dS are left operands straight from registers; dS also goes through shared memory, because dQ needs those of
both consumers. dQ of one row block is multiplied while the next one is exponentiated, and added by the copy engine.

products.py starts the products; here is when, and what waits for them. Some may start sooner or later: host_backward.py
says what is fastest where.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.runtime import driver

from fa2_lab.kernels import launch
from fa2_lab.kernels.constants import LN2
from fa2_lab.kernels.hopper.backward import host
from fa2_lab.kernels.hopper.backward.columns import COLS, CONSUMERS, Columns, Orders, Rows, orders, rows
from fa2_lab.kernels.hopper.backward.products import HELD, start_dk, start_dp, start_dq, start_dv, start_scores
from fa2_lab.kernels.hopper.backward.sums import add_tile, after_kernel, before_kernel
from fa2_lab.kernels.hopper.forward.host import counter_of
from fa2_lab.kernels.hopper.forward.kernel import wipe
from fa2_lab.kernels.hopper.shared.geometry import Work, draw, leave
from fa2_lab.kernels.hopper.shared.pipeline import Ring, accumulator, aggregate, as_operand, barriers, matrix, ring

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
    DV_LATE: gl.constexpr  # whether dV's product starts once dS is shown, not before dQ is handed over
    DK_LATE: gl.constexpr  # whether dK's product starts in the next step, not at the end of its own
    HOLD_V: gl.constexpr  # whether half of V stays in registers
    d: gl.constexpr
    B_r: gl.constexpr
    W: gl.constexpr  # columns of a consumer's part of dQ, which has 64 rows

    @gluon.constexpr_function
    def __init__(self, k, v, rows, ds, ds_filled, dq, orders, DV_LATE, DK_LATE, HOLD_V):
        self.k = k
        self.v = v
        self.rows = rows
        self.ds = ds
        self.ds_filled = ds_filled
        self.dq = dq
        self.orders = orders
        self.DV_LATE = gl.constexpr(DV_LATE)
        self.DK_LATE = gl.constexpr(DK_LATE)
        self.HOLD_V = gl.constexpr(HOLD_V)
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
        t = gl.num_programs(0) + draw(counter)  # not before: who draws early is dealt to
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
        seen_from, full = columns.limits(c, r, pipes.orders)
        v = take(c, r, pipes, columns)
        held = hold(v, pipes)
        dk = gl.zeros([COLS, pipes.d], gl.float32, accumulator(pipes.d))  # FA2.A2.L7
        dv = gl.zeros([COLS, pipes.d], gl.float32, accumulator(pipes.d))  # FA2.A2.L7
        dk, dv, ds = step(c, n, dk, dv, None, v, held, seen_from, full, sums, pipes, scale, MASKED, True)
        for m in range(n + 1, n + steps):  # FA2.A2.L8
            dk, dv, ds = step(c, m, dk, dv, ds, v, held, seen_from, full, sums, pipes, scale, MASKED, False)
        n += steps
        pipes.v.release(r)
        if pipes.DK_LATE:
            dk = finish_dk(0, n - 1, start_dk(n - 1, dk, ds, pipes), ds, pipes)
        dq = warpgroup_mma_wait(0, deps=[start_dq(c, n - 1, pipes)])
        pipes.k.release(r)
        add_dq(c, n - 1, dq, sums, pipes)
        give(c, r, dk, dv, dK, dV, pipes, scale)
        r += 1
        steps = pipes.orders.steps(r)
    tma.store_wait(0)  # shared memory must outlive the last copy


@gluon.jit
def take(c: gl.constexpr, r, pipes, columns):
    """Wait for K and V; one's rows of V."""  # (64, d)
    k = pipes.k.take(r).slice(c * COLS, COLS, 0)
    v = pipes.v.take(r).slice(c * COLS, COLS, 0)
    if columns.KEYS:
        _, _, col = pipes.orders.place(r)
        _, _, length = pipes.orders.limits(r)
        wipe(k, length - col - c * COLS)
        wipe(v, length - col - c * COLS)
    return v


@gluon.jit
def hold(v, pipes):
    """Half of V in registers, or V as it is."""  # (64, HELD)
    if pipes.HOLD_V:
        v = v.slice(0, HELD, 1).load(gl.DotOperandLayout(0, accumulator(pipes.B_r), 2))
    return v


@gluon.jit
def step(c: gl.constexpr, n, dk, dv, ds, v, held, seen_from, full, sums, pipes, scale, MASKED: gl.constexpr,
         FIRST: gl.constexpr):  # fmt: skip
    """The n-th row block: add to dk and dv (64, d); of the one before multiply dQ, and with DK_LATE dK, from its ds."""
    pipes.rows.wait(n)
    q, do = pipes.rows.tiles(n)  # (B_r, d)
    if pipes.DK_LATE and not FIRST:
        dk = start_dk(n - 1, dk, ds, pipes)
    s = start_scores(c, n, q, seen_from, full, pipes, MASKED)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        dq = start_dq(c, n - 1, pipes)
        s = warpgroup_mma_wait(1, deps=[s])
        if pipes.DK_LATE:
            dk = finish_dk(1, n - 1, dk, ds, pipes)
    p = gl.exp2(s * scale)  # (64, B_r)  FA2.A2.L11
    if not pipes.DV_LATE:
        dv, p_half = start_dv(dv, p, do)
    if not FIRST:
        if pipes.DV_LATE and not MASKED:  # with P here the compiler moves less of it behind: 1% faster
            dq, p = warpgroup_mma_wait(0, deps=[dq, p])
        else:
            dq = warpgroup_mma_wait(0 if pipes.DV_LATE else 1, deps=[dq])  # dV's product, the last, may go on
        add_dq(c, n - 1, dq, sums, pipes)
    dp = warpgroup_mma_wait(0, deps=[start_dp(n, v, held, do, pipes)])
    ds = (p * dp).to(q.dtype)  # (64, B_r)  FA2.A2.L14
    share(c, n, ds, pipes)
    if pipes.DV_LATE:
        dv, p_half = start_dv(dv, p, do)
    ds = as_operand(ds, q.dtype, pipes.d)
    if pipes.DK_LATE:
        dv, p_half = warpgroup_mma_wait(0, deps=[dv, p_half])
    else:
        dk = start_dk(n, dk, ds, pipes)
        dv, p_half, dk, ds = warpgroup_mma_wait(0, deps=[dv, p_half, dk, ds])
        pipes.rows.release(n)
    return dk, dv, ds


@gluon.jit
def share(c: gl.constexpr, n, ds, pipes):
    """Show both consumers one's dS; they read it in the next step, so that two places are enough."""
    pipes.ds.index(n & 1).slice(c * COLS, COLS, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(pipes.ds_filled, count=1)


@gluon.jit
def finish_dk(others: gl.constexpr, n, dk, ds, pipes):
    """Wait for dK's product, while so many `others` that were started later go on; Q and dO are free then."""
    dk, ds = warpgroup_mma_wait(others, deps=[dk, ds])
    pipes.rows.release(n)
    return dk


@gluon.jit
def add_dq(c: gl.constexpr, n, dq, sums, pipes):
    """Have this consumer's part of dQ added to HBM."""
    at = (pipes.rows.number(n) * CONSUMERS + c) * (2 * pipes.W)
    add_tile(dq, sums, at, pipes.dq.index(c))  # FA2.A2.L15


@gluon.jit
def give(c: gl.constexpr, r, dk, dv, dK, dV, pipes, scale):
    """Write dK and dV; or have them added, since others have parts of the same columns."""
    batch, head, col = pipes.orders.place(r)
    at = (pipes.orders.number(r) * CONSUMERS + c) * (2 * pipes.d)
    pipes.orders.done(r)
    if dK.dtype == gl.float32:
        add_tile(dv, dV, at, pipes.dq.index(c))  # FA2.A2.L18
        add_tile(dk, dK, at, pipes.dq.index(c))  # FA2.A2.L18
    else:
        store(c, dv, dV, batch, head, col, pipes)  # FA2.A2.L18
        store(c, dk * (scale * LN2), dK, batch, head, col, pipes)  # FA2.A2.L18


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
                    lots, at_once, scale, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, DV_LATE: gl.constexpr,
                    DK_LATE: gl.constexpr, HOLD_V: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
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
    pipes = Pipes(k, v, rows(Q, dO, starts), ds, ds_filled, dq, orders(), DV_LATE, DK_LATE, HOLD_V)
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
