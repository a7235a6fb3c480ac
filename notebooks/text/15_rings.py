# %% [markdown] tags=["navigation"]
# [← Decode](14_decode.ipynb) · [The map](00_start.ipynb) · [The same loop, other masks →](16_masks.ipynb)

# %% [markdown]
# # 15 · Rings
#
# **What if the sequence does not fit on one GPU?**
#
# A long book, a day of video or a genome has more tokens than one GPU can hold. Then the sequence itself is cut, and each
# GPU keeps a piece. Attention still needs every key for every query. So keys have to travel, and the merge of chapter 02
# puts the parts together.
#
# After this notebook you can
#
# - compute exact attention over several GPUs, none of which ever holds all keys,
# - cut a causal sequence so that all GPUs have equal work,
# - say from two speeds and the length of a piece whether the transfers cost time.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop with torch. Its processes play the GPUs,
# and the measured numbers were recorded on four NVIDIA H200. Before this: [02 · Online
# softmax](02_online_softmax.ipynb), [04 · FlashAttention-2, forward](04_fa2_forward.ipynb) and [05 · The backward
# pass](05_backward.ipynb).*

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fa2_lab
from fa2_lab.machine import chips
from fa2_lab.machine import ring as model
from fa2_lab.plots import ring_schedule, ring_speed, zigzag
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.reference.shards import meeting, pieces
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## A ring, step by step
#
# Take a model with 32 layers. Each layer has 16 heads of 128, so a token has 2,048 numbers in each of Q, K, V and O,
# with 2 bytes each. A million tokens ($2^{20}$) make 4 GiB for Q of one layer, and 512 GiB for all four in all layers.
# Training keeps them for the backward pass. An H200 holds 141 GiB.
#
# So we give each GPU a quarter of the tokens. A process with its GPU is called a **rank**, and its part of the
# sequence a **shard**. All else in such a model treats each token by itself, once it knows the token's position. Only
# attention notices the cut. A rank has the queries of its own tokens, and needs the keys and values of all.

# %% [markdown]
# If a rank gathered all keys of a layer, its memory would again grow with the whole sequence. So it takes them one block
# at a time. At each step every rank
#
# 1. computes with the block of K and V that it holds,
# 2. hands the block to its neighbour on the right, and gets one from the left.
#
# The last rank's right neighbour is rank 0. This is *ring attention* (Liu, Zaharia and Abbeel, 2023).
#
# **Predict.** Rank 2 begins with its own block, block 2. Which block does it hold next?

# %% tags=["hide-input"]
def held(rank, step, ranks=4):  # whose K and V a rank holds at a step
    return (rank - step) % ranks


print("        " + "".join(f"rank {rank}   " for rank in range(4)))
for step in range(4):
    print(f"step {step}  " + "".join(f"block {held(rank, step)}  " for rank in range(4)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Block 1**, from its left neighbour. Then 0, then 3.
# </details>
#
# Read a column: after four steps every rank has seen every block. Blocks were handed over three times.
#
# **Takeaway.** In a ring of n ranks everybody sees everything after n − 1 transfers, and holds one block (two during a
# transfer).

# %% [markdown]
# ## What does a rank keep between two steps?
#
# The same as a row block of FA2 between two tiles: a state ($o$, m, ℓ) for each row. Each block gives a finished part
# (O, L). `from_output` turns it back into a state, and `merge` is that of chapter 02. The four ranks are four entries of
# a list here, with 22 rows among them.
#
# **Predict.** Every rank merges the blocks in another order. Does that change the result?

# %%
def part(q, k, v):  # one rank's queries, one block's keys
    return SoftmaxState.from_output(*fa2.forward(q, k, v, B_r=4, B_c=4))


N, d, ranks = 22, 4, 4
Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
rows = np.array_split(np.arange(N), ranks)  # 6, 6, 5 and 5 rows
q, kv = [Q[r] for r in rows], [(K[r], V[r]) for r in rows]
states = [SoftmaxState.reset(len(r), d) for r in rows]
for step in range(ranks):
    states = [state.merge(part(q[rank], *kv[rank])) for rank, state in enumerate(states)]
    if step < ranks - 1:
        kv = [kv[rank - 1] for rank in range(ranks)]  # everybody takes from the left
O = np.concatenate([state.finalize()[0] for state in states])
whole, _ = fa2.forward(Q, K, V, B_r=4, B_c=4)
print(f"largest difference between four ranks and one device: {np.abs(O - whole).max():.12f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No**, except for the last bits, where rounding depends on the order. Order and grouping do not matter (chapter 02).
# </details>
#
# Nothing is approximate. It is FA2's loop over key blocks, and the blocks come from a neighbour instead of from HBM.
#
# There is another way. In an **all-to-all** every rank sends a parcel to every rank. One before attention gives each rank
# all rows of some heads, and one after it brings the rows of O back (*DeepSpeed Ulysses*; Jacobs and others, 2023). For
# many ranks this sends fewer bytes, but it needs at least one head for each rank. The package builds the ring.
#
# **Takeaway.** Ring attention is FA2's inner loop with a cable in it.

# %% [markdown]
# ## Which L does a block need in the backward pass?
#
# In chapter 05, P comes back from S and L: $P = e^{S - L}$. In a ring, each rank has the final L of its rows, over
# all keys of all ranks. When a block of keys comes by again, the rank computes that block's part of the gradients.
#
# **Predict.** Somebody uses the L of the block alone instead. Then each row's weights sum to 1 within every block.
# Are dK and dV too large or too small?

# %% tags=["hide-input"]
dO, blocks = np.random.default_rng(1).standard_normal((N, d)), dict(B_r=4, B_c=4)
O, L = fa2.forward(Q, K, V, **blocks)
truth = fa2.backward(Q, K, V, O, L, dO, **blocks)
dQ, right, wrong = np.zeros((N, d)), np.zeros((2, N, d)), np.zeros((2, N, d))  # of dK and dV
for keys in rows:  # each block, met by all queries
    dq, *right[:, keys] = fa2.backward(Q, K[keys], V[keys], O, L, dO, **blocks)
    dQ += dq
    _, L_block = fa2.forward(Q, K[keys], V[keys], **blocks)
    wrong[:, keys] = fa2.backward(Q, K[keys], V[keys], O, L_block, dO, **blocks)[1:]
for name, found in (("L of all keys", right), ("L of the block", wrong)):
    dK, dV = (np.linalg.norm(got) / np.linalg.norm(want) for got, want in zip(found, truth[1:], strict=True))
    print(f"by the {name:14}: dK is {dK:.1f} times as large as it should be, dV {dV:.1f} times")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Too large,** by a factor between 3 and 4. A row has a weight of 1 to spend on all keys. By the L of each block it spends
# 1 on every block, 4 in all. (It is less than 4 because large weights make their own block's share larger than a quarter,
# so they grow by less. With equal scores it would be exactly 4.)
# </details>
#
# Queries stay, so each rank adds up its dQ at home. Keys travel, so dK and dV travel with them, and each rank adds its
# part. K and V can leave before a step's computation, dK and dV only after it. So dK and dV follow their keys one step
# behind, and their last transfer brings them home. They go in fp32: in 2 bytes the sum would be rounded again on every
# rank. With K and V in 2 bytes a number, backward sends three times as many bytes as forward: $(2 + 4) / 2$.
#
# **Takeaway.** With the final L, each block's gradients can be computed alone. dK and dV travel with their keys.

# %% [markdown]
# ## Is a causal ring fair?
#
# Now no query looks ahead. A rank's queries and another rank's keys are then what a tile was in chapter 04: FULL,
# DIAGONAL or SKIP. `meeting` in the package says which.
#
# **Predict.** Rank 0 has the first quarter of the sequence and rank 3 the last. In how many of the four steps does
# rank 0 have anything to compute?

# %% tags=["hide-input"]
def table(layout, lengths):
    signs = {Tile.FULL: "full", Tile.DIAGONAL: "diagonal", Tile.SKIP: "–"}
    tiles = model.work(lengths, layout, causal=True, B_r=4, B_c=4)
    for rank, counts in enumerate(tiles):
        met = [meeting(lengths, rank, held(rank, step), layout, True) for step in range(len(lengths))]
        steps = "  ".join(f"{signs[m.kind]:8} {n:3}" for m, n in zip(met, counts, strict=True))
        print(f"rank {rank}:  {steps}  = {counts.sum()} tiles")
    print(f"share of the time in which the ranks work: {model.balance(tiles):.0%}")


table("contiguous", [32] * 4)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **In one**: the first, with its own keys. All other keys lie in its future.
# </details>
#
# Each line is a rank, each column a step, with the number of tiles. Rank 3 works all the time and sets the end. The others
# wait for it: on average a rank is idle for more than 40% of the time. (The longer the shards, the nearer is the work to
# 1 : 3 : 5 : 7. Then the ranks work 16 of 28 units, 57%.)
#
# **Takeaway.** Under a causal mask, equal shares of rows are not equal shares of work.

# %% [markdown]
# ## Zigzag
#
# A rank with early rows has little work, one with late rows has much. So give each rank some of both. Cut the
# sequence into 8 pieces. Rank r takes piece r and piece 7 − r.
#
# **Predict.** Rank 1 holds pieces 1 and 6, rank 3 holds pieces 3 and 4. Which of rank 1's two pieces sees keys of
# rank 3?

# %% tags=["hide-input"]
table("zigzag", [32] * 4)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Piece 6**, its back half. It comes after pieces 3 and 4 and sees both as a whole. Piece 1 comes before them and sees
# nothing.
# </details>
#
# There are two cases. If the keys belong to a later rank, the back half of a rank's rows sees all of them. If they belong
# to an earlier rank, all its rows see the front half of them. Each step is one kernel call *without a mask*, on half of
# the square. Only a rank's own block is causal.
#
# *Striped attention* (Brandon and others, 2023) deals rows out one by one instead: rank 1 takes rows 1, 5, 9 and so on. The
# work is nearly even, too, but every step needs a causal mask.
#
# In the picture, each number is the rank that computes this part of the scores. Below are the numbers of tiles of each
# rank, for 131,072 tokens. On the right the four bars are equal.

# %%
show(zigzag.draw(**zigzag.data()))

# %% [markdown]
# **Takeaway.** One piece from the front and one from the back: every rank has the same work, in every step.

# %% [markdown]
# ## Do the cables keep up?
#
# A rank starts to send a block before it computes with it. (Forward, about half of the work on its own block is done
# even earlier, while the ranks check that all made the same call: see below.) If the transfer ends before the
# computation, it has cost no time. Let a shard have n rows. Per head, a step of the causal forward computes $2n^2d$
# FLOPs (half of a square) and sends $4nd$ bytes (K and V, 2 bytes a number).
#
# **Predict.** Shards become twice as long. By which factor does the work of a step grow, and by which the transfer?

# %% tags=["hide-input"]
def smallest(flops, link):  # rows; FLOP/s of the kernel, bytes per second of the link in one direction
    return int(np.ceil(2 * flops / link))  # 2 n² d / flops ≥ 4 n d / link


record = ring_schedule.reached(load("ring"), "forward", 4, 131072)
speeds = {chip.name: (chip.tensor_flops / 2, chip.link_per_second) for chip in (chips.A100, chips.H100, chips.RTX_4090)}
speeds["H200, as recorded"] = record["flops"], record["link"]
print("                    TFLOP/s   link, GB/s   rows in a shard, at least")
for name, (flops, link) in speeds.items():
    print(f"{name:20}{flops / 1e12:7.0f} {link / 1e9:12.0f} {smallest(flops, link):27,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Four and two.** So from some length on the transfer is the shorter one. That length is $2 \cdot$ FLOP/s $/$
# (bytes/s). Neither d nor the number of heads is in it.
# </details>
#
# The first three lines assume half of the peak FLOP/s, and the data sheet's speed of the *link* between GPUs, in one
# direction: NVLink, NVIDIA's cable between GPUs, or on the RTX 4090 the computer's ordinary bus. The last line is
# measured: the kernel reached 636 TFLOP/s, and K and V went round at 138 GB/s, less than a third of the nominal 450.

# %%
show(ring_schedule.draw(**ring_schedule.data()))

# %% [markdown]
# Above: whose keys each rank has at each step. Below: one rank's time by the model, with measured speeds. K and V
# travel during the kernels. The rank begins with 9/16 of the work on its own block. Forward, transfers start after it, so
# the first one has only the other 7/16 beside it. Backward, the first one runs beside the 9/16, and the rest of the own
# block comes last, while the rank's dK and dV come home.

# %% [markdown]
# The white bars are measured at 131,072 tokens: forward 10% slower than the model, backward 15%. (They, and
# all times of rings in this chapter, are of an older version of the code, in which a rank computed nothing until all ranks
# had agreed. The model has today's order.) A short ring
# takes several times what the model says, because starting a step takes time whatever its size. (Why 8k tokens take longer
# than 16k, we do not know.)
#
# **Takeaway.** Work grows with the square of the shard, traffic with the shard. Long sequences hide their transfers.

# %% [markdown]
# ## What do four GPUs gain?
#
# `fa2_lab.distributed` runs this ring with the parts of torch that carry messages: NCCL between GPUs, gloo between the
# processes of a laptop. A user writes this, and starts it with `torchrun --nproc-per-node 4`:
#
# ```python
# tokens, positions = shard(tokens, dim=1), shard(torch.arange(N), dim=0)  # small: every rank holds all of them
# ...  # the model makes q, k and v of its own tokens
# O = ring_attention(q, k, v, causal=True)  # where attention(q, k, v, causal=True) stood
# O = unshard(O)  # only for a test: all rows, on every rank. All ranks must call it.
# ```
#
# A ring hangs if one rank sends 100 rows and its neighbour waits for 101. So before any transfer each rank sends all
# others a *header*, 2 KiB with its number of rows and its options. Meanwhile, forward, it computes about half of what its
# queries see of its own keys. If options differ, all stop with the same message. The checks below run it in four
# processes: once with equal options, and once with a wrong dtype on one rank.

# %% [markdown]
# Four H200 in one machine: bf16, causal, 16 heads of 128, forward and backward. One GPU running `attention` is the
# baseline.
#
# **Predict.** At 8,192 tokens, are four GPUs faster than one?

# %% tags=["hide-input"]
recorded = ring_speed.data()
for n, curve in recorded["curves"].items():
    print(f"{n} GPUs, times as fast as one:", "  ".join(f"{N:,}: {times:.2f}" for N, times in curve))
used = recorded["memory"]
show(ring_speed.draw(**recorded))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No: about a quarter as fast.** A shard has 2,048 rows, and the kernel of a step is over in a few hundredths of a
# millisecond. Agreeing, starting transfers and launching kernels take longer than that.
# </details>
#
# From 32,768 tokens on the ring is faster. At 131,072 four GPUs are 3.55 times as fast as one. They are not 4 times
# as fast: transfers occupy some SMs, and merges take time. How much of it each costs, nobody has measured. The cross is
# four GPUs with contiguous shards.
#
# Memory falls, but not to a quarter. Besides its shard a rank holds two blocks of K and V and their gradients, for the
# heads that are travelling. So up to 32,768 tokens each of two GPUs needs more memory than a single GPU does (RESULTS.md).
#
# **Takeaway.** A ring pays when a step takes much longer than starting it.

# %% [markdown]
# ## Recap
#
# - Cut the sequence. Queries stay, keys and values go round, and the parts (O, L) of the blocks are merged.
# - Under a causal mask contiguous shards leave ranks idle for more than 40% of the time. Zigzag makes the work even.
# - Forward, a whole step hides a transfer from $2 \cdot$ FLOP/s $/$ (bytes/s) rows on, whatever d is.
# - Backward, the final L makes each block's gradients exact. dK and dV travel with their keys, in fp32.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** The backward ring with four lists, 24 rows and no mask. Each rank adds to dK and dV of the block that is with
# it, and hands K and V on. Something else must go on with them. Replace the line.
#
# <details><summary>Hint</summary>
#
# The gradients of block b must be where block b is. Look at the line above.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# d_kv = [d_kv[rank - 1] for rank in range(ranks)]
# ```
# The gradients start at home here and are handed on four times: the last transfer brings them home.
# </details>

# %%
def backward_ring(q, kv, o, lse, do):  # lists, one entry for each rank
    dq, d_kv = [np.zeros_like(x) for x in q], [np.zeros((2, *x.shape)) for x in q]
    for _ in range(ranks):
        for rank in range(ranks):
            part_q, *part_kv = fa2.backward(q[rank], *kv[rank], o[rank], lse[rank], do[rank], B_r=4, B_c=4)
            dq[rank], d_kv[rank] = dq[rank] + part_q, d_kv[rank] + part_kv
        kv = [kv[rank - 1] for rank in range(ranks)]
        d_kv = d_kv  # your line
    return dq, d_kv

# %% tags=["hide-input"]
Q_e, K_e, V_e, dO_e = np.random.default_rng(5).standard_normal((4, 24, d))
O_e, L_e = fa2.forward(Q_e, K_e, V_e, B_r=4, B_c=4)
q_e, k_e, v_e, o_e, l_e, do_e = (np.split(x, ranks) for x in (Q_e, K_e, V_e, O_e, L_e, dO_e))
_, found = backward_ring(q_e, list(zip(k_e, v_e, strict=True)), o_e, l_e, do_e)
wanted = [np.split(x, ranks) for x in fa2.backward(Q_e, K_e, V_e, O_e, L_e, dO_e, B_r=4, B_c=4)[1:]]
off = [max(np.abs(found[rank][i] - wanted[i][rank]).max() for i in (0, 1)) for rank in range(ranks)]
stay = sum(np.stack(fa2.backward(q_e[0], *kv, o_e[0], l_e[0], do_e[0], B_r=4, B_c=4)[1:]) for kv in zip(k_e, v_e, strict=True))
if close(found[0], stay):
    print("not written yet: all gradients stay where they are")
elif max(off) < 1e-9:
    print("right")
else:
    print("not yet: dK and dV are off by", ", ".join(f"{x:.2f} on rank {rank}" for rank, x in enumerate(off)))

# %% [markdown]
# **2. Complete.** With grouped heads, `group` query heads share one K/V head. By how much does the smallest shard change?
# Replace the `...`. The work is that of the query heads; the bytes are those of the K/V heads.
#
# <details><summary>Hint</summary>
#
# For each K/V head: group · $2n^2d$ FLOPs and $4nd$ bytes. When do both take the same time?
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return 2 * flops / link / group
# ```
# With four query heads for each K/V head, a quarter of the rows is enough.
# </details>

# %%
def smallest_grouped(flops, link, group):
    return ...

# %% tags=["hide-input"]
if smallest_grouped(1.0, 1.0, 1) is ...:
    print("not written yet")
else:
    sizes = dict(heads=16, d=128, causal=True, flops=5e14, link=4.5e11)
    wanted = {g: model.smallest_shard("forward", kv_heads=16 // g, **sizes) for g in (1, 4, 16)}
    wrong = [g for g in wanted if abs(smallest_grouped(5e14, 4.5e11, g) - wanted[g]) > 1]
    print("right" if not wrong else f"not yet: for a group of {wrong[0]} it is {wanted[wrong[0]]:,.0f} rows")

# %% [markdown]
# ## Checks
#
# The ring of this notebook against the package's, the package against one device, and four processes.

# %% tags=["hide-input"]
lengths, loop = [len(r) for r in rows], np.concatenate([state.finalize()[0] for state in states])
package, _ = model.forward(Q, K, V, lengths, layout="contiguous", links=model.Links())
verdict("the ring of four lists = model.forward = one device", close(loop, package) and close(package, whole))
verdict("by the L of all keys: dQ, dK and dV", close(dQ, truth[0]) and close(right, truth[1:]))
rng = np.random.default_rng(2)
for lengths in ([5, 4, 4], [7, 0, 6, 1], [13]):
    Q_r, K_r, V_r, dO_r = rng.standard_normal((4, sum(lengths), 3))
    for layout in ("zigzag", "contiguous"):
        for causal, mask in ((False, NO_MASK), (True, CAUSAL)):
            options = dict(layout=layout, causal=causal)
            links = model.Links(), model.Links()
            O_r, L_r = model.forward(Q_r, K_r, V_r, lengths, **options, links=links[0])
            found = O_r, *model.backward(Q_r, K_r, V_r, O_r, L_r, dO_r, lengths, **options, links=links[1])
            O_1, L_1 = fa2.forward(Q_r, K_r, V_r, B_r=4, B_c=4, mask=mask)
            truth_r = O_1, *fa2.backward(Q_r, K_r, V_r, O_1, L_1, dO_r, B_r=4, B_c=4, mask=mask)
            verdict(f"shards {lengths}, {layout}, causal {causal}: O, dQ, dK, dV", all(map(close, found, truth_r)))

# %% tags=["hide-input"]
script = """
import torch, torch.distributed as dist
from fa2_lab.api.attention import attention
from fa2_lab.distributed import counting, ring_attention, shard, unshard

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
q, k, v, dO = torch.randn(4, 1, 2, 101, 16)  # the same on every rank
mine = [shard(x).requires_grad_() for x in (q, k, v)]
with counting() as sent:
    O = ring_attention(*mine, causal=True, backend="reference")
    gradients = torch.autograd.grad(O, mine, shard(dO))

whole = [x.requires_grad_() for x in (q, k, v)]
want = attention(*whole, causal=True, backend="reference")
truth = [want, *torch.autograd.grad(want, whole, dO)]
error = max((unshard(x) - y).abs().max().item() for x, y in zip([O, *gradients], truth))
said = f"{mine[0].shape[2]} rows, largest error of O, dQ, dK, dV {error:.4f}, sent {dict(sent)}"
print(f"rank {dist.get_rank()}: {said}\\n", end="")
"""

# %% tags=["hide-input"]
a_mistake = """
from fa2_lab.distributed import ring_attention

q = torch.randn(1, 2, 10, 16, dtype=torch.float16 if dist.get_rank() == 1 else torch.float32)
try:
    ring_attention(q, q, q, backend="reference", timeout=30)
except ValueError as error:
    print(f"mistake, rank {dist.get_rank()}: {error}\\n", end="")
"""


def torchrun(script, ranks=4):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(script)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), file]
        where = {"PYTHONPATH": str(Path(fa2_lab.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | where, timeout=240)
    return sorted(done.stdout.splitlines())


said = torchrun(script + a_mistake)
mistaken, real = ([line for line in said if line.startswith(start)] for start in ("mistake, ", "rank "))

# %% tags=["hide-input"]
for layout in ("zigzag", "contiguous"):
    places = pieces([6, 5, 5, 5], layout)
    taken = sorted(i for of_rank in places for p in of_rank for i in range(p.start, p.stop))
    verdict(f"{layout}: every row has one rank", taken == list(range(21)))
sizes = dict(heads=16, kv_heads=16, d=128, causal=True, flops=5e14, link=4.5e11)
verdict("smallest here = model.smallest_shard", smallest(5e14, 4.5e11) == model.smallest_shard("forward", **sizes))
verdict("and d is not in it", model.smallest_shard("forward", **sizes | dict(d=64)) == smallest(5e14, 4.5e11))
even = model.work([64] * 4, "zigzag", True, 4, 4).sum(axis=1)
verdict("zigzag is even, tile by tile", len(set(even.tolist())) == 1)
verdict("four processes: O, dQ, dK and dV right on each", [line.count("dV 0.0000,") for line in real] == [1] * 4)
unit = 2 * 2 * 16 * 4  # bytes of a row of K and V: two heads of 16 in fp32
said = [f"'K V': {2 * (101 - n) * unit}" for n in (25, 25, 25, 26)]
verdict("each sent what the model says, forward and backward", all(s in line for s, line in zip(said, real, strict=True)))
verdict("a mistake on one rank is told on all four", sum("agree on dtype" in line for line in mistaken) == 4)

# %% tags=["hide-input"]
lengths, links, width = [8] * 4, {"forward": model.Links(), "backward": model.Links()}, {"K V": 2, "dK dV": 4}
Q_w, K_w, V_w, dO_w = np.random.default_rng(6).standard_normal((4, 32, 4))
O_w, L_w = model.forward(Q_w, K_w, V_w, lengths, causal=True, links=links["forward"])
model.backward(Q_w, K_w, V_w, O_w, L_w, dO_w, lengths, causal=True, links=links["backward"])
sent = {way: sum(width[what] * n for (_, what), n in links[way].elements.items()) for way in links}
closed = {way: 4 * sum(model.sent(lengths, 0, way, kv_heads=1, d=4).values()) for way in links}
verdict("bytes on the links = the closed form, three times as many backward", sent == closed and sent["backward"] == 3 * sent["forward"])
gib = 2**20 * 16 * 128 * 2 / 2**30
verdict("4, 512 and 141 GiB", (gib, 4 * 32 * gib, round(chips.H200.hbm_bytes / 2**30)) == (4, 512, 141))
seen = [meeting([32] * 4, 1, source, "zigzag", True) for source in (3, 0)]
verdict("zigzag: back rows meet all keys, or all rows the front keys", [(m.queries, m.keys) for m in seen]
        == [(slice(16, 32), slice(0, 32)), (slice(0, 32), slice(0, 16))])

# %% [markdown]
# And what the text says of the record.

# %% tags=["hide-input"]
speed = {n: dict(curve) for n, curve in recorded["curves"].items()}
verdict("8,192 tokens: four GPUs about a quarter as fast as one", 0.2 < speed[4][8192] < 0.28)
verdict("faster from 32,768 on", all(s[16384] < 1.01 and min(s[N] for N in s if N >= 32768) > 1.5 for s in speed.values()))
verdict("131,072 tokens: 3.55 times on four, over 1.8 on two", round(speed[4][131072], 2) == 3.55 and speed[2][131072] > 1.8)
verdict("each GPU needs less memory the more there are", list(used.values()) == sorted(used.values(), reverse=True))
verdict("but more than a quarter", used[4] > used[1] / 4)
verdict("recorded: 636 TFLOP/s, 138 GB/s", round(record["flops"] / 1e12) == 636 and round(record["link"] / 1e9) == 138)

# %% [markdown] tags=["navigation"]
# [← Decode](14_decode.ipynb) · [The map](00_start.ipynb) · [The same loop, other masks →](16_masks.ipynb)
