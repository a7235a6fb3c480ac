# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)

# %% [markdown]
# # 03 · FlashAttention
#
# **What if the score matrix never leaves the chip?**
#
# Chapter 01 showed that standard attention is slow because S and P travel: each has $N^2$ numbers, and each is written
# to HBM and read again. Chapter 02 showed that softmax can take its keys a block at a time. Put the two together. Compute
# a small tile of S on the chip, use it at once, and throw it away. This is FlashAttention, in its first version of 2022.
# We call it FA1.
#
# After this notebook you can
#
# - write FA1's forward pass with two loops and one small step,
# - count every element that it loads and stores, and say how the size of the chip's memory decides the count,
# - explain how the backward pass gets P back from two numbers per row.
#
# *Time: 55 minutes with the questions and exercises, and 10 more for dropout, which can wait. Hardware: any
# laptop, NumPy alone. Before this: [02 · Online softmax](02_online_softmax.ipynb).*

# %%
from inspect import getsource

import numpy as np

from fa2_lab.machine import chips, io
from fa2_lab.plots import dropout_orders, hbm_traffic, motion, visiting_order
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, naive
from fa2_lab.reference.dropout import Dropout, sequential_mask
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## Can one tile be finished by itself?
#
# Cut the queries into row blocks of $B_r$ queries, and the keys into column blocks of $B_c$ keys. Where a row block
# meets a column block lies one tile of S, with $B_r \times B_c$ scores.
#
# In FA1, O is the right answer for the keys seen so far, after every tile. So its $o$ is always divided by $\ell$. Take
# the row of chapter 02 after its first two keys, and one more tile with two keys:
#
# | | maximum | sum of exponentials | weighted sum of values |
# | --- | --- | --- | --- |
# | the row so far | $m = \log 3$ | $\ell = 4/3$ | $o = 2$, already divided by $\ell$ |
# | the tile, scores $\log 4$ and $\log 8$ | $\log 8$ | $3/2$ | $4$, not divided |
#
# **Predict.** The old numbers must shrink by $\alpha = e^{\log 3 - \log 8} = 3/8$. What is the new $\ell$?

# %%
def fa1_step(o, l, m, s, v):  # (B_r, d), (B_r,), (B_r,), (B_r, B_c), (B_c, d)
    m_tile = s.max(axis=1)  # FA1.A2.L12  (B_r,): of this tile alone
    p = np.exp(s - m_tile[:, None])  # FA1.A2.L12  (B_r, B_c)
    l_tile = p.sum(axis=1)  # FA1.A2.L12  (B_r,)
    m_new = np.maximum(m, m_tile)  # FA1.A2.L13  (B_r,)
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)  # FA1.A2.L13  (B_r,)
    l_new = alpha * l + beta * l_tile  # FA1.A2.L13  (B_r,)
    o_new = (alpha * l)[:, None] * o + beta[:, None] * (p @ v)  # FA1.A2.L15  (B_r, d)
    return o_new / l_new[:, None], l_new, m_new


s, v = np.log([[4.0, 8.0]]), np.array([[4.0], [2.0]])
o, l, m = fa1_step(np.array([[2.0]]), np.array([4 / 3]), np.log([3.0]), s, v)
print("l =", round(l.item(), 9), " o =", round(o.item(), 9), " m = log", round(np.exp(m).item(), 9))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **2.** $\ell = \frac{3}{8} \cdot \frac{4}{3} + 1 \cdot \frac{3}{2} = 2$. For $o$, first undo the old division by multiplying
# with the old $\ell$: $\frac{3}{8} \cdot \frac{4}{3} \cdot 2 = 1$. Add the new part, 4, and divide by the new $\ell$:
# $o = 5/2$. That is the answer of chapter 02.
# </details>
#
# Compare with `update` of chapter 02. There $o$ was a *raw sum*, not yet divided. Here it is divided at the end of
# every step, so the next step must multiply it by the old $\ell$ before it can add anything.
#
# **Takeaway.** FA1's step takes a right answer for some keys and one more tile, and returns a right answer for more keys.

# %% [markdown]
# ## Which loop goes outside?
#
# There are two loops: one over column blocks j, one over row blocks i. FA1 puts j outside. It loads one block of keys
# and values, then all row blocks, one after the other. Then it loads the next keys, and all row blocks again.
#
# **Predict.** When row block 0 is loaded for the second time, it needs its $o$, $\ell$ and $m$ from the first time.
# Where have they been in between?

# %% tags=["nbval-ignore-output"]
def fa1_forward(Q, K, V, O, l, m, B_r, B_c, tau):
    O[:], l[:], m[:] = 0, 0, -np.inf  # FA1.A2.L3
    for j in range(0, len(K), B_c):  # FA1.A2.L6
        cols = slice(j, j + B_c)
        k_j, v_j = K[cols], V[cols]  # FA1.A2.L7  (B_c, d): loaded
        for i in range(0, len(Q), B_r):  # FA1.A2.L8
            rows = slice(i, i + B_r)
            q_i, o_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]  # FA1.A2.L9: loaded
            s_ij = tau * (q_i @ k_j.T)  # FA1.A2.L10  (B_r, B_c)
            O[rows], l[rows], m[rows] = fa1_step(o_i, l_i, m_i, s_ij, v_j)  # FA1.A2.L15 FA1.A2.L16: stored


def empty_state(Q):  # O, l and m: places in HBM, not filled yet
    return np.empty(Q.shape), np.empty(len(Q)), np.empty(len(Q))


rng = np.random.default_rng(0)
Q, K, V, dO = rng.standard_normal((4, 8, 4))
tau = 0.5
for n in (2, 4, 6, 8):  # the outer loop stopped after n keys
    O, l, m = empty_state(Q)
    fa1_forward(Q, K[:n], V[:n], O, l, m, B_r=4, B_c=2, tau=tau)
    answer = naive.safe_softmax(tau * Q @ K[:n].T) @ V[:n]
    print(f"after {n} keys: O against the attention over these keys, error {np.abs(O - answer).max():.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **In HBM.** O, l and m have a row for each query, and the chip has room for one block of rows. So after each tile the
# block's $o$, $\ell$ and $m$ are stored, and before the next tile of the same rows they are loaded again.
# </details>
#
# The printed errors are rounding: O is a right answer after every column block.
#
# **Takeaway.** No entry of S or P reaches HBM. But every row's unfinished answer travels there, once for each column
# block.

# %% [markdown]
# ## What does it load and store?
#
# The meter of chapter 01 watches tensors that live in HBM: every slice that is read counts as a load, and every slice
# that is written counts as a store. The function itself does not change.
#
# Our example has N = 8 queries and keys, d = 4, $B_r$ = 4 and $B_c$ = 2. So there are 4 column blocks and 2 row blocks.
#
# **Predict.** How many elements of Q are loaded in all?

# %%
meter = Trace()
O, l, m = empty_state(Q)
watched = meter.hbm(Q=Q, K=K, V=V, O=O, l=l, m=m)
fa1_forward(*watched, B_r=4, B_c=2, tau=tau)
for tensor in ("Q", "K", "V", "O", "l", "m"):
    print(f"{tensor}: {meter.loads(tensor):3} loaded, {meter.stores(tensor):3} stored")
print("together:", meter.hbm_elements)

# %% tags=["nbval-ignore-output"]
watch = Trace()
fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau, trace=watch)
show(visiting_order.draw(2, 4, {"FA1": watch.events}))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **128.** Q has 8 · 4 = 32 elements, and all of them are loaded for each of the 4 column blocks.
# </details>
#
# In the picture, the tiles on the left are numbered in the order of their visits: down the first column, then down the
# next. On the right time runs, with a lane for each tensor. K and V appear once for each column block. Q, O, l and m
# appear at every tile.
#
# The same in motion, between standard attention and FA2, the subject of the next chapter. The clock counts the bytes that
# the chip requests. In the middle, look at K and V: they stay in shared memory while the row blocks come and go. S never
# leaves the registers.

# %% tags=["nbval-ignore-output"]
run = motion.data()
show(motion.draw(**run), motion.moving(**run))

# %% [markdown]
# **Takeaway.** Each block of K and V is loaded once. Q is loaded once for each column block. O, l and m are loaded and
# stored once for each column block.

# %% [markdown]
# ## Can we count without running?
#
# Call the number of column blocks $T_c = \lceil N / B_c \rceil$ (the brackets mean: rounded up), and that of row blocks
# $T_r$. Then FA1's forward moves
#
# - $Nd + 2N$ elements to set O, l and m at the start,
# - $2Nd$ elements to load K and V once,
# - $3Nd + 4N$ elements for each column block: Q, O, l and m in, O, l and m out.
#
# **Predict.** The last item is multiplied by $T_c$, and $T_c = N / B_c$. If N doubles, by what factor does the total
# grow?

# %%
def fa1_elements(N_q, N_k, d, B_c):
    T_c = -(-N_k // B_c)  # rounded up
    return N_q * d + 2 * N_q + 2 * N_k * d + T_c * (3 * N_q * d + 4 * N_q)


print("the example above:", fa1_elements(8, 8, 4, 2), "derived,", meter.hbm_elements, "metered")
for N in (1024, 2048, 4096, 8192):
    grown = fa1_elements(N, N, 64, 64) / fa1_elements(N // 2, N // 2, 64, 64)
    print(f"N = {N:5}: {fa1_elements(N, N, 64, 64):13,} elements, {grown:.2f} times those of N = {N // 2}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Nearly four.** Twice the rows, and twice the column blocks. What is moved only once matters less and less as N
# grows.
# </details>
#
# So FA1's traffic still grows with $N^2$. What grows with N alone is the *extra memory*: l and m, and nothing of the
# size of S.
#
# **Takeaway.** FA1 needs extra memory in proportion to N. Its traffic still grows with $N^2$, divided by the block size.

# %% [markdown]
# ## How large may a block be?
#
# Fewer column blocks mean less traffic, so $B_c$ should be as large as fits. Let M be the number of elements that the
# chip can hold. The paper's rule is $B_c = \lceil M / 4d \rceil$: the four blocks q, k, v and o together fill M.
#
# **Predict.** Put $T_c = N / B_c = 4Nd / M$ into the leading term $3Nd \cdot T_c$. What comes out?

# %%
d = 64
print("traffic divided by N²d²/M:")
for M in (2**13, 2**15, 2**17):
    B_c = fa1.block_sizes(M, d)[1]
    row = [fa1_elements(N, N, d, B_c) / (N * N * d * d / M) for N in (1024, 8192, 65536)]
    print(f"M = {M:7,}, B_c = {B_c:3}:" + "".join(f"  {x:5.2f}" for x in row) + "   for N = 1,024, 8,192, 65,536")
B_r, B_c = fa1.block_sizes(24_576, 128)
q, k, v = rng.standard_normal((3, 2 * B_c, 128))
meter = Trace()
fa1.forward(q, k, v, B_r=B_r, B_c=B_c, trace=meter)
print(f"on the chip at once, for M = 24,576 and d = 128: {meter.peak_on_chip:,} elements")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **$12\,N^2 d^2 / M$.** $3Nd \cdot 4Nd / M = 12\,N^2 d^2 / M$. The 4N for l and m add a little: the numbers above tend
# to $12\,(1 + \frac{4}{3d}) = 12.25$. The paper states this *IO complexity* as $\Theta(N^2 d^2 / M)$: it grows like
# this, up to a constant factor.
#
# The last line shows what the rule leaves out. Besides four blocks of 48 × 128 the chip must hold the tile of scores,
# 48 × 48, and l and m: a little more than M. The rule is right up to a constant; real code uses smaller blocks.
# </details>
#
# **Takeaway.** FA1 moves about $12\,N^2 d^2 / M$ elements. The more memory M on the chip, the less traffic.

# %% [markdown]
# ## Is that less than before?
#
# Standard attention moves $4N^2 + 4Nd$ elements (chapter 01). FA1 moves about $N^2 (3d + 4) / B_c$.
#
# **Predict.** For d = 64, how many keys must a block have before FA1 moves less than standard attention?

# %%
def moved(stage, B_c, N=4096, d=64):
    return io.traffic(stage, "forward", Tiling(N, N, 64, B_c), d).total


first = next(B_c for B_c in range(1, 4096) if moved("fa1", B_c) < moved("standard", B_c))
print("FA1 moves less from B_c =", first, "on;  (3d + 4) / 4 =", (3 * 64 + 4) / 4)
room = chips.A100.shared_per_block // 2  # elements of two bytes
by_rule = fa1.block_sizes(room, 64)[1]
less = moved("standard", 1) / moved("fa1", by_rule)
print(f"with an A100's shared memory, {room:,} elements, B_c = {by_rule}: {less:.1f} times less than standard")

# %% tags=["nbval-ignore-output"]
show(hbm_traffic.draw(**hbm_traffic.data()))

# %% [markdown]
# On the left, the lines are parallel: tiling saves a factor. On the right, N is fixed and the chip's memory grows.
# Standard attention moves the same. FA1 moves less, but with too little memory it moves *more* than standard attention,
# since a row block's state travels with every tile.

# %% [markdown]
# All lines count what the chip **requests**. Not all of it comes from DRAM. Between the two lies the L2 cache, which
# keeps what was read lately. The two crosses are a GPU's own counters during FA2's forward. What passed through L2 lies
# near the lines. What crossed to DRAM lies on the floor, $4Nd$ elements: each of Q, K, V and O once.
#
# **Takeaway.** Keep three quantities apart: the extra memory, what the chip requests, and what crosses to DRAM. The
# meter counts the second.

# %% [markdown]
# ## How does the backward pass get P back?
#
# The gradients need P, and P was thrown away. But l and m were kept, and after the forward pass they are final.
#
# **Predict.** A tile's scores can be computed again from q and k. How do you turn them into probabilities: do you need
# the online softmax a second time?

# %% tags=["nbval-ignore-output"]
def tile_backward(q, k, v, o, do, l, m, tau):
    s = tau * (q @ k.T)  # FA1.A4.L11  (B_r, B_c)
    p = np.exp(s - m[:, None]) / l[:, None]  # FA1.A4.L13  (B_r, B_c)
    dv = p.T @ do  # FA1.A4.L16  (B_c, d)
    dp = do @ v.T  # FA1.A4.L17  (B_r, B_c)
    D = (do * o).sum(axis=1)  # FA1.A4.L19  (B_r,)
    ds = p * (dp - D[:, None])  # FA1.A4.L20  (B_r, B_c)
    return tau * (ds @ k), tau * (ds.T @ q), dv  # FA1.A4.L21 FA1.A4.L22


dQ, dK, dV = np.zeros((3, 8, 4))
for j in range(0, 8, 2):  # FA1.A4.L6: keys outside, as before
    for i in range(0, 8, 4):  # FA1.A4.L9
        rows, cols = slice(i, i + 4), slice(j, j + 2)
        dq, dk, dv = tile_backward(Q[rows], K[cols], V[cols], O[rows], dO[rows], l[rows], m[rows], tau)
        dQ[rows] += dq
        dK[cols] += dk
        dV[cols] += dv
P = naive.safe_softmax(tau * Q @ K.T)
for name, ours, dense in zip(("dQ", "dK", "dV"), (dQ, dK, dV), naive.backward(Q, K, V, P, dO, tau=tau), strict=True):
    print(f"{name}: largest difference from chapter 01's gradient {np.abs(ours - dense).max():.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No.** One exponential and one division are enough. With the final $m$ and $\ell$ of a row, $p = e^{s - m} / \ell$ is
# the final probability at once. The rest is chapter 01, tile by tile.
# </details>
#
# It costs one product more than standard attention, $QK^\top$ again: 10 $N^2 d$ FLOPs instead of 8. In return nothing of
# size $N^2$ is stored. Making one score again takes 2d = 128 FLOPs; in the time in which an H100 sends a score to HBM and
# fetches it back, it could do more than a thousand.
#
# **Takeaway.** Two numbers for each row, $\ell$ and $m$, bring back any tile of P. Computing it again is cheaper than
# storing it.

# %% [markdown]
# ## What still travels?
#
# S and P no longer travel. Look at what is left.
#
# **Predict.** Of everything that FA1's forward moves, for large N and d = 64: what share is O, l and m going out and
# coming back?

# %%
parts = io.fa1_forward(Tiling(8192, 8192, 64, 128), 64)
for name, tensors in (("K and V", "KV"), ("Q", "Q"), ("O, l and m", "Olm")):
    share = sum(parts.loads.get(t, 0) + parts.stores.get(t, 0) for t in tensors) / parts.total
    print(f"{name:10} {share:4.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two thirds.** For each column block, $2d + 4$ of $3d + 4$ elements per row are O, l and m. Nobody reads O between two
# column blocks. It leaves the chip only to make room for other rows.
# </details>
#
# What would change if the queries stayed on the chip and the keys came by? That is the next chapter.
#
# **Takeaway.** Two thirds of FA1's traffic are unfinished answers on their way to HBM and back. The order of the loops
# is the cause.

# %% [markdown]
# ## Can wait: dropout without storing its mask
#
# Dropout sets each entry of P to 0 with probability p and divides the others by 1 − p. The backward pass must drop the
# same entries. Storing $N^2$ bits would take the memory that we have just saved. FA1 draws the random numbers again
# instead.
#
# **Predict.** One generator hands out its numbers in the order in which tiles are visited. Forward by rows, backward by
# columns: does each tile get the same numbers twice?

# %%
grid = Tiling(N_q=32, N_k=32, B_r=8, B_c=8)  # 4 x 4 tiles


def keyed(columns_first):  # what is drawn depends on the place, not on the time
    dropout, kept = Dropout(p=0.5, seed=0), np.empty((32, 32), dtype=bool)
    tiles = [(i, j) for i in range(4) for j in range(4)]
    for i, j in sorted(tiles, key=lambda tile: tile[1]) if columns_first else tiles:
        kept[grid.rows(i), grid.cols(j)] = dropout.z(grid.rows(i), grid.cols(j)) > 0  # z: 0 if dropped, else 1 / (1 − p)
    return kept


masks = {
    "sequential": {name: sequential_mask(grid, 0.5, 0, name.lower()) for name in ("FA1", "FA2")},
    "keyed": {"FA1": keyed(columns_first=True), "FA2": keyed(columns_first=False)},
}
for generator, drawn in masks.items():
    differ = drawn["FA1"] != drawn["FA2"]  # by columns, by rows
    print(f"{generator} generator: {differ.mean():.0%} of the entries differ")

# %% tags=["nbval-ignore-output"]
show(dropout_orders.draw(masks, B_r=grid.B_r, B_c=grid.B_c, p=0.5))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No.** Only the four tiles on the diagonal come at the same moment in both orders. In the other twelve of sixteen,
# half of the entries differ by chance: 12/16 · 1/2 = 3/8 of all.
# </details>
#
# FA1 visits by columns both ways, so it is safe. FlashAttention-2 is not, as its forward goes by rows. The way out is a
# generator with a *key*: its number is a function of seed, head, row and column, and the order does not matter.
#
# **Takeaway.** Key the random numbers by position. Then the mask is a function, and every loop order draws the same one.

# %% [markdown]
# ## Recap
#
# - FA1 computes one tile of S at a time, uses it and throws it away. Nothing of size $N^2$ reaches HBM.
# - Keys outside, queries inside. O, divided by $\ell$ at every step, travels with l and m for each column block.
# - The chip requests about $12\,N^2 d^2 / M$ elements. The extra memory grows with N alone.
# - Backward: $p = e^{s - m} / \ell$, tile by tile; one product more, far fewer elements moved.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** FA1's backward clears dQ, dK and dV at the start. It loads K and V once and stores dK and dV once. For
# each column block it loads Q, O, dO, dQ, l and m, and stores dQ. Write its number of elements in place of the `...`.
# The check compares with the meter.
#
# <details><summary>Hint</summary>
#
# The start costs $N_q d + 2 N_k d$. K, V, dK and dV cost $4 N_k d$ more. Four tensors of $N_q d$ come in for each column
# block and one goes out; l and m are $2 N_q$.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return N_q * d + 6 * N_k * d + T_c * (5 * N_q * d + 2 * N_q)
# ```
# </details>

# %%
def fa1_backward_elements(N_q, N_k, d, T_c):
    return ...


meter = Trace()
fa1.backward(Q, K, V, O, l, m, dO, B_r=4, B_c=2, tau=tau, trace=meter)
yours = fa1_backward_elements(N_q=8, N_k=8, d=4, T_c=4)
if yours is ...:
    print("not written yet; the meter says", meter.hbm_elements)
else:
    print(f"yours {yours}, the meter {meter.hbm_elements}:", "right" if yours == meter.hbm_elements else "not yet")

# %% [markdown]
# **2. Find the bug.** In the step below somebody forgot that $o$ arrives divided by $\ell$. Before you run it: after
# how many column blocks is O wrong for the first time? Then mend the last line and run it again.
#
# <details><summary>Hint</summary>
#
# What are $o$ and $\ell$ when the first column block arrives?
# </details>
# <details><summary>Solution</summary>
#
# After the second. The first starts from $o = 0$, where the missing factor does no harm, so a test with a single column
# block passes. The right line begins with `((alpha * l)[:, None] * o`.
# </details>

# %%
def broken_step(o, l, m, s, v):
    m_tile, m_new = s.max(axis=1), np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_tile[:, None])
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * p.sum(axis=1)
    return (alpha[:, None] * o + beta[:, None] * (p @ v)) / l_new[:, None], l_new, m_new


o, l_b, m_b = np.zeros((8, 4)), np.zeros(8), np.full(8, -np.inf)
for n in (2, 4, 6, 8):
    o, l_b, m_b = broken_step(o, l_b, m_b, tau * Q @ K[n - 2 : n].T, V[n - 2 : n])
    answer = naive.safe_softmax(tau * Q @ K[:n].T) @ V[:n]
    print(f"after {n} keys: error of O {np.abs(o - answer).max():.0e}")

# %% [markdown]
# **3. Read.** `fa1.forward` in the package is the same algorithm with a mask and dropout. Print it. Which lines does it
# have that ours has not?
#
# <details><summary>Answer</summary>
#
# Line 11 hides what the mask hides, line 14 drops, and `finite` and `np.where` look after rows that have seen no key
# yet. Chapter 04 comes to masks.
# </details>

# %% tags=["nbval-ignore-output"]
source = getsource(fa1.forward).splitlines()
first, last = (next(n for n, line in enumerate(source) if tag in line) for tag in ("A2.L6", "trace.hold"))
print("\n".join(line[4:] for line in source[first:last]))

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against plain attention: unequal and ragged lengths,
# a mask with an empty row and an empty tile, dropout, and large scores.

# %%
theirs = fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau)
verdict("fa1_forward here = fa1.forward", all(map(close, (O, l, m), theirs)))
theirs = fa1.backward(Q, K, V, O, l, m, dO, B_r=4, B_c=2, tau=tau)
verdict("the gradients here = fa1.backward", all(map(close, (dQ, dK, dV), theirs)))
tiling = Tiling(10, 13, 3, 5)
verdict("fa1_elements here = io.fa1_forward", fa1_elements(10, 13, 4, 5) == io.fa1_forward(tiling, 4).total)
verdict("what the meter saw here = what it saw in the package", watch.hbm_elements == fa1_elements(8, 8, 4, 2))
q, do, k, v = *rng.standard_normal((2, 10, 4)), *rng.standard_normal((2, 13, 4))
meter, o, l_q, m_q = Trace(), *fa1.forward(q, k, v, B_r=3, B_c=5)
fa1.backward(q, k, v, o, l_q, m_q, do, B_r=3, B_c=5, trace=meter)
verdict("the backward's meter = its closed form", meter.hbm_elements == io.fa1_backward(tiling, 4).total)

# %%
allowed = rng.random((10, 13)) < 0.6
allowed[3], allowed[:3, :5] = False, False  # a row and a tile with nothing to see
mask, dropout = Mask(allowed=allowed), Dropout(p=0.3, seed=7)
for size in (1.0, 30.0):
    given = dict(tau=size, mask=mask, dropout=dropout)
    O_dense, P_dense = naive.forward(q, k, v, **given)
    dense = naive.backward(q, k, v, P_dense, do, tau=size, dropout=dropout)
    o, l_q, m_q = fa1.forward(q, k, v, B_r=3, B_c=5, **given)
    got = fa1.backward(q, k, v, o, l_q, m_q, do, B_r=3, B_c=5, **given)
    verdict(f"scores of size {size:g}: fa1.forward = dense", close(o, O_dense))
    agree = [close(a, b, 1e-10) for a, b in zip(got, dense, strict=True)]
    verdict(f"scores of size {size:g}: fa1.backward = dense", all(agree))
o, _, _ = fa1.forward(q, k, v, B_r=3, B_c=5, tau=1e4, mask=mask)
O_dense, _ = naive.forward(q, k, v, tau=1e4, mask=mask)
verdict("scores of size 10000: fa1.forward = dense", close(o, O_dense))

# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)
