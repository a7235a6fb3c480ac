# %% [markdown] tags=["navigation"]
# [← The workshop](11_workshop.ipynb) · [The map](00_start.ipynb) · [Hopper, the kernel →](12b_hopper_kernel.ipynb)

# %% [markdown]
# # 12a · Hopper, machine and rungs
#
# **What does an H100 want beyond FlashAttention-2?**
#
# FA2 was written for the A100. On NVIDIA's *Hopper* chips, the H100 and the H200, products run while the program goes on,
# one thread can copy a whole tile, and warps can hand registers to each other. Here is the **machine**, as models that run
# here, and the **rungs** 15 to 23 that use it, each as the lines that change and what they bought. The producer warp and the
# early S are from FlashAttention-3 (2024). [Chapter 12b](12b_hopper_kernel.ipynb) reads the kernel that comes out.
#
# After this notebook you can
#
# - say who waits for whom in a Hopper kernel, and what happens if one wait or release is forgotten,
# - work out how many warpgroups, rows and stages fit on an SM,
# - write a small kernel in Gluon, and compile it for an H100 that need not be here.
#
# *Time: 135 minutes, in six sittings. You need a Triton kernel that you have read ([08](08_triton_forward.ipynb)), [the
# ladder](10_ladder.ipynb), and lanes (a *lane* is one of a warp's 32 threads), layouts and banks: [appendix A](A_lanes.ipynb),
# 25 minutes more. No CUDA. Hardware: any laptop with Linux. Numbers were measured on an NVIDIA H200 in bf16.*

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
from fa2_lab.plots import bulk_copy, row_reduction, tickets, timeline, wgmma
from fa2_lab.plots.show import show
from fa2_lab.tools.xray import xray
from fa2_studio.book import maxima
from fa2_studio.book.hopper import Climb, change, read, show_code
from fa2_studio.book.ring import PAUSE, try_out
from fa2_studio.book.verdicts import verdict

# %% [markdown]
# ## Sitting 1 · The machine (25 minutes)
# What can the chip do by itself, and how does a kernel ask for it?
#
# ## What do the tensor cores wait for?
#
# A tile of B_r × B_c scores takes 4 B_r B_c d FLOPs on the tensor cores, for $QK^\top$ and $PV$, and B_r B_c exponentials on
# other units. From the A100 to the H100 the tensor cores of one SM became twice as fast: 4,096 FLOPs a clock.
# Exponentials stayed at 16 a clock.

# %%
def clocks(chip, d, B_r=64, B_c=128):  # products, exponentials
    return 4 * B_r * B_c * d // chip.tensor_per_clock, B_r * B_c // chip.exp_per_clock


for chip in (chips.A100, chips.H100):
    for d in (64, 128):
        products, exps = clocks(chip, d)
        share = f"{products / (products + exps):.0%} of the time tensor cores"
        print(f"{chip.name:13} d = {d:3}: {products:,} + {exps} clocks, {share}")

# %% [markdown]
# If one waits for the other, the tensor cores of an H100 stand still half of the time at d = 64. So everything else has to
# happen *under* the products.
#
# ## Who holds which number?

# %%
show(row_reduction.draw(**row_reduction.data()))

# %% [markdown]
# The picture is the result of a warpgroup's product with 64 keys, 64 × 64 numbers: 16 rows for each of four warps, a row in
# four lanes. The filled places are one lane's: 32 numbers in two rows. A row's maximum takes two exchanges.
#
# In Triton the compiler decides which thread holds which number. In **Gluon**, a language beneath Triton, you decide:
# Python again, the same compiler, but a tensor has a *layout* in its type. In code it is `gl`, not `tl`. Four layouts:
#
# | layout | of what | in words |
# | --- | --- | --- |
# | `NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16])` | s; also o, with d in place of B_c | the picture: as Hopper's tensor cores (version 3) leave a result; 4 warps, each 16 rows and B_c columns; one instruction goes 16 deep |
# | `SliceLayout(1, …)` of it | m, ℓ | the same without its columns: one number for each row |
# | `DotOperandLayout(0, …, 2)` of it | p | as the tensor cores want a left factor; 2 numbers of 16 bits to a register |
# | `NVMMASharedLayout` | tiles of q, k, v | in shared memory, swizzled as in appendix A |
#
# Only tensors of equal layouts can be added; `gl.convert_layout` changes one, and costs something only where a number has to
# move. A row of o lies in the same lanes as that of s, so α goes from one to the other for nothing.
#
# ## What does one product read?
#
# Hopper's instruction for the tensor cores is `wgmma`. A warpgroup starts it together. The result has 64 rows and stays in
# registers. The right factor always lies in shared memory, the left one there or in registers. One `wgmma` goes 16
# deep along the dimension that is summed. A product is *asynchronous*: the warpgroup starts it and goes on. Later it says
# how many of its products may still be running, and waits for the others:
#
# ```python
# s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)  # started, not there yet
# o = warpgroup_mma(p, v, o, is_async=True)  # started after it
# s = warpgroup_mma_wait(1, deps=[s])  # at most 1 still runs: s is there, o need not be
# ```
#
# `use_acc=False`: the result does not begin with what `zero` holds. `deps` names the values that the wait makes valid.
# Until then everything that the product reads must stay in place, and the warpgroup may do other work: P V of one tile can
# run under the exponentials of the next. At d = 128 a product with 128 keys takes 512 clocks, and so do their exponentials.
# At d = 64 it takes 256, too few to cover them: a second warpgroup will have to fill the hole.

# %%
show(wgmma.draw(**wgmma.data()))

# %% [markdown]
# Attention uses both places for its left factor. For $S = QK^\top$ both factors are tiles in shared memory. For $PV$ the
# left factor P is already in registers, in the right lanes. So P never goes through shared memory.
#
# ## Who brings the tiles?
#
# Hopper has a copy engine, called TMA (*tensor memory accelerator*). One thread names a *descriptor*, the first row, a
# place in shared memory and a barrier, and goes on. The descriptor was made on the host: where the tensor lies, its
# shape and strides, how large a tile is, and how to swizzle it. What lies outside of the tensor arrives as zeros.

# %%
show(bulk_copy.draw(**bulk_copy.data()))

# %% [markdown]
# Here the last tile has two keys and two rows of zeros. In V zeros do no harm. In K they do: a key of zeros has the score
# 0, and exp(0) = 1 would join ℓ (chapter 08). So the scores are masked where a tile reaches past the last key.
#
# ## How do you know that a copy has arrived?
#
# By a **barrier**: a counter in shared memory. It is made with the number of arrivals that it expects. Whoever starts a
# copy arrives and says how many bytes will come; the copy engine counts them off. When all have arrived and all bytes are
# there, a *phase* ends, and the barrier starts over. Whoever waits names the phase whose end it needs. A barrier keeps a
# single bit, so phases are called 0, 1, 0, 1, …

# %%
show_code(getsource(Barrier.arrive) + getsource(Barrier.over))
bar = Barrier("two arrivals", arrivals=2)
for arrival in range(5):
    over = (f"phase {phase} over? {bar.over(phase).ready()!s:5}" for phase in (0, 1))
    print(f"after {arrival} arrivals:", *over)
    bar.arrive("somebody")

# %% [markdown]
# Look at the first line. Nobody has arrived, and phase 1 counts as over: it looks like the phase before the first one.
# (Sitting 3 needs that.) After four arrivals the answers are those of the first line again: who asks only now for the first
# phase 0 waits for the next. In Gluon the barrier is an `mbarrier`: `init` says how many arrivals it expects, `expect` is
# one arrival and announces a copy's bytes, `arrive` is one without bytes, `wait` waits for the end of a phase.
#
# A barrier says *when*. It does not say that the copy engine, which reaches shared memory by a way of its own, sees what a
# thread has written: after `init` that takes a **fence**, `fence_async_shared()`. And before a copy goes where a product has
# read, `warpgroup_mma_wait` must be over, in all threads. (Sitting 5 lists all cases.)
#
# ## Sitting 2 · A first kernel (15 minutes)
#
# ## Rung 15: write it all down yourself
#
# Triton ended with rung 14. Rung 15 has the same tiles, stages and copies in Gluon. First what starts a copy, and what
# starts a product:

# %% tags=["nbval-ignore-output"]
r15 = "ladder/r15_gluon.py"
read(r15, "start", "scores")

# %% [markdown]
# With `pred=False` neither `expect` nor `async_load` does anything. A *stage* is room for one tile: tile n goes to stage n
# mod `STAGES`. `permute` sees k as its transpose; nothing moves. The loop:

# %% tags=["nbval-ignore-output"]
read(r15, "forward_kernel", begin="for n in range(T_c)", end="o_i = hopper.warpgroup_mma_wait")
climb = Climb()
climb.step("15", "registers", "programs")

# %% [markdown]
# Tiles come from right to left, so those that need a mask come first. `full` counts the tiles at the left that need none (in
# chapter 08 it counted keys). Two tiles are on their way before the loop. In step n the copy of tile n + 2 begins,
# into the stage of tile n − 1. One thread starts the copy for all, so all 128 threads must be done with that stage before.
# `gl.barrier()` says so. (It is not an `mbarrier`, because the threads just wait for each other.) Triton would also do without
# it, since its compiler puts such a barrier (`bar.sync` in the PTX) before each `expect`. `k_here` and `v_here` are an
# `mbarrier` for each stage. The wait names the phase, which changes each time the stages have gone round. `rows_of` drops
# a stage's leading dimension of 1. `O_LAYOUT` is that of o in the table above. `mask` and `softmax` do what chapter 08's
# `visit` does. `rounded` turns p into 16 bits by *inline assembly*, a line of PTX, NVIDIA's portable assembly language,
# that rounds two numbers at a time. Left alone, the compiler rounds one by one and sometimes swaps them afterwards.
#
# The numbers are TFLOP/s at 16,384 tokens and N = 4,096, with the share of FlashAttention-3 in the same run. The rung
# loses: a tile waits twice for products where Triton waits once, and takes more instructions. What it gains is that every
# wait is now ours to move.
#
# ## Compile and run a file of your own
#
# A kernel for Hopper compiles on any Linux machine. This one copies 64 rows of Q into shared memory and adds up each row.
# `BlockedLayout` says how the threads share a tile: numbers for each thread, threads of a warp, warps, and which dimension
# runs fastest. The tools call `forward`. Gluon's imports come from [book/maxima.py](../fa2_studio/book/maxima.py).

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
# `UTMALDG` is a bulk copy, `SYNCS` something at a barrier, `HGMMA` a product, `SHFL` an exchange between lanes. In the
# shell it is one line: `fa2-lab xray mine.py --chip sm_90 --d 64 --sass`. Try: take `mbarrier.wait` out. It compiles, and
# nothing warns you.
#
# ## Sitting 3 · A ring, and who copies (28 minutes)
# Some warps copy, others compute. How do they agree on who may touch a tile?
#
# ## A ring of stages, event by event
#
# In rung 15 whoever computes also copies. If somebody else copies, both must tell each other what is done. Stages that are
# used round and round are a **ring**. Two barriers stand at each stage:
#
# | barrier | who arrives | who waits | so that |
# | --- | --- | --- | --- |
# | *filled* | the producer (`expect`), and the copy's bytes | all consumers | nobody reads too early |
# | *emptied* | every consumer | the producer | nobody writes too early |
#
# Tile n goes through its stage in round n // `STAGES`. For it the consumers wait at *filled* for the end of phase
# `round & 1`. The producer waits at *emptied* for the end of phase `(round & 1) ^ 1`. In round 0 that is phase 1, which
# counts as over: all stages are empty, though nobody has released one.
#
# Other libraries call the same barriers *full* and *empty*. In CUTLASS the producer's wait and its `expect` are
# `producer_acquire`, the consumers' wait is `consumer_wait`, and their arrival at *emptied* is `consumer_release`.
#
# Here is a model ([book/ring.py](../fa2_studio/book/ring.py)). Actors are Python generators, and chance picks who goes on.
# `take(n)` waits until tile n is there, `release(n)` gives its stage back. A consumer takes each tile, multiplies for a
# while, notes what it has read, and releases. Three consumers, two stages, six tiles. Two mistakes: in `forgetful` consumer
# 1 does not release tile 2; `hasty` releases a tile as soon as it has started its product.

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
print("of 500 orders right:", sum(end == right for end in ends))

# %% [markdown]
# **Predict.** Six tiles go through two stages. Which of the two mistakes could slip through a test?
#
# - ☐ the forgotten release
# - ☐ the early release
# - ☐ both: each hangs or is wrong only in unlucky orders
#
# <details><summary>Answer</summary>
#
# **the early release.** Here, with two stages, `forgetful` hangs in every order: a *deadlock*. `hasty` always ends, and is
# sometimes right. Each shows only if a later tile needs the stage: with four stages, tile 2's is needed again by tile 6,
# and six tiles end before. So tests of such kernels take long texts, repeat a call a thousand times, and compare every bit.
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
# Rung 16 gives the copies to a warp of their own, the **producer**. The warpgroup that computes is the **consumer**. This
# is called *warp specialisation*. They meet only at the ring's barriers:

# %% tags=["nbval-ignore-output"]
r16 = "ladder/r16_ring.py"
read(r16, "fill", "take", "release")
read(r16, "producer", begin="fill")

# %% [markdown]
# The consumer's loop is rung 15's, with `take` where a wait stood, `release` after each product, and no copy. So the two
# roles start:

# %% tags=["nbval-ignore-output"]
read(r16, "forward_kernel", begin="q, k, v = ring", end="gl.warp_specialize")
climb.step("16", "issue slots used, %")

# %% [markdown]
# - `arrive(…, count=1)` is one arrival, by one thread. It speaks for the whole warpgroup: before it the compiler has all
#   128 threads wait for each other.
# - `gl.warp_specialize` takes a list of (function, arguments). The first runs on the launch's own 4 warps. For the others
#   two lists say how many warps they have and how many registers a thread: `[1]`, `[24]`. Registers change hands by whole
#   warpgroups: four warps are set aside for the producer, although it needs one. Two programs of 256 threads share 65,536
#   registers: 128 each. The producer's threads keep 24, and their other 104 go to the consumer's: 232.
#
# No unit is full: most issue slots stay empty. But a warpgroup takes its own instructions one after the other, so each of
# them lengthens the way of its tile.
#
# ## Rung 17: two consumers share a tile
#
# Each tile of K and V comes from L2 for 64 rows. Two consumers in one program, with 64 rows each, can read the same tile.
# How many do the registers allow? A thread of a consumer holds o and s in fp32 and p in 16 bits, $64\,(d + 1.5\,B_c) / 128$
# registers, and some 24 for m, $\ell$ and the rest (not appendix A's 40: a descriptor holds the addresses):
#
# | d | keys of a tile | consumers | registers needed | there are | |
# | ---: | ---: | ---: | ---: | ---: | --- |
# | 64 | 128 | 3 | 152 | 160 | rung 18 |
# | 128 | 128 | 2 | 184 | 240 | rung 18 |
# | 128 | 128 | 3 | 184 | 160 | too few |
# | 128 | 64 | 3 | 136 | 160 | rung 23 |
#
# One thread of each warpgroup: together they have 65,536 / 128 = 512 registers. The producer's keeps 24. Those of n
# consumers share the rest in steps of 8: (512 − 24) / 3 gives 160, / 2 gives 240. Rung 17 still has tiles of 64 keys, and
# takes two consumers at d = 128 and three at d = 64. (Three at d = 128 are for rung 23, which has to find shared memory.)
#
# **Predict.** Under the causal mask the lower 64 rows see more tiles than the upper ones. May the upper consumer simply
# leave out the tiles that it does not see?
#
# - ☐ no: it must take and release them
# - ☐ yes: it never reads them
# - ☐ yes, if it counts them, so that its next wait names the right phase
#
# <details><summary>Answer</summary>
#
# **no: it must take and release them.** *Emptied* now expects an arrival from every consumer. Without one the producer
# waits for ever. So the rung has a new loop, which takes and releases the tiles that it does not see. Nor may it release
# without waiting. Say A does not wait. It releases stage 0 for this round and again for the next, before B has released it
# once. *Emptied* has counted two and ends its phase, and the producer overwrites what B still reads.
# </details>

# %% tags=["nbval-ignore-output"]
climb.step("17", "L2 bytes", "tensor cores at work, %", "programs")

# %% [markdown]
# A consumer's number `c` is a constant, so each consumer has code of its own.
#
# Half of the bytes come through L2 now, but the rung is hardly faster. One program fits on an SM instead of two, so at
# d = 128 an SM still has two warpgroups that compute. No warp was waiting for L2 any more, because the ring brings tiles early
# enough.
# (Without pauses the rung gains 4%, by the clock: chapter 10.)
#
# ## Rung 18: long tiles
#
# One ring now serves both consumers, so at d = 128 shared memory has room for tiles of 128 keys: Q, 2 · 16, and three stages
# of 64 KiB are 224 of 227 KiB. In rung 16 a program had 113 KiB, too few for them, though registers sufficed: 184 of 232. The
# change:

# %% tags=["nbval-ignore-output"]
change("17", "18", "SIZES")
climb.step("18", "L2 bytes", "tensor cores at work, %")

# %% [markdown]
# The same bytes, half as many tiles. What a tile costs *once*, however long it is, is paid half as often: two waits for
# products, a rescaling of o, barriers, the exchange of the row's maximum.
#
# ## Sitting 4 · Two warpgroups that hide each other's waits (30 minutes)
# The tensor cores still stand still while exponentials are computed, and at both ends of a row block.
#
# ## Rung 19: the first tile apart
#
# To look ahead, a warpgroup starts S of the next tile together with P V of this one. The first S has no P V beside it. So
# rung 19 takes the first, rightmost tile out of the loop. No other tile can reach past the last key, so without a causal
# mask the loop asks no more:

# %% tags=["nbval-ignore-output"]
change("18", "19", "consumer")
climb.step("19", "tensor cores at work, %")

# %% [markdown]
# ## Who hides under whom?

# %%
show(timeline.draw(**timeline.data()))

# %% [markdown]
# How the hardware divides the tensor cores between two warpgroups is not documented. So the model takes two extremes. And a
# warpgroup can look ahead: start the next S before P V of this tile, so that this P V runs under the next exponentials.
#
# | the tensor cores work | equal shares | first come, first served |
# | --- | --- | --- |
# | without looking ahead | *Neither*, 67% | *Between*, 98% |
# | looking ahead | *Within*, 97% | *Both*, 100% |
#
# In *Neither* both start together and stay together: both wait for exponentials at the same time. In *Between* they move
# apart by themselves, and nearly always somebody multiplies. Rung 19, which does not look ahead, has 61.5%, rung 20, which
# does, 75.5%. The panels leave out all other instructions, so a rung lies below its panel. What the compiler makes comes next.
#
# ## Rung 20: start the next scores before you need them
#
# Here is its loop. (*Clock* is cycles over time in a run that pauses between calls; chapter 10's list has it without pauses.)

# %% tags=["nbval-ignore-output"]
read("ladder/r20_overlap.py", "consumer", begin="for n in range(begin + 1", end="p_ij = p_next")
climb.step("20", "tensor cores at work, %", "stall: barrier", "SM cycles", "clock, GHz")

# %% [markdown]
# - Scores n start, then P V of n − 1. One warpgroup's products end in the order in which they were started, so at
#   `warpgroup_mma_wait(1)` scores n are there. At the second wait, with 0, P V is, too: V's tile can go, and o may shrink.
# - p is a left factor *in registers* of a running product, so the next p goes to other registers: `p_next`.
#
# To start S early gained 16%. To wait late is what we wrote, but NVIDIA's assembler, `ptxas`, places the second wait *before*
# nearly all exponentials. So rung 20 hides most row maxima under its own P V, but hardly an exponential: at d = 128 without a
# mask 1 or 2 of 66. What it gains must be that the *other* consumer
# multiplies meanwhile, as in *Between*. That is inferred, because no tool shows it, and the record does not show why it was not
# so in rung 19 already. `fa2-lab xray 20 --full --sass` prints the machine code. Look for `MUFU.EX2` after the second of the
# loop's lines `WARPGROUP.DEPBAR`. (At d = 64 numbers spill: `fa2-lab xray 20 --d 64 --full`.)
#
# **Takeaway.** Start early, keep in place what is still being read, and look at what the compiler made of it.
#
# ## Dealt, or drawn?
#
# So far each row block had a program of its own. A **persistent kernel** starts one program for each SM, which takes one
# row block after the other. So the end of one (store O) hides under the start of the next. Either the blocks are *dealt*,
# p, p + 132, p + 264 … to program p, or a *tile scheduler* lets a program *draw* the next number whenever it is free.
#
# **Predict.** A causal mask, and 128 row blocks in each of 16 heads. Row blocks are dealt, head by head, to 132 persistent
# programs. When do they end, compared with rung 20's launch of a program for each row block?
#
# - ☐ earlier: no program has to start
# - ☐ at the same time: the same blocks on the same SMs
# - ☐ later
#
# <details><summary>Answer</summary>
#
# **later.** Program p gets row block p of the first head, then p + 4 of the next, then p + 8: heavy ones again and again,
# or light ones. Rung 20's plain launch draws: the GPU gives the next program to an SM that is free.
# </details>

# %%
show(tickets.draw(**tickets.data()))

# %% [markdown]
# ## Rung 21: programs that stay
#
# Drawn, all end together. So the producer draws. The consumers must hear of it: the number goes through shared memory, with
# two barriers as at a stage of the ring. That is a **mailbox**. −1 says that there is no more.

# %% tags=["nbval-ignore-output"]
read("ladder/r21_persistent.py", "send", "receive")
read("ladder/r21_persistent.py", "producer", begin="while t", end="gl.store(counter")

# %% [markdown]
# - `gl.atomic_add(counter, 1, sem="relaxed")` draws the next number. *Relaxed*: nothing else is handed over, so memory
#   need not be put in order. Program p begins with block p, so drawn numbers count from `gl.num_programs(0)` on.
# - `first` counts tiles over all row blocks, because the ring goes on.
# - Q has two stages for each consumer, so that the next Q comes early. O has room of its own: its copy runs while the next
#   block computes. Both take the room of a third stage.

# %% tags=["hide-input"]
climb.step("21", "SM cycles", "clock, GHz")

# %% [markdown]
# ## Sitting 5 · Fewer instructions, and power (25 minutes)
# What is left are instructions that talk between lanes, and bytes that cost power.
#
# ## Must m be the maximum?
#
# At every tile the lanes of a row exchange to find its maximum, and when it grows, o has to shrink. But m cancels out of O
# and L. It only has to keep the exponentials from overflowing, and from all vanishing: if m were far above the maximum, ℓ
# would be 0. Here are the 16 rows of a warp, with normal scores:

# %%
def growths(s, lag):  # s (tiles, rows, columns), in powers of 2
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
# **Predict.** Now m may *lag* by 8: all m stay until some score lies more than 8 above its row's m, in powers of 2. Then p
# is 256 at most. In how many of the 127 tiles does m grow?
#
# - ☐ in none
# - ☐ in an eighth as many
# - ☐ in half as many
#
# <details><summary>Answer</summary>
#
# **in none.** A row's maximum hardly ever lies 8 above that of its first tile. (FlashAttention-4 takes the same 8.) What
# cancels out need not be exact, only bounded.
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
# ## Rung 22: talk only if somebody must
#
# m and ℓ are kept lane by lane now, (64, 4). Each lane compares its own largest score with m + 8. If *any* lane of the warp
# is above, the four lanes of each row find their maximum, and m becomes the larger of that and m. Otherwise nobody talks, α
# is 1, and o is left as it is. ℓ needs no exchange before the last tile: what is only added up can be added up late.

# %% tags=["nbval-ignore-output"]
read("ladder/r22_lagging.py", "softmax")
climb.step("22", "issue slots used, %", "SM cycles", "clock, GHz")

# %% [markdown]
# `by_lanes` looks at 64 × 128 numbers as (64, 16, 4, 2): of each 8 columns each of the 4 lanes holds 2. A sum over the second
# and the fourth dimension stays inside a lane. `raised`, in which one warp jumps and another does not, is PTX; chapter 12b
# reads it. `shrunk` does the same for o: if α is 1 in all lanes, the warp jumps over 64 multiplications a thread.
#
# The price: with an exact maximum the largest p of a row is 1, which is not rounded, and weighs most in O. With a lagging m
# it may be 14.5, as in the answer above, and is rounded. O's rounding error grows by 3 to 4% on normal numbers, and by 10 to
# 17% with outliers (`fa2-lab bench accuracy`). And at d = 64 without a mask the rung loses; we do not know why.
#
# ## Rung 23: is there room for a third consumer at d = 128?
#
# With tiles of 64 keys, s and p are half as wide, and the registers suffice. And shared memory? 64 rows of Q, K, V or O take
# 16 KiB at d = 128, so 227 KiB have room for 14 such tiles. A stage is K and V: two such tiles at 64 keys, four at 128. (2 ·
# 3: for each of two consumers two places for Q, as the next block's is fetched early, and one for O. 3 · 1: one for both.)
#
# | | Q and O take | left | stages | keys on their way |
# | --- | ---: | ---: | ---: | ---: |
# | rung 22: two consumers, tiles of 128 keys | 2 · 3 | 8 | 2 | 256 |
# | three consumers, tiles of 64 keys | 3 · 3 | 5 | 2 | 128 |
# | rung 23: the same, O in Q's place | 3 · 1 | 11 | 5 | 320 |
#
# O is stored only after the last S of the row block has read Q. So O can wait in Q's place. Then Q's place is free only when
# the copy of O has read it: `store_wait(0)`, then `release`.

# %% tags=["nbval-ignore-output"]
change("22", "23", "SIZES", "FEW", "consumer")
climb.step("23", "L2 bytes", "tensor cores at work, %", "SM cycles", "clock, GHz")

# %% [markdown]
# The price: the next row block's Q cannot come before O has left. And large blocks fill the SMs less evenly, so with fewer
# than 4 of them for an SM `FEW` keeps to rung 22's sizes. (`APART`: O has room of its own, as it had there.)
#
# Copies ran ahead far enough before, so few cycles are saved. All these rungs run at the limit of power (chapter 10), and
# there busier tensor cores cost clock: of rung 20's gain in cycles nearly a third. Here they get busier once more, and the
# clock stays, or nearly: bytes that do not move leave power for products.
#
# ## Where does a fence stand?
#
# The tensor cores, too, read shared memory by the copy engine's way. So these are all cases, some of them chapter 13's:
#
# | before | after, in the same place | what must stand between |
# | --- | --- | --- |
# | a thread stores (O's tile, dS, a new barrier) | the copy engine or a product reads | **fence**, then the threads' barrier if another thread starts the copy or product |
# | a thread *loads* (a line of numbers) | the copy engine writes | **fence**, then a release |
# | the copy engine has written | a thread or a product reads | a wait at *filled* |
# | a product has read | the copy engine writes | `warpgroup_mma_wait`, then a release |
# | a product has read | a thread stores (O in Q's place) | `warpgroup_mma_wait` |
# | the copy engine has read (a store of O) | a thread stores | `store_wait` |
# | the copy engine has read (O in Q's place) | the copy engine writes | `store_wait`, then a release |
# | a thread stores | another thread loads | in one warpgroup `gl.barrier()`; in two an mbarrier's `arrive` and `wait` (rung 21's mailbox) |
#
# The second line is easily forgotten, because nothing was written that should become visible. It follows from PTX's memory
# model. Threads and the copy engine reach shared memory through two *proxies*, and a barrier orders accesses of one proxy only.
# Between two proxies only a proxy fence creates an order, and this is true for a load before a write as well (chapter 13).
# Where a thread starts a copy or a product after others have stored, the compiler adds the threads' barrier of the first line
# (`bar.sync` in the PTX: `fa2-lab xray 20 --ptx`).
#
# **Takeaway.** A fence stands where a thread's access comes first and the engine's second. Else a wait is enough.
#
# ## Sitting 6 · A kernel of your own (12 minutes)
#
# ## Recap
#
# - Products and copies are started, not called. What they use must stay in place until they have been waited for.
# - A barrier counts arrivals and flips one bit. A stage has two: filled and emptied.
# - Sharing tiles made room; long tiles made speed. Exponentials hide, here (likely) under the other warpgroup's products.
# - Row blocks are drawn when they are needed. m may lag, and lanes seldom have to talk. Near the top power decides.
#
# ## Exercises
#
# **Write a kernel.** For 64 rows of Q and all keys: the largest score of each row. A kernel goes through the tiles of K and
# calls `tile_maxima` for each. Write that function: start the copy of tile j of K, start the product, wait for it, and
# return the largest score of each row. Q's copy has ended phase 0 of the same barrier. N_k is a multiple of 64, so no mask.
# Your words are `gl`, `mbarrier`, `tma`, `warpgroup_mma` and `warpgroup_mma_wait`. No `gl.barrier()` is needed before the copy,
# because the compiler adds it.
#
# <details><summary>Hint</summary>
#
# Six lines. `start` of rung 15 has the first two; here K is
# two-dimensional, so the place of the tile is `[64 * j, 0]`. Which phase does the j-th copy of K end? For the product look
# at `scores`, and at the line after it in rung 15's loop.
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
    # k: room for a tile; zero: registers for 64 × 64 scores
    ...

# %% [markdown]
# Around it goes the kernel of sitting 2, with Q's tile in `q`, a second tile `k`, and at its end this loop. The check first
# runs your function on NumPy, so it can say that a wait never ends, or that a tile was read too early. Then it compiles the
# real thing.

# %%
show_code(maxima.KERNEL[maxima.KERNEL.index("    m = gl.full") :].rstrip())
print(maxima.judge(getsource(tile_maxima)))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
busy = {panel["name"].split(":")[0]: round(panel["share"], 2) for panel in timeline.data(d=128)["panels"]}
verdict("d = 128: 67, 97, 98 and 100% of the four panels", [*busy.values()] == [0.67, 0.97, 0.98, 1.0])
verdict("m need not grow if it may lag", growths(s16, 0)[0] > 20 and growths(s16, 8)[0] == 0)
verdict("a forgotten release hangs", all(try_out(forgetful, seed)[0] != "all done" for seed in range(50)))
verdict("registers needed and had", [64 * (2 * d + 3 * B_c) // 256 + 24 for d, B_c in ((64, 128), (128, 128), (128, 64))]
        == [152, 184, 136] and [min(255, (512 - 24) // n // 8 * 8) for n in (2, 3)] == [240, 160])  # fmt: skip
verdict("rung 15 loses", all(climb.factor("15", *shape) < 0.98 for shape in climb.shapes))
verdict("rung 16: most issue slots stay empty", climb.value("16", "issue slots used, %") < 45)
verdict("rung 17: half of the bytes through L2, and hardly faster",
        0.4 < climb.compare("17", "L2 bytes") < 0.65 and climb.factor("17") < 1.05)  # fmt: skip
verdict("rung 18: the same bytes, and faster", abs(climb.compare("18", "L2 bytes") - 1) < 0.1 < climb.factor("18") - 0.95)
verdict("rung 19: busy about as *Neither*, far from *Between*", 50 < climb.value("19", "tensor cores at work, %") < 75)
verdict("rung 23: fewer bytes through L2, few cycles, hardly a lower clock", climb.compare("23", "L2 bytes") < 0.85
        and 0.93 < climb.compare("23", "SM cycles") < 1 and climb.compare("23", "clock, GHz") > 0.985)  # fmt: skip

# %% [markdown] tags=["navigation"]
# [← The workshop](11_workshop.ipynb) · [The map](00_start.ipynb) · [Hopper, the kernel →](12b_hopper_kernel.ipynb)
