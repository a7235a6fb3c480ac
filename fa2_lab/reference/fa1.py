"""FlashAttention (FA1), with key blocks in the outer loop, query blocks in the inner loop, and the row state in HBM.

As in the paper's algorithms, every tile is computed, regardless of the mask. The softmax step is written as in fa2.py,
so the two files differ only where the two papers do.
"""

import numpy as np

from fa2_lab.reference import checks
from fa2_lab.reference.dropout import NO_DROPOUT, Dropout, dropped
from fa2_lab.reference.online_softmax import finite, initial_state, nonzero
from fa2_lab.reference.scores import NO_SCORE_OPTIONS, ScoreOptions, transform_scores, transform_scores_backward
from fa2_lab.tiles import NO_MASK, Mask, Tiling, cdiv, whole_number
from fa2_lab.trace import UNWATCHED, Trace


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """Return (B_r, B_c) for an on-chip memory of M elements, chosen so that four blocks of B_c × d elements fit."""
    B_c = cdiv(whole_number("M", M, low=1), 4 * whole_number("d", d, low=1))
    return min(B_c, d), B_c


def forward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    *,
    M: int | None = None,
    B_r: int | None = None,
    B_c: int | None = None,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run Algorithm 2 of FA1 for one head. Return O (N_q, d), the row sums l (N_q,) and the row maxima m (N_q,).

    Pass either the block sizes B_r and B_c, or the number M of elements that fit on chip. The block sizes are then
    computed from M. `dropout` holds the generator's state R, which the backward pass also needs.
    """
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    drop = dropout.drop  # FA1.A2.L1
    B_r, B_c = _blocks(M, B_r, B_c, Q.shape[1])  # FA1.A2.L2
    tiling = Tiling(len(Q), len(K), B_r, B_c, mask)  # FA1.A2.L4 FA1.A2.L5
    Q, K, V, O = trace.hbm(Q=Q, K=K, V=V, O=np.empty_like(Q))
    l, m = trace.hbm(l=np.empty(len(Q)), m=np.empty(len(Q)))
    m_0, l_0 = initial_state(score_options.sink)
    O[:], l[:], m[:] = 0, l_0, m_0  # FA1.A2.L3
    for j in trace.serial("j", range(tiling.T_c)):  # FA1.A2.L6
        cols = tiling.cols(j)
        k_j, v_j = K[cols], V[cols]  # FA1.A2.L7  (B_c, d)
        for i in trace.serial("i", range(tiling.T_r)):  # FA1.A2.L8
            rows = tiling.rows(i)
            q_i, o_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]  # FA1.A2.L9
            s_ij = tau * (q_i @ k_j.T)  # FA1.A2.L10  (B_r, B_c)
            s_ij = tiling.apply_mask(transform_scores(s_ij, score_options), i, j)  # FA1.A2.L11
            m_ij = s_ij.max(axis=1)  # FA1.A2.L12  (B_r,)
            m_new = np.maximum(m_i, m_ij)  # FA1.A2.L13  (B_r,)
            p_ij = np.exp(s_ij - finite(m_ij)[:, None])  # FA1.A2.L12  (B_r, B_c)
            l_ij = p_ij.sum(axis=1)  # FA1.A2.L12  (B_r,)
            alpha = np.exp(m_i - finite(m_new))  # FA1.A2.L13  (B_r,)
            beta = np.exp(m_ij - finite(m_new))  # FA1.A2.L13  (B_r,)
            l_new = alpha * l_i + beta * l_ij  # FA1.A2.L13  (B_r,)
            p_ij = drop(p_ij, rows, cols)  # FA1.A2.L14
            r = 1 / np.where(l_new == 0, 1, l_new)  # FA1.A2.L15  (B_r,): a row that has seen no key is divided by 1
            o_i = (r * alpha * l_i)[:, None] * o_i + (r * beta)[:, None] * (p_ij @ v_j)  # FA1.A2.L15
            O[rows] = o_i  # FA1.A2.L15
            l_i, m_i = l_new, m_new  # FA1.A2.L16
            l[rows], m[rows] = l_i, m_i  # FA1.A2.L16
            trace.hold(q_i, k_j, v_j, o_i, l_i, m_i, s_ij)
    return np.asarray(O), np.asarray(l), np.asarray(m)  # FA1.A2.L19


def backward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    O: np.ndarray,
    l: np.ndarray,
    m: np.ndarray,
    dO: np.ndarray,
    *,
    M: int | None = None,
    B_r: int | None = None,
    B_c: int | None = None,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run Algorithm 4 of FA1 for one head. Return dQ, dK and dV, given O, l, m and the options of the forward pass."""
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    O, dO = checks.shaped_like_q(Q, O=O, dO=dO)
    l, m = checks.one_per_row(Q, l=l, m=m)
    z = dropout.z  # FA1.A4.L1
    B_r, B_c = _blocks(M, B_r, B_c, Q.shape[1])  # FA1.A4.L2
    tiling = Tiling(len(Q), len(K), B_r, B_c, mask)  # FA1.A4.L3 FA1.A4.L4
    Q, K, V, O, dO, l, m = trace.hbm(Q=Q, K=K, V=V, O=O, dO=dO, l=l, m=m)
    dQ, dK, dV = trace.hbm(dQ=np.empty(Q.shape), dK=np.empty(K.shape), dV=np.empty(V.shape))
    dQ[:], dK[:], dV[:] = 0, 0, 0  # FA1.A4.L5
    for j in trace.serial("j", range(tiling.T_c)):  # FA1.A4.L6
        cols = tiling.cols(j)
        k_j, v_j = K[cols], V[cols]  # FA1.A4.L7  (B_c, d)
        dk_j, dv_j = np.zeros_like(k_j), np.zeros_like(v_j)  # FA1.A4.L8  (B_c, d)
        for i in trace.serial("i", range(tiling.T_r)):  # FA1.A4.L9
            rows = tiling.rows(i)
            q_i, o_i, do_i, dq_i = Q[rows], O[rows], dO[rows], dQ[rows]  # FA1.A4.L10  (B_r, d)
            l_i, m_i = l[rows], m[rows]  # FA1.A4.L10  (B_r,)
            s_ij = tau * (q_i @ k_j.T)  # FA1.A4.L11  (B_r, B_c)
            c_ij = transform_scores(s_ij, score_options)
            s_ij = tiling.apply_mask(c_ij, i, j)  # FA1.A4.L12
            p_ij = (1 / nonzero(l_i))[:, None] * np.exp(s_ij - finite(m_i)[:, None])  # FA1.A4.L13  (B_r, B_c)
            z_ij = z(rows, cols)  # FA1.A4.L14  (B_r, B_c)
            p_dropped = dropped(p_ij, z_ij)  # FA1.A4.L15
            dv_j = dv_j + p_dropped.T @ do_i  # FA1.A4.L16  (B_c, d)
            dp_dropped = do_i @ v_j.T  # FA1.A4.L17  (B_r, B_c)
            dp_ij = dropped(dp_dropped, z_ij)  # FA1.A4.L18
            D_i = (do_i * o_i).sum(axis=1)  # FA1.A4.L19  (B_r,)
            ds_ij = p_ij * (dp_ij - D_i[:, None])  # FA1.A4.L20  (B_r, B_c)
            ds_ij = transform_scores_backward(ds_ij, c_ij, score_options)
            dQ[rows] = dq_i + tau * (ds_ij @ k_j)  # FA1.A4.L21  (B_r, d)
            dk_j = dk_j + tau * (ds_ij.T @ q_i)  # FA1.A4.L22  (B_c, d)
            trace.hold(q_i, k_j, v_j, o_i, do_i, dq_i, dk_j, dv_j, l_i, m_i, D_i, p_ij, ds_ij)
        dK[cols], dV[cols] = dk_j, dv_j  # FA1.A4.L24
    return np.asarray(dQ), np.asarray(dK), np.asarray(dV)  # FA1.A4.L26


def _blocks(M: int | None, B_r: int | None, B_c: int | None, d: int) -> tuple[int, int]:
    """Return the block sizes (B_r, B_c), as given or as computed for an on-chip memory of M elements."""
    if (M is None) == (B_r is None and B_c is None) or (B_r is None) != (B_c is None):
        raise ValueError(f"M, B_r, B_c: got M={M}, B_r={B_r}, B_c={B_c}; it takes M alone, or B_r and B_c")
    if M is not None:
        return block_sizes(M, d)
    assert B_r is not None and B_c is not None  # as checked above
    return B_r, B_c
