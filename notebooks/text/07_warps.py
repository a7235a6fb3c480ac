# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)

# %% [markdown]
# # 07 · Warps
#
# **How do the warps of one block share a tile?**
#
# Chapter 06 gave row blocks to thread blocks that exchange nothing. A thread block has four or eight *warps*: groups of 32
# threads that execute their instructions together. The warps of a block run on one SM and can exchange results. What does
# that cost?
#
# After this notebook you can
#
# - cut a tile among warps by queries or by keys, and say which results then have to cross from warp to warp,
# - count the bytes that a tile moves through shared memory,
# - say what each barrier protects, and what happens without it.
#
# *Time: 35 minutes with the questions, the function and the exercise. Hardware: any laptop, NumPy alone. Before
# this: [06 · Parallelism](06_parallelism.ipynb). How threads hold the numbers of a tile, and how large a tile may be, is
# in [appendix A](A_lanes.ipynb).*

# %% tags=["hide-input"]
from collections import Counter
from unittest.mock import patch

import numpy as np

from fa2_lab.machine import chips, prices, time, warps
from fa2_lab.plots import roofline, warp_split
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.tiles import Tiling
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Four warps, one tile: cut the queries
#
# A warp computes with numbers in its registers, which no other warp can read. Shared memory can be read and written by
# all warps of a thread block. A result that others need goes there, and all wait until everybody has written. This
# waiting point is called a *barrier*.
#
# Take one tile: 8 queries, 8 keys, d = 4, and four warps. The first way to share it cuts the queries. Each warp takes two
# rows of Q, and computes their scores, softmax and $PV$. For that it reads its own two rows of Q, and K and V as a whole.

# %%
def split_q_tile(q, k, v, W):  # (B_r, d), (B_c, d), (B_c, d)
    o = []
    for q_w in np.split(q, W):  # (B_r / W, d): the rows of warp w
        s_w = q_w @ k.T / np.sqrt(q.shape[1])  # (B_r / W, B_c)
        o.append(safe_softmax(s_w) @ v)  # (B_r / W, d)
    return np.vstack(o)  # put on top of each other: nothing is added


q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4))
dense = safe_softmax(q @ k.T / 2) @ v
print(f"error of o: {np.abs(split_q_tile(q, k, v, 4) - dense).max():.3f}")

# %% [markdown]
# Softmax works row by row, and each row belongs to one warp from beginning to end. This is FA2's way, *split-Q*.

# %% [markdown]
# ## The other way: cut the keys
#
# In the FA1 kernel of 2022 each warp takes two keys and all queries. It has finished scores, but only two of eight columns
# of S. The FA2 paper calls this *split-K*, where K means the keys. (The split-KV of chapter 06 is among thread blocks.)
#
# Two columns are not enough for a softmax. All warps need the maxima before the exponentials, and the sums and the parts
# of $PV$ after them.


# %%
def split_k_tile(q, k, v, W):
    shares = np.split(k, W)
    s = [q @ k_w.T / np.sqrt(q.shape[1]) for k_w in shares]  # W times (B_r, B_c / W)
    maxima = [s_w.max(axis=1) for s_w in s]
    m = np.max(maxima, axis=0)  # first barrier: all warps wait for all maxima
    p = [np.exp(s_w - m[:, None]) for s_w in s]
    sums = [p_w.sum(axis=1) for p_w in p]
    values = np.split(v, W)
    parts = [p_w @ v_w for p_w, v_w in zip(p, values, strict=True)]  # W times (B_r, d)
    o = sum(parts) / sum(sums)[:, None]  # second barrier: sums and parts are added
    return o, {"maxima": maxima, "sums": sums, "parts of P V": parts}


o, published = split_k_tile(q, k, v, 4)
print(f"error of o: {np.abs(o - dense).max():.3f}")
for name, of_warps in published.items():
    print(f"{name:12}: {len(of_warps)} warps publish {of_warps[0].size} numbers each")

# %% [markdown]
# Maxima and sums are small, but the maxima make all warps wait in the middle of the softmax. The parts of $PV$ are large:
# each is a block of $B_r \times d$, as large as the output, and there are W of them for every tile.
#
# The first barrier can be saved. Each warp can use the maximum of its own keys, $m_w$, and publish it together with its sums
# $\ell_w$ and its undivided part $o_w$. Then one exchange puts them together.
#
# **Build.** `m`, `l` and `o` have one entry for each warp: maxima, sums and parts, made with the warp's own maximum.
# Return the finished rows of the tile's output. A row that sees no key gets zeros. (A warp without a visible key in a row
# publishes $m_w = -\infty$, $\ell_w = 0$ and $o_w = 0$.)

# %%
def exchange(m, l, o):  # (W, B_r), (W, B_r), (W, B_r, d)
    ...


# %% tags=["hide-input"]
def published_by_warps(s, v, W):  # what each warp has before the exchange
    m, l, o = [], [], []
    for s_w, v_w in zip(np.split(s, W, axis=1), np.split(v, W), strict=True):
        m.append(s_w.max(axis=1))
        p_w = np.exp(s_w - np.where(np.isfinite(m[-1]), m[-1], 0)[:, None])
        l.append(p_w.sum(axis=1))
        o.append(p_w @ v_w)
    return np.array(m), np.array(l), np.array(o)


S = q @ k.T / 2
same, hidden, empty = S.copy(), S.copy(), S.copy()
same[:, ::2] = same.max()  # every warp has the same maximum
hidden[2, :4] = -np.inf  # two of the four warps have no key for row 2
empty[5] = -np.inf
finished = np.where(np.arange(8)[:, None] == 5, 0, dense)
cases = {
    "all maxima are equal. Are the sums added, and is o divided by them?": (same, safe_softmax(same) @ v),
    "maxima differ. By what must a warp's part shrink?": (S, dense),
    "scores near 1000. Is anything raised by e to the m?": (1e3 * S, safe_softmax(1e3 * S) @ v),
    "two warps see no key of row 2. Do they leave the others alone?": (hidden, safe_softmax(hidden) @ v),
    "row 5 sees no key at all. What is −∞ − (−∞), and 0 / 0?": (empty, finished),
}
check(exchange, *(Case(words, published_by_warps(s, v, 4), o) for words, (s, o) in cases.items()))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def exchange(m, l, o):
#     top = m.max(axis=0)
#     top = np.where(np.isfinite(top), top, 0)  # a row without keys
#     alpha = np.exp(m - top)  # (W, B_r)
#     l = (alpha * l).sum(axis=0)  # (B_r,)
#     o = (alpha[:, :, None] * o).sum(axis=0)  # (B_r, d)
#     return o / np.where(l == 0, 1, l)[:, None]
# ```
#
# It is the merge of chapter 02. The parts of $PV$ still cross, and they are what costs.
# </details>
#
# [Assignment 6](assignments/6_read_the_machine.ipynb) goes further: what fits into shared memory and registers.

# %% [markdown]
# ## Count what passes through shared memory
#
# `fa2_lab.machine.warps` runs a thread block warp by warp, on a shared memory that counts. Q, K and V are copied from
# HBM into shared memory, and each warp reads from there what it needs. Take the tile of chapter 04: 128 × 64 with d = 128.
# Q, K and V have 2 bytes per element, maxima, sums and $PV$ have 4.
#
# **Predict.** With four warps, split-Q reads K and V four times instead of once. How many bytes does it move in all?
#
# - ☐ more than split-K, almost four times as many
# - ☐ about as many as split-K
# - ☐ fewer than split-K
#
# <details><summary>Answer</summary>
#
# **fewer than split-K.** About a quarter. The parts of $PV$ alone make 512 KiB under split-K: each of the four has
# 128 × 128 numbers of 4 bytes, 64 KiB, written once and read once. And under split-K every warp reads all of Q.
#
# ```python
# for name in warps.SCHEMES:
#     sizes = Counter()
#     for (_, tensor), n in warps.tile_accesses(name, 128, 64, 128, W=4).items():
#         sizes[tensor] += n * warps.BYTES[tensor] // 1024
#     parts = ", ".join(f"{x} {size}" for x, size in sizes.items())
#     print(f"{name}: {sum(sizes.values())} KiB, of which {parts}")
# ```
#
# ```text
# split_q: 192 KiB, of which K 80, V 80, Q 32
# split_k: 718 KiB, of which K 32, V 32, Q 128, max 10, sum 4, PV 512
# ```
# </details>
#
# The picture is the paper's figure 3. Under split-Q all warps read K and V, and the partial results are gone:

# %% tags=["hide-input"]
show(warp_split.draw(**warp_split.data(B_r=128, B_c=64, d=128)))

# %% [markdown]
# ## Could split-K merge once, at the end?
#
# Each warp could keep a state $(m, \ell, o)$ of its own through all tiles, and `exchange` could run once, after the last
# one. Then nothing crosses inside the loop. But each warp holds an $o$ of full size in its registers. A warp has 32 threads,
# and a thread has at most 255 registers, with one fp32 number in each. An $o$ of 128 × 128 would take 128 · 128 / 32 = 512
# registers a thread. Under split-Q the four warps share the rows: 128.

# %% [markdown]
# ## What do the barriers protect?
#
# Split-Q exchanges no results. It still needs two barriers per tile, because all warps read the same blocks of K and V.
#
# - "The tile is there": nobody reads before the copy is complete.
# - "The tile is free": the next copy, to the same place, waits until everyone has read.
#
# Split-K needs three (with `exchange` two): "the tile is there", one for the maxima, and one for sums and $PV$. After the
# last one everybody has read K and V, so the tile is free, too.
#
# The counting memory raises a `RaceError` if a place is written and then read by another warp, or read and then overwritten
# by another, with no barrier in between. A GPU computes with whatever is there.


# %% tags=["hide-input"]
def without(scheme, reason, B_c=4):  # with 8 keys
    real = warps.SharedMemory.barrier

    def barrier(self, why):
        if why != reason:
            real(self, why)

    with patch.object(warps.SharedMemory, "barrier", barrier):
        try:
            scheme(q, k, v, Tiling(8, 8, B_r=8, B_c=B_c), i=0, W=2)
        except warps.RaceError as race:
            return str(race)


one_tile = Tiling(N_q=8, N_k=8, B_r=8, B_c=8)
waits = {name: list(scheme(q, k, v, one_tile, i=0, W=4).shared.waits) for name, scheme in warps.SCHEMES.items()}

# %% [markdown]
# **Predict.** All keys fit in one tile. Which barrier may split-Q leave out then, and which split-K?
#
# - ☐ none: the warps still share K and V
# - ☐ split-Q its second one, split-K none
# - ☐ each its last one, as nothing is copied afterwards
#
# <details><summary>Answer</summary>
#
# **split-Q its second one, split-K none.** "The tile is free" protects keys from the next copy, and there is none. But
# split-K's last barrier also protects sums and parts that other warps have yet to read.
#
# ```python
# for name, scheme in warps.SCHEMES.items():
#     for reason in waits[name]:
#         print(f"{name} without {reason!r}:\n    {without(scheme, reason, B_c=8) or 'no race'}")
# ```
#
# ```text
# split_q without 'the tile is there':
#     warp 0 reads what another has written in Q, with no barrier between
# split_q without 'the tile is free':
#     no race
# split_k without 'the tile is there':
#     warp 0 reads what another has written in Q, with no barrier between
# split_k without 'row maxima of all warps':
#     warp 0 reads what another has written in max, with no barrier between
# split_k without 'row sums and P V of all warps':
#     warp 0 reads what another has written in sum, with no barrier between
# ```
# </details>
#
# Real kernels keep places for two or more tiles, called *stages*. The next copy goes to another place while this tile is
# in use. Then warps seldom wait, but each place still needs its two barriers.

# %% [markdown]
# ## What is it worth?
#
# Saved bytes save time only if somebody waited for them. Take the model of chapter 04 after tweak 1 (which also drops a
# division and other small steps of each row), and add the shared memory of an A100's SM: 128 bytes per clock.

# %% tags=["hide-input"]
change = time.split(chips.A100, 128, 64, 128)
print("clocks of a tile of 128 × 64, d = 128, on an A100")
for name, tile in (("split-K", change.before), ("split-Q", change.after)):
    units = f"tensor {tile.tensor:.0f}, exp {tile.exp:.0f}, fp32 {tile.fp32:.0f}"
    print(f"  {name}: {units}, shared {tile.shared:.0f}; busiest: {tile.busiest}")
one, all_ = change.serial, change.overlapped
print(f"split-Q is {one:.1f} times as fast if units take turns,", end=" ")
print(f"{all_:.1f} if all work at once")

# %% tags=["hide-input"]
record, (split_k, split_q) = load("ladder"), ("s00_split_keys", "s01_split_queries")
row = next(row for row in record.rows if split_k in row.values)  # milliseconds: the median comes first
ratio, d = row.values[split_k][0] / row.values[split_q][0], row.problem["d"]
small = time.split(chips.H200, 32, 32, d, W=2)  # their smaller tile
read = {r.problem["rung"]: r.values for r in record.rows if r.direction == "counters"}
passes = [read[name]["shared-memory wavefronts"][0] for name in (split_k, split_q)]
print(f"two kernels on an {record.machine['gpu']}, two warps, a smaller tile: 32 × 32, d = {d}")
print(f"  measured: split-Q is {ratio:.1f} times as fast; by the model {small.serial:.1f} to {small.overlapped:.1f}")
print(f"  passes through shared memory, split-K over split-Q: {passes[0] / passes[1]:.0f}; by the model 2")

# %% [markdown]
# Under split-K the tensor cores wait for shared memory: 718 · 1,024 / 128 = 5,744 clocks. Under split-Q it needs 1,536, and
# the tensor cores are the busiest unit.
#
# The last lines are measured (`fa2-lab ladder s00 s01`). That both are 2.8 is chance. In a *pass* shared memory serves a
# warp's request, or a part of it. The counter has four times as many passes under split-K, the model twice as many. *Bank
# conflicts* (threads of a warp take turns at shared memory) and exchanges that the compiler adds can add passes. So part of
# the factor belongs to these two kernels.
#
# The same on a roofline of shared memory. A tile has $4 \cdot 128 \cdot 64 \cdot 128$ FLOPs.

# %% tags=["hide-input"]
price, flops, points = prices.prices(chips.A100), 4 * 128 * 64 * 128, {}
for name, scheme in (("split-K", "split_k"), ("split-Q", "split_q")):
    intensity = flops / warps.tile_bytes(scheme, 128, 64, 128, 4)
    points[name] = intensity, min(price.tensor, intensity * price.shared) / 1e12
roof = roofline.Roof(price.tensor / 1e12, price.shared / 1e12, "", "tensor cores 312")
caption = "The tile under both splits (A100)."
axis = f"FLOPs per byte of shared memory ({price.shared / 1e12:.1f} TB/s)"
show(roofline.draw(points, [roof], caption, axis))

# %% [markdown]
# ## Is there such a cut for the backward pass?
#
# If the warps own rows or columns of a product's result, each finishes its own alone. If they own what the product sums
# over, each has a part, and the parts must be added. In $O = PV$ the queries are rows of the result, and the keys are
# summed over.
#
# **Predict.** The backward pass has five products: $S = QK^\top$, $dP = dO\,V^\top$, $dV = P^\top dO$, $dQ = dS\,K$ and
# $dK = dS^\top Q$ (without $\tau$). Which cut avoids all additions?
#
# - ☐ warps own queries, as forward
# - ☐ warps own keys
# - ☐ neither
#
# <details><summary>Answer</summary>
#
# **neither.** dV and dK sum over the queries, and dQ over the keys. Owning keys is better: it finishes S, dP, dV and dK,
# and leaves one sum; owning queries leaves two. So it is for the thread blocks of chapter 06.
# </details>

# %% [markdown]
# ## Recap
#
# - Split-Q: a warp owns rows of Q, S and O, and reads all of K and V. No results cross.
# - Split-K: a warp owns keys. Maxima cross before the exponentials; sums and parts of $PV$ cross after them and are added.
# - Split-Q reads K and V more often, and moves fewer bytes in all. It has two barriers a tile, split-K two or three.
# - For each barrier ask: which block is written before it and read after it, or read before it and overwritten after it?
# - Backward, every cut leaves something to be added.

# %% [markdown]
# ## Exercises
#
# **1.** A tile has $B_r \times B_c$ scores, head dimension d and W warps. How many bytes does split-Q move through shared
# memory? And how many KiB for 128 × 64, d = 128, if eight warps share the tile in place of four?
#
# <details><summary>Solution</summary>
#
# K and V are written once and read by every warp, Q is read once, at 2 bytes each: $2\,(2 B_c d\,(1 + W) + B_r d)$. Eight
# warps make it 320 KiB in place of 192.
# </details>

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and numbers of the text.

# %% tags=["hide-input"]
for W in (1, 4):
    by_queries, by_keys = (run(q, k, v, one_tile, 0, W).O for run in (warps.split_q, warps.split_k))
    verdict(f"split_q_tile = warps.split_q, warps: {W}", close(split_q_tile(q, k, v, W), by_queries))
    verdict(f"split_k_tile = warps.split_k, warps: {W}", close(split_k_tile(q, k, v, W)[0], by_keys))
for name, run in warps.SCHEMES.items():
    verdict(f"{name}: no barrier may be left out", all(without(run, reason) for reason in waits[name]))
asked = ("split_q", 4), ("split_k", 4), ("split_q", 8)
kib = [warps.tile_bytes(name, 128, 64, 128, W) / 1024 for name, W in asked]
verdict("192 KiB against 718, 320 with eight warps", [round(x) for x in kib] == [192, 718, 320])
verdict("measured: half as much again as the model says, and more", ratio > 1.5 * small.overlapped)

# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)
