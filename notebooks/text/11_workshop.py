# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, machine and rungs →](12a_hopper_rungs.ipynb)

# %% [markdown]
# # 11 · The workshop
#
# **What does a GPU programmer do all day?**
#
# Chapter 10 got from rung 09 to rung 11 in two rounds. Each round consisted of a hypothesis, three numbers from `ncu`,
# the instructions behind the longest stall, one change, and a new measurement. This chapter continues with a third
# round on the same kernel, because so far, we have timed the last change at only one d. The rest of the chapter
# introduces the tools that you can use on your own file. They show you what the compiler has made of your kernel and
# when its warps wait. You also learn how to search for the fastest launch options, and what to do if the result is
# wrong.
#
# After this notebook you can
#
# - compute how many programs fit onto an SM, and use this number to predict whether a launch option makes the kernel
#   faster or slower,
# - compile your own file for a GPU that you do not have, and read what the compiler made of it,
# - decide which tool answers which question about a slow kernel,
# - search for the fastest launch options without fooling yourself,
# - track down a wrong result, or an access outside a tensor.
#
# *Time: 60 minutes. Hardware: any laptop with Linux; whatever needs a GPU is marked. Before this: [07 ·
# Warps](07_warps.ipynb), [08 · The Triton forward kernel](08_triton_forward.ipynb) and [10 · The ladder,
# measured](10_ladder.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import fa2_lab.kernels  # first: without a GPU it switches Triton's interpreter on
from fa2_lab.kernels import ladder
from fa2_lab.machine.budget import blocks_per_sm
from fa2_lab.machine.chips import H200
from fa2_lab.records import load
from fa2_lab.tools import files
from fa2_lab.tools.xray import loops, xray, xray_launches
from fa2_studio.bench import experiments
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"
record = load("ladder")


def faster(heads, d, causal=False):  # rung 11 over rung 10 in one of the recorded shapes
    shape = dict(batch=4 if heads > 8 else 1, heads=heads // 4 if heads > 8 else heads, d=d,
                 causal=causal)
    row = next(r for r in record.rows if r.direction == "forward"
               and shape.items() <= r.problem.items())
    return row.ratio(ladder.find("11"), ladder.find("10"))

# %% tags=["hide-input"]
# Setup: run this cell as well.
import triton
import triton.language as tl

# %% [markdown]
# ## Does rung 11 gain as much at d = 64?
#
# Rung 11 is rung 10 with its two loops in the opposite order. In chapter 10, this change removed all waits but one from
# each loop and made the kernel about a quarter faster. Those results, however, are for d = 128.
#
# **Predict.** If the heads have d = 64, $QK^\top$ takes 4 tensor-core instructions per tile instead of 8. $PV$ still
# takes 4, because it sums over the same 64 keys. Rung 10 again waits after every one of them, so there are 8 waits per
# tile instead of 12. What does the exchange of the loops do at d = 64, without a mask?
#
# - ☐ it makes the kernel slower
# - ☐ it makes the kernel faster by about as much as at d = 128
# - ☐ it makes the kernel faster, but by less, because there are fewer waits to remove
#
# <details><summary>Answer</summary>
#
# **it makes the kernel slower.** With many heads, the kernel becomes slightly slower, and with few heads, it becomes
# much slower:
#
# ```python
# for d, heads in ((128, 64), (64, 128), (64, 8)):
#     print(f"d = {d:3}, {heads:3} heads: rung 11 is {faster(heads, d):.2f} times as fast as rung 10")
# ```
#
# ```text
# d = 128,  64 heads: rung 11 is 1.26 times as fast as rung 10
# d =  64, 128 heads: rung 11 is 0.98 times as fast as rung 10
# d =  64,   8 heads: rung 11 is 0.88 times as fast as rung 10
# ```
# </details>
#
# So a change that was right at d = 128 makes the kernel slower at d = 64. `ncu` could show us the stalls, as in chapter
# 10, but we can ask the compiler first, and that works even without a GPU. `fa2-lab xray 10 --full --d 64` shows what
# the compiler made of rung 10, and `fa2-lab xray 11 --full --d 64` shows what it made of rung 11.

# %%
rungs = {number: xray(number, d=64, causal=False)[0] for number in ("10", "11")}

# %% tags=["nbval-ignore-output", "hide-input"]
print("          waits in a loop   registers per thread   spills   shared memory, KiB")
for number, kernel in rungs.items():
    n, waits = kernel.numbers, loops(kernel.stages["sass"])[-1].waits
    print(f"rung {number}{waits:18}{n['registers']:23}{n['spills']:9}{n['shared'] / 1024:21.0f}")

# %% [markdown]
# The new loop order did what it was supposed to do, because at d = 64, too, only one wait is left in the loop. The only
# other difference in the table is that rung 11 needs two more registers. Can two registers cost so much time?
#
# **Build.** Return the number of programs that fit onto an SM at the same time. An SM of an H200 has 65,536 registers,
# 228 KiB of shared memory and slots for 64 warps, and it runs at most 32 programs. Threads get their registers in steps
# of 8. In addition to the shared memory that the kernel asks for, the system reserves 1 KiB for each program.

# %%
# registers of one thread, bytes and warps of one program
def programs(registers, shared, warps):
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
KIB = 1024
cases = {
    "128 registers, 4 warps. Do you count the registers of all threads, 32 in a warp?":
        (128, 8 * KIB, 4),
    "56 KiB of shared memory. Does shared memory limit them as well?": (64, 56 * KIB, 4),
    "no shared memory, 16 registers, 8 warps. How many slots for warps are there?": (16, 0, 8),
    "169 registers, 4 warps. What is 169 in steps of 8, rounded up?": (169, 48 * KIB, 4),
    "75.5 KiB. Is the system's 1 KiB counted for every program?": (32, 75 * KIB + 512, 4),
    "one warp, 16 registers. What else limits their number?": (16, 0, 1),
}
check(programs, *(Case(words, case, blocks_per_sm(H200, case[1], case[0], case[2]))
                  for words, case in cases.items()))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def programs(registers, shared, warps):
#     of_a_thread = -(-registers // 8) * 8  # in steps of 8
#     by_registers = 65536 // (of_a_thread * 32 * warps)
#     by_shared = 228 * 1024 // (shared + 1024)
#     by_warps = 64 // warps
#     return min(by_registers, by_shared, by_warps, 32)
# ```
# </details>
#
# With 128 registers per thread, four programs of 128 threads take 4 · 128 · 128 registers, which is exactly the 65,536
# that an SM has. For rung 11, 130 registers are rounded up to 136, so only three programs fit. Rung 11 therefore has
# fewer waits, but each SM also holds one fewer program that could work during the remaining waits. With 8 heads, the
# waves from chapter 06 make this worse. There are 512 programs, which can all run at once if each SM holds four,
# because 132 SMs then have 528 slots. With three per SM, there are only 396 slots, so a second wave is needed.
#
# The launch option `maxnreg` limits the number of registers per thread, so it can make room for the fourth program
# again. We test this on rung 11, and also on rung 13, which is rung 11 with the heads in groups (chapter 10). Rung 13
# needs 134 registers at d = 64, so three programs fit, and it has the same problem.
#
# **Hypothesis.** If a limit of 128 registers makes room for the fourth program, both rungs become faster. The limit can
# also cost time, because values that no longer fit into registers are *spilled* to memory. We therefore look at the
# spills of both rungs before we time anything:

# %%
limits = {}
for number in ("11", "13"):
    (plain,), (limited,) = xray_launches(number, [{}, dict(maxnreg=128)], d=64, causal=False)
    limits[number] = limited.numbers
    print(f"rung {number}: {plain.numbers['registers']} registers, at most 128: "
          f"{limited.numbers['spills']} spills")

# %% tags=["nbval-ignore-output", "hide-input"]
for number in ("11", "13"):
    gain = experiments.ratio(record, f"{number} at 128 registers", 64, causal=False, heads=128)
    if gain:
        print(f"measured at d = 64 on an H200: rung {number} with maxnreg=128 is {gain:.2f} "
              "times as fast as without")

# %% [markdown]
# The hypothesis holds. In rung 13, the limit costs a few spills, but the fourth program is worth more. In rung 11, the
# compiler gets by with two fewer registers and without a single spill, and the fourth program is worth about as much.
#
# Two lessons from this round are worth keeping. First, a measurement is only valid for the shape at which it was made,
# so repeat it for every shape that you care about. Second, the number of programs changes in steps, so using a few more
# registers can have no effect at all, or a large one.
#
# ## Which tools work on your own file?
#
# In the next sections, we work with one file, `mine.py`. It has a function `forward(q, k, v, causal)`, and its last
# lines call that function, so that a profiler has something to observe. If there is no `mine.py` next to this notebook,
# the next cell creates one from rung 11 by replacing that rung's own last lines. That kernel has 64 × 64 tiles, 4 warps
# and 3 stages. You can also use your own kernel from [assignment 4](assignments/4_triton_forward.ipynb).

# %%
CALL = """
if __name__ == "__main__":
    q, k, v = torch.randn(3, 4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        forward(q, k, v, False)
    torch.cuda.synchronize()
"""
mine = Path("mine.py")
if not mine.exists():
    rung = (ladder.FOLDER / f"{ladder.find('11')}.py").read_text(encoding="utf-8")
    _ = mine.write_text(rung.split("\n\nif __name__")[0] + CALL, encoding="utf-8")

# %% [markdown]
# The table is for reference. Only the commands with *no* in the last column work without a GPU. The rest of the chapter
# shows what `xray` and the interpreter print.
#
# | you want to know | the command | GPU |
# | --- | --- | --- |
# | registers, spills, shared memory, layouts | `fa2-lab xray mine.py --full` | no |
# | the kernel's instructions | `fa2-lab xray mine.py --full --sass` | no |
# | how long each kernel takes | `nsys profile -o mine python mine.py; nsys stats -r cuda_gpu_kern_sum mine.nsys-rep` | yes |
# | what limits the kernel, and what its warps wait for | `ncu -k regex:forward -s 2 -c 1 --set full python mine.py` | yes |
# | how long each kernel takes, without NVIDIA's tools | `proton -n mine mine.py; proton-viewer -m time/ms mine.hatchet` | yes |
# | whether the kernel accesses anything outside a tensor | `PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python mine.py` | yes |
# | whether the kernel has a race in shared memory (not for kernels with the barriers of chapter 12a) | `compute-sanitizer --tool racecheck python mine.py` | yes |
# | the value of a variable | `TRITON_INTERPRET=1 python mine.py`, with a `breakpoint()`, q, k, v on the CPU, no `synchronize`, a small N and one head | no |
#
# If the kernel is slow, begin with `xray`. Continue with `nsys`, which times whole kernels, and then with `ncu`, whose
# output you read as in chapter 10. If `ncu` reports `ERR_NVGPUCTRPERM`, the machine's owner has to allow access to the
# counters. Proton is Triton's own profiler. If the kernel's result is wrong, begin with the last row of the table.
# `xray` compiles for an H200 and the causal mask unless you set `--chip` or `--full`.
#
# ## What does the compiler make of a launch option?
#
# We compile `mine.py` at d = 128 with four different sets of launch options. Before you read the last column of the
# table, compute it with your `programs`.

# %%
LAUNCHES = {
    "as it is": {},
    "num_stages=1": dict(num_stages=1),
    "num_warps=8": dict(num_warps=8),
    "maxnreg=128": dict(maxnreg=128),
}
compiled = xray_launches(str(mine), list(LAUNCHES.values()), "sm_90", causal=False)
kernels = dict(zip(LAUNCHES, (kernel for (kernel,) in compiled), strict=True))

# %% tags=["nbval-ignore-output", "hide-input"]
print(f"{'':14}{'registers':>10}{'spills':>8}{'shared KiB':>12}{'programs on an SM':>20}")
for launch, kernel in kernels.items():
    n = kernel.numbers
    fit = blocks_per_sm(H200, n["shared"], n["registers"], n["warps"])
    print(f"{launch:14}{n['registers']:10}{n['spills']:8}{n['shared'] / 1024:12.0f}{fit:20}")

# %% [markdown]
# - **Stages.** A tile of 64 × 128 two-byte values takes 16 KiB. With one stage, shared memory holds one tile each of Q,
#   K and V, 48 KiB in all. With three stages, it holds one tile of Q, three of K and three of V, 112 KiB in all. More
#   stages do not take more registers, because the copies go straight to shared memory. They even take fewer here,
#   probably because with one stage, the tiles pass through registers (`LDG` and `STS` in chapter 10).
# - **maxnreg.** With at most 128 registers, some of a thread's values do not fit. The *spills* column counts the
#   instructions that store these values to memory and load them back.
# - **Programs.** With the default options, the registers would allow 3 programs, but shared memory has room for only 2.
#   `maxnreg=128` frees enough registers for 4 programs. At d = 64, the same option made room for the fourth program,
#   but here it does not, because shared memory is still the limit. It only costs the 51 spills.
#
# So before you change an option, find out which of the limits is the lowest, because that limit is the only one worth
# raising.
#
# ## What do eight warps do?
#
# On Hopper (H100, H200), four warps start a tensor-core matmul together. Such a matmul has 64 rows, 16 for each warp,
# which is just right for the 64 × 64 scores of a tile in `mine.py`.
#
# **Predict.** How do eight warps share $S = QK^\top$?
#
# - ☐ each takes half as many rows
# - ☐ four of the warps repeat what the other four compute
# - ☐ four of the warps take the left half of the keys, and four take the right half
#
# <details><summary>Answer</summary>
#
# **four of the warps repeat what the other four compute.** The layout of S is `warpsPerCTA = [8, 1]`, where CTA is
# NVIDIA's word for a thread block. This layout stacks all eight warps on top of each other, which would take 128 rows.
# Since the tile has only 64 rows, each row is computed twice, and so is each exponential. For $PV$, the compiler chose
# `[4, 2]`, in which one group of four warps computes one half of O's d columns, and the other group computes the other
# half. (The code below counts both loops, with 32 exponentials for scores and 2 for α per thread and loop, or
# 2 · 34 · 128 = 8,704 in the first line.) The table above already contained a clue. With twice the number of warps,
# each thread should need about half of the 168 registers, but it still needs 138.
#
# ```python
# rows = {name: kernels[name] for name in ("as it is", "num_warps=8")}
# for name, kernel in rows.items():
#     mma = [x for x in kernel.layouts.values() if "nvidia_mma" in x]
#     warps = [re.search(r"warpsPerCTA = (\[.*?\])", x)[1] for x in mma]
#     all_threads = kernel.numbers["exponential"] * 32 * kernel.numbers["warps"]
#     print(f"{name:12} S {warps[0]}, P V {warps[1]};", end=" ")
#     print(f"exponentials in the code: {all_threads:,}")
# ```
#
# ```text
# as it is     S [4, 1], P V [4, 1]; exponentials in the code: 8,704
# num_warps=8  S [8, 1], P V [4, 2]; exponentials in the code: 17,408
# ```
# </details>

# %% [markdown]
# A Triton kernel does not specify its layouts, but the size of its tiles decides which layouts the compiler chooses.
# Here, it helps to make the tiles large enough for all warps. With 128 rows, `[8, 1]` is simply split-Q, as in
# chapter 07.
#
# <details><summary>On an A100 or an RTX 4090, the tile decides even whether four warps share S by rows</summary>
#
# On these chips, each warp runs its own matmuls, so the warps of a program can also be placed side by side, as in the
# sketch of chapter 08. The two matmuls of our loop form a chain, because the result of the first one becomes an operand
# of the second one. For such a chain, the compiler places all warps along one dimension, and gives all matmuls of the
# loop the same arrangement. It chooses the longer dimension of a result, and it looks at the result of the *last*
# matmul. Here, that is $PV$, whose result has B_r rows and d columns (d rounded up to a power of two). If B_r ≥ d, all
# matmuls of the loop get `[4, 1]`, and each row of S stays within one warp. Otherwise, they get `[1, 4]`, and each warp
# has some keys of every row, so the warps have to exchange maxima, sums and P through shared memory.
#
# At d = 128, rungs 03, 08 and 11, whose tiles have 64 rows, get `[1, 4]` on these chips, and so does rung b01 of the
# backward pass. You can see this with `fa2-lab xray 11 --chip sm_80`. For this reason, the package's own forward kernel
# computes O in pieces of B_r columns there. Each piece has its own matmul, so the last matmul has as many rows as
# columns.
# </details>
#
# **Takeaway.** If you use more warps, you need more rows, at least 16 for each warp. Read `warpsPerCTA` before you
# believe that you have saved registers.
#
# ## Which line does an instruction come from?
#
# `xray` also knows which line of the source each instruction belongs to. Between Triton and the GPU, there are two
# assembly languages: *PTX* is NVIDIA's portable one, and *SASS* is the machine code that the chip executes. We count
# the SASS instructions for the line that computes `s_ij`, with three stages and with one:

# %% tags=["nbval-ignore-output", "hide-input"]
lines = mine.read_text(encoding="utf-8").splitlines()
number = next(n for n, code in enumerate(lines, 1) if "s_ij = tl.dot" in code)
became = {}
for launch in ("as it is", "num_stages=1"):
    own = {place: code for place, code in kernels[launch].lines.items()
           if not place.startswith("standard.py")}
    # under the rung's name, if cached
    codes = next(code for place, code in own.items() if place.endswith(f":{number}"))
    became[launch] = Counter(re.sub(r"^@!?U?P\w+ ", "", code).split()[0].split(".")[0]
                             for code in codes)
    print(f"{launch:12}", ", ".join(f"{n} {x}" for x, n in became[launch].items()
                                    if x in ("HGMMA", "STS", "BAR")))

# %% [markdown]
# One instruction, `HGMMA.64x64x16`, multiplies a 64 × 16 matrix by a 16 × 64 matrix. The line multiplies a 64 × 128
# matrix by a 128 × 64 matrix, so it takes 8 of these instructions. Since it occurs in both of the kernel's loops, the
# count is 16. With one stage, the line also has to write K's 16 KiB to shared memory, which takes 8 `STS` of 16 bytes
# per thread in each loop, or 16 in all. In each loop, there is one `BAR.SYNC` before them and one after them, which
# makes 4. They are the two barriers from chapter 07, "the tile is free" and "the tile is there". With three stages, the
# copies run ahead, so the line contains neither `STS` nor `BAR.SYNC`.
#
# ## When do the warps wait?
#
# In `ncu`, a stall is an average over the whole kernel, whereas a *timeline* shows when each wait happens. The timeline
# below does not come from `mine.py`, but from a small loop in which no copy runs ahead. It was recorded on an H200 by
# `python -m fa2_studio.warp_timeline`.

# %% tags=["hide-input"]
printed = (files.ROOT / "figures" / "data" / "warp_timeline.txt").read_text(encoding="utf-8")
clocked = re.findall(r"(copies|products) +from +(\S+) for +(\S+)(.*)", printed)
spans = [(name, float(t), float(t) + float(n)) for name, t, n, warp in clocked
         if warp == clocked[0][3]]
for lane in ("copies", "products"):
    at = np.linspace(spans[0][1], max(end for *_, end in spans), 72)
    works = (any(name == lane and begin <= t < end for name, begin, end in spans) for t in at)
    print(f"{lane:9} " + "".join("█" if work else "·" for work in works))

# %% [markdown]
# The tensor cores are idle during each copy, just as in chapter 10's timeline for one stage. `nsys` and `proton` show
# when each *kernel* ran, but Proton can also look inside a kernel, as it did here. To get such a timeline for a kernel
# of your own, add the lines below that end with `# new`. In `mine.py`, do this in both loops. Reading the clock itself
# takes time, so you can trust the order of the recorded spans but not their lengths:
#
# ```python
# import triton.profiler as proton  # new
# import triton.profiler.language as pl  # new
# pl.enable_semantic("triton")  # new
#
# @triton.jit
# def forward_kernel(…):
#     for j in range(…):
#         pl.enter_scope("copies")  # new
#         k_j = load_rows(…)
#         v_j = load_rows(…)
#         pl.exit_scope("copies")  # new
#         o_i, l_i, m_i = visit(…)
#
# if __name__ == "__main__":
#     proton.start("mine", backend="instrumentation", data="trace")  # new
#     forward(q, k, v, False)
#     torch.cuda.synchronize()
#     proton.finalize()  # new: writes mine.chrome_trace, for ui.perfetto.dev
# ```
#
# ## Can you find the fastest launch options by trying?
#
# An *autotuner* times the kernel with each set of launch options and keeps the fastest set. `triton.autotune` does this
# at the first call, and `fa2-lab tune` does it for this package's kernels. However, four things can go wrong:
#
# - **Luck.** If many sets of options are equally fast, the one that wins looks faster than it is, as the next cell
#   shows. Taking medians makes this error smaller. If the winner is ahead by less than the error, use the simpler
#   options.
# - **The clock.** A GPU lowers its clock when it draws a lot of power (*throttling*), so make the candidates take
#   turns.
# - **The shape.** The winner at one shape can lose at another, as rung 11 did at d = 64, so test it at all the shapes
#   that you care about.
# - **The result.** A kernel that wrongly skips tiles is fast, so compare the results as well. A kernel that *adds* to
#   its output adds again in every trial, so the autotuner has an option, `reset_to_zero`, that clears the output before
#   each trial.

# %%
# 20 equal launches, 1 ms, 1% of noise; 1,000 searches
times = np.random.default_rng(0).normal(1.00, 0.01, (1000, 20, 9))
for repeats in (1, 9):
    best = np.median(times[:, :, :repeats], axis=2).min(axis=1).mean()
    often = "once" if repeats == 1 else f"{repeats} times"
    print(f"each launch timed {often}: the winner seems {1 - best:.1%} faster than it is")

# %% [markdown]
# ## Is fp32 really fp32?
#
# We now turn to kernels whose result is wrong, and we start with a mistake that the interpreter hides. In NumPy and in
# Triton's interpreter, an fp32 number has 23 bits after the point. On a GPU, however, `tl.dot` of two fp32 tiles runs
# on the tensor cores, which use a format of their own, *TF32*. They read only the first 10 bits after the point and
# ignore the other 13. The function `tf32` does the same, because the hexadecimal number in it has 19 ones and then 13
# zeros.


# %%
def tf32(x):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def error(rounded):  # of Q Kᵀ, if the operands are rounded
    Q, K = np.random.default_rng(0).standard_normal((2, 256, 64)).astype(np.float32)
    exact = Q.astype(np.float64) @ K.T.astype(np.float64)
    S = rounded(Q).astype(np.float32) @ rounded(K).T.astype(np.float32)
    return np.linalg.norm(S - exact) / np.linalg.norm(exact)

# %% [markdown]
# **Predict.** A kernel for fp32 inputs simply calls `tl.dot(q, k.T)`. How exact are its scores on a GPU?
#
# - ☐ as exact as in the interpreter
# - ☐ between fp32 and fp16
# - ☐ no better than fp16
#
# <details><summary>Answer</summary>
#
# **no better than fp16.** fp16 also has 10 bits after the point, but the conversion to fp16 rounds, whereas TF32 simply
# cuts off the remaining bits. TF32's only advantage is its larger range. No test in the interpreter shows this loss of
# precision.
#
# ```python
# for name, rounded in (("fp32", np.float32), ("fp16", np.float16), ("TF32", tf32)):
#     print(f"{name}: relative error of the scores {error(rounded):.0e}")
# (kernel,) = xray(str(mine), d=16, causal=False, dtype="float32")
# print(re.search(r"wgmma.mma_async.*?\.f32\S*", kernel.stages["ptx"])[0])
# ```
#
# ```text
# fp32: relative error of the scores 1e-07
# fp16: relative error of the scores 3e-04
# TF32: relative error of the scores 8e-04
# wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32
# ```
# </details>
#
# `tl.dot(a, b, input_precision="ieee")` keeps all bits, but it is many times slower, because it does not use the tensor
# cores. It is the right choice for a test, or if exact gradients matter. `"tf32x3"` is a compromise. It splits each
# operand into the part that TF32 can hold and the small rest, and runs three matmuls instead of one, namely part ·
# part, part · rest and rest · part. The product of the two rests is too small to matter.
#
# **Takeaway.** By default, a matmul of fp32 inputs does not have fp32 precision. Write `input_precision="ieee"`, or
# expect only three correct digits.
#
# ## How do you look inside a kernel?
#
# In Triton's interpreter, a kernel is plain Python, so `breakpoint()` stops it, and Python's debugger can show every
# tile. For each row of 10 values, this kernel computes $L = \log \sum_j e^{s_j}$, using a block of 16 elements. In
# memory, each row directly follows the previous one. So that this notebook can run unattended, a function takes the
# debugger's place and prints what `p s` and `p m` would show:

# %%
@triton.jit
def log_sum_kernel(S, L, rows, N, stride, B: tl.constexpr, STOP: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, B)
    s = tl.load(S + at, mask=at < rows * stride, other=float("-inf"))
    m = tl.max(s, 0)
    if STOP:
        breakpoint()  # in the interpreter only
    tl.store(L + tl.program_id(0), m + tl.log(tl.sum(tl.exp(s - m), 0)))

# %% tags=["nbval-ignore-output", "hide-input"]
def stop():  # stands in for the debugger: prints what it shows if you type `p s` and `p m`
    tile = sys._getframe(1).f_locals
    print(f"(Pdb) p s\n{tile['s']}\n(Pdb) p m\n{tile['m']}")


S, L = torch.arange(10.0, device=device)[None], torch.full((1,), torch.nan, device=device)
sys.breakpointhook = stop
log_sum_kernel[(1,)](S, L, 1, 10, 10, B=16, STOP=bool(triton.knobs.runtime.interpret))
sys.breakpointhook = sys.__breakpointhook__
print("L =", round(L.item(), 6), " by torch", round(torch.logsumexp(S, 1).item(), 6))

# %% [markdown]
# The mask keeps the load from reading the last six positions, so the block holds −∞ there.
#
# You cannot stop a compiled kernel like this, but `tl.device_print("m", m)` prints a value on a GPU. The value is
# printed once for *each thread*, so let only one program print. `compute-sanitizer` reports every access outside an
# allocation. Since PyTorch allocates memory in large pieces, you have to set `PYTORCH_NO_CUDA_MEMORY_CACHING=1` so that
# each tensor gets its own allocation.
#
# The next cell shows what `compute-sanitizer` reported on an H200 for a kernel that writes 4,096 values into a tensor
# with 1,000 elements (`fa2_studio/stray.py`). The report names the line and the thread, and tells you how far past the
# end the access was. The program has 128 threads, each of which writes 4 numbers at a time, so thread 122 is the first
# to leave the tensor in the second round (128 · 4 + 4 · 122 = 1,000).

# %% tags=["hide-input"]
told = (files.ROOT / "figures" / "data" / "stray.txt").read_text(encoding="utf-8")
print("\n".join(re.findall(r"=+ +(?=Invalid|at stray|by thread|Access|and is)(.*)", told)))

# %% [markdown]
# ## Why are some rows wrong?
#
# Above, `log_sum_kernel` gave the right result, and if the rows have 16 columns, its results are right for any number
# of rows. But with three rows of 10 values, some of the results are wrong, even in their first digits.

# %% tags=["hide-input"]
def errors(S, N):
    L = torch.full((len(S),), torch.nan, device=device)
    log_sum_kernel[(len(S),)](S, L, len(S), N, S.stride(0), B=16, STOP=False)
    return [round(x, 2) for x in (L - torch.logsumexp(S[:, :N], 1)).abs().tolist()]


S = torch.tensor(np.random.default_rng(0).standard_normal((3, 10)), dtype=torch.float32,
                 device=device)
padded = torch.nn.functional.pad(S, (0, 3), value=torch.nan)

# %% [markdown]
# **Predict.** A block has 16 elements. Which of the three rows are wrong?
#
# - ☐ all three
# - ☐ all but the last
# - ☐ only the last
#
# <details><summary>Answer</summary>
#
# **all but the last.** The tensor ends after the last row, so the mask works for that row. After each earlier row,
# however, the next row begins, and its first six values are included in the sum by mistake. The mask tests whether an
# element is in the *tensor*, but it should test whether it is in the row.
#
# ```python
# print("errors of L:", errors(S, 10))
# print("with NaN after each row:", errors(padded, 10))
# ```
#
# ```text
# errors of L: [0.21, 0.77, 0.0]
# with NaN after each row: [nan, nan, nan]
# ```
# </details>
#
# One defence against such mistakes is *NaN padding*. If you leave gaps between the rows and fill these gaps with NaN,
# the result becomes NaN for every row whose load reads too far. Here, the fix is `mask=tl.arange(0, B) < N`.
#
# **Takeaway.** Test with ragged sizes, and put NaN past every end. A wrong number can look plausible, but a NaN cannot.
#
# If you have no idea what is wrong, `fa2-lab examine mine.py:forward` compares your function with a list of known
# mistakes (appendix [C](C_package.ipynb)). [Assignment 9](assignments/9_up_the_ladder.ipynb) uses these tools to climb
# further, from rung 03 up. [Assignment 8](assignments/8_detective.ipynb), which comes after chapter 12b, contains
# programs that hang, that have a race, or that give slightly wrong results. Read [appendix A](A_lanes.ipynb) before
# chapter 12a.
#
# ## Recap
#
# - A GPU programmer finds out what a kernel waits for, makes one change that removes this wait, checks the result,
#   measures again, and tries another shape.
# - Registers, shared memory and slots for warps limit the number of programs on an SM. This number changes in steps,
#   and only the lowest limit is worth raising.
# - If you use more warps, you need more rows, so read the layout.
# - `xray` needs no GPU, so use it first. `ncu` names the wait, and a timeline shows when it happens.
# - To search for the fastest launch options, take medians, make the candidates take turns, test several shapes, and
#   check the result.
# - NaN past the end of every row reveals a read that goes too far. `compute-sanitizer` reveals an access outside the
#   tensor.
#
# ## Exercises
#
# Which launch options let *three* programs of `mine.py` fit onto an SM at d = 128? Add yours to `LAUNCHES` above and
# run the two cells there again. The last column shows whether you are right. What do these options cost?
#
# <details><summary>Solution</summary>
#
# If three programs of 128 threads share an SM, there are 65,536 / 384 = 170 registers per thread, or 168 in steps of 8.
# Each program can have 228 / 3 = 76 KiB of shared memory, and the system reserves 1 KiB of this. Two stages take 80 KiB
# and one stage takes 48 KiB, so the answer is `dict(num_stages=1, maxnreg=168)`. These options cost 14 spills, and no
# copy runs ahead any longer, which is too high a price. In chapter 10, a third program makes rung 09 only 16% faster
# (at 168 registers), whereas copying ahead, with the loops in the right order, makes it 57% faster (rungs 10 and 11).
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
ten, eleven = (kernel.numbers["registers"] for kernel in rungs.values())
verdict("d = 64: 8 waits become 1, but 128 registers are no longer enough",
        ten <= 128 < eleven <= 136
        and [loops(kernel.stages["sass"])[-1].waits for kernel in rungs.values()] == [8, 1])
verdict("rung 11 over rung 10: a gain at d = 128, a loss at d = 64", faster(64, 128) > 1.2
        and max(faster(128, 64), faster(8, 64)) < 1)
verdict("a limit of 128 registers costs rung 11 no spills", limits["11"]["spills"] == 0
        and limits["11"]["registers"] == 128)
verdict("measured on both rungs: a gain",
        all(experiments.ratio(record, f"{n} at 128 registers", 64, causal=False,
                              heads=128) > 1.04 for n in (11, 13)))
plain, staged, wide, narrow = (kernels[x].numbers
                               for x in ("num_stages=1", "as it is", "num_warps=8", "maxnreg=128"))
verdict("shared memory: Q once, K and V for each stage",
        [plain["shared"], staged["shared"]] == [48 * 1024, 112 * 1024])
verdict("maxnreg costs spills", narrow["spills"] > staged["spills"] == 0)
verdict("8 warps, 64 rows: as many exponentials per thread as with 4",
        wide["exponential"] == staged["exponential"])
verdict("8 warps, 64 rows: [8, 1]",
        any("[8, 1]" in layout for layout in kernels["num_warps=8"].layouts.values()))
fit = [blocks_per_sm(H200, n["shared"], n["registers"], n["warps"]) for n in (staged, narrow)]
verdict("2 programs fit, with and without maxnreg=128", fit == [2, 2])
verdict("16 HGMMA in the line that computes s",
        became["as it is"]["HGMMA"] == became["num_stages=1"]["HGMMA"] == 16)
verdict("TF32 is worse than fp16, and fp32 a thousand times better",
        error(tf32) > error(np.float16) > 300 * error(np.float32))
verdict("when run by itself, mine.py only makes its own calls",
        mine.read_text(encoding="utf-8").count("__main__") <= 1)
verdict("the kernel in the debugger is right",
        close(L.cpu(), [np.log(np.exp(np.arange(10.0)).sum())], 1e-6))
verdict("NaN padding catches all rows", all(x != x for x in errors(padded, 10)))
verdict("without it, the last row looks right", errors(S, 10)[2] == 0 < min(errors(S, 10)[:2]))

# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, machine and rungs →](12a_hopper_rungs.ipynb)
