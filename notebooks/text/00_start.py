# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what is a GPU?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same numbers on a GPU, many times faster and with a
# small part of the memory. This book goes from the four lines to that kernel, one change at a time. After each change it
# asks two questions: is the answer still the same, and what became smaller?
#
# After this notebook you can
#
# - write attention down, and say which two of its matrices cause all the trouble,
# - name the places where a GPU keeps numbers, with their sizes, and say what is cheap there and what is dear,
# - keep three quantities apart: the extra memory, what the chip requests, and what crosses to DRAM.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: matrix products,
# and NumPy's arrays. No GPU.*
#
# How to read: answer each question marked **Predict** in your head, then open the folded output. A wrong guess teaches
# more than a right answer that was read. Each section ends in one sentence, the **Takeaway**. The exercises have gaps for
# you to fill. The last section checks what the notebook claims, and stops with an error if a claim does not hold.

# %%
import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import chips, io
from fa2_lab.paper import ALGORITHMS, LINES, where
from fa2_lab.plots import gpu_map, ladder, motion, time_and_memory
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
# - *ours*: the last kernel of this book.
#
# **Predict.** One text becomes twice as long. By what factor does the number of comparisons grow?

# %%
show(time_and_memory.draw(**time_and_memory.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Four times.** Twice as many tokens compare themselves with twice as many. On the left the total is fixed at 16,384
# tokens: few long texts or many short ones. So the time there grows with N, and not with N². (The times of standard and
# FA1 are those of the first two kernels of chapter 10. FA2, and the memory of standard, are PyTorch's.)
# </details>
#
# On the left, lower is faster. Our kernel is 5.6 times as fast as standard attention at N = 16,384. FA1 is slower than
# standard here: it cuts the job into 16 parts at N = 16,384, this GPU has 132 processors, and most of them stay idle
# (chapter 06). (bf16 is a format for numbers, with two bytes each.) On the right, standard's memory grows fourfold with
# each doubling of N, until the GPU is full. FA2's and ours only double.
#
# **Takeaway.** The same answer can be had several times faster, and in memory that grows with N instead of N².

# %% [markdown]
# ## What does attention compute?
#
# Each token has a query (what it is looking for), a key (what it can be found by) and a value (what it hands over). Each
# of these is a row of d numbers. A query is compared with all keys. The better a key matches, the more its value counts.
# The output is the weighted mean of the values.
#
# **Predict.** The first query below is all zeros, so it matches every key equally well. What is its output?

# %%
def attention(Q, K, V):  # (N, d) each: one token to a row
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (N, N) scores: how well query i matches key j
    E = np.exp(S)  # (N, N) every score made positive
    P = E / E.sum(axis=1, keepdims=True)  # (N, N) weights: each row sums to 1
    return P @ V  # (N, d) for each query, the mean of all values with these weights


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
# In formulas: $S = QK^\top / \sqrt{d}$, $P = \mathrm{softmax}(S)$ row by row, and $O = PV$. The two lines from S to P are
# the softmax. A model does this many times side by side, each time with other Q, K and V. One such attention is a *head*.
#
# **Takeaway.** Attention is a weighted mean of values, and softmax makes the weights.

# %% [markdown]
# ## Which matrix is the large one?
#
# Q, K, V and the output O have N rows and d columns. S and P have N rows and N columns.
#
# **Predict.** N = 8,192 and d = 64. How many times larger is S than Q?

# %%
N, d = 8192, 64
print(f"Q, K, V, O: {N * d:>11,} numbers each")
print(f"S, P:       {N * N:>11,} numbers each, {N * N // (N * d)} times as many")
print(f"S with 2 bytes a number: {2 * N * N // 2**20} MiB for one head")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **128 times.** N² / (N · d) = N / d = 128.
# </details>
#
# And nobody asked for S. It is a step on the way to O.
#
# **Takeaway.** Inputs and outputs have N · d numbers. The scores and weights in between have N².

# %% [markdown]
# ## Where can a number be on a GPU?
#
# A program for a GPU is a *kernel*. It runs as many *thread blocks*, the workers of this book. A *thread* executes the
# instructions one by one, on numbers of its own. A *warp* is 32 threads that execute the same instruction together, and
# a thread block has several warps. The chip consists of *SMs* (streaming multiprocessors), its processors. A thread
# block stays on one SM until it is done.
#
# | place | what it is |
# | --- | --- |
# | registers | the numbers that one thread is working with |
# | shared memory | inside an SM; all warps of a thread block read and write it (the papers say SRAM) |
# | L2 | a cache for the whole chip; it keeps what came from HBM lately |
# | HBM | the large memory beside the chip, a kind of DRAM; tensors live here |
# | tensor cores | units of an SM that multiply small matrices |
# | other units | FP32 units add and multiply float32 numbers; special function units take exponentials |
#
# **Predict.** One SM has 228 KiB of shared memory, and this GPU has 132 SMs. Do the 128 MiB of S fit into all of it
# together? Into which of the four memories do they fit?

# %%
chip = chips.H200  # the GPU of all measurements in this book
rows = [
    ("registers", 4 * chip.SMs * chip.registers_per_sm, None),
    ("shared memory", chip.SMs * chip.shared_per_sm, chip.SMs * chip.shared_per_clock * chip.clock_hz),
    ("L2", chip.l2_bytes, None),
    ("HBM", chip.hbm_bytes, chip.hbm_per_second),
]
print(f"{chip.name}: {chip.SMs} SMs, each with 256 KiB of registers and 228 KiB of shared memory")
for name, size, speed in rows:
    print(f"{name:14} {size / 2**20:9,.0f} MiB in all " + (f"{speed / 1e12:6.1f} TB/s" if speed else ""))
print(f"tensor cores: {chip.tensor_flops / 1e12:.0f} TFLOP/s;  FP32 units: {chip.fp32_flops / 1e12:.0f} TFLOP/s;",
      f"exponentials: {chip.exp_per_second / 1e12:.1f} T/s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No; only into HBM.** 132 · 228 KiB are 29 MiB, in 132 separate pieces. Registers and L2 are too small as well. But a
# small piece of S, 128 × 128 scores of two bytes, has 32 KiB: that fits easily.
# </details>
#
# Below, the same for four GPUs, to scale. Look for the three dots in the corner of HBM: that is all the room on the chip.

# %%
show(gpu_map.draw(**gpu_map.data()))

# %% [markdown]
# Memory near the arithmetic is fast and small; far away it is large and slow. We call what is inside an SM *on chip*.
# (A FLOP is one addition or multiplication, and T is $10^{12}$. A blank means that the maker prints no figure.)
#
# **Takeaway.** There is much room far away and little room nearby. S only fits far away, a small piece of S fits
# nearby.

# %% [markdown]
# ## What is cheap, and what is dear?
#
# **Predict.** The tensor cores do 989 TFLOP/s, and HBM delivers 4.8 TB/s. How many FLOPs can the tensor cores do while
# one byte arrives?

# %%
score = 2 * d  # FLOPs of one score: d multiplications and d additions
there_and_back = 2 * 2 * chip.flops_per_byte  # two bytes out to HBM, and two bytes in
print("FLOPs that the tensor cores do in the time of …")
for what, price in [
    ("one byte from HBM", chip.flops_per_byte),
    ("one addition or multiplication on an FP32 unit", chip.flops_per_fp32),
    ("one exponential", chip.flops_per_exp),
    ("one score to HBM and back", there_and_back),
]:
    print(f"{what:48} {price:5.0f}")
print(f"to compute one score of S again, d = {d}: {score} FLOPs")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 200.** 989 / 4.8 = 206.
# </details>
#
# On this chip it is cheaper to compute a score a second time than to store it and fetch it back: 128 FLOPs against the
# time of 824. FlashAttention uses that difference. And what is not a matrix product costs more than it seems: an
# exponential takes as long as 256 FLOPs on the tensor cores.
#
# **Takeaway.** On a GPU products of matrices (*matmuls*) are cheap. Moving numbers is dear, and so are exponentials.

# %% [markdown]
# ## Can it be done without S?
#
# It can. Cut S into *tiles*: a few queries against a few keys. FA1 and FA2 compute one tile, use it, and throw it away.
# The package has these algorithms in NumPy.
#
# **Predict.** 8 queries and 8 keys, in tiles of 4 queries and 2 keys. How many tiles are there?

# %%
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
O = attention(Q, K, V)
tiles = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
ways = {
    "four lines": O,
    "standard": naive.forward(Q, K, V)[0],
    "FA1": fa1.forward(Q, K, V, **tiles)[0],
    "FA2": fa2.forward(Q, K, V, **tiles)[0],
}
tiling = Tiling(8, 8, **tiles)
print(f"{tiling.T_r} × {tiling.T_c} = {tiling.T_r * tiling.T_c} tiles; the first number of O:")
for name, result in ways.items():
    print(f"{name:12} {result[0, 0]:.12f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Eight.** Two blocks of queries times four blocks of keys.
# </details>
#
# All four ways agree in every printed digit. The additions run in another order, so the sixteenth digit may differ.
# Nothing is left out, and nothing is estimated. Chapters 02 and 03 show how it is done.
#
# **Takeaway.** FlashAttention is not an approximation. It is the same sum in another order.

# %% [markdown]
# ## What does "less traffic" mean?
#
# FA2 keeps a block of queries on chip and loads all keys and values past it, tile by tile. For the next block of
# queries it loads them all again. So the chip *requests* K and V many times. But L2 stands between the SMs and HBM.
# What L2 still holds is not fetched from DRAM a second time. (You need not read the next cell's code; read its table.)
#
# **Predict.** K and V of one head have 2 MiB together (N = 4,096, d = 128). When the chip requests them for the second
# time, where are they found?

# %%
counters = {r["problem"]["rung"]: r["values"] for r in measured("ladder")["rows"] if r["direction"] == "counters"}
tiling, heads, GB = Tiling(4096, 4096, 64, 64), 64, 1e9
extra = {"standard": (4 + 2) * 4096**2, "fa2": 4 * 4096}  # bytes: 4 for S and 2 for P; 4 for a number per row
seen = {}  # for the checks below
print("GB for 64 heads   extra memory   the chip requests   crosses to DRAM (counted on an H200)")
for name, rung in (("standard", "r00_standard"), ("fa2", "r07_two_loops")):
    t = io.traffic(name, "forward", tiling, 128)
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
# Standard attention's requests nearly all go to DRAM, since S and P of 64 heads do not fit in L2. FA2 requests two thirds
# as much, and only 3% of it crosses to DRAM: L2 answers the rest, and DRAM delivers Q, K and V once.
#
# The book counts elements with a *meter*. The meter counts the second quantity, what the chip requests. We shall always
# say which of the three is meant.
#
# Here are three ways to compute attention, on one clock that counts requested bytes. Each coloured square is a block on
# its way. o is a block of the output; $\ell$ and m are two numbers that softmax needs for each of its rows. Look at
# these three: in FA1 they come and go, in FA2 they stay. Chapters 03 and 04 explain why.

# %% tags=["nbval-ignore-output"]
recorded = motion.data()
show(motion.draw(**recorded), motion.moving(**recorded))

# %% [markdown]
# **Takeaway.** Keep three quantities apart: the extra memory, what the chip requests, and what crosses to DRAM.

# %% [markdown]
# ## What changes on the way?
#
# The picture shows the whole book. Each rung is one change, with its chapter's number. The upper bar is before the
# change and the lower bar after it. Many of its words are explained later: look only at the bars.

# %%
show(ladder.draw(**ladder.data()))

# %% [markdown]
# The bars do not measure the same thing everywhere: traffic, numbers kept, work, or idle processors. Rungs that make
# the same thing smaller stand together, and factors of different groups cannot be compared. What a change buys in time
# is measured in chapter 10. These are the chapters:

# %% tags=["nbval-ignore-output"]
def row(chapter):
    return f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |"


Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *map(row, CHAPTERS)]))

# %% [markdown]
# None of them needs a GPU. Chapters 01 to 07 are NumPy. The later ones run kernels in Triton's interpreter, which is slow
# but computes the same, and show what was recorded on a GPU.
#
# **Takeaway.** FlashAttention-2 is a row of small changes. Each can be taken alone, checked and counted.

# %% [markdown]
# ## How do I get from the paper to the code?
#
# This is Algorithm 1 of the FlashAttention-2 paper in our words, the goal of chapter 04. Capital letters are whole
# tensors in HBM. Small letters with an index are blocks on chip. τ is the factor $1 / \sqrt{d}$. You need not
# understand the rest yet: look for one thing only.
#
# **Predict.** Softmax divides by a sum. Inside how many loops is the division?

# %%
print(ALGORITHMS["FA2.A1"])

# %% [markdown]
# <details><summary>Answer</summary>
#
# **One.** Line 12 stands in the outer loop only.
# </details>
#
# Each line has a tag: paper, algorithm, line. The tag of line 12 is FA2.A1.L12. The same tag stands behind the code that
# computes it, and `where` finds it:

# %% tags=["nbval-ignore-output"]
print(where("FA2.A1.L12"))

# %% [markdown]
# First comes the line, then the NumPy code, the Triton code, and the picture. In a terminal, `fa2-lab where FA2.A1.L12`
# does the same, and `fa2-lab glossary` explains words and symbols, also in Chinese.
#
# **Takeaway.** A tag leads from a line of the paper to the code that computes it.

# %% [markdown]
# ## Recap
#
# - Attention is a weighted mean of values. S and P have N² numbers and are only a step on the way.
# - On chip there is little room and fast arithmetic. Far away there is much room. Between them stands L2.
# - Products are cheap; moving numbers and taking exponentials is dear.
# - FA1 and FA2 compute the same numbers in tiles, without ever having S whole.
# - Extra memory, requests of the chip, and DRAM traffic are three quantities.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** The weights of each query must sum to 1. Write the line that makes P out of E, in place of the `...`,
# without looking it up.
#
# <details><summary>Hint</summary>
#
# `E.sum(axis=…, keepdims=True)`. In S, queries run down and keys run right.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return E / E.sum(axis=1, keepdims=True)
# ```
# </details>

# %%
def weights(E):  # (N_q, N_k), all positive
    return ...


E = np.array([[1.0, 3.0, 4.0], [2.0, 2.0, 4.0]])  # two queries, three keys
P = weights(E)
if P is ...:
    print("not written yet")
elif np.shape(P) != (2, 3):
    print("not yet: P has a weight for each of 2 queries and 3 keys, yours has the shape", np.shape(P))
elif not close(P.sum(axis=1), np.ones(2)):
    print("not yet: the weights of the queries sum to", P.sum(axis=1), "and not to 1")
else:
    print("right" if close(P, E / [[8], [8]]) else "not yet: each weight is its share of the row's sum")

# %% [markdown]
# **2. Complete.** How many queries and keys may a square tile have, so that its scores (2 bytes each) fit into a memory
# of `room` bytes? Try it on an SM's shared memory, and on L2.
#
# <details><summary>Hint</summary>
#
# A tile of B × B scores has 2B² bytes. `math.isqrt` takes the whole part of a square root; `int(np.sqrt(...))` will do.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return int(np.sqrt(room / 2))
# ```
# 341 in shared memory, 5,608 in L2. A real tile is smaller, because blocks of q, k, v and o need room as well.
# </details>

# %%
def largest_tile(room):
    return ...


for name, room in (("shared memory of an SM", chip.shared_per_sm), ("L2", chip.l2_bytes)):
    B = largest_tile(room)
    if B is ...:
        print("not written yet:", name, "has", room, "bytes")
    elif 2 * B**2 > room:
        print(f"not yet: {B} × {B} scores have {2 * B**2:,} bytes, {name} has {room:,}")
    else:
        print("right:" if 2 * (B + 1) ** 2 > room else "not yet, one more row and column would fit:", B)

# %% [markdown]
# **3. Find the bug.** In the four lines somebody wrote `E.sum(axis=0, …)`. The shapes are right and no number is
# infinite. Which test would have found it?
#
# <details><summary>Answer</summary>
#
# The sums of P's rows, as in exercise 1, or a comparison with another implementation. A test of shapes would have let it
# through. The checks in this book compare numbers, and the project plants faults in its own code to see them caught.
# </details>

# %% [markdown]
# ## Checks
#
# The four lines against the package, FA1 and FA2 on lengths that fit no tile and on huge scores, the formulas of traffic
# against the meter, and the numbers in the text against the record.

# %%
rng = np.random.default_rng(1)
Q, (K, V) = rng.standard_normal((37, 8)), rng.standard_normal((2, 29, 8))
verdict("37 queries, 29 keys: the four lines", close(attention(Q, K, V), naive.forward(Q, K, V)[0]))
for size in (1.0, 1e3):
    truth = naive.forward(size * Q, K, V)[0]
    for name, stage in (("FA1", fa1), ("FA2", fa2)):
        result, *_ = stage.forward(size * Q, K, V, B_r=16, B_c=5)
        verdict(f"37 queries, 29 keys, scores × {size:g}: {name}", close(result, truth))
small, (Q, K, V) = Tiling(64, 64, 16, 16), rng.standard_normal((3, 64, 8))
for name, stage in dict(standard=naive.forward, fa1=fa1.forward, fa2=fa2.forward).items():
    meter = Trace()
    stage(Q, K, V, trace=meter, **({} if name == "standard" else dict(B_r=16, B_c=16)))
    formula = io.traffic(name, "forward", small, 8).total
    verdict(f"{name}: what the chip requests, by formula = by the meter", formula == meter.hbm_elements)

# %%
found = time_and_memory.data()
time, memory = ({name: dict(curve) for name, curve in found[what].items()} for what in ("time", "memory"))
N = 16384
verdict("ours is 5.6 times as fast as standard", round(time["standard"][N] / time["ours"][N], 1) == 5.6)
verdict("FA1 is slower than standard here", all(time["FA1"][n] > ms for n, ms in time["standard"].items()))
growth = [memory[name][N] / memory[name][N // 2] for name in ("standard", "FA2", "ours")]
verdict("memory at twice the N: fourfold, double, double", [round(x, 1) for x in growth] == [3.9, 2.0, 2.0])
verdict("and standard has no place at twice this N", max(memory["standard"]) == N)
read = counters["r07_two_loops"]["DRAM bytes read"][0]
verdict("FA2 reads Q, K and V once from DRAM, within 1%", abs(read / (3 * 2 * 64 * 4096 * 128) - 1) < 0.01)
verdict("FA2 requests two thirds of what standard does", round(seen["fa2"][0] / seen["standard"][0], 2) == 0.66)
verdict("nearly all of standard's, and 3% of FA2's, cross to DRAM", seen["standard"][1] > 0.99 and round(seen["fa2"][1], 2) == 0.03)
computing = [tag for tag, (_, line) in LINES.items() if line.computes]
verdict("every computing line of the papers has its NumPy line", all(where(tag).numpy for tag in computing))

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
