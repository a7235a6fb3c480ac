# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)

# %% [markdown]
# # 05 · The backward pass
#
# **How do gradients come back without the score matrix?**
#
# Notebook 01 derived the gradients of attention, and notebook 03 computed them tile by tile, as FA1 does. What is left to
# change? Less than in the forward, and at another place. Three results are summed while the tiles go by, two of them along
# the queries and one along the keys. That last one, dQ, has no good place to stay, and as soon as many workers share a
# head, they all want to add to it.
#
# After this notebook you can
#
# - say in words what dS = P ∘ (dP − D) does to a score, and check it on a row of four keys,
# - derive the backward passes of standard attention, FA1 and FA2 from the same lines, and say what each keeps,
# - explain why many workers add into one dQ, and name the two ways out with their price.
#
# *Time: 35 minutes. Hardware: any laptop, NumPy alone. Before this: [04 · FlashAttention-2,
# forward](04_fa2_forward.ipynb).*

# %%
from inspect import getsource
from itertools import permutations

import numpy as np

from fa2_lab.errata import ERRATA, judge
from fa2_lab.errata.cases import central_differences
from fa2_lab.machine import grid, io
from fa2_lab.paper import where
from fa2_lab.plots import backward_graph, grouped_heads
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, heads, naive
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import finite
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Mask, Tiling
from fa2_lab.trace import UNWATCHED, Trace

# %% [markdown]
# ## Which way should a score move?
#
# dS = P ∘ (dP − D), says notebook 01, by algebra. What does it mean? Take notebook 02's row: probabilities 1/16, 3/16, 4/16,
# 8/16, values 8, 0, 4, 2, output 2.5. Let the loss be the output itself, so that dO, the gradient of the loss with respect
# to O, is 1. (Some notes have it the other way round: it is the loss that is differentiated, not O.)
#
# **Predict.** Raise the score of one key a little. All probabilities change, since they must still sum to 1. For which of
# the four keys does the output go up?

# %%
s, v = np.log([1.0, 3.0, 4.0, 8.0]), np.array([8.0, 0.0, 4.0, 2.0])
measured = central_differences(lambda scores: float(safe_softmax(scores) @ v), s)
print("d output / d score, in sixteenths:", np.round(16 * measured, 4))

# %%
p, dp = safe_softmax(s), 1.0 * v  # dP = dO Vᵀ: what a probability is worth to the loss
D = p @ dp  # the mean of these worths
ds = p * (dp - D)
print("p (dp - D), in sixteenths:        ", np.round(16 * ds, 4))
print("D =", round(float(D), 12), "  sum of ds is 0:", abs(float(ds.sum())) < 1e-12)

# %% [markdown]
# <details><summary>Reading the formula</summary>
#
# A key gains probability at the cost of all the others. That pays if its value is above the mean, 2.5: the keys with 8
# and 4. It costs if it is below, even if it is positive: the key with 2. The mean is D, and the gain is
# p · (dp − D). The four numbers sum to zero, because raising all scores together changes nothing.
#
# The mean worth of the keys is also do · o, here 1 · 2.5: the output remembers it. So D needs no row of P, and can be had
# before the first tile.
# </details>
#
# **Takeaway.** dS = P ∘ (dP − D): a score is pulled up as far as its key is worth more than the row's average, D.

# %% [markdown]
# ## One derivation, three algorithms
#
# These are notebook 01's lines for the whole matrix. Standard attention, FA1 and FA2 compute exactly this; they differ in
# what the forward pass has kept for it.
#
# **Predict.** Two of the lines need something that has to be kept, or made again. Which two? Name for each what standard
# attention, FA1 and FA2 have at hand.

# %%
def dense_backward(Q, K, V, dO):
    P = safe_softmax(tau * (Q @ K.T))  # (N, N)
    D = (dO * (P @ V)).sum(axis=1)  # (N,)
    dV = P.T @ dO
    dP = dO @ V.T  # (N, N)
    dS = P * (dP - D[:, None])  # (N, N)
    return tau * (dS @ K), tau * (dS.T @ Q), dV


rng = np.random.default_rng(0)
Q, K, V, dO = rng.standard_normal((4, 8, 4))
tau = 1 / np.sqrt(4)
dQ, dK, dV = dense_backward(Q, K, V, dO)

# %%
S, dP = tau * (Q @ K.T), dO @ V.T
P = safe_softmax(S)
O, L = P @ V, naive.logsumexp(S)
_, l, m = fa1.forward(Q, K, V, B_r=4, B_c=2)
print("P from m and l (FA1):", close(np.exp(S - m[:, None]) / l[:, None], P))
print("P from L (FA2):", close(np.exp(S - L[:, None]), P))
print("D, rowsum(P ∘ dP) or rowsum(dO ∘ O):", close((P * dP).sum(axis=1), (dO * O).sum(axis=1)))
for name in ("fa2-D-shape", "fa2-scale", "fa1-L"):
    print(f"{name:12} told apart: {judge(ERRATA[name]).told_apart}   {ERRATA[name].instead}")

# %% [markdown]
# <details><summary>P and D, three times</summary>
#
# | | standard | FA1 | FA2 |
# |---|---|---|---|
# | kept from the forward | P | O, l, m | O, L |
# | P | read | exp(S − m) / l | exp(S − L) |
# | D | rowsum(P ∘ dP), from whole rows | rowsum(do ∘ o), in every tile | rowsum(dO ∘ O), once |
# | matrix products | 4 | 5 | 5 |
#
# Where the papers slip: FA2's Algorithm 2 gives D one number for each of d columns, not for each of N rows; it leaves τ
# out, in S and in dQ and dK; and FA1 writes L for the sum whose logarithm FA2 calls L.
# </details>
#
# **Takeaway.** All three algorithms are the same lines; they differ in where P and D come from.

# %% [markdown]
# ## Keep P, or make it again?
#
# Made again, P costs the product Q Kᵀ once more: five products instead of four, as notebook 03 counted. Here they are for
# one tile, in the order in which they depend on each other. White is what is made again. (The lower half is about dQ; we
# come back to it.)

# %%
show(backward_graph.draw(**backward_graph.data()))

# %% [markdown]
# **Predict.** What does the fifth product buy? For N = 8,192, compare what has to be kept for each head. Then guess: how many
# times the elements of FA2's backward does standard attention's move?

# %%
N = 8192
print(f"to keep for N = {N:,}: P {N * N:,} numbers, L {N:,} numbers")
for d in (64, 128):
    tiling = Tiling(N, N, 128, 128)
    ratio = float(io.ratio(io.standard_backward(tiling, d), io.fa2_backward(tiling, d)))
    print(f"d = {d:3}: standard attention's backward moves {ratio:.1f} times the elements of FA2's")

# %% [markdown]
# <details><summary>Is more work really faster?</summary>
#
# Five products instead of four: a quarter more. They run on the tensor cores, where an operation costs least, and replace
# reading P and writing and reading dP and dS, 7 N² elements in all. The N² numbers in memory, for every layer and head,
# are gone altogether. The backward has 5 products and the forward 2: that is where the 2.5 comes from when people count a
# backward pass as 2.5 forward passes.
# </details>
#
# **Takeaway.** One product more, and L instead of P: operations are cheaper than memory.

# %% [markdown]
# ## Three sums, and which loop outside?
#
# Each tile (i, j) contributes to three results: to dV_j and dK_j, which are summed over the row blocks i, and to dQ_i,
# which is summed over the column blocks j.
#
# **Predict.** With columns outside, which sums can stay on chip, and which must travel for each tile? And with rows outside?
# Count the blocks of B × d that one tile moves between HBM and the chip, in both directions.
#
# <details><summary>Blocks for each tile</summary>
#
# | outside | stays on chip | streams in | sums that travel, in and out | together |
# |---|---|---|---|---|
# | columns | k, v, dk, dv | q, do: 2 | dq: 2 | 4 |
# | rows | q, do, dq | k, v: 2 | dk, dv: 4 | 6 |
# </details>
#
# FA1 has columns outside, and FA2 keeps that: in the forward the loops were swapped, in the backward they are not. (In the
# code, `tiling.hide` puts −∞ where a mask hides, like `hide` in notebook 04, and `finite` makes 0 of the −∞ that L holds for a
# row without keys.)

# %%
def fa2_backward(Q, K, V, O, L, dO, tiling, trace):
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
            p_ij = np.exp(s_ij - finite(L_i)[:, None])  # FA2.A2.L11  (B_r, B_c)
            dv_j = dv_j + p_ij.T @ do_i  # FA2.A2.L12  (B_c, d)
            dp_ij = do_i @ v_j.T  # FA2.A2.L13  (B_r, B_c)
            ds_ij = p_ij * (dp_ij - D_i[:, None])  # FA2.A2.L14  (B_r, B_c)
            dQ[rows] = dQ[rows] + tau * (ds_ij @ k_j)  # FA2.A2.L15  (B_r, d)
            dk_j = dk_j + tau * (ds_ij.T @ q_i)  # FA2.A2.L16  (B_c, d)
        dK[cols], dV[cols] = dk_j, dv_j  # FA2.A2.L18
    return np.asarray(dQ), np.asarray(dK), np.asarray(dV)


# %%
trace, tiling = Trace(), Tiling(8, 8, 4, 2)
result = fa2_backward(Q, K, V, O, L, dO, tiling, trace)
print("dQ, dK, dV:", [close(got, want) for got, want in zip(result, (dQ, dK, dV), strict=True)])
for tensor in ("K", "V", "dK", "dV", "Q", "dO", "dQ"):
    print(f"{tensor:2}: loaded {trace.loads(tensor):3}   stored {trace.stores(tensor):3}")

# %% [markdown]
# <details><summary>The counts by hand</summary>
#
# K, V, dK and dV have 32 elements, each moved once. Q comes in for each of the 4 column blocks: 128. dO too, and
# once more for D: 160. dQ comes in 4 times, 128, and goes out 4 times and once as zeros: 160.
# </details>
#
# **Takeaway.** One of the three sums must travel. With columns outside it is dQ alone.

# %% [markdown]
# ## What did FA2 change in FA1's backward?
#
# The loops stand as they were. Three lines changed: here they are, FA1's first, as they stand in the package.

# %%
def lines_with(function, *tags):
    for line in getsource(function).splitlines():
        if any(f"# {tag} " in line + " " for tag in tags):
            print(line.strip())


lines_with(fa1.backward, "FA1.A4.L10", "FA1.A4.L13", "FA1.A4.L19")
print()
lines_with(fa2.backward, "FA2.A2.L4", "FA2.A2.L9", "FA2.A2.L11")

# %% [markdown]
# **Predict.** D is computed once, before the loops, instead of in every tile. Which loads go away with that? Which
# operations go away with L?

# %%
big = rng.standard_normal((4, 512, 64))
whole = dict(B_r=64, B_c=64)
O1, l1, m1 = fa1.forward(*big[:3], **whole)
O2, L2 = fa2.forward(*big[:3], **whole)
old, new = Trace(), Trace()
gradients1 = fa1.backward(*big[:3], O1, l1, m1, big[3], **whole, trace=old)
gradients2 = fa2.backward(*big[:3], O2, L2, big[3], **whole, trace=new)
print("same gradients:", all(map(close, gradients1, gradients2)))
print(f"{'':22}{'FA1':>12}{'FA2':>12}")
for tensor in ("O", "l", "m", "L", "D"):
    print(f"loads of {tensor:13}{old.loads(tensor):12,}{new.loads(tensor):12,}")
for kind in ("matmul", "exp", "multiply", "divide"):
    print(f"{kind:22}{old.flops[kind]:12,}{new.flops[kind]:12,}")
print(f"{'all HBM elements':22}{old.hbm_elements:12,}{new.hbm_elements:12,}")

# %% [markdown]
# <details><summary>The three lines</summary>
#
# D once instead of in every tile: O is loaded once instead of T_c = 8 times, and the products do ∘ o are formed once. P in
# one step, exp(S − L), instead of exp(S − m) / l: no division, one multiplication less for each score. And L and D are two
# numbers for each row, as `l` and `m` were.
#
# The paper's line 9 still loads O_i, and dQ_i, which line 15 loads again. With NaN in their place nothing changes, so
# they are not needed: 2d + 2 elements for each row instead of 4d + 2.
# </details>

# %%
found = judge(ERRATA["fa2-loads"])
print("line 9 as printed refused, without O and dQ accepted:", found.told_apart)

# %% [markdown]
# **Takeaway.** FA2's backward is FA1's with D moved out of the loop and two statistics folded into one.

# %% [markdown]
# ## Who adds into dQ?
#
# FA2's gain in the backward is elsewhere: it gives each column block to a worker of its own, as it gives row blocks in the
# forward. dK_j and dV_j belong to worker j alone. dQ_i does not.
#
# **Predict.** Four workers run line 15 at the same moment for the same row block: all load dQ_i, all add their part, all
# store. What does dQ_i hold at the end?

# %%
dS = P * (dP - (dO * O).sum(axis=1)[:, None])  # all tiles at once
parts = [tau * (dS[:, tiling.cols(j)] @ K[tiling.cols(j)]) for j in range(tiling.T_c)]
loaded = np.zeros((8, 4))  # what all four have read before any of them stores
stored = [loaded + part for part in parts]  # one after the other, into the same place
print("dQ after the race is right:", close(stored[-1], dQ))
print("it is the last worker's part alone:", close(stored[-1], parts[-1]))
print("the sum of all parts is right:", close(sum(parts), dQ))
print("workers that add into each row block:", grid.dq_writers(tiling))
print("the same, causal:                    ", grid.dq_writers(Tiling(8, 8, 4, 2, CAUSAL)))

# %% tags=["nbval-ignore-output"]
print(where("FA2.A2.L15"))

# %% [markdown]
# **Takeaway.** Load, add, store is three steps, and another worker may come between them. Either the three become one
# (an atomic add), or nobody else may come.

# %% [markdown]
# ## First way out: atomic adds
#
# With an atomic add no part is lost, but nobody says in which order they arrive.
#
# **Predict.** In float32, what is 10⁸ + 1 − 10⁸? Does it depend on the order? Does the sum of the four parts of dQ, in
# float32, depend on it?

# %%
def sums_in_all_orders(parts):
    results = []
    for order in permutations(parts):
        total = np.zeros_like(parts[0])
        for part in order:
            total = total + part
        results.append(total)
    return results


three = sums_in_all_orders([np.float32(1e8), np.float32(1), np.float32(-1e8)])
print("10⁸ + 1 − 10⁸ in all orders:", sorted({float(x) for x in three}))
rounded = sums_in_all_orders([part.astype(np.float32) for part in parts])
print("dQ is the same to the last bit in all 24 orders:", len({x.tobytes() for x in rounded}) == 1)
print("dQ is the same to six digits:", all(close(x, rounded[0], tolerance=1e-6) for x in rounded))

# %% [markdown]
# <details><summary>Does it matter?</summary>
#
# Not for the quality of the gradient: all of these sums are as right as float32 allows. It does to whoever wants to run a
# training twice and get the same bits, say to find out what a change in the code has done.
# </details>
#
# **Takeaway.** Atomic adds give the right sum in an unknown order, so the last bits differ from run to run.

# %% [markdown]
# ## Second way out: a pass of its own
#
# dQ_i is a sum over keys, like o_i in the forward. So let a second kernel run with rows outside, as the forward does, and
# keep dq_i on chip; the first kernel then leaves line 15 out.
#
# **Predict.** The second pass needs dS, hence S, P and dP once more. How many products do both passes have together? What
# happens to the traffic of dQ?

# %%
def dq_pass(Q, K, V, L, D, dO, tiling, trace):
    Q, K, V, dO, L, D, dQ = trace.hbm(Q=Q, K=K, V=V, dO=dO, L=L, D=D, dQ=np.empty(Q.shape))
    for i in trace.parallel("i", range(tiling.T_r)):
        rows = tiling.rows(i)
        q_i, do_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]
        dq_i = np.zeros(q_i.shape)  # (B_r, d)
        for j in trace.serial("j", tiling.visited_cols(i)):
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]
            s_ij = tiling.hide(tau * (q_i @ k_j.T), i, j)  # (B_r, B_c)
            p_ij = np.exp(s_ij - finite(L_i)[:, None])
            ds_ij = p_ij * (do_i @ v_j.T - D_i[:, None])
            dq_i = dq_i + tau * (ds_ij @ k_j)
        dQ[rows] = dq_i
    return np.asarray(dQ)


second = Trace()
D = (dO * O).sum(axis=1)
print("dQ:", close(dq_pass(Q, K, V, L, D, dO, tiling, second), dQ))
one_product = 2 * 8 * 8 * 4
in_two = trace.matmul_flops - one_product + second.matmul_flops
print("products:", trace.matmul_flops // one_product, "in one pass; in two:", in_two // one_product)
of_dQ = trace.loads("dQ") + trace.stores("dQ")
in_two = trace.hbm_elements - of_dQ + second.hbm_elements
print("HBM elements:", trace.hbm_elements, "in one pass; in two:", in_two)

# %% [markdown]
# <details><summary>Seven instead of five</summary>
#
# The pass with columns outside keeps S, dV, dP and dK: four. The pass with rows outside has S, dP and dQ: three. The
# traffic is about the same: q and do stream through the first pass, k and v through the second, 4 blocks for a tile as
# before. In exchange dQ is stored once, every result has one owner, and the same input gives the same bits. The lower half of the
# graph above shows the two ways side by side. Which is faster depends on the chip; notebook 09 has both as kernels.
# </details>
#
# **Takeaway.** Two passes: two products more, no meeting on dQ, the same bits in every run.

# %% [markdown]
# ## Several query heads, one key head
#
# Grouped-query attention lets a group of query heads share one head of keys and values; with a single key head it is
# called multi-query attention. Nothing is copied: query head h reads key head h // group.
#
# **Predict.** 8 query heads, 2 key heads. Which query heads add into dK of key head 1? And what happens if each of them
# stores instead of adding?

# %%
q, do = rng.standard_normal((2, 1, 8, 8, 4))  # (batch, heads, N, d)
k, v = rng.standard_normal((2, 1, 2, 8, 4))
O_heads, L_heads = heads.forward(q, k, v, B_r=4, B_c=2)
dq, dk, dv = heads.backward(q, k, v, O_heads, L_heads, do, B_r=4, B_c=2)
alone = [dense_backward(q[0, h], k[0, h // 4], v[0, h // 4], do[0, h]) for h in range(8)]
print("dQ of every query head:", all(close(dq[0, h], alone[h][0]) for h in range(8)))
dk_of = [of_head[1] for of_head in alone]
print("dK of key head 1 is the sum over query heads 4 to 7:", close(dk[0, 1], sum(dk_of[4:])))
print("dK of key head 1 is that of query head 7 alone:", close(dk[0, 1], dk_of[7]))

# %%
show(grouped_heads.draw(**grouped_heads.data()))

# %% [markdown]
# <details><summary>The same rule as everywhere</summary>
#
# Who is read by many is written by many: what the forward shares, the backward sums. A worker that takes all query heads
# of its group one after the other can keep the sum on chip. What grouped heads are for: a model that writes a text keeps the
# keys and values of all tokens so far, and with four times fewer key heads that cache is four times smaller.
# </details>
#
# **Takeaway.** Sharing in the forward becomes summing in the backward: for the heads of a group just as for the column
# blocks of a row.

# %% [markdown]
# ## Recap
#
# - dS = P ∘ (dP − D) with D = rowsum(dO ∘ O), known before the loops.
# - Five products instead of four, because P is made again from Q, K and L; then nothing of size N × N is ever kept.
# - Columns outside: dK and dV stay on chip, dQ travels.
# - FA1 to FA2: D out of the loop, L instead of `l` and `m`, a worker for each column block.
# - dQ is shared: atomic adds (order open, last bits too) or a second pass (seven products, same bits).
# - With τ in S, dQ and dK carry τ.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** All rows of V are equal. What are dS, dQ and dK? What is dV?
#
# <details><summary>Hint</summary>
# What is the worth dP of each key of a row, and what is their mean?
# </details>
# <details><summary>Answer</summary>
# All keys of a row are worth the same, so each is exactly average: dP = D, dS = 0, and with it dQ = dK = 0. Where
# attention looks makes no difference if all values are the same. dV = Pᵀ dO is not zero.
# </details>
#
# **2. Complete.** Let the loss depend on L as well (merging parts on several GPUs does that), with a given
# gradient dL_i for each row. By exercise 2 of notebook 01, dS becomes P ∘ (dP − D + dL). Get the new dQ out of `dq_pass` as it
# is, by handing it one other argument. The cell holds a solution: cover the line with `D_with_L` and write your own.
#
# <details><summary>Hint</summary>
# Which argument enters dS for a whole row at once?
# </details>

# %%
dL = rng.standard_normal(8)


def loss_with_L(Q):
    S = tau * (Q @ K.T)
    return float((dO * (safe_softmax(S) @ V)).sum() + dL @ naive.logsumexp(S))


D_with_L = (dO * O).sum(axis=1) - dL
dQ_with_L = dq_pass(Q, K, V, L, D_with_L, dO, tiling, UNWATCHED)
print("dQ:", close(dQ_with_L, central_differences(loss_with_L, Q), tolerance=1e-7))

# %% [markdown]
# <details><summary>Answer</summary>
#
# dP − D + dL = dP − (D − dL): the function stays as it is and is handed D − dL.
# </details>
#
# **3. Break and fix.** The function below computes D from the tile, as rowsum(p ∘ dp). Before you run it: with
# which block size is the result right?
#
# <details><summary>Hint</summary>
# D is a sum over all keys of a row.
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
    print(f"B_c = {B_c}: dQ is right:", close(dq_with_local_D(B_c), dQ))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only where one tile holds the whole row. A test with fewer keys than a block would pass, which is why tests of a kernel
# need at least two blocks in each direction.
# </details>

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and all three stages of the package against the dense result and
# against differences of the loss: ragged blocks, masks, huge scores, rows without keys, grouped heads.

# %%
for mask in (Mask(), CAUSAL):
    o, lse = fa2.forward(Q, K, V, B_r=4, B_c=2, mask=mask)
    ours, packages, tiled = Trace(), Trace(), Tiling(8, 8, 4, 2, mask)
    mine = fa2_backward(Q, K, V, o, lse, dO, tiled, ours)
    theirs = fa2.backward(Q, K, V, o, lse, dO, B_r=4, B_c=2, mask=mask, trace=packages)
    verdict(f"fa2_backward = fa2.backward, causal = {mask.causal}", all(map(close, mine, theirs)))
    verdict("and it moves the same elements in the same order", ours.events == packages.events)
    verdict("and it computes the same operations", ours.flops == packages.flops)
    two = dq_pass(Q, K, V, lse, (dO * o).sum(axis=1), dO, tiled, UNWATCHED)
    verdict(f"the pass for dQ gives the same dQ, causal = {mask.causal}", close(two, theirs[0]))
same = map(close, (dQ, dK, dV), naive.backward(Q, K, V, P, dO))
verdict("dense_backward = naive.backward", all(same))

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
o, lse = heads.forward(q, k, v)
dq, dk, dv = heads.backward(q, k, v, o, lse, do)
for g in range(2):  # query heads 2g and 2g + 1 share key head g
    qkv = [(q[1, h], k[1, g], v[1, g]) for h in (2 * g, 2 * g + 1)]
    alone = [naive.backward(*x, naive.forward(*x)[1], do[1, 2 * g + n]) for n, x in enumerate(qkv)]
    verdict(f"dK and dV of key head {g} = the sums over its query heads",
            close(dk[1, g], alone[0][1] + alone[1][1]) and close(dv[1, g], alone[0][2] + alone[1][2]))


def loss(Q, K, V):  # its gradient with respect to O is dO
    return float((dO * (safe_softmax(tau * (Q @ K.T)) @ V)).sum())


dq, dk, dv = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=2)
verdict("dQ = differences of the loss", close(dq, central_differences(lambda X: loss(X, K, V), Q), 1e-7))
verdict("dK = differences of the loss", close(dk, central_differences(lambda X: loss(Q, X, V), K), 1e-7))
verdict("dV = differences of the loss", close(dv, central_differences(lambda X: loss(Q, K, X), V), 1e-7))

# %% [markdown] tags=["navigation"]
# [← FlashAttention-2, forward](04_fa2_forward.ipynb) · [The map](00_start.ipynb) · [Parallelism →](06_parallelism.ipynb)
