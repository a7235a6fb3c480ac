# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, machine and rungs →](12a_hopper_rungs.ipynb)

# %% [markdown]
# # 11 · The workshop
#
# **What does a GPU programmer do all day?**
#
# A kernel is slower than expected, or it hangs, or its result is slightly wrong. Here are the tools: first for
# kernels that work, then for bugs.
#
# After this notebook you can
#
# - read what the compiler made of a kernel,
# - read five hardware counters, and say what a kernel waits for,
# - find a hang, a race and a wrong answer, each with the tool that shows it,
# - say what a search for the fastest launch may get wrong.
#
# *Time: 45 minutes with the questions and exercises, and 8 for the ten questions on part III at the end. Hardware: any
# laptop with Linux. Cells that need a GPU or one of NVIDIA's tools say so. Before this: [07 · Warps](07_warps.ipynb),
# [08 · The Triton forward kernel](08_triton_forward.ipynb) and [10 · The ladder, measured](10_ladder.ipynb).*

# %%
import numpy as np
import torch

import fa2_lab.kernels  # first: without a GPU it switches Triton's interpreter on
from fa2_lab.tools.xray import xray_launches

device = "cuda" if torch.cuda.is_available() else "cpu"

# %%
import triton
import triton.language as tl

# %% [markdown]
# ## What does the compiler make of a launch option?
#
# A Triton launch takes *launch options* beside the kernel's own arguments. `num_warps` warps share the program's tiles. The
# tiles of a loop are copied ahead into `num_stages` stages (pipelining, rung 08). `maxnreg` is the most registers that a
# thread may have.
#
# Rung 07 is chapter 08's kernel with one stage: tiles of 64 × 64, d = 128, 4 warps. Here it is compiled for an H200, which need
# not be here. (In the shell: `fa2-lab xray 07 --full --num_stages 3`.)

# %%
LAUNCHES = [{}, dict(num_stages=3), dict(num_stages=3, num_warps=8), dict(num_stages=3, maxnreg=128)]
kernels = [kernel for (kernel,) in xray_launches("07", LAUNCHES, "sm_90", d=128, causal=False)]

# %% [markdown]
# **Predict.** Shared memory holds the tile of Q once, and a tile of K and one of V for each stage. Each tile has
# 64 · 128 numbers of two bytes. How many KiB is that with one stage? With three?

# %% tags=["nbval-ignore-output", "hide-input"]
def fits(n):  # programs on an SM by registers, by shared memory, by warps
    a_warp = 32 * (-(-n["registers"] // 8) * 8)  # registers are given out eight at a time
    a_program = n["shared"] + 1024  # the system takes 1 KiB of each program's shared memory
    return 65_536 // (a_warp * n["warps"]), 228 * 1024 // a_program, 64 // n["warps"]


print(f"{'':26}{'registers':>10}{'spills':>8}{'shared KiB':>12}   programs by registers, shared memory, warps")
for launch, kernel in zip(LAUNCHES, kernels, strict=True):
    asked, n = ", ".join(f"{k}={v}" for k, v in launch.items()) or "rung 07 as it is", kernel.numbers
    told = "".join(f"{x:12}" for x in fits(n))
    print(f"{asked:26}{n['registers']:10}{n['spills']:8}{n['shared'] / 1024:12.0f}{told}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **48 and 112.** A tile has 16 KiB. One stage: Q, K and V, 3 · 16 = 48. Three stages: 16 + 3 · 32 = 112.
# </details>
#
# More stages take no more registers: the copies go straight to shared memory. With 8 warps each thread needs fewer, but some
# work is done twice: Q Kᵀ has 64 rows, a product for four warps, and the other four compute the same rows again (`fa2-lab xray
# 07 --full --num_warps 8` shows `warpsPerCTA = [8, 1]` and more tensor instructions). With `maxnreg=128` some of a thread's
# values find no register. They live in memory: those are the *spills*.

# %% [markdown]
# The last columns: an SM has 65,536 registers, 228 KiB of shared memory and places for 64 warps. As many programs run on
# it as fit into all three. The share of the 64 places that are taken is called *occupancy*. Rung 07 is limited by
# registers, to 2. With three stages shared memory is the limit, again 2. There `maxnreg=128` leaves registers for 4, but
# shared memory still allows 2.
#
# With high occupancy, one program computes while another waits. A pipeline inside one program serves the same purpose: the
# fastest kernels of the ladder run *one* program on an SM.
#
# **Takeaway.** Work out all three limits. Only a change of the smallest one lets more programs run.

# %% [markdown]
# ## What does one line become?
#
# Between Triton and the GPU there are two assembly languages. *PTX* is NVIDIA's portable one. *SASS* is what the chip
# executes. (`fa2-lab where FA2.A1.L8 --sass` prints it for a line of the paper.) Here are two lines of rung 07.
#
# Line 8 of Algorithm 1, `s_ij = tl.dot(…)`, is a product of 64 × 128 by 128 × 64. The kernel has it in two loops. One
# tensor-core instruction of Hopper, `HGMMA.64x64x16`, multiplies 64 × 16 by 16 × 64 and adds. So each loop needs
# 128 / 16 = 8 of them.

# %% tags=["nbval-ignore-output", "hide-input"]
import re
from collections import Counter
from inspect import getsourcelines

from fa2_lab.kernels import ladder


def sass_of_line(kernel, text):  # the instructions of the line of `visit` that begins like this
    source, first = getsourcelines(ladder.load("r07_two_loops").visit.fn)
    (line,) = (first + n for n, code in enumerate(source) if code.strip().startswith(text))
    return kernel.lines[f"r07_two_loops.py:{line}"]


for text in ("s_ij = tl.dot", "p_ij = tl.exp2"):
    became = sass_of_line(kernels[0], text)
    counts = Counter(re.sub(r"^@!?U?P\w+ ", "", code).split()[0] for code in became)
    told = {name: n for name, n in counts.most_common() if name.split(".")[0] in ("HGMMA", "STS", "BAR", "FFMA", "MUFU")}
    rest = len(became) - sum(told.values())
    told |= {"others": rest} if rest else {}
    print(f"{text} …: " + ", ".join(f"{n} {name}" for name, n in told.items()))
ptx = [line.strip() for line in kernels[0].stages["ptx"].splitlines() if "wgmma.mma_async" in line]
print("one product in PTX: ", ptx[0].split("{")[0])
print("the same in SASS:   ", next(code for code in sass_of_line(kernels[0], "s_ij = tl.dot") if "HGMMA" in code))

# %% [markdown]
# The last line names the first register of the result, then where the factors lie in shared memory. The line of p becomes 64
# exponentials, `MUFU.EX2`, each with a multiply-add, `FFMA`: a tile has 4,096 scores, 32 for each of 128 threads, in each
# of the two loops.
#
# Line 8 has more than its 16 `HGMMA`. `STS` puts the tile of K into shared memory. The two `BAR.SYNC` of each loop are the
# barriers of chapter 07: the place is free, the tile is there. With three stages these are gone from this line: the
# copies go straight to shared memory (`LDGSTS`). `LDL` and `STL` would be spills.
#
# **Takeaway.** Count the instructions that must be there. The others are often the reason why a kernel is slow.

# %% [markdown]
# ## What are the warps waiting for?
#
# In the roofline of chapter 10, rung 07 is a point far right of the ridge and far under the roof: DRAM is not its limit.
# What is? The profiler *Nsight Compute*, `ncu`, reads the hardware's counters. Five are enough for a first look:
#
# | counter | what it says |
# | --- | --- |
# | tensor cores at work | share of the cycles; should be high |
# | issue slots used | share of the cycles in which some warp started an instruction |
# | stall: long_scoreboard | warps wait for numbers from L2 or DRAM |
# | stall: barrier | warps wait for other warps of their program |
# | stall: wait | warps wait a fixed few cycles for their own last instruction |
#
# A *stall* of 2 means: for each instruction that is started, warps spend two cycles in all waiting for this. As an example,
# rung 08 is rung 07 with `num_stages=3`. It executes nearly the same instructions.

# %% tags=["hide-input"]
from fa2_lab.tools import ladder as climbed

record = climbed.load(climbed.SUITE)
timed, counted = climbed.rows(record, "forward")[False], climbed.rows(record, "counters")
FIVE = ("tensor cores at work, %", "issue slots used, %", "stall: long_scoreboard", "stall: barrier", "stall: wait")
PAIR = ("r07_two_loops", "r08_pipelined")
moved = sum(counted[PAIR[0]].values[f"DRAM bytes {what}"][0] for what in ("read", "written"))
print(f"rung 07: {timed.flops / moved:,.0f} FLOPs for each byte of DRAM,",
      f"{timed.rate(PAIR[0]):.0f} TFLOP/s of the {record.ceilings['GEMM TFLOP/s']:.0f} of a GEMM\n")
print(f"{record.machine['gpu'] + ', recorded':27}" + "".join(f"{rung[:3]:>9}" for rung in PAIR))
print(f"{'milliseconds':27}" + "".join(f"{timed.values[rung][0]:9.2f}" for rung in PAIR))
for name in FIVE:
    print(f"{name:27}" + "".join(f"{counted[rung].values[name][0]:9.2f}" for rung in PAIR))

# %% [markdown]
# The waits for data fall to a sixth. The issue slots used rise by as much as the kernel gets faster. Now *wait* and
# *barrier* are the largest stalls. Chapter 12a goes after them. This is the command:

# %% tags=["nbval-ignore-output", "hide-input"]
import shutil

from fa2_studio.bench import counters
from fa2_studio.bench.ladder import MAIN

sizes = [MAIN.batch, MAIN.heads, MAIN.N_q, MAIN.d, int(MAIN.causal)]
room = "fa2_studio.bench.ladder"
print("ncu --clock-control none --profile-from-start off --metrics \\")
print(",\\\n".join(f"  {counters.METRICS[name]}" for name in FIVE), "\\")
print(f"  python -m fa2_studio.bench.counters {room} {' '.join(map(str, sizes))} r07_two_loops")
if device == "cuda" and shutil.which("ncu"):
    try:
        for rung, live in counters.read(room, MAIN, PAIR).items():
            print(rung, {name: round(live[name], 2) for name in FIVE if name in live})
    except RuntimeError as why:
        print(f"not read here: {why}")
else:
    print("not run here: it needs an NVIDIA GPU and ncu, which comes with the CUDA toolkit")

# %% [markdown]
# **Takeaway.** Name the largest stall, change the one thing that it names, and look again.

# %% [markdown]
# ## When do they wait?
#
# A *timeline* shows it. Here is one of a model: a program copies a tile (600 clocks), multiplies (256), and begins again. On
# a GPU, Triton's profiler *Proton* shows the same loop, below. It writes down a warp's clock wherever the code says
# `enter_scope` and `exit_scope` (`fa2_studio/inside.py`). Reading the clock takes time, too: trust the order, not the
# lengths.

# %% tags=["nbval-ignore-output", "hide-input"]
from fa2_lab.machine.asynchrony import Barrier, Block, Deadlock


def timeline(stretches, width=72):  # of (name, begin, length): a line for each name
    begin, end = min(t for _, t, _ in stretches), max(t + n for _, t, n in stretches)
    for lane in dict.fromkeys(name for name, *_ in stretches):
        mine = [(t - begin, t - begin + n) for name, t, n in stretches if name == lane]
        at = [(x + 0.5) * (end - begin) / width for x in range(width)]
        print(f"{lane:9} " + "".join("█" if any(a <= t < b for a, b in mine) else "·" for t in at))


def in_turns(block, T=4):
    for j in range(T):
        yield block.start("copy", 600, f"tile {j}").done()
        yield block.start("tensor", 256, f"tile {j}").done()


block = Block()
block.run(dict(warp=in_turns(block)))
print("the model")
timeline([({"copy": "copies", "tensor": "products"}[job.unit], job.begun, job.ended - job.begun) for job in block.jobs])

# %% tags=["nbval-ignore-output", "hide-input"]
import os
import subprocess
import sys

from fa2_lab.tools import files

LINE = re.compile(r"(copies|products) +from +(\S+) for +(\S+)(.*)")  # what inside.py prints
whose, printed = "recorded on an H200", (files.ROOT / "figures" / "data" / "inside.txt").read_text(encoding="utf-8")
if device == "cuda":
    command = [sys.executable, "-m", "fa2_studio.inside"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    if LINE.search(done.stdout):
        whose, printed = "on this GPU", done.stdout
    else:
        print("Proton cannot do it here:", (done.stderr.strip().splitlines() or ["no reason was given"])[-1])
clocked = LINE.findall(printed)
print("Proton, one warp,", whose)
timeline([(name, float(t), float(n)) for name, t, n, warp in clocked if warp == clocked[0][3]])

# %% [markdown]
# The tensor cores stand still during each copy. Both pictures are of a small loop that copies nothing ahead. Rung 08 copies
# ahead to fill such gaps.
#
# **Takeaway.** The counter says how much is waited for, the timeline says when.
#
# *This is the middle, and a good place for a break.*

# %% [markdown]
# ## How do you look inside a running kernel?
#
# In Triton's interpreter a kernel is plain Python. So `breakpoint()` stops it, and Python's debugger shows every tile. You
# get the interpreter on any machine if the variable `TRITON_INTERPRET=1` is set before Triton is imported. The kernel
# below computes $L = \log \sum_j e^{s_j}$ of a row of 10 numbers, in a block of 16 places.

# %%
@triton.jit
def log_sum_kernel(S, L, N, B: tl.constexpr, STOP: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, B)
    s = tl.load(S + row * N + column, mask=column < N, other=float("-inf"))
    m = tl.max(s, 0)
    if STOP:
        breakpoint()  # in the interpreter only: a compiled kernel has no debugger to stop in
    tl.store(L + row, m + tl.log(tl.sum(tl.exp(s - m), 0)))

# %% tags=["nbval-ignore-output", "hide-input"]
import io
import pdb


def typed(commands, heard):  # a debugger whose keyboard is a text
    debugger = pdb.Pdb(stdin=io.StringIO(commands), stdout=heard, nosigint=True)
    return lambda: debugger.set_trace(sys._getframe(1))


S, L = torch.arange(10.0, device=device)[None], torch.full((1,), torch.nan, device=device)
interpreted = triton.knobs.runtime.interpret
heard, commands = io.StringIO(), ("p s", "p m.handle.data", "c")
sys.breakpointhook = typed("\n".join(commands) + "\n", heard)
log_sum_kernel[(1,)](S, L, 10, B=16, STOP=bool(interpreted))
sys.breakpointhook = sys.__breakpointhook__
answers = re.split(r"(?:\(Pdb\)|ipdb>) ", heard.getvalue())[1:]  # the debugger's prompt, here and in Jupyter
for command, answer in zip(commands[:2], answers, strict=False):
    print(f"(Pdb) {command}\n{answer.rstrip()}")
if not interpreted:
    print("compiled here, so nothing stopped: start Jupyter with TRITON_INTERPRET=1 to see it")
print("L =", round(L.item(), 6), " by torch", round(torch.logsumexp(S, 1).item(), 6))


# %% [markdown]
# `m.handle.data` is the array behind `m`. The mask keeps the load away from the last six places: they hold −∞.
#
# A compiled kernel cannot be stopped like this. Two tools work on a GPU. `tl.device_print` prints a value with the number
# of its program, once for *each thread*: let one program print. `compute-sanitizer` reports every access outside an
# allocation. PyTorch allocates in large pieces, so an access past a tensor may stay inside one. The variable that begins the
# command below gives each tensor an allocation of its own.

# %% tags=["nbval-ignore-output", "hide-input"]
@triton.jit
def telling_kernel(S, N, B: tl.constexpr):
    column = tl.arange(0, B)
    s = tl.load(S + tl.program_id(0) * N + column, mask=column < N, other=float("-inf"))
    if tl.program_id(0) == 1:
        tl.device_print("maximum", tl.max(s, 0))


telling_kernel[(4,)](torch.arange(40.0, device=device), 10, B=16)


# %% tags=["nbval-ignore-output", "hide-input"]
from inspect import getsource

from fa2_studio import stray

print(getsource(stray.stray_kernel.fn))
whose, told = "recorded on an H200", (files.ROOT / "figures" / "data" / "stray.txt").read_text(encoding="utf-8")
if device == "cuda" and shutil.which("compute-sanitizer"):
    options = "--tool memcheck --print-limit 1 --show-backtrace no".split()
    command = ["compute-sanitizer", *options, sys.executable, "-m", "fa2_studio.stray"]
    given = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
    whose, told = "on this GPU", subprocess.run(command, capture_output=True, text=True, env=given).stdout
print("PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m fa2_studio.stray")
print("compute-sanitizer,", whose)
print("\n".join(re.findall(r"=+ +(?=Invalid|at stray|by thread|Access|and is)(.*)", told)))


# %% [markdown]
# The tensor has 1,000 places, the kernel writes 4,096. The tool names the line of the store, the thread, and how far behind
# the tensor it wrote.
#
# **Takeaway.** Stop in the interpreter first. Print on the GPU if only the GPU shows it.

# %% [markdown]
# ## Case 1: it hangs
#
# **Symptom.** The kernel never ends. The GPU is at 100%, and there is no message.
#
# The suspect has two actors. A *producer* copies tiles of K and V into stages in shared memory, K one tile ahead of V. A
# *consumer* computes with them. With two stages for each it ran. Then somebody set `stages=1`. At the start all stages are
# empty. Each actor goes down its own column:
#
# | producer | consumer |
# | --- | --- |
# | wait until a stage for K is empty, copy K 0 | wait until K 0 is filled, compute $QK^\top$ |
# | wait until a stage for K is empty, copy K 1 | wait until V 0 is filled, compute $PV$ |
# | wait until a stage for V is empty, copy V 0 | call the stages of K 0 and V 0 empty |
# | … the same with K 2 and V 1 | … the same with K 1 and V 1 |
#
# The **tool** is a model: both actors as Python generators, which yield what they wait for. If everybody waits and no work is
# left, the model says who waits for what: a *deadlock*. (Chapter 12a explains the folded code.)
#
# **Predict.** One stage. The producer has filled K 0. Who waits for whom?

# %% tags=["hide-input"]
def attend(stages, early, T=4):
    block = Block()
    filled, emptied = ({X: [Barrier(f"{X} {what}", 1) for _ in range(stages)] for X in "KV"}
                       for what in ("filled", "emptied"))  # fmt: skip

    def fill(X, n):
        yield emptied[X][n % stages].over((n // stages & 1) ^ 1)
        block.start("copy", 600, f"{X} {n}", lambda: filled[X][n % stages].arrive("copy engine"))

    def producer():
        for n in range(T + 1):  # K one tile ahead of V
            yield from fill("K", n) if n < T else ()
            yield from fill("V", n - 1) if n > 0 else ()

    def consumer():
        for n in range(T):
            for X, product, done in (("K", "Q Kᵀ", "K" if early else ""), ("V", "P V", "V" if early else "KV")):
                yield filled[X][n % stages].over(n // stages & 1)
                yield block.start("tensor", 256, f"{product} {n}").done()
                for Y in done:
                    emptied[Y][n % stages].arrive("consumer")

    return block.run(dict(producer=producer(), consumer=consumer())).clock


# %% tags=["hide-input"]
def outcome(stages, early):
    try:
        return f"{attend(stages, early):,.0f} clocks"
    except Deadlock as stuck:
        return f"hangs: {stuck}"


for early in (False, True):
    for stages in (2, 1):
        print(f"{'mended, ' if early else 'suspect,'} {stages} {'stages' if stages > 1 else 'stage'}: {outcome(stages, early)}")


# %% [markdown]
# <details><summary>Answer</summary>
#
# **Each waits for the other.** The producer waits until the stage of K 0 is empty, and does not come to V 0. The consumer
# waits for V 0, and calls the stage of K 0 empty only after it.
# </details>
#
# **Cause:** K is held longer than it is needed. It is free as soon as $QK^\top$ is done. In the mended version the consumer
# says so there. Then one stage is enough to run, and two are faster.
#
# On a GPU, let each actor write the number of its current wait into *pinned host memory*: the CPU can read it while the
# kernel hangs.
#
# **Takeaway.** Write down who waits for whom. If that chain closes into a circle, the kernel hangs.

# %% [markdown]
# ## Case 2: it is wrong now and then
#
# **Symptom.** The same call gives different answers. On one machine it is always right.
#
# The suspect computes one row block after the other (500 clocks). It puts $o$ into its one place in shared memory, *starts*
# a copy to HBM, and goes on with the next row block. A copy reads the place when it *ends*. In this model a block's right
# answer is its own number: 0, 1, 2, 3.
#
# **Predict.** What is stored if the copy takes 400 clocks? And if it takes 600?

# %% tags=["hide-input"]
def store_blocks(copy, wait, T=4):
    block, stage = Block(), np.zeros(1)  # one place in shared memory
    O = np.full(T, np.nan)  # poisoned: whoever forgets a block leaves NaN

    def worker():
        stored = None
        for i in range(T):
            yield block.start("tensor", 500, f"o {i}").done()
            if wait and stored:
                yield stored.done()
            stage[0] = i
            stored = block.start("copy", copy, f"O {i}", lambda i=i: O.__setitem__(i, stage[0]))

    block.run(dict(worker=worker()))
    return O, block.clock


# %% tags=["hide-input"]
for wait in (False, True):
    for copy in (400, 600):
        O, clocks = store_blocks(copy, wait)
        print(f"{'mended, ' if wait else 'suspect,'} copy of {copy} clocks: {O}, {clocks:,.0f} clocks")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **With 400, each block's own number.** The copy has ended before the place is used again. **With 600, the next block's**:
# the copy reads what the next block has put there. Only the last is right.
# </details>
#
# **Cause:** nobody waits until the copy has read. That is a *race*: the answer depends on who is first. The mended kernel
# waits as late as it can, so it costs nothing where the copy is quick.
#
# The **tool** is to change the speeds. On a GPU, run the call a thousand times and compare the bits. (`compute-sanitizer
# --tool racecheck` reports races in shared memory. The barriers of chapter 12a it does not see, so there it names right
# code, too.)
#
# **Takeaway.** If a result depends on a speed, there is a race, even if the result is right today.

# %% [markdown]
# ## Case 3: it is wrong by a little
#
# **Symptom.** With 16 columns the kernel is right. With 10 columns it is off in the first digits.
#
# The suspect computes $L$, too. Rows of S lie one after the other in memory. The mask says which places exist.

# %%
@triton.jit
def suspect_kernel(S, L, rows, N, stride, B: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, B)
    s = tl.load(S + at, mask=at < rows * stride, other=float("-inf"))
    m = tl.max(s, 0)
    tl.store(L + tl.program_id(0), m + tl.log(tl.sum(tl.exp(s - m), 0)))

# %% [markdown]
# **Predict.** Three rows of 10 numbers, blocks of 16 places. The last row is right. Why only the last?

# %% tags=["hide-input"]
def errors(kernel, S, N):
    L = torch.full((len(S),), torch.nan, device=device)
    kernel[(len(S),)](S, L, len(S), N, S.stride(0), B=16)
    return [f"{x:.0e}" for x in (L - torch.logsumexp(S[:, :N], 1)).abs().tolist()]


def fenced(S, width):
    wide = torch.full((len(S), width), torch.nan, device=device)
    wide[:, : S.shape[1]] = S
    return wide


S = torch.tensor(np.random.default_rng(0).standard_normal((3, 16)), dtype=torch.float32, device=device)
for width in (16, 10):
    wrong = [float(x) > 0.1 for x in errors(suspect_kernel, S[:, :width].contiguous(), width)]
    print(f"{width} columns: " + ", ".join(f"row {row} {'wrong' if off else 'right'}" for row, off in enumerate(wrong)))
S = S[:, :10].contiguous()
for gap in (0, 3):
    found = errors(suspect_kernel, fenced(S, 10 + gap), 10)
    print(f"10 columns, then {gap} places of NaN behind each row: {found.count('nan')} rows of 3 are NaN")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Behind the last row there is nothing.** Behind another row lies the next one, and its first six numbers join the sum.
# </details>
#
# **Cause:** the mask asks whether a place lies in the *tensor*. It must ask about the row. With 16 columns both say the
# same.
#
# The **tool** is a fence: put the rows further apart, and fill the gaps with NaN. Now every row that reads too far is NaN.
#
# **Takeaway.** Test at ragged sizes, with NaN behind every end. A wrong number may look healthy; NaN does not.

# %% [markdown]
# ## Can the fastest launch be found by trying?
#
# Time each launch, keep the fastest: an *autotuner* does that. `triton.autotune` does it at the first call, and
# `fa2-lab tune` for this package's kernels.
#
# **Predict.** Twenty launches are exactly equally fast, and each timing has an error of 1%. By how much does the winner seem
# to be faster than the true time: 0.2%, 2% or 20%?

# %% tags=["hide-input"]
rng = np.random.default_rng(0)
for repeats in (1, 7, 49):
    timings = rng.normal(1.0, 0.01, size=(2000, 20, repeats))  # 2,000 searches among 20 equal launches
    best = np.median(timings, axis=2).min(axis=1)
    print(f"median of {repeats:2}: the winner seems {1 - best.mean():.1%} faster than it is")
shapes = [row for row in record.rows if row.direction == "forward"]
loss = {}  # {winner of a shape: how much slower than the best it is where it is worst}
for row in shapes:
    winner = min(ladder.RUNGS[12:16], key=lambda rung: row.values[rung][0])
    best = [min(other.values[rung][0] for rung in ladder.RUNGS[12:16]) for other in shapes]
    loss[winner] = max(other.values[winner][0] / fast - 1 for other, fast in zip(shapes, best, strict=True))
print("\nof rungs 12 to 15, in the record:")
for winner in sorted(loss):
    print(f"{winner:18} is the fastest in some shape; where it does worst it is {loss[winner]:.0%} behind")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Nearly 2%.** The best of twenty equal launches is only the luckiest one.
# </details>
#
# Medians make the error smaller. If the winner is ahead by less than it, take the simpler launch. Three more traps:
#
# - The clock. A GPU lowers it when it draws much power (*throttling*). So time the launches in turns.
# - The shape. In the last lines one winner is at worst 4% behind in other shapes, another one 14%.
# - The result. A launch that wrongly skips tiles is fast. A kernel that *adds* to its output adds in every trial (the
#   autotuner's option `reset_to_zero` is for that). So compare results.
#
# **Takeaway.** Check the result, take turns, use medians, and try the winner at another shape.

# %% [markdown]
# ## Recap
#
# - Launch options change how many registers and how much shared memory a program takes. `fa2-lab xray` shows it.
# - The roofline says whether DRAM is the limit. Stalls say what the warps wait for, a timeline when.
# - A hang is a closed chain of waits. A race shows when speeds change. NaN behind every row shows a read too far.
# - A search needs the same care as a benchmark.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** How many programs fit on an SM? `registers` are those of one thread, already rounded up, and `shared` is
# in bytes, with what the system takes. Replace the `...`.
#
# <details><summary>Hint</summary>
#
# A warp has 32 threads. An SM has 65,536 registers, 228 KiB and 64 places. The smallest limit counts.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return min(65_536 // (32 * warps * registers), 228 * 1024 // shared, 64 // warps)
# ```
# </details>

# %%
def programs(registers, shared, warps):
    return ...


want = {(184, 50_176, 4): 2, (168, 115_712, 4): 2, (128, 8_192, 4): 4, (24, 1_024, 8): 8}
mine = {kernel: programs(*kernel) for kernel in want}
print("not written yet" if ... in mine.values() else "right" if mine == want else f"not yet: {mine}, and it should be {want}")

# %% [markdown]
# **2. Break and fix.** Mend the kernel of case 3. Change one line below, and run the cell until no row is NaN.
#
# <details><summary>Hint</summary>
#
# The mask should not know where the tensor ends.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# s = tl.load(S + at, mask=tl.arange(0, B) < N, other=float("-inf"))
# ```
# </details>

# %%
@triton.jit
def my_kernel(S, L, rows, N, stride, B: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, B)
    s = tl.load(S + at, mask=at < rows * stride, other=float("-inf"))
    m = tl.max(s, 0)
    tl.store(L + tl.program_id(0), m + tl.log(tl.sum(tl.exp(s - m), 0)))


print("rows that are NaN:", errors(my_kernel, fenced(S, 16), 10).count("nan"))


# %% [markdown]
# ## Ten questions on part III
#
# Chapters 08 to 11, without looking back. An answer opens when you click it.
#
# <details><summary>1. How does a Triton program know which rows are its own?</summary>
#
# From its `program_id`. It computes the addresses itself, and a mask says which of them exist.
# </details>
# <details><summary>2. A tile reaches past the last key. With what are the missing scores filled, and the missing rows of V?</summary>
#
# Scores with $-\infty$, so that their weight is 0. Rows of V with 0, because 0 times NaN would be NaN.
# </details>
# <details><summary>3. Why do kernels compute powers of two instead of exponentials?</summary>
#
# The hardware computes $2^x$. The factor $\log_2 e$ is folded into the scale, so it costs nothing.
# </details>
# <details><summary>4. A result changes when another kernel runs beside it. What is it, and how do you look for it?</summary>
#
# A race. Change the speeds of its parts until the wrong answer comes every time.
# </details>
# <details><summary>5. Why does a causal kernel have two loops over the key tiles?</summary>
#
# One for tiles that need no mask, one for those on the diagonal. Most tiles then skip the mask's work. The price is
# registers, as rung 07 shows in chapter 10.
# </details>
# <details><summary>6. Q, K and V have 16 bits. Why are o and ℓ kept in 32?</summary>
#
# A sum in 16 bits is rounded at every step, and may even overflow. A factor may be narrow.
# </details>
# <details><summary>7. What are the three kernels of the backward pass, and what does each own?</summary>
#
# D by rows, dK and dV by columns, dQ by rows.
# </details>
# <details><summary>8. dQ by atomic additions or in a second pass: what does each cost?</summary>
#
# Atomic additions come in no fixed order, so the last bits change from run to run, and their dQ takes fp32 memory of its own.
# The second pass takes seven products instead of five.
# </details>
# <details><summary>9. A kernel stands far right of the ridge and far under the roof. What do you read next?</summary>
#
# The stalls: what its warps wait for. DRAM is not the reason.
# </details>
# <details><summary>10. A change removes half of a unit's work, and the kernel is no faster. Why?</summary>
#
# Nobody was waiting for that unit.
# </details>

# %% [markdown]
# ## Checks
#
# What was compiled against what must come out, the models against the answers, and the text against the record.

# %% tags=["hide-input"]
from fa2_studio.bench.ladder import ON_AN_SM, programs_on_an_sm
from fa2_studio.book.verdicts import close, verdict

plain, staged, wide, narrow = (kernel.numbers for kernel in kernels)
verdict("shared memory: Q once, K and V for each stage", [plain["shared"], staged["shared"]] == [48 * 1024, 112 * 1024])
verdict("maxnreg is kept, and paid in spills", narrow["registers"] <= 128 and narrow["spills"] > staged["spills"] == 0)
verdict("8 warps: fewer registers for each thread", wide["warps"] == 8 and wide["registers"] < staged["registers"])
verdict("more stages take no more registers", staged["registers"] <= plain["registers"])
fit = [programs_on_an_sm(**{k: n[k] for k in ON_AN_SM}) for n in (plain, staged, wide, narrow)]
verdict("programs here = the bench's", fit == [min(fits(k.numbers)) for k in kernels] and fit[1] == fit[3] == 2)
limits = [fits(n) for n in (plain, staged, narrow)]
verdict("registers limit rung 07, shared memory the others", [x.index(min(x)) for x in limits] == [0, 1, 1] and limits[2][0] > limits[1][0])
verdict("exercise 1 asks for the same number", all(programs_on_an_sm(r, s - 1024, w) == n for (r, s, w), n in want.items()))
products, powers = (sass_of_line(kernels[0], text) for text in ("s_ij = tl.dot", "p_ij = tl.exp2"))
verdict("16 HGMMA in line 8", sum("HGMMA" in code for code in products) == 16)
made = [[sum(name in code for code in sass_of_line(k, "s_ij = tl.dot")) for name in ("STS", "BAR.SYNC")] for k in kernels[:2]]
verdict("rung 07 puts K into shared memory itself; with three stages it does not", min(made[0]) > 0 == max(made[1]))
verdict("two barriers in line 8 of each loop", made[0][1] == 4)
verdict("with three stages the copies are LDGSTS", any("LDGSTS" in code for line in kernels[1].lines.values() for code in line))
verdict("64 exponentials in line 9", sum("MUFU.EX2" in code for code in powers) == 64)

# %% tags=["hide-input"]
verdict("the model's timeline: the tensor cores wait for each copy", block.clock == 4 * (600 + 256))
stretches = Counter(name for name, *_ in clocked)
verdict("Proton's lines: four copies and four products of each of four warps", stretches == {"copies": 16, "products": 16})
verdict("the kernel in the debugger = torch", close(L.cpu(), [np.log(np.exp(np.arange(10.0)).sum())], 1e-6))
verdict("the suspect hangs with one stage only", "hangs" in outcome(1, False) and "clocks" in outcome(2, False))
verdict("with two stages the mended one is faster", attend(2, True) < attend(2, False))
verdict("the mended ring does not, and one stage is slower", attend(1, True) > 1.5 * attend(2, True) >= attend(3, True))
right = np.arange(4.0)
verdict("the mended store is right at any speed", all(close(store_blocks(c, True)[0], right) for c in (1, 400, 9000)))
verdict("the suspect is not", close(store_blocks(400, False)[0], right) and not close(store_blocks(600, False)[0], right))
verdict("a fence of NaN catches all rows", errors(suspect_kernel, fenced(S, 16), 10) == 3 * ["nan"])
before, after = (counted[rung].values for rung in PAIR)
stalls = {name: after[name][0] for name in after if name.startswith("stall: ")}
verdict("rung 08: waits for data fall to a sixth", round(before["stall: long_scoreboard"][0] / stalls["stall: long_scoreboard"]) == 6)
verdict("and wait and barrier are left", sorted(stalls, key=stalls.get)[-2:] == ["stall: barrier", "stall: wait"])
slots = after["issue slots used, %"][0] / before["issue slots used, %"][0]
verdict("more issue slots are used, by as much as it gets faster", abs(slots / timed.ratio(PAIR[1], PAIR[0]) - 1) < 0.03)
ridge = record.ceilings["GEMM TFLOP/s"] / record.ceilings["copy TB/s"]
verdict("rung 07: far right of the ridge, under half of the roof",
        timed.flops / moved > 5 * ridge and timed.rate(PAIR[0]) < record.ceilings["GEMM TFLOP/s"] / 2)
verdict("one winner is 10% behind elsewhere, one is not", max(loss.values()) > 0.1 > min(loss.values()))

# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, machine and rungs →](12a_hopper_rungs.ipynb)
