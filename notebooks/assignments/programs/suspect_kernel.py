import triton
import triton.language as tl


@triton.jit
def kernel(Q, K, V, O, L, N_q, N_k, tau, CAUSAL: tl.constexpr,
           B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    """Heads lie one after the other: program (i, h) has row block i of head h."""
    first, head, e = tl.program_id(0) * B_r, tl.program_id(1), tl.arange(0, d)
    row = first + tl.arange(0, B_r)
    at_row, real = (head * N_q + row[:, None]) * d + e[None, :], (row < N_q)[:, None]
    q = tl.load(Q + at_row, mask=real, other=0.0)
    m = tl.full((B_r,), -1e30, tl.float32)
    l = tl.zeros((B_r,), tl.float32)
    o = tl.zeros((B_r, d), tl.float32)
    end = N_k
    if CAUSAL:
        end = tl.minimum(N_k, tl.maximum(0, first + B_r + N_k - N_q))
    for j in range(0, end, B_c):
        col = j + tl.arange(0, B_c)
        there = (col < N_k)[:, None]
        at_col = (head * N_k + col[:, None]) * d + e[None, :]
        k = tl.load(K + at_col, mask=there, other=0.0)
        v = tl.load(V + at_col, mask=there, other=0.0)
        seen = real & (col < N_k)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
        s = tl.where(seen, tau * tl.dot(q, k.T, input_precision="ieee"), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = alpha * l + tl.sum(p, 1)
        o = alpha[:, None] * o + tl.dot(p, v, input_precision="ieee")
        m = m_new
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    tl.store(O + at_row, o / l[:, None], mask=real)
    L_i = tl.where(empty, float("-inf"), m + tl.log(l))
    tl.store(L + head * N_q + row, L_i, mask=row < N_q)
