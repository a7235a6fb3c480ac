"""FlashAttention-2, forward: Algorithm 1 of the paper, one program per row block of one head."""

import torch
import triton
import triton.language as tl

from fa2_lab.kernels import launch
from fa2_lab.kernels.portable.tile import drop, head_of, keys_seen, length_of, load_rows, place, store_rows
from fa2_lab.kernels.prepared import Options

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def visit_tiles(o_i, m_i, l_i, q_i, K, V, K_stride, V_stride, first, last, length, row, seen, scales, head, batch,
                dropout, MASKED: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr,
                UPCAST: tl.constexpr):  # fmt: skip
    """Take the tiles from column `first` to `last` into one row block's state o_i (B_r, d), m_i (B_r,), l_i (B_r,)."""
    scale_log2, coarse, huge = scales
    for j in range(first, last, B_c):  # FA2.A1.L6
        col = j + tl.arange(0, B_c)  # (B_c,)
        k_j = load_rows(K, j, K_stride, length, B_c, d, d_pad, MASKED, UPCAST)  # (B_c, d)  FA2.A1.L7
        s_ij = tl.dot(q_i, k_j.T, input_precision="ieee")  # (B_r, B_c)  FA2.A1.L8
        if MASKED:
            s_ij = tl.where(col[None, :] < seen[:, None], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
        m_ref = m_new
        if MASKED:  # a row that has seen no key yet has m = −inf, and −inf − (−inf) is NaN
            m_ref = tl.where(m_new == NEG_INF, 0.0, m_new)
        c_i = tl.where(tl.abs(m_ref) < huge, scale_log2, coarse)  # (B_r,)
        p_ij = tl.exp2(s_ij * c_i[:, None] - (m_ref * c_i)[:, None])  # (B_r, B_c)  FA2.A1.L9
        alpha = tl.exp2((m_i - m_ref) * c_i)  # (B_r,)  FA2.A1.L9
        l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
        m_i = m_new
        if dropout is not None:  # after the row sum: l counts every key, O only those that are kept
            p_ij = drop(p_ij, row[:, None], col[None, :], head, batch, dropout)
        v_j = load_rows(V, j, V_stride, length, B_c, d, d_pad, MASKED, UPCAST)  # (B_c, d)  FA2.A1.L7
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, alpha[:, None] * o_i, input_precision="ieee")  # (B_r, d)  FA2.A1.L10
    return o_i, m_i, l_i


@triton.jit
def scales_of(scale_log2):
    """The scale as a power of base 2, the power of two next to it, and the |m| from which on to use the latter.

    p is one fused multiply-add and an exp2, which is exact only as far as m · scale is. Where rounding that product
    would cost whole powers of two, scores differ from m by nothing or by more than 2^32 in p; a scale that is a power
    of two rounds nothing and tells the two apart.
    """
    return scale_log2, tl.exp2(tl.floor(tl.log2(scale_log2))), 2.0**30 / scale_log2


@triton.jit(do_not_specialize=launch.SIZES)
def forward_kernel(Q, K, V, O, L, key_lengths, seed, Q_strides, K_strides, V_strides, O_strides, H, group, N_q, N_k,
                   heads, heads_at_once, scale_log2, dropout, CAUSAL: tl.constexpr, d: tl.constexpr,
                   d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Row block i of one query head: all its tiles, then O_i and L_i. `group` query heads share one K/V head."""
    T_r = tl.cdiv(N_q, B_r)  # FA2.A1.L1 FA2.A1.L2
    i, bh = place(T_r, heads, heads_at_once)  # FA2.A1.L3
    if CAUSAL:
        i = T_r - 1 - i  # the lower a row block, the more keys it sees: start with the heaviest
    batch, head = bh // H, bh % H
    Q = head_of(Q, Q_strides, batch, head)
    K = head_of(K, K_strides, batch, head // group)
    V = head_of(V, V_strides, batch, head // group)
    O = head_of(O, O_strides, batch, head)
    row = i * B_r + tl.arange(0, B_r)  # (B_r,)
    length = length_of(key_lengths, batch, N_k)
    seen = keys_seen(row, N_q, N_k, length, CAUSAL)  # (B_r,)
    full = keys_seen(i * B_r, N_q, N_k, length, CAUSAL) // B_c * B_c  # up to here every row sees every key
    last = keys_seen(tl.minimum(i * B_r + B_r, N_q) - 1, N_q, N_k, length, CAUSAL)  # from here on none sees any

    q_i = load_rows(Q, i * B_r, Q_strides[2], N_q, B_r, d, d_pad, True, UPCAST)  # (B_r, d)  FA2.A1.L4
    o_i = tl.zeros((B_r, d_pad), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    # DIAGONAL tiles first: the sum does not mind, and the other way round ptxas makes each product wait (15% slower).
    scales = scales_of(scale_log2)
    dropout = None if seed is None else (seed, dropout[0], dropout[1])
    o_i, m_i, l_i = visit_tiles(o_i, m_i, l_i, q_i, K, V, K_strides[2], V_strides[2], full, last, length, row, seen,
                                scales, head, batch, dropout, True, B_c, d, d_pad, UPCAST)  # fmt: skip
    o_i, m_i, l_i = visit_tiles(o_i, m_i, l_i, q_i, K, V, K_strides[2], V_strides[2], 0, full, length, row, seen,
                                scales, head, batch, dropout, False, B_c, d, d_pad, UPCAST)  # fmt: skip

    l_i = tl.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key: O = 0 and L = −inf
    o_i = o_i / l_i[:, None]  # (B_r, d)  FA2.A1.L12
    L_i = (m_i * scale_log2 + tl.log2(l_i)) * LN2  # (B_r,)  FA2.A1.L13
    store_rows(O, o_i, i * B_r, O_strides[2], N_q, B_r, d, d_pad)  # FA2.A1.L14
    tl.store(L + tl.cast(bh, tl.int64) * N_q + row, L_i, mask=row < N_q)  # FA2.A1.L15


def forward(Q, K, V, options: Options, key_lengths=None, seed=None):
    """O like Q, and L (batch, heads, N_q) in fp32, the natural logarithm of each row's sum of exponentials."""
    return prepare(Q, K, V, options, key_lengths)(Q, K, V, key_lengths, seed)


def prepare(Q, K, V, options: Options, key_lengths=None, blocks=None):
    """forward() for calls of one kind, given (Q, K, V, key_lengths, seed): one program for each row block of a head."""
    blocks = blocks or launch.blocks("forward", Q, options.causal)
    (batch, H, N_q, d), (_, H_kv, N_k, _) = Q.shape, K.shape
    Q_strides, K_strides, V_strides, O_strides = map(launch.strides, (Q, K, V, torch.empty_like(Q, device="meta")))
    device, grid = Q.device, triton.cdiv(N_q, blocks.B_r) * batch * H
    run = launch.Launch(
        *(forward_kernel, grid, blocks.compiler_options()),
        **dict(Q_strides=Q_strides, K_strides=K_strides, V_strides=V_strides, O_strides=O_strides),
        **dict(H=H, group=H // H_kv, N_q=N_q, N_k=N_k, heads=batch * H, heads_at_once=launch.heads_at_once(K, 8)),
        **dict(scale_log2=launch.base_2(options.scale), dropout=launch.dropout(options.dropout_p)),
        **dict(CAUSAL=options.causal, d=d, **blocks.constants()),
    )

    def call(Q, K, V, key_lengths, seed):
        O = torch.empty_like(Q)
        L = torch.empty(batch, H, N_q, dtype=torch.float32, device=device)
        with launch.on_device_of(Q):
            run(Q, K, V, O, L, key_lengths, seed)
        return O, L  # FA2.A1.L17

    return call
