# %% [markdown] tags=["navigation"]
# [← Hopper, backward](13_hopper_backward.ipynb) · [The map](00_start.ipynb) · [Rings →](15_rings.ipynb)

# %% [markdown]
# # 14 · Decode
#
# **One query, a long cache: who does the work?**
#
# A model that writes a text computes one new query at a time, against the keys of everything so far. Notebook 06 ended
# with this case: one row block, 32 workers, a hundred idle processors, and a remedy, to split the keys and merge. This
# notebook builds the kernel that serving needs, down to the cache in pages, and asks how near it comes to the only limit
# that counts here. None of it is ours first: keys were split and merged (*split-KV*) by Flash-Decoding, shares made equal by Lean
# Attention, the cache cut into pages by PagedAttention (the README lists the papers).
#
# After this notebook you can
#
# - say from two numbers, bytes and FLOPs, what one token costs on any GPU, and why the tensor cores hardly matter,
# - cut the keys of many unequal sequences into equal shares, and merge what falls on both sides of a cut,
# - read a cache through a block table, and name what a kernel must not touch.
#
# *Time: 30 minutes. Hardware: any Linux machine; without a GPU the kernels run in Triton's interpreter, at small size.
# Measured numbers were recorded on an NVIDIA H200. Before this: [02 · Online softmax](02_online_softmax.ipynb), [06 ·
# Parallelism](06_parallelism.ipynb) and [08 · The Triton forward kernel](08_triton_forward.ipynb).*

# %%
from inspect import getsource

import numpy as np
import torch
from IPython.display import Markdown

from fa2_lab import attention, attention_paged
from fa2_lab.kernels.decode import kernel, plan
from fa2_lab.kernels.prepared import Options
from fa2_lab.machine import chips, grid, splits
from fa2_lab.plots import ends, ideas, programs, shares
from fa2_lab.plots.show import show
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.studio.bench.results import load
from fa2_lab.studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output"]
print(torch.cuda.get_device_name() if device == "cuda" else "no GPU: the kernels are interpreted, line by line")
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))

# %% [markdown]
# ## What does one token cost?
#
# A model of today's size, one layer: 32 query heads of 128 numbers, and 8 K/V heads, each shared by a *group* of four
# query heads. The text so far has 65,536 tokens, so the cache holds as many keys and values. They are numbers of two
# bytes. Each is read once for this token, multiplied by four queries, and not needed again.
#
# **Predict.** An H200 multiplies 989 · 10¹² and reads 4.8 · 10¹² bytes a second. Which of the two takes longer here, and
# by what factor?

# %%
keys, kv_heads, group, d = 65536, 8, 4, 128
read = 2 * keys * kv_heads * d * 2  # K and V, two bytes each
flops = 4 * keys * kv_heads * group * d  # q kᵀ and p v, a multiplication and an addition each
H200 = chips.H200
print(f"{read / 1e6:.0f} MB to read: {1e6 * read / H200.hbm_per_second:.0f} µs")
print(f"{flops / 1e9:.2f} GFLOP to compute: {1e6 * flops / H200.tensor_flops:.1f} µs")
print(f"FLOPs per byte: {flops // read}, and the chip does {H200.flops_per_byte:.0f} in the time of one byte")

# %% [markdown]
# <details><summary>Where the 4 FLOPs per byte come from</summary>
#
# A key and its value are 2 · 128 numbers, 512 bytes. Each of the four queries spends 2 · 128 FLOPs on the key and as many
# on the value: 2,048 in all. The length cancels, and so does d. What is left is the number of queries that share a key:
# one FLOP per byte and query.
# </details>
#
# In training thousands of queries share a key, and notebook 10 found FlashAttention far from the memory's limit. Here
# the GPU is a machine for reading.
#
# **Takeaway.** One query over a cache costs its bytes: keys and values, once. Everything else must hide behind that.

# %% [markdown]
# ## Whose rows are in a tile?
#
# A kernel with a row block for every query head would read each key four times. The four heads of a group want the same
# keys, so their queries can be rows of one tile. (Are there several new tokens, say when somebody's guesses are checked,
# their queries are rows as well: row r is query r mod N_q of the group's head r // N_q.)
#
# **Predict.** Tensor cores take 16 rows at least. Four rows are ours. What do the other twelve cost?

# %%
def grouped(Q, K, V):  # (heads, d), (kv heads, N_k, d), (kv heads, N_k, d)
    group, d = len(Q) // len(K), Q.shape[1]
    O = np.empty_like(Q)
    for h in range(len(K)):
        rows = slice(h * group, (h + 1) * group)
        s = Q[rows] @ K[h].T / np.sqrt(d)  # (group, N_k): K[h] is read once for all
        O[rows] = safe_softmax(s) @ V[h]
    return O


rng = np.random.default_rng(0)
Q, K, V = rng.standard_normal((8, 16)), *rng.standard_normal((2, 2, 50, 16))
one_by_one = [safe_softmax(Q[i : i + 1] @ K[i // 4].T / 4) @ V[i // 4] for i in range(8)]
print("rows of a group together = heads one by one:", close(grouped(Q, K, V), np.vstack(one_by_one)))

# %% [markdown]
# <details><summary>The twelve rows</summary>
#
# They are zeros and cost no bytes. They cost multiplications, of which there are more than a hundred to spare: 16 rows
# make 16 FLOPs per byte, the chip has about 200.
# </details>
#
# **Takeaway.** The queries that share keys are rows of one tile; a key is read once, whoever wants it.

# %% [markdown]
# ## Eight heads, 132 seats
#
# The kernel's programs read 64 keys at a time and keep three tiles on their way. One program has each of the 132 SMs for
# itself: 132 *slots*. Beginning with a head takes about as long as reading a tile (fetch the queries, wait for the first
# keys), so we count it as one.
#
# **Predict.** 65,536 keys are 1,024 tiles for each of 8 heads. When does the last block end with a block for each head?
# With 16 splits of every head? With 17, 33? What would perfect sharing give?

# %%
cache = splits.Cache((65536,), kv_heads=8, d=128, rows=4, B_c=64)
slots = 132


def tell(what, blocks):
    ran = grid.schedule(blocks, slots)
    print(f"{what}: {len(blocks):3} blocks, waves: {ran.waves}, end: {ran.makespan:4}, busy: {ran.utilisation:4.0%}")


print(f"perfect sharing: {(sum(cache.tiles) + 8) / slots:.1f}")
for n in (1, 16, 17, 33):
    tell(f"{n:2} splits of a head", splits.same_splits(cache.tiles, n))
equal = splits.Shares(cache.tiles, slots)
tell(f"equal shares of {equal.share}", equal.blocks())

# %% [markdown]
# <details><summary>What is wrong with 17 splits, and with many</summary>
#
# 17 splits are 136 blocks, four more than there are slots: a second wave, for which everybody waits. 33 splits are two
# full waves of shorter blocks and nearly as good as one, but each of the 264 blocks begins anew, and leaves a result to
# be merged. Rules that pick the number of splits weigh these things. *Equal shares* (*stream-K*) do without: lay all tiles end to end
# and give every program the same number of them.
# </details>
#
# **Takeaway.** Heads are too few and too long to be the unit of work. Tiles are not.

# %% [markdown]
# ## Equal shares, by hand
#
# Five heads of 10, 3, 0, 12 and 2 tiles, four programs. (In a batch every sequence has its own length; one may still be
# empty.) Each head has one turn to begin and one for each tile, 32 turns in all, eight for each program.
#
# **Predict.** Walk along the heads and deal out the turns. Which programs read two heads or more? Which heads are read by
# two programs?

# %%
def deal(tiles, programs):  # {(program, head): how many tiles}
    turns = sum(tiles) + len(tiles)
    share = -(-turns // programs)
    read, t = {}, 0
    for head, n in enumerate(tiles):
        for turn in range(n + 1):  # the first begins the head
            read.setdefault((t // share, head), 0)
            read[t // share, head] += turn > 0
            t += 1
    return read


for (w, head), n in deal((10, 3, 0, 12, 2), 4).items():
    print(f"program {w}, head {head}: tiles: {n:2}, slot {w + head}")

# %%
show(shares.draw(**shares.data()))

# %% [markdown]
# <details><summary>Why w + h is a place of one's own</summary>
#
# From one part to the next, in the order of the turns, either the program grows by one or the head does, never neither.
# So w + h grows with every part. A head's parts lie side by side, and whoever merges them needs no list: the first and
# the last turn of the head say which programs have read it.
# </details>
#
# Head 2 has no key. Its turn exists all the same, and gives it what an empty row gets: O = 0, L = −∞.
#
# **Takeaway.** A cut may fall anywhere, because there is a merge. So make all shares equal, whatever the lengths are.

# %% [markdown]
# ## A team for each head
#
# Heads of one length, as in a benchmark: 132 slots are eight times 16 and four more. So 16 programs may form a *team* and
# take the tiles of their head in turn, program i every 16th from the i-th on. They read the same bytes and leave as many
# parts.
#
# **Predict.** All programs are at their eleventh tile. Where in head 0 are the tiles that are read now, with equal shares
# and with a team?

# %%
def in_turn(w, size, tiles):  # program w: its head, and its tiles
    return w // size, range(w % size, tiles, size)


size = splits.splits_of_head(slots, heads=8, tiles=1024)
apart = [equal.spans(w)[0][1] + 10 for w in equal.readers(0)]
near = [in_turn(w, size, 1024)[1][10] for w in range(size)]
print(f"shares: {len(apart)} tiles, the first ones {apart[:3]}, from {min(apart)} to {max(apart)}")
print(f"a team: {len(near)} tiles, the first ones {near[:3]}, from {min(near)} to {max(near)}")

# %% [markdown]
# <details><summary>Why that matters, and when it does not work</summary>
#
# Memory serves neighbours a little better. (A kernel that does nothing but read a gigabyte, by 2,048 programs that stay,
# took 234 µs on an H200 when they read in turn and 236 when each had a stretch of its own; noted once, no command repeats
# it.) And a team's program has one head and never another: its kernel has no loop over heads, and begins and ends sooner.
# What both buy together, and the loop alone, the table near the end of this notebook says.
#
# But if lengths differ, short heads leave their teams idle; if the heads do not
# divide the slots, slots stay empty. In both cases the package takes equal shares. And where heads fill the slots by
# themselves, a team is one program, and nothing is merged.
# </details>
#
# **Takeaway.** Who reads what is free to choose, since there is a merge. So choose what memory likes.

# %% [markdown]
# ## Parts that never met
#
# A part is a state (m, l, o), as in notebook 02. The kernel that merges takes several at once: the largest m of all, a
# factor for each, two sums.
#
# **Predict.** In the code below one part has seen no key (m = −∞). Which line decides that it counts for nothing?

# %%
def merge_all(m, l, o):  # (parts,), (parts,), (parts, d)
    m_new = m.max()
    m_ref = 0.0 if np.isneginf(m_new) else m_new
    beta = np.exp(m - m_ref)  # (parts,): how much each shrinks
    return m_new, beta @ l, beta @ o


def state(s, v):  # of one row
    return SoftmaxState.reset(1, v.shape[1]).update(s[None], v)


s, v = 5 * rng.standard_normal(40), rng.standard_normal((40, 3))
parts = [state(s[:7], v[:7]), SoftmaxState.reset(1, 3), state(s[7:9], v[7:9]), state(s[9:], v[9:])]
m, l, o = merge_all(*(np.concatenate([getattr(p, name) for p in parts]) for name in "mlo"))
print("four parts, one of them empty:", close(o / l, safe_softmax(s[None])[0] @ v))

# %% [markdown]
# `beta = exp(−∞ − m) = 0`. And here is the same in the package's kernel. `scale_log2` turns scores into powers of two
# (notebook 08), and the state that has been merged so far comes along.

# %%
print(getsource(kernel.merge.fn))

# %% [markdown]
# **Predict.** Six queries over 200 keys, cut into 1, 2, 5 and 40 shares. How many different results, bit by bit? How many
# but for rounding?

# %%
q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device) for shape in
           ((1, 4, 3, 16), (1, 2, 200, 16), (1, 2, 200, 16)))
options = Options(causal=True, scale=0.25)
results = {n: plan.decode(q, k, v, options, programs=n)[0].cpu().numpy() for n in (1, 2, 5, 40)}
print("the same but for rounding:", all(close(O, results[1], 1e-5) for O in results.values()))
print("attention() says so too:", close(attention(q, k, v, causal=True).cpu().numpy(), results[1], 1e-5))

# %% [markdown]
# <details><summary>Bits and rounding</summary>
#
# Sums in another order round differently: up to four results that differ in their last bits, and one but for rounding. For
# one number of shares the bits never differ: parts are merged in the order of the programs, not in the order in which these
# finish.
# </details>
#
# **Takeaway.** The merge of notebook 02, one level further out. It takes a few kilobytes for each part, beside megabytes
# of keys.

# %% [markdown]
# ## A cache in pages
#
# Nobody knows how long a text will get. If every sequence kept a tensor of the largest length, most of the memory would
# hold nothing. Serving engines cut the cache into *pages* of, say, 16 keys, hand them out as texts grow, and keep a *block
# table*: which page holds the first 16 keys of this sequence, which the next.
#
# **Predict.** A sequence has 37 keys, pages hold 16. How many pages, and how many places are empty? Where is key 20?

# %%
def from_pages(pages, table, n):  # (pages, page_size, d), (width,), keys → (n, d)
    j = np.arange(n)
    return pages[table[j // pages.shape[1]], j % pages.shape[1]]


cached = rng.standard_normal((37, 4))
pages, table = np.full((6, 16, 4), np.nan), np.array([4, 0, 5])  # in no order; others have the rest
for i, page in enumerate(table):
    rows = cached[16 * i : 16 * i + 16]
    pages[page, : len(rows)] = rows
print(f"pages: {len(table)}, empty places: {16 * 3 - 37}; key 20 is row {20 % 16} of page {table[20 // 16]}")
print("the cache again:", np.array_equal(from_pages(pages, table, 37), cached), " NaN in it:", np.isnan(pages).any())

# %% [markdown]
# For the kernel one line changes: which row a key is in. Everything after the load is the same. Two sequences may even
# point at the same page, if their texts begin alike.
#
# **Predict.** Below, everything that no sequence owns is NaN, and the table's unused entries are −1. What may the kernel
# not do?

# %%
lengths = torch.tensor([37, 0, 48], device=device)
k_pages, v_pages = torch.full((2, 7, 16, 2, 8), torch.nan, device=device)  # 7 pages of 16 keys, 2 heads, d = 8
block_table = torch.tensor([[4, 0, 5], [-1, -1, -1], [2, 6, 1]], device=device)
k, v = torch.randn(2, 3, 2, 48, 8, device=device)  # the same, densely: 3 sequences
for b, n in enumerate(lengths.tolist()):
    for j in range(n):
        at = block_table[b, j // 16], j % 16
        k_pages[at], v_pages[at] = k[b, :, j], v[b, :, j]
q = torch.randn(3, 4, 1, 8, device=device)
O = attention_paged(q, k_pages, v_pages, block_table, lengths)
dense = attention(q, k, v, key_lengths=lengths)
print("pages = dense:", close(O.cpu().numpy(), dense.cpu().numpy(), 1e-5), " empty sequence: O =", O[1].abs().max().item())

# %% [markdown]
# <details><summary>What it may not do</summary>
#
# Read first and mask later: 0 · NaN is NaN, so even a weight of zero would spread it. And follow −1 to an address. Loads
# carry the mask themselves (`other=0.0`), the table's as well as the keys'.
# </details>
#
# **Takeaway.** A page table moves rows, not arithmetic; what is behind the last key is never touched.

# %% [markdown]
# ## How near is the limit?
#
# A program has three tiles on their way, 96 KiB, and from asking for a tile to being done with it about 2.5 µs pass (from the
# record below, where next to no one else is at work). That is *Little's law*: bytes on their way = speed · time. So one
# program alone reads at most 96 KiB in 2.5 µs.
#
# **Predict.** How many programs does it take to draw all of the H200's 4.8 TB/s? What do 8 programs reach?

# %%
speed = splits.pace(H200, cache, stages=4)
print(f"one program: {speed.alone / 1e9:.0f} GB/s; all of the bandwidth from {speed.enough} programs on")
for n in (8, 32, 128):
    share = splits.Shares(cache.tiles, n)
    print(f"{n:3} programs: {1e6 * splits.seconds(cache, share.blocks(), slots, speed):4.0f} µs")

# %%
show(programs.draw(**programs.data()))

# %% [markdown]
# The dashed line is that model, and the time to launch two kernels on top. Below is the whole record beside two
# yardsticks: how fast the same GPU copies a large tensor, bytes read and bytes written; and a kernel that reads as many
# bytes as the cache has, keeps nothing, and was launched and timed in the same way. (A copy is no limit for what only
# reads: half of its bytes go the other way.)

# %%
record = load("decode")
copy, alone = record.ceilings["copy TB/s"], "reading alone"
print(f"{record.machine['gpu']}, bf16, torch {record.machine['torch']}, triton {record.machine['triton']}")
print(f"batch × keys  heads    d       µs  TB/s  of a copy  of {alone}  cuDNN's µs")
for row in record.rows:
    if row.direction == "decode":
        p, µs = row.problem, {name: values[0] for name, values in row.values.items()}
        rate = p["bytes"] / µs["fa2_lab"] / 1e6
        heads = f"{p['heads']}/{p['kv_heads']}"
        print(f"{p['batch']:3} × {p['N_k']:6,}  {heads:5}  {p['d']:3}  {µs['fa2_lab']:7.1f}  {rate:.2f}", end=" ")
        print(f"{rate / copy:10.0%}  {µs[alone] / µs['fa2_lab']:16.0%}  {µs['cuDNN']:10.1f}")

# %% [markdown]
# <details><summary>Why short caches stay below</summary>
#
# 34 MB are read in 8 µs. Launching a kernel takes some microseconds, so does a second one for the merge, and every
# program waits once for its first tile. None of that depends on the length, so it weighs the more the shorter the cache
# is. Engines record a whole token's kernels as one CUDA graph to save what can be saved.
# </details>
#
# **Takeaway.** From some hundred megabytes on, decode runs at the speed of a copy; reading alone takes 2 to 7% less: the
# rest is bookkeeping.

# %% [markdown]
# ## Do all end together?
#
# 32 sequences of 8,192 keys, 8 K/V heads: 256 programs begin at once and read a whole head each, two on nearly every SM,
# and nothing is merged. While the record was made, an edited copy of the kernel wrote down when each program had ended,
# and on which SM.
#
# **Predict.** 4 MiB each, and the same instructions. How many microseconds lie between the first end and the last? And
# what makes a program early: chance, its head, or its SM?

# %%
SM, ended = (np.array(load("ends").curves[name]) for name in ("SM", "ended"))
print(f"first {ended.min():.0f} µs, half of them {np.median(ended):.0f}, last {ended.max():.0f}")
pairs = [ended[SM == s] for s in np.unique(SM) if (SM == s).sum() == 2]
apart = np.mean([x.max() - x.min() for x in pairs])
print(f"the two programs of one SM end {apart:.1f} µs apart; the mean of an SM lies between "
      f"{min(x.mean() for x in pairs):.0f} and {max(x.mean() for x in pairs):.0f} µs")

# %%
show(ends.draw(**ends.data()))

# %% [markdown]
# <details><summary>Why it is the SM</summary>
#
# The dots lie on a few levels, neighbours mostly on the same. SMs reach the memory in groups, and when all ways are full,
# what a group gets is divided among its SMs; the groups are not of one size, for a chip is sold with some of its SMs
# switched off. (The groups are read off the picture. NVIDIA says little of them, and another H200 looks different.)
#
# Equal shares are therefore not equal times. Until shortly before the end that costs nothing: what the early ones leave,
# the others get (noted from clocks inside the loop). But when fewer programs are left than it takes to fill the memory's
# time (Little's law, above), it idles. The kernel that only reads has many small blocks, and whoever is done takes the next; but it has no state that would have
# to be begun anew, or merged.
#
# With fewer bytes on their way there is no queue in which some are served before others. With three half tiles on their
# way, not two whole ones, nearly all end within eight microseconds of each other (noted once), and yet the last hardly
# sooner: what made it unfair also keeps the memory busy at the end. The table below has both ways.
#
# cuDNN's profile, looked at once, shows as many blocks of as many warps here, one for each head, with tiles of 128 keys.
# In the record it ends within a microsecond of the package's kernel: both wait on the same roads, it seems.
# </details>
#
# **Takeaway.** Who shares a road with whom decides the last few percent, and no program can choose its SM.

# %% [markdown]
# ## What is each idea worth?
#
# As in chapter 12, each idea was taken out of a copy of the kernels, or put in where they do without it (in italics), and
# both were timed in turn: above 1, the idea is worth having.
#
# **Predict.** Whole heads need no merge, a kernel may be launched before the one that it waits for has ended, warps need
# not add up before the last tile, a team's program needs no loop over heads. Which of them buys a tenth?

# %%
Markdown(ideas.folded("All ideas for decode, cache by cache", ideas.ideas_table("decode")))

# %% [markdown]
# <details><summary>What to make of it</summary>
#
# None of these four. Where memory sets the pace, an idea may only take away what is not hidden behind it: some microseconds
# at the beginning and the end, which is much for a short cache and little for a long one. On the shortest, teams do buy a
# tenth, with all that comes with them. And room does: at d = 64 three programs of equal shares fit on an SM, and with more
# than 168 registers a thread only two would.
# </details>
#
# <details><summary>What did not help, and is not in the table</summary>
#
# Each beside the package's kernels of its day, in the same run. These numbers were noted from experiments on an H200;
# unlike the table, no command repeats them.
#
# - An eighth of every share cut off in two small pieces, for whoever is done first: 74 µs instead of 71 on 65,536 keys.
#   The last program ends no sooner, and the merge has three times as many parts. A sixteenth of every whole head, on 32 ×
#   8,192 keys: 247 instead of 244, because now there is a merge.
# - Small shares at the end that are claimed from a counter, on 65,536 keys: 79 instead of 70.
# - Each program begins at another place in its head, so that they do not walk in step: no difference.
# - The last of a team to arrive merges, and there is no second kernel: 73 instead of 68. With six programs to a team, on
#   8 × 16,384 keys, still 129 instead of 126: one program alone waits for all parts of a head.
# - A kernel for Hopper (notebook 12): on each SM two producer warps with the copy engine, rings of 64 KiB, and consumers
#   that multiply out of shared memory. With equal shares 69 instead of 69; with pieces for whoever is done first, drawn
#   from a counter while the ring is still full, 71. The programs do end within 5 µs of each other instead of 10, but the
#   ring takes longer to begin, and more parts longer to merge. Even if nothing is computed, such rings need 68.
# - The copy engine in Triton's own pipeline (tensor descriptors, made in the kernel): 69 instead of 67 on 65,536 keys.
# - Tiles asked into the L2 cache two to six ahead, on 32 × 8,192 keys: 273 to 394 instead of 238.
# - More tiles on their way for the last part of a head alone, a tenth to two fifths of it: 241 to 251 instead of 238.
# - Three to twenty-three times as many programs as fit, for whoever is done first: 252 to 262 instead of 244.
# - Every warp with keys and a state of its own, merged at the end: on 65,536 keys 71 instead of 68. The loop has two
#   barriers instead of six, but merging four states at the end costs more than that saves.
# - Eight programs more than there are heads, which end at once, so that other slots stay idle: between 0.986 and 1.006
#   times cuDNN's speed, as they are placed, and 1.000 without them. Which place is good, another chip would not agree.
# </details>
#
# **Takeaway.** Behind a wall of bytes most ideas are worth nothing. Measure each of them alone, and keep what is left.

# %% [markdown]
# ## Recap
#
# - One query does about one FLOP for each byte it reads: it is memory that limits it. Only many queries to a key change that.
# - The queries of a group are rows of one tile, so that keys are read once.
# - Heads are too few and unequal: lay their tiles end to end, give every program an equal share.
# - Where a team of programs for each head fills the slots, take its tiles in turn: memory serves neighbours sooner.
# - A head that several programs have read is merged from their parts, in fixed order.
# - Pages and a block table change where a row lies, and nothing else.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** 64 sequences of 4,096 keys, 8 K/V heads, two programs on each SM: 264 slots. Is there anything to
# split?
#
# <details><summary>Hint</summary>
# Count the heads, then the waves (notebook 06).
# </details>
# <details><summary>Answer</summary>
#
# 512 heads are two waves on 264 slots, 97% busy. Nothing to split, if all lengths are equal, and the package takes whole
# heads there: `splits.splits_of_head(264, 512, tiles=64)` is 1. With unequal lengths equal shares still win.
# </details>
#
# **2. Complete.** From which share on do the parts cost less than 1% of the bytes? A part has rows · (d + 2) numbers of
# four bytes, written and read; a tile 64 keys and values of two bytes each number. Take 4 rows, then 64.
#
# <details><summary>Hint</summary>
#
# `splits.Cache` knows `part_bytes` and `tile_bytes`.
# </details>
# <details><summary>Answer</summary>
#
# 4 rows: 4,160 bytes for a part, 32,768 for a tile, 0.127 of one, so from 13 tiles on. 64 rows: 2.03, from 204 tiles on.
# Much of it stays in the L2 cache, though, and a tile with 64 rows is computed for longer than it is read.
# </details>
#
# **3. Break and fix.** Somebody merges finished parts by their mean. The value is 1 for the first twenty keys and 0 for
# the others, so the right answer is the weight of the first twenty. Before you run the cell: for which scores is the mean
# nearly right?

# %%
v_half = np.repeat([1.0, 0.0], 20)[:, None]
for size in (0.01, 4):
    s_row = size * np.cos(np.arange(40.0) ** 2)
    halves = [state(s_row[:20], v_half[:20]), state(s_row[20:], v_half[20:])]
    by_mean = sum((p.o / p.l[:, None]).item() for p in halves) / 2
    print(f"scores up to {size}: by the mean {by_mean:.3f}, merged {halves[0].merge(halves[1]).finalize()[0].item():.3f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# For scores so small that all parts have nearly the same weight, exp(L). A test with such rows would notice nothing.
# Weigh each part by exp(L − max L), and divide by the sum of the weights.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the kernels against the dense result.

# %%
for tiles, workers in (((10, 3, 0, 12, 2), 4), ((1024,) * 8, 132), ((0, 0, 7), 5)):
    package = splits.Shares(tiles, workers)
    theirs = {(w, head): b - a for w in range(workers) for head, a, b in package.spans(w)}
    verdict(f"deal here = Shares, {len(tiles)} heads, {workers} programs", deal(tiles, workers) == theirs)
same = all(in_turn(w, 16, 1024) == splits.interleaved(w, 16, 1024) for w in range(128))
verdict("in_turn here = the package's", same)
whole = parts[0]
for other in parts[1:]:
    whole = whole.merge(other)
verdict("merge_all here = SoftmaxState.merge", all(map(close, merge_all(*(
    np.concatenate([getattr(p, name) for p in parts]) for name in "mlo")), (whole.m[0], whole.l[0], whole.o[0]))))
verdict("from_pages here = the cache", np.array_equal(from_pages(pages, table, 37), cached))

# %%
options = Options(causal=False, scale=8**-0.5)
for n in (1, 3, 8):
    got = plan.decode(q, k, v, options, lengths, programs=n)[0].cpu().numpy()
    want = [grouped(*(x[b].double().cpu().numpy() for x in (q[:, :, 0], k[:, :, :m], v[:, :, :m]))) for b, m in
            enumerate(lengths.tolist()) if m]
    verdict(f"decode with {n} programs = NumPy, head by head", close(got[[0, 2], :, 0], np.stack(want), 1e-5))
verdict("an empty sequence has O = 0", (got[1] == 0).all())
reference = attention_paged(q, k_pages, v_pages, block_table, lengths, backend="reference")
verdict("pages = the reference", close(O.cpu().numpy(), reference.cpu().numpy(), 1e-5))

# %% [markdown] tags=["navigation"]
# [← Hopper, backward](13_hopper_backward.ipynb) · [The map](00_start.ipynb) · [Rings →](15_rings.ipynb)
