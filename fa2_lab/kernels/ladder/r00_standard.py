"""Rung 00, standard: three kernels compute S = τ Q Kᵀ, P = softmax(S) and O = P V, with S and P in HBM."""

import torch
import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-1.0e30)  # smallest value of m; −∞ would give −∞ − (−∞) = NaN in rows without keys


@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr):
    """Load rows first:first + B of a head of X as a (B, d) tile, with zeros in place of rows at or beyond N."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    return tl.load(at, mask=first + row < N, other=0.0)


@triton.jit
def keys_seen(row, N_q, N_k, CAUSAL: tl.constexpr):
    """Return how many keys each row sees, counting from key 0. If CAUSAL, the last row sees all N_k keys."""
    return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row


@triton.jit
def scores_kernel(Q, K, S, N_q, N_k, tau, CAUSAL: tl.constexpr, d: tl.constexpr, B_r: tl.constexpr,
                  B_c: tl.constexpr):  # fmt: skip
    """Compute one tile of the scores S and store it in HBM. Masked scores are set to −∞."""
    i, j, head = tl.program_id(0) * B_r, tl.program_id(1) * B_c, tl.program_id(2).to(tl.int64)
    q_i = load_rows(Q + head * N_q * d, i, N_q, B_r, d)  # (B_r, d)
    k_j = load_rows(K + head * N_k * d, j, N_k, B_c, d)  # (B_c, d)
    s_ij = tau * tl.dot(q_i, k_j.T)  # (B_r, B_c)
    row, col = i + tl.arange(0, B_r)[:, None], j + tl.arange(0, B_c)[None, :]
    s_ij = tl.where(col < keys_seen(row, N_q, N_k, CAUSAL), s_ij, NEG_INF)
    tl.store(S + (head * N_q + row) * N_k + col, s_ij, mask=(row < N_q) & (col < N_k))


@triton.jit
def softmax_kernel(S, P, L, N_q, N_k, WIDTH: tl.constexpr):
    """Compute a row of P and the row's entry of L from a row of S. WIDTH is a power of two that is at least N_k."""
    row, col = tl.program_id(1).to(tl.int64) * N_q + tl.program_id(0), tl.arange(0, WIDTH)
    s = tl.load(S + row * N_k + col, mask=col < N_k, other=NEG_INF)  # (WIDTH,)
    m = tl.maximum(tl.max(s, 0), LOWEST)
    p = tl.exp(s - m)  # (WIDTH,)
    l = tl.sum(p, 0)
    empty = l == 0.0  # a row that sees no key gets P = 0 and L = −∞
    l = tl.where(empty, 1.0, l)
    tl.store(P + row * N_k + col, (p / l).to(P.dtype.element_ty), mask=col < N_k)
    tl.store(L + row, tl.where(empty, NEG_INF, m + tl.log(l)))


@triton.jit
def output_kernel(P, V, O, N_q, N_k, d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    """Compute one row block of O = P V, reading P and V from HBM."""
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    row = i + tl.arange(0, B_r)[:, None]
    o_i = tl.zeros((B_r, d), tl.float32)
    for j in range(0, N_k, B_c):
        col = j + tl.arange(0, B_c)[None, :]
        real = (row < N_q) & (col < N_k)
        p_ij = tl.load(P + (head * N_q + row) * N_k + col, mask=real, other=0.0)  # (B_r, B_c)
        v_j = load_rows(V + head * N_k * d, j, N_k, B_c, d)  # (B_c, d)
        o_i += tl.dot(p_ij, v_j)  # (B_r, d)
    at = (head * N_q + row) * d + tl.arange(0, d)[None, :]
    tl.store(O + at, o_i.to(O.dtype.element_ty), mask=row < N_q)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O, shaped like q, and L (batch, heads, N_q), the natural log-sum-exp of each row's scores."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    no_bf16 = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16  # Triton's interpreter cannot multiply bf16
    Q, K, V = (x.to(torch.float32 if no_bf16 else q.dtype).contiguous() for x in (q, k, v))
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    L = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    S = torch.empty((batch, heads, N_q, N_k), dtype=torch.float32, device=q.device)
    P = torch.empty_like(S, dtype=Q.dtype)
    T_r, T_c = triton.cdiv(N_q, 64), triton.cdiv(N_k, 64)
    fused = dict(enable_fp_fusion=True)  # lets the compiler fuse a multiplication and an addition into an FMA
    tile = dict(d=d, B_r=64, B_c=64, num_warps=4, num_stages=1, **fused)
    scores_kernel[(T_r, T_c, batch * heads)](Q, K, S, N_q, N_k, d**-0.5, CAUSAL=causal, **tile)
    softmax_kernel[(N_q, batch * heads)](S, P, L, N_q, N_k, WIDTH=triton.next_power_of_2(N_k), **fused)
    output_kernel[(T_r, batch * heads)](P, V, O, N_q, N_k, **tile)
    return O, L
