# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)

# %% [markdown]
# # 04 · FlashAttention-2, forward
#
# **Same answer, same tiles: what is left to save?**
#
# FA1 never writes the score matrix to HBM. But the unfinished output of every row block leaves the chip after each tile,
# and comes back for the next one. In this chapter we change FA1 one step at a time and count what each change saves. At
# the end stands Algorithm 1 of the FlashAttention-2 paper (FA2).
#
# After this notebook you can
#
# - write FA2's forward pass from memory and say which lines of FA1 moved,
# - say for each change what it saves, and what it does not save,
# - sort the tiles of a causal mask into three kinds by looking at their corners.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [03 ·
# FlashAttention](03_fa1.ipynb).*

# %%
import numpy as np

from fa2_lab.machine import chips, io, time
from fa2_lab.plots import causal_tiles, deferred_normalisation, visiting_order
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile, Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## What if the queries stay and the keys come by?
#
# Here are FA1's two loops. The step inside them, `divided_step`, is folded below. It computes the same as `fa1_step` of
# chapter 03, but divides once a row, and then multiplies. `tiling.rows(i)` and `tiling.cols(j)` are the rows and
# columns of a block. In a loop over `trace.serial` one pass runs after the other. In a loop over `trace.parallel` they
# may run at the same time.

# %%
def keys_outside(Q, K, V, O, l, m, tiling, step, trace=UNWATCHED):  # FA1
    tau = 1 / np.sqrt(Q.shape[1])
    O[:], l[:], m[:] = 0, 0, -np.inf
    for j in trace.serial("j", range(tiling.T_c)):
        k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]
        for i in trace.serial("i", range(tiling.T_r)):
            rows = tiling.rows(i)
            q_i, o_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]
            s_ij = tau * (q_i @ k_j.T)
            O[rows], l[rows], m[rows] = step(o_i, l_i, m_i, s_ij, v_j)


# %% tags=["hide-input"]
def divided_step(o, l, m, s, v):  # (B_r, d), (B_r,), (B_r,), (B_r, B_c), (B_c, d): FA1's
    m_tile = s.max(axis=1)
    p = np.exp(s - m_tile[:, None])  # (B_r, B_c)
    m_new = np.maximum(m, m_tile)
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * p.sum(axis=1)
    r = 1 / l_new  # one division a row; the numbers of o are then multiplied
    return (r * alpha * l)[:, None] * o + (r * beta)[:, None] * (p @ v), l_new, m_new


def run(loops, step, Q, K, V, tiling):  # the loops on tensors that live in HBM, and the meter that watched them
    trace = Trace()
    tensors = trace.hbm(Q=Q, K=K, V=V, O=np.empty(Q.shape), l=np.empty(len(Q)), m=np.empty(len(Q)))
    loops(*tensors, tiling, step, trace)
    return *map(np.asarray, tensors[3:]), trace


Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
tiling = Tiling(N_q=8, N_k=8, B_r=4, B_c=2)
dense, _ = naive.forward(Q, K, V)

# %% [markdown]
# The keys stay on the chip, and the queries come and go. So everything that belongs to a query comes and goes as well:
# q, o, $\ell$ and m.
#
# Now swap the loops. A row block's o, $\ell$ and m begin on the chip, stay there for all tiles, and leave once. The
# step does not change.

# %%
def queries_outside(Q, K, V, O, l, m, tiling, step, trace=UNWATCHED):
    tau = 1 / np.sqrt(Q.shape[1])
    for i in trace.parallel("i", range(tiling.T_r)):
        rows = tiling.rows(i)
        q_i = Q[rows]  # moved out of the inner loop
        o_i, l_i, m_i = np.zeros(q_i.shape), np.zeros(len(q_i)), np.full(len(q_i), -np.inf)  # no load any more
        for j in trace.serial("j", range(tiling.T_c)):
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # moved into the inner loop
            s_ij = tau * (q_i @ k_j.T)
            o_i, l_i, m_i = step(o_i, l_i, m_i, s_ij, v_j)
        O[rows], l[rows], m[rows] = o_i, l_i, m_i  # moved out of the inner loop


# %% [markdown]
# **Predict.** There are 8 queries in 2 row blocks, and 8 keys in 4 column blocks. How often is each block of K loaded after
# the swap?

# %% tags=["hide-input"]
*_, before = run(keys_outside, divided_step, Q, K, V, tiling)
O, l, m, after = run(queries_outside, divided_step, Q, K, V, tiling)
print("   loaded, stored:  keys outside   queries outside")
for tensor in ("Q", "K", "V", "O", "l", "m"):
    counts = [f"{t.loads(tensor):4}, {t.stores(tensor):3}" for t in (before, after)]
    print(f"{tensor:16}{counts[0]:>14}{counts[1]:>18}")
print("elements moved:", before.hbm_elements, "before,", after.hbm_elements, "after")
print(f"largest difference from plain attention: {np.abs(O - dense).max():.12f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Twice**, once for each row block. In exchange Q is loaded once instead of 4 times, and O is stored once and never loaded.
# </details>
#
# The picture shows the same two runs: left, the order of the tiles; right, every load and store.

# %%
show(visiting_order.draw(2, 4, {"FA1": before.events, "FA2": after.events}))

# %% [markdown]
# **Takeaway.** What belongs to the outer loop stays on the chip. FA1 keeps k and v there, FA2 keeps q, o, $\ell$ and m.

# %% [markdown]
# ## How much is that at real sizes?
#
# Take square tiles, B rows by B columns. For each tile, FA1 loads q and o and stores o. FA2 loads k and v.
#
# **Predict.** What is the ratio of the two, without $\ell$ and m?

# %% tags=["hide-input"]
N, B, d = 8192, 128, 64
print(f"N = {N:,}: FA1 moves {float(io.fa1_over_fa2(Tiling(N, N, B, B), d)):.2f} times the elements of FA2, with l and m")
print(f"twice the N: {float(io.growth('fa2', 'forward', N=N, B=B, d=d)):.2f} times the elements of FA2")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Three to two:** $3Bd : 2Bd$.
# </details>
#
# Below, step through the tiles yourself: FA1 or FA2, the sizes of the tiles, the mask. Look at o, $\ell$ and m: in FA1 they
# come and go, in FA2 they stay in registers.

# %% tags=["nbval-ignore-output", "hide-input"]
live("algorithm1")

# %% [markdown]
# **Takeaway.** With square tiles the swap saves a third of the requests. (With the tiles of 4 × 2 above it saved more.)
# They still grow with $N^2$.

# %% [markdown]
# ## Who has to wait for whom?
#
# There is a better reason for the swap. What does one pass of the outer loop need from the pass before? In `keys_outside`,
# a column block continues from the $o$, $\ell$ and $m$ that the one before has stored. In `queries_outside`, a row block
# needs nothing from another row block, so its loop is `trace.parallel`.
#
# **Predict.** A head has 8,192 queries in blocks of 128. How many workers can share it now?

# %% tags=["hide-input"]
print("workers for the small example:", len(before.by_worker()), "before,", len(after.by_worker()), "after")
print("8,192 queries in blocks of 128:", Tiling(8192, 8192, 128, 128).T_r)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **64**, one for each row block: 8,192 / 128. Before the swap there is one.
# </details>
#
# A worker becomes a thread block on the GPU. Heads never wait for each other, so FA1 has one worker for each head. An
# H200 has 132 SMs. With few heads, FA1 leaves most of them idle. Chapter 06 shows how much that costs.
#
# **Takeaway.** With queries outside, the row blocks are independent jobs. This is FA2's parallelism.

# %% [markdown]
# ## Do we have to divide in every step?
#
# Now the arithmetic. `divided_step` returns a finished answer after every tile. To go on, the next step must undo the
# division: it multiplies $o$ by the old $\ell$, and divides by the new one. Suppose we never divide inside the loop and
# keep the raw sum $o = \sum e^{s - m} v$, as in chapter 02.
#
# **Predict.** When a larger maximum turns up, what must happen to the raw sum $o$?

# %% tags=["hide-input"]
def raw_step(o, l, m, s, v):  # FA2's
    m_new = np.maximum(m, s.max(axis=1))
    shift = np.where(np.isneginf(m_new), 0, m_new)  # chapter 02: a row that has seen no key yet
    p = np.exp(s - shift[:, None])  # (B_r, B_c)
    alpha = np.exp(m - shift)  # (B_r,): 1 if the maximum did not change
    return alpha[:, None] * o + p @ v, alpha * l + p.sum(axis=1), m_new


O, l, m, _ = run(queries_outside, raw_step, Q, K, V, tiling)
error = np.abs(O / l[:, None] - dense).max()
print(f"divided once, at the end: largest difference from plain attention {error:.12f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **It shrinks**, by $\alpha = e^{m - m_{new}}$, and so does $\ell$: both are sums of $e^{s - m}$, and m has changed. Open the
# code: `raw_step` is five lines. FA1's β is gone, because p is taken relative to the new maximum from the start.
# </details>
#
# Why can the division wait? Look at what the loop reads: the old m, the old $\ell$ and the old $o$, and it multiplies both
# sums by the same $\alpha$. Nothing in it reads $o / \ell$. So one division after the last tile gives what a division in
# every tile would have given. The subtraction of m cannot wait: without it $e^s$ of this very tile overflows.
#
# The picture has the prices of operations, and one tile of 128 × 64 with d = 128, operation by operation. `divided_step` scales two blocks of 128 ×
# 128: the old output and the new part. `raw_step` scales one. So over 64 tiles, 128 scalings become 65: one in each tile,
# and one at the end.

# %%
show(deferred_normalisation.draw(**deferred_normalisation.data()))

# %% [markdown]
# **Takeaway.** Tweak 1: divide by $\ell$ once, after the last tile. The factor $\alpha$ has to stay.

# %% [markdown]
# ## What is that worth?
#
# Tweak 1 removes 0.4% of the 4.3 million operations of this tile. But the matrix products run on the tensor cores, all
# else on much slower units. This is FA1's tile on one SM of the A100, the chip of the FA2 paper:
#
# | operations of one tile | number | done per clock |
# | --- | ---: | ---: |
# | FLOPs of the two products, on tensor cores | 4,194,304 | 2,048 |
# | instructions on FP32 units | 58,368 | 64 |
# | exponentials, on special function units | 8,448 | 16 |
#
# (Each of 128 · 64 scores takes three instructions and an exponential. Each of FA1's two scalings takes 128 · 128
# instructions. Each row takes eight more, and two exponentials.)
#
# **Predict.** About 2% of the operations are not in the products. If the units take turns, what share of the clocks do
# these 2% take: about 2%, 10%, or 40%?

# %% tags=["hide-input"]
for chip in (chips.A100, chips.H100):
    FA1, FA2 = ([c.tensor, c.fp32, c.exp] for c in vars(time.tweak_1(chip, 128, 64, 128)).values())
    for name, clocks in (("FA1", FA1), ("FA2", FA2)):
        told = " + ".join(f"{c:5,.0f}" for c in clocks)
        print(f"{chip.name:13} {name}: {told} clocks, {1 - clocks[0] / sum(clocks):.0%} not in products")
    print(f"{'':13} {sum(FA1) / sum(FA2):.2f} times as fast in turns, {max(FA1) / max(FA2):.2f} all at the same time")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 40%.** The clocks are 2,048 for the products, 58,368 / 64 = 912 on the FP32 units, and 8,448 / 16 = 528 for the
# exponentials: (912 + 528) / 3,488 = 41%.
# </details>
#
# Tweak 1 lowers 912 clocks to 644, and 528 to 520. If the units take turns, the tile becomes 3,488 / 3,212 = 1.09 times
# as fast. If they all work at the same time, the tensor cores are the last to finish, and the tile becomes no faster. A
# real kernel lies between these ends. Chapter 10 measures where.
#
# **Takeaway.** Two percent of the operations can take two fifths of the time. Saving some of them helps only if something
# was waiting for the unit that did them.

# %% [markdown]
# ## The whole of Algorithm 1
#
# One change is left, tweak 2. FA1 keeps m and $\ell$ of each row for the backward pass. FA2 keeps one number instead, the
# $L = m + \log \ell$ of chapter 02.
#
# Here are both tweaks in the swapped loops. Without a mask, `visited_cols` names all column blocks and `hide` hides
# nothing. With one, a row may see no key at all: it ends with O = 0 and L = −∞.

# %%
def fa2_forward(Q, K, V, O, L, tiling, trace=UNWATCHED):
    tau = 1 / np.sqrt(Q.shape[1])
    for i in trace.parallel("i", range(tiling.T_r)):  # FA2.A1.L3
        rows = tiling.rows(i)
        q_i = Q[rows]  # FA2.A1.L4  (B_r, d)
        o_i, l_i, m_i = np.zeros(q_i.shape), np.zeros(len(q_i)), np.full(len(q_i), -np.inf)  # FA2.A1.L5
        for j in trace.serial("j", tiling.visited_cols(i)):  # FA2.A1.L6
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # FA2.A1.L7  (B_c, d)
            s_ij = tiling.hide(tau * (q_i @ k_j.T), i, j)  # FA2.A1.L8  (B_r, B_c)
            o_i, l_i, m_i = raw_step(o_i, l_i, m_i, s_ij, v_j)  # FA2.A1.L9 FA2.A1.L10
        l_i = np.where(l_i == 0, 1, l_i)  # a row without keys: O = 0, and L = m_i = −∞
        O[rows] = (1.0 / l_i)[:, None] * o_i  # FA2.A1.L12 FA2.A1.L14: one division a row
        L[rows] = m_i + np.log(l_i)  # FA2.A1.L13 FA2.A1.L15


# %% [markdown]
# **Predict.** Take 512 queries and keys, d = 64, and 8 × 8 tiles of 64 × 64. FA1 divides once for each row in each tile:
# 4,096 times. How many divisions does FA2 need?

# %% tags=["hide-input"]
big, squares = np.random.default_rng(1).standard_normal((3, 512, 64)), Tiling(512, 512, 64, 64)
final = Trace()
fa2_forward(*final.hbm(**dict(zip("QKV", big, strict=True)), O=np.empty((512, 64)), L=np.empty(512)), squares, final)
stages = {
    "FA1": run(keys_outside, divided_step, *big, squares)[-1],
    "+ queries outside": run(queries_outside, divided_step, *big, squares)[-1],
    "+ both tweaks: FA2": final,
}
print(f"{'':18}{'elements moved':>15}{'multiplications':>17}{'divisions':>11}")
for name, t in stages.items():
    print(f"{name:18}{t.hbm_elements:15,}{t.flops['multiply']:17,}{t.flops['divide']:11,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **512**, one for each row.
# </details>
#
# The swap lowers the elements moved. Tweak 2 saves 512 more: one number for each row instead of two.
#
# **Takeaway.** The order of the loops decides what moves. When o is divided decides the number of operations.

# %% [markdown]
# ## Which tiles does a causal mask leave?
#
# In a language model a query sees no later key: row r sees columns c ≤ r. This is the *causal mask*. There are three kinds
# of tiles: SKIP, where no query sees any key; FULL, where each query sees every key; and DIAGONAL, where the mask cuts
# through. FA1 (its Algorithm 2) computes and masks all of them.
#
# **Predict.** Take 8 × 8 scores in tiles of 2 × 2. How many of the 16 tiles can be skipped?

# %% tags=["hide-input"]
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
O, L = np.empty((8, 4)), np.empty(8)
fa2_forward(Q, K, V, O, L, square)
error = np.abs(O - naive.forward(Q, K, V, mask=CAUSAL)[0]).max()
print(f"10 of 16 tiles computed, 4 of them masked: largest difference from plain attention {error:.12f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Six.** Four lie on the diagonal, and six are full.
# </details>
#
# Two corners of a tile decide. If the bottom left corner is hidden, all is hidden: SKIP. If the top right corner is
# visible, all is visible: FULL. `visited_cols` leaves out the SKIP tiles. In DIAGONAL tiles `hide` sets hidden scores to
# $-\infty$, since $e^{-\infty} = 0$.
#
# Of T × T square tiles, T(T + 1)/2 are visited. In the bottom part of the picture this share falls to one half as N
# grows. (In the second grid the queries are the last 256 of 512 tokens; chapter 14 needs it.)

# %%
show(causal_tiles.draw(**causal_tiles.data()))

# %% [markdown]
# **Takeaway.** Whether a tile is skipped, masked, or computed without a mask is known before it is loaded. Skipping
# saves nearly half of them in a long text.

# %% [markdown]
# ## Recap
#
# - Queries outside: q, o, $\ell$ and m stay on the chip, k and v come by. With square tiles the chip requests a third less.
#   Row blocks need nothing from each other.
# - Tweak 1: no division inside the loop. One of two scalings of the output block goes; $\alpha$ stays.
# - Tweak 2: $L = m + \log \ell$ is all that the backward pass needs.
# - Causal: SKIP, DIAGONAL, FULL, decided at two corners.
#
# [The poster](../figures/poster_forward.pdf) has Algorithm 1 on one sheet. And here you choose the sizes: find a tile that
# moves less than 128 × 64 and still fits on the chip.

# %% tags=["nbval-ignore-output", "hide-input"]
live("tiles")

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A sliding window: row r sees columns c with r − w < c ≤ r. Write the test for tiles that nobody sees,
# in place of the `...`.
#
# <details><summary>Hint</summary>
#
# On the right it is the causal test. On the left, the first row sees furthest: down to column `rows.start - w + 1`. The
# tile's last column must lie before it.
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


# %% tags=["hide-input"]
def really_nobody(rows, cols, w):
    return not any(r - w < c <= r for r in range(rows.start, rows.stop) for c in range(cols.start, cols.stop))


uneven = Tiling(12, 12, 4, 3)
windows = [(uneven.rows(i), uneven.cols(j), w) for i in range(3) for j in range(4) for w in range(1, 13)]
if nobody_sees(*windows[0]) is ...:
    print("not written yet")
else:
    wrong = [t for t in windows if bool(nobody_sees(*t)) != really_nobody(*t)]
    print("right" if not wrong else f"not yet: rows {wrong[0][0]}, columns {wrong[0][1]}, window {wrong[0][2]}")

# %% [markdown]
# **2. Choose.** Of these rules for a causal mask one is right. Each of the others lets some query see the future. Write
# the letter of the right one, for example `"A"`, in place of the `...`.
#
# - `A`: skip tile (i, j) if `j * B_c > (i + 1) * B_r`, and mask only the tiles with i = j.
# - `B`: skip if `j * B_c >= (i + 1) * B_r`, and set hidden scores to 0 before the softmax.
# - `C`: skip if `j * B_c >= (i + 1) * B_r`, and set the hidden scores of DIAGONAL tiles to $-\infty$.
#
# <details><summary>Hint</summary>
#
# For A, try i = 0 and j = 1 with square tiles. For B: what is $e^0$?
# </details>
# <details><summary>Solution</summary>
#
# C. With A, the tile right of the diagonal is visited and not masked. With B, a hidden key gets the weight $e^{0 - m}$.
# </details>

# %%
answer = ...
print({"C": "right", ...: "not answered yet"}.get(answer, "not yet: this one lets the future in"))

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the text against the model.

# %% tags=["hide-input"]
O, l, m, ours = run(keys_outside, divided_step, Q, K, V, tiling)
packages = Trace()
theirs = fa1.forward(Q, K, V, B_r=4, B_c=2, trace=packages)
verdict("keys_outside with divided_step = fa1.forward", all(map(close, (O, l, m), theirs)))
verdict("and it moves the same elements in the same order", ours.events == packages.events)
for mask in (NO_MASK, CAUSAL):
    ours, packages = Trace(), Trace()
    watched = ours.hbm(Q=Q, K=K, V=V, O=np.empty((8, 4)), L=np.empty(8))
    fa2_forward(*watched, Tiling(8, 8, 4, 2, mask), ours)
    theirs = fa2.forward(Q, K, V, B_r=4, B_c=2, mask=mask, trace=packages)
    verdict(f"fa2_forward = fa2.forward, causal = {mask.causal}", all(map(close, watched[3:], theirs)))
    verdict("and it moves the same elements in the same order", ours.events == packages.events)
tilings = [Tiling(N, N, B_r, B_c, CAUSAL) for N, B_r, B_c in [(8, 2, 2), (12, 4, 3), (12, 3, 4), (13, 5, 4)]]
same = [kind(t, i, j) is t.kind(i, j) for t in tilings for i in range(t.T_r) for j in range(t.T_c)]
verdict("the corner tests = Tiling.kind, also for tiles that are not square", all(same))
chip, (old, new) = chips.A100, vars(time.tweak_1(chips.A100, 128, 64, 128)).values()
removed = (old.fp32 - new.fp32) * chip.fp32_per_clock + (old.exp - new.exp) * chip.exp_per_clock
verdict("tweak 1 removes 0.4% of 4.3 million operations", round(removed / 4.3e6, 3) == 0.004)

# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)
