# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, machine and rungs →](12a_hopper_rungs.ipynb)

# %% [markdown]
# # 11 · The workshop
#
# **What does a GPU programmer do all day?**
#
# A kernel is slower than expected, or its result is slightly wrong. Here are the tools, each on one file of your own.
#
# After this notebook you can
#
# - compile a file of yours for a GPU that is not here, and read what the compiler made of it,
# - say what `num_warps`, `num_stages` and `maxnreg` do, and how many programs fit on an SM,
# - say which tool answers which question: how long, what limits it, what its warps wait for, and when,
# - find a wrong number and an access outside a tensor, and say what a search for the fastest launch may get wrong.
#
# *Time: 35 minutes. Hardware: any laptop with Linux. Lines for a GPU say so. Before
# this: [07 · Warps](07_warps.ipynb), [08 · The Triton forward kernel](08_triton_forward.ipynb) and [10 · The ladder,
# measured](10_ladder.ipynb).*

# %%
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
from fa2_lab.tools import files
from fa2_lab.tools import ladder as climbed
from fa2_lab.tools.xray import xray, xray_launches
from fa2_studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["hide-input"]
import triton
import triton.language as tl

# %% [markdown]
# ## Which tools work on a file of your own?
#
# All tools below work on one file, `mine.py`. It has a function `forward(q, k, v, causal)`, and its last lines call that
# function, so that a profiler has something to watch. If no `mine.py` lies beside this notebook, the next cell writes one:
# rung 11, without its own last lines, with tiles of 64 × 64, 4 warps and 3 stages. Your kernel of
# [assignment 4](assignments/4_triton_forward.ipynb) will do.

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
# | you want to know | the line |
# | --- | --- |
# | registers, spills, shared memory, layouts | `fa2-lab xray mine.py --full` |
# | its instructions | `fa2-lab xray mine.py --full --sass` |
# | how long each kernel takes | `nsys profile -o mine python mine.py; nsys stats -r cuda_gpu_kern_sum mine.nsys-rep` |
# | what limits it, what its warps wait for | `ncu -k regex:forward -s 2 -c 1 --set full python mine.py` |
# | how long, without NVIDIA's tools | `proton -n mine mine.py; proton-viewer -m time/ms mine.hatchet` |
# | an access outside a tensor | `PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python mine.py` |
# | a race in shared memory (not with the barriers of chapter 12a) | `compute-sanitizer --tool racecheck python mine.py` |
# | a value | `TRITON_INTERPRET=1 python mine.py`, with a `breakpoint()`, q, k, v on the CPU, no `synchronize`, a small N and one head |
#
# If a kernel is slow, begin with `xray`, then `nsys`, which times kernels, then `ncu`, which reads the hardware's counters.
# Proton is Triton's own profiler. If it is wrong, begin with the last line. The first two and the last need no GPU. `xray`
# compiles for an H200 and the causal mask unless you say `--chip` or `--full`, and takes the three options below.

# %% [markdown]
# ## What does the compiler make of a launch option?
#
# `num_warps` warps share the program's tiles. The tiles of a loop are copied ahead into `num_stages` stages. `maxnreg` is
# the most registers that a thread may have.

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
# - **Stages.** (Numbers of rung 11.) A tile of 64 · 128 numbers of two bytes has 16 KiB. One stage: Q, K and V, 48 KiB.
#   Three: Q, and three tiles of K and of V, 112 KiB: `3x64x128xbf16` in the text that Triton hands on
#   (`fa2-lab xray mine.py --ttgir`). More stages take no more registers: the copies go straight to shared memory.
# - **maxnreg.** With 128, some of a thread's values find no register and live in memory. *Spills*: how many instructions
#   store and load them.
# - **Programs.** An SM has 65,536 registers, 228 KiB of shared memory and places for 64 warps. As many programs run on it
#   as fit into all three. (The share of the 64 places taken is its *occupancy*.) In steps of 8, 138 registers are 144: 8
#   warps take 256 · 144 = 36,864, so one program fits. With one stage 179 are 184, and 128 · 184 leave room for two.
#
# As it is, registers leave room for 3 programs, and shared memory for 2. So `maxnreg=128`, with registers for 4, gains
# nothing.
#
# ## What do eight warps do?
#
# A product of the tensor cores of Hopper (H100, H200) has 64 rows, and four warps make it together, 16 rows each. A tile
# of `mine.py` has 64 × 64 scores.
#
# **Predict.** How do eight warps share $S = QK^\top$?
#
# - ☐ each takes half as many rows
# - ☐ four of them compute what the other four compute, too
# - ☐ four take the left half of the keys, four the right half
#
# <details><summary>Answer</summary>
#
# **four of them compute what the other four compute, too.** The layout of S is `warpsPerCTA = [8, 1]`: all eight warps lie
# below each other, which would be 128 rows. So each row is computed twice, and each exponential, too. For $PV$ the compiler
# chose `[4, 2]`: there four warps take half of d. The table had the clue: with twice the warps a thread still has 138
# registers, not half of 168. (8,704: two loops, each with 64 · 64 scores and 256 factors, α of 64 rows in 4 lanes each.)
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
# A kernel in Triton does not name its layouts, but its tile decides what the compiler chooses. What helps here is a tile
# with rows for all warps: with 128 rows, `[8, 1]` is split-Q as in chapter 07.
#
# On an A100 or an RTX 4090, the tile decides even whether four warps share S by rows. There, each warp multiplies by
# itself, so the warps of a program can lie beside each other, too. The compiler looks at the *last* of the products that
# feed one another, here $PV$ with its B_r rows and d columns (d rounded up to a power of two). If B_r ≥ d, all of them get
# `[4, 1]`, and otherwise `[1, 4]`: then each warp has some keys of every row, so maxima, sums and P have to cross shared
# memory. At d = 128, rungs 03, 08 and 11 with their 64 rows are `[1, 4]` on these chips, and so is the backward's rung
# b01. (`fa2-lab xray 11 --chip sm_80` shows it.) Therefore the package's own forward makes O in pieces of B_r columns
# there, each by a product of its own.
#
# **Takeaway.** More warps need more rows: at least 16 rows for each. Read `warpsPerCTA` before you believe a gain in
# registers.
#
# ## What does one line become?
#
# Between Triton and the GPU there are two assembly languages. *PTX* is NVIDIA's portable one. *SASS* is what the chip
# executes. Here is the line of `s_ij`, with three stages and with one:

# %% tags=["nbval-ignore-output", "hide-input"]
lines = mine.read_text(encoding="utf-8").splitlines()
number = next(n for n, code in enumerate(lines, 1) if "s_ij = tl.dot" in code)
became = {}
for launch in ("as it is", "num_stages=1"):
    own = {place: code for place, code in kernels[launch].lines.items() if not place.startswith("standard.py")}
    codes = next(code for place, code in own.items() if place.endswith(f":{number}"))  # under the rung's name, if cached
    became[launch] = Counter(re.sub(r"^@!?U?P\w+ ", "", code).split()[0].split(".")[0] for code in codes)
    print(f"{launch:12}", ", ".join(f"{n} {x}" for x, n in became[launch].items() if x in ("HGMMA", "STS", "BAR")))

# %% [markdown]
# It is a product of 64 × 128 by 128 × 64. One instruction, `HGMMA.64x64x16`, multiplies 64 × 16 by 16 × 64, so it takes 8,
# and the kernel has two loops. With one stage, a thread takes 8 `STS` of 16 bytes a loop to put K's 16 KiB into shared
# memory, between two `BAR.SYNC`: the place is free, the tile is there. `LDL` and `STL` would be spills.
#
# ## What are the warps waiting for?
#
# DRAM is not the limit of rung 11 (chapter 10). What is? *Nsight Compute* (`ncu`) counts it. In the table's line for it,
# `-k regex:forward -s 2 -c 1` takes the third call of `mine.py`. (If it says `ERR_NVGPUCTRPERM`, the machine's owner must
# allow counters.) Of its pages, three answer most questions:
#
# | section | read | it says |
# | --- | --- | --- |
# | Speed Of Light | compute and memory throughput | which of the two is near its limit, if any |
# | Occupancy | block limits | which of registers, shared memory and warps allows how many programs |
# | Warp State | the largest stalls | what a warp waits for: so many clocks for each instruction that is started |
#
# Here are counters of rungs 10 and 11, recorded on an H200.

# %% tags=["hide-input"]
before, counted = (climbed.rows(climbed.load(climbed.SUITE), "counters")[ladder.find(n)].values for n in ("10", "11"))
stalls = {name: x[0] for name, x in counted.items() if name.startswith("stall: ")}
idle = 100 - counted["tensor cores at work, %"][0]
print(f"Rung 11: {idle:.0f}% of the time the tensor cores idle, so warps are waiting. For what?")
print(f"{'clocks':20}rung 10  rung 11")
for name in sorted(stalls, key=stalls.get)[:-5:-1]:
    print(f"{name:23} {before[name][0]:.2f} {stalls[name]:8.2f}")

# %% [markdown]
# *Wait*: a warp waits for its own last instruction, a fixed few clocks. *Barrier*: for the other warps. *Short scoreboard*:
# for shared memory or the exponential unit. *Long scoreboard*: for data from L2 or DRAM. And a product? Rung 10 waits for
# 12 instructions of the tensor cores a tile, rung 11 for 1, and *barrier* falls: so that wait is counted there (likely: the
# warps meet behind it). A fourth stage would shorten the wait for data, but takes 144 KiB, and then only one program fits.
#
# ## When do they wait?
#
# This is not `mine.py` but a small loop that copies nothing ahead (`python -m fa2_studio.inside`), on an H200:

# %% tags=["hide-input"]
printed = (files.ROOT / "figures" / "data" / "inside.txt").read_text(encoding="utf-8")
clocked = re.findall(r"(copies|products) +from +(\S+) for +(\S+)(.*)", printed)
spans = [(name, float(t), float(t) + float(n)) for name, t, n, warp in clocked if warp == clocked[0][3]]
for lane in ("copies", "products"):
    at = np.linspace(spans[0][1], max(end for *_, end in spans), 72)
    works = (any(name == lane and begin <= t < end for name, begin, end in spans) for t in at)
    print(f"{lane:9} " + "".join("█" if work else "·" for work in works))

# %% [markdown]
# The tensor cores stand still during each copy. `nsys` and `proton` show when each *kernel* ran. Proton can also look
# inside, as here. This goes into `mine.py` (reading the clock takes time: trust the order, not the lengths):
#
# ```python
# # at the top
# import triton.profiler as proton
# import triton.profiler.language as pl
# pl.enable_semantic("triton")
# # in the kernel
# pl.enter_scope("copies")  # before its loads
# pl.exit_scope("copies")  # after them
# # around the calls
# proton.start("mine", backend="instrumentation", data="trace")  # before them
# proton.finalize()  # after synchronize(): writes mine.chrome_trace, for ui.perfetto.dev
# ```
#
# ## Can the fastest launch be found by trying?
#
# Time each launch, keep the fastest: an *autotuner* does that. `triton.autotune` does it at the first call, and
# `fa2-lab tune` for this package's kernels. Four things go wrong.
#
# - Luck. The best of twenty equal launches, each timed once with an error of 1%, seems nearly 2% faster than it is. Medians
#   make that smaller. If the winner is ahead by less than that, take the simpler launch.
# - The clock. A GPU lowers it when it draws much power (*throttling*). So time the launches in turns.
# - The shape. A winner at one N may lose at another: try it there.
# - The result. A launch that wrongly skips tiles is fast. A kernel that *adds* to its output adds in every trial (the
#   autotuner's option `reset_to_zero` is for that). So compare results.

# %% [markdown]
# ## Is fp32 really fp32?
#
# In NumPy and in Triton's interpreter it is: 23 bits behind the point. On a GPU `tl.dot` of two fp32 tiles goes to the
# tensor cores in a format of its own, *TF32*: they read the first 10 bits behind the point and ignore the other 13.


# %%
def tf32(x):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def error(rounded):  # of Q Kᵀ, if the factors are rounded
    Q, K = np.random.default_rng(0).standard_normal((2, 256, 64)).astype(np.float32)
    exact = Q.astype(np.float64) @ K.T.astype(np.float64)
    S = rounded(Q).astype(np.float32) @ rounded(K).T.astype(np.float32)
    return np.linalg.norm(S - exact) / np.linalg.norm(exact)

# %% [markdown]
# **Predict.** A kernel in fp32 writes `tl.dot(q, k.T)` and no more. How exact are its scores on a GPU?
#
# - ☐ as exact as in the interpreter
# - ☐ between fp32 and fp16
# - ☐ no better than fp16
#
# <details><summary>Answer</summary>
#
# **no better than fp16.** fp16 has 10 bits as well, and rounds. TF32 only has the larger range. No test in the interpreter
# shows it.
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
# `tl.dot(a, b, input_precision="ieee")` keeps all bits. It uses no tensor cores, so it is many times slower: right for a
# test, or where exact gradients matter. `"tf32x3"` lies between, with three products for one.
#
# **Takeaway.** fp32 inputs do not make an fp32 product. Say `input_precision="ieee"`, or expect three digits.
#
# ## How do you look inside a kernel?
#
# In Triton's interpreter a kernel is plain Python. So `breakpoint()` stops it, and Python's debugger shows every tile. The
# kernel below computes $L = \log \sum_j e^{s_j}$ of a row of 10 numbers, in a block of 16 places. Rows lie one after the
# other in memory.

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
def stop():  # in place of the debugger: what it shows if one types `p s` and `p m`
    tile = sys._getframe(1).f_locals
    print(f"(Pdb) p s\n{tile['s']}\n(Pdb) p m\n{tile['m']}")


S, L = torch.arange(10.0, device=device)[None], torch.full((1,), torch.nan, device=device)
sys.breakpointhook = stop
log_sum_kernel[(1,)](S, L, 1, 10, 10, B=16, STOP=bool(triton.knobs.runtime.interpret))
sys.breakpointhook = sys.__breakpointhook__
print("L =", round(L.item(), 6), " by torch", round(torch.logsumexp(S, 1).item(), 6))

# %% [markdown]
# The mask keeps the load away from the last six places: they hold −∞.
#
# A compiled kernel cannot be stopped like this. On a GPU, `tl.device_print("m", m)` prints a value once for *each thread*:
# let one program print. `compute-sanitizer` names every access outside an allocation. PyTorch allocates in large pieces, so
# `PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor an allocation of its own. Here is what it says of a kernel that
# writes 4,096 numbers into 1,000 places (`fa2_studio/stray.py`), on an H200: the line, the thread, and how far behind the
# end.

# %% tags=["hide-input"]
told = (files.ROOT / "figures" / "data" / "stray.txt").read_text(encoding="utf-8")
print("\n".join(re.findall(r"=+ +(?=Invalid|at stray|by thread|Access|and is)(.*)", told)))

# %% [markdown]
# ## Why is it wrong by a little?
#
# `log_sum_kernel` was right above. With 16 columns it is right for any number of rows. With three rows of 10 numbers, L is
# off in the first digits.

# %% tags=["hide-input"]
def errors(S, N):
    L = torch.full((len(S),), torch.nan, device=device)
    log_sum_kernel[(len(S),)](S, L, len(S), N, S.stride(0), B=16, STOP=False)
    return [round(x, 2) for x in (L - torch.logsumexp(S[:, :N], 1)).abs().tolist()]


S = torch.tensor(np.random.default_rng(0).standard_normal((3, 10)), dtype=torch.float32, device=device)
moated = torch.nn.functional.pad(S, (0, 3), value=torch.nan)

# %% [markdown]
# **Predict.** Blocks have 16 places. Which of the three rows are wrong?
#
# - ☐ all three
# - ☐ all but the last
# - ☐ the last alone
#
# <details><summary>Answer</summary>
#
# **all but the last.** Behind the last row there is nothing. Behind another row lies the next one, and its first six
# numbers join the sum. The mask asks whether a place lies in the *tensor*. It must ask about the row.
#
# ```python
# print("errors of L:", errors(S, 10))
# print("with NaN behind each row:", errors(moated, 10))
# ```
#
# ```text
# errors of L: [0.21, 0.77, 0.0]
# with NaN behind each row: [nan, nan, nan]
# ```
# </details>
#
# The tool is a *moat*: put the rows further apart, and fill the gaps with NaN. Now every row that reads too far is NaN. The
# cure is `mask=tl.arange(0, B) < N`.
#
# **Takeaway.** Test at ragged sizes, with NaN behind every end. A wrong number may look healthy; NaN does not.
#
# [Assignment 9](assignments/9_up_the_ladder.ipynb) goes further: from rung 03 up, with these tools. [Assignment
# 8](assignments/8_detective.ipynb), after chapter 12b, has programs that hang, that race, and that are wrong by a little.
# Before chapter 12a comes [appendix A](A_lanes.ipynb).
#
# ## Recap
#
# - All day: name what a kernel waits for, change that one thing, check the result, look again.
# - Launch options change how many registers and how much shared memory a program takes.
# - The roofline says whether DRAM is the limit. Stalls say what the warps wait for, a timeline when.
# - NaN behind every row shows a read too far. `compute-sanitizer` shows one that leaves the tensor.
#
# ## Exercises
#
# With which launch options do *three* programs of `mine.py` fit on an SM? Add yours to `LAUNCHES` in the second section,
# and run its two cells again: the last column says whether you are right. What do the options cost?
#
# <details><summary>Solution</summary>
#
# Three programs of 128 threads leave 65,536 / 384 = 170 registers, so 168, and 228 / 3 = 76 KiB, of which the system takes
# 1. Two stages take 80 KiB, one takes 48. So `dict(num_stages=1, maxnreg=168)`. It costs 14 spills, and nothing is copied
# ahead any more. That is too much: in chapter 10 a third program gains 16% (rung 09 at 168 registers), and copies ahead
# with the loops in the right order gain 57% (rungs 10 and 11).
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
plain, staged, wide, narrow = (kernels[x].numbers for x in ("num_stages=1", "as it is", "num_warps=8", "maxnreg=128"))
verdict("shared memory: Q once, K and V for each stage", [plain["shared"], staged["shared"]] == [48 * 1024, 112 * 1024])
verdict("maxnreg is paid in spills", narrow["spills"] > staged["spills"] == 0)
verdict("8 warps, 64 rows: as many exponentials of a thread as with 4", wide["exponential"] == staged["exponential"])
verdict("8 warps, 64 rows: [8, 1]", any("[8, 1]" in layout for layout in kernels["num_warps=8"].layouts.values()))
fit = [blocks_per_sm(H200, n["shared"], n["registers"], n["warps"]) for n in (staged, narrow)]
verdict("2 programs fit, and 2 with maxnreg=128", fit == [2, 2])
verdict("16 HGMMA in the line of s", became["as it is"]["HGMMA"] == became["num_stages=1"]["HGMMA"] == 16)
verdict("TF32 is worse than fp16, and fp32 a thousand times better", error(tf32) > error(np.float16) > 300 * error(np.float32))
verdict("run by itself, mine.py makes its own calls alone", mine.read_text(encoding="utf-8").count("__main__") <= 1)
verdict("the kernel in the debugger is right", close(L.cpu(), [np.log(np.exp(np.arange(10.0)).sum())], 1e-6))
verdict("a moat of NaN catches all rows", all(x != x for x in errors(moated, 10)))
verdict("without it the last row looks right", errors(S, 10)[2] == 0 < min(errors(S, 10)[:2]))
verdict("rung 11: wait and barrier are the largest stalls", set(sorted(stalls, key=stalls.get)[-2:]) == {"stall: wait", "stall: barrier"})
verdict("from rung 10 to 11 barrier falls most", max(stalls, key=lambda x: before[x][0] - stalls[x]) == "stall: barrier")

# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, machine and rungs →](12a_hopper_rungs.ipynb)
