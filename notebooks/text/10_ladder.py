# %% [markdown] tags=["navigation"]
# [← The Triton backward kernels](09_triton_backward.ipynb) · [The map](00_start.ipynb) · [The workshop →](11_workshop.ipynb)

# %% [markdown]
# # 10 · The ladder, measured
#
# **What did each change buy on a real GPU, and why?**
#
# So far the chapters counted. Now we measure. The package holds the same attention 24 times, as a *ladder*: rung 00 is
# standard attention, and each rung changes one thing in the rung before. A model says what the change should give. Where
# prediction and measurement disagree, there is something to learn.
#
# After this notebook you can
#
# - time a GPU call so that somebody else gets the same number,
# - predict what a change of a kernel gives, from its registers, its instructions and the size of the launch,
# - say what a kernel waits for: bytes, instructions, another product, or the power supply.
#
# *Time: 45 minutes. Hardware: any laptop; every measured number was recorded on one GPU. Before this:
# [06](06_parallelism.ipynb), [08](08_triton_forward.ipynb) and [09 · The Triton backward kernels](09_triton_backward.ipynb).*

# %%
from itertools import pairwise

from IPython.display import Markdown

from fa2_lab.kernels import ladder
from fa2_lab.machine import ladder as model
from fa2_lab.machine import reasons
from fa2_lab.plots import roofline, saw, speed
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.tools import ladder as climbed
from fa2_studio.bench import experiments
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## How do we time a kernel?
#
# The *host*, the computer that gives the orders, puts a kernel into a queue and goes on. A stopwatch around the call
# times only how long it takes to enter the queue. So the GPU itself stamps the time, at two *events* in the queue,
# before and after the call. Each of the other rules keeps a wrong number out:
#
# | rule | what goes wrong without it |
# | --- | --- |
# | check the answer in float64 first | a kernel that skips a tile is faster |
# | warm up | the first call compiles the kernel |
# | take turns (of two: A B B A) | a warm GPU lowers its clock, so the later kernel loses |
# | take the median | one disturbed call moves a mean |
# | overwrite the L2 cache before each call | the second call finds its inputs in it |

# %% [markdown]
# ## The whole climb

# %% tags=["nbval-ignore-output", "hide-input"]
live("climb")

# %% [markdown]
# The bars are TFLOP/s, forward, with 16 heads at batch 4 (64 in all), N = 4,096, d = 128. We count only FLOPs that the answer
# needs: $4N^2d$ a head, half if causal. In the still picture a purple bar gains 8% or more, with or without the mask, and a
# pale one loses: that teaches as much. The lines are FlashAttention-3, the kernel of FlashAttention's authors for Hopper. In a
# terminal, `fa2-lab ladder 07 08` prints one change on a page.

# %% tags=["nbval-ignore-output", "hide-input"]
record = load("ladder")
Markdown("\n".join(climbed.markdown(record)))

# %% [markdown]
# ## What should a change give?
#
# In Triton's rungs a program is a *warpgroup*, four warps with 64 rows. It takes each tile through the units of its SM in
# turn: the way from L2 into shared memory (`path` below), the tensor cores, the *issue slots* (each of the SM's four
# schedulers starts one instruction a clock), the exponential unit. It also waits $w$ clocks that no other program makes
# longer. Alone, a program takes $T_1 = w + \sum_u D_u$ clocks for a tile, $D_u$ of them at unit $u$. A second program on the
# SM does the same, and the two queue. On rung 03 a program stands 1,111 of its 2,753 clocks on the path. So whoever comes
# there finds the other one with probability 0.40 and waits for it (we take its whole 1,111 clocks): 1.40 · 1,111 together.
#
# $$\begin{aligned} T_2 &= w + \sum_u D_u \left(1 + \frac{D_u}{T_1}\right) \\
# T_3 &= w + \sum_u D_u \left(1 + 2\,\frac{D_u (1 + D_u / T_1)}{T_2}\right) \end{aligned}$$
#
# In $T_2$ clocks both finish a tile, so a tile costs $T_2 / 2$. A third finds two others; each stands $D_u (1 + D_u / T_1)$
# of its $T_2$ clocks at unit $u$. And so on: this is *mean-value analysis*.
#
# $D_u$ follow from the data sheet and the compiled loop. Two numbers are fitted to rungs 07 and 09: the speed of the way
# from L2, and $w$. From rung 10 on copies run ahead, so the way from L2 leaves the sum, and $w$ is fitted again, to rungs
# 11 to 16: there *predicted* means fitted. Here is rung 03, and how it would be if a third program fitted:

# %%
rung = reasons.modelled(ladder.find("03"), causal=False, d=128)
demands = model.units(rung)
alone = model.WAIT + sum(demands.values())
two = model.WAIT + sum(D * (1 + D / alone) for D in demands.values())
print(", ".join(f"{unit} {D:.0f}" for unit, D in demands.items()), f"clocks; wait {model.WAIT}")
three = model.clocks(rung, programs=3)  # by the same rule
print(f"a tile costs {alone:.0f} clocks with one program,", end=" ")
print(f"{two:.0f} / 2 = {two / 2:.0f} with two, {three / 3:.0f} with three")

# %% [markdown]
# A second program makes the SM a good half faster, and a third another fifth. So the first question about a change is not
# how much work it saves. It is: **how many programs fit on an SM afterwards?** An SM has 65,536 registers. Of programs of
# 128 threads with r registers each (rounded up to a multiple of 8) 65,536 / (128 r) fit: three, if r is at most 168. (From
# rung 10 on shared memory is a second limit.)

# %% tags=["hide-input"]
timed = {}
for row in record.rows:
    p = row.problem
    if row.direction == "forward" and {*ladder.RUNGS[3:]} <= row.values.keys():
        timed[p["batch"] * p["heads"], p["N_q"], p["d"], p["causal"]] = row
full, causal, few = timed[64, 4096, 128, False], timed[64, 4096, 128, True], timed[8, 4096, 128, False]
steady = next(row for row in record.sustained if not row.problem["causal"])  # without a pause between calls
counts = {name: reasons.counters(record, name) for name in ladder.RUNGS}


def pair(number):
    return climbed.before(ladder.find(number)), ladder.find(number)


def factor(number, row):
    old, new = pair(number)
    return row.ratio(new, old)


def card(number, *counters):
    return Markdown(climbed.card(record, ladder.find(number), *counters))


def answer(name, mask=False, d=128):  # to an experiment: a rung launched in another way
    return experiments.ratio(record, name, d, mask, heads=8192 // d)

# %% [markdown]
# ## Why do tiles alone lose?
#
# Rung 01 has FA1's loops, *Algorithm 1 as printed, one worker a head*, with tiles of 64 × 64 like the rungs up to 17. S and
# P never touch HBM. Yet it is much slower than standard attention. O, $\ell$ and m travel at every tile instead: rung 00
# moves about $4N^2$ elements, and rung 01 about $N^2 (3d + 4) / B_c$, which is $6N^2$ for d = 128 and $B_c$ =
# 64. In bytes that is 1.7 times as much. And its 64 programs, on 132 SMs, draw less than half as many bytes a second.

# %%
def dram(number):
    return sum(counts[ladder.find(number)][name] for name in roofline.DRAM) / 1e9


N, d, T = 4096, 128, 64  # T tiles in a row, and in a column
asked = {
    "00": 12 * N * N + 8 * N * d,  # S in 4 bytes and P in 2, written and read
    "01": T * N * (10 * d + 16) + 8 * N * d,  # Q; O, ℓ and m in 4 bytes, in and out
    "02": T * N * 4 * d + 4 * N * d,  # K and V
}
asked["03"] = asked["02"]
print("rung   asked for, GB   DRAM moved, GB   TFLOP/s")
for number, moved in asked.items():
    rate = full.rate(ladder.find(number))
    print(f"{number}{64 * moved / 1e9:18.2f}{dram(number):17.2f}{rate:10.0f}")

# %% [markdown]
# In the first three lines the count and the GPU's counter agree. Rung 02 swaps the loops, so that o, $\ell$ and m stay on
# the chip. In rung 03 each row block has a program of its own. The row blocks of a head run at the same time, and read the
# same K and V, 2 MiB a head. The first to ask brings a tile into L2, and the others find it there.

# %% tags=["hide-input"]
for heads, row in ((64, full), (8, few)):
    old, new = (ladder.find(n) for n in ("02", "03"))
    predicted = reasons.predicted(old, new, causal=False, d=128, heads=heads)
    print(f"{heads:2} heads: predicted × {predicted:.1f}, measured × {row.ratio(new, old):.1f}")

# %% [markdown]
# The model knows SMs and programs, and lets every byte come from L2. With 8 heads that is so in both rungs: their K and V,
# 16 MiB, fit in L2. With 64 heads those of rung 02, 128 MiB, do not. What the prediction lacks there is the price of DRAM.
#
# ## Is DRAM still the limit?

# %% tags=["nbval-ignore-output"]
show(roofline.draw(**roofline.data()))

# %% [markdown]
# A kernel that does f FLOPs for each byte of DRAM traffic can be no faster than f times the bytes per second of DRAM (its
# *bandwidth*), and no faster than the tensor cores. Both limits were measured, by a large copy and a large matrix product
# (GEMM). Drawn over f they are a *roofline*. They meet at the *ridge*. Rungs 00 to 02 stand left of it, 01 and 02 far below
# the slope: 64 programs cannot ask for more bytes. From rung 03 on, all stand to the right (12, not drawn, only barely): ask
# no longer what DRAM does, but what the tensor cores wait for.

# %% [markdown]
# ## What did deferring the division buy?
#
# FA2's first tweak: divide once, at the end. By chapter 04's count of operations it may gain 8% at most. To see what gains, it
# was split in two. Rung 04 computes p against the new maximum, and still divides in every tile. Rung 05 defers the division.

# %% tags=["hide-input"]
card("05", "tensor cores at work, %")

# %% [markdown]
# Rungs 03 and 04 scale P V before they add it, so the product needs a place of its own beside o: 64 registers, of which 50 are
# saved. In rung 05 the tensor cores add it where o lies. The registers count, not the operations. Under the mask the same
# change gains nothing: it leaves 174 registers, a few too many for a third program.
#
# A launch argument, `maxnreg=168`, forces the compiler to use at most 168 registers. It saves no instruction:

# %%
for number, mask in (("05", True), ("03", False), ("09", False)):
    gain = answer(f"{number} at 168 registers", mask)
    print(f"rung {number}{', causal' * mask}, at 168 registers: × {gain:.2f}")

# %% [markdown]
# Now three programs fit. So the causal rung 05 gains about as much as the tweak did without a mask, and rung 09 gains,
# too. Rung 03 gains far less: at 168 registers it spills.
#
# ## Why can saved work lose?
#
# Rung 06 folds the scale and $\log_2 e$ into one multiply-add, and drops the guard that `exp` has for *denormals*, results
# too small for a normal float32. Rung 07 skips tiles above the diagonal. Rung 08 tests the mask only where it cuts, with a
# second loop. Rung 09 takes the condition off the loads of the other loop.

# %% tags=["hide-input"]
issued, busy = "issue slots used, %", "tensor cores at work, %"
Markdown(climbed.several(record, r06=issued, r07="", r08=busy, r09=issued))

# %% [markdown]
# Read the column *per SM*, programs without a mask/causal. 06, causal: a third one fits, and gains more than the instructions
# saved. 07, causal: half of the tiles go, and so does the third program: × 1.51, not × 2. 08, no mask: the second loop, a
# second copy of the code, takes registers and the third program with them. A change that saves work loses. How much, depends
# on the number of heads. Rung 09 (two programs) over rung 07 (three), without a mask:

# %% tags=["nbval-ignore-output"]
show(saw.draw(**saw.data()))

# %% [markdown]
# Each step of the line is one wave more for the one rung or for the other. 6 heads are 384 programs. Three on each of 132
# SMs are 396 places: one wave. Two on each are 264: a full wave, and a second one that is less than half full. With 8 heads
# it is the other way round: 512 programs nearly fill 264 places twice, and 396 places once and a bit. So a factor belongs
# to a change *and* to a shape. The model is too high with 8, 16 and 20 heads, at 20 even above 1: it lets all programs of a
# wave end at once, while real ones drift apart (likely; their times one by one would tell).
#
# ## What if the copies run ahead?
#
# Rung 10 changes one argument, `num_stages=3`: the copies of two tiles are under way while a third is computed.

# %% tags=["hide-input"]
card("10", "stall: long_scoreboard", "tensor cores at work, %")

# %% [markdown]
# A *stall* is the clocks that all warps wait, divided by the instructions issued. `long_scoreboard` is the wait for L2 or HBM.
# It falls, as it should. But the gain is smaller than predicted, and the machine code shows why: 12 waits for products, one
# behind each instruction, where 2 stood. $QK^\top$ of a tile is 8 instructions of the tensor cores, one for each 16 of d =
# 128, and PV is 4, one for each 16 of 64 keys. In this order of the two loops NVIDIA's compiler lets none of the 12 run on.
# Why the order matters to it, the next card guesses. Rung 11 only exchanges the two loops. (The tiles that run ahead need
# room: 112 KiB of shared memory, 113 with the system's, of an SM's 228. So two programs fit, however few registers they have.)

# %% tags=["hide-input"]
card("11", "tensor cores at work, %")

# %% [markdown]
# This is the clearest cause on the ladder: the same work, nearly, the same registers, and waits that can be counted. `fa2-lab
# xray 10 --full --sass` lists `WARPGROUP.DEPBAR` 24 times, 12 in each of the two loops. For rung 11 it lists 4: one in each
# loop, and one after each has ended. (Launched with `num_stages=1`, rung 11 waits twice, once a product, as rung 09 does, and
# without a mask the order gains nothing. Under it 8%, with as many registers: we do not know why.)
#
# ## From rung 12 on: order, then Hopper
#
# Rungs 12 and 13, still for every GPU, choose the order of row blocks. Rungs 14 to 23 use what only Hopper chips have. Here
# they are names and numbers; [chapter 12a](12a_hopper_rungs.ipynb) builds 15 to 23.
#
# **Predict.** Rung 12 launches the heaviest row block of every head first, then the next heaviest of every head, and so on.
# Without a mask all row blocks are equally heavy. What does it do there, with 64 heads?
#
# - ☐ nothing: blocks are equal, so their order does not matter
# - ☐ it gains: the end of the launch is better filled
# - ☐ it loses
#
# <details><summary>Answer</summary>
#
# **it loses.** 264 programs run at the same time. In rung 11 they are row blocks of some four heads, and find those heads'
# K and V in L2. In rung 12 they are of all 64 heads, whose K and V do not fit there. So DRAM reads twelve times as much
# (table below). Programs hardly wait for that, but it takes power, and the clock falls. Under the mask heavy blocks
# no longer run last: with 64 heads that makes up for it. With 8 heads in all K and V fit in L2, and the gain is left alone:
#
# ```python
# gains = [factor("12", row) for row in (full, causal, timed[8, 4096, 128, True])]
# print("no mask × {:.2f}, causal × {:.2f}, causal with 8 heads × {:.2f}".format(*gains))
# ```
#
# ```text
# no mask × 0.91, causal × 0.99, causal with 8 heads × 1.42
# ```
# </details>

# %% tags=["hide-input"]
hbm, l2 = "DRAM bytes read", "L2 bytes"
Markdown(climbed.several(record, r12=hbm, r13=hbm, r14=issued, r15="", r16=issued, r17=l2, r18=l2,
                         r19=issued, r20=busy, r21=busy, r22=busy, r23=l2))

# %% [markdown]
# - 13 takes heads in groups whose keys fit in L2, so DRAM reads half as much again as before rung 12, not twelve times.
# - 14 has Hopper's copy engine fetch whole tiles: threads compute no addresses. 15 is 14 written in Gluon, where the program
#   itself starts each copy. 16 gives the copies a warp of their own.
# - 17 lets 128 rows share each tile of K and V instead of 64. Copies run ahead far enough, so bytes saved gain nothing, as
#   the model says. 18 has tiles of 128 keys, half as many: waits, maxima and barriers are paid for each tile.
# - From 20 on the model of queues ends: a warpgroup has two products in flight. What is left is a limit. If the tensor
#   cores work a share $a$ of the time, no change that keeps the products gains more than $1/a$.
#
# ## When is the chip the limit?
#
# The GPU may draw 700 W. While a rung runs without a pause, `nvidia-smi` reads its clock and its power. Rungs 03, 04, 08 and
# 09 draw 677 to 690 W at 1.97 GHz and more, which is the full clock. Rungs 00, 05 to 07, and all from 10 on run at a lower
# clock, and all of these but rung 00 draw 678 to 701 W. A GPU lowers its clock when it would otherwise draw too much, so
# power is the likely reason. These readings do not prove it, though, because rung 05 has a lower clock than rung 09 and
# draws 10 W less. All gains so far are of runs with pauses. There the clock falls as well, but less.
#
# **Predict.** With pauses rung 17 is 0.98 times as fast as rung 16, with half of its bytes from L2. And without a pause?
#
# - ☐ slower by as much: bytes were not the limit
# - ☐ slower still: the clock falls
# - ☐ faster: bytes cost power
#
# <details><summary>Answer</summary>
#
# **faster: bytes cost power.** Rung 17 takes more cycles, and at the limit of power the bytes that do not move buy a higher
# clock.
#
# ```python
# old, new = pair("17")
# clocks = " → ".join(f"{reasons.chip(record, name)[0]:.2f}" for name in (old, new))
# print(f"rung 17 without a pause: × {steady.ratio(new, old):.2f}, {clocks} GHz")
# ```
#
# ```text
# rung 17 without a pause: × 1.04, 1.67 → 1.81 GHz
# ```
# </details>

# %% tags=["hide-input"]
def in_cycles(old, new):
    return counts[old]["SM cycles"] / counts[new]["SM cycles"]


chip = {name: reasons.chip(record, name) for name in ladder.RUNGS}
print("rung   gain in cycles   in time   tensor cores   L2, GB   without a pause: gain, GHz, W")
for old, new in pairwise(ladder.RUNGS[10:]):
    gains = f"{in_cycles(old, new):14.2f}{full.ratio(new, old):13.2f}"
    moved = f"{counts[new][busy]:13.0f}%{counts[new][l2] / 1e9:11.1f}{steady.ratio(new, old):22.2f}"
    print(f"{new[1:3]}{gains}{moved}, {chip[new][0]:.2f}, {chip[new][1]:.0f}")
first, last = ladder.find("17"), ladder.RUNGS[-1]

# %% [markdown]
# Where a rung gains in cycles and not in time, the chip is the limit and not the program. Then the way to more speed is
# fewer watts, and bytes cost watts: rung 12 takes the cycles of rung 11 and moves more bytes, so its loss is all clock.
# Rung 20 gains 23% in cycles and 16% in time. Without a pause the clock falls further, and 12% are left. Rung 23 saves
# bytes, and its clock does not fall.
#
# ## Where do we stand?

# %% tags=["nbval-ignore-output"]
show(speed.draw(**speed.data()))

# %% [markdown]
# These are the FA2 paper's shapes: 16,384 tokens, heads · d = 2,048 (the *hidden size*). `torch flash` is
# FlashAttention-2 inside torch, `cuDNN` NVIDIA's kernel, FlexAttention PyTorch's compiled attention. `fa2_lab portable` is
# our plain Triton, for every GPU, and `fa2_lab` what `attention()` chooses on this one. The distance between our two lines
# is what chapters 12a, 12b and 13 gain. The line marked GEMM is the large matrix product in this run, the roof.
#
# ## Recap
#
# - A program per row block is worth most: it fills the GPU, and L2 carries K and V.
# - Next come programs on an SM. Registers, and from rung 10 on shared memory, say how many fit. Waves say what that is worth.
# - A copy or a product that runs on is worth more than an instruction saved. Count the waits in the listing.
# - At the end the chip lowers its clock. There, a gain in cycles is not yet a gain in time.
#
# ## Exercises
#
# On Hopper, at d = 64, three units are nearly equally busy. For a tile of 64 × 128:

# %% tags=["hide-input"]
on = model.units(reasons.modelled(last, causal=False, d=64))
print(f"H200: tensor cores {on['tensor']:.0f} clocks, exponential unit {on['exp']:.0f}, issue slots {on['issue']:.0f}")

# %% [markdown]
# The multiply-add units could take a part $f$ of the exponentials. $2^x = 2^n \cdot 2^r$ with $n = \lfloor x \rfloor$ and
# $0 \le r < 1$. A cubic gives $2^r$, and $n$ goes into the exponent bits. A thread has 64 exponentials a tile. Each one
# moved saves 8 clocks of the exponential unit and costs 8 of the issue slots.
#
# **Predict.** With $f = 1/8$ the busiest unit needs 3% fewer clocks. The kernel was built. What does it gain on an H200?
#
# - ☐ nothing, or it loses
# - ☐ about 3%
# - ☐ more: the exponential unit was what all waited for
#
# <details><summary>Answer</summary>
#
# **nothing, or it loses.** The model of the busiest unit lets all three overlap perfectly. In the real kernel they do not,
# so 64 more instructions a tile can cost more than they save (likely). With a quarter the issue slots are the busiest unit
# even in the model. On a B200 the tensor cores take half as long, and more can be gained. What can silently go wrong in
# building it stands at the top of [the file](../fa2_lab/kernels/ladder/x23_software_exp2.py).
#
# ```python
# for f in (0, 1 / 8, 1 / 4):
#     three = on["tensor"], on["exp"] * (1 - 64 / 66 * f), on["issue"] + 8 * 64 * f
#     print(f"f = {f:5.3f}: busiest {max(three):.0f} clocks")
# for mask in (False, True):
#     found = answer("23 with software exponentials", mask, d=64)
#     print(f"measured with f = 1/8{', causal' * mask}: × {found:.2f}")
# ```
#
# ```text
# f = 0.000: busiest 528 clocks
# f = 0.125: busiest 512 clocks
# f = 0.250: busiest 554 clocks
# measured with f = 1/8: × 0.98
# measured with f = 1/8, causal: × 0.92
# ```
# </details>

# %% tags=["nbval-ignore-output", "hide-input"]
fold = ["<details><summary>Every experiment: a rung launched otherwise, an expectation, one number</summary>", ""]
Markdown("\n".join([*fold, *experiments.table(record), "", "</details>"]))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("the queues by hand = the package's model", close([alone, two], [model.clocks(rung, n) for n in (1, 2)], 1e-3))
points, ceilings = roofline.data()["points"], record.ceilings
left = [points[ladder.find(n)][0] < ceilings["GEMM TFLOP/s"] / ceilings["copy TB/s"] for n in ("00", "01", "02", "03")]
verdict("rungs 00 to 02 stand left of the ridge, 03 to the right", left == [True, True, True, False])
verdict("rungs 00 to 02: DRAM moves what the closed form asks for; rung 03: a small part of it",
        all(abs(dram(n) / asked[n] * 1e9 / 64 - 1) < 0.05 for n in ("00", "01", "02")) and dram("03") < 64 * asked["03"] / 20e9)
verdict("rung 01 is much slower than rung 00; 03 is worth most", factor("01", full) < 0.5 and max(ladder.RUNGS[1:], key=lambda r: factor(r[1:3], full)) == ladder.find("03"))
lacks = [factor("03", row) / reasons.predicted(*pair("03"), causal=False, d=128, heads=n) for n, row in ((64, full), (8, few))]
verdict("with 64 heads the model lacks DRAM, with 8 it is right within a fifth", lacks[0] > 1.1 and abs(lacks[1] - 1) < 0.2)


def held(number, mask=False, what="programs"):
    return reasons.facts()[ladder.find(number), mask, 128][what]


def count(number, what):
    return counts[ladder.find(number)][what]


verdict("rung 04 gains nothing, rung 05 more than the 8% of chapter 04, and under the mask nothing",
        abs(factor("04", full) - 1) < 0.05 and factor("05", full) > 1.1 and factor("05", causal) < 1.06)
verdict("programs: 2, 3 without a mask; 2, 2, 3 with one, and there rung 06 gains more", [held("04"), held("05")] == [2, 3]
        and [held(n, True) for n in ("04", "05", "06")] == [2, 2, 3] and factor("06", causal) > factor("06", full) + 0.1)
verdict("rung 08: a program less without a mask, and it loses", held("08") < held("07") and factor("08", full) < 0.95)
tooth, line = saw.data()["measured"], saw.data()["model"]
verdict("rung 09 over 07: a gain with 8 heads, a loss with 6, and with 20, where the model gains", max(tooth[6], tooth[20]) < 1 < min(tooth[8], line[20]))
verdict("at 168 registers causal 05 and 09 gain about a tenth and more, 03 less",
        min(answer("05 at 168 registers", True), answer("09 at 168 registers")) > 1.08 > answer("03 at 168 registers") > 1)
verdict("with one stage the order of the loops gains nothing without a mask", abs(answer("11 with one stage") - 1) < 0.04)
verdict("software exponentials gain nothing", max(answer("23 with software exponentials", x, 64) for x in (False, True)) < 1.02)
waited = "stall: long_scoreboard"
verdict("rung 10 waits less for data", count("10", waited) < 0.6 * count("09", waited))
verdict("rung 11: far fewer waits in a tile, and a gain", held("11", what="waits") < held("10", what="waits") / 3
        and min(factor("11", full), factor("11", causal)) > 1.04)
verdict("64 heads: rung 01 moves 1.7 times the bytes of rung 00, and less than half as many a second",
        1.6 < dram("01") / dram("00") < 1.75 and factor("01", full) * dram("01") / dram("00") < 0.5)
verdict("shared memory holds two programs from rung 10 on, up to rung 16",
        all(227 * 1024 // held(n, what="shared") == 2 for n in ("10", "11", "12", "13", "14", "15", "16")))
verdict("without a pause rung 17 gains, with a higher clock", steady.ratio(*pair("17")[::-1]) > 1.02
        and chip[ladder.find("17")][0] > chip[ladder.find("16")][0] + 0.1 and factor("17", full) < 1)
full_clock, lower = ([chip[ladder.find(n)] for n in numbers] for numbers in (
    ("03", "04", "08", "09"), ("05", "06", "07", *(f"{n:02}" for n in range(10, 24)))))  # fmt: skip
verdict("677 to 690 W at 1.97 GHz and more; 678 to 701 W at a lower clock", [round(x) for _, watts in (zip(*full_clock), zip(*lower))
        for x in (min(watts), max(watts))] == [677, 690, 678, 701] and max(lower)[0] < 1.86 < 1.96 < min(full_clock)[0])
verdict("rung 12 loses: the cycles of rung 11, more bytes, a lower clock", abs(in_cycles(*pair("12")) - 1) < 0.04 and factor("12", full) < 0.95
        and count("12", l2) > 1.3 * count("11", l2) and chip[ladder.find("12")][0] < chip[ladder.find("11")][0] - 0.1)
verdict("rung 17 halves the bytes from L2, nearly, and gains little; 18 leaves them, and gains more",
        count("17", l2) < 0.65 * count("16", l2) and factor("17", full) < 1.05 < factor("18", full) - 0.03)
verdict("rung 23: more is gained in cycles than in time since rung 17, at rung 22's clock, below rung 03's",
        count("23", busy) > 75 and chip[last][0] < chip[ladder.find("03")][0] - 0.05
        and chip[last][0] > 0.98 * chip[ladder.find("22")][0] and in_cycles(first, last) > full.ratio(last, first))

# %% [markdown] tags=["navigation"]
# [← The Triton backward kernels](09_triton_backward.ipynb) · [The map](00_start.ipynb) · [The workshop →](11_workshop.ipynb)
