# %% [markdown] tags=["navigation"]
# [← The same loop, other masks](16_masks.ipynb) · [The map](00_start.ipynb) · [Errata →](B_errata.ipynb)

# %% [markdown]
# # A · Lanes, layouts, banks
#
# **Where exactly are the numbers of a tile?**
#
# Chapter 07 stopped at the warp. This appendix goes inside. It says which thread of a warp holds which score, why a row's
# maximum needs two exchanges, why K lies scrambled in shared memory, and how large a tile may be. You need it for chapters
# 12 and 13, and for reading what a compiler made of a kernel.
#
# After this notebook you can
#
# - say which lane holds a given score of a tile,
# - read a layout in compiled code, and tell split-Q from split-K in it,
# - swizzle a tile by hand, and count bank conflicts,
# - add up the shared memory and the registers that a tile needs.
#
# *Time: 40 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [07 ·
# Warps](07_warps.ipynb).*

# %%
import numpy as np

from fa2_lab.machine import budget, chips, layouts
from fa2_lab.plots import block_budget, row_reduction, swizzle_xor
from fa2_lab.plots.show import show
from fa2_lab.records import recorded
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## Which thread holds a score?
#
# A warp has 32 threads. The number of a thread in its warp, 0 to 31, is its **lane**. A whole warp executes an instruction of
# the tensor cores together, and the instruction fixes which lane gets which number of the result.
#
# `sm_80` and `sm_90` are NVIDIA's names for the generations of the A100 and the H100. On `sm_80` the instruction is `mma`: one
# warp computes a piece of 16 × 8. On `sm_90` it is `wgmma`: four warps, a *warpgroup*, compute a piece with 64 rows, 16 rows
# each. (Its name in machine code, chapter 11, is `HGMMA`.)
#
# In both, the number in row r and column c of a piece lies in lane
# $4\,(r \bmod 8) + \lfloor (c \bmod 8) / 2 \rfloor$.
#
# **Predict.** Which four lanes hold row 5?

# %%
def lane_of(r, c):
    return 4 * (r % 8) + c % 8 // 2


r, c = np.mgrid[:16, :8]
lanes = lane_of(r, c)
for row in (0, 5, 13):
    print(f"row {row:2}, columns 0 to 7, lanes:", *lanes[row].tolist())
print("numbers that each lane holds:", sorted(set(np.bincount(lanes.ravel()).tolist())))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **20, 21, 22 and 23.** $4 \cdot 5 = 20$, and the four pairs of columns go to four neighbours.
# </details>
#
# Row 13 has the same lanes as row 5. The piece has 128 numbers, so each lane holds 4: two in one row, and two eight rows
# below.
#
# **Takeaway.** A row of scores belongs to four neighbouring lanes of one warp.

# %% [markdown]
# ## How do four lanes find a row's maximum?
#
# Each lane first takes the maximum of the columns it holds. Then the four have to compare. Lanes of a warp can do this
# without shared memory and without a barrier: in a **shuffle**, every lane reads a register of another lane.
#
# The code below pairs lanes by XOR, `^`. It compares two numbers bit by bit and gives 1 where they differ.
#
# **Predict.** How many shuffles does it take until all four lanes know the maximum?

# %%
piece = np.random.default_rng(1).standard_normal((8, 8))
mine = np.array([piece[lanes[:8] == lane].max() for lane in range(32)])
print("lanes 20 to 23 (row 5), before:", *mine[20:24].round(2).tolist())
for step in (1, 2):
    mine = np.maximum(mine, mine[np.arange(32) ^ step])  # lane t reads the register of lane t XOR step
    print(f"after exchanging with lane t XOR {step}:  ", *mine[20:24].round(2).tolist())
print("maximum of row 5:", piece[5].max().round(2))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two.** After the first, neighbours agree. After the second, all four do. More columns do not change that: a lane
# goes through its own columns first.
# </details>
#
# With $t$ XOR 1, neighbours exchange (20 with 21). With $t$ XOR 2, pairs do (20 with 22).
#
# The picture follows a row of a whole *accumulator*, the registers of four warps in which a product is summed up. This one has
# 64 rows and 128 columns: half of O in the recorded kernel, whose tiles have 128 rows. A lane has 32 columns of row 21. (Its
# registers 2 and 3 hold row 29.) The exchanges are the same two.

# %% tags=["nbval-ignore-output"]
show(row_reduction.draw(**row_reduction.data()))

# %% [markdown]
# **Takeaway.** Under split-Q, a row's statistics never leave its warp: four lanes, two shuffles.

# %% [markdown]
# ## Which warp holds which row?
#
# You do not choose this in Triton; the compiler does. But the code between Triton and assembly says what it chose
# (`fa2-lab xray 07` prints it). `warpsPerCTA = [4, 1]` means four warps along the rows and one along the keys. (CTA is
# NVIDIA's word for a thread block.)
#
# Below is such a line of our forward kernel, as compiled for `sm_90`, and what the lines of four compilations mean.
#
# **Predict.** Is `[4, 1]` split-Q or split-K?

# %% tags=["nbval-ignore-output", "hide-input"]
compilations = recorded("layouts")["layouts"]
print(compilations[-1]["S"]["layout"])
for layout in compilations:
    along_rows, along_keys = layout["warpsPerCTA"]
    name = "split-Q" if along_keys == 1 else "split-K" if along_rows == 1 else "both"
    print(f"{layout['target']}, d = {layout['d']:3}, {layout['instruction']:5}:", end=" ")
    print(f"{along_rows} warps along rows, {along_keys} along keys: {name}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Split-Q.** The rows are cut among four warps, and every warp has all keys of the tile.
# </details>
#
# A row of S lies in one warp, and so does the same row of O. (The tile has 128 rows, and four warps do 64 at a time. So
# each warp has two strips of 16 rows.)
#
# **Takeaway.** The compiled kernel is split-Q, and it can be read in one line of its code.

# %% [markdown]
# ## Does P have to move before the second product?
#
# S is the *result* of the first product. P, computed from it in place, is the *left factor* of the second one. An instruction
# also fixes which lane must hold which number of its left factor. For a 16 × 16 piece of P, NVIDIA's [description of
# mma](https://docs.nvidia.com/cuda/parallel-thread-execution/) says: a lane holds rows g and g + 8, where g is the lane
# divided by 4, and columns 2h, 2h + 1, 2h + 8 and 2h + 9, where h is the remainder.
#
# **Predict.** Take row 5, columns 2 and 3. As a result of the first product they are in lane 21. In which lane must they be
# for the second?

# %% tags=["hide-input"]
needs = np.full((16, 16), -1)
for lane in range(32):
    g, h = divmod(lane, 4)
    for row in (g, g + 8):
        for column in (2 * h, 2 * h + 1, 2 * h + 8, 2 * h + 9):
            needs[row, column] = lane
r, c = np.mgrid[:16, :16]
print("row 5, columns 2 and 3: held by lane", lane_of(5, 2), "and needed by lane", needs[5, 2])
print("numbers of P that must change lanes:", int((needs != lane_of(r, c)).sum()), "of", needs.size)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **In lane 21.** g = 5 and h = 1: lane 4 · 5 + 1.
# </details>
#
# Every number is already where it is needed. So P goes from softmax into the second product without leaving its registers.
# It is only converted to 16 bits.
#
# **Takeaway.** The result and the left factor of a product share a layout, so P need not pass through shared memory.

# %% [markdown]
# ## Why is K scrambled in shared memory?
#
# Shared memory consists of 32 **banks**. Each gives 4 bytes in a step. Neighbouring groups of 4 bytes lie in neighbouring
# banks, and after bank 31 comes bank 0. On `sm_80` the lanes load K for the tensor cores: one *chunk* of 16 bytes from
# each of eight rows at a time. (On `sm_90` the tensor cores read these chunks themselves.) A chunk covers
# four banks. So eight chunks can be read in one step, if they lie in eight different groups of banks.
#
# Let d = 64, with 2 bytes per number. A row of K has 128 bytes: exactly once around all banks.
#
# **Predict.** The rows lie one after the other. We read chunk 2 of rows 0 to 7. How many steps does that take?

# %%
def steps(places):  # the group of banks of each chunk that is read
    return max(places.count(group) for group in places)


print("groups of banks, rows one after the other:", [2 for row in range(8)], "steps:", steps([2] * 8))
swizzled = [2 ^ row for row in range(8)]
print("groups of banks, chunk c at place c XOR row:", swizzled, "steps:", steps(swizzled))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Eight.** Chunk 2 of every row begins at the same bank. All eight want the same group, and wait for each other: a *bank
# conflict*.
# </details>
#
# The second line is the remedy, called a **swizzle**: row r keeps its chunk c at place $c \oplus (r \bmod 8)$, where
# $\oplus$ is XOR. The row is still complete. But the same chunk of eight rows now lies at eight different places.
#
# Below, the same with all chunks in memory, and under each group of banks the number of reads that it has to serve.

# %% tags=["nbval-ignore-output"]
show(swizzle_xor.draw(**swizzle_xor.data()))

# %% [markdown]
# Nobody has to write this in Triton: the compiler lays K out so by itself. (With d = 128 a row takes two lines of memory: on
# `sm_80` one after the other, on `sm_90` 64 lines apart.)
#
# **Takeaway.** Numbers may lie at any place, as long as writer and reader agree on it. Swizzled, eight steps become one.

# %% [markdown]
# ## How much shared memory does a tile need?
#
# Our forward kernel keeps $q_i$ once, and $k_j$ and $v_j$ once per stage (a stage is a place for one tile on its way).
#
# **Predict.** $B_r = B_c = d = 128$, two stages, 2 bytes per number. One block of 128 × 128 is 32 KiB. How many KiB are
# needed?

# %% tags=["hide-input"]
def shared_bytes(B_r, B_c, d, stages=2):
    return 2 * (B_r * d + stages * 2 * B_c * d)


needs_KiB = {(r, c): shared_bytes(r, c, 128) // 1024 for r in (64, 128) for c in (64, 128)}
print("d = 128, two stages:", ", ".join(f"{r} × {c}: {KiB} KiB" for (r, c), KiB in needs_KiB.items()))
for chip in (chips.RTX_4090, chips.A100, chips.H100):
    room = chip.shared_per_block // 1024
    fit = [f"{r} × {c}" for (r, c), KiB in needs_KiB.items() if KiB <= room]
    print(f"{chip.name} gives one thread block {room} KiB:", ", ".join(fit))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **160.** One for $q_i$, and two stages with two each: 5 · 32 KiB.
# </details>
#
# A GPU refuses to run a kernel that asks for more than there is. Of an SM's shared memory (228 KiB on an H100), 1 KiB per
# thread block is reserved. So a single block can have 227.
#
# **Takeaway.** Shared memory says whether a tile runs at all.

# %% [markdown]
# ## How many registers?
#
# Registers hold $o_i$ and $s_{ij}$ in fp32 (float32, one number to a register), $p_{ij}$ in 16 bits, and some 40 more
# per thread for addresses and counters. A thread can have 255.
#
# **Predict.** $B_r = B_c = d = 128$ and four warps, which are 128 threads. How many registers of each thread does $o_i$
# alone take?

# %% tags=["hide-input"]
def registers(B_r, B_c, d, W):
    return 40 + -(-(B_r * d + B_r * B_c + B_r * B_c // 2) // (32 * W))


print("d = 128      4 warps  8 warps")
for B_r, B_c in ((64, 64), (128, 64), (64, 128), (128, 128)):
    print(f"{B_r:3} × {B_c:3} {registers(B_r, B_c, 128, W=4):10} {registers(B_r, B_c, 128, W=8):8}")

# %% tags=["nbval-ignore-output", "hide-input"]
compiled = recorded("compiled")["forward"]
said = [(registers(k["B_r"], k["B_c"], k["d"], k["warps"]) > 255, k["spills"] > 0) for k in compiled]
agree = sum(ours == theirs for ours, theirs in said)
print(f"compiled for {compiled[0]['target']}: sum and compiler agree on spilling in {agree} of {len(said)} kernels;", end=" ")
print(f"{said.count((False, True))} spill although they fit by the sum")

# %% tags=["nbval-ignore-output"]
show(block_budget.draw(**block_budget.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **128.** 128 · 128 / 128. The scores take as many again, P half of that: 360 with the other 40.
# </details>
#
# If registers run out, the kernel runs, but it *spills*: numbers travel to slow memory and back. With eight warps the same
# tile has twice the threads, and half as much in each. The sum is an estimate, and mostly too low: for 64 × 64 with 4 warps
# it says 152, and the compiler took 184. So some sizes spill that fit by the sum.
#
# In the picture a × marks where the compiler spilled. The darkest boxes do not fit by the sum, the grey ones fit on some of the
# three chips. At d = 128 fewer sizes fit.
#
# **Takeaway.** Registers say whether a tile runs well. More warps help with registers, and not with shared memory.

# %% [markdown]
# ## Recap
#
# - Lane $4\,(r \bmod 8) + \lfloor (c \bmod 8) / 2 \rfloor$ holds row r, column c of a piece. A row has four lanes.
# - Two shuffles give all four the row's maximum or sum.
# - `warpsPerCTA = [4, 1]` is split-Q. P is already where the second product needs it.
# - Swizzle: chunk c of row r lies at place $c \oplus (r \bmod 8)$. Eight steps become one.
# - Shared memory: $(B_r + 2 \cdot \text{stages} \cdot B_c) \cdot d$ numbers. Registers: about
#   $40 + (B_r d + 1.5\, B_r B_c) / \text{threads}$.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** With d = 32, a row of K has 64 bytes: four chunks, half a line of 128 bytes. Two rows share a line, row r
# in half r mod 2. Where does row r keep chunk c? Give the place in the line, 0 to 7, in place of the `...`, so that one
# chunk of eight rows is read in one step.
#
# <details><summary>Hint</summary>
#
# The half is 4 · (r mod 2). Inside the half there are four places. Rows 0 and 1 may be treated alike, then rows 2 and 3.
# </details>
# <details><summary>Solution</summary>
#
# `return 4 * (r % 2) + (c ^ (r // 2 % 4))`
# </details>

# %%
def place(r, c):  # row, chunk 0 to 3
    return ...


if place(0, 0) is ...:
    print("not written yet; without a swizzle, place 4 (r mod 2) + c, the read takes 4 steps")
else:
    lines = [sorted(place(r, c) for r in (line, line + 1) for c in range(4)) for line in (0, 2, 4, 6)]
    slow = {c: steps([place(r, c) for r in range(8)]) for c in range(4)}
    if any(line != list(range(8)) for line in lines):
        print("not yet: two chunks of one line lie at the same place")
    else:
        print("right" if set(slow.values()) == {1} else f"not yet: steps for each chunk: {slow}")

# %% [markdown]
# **2. Decide.** $B_r = d = 128$, two stages. What is the largest power of two for $B_c$ that an RTX 4090 runs? Put it in
# place of the `...`.
#
# <details><summary>Hint</summary>
#
# One block of 128 numbers a row, times $B_c$ rows, is $B_c / 4$ KiB. The chip gives 99 KiB.
# </details>
# <details><summary>Solution</summary>
#
# 64. $q_i$ takes 32 KiB, and each of four blocks of K or V takes 16: 96 in all.
# </details>

# %%
B_c = ...
if B_c is ...:
    print("not answered yet; for 128 keys it takes", shared_bytes(128, 128, 128) // 1024, "KiB")
else:
    KiB, room = shared_bytes(128, B_c, 128) / 1024, chips.RTX_4090.shared_per_block // 1024
    larger = shared_bytes(128, 2 * B_c, 128) / 1024
    verb = "right" if KiB <= room < larger else "not yet"
    print(f"{verb}: {B_c} keys take {KiB:.0f} KiB of {room}, {2 * B_c} keys {larger:.0f}")

# %% [markdown]
# ## Checks
#
# The formulas of this notebook against the package's layouts, which are parsed from compiled code, and against its budget.

# %% tags=["hide-input"]
for kernel in recorded("layouts")["layouts"]:
    name = f"{kernel['target']}, d = {kernel['d']}"
    owners = layouts.parse(kernel["S"]["layout"]).owners(tuple(kernel["S"]["shape"]))
    r, c = np.indices(owners.lane.shape)
    verdict(f"{name}: lane_of = the compiled layout", np.array_equal(owners.lane, lane_of(r, c)))
    verdict(f"{name}: every row of S in one warp", (owners.warp == owners.warp[:, :1]).all())
    shape = tuple(kernel["K"]["shape"])
    offsets = layouts.parse(kernel["K"]["layout"]).offsets(shape)
    groups = offsets[:8, :64:8] * 2 % 128 // 16
    verdict(f"{name}: K's places = c XOR r", np.array_equal(groups, np.arange(8) ^ np.arange(8)[:, None]))
    verdict(f"{name}: no bank conflicts", layouts.bank_conflicts(offsets[:8, 16]) == steps(swizzled) == 1)

# %% tags=["hide-input"]
sizes = [(b, c, d, W) for b in (64, 128) for c in (64, 128) for d in (64, 128) for W in (4, 8)]
theirs = [(budget.forward_shared_bytes(*s[:3]), budget.forward_registers(*s)) for s in sizes]
ours = [(shared_bytes(*s[:3]), registers(*s)) for s in sizes]
verdict("shared_bytes and registers = those of budget.py", ours == theirs)
took = {(k["B_r"], k["B_c"], k["d"], k["warps"]): k["registers"] for k in compiled}
verdict("64 × 64, d = 128: 152 by the sum, 184 by the compiler", (registers(64, 64, 128, 4), took[64, 64, 128, 4]) == (152, 184))
low = sum(took[s] > registers(*s) for s in took if registers(*s) <= 255)
verdict("the sum is mostly too low", low > 0.9 * sum(registers(*s) <= 255 for s in took))
two = budget.fits(chips.A100, 64, 64, 128, stages=2, warps=4).blocks_per_sm == 2
verdict("two blocks of 64 × 64, d = 128, share an SM of an A100", two)

# %% [markdown] tags=["navigation"]
# [← The same loop, other masks](16_masks.ipynb) · [The map](00_start.ipynb) · [Errata →](B_errata.ipynb)
