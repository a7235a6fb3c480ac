# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what is a GPU?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same numbers on a GPU, faster and with little memory. This
# book goes from the four lines to that kernel (GPU program), one change at a time.
#
# After this notebook you can
#
# - write attention down, and say which two of its matrices cause all the trouble,
# - say where a GPU keeps numbers, what is cheap there, and what is expensive,
# - tell extra memory, requests, and what crosses to DRAM apart.
#
# *Time: 30 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: matrix products,
# and NumPy's arrays.*
#
# Answer each question marked **Predict** in your head. Then open what is folded below it, first the output, then the
# answer: the text goes on with both. Other folded code need not be read unless the text says so.

# %%
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips, io
from fa2_lab.plots import gpu_map, time_and_memory
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import Tiling
from fa2_studio.book.chapters import CHAPTERS
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## How much is there to win?
#
# A text is a row of N tokens: words, or pieces of words. Attention compares every token of a text with every other.
# Four programs do it here on one GPU. *Standard* does one step after the other. *FA1* and *FA2* are FlashAttention of
# 2022 and FlashAttention-2 of 2023. *Ours* is the last kernel of this book. The upper chart always processes
# 16,384 tokens, split into texts of length N. The lower one is the memory that one text takes beyond the inputs: its
# output, and what is held on the way.

# %%
show(time_and_memory.draw(**time_and_memory.data()))

# %% [markdown]
# At N = 16,384 our kernel is 5.8 times as fast as standard attention. FA1, as this book has it, takes 15 times as long as
# standard attention: one worker per head uses 16 of the 132 SMs (chapter 06). With each doubling of N, standard's memory
# grows fourfold, until the GPU is full. FA2's and ours double.
# (bf16 is a number of two bytes, *causal* a word of chapter 04. FA2, and standard in the lower chart, are PyTorch's; the others
# are kernels of this book.)
#
# **Takeaway.** The same answer can be had several times faster, and in memory that grows with N, not N².

# %% [markdown]
# ## What does attention compute?
#
# Each token has a query (what it is looking for), a key (what it can be found by) and a value (what it hands over), each
# a row of d numbers. A query is compared with all keys. The better a key matches, the more its value counts. The output
# is the weighted mean of the values.


# %%
def attention(Q, K, V):  # (N, d) each: one token to a row
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (N, N) scores: how well query i matches key j
    E = np.exp(S)  # (N, N) every score made positive
    P = E / E.sum(axis=1, keepdims=True)  # (N, N) weights: each row sums to 1
    return P @ V  # (N, d) for each query, the mean of all values with these weights


# %% [markdown]
# **Predict.** Four tokens have the values (8, 0), (0, 4), (4, 0) and (0, 8). The first query is all zeros. What is its
# output?

# %% tags=["hide-input"]
K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
V = np.array([[8.0, 0.0], [0.0, 4.0], [4.0, 0.0], [0.0, 8.0]])
print("output of the first query:", attention(np.zeros((1, 2)), K, V)[0].tolist())

# %% [markdown]
# <details><summary>Answer</summary>
#
# **(3, 3), the plain mean.** All scores are 0, so all weights are 1/4.
# </details>
#
# In formulas: $S = QK^\top / \sqrt{d}$, $P = \mathrm{softmax}(S)$ row by row, and the output is $O = PV$. A model does this
# many times side by side. One such attention is a *head*.
#
# Q, K, V and O have N · d numbers each, S and P have N². At N = 8,192 and d = 64 that is 128 times as many. With four bytes
# a number, S of one head takes 256 MiB.
#
# **Takeaway.** Attention is a weighted mean of values. S and P are large, and only steps on the way.

# %% [markdown]
# ## Where can a number be on a GPU?
#
# Many *thread blocks* run a kernel. They are the workers of this book. A *thread* executes instructions one by one. A
# *warp* is 32 threads that execute the same instruction together. A thread block has several warps, and stays on one
# processor until it is done. The processors are *SMs*: this GPU has 132 SMs.
#
# | place | what it is | room on an H200 |
# | --- | --- | --- |
# | registers | numbers that one thread is working with | 256 KiB in each SM |
# | shared memory | for all warps of a thread block (papers: SRAM) | 228 KiB in each SM |
# | L2 | copies of what came from HBM lately, for all SMs (a *cache*) | 60 MiB |
# | HBM | large, beside the chip, a kind of DRAM; tensors (arrays) live here | 141 GiB |
#
# In this book, *on chip* means in registers or shared memory, though L2 is on the same silicon. An SM also has units
# that compute: *tensor cores* multiply small matrices, *FP32 units* add and multiply float32 numbers, *special function
# units* compute exponentials.
#
# **Predict.** Do the 256 MiB of S fit into the shared memory of all 132 SMs? And do 128 × 128 scores, of four bytes each,
# fit into that of one SM?

# %% tags=["hide-input"]
chip = chips.H200  # the GPU of the measurements in this book, where nothing else is said
print(f"shared memory of all SMs: {chip.SMs * chip.shared_per_sm / 2**20:.0f} MiB")
print(f"128 × 128 scores: {128 * 128 * 4 // 1024} KiB of the {chip.shared_per_sm // 1024} KiB of one SM")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No, and yes.** 132 · 228 KiB are 29 MiB. But the 128 × 128 scores take only 64 KiB.
# </details>
#
# Below, areas are sizes. The three dots on HBM are registers, shared memory and L2, drawn there to compare. Bars are
# speeds (TB/s: 10¹² bytes in a second). The link to other GPUs is for chapter 15.

# %% tags=["hide-input"]
show(gpu_map.draw(**gpu_map.data()))

# %% [markdown]
# **Takeaway.** There is much room far away, and little room nearby, where numbers come fast.

# %% [markdown]
# ## What is cheap, and what is expensive?
#
# A *FLOP* is one addition or multiplication. A TFLOP/s is $10^{12}$ of them in a second.
#
# **Predict.** The tensor cores do 989 TFLOP/s, and HBM delivers 4.8 TB/s. How many FLOPs can the tensor cores do while
# one byte arrives?

# %% tags=["hide-input"]
prices = {
    "one byte from HBM": chip.flops_per_byte,
    "one addition or multiplication on an FP32 unit": chip.tensor_per_clock / chip.fp32_per_clock,
    "one exponential": chip.flops_per_exp,
    "one score to HBM and back": 2 * 4 * chip.flops_per_byte,  # four bytes out, and four bytes in
}
print("FLOPs that the tensor cores do in the time of …")
for what, price in prices.items():
    print(f"{what:48} {price:5,.0f}")
print(f"FLOPs to compute a score again, for d = 64: {2 * 64}")  # 64 multiplications and 64 additions

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 200.** 989 / 4.8 = 206.
# </details>
#
# Look at the last two lines of the output: it is cheaper to compute a score again than to store it and fetch it back.
#
# **Takeaway.** Products of matrices (*matmuls*) are cheap. Moving numbers is expensive, and so are exponentials.

# %% [markdown]
# ## Can it be done without S?
#
# It can. Cut S into *tiles*: a few queries against a few keys. FA1 and FA2 compute one tile, use it, and throw it away.
# Chapters 02 and 03 show how. Here are 8 queries and 8 keys, by the four lines above, and by standard, FA1 and FA2 of
# this book's package:

# %% tags=["hide-input"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
sizes = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
ways = [
    attention(Q, K, V),
    naive.forward(Q, K, V)[0],
    fa1.forward(Q, K, V, **sizes)[0],
    fa2.forward(Q, K, V, **sizes)[0],
]
print("the first number of O:", *(f"{O[0, 0]:.12f}" for O in ways))

# %% [markdown]
# **Takeaway.** FlashAttention is not an approximation. It is the same sum in another order.

# %% [markdown]
# ## What does "less" mean?
#
# - The *extra memory* is room for all but Q, K, V and O.
# - What the chip *requests* is all that the SMs load and store.
# - What *crosses to DRAM* is the part that L2 cannot answer.
#
# FA2 keeps a block of queries on chip and loads all keys and values. For the next block of queries it loads them again.
#
# **Predict.** K and V of one head take 2 MiB (N = 4,096, d = 128). When the chip requests them for the second time,
# where are they found?

# %% tags=["hide-input"]
counters = {r.problem["rung"]: r.values for r in load("ladder").rows if r.direction == "counters"}
tiling, heads, GB = Tiling(4096, 4096, 64, 64), 64, 1e9
extra = {"standard": (4 + 2) * 4096**2, "FA2": 4 * 4096}  # bytes: 4 for S and 2 for P; 4 for the one number L of a row
shares = []  # of the requests, that cross: for the checks below
print("GB for 64 heads   extra memory   the chip requests   crosses to DRAM (counted on an H200)")
for name, rung in (("standard", "r00_standard"), ("FA2", "r07_two_loops")):
    t = io.traffic(name.lower(), "forward", tiling, 128)
    requested = sum(n * (4 if tensor in "SL" else 2) for part in (t.loads, t.stores) for tensor, n in part.items())
    crossed = sum(counters[rung][f"DRAM bytes {way}"][0] for way in ("read", "written"))
    shares.append(crossed / (requested * heads))
    print(f"{name:16} {extra[name] * heads / GB:13.3f} {requested * heads / GB:19.1f} {crossed / GB:17.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **In L2**, which has room for 60 MiB.
# </details>
#
# FA2's extra memory is one number for each row. Standard holds S (four bytes a number) and P (two). Only 3% of FA2's
# requests cross to DRAM: a few heads run at a time, and their K and V fit in L2. Standard's nearly all cross: S and P
# do not fit.
#
# The *meter* of this book counts requests. "Loaded", "stored" and "moved" always mean requests of the chip.
#
# In motion: standard attention fills the whole square of scores and keeps it. FlashAttention-2 goes over the same square
# and keeps one tile.
#
# ![Standard attention fills a square of scores and keeps it; FlashAttention-2 keeps one tile; the output is the same](../figures/hero.svg)
#
# **Takeaway.** FA2 requests much, but little of it crosses to DRAM.

# %% [markdown]
# ## What comes next?
#
# No chapter needs a GPU. 01 to 07, A and B are NumPy. Others run Triton, a Python dialect for kernels, in its
# interpreter, or a model of the GPU, and show what a GPU recorded. From 02 to 07 each change makes one thing smaller. A bar
# shows the share that is left.
#
# ![A list of the changes of chapters 02 to 07, each with a bar for the share that it leaves](../figures/ladder.svg)


# %% tags=["nbval-ignore-output", "hide-input"]
def row(chapter):
    return f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |"


Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *map(row, CHAPTERS)]))

# %% [markdown]
# A tag such as FA2.A1.L12 in a comment names a paper, an algorithm and a line. In a terminal, `fa2-lab where FA2.A1.L12`
# prints it with its code, and `fa2-lab glossary` explains words, also in Chinese.

# %% [markdown]
# ## Recap
#
# - Attention is a weighted mean of values. S and P have N² numbers and are only steps on the way.
# - Products are cheap; moving numbers and taking exponentials is expensive.
# - FA1 and FA2 compute the same numbers in tiles, and never hold all of S.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** How many rows and columns may a square tile have, so that its scores (four bytes each) fit into `room`
# bytes? Write it in place of the `...`.
#
# <details><summary>Hint</summary>
#
# B × B scores have 4B² bytes. Round down.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return int(np.sqrt(room / 4))
# ```
# </details>


# %%
def largest_tile(room):
    return ...


# %% tags=["hide-input"]
for name, room in (("shared memory of an SM", chip.shared_per_sm), ("L2", chip.l2_bytes)):
    B = largest_tile(room)
    if B is ...:
        print("not written yet:", name, "has", f"{room:,}", "bytes")
    elif 4 * B**2 > room:
        print(f"not yet: {B} × {B} scores have {4 * B**2:,} bytes, {name} has {room:,}")
    else:
        print("right:" if 4 * (B + 1) ** 2 > room else "not yet, one more row and column would fit:", B)

# %% [markdown]
# **2. Find the bug.** In the four lines somebody wrote `E.sum(axis=0, keepdims=True)`. All shapes are right. Write a test
# of P that finds it: True for the right weights, False for the wrong ones.
#
# <details><summary>Hint</summary>
#
# What must the weights of each query sum to? `np.allclose` compares.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return np.allclose(P.sum(axis=1), 1)
# ```
# </details>


# %%
def looks_right(P):  # (N_q, N_k)
    return ...


# %% tags=["hide-input"]
E = np.array([[1.0, 3.0, 4.0], [2.0, 2.0, 4.0]])  # two queries, three keys
found = {axis: looks_right(E / E.sum(axis=axis, keepdims=True)) for axis in (0, 1)}
if ... in found.values():
    print("not written yet")
elif not found[1]:
    print("not yet: your test rejects the right weights", (E / E.sum(axis=1, keepdims=True)).tolist())
else:
    print("right" if not found[0] else "not yet: your test accepts the wrong weights")

# %% [markdown]
# ## Checks
#
# The code is compared with the package, the text with the recorded measurements.

# %% tags=["hide-input"]
rng = np.random.default_rng(1)
Q, (K, V) = rng.standard_normal((37, 8)), rng.standard_normal((2, 29, 8))
verdict("37 queries, 29 keys: the four lines", close(attention(Q, K, V), naive.forward(Q, K, V)[0]))
for name, stage in (("FA1", fa1), ("FA2", fa2)):
    result = stage.forward(1e3 * Q, K, V, B_r=16, B_c=5)[0]
    verdict(f"37 queries, 29 keys, scores × 1000: {name}", close(result, naive.forward(1e3 * Q, K, V)[0]))

# %% tags=["hide-input"]
shown, N = time_and_memory.data(), 16384
time, memory = ({name: dict(curve) for name, curve in shown[what].items()} for what in ("time", "memory"))
verdict("ours is 5.8 times as fast as standard", round(time["standard"][N] / time["ours"][N], 1) == 5.8)
verdict("FA1 takes 15 times as long as standard", round(time["FA1"][N] / time["standard"][N]) == 15)
growth = [memory[name][N] / memory[name][N // 2] for name in ("standard", "FA2", "ours")]
verdict("memory at twice the N: fourfold, double, double", [round(x, 1) for x in growth] == [3.9, 2.0, 2.0])
verdict("and standard has no place at twice this N", max(memory["standard"]) == N)
verdict("nearly all of standard's, and 3% of FA2's, cross to DRAM", shares[0] > 0.99 and round(shares[1], 2) == 0.03)

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
