"""FlashAttention-2, forward (Algorithm 1), as Hopper wants it: copies, products and exponentials all at the same time.

Each consumer warpgroup owns 64 rows. It starts Q Kᵀ of its next tile and P V of the last one together; while the tensor
cores work for it, the other consumers exponentiate. Programs stay on their SM and take one row block after the other,
so that one block's end hides under the next one's copies. Tiles run from right to left: DIAGONAL first, then FULL.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.runtime import driver

from fa2_lab.kernels import launch
from fa2_lab.kernels.constants import LN2
from fa2_lab.kernels.hopper.forward import host
from fa2_lab.kernels.hopper.forward.softmax import Scales, first_state, mask, rounded, shrunk, softmax_step
from fa2_lab.kernels.hopper.shared.geometry import ROWS, Heads, Work, aggregate, draw, leave
from fa2_lab.kernels.hopper.shared.pipeline import (
    Ring,
    Tickets,
    Turns,
    accumulator,
    as_operand,
    matrix,
    ring,
    tickets,
    turns,
)

supports, pays = host.supports, host.pays


@aggregate
class Pipes:
    """The shared memory of one thread block."""

    q: Ring  # two slots for each consumer, so that the next row block's Q comes early; one where O waits in it
    k: Ring
    v: Ring
    o: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, 64, d): where O waits for its copy to HBM
    turns: Turns
    tickets: Tickets
    O_APART: gl.constexpr  # whether O waits in a place of its own, or in Q's
    B_c: gl.constexpr
    d: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, k, v, o, turns, tickets, O_APART):
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.turns = turns
        self.tickets = tickets
        self.O_APART = gl.constexpr(O_APART)
        self.B_c = gl.constexpr(k.tiles.shape[3])
        self.d = gl.constexpr(k.tiles.shape[4])


# The producer warp ------------------------------------------------------------------------------------------


@gluon.jit
def producer(Q, K, V, counter, pipes, work, heads):
    """Start every copy as early as its slot is free. V's tile is needed a step later than K's, so K runs ahead.

    Consumers release V's tile with the next one of K; so what K's copy has waited for frees the slot of V's, too.
    """
    n = 0  # tiles of K, and of V, so far
    r = 0  # row blocks so far
    t = gl.program_id(0)
    total = work.blocks * work.heads
    while t < total:
        block, head = work.place(t)
        row = heads.first_row(block)
        batch = head // heads.H
        q_head = head % heads.H
        kv_head = q_head // heads.group
        pipes.tickets.give(r, row, batch, q_head)
        length = heads.length(batch)
        T_c = heads.tiles(row, ROWS * heads.CONSUMERS, length)
        pipes.k.fill(n, K, batch, kv_head, (T_c - 1) * heads.B_c)  # FA2.A1.L7
        for c in gl.static_range(heads.CONSUMERS):
            pipes.q.fill(r * heads.CONSUMERS + c, Q, batch, q_head, row + c * ROWS)  # FA2.A1.L4
        for j in range(1, T_c):
            pipes.k.fill(n + j, K, batch, kv_head, (T_c - 1 - j) * heads.B_c)  # FA2.A1.L7
            pipes.v.fill(n + j - 1, V, batch, kv_head, (T_c - j) * heads.B_c)  # FA2.A1.L7
        n += T_c
        t = gl.num_programs(0) + draw(counter)  # not before: who draws early is dealt to. The ring is full meanwhile
        pipes.k.wait_for_room(n)
        pipes.v.fill(n - 1, V, batch, kv_head, 0)  # FA2.A1.L7
        r += 1
    pipes.tickets.give(r, -1, 0, 0)
    leave(counter)


# A consumer warpgroup ---------------------------------------------------------------------------------------


@gluon.jit
def consumer(c: gl.constexpr, O, L, pipes, work, heads, scales):
    """Consumer c: its 64 rows of every row block that this program gets."""
    n = 0  # tiles so far, as the producer counts them
    r = 0
    row, batch, head = pipes.tickets.get(r)
    while row >= 0:
        length = heads.length(batch)
        T_c = heads.tiles(row, ROWS * heads.CONSUMERS, length)
        row += c * ROWS
        mine = gl.where(row < heads.N_q, heads.tiles(row, ROWS, length), 0)
        slot = r * heads.CONSUMERS + c
        q = pipes.q.take(slot)
        for j in range(T_c - mine):  # tiles that only lower rows see, or all where these rows lie below the last
            pass_by(c, n + j, pipes)
        if mine > 0:
            o, m, l = visit(c, n + T_c - mine, q, slot, row, mine, length, pipes, heads, scales)
            store(O, L, o, m, l, pipes.o.index(c), batch, head, row, heads, scales)
        if mine == 0 or not pipes.O_APART:
            tma.store_wait(0)
            pipes.q.release(slot)
        n += T_c
        r += 1
        row, batch, head = pipes.tickets.get(r)
    tma.store_wait(0)  # shared memory must outlive the last copy


@gluon.jit
def pass_by(c: gl.constexpr, n, pipes):
    """Let a tile go by that these rows do not see."""
    pipes.turns.wait(c, n)
    pipes.turns.pass_on(c)
    pipes.k.take(n)
    pipes.k.release(n)
    pipes.v.take(n)


@gluon.jit
def visit(c: gl.constexpr, n, q, slot, row, T_c, length, pipes, heads, scales):
    """All tiles of 64 rows, from right to left: o (64, d), m and l (64, 4)."""
    B_c: gl.constexpr = heads.B_c
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(B_c))
    MASKED: gl.constexpr = heads.CAUSAL or heads.RAGGED
    seen = heads.seen(row + gl.arange(0, ROWS, ROW), length)  # (64,)
    o = gl.zeros([ROWS, pipes.d], gl.float32, accumulator(pipes.d))  # FA2.A1.L5
    full = heads.seen(row, length) // B_c  # tiles further left are FULL

    if heads.KEYS:
        wipe(pipes.v.take(n), length - (T_c - 1) * B_c)
    s = start_scores(c, n, q, pipes)
    pipes.turns.pass_on(c)
    s = warpgroup_mma_wait(0, deps=[s])
    pipes.k.release(n)
    if MASKED:
        s = mask(s, seen - (T_c - 1) * B_c)
    m, l = first_state(s, scales)  # FA2.A1.L5
    p, m, l, _ = softmax_step(s, m, l, scales, MASKED)
    p = as_operand(rounded(p, pipes.q.tiles.dtype), pipes.q.tiles.dtype, pipes.d)

    for j in range(1, T_c):  # FA2.A1.L6
        o, m, l, p = step(c, n + j, o, m, l, p, q, seen, T_c - 1 - j, full, pipes, scales, heads.CAUSAL)
    if pipes.O_APART:  # the next row block's Q may come
        pipes.q.release(slot)

    o = warpgroup_mma(p, pipes.v.take(n + T_c - 1), o, is_async=True)  # (64, d)  FA2.A1.L10
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    return o, m, l


@gluon.jit
def step(c: gl.constexpr, n, o, m, l, p, q, seen, j, full, pipes, scales, CAUSAL: gl.constexpr):
    """Start Q Kᵀ of the n-th tile and P V of the one before, and exponentiate the former while the latter runs."""
    s = start_scores(c, n, q, pipes)
    o = warpgroup_mma(p, pipes.v.take(n - 1), o, is_async=True)  # (64, d)  FA2.A1.L10
    pipes.turns.pass_on(c)
    s = warpgroup_mma_wait(1, deps=[s])
    if CAUSAL:
        if j >= full:
            s = mask(s, seen - j * pipes.B_c)
    p_next, m, l, alpha = softmax_step(s, m, l, scales, CAUSAL)
    p_next = as_operand(rounded(p_next, pipes.q.tiles.dtype), pipes.q.tiles.dtype, pipes.d)
    # Triton's ptxas waits here before it exponentiates; forced to wait after it, everything is 1 to 3% slower.
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    pipes.k.release(n)  # and V's tile n - 1
    return shrunk(o, alpha), m, l, p_next  # FA2.A1.L10


@gluon.jit
def start_scores(c: gl.constexpr, n, q, pipes):
    """Start Q Kᵀ of the n-th tile: not yet a tensor, but something to wait for."""
    B_c: gl.constexpr = pipes.B_c
    k = pipes.k.take(n)
    zero = gl.zeros([ROWS, B_c], gl.float32, accumulator(B_c))
    pipes.turns.wait(c, n)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # (64, B_c)  FA2.A1.L8


@gluon.jit
def wipe(v, real):
    """Zero a tile's rows from `real` on: p is 0 there, but 0 times what an unused key may hold need not be.

    Every consumer writes the same bits, so it does not matter that they do so side by side. (compute-sanitizer's
    racecheck names it all the same, and the tickets too: it does not see that barriers in memory order anything, not
    even where one warp hands one number to four others.)
    """
    ROWS_OF_V: gl.constexpr = v.shape[0]
    PART: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if real < ROWS_OF_V:
        for at in gl.static_range(0, ROWS_OF_V, PART):
            part = v.slice(at, PART, 0)
            keep = at + gl.arange(0, PART, gl.SliceLayout(1, LAYOUT)) < real
            x = part.load(LAYOUT)
            part.store(gl.where(keep[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def store(O, L, o, m, l, o_tile, batch, head, row, heads, scales):
    """Divide by l, write O by a bulk copy that ends while the next row block is under way, and write L."""
    LANES: gl.constexpr = l.type.layout
    l = gl.sum(l, 1)  # (64,)
    l = gl.where(l == 0.0, 1.0, l)  # a row that sees no key: O = 0 and L = −inf
    o = o * gl.convert_layout(1.0 / l, gl.SliceLayout(1, accumulator(o.shape[1])))[:, None]  # (64, d)  FA2.A1.L12
    tma.store_wait(0)  # the copy of the row block before has read its tile
    matrix(o_tile).store(o.to(O.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(O, [batch, head, row, 0], o_tile)  # FA2.A1.L14
    if not scales.LAG:
        m = gl.convert_layout(m, gl.SliceLayout(1, LANES))[:, None]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LANES))[:, None]
    writes = (rows < heads.N_q) & (gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :] == 0)
    L_i = (m * scales.fine + gl.log2(l)[:, None]) * LN2  # (64, 4): four lanes know it, one writes it  FA2.A1.L13
    L_i, writes = gl.broadcast(L_i, writes)
    at, writes = gl.broadcast(L + (batch * heads.H + head).to(gl.int64) * heads.N_q + rows, writes)
    gl.store(at, L_i, mask=writes)  # FA2.A1.L15


# The kernel -------------------------------------------------------------------------------------------------

RUNTIME = ["key_lengths", "H", "group", "N_q", "N_k", "all_heads", "at_once", "fine", "coarse", "huge", "slack"]


@gluon.jit(do_not_specialize=RUNTIME)
def forward_kernel(Q, K, V, O, L, counter, key_lengths, H, group, N_q, N_k, all_heads, at_once, fine, coarse, huge,
                   slack, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
                   TAKE_TURNS: gl.constexpr, O_APART: gl.constexpr, LAG: gl.constexpr,
                   REGISTERS: gl.constexpr):  # fmt: skip
    """Q, K, V and O are tensor descriptors of (batch, heads, N, d). `group` query heads share one K/V head."""
    KEYS: gl.constexpr = key_lengths is not None
    heads = Heads(N_q, N_k, H, group, key_lengths if KEYS else L, KEYS, RAGGED, CAUSAL, CONSUMERS, K.block_shape[2])
    work = Work(gl.cdiv(N_q, ROWS * CONSUMERS), all_heads, at_once)
    q = ring(Q, CONSUMERS * (2 if O_APART else 1), 1)
    if O_APART:
        o = gl.allocate_shared_memory(O.dtype, [CONSUMERS, 1, 1, ROWS, O.block_shape[3]], O.layout)
    else:
        o = q.tiles
    k = ring(K, SLOTS, CONSUMERS)
    v = ring(V, SLOTS, CONSUMERS, RELEASED=False)  # K's releases tell of it
    pipes = Pipes(q, k, v, o, turns(CONSUMERS, TAKE_TURNS), tickets(CONSUMERS), O_APART)
    fence_async_shared()  # the copy engine must see the barriers
    copy = (Q, K, V, counter, pipes, work, heads)
    scales = Scales(fine, coarse, huge, slack, LAG)
    first = (0, O, L, pipes, work, heads, scales)
    second = (1, O, L, pipes, work, heads, scales)
    if CONSUMERS == 1:
        gl.warp_specialize([(consumer, first), (producer, copy)], [1], [24])
    elif CONSUMERS == 2:
        gl.warp_specialize([(consumer, first), (consumer, second), (producer, copy)], [4, 1], [REGISTERS, 24])
    else:
        third = (2, O, L, pipes, work, heads, scales)
        gl.warp_specialize(
            [(consumer, first), (consumer, second), (consumer, third), (producer, copy)],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def forward(Q, K, V, key_lengths, causal, scale):
    """O like Q, and L (batch, heads, N_q) in fp32, the natural logarithm of each row's sum of exponentials.

    None for tensors that the copy engine cannot have.
    """
    recipe = host.recipe_for(Q, K, V, key_lengths, causal, scale)
    if recipe is None:
        return None
    O = torch.empty_like(Q)
    L = torch.empty(*Q.shape[:3], dtype=torch.float32, device=Q.device)
    with launch.on_device_of(Q):
        stream = driver.active.get_current_stream(Q.device.index)
        recipe.launch(forward_kernel, stream, (Q, K, V, O), (L, host.counter_of(Q.device, stream), key_lengths))
    return O, L  # FA2.A1.L17
