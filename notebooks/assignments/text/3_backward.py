# %% [markdown]
# # Assignment 3 · Backward
#
# **How do gradients come back without the score matrix?** You write Algorithm 2 of the FlashAttention-2 paper. It
# recomputes P from L, tile by tile, and accumulates three gradients from it. As printed, the paper leaves out the scale
# τ and gives D the wrong shape, as appendix B explains.
#
# | step | points |
# | --- | --- |
# | 1. `row_dots`: D | 1 |
# | 2. `tile_gradients`: one tile | 4 |
# | 3. `backward`: all tiles, from HBM and back | 4 |
# | 4. the meter: elements moved | 2 |
# | 5. the meter: operations | 2 |
# | 6. `grouped`: query heads that share a key head | 3 |
# | 7. `dropped`: one tile with dropout | 2 |
#
# *Time: 5 to 6 hours. Before this: chapter 05, assignment 2. Hardware: any laptop, NumPy alone.*
#
# **How it is graded.** Grading works as `README.md` explains, and the meter works as in assignment 2. All of `fa2_lab`
# is off limits, and so is ready-made attention.

# %% locked="setup"
import numpy as np

from checks import gradients as check

# %% [markdown]
# ## 1. D
#
# The gradient of a softmax row needs one number, `D_i = Σ_j P_ij dP_ij`. You can also compute this number without P, as
# the dot product of a row of `dO` and a row of `O`, which both have shape `(N, d)`. Which rows are they?

# %% solution="row_dots"
def row_dots(dO, O):
    """Return D, one number for each row."""
    ### BEGIN SOLUTION
    return (dO * O).sum(axis=1)

# %% test="row_dots" points=1
report = check.row_dots(row_dots, seed=0)
report += check.row_dots(row_dots, seed=301)

# %% [markdown]
# ## 2. One tile
#
# `q_i`, `do_i` are `(b, d)`, `k_j`, `v_j` are `(c, d)`, and `L_i`, `D_i` are `(b,)`. `seen` `(b, c)` is True where a
# query sees a key, or it is None if all queries see all keys. Return this tile's parts of `dq`, `dk` and `dv`. With τ
# for `tau`, the chain rule gives
#
# s = τ q kᵀ, p = exp(s − L), dv = pᵀ do, dp = do vᵀ, ds = p ∘ (dp − D), and two more lines, which you derive.
#
# A row that saw no key has L = −∞.

# %% solution="tile_gradients"
def tile_gradients(q_i, k_j, v_j, do_i, L_i, D_i, seen, tau):
    """Return (dq, dk, dv) of one tile."""
    ### BEGIN SOLUTION
    s = tau * (q_i @ k_j.T)
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    p = np.exp(s - np.where(np.isneginf(L_i), 0.0, L_i)[:, None])
    ds = p * (do_i @ v_j.T - D_i[:, None])
    return tau * (ds @ k_j), tau * (ds.T @ q_i), p.T @ do_i

# %% test="tile_gradients" points=4
report = check.tile_gradients(tile_gradients, seed=0)
report += check.tile_gradients(tile_gradients, seed=302)

# %% [markdown]
# ## 3. All tiles
#
# The outer loop runs over column blocks, and the inner loop runs over row blocks. A column block keeps its `dk_j` and
# `dv_j` on chip while the queries pass by, and stores them once. `dQ` cannot stay on chip, so every tile loads its rows
# of `dQ`, adds to them, and stores them. The outputs `D`, `dQ`, `dK`, `dV` start as NaN in HBM. The mask is the same as
# in assignment 2, so row `r` sees column `c` if `c ≤ r + N_k − N_q`, and a tile is skipped if no row sees it.

# %% solution="backward"
def backward(Q, K, V, O, L, dO, D, dQ, dK, dV, B_r, B_c, tau, causal):
    """Fill dQ, dK and dV (and D on the way)."""
    ### BEGIN SOLUTION
    N_q, N_k = len(Q), len(K)
    blocks = [slice(row, min(row + B_r, N_q)) for row in range(0, N_q, B_r)]
    for rows in blocks:
        D[rows] = row_dots(dO[rows], O[rows])
        dQ[rows] = 0
    for col in range(0, N_k, B_c):
        cols = slice(col, min(col + B_c, N_k))
        k_j, v_j = K[cols], V[cols]
        dk_j, dv_j = np.zeros(k_j.shape), np.zeros(v_j.shape)
        for rows in blocks:
            if causal and col > rows.stop - 1 + N_k - N_q:
                continue
            seen = None
            if causal:
                seen = np.arange(N_k)[cols][None, :] <= np.arange(N_q)[rows][:, None] + N_k - N_q
            q_i, do_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]
            dq, dk, dv = tile_gradients(q_i, k_j, v_j, do_i, L_i, D_i, seen, tau)
            dQ[rows] = dQ[rows] + dq
            dk_j, dv_j = dk_j + dk, dv_j + dv
        dK[cols], dV[cols] = dk_j, dv_j

# %% test="backward" points=4 given="row_dots tile_gradients"
report = check.backward(backward, seed=0)
report += check.backward(backward, seed=303)

# %% [markdown]
# ## 4. The meter: elements moved
#
# K and V are loaded once. For each visited tile, Q, dO, L and D are loaded once, and dQ is loaded and stored.
# **Predict:** which tensor accounts for the most elements moved?

# %% test="traffic" points=2 given="row_dots tile_gradients"
report = check.traffic(backward)
report += check.traffic(backward, [check.METERED_HIDDEN])

# %% [markdown]
# ## 5. The meter: operations
#
# For each visited tile, the backward pass computes five products and one exponential per score. The forward pass needs
# only two products.

# %% test="operations" points=2 given="row_dots tile_gradients"
report = check.operations(backward)
report += check.operations(backward, [check.METERED_HIDDEN])

# %% [markdown]
# ## 6. Query heads that share a key head
#
# `q`, `O`, `dO` are `(H, N_q, d)`, and `L` is `(H, N_q)`, but `k` and `v` have fewer heads. Their shape is `(H_k, N_k,
# d)`, H is a multiple of H_k, and query head `h` reads key head `h // (H / H_k)`. Return `dq`, `dk`, `dv` in the shapes
# of `q`, `k`, `v`. Call your `backward` for each head, on plain arrays, with any block sizes you like. What happens to
# `dk` if several heads read the same `k`?

# %% solution="grouped"
def grouped(q, k, v, O, L, dO, tau, causal):
    """Return (dq, dk, dv) for grouped heads."""
    ### BEGIN SOLUTION
    group = len(q) // len(k)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for h in range(len(q)):
        g = h // group
        D, dk_h, dv_h = np.empty(q.shape[1]), np.empty(k.shape[1:]), np.empty(v.shape[1:])
        backward(q[h], k[g], v[g], O[h], L[h], dO[h], D, dq[h], dk_h, dv_h, 4, 4, tau, causal)
        dk[g] += dk_h
        dv[g] += dv_h
    return dq, dk, dv

# %% test="grouped" points=3 given="row_dots tile_gradients backward"
report = check.grouped(grouped, seed=0)
report += check.grouped(grouped, seed=304)

# %% [markdown]
# ## 7. Dropout
#
# In training, each weight is dropped with probability p, and the weights that are kept are multiplied by 1 / (1 − p),
# so that the expected output stays the same. Therefore, o = (z ∘ p_ij) v, where z is 1 / (1 − p) if `kept` is True and
# 0 otherwise. Softmax comes first, so dropout changes neither L nor the row sums. `D_i` is still the row sum of dO ∘ O,
# but this O already contains the dropout. Return this tile's part of the output and of the gradients. **Predict:** in
# which of the four formulas does z appear?

# %% solution="dropped"
def dropped(q_i, k_j, v_j, do_i, L_i, D_i, kept, p, tau):
    """Return (o, dq, dk, dv) of one tile; kept (b, c) is False where a weight is dropped."""
    ### BEGIN SOLUTION
    z = kept / (1 - p)
    p_ij = np.exp(tau * (q_i @ k_j.T) - L_i[:, None])
    ds = tau * p_ij * (z * (do_i @ v_j.T) - D_i[:, None])
    return (z * p_ij) @ v_j, ds @ k_j, ds.T @ q_i, (z * p_ij).T @ do_i

# %% test="dropped" points=2
report = check.dropped(dropped, seed=0)
report += check.dropped(dropped, seed=305)
