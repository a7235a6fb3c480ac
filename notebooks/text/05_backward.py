# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)

# %% [markdown]
# # 05 · The backward pass
#
# **How do gradients come back without the score matrix?**
#
# Chapter 01 derived the gradients, and chapter 03 recovered P tile by tile. In this chapter, many workers share the
# job, and all of them add to one of the three results, dQ.
#
# After this notebook you can
#
# - explain what $dS = P \circ (dP - D)$ tells us about a score,
# - write one tile of FA2's backward pass, and list what the loops around it keep on the chip,
# - explain why many workers add into the same dQ, and compare two fixes,
# - explain what changes if several query heads share keys and values,
# - decide whether a dropout mask can be replayed in another order.
#
# *Time: 60 minutes with the function to write and the questions at the end. Hardware: any laptop with NumPy. Before
# this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
from itertools import permutations

import numpy as np
from IPython.display import Markdown

from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import naive
from fa2_lab.reference.dropout import Dropout
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.build import Case, check
from fa2_studio.book.steps import tile_gradients

# %% [markdown]
# ## What goes wrong with two workers?
#
# Suppose that two workers in the backward pass have computed their contributions to the same row of dQ, say the values
# 3 and 4. Each worker then runs `dQ[row] = dQ[row] + dq`. In hardware, this line takes three steps: a load, an addition
# and a store. Between any two steps of one worker, the other worker can execute some of its own steps. The next cell
# defines the three steps and shows two timelines that begin with dQ = 0:


# %%
def worker(dQ, dq):  # one step for each `next`
    old = dQ[0]
    yield f"loads {old}"
    new = old + dq
    yield f"{old} + {dq} = {new}"
    dQ[0] = new
    yield f"stores {new}"


def timeline(turns):  # the order in which workers A and B take their steps
    dQ, lines = [0], ["| step | worker A, dq = 3 | worker B, dq = 4 | dQ |",
                      "| ---: | --- | --- | ---: |"]
    steps = {"A": worker(dQ, 3), "B": worker(dQ, 4)}
    for n, name in enumerate(turns, start=1):
        step = next(steps[name])
        lines.append(f"| {n} | {step if name == 'A' else ''} | {step if name == 'B' else ''} | "
                     f"{dQ[0]} |")
    return "\n".join(lines)


Markdown(
    f"One after the other:\n\n{timeline('AAABBB')}\n\nAt the same time:\n\n{timeline('ABABAB')}"
)

# %% [markdown]
# The first timeline ends with 7, but the second one ends with 4, because worker B loads 0 before A has stored its 3,
# and then overwrites it. Both timelines come from the same program, and neither reports an error. Such a *race* is what
# makes the backward pass harder than the forward pass. But first we need to know what the workers compute.

# %% [markdown]
# ## What does dS tell us about a score?
#
# dS is the gradient of the loss with respect to the scores, so it tells us how the loss changes when a score rises.
# Take the 1-3-4-8 row from chapter 02. Its weights are 1/16, 3/16, 4/16 and 8/16, the values are 8, 0, 4 and 2, and the
# output is 2.5. Let the loss be the output itself, so that dO = 1.
#
# **Predict.** We raise the score of the last key slightly. Its weight is the largest, and its value is 2. In which
# direction does the output move?
#
# - ☐ it stays the same, because the weights still sum to 1
# - ☐ up, because more of a positive value is added
# - ☐ down
#
# <details><summary>Answer</summary>
#
# **down.** This key gains weight at the expense of all the others, and its value of 2 is below the mean of 2.5. The
# keys with the values 8 and 4 are above the mean, so their gradients are positive.
#
# ```python
# p, v = np.array([1.0, 3.0, 4.0, 8.0]) / 16, np.array([8.0, 0.0, 4.0, 2.0])
# dp = v  # dP = dO Vᵀ: how much the loss grows with a weight
# ds = p * (dp - p @ dp)
# print("dS = p (dp - D), in sixteenths:", np.round(16 * ds, 4))
# ```
#
# ```text
# dS = p (dp - D), in sixteenths: [ 5.5 -7.5  6.  -4. ]
# ```
# </details>
#
# This is the meaning of $dS = P \circ (dP - D)$. When we raise a key's score, the loss grows if that key's dP is above
# D, and it falls if that dP is below D. D is the weighted mean of the row's dP. It also equals $do \cdot o = 1 \cdot
# 2.5$, so it can be computed from the output before the first tile.

# %% [markdown]
# ## What is kept, and what is recomputed?
#
# Chapter 01 derived these equations:
#
# $$\begin{aligned} dV &= P^\top dO \\ dP &= dO\,V^\top \\ dS &= P \circ (dP - D) \\ dQ &= \tau\,dS\,K \\ dK &= \tau\,dS^\top Q \end{aligned}$$
#
# The algorithms differ in where P and D come from:
#
# | | standard | FA1 | FA2 |
# | --- | --- | --- | --- |
# | kept from the forward pass | P | O, $\ell$, m | O, L |
# | P | loaded | $e^{S - m} / \ell$ | $e^{S - L}$ |
# | D | the row sum of $P \circ dP$ | $do \cdot o$, in every tile | $do \cdot o$, once before the loops |
#
# Any backward pass needs four matmuls, one each for dV, dP, dQ and dK. FA1 and FA2 also *recompute* S from Q and K, so
# they run five matmuls, which is a quarter more FLOPs. In exchange, they neither keep nor load anything of size N × N.
# The forward pass has two matmuls, so a backward pass with its five is usually counted as 2.5 forward passes.

# %% [markdown]
# ## Now write one tile
#
# **Build.** `one_tile` takes a tile of scores `s` (scaled and masked, so a masked score is −∞), the blocks `q`, `do`,
# `L` and `D` for its queries, `k` and `v` for its keys, and τ. It returns what the tile adds to dQ, dK and dV. These
# are lines 11 to 16 of FA2's Algorithm 2, without the additions. A row that sees no key has L = −∞, so $s - L$ would be
# $-\infty - (-\infty)$, which is NaN. Its output is 0 whatever the scores are, so the tile must add 0 for it to dQ, dK
# and dV. The repair of `update` in chapter 02 solves this problem as well.

# %%
# s (B_r, B_c); q and do (B_r, d); k and v (B_c, d); L and D (B_r,)
def one_tile(s, q, k, v, do, L, D, tau):
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
# a tile of a small problem, and what it adds by dense gradients
def case(words, N_q, N_k, rows, cols, mask=NO_MASK):
    rng = np.random.default_rng(0)
    q, do, k, v = *rng.standard_normal((2, N_q, 4)), *rng.standard_normal((2, N_k, 4))
    seen = Tiling(N_q, N_k, N_q, N_k, mask).visible(0, 0)
    s = np.where(seen, q @ k.T / 2, -np.inf)
    o, p = naive.forward(q, k, v, mask=mask)
    D, L = (do * o).sum(axis=1), naive.logsumexp(s)
    tile = s[rows, cols], q[rows], k[cols], v[cols], do[rows], L[rows], D[rows], 0.5
    only = np.zeros((N_q, N_k))
    only[rows, cols] = (p * (do @ v.T - D[:, None]))[rows, cols]
    return Case(words, tile,
                ((only @ k / 2)[rows], (only.T @ q / 2)[cols], p[rows, cols].T @ do[rows]))


everything = slice(None)
check(
    one_tile,
    case("4 queries, 6 keys, one tile. Is the order dq, dk, dv? Which take τ and a transpose?",
         4, 6, everything, everything),
    case("2 of 4 queries, 3 of 6 keys. Must the rows of p sum to 1 within a tile?", 4, 6,
         slice(2, 4), slice(0, 3)),
    case("some scores are masked. What is e^(−∞)?", 6, 6, slice(0, 3), slice(0, 3), CAUSAL),
    case("rows 0 to 3 see no key, so their dQ is 0. Their L is −∞. What is −∞ − (−∞)?", 8, 4,
         slice(2, 6), everything, CAUSAL),
    names=("dq", "dk", "dv"),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def one_tile(s, q, k, v, do, L, D, tau):
#     L = np.where(np.isneginf(L), 0, L)  # a row without keys: not −∞ − (−∞), as in chapter 02
#     p = np.exp(s - L[:, None])  # FA2.A2.L11  (B_r, B_c)
#     dp = do @ v.T  # FA2.A2.L13
#     ds = p * (dp - D[:, None])  # FA2.A2.L14
#     return tau * (ds @ k), tau * (ds.T @ q), p.T @ do  # dq, dk, dv: FA2.A2.L15 FA2.A2.L16 FA2.A2.L12
# ```
# </details>
#
# As an example, split the 1-3-4-8 row into two tiles of two keys each. The first tile has p = (1/16, 3/16) and ds =
# (5.5, −7.5)/16, and the second has p = (4/16, 8/16) and ds = (6, −4)/16. Neither pair of weights sums to 1, and only
# all four ds values together sum to 0. The first tile adds $\tau\,(5.5\,k_0 - 7.5\,k_1)/16$ to the row's dq, and the
# second tile adds $\tau\,(6\,k_2 - 4\,k_3)/16$. Both tiles contribute to the same row of dQ, just as the two workers
# did in the race above.
#
# [Assignment 3](assignments/3_backward.ipynb) goes further. There, you handle all tiles, shared heads and dropout, with
# the meter on.

# %% [markdown]
# ## The loops around it
#
# A tile (i, j) adds to $dQ_i$, $dK_j$ and $dV_j$. Which of the two loops should be the outer one? As in chapter 04,
# everything that belongs to the outer loop stays on the chip. The other blocks are loaded for each tile, and those that
# are sums are stored again afterwards. If the tiles are square, with B rows and B columns, every block has B · d
# elements. To compare the two orders, we count the bytes that a tile moves and divide them by B · d. Each element of q,
# k, v and do takes two bytes, and each element of an unfinished sum takes four. We leave out L and D, because they are
# small.
#
# - **Columns j outside.** dk and dv stay on the chip as *accumulators*. For each tile, q (2 bytes), do (2) and dq (4)
#   are loaded, and dq (4) is stored, so the total is 12 bytes.
# - **Rows i outside.** Here dq stays on the chip. For each tile, k (2), v (2), dk (4) and dv (4) are loaded, and dk (4)
#   and dv (4) are stored, so the total is 20 bytes.
#
# For this reason, both FA1 and FA2 use the columns as the outer loop. The following listing is the rest of Algorithm 2.
# It calls the solution's tile function, which is imported as `tile_gradients`. `tiling.visited_rows(j)` lists the row
# blocks that column block j does not skip:

# %%
def fa2_backward(Q, K, V, O, L, dO, tiling, trace=UNWATCHED):
    tau = 1 / np.sqrt(Q.shape[1])
    Q, K, V, O, dO = trace.hbm(Q=Q, K=K, V=V, O=O, dO=dO)
    L, D, dQ = trace.hbm(L=L, D=np.empty(len(Q)), dQ=np.empty(Q.shape))
    dK, dV = trace.hbm(dK=np.empty(K.shape), dV=np.empty(V.shape))
    dQ[:] = 0  # FA2.A2.L3
    D[:] = (dO[:] * O[:]).sum(axis=1)  # FA2.A2.L4  (N,)
    for j in trace.parallel("j", range(tiling.T_c)):  # FA2.A2.L5
        cols = tiling.cols(j)
        k_j, v_j = K[cols], V[cols]  # FA2.A2.L6  (B_c, d)
        dk_j, dv_j = np.zeros(k_j.shape), np.zeros(v_j.shape)  # FA2.A2.L7  (B_c, d)
        for i in trace.serial("i", tiling.visited_rows(j)):  # FA2.A2.L8
            rows = tiling.rows(i)
            q_i, do_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]  # FA2.A2.L9
            s_ij = tiling.apply_mask(tau * (q_i @ k_j.T), i, j)  # FA2.A2.L10  (B_r, B_c)
            dq, dk, dv = tile_gradients(s_ij, q_i, k_j, v_j, do_i, L_i, D_i, tau)
            dQ[rows] = dQ[rows] + dq  # FA2.A2.L15: not safe in parallel, see below
            dk_j, dv_j = dk_j + dk, dv_j + dv
        dK[cols], dV[cols] = dk_j, dv_j  # FA2.A2.L18
    return np.asarray(dQ), np.asarray(dK), np.asarray(dV)


# %% tags=["hide-input"]
Q, K, V, dO = np.random.default_rng(0).standard_normal((4, 8, 4))
tau = 0.5
P, L = safe_softmax(tau * Q @ K.T), naive.logsumexp(tau * Q @ K.T)
O = P @ V
dense = naive.backward(Q, K, V, P, dO)  # chapter 01's gradients
tiling, one_pass = Tiling(8, 8, B_r=4, B_c=2), Trace()
result = fa2_backward(Q, K, V, O, L, dO, tiling, one_pass)
for name, ours, right in zip(("dQ", "dK", "dV"), result, dense, strict=True):
    print(f"{name}: first number {ours[0, 0]:9.6f}, by chapter 01 {right[0, 0]:9.6f}", end="; ")
    print(f"loaded {one_pass.loads(name):3}, stored {one_pass.stores(name):3}")

# %% [markdown]
# The 32 elements of dQ are first stored as zeros, and then loaded and stored once for each of the 4 column blocks.

# %% [markdown]
# ## Who adds into dQ?
#
# FA2 gives each column block its own worker, so the listing's loop over j is a `trace.parallel`. $dK_j$ and $dV_j$
# belong to worker j alone, but all workers add to the same $dQ_i$, as in the timelines at the beginning.
#
# **Predict.** Four workers run the line `dQ[rows] = dQ[rows] + dq` for the same rows. dQ is initially 0, and the
# workers do not wait for each other. What does $dQ_i$ hold at the end?
#
# - ☐ the sum of all four contributions, in any case
# - ☐ the sum of one, two, three or all four contributions
# - ☐ one of the four contributions, in any case
#
# <details><summary>Answer</summary>
#
# **the sum of one, two, three or all four contributions.** Whatever worker 1 stores between worker 2's load and worker
# 2's store is lost. If all four load before the first one stores, only the contribution that is stored last remains.
# </details>
#
# Whether anything is lost depends on timing, so the same program can be right a thousand times and then wrong.

# %% [markdown]
# ## First fix: atomic adds
#
# A GPU can load, add and store in a single step that cannot be interrupted. Such a step is called an *atomic add*. With
# atomic adds, no contribution is lost. However, the contributions can arrive in any order, and float32 has only about
# seven digits. We compute dQ in all 24 orders of its four contributions:

# %%
dS = P * (dO @ V.T - (dO * O).sum(axis=1)[:, None])
columns = [tiling.cols(j) for j in range(4)]
parts = [(tau * dS[:, c] @ K[c]).astype(np.float32) for c in columns]
# in float32, from left to right
sums = [sum(order[1:], start=order[0]) for order in permutations(parts)]
spread = max(np.abs(x - sums[0]).max() for x in sums)
different = len({x.tobytes() for x in sums})
print(f"dQ in 24 orders: {different} different results, at most {spread:.0e} apart")

# %% [markdown]
# The results differ in the last bits. Swapping the first two terms of an order changes nothing, since a + b = b + a, so
# the 24 orders give at most 12 different results. If large terms cancel, one order can be far more accurate than
# another, but with atomic adds, we cannot choose the order. For example, $10^8 + 1 - 10^8$ is 0 in float32, because
# $10^8 + 1$ is rounded to $10^8$.

# %% [markdown]
# ## Second fix: a separate pass
#
# $dQ_i$ is a sum over keys, like $o_i$ in the forward pass, so a second kernel can use the rows as its outer loop and
# keep $dq_i$ on the chip. The first kernel then leaves out the line `dQ[rows] = …` and does not compute dq. Every sum
# now has a single owner, so the same input gives the same bits in every run. Such a computation is called
# *deterministic*.
#
# The second pass costs additional matmuls, because the first pass computes S, dP, dV and dK, and the second one
# computes S and dP again before it computes dQ. That makes seven matmuls per tile instead of five, or 40% more FLOPs.
# Does it save bytes in exchange? As above, we count the requested bytes of a tile and divide them by B · d. We do not
# count what is stored only once per block, such as dK, dV and the second pass's dQ:
#
# | | matmuls | loaded and stored for each tile | bytes, divided by B · d |
# | --- | ---: | --- | ---: |
# | one pass as listed, with the race | 5 | q (2), do (2) and dq (4) loaded, dq (4) stored | 12 |
# | one pass with atomic adds | 5 | q (2) and do (2) loaded, dq (4) sent to L2, which adds it | 8 |
# | two passes | 7 | q (2) and do (2) in the first pass, k (2) and v (2) in the second | 8 |
#
# Both fixes thus request 8 bytes. But with two passes, all of them are plain loads, whereas an atomic add can cost L2
# more than a plain store, because L2 has to read, add and write. Swapping the loops would not help the atomic adds.
# With the rows outside, k (2) and v (2) would be loaded, and dk (4) and dv (4) would be sent to L2, which makes 12
# bytes. (The 20 bytes above also load the old dk and dv.)
#
# Neither fix is cheaper in every respect, so only a measurement can decide between them. We ran the simple kernels of
# chapter 09 on an H200 (64 heads, N = 4,096, d = 128, no mask). One pass with atomic adds takes 7.4 ms, and two passes
# take 5.1 ms. Chapter 13 brings the single pass down to 2.1 ms with a different kind of addition.
#
# The next figure shows one tile of a single pass, with its five matmuls numbered:

# %% tags=["hide-input"]
show("backward_graph")

# %% [markdown]
# Boxes without a fill are recomputed, and boxes with a dashed outline are gradients. With two passes, the first one
# runs matmuls ① to ④, and the second one runs ①, ② and ⑤. Step through both versions below, and see which blocks of dQ
# have several writers at once:

# %% tags=["nbval-ignore-output", "hide-input"]
live("backward")

# %% [markdown]
# The next figure shows both versions over time. With atomic adds, four workers add to the same block of dQ at once, and
# the order in which their contributions arrive differs from run to run. With two passes, each block has one writer. A
# tile takes five matmuls in the single pass, and four and three in the two passes. If only these counted, the single
# pass would finish first, which is the opposite of what we measured. Each version is therefore drawn with the time that
# it took on the H200.

# %% tags=["nbval-ignore-output", "hide-input"]
live("race")

# %% [markdown]
# Does the measurement make sense if we count bytes as well? Each matmul takes B² · d multiply-adds per tile, so five of
# them are 10 B² d FLOPs and seven are 14 B² d. We divide them by the bytes of the table above, for tiles of 64 × 64.
# The second column of numbers also counts what is loaded or stored only once per block. Multiplied by L2's 9.66 TB/s,
# it gives the speed that L2 allows, and the tensor cores allow 989 TFLOP/s. The lower of these two speeds is in the
# column "allowed":
#
# | | FLOPs per requested byte | everything counted | allowed | limit | measured |
# | --- | ---: | ---: | ---: | --- | ---: |
# | forward pass (chapter 04) | 64 | 63 | 609 TFLOP/s | L2 | |
# | one pass as listed | 10 · 64 / 12 = 53 | 52 | 502 TFLOP/s | L2 | |
# | one pass with atomic adds | at most 10 · 64 / 8 = 80 | 77 | 744 TFLOP/s | L2 | 185 TFLOP/s |
# | two passes | 14 · 64 / 8 = 112 | 104 | 989 TFLOP/s | tensor cores | 377 TFLOP/s |
#
# These speeds count every matmul that a version runs, because we want to know how busy the units are. Speeds of
# backward passes are usually reported differently. The FA2 paper counts five matmuls for any backward pass. These
# include the one that recomputes S, but nothing that a second pass repeats. By that count, the two passes reach 5/7 of
# 377, or 269 TFLOP/s.
#
# The roofline shows the three versions of the backward pass. L2's line meets the ceiling of the tensor cores at 102
# FLOPs per byte, and only the two passes are to the right of this point, partly because some of their FLOPs are
# repeated work:

# %% tags=["hide-input"]
show("rooflines_backward")

# %% [markdown]
# By these bounds, one pass has five matmuls at 744 TFLOP/s and two passes have seven at 989, so one pass would be about
# 5% faster. We measured it 45% slower (7.4 ms against 5.1 ms). However, neither version comes near its bound. The two
# passes reach 38% of theirs, and the single pass reaches a quarter, so other costs take most of the time, and this table
# cannot tell why the single pass loses more. One explanation is that an atomic add costs L2 more than the plain store
# that we counted, which makes 744 too high. Another one is that the two kernels also differ in other ways. Chapter 09
# examines both.

# %% [markdown]
# ## Can dropout be replayed in another order?
#
# During training, *dropout* sets each entry of P to 0 with a small probability $p_{drop}$, and divides the others by
# $1 - p_{drop}$. The backward pass must drop the same entries, but a stored list of them would take memory that grows
# with $N^2$. FA1 therefore stores only the state of the random number generator, and its backward pass draws the same
# numbers again. A generator returns its numbers one after the other, so the entry that is visited third gets the third
# number. Does this method still work in FA2?


# %%
tiles = Tiling(8, 8, B_r=4, B_c=2)
rows_outside = [(i, j) for i in range(tiles.T_r) for j in range(tiles.T_c)]  # FA2's forward
# FA1's forward, both backwards
columns_outside = [(i, j) for j in range(tiles.T_c) for i in range(tiles.T_r)]


def one_generator(order):  # tile after tile, one entry in ten is dropped
    generator, kept = np.random.default_rng(7), np.empty((8, 8), dtype=bool)
    for i, j in order:
        kept[tiles.rows(i), tiles.cols(j)] = generator.random((4, 2)) >= 0.1
    return kept


def by_position(order):  # each number is computed from the seed, the row and the column
    kept = np.empty((8, 8), dtype=bool)
    for i, j in order:
        # z is 0, or 1 / (1 - 0.1)
        kept[tiles.rows(i), tiles.cols(j)] = (
            Dropout(0.1, seed=7).z(tiles.rows(i), tiles.cols(j)) > 0
        )
    return kept


for method in (one_generator, by_position):
    for name, forward in (("FA1", columns_outside), ("FA2", rows_outside)):
        wrong = (method(forward) != method(columns_outside)).sum()
        print(f"{method.__name__:13}  {name}: forward and backward differ in {wrong} of 64 entries")

# %% [markdown]
# With a single generator, FA1's backward pass replays the mask exactly, because the columns are the outer loop in both
# of FA1's passes, so both visit the tiles in the same order. In FA2, however, the rows are the outer loop in the
# forward pass, and the columns are the outer loop in the backward pass. The third tile of one pass is not the third
# tile of the other, so the wrong entries are dropped, and the gradients belong to a different loss. And once parallel
# workers share the tiles, there is no fixed order at all.
#
# The fix is a stateless generator. It computes each number from the seed and the entry's position (batch, head, row and
# column), so the order does not matter. The package and all modern kernels generate dropout masks this way.
#
# Where does the mask enter the equations? Let Z hold 0 for each dropped entry and $1/(1 - p_{drop})$ for the others, so
# that $O = (P \circ Z)\,V$. The chain rule then puts Z into two of the five equations, $dV = (P \circ Z)^\top dO$ and
# $dP = Z \circ (dO\,V^\top)$. In $dS = P \circ (dP - D)$, P is the undropped matrix, and $D_i$ is still $do_i \cdot
# o_i$.

# %% [markdown]
# ## What if several query heads share keys and values?
#
# In *grouped-query attention* (GQA), a group of query heads shares one head of keys and values. In *multi-query
# attention* (MQA), all query heads share the same K/V head. This sharing shrinks a model's *KV cache*, which holds the
# keys and values of all tokens so far (chapter 14). Chapters 06 and 07 do not need this section, but assignment 3 does.
#
# In the forward pass, GQA changes only the addresses of K and V. If `group` query heads share a K/V head, then query
# head h reads the K/V head `h // group`, rounded down. With a group of four, query heads 0 to 3 read K/V head 0, and
# query heads 4 to 7 read K/V head 1.
#
# In the backward pass, dQ still has one head per query head. But all query heads of a group add to the same dK and dV,
# just as all rows of one head do. The worker that owns a column block of dK and dV therefore loops over the rows of all
# heads in the group and sums their contributions before it stores the result. In this way, each block of dK and dV
# still has a single owner.

# %% [markdown]
# ## Recap
#
# - $dS = P \circ (dP - D)$, where $D_i = do_i \cdot o_i$ is known before the loops.
# - P is recomputed as $e^{S - L}$, so there are five matmuls instead of four, but nothing of size N × N is kept.
# - With the columns as the outer loop, dK and dV stay on the chip, while every tile sends its contribution to dQ off
#   the chip.
# - Since many workers add into the same dQ, there is a race. One fix is to use atomic adds, but their order varies from
#   run to run, and so does the rounding. The other fix is a second pass, which is deterministic but brings the total to
#   seven matmuls.
# - A row without keys has dQ = 0. Each dropout number is computed from its entry's position, because the two passes
#   visit the tiles in different orders.
# - In grouped-query attention, query head h reads the K/V head `h // group`, and the owner of dK and dV sums over the
#   group.
#
# <details><summary>What if the loss also depends on L?</summary>
#
# When a model merges the results of two calls of attention (chapter 14), L has a gradient dL, which is one value per
# row. Since $L = \log \sum_k e^{s_k}$, its derivative $\partial L / \partial s_j = e^{s_j} / \sum_k e^{s_k}$ is $p_j$,
# so dS becomes $P \circ (dP - D + dL)$. The same kernel can therefore be used with D − dL in place of D.
# </details>
#
# <details><summary>How accurate are the gradients?</summary>
#
# With normal random inputs, about as accurate as O in chapter 02. On an H200, six kernels in bf16 had relative errors
# of 0.0023 to 0.0025 in dQ, dK and dV (N = 2,048, d = 128), because P and dS are rounded to bf16 before a matmul, and
# the results are rounded as well. In NumPy, we found the same errors from N = 512 to N = 32,768. All in float32, the
# errors were between 4 · 10⁻⁷ and 9 · 10⁻⁷.
#
# With other inputs, dQ and dK can be much less accurate. If one key gets nearly all the weight, dP for that key is
# almost equal to D, so dS is a small difference of two large numbers. O is stored in bf16, so $D = do \cdot o$ inherits
# its rounding error. If each query is twice one of the keys, the error of dQ without a mask was 0.06 at d = 64 and
# above 1 at d = 128, for all six kernels. Such a dS is tiny, and so is the dQ that it leads to.
# </details>

# %% [markdown]
# ## Exercises
#
# **Predict.** A kernel does not compute D before the loops. Instead, each tile computes D from its own entries alone,
# as $\mathrm{rowsum}(p \circ dp)$. If there are 8 keys, for which block sizes does the test of dQ pass?
#
# - ☐ for all, because D is a mean of dP
# - ☐ only if one block holds all keys
# - ☐ for none
#
# <details><summary>Answer</summary>
#
# **only if one block holds all keys**, which means any B_c of 8 or more. D is a mean over all keys of the row. This is
# why tests of a kernel need at least two blocks in each direction.
# </details>

# %% [markdown]
# **Four questions on chapters 00 to 05.** Try to answer them without looking back.
#
# 1. P is recomputed in the backward pass, tile by tile. Why is that cheaper than keeping P?
# 2. A row has m = 1, ℓ = 2 and o = 6, where o is not yet divided by ℓ. Then a score of 1 + log 2 with a value of 5
#    arrives. What is o/ℓ?
# 3. By what factors do FA2's extra memory, its requests and its DRAM traffic grow when N doubles? For the DRAM traffic,
#    assume that K and V fit in L2.
# 4. Why was the FA1 authors' own kernel fast, although chapter 00's version of FA1 is slow?
#
# <details><summary>Four answers</summary>
#
# 1. Recomputing an entry of P takes 2d FLOPs, an exponential and a subtraction. The exponential takes as long as 256
#    FLOPs and the subtraction as long as 32, so the total is worth 416 FLOPs at d = 64 and 544 at d = 128. Storing it
#    in two bytes and loading it again keeps HBM busy for as long as 824 FLOPs take (chapter 03).
# 2. $\alpha = 1/2$, so $\ell = 1 + 1 = 2$ and $o = 3 + 5 = 8$, and the answer is 4.
# 3. The memory doubles, because there is one L per row. The requests grow by a factor of nearly four, because the
#    requests for K and V grow by four and the others (Q, O and L) by two. The DRAM traffic doubles, because each of Q,
#    K, V and O moves once.
# 4. Their kernel ran on many heads, which gave it many workers, and it was written in CUDA with large blocks. Chapter
#    00's FA1 is the simplest possible Triton code, with blocks of 64 keys at every N. From N = 4,096 on, it also has at
#    most 64 heads for 132 SMs.
# </details>

# %% [markdown]
# ## Checks
#
# The cell below compares this notebook's functions with the package and with finite differences.

# %% tags=["hide-input"]
from fa2_lab.errata.cases import central_differences
from fa2_lab.machine import chips
from fa2_lab.machine.rates import cost, rates
from fa2_lab.plots import rooflines
from fa2_lab.records import load
from fa2_lab.reference import fa2, heads
from fa2_studio.book.verdicts import close, verdict

packages = Trace()
theirs = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=2, trace=packages)
verdict("fa2_backward = fa2.backward", all(map(close, result, theirs)))
verdict("and it moves the same elements in the same order", one_pass.events == packages.events)


def loss_of(X):  # its gradient with respect to O is dO
    return float((dO * (safe_softmax(tau * (X @ K.T)) @ V)).sum())


p, ds = np.array([1, 3, 4, 8]) / 16, np.array([5.5, -7.5, 6, -4]) / 16
verdict("ds of the 1-3-4-8 row", close(p * (np.array([8.0, 0, 4, 2]) - 2.5), ds)
        and abs(ds.sum()) < 1e-15)
times = {
    name: row.values[name][0]
    for row in load("ladder").rows
    if (row.direction, row.problem["N_q"], row.problem["d"],
        row.problem["causal"]) == ("backward", 4096, 128, False)
    for name in ("b00_atomics", "b01_two_passes", "fa2_lab")
}
verdict("measured: 7.4, 5.1 and 2.1 ms", [round(ms, 1) for ms in times.values()] == [7.4, 5.1, 2.1])
per_byte = {name: cost(name).intensity("requested_bytes") for name in ("FA2", "FA2 backward")}
verdict("a requested byte gets 63 FLOPs forward, 52 backward",
        [round(x) for x in per_byte.values()] == [63, 52])
allowed = [points[:2] for points in rooflines.data("backward")["points"].values()]
verdict("77 and 104 FLOPs per byte; 502, 744 and 989 TFLOP/s",
        [round(x) for x, _ in allowed] == [52, 77, 104]
        and [round(y) for _, y in allowed] == [502, 744, 989])
flops = [64 * n * 4096**2 * 128 for n in (10, 14)]  # 64 heads
reached = [n / ms / 1e9 for n, ms in zip(flops, times.values(), strict=False)]  # TFLOP/s
verdict(
    "185 and 377 TFLOP/s, a quarter and 38% of the bounds",
    [round(x) for x in reached] == [185, 377]
    and [round(x / y, 2) for x, (_, y) in zip(reached, allowed[1:], strict=True)]
    == [0.25, 0.38],
)
should, did = (
    flops[1] / allowed[2][1] * allowed[1][1] / flops[0],
    times["b00_atomics"] / times["b01_two_passes"],
)
verdict("one pass should be 5% faster, and was 45% slower",
        (round(should, 2), round(did, 2)) == (1.05, 1.45))
rate = rates(chips.H200)
verdict("L2's line ends at 102 FLOPs per byte", 80 < round(rate.tensor / rate.l2) == 102 < 112)
rng = np.random.default_rng(1)
q, (k, v) = rng.standard_normal((1, 8, 3, 4)), rng.standard_normal((2, 1, 2, 3, 4))
of_heads, _ = heads.forward(q, k, v)
shared = [naive.forward(q[0, h], k[0, h // 4], v[0, h // 4])[0] for h in range(8)]
verdict("8 query heads, 2 K/V heads: head h reads head h // 4",
        close(of_heads[0], np.stack(shared)))
verdict("dQ = finite differences of the loss",
        close(result[0], central_differences(loss_of, Q), 1e-7))

# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)
