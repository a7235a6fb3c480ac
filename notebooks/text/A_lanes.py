# %% [markdown] tags=["navigation"]
# [← Change it](17_change_it.ipynb) · [The map](00_start.ipynb) · [Errata →](B_errata.ipynb)

# %% [markdown]
# # A · Lanes, layouts, banks
#
# **Where exactly are the numbers of a tile?**
#
# Chapter 07 stopped at the warp, and this appendix looks inside it. Although it comes after chapter 17 in the list,
# chapters 12a to 13 use it, so read it before chapter 12a, or whenever you want to understand what the compiler has
# turned a kernel into.
#
# After this notebook you can
#
# - compute which lane holds a given score of a tile,
# - read a layout in compiled code, and recognise split-Q or split-K in it,
# - swizzle a tile by hand, and count bank conflicts,
# - add up the shared memory and the registers that a tile needs.
#
# *Time: 40 minutes with the function. Hardware: any laptop with NumPy. Before this: [07 · Warps](07_warps.ipynb). Two
# sentences mention launch options of Triton, which [08](08_triton_forward.ipynb) explains.*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np

from fa2_lab.machine import budget, chips, layouts
from fa2_lab.plots import block_budget
from fa2_lab.plots.show import show
from fa2_lab.records import read_json
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## Which thread holds a score?
#
# A warp has 32 threads, and a thread's number within its warp, 0 to 31, is its *lane*. All threads of a warp execute
# a tensor core instruction together, and the instruction fixes which lane receives which element of the result.
#
# | chip | architecture | instruction | executed by | result |
# | --- | --- | --- | --- | --- |
# | A100 | `sm_80` | `mma` | one warp | 16 × 8 |
# | H100, H200 | `sm_90` | `wgmma`, in machine code `HGMMA` | four warps, a *warpgroup* | 64 rows, 16 per warp |
#
# For both instructions, the result of one warp consists of pieces of 16 rows × 8 columns. Lane $4\,(r \bmod 8) +
# \lfloor (c \bmod 8) / 2 \rfloor$ holds the element in row r and column c of a piece:

# %%
def lane_of(r, c):
    return 4 * (r % 8) + c % 8 // 2


r, c = np.mgrid[:16, :8]
lanes = lane_of(r, c)
for row in (0, 5, 13):
    print(f"row {row:2}, columns 0 to 7, lanes:", *lanes[row].tolist())

# %% [markdown]
# So four neighbouring lanes of one warp share a row of scores. Row 13 has the same lanes as row 5, because each lane
# holds two elements in one row and two more in the row that is eight rows further down.

# %% [markdown]
# ## How do four lanes find a row's maximum?
#
# Each lane first takes the maximum of its own columns, and then the lanes have to compare their results. If one warp
# has the whole row, its lanes can do this without shared memory and without waiting for another warp. They use a
# *shuffle*, in which every lane reads a register of another lane of its warp.
#
# **Predict.** A row has 64 columns. How many shuffles does it take until all lanes of the row know its maximum?
#
# - ☐ 2
# - ☐ 5, since half of a warp's 32 lanes drop out each time
# - ☐ 6, since half of the 64 columns drop out each time
#
# <details><summary>Answer</summary>
#
# **2.** Only four lanes share a row, and each of them finds the maximum of its own 16 columns alone. In the first
# shuffle, neighbours exchange their maxima, the first lane with the second and the third with the fourth. In the
# second shuffle, the first lane exchanges with the third, and the second with the fourth.
# </details>
#
# The next figure follows a row of an *accumulator*, which is the set of registers in which four warps accumulate the
# result of a matmul. This accumulator holds 64 rows of S for 64 keys:

# %% tags=["nbval-ignore-output", "hide-input"]
show("row_reduction")

# %% [markdown]
# Each lane in the figure holds 16 columns of row 21. The registers of a lane are numbered. In each piece, registers 0
# and 1 hold its two elements in row 21, and registers 2 and 3 hold its two elements in row 29, eight rows further down.
# XOR determines which lane to read from. It compares two numbers bit by bit and gives 1 where they differ, so 20 XOR 1
# is 21, and 20 XOR 2 is 22.

# %% [markdown]
# ## Which warp holds which row?
#
# A *layout* describes which thread holds which element. In Triton, the compiler chooses it, and `fa2-lab xray 11`
# prints the choice for a kernel of chapter 10. In a layout, `warpsPerCTA = [4, 1]` means four warps along the rows
# and one along the keys (CTA is NVIDIA's word for a thread block). This is split-Q, because each warp has its own
# rows. With `[1, 4]`, each warp would have its own keys instead.
#
# The next cell prints such a layout from our forward kernel for `sm_90`. The lines below the layout summarise what the
# compiler chose for the package's own tiles, for both architectures. `versionMajor = 3` means `wgmma`. `instrShape` is
# a warp's part of one instruction, which covers 16 rows and 64 keys and sums over 16 of the d columns.

# %% tags=["nbval-ignore-output", "hide-input"]
compilations = read_json("layouts")["layouts"]
print(compilations[-1]["S"]["layout"])
for layout in compilations:
    rows, keys = layout["warpsPerCTA"]
    S, O = (" × ".join(map(str, layout[tensor]["shape"])) for tensor in "SO")
    print(f"{layout['target']}, d = {layout['d']:3}, {layout['instruction']:5}:", end=" ")
    print(f"S {S}, one matmul of P and V {O}, {rows} warps along rows, {keys} along keys")

# %% [markdown]
# In all four cases, each row of S belongs to one warp, so computing its maximum and its sum never involves another
# warp.
#
# With `wgmma`, this is always true for four warps, because the instruction itself gives each of them 16 rows. With
# `mma`, each warp multiplies on its own, and the compiler chooses the layout. The two matmuls form a chain, because the
# result of the first one becomes an operand of the second one, so the compiler gives both the same layout. It places
# all warps along the longer dimension of the *last* result in the loop, which is that of $PV$ (chapter 11). If this
# result has at least as many rows as columns, the warps share the rows. In other words, a row of S is in one warp if
# $B_r \ge d$, where d is rounded up to a power of two. A tile of 64 rows with d = 128 has too few rows, so it would get
# `[1, 4]`. For this reason, our kernel on `sm_80` computes O in two pieces of 64 columns. Each piece is a matmul of 64
# × 64, so the last matmul has as many rows as columns.

# %% [markdown]
# ## Does P have to move before the second matmul?
#
# S is the *result* of the first matmul. P is computed from it in place and is the *left operand* of the second
# matmul. Just as for a result, an instruction fixes which lane must hold which element of its left operand. NVIDIA's
# [description of mma](https://docs.nvidia.com/cuda/parallel-thread-execution/) specifies this for a 16 × 16 piece of
# P. Let g be the lane divided by 4, rounded down, and let h be the remainder. Then the lane holds rows g and g + 8,
# and columns 2h, 2h + 1, 2h + 8 and 2h + 9. `wgmma` requires the same of the 16 rows of each warp.
#
# **Predict.** How many elements of P must move to another lane?
#
# - ☐ none
# - ☐ half of them, namely those in columns 8 to 15
# - ☐ nearly all, since the layouts of a result and an operand differ
#
# <details><summary>Answer</summary>
#
# **none.** For example, columns 2 and 3 of row 5 are results in lane 21. So are columns 10 and 11, since 10 mod
# 8 = 2. As an operand, all four elements belong to g = 5 and h = 1, and thus to lane 4 · 5 + 1. So if a warp has
# whole rows, P passes from the softmax to the second matmul without leaving its registers, and it only has to be
# converted to 16 bits. With `[1, 4]`, however, P has to go through shared memory, because each warp then computes
# some columns of O and needs all keys for them.
# </details>

# %% [markdown]
# ## Why is K scrambled in shared memory?
#
# Shared memory consists of 32 *banks*, each of which delivers 4 bytes per step. Neighbouring groups of 4 bytes are in
# neighbouring banks, and bank 31 is followed by bank 0 again. On `sm_80`, the lanes load K for the tensor cores. In one
# access, the lanes load 16 bytes (a *chunk* of 8 elements) from each of eight rows, for example columns 0 to 7 of eight
# keys. On `sm_90`, the tensor cores read shared memory themselves, but they also read one chunk from each row. A chunk
# covers four banks, so eight chunks can be read in one step if they are in eight different groups of banks.
#
# With d = 64 and 2 bytes per element, a row of K has 128 bytes. These bytes cover all banks exactly once, and we call
# them a *line*, so a row with d = 128 has two lines. A line has eight places for chunks:
#
# | place in the line | 0 | 1 | 2 | … | 7 |
# | --- | --- | --- | --- | --- | --- |
# | bytes | 0 to 15 | 16 to 31 | 32 to 47 | … | 112 to 127 |
# | group of banks | 0 to 3 | 4 to 7 | 8 to 11 | … | 28 to 31 |
# | chunk of K, without a swizzle | columns 0 to 7 | columns 8 to 15 | columns 16 to 23 | … | columns 56 to 63 |
#
# Suppose that the rows are simply stored one after another, so that each chunk c is at place c. Then chunk 2 of every
# row begins at the same bank, so all eight reads need the same group of banks and have to wait for each other. This is
# called a *bank conflict*, and here the access takes eight steps instead of one.
#
# The fix is called a *swizzle*. Row r stores its chunk c at place $c \oplus (r \bmod 8)$, where $\oplus$ is XOR. The
# row is still complete, but chunk c of eight successive rows is now at eight different places:

# %% tags=["nbval-ignore-output", "hide-input"]
show("swizzle_xor")

# %% [markdown]
# The bottom row of the figure counts how many of the eight reads need each place. In Triton, the compiler arranges K
# this way on its own, and the checks at the end confirm this in four compiled kernels.

# %% [markdown]
# ## How large may a tile be?
#
# Our forward kernel keeps one copy of $q_i$ in shared memory. It also keeps n tiles of K and n tiles of V there, so
# that the next tiles can arrive while one is in use. Together, these are $(B_r + 2 n B_c) \cdot d$ elements of 2
# bytes. On Hopper, n is the launch option `num_stages`, while on an A100 or an RTX 4090, it is `num_stages` − 1, if
# `num_stages` is 2 or more. The reason is that on Hopper, a matmul with `wgmma` can still be reading a tile while the
# next copy begins, so Triton keeps one more buffer. But `wgmma` needs 64 rows. For a tile with only 32 rows, the
# compiler uses `mma` on Hopper as well, so n is again `num_stages` − 1. Several warps then share each row, so P also
# takes $B_r B_c$ elements of shared memory on its way to the second matmul.
#
# Registers hold $o_i$ and $s_{ij}$ in fp32, with one element per register, and $p_{ij}$ in 16 bits, with two elements
# per register. Each thread needs about 40 more registers for addresses and counters. In total, a thread needs about
# $40 + (B_r d + 1.5\, B_r B_c) / \text{threads}$ registers, and it can have 255.
#
# The figure shows which tiles fit if n = 2. In each cell, the shared memory is the first sum above, whereas the
# registers and the word *spills* tell what the compiler did for an H100 or H200 (`sm_90`) with `num_stages=2`. In the
# top row, with its 32 rows per tile, these compiled kernels therefore have n = 1. If the registers run out, the kernel
# still runs, but it *spills*, which means that it moves values to slow memory and back:

# %% tags=["nbval-ignore-output", "hide-input"]
show("block_budget")

# %% [markdown]
# Each cell uses four warps, or eight if the sum above gives more than 255 registers with four. The sum of registers is
# usually too low. For 32 × 128 at d = 128, for example, it is 120, whereas the compiler uses all 255 registers and
# still spills. So how far can you trust the sum? The next cell counts how many kernels spill, for all block sizes at
# both values of d, including the four that the figure marks *no room*:

# %% tags=["hide-input"]
measured = [(budget.forward_registers(*(k[x] for x in ("B_r", "B_c", "d", "warps"))),
             k["spills"] > 0) for k in read_json("compiled")["forward"]]
for words, low, high in (("below 120", 0, 120), ("from 120 to 255", 120, 256),
                         ("above 255", 256, np.inf)):
    spilling = [spills for registers, spills in measured if low <= registers < high]
    print(f"sum {words:16}: {sum(spilling):2} of {len(spilling):2} kernels spill")

# %% [markdown]
# So the sum decides only the clear cases. If it is more than 255, the kernel will spill, and if it is below 120, it
# will not. In between, the sum does not tell you, so compile the kernel with `fa2-lab xray` and read its number of
# spills. For example, a tile of 128 × 128 at d = 128 gets eight warps, so its sum is 200 (with four warps, it would be
# 360), and it still spills. A tile of 128 × 64 at the same d also gets eight warps, and it does not spill.
#
# If shared memory is too small, however, the kernel does not run at all. On an RTX 4090, for example, users have run
# into the error `out of resource: shared memory, Required: 131074, Hardware limit: 101376`
# ([meta-pytorch/attention-gym#14](https://github.com/meta-pytorch/attention-gym/issues/14)). This limit is 99 KiB for
# one thread block. An A100 allows 163 KiB per block and an H100 allows 227 KiB. The SM of an H100 has 228 KiB, of
# which 1 KiB per block is reserved.

# %% [markdown]
# ## Recap
#
# - Lane $4\,(r \bmod 8) + \lfloor (c \bmod 8) / 2 \rfloor$ holds row r, column c of a piece. Four lanes share each
#   row.
# - After two shuffles, all four lanes know the row's maximum or sum.
# - `warpsPerCTA = [4, 1]` is split-Q. In this layout, P is already in the lanes where the second matmul needs it.
#   With `mma`, the compiler chooses this layout only if the last matmul's result has at least as many rows as
#   columns.
# - A swizzle puts chunk c of row r at place $c \oplus (r \bmod 8)$, so a read takes one step instead of eight.
# - Tiles must fit into shared memory, or the kernel does not run. They must also fit into registers, or the kernel
#   spills.

# %% [markdown]
# ## Exercises
#
# **Build.** With d = 32, a row of K has 64 bytes, which is four chunks, or half a line. Two rows share a line, and
# row r uses half r mod 2. Where does row r store chunk c? Return the place in the line, 0 to 7, so that one chunk of
# eight rows is read in one step. Without a swizzle, the place is 4 (r mod 2) + c, and the read takes 4 steps.
#
# <details><summary>Hint</summary>
#
# The half begins at place 4 · (r mod 2), and it has four places. You can treat rows 0 and 1 alike, then rows 2 and 3,
# and so on.
# </details>

# %%
def place(r, c):  # row, chunk 0 to 3
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def steps_with_your_place(chunk):  # steps for a chunk of eight rows; 99 if two chunks collide
    if place(0, 0) is None:
        return None
    lines = [(r, r + 1) for r in (0, 2, 4, 6)]
    taken = [{place(r, c) for r in line for c in range(4)} for line in lines]
    wanted = [place(r, chunk) for r in range(8)]
    whole = all(places == set(range(8)) for places in taken)
    return max(map(wanted.count, wanted)) if whole else 99


steps_with_your_place.__name__ = "place"  # what the message calls it
words = "steps for chunk {} of eight rows. Which rows still share a place? (99 means that two chunks of a line share one.)"
check(steps_with_your_place, *(Case(words.format(c), (c,), 1) for c in range(4)))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def place(r, c):
#     return 4 * (r % 2) + (c ^ (r // 2 % 4))
# ```
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
for kernel in compilations:
    name = f"{kernel['target']}, d = {kernel['d']}"
    owners = layouts.parse(kernel["S"]["layout"]).owners(tuple(kernel["S"]["shape"]))
    r, c = np.indices(owners.lane.shape)
    verdict(f"{name}: lane_of names each score's lane", np.array_equal(owners.lane, lane_of(r, c)))
    verdict(f"{name}: each row belongs to one warp", (owners.warp == owners.warp[:, :1]).all())
    offsets = layouts.parse(kernel["K"]["layout"]).offsets(tuple(kernel["K"]["shape"]))
    groups, row = offsets[:8, :64:8] * 2 % 128 // 16, np.arange(8)
    verdict(f"{name}: chunk c of row r is at place c XOR r",
            np.array_equal(groups, row ^ row[:, None]))
    verdict(f"{name}: a chunk of eight rows takes one step",
            layouts.bank_conflicts(offsets[:8, 16]) == 1)
took = {(k["B_r"], k["B_c"], k["d"], k["warps"]): k["registers"]
        for k in read_json("compiled")["forward"]}
sums = {sizes: budget.forward_registers(*sizes) for sizes in took}
few = [took[sizes] > n for sizes, n in sums.items() if n <= 255]
verdict("the sum of registers is mostly too low", sum(few) > 0.6 * len(few))
needs = [budget.forward_registers(128, 128, 128, warps) for warps in (4, 8)]
verdict("128 × 128 needs 360 registers, or 200", needs == [360, 200])
verdict("above a sum of 255, all kernels spill, and below 120, none does",
        all(x == (n > 255) for n, x in measured if not 120 <= n <= 255))
verdict("32 × 128 takes 255 registers, not 120",
        (took[32, 128, 128, 4], sums[32, 128, 128, 4]) == (255, 120))
spilled = block_budget.compiled_spills()
spills = [spilled[128, B_r, B_c] > 0 for B_r, B_c in ((32, 128), (128, 128), (128, 64))]
verdict("32 × 128 and 128 × 128 spill, 128 × 64 does not", spills == [True, True, False])
given = [x.shared_per_block // 1024 for x in (chips.RTX_4090, chips.A100, chips.H100)]
verdict("a thread block can have 99, 163 and 227 KiB", given == [99, 163, 227])

# %% [markdown] tags=["navigation"]
# [← Change it](17_change_it.ipynb) · [The map](00_start.ipynb) · [Errata →](B_errata.ipynb)
