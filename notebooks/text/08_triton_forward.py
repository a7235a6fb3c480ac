# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)

# %% [markdown]
# # 08 · The Triton forward kernel
#
# **How do these lines become a GPU kernel?**
#
# Notebook 04 has Algorithm 1 in NumPy, notebook 06 hands its row blocks to thread blocks, notebook 07 shares a tile among
# warps. Now we write the program that a GPU runs. The language is Triton: Python with blocks of numbers in place of single
# numbers. You say what one thread block does, the compiler shares it among warps and threads.
#
# After this notebook you can
#
# - read and write a Triton kernel: which program am I, which addresses, which of them exist,
# - turn Algorithm 1 into Triton line by line, and say which lines look different from the paper's, and why,
# - recognise a broken kernel by its numbers: four ways to get it wrong, each run.
#
# *Time: 40 minutes. Hardware: any Linux machine; with an NVIDIA GPU the kernels are compiled, without one they run in
# Triton's interpreter, at small size. Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb) and [06 ·
# Parallelism](06_parallelism.ipynb).*

# %%
import math
from difflib import ndiff
from inspect import getsource

import numpy as np
import torch

from fa2_lab.attention import attention
from fa2_lab.kernels.portable import forward as packaged
from fa2_lab.kernels.portable.tile import head_of
from fa2_lab.plots import causal_tiles, ragged_edge
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, heads, naive
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Tile, Tiling

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# `fa2_lab` comes before Triton: where there is no GPU, it switches Triton's interpreter on, and that must be settled
# before Triton is loaded. In the interpreter every line of a kernel runs as NumPy, one program after the other.

# %% tags=["nbval-ignore-output"]
import triton
import triton.language as tl

chip = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
print(chip, "|", "interpreted, line by line" if triton.knobs.runtime.interpret else "compiled")
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))  # if interpreted, the package says so, once

# %% [markdown]
# ## What does a kernel get to see?
#
# Addresses. A kernel is given the address of the first number of X, and no shape and no end. The rest is for you to work
# out: which numbers are mine, and do they exist?
#
# One run of a kernel is called a *program*; it is notebook 06's thread block. `copy_kernel[(3,)](X, Y, 10, …)` launches
# three of them. All run the same lines and differ in one number, `program_id`. `X + at` is a block of addresses, and
# `tl.load` fetches them all at once. Blocks have a fixed size, a power of two, known when the kernel is compiled
# (`tl.constexpr`).
#
# **Predict.** Ten numbers in blocks of 4: how many programs? What does the last one do? And what is written if `tl.store`
# forgets the mask?

# %%
@triton.jit
def copy_kernel(X, Y, N, B: tl.constexpr, CAREFUL: tl.constexpr):
    i = tl.program_id(0)  # which of the programs am I?
    at = i * B + tl.arange(0, B)  # (B,) my places
    x = tl.load(X + at, mask=at < N, other=0.0)  # (B,) 0 where nothing is
    if CAREFUL:
        tl.store(Y + at, x, mask=at < N)
    else:
        tl.store(Y + at, x)


X = torch.arange(1.0, 11.0, device=device)
for careful in (True, False):
    memory = torch.full((12,), -1.0, device=device)  # room for 10, and two places of somebody else
    copy_kernel[(triton.cdiv(10, 4),)](X, memory, 10, B=4, CAREFUL=careful)  # 3 programs
    print(f"careful = {careful!s:5}", [int(x) for x in memory])

# %% [markdown]
# <details><summary>What happened to the two numbers</summary>
#
# Three programs. The last has places 8 to 11, of which two exist. A load with a mask does not touch the others and
# puts `other` there; a store with a mask leaves them alone. Without the mask two zeros land in memory that belongs to
# somebody else. No error is raised: the neighbour finds out later.
#
# `if CAREFUL` is decided when the kernel is compiled. The compiled kernel holds one of the two stores and no question.
# </details>
#
# **Takeaway.** A program works out its own addresses from `program_id`, and a mask says which of them exist.

# %% [markdown]
# ## Where does the next row start?
#
# A tensor of rows lies in memory as one long line. The *stride* says how many numbers to step over to the next row. For a
# packed matrix that is d. Models, however, often make Q as (N, heads, d) and hand on a transposed view.
#
# **Predict.** 10 rows, 2 heads, d = 4, made as (N, heads, d). How far apart are two rows of the same head? What does a
# kernel read if it assumes d?

# %%
@triton.jit
def load_rows(X, first, stride, N, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr):
    row, col = first + tl.arange(0, B), tl.arange(0, d_pad)
    real = (row < N)[:, None] & (col < d)[None, :]
    return tl.load(X + row[:, None] * stride + col[None, :], mask=real, other=0.0)  # (B, d_pad)


@triton.jit
def store_rows(X, x, first, stride, N, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr):
    row, col = first + tl.arange(0, B), tl.arange(0, d_pad)
    real = (row < N)[:, None] & (col < d)[None, :]
    tl.store(X + row[:, None] * stride + col[None, :], x.to(X.dtype.element_ty), mask=real)


@triton.jit
def copy_rows_kernel(X, Y, stride, N, B: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr):
    first = tl.program_id(0) * B
    store_rows(Y, load_rows(X, first, stride, N, B, d, d_pad), first, d, N, B, d, d_pad)

# %%
made = torch.zeros(10, 2, 4, device=device)
made += torch.arange(10, device=device)[:, None, None]
made[:, 1] += 100
q = made.transpose(0, 1)  # (heads, N, d): a view, nothing was copied
print("strides of (heads, N, d):", q.stride(), "  row r holds r in head 0 and 100 + r in head 1")
for stride in (q.stride(1), 4):
    rows = torch.full((10, 4), torch.nan, device=device)
    copy_rows_kernel[(triton.cdiv(10, 4),)](q, rows, stride, 10, B=4, d=4, d_pad=16)
    print(f"head 0, rows {stride} apart:", [int(x) for x in rows[:, 0]])

# %% [markdown]
# <details><summary>Rows of somebody else, and why d_pad = 16</summary>
#
# Between two rows of head 0 lies one of head 1, so the stride is 8. With 4 the kernel reads both heads in turn; the
# numbers look healthy, and a test with one head passes. `load_rows` takes the stride as an argument and needs no copy.
#
# Blocks have powers of two as sides, and tensor cores want at least 16 of them. So d = 4 is loaded as 16 columns, 12 of
# which do not exist and read as zero.
# </details>
#
# The picture shows the way from a program's number to its tile, with d = 4 and a stride of 4. The rows that a head does
# not have are the next head's, or nobody's. The mask keeps them out.

# %% tags=["nbval-ignore-output"]
show(ragged_edge.draw(**ragged_edge.data()))

# %% [markdown]
# **Takeaway.** Address of row r, column c: first address + r · stride + c. Whoever hands over a tensor hands over its
# strides.

# %% [markdown]
# ## How is a tile of S computed?
#
# Line 8 of Algorithm 1 is a product of two blocks, `tl.dot`. Programs may be counted along two axes; here program (i, j)
# takes tile (i, j), and writes it to HBM. (For this once. From the next section on S stays on the chip.)
#
# **Predict.** 20 queries, 20 keys, d = 4, tiles of 16 × 16. How many programs? Each row is loaded with 16 columns, of which
# four exist. What do the other twelve do to the scores?

# %%
@triton.jit
def scores_kernel(Q, K, S, N, tau, d: tl.constexpr, d_pad: tl.constexpr, B: tl.constexpr):
    i, j = tl.program_id(0) * B, tl.program_id(1) * B
    q_i = load_rows(Q, i, d, N, B, d, d_pad)
    k_j = load_rows(K, j, d, N, B, d, d_pad)
    s_ij = tau * tl.dot(q_i, k_j.T, input_precision="ieee")  # FA2.A1.L8
    row, col = i + tl.arange(0, B), j + tl.arange(0, B)
    real = (row < N)[:, None] & (col < N)[None, :]
    tl.store(S + row[:, None] * N + col[None, :], s_ij, mask=real)

# %%
def normal(*shape, seed=0, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, dtype)


def host(x):  # to NumPy, for comparing
    return x.double().cpu().numpy() if torch.is_tensor(x) else x


def agree(results, wanted, tolerance=1e-5):
    return [close(host(a), host(b), tolerance) for a, b in zip(results, wanted, strict=True)]


Q, K = normal(20, 4), normal(20, 4, seed=1)
S = torch.full((20, 20), torch.nan, device=device)
scores_kernel[(2, 2)](Q, K, S, 20, 0.5, d=4, d_pad=16, B=16)
print("S = τ Q Kᵀ:", close(host(S), 0.5 * host(Q) @ host(K).T, 1e-5))

# %% [markdown]
# <details><summary>Why zeros are harmless here, and what "ieee" means</summary>
#
# 0 · 0 adds nothing to a sum. Zero is the right filling for whatever is summed over, here the columns of d.
#
# S was filled with NaN beforehand, so a place that no program writes would show. For fp32 inputs the tensor cores would
# round the factors to 10 bits after the point (TF32) unless told otherwise: `input_precision="ieee"` asks for true fp32. For
# fp16 and bf16 it changes nothing.
# </details>
#
# **Takeaway.** `tl.dot` multiplies blocks; what is padded and summed over must be padded with zeros.

# %% [markdown]
# ## What must stand where no key is?
#
# Suppose all keys fit one block: then softmax needs no loop. 10 keys in a block of 16 leave six columns of S without
# a key. Their keys were loaded as zeros, so their scores are zero.
#
# **Predict.** Q = 0, so that all scores are equal, and every value is 1. The output should be 1. What comes out if the six
# columns keep their score of zero?

# %%
@triton.jit
def one_block_kernel(Q, K, V, O, N_q, N_k, tau, hidden,
                     d: tl.constexpr, d_pad: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B
    q_i = load_rows(Q, i, d, N_q, B, d, d_pad)
    k, v = load_rows(K, 0, d, N_k, B, d, d_pad), load_rows(V, 0, d, N_k, B, d, d_pad)
    s = tau * tl.dot(q_i, k.T, input_precision="ieee")  # (B, B)
    s = tl.where((tl.arange(0, B) < N_k)[None, :], s, hidden)
    p = tl.exp(s - tl.max(s, 1)[:, None])
    o = tl.dot(p, v, input_precision="ieee") / tl.sum(p, 1)[:, None]
    store_rows(O, o, i, d, N_q, B, d, d_pad)


Q, K, V = torch.zeros(10, 4, device=device), normal(10, 4), torch.ones(10, 4, device=device)
for hidden in (0.0, -torch.inf):
    O = torch.full_like(Q, torch.nan)
    one_block_kernel[(1,)](Q, K, V, O, 10, 10, 0.5, hidden, d=4, d_pad=16, B=16)
    print(f"score where there is no key: {hidden:4}   output: {O[0, 0].item()}")

# %% [markdown]
# <details><summary>0.625</summary>
#
# exp(0) = 1, so each of the six has a vote. They vote for their values, which are zero: 10/16 = 0.625. This is the first
# of our broken kernels. Its outputs are too small by a factor that depends on how far N_k is from a multiple of the block
# size, and a test with N_k = 128 does not see it. [Appendix B](B_errata.ipynb) has the same slip for causal masks.
# </details>
#
# **Takeaway.** Pad with what the next operation ignores: 0 before a sum, −∞ before a softmax.

# %% [markdown]
# ## The loop over keys
#
# Everything for Algorithm 1 is there. Notebook 04's `trace.parallel("i", …)` was a loop whose passes need nothing from
# each other. On the GPU it is no loop at all: it is the grid. [The poster](../figures/poster_forward.pdf) has NumPy and
# Triton side by side, line by line.
#
# **Predict.** Take the NumPy version in hand, printed below. Which of its lines disappear in Triton, which are
# new? Where do `o_i`, `m_i` and `l_i` live?

# %% tags=["nbval-ignore-output"]
print("\n".join(line for line in getsource(fa2.forward).splitlines() if "# FA2." in line))

# %%
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def loop_kernel(Q, K, V, O, L, N_q, N_k, tau,
                d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r  # FA2.A1.L3
    q_i = load_rows(Q, i, d, N_q, B_r, d, d_pad)  # FA2.A1.L4
    o_i, l_i = tl.zeros((B_r, d_pad), tl.float32), tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    for j in range(0, N_k, B_c):  # FA2.A1.L6
        k_j = load_rows(K, j, d, N_k, B_c, d, d_pad)  # FA2.A1.L7
        v_j = load_rows(V, j, d, N_k, B_c, d, d_pad)  # FA2.A1.L7
        s_ij = tau * tl.dot(q_i, k_j.T, input_precision="ieee")  # FA2.A1.L8
        s_ij = tl.where((j + tl.arange(0, B_c) < N_k)[None, :], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # FA2.A1.L9
        p_ij = tl.exp(s_ij - m_new[:, None])  # FA2.A1.L9
        alpha = tl.exp(m_i - m_new)  # FA2.A1.L9
        l_i = alpha * l_i + tl.sum(p_ij, 1)  # FA2.A1.L9
        o_i = alpha[:, None] * o_i + tl.dot(p_ij, v_j, input_precision="ieee")  # FA2.A1.L10
        m_i = m_new
    store_rows(O, o_i / l_i[:, None], i, d, N_q, B_r, d, d_pad)  # FA2.A1.L12 FA2.A1.L14
    row = i + tl.arange(0, B_r)
    tl.store(L + row, m_i + tl.log(l_i), mask=row < N_q)  # FA2.A1.L13 FA2.A1.L15

# %%
def run(kernel, q, k, v, *more, B_r=16, B_c=16, **options):  # one head: (N, d)
    (N_q, d), N_k = q.shape, len(k)
    o, lse = torch.full_like(q, torch.nan), torch.full((N_q,), torch.nan, device=device)
    options |= dict(d=d, d_pad=max(16, triton.next_power_of_2(d)), B_r=B_r, B_c=B_c)
    kernel[(triton.cdiv(N_q, B_r),)](q, k, v, o, lse, N_q, N_k, *more, **options)
    return o, lse


def truth(q, k, v, causal=False):  # float64, S written out in full
    o, lse = heads.forward(*(host(x)[None, None] for x in (q, k, v)), stage="naive", causal=causal)
    return o[0, 0], lse[0, 0]


Q, K, V = normal(45, 20), normal(70, 20, seed=1), normal(70, 20, seed=2)
tau = 20**-0.5
for scale, tolerance in ((1, 1e-5), (300, 1e-3)):  # and with huge scores
    right = agree(run(loop_kernel, scale * Q, K, V, tau), truth(scale * Q, K, V), tolerance)
    print(f"45 queries × {scale:3}, 70 keys, d = 20: O and L right:", right)

# %% [markdown]
# <details><summary>What became of each line</summary>
#
# | NumPy | Triton |
# |---|---|
# | `for i in trace.parallel(…)` | `tl.program_id(0)`: the grid has T_r programs |
# | `Q[rows]`, a slice that ends where the data ends | addresses and a mask |
# | `np.zeros`, `np.full` | `tl.zeros`, `tl.full`, of a fixed size |
# | a ragged tile is a smaller tile | a ragged tile is a full one with −∞ in it |
# | `O[rows] = o_i` | `tl.store` with a mask |
#
# `o_i`, `m_i` and `l_i` are blocks of fixed size, and the compiler keeps them in registers, spread over the warps'
# threads. Nothing in the kernel says "shared memory" or "warp": the compiler puts k_j and v_j there and picks the layout.
# </details>
#
# **Takeaway.** The outer loop becomes the grid, slices become addresses with masks; lines 6 to 15 stay what they were.

# %% [markdown]
# ## Which exponential does the chip have?
#
# Notebook 04 counted what an exponential costs. The hardware has only one, 2ˣ. `tl.exp(x)` is carried out as 2 to the power
# x · log₂e, so every score is multiplied twice: by τ, and by log₂e.
#
# **Predict.** How would you do with one multiplication for each score? Which quantities are then in units of log₂, and
# which line at the end has to turn back?

# %%
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def base2_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, unit,
                 d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    q_i = load_rows(Q, i, d, N_q, B_r, d, d_pad)
    o_i, l_i = tl.zeros((B_r, d_pad), tl.float32), tl.zeros((B_r,), tl.float32)
    m_i = tl.full((B_r,), NEG_INF, tl.float32)
    for j in range(0, N_k, B_c):
        k_j = load_rows(K, j, d, N_k, B_c, d, d_pad)
        v_j = load_rows(V, j, d, N_k, B_c, d, d_pad)
        s_ij = tau_log2 * tl.dot(q_i, k_j.T, input_precision="ieee")
        s_ij = tl.where((j + tl.arange(0, B_c) < N_k)[None, :], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))
        p_ij = tl.exp2(s_ij - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = alpha * l_i + tl.sum(p_ij, 1)
        o_i = alpha[:, None] * o_i + tl.dot(p_ij, v_j, input_precision="ieee")
        m_i = m_new
    store_rows(O, o_i / l_i[:, None], i, d, N_q, B_r, d, d_pad)
    row = i + tl.arange(0, B_r)
    tl.store(L + row, (m_i + tl.log2(l_i)) * unit, mask=row < N_q)

# %% [markdown]
# The lines that moved (−: gone, +: new), and a run. `unit` is ln 2, the factor that turns a log₂ into a natural logarithm;
# with `unit = 1` the kernel forgets to turn back.

# %%
def moved(before, after):  # without signatures, tags and indentation
    code = ([line.split("  #")[0].strip() for line in getsource(k.fn).split("):\n", 1)[1].splitlines()]
            for k in (before, after))
    return "\n".join(line for line in ndiff(*code) if line.startswith(("-", "+")))


print(moved(loop_kernel, base2_kernel))
tau_log2, ln2 = tau / math.log(2), math.log(2)
print("O and L right:", agree(run(base2_kernel, Q, K, V, tau_log2, ln2), truth(Q, K, V)))
eight = torch.zeros(16, 20, device=device), normal(8, 20), normal(8, 20)  # Q = 0: eight scores of 0
for unit in (ln2, 1.0):
    o, lse = run(base2_kernel, *eight, tau_log2, unit)
    print(f"L = {lse[0].item():.4f}   Σ exp(S − L) = {8 * np.exp(-lse[0].item()):.4f}")

# %% [markdown]
# <details><summary>Folding, and the second broken kernel</summary>
#
# τ · log₂e is one number, multiplied out before the launch. Then s, m and log₂ l are all in units of log₂; p, α, `l` and `o`
# are what they were, because 2^(x log₂e) = eˣ. Only L has to be turned back.
#
# If it is not, O is right and L of eight equal keys is 3 instead of ln 8 = 2.0794. Nobody notices until the backward pass
# takes exp(S − L), whose rows then sum to 0.3983, or until someone merges two parts by their L. That has happened in
# serving systems: [sglang #40903](https://github.com/sgl-project/sglang/issues/40903), [vLLM
# #28840](https://github.com/vllm-project/vllm/pull/28840).
# </details>
#
# **Takeaway.** Fold log₂e into the scale and use exp2; L leaves the kernel as a natural logarithm, always.

# %% [markdown]
# ## A row that sees nothing
#
# Now the causal mask. `keys_seen` says how many keys a row sees, counted from the left: with N_q ≠ N_k the diagonal ends
# in the bottom right corner. The loop moves into a function of its own, `visit`, because the next section calls it twice;
# so do the lines before and after it.
#
# **Predict.** 20 queries, 12 keys. How many rows see no key at all? What is exp2(s − m) there? In `visit` below,
# `empty` is what is subtracted while a row's maximum is still −∞.

# %%
@triton.jit
def keys_seen(row, N_q, N_k, CAUSAL: tl.constexpr):
    if CAUSAL:
        return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k)
    else:
        return N_k + 0 * row


@triton.jit
def visit(o_i, m_i, l_i, q_i, K, V, K_stride, V_stride, first, last, N_k, seen, tau_log2, empty,
          MASKED: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, B_c: tl.constexpr):
    for j in range(first, last, B_c):
        k_j = load_rows(K, j, K_stride, N_k, B_c, d, d_pad)
        s_ij = tau_log2 * tl.dot(q_i, k_j.T, input_precision="ieee")
        if MASKED:
            s_ij = tl.where((j + tl.arange(0, B_c))[None, :] < seen[:, None], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))
        m_ref = tl.where(m_new == NEG_INF, empty, m_new) if MASKED else m_new
        p_ij = tl.exp2(s_ij - m_ref[:, None])
        alpha = tl.exp2(m_i - m_ref)
        l_i, m_i = alpha * l_i + tl.sum(p_ij, 1), m_new
        v_j = load_rows(V, j, V_stride, N_k, B_c, d, d_pad)
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, alpha[:, None] * o_i, input_precision="ieee")
    return o_i, m_i, l_i

# %%
@triton.jit
def start(B_r: tl.constexpr, d_pad: tl.constexpr):
    m_i = tl.full((B_r,), NEG_INF, tl.float32)
    return tl.zeros((B_r, d_pad), tl.float32), m_i, tl.zeros((B_r,), tl.float32)


@triton.jit
def finish(O, L, o_i, m_i, l_i, i, O_stride, N_q,
           B_r: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr):
    l_i = tl.where(l_i == 0.0, 1.0, l_i)  # a row without keys: O = 0 / 1, L = −∞
    store_rows(O, o_i / l_i[:, None], i, O_stride, N_q, B_r, d, d_pad)
    row = i + tl.arange(0, B_r)
    tl.store(L + row, (m_i + tl.log2(l_i)) * LN2, mask=row < N_q)


@triton.jit
def causal_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, empty, CAUSAL: tl.constexpr,
                  d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    seen = keys_seen(i + tl.arange(0, B_r), N_q, N_k, CAUSAL)  # (B_r,)
    q_i = load_rows(Q, i, d, N_q, B_r, d, d_pad)
    o_i, m_i, l_i = start(B_r, d_pad)
    o_i, m_i, l_i = visit(o_i, m_i, l_i, q_i, K, V, d, d, 0, N_k, N_k, seen, tau_log2, empty, True,
                          d, d_pad, B_c)
    finish(O, L, o_i, m_i, l_i, i, d, N_q, B_r, d, d_pad)

# %%
few = normal(20, 20), normal(12, 20, seed=1), normal(12, 20, seed=2)
for empty in (-torch.inf, 0.0):
    with np.errstate(invalid="ignore"):  # the interpreter warns, a GPU does not
        o, lse = run(causal_kernel, *few, tau_log2, empty, CAUSAL=True)
    right = agree((o, lse), truth(*few, causal=True))
    print(f"subtract {empty:4}: rows with NaN: {int(o.isnan().any(1).sum())}   O and L right: {right}")

# %% [markdown]
# <details><summary>−∞ − (−∞)</summary>
#
# Row r sees r + 1 + 12 − 20 keys, so rows 0 to 7 see none. Their scores are all −∞, their maximum is −∞, and the
# difference is NaN, as in notebook 02. (Third broken kernel, and the papers' formulas as printed.) With 0 subtracted
# instead, p = 2^−∞ = 0, `l` stays 0, and the division is made by 1: O = 0 and L = −∞.
#
# `tl.dot(p, v, acc)` adds to a block that is already there. And `p_ij.to(v_j.dtype)` hands the tensor cores p in
# the type of V; of this more below.
# </details>
#
# **Takeaway.** While a row has seen no key, subtract 0; where l is 0 at the end, divide by 1.

# %% [markdown]
# ## Who needs the mask?
#
# This kernel visits every tile, and asks every score whether it may be seen. Notebook 04 sorted the tiles: SKIP, DIAGONAL,
# FULL. For row block i the FULL tiles come first, then the DIAGONAL ones, then what is skipped. So two calls of `visit`
# are enough: one without the mask, one with.
#
# **Predict.** A row block starts at row i. Up to which key does every row of it see every key? From which key on does
# none see any? Write both with `keys_seen`; the first must be a whole number of blocks.

# %%
@triton.jit
def two_loops_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, Visits, CAUSAL: tl.constexpr,
                     d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    seen = keys_seen(i + tl.arange(0, B_r), N_q, N_k, CAUSAL)  # (B_r,)
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c * B_c  # the first row sees least
    last = keys_seen(tl.minimum(i + B_r, N_q) - 1, N_q, N_k, CAUSAL)  # the last row sees most
    q_i = load_rows(Q, i, d, N_q, B_r, d, d_pad)
    o_i, m_i, l_i = start(B_r, d_pad)
    o_i, m_i, l_i = visit(o_i, m_i, l_i, q_i, K, V, d, d, 0, full, N_k, seen, tau_log2, 0.0, False,
                          d, d_pad, B_c)
    o_i, m_i, l_i = visit(o_i, m_i, l_i, q_i, K, V, d, d, full, last, N_k, seen, tau_log2, 0.0, True,
                          d, d_pad, B_c)
    finish(O, L, o_i, m_i, l_i, i, d, N_q, B_r, d, d_pad)
    tl.store(Visits + 2 * tl.program_id(0), full // B_c)  # for us: how many tiles of each kind
    tl.store(Visits + 2 * tl.program_id(0) + 1, tl.cdiv(last - full, B_c))

# %%
def visits(N, B_r, B_c, causal):
    q, k, v = (normal(N, 20, seed=s) for s in range(3))
    counts = torch.full((triton.cdiv(N, B_r), 2), -1, dtype=torch.int32, device=device)
    results = run(two_loops_kernel, q, k, v, tau_log2, counts, CAUSAL=causal, B_r=B_r, B_c=B_c)
    return counts.tolist(), agree(results, truth(q, k, v, causal))


ragged = Tiling(300, 300, 64, 32, CAUSAL)
counts, right = visits(300, 64, 32, causal=True)
print("O and L right:", right)
for i, (full, masked) in enumerate(counts):
    skipped = ragged.T_c - full - masked
    print(f"row block {i}: {full} tiles without a mask, {masked} with, {skipped} skipped")
long = Tiling(8192, 8192, 128, 64, CAUSAL).counts()
share = long[Tile.DIAGONAL] / (long[Tile.DIAGONAL] + long[Tile.FULL])
print(f"8,192 queries and keys, 128 × 64: {share:.1%} of the visited tiles are masked")

# %%
tilings = {"The run above": ragged, "Fewer queries than keys": Tiling(108, 300, 64, 32, CAUSAL)}
curves = causal_tiles.data()
show(causal_tiles.draw(tilings, curves["N"], curves["shares"]))

# %% [markdown]
# <details><summary>The two borders</summary>
#
# The first row of the block sees least: whole blocks below `keys_seen(i)` are FULL. The last row that exists sees most:
# tiles from `keys_seen(last row)` on are skipped. What lies between is DIAGONAL.
#
# `MASKED` is a `tl.constexpr`: the compiler makes two loops of the one function, and in the first there is no comparison,
# no select and no question about −∞. Without the causal mask the second loop is left with the ragged tile at
# the end, if there is one. The last row block on the left has 44 real rows of 64; the others are computed and
# thrown away.
# </details>
#
# **Takeaway.** Two numbers for each row block, `full` and `last`, replace a question for each score.

# %% [markdown]
# ## Many heads, and who starts first
#
# A launch has batch · heads · T_r programs, counted along one axis. Each works out its head, and the head's first address
# from the strides. Grouped heads need a single division: query head h reads key head h // group.
#
# **Predict.** With a causal mask the last row block of a head has the most tiles. Programs start in the order of their
# numbers. Which line decides what starts first, and what should it say? (Notebook 06 has the reason.)

# %%
@triton.jit
def forward_kernel(Q, K, V, O, L, Q_strides, K_strides, V_strides, O_strides, H, group, heads, N_q, N_k,
                   tau_log2, CAUSAL: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr,
                   B_r: tl.constexpr, B_c: tl.constexpr):
    i, bh = tl.program_id(0) // heads, tl.program_id(0) % heads
    if CAUSAL:
        i = tl.cdiv(N_q, B_r) - 1 - i  # the heaviest row blocks first
    i, b, h = i * B_r, bh // H, bh % H
    Q, K = head_of(Q, Q_strides, b, h), head_of(K, K_strides, b, h // group)
    V, O = head_of(V, V_strides, b, h // group), head_of(O, O_strides, b, h)
    k_stride, v_stride = K_strides[2], V_strides[2]
    seen = keys_seen(i + tl.arange(0, B_r), N_q, N_k, CAUSAL)
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c * B_c
    last = keys_seen(tl.minimum(i + B_r, N_q) - 1, N_q, N_k, CAUSAL)
    q_i = load_rows(Q, i, Q_strides[2], N_q, B_r, d, d_pad)
    o_i, m_i, l_i = start(B_r, d_pad)
    o_i, m_i, l_i = visit(o_i, m_i, l_i, q_i, K, V, k_stride, v_stride, 0, full, N_k, seen, tau_log2,
                          0.0, False, d, d_pad, B_c)
    o_i, m_i, l_i = visit(o_i, m_i, l_i, q_i, K, V, k_stride, v_stride, full, last, N_k, seen, tau_log2,
                          0.0, True, d, d_pad, B_c)
    finish(O, L + tl.cast(bh, tl.int64) * N_q, o_i, m_i, l_i, i, O_strides[2], N_q, B_r, d, d_pad)

# %%
def launch(q, k, v, causal=False, B_r=64, B_c=32):  # (batch, heads, N, d)
    (batch, H, N_q, d), (_, H_kv, N_k, _) = q.shape, k.shape
    o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device=device)
    strides = [x.stride()[:3] for x in (q, k, v, o)]
    d_pad, tau_log2 = max(16, triton.next_power_of_2(d)), d**-0.5 / math.log(2)
    made = forward_kernel[(batch * H * triton.cdiv(N_q, B_r),)](
        q, k, v, o, lse, *strides, H, H // H_kv, batch * H, N_q, N_k, tau_log2,
        CAUSAL=causal, d=d, d_pad=d_pad, B_r=B_r, B_c=B_c)
    return o, lse, made


def forward(*qkv, **options):
    return launch(*qkv, **options)[:2]


q = normal(1, 100, 4, 20).transpose(1, 2)  # made as (batch, N, heads, d)
k, v = (normal(1, 2, 130, 20, seed=s) for s in (1, 2))  # two query heads share a key head
for causal in (False, True):
    want = heads.forward(host(q), host(k), host(v), stage="naive", causal=causal)
    print(f"causal = {causal!s:5}  O and L right:", agree(forward(q, k, v, causal=causal), want))

# %% tags=["nbval-ignore-output"]
print(getsource(head_of.fn))

# %% [markdown]
# <details><summary>One line, and one cast</summary>
#
# `i = T_r − 1 − i` turns the order of the row blocks around. All heads' heaviest blocks are launched first, then all heads'
# second heaviest, because the head is what changes fastest from one program to the next.
#
# `head_of` counts in 64 bits. Triton's integers have 32: with more than 2³¹ elements in a tensor, batch · stride would
# wrap around and point somewhere else.
# </details>
#
# **Takeaway.** A head is an offset; sharing keys is one integer division, and the heaviest first is one subtraction.

# %% [markdown]
# ## Which numbers may have 16 bits?
#
# Q, K, V and O come in fp16 or bf16 as a rule: half the traffic, and the tensor cores are made for it. Inside the kernel
# p is turned into 16 bits for the second product, but `o_i`, `l_i` and `m_i` are fp32.
#
# **Predict.** Why not keep `o_i` and `l_i` in fp16 as well? It would halve the registers. Take Q = 0 and 4,096 keys whose
# values are all 20. The output is 20. The largest number in fp16 is 65,504.

# %%
@triton.jit
def narrow_kernel(Q, K, V, O, N, tau_log2, ACC: tl.constexpr,
                  d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    q = load_rows(Q, 0, d, B_r, B_r, d, d)
    o, m, l = start(B_r, d)
    o, l = o.to(ACC), l.to(ACC)
    for j in range(0, N, B_c):
        k, v = load_rows(K, j, d, N, B_c, d, d), load_rows(V, j, d, N, B_c, d, d)
        s = tau_log2 * tl.dot(q, k.T)
        m_new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        l = (alpha * l + tl.sum(p, 1)).to(ACC)
        o = (alpha[:, None] * o + tl.dot(p.to(v.dtype), v)).to(ACC)
        m = m_new
    store_rows(O, o.to(tl.float32) / l[:, None], 0, d, B_r, B_r, d, d)


Q, K = torch.zeros(16, 16, dtype=torch.float16, device=device), normal(4096, 16, dtype=torch.float16)
for value in (20.0, 0.1):
    V = torch.full_like(K, value)
    for ACC in (tl.float32, tl.float16):
        O = torch.full((16, 16), torch.nan, device=device)
        with np.errstate(over="ignore"):
            narrow_kernel[(1,)](Q, K, V, O, 4096, 0.36, ACC=ACC, d=16, B_r=16, B_c=64)
        print(f"values {value:4}, summed in {ACC}: {O[0, 0].item():.4f}")

# %% [markdown]
# <details><summary>The price of not dividing</summary>
#
# Tweak 1 keeps `o` undivided, so it grows with the number of keys: 4,096 · 20 = 81,920, more than fp16 can hold. With
# values of 0.1 nothing overflows, but near 400 the next fp16 number is 0.25 away, and every addition of 6.4 is rounded
# to it: the mean is off by 0.4%. p is different: it lies between 0 and 1, is used once, and its rounding is not carried on. (Fourth broken
# kernel.)
# </details>

# %% [markdown]
# What did the compiler make of `forward_kernel` for fp16? A launch hands it back; in the interpreter there is nothing. (On
# an H200 with Triton 3.6 the code of a thread held 16 tensor-core instructions and 68 exponentials in base 2, in 127
# registers, none of them spilled.)

# %% tags=["nbval-ignore-output"]
half = (normal(1, 2, 256, 64, seed=s, dtype=torch.float16) for s in range(3))
made = launch(*half, causal=True, B_c=64)[2]
if made is None:
    print("interpreted: no machine code to look at")
else:
    ptx = made.asm["ptx"]
    products = ptx.count("wgmma.mma_async") + ptx.count("mma.sync")
    print(f"{chip}: {products} tensor-core instructions, {ptx.count('ex2')} exponentials in base 2")
    print(f"{made.n_regs} registers for each thread, {made.n_spills} spilled")
    print(f"{made.metadata.shared} bytes of shared memory")

# %% [markdown]
# **Takeaway.** Factors may be narrow, sums must be wide.

# %% [markdown]
# ## What does the package's kernel do differently?
#
# Here is the loop that `attention()` runs, and the softmax step that it calls. You have written almost all of it.
#
# **Predict.** Find the four things that your `visit` does not have, and the one that it does in another place.

# %% tags=["nbval-ignore-output"]
for function in (packaged.visit_tiles, packaged.softmax_step):
    print(function.__name__ + getsource(function.fn).split('"""')[2], end="\n\n")

# %% [markdown]
# <details><summary>Four things and another place</summary>
#
# - `MASKED` reaches the loads: where a tile is FULL, they need no mask either.
# - `dropout`: with p dropped after the row sum, keyed by place (notebook 03).
# - `tile` says what the kernel was compiled for. Its last entry, `upcast`, widens bf16 in `load_tile`: the interpreter would
#   multiply the bit patterns instead of the numbers.
# - `coarse` and `huge`: a second scale for huge scores. Exercise 3 has the reason.
# - The scale is multiplied into s − m, not into s: the GPU then does both in one instruction (a fused multiply-add), for
#   which m is multiplied by the scale beforehand. One multiplication less for each score.
#
# And the DIAGONAL tiles are visited before the FULL ones. The result does not mind, since a state takes tiles in any order;
# the compiler does, and a comment in forward.py says how much.
# </details>
#
# **Takeaway.** Between your kernel and the package's lie a handful of lines, each for one kind of input; the algorithm is
# the same.

# %% [markdown]
# ## Recap
#
# - A program is a thread block. It knows its number; addresses and masks are up to you.
# - Pad with what the next operation ignores: 0 before a sum, −∞ before a softmax.
# - The loop over row blocks becomes the grid; o, l and m stay in registers, in fp32.
# - One exponential, exp2, with log₂e in the scale; L goes out as a natural logarithm.
# - Two loops for each row block: FULL without a mask, DIAGONAL and ragged with.
# - Heads are offsets, in 64 bits; the heaviest row blocks go first.
# - Broken kernels and their faces: 0.625 instead of 1; L = 3 instead of ln 8; NaN in rows without keys; ∞ from narrow sums.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** 130 queries and keys, blocks of 64 × 32, causal. How many programs, and how many tiles of each
# kind does each of them visit?
#
# <details><summary>Hint</summary>
#
# The last row block has two rows, 128 and 129. `full` comes from the first of them, `last` from the second.
# </details>

# %%
print("tiles [without a mask, with]:", visits(130, 64, 32, causal=True)[0])
print("and not causal:              ", visits(130, 64, 32, causal=False)[0])

# %% [markdown]
# <details><summary>Answer</summary>
#
# Three programs. The last one: row 128 sees 129 keys, four whole blocks of 32; row 129 sees 130, so one ragged tile is left.
# Without the mask every row block has four whole tiles and the ragged one.
# </details>
#
# **2. Complete.** A kernel for L alone: the logsumexp of each row of a matrix S (N × N_k) that lies in HBM, in
# blocks of B_c. It needs notebook 02's state without `o`. The cell holds a solution: cover the loop and write your own.
#
# <details><summary>Hint</summary>
#
# What must `other` be where a row has ended? And what is (m, l) before the first block?
# </details>

# %%
@triton.jit
def logsumexp_kernel(S, L, N_k, B_c: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)  # (1,): a block of one row
    m, l = tl.full((1,), NEG_INF, tl.float32), tl.zeros((1,), tl.float32)
    for j in range(0, N_k, B_c):
        col = j + tl.arange(0, B_c)
        s = tl.load(S + row * N_k + col, mask=col < N_k, other=NEG_INF)  # (B_c,)
        m_new = tl.maximum(m, tl.max(s, 0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new), 0)
        m = m_new
    tl.store(L + row, m + tl.log(l))


S, L = 100 * normal(5, 1000), torch.full((5,), torch.nan, device=device)
logsumexp_kernel[(5,)](S, L, 1000, B_c=64)
print("L:", close(host(L), naive.logsumexp(host(S)), 1e-5))

# %% [markdown]
# <details><summary>Answer</summary>
#
# `other=NEG_INF`: 0 would be a score, with a vote. The state starts at (−∞, 0). A first block always has a key, so −∞ − (−∞)
# cannot happen here; in a masked matrix it could.
# </details>
#
# **3. Break and fix.** The package computes the exponent as s·c − (m·c). A fused multiply-add rounds once, at the
# end; m·c has been rounded before. For the largest score s = m, so the exponent should be 0. Put in the numbers of a bug
# report against PyTorch, q = k = 133,120 (the cell imitates the instruction in float64): what is exp2 of the result in
# fp32? Then find a c for which nothing is rounded, and say why it may be used.
#
# <details><summary>Hint</summary>
# Which multiplications are exact in binary?
# </details>

# %%
score, c = np.float32(133120.0**2), np.float32(16**-0.5 / math.log(2))
below = np.float32(2.0 ** np.floor(np.log2(c)))
for name, factor in (("the scale", c), ("a power of two below it", below)):
    fused = float(score) * float(factor) - float(np.float32(score * factor))
    print(f"{name}: s·c − (m·c) of the largest score = {fused:.1f}")
q = torch.full((1, 1, 4, 1), 133120.0, device=device)
print("attention() of such inputs, values 1:", attention(q, q, q / 133120).flatten().tolist())

# %% [markdown]
# <details><summary>Answer</summary>
#
# 2^247 is infinite in fp32, and ∞/∞ is NaN. Multiplying by a power of two is exact. It is not the right scale, though:
# up to twice too small. But where |m·c| is above 2²⁸, two fp32 scores that differ at all differ by at least 16 after
# scaling, or by 8 with the smaller scale: then one has all the weight, whichever is taken. So `coarse` is used for such rows
# alone. Below, the product's rounding makes all p of a row wrong by the same factor, at most 2⁸, which cancels in O.
# </details>

# %% [markdown]
# ## Checks
#
# This notebook's kernels against `attention()`, the package's call, and `attention()` against the dense result in float64:
# ragged lengths, grouped heads, rows without keys, huge scores, half precision.

# %%
Q, K, V = normal(45, 20), normal(70, 20, seed=1), normal(70, 20, seed=2)
for causal in (False, True):
    one_head = (x[None, None] for x in (Q, K, V))
    package = [x[0, 0] for x in attention(*one_head, causal=causal, return_lse=True)]
    mine = run(causal_kernel, Q, K, V, tau_log2, 0.0, CAUSAL=causal)
    verdict(f"causal_kernel = attention(), causal = {causal}", all(agree(mine, package)))
    counts = torch.zeros(3, 2, dtype=torch.int32, device=device)
    mine = run(two_loops_kernel, Q, K, V, tau_log2, counts, CAUSAL=causal)
    verdict(f"two_loops_kernel = attention(), causal = {causal}", all(agree(mine, package)))
    if not causal:
        verdict("loop_kernel = attention()", all(agree(run(loop_kernel, Q, K, V, tau), package)))
        mine = run(base2_kernel, Q, K, V, tau_log2, ln2)
        verdict("base2_kernel = attention()", all(agree(mine, package)))

# %%
cases = {  # (heads, key heads, N_q, N_k, d, size of the scores, type, tolerance)
    "one key": (1, 1, 1, 1, 4, 1, torch.float32, 1e-5),
    "ragged, grouped heads": (4, 2, 70, 100, 20, 1, torch.float32, 1e-5),
    "rows without keys": (2, 1, 70, 33, 20, 1, torch.float32, 1e-5),
    "huge scores": (1, 1, 70, 70, 16, 300, torch.float32, 1e-3),
    "fp16, d = 64": (1, 1, 130, 130, 64, 1, torch.float16, 2e-3),
}
for name, (H, H_kv, N_q, N_k, d, size, dtype, tolerance) in cases.items():
    q = (size * normal(1, H, N_q, d)).to(dtype)
    k, v = (normal(1, H_kv, N_k, d, seed=s, dtype=dtype) for s in (1, 2))
    for causal in (False, True):
        want = heads.forward(host(q), host(k), host(v), stage="naive", causal=causal)
        package = attention(q, k, v, causal=causal, return_lse=True)
        mine, case = forward(q, k, v, causal=causal), f"{name}, causal = {causal}"
        verdict(f"forward = attention(): {case}", all(agree(mine, package, tolerance)))
        verdict(f"attention() = the dense result: {case}", all(agree(package, want, tolerance)))

# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)
