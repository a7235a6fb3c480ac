# %% [markdown] tags=["navigation"]
# [← The backward pass](05_backward.ipynb) · [The map](00_start.ipynb) · [Warps →](07_warps.ipynb)

# %% [markdown]
# # 06 · Parallelism
#
# **Who works on which tiles, and who waits?**
#
# So far we have counted what one worker moves and computes. A GPU runs more than a hundred workers at the same time. The
# counts of chapters 03 to 05 do not say whether they all have something to do. That depends on one question: the
# iterations of which loop may run at the same time?
#
# After this notebook you can
#
# - say of a loop whether its iterations may run at the same time, and what goes wrong if they may not,
# - compute how many thread blocks a launch has, how many waves they take, and what share of the chip is idle,
# - name three remedies against idle processors: another loop, another order, and split keys.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [05 · The backward
# pass](05_backward.ipynb), for the section on dQ; [04 · FlashAttention-2, forward](04_fa2_forward.ipynb) for the rest.*

# %%
from heapq import heappop, heappush

import numpy as np

from fa2_lab.machine import chips, grid, io
from fa2_lab.plots import waves, workers
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, heads
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import CAUSAL, NO_MASK, Mask, Tiling
from fa2_lab.trace import Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## May row blocks be computed in any order?
#
# Starting a kernel is called a *launch*. Then many thread blocks run (chapter 00). A thread block is one worker. It
# gets a place on one of the SMs (an H100 has 132), keeps its state there, and leaves when it is done. The GPU promises
# no order, so none may rely on another one running.
#
# Below is what chapter 04 does for row block i, as a function of its own. `SoftmaxState` holds $o$, $\ell$ and $m$.
# `update` is the step of chapter 02, and `finalize` divides by $\ell$.
#
# **Predict.** There are 2 row blocks. We compute row block 1 first, then row block 0. How many of the 32 numbers of O
# change?


# %% tags=["hide-input"]
def row_block(i, key_blocks, Q, K, V, B_r=4, B_c=2):
    q_i = Q[i * B_r : (i + 1) * B_r]  # (B_r, d)
    state = SoftmaxState.reset(*q_i.shape)
    for j in key_blocks:
        cols = slice(j * B_c, (j + 1) * B_c)
        state = state.update(q_i @ K[cols].T / np.sqrt(Q.shape[1]), V[cols])
    return state.finalize()[0]  # (B_r, d)


Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
dense = safe_softmax(Q @ K.T / 2) @ V
O, reverse = np.empty((8, 4)), np.empty((8, 4))
for i in (0, 1):
    O[4 * i : 4 * i + 4] = row_block(i, range(4), Q, K, V)
for i in (1, 0):
    reverse[4 * i : 4 * i + 4] = row_block(i, range(4), Q, K, V)
print("numbers of O that change:", int((O != reverse).sum()), "of", O.size)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **None, to the last bit.** Row block 1 reads its own queries and writes its own rows of O. Nothing that row block 0
# does can reach it.
# </details>
#
# The loop inside is different. All key blocks of a row block update the same $o$, $\ell$ and $m$. They may come in any
# order, but they must meet in one state.
#
# **Takeaway.** Row blocks share nothing, so each of them can be a thread block of its own.

# %% [markdown]
# ## And the outer loop of FA1?
#
# FA1 has the key blocks outside. One iteration takes two of the 8 keys. It loads O, $\ell$ and m of every row, adds
# these keys, and stores O, $\ell$ and m again. Here is one iteration for all rows at once.
#
# **Predict.** We give each of the four iterations to a worker. All four read O before anyone has written. Worker 3 is the
# last to write. How many keys does the final O know of?


# %% tags=["hide-input"]
def column_block(j, O, l, m, B_c=2):  # (N_q, d), (N_q,), (N_q,)
    cols = slice(j * B_c, (j + 1) * B_c)
    s = Q @ K[cols].T / 2
    m_new = np.maximum(m, s.max(axis=1))
    alpha, p = np.exp(m - m_new), np.exp(s - m_new[:, None])
    l_new = alpha * l + p.sum(axis=1)
    return ((alpha * l)[:, None] * O + p @ V[cols]) / l_new[:, None], l_new, m_new


start = np.zeros((8, 4)), np.zeros(8), np.full(8, -np.inf)
state = start
for j in range(4):
    state = column_block(j, *state)
for j in range(4):
    together = column_block(j, *start)  # everyone reads the start; the last write stays
last_two = safe_softmax(Q @ K[6:].T / 2) @ V[6:]
for name, result in (("one after the other", state[0]), ("at the same time", together[0])):
    print(f"{name}: error {np.abs(result - dense).max():.3f}", end=", ")
    print(f"distance from attention over keys 6 and 7 alone: {np.abs(result - last_two).max():.3f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two.** The other three workers did their work and wrote it down. Then worker 3, which had read the old O, wrote over
# it. What is left is attention over keys 6 and 7, and nothing reports an error.
# </details>
#
# So FA1 gives a whole head to one thread block, which runs both loops alone.
#
# **Takeaway.** Iterations may run at the same time if each writes to places of its own, and none reads what another
# writes. FA2's outer loop is of this kind.

# %% [markdown]
# ## How many workers are there?
#
# A model computes several texts at once, its *batch*. Texts and heads are independent in both algorithms. In FA2 the
# row blocks are independent as well. In the package's NumPy files such a loop is written `trace.parallel`. NumPy still
# runs it one by one, but the meter notes which worker did what.
#
# **Predict.** Two texts with three heads each; 8 queries, in row blocks of 4. FA1 has 2 · 3 = 6 workers. How many has
# FA2?

# %% tags=["hide-input"]
q, k, v = np.random.default_rng(1).standard_normal((3, 2, 3, 8, 4))  # 2 texts, 3 heads
for stage in ("fa1", "fa2"):
    meter = Trace()
    heads.forward(q, k, v, stage=stage, B_r=4, B_c=2, trace=meter)
    seen = meter.by_worker()
    (each,) = {counts["matmul"] for counts in seen.values()}  # the same for all
    print(f"{stage}: {len(seen):2} workers × {each:,} matmul FLOPs = {meter.matmul_flops:,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Twelve.** Each head has $T_r = 2$ row blocks, so there are twice as many workers, and each has half of the work.
# </details>
#
# The last number of each line shows that the matmul FLOPs as a whole are the same.
#
# **Takeaway.** FA1 launches batch · heads thread blocks. FA2 launches batch · heads · $T_r$.

# %% [markdown]
# ## Six processors, by hand
#
# What is gained by more workers? No order is promised, but in practice the thread blocks wait in a line by their
# number, and the first SM that is free takes the next one. We may use that for speed, never for the result. We measure
# time in tiles.
#
# Take four heads of 4 × 4 tiles and six SMs. FA1 has 4 thread blocks of 16 tiles, so it ends at time 16, and two SMs
# get nothing.
#
# **Predict.** FA2 has 16 thread blocks of 4 tiles each. When does the last one end?


# %% tags=["hide-input"]
def run_on(SMs, costs):
    free = [(0, SM) for SM in range(SMs)]  # when each SM is free next; a heap, smallest first
    ran = []
    for cost in costs:  # in the order of the launch
        start, SM = heappop(free)
        ran.append((SM, start, start + cost))
        heappush(free, (start + cost, SM))
    return ran


def timeline(ran, SMs):
    for SM in range(SMs):
        spans = [f"{start:2}–{end:<2}" for at, start, end in ran if at == SM]
        print(f"  SM {SM} ", *(spans or [" idle"]))


for name, costs in (("FA1", [16] * 4), ("FA2", [4] * 16)):
    ran = run_on(6, costs)
    print(f"{name}: {len(costs)} thread blocks, the last one ends at {max(end for _, _, end in ran)}")
    timeline(ran, 6)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **At 12.** Six thread blocks run from 0 to 4, six from 4 to 8, and the last four from 8 to 12. In this third round two SMs
# wait.
# </details>
#
# Perfect sharing would end at 64 / 6 = 10⅔. A thread block cannot be cut in two, so the last round is rarely full.
#
# **Takeaway.** Equal thread blocks run in rounds, called *waves*. A launch takes ⌈thread blocks / SMs⌉ times the length of
# one thread block.

# %% [markdown]
# ## 132 processors
#
# Now real sizes: batch 1, 32 heads, 8,192 tokens, row blocks of 128, on an H100. FA1 launches 32 thread blocks, so at most
# a quarter of the SMs work. FA2 has 8,192 / 128 = 64 row blocks in each head, so it launches 32 · 64 = 2,048.
#
# **Predict.** 132 equal thread blocks keep all SMs busy. What share of the SMs' time is used with 133?


# %% tags=["hide-input"]
def busy(blocks, SMs):
    rounds = -(-blocks // SMs)  # rounded up
    return rounds, blocks / (rounds * SMs)


H100, A100 = chips.H100.SMs, chips.A100.SMs
cases = [("FA1, 32 heads", 32), ("FA2, 32 heads of 64 row blocks", 32 * 64)]
cases += [("one thread block for each SM", 132), ("and one more", 133)]
for name, blocks in cases:
    rounds, share = busy(blocks, H100)
    print(f"{name:31} {blocks:5,} thread blocks, waves: {rounds:2}, busy: {share:4.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Half.** The second wave consists of one thread block. 131 SMs wait for it, and the launch takes twice as long.
# </details>
#
# With 16 waves, as in the second line, a poor last wave weighs little. The effect is called *wave quantization*. The
# model leaves out that several thread blocks may share an SM, and that all share the memory. Chapter 10 measures.
#
# **Takeaway.** No count of bytes or FLOPs shows idle SMs. FA1 and FA2 compute the same products here, and FA1 uses a
# quarter of the chip.

# %% [markdown]
# ## Why not make row blocks much smaller?
#
# A single head of 8,192 queries in row blocks of 128 gives 64 workers for 132 SMs. Smaller row blocks would give more.
#
# **Predict.** Every worker loads all of K and V. If $B_r$ goes from 128 to 64, by what factor do the requests for K and V
# grow?

# %% tags=["hide-input"]
print(" B_r  blocks  waves  busy  elements requested")
for B_r in (128, 64, 32, 16):
    tiling = Tiling(N_q=8192, N_k=8192, B_r=B_r, B_c=64)
    rounds, share = busy(tiling.T_r, H100)
    print(f"{B_r:4}  {tiling.T_r:6}  {rounds:5}  {share:4.0%}  {io.fa2_forward(tiling, d=128).total:18,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two.** There are twice as many workers, and each of them loads as much as before.
# </details>
#
# At $B_r = 64$ the chip is as busy as it gets, for twice the requests. Below that, requests double again and nothing is
# gained: a thread block of half the rows takes half the time, so two waves last as long as one before. (L2 answers many
# of these requests. The numbers still have to come from L2 to each SM.)
#
# **Takeaway.** Large row blocks reuse what they load, small row blocks make workers. Take the largest row blocks that keep the SMs busy.

# %% [markdown]
# ## What if thread blocks are not equal?
#
# Under the causal mask, with as many queries as keys and square tiles, row block i has i + 1 tiles. Take two heads of
# 4 row blocks on three SMs. In the order of the rows, head by head, they have 1, 2, 3, 4, 1, 2, 3, 4 tiles. These are
# 20 tiles on three SMs, so no order can end before 7.
#
# **Predict.** In which order would you launch them?

# %% tags=["hide-input"]
costs = [i + 1 for head in range(2) for i in range(4)]
for name, order in (("row by row", costs), ("heaviest first", sorted(costs, reverse=True))):
    ran = run_on(3, order)
    print(f"{name}: the last thread block ends at {max(end for _, _, end in ran)}")
    timeline(ran, 3)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The longest first.** A long thread block that starts late ends late, and the others wait for it. If it starts first, the
# short ones fill the gaps at the end.
# </details>
#
# The picture shows batch 1, 32 heads and 2,048 tokens, in blocks of 128, on 132 SMs. Each line is one SM, and the grey
# changes where a new thread block starts. Compare the ends of the two upper panels: FA1 takes four times as long as
# FA2 (16 · 16 tiles in each thread block). The two lower panels have the causal mask. In the third, the row blocks of
# each head start from first to last, head by head. In the fourth, the longest of all heads start first, and the ragged
# edge becomes nearly straight.

# %%
show(waves.draw(**waves.data()))

# %% [markdown]
# Here you choose the SMs, the heads and the mask. For which numbers of SMs does the order make no difference?

# %% tags=["nbval-ignore-output", "hide-input"]
live("timetable")

# %% [markdown]
# **Takeaway.** If thread blocks are unequal, launch the longest first. The work is the same, and the end comes sooner.

# %% [markdown]
# ## What does a worker own in the backward pass?
#
# Chapter 05 puts the key blocks outside: $dk_j$ and $dv_j$ stay on the chip, and the queries come by. So a worker takes a
# column of tiles, and dQ gets parts from all workers. The table says to which block of dQ each worker adds, step by step.
# Read it downwards.


# %% tags=["hide-input"]
def dq_steps(tiling):  # [j, t]: the block of dQ that worker j adds to in its step t
    rows = [tiling.visited_rows(j) for j in range(tiling.T_c)]  # the row blocks whose tile in column j is not skipped
    steps = np.full((tiling.T_c, max(map(len, rows))), -1)
    for j, visited in enumerate(rows):
        steps[j, : len(visited)] = visited
    return steps


for name, mask in (("all keys", NO_MASK), ("causal", CAUSAL)):
    print(f"{name}: the block of dQ that each worker adds to, step by step")
    for j, row in enumerate(dq_steps(Tiling(16, 16, 4, 4, mask))):
        print(f"  worker {j}:", *("  . " if i < 0 else f"dQ_{i}" for i in row))

# %% [markdown]
# Without a mask, all four workers add to the same block of dQ in the same step. Under the causal mask they do not meet
# in this table, but real workers do not keep step, so they can meet there as well. So the additions must be atomic, or
# a second pass computes dQ (chapter 05).
#
# The picture follows figure 2 of the FA2 paper and counts workers from 1. Compare the small squares on the right: one
# writer for each block of O, up to four for each block of dQ.

# %%
show(workers.draw(**workers.data()))

# %% [markdown]
# **Takeaway.** Forward, a worker owns rows and shares nothing. Backward, it owns columns, and all workers add into dQ.

# %% [markdown]
# ## One query, many keys
#
# A model that writes a text computes one new query at a time against all keys so far. This is called *decoding*. One
# query is one row block, so FA2 is back at one worker per head. The loop over keys is the only one left. Its iterations
# share a state, but chapter 02 can merge states that never met.
#
# **Predict.** 8,192 keys in 64 blocks, 32 heads, 132 SMs. We split the keys of each head into 5 parts instead of 4. Does
# the launch end sooner?

# %% tags=["hide-input"]
q_1, K_long, V_long = (np.random.default_rng(2).standard_normal((n, 128)) for n in (1, 8192, 8192))
whole, _ = fa2.forward(q_1, K_long, V_long, B_r=1, B_c=128)
for splits in (1, 4, 5, 8):
    meter = Trace()
    O, _ = fa2.forward_split_keys(q_1, K_long, V_long, splits=splits, B_r=1, B_c=128, trace=meter)
    costs = [len(part) for head in range(32) for part in np.array_split(range(64), splits)]
    end = max(end for _, _, end in run_on(H100, costs))
    extra = sum(meter.loads(part) + meter.stores(part) for part in ("O_part", "L_part"))
    print(
        f"parts: {splits}, workers: {32 * splits:3}, end: {end:2}, error of O {np.abs(O - whole).max():.3f},", end=" "
    )
    print(f"partial results: {extra / meter.hbm_elements:.2%} of all elements moved")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No, later.** 4 parts give 128 workers of 16 tiles: one wave. 5 parts give 160 workers of 12 or 13 tiles, and the
# last 28 of them need a second wave.
# </details>
#
# 8 parts take two short waves and end at the same time as 4 parts. The parts meet through HBM: each writes its O
# (already divided by $\ell$) and its L, and a second small kernel merges them. The last number of each line shows how
# little that is. Chapter 14 builds it.
#
# **Takeaway.** With too few rows, split the keys and merge, as in chapter 02, but among thread blocks. This is called
# *split-KV*.

# %% [markdown]
# ## Recap
#
# - A thread block is a worker that can rely on no other. The iterations of a loop may run at the same time if they write to
#   different places, and none reads what another writes.
# - FA1 has batch · heads workers. FA2 has $T_r$ times as many forward (rows), and $T_c$ times as many backward (columns).
# - Equal thread blocks take ⌈thread blocks / SMs⌉ waves. In the last wave some SMs are often idle.
# - Unequal thread blocks: launch the longest first.
# - Backward workers meet on dQ: atomic additions, or a second pass.
# - Few rows and many keys: split the keys, merge the parts.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** One thread block should take *two* row blocks of a causal head, so that all thread blocks are equally
# long. Which row block goes with row block i? Write it in place of the `...`.
#
# <details><summary>Hint</summary>
#
# Row block i has i + 1 tiles. You want two numbers with the same sum every time.
# </details>
# <details><summary>Solution</summary>
#
# `return T - 1 - i`: the first with the last, the second with the last but one. Every pair has T + 1 tiles.
# </details>


# %%
def partner(i, T):
    return ...


# %% tags=["hide-input"]
T = 8
if partner(0, T) is ...:
    print("not written yet; row block 0 has 1 tile, row block 7 has 8")
else:
    pairs = [(i, partner(i, T)) for i in range(T // 2)]
    tiles = [i + 1 + k + 1 for i, k in pairs]
    taken = sorted(i for pair in pairs for i in pair)
    print("pairs:", pairs, " tiles of each pair:", tiles)
    if taken != list(range(T)):
        print("not yet: row blocks nobody takes:", sorted(set(range(T)) - set(taken)))
    else:
        print("right" if len(set(tiles)) == 1 else "not yet: the pairs are not equally long")

# %% [markdown]
# **2. Complete.** There is no mask. Four backward workers start together. Worker j may visit the row blocks in an order
# of its own. Find orders such that no two workers ever add to the same block of dQ in the same step.
#
# <details><summary>Hint</summary>
#
# Let worker j begin at row block j.
# </details>
# <details><summary>Solution</summary>
#
# `return [(j + t) % T for t in range(T)]`: everybody goes round, each from another start. Real workers do not keep step, so
# the additions must be atomic all the same. But they seldom wait for each other.
# </details>


# %%
def rows_of_worker(j, T):
    return ...  # a list of all T row blocks


# %% tags=["hide-input"]
T = 4
orders = [rows_of_worker(j, T) for j in range(T)]
if orders[0] is ...:
    print("not written yet; if all begin at row block 0, all four meet in every step")
elif any(sorted(order) != list(range(T)) for order in orders):
    print("not yet: every worker must visit each of the row blocks 0 to 3 once; yours:", orders)
else:
    met = [(t, i) for t in range(T) for i in range(T) if sum(order[t] == i for order in orders) > 1]
    print("right" if not met else f"not yet: in step {met[0][0]} workers meet on dQ_{met[0][1]}")

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against dense attention: ragged blocks, huge
# scores, every grid.

# %% tags=["hide-input"]
rng = np.random.default_rng(4)
Q_r, K_r, V_r = rng.standard_normal((3, 13, 4))
O, want = np.full((13, 4), np.nan), safe_softmax(1e4 * Q_r @ K_r.T / 2) @ V_r
for i in rng.permutation(4):
    O[4 * i : 4 * i + 4] = row_block(i, range(7), 1e4 * Q_r, K_r, V_r)
package, _ = fa2.forward(1e4 * Q_r, K_r, V_r, B_r=4, B_c=2)
verdict(
    "row blocks in any order = fa2.forward = dense, ragged, huge scores", close(O, package) and close(package, want)
)
parts, _ = fa2.forward_split_keys(Q_r, K_r, V_r, splits=3, B_r=4, B_c=2, mask=CAUSAL)
S = np.where(np.tri(13, dtype=bool), Q_r @ K_r.T / 2, -np.inf)
verdict("split keys, merged = dense, causal and ragged", close(parts, safe_softmax(S) @ V_r))
for SMs in (1, 3, 7):
    costs = rng.integers(1, 20, size=40).tolist()
    placed = [(p.SM, p.start, p.end) for p in grid.schedule([grid.Block(0, None, cost) for cost in costs], SMs).placed]
    verdict(f"run_on = grid.schedule, {SMs} SMs", placed == run_on(SMs, costs))
sizes = [(blocks, SMs) for blocks in (1, 80, 132, 133, 2048) for SMs in (6, 108, 132)]
formulas = [(grid.waves(*size), grid.efficiency(*size)) for size in sizes]
verdict("busy = grid.waves and grid.efficiency", formulas == [busy(*size) for size in sizes])
uneven = [Tiling(14, 22, 4, 3, mask) for mask in (NO_MASK, CAUSAL, Mask(True, 17))]
verdict("dq_steps = grid.dq_steps", all(np.array_equal(dq_steps(t), grid.dq_steps(t)) for t in uneven))

# %% [markdown] tags=["navigation"]
# [← The backward pass](05_backward.ipynb) · [The map](00_start.ipynb) · [Warps →](07_warps.ipynb)
