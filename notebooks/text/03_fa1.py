# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)

# %% [markdown]
# # 03 · FlashAttention
#
# **What if the score matrix never leaves the chip?**
#
# Standard attention writes S and P to HBM and reads them back (chapter 01). Softmax can take its keys one block at a time
# (chapter 02). So FlashAttention of 2022, FA1, computes a small tile of S on the chip, uses it at once, and throws it
# away. One kernel does all steps.
#
# After this notebook you can
#
# - write FA1's step, and say why its two loops send unfinished answers to HBM and back,
# - count what FA1 loads and stores, and say how the size of a block decides it,
# - explain how the backward pass gets P back.
#
# *Time: 30 minutes. Hardware: any laptop, NumPy alone. Before this: [02 · Online softmax](02_online_softmax.ipynb).*

# %% tags=["hide-input"]
import numpy as np

from fa2_lab.machine import chips, io
from fa2_lab.machine.prices import cost, prices
from fa2_lab.plots import hbm_traffic, time_and_memory
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, naive
from fa2_lab.tiles import Tiling
from fa2_lab.trace import Trace
from fa2_studio.book.build import Case, check
from fa2_studio.book.steps import fa1_step
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## A finished row and one more tile
#
# Cut the queries into $T_r$ *row blocks* of $B_r$ queries, and the keys into $T_c$ *column blocks* of $B_c$ keys. A row
# block and a column block meet in one tile of S, with $B_r \times B_c$ scores.
#
# FA1 keeps a promise: after every tile, $o$ is the right answer for the keys seen so far. So $o$ is always divided by
# $\ell$. Here is the row of chapter 02 after its first two keys, and a tile with the other two. The tile's values are 4 and
# 2, and its weights $p = e^{s - m_{tile}}$ are 1/2 and 1.
#
# | | maximum | sum of exponentials | weighted sum of values |
# | --- | --- | --- | --- |
# | the row so far | $m = \log 3$ | $\ell = 4/3$ | $o = 2$, divided by $\ell$ |
# | the tile, scores $\log 4$ and $\log 8$ | $m_{tile} = \log 8$ | $\ell_{tile} = 3/2$ | $p\,v = 4$, not divided |
#
# Each side has its own maximum. Two factors bring both to the larger one: $\alpha = e^{m - m_{new}}$ for the row,
# $\beta = e^{m_{tile} - m_{new}}$ for the tile. Then the two $\ell$ can be added. The two outputs can be added only as
# raw sums, so the old $o$ is first multiplied by the $\ell$ that it was divided by:
#
# $$\ell_{new} = \alpha\,\ell + \beta\,\ell_{tile} \qquad o_{new} = \frac{\alpha\,\ell\,o + \beta\,p\,v}{\ell_{new}}$$
#
# Here $\alpha = 3/8$ and $\beta = 1$. So $\ell_{new} = \frac{3}{8} \cdot \frac{4}{3} + \frac{3}{2} = 2$, and $o_{new} =
# (\frac{3}{8} \cdot \frac{4}{3} \cdot 2 + 4) / 2 = 5/2$. That is the answer of chapter 02.

# %% [markdown]
# ## Write FA1's step
#
# **Build.** `step` takes the state $m$, $\ell$, $o$ of a block of rows, a tile of scores `s`, and the values `v` of the
# tile's keys. It returns the new $m$, $\ell$ and $o$. The old $o$ arrives divided, and the new one leaves divided.

# %%
def step(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    ...


# %% tags=["hide-input"]
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
    case("three rows meet their first tile. Has each its own maximum, and is o divided in the end?", S, V, 0),
    case("the table above. o arrives divided by ℓ: what undoes that?", four, values, 2),
    case("in row 0 the old maximum is larger than the tile's. Which side must shrink there?", S, V, 3),
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
# In `update` of chapter 02 $o$ was a raw sum, and nothing had to be undone. And p was taken relative to $m_{new}$ at once:
# then $\beta$ is 1. That is right here, too.

# %% [markdown]
# ## Which loop goes outside?
#
# FA1 puts the loop over column blocks j outside: so each block of keys and values is loaded once, and all row blocks are
# taken past it. Then come the next keys, and all row blocks again. (Chapter 04 asks whether that is the better way.)
#
# One worker does this for a whole head. Its SM has room for the state of one row block, not of all N queries. So after each
# tile $m$, $\ell$ and $o$ are stored in HBM, and before the next tile of these rows they are loaded again. Find both lines
# below. (`fa1_step` is the solution above. The tags are of Algorithm 2 in the FA1 paper's appendix: Algorithm 1 plus a
# scale, a mask and dropout; we need only the scale.)

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
# After each column block, O is the attention over the keys so far, as promised.

# %% [markdown]
# ## Watch it travel

# %% tags=["nbval-ignore-output", "hide-input"]
live("algorithm1", names=["FA1"])

# %% [markdown]
# **In the live piece** choose FA1 and step through two column blocks. S never leaves the chip. But follow $m$, $\ell$ and
# $o$ of one query: filled is on the chip, outlined is in HBM. They come and go at every tile. **In the still picture**
# (on GitHub, N = 12 and d = 4) each mark on the right is one load or store. Together they move 936 elements.
#
# There are $T_c = \lceil N / B_c \rceil$ column blocks (rounded up). So FA1's forward moves
#
# - $Nd + 2N$ elements to set O, ℓ and m at the start,
# - $2Nd$ elements to load K and V once,
# - $3Nd + 4N$ elements for each column block: Q, O, ℓ and m in; O, ℓ and m out.

# %%
meter = Trace()
watched = meter.hbm(Q=Q, K=K, V=V, O=np.empty((8, 4)), l=np.empty(8), m=np.empty(8))
fa1_forward(*watched, B_r=4, B_c=2, tau=tau)
N, d, T_c = 8, 4, 4
formula = N * d + 2 * N + 2 * N * d + T_c * (3 * N * d + 4 * N)
print(f"B_c = 2: {formula} by the formula, {meter.hbm_elements} on the meter")

# %% [markdown]
# ## Is that less than standard attention?
#
# **Predict.** FA1 never sends S or P to HBM. When do fewer bytes reach DRAM than in standard attention?
#
# - ☐ always, since S and P were nearly all of it
# - ☐ if the text is long enough
# - ☐ if a block has enough keys
#
# <details><summary>Answer</summary>
#
# **if a block has enough keys.** Queries and unfinished answers travel in place of S and P: about $N^2 (3d + 4) / B_c$
# elements, since $T_c = N / B_c$, against $4N^2$. In bytes that is $N^2 (10d + 16) / B_c$ against $12N^2$, because q has two
# bytes per number, and an unfinished o, ℓ and m have four. Both grow with $N^2$, so N does not matter. FA1 needs
# more than (10d + 16) / 12 keys in a block, 55 for d = 64 and 108 for d = 128.
# </details>

# %% [markdown]
# FA1's extra memory is 2N numbers, ℓ and m. At d = 64, 85% of standard attention's bytes reach DRAM with 64 keys per
# block, and 43% with 128.
#
# Shared memory has room for M elements, an H200's 228 KiB for 116,736 of two bytes. The paper takes $B_r = \min(B_c, d)$
# and $B_c = \lceil M / 4d \rceil$, 228 keys for d = 128. Then k and v fill half of the room, the scores, of four bytes,
# the other half, and q and o as much as 42% more, so not everything fits. The rule is good up to a constant factor. With $T_c =
# 4Nd / M$ FA1 loads and stores about $12\,N^2 d^2 / M$ elements; the paper calls this the *IO complexity*, $\Theta(N^2 d^2 / M)$.
# It tried blocks of 64 to 512 keys, and beyond 256 the time fell no further.

# %% tags=["nbval-ignore-output", "hide-input"]
show(hbm_traffic.draw(**hbm_traffic.data()))

# %% [markdown]
# The charts count what the SMs load and store, wherever it is found. (Standard attention's products load their operands
# in tiles of 128 × 128; chapter 04.) In the first chart all three methods rise as $N^2$. Only the floor does not: each of Q, K,
# V and O once. In the second N is fixed: with little room on the chip, FA1 is above standard attention. (Upright lines: the
# room on two GPUs.)

# %% [markdown]
# ## What still travels?
#
# S and P stay on the chip. Of the 3Nd + 4N elements for each column block about two thirds are unfinished answers.
#
# With 64 keys a block FA1 is ahead at d = 64. At d = 128 it is behind, because q and o are twice as wide: 1.7 times as many
# bytes reach DRAM as in standard attention. For each query and each block of 64 keys q comes in, o comes in and o goes out:
# 128 · (2 + 4 + 4) = 1,280 bytes, 20 for each of 64 scores. (ℓ and m, in and out, are 16 bytes more. An unfinished o has
# four bytes a number, because two would round it at every tile.) Standard attention has 12 for each score.
#
# Why does L2 not help? With one worker a head, all heads are at work at once: at N = 4,096 and 64 heads their Q takes 1 MiB a
# head and their O 2 MiB. That is 192 MiB together, too much for L2's 60, so nearly all that FA1 loads and stores reaches DRAM.

# %% [markdown]
# ## Why was the authors' kernel fast?
#
# Chapter 00 shows an FA1 that is slower than standard attention. The authors' kernel was usually 2 to 4 times as fast as
# standard attention, in figure 2 of [their paper](https://arxiv.org/abs/2205.14135) 5.7 times: GPT-2 medium on an A100,
# N = 1,024, d = 64, 64 texts with 16 heads each, forward and backward.
#
# | | standard | FA1, the authors' kernel |
# | --- | ---: | ---: |
# | HBM reads and writes | 40.3 GB | 4.4 GB |
# | time | 41.7 ms | 7.3 ms |
#
# Their kernel, too, has one thread block for each head. Two things differ.
#
# - **Heads.** 64 texts with 16 heads are 1,024 workers for 108 SMs. Chapter 00 has 4 texts: 64 workers for 132 SMs.
# - **Blocks and code.** Theirs is CUDA written by hand, with large blocks. With 256 keys a block, an answer over 1,024
#   keys is stored four times. Ours is the simplest Triton. It has Algorithm 1's loops and division, but 64 keys a
#   block, where the paper's rule would give 228.
#
# At N = 4,096 ours takes about four times as long as standard attention. 1.7 times the bytes reach DRAM, half of the SMs
# idle cost up to another 2, and the simple code does the rest. So FA1 needs many heads and large blocks.

# %% [markdown]
# ## How does the backward pass get P back?
#
# **Predict.** The gradients need P, and P was thrown away. The scores of a tile can be computed again from q and k. What
# turns them into probabilities?
#
# - ☐ the online softmax again, over all tiles of the row
# - ☐ one exponential and one division
# - ☐ a softmax over the scores of this tile
#
# <details><summary>Answer</summary>
#
# **one exponential and one division.** The forward pass left the final $m$ and $\ell$ of each row in HBM. With them
# $p = e^{s - m} / \ell$ is the final probability at once. (A softmax over one tile is wrong: only whole rows sum to 1.)
# </details>
#
# That is one product more, $QK^\top$, and nothing of size $N^2$ is stored. By chapter 00's prices a score takes 2d FLOPs, an
# exponential (256) and a subtraction (32): 416 for d = 64 and 544 for d = 128. To store P in two bytes and load it again
# takes 824, which is 2.0 and 1.5 times as much. If all units work at the same time, 256 stand against 824.
#
# <details><summary>If you train with dropout: how is its mask not stored?</summary>
#
# *Dropout* sets entries of P to 0 by chance, and the backward pass must drop the same ones. Storing $N^2$ bits would
# take a sixteenth of P's memory, which still grows with $N^2$. So each random number is computed again, from a seed, its
# row and its column.
# </details>

# %% [markdown]
# ## Recap
#
# - FA1 computes one tile of S at a time, uses it and throws it away. Nothing of size $N^2$ reaches HBM.
# - Keys outside, queries inside. $o$, divided by $\ell$ at every step, travels with $\ell$ and $m$ for each column block.
# - About $N^2 (3d + 4) / B_c$ elements reach DRAM: less than in standard attention if a block has enough keys.
# - Backward: $p = e^{s - m} / \ell$, tile by tile.
#
# After the next chapter [assignment 2](assignments/2_forward.ipynb) goes further, from FA1 to FA2.

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("fa1_forward here = fa1.forward", all(map(close, (O, l, m), fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau))))
verdict("the formula = io.fa1_forward", formula == io.fa1_forward(Tiling(8, 8, 4, 2), 4).total)
slow = {name: dict(points) for name, points in time_and_memory.data()["time"].items()}
verdict("FA1 takes about four times standard's time", 3.5 < slow["FA1"][4096] / slow["standard"][4096] < 4.5)
verdict("1.7 times the bytes reach DRAM", round(cost("FA1").crossed / cost("standard").crossed, 1) == 1.7)
share = [round(cost("FA1", d=64, B_c=B_c).crossed / cost("standard", d=64).crossed, 2) for B_c in (64, 128)]
verdict("85% and 43% of standard attention's bytes", share == [0.85, 0.43])
verdict("99% of what FA1 loads and stores reaches DRAM", cost("FA1").crossed > 0.99 * cost("FA1").requested)
needed = [(10 * d + 16) / 12 for d in (64, 128)]
verdict("FA1 needs 55 and 108 keys in a block", [int(np.ceil(x)) for x in needed] == [55, 108])
B_c, B_r, d = 228, 128, 128
held = 2 * 2 * B_c * d + 4 * B_r * B_c + (2 + 4) * B_r * d
verdict("the paper's blocks need 42% more than there is", round(held / (228 * 1024), 2) == 1.42)
price = prices(chips.H200).in_flops()
again, stored = [round(2 * d + price["exp"] + price["fp32"]) for d in (64, 128)], 4 * price["dram"]
verdict("computed again 416 or 544, stored and loaded 824", again == [416, 544] and stored == 824.5)

# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)
