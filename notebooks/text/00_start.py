# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what is a GPU?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same numbers on a GPU, faster and with little memory. We go
# from the four lines to that kernel (GPU program), one change at a time.
#
# After this notebook you can
#
# - write attention down, and say which two of its matrices cause all the trouble,
# - say where a GPU keeps numbers, and what each kind of work costs,
# - estimate whether it is cheaper to store a number or to compute it again.
#
# *Time: 25 minutes with the exercise. Hardware: any laptop, NumPy alone. Before this: matrix products, and NumPy's arrays.*
#
# A question marked **Predict** has its answer folded below it. Choose first, then open it.

# %% tags=["hide-input"]
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips, grid, io
from fa2_lab.machine.prices import cost, prices
from fa2_lab.machine.time import fp32_instructions
from fa2_lab.machine.warps import tile_bytes
from fa2_lab.plots import gpu_map, time_and_memory
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_studio.book.build import Case, check
from fa2_studio.book.chapters import CHAPTERS
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## How much is there to win?
#
# A text is a row of N tokens: words, or pieces of words. Attention compares every token of a text with every other. Four
# programs do it here on one GPU. *Standard* stores the result of each step in the GPU's memory. *FA1* is the
# algorithm of 2022 as it was printed, *FA2* FlashAttention-2 of 2023. *Ours* is the last kernel of this book.

# %% tags=["hide-input"]
show(time_and_memory.draw(**time_and_memory.data()))

# %% [markdown]
# At N = 4,096 our kernel is more than five times as fast as standard attention. With each doubling of N, standard's
# memory grows about fourfold, until the GPU is full. FA2's and ours double; FA1's was not measured. (bf16: a number of two
# bytes. *Causal*: see chapter 04.)
#
# FA1 is the slowest. It has the loops of the FA1 paper's Algorithm 1 as printed: one *worker* does a whole *head*, on one
# processor. (A model does attention many times side by side. Each time is a head.) The upper chart always has 16,384 tokens;
# at N = 4,096 they are 4 texts. With 16 heads each they keep 64 of the GPU's 132 processors busy, at 16,384 only 16. That
# alone can make it 2 times slower, and at 16,384 8 times. Chapter 03 explains the other causes, and why the kernel of FA1's
# authors was two to four times as fast as standard attention.

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
# **Predict.** A query is all zeros, so it matches no key. The values are (8, 0), (0, 4), (4, 0) and (0, 8). What is its
# output?
#
# - ☐ (0, 0)
# - ☐ (3, 3)
# - ☐ not a number
#
# <details><summary>Answer</summary>
#
# **(3, 3).** All its scores are 0, so all its weights are 1/4. Softmax always hands out a total weight of 1. A query that
# finds nothing gets the plain mean of all values.
# </details>

# %% [markdown]
# In formulas: $S = QK^\top / \sqrt{d}$, $P = \mathrm{softmax}(S)$ row by row, and the output is $O = PV$. Q, K, V and O have N
# · d numbers each, S and P have N². At N = 8,192 and d = 64 that is 128 times as many. With four bytes a number, S of one head
# takes 256 MiB. (KiB, MiB and GiB are 2¹⁰, 2²⁰ and 2³⁰ bytes. Speeds are in GB/s and TB/s, 10⁹ and 10¹² bytes a second.)

# %% [markdown]
# ## Where can a number be on a GPU?

# %% tags=["hide-input"]
show(gpu_map.draw(**gpu_map.data()))

# %% [markdown]
# Areas are sizes. The lens draws the small squares again with sides 14 times as long. (The link matters in chapter 15.)
#
# Where nothing else is said, the GPU is NVIDIA's H200. Its 132 processors are called *SMs*. A *thread* executes
# instructions one by one. A *warp* is 32 threads that execute the same instruction together. A *thread block* is several
# warps. It stays on one SM until it is done. Thread blocks are the workers of this book. An SM also has units: *tensor
# cores* multiply small matrices, *FP32 units* add and multiply float32 numbers, *special function units* do exponentials.
#
# | place | what it is | room on an H200 |
# | --- | --- | --- |
# | registers | numbers that one thread is working with | 256 KiB in each SM |
# | shared memory | for all warps of a thread block (papers: SRAM) | 228 KiB in each SM |
# | L1 | copies of what this SM loaded lately (a *cache*), in the rest of the same memory | 28 KiB or more in each SM |
# | L2 | copies of what came from HBM lately, for all SMs (a cache, too) | 60 MiB |
# | HBM | large, beside the chip; tensors (arrays) live here; also called *DRAM* | 141 GiB (its sheet says GB) |
#
# *On chip* means in registers or shared memory. The 256 MiB of S do not fit there: those of all SMs together have 33 and 29
# MiB. A piece of 128 × 128 scores takes 64 KiB (four bytes each) and fits into a single SM.

# %% [markdown]
# ## What does each kind of work cost?
#
# A *multiply-add*, a · b + c, is one instruction and counts as two *FLOPs*, one multiplication and one addition, as in all
# data sheets. One TFLOP/s is 10¹² FLOPs in a second.
#
# The tensor cores do 989 TFLOP/s with numbers of two bytes. They are the fastest unit, so we measure everything by them. A
# price of 206 for a byte means: while HBM delivers one byte, the tensor cores could do 206 FLOPs (both at full speed).

# %%
chip = chips.H200
for name, price in prices(chip).in_flops().items():
    print(f"{name:6} {price:4.0f}")

# %% [markdown]
# - `fp32`: an instruction of an FP32 unit (addition, multiplication, or multiply-add). `exp`: an exponential.
# - `shared`, `l2`, `dram`: one byte from shared memory, from L2 (measured; NVIDIA prints no speed of it), and from HBM.

# %% [markdown]
# **Predict.** A score is needed twice: for its weight, and later again for the gradients. For d = 64 one score takes 64
# multiply-adds. (q and k are on chip both times.) What is cheaper?
#
# - ☐ store the score in HBM (four bytes), and load it the second time
# - ☐ compute the score a second time
# - ☐ both cost about the same
#
# <details><summary>Answer</summary>
#
# **compute the score a second time.** That takes 128 FLOPs. Four bytes out and four bytes in take the time of about 1,650,
# 13 times as much.
# </details>

# %% [markdown]
# ## Can it be done without S?
#
# Cut S into *tiles*: a few queries against a few keys. FA1 and FA2 compute one tile, use it, and throw it away. All steps
# run in one kernel, and what lies between them stays on chip: this is called *fusion*.
#
# ![Standard attention fills a square of scores and keeps it; FlashAttention-2 keeps one tile; the output is the same](../figures/hero.svg)
#
# Here are 8 queries and 8 keys, by the four lines above, and by standard, FA1 and FA2 of the package:

# %% tags=["hide-input"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
sizes = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
tiled = fa1.forward(Q, K, V, **sizes)[0], fa2.forward(Q, K, V, **sizes)[0]
for O in (attention(Q, K, V), naive.forward(Q, K, V)[0], *tiled):
    print(f"first number of O: {O[0, 0]:.12f}")

# %% [markdown]
# FlashAttention is the same sum in another order, not an approximation. Approximate attention (sparse, low-rank, linear)
# leaves scores out, joins keys or replaces softmax, so it gives another answer.

# %% [markdown]
# ## What comes next?
#
# No chapter needs a GPU. 01 to 07, A and B are NumPy. The others run Triton (a Python dialect for kernels) in Triton's
# interpreter, or a model of the GPU. What was measured on a GPU is recorded.

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
# | 06 | a thread block for each row block, not each head | SMs without work, 32 heads on an H100 | 25 |
# | 07 | each of four warps takes rows, not keys | bytes through shared memory | 2.3 |
#
# </details>

# %% [markdown]
# All formulas and prices stand on [one page](../figures/card.svg) ([PDF](../figures/card.pdf)). A tag such as FA2.A1.L12
# names a paper, an algorithm and a line, and `fa2-lab where FA2.A1.L12` prints it. `fa2-lab glossary` explains words.

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
# **Find the bug.** In the four lines somebody wrote `E.sum(axis=0, keepdims=True)`. All shapes are right. Write a test
# of P that finds it: True for the right weights, False for the wrong ones.
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
verdict("ours is more than five times as fast as standard", 5 < time["standard"][N] / time["ours"][N])
verdict("FA1 is the slowest", max(time, key=lambda name: time[name][N]) == "FA1")
growth = [memory[name][4 * N] / memory[name][2 * N] for name in ("standard", "FA2", "ours")]
verdict("memory at twice the N: fourfold, double, double", [round(x, 1) for x in growth] == [3.9, 2.0, 2.0])
verdict("to compute twice is 13 times as cheap", round(8 * prices(chip).in_flops()["dram"] / (2 * 64)) == 13)
N, d, B = 8192, 64, 128  # of the table of changes
tiling, size = Tiling(N, N, B, B), io.sizes(Tiling(N, N, B, B), d)
standard, one, two = (cost(name, N=N, d=d, B_r=B, B_c=B, heads=32).crossed for name in ("standard", "FA1", "FA2"))
work = [fp32_instructions(name, B, B, d) for name in ("fa1", "fa2")]
tiles, skipped = tiling.T_r * tiling.T_c, Tiling(N, N, B, B, CAUSAL).counts()[Tile.SKIP]
busy = [grid.schedule(blocks(32, tiling), chips.H100.SMs).utilisation for blocks in (grid.fa1_grid, grid.fa2_grid)]
shared = [tile_bytes(scheme, B, B, d, W=4) for scheme in ("split_k", "split_q")]
kept = size["O"] + size["L"]
factors = [N / (d + 2), standard / one, one / two, work[0] / work[1], (size["l"] + size["m"]) / size["L"]]
factors += [tiles / (tiles - skipped), size["P"] / kept, (1 - busy[0]) / (1 - busy[1]), shared[0] / shared[1]]
written = [124, 2.3, 82, 1.2, 2.0, 2.0, 126, 25, 2.3]
verdict("the nine factors of the table", [round(x, 1 if x < 10 else None) for x in factors] == written)

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
