# %% [markdown]
# # Assignment 7 · The backward kernel in Triton
#
# **How do five products become dQ, dK and dV?** dK_j and dV_j are sums over row blocks, while dQ_i is a sum over column
# blocks, so no single program can keep all three on chip. You write both loop orders, and then the single pass that
# adds to dQ in HBM.
#
# | step | points |
# | --- | --- |
# | 1. `row_dots`: D = rowsum(dO ∘ O) | 2 |
# | 2. `tile`: all queries and keys in one tile | 4 |
# | 3. `columns`: a program for each column block, dK and dV | 5 |
# | 4. `rows`: a program for each row block, dQ | 3 |
# | 5. `one_pass`: column blocks that also add to dQ | 2 |
#
# *Time: 6 to 8 hours. Before this: assignments 3 and 4, chapter 09. Hardware: Linux, for Triton; a GPU is not needed.*
#
# **How it is graded.** Your kernels run in Triton's interpreter on one head in fp32, and the results are compared with
# float64. A meter counts their loads, stores, additions and multiplications. Products have to be computed in full fp32.
# The memory after the end of every input contains NaN, and outputs start as NaN. Rows are contiguous, so row r of Q
# starts at `Q + r * d`. Block sizes and d are powers of two and at least 16. Keep the signatures as they are. If a kernel
# repeats a mistake that the checks of an earlier kernel have named, the checks that fail because of it lose only a
# quarter of their points in the grade.
#
# **Off limits:** all of `fa2_lab`, and the attention of torch and of other libraries. You may use everything in NumPy,
# torch and Triton that is not attention.

# %% locked="setup"
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python

import triton
import triton.language as tl

from checks import triton_backward as check

# %% [markdown]
# ## 1. D
#
# The gradient of softmax needs one number for each row, D_i = Σ dO_i ∘ O_i. D is computed once, before anything else.
# N_q is arbitrary, and program i handles the rows from i · B_r up to, but not including, (i + 1) · B_r.

# %% solution="row_dots"
@triton.jit
def row_dots(O, dO, D, N_q, B_r: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    row, e = tl.program_id(0) * B_r + tl.arange(0, B_r), tl.arange(0, d)
    at, real = row[:, None] * d + e[None, :], (row < N_q)[:, None]
    o, do = tl.load(O + at, mask=real, other=0.0), tl.load(dO + at, mask=real, other=0.0)
    tl.store(D + row, tl.sum(o * do, 1), mask=row < N_q)

# %% test="row_dots" points=2
report = check.row_dots(row_dots, seed=0)
report += check.row_dots(row_dots, [check.Case(33, 33, 16, 16, 16, seed=701, tau=0.3)], seed=0)

# %% [markdown]
# ## 2. One tile
#
# One program handles all B_r queries and B_c keys. The forward pass did not store P, but it stored L, so P = exp(τ Q Kᵀ
# − L) needs neither a maximum nor a sum. Then dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − D), dQ = τ dS K and dK = τ dSᵀ Q.
#
# L uses the natural logarithm. Write products as `tl.dot(a, b, input_precision="ieee")`, and transposes as `p.T`.

# %% solution="tile"
@triton.jit
def tile(Q, K, V, dO, L, D, dQ, dK, dV, tau,
         B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    row, col, e = tl.arange(0, B_r), tl.arange(0, B_c), tl.arange(0, d)
    at_row, at_col = row[:, None] * d + e[None, :], col[:, None] * d + e[None, :]
    q, do = tl.load(Q + at_row), tl.load(dO + at_row)
    k, v = tl.load(K + at_col), tl.load(V + at_col)
    s = tau * tl.dot(q, k.T, input_precision="ieee")
    p = tl.exp(s - tl.load(L + row)[:, None])
    dp = tl.dot(do, v.T, input_precision="ieee")
    ds = p * (dp - tl.load(D + row)[:, None])
    tl.store(dV + at_col, tl.dot(p.T, do, input_precision="ieee"))
    tl.store(dQ + at_row, tau * tl.dot(ds, k, input_precision="ieee"))
    tl.store(dK + at_col, tau * tl.dot(ds.T, q, input_precision="ieee"))

# %% test="tile" points=4
report = check.tile(tile, seed=0)
report += check.tile(tile, [check.Case(32, 16, 64, 32, 16, size=2.0, seed=702, tau=0.1)], seed=0)

# %% [markdown]
# ## 3. Column blocks
#
# Program j keeps column block j. It loads K_j and V_j once and visits the row blocks that see them, while `dk` and `dv`
# stay on chip until the end. Lengths are arbitrary. With `CAUSAL`, row r sees column c if c ≤ r + N_k − N_q, and row
# blocks that do not see the column block are not loaded. A row that sees no key has L = −∞ and adds nothing to any
# gradient.
#
# **Predict:** under the causal mask, the end of the loop in the forward pass depends on the row block. What depends on
# the column block here?

# %% solution="columns"
@triton.jit
def columns(Q, K, V, dO, L, D, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr,
            B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    first = tl.program_id(0) * B_c
    col, e = first + tl.arange(0, B_c), tl.arange(0, d)
    at_col, there = col[:, None] * d + e[None, :], (col < N_k)[:, None]
    k, v = tl.load(K + at_col, mask=there, other=0.0), tl.load(V + at_col, mask=there, other=0.0)
    dk, dv = tl.zeros((B_c, d), tl.float32), tl.zeros((B_c, d), tl.float32)
    start = 0
    if CAUSAL:
        start = tl.maximum(0, first + N_q - N_k) // B_r * B_r
    for i in range(start, N_q, B_r):
        row = i + tl.arange(0, B_r)
        at_row, real = row[:, None] * d + e[None, :], (row < N_q)[:, None]
        q, do = tl.load(Q + at_row, mask=real, other=0.0), tl.load(dO + at_row, mask=real, other=0.0)
        L_i, D_i = tl.load(L + row, mask=row < N_q, other=0.0), tl.load(D + row, mask=row < N_q, other=0.0)
        seen = (row < N_q)[:, None] & (col < N_k)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
        s = tau * tl.dot(q, k.T, input_precision="ieee")
        p = tl.where(seen, tl.exp(s - L_i[:, None]), 0.0)
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = p * (dp - D_i[:, None])
        dv += tl.dot(p.T, do, input_precision="ieee")
        dk += tl.dot(ds.T, q, input_precision="ieee")
    tl.store(dK + at_col, tau * dk, mask=there)
    tl.store(dV + at_col, dv, mask=there)

# %% test="columns" points=5
report = check.columns(columns, seed=0)
hidden = [check.Case(35, 35, 16, 16, 32, causal=True, seed=703, tau=0.3), check.Case(17, 40, 32, 32, 16, seed=704, tau=0.2)]
report += check.columns(columns, [("hidden", case) for case in hidden], seed=0)

# %% [markdown]
# ## 4. Row blocks
#
# Program i keeps row block i. It loads Q_i, dO_i, L_i and D_i once, visits the column blocks that its rows see, and
# keeps `dq` until the end. S and dP are computed a second time, which is the cost of adding in a fixed order.

# %% solution="rows"
@triton.jit
def rows(Q, K, V, dO, L, D, dQ, N_q, N_k, tau, CAUSAL: tl.constexpr,
         B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    first = tl.program_id(0) * B_r
    row, e = first + tl.arange(0, B_r), tl.arange(0, d)
    at_row, real = row[:, None] * d + e[None, :], (row < N_q)[:, None]
    q, do = tl.load(Q + at_row, mask=real, other=0.0), tl.load(dO + at_row, mask=real, other=0.0)
    L_i, D_i = tl.load(L + row, mask=row < N_q, other=0.0), tl.load(D + row, mask=row < N_q, other=0.0)
    dq = tl.zeros((B_r, d), tl.float32)
    end = N_k
    if CAUSAL:
        end = tl.minimum(N_k, tl.maximum(0, tl.minimum(first + B_r, N_q) + N_k - N_q))
    for j in range(0, end, B_c):
        col = j + tl.arange(0, B_c)
        at_col, there = col[:, None] * d + e[None, :], (col < N_k)[:, None]
        k, v = tl.load(K + at_col, mask=there, other=0.0), tl.load(V + at_col, mask=there, other=0.0)
        seen = (row < N_q)[:, None] & (col < N_k)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
        s = tau * tl.dot(q, k.T, input_precision="ieee")
        p = tl.where(seen, tl.exp(s - L_i[:, None]), 0.0)
        ds = p * (tl.dot(do, v.T, input_precision="ieee") - D_i[:, None])
        dq += tl.dot(ds, k, input_precision="ieee")
    tl.store(dQ + at_row, tau * dq, mask=real)

# %% test="rows" points=3
report = check.rows(rows, seed=0)
hidden = [check.Case(35, 35, 16, 16, 32, causal=True, seed=705, tau=0.3), check.Case(17, 40, 32, 32, 16, seed=706, tau=0.2)]
report += check.rows(rows, [("hidden", case) for case in hidden], seed=0)

# %% [markdown]
# ## 5. One pass
#
# FA2's Algorithm 2 has no second pass. Program j adds τ dS K_j to dQ_i in HBM as soon as it has dS. Because other
# programs may add to the same dQ_i at the same time, it uses `tl.atomic_add(pointers, values, mask=…)`. dQ is fp32 and
# zero when your kernel starts. Take your `columns` and add the fifth product.

# %% solution="one_pass"
@triton.jit
def one_pass(Q, K, V, dO, L, D, dQ, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr,
             B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    first = tl.program_id(0) * B_c
    col, e = first + tl.arange(0, B_c), tl.arange(0, d)
    at_col, there = col[:, None] * d + e[None, :], (col < N_k)[:, None]
    k, v = tl.load(K + at_col, mask=there, other=0.0), tl.load(V + at_col, mask=there, other=0.0)
    dk, dv = tl.zeros((B_c, d), tl.float32), tl.zeros((B_c, d), tl.float32)
    start = 0
    if CAUSAL:
        start = tl.maximum(0, first + N_q - N_k) // B_r * B_r
    for i in range(start, N_q, B_r):
        row = i + tl.arange(0, B_r)
        at_row, real = row[:, None] * d + e[None, :], (row < N_q)[:, None]
        q, do = tl.load(Q + at_row, mask=real, other=0.0), tl.load(dO + at_row, mask=real, other=0.0)
        L_i, D_i = tl.load(L + row, mask=row < N_q, other=0.0), tl.load(D + row, mask=row < N_q, other=0.0)
        seen = (row < N_q)[:, None] & (col < N_k)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
        s = tau * tl.dot(q, k.T, input_precision="ieee")
        p = tl.where(seen, tl.exp(s - L_i[:, None]), 0.0)
        ds = p * (tl.dot(do, v.T, input_precision="ieee") - D_i[:, None])
        dv += tl.dot(p.T, do, input_precision="ieee")
        dk += tl.dot(ds.T, q, input_precision="ieee")
        tl.atomic_add(dQ + at_row, tau * tl.dot(ds, k, input_precision="ieee"), mask=real)
    tl.store(dK + at_col, tau * dk, mask=there)
    tl.store(dV + at_col, dv, mask=there)

# %% test="one_pass" points=2
report = check.one_pass(one_pass, seed=0)
report += check.one_pass(one_pass, [("hidden", check.Case(35, 50, 16, 16, 32, causal=True, seed=707, tau=0.3))], seed=0)
