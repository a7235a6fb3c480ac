# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)

# %% [markdown]
# # 05 · The backward pass
#
# **How do gradients come back without the score matrix?**
#
# Chapter 01 derived the gradients of attention. Chapter 03 computed them tile by tile, as FA1 does. FA2 changes little in
# the arithmetic. What is new is that many workers share the job, and that one of the three results, dQ, gets something
# from all of them. This chapter is about that sum.
#
# After this notebook you can
#
# - say in words what $dS = P \circ (dP - D)$ does to a score,
# - write FA2's backward pass, and say what it keeps and what it makes again,
# - explain why many workers add into one dQ, and name two ways out with their price.
#
# *Time: 60 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [04 ·
# FlashAttention-2, forward](04_fa2_forward.ipynb).*

# %%
from itertools import permutations

import numpy as np

from fa2_lab.errata.cases import central_differences
from fa2_lab.machine import io
from fa2_lab.plots import backward_graph, grouped_heads
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, heads, naive
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Mask, Tiling
from fa2_lab.trace import UNWATCHED, Trace

# %% [markdown]
# ## Which way should a score move?
#
# Take the row of chapter 02: the weights are 1/16, 3/16, 4/16 and 8/16, the values 8, 0, 4 and 2, and the output is 2.5.
# Let the loss be the output itself, so that dO = 1.
#
# **Predict.** We raise the score of the last key a little. Its value is 2. Does the output go up or down?

# %%
s, v = np.log([1.0, 3.0, 4.0, 8.0]), np.array([8.0, 0.0, 4.0, 2.0])
by_differences = central_differences(lambda scores: float(safe_softmax(scores) @ v), s)  # as in chapter 01
p, dp = safe_softmax(s), 1.0 * v  # dP = dO Vᵀ: what a weight is worth to the loss
D = p @ dp
print("by differences, in sixteenths:", np.round(16 * by_differences, 4))
print("p (dp - D), in sixteenths:    ", np.round(16 * p * (dp - D), 4), "  D =", round(float(D), 9))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Down.** The key gains weight at the cost of all others, and its value, 2, is below the mean, 2.5.
# </details>
#
# The keys with the values 8 and 4 lie above the mean, so their gradients are positive.
#
# D is that mean: what the row's keys are worth on average. It is also $do \cdot o = 1 \cdot 2.5$. So it can be computed
# from the output, before the first tile.
#
# **Takeaway.** $dS = P \circ (dP - D)$: a score is pulled up as far as its key is worth more than the row's mean, D.

# %% [markdown]
# ## What must the forward pass keep?
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
# | D | from rows of P and dP | $do \cdot o$, in every tile | $do \cdot o$, once |
#
# **Predict.** For N = 8,192, how many times more numbers does P have than L?

# %%
rng = np.random.default_rng(0)
Q, K, V, dO = rng.standard_normal((4, 8, 4))
tau = 1 / np.sqrt(4)
S = tau * (Q @ K.T)
P = safe_softmax(S)
O, L = P @ V, naive.logsumexp(S)
dQ, dK, dV = naive.backward(Q, K, V, P, dO)  # chapter 01's gradients, to compare with
N = 8192
print(f"N = {N:,}: P has {N * N:,} numbers for each head, L has {N:,}")
print("P, first numbers:", P[0, :3].round(6), "  exp(S - L):", np.exp(S - L[:, None])[0, :3].round(6))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **8,192 times.** A row of P against one number.
# </details>
#
# And there is such a P for every head of every layer, from the forward pass until the backward pass needs it.
#
# **Takeaway.** All three algorithms compute the same gradients. FA2 keeps O and one number per row, L.

# %% [markdown]
# ## What does it cost to make P again?
#
# P comes back from S, and S is the product $QK^\top$ once more. The picture shows one tile, from left to right. What is
# white is made again. (Its lower half is about dQ; we come back to it.)
#
# **Predict.** Standard attention's backward pass has four matrix products: dV, dP, dQ and dK. How many has FA2's?

# %%
show(backward_graph.draw(**backward_graph.data()))

# %%
for d in (64, 128):
    tiling = Tiling(8192, 8192, 128, 128)
    ratio = float(io.ratio(io.standard_backward(tiling, d), io.fa2_backward(tiling, d)))
    print(f"d = {d:3}: standard attention's backward requests {ratio:.1f} times the elements of FA2's")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Five.** $QK^\top$ is computed again.
# </details>
#
# Computing something again instead of keeping it is called *recomputation*. It takes a quarter more FLOPs, and they run
# on the tensor cores. In return P is not loaded, and dP and dS never leave the chip. The forward pass has two products,
# so people count a backward pass as 2.5 forward passes.
#
# **Takeaway.** One product more, and no matrix of N × N in memory.

# %% [markdown]
# ## Which loop goes outside?
#
# A tile (i, j) adds something to three results: to $dQ_i$, and to $dK_j$ and $dV_j$. So $dK_j$ and $dV_j$ are sums over
# row blocks i. $dQ_i$ is a sum over column blocks j. What belongs to the outer loop can stay on chip, as in chapter 04.
# Everything else travels for each tile.
#
# **Predict.** Put the column blocks outside. Which of the three sums must travel?

# %%
print("blocks of B × d that each tile moves:")
for outside, streams, sums in (("columns", "q do", "dq"), ("rows", "k v", "dk dv")):
    moved = len(streams.split()) + 2 * len(sums.split())  # a sum goes in and out
    print(f"{outside:8} outside: load {streams}; load and store {sums}: {moved} blocks")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Only dQ.** $dK_j$ and $dV_j$ belong to the column block, so they stay.
# </details>
#
# With rows outside, dK and dV would both travel. So here the columns stay outside, in FA1 and in FA2. The forward
# pass swapped its loops; the backward pass does not.
#
# **Takeaway.** One of the sums must travel. With columns outside it is dQ alone.

# %% [markdown]
# ## The whole of Algorithm 2
#
# First what happens to a tile of scores, then the loops. `tiling.hide` puts $-\infty$ where a mask hides, like `hide` in
# chapter 04, and `visited_rows(j)` leaves out the tiles that nobody sees. All lines on one sheet, with their work:
# [the poster](../figures/poster_backward.pdf).

# %%
def p_and_ds(s_ij, v_j, do_i, L_i, D_i):
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

# %%
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
# K, V, dK and dV move once. Q, dO and dQ move for each column block.
#
# **Takeaway.** In FA2's backward pass a column block keeps k, v, dk and dv on chip, and all queries come by.

# %% [markdown]
# ## What did FA2 change in FA1's backward?
#
# The loops are the same. Two things changed. D is computed once, before the loops, and not in every tile. And L replaces
# $\ell$ and m.
#
# **Predict.** FA1 computes D in every tile, as $do \cdot o$. Which tensor need not be loaded for each tile any more?

# %%
big, blocks = rng.standard_normal((4, 512, 64)), dict(B_r=64, B_c=64)
O_1, l_1, m_1 = fa1.forward(*big[:3], **blocks)
O_2, L_2 = fa2.forward(*big[:3], **blocks)
old, new = Trace(), Trace()
gradients_1 = fa1.backward(*big[:3], O_1, l_1, m_1, big[3], **blocks, trace=old)
gradients_2 = fa2.backward(*big[:3], O_2, L_2, big[3], **blocks, trace=new)
print(f"{'':22}{'FA1':>12}{'FA2':>12}")
for tensor in ("O", "l", "m", "L", "D"):
    print(f"loads of {tensor:13}{old.loads(tensor):12,}{new.loads(tensor):12,}")
for kind in ("matmul", "exp", "multiply", "divide"):
    print(f"{kind:22}{old.flops[kind]:12,}{new.flops[kind]:12,}")
print(f"{'all elements requested':22}{old.hbm_elements:12,}{new.hbm_elements:12,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **O.** FA1 loads it for each of the 8 column blocks, FA2 once.
# </details>
#
# The products and exponentials are the same. What is saved: loads of O, a multiplication for each score, seven of eight
# computations of D, and all divisions.
#
# **Takeaway.** FA2's backward is FA1's with D before the loops and one number per row instead of two.

# %% [markdown]
# ## Who adds into dQ?
#
# FA2 gives each column block to a worker of its own; the listing says `trace.parallel`. $dK_j$ and $dV_j$ belong to
# worker j alone. But all workers add to the same $dQ_i$.
#
# **Predict.** Four workers run line 15 at the same moment for the same rows. All load $dQ_i$, each adds its part, all
# store. What does $dQ_i$ hold at the end?

# %%
dS = P * (dO @ V.T - (dO * O).sum(axis=1)[:, None])  # all tiles at once
parts = [tau * (dS[:, tiling.cols(j)] @ K[tiling.cols(j)]) for j in range(tiling.T_c)]
loaded = np.zeros((8, 4))  # what all four have read before any of them stores
for part in parts:
    stored = loaded + part  # one after the other, into the same place
print("the four parts, first number:", [round(float(part[0, 0]), 6) for part in parts])
print(f"after the race {stored[0, 0]:.6f}, the sum of the parts {sum(parts)[0, 0]:.6f}, right is {dQ[0, 0]:.6f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **One part.** That of the worker that stores last. The others are lost.
# </details>
#
# This is called a *race*.
#
# **Takeaway.** Load, add, store are three steps, and another worker can come between them. Either the three become one
# step, or each sum gets a single worker.

# %% [markdown]
# ## First way out: atomic adds
#
# A GPU can load, add and store in one step that nothing can interrupt. It is called an *atomic add*. Then no part is
# lost. But the parts may arrive in any order.
#
# **Predict.** float32 has about seven digits. What is $10^8 + 1 - 10^8$, computed from left to right?

# %%
def sums_in_all_orders(parts):
    return [sum(order[1:], start=order[0]) for order in permutations(parts)]


three = sums_in_all_orders([np.float32(1e8), np.float32(1), np.float32(-1e8)])
print("10⁸ + 1 − 10⁸ in all six orders:", [float(x) for x in three])
rounded = sums_in_all_orders([part.round(4).astype(np.float32) for part in parts])
spread = max(np.abs(x - rounded[0]).max() for x in rounded)
print(f"dQ in all 24 orders: {len({x.tobytes() for x in rounded})} different results, at most {spread:.0e} apart")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Zero.** $10^8 + 1$ is rounded to $10^8$.
# </details>
#
# In another order the result is 1. The sums of dQ differ in the same way, in their last bits. All of them are as good
# as float32 allows. But if a training is run twice, the bits of its results differ.
#
# **Takeaway.** Atomic adds lose nothing. Their order is not fixed, so the last bits change from run to run.

# %% [markdown]
# ## Second way out: a pass of its own
#
# $dQ_i$ is a sum over keys, like $o_i$ in the forward pass. So let a second kernel run with rows outside, and keep $dq_i$
# on chip. The first kernel then leaves line 15 out.
#
# **Predict.** The second pass needs dS, and for it S and dP once more. How many products do both passes have together?

# %%
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


# %%
D, second = (dO * O).sum(axis=1), Trace()
dQ_alone = dq_pass(Q, K, V, L, D, dO, tiling, second)
product = 2 * 8 * 8 * 4  # FLOPs of one
without_dQ = one_pass.hbm_elements - one_pass.loads("dQ") - one_pass.stores("dQ")
print(f"dQ, first number: {dQ_alone[0, 0]:.6f}, right is {dQ[0, 0]:.6f}")
print("one pass:  ", one_pass.matmul_flops // product, "products,", one_pass.hbm_elements, "elements requested")
print("two passes:", (one_pass.matmul_flops + second.matmul_flops) // product - 1, "products,",
      without_dQ + second.hbm_elements, "elements requested")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Seven.** S, dP, dV and dK in the first pass; S, dP and dQ in the second.
# </details>
#
# The lower half of the picture of one tile shows both ways. The requests are about as many as before. In return every
# result has one owner, and the same input gives the same bits.
#
# Which way is faster depends on the chip. Chapter 09 has both as kernels.
#
# **Takeaway.** Two passes: two products more, no race, the same bits in every run.

# %% [markdown]
# ## Several query heads, one key head
#
# In *grouped-query attention* a group of query heads shares one head of keys and values (in *multi-query attention* all
# of them do). A model that writes a text keeps the keys and values of all tokens so far, its *KV cache*. With four times
# fewer key heads the cache takes a quarter of the memory.
#
# **Predict.** Query head h reads key head h // 4. There are 8 query heads and 2 key heads. Which query heads add into dK
# of key head 1?

# %%
q, do = rng.standard_normal((2, 1, 8, 8, 4))  # (batch, heads, N, d)
k, v = rng.standard_normal((2, 1, 2, 8, 4))
O_heads, L_heads = heads.forward(q, k, v, B_r=4, B_c=2)
_, dk, _ = heads.backward(q, k, v, O_heads, L_heads, do, B_r=4, B_c=2)
dk_of = []
for h in range(4, 8):
    q_h, k_1, v_1 = q[0, h], k[0, 1], v[0, 1]
    dk_of.append(naive.backward(q_h, k_1, v_1, naive.forward(q_h, k_1, v_1)[1], do[0, h])[1])
print("what heads 4, 5, 6 and 7 add, first number:", [round(float(x[0, 0]), 6) for x in dk_of])
print(f"their sum {sum(dk_of)[0, 0]:.6f}, dK of key head 1 {dk[0, 1, 0, 0]:.6f}")

# %%
show(grouped_heads.draw(**grouped_heads.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Heads 4 to 7.** All that read it.
# </details>
#
# In the picture, lines above lead from a key head to the heads that read it. Arrows below lead back from the
# same heads to dK and dV.
#
# **Takeaway.** If many read a block in the forward pass, many add to its gradient in the backward pass: the heads of a
# group to dK and dV, and the column blocks to dQ.

# %% [markdown]
# ## Recap
#
# - $dS = P \circ (dP - D)$ with $D_i = do_i \cdot o_i$, known before the loops.
# - P is made again as $e^{S - L}$: five products instead of four, and nothing of size N × N is kept.
# - Columns outside: dK and dV stay on chip, dQ travels.
# - FA1 to FA2: D before the loops, L instead of $\ell$ and m, a worker for each column block.
# - Many workers add into dQ: atomic adds (open order), or a second pass (seven products, same bits).

# %% [markdown]
# ## Exercises
#
# **1. Complete.** All rows of V are the same row v. Write D of a row from do and v alone, in place of the `...`. What are
# dP − D and dQ then?
#
# <details><summary>Hint</summary>
#
# What is the output, a mean of equal values? And $D = do \cdot o$.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return do @ v
# ```
# Every key of a row is worth the same, dP = D. So dS = 0, and with it dQ and dK: if all values are equal, it does not
# matter where attention looks. dV is not zero.
# </details>

# %%
def D_of_equal_values(do, v):  # (d,), (d,) -> a number
    return ...


same = np.tile(V[0], (8, 1))  # eight equal rows
yours = D_of_equal_values(dO[3], V[0])
right = float(dO[3] @ (P @ same)[3])
if yours is ...:
    print("not written yet")
elif not close(yours, right):
    print(f"not yet: D of row 3 is do · o = {right:.6f}, yours is {np.round(yours, 6)}")
else:
    dQ_same = naive.backward(Q, K, same, P, dO)[0]
    print("right; the largest entry of dQ is", np.abs(dQ_same).max().round(9))

# %% [markdown]
# **2. Complete.** Let the loss depend on L as well, with a given gradient dL, one number for each row. By exercise 2 of
# chapter 01, dS becomes $P \circ (dP - D + dL)$. `dq_pass` stays as it is. Which D must it be given?
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
# So a gradient of L costs nothing. Whoever merges the outputs of two calls by their L needs it
# (chapter 09).
# </details>

# %%
def D_with_L(D, dL):  # (N,), (N,) -> (N,)
    return ...


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
# **3. Find the bug.** The function below computes D from a single tile, as $\mathrm{rowsum}(p \circ dp)$. Before you run
# it: with which block size is its dQ right?
#
# <details><summary>Answer</summary>
#
# Only with $B_c = 8$, where a tile holds the whole row: D is a sum over all keys. A test with fewer keys than a block
# would pass. So tests of a kernel need at least two blocks in each direction.
# </details>

# %%
def dq_with_local_D(B_c):
    dq = np.zeros((8, 4))
    for j in range(0, 8, B_c):
        p_j, dp_j = P[:, j : j + B_c], dO @ V[j : j + B_c].T
        local_D = (p_j * dp_j).sum(axis=1)
        dq += tau * ((p_j * (dp_j - local_D[:, None])) @ K[j : j + B_c])
    return dq


for B_c in (2, 4, 8):
    print(f"B_c = {B_c}: error of dQ {np.abs(dq_with_local_D(B_c) - dQ).max():.3f}")

# %% [markdown]
# ## Ten questions on part I
#
# Chapters 00 to 05, without looking back. An answer opens when you click it.
#
# <details><summary>1. A head has N tokens and d numbers for each. How many numbers has S, and how many has Q?</summary>
#
# $N^2$ and $N d$. For N = 8,192 and d = 64, S is 128 times as large.
# </details>
# <details><summary>2. Why is the maximum of a row subtracted before the exponential?</summary>
#
# So that no exponential overflows. The factor $e^{-m}$ cancels when the row is divided by its sum.
# </details>
# <details><summary>3. The online softmax meets a larger maximum. What happens to ℓ and o?</summary>
#
# Both are multiplied by $\alpha = e^{m - m_{new}}$, because both are sums of $e^{s - m}$.
# </details>
# <details><summary>4. Two states are merged. Does it matter which comes first?</summary>
#
# No, but for rounding.
# </details>
# <details><summary>5. What does FA1 load and store again for every column block?</summary>
#
# It loads Q, O, $\ell$ and m, and stores O, $\ell$ and m.
# </details>
# <details><summary>6. How do FA1's extra memory and its requests grow with N?</summary>
#
# The extra memory with N. The requests with $N^2$, divided by the block size.
# </details>
# <details><summary>7. What does the swap of the loops save, and what does it make possible?</summary>
#
# A third of the requests. And each row block can be a worker of its own.
# </details>
# <details><summary>8. After tweak 1, which scaling is left inside the loop?</summary>
#
# $\alpha$ times the output block, in every tile. The division by $\ell$ comes once, at the end.
# </details>
# <details><summary>9. What does FA2's backward pass keep from the forward pass, besides Q, K and V?</summary>
#
# O and L. O serves only to compute D.
# </details>
# <details><summary>10. Of 4 × 4 causal tiles, how many are visited, and how many of those are masked?</summary>
#
# 10 are visited. The 4 on the diagonal are masked.
# </details>

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against plain attention and against differences:
# ragged blocks, masks, huge scores, rows without keys, grouped heads.

# %%
for mask in (Mask(), CAUSAL):
    o, lse = fa2.forward(Q, K, V, B_r=4, B_c=2, mask=mask)
    ours, packages, tiled = Trace(), Trace(), Tiling(8, 8, 4, 2, mask)
    mine = fa2_backward(Q, K, V, o, lse, dO, tiled, ours)
    theirs = fa2.backward(Q, K, V, o, lse, dO, B_r=4, B_c=2, mask=mask, trace=packages)
    verdict(f"fa2_backward = fa2.backward, causal = {mask.causal}", all(map(close, mine, theirs)))
    verdict("and it moves the same elements in the same order", ours.events == packages.events)
    verdict("and it computes the same operations", ours.flops == packages.flops)
    two = dq_pass(Q, K, V, lse, (dO * o).sum(axis=1), dO, tiled)
    verdict(f"the pass for dQ gives the same dQ, causal = {mask.causal}", close(two, theirs[0]))
verdict("fa2_backward = chapter 01's gradients", all(map(close, result, (dQ, dK, dV))))
verdict("FA1 and FA2 have the same gradients", all(map(close, gradients_1, gradients_2)))
verdict("the sum over heads 4 to 7 = dK of key head 1", close(sum(dk_of), dk[0, 1]))

# %%
def all_stages(name, q, k, v, do, causal=False):
    results = []
    for stage in heads.STAGES:
        o, lse = heads.forward(q, k, v, stage=stage, causal=causal, B_r=4, B_c=6)
        results.append(heads.backward(q, k, v, o, lse, do, stage=stage, causal=causal, B_r=4, B_c=6))
    pairs = [pair for other in results[1:] for pair in zip(other, results[0], strict=True)]
    same = [close(got, want, 1e-10) for got, want in pairs]
    verdict(f"standard, FA1 and FA2 agree: {name}", all(same))


q, do = rng.standard_normal((2, 2, 4, 13, 5))
k, v = rng.standard_normal((2, 2, 2, 29, 5))
all_stages("ragged, grouped heads", q, k, v, do)
all_stages("the same, causal", q, k, v, do, causal=True)
all_stages("huge scores", 100 * q, k, v, do)
all_stages("more queries than keys: rows without keys", q, k[:, :, :7], v[:, :, :7], do, causal=True)

# %%
def loss(Q, K, V):  # its gradient with respect to O is dO
    return float((dO * (safe_softmax(tau * (Q @ K.T)) @ V)).sum())


got = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=2)
verdict("dQ = differences of the loss", close(got[0], central_differences(lambda X: loss(X, K, V), Q), 1e-7))
verdict("dK = differences of the loss", close(got[1], central_differences(lambda X: loss(Q, X, V), K), 1e-7))
verdict("dV = differences of the loss", close(got[2], central_differences(lambda X: loss(Q, K, X), V), 1e-7))

# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)
