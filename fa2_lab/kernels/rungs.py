"""The same attention in Triton, one change at a time: each rung differs from the one before it in one idea.

0 standard    two matrix products and a softmax, S and P in HBM
1 fa1         one program per head, keys outside, rows inside, the row state (O, l, m) through HBM at every tile
2 swapped     rows outside and a grid dimension: the state stays on chip
3 deferred    one division per row instead of a rescaled answer per tile
4 skipping    causal tiles in the future are not visited, only the diagonal is masked
5 tuned       the block sizes, warps and stages that launch.py measured: forward.py as it is
6 descriptors tiles fetched by bulk copies

The rungs take Q, K, V (batch, heads, N, d) of equal heads; everything else that forward.py can do is left out here.
"""

import torch
import triton
import triton.language as tl

from fa2_lab.kernels import launch
from fa2_lab.kernels.portable import forward
from fa2_lab.kernels.portable.tile import head_of, load_rows, place, store_rows

NEG_INF = tl.constexpr(float("-inf"))
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scores(q_i, k_j, i, j, N_q, N_k, scale_log2, CAUSAL: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    """One tile of S in base 2, −∞ where a row may not look; every tile is masked, as in rungs 0 to 3."""  # (B_r, B_c)
    s_ij = tl.dot(q_i, k_j.T, input_precision="ieee") * scale_log2  # FA1.A2.L10
    row, col = i + tl.arange(0, B_r), j + tl.arange(0, B_c)
    seen = (col < N_k)[None, :]
    if CAUSAL:
        seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
    return tl.where(seen, s_ij, NEG_INF)  # FA1.A2.L11


@triton.jit
def finite(m):
    """m, with 0 for the −∞ of a row that has seen no key."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def nonzero(l):
    """l, with 1 for the 0 of a row that has seen no key."""
    return tl.where(l == 0.0, 1.0, l)


# 0: standard attention ----------------------------------------------------------------------------------------


@triton.jit
def scores_kernel(Q, K, S, Q_strides, K_strides, H, N_q, N_k, scale_log2, CAUSAL: tl.constexpr, d: tl.constexpr,
                  d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """One tile of S = τ Q Kᵀ, written to HBM in fp32."""
    T_r, T_c = tl.cdiv(N_q, B_r), tl.cdiv(N_k, B_c)
    tile, bh = tl.program_id(0) % (T_r * T_c), tl.program_id(0) // (T_r * T_c)
    i, j = tile // T_c * B_r, tile % T_c * B_c
    q_i = load_rows(head_of(Q, Q_strides, bh // H, bh % H), i, Q_strides[2], N_q, B_r, d, d_pad, True, UPCAST)
    k_j = load_rows(head_of(K, K_strides, bh // H, bh % H), j, K_strides[2], N_k, B_c, d, d_pad, True, UPCAST)
    s_ij = scores(q_i, k_j, i, j, N_q, N_k, scale_log2, CAUSAL, B_r, B_c)  # (B_r, B_c)
    row, col = tl.cast(bh, tl.int64) * N_q + i + tl.arange(0, B_r), j + tl.arange(0, B_c)
    real = (i + tl.arange(0, B_r) < N_q)[:, None] & (col < N_k)[None, :]
    tl.store(S + row[:, None] * N_k + col[None, :], s_ij, mask=real)


@triton.jit
def softmax_kernel(S, P, L, N_k, WIDTH: tl.constexpr):
    """One row of P = softmax(S): loaded from HBM, written back to HBM."""
    row, col = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, WIDTH)
    s = tl.load(S + row * N_k + col, mask=col < N_k, other=NEG_INF)  # (N_k,)
    m = tl.max(s, 0)
    p = tl.exp2(s - finite(m))
    l = nonzero(tl.sum(p, 0))
    tl.store(P + row * N_k + col, (p / l).to(P.dtype.element_ty), mask=col < N_k)
    tl.store(L + row, (m + tl.log2(l)) * LN2)


@triton.jit
def output_kernel(P, V, O, V_strides, O_strides, H, N_q, N_k, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr,
                  B_c: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """One row block of O = P V, P read from HBM."""
    T_r = tl.cdiv(N_q, B_r)
    i, bh = tl.program_id(0) % T_r * B_r, tl.program_id(0) // T_r
    V, P = head_of(V, V_strides, bh // H, bh % H), P + tl.cast(bh, tl.int64) * N_q * N_k
    o_i = tl.zeros((B_r, d_pad), tl.float32)
    for j in range(0, N_k, B_c):
        row, col = i + tl.arange(0, B_r), j + tl.arange(0, B_c)
        real = (row < N_q)[:, None] & (col < N_k)[None, :]
        p_ij = tl.load(P + tl.cast(row, tl.int64)[:, None] * N_k + col[None, :], mask=real, other=0.0)
        v_j = load_rows(V, j, V_strides[2], N_k, B_c, d, d_pad, True, UPCAST)
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, o_i, input_precision="ieee")  # (B_r, d)
    store_rows(head_of(O, O_strides, bh // H, bh % H), o_i, i, O_strides[2], N_q, B_r, d, d_pad)


def standard(Q, K, V, causal, scale):
    """Rung 0. Needs 6 bytes for every entry of the N_q × N_k matrix, more than any other rung needs in all."""
    call = _Call(Q, K, V, causal, scale)
    S = torch.empty((call.heads, call.N_q, call.N_k), dtype=torch.float32, device=Q.device)
    P = torch.empty_like(S, dtype=Q.dtype)
    scores_kernel[(call.heads * call.T_r * call.T_c,)](
        Q, K, S, call.q, call.k, call.H, call.N_q, call.N_k, call.scale_log2, CAUSAL=causal,
        **call.options)  # fmt: skip
    softmax_kernel[(call.heads * call.N_q,)](S, P, call.L, call.N_k, WIDTH=triton.next_power_of_2(call.N_k))
    output_kernel[(call.heads * call.T_r,)](P, V, call.O, call.v, call.o, call.H, call.N_q, call.N_k, **call.options)
    return call.O, call.L


# 1: FA1's loop order ------------------------------------------------------------------------------------------


@triton.jit
def local_softmax(s_ij):
    """The softmax statistics of one tile alone."""
    m_ij = tl.max(s_ij, 1)  # FA1.A2.L12
    p_ij = tl.exp2(s_ij - finite(m_ij)[:, None])  # FA1.A2.L12
    return m_ij, p_ij, tl.sum(p_ij, 1)  # FA1.A2.L12


@triton.jit
def joined(m_i, l_i, m_ij, l_ij):
    """The statistics of row block and tile together, and the factors that bring each to the new maximum."""
    m_new = tl.maximum(m_i, m_ij)  # FA1.A2.L13
    alpha, beta = tl.exp2(m_i - finite(m_new)), tl.exp2(m_ij - finite(m_new))  # FA1.A2.L13
    return m_new, alpha * l_i + beta * l_ij, alpha, beta  # FA1.A2.L13


@triton.jit
def fa1_kernel(Q, K, V, O, O_sum, l, m, L, Q_strides, K_strides, V_strides, O_strides, H, N_q, N_k, scale_log2,
               CAUSAL: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
               UPCAST: tl.constexpr):  # fmt: skip
    """One head from end to end. O_sum holds O in fp32 while it grows; the last column block writes O itself."""
    bh = tl.program_id(0)
    Q, K = head_of(Q, Q_strides, bh // H, bh % H), head_of(K, K_strides, bh // H, bh % H)
    V, O = head_of(V, V_strides, bh // H, bh % H), head_of(O, O_strides, bh // H, bh % H)
    O_sum += tl.cast(bh, tl.int64) * N_q * d
    for j in range(0, N_k, B_c):  # FA1.A2.L6
        k_j = load_rows(K, j, K_strides[2], N_k, B_c, d, d_pad, True, UPCAST)  # FA1.A2.L7
        v_j = load_rows(V, j, V_strides[2], N_k, B_c, d, d_pad, True, UPCAST)  # FA1.A2.L7
        for i in range(0, N_q, B_r):  # FA1.A2.L8
            row = i + tl.arange(0, B_r)
            at, real = tl.cast(bh, tl.int64) * N_q + row, row < N_q
            q_i = load_rows(Q, i, Q_strides[2], N_q, B_r, d, d_pad, True, UPCAST)  # FA1.A2.L9
            o_i = load_rows(O_sum, i, d, N_q, B_r, d, d_pad, True, False)  # FA1.A2.L9
            l_i, m_i = tl.load(l + at, mask=real, other=0.0), tl.load(m + at, mask=real, other=0.0)  # FA1.A2.L9
            s_ij = scores(q_i, k_j, i, j, N_q, N_k, scale_log2, CAUSAL, B_r, B_c)
            m_ij, p_ij, l_ij = local_softmax(s_ij)
            m_new, l_new, alpha, beta = joined(m_i, l_i, m_ij, l_ij)
            r = 1.0 / nonzero(l_new)  # FA1.A2.L15
            pv = tl.dot(p_ij.to(v_j.dtype), v_j, input_precision="ieee")  # FA1.A2.L15
            o_i = (r * alpha * l_i)[:, None] * o_i + (r * beta)[:, None] * pv  # FA1.A2.L15
            tl.debug_barrier()  # all threads have read the old state
            store_rows(O_sum, o_i, i, d, N_q, B_r, d, d_pad)  # FA1.A2.L15
            tl.store(l + at, l_new, mask=real)  # FA1.A2.L16
            tl.store(m + at, m_new, mask=real)  # FA1.A2.L16
            tl.debug_barrier()  # the new state is written before anyone reads it
            if j + B_c >= N_k:
                store_rows(O, o_i, i, O_strides[2], N_q, B_r, d, d_pad)
                tl.store(L + at, (m_new + tl.log2(nonzero(l_new))) * LN2, mask=real)  # FA1.A2.L19


def fa1(Q, K, V, causal, scale):
    """Rung 1."""
    call = _Call(Q, K, V, causal, scale)  # FA1.A2.L2 FA1.A2.L4 FA1.A2.L5
    O_sum = torch.zeros((call.heads, call.N_q, call.d), dtype=torch.float32, device=Q.device)  # FA1.A2.L3
    l, m = torch.zeros_like(call.L), torch.full_like(call.L, -torch.inf)  # FA1.A2.L3
    fa1_kernel[(call.heads,)](
        Q, K, V, call.O, O_sum, l, m, call.L, *call.strides, call.H, call.N_q, call.N_k, call.scale_log2,
        CAUSAL=causal, **call.options)  # fmt: skip
    return call.O, call.L


# 2: loops swapped, row blocks in the grid ---------------------------------------------------------------------


@triton.jit
def swapped_kernel(Q, K, V, O, L, Q_strides, K_strides, V_strides, O_strides, H, N_q, N_k, scale_log2,
                   CAUSAL: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
                   UPCAST: tl.constexpr):  # fmt: skip
    """One row block: FA1's arithmetic, but q_i, o_i, l_i and m_i never leave the chip."""
    T_r = tl.cdiv(N_q, B_r)
    i, bh = tl.program_id(0) % T_r * B_r, tl.program_id(0) // T_r
    K, V = head_of(K, K_strides, bh // H, bh % H), head_of(V, V_strides, bh // H, bh % H)
    q_i = load_rows(head_of(Q, Q_strides, bh // H, bh % H), i, Q_strides[2], N_q, B_r, d, d_pad, True, UPCAST)
    o_i = tl.zeros((B_r, d_pad), tl.float32)
    l_i, m_i = tl.zeros((B_r,), tl.float32), tl.full((B_r,), NEG_INF, tl.float32)
    for j in range(0, N_k, B_c):
        k_j = load_rows(K, j, K_strides[2], N_k, B_c, d, d_pad, True, UPCAST)
        v_j = load_rows(V, j, V_strides[2], N_k, B_c, d, d_pad, True, UPCAST)
        s_ij = scores(q_i, k_j, i, j, N_q, N_k, scale_log2, CAUSAL, B_r, B_c)
        m_ij, p_ij, l_ij = local_softmax(s_ij)
        m_i, l_new, alpha, beta = joined(m_i, l_i, m_ij, l_ij)
        r = 1.0 / nonzero(l_new)
        pv = tl.dot(p_ij.to(v_j.dtype), v_j, input_precision="ieee")
        o_i = (r * alpha * l_i)[:, None] * o_i + (r * beta)[:, None] * pv
        l_i = l_new
    store_rows(head_of(O, O_strides, bh // H, bh % H), o_i, i, O_strides[2], N_q, B_r, d, d_pad)
    row = i + tl.arange(0, B_r)
    tl.store(L + tl.cast(bh, tl.int64) * N_q + row, (m_i + tl.log2(nonzero(l_i))) * LN2, mask=row < N_q)


def swapped(Q, K, V, causal, scale):
    """Rung 2."""
    return _by_rows(swapped_kernel, Q, K, V, causal, scale)


# 3: normalisation deferred ------------------------------------------------------------------------------------


@triton.jit
def deferred_kernel(Q, K, V, O, L, Q_strides, K_strides, V_strides, O_strides, H, N_q, N_k, scale_log2,
                    CAUSAL: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
                    UPCAST: tl.constexpr):  # fmt: skip
    """One row block with the un-normalised o_i of FA2's first tweak."""
    T_r = tl.cdiv(N_q, B_r)
    i, bh = tl.program_id(0) % T_r * B_r, tl.program_id(0) // T_r
    K, V = head_of(K, K_strides, bh // H, bh % H), head_of(V, V_strides, bh // H, bh % H)
    q_i = load_rows(head_of(Q, Q_strides, bh // H, bh % H), i, Q_strides[2], N_q, B_r, d, d_pad, True, UPCAST)
    o_i = tl.zeros((B_r, d_pad), tl.float32)
    l_i, m_i = tl.zeros((B_r,), tl.float32), tl.full((B_r,), NEG_INF, tl.float32)
    for j in range(0, N_k, B_c):
        k_j = load_rows(K, j, K_strides[2], N_k, B_c, d, d_pad, True, UPCAST)
        v_j = load_rows(V, j, V_strides[2], N_k, B_c, d, d_pad, True, UPCAST)
        s_ij = scores(q_i, k_j, i, j, N_q, N_k, scale_log2, CAUSAL, B_r, B_c)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))
        p_ij = tl.exp2(s_ij - finite(m_new)[:, None])
        alpha = tl.exp2(m_i - finite(m_new))
        l_i, m_i = alpha * l_i + tl.sum(p_ij, 1), m_new
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, alpha[:, None] * o_i, input_precision="ieee")
    l_i = nonzero(l_i)
    store_rows(head_of(O, O_strides, bh // H, bh % H), o_i / l_i[:, None], i, O_strides[2], N_q, B_r, d, d_pad)
    row = i + tl.arange(0, B_r)
    tl.store(L + tl.cast(bh, tl.int64) * N_q + row, (m_i + tl.log2(l_i)) * LN2, mask=row < N_q)


def deferred(Q, K, V, causal, scale):
    """Rung 3."""
    return _by_rows(deferred_kernel, Q, K, V, causal, scale)


# 4 and 5: forward.py, first with the blocks of the rungs below, then tuned ------------------------------------


def skipping(Q, K, V, causal, scale):
    """Rung 4: tiles in the future are skipped, and only those on the diagonal or the edge are masked."""
    call = _Call(Q, K, V, causal, scale)
    forward.forward_kernel[(call.heads * call.T_r,)](
        Q, K, V, call.O, call.L, None, None, *call.strides, call.H, 1, call.N_q, call.N_k, call.heads, 1,
        call.scale_log2, CAUSAL=causal, **call.options)  # fmt: skip
    return call.O, call.L


def tuned(Q, K, V, causal, scale):
    """Rung 5: the kernel that attention() runs."""
    return forward.forward(Q, K, V, None, None, causal, scale, 0.0)


# 6: bulk copies by descriptors --------------------------------------------------------------------------------


@triton.jit
def visit_described(o_i, m_i, l_i, q_i, K, V, bh, first, last, row, seen, scale_log2, MASKED: tl.constexpr,
                    B_c: tl.constexpr, d: tl.constexpr):  # fmt: skip
    """The loop of forward.py with each tile fetched whole; rows that do not exist arrive as zeros."""
    for j in range(first, last, B_c):
        k_j = K.load([bh, j, 0]).reshape(B_c, d)
        s_ij = tl.dot(q_i, k_j.T) * scale_log2
        if MASKED:
            s_ij = tl.where((j + tl.arange(0, B_c))[None, :] < seen[:, None], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))
        p_ij = tl.exp2(s_ij - (finite(m_new) if MASKED else m_new)[:, None])
        alpha = tl.exp2(m_i - (finite(m_new) if MASKED else m_new))
        l_i, m_i = alpha * l_i + tl.sum(p_ij, 1), m_new
        v_j = V.load([bh, j, 0]).reshape(B_c, d)
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, alpha[:, None] * o_i)
    return o_i, m_i, l_i


@triton.jit
def described_kernel(Q, K, V, O, L, N_q, N_k, heads, heads_at_once, scale_log2, CAUSAL: tl.constexpr, d: tl.constexpr,
                     B_r: tl.constexpr, B_c: tl.constexpr):  # fmt: skip
    """One row block; Q, K, V and O are descriptors of (heads, N, d) that copy one block of one head."""
    T_r = tl.cdiv(N_q, B_r)
    i, bh = place(T_r, heads, heads_at_once)
    if CAUSAL:
        i = T_r - 1 - i
    row = i * B_r + tl.arange(0, B_r)
    seen = tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row
    full = tl.min(seen, 0) // B_c * B_c
    q_i = Q.load([bh, i * B_r, 0]).reshape(B_r, d)
    o_i = tl.zeros((B_r, d), tl.float32)
    l_i, m_i = tl.zeros((B_r,), tl.float32), tl.full((B_r,), NEG_INF, tl.float32)
    o_i, m_i, l_i = visit_described(o_i, m_i, l_i, q_i, K, V, bh, 0, full, row, seen, scale_log2, False, B_c, d)
    o_i, m_i, l_i = visit_described(o_i, m_i, l_i, q_i, K, V, bh, full, tl.max(seen, 0), row, seen, scale_log2, True,
                                    B_c, d)  # fmt: skip
    l_i = nonzero(l_i)
    O.store([bh, i * B_r, 0], (o_i / l_i[:, None]).to(O.dtype).reshape(1, B_r, d))
    tl.store(L + tl.cast(bh, tl.int64) * N_q + row, (m_i + tl.log2(l_i)) * LN2, mask=row < N_q)


def described(Q, K, V, causal, scale):
    """Rung 6. Takes contiguous fp16 or bf16 tensors whose head dimension is a power of two of at least 16."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    call = _Call(Q, K, V, causal, scale)
    blocks = dict(B_r=128, B_c=128 if call.d <= 64 else 64)

    def rows(x, B):
        return TensorDescriptor.from_tensor(x.view(call.heads, -1, call.d), [1, B, call.d])

    described_kernel[(call.heads * triton.cdiv(call.N_q, blocks["B_r"]),)](
        rows(Q, blocks["B_r"]), rows(K, blocks["B_c"]), rows(V, blocks["B_c"]), rows(call.O, blocks["B_r"]), call.L,
        call.N_q, call.N_k, call.heads, launch.heads_at_once(K, 16), call.scale_log2, CAUSAL=causal, d=call.d, **blocks,
        num_warps=8, num_stages=3)  # fmt: skip
    return call.O, call.L


RUNGS = {
    "standard": standard,
    "fa1": fa1,
    "swapped": swapped,
    "deferred": deferred,
    "skipping": skipping,
    "tuned": tuned,
    "descriptors": described,
}


# Beside the ladder: how the warps of a block share a tile -----------------------------------------------------


@triton.jit
def split_keys_kernel(Q, K, V, O, Q_strides, K_strides, V_strides, O_strides, H, N, scale_log2, d: tl.constexpr,
                      B_r: tl.constexpr, B_c: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """FA1's way, split-K: a product whose batch is the warp; warp w has keys w·B_c/W … of every tile and all rows.

    Row maximum, row sum and the W partial sums P_w v_w cross the warps through shared memory.
    """
    i, bh = tl.program_id(0) % tl.cdiv(N, B_r) * B_r, tl.program_id(0) // tl.cdiv(N, B_r)
    K, V = head_of(K, K_strides, bh // H, bh % H), head_of(V, V_strides, bh // H, bh % H)
    q_i = load_rows(head_of(Q, Q_strides, bh // H, bh % H), i, Q_strides[2], N, B_r, d, d, False, False)
    q_i = tl.broadcast_to(q_i[None, :, :], (W, B_r, d))
    o_i = tl.zeros((B_r, d), tl.float32)
    l_i, m_i = tl.zeros((B_r,), tl.float32), tl.full((B_r,), NEG_INF, tl.float32)
    for j in range(0, N, B_c):
        k_j = load_rows(K, j, K_strides[2], N, B_c, d, d, False, False).reshape(W, B_c // W, d)
        v_j = load_rows(V, j, V_strides[2], N, B_c, d, d, False, False).reshape(W, B_c // W, d)
        s_ij = tl.dot(q_i, k_j.permute(0, 2, 1)) * scale_log2  # (W, B_r, B_c / W)
        m_new = tl.maximum(m_i, tl.max(tl.max(s_ij, 2), 0))  # across warps
        p_ij = tl.exp2(s_ij - m_new[None, :, None])
        alpha = tl.exp2(m_i - m_new)
        l_i, m_i = alpha * l_i + tl.sum(tl.sum(p_ij, 2), 0), m_new  # across warps
        o_i = alpha[:, None] * o_i + tl.sum(tl.dot(p_ij.to(v_j.dtype), v_j), 0)  # across warps
    store_rows(head_of(O, O_strides, bh // H, bh % H), o_i / l_i[:, None], i, O_strides[2], N, B_r, d, d)


@triton.jit
def split_queries_kernel(Q, K, V, O, Q_strides, K_strides, V_strides, O_strides, H, N, scale_log2, d: tl.constexpr,
                         B_r: tl.constexpr, B_c: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """FA2's way, split-Q: warp w has rows w·B_r/W … and every key; nothing crosses the warps."""
    i, bh = tl.program_id(0) % tl.cdiv(N, B_r) * B_r, tl.program_id(0) // tl.cdiv(N, B_r)
    K, V = head_of(K, K_strides, bh // H, bh % H), head_of(V, V_strides, bh // H, bh % H)
    q_i = load_rows(head_of(Q, Q_strides, bh // H, bh % H), i, Q_strides[2], N, B_r, d, d, False, False)
    q_i = q_i.reshape(W, B_r // W, d)
    o_i = tl.zeros((W, B_r // W, d), tl.float32)
    l_i, m_i = tl.zeros((W, B_r // W), tl.float32), tl.full((W, B_r // W), NEG_INF, tl.float32)
    for j in range(0, N, B_c):
        k_j = load_rows(K, j, K_strides[2], N, B_c, d, d, False, False)
        v_j = load_rows(V, j, V_strides[2], N, B_c, d, d, False, False)
        k_all = tl.broadcast_to(k_j.T[None, :, :], (W, d, B_c))
        s_ij = tl.dot(q_i, k_all) * scale_log2  # (W, B_r / W, B_c)
        m_new = tl.maximum(m_i, tl.max(s_ij, 2))
        p_ij = tl.exp2(s_ij - m_new[:, :, None])
        alpha = tl.exp2(m_i - m_new)
        l_i, m_i = alpha * l_i + tl.sum(p_ij, 2), m_new
        v_all = tl.broadcast_to(v_j[None, :, :], (W, B_c, d))
        o_i = tl.dot(p_ij.to(v_j.dtype), v_all, alpha[:, :, None] * o_i)
    o_i = (o_i / l_i[:, :, None]).reshape(B_r, d)
    store_rows(head_of(O, O_strides, bh // H, bh % H), o_i, i, O_strides[2], N, B_r, d, d)


def split(kernel, Q, K, V, scale, W=2):
    """Run split_keys_kernel or split_queries_kernel: no mask, N a multiple of 64, d a power of two.

    Two warps on a tile of 32 × 64: with four on 64 × 64 the partial sums of split-K spill at d = 64, on sm_90.
    """
    call = _Call(Q, K, V, False, scale)
    kernel[(call.heads * triton.cdiv(call.N_q, 16 * W),)](
        Q, K, V, call.O, *call.strides, call.H, call.N_q, call.scale_log2, d=call.d, B_r=16 * W, B_c=64, W=W,
        num_warps=W, num_stages=1)  # fmt: skip
    return call.O


# What the rungs have in common --------------------------------------------------------------------------------


class _Call:
    """Outputs, sizes and strides of one call, and the blocks that rungs 0 to 4 share."""

    def __init__(self, Q, K, V, causal, scale):
        (batch, self.H, self.N_q, self.d), self.N_k = Q.shape, K.shape[2]
        self.heads, self.scale_log2 = batch * self.H, scale * launch.LOG2E
        self.O = torch.empty_like(Q)
        self.L = torch.empty(Q.shape[:3], dtype=torch.float32, device=Q.device)
        self.strides = self.q, self.k, self.v, self.o = [x.stride()[:3] for x in (Q, K, V, self.O)]
        self.options = launch.Blocks(64, 64, 4, 1, d_pad=launch.padded(self.d), upcast=launch.upcast(Q)).options()
        self.options["d"] = self.d
        self.T_r, self.T_c = triton.cdiv(self.N_q, 64), triton.cdiv(self.N_k, 64)


def _by_rows(kernel, Q, K, V, causal, scale):
    """Launch a kernel with one program per row block."""
    call = _Call(Q, K, V, causal, scale)
    kernel[(call.heads * call.T_r,)](
        Q, K, V, call.O, call.L, *call.strides, call.H, call.N_q, call.N_k, call.scale_log2, CAUSAL=causal,
        **call.options)  # fmt: skip
    return call.O, call.L
