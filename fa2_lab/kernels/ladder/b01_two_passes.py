"""Rung b01, two passes: a second kernel, with one program per row block, accumulates dQ on chip.

S and dP are therefore computed twice. In return, no two programs add to the same element, and every sum is always
computed in the same order.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NEG_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr):
    """Load rows first:first + B of a head of X as a (B, d) tile, with zeros in place of rows at or beyond N."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    return tl.load(at, mask=first + row < N, other=0.0)


@triton.jit
def load_row_values(X, first, N, B: tl.constexpr):
    """Load entries first:first + B of X (a head's L or D) as (B, 1). Entries at or beyond N are set to 0."""
    row = first + tl.arange(0, B)
    return tl.load(X + row, mask=row < N, other=0.0)[:, None]  # (B, 1)


@triton.jit
def store_rows(X, x, first, N, B: tl.constexpr, d: tl.constexpr):
    """Store x (B, d) in rows first:first + B of a head of X. Rows at or beyond N do not exist and are skipped."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    tl.store(at, x.to(X.dtype.element_ty), mask=first + row < N)


@triton.jit
def p_and_ds(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL: tl.constexpr):
    """Return P and dS for the tile that starts at row i and key j, both of shape (B_r, B_c) and of q_i's dtype."""
    row, col = i + tl.arange(0, q_i.shape[0])[:, None], j + tl.arange(0, k_j.shape[0])[None, :]
    seen = (row < N_q) & (col < N_k) & (col <= row + N_k - N_q if CAUSAL else True)
    s_ij = tau * tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A2.L10
    power = tl.where(seen, (s_ij - L_i) * LOG2E, NEG_INF)  # −∞ makes P zero, even in a row without keys (L = −∞)
    p_ij = tl.exp2(power)  # (B_r, B_c)  FA2.A2.L11
    dp_ij = tl.dot(do_i, v_j.T)  # (B_r, B_c)  FA2.A2.L13
    ds_ij = p_ij * (dp_ij - D_i)  # (B_r, B_c)  FA2.A2.L14
    return p_ij.to(q_i.dtype), ds_ij.to(q_i.dtype)


@triton.jit
def D_kernel(O, dO, D, N_q, d: tl.constexpr, B_r: tl.constexpr):
    """Compute D = rowsum(dO ∘ O) for one row block. All tiles of the row block need this D."""
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    o_i = load_rows(O + head * N_q * d, i, N_q, B_r, d).to(tl.float32)
    do_i = load_rows(dO + head * N_q * d, i, N_q, B_r, d).to(tl.float32)
    D_i = tl.sum(do_i * o_i, 1)  # (B_r,)  FA2.A2.L4
    row = i + tl.arange(0, B_r)
    tl.store(D + head * N_q + row, D_i, mask=row < N_q)  # FA2.A2.L4


@triton.jit
def bwd_dkdv(Q, K, V, dO, L, D, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr, d: tl.constexpr,
             B_r: tl.constexpr, B_c: tl.constexpr):  # fmt: skip
    """Compute one column block's dK and dV on chip, looping over the row blocks that see any of its keys."""
    j, head = tl.program_id(0) * B_c, tl.program_id(1).to(tl.int64)
    Q, dO, L, D = Q + head * N_q * d, dO + head * N_q * d, L + head * N_q, D + head * N_q
    K, V, dK, dV = K + head * N_k * d, V + head * N_k * d, dK + head * N_k * d, dV + head * N_k * d
    k_j = load_rows(K, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
    v_j = load_rows(V, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
    dk_j = tl.zeros((B_c, d), tl.float32)  # FA2.A2.L7
    dv_j = tl.zeros((B_c, d), tl.float32)  # FA2.A2.L7
    first = tl.maximum(j + N_q - N_k, 0) // B_r * B_r if CAUSAL else 0
    for i in range(first, N_q, B_r):  # FA2.A2.L8
        q_i = load_rows(Q, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
        do_i = load_rows(dO, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
        L_i = load_row_values(L, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
        D_i = load_row_values(D, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
        p_ij, ds_ij = p_and_ds(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL)
        dv_j = tl.dot(p_ij.T, do_i, dv_j)  # (B_c, d)  FA2.A2.L12
        dk_j = tl.dot(ds_ij.T, q_i, dk_j)  # (B_c, d)  FA2.A2.L16
    store_rows(dK, tau * dk_j, j, N_k, B_c, d)  # FA2.A2.L18
    store_rows(dV, dv_j, j, N_k, B_c, d)  # FA2.A2.L18


@triton.jit
def bwd_dq(Q, K, V, dO, L, D, dQ, N_q, N_k, tau, CAUSAL: tl.constexpr, d: tl.constexpr, B_r: tl.constexpr,
           B_c: tl.constexpr):  # fmt: skip
    """Compute one row block's dQ on chip, looping over the column blocks with any key that the row block sees."""
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    Q, dO, L, D = Q + head * N_q * d, dO + head * N_q * d, L + head * N_q, D + head * N_q
    K, V, dQ = K + head * N_k * d, V + head * N_k * d, dQ + head * N_q * d
    q_i = load_rows(Q, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
    do_i = load_rows(dO, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
    L_i = load_row_values(L, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
    D_i = load_row_values(D, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
    dq_i = tl.zeros((B_r, d), tl.float32)
    last = tl.minimum(tl.maximum(i + B_r + N_k - N_q, 0), N_k) if CAUSAL else N_k
    for j in range(0, last, B_c):  # FA2.A2.L5
        k_j = load_rows(K, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
        v_j = load_rows(V, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
        _, ds_ij = p_and_ds(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL)
        dq_i = tl.dot(ds_ij, k_j, dq_i)  # (B_r, d)  FA2.A2.L15
    store_rows(dQ, tau * dq_i, i, N_q, B_r, d)


def backward(q: Tensor, k: Tensor, v: Tensor, O: Tensor, L: Tensor, dO: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Return dQ, dK and dV with the shapes and dtypes of q, k and v. O and L are the results of the forward pass."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    no_bf16 = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16  # Triton's interpreter cannot multiply bf16
    Q, K, V, O, dO = (x.to(torch.float32 if no_bf16 else q.dtype).contiguous() for x in (q, k, v, O, dO))
    L, D = L.contiguous(), torch.empty_like(L, memory_format=torch.contiguous_format)
    dQ = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dK, dV = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    rows, columns = triton.cdiv(N_q, 64), triton.cdiv(N_k, 64)
    sizes = dict(d=d, B_r=64, num_warps=4, enable_fp_fusion=True)
    D_kernel[rows, batch * heads](O, dO, D, N_q, **sizes)
    bwd_dkdv[columns, batch * heads](Q, K, V, dO, L, D, dK, dV, N_q, N_k, d**-0.5, causal, B_c=64, **sizes)
    bwd_dq[rows, batch * heads](Q, K, V, dO, L, D, dQ, N_q, N_k, d**-0.5, causal, B_c=64, **sizes)
    return dQ, dK, dV
