"""The kernel that assignment 5 breaks: tiled attention in NumPy, forward and backward, right as it stands here.

q, O, dO (heads, N_q, d); k, v (key heads, N_k, d); L (heads, N_q). Query head h reads key head h // group.
Causal: row r sees column c if c ≤ r + N_k − N_q. A row that sees no key has O = 0 and L = −inf.
Bugs are planted by replacing text.
"""

import numpy as np

B_R, B_C = 8, 4


def forward(q, k, v, causal=False, scale=None):
    """O and L."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tau = scale_of(scale, q)
    group = len(q) // len(k)
    O, L = np.full(q.shape, np.nan), np.full(q.shape[:2], np.nan)
    for h in range(len(q)):
        for first in range(0, q.shape[1], B_R):
            rows = slice(first, min(first + B_R, q.shape[1]))
            O[h, rows], L[h, rows] = row_block(q[h, rows], k[h // group], v[h // group], first, q.shape[1], causal, tau)
    return O, L


def row_block(q_i, k, v, first, N_q, causal, tau):
    """o_i and L_i of one row block."""
    row = first + np.arange(len(q_i))
    m, l, o = np.full(len(row), -np.inf), np.zeros(len(row)), np.zeros(q_i.shape)
    for j in column_blocks(row[-1], N_q, len(k), causal):
        k_j, v_j = padded(k, j), padded(v, j)
        s = np.where(seen(row, j, N_q, len(k), causal), tau * (q_i @ k_j.T), -np.inf)
        m_new = np.maximum(m, s.max(axis=1))
        p = np.exp(s - finite(m_new)[:, None])
        alpha = np.exp(m - finite(m_new))
        l = alpha * l + p.sum(axis=1)
        o = alpha[:, None] * o + p @ v_j
        m = m_new
    l_safe = np.where(l == 0, 1.0, l)
    return o / l_safe[:, None], m + np.log(l_safe)


def backward(q, k, v, O, L, dO, causal=False, scale=None):
    """dq, dk and dv."""
    q, k, v, dO = np.asarray(q), np.asarray(k), np.asarray(v), np.asarray(dO)
    tau = scale_of(scale, q)
    group = len(q) // len(k)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    D = (dO * O).sum(axis=2)
    for h in range(len(q)):
        g = h // group
        dk_h, dv_h = np.zeros(k[g].shape), np.zeros(v[g].shape)
        for first in range(0, q.shape[1], B_R):
            rows = slice(first, min(first + B_R, q.shape[1]))
            row = np.arange(rows.start, rows.stop)
            for j in column_blocks(row[-1], q.shape[1], k.shape[1], causal):
                k_j, v_j = padded(k[g], j), padded(v[g], j)
                visible = seen(row, j, q.shape[1], k.shape[1], causal)
                s = np.where(visible, tau * (q[h, rows] @ k_j.T), -np.inf)
                p = np.exp(s - finite(L[h, rows])[:, None])
                ds = p * (dO[h, rows] @ v_j.T - D[h, rows][:, None])
                n = len(k_j[: k.shape[1] - j])
                dq[h, rows] += tau * (ds @ k_j)
                dk_h[j : j + n] += tau * (ds.T @ q[h, rows])[:n]
                dv_h[j : j + n] += (p.T @ dO[h, rows])[:n]
        dk[g] += dk_h
        dv[g] += dv_h
    return dq, dk, dv


def scale_of(scale, q):
    """The scale as given; 1/√d where none is."""
    return 1 / np.sqrt(q.shape[-1]) if scale is None else scale


def column_blocks(last_row, N_q, N_k, causal):
    """Where the column blocks start that some row of a block sees."""
    end = min(N_k, max(0, last_row + 1 + N_k - N_q)) if causal else N_k
    return range(0, end, B_C)


def padded(x, j):
    """B_C rows of a tensor from row j on, with zeros behind its end."""
    block = np.zeros((B_C, x.shape[1]))
    block[: len(x[j : j + B_C])] = x[j : j + B_C]
    return block


def seen(row, j, N_q, N_k, causal):
    """True where a query may look: a key that exists, and is not in the future."""
    col = j + np.arange(B_C)[None, :]
    visible = np.broadcast_to(col < N_k, (len(row), B_C))
    return visible & (col <= row[:, None] + N_k - N_q) if causal else visible


def finite(m):
    """m, with 0 in the place of −inf."""
    return np.where(np.isneginf(m), 0.0, m)
