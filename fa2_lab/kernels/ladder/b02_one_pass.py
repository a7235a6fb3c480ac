"""Rung b02, one pass: each tile is computed once, as in b00, but a TMA reduction adds its contribution to dQ in HBM.

A column block consists of 128 keys. Each of the two consumer warpgroups owns 64 of these keys and keeps their dK and dV
in registers. Tiles are transposed, with one row per key, so that P and dS are already in the registers from which a
matmul reads its left operand. dQ needs the dS of all 128 keys, so the consumers also store their dS in shared memory.
The kernel requires a Hopper GPU, 16-bit inputs, and d = 64 or 128. It spills 11 registers when compiled by Triton 3.9,
and none when compiled by Triton 3.6 to 3.8.
"""

import math
from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NEG_INF = gl.constexpr(float("-inf"))
FAR_ROW = gl.constexpr(2**30)  # a row index beyond the end of any tensor
B_c = gl.constexpr(128)  # keys per column block, 64 for each consumer
Ring = namedtuple("Ring", "tiles filled emptied")  # tiles of shape (stages, 1, rows, d), and two barriers per stage


@triton.jit
def acc_init_kernel(O, dO, L, acc_init, N_q, tau, d: tl.constexpr, B_r: tl.constexpr):
    """Store −L/tau and −D for a row block. The matmuls for S and dP start at these values and thus subtract L and D."""
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i * B_r + tl.arange(0, B_r)  # (B_r,)
    at = (head * N_q + row)[:, None] * d + tl.arange(0, d)[None, :]  # (B_r, d)
    o_i = tl.load(O + at, mask=row[:, None] < N_q, other=0.0).to(tl.float32)
    do_i = tl.load(dO + at, mask=row[:, None] < N_q, other=0.0).to(tl.float32)
    D_i = tl.sum(do_i * o_i, 1)  # (B_r,)  FA2.A2.L4
    L_i = tl.load(L + head * N_q + row, mask=row < N_q, other=NEG_INF)
    at = acc_init + (head * tl.num_programs(0) + i) * (2 * B_r) + tl.arange(0, B_r)
    tl.store(at, tl.where(L_i == NEG_INF, NEG_INF, -L_i / tau))  # −∞ makes P 0 if a row sees no key or does not exist
    tl.store(at + B_r, -D_i)


@gluon.jit
def ring(X, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Create an empty ring of STAGES tiles with X's block shape. CONSUMERS consumers have to release each tile."""
    shape: gl.constexpr = [STAGES, 1, X.block_shape[1], X.block_shape[2]]
    tiles = gl.allocate_shared_memory(X.dtype, shape, X.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=CONSUMERS)
    return Ring(tiles, filled, emptied)


@gluon.jit
def load(ring, n, X, head, row):
    """Producer: wait until the n-th tile's stage is empty, then start copying the tile of X at (head, row) into it."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.emptied.index(n % STAGES), (n // STAGES & 1) ^ 1)
    mbarrier.expect(ring.filled.index(n % STAGES), X.block_type.nbytes)
    tma.async_load(X, [head, row, 0], ring.filled.index(n % STAGES), ring.tiles.index(n % STAGES))


@gluon.jit
def wait(ring, n):
    """Consumer: wait until the n-th tile has arrived in shared memory, and return it as (rows, d)."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.filled.index(n % STAGES), n // STAGES & 1)
    return ring.tiles.index(n % STAGES).reshape([ring.tiles.shape[2], ring.tiles.shape[3]])


@gluon.jit
def release(ring, n):
    """Consumer: signal to the producer that this consumer has finished reading the n-th tile."""
    mbarrier.arrive(ring.emptied.index(n % ring.tiles.shape[0]), count=1)


@gluon.constexpr_function
def acc_layout(columns):
    """Return a warpgroup's register layout for a (64, columns) matmul result: 16 rows per warp, 4 lanes per row."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def load_acc_init(tile, which: gl.constexpr):
    """Return the initial accumulator (64, B_r) for S (`which` = 0) or dP (`which` = 1). All of its rows are equal."""
    B_r: gl.constexpr = tile.shape[1] // 2
    both = tile.reinterpret(gl.float32, [2, B_r], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row_values = both.index(which).load(gl.SliceLayout(0, acc_layout(B_r)))  # (B_r,)
    row_values, _ = gl.broadcast(row_values[None, :], gl.zeros([64, B_r], gl.float32, acc_layout(B_r)))
    return row_values  # (64, B_r)


@gluon.jit
def as_operand(x, like):
    """Convert x to the dtype of `like` and to the register layout of the left operand in a matmul with `like`."""
    return gl.convert_layout(x.to(like.dtype), gl.DotOperandLayout(0, acc_layout(like.shape[1]), 2))


@gluon.jit
def start_dq(c: gl.constexpr, ds_ji, k_j):
    """Start the matmul for consumer c's half of dQ: 64 of 128 rows if d = 64, or 64 of 128 columns if d = 128."""
    if k_j.shape[1] == 64:
        ds_ji = ds_ji.slice(64 * c, 64, 1)
    else:
        k_j = k_j.slice(64 * c, 64, 1)
    dq_i = gl.zeros([64, 64], gl.float32, acc_layout(64))
    return hopper.warpgroup_mma(ds_ji.permute((1, 0)), k_j, dq_i, use_acc=False, is_async=True)  # FA2.A2.L15


@gluon.jit
def store(x, X, head, row, tile):
    """Copy x to the shared-memory buffer `tile`, and start a TMA copy from there to X at (head, row)."""
    tma.store_wait(0)
    tile.reshape([tile.shape[1], tile.shape[2]]).store(x.to(X.dtype))
    hopper.fence_async_shared()
    tma.async_store(X, [head, row, 0], tile)


@gluon.jit
def producer(Q, K, V, dO, acc_init, rings, column_block):
    """Run the producer warp, which starts each copy as soon as its destination stage is empty.

    `rings` contains the rings of Q, K, V, dO and `acc_init`. `column_block` is (head, first key, first row block, T_r).
    """
    B_r: gl.constexpr = Q.block_shape[1]
    q, k, v, do, init = rings
    head, j, first, T_r = column_block
    load(k, 0, K, head, j)  # FA2.A2.L6
    for c in gl.static_range(2):
        load(v, c, V, head, j + 64 * c)  # FA2.A2.L6
    for i in range(first, T_r):  # FA2.A2.L8
        load(q, i - first, Q, head, i * B_r)  # FA2.A2.L9
        load(init, i - first, acc_init, head, i)  # FA2.A2.L9
        load(do, i - first, dO, head, i * B_r)  # FA2.A2.L9


@gluon.jit
def consumer(c: gl.constexpr, dQ, dK, dV, rings, shared, column_block, sizes, CAUSAL: gl.constexpr):
    """Run consumer warpgroup c, which computes dK and dV for its 64 keys, and its half of each row block's dQ.

    `rings` and `column_block` are the same as in producer(). `shared` contains the dS buffers, the barrier that signals
    that both consumers have stored their dS, and the dQ buffers. `sizes` is (N_q, N_k, tau, tau_log2).
    """
    q, k, v, do, init = rings
    ds, ds_filled, dq = shared
    head, j, first, T_r = column_block
    N_q, N_k, tau, tau_log2 = sizes
    B_r: gl.constexpr = q.tiles.shape[2]
    d: gl.constexpr = q.tiles.shape[3]
    key = j + 64 * c + gl.arange(0, 64, gl.SliceLayout(1, acc_layout(B_r)))  # (64,)
    row_begin = key + N_q - N_k if CAUSAL else 0 * key  # (64,): for each key, the first row that sees it
    row_begin = gl.where(key < N_k, row_begin, FAR_ROW)  # (64,)
    full = j + B_c - 1 + N_q - N_k if CAUSAL else 0  # the first row that sees all 128 keys
    full = gl.where(j + B_c > N_k, FAR_ROW, full)  # if some keys do not exist, no row sees all of them
    k_j, v_j = wait(k, 0), wait(v, c)  # (128, d), (64, d)
    dk_j = gl.zeros([64, d], gl.float32, acc_layout(d))  # FA2.A2.L7
    dv_j = gl.zeros([64, d], gl.float32, acc_layout(d))  # FA2.A2.L7
    for i in range(first, T_r):  # FA2.A2.L8
        n = i - first
        q_i, do_i = wait(q, n), wait(do, n)  # (B_r, d)
        init_tile = wait(init, n)  # (1, 2 B_r)
        s_ji = load_acc_init(init_tile, 0)  # (64, B_r)
        if i * B_r < full:
            row = i * B_r + gl.arange(0, B_r, gl.SliceLayout(0, acc_layout(B_r)))  # (B_r,)
            s_ji = gl.where(row[None, :] >= row_begin[:, None], s_ji, NEG_INF)
        k_c = k_j.slice(64 * c, 64, 0)  # (64, d)
        s_ji = hopper.warpgroup_mma(k_c, q_i.permute((1, 0)), s_ji, is_async=True)  # (64, B_r)  FA2.A2.L10
        dp_ji = load_acc_init(init_tile, 1)  # (64, B_r)
        dp_ji = hopper.warpgroup_mma(v_j, do_i.permute((1, 0)), dp_ji, is_async=True)  # (64, B_r)  FA2.A2.L13
        s_ji = hopper.warpgroup_mma_wait(1, deps=[s_ji])
        p_ji = gl.exp2(tau_log2 * s_ji)  # (64, B_r)  FA2.A2.L11
        dp_ji = hopper.warpgroup_mma_wait(0, deps=[dp_ji])
        ds_ji = p_ji * dp_ji  # (64, B_r)  FA2.A2.L14
        p_ji = as_operand(p_ji, do_i)
        dv_j = hopper.warpgroup_mma(p_ji, do_i, dv_j, is_async=True)  # (64, d)  FA2.A2.L12
        ds.index(n & 1).slice(64 * c, 64, 0).store(ds_ji.to(q_i.dtype))
        hopper.fence_async_shared()
        mbarrier.arrive(ds_filled, count=1)
        ds_ji = as_operand(ds_ji, q_i)
        dk_j = hopper.warpgroup_mma(ds_ji, q_i, dk_j, is_async=True)  # (64, d)  FA2.A2.L16
        mbarrier.wait(ds_filled, n & 1)  # wait until both consumers have stored their dS
        dq_i = start_dq(c, ds.index(n & 1), k_j)  # (64, 64)
        dv_j, dk_j, p_ji, ds_ji = hopper.warpgroup_mma_wait(1, deps=[dv_j, dk_j, p_ji, ds_ji])
        release(q, n)
        release(do, n)
        release(init, n)
        dq_i = hopper.warpgroup_mma_wait(0, deps=[dq_i])
        tma.store_wait(0)  # wait until TMA has read the previous row block's half of dQ from the buffer
        dq.index(c).reshape([64, 64]).store(dq_i)
        hopper.fence_async_shared()
        at = [head, i * B_r + (64 * c if d == 64 else 0), 0 if d == 64 else 64 * c]
        tma.async_atomic_add(dQ, at, dq.index(c))  # FA2.A2.L15
    store(dv_j, dV, head, j + 64 * c, v.tiles.index(c))  # FA2.A2.L18
    store(tau * dk_j, dK, head, j + 64 * c, v.tiles.index(c))  # FA2.A2.L18
    tma.store_wait(0)  # wait for the last copy because shared memory is freed when the program ends


@gluon.jit
def backward_kernel(Q, K, V, dO, acc_init, dQ, dK, dV, N_q, N_k, tau, tau_log2, CAUSAL: gl.constexpr):
    """Compute one column block's dK and dV, and add its contribution to dQ. All tensors are TMA descriptors."""
    B_r: gl.constexpr = Q.block_shape[1]
    j, head = gl.program_id(0) * B_c, gl.program_id(1)  # FA2.A2.L5
    first, T_r = gl.maximum(j + N_q - N_k, 0) // B_r if CAUSAL else 0, gl.cdiv(N_q, B_r)
    q, do, init, k, v = ring(Q, 2, 2), ring(dO, 2, 2), ring(acc_init, 2, 2), ring(K, 1, 2), ring(V, 2, 2)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_c, B_r], Q.dtype)
    ds = gl.allocate_shared_memory(Q.dtype, [2, B_c, B_r], DS)  # two buffers, as one consumer may be a step ahead
    dq = gl.allocate_shared_memory(gl.float32, [2, 1, 64, 64], dQ.layout)  # halves of dQ, which TMA adds to HBM
    ds_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ds_filled, count=2)
    hopper.fence_async_shared()  # make the barriers visible to TMA
    rings, shared = (q, k, v, do, init), (ds, ds_filled, dq)
    column_block, sizes = (head, j, first, T_r), (N_q, N_k, tau, tau_log2)
    gl.warp_specialize([
        (consumer, (0, dQ, dK, dV, rings, shared, column_block, sizes, CAUSAL)),
        (consumer, (1, dQ, dK, dV, rings, shared, column_block, sizes, CAUSAL)),
        (producer, (Q, K, V, dO, acc_init, rings, column_block)),
    ], [4, 1], [240, 24])  # fmt: skip


def backward(q: Tensor, k: Tensor, v: Tensor, O: Tensor, L: Tensor, dO: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Return dQ, dK and dV with the shapes and dtypes of q, k and v. O and L are the results of the forward pass."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    B_r, types = 8192 // d, {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    T_r, T_c = triton.cdiv(N_q, B_r), triton.cdiv(N_k, 128)
    Q, K, V, O, dO, L = (x.contiguous() for x in (q, k, v, O, dO, L))
    options = dict(num_warps=4, enable_fp_fusion=True)
    acc_init = torch.empty(batch * heads, T_r, 2 * B_r, dtype=torch.float32, device=q.device)
    acc_init_kernel[T_r, batch * heads](O, dO, L, acc_init, N_q, d**-0.5, d=d, B_r=B_r, **options)
    dQ = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # FA2.A2.L3
    dK, dV = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))

    def describe(X: Tensor, rows: int, columns: int) -> TensorDescriptor:
        block = [1, rows, columns]  # shape of a block in a (heads, N, d) tensor
        layout = gl.NVMMASharedLayout.get_default_for(block, types[X.dtype])
        return TensorDescriptor.from_tensor(X.view(batch * heads, *X.shape[-2:]), block, layout)

    sizes = (
        (Q, B_r, d),
        (K, 128, d),
        (V, 64, d),
        (dO, B_r, d),
        (acc_init, 1, 2 * B_r),
        (dQ, 64, 64),
        (dK, 64, d),
        (dV, 64, d),
    )
    tiles = [describe(*size) for size in sizes]
    backward_kernel[T_c, batch * heads](*tiles, N_q, N_k, d**-0.5, d**-0.5 / math.log(2), CAUSAL=causal, **options)
    return (d**-0.5 * dQ).to(q.dtype), dK, dV
