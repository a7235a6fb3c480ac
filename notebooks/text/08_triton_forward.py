# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)

# %% [markdown]
# # 08 · The Triton forward kernel
#
# **How do these lines become a GPU kernel?**
#
# Chapter 04 has Algorithm 1 in NumPy. Chapter 06 made each row block a worker of its own. Now we write the program
# that such a worker runs. The language is *Triton*: Python with blocks of numbers in place of single numbers. You say
# what one thread block does, and the compiler shares the work among its warps (chapter 07). We build the kernel line
# by line. The chapter ends when all lines of the kernel are together. The book has twenty such kernels, each one
# change away from the one before: the *ladder*, which chapter 10 climbs. This one is its rung 07.
#
# After this notebook you can
#
# - write a Triton kernel: which program am I, which addresses are mine, which of them exist,
# - turn Algorithm 1 into Triton, and say why some lines do not look like the paper's,
# - recognise six mistakes by the numbers that they print.
#
# *Time: 60 minutes with the questions and exercises. Hardware: any machine with Linux; without an NVIDIA GPU the
# kernels run in Triton's interpreter. Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb) and [06 ·
# Parallelism](06_parallelism.ipynb).*

# %%
import ast
import math
from inspect import getsource

import numpy as np
import torch

from fa2_lab.attention import attention
from fa2_lab.kernels.ladder import load
from fa2_lab.plots import ragged_edge
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, heads
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Tile, Tiling

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# Without a GPU the package sets `TRITON_INTERPRET=1` before Triton is loaded, so it is imported first. Then every line of
# a kernel runs as NumPy, one program after the other. In a script of your own, set the variable yourself.

# %% tags=["nbval-ignore-output"]
import triton
import triton.language as tl

print("kernels of this notebook:", "interpreted" if triton.knobs.runtime.interpret else "compiled for the GPU here")
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))  # the package says once that it is slow here

# %% [markdown]
# ## What does a kernel get to see?
#
# `@triton.jit` makes a function a kernel. A kernel is given the address of a tensor's first number: no shape, no end. One
# run of it is called a *program*; it is chapter 06's thread block. All programs run the same lines and differ in one
# number, `program_id`.
#
# `X + at` is a block of addresses, and `tl.load` fetches them all at once. The size of a block is a power of two, known
# when the kernel is compiled (`tl.constexpr`). A *mask* says which of the addresses exist.
#
# **Predict.** Ten numbers in blocks of 4 take three programs. What does the last one write behind the end, if `tl.store`
# forgets the mask?

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
    memory = torch.full((12,), -1.0, device=device)  # room for 10, and two places of somebody else
    copy_kernel[(3,)](X, memory, 10, B=4, CAREFUL=careful)  # [(3,)]: three programs
    print(f"careful = {careful!s:5}", [int(x) for x in memory])

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two zeros.** They land in memory that belongs to somebody else, and no error is raised.
# </details>
#
# The masked load does not touch what lies behind the end, and returns `other` for it. The compiler decides `if CAREFUL`,
# because it is a `constexpr`: the compiled kernel has only one of the two stores.
#
# **Takeaway.** A program works out its addresses from `program_id`, and a mask says which of them exist.

# %% [markdown]
# ## Where does the next row begin?
#
# In memory a tensor is one long line. `load_rows` assumes that the rows of a head lie one after the other, d numbers
# each. So row r, column c is at r · d + c. `RAGGED` says whether some of the rows may not exist. (Triton computes with
# integers of 32 bits, which end at 2³¹. So the offset of the first row is computed with 64 bits.)
#
# Models, however, often make Q as (N, heads, d) and hand on a transposed view.
#
# **Predict.** 10 rows, 2 heads. Row r holds the number r in head 0, and 100 + r in head 1. Which rows does the kernel read
# for head 0 of such a view?

# %%
@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr, RAGGED: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    if RAGGED:
        return tl.load(at, mask=first + row < N, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def maxima_kernel(X, Y, N, B: tl.constexpr, d: tl.constexpr):
    first = tl.program_id(0) * B
    row = first + tl.arange(0, B)
    x = load_rows(X, first, N, B, d, True)  # (B, d)
    tl.store(Y + row, tl.max(x, 1), mask=row < N)  # all numbers of a row are equal here: one says which row it is

# %%
made = torch.arange(10.0, device=device)[:, None, None] + torch.zeros(10, 2, 16, device=device)
made[:, 1] += 100
view = made.transpose(0, 1)  # (heads, N, d): nothing was copied
for name, q in (("the view", view), ("its copy", view.contiguous())):
    maxima = torch.full((10,), torch.nan, device=device)
    maxima_kernel[(3,)](q, maxima, 10, B=4, d=16)
    print(f"{name}, {q.stride(1)} numbers from row to row: head 0 is", [int(x) for x in maxima])

# %% [markdown]
# <details><summary>Answer</summary>
#
# **0, 100, 1, 101, …** Between two rows of head 0 lies one of head 1. The numbers look healthy, and a test with one head
# passes.
# </details>
#
# The number of places from one row to the next is the *stride*. There are two cures. Rung 07 copies the view
# (`contiguous()`). The package hands the stride to the kernel.
#
# The picture shows the way from a program's number to its tile, for d = 4. The mask keeps out rows that the head does
# not have. In the picture and in the paper, i is the number of a row block. In the kernels of this book `i` is its
# first *row*, and `j` the first *key* of a column block.

# %%
show(ragged_edge.draw(**ragged_edge.data()))

# %% [markdown]
# **Takeaway.** Row r, column c lies at r · stride + c. Know the stride, or make it d.

# %% [markdown]
# ## Is a score of zero harmless?
#
# A tile of S is the product of a block of Q and a block of K. `tl.dot` computes it on the tensor cores, from numbers of 16
# bits (fp16), and adds up in fp32. A block in `tl.dot` has at least 16 rows and 16 columns, so our tiles are 16 × 16.
#
# Suppose all keys fit one block. Then softmax needs no loop. 10 keys in a block of 16 leave six rows of K that do not
# exist. They were loaded as zeros, so they make six columns of S that are zero.
#
# **Predict.** Q = 0, so all scores are equal. Every value is 1, so the output must be 1. What comes out if the six columns
# keep their score of zero?

# %%
@triton.jit
def one_block_kernel(Q, K, V, O, N_k, hidden, d: tl.constexpr, B: tl.constexpr):
    q, k, v = load_rows(Q, 0, B, B, d, False), load_rows(K, 0, N_k, B, d, True), load_rows(V, 0, N_k, B, d, True)
    s = tl.where((tl.arange(0, B) < N_k)[None, :], tl.dot(q, k.T), hidden)  # (B, B)
    p = tl.exp(s - tl.max(s, 1)[:, None])
    o = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]  # (B, d)
    at = tl.arange(0, B)[:, None] * d + tl.arange(0, d)[None, :]
    tl.store(O + at, o)


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, torch.float16)


q, k, v = torch.zeros_like(normal(16, 16)), normal(10, 16), torch.ones_like(normal(10, 16))
for hidden in (0.0, -torch.inf):
    O = torch.full((16, 16), torch.nan, device=device)  # poisoned: a place that nobody writes stays NaN
    one_block_kernel[(1,)](q, k, v, O, 10, hidden, d=16, B=16)
    print(f"score where there is no key: {hidden:4}   output: {O[0, 0].item()}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **0.625.** exp(0) = 1, so each of the six has a vote. They vote for values that were loaded as zeros: 10 / 16.
# </details>
#
# The output is too small, by a factor that depends on how far $N_k$ is from a multiple of the block. A test with $N_k = 128$
# does not see it. There is a second trap: a missing row of V must be loaded as zero and not as what lies there. Its p is
# 0, but 0 · NaN is NaN.
#
# **Takeaway.** Fill with what the next operation ignores: 0 before a sum, −∞ before a softmax.

# %% [markdown]
# ## How does Algorithm 1 look now?
#
# Everything is there. First the lines of chapter 04, as the package has them in NumPy. Then the kernel, with the same lines
# marked. (`finite` puts 0 in place of an infinite maximum.) [The poster](../figures/poster_forward.pdf) has both on one
# sheet.

# %% tags=["nbval-ignore-output"]
print("\n".join(line for line in getsource(fa2.forward).splitlines() if "# FA2." in line))

# %% [markdown]
# **Predict.** One loop of the NumPy version is not in the kernel. Which, and where has it gone?

# %%
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def loop_kernel(Q, K, V, O, L, N_q, N_k, tau, d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r  # FA2.A1.L3
    q_i = load_rows(Q, i, N_q, B_r, d, True)  # (B_r, d)  FA2.A1.L4
    o_i, l_i = tl.zeros((B_r, d), tl.float32), tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    for j in range(0, N_k, B_c):  # FA2.A1.L6
        k_j = load_rows(K, j, N_k, B_c, d, True)  # (B_c, d)  FA2.A1.L7
        v_j = load_rows(V, j, N_k, B_c, d, True)  # (B_c, d)  FA2.A1.L7
        s_ij = tau * tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A1.L8
        s_ij = tl.where((j + tl.arange(0, B_c) < N_k)[None, :], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
        p_ij = tl.exp(s_ij - m_new[:, None])  # (B_r, B_c)  FA2.A1.L9
        alpha = tl.exp(m_i - m_new)  # (B_r,)  FA2.A1.L9
        l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
        o_i = alpha[:, None] * o_i + tl.dot(p_ij.to(v_j.dtype), v_j)  # (B_r, d)  FA2.A1.L10
        m_i = m_new
    row, column = i + tl.arange(0, B_r), tl.arange(0, d)
    tl.store(O + row[:, None] * d + column[None, :], o_i / l_i[:, None], mask=row[:, None] < N_q)  # FA2.A1.L12 FA2.A1.L14
    tl.store(L + row, m_i + tl.log(l_i), mask=row < N_q)  # FA2.A1.L13 FA2.A1.L15

# %% tags=["hide-input"]
def host(x):  # to NumPy, for comparing
    return x.double().cpu().numpy()


def run(kernel, q, k, v, *more, **options):  # one head: (N, d)
    O, L = torch.full(q.shape, torch.nan, device=device), torch.full(q.shape[:1], torch.nan, device=device)
    programs = triton.cdiv(len(q), 16)
    with np.errstate(invalid="ignore"):  # the interpreter warns of NaN, a GPU does not
        kernel[(programs,)](q, k, v, O, L, len(q), len(k), *more, d=q.shape[1], B_r=16, B_c=16, **options)
    return O, L


def truth(q, k, v, causal=False):  # float64, with all of S
    O, L = heads.forward(*(host(x)[None, None] for x in (q, k, v)), stage="naive", causal=causal)
    return O[0, 0], L[0, 0]


def compare(got, want):
    for name, a, b in zip("OL", map(host, got), want, strict=True):
        real = np.isfinite(b)
        error = np.abs(a[real] - b[real]).max()  # L is −∞ where a row sees no key
        print(f"   {name}: last number {a.flat[-1]:6.2f}, right {b.flat[-1]:6.2f}; largest error {error:.2f}")

# %%
Q, K, V, tau = normal(45, 16), normal(70, 16, seed=1), normal(70, 16, seed=2), 0.25
print("45 queries, 70 keys, tiles of 16 × 16")
compare(run(loop_kernel, Q, K, V, tau), truth(Q, K, V))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The loop over row blocks**, i. Its passes need nothing from each other, so each is a program: the loop is now the
# number of programs in the launch.
# </details>
#
# The loop over keys stays. `o_i`, `l_i` and `m_i` live in the registers of the program's warps, and go to HBM once. `p_ij`
# becomes 16 bits wide for the second product.
#
# **Takeaway.** Algorithm 1's outer loop is the launch. Its inner loop is the kernel.

# %% [markdown]
# ## Which exponential does a GPU have?
#
# Its special units compute $2^x$. An exp is a multiplication by $\log_2 e$ and then $2^x$. But every score is multiplied by
# $\tau$ already. So we multiply by $\tau \log_2 e$ instead, and take `exp2`. Then m, too, is in units of $\log_2$. Since
# the factor is positive, the largest score stays the largest, and only this one is multiplied for $m_{new}$.
#
# The lines of one tile move into a function, `visit`. With `MASKED`, row r sees the first `seen[r]` keys of the tile.

# %%
LOWEST, LN2 = tl.constexpr(-1.0e30), tl.constexpr(math.log(2))


@triton.jit
def visit(o_i, l_i, m_i, q_i, k_j, v_j, seen, tau_log2, MASKED: tl.constexpr):
    s_ij = tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A1.L8
    if MASKED:
        s_ij = tl.where(tl.arange(0, k_j.shape[0])[None, :] < seen[:, None], s_ij, NEG_INF)
    m_new = tl.maximum(m_i, tau_log2 * tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
    p_ij = tl.exp2(tau_log2 * s_ij - m_new[:, None])  # (B_r, B_c)  FA2.A1.L9
    alpha = tl.exp2(m_i - m_new)  # (B_r,)  FA2.A1.L9
    l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
    o_i = alpha[:, None] * o_i + tl.dot(p_ij.to(v_j.dtype), v_j)  # (B_r, d)  FA2.A1.L10
    return o_i, l_i, m_new

# %% [markdown]
# **Predict.** Change exp to exp2 and log to log2 everywhere, with this scale. Of O and L, one comes out wrong. Which?

# %%
scores, values = np.zeros(8), np.arange(8.0)  # eight equal scores: O is the mean of the values
for name, p, log in (("e", np.exp(scores), np.log), ("2", np.exp2(np.log2(np.e) * scores), np.log2)):
    print(f"base {name}: O = {p @ values / p.sum()}, L = {log(p.sum()):.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **L.** p, α, ℓ and o are what they were, because $2^{x \log_2 e} = e^x$. L comes out as a logarithm to base 2, so it
# must be multiplied by ln 2. Eight equal keys have L = ln 8 = 2.0794, not 3.
# </details>
#
# A test of O does not show this mistake. The backward pass shows it: its $P = e^{S-L}$ no longer sums to 1. A merge of two
# parts by their L gives them wrong weights.
#
# **Takeaway.** Fold $\log_2 e$ into the scale and use exp2. L leaves the kernel as a natural logarithm.

# %% [markdown]
# ## What about a row that sees nothing?
#
# Under a causal mask with $N_q \neq N_k$ the diagonal ends in the bottom right corner: the last row sees all keys. Row r
# sees the first $r + 1 + N_k - N_q$ keys, or none if that is negative. `keys_seen` computes it.
#
# `one_loop_kernel` (folded) is `loop_kernel` with `visit` in its loop. The paper starts m at −∞. Rung 07 starts at $-10^{30}$, lower than any score.
#
# **Predict.** 20 queries and 12 keys, causal. For how many rows does a start at −∞ give NaN?

# %%
@triton.jit
def keys_seen(row, N_q, N_k, CAUSAL: tl.constexpr):
    return tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row  # N_k for each row

# %% tags=["hide-input"]
@triton.jit
def one_loop_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, lowest, CAUSAL: tl.constexpr, d: tl.constexpr,
                    B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    row, column = i + tl.arange(0, B_r), tl.arange(0, d)
    seen = keys_seen(row, N_q, N_k, CAUSAL)  # (B_r,)
    q_i = load_rows(Q, i, N_q, B_r, d, True)
    o_i, l_i = tl.zeros((B_r, d), tl.float32), tl.zeros((B_r,), tl.float32)
    m_i = tl.zeros((B_r,), tl.float32) + lowest  # lowest in each place
    for j in range(0, N_k, B_c):
        k_j, v_j = load_rows(K, j, N_k, B_c, d, True), load_rows(V, j, N_k, B_c, d, True)
        o_i, l_i, m_i = visit(o_i, l_i, m_i, q_i, k_j, v_j, seen - j, tau_log2, True)
    empty = l_i == 0.0  # a row that sees no key
    l_i = tl.where(empty, 1.0, l_i)
    tl.store(O + row[:, None] * d + column[None, :], o_i / l_i[:, None], mask=row[:, None] < N_q)
    tl.store(L + row, tl.where(empty, NEG_INF, (m_i + tl.log2(l_i)) * LN2), mask=row < N_q)

# %%
few, tau_log2 = (normal(20, 16), normal(12, 16, seed=1), normal(12, 16, seed=2)), tau / math.log(2)
for lowest in (-torch.inf, -1e30):
    O, L = run(one_loop_kernel, *few, tau_log2, lowest, CAUSAL=True)
    print(f"m starts at {lowest}: rows with NaN: {int(O.isnan().any(1).sum())}, L of rows 6 to 9:",
          [round(x, 2) for x in L[6:10].tolist()])  # fmt: skip
compare((O, L), truth(*few, causal=True))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Eight.** Rows 0 to 7 see no key. Their maximum stays at −∞, and s − m is −∞ − (−∞), not a number.
# </details>
#
# If m starts at $-10^{30}$, then $p = 2^{-\infty} = 0$, and ℓ stays 0. At the end such a row (`empty`) is divided by 1: it
# gets O = 0 and L = −∞.
#
# **Takeaway.** Let m start at a finite number below every score, and divide by 1 where ℓ is 0.

# %% [markdown]
# ## Which tiles need the mask?
#
# `one_loop_kernel` visits every tile, and tests every score against the mask. Chapter 04 sorted the tiles: FULL ones
# come first in a row block, then DIAGONAL ones, then those to skip. Two borders are enough. Up to `full` every row
# sees every key. From `last` on no row sees any.
#
# **Predict.** A row block begins at row i and has $B_r$ rows. Which of its rows decides `full`, and which `last`?

# %% tags=["hide-input"]
@triton.jit
def borders_kernel(Borders, N_q, N_k, CAUSAL: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    full = keys_seen(i, N_q, N_k, CAUSAL) // B_c * B_c  # every row sees all keys up to here
    last = keys_seen(i + B_r - 1, N_q, N_k, CAUSAL)  # no row sees a key from here on
    tl.store(Borders + 2 * tl.program_id(0), full)
    tl.store(Borders + 2 * tl.program_id(0) + 1, last)


def tiles_visited(N, B_r, B_c, causal=True):  # of each row block: without a mask, with one
    borders = torch.full((triton.cdiv(N, B_r), 2), -1, dtype=torch.int32, device=device)
    borders_kernel[(len(borders),)](borders, N, N, CAUSAL=causal, B_r=B_r, B_c=B_c)
    return [(full // B_c, triton.cdiv(last - full, B_c)) for full, last in borders.tolist()]


ragged = Tiling(300, 300, 64, 32, CAUSAL)
for block, (full, masked) in enumerate(tiles_visited(300, 64, 32)):
    print(f"row block {block}: {full} tiles without a mask, {masked} with, {ragged.T_c - full - masked} skipped")
long = Tiling(8192, 8192, 128, 64, CAUSAL).counts()
share = long[Tile.DIAGONAL] / (long[Tile.DIAGONAL] + long[Tile.FULL])
print(f"8,192 queries and keys, 128 × 64: {share:.1%} of the visited tiles are masked")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The first row decides `full`,** because it sees least. **The last row decides `last`,** because it sees most.
# </details>
#
# Each row block has two masked tiles here, wherever it lies: its 64 rows end at 64 different keys, and a tile has 32. In a
# long sequence that is little. Without a causal mask, only a ragged last tile is masked.
#
# So the kernel gets two loops. One calls `visit` with `MASKED`, the other without. The compiler makes two versions of it. The
# second compares nothing, and its rows are loaded without a mask.
#
# **Takeaway.** Two numbers for each row block replace a test of each score.

# %% [markdown]
# ## Which numbers may have 16 bits?
#
# Q, K, V and O have 16 bits, and p gets 16 bits for the second product. But `o_i` and `l_i` are kept in fp32. In fp16 they
# would take half the registers. The largest number of fp16 is 65,504.
#
# **Predict.** Q = 0, and 2,048 keys whose values are all 40. The output should be 40. What comes out if `o_i` is kept
# in fp16?

# %%
for value in (40.0, 0.2):
    for type_ in (torch.float32, torch.float16):
        o, l = torch.zeros((), dtype=type_), 0.0
        for _ in range(2048 // 64):  # column blocks of 64 keys, whose p are all 1
            o, l = (o.float() + 64 * value).to(type_), l + 64
        print(f"values {value:4}, o kept in {type_}: o = {o.item()}, output {o.item() / l:.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **∞.** $o$ is divided only at the end, so it grows to 2,048 · 40 = 81,920.
# </details>
#
# With values of 0.2 nothing overflows. But the sum grows to 410, where the numbers of fp16 are 0.25 apart, and it is rounded
# to one of them after each of the 32 tiles. Each p is rounded once. The sum is rounded again and again.
#
# **Takeaway.** Factors may have 16 bits. Sums need 32.

# %% [markdown]
# ## All lines together
#
# This is the kernel of rung 07, and the line that launches it. New is `head`, the program's second number. A launch has
# $T_r$ programs for each head of each sequence. Find the two loops, the two borders, and the start of m. (The masked loop
# stands first because NVIDIA's compiler makes better code of this order. By chapter 02 the result is the same.)

# %% tags=["nbval-ignore-output"]
rung = load("07")
print(getsource(rung.forward_kernel.fn))
print("\n".join(getsource(rung.forward).splitlines()[-5:]))

# %%
q, k, v = normal(1, 4, 100, 16), normal(1, 4, 130, 16, seed=1), normal(1, 4, 130, 16, seed=2)
for causal in (False, True):
    print("rung 07, 4 heads, 100 queries, 130 keys,", "causal" if causal else "no mask")
    compare(rung.forward(q, k, v, causal), heads.forward(*map(host, (q, k, v)), stage="naive", causal=causal))

# %% [markdown]
# `load_rows`, `keys_seen` and `visit` are yours from above, line for line. The package's own kernel has the same algorithm and
# takes more kinds of calls: other strides, any d up to 256, fp32, windows, dropout.
#
# **Takeaway.** You have written FlashAttention-2.

# %% [markdown]
# ## Recap
#
# - A program is a thread block. It knows its number; addresses and masks are up to you.
# - Fill with what the next operation ignores: 0 before a sum, −∞ before a softmax.
# - The loop over row blocks becomes the launch. $o$, ℓ and m stay in registers, in fp32.
# - exp2, with $\log_2 e$ in the scale. L goes out as a natural logarithm.
# - Two borders for each row block: `full` and `last`.
# - What the six mistakes print: two zeros behind the end; 0, 100, 1, 101 from a view; 0.625 for 1; L = 3 for ln 8; NaN in
#   rows without keys; ∞ from a narrow sum.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A kernel for L alone, from Q and K. It is Algorithm 1 without V and $o$. Replace the body of the loop: load,
# multiply, mask, then chapter 02's maximum and its sum ℓ.
#
# <details><summary>Hint</summary>
#
# You need all lines of `loop_kernel`'s loop that do not belong to `v_j` or `o_i`. 70 keys in blocks of 16: what is behind the end?
# </details>
# <details><summary>Solution</summary>
#
# ```python
# k_j = load_rows(K, j, N_k, B_c, d, True)
# s_ij = tau * tl.dot(q_i, k_j.T)
# s_ij = tl.where((j + tl.arange(0, B_c) < N_k)[None, :], s_ij, NEG_INF)
# m_new = tl.maximum(m_i, tl.max(s_ij, 1))
# l_i = tl.exp(m_i - m_new) * l_i + tl.sum(tl.exp(s_ij - m_new[:, None]), 1)
# m_i = m_new
# ```
# </details>

# %%
@triton.jit
def L_kernel(Q, K, V, O, L, N_q, N_k, tau, d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    q_i = load_rows(Q, i, N_q, B_r, d, True)
    l_i, m_i = tl.zeros((B_r,), tl.float32), tl.full((B_r,), LOWEST, tl.float32)
    for j in range(0, N_k, B_c):
        l_i += 0.0 * j * tl.sum(q_i, 1)  # your lines
    row = i + tl.arange(0, B_r)
    tl.store(L + row, m_i + tl.log(l_i), mask=row < N_q)

# %% tags=["hide-input"]
Q_L = Q.clone()
Q_L[2] *= 100  # exp of these scores is infinite in fp32
with np.errstate(all="ignore"):
    yours, right = host(run(L_kernel, Q_L, K, V, tau)[1]), truth(Q_L, K, V)[1]
wrong = [row for row in range(45) if not abs(yours[row] - right[row]) < 1e-2]
if np.all(yours < -1e29):
    print("not written yet")
elif wrong:
    print("not yet: " + "; ".join(f"L of row {row} is {yours[row]:.3f}, should be {right[row]:.3f}" for row in wrong[:4]))
    if wrong == [2]:
        print("row 2 alone: its scores are large. Is the maximum subtracted?")
else:
    print("right")

# %% [markdown]
# **2. Complete.** Grouped heads (chapter 05). Q has 4 heads, K and V have 2. Heads are counted through the batch, so with a
# batch of 2 `head` goes from 0 to 7. Which head of K and V belongs to it? Replace the line.
#
# <details><summary>Hint</summary>
#
# How many query heads share one? Write down the pairs for the first sequence, then for the second.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return head // (heads // kv_heads)
# ```
# One division, also across the batch: (b · 4 + h) // 2 = b · 2 + h // 2. In rung 07 the line for K and V becomes
# `K + head // group * N_k * d`. Nothing else changes.
# </details>

# %%
@triton.jit
def kv_head_of(head, heads, kv_heads):
    return head  # your line


@triton.jit
def pairs_kernel(Pairs, heads, kv_heads):
    head = tl.program_id(0)
    tl.store(Pairs + head, kv_head_of(head, heads, kv_heads))


pairs = torch.full((8,), -1, dtype=torch.int32, device=device)
pairs_kernel[(8,)](pairs, 4, 2)
wanted = [b * 2 + h // 2 for b in range(2) for h in range(4)]
wrong = [f"head {h % 4} of sequence {h // 4} reads {got}, should read {want}"
         for h, (got, want) in enumerate(zip(pairs.tolist(), wanted, strict=True)) if got != want]  # fmt: skip
if pairs.tolist() == list(range(8)):
    print("not written yet")
else:
    print("not yet: " + "; ".join(wrong) if wrong else "right")

# %% [markdown]
# ## Checks
#
# The functions of this notebook are rung 07's, line for line. The kernels agree with `attention()`, and `attention()` with the
# dense result in float64: ragged lengths, grouped heads, rows without keys, huge scores.

# %% tags=["hide-input"]
def lines(function):  # without docstring, comments and spaces
    body = ast.parse(getsource(function.fn)).body[0].body
    return [ast.unparse(x) for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]


for mine in (load_rows, keys_seen, visit):
    theirs = getattr(rung, mine.fn.__name__)
    verdict(f"{mine.fn.__name__} here = rung 07's, line for line", lines(mine) == lines(theirs))
for causal in (False, True):
    package = [host(x)[0, 0] for x in attention(*(x[None, None] for x in (Q, K, V)), causal=causal, return_lse=True)]
    mine = run(one_loop_kernel, Q, K, V, tau_log2, -1e30, CAUSAL=causal)
    verdict(f"one_loop_kernel = attention(), causal = {causal}", all(map(close, map(host, mine), package, [2e-3] * 2)))

# %% tags=["hide-input"]
cases = {  # (heads, key heads, N_q, N_k, d, size of the scores, tolerance)
    "one key": (1, 1, 1, 1, 16, 1, 2e-3),
    "ragged, grouped heads": (2, 1, 40, 70, 32, 1, 2e-3),
    "rows without keys": (1, 1, 70, 33, 16, 1, 2e-3),
    "huge scores": (1, 1, 40, 40, 16, 300, 2e-3),
}
for name, (H, H_kv, N_q, N_k, d, size, tolerance) in cases.items():
    q, k, v = size * normal(1, H, N_q, d), normal(1, H_kv, N_k, d, seed=1), normal(1, H_kv, N_k, d, seed=2)
    for causal in (False, True):
        want = heads.forward(*map(host, (q, k, v)), stage="naive", causal=causal)
        both = dict(package=attention(q, k, v, causal=causal, return_lse=True))
        each = (x.repeat_interleave(H // H_kv, dim=1) for x in (k, v))
        both["rung 07"] = rung.forward(q, *each, causal)
        for who, got in both.items():
            right = all(close(host(a), b, tolerance) for a, b in zip(got, want, strict=True))
            verdict(f"{who} = the dense result: {name}, causal = {causal}", right)

# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)
