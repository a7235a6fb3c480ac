# %% [markdown] tags=["navigation"]
# [← Hopper, backward](13_hopper_backward.ipynb) · [The map](00_start.ipynb) · [Rings →](15_rings.ipynb)

# %% [markdown]
# # 14 · Decode
#
# **One query, a long cache: who does the work?**
#
# A language model generates one token at a time. The query of each new token attends to the keys of all tokens so far,
# which are kept in the *KV cache*. Chapter 06 introduced this case. One query makes only one row block per head, so a
# launch with one program per row block leaves most SMs idle. In this chapter, we write a kernel for it in Triton.
# First we split the keys, merge the partial results, and measure how much the splits gain. Then we give sequences of
# different lengths equal work, ask whether a row's result depends on the rest of its batch, and finally store the
# cache in pages. The ideas come from Flash-Decoding (splits), PagedAttention (pages) and Lean Attention (equal
# shares).
#
# After this notebook you can
#
# - estimate the cost of one token on any GPU from the number of bytes and FLOPs,
# - read a decode kernel whose programs share a head, and the kernel that merges their results,
# - read a cache through a block table, and name the memory that the kernel must not touch.
#
# *Time: 70 minutes. Hardware: any machine with Linux; without a GPU, the kernels run in Triton's interpreter. Measured
# numbers were recorded on an NVIDIA H200. Before this: [02 · Online softmax](02_online_softmax.ipynb), [06 ·
# Parallelism](06_parallelism.ipynb) and [08 · The Triton forward kernel](08_triton_forward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import math

import numpy as np
import torch

from fa2_lab import attention, attention_paged
from fa2_lab.kernels.ladder import r11_diagonal_first as rung
from fa2_lab.machine import chips, grid, splits
from fa2_lab.machine.rates import cost, rates
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import heads as reference
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output", "hide-input"]
# Setup: run this cell as well.
import triton
import triton.language as tl

LN2, LOWEST, NEG_INF = rung.LN2, rung.LOWEST, rung.NEG_INF
load_rows, visit = rung.load_rows, rung.visit
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))  # warns once

# %% [markdown]
# ## What does one token cost?
#
# Take one layer of a large model with 32 query heads, 8 K/V heads and d = 128. A *group* of four query heads shares
# each K/V head, which is called *grouped-query attention* (GQA, chapter 05). The sequence has 65,536 tokens so far, so
# each K/V head holds 65,536 keys and values of d elements, at two bytes per element. To generate the next token, the
# GPU has to read all of them once. The next cell divides these bytes by the 4.8 TB/s of an H200's memory, and the
# FLOPs by the 989 TFLOP/s of its tensor cores. Both limits are from the data sheet:

# %%
read = 2 * 2 * 65536 * 8 * 128  # K and V, two bytes each
flops = 4 * 65536 * 32 * 128  # q kᵀ and p v
print(f"{read / 1e6:.0f} MB to read: {read / 4.8e6:.0f} µs")
print(f"{flops / 1e9:.2f} GFLOP to compute: {flops / 989e6:.1f} µs")

# %% [markdown]
# **Predict.** Reading takes 50 times as long as computing. Which model makes this ratio smaller?
#
# - ☐ one with longer sequences, because it has more scores
# - ☐ one with more query heads for each K/V head
# - ☐ one with a larger d, because it has longer dot products
#
# <details><summary>Answer</summary>
#
# **one with more query heads for each K/V head.** A key and its value take 4d bytes, and each query of the group
# spends 4d FLOPs on them. So a group of n queries computes n FLOPs per byte, for any length and any d. In training,
# thousands of queries share a key, but in decoding, the GPU mainly reads.
# </details>
#
# We now mark two cases in the roofline of chapter 04, namely one query per key and a group of four queries per key:

# %% tags=["hide-input"]
show("rooflines_decode")

# %% [markdown]
# Both dots are far down the slope that DRAM sets, but the group of four is four times as high. The four queries of a
# group are consecutive in memory, so they can form four rows of *one* tile, and each key is read once for all of them.
# If each query head had its own program, as in the kernels of the ladder, every key would be requested four times. The
# tile of the kernel below has 16 rows, because the tensor cores multiply at least 16 rows at a time, so twelve of its
# rows are zeros. These zeros cost nothing here, because the tensor cores are idle most of the time anyway.

# %% [markdown]
# ## Are eight heads enough?
#
# With 8 K/V heads, 132 SMs and one program per head, most SMs would be idle. But a head has 1,024 tiles of 64 keys, so
# we can cut its tiles into *splits* and launch a program for each split (split-KV). How many programs run at once? That
# depends on the kernel. Here we count for the package's decode kernel, which is timed in the section *How near is the
# limit?* Each of its programs has four *stages*, and each stage holds a tile of K and a tile of V, 32 KiB together. The
# four stages take 128 KiB, which is more than half of an SM's shared memory, so only one program fits on an SM.
#
# The next cell schedules these programs with the model of chapter 06. Its unit of time is the time for one tile, and
# each program needs one extra unit to start. `end` is the time at which the last program ends, and `busy` is the share
# of all SMs' time that is spent on programs:

# %% tags=["hide-input"]
for n in (1, 16, 17, 33):
    ran = grid.schedule(splits.same_splits((1024,) * 8, n), 132)
    print(f"split into {n:2}: {8 * n:3} programs, waves: {ran.waves}", end=", ")
    print(f"end: {ran.makespan:4.0f}, busy: {ran.utilisation:4.0%}")

# %% [markdown]
# With 16 splits, the 128 programs just fit on the 132 SMs. With 17 splits, there are 136 programs, so the last four
# start a second wave. 33 splits fill two whole waves, but they finish no earlier than 16 splits do, because the
# programs of the second wave need their own unit of time to start. This model assumes that a program reads at the same
# speed, no matter how many other programs are reading. The section *How near is the limit?* shows what we measured.

# %% [markdown]
# ## What does a split leave behind?
#
# We divide the keys of a head by the number of splits, and round the result up to whole tiles. Each split gets this
# number of keys, its `share`, so split w reads the keys from $w \cdot share$ up to, but not including, $(w + 1) \cdot
# share$. Its program uses `load_rows` and `visit` from chapter 08, where row r sees the keys before `seen[r]`. Here,
# every row sees the keys before `last`.
#
# In chapter 06, each worker stored its finished result, with $o$ already divided by $\ell$. Here, a split stores $o$,
# m and $\ell$ as they are, so the merge divides only once. For each row of the group, these are d + 2 values.
# Together, they are the split's partial result, which we call a *part*. In memory, the d values of a row's $o$ come
# first, then m at position d, and then $\ell$ at position d + 1. As in chapter 08, m is a scaled score times $\log_2
# e$. `tl.num_programs(0)` is the number of splits.

# %%
@triton.jit
def leave_part(parts, part, o, l, m, group, d: tl.constexpr):
    row, column = tl.arange(0, 16), tl.arange(0, d)
    at = parts + (part * group + row) * (d + 2)  # (16,)
    tl.store(at[:, None] + column[None, :], o, mask=(row < group)[:, None])
    tl.store(at + d, m, mask=row < group)
    tl.store(at + d + 1, l, mask=row < group)


@triton.jit
def split_kernel(
    Q, K, V, parts, N_k, share, tau_log2, group, d: tl.constexpr, B_c: tl.constexpr
):
    w, head = tl.program_id(0), tl.program_id(1).to(tl.int64)  # a K/V head of the batch
    K, V = K + head * N_k * d, V + head * N_k * d
    q = load_rows(Q + head * group * d, 0, group, 16, d, True)  # (16, d), zeros below
    o, l = tl.zeros((16, d), tl.float32), tl.zeros((16,), tl.float32)
    m = tl.full((16,), LOWEST, tl.float32)
    last = tl.minimum((w + 1) * share, N_k)
    seen = tl.zeros((16,), tl.int32) + last
    for j in range(w * share, last, B_c):
        k_j = load_rows(K, j, last, B_c, d, True)
        v_j = load_rows(V, j, last, B_c, d, True)
        o, l, m = visit(o, l, m, q, k_j, v_j, seen - j, tau_log2, True)
    leave_part(parts, head * tl.num_programs(0) + w, o, l, m, group, d)

# %% tags=["hide-input"]
def normal(*shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(x).to(device, torch.float16)


def host(x):  # to NumPy, for comparing
    return x.double().cpu().numpy()

# %% [markdown]
# The function `split` allocates memory for the parts and fills it with NaN, so that we would notice a part that no
# program writes. Then it launches one program for each split of each K/V head:

# %%
def share_of(N_k, splits, B_c=16):  # in whole tiles
    return triton.cdiv(triton.cdiv(N_k, B_c), splits) * B_c


def split(q, k, v, splits):  # q is (batch, heads, 1, d)
    (batch, H, _, d), (_, H_kv, N_k, _) = q.shape, k.shape
    group, tau_log2 = H // H_kv, d**-0.5 / math.log(2)
    parts = torch.full((batch * H_kv, splits, group, d + 2), torch.nan, device=device)
    split_kernel[(splits, batch * H_kv)](
        q, k, v, parts, N_k, share_of(N_k, splits), tau_log2, group, d=d, B_c=16
    )
    return parts


q = normal(1, 8, 1, 16)
k, v = normal(1, 2, 200, 16, seed=1), normal(1, 2, 200, 16, seed=2)
parts = split(q, k, v, splits=5)
print("parts: (K/V heads, splits, rows, d + 2) =", tuple(parts.shape))
for w in range(5):
    m_w, l_w = parts[0, w, 0, 16:].tolist()
    print(f"head 0, row 0, split {w}: m {m_w:5.2f}, ℓ {l_w:5.2f}")

# %% [markdown]
# ## How do parts become one row?
#
# The program of each split has found its own maximum. The merge is the one from chapter 02, extended to several states
# at once. It takes the largest m of all parts and computes a factor $\beta = 2^{m_w - m}$ for each part w. Then it
# adds up $\beta\, o_w$ and $\beta\, \ell_w$ over the parts, and divides the first sum by the second. There is one
# program for each row of each K/V head, and thus one for each query head.

# %%
@triton.jit
def merge_kernel(parts, O, L, splits, group, room: tl.constexpr, d: tl.constexpr):
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w, column = tl.arange(0, room), tl.arange(0, d)  # room: a power of two ≥ splits
    at = parts + ((head * splits + w) * group + row) * (d + 2)  # (room,)
    there = w < splits
    o_w = tl.load(at[:, None] + column[None, :], mask=there[:, None], other=0.0)
    m_w = tl.load(at + d, mask=there, other=LOWEST)  # (room,)
    l_w = tl.load(at + d + 1, mask=there, other=0.0)  # (room,)
    m = tl.max(m_w, 0)
    beta = tl.exp2(m_w - m)  # (room,)
    l, o = tl.sum(beta * l_w, 0), tl.sum(beta[:, None] * o_w, 0)
    divisor = tl.where(l == 0.0, 1.0, l)  # no key at all: O = 0 and L = −∞
    o = (o / divisor).to(O.dtype.element_ty)
    tl.store(O + (head * group + row) * d + column, o)
    L_row = tl.where(l == 0.0, NEG_INF, (m + tl.log2(divisor)) * LN2)
    tl.store(L + head * group + row, L_row)

# %%
def merge(parts, q):  # the launch
    (heads, splits, group, _), d = parts.shape, q.shape[-1]
    O = torch.full_like(q, torch.nan)
    L = torch.full(q.shape[:3], torch.nan, device=device)
    room = triton.next_power_of_2(splits)
    merge_kernel[(heads, group)](parts, O, L, splits, group, room=room, d=d)
    return O, L

# %% tags=["hide-input"]
right, _ = reference.forward(*map(host, (q, k, v)), stage="naive")

# %% [markdown]
# **Predict.** 200 keys fill 13 tiles of 16, so with 40 splits, most splits get no tile. The part of such a split has
# m = $-10^{30}$ and $\ell = 0$. What effect does it have on the merge?
#
# - ☐ it produces NaN, because ℓ is 0
# - ☐ it pulls the row towards 0, because the mean is over 40 parts
# - ☐ nothing, because its factor is 0
#
# <details><summary>Answer</summary>
#
# **nothing, because its factor is 0.** $\beta = 2^{-10^{30} - m}$ is zero if m is the maximum of real scores. If no
# part of a row has a key, every $\beta$ is 1, but then every $o$ and $\ell$ is 0.
#
# ```python
# for n in (1, 2, 5, 40):
#     O, _ = merge(split(q, k, v, n), q)
#     print(f"{n:2} splits: {host(O).flat[-1]:.3f}, expected {right.flat[-1]:.3f}")
# ```
#
# ```text
#  1 splits: 0.142, expected 0.142
#  2 splits: 0.142, expected 0.142
#  5 splits: 0.142, expected 0.142
# 40 splits: 0.142, expected 0.142
# ```
# </details>
#
# The parts are merged in a fixed order, so the same number of splits gives the same result every time, bit for bit.

# %% [markdown]
# ## How near is the limit?
#
# Now we time the package's kernel on the cache from the first section. We compare it with a *pure read*, a kernel
# that reads the same number of bytes and keeps nothing. In bytes per second, a pure read is about as fast as a copy.
# Neither reaches the data sheet's bandwidth, from which we computed the 56 µs above.

# %% tags=["hide-input"]
record = load("decode")
curve = dict(zip(record.curves["programs"], record.curves["microseconds"], strict=True))
group = cost("decode", N=65536, N_q=4, heads=8, B_r=16)
each, copy = group.dram_bytes / 8 / curve[8] / 1e3, 1e3 * record.ceilings["copy TB/s"]

# %% [markdown]
# **Predict.** How does the time change as we go from 8 to 16, 32, 64, 128 and 256 programs?
#
# - ☐ it halves until about every SM has a program, and then hardly changes
# - ☐ it halves each time, since twice as many programs share the work
# - ☐ it hardly falls, since memory is the limit from the start
#
# <details><summary>Answer</summary>
#
# **it halves until about every SM has a program, and then hardly changes.** One program reads slowly, because it
# works on one tile after another. Together, about a hundred programs read as fast as a copy, so additional programs
# gain nothing. A second wave costs little if it is nearly full, as with 256 programs. With 17 splits, by contrast,
# the four programs of the second wave would be the only ones reading.
#
# ```python
# print(f"each of 8 programs reads {each:.0f} GB/s, a copy on this GPU {copy:,.0f} GB/s")
# print(f"a copy's speed is that of {copy / each:.0f} programs")
# for programs, time in curve.items():
#     if programs <= 256:
#         print(f"{programs:3.0f} programs: {time:3.0f} µs")
# ```
#
# ```text
# each of 8 programs reads 43 GB/s, a copy on this GPU 4,271 GB/s
# a copy's speed is that of 99 programs
#   8 programs: 776 µs
#  16 programs: 394 µs
#  32 programs: 202 µs
#  64 programs: 107 µs
# 128 programs:  68 µs
# 256 programs:  71 µs
# ```
# </details>
#
# The next figure shows all recorded numbers of programs, up to 2,048:

# %% tags=["hide-input"]
show("decode_programs")

# %% [markdown]
# The dots are measured, and the dashed line is a model. In the model, the two launches take 8 µs. After that, each
# program reads at its own speed, but all programs together read no faster than a copy. For each head that a program
# begins, the model adds the time of one tile. Since the speed of one program is taken from the first dot, the line
# passes through that dot by construction, and only the rest of the line is a prediction, which differs from the
# measured times by at most 6%.
#
# Beyond 128 programs, the dots rise slowly to about 80 µs, because there are more programs to start and more parts to
# merge. The model contains the starts, but not the merge. Its line ends at 512 programs, because with fewer than 16
# tiles per program, rounding to whole tiles would dominate the model.
#
# Why does a single program not read faster, although it has an SM to itself? We can only narrow this down. There are
# four candidates, namely DRAM, the path from L2 into the SM, the wait for tiles, and the program's own work on each
# tile. The first three lines of the next output exclude DRAM and the path from L2. To tell the other two candidates
# apart, we also timed the kernel with other numbers of stages, which the last lines show:

# %% tags=["hide-input"]
from fa2_lab.kernels.decode.split_rules import tile_bytes

# bytes; GB/s
tile, path = tile_bytes(64, d=128, itemsize=2), rates(chips.H200).l2 / chips.H200.SMs / 1e9
print(f"each of 8 programs reads {each:.0f} GB/s, so a tile of K and V, {tile // 1024} KiB, "
      f"takes {tile / each / 1e3:.2f} µs")
print(f"together they read {8 * each / copy:.0%} of a copy's speed")
print(f"L2 delivers {path:.0f} GB/s to each SM, even if all SMs load at the same time")
stages = dict(zip(record.curves.get("stages", ()), record.curves.get("GB/s of a program", ()),
                  strict=True))
for n, speed in stages.items():
    print(f"with {n:.0f} stages, each of 8 programs reads {speed:.0f} GB/s")

# %% [markdown]
# Eight programs read only a small fraction of what DRAM can deliver, and L2 could deliver more to each SM. So a
# program either waits for its tiles or is busy with them. The two possibilities predict different effects of the
# stages:
#
# - **It waits.** The program works on the tile in one of its stages, while the tiles for the other stages are in
#   flight. If the work took no time, the speed would be set by the tiles in flight alone. By *Little's law*, it would
#   be their bytes divided by the *latency*, the time that a tile takes to arrive. With 2, 3, 4 and 6 stages, 1, 2, 3
#   and 5 tiles are in flight, so a program would read 2, 3 and 5 times as fast with 3, 4 and 6 stages as with 2.
#
# - **It is busy.** For each tile, the program computes S, then the softmax, and then P V. Each of these steps waits for
#   the previous one, and the program goes on to the next tile only when all three are done. If this takes longer than
#   a tile takes to arrive, further stages change nothing.
#
# The measurement shows both effects. With three stages instead of two, a program is 1.4 times as fast, so with two
# stages, it does wait for its tiles. With more than three stages, however, it hardly becomes any faster. So from three
# stages on, it is busy, and the work on a tile takes about 0.76 µs.
#
# For our purpose, the answer does not matter, because the fix is the same in both cases. While one program waits or
# works, programs on other SMs can do the same. About a hundred of them read as fast as a copy, and that is why we
# split the keys.

# %% [markdown]
# The next output shows what share of a pure read's speed our decode kernel reaches. Each line gives the number of
# sequences and of keys per sequence, the numbers of query heads and of K/V heads, and d:

# %% tags=["hide-input"]
rows = [row for row in record.rows if row.direction == "decode"]
for row in sorted(rows, key=lambda row: row.problem["bytes"]):
    p, share = row.problem, row.ratio("fa2_lab", "reading alone")
    print(f"{p['batch']:2} × {p['N_k']:6,} keys, {p['heads']}/{p['kv_heads']} heads, d = "
          f"{p['d']:3}: {share:.0%}")

# %% [markdown]
# If the cache is short, a larger share of the time is spent on the two launches and on waiting for each program's
# first tile.

# %% [markdown]
# ## What if the lengths differ?
#
# So far, all heads have had the same number of keys. But in a batch, every sequence has its own length. If each head
# gets the same number of splits, short heads get programs that have nothing to do. For unequal lengths, the package
# therefore hands out *equal shares*, a technique that Lean Attention uses and that is also called *stream-K*. This
# technique lays the work of all heads end to end and cuts it into equal pieces, so a program can finish one head and
# begin the next. In the figure, four programs share five heads, which have 10, 3, 0, 12 and 2 tiles. Each tile shows
# the number of the program that reads it:

# %% tags=["hide-input"]
show("decode_shares")

# %% [markdown]
# To share the work, we count each tile as one unit and add one unit per head. Even the empty head counts, because some
# program must write its O. In total, there are 27 + 5 = 32 units, so each of the four programs gets 8. For example,
# program 1 gets 3 units for the last tiles of head 0, 1 + 3 for head 1, and 1 for the empty head 2. Programs 1 and 3
# continue a head that another program began. We add no unit for such a second start, so that the number of units does
# not depend on the number of programs. The output in the section *Are eight heads enough?* counts differently, because
# there every program gets one unit for its start. Only heads 0 and 3 are read by two programs, so only these two heads
# need a merge.

# %% [markdown]
# ## Is a row the same in another batch?
#
# The number of splits is chosen for speed, and the choice depends on the batch. A batch of four sequences has four
# times as many heads as a single sequence, so fewer splits per head are enough to fill the GPU. The package's rule
# chooses the following numbers of splits, if one program fits on each of 132 SMs:

# %%
from fa2_lab.kernels.decode.split_rules import splits_of_head

for batch in (1, 2, 4, 8, 16):
    print(f"{batch:2} × 8 heads of 1,024 tiles: {splits_of_head(132, 8 * batch, 1024):2} "
          "splits per head")

# %% tags=["hide-input"]
q4, k4, v4 = normal(4, 8, 1, 16,
                    seed=6), normal(4, 2, 8192, 16, seed=7), normal(4, 2, 8192, 16, seed=8)


def apart(**asked):  # O of the first sequence: alone, and within the batch of four
    alone, within = (attention(q4[:n], k4[:n], v4[:n], **asked)[0].float() for n in (1, 4))
    changed, most = (alone != within).float().mean(), (alone - within).abs().max()
    return (
        f"{changed:.0%} of the numbers of O differ, by {most:.0e} at most"
        if changed
        else "all bits of O agree"
    )

# %% [markdown]
# **Predict.** We decode a sequence with `attention()`, first alone and then in a batch with three others of the same
# length. No row reads the keys of another sequence. What happens to this sequence's O?
#
# - ☐ nothing, because its inputs are the same
# - ☐ some of its last bits change
# - ☐ it changes visibly, because the parts are merged in a different order
#
# <details><summary>Answer</summary>
#
# **some of its last bits change.** The exact sums are the same, but each addition rounds, and a different number of
# splits puts the additions in a different order.
#
# ```python
# print(apart())
# ```
#
# ```text
# 46% of the numbers of O differ, by 3e-05 at most
# ```
# </details>
#
# The kernels of this chapter show where the differences come from. A row that is cut into five splits is rounded
# differently from one that is not cut, for two reasons. Its terms are added in a different order, and p is rounded to
# 16 bits relative to a different maximum. Above, fewer than half of the numbers of O differed, because `attention()`
# rounds O to 16 bits at the end, and this rounding hides most of the differences. To see all of them, the next cell
# stores O in fp32:

# %% tags=["nbval-ignore-output"]
# O of all rows, in fp32
few, many = (merge(split(q, k, v, n), q.float())[0].flatten() for n in (1, 5))
at = (few - many).abs().argmax()
print(f"number {at} of O: {few[at]:.9f} with 1 split, {many[at]:.9f} with 5")
print(f"in fp32, {(few != many).float().mean():.0%} of all numbers of O differ")

# %% [markdown]
# So the last bits of an answer can depend on which other requests are being served at the same time, although each
# kernel is deterministic. If two tokens are almost equally likely, a language model that always takes the most likely
# token can then write a different text. A kernel whose rows do not depend on the batch is called *batch-invariant*.
#
# To get such a kernel, we must choose the number of splits without looking at the batch. `attention()` and
# `attention_paged()` accept this number as `num_splits`, which is also its name in flash-attn. Split w of a sequence
# then reads the tiles w, w + `num_splits`, … of this sequence, regardless of the other sequences and the number of
# SMs. With `num_splits`, the package also chooses the tile size without looking at the batch, and it merges the parts
# in the order of their indices.
#
# Why does a split read every `num_splits`-th tile, and not one contiguous range, as in `split_kernel` above? The
# programs of a head start together, so the tiles that they read at one moment are then neighbours in memory. Without
# `num_splits`, the package assigns the tiles in the same way if all sequences have the same length and the splits fill
# the GPU, as in the batches listed at the start of this section. Otherwise, it hands out the equal shares of the
# previous section.

# %%
for n in (1, 8):
    print(f"num_splits={n}: {apart(num_splits=n)}")

# %% [markdown]
# Batch invariance has a cost, because one number of splits has to serve all batches. If the number is small, a single
# sequence leaves SMs idle. In the model, a sequence of 1,024 tiles per head ends after 1,025 units with one split, but
# after 65 units with 16 splits.
#
# If the number is large, a large batch writes and merges parts that it does not need. A part is written once and read
# once, in fp32, and it has d + 2 values for each of the group's four rows. The next cell divides these bytes, for all
# splits of a head, by the bytes of the head's keys and values:

# %% tags=["hide-input"]
from fa2_lab.kernels.decode.split_rules import partial_bytes

print("splits per head      4     16     32")
for N_k in (65536, 8192, 2048):
    added = (partial_bytes(rows=4, d=128) * n / tile_bytes(N_k, d=128, itemsize=2)
             for n in (4, 16, 32))
    print(f"{N_k:6,} keys    " + "".join(f"{x:7.1%}" for x in added))

# %% [markdown]
# With a long cache, the parts hardly matter. With 2,048 keys, however, each of 32 splits reads a single tile of 64 keys
# and leaves a part that is about an eighth as large, counting both its write and its read.
#
# What does that cost in time? On an H200, we timed `attention` with a fixed number of splits, for 32 query heads that
# share 8 K/V heads, and divided by the time that it takes if it chooses the number itself. A ratio of 2.00 would mean
# that the call takes twice as long with the fixed number:

# %% tags=["hide-input"]
fixed = {}  # {number of splits: {(keys, sequences): how many times as long}}
for row in load("decode").rows:
    if row.direction == "splits":
        for name in (name for name in row.values if name != "fa2_lab"):
            place = row.problem["N_k"], row.problem["batch"]
            fixed.setdefault(int(name.split()[0]), {})[place] = row.ratio("fa2_lab", name)
print("keys      sequences" + "".join(f"{n:6} split{'s' * (n > 1):1}" for n in fixed))
for N_k, batch in fixed[1]:
    print(f"{N_k:6,}{batch:13}" + "".join(f"{found[N_k, batch]:13.2f}" for found in fixed.values()))

# %% [markdown]
# With a single split, a single sequence takes up to ten times as long. The model of the section *Are eight heads
# enough?* predicts 1,025 / 65 = 16 times, because it does not know that the 128 programs of 16 splits together reach
# the limit of DRAM. With 16 sequences or more, a single split costs next to nothing. With 16 splits, the batches in
# the table take at most 12% longer, and with 16,384 keys or more, at most 3%. With 32 splits, calls with short caches
# take longer still, because their parts are no longer small compared with the cache. So if rows must not depend on the
# batch, choose the number of splits that suits a single sequence. Unless the caches are short, this number also costs
# little in large batches.

# %% [markdown]
# ## Where is key 20?
#
# So far, the keys of a sequence have been contiguous in memory. But when a sequence begins, its final length is not
# known. If every sequence reserved memory for the maximum length, most of that memory would stay empty. Servers
# therefore cut the cache into *pages* of, for example, 16 keys, and hand them out as sequences grow. For each sequence,
# a *block table* lists the page with its first 16 keys, the page with the next 16, and so on. For example, where is key
# 20 if the table is 4, 0, 5? It is in page 0, because 20 // 16 = 1 and entry 1 of the table is 0. Within that page, it
# is in row 4, because 20 % 16 = 4.

# %%
@triton.jit
def load_keys(
    X, table, first, last, kv_head, H_kv,
    page: tl.constexpr, d: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    key = first + tl.arange(0, B_c)
    number = tl.load(table + key // page, mask=key < last, other=0).to(tl.int64)
    row = (number * page + key % page) * H_kv + kv_head  # X: (page, row, K/V head, d)
    at = X + row[:, None] * d + tl.arange(0, d)[None, :]
    return tl.load(at, mask=(key < last)[:, None], other=0.0)

# %% [markdown]
# The paged kernel is `split_kernel` with this load. Each sequence has its own length and its own row of `width` entries
# in the table. You have seen the other lines before, so read only those with `table`, `lengths` or `load_keys`:

# %%
@triton.jit
def paged_kernel(
    Q, K, V, parts, table, lengths, width, share, tau_log2, group, H_kv,
    page: tl.constexpr, d: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    w, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    table += head // H_kv * width  # of this sequence
    q = load_rows(Q + head * group * d, 0, group, 16, d, True)
    o, l = tl.zeros((16, d), tl.float32), tl.zeros((16,), tl.float32)
    m = tl.full((16,), LOWEST, tl.float32)
    last = tl.minimum((w + 1) * share, tl.load(lengths + head // H_kv))
    seen = tl.zeros((16,), tl.int32) + last
    for j in range(w * share, last, B_c):
        k_j = load_keys(K, table, j, last, head % H_kv, H_kv, page, d, B_c)
        v_j = load_keys(V, table, j, last, head % H_kv, H_kv, page, d, B_c)
        o, l, m = visit(o, l, m, q, k_j, v_j, seen - j, tau_log2, True)
    leave_part(parts, head * tl.num_programs(0) + w, o, l, m, group, d)

# %%
def decode_paged(q, k_pages, v_pages, table, lengths, splits):  # both launches
    (batch, H, _, d), (_, page, H_kv, _) = q.shape, k_pages.shape
    group, width = H // H_kv, table.shape[1]
    parts = torch.full((batch * H_kv, splits, group, d + 2), torch.nan, device=device)
    share, tau_log2 = share_of(width * page, splits), d**-0.5 / math.log(2)
    paged_kernel[(splits, batch * H_kv)](
        q, k_pages, v_pages, parts, table, lengths, width, share, tau_log2,
        group, H_kv, page=page, d=d, B_c=16,
    )  # fmt: skip
    return merge(parts, q)

# %% [markdown]
# In the next example, three sequences have 37, 0 and 48 keys. The second sequence has no page, so its entries in the
# table are −1. The unused rows of the pages hold NaN. For each sequence, we print one number of O:

# %% tags=["hide-input"]
lengths = torch.tensor([37, 0, 48], device=device, dtype=torch.int32)
table = torch.tensor([[4, 0, 5], [-1, -1, -1], [2, 6, 1]], device=device).int()
q3, k3 = normal(3, 8, 1, 16, seed=4), normal(3, 2, 48, 16, seed=1)
v3 = normal(3, 2, 48, 16, seed=2)
k_pages, v_pages = torch.full((2, 7, 16, 2, 16), torch.nan, device=device).half()
for b, n in enumerate(lengths.tolist()):
    for key in range(n):
        at = table[b, key // 16], key % 16
        k_pages[at], v_pages[at] = k3[b, :, key], v3[b, :, key]
O3, L3 = decode_paged(q3, k_pages, v_pages, table, lengths, splits=2)
for b, n in ((0, 37), (2, 48)):
    of_b = q3[b : b + 1], k3[b : b + 1, :, :n], v3[b : b + 1, :, :n]
    want, _ = reference.forward(*map(host, of_b), stage="naive")
    got = host(O3[b]).flat[-1]
    print(f"sequence {b}, {n} keys: {got:.3f}, expected {want.flat[-1]:.3f}")
print("sequence 1, no key: O =", O3[1].abs().max().item(), " L =", L3[1].max().item())

# %% [markdown]
# No program reads the entries −1, because the loop over the second sequence's keys has no iterations. Unused rows must
# not be loaded at all, since 0 · NaN is NaN, so not even a weight of 0 would help. The load from the table is masked
# as well, because a tile can be longer than a page, and its last keys can then be past the end of the table.

# %% [markdown]
# ## Recap
#
# - A query does about one FLOP for each byte it reads, so memory sets the pace.
# - The queries of a group are rows of one tile, so each key is read once for all of them.
# - A single program reads at about 1% of a copy's speed, because it waits for its tiles or works on them, one after
#   another. Splits create more programs, and about a hundred of them read as fast as an H200 can.
# - If lengths differ, lay all work end to end and cut it into equal shares.
# - Each split stores a part (o, m, ℓ), and a second kernel merges the parts. The number of splits decides the last
#   bits, so these can depend on the batch.
# - Pages and a block table only change where a row is stored.

# %% [markdown]
# ## Exercises
#
# **Build.** Sometimes you can only merge finished results, as in chapter 06. For each part w, you then have the
# divided output $O_w$ and its $L_w$. Merge the parts, and return O and L of the row. A part without keys has L = −∞,
# and this can be true of all parts of a row.

# %%
def finished(O_w, L_w):  # (parts, d), (parts,)
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
row0 = host(parts[0, :, 0])  # the five parts of head 0, row 0: (5, d + 2)
O_w, L_w = row0[:, :16] / row0[:, 17:], (row0[:, 16] + np.log2(row0[:, 17])) * math.log(2)
whole = right[0, 0, 0], np.logaddexp.reduce(L_w)
empty, nothing = (np.vstack([O_w, 0 * O_w[0]]),
                  np.append(L_w, -np.inf)), (0 * O_w, 0 * L_w - np.inf)
check(finished, Case("five parts. Is their plain mean right if their L differ?", (O_w, L_w), whole),
      Case("one more part, without keys. What is its weight?", empty, whole),
      Case("five parts without keys: O = 0, L = −∞. What do you subtract?", nothing,
           (0 * O_w[0], np.array(-np.inf))),
      Case("scores near 1,000. What is e^1,000?", (O_w, L_w + 1000), (whole[0], whole[1] + 1000)),
      tolerance=2e-3, names=("O", "L"))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def finished(O_w, L_w):
#     top = L_w.max()
#     weight = np.exp(L_w - (top if np.isfinite(top) else 0))
#     total = weight.sum()
#     return weight @ O_w / (total or 1), top + np.log(total) if total else top
# ```
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
paged = q3, k_pages, v_pages, table, lengths
by_rows = host(attention_paged(*paged, backend="reference"))
verdict("the number of splits changes O by no more than 16 bits can round away",
        0 < (few - many).abs().max() < 5e-4)
for n in (1, 3):
    O, L = merge(split(q, k, v, n), q)
    theirs = attention(q, k, v, return_lse=True)
    verdict(f"{n} splits: O = attention()", close(host(O), host(theirs[0]), 2e-3))
    verdict(f"{n} splits: L = attention()", close(host(L), host(theirs[1]), 1e-5))
    O, _ = decode_paged(*paged, n)
    verdict(f"{n} splits of pages: O is right", close(host(O), by_rows, 2e-3))

# %% tags=["hide-input"]
unit, seconds = group.limit(chips.H200)
verdict("56 µs, limited by DRAM", (unit, round(1e6 * seconds)) == ("DRAM", 56))
verdict("8 programs read less than a tenth of a copy's speed, and L2 could deliver more to "
        "each SM", 8 * each < copy / 10 and each < 0.7 * path)
verdict("a tile takes 0.76 µs; a second tile in flight makes a program "
        f"{stages[3] / stages[2]:.2f} times as fast, and more hardly help",
        round(tile / each / 1e3, 2) == 0.76 and 1.4 < stages[3] / stages[2] < 1.6
        and stages[6] < 1.05 * stages[3])
verdict("one split is up to ten times slower for one sequence, and costs nothing from 16 "
        "sequences on", 9 < max(fixed[1].values()) < 11
        and all(ratio < 1.03 for (_, batch), ratio in fixed[1].items() if batch >= 16))
verdict("16 splits cost at most 12%, and at most 3% from 16,384 keys on",
        max(fixed[16].values()) < 1.125
        and all(ratio < 1.035 for (N_k, _), ratio in fixed[16].items() if N_k >= 16384))
verdict("about 100 programs use all of the memory's bandwidth", 80 < copy / each < 130)
verdict("the time halves up to 64 programs",
        all(1.7 < curve[n] / curve[2 * n] < 2.2 for n in (8, 16, 32)))
after = [curve[n] for n in (128, 256, 512, 1024, 2048)]
verdict("beyond 128 programs, it rises slowly to about 80 µs", after == sorted(after)
        and 75 < after[-1] < 85)
near = [r.ratio("fa2_lab", "reading alone") for r in rows if r.problem["bytes"] > 2e8]
verdict("for long caches, decode comes close to a pure read", min(near) > 0.85)

# %% [markdown] tags=["navigation"]
# [← Hopper, backward](13_hopper_backward.ipynb) · [The map](00_start.ipynb) · [Rings →](15_rings.ipynb)
