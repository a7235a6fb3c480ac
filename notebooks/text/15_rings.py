# %% [markdown] tags=["navigation"]
# [← Decode](14_decode.ipynb) · [The map](00_start.ipynb) · [The same loop, other masks →](16_masks.ipynb)

# %% [markdown]
# # 15 · Rings
#
# **What if the sequence does not fit on one GPU?**
#
# A long book, a day of video or a genome has more tokens than one GPU can hold. In that case, the sequence itself is
# cut, and each GPU keeps one piece of it. But attention still needs every key for every query, so the keys have to
# travel from GPU to GPU, and the merge of chapter 02 combines the partial results.
#
# After this notebook you can
#
# - compute exact attention over several GPUs, none of which ever holds all keys,
# - cut a causal sequence so that all GPUs have equal work,
# - predict from two speeds, and from the number of tokens per GPU, whether the transfers cost time.
#
# *Time: 45 minutes. Hardware: any laptop with NumPy; the entries of a list stand in for the GPUs. Before this: [02 ·
# Online softmax](02_online_softmax.ipynb), [04 · FlashAttention-2, forward](04_fa2_forward.ipynb) and [05 · The
# backward pass](05_backward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np

from fa2_lab.machine import chips
from fa2_lab.machine import ring as model
from fa2_lab.plots import ring_speed
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## A ring, step by step
#
# Take a model with 32 layers, each of which has 16 heads of d = 128. A token then has 2,048 elements in each of Q, K,
# V and O, at 2 bytes per element. For a million tokens ($2^{20}$), Q of a single layer takes 4 GiB, and all four
# tensors of all layers take 512 GiB. Training keeps these tensors for the backward pass, but an H200 holds only 141
# GiB.
#
# So we give each of four GPUs a quarter of the tokens. Each GPU then keeps 128 GiB of these tensors. This fits,
# although it leaves little memory for anything else, so in practice you would take more GPUs. A process with its GPU
# is called a **rank**, and its part of the sequence is called a **shard**. The cut only affects attention, where a
# rank has the queries of its own tokens but needs the keys and values of all tokens. If each rank gathered all keys of
# a layer, its memory would again grow with the whole sequence. Instead, it holds one block at a time, where a block is
# the keys and values of one shard. In each step, every rank
#
# 1. computes with the block of K and V that it holds,
# 2. passes the block on to its right neighbour, and receives another block from the left.
#
# Since the last rank's right neighbour is rank 0, the ranks form a ring. The method is called *ring attention* (Liu,
# Zaharia and Abbeel, 2023). The table shows which block each rank holds in each step:
#
# | | rank 0 | rank 1 | rank 2 | rank 3 |
# | --- | --- | --- | --- | --- |
# | step 0 | block 0 | block 1 | block 2 | block 3 |
# | step 1 | block 3 | block 0 | block 1 | block 2 |
# | step 2 | block 2 | block 3 | block 0 | block 1 |
# | step 3 | block 1 | block 2 | block 3 | block 0 |
#
# Read each column from top to bottom. After four steps, every rank has seen every block, and each block has been
# passed on three times.

# %% [markdown]
# ## What does a rank keep between two steps?
#
# A rank keeps a state ($o$, m, $\ell$) for each of its rows. Each step is a separate call of attention, so each block
# yields a finished partial result (O, L). The function `from_output` turns this result back into a state with m = L,
# $\ell = 1$ and $o$ = O, and `merge` is the function from chapter 02. In the next cell, the four ranks are simply
# four entries of a list, with 22 rows in total.

# %%
def part(q, k, v):  # one rank's queries, one block's keys
    return SoftmaxState.from_output(*fa2.forward(q, k, v, B_r=4, B_c=4))


N, d, ranks = 22, 4, 4
Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
rows = np.array_split(np.arange(N), ranks)  # 6, 6, 5 and 5 rows
q, kv = [Q[r] for r in rows], [(K[r], V[r]) for r in rows]
states = [SoftmaxState.empty(len(r), d) for r in rows]
for step in range(ranks):
    states = [state.merge(part(q[r], *kv[r])) for r, state in enumerate(states)]
    if step < ranks - 1:
        kv = [kv[rank - 1] for rank in range(ranks)]  # each rank receives from the left
O = np.concatenate([state.finalize()[0] for state in states])
whole, _ = fa2.forward(Q, K, V, B_r=4, B_c=4)
print(f"last number: {O[-1, -1]:.12f}, on one device {whole[-1, -1]:.12f}")

# %% [markdown]
# Every rank merges the blocks in a different order, but this only changes the last bits of the result.
#
# There is also a method without a ring. In an **all-to-all**, every rank sends a different message to every other
# rank. One all-to-all before attention gives each rank all rows of some heads, and another one after attention returns
# the rows of O to the ranks that own them (*DeepSpeed Ulysses*; Jacobs and others, 2023). However, this method needs
# at least one query head for each rank, and if there are fewer K/V heads than ranks, it has to send the same K/V head
# to several ranks.

# %% [markdown]
# ## Which L does a block need in the backward pass?
#
# In chapter 05, the backward pass recomputes P from S and L, as $P = e^{S - L}$. After the forward ring, each rank has
# the final L of its rows, which covers the keys of all ranks. When a block of keys arrives again in the backward pass,
# the rank computes what its own rows contribute to the gradients through that block. The folded cell below does this
# twice for every block of keys, once with the final L and once with the L of that block alone. It also computes the
# gradients on a single device, to compare with. The results are called `right` and `wrong`, and those of the single
# device `truth`:

# %% tags=["hide-input"]
dO, blocks = np.random.default_rng(1).standard_normal((N, d)), dict(B_r=4, B_c=4)
O, L = fa2.forward(Q, K, V, **blocks)
truth = fa2.backward(Q, K, V, O, L, dO, **blocks)
dQ, (right, wrong) = np.zeros((N, d)), np.zeros((2, 2, N, d))  # the last two: dK, dV
for keys in rows:  # each block meets all queries
    dq, *right[:, keys] = fa2.backward(Q, K[keys], V[keys], O, L, dO, **blocks)
    dQ += dq
    _, L_block = fa2.forward(Q, K[keys], V[keys], **blocks)
    of_block = fa2.backward(Q, K[keys], V[keys], O, L_block, dO, **blocks)
    wrong[:, keys] = of_block[1:]

# %% [markdown]
# **Predict.** Suppose the backward pass mistakenly uses the L of the current block alone. What happens to dK and dV if
# there are four blocks?
#
# - ☐ nothing, because the parts are merged afterwards, as in the forward pass
# - ☐ they are too small, because every row only spends a quarter of its weight
# - ☐ they are too large, because every row spends a weight of 4 instead of 1
#
# <details><summary>Answer</summary>
#
# **they are too large, because every row spends a weight of 4 instead of 1.** With the L of each block, a row spends
# a weight of 1 on every block, so P is too large by a factor of 1 / (the block's share of the row's weight). This
# factor is 4 if all blocks have equal shares, and it is far larger for a block to which a row gives little weight. No
# merge corrects this, because gradients are added rather than merged.
#
# ```python
# for b, keys in enumerate(rows):
#     pairs = ((x[keys], y[keys]) for x, y in zip(wrong, truth[1:]))
#     dK, dV = (np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs)
#     print(f"block {b}: {dK:.1f} times the right dK, {dV:.1f} times the right dV")
# ```
#
# ```text
# block 0: 3.1 times the right dK, 2.8 times the right dV
# block 1: 4.1 times the right dK, 4.2 times the right dV
# block 2: 5.3 times the right dK, 4.0 times the right dV
# block 3: 3.5 times the right dK, 3.3 times the right dV
# ```
#
# </details>

# %% [markdown]
# The queries stay on their rank, so each rank accumulates its own dQ. The keys travel, so the accumulators dK and dV of
# a block travel as well, and each rank adds its part to them. Rank 0 need not send its own part anywhere, so dK of
# block 0 starts on rank 1 and travels 1 → 2 → 3 → 0, which takes three transfers. The accumulators travel in fp32,
# because in 16 bits they would be rounded again on every rank.
#
# How much data do the ranks send? The forward pass sends K and V three times, at 2 bytes per element. The backward pass
# sends K and V again, and it also sends dK and dV at 4 bytes per element. That is three times as much data, because
# $(2 + 4) / 2 = 3$.

# %% [markdown]
# ## Is a causal ring fair?
#
# Now add a causal mask, so that no query looks ahead. The scores between the queries of one rank and the keys of
# another then form one large tile, which is FULL, DIAGONAL or SKIP, as in chapter 04. Each rank has a quarter of the
# sequence, and rank 0 has the first quarter. In our example, a quarter has 32 rows, and tiles are 4 × 4. A rank
# therefore visits 8 · 8 = 64 tiles for the keys of an earlier rank (FULL), 1 + 2 + … + 8 = 36 for its own keys
# (DIAGONAL), and none for the keys of a later rank (SKIP). In the next output, the rows are the ranks, and the columns
# are the steps:

# %% tags=["hide-input"]
quarters = [32] * 4
tiles = model.tiles_per_step(quarters, "contiguous", causal=True, B_r=4, B_c=4)
for rank, counts in enumerate(tiles):
    print(f"rank {rank}:  {'  '.join(f'{n:3}' for n in counts)}  = {counts.sum()} tiles")
print(f"share of the time in which the ranks work: {model.busy_fraction(tiles):.0%}")

# %% [markdown]
# Rank 0 works in only one of the four steps, because the keys of all other ranks are in its future. Rank 3 works all
# the time, and the other ranks wait for it.
#
# ## Which cut is fair?
#
# A rank cannot start a step before its block has arrived, so the work must be equal in each step, not only in total.
#
# **Predict.** Which cut gives all ranks equal work in each step, and needs a mask only where a rank meets its own
# block?
#
# - ☐ 8 pieces, of which rank r has pieces r and r + 4
# - ☐ single rows, of which rank r has rows r, r + 4, r + 8, …
# - ☐ 8 pieces, of which rank r has pieces r and 7 − r
#
# <details><summary>Answer</summary>
#
# **8 pieces, of which rank r has pieces r and 7 − r.** Early rows have little work and late rows have a lot, and this
# cut gives each rank some of both. Assigning single rows round-robin (*striped attention*; Brandon and others, 2023) is
# also nearly even, but then every step needs a causal mask. For example, rank 0 has the query of row 4, and rank 1 has
# the keys of rows 1 and 5. This query sees key 1, but it does not see key 5. So each step has tiles on a diagonal, and
# the kernel computes such tiles completely, although half of that work is wasted. With pieces r and r + 4, rank 3 has
# pieces 3 and 7, which have the most work in each half of the sequence.
# </details>
#
# The right cut is called *zigzag*, and both ring-flash-attention and Llama 3 use it. The next cell counts its tiles by
# rank and step, with quarters of 32 rows as before.

# %% tags=["hide-input"]
for rank, counts in enumerate(model.tiles_per_step(quarters, "zigzag", causal=True, B_r=4, B_c=4)):
    print(f"zigzag, rank {rank}:  {'  '.join(f'{n:3}' for n in counts)}")

# %% [markdown]
# Within each column, all ranks have the same number, so no rank waits for another. The figure shows both cuts at a
# real size, with 131,072 tokens and tiles of 128 × 128. Each number is the rank that computes this part of the scores:

# %% tags=["hide-input"]
show("zigzag")

# %% [markdown]
# The bars below the squares count the tiles of each rank. The share for contiguous shards is 57% here instead of 58%,
# because the tiles on the diagonal, of which every rank has the same number, are a smaller part of the work at this
# size.
#
# Why is zigzag even, and why does it need so few masks? Take rank 1, for example, which has a front piece, 1, and a
# back piece, 6, counting pieces from 0. When the block of another rank arrives, there are two cases.
#
# - The block belongs to a later rank, for example to rank 2 with pieces 2 and 5. The rows of piece 6 see both of
#   these pieces completely, because both come before piece 6. The rows of piece 1 see neither.
# - The block belongs to an earlier rank, which can only be rank 0 with pieces 0 and 7. All rows of rank 1 see all of
#   piece 0, and none of them sees any of piece 7.
#
# In the first case, half of the rows meet all of the keys, and in the second case, all of the rows meet half of the
# keys. So each such step is a single kernel call without a mask, on half of the square of scores. Only the rank's own
# block needs a causal mask.

# %% [markdown]
# ## What travels while a rank computes?
#
# The figure shows the forward pass of a zigzag ring. Each number is the rank that owns the keys, and the hatched parts
# are not computed. Each arrow shows K and V arriving from the left neighbour, which is drawn one row above:

# %% tags=["hide-input"]
show("ring_schedule")

# %% [markdown]
# Since no step changes K and V, a rank can send them on while it computes with them. This is different for the
# accumulators dK and dV of the backward pass. They cannot leave before a step has added its part to them, so they
# travel one step later than their keys.
#
# The backward pass has two transfers during which a rank has no block of another rank to compute with. At the start,
# it waits for the first K and V, and at the end, for its own dK and dV, which return from the last rank that added to
# them. To have work during both transfers, a rank cuts the work with its *own* block in two. It splits the queries
# into two parts with about the same work, which under the causal mask are the first three quarters and the last
# quarter of the queries. It computes with the first part at the start, and with the second at the end.
#
# The table shows the backward pass of rank 0. Its lines 1 to 3 are steps 1 to 3 of the ring above, and step 0, in which
# the rank computes with its own block, is split into the lines *own, first* and *own, last*:
#
# | line | rank 0 computes with block | meanwhile, K and V arrive | meanwhile, dK and dV arrive | then rank 0 |
# | --- | --- | --- | --- | --- |
# | own, first | 0 | of block 3 | | keeps this part of its dK and dV |
# | 1 | 3 | of block 2 | | sends its part on, as the first term of the sum |
# | 2 | 2 | of block 1 | of block 2 | adds its part and sends the sum on |
# | 3 | 1 | | of block 1 | adds its part and sends the sum on |
# | own, last | 0 | | of block 0 | adds both of its own parts, and block 0 is done |
#
# As an example, take line 2. While rank 0 computes with block 2, it receives two things. The first is K and V of block
# 1, for the next step. The second is the pair of accumulators of block 2, which rank 3 began in the previous step. At
# the end of the step, rank 0 adds its own part to these accumulators and sends them on. In line 1, no accumulators
# arrive, because rank 0 is the first to compute with block 3. The owner of block 3, which is rank 3, will add the last
# part.
#
# ## Do the links keep up?
#
# A transfer costs no time if it finishes before the computation that runs at the same time. When is that the case?
# Suppose a shard has n rows. Per head, one step of the causal forward pass does $2n^2d$ FLOPs, because zigzag's steps
# compute half of the n × n scores at $4d$ FLOPs each. The same step sends $4nd$ bytes (K and V, at 2 bytes per
# element).
#
# The FLOPs grow with $n^2$ but the bytes only with $n$, so long shards can hide their transfers behind the computation.
# The two times are equal if $2n^2d\,/\,$(FLOP/s) equals $4nd\,/\,$(bytes/s). This happens at $n = 2 \cdot$ FLOP/s $/$
# (bytes/s), which depends neither on d nor on the number of heads. The backward pass sends three times as much data and
# does 2.5 times as many FLOPs, so at the same FLOP/s it needs a fifth more rows.
#
# These are the smallest shards that hide their transfers, for three chips and for the recorded run:

# %% tags=["hide-input"]
def smallest(flops, link):  # rows; FLOP/s, bytes per second in one direction
    return int(np.ceil(2 * flops / link))  # 2 n² d / flops ≥ 4 n d / link


three = chips.A100, chips.H100, chips.RTX_4090
speeds = {chip.name: (chip.tensor_flops_per_second / 2, chip.link_bytes_per_second)
          for chip in three}
speeds["H200, as recorded"] = ring_speed.reached(load("ring"))
print("                    TFLOP/s   link, GB/s   rows in a shard, at least")
for name, (flops, link) in speeds.items():
    print(f"{name:20}{flops / 1e12:7.0f}{link / 1e9:13.0f}{smallest(flops, link):28,}")

# %% [markdown]
# In this output, *link* is the connection between GPUs. This is NVLink, or on the RTX 4090 the PCI Express bus. The
# first three lines use the link's speed in one direction and, because no kernel reaches the peak, half of the peak
# FLOP/s. Both values are from the data sheets. The last line uses speeds that we measured on an H200, namely those of
# the package's kernel and of PyTorch's transfers (`torch.distributed`) while all four ranks send at once. In that run,
# each rank moved only 131 GB/s over a link of 450 GB/s. The record does not show what limits these transfers, so the
# last line tells us about this way of sending, and not about the link. Compared with the line for the H100, the
# transfers reach less than a third of the speed (131 instead of 450 GB/s), and the kernel is 1.4 times as fast (708
# instead of 495 TFLOP/s). Each of these two differences calls for more rows, and together they call for five times as
# many.
#
# ## What do four GPUs gain?
#
# We compare four NVIDIA H200 GPUs with a single one. The problem is causal attention, forward and backward, in bf16
# with 16 heads of d = 128, at lengths that still fit on one GPU.
#
# Apart from computing and sending K and V, the package's ring has one more task. Before any transfer, each rank sends
# all other ranks a *header* with its number of rows and its options. While the headers are on their way, the rank
# already computes a part of the work with its own block. If the headers do not agree, all ranks stop. Without this
# check, a rank that was called with different options could send fewer or shorter messages than its neighbours expect,
# and the neighbours would wait forever.
#
# **Predict.** With 8,192 tokens, a shard has 2,048 rows, which is too few to hide a transfer. One GPU takes 1.6 ms, and
# four take 7.1 ms. Sending K and V around the ring once takes 0.72 ms. What takes most of the 7.1 ms?
#
# - ☐ the kernels, because small ones leave SMs idle
# - ☐ the transfers
# - ☐ neither the kernels nor the transfers, but exchanging headers and starting kernels and transfers
#
# <details><summary>Answer</summary>
#
# **neither the kernels nor the transfers, but exchanging headers and starting kernels and transfers.** We know this by
# subtraction, and not from a timeline. The forward pass sends K and V around once, and the backward pass sends three
# times as much, so all transfers together take 4 · 0.72 = 2.9 ms. The transfers reach only 69 GB/s, because they are
# short. The kernels take about a quarter of one GPU's 1.6 ms, which is 0.4 ms. Even if no transfer hides behind a
# kernel, transfers and kernels together take only 3.3 ms, so 3.8 ms remain. If such small kernels are only half as
# fast, more than 3 ms still remain. This remaining time goes into exchanging headers and into starting kernels and
# transfers. But the record shows neither how much time each of these takes, nor whether transfers and kernels slow
# each other down.
# </details>
#
# The next figure shows all lengths and the memory:

# %% tags=["hide-input"]
show("ring_speed")

# %% [markdown]
# From 32,768 tokens on, the ring is faster than one GPU. By the last line of the output in the section *Do the links
# keep up?*, a shard needs at least 10,791 rows to hide the transfers of the forward pass, and a fifth more for the
# backward pass. With four GPUs, 32,768 tokens are still below these bounds, because a shard has 8,192 rows. With
# 65,536 tokens, a shard has 16,384 rows, and four GPUs are more than three times as fast as one. They do not reach a
# speedup of 4, and the difference is probably lost to merges and to transfers, which occupy some SMs.
#
# The cross marks four GPUs with contiguous shards at 131,072 tokens. They are 2.0 times as fast as one GPU, whereas
# zigzag makes them 3.5 times as fast. In the figure, the ratio of the two speeds is 2.04 / 3.50 = 58%, which is close
# to the 57% of the time in which contiguous ranks work. At this length, each of the four GPUs needs 2.0 GiB. This is
# more than a quarter of the 5.1 GiB that a single GPU needs, because each rank also needs buffers for the blocks in
# transit.
#
# `fa2_lab.distributed` runs this ring with PyTorch. The blocks are sent by PyTorch's communication libraries, which
# are NCCL between GPUs and gloo between the processes of a laptop. To use it, write these lines and start them with
# `torchrun --nproc-per-node 4`:
#
# ```python
# from fa2_lab.distributed import ring_attention, shard
#
# tokens = shard(tokens, dim=1)  # this rank's tokens in zigzag, cut from all tokens
# positions = shard(torch.arange(N), dim=0)  # for the model's position embeddings
# ...  # the model makes q, k and v of its own tokens
# O = ring_attention(q, k, v, causal=True)  # instead of attention(q, k, v, causal=True)
# ```

# %% [markdown]
# ## Recap
#
# - In a ring, the sequence is cut. The queries stay, the keys and values travel around the ring, and the partial
#   results (O, L) of the blocks are merged.
# - Under a causal mask, contiguous shards waste more than 40% of the ranks' total time, whereas zigzag makes the work
#   even.
# - In the forward pass, a causal step hides its transfer if a shard has at least $2 \cdot$ FLOP/s $/$ (bytes/s) rows,
#   for any d.
# - In the backward pass, the final L makes the gradients of each block exact. dK and dV travel one step behind their
#   keys, in fp32.

# %% [markdown]
# ## Exercises
#
# **Build.** Write one of the four steps of the backward ring, without a mask. Each argument is a list with one entry
# per rank. Rank r calls `fa2.backward(Q, K, V, O, L, dO, B_r=4, B_c=4)` with the block that it holds. The call returns
# dQ, dK and dV of this step, and rank r adds the first two to dq[r] and dk[r]. Then every rank passes on the arrays
# that travel. Return dq, k, v and dk as the next step needs them. The check starts with dq and dk full of zeros and
# takes four steps. To keep the exercise short, we leave out dV, which travels like dK, and send dK four times, so that
# a rank's own part also travels.

# %%
def ring_step(q, o, lse, do, dq, k, v, dk):
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
Q_e, K_e, V_e, dO_e = np.random.default_rng(5).standard_normal((4, 24, d))
O_e, L_e = fa2.forward(Q_e, K_e, V_e, B_r=4, B_c=4)
lists = [np.split(x, ranks) for x in (Q_e, K_e, V_e, O_e, L_e, dO_e)]
want = fa2.backward(Q_e, K_e, V_e, O_e, L_e, dO_e, B_r=4, B_c=4)
# each rank's part for its own block
own = [fa2.backward(*x, B_r=4, B_c=4)[1] for x in zip(*lists, strict=True)]


# the result (0: dq, 1: k, 2: v, 3: dk) on all ranks
def your_steps(steps, result, q, k, v, o, lse, do):
    dq, dk = ([np.zeros_like(x) for x in xs] for xs in (q, k))
    for _ in range(steps):
        after = ring_step(q, o, lse, do, dq, k, v, dk)
        if after is None or after is ...:
            return None
        dq, k, v, dk = after
    return np.array((dq, k, v, dk)[result])


your_steps.__name__ = "ring_step"  # what the message calls it
check(your_steps, Case("k after one step. Does rank 1 hold block 0?", (1, 1, *lists),
                       np.roll(lists[1], 1, axis=0)),
      Case("dk after one step. Is block 0's sum on rank 1, with rank 0's part?", (1, 3, *lists),
           np.roll(own, 1, axis=0)),
      Case("dq after four steps. Do K and V both travel, and are four parts added?",
           (4, 0, *lists), want[0].reshape(4, 6, d)),
      Case("dk after four steps. Is each part added to its own block?", (4, 3, *lists),
           want[1].reshape(4, 6, d)))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def ring_step(q, o, lse, do, dq, k, v, dk):
#     for r in range(ranks):
#         of_block = fa2.backward(q[r], k[r], v[r], o[r], lse[r], do[r], B_r=4, B_c=4)
#         dq[r], dk[r] = dq[r] + of_block[0], dk[r] + of_block[1]
#     k, v, dk = ([x[rank - 1] for rank in range(ranks)] for x in (k, v, dk))
#     return dq, k, v, dk
# ```
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("four ranks give the same result as one device",
        close(np.concatenate([state.finalize()[0] for state in states]), whole))
verdict("with the L of all keys, dQ is right", close(dQ, truth[0]))
verdict("with the L of all keys, dK and dV are right", close(right, truth[1:]))
gib = 2**20 * 16 * 128 * 2 / 2**30
verdict("4, 512 and 141 GiB",
        (gib, 4 * 32 * gib, round(chips.H200.hbm_bytes / 2**30)) == (4, 512, 141))
there, back = (sum(model.bytes_sent(quarters, 0, way, kv_heads=1, d=4).values())
               for way in ("forward", "backward"))
verdict("backward sends three times as much", back == 3 * there)
speed = {n: dict(curve) for n, curve in ring_speed.data()["curves"].items()}
verdict("faster from 32,768 tokens on, and nearly 4 times at 131,072",
        min(s[32768] for s in speed.values()) > 1.3 and 3 < speed[4][131072] < 4)
flops, link = speeds["H200, as recorded"]
chip = chips.H200
least = smallest(flops, link) / smallest(chip.tensor_flops_per_second / 2, chip.link_bytes_per_second)
reached = round(link / 1e9), round(flops / 1e12), round(least)
verdict("131 of 450 GB/s and 708 TFLOP/s need 5 times as many rows", reached == (131, 708, 5))
short = {r.direction: r.values["4 GPUs"][0] for r in load("ring").rows if r.problem["N_q"] == 8192}
once, took = short["K V once round"], short["both"]
verdict("0.72 ms for one round, and 2.9 of 7.1 ms in all",
        (round(once, 2), round(4 * once, 1), round(took, 1)) == (0.72, 2.9, 7.1))
gpus, N_q, cut = ring_speed.data()["contiguous"]
verdict("at 131,072 tokens, 2.0 times as fast with contiguous shards, and 3.5 times with zigzag",
        (gpus, N_q, round(cut, 1), round(speed[4][131072], 1)) == (4, 131072, 2.0, 3.5))
verdict("one GPU takes 1.6 ms", round(took * speed[4][8192], 1) == 1.6)
verdict("short transfers reach 69 GB/s",
        round(ring_speed.reached(load("ring"), N=8192)[1] / 1e9) == 69)
mib = {r.problem["N_q"]: r.values for r in load("ring").rows if r.direction == "peak memory"}
verdict("2.0 and 5.1 GiB",
        [round(mib[131072][n][0] / 1024, 1) for n in ("4 GPUs", "1 GPU")] == [2.0, 5.1])

# %% [markdown] tags=["navigation"]
# [← Decode](14_decode.ipynb) · [The map](00_start.ipynb) · [The same loop, other masks →](16_masks.ipynb)
