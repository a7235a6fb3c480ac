"""Rung 15, Gluon: the code itself specifies the tiles, stages and copies, which rung 14 left to Triton.

This rung makes more than one change, because Gluon code also differs from Triton code in other ways. The two loops
become one, which runs from right to left and decides with an `if` whether to mask a tile. Elements of p are rounded in
pairs, with an instruction that Triton itself has used only since version 3.9. The kernel waits for P V immediately,
whereas Triton let that matmul overlap work on the next tile. Rung 20 restores the overlap. The kernel needs a Hopper
GPU, 16-bit inputs, and d = 64 or 128.
"""

import math

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
def start(X, head, row, tiles, arrived, n, exists):
    """Start copying the tile of X at (head, row) into tile n's stage. If `exists` is false, do nothing."""
    STAGES: gl.constexpr = tiles.shape[0]
    mbarrier.expect(arrived.index(n % STAGES), X.block_type.nbytes, pred=exists)
    tma.async_load(X, [head, row, 0], arrived.index(n % STAGES), tiles.index(n % STAGES), pred=exists)


@gluon.jit
def new_stages(X, STAGES: gl.constexpr):
    """Allocate shared memory for STAGES tiles with the block shape of descriptor X, and for one barrier per tile."""
    tiles = gl.allocate_shared_memory(X.dtype, [STAGES, 1, X.block_shape[1], X.block_shape[2]], X.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    return tiles, arrived


@gluon.jit
def rows_of(tile):
    """Return a tile in shared memory as (rows, d), without its leading dimension of size 1."""
    return tile.reshape([tile.shape[1], tile.shape[2]])


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
def forward_kernel(Q, K, V, O, L, N_q, N_k, heads, l2_group, tau_log2, CAUSAL: gl.constexpr, STAGES: gl.constexpr):
    """Compute O and L for one row block of one head. Q, K, V and O are TMA descriptors of (heads, N, d) tensors."""
    B_c: gl.constexpr = K.block_shape[1]
    d: gl.constexpr = K.block_shape[2]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    i, head = block_coord(gl.cdiv(N_q, 64), heads, l2_group)  # FA2.A1.L3
    i = i * 64
    row = i + gl.arange(0, 64, ROWS)  # (64,)
    seen = keys_seen(row, N_q, N_k, CAUSAL)  # (64,)
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c  # every row sees all keys of the first `full` tiles
    T_c = gl.cdiv(keys_seen(i + 63, N_q, N_k, CAUSAL), B_c)  # no row sees tile T_c or any later tile

    q, q_arrived = new_stages(Q, 1)
    k, k_arrived = new_stages(K, STAGES)
    v, v_arrived = new_stages(V, STAGES)
    hopper.fence_async_shared()  # make the barriers visible to TMA
    start(Q, head, i, q, q_arrived, n=0, exists=True)  # FA2.A1.L4
    for n in gl.static_range(STAGES - 1):
        start(K, head, (T_c - 1 - n) * B_c, k, k_arrived, n, n < T_c)  # FA2.A1.L7
        start(V, head, (T_c - 1 - n) * B_c, v, v_arrived, n, n < T_c)  # FA2.A1.L7
    mbarrier.wait(q_arrived.index(0), 0)
    q = q.index(0)
    o_i = gl.zeros([64, d], gl.float32, O_LAYOUT)  # FA2.A1.L5
    l_i = gl.zeros([64], gl.float32, ROWS)  # FA2.A1.L5
    m_i = gl.full([64], LOWEST, gl.float32, ROWS)  # FA2.A1.L5
    for n in range(T_c):  # from right to left, so that the masked tiles come first  FA2.A1.L6
        j = T_c - 1 - n
        ahead = n + STAGES - 1  # the tile to be copied into the stage of tile n − 1
        gl.barrier()  # wait until every warp has finished reading tile n − 1
        start(K, head, (T_c - 1 - ahead) * B_c, k, k_arrived, ahead, ahead < T_c)  # FA2.A1.L7
        start(V, head, (T_c - 1 - ahead) * B_c, v, v_arrived, ahead, ahead < T_c)  # FA2.A1.L7
        mbarrier.wait(k_arrived.index(n % STAGES), n // STAGES & 1)
        s_ij = scores(rows_of(q), rows_of(k.index(n % STAGES)))  # (64, B_c)  FA2.A1.L8
        s_ij = hopper.warpgroup_mma_wait(0, deps=[s_ij])
        if j >= full:
            s_ij = mask(s_ij, j * B_c, seen)
        p_ij, alpha, l_i, m_i = softmax(s_ij, l_i, m_i, tau_log2)
        p_ij = rounded(p_ij, Q.dtype, O_LAYOUT)
        mbarrier.wait(v_arrived.index(n % STAGES), n // STAGES & 1)
        o_i = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i
        o_i = hopper.warpgroup_mma(p_ij, rows_of(v.index(n % STAGES)), o_i, is_async=True)  # (64, d)  FA2.A1.L10
        o_i = hopper.warpgroup_mma_wait(0, deps=[o_i])

    empty = l_i == 0.0  # a row that sees no key gets O = 0 and L = −∞
    l_i = gl.where(empty, 1.0, l_i)
    o_i = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i  # (64, d)  FA2.A1.L12
    L_i = gl.where(empty, NEG_INF, (m_i + gl.log2(l_i)) * LN2)  # (64,)  FA2.A1.L13
    rows_of(q).store(o_i.to(O.dtype))
    hopper.fence_async_shared()
    tma.async_store(O, [head, i, 0], q)  # FA2.A1.L14
    gl.store(L + head.to(gl.int64) * N_q + row, L_i, mask=row < N_q)  # FA2.A1.L15
    tma.store_wait(0)  # wait for the copy because shared memory is freed when the program ends


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O, shaped like q, and L (batch, heads, N_q), the natural log-sum-exp of each row's scores."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    L = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    l2_group = max(1, 2**24 // (2 * N_k * d * q.element_size()))  # number of heads whose K and V fill 16 MiB of L2
    grid = (triton.cdiv(N_q, 64) * batch * heads,)  # FA2.A1.L1 FA2.A1.L2
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, d], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16)
    blocks = zip((q, k, v, O), (64, 64, 64, 64), strict=True)
    tiles = [TensorDescriptor.from_tensor(X.contiguous().view(-1, *X.shape[2:]), [1, B, d], layout) for X, B in blocks]
    forward_kernel[grid](*tiles, L, N_q, N_k, batch * heads, l2_group, d**-0.5 / math.log(2), CAUSAL=causal,
                         STAGES=3, num_warps=4, enable_fp_fusion=True)  # fmt: skip
    return O, L  # FA2.A1.L17
