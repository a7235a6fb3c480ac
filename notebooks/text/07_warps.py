# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)

# %% [markdown]
# # 07 · Warps
#
# **How do the warps of one block share a tile?**
#
# In chapter 06, each row block got its own thread block, and thread blocks exchange nothing. But a thread block itself
# consists of several *warps*, which share its work. A warp is a group of 32 threads that execute their instructions
# together, and a thread block often has four or eight warps. All warps of a thread block run on the same SM, so they
# can exchange results. The FlashAttention kernel of 2022 makes them do so in every tile, whereas FA2 avoids this
# exchange.
#
# After this notebook you can
#
# - divide a tile among warps by queries or by keys, and name the results that the warps then have to exchange,
# - count the bytes that a tile moves through shared memory,
# - explain what each barrier protects.
#
# *Time: 40 minutes with the questions and the function. Hardware: any laptop with NumPy. Before this: [06 ·
# Parallelism](06_parallelism.ipynb). [Appendix A](A_lanes.ipynb) explains how threads hold the elements of a tile, and
# how large a tile can be.*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np

from fa2_lab.machine import chips, time_model, warps
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference.naive import safe_softmax
from fa2_studio.book.build import Case, check

# %% [markdown]
# ## Four warps, one tile: cut the keys
#
# A warp computes with values in its registers, which no other warp can read. However, all warps of a thread block can
# read and write the block's shared memory. If other warps need a result, a warp *publishes* it, which means that it
# writes the result to shared memory. Then every warp waits until all of them have written their results. Such a waiting
# point is called a *barrier*.
#
# Take one tile with 8 queries, 8 keys and d = 4, and four warps. An obvious way to share the tile is to give each warp
# all of the queries, but only some of the keys, in this case two. Each key and each value is then read by only one
# warp. This is what the FlashAttention kernel of 2022 did, and the FA2 paper calls it *split-K*, where K means the
# keys. Chapter 06's split-KV is the same idea, but it divides the keys among thread blocks.
#
# The drawback is that a warp has only two of the eight columns of S, which is not enough for a softmax. Each warp needs
# the maxima of the other warps before it can compute exponentials. Afterwards, the sums and the partial results of $PV$
# have to be added:

# %%
def split_k_tile(q, k, v, W):  # (B_r, d), (B_c, d), (B_c, d)
    shares = np.split(k, W)
    s = [q @ k_w.T / np.sqrt(q.shape[1]) for k_w in shares]  # W times (B_r, B_c / W)
    maxima = [s_w.max(axis=1) for s_w in s]
    m = np.max(maxima, axis=0)  # barrier for the maxima: all warps wait
    p = [np.exp(s_w - m[:, None]) for s_w in s]
    sums = [p_w.sum(axis=1) for p_w in p]
    values = np.split(v, W)
    parts = [p_w @ v_w for p_w, v_w in zip(p, values, strict=True)]  # W times (B_r, d)
    o = sum(parts) / sum(sums)[:, None]  # barrier for sums and PV: they are added
    return o, {"maxima": maxima, "sums": sums, "parts of P V": parts}


q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4))
dense = safe_softmax(q @ k.T / 2) @ v
o, published = split_k_tile(q, k, v, 4)
print(f"error of o: {np.abs(o - dense).max():.3f}")
for name, of_warps in published.items():
    print(f"{name:12}: {len(of_warps)} warps publish {of_warps[0].size} numbers each")

# %% tags=["hide-input"]
crossing = sum(x.size for of_warps in published.values() for x in of_warps)
print(f"numbers that cross from warp to warp: {crossing}; scores of the tile: {len(q) * len(k)}")
row = next(row for row in load("ladder").rows if "s00_split_keys" in row.values)
slow, fast = row.values["s00_split_keys"][0], row.values["s01_split_queries"][0]
print(f"two kernels on an H200: keys cut {slow:.1f} ms, queries cut {fast:.1f} ms, "
      f"{slow / fast:.1f} times as fast")

# %% [markdown]
# The result is right, but the warps publish three numbers for each score of the tile, and most of these belong to $PV$.
# Each tile has W partial results of $PV$, one from each of its W warps, and each of them is as large as the tile's
# whole output. The two small kernels s00 and s01 show what this exchange can cost, because they differ only in how they
# divide the tile. A later section gives their sizes.
#
# ## The other way: cut the queries
#
# Now give each warp two rows of Q instead, and let it read all of K and V:

# %%
def split_q_tile(q, k, v, W):
    o = []
    for q_w in np.split(q, W):  # (B_r / W, d): the rows of warp w
        s_w = q_w @ k.T / np.sqrt(q.shape[1])  # (B_r / W, B_c)
        o.append(safe_softmax(s_w) @ v)  # (B_r / W, d)
    return np.vstack(o)  # stacked on top of each other, so nothing is added


print(f"error of o: {np.abs(split_q_tile(q, k, v, 4) - dense).max():.3f}")

# %% [markdown]
# Softmax works row by row, and each row belongs to the same warp throughout, so the warps exchange no results. FA2
# divides its tiles this way, and the paper calls this method *split-Q*.
#
# ## Can split-K manage with a single exchange?
#
# Maxima and sums are small, but the exchange of maxima makes all warps wait in the middle of the softmax. You can avoid
# that barrier if each warp uses the maximum over its own keys, $m_w$. The warp publishes this maximum together with its
# sums $\ell_w$ and its undivided partial result $o_w$, and a single exchange combines them.
#
# **Build.** `m`, `l` and `o` have one entry per warp. They hold the warps' maxima, sums and partial results, all
# computed with each warp's own maxima. Return the finished rows, as if this tile held all keys. A row that sees no key
# gets zeros. If a row sees none of a warp's keys, the warp publishes $m_w = -\infty$, $\ell_w = 0$ and $o_w = 0$ for
# that row.

# %%
def exchange(m, l, o):  # (W, B_r), (W, B_r), (W, B_r, d)
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
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
    "all maxima are equal. Are the sums added, and is o divided by them?":
        (same, safe_softmax(same) @ v),
    "maxima differ. By what factor must a warp's part shrink?": (S, dense),
    "scores near 1000. Is there an e^m, which overflows?": (1e3 * S, safe_softmax(1e3 * S) @ v),
    "two warps see no key of row 2. Do they leave the others alone?":
        (hidden, safe_softmax(hidden) @ v),
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
# This function is the merge of chapter 02. The warps still have to exchange the partial results of $PV$.
# </details>
#
# [Assignment 6](assignments/6_read_the_machine.ipynb) goes further. There, you compute what fits into shared memory and
# registers.

# %% [markdown]
# ## Count what passes through shared memory
#
# Q, K and V are copied from HBM into shared memory, from which each warp reads what it needs. Q is written to shared
# memory only once for the whole row block, so for each tile we count only the reads of Q. We assume that Q is read
# again for each tile, because a warp's registers have no room for its rows of Q beside o. Take a tile of 128 × 64 with
# d = 128. Elements of Q, K and V take 2 bytes each, and the maxima, the sums and the elements of $PV$ take 4.
#
# **Predict.** With four warps, split-Q reads K and V four times instead of once. How many bytes does it move in total?
#
# - ☐ more than split-K, almost four times as many
# - ☐ fewer than split-K
# - ☐ about as many as split-K
#
# <details><summary>Answer</summary>
#
# **fewer than split-K.** It moves about a quarter as many bytes, as the table shows. A block of K or V takes 64 · 128 ·
# 2 bytes, or 16 KiB, and Q takes 32 KiB. Each warp's partial result of $PV$ has 128 × 128 four-byte values, or 64 KiB.
# The maxima of 128 rows in four warps take 4 · 128 · 4 bytes, or 2 KiB, and so do the sums. Every warp needs all maxima
# for its exponentials, whereas each row's sums are added by only one warp.
#
# | KiB per tile, four warps | split-K | split-Q |
# | --- | ---: | ---: |
# | K and V are each written once | 2 · 16 | 2 · 16 |
# | each part of K and V is read by one warp, or by all four | 2 · 16 | 4 · 2 · 16 |
# | each row of Q is read by all four warps, or by one | 4 · 32 | 32 |
# | four partial results of $PV$ are written and read | 2 · 4 · 64 | |
# | maxima are written (2) and read by all four warps (8), sums are written and read (4) | 14 | |
# | in total | 718 | 192 |
#
# Split-K thus moves 3.7 times as many bytes as split-Q. For the tile of chapter 00, 128 × 128 with d = 64, the factor
# is 2.3.
# </details>
#
# The picture below corresponds to figure 3 of the FA2 paper:

# %% tags=["hide-input"]
show("warp_split")

# %% [markdown]
# ## Could split-K merge once, at the end?
#
# Each warp could keep its own state $(m, \ell, o)$ through all tiles, so that `exchange` runs only once, after the last
# tile. The bytes that cross shared memory would then hardly matter, but where would the warps keep their states?
#
# The function `split_k_tile` computes a warp's partial result for all rows at once. A real kernel that exchanges in
# every tile can do this for a few rows at a time, publish them, and reuse the registers for the next rows. A state that
# is kept through the loop, however, needs registers for all 128 rows at once. A register holds one fp32 value, so an
# $o$ of 128 × 128 takes 128 · 128 / 32 = 512 registers in each of a warp's 32 threads. But a thread has at most 255
# registers. Under split-Q, the four warps share the rows, so each thread needs only 128 registers for $o$.

# %% [markdown]
# ## What do the barriers protect?
#
# No warp passes a barrier before all warps of the thread block have reached it. Barriers are needed for two reasons.
# What one warp (or a copy) writes must not be read too early, and what a warp still reads must not be overwritten too
# early. Although split-Q exchanges no results, its warps share the blocks of K and V, so even split-Q needs two
# barriers per tile. The following table shows the order of events in one tile, from top to bottom:
#
# | | split-Q | split-K as listed | split-K with `exchange` |
# | --- | --- | --- | --- |
# | **barrier** | the tile is there | the tile is there | the tile is there |
# | each warp | reads all of K and V | reads its keys, publishes its maxima | reads its keys and values, publishes its maxima, sums and part of $PV$ |
# | **barrier** | | the maxima are there | |
# | each warp | | reads all maxima and its values, publishes its sums and part of $PV$ | |
# | **barrier** | the tile is free | the sums and parts are there | the maxima, sums and parts are there |
# | each warp | | reads all sums and parts | reads all maxima, sums and parts |
# | **barrier** of the next tile | the tile is there | the tile is there | the tile is there |
#
# The barrier "the tile is there" waits for the copy of K and V as well as for all warps. Now we can check that nothing
# is overwritten too early:
#
# - **K and V** are overwritten by the next tile's copy, which may start after the last barrier of this tile. Before
#   this barrier, every warp has read its keys and values. Split-Q needs a barrier only for this purpose, "the tile is
#   free". In split-K, the barrier for the sums and parts does this job as well.
# - **The sums and parts** are published again in the next tile, after its barrier "the tile is there". A warp reaches
#   that barrier only after it has read the old ones.
# - **The maxima** are published again only after the same barrier, so this tile's maxima have been read by then.
#
# Split-K thus has three barriers per tile as listed, and two with `exchange`. If a barrier is missing, the GPU computes
# with whatever is in memory at that moment, and reports no error.
#
# **Predict.** All keys fit in one tile. Which barrier can split-Q omit in this case, and which one can split-K omit?
#
# - ☐ split-Q can omit its second one, and split-K none
# - ☐ neither can omit one, because the warps still share K and V
# - ☐ each can omit its last one, because nothing is copied afterwards
#
# <details><summary>Answer</summary>
#
# **split-Q can omit its second one, and split-K none.** "The tile is free" protects the keys and values from the next
# copy, and in this case there is no next copy. But split-K's last barrier also ensures that all sums and partial
# results are written before the warps read them.
# </details>
#
# In real kernels, shared memory has buffers for two or more tiles, which are called *stages*. The next copy goes to
# another stage while this tile is in use, so warps seldom wait. With several stages, one barrier per tile can be
# enough. Barrier n waits for the copy of tile n and for all warps, and a warp reaches it only after it has finished
# reading tile n − 1. With two stages, the sequence of events is:
#
# | | stage n mod 2 | the other stage |
# | --- | --- | --- |
# | **barrier n** | tile n is there | no warp reads tile n − 1 any more |
# | until barrier n + 1 | all warps read tile n | the copy of tile n + 1 arrives |
# | **barrier n + 1** | no warp reads tile n any more | tile n + 1 is there |
# | until barrier n + 2 | the copy of tile n + 2 arrives | all warps read tile n + 1 |
#
# A copy starts only after the barrier that frees its stage, so "the tile is free" needs no barrier of its own.
#
# Handwritten loops often use this scheme, whereas the loops that Triton pipelines have two barriers per tile. Chapter
# 11 finds both of them in the machine code of a loop with one stage.

# %% [markdown]
# ## What is it worth?
#
# Saving bytes saves time only if some unit has been waiting for them. We therefore count for how many clocks one tile
# keeps each unit of an SM busy, as we did in chapter 04 after tweak 1. Here the step is FA2's, which has fewer
# exponentials and FP32 instructions than FA1's step in chapter 04's table. The column for shared memory is new. It
# assumes a bandwidth of 128 bytes per clock, as in each SM of an A100. Under split-K, the FP32 units also add the four
# partial results, which takes 3 · 128 · 128 additions. The tile has 128 × 64 scores, with d = 128:

# %% tags=["hide-input"]
# a tile's clocks under split-K and under split-Q, and how far they are apart
def both(chip, *sizes, W=4):
    keys, queries = (time_model.tile_clocks(chip, *sizes, W=W, scheme=x)
                     for x in ("split_k", "split_q"))
    return keys, queries, keys.serial / queries.serial, keys.overlapped / queries.overlapped


keys, queries, one, all_ = both(chips.A100, 128, 64, 128)
print("clocks on an A100   tensor cores   exponentials   FP32 units   shared memory   in total")
for name, tile in (("split-K", keys), ("split-Q", queries)):
    print(
        f"{name:17}{tile.tensor:15.0f}{tile.exp:15.0f}{tile.fp32:13.0f}{tile.shared:16.0f}{tile.serial:11.0f}"
    )
print(f"split-Q is {one:.1f} times as fast if the units take turns, {all_:.1f} times if all "
      "work at once")

# %% [markdown]
# Under split-K, shared memory is the busiest unit, because 718 KiB take 718 · 1,024 / 128 = 5,744 clocks. The tensor
# cores need only 2,048 clocks, so they have to wait. Under split-Q, shared memory needs 1,536 clocks, so the tensor
# cores are the busiest unit. A roofline shows the same result. This one counts FLOPs per byte of shared memory, whereas
# the rooflines of the earlier chapters count FLOPs per requested byte or per byte that reaches DRAM:

# %% tags=["hide-input"]
show("rooflines_split")

# %% [markdown]
# How much does a real GPU gain? We ran the kernels s00 and s01 on an H200, with two warps and tiles of 32 × 32. The
# figure is for an A100, so we evaluate the model again, for this smaller tile on an H200:

# %% tags=["hide-input"]
*_, low, high = both(chips.H200, 32, 32, row.problem["d"], W=2)
shape = "{batch} sequences, {heads} heads, N = {N_q:,}, d = {d}".format(**row.problem)
print(f"{shape}: split-K {slow:.1f} ms, split-Q {fast:.1f} ms")
print(f"measured: {slow / fast:.1f} times as fast; by the model {low:.1f} to {high:.1f} times")

# %% [markdown]
# The speeds of the two kernels are farther apart than the model predicts, and this book does not resolve why. Two costs
# that the model leaves out could be the reason. One of them is *bank conflicts*. Shared memory has 32 banks, and if two
# threads of a warp access different addresses in the same bank, they are served one after the other (appendix A). The
# other cost is additional data exchanges that the compiler inserts.

# %% [markdown]
# ## Is there such a cut for the backward pass?
#
# One rule covers both cuts. If the warps divide the rows or columns of a matmul's result, each warp finishes its share
# alone. If they divide the dimension that the matmul sums over, each warp has only a partial result, and the partial
# results must be added. In $O = PV$, for example, the queries are rows of the result, while the keys are summed over.
#
# **Predict.** The backward pass has five matmuls: $S = QK^\top$, $dP = dO\,V^\top$, $dV = P^\top dO$, $dQ = dS\,K$ and
# $dK = dS^\top Q$ (without $\tau$). Which cut avoids all additions?
#
# - ☐ warps own queries, as in the forward pass
# - ☐ neither
# - ☐ warps own keys
#
# <details><summary>Answer</summary>
#
# **neither.** dV and dK sum over the queries, and dQ sums over the keys. If the warps own keys, one result (dQ) must be
# added across warps, and if they own queries, two must be added (dV and dK). That is also why the thread blocks of
# chapter 06 own keys in the backward pass.
# </details>

# %% [markdown]
# ## Recap
#
# - Under split-K, a warp owns keys, so the warps exchange maxima before the exponentials, and sums and partial results
#   of $PV$ after them.
# - Under split-Q, a warp owns rows of Q, S and O, and reads all of K and V, so the warps exchange no results.
# - Although split-Q reads K and V more often, it moves fewer bytes in total. It has two barriers per tile, and split-K
#   has two or three.
# - To see what a barrier protects, ask which block is written before the barrier and read after it, or read before the
#   barrier and overwritten after it.
# - In the backward pass, every cut leaves partial results that the warps must add.
#
# <details><summary>What did each change of chapters 02 to 07 save?</summary>
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
# ## Checks
#
# The cell below compares this notebook's functions, and some numbers in its text, with the package.

# %% tags=["hide-input"]
from fa2_lab.machine import grid, io_model
from fa2_lab.machine.rates import cost
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_studio.book.verdicts import close, verdict

one_tile = Tiling(N_q=8, N_k=8, B_r=8, B_c=8)
for W in (1, 4):
    by_queries, by_keys = (run(q, k, v, one_tile, 0, W).O for run in (warps.split_q, warps.split_k))
    verdict(f"split_q_tile = warps.split_q, warps: {W}",
            close(split_q_tile(q, k, v, W), by_queries))
    verdict(f"split_k_tile = warps.split_k, warps: {W}",
            close(split_k_tile(q, k, v, W)[0], by_keys))
kib = [round(warps.access_bytes(name, 128, 64, 128, 4) / 1024) for name in ("split_q", "split_k")]
verdict("192 KiB against 718", kib == [192, 718])
verdict("the kernels are farther apart than the model says", slow / fast > high)
N, d, B = 8192, 64, 128  # the table of changes
tiling, size = Tiling(N, N, B, B), io_model.tensor_sizes(Tiling(N, N, B, B), d)
standard, one, two = (cost(name, N=N, d=d, B_r=B, B_c=B, heads=32).dram_bytes
                      for name in ("standard", "FA1", "FA2"))
work = [time_model.fp32_instructions(name, B, B, d) for name in ("fa1", "fa2")]
tiles, skipped = tiling.T_r * tiling.T_c, Tiling(N, N, B, B, CAUSAL).counts()[Tile.SKIP]
busy = [grid.schedule(launch(32, tiling), chips.H200.SMs).utilisation
        for launch in (grid.fa1_grid, grid.fa2_grid)]
shared = [warps.access_bytes(scheme, B, B, d, W=4) for scheme in ("split_k", "split_q")]
kept = size["O"] + size["L"]
factors = [N / (d + 2), standard / one, one / two, work[0] / work[1],
           (size["l"] + size["m"]) / size["L"]]
factors += [tiles / (tiles - skipped), size["P"] / kept, (1 - busy[0]) / (1 - busy[1]),
            shared[0] / shared[1]]
written = [124, 2.3, 82, 1.2, 2.0, 2.0, 126, 25, 2.3]
verdict("the nine factors of the table",
        [round(x, 1 if x < 10 else None) for x in factors] == written)

# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)
