# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)

# %% [markdown]
# # 07 · Warps
#
# **How do the warps of one block share a tile?**
#
# Notebook 06 handed row blocks to thread blocks that never talk. Inside a thread block the same question comes back one
# level down. A thread block has four or eight *warps*, groups of 32 threads that issue their instructions together. They
# sit on one SM and may talk. The question is what it costs them.
#
# After this notebook you can
#
# - cut a tile among warps by queries or by keys, and say for each intermediate result who has to tell whom,
# - count what a tile moves through shared memory, and find the barrier that a wrong kernel has forgotten,
# - decide with two short sums whether a block size fits a chip, and what happens if it does not.
#
# *Time: 35 minutes. Hardware: any laptop, NumPy alone. Before this: [06 · Parallelism](06_parallelism.ipynb).*

# %%
from functools import reduce
from inspect import getsource
from unittest.mock import patch

import numpy as np

from fa2_lab.errata import ERRATA
from fa2_lab.machine import budget, chips, time, warps
from fa2_lab.plots import accumulators, block_budget, swizzled_keys, warp_split
from fa2_lab.plots.records import recorded
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling

# %% [markdown]
# ## Four warps, one tile
#
# A warp keeps its numbers in registers, which no other warp can read. What two warps both need lies in the block's
# *shared memory*: one writes it, all wait at a *barrier*, the others read it.
#
# Take one tile: 8 queries, 8 keys, d = 4, four warps. The first way to share it cuts the queries. Warp w takes two rows
# of Q and goes with them through scores, softmax and P V.
#
# **Predict.** Which numbers of another warp does warp 0 need for its two rows of O? And which inputs must it read whole?

# %%
def split_q_tile(q, k, v, W):  # (B_r, d), (B_c, d), (B_c, d)
    o = []
    for q_w in np.split(q, W):  # (B_r / W, d): the rows of warp w
        s_w = q_w @ k.T / np.sqrt(q.shape[1])  # (B_r / W, B_c)
        o.append(safe_softmax(s_w) @ v)  # (B_r / W, d)
    return np.vstack(o)  # put on top of each other: nothing is added


q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4))
dense = safe_softmax(q @ k.T / 2) @ v
print("queries split among 4 warps:", close(split_q_tile(q, k, v, 4), dense))

# %% [markdown]
# <details><summary>What warp 0 needs from the others</summary>
#
# Nothing. Softmax works row by row, and every row belongs to one warp from the score to the output. Of Q it reads its own
# two rows; of K and V it reads everything, and so does each of the others.
# </details>
#
# **Takeaway.** Cut by queries (*split-Q*), each warp is a small notebook 04 of its own.

# %% [markdown]
# ## The other way: cut the keys
#
# FA1 cuts the keys: warp w takes two of them, with all queries. The paper calls it *split-K*. A popular write-up explains
# the name as a cut through the contraction dimension of Q Kᵀ, whose partial scores must be summed before the softmax.
#
# **Predict.** Warp w has scores for two keys. To get S from the four slices, do you add them, or put them side by side?

# %%
slices = [q @ k_w.T / 2 for k_w in np.split(k, 4)]  # each (8, 2)
S = q @ k.T / 2
print("shape of a slice:", slices[0].shape, " shape of S:", S.shape)
print("side by side:", close(np.hstack(slices), S))
print("added up:", close(sum(slices), S))
slip = ERRATA["article-split-K"]
print("by the errata's own check:", slip.check(slip.right()), "and", slip.check(slip.wrong()))

# %% [markdown]
# <details><summary>Where the confusion comes from</summary>
#
# In matrix-product libraries "split-K" does mean the contraction dimension, which they call K in C(M, N) = A(M, K) B(K, N).
# Here it means the keys. In Q Kᵀ the contraction runs over d, and keys are columns of the result. In P V the contraction
# runs over keys, and there, one product later, the parts do have to be added.
# </details>
#
# **Takeaway.** Split-K splits the keys; the slices of S are finished scores, and stand side by side.

# %% [markdown]
# ## What must cross from warp to warp?
#
# So each warp has all rows of S, and of each row a quarter. Now follow the softmax: maximum, exponentials, sum, P V.
#
# **Predict.** Three of these results need numbers from all four warps. Which, and how many numbers does a warp have to
# publish for each?

# %%
def split_k_tile(q, k, v, W):
    s = [q @ k_w.T / np.sqrt(q.shape[1]) for k_w in np.split(k, W)]  # W times (B_r, B_c / W)
    maxima = [s_w.max(axis=1) for s_w in s]
    m = np.max(maxima, axis=0)  # all warps wait for all maxima
    p = [np.exp(s_w - m[:, None]) for s_w in s]
    sums = [p_w.sum(axis=1) for p_w in p]
    blocks = [p_w @ v_w for p_w, v_w in zip(p, np.split(v, W), strict=True)]  # W times (B_r, d)
    o = sum(blocks) / sum(sums)[:, None]  # all warps wait for all sums and blocks
    return o, {"maxima": maxima, "sums": sums, "blocks of P V": blocks}


o, published = split_k_tile(q, k, v, 4)
print("keys split among 4 warps:", close(o, dense))
for name, of_warps in published.items():
    print(f"{name}: {len(of_warps)} warps publish {of_warps[0].size} numbers each")

# %% [markdown]
# <details><summary>Which one hurts?</summary>
#
# The P_w V_w. Each is a whole block of B_r × d, as large as the output itself, and there are W of them, for every tile.
# Maximum and sum are small, but the maximum makes all warps wait in the middle of the softmax.
# </details>
#
# **Takeaway.** Split-K costs two meetings per tile and W partial blocks of O; split-Q costs neither.

# %% [markdown]
# ## Could the warps merge once, at the end?
#
# Notebook 02 offers a way out. A warp could keep a state of its own (m, l, o) for its keys, through all tiles, and the
# four could merge after the last one. Then partial results cross once per row block, not once per tile.
#
# **Predict.** The result is right, as the first line of output says. What stands against it? Put numbers in: `o` of one
# warp's state is B_r × d, a warp has 32 threads, and a thread has at most 255 registers.

# %%
def merge_at_the_end(q, k, v, W, B_c):
    states = [SoftmaxState.reset(*q.shape) for _ in range(W)]
    for j in range(0, len(k), B_c):
        for w, share in enumerate(np.split(np.arange(j, j + B_c), W)):
            states[w] = states[w].update(q @ k[share].T / np.sqrt(q.shape[1]), v[share])
    return reduce(SoftmaxState.merge, states).finalize()[0]


print("merged once, at the end:", close(merge_at_the_end(q, k, v, W=2, B_c=4), dense))
for B_r, d in ((16, 64), (64, 64), (128, 64), (128, 128)):
    whole, rows = B_r * d // 32, B_r * d // (32 * 4)
    print(f"o of {B_r:3} × {d:3}: registers per thread, split-K {whole:3}, split-Q with 4 warps {rows:3}")

# %% [markdown]
# <details><summary>What stands against it, and what FA1 did</summary>
#
# Under split-K every warp holds a block of full size. At 128 × 128 that is 512 registers a thread, twice what there is;
# at 128 × 64 it is 256, and nothing is left for the scores. The published FA1 kernel lived with small blocks: its template
# arguments are 256 keys, d = 64, 16 rows, one warp along the rows and four along the keys. And with FA1's loop order the
# output leaves for HBM after every tile, so there is no end to wait for.
# </details>
#
# **Takeaway.** Split-K multiplies the output by the number of warps, in registers or in shared memory; split-Q divides it.

# %% [markdown]
# ## Counting by hand what passes through shared memory
#
# `fa2_lab.machine.warps` runs a thread block warp by warp on a shared memory that counts. Q, K and V are copied in; a
# warp then reads what its products need into registers.
#
# **Predict.** For our tile (8 × 8, d = 4, four warps): how many elements of Q, K and V does one warp read under split-Q,
# and under split-K? What does it write? The first cell shows the block that runs.

# %%
print(getsource(warps.split_q))

# %%
one_tile = Tiling(N_q=8, N_k=8, B_r=8, B_c=8)
for name, scheme in warps.SCHEMES.items():
    run = scheme(q, k, v, one_tile, i=0, W=4)
    shared = run.shared
    reads = {tensor: shared.elements("read", 2, tensor) for tensor in warps.BYTES}
    writes = {tensor: shared.elements("write", 2, tensor) for tensor in warps.BYTES}
    print(f"{name}, same O: {close(run.O, dense)}, barriers: {shared.barriers}")
    print("  warp 2 reads ", {t: n for t, n in reads.items() if n})
    print("  warp 2 writes", {t: n for t, n in writes.items() if n})

# %% [markdown]
# <details><summary>The numbers</summary>
#
# Split-Q: two rows of Q (8), all of K and V (32 each), nothing written. Split-K: all of Q (32), two keys and two values (8
# each); it writes 8 maxima, 8 sums and 32 numbers of P V, then reads the maxima of all four warps for all rows (32), and
# for its share of two rows the sums (8) and the four partial blocks (32).
# </details>
#
# **Takeaway.** Split-Q reads K and V once per warp and writes nothing; split-K reads Q once per warp, and writes its
# partial results besides.

# %% [markdown]
# ## At the size of a real tile
#
# 128 × 128, d = 64, four warps; Q, K and V with 2 bytes an element, maxima, sums and partial blocks with 4. This is the
# paper's figure 3 (warps counted from 1, as there) with the bytes of one tile beneath.
#
# **Predict.** Split-Q reads K and V four times instead of once. Does it move more bytes than split-K, or fewer?

# %%
B_r, B_c, d, W = 128, 128, 64, 4
moved, waits = {}, {}
for name, scheme in warps.SCHEMES.items():
    per_tile = warps.tile_accesses(name, B_r, B_c, d, W)
    moved[name] = {(op, tensor): n * warps.BYTES[tensor] for (op, tensor), n in per_tile.items()}
    waits[name] = dict(scheme(q, k, v, one_tile, i=0, W=4).shared.waits)  # of one tile
show(warp_split.draw(B_r, B_c, d, W, moved, waits))

# %% [markdown]
# A popular write-up adds a price: every warp now needs the whole tile of K and V, so shared memory fills up and tiles must
# shrink. The blocks above can be asked what they keep.

# %%
for name, scheme in warps.SCHEMES.items():
    arrays = scheme(q, k, v, one_tile, i=0, W=4).shared.arrays
    kept = {tensor: array.size for tensor, array in arrays.items()}
    print(f"{name} keeps {sum(kept.values()):3} elements: {kept}")
slip = ERRATA["article-smem"]
print("the write-up's count is right:", slip.check(slip.wrong()))
print("one copy of K and V under either scheme is right:", slip.check(slip.right()))

# %% [markdown]
# <details><summary>What does grow under split-Q?</summary>
#
# Reading. A tile of K and V lies in shared memory once, under either scheme, but each warp reads all of it. With eight warps
# instead of four it is read eight times: exercise 1.
# </details>
#
# **Takeaway.** Reading shared inputs more often is cheaper than exchanging partial outputs: 176 KiB against 398 here.

# %% [markdown]
# ## Leave a barrier out
#
# The counting memory also watches: if a warp reads what another has written, or overwrites what another has read, and no
# barrier lies between, it stops with a `RaceError`. On a GPU nothing stops. The result is right on most days.
#
# The paper says of split-Q that warps need not communicate. That is so for their results. But K and V are copied in by one
# and read by all, and the next tile comes to the same place.
#
# **Predict.** Split-Q has two barriers per tile, "the tile is there" and "the tile is free". Two tiles, one of the barriers
# left out each time: who gets in whose way?

# %%
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


for name, scheme in warps.SCHEMES.items():
    for reason in waits[name]:
        print(f"{name} without {reason!r}:\n    {without(scheme, reason)}")

# %% [markdown]
# <details><summary>Who gets in whose way, and can one do better than two?</summary>
#
# Without the first barrier a warp reads what the copy may still be writing. Without the second, the copy of the next tile
# overwrites keys that a slow warp has yet to read.
#
# With two places for tiles, the copy of the next tile goes to the other place while this one is in use. Real kernels
# do that (the `stages` below). It makes waiting rare. It does not make the barriers unnecessary.
# </details>
#
# **Takeaway.** Every barrier guards one written-then-read or read-then-overwritten place; name that place and you know
# whether the barrier is needed.

# %% [markdown]
# ## And the backward pass?
#
# It has five products. A warp that owns queries (r) or keys (k) can finish a product alone if its letter appears in the
# result. If it is summed over, the warps hold parts that must be added.
#
# **Predict.** Which cut spares all additions in the forward pass? Is there one in the backward pass?

# %%
FORWARD = {"S = Q Kᵀ": "rd,kd->rk", "O = P V": "rk,kd->rd"}
BACKWARD = {"S = Q Kᵀ": "rd,kd->rk", "dP = dO Vᵀ": "rd,kd->rk", "dV = Pᵀ dO": "rk,rd->kd"}
BACKWARD |= {"dQ = dS K": "rk,kd->rd", "dK = dSᵀ Q": "rk,rd->kd"}


def fate(product, owner):
    return "its own" if owner in product.split("->")[1] else "to be added"


for direction, products in (("forward", FORWARD), ("backward", BACKWARD)):
    print(f"{direction:12} warps own queries   warps own keys")
    for name, product in products.items():
        print(f"  {name:10} {fate(product, 'r'):17}   {fate(product, 'k')}")

# %% [markdown]
# Forward, owning queries spares everything: that is split-Q. Backward, no cut does: queries leave dV and dK to be added,
# keys leave dQ. The FA2 paper says as much ("still requires some synchronization"), and you have met the same table once
# before: in notebook 06 it was thread blocks that met on dQ.
#
# **Takeaway.** What is summed over cannot be owned. Forward there is a cut without meetings, backward there is none.

# %% [markdown]
# ## Inside a warp
#
# A row of S is in one warp, but in which of its 32 threads? On an A100 a tensor core leaves a 16 × 8 piece of the result
# spread like this: row r, column c in thread 4 (r mod 8) + c // 2. So a row has four owners, and its maximum needs the
# four to talk. Threads of one warp can: a *shuffle* reads a register of another thread. No shared memory, no barrier.
#
# **Predict.** Each of the four knows the maximum of its own columns. How many shuffles until all four know the row's?

# %%
r, c = np.mgrid[:16, :8]
thread = 4 * (r % 8) + c // 2
print("threads that hold rows 0, 1 and 8:", *(sorted(set(thread[row].tolist())) for row in (0, 1, 8)))
piece = np.random.default_rng(1).standard_normal((16, 8))
mine = np.array([piece[:8][thread[:8] == t].max() for t in range(32)])  # for the upper 8 rows
for step in (1, 2):
    mine = np.maximum(mine, mine[np.arange(32) ^ step])  # read the register of thread t ^ step
    agreed = [len(set(mine[4 * row : 4 * row + 4])) == 1 for row in range(8)]
    print(f"after shuffling with thread t ^ {step}: all four agree in every row: {all(agreed)}")
print("and it is the row's maximum:", np.array_equal(mine.reshape(8, 4)[:, 0], piece[:8].max(axis=1)))

# %% [markdown]
# Two, whatever the number of columns: first a thread goes through the columns it holds, then it asks two neighbours. The
# H100's instruction for four warps leaves the same pattern, with 16 rows for each of them. This is how NVIDIA describes
# its instructions (*schematic*). What the compiler really chose is read from our own forward kernel (*observed*).
#
# **Predict.** `warpsPerCTA = [4, 1]` stands in a compiled kernel for four warps along the rows, `[1, 4]` for four along
# the keys. Which of the two do you expect?

# %% tags=["nbval-ignore-output"]
for layout in recorded("layouts")["layouts"]:
    along_rows, along_keys = layout["warpsPerCTA"]
    name = "split-Q" if along_keys == 1 else "split-K" if along_rows == 1 else "both"
    print(f"{layout['target']}, d = {layout['d']}, {layout['instruction']}:", end=" ")
    print(f"{along_rows} warps along rows, {along_keys} along keys: {name}")

# %% tags=["nbval-ignore-output"]
show(accumulators.draw(**accumulators.data()))

# %% [markdown]
# <details><summary>How to read the picture</summary>
#
# Above, whole tiles: every row of S, and of O beside it, lies in one warp, on both chips. The frame is what one
# instruction delivers. Below, the first corner of S: which lane (thread of the warp) holds an entry, and in which of its
# registers. Row 5 sits in lanes 20 to 23, the four of the formula above.
# </details>
#
# **Takeaway.** Under split-Q a row's statistics never leave its warp: four threads hold the row, two shuffles apart.

# %% [markdown]
# ## Why is K scrambled in shared memory?
#
# Shared memory has 32 banks of 4 bytes and serves each bank once per step. A tensor core reads eight rows of K at a time,
# 16 bytes of each. With d = 64 a row of 16-bit numbers is 128 bytes long: exactly once around all banks.
#
# **Predict.** Take the same 16 bytes of eight rows, chunk 2 in the picture. Stored row under row, in how many different
# groups of four banks do they lie?

# %% tags=["nbval-ignore-output"]
show(swizzled_keys.draw(**swizzled_keys.data()))

# %% [markdown]
# <details><summary>The answer, and the remedy</summary>
#
# In one: every row starts at the same bank, and the read takes eight steps. So row r keeps its chunk c at place
# c XOR (r mod 8). Every row is still whole, each chunk sits elsewhere in each of eight rows, and the eight reads meet
# eight groups of banks. The copies into shared memory and the tensor cores both know this order; nobody else has to.
# </details>
#
# **Takeaway.** A layout is free to choose as long as writer and reader agree, and the banks decide which one is fast.

# %% [markdown]
# ## How large may a block be?
#
# Two budgets decide. Shared memory holds q_i once, and k_j and v_j once per *stage* (tiles in flight). Registers hold o_i
# and s_ij in fp32, p_ij once more in 16 bits, and some 40 for the rest. A chip refuses a kernel that wants more shared
# memory than there is. If registers run out, it runs, and *spills*: numbers travel to slow memory and back.
#
# **Predict.** d = 128, 128 × 128, two stages, four warps. How many KiB? How many registers for each of 128 threads?

# %%
def shared_bytes(B_r, B_c, d, stages=2):
    return 2 * (B_r * d + stages * 2 * B_c * d)


def registers(B_r, B_c, d, W):
    return 40 + -(-(B_r * d + B_r * B_c + B_r * B_c // 2) // (32 * W))


for chip in (chips.RTX_4090, chips.A100, chips.H100):
    KiB, of_block = chip.shared_per_sm // 1024, chip.shared_per_block // 1024
    print(f"{chip.name}: an SM has {KiB} KiB, one block can have {of_block}")
print("B_r × B_c   shared   registers: 4 warps  8 warps      (d = 128, two stages)")
for B_r, B_c in ((64, 64), (128, 64), (64, 128), (128, 128)):
    KiB = shared_bytes(B_r, B_c, 128) // 1024
    four, eight = registers(B_r, B_c, 128, W=4), registers(B_r, B_c, 128, W=8)
    print(f"{B_r:3} × {B_c:3}  {KiB:4} KiB {four:18} {eight:8}")

# %% [markdown]
# <details><summary>Reading the table</summary>
#
# 128 × 128 wants 32 + 2 · 64 = 160 KiB: an A100 gives a block 163 and an H100 227, an RTX 4090 only 99. (Of the 228 KiB of
# an H100's SM, 1 is reserved for each block; a popular write-up has 228.) With four warps it would take 360 registers of
# 255; eight warps split the rows once more and bring it down to 200. Small blocks have another use for the room: two of
# 64 × 64 fit on one SM of an A100 at a time, and while one waits the other works.
# </details>
#
# The same two sums over all powers of two from 32 to 256. The paper's author chose among {64, 128} × {64, 128} by hand,
# "essentially only 4 choices".

# %% tags=["nbval-ignore-output"]
show(block_budget.draw(**block_budget.data()))

# %% [markdown]
# The sums are a model: `budget.py` was held against 96 compiled kernels and agrees with the compiler in 84 on whether they
# spill. Where a compilation is recorded, the picture shows it.
#
# **Takeaway.** Shared memory says whether a block size runs at all, registers whether it runs well; more warps help with
# the second and not with the first.

# %% [markdown]
# ## What is it worth?
#
# Larger blocks move fewer bytes per score, and split-Q fewer than split-K. Whether that saves time depends on who is the
# bottleneck. `machine/time.py` counts the clocks for which one tile keeps each unit of an SM busy.
#
# **Predict.** An A100, 128 × 64, d = 128, four warps. Which unit is busiest under split-K, and which under split-Q?

# %%
print("bytes through shared memory for each score:")
for B_r, B_c in ((64, 64), (128, 64), (128, 128)):
    by_k, by_q = (warps.tile_bytes(name, B_r, B_c, 128, W=4) for name in ("split_k", "split_q"))
    print(f"{B_r:5} × {B_c:3}: split-K {by_k / (B_r * B_c):.0f}, split-Q {by_q / (B_r * B_c):.0f}")
change = time.split(chips.A100, 128, 64, 128)
print("clocks of a tile of 128 × 64:")
for name, tile in (("split-K", change.before), ("split-Q", change.after)):
    units = f"tensor {tile.tensor:.0f}, exp {tile.exp:.0f}, fp32 {tile.fp32:.0f}, shared {tile.shared:.0f}"
    print(f"  {name}: {units}; busiest: {tile.busiest}")
print(f"times faster: {change.overlapped:.1f} if all units overlap, {change.serial:.1f} if none do")

# %% [markdown]
# <details><summary>What the model says, and what it does not</summary>
#
# Under split-K the tensor cores wait for shared memory; under split-Q shared memory keeps up with them. The factor is what
# the traffic alone would explain for this tile. It is not FA2's speed-up over FA1: FA1's own kernel used other tiles, and
# time spent waiting at barriers is not in the model. Notebook 10 measures.
# </details>
#
# **Takeaway.** FA2's third change (after the arithmetic and the parallelism) moves the bottleneck from shared memory back
# to the tensor cores.

# %% [markdown]
# ## Recap
#
# - Split-Q: a warp owns rows of Q, S and O, reads all of K and V, and tells nobody anything.
# - Split-K: a warp owns keys; S is cut side by side, row maxima and row sums cross, and W blocks of P V are added.
# - Both keep a tile of K and V in shared memory once. Split-Q reads it more often, and moves fewer bytes in all.
# - Two barriers remain: the tile is there, the tile is free.
# - Backward, every cut leaves something to be added.
# - Shared memory: (B_r + 2 · stages · B_c) · d elements. Registers: about (B_r · d + 1.5 · B_r · B_c) / threads + 40.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** Eight warps instead of four, 128 × 64, d = 128, split-Q. Do the bytes through shared memory per tile
# double? And what if B_r doubles as well?
#
# <details><summary>Hint</summary>
# Of the four terms (K and V written, K and V read by every warp, Q read), which depend on W?
# </details>
# <details><summary>Answer</summary>
#
# From 192 KiB to 320: only the reading of K and V doubles. With B_r = 256 Q adds 32 KiB more, 352 in all for twice the
# scores, so per score it is less than before. More warps want more rows.
# </details>
#
# **2. Complete.** Split-K with *different* maxima: each warp uses its own m_w instead of waiting for the common one. What
# must the sums be multiplied by? Replace the 1.

# %%
def late_maximum(q, k, v, W):
    m, l, o = [], [], []
    for k_w, v_w in zip(np.split(k, W), np.split(v, W), strict=True):
        s_w = q @ k_w.T / np.sqrt(q.shape[1])
        m.append(s_w.max(axis=1))
        p_w = np.exp(s_w - m[-1][:, None])
        l.append(p_w.sum(axis=1))
        o.append(p_w @ v_w)
    factor = [1 for m_w in m]  # replace the 1
    l = sum(f * l_w for f, l_w in zip(factor, l, strict=True))
    return sum(np.reshape(f, (-1, 1)) * o_w for f, o_w in zip(factor, o, strict=True)) / l[:, None]


print("right?", close(late_maximum(q, k, v, 4), dense))

# %% [markdown]
# <details><summary>Hint</summary>
# It is the α of notebook 02: every part must look as if the common maximum had been known.
# </details>
# <details><summary>Answer</summary>
#
# `np.exp(m_w - np.max(m, axis=0))`. Now one meeting is enough, since the maxima can travel with the sums. The blocks of
# P V still cross, and they were the expensive part.
# </details>
#
# **3. Break and fix.** Here every warp adds its part straight into one common block, so that the W partial blocks need no
# place of their own. Before you run it: is a barrier enough to make this right?

# %%
shared = warps.SharedMemory(O=(8, 4))
shared.write(0, "O", ..., np.zeros((8, 4)))
shared.barrier("zeros are there")
try:
    for w in range(4):
        old = shared.read(w, "O")  # every warp takes the block, adds its part, puts it back
        shared.write(w, "O", ..., old + 1.0)
except warps.RaceError as race:
    print("RaceError:", race)

# %% [markdown]
# <details><summary>Hint</summary>
# Where would the barrier stand, so that two warps never hold the same old block?
# </details>
# <details><summary>Answer</summary>
#
# One barrier is not enough: between a warp's reading and its writing no other may read. It takes a barrier after every
# warp's turn, W of them, and the warps add one after the other. Or atomic adds in shared memory. That is the race on dQ
# of notebooks 05 and 06, one level further in.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against dense attention: ragged blocks, a
# causal mask, huge scores, odd numbers of warps.

# %%
for W in (1, 2, 4):
    by_queries, by_keys = (run(q, k, v, one_tile, 0, W).O for run in (warps.split_q, warps.split_k))
    verdict(f"split_q_tile = warps.split_q, warps: {W}", close(split_q_tile(q, k, v, W), by_queries))
    verdict(f"split_k_tile = warps.split_k, warps: {W}", close(split_k_tile(q, k, v, W)[0], by_keys))

# %%
rng = np.random.default_rng(2)
for mask, size in ((NO_MASK, 1.0), (CAUSAL, 1.0), (CAUSAL, 1e4)):
    q_r, k_r, v_r = (size * rng.standard_normal((11, 5)), *rng.standard_normal((2, 14, 5)))
    tiling = Tiling(11, 14, 4, 6, mask)
    O, _ = fa2.forward(q_r, k_r, v_r, B_r=4, B_c=6, mask=mask)
    seen = tiling.keys_seen(np.arange(11))[:, None] > np.arange(14)
    want = safe_softmax(np.where(seen, q_r @ k_r.T / np.sqrt(5), -np.inf)) @ v_r
    name = "causal" if mask.causal else "all keys"
    verdict(f"fa2.forward = dense, ragged, {name}, scores of size {size:g}", close(O, want))
    for W in (1, 3):
        for run in (warps.split_q, warps.split_k):
            rows = np.vstack([run(q_r, k_r, v_r, tiling, i, W).O for i in range(3)])
            verdict(f"{run.__name__} = fa2.forward, {name}, size {size:g}, warps: {W}", close(rows, O))

# %%
for name, scheme in warps.SCHEMES.items():
    form = warps.tile_accesses(name, 12, 4, 5, 3)
    counts = scheme(*rng.standard_normal((3, 12, 5)), Tiling(12, 12, 12, 4), 0, 3).shared.counts
    counted = {kind: sum(n for (_, *of), n in counts.items() if tuple(of) == kind) for kind in form}
    three_times = {kind: 3 * n for kind, n in form.items()}
    verdict(f"{name}: three tiles move three times the closed form", counted == three_times)
    verdict(f"{name}: no barrier may be left out", all(without(scheme, reason) for reason in waits[name]))
sizes = [(b, c, d, W) for b in (64, 128) for c in (64, 128) for d in (64, 128) for W in (4, 8)]
theirs = [(budget.forward_shared_bytes(*s[:3]), budget.forward_registers(*s)) for s in sizes]
ours = [(shared_bytes(*s[:3]), registers(*s)) for s in sizes]
verdict("shared_bytes and registers = those of budget.py", ours == theirs)
two = budget.fits(chips.A100, 64, 64, 128, stages=2, warps=4).blocks_per_sm == 2
verdict("two blocks of 64 × 64, d = 128, share an SM of an A100", two)

# %%
def cut(x, term, owner):
    return np.split(x, 2, axis=term.index(owner)) if owner in term else [x, x]


length = dict(r=6, k=8, d=4)
for name, product in (FORWARD | BACKWARD).items():
    inputs, result = product.split("->")
    first, second = inputs.split(",")
    a, b = (rng.standard_normal([length[letter] for letter in term]) for term in (first, second))
    for owner in "rk":
        halves = zip(cut(a, first, owner), cut(b, second, owner), strict=True)
        parts = [np.einsum(product, *half) for half in halves]
        if fate(product, owner) == "to be added":
            joined = sum(parts)
        else:
            joined = np.concatenate(parts, axis=result.index(owner))
        verdict(f"{name}, cut by {owner}: {fate(product, owner)}", close(joined, np.einsum(product, a, b)))

# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)
