"""Rung 12, wgmma: the same tiles in Gluon, where we place every tile, start every product and wait for it ourselves.

One warpgroup does one thing after the other: copy, product, softmax, copy, product. All that overlaps are the programs
that share an SM. It takes d = 64 and 128, in 16 bits, on Hopper.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DIFF = "another language: what Triton decided is now written down"
NEG_INF = gl.constexpr(float("-inf"))
LOWEST = gl.constexpr(-1.0e30)  # where m starts: at −∞ a row without keys would compute −∞ − (−∞), not a number
LN2 = gl.constexpr(math.log(2))
all_threads = gl.barrier


@gluon.jit
def keys_seen(row, N_q, N_k, CAUSAL: gl.constexpr):
    """How many keys a row sees, counted from the left; the causal diagonal ends in the bottom right corner."""
    return gl.minimum(gl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row


@gluon.jit
def place(T_r, heads, at_once):
    """This program's row block and head: `at_once` heads side by side, the row blocks that see most keys first."""
    section, within = gl.program_id(0) // (at_once * T_r), gl.program_id(0) % (at_once * T_r)
    width = gl.minimum(at_once, heads - section * at_once)
    return T_r - 1 - within // width, section * at_once + within % width


@gluon.jit
def fetch(X, head, row, tile, barrier, phase: gl.constexpr):
    """Copy rows of one head into a tile of shared memory, and wait until they are there."""
    all_threads()  # nobody reads the tile any more
    mbarrier.expect(barrier, X.block_type.nbytes)
    tma.async_load(X, [head, row, 0], barrier, tile)
    mbarrier.wait(barrier, phase)


@gluon.jit
def rows_of(tile):
    """A tile of shared memory without its leading dimension of 1."""
    return tile.reshape([tile.shape[1], tile.shape[2]])


@gluon.jit
def scores(q_i, k_j):
    """Start q_i k_jᵀ, both in shared memory. Of 64 rows each warp will hold 16, and 4 of its threads share a row."""
    B_c: gl.constexpr = k_j.shape[0]
    zero = gl.zeros([64, B_c], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    return hopper.warpgroup_mma(q_i, k_j.permute((1, 0)), zero, use_acc=False, is_async=True)  # (64, B_c)  FA2.A1.L8


@gluon.jit
def mask(s_ij, j, seen):
    """The scores of keys j, j + 1, …, with −∞ in place of those that a row does not see."""
    col = j + gl.arange(0, s_ij.shape[1], gl.SliceLayout(0, s_ij.type.layout))
    return gl.where(col[None, :] < seen[:, None], s_ij, NEG_INF)  # (64, B_c)


@gluon.jit
def softmax(s_ij, l_i, m_i, tau_log2):
    """Take a tile's scores into l and m: p, and the factor by which o shrinks."""
    m_new = gl.maximum(m_i, tau_log2 * gl.max(s_ij, 1))  # (64,)  FA2.A1.L9
    p_ij = gl.exp2(tau_log2 * s_ij - m_new[:, None])  # (64, B_c)  FA2.A1.L9
    alpha = gl.exp2(m_i - m_new)  # (64,)  FA2.A1.L9
    l_i = alpha * l_i + gl.sum(p_ij, 1)  # (64,)  FA2.A1.L9
    return p_ij, alpha, l_i, m_new


@gluon.jit
def forward_kernel(Q, K, V, O, L, N_q, N_k, heads, at_once, tau_log2, CAUSAL: gl.constexpr):
    """One program computes one row block of one head. Q, K, V and O are descriptors of (heads, N, d)."""
    B_c: gl.constexpr = K.block_shape[1]
    d: gl.constexpr = K.block_shape[2]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    i, head = place(gl.cdiv(N_q, 64), heads, at_once)  # FA2.A1.L3
    i = i * 64
    row = i + gl.arange(0, 64, ROWS)  # (64,)
    seen = keys_seen(row, N_q, N_k, CAUSAL)  # (64,)
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c  # every row sees all keys of so many tiles
    T_c = gl.cdiv(keys_seen(i + 63, N_q, N_k, CAUSAL), B_c)  # no row sees a key of the tiles from here on

    q = gl.allocate_shared_memory(Q.dtype, Q.block_shape, Q.layout)
    k = gl.allocate_shared_memory(K.dtype, K.block_shape, K.layout)
    v = gl.allocate_shared_memory(V.dtype, V.block_shape, V.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    hopper.fence_async_shared()  # the copy engine sees the barrier
    fetch(Q, head, i, q, arrived, 0)  # FA2.A1.L4
    o_i = gl.zeros([64, d], gl.float32, O_LAYOUT)  # FA2.A1.L5
    l_i = gl.zeros([64], gl.float32, ROWS)  # FA2.A1.L5
    m_i = gl.full([64], LOWEST, gl.float32, ROWS)  # FA2.A1.L5
    for n in range(T_c):  # from right to left: the masked tiles come first  FA2.A1.L6
        j = T_c - 1 - n
        fetch(K, head, j * B_c, k, arrived, 1)  # FA2.A1.L7
        s_ij = scores(rows_of(q), rows_of(k))  # (64, B_c)  FA2.A1.L8
        s_ij = hopper.warpgroup_mma_wait(0, deps=[s_ij])
        if j >= full:
            s_ij = mask(s_ij, j * B_c, seen)
        p_ij, alpha, l_i, m_i = softmax(s_ij, l_i, m_i, tau_log2)
        p_ij = gl.convert_layout(p_ij.to(Q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        fetch(V, head, j * B_c, v, arrived, 0)  # FA2.A1.L7
        o_i = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i
        o_i = hopper.warpgroup_mma(p_ij, rows_of(v), o_i, is_async=True)  # (64, d)  FA2.A1.L10
        o_i = hopper.warpgroup_mma_wait(0, deps=[o_i])

    empty = l_i == 0.0  # a row that sees no key gets O = 0 and L = −∞
    l_i = gl.where(empty, 1.0, l_i)
    o_i = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i  # (64, d)  FA2.A1.L12
    L_i = gl.where(empty, NEG_INF, (m_i + gl.log2(l_i)) * LN2)  # (64,)  FA2.A1.L13
    rows_of(q).store(o_i.to(O.dtype))
    hopper.fence_async_shared()
    tma.async_store(O, [head, i, 0], q)  # FA2.A1.L14
    gl.store(L + head.to(gl.int64) * N_q + row, L_i, mask=row < N_q)  # FA2.A1.L15
    tma.store_wait(0)  # shared memory must outlive the copy


def forward(q, k, v, causal):
    """O like q, and L (batch, heads, N_q), the natural logarithm of each row's sum of exponentials."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    L = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    at_once = max(1, 2**25 // (2 * N_k * d * q.element_size()))  # heads whose K and V fill 32 MiB of the L2 cache
    grid = (triton.cdiv(N_q, 64) * batch * heads,)  # FA2.A1.L1 FA2.A1.L2
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, d], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16)
    blocks = zip((q, k, v, O), (64, 64, 64, 64), strict=True)
    tiles = [TensorDescriptor.from_tensor(X.contiguous().view(-1, *X.shape[2:]), [1, B, d], layout) for X, B in blocks]
    forward_kernel[grid](*tiles, L, N_q, N_k, batch * heads, at_once, d**-0.5 / math.log(2), CAUSAL=causal,
                         num_warps=4, enable_fp_fusion=True)  # fmt: skip
    return O, L  # FA2.A1.L17
