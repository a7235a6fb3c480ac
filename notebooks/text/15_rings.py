# %% [markdown] tags=["navigation"]
# [← Decode](14_decode.ipynb) · [The map](00_start.ipynb) · [Lanes, layouts, banks →](A_lanes.ipynb)

# %% [markdown]
# # 15 · Rings
#
# **What if the sequence does not fit on one GPU?**
#
# Everything so far ran on one chip: warps shared a tile, thread blocks shared a head. A long book, a day of video or a
# genome is more than one GPU can hold. Then the sequence itself is cut, and the merge of notebook 02 has to work over
# a cable.
#
# After this notebook you can
#
# - compute exact attention over several machines, none of which ever holds all keys,
# - share causal work out evenly, and say why equal shares of rows are not equal shares of work,
# - tell from three numbers whether the cables keep up, forward and backward.
#
# *Time: 30 minutes. Hardware: any laptop with torch; its processes play the GPUs. Before this:
# [02 · Online softmax](02_online_softmax.ipynb), [05 · The backward pass](05_backward.ipynb).*

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
from fa2_lab.reference import fa2
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.reference.shards import meeting, pieces
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile

# %% [markdown]
# ## Which layer minds if the rows are cut?
#
# Take a model with 16 heads of 128, so 2,048 numbers for each token and tensor, in 16 bits. Training keeps Q, K, V and O
# of every layer for the backward pass. Say 32 layers and a million tokens.
#
# **Predict.** How many gigabytes is that? And if four GPUs hold a quarter of the tokens each: which parts of the model
# can go on as if nothing had happened?

# %%
tokens, width, layers = 2**20, 16 * 128, 32
one_tensor = tokens * width * 2  # bytes
one_layer = 4 * one_tensor / 2**30  # Q, K, V, O in GiB
print(f"Q, K, V, O of one layer: {one_layer:.0f} GiB; of {layers} layers: {layers * one_layer:.0f} GiB")
print(f"an H200 holds {chips.H200.hbm_bytes / 2**30:.0f} GiB")

# %% [markdown]
# <details><summary>What goes on as before</summary>
#
# Everything that treats each token by itself: projections, norms, feed-forward layers, the loss. Only attention lets one
# token look at another. A rank (one process with one GPU) has the queries of its tokens, and needs the keys and values
# of everybody.
# </details>
#
# **Takeaway.** Cut the sequence, and attention is the only layer that has to talk.

# %% [markdown]
# ## Four ranks and a ring
#
# A rank that gathered all keys first would hold the whole sequence again. So it takes them one block at a time: look at
# the block that is here, hand it to the neighbour on the right, take the next from the left. What it has learned so far
# is a `SoftmaxState`, and each block is one more merge: *ring attention* (Liu, Zaharia and Abbeel, 2023). The four ranks are
# four entries of a list here.
#
# **Predict.** How often is a block handed over until every rank has seen all keys?

# %%
def part(q, k, v, mask=NO_MASK):  # one rank's queries, one block's keys: a finished part, taken up again
    O, L = fa2.forward(q, k, v, B_r=4, B_c=4, mask=mask)
    return SoftmaxState.from_output(O, L)


N, d, ranks = 22, 4, 4
Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
rows = np.array_split(np.arange(N), ranks)  # 6, 6, 5 and 5 rows
q, kv = [Q[r] for r in rows], [(K[r], V[r]) for r in rows]
states, handed_over = [SoftmaxState.reset(len(r), d) for r in rows], 0
for step in range(ranks):
    states = [state.merge(part(q[rank], *kv[rank])) for rank, state in enumerate(states)]
    if step < ranks - 1:
        kv, handed_over = [kv[rank - 1] for rank in range(ranks)], handed_over + 1
O = np.concatenate([state.finalize()[0] for state in states])
whole, _ = fa2.forward(Q, K, V, B_r=4, B_c=4)
print("handed over", handed_over, "times; same as on one device:", close(O, whole))

# %% [markdown]
# <details><summary>Why three times</summary>
#
# A rank begins with its own block, so three are missing. Rank 2 sees the blocks of 2, 1, 0 and 3, in this order, rank 3
# those of 3, 2, 1 and 0: everybody merges in another order, and notebook 02 has shown that the order does not matter.
# Nothing is approximate, and no rank has ever held more than its own rows and one block.
# </details>
#
# **Takeaway.** Ring attention is FA2's inner loop with a cable in it: the key blocks come from the neighbour instead of
# from HBM.

# %% [markdown]
# ## The causal mask is unfair
#
# Now let no query look ahead. A pair (queries of one rank, keys of another) is then what a tile was in notebook 04: FULL,
# DIAGONAL or SKIP. The package decides it in `meeting`.
#
# **Predict.** Rank 0 has the first quarter of the sequence, rank 3 the last. In which ratio do the four ranks compute?
# How long does the whole ring take, compared with a fair division?

# %%
def table(layout, lengths):
    signs = {Tile.FULL: "full", Tile.DIAGONAL: "diagonal", Tile.SKIP: "–"}
    tiles = model.work(lengths, layout, causal=True, B_r=4, B_c=4)
    for rank, counts in enumerate(tiles):
        met = [meeting(lengths, rank, (rank - step) % len(lengths), layout, True) for step in range(len(lengths))]
        steps = "  ".join(f"{signs[m.kind]:8} {n:3}" for m, n in zip(met, counts, strict=True))
        print(f"rank {rank}:  {steps}  = {counts.sum()} tiles")
    print(f"busy, if the last one sets the end: {model.balance(tiles):.0%}")


table("contiguous", [32] * 4)

# %% [markdown]
# <details><summary>The ratio</summary>
#
# 1 : 3 : 5 : 7, but for the tiles on the diagonal: rank r sees r whole blocks and half of its own. Rank 3 works in every
# step and sets the end; the others wait for more than 40% of the time. With many ranks it tends
# to half.
# </details>
#
# **Takeaway.** Under a causal mask equal shares of rows are not equal shares of work.

# %% [markdown]
# ## Zigzag
#
# Exercise 1 of chapter 06 paired row blocks so that all pairs were equal: the first with the last, the second with the
# last but one. Ranks can do the same. Cut the sequence into 8 pieces; rank r takes piece r and piece 7 − r.
#
# **Predict.** Rank 1 holds pieces 1 and 6. Which of its rows see the keys of rank 0 (pieces 0 and 7), and which see the
# keys of rank 3 (pieces 3 and 4)?

# %%
table("zigzag", [32] * 4)
for source in (0, 3):
    seen = meeting([32] * 4, 1, source, "zigzag", True)
    print(f"rank 1 meets rank {source}: rows {seen.queries.start}–{seen.queries.stop - 1} of its 32,", end=" ")
    print(f"keys {seen.keys.start}–{seen.keys.stop - 1} of 32")

# %%
show(zigzag.draw(**zigzag.data()))

# %% [markdown]
# <details><summary>Why every step is one call</summary>
#
# All rows of rank 1 come after piece 0 and before piece 7: they see the front piece of rank 0, whole. Pieces 3 and 4 lie
# between its own two: the front piece sees nothing of rank 3, the back piece sees all. So each step is a single
# unmasked kernel call on half of the square, and the own block is an ordinary causal one. No new kernel is needed. (Dealing
# out single tokens in turn, as striped attention does, evens the work too, but leaves a mask in every step.)
# </details>
#
# **Takeaway.** A piece from the front and one from the back: every rank computes the same, in every step.

# %% [markdown]
# ## Do the cables keep up?
#
# A rank starts sending a block before it computes with it. If the transfer is done first, it has cost nothing. For a
# shard of n rows, a step of the causal forward computes 2 n² d FLOPs for each head (half of a square) and sends 4 n d
# bytes (K and V, 2 bytes a number).
#
# **Predict.** How does the smallest shard that hides its transfer depend on d? On the number of heads? On n?

# %%
def smallest(flops, link):  # FLOP/s of the kernel, bytes per second of the link, one direction
    return int(np.ceil(2 * flops / link))  # 2 n² d / flops ≥ 4 n d / link


print("GPU              FLOPs per byte of link   rows in a shard, at least (half of the peak FLOP/s)")
for chip in (chips.A100, chips.H100, chips.RTX_4090):
    flops, link = chip.tensor_flops / 2, chip.link_per_second
    print(f"{chip.name:17}{flops / link:10,.0f} {smallest(flops, link):27,}")

# %%
show(ring_schedule.draw(**ring_schedule.data()))

# %% [markdown]
# K and V travel while a rank computes, so the transfers cost nothing here. At 131,072 tokens the measured ring (the open
# bars) is a little slower than the model. A ring of 8,192 tokens takes several times what the model says: to start its
# steps costs more than their work.
#
# <details><summary>What cancels, and what the formula leaves out</summary>
#
# d and the heads stand on both sides. n stands squared on one: twice the rows are four times the work and twice the
# bytes. So the threshold is a property of machine and kernel alone: FLOPs per second over bytes per second, times two.
# With grouped heads, K and V are smaller and the threshold falls by that factor.
#
# Left out: what it costs to start a kernel and a transfer, and that a transfer takes a few of the SMs while it runs.
# </details>
#
# **Takeaway.** Computation grows with the square of the shard, traffic with the shard: long sequences hide their cables.

# %% [markdown]
# ## Backward: what does a block need to know?
#
# In notebook 05, P comes back from S and L alone: P = exp(S − L). Each rank has L of its own rows, over all keys of all
# ranks. So a block's share of the gradients can be computed when it comes by again.
#
# **Predict.** Suppose a rank takes for L not the final one, but that of the block at hand. The weights of each row then
# sum to 1 within every block. Are dK and dV of that block too large or too small?

# %%
dO = np.random.default_rng(1).standard_normal((N, d))
O, L = fa2.forward(Q, K, V, B_r=4, B_c=4)
truth = fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=4)
blocks = dict(B_r=4, B_c=4)
dQ, right, wrong = np.zeros((N, d)), np.zeros((2, N, d)), np.zeros((2, N, d))  # of dK and dV
for keys in rows:  # each block, met by all queries
    dq, dk, dv = fa2.backward(Q, K[keys], V[keys], O, L, dO, **blocks)
    dQ, right[:, keys] = dQ + dq, (dk, dv)
    _, L_block = fa2.forward(Q, K[keys], V[keys], **blocks)
    wrong[:, keys] = fa2.backward(Q, K[keys], V[keys], O, L_block, dO, **blocks)[1:]
print("by the L of all keys, blocks add up to dQ, and have dK and dV:", close(dQ, truth[0]), close(right, truth[1:]))
size = [np.linalg.norm(got) / np.linalg.norm(want) for got, want in zip(wrong, truth[1:], strict=True)]
print(f"by the L of each block: dK is {size[0]:.1f} times as large, dV {size[1]:.1f} times")

# %% [markdown]
# <details><summary>Why too large, and who carries what</summary>
#
# A row has a weight of 1 to spend on all keys. By the L of each block it spends 1 on every block, 4 in all, and dK and dV
# grow with the weights.
#
# dQ belongs to the queries, which stay: each rank adds its parts up at home. dK and dV belong to the keys, which travel:
# so they travel too, one step behind, and every rank adds its part. They go as fp32, since each rank would round them
# again. The last hop brings them home. A rank's own block is split in two: one half at the start, while the first block
# is under way, the other at the end, while its own gradients come home.
# </details>
#
# **Takeaway.** With the final L and O, any block's gradients can be had alone; dK and dV ride along with their keys.

# %% [markdown]
# ## How many bytes?
#
# `model.forward` and `model.backward` are this ring in NumPy, with a meter on every link.
#
# **Predict.** Forward sends K and V in 16 bits; backward sends them again, and dK and dV in 32. How many times as much
# does the backward pass send?

# %%
lengths = [len(r) for r in rows]
forward_links, backward_links = model.Links(), model.Links()
ring_O, ring_L = model.forward(Q, K, V, lengths, causal=True, links=forward_links)
model.backward(Q, K, V, ring_O, ring_L, dO, lengths, causal=True, links=backward_links)
width = {"K V": 2, "dK dV": 4}  # bytes of a number on the link
for rank in range(ranks):
    counted = forward_links.elements, backward_links.elements
    sent = [sum(width[w] * n for (r, w), n in elements.items() if r == rank) for elements in counted]
    closed = [sum(model.sent(lengths, rank, way, kv_heads=1, d=d).values()) for way in ("forward", "backward")]
    print(f"rank {rank}: forward {sent[0]} bytes, backward {sent[1]}; the closed form says {closed[0]} and {closed[1]}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Three times, if all shards are equal: 2 bytes against 2 + 4. It computes 2.5 times as much, so backward is a little
# harder to hide than forward.
# </details>
#
# **Takeaway.** Forward (n − 1) blocks of K and V for each rank, backward the same and as many of dK and dV in fp32.

# %% [markdown]
# ## Real processes
#
# `fa2_lab.distributed` does all this on torch's process groups: NCCL between GPUs, gloo between the processes of a
# laptop. The script below is what a user writes; `torchrun` starts it four times. `shard` cuts, `ring_attention` takes
# the place of `attention`, `unshard` joins.

# %%
script = """
import torch, torch.distributed as dist
from fa2_lab.attention import attention
from fa2_lab.distributed import counting, ring_attention, shard, unshard

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
q, k, v, dO = torch.randn(4, 1, 2, 101, 16)  # the same on every rank; 101 rows do not divide by 4
mine = [shard(x).requires_grad_() for x in (q, k, v)]
with counting() as sent:
    O = ring_attention(*mine, causal=True, backend="reference")
    gradients = torch.autograd.grad(O, mine, shard(dO))

whole = [x.requires_grad_() for x in (q, k, v)]
want = attention(*whole, causal=True, backend="reference")
truth = [want, *torch.autograd.grad(want, whole, dO)]
same = [torch.allclose(unshard(x), y, atol=1e-5) for x, y in zip([O, *gradients], truth)]
said = f"{mine[0].shape[2]} rows, O, dQ, dK, dV right: {all(same)}, sent {dict(sent)}"
print(f"rank {dist.get_rank()}: {said}\\n", end="")
"""


# %%
def torchrun(script, ranks=4):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(script)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), file]
        where = {"PYTHONPATH": str(Path(fa2_lab.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | where, timeout=240)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


real = torchrun(script)
print("\n".join(real))

# %% [markdown]
# **Takeaway.** One call takes the place of another; the lengths of the shards are agreed on by the ranks themselves.

# %% [markdown]
# ## When somebody disagrees
#
# A ring hangs if one rank sends 100 rows and its neighbour waits for 101, or for nobody. So before any transfer each rank
# tells the others in a few bytes what it was called with: shapes, type, mask, scale.
#
# **Predict.** Rank 1 gets its tensors in another type. What happens on rank 3, which is not its neighbour?

# %%
script_of_a_mistake = """
import torch, torch.distributed as dist
from fa2_lab.distributed import ring_attention

dist.init_process_group("gloo")
q = torch.randn(1, 2, 10, 16, dtype=torch.float16 if dist.get_rank() == 1 else torch.float32)
try:
    ring_attention(q, q, q, backend="reference", timeout=30)
except ValueError as error:
    print(f"rank {dist.get_rank()}: {error}\\n", end="")
"""
mistaken = torchrun(script_of_a_mistake)
print("\n".join(line.replace("ring_attention: ", "") for line in mistaken))

# %% [markdown]
# <details><summary>And if a rank has died?</summary>
#
# Then the others do not hear from it, and raise an error after `timeout` seconds at the latest. The agreement runs
# between the CPUs, over a gloo group of its own, so it waits for no GPU. It is made anew in every call: a rank that
# trusted an earlier agreement would start a transfer that nobody answers.
# </details>
#
# **Takeaway.** Whoever works in a ring depends on everybody: agree first, with a time limit, then send.

# %% [markdown]
# ## Measured
#
# The record in `figures/data/bench_ring.json` comes from four H200s in one machine (`torchrun --nproc-per-node 4 -m
# fa2_lab bench ring`): bf16, causal, 16 heads of 128, forward and backward; one GPU running `attention` is the baseline.
#
# **Predict.** At 131,072 tokens, how much faster are four GPUs than one? And at 8,192?

# %%
recorded = ring_speed.data()
show(ring_speed.draw(**recorded))

# %%
shares = {n: {N: times / n for N, times in curve} for n, curve in recorded["curves"].items()}
for n, by_length in shares.items():
    print(f"{n} GPUs, share of linear speed:", "  ".join(f"{N:,}: {share:.0%}" for N, share in by_length.items()))

# %% [markdown]
# <details><summary>Why short sequences lose</summary>
#
# At 8,192 tokens a shard has 2,048 rows, and a step's kernel is over in a few hundredths of a millisecond: less than it
# takes to agree, to start transfers and to launch. One GPU does the whole job in less than two milliseconds. The model above knows
# only bytes and FLOPs, so it gives a lower bound for the length.
#
# Memory falls too, but not to a quarter: besides its shard a rank holds a block that is here, one that comes, and
# their gradients. Heads take turns in the ring, so that these are 64 MiB each, however long the shard.
# </details>
#
# <details><summary>And why not all of it at 131,072?</summary>
#
# An earlier version was slower: in each backward step its kernels waited for a block's dK and dV, which only the additions
# after them need. With that wait behind the kernels it is what the picture shows, and a test asks that every transfer has
# a kernel to hide under. The rest is the transfers' own share of the SMs, the merges, and the agreement.
# </details>
#
# **Takeaway.** A ring pays from the length on where a step's kernels outlast its messages, and from there on the more the longer.

# %% [markdown]
# ## Recap
#
# - Cut the sequence; queries stay, keys and values go round, (O, L) of the blocks are merged.
# - Under a causal mask contiguous shards leave ranks idle for nearly half of the time. Zigzag makes them even.
# - The smallest shard that hides its transfer is 2 · FLOP/s / (bytes/s): neither d nor the heads are in it.
# - Backward, the final L and O make each block's gradients exact; dK and dV follow their keys in fp32.
# - Ranks agree before they send, within a time limit.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** Eight ranks, contiguous and causal: which share of the time are they busy? And zigzag?
#
# <details><summary>Hint</summary>
# In units of half a block rank r computes 2r + 1.
# </details>
# <details><summary>Answer</summary>
#
# 1 + 3 + … + 15 = 64, and the last rank alone has 15: 64 / (8 · 15) = 53%. Zigzag: all.
# </details>
#
# **2. Complete.** Give rank `r` of `n` its two pieces of the zigzag, so that the last line prints equal numbers. The cost of
# piece i is i + 1/2 (it sees i pieces and half of itself).

# %%
def my_pieces(r, n):
    return r, r + n  # replace this line


costs = [sum(i + 0.5 for i in my_pieces(r, 4)) for r in range(4)]
print("work of each rank:", costs)

# %% [markdown]
# <details><summary>Hint</summary>
# The two numbers must have the same sum for every rank.
# </details>
# <details><summary>Answer</summary>
#
# `return r, 2 * n - 1 - r`: the sum is 2n − 1 for every rank.
# </details>
#
# **3. Break and fix.** The ring below merges outputs without their logsumexps: it takes the mean. Before you run it: for
# which inputs would it be right?

# %%
parts = [fa2.forward(Q, K[keys], V[keys], B_r=4, B_c=4)[0] for keys in rows]
print("the mean of the parts is the result:", close(np.mean(parts, axis=0), whole))
alike = [fa2.forward(0 * Q, K[keys], V[keys], B_r=4, B_c=4)[0] for keys in rows]
print("with Q = 0:", close(np.mean(alike, axis=0), fa2.forward(0 * Q, K, V, B_r=4, B_c=4)[0]))
print("with Q = 0 and shards of 5, 5 and 5 of 15 rows:", end=" ")
alike = [fa2.forward(0 * Q, K[i : i + 5], V[i : i + 5], B_r=4, B_c=4)[0] for i in (0, 5, 10)]
print(close(np.mean(alike, axis=0), fa2.forward(0 * Q, K[:15], V[:15], B_r=4, B_c=4)[0]))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only where each row gives every block the same weight, that is, where L is the same for all: with Q = 0 and equal
# shards, and hardly ever otherwise. A test with zeros and even shards would pass. Merge by `exp(L_part − L)`.
# </details>

# %% [markdown]
# ## Ten questions on part V
#
# Chapters 14 and 15, without looking back. An answer opens when you click it.
#
# <details><summary>1. One query meets a long cache. What limits its speed?</summary>
#
# The bytes of K and V. Each is read once, for about one FLOP per byte.
# </details>
# <details><summary>2. Four query heads share one key head. How do they share one read of the keys?</summary>
#
# They become rows of one tile.
# </details>
# <details><summary>3. Why is a program per head a poor choice in decoding?</summary>
#
# Heads are few, and their caches differ in length. Equal shares of tiles keep all SMs busy.
# </details>
# <details><summary>4. Keys of one head lie in two shares. What does each share hand over?</summary>
#
# Its $o$ and its $L$ for each row. A merge puts them together.
# </details>
# <details><summary>5. What does a block table change in the arithmetic?</summary>
#
# Nothing. It says where a row of K or V lies.
# </details>
# <details><summary>6. In a ring of GPUs, what travels, and what stays?</summary>
#
# K and V travel. Q, O and L stay.
# </details>
# <details><summary>7. Causal, shards one after the other: which rank has the least work?</summary>
#
# The first. Its queries see no keys but those of its own shard.
# </details>
# <details><summary>8. What does a zigzag shard consist of?</summary>
#
# A piece from the front and one from the back, so that every rank has equal work in every step.
# </details>
# <details><summary>9. Why do long sequences hide the cables?</summary>
#
# Computing grows with the square of the shard, what is sent only with the shard.
# </details>
# <details><summary>10. What travels with the keys in the backward pass?</summary>
#
# dK and dV, in fp32. Every rank adds its part.
# </details>

# %% [markdown]
# ## Checks
#
# The ring of this notebook against the package's, and the package against one device: ragged and empty shards, both
# layouts, forward and backward, bytes and tiles.

# %%
loop = np.concatenate([state.finalize()[0] for state in states])
package, _ = model.forward(Q, K, V, lengths, layout="contiguous", links=model.Links())
verdict("the ring of four lists = model.forward = one device", close(loop, package) and close(package, whole))
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
            want = O_1, *fa2.backward(Q_r, K_r, V_r, O_1, L_1, dO_r, B_r=4, B_c=4, mask=mask)
            verdict(f"shards {lengths}, {layout}, causal {causal}: O, dQ, dK, dV", all(map(close, found, want)))

# %%
for layout in ("zigzag", "contiguous"):
    places = pieces([6, 5, 5, 5], layout)
    held = sorted(i for of_rank in places for p in of_rank for i in range(p.start, p.stop))
    verdict(f"{layout}: every row has one rank", held == list(range(21)))
sizes = dict(heads=16, kv_heads=16, d=128, causal=True, flops=5e14, link=4.5e11)
verdict("smallest here = model.smallest_shard", smallest(5e14, 4.5e11) == model.smallest_shard("forward", **sizes))
verdict("and d is not in it", model.smallest_shard("forward", **sizes | dict(d=64)) == smallest(5e14, 4.5e11))
even = model.work([64] * 4, "zigzag", True, 4, 4).sum(axis=1)
verdict("zigzag is even, tile by tile", len(set(even.tolist())) == 1)
verdict("four processes: O, dQ, dK and dV right on each", [line.count("right: True") for line in real] == [1] * 4)
unit = 2 * 2 * 16 * 4  # bytes of a row of K and V: two heads of 16 in fp32
said = [f"'K V': {2 * (101 - n) * unit}" for n in (25, 25, 25, 26)]
verdict("each sent what the model says, forward and backward", all(s in line for s, line in zip(said, real, strict=True)))
verdict("a mistake on one rank is told on all four", sum("agree on dtype" in line for line in mistaken) == 4)
two, four = shares[2][131072], shares[4][131072]
verdict("recorded at 131,072 tokens: over 90% of linear speed on two H200s, over 85% on four", two > 0.9 and four > 0.85)
used = list(recorded["memory"].values())
verdict("and each GPU needs less memory the more there are", used == sorted(used, reverse=True))

# %% [markdown] tags=["navigation"]
# [← Decode](14_decode.ipynb) · [The map](00_start.ipynb) · [Lanes, layouts, banks →](A_lanes.ipynb)
