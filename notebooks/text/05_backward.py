# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)

# %% [markdown]
# # 05 · The backward pass
#
# **How do gradients come back without the score matrix?**
#
# Chapter 01 derived the gradients. Chapter 03 got P back, tile by tile. Now many workers share the job, and one of the
# three results, dQ, gets something from all of them.
#
# After this notebook you can
#
# - say in words what $dS = P \circ (dP - D)$ says about a score,
# - write FA2's backward pass of one tile, and say what the loops around it keep on the chip,
# - explain why many workers add into one dQ, and name two ways out with their price.
#
# *Time: 40 minutes with the questions at the end. Hardware: any laptop, NumPy alone. Before this:
# [04 · FlashAttention-2, forward](04_fa2_forward.ipynb).*

# %% tags=["hide-input"]
from itertools import permutations

import numpy as np

from fa2_lab.errata.cases import central_differences
from fa2_lab.plots import backward_graph, roofline
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, naive
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.build import Case, check
from fa2_studio.book.steps import tile_gradients
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## What does dS say about a score?
#
# dS is the gradient of the loss with respect to the scores: how the loss changes when a score rises. Take the row of
# chapter 02: the weights are 1/16, 3/16, 4/16 and 8/16, the values 8, 0, 4 and 2, and the output is 2.5. Let the loss
# be the output itself, so that dO = 1.
#
# **Predict.** We raise the score of the last key a little. Its weight is the largest, its value is 2. Where does the
# output go?
#
# - ☐ up: more of a positive value is added
# - ☐ down
# - ☐ it stays: the weights still sum to 1
#
# <details><summary>Answer</summary>
#
# **down.** The key gains weight at the cost of all others, and its value, 2, is below the mean, 2.5. The keys with the
# values 8 and 4 lie above the mean, so their gradients are positive.
#
# ```python
# s, v = np.log([1.0, 3.0, 4.0, 8.0]), np.array([8.0, 0.0, 4.0, 2.0])
# p, dp = safe_softmax(s), v  # dP = dO Vᵀ: how much the loss grows with a weight
# print("dS = p (dp - D), in sixteenths:", np.round(16 * p * (dp - p @ dp), 4))
# ```
#
# ```text
# dS = p (dp - D), in sixteenths: [ 5.5 -7.5  6.  -4. ]
# ```
# </details>
#
# That is what $dS = P \circ (dP - D)$ says: the loss grows with a score if its key's dP is above D, and falls if it is
# below. D is the weighted mean of the row's dP. It is also $do \cdot o = 1 \cdot 2.5$, so it can be computed from the
# output, before the first tile.

# %% [markdown]
# ## What is kept, and what is recomputed?
#
# The lines of chapter 01:
#
# $$\begin{aligned} dV &= P^\top dO \\ dP &= dO\,V^\top \\ dS &= P \circ (dP - D) \\ dQ &= \tau\,dS\,K \\ dK &= \tau\,dS^\top Q \end{aligned}$$
#
# The algorithms differ in where they take P and D from:
#
# | | standard | FA1 | FA2 |
# | --- | --- | --- | --- |
# | kept from the forward pass | P | O, $\ell$, m | O, L |
# | P | loaded | $e^{S - m} / \ell$ | $e^{S - L}$ |
# | D | the row sum of $P \circ dP$ | $do \cdot o$, in every tile | $do \cdot o$, once before the loops |
#
# S is *recomputed* from Q and K: five products and not four (dV, dP, dQ, dK), a quarter more FLOPs. In return nothing of
# N × N is kept or loaded. The forward pass has two products, so people count a backward pass as 2.5 forward passes.

# %% [markdown]
# ## Now write one tile
#
# **Build.** `one_tile` gets a tile of scores `s` (scaled and masked: a hidden one is −∞), the blocks `q`, `do`, `L`, `D` of
# its queries (L is −∞ where a row sees no key), `k` and `v` of its keys, and τ. It returns what the tile adds to dQ, dK
# and dV: the body of FA2's Algorithm 2.

# %%
# s (B_r, B_c); q and do (B_r, d); k and v (B_c, d); L and D (B_r,)
def one_tile(s, q, k, v, do, L, D, tau):
    ...


# %% tags=["hide-input"]
def case(words, N_q, N_k, rows, cols, mask=NO_MASK):  # a tile of a small problem; by dense gradients, what it adds
    rng = np.random.default_rng(0)
    q, do, k, v = *rng.standard_normal((2, N_q, 4)), *rng.standard_normal((2, N_k, 4))
    seen = Tiling(N_q, N_k, N_q, N_k, mask).visible(0, 0)
    s = np.where(seen, q @ k.T / 2, -np.inf)
    o, p = naive.forward(q, k, v, mask=mask)
    D, L = (do * o).sum(axis=1), naive.logsumexp(s)
    tile = s[rows, cols], q[rows], k[cols], v[cols], do[rows], L[rows], D[rows], 0.5
    only = np.zeros((N_q, N_k))
    only[rows, cols] = (p * (do @ v.T - D[:, None]))[rows, cols]
    return Case(words, tile, ((only @ k / 2)[rows], (only.T @ q / 2)[cols], p[rows, cols].T @ do[rows]))


everything = slice(None)
check(
    one_tile,
    case("4 queries, 6 keys, one tile. Is the order dq, dk, dv? Which take τ and a transpose?", 4, 6, everything, everything),
    case("2 of 4 queries, 3 of 6 keys. Must the rows of p sum to 1 in a tile?", 4, 6, slice(2, 4), slice(0, 3)),
    case("some scores are hidden. What is e^(−∞)?", 6, 6, slice(0, 3), slice(0, 3), CAUSAL),
    case("rows 0 to 3 see no key, and their L is −∞. What is −∞ − (−∞)?", 8, 4, slice(2, 6), everything, CAUSAL),
    names=("dq", "dk", "dv"),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def one_tile(s, q, k, v, do, L, D, tau):
#     L = np.where(np.isneginf(L), 0, L)  # a row without keys, as in chapter 04
#     p = np.exp(s - L[:, None])  # FA2.A2.L11  (B_r, B_c)
#     dp = do @ v.T  # FA2.A2.L13
#     ds = p * (dp - D[:, None])  # FA2.A2.L14
#     return tau * (ds @ k), tau * (ds.T @ q), p.T @ do  # dq, dk, dv: FA2.A2.L15 FA2.A2.L16 FA2.A2.L12
# ```
# </details>
#
# [Assignment 3](assignments/3_backward.ipynb) goes further: all tiles, shared heads and dropout, with the meter on.

# %% [markdown]
# ## The loops around it
#
# A tile (i, j) adds to $dQ_i$, and to $dK_j$ and $dV_j$. As in chapter 04, what belongs to the outer loop stays on the
# chip. The rest is loaded for each tile, and a sum that cannot stay is stored after it. "q 2" means: q is loaded, two bytes
# an element; an unfinished sum has four. (Tiles are square. L and D are small.)
#
# | outer loop | sums that stay | loaded for each tile | stored for each tile | together |
# | --- | --- | --- | --- | ---: |
# | columns j | dk, dv | q 2, do 2, dq 4 | dq 4 | 12 |
# | rows i | dq | k 2, v 2, dk 4, dv 4 | dk 4, dv 4 | 20 |
#
# So the columns stay outside, in FA1 and in FA2. Here is Algorithm 2 around your tile (as `tile_gradients`).
# `tiling.visited_rows(j)` lists the row blocks that column block j does not skip:

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
            s_ij = tiling.hide(tau * (q_i @ k_j.T), i, j)  # FA2.A2.L10  (B_r, B_c)
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
    print(f"{name}: first number {ours[0, 0]:9.6f}, chapter 01 says {right[0, 0]:9.6f}", end="; ")
    print(f"loaded {one_pass.loads(name):3}, stored {one_pass.stores(name):3}")

# %% [markdown]
# dQ has 32 elements. They are stored once as zeros, then loaded and stored for each of the 4 column blocks.

# %% [markdown]
# ## Who adds into dQ?
#
# FA2 gives each column block to a worker of its own: `trace.parallel` in the listing. $dK_j$ and $dV_j$ belong to worker
# j alone. But all workers add to the same $dQ_i$.
#
# **Predict.** Four workers run the line `dQ[rows] = dQ[rows] + dq` for the same rows. dQ is 0 at first, and they do not
# wait for each other. What does $dQ_i$ hold at the end?
#
# - ☐ the sum of the four parts, in any case
# - ☐ one of the four parts, in any case
# - ☐ the sum of one, two, three or all four parts
#
# <details><summary>Answer</summary>
#
# **the sum of one, two, three or all four parts.** What worker 1 stores between the load and the store of worker 2 is
# lost. If all four load before the first one stores, only the part stored last is left.
# </details>
#
# This is a *race*: load, add and store are three steps, and another worker can come between them.

# %% [markdown]
# ## First way out: atomic adds
#
# A GPU can load, add and store in one step that nothing can interrupt, an *atomic add*. No part is lost. But the parts
# arrive in any order, and float32 has about seven digits. Here is dQ in all 24 orders of its four parts:

# %%
dS = P * (dO @ V.T - (dO * O).sum(axis=1)[:, None])
columns = [tiling.cols(j) for j in range(4)]
parts = [(tau * dS[:, c] @ K[c]).astype(np.float32) for c in columns]
sums = [sum(order[1:], start=order[0]) for order in permutations(parts)]
spread = max(np.abs(x - sums[0]).max() for x in sums)
different = len({x.tobytes() for x in sums})
print(f"dQ in 24 orders: {different} different results, at most {spread:.0e} apart")

# %% [markdown]
# They differ in the last bits. (a + b = b + a, so 24 orders give at most 12 results.) Where large terms cancel, one order
# can be far better than another, and atomic adds do not choose: in float32 $10^8 + 1 - 10^8$ is 0, since $10^8 + 1$ is
# rounded to $10^8$.

# %% [markdown]
# ## Second way out: a pass of its own
#
# $dQ_i$ is a sum over keys, like $o_i$ in the forward pass. So a second kernel can run with rows outside and keep $dq_i$
# on the chip. The first kernel leaves out the line `dQ[rows] = …`, and does not compute dq. Every sum then has one owner,
# and the same input gives the same bits in every run. The price: the first pass computes S, dP, dV and dK, the second S,
# dP and dQ. That is seven products a tile instead of five. The requests, again in bytes for each element:
#
# | | loaded for each tile | stored for each tile | together |
# | --- | --- | --- | ---: |
# | one pass, as listed | q 2, do 2, dq 4 | dq 4 | 12 |
# | one pass, atomic adds (L2 makes the sum) | q 2, do 2 | dq 4, as an atomic add | at least 8 |
# | two passes | first q 2, do 2; then k 2, v 2 | | 8 |
#
# (dK, dV and the second pass's dQ are stored once, not for each tile.) Which way is faster depends on the chip. Chapter 09
# has both as kernels. Here is one tile of one pass, with its five products numbered:

# %% tags=["hide-input"]
show(backward_graph.draw(**backward_graph.data()))

# %% [markdown]
# White boxes are computed again, dashed boxes are gradients. Of two passes the first takes ① to ④, the second ①, ② and ⑤.
# Step through both ways below. In the upper half of the still picture all four SMs add to dQ 0 at once (× 4). In its
# lower half, with two passes, each block of dQ has one writer, and the end comes later:

# %% tags=["nbval-ignore-output", "hide-input"]
live("backward")

# %% [markdown]
# On the roofline, one pass stands beside the forward pass:

# %% tags=["hide-input"]
show(roofline.draw(**roofline.data("FA2", "FA2 backward")))

# %% [markdown]
# (d = 128, tiles of 64 × 64.) The ring counts dQ as the listing moves it, in and out: a requested byte gets 52 FLOPs, in
# the forward pass 63. With atomic adds dQ does not come in, so a byte gets 10 · 64 / 8 = 80, if an atomic add
# costs L2 no more than a plain store. (It does more: it reads, adds and writes. So 80 is only a bound.)

# %% [markdown]
# ## Recap
#
# - $dS = P \circ (dP - D)$ with $D_i = do_i \cdot o_i$, known before the loops.
# - P is recomputed as $e^{S - L}$: five products instead of four, and nothing of size N × N is kept.
# - Columns outside: dK and dV stay on the chip, dQ travels.
# - Many workers add into dQ: atomic adds (any order), or a second pass (seven products, same bits).
#
# <details><summary>What if the loss also depends on L?</summary>
#
# When a model merges two calls (chapter 14), L has a gradient dL, one number for each row. Since
# $\partial L / \partial s_j = p_j$, dS becomes $P \circ (dP - D + dL)$. So the same kernel serves with D − dL in place of D.
# </details>
# <details><summary>What if several query heads read one key head?</summary>
#
# In *grouped-query attention* a group of query heads shares one head of keys and values (in *multi-query attention* all
# do). It makes a model's *KV cache* smaller, the keys and values of all tokens so far (chapter 14). In the backward
# pass all heads of a group add to the same dK and dV.
# </details>

# %% [markdown]
# ## Exercises
#
# **Predict.** Somebody forgets D before the loops, and computes it in each tile from that tile, as $\mathrm{rowsum}(p
# \circ dp)$. There are 8 keys. With which block sizes does the test of dQ pass?
#
# - ☐ with all: D is a mean of dP
# - ☐ only if one block holds all keys
# - ☐ with none
#
# <details><summary>Answer</summary>
#
# **only if one block holds all keys**, so with any B_c of 8 or more. D is a mean over all keys of the row. So tests of a
# kernel need at least two blocks in each direction.
# </details>

# %% [markdown]
# **Four questions on chapters 00 to 05**, without looking back.
#
# 1. The scores of a tile are computed again in the backward pass. Why is that cheaper than to keep them?
# 2. A row has m = 1, ℓ = 2, o = 6 (not divided). Now comes a score 1 + log 2 with value 5. What is o/ℓ?
# 3. N doubles. By what factor do FA2's extra memory, its requests, and its DRAM traffic (while K and V fit in L2) grow?
# 4. Why was the FA1 of its authors fast, and the one of chapter 00 slow?
#
# <details><summary>Four answers</summary>
#
# 1. Tensor cores do 2d FLOPs for a score in less time than HBM takes to store and load its bytes (chapter 00).
# 2. $\alpha = 1/2$, so $\ell = 1 + 1 = 2$ and $o = 3 + 5 = 8$: the answer is 4.
# 3. Two (one L per row); nearly four (K and V four, Q, O and L two); and two (each of Q, K, V and O once).
# 4. Many heads, so many workers, and large blocks. Chapter 00 has few heads and blocks of 64 keys.
# </details>

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and against finite differences.

# %% tags=["hide-input"]
packages = Trace()
theirs = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=2, trace=packages)
verdict("fa2_backward = fa2.backward", all(map(close, result, theirs)))
verdict("and it moves the same elements in the same order", one_pass.events == packages.events)


def loss_of(X):  # its gradient with respect to O is dO
    return float((dO * (safe_softmax(tau * (X @ K.T)) @ V)).sum())


verdict("dQ = finite differences of the loss", close(result[0], central_differences(loss_of, Q), 1e-7))

# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)
