# %% [markdown] tags=["navigation"]
# [← Hopper, the kernel](12b_hopper_kernel.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)

# %% [markdown]
# # 13 · Hopper, backward
#
# **One pass over the columns: who adds up dQ?**
#
# Chapter 09 ended with two passes. One kernel owns columns and sums up dK and dV. Another owns rows and sums up dQ.
# Both compute S and P, so part of the work is done twice. On Hopper one pass is enough, because the copy engine can
# *add* to memory while the program goes on.
#
# After this notebook you can
#
# - say what one pass saves, what it costs, and who pays,
# - write one step of the kernel with its waits, and say of each wait whom it is for,
# - read all of `fa2_lab/kernels/hopper/backward`,
# - say why the last bits of dQ differ from run to run, and what it costs to have the same bits.
#
# *Time: a good two and a half hours with the questions, in four sittings of at most 45 minutes. Hardware: any laptop
# with Triton; on a Hopper GPU the checks run the real kernel. Numbers were measured on an NVIDIA H200 in bf16. Before
# this: [05 · The backward pass](05_backward.ipynb), [09 · The Triton backward kernels](09_triton_backward.ipynb) and
# [12a](12a_hopper_rungs.ipynb) and [12b](12b_hopper_kernel.ipynb), from which producers, consumers, rings and barriers are taken as
# known.*

# %%
import ast
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from IPython.display import Markdown, display

from fa2_lab.api.attention import attention
from fa2_lab.kernels.hopper.backward import launch
from fa2_lab.kernels.hopper.backward.sizes import parts_for
from fa2_lab.kernels.hopper.forward.launch import forward
from fa2_lab.kernels.prepared import Options
from fa2_lab.machine import chips, grid, turns
from fa2_lab.machine import hopper_backward as model
from fa2_lab.machine.asynchrony import IN_ORDER, SIDE_BY_SIDE, Barrier, Block, Deadlock, Wait
from fa2_lab.plots import backward_step, ideas, pipes
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2, naive
from fa2_lab.reference import heads as by_heads
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling
from fa2_studio.book.verdicts import close, verdict

# %% tags=["nbval-ignore-output"]
on_gpu = torch.cuda.is_available()
on_hopper = on_gpu and torch.cuda.get_device_capability() == (9, 0)
print(torch.cuda.get_device_name() if on_gpu else "no GPU", "| Hopper:", on_hopper)
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))  # the package says once how it runs here

# %% [markdown]
# ## Sitting 1 · One step and its waits
#
# ## Three rungs
#
# The backward has a short ladder of its own, `ladder/b00_atomics.py` to `b02_one_pass.py`. The last rung is plain, in
# one file. This chapter is about the kernel that `attention()` runs.
#
# | rung | passes | products a tile | who adds to dQ in HBM |
# | --- | --- | --- | --- |
# | b00 atomics (Algorithm 2) | one | five | every thread, number by number |
# | b01 two passes (chapter 09) | two | seven | nobody: each row has an owner |
# | b02 one pass, `hopper/backward` | one | five | the copy engine, tile by tile |
#
# One pass takes five products and one exponential for each score. The second pass computes $S$ and $dP$ again, and the
# exponential: two passes take seven products instead of five, and two exponentials. The tensor cores of one SM do 4,096
# FLOPs in a clock, so a product of 128 × 128 with d = 128 takes 1,024.

# %%
H200 = chips.H200


def tile(passes, d, B=128):  # clocks of products, clocks of exponentials, bytes added
    products = {1: 5, 2: 7}[passes] * 2 * B * B * d // H200.tensor_per_clock
    return products, passes * B * B // H200.exp_per_clock, B * d * 4 if passes == 1 else 0


print("clocks of a tile   products   exponentials   bytes added in HBM")
for d in (64, 128):
    for passes in (1, 2):
        products, exps, added = tile(passes, d)
        print(f"d = {d:3}, {passes} pass{'es' if passes > 1 else '  '} {products:8,} {exps:14,} {added:16,}")

# %% [markdown]
# Two products of seven, and half of the exponentials: that is what one pass saves. In return it adds 32 or 64 KiB of
# fp32 to dQ for each tile.
#
# **Takeaway.** One pass is worth it if somebody can add up dQ while nobody waits.

# %% [markdown]
# ## One step, in plain code
#
# A thread block takes a *column block*, 128 keys, and goes through the row blocks. One row block is one **step**.
# Here it is with the letters of Algorithm 2. Tiles have keys as rows and queries as columns, so `s` in the code is
# $S^\top$.
#
# **Predict.** dV, dK and dQ are sums. Which of the three sums over keys?
#


# %%
def step(q, do, L_i, D_i, k, v, dk, dv):  # (B_r, d) twice, (B_r,) twice, (B_c, d) four times
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
# The loop around it, compared with chapter 05:

# %%
rng = np.random.default_rng(0)
Q, dO, K, V = *rng.standard_normal((2, 12, 4)), *rng.standard_normal((2, 16, 4))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=8)
D = (dO * O).sum(axis=1)
dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
for j in (0, 8):
    cols = slice(j, j + 8)
    for i in (0, 4, 8):
        rows = slice(i, i + 4)
        of_rows = Q[rows], dO[rows], L[rows], D[rows]
        dK[cols], dV[cols], dq = step(*of_rows, K[cols], V[cols], dK[cols], dV[cols])
        dQ[rows] += dq
for name, got, want in zip(("dQ", "dK", "dV"), (dQ, dK, dV), fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=8), strict=True):
    print(f"{name}: largest difference {np.abs(got - want).max():.12f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **dQ.** `ds.T @ k` has no keys left. dV and dK sum over rows.
# </details>
#
# Why keys as rows? The left operand of a product may come from registers, the right one must lie in shared memory. `p`
# and `ds` are computed in registers, and in products 2 and 4 they stand on the left. Only product 5 needs `ds` turned
# around, so `ds` goes through shared memory, once.
#
# Why does `s` begin at $-L/\tau$ and `dp` at $-D$? A product adds to what is in the accumulator. So the tensor cores do
# the subtraction for us. A masked score begins at $-\infty$.
#
# **Takeaway.** A column block can keep dK and dV to the end. dQ is a sum over keys, so every column block adds to it.

# %% [markdown]
# ## What fits into the registers?
#
# Two consumer warpgroups share the column block. Each owns 64 of its keys, and has 128 threads with up to 240 registers
# each. dK and dV stay in registers for the whole column block. A row block of $B_r$ rows needs $S$ and $dP$ (64 × $B_r$
# each) and half of dQ.
#
# **Predict.** d = 128. How many registers of each thread do dK and dV take, 64 × 128 numbers each?
#


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
# <details><summary>Answer</summary>
#
# **128.** More than half of all.
# </details>
#
# The next columns add what a step needs beside them. At d = 128 row blocks of 128 rows are too many, so they have 64; at
# d = 64 they have 128. Even then everything at once takes 224 of 240, and addresses, $-L/\tau$, $-D$ and copies of P and dS
# in 16 bits need room, too. So a step has an order: $S$ stands beside dQ of the row block before, dQ leaves, and only
# then $dP$ begins.
#
# **Takeaway.** Registers decide the order of a step: what is finished leaves before the next product begins.

# %% [markdown]
# ## The same step, with its waits
#
# Here is the step without the numbers and with its waits, as a Python generator: it yields what it waits for.
# `block.start` gives work to a unit and goes on. With d = 128 and 64 rows a product of one consumer takes 256 clocks, and
# so do its exponentials. First everybody waits for everything:
#


# %%
def one_by_one(block, ds_filled, T, add=600):
    for n in range(T):
        yield block.start("tensor", 256, f"S {n}").done()
        yield block.start("exp", 256, f"P {n}").done()
        yield block.start("tensor", 256, f"dV {n}").done()
        yield block.start("tensor", 256, f"dP {n}").done()
        ds_filled.arrive(block.actor)  # my dS lies in shared memory
        yield ds_filled.over(n & 1)  # and the other consumer's, too
        yield block.start("tensor", 256, f"dK {n}").done()
        yield block.start("tensor", 256, f"dQ {n}").done()
        yield block.start("copy", add, f"add dQ {n}").done()


# %% [markdown]
# And the kernel's order. dQ of a step is multiplied in the *next* step, beside the exponentials.
#
# **Predict.** Two consumers have ten products in a step, 2,560 clocks of the tensor cores. The first way takes 2,909
# clocks a step. Is the kernel's order above 2,700, or below 2,600?
#


# %%
def kernel_order(block, ds_filled, T, add=600):
    added = None
    for n in range(T):
        s = block.start("tensor", 256, f"S {n}")  # product 1
        if n > 0:
            yield ds_filled.over((n - 1) & 1)
            dq = block.start("tensor", 256, f"dQ {n - 1}")  # product 5 of the step before
        yield s.done()
        yield block.start("exp", 256, f"P {n}").done()  # beside dQ
        dv = block.start("tensor", 256, f"dV {n}")  # product 2
        if n > 0:
            yield dq.done()
            if added:
                yield added.done()  # the engine has read the part before
            added = block.start("copy", add, f"add dQ {n - 1}")
        yield block.start("tensor", 256, f"dP {n}").done()  # product 3
        ds_filled.arrive(block.actor)  # dS is in shared memory
        dk = block.start("tensor", 256, f"dK {n}")  # product 4
        yield dv.done()
        yield dk.done()
    yield ds_filled.over((T - 1) & 1)
    yield block.start("tensor", 256, f"dQ {T - 1}").done()  # of the last step


# %%
def clocks_of_a_step(way, T=50, **options):  # two consumers; the tensor cores do one product at a time
    block, ds_filled = Block(tensor=IN_ORDER), Barrier("dS filled", arrivals=2)
    block.run({f"consumer {c}": way(block, ds_filled, T, **options) for c in range(2)})
    return block.clock / T


for way in (one_by_one, kernel_order):
    took = clocks_of_a_step(way)
    print(f"{way.__name__:12}: {took:5,.0f} clocks a step, tensor cores busy {2560 / took:.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Below 2,600.** While one consumer waits, the other one multiplies, and dQ hides the exponentials.
# </details>
#
# Two steps of the full model in `machine/hopper_backward.py`, as a timeline:

# %%
show(backward_step.draw(**backward_step.data()))

# %% [markdown]
# Follow the boxes with strong edges: S, P, dV, dP, dK of step 3, and its dQ only in the next step, beside P of step 4. The
# two consumers fill each other's gaps, while dQ is being added.
#
# **Takeaway.** A product whose result nobody needs soon may run in the next step, where it hides something else.

# %% [markdown]
# ## How long may an addition take?
#
# **Predict.** In each step a consumer hands over one part of dQ. How long may one addition take before everybody becomes
# slower: 600 clocks, 2,500, or 5,000?

# %%
for add in (0, 600, 2500, 5000):
    print(f"an addition takes {add:5,} clocks: {clocks_of_a_step(kernel_order, add=add):5,.0f} clocks a step")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About as long as a step.** With 2,500 hardly anybody waits. With 5,000 the additions set the pace.
# </details>

# %% [markdown]
# ## Where do two consumers meet?
#
# dQ needs dS of all 128 keys, and each consumer has 64 of them. So each writes its dS into shared memory and arrives at
# a barrier. When both have arrived, each multiplies one half of dQ, in the next step.
#
# There is no second barrier that says "I have read it". There are two *places* for dS instead, used in turn.
#
# **Predict.** In the model below products take 1 to 9 clocks, at random. Is one place enough?
#


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
# <details><summary>Answer</summary>
#
# **No.** With one place the quick consumer writes its next dS while the slow one still multiplies the last.
# </details>
#
# Why are two enough? Steps n + 1 and n − 1 share a place. Before a consumer writes its dS of step n + 1, it has waited
# until both have written that of step n. The other one wrote its dS of step n only after its own dQ of step n − 1 was
# done. So nobody reads that place any more.
#
# **Takeaway.** A wait that another wait implies can be left out. It takes a second place, and an argument.

# %% [markdown]
# ## Who makes four billion additions?
#
# Each column block of 128 keys adds $N \times d$ numbers to dQ. Take N = 16,384, d = 128 and 16 heads, and 680 TFLOP/s,
# about what the kernel reaches there.

# %%
N, d, n_heads = 16384, 128, 16
added = n_heads * (N // 128) * N * d * 4
flops = 2.5 * 4 * N * N * d * n_heads
print(f"added: {added / 1e9:.1f} GB; at 680 TFLOP/s that is {added / (flops / 680e12) / 1e12:.1f} TB/s.", end=" ")
print(f"(HBM has {H200.hbm_per_second / 1e12:.1f} TB/s.)")
print(f"in additions of 4 bytes: {added / 4e9:.1f} billion; in tiles of 64 × 64: {added / (64 * 64 * 4e3):,.0f} thousand")

# %% [markdown]
# In b00 threads made these additions one by one, from registers that are needed for something else. Hopper's copy engine
# can add, too. A **bulk reduction** is a bulk copy in the other direction that adds: one thread names a tile in shared
# memory and a place in HBM, and goes on. (The additions happen in the L2 cache.) A consumer waits only before it writes
# its place in shared memory again.
#
# **Takeaway.** Additions that nobody has to see at once are best left to a unit that nobody waits for.

# %% [markdown]
# ## Who waits for whom?
#
# The whole thread block, with chapter 12b's rings and mailbox.
#
# **Predict.** What might a consumer have to wait for? Name what you can before you look at the arrows.

# %%
show(pipes.draw(**pipes.data(["backward"])))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Seven things. Five have arrows: the mailbox, K, V, a row block (Q, dO, $-L/\tau$ and $-D$ together), and the other
# consumer's dS. Two have none: its own products, and the copy engine, which must have read the place for dQ before it is
# written again.
# </details>
#
# **Takeaway.** Every wait has an owner: the producer, the other consumer, the copy engine, or one's own products.

# %% [markdown]
# ## Sitting 2 · The kernel: what consumers are given, and the step
#
# Now the code, seven files in `fa2_lab/kernels/hopper/backward`. `kernel.py` is the whole, `rows.py` holds what consumers
# are given, `products.py` starts the five products, `sums.py` adds, `turns.py` can have it add in a fixed order, and
# `launch.py` and `sizes.py` run on the host. Until sitting 4 skip the lines that speak of turns. Skip those for
# packed sequences, too (`cu_q`, `cu_k`, `sequences`, `before`; chapter 12b says why).

# %% tags=["hide-input"]
FOLDER, READ = Path(launch.__file__).parent, {}  # file: what has been read of it


def names_of(node):  # of a function, a class, or constants
    constants = {x.id for target in getattr(node, "targets", []) for x in ast.walk(target) if isinstance(x, ast.Name)}
    return {node.name} if hasattr(node, "name") else constants


def source(file, *names):
    path = (FOLDER / f"{file}.py").resolve()
    lines, found = path.read_text(encoding="utf-8").splitlines(), []
    for name in names:
        nodes = ast.parse("\n".join(lines)).body
        for part in name.split("."):  # a class, then its method
            (node,) = (x for x in nodes if part in names_of(x))
            nodes = getattr(node, "body", [])
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))]) - 1
        while lines[first - 1].startswith("# "):  # what is said above it
            first -= 1
        found += ["", *(line[node.col_offset :] for line in lines[first : node.end_lineno])]
        READ.setdefault(path.stem, set()).add(name)
    shown = "\n".join(line for line in found[1:] if line.strip() != "@gluon.jit")
    display(Markdown(f"```python\n{shown}\n```"))


# %% [markdown]
# ### What lies in shared memory
#
# `BackwardPipes` is everything that the warps of a thread block share.

# %% tags=["nbval-ignore-output"]
source("kernel", "BackwardPipes")
source("rows", "CONSUMERS", "COLS", "NEXT", "TOLD", "NEXT_IN_TURN", "TOLD_IN_TURN")

# %% [markdown]
# `NEXT` names the numbers in the mailbox, for each column block: how many steps it has, where it lies, from which row on no
# mask is needed (`unmasked_from`), the first row that sees its first key (`seen_from`), how many keys are real
# (`length`), and its number among all. `TOLD` are those of each row block.

# %% tags=["nbval-ignore-output"]
source("rows", "Rows", "new_rows")

# %% [markdown]
# `Rows` is a ring with two stages. What is new: three copies share a barrier. One arrival announces the bytes of all three.
#
# - `told.write` puts numbers beside the tiles. `all_threads` makes sure that they are written before the copies, and thus
#   the barrier's end, can come. dQ is added a step later and still needs `number`, so `told` keeps four sets.
# - `start` reads $-L/\tau$ or $-D$: `reinterpret` sees one line of $2 B_r$ numbers as two rows. Each thread loads those of
#   the columns that it holds.

# %% [markdown]
# ### The producer
#
# One warp. It announces column blocks and starts copies. What it asks of `Geometry` (chapter 12b) comes first. Of
# `column_block` only this: where nothing is packed, `j` is `block`, both batch entries are `batch`, and `T` is `T_r`.

# %% tags=["nbval-ignore-output"]
METHODS = "seen_from", "unseen_from", "first_row_block", "end_of_row_blocks", "unmasked_from"
source("../shared/geometry", "NO_ROW", *(f"Geometry.{method}" for method in METHODS))

# %% tags=["nbval-ignore-output"]
source("kernel", "producer")

# %% [markdown]
# Where K/V heads are few, a column block is divided among several programs (sitting 4). `begin` and `end` say which steps
# are this part's. To the tile scheduler each part of a K/V head is a head of its own.

# %% [markdown]
# - Where nobody sees a column block, one row block visits it all the same, so that its dK and dV are written, as zeros.
# - `first` is the first row block that sees these columns. In each query head of the group there are `seen` of them,
#   `first` included. So step m belongs to query head `m // seen` of the group, and to row block
#   `first + m % seen`. With `last_first` they are counted from the last one back.

# %% [markdown]
# - Under the causal mask every column block of a head sees the last rows. With `last_first` all of them begin there, with
#   the same tiles of Q and dO. Without it each begins at its own diagonal. Measured by hand on an H200, `last_first` saves
#   1 to 2% at d = 64 from N = 4,096 on. At d = 128 it costs 6% at N = 512, and saves nothing from N = 2,048 on. So
#   `choose` sets it at d = 64 alone; with turns it is off (sitting 4). Why d = 64 and 128 differ was not measured.

# %% [markdown]
# - The message goes out before the tiles. K has two stages, so K of the next column block can be on its way early.
# - The next column block is drawn late, when the last copy of this one has been started. At the end a message with 0
#   steps says "no more".

# %% [markdown]
# ### A consumer's column block
#
# Both consumers run this code. `c` is 0 or 1, a constant: the kernel is compiled for each.

# %% tags=["nbval-ignore-output"]
source("kernel", "consumer", "receive", "take", "hold")

# %% [markdown]
# The first step stands before the loop, with `ds=None`: there is no row block before it, so no dQ to multiply. It is the
# *prologue*. The *epilogue* after the loop is dQ of the last row block. V is released before it and K after it, because
# dQ = dS K needs K.
#
# - `take` waits for K and V and cuts out this consumer's 64 keys. `wipe` zeroes rows that are no keys.
# - `hold` may load half of V into registers, as left operand of product 3: V is the same for all row blocks.

# %% tags=["nbval-ignore-output"]
source("rows", "Interval", "interval", "first_rows")

# %% [markdown]
# For the mask a consumer needs one number for each key: the first row that sees it. Under the causal mask that is
# `seen_from` plus the key's place in the block. A key that does not exist gets `NO_ROW`, more rows than there can be.
# With a window each key is seen one row longer than the one before it, so `end`, for the column block's first key, is
# enough.

# %% [markdown]
# ### The step
#
# Compare it with `kernel_order`: with `dv_late` and `dk_late` off the order is the same, line by line. `dv_late`: product 2
# starts after dS instead of before dQ leaves. `dk_late`: product 4 starts in the next step. (`add_dq`, `exchange` and
# `finish_dk` come in sitting 3; `turns.wait_for_room` is about turns, sitting 4.)

# %% tags=["nbval-ignore-output"]
source("kernel", "step")

# %% [markdown]
# - At the first `warpgroup_mma_wait(1, …)` dQ of the step before may still run. It was started after S, so S is done.
# - `deps` also holds `p_half`, the operand of dV, or the compiler might reuse the registers that a running product still
#   reads.
# - `ds` is used twice. `exchange` puts it into shared memory for both consumers. `as_operand` makes it the left
#   operand of product 4, in the registers where it is.
# - `rows.release(n)`: Q and dO have been read. dQ's product, still to come, reads only dS and K.

# %% [markdown]
# ### The five products

# %% tags=["nbval-ignore-output"]
source("products", "HELD", "start_scores", "spread", "start_dp")

# %% [markdown]
# `spread` makes accumulators of a row of numbers: each of the 64 keys begins at the same $-L/\tau$ or $-D$. With `hold_v`,
# product 3 is done in two halves into the same accumulator, the first from registers, the second from shared memory.
#
# From the row `seen.full` on tiles need no mask. The mask is chapter 12b's test of bits, with the row in place of the
# column: it means `row >= seen.begin - first`.

# %% tags=["nbval-ignore-output"]
source("products", "start_dv", "start_dk", "start_dq")

# %% [markdown]
# - `start_dv` and `start_dk` add to the accumulators that stay: `warpgroup_mma(left, right, accumulator)`.
# - `start_dq` waits for both consumers' dS. The two share the work: with 64 rows each takes half of the d columns, with 128
#   rows 64 of the rows. Either way it is 64 × W.

# %% [markdown]
# ## Sitting 3 · The kernel: sums, the end, and the launch
#
# ### Handing over dS and dQ

# %% tags=["nbval-ignore-output"]
source("kernel", "exchange", "finish_dk", "add_dq")

# %% [markdown]
# `add_dq` must know where to add. Row blocks are numbered through all heads, and each has a part for each consumer:
# `number(n) * CONSUMERS + c` is the part's number. A part is $2W$ lines of 32 numbers.

# %% tags=["nbval-ignore-output"]
source("sums", "add_tile", "add_lines", "as_held")

# %% [markdown]
# - `add_lines` is the whole handover: wait until the engine has read what was here, store, fence, add. `add_tile` does it
#   twice where the place has room for half of the tile only.
# - `add` is one operation of Triton's compiler. `@builtin` makes a function that speaks to the compiler itself.
# - `as_held` renames the places of a tile, so that each thread's numbers lie together. Only `after_kernel` reads the
#   sums, and it knows their order (`in_order`). So they may lie in HBM in any order. Storing them row by row would cost
#   shuffles, or conflicts of banks.
#
# Number the places row · 100 + column: a lane's four are two neighbours in its row, and the same two eight rows below.

# %%
W = 64
x = np.add.outer(100 * np.arange(64), np.arange(W))  # row · 100 + column
held = x.reshape(4, 2, 8, W // 8, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(2 * W, 32)
print("line 0:", *(f"lane {lane} {held[0, 4 * lane : 4 * lane + 4].tolist()}" for lane in range(3)), "…")

# %% [markdown]
# ### The end of a column block

# %% tags=["nbval-ignore-output"]
source("kernel", "finish", "store")

# %% [markdown]
# Normally `store` writes dK and dV in 16 bits, by a bulk copy, through the place where dQ waited. `reinterpret` sees the
# same bytes as other numbers: `room` is as many tiles of 16 bits as that place can hold, one or two, and `index(0)` the
# first. `dk * (scale * LN2)` is $\tau\,dK$: the scale had a $\log_2 e$ in it. Where the column block
# was divided among programs, dK and dV are fp32 sums as well, and are added like dQ.
#
# ### The kernel itself

# %% tags=["nbval-ignore-output"]
source("kernel", "backward_kernel")

# %% [markdown]
# - The first eight arguments are *tensor descriptors*. `NVMMASharedLayout` is the swizzled layout that the tensor cores want
#   for dS.
# - `warp_specialize`: consumer 1 has `SIZES.registers` = 240 a thread, the producer 24, and consumer 0 gets what is left,
#   240 as well (chapter 12a, rung 14). The two `writer` warps are about turns. They cost no registers: these are given out
#   for four warps at a time, and the producer is one.

# %% [markdown]
# ### Before and after
#
# Two small Triton kernels stand around it. `head_of`, `load_rows` and `store_rows` are the portable kernels'.
# `UPCAST=True` makes what was loaded fp32.

# %% tags=["nbval-ignore-output"]
source("sums", "before_kernel")

# %% [markdown]
# Before: set all sums to zero, compute $D = \mathrm{rowsum}(dO \circ O)$, and write $-L/\tau$ and $-D$ for each row
# block. (`L_i * LOG2E / scale_log2` is $L/\tau$: the scale is in base 2.) A row that sees no key has $L = -\infty$. Its S
# begins at $-\infty$, so its p is 0. Its dP begins at 0 and not at $-D$: dL is a part of D, it may be infinite there, and
# $0 \cdot \infty$ is NaN.

# %% tags=["nbval-ignore-output"]
source("sums", "after_kernel", "finish", "in_order")

# %% [markdown]
# After: one program for each consumer's part of a tile. It loads the sums, puts them into the order of rows and columns
# (`in_order` undoes `as_held`), multiplies dQ and dK by $\tau$, and stores 16 bits.

# %% [markdown]
# ### Who launches it

# %% tags=["nbval-ignore-output"]
source("launch", "backward", "prepare", "choose", "ragged", "shapes")
source("launch", "prepare_before", "prepare_main", "prepare_after", "enough_work")

# %% [markdown]
# `prepare` returns `None` for a call that this kernel does not take; the portable kernels do it then. `call` makes the
# outputs and runs the three launches one after the other. `Launch` is chapter 12b's.
#
# All sums lie in one tensor, in lines of 32 numbers. So `before_kernel` clears them together. In their order:
#
# 1. dQ's,
# 2. if column blocks are divided, dK's and then dV's (`columns`),
# 3. the counters of turns, two for each row block and column block, whose bits are read as int32.
#
# `shapes` counts the lines of each, rounded up to whole tiles of 64 rows.
#
# The sizes, fitted to times on an H200 and an H100, and `lines`, which describes a matrix of fp32 as `descriptor` does a tensor
# (`swizzle` in bytes, `element_bitwidth` in bits):

# %% tags=["nbval-ignore-output"]
source("sizes", "DIMENSIONS", "SMALLEST_SCALE", "Sizes", "choose", "PORTABLE", "enough_work")
source("sizes", "ENDS", "SUMS", "UNEVEN", "DRIFT", "parts_for", "at_once", "at_once_in_turn")
source("../shared/descriptors", "lines")

# %% [markdown]
# `choose` takes the order of a step that was fastest. `parts_for` counts the steps that each division would take, with what
# it costs to begin, to end and to add, and takes the least.
#
# **Takeaway.** Read a pipelined kernel by its waits, and ask of each whom it is for.

# %% [markdown]
# ## Sitting 4 · What it costs, and what was reached
#
# ## What is the order worth?
#
# The order of the products was found by trying: speed with an idea over the speed without it, in the same run.
#
# **Predict.** One could start S and dP together, and hide more. Is that faster or slower?

# %%
tried = [row for row in ideas.worths() if row["part"] == "backward"]


def reach(idea, **where):  # the least and the most that an idea is worth
    found = [row["worth"] for row in tried if row["idea"] == idea and where.items() <= row.items()]
    return min(found), max(found)


dQ_late, dK_late = (f"{x} under the next S, not in its own step" for x in ("dQ", "dK"))
sums_begin, together = "S begins at −L/τ, dP at −D", "S and dP started together"
for idea, where in ((together, {}), (sums_begin, {}), (dQ_late, {}), (dK_late, dict(causal=True)), (dK_late, dict(causal=False))):
    low, high = reach(idea, **where)
    mask = {True: ", causal", False: ", no mask"}.get(where.get("causal"), "")
    print(f"{idea + mask:52} {low:.2f} to {high:.2f} times as fast")
for causal in (False, True):
    low, high = reach("half of V in registers", causal=causal)
    print(f"{'half of V in registers' + (', causal' if causal else ', no mask'):52} {low:.2f} to {high:.2f} times as fast")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Slower**, by 30% and more. The registers do not suffice, and numbers are spilled to memory.
# </details>
#
# dQ in the next step is a gain of 6 to 16%. dK in the next step helps under the causal mask, and half of V in registers
# helps without one, where no mask needs the registers. So `choose` decides by d, mask and length. All ideas that were
# measured are in [RESULTS.md](../RESULTS.md).
#
# **Takeaway.** In a kernel that is full to the last register, an overlap that needs more of them loses.

# %% [markdown]
# ## Too few column blocks
#
# With grouped heads, a column block belongs to a K/V head and goes through the rows of all query heads that share it.
# Take batch 2, 32 query heads, N = 4,096, d = 128.
#
# **Predict.** With one K/V head, how many column blocks of 128 keys are there, for 132 SMs?

# %%
print("causal\nK/V heads  column blocks  steps each  parts of each  SMs with work")
for kv_heads in (32, 8, 4, 1):
    column_blocks, group = 2 * kv_heads * (4096 // 128), 32 // kv_heads
    of_each = group * (4096 // 64)
    n = parts_for(column_blocks, of_each, H200.SMs, True, group, 128)
    print(f"{kv_heads:9} {column_blocks:14} {of_each:11,} {n:14} {min(H200.SMs, n * column_blocks):14}")
for kv_heads in (4, 1):
    low, high = reach("column blocks divided among programs", kv_heads=kv_heads)
    print(f"32 heads on {kv_heads}: divided is {low:.2f} to {high:.2f} times as fast as undivided (H200)")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **64**, and 68 SMs would have nothing to do.
# </details>
#
# So a column block is *divided*: several programs take a part of its row blocks each. Then dK and dV have no single
# owner either, and the copy engine adds them up as well. With 4 K/V heads all SMs have work, 256 column blocks for 132.
# Under the causal mask it pays all the same: shorter parts leave less idle at the end. (Without a mask they are not
# divided: 1.00.) And programs that go through many query heads drift apart, until no two read the same Q (`DRIFT`).
#
# **Takeaway.** If there are too few owners, share the work and let the sums meet.

# %% [markdown]
# ## Which bits come out?
#
# Which column block adds first is chance. A sum in fp32 depends on its order.
#
# **Predict.** 128 column blocks add to 8,192 numbers, in five different orders. After rounding to bf16, how many of
# the 8,192 differ between two orders: about 4,000, about 300, or fewer than 10?

# %%
some = np.random.default_rng(1).standard_normal((128, 8192)).astype(np.float32)
results = []
for seed in range(5):
    total = np.zeros(8192, np.float32)
    for j in np.random.default_rng(seed).permutation(128):
        total += some[j]
    results.append(total)
first, *others = (torch.from_numpy(x).bfloat16() for x in results)
changed = sum(int((x != first).sum()) for x in others) / len(others)
print("different results in fp32:", len({x.tobytes() for x in results}), "of 5")
print(f"after rounding to bf16: {changed:.0f} of 8,192 numbers differ between two orders")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Fewer than 10.** bf16 rounds off thousands of times more than the orders differ by. Only a number that lies at the
# edge between two rounds differently.
# </details>
#
# dK and dV have one owner and one order, as long as column blocks are not divided. dQ has not. The real kernel, five
# calls with the same tensors:

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
# **Takeaway.** Sums that meet in any order lose their last bits, and nothing else.

# %% [markdown]
# ## What do the same bits cost?
#
# If you have to repeat a training run bit by bit, call `torch.use_deterministic_algorithms(True)`. There are two ways
# to have the same bits. The first is b01's: two passes, with one owner and one order for every number. The portable
# kernels always do so. (Their pass over the rows computes D, too; b01 has a launch for that.) If products were all that
# counts, two passes would cost 7 / 5 = 1.4. Measured:

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
print("two passes over one     " + "".join(f"{N:>8,}" for N in (1024, 2048, 4096, 8192, 16384)))
for d, causal in ((64, False), (64, True), (128, False), (128, True)):
    ratios = "".join(f"{row.ratio('fa2_lab', 'fa2_lab portable'):8.2f}" for row in line(d, causal))
    print(f"d = {d:3} {'causal' if causal else 'full  '}          {ratios}")
print("in the mean {:.2f}, from {:.2f} to {:.2f} times the time".format(*mean_ratio(rows, "fa2_lab portable")))

# %% [markdown]
# Not all of it is the second pass: the portable kernels have no producers and rings, either. The other way is
# FlashAttention-3's: one pass, and column blocks add to each row block in a fixed order. On Hopper `attention()` goes this
# way, too.
#
# **Takeaway.** From N = 1,024 on, the same bits cost 1.24 to 1.61 times the time with two passes.

# %% [markdown]
# ## Or one after the other
#
# The kernel that you have read adds in a fixed order if `turns` are given. For each part of dQ there is a counter in HBM:
# how many have added so far. A part is added when the counter says that all before it have added. When its sum is in
# memory, the counter goes up by one.
#
# A warp that waits for a turn can do nothing else. So each consumer has a *writer*, a warp of its own that waits, adds and
# counts for it.

# %% tags=["nbval-ignore-output"]
source("kernel", "writer")
source("turns", "Turns", "UNTIL", "IN_MEMORY", "new_turns")
source("../shared/geometry", "Geometry.last_column_block")

# %% [markdown]
# **What does the consumer do?** It leaves its part and goes on.
#
# - `hand_over` is `add_lines` without the addition: store, fence, and a word to the writer, at the consumer's first barrier.
# - The writer answers at the second one, once the copy engine has read the part. Only then is there room for the next
#   one. `step` asks for room while products run, so that the wait costs little.
# - `consumer` asks for room once more before `finish`: dK and dV leave through the same place.
# - n goes on from one column block to the next. So `wait_for_room` knows by n alone which phase to wait for.

# %% [markdown]
# **What does the writer do?** For each part the five things that `add` lists:
#
# - wait until the part lies there,
# - wait for its turn. `AGAIN` reads the counter until so many have added. `ld.acquire` reads before all that follows in
#   the code. The fence keeps the copy engine from adding before.
# - have it added,
# - tell the consumer that it has been read (`tma.store_wait`),
# - wait until it is in memory, which is later (`wait_group`), and count. `release`: whoever reads the counter then finds
#   the sum.
#
# In the assembly, `"=r,l,r"`: `l` is an address, of 64 bits. `is_pure=False`: it has effects, so the compiler must keep
# it. `pack=1`: one element at a time.
#
# Where column blocks are divided, dK and dV have counters, too (`place`). There the consumer itself waits and counts,
# once for each column block.

# %% [markdown]
# Can this deadlock? No. The last column block of each head is handed out first, and at each row block the turn goes from
# the last to the first: `last_column_block` minus one's own is how many come before. So whoever is waited for was handed out
# earlier, and is running: only a program that runs draws a number (`DRAWN`). Were the first number the program's own, it
# might not have begun, because other work fills its SM. The lowest number that is not done waits for nobody, so it gets
# done. Then the next one does.
#
# **Predict.** Under the causal mask, is it better to begin with the last column block, or with the first, which has the
# most rows? (Turns would go from first to last then.) A column block begins with the row block on its diagonal.

# %%
print("a model: 64 rows a step, 64 heads, four of them at a time, N = 4,096, 132 SMs")
print("time; 1.00 is: the first column block handed out first, no turns")
print("          last first, no turns   last first, turns   first first, turns")
for name, mask in (("full", NO_MASK), ("causal", CAUSAL)):
    tiling = Tiling(4096, 4096, 64, 128, mask)
    fast = turns.time(turns.handed_out(tiling, 64, 4, last_column_first=False), 132, in_turn=False)
    kinds = ((True, False), (True, True), (False, True))  # the last first, in turn
    times = [turns.time(turns.handed_out(tiling, 64, 4, first), 132, in_turn=x) / fast for first, x in kinds]
    print(f"{name:9}{times[0]:21.2f} {times[1]:19.2f} {times[2]:20.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **With the last.** Each column block begins at its diagonal. Those rows see no key further right, so nobody is before it.
# The next one to the left begins higher up, and comes to these rows when the turn does. If turns went from the first to the
# last, each column block would have to wait at its own diagonal until all to its left had come down to there.
# </details>
#
# So each column block has to begin at its own diagonal. With `last_first` all would begin at the same row block and wait for
# each other there. That is why `choose` leaves it off where all add in turn.
#
# Under the causal mask nobody waits, but the shortest column blocks are handed out first. At the end some SMs are left
# alone with a long one.
#
# **Takeaway.** In the model turns cost 2% without a mask, by waiting, and 7% under the causal one, by the order.

# %% [markdown]
# ## What do turns cost on a GPU?
#
# **Predict.** The model counts waiting and uneven ends, and nothing else. Does the kernel pay more than it says, or less?

# %%
repeated = [row for row in load("deterministic").rows if row.direction == "backward"]
print("time with the same bits over the fast one's")
for row in repeated:
    mask = "causal" if row.problem["causal"] else "full"
    ours, theirs = (row.ratio(name, f"{name} deterministic") for name in ("fa2_lab", "FlashAttention-3"))
    print(f"d = {row.problem['d']:3}, N = {row.problem['N_q']:,}, {mask:6}: {ours:.2f}   FlashAttention-3's turns: {theirs:.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **More, everywhere.** Each part goes through a writer, with two barriers and a counter in HBM. The model has none of them.
# And `choose` gives something up (`same_bits`): at d = 64 the order `last_first`, at d = 128 without a mask half of V in
# registers. How much each of them costs was not measured.
# </details>
#
# FlashAttention-3's own turns cost less than ours at d = 64 under the causal mask, and more everywhere else. Where all
# add in turn it is ahead in that one case, by 1% at N = 2,048 and 11% at N = 8,192.

# %% [markdown]
# `prepare_main` does one more thing. Without a mask the fast kernel has one head at a time, so that Q, dO and sums stay in
# L2. Under the causal mask column blocks take different times, so it has about as many heads as fill the SMs, four at
# least (`at_once`). With turns the next one waits for each addition. More heads hide that, but only as many as have Q and
# dO in 8 MiB of L2 (`at_once_in_turn`). The times above are from before `at_once`. With today's code turns cost 10 to
# 16% on an H100 (timed by hand).
#
# **Takeaway.** In the record, at N = 2,048 and 8,192, the same bits cost 8 to 17% in turn, and 32 to 55% by a second pass.

# %% [markdown]
# ## What was reached?
#
# The FA2 paper's grid: 16,384 tokens, hidden size 2,048, in one run on an H200; FlashAttention-4 in another on an H100.
# Ratios are our speed over theirs.

# %%
for peer in (name for name in rows[0].values if name not in ("fa2_lab", "fa2_lab portable")):
    print("over {:16} {:.2f} in the mean, from {:.2f} to {:.2f}".format(peer, *mean_ratio(rows, peer)))
print("over cuDNN       " + "".join(f"{N:>8,}" for N in (1024, 2048, 4096, 8192, 16384)))
for d, causal in ((64, False), (64, True), (128, False), (128, True)):
    ratios = "".join(f"{row.ratio('fa2_lab', 'cuDNN'):8.2f}" for row in line(d, causal))
    print(f"d = {d:3} {'causal' if causal else 'full  '}   {ratios}")
on_H100 = [row for row in load("h100").rows if row.direction == "backward" and row.problem["N_q"] >= 1024]
print("over FlashAttention-4 {:.2f} in the mean, from {:.2f} to {:.2f}, on an H100".format(*mean_ratio(on_H100, "FlashAttention-4")))
far = [row.ratio("fa2_lab", "FlashAttention-4") for row in load("long").rows if row.direction == "backward"]
print(f"over FlashAttention-4 from N = 32,768 on: {min(far):.3f} to {max(far):.3f}")

# %% [markdown]
# The lead over cuDNN is larger at d = 64, where exponentials weigh most. From N = 1,024 on FlashAttention-3 is behind by 1
# to 12%, least at d = 64 under the causal mask in long sequences. FlashAttention-4, the next version, is 3 to 6%
# behind at d = 64, and level to 5% behind at d = 128. From N = 32,768 on it was up to 5% ahead of an earlier
# version of our kernel.
#
# **Takeaway.** One pass saves two products of seven. That turns into speed as long as nobody waits for the additions.

# %% [markdown]
# ## Recap
#
# - One pass saves two products of seven and half of the exponentials. The price is dQ, to which all column blocks add.
# - A consumer owns 64 keys, with dK and dV in registers. Tiles have keys as rows, so only dS has to be turned.
# - A step: S, with dQ of the step before beside the exponentials; dV; dP; dK.
# - Two consumers meet at dS: one barrier, two places, no release.
# - The copy engine adds dQ. A consumer waits only for its place.
# - Sums in any order differ in their last bits. The same bits cost a second pass, or turns, which are cheaper.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** Masked scores begin at $-\infty$. With what must masked entries of dP begin, so that dQ and dK are
# right? Replace the `...`.
#
# <details><summary>Hint</summary>
#
# p of a masked entry is 0, and dS is p times dP. Which numbers times 0 are not 0?
# </details>
# <details><summary>Solution</summary>
#
# ```python
# begin = 0.0
# ```
# Any finite number does. $0 \cdot (-\infty)$ is NaN, and the products would spread it over whole rows of dQ and dK.
# So one $-\infty$ is enough, and it belongs in S.
# </details>

# %%
begin = ...
visible = np.tril(np.ones((4, 4), bool)).T  # keys down, queries right
s = np.where(visible, -L[:4] * 2, -np.inf) + K[:4] @ Q[:4].T
if begin is ...:
    print("not written yet")
else:
    with np.errstate(invalid="ignore"):
        ds = np.exp(s / 2) * (np.where(visible, -D[:4], begin) + V[:4] @ dO[:4].T)
    wrong = int((~(ds[~visible] == 0)).sum())
    print("right" if wrong == 0 else f"not yet: {wrong} of {(~visible).sum()} masked entries of dS are not 0")

# %% [markdown]
# **2. Complete: a dQ that is the same every time.** Six programs, a column block each, go through six row blocks.
# Products take a random time. Before a program adds its part to row block i, it waits for its turn. `added` lists the
# column blocks that have added to this row block so far. Write the condition under which column block j may add now,
# in place of the `...`.
#
# <details><summary>Hint</summary>
#
# Any fixed order will do. The plainest: 0 first, then 1, then 2. When may j add?
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return len(added) == j
# ```
# In a kernel `len(added)` is a counter in HBM for each row block. The price is waiting. At the start all programs
# want to add to row block 0, and the last one waits for all others. Then they follow each other in steps. One more
# thing must hold: the programs that one waits for must be running. A tile scheduler that hands out lower column
# blocks first sees to that.
# </details>


# %%
def may_add(j, i, added):
    return ...


parts_of_dQ = np.random.default_rng(2).standard_normal((6, 6, 64)).astype(np.float32)  # column block, row block


def one_run(rule, seed):  # the bits of dQ, and the clock at the end
    chance, block, T = random.Random(seed), Block(tensor=SIDE_BY_SIDE), 6
    dQ, added = np.zeros((T, 64), np.float32), [[] for _ in range(T)]

    def program(j):
        for i in range(T):
            yield block.start("tensor", chance.randint(200, 400), "five products").done()
            yield Wait(lambda i=i: rule(j, i, added[i]), f"its turn in row block {i}")
            yield block.start("copy", 40, "add").done()
            dQ[i] += parts_of_dQ[j, i]
            added[i].append(j)

    block.run({f"column block {j}": program(j) for j in range(T)})
    return dQ.tobytes(), block.clock


# %%
def outcome(rule, seeds=range(40)):
    bits, ends = zip(*(one_run(rule, seed) for seed in seeds), strict=True)
    return len(set(bits)), sum(ends) / len(ends)


anyhow = outcome(lambda j, i, added: True)
if may_add(0, 0, []) is ...:
    print(f"not written yet; in any order 40 runs give {anyhow[0]} different dQ, in {anyhow[1]:,.0f} clocks")
else:
    try:
        kinds, end = outcome(may_add)
        price = f"{end:,.0f} clocks instead of {anyhow[1]:,.0f}"
        print(f"right: one dQ in 40 runs, {price}" if kinds == 1 else f"not yet: 40 runs gave {kinds} different dQ")
    except Deadlock as reason:
        print(f"not yet: a deadlock, {str(reason).split(';')[0]}")

# %% [markdown]
# ## Ten questions on part IV
#
# Chapters 12a, 12b and 13, without looking back. An answer opens when you click it.
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
# The small functions of this notebook against the package, its model against the dense gradients, with and without its
# waits, and the gradients of `attention()` against float64. On a Hopper GPU the kernel of this notebook is called.

# %% tags=["hide-input"]
files = sorted(file for file in FOLDER.glob("*.py") if file.stem != "__init__")
verdict("seven files", len(files) == 7)
for file in files:
    parts = filter(None, map(names_of, ast.parse(file.read_text(encoding="utf-8")).body))
    verdict(f"{file.name}: nothing was left out", all(part & READ[file.stem] for part in parts))
want = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=8)
verdict("step = fa2.backward", all(close(x, y) for x, y in zip((dQ, dK, dV), want, strict=True)))
verdict("one by one: 2,909 clocks a step; in the kernel's order under 2,600",
        round(clocks_of_a_step(one_by_one)) == 2909 and 2500 < clocks_of_a_step(kernel_order) < 2600)
expected = [[(n, n) for n in range(7)]] * 2
right = {places: [share_dS(places, seed) == expected for seed in range(200)] for places in (1, 2)}
verdict("share_dS: always right with two places, not with one", all(right[2]) and not all(right[1]))
in_turn = outcome(lambda j, i, added: len(added) == j)
verdict("a fixed order gives one dQ and takes longer", anyhow[0] > 1 and in_turn[0] == 1 and in_turn[1] > anyhow[1])
tiles = [sum(len(writers) for writers in grid.dq_writers(Tiling(16384, 16384, 64, 128, mask))) for mask in (NO_MASK, CAUSAL)]
verdict("the causal mask halves the additions, but for the diagonal", 0.5 < tiles[1] / tiles[0] < 0.51)
for mask, price, waits in ((NO_MASK, 0.02, 0.02), (CAUSAL, 0.07, 0)):
    tiling = Tiling(4096, 4096, 64, 128, mask)
    kinds = ((4, True, True), (4, True, False), (4, False, False))  # heads at a time, the last first, in turn
    with_turns, order, fast = (turns.time(turns.handed_out(tiling, *(64, n, first)), 132, in_turn=x) for n, first, x in kinds)
    verdict(f"turns in the model: {price:.0%} longer, by waiting {waits:.0%}",
            (round(with_turns / fast - 1, 2), round(with_turns / order - 1, 2)) == (price, waits))


# %% tags=["hide-input"]
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

# %% tags=["hide-input"]
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
add, share, only_dQ = model.Sums.add, model.Exchange.share, [False, True, True]
verdict("as it is: right", faulty(model.Sums, "add", add, **slow) == [True] * 3)
verdict("no wait for dQ's place: only dQ wrong", faulty(model.Sums, "add", hasty, **late) == only_dQ)
verdict("one place for dS: only dQ wrong", faulty(model.Exchange, "share", share, places=1, **slow) == only_dQ)
nobody = faulty(model.Exchange, "share", lambda self, c, n, ds: None)
verdict("a dS that is not shown: a deadlock", "waits for dS filled" in nobody)


# %% tags=["hide-input"]
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
# And what the text says of the records.

# %% tags=["hide-input"]
mean, low, _ = mean_ratio(rows, "cuDNN")
verdict("over 1.15 times cuDNN in the mean, over 1.05 everywhere", mean > 1.15 and low > 1.05)
mean, low, high = mean_ratio(rows, "fa2_lab portable")
verdict("two passes: 1.24 to 1.61 times the time", [round(low, 2), round(high, 2)] == [1.24, 1.61])
lead = {(d, causal): mean_ratio(line(d, causal), "cuDNN")[0] for d in (64, 128) for causal in (False, True)}
prices = [row.ratio("fa2_lab", "fa2_lab deterministic") for row in repeated]
verdict("turns cost 8 to 17%", [f"{f(prices):.2f}" for f in (min, max)] == ["1.08", "1.17"])
theirs = {row.problem["d"] == 64 and row.problem["causal"]: [] for row in repeated}
for price, row in zip(prices, repeated, strict=True):
    theirs[row.problem["d"] == 64 and row.problem["causal"]].append(row.ratio("FlashAttention-3", "FlashAttention-3 deterministic") < price)
verdict("FlashAttention-3's cost less at d = 64, causal, only", all(theirs[True]) and not any(theirs[False]))
verdict("more than in the model, everywhere", all(price > 1 + (0.07 if row.problem["causal"] else 0.02)
                                                  for price, row in zip(prices, repeated, strict=True)))
behind = {tuple(map(row.problem.get, ("d", "causal", "N_q"))): row.ratio("fa2_lab", "FlashAttention-3") for row in rows}
verdict("FlashAttention-3: 1 to 12% behind", [round(f(behind.values()), 2) for f in (min, max)] == [1.01, 1.12])
verdict("least at d = 64, causal, long", sorted(sorted(behind, key=behind.get)[:2]) == [(64, True, N) for N in (8192, 16384)])

# %% tags=["hide-input"]
verdict("the lead over cuDNN is larger at d = 64", min(lead[64, True], lead[64, False]) > lead[128, True])
verdict("and smallest at d = 128 without a mask", min(lead, key=lead.get) == (128, False))
over_4 = [[round(row.ratio("fa2_lab", "FlashAttention-4"), 2) for row in on_H100 if row.problem["d"] == d] for d in (64, 128)]
verdict("FlashAttention-4: 3 to 6% behind at d = 64, level to 5% behind at d = 128; ahead by up to 5% on all long sequences",
        [(min(x), max(x)) for x in over_4] == [(1.03, 1.06), (1.0, 1.05)] and 0.95 < min(far) and max(far) < 1)
verdict("S and dP together: the worst, slower by 30% and more", min(r["worth"] for r in tried) == reach(together)[0] and reach(together)[1] <= 0.7)
verdict("dQ under the next S: 6 to 16% faster", [f"{x:.2f}" for x in reach(dQ_late)] == ["1.06", "1.16"])
longer = [reach(dK_late, kept=True, d=d, N_q=16384)[0] > reach(dK_late, kept=True, d=d, N_q=N)[1] for d, N in ((64, 1024), (128, 4096))]
verdict("dK: a gain where it is used, more in long sequences; no gain elsewhere",
        all(longer) and reach(dK_late, kept=True)[0] > 1 > reach(dK_late, kept=False)[1])
half = "half of V in registers"
verdict("half of V: a gain without a mask, a loss with one", reach(half, causal=False)[0] > 1 > reach(half, causal=True)[1])

# %% [markdown] tags=["navigation"]
# [← Hopper, the kernel](12b_hopper_kernel.ipynb) · [The map](00_start.ipynb) · [Decode →](14_decode.ipynb)
