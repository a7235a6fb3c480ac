# %% [markdown] tags=["navigation"]
# [← Hopper, the kernel](12b_hopper_kernel.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)

# %% [markdown]
# # 13 · Hopper, backward
#
# **One pass over the columns: who adds up dQ?**
#
# Chapter 09 ended with two passes. One kernel owns columns and adds up dK and dV, and another owns rows and adds up dQ.
# Both compute S and P, so part of the work is done twice. On Hopper, one pass is enough, because TMA can *add* to
# memory while the program goes on.
#
# After this notebook you can
#
# - compute what one pass saves, and name what it costs,
# - read one step of the kernel, and name the unit or the warps for which each of its waits is,
# - explain why the last bits of dQ differ from run to run, and what it costs to make dQ deterministic.
#
# *Time: 85 minutes, in five parts. Hardware: any laptop with Triton; on a Hopper GPU, the checks run the real kernel.
# Numbers were measured on an NVIDIA H200 in bf16. Before this: [05](05_backward.ipynb), [09](09_triton_backward.ipynb),
# and [12a](12a_hopper_rungs.ipynb) and [12b](12b_hopper_kernel.ipynb), which introduce producers, consumers, rings and
# barriers.*

# %%
import numpy as np
import torch
from IPython.display import Markdown, display

from fa2_lab.api.attention import attention
from fa2_lab.kernels.hopper.backward.sizes import choose
from fa2_lab.kernels.tables import TIGHT
from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier, Block
from fa2_lab.plots import ideas
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2
from fa2_lab.reference import heads as by_heads
from fa2_studio.book.hopper import read
from fa2_studio.book.orders import judge_step
from fa2_studio.book.verdicts import close, verdict

# %% tags=["nbval-ignore-output"]
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))  # prints how the kernels run here

# %% [markdown]
# ## Part 1 · One step, and its registers (9 minutes)
#
# ## What does one pass save?
#
# The backward pass has a short ladder of its own, from `ladder/b00_atomics.py` to `b02_one_pass.py`, and this chapter
# reads the kernel that `attention()` runs.
#
# | rung | passes | matmuls per tile | what adds to dQ |
# | --- | --- | --- | --- |
# | b00 atomics (Algorithm 2) | one | five | every thread, number by number |
# | b01 two passes (chapter 09) | two | seven | each row has an owner, so nothing else adds to it |
# | b02 one pass, and this chapter's kernel | one | five | TMA, tile by tile |
#
# The second pass computes $S$, $dP$ and the exponentials again. These are two of seven matmuls and half of the
# exponentials, and a single pass saves them. In exchange, it has to add a tile of dQ for each tile of scores, in fp32.
# Another unit should do that, so that the warps can go on.

# %% tags=["hide-input"]
show("passes")

# %% [markdown]
# ## One step, in plain code
#
# A thread block takes a *column block* of 128 keys and goes through the row blocks. The work on one row block is one
# **step**. Here is a step with the letters of Algorithm 2. Tiles have keys as rows and queries as columns, so `s` in
# the code is $S^\top$.

# %%
def step(q, do, L_i, D_i, k, v, dk, dv):  # q, do: (B_r, d); L_i, D_i: (B_r,); the others: (B_c, d)
    tau = q.shape[1] ** -0.5
    s = k @ q.T - L_i / tau  # 1. (B_c, B_r)  FA2.A2.L10
    p = np.exp(tau * s)  # (B_c, B_r)  FA2.A2.L11
    dv = dv + p @ do  # 2. (B_c, d)  FA2.A2.L12
    dp = v @ do.T - D_i  # 3. (B_c, B_r)  FA2.A2.L13
    ds = p * dp  # (B_c, B_r)  FA2.A2.L14
    dk = dk + tau * (ds @ q)  # 4. (B_c, d)  FA2.A2.L16
    dq = tau * (ds.T @ k)  # 5. (B_r, d)  FA2.A2.L15
    return dk, dv, dq

# %% [markdown]
# - **Why are keys the rows?** The left operand of a matmul may come from registers, but the right one must be in shared
#   memory. `p` and `ds` are computed in registers, and they are the left operands of matmuls 2 and 4. Only matmul 5
#   needs `ds` transposed, so `ds` goes through shared memory, once.
# - **Why does `s` begin at $-L/\tau$ and `dp` at $-D$?** A matmul adds to what is in the accumulator, so the tensor
#   cores do the subtractions for us. A masked score begins at $-\infty$, so its P is 0. Its dP, however, begins at $-D$
#   like all others. If it also began at $-\infty$, $P \circ dP$ would be $0 \cdot (-\infty)$, which is NaN.
# - **What does a column block own?** dV and dK are sums over rows, so the column block keeps them to the end. dQ is a
#   sum over keys, so every column block adds to it.
#
# ## What fits into the registers?
#
# Two consumer warpgroups share the column block. Each owns 64 of its keys, and has 128 threads with up to 240
# registers each. dK and dV stay in registers for the whole column block. For a row block of $B_r$ rows, a consumer
# needs $S$ and $dP$ (64 × $B_r$ each) and half of dQ, while the other consumer computes the other half.
#
# How many registers is that? If all of this is in fp32, every number takes one register, and 128 threads share the
# numbers. So dK and dV take 64 · d / 128 registers per thread each, $S$ and $dP$ take 64 · $B_r$ / 128 each, and half
# of dQ takes $B_r$ · d / 256. P takes the place of $S$. So one thread needs:
#
# | | dK and dV | with S and dQ | with P and dP | all at once |
# | --- | ---: | ---: | ---: | ---: |
# | d = 64, $B_r$ = 128 | 64 | 160 | 192 | 224 |
# | d = 128, $B_r$ = 64 | 128 | 192 | 192 | 224 |
# | d = 128, $B_r$ = 128 | 128 | 256 | 256 | 320 |
#
# At d = 128, row blocks of 128 rows take too many registers, so row blocks have 64 rows there, whereas at d = 64 they
# have 128. Even then, all at once would leave only 16 of the 240 registers for everything else. So the registers
# decide the order of a step, in which $S$, $dP$ and dQ must not all be present together. In the kernel, $S$ is there
# at the same time as dQ of the previous row block. Then dQ leaves, and only then does $dP$ begin.

# %% tags=["hide-input"]
show("live_registers")

# %% [markdown]
# ## Part 2 · The waits of a step (17 minutes)
#
# ## The same step, with its waits
#
# Now we write the step without the numbers but with its waits, as a Python generator that yields what it waits for.
# `block.start` gives work to a unit and goes on. With d = 128 and 64 rows, a matmul of one consumer has 2 · 64 · 64 ·
# 128 FLOPs. At 4,096 per clock, it takes 256 clocks. Its 64 · 64 exponentials, at 16 per clock, also take 256. If
# both consumers ask for the same unit, this becomes 512 clocks. Additions run side by side, each as if it were alone.
# An addition takes 600 clocks, which is a guess, and the question below tries other values. In the first version,
# each job waits for the one before:

# %%
def one_by_one(block, ds_filled, T, add=600):
    for n in range(T):
        for unit, what in ("tensor", "S"), ("exp", "P"), ("tensor", "dV"), ("tensor", "dP"):
            yield block.start(unit, 256, f"{what} {n}").done()
        ds_filled.arrive(block.actor)  # my dS is in shared memory
        yield ds_filled.over(n & 1)  # and so is the other consumer's dS
        for what in ("dK", "dQ"):
            yield block.start("tensor", 256, f"{what} {n}").done()
        yield block.start("copy", add, f"add dQ {n}").done()

# %% [markdown]
# The second version has the kernel's order at d = 128 under the mask. The dQ of a step is multiplied in the *next*
# step, beside the exponentials:

# %%
def kernel_order(block, ds_filled, T, add=600):
    added = None
    for n in range(T):
        s = block.start("tensor", 256, f"S {n}")  # matmul 1
        if n > 0:
            yield ds_filled.over((n - 1) & 1)
            dq = block.start("tensor", 256, f"dQ {n - 1}")  # matmul 5
        yield s.done()
        yield block.start("exp", 256, f"P {n}").done()  # beside dQ
        dv = block.start("tensor", 256, f"dV {n}")  # matmul 2
        if n > 0:
            yield dq.done()
            if added:
                yield added.done()
            added = block.start("copy", add, f"add dQ {n - 1}")
        yield block.start("tensor", 256, f"dP {n}").done()  # matmul 3
        ds_filled.arrive(block.actor)  # dS is in shared memory
        dk = block.start("tensor", 256, f"dK {n}")  # matmul 4
        yield dv.done()
        yield dk.done()
    yield ds_filled.over((T - 1) & 1)
    yield block.start("tensor", 256, f"dQ {T - 1}").done()  # its addition is left out

# %%
def clocks_of_a_step(way, T=50, **options):  # of two consumers
    block, ds_filled = Block(), Barrier("dS filled", arrivals=2)
    block.run({f"consumer {c}": way(block, ds_filled, T, **options) for c in range(2)})
    return block.clock / T


for way in (one_by_one, kernel_order):
    took = clocks_of_a_step(way)
    busy = f"tensor cores busy {2560 / took:.0%}"
    print(f"{way.__name__:12}: {took:5,.0f} clocks a step, {busy}")

# %% [markdown]
# Both consumers share the tensor cores equally, as in chapter 12a. A step has five matmuls of each consumer, so the
# tensor cores need 10 · 256 = 2,560 clocks for it. With one job at a time, both consumers wait for exponentials, dS
# and additions at the same time, and meanwhile the tensor cores are idle. In the kernel's order, dQ hides the
# exponentials, and the next matmuls hide the addition:

# %%
show("waits")

# %% [markdown]
# The next picture shows both consumers in the kernel's order, with strong edges around the jobs of one step.

# %%
show("backward_step")

# %% [markdown]
# **Predict.** In each step, a consumer hands over one part of dQ. How long may one addition take before it slows the
# consumers down?
#
# - ☐ as long as one matmul, 256 clocks
# - ☐ about as long as a step, 2,500 clocks
# - ☐ as long as it likes, because no consumer waits for it
#
# <details><summary>Answer</summary>
#
# **about as long as a step, 2,500 clocks.** No consumer waits for the sum, but a consumer waits for the *buffer* in
# shared memory from which its previous part is being read. In the code, this wait is `yield added.done()`. With 5,000
# clocks, the additions set the pace. A step then takes slightly less than 5,000 clocks on average, because the first
# and the last step differ.
#
# ```python
# for add in (0, 600, 2500, 5000):
#     took = clocks_of_a_step(kernel_order, add=add)
#     print(f"an addition takes {add:5,} clocks: {took:5,.0f} clocks a step")
# ```
#
# ```text
# an addition takes     0 clocks: 2,570 clocks a step
# an addition takes   600 clocks: 2,570 clocks a step
# an addition takes 2,500 clocks: 2,579 clocks a step
# an addition takes 5,000 clocks: 4,972 clocks a step
# ```
# </details>

# %% [markdown]
# ## Where do two consumers meet?
#
# dQ needs the dS of all 128 keys, and each consumer has 64 of them. So each consumer writes its dS into shared memory
# and arrives at a barrier. When both have arrived, each computes its half of dQ, in the next step. With 64 rows, this
# half is half of the d columns, and with 128 rows, it is 64 of the rows. Either half is a sum over all 128 keys, so it
# takes the dS of both consumers.
#
# There is no second barrier that announces "I have read it", because two buffers for dS are enough. Steps n − 1 and
# n + 1 share a buffer. The other consumer arrives for step n only after its dQ of step n − 1 is done, and this dQ has
# read that buffer. A consumer, in turn, writes dS of step n + 1 only after the other has arrived for step n. So the
# buffer has been read by then.
#
# ## Which unit makes four billion additions?
#
# Each column block of 128 keys adds $N \times d$ numbers to dQ. With N = 16,384, d = 128 and 16 heads, there are 128
# column blocks per head, so these are 16 · 128 · 16,384 · 128 = 4.3 billion additions in fp32. Each of them reads and
# writes four bytes. If HBM read and wrote these numbers, 34 GB would have to move, which takes 7 ms at 4.8 TB/s. All
# five matmuls together take only 5.6 ms, if the tensor cores never stop.
#
# In b00, threads made these additions one by one. However, TMA can add as well. A **bulk reduction**, or TMA
# reduction, is a TMA copy in the other direction that adds to what is there. One thread names a tile in shared memory
# and an address in the fp32 dQ buffer, and goes on. L2 makes the additions, as in FlashAttention-3. The fp32 dQ of
# one head takes 16,384 · 128 · 4 bytes, which is 8 MiB, so it stays in L2. Therefore, without a mask, one head runs
# after another, and with a mask, as many heads run side by side as L2 holds.

# %%
show("pipes_backward")

# %% [markdown]
# The picture shows the whole thread block, with the rings and the mailbox of chapter 12b. A consumer waits for seven
# things. Four of them have arrows: the mailbox, K, V and a row block (Q, dO, $-L/\tau$ and $-D$ together). The other
# three, which have none, are the other consumer's dS, the consumer's own matmuls, and TMA, which must have read the
# buffer for dQ.

# %% [markdown]
# ## Part 3 · The kernel (22 minutes)
#
# ## Three copies, one barrier
#
# `Rows` is a ring with two stages. Q, dO and the *starts*, which are a line of $-L/\tau$ and $-D$, come by three
# copies that share one barrier, so one arrival announces the bytes of all three. The method `start` reads $-L/\tau$
# or $-D$. In it, each thread reads the numbers of its queries, which are columns of Sᵀ:

# %% tags=["nbval-ignore-output"]
read("hopper/backward/rows.py", "Rows.start")

# %% [markdown]
# The producer is one warp, which announces column blocks and starts copies. For each query head of the group, it copies
# the row blocks that see these columns.
#
# ## A consumer's column block
#
# Both consumers run this code. Since `c` is a constant, 0 or 1, the code is compiled for each of them. The listing
# leaves out the lines for `dk_late`, which moves matmul 4 into the next step. With Triton 3.9, this gains nothing, so
# it is off.

# %% tags=["nbval-ignore-output"]
KERNEL, LATE = "hopper/backward/kernel.py", "pipes.sizes.dk_late"
read(KERNEL, "consumer", begin="seen = interval", end="finish(c", off=LATE)

# %% [markdown]
# This column block is seen by `steps` row blocks. `take` waits for K and V. The first step, the *prologue*, comes
# before the loop. `ds=None` tells it that no row block came before, so there is no dQ to compute. The *epilogue*
# after the loop computes dQ of the last row block. V is released before the epilogue but K after it, because dQ = dS
# K needs K. `finish` writes dK and dV by TMA copies, from dQ's buffer. `dq_semaphore.wait_for_room` is for the
# *turns* of part 4, and without turns it does nothing.
#
# `interval` returns, for each key, the first row that sees it, and `CUT`, which is true if there is a mask at all. At
# d = 128 without a mask, `hold` keeps half of V in 16 registers, since this half is the same for all row blocks. Matmul
# 3 then takes that half of its left operand from registers instead of shared memory.
#
# ## The step
#
# If you compare the step with `kernel_order`, the order is the same at d = 128 under the causal mask, line by line.
# In all other cases, `dv_late` is on, so matmul 2 starts after dS:

# %% tags=["nbval-ignore-output"]
read(KERNEL, "step", begin="FIRST", end="add_dq", off=LATE)

# %% [markdown]
# | line | what runs meanwhile | what it waits for |
# | --- | --- | --- |
# | `rows.wait` | – | the producer, for Q, dO and the starts |
# | `start_dq`, which begins with a wait at `ds_filled` | S | the other consumer, for its dS of the step before |
# | first `wait(1)` | dQ | S |
# | `exp2`, where `scale` is $\tau \log_2 e$ | dQ in the source; for the machine code see below | – |
# | second `wait` | dV, unless it starts late | dQ |
# | `add_dq` | dV, unless it starts late | TMA, until the buffer is free |
#
# Why does dV's matmul start late? P in fp32 is needed until dS. If dV's matmul started early, the thread would also
# hold P in 16 bits while dP runs, which is 64 · $B_r$ numbers of half a register, or $B_r$ / 4 registers per thread.
# To the 192 registers of the table in part 1, that adds 32 at d = 64, where $B_r$ is 128, and makes 224 of 240. At d
# = 128, it adds 16, and without a mask half of V takes 16 more (`hold`), which also makes 224. This leaves too few
# for the rest, so dV waits. Under the mask at d = 128, however, the sum is 208, and dV starts early.
#
# If dV waits, P is first needed for dS, so `ptxas`, NVIDIA's assembler, may move exponentials down, below the wait for
# dQ. The next table shows where the exponentials of a thread run in one step, as compiled with Triton 3.9:
#
# | | dV's matmul starts | beside dQ | between dQ and dP | beside dP | after dP |
# | --- | --- | ---: | ---: | ---: | ---: |
# | d = 128, causal | before dQ is handed over | 32 | 0 | 0 | 0 |
# | d = 64, causal | after dS | 8 | 28 | 28 | 0 |
# | d = 64, no mask | after dS | 8 | 21 | 35 | 0 |
# | d = 128, no mask | after dS | 0 | 0 | 0 | 32 |
#
# These are the numbers of one consumer, and those of the other differ by 3 at most. In the columns *between* and
# *after*, no matmul of this consumer runs, so only the other consumer's matmuls can hide the exponentials there. To
# see it yourself, run `fa2-lab xray hopper.backward --d 64 --full --sass` and look for `MUFU.EX2` (an exponential)
# between the lines `WARPGROUP.DEPBAR` (a wait) and `HGMMA` (a matmul), for which you do not need a GPU. The rest of
# the step follows:

# %% tags=["nbval-ignore-output"]
read(KERNEL, "step", begin="dp = start_dp", off=LATE)
read(KERNEL, "exchange")

# %% [markdown]
# - `ds` is used twice. `exchange` puts it into shared memory for both consumers, and `as_operand` makes it the left
#   operand of matmul 4, in the registers where it is.
# - `rows.release(n)` announces that Q and dO have been read. The matmul for dQ is still to come, but it reads only dS
#   and K.
#
# **Predict.** The last wait has `deps=[dv, p_half, dk, ds]`. `p_half` is P in 16 bits, and no later line uses it. Why
# is it there?
#
# - ☐ because the wait would otherwise be for dK's matmul alone
# - ☐ because its registers could otherwise be overwritten too early
# - ☐ because it would otherwise not be in shared memory in time
#
# <details><summary>Answer</summary>
#
# **because its registers could otherwise be overwritten too early.** `p_half` is the left operand of dV's matmul, and
# the tensor cores read it in its registers until that matmul ends. The compiler sees no later use of these registers
# but the one in `deps`. The first answer is wrong because the 0 means that no matmul may still run. The third is wrong
# because P never goes through shared memory.
# </details>

# %% [markdown]
# ## Handing over dQ

# %% tags=["nbval-ignore-output"]
read("hopper/backward/sums.py", "add_lines")

# %% [markdown]
# These lines are the whole handover. The consumer waits until TMA has read what was here before, and then it stores,
# fences and starts the addition. The tile of dQ is stored in the order of each thread's registers, so no numbers are
# shuffled. The last kernel puts the sums in order.

# %% tags=["hide-input"]
show("dq_path")

# %% [markdown]
# ## Three launches
#
# | launch | programs | what it does |
# | --- | --- | --- |
# | `bwd_preprocess` | one per 64 rows | clears all sums, computes D = rowsum(dO ∘ O), and writes $-L/\tau$ and $-D$ |
# | `backward_kernel` | one per SM | runs the one pass, writes dK and dV, and adds to the fp32 dQ buffer |
# | `bwd_postprocess` | one for each consumer's part of a tile | reads the sums, puts them in order, multiplies by $\tau$, and rounds to 16 bits |
#
# A launch takes a few µs. So the second and the third kernel are launched before the kernel before them has ended,
# which is called *programmatic dependent launch* (PDL). The first one is launched as usual, because PyTorch's kernels
# come before it. Programs that start early take SMs as these become free, make their barriers, and stop at `gdc_wait`
# until the *whole* kernel before them has ended. Only then do they touch what it wrote. So the beginnings overlap, but
# the work does not.
#
# A row that sees no key has $L = -\infty$, so $-L/\tau$ would be $+\infty$. For such a row, `bwd_preprocess` writes
# $-\infty$ instead, so S begins there, and p is 0.

# %% tags=["hide-input"]
show("launches")

# %% [markdown]
# ## Part 4 · What it costs, and which bits come out (18 minutes)
#
# ## What does the order gain?
#
# For each idea, the next cell divides the speed with it by the speed without it, at N = 4,096. To measure the speed
# without an idea, we took it out of an earlier kernel, under Triton 3.6. A star marks an idea that this kernel did
# not have, so we added it instead:

# %% tags=["hide-input"]
tried = [x for x in ideas.worths() if x["part"] == "backward" and x["N_q"] == 4096]
worth = {(x["idea"], x["d"], x["causal"]): x for x in tried}
print(f"{'':40}  d = 64    causal   d = 128    causal")
for idea in (
    "dV's product after dS",
    "S begins at −L/τ, dP at −D",
    "dQ under the next S, not in its own step",
    "half of V in registers",
    "S and dP started together",
):
    four = (worth.get((idea, d, causal)) for d in (64, 128) for causal in (False, True))
    cells = (f"{x['worth']:.2f}{'' if x['kept'] else '*'}" if x else "–" for x in four)
    print(f"{idea:40}" + "".join(f"{cell:<6}".rjust(10) for cell in cells))

# %% [markdown]
# Starting dV's matmul after dS gains most at d = 64, where registers would otherwise run short. The starting values,
# $-L/\tau$ and $-D$, bring the second-largest gain. *S and dP started together* ran beside dQ of the previous step,
# so a thread needs 224 registers, as the last column of the table in part 1 shows. In a kernel that already uses
# every register, an overlap that needs more of them loses. Later ideas were tried on today's kernel, each with a
# prediction:

# %% tags=["nbval-ignore-output", "hide-input"]
display(Markdown("\n".join(ideas.table("backward"))))

# %% [markdown]
# We kept three of them. The programmatic dependent launch of part 3 matters if there are few rows. Running fewer heads
# at once matters if there are many rows and no pauses between calls. The third idea is another order of instructions
# for calls that ask for *the same bits* in each run, as explained below. It is faster, although up to 48 bytes per
# thread find no register and *spill* into slower memory. *Heads of 8 MiB* means that the heads that run side by side
# have 8 MiB of Q and dO together.
#
# ## Too few column blocks
#
# With grouped-query attention, a column block belongs to a K/V head and goes through the rows of all query heads that
# share it. Batch 2, one K/V head and N = 4,096 make only 64 column blocks for 132 SMs. In such a case, a column block
# is *divided*, which means that several programs take a part of its row blocks each. Then dK and dV have no single
# owner either, and TMA adds them up as well.

# %% tags=["hide-input"]
show("waves_divided")

# %% [markdown]
# ## Which bits come out?
#
# **Predict.** Chance decides which column block adds first, and a sum in fp32 depends on its order. Let 128 column
# blocks add to 8,192 numbers, in two different orders. After rounding to bf16, how many of the 8,192 numbers differ?
#
# - ☐ about 4,000
# - ☐ about 300
# - ☐ fewer than 10
#
# <details><summary>Answer</summary>
#
# **fewer than 10.** bf16 rounds off thousands of times more than the difference between the orders. Only a number that
# is almost halfway between two bf16 numbers is rounded differently.
#
# ```python
# some = np.random.default_rng(1).standard_normal((128, 8192)).astype(np.float32)
# orders = [np.random.default_rng(seed).permutation(128) for seed in range(2)]
# one, two = (torch.from_numpy(np.cumsum(some[order], axis=0)[-1]) for order in orders)
# for name, x, y in (("fp32", one, two), ("bf16", one.bfloat16(), two.bfloat16())):
#     print(f"in {name} {int((x != y).sum()):,} of 8,192 numbers differ")
# ```
#
# ```text
# in fp32 7,351 of 8,192 numbers differ
# in bf16 1 of 8,192 numbers differ
# ```
# </details>
#
# dK and dV have one owner and one order, as long as column blocks are not divided. dQ has neither, so from run to run a
# few of its numbers differ, even in bf16.
#
# ## What does a deterministic dQ cost?
#
# If you have to repeat a training run bit for bit, call `torch.use_deterministic_algorithms(True)`. There are two ways
# to write a deterministic kernel:
#
# | way | what adds to a number of dQ | cost |
# | --- | --- | --- |
# | two passes (b01, the portable kernels) | one owner, in one order | seven matmuls instead of five |
# | turns (FlashAttention-3, this kernel) | all column blocks, in a fixed order | waiting |
#
# A **turn** is the right to add next, so this way is also called *ordered accumulation*. For each part of dQ, a counter
# in HBM, the *semaphore*, records how many column blocks have added to it so far. A column block adds its part when the
# counter shows that all column blocks before it have added. When its sum has arrived, the counter goes up by one. A
# warp that waits for a turn can do nothing else. Therefore, each consumer has a *writer*, which is a separate warp that
# waits, adds and counts for it:

# %% tags=["nbval-ignore-output"]
read("hopper/backward/semaphore.py", "Semaphore.add", "Semaphore.pass_on")

# %% [markdown]
# - The consumer leaves its part, arrives at `handed` and goes on. One step later, while matmuls run, it calls
#   `wait_for_room`, which lasts until the writer's addition has read that part.
# - `wait` reads the counter, in PTX, until the right number of column blocks have added. The load `ld.acquire` ends
#   before all that follows. TMA, however, reaches memory by another path, so a fence keeps it from adding before the
#   load has ended.
# - `store_wait` ends when the part has been *read*, so the consumer may write there again. `pass_on` waits until the
#   sum has *arrived*, which is later, and then counts. Because of `release`, a warp that reads the new count also finds
#   the sum.
#
# **Predict.** Under the causal mask, a column block begins with the row block on its diagonal. Turns may go from the
# last column block to the first, or from the first to the last. Which is better?
#
# - ☐ from the first to the last, because the first has the most rows, so it should begin
# - ☐ from the last to the first
# - ☐ it makes no difference, because each row block has the same adders
#
# <details><summary>Answer</summary>
#
# **from the last to the first.** With square tiles, column block i starts at row block i and is first there. Column
# block i − 1 starts one row block earlier, so it reaches row block i just as column block i has left it. In the other
# order, column block i would be idle at row block i until column blocks 0 to i − 1 had passed it.
# </details>
#
# Without a mask, all column blocks begin at row block 0. There, the last column block adds first, and the others
# follow at intervals of one addition, and they keep these intervals.
#
# **Can this deadlock?** It cannot if every column block that is waited for is also handed out, with a mask or without.
# The last column block of each head is handed out first, and at each row block the turn goes from the last to the
# first. So the column block that is waited for was handed out earlier. It is running or done, because only a running
# program fetches a number.
#
# For packed sequences, this condition is an assumption about numbers in HBM. The kernel counts a sequence's column
# blocks from its length. However, a program finds its sequence by bisection of the cumulative sequence lengths, which
# works only if they never decrease. With cumulative lengths such as 0, 700, 300, 1000, no program finds some blocks of
# the first sequence, and a writer that waited for them would wait for ever. So `bwd_preprocess` looks at the cumulative
# lengths, and if they decrease anywhere, it lets all counters begin with the bits of a NaN. As whole numbers, these are
# more than any turn, so no writer waits, and dQ comes out as NaN.
#
# The record shows what both ways cost:

# %% tags=["hide-input"]
paper = load("paper")
backward_rows = [row for row in paper.rows if row.direction == "backward" and row.problem["N_q"] >= 1024]
repeated = [row for row in load("deterministic").rows if row.direction == "backward"]
in_paper = {tuple(row.problem[x] for x in ("d", "causal", "N_q")): row for row in backward_rows}
costs = []  # of turns: ours, FlashAttention-3's; of two passes
print("time over the time without it      turns   FlashAttention-3's   two passes")
for row in repeated:
    p = row.problem
    ours, theirs = (row.ratio(name, f"{name} deterministic") for name in ("fa2_lab", "FlashAttention-3"))
    two = in_paper[p["d"], p["causal"], p["N_q"]].ratio("fa2_lab", "fa2_lab portable")
    costs.append((ours, theirs, two))
    shape = f"d = {p['d']:3}, N = {p['N_q']:6,}, {'causal' if p['causal'] else 'no mask':7}"
    print(shape + "{:14.2f} {:14.2f} {:14.2f}".format(*costs[-1]))

# %% [markdown]
# Turns are the cheaper way. At d = 64 under the mask, FlashAttention-3 pays less for them than this kernel, but
# otherwise it pays more. The record does not show why, because both kernels have a writer warp, barriers and counters
# in HBM. Two passes cost more, and not only because of the second pass, since the portable kernels have no producers
# and no rings.
#
# **What you will get.** `torch.use_deterministic_algorithms(True)` does one more thing. Unless you set
# `torch.utils.deterministic.fill_uninitialized_memory = False`, PyTorch fills every new tensor with NaN before a kernel
# may write there. The table was measured with this filling switched off, so it shows the cost of the turns alone. With
# the filling on, the gradients and the fp32 buffers are written once more in each call.
#
# ## Part 5 · What was reached, and an exercise (19 minutes)
#
# ## What was reached?
#
# The next cell shows the FA2 paper's grid, with 16,384 tokens and hidden size 2,048, in one run on an H200 and in one
# on an H100, and also one long sequence, with FlashAttention-4. The lines below the speeds are ratios of our speed to
# theirs.

# %% tags=["hide-input"]
def mean_ratio(asked, peer):
    found = [row.ratio("fa2_lab", peer) for row in asked if peer in row.values]
    return float(np.prod(found)) ** (1 / len(found)), min(found), max(found)


on_H100 = [row for row in load("h100").rows if row.direction == "backward" and row.problem["N_q"] >= 1024]
long = [row for row in load("long").rows if row.direction == "backward"]
print("{gpu}, torch {torch}, triton {triton}; TFLOP/s at N = 4,096".format(**paper.machine))
for row in backward_rows:
    p = row.problem
    if p["N_q"] == 4096:
        rates = (f"{name} {row.rate(name):.0f}" for name in ("fa2_lab", "FlashAttention-3", "cuDNN"))
        print(f"d = {p['d']:3}, {'causal' if p['causal'] else 'no mask':7} ", *rates, sep="   ")
for name, peer, asked in (
    ("FlashAttention-3", "FlashAttention-3", backward_rows),
    ("cuDNN", "cuDNN", backward_rows),
    ("FlashAttention-3, H100", "FlashAttention-3", on_H100),
    ("FlashAttention-3, one sequence, N ≥ 32,768", "FlashAttention-3", long),
    ("FlashAttention-4, one sequence, N ≥ 32,768", "FlashAttention-4", long),
):
    print("over {:42} geometric mean {:.2f}, from {:.2f} to {:.2f}".format(name, *mean_ratio(asked, peer)))

# %% [markdown]
# On one long sequence, FlashAttention-4 is ahead by a few percent, and FlashAttention-3 is hardly ahead.
# [RESULTS.md](../RESULTS.md) has all versions. On the roofline, an addition to dQ is charged 8 bytes, as in chapter 09,
# because L2 both reads and writes. The column blocks have 128 keys here, so they add half as often as those in chapter
# 09, which have 64. So L2 could nearly keep up with the tensor cores:

# %% tags=["hide-input"]
show("limits_one_pass")

# %% [markdown]
# In the order of the causal mask, the model kept the tensor cores busy all the time. Without a mask, as here,
# exponentials come later, and the kernel reaches 641 of 989 TFLOP/s. But even a large matmul reaches only 797 TFLOP/s
# on this GPU, whose power sets its clock. Moreover, the model has three units and nothing else. It leaves out rounding,
# the path of dS and dQ through shared memory, and the beginning and end of a column block.

# %% [markdown]
# ## Recap
#
# - One pass saves two of seven matmuls and half of the exponentials. Its cost is dQ, to which all column blocks add.
# - A consumer owns 64 keys, with dK and dV in registers. Tiles have keys as rows, so only dS has to be transposed.
# - At d = 128 under the mask, a step computes S, then the exponentials beside dQ of the previous step, and then dV,
#   dP and dK. Otherwise, dV comes after dS, because registers are scarce.
# - dQ is added up in any order, so its last bits differ from run to run. A deterministic dQ costs a second pass, or
#   turns, which are cheaper.

# %% [markdown]
# ## Exercises
#
# **Build.** S and dP do not need each other. Write `my_order`, which starts both at once and then lets the exponentials
# run beside dP. dQ stays in its own step, and only its addition runs on. Keep the labels of `kernel_order`, because the
# check refuses work that starts before its operands are there. Is your order as fast as `kernel_order`? The model has
# no registers, so count them as in part 1. How many does a thread need at once at d = 128, and how many would it need
# if dQ of the previous step ran beside S and dP?

# %%
def my_order(block, ds_filled, T, add=600):
    ...


# %% tags=["hide-input"]
judge_step(my_order)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_order(block, ds_filled, T, add=600):
#     added = None
#     for n in range(T):
#         s = block.start("tensor", 256, f"S {n}")
#         dp = block.start("tensor", 256, f"dP {n}")
#         yield s.done()
#         yield block.start("exp", 256, f"P {n}").done()
#         yield dp.done()
#         ds_filled.arrive(block.actor)
#         last = [block.start("tensor", 256, f"{what} {n}") for what in ("dV", "dK")]
#         yield ds_filled.over(n & 1)
#         last.append(block.start("tensor", 256, f"dQ {n}"))
#         for product in last:
#             yield product.done()
#         if added:
#             yield added.done()
#         added = block.start("copy", add, f"add dQ {n}")
# ```
# A step takes 2,572 clocks, so in the model this order is as good as the kernel's own. It needs 192 registers, as the
# kernel's own order does, because S and dP are there together with dK and dV. When dQ begins, P and dS are in 16 bits.
# With dQ of the previous step beside S and dP, a thread would need 224 of 240 registers before anything else. That is
# the record's *S and dP started together*, and it was slow. Your order was not tried in the kernel.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
draw = np.random.default_rng(0).standard_normal
(Q, dO), (K, V) = draw((2, 4, 4)), draw((2, 8, 4))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=8)
dK, dV, dQ = step(Q, dO, L, (dO * O).sum(axis=1), K, V, 0 * K, 0 * V)
truth = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=8)
verdict("step agrees with fa2.backward", all(close(x, y) for x, y in zip((dQ, dK, dV), truth, strict=True)))
verdict("a step takes over 3,500 clocks one by one, and under 2,600 in the kernel's order",
        clocks_of_a_step(one_by_one) > 3500 and 2500 < clocks_of_a_step(kernel_order) < 2600)  # fmt: skip
verdict("registers of a step, all at once", [d + 64 * B_r * 2 // 128 + B_r * d // 256
        for d, B_r in ((64, 128), (128, 64), (128, 128))] == [224, 224, 320])  # fmt: skip
paces = [clocks_of_a_step(kernel_order, add=add) for add in (600, 2500, 5000)]
verdict("an addition may take about as long as a step", paces[1] < 1.05 * paces[0] and paces[2] > 1.5 * paces[0])

# %% tags=["hide-input"]
N_q, N_k = (1000, 1500) if on_gpu else (70, 100)
for d in (64, 128):
    for causal in (False, True):
        draws = (torch.Generator().manual_seed(seed) for seed in range(4))
        shapes = [(1, 4, N_q, d), (1, 2, N_k, d), (1, 2, N_k, d), (1, 4, N_q, d)]
        halves = [torch.randn(s, generator=g).half() for s, g in zip(shapes, draws, strict=True)]
        *qkv, do = (x.double().numpy() for x in halves)
        saved = by_heads.forward(*qkv, stage="naive", causal=causal)
        want = by_heads.backward(*qkv, *saved, do, stage="naive", causal=causal)
        q, k, v, do = (x.to(device) for x in halves)
        asked = [x.requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(attention(*asked, causal=causal), asked, do)
        right = [close(x.double().cpu().numpy(), y, 3e-3) for x, y in zip(found, want, strict=True)]
        verdict(f"dQ, dK and dV agree with float64, d = {d}, causal = {causal}", all(right))

# %% tags=["hide-input"]
additions, flops = 16 * 128 * 16384 * 128, 2.5 * 4 * 16384**2 * 128 * 16
times = 8 * additions / chips.H200.hbm_per_second, flops / chips.H200.tensor_flops
measured = in_paper[128, False, 4096].rate("fa2_lab")
verdict("the kernel reaches 641 TFLOP/s, a large matmul 797", (round(measured), round(paper.ceilings["GEMM TFLOP/s"])) == (641, 797))
verdict("4.3 billion additions take 7 ms, and the matmuls 5.6 ms", [round(1e3 * x, 1) for x in times] == [7.2, 5.6] and additions // 10**8 == 42)
verdict("the kernel is ahead of cuDNN, and level with FlashAttention-3 or ahead of it",
        all(mean_ratio(backward_rows, peer)[1] > least for peer, least in (("cuDNN", 1), ("FlashAttention-3", 0.97))))
verdict("turns cost less than two passes", all(1 < ours < two for ours, _, two in costs))
kept = [line for line in ideas.table("backward") if "| yes" in line or "| for" in line]
verdict("three later ideas are kept", len(kept) == 3 and "the same bits: instructions" in kept[0])
verdict("S and dP together lose by 30% and more", all(x["worth"] <= 0.7 for x in tried if x["idea"] == "S and dP started together"))
verdict("since Triton 3.9, dK's matmul does not start late", not TIGHT or not any(choose(d, 8192, True, False).dk_late for d in (64, 128)))

# %% [markdown] tags=["navigation"]
# [← Hopper, the kernel](12b_hopper_kernel.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)
