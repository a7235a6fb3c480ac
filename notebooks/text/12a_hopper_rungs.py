# %% [markdown] tags=["navigation"]
# [← The workshop](11_workshop.ipynb) · [The map](00_start.ipynb) · [Hopper, the kernel →](12b_hopper_kernel.ipynb)

# %% [markdown]
# # 12a · Hopper, machine and rungs
#
# **What can an H100 do that FlashAttention-2 does not use?**
#
# FA2 was written for the A100. On NVIDIA's *Hopper* chips, the H100 and the H200, matmuls run in the background, a
# single thread can copy a whole tile, and warps can hand registers to each other. This chapter first introduces the
# **machine**, using models that run on your laptop. Then it climbs **rungs** 15 to 23, which use that machine. For each
# rung, it shows the lines that change and how much speed they gain. Several of the rungs' ideas come from
# FlashAttention-3 (2024), for example a warp that only copies (rung 16) and scores that start before they are needed
# (rung 20). The maximum that may lag behind (rung 22) comes from FlashAttention-4 (2026). [Chapter
# 12b](12b_hopper_kernel.ipynb) then reads the finished kernel.
#
# After this notebook you can
#
# - explain which warps wait for which in a Hopper kernel, and predict what happens if a wait or a release is forgotten,
# - compute how many warpgroups (of four warps each), rows and stages fit onto an SM,
# - write a small kernel in Gluon, and compile it for an H100 without having one.
#
# *Time: 110 minutes, in eight parts, the first of which includes this introduction. Before this: the Triton kernel of
# [chapter 08](08_triton_forward.ipynb), [the ladder](10_ladder.ipynb), and [appendix A](A_lanes.ipynb), which takes
# another 30 minutes and explains layouts, banks and lanes (a *lane* is one of a warp's 32 threads). You do not need
# CUDA. Hardware: any laptop with Linux. All speeds and times were measured on an NVIDIA H200 in bf16.*
#
# The rungs lead to the kernel in this picture. In it, a single warp copies tiles into shared memory, and two groups of
# four warps compute with them:
#
# ![The producer waits until a stage is empty, and the consumers wait until it is full. Between them is a row for each
# ring of buffers in shared memory: the mailbox, Q, K and V](../figures/pipelines_forward.svg)
#
# You need not understand all of the picture yet. A solid arrow means that a buffer has been filled. A dashed arrow
# means that it may be filled again, and the label tells how many consumers must have *released* the buffer first. Part
# 3 explains these arrows and the rings between producer and consumers, part 6 explains the mailbox, and chapter 12b
# explains the turns, and why V has no dashed arrows.

# %%
# Setup: run this cell first. You do not have to read it.
import runpy
from functools import partial
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fa2_lab.kernels import triton_versions
from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier
from fa2_lab.plots import overlap_timeline, rung_timeline
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.tools.xray import xray
from fa2_studio.book import maxima
from fa2_studio.book.hopper import Climb, show_change, show_code, show_listing
from fa2_studio.book.ring import PAUSE, try_consumer
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## Part 1 · The machine (16 minutes)
# What can the chip do on its own, and how does a kernel tell it to?
#
# ### What do the tensor cores wait for?
#
# For a tile of B_r × B_c scores, the tensor cores do 4 B_r B_c d FLOPs for the matmuls $QK^\top$ and $PV$, and the
# exponential unit computes B_r B_c exponentials. From the A100 to the H100, an SM's tensor cores became twice as fast,
# so they now do 4,096 FLOPs per clock. The rate of exponentials, however, stayed at 16 per clock.

# %%
def clocks(chip, d, B_r=64, B_c=128):  # of the matmuls, of the exponentials
    return 4 * B_r * B_c * d // chip.tensor_flops_per_clock, B_r * B_c // chip.exp_per_clock


for chip in (chips.A100, chips.H100):
    for d in (64, 128):
        matmuls, exps = clocks(chip, d)
        share = f"tensor cores busy {matmuls / (matmuls + exps):.0%} of the time"
        print(f"{chip.name:13} d = {d:3}: {matmuls:,} + {exps} clocks, {share}")

# %% [markdown]
# If each unit waits for the other, an H100's tensor cores are idle half of the time at d = 64. To keep them busy,
# everything else has to happen *while* the matmuls run.
#
# ### Which thread holds which value?
#
# Hopper's tensor cores work for a *warpgroup*, which consists of four neighbouring warps, or 128 threads. Suppose that
# a warpgroup multiplies 64 rows of Q by a tile of 64 keys. The result is a block of 64 × 64 scores, and each of the
# four warps holds 16 of its rows. A warp divides its 16 × 64 scores evenly among its 32 lanes, so each lane holds 32 of
# them. Since four lanes share a row, a lane's 32 scores come from two rows, 16 from each.
#
# The picture follows row 21. Its upper half shows which lane holds each score of the row, and in which of the lane's
# registers. A lane holds two neighbouring scores of this row, then two of its other row, and so on, which is why
# registers 2 and 3 do not occur here. The lower half shows how the four lanes find the row's maximum. Each lane first
# finds the largest of its own 16 scores. Then the lanes exchange values twice, first with the lane whose number differs
# only in the last bit (*lane XOR 1*), and then with the lane whose number differs only in the bit before it (*lane XOR
# 2*).

# %%
show("row_reduction")

# %% [markdown]
# In Triton, the compiler decides which thread holds which value. In **Gluon**, a lower-level language, you decide. Like
# Triton, Gluon is a dialect of Python, and it uses the same compiler. But in Gluon, a tensor's type includes a
# *layout*, and you import the language as `gl` instead of `tl`. We need four layouts:
#
# | layout | used for | meaning |
# | --- | --- | --- |
# | `NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16])` | s, and also o, with d in place of B_c | the layout shown in the picture, in which the tensor cores leave a result |
# | `SliceLayout(1, …)` of this layout | m, ℓ | the same layout without its columns, with one value per row |
# | `DotOperandLayout(0, …, 2)` of this layout | p | the layout that the tensor cores expect for a left operand |
# | `NVMMASharedLayout` | tiles of q, k, v | a tile in shared memory, swizzled as in appendix A |
#
# Listings write the arguments without their names, so here is what each of them means. Skim both tables for now, and
# come back to them when a listing uses one of these names:
#
# | argument | its name in Gluon | meaning |
# | --- | --- | --- |
# | `[3, 0]` | `version` | version 3.0 of the tensor cores' instruction, which is Hopper's |
# | `[4, 1]` | `warps_per_cta` | the result's rows are divided among 4 warps, and its columns among 1, so they are not divided |
# | `[16, B_c, 16]` | `instr_shape` | per warp, one instruction computes 16 rows and B_c columns of the result, and sums over 16 products |
# | `1` in `SliceLayout(1, …)` | `dim` | the dimension that is dropped, where dimension 0 is the rows and dimension 1 the columns |
# | `0` in `DotOperandLayout(0, …, 2)` | `operand_index` | the left operand (the right one would be 1) |
# | `2` in `DotOperandLayout(0, …, 2)` | `k_width` | a 32-bit register holds two 16-bit values |
#
# The last 16 in `[16, B_c, 16]` is not a size of the result. It is the depth of one instruction, which you will see in
# the next section.
#
# You can only add two tensors if they have the same layout. `gl.convert_layout` changes a tensor's layout, which is
# free unless a value has to move to another thread. The lanes that hold a row of o also hold the same row of s, so
# converting α from the layout of s to the layout of o costs nothing.
#
# ### What does one matmul read?
#
# Hopper's instruction for the tensor cores is `wgmma`, which appeared in chapter 10's machine code as `HGMMA`. All
# warps of a warpgroup start it together, and its result has 64 rows and stays in registers. The right operand is always
# in shared memory, while the left operand can be in shared memory or in registers. One `wgmma` covers 16 elements of
# the dimension that is summed over. The picture shows the two matmuls of a tile, and a frame marks what one instruction
# reads:

# %%
show("wgmma")

# %% [markdown]
# Attention uses both options for the left operand. For $S = QK^\top$, both operands are tiles in shared memory. For
# $PV$, the left operand P is already in registers, in exactly the lanes that need it, so P never has to go through
# shared memory.
#
# A matmul is also *asynchronous*. The warpgroup starts it and goes on with other work, and later, it waits until at
# most a given number of its matmuls are still running:
#
# ```python
# s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)  # started, but not finished
# o = warpgroup_mma(p, v, o, is_async=True)  # started after it
# s = warpgroup_mma_wait(1, deps=[s])  # at most 1 matmul may still run, so s is ready, but o need not be
# ```
#
# How can P V start before S is ready, although P is computed from S? It can because `p` and `v` belong to the
# *previous* tile here, and only `k` belongs to the current one. After the wait, the warpgroup goes on to the
# exponentials of the current tile, and P V of the previous tile can run at the same time.
#
# `use_acc=False` means that the product is not added to the contents of `zero`. `deps` names the values that become
# valid when the wait returns. Until then, nothing that the matmul reads may be overwritten.
#
# The clocks printed above show what such an overlap can hide. At d = 128, the two matmuls of a tile with 64 rows and
# 128 keys take 1,024 clocks together, or 512 each. The exponentials of this tile also take 512, so one matmul is just
# long enough to cover them. At d = 64, however, a matmul takes only 256 clocks, which is not long enough to cover the
# exponentials, so a second warpgroup will have to fill the gap.
#
# ### What fetches the tiles?
#
# Hopper has a copy engine called TMA (*tensor memory accelerator*). To start a TMA copy, one thread specifies a
# *descriptor*, the first row, a buffer in shared memory and a barrier (the subject of the next section), and then goes
# on with its work. The host makes the descriptor in advance. The descriptor records the tensor's address, shape and
# strides, and also the size of a tile and how the tile is swizzled. For rows outside the tensor, TMA delivers zeros.
# The picture shows the copy of a tile of four rows that begins at row 8 of a K with only ten rows:

# %%
show("bulk_copy")

# %% [markdown]
# The tile in shared memory then has two keys and two rows of zeros. In V, such zeros do no harm. In K, however, a key
# of zeros has a score of 0, so exp(0 − m) would be added to ℓ (chapter 08). The kernel therefore masks the scores of a
# tile that reaches past the last key.
#
# ### How do you know that a copy has arrived?
#
# A **barrier** tells you, but it is not the kind of barrier that chapter 07 introduced. At chapter 07's barrier, the
# warps of a thread block wait for each other. The barrier that we need here is a counter in shared memory, and a thread
# can arrive at it without waiting, or wait without arriving. It is initialised with the number of arrivals that it
# should expect. The thread that starts a copy arrives at the barrier and announces how many bytes to expect. TMA then
# subtracts the bytes from that number as they land.
#
# A *phase* ends when all expected arrivals have been made and all announced bytes have landed, and the barrier then
# starts over. To wait, a thread specifies which phase it is waiting for. Since a barrier stores only a single bit, the
# *phase parity*, the phases are numbered 0, 1, 0, 1, …
#
# The next cell models a barrier that expects two arrivals. In the listing, `missing` is the number of arrivals that are
# still to come in this phase, and `phase` is the parity of the current phase. When `missing` reaches 0, it starts again
# from `expected`, the number of arrivals for which the barrier was made. The rest serves the model's messages.
# `arrival_counts` counts the arrivals of each actor. A `Wait` holds a condition, which `ready()` tests, and the words
# in `what`, which a message about this wait would use. At the start and after each arrival, the cell asks the barrier
# whether phase 0 is over, and whether phase 1 is:

# %%
show_code(getsource(Barrier.arrive) + getsource(Barrier.over))
bar = Barrier("two arrivals", arrivals=2)
for arrival in range(5):
    over = (f"phase {phase} over? {bar.over(phase).ready()!s:5}" for phase in (0, 1))
    print(f"after {arrival} arrivals:", *over)
    bar.arrive("a thread")

# %% [markdown]
# In the first line of the output, no thread has arrived yet, but phase 1 already counts as over, as if a phase 1 had
# come before the first phase 0. After four arrivals, two phases are over, and the barrier gives the same answers as in
# the first line. Suppose that a slow thread asks only now whether the first phase 0 is over. The barrier answers no,
# although that phase ended long ago, because a single bit cannot tell it from the next phase 0, which has just begun.
# The thread would therefore wait for the end of the wrong phase. A thread that asks too early is also misled. In the
# first line, a thread that asks about the first phase 1 is told that this phase is over, although it has not even
# begun. So a thread should ask about a phase only during this phase or during the next one. Part 3 makes one exception
# on purpose, and chapter 12b shows a mistake in which a thread asks too early by accident.
#
# In Gluon, this barrier is an `mbarrier`. `init` sets the number of arrivals that it expects. `expect` makes one
# arrival and also announces the bytes of a copy. `arrive` makes one arrival without bytes, and `wait` waits for a phase
# to end.
#
# A barrier tells you *when* something has happened. It does not guarantee that TMA sees what a thread has written,
# because TMA accesses shared memory through a different path. For that, you need a **fence**, `fence_async_shared()`,
# for example after `init`. A second rule applies to buffers that are reused. Before a copy may overwrite a buffer that
# a matmul has read, `warpgroup_mma_wait` must have returned in all threads. Part 8 lists all such cases.
#
# ## Part 2 · A first kernel (18 minutes)
# Part 1 listed the pieces. How do they fit together in a real kernel, and what does it cost to place each of them
# yourself?
#
# ### Rung 15: write everything out yourself
#
# The Triton part of the ladder ended with rung 14. Rung 15 has the same tiles, stages and copies, but it is written in
# Gluon. We begin with the functions that start a copy and a matmul:

# %% tags=["nbval-ignore-output"]
r15 = "ladder/r15_gluon.py"
show_listing(r15, "start", "scores")

# %% [markdown]
# `start` copies tile n only if it exists, because with `pred=False`, neither `expect` nor `async_load` does anything. A
# *stage* is a buffer for one tile. In this rung, K and V have three of them each, and tile n uses stage n mod `STAGES`.
# When we count memory, a stage means one buffer of each, as in earlier chapters, so it holds a tile of K and a tile of
# V. `permute` gives a transposed view of k without moving any data. The loop looks like this:

# %% tags=["nbval-ignore-output"]
show_listing(
    r15, "forward_kernel",
    begin="for n in range(T_c)", end="o_i = hopper.warpgroup_mma_wait",
)  # fmt: skip

# %% [markdown]
# The loop runs over the tiles from right to left, so the tiles that need a mask come first. `full` counts the tiles on
# the left that need no mask, whereas in chapter 08 it counted keys.
#
# When the loop begins, the copies of two tiles are already under way. Step n starts the copy of tile n + 2, which, with
# three stages, goes into the stage of tile n − 1. A single thread starts this copy on behalf of all the others, so all
# 128 threads must have finished with that stage first. `gl.barrier()` makes sure that they have. It is not an
# `mbarrier`, but chapter 07's barrier, at which the threads simply wait for each other. `k_arrived` and `v_arrived`, in
# contrast, hold one `mbarrier` for each stage. Each wait specifies the phase `n // STAGES & 1`, which flips each time
# all stages have been used once.
#
# We write `gl.barrier()` only to show where the threads have to wait. You may leave it out, because Triton's compiler
# inserts a barrier of the same kind before each `expect` and before each `async_load`, and the exercise in part 8
# relies on that. The compiler does not merge our barrier with its own barrier before the first `expect`, so the threads
# wait for each other once more per step than they have to. You can see both barriers in PTX, NVIDIA's portable assembly
# language, which `fa2-lab xray 15 --ptx` prints. They are the two `bar.sync` in front of the loop's first `expect_tx`.
#
# A few helper functions remain. `rows_of` drops the leading dimension of a stage, which is 1. `O_LAYOUT` is o's layout
# from the table above. `mask` and `softmax` do what `visit` did in chapter 08.
#
# `rounded` converts p to 16 bits with *inline assembly*, which here is a single line of PTX. That line rounds two
# values with one instruction, which is called `F2FP` in the machine code (`fa2-lab xray 15 --sass` prints it). Triton
# 3.9 would choose the same instruction here by itself. At rung 23, however, Triton would pack some pairs in the wrong
# order and swap them afterwards, so all rungs from 15 on spell out this instruction.
#
# The next lines compare rung 15 with rung 14. *Limit before* names what we expected to limit the previous rung, and
# *taken away* names what the new rung removes. The numbers in the table are TFLOP/s at 16,384 tokens and N = 4,096,
# each followed by its share of FlashAttention-3's speed in the same run. The *factor* is the new rung's speed divided
# by the previous rung's. Below the factors, you find values from the compiled kernel or from the GPU's performance
# counters, at d = 128 without a mask.

# %% tags=["nbval-ignore-output"]
climb = Climb()
climb.step("15", "registers", "programs")

# %% [markdown]
# Rung 15 is slower than rung 14, probably for two reasons. First, a thread executes 22 more instructions per tile, 374
# instead of 352, as the boxes in the picture say. The mask is not the reason. A single loop serves all tiles here,
# whereas rung 14 has a separate loop for tiles without a mask, but in a tile that needs no mask, a branch jumps over
# the mask's instructions. Second, the warpgroup waits for its matmuls twice per tile, while Triton's code waits only
# once. In exchange, we can now decide ourselves where each wait is.
#
# The picture shows what an SM does on rungs 14 and 15, and each later rung has such a picture as well. You can skip a
# picture if the rung is clear without it. Each strip shows when one unit works, from left to right in time. On rungs 14
# to 16, the warpgroups 0 and 1 are the two programs on an SM, and from rung 17 on, they belong to one program, which
# calls them *consumers* (part 3). The strips come from a model with three rules. Copies run back to back at L2
# bandwidth, and on rungs 14 to 16, their strip shows the copies of both programs. A matmul takes the number of clocks
# that the tensor cores need for it. A softmax takes one clock for each instruction that a thread executes in a tile
# without a mask, because an SM has four schedulers, one for each of a warpgroup's four warps, and a scheduler starts
# one instruction per clock.
#
# On rungs 14 to 16, compare only the lengths of the softmax boxes, because the model leaves out all waits between
# instructions. In the model, a round, in which each warpgroup computes one tile, therefore takes only as long as its
# four copies, about 1,640 clocks. By the counters, it takes about 1,790 clocks on rung 14 and 1,950 on rung 15, of
# which its four matmuls take 1,024.

# %% tags=["hide-input"]
show("rung_timeline_15")

# %% [markdown]
# ### Compile and run a file of your own
#
# You can compile a kernel for Hopper on any Linux machine. The kernel below copies 64 rows of Q into shared memory and
# computes the sum of each row. `BlockedLayout` describes how the threads share a tile. It lists the values per thread,
# the threads per warp, the warps, and the order of the dimensions, fastest first. In this kernel, `Q` is not an address
# but the descriptor that `forward` makes, and a descriptor knows its tiles. `Q.block_shape` is the shape of a tile,
# here [64, d], `Q.block_type.nbytes` is its size in bytes, and `Q.layout` is its layout in shared memory.
#
# `forward` is the function that the tools call, with q, k, v and `causal` as for every rung. Its line with
# `get_default_for` picks the swizzled layout for tiles of this shape, and `TensorDescriptor.from_tensor` makes the
# descriptor from the tensor, the tile's shape and this layout. The import lines for Gluon come from
# [book/maxima.py](../fa2_studio/book/maxima.py).

# %%
MINE = """
@gluon.jit
def row_sums(Q, S):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = 64 * gl.program_id(0)
    tile = gl.allocate_shared_memory(Q.dtype, Q.block_shape, Q.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, Q.block_type.nbytes)
    tma.async_load(Q, [i, 0], arrived, tile)
    mbarrier.wait(arrived, 0)
    x = tile.load(LAYOUT).to(gl.float32)
    gl.store(S + i + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.sum(x, 1))

def forward(q, k, v, causal):
    Q, S = q[0, 0], torch.empty(q.shape[2], device=q.device)
    layout = gl.NVMMASharedLayout.get_default_for([64, Q.shape[1]], gl.bfloat16)
    tiles = TensorDescriptor.from_tensor(Q, [64, Q.shape[1]], layout)
    row_sums[(len(Q) // 64,)](tiles, S, num_warps=4)
    return S
"""

# %% tags=["nbval-ignore-output"]
with TemporaryDirectory() as folder:
    file = Path(folder, "mine.py")
    file.write_text(maxima.IMPORTS + MINE, encoding="utf-8")
    (made,) = xray(str(file), "sm_90", d=64)
    codes, sass = ("UTMALDG", "SYNCS", "HGMMA", "SHFL"), made.stages["sass"]
    print({code: sass.count(code) for code in codes})
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        q = torch.randn(1, 1, 256, 64, device="cuda", dtype=torch.bfloat16)
        triton_versions.add_newest_names()  # for a Triton that is older than 3.9
        forward = runpy.run_path(str(file))["forward"]
        wrong = forward(q, q, q, False) - q[0, 0].float().sum(1)
        print("off by at most", wrong.abs().max().item())

# %% [markdown]
# In this machine code, `UTMALDG` is a TMA copy, `SYNCS` is an operation on a barrier, `HGMMA` is a matmul, and `SHFL`
# is an exchange between lanes. The count for `HGMMA` is 0, because this kernel runs no matmul. The 12 exchanges follow
# from the layout. Eight lanes share a row, so each sum takes three exchanges, and a warp sums its 16 rows four at a
# time. In the shell, a single line shows the same machine code: `fa2-lab xray mine.py --chip sm_90 --d 64 --sass`. Now
# try removing `mbarrier.wait` from the kernel. The kernel still compiles, and nothing warns you.
#
# ## Part 3 · A ring (7 minutes)
# Some warps copy while others compute. How do they agree on which of them may use a buffer, and when?
#
# ### A ring of stages, phase by phase
#
# In rung 15, the warps that compute also start the copies. Suppose that a separate warp, the *producer*, starts them
# instead. The producer and the warps that compute, the *consumers*, then have to tell each other what they have done.
# Stages that are reused again and again in the same order form a **ring**, or *circular buffer*. Each stage has two
# barriers:
#
# | barrier | who arrives | who waits | so that |
# | --- | --- | --- | --- |
# | *filled* | the producer (`expect`), and the copy's bytes | all consumers | no consumer reads too early |
# | *emptied* | every consumer | the producer | the producer does not write too early |
#
# Tile n belongs to round n // `STAGES`, because that is how often its stage has been used before. With two stages, for
# example, the tiles use the stages in this order:
#
# ```text
#           round 0   round 1   round 2
# stage 0   tile 0    tile 2    tile 4
# stage 1   tile 1    tile 3    tile 5
# phase     0         1         0
# ```
#
# In each round, each of a stage's two barriers goes through one phase. The phase of *filled* ends when the round's tile
# has arrived. The phase of *emptied* ends when all consumers have released this tile. So to read a tile, the consumers
# wait at *filled* for the end of the phase of the same round, which is `round & 1`. To write a tile, the producer waits
# at *emptied* for the end of the phase of the *previous* round, which is `(round & 1) ^ 1`. In round 0, that is phase
# 1, which counts as over as in the first line of the output in part 1, so the producer can begin at once. That is
# correct, since all stages are empty at first even though no consumer has released one.
#
# For stage 0 of the example, these are all the waits:
#
# | tile | before copying it, the producer waits at *emptied* for | before reading it, the consumers wait at *filled* for |
# | --- | --- | --- |
# | 0 | the end of phase 1, which counts as over | the end of phase 0, which comes when tile 0 has arrived |
# | 2 | the end of phase 0, which comes when all consumers have released tile 0 | the end of phase 1, which comes when tile 2 has arrived |
# | 4 | the end of phase 1, which comes when all consumers have released tile 2 | the end of phase 0, which comes when tile 4 has arrived |
#
# Other libraries call the same barriers *full* and *empty*, and so does the picture at the top of this chapter, in
# which the solid arrows stand for *filled* and the dashed ones for *emptied*. Chapter 12b lists CUTLASS's names for the
# calls.
#
# What happens if a consumer forgets a release, or makes it too early? Our model of the ring
# ([book/ring.py](../fa2_studio/book/ring.py)) has three consumers, two stages and six tiles. Its actors are Python
# generators, and at every step, the model picks at random which of them runs next. `wait(n)` waits until tile n has
# arrived, and `release(n)` gives tile n's stage back.
#
# A consumer takes each tile, runs a matmul for a while, records what it has read, and releases the tile. Two other
# versions of the consumer make one mistake each. In `forgetful`, consumer 1 does not release tile 2. In `hasty`, every
# consumer releases a tile right after starting the matmul that reads it.

# %%
def consumer(ring, T, c, seen, skip=None, early=False):  # skip: (tile, consumer)
    for n in range(T):
        stage = yield from ring.wait(n)
        if early:
            ring.release(n)
        yield PAUSE  # the tensor cores read the tile all the while
        seen[c].append(ring.tiles[stage])
        if not early and (n, c) != skip:
            ring.release(n)


forgetful, hasty = partial(consumer, skip=(2, 1)), partial(consumer, early=True)
ends = [try_consumer(consumer, seed) for seed in range(500)]
right = "all done", 3 * [list(range(6))]
print(f"right in {sum(end == right for end in ends)} of 500 orders")

# %% [markdown]
# **Predict.** Six tiles go through two stages. Which of the two mistakes can a test miss?
#
# - ☐ the forgotten release
# - ☐ the early release
# - ☐ both, since each of them does harm only in unlucky orders
#
# <details><summary>Answer</summary>
#
# **the early release.** With two stages, as here, `forgetful` hangs in every order, and such a hang is called a
# *deadlock*. `hasty` always finishes, and its result is sometimes right. Either mistake shows only if a later tile
# needs the same stage. With four stages, for example, tile 6 would be the next to need tile 2's stage, but the last of
# the six tiles is tile 5. This is why tests of such kernels use long sequences, repeat a call a thousand times, and
# compare the results bit for bit.
#
# ```python
# for stages in (2, 4, 6):
#     hangs, wrong = 0, 0
#     for seed in range(500):
#         hangs += try_consumer(forgetful, seed, stages)[0] != "all done"
#         wrong += try_consumer(hasty, seed, stages) != right
#     print(f"{stages} stages, 500 orders: forgetful hangs {hangs} times,", end=" ")
#     print(f"hasty is wrong {wrong} times")
# ```
#
# ```text
# 2 stages, 500 orders: forgetful hangs 500 times, hasty is wrong 442 times
# 4 stages, 500 orders: forgetful hangs 0 times, hasty is wrong 95 times
# 6 stages, 500 orders: forgetful hangs 0 times, hasty is wrong 0 times
# ```
# </details>
#
# ## Part 4 · Who copies, and who shares a tile (18 minutes)
# A separate warp can start the copies, and the warpgroups that compute can share each tile that it brings.
#
# ### Rung 16: who copies?
#
# Rung 16 builds the ring of part 3. It leaves the copies to a separate warp, the producer, and the warpgroup that
# computes becomes the consumer. This division of work is called *warp specialisation*. The two roles meet only at the
# ring's barriers:

# %% tags=["nbval-ignore-output"]
r16 = "ladder/r16_ring.py"
show_listing(r16, "load", "wait", "release")
show_listing(r16, "producer", begin="load")

# %% [markdown]
# The consumer runs the same loop as rung 15, except that it calls `wait` instead of `mbarrier.wait`, calls `release`
# after each matmul, and starts no copies. The two roles are launched like this:

# %% tags=["nbval-ignore-output"]
show_listing(r16, "forward_kernel", begin="q, k, v = ring", end="gl.warp_specialize")

# %% [markdown]
# - `tile_buffers(X, n)` allocates n buffers for tiles of X. `ring(…)` bundles such buffers with a *filled* and an *emptied*
#   barrier for each of them. The parameter `ring` of `load`, `wait` and `release` is such a bundle. Q is a ring of one
#   stage.
# - `arrive(…, count=1)` is one arrival, made by one thread. It counts for the whole warpgroup, because the compiler
#   makes all 128 threads wait for each other first.
# - `gl.warp_specialize` takes a list of (function, arguments) pairs. The first function runs on the 4 warps of the
#   launch itself. For the other functions, two lists set the number of warps, here `[1]`, and the number of registers
#   per thread, here `[24]`. Only whole warpgroups can hand over registers, so four warps are set aside for the producer
#   although it needs only one. At d = 128, two programs of 256 threads share 65,536 registers, so each thread starts
#   with 128. Each producer thread keeps 24 of them and gives the other 104 to a consumer thread, which then has 232.

# %% tags=["nbval-ignore-output"]
climb.step("16", "issue slots used, %")

# %% [markdown]
# The consumer now executes fewer instructions per tile, because the copies and their waits have left its loop. But no
# unit was fully used before, and most issue slots were empty. So why is the rung any faster? A warpgroup executes its
# own instructions one after another, and after each of them, a warp cannot issue its next one for a few fixed clocks.
# In chapter 10's table of stalls, this delay is called `wait`. So each instruction delays the warpgroup's tile, even if
# there are free issue slots. With fewer instructions, the tile is done earlier.

# %% tags=["hide-input"]
show("rung_timeline_16")

# %% [markdown]
# ### Rung 17: two consumers share a tile
#
# So far, every tile of K and V that comes from L2 has been used by only 64 rows. If one program has two consumers with
# 64 rows each, both can read the same tile, so half as many bytes have to come from L2.
#
# How many consumers do the registers allow? A consumer thread holds o and s in fp32 and p in 16 bits. The block o has
# 64 · d values, and s has 64 · B_c. The block p has as many values as s, but each of them takes only half a register.
# Divided among 128 threads, these three blocks need $64\,(d + 1.5\,B_c) / 128$ registers per thread, and m, $\ell$ and
# everything else take about 24 more. Appendix A counts 40 for everything else, but here a descriptor holds the
# addresses, so 24 are enough.
#
# The table compares this need with the number of registers that are available, which we compute below the table. Its
# first three lines are for tiles of 128 keys, which come with rung 18, and the last line is for the three consumers of
# rung 23. Rung 17 itself keeps tiles of 64 keys, so it needs fewer registers than rung 18:
#
# | d | keys per tile | consumers | registers needed | available | |
# | ---: | ---: | ---: | ---: | ---: | --- |
# | 64 | 128 | 3 | 152 | 160 | rung 18 |
# | 128 | 128 | 2 | 184 | 240 | rung 18 |
# | 128 | 128 | 3 | 184 | 160 | too few |
# | 128 | 64 | 3 | 136 | 160 | rung 23 |
#
# To see how many registers are available, take one thread from each warpgroup. Together, these threads have 65,536 /
# 128 = 512 registers. The producer's thread keeps 24 (the same number as above only by coincidence), and the threads of
# the n consumers share the rest in steps of 8. So (512 − 24) / 3 gives 160 registers with three consumers, and (512 −
# 24) / 2 gives 240 with two. Rungs 17 and 18 therefore have two consumers at d = 128 and three at d = 64. With its
# short tiles, rung 17 would have enough registers for three consumers at d = 128 as well (the last line), but the
# ladder tries this only in rung 23.
#
# **Predict.** Under the causal mask, the lower 64 rows see more tiles than the upper ones. Can the upper consumer
# simply skip the tiles that it does not see?
#
# - ☐ no, it must take and release them
# - ☐ yes, since it never reads them
# - ☐ yes, if it counts them, so that its next wait specifies the right phase
#
# <details><summary>Answer</summary>
#
# **no, it must take and release them.** *Emptied* now expects an arrival from every consumer, and if one arrival is
# missing, the producer waits forever. The rung therefore has an additional loop, in which a consumer takes each tile
# that its rows do not see and releases it without using it.
# </details>
#
# There is a third mistake, besides the forgotten and the early release. A consumer must not release a tile without
# first waiting for it, even if it never reads that tile. Suppose that consumer A does not wait. Consumer A can then
# release stage 0 for this round, and once more for the next round, before consumer B has released it even once.
# *Emptied* has now counted two arrivals and ends its phase, although B is still reading the tile. From then on, the
# producer and the consumers disagree about the round, so a tile is overwritten too early, or everything hangs. In the
# next cell, consumer 0 does not need the first three tiles:

# %%
def upper(ring, T, c, seen, waits):
    for n in range(T):
        needed = c > 0 or n > 2  # consumer 0 does not need tiles 0 to 2
        if needed or waits:
            stage = yield from ring.wait(n)
        if needed:
            yield PAUSE
            seen[c].append(ring.tiles[stage])
        ring.release(n)


for waits in (True, False):
    each = [try_consumer(partial(upper, waits=waits), seed, consumers=2) for seed in range(500)]
    hangs = sum(end != "all done" for end, _ in each)
    fine = each.count(("all done", [[3, 4, 5], [0, 1, 2, 3, 4, 5]]))
    print(f"waits for every tile: {waits!s:5}  right {fine}, wrong tile {500 - hangs - fine}, "
          f"hangs {hangs} of 500")

# %% tags=["nbval-ignore-output"]
climb.step("17", "L2 bytes", "tensor cores at work, %", "programs")

# %% tags=["hide-input"]
show("rung_timeline_17")

# %% [markdown]
# In this picture and in those of rungs 18 and 19, the two consumers move in step, so they always share the schedulers,
# and a softmax of 321 instructions takes about 640 clocks. Only half as many bytes come through L2 now, yet the rung is
# not faster, for two reasons. First, only one program fits onto an SM instead of two, so at d = 128 an SM still has
# just two warpgroups that compute. Second, L2 was probably not the limit of rung 16 in the first place. In the picture,
# the copies of rung 16 set the pace, but only because the model leaves out the waits between instructions. The four
# copies of a round take about 1,640 clocks, whereas by the counters, a round of rung 16 takes 1,024 / 0.543, or about
# 1,890 clocks. So on the GPU, the copies had time to spare, and the ring could deliver the tiles early enough. Without
# pauses between calls, however, rung 17 is 4% faster than rung 16, because its clock stays higher (chapter 10).
#
# ### Rung 18: long tiles
#
# Since one ring now serves both consumers, shared memory has room for tiles of 128 keys at d = 128. A row of 128 16-bit
# values takes 256 bytes. Each consumer's 64 rows of Q therefore take 16 KiB, and a stage, with 128 rows of K and 128 of
# V, takes 64 KiB. Two consumers and three stages add up to 2 · 16 + 3 · 64 = 224 KiB, which fits into the 227 KiB that
# a program can have if it is alone on its SM. In rung 16, two programs shared the SM, so each had only 113 KiB. That
# was too little for two stages of such tiles, which need 16 + 2 · 64 = 144 KiB, although there would have been enough
# registers (184 of 232). Only the sizes change in this rung:

# %% tags=["nbval-ignore-output"]
show_change("17", "18", "CONFIGS")
climb.step("18", "L2 bytes", "tensor cores at work, %")

# %% tags=["hide-input"]
show("rung_timeline_18")

# %% [markdown]
# The same bytes now arrive in half as many tiles. Some work is done *once* per tile, however long the tile is, so there
# is now half as much of it. This work includes two waits for matmuls, a rescaling of o, the barriers, and the exchange
# between lanes that finds the row's maximum. This is why the softmax boxes in the picture are longer now, but shorter
# than two of rung 17's boxes together.
#
# ## Part 5 · Matmuls and exponentials at the same time (16 minutes)
# The tensor cores are still idle while exponentials are being computed.
#
# ### Rung 19: the first tile before the loop
#
# In rung 20, a warpgroup will look ahead, which means that it starts the next tile's S together with this tile's P V.
# The first S, however, has no P V to run alongside. Rung 19 therefore takes the first tile, which is the rightmost one,
# out of the loop. No other tile can reach past the last key, so the loop no longer needs any mask, unless the call is
# causal.
#
# In the listing below, `own_tiles` is the number of tiles that this consumer's rows see. It is at least 1, so that
# there is always a first tile. If the rows see no key in that tile, all of its scores are masked. The rightmost tile
# that the consumer's rows see is tile `own_tiles − 1`. As in rung 15, `full` counts the tiles on the left that need no
# mask, so this tile needs the mask if `own_tiles − 1 >= full`, which the listing writes as `own_tiles > full`.

# %% tags=["nbval-ignore-output"]
show_change("18", "19", "consumer")
climb.step("19", "tensor cores at work, %")

# %% tags=["hide-input"]
show("rung_timeline_19")

# %% [markdown]
# The loop of rung 18 has 589 instructions, of which 96 belong to the mask, and the loop of rung 19 has 473. So you
# might expect a large gain. But the compiler has turned the `if` in front of `mask` into a branch, which jumps over the
# 96 in each tile that needs no mask. So without a mask, a thread of rung 18 executes only 493 instructions per tile,
# and rung 19 saves it 20 of them, as the boxes in the picture say. The counters agree. From rung 18 to rung 19, the
# share of the issue slots that are used hardly falls (chapter 10's folded table of counters), although with a fifth
# fewer instructions, it would fall by nearly a fifth. The line *limit before* above still shows what we expected before
# we looked at the machine code, namely that every tile pays for the mask.
#
# Can 20 fewer instructions make the kernel 2% faster? Compare them with the time of a whole tile. The matmuls of a tile
# take 1,024 clocks per consumer, so those of both consumers take 2,048. In rung 18, these are 60.2% of the time, so a
# tile takes 2,048 / 0.602, or about 3,400 clocks. If the two consumers do not get in each other's way, the saved
# instructions take 20 clocks, and if the consumers share the schedulers at every moment, as in the model of the
# pictures, they take 40. Either way, that is only about 1% of the time of a tile, so the saved instructions explain
# about half of the speedup at best. We do not know where the rest comes from.
#
# In rung 16, the saving was larger and a tile took less time. There, 51 fewer instructions per tile shortened a round
# of about 1,950 clocks by about 60, or 3%. Under the causal mask, the loop of rung 19 keeps the mask and its branch,
# and the rung is not faster there. The main purpose of rung 19 is to prepare for rung 20.
#
# ### What could hide behind what?
#
# While a warpgroup computes exponentials, the tensor cores can work on a matmul of the same warpgroup or on a matmul of
# the other one.
#
# - *Within* a warpgroup, this needs code that **looks ahead**. The warpgroup starts the next S before P V of the
#   current tile, so that P V runs during the next exponentials. The general name for this is *software pipelining*, and
#   FlashAttention-3 calls it intra-warpgroup overlap.
#
# - *Between* two warpgroups, it needs hardware that does not serve both of them at the same time. If it serves them
#   first come, first served, the two drift apart by themselves, and almost all the time, one of them is running a
#   matmul while the other computes exponentials. If it divides the tensor cores in equal shares, the warpgroups start
#   together and stay together, so they also wait for exponentials at the same time.
#
# So there are two questions. Does the code look ahead, and does the hardware serve the warpgroups one after the other?
# Each of them has two possible answers, which makes four cases. The picture shows a model of all four. It does not show
# a measurement, because NVIDIA does not document how the hardware divides the tensor cores.

# %%
show("overlap_timeline")

# %% [markdown]
# | the tensor cores serve the warpgroups | in equal shares | first come, first served |
# | --- | --- | --- |
# | without looking ahead | *Neither*, 67% | *Between*, 98% |
# | looking ahead | *Within*, 97% | *Both*, 100% |
#
# One thing in this picture is worth remembering. Either of the two overlaps alone would be enough to keep the tensor
# cores busy nearly all the time. Which of them does our kernel get? The next section changes the code so that it looks
# ahead, and then checks what the machine makes of it.
#
# ### Rung 20: start the next scores before you need them
#
# The loop of rung 20 looks like this:

# %% tags=["nbval-ignore-output"]
show_listing(
    "ladder/r20_overlap.py", "consumer",
    begin="for n in range(begin + 1", end="p_ij = p_next",
)  # fmt: skip

# %% [markdown]
# - The scores of tile n start first, followed by P V of tile n − 1. A warpgroup's matmuls end in the order in which
#   they were started, so after `warpgroup_mma_wait(1)` the scores are ready. After the second wait,
#   `warpgroup_mma_wait(0)`, P V has ended as well, so V's tile can be released and o can be rescaled.
# - p is a left operand *in registers*, and its matmul is still running. The next p therefore needs other registers,
#   `p_next`. For the same reason, the second wait has `p_ij` among its `deps`, although p is not a result. Because the
#   wait returns `p_ij`, the compiler must keep these registers until the wait is over.
#
# In the next list, *clock* is the number of cycles divided by the time, in a run that pauses between calls. Chapter 10,
# in contrast, lists the clock without pauses.

# %% tags=["nbval-ignore-output"]
climb.step("20", "tensor cores at work, %", "stall: barrier", "SM cycles", "clock, GHz")

# %% [markdown]
# Starting S early makes the kernel 16% faster, and the `barrier` stalls, which probably include waits for matmuls
# (chapter 10), fall to about half. It is tempting to explain this by *Within*, because the source lets P V run during
# the exponentials. The machine code contradicts that explanation, because NVIDIA's assembler, `ptxas`, places the
# second wait *before* nearly all exponentials. So let us separate what we know from what we infer:
#
# | | what | which means |
# | --- | --- | --- |
# | known, from the counters | the tensor cores are busy 61.5% of the time in rung 19, and 75.5% in rung 20 | rung 20 overlaps more than rung 19; both shares are lower than in the four panels above (67% and 97 to 100%), because the panels leave out all other instructions |
# | known, from the machine code | while its own P V runs, a consumer of rung 20 finds most of its row maxima, but a thread computes only 1 or 2 of its 66 exponentials per tile (64 for p and two for α) | so it is not *Within* |
# | inferred | the exponentials hide behind the matmuls of the *other* consumer, as in *Between* | no other matmuls are left, so the speedup must come from there, but no tool shows it |
# | open | rung 19 has two consumers as well, and yet it is about as busy as *Neither* | the recorded numbers do not explain why it does not behave like *Between* already, so do not use *Between* to predict the speed of another kernel |
#
# The counts in the second row are for d = 128 without a mask. To see the machine code, run `fa2-lab xray 20 --full
# --sass`, and look for `MUFU.EX2` after the second `WARPGROUP.DEPBAR` of the loop. Remember from this section that the
# order in the source is only a wish. What the machine does is in its code and its counters.
#
# At d = 64, the table of speeds shows hardly any gain. There, some registers spill, as `fa2-lab xray 20 --d 64 --full`
# shows. By the table of rung 17, a thread already needs 152 of its 160 registers at d = 64, and `p_next` takes up to 32
# more. At d = 128, 184 + 32 = 216 still fit into 240.
#
# From rung 20 on, the model behind the strips makes two assumptions. The first comes from the machine code: a
# consumer's softmax begins only when its own P V has ended. The second is the inference of the table: the tensor cores
# work on whichever matmul was started first. So in the picture, the two consumers alternate because we have put this
# inference into the model. The picture shows what the inference would look like, but it is no further evidence for it.
# The model also still leaves out all waits between instructions, so its tensor cores idle less than the counters in the
# picture's titles report.

# %% tags=["hide-input"]
show("rung_timeline_20")

# %% [markdown]
# **Takeaway.** Start work early, don't overwrite anything that is still being read, and check what the compiler has
# made of your code.
#
# ## Part 6 · Programs that stay (9 minutes)
# The tensor cores are also idle at the start and at the end of each row block.
#
# ### Static or dynamic scheduling?
#
# So far, each row block has had its own program. A **persistent kernel** instead starts one program per SM, which works
# through one row block after another. The end of one row block, when O is stored, can then hide behind the start of the
# next. There are two ways to hand out the row blocks. In *static* scheduling, they are assigned in advance, so program
# p gets the blocks p, p + 132, p + 264, … In *dynamic* scheduling, a program asks a *tile scheduler* for the next
# number whenever it is free.
#
# **Predict.** Under a causal mask, each of 16 heads has 128 row blocks. The row blocks are assigned in advance, head by
# head, to 132 persistent programs. When do these programs finish, compared with rung 20, which launches one program for
# each row block?
#
# - ☐ earlier, since no new program has to start
# - ☐ at the same time, since the same blocks run on the same SMs
# - ☐ later
#
# <details><summary>Answer</summary>
#
# **later.** A head has 128 row blocks and there are 132 programs, so program p gets row block p of the first head, row
# block p + 4 of the next one, then row block p + 8, and so on. Some programs therefore get heavy blocks again and
# again, and others get light ones. Rung 20's plain launch is dynamic, because the GPU gives the next program to
# whichever SM is free.
# </details>

# %% [markdown]
# The figure shows this static scheduling, then the same with the row blocks of four heads side by side, as on rung 13,
# and finally dynamic scheduling:

# %%
show("dynamic_scheduling")

# %% [markdown]
# ### Rung 21: programs that stay
#
# With dynamic scheduling, all programs end at about the same time. In rung 21, the producer therefore fetches the
# number of the next row block. The consumers also need this number, so the producer passes it on through a **mailbox**.
# This is a buffer in shared memory with two barriers, like a stage of the ring. It holds a tensor with a single
# element, which `gl.max` in `receive` turns into a number. The number −1 tells the consumers that there are no more row
# blocks.

# %% tags=["nbval-ignore-output"]
show_listing("ladder/r21_persistent.py", "send", "receive")
show_listing("ladder/r21_persistent.py", "producer", begin="while t", end="gl.store(counter")

# %% [markdown]
# - `gl.atomic_add(counter, 1, sem="relaxed")` fetches the next number. *Relaxed* means that the addition is not ordered
#   with respect to other memory accesses. This is enough here, because the addition does not publish any other data.
#   Program p begins with block p, so the fetched numbers count from `gl.num_programs(0)` on.
# - The last two lines prepare the counter for the next launch. A program fetches one number during each block that it
#   computes, and it stops when that number is past the last block. All programs together therefore fetch as many
#   numbers as there are blocks. No number is fetched after the last one, so whichever program has fetched it sets the
#   counter back to 0.
# - `block_coord` turns the number t into the row block's first row `i`, its head, and its number of tiles. It keeps
#   `l2_group` heads side by side, as rung 13 does. `r` counts the row blocks of this program.
# - `first` counts tiles across all row blocks, because the ring continues from one row block to the next.
# - Q has two stages per consumer, so that the next Q can arrive early. O has its own buffer, so that its copy can run
#   while the next block is being computed. At d = 128, Q's second stages and O's buffers together take up the space
#   that a third stage of K and V would need.

# %% tags=["hide-input"]
climb.step("21", "SM cycles", "clock, GHz")

# %% tags=["hide-input"]
show("rung_timeline_21")

# %% [markdown]
# In the picture, the boxes with a thick edge belong to the next row block. In rung 20, the tensor cores idle between
# two row blocks until O has been stored and the next Q and K have arrived. In rung 21, the next row block's copies
# begin earlier, so the tensor cores wait for less than half of that time. What is left is a wait for the second tile of
# K, which is copied only after O. At d = 64, all four stages still fit, and without a mask, the rung gains more there
# than at d = 128.
#
# ## Part 7 · Fewer instructions, and power (11 minutes)
# Two kinds of work are left to remove. Some instructions only exchange values between lanes, and some bytes are moved
# more often than necessary, which costs power.
#
# ### Must m be the maximum?
#
# For every tile, the lanes of a row exchange values to find the row's maximum, and whenever the maximum grows, o has to
# be rescaled. But m cancels out of O and L, so it need not be the exact maximum. It has to be large enough to keep the
# exponentials from overflowing, and it must not be so far above the maximum that all of them become 0, because that
# would make ℓ zero. The next cell gives the 16 rows of a warp normally distributed scores, and counts the tiles in
# which m grows in at least one of these rows:

# %%
def growths(s, lag):  # s (tiles, rows, columns), as exponents of 2
    m, times, largest = s[0].max(axis=1), 0, 0.0
    for tile in s[1:]:
        top = tile.max(axis=1)
        if (top > m + lag).any():
            m, times = np.maximum(m, top), times + 1
        largest = max(largest, np.exp2(tile - m[:, None]).max())
    return times, largest


s16 = np.log2(np.e) * np.random.default_rng(16).standard_normal((128, 16, 128))
print(f"m grows in {growths(s16, lag=0)[0]} of 127 tiles")

# %% [markdown]
# **Predict.** Now let m *lag* by up to 8. The scores are exponents of 2. The warp decides for its 16 rows together. As
# long as no row has a score that is more than 8 above this row's m, all 16 values of m stay as they are. Otherwise,
# each of the 16 rises to the maximum of its row in this tile, unless it is already higher. So p is at most $2^8 = 256$.
# In how many of the 127 tiles does any m grow?
#
# - ☐ in none
# - ☐ in an eighth as many
# - ☐ in half as many
#
# <details><summary>Answer</summary>
#
# **in none.** A row's maximum is hardly ever more than 8 above the maximum of its first tile. Since m cancels out, it
# does not have to be exact, as long as its distance from the maximum is bounded. This is called *lazy rescaling*. The
# idea is from FlashAttention-4, which uses the same bound of 8.
#
# ```python
# times, largest = growths(s16, lag=8)
# print(f"m grows in {times} of 127 tiles, and the largest p is {largest:.3g}")
# ```
#
# ```text
# m grows in 0 of 127 tiles, and the largest p is 14.5
# ```
# </details>
#
# ### Rung 22: exchange values only if a lane needs it
#
# Rung 22 stores m and ℓ once per lane, in the shape (64, 4). The four lanes of a row always hold the *same* m, because
# a row of o is a sum over all keys, so a single α has to rescale it. Their ℓ differ, because each lane adds up only its
# own columns.
#
# For each of its two rows, a lane compares its own largest score with the row's m + 8. If *any* lane in the warp finds
# a score above this bound, the warp updates m in all of its 16 rows. The four lanes of each row then find their
# maximum, and the row's m becomes the larger of this maximum and the old m. If no lane does, the lanes exchange
# nothing, α is 1, and o stays as it is. For ℓ, no exchange is needed before the last tile, because the four lanes' sums
# can just as well be added up at the end.

# %% tags=["nbval-ignore-output"]
show_listing("ladder/r22_lagging.py", "softmax")

# %% [markdown]
# - `split_lanes` views 64 × 128 values as (64, 16, 4, 2), because each of the 4 lanes holds 2 out of every 8 columns. A
#   sum over the second and the fourth dimension therefore stays inside a lane.
#
# - `broadcast_state(m_new, x)` gives m, which has one value per row and lane, the shape of x, so that it can be
#   subtracted. No data moves.
#
# - `update_row_max(m_i, top, m_i + LAG)` makes the decision described above. It returns the old m, unless a lane's
#   `top` is above its limit, `m_i + LAG`. In this function, one warp can take a branch while another does not. Such
#   code has to be written in PTX, and chapter 12b explains it.
#
# - `rescale_o`, which the loop calls later, multiplies o by α. It has a branch of the same kind, so if α is 1 in all
#   lanes, the warp skips 64 multiplications per thread.

# %% tags=["nbval-ignore-output"]
climb.step("22", "issue slots used, %", "SM cycles", "clock, GHz")

# %% tags=["hide-input"]
show("rung_timeline_22")

# %% [markdown]
# In most tiles, a thread now executes about 400 instructions instead of 473. The box in the picture says 406. This
# count leaves out the 64 multiplications of o, but still includes the ten instructions of the exchange between lanes,
# which a warp skips in the same tiles.
#
# The lag has a cost. With an exact maximum, a row's largest p, which has the most weight in O, is 1 and needs no
# rounding. With a lagging m, the largest p can be 14.5, as in the answer above, and it has to be rounded. As a result,
# O's rounding error in our finished kernel is 3 to 4% larger than in the portable kernel, which keeps the exact
# maximum, for normally distributed inputs, and 10 to 17% larger for inputs with outliers (`fa2-lab bench accuracy`). In
# addition, the rung is slower at d = 64 without a mask, and we do not know why.
#
# ### Rung 23: is there room for a third consumer at d = 128?
#
# With tiles of 64 keys, s and p are half as wide, so there are enough registers. Is there also enough shared memory? At
# d = 128, 64 rows of Q, K, V or O take 16 KiB, so 14 such tiles fit into 227 KiB. A stage holds K and V, so it takes up
# two of these tiles if it has 64 keys, and four if it has 128. In rung 22, Q and O take 2 · 3 tiles, because each of
# the two consumers has one buffer for O and two for Q, so that the next block of Q can be fetched early. In rung 23, Q
# and O take only 3 · 1 tiles, because each of the three consumers has a single buffer for both. In the table, *keys in
# flight* are the keys for which all stages together have room:
#
# | | tiles for Q and O | tiles left | stages | keys in flight |
# | --- | ---: | ---: | ---: | ---: |
# | rung 22: two consumers, tiles of 128 keys | 2 · 3 | 8 | 2 | 256 |
# | three consumers, tiles of 64 keys | 3 · 3 | 5 | 2 | 128 |
# | rung 23: the same, with O in Q's buffer | 3 · 1 | 11 | 5 | 320 |
#
# Q and O can share a buffer, because O is stored only after the row block's last matmul Q Kᵀ has read Q. However, the
# buffer is not free again until TMA has read O from it, so the consumer calls `store_wait(0)` before `release`.

# %% tags=["nbval-ignore-output"]
show_change("22", "23", "CONFIGS", "CONFIGS_FEW_BLOCKS", "consumer")
climb.step("23", "L2 bytes", "tensor cores at work, %", "SM cycles", "clock, GHz")

# %% tags=["hide-input"]
show("rung_timeline_23")

# %% [markdown]
# Sharing the buffer has a cost, because the next row block's Q cannot arrive before O has been copied out of it. Large
# blocks also spread less evenly over the SMs. If there are fewer than 4 of them per SM, `CONFIGS_FEW_BLOCKS`
# therefore falls back to rung 22's sizes. `OWN_O_BUFFER` means that O has its own buffer, as in rung 22.
#
# In rung 22, the copies already ran far enough ahead, so rung 23 saves only a few cycles. The picture shows where they
# may come from. In the model, three consumers leave each softmax more time to spare before the next matmul of its
# consumer, so a delay is less likely to stop the tensor cores. But all these rungs run at the power limit (chapter 10),
# where busier tensor cores lower the clock. In rung 20, for example, the lower clock took away nearly a third of the
# speedup in cycles. In rung 23, the tensor cores are busier still, and yet the clock hardly changes, probably because
# moving fewer bytes leaves more power for the matmuls.
#
# ## Part 8 · Fences, and a kernel of your own (15 minutes)
# A kernel can wait at every barrier and still read old values, so before you write your own, you need one more rule.
#
# ### Where is a fence needed?
#
# The tensor cores read shared memory through the same path as TMA, so the same rules apply to both. This table lists
# all cases, including some that occur only in chapter 13:
#
# | before | after, in the same buffer | what is needed between them |
# | --- | --- | --- |
# | a thread stores (O's tile, dS, a new barrier) | TMA or a matmul reads | a **fence**, then the threads' barrier if another thread starts the copy or the matmul |
# | a thread *loads* (a row of values) | TMA writes | a **fence**, then a release |
# | TMA has written | a thread or a matmul reads | a wait at *filled* |
# | a matmul has read | TMA writes | `warpgroup_mma_wait`, then a release |
# | a matmul has read | a thread stores (O in Q's buffer) | `warpgroup_mma_wait` |
# | TMA has read (a store of O) | a thread stores | `store_wait` |
# | TMA has read (O in Q's buffer) | TMA writes | `store_wait`, then a release |
# | a thread stores | another thread loads | `gl.barrier()` within a warpgroup; an mbarrier's `arrive` and `wait` between two (rung 21's mailbox) |
#
# Why is a barrier not enough? In PTX's memory model, threads access shared memory through one *proxy* and TMA through
# another. A barrier only orders accesses made through the same proxy. What this allows is easiest to see in the first
# row, with O's tile. Read this timeline from top to bottom:
#
# | | the thread | TMA | what is in the buffer for TMA |
# | ---: | --- | --- | --- |
# | 1 | stores the new O | | the old O |
# | 2 | meets the other threads at the barrier | | perhaps still the old O, because the barrier does not order the store for TMA |
# | 3 | starts the copy | reads the buffer | perhaps still the old O, which then ends up in HBM |
#
# With a fence between 1 and 2, TMA is certain to see the new O in line 3. The rule in the second row is easier to
# forget, because the thread has not written anything that must become visible. But the same can happen in the other
# direction. Suppose that a stage holds a row of values for tile n (chapter 13 has such rows):
#
# | | the thread | TMA | what the thread gets |
# | ---: | --- | --- | --- |
# | 1 | loads a value of tile n | | – |
# | 2 | releases the stage | | – |
# | 3 | | writes tile n + `STAGES` into the stage | perhaps the value of tile n + `STAGES`, because the release does not order the load before TMA's write |
#
# The memory model only defines what *may* happen. A test that passes proves nothing here, and the model of the ring has
# only one way to access a buffer, so it cannot help either. You have to follow the table.
#
# You need not write the barrier in the table's first row yourself. If one thread starts a copy or a matmul that reads
# what other threads have stored, the compiler adds a barrier for all of these threads. In the PTX, which `fa2-lab xray
# 20 --ptx` prints, it is called `bar.sync`.
#
# **Takeaway.** You need a fence if a thread accesses a buffer first and TMA or a matmul accesses it next. In all other
# cases, a wait is enough.
#
# ## Recap
#
# - Matmuls and copies are asynchronous, so nothing that they use may be overwritten until the program has waited for
#   them.
# - A barrier counts arrivals, and it flips one bit when all arrivals that it expects have been made and all announced
#   bytes have landed. Each stage has two barriers, *filled* and *emptied*.
# - If several consumers share each tile of K and V, shared memory has space for longer tiles, and these make the kernel
#   faster. In our kernel, exponentials hide behind matmuls, probably those of the other warpgroup.
# - A persistent program fetches the number of its next row block only when it needs it. Since m is allowed to lag
#   behind the maximum, lanes seldom have to exchange values. Near the top of the ladder, power limits the speed.
#
# ## Exercises
#
# **Write a kernel.** For each of 64 rows of Q, the kernel finds the largest score over all keys. It works through the
# tiles of K and calls `tile_maxima` for each of them. Write that function. It has to start the copy of K's tile j,
# start the matmul, wait for it, and return each row's largest score. The copy of Q used the same barrier and has
# already completed its phase 0. N_k is a multiple of 64, so you need no mask. You can use `gl`, `mbarrier`, `tma`,
# `warpgroup_mma` and `warpgroup_mma_wait`. You do not need `gl.barrier()` before the copy, since the compiler adds it.
#
# <details><summary>Hint</summary>
#
# The function takes six lines. The first two are those of rung 15's `start`, but here K is two-dimensional, so the tile
# begins at `[64 * j, 0]`. Which phase does the j-th copy of K end? For the matmul, look at `scores` and at the line
# that follows its call in rung 15's loop.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# mbarrier.expect(arrived, K.block_type.nbytes)
# tma.async_load(K, [64 * j, 0], arrived, k)
# mbarrier.wait(arrived, (j + 1) & 1)
# s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
# s = warpgroup_mma_wait(0, deps=[s])
# return gl.max(s, 1)
# ```
# </details>

# %%
def tile_maxima(j, q, k, K, arrived, zero):
    # k: a buffer for one tile of K; zero: 64 × 64 zeros in registers, for the scores
    ...

# %% [markdown]
# Your function becomes part of a kernel like the one in part 2. That kernel holds Q's tile in `q` and a second buffer
# in `k`, and it ends with the loop below. The check first runs your function in NumPy, so that it can report a wait
# that never ends or a tile that is read too early. Then it compiles the whole kernel.

# %%
show_code(maxima.KERNEL[maxima.KERNEL.index("    m = gl.full") :].rstrip())
print(maxima.check_kernel(getsource(tile_maxima)))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
busy = {panel["name"].split(":")[0]: round(panel["share"], 2)
        for panel in overlap_timeline.data(d=128)["panels"]}
verdict("d = 128: tensor cores busy 67, 97, 98 and 100% in the four panels",
        [*busy.values()] == [0.67, 0.97, 0.98, 1.0])
verdict("m need not grow if it may lag", growths(s16, 0)[0] > 20 and growths(s16, 8)[0] == 0)
verdict("a forgotten release hangs in every order",
        all(try_consumer(forgetful, seed)[0] != "all done" for seed in range(50)))
verdict("the registers needed and available are those of the table",
        [64 * (2 * d + 3 * B_c) // 256 + 24 for d, B_c in ((64, 128), (128, 128), (128, 64))]
        == [152, 184, 136] and [min(255, (512 - 24) // n // 8 * 8) for n in (2, 3)] == [240, 160])
verdict("on rungs 14 to 16, a round takes about 1,790, 1,950 and 1,890 clocks, and its four "
        "copies take about 1,640",
        [round(1024 / climb.value(n, "tensor cores at work, %") * 100, -1)
         for n in ("14", "15", "16")] == [1790, 1950, 1890]
        and all(round(4 * rung_timeline.rung_costs(str(n)).copy, -1) == 1640 for n in (14, 15, 16)))
verdict("instructions per tile: 352, 374, 323, 321, 493, 473, 465, 473, 406 and 248 on rungs 14 to 23",
        [int(rung_timeline.rung_costs(f"{n}").softmax) for n in range(14, 24)]
        == [352, 374, 323, 321, 493, 473, 465, 473, 406, 248])
verdict("rung 15 is slower than rung 14",
        all(climb.factor("15", *shape) < 0.98 for shape in climb.shapes))
verdict("in rung 16, most issue slots stay empty", climb.value("16", "issue slots used, %") < 45)
verdict("rung 17 takes half of the bytes through L2, but is not faster",
        0.4 < climb.compare("17", "L2 bytes") < 0.65 and climb.factor("17") < 1.02)
verdict("rung 18 takes the same bytes through L2, but is faster",
        abs(climb.compare("18", "L2 bytes") - 1) < 0.1 < climb.factor("18") - 0.95)
verdict("rung 19 is about as busy as *Neither*, far from *Between*",
        50 < climb.value("19", "tensor cores at work, %") < 75)
errors = [[x.values["fa2_lab"][0] / x.values["fa2_lab portable"][0]
           for x in load("accuracy").rows if x.problem["rung"].startswith(f"O, {inputs}")]
          for inputs in ("normal", "outliers")]
verdict("the lag makes O's error 3 to 4% larger, and 10 to 17% with outliers",
        [[round(100 * (f(x) - 1)) for f in (min, max)] for x in errors] == [[3, 4], [10, 17]])
verdict("rung 23 saves bytes through L2 and a few cycles, and hardly lowers the clock",
        climb.compare("23", "L2 bytes") < 0.85
        and 0.93 < climb.compare("23", "SM cycles") < 1
        and climb.compare("23", "clock, GHz") > 0.985)

# %% [markdown] tags=["navigation"]
# [← The workshop](11_workshop.ipynb) · [The map](00_start.ipynb) · [Hopper, the kernel →](12b_hopper_kernel.ipynb)
