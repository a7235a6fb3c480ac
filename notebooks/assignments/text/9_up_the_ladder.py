# %% [markdown]
# # Assignment 9 · Up the ladder
#
# **How far up can you climb from rung 03?** You get a kernel that is correct but slow, because it has FA2's parallelism
# and nothing else. You hand in a kernel that does less work and whose loop compiles to fewer instructions. You do not
# need to time it, because the meter counts what a call does, and the compiler shows what Hopper would run.
#
# | step | points |
# | --- | --- |
# | 1. `right`: O and L against float64 | 3 |
# | 2. `meter`: loads, exponentials, masks, divisions | 4 |
# | 3. `compiled`: instructions per score, copies under way | 5 |
#
# *Time: 6 to 8 hours. Before this: assignment 4, chapters 10 and 11. Hardware: Linux, for Triton; a GPU is not needed.*
#
# **How it is graded.** You write one kernel, `climbed`, and choose its sizes. The grader extracts the source of that
# kernel and of the functions that it calls, and launches the kernel with one program for every B_r rows of a head.
# Tensors are fp16 and have the shape (batch, heads, N, d). The memory after Q, K and V contains NaN. The kernel is run
# in Triton's interpreter, and it is also compiled for sm_90. O has the same type as the inputs, and L is fp32. A kernel
# can use `tl`, its arguments, numbers, and other functions under `@triton.jit`, but no other decorator. Steps 2 and 3
# also accept a kernel whose O is exactly that of a known mistake, or whose L is wrong, because that mistake has already
# cost you points in step 1.
#
# Step 3 compiles a causal call with N = 384 and d = 64. It takes the loop that does most of the work, and counts its
# thread instructions per score, which are the instructions of the loop times 32 threads, divided by its scores. With
# Triton 3.9, rung 03 has 19.6 of them, and 9.3 is possible. Each loop with products has to compute both products and
# one exponential per score, and each `tl.dot` has to do more than an eighth of the multiplications of the call. Step 3
# prints the number of instructions per score in your loop.
#
# **Off limits:** importing `fa2_lab`, except `fa2_lab.tools.xray`, or any ready-made attention. You may read the rungs
# of the ladder, which are the subject of chapter 10. But for each change, write down what you expect it to save before
# you look.

# %% locked="setup"
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python

import torch  # noqa: F401 — rung 03's forward uses it
import triton
import triton.language as tl

from checks import climb as check

# %% [markdown]
# ## Rung 03
#
# This kernel is your starting point. Copy the functions under `@triton.jit`, and the numbers, into the next cell, call
# the kernel `climbed`, and change one thing at a time.

# %% locked="rung"
# `fa2-lab course build` writes this cell, for seed 0

# %% [markdown]
# ## Your rung
#
# Write the kernel, its helpers and its numbers in one cell. To see the machine code, save that cell as `mine.py`,
# together with the imports of the first cell and rung 03's `forward`, which then calls your kernel, and run `fa2-lab
# xray mine.py --d 64 --sass`. On a GPU, `triton.testing.do_bench` shows how much faster your `forward` is than the
# original `forward` of rung 03. A speedup of 3 is possible.

# %% solution="kernel"
@triton.jit
def climbed(Q, K, V, O, L, N_q, N_k, tau, CAUSAL: tl.constexpr,
            d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    """Compute B_r rows of O and of L, the natural logarithm of a row's sum of exponentials, for one head."""
    ### BEGIN SOLUTION
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    Q, K, V = Q + head * N_q * d, K + head * N_k * d, V + head * N_k * d
    row = i + tl.arange(0, B_r)
    tau_log2 = tau * 1.4426950408889634
    seen = sees(row, N_q, N_k, CAUSAL)
    full, last = sees(i, N_q, N_k, CAUSAL) // B_c * B_c, sees(i + B_r - 1, N_q, N_k, CAUSAL)
    q = rows_of(Q, i, N_q, B_r, d, True)
    o, l, m = tl.zeros((B_r, d), tl.float32), tl.zeros((B_r,), tl.float32), tl.full((B_r,), -1e30, tl.float32)
    for j in range(full, last, B_c):  # the tiles that are cut, first: in the other order Hopper's products wait
        k, v = rows_of(K, j, N_k, B_c, d, True), rows_of(V, j, N_k, B_c, d, True)
        o, l, m = take(o, l, m, q, k, v, seen - j, tau_log2, True)
    for j in range(0, full, B_c):
        k, v = rows_of(K, j, N_k, B_c, d, False), rows_of(V, j, N_k, B_c, d, False)
        o, l, m = take(o, l, m, q, k, v, seen - j, tau_log2, False)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    o = (1.0 / l)[:, None] * o
    at = (head * N_q + row)[:, None] * d + tl.arange(0, d)[None, :]
    tl.store(O + at, o.to(O.dtype.element_ty), mask=row[:, None] < N_q)
    tl.store(L + head * N_q + row, tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453), mask=row < N_q)


@triton.jit
def rows_of(X, first, N, B: tl.constexpr, d: tl.constexpr, RAGGED: tl.constexpr):
    row, e = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + e)
    if RAGGED:
        return tl.load(at, mask=first + row < N, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def sees(row, N_q, N_k, CAUSAL: tl.constexpr):
    return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row


@triton.jit
def take(o, l, m, q, k, v, seen, tau_log2, MASKED: tl.constexpr):
    s = tl.dot(q, k.T)
    if MASKED:
        s = tl.where(tl.arange(0, k.shape[0])[None, :] < seen[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tau_log2 * tl.max(s, 1))
    p = tl.exp2(tau_log2 * s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    l = alpha * l + tl.sum(p, 1)
    o = alpha[:, None] * o + tl.dot(p.to(v.dtype), v)
    return o, l, m_new

# %% [markdown]
# How large are the tiles, how many warps share a tile, and in how many stages do K and V arrive?

# %% solution="sizes"
def sizes(d):
    """Return B_r and B_c, powers of two from 16 to 256, num_warps, 1, 2, 4 or 8, and num_stages, 1 to 8."""
    ### BEGIN SOLUTION
    return dict(B_r=64, B_c=64, num_warps=4, num_stages=3)

# %% [markdown]
# ## 1. Right

# %% test="right" points=3
report = check.right(climbed, sizes, seed=0)
report += check.right(climbed, sizes, [("hidden", check.Case(100, 130, 32, 64, 64, causal=True, seed=901))], seed=0)

# %% [markdown]
# ## 2. The meter
#
# **Predict** each number for rung 03 with 372 queries and keys, causal, before you run this.

# %% test="meter" points=4
report = check.meter(climbed, sizes, seed=0)

# %% [markdown]
# ## 3. The compiled loop
#
# The check compiles your kernel for an H100 or H200, which takes a few seconds, and reads its machine code.

# %% test="compiled" points=5
report = check.compiled(climbed, sizes, seed=0)
