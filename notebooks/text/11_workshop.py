# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, forward →](12_hopper_forward.ipynb)

# %% [markdown]
# # 11 · The workshop
#
# **What does a GPU programmer do all day?**
#
# The chapters so far wrote kernels and timed them. This one is about the hours in between. A kernel is slower than
# expected, or it hangs, or its result is slightly wrong. Here are the tools, each used on a kernel that you know.
#
# After this notebook you can
#
# - read what the compiler made of a kernel: registers, shared memory, and the machine code of one line,
# - read five hardware counters, and say what a kernel waits for,
# - find a hang, a race and a wrong answer, each with the tool that shows it,
# - say what a search for the fastest launch may get wrong.
#
# *Time: 75 minutes with the questions. Hardware: any laptop with Linux; most of the chapter is compiled for an H200 that
# need not be here. Cells that need a GPU or one of NVIDIA's tools say so in one sentence where they are missing. Before
# this: [07 · Warps](07_warps.ipynb), [08 · The Triton forward kernel](08_triton_forward.ipynb) and [10 · The ladder,
# measured](10_ladder.ipynb).*

# %%
import io
import os
import pdb
import re
import shutil
import subprocess
import sys
from collections import Counter
from inspect import getsourcelines
from tempfile import NamedTemporaryFile

import numpy as np
import torch

from fa2_lab.kernels import ladder
from fa2_lab.machine.asynchrony import Barrier, Block, Deadlock
from fa2_lab.studio import ladder as climbed
from fa2_lab.studio.bench import counters
from fa2_lab.studio.bench.ladder import MAIN, programs_on_an_sm
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.studio.xray import xray_launches

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output"]
import triton
import triton.language as tl

interpreted = triton.knobs.runtime.interpret
print("kernels of this notebook:", "interpreted, line by line" if interpreted else "compiled for the GPU here")

# %% [markdown]
# ## What does the compiler make of a launch option?
#
# A Triton launch takes *launch options* beside the kernel's own arguments:
#
# | option | what it asks for |
# | --- | --- |
# | `num_warps` | how many warps share the program's tiles |
# | `num_stages` | into how many stages the tiles of a loop are copied ahead (pipelining, rung 08) |
# | `maxnreg` | at most so many registers for each thread |
#
# Rung 07 is the plain kernel: tiles of 64 × 64, d = 128, 4 warps, one stage. `xray_launches` compiles it for an H200 with
# other options. It runs nothing, so no GPU is needed. (In the shell: `fa2-lab xray 07 --num_stages 3`.)
#
# **Predict.** Shared memory holds the tile of Q once, and a tile of K and one of V for each stage. Each tile has
# 64 · 128 numbers of two bytes. How many KiB is that with one stage? With three?

# %% tags=["nbval-ignore-output"]
LAUNCHES = [{}, dict(num_stages=3), dict(num_stages=3, num_warps=8), dict(num_stages=3, maxnreg=128)]
kernels = [kernel for (kernel,) in xray_launches("07", LAUNCHES, "sm_90", d=128, causal=False)]
print(f"{'rung 07, for an H200':30}{'registers':>10}{'spills':>8}{'shared KiB':>12}{'instructions':>14}")
for launch, kernel in zip(LAUNCHES, kernels, strict=True):
    asked, n = ", ".join(f"{k}={v}" for k, v in launch.items()) or "as it is", kernel.numbers
    print(f"{asked:30}{n['registers']:10}{n['spills']:8}{n['shared'] / 1024:12.0f}{n['instructions']:14,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **48 and 112.** A tile has 16 KiB. One stage: Q, K and V, 3 · 16 = 48. Three stages: 16 + 3 · 32 = 112.
# </details>
#
# The pipeline takes no more registers, because the copies go straight to shared memory. With 8 warps twice as many threads
# share a tile, so each needs fewer registers. With `maxnreg=128` the four warps must do with less than they want. What has
# no room goes to memory and back: those are the *spills*.
#
# **Takeaway.** More stages cost shared memory. More warps spread the registers over more threads. A limit on registers
# costs spills.

# %% [markdown]
# ## How many programs fit on an SM?
#
# An SM of an H200 has 65,536 registers, 228 KiB of shared memory and room for 64 warps. As many programs run on it as fit
# into all three. The share of the 64 places that are taken is called *occupancy*. While one program waits, another can
# work.
#
# **Predict.** Rung 07 as it is: 4 warps of 32 threads, 177 registers for each thread, 48 KiB. How many programs fit, and
# which of the three limits them?

# %% tags=["nbval-ignore-output"]
def fits(n):  # programs by registers, by shared memory, by warps
    a_warp = 32 * (-(-n["registers"] // 8) * 8)  # registers are given out eight at a time
    a_program = n["shared"] + 1024  # the system takes 1 KiB of each program's shared memory
    return 65_536 // (a_warp * n["warps"]), 228 * 1024 // a_program, 64 // n["warps"]


for launch, kernel in zip(LAUNCHES, kernels, strict=True):
    asked = ", ".join(f"{k}={v}" for k, v in launch.items()) or "as it is"
    registers, shared, warps = fits(kernel.numbers)
    programs = min(registers, shared, warps)
    occupancy = programs * kernel.numbers["warps"] / 64  # places for warps that are taken
    print(f"{asked:26} by registers {registers}, by shared memory {shared}, by warps {warps}: {occupancy:.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two, by registers.** 177 registers are rounded up to 184. 184 · 128 threads are 23,552 registers, so two programs fit. By
# shared memory four would.
# </details>
#
# With three stages shared memory decides, and has room for two as well. In the last line `maxnreg` makes room for four by
# registers, and buys nothing. (These are the numbers of Triton 3.8. The record of chapter 10 was made with Triton 3.6,
# which takes 180 registers.)
#
# With high occupancy, one program computes while another waits. A pipeline inside one program serves the same purpose.
# The fastest kernels of the ladder run *one* program on an SM.
#
# **Takeaway.** Work out all three limits. Only a change of the smallest one lets more programs run.

# %% [markdown]
# ## What does one line become?
#
# Between Triton and the GPU there are two assembly languages. *PTX* is NVIDIA's portable one, with names for registers that
# need not exist. *SASS* is what the chip executes. `fa2-lab where FA2.A1.L8 --sass` prints the machine code of a line of
# the paper. Here are two lines of rung 07, in the kernel that we have just compiled.
#
# One tensor-core instruction of Hopper, `HGMMA.64x64x16`, multiplies 64 × 16 by 16 × 64 and adds. All four warps start it
# together.
#
# **Predict.** The tile of line 8 is a product of 64 × 128 by 128 × 64, and the kernel has two loops. How many `HGMMA` does
# line 8 become?

# %% tags=["nbval-ignore-output", "hide-input"]
def sass_of_line(kernel, text):  # the instructions of the line of `visit` that begins like this
    source, first = getsourcelines(ladder.load("r07_two_loops").visit.fn)
    (line,) = (first + n for n, code in enumerate(source) if code.strip().startswith(text))
    return kernel.lines[f"r07_two_loops.py:{line}"]


for text in ("s_ij = tl.dot", "p_ij = tl.exp2"):
    became = sass_of_line(kernels[0], text)
    counts = Counter(re.sub(r"^@!?U?P\w+ ", "", code).split()[0] for code in became)
    print(f"{text} …: " + ", ".join(f"{n} {name}" for name, n in counts.most_common(5)))
ptx = [line.strip() for line in kernels[0].stages["ptx"].splitlines() if "wgmma.mma_async" in line]
print("one product in PTX: ", ptx[0].split("{")[0])
print("the same in SASS:   ", next(code for code in sass_of_line(kernels[0], "s_ij = tl.dot") if "HGMMA" in code))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Sixteen.** 128 / 16 = 8 for each loop.
# </details>
#
# Line 9 becomes 64 exponentials, `MUFU.EX2`: a tile has 4,096 scores, so each of 128 threads has 32 in each of the two loops.
# `FFMA` beside them is a multiplication and an addition in one: the scale and the maximum. (`BF16` is the other type of 16
# bits, for which we compiled.)
#
# In line 8 there is more than products. `STS` puts the tile of K into shared memory, and `BAR.SYNC` waits until all warps
# have done so. With three stages they are gone. Look in SASS for what you did not write, and for `LDL` and `STL`, which
# are spills.
#
# **Takeaway.** Count the instructions that must be there. The others are the compiler's, and often they are the reason
# why a kernel is slow.

# %% [markdown]
# ## What are the warps waiting for?
#
# By the roofline of chapter 10, DRAM is not what limits rung 07: like all rungs from 03 on, it lies far right of the
# ridge. Still it reaches less than half of what the tensor cores can do. The roofline says what is *not* the reason.
# It does not say what is.
#
# NVIDIA's profiler *Nsight Compute*, `ncu`, reads counters that the hardware keeps. Five are enough for a first look:
#
# | counter | what it says |
# | --- | --- |
# | tensor cores at work | share of the cycles; the goal |
# | issue slots used | share of the cycles in which some warp started an instruction |
# | stall: long_scoreboard | warps that wait for numbers from L2 or DRAM |
# | stall: barrier | warps that wait for other warps of their program |
# | stall: wait | warps that wait for their own last instruction, a fixed few cycles |
#
# A *stall* of 2.76 means: whenever an instruction starts, 2.76 warps on average are waiting for this.

# %% [markdown]
# Rung 07 copies a tile, then computes with it, then copies the next one. Rung 08 is the same code with `num_stages=3`.
#
# **Predict.** Which of the five counters falls most? Does the number of bytes from DRAM fall, too?

# %% tags=["hide-input"]
record = climbed.record()
timed, counted = climbed.rows(record, "forward")[False], climbed.rows(record, "counters")
FIVE = ("tensor cores at work, %", "issue slots used, %", "stall: long_scoreboard", "stall: barrier", "stall: wait")


def compare(before, after, names):
    print(f"{record.machine['gpu']}, recorded{before[:3]:>22}{after[:3]:>9}")
    print(f"{'milliseconds':36}{timed.values[before][0]:9.2f}{timed.values[after][0]:9.2f}")
    for name in names:
        a, b = (counted[rung].values[name][0] for rung in (before, after))
        print(f"{name:36}" + (f"{a / 1e6:7,.0f} M{b / 1e6:7,.0f} M" if "bytes" in name else f"{a:9.2f}{b:9.2f}"))


compare("r07_two_loops", "r08_pipelined", (*FIVE, "DRAM bytes read"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The waits for memory. The bytes stay.** In rung 07 nearly three warps wait for memory whenever an instruction starts. With
# the copies ahead, it is less than one in two.
# </details>
#
# The tensor cores work 56% of the time instead of 34%, and the kernel is 1.6 times as fast. Not one byte less was read: it
# was read earlier. More issue slots are used, because warps wait less. (A change that needs fewer instructions lowers this
# counter. So it is neither good nor bad by itself.) What is left is *barrier* and *wait*: chapter 12 goes after them.
#
# The exact command is printed below. On a machine with a GPU and `ncu` the cell also runs it.

# %% tags=["nbval-ignore-output", "hide-input"]
sizes = [MAIN.batch, MAIN.heads, MAIN.N_q, MAIN.d, int(MAIN.causal)]
room = "fa2_lab.studio.bench.ladder"
print("ncu --clock-control none --profile-from-start off --metrics \\")
print(",\\\n".join(f"  {counters.METRICS[name]}" for name in FIVE), "\\")
print(f"  python -m fa2_lab.studio.bench.counters {room} {' '.join(map(str, sizes))} r07_two_loops")
if device == "cuda" and shutil.which("ncu"):
    try:
        for rung, live in counters.read(room, MAIN, ["r07_two_loops", "r08_pipelined"]).items():
            print(rung, {name: round(live[name], 2) for name in FIVE if name in live})
    except RuntimeError as why:
        print(f"not read here: {why}")
else:
    print("not run here: it needs an NVIDIA GPU and ncu, which comes with the CUDA toolkit")

# %% [markdown]
# **Takeaway.** Name the largest stall, change the one thing that it names, and look again.

# %% [markdown]
# ## How do you look inside a running kernel?
#
# In Triton's interpreter a kernel is plain Python. So `breakpoint()` stops it, and Python's debugger shows every tile. You
# get the interpreter on any machine if the variable `TRITON_INTERPRET=1` is set before Triton is imported. The kernel
# below computes $L = \log \sum_j e^{s_j}$ of each row, as at the end of Algorithm 1.
#
# Below it is what the debugger shows: `p s` prints `s`, and the second command prints `m` as an array.
#
# **Predict.** Rows have 10 numbers, and the block has 16 places. What stands in the last six places of `s`?

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
def typed(commands, heard):  # a debugger whose keyboard is a text
    debugger = pdb.Pdb(stdin=io.StringIO(commands), stdout=heard, nosigint=True)
    return lambda: debugger.set_trace(sys._getframe(1))


S, L = torch.arange(10.0, device=device)[None], torch.full((1,), torch.nan, device=device)
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
# <details><summary>Answer</summary>
#
# **−∞.** The mask keeps the load away from them, and `other` puts −∞ there. So their exponential is 0.
# </details>
#
# A compiled kernel cannot be stopped like this. These tools work on a GPU:
#
# | tool | what it does | what to know |
# | --- | --- | --- |
# | `tl.device_print` | prints a value, with the number of its program | compiled, once for *each thread*: let one program print |
# | `compute-sanitizer` | reports every access outside an allocation | PyTorch takes memory in large pieces: set `PYTORCH_NO_CUDA_MEMORY_CACHING=1` |
# | Proton | writes down a warp's clock where you put `enter_scope` and `exit_scope` | reading the clock takes time: trust the order, not the last digits |
#
# The three cells below use them, the last two only where there is a GPU. `fa2_lab/studio/inside.py` has a kernel with
# Proton's marks.

# %% tags=["nbval-ignore-output", "hide-input"]
@triton.jit
def telling_kernel(S, N, B: tl.constexpr):
    column = tl.arange(0, B)
    s = tl.load(S + tl.program_id(0) * N + column, mask=column < N, other=float("-inf"))
    if tl.program_id(0) == 1:
        tl.device_print("maximum", tl.max(s, 0))


telling_kernel[(4,)](torch.arange(40.0, device=device), 10, B=16)

# %% tags=["nbval-ignore-output", "hide-input"]
STRAY = """import torch, triton, triton.language as tl
@triton.jit
def stray(X): tl.store(X + tl.arange(0, 4096), 0.0)
stray[(1,)](torch.zeros(1000, device="cuda"))
torch.cuda.synchronize()
"""
print("PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python stray.py")
if device == "cuda" and shutil.which("compute-sanitizer"):
    with NamedTemporaryFile("w", suffix=".py") as script:
        print(STRAY, file=script, flush=True)
        command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, script.name]
        given = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        told = subprocess.run(command, capture_output=True, text=True, env=given).stdout
    print("\n".join([line for line in told.splitlines() if "Invalid" in line or "ERROR SUMMARY" in line][:3]))
else:
    print("not run here: it needs an NVIDIA GPU and compute-sanitizer, which comes with the CUDA toolkit")

# %% tags=["nbval-ignore-output", "hide-input"]
if device == "cuda":
    command = [sys.executable, "-m", "fa2_lab.studio.inside"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    print(done.stdout if done.returncode == 0 else f"Proton cannot do it here: {reason}")
else:
    print("no GPU here: on one, Proton prints when each warp began its copies and products, in clocks")

# %% [markdown]
# **Takeaway.** Stop in the interpreter first. Print on the GPU if only the GPU shows it. Let the sanitizer watch the
# memory.

# %% [markdown]
# ## Case 1: it hangs
#
# **Symptom.** The kernel never ends. The GPU is at 100%, and there is no message.
#
# The suspect has two actors. A *producer* copies tiles of K and V into stages in shared memory. A *consumer* computes with
# them. The producer copies K one tile ahead of V. With two stages for each it ran. Then somebody set `stages=1` to save
# memory. Tile by tile the two do this:
#
# | producer | consumer |
# | --- | --- |
# | wait until a stage for K is empty, copy K 0 | wait until K 0 is filled, compute $QK^\top$ |
# | wait until a stage for K is empty, copy K 1 | wait until V 0 is filled, compute $PV$ |
# | wait until a stage for V is empty, copy V 0 | call the stages of K 0 and V 0 empty |
# | … the same with K 2 and V 1 | … the same with K 1 and V 1 |
#
# The **tool** is a model: both actors as Python generators, which yield what they wait for. If everybody waits and no work is
# left, that is a *deadlock*, and the model says who waits for what. (Chapter 12 explains such models; here the code is
# folded.)
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
        print(f"{'mended, ' if early else 'suspect,'} {stages} stages: {outcome(stages, early)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Each waits for the other.** The producer waits until the stage of K 0 is empty, and does not come to V 0. The consumer
# waits for V 0, and calls the stage of K 0 empty only after it.
# </details>
#
# **Cause:** K is held longer than it is needed. It is free as soon as $QK^\top$ is done. In the mended version the consumer
# says so there. Then one stage is enough to run, though not to be fast: 4,792 clocks instead of 2,736.
#
# On a GPU, let each actor store the number of the wait that it has reached. The last numbers say who waits for what.
#
# **Takeaway.** Write down who waits for whom. If that chain closes into a circle, the kernel hangs.

# %% [markdown]
# ## Case 2: it is wrong now and then
#
# **Symptom.** The same call gives different answers. On one machine it is always right.
#
# The suspect stays on its SM and computes one row block after the other. It puts $o$ into shared memory and *starts* a copy
# to HBM, which takes a while. Then it goes on with the next row block. Here a block's right answer is its own number.
#
# **Predict.** Computing a block takes 500 clocks. What is stored if the copy takes 400? And if it takes 600?

# %%
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


for wait in (False, True):
    for copy in (400, 600):
        O, clocks = store_blocks(copy, wait)
        print(f"{'mended, ' if wait else 'suspect,'} copy of {copy} clocks: {O}, {clocks:,.0f} clocks")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **With 400, each block's own number. With 600, the next block's.** With 400 the copy has ended before the place is used
# again. With 600 the copy reads what the next block has put there.
# </details>
#
# **Cause:** nobody waits until the copy has read. That is a *race*: the answer depends on who is first. The mended kernel
# waits as late as it can, so it costs nothing where the copy is quick.
#
# The **tool** is to change the speeds. In the model that is an argument. On a GPU, run the call a thousand times and
# compare the bits, or run it beside another kernel. `compute-sanitizer --tool racecheck` finds races between the threads of
# a block, but does not follow warps with different jobs (chapter 12).
#
# **Takeaway.** If a result depends on the speed of something, there is a race, even if the result is right today.
# Change the speeds to see it.

# %% [markdown]
# ## Case 3: it is wrong by a little
#
# **Symptom.** With 16 columns the kernel is right. With 10 it is off in the first digits, and the numbers look healthy.
#
# The suspect is the kernel from above, written by somebody else. Rows of S lie one after the other in memory. The mask says
# which places exist.
#
# **Predict.** Three rows of 10 numbers, blocks of 16 places. The last row is right. Why only the last?

# %%
@triton.jit
def suspect_kernel(S, L, rows, N, stride, B: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, B)
    s = tl.load(S + at, mask=at < rows * stride, other=float("-inf"))
    m = tl.max(s, 0)
    tl.store(L + tl.program_id(0), m + tl.log(tl.sum(tl.exp(s - m), 0)))

# %% tags=["hide-input"]
def errors(kernel, S, N):
    L = torch.full((len(S),), torch.nan, device=device)
    kernel[(len(S),)](S, L, len(S), N, S.stride(0), B=16)
    return [f"{x:.0e}" for x in (L - torch.logsumexp(S[:, :N], 1)).abs().tolist()]


draw = np.random.default_rng(0).standard_normal
for N in (16, 10):
    wrong = [float(x) > 0.1 for x in errors(suspect_kernel, torch.tensor(draw((3, N)), dtype=torch.float32, device=device), N)]
    print(f"{N} columns: " + ", ".join(f"row {row} {'wrong' if off else 'right'}" for row, off in enumerate(wrong)))

# %% [markdown]
# The **tool** is a fence. Put the rows further apart and fill the gaps with NaN. A kernel that reads only its own rows
# gives the same result as before. If it reads one number too many, its result is NaN.

# %%
def fenced(S, width):
    wide = torch.full((len(S), width), torch.nan, device=device)
    wide[:, : S.shape[1]] = S
    return wide


S = torch.tensor(draw((3, 10)), dtype=torch.float32, device=device)
for width in (10, 13, 16):
    found = errors(suspect_kernel, fenced(S, width), 10)
    print(f"{width - 10} places of NaN behind each row: {found.count('nan')} rows of 3 are NaN")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Behind the last row there is nothing.** Behind another row lies the next one, and its first six numbers join the sum.
# </details>
#
# **Cause:** the mask asks whether a place lies in the *tensor*. It must ask about the row: `tl.arange(0, B) < N`. With 16
# columns both masks say the same. That is why a test needs a ragged size.
#
# **Takeaway.** Test at ragged sizes, with NaN behind every end. A wrong number may look healthy; NaN does not.

# %% [markdown]
# ## Can the fastest launch be found by trying?
#
# Tiles, warps and stages can be searched: compile each, time each, keep the fastest. `fa2-lab tune` does it for this
# package's kernels, and `triton.autotune` does it at the first call. Such an *autotuner* measures, and usually nobody
# checks its measurements.
#
# **Predict.** Twenty launches are exactly equally fast, and each timing has an error of 1%. By how much does the winner seem
# to be faster than the true time?

# %%
rng = np.random.default_rng(0)
for repeats in (1, 7, 49):
    timings = rng.normal(1.0, 0.01, size=(2000, 20, repeats))  # 2,000 searches among 20 equal launches
    best = np.median(timings, axis=2).min(axis=1)
    print(f"median of {repeats:2}: the winner seems {1 - best.mean():.1%} faster than it is")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Nearly 2%.** The best of twenty equal launches is only the luckiest one. Medians of repeated timings make the error
# smaller, but do not remove it.
# </details>
#
# Two launches are told apart only if one is faster by more than this noise. Otherwise take the simpler one. Three more traps:
#
# - The clock. A GPU lowers it when it draws much power; this is called *throttling*. The launch that is tried while the
#   chip is cold has an advantage.
# - The shape. A search at one shape finds what is best *there*. The cell below takes the winner of each recorded shape
#   among rungs 12 to 15, and looks where it does worst.
# - The result. A launch that skips tiles is fast. A kernel that *adds* to its output adds in every trial (`reset_to_zero` is
#   for that). `fa2-lab tune` compares each candidate's result with the default's before it times it.

# %% tags=["hide-input"]
shapes = [row for row in record.rows if row.direction == "forward"]
loss = {}  # {winner of a shape: how much slower than the best it is where it is worst}
for row in shapes:
    winner = min(ladder.RUNGS[12:16], key=lambda rung: row.values[rung][0])
    best = [min(other.values[rung][0] for rung in ladder.RUNGS[12:16]) for other in shapes]
    loss[winner] = max(other.values[winner][0] / fast - 1 for other, fast in zip(shapes, best, strict=True))
for winner in sorted(loss):
    print(f"{winner:18} wins somewhere; where it does worst it is {loss[winner]:.0%} slower than the best")

# %% [markdown]
# One winner is safe elsewhere, the other is not. The search that found it would have told you nothing about that.
#
# **Takeaway.** Check, take turns, use medians, and try the winner at another shape. If it wins by less than the noise,
# keep the simpler one.

# %% [markdown]
# ## Recap
#
# - Launch options cost registers, shared memory and spills. `fa2-lab xray` shows how much, without a GPU.
# - The roofline says whether DRAM is the limit. Stalls say what the warps wait for.
# - A hang is a closed chain of waits. A race shows when speeds change. NaN behind every row shows a read too far.
# - A search measures. It needs the same care as a benchmark.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** How many stages of rung 07's tiles fit if one program may use all of an SM's shared memory? An SM has 228
# KiB, of which the system takes 1. Q takes 16 KiB, each stage 32. Replace the `...`.
#
# <details><summary>Hint</summary>
#
# What is left after Q, divided by the size of a stage, rounded down.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# stages = (227 - 16) // 32
# ```
# Six. But with six stages one program fills an SM, and the two programs of today could no longer hide each other's waits.
# </details>

# %%
stages = ...
if stages is ...:
    print("not written yet")
else:
    print("right" if 16 + 32 * stages <= 227 < 16 + 32 * (stages + 1) else "not yet")

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
plain, staged, wide, narrow = (kernel.numbers for kernel in kernels)
verdict("shared memory: Q once, K and V for each stage", [plain["shared"], staged["shared"]] == [48 * 1024, 112 * 1024])
verdict("maxnreg is kept, and paid in spills", narrow["registers"] <= 128 and narrow["spills"] > staged["spills"] == 0)
verdict("8 warps: fewer registers for each thread", wide["warps"] == 8 and wide["registers"] < staged["registers"])
fit = [programs_on_an_sm(**{k: n[k] for k in ("registers", "shared", "warps")}) for n in (plain, staged, wide, narrow)]
verdict("programs here = the bench's", fit == [min(fits(k.numbers)) for k in kernels] and fit[1:] == [2] * 3)
products, powers = (sass_of_line(kernels[0], text) for text in ("s_ij = tl.dot", "p_ij = tl.exp2"))
verdict("16 HGMMA in line 8", sum("HGMMA" in code for code in products) == 16)
stores = [sum("STS" in code for code in sass_of_line(k, "s_ij = tl.dot")) for k in kernels[:2]]
verdict("rung 07 puts K into shared memory itself; with three stages it does not", stores[0] > 0 == stores[1])
verdict("64 exponentials in line 9", sum("MUFU.EX2" in code for code in powers) == 64)

# %% tags=["hide-input"]
verdict("the kernel in the debugger = torch", close(L.cpu(), [np.log(np.exp(np.arange(10.0)).sum())], 1e-6))
verdict("the suspect hangs with one stage only", "hangs" in outcome(1, False) and "clocks" in outcome(2, False))
verdict("the mended ring does not", all("clocks" in outcome(n, True) for n in (1, 2, 3)))
right = np.arange(4.0)
verdict("the mended store is right at any speed", all(close(store_blocks(c, True)[0], right) for c in (1, 400, 9000)))
verdict("the suspect is not", close(store_blocks(400, False)[0], right) and not close(store_blocks(600, False)[0], right))
verdict("a fence of NaN catches all rows", errors(suspect_kernel, fenced(S, 16), 10) == 3 * ["nan"])
values = {rung: counted[rung].values for rung in ("r07_two_loops", "r08_pipelined")}
before, after = (v["stall: long_scoreboard"][0] for v in values.values())
verdict("rung 08: waits for memory fall by more than 5", before > 5 * after)
before, after = (v["DRAM bytes read"][0] for v in values.values())
verdict("rung 08: the same bytes within 1%", abs(before / after - 1) < 0.01)
verdict("one winner is 10% behind elsewhere, one is not", max(loss.values()) > 0.1 > min(loss.values()))

# %% [markdown] tags=["navigation"]
# [← The ladder, measured](10_ladder.ipynb) · [The map](00_start.ipynb) · [Hopper, forward →](12_hopper_forward.ipynb)
