# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)

# %% [markdown]
# # 07 · Warps
#
# **How do the warps of one block share a tile?**
#
# Chapter 06 gave row blocks to thread blocks that exchange nothing. Inside a thread block the same question comes back,
# one level down. A thread block has four or eight *warps*: groups of 32 threads that execute their instructions
# together. The warps of a block run on one SM and can exchange results. The question is what that costs.
#
# After this notebook you can
#
# - cut a tile among warps by queries or by keys, and say which results then have to cross from warp to warp,
# - count the bytes that a tile moves through shared memory,
# - say what each barrier protects, and what happens without it.
#
# *Time: 45 minutes with the questions and exercises, and 8 for the ten questions on part II at the end. Hardware: any
# laptop, NumPy alone. Before this: [06 · Parallelism](06_parallelism.ipynb). How threads hold the numbers of a tile,
# and how large a tile may be, is in [appendix A](A_lanes.ipynb).*

# %%
from collections import Counter
from functools import reduce
from unittest.mock import patch

import numpy as np

from fa2_lab.machine import chips, time, warps
from fa2_lab.plots import warp_split
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Four warps, one tile: cut the queries
#
# A warp computes with numbers in its registers, which no other warp can read. Shared memory can be read and written by
# all warps of a thread block.
#
# Take one tile: 8 queries, 8 keys, d = 4, and four warps. The first way to share it cuts the queries. Each warp takes
# two rows of Q, and computes their scores, softmax and $PV$.
#
# **Predict.** Of Q, K and V: which must warp 0 read as a whole?


# %% tags=["hide-input"]
def split_q_tile(q, k, v, W):  # (B_r, d), (B_c, d), (B_c, d)
    o = []
    for q_w in np.split(q, W):  # (B_r / W, d): the rows of warp w
        s_w = q_w @ k.T / np.sqrt(q.shape[1])  # (B_r / W, B_c)
        o.append(safe_softmax(s_w) @ v)  # (B_r / W, d)
    return np.vstack(o)  # put on top of each other: nothing is added


q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4))
dense = safe_softmax(q @ k.T / 2) @ v
print(f"queries cut among 4 warps: error of o {np.abs(split_q_tile(q, k, v, 4) - dense).max():.3f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **K and V.** Its two rows of scores need all keys, and its two rows of $o$ need all values. Of Q it needs its own two
# rows only.
# </details>
#
# Softmax works row by row, and each row belongs to one warp from beginning to end. This is FA2's way. We call it
# *split-Q*.
#
# **Takeaway.** With the queries cut, each warp runs FA2's forward pass on its own rows.

# %% [markdown]
# ## The other way: cut the keys
#
# In the FA1 kernel of 2022, the warps cut the keys of a tile. Each warp takes two keys and all queries. So it has
# finished scores, but only two of eight columns of S. The FA2 paper calls this *split-K*, where K means the keys. (The
# split-KV of chapter 06 is among thread blocks.)
#
# Two columns are not enough for a softmax. Follow it step by step: maximum, exponentials, sum, $PV$. Three of the results
# need all four warps: the maxima, the sums, and the parts of $PV$. To publish a result, a warp writes it into shared
# memory, and all wait until everybody has written. This waiting point is called a *barrier*.
#
# **Predict.** Which of the three results is the largest?


# %% tags=["hide-input"]
def split_k_tile(q, k, v, W):
    s = [q @ k_w.T / np.sqrt(q.shape[1]) for k_w in np.split(k, W)]  # W times (B_r, B_c / W)
    maxima = [s_w.max(axis=1) for s_w in s]
    m = np.max(maxima, axis=0)  # first barrier: all warps wait for all maxima
    p = [np.exp(s_w - m[:, None]) for s_w in s]
    sums = [p_w.sum(axis=1) for p_w in p]
    parts = [p_w @ v_w for p_w, v_w in zip(p, np.split(v, W), strict=True)]  # W times (B_r, d)
    o = sum(parts) / sum(sums)[:, None]  # second barrier: sums and parts are added up
    return o, {"maxima": maxima, "sums": sums, "parts of P V": parts}


o, published = split_k_tile(q, k, v, 4)
print(f"keys cut among 4 warps: error of o {np.abs(o - dense).max():.3f}")
for name, of_warps in published.items():
    print(f"{name:12}: {len(of_warps)} warps publish {of_warps[0].size} numbers each")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The parts of P V.** Each is a whole block of $B_r \times d$, as large as the output. There are W of them, for every
# tile.
# </details>
#
# Maxima and sums are small. But the maxima make all warps wait in the middle of the softmax.
#
# **Takeaway.** For every tile, split-K exchanges maxima, sums and W partial output blocks. Split-Q exchanges nothing.

# %% [markdown]
# ## Count what passes through shared memory
#
# `fa2_lab.machine.warps` runs a thread block warp by warp, on a shared memory that counts. Q, K and V are copied from
# HBM into shared memory, and each warp reads from there what it needs. Q is copied once for all tiles of its row
# block, so the count of one tile has only Q's reads.
#
# Take the tile of chapter 04: 128 × 64 with d = 128. Q, K and V have 2 bytes per element, maxima, sums and $PV$ have 4.
#
# **Predict.** With four warps, split-Q reads K and V four times instead of once. Does it move more bytes than split-K in
# all, or fewer?

# %% tags=["hide-input"]
for name in warps.SCHEMES:
    sizes = Counter()
    for (_, tensor), n in warps.tile_accesses(name, 128, 64, 128, W=4).items():
        sizes[tensor] += n * warps.BYTES[tensor] // 1024
    print(f"{name}: {sum(sizes.values())} KiB, of which", ", ".join(f"{x} {size}" for x, size in sizes.items()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Fewer, about a quarter.** The parts of $PV$ alone make 512 KiB under split-K. Each of the four parts has 128 × 128
# numbers of 4 bytes, 64 KiB. It is written once and read once: 2 · 4 · 64.
# </details>
#
# Under split-K every warp reads all of Q: 4 · 32 KiB. Every warp reads all maxima: 2 KiB written, 4 · 2 read. A sum is
# read once, by the warp that adds it up: 2 + 2.
#
# The picture is the paper's figure 3, with the bytes of one tile beneath. Compare the bars of what is read: under
# split-Q those of K and V are longer, and the partial results are gone.

# %%
show(warp_split.draw(**warp_split.data(B_r=128, B_c=64, d=128)))

# %% [markdown]
# **Takeaway.** Reading shared inputs four times is cheaper than exchanging partial outputs: 192 KiB against 718.

# %% [markdown]
# ## What do the barriers protect?
#
# Split-Q exchanges no results. It still needs two barriers per tile, because all warps read the same blocks of K and V.
#
# - "The tile is there": nobody reads before the copy is complete.
# - "The tile is free": the next copy, to the same place, waits until everyone has read.
#
# Split-K needs three: "the tile is there", one for the maxima, and one for sums and $PV$. After the last one everybody has
# read K and V, so it also says that the tile is free.

# %% [markdown]
# The counting memory raises a `RaceError` if a place is written and then read, or read and then overwritten, with no
# barrier in between. A GPU raises nothing. It computes with whatever is there.
#
# **Predict.** Leave out split-Q's second barrier. Which of the two gets in the way: the copy of the next tile, or another
# warp?


# %% tags=["hide-input"]
def without(scheme, reason):
    real = warps.SharedMemory.barrier

    def barrier(self, why):
        if why != reason:
            real(self, why)

    with patch.object(warps.SharedMemory, "barrier", barrier):
        try:
            scheme(q, k, v, Tiling(N_q=8, N_k=8, B_r=8, B_c=4), i=0, W=2)
        except warps.RaceError as race:
            return str(race)


one_tile, waits = Tiling(N_q=8, N_k=8, B_r=8, B_c=8), {}
for name, scheme in warps.SCHEMES.items():
    waits[name] = list(scheme(q, k, v, one_tile, i=0, W=4).shared.waits)
    for reason in waits[name]:
        print(f"{name} without {reason!r}:\n    {without(scheme, reason)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The copy.** In this run the warps had read the keys already. But without a barrier nothing makes the copy wait. It
# may overwrite keys that a slow warp has yet to read.
# </details>
#
# Real kernels keep places for two or more tiles, called *stages*. The next copy goes to another place while this tile is
# in use. Then warps seldom wait, but each place still needs its two barriers.
#
# **Takeaway.** For each barrier ask: which block is written before it and read after it, or read before it and overwritten
# after it?

# %% [markdown]
# ## Could split-K merge once, at the end?
#
# Each warp could keep a state $(m, \ell, o)$ of its own through all tiles, and the four states could be merged after the
# last one, as in chapter 02. Then nothing crosses inside the loop, and the result is right.
#
# But now each warp holds an $o$ of full size in its registers. A warp has 32 threads, and a thread has at most 255
# registers, with one fp32 number in each.
#
# **Predict.** $o$ has 128 rows and d = 128. How many registers of each thread does it take, if one warp holds it all?


# %% tags=["hide-input"]
def merge_at_the_end(q, k, v, W, B_c):
    states = [SoftmaxState.reset(*q.shape) for _ in range(W)]
    for j in range(0, len(k), B_c):
        for w, share in enumerate(np.split(np.arange(j, j + B_c), W)):
            states[w] = states[w].update(q @ k[share].T / np.sqrt(q.shape[1]), v[share])
    return reduce(SoftmaxState.merge, states).finalize()[0]


print(f"merged once: error of o {np.abs(merge_at_the_end(q, k, v, W=2, B_c=4) - dense).max():.3f}")
for B_r, d in ((64, 64), (128, 64), (128, 128)):
    print(f"o of {B_r:3} × {d:3}: registers per thread, split-K {B_r * d // 32}, split-Q {B_r * d // (32 * 4)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **512.** 128 · 128 / 32 = 512, twice what a thread has. Under split-Q the four warps share the rows: 128 registers.
# </details>
#
# **Takeaway.** Split-K needs W blocks of output, in shared memory or in registers. Split-Q shares one block among the
# warps.

# %% [markdown]
# ## What is it worth?
#
# Saved bytes save time only if somebody waited for them. Take the model of chapter 04 and add one unit to it: the
# shared memory of one SM of the A100 moves 128 bytes per clock. For this tile the tensor cores need 2,048 clocks, the
# FP32 units 644, and the exponentials 520.
#
# **Predict.** Split-K moves 718 KiB through shared memory, and split-Q 192 KiB. Which unit is busiest under each of them?

# %% tags=["hide-input"]
change = time.split(chips.A100, 128, 64, 128)
print("clocks of a tile of 128 × 64, d = 128, on an A100:")
for name, tile in (("split-K", change.before), ("split-Q", change.after)):
    units = f"tensor {tile.tensor:5.0f}, exp {tile.exp:4.0f}, fp32 {tile.fp32:4.0f}, shared {tile.shared:5.0f}"
    print(f"  {name}: {units}; busiest: {tile.busiest}")
print(f"split-Q is {change.serial:.1f} times as fast if units take turns, {change.overlapped:.1f} if all work at once")
record, (split_k, split_q) = load("ladder"), ("s00_split_keys", "s01_split_queries")
row = next(row for row in record.rows if split_k in row.values)  # milliseconds: the median comes first
ratio, d = row.values[split_k][0] / row.values[split_q][0], row.problem["d"]
small = time.split(chips.H200, 32, 32, d, W=2)  # the tile of these two kernels
said = f"{ratio:.1f} times as fast; by the model of it {small.serial:.1f} to {small.overlapped:.1f}"
print(f"measured on an {record.machine['gpu']}, two warps on a tile of 32 × 32, d = {d}: {said}")
read = {r.problem["rung"]: r.values for r in record.rows if r.direction == "counters"}
passes = [read[name]["shared-memory wavefronts"][0] for name in (split_k, split_q)]
modelled = [warps.tile_bytes(name, 32, 32, d, 2) for name in ("split_k", "split_q")]
print(f"passes through shared memory, split-K over split-Q: counted {passes[0] / passes[1]:.0f}, ", end="")
print(f"bytes by the model {modelled[0] / modelled[1]:.0f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Shared memory under split-K:** 718 · 1,024 / 128 = 5,744 clocks, and the tensor cores wait for it. **The tensor cores
# under split-Q:** shared memory needs 192 · 1,024 / 128 = 1,536.
# </details>
#
# The last lines are measured, on two small Triton kernels, one for each split (`fa2-lab ladder s00 s01`). The factor, 6.2,
# is far above the model's. The model has no barriers, no bank conflicts (lanes of a warp that must wait for each other at
# shared memory), and no exchange that the compiler adds. A *pass* is what shared memory serves at once, so conflicts and
# exchanges are counted, barriers are not: split-K has 11 times as many passes, where the model sees twice the bytes. So
# part of the factor belongs to these kernels.
#
# **Takeaway.** Under split-K, shared memory is the busiest unit. Under split-Q it is the tensor cores, as it should be.

# %% [markdown]
# ## Is there such a cut for the backward pass?
#
# If the warps own rows or columns of a product's result, each finishes its own alone. If they own what the product sums
# over, each has a part, and the parts must be added. In $O = PV$ the queries are rows of the result, and the keys are
# summed over.
#
# **Predict.** The backward pass has five products: $S = QK^\top$, $dP = dO\,V^\top$, $dV = P^\top dO$, $dQ = dS\,K$ and
# $dK = dS^\top Q$ (without $\tau$). Let warps own queries, or let them own keys. Does one of the two avoid all additions?
#
# <details><summary>Answer</summary>
#
# **No.** dV and dK sum over the queries, and dQ over the keys. It is the same for the thread blocks of chapter 06.
# </details>
#
# **Takeaway.** Forward, owning queries avoids additions. Backward, neither queries nor keys avoid them in all five
# products.

# %% [markdown]
# ## Recap
#
# - Split-Q: a warp owns rows of Q, S and O, and reads all of K and V. No results cross.
# - Split-K: a warp owns keys. Maxima cross before the exponentials; sums and parts of $PV$ cross after them and are added.
# - Split-Q reads K and V more often, and moves fewer bytes in all. It has two barriers a tile, split-K three.
# - Backward, every cut leaves something to be added.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A tile has $B_r \times B_c$ scores, head dimension d and W warps. Write the *bytes* that split-Q moves
# through shared memory, in place of the `...`: K and V written once, K and V read by every warp, Q read once, 2 bytes each.
#
# <details><summary>Hint</summary>
#
# K has $B_c d$ elements. How often does each of them pass, written and read?
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return 2 * (2 * B_c * d * (1 + W) + B_r * d)
# ```
# Eight warps instead of four make it 320 KiB instead of 192.
# </details>


# %%
def split_q_bytes(B_r, B_c, d, W):
    return ...


# %% tags=["hide-input"]
if split_q_bytes(128, 64, 128, 4) is ...:
    counted = warps.tile_bytes("split_q", 128, 64, 128, 4)
    print(f"not written yet; for 128 × 64, d = 128 and 4 warps the machine counts {counted:,} bytes (192 KiB)")
else:
    cases = [(128, 64, 128, 4), (128, 64, 128, 8), (64, 32, 16, 2), (64, 32, 16, 1)]
    off = [(case, warps.tile_bytes("split_q", *case)) for case in cases]
    off = [(case, want) for case, want in off if split_q_bytes(*case) != want]
    print("right" if not off else f"not yet: for B_r, B_c, d, W = {off[0][0]} the machine counts {off[0][1]} bytes")

# %% [markdown]
# **2. Complete.** Split-K with one barrier for the exchange: each warp uses its own maximum $m_w$, and the common one is
# known only at the end. By what must a warp's sums be multiplied then? Write it in place of the `...`.
#
# <details><summary>Hint</summary>
#
# It is the α of chapter 02. Every part must look as if the common maximum had been known.
# </details>
# <details><summary>Solution</summary>
#
# `return np.exp(m_w - m)`. The maxima can now travel together with the sums, so one barrier fewer is needed. The parts of
# $PV$ still cross, and they are what costs.
# </details>


# %%
def factor(m_w, m):  # (B_r,), (B_r,): the warp's maximum, the common maximum
    return ...


# %% tags=["hide-input"]
def late_maximum(q, k, v, W):
    m, l, o = [], [], []
    for k_w, v_w in zip(np.split(k, W), np.split(v, W), strict=True):
        s_w = q @ k_w.T / np.sqrt(q.shape[1])
        m.append(s_w.max(axis=1))
        p_w = np.exp(s_w - m[-1][:, None])
        l.append(p_w.sum(axis=1))
        o.append(p_w @ v_w)
    f = [factor(m_w, np.max(m, axis=0)) * np.ones(len(q)) for m_w in m]
    l = sum(f_w * l_w for f_w, l_w in zip(f, l, strict=True))
    return sum(f_w[:, None] * o_w for f_w, o_w in zip(f, o, strict=True)) / l[:, None]


if factor(np.zeros(8), np.zeros(8)) is ...:
    print("not written yet")
else:
    off = np.abs(late_maximum(q, k, v, 4) - dense).max(axis=1)
    print("right" if off.max() < 1e-9 else f"not yet: row {off.argmax()} of o is off by {off.max():.2f}")

# %% [markdown]
# ## Ten questions on part II
#
# Chapters 06 and 07, without looking back. An answer opens when you click it.
#
# <details><summary>1. May thread blocks of one launch wait for each other?</summary>
#
# No. No order is promised, and one of them may not have started yet.
# </details>
# <details><summary>2. Batch 2, 16 heads, 4,096 tokens, row blocks of 128. How many thread blocks does FA2 launch?</summary>
#
# 2 · 16 · 32 = 1,024. FA1 launches 32.
# </details>
# <details><summary>3. How many waves is that on the 108 SMs of an A100, one block on each?</summary>
#
# ⌈1,024 / 108⌉ = 10, and 95% of the SMs' time is used.
# </details>
# <details><summary>4. Row blocks become half as large. What happens to the requests for K and V?</summary>
#
# They double, because there are twice as many row blocks and each loads all of K and V.
# </details>
# <details><summary>5. And what happens to the bytes that cross to DRAM, if K and V of a head fit in L2?</summary>
#
# Nothing. L2 answers the additional requests, and DRAM delivers K and V once as before.
# </details>
# <details><summary>6. Six row blocks under a causal mask cost 1 to 6. Two SMs, heaviest first: when is the last done?</summary>
#
# After 11. One SM takes 6, 3 and 2, the other 5, 4 and 1, which is 10.
# </details>
# <details><summary>7. B_r = 64, d = 64, 4 warps. How many registers of a thread hold o under split-Q, how many under split-K?</summary>
#
# 64 · 64 / (32 · 4) = 32 under split-Q. 128 under split-K, if each warp keeps a whole o.
# </details>
# <details><summary>8. Eight warps and split-Q: how often is each element of K read from shared memory, from HBM, and from DRAM?</summary>
#
# Eight times from shared memory. The thread block requests it from HBM once. From DRAM it comes once for all thread blocks
# of the head, if L2 keeps it.
# </details>
# <details><summary>9. Under split-K, what is published before the exponentials, and what after them?</summary>
#
# Row maxima before; row sums and the parts of $PV$ after.
# </details>
# <details><summary>10. Why has split-K three barriers a tile and not four?</summary>
#
# After the barrier for sums and $PV$ everybody has read K and V. So it also says that the tile is free.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, the package against dense attention, and numbers of the text.

# %% tags=["hide-input"]
rng = np.random.default_rng(2)
for W in (1, 4):
    by_queries, by_keys = (run(q, k, v, one_tile, 0, W).O for run in (warps.split_q, warps.split_k))
    verdict(f"split_q_tile = warps.split_q, warps: {W}", close(split_q_tile(q, k, v, W), by_queries))
    verdict(f"split_k_tile = warps.split_k, warps: {W}", close(split_k_tile(q, k, v, W)[0], by_keys))
q_r, k_r, v_r = (rng.standard_normal((11, 5)), *rng.standard_normal((2, 14, 5)))
tiling = Tiling(11, 14, 4, 6, CAUSAL)
O, _ = fa2.forward(q_r, k_r, v_r, B_r=4, B_c=6, mask=CAUSAL)
seen = np.arange(14) < tiling.interval(np.arange(11))[1][:, None]
want = safe_softmax(np.where(seen, q_r @ k_r.T / np.sqrt(5), -np.inf)) @ v_r
verdict("fa2.forward = dense, ragged, causal", close(O, want))
for name, run in warps.SCHEMES.items():
    rows = np.vstack([run(q_r, k_r, v_r, tiling, i, 3).O for i in range(3)])
    verdict(f"{name} = fa2.forward, ragged, causal, warps: 3", close(rows, O))
    verdict(f"{name}: no barrier may be left out", all(without(run, reason) for reason in waits[name]))
kib = [warps.tile_bytes(name, 128, 64, 128, 4) / 1024 for name in ("split_q", "split_k")]
verdict("192 KiB against 718", [round(x) for x in kib] == [192, 718])
verdict("measured: 6.2 times as fast, the model says 1.8 at most", round(ratio, 1) == 6.2 and round(small.overlapped, 1) == 1.8)
verdict("11 times the passes, twice the bytes", round(passes[0] / passes[1]) == 11 and round(modelled[0] / modelled[1]) == 2)

# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)
