# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)

# %% [markdown]
# # 03 · FlashAttention
#
# **What if the score matrix never leaves the chip?**
#
# Standard attention writes S and P to HBM and reads them back (chapter 01). This is unnecessary, because a softmax can
# process its keys one block at a time (chapter 02). FlashAttention, which was published in 2022, therefore computes a
# small tile of S on the chip, uses it at once, and throws it away. A single kernel performs all of these steps. We call
# this algorithm *FA1*.
#
# After this notebook you can
#
# - write FA1's step, and explain why its two loops send unfinished outputs to HBM and back,
# - count FA1's requests and its DRAM traffic, and decide from the block size whether standard attention has more,
# - explain why a kernel can be slow although DRAM is not its limit,
# - explain how the backward pass recovers P.
#
# *Time: 40 minutes, including the function to write. Hardware: any laptop with NumPy. Before this: [02 · Online
# softmax](02_online_softmax.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import reasons
from fa2_lab.machine.rates import cost
from fa2_lab.plots import roofline
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa1, naive
from fa2_lab.trace import Trace
from fa2_studio.book.build import Case, check
from fa2_studio.book.steps import fa1_step

# %% [markdown]
# ## What goes wrong?
#
# Most of standard attention's traffic is S and P. Because FA1 sends neither of them to HBM, it should move fewer bytes
# and be faster. To find out whether it does, we compare two simple kernels on an H200: standard attention, and FA1
# exactly as printed in its Algorithm 1. Both process 64 heads with N = 4,096 and d = 128, and both use tiles of 64
# queries and 64 keys.

# %% tags=["hide-input"]
record, rungs = load("ladder"), {"standard attention": "r00_standard", "FA1 as printed": "r01_fa1"}
took, moved = reasons.forward_row(record, causal=False, d=128), roofline.dram_bytes(record, 128)
lines = [
    f"| {name} | {moved[rung] / 1e9:.1f} GB | {took.values[rung][0]:.2f} ms |"
    for name, rung in rungs.items()
]
Markdown("\n".join(["| | DRAM traffic, counted by the hardware | time |",
                    "| --- | ---: | ---: |", *lines]))

# %% [markdown]
# FA1 has 1.7 times as much DRAM traffic, and it takes four times as long. These are two separate failures. Although S
# and P no longer travel, the traffic grew, because the output now does. It leaves the chip unfinished and comes back
# once for every 64 keys. The time, however, grew mostly for other reasons, because DRAM delivers less than a
# third of what it could, as we will see.
#
# In this chapter, we write the loop that sends the output back and forth, count its requests, and find out when FA1 is
# nevertheless the better choice. The FA1 authors' own kernel was in fact much faster than standard attention, and the
# end of the chapter explains why.

# %% [markdown]
# ## Two keys seen, and one more tile
#
# Cut the queries into $T_r$ *row blocks* of $B_r$ queries each, and the keys into $T_c$ *column blocks* of $B_c$ keys
# each. A row block and a column block meet in one tile of S, which has $B_r \times B_c$ scores.
#
# In FA1, after every tile, $o$ is the right output for the keys seen so far, because FA1 always stores $o$ already
# divided by $\ell$. We still call it *unfinished*, because later keys will change it. Nothing in the algorithm needs
# the division in every tile. Chapter 02 kept $o$ as a raw sum and divided once at the end, and chapter 04 does so
# again. But the 2022 paper divides in every tile, so we follow it here, and chapter 04 counts what the division costs.
#
# As an example, take the 1-3-4-8 row from chapter 02 after its first two keys, and add a tile with the other two keys.
# The tile's values are 4 and 2, and its exponentials $p = e^{s - m_{tile}}$ are 1/2 and 1.
#
# | | maximum | sum of exponentials | weighted sum of values |
# | --- | --- | --- | --- |
# | the row so far | $m = \log 3$ | $\ell = 4/3$ | $o = 2$, divided by $\ell$ |
# | the tile, scores $\log 4$ and $\log 8$ | $m_{tile} = \log 8$ | $\ell_{tile} = 3/2$ | $p\,v = 4$, not divided |
#
# The row and the tile each have their own maximum. To bring both to the larger one, we multiply the row's sums by
# $\alpha = e^{m - m_{new}}$ and the tile's sums by $\beta = e^{m_{tile} - m_{new}}$. After that, we can simply add the
# two values of $\ell$. The two outputs, however, can only be added as raw sums, so the old $o$ must first be multiplied
# by the $\ell$ that it was divided by:
#
# $$\ell_{new} = \alpha\,\ell + \beta\,\ell_{tile} \qquad o_{new} = \frac{\alpha\,\ell\,o + \beta\,p\,v}{\ell_{new}}$$
#
# Here $\alpha = 3/8$ and $\beta = 1$, so $\ell_{new} = \frac{3}{8} \cdot \frac{4}{3} + \frac{3}{2} = 2$, and $o_{new} =
# (\frac{3}{8} \cdot \frac{4}{3} \cdot 2 + 4) / 2 = 5/2$, which is the same answer as in chapter 02.

# %% [markdown]
# ## Write FA1's step
#
# **Build.** `step` takes the state $m$, $\ell$ and $o$ of a block of rows, a tile of scores `s`, and the values `v` of
# the tile's keys. It returns the new $m$, $\ell$ and $o$. The old $o$ is already divided by the old $\ell$, and the new
# $o$ must be divided by the new $\ell$.

# %%
def step(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def after(S, V):  # the state after all of these keys, in one go
    m = S.max(axis=1)
    return m, np.exp(S - m[:, None]).sum(axis=1), naive.safe_softmax(S) @ V


def case(words, S, V, n):  # n keys have been seen
    nothing = np.full(len(S), -np.inf), np.zeros(len(S)), np.zeros((len(S), V.shape[1]))
    old = after(S[:, :n], V[:n]) if n else nothing
    return Case(words, (*old, S[:, n:], V[n:]), after(S, V))


S, V = np.random.default_rng(1).standard_normal((3, 6)), np.arange(12.0).reshape(6, 2)
four, values = np.log([[1.0, 3.0, 4.0, 8.0]]), np.array([[8.0], [0.0], [4.0], [2.0]])
S[0, 0] = 5  # the first row has its largest score in the first tile
check(
    step,
    case("three rows meet their first tile. Does each row have its own maximum, and is o "
         "divided at the end?", S, V, 0),
    case("the 1-3-4-8 row of the table above. o arrives divided by ℓ. What undoes that?", four,
         values, 2),
    case("in row 0 the old maximum is larger than the tile's. Which side must shrink there?", S,
         V, 3),
    names=("m", "ℓ", "o"),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def step(m, l, o, s, v):
#     m_tile = s.max(axis=1)  # FA1.A2.L12  (B_r,): of this tile alone
#     p = np.exp(s - m_tile[:, None])  # FA1.A2.L12  (B_r, B_c)
#     m_new = np.maximum(m, m_tile)  # FA1.A2.L13
#     alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)  # FA1.A2.L13
#     l_new = alpha * l + beta * p.sum(axis=1)  # FA1.A2.L13
#     o_new = (alpha * l)[:, None] * o + beta[:, None] * (p @ v)  # FA1.A2.L15
#     return m_new, l_new, o_new / l_new[:, None]
# ```
# </details>
#
# In chapter 02, `update` kept $o$ as a raw sum, so it had no division to undo. It also computed p relative to $m_{new}$
# from the start, which made $\beta$ equal to 1. You can do the same here.

# %% [markdown]
# ## Which loop goes outside?
#
# In FA1, the outer loop runs over the column blocks j. For each column block, FA1 loads the keys and values once, and
# the inner loop processes every row block with them. Then the outer loop moves on to the next column block, and the
# inner loop goes through all row blocks again.
#
# Why is the loop over the keys the outer one? We follow Algorithm 1 of the paper here. In this order, K and V are
# loaded only once. It allows only one worker per head, but with many heads, that is enough to fill the GPU. Either
# order gives the right result, and chapter 04 shows that the other one is better.
#
# In FA1's order, a single worker handles a whole head, because the head's column blocks depend on each other. For each
# column block, the worker loads O, ℓ and m, updates them and stores them again. If two workers had different column
# blocks, both might load the same state, and then one of them would overwrite what the other has stored. Chapter 04
# swaps the two loops, and then the workers can share a head.
#
# Between two visits to the same rows, the worker handles all other rows of the head, and the states of all these rows
# do not fit into its SM. With N = 4,096 and d = 128, o takes 2 MiB for all queries together, but the SM has only 228
# KiB of shared memory. The worker therefore stores a row block's state in HBM after each tile, and loads it again
# before the next tile of these rows.
#
# Find the two lines that load and store the state in the code below, where the solution above is called `fa1_step`. In
# this listing, `l` and `m` are arrays in HBM, like O, although the paper writes them with small letters.
#
# The tags name lines of Algorithm 2 in the FA1 paper's appendix. Algorithm 2 extends Algorithm 1 with a scale, a mask
# and *dropout*. We need only the scale here, and chapter 05 explains dropout.

# %%
def fa1_forward(Q, K, V, O, l, m, B_r, B_c, tau):
    O[:], l[:], m[:] = 0, 0, -np.inf  # FA1.A2.L3
    for j in range(0, len(K), B_c):  # FA1.A2.L6
        cols = slice(j, j + B_c)
        k_j, v_j = K[cols], V[cols]  # FA1.A2.L7  (B_c, d)
        for i in range(0, len(Q), B_r):  # FA1.A2.L8
            rows = slice(i, i + B_r)
            q_i, o_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]  # FA1.A2.L9
            s_ij = tau * (q_i @ k_j.T)  # FA1.A2.L10  (B_r, B_c)
            m_i, l_i, o_i = fa1_step(m_i, l_i, o_i, s_ij, v_j)
            O[rows], l[rows], m[rows] = o_i, l_i, m_i  # FA1.A2.L15 FA1.A2.L16


# %% tags=["hide-input"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
tau = 0.5
for n in (2, 4, 6, 8):  # the outer loop stopped after n keys
    O, l, m = np.empty((8, 4)), np.empty(8), np.empty(8)
    fa1_forward(Q, K[:n], V[:n], O, l, m, B_r=4, B_c=2, tau=tau)
    answer = naive.safe_softmax(tau * Q @ K[:n].T) @ V[:n]
    print(f"after {n} keys: O[0, 0] = {O[0, 0]:9.6f}, attention over these {answer[0, 0]:9.6f}")

# %% [markdown]
# After each column block, O is the right output for the keys seen so far, as FA1 promised.

# %% [markdown]
# ## Watch the output travel

# %% tags=["nbval-ignore-output", "hide-input"]
live("algorithm1", ask="order=fa1", names=["FA1"])

# %% [markdown]
# There are $T_c = \lceil N / B_c \rceil$ column blocks, where the brackets mean rounding up. FA1's forward pass
# therefore requests
#
# - $Nd + 2N$ elements to initialize O, ℓ and m,
# - $2Nd$ elements to load K and V once,
# - $3Nd + 4N$ elements for each column block, because it loads Q, O, ℓ and m and stores O, ℓ and m.

# %%
meter = Trace()
watched = meter.hbm(Q=Q, K=K, V=V, O=np.empty((8, 4)), l=np.empty(8), m=np.empty(8))
fa1_forward(*watched, B_r=4, B_c=2, tau=tau)
N, d, T_c = 8, 4, 4
formula = N * d + 2 * N + 2 * N * d + T_c * (3 * N * d + 4 * N)
print(f"B_c = 2: {formula} by the formula, {meter.hbm_elements} on the meter")

# %% [markdown]
# ## When does FA1 move less than standard attention?
#
# **Predict.** FA1 never sends S or P to HBM. When does FA1 have less DRAM traffic than standard attention?
#
# - ☐ if the sequence is long enough
# - ☐ if a block has enough keys
# - ☐ always, since S and P were nearly all of the traffic
#
# <details><summary>Answer</summary>
#
# **if a block has enough keys.** For one query and one block of keys, FA1 loads q and o and stores o, and the size of
# these vectors does not depend on the block size. Standard attention, by contrast, moves 12 bytes for each key in the
# block. N does not matter, because the traffic of both methods grows with $N^2$.
# </details>

# %% [markdown]
# The following table counts the requested bytes for one query and one block of $B_c$ keys. Nearly all of them reach
# DRAM, as the end of this section shows. Each element of q takes two bytes. Each element of an unfinished o takes four,
# because storing it in two bytes would round o after every tile. $\ell$ and m also take four bytes each.
#
# | | loaded | stored | in total |
# | --- | ---: | ---: | ---: |
# | q | 2 d | | 2 d |
# | o, unfinished | 4 d | 4 d | 8 d |
# | $\ell$ and m | 8 | 8 | 16 |
# | FA1 | | | 10 d + 16 |
# | standard attention (S and P) | | | 12 $B_c$ |
#
# About four fifths of FA1's bytes are thus unfinished outputs. FA1 has less DRAM traffic than standard attention if a
# block has more than (10d + 16)/12 keys, which means at least 55 keys for d = 64, and at least 109 for d = 128. The FA1
# kernel at the top of this chapter has only 64 keys per block at d = 128, like the kernels that we compare it with, so
# it has more traffic. The next table shows FA1's DRAM traffic as a percentage of standard attention's:

# %% tags=["hide-input"]
lines = []
for d in (64, 128):
    shares = [cost("FA1", d=d, B_c=B_c).dram_bytes / cost("standard", d=d).dram_bytes
              for B_c in (64, 128, 256)]
    lines.append(f"| d = {d} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
Markdown("\n".join(["| | 64 keys per block | 128 keys | 256 keys |",
                    "| --- | ---: | ---: | ---: |", *lines]))

# %% [markdown]
# L2 also holds what was recently stored (chapter 00), so could the unfinished outputs simply stay in L2 until they are
# needed again? In this case, they cannot. With one worker per head, all 64 heads are in progress at the same time. At d
# = 128, each head's Q takes 1 MiB and its unfinished O takes 2 MiB, which makes 192 MiB for all heads together. That is
# far too much for the 60 MiB of L2, so nearly everything that FA1 loads and stores reaches DRAM.
#
# When it comes to memory use, on the other hand, FA1 always wins. Beyond its inputs and output, it needs only the 2N
# numbers of $\ell$ and m and, if the output has two bytes per element, a copy of the unfinished O with four.

# %% [markdown]
# ## How large can a block be?
#
# The blocks must fit on the chip. If there is room for M elements, the paper chooses $B_c = \lceil M / 4d \rceil$ keys
# and $B_r = \min(B_c, d)$ queries. With this rule, $T_c = 4Nd / M$, so FA1 requests about $T_c \cdot 3Nd = 12\,N^2 d^2
# / M$ elements. The paper calls this the *IO complexity*, $\Theta(N^2 d^2 / M)$. In other words, doubling the room on
# the chip halves the requests, and doubling the sequence length quadruples them.
#
# <details><summary>Could another exact algorithm request fewer elements?</summary>
#
# Not by more than a constant factor. Proposition 3 of the FlashAttention paper (Dao, Fu, Ermon, Rudra and Ré, 2022)
# says that no exact algorithm can get by with asymptotically fewer than $N^2 d^2 / M$ HBM accesses for *all* M between
# d and Nd. Its proof uses only one end of this range. If M is about Nd, then $N^2 d^2 / M$ is about Nd, and every
# algorithm has to load the Nd elements of Q and store those of O. For a smaller M taken alone, the proposition leaves
# the question open.
#
# Saha and Ye ([2024](https://arxiv.org/abs/2402.07443)) answered it. For every M of at least d², an exact algorithm
# needs on the order of $N^2 d^2 / M$ accesses, even with fast matrix multiplication, so FlashAttention is optimal
# there. For smaller M, they give a better algorithm. An SM of an H200 is in the first case, because d² is 16,384 for d
# = 128, and its shared memory has room for 116,736 two-byte elements.
# </details>
#
# <details><summary>Do blocks of this size really fit?</summary>
#
# No, the rule holds only up to a constant factor. An H200 has 228 KiB of shared memory per SM, which is room for M =
# 116,736 two-byte elements. For d = 128, the rule gives $B_c = 228$ and $B_r = 128$, and these blocks need 42% more
# than there is:
#
# | block | elements | bytes each | KiB | share of 228 KiB |
# | --- | ---: | ---: | ---: | ---: |
# | k and v | 2 · 228 · 128 | 2 | 114 | 50% |
# | scores | 128 · 228 | 4 | 114 | 50% |
# | q | 128 · 128 | 2 | 32 | 14% |
# | o | 128 · 128 | 4 | 64 | 28% |
# | in total | | | 324 | 142% |
#
# </details>

# %% tags=["nbval-ignore-output", "hide-input"]
show("hbm_traffic")

# %% [markdown]
# The chart counts requests for a fixed N. With little room on the chip, FA1 requests more than standard attention. Each
# step to the right doubles the room, which at first halves FA1's requests. Later steps gain less, because the curve
# approaches the least possible number, in which each of Q, K, V and O is requested once. For standard attention, the
# chart counts the requests of real kernels, which are more than chapter 01's $4N^2 + 4Nd$, because their tiles request
# the same parts of Q, K and V repeatedly. Chapter 04 gives the formula.
#
# The vertical lines mark the on-chip memory per SM of two older NVIDIA GPUs: the A100, which the papers use, and the
# H100, which has as much per SM as the H200. In practice, larger blocks stop helping sooner than the chart suggests.
# The paper's authors tried blocks of 64 to 512 keys, and beyond 256 keys, the time did not decrease any further.

# %% [markdown]
# ## Why was the authors' kernel fast?
#
# In chapter 00 and in the table at the top of this chapter, FA1 is slower than standard attention. The FA1 authors' own
# kernel, however, was usually 2 to 4 times as fast as standard attention. In figure 2 of [their
# paper](https://arxiv.org/abs/2205.14135), which measures the forward and backward pass of GPT-2 medium on an A100, it
# was even 5.7 times as fast. In that measurement, N = 1,024, d = 64, and there are 64 sequences with 16 heads each.
#
# | | standard attention | FA1, the authors' kernel |
# | --- | ---: | ---: |
# | HBM reads and writes | 40.3 GB | 4.4 GB |
# | time | 41.7 ms | 7.3 ms |
#
# The traffic differs by a factor of 9, which is more than our table predicts for a forward pass (22%, or a factor of
# 4.5, with 256 keys per block). One reason is that the backward pass is included, in which standard attention stores
# and loads further N × N matrices. Its 40.3 GB are 38 bytes per score, whereas the forward pass alone has 12.
#
# Like ours, their kernel uses one thread block per head, but two things are different.
#
# - **Heads.** Their 64 sequences of 16 heads each yield 1,024 workers for the A100's 108 SMs. The problem in our table
#   has 4 sequences of 16 heads each, which makes only 64 workers for the H200's 132 SMs.
# - **Blocks and code.** Their kernel is handwritten CUDA with large blocks. With 256 keys per block and 1,024 keys in
#   all, each output is stored only four times. Ours is the simplest possible Triton code. It uses 64 keys per block,
#   follows Algorithm 1's loops, and divides in every tile.
#
# So why does our kernel take four times as long as standard attention at N = 4,096? Its DRAM traffic is not the reason.
# The kernel moves its bytes at 1.4 TB/s, whereas standard attention reaches 3.2 TB/s and DRAM could deliver 4.8 TB/s.
# DRAM waits for the kernel's workers, and there are two reasons why they don't keep it busy.
#
# - **Too few workers.** With 64 workers, half of the SMs are idle. If they had workers, they could do the same amount
#   of work again in about the same time, provided that DRAM could keep up. The idle SMs therefore cost up to a factor
#   of 2.
# - **Slow workers.** With 8 heads instead of 64, the kernel does an eighth of the work, but its time drops only from
#   16.3 ms to 11.7 ms. Most of the time is therefore what a single worker needs to go through all tiles of its head,
#   one after another. At N = 4,096, these are 64 · 64 = 4,096 tiles, so each takes 11.7 ms / 4,096 = 2.9 µs. Its two
#   products have 4 · 64 · 64 · 128 FLOPs, which one SM's tensor cores could compute in 0.28 µs. For the other nine
#   tenths of the time, they wait, because our loop hardly overlaps anything. The worker loads q and o, waits for them,
#   computes, stores o, and only then begins the next tile. It has its SM to itself, so no other thread block computes
#   in the meantime.
#
# If these two problems were solved, DRAM would be the next limit. Even at full speed, it needs 4.6 ms for FA1's 22.1
# GB, which is longer than standard attention takes. That is why large blocks matter as well. In short, FA1 needs many
# heads, fast code and large blocks.

# %% [markdown]
# ## How does the backward pass get P back?
#
# **Predict.** The gradients need P, but P was thrown away. The backward pass can recompute a tile's scores from q and
# k. What turns these scores into probabilities?
#
# - ☐ the online softmax again, over all tiles of the row
# - ☐ one exponential and one division
# - ☐ a softmax over the scores of this tile
#
# <details><summary>Answer</summary>
#
# **one exponential and one division.** The forward pass stored each row's final $m$ and $\ell$ in HBM, so $p = e^{s-m}
# / \ell$ is already the final probability. A softmax over one tile would be wrong, because only the probabilities of a
# whole row sum to 1.
# </details>
#
# The backward pass thus computes one more product, $QK^\top$, and stores nothing of size $N^2$. Is that cheaper than
# storing P? Chapter 00 asked this about a score, and now we ask it about an entry of P. Recomputing the entry costs 2d
# FLOPs for the score, 256 for an exponential and 32 for a subtraction. The division can be avoided, since $p = e^{s -
# L}$ with chapter 01's $L = m + \log \ell$. The sum is 416 for d = 64 and 544 for d = 128. Storing the entry in two
# bytes and loading it again costs 824, which is 2.0 and 1.5 times as much, respectively. If all units work at the same
# time, only the slowest one counts, so the comparison is 256 against 824.
#
# <details><summary>If you train with dropout: how do we avoid storing its mask?</summary>
#
# *Dropout* sets entries of P to 0 at random, and the backward pass must drop the same ones. Storing $N^2$ bits would
# take only a sixteenth of P's memory, but that still grows with $N^2$. The backward pass therefore generates each
# random number a second time. Chapter 05 shows what it must be generated from.
# </details>

# %% [markdown]
# ## Recap
#
# - FA1 computes one tile of S at a time, uses it and throws it away, so nothing of size $N^2$ reaches HBM.
# - The outer loop runs over keys, and the inner loop over queries. $o$ is divided by $\ell$ at every step, and travels
#   to HBM and back, together with $\ell$ and $m$, for each column block.
# - FA1 requests about $N^2 (3d + 4) / B_c$ elements, or $N^2 (10d + 16) / B_c$ bytes. With many heads, nearly all of
#   these bytes reach DRAM. FA1 has less DRAM traffic than standard attention if a block has more than (10d + 16)/12
#   keys.
# - A kernel can be slow although DRAM is not its limit, if it has too few workers or slow ones.
#
# After the next chapter, [assignment 2](assignments/2_forward.ipynb) takes you from FA1 to FA2.

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
from fa2_lab.machine import chips, io_model
from fa2_lab.machine.rates import rates
from fa2_lab.plots import time_and_memory
from fa2_lab.tiles import Tiling
from fa2_studio.book.verdicts import close, verdict

verdict("fa1_forward here = fa1.forward",
        all(map(close, (O, l, m), fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau))))
verdict("the formula = io_model.fa1_forward",
        formula == io_model.fa1_forward(Tiling(8, 8, 4, 2), 4).total)
slow = {name: dict(points) for name, points in time_and_memory.data()["time"].items()}
verdict("FA1 takes about four times standard's time",
        3.5 < slow["FA1"][4096] / slow["standard"][4096] < 4.5)
verdict("1.7 times the bytes reach DRAM",
        round(cost("FA1").dram_bytes / cost("standard").dram_bytes, 1) == 1.7)
verdict("counted: 1.7 times", round(moved["r01_fa1"] / moved["r00_standard"], 1) == 1.7)
drawn = [round(moved[rung] / took.values[rung][0] / 1e9, 1) for rung in ("r00_standard", "r01_fa1")]
verdict("standard attention drew 3.2 TB/s from DRAM, FA1 1.4", drawn == [3.2, 1.4])
ms = {
    row.problem["batch"] * row.problem["heads"]: round(row.values["r01_fa1"][0], 1)
    for row in record.rows
    if (row.direction, row.problem["N_q"], row.problem["d"],
        row.problem["causal"]) == ("forward", 4096, 128, False)
}
verdict("FA1 takes 16.3 ms with 64 heads, 11.7 ms with 8", ms == {64: 16.3, 8: 11.7})
verdict("at full speed, FA1's bytes take 4.6 ms",
        round(1e3 * moved["r01_fa1"] / chips.H200.hbm_bytes_per_second, 1) == 4.6)
verdict("the H100 and the H200 have the same room",
        chips.H100.shared_per_sm == chips.H200.shared_per_sm)
verdict("99% of what FA1 loads and stores reaches DRAM",
        cost("FA1").dram_bytes > 0.99 * cost("FA1").requested_bytes)
needed = [(10 * d + 16) / 12 for d in (64, 128)]
verdict("FA1 needs 55 and 109 keys in a block: at exactly 108, it is a tie",
        [int(x) + 1 for x in needed] == [55, 109] and needed[1] == 108)
B_c, B_r, d = 228, 128, 128
held = 2 * 2 * B_c * d + 4 * B_r * B_c + (2 + 4) * B_r * d
verdict("the paper's blocks need 42% more than there is", round(held / (228 * 1024), 2) == 1.42)
price = rates(chips.H200).in_flops()
again, stored = [round(2 * d + price["exp"] + price["fp32"]) for d in (64, 128)], 4 * price["dram"]
verdict("computed again 416 or 544, stored and loaded 824", again == [416, 544] and stored == 824.5)

# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)
