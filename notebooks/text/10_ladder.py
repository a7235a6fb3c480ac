# %% [markdown] tags=["navigation"]
# [← The Triton backward kernels](09_triton_backward.ipynb) · [The map](00_start.ipynb) · [Hopper, forward →](12_hopper_forward.ipynb)

# %% [markdown]
# # 10 · The ladder, measured
#
# **What did each change buy on a real GPU?**
#
# Nine notebooks counted: elements, FLOPs, tiles, waves, bytes through shared memory. A count is a promise. This notebook
# holds the promises against a clock and against the counters that the hardware keeps. First it asks how a GPU is timed
# at all, because a stopwatch that is used carelessly can report almost anything.
#
# After this notebook you can
#
# - time a GPU call so that somebody else gets the same number, and say what each rule of the protocol prevents,
# - read a chain of measured changes: which bought what, in which shape, and which bought nothing,
# - tell from FLOPs and DRAM bytes whether memory can be what a kernel waits for.
#
# *Time: 40 minutes. Hardware: any laptop; every measured number here was recorded on an NVIDIA H200 and is read from
# `figures/data`. Before this: [08 · The Triton forward kernel](08_triton_forward.ipynb).*

# %%
import statistics
from itertools import pairwise
from textwrap import fill

import torch

from fa2_lab.machine import chips, grid, io, time, warps
from fa2_lab.paper import where
from fa2_lab.plots import hbm_traffic, roofline, speed
from fa2_lab.plots.show import show
from fa2_lab.reference import naive
from fa2_lab.studio.bench import page, problem, protocol, suites
from fa2_lab.studio.bench.results import Results, load, table
from fa2_lab.studio.bench.results import machine as this_machine
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Tiling

recorded = {suite: load(suite) for suite in ("first_ladder", "paper", "small", "memory", "train")}
for suite, run in recorded.items():
    made = "{gpu}, torch {torch}, triton {triton}, {commit}".format(**run.machine)
    print(f"{suite:7} {made}: {len(run.rows)} rows")

# %% [markdown]
# ## What does a stopwatch around a call measure?
#
# The host does not run a kernel. It puts the kernel into a queue, which takes some microseconds, and goes on. The GPU
# works through the queue at its own pace. Here is that, with two clocks and nothing else.
#
# **Predict.** Putting a kernel into the queue takes 5 µs. We queue 100 kernels of 1,000 µs each and stop the watch when
# the last call returns. What does it show? And for 100 kernels of 2 µs?

# %%
def two_clocks(kernels, launch=5):  # µs
    host = gpu = 0
    for kernel in kernels:
        host += launch  # into the queue; nobody waits
        gpu = max(gpu, host) + kernel  # begins when it is there and the one before is done
    return host, gpu


for length in (1000, 2):
    host, gpu = two_clocks(100 * [length])
    print(f"100 kernels of {length:,} µs: host back after {host:,} µs, GPU done after {gpu:,} µs")

# %% [markdown]
# <details><summary>Two mistakes with one stopwatch</summary>
#
# With long kernels the watch shows 5 µs a call, 200 times too fast. The cure is to let the GPU stamp the time itself:
# two *events* in the queue, one before the call and one behind it. With short kernels the GPU waits for the host, and
# even perfect events show 5 µs, because that is how often a kernel arrives. Then the host is what you measure. The package
# keeps the GPU busy with something else until all of a call is in the queue, and times the host by itself.
# </details>
#
# So the host's cost deserves a number of its own. Recorded on the H200, bf16, 8 heads, d = 64, no mask: how long the host
# is busy with one forward call. `fa2_lab` is the package's `attention()` with whatever kernel it chooses; `fa2_lab portable`
# its plain Triton kernels, called directly. `torch flash` is the FlashAttention-2 that comes with torch, `cuDNN` NVIDIA's
# own kernel, FlexAttention torch's compiler for attention. They will be back.

# %%
for row in recorded["small"].rows[:3]:
    busy = ", ".join(f"{name} {µs:.0f} µs" for name, (µs,) in row.values.items())
    print(f"N = {row.problem['N_q']}: {busy}")

# %% [markdown]
# These are times of the host alone: our call checks its arguments and launches from Python, torch's does both in C++. Where
# a kernel takes a millisecond, nobody notices.
#
# **Takeaway.** Time on the GPU's clock, with events; and know the size below which you time the host.

# %% [markdown]
# ## Which of twenty numbers is the time?
#
# The first call of a Triton kernel compiles it. The next ones find cold caches and a GPU that is still raising its clock.
# Later, now and then, something else runs on the machine.
#
# **Predict.** The true time is 1.00 ms. Below are 23 calls: three slow at the start, one disturbed, the others within 1%.
# Which of these comes within 1% of the truth: the mean of all, the mean without the first three, the median without
# them?

# %%
def middle(ms):  # the median, and the middle half around it
    low, _, high = statistics.quantiles(ms, n=4)
    return statistics.median(ms), low, high


calls = [800.0, 1.3, 1.1] + [1.0 + 0.001 * (n % 7 - 3) for n in range(20)]
calls[12] = 4.0  # somebody else's turn
warm = calls[3:]
print(f"mean of all {statistics.mean(calls):.2f} ms; without warm-up {statistics.mean(warm):.2f}")
print("median without warm-up {:.3f} ms, middle half from {:.3f} to {:.3f}".format(*middle(warm)))

# %% [markdown]
# <details><summary>Why not the minimum?</summary>
#
# The minimum is the luckiest call, and luck grows with the number of calls. The median asks for the ordinary call, and
# one disturbed call in twenty cannot move it. The middle half says how far to trust it: two medians whose middle
# halves overlap have not been told apart.
# </details>
#
# **Takeaway.** Warm up, repeat, take the median, and report the spread beside it.

# %% [markdown]
# ## Twins that are not equally fast
#
# A GPU under load gets warmer and lowers its clock. Suppose every call is 0.2% slower than the call before. A and B are
# the same kernel, timed 20 times each.
#
# **Predict.** All calls of A, then all of B: by how much does B lose? And if they alternate, A B A B …? Which order makes
# twins equal?

# %%
def handicap(order, drift=0.002):  # median of B over median of A, for twins
    times = {"A": [], "B": []}
    for call, name in enumerate(order):
        times[name].append(1 + drift * call)
    return statistics.median(times["B"]) / statistics.median(times["A"])


print(f"A…A B…B  {handicap('A' * 20 + 'B' * 20):.4f}")
print(f"ABAB…    {handicap('AB' * 20):.4f}")
print(f"ABBA…    {handicap('ABBA' * 10):.4f}")

# %% [markdown]
# <details><summary>What the package does</summary>
#
# One after the other, B looks 4% slower than itself: as much as many published improvements. In turns, B keeps a
# disadvantage of one call. If the order of the turns changes from round to round, that goes too: the package lets all
# contestants take turns and rotates who begins. It also means that a ratio holds within one run only. The same code
# moved by up to 5% from run to run on the machine that recorded these data, so we compare inside a run, never across.
# </details>
#
# **Takeaway.** Contestants take turns, in an order that rotates; ratios come from one run.

# %% [markdown]
# ## Is the second call the same as the first?
#
# The H200's L2 cache holds 60 MiB, and what lies there is not read from DRAM again. A benchmark calls the same function
# on the same tensors over and over. Below, a cache that throws out what was used longest ago; a call reads Q, K and V
# once, in pieces of 1 MiB.
#
# **Predict.** Two shapes in bf16 with N = 4,096 and d = 64: 8 heads (12 MiB of Q, K, V) and 64 heads (96 MiB). How much
# does the third call read from DRAM in each?

# %%
def dram_reads(pieces, cache, calls=3, flush=False):  # misses of each call
    held, misses = [], []
    for _ in range(calls):
        held = [] if flush else held
        misses.append(0)
        for piece in range(pieces):
            misses[-1] += piece not in held
            held = [*(p for p in held if p != piece), piece][-cache:]  # the latest last
    return misses


cache = chips.H200.l2_bytes // 2**20  # MiB
for heads in (8, 64):
    pieces = 3 * heads * 4096 * 64 * 2 // 2**20
    plain, flushed = (dram_reads(pieces, cache, flush=flush) for flush in (False, True))
    print(f"{heads:2} heads, {pieces:2} MiB: {plain}; flushed {flushed}")

# %% [markdown]
# <details><summary>Why 96 MiB profit nothing from 60 MiB of cache</summary>
#
# When the call comes round to the first piece, it has been thrown out for later ones, and so has each piece just before
# its turn. (Hardware does not throw out strictly by age, so a real call keeps a part.) The small shape reads DRAM once
# and never again: its benchmark measures the L2 cache.
# </details>
#
# Neither is wrong. But a number should say which it is. Ours are taken with the L2 cache overwritten before each call.
#
# **Takeaway.** Say whether the inputs were in the cache; a benchmark's second call is not a network's first.

# %% [markdown]
# ## How fast is a wrong answer?
#
# A kernel that skips a tile it should visit is faster. Its output has the right shape and dtype and is full of plausible
# numbers.
#
# **Predict.** One attention leaves out the last eighth of the keys. By which factor is it faster, if time follows the
# FLOPs? And is its error nearer to 0.01 or to 1, with random inputs? (Error: ‖O − truth‖ / ‖truth‖.)

# %%
def lazy(q, k, v):  # 12.5% fewer FLOPs
    few = k.shape[2] * 7 // 8
    return torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :few], v[:, :, :few])


q, k, v = torch.randn(3, 1, 2, 256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
for name, attention in (("lazy", lazy), ("honest", torch.nn.functional.scaled_dot_product_attention)):
    wrong = problem.error(attention(q, k, v), q, k, v, causal=False)
    print(f"{name:6} error over 0.1? {wrong > 0.1!s:5}  timed: {wrong <= suites.TOLERANCE}")

# %% [markdown]
# <details><summary>And FLOP/s?</summary>
#
# 8/7, or 14% faster. The error is about √(1/7) = 0.38: rows of O are means of many random values, and means over
# different sets of them differ by as much as that. The bench computes 64 rows in float64 and times nobody whose error is above 0.02.
#
# A rate has a second trap. TFLOP/s here are the FLOPs of the *question*, 4 N² d a head, halved if causal, and two and a
# half times that backward, as the FA2 paper counts; not what a kernel happens to execute. Whoever computes masked
# tiles gets no credit for them.
# </details>
#
# **Takeaway.** Check before timing, and count the FLOPs of the question.

# %% [markdown]
# ## Do the changes multiply?
#
# Now the ladder: the same attention in Triton, one change from rung to rung. 0 *standard*, S and P in HBM. 1 *fa1*,
# Algorithm 2 of the FA1 paper as printed, one block per head. 2 *swapped* loops, a block for each row block. 3
# *deferred* division. 4 *skipping* causal tiles. 5 *tuned* blocks. 6 *descriptors*: tiles by bulk copy. Rungs 0 to 4
# share tiles of 64 × 64.
#
# A factor is the time of the rung before over the time of this rung. If a change were worth the same everywhere, its
# column would be constant. Rung 3, for instance, changes this:

# %%
print("rungs 1 and 2: ", where("FA1.A2.L15").triton[2].text.split("  #")[0].strip())
print("rung 3:        ", where("FA2.A1.L10").triton[0].text.split("  #")[0].strip())

# %% [markdown]
# **Predict.** Which change has the largest factor? For which does it depend on the number of heads? Which is below 1?

# %%
timed = [row for row in recorded["first_ladder"].rows if row.direction == "forward"]
rungs = [name for name in timed[0].values if not name.startswith("split")]


def factors(row):  # of each rung over the one before it
    return {new: row.values[old][0] / row.values[new][0] for old, new in pairwise(rungs)}


print("H200, bf16, N = 4,096 " + "".join(f"{name:>12}" for name in rungs[1:]))
for row in timed:
    p = row.problem
    shape = f"{p['batch'] * p['heads']:2} heads d {p['d']:3} {'causal' if p['causal'] else 'full'}"
    print(f"{shape:22}" + "".join(f"{factor:12.2f}" for factor in factors(row).values()))

# %% [markdown]
# Read it column by column.
#
# *fa1* is slower than standard attention, everywhere: as printed it has one block per head, and its row state makes the
# way to HBM at every tile. *swapped* is the change that matters. *deferred* buys nothing here, and at d = 64 it loses up to
# 30% of the speed. *skipping* is worth about 2 where there is something to skip, and about 1 where not. *tuned* is worth
# up to 2. *descriptors* mostly lose in this plain form: a mechanism of the hardware is not yet a gain.

# %% [markdown]
# Do they add? Then each would save the same milliseconds wherever it stands; a factor of 2 on whatever is left is the
# opposite. Along a chain they multiply to the total by construction. The question is whether the factors are independent,
# and they are not: *swapped* is worth about five times as much with 8 heads as with 64.

# %% [markdown]
# Notebook 06 has a model for that difference: blocks on 132 SMs.
#
# **Predict.** FA1 with 64 heads keeps 64 of 132 SMs busy, with 8 heads 8. By which factor does the row-block grid fill
# the GPU better in each case? What is left for "the state stays on chip"?

# %%
tiling = Tiling(4096, 4096, 64, 64)
for row in (timed[2], timed[6]):
    heads = row.problem["batch"] * row.problem["heads"]
    launches = (grid.fa1_grid(heads, tiling), grid.fa2_grid(heads, tiling))
    fa1, fa2 = (grid.schedule(blocks, chips.H200.SMs).utilisation for blocks in launches)
    gained, fuller = factors(row)["swapped"], fa2 / fa1
    print(f"{heads:2} heads, d 128, full: measured {gained:.1f} = {fuller:.0f} × {gained / fuller:.1f}")
gain = time.tweak_1(chips.H200, 64, 64, 128)
print(f"deferring the division, by the model of notebook 04: {gain.overlapped:.2f} to {gain.serial:.2f}")

# %% [markdown]
# <details><summary>What the second factor says, and what the model says about deferring</summary>
#
# By the model, filling the GPU is worth 2 and 16. The rest is what it saves to keep o, l and m on chip. It is smaller with 8
# heads, and a likely reason is the cache: what FA1 visits again and again, Q and its fp32 state, is 25 MB for 8 heads, which
# fits into L2, and 200 MB for 64, which does not. So the swap is two changes in one.
#
# For deferring, the model allows 0 to 5%: at these blocks the division was never what the kernel waited for. That some
# shapes lose up to 30% is not in the model. By the counters rung 3 issues 10% fewer exponentials and the same number of
# products; what else makes it slower at d = 64, we have not found out.
# </details>
#
# **Takeaway.** A change is worth what the kernel was waiting for: the loop swap when SMs were idle, skipping when there is
# a mask, deferring nothing when nobody waited for a division.

# %% [markdown]
# ## And the fourth change, the warps?
#
# FA2's last change splits the queries among the warps of a block instead of the keys. Triton chooses warps itself, so two
# small kernels force them: two warps, tiles of 32 × 64, d = 64 (H200, bf16, 64 heads). DRAM traffic is the same. Notebook
# 07 counted bytes through shared memory; the hardware counts *wavefronts*, passes of a warp through it.
#
# **Predict.** The model says split-K moves 1.4 times as many bytes through shared memory. Will split-Q be faster by
# less than that, or by more?

# %%
counters = [row for row in recorded["first_ladder"].rows if row.direction == "counters"]
counts = {(row.problem["d"], row.problem["rung"]): row.values for row in counters}
moved = {scheme: warps.tile_bytes(scheme, 32, 64, 64, 2) for scheme in ("split_k", "split_q")}
waves = {scheme: counts[64, scheme]["shared-memory wavefronts"][0] for scheme in ("split-K", "split-Q")}
print(f"model, bytes through shared memory: {moved['split_k'] / moved['split_q']:.1f} times")
print(f"counted wavefronts:                 {waves['split-K'] / waves['split-Q']:.1f} times")
print(f"measured time:                      {timed[0].ratio('split-Q', 'split-K'):.1f} times")

# %% [markdown]
# <details><summary>Why more than the bytes</summary>
#
# The model counts bytes that must cross. The compiler's reductions across warps take many more passes than that, and
# everybody waits at barriers meanwhile. Part of the measured factor belongs to these kernels and not to the idea: a split-K written by hand would lose less.
# </details>
#
# **Takeaway.** Split-Q wins because nothing crosses the warps; how much it wins depends on how badly the crossing is done.

# %% [markdown]
# ## Does the meter tell the truth?
#
# Since notebook 03 we count elements that cross HBM. The H200 counts bytes that DRAM moves. To compare, each tensor needs
# its item size: here S is fp32 and P bf16 in rung 0; O, l and m are fp32 while they travel in rung 1.
#
# **Predict.** For rung 1 the closed form gives 22.0 GB at d = 128 (64 heads, N = 4,096). What will DRAM say? And for
# rung 2, where every row block asks for all of K and V again, 8.7 GB in all?

# %%
def gigabytes(traffic, heads=64, **item):  # two bytes an element, unless said otherwise
    moved = [(tensor, n) for part in (traffic.loads, traffic.stores) for tensor, n in part.items()]
    return heads * sum(n * item.get(tensor, 2) for tensor, n in moved) / 1e9


def counted(rung, *names, d=128):
    return sum(counts[d, rung][name][0] for name in names) / 1e9


forms = dict(
    standard=gigabytes(io.standard_forward(tiling, 128), S=4, L=4),
    fa1=gigabytes(io.fa1_forward(tiling, 128), O=4, l=4, m=4),
    swapped=gigabytes(io.fa2_forward(tiling, 128), L=4),
)
print("GB, d = 128      closed form    DRAM counted")
for rung, form in forms.items():
    print(f"{rung:12}{form:16.1f}{counted(rung, *roofline.DRAM):16.1f}")

# %%
FA2 = ("swapped", "tuned", "fa2_lab portable", "fa2_lab")  # two rungs, and what the package itself runs
reads = {64: {}, 128: {}}
for d, found in reads.items():
    once = 64 * 3 * 4096 * d * 2 / 1e9
    found |= {rung: counted(rung, "DRAM bytes read", d=d) / once for rung in FA2}
    print(f"d = {d:3}, reads, Q, K and V once = 1:", ", ".join(f"{rung} {n:.3f}" for rung, n in found.items()))
asked = [gigabytes(io.fa2_forward(Tiling(4096, 4096, rows, 64), 128), L=4) for rows in (64, 192)]
through = ", ".join(f"{rung} {counted(rung, 'L2 bytes'):.1f}" for rung in FA2)
print("asked for with blocks of 64 rows {:.1f} GB, of 192 {:.1f}".format(*asked))
print(f"through L2: {through}")

# %% [markdown]
# <details><summary>Where have 8.7 GB gone?</summary>
#
# For standard attention and FA1 the form and the counter agree within 1%: matrices of that size fit into no cache. For
# rung 2 DRAM reads Q, K and V once. The tiles that all row blocks of a head ask for, 2 MiB of K and V at d = 128, are read
# from the L2 cache, which the paper's model does not have. Where the count is above 1, some tiles left the cache and came
# back. (Writes are left out here: of O a part is still in the cache when the counter stops.)
#
# What the row blocks ask for passes through L2: about what the form says for blocks of 64 rows, a third of it with the 192
# rows that `fa2_lab` takes here. In rung 2 less passes; the likely helper is the L1 cache, which blocks on the same SM
# share. On this chip, with these sizes, FA2's DRAM traffic can be at its floor: nothing is left to save there.
# </details>
#
# In the picture of notebook 03 two counters of rung 5 (N = 4,096, d = 64) stand as crosses: what passed through L2 lies
# near the lines, what DRAM moved lies on the floor of 4 N d elements:

# %%
show(hbm_traffic.draw(**hbm_traffic.data()))

# %% [markdown]
# **Takeaway.** The meter is right about what a kernel asks for; a cache decides how much of that reaches DRAM.

# %% [markdown]
# ## Which roof is above us?
#
# A kernel that does f FLOPs for each byte of DRAM traffic can reach no more than f times the bandwidth, and no more than
# the tensor cores give. The two limits meet at the *ridge*. Both are measured in the same run: a large matrix product
# (GEMM) and a large copy.
#
# **Predict.** Standard attention does 4 N² d FLOPs and moves about 12 N² bytes (S twice in fp32, P twice in bf16). At
# d = 128, how many FLOPs per byte is that? The ridge is at GEMM rate over copy rate: which side are you on?

# %%
ceiling = recorded["first_ladder"].ceilings
ridge = ceiling["GEMM TFLOP/s"] / ceiling["copy TB/s"]
print(f"standard, by hand: {4 * 128 / 12:.0f} FLOPs per byte; ridge at {ridge:.0f}")
show(roofline.draw(**roofline.data()))

# %% [markdown]
# <details><summary>How to read it</summary>
#
# Standard attention is left of the ridge, at two thirds of what the copy rate allows there: memory is its limit. FA1 as
# printed is further left, and yet far below the slope: its 64 busy SMs of 132 draw a third of the copy rate. From rung 2 on
# all are far right of the ridge. What they climb from there has nothing to do with DRAM; and the best of them stands well
# under the GEMM rate.
# </details>
#
# **Takeaway.** Left of the ridge, save bytes; right of it, find out what else the tensor cores are waiting for.

# %% [markdown]
# ## Where do we stand?
#
# The FA2 paper's grid: 16,384 tokens, hidden size 2,048, forward and backward. `fa2_lab portable` is like rung 5, with its
# backward: plain Triton that runs on every GPU. `fa2_lab` is what `attention()` chooses here: kernels that use what
# Hopper added, where they are faster. Peers in the same run: `torch flash`, FlexAttention, `cuDNN`, and
# `FlashAttention-4`, the newest package of FlashAttention's authors, which has kernels for Hopper, too. (FlashAttention-3 was
# not installed there.) Ratios are our speed over theirs: above 1, we are faster.
#
# **Predict.** In how many of the 24 forward shapes is a plain Triton kernel faster than torch's FlashAttention-2? Than
# cuDNN, which is written for this chip? And how much of the way to cuDNN is Hopper's?

# %%
for direction in ("forward", "backward"):
    rows = [row for row in recorded["paper"].rows if row.direction == direction]
    for us in ("fa2_lab portable", "fa2_lab"):
        for peer in ("torch flash", "FlexAttention", "cuDNN", "FlashAttention-4"):
            print(f"{direction:8} {us:16} over {peer:16}: {page.standing(rows, us, peer)}")
print(fill(page.plainly(recorded["paper"].rows, "cuDNN").replace("`", ""), 96))

# %%
show(speed.draw(**speed.data()))

# %% [markdown]
# <details><summary>What the two lines of ours say</summary>
#
# torch's FlashAttention-2 was written for the A100, and on this chip plain Triton overtakes it. What is between plain Triton
# and cuDNN is mostly the hardware: products that run beside the softmax, and copies that need no thread. The difference
# between our two lines is what it buys to say so in the kernel: notebooks 12 and 13.
# </details>
#
# With a GPU here, the next cell measures one small shape live.

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    here = problem.Problem(1, 8, 8, 1024, 1024, 64, causal=True)
    row = suites.contest(here, "forward", ("fa2_lab", "fa2_lab portable", "torch flash"))
    print(table(Results("live", this_machine(), protocol.PROTOCOL, rows=[row]), "torch flash"))
else:
    print("no GPU here: everything above was recorded on one")

# %% [markdown]
# **Takeaway.** Being faster than FlashAttention-2 on a newer chip is no feat; the distance to the matrix product is what
# counts.

# %% [markdown]
# ## Memory, and a model that does not notice
#
# Two promises are left: memory grows with N, not N²; and exact means exact, so a network trained with another attention
# must follow the same curve. Recorded: the peak of one call beyond its inputs (16 heads, d = 128, causal), and a small
# GPT trained for 200 steps with each backend, same seed and batches (bf16, context 4,096).
#
# **Predict.** From N = 2,048 to 65,536, by which factor does our peak grow? At which N does plain torch (`torch math`)
# run out of 141 GB? And how far may two loss curves drift apart in 200 steps of bf16?

# %%
for direction in ("forward", "both"):
    rows = [r for r in recorded["memory"].rows if r.direction == direction]
    ours = {r.problem["N_q"]: r.values["fa2_lab"][0] for r in rows}
    fits = {r.problem["N_q"]: r.values["torch math"][0] for r in rows if "torch math" in r.values}
    grown, doubled = ours[65536] / ours[2048], fits[16384] / fits[8192]
    print(f"{direction:8} fa2_lab ×{grown:.0f}, {ours[65536]:,.0f} MiB at N = 65,536;", end=" ")
    print(f"torch math ×{doubled:.1f} from 8,192 to 16,384, longest {max(fits):,}")
curves = recorded["train"].curves
apart = max(abs(a - b) for name in curves for a, b in zip(curves[name], curves["torch math"], strict=True))
first, *_, last = curves["fa2_lab"]
print(f"loss {first:.1f} to {last:.1f}; curves never further apart than 0.01: {apart < 1e-2}")
speeds = [f"{name} {recorded['train'].rows[1].ratio(name, 'torch math'):.1f}" for name in curves]
print("training speed over torch math:", ", ".join(speeds))

# %% [markdown]
# <details><summary>Linear, quadratic, and the same curve</summary>
#
# 32 times the tokens take 32 times the memory: O and L forward; backward D and three gradients on top, and in Hopper's
# backward dQ once more in fp32. Plain torch takes four times as much for twice the tokens, and at 32,768 it needs more
# than the GPU has. The loss curves of all backends stay together while the loss falls
# by 3: roundings differ, the function does not. Attention is only a part of the model, so the fused kernels lie nearer
# together here than above.
# </details>
#
# **Takeaway.** Memory is linear, the curve is the same curve, and only the bill differs.

# %% [markdown]
# ## The papers' own numbers, asked again
#
# The FA2 paper reports, on an A100: 3 to 10 times faster than standard attention, about 2 times faster than
# FlashAttention, 50 to 73% of the peak forward, and 1.7 to 1.8 times from skipping causal tiles.
#
# **Predict.** Which of the four will come out in the same range on an H200? Its tensor cores are 3.2 times as fast as the
# A100's, its exponentials 1.6 times.

# %%
forward = [row for row in recorded["paper"].rows if row.direction == "forward"]
peak = chips.H200.tensor_flops / 1e12
print("forward                            paper, A100   here, H200, bf16")
for base, claim in (("standard", "3 to 10"), ("fa1", "about 2")):
    over = [row.ratio("tuned", base) for row in timed]
    print(f"{'rung 5 over ' + base:35}{claim:14}{min(over):.1f} to {max(over):.1f}")
for name, claim in (("torch flash", "50 to 73%"), ("fa2_lab portable", ""), ("fa2_lab", ""), ("cuDNN", "")):
    share = max(row.rate(name) for row in forward) / peak
    print(f"{'share of the peak, ' + name:35}{claim:14}up to {share:.0%}")
at = {(r.problem["d"], r.problem["causal"]): r for r in forward if r.problem["N_q"] == 4096}
for name, claim in (("torch flash", "1.7 to 1.8"), ("fa2_lab portable", ""), ("fa2_lab", "")):
    d64, d128 = (at[d, False].values[name][0] / at[d, True].values[name][0] for d in (64, 128))
    print(f"{'causal skipping, ' + name:35}{claim:14}{d64:.2f} (d 64), {d128:.2f} (d 128), N 4096")

# %% [markdown]
# <details><summary>What to make of it</summary>
#
# The first and the last hold, more or less. The second does not compare the same things: the paper's rival was FlashAttention's tuned
# CUDA code, ours is its printed algorithm in the plainest Triton, so the factor says what the algorithm lacks and not
# what that library lacked. The third has fallen although the algorithm is the same: the peak grew by 3.2, and what feeds
# the tensor cores did not keep up. Against a product of the same run, instead of the datasheet, all
# shares would be a quarter larger; say which one you mean.
# </details>
#
# **Takeaway.** A ratio belongs to a chip, a baseline and a definition; without the three it is an anecdote.

# %% [markdown]
# ## Recap
#
# - Events, a head start, warm-up, medians, turns, a flushed cache, a check before: each keeps one kind of wrong number out.
# - The loop swap bought most: a factor for idle SMs, which depends on the heads, times one for the state that stays on chip.
# - Skipping is worth its factor of 2; tuning up to 2; deferring nothing on this chip; bulk copies alone nothing.
# - FA2's DRAM traffic can be at its floor; the L2 cache carries the loop over tiles.
# - Plain Triton overtakes torch's FlashAttention-2 on this chip; the way from there to cuDNN is Hopper's.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** Kernel X: 30 FLOPs per byte, 90 TFLOP/s on this H200. Kernel Y: 1,000 FLOPs per byte, 300 TFLOP/s. You may
# halve the DRAM traffic of one of them. Which?
#
# <details><summary>Hint</summary>
# Compare each with what the copy rate allows at its place.
# </details>
# <details><summary>Answer</summary>
# X. At 30 FLOPs per byte the copy rate of 4.3 TB/s allows 128 TFLOP/s, and X is at 70% of that. Y is far right of the
# ridge: with half the bytes it stands further right, at the same height.
# </details>
#
# **2. Complete.** Write `told_apart(a, b)`, which takes two rows' `[median, low, high]` and says whether their middle halves
# are disjoint. Are *swapped* and *deferred* told apart at 64 heads, d = 128, causal?
#
# <details><summary>Hint</summary>
# Two intervals are disjoint if one ends before the other begins.
# </details>
# <details><summary>Answer</summary>
#
# ```python
# def told_apart(a, b):
#     return a[2] < b[1] or b[2] < a[1]
# told_apart(timed[3].values["swapped"], timed[3].values["deferred"])
# ```
# True: the difference is small (the table above has it), but the two middle halves do not touch.
# </details>
#
# **3. Break and fix.** This benchmark reports that B is almost twice as fast as A, although they are twins. Three rules of this
# notebook are broken. Find the one that did it before you unfold the answer.

# %%
def clock(state):  # ms on a machine whose first call compiles, and which slows down call by call
    state["calls"] += 1
    return 1 + 0.002 * state["calls"] + (20 if state["calls"] == 1 else 0)


state = {"calls": 0}
times = {name: statistics.mean(clock(state) for _ in range(20)) for name in "AB"}
print(f"A over B: {times['A'] / times['B']:.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# No warm-up, a mean instead of a median, and no turns. The first two together did it: the compilation of the first call,
# 20 ms, spread over 20 calls, adds 1 ms to each call of A. The missing turns work the other way: B is measured later, on a slower machine.
# Two mistakes that partly cancel are no protocol.
# </details>

# %% [markdown]
# ## Ten questions on part III
#
# Chapters 08 to 10, without looking back. An answer opens when you click it.
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
# <details><summary>4. A kernel works in base 2. In which base does L leave it?</summary>
#
# As a natural logarithm, always.
# </details>
# <details><summary>5. Why does a causal kernel have two loops over the key tiles?</summary>
#
# One for tiles that need no mask, one for those on the diagonal. Most tiles then skip the mask's work.
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
# With atomic additions the order is open, so the last bits change. The second pass takes seven products instead of
# five.
# </details>
# <details><summary>9. Why is a GPU call not timed with the clock of the host?</summary>
#
# The call returns before the GPU is done. The host's clock would time the launch.
# </details>
# <details><summary>10. A change removes half of a unit's work, and the kernel is no faster. Why?</summary>
#
# Nobody was waiting for that unit.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the recorded numbers against the models.

# %%
kept = protocol.summary(warm)
verdict("middle here = protocol.summary", middle(warm) == (kept.median, kept.low, kept.high))
steps = [(row, old, new) for row in timed for old, new in pairwise(rungs)]
verdict("factors here = Row.ratio", all(factors(row)[new] == row.ratio(new, old) for row, old, new in steps))
points = roofline.data()["points"]
mine = {rung: timed[2].flops / 1e9 / counted(rung, *roofline.DRAM) for rung in rungs}
verdict("FLOPs per byte here = the roofline's", close([points[rung][0] for rung in rungs], list(mine.values())))
asked = problem.Problem(**timed[1].problem)
by_hand = 0.5 * 4 * 4096**2 * 64 * 64
same = timed[1].flops == by_hand == asked.flops("forward")
verdict("FLOPs of a row = 4 N² d a head, half if causal", same)
dense = naive.forward(*(x[0, 0].double().numpy() for x in (q, k, v)))[0]
truth = problem.rows_by_definition(q[:, :1], k[:, :1], v[:, :1], causal=False)
verdict("the bench's truth = the dense result", close(truth, dense[-64:]))

# %%
versions = {"gpu", "driver", "torch", "triton"}
verdict("each record names its GPU and versions", all(versions <= set(r.machine) for r in recorded.values()))
for rung in ("standard", "fa1"):
    off = counted(rung, *roofline.DRAM) / forms[rung] - 1
    verdict(f"{rung}: DRAM bytes within 2% of the closed form", abs(off) < 0.02)
for d in (64, 128):
    near = [rung for rung, n in reads[d].items() if abs(n - 1) < 0.05]
    verdict(f"d = {d}: DRAM reads Q, K and V once, within 5%: {', '.join(near)}", "swapped" in near)
verdict("rungs 2 to 6 stand right of the ridge", all(points[rung][0] > ridge for rung in rungs[2:]))
peaks = [row.values["fa2_lab"][0] for row in recorded["memory"].rows if row.direction == "forward"]
verdict("memory doubles when N doubles, within 1%", all(abs(b / a - 2) < 0.02 for a, b in pairwise(peaks)))
verdict("loss curves agree to 1e-2 among all backends", apart < 1e-2 and len(curves) >= 3)

# %% [markdown]
# And what the text says of the record; if somebody records anew and one of these fails, the text must be written anew too.

# %%
def over(peer, us="fa2_lab portable"):
    return page.ratios(recorded["paper"].rows, us, peer)


verdict("plain Triton is ahead of torch flash everywhere", min(over("torch flash")) > 1)
verdict("and behind cuDNN in the middle", statistics.median(over("cuDNN")) < 1)
swaps = {heads: [factors(r)["swapped"] for r in timed if r.problem["heads"] == heads] for heads in (8, 16)}
verdict("the swap is worth more where there are fewer heads", min(swaps[8]) > 4 * max(swaps[16]))
verdict("deferring never gains 5%", max(factors(row)["deferred"] for row in timed) < 1.05)
masked = [factors(row)["skipping"] for row in timed if row.problem["causal"]]
verdict("skipping is worth 1.5 to 2.5 where there is a mask", 1.5 < min(masked) and max(masked) < 2.5)

# %% [markdown] tags=["navigation"]
# [← The Triton backward kernels](09_triton_backward.ipynb) · [The map](00_start.ipynb) · [Hopper, forward →](12_hopper_forward.ipynb)
