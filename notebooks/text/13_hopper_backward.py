# %% [markdown] tags=["navigation"]
# [← Hopper, forward](12_hopper_forward.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)

# %% [markdown]
# # 13 · Hopper, backward
#
# **One pass over the columns: who adds up dQ?**
#
# Notebook 09 ended with two passes: a program that owns columns adds up dK and dV, another that owns rows adds up dQ, and
# both compute S and P. It was the price for a dQ that only one program writes. On Hopper the package's backward takes one
# pass after all, with the means of [12 · Hopper, forward](12_hopper_forward.ipynb): products that are started, a copy engine, rings and
# barriers. Each step is a small model first, then the line of the kernel. It has five products to feed instead of two,
# and one result that belongs to nobody.
#
# After this notebook you can
#
# - count what one pass saves, and what it costs,
# - follow a step of the kernel: who owns what, what goes through shared memory, and which waits can be left out,
# - say when column blocks have to be divided, and what sums in any order do to the bits.
#
# *Time: 35 minutes. Hardware: any laptop with Triton; on a Hopper GPU the last section runs the real kernel. Measured
# numbers were recorded on an NVIDIA H200 in bf16. Before this: [09 · The Triton backward
# kernels](09_triton_backward.ipynb), [12 · Hopper, forward](12_hopper_forward.ipynb).*

# %%
import random
from inspect import getsource
from textwrap import dedent
from unittest.mock import patch

import numpy as np
import torch
from IPython.display import Markdown

from fa2_lab.attention import attention
from fa2_lab.kernels.hopper.backward import kernel as backward
from fa2_lab.kernels.hopper.backward import launch, sums
from fa2_lab.kernels.hopper.backward.sizes import choose, parts_for
from fa2_lab.kernels.hopper.forward.launch import forward
from fa2_lab.kernels.prepared import Options
from fa2_lab.machine import chips, grid
from fa2_lab.machine import hopper_backward as model
from fa2_lab.machine.asynchrony import Barrier, Block, Deadlock
from fa2_lab.plots import backward_ideas, backward_pipes, ideas
from fa2_lab.plots.show import show
from fa2_lab.reference import fa2, naive
from fa2_lab.reference import heads as by_heads
from fa2_lab.studio.bench.results import load
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling

# %% tags=["nbval-ignore-output"]
on_gpu = torch.cuda.is_available()
on_hopper = on_gpu and torch.cuda.get_device_capability() == (9, 0)
print(torch.cuda.get_device_name() if on_gpu else "no GPU", "| Hopper:", on_hopper)
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))  # the package says once how it runs here


def source(*kernels):  # as it stands in fa2_lab/kernels/hopper, without the decorator
    for kernel in kernels:
        print(dedent(getsource(kernel.fn)).split("\n", 1)[1])

# %% [markdown]
# ## What does the second pass cost?
#
# For each tile one pass computes S and dP, then dV, dK and dQ: five products and one exponential for each score. In two
# passes S, dP and the exponentials come twice. In exchange nothing is added in HBM.
#
# **Predict.** A tile of 128 × 128 on an H200: how many clocks of one SM does the second pass add, at d = 64 and at 128? And
# how many bytes does one pass add into dQ for it, in fp32?

# %%
H200 = chips.H200


def tile(passes, d, B=128):  # clocks of products, clocks of exponentials, bytes added
    products = {1: 5, 2: 7}[passes] * 2 * B * B * d // H200.tensor_per_clock
    return products, passes * B * B // H200.exp_per_clock, B * d * 4 if passes == 1 else 0


print("                  products   exponentials   bytes added in HBM")
for d in (64, 128):
    for passes in (1, 2):
        products, exps, added = tile(passes, d)
        print(f"d = {d:3}, {passes} pass{'es' if passes > 1 else '  '} {products:8,} {exps:14,} {added:16,}")

# %% [markdown]
# <details><summary>Two products of seven, and half of the exponentials</summary>
#
# 2,048 clocks at d = 64, half of them for exponentials; 3,072 at d = 128. Against that stand 32 or 64 KiB of additions for
# each tile. Whether one pass pays depends on one thing: whether somebody can do these additions without anybody waiting.
# </details>
#
# **Takeaway.** One pass trades arithmetic for additions; it is worth what the additions do not cost.

# %% [markdown]
# ## Who owns what?
#
# A thread block takes 128 columns; each of two consumer warpgroups owns 64 of them, and keeps their dK and dV in registers
# while the rows go by. It computes Sᵀ and dPᵀ, keys down. Then Pᵀ and dSᵀ are already where a *left* operand may be: in
# registers, for dV = Pᵀ dO and dK = dSᵀ Q.
#
# **Predict.** One of the five products still needs an operand turned around. Which? And where must its result go?

# %%
def column_pass(Q, dO, L, D, k, v, B_r):  # one column block: k, v (B_c, d)
    dk, dv, dQ = np.zeros_like(k), np.zeros_like(v), np.zeros_like(Q)
    tau = Q.shape[1] ** -0.5
    for i in range(0, len(Q), B_r):
        q, do, lse, delta = Q[i : i + B_r], dO[i : i + B_r], L[i : i + B_r], D[i : i + B_r]
        s_t = -lse / tau + k @ q.T  # (B_c, B_r): keys down; the sum begins at −L/τ
        p_t = np.exp(tau * s_t)
        dv += p_t @ do  # left operand: registers
        ds_t = p_t * (-delta + v @ do.T)  # (B_c, B_r): this sum begins at −D
        dk += tau * (ds_t @ q)  # left operand: registers
        dQ[i : i + B_r] += tau * (ds_t.T @ k)  # turned: dS goes through shared memory
    return dk, dv, dQ


rng = np.random.default_rng(0)
Q, dO, K, V = *rng.standard_normal((2, 12, 4)), *rng.standard_normal((2, 16, 4))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=8)
D = (dO * O).sum(axis=1)
parts = [column_pass(Q, dO, L, D, K[j : j + 8], V[j : j + 8], 4) for j in (0, 8)]
dK, dV, parts_of_dQ = zip(*parts, strict=True)
got = sum(parts_of_dQ), np.vstack(dK), np.vstack(dV)
want = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=8)
print("dQ, dK, dV of one pass:", [close(x, y) for x, y in zip(got, want, strict=True)])

# %% [markdown]
# <details><summary>The one that hurts</summary>
#
# dQ = dS K sums over keys, so dS must be turned, and keys of both consumers count. The result belongs to no column block:
# each adds to all rows of dQ, in HBM, in fp32.
#
# The sums of S and dP begin at −L/τ and −D, in the accumulator, so the tensor cores do the subtractions. A masked entry
# begins at −∞.
# </details>
#
# **Takeaway.** What is summed over cannot be owned: dK and dV stay with their columns, dQ has to travel.

# %% [markdown]
# ## What fits into 240 registers?
#
# A consumer's thread can have 240. 128 threads share dK and dV (64 × d each), and for each row block of B_r rows Sᵀ, dPᵀ
# (64 × B_r each) and the consumer's half of dQ.
#
# **Predict.** d = 128, B_r = 64: how many registers for dK and dV? For everything at once? And may B_r be 128?

# %%
def registers(d, B_r):  # of a thread, in fp32
    of = dict(dK=64 * d, dV=64 * d, S=64 * B_r, dP=64 * B_r, dQ=B_r * d // 2)
    return {name: numbers // 128 for name, numbers in of.items()}


print("                    dK and dV   and S, dQ   and P, dP   all at once")
for d, B_r in ((64, 64), (64, 128), (128, 64), (128, 128)):
    r = registers(d, B_r)
    own = r["dK"] + r["dV"]
    sizes = own, own + r["S"] + r["dQ"], own + r["S"] + r["dP"], sum(r.values())
    print(f"d = {d:3}, B_r = {B_r:3}" + "".join(f"{size:12}" for size in sizes))

# %% [markdown]
# <details><summary>What the count decides</summary>
#
# 128 stay occupied at d = 128, so row blocks have 64 rows there, and 128 at d = 64. Even then not everything fits at once,
# for addresses, −L/τ, −D and 16-bit copies of P and dS need room as well. So a step has an order: S beside dQ of the row
# block before; then dQ is handed over, and only then dP begins. Started together, S and dP would hide more and hold more: that
# was measured, below, and it is the worst of all ideas.
# </details>
#
# **Takeaway.** Registers are why a step has an order: what is finished must leave before the next product begins.

# %% [markdown]
# ## Where do two consumers meet?
#
# Each writes its dS, 64 keys × B_r rows, to shared memory. When both have, each multiplies one half of dQ from the dS of all
# 128 keys. It does so in the *next* step, under the next exponentials, as P V was hidden in the forward. They meet at one
# barrier with two arrivals. Beyond that nobody tells anybody that dS has been read.
#
# **Predict.** Is one place for dS enough? Are two? In the model below products take 1 to 9 clocks, as chance has it.

# %%
def share_dS(places, seed, steps=8):  # what each consumer read for dQ of steps 0, 1, …
    block, chance, read = Block(), random.Random(seed), [[], []]
    place, both = [[None, None] for _ in range(places)], Barrier("both have written", arrivals=2)

    def consumer(c):
        for n in range(steps):
            if n > 0:  # dQ of the step before, from what lies there when the product ends
                yield both.over((n - 1) & 1)
                dq = block.start("tensor", chance.randint(1, 9), "dQ", lambda at=place[(n - 1) % places]: tuple(at))
            yield block.start("exp", chance.randint(1, 9), "P").done()
            if n > 0:
                yield dq.done()
                read[c].append(dq.result)
            yield block.start("tensor", chance.randint(1, 9), "dP").done()
            place[n % places][c] = n
            both.arrive(c)

    block.run({c: consumer(c) for c in range(2)})
    return read


for places in (1, 2):
    orders = [share_dS(places, seed) for seed in range(500)]
    wrong = sum(read != [[(n, n) for n in range(7)]] * 2 for read in orders)
    print(f"places for dS: {places}; dQ wrong in {wrong} of 500 orders")

# %% [markdown]
# <details><summary>Why two are enough</summary>
#
# With one place the quick consumer writes its next dS while the slow one still multiplies the last. With two it would have
# to be two steps ahead for that. It cannot be: before it shows its dS of step n + 1 it has waited for both dS of step n, and
# the other one shows that only after its own dQ of step n − 1 has been multiplied. So a release, and a barrier for it,
# are not needed.
# </details>
#
# **Takeaway.** A wait that another wait implies can be left out; it takes a second place, and an argument.

# %% [markdown]
# ## How many additions, and who does them?
#
# Every column block of 128 keys adds N × d numbers of fp32 into dQ.
#
# **Predict.** N = 16,384, d = 128, 16 heads: how many GB are added? dQ itself has 0.13. If a thread adds 4 bytes at a
# time, how many additions are that? How many, if one addition is a tile of 64 × 128?

# %%
N, d, n_heads = 16384, 128, 16
added = n_heads * (N // 128) * N * d * 4
flops = 2.5 * 4 * N * N * d * n_heads
read = n_heads * (N // 128) * 2 * N * d * 2  # Q and dO, in 16 bits, by every column block
print(f"added: {added / 1e9:.1f} GB; Q and dO are read: {read / 1e9:.1f} GB")
print(f"at 650 TFLOP/s: {added / (flops / 650e12) / 1e12:.1f} TB/s of additions; HBM: {H200.hbm_per_second / 1e12:.1f}")
print(f"of 4 bytes each: {added / 4e9:.1f} billion; in tiles of 64 × 128: {added / (64 * d * 4e3):.0f} thousand")

# %% [markdown]
# <details><summary>Too many for threads</summary>
#
# As many bytes as all reads of Q and dO, and four billion additions if threads make them one by one, from registers that are
# needed for something else. (Many of the bytes meet in the L2 cache, so that HBM sees only a part.)
# </details>
#
# The copy engine can add, too: one thread hands over a whole tile of shared memory, and nobody waits until that place is
# to be written again. (FA3's backward has a warp of its own for these additions.) Two consumers, each with one place, add
# 1, 2, 3, … into six numbers:

# %%
def added_by_copies(careful, steps=6):
    block, dQ = Block(), np.zeros(steps)

    def consumer(c):
        place, job = [0.0], None
        for i in range(steps):
            yield block.start("tensor", 200, f"dQ {i}").done()  # the product dS K
            if careful and job:
                yield job.done()  # the engine has read the part before
            place[0] = i + 1.0

            def add(i=i):
                dQ[i] += place[0]

            job = block.start("copy", 600, f"add {i}", add)  # reads the place until its end

    block.run({f"consumer {c}": consumer(c) for c in range(2)})
    return [int(x) for x in dQ]


print("waiting before the place is written again:", added_by_copies(careful=True))
print("not waiting:                              ", added_by_copies(careful=False))

# %% [markdown]
# **Takeaway.** Additions that nobody has to see at once are best left to a unit that nobody waits for.

# %% [markdown]
# ## Who waits for whom?
#
# Here is all of it, drawn from a run of the model in `machine/hopper_backward.py`. The rings are those of the forward. Q and
# dO of a row block, −L/τ and −D come together, at one barrier. An *order* is what a ticket was: which column block is
# next, and how many row blocks see it. The producer draws its number when the last row block of the order before is on
# its way, no sooner: drawn at the start, the second round of column blocks would be dealt.

# %%
show(backward_pipes.draw(**backward_pipes.data()))

# %% [markdown]
# **Predict.** A step has five products of 256 clocks, for two consumers 2,560. Two additions run meanwhile. How long may one
# addition take before the whole becomes slower: 500 clocks, 2,500, 5,000?

# %%
Q, dO, K, V = *rng.standard_normal((2, 64, 4)), *rng.standard_normal((2, 32, 4))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=8)


def clocks(add, **options):  # of the whole, and whether it is right
    price = model.Costs(add=add)
    ran = model.backward(Q, K, V, O, L, dO, Tiling(64, 32, 4, 8), costs=price, **options)
    want = naive.backward(Q, K, V, naive.forward(Q, K, V)[1], dO)
    right = all(close(x, y) for x, y in zip((ran.dQ, ran.dK, ran.dV), want, strict=True))
    return max(job.ended for job in ran.block.jobs if job.unit == "tensor"), right


for add in (0, 500, 2500, 5000):
    end, right = clocks(add)
    print(f"an addition takes {add:5,} clocks: {end:7,.0f} in all, right: {right}")

# %% [markdown]
# <details><summary>How much patience there is</summary>
#
# A consumer hands over one part in each step, so an addition may last as long as a step. Up to then nobody waits; from
# there on everybody does, and the copy engine sets the pace. It helps the registers, too: dQ's part leaves them as soon as
# its place is free.
# </details>
#
# **Takeaway.** Whatever is handed over once a step may take a whole step.

# %% [markdown]
# ## What does a step wait for?
#
# Now the real one. Three choices are made when it is compiled; the next section asks what they are worth. `dv_late`: dV's
# product starts after dS. `dk_late`: dK's starts in the *next* step. `hold_v`: half of V stays in registers.
#
# **Predict.** Find all waits in this code. Which of them is for the producer, which for the *other* consumer, which for the
# copy engine, and which for one's own products?

# %% tags=["nbval-ignore-output"]
source(backward.step, backward.exchange, backward.finish_dk)

# %% tags=["nbval-ignore-output"]
source(backward.start_dq, backward.add_dq, sums.add_lines)

# %% [markdown]
# <details><summary>Every wait has an owner</summary>
#
# `rows.wait` is for the producer's copies. `start_dq` waits for the other consumer. `store_wait(0)` is for the copy engine: what
# lay in the place has been read. All `warpgroup_mma_wait` are for one's own products. These end in the order in which they
# began, and the number says how many of the last ones may go on. So with `dk_late` dK's product is done where only dQ's goes
# on, and Q and dO can be given back to the producer: dQ's product reads neither.
#
# `add_tile` stores dQ's part as it lies in the registers, and it goes to HBM in that order: only the kernel's own sums are
# there (4 bytes for each number of dQ, until the call ends), and a small kernel afterwards puts them in order and makes 16
# bits of them. Putting them in order in each step would cost shuffles or conflicts of banks. `fence_async_shared` lets the
# copy engine see what threads have just written.
# </details>
#
# **Takeaway.** Read a pipelined step by its waits, and ask of each whom it is for.

# %% [markdown]
# ## Which product may wait?
#
# S and dP cannot: P and dS need them. dQ runs in the next step. dV needs P alone, so it may start before dQ is handed over,
# or after dS. dK needs dS, and nobody needs dK before the last row block: its product may start in the next step, too,
# just before S.
#
# **Predict.** Here are the four orders in the model, at the H200's clocks. Which is the fastest? And what has a product that
# starts later got to keep in registers until then?

# %%
def clocks_of(late, mask, d=64, B_r=128):  # of 16 row blocks and 8 column blocks
    price = model.costs(H200, B_r, d)
    ran = model.backward(Q, K, V, O, L, dO, Tiling(64, 64, 4, 8, mask), costs=price, late=late)
    return max(job.ended for job in ran.block.jobs if job.unit == "tensor")


Q, dO, K, V = rng.standard_normal((4, 64, 4))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=8)
for dv, dk in ((False, False), (True, False), (False, True), (True, True)):
    full, causal = (clocks_of(model.Late(dv, dk), mask) for mask in (NO_MASK, CAUSAL))
    print(f"dV late: {dv!s:5}  dK late: {dk!s:5}  full {full:9,.0f} clocks, causal {causal:9,.0f}")

# %% [markdown]
# <details><summary>All the same, says the model</summary>
#
# Within half a percent: while one consumer waits for a product, the other one multiplies, and the tensor cores have enough to
# do in any order. But the model knows nothing of registers. Until dV's product ends, P must stay, in 16 bits. Until dK's does,
# dS must, and a late dK takes it along into the next step. 64 × B_r numbers of 16 bits are 16 registers of a thread at
# d = 128, and 32 at d = 64.
#
# So only a measurement can say:
# </details>

# %%
print("with it over without it, measured on an H200 in bf16:")
choices = {
    "dV's product after dS": "dv_late",
    "dK under the next S, not in its own step": "dk_late",
    "half of V in registers": "hold_v",
}
for row in ideas.worths():
    if row["part"] == "backward" and row["idea"] in choices:
        mask, used = "causal" if row["causal"] else "full  ", "used" if row["kept"] else "not used"
        print(f"{choices[row['idea']]:8} d {row['d']:3} {mask} N {row['N_q']:6,}: {row['worth']:.2f}, {used}")

# %% tags=["nbval-ignore-output"]
print(getsource(choose))

# %% [markdown]
# `hold_v` is another trade of that kind. An operand in shared memory is read anew by every product, one in registers is not.
# V is the same for all row blocks, so half of a consumer's, 64 × 64 numbers, may stay in 16 registers of a thread. At d = 128
# that pays where there is no mask.
#
# **Takeaway.** A model that counts clocks says what can overlap; what it costs to keep things alive must be measured.

# %% [markdown]
# ## Few K/V heads, few owners
#
# A column block belongs to a K/V head and goes through the rows of all query heads that share it. Take batch 2, 32 query
# heads, N = 4,096, d = 128.
#
# **Predict.** With 32 K/V heads, how many column blocks are there for 132 SMs? With one? What could the idle SMs do?

# %%
SMs, steps_of_a_head = H200.SMs, 4096 // 64
print("K/V heads  column blocks  steps each  parts of each  SMs with work")
for kv_heads in (32, 8, 4, 1):
    column_blocks, steps = 2 * kv_heads * (4096 // 128), 32 // kv_heads * steps_of_a_head
    n = parts_for(column_blocks, steps, SMs, causal=True)
    print(f"{kv_heads:9} {column_blocks:14} {steps:11,} {n:14} {min(SMs, n * column_blocks):14}")

# %% [markdown]
# <details><summary>Divided</summary>
#
# With one K/V head 64 programs have 2,048 steps each, and 68 SMs have none. So a column block is *divided*: several programs take a
# part of its row blocks each. Then dK and dV belong to nobody either, and the copy engine adds them up as well.
#
# A part costs something to begin and to end. `parts_for` weighs that: whole rounds, the longest part, the extra sums.
# Where column blocks are enough and long, it leaves them whole. (With a causal mask it divides more: short parts even out
# the weights.)
# </details>

# %%
name = "column blocks divided among programs"
print("divided over undivided, measured on an H200 in bf16:")
for row in ideas.worths():
    if row["idea"] == name:
        mask = "causal" if row["causal"] else "full  "
        print(f"32 heads on {row['kv_heads']}, {mask} {row['worth']:.2f} times as fast")

# %% [markdown]
# **Takeaway.** If there are too few owners, share the work and let the sums meet: the merge of notebook 14, for gradients.

# %% [markdown]
# ## Which bits come out?
#
# Which column block adds first is chance. Sums in fp32 depend on their order.
#
# **Predict.** 128 column blocks add to 8,192 numbers of dQ, in five different orders. How many of the five results differ, bit by bit?
# How far apart are they, relative to dQ? And how many of the numbers differ after rounding to bf16?

# %%
some = np.random.default_rng(1).standard_normal((128, 8192)).astype(np.float32)
results = []
for seed in range(5):
    total = np.zeros(8192, np.float32)
    for j in np.random.default_rng(seed).permutation(128):
        total += some[j]
    results.append(total)
exact = some.sum(axis=0, dtype=np.float64)
apart = max(np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in results)
first, *others = (torch.from_numpy(x).bfloat16() for x in results)
changed = sum(int((x != first).sum()) for x in others) / len(others)
print("different results:", len({x.tobytes() for x in results}), "of 5; error below 1e-6:", bool(apart < 1e-6))
print(f"after rounding to bf16: {changed:.0f} of 8,192 numbers differ between two orders")

# %% [markdown]
# <details><summary>Rarely, and still</summary>
#
# The error is thousands of times smaller than what bf16 rounds off, so nearly all numbers round to the same. But a few lie
# at the edge between two, and whoever has to repeat a training run bit by bit has lost.
#
# `torch.use_deterministic_algorithms(True)` makes `attention()` take the two passes of notebook 09: one owner and one
# order for every number. dK and dV have that here too, as long as column blocks are not divided.
# </details>

# %% tags=["nbval-ignore-output"]
if on_hopper:
    q, k, v, do = torch.randn(4, 1, 8, 4096, 128, device=device, dtype=torch.bfloat16)
    options = Options(causal=False, scale=128**-0.5)
    o, lse = forward(q, k, v, options)
    runs = [launch.backward(do, q, k, v, o, lse, options) for _ in range(5)]
    kinds = [len({x.view(torch.int16).cpu().numpy().tobytes() for x in grads}) for grads in zip(*runs, strict=True)]
    print("different dQ, dK, dV in five calls:", kinds)
else:
    print("no Hopper GPU here; on one, five calls give several dQ, one dK and one dV")

# %% [markdown]
# **Takeaway.** Whoever lets sums meet in any order gives away their last bits; keep a slower way for those who need them.

# %% [markdown]
# ## What was reached?
#
# Recorded on the H200 in bf16: 16,384 tokens, hidden size 2,048, all contestants in one run. Ratios are our speed over
# theirs; above 1 we are faster.
#
# **Predict.** Where is the lead over cuDNN largest, and where smallest? And what does the deterministic way cost, the
# portable kernels' two passes?

# %%
record = load("paper")
rows = [row for row in record.rows if row.problem["N_q"] >= 1024 and row.direction == "backward"]


def mean_ratio(rows, peer):
    ratios = [row.ratio("fa2_lab", peer) for row in rows if peer in row.values]
    return float(np.prod(ratios)) ** (1 / len(ratios)), min(ratios), max(ratios)


def line(d, causal):
    asked = [row for row in rows if (row.problem["d"], row.problem["causal"]) == (d, causal)]
    return sorted(asked, key=lambda row: row.problem["N_q"])


print("{gpu}, torch {torch}, triton {triton}".format(**record.machine))
for peer in (name for name in rows[0].values if name != "fa2_lab"):
    mean, low, high = mean_ratio(rows, peer)
    print(f"over {peer:16} {mean:.2f}, from {low:.2f} to {high:.2f}")
print("over cuDNN     " + "".join(f"{N:>8}" for N in (1024, 2048, 4096, 8192, 16384)))
for d, causal in ((64, False), (64, True), (128, False), (128, True)):
    ratios = "".join(f"{row.ratio('fa2_lab', 'cuDNN'):8.2f}" for row in line(d, causal))
    print(f"d = {d:3} {'causal' if causal else 'full  '} {ratios}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# `fa2_lab portable` are the two passes of notebook 09, in plain Triton. Seven products instead of five would cost a factor of
# 1.4 if products were all that counts; measured it is about that, in the mean. The lead over cuDNN is largest at d = 64,
# where exponentials weigh most, and smallest at d = 128 without a mask, where products are nearly all there is.
#
# `FlashAttention-4`, which notebook 12 introduced, is about as fast as we are here: behind on most sequences, ahead by up to 3%
# on some of the longest. Its additions have a warp of their own, and for d = 128 without a mask it takes blocks of 80 rows, which
# Triton's powers of two do not allow. What each of the two is worth was not measured.
# </details>
#
# **Takeaway.** Two products saved are worth what they weigh, if the additions really are nobody's.

# %% [markdown]
# ## What did each idea buy?
#
# As in notebook 12: each idea is taken out of the kernel, or put in where it is not used, and both versions are timed in turn.
#
# **Predict.** Rank them before you look: tickets, S that begins at −L/τ, dQ under the next S, S and dP started together.

# %%
show(backward_ideas.draw(**backward_ideas.data()))

# %%
Markdown(ideas.folded("All ideas for the backward, problem by problem", ideas.ideas_table("backward")))

# %% [markdown]
# <details><summary>What to make of it</summary>
#
# Where K/V heads are few, nothing is worth as much as dividing. As much is lost where registers do not suffice and spill: S and
# dP started together, or at d = 64 dV's product before dS, or sums that do not begin at −L/τ and −D. Then comes what every
# kernel shares: tickets, drawn late, the heaviest blocks first, programs that stay. What runs in the next step, dQ, and dK
# under the causal mask, is worth more in long sequences than in short ones.
# </details>
#
# Some ideas cannot be put into today's kernel by a few lines. They were tried on earlier versions, among them additions by
# threads; the numbers were noted by hand then, and no command repeats them.

# %%
Markdown(ideas.folded("Ideas for earlier versions", ideas.earlier_table("backward")))

# %% [markdown]
# **Takeaway.** In a kernel that is full to the last register, what frees some is worth more than what overlaps more.

# %% [markdown]
# ## Recap
#
# - One pass saves two products of seven and half of the exponentials; the price is dQ.
# - A consumer owns 64 columns, with dK and dV in registers; tiles have their keys down, so that only dS has to be turned.
# - Two consumers meet at dS: one barrier, two places, no release.
# - The copy engine adds dQ, and nobody waits but for the place.
# - Column blocks are divided where K/V heads are few.
# - Sums in any order differ in their last bits; two passes do not.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** With a causal mask half of the products go. Do half of the additions go as well? Count for N = 16,384, in blocks
# of 128 columns and 64 rows.
#
# <details><summary>Hint</summary>
# Which row blocks does column block j visit?
# </details>

# %%
whole, causal = (Tiling(16384, 16384, 64, 128, mask) for mask in (NO_MASK, CAUSAL))
tiles = [sum(len(writers) for writers in grid.dq_writers(tiling)) for tiling in (whole, causal)]
print(f"additions of a tile, one head: full {tiles[0]:,}, causal {tiles[1]:,}: {tiles[1] / tiles[0]:.3f}")

# %% [markdown]
# <details><summary>Answer to exercise 1</summary>
#
# Yes, but for the tiles on the diagonal: 0.504. A tile is multiplied and added, or neither. But the blocks are of unequal
# weight, and the last ones to end have nobody left to hide under.
# </details>
#
# **2. Complete.** Column blocks are all alike (no mask), a program does one part at a time, and nothing else costs anything. Into
# how many parts should each be divided so that at least 95% of the SMs' time is used? Take the smallest. Replace the 1.

# %%
def smallest_parts(column_blocks, SMs=132):
    return 1  # replace


def used(column_blocks, parts, SMs=132):  # the share of the SMs' time that is spent on parts
    return column_blocks * parts / (float(np.ceil(column_blocks * parts / SMs)) * SMs)


for column_blocks in (64, 100, 256, 2048):
    n = smallest_parts(column_blocks)
    print(f"{column_blocks:5,} column blocks, parts: {n}, used: {used(column_blocks, n):.0%}")

# %% [markdown]
# <details><summary>Hint</summary>
#
# `used` tells you whether a number is good enough. `next(n for n in …)` takes the first that is.
# </details>
# <details><summary>Answer to exercise 2</summary>
#
# `next(n for n in range(1, 1000) if used(column_blocks, n, SMs) >= 0.95)`: 2, 9, 1 and 1. 64 in two parts fill 128 of 132
# SMs. 100 in nine parts are 97% of seven rounds; 256 blocks use 97% as they are. Nine parts would also begin and end nine
# times: the kernel's `parts_for` counts that, and tries powers of two only.
# </details>
#
# **3. Break and fix.** Masked entries of S begin at −∞. Somebody likes that, and lets those of dP begin there as well. Before
# you run it: what are P and dS of a masked entry now?

# %%
def masked_dS(begin_dP):
    visible = np.tril(np.ones((4, 4), bool)).T  # keys down, queries right
    s = np.where(visible, -L[:4] * 2, -np.inf) + K[:4] @ Q[:4].T
    dp = np.where(visible, 0.0, begin_dP) + V[:4] @ dO[:4].T
    with np.errstate(invalid="ignore"):
        return np.exp(s / 2) * dp


for begin_dP in (0.0, -np.inf):
    print(f"dP of masked entries begins at {begin_dP}: NaN in dS: {np.isnan(masked_dS(begin_dP)).sum()} of 16")

# %% [markdown]
# <details><summary>Hint</summary>
# What is 0 · (−∞)?
# </details>
# <details><summary>Answer to exercise 3</summary>
#
# P is 0, and 0 · (−∞) is NaN; the products spread it over whole rows of dQ and dK. One −∞ is enough, and it belongs into S. For the
# same reason rows that see no key at all begin their dP at 0 in the kernel.
# </details>

# %% [markdown]
# ## Ten questions on part IV
#
# Chapters 12 and 13, without looking back. An answer opens when you click it.
#
# <details><summary>1. A product has been started and not waited for. What must stay in place?</summary>
#
# Everything it reads, and nobody may use its result yet.
# </details>
# <details><summary>2. How many threads does it take to start a bulk copy?</summary>
#
# One. The copy engine computes the addresses and writes zeros past the edge.
# </details>
# <details><summary>3. Why do zeros past the last key not replace the mask?</summary>
#
# A score of 0 has the weight $e^0 = 1$ before the division. It must be $-\infty$.
# </details>
# <details><summary>4. A stage of the ring has two barriers. Which?</summary>
#
# Filled: the consumers may read. Emptied: the producer may overwrite.
# </details>
# <details><summary>5. A release is forgotten. What happens? And if it comes too early?</summary>
#
# Forgotten: the producer waits for ever. Too early: the next copy overwrites what is still being read.
# </details>
# <details><summary>6. What does a producer warp do, and what does it give away?</summary>
#
# It only starts copies. So it needs few registers, and the consumers get the rest.
# </details>
# <details><summary>7. Why should two consumer warpgroups be out of step?</summary>
#
# Then one computes exponentials while the other keeps the tensor cores busy.
# </details>
# <details><summary>8. m may lag behind the row's maximum. Why is the result still right?</summary>
#
# Any m gives the same $o / \ell$, as long as no exponential overflows.
# </details>
# <details><summary>9. How many products has the backward pass in one pass, and how many in two?</summary>
#
# Five and seven. The price of one pass is dQ, to which all column blocks add.
# </details>
# <details><summary>10. Why do dQ's last bits change from run to run there?</summary>
#
# The additions of the column blocks arrive in any order, and rounding depends on the order.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, the package's model against the dense gradients, with and
# without its waits, and the gradients of `attention()` against float64. On a Hopper GPU the kernel of this notebook is called.

# %%
def gradients(N_q, N_k, mask):  # tensors for the model, and the dense gradients
    Q, dO, K, V = *rng.standard_normal((2, N_q, 4)), *rng.standard_normal((2, N_k, 4))
    O, L = naive.forward_linear_memory(Q, K, V, mask=mask)
    return (Q, K, V, O, L, dO), naive.backward(Q, K, V, naive.forward(Q, K, V, mask=mask)[1], dO)


for N_q, N_k, mask in ((24, 32, NO_MASK), (22, 30, CAUSAL), (30, 18, CAUSAL)):
    tensors, want = gradients(N_q, N_k, mask)
    tiling, name = Tiling(N_q, N_k, 4, 8, mask), f"{N_q} × {N_k}, {'causal' if mask.causal else 'full'}"
    for price in (model.Costs(), model.Costs(slow=9), model.Costs(add=9000)):
        ran = model.backward(*tensors, tiling, costs=price)
        right = [close(x, y) for x, y in zip((ran.dQ, ran.dK, ran.dV), want, strict=True)]
        verdict(f"the model = dense: {name}, add {price.add:,.0f}, slow {price.slow:.0f}", all(right))
    if not mask.causal:
        Q, K, V, O, L, dO = tensors
        D = (dO * O).sum(axis=1)
        parts = [column_pass(Q, dO, L, D, K[j : j + 8], V[j : j + 8], 4) for j in range(0, N_k, 8)]
        dK, dV, parts_of_dQ = zip(*parts, strict=True)
        got = sum(parts_of_dQ), np.vstack(dK), np.vstack(dV)
        verdict("column_pass = dense", all(close(x, y) for x, y in zip(got, want, strict=True)))

# %%
tensors, want = gradients(24, 32, NO_MASK)


def faulty(cls, method, wrong, **options):  # which of dQ, dK and dV are right with another method
    with patch.object(cls, method, wrong):
        try:
            ran = model.backward(*tensors, Tiling(24, 32, 4, 8), **options)
        except Deadlock as reason:
            return str(reason)
    return [close(x, y) for x, y in zip((ran.dQ, ran.dK, ran.dV), want, strict=True)]


def hasty(self, c, rows, cols, part, add=model.Sums.add):
    self.last[c] = None  # forgets that the engine may still read the place
    return add(self, c, rows, cols, part)


slow, late = dict(costs=model.Costs(slow=9)), dict(costs=model.Costs(add=5000))
add, share = model.Sums.add, model.Exchange.share
verdict("as it is: right", faulty(model.Sums, "add", add, **slow) == [True] * 3)
only_dQ = [False, True, True]
verdict("no wait for dQ's place: only dQ wrong", faulty(model.Sums, "add", hasty, **late) == only_dQ)
verdict("one place for dS: only dQ wrong", faulty(model.Exchange, "share", share, places=1, **slow) == only_dQ)
nobody = faulty(model.Exchange, "share", lambda self, c, n, ds: None)
verdict("a dS that is not shown: a deadlock", "waits for dS filled" in nobody)

# %%
expected = [[(n, n) for n in range(7)]] * 2
right = {places: [share_dS(places, seed) == expected for seed in range(200)] for places in (1, 2)}
verdict("share_dS: always right with two places, not with one", all(right[2]) and not all(right[1]))

# %%
def computed(q, k, v, do, causal):
    if not on_hopper:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), do)
    options = Options(causal, q.shape[3] ** -0.5)
    return launch.backward(do, q, k, v, *forward(q, k, v, options), options)


N_q, N_k = (1000, 1500) if on_gpu else (70, 100)
for d in (64, 128):
    for causal in (False, True):
        draws = (torch.Generator().manual_seed(seed) for seed in range(4))
        shapes = [(1, 4, N_q, d), (1, 2, N_k, d), (1, 2, N_k, d), (1, 4, N_q, d)]
        halves = [torch.randn(s, generator=g).half() for s, g in zip(shapes, draws, strict=True)]
        *qkv, do = (x.double().numpy() for x in halves)
        saved = by_heads.forward(*qkv, stage="naive", causal=causal)
        want = by_heads.backward(*qkv, *saved, do, stage="naive", causal=causal)
        found = [x.detach().double().cpu().numpy() for x in computed(*(x.to(device) for x in halves), causal)]
        right = [close(x, y, 3e-3) for x, y in zip(found, want, strict=True)]
        verdict(f"dQ, dK and dV = float64, d = {d}, causal = {causal}", all(right))

# %% [markdown]
# And what the text says of the records; if somebody records anew and one of these fails, the text must be written anew too.

# %%
mean, low, _ = mean_ratio(rows, "cuDNN")
verdict("over 1.15 times cuDNN in the mean, over 1.05 everywhere", mean > 1.15 and low > 1.05)
mean, low, _ = mean_ratio(rows, "fa2_lab portable")
verdict("over two passes: about the 1.4 of seven products for five", 1.3 < mean < 1.5 and low > 1.15)
lead = {(d, causal): mean_ratio(line(d, causal), "cuDNN")[0] for d in (64, 128) for causal in (False, True)}
verdict("the lead over cuDNN is largest at d = 64", min(lead[64, True], lead[64, False]) > lead[128, True])
verdict("and smallest at d = 128 without a mask", min(lead, key=lead.get) == (128, False))
apart = [(row.ratio("fa2_lab", "FlashAttention-4"), row.problem["N_q"]) for row in rows]
verdict("FlashAttention-4: behind on most, ahead by up to 3% on some from N = 8,192 on",
        np.median([x for x, _ in apart]) > 1 and min(apart)[0] > 0.965 and all(N >= 8192 for x, N in apart if x < 0.995))

# %%
tried = [row for row in ideas.worths() if row["part"] == "backward"]


def reach(idea, **where):  # the least and the most that an idea is worth
    found = [row["worth"] for row in tried if row["idea"] == idea and where.items() <= row.items()]
    return min(found), max(found)


divided = reach("column blocks divided among programs", kv_heads=1)
verdict("one K/V head: divided is over 1.5 times as fast", divided[0] > 1.5)
verdict("sums that begin at −L/τ and −D: over 1.15 at d = 64", reach("S begins at −L/τ, dP at −D", d=64)[0] > 1.15)
together = reach("S and dP started together")
verdict("S and dP together: the worst, below 0.8", min(r["worth"] for r in tried) == together[0] and together[1] < 0.8)
verdict("tickets: over 1.1 at d = 128", reach("column blocks drawn as tickets, not dealt", d=128)[0] > 1.1)
dQ_late = "dQ under the next S, not in its own step"
verdict("dQ under the next S: over 1.01 everywhere, over 1.05 at d = 128", reach(dQ_late)[0] > 1.01 and reach(dQ_late, d=128)[0] > 1.05)
late = "dK under the next S, not in its own step"
verdict("and dK: a gain where it is used, a loss elsewhere", reach(late, kept=True)[0] > 1.0 > reach(late, kept=False)[1])
longer = [reach(late, kept=True, d=d, N_q=16384)[0] > reach(late, kept=True, d=d, N_q=N)[1] for d, N in ((64, 1024), (128, 4096))]
verdict("more in long sequences than in short ones", all(longer))
half = "half of V in registers"
verdict("half of V: a gain without a mask, a loss with one", reach(half, kept=True)[0] > 1.0 > reach(half, kept=False)[1])
verdict("dV's product before dS at d = 64: spilled, over 1.5 times slower", reach("dV's product after dS", kept=True)[0] > 1.5)
drawn = "the next ticket drawn late"
verdict("tickets drawn late: no loss, and over 1.2 with one head", reach(drawn)[0] > 0.985 and reach(drawn, kv_heads=1)[1] > 1.2)

# %% [markdown] tags=["navigation"]
# [← Hopper, forward](12_hopper_forward.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)
