# %% [markdown] tags=["navigation"]
# [← Online softmax](02_online_softmax.ipynb) · [The map](00_start.ipynb) · [FlashAttention-2, forward →](04_fa2_forward.ipynb)

# %% [markdown]
# # 03 · FlashAttention
#
# **What if the score matrix never leaves the chip?**
#
# Standard attention writes S and P to HBM and reads them back (chapter 01). Softmax, however, can take its keys one block
# at a time (chapter 02). So FlashAttention of 2022, *FA1*, computes a small tile of S on the chip, uses it at once, and
# throws it away. A single kernel does all steps.
#
# After this notebook you can
#
# - write FA1's step, and explain why its two loops send unfinished answers to HBM and back,
# - count what FA1 loads and stores, and decide from the size of a block whether that is less than in standard attention,
# - explain how the backward pass gets P back.
#
# *Time: 50 minutes with the function to write. Hardware: any laptop, NumPy alone. Before this: [02 · Online
# softmax](02_online_softmax.ipynb).*

# %% tags=["hide-input"]
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips, io, reasons
from fa2_lab.machine.prices import cost, prices
from fa2_lab.plots import roofline, time_and_memory
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa1, naive
from fa2_lab.tiles import Tiling
from fa2_lab.trace import Trace
from fa2_studio.book.build import Case, check
from fa2_studio.book.steps import fa1_step
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## What goes wrong?
#
# S and P were most of the traffic, and FA1 sends neither of them to HBM. So it should move fewer bytes and be faster. Here
# are two simple kernels on an H200, standard attention and FA1 exactly as its Algorithm 1 is printed (64 heads, N = 4,096,
# d = 128, 64 keys per block):

# %% tags=["hide-input"]
record, rungs = load("ladder"), {"standard attention": "r00_standard", "FA1 as printed": "r01_fa1"}
took, moved = reasons.timed(record, causal=False, d=128), roofline.counted(record, 128)
lines = [
    f"| {name} | {moved[rung] / 1e9:.1f} GB | {took.values[rung][0]:.1f} ms |" for name, rung in rungs.items()
]
Markdown("\n".join(["| | bytes that reached DRAM, counted | time |", "| --- | ---: | ---: |", *lines]))

# %% [markdown]
# FA1 moves 1.7 times as many bytes, and takes four times as long. Something else now travels in place of S and P. It is the
# answer itself, which leaves the chip unfinished and comes back, once for every 64 keys. We shall write the loop that does
# this, count its bytes, and find out when it is nevertheless the better one. (The kernel of FA1's authors was much faster
# than standard attention. The end of this chapter explains how.)

# %% [markdown]
# ## A finished row and one more tile
#
# Cut the queries into $T_r$ *row blocks* of $B_r$ queries, and the keys into $T_c$ *column blocks* of $B_c$ keys. A row
# block and a column block meet in one tile of S, with $B_r \times B_c$ scores.
#
# FA1 keeps a promise: after every tile, $o$ is the right answer for the keys seen so far. So $o$ is always divided by
# $\ell$. Here is the 1-3-4-8 row of chapter 02 after its first two keys, and a tile with the other two. The values of the
# tile are 4 and 2, and its weights $p = e^{s - m_{tile}}$ are 1/2 and 1.
#
# | | maximum | sum of exponentials | weighted sum of values |
# | --- | --- | --- | --- |
# | the row so far | $m = \log 3$ | $\ell = 4/3$ | $o = 2$, divided by $\ell$ |
# | the tile, scores $\log 4$ and $\log 8$ | $m_{tile} = \log 8$ | $\ell_{tile} = 3/2$ | $p\,v = 4$, not divided |
#
# Each side has its own maximum. Two factors bring both sides to the larger one, $\alpha = e^{m - m_{new}}$ for the row
# and $\beta = e^{m_{tile} - m_{new}}$ for the tile. Then the two $\ell$ can be added. The two outputs, however, can only
# be added as raw sums. So the old $o$ is first multiplied by the $\ell$ that it was divided by:
#
# $$\ell_{new} = \alpha\,\ell + \beta\,\ell_{tile} \qquad o_{new} = \frac{\alpha\,\ell\,o + \beta\,p\,v}{\ell_{new}}$$
#
# Here $\alpha = 3/8$ and $\beta = 1$, so $\ell_{new} = \frac{3}{8} \cdot \frac{4}{3} + \frac{3}{2} = 2$, and $o_{new} =
# (\frac{3}{8} \cdot \frac{4}{3} \cdot 2 + 4) / 2 = 5/2$, the answer of chapter 02.

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
    case("three rows meet their first tile. Has each row its own maximum, and is o divided in the end?", S, V, 0),
    case("the 1-3-4-8 row of the table above. o arrives divided by ℓ. What undoes that?", four, values, 2),
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
# In `update` of chapter 02, $o$ was a raw sum, so nothing had to be undone. And p was taken relative to $m_{new}$ at once,
# so $\beta$ was 1. You may also do that here.

# %% [markdown]
# ## Which loop goes outside?
#
# FA1 puts the loop over column blocks j outside. A block of keys and values is loaded once, and every row block is matched
# with it. Then comes the next block of keys, and every row block is matched with that one. (Chapter 04 asks whether this is
# the better order.)
#
# A single worker does this for a whole head. Between two visits to the same rows it handles all other rows of the head,
# and their states do not fit into its SM. With N = 4,096 and d = 128, the o of all queries has 2 MiB, but the SM has 228
# KiB of shared memory. So the worker stores the state of a row block in HBM after each tile, and loads it again before the
# next tile of these rows. Find both lines below. (`fa1_step` is the solution above. The tags name lines of Algorithm 2
# in the FA1 paper's appendix, which is Algorithm 1 with a scale, a mask and *dropout*, explained in chapter 05. We only
# need the scale.)

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
# After each column block, O is the attention over the keys so far, as FA1 promised.

# %% [markdown]
# ## Watch it travel

# %% tags=["nbval-ignore-output", "hide-input"]
live("algorithm1", ask="order=fa1", names=["FA1"])

# %% [markdown]
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
# ## When is that less than standard attention?
#
# **Predict.** FA1 never sends S or P to HBM. When do fewer bytes reach DRAM than in standard attention?
#
# - ☐ if the sequence is long enough
# - ☐ if a block has enough keys
# - ☐ always, since S and P were nearly all of it
#
# <details><summary>Answer</summary>
#
# **if a block has enough keys.** For one query and one block of keys, q and o come in and o goes out, however large the
# block is. Meanwhile standard attention moves 12 bytes for each key of the block. N does not matter, because both grow
# with $N^2$.
# </details>

# %% [markdown]
# Now in bytes, for one query and one block of $B_c$ keys. An element of q has two bytes. An element of an unfinished o
# has four, since two would round it at every tile. Also $\ell$ and m have four.
#
# | | in | out | together |
# | --- | ---: | ---: | ---: |
# | q | 2 d | | 2 d |
# | o, unfinished | 4 d | 4 d | 8 d |
# | $\ell$ and m | 8 | 8 | 16 |
# | FA1 | | | 10 d + 16 |
# | standard attention (S and P) | | | 12 $B_c$ |
#
# So four fifths of the bytes are unfinished answers. FA1 moves fewer bytes than standard attention if a block has more
# than (10d + 16)/12 keys, which is 55 keys for d = 64, and 108 for d = 128. The kernel at the top of this chapter has 64
# keys per block at d = 128, and loses. Compared with standard attention (= 100%), FA1's bytes are:

# %% tags=["hide-input"]
lines = []
for d in (64, 128):
    shares = [cost("FA1", d=d, B_c=B_c).crossed / cost("standard", d=d).crossed for B_c in (64, 128, 256)]
    lines.append(f"| d = {d} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
Markdown("\n".join(["| | 64 keys per block | 128 keys | 256 keys |", "| --- | ---: | ---: | ---: |", *lines]))

# %% [markdown]
# L2 also holds what was stored lately (chapter 00). Could the unfinished answers not simply stay in L2 until they are needed
# again? Not here. With one worker per head, all 64 heads are at work at the same time. At d = 128, Q of a head has 1 MiB and its unfinished O has 2 MiB.
# Together that is 192 MiB, far too much for the 60 MiB of L2. So nearly all that FA1 loads and stores reaches DRAM.
#
# In memory, on the other hand, FA1 wins in any case: it needs only 2N numbers beyond its inputs and output, $\ell$ and m.

# %% [markdown]
# ## How large can a block be?
#
# The blocks must fit on the chip. If there is room for M elements (228 KiB are 116,736 elements of two bytes), the paper
# takes $B_c = \lceil M / 4d \rceil$ keys and $B_r = \min(B_c, d)$ queries. For d = 128, that is 228 keys. This rule is
# right only up to a constant factor, because k and v fill half of the room, the scores, at four bytes, fill the other half,
# and q and o need 42% of the room in addition.
#
# With this rule $T_c = 4Nd / M$, so FA1 loads and stores about $T_c \cdot 3Nd = 12\,N^2 d^2 / M$ elements. The paper
# calls this the *IO complexity*, $\Theta(N^2 d^2 / M)$. In words, twice the room halves the traffic, and twice the
# sequence makes it four times as large.

# %% tags=["nbval-ignore-output", "hide-input"]
show("hbm_traffic")

# %% [markdown]
# The chart counts what the SMs load and store, wherever it is found, and N is fixed. With little room on the chip, FA1 is
# above standard attention. Each step to the right doubles the room. At first this halves what FA1 moves. Later it gains
# less, because the curve comes near to the least that is possible, which is each of Q, K, V and O once. (For standard
# attention the chart counts the tiles of its products, which chapter 04 explains.) The upright lines are the room on two
# older GPUs of NVIDIA, the A100 of the papers and the H100, which has the same room per SM as the H200. In practice larger blocks stop helping earlier: the paper tried blocks of 64 to 512 keys, and
# beyond 256 keys the time fell no further.

# %% [markdown]
# ## Why was the authors' kernel fast?
#
# The FA1 of chapter 00, and of the table at the top, is slower than standard attention. The kernel of the FA1 authors was
# usually 2 to 4 times as fast as standard attention, and 5.7 times as fast in figure 2 of [their
# paper](https://arxiv.org/abs/2205.14135): GPT-2 medium on an A100, N = 1,024, d = 64, 64 sequences with 16 heads each,
# forward and backward.
#
# | | standard attention | FA1, the authors' kernel |
# | --- | ---: | ---: |
# | HBM reads and writes | 40.3 GB | 4.4 GB |
# | time | 41.7 ms | 7.3 ms |
#
# Their kernel also has one thread block for each head. But two things differ.
#
# - **Heads.** 64 sequences with 16 heads are 1,024 workers for the 108 SMs of an A100. Our table has 4 with 16 heads,
#   which are 64 workers for 132 SMs.
# - **Blocks and code.** Their kernel is CUDA written by hand, with large blocks. With 256 keys per block, an answer over 1,024
#   keys is stored four times. Ours is the simplest Triton, with Algorithm 1's loops and its division in every tile, and
#   with 64 keys per block.
#
# So ours takes four times as long as standard attention at N = 4,096, for three reasons. First, 1.7 times as many bytes
# reach DRAM. They also move more slowly, at 1.4 TB/s, while standard attention draws 3.2 TB/s. Since DRAM could deliver
# 4.8 TB/s, its speed is not what limits FA1's kernel. With 8 heads instead of 64, the work is an eighth, but the time is
# still 11.7 ms instead of 16.3 ms. So the time is mostly that of one worker, which goes through all tiles of a head alone.
#
# The second reason is therefore that half of the SMs are idle. With workers of their own, they could have done as much
# again in about the same time, if DRAM keeps up, so the idle SMs cost up to a factor of 2. The third reason is the simple
# code, in which one worker takes so long. FA1 needs many heads and large blocks.

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
# So the backward pass computes one product more, $QK^\top$, and stores nothing of size $N^2$. Is that cheaper? By the
# list of chapter 00, a score takes 2d FLOPs, an exponential (256) and a subtraction (32), which is 416 for d = 64 and 544
# for d = 128. To store P in two bytes and to load it again takes 824, which is 2.0 and 1.5 times as much. If all units
# work at the same time, only the slowest one counts, and the comparison is 256 against 824.
#
# <details><summary>If you train with dropout: how is its mask not stored?</summary>
#
# *Dropout* sets entries of P to 0 at random, and the backward pass must drop the same ones. Storing $N^2$ bits would take
# only a sixteenth of P's memory, but that still grows with $N^2$. So each random number is computed again. Chapter 05
# shows what it must be computed from.
# </details>

# %% [markdown]
# ## Recap
#
# - FA1 computes one tile of S at a time, uses it and throws it away. Nothing of size $N^2$ reaches HBM.
# - Keys outside, queries inside. $o$, divided by $\ell$ at every step, travels with $\ell$ and $m$ for each column block.
# - About $N^2 (3d + 4) / B_c$ elements are loaded and stored, $N^2 (10d + 16) / B_c$ bytes. With many heads nearly all of them
#   reach DRAM. That is less than in standard attention if a block has more than (10d + 16)/12 keys.
# - Backward: $p = e^{s - m} / \ell$, tile by tile.
#
# After the next chapter, [assignment 2](assignments/2_forward.ipynb) goes further, from FA1 to FA2.

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("fa1_forward here = fa1.forward", all(map(close, (O, l, m), fa1.forward(Q, K, V, B_r=4, B_c=2, tau=tau))))
verdict("the formula = io.fa1_forward", formula == io.fa1_forward(Tiling(8, 8, 4, 2), 4).total)
slow = {name: dict(points) for name, points in time_and_memory.data()["time"].items()}
verdict("FA1 takes about four times standard's time", 3.5 < slow["FA1"][4096] / slow["standard"][4096] < 4.5)
verdict("1.7 times the bytes reach DRAM", round(cost("FA1").crossed / cost("standard").crossed, 1) == 1.7)
verdict("counted: 1.7 times", round(moved["r01_fa1"] / moved["r00_standard"], 1) == 1.7)
drawn = [round(moved[rung] / took.values[rung][0] / 1e9, 1) for rung in ("r00_standard", "r01_fa1")]
verdict("standard attention drew 3.2 TB/s from DRAM, FA1 1.4", drawn == [3.2, 1.4])
ms = {
    row.problem["batch"] * row.problem["heads"]: round(row.values["r01_fa1"][0], 1)
    for row in record.rows
    if (row.direction, row.problem["N_q"], row.problem["d"], row.problem["causal"]) == ("forward", 4096, 128, False)
}
verdict("FA1 takes 16.3 ms with 64 heads, 11.7 ms with 8", ms == {64: 16.3, 8: 11.7})
verdict("the H100 and the H200 have the same room", chips.H100.shared_per_sm == chips.H200.shared_per_sm)
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
