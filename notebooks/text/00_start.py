# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what is a GPU?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same numbers on a GPU, but faster and with little
# memory. This book goes from the four lines to that *kernel*, which is the word for a program that runs on a GPU. It
# changes one thing at a time, and it executes and checks every step.
#
# After this notebook you can
#
# - write attention down, and point to the two matrices that cause all the trouble,
# - name the places where a GPU keeps numbers, and what each kind of work costs,
# - decide whether it is cheaper to store a number or to compute it a second time.
#
# *Time: 35 minutes with the exercise. Hardware: any laptop, NumPy alone. Before this: matrix products, and NumPy arrays.*
#
# A question marked **Predict** has its answer folded below it. Choose an answer before you open the fold.

# %% tags=["hide-input"]
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips, grid, io
from fa2_lab.machine.prices import cost, prices
from fa2_lab.machine.time import fp32_instructions
from fa2_lab.machine.warps import tile_bytes
from fa2_lab.plots import time_and_memory
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_studio.book.build import Case, check
from fa2_studio.book.chapters import CHAPTERS
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## How much is there to gain?
#
# A text is a sequence of N tokens, which are words or pieces of words. Attention compares every token with every other.
# Below, four programs do this on the same GPU. *Standard* stores the result of each step in the GPU's memory. *FA1* is
# the algorithm of the 2022 paper, FlashAttention, taken literally, and *FA2* is FlashAttention-2 from 2023. *Ours* is the
# last kernel of this book.

# %% tags=["hide-input"]
show("time_and_memory")

# %% [markdown]
# At N = 16,384, our kernel is 5.8 times as fast as standard attention. In the upper chart, standard attention is made of
# simple kernels, and all four programs take numbers in *bf16*, a format of two bytes. Our kernel also needs far less
# memory. Each time N doubles, the memory of standard attention grows about fourfold, until the GPU is full, while the
# memory of FA2 and of our kernel only doubles. In the lower chart, however, standard attention is PyTorch's own, which
# computes in float32 with four bytes per number. So a part of the distance, but not the slope, is due to the format.
# (FA1's memory was not measured. Chapter 04 explains *causal*.)
#
# But why is FA1 the slowest of the four? A model runs attention many times side by side, and each of these runs is called
# a *head*. FA1's algorithm, taken literally, computes a whole head on one of the GPU's 132 processors. The upper chart
# always has 16,384 tokens and 16 heads. At N = 4,096 these are 4 texts with 64 heads, so 68 of the 132 processors have no
# work. At N = 16,384 there is one text, and only 16 processors work. Idle processors alone can therefore make FA1
# 2 times slower at N = 4,096, and 8 times slower at N = 16,384. But they do not explain the short texts, because at N = 512
# there are 512 heads. Chapter 03 explains the other causes, and also why the FA1 authors' own kernel was two to four times
# as fast as standard attention.

# %% [markdown]
# ## What does attention compute?
#
# Each token has a query (what it is looking for), a key (what it can be found by) and a value (what it has to offer).
# Each of these is a row of d numbers. Attention compares a query with all keys, and the better a key matches, the more
# its value counts. The output is the weighted mean of the values.


# %%
def attention(Q, K, V):  # (N, d) each: one row per token
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (N, N) scores: how well query i matches key j
    E = np.exp(S)  # (N, N) every score made positive
    P = E / E.sum(axis=1, keepdims=True)  # (N, N) weights: each row sums to 1
    return P @ V  # (N, d) for each query, the mean of all values with these weights


# %% [markdown]
# **Predict.** A query is all zeros, so it matches no key. The values are (8, 0), (0, 4), (4, 0) and (0, 8). What is its
# output?
#
# - ☐ (3, 3)
# - ☐ not a number
# - ☐ (0, 0)
#
# <details><summary>Answer</summary>
#
# **(3, 3).** All its scores are 0, so all its weights are 1/4. Softmax always distributes a total weight of 1. So a query
# that finds nothing gets the plain mean of all values.
# </details>

# %% [markdown]
# In formulas, $S = QK^\top / \sqrt{d}$, $P = \mathrm{softmax}(S)$ row by row, and the output is $O = PV$. Q, K, V and O
# have N · d numbers each, but S and P have N². At N = 8,192 and d = 64 that is 128 times as many. At four bytes per
# number, S of one head takes 256 MiB. This is the trouble: the two large matrices are only steps on the way, and a model
# has many heads. We call all memory beyond Q, K, V and O *extra memory*. (The chart at the top counts O as well.)
#
# KiB, MiB and GiB are 2¹⁰, 2²⁰ and 2³⁰ bytes. Speeds are in GB/s and TB/s, which are 10⁹ and 10¹² bytes per second.

# %% [markdown]
# ## Where can a number be on a GPU?
#
# Unless another one is named, the GPU of this book is NVIDIA's H200. Its parts are nested:
#
# - The GPU has 132 processors, which are called *SMs*.
# - An SM runs a few *thread blocks* at a time. A thread block stays on its SM until it is done. Thread blocks are the
#   *workers* of this book.
# - A thread block consists of several *warps*, and a warp of 32 *threads*. The threads of a warp execute the same instruction
#   together.
# - For these instructions, an SM has units. *Tensor cores* multiply small matrices, *FP32 units* add and multiply float32
#   numbers, and *special function units* compute exponentials.

# %% tags=["hide-input"]
show("nested")

# %% [markdown]
# A number can be in five places:
#
# | place | what it is | room on an H200 |
# | --- | --- | --- |
# | registers | numbers that one thread is working with | 256 KiB in each SM |
# | shared memory | for all warps of a thread block (papers: SRAM) | 228 KiB in each SM |
# | L1 | copies of what this SM loaded lately (a *cache*), in the rest of the same memory | 28 KiB or more in each SM |
# | L2 | between all SMs and HBM: copies of what was loaded lately, and what was stored lately (also a cache) | 60 MiB |
# | HBM | large, beside the chip; tensors (arrays) live here; also called *DRAM*, its kind of memory | 141 GiB (the data sheet says 141 GB) |
#
# *On chip* means in registers or in shared memory. The 256 MiB of S do not fit there, because the registers of all SMs
# together have 33 MiB, and their shared memory has 29 MiB. But a piece of 128 × 128 scores takes 64 KiB (at four bytes
# each), and it fits into a single SM.
#
# What an SM loads and stores goes through L2. So a number that an SM has just stored can be found in L2 for a while, by
# this SM and by all others, and it need not come from HBM.
#
# Two numbers describe the path from one place to another. *Bandwidth* is how many bytes arrive per second. From HBM it is
# 4.8 TB/s at most, and all other places in the table are faster. *Latency* is how long one byte takes, from the request to
# its arrival. An SM can hide latency if it has other warps to run in the meantime. So in the first chapters only bandwidth
# counts.
#
# In the map below, areas are sizes. The inset enlarges the small squares 14 times in each direction. L1 has no square of
# its own, because it takes what shared memory leaves free. (The link matters in chapter 15.)

# %% tags=["hide-input"]
show("gpu_map")

# %% [markdown]
# ## What does each kind of work cost?
#
# A *multiply-add*, a · b + c, is one instruction (FMA) and counts as two *FLOPs*, one multiplication and one addition, as
# in all data sheets. One TFLOP/s is 10¹² FLOPs per second.
#
# The tensor cores do 989 TFLOP/s with numbers of two bytes. They are the fastest unit, so we measure all other work by
# them. If a byte from DRAM costs 206, the tensor cores could do 206 FLOPs while HBM delivers that byte (both at full
# speed).
#
# All units can work at the same time. So a method takes at least the time of the unit that ends last.

# %%
chip = chips.H200
for name, price in prices(chip).in_flops().items():
    print(f"{name:6} {price:4.0f}")

# %% [markdown]
# - `fp32` is one instruction of an FP32 unit (addition, multiplication, or multiply-add), and `exp` is one exponential.
# - `shared`, `l2` and `dram` are one byte from shared memory, from L2 (measured, because NVIDIA prints no speed of it), and
#   from HBM.
#
# These few numbers decide most of this book. Products are cheap, and bytes and exponentials are expensive.

# %% [markdown]
# **Predict.** A score is needed twice: for its weight, and later again for the gradients. For d = 64 one score takes 64
# multiply-adds. (q and k are on chip both times.) What is cheaper?
#
# - ☐ store the score in HBM (four bytes), and load it the second time
# - ☐ both cost about the same
# - ☐ compute the score a second time
#
# <details><summary>Answer</summary>
#
# **compute the score a second time.** That takes 128 FLOPs. Four bytes out and four bytes in take the time of about 1,650
# FLOPs, 13 times as much.
# </details>

# %% [markdown]
# ## Can it be done without S?
#
# Cut S into *tiles*, each with the scores of a few queries and a few keys. FA1 and FA2 compute one tile, use it, and
# throw it away. All steps run in one kernel, and the numbers between them stay on the chip. This is called *fusion*.
#
# ![Standard attention fills a square of scores and keeps it; FlashAttention-2 keeps one tile; the output is the
# same](../figures/hero.svg)
#
# Is the result still the same? Here are 8 queries and 8 keys, by the four lines above, and by the standard attention, the
# FA1 and the FA2 of `fa2_lab`, the Python package that belongs to this book:

# %% tags=["hide-input"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
sizes = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
tiled = fa1.forward(Q, K, V, **sizes)[0], fa2.forward(Q, K, V, **sizes)[0]
for O in (attention(Q, K, V), naive.forward(Q, K, V)[0], *tiled):
    print(f"first number of O: {O[0, 0]:.12f}")

# %% [markdown]
# FlashAttention is the same sum in another order, and not an approximation. Approximate attention (sparse, low-rank,
# linear) leaves scores out, joins keys or replaces softmax, so it gives another answer.

# %% [markdown]
# ## What comes next?
#
# The next chapters take this apart. Chapter 01 shows what the four lines cost. Chapter 02 computes a softmax piece by
# piece. Chapters 03 and 04 build FA1 and FA2 from it, and chapter 05 the gradients. No chapter needs a GPU. Chapters 01
# to 07, A and B use NumPy. The others run either Triton (a Python dialect for kernels) in Triton's interpreter, or a
# model of the GPU. All measurements on a GPU were made beforehand, and the book shows the recorded numbers.

# %% tags=["nbval-ignore-output", "hide-input"]
rows = [f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |" for chapter in CHAPTERS]
Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *rows]))

# %% [markdown]
# <details><summary>What each change saves (to be read after chapter 07, which explains the last of its words)</summary>
#
# With N = 8,192, d = 64, 32 heads and tiles of 128 × 128:
#
# | | change | less of what | times |
# | --- | --- | --- | ---: |
# | 02 | a row of softmax is finished block by block | numbers of a row kept | 124 |
# | 03 | tiles; S and P never leave the chip | bytes that reach DRAM | 2.3 |
# | 04 | o, ℓ and m stay on the chip until they are done | bytes that reach DRAM | 82 |
# | | division after the last tile, not in each | instructions on FP32 units in a tile | 1.2 |
# | | L = m + log ℓ instead of m and ℓ | numbers of a row stored | 2.0 |
# | | causal tiles above the diagonal are skipped | tiles visited | 2.0 |
# | 05 | P is computed again, not kept | numbers kept for the backward | 126 |
# | 06 | a thread block for each row block, not each head | SMs without work, of 132, with 32 heads | 25 |
# | 07 | each of four warps takes rows, not keys | bytes through shared memory | 2.3 |
#
# </details>

# %% [markdown]
# A tag such as FA2.A1.L12 names a paper, an algorithm and a line. The package provides the command `fa2-lab`, which you
# run in a terminal. (If the package is not installed, type `python -m fa2_lab` in the book's folder instead.) `fa2-lab
# where FA2.A1.L12` prints the line that this tag names and the code that implements it, and `fa2-lab glossary` explains
# words. Appendix C has more.

# %% [markdown]
# ## Recap
#
# - Attention is a weighted mean of values. S and P have N² numbers and are only steps on the way.
# - Products of matrices (*matmuls*) are cheap; moving numbers and taking exponentials is expensive.
# - All units can work at the same time, so a method takes at least the time of the unit that ends last.
# - FA1 and FA2 compute the same numbers in tiles, in one kernel, and never hold all of S.

# %% [markdown]
# ## Exercises
#
# **Find the bug.** Suppose that the four lines have `E.sum(axis=0, keepdims=True)`. All shapes are right. Write a test of P
# that finds the mistake. It returns True for the right weights, and False for the wrong ones.
#
# <details><summary>Solution</summary>
#
# The weights of each query must sum to 1: `return np.allclose(P.sum(axis=1), 1)`
# </details>


# %%
def looks_right(P):  # (N_q, N_k)
    return ...


# %% tags=["hide-input"]
E = np.array([[1.0, 3.0, 4.0], [2.0, 2.0, 4.0]])  # two queries, three keys
right, wrong = (E / E.sum(axis=axis, keepdims=True) for axis in (1, 0))
square = E[:, :2] / E[:, :2].sum(axis=0)
check(
    looks_right,
    Case("the right weights", (right,), True),
    Case("the sum over axis 0", (wrong,), False),
    Case("the sum over axis 0, as many queries as keys", (square,), False),
)

# %% [markdown]
# ## Checks
#
# The code is compared with the package, the text with the recorded measurements.

# %% tags=["hide-input"]
rng = np.random.default_rng(1)
Q, (K, V) = rng.standard_normal((37, 8)), rng.standard_normal((2, 29, 8))
verdict("37 queries, 29 keys: the four lines", close(attention(Q, K, V), naive.forward(Q, K, V)[0]))
shown, N = time_and_memory.data(), 4096
time, memory = ({name: dict(curve) for name, curve in shown[what].items()} for what in ("time", "memory"))
last = 4 * N
verdict("at N = 16,384 ours is 5.8 times as fast as standard", round(time["standard"][last] / time["ours"][last], 1) == 5.8)
verdict("HBM delivers 4.8 TB/s", chip.hbm_per_second == 4.8e12)
verdict("FA1 is the slowest at every N", all(max(time, key=lambda name: time[name][n]) == "FA1" for n in time["FA1"]))
growth = [memory[name][4 * N] / memory[name][2 * N] for name in ("standard", "FA2", "ours")]
verdict("memory at twice the N: fourfold, double, double", [round(x, 1) for x in growth] == [3.9, 2.0, 2.0])
verdict("to compute twice is 13 times as cheap", round(8 * prices(chip).in_flops()["dram"] / (2 * 64)) == 13)
N, d, B = 8192, 64, 128  # of the table of changes
tiling, size = Tiling(N, N, B, B), io.sizes(Tiling(N, N, B, B), d)
standard, one, two = (cost(name, N=N, d=d, B_r=B, B_c=B, heads=32).crossed for name in ("standard", "FA1", "FA2"))
work = [fp32_instructions(name, B, B, d) for name in ("fa1", "fa2")]
tiles, skipped = tiling.T_r * tiling.T_c, Tiling(N, N, B, B, CAUSAL).counts()[Tile.SKIP]
busy = [grid.schedule(blocks(32, tiling), chip.SMs).utilisation for blocks in (grid.fa1_grid, grid.fa2_grid)]
shared = [tile_bytes(scheme, B, B, d, W=4) for scheme in ("split_k", "split_q")]
kept = size["O"] + size["L"]
factors = [N / (d + 2), standard / one, one / two, work[0] / work[1], (size["l"] + size["m"]) / size["L"]]
factors += [tiles / (tiles - skipped), size["P"] / kept, (1 - busy[0]) / (1 - busy[1]), shared[0] / shared[1]]
written = [124, 2.3, 82, 1.2, 2.0, 2.0, 126, 25, 2.3]
verdict("the nine factors of the table", [round(x, 1 if x < 10 else None) for x in factors] == written)

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
