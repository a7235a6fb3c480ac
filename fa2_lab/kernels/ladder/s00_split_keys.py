"""Side rung s00, split keys: each warp processes an equal share of every tile's keys, as in FA1 (split-K).

Every warp processes all rows of the tile. The warps combine their row maxima, their row sums and the W partial sums
P_w V_w through shared memory. `python -m fa2_lab ladder s00 s01` shows the difference from s01. The kernel spills 9
registers when compiled by Triton 3.7, and none when compiled by Triton 3.6 or 3.8.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NEG_INF = tl.constexpr(float("-inf"))
LN2 = tl.constexpr(math.log(2))


@triton.jit
def load_rows(X, first, B: tl.constexpr, d: tl.constexpr):
    """Load rows first:first + B of a head of X as a (B, d) tile."""
    return tl.load(X + first * d + (tl.arange(0, B)[:, None] * d + tl.arange(0, d)[None, :]))  # (B, d)


@triton.jit
def forward_kernel(Q, K, V, O, L, N, tau_log2, d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
                   W: tl.constexpr):  # fmt: skip
    """Compute O and L for one row block of one head. The program divides every tile among its W warps."""
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)  # FA2.A1.L3
    Q, K, V, O, L = Q + head * N * d, K + head * N * d, V + head * N * d, O + head * N * d, L + head * N

    q_i = load_rows(Q, i, B_r, d)  # (B_r, d)  FA2.A1.L4
    q_i = tl.broadcast_to(q_i[None, :, :], (W, B_r, d))
    o_i = tl.zeros((B_r, d), tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    for j in range(0, N, B_c):  # FA2.A1.L6
        k_j = load_rows(K, j, B_c, d).reshape(W, B_c // W, d)  # FA2.A1.L7
        v_j = load_rows(V, j, B_c, d).reshape(W, B_c // W, d)  # FA2.A1.L7
        s_ij = tau_log2 * tl.dot(q_i, k_j.permute(0, 2, 1))  # (W, B_r, B_c / W)  FA2.A1.L8
        m_new = tl.maximum(m_i, tl.max(tl.max(s_ij, 2), 0))  # (B_r,), combined across warps  FA2.A1.L9
        p_ij = tl.exp2(s_ij - m_new[None, :, None])  # (W, B_r, B_c / W)  FA2.A1.L9
        alpha = tl.exp2(m_i - m_new)  # FA2.A1.L9
        l_i = alpha * l_i + tl.sum(tl.sum(p_ij, 2), 0)  # (B_r,), combined across warps  FA2.A1.L9
        o_i = alpha[:, None] * o_i + tl.sum(tl.dot(p_ij.to(v_j.dtype), v_j), 0)  # (B_r, d), across warps  FA2.A1.L10
        m_i = m_new

    o_i = (1.0 / l_i)[:, None] * o_i  # (B_r, d)  FA2.A1.L12
    at = (i + tl.arange(0, B_r))[:, None] * d + tl.arange(0, d)[None, :]
    tl.store(O + at, o_i.to(O.dtype.element_ty))  # FA2.A1.L14
    tl.store(L + i + tl.arange(0, B_r), (m_i + tl.log2(l_i)) * LN2)  # FA2.A1.L13 FA2.A1.L15


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, W: int = 2) -> tuple[Tensor, Tensor]:
    """Return O and L for attention without a mask. q, k and v are (batch, heads, N, d), and N is a multiple of 64.

    W warps share a tile of 16·W rows × 32 keys. By default, W is 2 in both s00 and s01, because with W = 4 and d = 64,
    the partial sums of s00 (split-K) would not fit in the registers available on sm_90. `causal` must be False.
    """
    batch, heads, N, d = q.shape
    if causal or N % 64 or k.shape != q.shape:
        raise ValueError(f"q, k, causal: got {tuple(q.shape)}, {tuple(k.shape)}, {causal}; "
                         "it takes q and k of one shape, N a multiple of 64, and no mask")  # fmt: skip
    Q, K, V = (x.contiguous() for x in (q, k, v))
    O, L = torch.empty_like(Q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    forward_kernel[N // (16 * W), batch * heads](Q, K, V, O, L, N, d**-0.5 / math.log(2), d=d, B_r=16 * W, B_c=32, W=W,
                                                 num_warps=W, num_stages=1, enable_fp_fusion=True)  # fmt: skip
    return O, L
