# %% [markdown] tags=["navigation"]
# [← The backward pass](05_backward.ipynb) · [The map](00_start.ipynb) · [Warps →](07_warps.ipynb)

# %% [markdown]
# # 06 · Parallelism
#
# **Who works on which tiles, and who waits?**
#
# Two kernels compute the same tiles of the same attention, with the same tile size, on the same GPU, yet one is more
# than twenty times as fast as the other. The slow one gives the right result, and none of its arithmetic is slower. It
# is slow mainly because most of the GPU has nothing to do while it runs.
#
# After this notebook you can
#
# - decide whether a loop's iterations can run at the same time,
# - compute how many thread blocks a launch has, how many waves they take, and what fraction of the chip is idle,
# - choose among four fixes for idle processors, namely a different outer loop, smaller row blocks, split keys, and a
#   different launch order.
#
# *Time: 35 minutes with the questions and the function. Hardware: any laptop with NumPy. Before this: [05 · The
# backward pass](05_backward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np

from fa2_lab.machine import chips, grid, rates
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## What do the processors do?

# %% tags=["hide-input"]
def timetable(SMs, costs):
    return grid.schedule([grid.BlockWork(0, None, cost) for cost in costs], SMs)


def ends(SMs, costs):
    return [block.end for block in timetable(SMs, costs).placements]


slow, fast = "r02_rows_outside", "r03_row_blocks"
for row in load("ladder").rows:
    p = row.problem
    if row.direction == "forward" and (p["d"], p["causal"]) == (128, False):
        heads = p["batch"] * p["heads"]
        print(f"{heads} heads")
        for name, words, blocks in ((slow, "head", heads),
                                    (fast, "row block", heads * p["N_q"] // 64)):
            busy = min(1, blocks / chips.H200.SMs)
            print(f"    one worker per {words:9} {row.values[name][0]:5.2f} ms, SMs with work "
                  f"{busy:4.0%}")

# %% [markdown]
# These two kernels come from chapter 10, and we measured them on an H200 with tiles of 64 × 64. Both use FA2's loops,
# and they differ only in the number of workers. With 8 heads, the first kernel keeps only 8 of the GPU's 132 SMs busy,
# and the others are idle. With 64 heads, nearly half of the SMs have work, so the difference is smaller. The idle SMs
# explain a factor of 132 / 8 = 16.5 with 8 heads and a factor of 132 / 64 = 2.1 with 64 heads. The measured factors are
# 24 and 4. This chapter is about the idle SMs. The rest of the measured factors has other causes. One of them is that
# nothing hides the waiting of a thread block that has its SM to itself (see the section on sharing an SM below).
# Chapter 10 examines these causes.
#
# A small example shows what the SMs do. In the picture below, six SMs compute four heads of 4 × 4 tiles. In the upper
# half, one worker computes a whole head, as in FA1's Algorithm 1 if you implement it as printed. In the lower half,
# each row block has its own worker, as in FA2. Each row of the picture is an SM, and time runs to the right. Each box
# is the time that one worker spends on its SM:

# %% tags=["hide-input"]
show("waves_heads")

# %% [markdown]
# In FA1's half, the last two SMs are idle from beginning to end. So why does FA1 not use them?
#
# ## Which iterations may run at the same time?
#
# In the next picture, the number in each tile is the worker that computes it. The small squares next to each grid show
# which workers write each block of the result. A block of O has one writer, whereas a block of dQ has up to four.

# %% tags=["hide-input"]
show("worker_tiles")

# %% [markdown]
# Starting a kernel is called a *launch*. A launch runs many thread blocks (chapter 00), each of which is a worker, and
# all thread blocks of a launch together form its *grid*. The GPU assigns each thread block to one of its SMs, where the
# block stays until it is done. The GPU does not guarantee any order, so no thread block can rely on another one having
# run before it.
#
# A loop's iterations can therefore run at the same time if each one writes to its own addresses and none reads what
# another one writes. The loops that we have seen so far differ in this respect:
#
# - The iterations of FA2's outer loop in the forward pass can run at the same time, because row block i reads its own
#   queries and writes its own rows of O (chapter 04).
# - The iterations of FA1's outer loop cannot do so, because every column block loads, updates and stores the same O, ℓ
#   and m. This is why Algorithm 1 as printed assigns a whole head to one thread block.
# - The iterations of the outer loop in FA2's backward pass are almost as independent as in the forward pass. Each
#   column block has its own dK and dV, but all column blocks add into dQ (chapter 05).
#
# A model processes several sequences at once, which form a *batch*. In both algorithms, sequences and heads are
# independent of each other, so FA1 as printed launches batch · heads thread blocks. FA2 launches batch · heads · $T_r$
# thread blocks in the forward pass, and batch · heads · $T_c$ in the backward pass.

# %% [markdown]
# ## Which SM gets the next thread block?
#
# No order is guaranteed, but in practice, the thread blocks wait in a queue in the order of their numbers, and
# whichever SM becomes free first takes the next one. We can rely on this order for speed, but never for the result. In
# this chapter, the unit of time is the time that an SM takes for one tile.
#
# **Build.** `costs` holds the time that each thread block takes, in launch order. Return the times at which the thread
# blocks end, in the same order. All SMs are free at time 0. If several SMs are free, it does not matter which one takes
# the next thread block.

# %%
def schedule(SMs, costs):
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
one_wave = "4 equal thread blocks, 6 SMs. Does each get its own SM?"
queue = "a long one, then short ones, 2 SMs. The SM that had a short one is free early. Does it take the next?"
unequal = "8 thread blocks of unequal length, 3 SMs. Does each start as soon as one SM is free, or wait until all three are?"
check(
    schedule,
    Case(one_wave, (6, [16] * 4), ends(6, [16] * 4)),
    Case(queue, (2, [5, 1, 1, 1, 1]), ends(2, [5, 1, 1, 1, 1])),
    Case(unequal, (3, [1, 2, 3, 4] * 2), ends(3, [1, 2, 3, 4] * 2)),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def schedule(SMs, costs):
#     free = [0] * SMs  # when each SM is free next
#     ends = []
#     for cost in costs:
#         SM = free.index(min(free))
#         free[SM] += cost
#         ends.append(free[SM])
#     return ends
# ```
# </details>
#
# [Assignment 6](assignments/6_read_the_machine.ipynb) goes further. There, you compute waves, traffic and what fits on
# the chip, for any chip.

# %% [markdown]
# ## How long does a launch take?
#
# In the first picture, FA1 as printed has 4 thread blocks of 16 tiles, so its launch ends at time 16. FA2 has 16 thread
# blocks of 4 tiles on six SMs, so they run in three rounds, which are called *waves*. The third wave has only four
# thread blocks, and the launch ends at 3 · 4 = 12. If the work could be shared evenly, the launch would end at 64 / 6 =
# 10⅔, but a thread block cannot be split.
#
# If an SM runs one thread block at a time, a launch of equal thread blocks takes ⌈thread blocks / SMs⌉ times as long as
# a single thread block. On 132 SMs, 133 thread blocks therefore take twice as long as 132, because the second wave is a
# single thread block, and 131 SMs wait for it. This loss is called *wave quantization*.
#
# With many waves, however, a poorly filled last wave matters little. As an example, take batch 1, 32 heads, 8,192
# tokens and row blocks of 128. FA2 has 32 · 64 = 2,048 thread blocks, which take 16 waves and keep 2,048 / (16 · 132) =
# 97% of the SMs busy on average. FA1 as printed has only 32 thread blocks, which is enough for a quarter of the SMs.
#
# The same count explains a part of chapter 00's time chart, in which every problem has 16,384 tokens in total and 16
# heads per text. At N = 16,384, there is only one text, so FA1 as printed has 16 workers, and the idle SMs can make it
# 132 / 16 = 8 times as slow. At N = 4,096, it has 64 workers, and the factor is 2. At N = 512, it has 512 workers,
# which is enough for all SMs. FA1 is slow there for the other reasons in chapter 03.

# %% [markdown]
# ## Why not make row blocks much smaller?
#
# A single head of 8,192 queries in row blocks of 128 gives 64 workers for 132 SMs. Smaller row blocks give more
# workers. But each worker loads all of K and V, so halving the row blocks doubles the requests (chapter 04).
#
# For each $B_r$, the next cell prints the times of the two slowest units of an H200 at d = 128. As in chapter 04, each
# time is the least that the unit needs. The tensor cores of an idle SM do nothing, so the cell divides the tensor-core
# time by the fraction of busy SMs. L2 serves all SMs, so the cell prints L2's time at full bandwidth.

# %% tags=["hide-input"]
costs = {f"B_r = {B_r}": rates.cost("FA2", heads=1, N=8192, B_r=B_r, B_c=64)
         for B_r in (128, 64, 32, 16)}
for name, cost in costs.items():
    seconds = cost.seconds(chips.H200)
    cores, l2 = (1e6 * seconds[unit] for unit in ("tensor cores", "L2"))
    moved = f"{cost.requested_bytes / 1e6:.0f} MB requested"
    print(f"{name}: {cost.workers} workers, {moved}; tensor cores {cores:.0f} µs, L2 {l2:.0f} µs")

# %% tags=["hide-input"]
show("rooflines_row_blocks")

# %% [markdown]
# At $B_r = 128$, half of the SMs are idle, and the tensor cores are the slowest unit. Even if the busy half of the SMs
# could use only half of L2's bandwidth, L2 would need 2 · 28 = 56 µs, which is less than the tensor cores need.
# In the roofline, the dot for $B_r = 128$ is therefore below L2's line. It is also below the flat line of the tensor
# cores, because only half of the tensor cores are busy. The dashed line is the ceiling of this half.
#
# $B_r = 64$ keeps 128 of 132 SMs busy, which is 97%, but it doubles the requests. L2 is now the limit, and yet the
# launch is faster. Smaller row blocks gain nothing more. With $B_r = 32$, 256 workers take two waves and keep the same
# 97% of the SMs busy, so no idle SMs are left to fill, and the time doubles with the requests. (For the tensor cores,
# the cell prints 36 µs at $B_r = 64$ and 35 µs at 32 and 16, because it counts all SMs as busy once there are more
# workers than SMs. With the 97%, these would be 36 µs, too.) The best choice is therefore the largest row blocks that
# keep the SMs busy.

# %% [markdown]
# ## What if several thread blocks share an SM?
#
# Two, three or four thread blocks often fit on an SM at the same time. How many fit depends on the SM's registers and
# shared memory. For example, an SM has 65,536 registers. If a thread block has 128 threads with 168 registers each, it
# needs 21,504, so three fit. With 176 registers per thread, it needs 22,528, and only two fit.
#
# Shared memory is counted in the same way. With d = 128 and two bytes per number, $B_r$ queries take $B_r / 4$ KiB. To
# load ahead, a kernel keeps room for two blocks of keys and values. The room for one block is called a *stage*. With 64
# keys and 64 values, a stage takes 32 KiB, so two stages take 64 KiB. An SM of an H200 has 228 KiB:
#
# | $B_r$ | q | two stages of k and v | in total | fit into 228 KiB |
# | ---: | ---: | ---: | ---: | ---: |
# | 64 | 16 KiB | 64 KiB | 80 KiB | 2 |
# | 128 | 32 KiB | 64 KiB | 96 KiB | 2 |
# | 256 | 64 KiB | 64 KiB | 128 KiB | 1 |
#
# The smaller of the two counts, by registers and by shared memory, is the number of thread blocks on an SM.
#
# Sharing an SM hides latency (chapter 00), because one thread block can compute while another one waits for data. A
# wave then also has more *slots*, which are places for thread blocks. On 132 SMs, a wave has 264 slots with two thread
# blocks per SM, and 396 with three. A launch takes ⌈thread blocks / slots⌉ waves.
#
# The interactive figure below computes these numbers, and the requests and the DRAM traffic, for sizes that you choose.
# Which $B_r$ lets two thread blocks fit on an SM, and at how many heads is the last wave nearly empty? (Without
# scripts, you see only chapter 03's chart of requests.)
#
# <details><summary>Answers for N = 8,192, d = 128 and two stages of 64 keys</summary>
#
# By shared memory, $B_r = 64$ and $B_r = 128$ fit twice, and $B_r = 256$ fits once. With $B_r = 128$, each head has 64
# thread blocks. If two fit on an SM, 25 heads have 25 · 64 = 1,600 thread blocks, which fill six waves of 264 slots
# (1,584) and leave 16 thread blocks for the seventh.
# </details>

# %% tags=["nbval-ignore-output", "hide-input"]
live("tiles")

# %% [markdown]
# **Predict.** A change frees registers, so that three thread blocks fit on an SM instead of two. Thread blocks that
# share an SM slow each other down. A wave takes the time $T_1$, $T_2$ or $T_3$ if one, two or three thread blocks share
# each SM, and in this example, $T_1 = 0.9\,T_2$ and $T_3 = 1.2\,T_2$. With 64 heads of 64 row blocks each, there are
# 4,096 thread blocks:
#
# | | slots | waves | time |
# | --- | ---: | ---: | ---: |
# | two per SM | 264 | 16 | $16\,T_2$ |
# | three per SM | 396 | 11 | $11\,T_3 = 13.2\,T_2$ |
#
# So with 64 heads, the change makes the kernel 16 / 13.2 = 1.2 times as fast. How does it affect the kernel's speed
# with 8 heads, which are 512 thread blocks?
#
# - ☐ it gains nothing, or gets slower
# - ☐ it also becomes 1.2 times as fast
# - ☐ it gets faster, but by less
#
# <details><summary>Answer</summary>
#
# **it gains nothing, or gets slower.** 512 thread blocks take two waves either way, but the waves are filled
# differently:
#
# | | first wave | second wave | end |
# | --- | --- | --- | ---: |
# | two per SM | 264 thread blocks, $T_2$ | 248, two on most SMs: $T_2$ | $2\,T_2$ |
# | three per SM | 396 thread blocks, $T_3 = 1.2\,T_2$ | 116, one per SM: $T_1 = 0.9\,T_2$ | $2.1\,T_2$ |
#
# With three slots, the second wave is short, because each of its thread blocks has an SM to itself. But nothing hides
# its latency then, so it saves only a tenth of $T_2$, whereas the first wave has become longer by a fifth.
#
# Chapter 10 has such a pair of kernels, r03 with two slots per SM and r05 with three. Both keep only one stage, so
# shared memory alone would leave room for four thread blocks, and the registers set the limit. With 64 heads, r05 is
# 1.2 times as fast, and with 8 heads, it is slightly slower. These are the times on an H200 in milliseconds:
#
# ```python
# for row in load("ladder").rows:
#     if row.direction == "forward" and row.problem["d"] == 128 and not row.problem["causal"]:
#         r03, r05 = row.values["r03_row_blocks"][0], row.values["r05_deferred"][0]
#         print(f"{row.problem['batch'] * row.problem['heads']:2} heads: r03 {r03:.3f}, r05 {r05:.3f}")
# ```
#
# ```text
# 64 heads: r03 1.914, r05 1.553
#  8 heads: r03 0.255, r05 0.267
# ```
# </details>

# %% [markdown]
# ## One query, many keys
#
# A model that generates text handles one new query at a time and compares it with all keys so far. This is called
# *decoding*. Because one query makes only one row block, FA2 is back to one worker per head. However, the states of
# different ranges of keys can be merged (chapter 02), so we cut each head's keys into ranges and assign each range to
# one worker. Each worker writes its O, already divided by $\ell$, and its L. A second, small kernel then merges the
# results. This method is called *split-KV*, and chapter 14 builds it.

# %% [markdown]
# ## What if thread blocks are not equal?
#
# Under the causal mask, if the tiles are square and there are as many queries as keys, row block i has i tiles
# (counting row blocks from 1). Two heads of 12 row blocks have 2 · 78 = 156 tiles. On 8 SMs, no launch can finish
# before time 20, whatever its order, because 156 / 8 = 19.5 and each tile takes a whole unit of time.
#
# **Predict.** Which launch order finishes first?
#
# - ☐ the natural order, row by row and head by head
# - ☐ heavy and light alternately, 12, 1, 12, 1, 11, 2, …
# - ☐ the lightest first
# - ☐ the heaviest first
#
# <details><summary>Answer</summary>
#
# **the heaviest first.** In this order, the launch ends at 21. If heavy and light blocks alternate, the launch ends at
# 22. With the lightest first, it ends at 24, and in the natural order, it ends at 26. A heavy thread block that starts
# late ends late, and the other SMs wait for it. If the heavy ones start first, light ones fill the gaps at the end.
# Your `schedule` computes all four numbers. The interactive figure below shows all four orders.
# </details>

# %% tags=["nbval-ignore-output", "hide-input"]
live("timetable")

# %% [markdown]
# ## Recap
#
# - A loop's iterations can run at the same time if they write to different addresses and none reads what another one
#   writes.
# - FA1 as printed has batch · heads workers. FA2 has $T_r$ times as many workers in the forward pass (one per row
#   block), and $T_c$ times as many in the backward pass (one per column block).
# - Equal thread blocks take ⌈thread blocks / slots⌉ waves. In the last wave, some SMs are often idle.
# - The best choice is the largest row blocks that keep the SMs busy.
# - If there are few rows and many keys, split the keys and merge the results. If thread blocks are unequal, launch the
#   heaviest first.

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("more than twenty times as fast with 8 heads", max(
    row.ratio(fast, slow) for row in load("ladder").rows if row.direction == "forward"
    and {slow, fast} <= row.values.keys()) > 20)
factors = []  # measured: one worker per head takes so many times as long, with 64 heads and with 8
for row in load("ladder").rows:
    if row.direction == "forward" and (row.problem["d"], row.problem["causal"]) == (128, False):
        factors.append(round(row.values[slow][0] / row.values[fast][0]))
verdict("measured factors 4 and 24", factors == [4, 24])
half = costs["B_r = 128"].seconds(chips.H200)
verdict("B_r = 128: tensor cores last, even at half of L2's bandwidth",
        half["tensor cores"] > 2 * half["L2"])
verdict("128 workers of 132, 256 of 264: 97%",
        [round(x, 2) for x in (128 / 132, 256 / 264)] == [0.97, 0.97])
verdict("waves on 264 and 396 slots",
        [grid.waves(n, p * 132) for n in (512, 4096) for p in (2, 3)] == [2, 2, 16, 11])
light = sorted([*range(1, 13)] * 2)
turns = np.array([light[::-1], light])[:, :12].T.ravel()
orders = light[::-1], turns, light, [*range(1, 13)] * 2
verdict("the orders end at 21, 22, 24 and 26",
        [max(ends(8, order)) for order in orders] == [21, 22, 24, 26])

# %% [markdown] tags=["navigation"]
# [← The backward pass](05_backward.ipynb) · [The map](00_start.ipynb) · [Warps →](07_warps.ipynb)
