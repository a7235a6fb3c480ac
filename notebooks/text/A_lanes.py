# %% [markdown] tags=["navigation"]
# [← The same loop, other masks](16_masks.ipynb) · [The map](00_start.ipynb) · [Errata →](B_errata.ipynb)

# %% [markdown]
# # A · Lanes, layouts, banks
#
# **Where exactly are the numbers of a tile?**
#
# Chapter 07 stopped at the warp. This appendix goes inside. Read it before chapters 12a to 13, or when you want to read what
# a compiler made of a kernel.
#
# After this notebook you can
#
# - say which lane holds a given score of a tile,
# - read a layout in compiled code, and tell split-Q from split-K in it,
# - swizzle a tile by hand, and count bank conflicts,
# - add up the shared memory and the registers that a tile needs.
#
# *Time: 25 minutes. Hardware: any laptop, NumPy alone. Before this: [07 · Warps](07_warps.ipynb).*

# %% tags=["hide-input"]
import numpy as np

from fa2_lab.machine import budget, chips, layouts
from fa2_lab.plots import block_budget, row_reduction, swizzle_xor
from fa2_lab.plots.show import show
from fa2_lab.records import recorded
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## Which thread holds a score?
#
# A warp has 32 threads. The number of a thread in its warp, 0 to 31, is its *lane*. A whole warp executes an instruction
# of the tensor cores together, and the instruction fixes which lane gets which number of the result.
#
# | chip | name of its generation | instruction | who | result |
# | --- | --- | --- | --- | --- |
# | A100 | `sm_80` | `mma` | one warp | 16 × 8 |
# | H100, H200 | `sm_90` | `wgmma`, in machine code `HGMMA` | four warps, a *warpgroup* | 64 rows, 16 for each warp |
#
# In both, a warp's result consists of pieces of 16 rows × 8 columns. Row r, column c of a piece lies in lane
# $4\,(r \bmod 8) + \lfloor (c \bmod 8) / 2 \rfloor$:

# %%
def lane_of(r, c):
    return 4 * (r % 8) + c % 8 // 2


r, c = np.mgrid[:16, :8]
lanes = lane_of(r, c)
for row in (0, 5, 13):
    print(f"row {row:2}, columns 0 to 7, lanes:", *lanes[row].tolist())

# %% [markdown]
# So a row of scores belongs to four neighbouring lanes of one warp. Row 13 has the same lanes as row 5: each lane holds two
# numbers in one row, and two eight rows below.

# %% [markdown]
# ## How do four lanes find a row's maximum?
#
# Each lane first takes the maximum of the columns it holds. Then lanes have to compare. If one warp has the whole row, they
# need no shared memory for it, and need not wait for another warp: in a *shuffle*, every lane reads a register of another
# lane of its warp.
#
# **Predict.** A row has 64 columns. How many shuffles does it take until all lanes of the row know its maximum?
#
# - ☐ 2
# - ☐ 5: half of a warp's 32 lanes drop out each time
# - ☐ 6: half of the 64 columns drop out each time
#
# <details><summary>Answer</summary>
#
# **2.** Only four lanes share a row. Each goes through its own 16 columns alone. Then neighbours exchange (the first lane
# with the second, the third with the fourth), and then pairs (the first with the third, the second with the fourth).
# </details>

# %% tags=["nbval-ignore-output", "hide-input"]
show(row_reduction.draw(**row_reduction.data()))

# %% [markdown]
# The picture follows a row of an *accumulator*, the registers of four warps in which a product is summed up. This one
# is 64 rows of S, with 64 keys. A lane has 16 columns of row 21. (Its registers 2 and 3 hold row 29.) XOR names the lane to
# read from: it compares two numbers bit by bit and gives 1 where they differ, so 20 XOR 1 is 21, and 20 XOR 2 is 22.

# %% [markdown]
# ## Which warp holds which row?
#
# A *layout* says which thread holds which number. In Triton the compiler chooses it. `fa2-lab xray 11` prints what it chose
# for a kernel of chapter 10. `warpsPerCTA = [4, 1]` means four warps along the rows and one along the keys: split-Q, each warp
# has rows of its own. (With `[1, 4]`, each warp has keys of its own. CTA is NVIDIA's word for a thread block.) Below is such
# a line of our forward kernel for `sm_90`, and what the compiler chose for the tiles that the package uses on both chips.
# `versionMajor = 3` is `wgmma`, and `instrShape` a warp's part of one instruction: 16 rows, 64 keys, a sum over 16 of d.

# %% tags=["nbval-ignore-output", "hide-input"]
compilations = recorded("layouts")["layouts"]
print(compilations[-1]["S"]["layout"])
for layout in compilations:
    rows, keys = layout["warpsPerCTA"]
    S, O = (" × ".join(map(str, layout[tensor]["shape"])) for tensor in "SO")
    print(f"{layout['target']}, d = {layout['d']:3}, {layout['instruction']:5}:", end=" ")
    print(f"S {S}, one product of P and V {O}: {rows} warps along rows, {keys} along keys")

# %% [markdown]
# In all four, a row of S lies in one warp. So its maximum and its sum never have to leave that warp.
#
# With `wgmma`, this is always so for four warps, because the instruction itself gives each of them 16 rows. With `mma`,
# each warp multiplies by itself, and the compiler decides by the last of the products that feed one another, $PV$: the
# warps share rows if that product has at least as many rows as columns. A tile of 64 rows with d = 128 has too few, and
# would get `[1, 4]`. So on `sm_80`, our kernel makes O in two pieces of 64 columns, each by a product of 64 × 64.

# %% [markdown]
# ## Does P have to move before the second product?
#
# S is the *result* of the first product. P, computed from it in place, is the *left factor* of the second one. An
# instruction also fixes which lane must hold which number of its left factor. For a 16 × 16 piece of P, NVIDIA's
# [description of mma](https://docs.nvidia.com/cuda/parallel-thread-execution/) says: a lane holds rows g and g + 8, where
# g is the lane divided by 4, rounded down, and columns 2h, 2h + 1, 2h + 8 and 2h + 9, where h is the remainder. `wgmma`
# asks the same of the 16 rows of each warp.
#
# **Predict.** How many numbers of P must change lanes?
#
# - ☐ none
# - ☐ half of them: those of columns 8 to 15
# - ☐ nearly all: a result has another layout than a factor
#
# <details><summary>Answer</summary>
#
# **none.** Row 5, columns 2 and 3, for example, are the result of lane 21. So are columns 10 and 11, since 10 mod 8 = 2. As
# a factor all four belong to g = 5 and h = 1: lane 4 · 5 + 1. So where a warp has whole rows, P goes from softmax into the
# second product without leaving its registers. It is only converted to 16 bits. (With `[1, 4]`, P goes through shared
# memory: each warp then makes some columns of O, and needs all keys for them.)
# </details>

# %% [markdown]
# ## Why is K scrambled in shared memory?
#
# Shared memory consists of 32 *banks*. Each gives 4 bytes in a step. Neighbouring groups of 4 bytes lie in neighbouring banks,
# and after bank 31 comes bank 0. On `sm_80` the lanes load K for the tensor cores, at a time 16 bytes (a *chunk*, 8 numbers)
# of each of eight rows: columns 0 to 7, say, of eight keys. (On `sm_90` the tensor cores read shared memory, a chunk of each
# row, too.) A chunk covers four banks. So eight chunks can be read in one step, if they lie in eight different groups of
# banks.
#
# With d = 64 and 2 bytes per number, a row of K has 128 bytes, exactly once around all banks: a *line*. (With d = 128, two.)
# It has eight places for chunks, 0 to 7. Let the rows lie one after the other. Then chunk 2 of every row begins at the same
# bank. All eight want the same group, and wait for each other, a *bank conflict*: eight steps instead of one.
#
# The remedy is called a *swizzle*: row r keeps its chunk c at place $c \oplus (r \bmod 8)$, where $\oplus$ is XOR. The row is
# still complete. But the same chunk of eight rows now lies at eight different places:

# %% tags=["nbval-ignore-output", "hide-input"]
show(swizzle_xor.draw(**swizzle_xor.data()))

# %% [markdown]
# The bottom row counts how many of the eight reads want each place. In Triton the compiler lays K out so by itself, as the
# checks at the end read in four compiled kernels.

# %% [markdown]
# ## How large may a tile be?
#
# Our forward kernel keeps $q_i$ once in shared memory, and n tiles of K and as many of V, so that the next ones can arrive
# while one is used: $(B_r + 2 n B_c) \cdot d$ numbers of 2 bytes. On Hopper n is `num_stages`, and on an A100 or an RTX
# 4090 it is one less. Registers hold $o_i$ and $s_{ij}$ in fp32 (one number to a register), $p_{ij}$ in 16 bits, and some
# 40 more per thread for addresses and counters: about $40 + (B_r d + 1.5\, B_r B_c) / \text{threads}$. A thread can have
# 255.

# %% tags=["nbval-ignore-output", "hide-input"]
show(block_budget.draw(**block_budget.data()))

# %% [markdown]
# If registers run out, the kernel runs, but it *spills*: numbers travel to slow memory and back. The first number in a cell
# is the sum above, and the word *spills* is what the compiler did. They differ because the sum is mostly too low. A cell has
# four warps, or eight where four will not do. At d = 128, in the right grid, 128 × 128 has eight: 200 registers, not 360, and
# even so it spills. 128 × 64 has eight, too, and does not. 128 × 32 stays at four, with 216, and spills.
#
# If shared memory runs out, the kernel does not run at all: `out of resource: shared memory, Required: 131074, Hardware
# limit: 101376` was met on an RTX 4090
# ([meta-pytorch/attention-gym#14](https://github.com/meta-pytorch/attention-gym/issues/14)). That limit is 99 KiB for one
# thread block. An A100 gives 163 and an H100 227: its SM has 228, of which 1 KiB per block is reserved.

# %% [markdown]
# ## Recap
#
# - Lane $4\,(r \bmod 8) + \lfloor (c \bmod 8) / 2 \rfloor$ holds row r, column c of a piece. A row has four lanes.
# - Two shuffles give all four the row's maximum or sum.
# - `warpsPerCTA = [4, 1]` is split-Q. P is already where the second product needs it. With `mma`, it takes a last product
#   with at least as many rows as columns.
# - Swizzle: chunk c of row r lies at place $c \oplus (r \bmod 8)$. Eight steps become one.
# - Tiles must fit into shared memory, or the kernel does not run, and into registers, or it spills.

# %% [markdown]
# ## Exercises
#
# **Build.** With d = 32, a row of K has 64 bytes: four chunks, half a line. Two rows share a line, row r in
# half r mod 2. Where does row r keep chunk c? Give the place in the line, 0 to 7, so that one chunk of eight rows is read
# in one step. Without a swizzle, place 4 (r mod 2) + c, it takes 4.
#
# <details><summary>Hint</summary>
#
# The half is 4 · (r mod 2). Inside the half there are four places. Rows 0 and 1 may be treated alike, then rows 2 and 3.
# </details>

# %%
def place(r, c):  # row, chunk 0 to 3
    ...

# %% tags=["hide-input"]
def steps_with_your_place(chunk):  # of eight rows; 99 if two chunks collide
    if place(0, 0) is None:
        return None
    lines = [(r, r + 1) for r in (0, 2, 4, 6)]
    taken = [{place(r, c) for r in line for c in range(4)} for line in lines]
    wanted = [place(r, chunk) for r in range(8)]
    whole = all(places == set(range(8)) for places in taken)
    return max(map(wanted.count, wanted)) if whole else 99


words = "steps for chunk {} of eight rows. Which rows still share a place? (99: two chunks of a line do)"
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
    verdict(f"{name}: lane_of", np.array_equal(owners.lane, lane_of(r, c)))
    verdict(f"{name}: a row in one warp", (owners.warp == owners.warp[:, :1]).all())
    offsets = layouts.parse(kernel["K"]["layout"]).offsets(tuple(kernel["K"]["shape"]))
    groups, row = offsets[:8, :64:8] * 2 % 128 // 16, np.arange(8)
    verdict(f"{name}: c XOR r", np.array_equal(groups, row ^ row[:, None]))
    verdict(f"{name}: one step", layouts.bank_conflicts(offsets[:8, 16]) == 1)
took = {(k["B_r"], k["B_c"], k["d"], k["warps"]): k["registers"] for k in recorded("compiled")["forward"]}
sums = {sizes: budget.forward_registers(*sizes) for sizes in took}
few = [took[sizes] > n for sizes, n in sums.items() if n <= 255]
verdict("the sum is mostly too low", sum(few) > 0.6 * len(few))
needs = [budget.forward_registers(128, 128, 128, warps) for warps in (4, 8)]
verdict("128 × 128 needs 360 registers, or 200", needs == [360, 200])
verdict("32 × 128: 255, not 120", (took[32, 128, 128, 4], sums[32, 128, 128, 4]) == (255, 120))
spilled = block_budget.compiled_spills()
spills = [spilled[128, B_r, B_c] > 0 for B_r, B_c in ((32, 128), (128, 128), (128, 64))]
verdict("both spill, 128 × 64 does not", spills == [True, True, False])
given = [x.shared_per_block // 1024 for x in (chips.RTX_4090, chips.A100, chips.H100)]
verdict("99, 163 and 227 KiB", given == [99, 163, 227])

# %% [markdown] tags=["navigation"]
# [← The same loop, other masks](16_masks.ipynb) · [The map](00_start.ipynb) · [Errata →](B_errata.ipynb)
