# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)

# %% [markdown]
# # 07 · Warps
#
# **How do the warps of one block share a tile?**
#
# Chapter 06 gave row blocks to thread blocks that exchange nothing. A thread block has *warps*, often four or eight: groups
# of 32 threads that execute their instructions together. They run on one SM and can exchange results. What does that cost?
#
# After this notebook you can
#
# - cut a tile among warps by queries or by keys, and say which results then have to cross from warp to warp,
# - count the bytes that a tile moves through shared memory,
# - say what each barrier protects.
#
# *Time: 30 minutes with the questions and the function. Hardware: any laptop, NumPy alone. Before this: [06 ·
# Parallelism](06_parallelism.ipynb). How threads hold the numbers of a tile, and how large a tile may be, is in
# [appendix A](A_lanes.ipynb).*

# %% tags=["hide-input"]
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
# all warps of a thread block. A warp *publishes* a result that others need: it writes it there. Then all wait until
# everybody has written. This waiting point is called a *barrier*.
#
# Take one tile: 8 queries, 8 keys, d = 4, and four warps. The first way to share it cuts the queries. Each warp takes two
# rows of Q, and reads K and V as a whole.

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
# Softmax works row by row, and each row belongs to one warp throughout. This is FA2's way, *split-Q*.

# %% [markdown]
# ## The other way: cut the keys
#
# In the FA1 kernel of 2022 each warp takes some of the keys, here two, and all queries. It has finished scores, but only two
# of eight columns of S. The FA2 paper calls this *split-K*, where K means the keys. (Chapter 06's split-KV is among thread
# blocks.) Two columns are not enough for a softmax. Each warp needs the others' maxima before the exponentials, and the
# sums and the parts of $PV$ have to be added after them.


# %%
def split_k_tile(q, k, v, W):
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


o, published = split_k_tile(q, k, v, 4)
print(f"error of o: {np.abs(o - dense).max():.3f}")
for name, of_warps in published.items():
    print(f"{name:12}: {len(of_warps)} warps publish {of_warps[0].size} numbers each")

# %% [markdown]
# The parts of $PV$ are large: W of them for every tile, each as large as the output. Maxima and sums are small, but the
# maxima make all warps wait in the middle of the softmax. That barrier can be saved: each warp uses the maximum of its own
# keys, $m_w$, and publishes it with its sums $\ell_w$ and its undivided part $o_w$. Then one exchange puts them together.
#
# **Build.** `m`, `l` and `o` have one entry for each warp: maxima, sums and parts, made with the warp's own maximum.
# Return the finished rows, as if this tile held all keys. A row that sees no key gets zeros. (A warp without a visible key in a row
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
    "scores near 1000. Is there an e^m, which overflows?": (1e3 * S, safe_softmax(1e3 * S) @ v),
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
# It is the merge of chapter 02. The parts of $PV$ still cross.
# </details>
#
# [Assignment 6](assignments/6_read_the_machine.ipynb) goes further: what fits into shared memory and registers.

# %% [markdown]
# ## Count what passes through shared memory
#
# Q, K and V are copied from HBM into shared memory, and each warp reads from there what it needs. Q is copied once for
# the row block, so a tile counts only its reads. Take a tile of 128 × 64 with d = 128. Q, K and V have 2 bytes per
# element, maxima, sums and $PV$ have 4.
#
# **Predict.** With four warps, split-Q reads K and V four times instead of once. How many bytes does it move in all?
#
# - ☐ more than split-K, almost four times as many
# - ☐ about as many as split-K
# - ☐ fewer than split-K
#
# <details><summary>Answer</summary>
#
# **fewer than split-K.** About a quarter. Split-Q writes K and V once and reads them with every warp, and reads Q once:
# $2\,(2 B_c d\,(1 + W) + B_r d)$ bytes, 192 KiB. Under split-K each of four warps publishes a part of $PV$ (128 × 128
# numbers of 4 bytes, 64 KiB), which is read once. In KiB: 512 (parts) + 128 (Q, read four times) + 64 (K and V, written and
# read once) + 14 (maxima and sums) = 718, 3.7 times as many. (Chapter 00's tile, 128 × 128 with d = 64, gives 2.3.)
# </details>
#
# The picture is the paper's figure 3:

# %% tags=["hide-input"]
show(warp_split.draw(**warp_split.data(), narrow=True))

# %% [markdown]
# ## Could split-K merge once, at the end?
#
# Each warp could keep a state $(m, \ell, o)$ of its own through all tiles, and `exchange` run once, after the last. Within
# one tile a warp can make its part a few rows at a time, publish them and reuse the registers. A state kept through the
# loop needs all 128 rows at once: an $o$ of 128 × 128 takes 128 · 128 / 32 = 512 registers for each of a warp's 32 threads. A thread has
# at most 255, with one fp32 number in each. Under split-Q the four warps share the rows: 128.

# %% [markdown]
# ## What do the barriers protect?
#
# Split-Q exchanges no results. It still needs two barriers per tile, because all warps read the same blocks of K and V.
#
# - "The tile is there": nobody reads before the copy is complete.
# - "The tile is free": the next copy, to the same place, waits until everyone has read.
#
# Split-K, as listed above, needs three: "the tile is there", one for the maxima, and one for sums and $PV$. (With `exchange`
# the second goes.) The third also says that all have read K and V. The parts need no fourth: a warp comes to the next "the
# tile is there" only when it has read the old ones, and new ones are written behind it. Without a barrier a GPU computes
# with whatever is there, and raises no error.
#
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
# </details>
#
# Real kernels have room in shared memory for two or more tiles, called *stages*. The next copy goes to another stage while
# this tile is in use, so warps seldom wait. With several stages, one barrier per tile can be enough. A warp that has passed
# "tile n is there" has read tile n − 1, and so has every other warp. If the next copy starts only after this barrier and
# goes into the stage of tile n − 1, nobody overwrites what is still being read, and "the tile is free" needs no barrier of
# its own. Loops written by hand often do this. The loops that Triton pipelines have two: `fa2-lab xray 10 --full --d 64
# --chip sm_80 --sass` prints `BAR.SYNC` twice in each loop.

# %% [markdown]
# ## What is it worth?
#
# Saved bytes save time only if somebody waited for them. Take the model of chapter 04 after tweak 1, and add the shared
# memory of an A100's SM, 128 bytes per clock. Under split-K the FP32 units also add the four parts, 3 · 128 · 128 additions:

# %% tags=["hide-input"]
def both(chip, *sizes, W=4):  # a tile's clocks under split-K and under split-Q, and how far they are apart
    keys, queries = (time.tile_clocks(chip, *sizes, W=W, scheme=x) for x in ("split_k", "split_q"))
    return keys, queries, keys.serial / queries.serial, keys.overlapped / queries.overlapped


keys, queries, one, all_ = both(chips.A100, 128, 64, 128)
print("clocks of a tile of 128 × 64, d = 128, on an A100")
for name, tile in (("split-K", keys), ("split-Q", queries)):
    units = f"tensor {tile.tensor:.0f}, exp {tile.exp:.0f}, fp32 {tile.fp32:.0f}"
    print(f"  {name}: {units}, shared {tile.shared:.0f}; busiest: {tile.busiest}")
print(f"split-Q is {one:.1f} times as fast if units take turns, {all_:.1f} if all work at once")
row = next(row for row in load("ladder").rows if "s00_split_keys" in row.values)
slow, fast = row.values["s00_split_keys"][0], row.values["s01_split_queries"][0]
*_, low, high = both(chips.H200, 32, 32, row.problem["d"], W=2)
shape = "{batch} texts, {heads} heads, N = {N_q:,}, d = {d}".format(**row.problem)
print(f"two kernels on an H200, {shape}, tiles of 32 × 32, two warps:")
print(f"  {slow:.1f} and {fast:.1f} ms: {slow / fast:.1f} times as fast; by this model {low:.1f} to {high:.1f}")
price, flops, points = prices.prices(chips.A100), 4 * 128 * 64 * 128, {}
for name, scheme in (("split-K", "split_k"), ("split-Q", "split_q")):
    intensity = flops / warps.tile_bytes(scheme, 128, 64, 128, 4)
    points[name] = intensity, min(price.tensor, intensity * price.shared) / 1e12
roof = roofline.Roof(price.tensor / 1e12, price.shared / 1e12, "", "tensor cores 312")
caption = "The tile under both splits (A100). Here a dot counts bytes of shared memory; in earlier chapters, of DRAM."
axis = f"FLOPs per byte of shared memory ({price.shared / 1e12:.1f} TB/s)"
show(roofline.draw(points, [roof], caption, axis, narrow=True))

# %% [markdown]
# Under split-K the tensor cores wait for shared memory: 718 · 1,024 / 128 = 5,744 clocks. Under split-Q it needs 1,536, and
# the tensor cores are the busiest unit. The two test kernels (s00 and s01) are farther apart than the model says for their
# tile: *bank conflicts* (shared memory has 32 banks, and two addresses in one bank are served one after the other) and
# exchanges that the compiler adds can cost time, too.

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
# **neither.** dV and dK sum over the queries, and dQ over the keys. Owning keys leaves one sum, owning queries two. So
# chapter 06's thread blocks own keys.
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
# ## Checks
#
# The functions of this notebook against the package, and numbers of the text.

# %% tags=["hide-input"]
one_tile = Tiling(N_q=8, N_k=8, B_r=8, B_c=8)
for W in (1, 4):
    by_queries, by_keys = (run(q, k, v, one_tile, 0, W).O for run in (warps.split_q, warps.split_k))
    verdict(f"split_q_tile = warps.split_q, warps: {W}", close(split_q_tile(q, k, v, W), by_queries))
    verdict(f"split_k_tile = warps.split_k, warps: {W}", close(split_k_tile(q, k, v, W)[0], by_keys))
kib = [round(warps.tile_bytes(name, 128, 64, 128, 4) / 1024) for name in ("split_q", "split_k")]
verdict("192 KiB against 718", kib == [192, 718])
verdict("the kernels are farther apart than the model says", slow / fast > high)

# %% [markdown] tags=["navigation"]
# [← Parallelism](06_parallelism.ipynb) · [The map](00_start.ipynb) · [The Triton forward kernel →](08_triton_forward.ipynb)
