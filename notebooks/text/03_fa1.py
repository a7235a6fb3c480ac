# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)

# %% [markdown]
# # 03 · FlashAttention
#
# **What if the score matrix never leaves the chip?**
#
# Notebook 01 found that the trips of S and P through HBM decide the speed of attention. Notebook 02 found that softmax
# can take its keys block by block. Together they allow something new: compute a small tile of S on the chip, use it,
# and forget it there. That is FlashAttention, here in its first version (Dao and others, 2022), which we call FA1.
#
# After this notebook you can
#
# - write FA1's forward and backward from two loops and one small step each,
# - predict every element that they move, and say how block size and on-chip memory decide it,
# - explain how dropout is replayed without storing its mask, and when that goes wrong.
#
# *Time: 40 minutes. Hardware: any laptop, NumPy alone. Before this: [02 · Online softmax](02_online_softmax.ipynb).*

# %%
from inspect import getsource

import numpy as np

from fa2_lab.machine import chips, io
from fa2_lab.paper import where
from fa2_lab.plots import dropout_orders, hbm_traffic, visiting_order
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, naive
from fa2_lab.reference.dropout import Dropout, sequential_mask
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## One tile of S, and an answer that is always right
#
# Cut the queries into T_r row blocks of B_r queries, and the keys into T_c column blocks of B_c keys. Where row block
# i meets column block j lies a tile of S, B_r × B_c scores.
#
# FA1 wants O to be a right answer after every tile, for the keys seen so far, so its o is always divided by l. The row
# of notebook 02 again, after its first two keys, and beside it the next tile by itself:
#
# | | maximum | sum of exponentials | weighted values |
# | --- | --- | --- | --- |
# | the row so far | m = log 3 | l = 4/3 | o = 2, divided by l |
# | the tile, scores log 4 and log 8 | log 8 | 3/2 | 4, not divided |
#
# **Predict.** With α = exp(log 3 − log 8) = 3/8, what are the new l and the new, divided o?

# %%
def fa1_step(o, l, m, s, v):  # (B_r, d), (B_r,), (B_r,), (B_r, B_c), (B_c, d)
    m_tile = s.max(axis=1)  # FA1.A2.L12: of this tile alone
    p = np.exp(s - m_tile[:, None])  # FA1.A2.L12
    l_tile = p.sum(axis=1)  # FA1.A2.L12
    m_new = np.maximum(m, m_tile)  # FA1.A2.L13
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)  # FA1.A2.L13
    l_new = alpha * l + beta * l_tile  # FA1.A2.L13
    o_new = (alpha * l)[:, None] * o + beta[:, None] * (p @ v)  # FA1.A2.L15
    return o_new / l_new[:, None], l_new, m_new


s, v = np.log([[4.0, 8.0]]), np.array([[4.0], [2.0]])
o, l, m = fa1_step(np.array([[2.0]]), np.array([4 / 3]), np.log([3.0]), s, v)
print("l =", round(l.item(), 9), " o =", round(o.item(), 9), " m = log", round(np.exp(m).item(), 9))

# %% [markdown]
# <details><summary>By hand</summary>
#
# l = 3/8 · 4/3 + 1 · 3/2 = 2. To continue, o must first be multiplied by its l again: 3/8 · 4/3 · 2 = 1. Add the new
# part, 4, and divide by the new l: 5/2, the answer of notebook 02.
# </details>
#
# Beside `update` of notebook 02, three lines moved:
#
# | | notebook 02 | FA1 |
# | --- | --- | --- |
# | p | exp(s − m_new) | exp(s − m_tile), corrected by β afterwards |
# | l | α l + rowsum(p) | α l + β rowsum(p) |
# | o | α o + p v | (α l o + β p v) / l_new |
#
# In other words, it is `merge`, where the left partner has been divided already and the right one is the tile.
#
# **Takeaway.** FA1's step merges a right answer for some keys with one more tile, and leaves a right answer for more
# keys.

# %% [markdown]
# ## Two loops: who stays on the chip?
#
# One loop runs over column blocks j, the other over row blocks i. FA1 puts j outside: it fetches one block of keys and
# values and lets all queries come by, block after block. Then it fetches the next keys, and all queries come by again.
#
# **Predict.** When row block 0 comes by for the second time, it needs what it knew after the first: o, l and m. Where
# have they been meanwhile?

# %%
def fa1_forward(Q, K, V, B_r, B_c, tau):
    O, l, m = np.zeros(Q.shape), np.zeros(len(Q)), np.full(len(Q), -np.inf)
    seen = []  # for us to look at: O after each column block
    for j in range(0, len(K), B_c):  # FA1.A2.L6
        k_j, v_j = K[j : j + B_c], V[j : j + B_c]
        for i in range(0, len(Q), B_r):  # FA1.A2.L8
            rows = slice(i, i + B_r)
            s_ij = tau * (Q[rows] @ k_j.T)  # FA1.A2.L10  (B_r, B_c)
            O[rows], l[rows], m[rows] = fa1_step(O[rows], l[rows], m[rows], s_ij, v_j)
        seen.append(O.copy())
    return O, l, m, seen


rng = np.random.default_rng(0)
Q, K, V, dO = rng.standard_normal((4, 8, 4))
tau = 0.5
O, l, m, seen = fa1_forward(Q, K, V, B_r=4, B_c=2, tau=tau)
for j, O_so_far in enumerate(seen):
    n = 2 * (j + 1)
    answer = naive.safe_softmax(tau * Q @ K[:n].T) @ V[:n]
    print(f"column block {j}: O is the attention over the first {n} keys:", close(O_so_far, answer))

# %% [markdown]
# <details><summary>Where the state waits</summary>
#
# In HBM. There are N rows of O, l and m, and the chip has room for one block of them. O, l and m are stored after each
# tile and loaded before the next tile of the same rows.
# </details>
#
# **Takeaway.** With the keys outside, no entry of S or P ever reaches HBM, but every row's interim answer does, once
# for each column block.

# %% [markdown]
# ## Every load and every store
#
# The package's `fa1.forward` has the same lines, with a mask, and with the meter of notebook 01 looking on. Line 14 is
# left out here: it comes further down. (`finite` and `np.where` look after rows that have seen no key, as in notebook
# 02. They change nothing else.)
#
# **Predict.** Capital letters live in HBM. Which four lines of the two loops below touch it? Then, for N = 8, d = 4,
# B_r = 4 and B_c = 2, how many elements of Q are loaded in all, and how many of K? Which tensor travels most?

# %% tags=["nbval-ignore-output"]
source = getsource(fa1.forward).splitlines()
first, last = (next(n for n, line in enumerate(source) if tag in line) for tag in ("A2.L6", "trace.hold"))
print("\n".join(line[4:] for line in source[first:last] if "A2.L14" not in line))

# %%
meter = Trace()
fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau, trace=meter)
for tensor in ("Q", "K", "V", "O", "l", "m"):
    print(f"{tensor}: {meter.loads(tensor):3} loaded, {meter.stores(tensor):3} stored")
print("together:", meter.hbm_elements)

# %%
show(visiting_order.draw(2, 4, {"FA1": meter.events}))

# %% [markdown]
# <details><summary>The four lines, and how to read the picture</summary>
#
# Lines 7 and 9 load, lines 15 and 16 store. On the left the tiles are numbered in the order of their visits: down the
# first column, then down the next. On the right time runs with a lane for each tensor, filled for a load and open for
# a store. K and V appear once for each column. Q, O, l and m appear at every tile: q, o, l and m in, o, l and m out.
# </details>
#
# **Takeaway.** K and V cross once, Q T_c times, and O, l and m 2 T_c times, and once more to be cleared at the start.

# %% [markdown]
# ## How large may a block be?
#
# Fewer column blocks mean fewer trips, so B_c should be as large as the chip allows. The paper's rule for an on-chip
# memory of M elements is B_c = ⌈M / 4d⌉ and B_r = min(B_c, d): four blocks, q, k, v and o, of at most B_c × d.
#
# **Predict.** M = 24,576 (96 KiB of float32), d = 128. What is B_c? What else must be on the chip at the same time,
# and does it still fit?

# %%
M, d = 24_576, 128
B_r, B_c = fa1.block_sizes(M, d)
q, k, v, do = rng.standard_normal((4, 2 * B_c, d))
there, back = Trace(), Trace()
o, l_q, m_q = fa1.forward(q, k, v, B_r=B_r, B_c=B_c, trace=there)
fa1.backward(q, k, v, o, l_q, m_q, do, B_r=B_r, B_c=B_c, trace=back)
print(f"the rule: B_r = {B_r}, B_c = {B_c}; M = {M:,}")
for name, trace in (("forward", there), ("backward", back)):
    print(f"{name}: {trace.peak_on_chip:,} elements at once = {trace.peak_on_chip / M:.2f} M")
for name in ("forward", "backward"):
    fits = max(B for B in range(1, d) if io.on_chip("fa1", name, B, B, d) <= M)
    print(f"{name}: the largest square block that fits has {fits} rows")

# %% [markdown]
# <details><summary>What the rule forgets</summary>
#
# Four blocks of 48 × 128 already are M. The tile of scores (48 × 48) and l and m come on top. The backward holds eight
# such blocks (q, o, do, dq, k, v, dk, dv) and two tiles. So ⌈M / 4d⌉ is right up to a constant, which is all that the
# theorem below needs; code needs the smaller number.
# </details>
#
# **Takeaway.** B_c is about M / 4d: on-chip memory, not taste, sets the block size, and the score tile must be paid
# for too.

# %% [markdown]
# ## Counting before running
#
# Now the number of elements can be derived. With T_c = ⌈N_k / B_c⌉ column blocks:
#
# - at the start, O, l and m are set in HBM: N_q d + 2 N_q;
# - K and V are loaded once: 2 N_k d;
# - for each column block, Q, O, l and m are loaded, and O, l and m stored: 3 N_q d + 4 N_q.
#
# **Predict.** The last item is multiplied by T_c. With N queries and keys and T_c = 4Nd / M, what is the leading term?

# %%
def fa1_elements(N_q, N_k, d, B_c):
    T_c = -(-N_k // B_c)
    return N_q * d + 2 * N_q + 2 * N_k * d + T_c * (3 * N_q * d + 4 * N_q)


settings = (8, 8, 4, 4, 2), (10, 13, 4, 3, 5), (7, 1, 3, 4, 4), (512, 768, 64, 64, 128)
for N_q, N_k, d, B_r, B_c in settings:
    q, k, v = rng.standard_normal((N_q, d)), *rng.standard_normal((2, N_k, d))
    trace = Trace()
    fa1.forward(q, k, v, B_r=B_r, B_c=B_c, trace=trace)
    derived = fa1_elements(N_q, N_k, d, B_c)
    print(f"{N_q} x {N_k}, d = {d}: derived {derived:,}, metered {trace.hbm_elements:,}")

# %% [markdown]
# **Predict.** As a multiple of N²d² / M, what does the count tend to when N grows? And what does doubling N do to it?

# %%
d = 64
print("         " + "".join(f"  N = {N:6,}" for N in (1024, 8192, 65536)))
for M in (2**13, 2**15, 2**17):
    B_c = fa1.block_sizes(M, d)[1]
    row = [fa1_elements(N, N, d, B_c) / (N * N * d * d / M) for N in (1024, 8192, 65536)]
    print(f"M = {M:7,}" + "".join(f"{x:12.2f}" for x in row))
growth = fa1_elements(8192, 8192, d, 64) / fa1_elements(4096, 4096, d, 64)
print("doubling N multiplies the traffic by", round(growth, 2))

# %% [markdown]
# <details><summary>The theorem, with its constant</summary>
#
# T_c · 3Nd = 12 N²d² / M; the 4N for l and m make it 12 (1 + 4/(3d)), which is 12.25 at d = 64, and what is moved only
# once fades as N grows. This is the traffic theorem Θ(N²d² / M), met to the element.
#
# It is not O(N), as one popular write-up has it: the *extra memory* is O(N). Doubling N still multiplies the traffic
# by nearly four.
# </details>
#
# **Takeaway.** FA1 moves about 12 N²d² / M elements: the square of N has stayed, and dividing by M is the gain.

# %% [markdown]
# ## When is that less than before?
#
# Standard attention moves 4N² + 4Nd. FA1 moves about N²(3d + 4) / B_c.
#
# **Predict.** For d = 64, how many keys must a block hold before FA1 moves less? Is that few or many for a real chip?

# %%
def moved(stage, B_c, N=4096, d=64):
    return io.traffic(stage, "forward", Tiling(N, N, 64, B_c), d).total


first = next(B_c for B_c in range(1, 4096) if moved("fa1", B_c) < moved("standard", B_c))
room = chips.A100.shared_per_block // 2  # elements of two bytes
by_rule = fa1.block_sizes(room, 64)[1]
print("FA1 moves less from B_c =", first, "on;  (3d + 4) / 4 =", (3 * 64 + 4) / 4)
print(f"an A100's shared memory, {room:,} elements, would give B_c = {by_rule}:", end=" ")
print(f"{moved('standard', 1) / moved('fa1', by_rule):.1f} times less than standard")

# %% tags=["nbval-ignore-output"]
show(hbm_traffic.draw(**hbm_traffic.data()))

# %% [markdown]
# <details><summary>Reading the picture</summary>
#
# Left: three parallel lines, all of slope two; a tile saves a factor, not a power. Right, with N fixed: standard
# attention does not care how large the chip is, FA1 does. With too small a memory it moves *more* than standard
# attention, because every tile drags a row block's state with it. FA2's line is the next notebook's matter.
#
# The cross is what a GPU's own counters saw come from and go to its memory chips during FA2's forward: far less, since
# most of what is loaded again is still in a cache (L2) on the way. Our counts say what the chip asks for; notebook 10
# compares the two.
#
# Real kernels use blocks of 64 to 128 keys, fewer than the rule allows: shared memory is not the only thing that runs
# out. Notebook 07 comes back to that.
# </details>
#
# **Takeaway.** Tiling pays from about 3d/4 keys in a block on, and its gain grows in proportion to the on-chip memory.

# %% [markdown]
# ## Dropout without storing the mask
#
# Dropout sets each entry of P to 0 with probability p and divides the others by 1 − p. The backward pass needs the
# same entries dropped, and storing N² bits would undo the gain. FA1 keeps the state of the random generator and draws
# the numbers again.
#
# **Predict.** One generator hands out its numbers tile after tile, in the order of the visits. The backward visits the
# tiles by columns, as FA1's forward does. If the forward went by rows instead, what share of the mask would come out
# differently, for p = 1/2 and 4 × 4 tiles?

# %%
grid = Tiling(N_q=32, N_k=32, B_r=8, B_c=8)  # 4 x 4 tiles


def keyed(columns_first):  # what is drawn depends on the place, not on the time
    dropout, kept = Dropout(p=0.5, seed=0), np.empty((32, 32), dtype=bool)
    tiles = [(i, j) for i in range(4) for j in range(4)]
    for i, j in sorted(tiles, key=lambda tile: tile[1]) if columns_first else tiles:
        kept[grid.rows(i), grid.cols(j)] = dropout.z(grid.rows(i), grid.cols(j)) > 0
    return kept


masks = {
    "sequential": {name: sequential_mask(grid, 0.5, 0, name.lower()) for name in ("FA1", "FA2")},
    "keyed": {"FA1": keyed(columns_first=True), "FA2": keyed(columns_first=False)},
}
for generator, drawn in masks.items():
    differ = drawn["FA1"] != drawn["FA2"]  # by columns, by rows
    print(f"{generator} generator: share of entries that differ:", round(differ.mean(), 2))

# %%
show(dropout_orders.draw(masks, B_r=grid.B_r, B_c=grid.B_c, p=0.5))

# %% [markdown]
# <details><summary>What the key is, and where the drop belongs</summary>
#
# Why 3/8: of the 16 tiles, the four on the diagonal come at the same moment in both orders, and in the other twelve
# half of the entries differ by chance. The first paper's algorithms are right as they stand, since both its passes go
# by columns; FlashAttention-2's forward goes by rows and its backward by columns.
#
# The keyed generator (Philox) is a function of seed, batch, head, row and column: its "state" is the seed alone. Any
# tile can be drawn at any time, by anyone, in any order.
#
# Note the order of lines 13 and 14: l is summed *before* entries are dropped. Dropout acts on the finished
# probabilities, which are divided by the full sum.
# </details>
#
# **Takeaway.** Key the generator by position: then a mask is a function, not a record, and no loop order can change
# it.

# %% [markdown]
# ## Backward: one tile
#
# The way back needs P, and P was forgotten. But l and m were kept, for each row, and they are final now.
#
# **Predict.** A tile's scores can be made again from q and k. What makes probabilities of them: do you need the online
# softmax once more?

# %%
def tile_backward(q, k, v, o, do, l, m, tau):
    s = tau * (q @ k.T)  # FA1.A4.L11  (B_r, B_c)
    p = np.exp(s - m[:, None]) / l[:, None]  # FA1.A4.L13
    dv = p.T @ do  # FA1.A4.L16  (B_c, d)
    dp = do @ v.T  # FA1.A4.L17  (B_r, B_c)
    D = (do * o).sum(axis=1)  # FA1.A4.L19  (B_r,)
    ds = p * (dp - D[:, None])  # FA1.A4.L20
    return tau * (ds @ k), tau * (ds.T @ q), dv  # FA1.A4.L21 FA1.A4.L22


rows, cols = slice(4, 8), slice(2, 4)
P = naive.safe_softmax(tau * Q @ K.T)
dq, dk, dv = tile_backward(Q[rows], K[cols], V[cols], O[rows], dO[rows], l[rows], m[rows], tau)
print("dv of the tile = its part of Pᵀ dO:", close(dv, P[rows, cols].T @ dO[rows]))

# %% tags=["nbval-ignore-output"]
print(where("FA1.A4.L13"))

# %% [markdown]
# <details><summary>No second online softmax</summary>
#
# With the final m and l of a row, p = exp(s − m) / l is the final probability at once. Everything else is notebook 01
# on a small scale: dS = P∘(dP − D), and D from do and o, so that no row of P has to be complete.
# </details>
#
# **Takeaway.** Two numbers for each row, l and m, bring back any tile of P; after that, a tile's gradients need
# nothing but its own blocks.

# %% [markdown]
# ## Backward: the loops, and what they cost
#
# The tiles are visited as before, columns outside. dk and dv of a column block add up on the chip. dq adds up over
# columns, so it goes to HBM and back, as O did.
#
# **Predict.** Standard attention's backward has four products of size N²d. FA1's has one more; which? Does it move
# more or less?

# %%
def fa1_backward(Q, K, V, O, dO, l, m, B_r, B_c, tau):
    dQ, dK, dV = np.zeros(Q.shape), np.zeros(K.shape), np.zeros(V.shape)
    for j in range(0, len(K), B_c):  # FA1.A4.L6
        cols = slice(j, j + B_c)
        for i in range(0, len(Q), B_r):  # FA1.A4.L9
            rows = slice(i, i + B_r)
            blocks = Q[rows], K[cols], V[cols], O[rows], dO[rows], l[rows], m[rows]
            dq, dk, dv = tile_backward(*blocks, tau)
            dQ[rows] += dq  # FA1.A4.L21: through HBM, at every tile
            dK[cols] += dk  # in the package on the chip until the column is done
            dV[cols] += dv
    return dQ, dK, dV


ours = fa1_backward(Q, K, V, O, dO, l, m, 4, 2, tau)
dense = naive.backward(Q, K, V, P, dO, tau=tau)
print("the gradients of notebook 01:", [close(a, b) for a, b in zip(ours, dense, strict=True)])

# %%
N, d = 1024, 64
q, k, v, do = rng.standard_normal((4, N, d))
there, standard, tiled = Trace(), Trace(), Trace()
_, p = naive.forward(q, k, v, trace=there)
naive.backward(q, k, v, p, do, trace=standard)
fa1.backward(q, k, v, *fa1.forward(q, k, v, B_r=64, B_c=128), do, B_r=64, B_c=128, trace=tiled)
metered = {"standard, forward": there, "standard, backward": standard, "FA1, backward": tiled}
for name, trace in metered.items():
    products = trace.matmul_flops // (N * N * d)
    print(f"{name:18} {products:2} N²d FLOPs in products, {trace.hbm_elements:9,} elements moved")
print("4N² + 4Nd =", f"{4 * N * N + 4 * N * d:,}", "  7N² + 8Nd =", f"{7 * N * N + 8 * N * d:,}")

# %% [markdown]
# <details><summary>More arithmetic, less traffic</summary>
#
# The fifth product is QKᵀ again: 10 N²d FLOPs instead of 8. Making a score again takes 2d = 128 FLOPs. Sending it to
# HBM and fetching it back moves 4 bytes, and in that time an H100 could do 4 · 295 = 1,180. Standard attention moves
# 7N² + 8Nd on the way back (P twice, dP twice, dS three times); FA1 5Nd for each column block, and a little. The
# paper's Theorem 5 compares with "Algorithm 0", which is the forward pass with its 4N² + 4Nd; it means Algorithm 3.
# The order of growth is the same.
# </details>
#
# **Takeaway.** Recomputation trades a quarter more arithmetic for never storing anything of size N².

# %% [markdown]
# ## What still travels?
#
# S and P are gone from HBM. Look once more at what is left.
#
# **Predict.** Of all the elements that FA1's forward moves, for a large N and d = 64, what share is O, l and m going
# out and coming back?

# %%
parts = io.fa1_forward(Tiling(8192, 8192, 64, 128), 64)
for name, tensors in (("K and V", "KV"), ("Q", "Q"), ("O, l and m", "Olm")):
    share = sum(parts.loads.get(t, 0) + parts.stores.get(t, 0) for t in tensors) / parts.total
    print(f"{name:10} {share:4.0%}")

# %% [markdown]
# <details><summary>Why it is there at all</summary>
#
# (2d + 4) / (3d + 4) of each column block's trips: two thirds. Nobody reads O between two column blocks; it leaves the
# chip only because the other rows need the room. Worse, the rows' states tie the column blocks to each other: column
# block j + 1 continues what block j has stored. So FA1 gives a whole head to one worker, from beginning to end;
# notebook 06 shows what that leaves idle.
# </details>
#
# What would change if the queries stayed and the keys came by? That is the next notebook.
#
# **Takeaway.** Two thirds of FA1's traffic are interim answers on their way to HBM and back: a price of the loop
# order, not of attention.

# %% [markdown]
# ## Recap
#
# - FA1 computes one tile of S at a time and forgets it: nothing of size N² reaches HBM.
# - Keys outside, queries inside; O, divided by l at every step, travels with l and m for each column block.
# - Traffic, exactly: N_q d + 2N_q + 2N_k d + T_c (3N_q d + 4N_q), about 12 N²d² / M with B_c = M / 4d.
# - Backward: p = exp(s − m) / l, tile by tile; one product more, far fewer elements moved.
# - Dropout: keyed by position, the mask is drawn again in any order.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** A popular write-up shows as "FA1's inner loop" one row block against all key blocks, with o and l
# kept on the chip. How many elements of O would that move for N = 256 and d = 16, and how many does FA1 move with B_c
# = 16?
#
# <details><summary>Hint</summary>
# Kept on the chip, each row of O is stored once. FA1: 2 T_c + 1 times N d.
# </details>
# <details><summary>Answer</summary>
#
# 4,096 against 33 · 4,096 = 135,168. The snippet is FlashAttention-2's loop with an additional division. A quick test
# for any picture of FA1: the *keys* must be outside.
# </details>

# %%
for name in ("fa2", "fa1"):
    counted = io.traffic(name, "forward", Tiling(256, 256, 16, 16), 16)
    print(f"{name}: {counted.loads.get('O', 0) + counted.stores['O']:,} elements of O")

# %% [markdown]
# **2. Complete.** Derive the traffic of FA1's backward in the same way, as a function of N_q, N_k, d and B_c, and hold
# it against the meter.
#
# <details><summary>Hint</summary>
# At the start dQ, dK and dV are cleared. K and V in, dK and dV out, once. For each column block Q, O, dO and dQ in, dQ
# out, l and m in.
# </details>
# <details><summary>Answer</summary>
#
# ```python
# def fa1_backward_elements(N_q, N_k, d, B_c):
#     T_c = -(-N_k // B_c)
#     return N_q * d + 6 * N_k * d + T_c * (5 * N_q * d + 2 * N_q)
#
#
# print(fa1_backward_elements(8, 8, 4, 2), io.fa1_backward(Tiling(8, 8, 4, 2), 4).total)
# ```
# </details>

# %% [markdown]
# **3. Break and fix.** In the step below somebody has forgotten that o arrives divided. Before you run it: after how
# many column blocks is O wrong for the first time?
#
# <details><summary>Hint</summary>
# What are o and l when the first column block arrives?
# </details>

# %%
def broken_step(o, l, m, s, v):
    m_tile, m_new = s.max(axis=1), np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_tile[:, None])
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * p.sum(axis=1)
    return (alpha[:, None] * o + beta[:, None] * (p @ v)) / l_new[:, None], l_new, m_new


o, l_8, m_8 = np.zeros((8, 4)), np.zeros(8), np.full(8, -np.inf)
for n in (2, 4, 6, 8):
    o, l_8, m_8 = broken_step(o, l_8, m_8, tau * Q @ K[n - 2 : n].T, V[n - 2 : n])
    S = tau * Q @ K[:n].T
    O_right = close(o, naive.safe_softmax(S) @ V[:n])
    l_right = close(l_8, np.exp(S - m_8[:, None]).sum(axis=1))
    print(f"after {n} keys: O is right: {O_right}, l is right: {l_right}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# From the second on. The first starts from o = 0 and l = 0, where the missing factor l does no harm, so a test with a
# single column block passes. l and m stay right throughout. The fix is `(alpha * l)[:, None] * o`.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against the dense result, for unequal and
# ragged lengths, a mask with empty rows and tiles, dropout, and large scores.

# %%
theirs = fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau)
verdict("fa1_forward here = fa1.forward", all(map(close, (O, l, m), theirs)))
theirs = fa1.backward(Q, K, V, O, l, m, dO, B_r=4, B_c=2, tau=tau)
verdict("fa1_backward here = fa1.backward", all(map(close, ours, theirs)))
tiling = Tiling(10, 13, 3, 5)
same = fa1_elements(10, 13, 4, 5) == io.fa1_forward(tiling, 4).total
verdict("fa1_elements here = io.fa1_forward", same)
q, do, k, v = *rng.standard_normal((2, 10, 4)), *rng.standard_normal((2, 13, 4))
trace, o, l_q, m_q = Trace(), *fa1.forward(q, k, v, B_r=3, B_c=5)
fa1.backward(q, k, v, o, l_q, m_q, do, B_r=3, B_c=5, trace=trace)
same = trace.hbm_elements == io.fa1_backward(tiling, 4).total
verdict("the backward's meter = its closed form", same)

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
