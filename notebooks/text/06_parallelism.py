# %% [markdown] tags=["navigation"]
# [← The backward pass](05_backward.ipynb) · [The map](00_start.ipynb) · [Warps →](07_warps.ipynb)

# %% [markdown]
# # 06 · Parallelism
#
# **Who works on which tiles, and who waits?**
#
# Notebooks 03 to 05 counted what one worker moves and computes. A GPU has room for more than a hundred at once. Whether
# they all have something to do is decided by a question that no formula has asked so far: which of the loops may be handed
# out?
#
# After this notebook you can
#
# - say for any loop whether its iterations may run at the same time, and what goes wrong if they may not,
# - compute in your head how many thread blocks a launch has, how many rounds they take, and how much of the chip is idle,
# - explain three remedies for idle processors: a loop to hand out, the order of the launch, and a split of the keys.
#
# *Time: 30 minutes. Hardware: any laptop, NumPy alone. Before this: [05 · The backward pass](05_backward.ipynb).*

# %%
from heapq import heappop, heappush
from itertools import permutations

import numpy as np

from fa2_lab.machine import chips, grid, io
from fa2_lab.paper import where
from fa2_lab.plots import waves, workers
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, heads
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, NO_MASK, Mask, Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## Which loop may be handed out?
#
# A GPU runs a kernel as many *thread blocks*. A thread block is one worker: it gets a place on one of the chip's
# processors (an *SM*, streaming multiprocessor; an H100 has 132), keeps its state there, and leaves when it is done.
# Workers start in any order, whenever there is room, and none may count on another one running.
#
# Below is the body of FA2's outer loop: what notebook 04 does for row block `i`, with the order of the key blocks left
# open.
#
# **Predict.** 2 row blocks, 4 column blocks. We compute row block 1 before row block 0; then we visit the key blocks in
# every possible order. Which of the two can change the last bit of the result?

# %%
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
print("row blocks in either order, the same bits:", np.array_equal(O, reverse))
shuffled = [[row_block(i, order, Q, K, V) for i in (0, 1)] for order in permutations(range(4))]
right = [close(np.vstack(o), dense) for o in shuffled]
print("key blocks in", len(right), "orders, right but for rounding:", all(right))

# %% [markdown]
# <details><summary>Which one touches the bits</summary>
#
# Order never changes what is computed for a row block, because row blocks share nothing: the same bits. Key blocks meet in
# one state. Their order is free in mathematics (merging does not care, notebook 02), but sums are rounded in another
# order, so the last bits may move. And there must be one state to meet in.
# </details>
#
# **Takeaway.** Row blocks need nothing from each other, so each may become a worker of its own.

# %% [markdown]
# ## And FA1's outer loop?
#
# FA1 has the key blocks outside. One iteration takes O, l and m of every row from HBM, works in its two keys, and
# writes them back. Here it is, for all rows at once.
#
# **Predict.** We give each of the four iterations to a worker. All read the state before any has written; the last one
# to write is worker 3. What will O contain?

# %%
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
print("one after the other:", close(state[0], dense))
for j in range(4):
    together = column_block(j, *start)  # everybody has read the start; the last one's writes stay
print("at the same time:", close(together[0], dense))
last_two = safe_softmax(Q @ K[6:].T / 2) @ V[6:]
print("what is left is attention over keys 6 and 7:", close(together[0], last_two))

# %% [markdown]
# <details><summary>What happened to keys 0 to 5?</summary>
#
# Their workers did their work and wrote it, and worker 3, which had read the old state, wrote over it. Every worker's O
# is a correct answer for its own two keys; nobody has merged them. That is why FA1 gives a whole head to one thread block
# and lets it run both loops.
# </details>
#
# **Takeaway.** A loop may be handed out if its iterations write to different places. FA2 swaps the loops so that the
# outer one is such a loop.

# %% [markdown]
# ## Which word moved?
#
# In the package's NumPy files a loop is either `trace.serial` or `trace.parallel`. Both run one after the other, since
# NumPy has one worker; the meter writes down who would have done what. Batch entries and heads are `parallel` for
# everyone. The rest is four lines.
#
# **Predict.** Two sequences, three heads, 8 queries and keys, B_r = 4, B_c = 2. How many workers has FA1, how many FA2,
# and what does each one compute?

# %%
for tag in ("FA1.A2.L6", "FA1.A2.L8", "FA2.A1.L3", "FA2.A1.L6"):
    print(f"{tag}  {where(tag).numpy[0].text.split('  #')[0]}")
q, k, v = np.random.default_rng(1).standard_normal((3, 2, 3, 8, 4))  # 2 sequences, 3 heads
for stage in ("fa1", "fa2"):
    meter = Trace()
    heads.forward(q, k, v, stage=stage, B_r=4, B_c=2, trace=meter)
    seen = meter.by_worker()
    (each,) = {counts["matmul"] for counts in seen.values()}  # the same for all
    print(f"{stage}: {len(seen):2} workers × {each:,} matmul FLOPs = {meter.matmul_flops:,}")

# %% [markdown]
# FA1's workers are numbered (batch, head), FA2's (batch, head, i): T_r times as many, each with 1/T_r of the work. The
# total is the same, to the operation.
#
# **Takeaway.** FA1 launches batch · heads thread blocks; FA2 launches batch · heads · T_r.

# %% [markdown]
# ## Six processors, by hand
#
# What is it worth to have more workers? The rule of the machine is short: a *launch* puts its blocks in line, and
# whichever SM is free first takes the next one. We count time in tiles.
#
# **Predict.** Four heads of 4 × 4 tiles, six SMs. FA1 brings 4 blocks of 16 tiles, FA2 16 blocks of 4 tiles. When does
# the last block end in each case? What would perfect sharing give?

# %%
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
    print(f"{name}: {len(costs)} blocks, the last one ends at {max(end for _, _, end in ran)}")
    timeline(ran, 6)

# %% [markdown]
# <details><summary>Perfect sharing, and why nobody reaches it</summary>
#
# 64 tiles on 6 SMs would take 10⅔. FA1 needs 16, because two SMs get nothing. FA2 needs 12: two full rounds, and a third
# in which four blocks run and two SMs wait. A block cannot be shared between SMs, so the last round is rarely full.
# </details>
#
# **Takeaway.** Equal blocks run in rounds, called *waves*: the launch takes ⌈blocks / SMs⌉ times the length of a block.

# %% [markdown]
# ## A hundred and thirty-two processors
#
# Now the sizes that people run. One long conversation: batch 1, 32 heads, 8,192 tokens, row blocks of 128. Beside it,
# numbers of blocks just below and just above the number of SMs.
#
# **Predict.** Which share of an H100 is busy with 32 blocks? With 2,048? With 132, and with 133? The FA2 paper calls one
# block per head efficient from about 80 blocks on, for the 108 SMs of an A100: what share is that?

# %%
def busy(blocks, SMs):
    rounds = -(-blocks // SMs)
    return rounds, blocks / (rounds * SMs)


H100, A100 = chips.H100.SMs, chips.A100.SMs
cases = [("FA1, 32 heads", 32, H100), ("FA2, 32 heads of 64 row blocks", 32 * 64, H100)]
cases += [("one block for each SM", 132, H100), ("and one more", 133, H100)]
cases += [("the paper's 80", 80, A100), ("109 heads", 109, A100)]
for name, blocks, SMs in cases:
    rounds, share = busy(blocks, SMs)
    print(f"{name:31} {blocks:5,} blocks on {SMs} SMs, waves: {rounds:2}, busy: {share:4.0%}")

# %% [markdown]
# <details><summary>What these numbers are, and what they leave out</summary>
#
# They are the share of SM time in which a block runs, if all blocks take equally long and each SM runs one. With
# 133 blocks the second wave is a single block, and the launch takes twice as long as with 132. So "more is better" holds
# only on average: after many waves the last one weighs little, 97% here. The 80 of the paper is a rule of thumb, worth
# 74%, and 109 heads are worse.
#
# Left out: several blocks that share one SM and slow each other down, memory bandwidth, and the time of the launch
# itself. Notebook 10 measures.
# </details>
#
# **Takeaway.** Idle SMs do not show in any count of bytes or FLOPs: FA1 and FA2 do the same products, and one of them
# uses a quarter of the chip.

# %% [markdown]
# ## Why not much smaller blocks?
#
# A single head of 8,192 queries, row blocks of 128: 64 workers for 132 SMs. Smaller row blocks would make more workers.
#
# **Predict.** What do smaller row blocks cost? (Each worker reads all keys and all values.) Which B_r would you take?

# %%
print(" B_r  blocks  waves  busy  elements between HBM and chip")
for B_r in (128, 64, 32, 16):
    tiling = Tiling(N_q=8192, N_k=8192, B_r=B_r, B_c=64)
    rounds, share = busy(tiling.T_r, H100)
    print(f"{B_r:4}  {tiling.T_r:6}  {rounds:5}  {share:4.0%}  {io.fa2_forward(tiling, d=128).total:13,}")

# %% [markdown]
# <details><summary>Which one, then?</summary>
#
# 64: it doubles the share of busy SMs and doubles the traffic. Below that there is nothing left to gain, and the traffic
# keeps doubling, because T_r workers read K and V. Not all of it reaches the HBM (an H100 has 50 MiB of cache that all
# SMs share), but it has to be moved to each SM all the same.
# </details>
#
# **Takeaway.** Large blocks reuse what they load, small blocks make workers: take the largest that keeps the SMs busy.

# %% [markdown]
# ## The backward pass hands out columns
#
# In notebook 05 the backward pass has the key blocks outside: dk_j and dv_j stay on chip while the queries stream past.
# So there a worker takes a column of tiles. This is the paper's figure 2, drawn from the tilings that the code uses (the
# picture counts workers from 1, as the paper does; the code from 0).
#
# **Predict.** In the forward pass each block of O has one writer. In the backward pass there are dQ, dK and dV: which of
# them has a single writer for each block?

# %%
def owners(tiling, direction):
    who = np.full((tiling.T_r, tiling.T_c), -1)  # −1: nobody, the tile is skipped
    for i in range(tiling.T_r):
        for j in tiling.visited_cols(i):
            who[i, j] = i if direction == "forward" else j
    return who


square = {causal: Tiling(16, 16, 4, 4, Mask(causal=causal)) for causal in (False, True)}
who = {(way, causal): owners(square[causal], way) for way in ("forward", "backward") for causal in square}
adds_to_dQ = {causal: [row[row >= 0].tolist() for row in who["backward", causal]] for causal in square}
show(workers.draw(who, adds_to_dQ))

# %% [markdown]
# <details><summary>Why not hand out rows in the backward pass as well?</summary>
#
# Then dQ_i would have one writer, and dK_j and dV_j would have many. Five products feed three results, one summed over
# keys (dQ) and two over queries (dK, dV), so whichever way one cuts, something is shared. Columns share one result
# instead of two. The other way out is two passes: columns for dK and dV, then rows for dQ, with S and dP computed twice.
# </details>
#
# **Takeaway.** Forward, a worker owns rows and meets nobody; backward, it owns columns and meets others on dQ.

# %% [markdown]
# ## When do they meet?
#
# Four column workers start together and walk down the rows, one tile per step. The table says into which block of dQ
# each one adds at each step.
#
# **Predict.** How many add into the same block at the same moment without a mask, and how many under the causal one?

# %%
def dq_steps(tiling, first=lambda j: 0):  # `first`: where in its list of rows worker j begins
    rows = [tiling.visited_rows(j) for j in range(tiling.T_c)]
    rows = [visited[first(j) :] + visited[: first(j)] for j, visited in enumerate(rows)]
    steps = np.full((tiling.T_c, max(map(len, rows))), -1)
    for j, visited in enumerate(rows):
        steps[j, : len(visited)] = visited
    return steps


def meetings(steps):  # at each step, the most workers on one block of dQ
    return [max(int(np.sum(step == i)) for i in step if i >= 0) for step in steps.T]


full, causal = dq_steps(square[False]), dq_steps(square[True])
rotated = dq_steps(square[False], first=lambda j: j)
for name, steps in (("all keys", full), ("causal", causal), ("all keys, rotated", rotated)):
    print(f"{name}: most workers on one block of dQ, step by step: {meetings(steps)}")
    for j, row in enumerate(steps):
        print(f"  worker {j}:", *("  . " if i < 0 else f"dQ_{i}" for i in row))

# %% [markdown]
# Without a mask all four queue at the same block. The causal workers begin at their own diagonal, and the rotated ones
# spread by design. But real workers do not march in step, so whoever may meet has to add safely: line 15 as printed
# (FA2.A2.L15: load, add, write back) loses parts, as notebook 05 has shown, and the paper's section 3.2 asks for atomic
# adds.
#
# **Takeaway.** An atomic add makes a meeting safe, and a good order of the rows makes it rare; only two passes avoid it.

# %% [markdown]
# ## Unequal blocks, and who comes last
#
# Under the causal mask row block i of a square has i + 1 tiles. Waves are no longer even, and the order of the launch
# begins to matter.
#
# **Predict.** Two heads of 4 row blocks on three SMs: 20 tiles, so no launch can end before 7. Row by row the blocks
# come with 1, 2, 3, 4, 1, 2, 3, 4 tiles. When does the last one end? In which order would you launch them?

# %%
costs = [i + 1 for head in range(2) for i in range(4)]
for name, order in (("row by row", costs), ("heaviest first", sorted(costs, reverse=True))):
    ran = run_on(3, order)
    print(f"{name}: the last block ends at {max(end for _, _, end in ran)}")
    timeline(ran, 3)

# %% [markdown]
# At real size: batch 1, 32 heads, 2,048 tokens, blocks of 128, on 132 SMs. Each bar is a thread block; its colour says
# whether it is its SM's first, second, third or fourth (then the colours start over). Above, without a mask, FA1 takes
# four times as long as FA2 for the same work. Below, the causal tail.

# %%
full, causal = (Tiling(2048, 2048, 128, 128, mask) for mask in (NO_MASK, CAUSAL))
launches = {
    "FA1": grid.fa1_grid(32, full),
    "FA2": grid.fa2_grid(32, full),
    "FA2 causal, launched row by row": grid.fa2_grid(32, causal),
    "FA2 causal, heaviest blocks first": grid.fa2_grid(32, causal, order="heaviest first"),
}
ran = {name: grid.schedule(blocks, H100) for name, blocks in launches.items()}
show(waves.draw(heads=32, ran=ran))

# %% [markdown]
# <details><summary>Why heaviest first works, and what the backward pass does</summary>
#
# A long block that starts late finishes late, alone. Started first, its end is hidden behind the short ones, which fill
# the gaps like sand after stones. (For scheduling in general Graham showed in 1969 that this rule is never more than a
# third longer than the best possible order.) The package's Triton kernel counts the row blocks of a causal head
# backwards for this reason. In the causal backward pass columns run from heavy to light anyway: the first key is seen by
# everybody.
# </details>
#
# **Takeaway.** With unequal blocks, launch the longest first: the work is the same and the tail gets shorter.

# %% [markdown]
# ## One query, many keys
#
# When a model writes a text it computes one new query at a time against all keys so far: *decoding*. One query is one
# row block, so FA2 is back at 32 workers. The only loop left is the one over keys, whose iterations share a state. But
# notebook 02 said how to join states that never met: merge.
#
# **Predict.** 8,192 keys in 64 blocks, 32 heads, 132 SMs. Into how many parts would you split the keys of each head: 4,
# 5 or 8?

# %%
q_1, K_long, V_long = (np.random.default_rng(2).standard_normal((n, 128)) for n in (1, 8192, 8192))
whole, _ = fa2.forward(q_1, K_long, V_long, B_r=1, B_c=128)
for splits in (1, 4, 5, 8):
    meter = Trace()
    O, _ = fa2.forward_split_keys(q_1, K_long, V_long, splits=splits, B_r=1, B_c=128, trace=meter)
    tiles = [len(part) for part in np.array_split(range(64), splits)]
    ran = grid.schedule([grid.Block(h, part, n) for h in range(32) for part, n in enumerate(tiles)], H100)
    extra = sum(meter.loads(part) + meter.stores(part) for part in ("O_part", "L_part"))
    print(f"parts: {splits}, workers: {32 * splits:3}, waves: {ran.waves}, end: {ran.makespan:2.0f},", end=" ")
    print(f"partial results: {extra / meter.hbm_elements:.2%} of traffic, same O: {close(O, whole)}")

# %% [markdown]
# <details><summary>Four, five or eight?</summary>
#
# Four: 128 workers fit in one wave. Five make 160, a second wave for the last 28, and the launch takes longer than with
# four although every worker has less to do. Eight take two short waves, and as long as four. (Counted in tiles; the
# kernel in notebook 14 waits for HBM, and has a clock.)
#
# A popular write-up says that handing out the key loop would send the reduction through HBM and undo the reason for
# FlashAttention. It does go through HBM, (d + 1) numbers for each row and part, written and read once, and no N × N
# matrix is among them. With few rows it is next to nothing; with many rows it is not needed.
# </details>
#
# **Takeaway.** When there are too few rows, split the keys and merge: the same operator, one level further out.

# %% [markdown]
# ## Recap
#
# - A thread block is a worker that can rely on no other. A loop may be handed out if its iterations write apart.
# - FA1: batch · heads workers. FA2: times T_r forward (rows), times T_c backward (columns).
# - Equal blocks take ⌈blocks / SMs⌉ waves; the last wave is where SMs idle.
# - Backward workers meet on dQ: atomic adds, or a second pass.
# - Causal blocks are unequal: launch the heaviest first.
# - Few rows and many keys: split the keys, merge the parts.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** An A100 (108 SMs), batch 2, 16 heads, 4,096 tokens, row blocks of 128. How many blocks and waves has
# FA1, how many FA2, and which share is busy? How much faster is FA2 in this model?
#
# <details><summary>Hint</summary>
# 2 · 16 heads; 4,096 / 128 = 32 row blocks.
# </details>
# <details><summary>Answer</summary>
#
# FA1: 32 blocks, 1 wave, 30%. FA2: 1,024 blocks, 10 waves, 95%. One FA1 block is as long as 32 FA2 blocks, so 32 against
# 10: 3.2 times faster.
# </details>
#
# **2. Complete.** Instead of one thread block per row block, launch half as many, each taking *two* row blocks of a causal
# head, so that all are equally long. Which two? Replace the line in `partner` until the last line shows equal numbers and
# every row block occurs once.

# %%
def partner(i, T):
    return i + T // 2  # replace this line


T = 8
pairs = [(i, partner(i, T)) for i in range(T // 2)]
print("pairs:", pairs)
print("tiles of each pair:", [(i + 1) + (k + 1) for i, k in pairs])

# %% [markdown]
# <details><summary>Hint</summary>
# The tiles of row block i are i + 1. You want two numbers with the same sum every time.
# </details>
# <details><summary>Answer</summary>
#
# `return T - 1 - i`: the first with the last, the second with the last but one, and every pair has T + 1 tiles. It gives
# equal blocks without sorting, at the price of half the workers.
# </details>
#
# **3. Break and fix.** The grid below is computed with a plain division. Before you run it: which rows of O are never
# written, and what would a test that looks at shapes alone say?
#
# <details><summary>Hint</summary>
# How many row blocks of 4 do 10 queries need?
# </details>

# %%
Q_10, K_10, V_10 = np.random.default_rng(3).standard_normal((3, 10, 4))
O = np.full((10, 4), np.nan)  # poisoned, so that what nobody writes is seen
for i in range(10 // 4):
    O[4 * i : 4 * i + 4] = row_block(i, range(5), Q_10, K_10, V_10)
print("shape:", O.shape, " rows that nobody wrote:", np.flatnonzero(np.isnan(O).any(axis=1)).tolist())

# %% [markdown]
# <details><summary>Answer</summary>
#
# 10 queries in blocks of 4 are three row blocks, the last one with two rows: the grid is ⌈N / B_r⌉, rounded up. With
# `range(3)` rows 8 and 9 appear, and the slices of NumPy shorten themselves; a GPU kernel must mask the missing rows.
# The shape was right all along. That is why kernels are tested on outputs filled with NaN, and on ragged lengths.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against dense attention: ragged blocks, huge
# scores, every grid.

# %%
rng = np.random.default_rng(4)
Q_r, K_r, V_r = rng.standard_normal((3, 13, 4))
for size in (1.0, 1e4):
    O = np.full((13, 4), np.nan)
    for i in rng.permutation(4):
        O[4 * i : 4 * i + 4] = row_block(i, range(7), size * Q_r, K_r, V_r)
    want = safe_softmax(size * Q_r @ K_r.T / 2) @ V_r
    package, _ = fa2.forward(size * Q_r, K_r, V_r, B_r=4, B_c=2)
    same = close(O, package) and close(package, want)
    verdict(f"row blocks in any order = fa2.forward = dense, ragged, scores of size {size:g}", same)
parts, _ = fa2.forward_split_keys(Q_r, K_r, V_r, splits=3, B_r=4, B_c=2, mask=CAUSAL)
S = np.where(np.tri(13, dtype=bool), Q_r @ K_r.T / 2, -np.inf)
verdict("split keys, merged = dense, causal and ragged", close(parts, safe_softmax(S) @ V_r))

# %%
for SMs in (1, 3, 7):
    costs = rng.integers(1, 20, size=40).tolist()
    package = grid.schedule([grid.Block(0, None, cost) for cost in costs], SMs)
    placed = [(p.SM, p.start, p.end) for p in package.placed]
    verdict(f"run_on = grid.schedule, {SMs} SMs", placed == run_on(SMs, costs))
    bound = sum(costs) / SMs + (1 - 1 / SMs) * max(costs)
    verdict(f"no list schedule is longer than Graham's bound, {SMs} SMs", package.makespan <= bound)
sizes = [(blocks, SMs) for blocks in (1, 80, 132, 133, 2048) for SMs in (6, 108, 132)]
formulas = [(grid.waves(*size), grid.efficiency(*size)) for size in sizes]
verdict("busy = grid.waves and grid.efficiency", formulas == [busy(*size) for size in sizes])
uneven = [Tiling(14, 22, 4, 3, mask) for mask in (NO_MASK, CAUSAL, Mask(True, 17))]
for way in ("forward", "backward"):
    same = all(np.array_equal(owners(t, way), grid.owners(t, way)) for t in uneven)
    verdict(f"owners = grid.owners, {way}, ragged and padded", same)
verdict("dq_steps = grid.dq_steps", all(np.array_equal(dq_steps(t), grid.dq_steps(t)) for t in uneven))

# %%
for tiling in uneven:
    q_u, dO = rng.standard_normal((2, 14, 4))
    k_u, v_u = rng.standard_normal((2, 22, 4))
    blocks = dict(B_r=4, B_c=3, mask=tiling.mask)
    meter_f, meter_b = Trace(), Trace()
    O, L = fa2.forward(q_u, k_u, v_u, **blocks, trace=meter_f)
    fa2.backward(q_u, k_u, v_u, O, L, dO, **blocks, trace=meter_b)
    for direction, meter in (("forward", meter_f), ("backward", meter_b)):
        ran = {(w[0], i, j) for w, i, j, kind in meter.work if kind == "matmul"}
        table = np.ndenumerate(owners(tiling, direction))
        drawn = {(int(owner), *tile) for tile, owner in table if owner >= 0}
        verdict(f"the tiles drawn are the tiles run: {direction}, {len(ran)} tiles", ran == drawn)

# %% [markdown] tags=["navigation"]
# [← The backward pass](05_backward.ipynb) · [The map](00_start.ipynb) · [Warps →](07_warps.ipynb)
