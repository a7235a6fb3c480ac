# %% [markdown]
# # Assignment 2 · From FA1 to FA2
#
# **FA2 has the same tiles as FA1 and gives the same answer, so what is left to save?** You write the forward pass of
# FlashAttention-2 in NumPy, tile by tile, while a meter counts what you load from HBM, what you store, and what you
# compute.
#
# | step | points |
# | --- | --- |
# | 1. `kind`: skip, diagonal or full | 2 |
# | 2. `row_block`: one row block through its tiles | 4 |
# | 3. `forward`: all row blocks, from HBM and back | 2 |
# | 4. the meter: elements moved, no skipped tile loaded | 3 |
# | 5. the meter: operations | 3 |
# | 6. the meter: nothing of size N² | 2 |
#
# *Time: 4 to 5 hours. Before this: chapters 02 to 04. Hardware: any laptop, NumPy alone.*
#
# **How it is graded.** Grading works as `README.md` explains. All of `fa2_lab` is off limits, and so is ready-made
# attention. Steps 4 to 6 run your `forward` once more with the meter on. They give points if O is correct, and also if O
# shows a mistake that the checks know by name, because that mistake has already cost you points in step 2. They do not
# compare L with the correct one, because steps 2 and 3 have done so. If you keep the scores of a whole row block (a
# strip), or all scores, the step scores 0. Steps 3, 5 and 6 also lose points if numbers leave the chip, for example
# through `float` or `if`, because the meter cannot count what is computed elsewhere.

# %% locked="setup"
import numpy as np

from checks import tiled as check

# %% [markdown]
# ## 1. Skip, diagonal or full
#
# With a causal mask, row `r` sees column `c` if `c ≤ r + N_k − N_q`, so the diagonal ends in the bottom right corner,
# and some rows may see no columns. A tile is `"skip"` if none of its entries is visible, `"full"` if all are, and
# `"diagonal"` otherwise. Without the mask, every tile is full. The tile's rows run from `row` up to, but not including,
# `row_end`, and its columns from `col` up to, but not including, `col_end`.
#
# Decide the kind of a tile from its corners, without building an array.

# %% solution="kind"
def kind(row, row_end, col, col_end, N_q, N_k, causal):
    """Return "skip", "diagonal" or "full"."""
    ### BEGIN SOLUTION
    offset = N_k - N_q
    if not causal or col_end - 1 <= row + offset:
        return "full"
    return "skip" if col > row_end - 1 + offset else "diagonal"

# %% test="kind" points=2
report = check.kind(kind)
C = check.Case
report += check.kind(kind, ((C(7, 16, 4, 2, 5), C(7, 16, 4, 2, 5, causal=True)), (C(16, 5, 4, 3, 1, causal=True),)))

# %% [markdown]
# ## 2. One row block through its tiles
#
# `row_block` gets the queries `q_i` `(b, d)` of one row block, whose first row is `row`, and `K`, `V` `(N_k, d)`. It
# visits the column blocks, `B_c` keys at a time, and returns `o_i` `(b, d)` and the logsumexp `L_i` `(b,)`. The last
# column block may be short. Compute scores as `tau * (q_i @ k_j.T)`, with the parentheses. Without them, τ multiplies a
# block of Q in each tile, and the meter counts these multiplications.
#
# `row_block` must not look at more than one column block at a time, must not touch a tile that is `"skip"`, and must
# divide only once, at the end. In step 3, `K` and `V` will be tensors in HBM. `K[start:end]` then loads a block, and
# you compute with blocks as usual, with operators, `np.where`, `np.exp`, `.max(axis=1)` and `.T`. The numbers of a
# block stay on the chip, and the meter counts what you compute from them.

# %% solution="row_block"
def row_block(q_i, K, V, row, N_q, B_c, tau, causal):
    """Return o_i (b, d) and L_i (b,) of the row block that starts at this row."""
    ### BEGIN SOLUTION
    (b, d), N_k = q_i.shape, len(K)
    m, l, o = np.full(b, -np.inf), np.zeros(b), np.zeros((b, d))
    for col in range(0, N_k, B_c):
        end = min(col + B_c, N_k)
        which = kind(row, row + b, col, end, N_q, N_k, causal)
        if which == "skip":
            continue
        k_j, v_j = K[col:end], V[col:end]
        s = tau * (q_i @ k_j.T)
        if which == "diagonal":
            hidden = np.arange(col, end)[None, :] > np.arange(row, row + b)[:, None] + N_k - N_q
            s = np.where(hidden, -np.inf, s)
        m_new = np.maximum(m, s.max(axis=1))
        base = np.where(np.isneginf(m_new), 0.0, m_new)
        p = np.exp(s - base[:, None])
        alpha = np.exp(m - base)
        l = alpha * l + p.sum(axis=1)
        o = alpha[:, None] * o + p @ v_j
        m = m_new
    divisor = np.where(l == 0, 1.0, l)
    return o / divisor[:, None], m + np.log(divisor)

# %% test="row_block" points=4 given="kind"
report = check.row_block(row_block, seed=0)
report += check.row_block(row_block, seed=201)

# %% [markdown]
# ## 3. All row blocks
#
# From here on, names in capital letters are tensors in HBM. `Q[rows]` loads rows and `O[rows] = o_i` stores them, while
# `len(Q)` and `Q.shape` cost nothing. `forward` fills `O` `(N_q, d)` and `L` `(N_q,)`, which start as NaN, and returns
# nothing. The last row block may be short.

# %% solution="forward"
def forward(Q, K, V, O, L, B_r, B_c, tau, causal):
    """Fill O and L, one row block after the other."""
    ### BEGIN SOLUTION
    N_q = len(Q)
    for row in range(0, N_q, B_r):
        rows = slice(row, min(row + B_r, N_q))
        O[rows], L[rows] = row_block(Q[rows], K, V, row, N_q, B_c, tau, causal)

# %% test="forward" points=2 given="kind row_block"
report = check.forward(forward, seed=0)
report += check.forward(forward, seed=202)

# %% [markdown]
# ## 4. The meter: elements moved
#
# FA2 loads each query once, stores each output once, and loads the keys and values once for each row block that sees
# them. **Predict** before you run: with 24 queries and keys, d = 16 and tiles of 4 × 4, how many elements of K does
# your function load? And how many with the causal mask?

# %% test="traffic" points=3 given="kind"
report = check.traffic(forward)
report += check.traffic(forward, [check.METERED_HIDDEN])

# %% [markdown]
# ## 5. The meter: operations
#
# The tensor cores compute two matrix products for each visited tile. All other operations run on slower units.
# Therefore, compute one exponential for each score, and as little else as you can.

# %% test="operations" points=3 given="kind"
report = check.operations(forward)
report += check.operations(forward, [check.METERED_HIDDEN])

# %% [markdown]
# ## 6. The meter: memory
#
# Never load or compute anything larger than a tile in one piece, and never hold more than a few tiles on the chip at
# once.

# %% test="memory" points=2 given="kind"
report = check.memory(forward)
report += check.memory(forward, [check.METERED_HIDDEN])
