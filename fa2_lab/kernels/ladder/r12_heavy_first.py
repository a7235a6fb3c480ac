"""Rung 12, heavy first: the row blocks that see the most keys are computed first, across all heads.

The drawback is that all heads now run concurrently, and the keys of all heads together do not fit in the L2 cache.
"""

import math

import torch
import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-1.0e30)  # initial value of m; −∞ would give −∞ − (−∞) = NaN in rows without keys
LN2 = tl.constexpr(math.log(2))


@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr, RAGGED: tl.constexpr):
    """Load rows first:first + B of a head of X as a (B, d) tile. If RAGGED, rows at or beyond N are set to zero."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    if RAGGED:
        return tl.load(at, mask=first + row < N, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def keys_seen(row, N_q, N_k, CAUSAL: tl.constexpr):
    """Return how many keys each row sees, counting from key 0. If CAUSAL, the last row sees all N_k keys."""
    return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row


@triton.jit
def visit(o_i, l_i, m_i, q_i, k_j, v_j, seen, tau_log2, MASKED: tl.constexpr):
    """Update a row block's o, ℓ and m with a tile of K and V. If MASKED, row r sees only the first seen[r] keys."""
    s_ij = tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A1.L8
    if MASKED:
        s_ij = tl.where(tl.arange(0, k_j.shape[0])[None, :] < seen[:, None], s_ij, NEG_INF)
    m_new = tl.maximum(m_i, tau_log2 * tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
    p_ij = tl.exp2(tau_log2 * s_ij - m_new[:, None])  # (B_r, B_c)  FA2.A1.L9
    alpha = tl.exp2(m_i - m_new)  # (B_r,)  FA2.A1.L9
    l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
    o_i = alpha[:, None] * o_i + tl.dot(p_ij.to(v_j.dtype), v_j)  # (B_r, d)  FA2.A1.L10
    return o_i, l_i, m_new


@triton.jit
def forward_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, CAUSAL: tl.constexpr, d: tl.constexpr, B_r: tl.constexpr,
                   B_c: tl.constexpr):  # fmt: skip
    """Compute O and L for one row block of one head."""
    i = (tl.num_programs(1) - 1 - tl.program_id(1)) * B_r  # start with the row blocks that see the most keys  FA2.A1.L3
    head = tl.program_id(0).to(tl.int64)
    Q, K, V = Q + head * N_q * d, K + head * N_k * d, V + head * N_k * d
    row = i + tl.arange(0, B_r)  # (B_r,)
    seen = keys_seen(row, N_q, N_k, CAUSAL)  # (B_r,)
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c * B_c  # every row sees all keys before key `full`
    last = keys_seen(i + B_r - 1, N_q, N_k, CAUSAL)  # no row sees key `last` or any later key

    q_i = load_rows(Q, i, N_q, B_r, d, RAGGED=True)  # (B_r, d)  FA2.A1.L4
    o_i = tl.zeros((B_r, d), tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), LOWEST, tl.float32)  # FA2.A1.L5
    for j in range(full, last, B_c):  # FA2.A1.L6
        k_j = load_rows(K, j, N_k, B_c, d, RAGGED=True)  # (B_c, d)  FA2.A1.L7
        v_j = load_rows(V, j, N_k, B_c, d, RAGGED=True)  # (B_c, d)  FA2.A1.L7
        o_i, l_i, m_i = visit(o_i, l_i, m_i, q_i, k_j, v_j, seen - j, tau_log2, MASKED=True)
    for j in range(0, full, B_c):  # FA2.A1.L6
        k_j = load_rows(K, j, N_k, B_c, d, RAGGED=False)  # (B_c, d)  FA2.A1.L7
        v_j = load_rows(V, j, N_k, B_c, d, RAGGED=False)  # (B_c, d)  FA2.A1.L7
        o_i, l_i, m_i = visit(o_i, l_i, m_i, q_i, k_j, v_j, seen - j, tau_log2, MASKED=False)

    empty = l_i == 0.0  # a row that sees no key gets O = 0 and L = −∞
    l_i = tl.where(empty, 1.0, l_i)
    o_i = (1.0 / l_i)[:, None] * o_i  # (B_r, d)  FA2.A1.L12
    L_i = tl.where(empty, NEG_INF, (m_i + tl.log2(l_i)) * LN2)  # (B_r,)  FA2.A1.L13
    at = (head * N_q + row)[:, None] * d + tl.arange(0, d)[None, :]
    tl.store(O + at, o_i.to(O.dtype.element_ty), mask=row[:, None] < N_q)  # FA2.A1.L14
    tl.store(L + head * N_q + row, L_i, mask=row < N_q)  # FA2.A1.L15


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O, shaped like q, and L (batch, heads, N_q), the natural log-sum-exp of each row's scores."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    no_bf16 = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16  # Triton's interpreter cannot multiply bf16
    Q, K, V = (x.to(torch.float32 if no_bf16 else q.dtype).contiguous() for x in (q, k, v))
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    L = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    grid = batch * heads, triton.cdiv(N_q, 64)  # FA2.A1.L1 FA2.A1.L2
    forward_kernel[grid](Q, K, V, O, L, N_q, N_k, d**-0.5 / math.log(2), CAUSAL=causal, d=d, B_r=64, B_c=64,
                         num_warps=4, num_stages=3, enable_fp_fusion=True)  # fmt: skip
    return O, L  # FA2.A1.L17
