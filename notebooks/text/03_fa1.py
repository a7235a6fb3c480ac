# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)

# %% [markdown]
# # 03 · FlashAttention
#
# **What if the score matrix never leaves the chip?**
#
# Chapter 01 showed that standard attention is slow because S and P travel: each has $N^2$ numbers, and each is written
# to HBM and read again. Chapter 02 showed that softmax can take its keys a block at a time. Put the two together.
# Compute a small tile of S on the chip, use it at once, and throw it away. This is FlashAttention of 2022, FA1.
#
# After this notebook you can
#
# - write FA1's forward pass with two loops and one small step,
# - count every element that it loads and stores, and say how the size of the chip's memory decides the count,
# - explain how FA1's backward pass gets P back from $\ell$ and m.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [02 · Online
# softmax](02_online_softmax.ipynb).*

# %%
import numpy as np

from fa2_lab.machine import chips, io
from fa2_lab.plots import hbm_traffic, visiting_order
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, naive
from fa2_lab.reference.dropout import Dropout
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Can one tile be finished by itself?
#
# Cut the queries into *row blocks* of $B_r$ queries, and the keys into *column blocks* of $B_c$ keys. A row block and a
# column block together give one tile of S, with $B_r \times B_c$ scores.
#
# In FA1, O is the right answer for the keys seen so far, after every tile. So its $o$ is always divided by $\ell$. Take
# the row of chapter 02 after its first two keys, and one more tile with two keys:
#
# | | maximum | sum of exponentials | weighted sum of values |
# | --- | --- | --- | --- |
# | the row so far | $m = \log 3$ | $\ell = 4/3$ | $o = 2$, already divided by $\ell$ |
# | the tile, scores $\log 4$ and $\log 8$ | $\log 8$ | $3/2$ | $4$, not divided |

# %% [markdown]
# FA1 takes the tile's exponentials relative to the tile's own maximum. So two factors bring both parts to the new
# maximum: $\alpha = e^{m - m_{new}}$ for the row so far, and $\beta = e^{m_{tile} - m_{new}}$ for the tile.
#
# In code:


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


# %% [markdown]
# **Predict.** Here $\alpha = e^{\log 3 - \log 8} = 3/8$ and $\beta = e^0 = 1$. What is the new $\ell$?

# %% tags=["hide-input"]
s, v = np.log([[4.0, 8.0]]), np.array([[4.0], [2.0]])
o, l, m = fa1_step(np.array([[2.0]]), np.array([4 / 3]), np.log([3.0]), s, v)
print("l =", round(l.item(), 9), " o =", round(o.item(), 9), " m = log", round(np.exp(m).item(), 9))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **2.** $\ell = \alpha \cdot \frac{4}{3} + \beta \cdot \frac{3}{2} = \frac{3}{8} \cdot \frac{4}{3} + \frac{3}{2} = 2$.
# For $o$, first undo the old division by multiplying with the old $\ell$: $\frac{3}{8} \cdot \frac{4}{3} \cdot 2 = 1$. Add
# the new part, 4, and divide by the new $\ell$: $o = 5/2$. That is the answer of chapter 02.
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
#
# <details><summary>Answer</summary>
#
# **In HBM.** O, ℓ and m have a row for each query, and the chip has room for one block of rows. So after each tile the
# block's $o$, $\ell$ and $m$ are stored, and before the next tile of the same rows they are loaded again.
# </details>
#
# Find the two lines: the one that loads O, ℓ and m, and the one that stores them.


# %%
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


# %% tags=["nbval-ignore-output", "hide-input"]
def empty_state(Q):  # O, l and m: places in HBM, not filled yet
    return np.empty(Q.shape), np.empty(len(Q)), np.empty(len(Q))


Q, K, V, dO = np.random.default_rng(0).standard_normal((4, 8, 4))
tau = 0.5
for n in (2, 4, 6, 8):  # the outer loop stopped after n keys
    O, l, m = empty_state(Q)
    fa1_forward(Q, K[:n], V[:n], O, l, m, B_r=4, B_c=2, tau=tau)
    answer = naive.safe_softmax(tau * Q @ K[:n].T) @ V[:n]
    print(f"after {n} keys: O against the attention over these keys, error {np.abs(O - answer).max():.0e}")

# %% [markdown]
# O is a right answer after every column block: the errors in the output are rounding.
#
# **Takeaway.** No entry of S or P reaches HBM. But every row's unfinished answer travels there, once for each column
# block.

# %% [markdown]
# ## What does it load and store?
#
# Now with the meter of chapter 01 watching. Our example has N = 8 queries and keys, d = 4, $B_r$ = 4 and $B_c$ = 2. So
# there are 4 column blocks and 2 row blocks.
#
# **Predict.** How many elements of Q are loaded in all?

# %% tags=["hide-input"]
meter = Trace()
O, l, m = empty_state(Q)
watched = meter.hbm(Q=Q, K=K, V=V, O=O, l=l, m=m)
fa1_forward(*watched, B_r=4, B_c=2, tau=tau)
for tensor in ("Q", "K", "V", "O", "l", "m"):
    print(f"{tensor}: {meter.loads(tensor):3} loaded, {meter.stores(tensor):3} stored")
print("together:", meter.hbm_elements)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **128.** Q has 8 · 4 = 32 elements, and all of them are loaded for each of the 4 column blocks.
# </details>
#
# In the picture, the tiles on the left are numbered in the order of their visits: down the first column, then down the
# next. On the right time runs, with a line for each tensor. K and V appear once for each column block. Q, O, ℓ and m
# appear at every tile.

# %% tags=["nbval-ignore-output", "hide-input"]
watch = Trace()
fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau, trace=watch)
show(visiting_order.draw(2, 4, {"FA1": watch.events}))

# %% [markdown]
# **Takeaway.** Each block of K and V is loaded once. Q is loaded once for each column block. O, ℓ and m are loaded and
# stored once for each column block.

# %% [markdown]
# ## How does it grow?
#
# Call the number of column blocks $T_c = \lceil N / B_c \rceil$ (the brackets mean: rounded up), and that of row blocks
# $T_r$. Then FA1's forward moves
#
# - $Nd + 2N$ elements to set O, ℓ and m at the start,
# - $2Nd$ elements to load K and V once,
# - $3Nd + 4N$ elements for each column block: Q, O, ℓ and m in, O, ℓ and m out.


# %%
def fa1_elements(N_q, N_k, d, B_c):
    T_c = -(-N_k // B_c)  # rounded up
    return N_q * d + 2 * N_q + 2 * N_k * d + T_c * (3 * N_q * d + 4 * N_q)


# %% [markdown]
# **Predict.** The last item is multiplied by $T_c$, and $T_c = N / B_c$. If N doubles, by what factor does the total
# grow?

# %% tags=["hide-input"]
print("the example above:", fa1_elements(8, 8, 4, 2), "derived,", meter.hbm_elements, "metered")
for N in (1024, 8192):
    grown = fa1_elements(N, N, 64, 64) / fa1_elements(N // 2, N // 2, 64, 64)
    print(f"N = {N:5}: {fa1_elements(N, N, 64, 64):11,} elements, {grown:.2f} times those of N = {N // 2}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Nearly four.** Twice the rows, and twice the column blocks. What is moved only once matters less and less as N
# grows.
# </details>
#
# So what the chip requests still grows with $N^2$. What grows with N alone is the extra memory: ℓ and m.
#
# Fewer column blocks mean fewer requests, so $B_c$ should be as large as fits. Let M be the number of elements, here of
# two bytes, that fit into the shared memory of one thread block. The paper's rule is $B_c = \lceil M / 4d \rceil$, and
# as many rows (but at most d). If there are as many rows, the four blocks q, k, v and o together fill M.
#
# **Predict.** Put $T_c = N / B_c = 4Nd / M$ into the leading term $3Nd \cdot T_c$. What comes out?

# %% tags=["hide-input"]
N, d, M = 65536, 64, 32768
B_c = fa1.block_sizes(M, d)[1]
print(
    f"N = {N:,}, d = {d}, M = {M:,}, so B_c = {B_c}:",
    f"{fa1_elements(N, N, d, B_c) / (N * N * d * d / M):.2f} N²d²/M elements",
)
B_r, B_c = fa1.block_sizes(24_576, 128)
on_chip = Trace()
fa1.forward(*np.random.default_rng(1).standard_normal((3, 2 * B_c, 128)), B_r=B_r, B_c=B_c, trace=on_chip)
print(f"on the chip at once, for M = 24,576 and d = 128: {on_chip.peak_on_chip:,} elements")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **$12\,N^2 d^2 / M$.** $3Nd \cdot 4Nd / M = 12\,N^2 d^2 / M$. The 4N for ℓ and m add a little: $12\,(1 + \frac{4}{3d}) =
# 12.25$, and what is moved once the rest.
# </details>
#
# The paper states this *IO complexity* as $\Theta(N^2 d^2 / M)$: it grows like this, up to a constant factor.
#
# The rule leaves something out. Take M = 24,576 and d = 128: it gives $B_c = 48$. Besides four blocks of 48 × 128, the
# chip must hold the tile of scores, 48 × 48, and ℓ and m: 26,976 elements, more than M. So real code uses smaller
# blocks.
#
# **Takeaway.** The chip requests about $12\,N^2 d^2 / M$ elements: still $N^2$, but divided by the room on the chip.

# %% [markdown]
# ## Is that less than before?
#
# Standard attention moves $4N^2 + 4Nd$ elements (chapter 01). FA1 moves about $N^2 (3d + 4) / B_c$.
#
# **Predict.** For d = 64, about how many keys must a block have before FA1 moves less than standard attention?


# %% tags=["hide-input"]
def moved(stage, B_c, N=4096, d=64):
    return io.traffic(stage, "forward", Tiling(N, N, 64, B_c), d).total


first = next(B_c for B_c in range(1, 4096) if moved("fa1", B_c) < moved("standard", B_c))
print("FA1 moves less from B_c =", first, "on;  (3d + 4) / 4 =", (3 * 64 + 4) / 4)
room = chips.A100.shared_per_block // 2  # elements of two bytes
by_rule = fa1.block_sizes(room, 64)[1]
less = moved("standard", 1) / moved("fa1", by_rule)
print(f"with an A100's shared memory, {room:,} elements, B_c = {by_rule}: {less:.1f} times less than standard")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 50.** $(3d + 4) / B_c < 4$ if $B_c > 49$.
# </details>
#
# In the picture, the three upper lines count what the chip requests. Over N they are parallel: tiling saves a
# factor. In the second chart N is fixed and M grows. With more room FA1 moves less. With too little it moves *more* than
# standard attention, since a row block's state travels with every tile.
#
# The bars were counted on an H200 at N = 4,096, on FA2 (next chapter) with row blocks of 64. It requests 34.1M elements a
# head. About 26M reached L2; an SM also has a small cache
# of its own, which may have answered the rest. Only 1.0M crossed to DRAM: a little less than $4Nd$, each of Q, K, V and
# O once, because some of O was still in L2.

# %% tags=["nbval-ignore-output"]
show(hbm_traffic.draw(**hbm_traffic.data()))

# %% [markdown]
# **Takeaway.** With 50 keys in a block and d = 64, FA1 requests less than standard attention. Shared memory has room for several
# times as many.

# %% [markdown]
# ## How does the backward pass get P back?
#
# The gradients need P, and P was thrown away. But ℓ and m were kept (chapter 04 keeps L instead), and after the forward
# pass they are final.
#
# **Predict.** A tile's scores can be computed again from q and k. How do you turn them into probabilities: do you need
# the online softmax a second time?

# %% tags=["nbval-ignore-output", "hide-input"]
P = naive.safe_softmax(tau * Q @ K.T)
rows, cols = slice(4, 8), slice(2, 4)  # one of the 8 tiles
s = tau * (Q[rows] @ K[cols].T)
p = np.exp(s - m[rows][:, None]) / l[rows][:, None]
print(f"this tile of P, from s, m and l: largest difference from P {np.abs(p - P[rows, cols]).max():.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No.** One exponential and one division are enough. With the final $m$ and $\ell$ of a row, $p = e^{s - m} / \ell$ is
# the final probability at once. The rest is chapter 01, tile by tile.
# </details>
#
# This backward pass has one product more than standard attention's, $QK^\top$ again: five products instead of four, 10
# $N^2 d$ FLOPs instead of 8. In return nothing of size $N^2$ is stored. On the H200 of chapter 00, making one score
# again takes 128 FLOPs. Sending it to HBM and fetching it back takes as long as 1,650.
#
# **Takeaway.** Two numbers for each row, $\ell$ and $m$, bring back any tile of P. Computing it again is cheaper than
# storing it.

# %% [markdown]
# ## What still travels?
#
# S and P no longer travel. What is left?
#
# **Predict.** Of everything that FA1's forward moves, for large N and d = 64: what share is O, ℓ and m going out and
# coming back?

# %% tags=["hide-input"]
parts = io.fa1_forward(Tiling(8192, 8192, 64, 128), 64)
for name, tensors in (("K and V", "KV"), ("Q", "Q"), ("O, l and m", "Olm")):
    share = sum(parts.loads.get(t, 0) + parts.stores.get(t, 0) for t in tensors) / parts.total
    print(f"{name:10} {share:4.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two thirds.** For each column block, $2d + 4$ of $3d + 4$ elements per row are O, ℓ and m. Nobody reads O between two
# column blocks. It leaves the chip only to make room for other rows.
# </details>
#
# What would change if the queries stayed on the chip and the keys came by? That is the next chapter.
#
# **Takeaway.** Two thirds of what FA1 moves is unfinished answers, to HBM and back. The order of the loops is the
# cause.

# %% [markdown]
# ## Recap
#
# - FA1 computes one tile of S at a time, uses it and throws it away. Nothing of size $N^2$ reaches HBM.
# - Keys outside, queries inside. O, divided by $\ell$ at every step, travels with ℓ and m for each column block.
# - The chip requests about $12\,N^2 d^2 / M$ elements. The extra memory grows with N alone.
# - Backward: $p = e^{s - m} / \ell$, tile by tile; one product more, but nothing of size $N^2$ stored.
#
# <details><summary>If you train with dropout: how is its mask not stored?</summary>
#
# *Dropout* sets entries of P to 0 by chance. The backward pass must drop the same entries. Storing $N^2$ bits would
# take the memory that we have just saved, so FA1 draws the random numbers again, in the order of the tiles. FA2's
# passes differ in that order: its forward pass has the rows outside, its backward pass the columns. Of 16 tiles, 12
# would get other numbers ([picture](../figures/dropout_orders.svg)). So each random number is computed from its row and
# column (and a seed). Then the order of the loops does not matter.
# </details>

# %% [markdown]
# ## Exercises
#
# **1. Complete.** FA1's backward clears dQ, dK and dV at the start. It loads K and V once and stores dK and dV once. For
# each column block it loads Q, O, dO, dQ, ℓ and m, and stores dQ. Write its number of elements in place of the `...`.
# The check compares with the meter.
#
# <details><summary>Hint</summary>
#
# Count in three parts, as for the forward pass: what is cleared at the start, what moves once, and what moves for each of
# the $T_c$ column blocks. How many tensors of $N_q d$ elements are in the last part?
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


# %% tags=["hide-input"]
meter = Trace()
fa1.backward(Q, K, V, O, l, m, dO, B_r=4, B_c=2, tau=tau, trace=meter)
yours = fa1_backward_elements(N_q=8, N_k=8, d=4, T_c=4)
if yours is ...:
    print("not written yet; the meter says", meter.hbm_elements)
else:
    print(f"yours {yours}, the meter {meter.hbm_elements}:", "right" if yours == meter.hbm_elements else "not yet")

# %% [markdown]
# **2. Find the bug.** In the step below somebody forgot that $o$ arrives divided by $\ell$. After how many column
# blocks is O wrong for the first time? Write the number in place of the `...`. Then mend the last line and run both
# cells again.
#
# <details><summary>Hint</summary>
#
# What are $o$ and $\ell$ when the first column block arrives?
# </details>
# <details><summary>Solution</summary>
#
# 2. The first column block starts from $o = 0$, where the missing factor does no harm, so a test with a single column
# block passes. The right line begins with `((alpha * l)[:, None] * o`.
# </details>


# %%
answer = ...


def broken_step(o, l, m, s, v):
    m_tile, m_new = s.max(axis=1), np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_tile[:, None])
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * p.sum(axis=1)
    return (alpha[:, None] * o + beta[:, None] * (p @ v)) / l_new[:, None], l_new, m_new


# %% tags=["nbval-ignore-output", "hide-input"]
print({2: "right", ...: "not answered yet"}.get(answer, "not yet: look at the errors"))
o, l_b, m_b = np.zeros((8, 4)), np.zeros(8), np.full(8, -np.inf)
for n in (2, 4, 6, 8) if answer is not ... else ():
    o, l_b, m_b = broken_step(o, l_b, m_b, tau * Q @ K[n - 2 : n].T, V[n - 2 : n])
    exact = naive.safe_softmax(tau * Q @ K[:n].T) @ V[:n]
    print(f"after {n // 2} column blocks: error of O {np.abs(o - exact).max():.0e}")

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against plain attention: unequal and ragged lengths,
# a mask with an empty row and an empty tile, dropout, and large scores.

# %% tags=["hide-input"]
rng, tiling = np.random.default_rng(2), Tiling(10, 13, 3, 5)
theirs = fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau)
verdict("fa1_forward here = fa1.forward", all(map(close, (O, l, m), theirs)))
verdict("a tile of P from m and l = P", close(p, P[rows, cols]))
verdict("fa1_elements here = io.fa1_forward", fa1_elements(10, 13, 4, 5) == io.fa1_forward(tiling, 4).total)
q, do, k, v = *rng.standard_normal((2, 10, 4)), *rng.standard_normal((2, 13, 4))
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
found, formula = hbm_traffic.data()["counters"]["bars"], io.fa2_forward(Tiling(4096, 4096, 64, 64), 64).total
verdict("FA2's formula for blocks of 64: 34.1M; at L2 about 26M", [round(n / 1e6, x) for n, x in ((formula, 1), (found["reached L2"], 0))] == [34.1, 26])
verdict("at DRAM: a little less than 4 N d", 0.95 < found["crossed to DRAM"] / (4 * 4096 * 64) < 1)

# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)
