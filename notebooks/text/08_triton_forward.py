# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)

# %% [markdown]
# # 08 · The Triton forward kernel
#
# **How do these lines become a GPU kernel?**
#
# Chapter 04 has Algorithm 1 in NumPy. Chapter 06 made each row block a worker of its own. Now we write the program that
# such a worker runs, in *Triton*: Python with blocks of numbers. You say what one thread block does, and the compiler
# shares the work among its warps (chapter 07). The book has 24 versions of attention, each one change away from the one
# before, the first fifteen in Triton: the *ladder*, which chapter 10 climbs. One of them is a *rung*. This chapter ends
# with all lines of rung 11.
#
# After this notebook you can
#
# - write Algorithm 1 as a Triton kernel: which program am I, where are my numbers, and where do they end,
# - say why some of its lines do not look like the paper's,
# - recognise six mistakes by the numbers that they print.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any machine with Linux; without an NVIDIA GPU the
# kernels run in Triton's interpreter. Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb), [06 ·
# Parallelism](06_parallelism.ipynb) and [07 · Warps](07_warps.ipynb).*

# %%
import ast
import math
from inspect import getsource

import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.kernels.ladder import load
from fa2_lab.plots import ragged_edge
from fa2_lab.plots.show import show
from fa2_lab.reference import heads
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# Without a GPU the package sets `TRITON_INTERPRET=1`, and every line of a kernel runs as NumPy, one program after the
# other. In a script of your own, set the variable yourself before you import Triton.
#
# PyTorch's tensors behave like NumPy's arrays. `device` says where they live, and `.float()` makes float32. The
# package's `attention` takes Q, K and V as (batch, heads, N, d).

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
# `X + at` is a block of addresses, and `tl.load` fetches what stands there. The size of a block is a power of two, known
# when the kernel is compiled (`tl.constexpr`). A kernel sees constants from outside only in this form. A *mask* (here not
# the causal one) says which of the addresses are mine.
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
# The masked load does not touch what lies behind the end, and returns `other` for it. `CAREFUL` is a `constexpr`, so the
# compiled kernel has only one of the two stores.
#
# **Takeaway.** A program works out its addresses from `program_id`, and a mask says which of them are its own.

# %% [markdown]
# ## Where does the next row begin?
#
# In memory a tensor is one long line. `load_rows` assumes that the rows of a head lie one after the other, d numbers
# each. So row r, column c is at r · d + c. (The offset of the first row has 64 bits, because 32 end at 2³¹.) `RAGGED` says
# that the block may reach beyond the last row.
#
# The picture below shows the way from a program's number to its tile, for d = 4. Each place in memory holds its own
# number there. The mask keeps out rows that the head does not have.

# %%
@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr, RAGGED: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    if RAGGED:
        return tl.load(at, mask=first + row < N, other=0.0)
    else:
        return tl.load(at)

# %%
show(ragged_edge.draw(**ragged_edge.data()))

# %% [markdown]
# Models often make Q as (N, heads, d) and hand on a transposed view, (heads, N, d).
#
# **Predict.** 10 rows, 2 heads. Row r holds the number r in head 0, and 100 + r in head 1. Which rows does `load_rows` read
# for head 0 of such a view?

# %% tags=["hide-input"]
@triton.jit
def maxima_kernel(X, Y, N, B: tl.constexpr, d: tl.constexpr):
    first = tl.program_id(0) * B
    row = first + tl.arange(0, B)
    x = load_rows(X, first, N, B, d, True)  # (B, d)
    tl.store(Y + row, tl.max(x, 1), mask=row < N)  # all numbers of a row are equal here: one says which row it is


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
# **0, 100, 1, 101, …** Between two rows of head 0 lies one of head 1. A test with one head passes.
# </details>
#
# The number of places from one row to the next is the *stride*. Rung 11 copies such a view (`contiguous()`). The
# package's own kernel is handed the stride.
#
# **Takeaway.** Row r, column c lies at r · stride + c. Know the stride, or make it d.

# %% [markdown]
# ## How does Algorithm 1 look now?
#
# Here is all of it, with the paper's numbers. [The poster](../figures/poster_forward.pdf) has the NumPy lines beside it.
# `i` is the first *row* of a row block here, not the block's number, and `j` the first *key* of a column block.
#
# `tl.dot` multiplies two blocks on the tensor cores: numbers of 16 bits (fp16) go in, sums in fp32 come out. It wants
# at least 16 rows and columns, so our tiles are 16 × 16. `o_i`, `l_i` and `m_i` stay in the warps' registers.
#
# **Predict.** Q = 0, so all scores are equal. 10 keys have the value 1, so the output must be 1. In a block of 16, six
# rows of K and V are missing and come as zeros. What comes out if their scores stay 0 (`hidden` = 0)?

# %%
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def loop_kernel(Q, K, V, O, L, N_q, N_k, tau, hidden, d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r  # FA2.A1.L3
    q_i = load_rows(Q, i, N_q, B_r, d, True)  # (B_r, d)  FA2.A1.L4
    o_i, l_i = tl.zeros((B_r, d), tl.float32), tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
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

# %% tags=["hide-input"]
def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, torch.float16)


zero, ten, one = torch.zeros_like(normal(16, 16)), normal(10, 16), torch.ones_like(normal(10, 16))
for hidden in (0.0, -torch.inf):
    O, _ = run(loop_kernel, zero, ten, one, 0.25, hidden)
    print(f"score where there is no key: {hidden:4}   output: {O[0, 0].item()}")
Q, K, V, tau = normal(45, 16), normal(70, 16, seed=1), normal(70, 16, seed=2), 0.25
print("45 queries, 70 keys, tiles of 16 × 16, hidden = -inf")
compare(run(loop_kernel, Q, K, V, tau, -torch.inf), truth(Q, K, V))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **0.625.** exp(0) = 1, so each of the six has a vote. They vote for values that were loaded as zeros: 10 / 16.
# </details>
#
# With `hidden` = −∞ the kernel is right, as the last lines show. A missing row of V is still loaded as zero: what lies
# behind the end may be NaN, and 0 · NaN is NaN.
#
# The loop over row blocks is gone. Each of its passes is a program now, and the launch says how many there are.
#
# **Takeaway.** Algorithm 1's outer loop is the launch, and its inner loop is the kernel. A missing key's score is −∞.

# %% [markdown]
# ## Which exponential does a GPU have?
#
# Its special units compute $2^x$, and $e^x = 2^{x \log_2 e}$. Every score is multiplied by $\tau$ already. So we
# multiply by $\tau \log_2 e$ (`tau_log2`) instead, and take `exp2`. Then m, too, is $\log_2 e$ times as large as
# before. The largest score stays the largest.
#
# The lines of one tile move into a function, `visit`. With `MASKED`, row r sees the first `seen[r]` keys of the tile.
#
# **Predict.** Change exp to exp2 and log to log2 everywhere, with this scale. Of O and L, one comes out wrong. Which?

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

# %% tags=["hide-input"]
scores, values = np.zeros(8), np.arange(8.0)  # eight equal scores: O is the mean of the values
for name, p, log in (("e", np.exp(scores), np.log), ("2", np.exp2(np.log2(np.e) * scores), np.log2)):
    print(f"base {name}: O = {p @ values / p.sum()}, L = {log(p.sum()):.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **L.** p, α, ℓ and o are what they were. L comes out as a logarithm to base 2, so it must be multiplied by ln 2. Eight
# equal keys have L = ln 8 = 2.0794, not 3.
# </details>
#
# A test of O does not show this mistake. The backward pass does: its $P = e^{S-L}$ no longer sums to 1.
#
# **Takeaway.** Fold $\log_2 e$ into the scale and use exp2. L leaves the kernel as a natural logarithm.

# %% [markdown]
# ## What about a row that sees nothing?
#
# Under a causal mask with $N_q \neq N_k$ the last row sees all keys. Row r sees the first $r + 1 + N_k - N_q$ keys, or none
# if that is negative. `keys_seen` computes it.
#
# The folded kernel is `loop_kernel` with `visit` in its loop. `keys_seen` counts from key 0, and `visit` from the
# tile's first key, so `visit` is handed `seen - j`. The paper starts m at −∞. Rung 11 starts at $-10^{30}$, lower than
# any score.
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

# %% tags=["hide-input"]
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
# So far every tile is masked. Chapter 04 sorted the tiles of a row block: FULL ones come first, then DIAGONAL ones,
# then those to skip. Two borders are enough. Up to `full` every row sees every key. From `last` on no row sees any.
# `full` is rounded down to whole tiles. So without a causal mask at most one tile lies between them: the ragged one at
# the end.
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
# Two tiles of each row block are masked here; in a long sequence that is little. So the kernel gets two loops. One goes
# from `full` to `last` and calls `visit` with `MASKED`. The other stops at `full`, and calls `visit` and loads its rows
# without a mask.
#
# **Takeaway.** Two numbers for each row block replace a test of each score.

# %% [markdown]
# ## Which numbers may have 16 bits?
#
# Q, K, V and O have 16 bits, and p gets 16 bits for the second product. But `o_i` and `l_i` stay in fp32. $o$ is
# divided only at the end, so over 2,048 keys with equal scores, whose values are 40, it grows to 81,920. The largest
# number of fp16 is 65,504: in fp16 `o_i` becomes ∞.

# %% tags=["hide-input"]
for type_ in (torch.float32, torch.float16):
    o, l = torch.zeros((), dtype=type_), 0.0
    for _ in range(2048 // 64):  # column blocks of 64 keys, whose p are all 1
        o, l = (o.float() + 64 * 40).to(type_), l + 64
    print(f"o kept in {type_}: o = {o.item()}, output {o.item() / l}")

# %% [markdown]
# **Takeaway.** Factors may have 16 bits. Sums need 32.

# %% [markdown]
# ## All lines together
#
# This is the kernel of rung 11, and the line that launches it. New is `head`, the program's second number: a launch has
# $T_r$ programs for each head of each text. `O.dtype.element_ty` is the type of O's numbers. Find the two loops, the
# two borders, and the start of m. `num_stages=3` lets the GPU copy two tiles ahead while it computes a third (`num_stages=1`
# copies nothing ahead). The masked loop stands first: in the other order, with copies running ahead, NVIDIA's
# compiler makes every product wait for the one before.

# %% tags=["nbval-ignore-output"]
rung = load("11")
print(getsource(rung.forward_kernel.fn))
print("\n".join(getsource(rung.forward).splitlines()[-4:-1]))

# %% tags=["hide-input"]
q, k, v = normal(1, 4, 100, 16), normal(1, 4, 130, 16, seed=1), normal(1, 4, 130, 16, seed=2)
for causal in (False, True):
    print("rung 11, 4 heads, 100 queries, 130 keys,", "causal" if causal else "no mask")
    compare(rung.forward(q, k, v, causal), heads.forward(*map(host, (q, k, v)), stage="naive", causal=causal))

# %% [markdown]
# `load_rows`, `keys_seen` and `visit` are yours from above, line for line. The package's own kernel takes more kinds of
# calls: other strides, any d up to 256, fp32, windows, dropout.
#
# **Takeaway.** You have written FlashAttention-2.

# %% [markdown]
# ## Recap
#
# - A program is a thread block. It knows its number; addresses and masks are up to you.
# - The loop over row blocks becomes the launch. $o$, ℓ and m stay in registers, in fp32.
# - exp2, with $\log_2 e$ in the scale. L goes out as a natural logarithm.
# - Two borders for each row block: `full` and `last`.
# - What the six mistakes print: two zeros behind the end; 0, 100, 1, 101 from a view; 0.625 for 1; L = 3 for ln 8; NaN in
#   rows without keys; ∞ from a narrow sum.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A kernel for L alone, from Q and K: Algorithm 1 without V and $o$. Replace the body of the loop.
#
# <details><summary>Hint</summary>
#
# You need all lines of `loop_kernel`'s loop that do not belong to `v_j` or `o_i`. Its `hidden` is −∞ here.
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
# **2. Complete.** Grouped heads (chapter 05): Q has 6, K and V have 2. Heads are numbered through the whole batch. With
# two texts there are query heads 0 to 11, and heads of K and V 0 to 3. Which head of K and V belongs to query head
# `head`? Replace the line.
#
# <details><summary>Hint</summary>
#
# How many query heads share one? Write down the pairs for the first text, then for the second.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return head // (heads // kv_heads)
# ```
# In rung 11 K then begins at `K + head // group * N_k * d`, and V likewise. Nothing else changes.
# </details>

# %%
@triton.jit
def kv_head_of(head, heads, kv_heads):
    return head  # your line

# %% tags=["hide-input"]
@triton.jit
def pairs_kernel(Pairs, heads, kv_heads):
    head = tl.program_id(0)
    tl.store(Pairs + head, kv_head_of(head, heads, kv_heads))


pairs = torch.full((12,), -1, dtype=torch.int32, device=device)
pairs_kernel[(12,)](pairs, 6, 2)
wanted = [text * 2 + h // 3 for text in range(2) for h in range(6)]
wrong = [f"query head {h} reads head {got}, should read {want}"
         for h, (got, want) in enumerate(zip(pairs.tolist(), wanted, strict=True)) if got != want]  # fmt: skip
if pairs.tolist() == list(range(12)):
    print("not written yet")
else:
    print("not yet: " + "; ".join(wrong[:4]) if wrong else "right")

# %% [markdown]
# ## Checks
#
# The functions of this notebook are rung 11's. The kernels agree with `attention()`, and this with the dense result in
# float64.

# %% tags=["hide-input"]
def lines(function):  # without docstring, comments and spaces
    body = ast.parse(getsource(function.fn)).body[0].body
    return [ast.unparse(x) for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]


for mine in (load_rows, keys_seen, visit):
    theirs = getattr(rung, mine.fn.__name__)
    verdict(f"{mine.fn.__name__} here = rung 11's, line for line", lines(mine) == lines(theirs))
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
        both["rung 11"] = rung.forward(q, *each, causal)
        for who, got in both.items():
            right = all(close(host(a), b, tolerance) for a, b in zip(got, want, strict=True))
            verdict(f"{who} = the dense result: {name}, causal = {causal}", right)

# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)
