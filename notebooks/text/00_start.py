# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what is a GPU?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same numbers on a GPU, many times faster and with a
# small part of the memory. This book goes from the four lines to that kernel, one change at a time.
#
# After this notebook you can
#
# - write attention down, and say which two of its matrices cause all the trouble,
# - name the places where a GPU keeps numbers, with their sizes, and say what is cheap there and what is expensive,
# - keep three quantities apart: the extra memory, what the chip requests, and what crosses to DRAM.
#
# *Time: 40 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: matrix products,
# and NumPy's arrays. No GPU.*
#
# How to read: answer each question marked **Predict** in your head, then open the folded answer. A wrong guess teaches
# more than a right answer that was read. Code that is folded need not be read. The exercises have gaps for you to fill.

# %%
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips, io
from fa2_lab.paper import where
from fa2_lab.plots import gpu_map, time_and_memory
from fa2_lab.plots.records import measured
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.studio.book.chapters import CHAPTERS
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## How much is there to win?
#
# A text is a row of N tokens, which are words or pieces of words. Attention compares every token of a text with every
# token of the same text. Below, four programs do this on the same GPU:
#
# - *standard*: as the definition says, one step after the other,
# - *FA1* and *FA2*: FlashAttention of 2022 and FlashAttention-2 of 2023,
# - *ours*: the last kernel (GPU program) of this book.
#
# The left picture has always 16,384 tokens in all: many short texts, or one long text.
#
# **Predict.** The texts become twice as long, and there are half as many of them. By what factor does the number of
# comparisons grow?

# %%
show(time_and_memory.draw(**time_and_memory.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two.** Each text has four times as many comparisons, and there are half as many texts. The times of three programs
# double with it. FA1's grows faster: it cuts the job into 64 parts at N = 4,096 and into 16 at N = 16,384. This GPU has
# 132 processors, so most of them are idle (chapter 06).
# </details>
#
# On the left, lower is faster. At N = 16,384 our kernel is 5.6 times as fast as standard attention. On the right is
# the memory that a program holds beyond its inputs, for one text. Standard's grows fourfold with each doubling of N,
# until the GPU is full. FA2's and ours double. (bf16 is a number of two bytes, *causal* a word of chapter 04. FA2, and
# standard on the right, are PyTorch's; the others are kernels of this book.)
#
# **Takeaway.** The same answer can be had several times faster, and in memory that grows with N instead of N².

# %% [markdown]
# ## What does attention compute?
#
# Each token has a query (what it is looking for), a key (what it can be found by) and a value (what it hands over). Each
# of these is a row of d numbers. A query is compared with all keys. The better a key matches, the more its value counts.
# The output is the weighted mean of the values.


# %%
def attention(Q, K, V):  # (N, d) each: one token to a row
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (N, N) scores: how well query i matches key j
    E = np.exp(S)  # (N, N) every score made positive
    P = E / E.sum(axis=1, keepdims=True)  # (N, N) weights: each row sums to 1
    return P @ V  # (N, d) for each query, the mean of all values with these weights


# %% [markdown]
# **Predict.** There are four tokens. Their values are (8, 0), (0, 4), (4, 0) and (0, 8). The first query is all zeros,
# so it matches every key equally well. What is its output?

# %% tags=["hide-input"]
Q = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0], [5.0, 5.0]])
K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
V = np.array([[8.0, 0.0], [0.0, 4.0], [4.0, 0.0], [0.0, 8.0]])
print("output of the first query:", attention(Q, K, V)[0].tolist())

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The plain mean.** All its scores are 0, so all its weights are 1/4. The output is (8 + 0 + 4 + 0) / 4 = 3 and (0 + 4 +
# 0 + 8) / 4 = 3.
# </details>
#
# In formulas: $S = QK^\top / \sqrt{d}$, $P = \mathrm{softmax}(S)$ row by row, and $O = PV$. A model does this
# many times side by side, each time with other Q, K and V. One such attention is a *head*.
#
# Q, K, V and the output O have N · d numbers each. S and P have N · N. With N = 8,192 and d = 64 that is N / d = 128 times
# as many, and nobody asked for them: they are steps on the way to O. A program that stores S keeps four bytes a number,
# so S of one head takes 256 MiB.
#
# **Takeaway.** Attention is a weighted mean of values. S and P have N² numbers, and are only steps on the way.

# %% [markdown]
# ## Where can a number be on a GPU?
#
# A program for a GPU is a *kernel*. It runs as many *thread blocks*, the workers of this book. A *thread* executes the
# instructions one by one, on numbers of its own. A *warp* is 32 threads that execute the same instruction together, and
# a thread block has several warps. The chip's processors are called *SMs*: this GPU has 132 SMs. A thread block stays on
# one SM until it is done.
#
# | place | what it is | room on this GPU, an H200 |
# | --- | --- | --- |
# | registers | the numbers that one thread is working with | 256 KiB in each SM |
# | shared memory | all warps of a thread block read and write it (the papers say SRAM) | 228 KiB in each SM |
# | L2 | keeps a copy of what came from HBM lately, for all SMs (a *cache*) | 60 MiB |
# | HBM | the large memory beside the chip, a kind of DRAM; tensors live here | 141 GiB |
#
# %% [markdown]
# *On chip* means in this book: inside an SM, in registers or shared memory. An SM also has units that compute. *Tensor
# cores* multiply small matrices. *FP32 units* add and multiply float32 numbers. *Special function units* compute exponentials.
#
# **Predict.** Do the 256 MiB of S fit into the shared memory of all 132 SMs together? And does a piece of S, 128 × 128
# scores of four bytes, fit into that of one SM?

# %% tags=["hide-input"]
chip = chips.H200  # the GPU of all measurements in this book
print(
    f"all shared memory: {chip.SMs} · {chip.shared_per_sm // 1024} KiB = {chip.SMs * chip.shared_per_sm / 2**20:.0f} MiB"
)
print(f"128 × 128 scores:  {128 * 128 * 4 // 1024} KiB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No, and yes.** 132 · 228 KiB are 29 MiB, in 132 separate pieces. Registers (33 MiB) and L2 are too small as well. But
# the piece has only 64 KiB.
# </details>
#
# Below are the sizes as areas: the three dots in the corner of HBM are L2, shared memory and registers. The bars are
# speeds (TB/s: 10¹² bytes in a second). NVIDIA prints none for L2; the link to other GPUs is for chapter 15.

# %% tags=["hide-input"]
show(gpu_map.draw(**gpu_map.data(["H200"])))

# %% [markdown]
# **Takeaway.** There is much room far away, and little room nearby, where numbers come fast. S only fits far away. A small
# piece of S fits nearby.

# %% [markdown]
# ## What is cheap, and what is expensive?
#
# A *FLOP* is one addition or multiplication. A TFLOP/s is $10^{12}$ of them in a second.
#
# **Predict.** The tensor cores do 989 TFLOP/s, and HBM delivers 4.8 TB/s. How many FLOPs can the tensor cores do while
# one byte arrives?

# %% tags=["hide-input"]
score = 2 * 64  # FLOPs of one score: d = 64 multiplications and additions
there_and_back = 2 * 4 * chip.flops_per_byte  # four bytes out to HBM, and four bytes in
print("FLOPs that the tensor cores do in the time of …")
for what, price in [
    ("one byte from HBM", chip.flops_per_byte),
    ("one addition or multiplication on an FP32 unit", chip.flops_per_fp32),
    ("one exponential", chip.flops_per_exp),
    ("one score to HBM and back", there_and_back),
]:
    print(f"{what:48} {price:5,.0f}")
print(f"to compute one score of S again, d = 64: {score} FLOPs")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 200.** 989 / 4.8 = 206.
# </details>
#
# Look at the last two lines. On this chip it is cheaper to compute a score a second time than to store it and fetch it
# back: 128 FLOPs against the time of about 1,650. FlashAttention uses that difference. And what is not a matrix product
# costs more than it seems: an exponential takes as long as 256 FLOPs on the tensor cores.
#
# **Takeaway.** On a GPU products of matrices (*matmuls*) are cheap. Moving numbers is expensive, and so are exponentials.

# %% [markdown]
# ## Can it be done without S?
#
# It can. Cut S into *tiles*: a few queries against a few keys. FA1 and FA2 compute one tile, use it, and throw it away.
# Below, 8 queries and 8 keys are cut into tiles of 4 queries and 2 keys.

# %% tags=["hide-input"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
sizes = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
ways = {
    "four lines": attention(Q, K, V),
    "standard": naive.forward(Q, K, V)[0],
    "FA1": fa1.forward(Q, K, V, **sizes)[0],
    "FA2": fa2.forward(Q, K, V, **sizes)[0],
}
tiling = Tiling(8, 8, **sizes)
print(f"{tiling.T_r} × {tiling.T_c} tiles; the first number of O:")
for name, result in ways.items():
    print(f"{name:12} {result[0, 0]:.12f}")

# %% [markdown]
# All four ways agree in every printed digit. The additions run in another order, so the sixteenth digit may differ.
# Nothing is left out, and nothing is estimated. Chapters 02 and 03 show how it is done.
#
# **Takeaway.** FlashAttention is not an approximation. It is the same sum in another order.

# %% [markdown]
# ## What does "less" mean?
#
# Three quantities must be kept apart:
#
# - the *extra memory*: room for everything besides Q, K, V and O,
# - what the chip *requests*: all bytes that the SMs load and store,
# - what *crosses to DRAM*. L2 stands between, and what it still holds is not fetched a second time.
#
# FA2 keeps a block of queries on chip and loads all keys and values past it, tile by tile. For the next block of queries
# it loads them all again. So the chip requests K and V many times.
#
# **Predict.** K and V of one head have 2 MiB together (N = 4,096, d = 128). When the chip requests them for the second
# time, where are they found?

# %% tags=["hide-input"]
counters = {r["problem"]["rung"]: r["values"] for r in measured("ladder")["rows"] if r["direction"] == "counters"}
tiling, heads, GB = Tiling(4096, 4096, 64, 64), 64, 1e9
extra = {"standard": (4 + 2) * 4096**2, "FA2": 4 * 4096}  # bytes: 4 for S and 2 for P; 4 for the one number L of a row
seen = {}  # for the checks below
print("GB for 64 heads   extra memory   the chip requests   crosses to DRAM (counted on an H200)")
for name, rung in (("standard", "r00_standard"), ("FA2", "r07_two_loops")):
    t = io.traffic(name.lower(), "forward", tiling, 128)
    requested = sum(n * (4 if tensor in "SL" else 2) for part in (t.loads, t.stores) for tensor, n in part.items())
    crossed = sum(counters[rung][f"DRAM bytes {way}"][0] for way in ("read", "written"))
    seen[name] = requested * heads, crossed / (requested * heads)
    print(f"{name:16} {extra[name] * heads / GB:13.3f} {requested * heads / GB:19.1f} {crossed / GB:17.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **In L2.** L2 has room for 60 MiB, so the keys and values of the heads that are at work stay there.
# </details>
#
# FA2's extra memory is one number for each row. Standard holds S (four bytes a number) and P (two). With these small
# tiles FA2 requests two thirds of what standard does; larger tiles request less. But only 3% of FA2's requests cross to
# DRAM, which delivers Q, K and V once. Standard's nearly all cross, since S and P of 64 heads do not fit in L2.
#
# (In the first picture O is included: it is 64 of our 65 MiB at N = 16,384. And PyTorch's standard holds more than S and
# P: nine bytes for each score.)
#
# %% [markdown]
# This book counts with a *meter*, and the meter counts requests. When a chapter says that something is loaded, stored or
# moved, it means requests of the chip.
#
# **Takeaway.** Keep three quantities apart: the extra memory, what the chip requests, and what crosses to DRAM.

# %% [markdown]
# ## What comes next?
#
# None of the chapters needs a GPU: 01 to 07 are NumPy. The later ones use Triton, a Python dialect for writing kernels, in
# its interpreter, and show what was recorded on a GPU.


# %% tags=["nbval-ignore-output", "hide-input"]
def row(chapter):
    return f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |"


Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *map(row, CHAPTERS)]))

# %% [markdown]
# In comments, a tag such as FA2.A1.L12 names a line of a paper: paper, algorithm, line. In a terminal,
# `fa2-lab where FA2.A1.L12` prints that line, its NumPy code, its Triton code and its picture. `fa2-lab glossary` explains words and symbols, also
# in Chinese.
#
# **Takeaway.** FlashAttention-2 is a row of small changes. Each can be taken alone, checked and counted.

# %% [markdown]
# ## Recap
#
# - Attention is a weighted mean of values. S and P have N² numbers and are only steps on the way.
# - On chip there is little room and fast arithmetic. HBM has much room. Between them stands L2.
# - Products are cheap; moving numbers and taking exponentials is expensive.
# - FA1 and FA2 compute the same numbers in tiles, without ever having S whole.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** How many queries and keys may a square tile have, so that its scores (four bytes each) fit into a
# memory of `room` bytes? Write it in place of the `...`. The check tries an SM's shared memory, and L2.
#
# <details><summary>Hint</summary>
#
# How many bytes have B × B scores? Set that equal to `room`, and round down.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return int(np.sqrt(room / 4))
# ```
# 241 in shared memory, 3,965 in L2. A real tile is smaller, because blocks of q, k, v and o need room as well.
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
# **2. Find the bug.** In the four lines somebody wrote `E.sum(axis=0, keepdims=True)`. The shapes are right and no number
# is infinite. Write a test of P that finds it: True for the right weights, False for the wrong ones.
#
# <details><summary>Hint</summary>
#
# What must the weights of each query sum to? Queries run down and keys run right. `np.allclose` compares.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return np.allclose(P.sum(axis=1), 1)
# ```
# With `axis=0` the columns sum to 1, and the rows do not. A test of shapes would have let it through.
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
# The four lines against the package, FA1 and FA2 on lengths that fit no tile and on huge scores, the formulas of traffic
# against the meter, and the numbers in the text against the record.

# %% tags=["hide-input"]
rng = np.random.default_rng(1)
Q, (K, V) = rng.standard_normal((37, 8)), rng.standard_normal((2, 29, 8))
verdict("37 queries, 29 keys: the four lines", close(attention(Q, K, V), naive.forward(Q, K, V)[0]))
for name, stage in (("FA1", fa1), ("FA2", fa2)):
    dense, meter = naive.forward(1e3 * Q, K, V)[0], Trace()
    result = stage.forward(1e3 * Q, K, V, B_r=16, B_c=5, trace=meter)[0]
    verdict(f"37 queries, 29 keys, scores × 1000: {name}", close(result, dense))
    counted = io.traffic(name.lower(), "forward", Tiling(37, 29, 16, 5), 8).total
    verdict(f"{name}: what the chip requests, by formula = by the meter", counted == meter.hbm_elements)
verdict("every line of FA2's forward has its NumPy line", bool(where("FA2.A1.L12").numpy))

# %% tags=["hide-input"]
shown, N = time_and_memory.data(), 16384
time, memory = ({name: dict(curve) for name, curve in shown[what].items()} for what in ("time", "memory"))
verdict("ours is 5.6 times as fast as standard", round(time["standard"][N] / time["ours"][N], 1) == 5.6)
growth = [time[name][N] / time[name][N // 4] for name in ("standard", "FA2", "ours", "FA1")]
verdict("at four times the N: about four times the time, but for FA1's 15", [round(x) for x in growth] == [4, 4, 4, 15])
growth = [memory[name][N] / memory[name][N // 2] for name in ("standard", "FA2", "ours")]
verdict("memory at twice the N: fourfold, double, double", [round(x, 1) for x in growth] == [3.9, 2.0, 2.0])
verdict("and standard has no place at twice this N", max(memory["standard"]) == N)
O = N * 16 * 128 * 2 / 2**20  # MiB
verdict("beyond O, FA2 holds one number a row", [round(memory[n][N] - O, 2) for n in ("FA2", "ours")] == [1, 1])
verdict("standard: nine bytes a score", round((memory["standard"][N] - O) * 2**20 / (16 * N**2)) == 9)
read = counters["r07_two_loops"]["DRAM bytes read"][0]
verdict("FA2 reads Q, K and V once from DRAM, within 1%", abs(read / (3 * 2 * 64 * 4096 * 128) - 1) < 0.01)
verdict("FA2 requests two thirds of what standard does", round(seen["FA2"][0] / seen["standard"][0], 2) == 0.66)
shares = seen["standard"][1], round(seen["FA2"][1], 2)
verdict("nearly all of standard's, and 3% of FA2's, cross to DRAM", shares[0] > 0.99 and shares[1] == 0.03)

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
