# %% [markdown] tags=["navigation"]
# [← The Triton backward kernels](09_triton_backward.ipynb) · [The map](00_start.ipynb) · [The workshop →](11_workshop.ipynb)

# %% [markdown]
# # 10 · The ladder, measured
#
# **What did each change gain on a real GPU, and why?**
#
# In chapter 08, we wrote the kernel of rung 11, but we did not say how its order of loops and its three stages were
# found. This chapter starts from a slower kernel and finds them, and it works in the way that a GPU programmer does.
# First, you guess what the kernel is waiting for, and read the counters that could refute the guess. Then you find the
# machine instructions behind the longest wait, change one thing, and time the kernel again. We go through two such
# rounds slowly, from rung 09 of the ladder to rung 11. All the other rungs were found with the same loop, although each
# time, the cause was a different one. A list of them fits on one screen.
#
# The package implements the same attention 24 times, as the rungs of a *ladder*. Rung 00 is standard attention, and
# each later rung changes one thing about the previous one. A model predicts how much faster each change should make the
# kernel, and whenever the prediction and the measurement disagree, there is something to learn.
#
# After this notebook you can
#
# - time a GPU call so that another person gets the same result,
# - trace a stall that a profiler reports to the instructions behind it, and find a change that removes it,
# - use the kernel's registers, its instructions and the size of the launch to predict the effect of a change,
# - decide whether a kernel is limited by bytes, by instructions, by waits for its own matmuls, or by the power supply.
#
# *Time: 75 minutes, half of them for the walk from rung 09 to rung 11. Hardware: any laptop with Linux; all
# measurements were recorded on one GPU. Before this: [06](06_parallelism.ipynb), [08](08_triton_forward.ipynb) and [09
# · The Triton backward kernels](09_triton_backward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import re
import textwrap
from itertools import groupby, pairwise

from IPython.display import Markdown

from fa2_lab.kernels import ladder
from fa2_lab.machine import ladder_model as model
from fa2_lab.machine import reasons
from fa2_lab.plots import prefetch, roofline, rung_timeline, speedup_by_heads
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.tools import ladder as climbed
from fa2_lab.tools.xray import loops, xray
from fa2_studio.bench import experiments
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

record = load("ladder")
timed = {}
for row in record.rows:
    p = row.problem
    if row.direction == "forward" and {*ladder.RUNGS[3:]} <= row.values.keys():
        timed[p["batch"] * p["heads"], p["N_q"], p["d"], p["causal"]] = row
full, causal, few = (
    timed[64, 4096, 128, False],
    timed[64, 4096, 128, True],
    timed[8, 4096, 128, False],
)
# without a pause between calls
steady = next(row for row in record.sustained if not row.problem["causal"])
counts = {name: reasons.hardware_counters(record, name) for name in ladder.RUNGS}


def pair(number):
    return climbed.before(ladder.find(number)), ladder.find(number)


def factor(number, row):
    old, new = pair(number)
    return row.ratio(new, old)


def answer(name, mask=False, d=128):  # to an experiment: a rung launched in another way
    return experiments.ratio(record, name, d, mask, heads=8192 // d)


def held(number, mask=False, what="programs"):
    return reasons.compiled_rungs()[ladder.find(number), mask, 128][what]


def count(number, what):
    return counts[ladder.find(number)][what]

# %% [markdown]
# ## How do we time a kernel?
#
# As in chapter 08, the GPU itself records the time at two events, one before the call and one after it. The *host*,
# which is the computer that sends commands to the GPU, does not wait for the kernel, so its own clock cannot time it.
# Each of our other rules prevents one particular mistake:
#
# | rule | what goes wrong without it |
# | --- | --- |
# | check the answer in float64 first | a kernel that wrongly skips a tile looks fast |
# | warm up | the time of the first call includes compiling the kernel |
# | make the kernels take turns (two of them run as A B B A) | a warm GPU lowers its clock, so the kernel that runs later looks slower |
# | take the median | one disturbed call shifts the mean |
# | overwrite the L2 cache before each call | the second call finds its inputs in the cache |
#
# `fa2-lab bench ladder` times every rung by these rules, and this chapter's numbers come from its recorded run. We
# count only the FLOPs that the answer needs, which are $4N^2d$ per head, or half of that if the mask is causal.

# %% tags=["hide-input"]
cores = "tensor cores at work, %"
for number in ("09", "10", "11"):
    speed_of = full.rate(ladder.find(number))
    print(f"rung {number}: {speed_of:.0f} TFLOP/s, with 64 heads of 4,096 tokens, d = 128, no mask")

# %% [markdown]
# Rungs 09 to 11 compute the same values with the same 64 × 64 tiles and the same four warps per program. Yet two small
# changes make rung 11 more than 1.5 times as fast as rung 09. How would you find them?
#
# ## What does rung 09 wait for?
#
# In each step of its loop, rung 09 loads a tile of K and a tile of V, runs a matmul, computes the exponentials, and
# runs another matmul. The time from the request for a value to its arrival is the load's *latency* (chapter 00). During
# this time, a program of rung 09 can do nothing else, because its matmul needs the tile.
#
# **Hypothesis.** Our guess is that rung 09 spends most of its time waiting for data. If the guess is right, the tensor
# cores should be idle most of the time, and the wait for memory should be the longest of all the waits that the
# hardware counts. If either of these predictions fails, the hypothesis is wrong.
#
# NVIDIA's profiler *Nsight Compute* (`ncu`) reads the hardware's counters. On a machine with a GPU, this command
# profiles the third call:
#
# ```bash
# ncu -k regex:forward_kernel -s 2 -c 1 --set full python -c "
# import torch; from fa2_lab.kernels import ladder
# q, k, v = torch.randn(3, 4, 16, 4096, 128, device='cuda', dtype=torch.bfloat16)
# for _ in range(3): ladder.load('09').forward(q, k, v, False)"
# ```
#
# `ncu` prints pages of numbers, but three of them are enough to begin with. Without a GPU, you can list their recorded
# values with `fa2-lab ladder 09 10`. For rung 09, they are:

# %% tags=["hide-input"]
def page(*numbers):
    columns = [(f"rung {n}",
                {x: y for x, y in counts[ladder.find(n)].items() if x.startswith("stall: ")})
                for n in numbers]
    print(
        f"{'section of ncu':20}{'what to read':38}"
        + "".join(f"{name:>10}" for name, _ in columns)
    )

    def line(section, what, cells):
        print(f"{section:20}{what:38}" + "".join(f"{cell:>10}" for cell in cells))

    line("Speed Of Light", "1. tensor cores at work", [f"{count(n, cores):.0f}%" for n in numbers])
    line("", "   issue slots used", [f"{count(n, 'issue slots used, %'):.0f}%" for n in numbers])
    line("Occupancy", "2. programs on an SM", [held(n) for n in numbers])
    line("Warp State", "3. clocks of waiting per instruction",
         [f"{sum(stalls.values()):.2f}" for _, stalls in columns])
    for stall in sorted(columns[0][1], key=columns[0][1].get)[:-5:-1]:
        line("", f"   of these {stall[7:]}", [f"{stalls[stall]:.2f}" for _, stalls in columns])


page("09")

# %% [markdown]
# 1. **How close is a unit to its limit?** The tensor cores are busy for a third of the time. The four schedulers of an
#    SM use a quarter of their *issue slots*, which are the clocks in which they can start an instruction. No unit is at
#    its limit, so the warps must be waiting for something.
# 2. **How many other warps could work in the meantime?** Two programs of four warps fit onto an SM, which has slots for
#    64 warps. The share of these slots that is in use is called *occupancy*. Here it is 8 of 64, or 12.5%.
# 3. **What do the warps wait for?** A *stall* is time in which a warp cannot issue its next instruction. The hardware
#    measures stalls by reason, in clocks per issued instruction. The longest one here is `long_scoreboard`, the wait
#    for L2 or DRAM. A table below explains the other reasons.
#
# So the hypothesis survives. But where in the code is this wait? `fa2-lab xray 09 --full --sass` compiles the rung for
# an H200, which does not require a GPU, and prints its machine code. Without `--full`, it would compile the rung with
# the causal mask. From the loop without a mask, we keep only the instructions that load, store, run matmuls, compute
# exponentials or wait. A number in front of an instruction tells you how often it is repeated:

# %% tags=["nbval-ignore-output", "hide-input"]
KEPT = r"(?:@!?U?P\w+ )?(LDGSTS|LDGDEPBAR|LDG|STS|BAR\.SYNC|DEPBAR|WARPGROUP\.\w+|HGMMA|MUFU)"


def main_loop(kernel):  # its instructions that matter here
    texts = re.split(r"^\s*\.L_x_\d+:", kernel.stages["sass"], flags=re.MULTILINE)
    body = next(text for text in texts[1:] if "HGMMA" in text)
    return re.findall(rf"^\s*/\*[0-9a-f]{{4,}}\*/\s+{KEPT}", body,
                      re.MULTILINE), loops(kernel.stages["sass"])


def listing(number):
    print(f"rung {number}:")
    runs = [(name, len([*same])) for name, same in groupby(machine[number][0])]
    words = (f"{n}\u00a0×\u00a0{name}" if n > 1 else name for name, n in runs)
    print(textwrap.indent(textwrap.fill(" → ".join(words), 86, break_long_words=False), "    "))


kernels = {number: xray(number, "sm_90", causal=False)[0] for number in ("09", "10", "11")}
machine = {number: main_loop(kernel) for number, kernel in kernels.items()}
listing("09")

# %% [markdown]
# `LDG` loads from L2 or DRAM into registers, and `STS` stores from registers into shared memory. `HGMMA` is an
# instruction for the tensor cores, and `MUFU` is one for the special function units, in this case an exponential. A
# thread computes 34 of these per tile: 32 for its scores (64 · 64 / 128) and 2 for α, because its scores are 16 from
# each of two rows (four threads share a row). `BAR.SYNC` is a barrier for the program's warps. The two `WARPGROUP`
# instructions are part of the matmuls, and they become important in the second round.
#
# A warp does not wait at an `LDG` itself. The hardware marks the destination register as *not there yet* in a table,
# the *scoreboard*, and the warp goes on. It has to stop at the first instruction that reads such a register, and here
# that is the `STS`. In every step, then, the warp waits at an `STS` until the tile has arrived from memory. Only then
# do the matmuls begin, and while they run, no load for the next step is under way.
#
# ## What if the copies run ahead?
#
# The fix is to request a tile before it is needed, which is called *prefetching*. In a loop, the same technique is
# called *pipelining*, because the copy of tile n + 1 or n + 2 is under way while tile n is in use. Shared memory then
# needs several buffers for tiles, the *stages* from chapter 07. In Triton, a single launch argument sets the number of
# stages:
#
# ```diff
# -    num_warps=4, num_stages=1
# +    num_warps=4, num_stages=3
# ```
#
# On an A100 or a newer GPU, the copies then use a different instruction, `cp.async` (`LDGSTS` in machine code), which
# moves data from L2 or DRAM straight into shared memory. There is no register in between that an `STS` would have to
# wait for, so the warp starts the copy and continues. Copies are counted in groups. `LDGDEPBAR` ends a group, and
# `DEPBAR` waits until at most a given number of groups are still under way.

# %% [markdown]
# The picture below shows a program that has an SM to itself, first with one stage and then with three. The program
# visits 12 tiles, and the picture is an excerpt of 6,000 clocks from the middle. In this model, K and V of a tile are
# copied one after the other, in 410 clocks each, so a tile takes 820 clocks of copies. The work on a tile consists of
# two matmuls and a softmax, and takes 917. With one stage, the program copies K, computes S and the softmax, and only
# then copies V, so a tile takes 820 + 917 = 1,737 clocks. (The machine code of rung 09 requests K and V together, but
# since nothing overlaps with one stage, the sum is the same.) With three stages, the copies run ahead of the work. In
# this excerpt, they always find a free stage, so they follow each other without a gap. Since the copies for a tile take
# a little less time than the work on it, they get a little farther ahead with each tile of the excerpt, and the work
# never waits for them. It therefore sets the pace, and the tensor cores are idle only during the softmax.
#
# Why are the averages above the timelines 1,805 and 1,019 clocks per tile, and not 1,737 and 917? Before its first
# tile, the program also copies Q, and after its last, it stores O. With one stage, these two copies add 2 · 410 clocks
# to the 12 tiles, or 68 clocks per tile. With three stages, the copy of the first K must also be added, because no work
# can run during it, so a tile takes (12 · 917 + 3 · 410) / 12 clocks on average. With more tiles, the averages come
# closer to 1,737 and 917.

# %% tags=["hide-input"]
show("prefetch")

# %% [markdown]
# We now count K and V of a tile as one copy. Three rules then decide when each step ends. First, the copy of tile n
# starts as soon as the tile's stage is free. A stage becomes free when the work on tile n − stages has ended, and it is
# free at time 0 if no tile has used it yet. Second, a copy takes `copy` clocks, no matter what else is under way, so
# unlike in the picture, copies to different stages can run at the same time. Third, the work on tile n takes `work`
# clocks, and it starts when both the copy of tile n and the work on tile n − 1 have ended.
#
# **Build.** Return the times at which the work on each tile ends, in order.

# %%
def pipeline(tiles, stages, copy, work):
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def by_rules(tiles, stages, copy, work):
    found = []
    for n in range(tiles):
        arrived = copy + (found[n - stages] if n >= stages else 0)
        found.append(max(arrived, found[-1] if found else 0) + work)
    return found


cases = {
    "one stage, 4 tiles. Does each copy start only when the work on the previous tile has ended?":
        (4, 1, 4, 5),
    "two stages, short copies. Does the work on a tile also wait for the previous tile's work?":
        (4, 2, 1, 5),
    "two stages, long copies. Does the work wait until its tile is there?": (5, 2, 9, 2),
    "three stages. Is a stage free when the work on tile n − 3 has ended, not on tile n − 2?":
        (7, 3, 9, 2),
    "more stages than tiles. Do all copies start at 0?": (3, 8, 4, 5),
}
check(pipeline, *(Case(words, case, by_rules(*case)) for words, case in cases.items()))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def pipeline(tiles, stages, copy, work):
#     ends = []
#     for n in range(tiles):
#         start = ends[n - stages] if n >= stages else 0  # its stage is free
#         before = ends[n - 1] if n else 0
#         ends.append(max(start + copy, before) + work)
#     return ends
# ```
# </details>
#
# The output below shows the example of the picture again, by the three rules. One unit is about 200 clocks, so a copy
# takes 4 units and the work on a tile takes 5. Each digit is the number of the tile that is being copied or worked on
# at that moment.

# %% tags=["hide-input"]
def timeline(tiles, stages, copy, work):
    ends, lanes = by_rules(tiles, stages, copy, work), {}
    width = ends[-1]
    for n, end in enumerate(ends):
        start = ends[n - stages] if n >= stages else 0
        for lane, begin, length in ((f"copy to stage {n % stages}", start, copy),
                                    ("work", end - work, work)):
            drawn = lanes.setdefault(lane, ["·"] * width)
            drawn[begin : begin + length] = str(n) * length
    print(f"{stages} stage{'s' * (stages > 1)}: the last tile is done at {width}")
    for lane in sorted(lanes):
        print(f"    {lane:16} {''.join(lanes[lane])}")


for stages in (1, 3):
    timeline(5, stages, 4, 5)

# %% [markdown]
# With one stage, each step takes 4 + 5 = 9 units. With three stages, only the first copy takes extra time. After that,
# each step takes just the 5 units that the work needs, as in the picture. A program that is alone on its SM would
# therefore become 9/5 = 1.8 times as fast. Our three rules, however, leave out that a tile also has fixed waits, and
# that two programs share the SM. The package's model, which a folded section below explains, counts both. Because it
# gives rung 10 a longer fixed wait (375 clocks instead of 120, fitted to later rungs), it predicts a smaller speedup, a
# factor of 1.66.
#
# **Predict.** A copy takes 10 units and the work on a tile takes 5. How many stages are needed so that, after the first
# tile, the work never waits?
#
# - ☐ 2
# - ☐ 4
# - ☐ 3
#
# <details><summary>Answer</summary>
#
# **3.** Each tile occupies its stage for copy + work = 15 units. If the work never waits, a tile is finished every 5
# units, so 15 / 5 = 3 stages must be in use at the same time. With two stages, a tile is finished only every 7.5 units
# on average. In general, the work never waits if stages ≥ 1 + copy / work.
#
# ```python
# for stages in (1, 2, 3, 4):
#     ends = by_rules(41, stages, 10, 5)
#     print(f"stages: {stages}, units for each tile: {(ends[-1] - ends[0]) / 40}")
# ```
#
# ```text
# stages: 1, units for each tile: 15.0
# stages: 2, units for each tile: 7.5
# stages: 3, units for each tile: 5.0
# stages: 4, units for each tile: 5.0
# ```
# </details>

# %% [markdown]
# ## Why does rung 10 gain less than predicted?

# %% tags=["hide-input"]
predicted = reasons.predicted_speedup(*pair("10"), causal=False, d=128)
print(f"rung 10 over rung 09: predicted × {predicted:.2f}, measured × {factor('10', full):.2f}\n")
page("09", "10")

# %% [markdown]
# The wait for data has nearly disappeared, as we hoped. But the speedup is far smaller than the model
# predicted, because the warps now wait for something else instead. The longest stall is now `barrier`, the wait for the
# program's other warps. Yet the loop has exactly as many barriers as before. So what are the warps waiting for at these
# barriers? We look at the machine code again (`fa2-lab xray 10 --full --sass`):

# %% tags=["nbval-ignore-output", "hide-input"]
listing("10")

# %% [markdown]
# The loads are now at the end of the loop, as `LDGSTS` copies. But the matmuls have changed as well. On Hopper, a
# matmul is *asynchronous*, just as these copies are, so `HGMMA` only starts it. The program's four warps start it
# together and go on while the tensor cores work. `WARPGROUP.ARRIVE` announces that the operands in registers are ready,
# and `WARPGROUP.DEPBAR` waits until earlier matmuls have ended. A warp can read a result only after such a wait.
#
# One tile's $QK^\top$ takes 8 such instructions, each of which covers 16 of the 128 dimensions, and its $PV$ takes 4,
# each of which covers 16 of the 64 keys. All 8 instructions for $QK^\top$ add to the same block of S, and no warp reads
# S before the last one has ended, so a single wait after the eighth is enough. And indeed, rung 09 waits only twice per
# tile, once for each matmul. In rung 10, however, there are 12 waits, one after each instruction. The tensor cores
# therefore stop after each instruction, until the warps have noticed that it has ended and have started the next one.
# The counters also include a reason for matmuls, called `gmma`, but it is small here (0.16). Most of this waiting is
# probably counted as `barrier`, because all four warps have to meet after each instruction.
#
# Nothing in the Triton code asks for these waits. NVIDIA's compiler put them in, and it even tells us why, in messages
# that Triton hides unless you set `TRITON_ALWAYS_COMPILE=1 TRITON_DUMP_PTXAS_LOG=1` before you run a kernel on a GPU.
# For rung 10, it prints the message below, in which `wgmma` is the name that `HGMMA` has in PTX, the assembly language
# that Triton generates:
#
# ```text
# (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized
# due to non wgmma instructions defining accumulator registers of a wgmma
# between start and end of the pipeline stage
# ```
#
# The *accumulator registers* are the registers of o, to which $PV$ is added. So between the start of a matmul and the
# wait for its end, ordinary instructions write to o. Where are these instructions? Since rung 08, there are two loops,
# one over the tiles without a mask and, after it, one over the masked tiles on the diagonal. We go through the PTX
# (`fa2-lab xray 10 --full --ptx`) up to the first wait after the first loop. These are the places where o is written,
# and the branches:

# %% tags=["nbval-ignore-output", "hide-input"]
# up to the wait after the first loop: what writes the 64 registers of o, and the branches
def order(number):
    ptx = kernels[number].stages["ptx"]
    waits = [(x.start(), {*x[1].split(",")}) for x in re.finditer(r"// wait for regs: (\S+)", ptx)]
    end, o = next(wait for wait in waits if len(wait[1]) == 64)
    seen, found = set(), []
    for line in re.finditer(r".+", ptx[:end]):
        code, rest = line[0].strip(), ptx[line.end() : end]
        if block := re.match(r"(\$L__BB\w+):", code):
            seen.add(block[1])
            again = re.search(rf"bra\S*\s+{re.escape(block[1])};", rest)
            found += (
                ["the loop begins"]
                if again
                else ["arrive here if the loop is skipped"]
                * ("bra" not in rest and len(seen) == 2)
            )
        elif jump := re.match(r"(?:@\S+\s+)?bra\S*\s+(\$L__BB\w+);", code):
            found += (
                ["    the loop ends"]
                if jump[1] in seen
                else [
                    "skip the loop if it has no tile"
                    if code[0] == "@"
                    else "    jump to the wait"
                ]
            )
        elif (move := re.match(r"mov\S*\s+(%\w+),", code)) and move[1] in o:
            found.append("    o = 0, by 64 ordinary instructions")
        elif code.startswith("wgmma.mma_async") and {*re.findall(r"%r\d+", code)} & o:
            found.append("    o += P V, a matmul that is started and may still run when the "
                         "loop ends")
    return [*(step for step, _ in groupby(found)), "wait until all matmuls have ended"]


def show_order(number):
    print(f"rung {number}, up to the first wait after the first loop:")
    print(textwrap.indent("\n".join(order(number)), "    "))


show_order("10")

# %% [markdown]
# A program can reach the last line, the wait, in two ways. It may jump there from the end of the loop without a mask,
# where a matmul may still be adding to o. Or it may have skipped this loop, because its row block has no tile without a
# mask. In that case, the instructions just before the wait have set o to 0. No program does both. But in the code,
# these instructions come after the start of the matmul and before the wait for its end, which is exactly what the
# message complains about. The compiler probably cannot tell whether a matmul or an ordinary instruction was the last to
# write o, so it makes each `wgmma` in the kernel end before the next one starts.
#
# Why does rung 09 not have this problem, although it has the same two loops? It has only one stage, so Triton makes it
# wait for each matmul inside the loop, and no matmul is under way when the loop ends.
#
# **Hypothesis.** If no ordinary instruction writes o between the loop and the wait, the extra waits disappear. We
# cannot tell Triton where to set o to 0. But we can exchange the two loops, so that the masked loop comes first, and
# see where the compiler then puts these instructions. The tiles are processed in a different order, which makes no
# difference to online softmax. If the guess is right, both the waits in the listing and the message disappear, so we
# can check the guess before we time anything.
#
# ## What did exchanging the loops do?

# %% tags=["nbval-ignore-output", "hide-input"]
listing("11")
for number, (_, found) in machine.items():
    waits = [loop.waits for loop in found]
    print(f"rung {number}: waits for matmuls in its two loops: {waits}")
show_order("11")

# %% tags=["hide-input"]
page("09", "10", "11")
print()
for number in ("10", "11"):
    print(f"rung {number} over the previous rung: no mask × {factor(number, full):.2f}, causal "
          f"× {factor(number, causal):.2f}")

# %% [markdown]
# In each loop, all waits but one are gone, and so is the message. (The loop that is listed is the masked one, and the
# other loop has the same list.) The `barrier` stalls have fallen to a third, and the tensor cores are busy for more
# than half of the time. The eight instructions of $QK^\top$ are now started one right after another, and so are the
# four of $PV$. The only wait comes after $QK^\top$, so $PV$ even continues while the warps start the next copies and
# the next $QK^\top$.
#
# In one respect, rung 11 is no different from rung 10. Its first loop, the masked one, can also be skipped, and a
# matmul of that loop can also be under way at the wait. The difference is that the compiler now sets o to 0 only before
# the loop begins, so nothing but matmuls writes o between the loop and the wait. We do not know why it places these
# instructions differently in the two rungs.
#
# Nowhere else on the ladder is the cause as clear, because the work, the registers and nearly all instructions stay the
# same, and the waits can be counted. An experiment supports this explanation. If rung 11 is launched with
# `num_stages=1`, it waits twice, once per matmul, just as rung 09 does. Without a mask, the order of the loops then
# makes no difference. Under the mask, the new order still makes the kernel 8% faster with the same number of registers,
# and we do not know why.
#
# On a machine with a GPU, `fa2-lab ladder 11 --run` checks rung 11 and then compares its time with that of rung 10.
# Without a GPU, `fa2-lab ladder 10 11` prints the change in the code, together with everything that we recorded about
# it. (At d = 64, the change does something else, as chapter 11 shows.)
#
# **Predict.** In rung 11, the tensor cores are busy 54% of the time. If the kernel keeps all its matmuls, how many
# times as fast can further changes make it at most?
#
# - ☐ × 1.5
# - ☐ × 1.84
# - ☐ there is no such limit
#
# <details><summary>Answer</summary>
#
# **× 1.84.** If the tensor cores are busy for a share $a$ of the time, then the best that a kernel with the same
# matmuls can do is to keep them busy all the time. It is then $1/a$ times as fast.
#
# ```python
# print(f"1 / {count('11', cores) / 100:.3f} = {100 / count('11', cores):.2f}")
# ```
#
# ```text
# 1 / 0.543 = 1.84
# ```
# </details>
#
# ## From a stall to a change
#
# Our two rounds correspond to the first two rows of this table. The other rows are for reference, so come back to them
# when `ncu` shows you another stall. They also name changes that only later sections and chapter 12a explain. In `ncu`,
# you find the stall reasons in the section *Warp State*, and the *Source* page shows them next to each instruction.
#
# | the stall | the warp waits for | look for | then try | on the ladder |
# | --- | --- | --- | --- | --- |
# | `long_scoreboard` | data from L2 or DRAM | `LDG`, `DEPBAR` | prefetching with more stages, more programs on the SM, fewer bytes | 10 |
# | `barrier`, `gmma` | other warps of the program, matmuls (in rung 10, probably counted as `barrier`) | `BAR.SYNC`, on Hopper `WARPGROUP.DEPBAR`, the compiler's messages | fewer and larger tiles, matmuls that run while the warps go on | 11, 18 |
# | `short_scoreboard` | shared memory or the exponential unit | `LDS` (a load from shared memory), `MUFU` | fewer exponentials, another layout | 20 |
# | `mio_throttle` | the queue to shared memory and special units | `STS`, `LDS`, `MUFU` | wider accesses, Hopper's copy engine (TMA) | 14 |
# | `wait` | a few fixed clocks after each instruction | long chains | fewer instructions, more independent ones | 06, 14 |
# | `math_pipe_throttle` | a unit that is busy | `HGMMA`, `FFMA` (an FMA) | nothing, because this unit is the limit | |
# | no stall is large, few warps | | registers, shared memory | a smaller tile or `maxnreg`, so that one more program fits | 05 |
# | no stall at all, but slow | | the clock, the power | fewer bytes, because moving bytes costs power | 13, 17 |
#
# When you use this table, keep two things in mind. A stall tells you what a warp waits for, but not whether that
# matters, because the wait is hidden if another warp issues in the meantime. And as rung 10 shows, when one wait
# disappears, another one can take its place, so do not expect to save all of the time that the first wait took.

# %% [markdown]
# ## The whole ladder on one screen

# %% tags=["nbval-ignore-output", "hide-input"]
live("climb")

# %% [markdown]
# The chart shows each rung's speed as a share of the speed of FlashAttention-3, the Hopper kernel by FlashAttention's
# authors. It covers the forward pass with 16 heads at batch 4 (64 in all), N = 4,096 and d = 128. A bar shows the speed
# without a mask, and a dot shows the speed with the causal mask, each as a share of FlashAttention-3's speed with the
# same mask. The bars with a number are the largest steps, and the number is the factor over the previous rung. You can
# learn as much from the rungs that are slower than the previous one as from those that are faster.
#
# Two tables for reference are folded below. For each rung, the first one shows what limited the previous rung and what
# the change removed. The second one shows, for rungs 05 to 23, a hardware counter before and after the change. For
# rungs 07 and 15, there is none, and for rung 18, it shows what did not change, namely the bytes from L2. You do not
# need to read them now, because the sections below explain the names of rungs 01 to 13 when they use them, and chapter
# 12a explains the others. To print a single change on one page, run `fa2-lab ladder 07 08` in a terminal.

# %% tags=["nbval-ignore-output", "hide-input"]
Markdown("\n".join(climbed.markdown(record)))

# %% tags=["hide-input"]
issued, hbm, l2 = "issue slots used, %", "DRAM bytes read", "L2 bytes"
moved = climbed.rungs_table(record, r05=cores, r06=issued, r07="", r08=cores, r09=issued,
                        r10="stall: long_scoreboard",
                        r11="stall: barrier", r12=hbm, r13=hbm, r14=issued, r15="", r16=issued,
                        r17=l2, r18=l2,
                        r19=issued, r20=cores, r21=cores, r22=cores, r23=l2)
Markdown(
    f"<details><summary>One counter for each change, before and after</summary>\n\n{moved}\n\n</details>"
)

# %% [markdown]
# ## How much did FA2's own ideas help?
#
# Rungs 00 to 05 follow the two papers. Rung 01 has the loops of FA1's *Algorithm 1 as printed, one worker per head*,
# and its tiles are 64 × 64, as on all rungs up to 16. S and P never reach DRAM, and yet this rung is much slower than
# standard attention, for two reasons. First, O, $\ell$ and m are now read from DRAM and written back for every tile.
# Rung 00 moves about $4N^2$ elements, whereas rung 01 moves about $N^2 (3d + 4) / B_c$, which is $6N^2$ for d = 128 and
# $B_c$ = 64. In bytes, that is 1.7 times as much. Second, it has only 64 programs for 132 SMs, and these transfer less
# than half as many bytes per second.

# %% tags=["hide-input"]
def dram(number):
    return sum(counts[ladder.find(number)][name] for name in roofline.DRAM) / 1e9


N, d, T = 4096, 128, 64  # T tiles in a row, and in a column
counted = {
    "00": 12 * N * N + 8 * N * d,  # S in 4 bytes and P in 2, written and read; Q, K, V and O once
    "01": T * N * (10 * d + 16) + 8 * N * d,  # Q; O, ℓ and m in 4 bytes, in and out
    "02": T * N * 4 * d + 4 * N * d,  # K and V
}
counted["03"] = counted["02"]
print("rung     counted, GB   DRAM moved, GB   TFLOP/s")
for number, moved in counted.items():
    rate = full.rate(ladder.find(number))
    print(f"{number}{64 * moved / 1e9:18.2f}{dram(number):17.2f}{rate:10.0f}")
for heads, row in ((64, full), (8, few)):
    old, new = (ladder.find(n) for n in ("02", "03"))
    predicted = reasons.predicted_speedup(old, new, causal=False, d=128, heads=heads)
    print(f"rung 03 over 02, {heads:2} heads: predicted × {predicted:.1f}, measured × "
          f"{row.ratio(new, old):.1f}")

# %% [markdown]
# For rungs 01 to 03, we count all bytes that the kernel requests. For rung 00, we count Q, K, V and O only once each.
# Its matmuls request Q, K and V more often (chapter 04), but L2 serves these further requests. In the first three
# lines, our count agrees with the bytes that the GPU's counter saw reach DRAM. Rung 02 swaps the loops, so that o,
# $\ell$ and m stay on the chip. Rung 03 gives each row block its own program, which speeds up the kernel more than any
# other change. The row blocks of a head run at the same time and read the same K and V, which take 2 MiB per head. The
# first row block that requests a tile brings it into L2, where the others find it.
#
# The model knows about SMs and programs, but it assumes that every byte comes from L2. With 8 heads, this is true of
# both rungs, because the K and V of all heads take only 16 MiB and fit into L2. With 64 heads, they take 128 MiB. Rung
# 02 works on all 64 heads at once, so their K and V do not fit, and the prediction misses the cost of reading them from
# DRAM.
#
# Rungs 04 and 05 together implement tweak 1, which divides only once, at the end. By chapter 04's count of operations,
# it can save at most 8% of the time. To see which part of the tweak helps, we split it in two. Rung 04 computes p
# against the new maximum but still divides in every tile, and it is no faster than rung 03. Rung 05 defers the
# division, and without a mask, it is 24% faster than rung 04.
#
# The reason is not the number of operations but the number of registers. Rungs 03 and 04 scale the result of PV before
# they add it to o, so this result needs 64 registers in addition to those of o. In rung 05, the tensor cores add PV
# directly to o, which saves 50 registers. An SM has 65,536 registers. If a program has 128 threads with r registers
# each (rounded up to a multiple of 8), then 65,536 / (128 r) programs fit, which is three if r is at most 168. Rung 05
# needs exactly 168. Under the mask, however, the kernel still needs 174 registers after the same change. That is
# slightly too many for a third program, so under the mask, rung 05 is no faster than rung 04.
#
# ## What is a third program worth?
#
# The launch argument `maxnreg=168` forces the compiler to use at most 168 registers, but it does not remove a single
# instruction:

# %%
for number, mask in (("05", True), ("03", False), ("09", False)):
    gain = answer(f"{number} at 168 registers", mask)
    print(f"rung {number}{', causal' * mask}, at 168 registers: × {gain:.2f}")

# %% [markdown]
# Now three programs fit, and the causal rung 05 speeds up by about as much as the tweak did without a mask. Rung 09
# also becomes faster, but rung 03 gains far less. At 168 registers, all three kernels spill, but rung 03 has 20 of its
# spills inside the loop, whereas the causal rung 05 has one there and rung 09 has none. So the first question about a
# change is not how much work it saves, but **how many programs fit onto an SM afterwards**.
#
# From rung 10 on, shared memory is a second limit. A tile of 64 × 128 two-byte numbers takes 16 KiB. One tile of Q and
# three stages, each with a tile of K and a tile of V, take 16 + 3 · 2 · 16 = 112 of an SM's 228 KiB. With the 1 KiB
# that the system reserves, these are 113 KiB per program, so only two programs fit, no matter how few registers they
# use.
#
# How much an extra program helps depends on the launch. To see this, we compare rungs 07 and 09. Rung 07 has one loop,
# which tests the mask in every tile. Rung 09 has two loops, and the one for the tiles without a mask tests nothing.
# Without a mask, rung 07 has three programs on an SM, while rung 09 has only two, because its second loop is a second
# copy of the code and takes more registers. The picture shows what the lost program costs for different numbers of
# heads:

# %% tags=["nbval-ignore-output"]
show("speedup_by_heads")

# %% [markdown]
# The bars show the measured speedups, and the shaded area shows what a model predicts. Wherever the shaded area jumps
# (apart from the small step between 2 and 3 heads), one of the two rungs needs one more wave. With three programs on
# each of 132 SMs, there are 396 slots, so the 384 programs of 6 heads take one wave. With two programs per SM, there
# are 264 slots, so the same programs take one full wave and a second one that is less than half full. With 8 heads,
# both rungs need two waves, but rung 09 gains, because 512 programs nearly fill 264 slots twice, whereas they fill 396
# slots once and leave most of the second wave empty. A speedup therefore depends on the change *and* on the shape.
#
# The model's predictions are too high for 8, 16 and 20 heads, and for 20 heads it even predicts a speedup where we
# measured a slowdown. The model assumes that all programs of a wave end at the same time and that each SM then takes as
# many new ones as fit. With 8 heads, the last 116 programs of rung 07 therefore share 39 SMs, three on each. If they
# spread over the SMs instead, as in chapter 06, the same clocks per tile put the model at 1.03 for 8 heads, which is
# much closer to the measurement (but at 0.72 for 6 heads, which is farther off). Real programs drift apart and probably
# spread in this way, but only the times of the individual programs could prove it.
#
# How much is an extra program worth? The model in the picture is also the one that predicted the speedup of rung
# 10 above. It follows a tile through the units of an SM, one after another. The units are the tensor cores, the issue
# slots, the exponential unit, and the path from L2 into shared memory (`path`). The path takes longer here than the 820
# clocks in the picture of the copies, because before rung 10 the data pass through registers, and the model's speed for
# this path is fitted to measurements. The model also adds a fixed `wait`, which does not get longer if programs share
# the SM. A program that is alone on the SM never finds a unit busy, so its clocks simply add up. If two programs share
# the SM, each of them sometimes finds a unit busy with the other program's tile and has to queue. A tile then takes
# longer, but two tiles are finished in this time, so we divide by 2. The next cell lists the clocks of one tile of rung
# 03 at each unit, and then the clocks per tile with one, two and three programs:

# %% tags=["hide-input"]
rung = reasons.model_input(ladder.find("03"), causal=False, d=128)
demands = model.unit_clocks(rung)
alone = model.STALL_CLOCKS + sum(demands.values())
two = model.STALL_CLOCKS + sum(D * (1 + D / alone) for D in demands.values())
print(", ".join(f"{unit} {D:.0f}" for unit, D in demands.items()),
      f"clocks; wait {model.STALL_CLOCKS}")
three = model.clocks_per_tile(rung, programs=3)  # by the same rule
print(f"rung 03: a tile costs {alone:.0f} clocks with one program")
print(f"         {two:.0f} / 2 = {two / 2:.0f} with two, {three / 3:.0f} with three")

# %% [markdown]
# In the model, a second program makes the SM more than 50% faster, and a third program makes it another fifth faster.
#
# <details><summary>Where the predictions come from: programs that queue at the units of an SM</summary>
#
# On the Triton rungs, a program is a *warpgroup*, which is four warps with 64 rows. It takes each tile through the
# units of its SM, one after another. These units are the path from L2 into shared memory (`path` above), the tensor
# cores, the *issue slots* (each of the SM's four schedulers starts one instruction per clock), and the exponential
# unit. In addition, the program waits for $w$ clocks, and this wait does not get longer if other programs share the SM.
# A program that is alone on its SM takes $T_1 = w + \sum_u D_u$ clocks for a tile, and it spends $D_u$ of them at unit
# $u$.
#
# A second program on the SM does the same, so the two have to queue. On rung 03, a program spends 1,111 of its 2,753
# clocks on the path. A program that arrives there therefore meets the other one with probability 0.40, and then has to
# wait for it. We count the full 1,111 clocks for this wait, and not just half of them. This assumes that the times at a
# unit vary a lot, and that a visit which has already lasted for a while is expected to last as long again as a new one.
# So on average, the path takes 1.40 · 1,111 clocks.
#
# $$\begin{aligned} T_2 &= w + \sum_u D_u \left(1 + \frac{D_u}{T_1}\right) \\
# T_3 &= w + \sum_u D_u \left(1 + 2\,\frac{D_u (1 + D_u / T_1)}{T_2}\right) \end{aligned}$$
#
# In $T_2$ clocks, each of the two programs finishes a tile, so a tile costs $T_2 / 2$. A third program meets two
# others, each of which spends $D_u (1 + D_u / T_1)$ of its $T_2$ clocks at unit $u$, and so on. This method is called
# *mean-value analysis*.
#
# The $D_u$ follow from the data sheet and the compiled loop. Two numbers, $w$ and the speed of the path from L2, are
# fitted to rungs 07 and 09. From rung 10 on, copies run ahead, so the path from L2 drops out of the sum, and $w$ is
# fitted again, to rungs 11 to 16. For those rungs, *predicted* therefore means fitted.
# </details>
#
# <details><summary>Rungs 06 to 09: can saving work make a kernel slower?</summary>
#
# Rung 06 folds the scale and $\log_2 e$ into one FMA, and drops the guard that `exp` has for *denormals*, which are
# results too small for a normal float32. Rung 07 skips the tiles above the diagonal. Rung 08 tests the mask only in
# tiles that the diagonal cuts, and uses a second loop for the others. Rung 09 removes the condition from that loop's
# loads. In the first of the two tables under "The whole ladder on one screen", the column *per SM* gives the number of
# programs, without a mask and with it.
#
# - Rung 06, causal: a third program now fits, which helps more than the saved instructions do.
# - Rung 07, causal: half of the tiles are gone, but so is the third program. The kernel is therefore only 1.51 times as
#   fast, not twice as fast.
# - Rung 08, no mask: the second loop is a second copy of the code. It takes more registers, so the third program no
#   longer fits. As a result, a change that saves work makes the kernel slower.
# </details>
#
# ## What does the order of the row blocks do?
#
# Rungs 12 and 13, which still run on every GPU, change the order of the row blocks.
#
# **Predict.** Rung 12 first launches the heaviest row block of every head, then the next heaviest of every head, and so
# on. Without a mask, all row blocks are equally heavy. What happens to the speed then, with 64 heads?
#
# - ☐ it stays the same, because the order of equal blocks does not matter
# - ☐ it falls
# - ☐ it rises, because more SMs are busy at the end of the launch
#
# <details><summary>Answer</summary>
#
# **it falls.** 264 programs run at the same time. In rung 11, these are row blocks of about four heads, and they find
# the K and V of those heads in L2. In rung 12, they are row blocks of all 64 heads, whose K and V do not fit into L2.
# The folded table of counters above shows that the GPU therefore reads twelve times as many bytes from DRAM as it does
# for rung 11. The programs hardly wait for these bytes, but reading them takes power, so the clock falls (the section
# "When is the chip the limit?" below explains why). With the causal mask, the heavy blocks no longer run last, and with
# 64 heads, this gain is just enough to make up for the lower clock. With only 8 heads, the K and V of all heads fit
# into L2, so they need not be read from DRAM again and again, and rung 12 is much faster:
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
#
# <details><summary>Rungs 13 to 23: groups of heads, then what only Hopper has</summary>
#
# [Chapter 12a](12a_hopper_rungs.ipynb) builds rungs 15 to 23. Here we only list what they change.
#
# - Rung 13 takes the heads in groups whose keys fit into L2. As a result, the GPU reads only 1.5 times as many bytes
#   from DRAM as for rung 11, instead of twelve times as many.
# - Rung 14 lets Hopper's copy engine fetch whole tiles, so threads no longer compute addresses. Rung 15 is rung 14
#   written in Gluon, where the program itself starts each copy. Rung 16 gives the copies their own warp.
# - On rung 17, 128 rows instead of 64 share each tile of K and V. The copies already ran far enough ahead, so, as the
#   model predicts, loading fewer bytes does not make the kernel faster. Rung 18 has tiles of 128 keys and therefore
#   half as many tiles. Since waits, maxima and barriers occur once per tile, it has half as many of these as well.
# - From rung 20 on, a warpgroup has two matmuls under way at the same time, so the queueing model no longer applies.
#   Only the limit $1/a$ from the question above is still valid.
# </details>
#
# ## Is DRAM the limit?

# %% tags=["nbval-ignore-output"]
show("roofline")

# %% [markdown]
# This is the roofline of chapter 04, with two differences. It only counts bytes that reach DRAM, and its two limits are
# measured, with a large copy and a large matmul (GEMM). Rungs 00 to 02 are to the left of the ridge point, where the
# two limits meet. Rungs 01 and 02 are also far below the slope, because their 64 programs cannot request enough bytes
# per second. From rung 03 on, all rungs are to the right of the ridge point, although rung 12 (which is not drawn) is
# only just to the right. For all these rungs, DRAM is no longer the limit. What matters is what the tensor cores wait
# for, as in the two rounds above.
#
# ## When is the chip the limit?
#
# The GPU is allowed to draw 700 W, but single readings can be slightly higher. A GPU lowers its clock when it would
# otherwise draw too much power, which is called *throttling*. While each rung ran without pauses between the calls, we
# read the GPU's clock and its power draw with `nvidia-smi`:

# %% tags=["hide-input"]
chip = {name: reasons.clock_and_power(record, name) for name in ladder.RUNGS}
groups = {"01, 02": [1, 2], "03, 04, 08, 09": [3, 4, 8, 9],
          "05 to 07, 10 to 23": [5, 6, 7, *range(10, 24)], "00": [0]}
print("rungs                  clock, GHz         power, W")
for words, numbers in groups.items():
    for_each = zip(*(chip[ladder.RUNGS[n]] for n in numbers), strict=True)
    print(f"{words:18}" + "".join(f"{min(x):9.{digits}f} to {max(x):.{digits}f}"
                                  for x, digits in zip(for_each, (3, 0), strict=True)))
for n in (5, 9):
    clock, watts = chip[ladder.RUNGS[n]]
    print(f"rung {n:02} alone{clock:15.3f}{watts:18.0f}")

# %% [markdown]
# The full clock is 1.98 GHz. Rungs 01 to 04, 08 and 09 run at most 1% below it, whereas the clock is clearly lower for
# rung 00, rungs 05 to 07 and rungs 10 to 23. All rungs with a lower clock draw 678 W or more, so the power limit is the
# likely reason. The readings do not prove this, however, because rungs 03, 04, 08 and 09 draw nearly as much at the
# full clock. For example, rung 05 runs at a lower clock than rung 09 although it draws 10 W less. All speedups that we
# have seen so far are from runs with pauses, in which the clock also falls, but not as far.
#
# **Predict.** With pauses, rung 17 is 0.98 times as fast as rung 16, although it loads only half as many bytes from L2.
# How do the two compare without pauses?
#
# - ☐ rung 17 is faster, because moving bytes costs power
# - ☐ rung 17 is slower by the same factor, because bytes were not the limit
# - ☐ rung 17 is slower still, because the clock falls
#
# <details><summary>Answer</summary>
#
# **rung 17 is faster, because moving bytes costs power.** Rung 17 takes more cycles than rung 16 but is still faster.
# At the power limit, every byte that a kernel does not move leaves more power for the computation, so the clock can be
# higher.
#
# ```python
# old, new = pair("17")
# clocks = " → ".join(f"{reasons.clock_and_power(record, name)[0]:.2f}" for name in (old, new))
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


print("rung   gain in cycles   in time   tensor cores   L2, GB   without a pause: gain, GHz, W")
for old, new in pairwise(ladder.RUNGS[10:]):
    gains = f"{in_cycles(old, new):14.2f}{full.ratio(new, old):13.2f}"
    bytes_moved = f"{counts[new][cores]:13.0f}%{counts[new][l2] / 1e9:11.1f}{steady.ratio(new, old):22.2f}"
    print(f"{new[1:3]}{gains}{bytes_moved}, {chip[new][0]:.2f}, {chip[new][1]:.0f}")
first, last = ladder.find("17"), ladder.RUNGS[-1]

# %% [markdown]
# The table compares each rung with the previous one. A gain of 1.16 means that the rung is 1.16 times as fast, measured
# either in clock cycles or in time. If a rung takes fewer cycles but hardly less time, its speed is limited by the chip
# and not by the program. To make it faster, you then have to reduce the power that it draws, for example by moving
# fewer bytes. Rung 12 shows what moving bytes costs. It moves more bytes than rung 11 but takes just as many cycles, so
# it is slower only because its clock is lower. Rung 20 is 1.23 times as fast as rung 19 in cycles, but only 1.16 times
# as fast in time. Without pauses, the clock falls further, so the speedup shrinks to 1.12. Rung 23 moves fewer bytes
# than rung 22, and its clock is no lower.
#
# ## Where do we stand?
#
# Each row of the picture compares the package's `attention()`, which the picture calls `fa2_lab`, with up to five other
# implementations in one setting. The paper's grid consists of the settings in which the FA2 paper measures speed, with
# 16,384 tokens per call and a *hidden size* (heads · d) of 2,048. `torch flash` is FlashAttention-2 inside PyTorch,
# `cuDNN` is NVIDIA's library, and FlexAttention is PyTorch's compiled attention. *Sustained* means that there are no
# pauses between the calls. Windows, softcaps and sinks change the mask or the softmax (chapter 16), and packed
# sequences are several sequences in one call. Each number after a mark is the median over the row's problems. The three
# fastest, which are FlashAttention-3, FlashAttention-4 and cuDNN, each have a bar that shows the range of the ratios,
# and beside the median, the picture counts the problems on which `fa2_lab` is slower. For FlexAttention and `torch
# flash`, the row has only the medians. Not every implementation was measured in every setting. In the rows *with host
# time*, the host's time counts as well:

# %% tags=["nbval-ignore-output"]
show("ratios")

# %% [markdown]
# Most of the problems on which `fa2_lab` is slower are in the rows with host time, because our host code takes longer
# than cuDNN's for a short call. FlashAttention-4 is ahead of `fa2_lab` by about 2% in the backward pass of a single long
# sequence, and in the backward pass of most random shapes with d = 96, where three of the five matmuls in our step pad
# 96 columns to 128.
#
# ## Recap
#
# - One round consists of a hypothesis, three numbers from `ncu` (units, occupancy, stalls), the instructions behind the
#   longest stall, one change, and a new measurement. When one wait disappears, another one can take its place.
# - Prefetching hides latency. With enough stages, a step takes only as long as the work, provided that the path from L2
#   can deliver tiles at that pace.
# - Overlapping a copy or a matmul with the warps' other work helps more than saving an instruction. To find out whether
#   they really overlap, count the waits in the listing.
# - Giving each row block its own program brings the largest speedup, because it fills the GPU and lets the programs
#   find K and V in L2. The number of programs per SM matters as well, and it is limited by registers and, from rung 10
#   on, also by shared memory. How much an extra program helps depends on the waves.
# - In the end, the chip lowers its clock. From then on, a kernel that takes fewer cycles does not always take less
#   time.
#
# ## Exercises
#
# On Hopper at d = 64, the tensor cores and the exponential unit are almost equally busy, and the issue slots are not
# far behind. For a tile of 64 × 128, they need the following numbers of clocks:

# %% tags=["hide-input"]
on = model.unit_clocks(reasons.model_input(last, causal=False, d=64))
print(f"H200: tensor cores {on['tensor']:.0f} clocks, exponential unit {on['exp']:.0f}, issue "
      f"slots {on['issue']:.0f}")

# %% [markdown]
# The FMA units could take over a part $f$ of the exponentials. To do so, write $2^x = 2^n \cdot 2^r$ with $n = \lfloor
# x \rfloor$ and $0 \le r < 1$. A cubic polynomial approximates $2^r$, and $n$ becomes the exponent. This takes 9
# ordinary instructions instead of one special one. Each of the 128 threads computes 64 exponentials per tile. If all
# threads hand one of these 64 over to the FMA units, the exponential unit saves 128 / 16 = 8 clocks per tile, because
# it computes 16 per clock. In exchange, the issue slots lose 8 clocks, because each of the four schedulers issues 8
# more instructions for its warp.
#
# **Predict.** With $f = 1/8$, the busiest unit needs 3% fewer clocks. We have built this kernel. How does its speed
# change on an H200?
#
# - ☐ it rises by about 3%
# - ☐ it rises by more, because all warps were waiting for the exponential unit
# - ☐ it stays the same or falls
#
# <details><summary>Answer</summary>
#
# **it stays the same or falls.** In the model of the busiest unit, all three units overlap perfectly. In the real
# kernel, they do not, so 64 more instructions per tile can cost more time than they save. This is the likely reason,
# but we have not proven it. If the FMA units take over a quarter of the exponentials, the issue slots become the
# busiest unit even in the model. (The code counts 64 / 66 because each thread also computes two exponentials for α.) On
# a B200, the tensor cores take half as long, so the same change could help more. If you build this yourself, it can go
# wrong without an error message, as the comment at the top of [the
# file](../fa2_lab/kernels/ladder/x23_software_exp2.py) explains.
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
fold = ["<details><summary>All experiments: a rung launched in another way, what we expected, "
        "and what we measured</summary>", ""]
Markdown("\n".join([*fold, *experiments.table(record), "", "</details>"]))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("rungs 09 to 11: more than 1.5 times as fast; predicted 1.66; barrier stalls rise, "
        "then fall to a third",
        full.ratio(*pair("10")[::-1]) * factor("11", full) > 1.5
        and round(reasons.predicted_speedup(*pair("10"), causal=False, d=128), 2) == 1.66
        and count("10", "stall: barrier") > 2 * count("09", "stall: barrier")
        and count("11", "stall: barrier") < 0.34 * count("10", "stall: barrier"))
verdict("rung 09 waits most for data, and no unit is at its limit",
        max((x for x in counts[pair("10")[0]] if "stall" in x), key=counts[pair("10")[0]].get)
        == "stall: long_scoreboard" and count("09", cores) < 36 and count("09", issued) < 28)
verdict("rung 10: gmma 0.16", count("10", "stall: gmma") == 0.16)
verdict("waits for matmuls: 2, 12 and 1 per tile",
        [held(n, what="waits") for n in ("09", "10", "11")] == [2, 12, 1])
steps = [order(number) for number in ("10", "11")]
verdict("between the first loop and the wait, ordinary instructions write o in rung 10, but "
        "not in rung 11",
        ["    o = 0, by 64 ordinary instructions" in x[x.index("    the loop ends") :]
         for x in steps] == [True, False])
picture, costs = prefetch.data()["panels"], rung_timeline.rung_costs("10")
verdict("the picture: copies of 820 clocks, work of 917; 1,805 clocks with one stage, 1,019 "
        "with three",
        [round(x["clocks"]) for x in picture] == [1805, 1019]
        and (round(2 * costs.copy), round(2 * costs.product + costs.softmax)) == (820, 917))
verdict("the tensor cores work 54% of rung 11, so at most × 1.84",
        (round(count("11", cores)), round(100 / count("11", cores), 2)) == (54, 1.84))
verdict("rung 05 gains 24%, rung 07 under the mask × 1.51",
        (round(factor("05", full), 2), round(factor("07", causal), 2)) == (1.24, 1.51))
verdict("the queues by hand = the package's model",
        close([alone, two], [model.clocks_per_tile(rung, n) for n in (1, 2)], 1e-3))
points, ceilings = roofline.data()["points"], record.ceilings
left = [points[ladder.find(n)][0] < ceilings["GEMM TFLOP/s"] / ceilings["copy TB/s"]
        for n in ("00", "01", "02", "03")]
verdict("rungs 00 to 02 are to the left of the ridge point, 03 to the right",
        left == [True, True, True, False])
verdict("rungs 00 to 02: DRAM moves what the formula requests; rung 03: a small part of it",
        all(abs(dram(n) / counted[n] * 1e9 / 64 - 1) < 0.05 for n in ("00", "01", "02"))
        and dram("03") < 64 * counted["03"] / 20e9)
verdict("rung 01 is much slower than rung 00; rung 03 gains most", factor("01", full) < 0.5
        and max(ladder.RUNGS[1:], key=lambda r: factor(r[1:3], full)) == ladder.find("03"))
lacks = [factor("03", row) / reasons.predicted_speedup(*pair("03"), causal=False, d=128, heads=n)
         for n, row in ((64, full), (8, few))]
verdict("with 64 heads the model misses the cost of DRAM, with 8 it is right to within a fifth",
        lacks[0] > 1.1 and abs(lacks[1] - 1) < 0.2)

verdict("rung 04 gains nothing; rung 05 gains more than the 8% of chapter 04, but nothing "
        "under the mask",
        abs(factor("04", full) - 1) < 0.05 and factor("05", full) > 1.1
        and factor("05", causal) < 1.06)
verdict("programs: 2, 3 without a mask; 2, 2, 3 with one, where rung 06 gains more",
        [held("04"), held("05")] == [2, 3]
        and [held(n, True) for n in ("04", "05", "06")] == [2, 2, 3]
        and factor("06", causal) > factor("06", full) + 0.1)
verdict("rung 08: one program fewer without a mask, and it loses", held("08") < held("07")
        and factor("08", full) < 0.95)
tooth, line = speedup_by_heads.data()["measured"], speedup_by_heads.data()["model"]
verdict("rung 09 over 07: a gain with 8 heads, a loss with 6 and with 20, although the model "
        "predicts a gain with 20", max(tooth[6], tooth[20]) < 1 < min(tooth[8], line[20]))
seventh, ninth = (reasons.model_input(ladder.find(n), causal=False, d=128) for n in ("07", "09"))
spread = [
    (model.clocks_per_tile(seventh, 3) + second * model.clocks_per_tile(seventh, 1))
    / (model.clocks_per_tile(ninth, 2) + model.clocks_per_tile(ninth, 2 if second else 1))
    for second in (1, 0)
]
verdict("with a last wave that spreads over the SMs: 1.03 for 8 heads, 0.72 for 6",
        [round(x, 2) for x in spread] == [1.03, 0.72])
verdict("at 168 registers, causal 05 and 09 gain about a tenth or more, 03 less",
        min(answer("05 at 168 registers", True),
            answer("09 at 168 registers")) > 1.08 > answer("03 at 168 registers") > 1)
verdict("with one stage, the order of the loops gains nothing without a mask",
        abs(answer("11 with one stage") - 1) < 0.04)
verdict("software exponentials gain nothing",
        max(answer("23 with software exponentials", x, 64) for x in (False, True)) < 1.02)
waited = "stall: long_scoreboard"
verdict("rung 10 waits less for data", count("10", waited) < 0.6 * count("09", waited))
verdict("rung 11: far fewer waits per tile, and a gain",
        held("11", what="waits") < held("10", what="waits") / 3
        and min(factor("11", full), factor("11", causal)) > 1.04)
verdict("64 heads: rung 01 moves 1.7 times the bytes of rung 00, and less than half as many "
        "per second",
        1.6 < dram("01") / dram("00") < 1.75 and factor("01", full) * dram("01") / dram("00") < 0.5)
verdict("shared memory holds two programs from rung 10 on, up to rung 16",
        all(227 * 1024 // held(n, what="shared") == 2
            for n in ("10", "11", "12", "13", "14", "15", "16")))
verdict("without pauses, rung 17 gains, with a higher clock", steady.ratio(*pair("17")[::-1]) > 1.02
        and chip[ladder.find("17")][0] > chip[ladder.find("16")][0] + 0.1
        and factor("17", full) < 1)
near_full = ("01", "02", "03", "04", "08", "09")
clocks, watts = ({name[1:3]: chip[name][k] for name in ladder.RUNGS} for k in (0, 1))
slow = [name for name in clocks if name not in near_full]
verdict("rungs 01 to 04, 08 and 09 run at most 1% below 1.98 GHz, and all others are clearly "
        "lower and draw 678 W or more",
        min(clocks[n] for n in near_full) > 0.99 * 1.98
        and max(clocks[n] for n in slow) < 0.95 * 1.98
        and round(min(watts[n] for n in slow)) == 678)
verdict("rungs 03, 04, 08 and 09 draw nearly as much at the full clock",
        min(watts[n] for n in near_full[2:]) > 670)
verdict("rung 05 runs at a lower clock than rung 09 and draws 10 W less",
        clocks["05"] < clocks["09"]
        and round(watts["09"]) - round(watts["05"]) == 10)
verdict("rung 12 loses: as many cycles as rung 11, more bytes, a lower clock",
        abs(in_cycles(*pair("12")) - 1) < 0.04 and factor("12", full) < 0.95
        and count("12", l2) > 1.3 * count("11", l2)
        and chip[ladder.find("12")][0] < chip[ladder.find("11")][0] - 0.1)
verdict("rung 17 nearly halves the bytes from L2 and gains little; 18 does not change them, "
        "and gains more",
        count("17", l2) < 0.65 * count("16", l2)
        and factor("17", full) < 1.05 < factor("18", full) - 0.03)
verdict("since rung 17, rung 23 gains more in cycles than in time, at rung 22's clock, which "
        "is below rung 03's",
        count("23", cores) > 75 and chip[last][0] < chip[ladder.find("03")][0] - 0.05
        and chip[last][0] > 0.98 * chip[ladder.find("22")][0]
        and in_cycles(first, last) > full.ratio(last, first))

# %% [markdown] tags=["navigation"]
# [← The Triton backward kernels](09_triton_backward.ipynb) · [The map](00_start.ipynb) · [The workshop →](11_workshop.ipynb)
