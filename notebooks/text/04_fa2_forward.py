# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)

# %% [markdown]
# # 04 · FlashAttention-2, forward
#
# **Same answer, same tiles: what is left to save?**
#
# In FA1, every unfinished output leaves the chip after each tile and comes back for the next tile of its rows. In this
# chapter, we change the algorithm one step at a time and count what each step saves, until we arrive at Algorithm 1 of
# the FlashAttention-2 paper (*FA2*), with a causal mask. Then we add up what standard attention, FA1 and FA2 cost.
#
# After this notebook you can
#
# - write FA2's forward pass, and point to the lines of FA1 that moved,
# - explain for each change what it saves, and what it does not save,
# - sort the tiles of a causal mask into three kinds by looking at their corners,
# - compute, for any N, d and $B_r$, what reaches DRAM, what L2 serves, and which of them or of the units is the limit,
# - read a roofline, the chart in which this book compares costs.
#
# *Time: 70 minutes, including two functions to write: 40 for the forward pass and 30 for its cost. Hardware: any laptop
# with NumPy. Before this: [03 · FlashAttention](03_fa1.ipynb).*

# %% [markdown]
# ## What if the queries stay and the keys come by?
#
# The figure shows in which order FA1 and FA2 visit the tiles:
#
# ![FA1 visits a grid of 3 by 4 tiles column by column, and loads and stores O, l and m at every tile. FA2 visits it row
# by row, and keeps them on the chip. Beside each grid are its loads and stores over time](../figures/visiting_order.svg)
#
# FA1 goes down the columns, as in chapter 03, so k and v stay on the chip, while q, o, $\ell$ and m are loaded for each
# tile, and o, $\ell$ and m are also stored again. In FA2, the loops are swapped. According to section 3.2 of the paper,
# P. Tillet was the first to do this, in Triton. Now a row block's $m$, $\ell$ and $o$ start on the chip, stay there for
# all tiles, and leave it only once. In the picture, FA2 already stores L, one number per row, as the finished FA2 does.
# The code below still stores $\ell$ and m, like FA1, so that only the order of the loops changes.
#
# A comment in the code marks each line that moved. `tiling.rows(i)` and `tiling.cols(j)` return the rows of row block i
# and the columns of column block j. A loop over `trace.serial` has to run its iterations one after another, whereas the
# iterations of a loop over `trace.parallel` could run at the same time on a GPU. NumPy runs both kinds of loops in
# order.

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np

from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import naive
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile, Tiling
from fa2_lab.trace import UNWATCHED


# %%
def queries_outside(Q, K, V, O, l, m, tiling, step, trace=UNWATCHED):
    tau = 1 / np.sqrt(Q.shape[1])
    for i in trace.parallel("i", range(tiling.T_r)):
        rows = tiling.rows(i)
        q_i = Q[rows]  # FA1 loads it in the inner loop
        m_i, l_i = np.full(len(q_i), -np.inf), np.zeros(len(q_i))  # FA1 loads them
        o_i = np.zeros(q_i.shape)
        for j in trace.serial("j", range(tiling.T_c)):
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # FA1: in the outer loop
            s_ij = tau * (q_i @ k_j.T)
            m_i, l_i, o_i = step(m_i, l_i, o_i, s_ij, v_j)
        O[rows], l[rows], m[rows] = o_i, l_i, m_i  # FA1 stores them in the inner loop


# %% [markdown]
# ## How much does the swap save?
#
# In the figure above, the swap saves more than half of the traffic, but the tiles there are small and not square.
#
# **Predict.** Take square tiles and a long sequence. What fraction of the elements that FA1 loads and stores does the
# swap save?
#
# - ☐ two thirds, because unfinished outputs no longer travel
# - ☐ nearly all, because what is left grows with N, not N²
# - ☐ a third
#
# <details><summary>Answer</summary>
#
# **a third.** For a tile of B × B, FA1 loads q and o and stores o, which is $3Bd$ elements. FA2 loads k and v instead,
# which is $2Bd$. Every tile still loads something, so both amounts grow with $N^2$. In bytes, the swap saves three
# fifths, because FA1's unfinished o has four bytes per number, while q, k and v have two.
# </details>

# %% [markdown]
# ## Who has to wait for whom?
#
# A third is not much, but there are two better reasons for the swap.
#
# - **More workers.** In FA1, each column block continues from the $o$, $\ell$ and $m$ that the previous one stored, so
#   a head has only one worker (chapter 03). Row blocks, by contrast, need nothing from each other. After the swap, the
#   outer loop runs over row blocks, so it can use `trace.parallel`. With 8,192 queries in blocks of 128, 64 workers can
#   share a head. If there are few heads, this is worth far more than a third fewer requests (chapter 06).
# - **Fewer heads at once.** In practice, a GPU starts workers head after head, as many as fit on its 132 SMs. With 64
#   workers per head, 132 SMs are full after little more than two heads, so only a few heads are in progress at the same
#   time. Their K and V fit into L2, which can serve nearly all loads. This turns out to be the largest gain of all, and
#   the second half of this chapter counts it.

# %% [markdown]
# ## Why can the division wait?
#
# FA1 divides $o$ by $\ell$ in every tile, but the next step does not need this ratio. It needs the old $m$ and the raw
# sums $\ell$ and $o$, and multiplies both sums by the same $\alpha$. A single division after the last tile therefore
# gives the same result as a division in every tile.
#
# To see this, write $\hat o$ for FA1's divided output, so that $o = \ell\,\hat o$. The left side of the following
# equation is FA1's step (with $\beta = 1$), which undoes the old division, adds the new terms, and divides again. On
# the right side, FA2 adds the same terms to its raw sums, and its division can wait:
#
# $$\frac{\alpha\,\ell\,\hat o + p\,v}{\alpha\,\ell + \sum p} = \frac{\alpha\,o + p\,v}{\alpha\,\ell + \sum p}$$
#
# This is the first of the paper's two tweaks, *tweak 1*. Could the subtraction of m wait as well? No, because without
# it, $e^s$ might overflow in this very tile.
#
# FA2's step is therefore `update` from chapter 02, as repaired there for rows that have not seen a key yet:

# %%
def update(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    m_new = np.maximum(m, s.max(axis=1))
    shift = np.where(np.isneginf(m_new), 0, m_new)  # no key yet: not −∞ − (−∞)
    p = np.exp(s - shift[:, None])  # (B_r, B_c)
    alpha = np.exp(m - shift)  # 1 if the maximum did not change
    return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * o + p @ v


Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
O, l, m = np.empty((8, 4)), np.empty(8), np.empty(8)
queries_outside(Q, K, V, O, l, m, Tiling(8, 8, B_r=4, B_c=2), update)
exact, _ = naive.forward(Q, K, V)
print(f"divided at the end: {O[0, 0] / l[0]:.6f}, plain attention: {exact[0, 0]:.6f}")

# %% [markdown]
# ## What does tweak 1 save?
#
# In chapter 03's code, FA1 multiplies $o$ by $\alpha \ell$ and $p\,v$ by $\beta$, adds the two, and divides the sum by
# $\ell_{new}$. A kernel would rather divide the factors, which are only one number per row, and use $\alpha \ell /
# \ell_{new}$ for $o$ and $\beta / \ell_{new}$ for $p\,v$. We therefore count two scalings for FA1, one of $o$ and one
# of $p\,v$. FA2 scales only $o$, by $\alpha$.
#
# A GPU works in short steps of equal length, which are called *clocks*. An A100, the GPU in the FA2 paper, runs at 1.41
# billion clocks per second. The figure shows how many clocks one tile takes on a single SM of an A100. The tile has 128
# queries, 64 keys and d = 128, so $o$ and $p\,v$ are both blocks of 128 × 128 elements:

# %% tags=["hide-input"]
show("deferred_normalisation")

# %% [markdown]
# The dashed box is work that FA2 no longer does. It contains only 0.4% of the operations, but these operations run on
# slow units. If the units take turns, as drawn, the dashed box accounts for 8% of the time. The clocks of FA1's tile
# add up as follows:
#
# | work | count | per clock | clocks |
# | --- | ---: | ---: | ---: |
# | FLOPs of two products, on tensor cores: 2 · 2 · 128 · 64 · 128 | 4,194,304 | 2,048 | 2,048 |
# | FP32 instructions: 3 per score, 2 per element of o, 8 per row | 58,368 | 64 | 912 |
# | exponentials, on special function units: 1 per score, 2 per row | 8,448 | 16 | 528 |
#
# The three instructions per score are one FMA for $\tau s - m$, one comparison for the maximum and one addition for the
# sum, which makes 3 · 8,192 = 24,576 instructions. Scaling the two blocks takes 2 · 16,384 = 32,768. The remaining 8 ·
# 128 = 1,024 instructions compute $\ell$ and the factors. The two exponentials per row are α and β.
#
# FA2 avoids one of the two scalings, which saves 16,384 / 64 = 256 of the 3,488 clocks. It also needs no β and no
# division, so it avoids one exponential per row (128 / 16 = 8 clocks) and 6 of the 8 FP32 instructions per row (6 · 128
# / 64 = 12 clocks). Together, FA2 saves 276 clocks, or 8%, and its tile takes the other 3,212.
#
# If all units work at once, however, the tweak saves nothing, because the tensor cores finish last with or without it.
# In this count of operations, then, the tweak saves between 0 and 8% of the time.
#
# A real kernel also needs *registers*, and this count ignores them. FA1 needs registers for two blocks at the same
# time, because $p\,v$ has to be scaled before it is added to $o$. (Scaling the smaller block p before the product would
# avoid that, but Algorithm 1 scales $p\,v$, and we count and measure it as printed.) FA2 scales $o$ first, and then the
# tensor cores add $p\,v$ directly to it, so $p\,v$ needs no registers of its own. The thread blocks on an SM share its
# registers. In our simple kernel on an H200 (64 heads, N = 4,096, d = 128, no mask), the tweak freed enough of them for
# a third thread block on each SM, and the kernel became more than 20% faster. A further thread block helps because it
# can compute while the others wait (chapter 06). With a causal mask, the kernel needed a few more registers, so a third
# thread block still did not fit, and the tweak gained nothing. So to predict what such a change gains, count registers
# before instructions. Chapter 10 does so.

# %% [markdown]
# ## What goes wrong with a mask?
#
# A language model guesses the next token, so a query must not see the keys of later tokens. This restriction is the
# *causal mask*, under which row r sees only the columns c ≤ r. The next cell takes four queries that all have the
# scores of the 1-3-4-8 row. It applies the right mask to them, and then a mask that is off by one:

# %%
scores = np.tile(np.log([1.0, 3.0, 4.0, 8.0]), (4, 1))
values = np.array([8.0, 0.0, 4.0, 2.0])
row, column = np.arange(4)[:, None], np.arange(4)[None, :]


def masked(seen, values):
    return naive.safe_softmax(np.where(seen, scores, -np.inf)) @ values


changed = np.array([8.0, 0.0, 4.0, 100.0])  # only the last token's value differs
for words, seen in (("c ≤ r", column <= row), ("c ≤ r + 1", column <= row + 1)):
    print(f"{words:9}  outputs           {masked(seen, values)}")
    print(f"           after the change  {masked(seen, changed)}")

# %% [markdown]
# With the right mask, only the last row depends on the last token. With the wrong one, each row except the last sees
# one token too many, which is exactly the token that the model has to guess. No shape is wrong, and nothing overflows.
# In training, the loss even falls faster than it should, and only later does the finished model turn out to be useless.
# Every causal kernel therefore needs a test that changes one token and checks that no row before this token changes.

# %% [markdown]
# ## Which tiles does a causal mask leave?
#
# Tiles offer more opportunities for this mistake. In the figure below, the left grid shows the right mask on tiles. A
# tile is *SKIP* if none of its queries sees any of its keys. It is *FULL* if each query sees every key, and *DIAGONAL*
# if the mask cuts through it. SKIP tiles are never loaded, so of T × T square tiles, only T(T + 1)/2 are visited, which
# saves nearly half of the work for a long sequence. FULL tiles are computed as if there were no mask, so only in
# DIAGONAL tiles does the kernel have to mask individual scores.

# %% tags=["hide-input"]
show("causal_tiles")

# %% [markdown]
# In the right grid, there are queries for only the last 256 tokens of a text, but keys for all 512. The last query must
# still see all keys, so row r sees the columns $c \le r + N_k - N_q$. If there are fewer keys than queries, the first
# rows see no key at all.
#
# FA1 as printed computes and masks all tiles. For FA2, `tiling.visited_cols(i)` lists the column blocks that row block
# i has to visit, that is, those whose tiles are not SKIP. `tiling.apply_mask(s, i, j)` returns the scores of a tile
# with −∞ wherever the mask hides a score, and it leaves a FULL tile unchanged. A masked score must be −∞, because a
# score of 0 would still get a weight, $e^{0 - m}$. To find out a tile's kind before loading anything, it is enough to
# look at two of its corners:

# %%
def kind(tiling, i, j):  # for as many queries as keys
    rows, cols = tiling.rows(i), tiling.cols(j)
    if cols.start > rows.stop - 1:  # even the last row is before the first column
        return Tile.SKIP
    if cols.stop - 1 <= rows.start:  # even the first row sees the last column
        return Tile.FULL
    return Tile.DIAGONAL


# %% [markdown]
# **Predict.** Tiles have 128 queries and 64 keys, blocks are counted from 0, and the mask is causal. What kinds of
# tiles are (i, j) = (1, 1) and (1, 3)?
#
# - ☐ FULL and DIAGONAL
# - ☐ DIAGONAL and SKIP
# - ☐ FULL and SKIP
#
# <details><summary>Answer</summary>
#
# **FULL and DIAGONAL.** Row block 1 consists of rows 128 to 255. Even row 128 sees all of columns 64 to 127, so tile
# (1, 1) is FULL. Row 128 sees none of columns 192 to 255, but row 255 sees them all, so tile (1, 3) is DIAGONAL. This
# is why comparing the block numbers i and j works only if tiles are square. With tiles of 128 × 64, a kernel that masks
# only the tile with i = j lets later keys through.
# </details>

# %% [markdown]
# If scripts run on this page, the next figure shows FA2 at work on the numbers of eight queries and keys, with a causal
# mask. FA2 goes along the rows and skips the SKIP tiles. Choose *FA1 beside FA2* to compare both on the same scores. FA1
# goes down the columns, and also computes and masks the SKIP tiles, so FA2 finishes while FA1 is still working. Without
# scripts, you see a static figure with the same mask and the sizes of this chapter's first figure. The tiles that are
# hatched there are SKIP tiles.

# %% tags=["nbval-ignore-output", "hide-input"]
live("algorithm1", ask="causal", causal=True)

# %% [markdown]
# ## Write FA2's Algorithm 1
#
# FA1 keeps each row's m and $\ell$ for the backward pass. FA2 keeps only $L = m + \log \ell$ from chapter 02. This is
# the paper's *tweak 2*. One number is enough, since $p = e^{s - m} / \ell = e^{s - L}$.
#
# <details><summary>Does it matter that L is rounded?</summary>
#
# Hardly. L is stored in float32. If |L| is between 512 and 1,024, neighbouring float32 numbers are 2⁻¹⁴ apart, so L is
# off by at most 2⁻¹⁵, or 3 · 10⁻⁵. Since $p = e^{s - L}$, an error of δ in L multiplies all p of the row by the same
# factor $e^{-\delta}$. The row of P then sums to 1 ± 3 · 10⁻⁵, and the row's contributions to all gradients are off by
# the same relative amount, because dS is p times another number (chapter 01). Rounding p to bf16 changes it by up to
# 0.4%, which is 128 times as much. The rounding of L becomes as large as that only if |L| is above 65,536. The scores
# themselves are rounded in the same way, no matter what is stored.
# </details>
#
# **Build.** `forward(Q, K, V, tiling)` returns O and L. It needs the scale $\tau = 1/\sqrt{d}$, two loops, `update`
# from above, one division, and the formula for L. `tiling` has `T_r`, `rows(i)`, `cols(j)`, `visited_cols(i)` and
# `apply_mask(s, i, j)`. The paper's Algorithm 1 has neither the scale nor a mask, so $\tau$, `visited_cols` and
# `apply_mask` are our additions. The check includes an N that is not a multiple of the block size, a causal mask, and
# rows that see no key.

# %%
def forward(Q, K, V, tiling):  # (N_q, d), (N_k, d), (N_k, d) -> (N_q, d), (N_q,)
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
from fa2_lab.examine.cases import one_head
from fa2_studio.book.build import Case, check


def case(words, N_q, N_k, mask=NO_MASK, size=1):
    rng = np.random.default_rng(N_q)
    q, k, v = size * rng.standard_normal((N_q, 4)), *rng.standard_normal((2, N_k, 4))
    tiling = Tiling(N_q, N_k, 4, 2, mask)
    seen = Tiling(N_q, N_k, N_q, N_k, mask).visible(0, 0)
    L = naive.logsumexp(np.where(seen, q @ k.T / 2, -np.inf))
    right = naive.forward(q, k, v, mask=mask)[0], L
    return Case(words, (q, k, v, tiling), right, one_head(q, k, v, tile=(4, 2), causal=mask.causal))


check(
    forward,
    case("no mask. Where is the scale 1/√d, and what is L?", 8, 8),
    case(
        "11 queries and 9 keys: the last blocks are short. Which array has a fixed size?", 11, 9
    ),
    case(
        "a causal mask. Is each tile hidden where it must be, so that row 0 does not see key 1?",
        8,
        8,
        CAUSAL,
    ),
    case(
        "rows 0 to 3 see no key. Their O must be 0 and L −∞. Which line divides by ℓ?",
        8,
        4,
        CAUSAL,
    ),
    case("scores near 1,000. Is m subtracted in every tile?", 8, 8, CAUSAL, size=1000),
    names=("O", "L"),
)

# %% [markdown]
# <details><summary>A solution: all of Algorithm 1, with the paper's lines</summary>
#
# ```python
# def forward(Q, K, V, tiling):
#     tau = 1 / np.sqrt(Q.shape[1])
#     O, L = np.empty(Q.shape), np.empty(len(Q))
#     for i in range(tiling.T_r):  # FA2.A1.L3
#         rows = tiling.rows(i)
#         q_i = Q[rows]  # FA2.A1.L4  (B_r, d)
#         m_i, l_i = np.full(len(q_i), -np.inf), np.zeros(len(q_i))  # FA2.A1.L5
#         o_i = np.zeros(q_i.shape)  # FA2.A1.L5
#         for j in tiling.visited_cols(i):  # FA2.A1.L6
#             k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # FA2.A1.L7  (B_c, d)
#             s_ij = tiling.apply_mask(tau * (q_i @ k_j.T), i, j)  # FA2.A1.L8  (B_r, B_c)
#             m_i, l_i, o_i = update(m_i, l_i, o_i, s_ij, v_j)  # FA2.A1.L9 FA2.A1.L10
#         l_i = np.where(l_i == 0, 1, l_i)  # a row without keys: O = 0, and L = m_i = −∞
#         O[rows] = (1 / l_i)[:, None] * o_i  # FA2.A1.L12 FA2.A1.L14: one division per row
#         L[rows] = m_i + np.log(l_i)  # FA2.A1.L13 FA2.A1.L15
#     return O, L
# ```
# </details>
#
# [The poster](../figures/poster_forward.pdf) shows these lines next to the paper's own.

# %% [markdown]
# ## What is requested, and what reaches DRAM?
#
# How fast can the three methods be? Chapter 01 distinguished two kinds of traffic. Every byte that an SM loads or
# stores is *requested* and passes through L2, which costs as much time as about 102 FLOPs on the tensor cores. If L2
# cannot serve the request, the byte also *reaches DRAM*, which costs about 206 FLOPs. So we count both.
#
# ### What does each method request?
#
# For one head with N queries and N keys, without a mask, the three methods request the following numbers of elements:
#
# | | elements requested in the forward pass | per score, if N is large |
# | --- | --- | --- |
# | standard attention | $4N^2 + \frac{3d}{128} N^2 + Nd$ | $4 + 3d/128$ |
# | FA1 | $T_c\,(3Nd + 4N) + 3Nd + 2N$ | $(3d + 4)/B_c$ |
# | FA2 | $T_r \cdot 2Nd + 2Nd + N$ | $2d/B_r$ |
#
# The first line is for real kernels. A *GEMM* (general matrix multiplication, a kernel for one product) computes its
# result in tiles, usually of 128 × 128 elements, and loads what each tile needs:
#
# - A tile of S needs 128 rows of Q and 128 rows of K, or 2 · 128 · d elements for 128² scores. That makes 2d/128
#   elements per score.
# - 128 rows of O need all of V, or N · d elements, for 128 · N weights. That makes d/128 elements per score.
# - S and P are each stored once and loaded once, which makes 4 elements per score. (P is loaded only once if a tile of
#   O is as wide as O, that is, if d is at most 128.)
# - Storing O takes N · d elements.
#
# To convert elements to bytes, note that S, L and FA1's unfinished o, $\ell$ and m take four bytes per element, and
# everything else takes two. That makes $12 + 6d/128$ bytes per score for standard attention, $(10d + 16)/B_c$ for FA1,
# and $4d/B_r$ for FA2.
#
# How does FA2's number depend on the room on the chip, which is M elements? Chapter 03's rule gave a block of keys a
# quarter of it, so that $B_c = M/4d$. If q, k, v and o each get a quarter in FA2, then $B_r = M/4d$, and FA2 requests
# about $2N^2 d / B_r = 8\,N^2 d^2 / M$ elements. FA1 requests $12\,N^2 d^2 / M$. Both are $\Theta(N^2 d^2 / M)$, so the
# swap improves only the constant.

# %% [markdown]
# ### What reaches DRAM?
#
# L2 can serve a repeated load if it has room for all the data that the running workers keep reloading. On an H200, L2
# holds 60 MiB.
#
# **Predict.** FA2 keeps 64 queries on the chip and loads all keys and values. For the next 64 queries, it loads all
# keys and values again. A head's K and V take 2 MiB together (N = 4,096, d = 128, two bytes per number). Where does FA2
# find K and V the second time?
#
# - ☐ in L2
# - ☐ in HBM
# - ☐ in shared memory
#
# <details><summary>Answer</summary>
#
# **in L2.** Shared memory has room for only one block of keys and values at a time, but the K and V of many heads fit
# into L2. A head has 4,096 / 64 = 64 row blocks, so FA2 requests K and V 64 times, and Q and O (2 MiB) once, which
# makes 130 MiB per head. Only 4 MiB of these, or 3%, reach DRAM, because each of the four tensors is loaded from DRAM
# or stored there just once.
# </details>
#
# How many heads keep reloading at the same time? The GPU starts workers in order, head after head, and a new one starts
# whenever an SM has room. Take 64 heads, N = 4,096 and d = 128. In FA2, each head has 64 workers. If each of the 132
# SMs runs one worker at a time, the first 132 workers are all of two heads and the first 4 of a third (64 + 64 + 4).
# Later, the workers can belong to four heads, for example the last one of a head, all of the next two, and the first 3
# of a fourth (1 + 64 + 64 + 3). Some kernels fit three workers on an SM, so 396 workers run at a time, and they belong
# to seven or eight heads. In FA1, each head has just one worker, so all 64 heads are in progress at the same time.
# Standard attention has at least 32 tiles per head in each of its kernels, so only a few heads are in progress.
#
# | | reloaded, per head | heads in progress | does it fit into L2's 60 MiB? | what reaches DRAM |
# | --- | --- | ---: | --- | --- |
# | standard attention | Q, K and V: 3 MiB | a few | yes | S and P, stored and loaded: 12 bytes per score; each of Q, K, V and O once |
# | FA1 | Q and unfinished O: 3 MiB | 64 | no, 192 MiB | all requests |
# | FA2 | K and V: 2 MiB | 3 to 8 | yes, at most 16 MiB | each of Q, K, V and O once: 8 bytes per element of Q |
#
# The swap thus saves only a third of FA1's requests, but nearly all of its DRAM traffic. The hardware counters of an
# H200 showed 22.1 GB of DRAM traffic for FA1 and 0.3 GB for FA2.
#
# <details><summary>What if K and V of a single head do not fit into L2?</summary>
#
# At d = 128, that happens beyond N = 122,880. Even then, the workers of a head that start together go through the keys
# in the same order, and each of them has the same work per tile. They therefore load the same keys at about the same
# time, and L2 serves all of these loads except the first. K and V thus come from DRAM once for each group of workers
# that run together, rather than once for each worker.
#
# </details>

# %% [markdown]
# ## How fast can each method be?
#
# We can now compute the highest speed that each unit allows. Take FA2 with 64 rows per block as an example. For each
# tile, it does $4 B_r B_c d$ FLOPs and requests one block of K and one of V, which are $2 B_c d$ elements or $4 B_c d$
# bytes. That makes $B_r = 64$ FLOPs per requested byte, or 63 with Q and O. Since L2 delivers at most 9.66 TB/s, it
# allows 63 · 9.66 = 609 TFLOP/s. The same method does 2,040 FLOPs per byte that reaches DRAM, so DRAM, at 4.8 TB/s,
# allows 9,800 TFLOP/s. The tensor cores allow 989 TFLOP/s. All of them can work at the same time, so the lowest of the
# three numbers is the limit, which is L2's 609 TFLOP/s.
#
# A *roofline* draws such limits. Its horizontal axis is the number of FLOPs per byte, its vertical axis is the speed in
# FLOPs per second, and both axes are logarithmic.
#
# - A memory that delivers b bytes per second allows b · x FLOPs per second at x FLOPs per byte. It is therefore a
#   **sloped** line, because with twice the FLOPs per byte, it allows twice the speed.
# - The tensor cores allow the same speed at any x, so they are a **flat** line.
# - A method cannot be above the lines. At the *ridge point*, where the two lines meet, a method keeps both busy. To the
#   left of it, the memory is the limit (chapter 01's *memory-bound*). To the right of it, the limit is the tensor cores
#   (*compute-bound*).
#
# Our roofline has two sloped lines, because there are two kinds of bytes. L2's line is for requested bytes, and DRAM's
# line is for bytes that reach DRAM. A method has one number of FLOPs per byte for each kind, so it could have a dot on
# each line. We draw only the lower dot, which is the limit. If the tensor cores are the limit, the dot is on the flat
# line, at the number of FLOPs per requested byte:

# %% tags=["hide-input"]
show("rooflines_forward")

# %% [markdown]
# The next table lists the same limits. FA1 has only 64 workers, so its tensor cores allow only 64/132 of 989 TFLOP/s.
# L2 and DRAM serve all SMs, so each method may use all of their speed. The last line was measured with simple kernels
# from this book that use tiles of 64 × 64, namely rungs 00, 01 and 03 of the ladder in chapter 10. Our formula above is
# for tiles of 128 × 128. With tiles of 64 × 64, standard attention requests more, but DRAM is still its limit. FP32
# units and special function units are left out, because at d = 128, they allow more than the tensor cores in all four
# cases.

# %% tags=["hide-input"]
from IPython.display import Markdown

from fa2_lab.machine import chips, reasons
from fa2_lab.machine.rates import cost
from fa2_lab.plots import roofline
from fa2_lab.records import load

record, rungs = load("ladder"), {"standard": "r00_standard", "FA1": "r01_fa1",
                                 "FA2, 64 × 64": "r03_row_blocks"}
took, moved = reasons.forward_row(record, causal=False, d=128), roofline.dram_bytes(record, 128)
settings = {
    "standard": cost("standard"),
    "FA1": cost("FA1"),
    "FA2, 64 × 64": cost("FA2"),
    "FA2, 128 × 128": cost("FA2", B_r=128, B_c=128),
}
allowed = {  # TFLOP/s that each unit allows
    name: {unit: asked.flops / seconds / 1e12
           for unit, seconds in asked.seconds(chips.H200).items()}
    for name, asked in settings.items()
}
table = {
    "FLOPs per requested byte":
        [f"{asked.intensity('requested_bytes'):.0f}" for asked in settings.values()],
    "FLOPs per byte that reaches DRAM":
        [f"{asked.intensity('dram_bytes'):,.0f}" for asked in settings.values()],
    **{f"{unit}: TFLOP/s": [f"{x[unit]:,.0f}" for x in allowed.values()]
       for unit in ("L2", "DRAM", "tensor cores")},
    "the limit": [f"**{asked.limit(chips.H200)[0]}**" for asked in settings.values()],
    "measured: TFLOP/s": [f"{took.rate(rung):.0f}" for rung in rungs.values()] + [""],
}
lines = [f"| | {' | '.join(settings)} |", "| --- " + "| ---: " * len(settings) + "|"]
lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in table.items()]
Markdown("\n".join(lines))

# %% [markdown]
# With the loops swapped, DRAM is no longer the limit. With 64 rows per block, the limit is L2. With 128 rows per block,
# FA2 requests only about half as many bytes, so the tensor cores are the limit.
#
# A roofline is only an upper bound. The FA2 kernel reaches about half of it, because its units wait for each other
# (chapters 07 and 10). FA1 is even farther below its bound, because its few and slow workers leave DRAM idle most of
# the time (chapter 03). On the other hand, L2's line is not an exact bound, because an SM's L1 serves a few of the
# requests.
#
# <details><summary>How do we choose B_c, and why do our first kernels have blocks of only 64 rows?</summary>
#
# $B_c$ does not occur in FA2's $2d/B_r$, because every row block loads each key once, in blocks of any size. So we
# choose $B_r$ first. It should be as large as the registers allow, as long as there are enough row blocks for all SMs
# (chapter 06). $B_c$ decides other things:
#
# - A larger $B_c$ means fewer tiles, so o is scaled by α less often (which takes $d/B_c$ instructions per score), and
#   there are fewer barriers (chapter 07).
# - But a tile of S needs $B_r \cdot B_c$ of the thread block's registers, and a block of k and v needs $4 B_c d$ bytes
#   of shared memory. Under a causal mask, larger tiles also contain more masked scores.
#
# In practice, $B_c$ is 64 or 128.
#
# With 128 rows, L2 is not the limit, and yet rung 11, the Triton kernel of chapter 08, has tiles of 64 × 64. We
# compiled it for an H200 with 128 rows (d = 128, 64 keys, Triton 3.9). With the usual 4 warps, o alone takes 128
# registers per thread, and the registers do not suffice, so the compiled code has 284 instructions that move values to
# memory and back (*spills*). With 8 warps, nothing is spilled, but a thread block then has 256 threads with 184
# registers each, so only one fits on an SM, and no other thread block computes while it waits. Two thread blocks of 64
# rows fit, and they have 128 rows together. Rung 17 in chapter 10 has 128 rows per block and hides the waiting in
# another way.
# </details>
#
# <details><summary>How are TFLOP/s counted under a causal mask, and in the backward pass?</summary>
#
# This book follows the FA2 paper (Dao, 2023). A forward pass counts as $4N^2 d$ FLOPs per head, or as half of that
# under a causal mask, and a backward pass counts as 2.5 forward passes (chapter 05). What a kernel computes beyond that
# earns nothing. A kernel that computes and masks all tiles does twice the work that is counted. A kernel with T × T
# square tiles that skips what it can still does (T + 1)/T times the work, because it computes the tiles on the diagonal
# as a whole. For N = 4,096 and tiles of 64, this is 1.6% more.
# </details>
#
# **Build.** Now write a function that turns these limits into times, for any size. `seconds(N, d, B_r)` returns how
# long the tensor cores, L2 and DRAM each need at full speed, in that order, for FA2's forward pass on one head without
# a mask. The longest of the three is the limit. Q, K, V and O have two bytes per number, and L has four. Assume that L2
# has room for K and V.

# %%
TENSOR, L2, DRAM = 989.4e12, 9.6576e12, 4.8e12  # an H200: FLOPs and bytes per second


def seconds(N, d, B_r):
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def times(words, N, d, B_r):
    one = cost("FA2", N=N, d=d, B_r=B_r, heads=1)
    return Case(words, (N, d, B_r), (one.flops / TENSOR, one.requested_bytes / L2, one.dram_bytes / DRAM))


check(
    seconds,
    times("one row block of 128 rows. Two products: how many FLOPs is a multiply-add? How many "
          "bytes does a number have?", 128, 64, 128),
    times("four row blocks. What does each of them load, and what does it find in L2?", 256, 64,
          64),
    times("4,096 keys, d = 128 and 128 rows", 4096, 128, 128),
    names=("tensor cores", "L2", "DRAM"),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def seconds(N, d, B_r):
#     flops = 4 * N * N * d  # two products, two FLOPs for each multiply-add
#     once = 2 * 4 * N * d + 4 * N  # bytes: Q, K, V, O and L
#     again = (N / B_r - 1) * 2 * 2 * N * d  # K and V for every other row block
#     return flops / TENSOR, (once + again) / L2, once / DRAM
# ```
# </details>
#
# **Predict.** With blocks of 128 rows, the tensor cores are the limit at d = 128. Which unit is the limit at d = 64,
# where each score takes only half as many FLOPs and half as many bytes?
#
# - ☐ L2
# - ☐ the special function units
# - ☐ still the tensor cores, by far
#
# <details><summary>Answer</summary>
#
# **the special function units.** The FLOPs and bytes per score shrink with d, but each score still takes one
# exponential. At d = 64, the products take 4 · 64 = 256 FLOPs per score, and an exponential takes as long as 256 matmul
# FLOPs. The two units therefore need almost exactly the same time, and the few additional exponentials for α tip the
# balance. This is why exponentials matter most in kernels for d = 64, and matrix products in kernels for d = 128.
# </details>

# %% [markdown]
# ## Recap
#
# - With the loop over queries outside, q, $m$, $\ell$ and $o$ stay on the chip while the blocks of k and v come and go.
#   FA2 requests a third fewer elements, and row blocks need nothing from each other.
# - Tweak 1 moves the division out of the loop. One of the two scalings of the output block disappears, but the scaling
#   by $\alpha$ stays.
# - Tweak 2 replaces both m and $\ell$ with $L = m + \log \ell$.
# - Under a causal mask, two corners decide whether a tile is SKIP, DIAGONAL or FULL.
# - Every request takes L2 time, and a request that L2 cannot serve takes DRAM time as well. FA2 requests $2d/B_r$
#   elements per score, but each of Q, K, V and O reaches DRAM only once, because few heads are in progress at the same
#   time.
# - In a roofline, a memory is a sloped line and the tensor cores are a flat line. At d = 128, L2 limits FA2 with 64
#   rows per block, and the tensor cores limit it with 128 rows.
#
# [Assignment 2](assignments/2_forward.ipynb) covers this whole chapter again, with the meter on.

# %% [markdown]
# ## Checks
#
# The cell below checks this notebook's functions against the package, and the text against the models and the recorded
# measurements.

# %% tags=["hide-input"]
from fa2_lab.machine import io_model, time_model
from fa2_lab.machine.rates import rates
from fa2_lab.plots import visiting_order
from fa2_lab.reference import fa2
from fa2_studio.book.verdicts import close, verdict

theirs = fa2.forward(Q, K, V, B_r=4, B_c=2)
verdict("the loops swapped, with update and one division = fa2.forward",
        close(O / l[:, None], theirs[0]))
verdict("L = m + log ℓ", close(m + np.log(l), theirs[1]))
tilings = [Tiling(N, N, B_r, B_c, CAUSAL)
           for N, B_r, B_c in [(8, 2, 2), (12, 4, 3), (12, 3, 4), (13, 5, 4)]]
same = [kind(t, i, j) is t.kind(i, j) for t in tilings for i in range(t.T_r) for j in range(t.T_c)]
verdict("the corner tests = Tiling.kind, also for tiles that are not square", all(same))
one, two = (io_model.traffic(x, "forward", Tiling(8192, 8192, 128, 128), 64).total
            for x in ("fa1", "fa2"))
drawn = sum(event.elements for event in visiting_order.data()["events"]["FA2"])
verdict("the picture stores one number per row, this code two: 408 elements", drawn + 12 == 408)
verdict("the swap saves a third", round(one / two, 1) == 1.5)
old, new = (time_model.tile_clocks(chips.A100, 128, 64, 128, algorithm=x) for x in ("fa1", "fa2"))
in_turns, later = (c.tensor + c.fp32 + c.exp for c in (old, new))
verdict("tweak 1: 8% of the time in turns",
        (in_turns, round(1 - later / in_turns, 2)) == (3488, 0.08))
gains = []  # by dividing once, without a mask and with the causal one
for row in load("ladder").rows:
    shape = row.problem["batch"] * row.problem["heads"], row.problem["N_q"], row.problem["d"]
    if row.direction == "forward" and shape == (64, 4096, 128):
        once = next(name for name in row.values if name.endswith("_deferred"))
        gains.append(round(row.values["r03_row_blocks"][0] / row.values[once][0], 2))
verdict("dividing once gains more than a fifth without a mask, nothing with one", gains[0] > 1.2
        and gains[1] < 1.02)
verdict("counted: 22.1 and 0.3 GB",
        [round(moved[rung] / 1e9, 1) for rung in ("r01_fa1", "r03_row_blocks")] == [22.1, 0.3])
half = took.rate("r03_row_blocks") / allowed["FA2, 64 × 64"]["L2"]
verdict("FA2 reaches about half of its bound", 0.45 < half < 0.55)
others = [min(x["FP32 units"], x["special function units"]) / x["tensor cores"]
          for x in allowed.values()]
verdict("the other units allow more than the tensor cores", min(others) > 1)
# FLOPs per byte of standard attention in tiles of 64 × 64
small = 4 * 128 / (12 + 6 * 128 / 64) * rates(chips.H200).l2
verdict("DRAM limits standard attention in tiles of 64 × 64, too",
        small > 1e12 * allowed["standard"]["DRAM"])
# workers at work
windows = [[range(first, first + blocks * chips.H200.SMs) for first in range(64)]
           for blocks in (1, 3)]
# heads
at_work = [sorted({len({worker // 64 for worker in window}) for window in among})
           for among in windows]
verdict("3 or 4 heads at work, 7 or 8; an A100 has 1.41 GHz", at_work == [[3, 4], [7, 8]]
        and chips.A100.clock_hz == 1.41e9)
N, d, t = 4096, 128, Tiling(4096, 4096, 64, 64)
formulas = {
    "standard": 4 * N**2 + 3 * d * N**2 // 128 + N * d,
    "fa1": t.T_c * (3 * N * d + 4 * N) + 3 * N * d + 2 * N,
    "fa2": t.T_r * 2 * N * d + 2 * N * d + N,
}
verdict("three formulas",
        all(io_model.requests(x, "forward", t, d).total == n for x, n in formulas.items()))
per_score = {x: io_model.in_bytes(x, io_model.requests(x, "forward", t, d)).total / N**2
             for x in formulas}
wanted = {"standard": 12 + 6 * d / 128, "fa1": (10 * d + 16) / 64, "fa2": 4 * d / 64}
verdict("bytes per score, but for terms in N",
        all(abs(per_score[x] - wanted[x]) < 0.3 for x in wanted))
few, chip = settings["FA2, 64 × 64"], rates(chips.H200)
verdict("130 MiB per head, of which 3% reach DRAM",
        (few.requested_bytes >> 26, round(few.dram_bytes / few.requested_bytes, 2)) == (130, 0.03))
last = cost("FA2", d=64, B_r=128, B_c=128).limit(chips.H200)[0]
verdict("128 rows at d = 64: exponentials; room for 122,880 keys",
        (last, chips.H200.l2_bytes // 512) == ("special function units", 122880))
fed = few.intensity("requested_bytes") * chip.l2 / 1e12, few.intensity("dram_bytes") * chip.dram / 1e12
verdict("FA2: L2 allows 609 TFLOP/s, DRAM 9,800", (round(fed[0]), round(fed[1], -2)) == (609, 9800))

# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)
