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
# *Time: 30 minutes, including the exercise. Hardware: any laptop with NumPy. Before this: matrix multiplication and
# NumPy arrays.*
#
# Each question marked **Predict** is followed by a folded answer. Choose one of the options before you unfold the
# answer.

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips
from fa2_lab.machine.rates import rates
from fa2_lab.plots import time_and_memory
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
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
# Our kernel also needs far less memory. The lower chart comes from a different run, in which standard attention is
# PyTorch's own version. That version computes in float32, at four bytes per number, so don't read too much into the
# distance between the curves. Compare only how steep they are. Whenever N doubles, standard attention needs about four
# times as much memory, until the GPU is full, whereas FA2 and our kernel need only twice as much. The number format
# cannot explain this difference. We did not measure FA1's memory. Chapter 04 explains the *causal mask* that the
# caption mentions.
#
# A model runs attention many times side by side, and each of these runs is called a *head*. FA1 is the slowest of the
# four programs. One reason is that the printed algorithm, taken literally, computes each head on just one of the GPU's
# 132 processors. At N = 16,384, the chart has 16 heads, so 116 processors are idle (chapter 06). Chapter 03 explains
# FA1's other costs. It also explains why the FA1 authors' own kernel was two to four times as fast as standard
# attention.

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
# - An SM runs a few *thread blocks* at a time, and each thread block stays on its SM until it is done. This book often
#   calls a thread block a *worker*, because each piece of work, for example all queries of a head or only some of them,
#   is given to one thread block.
# - A thread block consists of several *warps*, and a warp consists of 32 *threads*, which execute the same instruction
#   together.
# - An SM has several kinds of units that carry out these instructions. *Tensor cores* multiply small matrices, *FP32
#   units* add and multiply float32 numbers, and *special function units* compute exponentials.

# %% tags=["hide-input"]
show("gpu_levels")

# %% [markdown]
# A number can be stored in any of five places:
#
# | place | what it is | capacity on an H200 |
# | --- | --- | --- |
# | registers | numbers that one thread is working with | 256 KiB in each SM |
# | shared memory | shared by all warps of a thread block (the papers call it SRAM) | up to 228 KiB in each SM (227 for one thread block) |
# | L1 | a *cache*: copies of what this SM recently loaded | what shared memory leaves of the 256 KiB that the two share: at least 28 KiB in each SM |
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
# other work in their FLOPs. For example, a byte from HBM costs 206 FLOPs, because the tensor cores can do 206 FLOPs in
# the time that HBM takes to deliver one byte, both at full speed.
#
# The same division gives the other costs. For example, the FP32 units of all SMs together carry out 31 · 10¹²
# instructions per second, so one instruction costs 989 / 31 = 32 FLOPs. The special function units compute 3.86 · 10¹²
# exponentials per second, shared memory delivers 31 TB/s, and L2 delivers 9.7 TB/s. On an H200, each kind of work costs
# this number of FLOPs:

# %%
chip = chips.H200
for name, price in rates(chip).in_flops().items():
    print(f"{name:6} {price:4.0f}")

# %% [markdown]
# - `fp32` stands for one instruction on an FP32 unit (an addition, a multiplication, or a multiply-add), and `exp` for
#   one exponential.
# - `shared`, `l2` and `dram` stand for one byte from shared memory, L2 and HBM, respectively. For L2, we use a measured
#   bandwidth, because NVIDIA does not publish one.
#
# These few numbers decide most of what follows in this book: matrix products are cheap, whereas moving bytes and
# computing exponentials is expensive. All units can work at the same time, so a method takes at least as long as its
# busiest unit does.

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
# takes as long as about 1,650 FLOPs, which is 13 times as much. Even if L2 still had the score when it is needed again,
# passing eight bytes through L2 would take as long as about 820 FLOPs.
# </details>

# %% [markdown]
# ## Can it be done without S?
#
# We can cut S into *tiles*, each of which holds the scores of a few queries with a few keys. FA1 and FA2 compute one
# tile at a time, use it, and throw it away. You may wonder how a tile can be used before the rest of its row is known,
# because a weight needs the sum of the whole row. Chapter 02 shows how. All steps run in a single kernel, so
# intermediate results stay on the chip. This technique is called *fusion*.
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
# You don't need a GPU for any chapter. Chapters 01 to 07, chapter 15, and appendices A, B and D use only NumPy. The
# others either run Triton, a Python dialect for writing kernels, in its interpreter, or use a model of the GPU. We made
# all GPU measurements beforehand, and the book shows the recorded results.

# %% tags=["nbval-ignore-output", "hide-input"]
rows = [f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |"
        for chapter in CHAPTERS]
Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *rows]))

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
# Check: run this cell when you have written your function. You do not have to read it.
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
time, memory = ({name: dict(curve) for name, curve in shown[what].items()}
                for what in ("time", "memory"))
last = 4 * N
verdict("at N = 16,384 ours is 5.8 times as fast as standard",
        round(time["standard"][last] / time["ours"][last], 1) == 5.8)
verdict("HBM delivers 4.8 TB/s", chip.hbm_bytes_per_second == 4.8e12)
verdict("FA1 is the slowest at every N",
        all(max(time, key=lambda name: time[name][n]) == "FA1" for n in time["FA1"]))
growth = [memory[name][4 * N] / memory[name][2 * N] for name in ("standard", "FA2", "ours")]
verdict("memory at twice the N: fourfold, double, double",
        [round(x, 1) for x in growth] == [3.9, 2.0, 2.0])
price = rates(chip).in_flops()
verdict("to compute twice is 13 times as cheap", round(8 * price["dram"] / (2 * 64)) == 13)
verdict("eight bytes through L2 cost about 820 FLOPs", round(8 * price["l2"], -1) == 820)
verdict("31 · 10¹² FP32 instructions per second", round(rates(chip).fp32 / 1e12) == 31)

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
