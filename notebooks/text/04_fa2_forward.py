# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)

# %% [markdown]
# # 04 · FlashAttention-2, forward
#
# **Same answer, same tiles: what is left to save?**
#
# FA1 never writes the score matrix to HBM. But it writes something else again and again: the unfinished output of every
# row block leaves the chip after each tile and comes back for the next one. In this chapter we change FA1 one step at a
# time and count what each change saves. At the end stands Algorithm 1 of the FlashAttention-2 paper (FA2).
#
# After this notebook you can
#
# - write FA2's forward pass from memory and say which lines of FA1 moved,
# - say for each change what it saves, and what it does not save,
# - sort the tiles of a causal mask into three kinds by looking at their corners.
#
# *Time: 60 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [03 ·
# FlashAttention](03_fa1.ipynb).*

# %%
from difflib import ndiff
from inspect import getsource

import numpy as np

from fa2_lab.machine import chips, io, time
from fa2_lab.plots import causal_tiles, deferred_normalisation, flop_costs, motion, visiting_order
from fa2_lab.plots.explorer import explore
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling
from fa2_lab.trace import UNWATCHED, Trace

# %% [markdown]
# ## FA1 once more, with its step set apart
#
# We are going to change two things: the loops and the step inside them. So here they are apart, on the 8 queries and
# keys of chapter 03. `tiling.rows(i)` and `tiling.cols(j)` say which rows and columns belong to a block. `trace` is the
# meter: reading a slice of a tensor in HBM is a load, writing one is a store. `trace.serial("j", …)` is a plain loop
# whose passes come one after the other; `trace.parallel`, below, is one whose passes may run at the same time.

# %%
def divided_step(o, l, m, s, v):  # (B_r, d), (B_r,), (B_r,), (B_r, B_c), (B_c, d): FA1's
    m_tile = s.max(axis=1)
    p = np.exp(s - m_tile[:, None])  # (B_r, B_c)
    m_new = np.maximum(m, m_tile)
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * p.sum(axis=1)
    r = 1 / l_new  # one division a row; the numbers of o are then multiplied
    return (r * alpha * l)[:, None] * o + (r * beta)[:, None] * (p @ v), l_new, m_new


# %%
def keys_outside(Q, K, V, O, l, m, tiling, step, trace=UNWATCHED):
    O[:], l[:], m[:] = 0, 0, -np.inf
    for j in trace.serial("j", range(tiling.T_c)):
        k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]
        for i in trace.serial("i", range(tiling.T_r)):
            rows = tiling.rows(i)
            q_i = Q[rows]
            o_i, l_i, m_i = O[rows], l[rows], m[rows]
            s_ij = tau * (q_i @ k_j.T)
            o_i, l_i, m_i = step(o_i, l_i, m_i, s_ij, v_j)
            O[rows], l[rows], m[rows] = o_i, l_i, m_i


def run(loops, step, Q, K, V, tiling):  # the loops on tensors that live in HBM, and the meter that watched them
    trace = Trace()
    tensors = trace.hbm(Q=Q, K=K, V=V, O=np.empty(Q.shape), l=np.empty(len(Q)), m=np.empty(len(Q)))
    loops(*tensors, tiling, step, trace)
    return *map(np.asarray, tensors[3:]), trace


Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
tau, tiling = 1 / np.sqrt(4), Tiling(N_q=8, N_k=8, B_r=4, B_c=2)
dense, _ = naive.forward(Q, K, V)
O, l, m, fa1_meter = run(keys_outside, divided_step, Q, K, V, tiling)
print("elements moved:", fa1_meter.hbm_elements, "  equal to plain attention:", close(O, dense))

# %% [markdown]
# **Takeaway.** In FA1 the keys stay on the chip and the queries come and go. So everything that belongs to a query must
# come and go as well: q, o, $\ell$ and m.

# %% [markdown]
# ## What if the queries stay and the keys come by?
#
# Swap the two loops. A row block's $o$, $\ell$ and m now begin on the chip, stay there for all tiles, and leave once. The
# step stays as it is.
#
# **Predict.** With 2 row blocks, how often is each block of K loaded after the swap?

# %%
def queries_outside(Q, K, V, O, l, m, tiling, step, trace=UNWATCHED):
    for i in trace.parallel("i", range(tiling.T_r)):
        rows = tiling.rows(i)
        q_i = Q[rows]
        o_i, l_i, m_i = np.zeros(q_i.shape), np.zeros(len(q_i)), np.full(len(q_i), -np.inf)
        for j in trace.serial("j", range(tiling.T_c)):
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]
            s_ij = tau * (q_i @ k_j.T)
            o_i, l_i, m_i = step(o_i, l_i, m_i, s_ij, v_j)
        O[rows], l[rows], m[rows] = o_i, l_i, m_i


O, l, m, swapped = run(queries_outside, divided_step, Q, K, V, tiling)
print("   loaded, stored:  keys outside   queries outside")
for tensor in ("Q", "K", "V", "O", "l", "m"):
    counts = [f"{t.loads(tensor):4}, {t.stores(tensor):3}" for t in (fa1_meter, swapped)]
    print(f"{tensor:16}{counts[0]:>14}{counts[1]:>18}")
print("elements moved:", fa1_meter.hbm_elements, "before,", swapped.hbm_elements, "after;  right:", close(O, dense))

# %%
sources = [getsource(f).splitlines()[1:] for f in (keys_outside, queries_outside)]
print("\n".join(line for line in ndiff(*sources) if not line.startswith("?")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Twice.** Once for each row block: 2 · 32 = 64 elements of K instead of 32. In exchange Q is loaded once instead of 4
# times, and O is stored once and never loaded.
# </details>
#
# In the second listing, − marks a line that left its place and + the place where it went. The loads of q, o, $\ell$ and m
# moved out of the inner loop, and the stores with them. The loads of k and v moved in.
#
# **Takeaway.** What belongs to the outer loop stays on the chip. FA1 keeps k and v there. FA2 keeps q, o, $\ell$ and m,
# and so saves more loads and stores.

# %% [markdown]
# ## How much is that at real sizes?
#
# Think of many square tiles, B rows by B columns. For each tile, FA1 moves q and o in and o out. FA2 moves k and v in.
#
# **Predict.** What is the ratio of the two?

# %%
for N, B in ((512, 64), (2048, 64), (8192, 64), (8192, 128)):
    ratio = float(io.fa1_over_fa2(Tiling(N, N, B, B), d=64))
    print(f"N = {N:4}, B = {B:3}: FA1 moves {ratio:.2f} times the elements of FA2")
doubled = io.growth("fa2", "forward", N=4096, B=64, d=64)
print(f"FA2, N from 4096 to 8192: {float(doubled):.2f} times the elements")

# %%
finished = Trace()
fa2.forward(Q, K, V, B_r=4, B_c=2, trace=finished)
show(visiting_order.draw(2, 4, {"FA1": fa1_meter.events, "FA2": finished.events}))

# %% tags=["nbval-ignore-output"]
recorded = motion.data()
show(motion.draw(**recorded), motion.moving(**recorded))

# %% tags=["nbval-ignore-output"]
explore()  # in a running notebook: sliders for the time, the sizes and the mask

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Three to two.** $3Bd : 2Bd$. The numbers $\ell$ and m add a little. With tiles of $B_r \times B_c$ it is $3B_r :
# 2B_c$, which is why the small example above gained more.
# </details>
#
# The first picture shows the order of the tiles above, and every load and store below. As before, these are elements that
# the chip requests; the L2 cache answers many of the requests for k and v.
#
# The second shows the same in motion, beside standard attention: each block between HBM, L2, shared memory and
# registers. Its clock counts requested bytes, so the algorithm that requests less is done first. In FA2, $\ell$ and m
# never travel, and o leaves once.
#
# The third is for you to step through. Look at what each has on the chip: FA2's o, $\ell$ and m stay until a row block is
# done, FA1's come and go with every tile.
#
# **Takeaway.** The swap saves a third of the requests. They still grow with $N^2$.

# %% [markdown]
# ## Who has to wait for whom?
#
# Traffic is not the main reason for the swap. Ask what one pass of the outer loop needs from the pass before. In
# `keys_outside`, a column block continues from the $o$, $\ell$ and m that the one before has stored. In
# `queries_outside`, a row block needs nothing from another row block, so its loop is `trace.parallel`.
#
# **Predict.** A head has 8,192 queries in blocks of 128. How many workers can share it now?

# %%
print("workers for one head, keys outside:", len(fa1_meter.by_worker()))
print("workers for one head, queries outside, 8 queries in blocks of 4:", len(swapped.by_worker()))
print("8,192 queries in blocks of 128:", Tiling(8192, 8192, 128, 128).T_r)

# %% [markdown]
# A worker becomes a thread block on the GPU, and an H100 has 132 processors (SMs) to run them on. If a model has few
# heads and long sequences, FA1 leaves most of them idle. Chapter 06 shows how much that costs. (The paper credits Phil
# Tillet, who had swapped the loops before in a Triton kernel.)
#
# **Takeaway.** With queries outside, the outer loop is a list of independent jobs. This is FA2's parallelism.

# %% [markdown]
# ## What does an operation cost?
#
# Now the arithmetic. In a tile almost all operations belong to the two matrix products. They run on the tensor cores. The
# rest (exponentials, maxima, sums, scalings) runs on other units of the SM, which are far slower.
#
# **Predict.** In a tile of 128 × 64 with d = 128, about 2% of the operations are not in matrix products. By chapter 00
# each of them costs at least 16 FLOPs of a matrix product. If the units take turns, what share of the time do these 2%
# take: about 2%, 10%, or 40%?

# %%
ops = io.tile_operations("fa1", "forward", 128, 64, 128)
print(f"not in matrix products: {100 * (1 - ops['matmul'] / sum(ops.values())):.1f}% of the operations")
for chip in (chips.A100, chips.H100):
    clocks = time.tile_clocks(chip, 128, 64, 128, algorithm="fa1")
    slow = (clocks.fp32 + clocks.exp) / (clocks.tensor + clocks.fp32 + clocks.exp)
    prices = f"{chip.flops_per_fp32:.0f} for an FP32 FLOP, {chip.flops_per_exp:.0f} for an exponential"
    print(f"{chip.name}: {100 * slow:.0f}% of the clocks if the units take turns; prices in matmul FLOPs: {prices}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 40%**, on an A100. In one clock, an SM of the A100 does 2,048 FLOPs of matrix products on its tensor cores, 128 FLOPs on its FP32 units (64
# multiply-adds), and 16 exponentials on its special function units. 2,048 / 128 = 16, and 2,048 / 16 = 128.
# </details>
#
# These are data sheet rates, and the units can work at the same time. So the shares above are the worst case.
#
# **Takeaway.** Two percent of the operations can take two fifths of the time: on an A100, everything outside the tensor
# cores costs 16 to 128 times as much.

# %% [markdown]
# ## Do we have to divide in every step?
#
# `divided_step` returns a finished answer after every tile. To go on, the next step must undo the division: it multiplies
# $o$ by the old $\ell$, and divides by the new one.
#
# Suppose we never divide inside the loop and keep the raw sum $o = \sum e^{s - m} v$, as in chapter 02.
#
# **Predict.** When a larger maximum turns up, what must happen to the raw sum $o$?

# %%
def raw_step(o, l, m, s, v):  # FA2's
    m_new = np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_new[:, None])  # (B_r, B_c)
    alpha = np.exp(m - m_new)  # 1 while the maximum stands
    return alpha[:, None] * o + p @ v, alpha * l + p.sum(axis=1), m_new


O, l, m, _ = run(queries_outside, raw_step, Q, K, V, tiling)
print("divided once, at the end: right:", close(O / l[:, None], dense))


def counted(step):
    *_, trace = run(queries_outside, step, *np.ones((3, 128, 128)), Tiling(128, 128, 128, 64))
    return trace.by_tile()[0, 1]  # the second tile, 128 × 64


before, after = counted(divided_step), counted(raw_step)
print("operations of one tile    divided        raw   saved")
for kind in ("matmul", "exp", "maximum", "add", "multiply", "divide"):
    print(f"{kind:20} {before[kind]:12,} {after[kind]:10,} {before[kind] - after[kind]:7,}")

# %%
show(deferred_normalisation.draw(**deferred_normalisation.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **It shrinks**, by $\alpha = e^{m - m_{new}}$, and so does $\ell$, because both are sums of $e^{s - m}$ and m has
# changed. A factor that $o$ and $\ell$ have in common cancels in $o / \ell$. That is why the division can wait. The
# subtraction of m cannot: it keeps the exponentials of this tile finite.
# </details>
#
# `divided_step` scales two blocks of 128 × 128, the old output and the new part. `raw_step` scales one, by $\alpha$. So over
# 64 tiles, 128 scalings become 65: one in each tile and one division at the end.
#
# **Takeaway.** Tweak 1: divide by $\ell$ once, after the last tile. The factor $\alpha$ has to stay.

# %% [markdown]
# ## Is that worth it?
#
# A tile lost 17,280 of about 4.3 million operations, which is 0.4%. But they were expensive ones.
#
# **Predict.** If tensor cores and all other units work at the same time, and the tensor cores are the last to finish, how
# much faster does tweak 1 make a tile?

# %%
for chip in (chips.A100, chips.H100):
    worth = time.tweak_1(chip, 128, 64, 128)
    print(f"{chip.name}: {worth.serial:.2f} times as fast if units take turns, {worth.overlapped:.2f} if they overlap")

# %%
show(flop_costs.draw(**flop_costs.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Not at all.** Nobody waited for the units that have less to do now.
# </details>
#
# A real kernel lies between these two ends of the model. Chapter 10 measures where.
#
# **Takeaway.** Saving work helps only if something was waiting for the unit that did it.

# %% [markdown]
# ## What does the backward pass need to know?
#
# FA1 keeps two numbers for each row, and $P = e^{S - m} / \ell$. In chapter 01 one number was enough, the logsumexp
# $L = \log \sum e^S$, and $P = e^{S - L}$.
#
# **Predict.** Write L in terms of m and $\ell$.

# %%
S = 1000 + tau * (Q @ K.T)  # large scores
m = S.max(axis=1)
l = np.exp(S - m[:, None]).sum(axis=1)
L = m + np.log(l)
with np.errstate(over="ignore"):
    directly = np.log(np.exp(S).sum(axis=1))
print("L of row 0 from m and l:", round(L[0], 3), "  from the definition:", directly[0])
print("exp(S - L) = exp(S - m) / l:", close(np.exp(S - L[:, None]), np.exp(S - m[:, None]) / l[:, None]))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **$L = m + \log \ell$.** $e^{S - m} / \ell = e^{S - m - \log \ell} = e^{S - L}$. The definition overflows for scores
# around 1,000. This way it does not, because $\sum e^S$ is never formed.
# </details>
#
# That saves one store here, and a load and a division in the backward pass.
#
# That was the last line of Algorithm 1. [The poster](../figures/poster_forward.pdf) has all of them on one sheet: each line in
# words, in NumPy and in Triton, with what it moves and computes.
#
# **Takeaway.** Tweak 2: keep one number per row for the backward pass, $L = m + \log \ell$.

# %% [markdown]
# ## The whole of Algorithm 1
#
# Both tweaks in the swapped loops. The tags are the paper's lines; `fa2-lab where FA2.A1.L10` leads from such a tag to
# the NumPy line, the Triton line and a picture.

# %%
def fa2_forward(Q, K, V, O, L, tiling, trace=UNWATCHED):
    for i in trace.parallel("i", range(tiling.T_r)):  # FA2.A1.L3
        rows = tiling.rows(i)
        q_i = Q[rows]  # FA2.A1.L4  (B_r, d)
        o_i, l_i, m_i = np.zeros(q_i.shape), np.zeros(len(q_i)), np.full(len(q_i), -np.inf)  # FA2.A1.L5
        for j in trace.serial("j", visited(tiling, i)):  # FA2.A1.L6
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # FA2.A1.L7  (B_c, d)
            s_ij = hide(tau * (q_i @ k_j.T), tiling, i, j)  # FA2.A1.L8  (B_r, B_c)
            o_i, l_i, m_i = raw_step(o_i, l_i, m_i, s_ij, v_j)  # FA2.A1.L9 FA2.A1.L10
        O[rows] = o_i / l_i[:, None]  # FA2.A1.L12 FA2.A1.L14
        L[rows] = m_i + np.log(l_i)  # FA2.A1.L13 FA2.A1.L15


def visited(tiling, i):
    return range(tiling.T_c)  # all tiles, until there is a mask


def hide(s_ij, tiling, i, j):
    return s_ij  # nothing is hidden, until there is a mask


# %% [markdown]
# **Predict.** Count the four stages on 512 queries and keys, with d = 64 and tiles of 64 × 64. Which change lowers the
# number of elements moved, and which the number of multiplications?

# %%
big, squares = np.random.default_rng(1).standard_normal((3, 512, 64)), Tiling(512, 512, 64, 64)
tau = 1 / np.sqrt(64)
final = Trace()
fa2_forward(*final.hbm(**dict(zip("QKV", big, strict=True)), O=np.empty((512, 64)), L=np.empty(512)), squares, final)
stages = {
    "FA1": run(keys_outside, divided_step, *big, squares)[-1],
    "+ queries outside": run(queries_outside, divided_step, *big, squares)[-1],
    "+ tweak 1": run(queries_outside, raw_step, *big, squares)[-1],
    "+ tweak 2: FA2": final,
}
tau = 1 / np.sqrt(4)
print(f"{'':18}{'elements moved':>15}{'multiplications':>17}{'divisions':>11}")
for name, t in stages.items():
    print(f"{name:18}{t.hbm_elements:15,}{t.flops['multiply']:17,}{t.flops['divide']:11,}")

# %% [markdown]
# The swap changes what moves and nothing that is computed. Tweak 1 changes what is computed and nothing that moves. In
# its row the final division is still missing; it comes with the last row, 512 · 64 divisions, one for each element of O.
#
# **Takeaway.** The loop order decides the traffic. The state decides the arithmetic. You can change one without the
# other.

# %% [markdown]
# ## Which tiles does a causal mask leave?
#
# In a language model a query sees no later key: row r sees columns c ≤ r. This is the *causal mask*. We sort the tiles
# into three kinds: SKIP, where no query sees any key; FULL, where each query sees every key; and DIAGONAL, where the
# mask cuts through. FA1's Algorithm 2 computes the tiles to be skipped anyway, and masks every entry.
#
# **Predict.** Take 8 × 8 scores in tiles of 2 × 2. How many of the 16 tiles can be skipped?

# %%
def kind(tiling, i, j):  # for as many queries as keys
    rows, cols = tiling.rows(i), tiling.cols(j)
    if cols.start > rows.stop - 1:  # even the last row is before the first column
        return Tile.SKIP
    if cols.stop - 1 <= rows.start:  # even the first row sees the last column
        return Tile.FULL
    return Tile.DIAGONAL


square = Tiling(8, 8, 2, 2, CAUSAL)
for i in range(4):
    print(" ".join(f"{kind(square, i, j).name:8}" for j in range(4)))

# %%
show(causal_tiles.draw(**causal_tiles.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Six.** Four lie on the diagonal, and six are full.
# </details>
#
# Only the diagonal ones need a mask. At the bottom of the picture, the share of computed tiles falls to one half as N
# grows. In `fa2_forward` two small functions ask about it: which tiles to visit, and which to mask. Hidden scores
# become $-\infty$, since $e^{-\infty} = 0$. (Windows, packed documents and other masks: chapter 16.)

# %%
def visited(tiling, i):
    return [j for j in range(tiling.T_c) if tiling.kind(i, j) is not Tile.SKIP]


def hide(s_ij, tiling, i, j):
    if tiling.kind(i, j) is Tile.FULL:
        return s_ij
    return np.where(tiling.visible(i, j), s_ij, -np.inf)


O, L = np.empty((8, 4)), np.empty(8)
fa2_forward(Q, K, V, O, L, square)
print("10 of 16 tiles computed, 4 of them masked; right:", close(O, naive.forward(Q, K, V, mask=CAUSAL)[0]))
for T in (2, 4, 7, 64):
    print(f"T = {T:2} row blocks: all tiles / visited tiles = {float(1 / time.causal_ratio(T)):.2f}")

# %% [markdown]
# Of T × T tiles, T(T + 1)/2 are visited. The ratio is 2T/(T + 1), which tends to 2 for long sequences.
#
# With fewer queries than keys, the diagonal ends in the bottom right corner: row r sees c ≤ r + N_k − N_q, so that the
# last query sees every key.
#
# **Takeaway.** A tile is skipped, masked, or computed without a mask. Its corners decide, before anything is loaded.
# Skipping saves up to half of the tiles.

# %% [markdown]
# ## Recap
#
# - Queries outside: q, o, $\ell$ and m stay on the chip, k and v come by. A third less traffic, and row blocks that need
#   nothing from each other.
# - Tweak 1: no division inside the loop. One of two scalings of the output block goes; $\alpha$ stays.
# - Tweak 2: $L = m + \log \ell$ is all that the backward pass needs.
# - Causal: SKIP, DIAGONAL, FULL, decided at the corners.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A sliding window: row r sees columns c with r − w < c ≤ r. Write the test for tiles that nobody sees,
# in place of the `...`. The check tries it on all windows.
#
# <details><summary>Hint</summary>
#
# On the right it is the causal test. On the left, a tile is out of sight if its last column is out of sight of its first
# row, because the first row reaches furthest back.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return cols.start > rows.stop - 1 or cols.stop - 1 <= rows.start - w
# ```
# </details>

# %%
def nobody_sees(rows, cols, w):  # rows.start, rows.stop, cols.start, cols.stop
    return ...


def really_nobody(rows, cols, w):
    return not any(r - w < c <= r for r in range(rows.start, rows.stop) for c in range(cols.start, cols.stop))


uneven = Tiling(12, 12, 4, 3)
tiles = [(uneven.rows(i), uneven.cols(j), w) for i in range(3) for j in range(4) for w in range(1, 13)]
if nobody_sees(*tiles[0]) is ...:
    print("not written yet")
else:
    wrong = [t for t in tiles if bool(nobody_sees(*t)) != really_nobody(*t)]
    print("right" if not wrong else f"not yet: rows {wrong[0][0]}, columns {wrong[0][1]}, window {wrong[0][2]}")

# %% [markdown]
# **2. Find the bug.** Three rules for a causal mask. One is right. Each of the other two lets some query see the future.
# Which is right? Write its name in place of the `...`.
#
# - `A`: skip tile (i, j) if `j * B_c > (i + 1) * B_r`, and mask only the tiles with i = j.
# - `B`: skip if `j * B_c >= (i + 1) * B_r`, and set hidden scores to 0 before the softmax.
# - `C`: skip if `j * B_c >= (i + 1) * B_r`, and set hidden scores of tiles on the diagonal to $-\infty$.
#
# <details><summary>Hint</summary>
#
# For A, try i = 0 and j = 1 with square tiles. For B: what is $e^0$?
# </details>
# <details><summary>Solution</summary>
#
# C. With A, the tile right of the diagonal is visited and not masked. With B, a hidden key gets the weight $e^{0 - m}$,
# which is not zero.
# </details>

# %%
answer = ...
print({"C": "right", ...: "not answered yet"}.get(answer, "not yet: this one lets the future in"))

# %% [markdown]
# **3. Find the bug.** The step below takes exponentials relative to the tile's own maximum, as FA1 does, but forgets
# FA1's factor $\beta = e^{m_{tile} - m_{new}}$. For which rows is the result right all the same?
#
# <details><summary>Hint</summary>
#
# When is $\beta = 1$? (The keys are sorted so that the scores of query 0 rise.)
# </details>
# <details><summary>Solution</summary>
#
# Where every tile brings a new maximum: then the tile's maximum is the row's. FA2 needs no $\beta$, because it takes
# exponentials relative to the new maximum from the start.
# </details>

# %%
def forgot_beta(o, l, m, s, v):
    m_tile = s.max(axis=1)
    m_new = np.maximum(m, m_tile)
    alpha, p = np.exp(m - m_new), np.exp(s - m_tile[:, None])
    return alpha[:, None] * o + p @ v, alpha * l + p.sum(axis=1), m_new


by_score = np.argsort(Q[0] @ K.T)  # another order of the keys does not change attention
O_b, l_b, m_b, _ = run(queries_outside, forgot_beta, Q, K[by_score], V[by_score], tiling)
right_rows = [r for r in range(8) if close((O_b / l_b[:, None])[r], dense[r])]
maxima = (Q @ K[by_score].T).reshape(8, 4, 2).max(axis=2)  # (row, tile)
rising = [r for r in range(8) if (np.diff(maxima[r]) > 0).all()]
print("right rows:", right_rows, "  rows whose maximum rises with every tile:", rising)

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against plain attention: ragged blocks, huge scores,
# masks.

# %%
O, l, m, ours = run(keys_outside, divided_step, Q, K, V, tiling)
packages = Trace()
theirs = fa1.forward(Q, K, V, B_r=4, B_c=2, trace=packages)
verdict("keys_outside with divided_step = fa1.forward", all(map(close, (O, l, m), theirs)))
verdict("and it moves the same elements in the same order", ours.events == packages.events)
for mask in (Mask(), CAUSAL):
    ours, packages = Trace(), Trace()
    watched = ours.hbm(Q=Q, K=K, V=V, O=np.empty((8, 4)), L=np.empty(8))
    fa2_forward(*watched, Tiling(8, 8, 4, 2, mask), ours)
    theirs = fa2.forward(Q, K, V, B_r=4, B_c=2, mask=mask, trace=packages)
    verdict(f"fa2_forward = fa2.forward, causal = {mask.causal}", all(map(close, watched[3:], theirs)))
    verdict("and it moves the same elements in the same order", ours.events == packages.events)
sizes = [(8, 2, 2), (12, 4, 3), (12, 3, 4), (13, 5, 4)]
tilings = [Tiling(N, N, B_r, B_c, CAUSAL) for N, B_r, B_c in sizes]
same = [kind(t, i, j) is t.kind(i, j) for t in tilings for i in range(t.T_r) for j in range(t.T_c)]
verdict("the corner tests = Tiling.kind, also for tiles that are not square", all(same))

# %%
rng = np.random.default_rng(2)
cases = (8, 8, 4, 4, 2, 1), (13, 29, 5, 4, 6, 1), (13, 29, 5, 4, 6, 300), (300, 300, 64, 64, 48, 1)
for N_q, N_k, d, B_r, B_c, size in cases:
    q, (k, v) = size * rng.standard_normal((N_q, d)), rng.standard_normal((2, N_k, d))
    for mask in (Mask(), CAUSAL):
        O, L = fa2.forward(q, k, v, B_r=B_r, B_c=B_c, mask=mask)
        S = np.where(Tiling(N_q, N_k, N_q, N_k, mask).visible(0, 0), q @ k.T / np.sqrt(d), -np.inf)
        right = close(O, naive.forward(q, k, v, mask=mask)[0]) and close(L, naive.logsumexp(S))
        verdict(f"{N_q} × {N_k}, d = {d}, tiles {B_r} × {B_c}, scores × {size}, causal = {mask.causal}", right)
N, d, whole = 8192, 128, Tiling(8192, 8192, 128, 128)
verdict("counted form: Q and O once, K and V once for each of 64 row blocks",
        io.fa2_forward(whole, d).total == 2 * N * d + N + 64 * 2 * N * d)

# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)
