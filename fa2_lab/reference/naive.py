"""Standard attention, which computes S, P and O one after another and stores S and P at their full size N_q × N_k.

This module also contains the forward and backward passes from appendices B.1 and B.2 of the FA1 paper. They need only
O(N) extra memory but recompute every entry of P whenever it is needed.
"""

import numpy as np

from fa2_lab.reference import checks
from fa2_lab.reference.dropout import NO_DROPOUT, Dropout, dropped
from fa2_lab.reference.online_softmax import finite, nonzero
from fa2_lab.reference.scores import (
    NO_SCORE_OPTIONS,
    ScoreOptions,
    append_sink,
    transform_scores,
    transform_scores_backward,
)
from fa2_lab.tiles import NO_MASK, Mask, Tiling
from fa2_lab.trace import UNWATCHED, Trace


def safe_softmax(S: np.ndarray) -> np.ndarray:
    """Return exp(S) / Σ exp(S) row by row, after subtracting the row maximum. A row of −∞ becomes a row of zeros."""
    e = np.exp(S - finite(S.max(axis=-1, keepdims=True)))
    return e / nonzero(e.sum(axis=-1, keepdims=True))


def logsumexp(S: np.ndarray) -> np.ndarray:
    """Return the log-sum-exp of every row of S, as a natural logarithm. A row of −∞ gives −∞."""
    m = S.max(axis=-1)
    return m + np.log(nonzero(np.exp(S - finite(m)[..., None]).sum(axis=-1)))


def softmax_backward(P: np.ndarray, dP: np.ndarray) -> np.ndarray:
    """Return dS = P ∘ (dP − D), the gradient of the scores before the softmax.

    Each row of dS is a row of dP times the Jacobian of its softmax, diag(p) − p pᵀ. The Jacobian is never stored.
    """
    return P * (dP - D_from_probabilities(P, dP)[:, None])


def D_from_probabilities(P: np.ndarray, dP: np.ndarray) -> np.ndarray:
    """Return D_i = Σ_j P_ij dP_ij for every row i. Each sum has N_k terms."""
    return (P * dP).sum(axis=1)


def D_from_output(dO: np.ndarray, O: np.ndarray) -> np.ndarray:
    """Return D_i = do_i · o_i for every row i. This dot product equals Σ_j P_ij dP_ij, but it has only d terms."""
    return (dO * O).sum(axis=1)


def forward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    *,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute standard attention for one head. Return O (N_q, d) and P (N_q, N_k), which the backward pass needs."""
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    whole = Tiling(len(Q), len(K), len(Q), len(K), mask)
    z = dropout.z(whole.rows(0), whole.cols(0))
    S, P = np.empty((len(Q), len(K))), np.empty((len(Q), len(K)))
    Q, K, V, S, P, O = trace.hbm(Q=Q, K=K, V=V, S=S, P=P, O=np.empty_like(Q))
    S[:] = tau * (Q[:] @ K[:].T)  # (N_q, N_k)
    s = whole.apply_mask(transform_scores(S[:], score_options), 0, 0)
    P[:] = safe_softmax(append_sink(s, score_options.sink))[:, : len(K)]  # drop the sink's column: a sink has no value
    O[:] = dropped(P[:], z) @ V[:]  # (N_q, d)
    return np.asarray(O), np.asarray(P)


def backward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    P: np.ndarray,
    dO: np.ndarray,
    *,
    tau: float | None = None,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
    dropout: Dropout = NO_DROPOUT,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run Algorithm 3 of FA1 for one head. Return dQ, dK and dV, given P. dP and dS are also written to HBM."""
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, dropout, score_options)
    P = checks.same_shape("P", P, (len(Q), len(K)), "(N_q, N_k)")
    (dO,) = checks.shaped_like_q(Q, dO=dO)
    z = dropout.z(slice(0, len(Q)), slice(0, len(K)))
    Q, K, V, P, dO, dP, dS = trace.hbm(Q=Q, K=K, V=V, P=P, dO=dO, dP=np.empty_like(P), dS=np.empty_like(P))
    dQ, dK, dV = trace.hbm(dQ=np.empty(Q.shape), dK=np.empty(K.shape), dV=np.empty(V.shape))
    dV[:] = dropped(P[:], z).T @ dO[:]  # FA1.A3.L1  (N_k, d)
    dP[:] = dropped(dO[:] @ V[:].T, z)  # FA1.A3.L2  (N_q, N_k)
    dS[:] = softmax_backward(P[:], dP[:])  # FA1.A3.L3  (N_q, N_k)
    if score_options != NO_SCORE_OPTIONS:
        dS[:] = transform_scores_backward(dS[:], transform_scores(tau * (Q[:] @ K[:].T), score_options), score_options)
    dQ[:] = tau * (dS[:] @ K[:])  # FA1.A3.L4  (N_q, d)
    dK[:] = tau * (dS[:].T @ Q[:])  # FA1.A3.L5  (N_k, d)
    return np.asarray(dQ), np.asarray(dK), np.asarray(dV)  # FA1.A3.L6


def forward_linear_memory(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    *,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
) -> tuple[np.ndarray, np.ndarray]:
    """Run the forward pass of FA1's appendix B.1 for one head, one row at a time. Compute L, then O, and return (O, L).

    At most one row of scores is stored at any time.
    """
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, NO_DROPOUT, score_options)
    row_of = Tiling(len(Q), len(K), 1, len(K), mask)
    L, O = np.empty(len(Q)), np.empty_like(Q)
    for i, q_i in enumerate(Q):  # the appendix's equation (1), in logarithmic form
        s = row_of.apply_mask(transform_scores(tau * (K @ q_i), score_options)[None, :], i, 0)[0]
        L[i] = logsumexp(append_sink(s, score_options.sink))
    for i, q_i in enumerate(Q):  # equation (2)
        s = row_of.apply_mask(transform_scores(tau * (K @ q_i), score_options)[None, :], i, 0)[0]
        O[i] = np.exp(s - finite(L[i])) @ V
    return O, L


def backward_linear_memory(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    O: np.ndarray,
    L: np.ndarray,
    dO: np.ndarray,
    *,
    tau: float | None = None,
    mask: Mask = NO_MASK,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run the backward pass of FA1's appendix B.2 for one head, one row or column at a time. Return dQ, dK and dV.

    P is recomputed from L, and at most one row or column of P is stored at any time.
    """
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, NO_DROPOUT, score_options)
    O, dO = checks.shaped_like_q(Q, O=O, dO=dO)
    (L,) = checks.one_per_row(Q, L=L)
    row_of = Tiling(len(Q), len(K), 1, len(K), mask)
    col_of = Tiling(len(Q), len(K), len(Q), 1, mask)
    dQ, dK, dV = np.empty_like(Q), np.empty_like(K), np.empty_like(V)
    D = D_from_output(dO, O)  # equation (4)
    for i, q_i in enumerate(Q):
        s = transform_scores(tau * (K @ q_i), score_options)
        p = np.exp(row_of.apply_mask(s[None, :], i, 0)[0] - finite(L[i]))  # (N_k,)
        dQ[i] = tau * transform_scores_backward(p * (V @ dO[i] - D[i]), s, score_options) @ K  # equation (5)
    for j, k_j in enumerate(K):
        s = transform_scores(tau * (Q @ k_j), score_options)
        p = np.exp(col_of.apply_mask(s[:, None], 0, j)[:, 0] - finite(L))  # (N_q,)
        dV[j] = p @ dO  # equation (3)
        dK[j] = tau * transform_scores_backward(p * (dO @ V[j] - D), s, score_options) @ Q  # equation (6)
    return dQ, dK, dV
