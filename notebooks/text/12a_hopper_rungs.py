# %% [markdown] tags=["navigation"]
# [← The workshop](11_workshop.ipynb) · [The map](00_start.ipynb) · [Hopper, the kernel →](12b_hopper_kernel.ipynb)

# %% [markdown]
# # 12a · Hopper, machine and rungs
#
# **What does an H100 want beyond FlashAttention-2?**
#
# FA2 was written for the A100. On NVIDIA's *Hopper* chips, the H100 and the H200, matmuls run while the program goes
# on, one thread can copy a whole tile, and warps can hand registers to each other. This chapter first presents the
# **machine**, with models that run here. Then it climbs the **rungs** 15 to 23, which use the machine, and for each
# rung it shows the lines that change and the speed that they gained. The producer warp and the early start of S come
# from FlashAttention-3 (2024). [Chapter 12b](12b_hopper_kernel.ipynb) reads the kernel that results.
#
# After this notebook you can
#
# - explain which warps wait for which in a Hopper kernel, and predict what happens if one wait or release is forgotten,
# - compute how many warpgroups (of four warps each), rows and stages fit on an SM,
# - write a small kernel in Gluon, and compile it for an H100 that need not be here.
#
# *Time: 110 minutes, in six parts. Before this: a Triton kernel that you have read ([08](08_triton_forward.ipynb)),
# [the ladder](10_ladder.ipynb), and lanes (a *lane* is one of a warp's 32 threads), layouts and banks from [appendix
# A](A_lanes.ipynb), which takes 25 minutes more. You do not need CUDA. Hardware: any laptop with Linux. Numbers were
# measured on an NVIDIA H200 in bf16.*

# %%
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
from fa2_lab.plots import timeline
from fa2_lab.plots.show import show
from fa2_lab.tools.xray import xray
from fa2_studio.book import maxima
from fa2_studio.book.hopper import Climb, change, read, show_code
from fa2_studio.book.ring import PAUSE, try_out
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## Part 1 · The machine (16 minutes)
# What can the chip do by itself, and how does a kernel ask for it?
#
# ## What do the tensor cores wait for?
#
# For a tile of B_r × B_c scores, the matmuls $QK^\top$ and $PV$ take 4 B_r B_c d FLOPs on the tensor cores, and other
# units compute B_r B_c exponentials. From the A100 to the H100, the tensor cores of one SM became twice as fast, so
# they now do 4,096 FLOPs per clock. The rate of exponentials, however, stayed at 16 per clock.

# %%
def clocks(chip, d, B_r=64, B_c=128):  # of the matmuls, of the exponentials
    return 4 * B_r * B_c * d // chip.tensor_per_clock, B_r * B_c // chip.exp_per_clock


for chip in (chips.A100, chips.H100):
    for d in (64, 128):
        matmuls, exps = clocks(chip, d)
        share = f"tensor cores busy {matmuls / (matmuls + exps):.0%} of the time"
        print(f"{chip.name:13} d = {d:3}: {matmuls:,} + {exps} clocks, {share}")

# %% [markdown]
# If each unit waits for the other, the tensor cores of an H100 are idle half of the time at d = 64. Therefore,
# everything else has to happen *while* the matmuls run.
#
# ## Which thread holds which number?

# %%
show("row_reduction")

# %% [markdown]
# Hopper's tensor cores work for a *warpgroup*, which is four neighbouring warps, or 128 threads. The picture follows
# one row in the result of a warpgroup's matmul with 64 keys. This result is a block of 64 × 64 numbers, and each of
# the four warps holds 16 of its rows. The 16 · 64 numbers of a warp are divided evenly among its 32 lanes, so a lane
# holds 32 numbers. Four lanes share a row, so these 32 numbers come from two rows, 16 from each. To find the maximum
# of a row, each lane compares its own 16 numbers, and then the four lanes exchange values twice.
#
# In Triton, the compiler decides which thread holds which number. In **Gluon**, a language beneath Triton, you
# decide. Gluon is also a dialect of Python and uses the same compiler, but a tensor's type includes a *layout*, and
# the language is imported as `gl` instead of `tl`. We need four layouts:
#
# | layout | used for | meaning |
# | --- | --- | --- |
# | `NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16])` | s, and also o, with d in place of B_c | the layout shown in the picture, in which Hopper's tensor cores (version 3) leave a result; there are 4 warps, each has 16 rows and B_c columns, and one instruction goes 16 deep |
# | `SliceLayout(1, …)` of it | m, ℓ | the same layout without its columns, with one number per row |
# | `DotOperandLayout(0, …, 2)` of it | p | the layout that the tensor cores expect of a left operand, with 2 numbers of 16 bits per register |
# | `NVMMASharedLayout` | tiles of q, k, v | a tile in shared memory, swizzled as in appendix A |
#
# Two tensors can be added only if their layouts are equal. `gl.convert_layout` changes the layout of a tensor, and it
# costs something only if a number has to move to another thread. The lanes that hold a row of o also hold the same
# row of s, so α moves from the layout of s to the layout of o at no cost.
#
# ## What does one matmul read?
#
# Hopper's instruction for the tensor cores is `wgmma`, which chapter 10 met in machine code as `HGMMA`. All warps of
# a warpgroup start it together, and its result has 64 rows and stays in registers. The right operand is always in
# shared memory, while the left operand may be there or in registers. One `wgmma` goes 16 deep along the dimension
# that is summed. A matmul is *asynchronous*, which means that the warpgroup starts it and goes on. Later, the
# warpgroup names how many of its matmuls may still be running, and waits for the others:
#
# ```python
# s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)  # started, but not finished
# o = warpgroup_mma(p, v, o, is_async=True)  # started after it
# s = warpgroup_mma_wait(1, deps=[s])  # at most 1 matmul may still run, so s is ready, but o need not be
# ```
#
# `use_acc=False` means that the result does not begin with what `zero` holds. `deps` names the values that the wait
# makes valid. Until this wait, everything that the matmul reads must stay in place. The warpgroup may do other work
# in the meantime, so P V of one tile can run during the exponentials of the next.
#
# By the clocks printed above, the two matmuls of a tile with 64 rows and 128 keys take 1,024 clocks at d = 128, so
# each of them takes 512. The exponentials of this tile also take 512, so one matmul is long enough to cover them. At
# d = 64, however, a matmul takes only 256 clocks. That is too short to cover the exponentials, so a second warpgroup
# will have to fill the gap.

# %%
show("wgmma")

# %% [markdown]
# Attention uses both options for the left operand. For $S = QK^\top$, both operands are tiles in shared memory. For
# $PV$, the left operand P is already in registers and in the right lanes, so P never goes through shared memory.
#
# ## What brings the tiles?
#
# Hopper has a copy engine called TMA (*tensor memory accelerator*). To start a TMA copy, one thread names a
# *descriptor*, the first row, a buffer in shared memory and a barrier, and then goes on with its work. The descriptor
# was made on the host. It records the address of the tensor, its shape and strides, the size of a tile, and the way to
# swizzle it. For rows outside of the tensor, TMA delivers zeros.

# %%
show("bulk_copy")

# %% [markdown]
# Here, the last tile has two keys and two rows of zeros. In V, the zeros do no harm. In K, however, a key of zeros
# has the score 0, so exp(0 − m) would be added to ℓ (chapter 08). Therefore, the scores are masked if a tile reaches
# past the last key.
#
# ## How do you know that a copy has arrived?
#
# A **barrier** tells you. It is a counter in shared memory, and it is made with the number of arrivals that it
# expects. A thread that starts a copy arrives at the barrier and announces how many bytes will come. TMA then counts
# these bytes off. When all expected arrivals and all announced bytes are there, a *phase* ends, and the barrier
# starts over. A thread that waits names the phase whose end it needs. Since a barrier keeps only a single bit, the
# *phase parity*, the phases are called 0, 1, 0, 1, … The next cell makes a model of a barrier that expects two
# arrivals, and asks it after each arrival which phase is over:

# %%
show_code(getsource(Barrier.arrive) + getsource(Barrier.over))
bar = Barrier("two arrivals", arrivals=2)
for arrival in range(5):
    over = (f"phase {phase} over? {bar.over(phase).ready()!s:5}" for phase in (0, 1))
    print(f"after {arrival} arrivals:", *over)
    bar.arrive("a thread")

# %% [markdown]
# In the first line, no thread has arrived yet, but phase 1 counts as over, as if it were the phase before the first
# one. Part 3 makes use of this. After four arrivals, the answers are those of the first line again. So a thread that
# was late and asks only now whether the first phase 0 is over learns that it is not, and it waits for the end of the
# next phase 0.
#
# In Gluon, the barrier is an `mbarrier`. `init` sets the number of arrivals that it expects. `expect` is one arrival
# that also announces the bytes of a copy, and `arrive` is one arrival without bytes. `wait` waits for the end of a
# phase.
#
# A barrier tells *when* something has happened. It does not ensure that TMA sees what a thread has written, because TMA
# reaches shared memory by a path of its own. After `init`, this takes a **fence**, `fence_async_shared()`. A second
# rule is for buffers that are used again. Before a copy may overwrite a buffer that a matmul has read,
# `warpgroup_mma_wait` must be over in all threads. Part 5 lists all such cases.
#
# ## Part 2 · A first kernel (15 minutes)
#
# ## Rung 15: write it all down yourself
#
# The rungs in Triton ended with rung 14. Rung 15 has the same tiles, stages and copies, but it is written in Gluon.
# First, here are the functions that start a copy and a matmul:

# %% tags=["nbval-ignore-output"]
r15 = "ladder/r15_gluon.py"
read(r15, "start", "scores")

# %% [markdown]
# With `pred=False`, neither `expect` nor `async_load` does anything. A *stage* is a buffer for one tile, and tile n
# goes to stage n mod `STAGES`. This rung has three stages. `permute` presents k as its transpose, although no number
# moves. Here is the loop:

# %% tags=["nbval-ignore-output"]
read(r15, "forward_kernel", begin="for n in range(T_c)", end="o_i = hopper.warpgroup_mma_wait")

# %% [markdown]
# Tiles come from right to left, so those that need a mask come first. `full` counts the tiles at the left that need
# no mask, whereas in chapter 08 it counted keys.
#
# Before the loop, two tiles are already on their way. In step n, the copy of tile n + 2 begins, and with three stages
# it goes into the stage of tile n − 1. One thread starts the copy for all, so all 128 threads must have finished with
# that stage before. `gl.barrier()` ensures this. It is not an `mbarrier`, because the threads just wait for each
# other. In fact, the kernel would also be right without this line, since Triton's compiler puts such a barrier
# (`bar.sync` in the PTX, which `fa2-lab xray 15 --ptx` prints) before each `expect`. `k_here` and `v_here` hold one
# `mbarrier` for each stage. A wait names the phase, which changes each time all stages have been used once.
#
# A few helper functions remain. `rows_of` drops the leading dimension of a stage, which is 1. `O_LAYOUT` is the
# layout of o in the table above. `mask` and `softmax` do what `visit` did in chapter 08. `rounded` turns p into 16
# bits by *inline assembly*, which is a line of PTX, NVIDIA's portable assembly language. This line rounds two numbers
# by one instruction, which is `F2FP` in the machine code (`fa2-lab xray 15 --sass` prints it). Triton 3.9 would
# choose the same instruction here without being told. At rung 23, however, it would put some pairs together the wrong
# way round and swap them afterwards, so the rungs write the line out.
#
# The next lines compare rung 15 with rung 14. *Limit before* names what limited the rung before, and *taken away*
# names what the new rung removes. The numbers in the table are TFLOP/s at 16,384 tokens and N = 4,096, each with its
# share of FlashAttention-3's speed in the same run. The *factor* is how many times as fast the new rung is as the one
# before. Below the factor come numbers of the compiled kernel, or what the GPU's counters showed at d = 128 without a
# mask.

# %% tags=["nbval-ignore-output"]
climb = Climb()
climb.step("15", "registers", "programs")

# %% [markdown]
# Rung 15 is slower than rung 14 for two reasons. Each tile now takes more instructions, and the warpgroup waits twice
# per tile for its matmuls, while Triton's code waited once. In exchange, every wait is now ours to move.
#
# The picture shows as strips over time what an SM does on rungs 14 and 15, and each later rung has such a picture as
# well. The strips come from a model. In this model, copies follow one another at the rate that L2 reaches, and a
# matmul takes the clocks that the tensor cores need for it. A softmax takes one clock for each instruction of a
# thread, because four warps have four schedulers.

# %% tags=["hide-input"]
show("strips_15")

# %% [markdown]
# ## Compile and run a file of your own
#
# A kernel for Hopper compiles on any Linux machine. The kernel below copies 64 rows of Q into shared memory and adds up
# each row. `BlockedLayout` describes how the threads share a tile. It lists the numbers per thread, the threads per
# warp, the warps, and the dimension that runs fastest. The tools call `forward`, and Gluon's imports come from
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
        triton_versions.newest_names()  # for a Triton that is older than 3.9
        forward = runpy.run_path(str(file))["forward"]
        wrong = forward(q, q, q, False) - q[0, 0].float().sum(1)
        print("off by at most", wrong.abs().max().item())

# %% [markdown]
# In this machine code, `UTMALDG` is a TMA copy, `SYNCS` is an operation on a barrier, `HGMMA` is a matmul, and `SHFL`
# is an exchange between lanes. There is no `HGMMA`, because this kernel multiplies nothing. By the layout, eight
# lanes share a row, so a sum takes three exchanges, and a warp has 16 rows, four at a time, which makes 12. In the
# shell, the same takes one line, `fa2-lab xray mine.py --chip sm_90 --d 64 --sass`. Now try to take `mbarrier.wait`
# out of the kernel. It still compiles, and nothing warns you.
#
# ## Part 3 · A ring, and who copies (24 minutes)
# Some warps copy, and others compute. How do they agree on which of them may touch a tile?
#
# ## A ring of stages, event by event
#
# In rung 15, the warps that compute also copy. If a separate warp copies instead, this *producer* and the *consumers*,
# which compute, must tell each other what they have done. Stages that are used again and again in the same order form a
# **ring**, or *circular buffer*. Each stage has two barriers:
#
# | barrier | who arrives | who waits | so that |
# | --- | --- | --- | --- |
# | *filled* | the producer (`expect`), and the copy's bytes | all consumers | no consumer reads too early |
# | *emptied* | every consumer | the producer | the producer does not write too early |
#
# Tile n is in round n // `STAGES`, because its stage has been used that often before. To read this tile, the
# consumers wait at *filled* for the end of phase `round & 1`. To write it, the producer waits at *emptied* for the
# end of phase `(round & 1) ^ 1`. In round 0, that is phase 1, which counts as over. The producer may therefore begin
# at once. This is right, since all stages are empty, although no consumer has released one yet.
#
# Other libraries call the same barriers *full* and *empty*. In CUTLASS, the producer's wait and its `expect` are
# together called `producer_acquire`. The consumers' wait is called `consumer_wait`, and their arrival at *emptied* is
# called `consumer_release`.
#
# The next cell runs a model of the ring ([book/ring.py](../fa2_studio/book/ring.py)) with three consumers, two stages
# and six tiles. Its actors are Python generators, and chance picks the one that goes on. `take(n)` waits until tile n
# is there, and `release(n)` gives its stage back. A consumer takes each tile, multiplies for a while, notes what it has
# read, and releases the tile. Two other versions of the consumer each make a mistake. In `forgetful`, consumer 1 does
# not release tile 2, whereas `hasty` releases each tile as soon as it has started its matmul.

# %%
def consumer(ring, T, c, seen, skip=None, early=False):  # skip: (tile, consumer)
    for n in range(T):
        stage = yield from ring.take(n)
        if early:
            ring.release(n)
        yield PAUSE  # the tensor cores read the tile all the while
        seen[c].append(ring.tiles[stage])
        if not early and (n, c) != skip:
            ring.release(n)


forgetful, hasty = partial(consumer, skip=(2, 1)), partial(consumer, early=True)
ends = [try_out(consumer, seed) for seed in range(500)]
right = "all done", 3 * [list(range(6))]
print(f"right in {sum(end == right for end in ends)} of 500 orders")

# %% [markdown]
# **Predict.** Six tiles go through two stages. Which of the two mistakes could escape a test?
#
# - ☐ the forgotten release
# - ☐ the early release
# - ☐ both, since each of them hangs or is wrong only in unlucky orders
#
# <details><summary>Answer</summary>
#
# **the early release.** Here, with two stages, `forgetful` hangs in every order, which is called a *deadlock*. `hasty`
# always ends, and its result is sometimes right. Either mistake shows only if a later tile needs the same stage. With
# four stages, for example, tile 2's stage is needed again by tile 6, but the six tiles end before that. So tests of
# such kernels take long sequences, repeat a call a thousand times, and compare every bit.
#
# ```python
# for stages in (2, 4, 6):
#     hangs, wrong = 0, 0
#     for seed in range(500):
#         hangs += try_out(forgetful, seed, stages)[0] != "all done"
#         wrong += try_out(hasty, seed, stages) != right
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
# ## Rung 16: who copies?
#
# Rung 16 gives the copies to a separate warp, the **producer**. The warpgroup that computes is the **consumer**. This
# division of work is called *warp specialisation*. The two roles meet only at the barriers of the ring:

# %% tags=["nbval-ignore-output"]
r16 = "ladder/r16_ring.py"
read(r16, "fill", "take", "release")
read(r16, "producer", begin="fill")

# %% [markdown]
# The consumer runs the loop of rung 15, but with `take` instead of a wait, with `release` after each matmul, and
# without any copy. The two roles start like this:

# %% tags=["nbval-ignore-output"]
read(r16, "forward_kernel", begin="q, k, v = ring", end="gl.warp_specialize")

# %% [markdown]
# - `arrive(…, count=1)` is one arrival, by one thread. It counts for the whole warpgroup, because the compiler makes
#   all 128 threads wait for each other before it.
# - `gl.warp_specialize` takes a list of (function, arguments). The first function runs on the launch's own 4 warps. For
#   the others, two lists set the number of warps, here `[1]`, and the number of registers per thread, here `[24]`. Only
#   whole warpgroups can hand over registers, so four warps are set aside for the producer although it needs one. Two
#   programs of 256 threads share 65,536 registers, which makes 128 per thread. Each producer thread keeps 24 registers
#   and gives its other 104 to a consumer thread, which then has 232.

# %% tags=["nbval-ignore-output"]
climb.step("16", "issue slots used, %")

# %% [markdown]
# The consumer executes fewer instructions per tile now, because the copies and their waits have left its loop. But no
# unit was fully used before, and most issue slots stayed empty, so why does the rung gain? A warpgroup executes its
# own instructions one after another, so each instruction delays its tile, even if other slots are free.

# %% tags=["hide-input"]
show("strips_16")

# %% [markdown]
# ## Rung 17: two consumers share a tile
#
# So far, each tile of K and V comes from L2 for only 64 rows. Two consumers in one program, with 64 rows each, can
# read the same tile. How many consumers do the registers allow? A consumer thread holds o and s in fp32 and p in 16
# bits. The block o has 64 · d numbers, s has 64 · B_c numbers, and p has as many as s but needs only half a register
# for each. Divided among 128 threads, that makes $64\,(d + 1.5\,B_c) / 128$ registers per thread, and m, $\ell$ and
# the rest take about 24 more. Appendix A counts 40 for the rest, but here a descriptor holds the addresses, so 24 are
# enough:
#
# | d | keys per tile | consumers | registers needed | available | |
# | ---: | ---: | ---: | ---: | ---: | --- |
# | 64 | 128 | 3 | 152 | 160 | rung 18 |
# | 128 | 128 | 2 | 184 | 240 | rung 18 |
# | 128 | 128 | 3 | 184 | 160 | too few |
# | 128 | 64 | 3 | 136 | 160 | rung 23 |
#
# To see how many registers are available, take one thread of each warpgroup. Together, these threads have 65,536 /
# 128 = 512 registers. The producer's thread keeps 24, and the threads of n consumers share the rest in steps of 8. So
# (512 − 24) / 3 gives 160 registers, and (512 − 24) / 2 gives 240. Rung 17 still has tiles of 64 keys, with two
# consumers at d = 128 and three at d = 64. Three consumers at d = 128 follow only in rung 23, which has to find shared
# memory for them.
#
# **Predict.** Under the causal mask, the lower 64 rows see more tiles than the upper ones. May the upper consumer
# simply leave out the tiles that it does not see?
#
# - ☐ no, it must take and release them
# - ☐ yes, since it never reads them
# - ☐ yes, if it counts them, so that its next wait names the right phase
#
# <details><summary>Answer</summary>
#
# **no, it must take and release them.** *Emptied* now expects an arrival from every consumer. If one arrival is
# missing, the producer waits for ever. So the rung has a new loop, which takes and releases the tiles that a consumer
# does not see.
#
# Nor may a consumer release a tile without waiting for it. Suppose that consumer A does not wait. It releases stage 0
# for this round and again for the next, before consumer B has released it once. Then *emptied* has counted two arrivals
# and ends its phase, so the producer overwrites a tile that B still reads.
# </details>

# %% tags=["nbval-ignore-output"]
climb.step("17", "L2 bytes", "tensor cores at work, %", "programs")

# %% tags=["hide-input"]
show("strips_17")

# %% [markdown]
# Only half of the bytes come through L2 now, but the rung is not faster, for two reasons. One program fits on an SM
# instead of two, so at d = 128 an SM still has two warpgroups that compute. Moreover, no warp was waiting for L2 any
# more, because the ring delivers tiles early enough. Without pauses between calls, the rung gains 4%, because its
# clock stays higher (chapter 10).
#
# ## Rung 18: long tiles
#
# One ring now serves both consumers, so at d = 128 shared memory has room for tiles of 128 keys. A row of d = 128
# numbers in 16 bits takes 256 bytes. So the 64 rows of Q of each consumer take 16 KiB, and a stage, with 128 rows of
# K and 128 of V, takes 64 KiB. Two consumers and three stages add up to 2 · 16 + 3 · 64 = 224 KiB, of the 227 KiB
# that an SM has for its programs. In rung 16, a program had only 113 KiB, because two programs shared the SM. That is
# too little for such tiles, although the registers would have sufficed (184 of 232). The sizes are all that changes:

# %% tags=["nbval-ignore-output"]
change("17", "18", "SIZES")
climb.step("18", "L2 bytes", "tensor cores at work, %")

# %% tags=["hide-input"]
show("strips_18")

# %% [markdown]
# The same bytes now arrive in half as many tiles. A tile has some costs only *once*, however long it is, and these
# are therefore paid half as often. They are two waits for matmuls, a rescaling of o, the barriers, and the exchange
# of the row's maximum. In the picture, the strips are therefore longer, and fewer instructions come between the
# matmuls.
#
# ## Part 4 · Two warpgroups that hide each other's waits (24 minutes)
# The tensor cores are still idle while exponentials are computed, and at both ends of a row block.
#
# ## Rung 19: the first tile before the loop
#
# The next rung will look ahead, which means that a warpgroup starts S of the next tile together with P V of this one.
# The first S, however, has no P V beside it. So rung 19 takes the first tile, which is the rightmost one, out of the
# loop. No other tile can reach past the last key, so without a causal mask the loop no longer needs to test for it.
# In the change below, `mine` is the number of tiles that the rows of this consumer see. It is at least 1, so that
# there always is a first tile. If the rows see no key in it, the mask hides all of it.

# %% tags=["nbval-ignore-output"]
change("18", "19", "consumer")
climb.step("19", "tensor cores at work, %")

# %% tags=["hide-input"]
show("strips_19")

# %% [markdown]
# ## What hides under what?

# %%
show("timeline")

# %% [markdown]
# It is not documented how the hardware divides the tensor cores between two warpgroups, so the model takes two
# extremes. In addition, a warpgroup can *look ahead*. It then starts the next S before P V of this tile, so that this P
# V runs during the next exponentials. The general name for this is *software pipelining*, and FlashAttention-3 calls it
# intra-warpgroup overlap.
#
# | the tensor cores serve the warpgroups | in equal shares | first come, first served |
# | --- | --- | --- |
# | without looking ahead | *Neither*, 67% | *Between*, 98% |
# | looking ahead | *Within*, 97% | *Both*, 100% |
#
# In *Neither*, both warpgroups start together and stay together, so both wait for exponentials at the same time. In
# *Between*, they move apart by themselves, and nearly always one of them multiplies. The tensor cores are busy 61.5% of
# the time in rung 19, which does not look ahead, and 75.5% in rung 20, which does. The panels leave out all other
# instructions, so each rung is less busy than its panel. The next section looks at what the compiler makes of it.
#
# ## Rung 20: start the next scores before you need them
#
# Here is the loop of rung 20:

# %% tags=["nbval-ignore-output"]
read("ladder/r20_overlap.py", "consumer", begin="for n in range(begin + 1", end="p_ij = p_next")

# %% [markdown]
# - The scores of tile n start first, and then P V of tile n − 1. The matmuls of one warpgroup end in the order in which
#   they were started, so at `warpgroup_mma_wait(1)` the scores are ready. At the second wait, with 0, P V has also
#   ended. Then V's tile can be released, and o may be rescaled.
# - p is a left operand *in registers* of a running matmul, so the next p goes to other registers, `p_next`.
#
# In the next list, *clock* is cycles divided by time in a run that pauses between calls, whereas chapter 10 lists the
# clock without pauses.

# %% tags=["nbval-ignore-output"]
climb.step("20", "tensor cores at work, %", "stall: barrier", "SM cycles", "clock, GHz")

# %% [markdown]
# The early start of S gained 16%. In the source, we wait late for P V. However, NVIDIA's assembler, `ptxas`, places
# this second wait *before* nearly all exponentials. So rung 20 hides most row maxima under its own P V, but hardly an
# exponential. At d = 128 without a mask, it hides 1 or 2 of the 66 that a thread computes per tile, 64 for p and two
# for α. The gain must therefore come from the *other* consumer, which multiplies meanwhile, as in *Between*. That is
# inferred, because no tool shows it, and the record does not show why rung 19 did not already behave in this way.
#
# `fa2-lab xray 20 --full --sass` prints the machine code. Look for `MUFU.EX2` after the second of the loop's lines
# `WARPGROUP.DEPBAR`. At d = 64, some numbers spill, as `fa2-lab xray 20 --d 64 --full` shows.
#
# In the strips, the model gives the tensor cores to whichever matmul was started first, from rung 20 on. It still
# leaves out all waits between instructions, so its tensor cores wait less than the counters in the titles report.

# %% tags=["hide-input"]
show("strips_20")

# %% [markdown]
# **Takeaway.** Start early, keep in place what is still being read, and look at what the compiler made of it.
#
# ## Static or dynamic scheduling?
#
# So far, each row block has had its own program. A **persistent kernel** instead starts one program per SM, which
# takes one row block after another. So the end of one row block, when O is stored, hides under the start of the next.
# There are two ways to hand out the row blocks. In *static* scheduling, they are dealt out in advance, so program p
# gets the blocks p, p + 132, p + 264, … In *dynamic* scheduling, a *tile scheduler* lets a program fetch the next
# number whenever it is free.
#
# **Predict.** There is a causal mask, and each of 16 heads has 128 row blocks. The row blocks are dealt out in advance,
# head by head, to 132 persistent programs. When do these programs end, compared with rung 20, which launches one
# program for each row block?
#
# - ☐ earlier, since no program has to start
# - ☐ at the same time, since the same blocks run on the same SMs
# - ☐ later
#
# <details><summary>Answer</summary>
#
# **later.** Program p gets row block p of the first head, then row block p + 4 of the next, and then p + 8. So it gets
# heavy blocks again and again, or light ones. Rung 20's plain launch is dynamic, since the GPU gives the next program
# to an SM that is free.
# </details>

# %%
show("tickets")

# %% [markdown]
# ## Rung 21: programs that stay
#
# With dynamic scheduling, all programs end together. So in rung 21, the producer fetches the number of the next row
# block. The consumers need this number as well, so it goes through shared memory, with two barriers as at a stage of
# the ring. This is a **mailbox**. The number −1 tells the consumers that there are no more row blocks.

# %% tags=["nbval-ignore-output"]
read("ladder/r21_persistent.py", "send", "receive")
read("ladder/r21_persistent.py", "producer", begin="while t", end="gl.store(counter")

# %% [markdown]
# - `gl.atomic_add(counter, 1, sem="relaxed")` fetches the next number. *Relaxed* means that nothing else is handed
#   over with it, so memory need not be put in order. Program p begins with block p, so fetched numbers count from
#   `gl.num_programs(0)` on.
# - The last two lines make the counter ready for the next launch. Each program stops when it has fetched a number
#   past the last block. All programs together therefore fetch as many numbers as there are blocks, and the program
#   that fetches the last of these numbers sets the counter back to 0.
# - `first` counts tiles over all row blocks, because the ring goes on from one row block to the next.
# - Q has two stages for each consumer, so that the next Q arrives early. O has its own buffer, so its copy runs while
#   the next block is being computed. Together, they take up the room that a third stage would need.

# %% tags=["hide-input"]
climb.step("21", "SM cycles", "clock, GHz")

# %% tags=["hide-input"]
show("strips_21")

# %% [markdown]
# ## Part 5 · Fewer instructions, and power (17 minutes)
# Two things are left to save: instructions that exchange values between lanes, and bytes that cost power.
#
# ## Must m be the maximum?
#
# At every tile, the lanes of a row exchange values to find its maximum, and when the maximum grows, o has to be
# rescaled. But m cancels out of O and L. It only has to keep the exponentials from overflowing, and from vanishing
# altogether. If m were far above the maximum, ℓ would be 0. The next cell takes the 16 rows of a warp with normally
# distributed scores, and counts the tiles in which m grows in at least one of the rows:

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
# **Predict.** Now m may *lag* by 8. The scores are exponents of 2. All m stay as they are until some score is more than
# 8 above its row's m, so p is at most $2^8 = 256$. In how many of the 127 tiles does m grow?
#
# - ☐ in none
# - ☐ in an eighth as many
# - ☐ in half as many
#
# <details><summary>Answer</summary>
#
# **in none.** The maximum of a row is hardly ever more than 8 above the maximum of the row's first tile. Since m
# cancels out, it need not be exact, only bounded. This is called *lazy rescaling*, and FlashAttention-4 takes the same
# bound of 8.
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
# ## Rung 22: exchange values only if a lane needs it
#
# Rung 22 keeps m and ℓ lane by lane, in the shape (64, 4). Each lane compares its own largest score with m + 8. If
# *any* lane of the warp is above that, the four lanes of each row find their maximum, and m becomes the larger of this
# maximum and m. Otherwise, the lanes exchange nothing, α is 1, and o is left as it is. ℓ needs no exchange before the
# last tile, because what is only added up can also be added up later.

# %% tags=["nbval-ignore-output"]
read("ladder/r22_lagging.py", "softmax")

# %% [markdown]
# `by_lanes` views 64 × 128 numbers as (64, 16, 4, 2). Of each 8 columns, each of the 4 lanes holds 2. A sum over the
# second and the fourth dimension therefore stays inside a lane. In `update_row_max`, one warp jumps while another
# does not, so it is written in PTX, and chapter 12b reads it. `rescale_o` does the same for o. If α is 1 in all
# lanes, the warp jumps over 64 multiplications per thread.

# %% tags=["nbval-ignore-output"]
climb.step("22", "issue slots used, %", "SM cycles", "clock, GHz")

# %% tags=["hide-input"]
show("strips_22")

# %% [markdown]
# The lag has a cost. With an exact maximum, the largest p of a row, which has the most weight in O, is 1 and needs no
# rounding. With a lagging m, the largest p may be 14.5, as in the answer above, and it is rounded. So the rounding
# error of O grows by 3 to 4% on normally distributed numbers, and by 10 to 17% with outliers (`fa2-lab bench
# accuracy`). In addition, the rung is slower at d = 64 without a mask, and we do not know why.
#
# ## Rung 23: is there room for a third consumer at d = 128?
#
# With tiles of 64 keys, s and p are half as wide, so the registers suffice. Does shared memory suffice as well? At
# d = 128, 64 rows of Q, K, V or O take 16 KiB, so 227 KiB have room for 14 such tiles. A stage holds K and V. It takes
# two of these tiles if it has 64 keys, and four if it has 128 keys. In rung 22, Q and O take 2 · 3 tiles. Each of the
# two consumers has one buffer for O and two for Q, because the next block's Q is fetched early. In rung 23, Q and O
# take 3 · 1 tiles, since each of the three consumers has a single buffer for both:
#
# | | tiles for Q and O | tiles left | stages | keys on their way |
# | --- | ---: | ---: | ---: | ---: |
# | rung 22: two consumers, tiles of 128 keys | 2 · 3 | 8 | 2 | 256 |
# | three consumers, tiles of 64 keys | 3 · 3 | 5 | 2 | 128 |
# | rung 23: the same, with O in Q's buffer | 3 · 1 | 11 | 5 | 320 |
#
# Q and O can share a buffer, because O is stored only after the last S of the row block has read Q. However, this
# buffer is free again only when TMA has read O from it. So the consumer calls `store_wait(0)` first, and then
# `release`.

# %% tags=["nbval-ignore-output"]
change("22", "23", "SIZES", "FEW", "consumer")
climb.step("23", "L2 bytes", "tensor cores at work, %", "SM cycles", "clock, GHz")

# %% tags=["hide-input"]
show("strips_23")

# %% [markdown]
# This has a cost: the next row block's Q cannot arrive before O has left. Besides, large blocks fill the SMs less
# evenly, so `FEW` keeps the sizes of rung 22 if there are fewer than 4 such blocks per SM. `APART` means that O has its
# own buffer, as it had in rung 22.
#
# In rung 22, copies already ran ahead far enough, so rung 23 saves only few cycles. But all these rungs run at the
# power limit (chapter 10), where busier tensor cores lower the clock. Rung 20, for example, lost nearly a third of its
# gain in cycles in this way. In rung 23, the tensor cores get busier once more, but the clock stays the same, or
# nearly, because bytes that do not move leave power for the matmuls.
#
# ## Where is a fence needed?
#
# The tensor cores also read shared memory by TMA's path, so they need the same care. This table lists all cases, and
# some of them occur only in chapter 13:
#
# | before | after, in the same buffer | what is needed between them |
# | --- | --- | --- |
# | a thread stores (O's tile, dS, a new barrier) | TMA or a matmul reads | a **fence**, then the threads' barrier if another thread starts the copy or the matmul |
# | a thread *loads* (a line of numbers) | TMA writes | a **fence**, then a release |
# | TMA has written | a thread or a matmul reads | a wait at *filled* |
# | a matmul has read | TMA writes | `warpgroup_mma_wait`, then a release |
# | a matmul has read | a thread stores (O in Q's buffer) | `warpgroup_mma_wait` |
# | TMA has read (a store of O) | a thread stores | `store_wait` |
# | TMA has read (O in Q's buffer) | TMA writes | `store_wait`, then a release |
# | a thread stores | another thread loads | in one warpgroup `gl.barrier()`, in two an mbarrier's `arrive` and `wait` (rung 21's mailbox) |
#
# The second line is easily forgotten, because nothing was written that should become visible. It follows from PTX's
# memory model. Threads and TMA reach shared memory through two *proxies*, and a barrier orders accesses of one proxy
# only. Between two proxies, only a proxy fence creates an order, and this is true for a load before a write as well
# (chapter 13). If a thread starts a copy or a matmul after other threads have stored, the compiler adds the threads'
# barrier of the first line. In the PTX, which `fa2-lab xray 20 --ptx` prints, this barrier is `bar.sync`.
#
# **Takeaway.** A fence is needed if a thread's access comes first, and the access of TMA or of a matmul comes second.
# Otherwise, a wait is enough.
#
# ## Part 6 · A kernel of your own (14 minutes)
#
# ## Recap
#
# - Matmuls and copies are started, not called, so what they use must stay in place until the program has waited for
#   them.
# - A barrier counts arrivals and flips one bit. Each stage has two barriers, *filled* and *emptied*.
# - Consumers that share tiles made room for longer tiles, and longer tiles made the kernel faster. Exponentials hide
#   under matmuls, here probably under those of the other warpgroup.
# - Row blocks are fetched when they are needed. m may lag, so lanes seldom have to exchange values. Near the top of the
#   ladder, power decides.
#
# ## Exercises
#
# **Write a kernel.** It finds the largest score of each of 64 rows of Q, over all keys. The kernel goes through the
# tiles of K and calls `tile_maxima` for each. Write that function: start the copy of tile j of K, start the matmul,
# wait for it, and return the largest score of each row. Q's copy has already ended phase 0 of the same barrier. N_k is
# a multiple of 64, so no mask is needed. You can use `gl`, `mbarrier`, `tma`, `warpgroup_mma` and `warpgroup_mma_wait`.
# You do not need `gl.barrier()` before the copy, since the compiler adds it.
#
# <details><summary>Hint</summary>
#
# The function takes six lines. The first two are in rung 15's `start`, but here K is two-dimensional, so the tile
# begins at `[64 * j, 0]`. Which phase does the j-th copy of K end? For the matmul, look at `scores`, and at the line
# after it in rung 15's loop.
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
# Your function becomes part of a kernel like the one of part 2, which has Q's tile in `q`, a second tile in `k`, and
# this loop at its end. The check first runs your function on NumPy, so that it can report a wait that never ends, or a
# tile that was read too early. Then it compiles the whole kernel.

# %%
show_code(maxima.KERNEL[maxima.KERNEL.index("    m = gl.full") :].rstrip())
print(maxima.judge(getsource(tile_maxima)))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
busy = {panel["name"].split(":")[0]: round(panel["share"], 2) for panel in timeline.data(d=128)["panels"]}
verdict("d = 128: tensor cores busy 67, 97, 98 and 100% in the four panels", [*busy.values()] == [0.67, 0.97, 0.98, 1.0])
verdict("m need not grow if it may lag", growths(s16, 0)[0] > 20 and growths(s16, 8)[0] == 0)
verdict("a forgotten release hangs in every order", all(try_out(forgetful, seed)[0] != "all done" for seed in range(50)))
verdict("registers needed and available", [64 * (2 * d + 3 * B_c) // 256 + 24 for d, B_c in ((64, 128), (128, 128), (128, 64))]
        == [152, 184, 136] and [min(255, (512 - 24) // n // 8 * 8) for n in (2, 3)] == [240, 160])  # fmt: skip
verdict("rung 15 is slower than rung 14", all(climb.factor("15", *shape) < 0.98 for shape in climb.shapes))
verdict("in rung 16, most issue slots stay empty", climb.value("16", "issue slots used, %") < 45)
verdict("rung 17 takes half of the bytes through L2, but is not faster",
        0.4 < climb.compare("17", "L2 bytes") < 0.65 and climb.factor("17") < 1.02)  # fmt: skip
verdict("rung 18 takes the same bytes, and is faster", abs(climb.compare("18", "L2 bytes") - 1) < 0.1 < climb.factor("18") - 0.95)
verdict("rung 19 is about as busy as *Neither*, far from *Between*", 50 < climb.value("19", "tensor cores at work, %") < 75)
verdict("rung 23 saves bytes through L2 and few cycles, and hardly lowers the clock", climb.compare("23", "L2 bytes") < 0.85
        and 0.93 < climb.compare("23", "SM cycles") < 1 and climb.compare("23", "clock, GHz") > 0.985)  # fmt: skip

# %% [markdown] tags=["navigation"]
# [← The workshop](11_workshop.ipynb) · [The map](00_start.ipynb) · [Hopper, the kernel →](12b_hopper_kernel.ipynb)
