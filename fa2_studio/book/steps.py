"""The steps that readers of chapters 03 and 05 write. Later cells call these functions to avoid showing a solution."""

import numpy as np


def fa1_step(m: np.ndarray, l: np.ndarray, o: np.ndarray, s: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the new m, l and o of a row block after one step of FA1. o is divided by l before and after the step."""
    m_tile = s.max(axis=1)  # FA1.A2.L12  (B_r,): of this tile alone
    p = np.exp(s - m_tile[:, None])  # FA1.A2.L12  (B_r, B_c)
    m_new = np.maximum(m, m_tile)  # FA1.A2.L13  (B_r,)
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)  # FA1.A2.L13  (B_r,)
    l_new = alpha * l + beta * p.sum(axis=1)  # FA1.A2.L13  (B_r,)
    o_new = (alpha * l)[:, None] * o + beta[:, None] * (p @ v)  # FA1.A2.L15  (B_r, d)
    return m_new, l_new, o_new / l_new[:, None]


def tile_gradients(
    s: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, L: np.ndarray, D: np.ndarray, tau: float
) -> tuple[np.ndarray, ...]:
    """Return one tile's contributions to dQ, dK and dV."""
    L = np.where(np.isneginf(L), 0, L)  # a row without keys, as in chapter 04
    p = np.exp(s - L[:, None])  # FA2.A2.L11  (B_r, B_c)
    dp = do @ v.T  # FA2.A2.L13  (B_r, B_c)
    ds = p * (dp - D[:, None])  # FA2.A2.L14  (B_r, B_c)
    return tau * (ds @ k), tau * (ds.T @ q), p.T @ do  # FA2.A2.L15 FA2.A2.L16 FA2.A2.L12
