# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)

# %% [markdown]
# # 05 · The backward pass
#
# **How do gradients come back without the score matrix?**
#
# Chapter 01 derived the gradients of attention. Chapter 03 got P back, tile by tile. Now many workers share the
# job, and one of the three results, dQ, gets something from all of them. This chapter is about that sum.
#
# After this notebook you can
#
# - say in words what $dS = P \circ (dP - D)$ says about a score,
# - write FA2's backward pass, and say what it keeps and what it makes again,
# - explain why many workers add into one dQ, and name two ways out with their price.
#
# *Time: 45 minutes with the questions and exercises, and 8 for the ten questions on part I at the end. Hardware: any
# laptop, NumPy alone. Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb).*

# %%
from itertools import permutations

import numpy as np

from fa2_lab.errata.cases import central_differences
from fa2_lab.plots import backward_graph
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, heads, naive
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## What does dS say about a score?
#
# dS is the gradient of the loss with respect to the scores: it says how the loss changes when a score rises. Take the row
# of chapter 02: the weights are 1/16, 3/16, 4/16 and 8/16, the values 8, 0, 4 and 2, and the output is 2.5. Let the loss
# be the output itself, so that dO = 1.
#
# **Predict.** We raise the score of the last key a little. Its value is 2. Does the output go up or down?

# %% tags=["hide-input"]
s, v = np.log([1.0, 3.0, 4.0, 8.0]), np.array([8.0, 0.0, 4.0, 2.0])
by_differences = central_differences(lambda scores: float(safe_softmax(scores) @ v), s)  # as in chapter 01
p, dp = safe_softmax(s), 1.0 * v  # dP = dO Vᵀ: how much the loss grows with a weight
D = p @ dp
print("by finite differences, in sixteenths:", np.round(16 * by_differences, 4))
print("p (dp - D), in sixteenths:           ", np.round(16 * p * (dp - D), 4), "  D =", round(float(D), 9))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Down.** The key gains weight at the cost of all others, and its value, 2, is below the mean, 2.5.
# </details>
#
# The keys with the values 8 and 4 lie above the mean, so their gradients are positive. D is that mean: the weighted mean
# of the row's dP. It is also $do \cdot o = 1 \cdot 2.5$. So it can be computed from the output, before the first tile.
#
# **Takeaway.** $dS = P \circ (dP - D)$. If a score rises, the loss grows when its key's dP is above the row's mean D, and
# falls when it is below.

# %% [markdown]
# ## What is kept, and what is made again?
#
# These are the lines of chapter 01, for the whole matrix:
#
# $$dV = P^\top dO \qquad dP = dO\,V^\top \qquad dS = P \circ (dP - D) \qquad dQ = \tau\,dS\,K \qquad dK = \tau\,dS^\top Q$$
#
# Q, K, V and dO are there. P and D are not. The algorithms differ in where they take them from:
#
# | | standard | FA1 | FA2 |
# | --- | --- | --- | --- |
# | kept from the forward pass | P | O, $\ell$, m | O, L |
# | P | loaded | $e^{S - m} / \ell$ | $e^{S - L}$ |
# | D | from rows of P and dP | $do \cdot o$, in every tile | $do \cdot o$, once before the loops |
#
# FA2 keeps one number per row instead of two. To compute D it loads O once. FA1 loads O for every column block.
#
# **Predict.** Standard attention's backward pass has four matrix products: dV, dP, dQ and dK. FA2 must also get S back.
# How many products has FA2's backward pass?

# %% tags=["hide-input"]
Q, K, V, dO = np.random.default_rng(0).standard_normal((4, 8, 4))
tau = 1 / np.sqrt(4)
S = tau * (Q @ K.T)
P, L = safe_softmax(S), naive.logsumexp(S)
O = P @ V
standard, fa2s, product = Trace(), Trace(), 2 * 8 * 8 * 4  # FLOPs of one product
dQ, dK, dV = naive.backward(Q, K, V, P, dO, trace=standard)  # chapter 01's gradients, to compare with
fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=2, trace=fa2s)
print("products: standard", standard.matmul_flops // product, " FA2", fa2s.matmul_flops // product)
print("P, first numbers:", P[0, :3].round(6), "  exp(S - L):", np.exp(S - L[:, None])[0, :3].round(6))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Five.** $QK^\top$ is computed again.
# </details>
#
# Computing something again instead of keeping it is called *recomputation*. Five products instead of four are a quarter
# more FLOPs, and they run on the tensor cores. In return P is not kept or loaded, and dP and dS never leave the chip.
# The forward pass has two products, so people count a backward pass as 2.5 forward passes.
#
# **Takeaway.** One product more, and no matrix of N × N in memory. FA2 keeps O and one number per row, L.

# %% [markdown]
# ## The whole of Algorithm 2
#
# A tile (i, j) adds something to three results: to $dQ_i$, and to $dK_j$ and $dV_j$. So $dK_j$ and $dV_j$ are sums over
# row blocks i, and $dQ_i$ is a sum over column blocks j. What belongs to the outer loop stays on chip, as in chapter 04.
# Everything else is loaded for each tile, and a sum is stored again.
#
# | outer loop | stays | loaded for each tile | stored for each tile |
# | --- | --- | --- | --- |
# | columns j | dk, dv | q, do, dq | dq |
# | rows i | dq | k, v, dk, dv | dk, dv |
#
# With square tiles that is 4 blocks against 6; L and D are small. So the columns stay outside, in FA1 and in FA2. The
# forward pass swapped its loops. The backward pass does not.

# %% [markdown]
# First what happens to a tile of scores, then the loops. `tiling.hide` puts $-\infty$ where a mask hides, and
# `visited_rows(j)` leaves out the row blocks whose tile in column j is all hidden (SKIP). ([The
# poster](../figures/poster_backward.pdf) has all lines on one sheet.)


# %%
def p_and_ds(s_ij, v_j, do_i, L_i, D_i):
    L_i = np.where(np.isneginf(L_i), 0, L_i)  # a row without keys: all of its s are −∞, so p is 0, and so is its dQ
    p_ij = np.exp(s_ij - L_i[:, None])  # FA2.A2.L11  (B_r, B_c)
    dp_ij = do_i @ v_j.T  # FA2.A2.L13  (B_r, B_c)
    ds_ij = p_ij * (dp_ij - D_i[:, None])  # FA2.A2.L14  (B_r, B_c)
    return p_ij, ds_ij


# %%
def fa2_backward(Q, K, V, O, L, dO, tiling, trace=UNWATCHED):
    Q, K, V, O, dO, L, D = trace.hbm(Q=Q, K=K, V=V, O=O, dO=dO, L=L, D=np.empty(len(Q)))
    dQ, dK, dV = trace.hbm(dQ=np.empty(Q.shape), dK=np.empty(K.shape), dV=np.empty(V.shape))
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
            p_ij, ds_ij = p_and_ds(s_ij, v_j, do_i, L_i, D_i)
            dv_j = dv_j + p_ij.T @ do_i  # FA2.A2.L12  (B_c, d)
            dQ[rows] = dQ[rows] + tau * (ds_ij @ k_j)  # FA2.A2.L15  (B_r, d)
            dk_j = dk_j + tau * (ds_ij.T @ q_i)  # FA2.A2.L16  (B_c, d)
        dK[cols], dV[cols] = dk_j, dv_j  # FA2.A2.L18
    return np.asarray(dQ), np.asarray(dK), np.asarray(dV)


# %% [markdown]
# **Predict.** 8 queries and keys, d = 4, with 2 row blocks and 4 column blocks. dQ has 32 elements. How many elements of
# dQ are loaded in all?

# %% tags=["hide-input"]
tiling, one_pass = Tiling(8, 8, B_r=4, B_c=2), Trace()
result = fa2_backward(Q, K, V, O, L, dO, tiling, one_pass)
for tensor in ("K", "V", "dK", "dV", "Q", "dO", "dQ"):
    print(f"{tensor:2}: loaded {one_pass.loads(tensor):3}   stored {one_pass.stores(tensor):3}")
for name, ours, dense in zip(("dQ", "dK", "dV"), result, (dQ, dK, dV), strict=True):
    print(f"{name}: first number {ours[0, 0]:9.6f}, chapter 01 says {dense[0, 0]:9.6f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **128.** All of dQ comes in for each of the 4 column blocks. It also goes out 4 times, and once more as zeros: 160
# stored.
# </details>
#
# K, V, dK and dV move once. Q, dO and dQ move for each column block, and dO once more for D.
#
# **Takeaway.** A column block keeps k, v, dk and dv on chip, and all queries come by. Only the sum dQ comes and goes.

# %% [markdown]
# ## Who adds into dQ?
#
# FA2 gives each column block to a worker of its own; the listing says `trace.parallel`. $dK_j$ and $dV_j$ belong to
# worker j alone. But all workers add to the same $dQ_i$.
#
# **Predict.** Four workers run line 15 at the same moment for the same rows. All load $dQ_i$, each adds its part, all
# store. What does $dQ_i$ hold at the end?

# %% tags=["hide-input"]
dS = P * (dO @ V.T - (dO * O).sum(axis=1)[:, None])  # all tiles at once
parts = [tau * (dS[:, tiling.cols(j)] @ K[tiling.cols(j)]) for j in range(tiling.T_c)]
for part in parts:
    stored = np.zeros((8, 4)) + part  # all have loaded the zeros, and store one after the other
print("the four parts, first number:", [f"{part[0, 0]:.6f}" for part in parts])
print(f"after the race {stored[0, 0]:.6f}, the sum of the parts {sum(parts)[0, 0]:.6f}, right is {dQ[0, 0]:.6f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **One part.** That of the worker that stores last. The others are lost.
# </details>
#
# This is called a *race*. Load, add, store are three steps, and another worker can come between them. Step through it:
# without a mask all workers add into the same block of dQ at once. Then try the causal mask, and two passes.

# %% tags=["nbval-ignore-output", "hide-input"]
live("backward")

# %% [markdown]
# **Takeaway.** Either the three steps become one, or each sum gets a single worker.

# %% [markdown]
# ## First way out: atomic adds
#
# A GPU can load, add and store in one step that nothing can interrupt. It is called an *atomic add*. Then no part is
# lost. But the parts may arrive in any order.
#
# **Predict.** float32 has about seven digits. What is $10^8 + 1 - 10^8$, computed from left to right?


# %% tags=["hide-input"]
def sums_in_all_orders(parts):
    return [sum(order[1:], start=order[0]) for order in permutations(parts)]


three = sums_in_all_orders([np.float32(1e8), np.float32(1), np.float32(-1e8)])
print("10⁸ + 1 − 10⁸ in all six orders:", [float(x) for x in three])
few = [part.round(4).astype(np.float32) for part in parts]  # 4 digits: float32 numbers that every machine agrees on
rounded = sums_in_all_orders(few)
spread = max(np.abs(x - rounded[0]).max() for x in rounded)
print(f"dQ in all 24 orders: {len({x.tobytes() for x in rounded})} different results, at most {spread:.0e} apart")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Zero.** $10^8 + 1$ is rounded to $10^8$.
# </details>
#
# In two of the six orders the result is 1. The sums of dQ differ in the same way, mostly in their last bits. Where large
# terms cancel, as here, one order can be far better than another, and atomic adds do not choose.
#
# **Takeaway.** Atomic adds lose nothing. Their order is not fixed, so the last bits may change from run to run.

# %% [markdown]
# ## Second way out: a pass of its own
#
# $dQ_i$ is a sum over keys, like $o_i$ in the forward pass. So let a second kernel run with rows outside, and keep $dq_i$
# on chip. The first kernel then leaves line 15 out.
#
# **Predict.** The second pass needs dS, and for it S and dP once more. How many products do both passes have together?


# %% tags=["hide-input"]
def dq_pass(Q, K, V, L, D, dO, tiling, trace=UNWATCHED):
    Q, K, V, dO, L, D, dQ = trace.hbm(Q=Q, K=K, V=V, dO=dO, L=L, D=D, dQ=np.empty(Q.shape))
    for i in trace.parallel("i", range(tiling.T_r)):
        rows = tiling.rows(i)
        q_i, do_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]
        dq_i = np.zeros(q_i.shape)  # (B_r, d)
        for j in trace.serial("j", tiling.visited_cols(i)):
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]
            s_ij = tiling.hide(tau * (q_i @ k_j.T), i, j)  # (B_r, B_c)
            _, ds_ij = p_and_ds(s_ij, v_j, do_i, L_i, D_i)
            dq_i = dq_i + tau * (ds_ij @ k_j)
        dQ[rows] = dq_i
    return np.asarray(dQ)


# %% tags=["hide-input"]
D, second = (dO * O).sum(axis=1), Trace()
dQ_alone = dq_pass(Q, K, V, L, D, dO, tiling, second)
without_dQ = one_pass.hbm_elements - one_pass.loads("dQ") - one_pass.stores("dQ")
print(f"dQ, first number: {dQ_alone[0, 0]:.6f}, right is {dQ[0, 0]:.6f}")
print("one pass:  ", one_pass.matmul_flops // product, "products,", one_pass.hbm_elements, "elements requested")
both = (one_pass.matmul_flops + second.matmul_flops) // product - 1  # less the product of line 15, left out
print("two passes:", both, "products,", without_dQ + second.hbm_elements, "elements requested")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Seven.** S, dP, dV and dK in the first pass; S, dP and dQ in the second.
# </details>
#
# The requests are about as many as before. Every result has one owner, so the same input gives the same bits. Which way
# is faster depends on the chip. Chapter 09 has both as kernels.
#
# The picture shows one tile, from top to bottom: white boxes are recomputed, boxes with dashed edges are gradients,
# and the circled numbers count the five products. Its lower half shows the two ways to sum dQ.

# %%
show(backward_graph.draw(**backward_graph.data()))

# %% [markdown]
# **Takeaway.** Two passes: two products more, no race, the same bits in every run.

# %% [markdown]
# ## Recap
#
# - $dS = P \circ (dP - D)$ with $D_i = do_i \cdot o_i$, known before the loops.
# - P is made again as $e^{S - L}$: five products instead of four, and nothing of size N × N is kept.
# - Columns outside: dK and dV stay on chip, dQ travels.
# - FA1 to FA2: D before the loops, L instead of $\ell$ and m, a worker for each column block.
# - Many workers add into dQ: atomic adds (any order), or a second pass (seven products, same bits).
#
# <details><summary>What if several query heads read one key head?</summary>
#
# In *grouped-query attention* a group of query heads shares one head of keys and values (in *multi-query attention* all
# of them do). A model that writes a text keeps the keys and values of all tokens so far, its *KV cache*, and fewer key
# heads make it smaller (chapter 14). In the backward pass all heads of a group add to the same dK and dV
# ([picture](../figures/grouped_heads.svg)).
# </details>

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A model may use L as well as O, for example when it merges two calls by their L (chapter 14). Then
# the loss has a gradient dL, one number for each row. Since $\partial L / \partial s_j = p_j$, dS becomes
# $P \circ (dP - D + dL)$. `dq_pass` stays as it is. Which D must it be given? Write it in place of the `...`.
#
# <details><summary>Hint</summary>
#
# $dP - D + dL = dP - (\ldots)$
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return D - dL
# ```
# So a gradient of L costs nothing.
# </details>


# %%
def D_with_L(D, dL):  # (N,), (N,) -> (N,)
    return ...


# %% tags=["hide-input"]
dL = np.arange(8.0)
given = D_with_L(D, dL)
if given is ...:
    print("not written yet")
else:

    def loss_with_L(Q):
        S = tau * (Q @ K.T)
        return float((dO * (safe_softmax(S) @ V)).sum() + dL @ naive.logsumexp(S))

    error = np.abs(dq_pass(Q, K, V, L, given, dO, tiling) - central_differences(loss_with_L, Q)).max(axis=1)
    print("right" if error.max() < 1e-6 else f"not yet: dQ is wrong in rows {np.flatnonzero(error > 1e-6)}")

# %% [markdown]
# **2. Find the bug.** The function below computes D from a single tile, as $\mathrm{rowsum}(p \circ dp)$. There are 8 keys.
# With which one of the block sizes 2, 4 and 8 is its dQ right? Write this number in place of the `...`. Then mend the
# line of `local_D`, so that dQ is right with all three.
#
# <details><summary>Hint</summary>
#
# D is a sum over which keys? And what else is it equal to?
# </details>
# <details><summary>Solution</summary>
#
# Only with $B_c = 8$, where a tile holds the whole row: D is a sum over all keys. A test with fewer keys than a block
# would pass. So tests of a kernel need at least two blocks in each direction.
# ```python
# local_D = (dO * O).sum(axis=1)
# ```
# </details>

# %%
right_with = ...  # 2, 4 or 8


def dq_with_local_D(B_c):
    dq = np.zeros((8, 4))
    for j in range(0, 8, B_c):
        p_j, dp_j = P[:, j : j + B_c], dO @ V[j : j + B_c].T
        local_D = (p_j * dp_j).sum(axis=1)
        dq += tau * ((p_j * (dp_j - local_D[:, None])) @ K[j : j + B_c])
    return dq


# %% tags=["hide-input"]
if right_with is ...:
    print("not answered yet")
else:
    print("your answer:", "right" if right_with == 8 else f"not yet: you say {right_with}")
    off = {B_c: np.abs(dq_with_local_D(B_c) - dQ).max() for B_c in (2, 4, 8)}
    print("error of dQ:", ", ".join(f"{error:.3f} with B_c = {B_c}" for B_c, error in off.items()))
    print("the line of local_D:", "right" if max(off.values()) < 1e-9 else "not yet mended")

# %% [markdown]
# ## Ten questions on part I
#
# Chapters 00 to 05, without looking back. An answer opens when you click it.
#
# <details><summary>1. N = 4,096 and d = 128, 16 heads. How much memory do S (4 bytes) and P (2 bytes) take, and how much L?</summary>
#
# S and P: 6 · 4,096² · 16 = 1.6 GB. L: 4 · 4,096 · 16 = 256 KiB.
# </details>
# <details><summary>2. FA2 requests K and V once for each row block. Why does most of that not cross to DRAM?</summary>
#
# K and V of one head are small (2 MiB in question 1, with two bytes a number). They stay in L2, which answers all requests
# but the first.
# </details>
# <details><summary>3. A row has seen scores with m = 1, ℓ = 2, o = 6 (not divided). Now comes a score 1 + log 2 with value 5. What is o/ℓ?</summary>
#
# $\alpha = 1/2$, so $\ell = 1 + 1 = 2$ and $o = 3 + 5 = 8$: the answer is 4.
# </details>
# <details><summary>4. Why does FA1 need a factor β, and FA2 only α?</summary>
#
# FA1 takes a tile's exponentials relative to the tile's own maximum, FA2 relative to the new maximum. With that, $\beta$
# is always 1.
# </details>
# <details><summary>5. FA1, N = 1,024, d = 64, B_c = 128. How many elements of Q does it load in all?</summary>
#
# 8 column blocks, and all of Q for each: 8 · 1,024 · 64 = 524,288.
# </details>
# <details><summary>6. FA2 with the same sizes and B_r = 128. How many elements of K, and how many of O?</summary>
#
# K: 8 row blocks load all of it, 524,288. O is never loaded, and stored once: 65,536.
# </details>
# <details><summary>7. N doubles. By what factor grow FA2's extra memory, its requests, and its DRAM traffic while K and V fit in L2?</summary>
#
# Two (one L per row), nearly four, and two (each of Q, K, V and O once).
# </details>
# <details><summary>8. How many divisions does FA2's forward pass need for N rows, and what is left inside the loop?</summary>
#
# N, one for each row. Inside the loop, $\alpha$ still scales the output block in every tile.
# </details>
# <details><summary>9. Two ways to sum dQ: how many products has each, and which gives the same bits in every run?</summary>
#
# Atomic adds: five. A second pass: seven, and the same bits, because every result has one owner.
# </details>
# <details><summary>10. Of 4 × 4 causal tiles, how many are visited, and how many of those are masked?</summary>
#
# 10 are visited. The 4 on the diagonal are masked.
# </details>

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against plain attention and finite differences.

# %% tags=["hide-input"]
for mask in (NO_MASK, CAUSAL):
    o, lse = fa2.forward(Q, K, V, B_r=4, B_c=2, mask=mask)
    ours, packages, tiled = Trace(), Trace(), Tiling(8, 8, 4, 2, mask)
    mine = fa2_backward(Q, K, V, o, lse, dO, tiled, ours)
    theirs = fa2.backward(Q, K, V, o, lse, dO, B_r=4, B_c=2, mask=mask, trace=packages)
    verdict(f"fa2_backward = fa2.backward, causal = {mask.causal}", all(map(close, mine, theirs)))
    verdict("and it moves the same elements in the same order", ours.events == packages.events)
    two = dq_pass(Q, K, V, lse, (dO * o).sum(axis=1), dO, tiled)
    verdict(f"the pass for dQ gives the same dQ, causal = {mask.causal}", close(two, theirs[0]))
verdict("fa2_backward = chapter 01's gradients", all(map(close, result, (dQ, dK, dV))))


# %% tags=["hide-input"]
q, do = np.random.default_rng(1).standard_normal((2, 2, 4, 13, 5))
k, v = np.random.default_rng(2).standard_normal((2, 2, 2, 29, 5))
for name, keys, size in (("ragged, grouped heads, causal", 29, 1), ("more queries than keys, huge scores", 7, 100)):
    results = []
    for stage in heads.STAGES:
        given = dict(stage=stage, causal=True, B_r=4, B_c=6)
        q_s, k_s, v_s = size * q, k[:, :, :keys], v[:, :, :keys]
        results.append(heads.backward(q_s, k_s, v_s, *heads.forward(q_s, k_s, v_s, **given), do, **given))
    same = [close(a, b, 1e-10) for other in results[1:] for a, b in zip(other, results[0], strict=True)]
    verdict(f"standard, FA1 and FA2 agree: {name}", all(same))


def loss_of(X):  # its gradient with respect to O is dO
    return float((dO * (safe_softmax(tau * (X @ K.T)) @ V)).sum())


verdict("dQ = finite differences of the loss", close(dQ, central_differences(loss_of, Q), 1e-7))

# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)
