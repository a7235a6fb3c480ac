"""Rung 17, two consumers: 128 rows share each tile of K and V (192 rows with three consumers at d = 64).

A ring is a circular buffer with a few stages. Each stage has a buffer for one tile and two barriers, `filled` and
`emptied`, which CUTLASS calls full and empty. A barrier flips its phase, 0 or 1, once all expected arrivals have
occurred. A warp that waits at a barrier specifies the phase that has to end.

One program now fills an SM and uses all its registers, so the register limit of rung 16 is no longer needed. The tiles
and the stages are the same as in rung 16, except that d = 64 gets a fourth stage. Shared memory has room for this
stage, and counting stages modulo four takes fewer registers than counting them modulo three.
"""

import math
from collections import namedtuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NEG_INF = gl.constexpr(float("-inf"))
LOWEST = gl.constexpr(-1.0e30)  # initial value of m; −∞ would give −∞ − (−∞) = NaN in rows without keys
LN2 = gl.constexpr(math.log(2))
CONFIGS = {64: (3, 64, 4), 128: (2, 64, 3)}  # {d: (consumers, keys per tile, stages)}, chosen to fit on an SM
Ring = namedtuple("Ring", "tiles filled emptied")  # tiles of shape (stages, 1, rows, d), and two barriers per stage


@gluon.jit
def keys_seen(row, N_q, N_k, CAUSAL: gl.constexpr):
    """Return how many keys each row sees, counting from key 0. If CAUSAL, the last row sees all N_k keys."""
    return gl.minimum(gl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row


@gluon.jit
def block_coord(T_r, heads, l2_group):
    """Return the program's row block and head: l2_group heads at a time, row blocks with the most keys first."""
    section, within = gl.program_id(0) // (l2_group * T_r), gl.program_id(0) % (l2_group * T_r)
    width = gl.minimum(l2_group, heads - section * l2_group)
    return T_r - 1 - within // width, section * l2_group + within % width


@gluon.jit
def tile_buffers(X, STAGES: gl.constexpr):
    """Allocate shared memory for STAGES tiles, each with the block shape of descriptor X."""
    return gl.allocate_shared_memory(X.dtype, [STAGES, 1, X.block_shape[1], X.block_shape[2]], X.layout)


@gluon.jit
def ring(tiles, CONSUMERS: gl.constexpr):
    """Create an empty ring from `tiles` in shared memory, with one `filled` and one `emptied` barrier per stage."""
    STAGES: gl.constexpr = tiles.shape[0]
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


@gluon.jit
def scores(q_i, k_j):
    """Start the matmul q_i k_jᵀ of two shared-memory tiles. Each warp gets 16 result rows, with 4 lanes per row."""
    B_c: gl.constexpr = k_j.shape[0]
    zero = gl.zeros([64, B_c], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    return hopper.warpgroup_mma(q_i, k_j.permute((1, 0)), zero, use_acc=False, is_async=True)  # (64, B_c)  FA2.A1.L8


@gluon.jit
def mask(s_ij, j, seen):
    """Return s_ij with −∞ for masked keys. Row r sees only the keys before key seen[r], and column 0 is key j."""
    col = gl.arange(0, s_ij.shape[1], gl.SliceLayout(0, s_ij.type.layout))[None, :]
    # only two bits of a column's index, col & 6, depend on the lane; the other bits are constants and need no register
    return gl.where((col & ~6) < (seen - j)[:, None] - (col & 6), s_ij, NEG_INF)  # (64, B_c)


@gluon.jit
def softmax(s_ij, l_i, m_i, tau_log2):
    """Update l and m with a tile's scores. Return p, alpha (the factor by which to rescale o), and the new l and m."""
    m_new = gl.maximum(m_i, tau_log2 * gl.max(s_ij, 1))  # (64,)  FA2.A1.L9
    p_ij = gl.exp2(tau_log2 * s_ij - m_new[:, None])  # (64, B_c)  FA2.A1.L9
    alpha = gl.exp2(m_i - m_new)  # (64,)  FA2.A1.L9
    l_i = alpha * l_i + gl.sum(p_ij, 1)  # (64,)  FA2.A1.L9
    return p_ij, alpha, l_i, m_new


@gluon.jit
def rounded(p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Round p to fp16 or bf16, two elements per instruction, and return the result as a matmul's left operand."""
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16, is_pure=True, pack=2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def producer(Q, K, V, q, k, v, head, i, T_c):
    """Run the producer warp, which starts each copy as soon as its destination stage is empty."""
    B_c: gl.constexpr = K.block_shape[1]
    CONSUMERS: gl.constexpr = q.tiles.shape[0]
    for c in gl.static_range(CONSUMERS):
        load(q, c, Q, head, i + 64 * c)  # FA2.A1.L4
    for n in range(T_c):  # from right to left, so that the masked tiles come first  FA2.A1.L6
        load(k, n, K, head, (T_c - 1 - n) * B_c)  # FA2.A1.L7
        load(v, n, V, head, (T_c - 1 - n) * B_c)  # FA2.A1.L7


@gluon.jit
def consumer(c: gl.constexpr, O, L, q, k, v, head, i, T_c, N_q, N_k, tau_log2, CAUSAL: gl.constexpr):
    """Run consumer warpgroup c, which computes O and L for the 64 rows that start at row i + 64 c."""
    B_c: gl.constexpr = k.tiles.shape[2]
    d: gl.constexpr = k.tiles.shape[3]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    i = i + 64 * c
    row = i + gl.arange(0, 64, ROWS)  # (64,)
    seen = keys_seen(row, N_q, N_k, CAUSAL)  # (64,)
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c  # every row sees all keys of the first `full` tiles
    # Only the rows of other consumers see the tiles before `begin`.
    begin = T_c - gl.where(i < N_q, gl.cdiv(keys_seen(i + 63, N_q, N_k, CAUSAL), B_c), 0)

    q_i = wait(q, c)  # FA2.A1.L4
    o_i = gl.zeros([64, d], gl.float32, O_LAYOUT)  # FA2.A1.L5
    l_i = gl.zeros([64], gl.float32, ROWS)  # FA2.A1.L5
    m_i = gl.full([64], LOWEST, gl.float32, ROWS)  # FA2.A1.L5
    for n in range(begin):
        wait(k, n)
        release(k, n)
        wait(v, n)
        release(v, n)
    for n in range(begin, T_c):  # FA2.A1.L6
        j = T_c - 1 - n
        s_ij = scores(q_i, wait(k, n))  # (64, B_c)  FA2.A1.L8
        s_ij = hopper.warpgroup_mma_wait(0, deps=[s_ij])
        release(k, n)
        if j >= full:
            s_ij = mask(s_ij, j * B_c, seen)
        p_ij, alpha, l_i, m_i = softmax(s_ij, l_i, m_i, tau_log2)
        p_ij = rounded(p_ij, O.dtype, O_LAYOUT)
        o_i = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i
        o_i = hopper.warpgroup_mma(p_ij, wait(v, n), o_i, is_async=True)  # (64, d)  FA2.A1.L10
        o_i = hopper.warpgroup_mma_wait(0, deps=[o_i])
        release(v, n)

    empty = l_i == 0.0  # a row that sees no key gets O = 0 and L = −∞
    l_i = gl.where(empty, 1.0, l_i)
    o_i = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i  # (64, d)  FA2.A1.L12
    L_i = gl.where(empty, NEG_INF, (m_i + gl.log2(l_i)) * LN2)  # (64,)  FA2.A1.L13
    q_i.store(o_i.to(O.dtype))
    hopper.fence_async_shared()
    tma.async_store(O, [head, i, 0], q.tiles.index(c))  # FA2.A1.L14
    gl.store(L + head.to(gl.int64) * N_q + row, L_i, mask=row < N_q)  # FA2.A1.L15
    tma.store_wait(0)  # wait for the copy because shared memory is freed when the program ends


@gluon.jit
def forward_kernel(Q, K, V, O, L, N_q, N_k, heads, l2_group, tau_log2, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """Compute O and L for one row block of one head. Q, K, V and O are TMA descriptors of (heads, N, d) tensors."""
    B_r: gl.constexpr = 64 * CONSUMERS
    i, head = block_coord(gl.cdiv(N_q, B_r), heads, l2_group)  # FA2.A1.L3
    i = i * B_r
    T_c = gl.cdiv(keys_seen(i + B_r - 1, N_q, N_k, CAUSAL), K.block_shape[1])  # no row sees tile T_c or any later tile
    q = ring(tile_buffers(Q, CONSUMERS), 1)
    k, v = ring(tile_buffers(K, STAGES), CONSUMERS), ring(tile_buffers(V, STAGES), CONSUMERS)
    hopper.fence_async_shared()  # make the barriers visible to TMA
    first = (0, O, L, q, k, v, head, i, T_c, N_q, N_k, tau_log2, CAUSAL)
    second = (1, O, L, q, k, v, head, i, T_c, N_q, N_k, tau_log2, CAUSAL)
    third = (2, O, L, q, k, v, head, i, T_c, N_q, N_k, tau_log2, CAUSAL)
    copy = (Q, K, V, q, k, v, head, i, T_c)
    if CONSUMERS == 2:
        gl.warp_specialize([(consumer, first), (consumer, second), (producer, copy)], [4, 1], [240, 24])
    else:
        gl.warp_specialize([(consumer, first), (consumer, second), (consumer, third), (producer, copy)],
                           [4, 4, 1], [160, 160, 24])  # fmt: skip


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O, shaped like q, and L (batch, heads, N_q), the natural log-sum-exp of each row's scores."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    L = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    l2_group = max(1, 2**24 // (2 * N_k * d * q.element_size()))  # number of heads whose K and V fill 16 MiB of L2
    consumers, B_c, stages = CONFIGS[d]
    grid = (triton.cdiv(N_q, 64 * consumers) * batch * heads,)  # FA2.A1.L1 FA2.A1.L2
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, d], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16)
    blocks = zip((q, k, v, O), (64, B_c, B_c, 64), strict=True)
    tiles = [TensorDescriptor.from_tensor(X.contiguous().view(-1, *X.shape[2:]), [1, B, d], layout) for X, B in blocks]
    forward_kernel[grid](*tiles, L, N_q, N_k, batch * heads, l2_group, d**-0.5 / math.log(2), CAUSAL=causal,
                         CONSUMERS=consumers, STAGES=stages, num_warps=4, enable_fp_fusion=True)  # fmt: skip
    return O, L  # FA2.A1.L17
