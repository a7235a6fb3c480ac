# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)

# %% [markdown]
# # 08 · The Triton forward kernel
#
# **How do the lines of Algorithm 1 become a GPU kernel?**
#
# Chapter 04 has Algorithm 1 in NumPy. Chapter 06 made each row block a worker of its own. Now we write the program that
# such a worker runs, in *Triton*: Python with blocks of numbers. You say what one thread block does, and the compiler
# shares the work among its warps, of which there are `num_warps`. FA2 gives each warp whole rows of scores. Whether the
# compiler does so too depends on the chip and on the tile, as chapter 11 shows.
#
# We build attention 24 times and change one thing each time: the *ladder*, of 24 *rungs*, r00 to r23. (s00 and s01 of
# chapter 07 stand beside it.) The first fifteen are in Triton. Chapter 10 measures all 24. This chapter ends with the
# lines of rung 11.
#
# After this notebook you can
#
# - write Algorithm 1 as a Triton kernel: which program am I, where are my numbers, and where do they end,
# - say why some of its lines do not look like the paper's,
# - recognise three mistakes by their numbers.
#
# *Time: 40 minutes with the questions and the kernel. Hardware: any machine with Linux; without an
# NVIDIA GPU the kernels run in Triton's interpreter. Before this: [04 · FlashAttention-2,
# forward](04_fa2_forward.ipynb), [06 · Parallelism](06_parallelism.ipynb) and [07 · Warps](07_warps.ipynb).*

# %% tags=["hide-input"]
import math
from inspect import getsource

import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.kernels.ladder import load
from fa2_lab.plots import ragged_edge
from fa2_lab.plots.show import show
from fa2_lab.reference import heads
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, same_code, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output", "hide-input"]
import triton
import triton.language as tl

print("kernels of this notebook:", "interpreted" if triton.knobs.runtime.interpret else "compiled for the GPU here")
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))  # the package says once that it is slow here

# %% [markdown]
# Without a GPU the package sets `TRITON_INTERPRET=1`, and every line of a kernel runs as NumPy, one program after the
# other. In a script of your own, set the variable yourself before you import Triton. PyTorch's tensors behave like
# NumPy's arrays. `device` says where they live, and `.float()` makes float32.

# %% [markdown]
# ## What does a kernel get to see?
#
# `@triton.jit` makes a function a kernel. A kernel is given the address of a tensor's first number: no shape, no end. One
# run of it is called a *program*; it is chapter 06's thread block. All programs run the same lines and differ in one
# number, `program_id`.
#
# `X + at` is a block of addresses, and `tl.load` fetches what stands there. The size of a block is a power of two, known
# when the kernel is compiled (`tl.constexpr`). A *mask* (here not the causal one) says which of the addresses are mine. Ten
# numbers in blocks of 4 take three programs:

# %%
@triton.jit
def copy_kernel(X, Y, N, B: tl.constexpr, CAREFUL: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)  # (B,) my places
    x = tl.load(X + at, mask=at < N, other=0.0)  # (B,) 0 where nothing is
    if CAREFUL:
        tl.store(Y + at, x, mask=at < N)
    else:
        tl.store(Y + at, x)


X = torch.arange(1.0, 11.0, device=device)
for careful in (True, False):
    memory = torch.full((12,), -1.0, device=device)  # 10, and two of somebody else
    copy_kernel[(3,)](X, memory, 10, B=4, CAREFUL=careful)  # [(3,)]: three programs
    print(f"careful = {careful!s:5}", [int(x) for x in memory])

# %% [markdown]
# Without a mask, the last program writes two zeros behind the end, into memory that belongs to somebody else, and no
# error is raised. The masked load does not touch what lies behind the end, and returns `other` for it. `CAREFUL` is a
# `constexpr`, so the compiled kernel has only one of the two stores.

# %% [markdown]
# ## Where does the next row begin?
#
# In memory a tensor is one long line. `load_rows` assumes that the rows of a head lie one after the other, d numbers each.
# So row r, column c is at r · d + c. (Numbers of 32 bits end at 2³¹, so the offset of the first row has 64.) `RAGGED` says that
# the block may reach beyond the last row. The picture below shows the way from a program's number to its tile, for d = 4.

# %%
@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr, RAGGED: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    if RAGGED:
        return tl.load(at, mask=first + row < N, other=0.0)
    else:
        return tl.load(at)

# %% tags=["hide-input"]
show(ragged_edge.draw(**ragged_edge.data()))

# %% [markdown]
# Models often make Q as (N, heads, d) and hand on a transposed view, (heads, N, d). Nothing was copied, so between two rows
# of head 0 lies a row of head 1. `load_rows` reads it as the next row, and nobody complains; a test with one head passes.
# The number of places from one row to the next is the *stride*: row r, column c lies at r · stride + c. Our rungs copy such
# a view (`contiguous()`), so that the stride is d. The package's own kernel is handed the stride.

# %% [markdown]
# ## How does Algorithm 1 look now?
#
# Here is all of it, with the paper's line numbers. `i` is the first *row* of a row block here, not the block's number, and
# `j` the first *key* of a column block. The loop over row blocks is gone: each of its passes is a program.
#
# `tl.dot` multiplies two blocks on the tensor cores: numbers of 16 bits (here fp16) go in, sums in fp32 come out. Each sum
# must have at least 16 terms, and those of $PV$ have one per key of the tile, so our tiles are 16 × 16. `o_i`, `l_i` and
# `m_i` stay in the warps' registers.
#
# `hidden` is the score of a key that does not exist; the launch below sets it to −∞. A Python global like `NEG_INF` has to
# stand in `tl.constexpr`. The interpreter reads it without that, too, and only a GPU's compiler refuses.

# %%
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def loop_kernel(Q, K, V, O, L, N_q, N_k, tau, hidden,
                d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r  # FA2.A1.L3
    q_i = load_rows(Q, i, N_q, B_r, d, True)  # (B_r, d)  FA2.A1.L4
    o_i = tl.zeros((B_r, d), tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    for j in range(0, N_k, B_c):  # FA2.A1.L6
        k_j = load_rows(K, j, N_k, B_c, d, True)  # (B_c, d)  FA2.A1.L7
        v_j = load_rows(V, j, N_k, B_c, d, True)  # (B_c, d)  FA2.A1.L7
        s_ij = tau * tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A1.L8
        s_ij = tl.where((j + tl.arange(0, B_c) < N_k)[None, :], s_ij, hidden)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
        p_ij = tl.exp(s_ij - m_new[:, None])  # (B_r, B_c)  FA2.A1.L9
        alpha = tl.exp(m_i - m_new)  # (B_r,)  FA2.A1.L9
        l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
        o_i = alpha[:, None] * o_i + tl.dot(p_ij.to(v_j.dtype), v_j)  # FA2.A1.L10
        m_i = m_new
    o_i = o_i / l_i[:, None]  # FA2.A1.L12
    row, column = i + tl.arange(0, B_r), tl.arange(0, d)
    at = O + row[:, None] * d + column[None, :]
    tl.store(at, o_i, mask=row[:, None] < N_q)  # FA2.A1.L14
    tl.store(L + row, m_i + tl.log(l_i), mask=row < N_q)  # FA2.A1.L13 FA2.A1.L15

# %% tags=["hide-input"]
def host(x):  # to NumPy, for comparing
    return x.double().cpu().numpy()


def run(kernel, q, k, v, *more, **options):  # one head: (N, d)
    N, d = q.shape
    memory = [torch.full((N + 1000, *rest), 7.0, device=device) for rest in ((d,), ())]  # 1,000 rows of somebody else
    O, L = (x[:N].fill_(torch.nan) for x in memory)
    with np.errstate(invalid="ignore"):  # the interpreter warns of NaN, a GPU does not
        kernel[(triton.cdiv(N, 16),)](q, k, v, O, L, N, len(k), *more, d=d, B_r=16, B_c=16, **options)
    for name, x in zip("OL", memory, strict=True):
        if (x[N:] != 7).any():
            raise IndexError(f"the kernel wrote behind the end of {name}, into memory that is not its own")
    return O, L


def truth(q, k, v, causal=False):  # float64, with all of S
    O, L = heads.forward(*(host(x)[None, None] for x in (q, k, v)), stage="naive", causal=causal)
    return O[0, 0], L[0, 0]


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, torch.float16)


Q, K, V, tau = normal(45, 16), normal(70, 16, seed=1), normal(70, 16, seed=2), 0.25
print("45 queries, 70 keys, tiles of 16 × 16, hidden = -inf")
for name, got, right in zip("OL", run(loop_kernel, Q, K, V, tau, -torch.inf), truth(Q, K, V), strict=True):
    print(f"   {name}: last number {got.flatten()[-1].item():6.2f}, right {right.flat[-1]:6.2f}")

# %% [markdown]
# **Predict.** Q = 0, so all scores are 0. 10 keys have the value 1. In a block of 16, six rows of K and V are missing and
# come as zeros. What is the output if their scores stay 0 (`hidden` = 0, not −∞)?
#
# - ☐ 1, as zeros add nothing
# - ☐ 0.625
# - ☐ NaN
#
# <details><summary>Answer</summary>
#
# **0.625.** exp(0) = 1, so each of the six has a vote. They vote for values that were loaded as zeros: 10 / 16.
#
# ```python
# zero, one = torch.zeros_like(normal(16, 16)), torch.ones_like(normal(10, 16))
# for hidden in (0.0, -torch.inf):
#     print(f"hidden = {hidden}:", run(loop_kernel, zero, zero[:10], one, tau, hidden)[0][0, 0].item())
# ```
#
# ```text
# hidden = 0.0: 0.625
# hidden = -inf: 1.0
# ```
# </details>
#
# Even with p = 0 a missing row of V must be loaded as zero: what lies behind the end may be NaN, and 0 · NaN is NaN.

# %% [markdown]
# ## Which exponential does a GPU have?
#
# Its special units compute $2^x$, and $e^x = 2^{x \log_2 e}$. So in place of $\tau$ we multiply by $\tau \log_2 e$
# (`tau_log2`), and take `exp2`. Then m, too, is $\log_2 e$ times as large as before. The largest score stays the largest.
#
# The lines of one tile move into a function, `visit`. With `MASKED`, row r sees the first `seen[r]` keys of the tile. The
# scale is not applied to `s_ij`. It comes with the subtraction, tau_log2 · s − m: one multiply-add a score.

# %%
LOWEST, LN2 = tl.constexpr(-1.0e30), tl.constexpr(math.log(2))


@triton.jit
def visit(o_i, l_i, m_i, q_i, k_j, v_j, seen, tau_log2, MASKED: tl.constexpr):
    s_ij = tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A1.L8
    if MASKED:
        s_ij = tl.where(tl.arange(0, k_j.shape[0])[None, :] < seen[:, None],
                        s_ij, NEG_INF)
    m_new = tl.maximum(m_i, tau_log2 * tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
    p_ij = tl.exp2(tau_log2 * s_ij - m_new[:, None])  # (B_r, B_c)  FA2.A1.L9
    alpha = tl.exp2(m_i - m_new)  # (B_r,)  FA2.A1.L9
    l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
    o_i = alpha[:, None] * o_i + tl.dot(p_ij.to(v_j.dtype), v_j)  # (B_r, d)  FA2.A1.L10
    return o_i, l_i, m_new

# %% [markdown]
# **Predict.** After the last tile somebody stores $L = m + \log_2 \ell$. What does that spoil?
#
# - ☐ O and the gradients
# - ☐ the gradients, but not O
# - ☐ nothing, as base 2 is used throughout
#
# <details><summary>Answer</summary>
#
# **the gradients, but not O.** p, α, ℓ, o and O are the same in base 2. But this L is a logarithm to base 2: for eight keys
# with the score 0 it is log₂ 8 = 3, and should be ln 8 = 2.08. The backward pass computes $P = e^{S-L}$, and the rows of
# this P do not sum to 1. So multiply by ln 2. A test of O does not show the mistake.
# </details>

# %% [markdown]
# ## Now write it
#
# Under a causal mask with $N_q \neq N_k$ the last row sees all keys. Row r sees the first $r + 1 + N_k - N_q$ keys, or none
# if that is negative. `keys_seen` computes it. A row without keys is a trap (chapter 02): its maximum stays at −∞, and
# −∞ − (−∞) is not a number. Chapter 04 put 0 in its place in each tile. Our rungs start m at `LOWEST`, $-10^{30}$, and need no
# line in the loop: −∞ − (−10³⁰) is −∞, so $p = 2^{-\infty} = 0$, and ℓ stays 0.

# %%
@triton.jit
def keys_seen(row, N_q, N_k, CAUSAL: tl.constexpr):
    # minimum: rows of the block behind the end would see more than N_k keys
    return (tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL
            else N_k + 0 * row)  # N_k for each row

# %% [markdown]
# **Build.** Write the kernel for one head: `loop_kernel`, with `visit` in its loop, a causal mask, and rows without keys,
# which get O = 0 and L = −∞. Yours to use: `load_rows`, `keys_seen`, `visit`, and the constants `LOWEST`, `NEG_INF` (−∞)
# and `LN2` (ln 2). `keys_seen` counts from key 0, and `visit` from the tile's first key. `tau_log2` is $\tau \log_2 e$. To
# look at a block, write `print(q_i)` or `breakpoint()` into the kernel: without a GPU it runs as Python.

# %%
@triton.jit
def my_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, CAUSAL: tl.constexpr,
              d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    pass


# %% tags=["hide-input"]
tau_log2 = tau / math.log(2)


def my_attention(q, k, v, causal):  # O and L by your kernel; nothing if it stores nothing
    O, L = run(my_kernel, q, k, v, tau_log2, CAUSAL=causal)
    return None if O.isnan().all() and L.isnan().all() else (host(O), host(L))


few, far, huge = normal(12, 16, seed=1), normal(20, 16), 100 * normal(16, 16)
cases = {
    "16 queries and keys. Does visit get MASKED? Is o divided by ℓ, L a natural log?": (*3 * [huge / 100], False),
    "45 queries, 70 keys. Is visit masked, does `seen` count from j, is key 69 reached?": (Q, K, V, False),
    "scores in the thousands. Is the maximum subtracted?": (huge, huge, huge / 100, False),
    "45 queries, 70 keys, causal. Is key r + 25 the last that row r sees?": (Q, K, V, True),
    "20 queries, 12 keys, causal: rows 0 to 7 see no key. What are their O and L?": (far, few, few, True),
}
check(my_attention, *(Case(words, case, truth(*case)) for words, case in cases.items()), tolerance=2e-3, names=("O", "L"))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def my_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, CAUSAL: tl.constexpr,
#               d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
#     i = tl.program_id(0) * B_r
#     row, column = i + tl.arange(0, B_r), tl.arange(0, d)
#     seen = keys_seen(row, N_q, N_k, CAUSAL)  # (B_r,)
#     q_i = load_rows(Q, i, N_q, B_r, d, True)
#     o_i, l_i = tl.zeros((B_r, d), tl.float32), tl.zeros((B_r,), tl.float32)
#     m_i = tl.full((B_r,), LOWEST, tl.float32)
#     for j in range(0, N_k, B_c):
#         k_j = load_rows(K, j, N_k, B_c, d, True)
#         v_j = load_rows(V, j, N_k, B_c, d, True)
#         o_i, l_i, m_i = visit(o_i, l_i, m_i, q_i, k_j, v_j, seen - j, tau_log2, True)
#     empty = l_i == 0.0  # a row that sees no key
#     o_i = o_i / tl.where(empty, 1.0, l_i)[:, None]
#     L_i = tl.where(empty, NEG_INF, (m_i + tl.log2(l_i)) * LN2)
#     at = O + row[:, None] * d + column[None, :]
#     tl.store(at, o_i, mask=row[:, None] < N_q)
#     tl.store(L + row, L_i, mask=row < N_q)
# ```
# </details>
#
# [Assignment 4](assignments/4_triton_forward.ipynb) goes further: all lengths, NaN behind every end, and a clock.

# %% [markdown]
# ## Which tiles need the mask?
#
# So far every tile is masked. Chapter 04 sorted the tiles of a row block: FULL ones come first, then DIAGONAL ones, then
# those to skip. Two borders, numbers of keys, are enough. Up to `full` every row sees every key. From `last` on no row sees
# any. `full` is rounded down to whole tiles. So without a causal mask at most one tile lies between them: the ragged one at the end. The
# first row of a block sees least and decides `full`. The last row sees most and decides `last`.

# %%
seen = np.minimum(np.arange(600) + 1, 600)  # 600 queries and keys, tiles of 128 × 64
for i in range(0, 600, 128):
    full, last = seen[i] // 64 * 64, seen[min(i + 127, 599)]
    free, masked = full // 64, -(-(last - full) // 64)
    print(f"rows from {i:3}: {free} unmasked, {masked} masked, {10 - free - masked} skipped")

# %% [markdown]
# With as many keys as queries, and tiles of 128 × 64, the mask cuts through at most two tiles of each row block. At N =
# 8,192 that is 3% of the 65 tiles that a row block visits on average. (Rung 11 has tiles of 64 × 64: one.) So the kernel
# gets two loops. One goes from `full` to `last` and calls `visit` with `MASKED`. The other stops at `full`. It needs
# neither the causal mask nor the mask of the loads.

# %% [markdown]
# ## Which numbers may have 16 bits?
#
# Factors may have 16 bits, and sums need 32. Q, K, V and O have 16 bits, and p gets 16 bits for the second product. But
# `o_i` and `l_i` stay in fp32. $o$ is divided only at the end, so over 2,048 keys with equal scores and the value 40 it
# grows to 81,920. The largest number of fp16 is 65,504: in fp16 `o_i` becomes ∞. (For inputs in fp32 `tl.dot` has a
# setting, `input_precision="ieee"`. Chapter 11 says why.)

# %% [markdown]
# ## All lines together
#
# This is the kernel of rung 11, and the line that launches it. New is `head`, the program's second number: a launch has
# $T_r$ programs for each head of each text. `O.dtype.element_ty` is the type of O's numbers. Find the two loops, the
# two borders, and the start of m. `num_stages=3` lets the GPU copy two tiles ahead while it computes a third.
# `enable_fp_fusion` lets the compiler make one instruction of a product and the sum after it. The masked loop stands first
# (chapter 10 says why).

# %% tags=["nbval-ignore-output"]
rung = load("11")
print(getsource(rung.forward_kernel.fn))
print("\n".join(getsource(rung.forward).splitlines()[-4:-1]))

# %% [markdown]
# `load_rows`, `keys_seen` and `visit` are those from above. With grouped heads (chapter 05) a program takes K and V of head
# `head // group`, where `group` query heads share one of them. The package's own kernel takes more kinds of calls: other
# strides, any d up to 256, fp32, windows, dropout.

# %% [markdown]
# ## Recap
#
# - A program is a thread block. It knows its number; addresses and masks are up to you.
# - The loop over row blocks becomes the launch. $o$, ℓ and m stay in registers, in fp32.
# - exp2, with $\log_2 e$ in the scale. L goes out as a natural logarithm.
# - Two borders for each row block: `full` and `last`.
# - Three mistakes and their numbers: two zeros behind the end; 0.625 in place of 1; L too large by the factor 1 / ln 2 = 1.44.

# %% [markdown]
# ## Checks
#
# The functions of this notebook are rung 11's, and the rung agrees with the dense result in float64.

# %% tags=["hide-input"]
for mine in (load_rows, keys_seen, visit):
    verdict(f"{mine.fn.__name__} here = rung 11's", same_code(mine, getattr(rung, mine.fn.__name__)))
q, k, v = normal(1, 2, 70, 16), normal(1, 2, 33, 16, seed=1), normal(1, 2, 33, 16, seed=2)
want = heads.forward(*map(host, (q, k, v)), stage="naive", causal=True)
right = [close(host(a), b, 2e-3) for a, b in zip(rung.forward(q, k, v, True), want, strict=True)]
verdict("rung 11 = the dense result, causal, with rows that see no key", all(right))

# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)
