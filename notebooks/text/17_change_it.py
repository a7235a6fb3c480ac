# %% [markdown] tags=["navigation"]
# [← The same loop, other masks](16_masks.ipynb) · [The map](00_start.ipynb) · [Lanes, layouts, banks →](A_lanes.ipynb)

# %% [markdown]
# # 17 · Change it
#
# **How do I add a bias or a mask of my own, and what comes after Hopper?**
#
# The question that users of attention kernels ask most often is how to add something to the scores, such as a bias,
# ALiBi, or a mask that no argument describes. All of these change the same line of the loop. In the first part of this
# chapter, you will change that line three times, test what you wrote, and find out what it costs. In the second part,
# you keep the loop and change the hardware. We take the published numbers of the GPU that follows Hopper and ask what
# this book's models predict for it.
#
# After this notebook you can
#
# - write a bias or a mask as a function of head, row and column, in NumPy and in Triton,
# - choose the one input that reveals an off-by-one error in a mask,
# - compute the gradient of a learned bias, and count the tiles that your own mask could skip,
# - list the lines of a Hopper kernel that a bias would change,
# - predict which unit of a new GPU finishes last, and replace its exponential by a polynomial.
#
# *Time: 125 minutes with three functions to write, in two parts. Hardware: any machine with Linux; without a GPU, the
# kernels run in Triton's interpreter. Before this: [05 · The backward pass](05_backward.ipynb), [08 · The Triton
# forward kernel](08_triton_forward.ipynb) and [16 · The same loop, other masks](16_masks.ipynb). What is said about
# Hopper and Blackwell builds on [12b · Hopper, the kernel](12b_hopper_kernel.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import ast
from inspect import getsource

import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.examine import examine
from fa2_lab.examine.cases import rounded
from fa2_lab.kernels import ladder
from fa2_lab.kernels.portable import forward as portable
from fa2_lab.machine import chips, reasons, warps
from fa2_lab.machine import ladder_model as model
from fa2_lab.machine.rates import cost, rates
from fa2_lab.machine.time_model import tile_clocks
from fa2_lab.paper import PACKAGE
from fa2_lab.plots import added_scores, window_tiles
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import heads, naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output", "hide-input"]
# Setup: run this cell as well.
import triton
import triton.language as tl

print("kernels of this notebook:", "interpreted" if triton.knobs.runtime.interpret
      else "compiled for the GPU here")
# the package warns once that it is slow here
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))


def host(x):  # to NumPy, for comparing
    return x.detach().double().cpu().numpy()


def here(*arrays):  # to torch, with a batch dimension
    return [torch.from_numpy(np.float32(x))[None].to(device) for x in arrays]

# %% [markdown]
# ## Part 1 · Your own scores (90 minutes)
#
# ### What does it cost to pass a bias as a tensor?
#
# A model that uses [ALiBi](https://arxiv.org/abs/2108.12409) has no position embeddings. Instead, it subtracts from
# each score a multiple of the distance between the query and the key. PyTorch's `scaled_dot_product_attention`
# accepts such a bias as `attn_mask`, a tensor with N × N values for each head. For 32 heads in bf16 at d = 128, the
# table compares the size of that tensor with the size of Q, K, V and O together. Its last two columns are lower
# bounds for times on an H200. The first is the time DRAM needs to deliver the half of the tensor that a causal mask
# leaves visible, and the second is the time that causal attention needs without a bias.

# %% tags=["hide-input"]
def dense(N, heads=32, d=128):
    tensor, others = 2 * heads * N * N, 4 * 2 * heads * N * d
    alone = cost("FA2", N=N, d=d, heads=heads, B_r=128, B_c=128, causal=True).limit(chips.H200)[1]
    return tensor, others, 1e3 * tensor / 2 / chips.H200.hbm_bytes_per_second, 1e3 * alone


print("     N   bias tensor   Q, K, V, O   to read half of it    attention itself")
for N in (2048, 8192, 16384, 32768):
    tensor, others, read, alone = dense(N)
    print(f"{N:6,}{tensor / 1e9:11.1f} GB{others / 1e9:10.1f} GB{read:18.1f} ms{alone:17.1f} ms")

# %% [markdown]
# At N = 16,384, the tensor takes up 17 GB, which is 32 times as much as Q, K, V and O together. Just reading the half
# below the diagonal takes at least 1.8 ms, although 2.2 ms would be enough for the whole of attention if nothing but
# its FLOPs took time. FlashAttention does not store S and P in memory, but a bias of the same shape brings back the
# memory wall of chapter 01. Some implementations fail even earlier, because the strides of such a tensor no longer fit
# into 32 bits ([pytorch/pytorch#107959](https://github.com/pytorch/pytorch/issues/107959)).
#
# But the kernel does not need this tensor. Each of its values follows from the head, the row and the column, and a
# kernel that applies a mask has all three in registers anyway. So it can just as well compute each value where it needs
# it. A few instructions per score are far cheaper than two bytes from DRAM, as the costs of chapter 00 show, which
# count the FLOPs that the tensor cores could do in the same time:

# %%
price = rates(chips.H200).in_flops()
print(f"two bytes from DRAM: {2 * price['dram']:.0f} FLOPs")
print(f"an instruction: {price['fp32']:.0f} FLOPs")

# %% [markdown]
# ### Which line of the loop changes?
#
# ALiBi gives head h of H heads the slope $2^{-8(h+1)/H}$ and adds slope · (column − row) to each score. Written as a
# function of head, row and column, this takes three lines:

# %%
H = 4  # heads


def alibi(head, row, column):
    slope = 2.0 ** (-8 * (head + 1) / H)
    return slope * (column - row)

# %% [markdown]
# In the loop of chapter 04, only the line that computes `s_ij` changes. The bias is added after the scale and before
# the mask. As with the causal mask, `row` is the position of the query *among the keys*. For query r, it is $r + N_k -
# N_q$, so a distance means the same whether a call contains all queries or only the last one:

# %%
def tiled(Q, K, V, head, bias, B_r=4, B_c=4):  # one head, causal
    tau, O = 1 / np.sqrt(Q.shape[1]), np.empty_like(Q)
    tiling = Tiling(len(Q), len(K), B_r, B_c, CAUSAL)
    for i in range(tiling.T_r):
        rows = tiling.rows(i)
        row = np.arange(rows.start, rows.stop)[:, None] + len(K) - len(Q)  # (B_r, 1)
        state = SoftmaxState.empty(len(row), Q.shape[1])
        for j in tiling.visited_cols(i):
            cols = tiling.cols(j)
            column = np.arange(cols.start, cols.stop)[None, :]  # (1, B_c)
            s_ij = tau * (Q[rows] @ K[cols].T) + bias(head, row, column)  # this line
            state = state.update(tiling.apply_mask(s_ij, i, j), V[cols])
        O[rows], _ = state.finalize()
    return O

# %% [markdown]
# To check this loop, we need attention as it is defined, with the whole matrix S. The function `plain` adds the bias
# to all of S at once:

# %%
def plain(q, k, v, bias, causal=True):  # (heads, N, d)
    N_q, N_k = q.shape[1], k.shape[1]
    row, column = np.arange(N_q)[:, None] + N_k - N_q, np.arange(N_k)[None, :]
    S = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
    for head in range(len(q)):
        S[head] += bias(head, row, column)
    return naive.safe_softmax(np.where(column <= row, S, -np.inf) if causal else S) @ v


draw = np.random.default_rng(0).standard_normal
q, (k, v) = draw((H, 10, 16)), draw((2, H, 23, 16))
in_tiles = np.stack([tiled(q[h], k[h], v[h], h, alibi) for h in range(H)])
apart = np.abs(in_tiles - plain(q, k, v, alibi)).max()
print(f"10 queries, 23 keys: largest difference {apart:.6f}")

# %% [markdown]
# ### The same in Triton
#
# The package's kernels contain this line as well. If you call `attention(…, bias=f)` with a function f that is marked
# with `@triton.jit`, f is compiled into the kernel. ALiBi takes three lines again:

# %%
@triton.jit
def alibi_jit(head, row, column):
    slope = tl.exp2(-8.0 * (head + 1) / 4)
    return slope * (column - row)


O = attention(*here(q, k, v), causal=True, bias=alibi_jit)
print(f"largest difference {np.abs(host(O)[0] - plain(q, k, v, alibi)).max():.6f}")

# %% [markdown]
# The forward kernel calls the function between the first matmul and the softmax step. Here are the kernel's lines from
# that matmul to the softmax step. `apply_softcap` is the softcap of chapter 16 and does nothing here, and
# `in_col_bounds` tests whether a row sees a column:

# %% tags=["nbval-ignore-output", "hide-input"]
lines = getsource(portable.visit_tiles.fn).splitlines()
begin = next(n for n, line in enumerate(lines) if "tl.dot(q_i" in line)
end = next(n for n, line in enumerate(lines) if "softmax_step(" in line)
listing = "\n".join(line.split("  #")[0].removeprefix("        ") for line in lines[begin:end])
print(listing)
print(lines[end].strip().split("(")[0] + "(…)")

# %% [markdown]
# The result of the matmul is not scaled yet, because the kernel applies the scale together with the exponential
# (chapter 08). The kernel therefore adds $b / \tau$ instead of b, and `softmax_step`, in the last line, multiplies the
# sum by $\tau \log_2 e$. The result is $(\tau\, q \cdot k + b) \log_2 e$, which is the biased score as an exponent of
# base 2. In the listing, `scale_log2` is the `tau_log2` of chapter 08, which is $\tau \log_2 e$, so the
# quotient `tl.div_rn(LOG2E, scales.scale_log2)` is $1/\tau$. A plain `/` compiles to an approximate division on NVIDIA
# GPUs, whose error is up to two units in the last place. Every row would then have the same relative
# error in b, and if b is large, these errors add up in dV, which sums over rows. `tl.div_rn` rounds correctly, and the
# compiler moves the division out of the loop.
#
# The backward kernels recompute P, so they call the same function. In the kernel for dK and dV, the rows of a tile are
# keys, so `row` has shape (1, B_r) and `column` has shape (B_c, 1) there. A function that treats each score
# independently works with either layout.
#
# **Predict.** Another implementation adds slope · column instead of slope · (column − row), as
# [llm-foundry](https://github.com/mosaicml/llm-foundry/issues/186) does. What changes?
#
# - ☐ O, because keys now gain weight with their position
# - ☐ L, but not O
# - ☐ nothing at all
#
# <details><summary>Answer</summary>
#
# **L, but not O.** The two biases differ by slope · row, which is the same for all scores of a row. Softmax subtracts
# the maximum of the row, so this constant cancels in the weights, but it is added to L. In fp32, there is one more
# difference. With a slope of 1/2, the bias at column 16,384 is about 8,192. Neighbouring fp32 numbers of this size
# are 0.001 apart, so the scores lose precision. With column − row, the bias is small wherever a weight is large. On the
# other hand, the column alone makes the kernel faster, because slope · column is the same for all rows of a tile. How
# much faster, a measurement further below will show.
#
# ```python
# def by_column(head, row, column):
#     return 2.0 ** (-8 * (head + 1) / H) * column
#
# apart = np.abs(plain(q, k, v, by_column) - plain(q, k, v, alibi)).max()
# print(f"largest difference of O: {apart:.6f}")
# print(f"spacing of fp32 numbers above 8,192: {np.spacing(np.float32(8192)):.4f}")
# ```
#
# ```text
# largest difference of O: 0.000000
# spacing of fp32 numbers above 8,192: 0.0010
# ```
# </details>

# %% [markdown]
# ### Masks and biases of your own
#
# A mask is a bias that is 0 where a score is visible and −∞ where it is not. The figure shows ALiBi and the three
# functions that you are about to write. The figure's window is one key wider than the one that you will write, so its
# formula is not your solution:

# %% tags=["hide-input"]
show("added_scores")

# %% [markdown]
# How can a check see what your function does? If Q = 0, all scores are 0, so each row of P is the softmax of whatever
# the function adds. If V is the identity matrix, O = P V is P itself. A single call of the kernel therefore shows the
# weights, and a masked key has a weight of exactly 0:

# %%
def weights(bias, N_q, N_k, causal=True):
    q, k, v = np.zeros((1, N_q, N_k)), np.zeros((1, N_k, N_k)), np.eye(N_k)[None]
    return host(attention(*here(q, k, v), causal=causal, bias=bias))[0, 0]  # (N_q, N_k)


print(weights(alibi_jit, 2, 4).round(3))

# %% [markdown]
# #### A window and the first keys
#
# When no key fits a query well, models put the weight on the first tokens, but a sliding window hides those tokens
# (chapter 16). [Xiao and others](https://arxiv.org/abs/2309.17453) therefore let every row see the first few keys in
# addition to its window. Such a row sees two separate ranges of keys, which no `window` argument can describe.
#
# **Build.** Write `window_and_first`. A row sees its own key, the `LEFT` keys before it, and the keys 0 to
# `FIRST` − 1. Return 0 for a visible score and −∞ for all others. The call has `causal=True`, so you don't need to
# hide later keys.
#
# <details><summary>Hint</summary>
#
# `tl.where(condition, 0.0, float("-inf"))` needs one condition with two parts joined by `|`. Put each part in
# parentheses.
# </details>

# %%
LEFT, FIRST = tl.constexpr(5), tl.constexpr(3)


@triton.jit
def window_and_first(head, row, column):
    pass


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def is_empty(function):  # whether the reader has not written this kernel yet
    return all(isinstance(x, ast.Pass | ast.Expr)
               for x in ast.parse(getsource(function.fn)).body[0].body)


def judge_bias(function, right, cases, causal=True):
    def tried(N_q, N_k):
        return None if is_empty(function) else weights(function, N_q, N_k, causal)

    def wanted(N_q, N_k):
        return plain(np.zeros((1, N_q, 4)), np.zeros((1, N_k, 4)), np.eye(N_k)[None], right,
                     causal)[0]

    tried.__name__ = function.__name__
    check(tried, *(Case(words, size, wanted(*size)) for words, size in cases.items()),
          tolerance=1e-5)


def right_window(head, row, column, left=5, first=3):
    return np.where((row - column <= left) | (column < first), 0, -np.inf)


judge_bias(window_and_first, right_window, {
    "9 keys, which are all visible. Is the fifth key before a row's own key still in its window?":
        (9, 9),
    "10 keys. Is key 3 hidden from row 9? It is neither in the window nor among the first three.":
        (10, 10),
    "20 keys. Do all rows see the first three keys?": (20, 20),
    "4 queries, 40 keys. Is `row` used as it is, as a position among the keys?": (4, 40),
})

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def window_and_first(head, row, column):
#     sees = (row - column <= LEFT) | (column < FIRST)
#     return tl.where(sees, 0.0, float("-inf"))
# ```
# </details>

# %% [markdown]
# #### Which test catches an off-by-one error?
#
# **Predict.** A window of 1,024 keys is off by one, so a row sees 1,025 keys. A test compares O under this mask with
# O under the right mask. It uses random inputs with N = 2,048 and d = 64 and tolerates differences of 0.01, as tests
# in 16 bits often do. Which kind of test catches the mistake?
#
# - ☐ this one, because the extra key changes O
# - ☐ only one that looks for weights that should be 0
# - ☐ only one with a longer sequence
#
# <details><summary>Answer</summary>
#
# **only one that looks for weights that should be 0.** The extra key gets about a thousandth of the weight, so it moves
# O by about a thousandth. A longer sequence has more rows, but the error in each row is just as small. With Q = 0 and V
# = the identity matrix (or, since d is smaller than N, V = 1 for one key and 0 for the others), O shows the weights
# themselves. Since the right weight of the extra key is exactly 0, any other value reveals the mistake. A test should
# therefore check which weights are 0, rather than how large the weights are.
#
# ```python
# rng = np.random.default_rng(2)
# Q = rng.standard_normal((1, 1, 64))  # the last row
# K, V = rng.standard_normal((2, 1, 2048, 64))
# right, wrong = (lambda h, r, c, n=n: np.where(r - c < n, 0, -np.inf) for n in (1024, 1025))
# apart = plain(Q, K, V, right) - plain(Q, K, V, wrong)
# print(f"random inputs: O differs by {np.abs(apart).max():.4f}")
# V = np.zeros((1, 2048, 64))
# V[0, 2047 - 1024] = 1  # the first key that must not be seen
# found = [plain(0 * Q, K, V, mask).max() for mask in (right, wrong)]
# print(f"Q = 0, one key has a value: {found[0]} and {found[1]:.4f}")
# ```
#
# ```text
# random inputs: O differs by 0.0010
# Q = 0, one key has a value: 0.0 and 0.0010
# ```
# </details>
#
# A second test is just as cheap and needs no reference. Change the value of a key that a row must not see, and check
# that no element of O changes in that row. Chapter 04 did this with a later token.

# %% [markdown]
# #### A tree of drafts
#
# In *speculative decoding*, a small model guesses the next tokens, and the large model checks all guesses in one call.
# The guesses can form a tree, as in [SpecInfer](https://arxiv.org/abs/2305.09781). Each draft token then sees the whole
# context, itself and its ancestors, but not its siblings. The tree is given as a list of parents, but a function of row
# and column cannot read a list.
#
# For a small tree, however, a few bits are enough. Suppose the drafts are numbered depth first, so that each subtree is
# a contiguous range of numbers. Then draft i is draft j itself or one of its descendants exactly if $j \le i < j +
# size_j$, where $size_j$ is the number of drafts in the subtree of draft j, including draft j. The next cell computes
# the sizes for the tree in the figure. All seven are below 16, so each takes four bits, and together they fit into one
# integer that is compiled into the kernel. In hexadecimal, digit n of this integer, counted from the right, is the size
# of draft n's subtree:

# %%
CONTEXT = tl.constexpr(6)  # tokens before the tree
parents = [-1, 0, 1, 1, 0, 4, 0]  # draft 3 comes after draft 1

size = np.ones(len(parents), dtype=int)  # of each draft's subtree, with itself
for n in range(len(parents) - 1, 0, -1):
    size[parents[n]] += size[n]
SIZES = tl.constexpr(sum(int(s) << 4 * n for n, s in enumerate(size)))
print("sizes of the subtrees:", size, f"  as one number: {SIZES.value:#x}")

# %% [markdown]
# **Build.** Write `tree`. Row and column are positions among all keys, so draft 0 is key `CONTEXT`. This time there
# is no causal mask.
#
# <details><summary>Hint</summary>
#
# `(SIZES >> 4 * n) & 15` is the size of draft n's subtree. A column of the context does not belong to a draft, and
# you must not shift by a negative number, so use `tl.maximum(column - CONTEXT, 0)`. Check separately whether the
# column belongs to the context.
# </details>

# %%
@triton.jit
def tree(head, row, column):
    pass


# %% tags=["hide-input"]
def right_tree(head, row, column, parents=tuple(parents), context=6):
    def line_of(n):
        return set() if n < 0 else {n, *line_of(parents[n])}

    sees = [[c < context or c - context in line_of(r - context) for c in column[0]]
            for r in row[:, 0]]
    return np.where(sees, 0, -np.inf)


judge_bias(tree, right_tree, {
    "only draft 0. Does it see itself and the six tokens of the context?": (1, 7),
    "drafts 0 to 2. Does draft 2 see itself, 1 and 0, and does no draft see a later one?": (3, 9),
    "drafts 0 to 3. Is draft 2 hidden from draft 3, its sibling? Where does a subtree end?":
        (4, 10),
    "all seven drafts. Does draft 6 see only itself and draft 0, and does draft 5 see draft 4?":
        (7, 13),
}, causal=False)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def tree(head, row, column):
#     i, j = row - CONTEXT, tl.maximum(column - CONTEXT, 0)
#     below = (j <= i) & (i < j + ((SIZES >> 4 * j) & 15))
#     return tl.where((column < CONTEXT) | below, 0.0, float("-inf"))
# ```
# </details>
#
# Compiling the tree in as a constant has a drawback. A bias function gets only the head, the row and the column, so
# `SIZES` and `CONTEXT` have to be constants in the code. The kernel must therefore be compiled again for each new shape
# of the tree, and also whenever the context has grown by a token. A server cannot wait for that, so its kernels take
# the mask as a tensor instead ([flashinfer#266](https://github.com/flashinfer-ai/flashinfer/pull/266)). This tensor is
# small, because only the drafts need a mask.

# %% [markdown]
# #### Distances in buckets
#
# [T5](https://arxiv.org/abs/1910.10683) learns which number to add for each distance. Every small distance has its
# own number, whereas larger distances share numbers in *buckets* that grow wider with the distance. The kernel needs
# the index of the bucket, which it can compute. T5 would then look up the learned number in a table. Our functions
# cannot load anything, so we add −1/2 per bucket instead. The gradient of such a table follows later in this chapter.
#
# **Build.** Write `buckets`. Each of the distances 0 to 7 has its own bucket. Bucket 8 holds the distances 8 to 15,
# bucket 9 holds 16 to 31, and bucket 10 holds everything from 32 on. Return −0.5 times the index of the bucket. The
# call is causal.
#
# <details><summary>Hint</summary>
#
# For distances up to 15, the index of the bucket is the smaller of the distance and 8. From 16 on, it is one more,
# and from 32 on, it is one more again. `(distance >= 16).to(tl.int32)` is 0 or 1. T5 itself takes a logarithm and
# rounds it down, so a logarithm that is slightly too small puts a distance at the edge into the wrong bucket. Integer
# comparisons don't have this problem.
# </details>

# %%
@triton.jit
def buckets(head, row, column):
    pass


# %% tags=["hide-input"]
def bucket_of(distance):  # NumPy
    return np.minimum(distance, 8) + (distance >= 16) + (distance >= 32)


judge_bias(buckets, lambda head, row, column: -0.5 * bucket_of(row - column), {
    "3 keys. Is the distance row − column, and −0.5 added per bucket?": (3, 3),
    "12 keys. Do the distances 8 and 9 share a bucket?": (12, 12),
    "30 keys. Does the next bucket begin at distance 16 or 17?": (30, 30),
    "50 keys. Is there another bucket from 32 on?": (50, 50),
    "2 queries, 60 keys. Is `row` used as it is, as a position among the keys?": (2, 60),
})  # fmt: skip

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def buckets(head, row, column):
#     distance = row - column
#     far = (distance >= 16).to(tl.int32) + (distance >= 32).to(tl.int32)
#     return -0.5 * (tl.minimum(distance, 8) + far)
# ```
# </details>

# %% [markdown]
# ### What would skipping tiles save?
#
# A mask in this line gives the right result, but it saves no work. The kernel does not know what your function
# returns, so it visits every tile that `causal` and `window` leave and computes both matmuls, even if every weight in
# the tile is 0.
#
# **Predict.** Take N = 16,384, tiles of 128 × 128, a window of 1,024 keys, and the first 4 keys. The kernel is called
# with `causal=True`. Of the tiles that it visits, what share contains at least one visible score?
#
# - ☐ about two thirds
# - ☐ about a seventh
# - ☐ about a hundredth
#
# <details><summary>Answer</summary>
#
# **about a seventh.** A row block needs its own tile, up to eight tiles to the left of it, and the first tile. The
# causal loop, however, visits 64.5 tiles per row block on average.
#
# ```python
# counted = window_tiles.data()
# visited, needed = counted["visited"][16384], counted["needed"][16384]
# print(f"visited {visited:,}, needed {needed:,}: {needed / visited:.0%}")
# ```
#
# ```text
# visited 8,256, needed 1,235: 15%
# ```
# </details>
#
# The figure shows these tiles for N = 4,096, and both numbers of tiles as N grows:

# %% tags=["hide-input"]
show("window_tiles")

# %% [markdown]
# So the kernel's work grows with $N^2$, although the work that this mask needs grows only with N. FlexAttention
# closes the gap with lists of tiles (chapter 16), but you can also close it with what you already know. Since results
# (O, L) can be merged (chapter 06), you can split the keys between two calls. The first call has the window, so it
# skips tiles. The second call gets only the first keys, and its function hides those that the window already
# includes. Three things about the second call are easy to miss:
#
# - **Positions.** For query r, the kernel computes `row` as $r + N_k - N_q$. In this call, $N_k$ is only `FIRST`, so
#   `row` is too small by N − `FIRST`, which is 48 − 3 = 45. The function adds these 45 back.
# - **No causal mask.** The function only shows keys that are more than `LEFT` before the row's own key, so all of them
#   are in the past.
# - **Rows without keys.** For each of the rows 0 to 5, the first three keys are either in the row's window or in its
#   future, so these rows see nothing in this call. They get O = 0 and L = −∞, and in the merge, their weight is
#   $e^{-\infty} = 0$.

# %%
N_KEYS = tl.constexpr(48)


@triton.jit
def before_window(head, row, column):
    at = row + N_KEYS - FIRST  # this row's position among all keys
    return tl.where(at - column > LEFT, 0.0, float("-inf"))


q2, k2, v2 = here(*draw((3, 2, 48, 16)))
O_1, L_1 = attention(q2, k2, v2, causal=True, window=(5, 0), return_lse=True)
O_2, L_2 = attention(q2, k2[:, :, :3], v2[:, :, :3], bias=before_window, return_lse=True)
L = torch.logaddexp(L_1, L_2)
merged = torch.exp(L_1 - L)[..., None] * O_1 + torch.exp(L_2 - L)[..., None] * O_2
exact = plain(*(host(x)[0] for x in (q2, k2, v2)), right_window)
print(f"largest difference from one mask: {np.abs(host(merged)[0] - exact).max():.6f}")

# %% [markdown]
# ### What is the gradient of a bias?
#
# A bias is added to the scaled score, so the loss depends on the bias in the same way as on the score. Its gradient
# is therefore $dS = P \circ (dP - D)$ from chapter 05, which the kernels compute for each tile anyway. If several
# scores share a number, the gradient of that number is the sum of their dS, as for any shared parameter. T5's table
# has one number per head and bucket, so the gradient of each number is the sum of dS over its bucket:

# %%
def output(table, q, k, v):
    def of_bucket(head, row, column):
        return table[head, bucket_of(np.maximum(row - column, 0))]

    return plain(q, k, v, of_bucket)


def table_gradient(table, q, k, v, dO):
    N = q.shape[1]
    row, column = np.arange(N)[:, None], np.arange(N)[None, :]
    bucket = bucket_of(np.maximum(row - column, 0))  # (N, N)
    S = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]) + table[:, bucket]  # (heads, N, N)
    P = naive.safe_softmax(np.where(column <= row, S, -np.inf))
    D = (dO * (P @ v)).sum(axis=2, keepdims=True)
    dS = P * (dO @ v.swapaxes(1, 2) - D)
    return np.stack([np.bincount(bucket.ravel(), ds.ravel(), minlength=11) for ds in dS])


q3, k3, v3, dO = draw((4, 2, 40, 8))
table = draw((2, 11))
found = table_gradient(table, q3, k3, v3, dO)
h = np.zeros_like(table)
h[1, 8] = 1e-5
up, down = (output(table + x, q3, k3, v3) for x in (h, -h))
by_differences = ((up - down) * dO).sum() / 2e-5
print(f"head 1, bucket 8: {found[1, 8]:.6f}, by finite differences {by_differences:.6f}")

# %% [markdown]
# **Predict.** A model adds one learned number to *all* scores of a head. What is the gradient of this number?
#
# - ☐ 0
# - ☐ the number of queries
# - ☐ the sum of all D
#
# <details><summary>Answer</summary>
#
# **0.** Softmax does not change when all scores of a row grow by the same amount, so the loss does not change either.
# You can also see it in the formula: each row of dS sums to 0, because $\sum_j P_{ij} dP_{ij} = D_i$ and
# $\sum_j P_{ij} = 1$. It follows that the gradients of T5's table entries for any one head also sum to 0, which gives
# you a free test.
#
# ```python
# print("sums over the buckets, head 0 and 1:", found.sum(axis=1).round(12) + 0.0)
# ```
#
# ```text
# sums over the buckets, head 0 and 1: [0. 0.]
# ```
# </details>
#
# `attention` does not compute a gradient for what your function returns. If each score has its own bias value, this
# gradient is as large as S, so we are back at the memory wall. If scores share parameters, each program would have to
# sum dS per bucket over its tiles and then add these sums to the gradient of the table. The order of these additions
# would change from run to run (chapter 09).

# %% [markdown]
# ### Can the examiner find a mistake in the bias?
#
# In the kernel above, the bias is divided by the scale, because the scale is applied later. If you forget this
# division, the bias is scaled as well. The following loop makes exactly this mistake. The examiner from [appendix
# C](C_package.ipynb) runs the loop on small problems, one of which has a bias in the form of a dense array, and
# compares the loop's results with those of known mistakes. The examiner calls such an array an *additive mask*:

# %%
def mine(q, k, v, bias=None):  # (batch, heads, N, d)
    state = [np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3]), np.zeros_like(q)]
    for j in range(0, k.shape[2], 16):
        s = q @ k[:, :, j : j + 16].swapaxes(2, 3)
        if bias is not None:
            s = s + bias[..., j : j + 16]
        s = s / np.sqrt(q.shape[3])
        m, l, o = state
        m_new = np.maximum(m, s.max(axis=3))
        p, alpha = np.exp(s - m_new[..., None]), np.exp(m - m_new)
        o = alpha[..., None] * o + p @ v[:, :, j : j + 16]
        state = [m_new, alpha * l + p.sum(axis=3), o]
    return state[2] / state[1][..., None]


report = examine(mine, quick=True)
for finding in report.findings:
    print(f"{finding}\n    {finding.where}; name: {finding.name}")

# %% [markdown]
# If you move the line that applies the scale above the lines that add the bias, the examiner finds no mistake. In a
# terminal, the command is `fa2-lab examine mine.py:mine`. The examiner cannot know, of course, what *your* mask
# should be, so check that by looking at the weights, as above.

# %% [markdown]
# ### What would a bias take on Hopper?
#
# On a Hopper GPU, a call with `bias` runs the portable kernels, because the Hopper kernel of chapter 12b has no line
# that adds a bias. We have not added one, but you know that kernel well enough to name what it would take. These are
# the lines of its step from the matmul to the softmax:

# %% tags=["nbval-ignore-output", "hide-input"]
lines = (
    (PACKAGE / "kernels" / "hopper" / "forward" / "kernel.py")
    .read_text(encoding="utf-8")
    .splitlines()
)
begin = next(n for n, line in enumerate(lines) if "warpgroup_mma_wait(1" in line)
end = next(n for n, line in enumerate(lines) if n > begin and "softmax_step(" in line)
print("\n".join(line.removeprefix("    ") for line in lines[begin : end + 1]))

# %% [markdown]
# - **Place.** After `warpgroup_mma_wait(1, …)`, S is in registers, and `softmax_step` has not yet computed the row
#   maximum. The bias belongs between these two calls, either before or after the mask.
# - **Coordinates.** Four lanes share a row, and each lane holds 2 of every 8 columns. In `mask`, a lane gets its
#   columns from an `arange` in the layout of the accumulator. A bias also needs the rows in this layout.
# - **Scale.** Without a bias, `softmax_step` computes the exponent `row_scale * s - m` in one FMA, in which `row_scale`
#   is $\tau \log_2 e$ (chapter 12b). With a bias, the exponent is `row_scale * s + b - m`. The FMA then adds b, so a
#   second instruction has to subtract m.
# - **Fast path.** Thanks to `if bounds.cuts(j)`, the kernel masks only tiles at an edge and spends no instructions on
#   the mask in any other tile. A bias has to be computed in every tile.
# - **Registers.** At d = 128 and with tiles of 128 keys, S and O take 64 registers each per thread, and P takes 32. The
#   columns, the rows and the slope need additional registers. If ptxas runs out of registers, it either spills values
#   into slower memory or no longer lets matmuls overlap, so that the kernel waits for each of them.
#
# What would the scale and the lost fast path cost? ALiBi takes two more instructions per score. One FMA computes the
# bias from the column, as slope · column − slope · row, if slope · row is computed once per row. The other instruction
# subtracts m. Each thread holds 64 of the scores in a tile of 64 × 128, so each of the tile's four warps issues 2 · 64
# = 128 more instructions per tile. Each of the SM's four schedulers serves one of these warps and issues one
# instruction per clock, so the issue slots are busy for 128 more clocks.
#
# Whether these clocks make the kernel slower depends on which unit is the busiest. Chapter 10 gave the clocks that a
# tile at d = 64 needs on the tensor cores, the exponential unit and the issue slots. The next cell lists them again,
# now for both values of d, on rung 22, whose tiles have 128 keys in either case. The last two columns are the clocks
# on the busiest unit, before and after ALiBi is added. In this chapter, a paragraph that begins with **Prediction**
# gives a model's answer to a question for which we have no measurement:

# %%
print("          tensor cores   exponential unit   issue slots   with ALiBi   busiest unit   "
      "with ALiBi")
limits = {}
for d in (64, 128):
    on = model.unit_clocks(reasons.model_input(ladder.find("22"), causal=False, d=d))
    more = on | {"issue": on["issue"] + 128}
    limits[d] = before, after = max(on.values()), max(more.values())
    row = f"{on['tensor']:15.0f}{on['exp']:19.0f}{on['issue']:14.0f}{more['issue']:13.0f}"
    print(f"d = {d:3}{row}{before:15.0f}{after:13.0f}  (+{after / before - 1:.0%})")

# %% [markdown]
# **Prediction.** At d = 64, ALiBi costs between 5% and 24%. The issue slots would become the busiest unit, which costs
# 5% if all units overlap perfectly. If the new instructions overlapped with nothing, they would cost 128 / 528, or 24%.
# We expect a number in between, because chapter 10 found that extra instructions can cost time that the busiest unit
# does not explain. At d = 128, the busiest unit stays the same, so ALiBi costs little. We have tested neither of these
# two predictions on the Hopper kernel. The model also does not show whether there are enough registers, so the next
# step would be to write the line, compile the kernel, and count its spills. The authors of FlashAttention have taken
# this route. Their newer kernels compile a user's function, which they call `score_mod`, into the softmax of [Hopper
# and Blackwell](https://research.colfax-intl.com/a-users-guide-to-flexattention-in-flash-attention-cute-dsl).
#
# What we did measure is the cost of ALiBi in the portable kernels, which compile the function today. The command
# `fa2-lab bench bias` times them with and without ALiBi, in its two forms. The next cell shows how many times as long a
# call takes with ALiBi, on an H200, with N = 4,096:

# %% tags=["hide-input"]
def with_alibi(name="fa2_lab portable"):  # {(d, direction, mask): {form: how many times as long}}
    times = {}
    for measured in load("bias").rows:
        asked = measured.problem
        form = asked.get("mask", "without").split()[-1]
        case = asked["d"], measured.direction, "causal" if asked["causal"] else "no mask"
        times.setdefault(case, {})[form] = measured.values[name][0]
    return {case: {form: took / at["without"] for form, took in at.items()}
            for case, at in times.items()}


print("                          column − row   column alone")
for case, longer in with_alibi().items():
    print(
        "d = {:3}, {:9} {:8}".format(case[0], case[1] + ",", case[2])
        + f"{longer['distance']:13.2f}{longer['column']:15.2f}"
    )

# %% [markdown]
# At d = 64, the difference of column and row costs 15 to 19%, and the column alone 5 to 12%. At d = 128, where the
# matmuls take twice as long for the same number of scores, either form costs less. So if your bias contains a term that
# is the same for a whole row, leave it out, provided that you do not need L and that the bias stays small enough for
# fp32. The column alone still costs something in the forward pass. A thread holds two rows of a tile there, so what it
# computes for a column serves only two scores.

# %% [markdown]
# ## Part 2 · What comes after Hopper (35 minutes)
#
# So far, you have changed the function. About every two years, however, NVIDIA changes the GPU. The generation after
# Hopper is Blackwell, and its large GPU is the *B200*. We have not run anything on a B200. Instead, we feed what has
# been published about it into the models of this book. A paragraph that begins with **Prediction** again gives a
# model's answer, and measurements may one day show that it is wrong.
#
# ### Which unit finishes last?
#
# **Predict.** The tensor cores of a B200 do 2.27 times as many FLOPs per second as those of an H200. The other units
# of an SM are as fast as before, and there are 148 SMs instead of 132, at nearly the same clock. How much faster can
# attention with d = 64 become, if the kernel does the same work?
#
# - ☐ 1.14 times
# - ☐ about 1.6 times
# - ☐ 2.27 times
#
# <details><summary>Answer</summary>
#
# **1.14 times.** At d = 64, the special function units are already the last to finish on an H200, though only by a
# little (chapter 04). An SM of a B200 computes as many exponentials per clock as before, namely 16, so only the
# number of SMs and the clock help.
#
# ```python
# old, new = chips.H200, chips.B200
# exponentials = new.SMs * new.clock_hz / (old.SMs * old.clock_hz)  # 16 per clock and SM
# flops = new.tensor_flops_per_second / old.tensor_flops_per_second
# print(f"FLOPs × {flops:.2f}, exponentials × {exponentials:.2f}")
# ```
#
# ```text
# FLOPs × 2.27, exponentials × 1.14
# ```
# </details>
#
# For three generations, the next output lists the clocks that one SM needs for a tile of 128 × 128 scores. The column
# *FP32 units* counts all arithmetic other than matmuls and exponentials, such as maxima, sums and the rescaling of O.
# The rates come from `fa2_lab/machine/chips.py`, which lists their sources. One Blackwell instruction multiplies 128
# rows, so K and V are read from shared memory once per tile. A Hopper instruction multiplies only 64 rows, so K and V
# are read twice. On an A100, each of four warps reads K and V for its own rows (chapter 07), so they are read four
# times. The number of reads is `readers` below.

# %%
names = "tensor cores", "exponentials", "FP32 units", "shared memory"


def clocks(chip, d, readers):  # of a tile of 128 × 128
    units = tile_clocks(chip, 128, 128, d)
    shared = warps.access_bytes("split_q", 128, 128, d, readers) / chip.shared_bytes_per_clock
    return dict(zip(names, (units.tensor, units.exp, units.fp32, shared), strict=True))


generations = ("A100", chips.A100, 4), ("H200", chips.H200, 2), ("B200", chips.B200, 1)
for d in (64, 128):
    print("".join(f"{name:>16}" for name in (f"d = {d}", *names, "finishes last")))
    for name, chip, readers in generations:
        units = clocks(chip, d, readers)
        numbers = "".join(f"{n:16.0f}" for n in units.values())
        print(f"{name:>16}{numbers}{max(units, key=units.get):>16}")

# %% [markdown]
# From one generation to the next, the tensor cores need half as many clocks, but the exponentials need just as many as
# before. In the time of one exponential, the tensor cores of an A100 do 128 FLOPs, those of an H200 do 256, and those
# of a B200 do 512 FLOPs. Attention does $4d$ FLOPs per exponential, which is 512 at d = 128. At this d, a B200
# therefore needs as much time for the exponentials as for the matmuls. Shared memory takes even longer. However, two
# row blocks on the same SM can share each copy of K and V. The copy is then written to shared memory once for two
# tiles, so each tile counts only half of it. The reads remain, because each row block still reads K and V:

# %%
units = clocks(chips.B200, 128, 1)
copied = 2 * 128 * 128 * 2 / chips.B200.shared_bytes_per_clock  # K and V of a tile
units["shared memory"] -= copied / 2
print(", ".join(f"{name} {n:.0f}" for name, n in units.items()))

# %% [markdown]
# Once the copies are shared, the exponentials finish last at d = 128 as well, although they take only 1% longer than
# the tensor cores and shared memory. At d = 64, they take twice as long as the matmuls. The authors of
# [FlashAttention-4](https://arxiv.org/abs/2603.05451), a kernel for Blackwell, also found that exponentials limit the
# forward pass, and that shared memory limits the backward pass. Their kernel reaches up to 1,613 TFLOP/s, which by
# their count is 71% of the tensor cores' peak.
#
# ### How do you compute $2^x$ without the special function unit?
#
# An SM also has 128 FP32 units, and these can compute $2^x$ as well. Split x into an integer and a fraction,
# $x = n + r$ with $0 \le r < 1$, so that $2^x = 2^n \cdot 2^r$. The factor $2^n$ only changes the exponent bits of a
# float, so it takes a single integer addition. The factor $2^r$ is between 1 and 2, and a short polynomial
# approximates it well enough. Such a split is called a *Cody–Waite range reduction*. When x is close to 0, the
# subtraction $x - n$ can lose the last bits of x, but this loss is far too small to show in 16 bits.
#
# Our polynomial equals $2^r$ at the Chebyshev nodes. These are denser at both ends of the interval, where equally
# spaced nodes would leave the largest errors:

# %%
def polynomial(degree):
    angles = np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1)
    nodes = (1 - np.cos(angles)) / 2  # between 0 and 1
    return np.polynomial.polynomial.polyfit(nodes, 2.0**nodes, degree)


def exp2(x, coefficients):  # in fp32, as a GPU would
    n = np.floor(x)
    r, y = x - n, np.float32(0)
    for c in coefficients[::-1]:  # Horner: one FMA for each coefficient
        y = y * r + np.float32(c)
    return np.ldexp(y, n.astype(int))  # the exponent's bits


x = np.linspace(-20, 0, 200_001, dtype=np.float32)[:-1]
power = 2.0 ** x.astype(np.float64)
# the distance between neighbouring bf16 numbers
ulp = 2.0 ** (np.floor(np.log2(power)) - 7)
print("degree   relative error   in ulp of bf16   rounded to another bf16 number")
for degree in range(1, 6):
    y = exp2(x, polynomial(degree)).astype(np.float64)
    other = (rounded(y, 8) != rounded(power, 8)).mean()
    relative, in_ulp = np.abs(y / power - 1).max(), np.abs((y - power) / ulp).max()
    print(f"{degree:6}{relative:17.1e}{in_ulp:17.4f}{other:33.2%}")

# %% [markdown]
# An *ulp* is the distance between two neighbouring floating-point numbers. Before the second matmul, P is rounded to
# bf16, whose numbers have 8 significant bits (hence `rounded(y, 8)`), and this rounding alone introduces errors of up
# to half an ulp. A cubic adds less than 0.015 ulp, so fewer than one weight in a hundred is rounded to the other
# neighbour. FlashAttention-4 also uses a cubic, and its authors report a relative error of $8.8 \cdot 10^{-5}$.
#
# What share of the exponentials should move to the FP32 units? Chapter 10 tried this on an H200, with nine
# instructions in place of one exponential, and it did not pay off there. For a B200, the model finds the following
# share f:

# %%
def with_share(d, f, instructions=9):
    units = clocks(chips.B200, d, 1)
    moved = f * 128 * 128
    units["exponentials"] -= moved / chips.B200.exp_per_clock
    units["FP32 units"] += moved * instructions / chips.B200.fp32_per_clock
    units["shared memory"] -= 128 * d * 2 / chips.B200.shared_bytes_per_clock  # half of a copy
    return units


best = {}
for d in (64, 128):
    best[d] = min(np.linspace(0, 1, 101), key=lambda f: max(with_share(d, f).values()))
    before, after = (max(with_share(d, f).values()) for f in (0, best[d]))
    print(f"d = {d:3}: f = {best[d]:.0%}, clocks {before:.0f} → {after:.0f}, × "
          f"{before / after:.2f}")

# %% [markdown]
# **Prediction.** At d = 64, about a quarter of the exponentials should move, which would make a tile a third faster.
# At d = 128, three units are within 1% of each other, so there is hardly anything to gain. A real kernel never
# overlaps its units perfectly, so every unit that finishes earlier helps it a little, and it can gain more than the
# model predicts. FlashAttention-4 moves 10% to 25% of its exponentials. The alternative is to build more special
# function units, and [Blackwell
# Ultra](https://developer.nvidia.com/blog/making-softmax-more-efficient-with-nvidia-blackwell-ultra/), the GPU after
# the B200, does exactly this and computes twice as many exponentials per clock.
#
# ### Where are S and O?
#
# On Hopper, the result of a matmul is in registers, and this fact shaped much of chapters 12b and 13. At d = 128 and
# with tiles of 128 keys, O and S take 64 registers each per thread, and the steps have to be ordered so that nothing
# spills. On Blackwell, each SM has an additional memory for results, the *tensor memory* of 256 KiB. It has 128 rows,
# called lanes, and 512 columns of four bytes. The matmul instruction, `tcgen05.mma`, writes its result there. The
# operands come from shared memory, except that P can also come from tensor memory. The figure compares the two
# generations:

# %% tags=["hide-input"]
show("tensor_memory")

# %% [markdown]
# <details><summary>What would change in the kernel of chapter 12b? Four changes that we have read about but not run</summary>
#
# - **Consumers.** A single thread starts a matmul, and no warpgroup has to hold the result in registers. So one warp
#   can start all matmuls while other warps compute the softmax. Each thread of these warps holds a whole row, so a
#   row maximum needs no shuffle, whereas on Hopper four lanes have to exchange their maxima.
# - **Rescaling.** The threads that know α no longer hold O in their registers, so O has to be loaded, multiplied and
#   stored. The lagging maximum of chapter 12a skips nearly all of these steps, so it gains more than on Hopper.
#   FlashAttention-4 has separate warps for the rescaling that remains.
# - **Ping-pong** stays. While the tensor cores work on one row block, the softmax of the other one runs. Now both row
#   blocks keep S and O in the same tensor memory. At d = 128, these four matrices fill it completely, so P has to
#   overwrite S.
# - **Pairs.** Two SMs can compute one matmul of 256 rows together. Each SM has its own rows of Q and copies only half
#   of the keys, so it also reads only half of the keys from its own shared memory. This helps if shared memory is the
#   bottleneck. FlashAttention-4 uses pairs in the backward pass, where they also reduce the number of additions to
#   dQ.
# </details>
#
# A bias would be easier to add on Blackwell. A thread has one row and consecutive columns, so its coordinates are
# just a row number and a counter for the column.
#
# ### What is left of the loop without softmax?
#
# Faster units make softmax cheaper, but some models do without softmax in most of their layers. Softmax costs one
# exponential per score, and the number of scores grows with $N^2$. *Linear attention* has neither the exponentials nor
# the $N^2$ scores. If the weights are just $q \cdot k_j$, then the sum $\sum_j (q \cdot k_j)\, v_j$ equals $q \cdot
# \sum_j k_j v_j^T$, and the sum over the keys has become a d × d matrix whose size does not depend on N. Often this
# matrix decays with each token, so that older keys count less. Some models of 2025, such as [Kimi
# Linear](https://arxiv.org/abs/2510.26692) and [Qwen3-Next](https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct),
# are *hybrids*. Three of every four layers use a refined form of linear attention, and the fourth uses softmax. Which
# parts of this book's loop do these three layers keep? In the next cell, `linear_state` computes the d × d matrix of a
# *chunk*, which is a contiguous range of keys, and `merge_linear` merges two of them:

# %%
GAMMA = 0.95  # decay per token


def linear_state(k, v):  # the state (d, d) of a chunk, and by what an earlier state shrinks
    age = np.arange(len(k))[::-1, None]
    return (GAMMA**age * k).T @ v, GAMMA ** len(k)


def merge_linear(left, right):
    return right[1] * left[0] + right[0], left[1] * right[1]


k4, v4 = draw((2, 96, 8))
query = draw(8)
a, b, c = (linear_state(k4[n : n + 32], v4[n : n + 32]) for n in (0, 32, 64))
whole = sum(GAMMA ** (95 - j) * (query @ k4[j]) * v4[j] for j in range(96))
states = {
    "(a b) c": merge_linear(merge_linear(a, b), c),
    "a (b c)": merge_linear(a, merge_linear(b, c)),
}
for name, (state, _) in states.items():
    print(f"{name}: off by {np.abs(query @ state - whole).max():.6f} from all keys at once")

# %% [markdown]
# The three layers keep the merge. Each chunk of keys yields a state, which is its d × d matrix, and a factor by which
# an earlier state shrinks. Two chunks are combined as in $o = \alpha o + p v$ of chapter 02, with a decay in place of
# $\alpha$. This merge is associative, so chunks can be computed in parallel, on one GPU or in a ring, and merged in
# any grouping. Other parts of the algorithm disappear. No exponential can overflow and the weights need not sum to 1,
# so there is no m and no ℓ. The state no longer belongs to a row, because it depends only on the keys and values and
# serves every query. And no cache grows with the sequence, because the state has d × d elements at any length.
#
# **Prediction.** In a long sequence, the softmax layers still do nearly all of attention's FLOPs, although they are
# only one layer in four. Per head and token, a linear layer does about $4 d^2$ FLOPs, half of them for the state and
# half for the output. A causal softmax layer does $2 N d$ on average. In a group of four layers, the softmax layer
# has the following share:

# %%
for N in (4096, 131072, 1048576):
    linear, softmax = 3 * 4 * 128**2, 2 * N * 128
    share = softmax / (linear + softmax)
    print(f"N = {N:9,}: {share:.1%} of the FLOPs of four layers")

# %% [markdown]
# So this book's loop will still be needed for some time.
#
# ## Recap
#
# - A bias or a mask is a function of head, row and column, where the row is a position among the keys. It is added
#   after the scale, in one line of the loop, and costs instructions instead of N × N values.
# - If Q = 0 and V is the identity matrix, O shows the weights. A mask is right if exactly the weights of masked keys
#   are 0.
# - A mask that the kernel does not know skips no tiles. But you can split the keys between two calls and merge their
#   results.
# - The gradient of a bias is dS, summed over all scores that share a parameter.
# - Tensor cores have become faster, but exponentials have not. A cubic on the FP32 units is accurate enough for
#   weights in 16 bits.
# - Tensor memory frees registers, and pairs of SMs relieve shared memory. Linear attention has no softmax, but it
#   keeps the merge.

# %% [markdown]
# ## Exercises
#
# **Predict.** A model has d = 256 and runs on a GPU whose tensor cores are twice as fast as a B200's, while
# everything else stays the same. Which unit finishes a tile last, the tensor cores or the special function units?
#
# - ☐ the tensor cores
# - ☐ both take the same time
# - ☐ the special function units
#
# <details><summary>Answer</summary>
#
# **both take the same time**, apart from the exponentials for α. The GPU can do 1,024 FLOPs in the time of one
# exponential, and attention needs $4 \cdot 256$ FLOPs per exponential.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
tensor, others, read, alone = dense(16384)
verdict("17 GB, 32 times as much as Q, K, V and O; 1.8 ms against 2.2 ms",
        (round(tensor / 1e9), tensor / others, round(read, 1),
         round(alone, 1)) == (17, 32, 1.8, 2.2))
verdict("ALiBi in tiles and in Triton agrees with ALiBi on all of S",
        close(in_tiles, plain(q, k, v, alibi)) and close(host(O)[0], plain(q, k, v, alibi), 1e-5))
both = heads.forward(*(x[None] for x in (q, k, v)), causal=True, bias=alibi)[0][0]
verdict("the package's reference accepts the same function", close(both, in_tiles))
gradients = []
for backend in ("triton", "reference"):
    leaves = [x.requires_grad_() for x in here(q, k, v)]
    out = attention(*leaves, causal=True, bias=alibi_jit if backend == "triton" else alibi,
                    backend=backend)
    gradients.append([host(x) for x in torch.autograd.grad(out.square().sum(), leaves)])
verdict("dQ, dK and dV with the bias agree with the reference",
        all(close(x, y, 1e-4) for x, y in zip(*gradients, strict=True)))
verdict("two merged calls equal one call with the mask", close(host(merged)[0], exact, 1e-5))
verdict("the gradient of T5's table equals finite differences, and sums to 0 in each head",
        close(found[1, 8], by_differences, 1e-6) and np.abs(found.sum(axis=1)).max() < 1e-12)
verdict("the examiner finds that the bias is scaled",
        [x.name for x in report.findings if x.is_wrong] == ["bias-scaled"])

# %% tags=["hide-input"]
drawn = added_scores.data()
N = 24
row, column = np.arange(N)[:, None], np.arange(N)[None, :]
seen = np.isfinite(drawn["surfaces"]["window and first 3"])
verdict(
    "the figure's window and tree are those of this page",
    (seen == (np.isfinite(right_window(None, row, column, left=6)) & (column <= row))).all()
    and (
        np.isfinite(drawn["surfaces"]["a tree of drafts"])
        == np.isfinite(right_tree(None, np.arange(6, 13)[:, None], np.arange(13)[None, :]))
    ).all(),
)
verdict("ALiBi at d = 64: 426 issue slots become 554, so the busiest unit takes 5% longer; at "
        "d = 128 no longer",
        limits == {64: (528, 554), 128: (1024, 1024)})
longer = {form: {d: [at[form] for (on, *_), at in with_alibi().items() if on == d]
                 for d in (64, 128)} for form in ("distance", "column")}
verdict("at d = 64, the distance costs 15 to 19% and the column 5 to 12%; at d = 128, each "
        "costs less", all(
    round(min(at[64]), 2) == low and round(max(at[64]), 2) == high and max(at[128]) < max(at[64])
    for at, low, high in ((longer["distance"], 1.15, 1.19), (longer["column"], 1.05, 1.12))))
verdict("4 d FLOPs per exponential: 512 at d = 128, as a B200 does",
        chips.B200.tensor_flops_per_clock / chips.B200.exp_per_clock == 512)
verdict(
    "an H200's shared memory takes the clocks that tile_clocks counts",
    clocks(chips.H200, 128, 2)["shared memory"]
    == tile_clocks(chips.H200, 128, 128, 128).shared,
)
last = [max(units, key=units.get)
        for units in (clocks(chips.B200, 64, 1), clocks(chips.B200, 128, 1), with_share(128, 0))]
verdict("on a B200, exponentials finish last at d = 64, and also at d = 128 once two row "
        "blocks share a copy", last == ["exponentials", "shared memory", "exponentials"])
near = sorted(with_share(128, 0).values())[-3:]
verdict("at d = 128, three units are within 1% of each other", near[-1] / near[0] < 1.01)
verdict("at d = 64, moving a quarter gains a third", 0.2 < best[64] < 0.3
        and 1.3 < 1032 / max(with_share(64, best[64]).values()) < 1.4)
y = exp2(x, polynomial(3)).astype(np.float64)
verdict("a cubic adds less than 0.015 ulp and rounds fewer than 1 in 100 differently",
        np.abs((y - power) / ulp).max() < 0.015
        and (rounded(y, 8) != rounded(power, 8)).mean() < 0.01)
verdict("linear states can be merged in any grouping",
        all(close(query @ state, whole, 1e-10) for state, _ in states.values()))

# %% [markdown] tags=["navigation"]
# [← The same loop, other masks](16_masks.ipynb) · [The map](00_start.ipynb) · [Lanes, layouts, banks →](A_lanes.ipynb)
