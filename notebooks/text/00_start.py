# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what is a GPU?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same result on a GPU, but faster and with little
# memory. This book takes you from those four lines to a finished *kernel*, which is the word for a program that runs on
# a GPU. We change one thing at a time, and run and check the code at every step.
#
# After this notebook you can
#
# - write down the formula for attention, and point to the two matrices that cause all the trouble,
# - name the places where a GPU stores data, and estimate what each kind of work costs,
# - decide whether it is cheaper to store a value or to recompute it.
#
# *Time: 35 minutes, including the exercise. Hardware: any laptop with NumPy. Before this: matrix multiplication and
# NumPy arrays.*
#
# Each question marked **Predict** is followed by a folded answer. Choose one of the options before you unfold the
# answer.

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
# A text is a sequence of N tokens, which are words or pieces of words. Attention compares every token with every other
# token. The charts below compare four programs that do this on the same GPU. *Standard* stores the result of each step
# in the GPU's memory. *FA1* is a literal implementation of the algorithm in the 2022 FlashAttention paper, and *FA2* is
# FlashAttention-2 from 2023. *Ours* is the kernel that you will have at the end of this book.

# %% tags=["hide-input"]
show("time_and_memory")

# %% [markdown]
# At N = 16,384, our kernel is 5.8 times as fast as standard attention. In the upper chart, standard attention is a
# sequence of simple kernels, and all four programs use *bf16*, a two-byte number format.
#
# Our kernel also needs far less memory. Whenever N doubles, standard attention needs about four times as much memory,
# until the GPU is full, whereas FA2 and our kernel need only twice as much. Note that the lower chart shows PyTorch's
# own standard attention, which computes in float32, at four bytes per number. The number format therefore explains part
# of the gap between the curves, but not the steeper slope of standard attention's curve. The lower chart has no curve
# for FA1, because we did not measure its memory. Chapter 04 explains the *causal mask* that the caption mentions.
#
# But why is FA1 the slowest of the four? A model runs attention many times side by side, and each of these runs is
# called a *head*. Taken literally, FA1's algorithm computes each head on just one of the GPU's 132 processors. Every
# problem in the upper chart has 16,384 tokens in total and 16 heads per text. At N = 4,096, there are 4 texts with 64
# heads in all, so 68 of the 132 processors are idle. At N = 16,384, there is only one text, so only 16 processors are
# busy. The idle processors alone can therefore make FA1 take 2 times as long at N = 4,096, and 8 times as long at N =
# 16,384. They don't explain, however, why FA1 is also slow for short texts, because at N = 512 there are 512 heads,
# which is enough for all processors. Chapter 03 explains the other causes, and also why the FA1 authors' own kernel was
# two to four times as fast as standard attention.

# %% [markdown]
# ## What does attention compute?
#
# Each token has a query (what it is looking for), a key (what it can be found by) and a value (what it has to offer),
# and each of these is a row of d numbers. Attention compares a query with every key, and the better a key matches, the
# more its value counts. The output for that query is the weighted mean of all values.


# %%
def attention(Q, K, V):  # (N, d) each: one row per token
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (N, N) scores: how well query i matches key j
    E = np.exp(S)  # (N, N) every score made positive
    P = E / E.sum(axis=1, keepdims=True)  # (N, N) weights: each row sums to 1
    return P @ V  # (N, d) for each query, the mean of all values, weighted by P


# %% [markdown]
# **Predict.** A query is all zeros, so it does not match any key in particular. The values are (8, 0), (0, 4), (4, 0)
# and (0, 8). What is the output for this query?
#
# - ☐ (3, 3)
# - ☐ not a number
# - ☐ (0, 0)
#
# <details><summary>Answer</summary>
#
# **(3, 3).** All scores of this query are 0, so all its weights are 1/4. Because the weights always sum to 1, a query
# that matches nothing in particular gets the plain mean of all values.
# </details>

# %% [markdown]
# In formulas, the scores are $S = QK^\top / \sqrt{d}$, the weights are $P = \mathrm{softmax}(S)$, computed row by row,
# and the output is $O = PV$. The matrices Q, K, V and O have N · d elements each, but S and P have N² each, which is
# 128 times as many at N = 8,192 and d = 64. At four bytes per element, a single head's S takes 256 MiB. This is the
# trouble with attention: its two largest matrices are only intermediate results, yet each of a model's many heads
# produces both of them. By *extra memory*, we mean all memory beyond Q, K, V and O. The memory chart above counts O as
# well.
#
# KiB, MiB and GiB are 2¹⁰, 2²⁰ and 2³⁰ bytes. Speeds are given in GB/s and TB/s, which are 10⁹ and 10¹² bytes per
# second.

# %% [markdown]
# ## Where can a number be on a GPU?
#
# Unless we say otherwise, the GPU in this book is NVIDIA's H200. Its parts are nested:
#
# - The GPU has 132 processors, which are called *streaming multiprocessors* (*SMs*).
# - An SM runs a few *thread blocks* at a time, and each thread block stays on its SM until it is done. In this book, a
#   *worker* is a thread block.
# - A thread block consists of several *warps*, and a warp consists of 32 *threads*, which execute the same instruction
#   together.
# - An SM has several kinds of units that carry out these instructions. *Tensor cores* multiply small matrices, *FP32
#   units* add and multiply float32 numbers, and *special function units* compute exponentials.

# %% tags=["hide-input"]
show("nested")

# %% [markdown]
# A number can be stored in any of five places:
#
# | place | what it is | capacity on an H200 |
# | --- | --- | --- |
# | registers | numbers that one thread is working with | 256 KiB in each SM |
# | shared memory | shared by all warps of a thread block (the papers call it SRAM) | 228 KiB in each SM |
# | L1 | a *cache*: copies of what this SM recently loaded, held in the same hardware as shared memory, in the part that is left free | 28 KiB or more in each SM |
# | L2 | another cache, between all SMs and HBM: copies of what was recently loaded or stored | 60 MiB |
# | HBM | the large memory next to the chip, which holds the tensors (arrays); also called *DRAM*, after its kind of memory | 141 GiB (the data sheet says 141 GB) |
#
# *On chip* means in registers or in shared memory. S, at 256 MiB, does not fit there, because the registers of all SMs
# together hold only 33 MiB, and their shared memory only 29 MiB. But a piece of 128 × 128 scores takes only 64 KiB at
# four bytes each, so it fits into a single SM.
#
# Everything that an SM loads from HBM or stores there passes through L2. A number that an SM has just stored therefore
# stays in L2 for a while, and any SM can load it from there without a trip to HBM.
#
# Two quantities describe the path from one place to another. *Bandwidth* is the number of bytes that arrive per second.
# HBM has a bandwidth of at most 4.8 TB/s, and all other places in the table are faster. *Latency* is the time between
# the request for a byte and its arrival. An SM can hide latency if it has other warps to run in the meantime, so the
# first chapters consider only bandwidth.
#
# In the map below, the area of each square shows the size of a memory. The inset magnifies the small squares 14 times
# in each direction. L1 has no square of its own, because it uses the memory that shared memory leaves free. You can
# ignore the link to other GPUs until chapter 15.

# %% tags=["hide-input"]
show("gpu_map")

# %% [markdown]
# ## What does each kind of work cost?
#
# A *multiply-add*, a · b + c, is a single instruction (FMA). We count it as two *FLOPs*, one multiplication and one
# addition, as all data sheets do. One TFLOP/s is 10¹² FLOPs per second.
#
# The tensor cores reach 989 TFLOP/s on two-byte numbers. Since they are the fastest unit, we measure the cost of all
# other work in their FLOPs. For example, a byte from DRAM costs 206 FLOPs, because at full speed the tensor cores could
# do 206 FLOPs in the time that HBM, also at full speed, takes to deliver one byte.
#
# All units can work at the same time, so a method takes at least as long as its busiest unit does.

# %%
chip = chips.H200
for name, price in prices(chip).in_flops().items():
    print(f"{name:6} {price:4.0f}")

# %% [markdown]
# - `fp32` stands for one instruction on an FP32 unit (an addition, a multiplication, or a multiply-add), and `exp` for
#   one exponential.
# - `shared`, `l2` and `dram` stand for one byte from shared memory, L2 and HBM, respectively. For L2, we use a measured
#   bandwidth, because NVIDIA does not publish one.
#
# These few numbers decide most of what follows in this book: matrix products are cheap, whereas moving bytes and
# computing exponentials is expensive.

# %% [markdown]
# **Predict.** A score is needed twice, first for its weight and later again for the gradients. For d = 64, computing
# one score takes 64 multiply-adds, and q and k are on chip both times. Which option is cheaper?
#
# - ☐ store the score in HBM (four bytes), and load it the second time
# - ☐ both cost about the same
# - ☐ compute the score a second time
#
# <details><summary>Answer</summary>
#
# **compute the score a second time.** Computing it takes 128 FLOPs, whereas storing four bytes and loading them again
# takes as long as about 1,650 FLOPs, which is 13 times as much.
# </details>

# %% [markdown]
# ## Can it be done without S?
#
# We can cut S into *tiles*, each of which holds the scores of a few queries with a few keys. FA1 and FA2 compute one
# tile at a time, use it, and throw it away. All steps run in a single kernel, so intermediate results stay on the chip.
# This technique is called *fusion*.
#
# ![Standard attention fills a square of scores and keeps all of it, whereas FlashAttention-2 keeps only one tile, and
# both give the same output](../figures/hero.svg)
#
# Is the result still the same? To find out, we take 8 queries and 8 keys. The first line of the output comes from the
# four lines of `attention` above. The other three come from the implementations of standard attention, FA1 and FA2 in
# `fa2_lab`, the Python package that accompanies this book.

# %% tags=["hide-input"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
sizes = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
tiled = fa1.forward(Q, K, V, **sizes)[0], fa2.forward(Q, K, V, **sizes)[0]
for O in (attention(Q, K, V), naive.forward(Q, K, V)[0], *tiled):
    print(f"first number of O: {O[0, 0]:.12f}")

# %% [markdown]
# FlashAttention is not an approximation: it computes the same sums in a different order. Approximate methods, such as
# sparse, low-rank or linear attention, leave out scores, merge keys or replace the softmax, so they give a different
# answer.

# %% [markdown]
# ## What comes next?
#
# The next chapters work this out in detail. Chapter 01 shows what the four lines cost, and chapter 02 computes a
# softmax piece by piece. Building on that, chapters 03 and 04 develop FA1 and FA2, and chapter 05 adds the gradients.
#
# You don't need a GPU for any chapter. Chapters 01 to 07, A and B use only NumPy. The others either run Triton, a
# Python dialect for writing kernels, in its interpreter, or use a model of the GPU. We made all GPU measurements
# beforehand, and the book shows the recorded results.

# %% tags=["nbval-ignore-output", "hide-input"]
rows = [f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |" for chapter in CHAPTERS]
Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *rows]))

# %% [markdown]
# <details><summary>What each change saves (best read after chapter 07, which explains the last of these terms)</summary>
#
# The factors below are for N = 8,192, d = 64, 32 heads and tiles of 128 × 128:
#
# | | change | reduces | by a factor of |
# | --- | --- | --- | ---: |
# | 02 | the softmax of a row is computed block by block | numbers kept per row | 124 |
# | 03 | with tiles, S and P never leave the chip | bytes that reach DRAM | 2.3 |
# | 04 | o, ℓ and m stay on the chip until they are final | bytes that reach DRAM | 82 |
# | | the division happens once, after the last tile, instead of in every tile | FP32 instructions per tile | 1.2 |
# | | L = m + log ℓ is stored instead of m and ℓ | numbers stored per row | 2.0 |
# | | causal tiles above the diagonal are skipped | tiles visited | 2.0 |
# | 05 | P is recomputed instead of kept | numbers kept for the backward pass | 126 |
# | 06 | each row block, rather than each head, gets its own thread block | idle SMs, of 132, with 32 heads | 25 |
# | 07 | each of four warps takes rows instead of keys | bytes through shared memory | 2.3 |
#
# </details>

# %% [markdown]
# In the book's code, a tag such as FA2.A1.L12 names a paper, an algorithm and a line. The package provides the command
# `fa2-lab`, which you run in a terminal. If the package is not installed, type `python -m fa2_lab` in the book's folder
# instead. For example, `fa2-lab where FA2.A1.L12` prints the line that this tag refers to and the code that implements
# it, and `fa2-lab glossary` explains terms. Appendix C describes more of these commands.

# %% [markdown]
# ## Recap
#
# - Attention is a weighted mean of values. S and P have N² elements each, although they are only intermediate results.
# - Matrix products (*matmuls*) are cheap, whereas moving data and computing exponentials is expensive.
# - All units can work at the same time, so a method takes at least as long as its busiest unit does.
# - FA1 and FA2 compute the same result tile by tile, in a single kernel that never holds all of S.

# %% [markdown]
# ## Exercises
#
# **Find the bug.** Suppose that the four lines used `E.sum(axis=0, keepdims=True)` instead. All shapes would still be
# right. Write a test of P that catches the mistake. It must return True for the right weights and False for the wrong
# ones.
#
# <details><summary>Solution</summary>
#
# Each query's weights must sum to 1, so the test is `return np.allclose(P.sum(axis=1), 1)`.
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
# The cell below checks this chapter's code against the package, and its text against the recorded measurements.

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
