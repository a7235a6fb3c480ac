# %% [markdown] tags=["navigation"]
# [← Hopper, the kernel](12b_hopper_kernel.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)

# %% [markdown]
# # 13 · Hopper, backward
#
# **One pass over the columns: who adds up dQ?**
#
# Chapter 09 ended with two passes. In one kernel, each program owns columns and accumulates dK and dV, and in the
# other, each program owns rows and accumulates dQ. Both kernels compute S, P and dP, so some of the work is done twice.
# On Hopper, a single pass is enough, because TMA can *add* to memory while the program goes on with something else.
#
# After this notebook you can
#
# - compute what a single pass saves, and name what it costs,
# - read one step of the kernel, and name the unit or the warps behind each of its waits,
# - explain why the last bits of dQ differ from run to run, and what it costs to make dQ deterministic.
#
# *Time: 95 minutes, in six parts, of which the first includes this opening. Hardware: any laptop with Triton; on a
# Hopper GPU, the checks run the real kernel. All speeds and times were measured on an NVIDIA H200 in bf16. Before this:
# [05](05_backward.ipynb), [09](09_triton_backward.ipynb), and [12a](12a_hopper_rungs.ipynb) and
# [12b](12b_hopper_kernel.ipynb), which introduce producers, consumers, rings and barriers.*

# %%
# Setup: run this cell first. You do not have to read it.
import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.machine.asynchrony import Barrier, ThreadBlock
from fa2_lab.plots.show import show
from fa2_studio.book.hopper import show_listing

# %% [markdown]
# ## Part 1 · One step, and its registers (13 minutes)
# We first ask what a single pass saves. Then we look at the work of one step without any waits, and at the registers
# that it takes.
#
# ### What does one pass save?
#
# The backward pass has its own short ladder, from `ladder/b00_atomics.py` to `b02_one_pass.py`. The last column of this
# table shows how the rungs differ. This chapter reads the kernel that `attention()` runs, which also makes one pass.
#
# | rung | passes | matmuls per tile | what adds to dQ |
# | --- | --- | --- | --- |
# | b00 atomics (Algorithm 2) | one | five | every thread, one value at a time |
# | b01 two passes (chapter 09) | two | seven | only the program that owns the row |
# | b02 one pass, and this chapter's kernel | one | five | TMA, one tile at a time |
#
# The second pass computes $S$, $dP$ and the exponentials again. A single pass saves this repetition, which makes up two
# of the seven matmuls and half of the exponentials. In exchange, it has to add a tile to dQ, in fp32, for every tile of
# scores. Ideally, another unit does this addition, so that the warps can go on with their work. The picture shows the
# matmuls of a tile in both cases:

# %% tags=["hide-input"]
show("backward_passes")

# %% [markdown]
# ### One step, in plain code
#
# A thread block takes a *column block* of 128 keys and works through the row blocks. Its work on one row block is
# called a **step**. The next cell writes a step in NumPy, with the names from Algorithm 2. Keys are the rows of each
# tile and queries are the columns, so `s` in the code is $S^\top$.

# %%
# q, do: (B_r, d); L_i, D_i: (B_r,); the others: (B_c, d)
def step(q, do, L_i, D_i, k, v, dk, dv):
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
# - **Why are keys the rows?** A matmul can read its left operand from registers, but its right operand has to be in
#   shared memory. The kernel computes `p` and `ds` in registers, where matmuls 2 and 4 need them as left operands. Only
#   matmul 5 needs `ds` transposed, so `ds` has to go through shared memory just once.
# - **Why does `s` begin at $-L/\tau$ and `dp` at $-D$?** A matmul adds its result to the accumulator's old contents, so
#   the tensor cores do both subtractions for us. A masked score begins at $-\infty$, which the kernel writes in place
#   of $-L/\tau$ before it starts the matmul, and this makes its P 0. Its dP, however, begins at $-D$ like all the
#   others. If it began at $-\infty$ as well, $P \circ dP$ would be $0 \cdot (-\infty)$, which is NaN.
# - **What does a column block own?** dV and dK are sums over rows, so the column block can accumulate them until it has
#   worked through all of its rows. dQ is a sum over keys, so every column block has to add to it.
#
# ### What fits into the registers?
#
# Two consumer warpgroups share a column block. Each warpgroup owns 64 of the block's keys, and has 128 threads with up
# to 240 registers each. dK and dV stay in registers for the whole column block. For a row block of $B_r$ rows, a
# consumer also needs $S$ and $dP$, which are 64 × $B_r$ each, and half of the row block's dQ. The other consumer
# computes the other half.
#
# How many registers does this take? As long as everything is in fp32, each value takes one register, and a consumer's
# 128 threads share the values evenly. So each thread needs
#
# - 64 · d / 128 registers for dK and the same number for dV, because each of them has 64 · d values,
#
# - 64 · $B_r$ / 128 each for $S$ and $dP$,
#
# - $B_r$ · d / 256 for half of dQ, because dQ has $B_r$ · d values, half of them are $B_r$ · d / 2, and 128 threads
#   share these.
#
# P overwrites $S$, so it needs no additional registers. It stays in fp32 until dS = P ∘ dP has been computed. In total,
# one thread needs:
#
# | | dK and dV | with S and dQ | with P and dP | all at once |
# | --- | ---: | ---: | ---: | ---: |
# | d = 64, $B_r$ = 128 | 64 | 160 | 192 | 224 |
# | d = 128, $B_r$ = 64 | 128 | 192 | 192 | 224 |
# | d = 128, $B_r$ = 128 | 128 | 256 | 256 | 320 |
#
# At d = 128, row blocks of 128 rows would take too many registers, so row blocks have only 64 rows there. At d = 64,
# they have 128. Even so, holding everything at once would leave only 16 of the 240 registers for the rest of the code.
# The registers therefore decide the order of a step, because a thread must never hold $S$, $dP$ and dQ all at the same
# time. In the kernel, a thread holds $S$ together with the previous row block's dQ, and $dP$ begins only after that dQ
# has been handed over. The picture draws the table as bars:

# %% tags=["hide-input"]
show("live_registers")

# %% [markdown]
# ## Part 2 · The waits of a step (20 minutes)
# On the GPU, a step consists of jobs for several units. The order of these jobs, and what each of them waits for,
# decide how fast the step is.
#
# ### The same step, with its waits
#
# Now we write the step as a Python generator that leaves out the arithmetic but yields everything that the step waits
# for. `block.start` gives a unit some work and immediately returns a job, and the job's `done()` is a wait for the end
# of that work. `ds_filled` is a barrier of the same kind as in chapter 12a's model. Its `arrive` makes one of two
# arrivals, and its `over` is a wait for the end of a phase.
#
# The number in each call is a number of clocks. With d = 128 and 64 rows, one consumer's matmul has 2 · 64 · 64 · 128
# FLOPs and so takes 256 clocks at 4,096 FLOPs per clock. The matmul for dQ also takes 256 clocks, because a consumer
# computes only half of the 128 columns but sums over all 128 keys. A consumer's 64 · 64 exponentials, at 16 per clock,
# take 256 clocks as well. If both consumers use the same unit at once, each of these jobs takes 512 clocks.
#
# Additions to dQ are different, because they run side by side, each as if it were alone. We guess that an addition
# takes 600 clocks, and the question below tries other values. In the first version of the step, each job waits for the
# previous one:

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
# The second version follows the kernel's order at d = 128 under the mask. The matmul for a step's dQ runs in the *next*
# step, alongside the exponentials. The numbers in the comments are those of the matmuls in `step` above, so 1 is S, 2
# is dV, 3 is dP, 4 is dK and 5 is dQ. After the loop, the last dQ still has to be computed. The model ends there and
# leaves out the addition of this last dQ:

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
    block, ds_filled = ThreadBlock(), Barrier("dS filled", arrivals=2)
    block.run({f"consumer {c}": way(block, ds_filled, T, **options) for c in range(2)})
    return block.clock / T


for way in (one_by_one, kernel_order):
    took = clocks_of_a_step(way)
    busy = f"tensor cores busy {2560 / took:.0%}"
    print(f"{way.__name__:12}: {took:5,.0f} clocks per step, {busy}")

# %% [markdown]
# In this model, the two consumers share the tensor cores equally, as in *Within* in chapter 12a. In a step, each
# consumer runs five matmuls, so the tensor cores need 10 · 256 = 2,560 clocks. If each job waits for the previous one,
# both consumers wait for exponentials, dS and additions at the same time, and meanwhile the tensor cores are idle. In
# the kernel's order, the exponentials hide behind the matmul for dQ, and the addition hides behind the matmuls that
# follow. The next picture is drawn from a run of only 12 steps. At the start of the run, some units have no work yet,
# and at the end, some have none left, so the title gives a share of 98%, not 100%:

# %%
show("backward_order")

# %% [markdown]
# The next picture shows steps 3 and 4 of the kernel's order in more detail. Each job has the number of the step that it
# belongs to, so you can see that the tensor cores run dQ of step 2 while P of step 3 is computed:

# %%
show("backward_step")

# %% [markdown]
# **Predict.** In each step, a consumer hands one part of dQ over to TMA, which adds it to memory. How long can one such
# addition take before it slows the consumers down?
#
# - ☐ as long as one matmul, 256 clocks
# - ☐ about as long as a step, 2,500 clocks
# - ☐ as long as it likes, because no consumer waits for it
#
# <details><summary>Answer</summary>
#
# **about as long as a step, 2,500 clocks.** No consumer waits for the sum. What a consumer does wait for, at
# `yield added.done()`, is the *buffer* in shared memory, because TMA may still be reading the consumer's previous part
# from it. With 5,000 clocks per addition, the additions set the pace. A step then takes slightly less than 5,000 clocks
# on average, because no dQ is added in the first step, and the last addition is left out of the model.
#
# ```python
# for add in (0, 600, 2500, 5000):
#     took = clocks_of_a_step(kernel_order, add=add)
#     print(f"an addition takes {add:5,} clocks: {took:5,.0f} clocks per step")
# ```
#
# ```text
# an addition takes     0 clocks: 2,570 clocks per step
# an addition takes   600 clocks: 2,570 clocks per step
# an addition takes 2,500 clocks: 2,579 clocks per step
# an addition takes 5,000 clocks: 4,972 clocks per step
# ```
# </details>

# %% [markdown]
# ### Where do two consumers meet?
#
# dQ needs dS for all 128 keys, but each consumer computes dS for only 64 of them. Each consumer therefore writes its dS
# into shared memory and arrives at a barrier. Once both have arrived, each consumer computes its half of dQ in the next
# step. If a row block has 64 rows, each half covers half of the d columns. If it has 128 rows, each half covers 64 of
# them. Either way, this half of dQ is a sum over all 128 keys, so it needs dS from both consumers.
#
# Does a second barrier have to announce that a consumer has finished *reading* dS? It does not, because there are two
# buffers for dS. Even steps use buffer 0 and odd steps use buffer 1. Follow consumer A, and a consumer B that is as
# slow as it can be:
#
# | | consumer A | consumer B | buffer 0 |
# | ---: | --- | --- | --- |
# | 1 | step 0: writes its dS into buffer 0, and arrives | step 0: the same | holds step 0's dS |
# | 2 | step 1: its matmul for step 0's dQ reads buffer 0; when that has ended, it writes its dS into buffer 1, and arrives | step 1: its matmul for step 0's dQ is still reading buffer 0 | is being read by B |
# | 3 | step 2: waits until B has arrived for step 1 | step 1: the matmul has ended; it writes its dS into buffer 1, and arrives | has no reader any more |
# | 4 | step 2: its matmul for step 1's dQ reads buffer 1; then it writes its dS into buffer 0 | step 2 | holds step 2's dS |
#
# The wait in line 3 is the important one. A needs it anyway, because its dQ for step 1 needs B's dS. But it also
# guarantees that B has finished reading buffer 0, since B arrives for step 1 only after its matmul for step 0's dQ has
# ended. So A cannot overwrite the buffer in line 4 too early. With a single buffer, A would already write in line 2,
# while B is still reading.
#
# ### Which unit performs four billion additions?
#
# Each column block of 128 keys adds $N \times d$ values to dQ. With N = 16,384, d = 128 and 16 heads, there are 128
# column blocks per head. In total, there are 16 · 128 · 16,384 · 128 = 4.3 billion additions in fp32, each of which
# reads four bytes and writes four. If these values were read from HBM and written back to it, 34 GB would have to move,
# which would take 7 ms at 4.8 TB/s. All five matmuls together take only 5.6 ms if the tensor cores are never idle.
#
# So dQ must stay in L2, and L2 itself must carry out the additions. L2 does so for b00 as well as for this kernel. One
# head's fp32 dQ takes 16,384 · 128 · 4 bytes, which is 8 MiB, so it fits into L2. To keep it in L2, the kernel works
# through one head after another if there is no mask. With a mask, column blocks take different amounts of time, so
# several heads run side by side to balance the load. Their Q, dO and fp32 dQ should then take at most 32 of the 60 MiB
# of L2, although the kernel runs more heads if the SMs would otherwise be idle.
#
# In b00, however, the threads have to request these additions from L2 one value at a time, and TMA can take this work
# over. A **bulk reduction**, or TMA reduction, is a TMA copy from shared memory to global memory that adds to the old
# contents. One thread specifies a tile in shared memory and an address in the fp32 dQ buffer, and then goes on with its
# work. FlashAttention-3 does the same. The additions do not become cheaper for L2, which still has to read and write
# four bytes per value (part 6).
#
# ### What does a consumer wait for?
#
# The next picture shows the whole thread block, with the rings and the mailbox from chapter 12b. Each of the two boxes
# between the consumers is a buffer for dS, which both consumers write and both read:

# %%
show("pipelines_backward")

# %% [markdown]
# A consumer waits for seven things. Five of them have arrows in the picture, namely the mailbox, K, V, a row block (Q,
# dO, $-L/\tau$ and $-D$ together) and the other consumer's dS. The other two have no arrow. They are the consumer's own
# matmuls, and the moment at which TMA has finished reading the dQ buffer.

# %% [markdown]
# ## Part 3 · The kernel (23 minutes)
# Now we read the code that runs on the GPU, from the copies that come in to the last matmul of a step.
#
# ### Three copies, one barrier
#
# `RowBlockPipeline` is a ring with two stages. Three copies fill a stage. The first brings Q, the second brings dO, and
# the third brings `acc_init`, the initial values of the accumulators, which are a row of $-L/\tau$ and a row of $-D$.
# All three share one barrier, so the producer announces the bytes of all three with a single arrival. The method
# `load_acc_init` reads $-L/\tau$ or $-D$. In Sᵀ, the queries are columns, and each thread reads the values for its own
# queries. The line with `reinterpret` moves no data. It only views the bytes of the stage as two rows of B_r fp32
# values, of which `index(which)` picks one:

# %% tags=["nbval-ignore-output"]
show_listing("hopper/backward/rows.py", "RowBlockPipeline.load_acc_init")

# %% [markdown]
# The comment in the listing is about the second row of chapter 12a's table of fences. A thread loads these values, and
# TMA later writes another row block over them, so a fence has to come between the two. The function `exchange_ds`,
# which follows below, contains it.
#
# The producer is a single warp, which announces column blocks and starts copies. For each query head of the group, it
# copies the row blocks that see the keys of the current column block.
#
# ### A consumer's column block
#
# Both consumers run the code below. `c` is a compile-time constant, 0 or 1, so the code is compiled once for each of
# them. These names occur in it:
#
# | name | meaning |
# | --- | --- |
# | `r`, `n` | the number of the column block, and of the row block, counted over all work of this program, as in chapter 12b |
# | `n_step` | the number of the row block that a step of the loop processes |
# | `steps` | the number of row blocks, of all query heads of the group, that see this column block |
# | `bounds` | from the function `seeing_rows`: the first row that sees each key, and `CUT`, which is true if the call has a mask or if its last column block is incomplete |
# | `load_kv` | waits for K and V, and returns the consumer's 64 rows of V |
# | `v_regs` | from `load_v`: at d = 128 without a mask, usually half of V in registers, 16 per thread, and otherwise V as it is |
# | `COLS` | 64, the number of keys per consumer |
# | `acc_layout(d)` | the layout in which the tensor cores leave a result with d columns (chapter 12a) |
# | `dq_accum` | the descriptor of the fp32 dQ buffer |
# | `semaphore` | the *turns* of part 5; without turns, its `wait_for_room` does nothing, so skip the lines that call it |
#
# The listing leaves out the lines for `dk_late`, an option that moves matmul 4 into the next step. The option is off,
# because with Triton 3.9, it does not make the kernel faster.

# %% tags=["nbval-ignore-output"]
KERNEL, LATE = "hopper/backward/kernel.py", "smem.config.dk_late"
show_listing(KERNEL, "consumer", begin="bounds = seeing_rows", end="write_dk_dv(c", off=LATE)

# %% [markdown]
# The first step, the *prologue*, comes before the loop. The argument `ds=None` means that there was no previous row
# block, so this step has no dQ to compute. The *epilogue* after the loop computes dQ for the last row block. K is
# released only after the epilogue, which still needs it for dQ = dS K, whereas V is released before it. `write_dk_dv`
# multiplies dK by $\tau$, which the NumPy version did in each step, and writes dK and dV with TMA copies from the
# buffer that held dQ.
#
# V is the same for all row blocks. This is why `load_v` can keep half of it in registers for a whole column block.
# Matmul 3 then takes that half of its left operand from registers instead of shared memory.
#
# ### The step
#
# At d = 128 under the causal mask, the step has the same order as `kernel_order`, line by line. At d = 64, and usually
# also at d = 128 without a mask, the option `dv_late` is on, so matmul 2 starts only after dS:

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "step", begin="FIRST", end="add_dq", off=LATE)

# %% [markdown]
# | line | what runs meanwhile | what it waits for |
# | --- | --- | --- |
# | `row_blocks.wait` | – | the producer, for Q, dO and the initial values |
# | `start_dq`, which begins with a wait at `ds_filled` | S | the other consumer, for its dS from the previous step |
# | first `wait(1)` | dQ | S |
# | `exp2`, where `scale_log2` is $\tau \log_2 e$ | dQ in the source; for the machine code see below | – |
# | second `wait` | dV, unless it starts late | dQ |
# | `add_dq` | dV, unless it starts late | TMA, until the buffer is free |
#
# When does dV's matmul start? This depends on the registers, because a step needs P in two formats. It needs P in fp32
# until it has computed dS, and in 16 bits as the left operand of dV's matmul. If that matmul starts late, after dS,
# then dP and the fp32 values of P are no longer needed, so the 16-bit copy of P costs nothing extra. If it starts
# early, however, the thread has to hold the copy while dP's matmul runs. The copy has 64 · $B_r$ values of half a
# register each, so it takes $B_r$ / 4 registers per thread.
#
# Each compiled kernel is for one d, either with or without a mask. For each of these cases, the table adds up what a
# thread would hold during dP's matmul if dV started early. dQ is not part of the sum, because it needs no more
# registers than dP and is handed over before dP begins:
#
# | case | dK, dV, P and dP | half of V (`load_v`) | 16-bit P, if early | sum, if early | the kernel starts dV |
# | --- | ---: | ---: | ---: | ---: | --- |
# | d = 64, with or without a mask | 192 | – | 32 | 224 | late, after dS |
# | d = 128, no mask | 192 | 16 | 16 | 224 | late, after dS |
# | d = 128, causal | 192 | – | 16 | 208 | early, before dQ is handed over |
#
# Of a thread's 240 registers, 208 leave enough for the rest of the code, but 224 do not. For example, at d = 128
# without a mask, an early start makes Triton 3.9 spill values into slower memory. Triton 3.6 kept fewer addresses in
# registers, and an earlier version of the kernel, compiled with it, did start dV early in this case (part 5). The last
# row is the order that part 2 models as `kernel_order`. It is also the order of two kinds of calls without a mask at d
# = 128, namely calls with an incomplete last column block and deterministic calls (part 5). Neither of them keeps half
# of V in registers.
#
# The order has a second effect. If dV's matmul starts late, nothing needs P before dS, so NVIDIA's assembler, `ptxas`,
# is free to delay exponentials until after the wait for dQ. They then run next to another matmul, or next to none of
# this consumer's own. Only at d = 128 under the causal mask do all exponentials run alongside dQ, as in the model. At d
# = 128 without a mask, all of them come after dP, and only the other consumer's matmuls can hide them.
#
# <details><summary>How many exponentials run in which part of a step?</summary>
#
# The table shows how many of a thread's exponentials run in each part of a step, as compiled with Triton 3.9:
#
# | | dV's matmul starts | alongside dQ | between dQ and dP | alongside dP | after dP |
# | --- | --- | ---: | ---: | ---: | ---: |
# | d = 128, causal | before dQ is handed over | 32 | 0 | 0 | 0 |
# | d = 64, causal | after dS | 8 | 28 | 28 | 0 |
# | d = 64, no mask | after dS | 8 | 21 | 35 | 0 |
# | d = 128, no mask | after dS | 0 | 0 | 0 | 32 |
#
# These are the counts for one consumer, and the other consumer's counts differ by at most 3. In the columns *between dQ
# and dP* and *after dP*, this consumer has no matmul running, so only the other consumer's matmuls can hide the
# exponentials there. You can see this for yourself without a GPU: run
# `fa2-lab xray hopper.backward --d 64 --full --sass`, and look for `MUFU.EX2` (an exponential) between the lines with
# `WARPGROUP.DEPBAR` (a wait) and `HGMMA` (a matmul).
# </details>
#
# The rest of the step follows:

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "step", begin="dp = start_dp", off=LATE)
show_listing(KERNEL, "exchange_ds")

# %% [markdown]
# - `ds` is used twice. `exchange_ds` writes it to shared memory for both consumers, and `as_operand` turns it into the
#   left operand of matmul 4 without moving it out of its registers.
# - `row_blocks.release(n)` announces that Q and dO have been read. The matmul for dQ is still to come, but it only reads dS
#   and K.
#
# **Predict.** The last wait has `deps=[dv, p_half, dk, ds]`. `p_half` is P in 16 bits, and no later line uses it. Why
# is it in this list?
#
# - ☐ because the wait would otherwise cover only dK's matmul
# - ☐ because its registers could otherwise be overwritten too early
# - ☐ because it would otherwise not reach shared memory in time
#
# <details><summary>Answer</summary>
#
# **because its registers could otherwise be overwritten too early.** `p_half` is the left operand of dV's matmul, and
# the tensor cores read it from its registers until that matmul ends. The compiler does not know this, and without
# `deps` it would see no later use of these registers. The first answer is wrong because the wait's argument is 0, so
# when the wait ends, no matmul is still running. The third is wrong because P never goes through shared memory.
# </details>

# %% [markdown]
# ## Part 4 · How dQ leaves, and the launches (6 minutes)
# In every step but the first, `add_dq` hands over a part of dQ. We now follow these parts to the finished dQ, and look
# at the kernels that run before and after the one that you have read.
#
# ### How does a consumer hand over its dQ?
#
# A step calls `add_dq`. Without turns (part 5), the consumer's half of dQ then ends up in this function:

# %% tags=["nbval-ignore-output"]
show_listing("hopper/backward/accumulators.py", "add_lines")

# %% [markdown]
# These lines are the whole handover. The consumer first waits until TMA has read the buffer's old contents, and then it
# stores its half of dQ, issues a fence and starts the addition.
#
# `x` is this half, and its 64 × 64 values are viewed as 128 *lines* of 32 values (if d is at most 32, there are only 64
# × 32 values, in 64 lines). A line is not a row of dQ. It consists of four values from each of eight neighbouring
# threads, so the values are stored in the order in which the threads hold them in their registers, and none of them has
# to move to another thread. The sums in memory keep this order. Only the last of the three kernels below puts them into
# their proper order.
#
# The picture follows the dQ of one head. Each of its 128 column blocks visits 256 row blocks of 64 rows, and each of
# the two consumers adds its half of dQ every time, so a column block makes 512 additions:

# %% tags=["hide-input"]
show("dq_path")

# %% [markdown]
# ### Three launches
#
# | launch | programs | what it does |
# | --- | --- | --- |
# | `bwd_preprocess` | one per 64 rows | clears all sums, computes D = rowsum(dO ∘ O), and writes $-L/\tau$ and $-D$ |
# | `backward_kernel` | one per SM | makes the one pass, writes dK and dV, and adds to the fp32 dQ buffer |
# | `bwd_postprocess` | one for each half of a row block's dQ | reads the sums, puts them in order, multiplies by $\tau$, and rounds to 16 bits |
#
# A row that sees no key has $L = -\infty$, so $-L/\tau$ would be $+\infty$. For such a row, `bwd_preprocess` writes
# $-\infty$ instead, so that S begins at $-\infty$ and p becomes 0.
#
# A launch takes a few µs. To hide this time, the second and the third kernel are each launched before their predecessor
# has ended, which is called *programmatic dependent launch* (PDL). The first one is launched in the usual way, because
# it follows kernels that belong to PyTorch. Programs that start early take the SMs as these become free, set up their
# barriers, and stop at `gdc_wait` until the *whole* previous kernel has ended. Only then do they touch what that kernel
# wrote. So a kernel's setup overlaps with its predecessor, but its real work does not. The picture compares the three
# launches, of which it calls the first *before* and the third *after*:

# %% tags=["hide-input"]
show("backward_launches")

# %% [markdown]
# ### What if there are too few column blocks?
#
# With grouped-query attention, a column block belongs to a K/V head and works through the rows of all query heads that
# share this K/V head. With batch 2, one K/V head and N = 4,096, there are only 64 column blocks for 132 SMs. In such a
# case, each column block is *divided*, which means that several programs each take a part of its row blocks. dK and dV
# then have more than one owner, so TMA has to accumulate them as well. The picture shows the example with whole column
# blocks, and with each of them divided in two:

# %% tags=["hide-input"]
show("waves_divided")

# %% [markdown]
# ## Part 5 · Cost and determinism (17 minutes)
# How much does the order of a step gain, and what does it cost if dQ has to be the same in every run?
#
# ### How much does the order help?
#
# For each idea, the next cell divides the speed with the idea by the speed without it, at N = 4,096. To get the speed
# without an idea, we took it out of an earlier version of the kernel, under Triton 3.6. A star marks an idea that this
# version did not contain. To measure such an idea, we added it instead. In the output, a *product* is a matmul, and the
# columns not labelled *causal* are for calls without a mask:

# %% tags=["hide-input"]
from IPython.display import Markdown, display

from fa2_lab.plots import idea_gains

tried = [x for x in idea_gains.gains() if x["part"] == "backward" and x["N_q"] == 4096]
tried_by_key = {(x["idea"], x["d"], x["causal"]): x for x in tried}
print(f"{'':40}  d = 64    causal   d = 128    causal")
for idea in (
    "dV's product after dS",
    "S begins at −L/τ, dP at −D",
    "dQ under the next S, not in its own step",
    "half of V in registers",
    "S and dP started together",
):
    four = (tried_by_key.get((idea, d, causal)) for d in (64, 128) for causal in (False, True))
    cells = (f"{x['gain']:.2f}{'' if x['kept'] else '*'}" if x else "–" for x in four)
    print(f"{idea:40}" + "".join(f"{cell:<6}".rjust(10) for cell in cells))

# %% [markdown]
# The largest speedup comes from starting dV's matmul after dS at d = 64, where the kernel would otherwise run short of
# registers. The second-largest one comes from starting the accumulators at $-L/\tau$ and $-D$. In *S and dP started
# together*, both matmuls run alongside the previous step's dQ, so a thread needs 224 registers, as the last column of
# the table in part 1 shows. If a kernel already uses every register, an overlap that needs still more registers makes
# the kernel slower.
#
# One number in the first line of the output seems to contradict part 3. At d = 128 without a mask, the star shows that
# the earlier version started dV *early*, and starting it after dS made that version 9% slower. Yet the current kernel
# starts dV after dS in this case. The compiler explains the difference. The earlier version also kept half of V in
# registers, so with an early start, it needed the 224 registers that part 3's table lists for this case. With Triton
# 3.6, the early start was faster nevertheless. Triton 3.9 keeps more addresses in registers, so with it, the same order
# spills, and we gave up the early start. No recorded run compares the two orders with Triton 3.9, so we do not know how
# their speeds compare there.
#
# We also tried nine further ideas on the current kernel, and kept four of them:
#
# - The programmatic dependent launch from part 4 helps if there are few rows.
#
# - Running fewer heads at the same time helps if there are many rows and no pauses between calls.
#
# - Treating the query heads of a K/V head as one head with all their rows, as in chapter 12b, helps some short calls
#   without a mask.
#
# - Another order of the instructions makes *deterministic* calls faster. These calls give the same bits in every run,
#   and they are the subject of the next sections. With this order, up to 48 bytes per thread no longer fit into
#   registers and *spill* into slower memory.
#
# As in chapter 12b, a table compares what we predicted with the speedup that we measured. In the table, *deterministic*
# stands for deterministic calls, and *heads of 8 MiB* means that Q and dO of all heads that run side by side take 8 MiB
# together:

# %% tags=["nbval-ignore-output", "hide-input"]
table = idea_gains.table("backward")
display(Markdown("\n".join(["<details><summary>Nine ideas: predicted and measured</summary>",
                            "", *table, "", "</details>"])))

# %% [markdown]
# ### Do you get the same bits in every run?
#
# **Predict.** It is a matter of chance which column block adds first, and an fp32 sum depends on the order of its
# terms. Suppose that 128 column blocks add to 8,192 values of dQ, first in one order and then in another. After
# rounding to bf16, how many of the 8,192 sums differ?
#
# - ☐ about 4,000
# - ☐ about 300
# - ☐ fewer than 10
#
# <details><summary>Answer</summary>
#
# **fewer than 10.** The rounding to bf16 is thousands of times coarser than the difference between the two orders. Only
# a sum that is almost exactly halfway between two bf16 numbers can be rounded differently.
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
# As long as column blocks are not divided, each block of dK and dV has a single owner, which adds up all contributions
# to it in a fixed order. The contributions to dQ come from many column blocks and in no fixed order, so a few values of
# dQ differ from run to run, even in bf16.
#
# ### What does a deterministic dQ cost?
#
# If you need to repeat a training run bit for bit, call `torch.use_deterministic_algorithms(True)`. A kernel can be
# made deterministic in two ways:
#
# | method | what adds to a value of dQ | cost |
# | --- | --- | --- |
# | two passes (b01, the portable kernels) | one owner, in one order | seven matmuls instead of five |
# | turns (FlashAttention-3, this kernel) | all column blocks, in a fixed order | waiting |
#
# A **turn** is the right to add next. Since the column blocks take their turns in a fixed order, this method is also
# called *ordered accumulation*. For each part of dQ, a counter in HBM, the *semaphore*, records how many column blocks
# have added to that part so far. A column block adds its own contribution once the counter shows that all the column
# blocks before it have added theirs. When that contribution has reached memory, the counter goes up by one. Since a
# warp that waits for its turn can do nothing else, each consumer has a *writer*. This is a separate warp that waits for
# the turn, adds the consumer's part to dQ, and increments the counter on the consumer's behalf:

# %% tags=["nbval-ignore-output"]
show_listing("hopper/backward/semaphore.py", "Semaphore.add", "Semaphore.pass_on")

# %% [markdown]
# `add` is the writer's work on one part of dQ. Line by line:
#
# | line | what it does |
# | --- | --- |
# | `wait(handed.index(2 * c), …)` | waits until consumer c has stored its part in shared memory; each consumer has two barriers, and this is its first |
# | `row_blocks.read(n, …)`, twice | reads two numbers that the producer has sent along with the row block: `row_block_id`, which together with c gives `sem_index`, the number of this part of dQ, and `dq_turn`, which is how many column blocks add to this part earlier |
# | `self.wait(sem_index, …)` | reads the counter `sem_index` again and again, until `dq_turn` contributions have been added |
# | `async_atomic_add` | starts the addition |
# | `store_wait(0)` | waits until TMA has *read* the part |
# | `arrive(handed.index(2 * c + 1), …)` | tells the consumer, at its second barrier, that it may overwrite the part; the consumer waits for this one step later, in `wait_for_room` |
# | `PTX_WAIT_BULK_GROUP`, in `pass_on` | a line of PTX that waits longer, until the sum has *arrived* in memory |
# | `atomic_add(counters + sem_index, 1, …)` | passes the turn on |
#
# The two calls of `all_threads()` are needed because one of the warp's threads starts the addition and waits for it,
# while another one arrives or increments the counter. All threads of the warp meet there, so the second one cannot run
# ahead of the first.
#
# Why does the order need so much care? Suppose that the counter went up before the sum had arrived. The next writer
# would start its own addition, and the two could reach L2 in either order. dQ would still be right, but its last bits
# would again be a matter of chance. Two promises of PTX's memory model exclude this:
#
# - The increment is a *release*. A warp that reads the new count is guaranteed to find everything that was written
#   before it, so it also finds the sum.
#
# - The load in `self.wait` is an *acquire*. It completes before any later memory access of that thread begins. TMA
#   accesses memory through a different path, however, so `self.wait` ends with a fence, which keeps the addition from
#   beginning before that load is complete.
#
# **Predict.** Under the causal mask, a column block begins with the row block on its diagonal. The turns can go from
# the last column block to the first, or from the first to the last. Which order is better?
#
# - ☐ from the first to the last, because the first one has the most rows and should begin
# - ☐ from the last to the first
# - ☐ it makes no difference, because the same column blocks add to each row block
#
# <details><summary>Answer</summary>
#
# **from the last to the first.** With square tiles, column block i starts at row block i and is the first to add there.
# Column block i − 1 starts one row block earlier, so it reaches row block i just when column block i has moved on. In
# the other order, column block i would have to wait at row block i until column blocks 0 to i − 1 had all passed it.
# </details>
#
# Without a mask, all column blocks begin at row block 0, where the last column block adds first. The others follow in
# turn, each of them one addition after the previous one, and they keep this distance from then on.
#
# **Can this deadlock?** It cannot, with or without a mask, provided that every column block that another one waits for
# is really handed out to a program. The last column block of each head is handed out first, and at each row block, the
# turns also go from the last column block to the first. So a column block only ever waits for one that was handed out
# earlier. That earlier block is either running or done, because a column block is only handed out to a program that is
# running.
#
# <details><summary>When is a column block not handed out? Packed sequences</summary>
#
# In packed sequences, which [chapter 16](16_masks.ipynb) introduces, several sequences follow one another in the
# same tensor, and *cumulative lengths* in HBM tell where each of them begins. The kernel computes the number of a
# sequence's column blocks from its length. A program, however, finds the sequence that a column block belongs to by
# bisecting the cumulative lengths, which works only if they never decrease. With cumulative lengths such as 0, 700,
# 300, 1000, some blocks of the first sequence are never found by any program, and a writer that waited for one of them
# would wait forever. For this reason, `bwd_preprocess` checks the cumulative lengths and, if they decrease anywhere,
# initializes all counters with the bits of a NaN. Read as an integer, these bits are larger than any count that a
# writer waits for, so no writer waits, and dQ comes out as NaN.
# </details>
#
# The recorded times show what the two methods cost:

# %% tags=["hide-input"]
from fa2_lab.records import load

paper = load("paper")
backward_rows = [row for row in paper.rows if row.direction == "backward"
                 and row.problem["N_q"] >= 1024]
repeated = [row for row in load("deterministic").rows if row.direction == "backward"]
in_paper = {tuple(row.problem[x] for x in ("d", "causal", "N_q")): row for row in backward_rows}
costs = []  # of turns: ours, FlashAttention-3's; of two passes
print("time over the time without it      turns   FlashAttention-3's   two passes")
for row in repeated:
    p = row.problem
    ours, theirs = (row.ratio(name, f"{name} deterministic")
                    for name in ("fa2_lab", "FlashAttention-3"))
    two = in_paper[p["d"], p["causal"], p["N_q"]].ratio("fa2_lab", "fa2_lab portable")
    costs.append((ours, theirs, two))
    shape = f"d = {p['d']:3}, N = {p['N_q']:6,}, {'causal' if p['causal'] else 'no mask':7}"
    print(shape + "{:14.2f} {:14.2f} {:14.2f}".format(*costs[-1]))

# %% [markdown]
# Turns are the cheaper method. At d = 64 under the mask, turns cost FlashAttention-3 less than they cost this kernel,
# but in all other cases, they cost FlashAttention-3 more. Both kernels use a writer warp, barriers and counters in HBM,
# so one would have to profile them to find the difference, which we have not done. Waiting for a turn in other ways
# does not help. We tried a pause before each new read of the counter, reads without an order followed by a fence, and a
# wait that begins before the consumer has finished its part, and none of them was faster on every problem. Two passes
# cost more, and the second pass is not the only reason, because the portable kernels also lack producers and rings.
#
# **A cost outside the kernel.** `torch.use_deterministic_algorithms(True)` does one more thing. Unless you set
# `torch.utils.deterministic.fill_uninitialized_memory = False`, PyTorch fills every new tensor with NaN before a kernel
# can write to it. We recorded the table's times with this filling switched off, so they show the cost of the turns
# alone. With the filling on, the gradients and the fp32 buffers are written one extra time in each call.
#
# ## Part 6 · Results, and an exercise (16 minutes)
# How fast is the kernel now, and what keeps it below the limit of its units?
#
# ### How fast is it?
#
# The next cell shows speeds in the FA2 paper's settings, with 16,384 tokens and a hidden size of 2,048, from one run on
# an H200 and one on an H100. It also includes problems with one long sequence, for which FlashAttention-4 was measured
# as well. The lines below the speeds give our speed divided by that of each other implementation.

# %% tags=["hide-input"]
def mean_ratio(asked, peer):
    found = [row.ratio("fa2_lab", peer) for row in asked if peer in row.values]
    return float(np.prod(found)) ** (1 / len(found)), min(found), max(found)


on_H100 = [row for row in load("h100").rows if row.direction == "backward"
           and row.problem["N_q"] >= 1024]
long = [row for row in load("long").rows if row.direction == "backward"]
print("{gpu}, torch {torch}, triton {triton}; TFLOP/s at N = 4,096".format(**paper.machine))
for row in backward_rows:
    p = row.problem
    if p["N_q"] == 4096:
        rates = (f"{name} {row.rate(name):.0f}"
                 for name in ("fa2_lab", "FlashAttention-3", "cuDNN"))
        print(f"d = {p['d']:3}, {'causal' if p['causal'] else 'no mask':7} ", *rates, sep="   ")
for name, peer, asked in (
    ("FlashAttention-3", "FlashAttention-3", backward_rows),
    ("cuDNN", "cuDNN", backward_rows),
    ("FlashAttention-3, H100", "FlashAttention-3", on_H100),
    ("FlashAttention-3, one sequence, N ≥ 32,768", "FlashAttention-3", long),
    ("FlashAttention-4, one sequence, N ≥ 32,768", "FlashAttention-4", long),
):
    print(
        "over {:42} geometric mean {:.2f}, from {:.2f} to {:.2f}".format(
            name, *mean_ratio(asked, peer)
        )
    )

# %% [markdown]
# On one long sequence, FlashAttention-4 is ahead of our kernel by about 2%, and FlashAttention-3 is as fast as our
# kernel. [RESULTS.md](../RESULTS.md) lists the versions of all implementations. On the roofline, an addition to dQ
# counts as 8 bytes, as in chapter 09, because L2 both reads and writes the sum. The column blocks here have 128 keys
# rather than chapter 09's 64, so they add half as often. L2 could therefore almost keep up with the tensor cores:

# %% tags=["hide-input"]
show("rooflines_one_pass")

# %% [markdown]
# Why, then, does the kernel reach only 638 of 989 TFLOP/s? The model of part 2 keeps the tensor cores busy all the
# time, but it has the order that the kernel uses under the causal mask. Without a mask, as in the picture, the
# exponentials come later. Moreover, the model only has three units. It leaves out rounding, the path of dS and dQ
# through shared memory, and the beginning and end of each column block. Finally, even a large matmul reaches only 795
# TFLOP/s on this GPU, because the power limit lowers the GPU's clock.

# %% [markdown]
# ## Recap
#
# - One pass saves two of the seven matmuls and half of the exponentials. In exchange, all column blocks have to add to
#   dQ.
# - A consumer owns 64 keys and keeps their dK and dV in registers. Keys are the rows of each tile, so only dS has to be
#   transposed.
# - At d = 128 under the mask, a step computes S, then the exponentials alongside the previous step's dQ, and then dV,
#   dP and dK. At d = 64, and at d = 128 without a mask, dV comes after dS, because registers are scarce.
# - The terms of dQ are added in no fixed order, so its last bits differ from run to run. A deterministic dQ requires
#   either a second pass or turns, and turns are cheaper.

# %% [markdown]
# ## Exercises
#
# **Build.** S and dP do not depend on each other. Write `my_order`, which starts both at once and then lets the
# exponentials run alongside dP. dQ stays in its own step, and only its addition continues into the next. Keep the
# labels from `kernel_order`, because the check uses them to reject work that starts before its operands are ready. Is
# your order as fast as `kernel_order`? The model has no registers, so count them as in part 1. How many registers does
# a thread need at once at d = 128, and how many would it need if the previous step's dQ ran alongside S and dP?

# %%
def my_order(block, ds_filled, T, add=600):
    ...


# %% tags=["hide-input"]
from fa2_studio.book.orders import check_step

check_step(my_order)

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
# A step takes 2,572 clocks, so in the model this order is as good as the kernel's own. Like the kernel's own order, it
# needs 192 registers, because a thread holds S and dP together with dK and dV. By the time dQ begins, P and dS are in
# 16 bits. If the previous step's dQ ran alongside S and dP, these values alone would take 224 of a thread's 240
# registers. The list of ideas in part 5 calls this *S and dP started together*, and it made the kernel much slower. We
# have not tried your order in the kernel.
# </details>

# %% tags=["hide-input", "nbval-ignore-output"]
# The checks below run the kernel. Its first call prints how kernels run on this machine.
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
from fa2_lab.kernels.hopper.backward.configs import choose
from fa2_lab.kernels.tables import USE_LOW_REG
from fa2_lab.machine import chips
from fa2_lab.reference import fa2
from fa2_lab.reference import heads as by_heads
from fa2_studio.book.verdicts import close, verdict

draw = np.random.default_rng(0).standard_normal
(Q, dO), (K, V) = draw((2, 4, 4)), draw((2, 8, 4))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=8)
dK, dV, dQ = step(Q, dO, L, (dO * O).sum(axis=1), K, V, 0 * K, 0 * V)
truth = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=8)
verdict("step agrees with fa2.backward",
        all(close(x, y) for x, y in zip((dQ, dK, dV), truth, strict=True)))
verdict("a step takes over 3,500 clocks one by one, and under 2,600 in the kernel's order",
        clocks_of_a_step(one_by_one) > 3500 and 2500 < clocks_of_a_step(kernel_order) < 2600)
verdict("registers of a step that holds everything at once",
        [d + 64 * B_r * 2 // 128 + B_r * d // 256
        for d, B_r in ((64, 128), (128, 64), (128, 128))] == [224, 224, 320])
paces = [clocks_of_a_step(kernel_order, add=add) for add in (600, 2500, 5000)]
verdict("an addition may take about as long as a step", paces[1] < 1.05 * paces[0]
        and paces[2] > 1.5 * paces[0])

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
times = 8 * additions / chips.H200.hbm_bytes_per_second, flops / chips.H200.tensor_flops_per_second
measured = in_paper[128, False, 4096].rate("fa2_lab")
verdict("the kernel reaches 638 TFLOP/s, a large matmul 795",
        (round(measured), round(paper.ceilings["GEMM TFLOP/s"])) == (638, 795))
verdict("4.3 billion additions take 7 ms, and the matmuls 5.6 ms",
        [round(1e3 * x, 1) for x in times] == [7.2, 5.6] and additions // 10**8 == 42)
verdict("the kernel is faster than cuDNN, and about as fast as FlashAttention-3 or faster",
        all(mean_ratio(backward_rows, peer)[1] > least
            for peer, least in (("cuDNN", 1), ("FlashAttention-3", 0.97))))
verdict("turns cost less than two passes", all(1 < ours < two for ours, _, two in costs))
kept = [line for line in idea_gains.table("backward") if "| yes" in line or "| for" in line]
verdict("four later ideas are kept", len(kept) == 4
        and "deterministic: an order of instructions" in kept[0])
verdict("starting S and dP together costs 30% of the speed or more",
        all(x["gain"] <= 0.7 for x in tried if x["idea"] == "S and dP started together"))
verdict("since Triton 3.9, dK's matmul no longer starts late", not USE_LOW_REG
        or not any(choose(d, 8192, True, False).dk_late for d in (64, 128)))

# %% [markdown] tags=["navigation"]
# [← Hopper, the kernel](12b_hopper_kernel.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)
