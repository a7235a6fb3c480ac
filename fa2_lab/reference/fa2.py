"""FlashAttention-2 (FA2), with independent query blocks in the outer loop and a single division per row.

L is the only row statistic saved for the backward pass. Tiles without a visible entry are skipped, and only tiles cut
by the mask are masked. The softmax step is written as in fa1.py, so the two files differ only where the two papers do.
"""

import numpy as np

from fa2_lab.reference import checks
from fa2_lab.reference.dropout import NO_DROPOUT, Dropout, dropped
from fa2_lab.reference.online_softmax import SoftmaxState, finite, initial_state
from fa2_lab.reference.scores import NO_SCORE_OPTIONS, ScoreOptions, transform_scores, transform_scores_backward
from fa2_lab.tiles import NO_MASK, Mask, Tiling, cdiv, whole_number
from fa2_lab.trace import UNWATCHED, Trace


def forward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    *,
    B_r: int,
    B_c: int,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray]:
    """Run Algorithm 1 of FA2 for one head and return O (N_q, d) and the log-sum-exp L (N_q,)."""
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    drop = dropout.drop
    tiling = Tiling(len(Q), len(K), B_r, B_c, mask)  # FA2.A1.L1 FA2.A1.L2
    Q, K, V, O, L = trace.hbm(Q=Q, K=K, V=V, O=np.empty_like(Q), L=np.empty(len(Q)))
    m_0, l_0 = initial_state(score_options.sink)
    for i in trace.parallel("i", range(tiling.T_r)):  # FA2.A1.L3
        rows = tiling.rows(i)
        q_i = Q[rows]  # FA2.A1.L4  (B_r, d)
        o_i, l_i, m_i = np.zeros(q_i.shape), np.full(len(q_i), l_0), np.full(len(q_i), m_0)  # FA2.A1.L5
        for j in trace.serial("j", tiling.visited_cols(i)):  # FA2.A1.L6
            cols = tiling.cols(j)
            k_j, v_j = K[cols], V[cols]  # FA2.A1.L7  (B_c, d)
            s_ij = tau * (q_i @ k_j.T)  # FA2.A1.L8  (B_r, B_c)
            s_ij = tiling.apply_mask(transform_scores(s_ij, score_options), i, j)
            m_ij = s_ij.max(axis=1)  # FA2.A1.L9  (B_r,)
            m_new = np.maximum(m_i, m_ij)  # FA2.A1.L9  (B_r,)
            p_ij = np.exp(s_ij - finite(m_new)[:, None])  # FA2.A1.L9  (B_r, B_c)
            l_ij = p_ij.sum(axis=1)  # FA2.A1.L9  (B_r,)
            alpha = np.exp(m_i - finite(m_new))  # FA2.A1.L9  (B_r,): 1 unless the maximum grows
            l_new = alpha * l_i + l_ij  # FA2.A1.L9  (B_r,)
            p_ij = drop(p_ij, rows, cols)
            o_i = alpha[:, None] * o_i + p_ij @ v_j  # FA2.A1.L10  (B_r, d)
            l_i, m_i = l_new, m_new  # FA2.A1.L10
            trace.hold(q_i, k_j, v_j, o_i, l_i, m_i, s_ij)
        l_i = np.where(l_i == 0, 1, l_i)  # a row that has seen no key is divided by 1
        o_i = (1 / l_i)[:, None] * o_i  # FA2.A1.L12  (B_r, d)
        L_i = m_i + np.log(l_i)  # FA2.A1.L13  (B_r,)
        O[rows] = o_i  # FA2.A1.L14
        L[rows] = L_i  # FA2.A1.L15
    return np.asarray(O), np.asarray(L)  # FA2.A1.L17


def backward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    O: np.ndarray,
    L: np.ndarray,
    dO: np.ndarray,
    *,
    B_r: int,
    B_c: int,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run Algorithm 2 of FA2 for one head and return dQ, dK and dV. Column blocks are independent except for dQ.

    A sink in `score_options` is ignored, because L already includes it. scores.sink_backward() computes its gradient.
    """
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    O, dO = checks.shaped_like_q(Q, O=O, dO=dO)
    (L,) = checks.one_per_row(Q, L=L)
    z = dropout.z
    tiling = Tiling(len(Q), len(K), B_r, B_c, mask)  # FA2.A2.L1 FA2.A2.L2
    Q, K, V, O, dO, L, D = trace.hbm(Q=Q, K=K, V=V, O=O, dO=dO, L=L, D=np.empty(len(Q)))
    dQ, dK, dV = trace.hbm(dQ=np.empty(Q.shape), dK=np.empty(K.shape), dV=np.empty(V.shape))
    dQ[:] = 0  # FA2.A2.L3
    D[:] = (dO[:] * O[:]).sum(axis=1)  # FA2.A2.L4  (N_q,)
    for j in trace.parallel("j", range(tiling.T_c)):  # FA2.A2.L5
        cols = tiling.cols(j)
        k_j, v_j = K[cols], V[cols]  # FA2.A2.L6  (B_c, d)
        dk_j, dv_j = np.zeros_like(k_j), np.zeros_like(v_j)  # FA2.A2.L7  (B_c, d)
        for i in trace.serial("i", tiling.visited_rows(j)):  # FA2.A2.L8
            rows = tiling.rows(i)
            q_i, do_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]  # FA2.A2.L9
            s_ij = tau * (q_i @ k_j.T)  # FA2.A2.L10  (B_r, B_c)
            c_ij = transform_scores(s_ij, score_options)
            s_ij = tiling.apply_mask(c_ij, i, j)
            p_ij = np.exp(s_ij - finite(L_i)[:, None])  # FA2.A2.L11  (B_r, B_c)
            z_ij = z(rows, cols)
            p_dropped = dropped(p_ij, z_ij)
            dv_j = dv_j + p_dropped.T @ do_i  # FA2.A2.L12  (B_c, d)
            dp_dropped = do_i @ v_j.T  # FA2.A2.L13  (B_r, B_c)
            dp_ij = dropped(dp_dropped, z_ij)  # FA2.A2.L13
            ds_ij = p_ij * (dp_ij - D_i[:, None])  # FA2.A2.L14  (B_r, B_c)
            ds_ij = transform_scores_backward(ds_ij, c_ij, score_options)
            dq_i = dQ[rows]  # FA2.A2.L15  (B_r, d)
            dQ[rows] = dq_i + tau * (ds_ij @ k_j)  # FA2.A2.L15
            dk_j = dk_j + tau * (ds_ij.T @ q_i)  # FA2.A2.L16  (B_c, d)
            trace.hold(q_i, k_j, v_j, do_i, dq_i, dk_j, dv_j, L_i, D_i, p_ij, ds_ij)
        dK[cols], dV[cols] = dk_j, dv_j  # FA2.A2.L18
    return np.asarray(dQ), np.asarray(dK), np.asarray(dV)  # FA2.A2.L20


def forward_split_keys(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    *,
    splits: int,
    B_r: int,
    B_c: int,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute O and L of one head, with the keys of each row block split among several workers.

    The keys are cut into `splits` shares of consecutive column blocks. Each worker computes the partial result (O, L)
    of one share. Once all shares are done, the partial results are merged. The split-KV decode kernel instead assigns
    tiles to workers round-robin, which gives the same result up to rounding.
    """
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    splits = whole_number("splits", splits, low=1)
    tiling = Tiling(len(Q), len(K), B_r, B_c, mask)
    Q, K, V, O, L = trace.hbm(Q=Q, K=K, V=V, O=np.empty_like(Q), L=np.empty(len(Q)))
    O_part, L_part = trace.hbm(O_part=np.empty((splits, *Q.shape)), L_part=np.empty((splits, len(Q))))
    for i in trace.parallel("i", range(tiling.T_r)):
        rows, shares = tiling.rows(i), _shares(tiling.visited_cols(i), splits)
        for w in trace.parallel("w", range(splits)):
            q_i = Q[rows]
            state = SoftmaxState.empty(*q_i.shape)
            for j in trace.serial("j", shares[w]):
                cols = tiling.cols(j)
                s_ij = tiling.apply_mask(transform_scores(tau * (q_i @ K[cols].T), score_options), i, j)
                state = state.update(s_ij, V[cols], dropout.z(rows, cols))
            O_part[w, rows], L_part[w, rows] = state.finalize()
        sink = score_options.sink  # the sink is added here, because no partial result includes it
        state = SoftmaxState.empty(rows.stop - rows.start, Q.shape[1], sink)
        for w in range(splits):
            state = state.merge(SoftmaxState.from_output(O_part[w, rows], L_part[w, rows]))
        O[rows], L[rows] = state.finalize()
    return np.asarray(O), np.asarray(L)


def _shares(blocks: list[int], splits: int) -> list[list[int]]:
    """Divide a list of blocks into `splits` consecutive shares, one per worker."""
    size = cdiv(len(blocks), splits) or 1
    return [blocks[w * size : (w + 1) * size] for w in range(splits)]
