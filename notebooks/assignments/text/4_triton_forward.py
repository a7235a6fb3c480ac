# %% [markdown]
# # Assignment 4 · A Triton forward kernel
#
# **How does the loop of assignment 2 become a GPU kernel?** You get there in three steps, which are one tile, the loop,
# and the cases that occur in real inputs. Triton's interpreter runs your kernel in Python, which is slow but exact, so
# you do not need a GPU.
#
# | step | points |
# | --- | --- |
# | 1. `one_tile`: all keys in one tile | 3 |
# | 2. `loop`: row blocks in parallel, column blocks in a loop | 4 |
# | 3. `full`: causal and ragged | 5 |
#
# *Time: 6 to 8 hours. Before this: assignment 2, chapter 08. Hardware: Linux, for Triton; a GPU is not needed.*
#
# **How it is graded.** Your kernels are launched on one head in fp32, and the results are compared with float64. Rows
# of Q, K, V and O are contiguous, so row r of Q starts at `Q + r * d`. Block sizes and d are powers of two and at least
# 16. The memory after the last row of Q, K and V contains NaN. Compute products of tiles with `tl.dot` in full fp32,
# and keep the signatures as they are. If a kernel repeats a mistake that the checks of an earlier kernel have named, the
# checks that fail because of it lose only a quarter of their points in the grade. All of `fa2_lab` is off limits, and so
# is ready-made attention.

# %% locked="setup"
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python

import triton
import triton.language as tl

from checks import triton_steps as check

# %% [markdown]
# ## 1. One tile
#
# One program handles B_r queries and B_c keys in a single tile. The pointers to a tile are a column of row starts plus
# a row of offsets, as in `Q + row[:, None] * d + tl.arange(0, d)[None, :]`.
#
# `scale_log2` is τ · log₂ e. If you multiply the scores by it, `tl.exp2` computes the usual exponential, in one
# instruction. Write products as `tl.dot(a, b, input_precision="ieee")`, and transposes as `k.T`.

# %% solution="one_tile"
@triton.jit
def one_tile(Q, K, V, O, scale_log2,
             B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    row, col, e = tl.arange(0, B_r), tl.arange(0, B_c), tl.arange(0, d)
    q = tl.load(Q + row[:, None] * d + e[None, :])
    k = tl.load(K + col[:, None] * d + e[None, :])
    v = tl.load(V + col[:, None] * d + e[None, :])
    s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    o = tl.dot(p, v, input_precision="ieee") / tl.sum(p, 1)[:, None]
    tl.store(O + row[:, None] * d + e[None, :], o)

# %% test="one_tile" points=3
report = check.one_tile(one_tile, seed=0)
report += check.one_tile(one_tile, [check.Case(16, 16, 64, 16, 16, size=2.0, seed=401, tau=0.1)], seed=0)

# %% [markdown]
# ## 2. The loop
#
# Now there are several row blocks, with one program each (`tl.program_id(0)`), and several column blocks, which every
# program visits in a loop. Each program loads K and V only once. Lengths are multiples of the block sizes. Carry `m`,
# `l` and `o` through the loop in fp32, divide once, and store `O` and `L`, the natural logarithm of each row's sum of
# exponentials. Since `m` is in base 2 here, what do you need ln 2 for?

# %% solution="loop"
@triton.jit
def loop(Q, K, V, O, L, N_k, scale_log2,
         B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    row, e = tl.program_id(0) * B_r + tl.arange(0, B_r), tl.arange(0, d)
    q = tl.load(Q + row[:, None] * d + e[None, :])
    m = tl.full((B_r,), float("-inf"), tl.float32)
    l = tl.zeros((B_r,), tl.float32)
    o = tl.zeros((B_r, d), tl.float32)
    for j in range(0, N_k, B_c):
        col = j + tl.arange(0, B_c)
        k = tl.load(K + col[:, None] * d + e[None, :])
        v = tl.load(V + col[:, None] * d + e[None, :])
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = alpha * l + tl.sum(p, 1)
        o = alpha[:, None] * o + tl.dot(p, v, input_precision="ieee")
        m = m_new
    tl.store(O + row[:, None] * d + e[None, :], o / l[:, None])
    tl.store(L + row, (m + tl.log2(l)) * 0.6931471805599453)

# %% test="loop" points=4
report = check.loop(loop, seed=0)
report += check.loop(loop, [check.Case(48, 32, 16, 16, 32, seed=402, tau=0.3)], seed=0)

# %% [markdown]
# ## 3. Causal and ragged
#
# Lengths can now be arbitrary. `tl.load` takes `mask=` and `other=`, and `tl.store` takes `mask=`, because the memory
# after the last row is not yours. With `CAUSAL`, row `r` sees column `c` if `c ≤ r + N_k − N_q`, and a column block is
# not visited if no row of the block sees it. A row that sees no key gets O = 0 and L = −∞.

# %% solution="full"
@triton.jit
def full(Q, K, V, O, L, N_q, N_k, scale_log2, CAUSAL: tl.constexpr,
         B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    ### BEGIN SOLUTION
    first = tl.program_id(0) * B_r
    row, e = first + tl.arange(0, B_r), tl.arange(0, d)
    real = (row < N_q)[:, None]
    q = tl.load(Q + row[:, None] * d + e[None, :], mask=real, other=0.0)
    m = tl.full((B_r,), float("-inf"), tl.float32)
    l = tl.zeros((B_r,), tl.float32)
    o = tl.zeros((B_r, d), tl.float32)
    end = N_k
    if CAUSAL:
        end = tl.minimum(N_k, tl.maximum(0, tl.minimum(first + B_r, N_q) + N_k - N_q))
    for j in range(0, end, B_c):
        col = j + tl.arange(0, B_c)
        there = (col < N_k)[:, None]
        k = tl.load(K + col[:, None] * d + e[None, :], mask=there, other=0.0)
        v = tl.load(V + col[:, None] * d + e[None, :], mask=there, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        seen = (col < N_k)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        l = alpha * l + tl.sum(p, 1)
        o = alpha[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    l_safe = tl.where(l == 0.0, 1.0, l)
    tl.store(O + row[:, None] * d + e[None, :], (o / l_safe[:, None]).to(O.dtype.element_ty), mask=real)
    tl.store(L + row, (m + tl.log2(l_safe)) * 0.6931471805599453, mask=row < N_q)

# %% test="full" points=5
report = check.full(full, seed=0)
hidden = [check.Case(35, 35, 16, 16, 32, causal=True, seed=403, tau=0.3), check.Case(17, 40, 32, 32, 16, seed=404, tau=0.2)]
report += check.full(full, [("hidden", case) for case in hidden], seed=0)
