# %% [markdown] tags=["navigation"]
# [← Hopper, machine and rungs](12a_hopper_rungs.ipynb) · [The map](00_start.ipynb) · [Hopper, backward →](13_hopper_backward.ipynb)

# %% [markdown]
# # 12b · Hopper, the kernel
#
# **How does the fast kernel work, line by line?**
#
# `fa2_lab/kernels/hopper/forward` is the kernel that `attention()` runs on an H100 or H200. It is built from the rungs
# of [chapter 12a](12a_hopper_rungs.ipynb), but it also accepts sequences of any length, grouped-query attention,
# windows and packed sequences, which the rungs do not support. In this chapter, you read the core of that kernel, which
# consists of the producer and a consumer's work on one tile, and you find out why each wait is needed.
#
# After this notebook you can
#
# - name, for each barrier of the kernel, the warps that arrive and the warps that wait, and explain why,
# - decide which waits can be left out because another wait already implies them,
# - compare the kernel's speed with that of other implementations, and explain why the same idea can help one kernel a
#   lot and another one only a little.
#
# *Time: 100 minutes, in six parts, of which the first includes this opening. Before this:
# [12a](12a_hopper_rungs.ipynb). Hardware: any laptop with Linux; on a Hopper GPU, the checks run the real kernel. All
# speeds and times were measured on an NVIDIA H200 in bf16.*

# %%
# Setup: run this cell first. You do not have to read it.
from itertools import product

import numpy as np
import torch
from IPython.display import Markdown, display

from fa2_lab.api.attention import attention
from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, grid
from fa2_lab.machine.asynchrony import Barrier
from fa2_lab.plots import idea_gains
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import heads as by_heads
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_lab.tools.xray import xray
from fa2_studio.book.hopper import Climb, definition_lines, show_code, show_listing
from fa2_studio.book.orders import check_copies
from fa2_studio.book.ring import PAUSE, RingModel, run_actors, try_consumer
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Part 1 · Barriers, sizes and the scheduler (13 minutes)
# Before we read the kernel's lines, we look at it from outside. Which warps wait for which, how large are the buffers,
# and how does a program get its work?
#
# ### Which warps wait for which?
#
# Each program fills one SM and consists of a producer warp and one to three consumer warpgroups, each of which computes
# 64 rows of O. The picture shows a program with two consumers and with three stages each for K and V. A table below
# lists this configuration as `TWO_CONSUMERS`. Each ring has two solid arrows. The first means that the producer fills a
# stage, and the second, labelled *full*, means that a consumer waits until the stage has been filled. A dashed arrow
# leads back. It means that the producer waits until a stage has been released, and its label gives the number of
# consumers that must release it. A tile of K needs two releases, for example, because both consumers read it, but 64
# rows of Q belong to a single consumer:

# %%
show("pipelines_forward")

# %% [markdown]
# V has no dashed arrows at all, and part 2 explains why it does not need any. The thick arrows between the consumers
# belong to *ping-pong*, in which the consumers take turns (part 4). The next table lists all barriers of the kernel:
#
# | barrier | how many | who arrives | who waits | what an arrival means |
# | --- | --- | --- | --- | --- |
# | Q *filled* | one per stage | the producer's copies | the consumer of these rows | 64 rows of Q have arrived |
# | Q *emptied* | one per stage | the consumer of these rows | the producer | these rows may be overwritten |
# | K *filled* | one per stage | the producer's copies | all consumers | a tile of K has arrived |
# | K *emptied* | one per stage | all consumers | the producer | this tile of K, and the tile of V before it, may be overwritten |
# | V *filled* | one per stage | the producer's copies | all consumers | a tile of V has arrived |
# | mailbox *filled* | two | the producer | all consumers | the next row block is known |
# | mailbox *emptied* | two | all consumers | the producer | all consumers have read the message |
# | ping-pong | one per consumer | the previous consumer | this consumer | this consumer may start its matmuls |
#
# Other libraries have other names for the same things. CUTLASS, NVIDIA's library of kernels, calls such a ring a
# *pipeline*, and our class `TmaPipeline` has the methods of its pipelines. CUTLASS calls the two barriers *full* and
# *empty*, as the picture does:
#
# | here | CUTLASS | who calls it |
# | --- | --- | --- |
# | `acquire`, inside `load` | `producer_acquire` | the producer, before a copy |
# | `expect`, inside `load` | the second half of `producer_acquire` | the producer; TMA then arrives on its own |
# | `wait` | `consumer_wait` | a consumer, before it reads a tile |
# | `release` | `consumer_release` | a consumer, after it has read a tile |
#
# ThunderKittens, another library, names the roles *load*, *compute* and *store*. In our kernel, these roles are
# `producer`, `consumer` and the function `store`.

# %% [markdown]
# ### What is launched?
#
# The host launches one program per SM, or fewer if there are fewer row blocks than SMs. A program stays on its SM and
# fetches one row block after another. Before the first call of each kind, the host prepares the launch, in
# [`launch.py`](../fa2_lab/kernels/hopper/forward/launch.py). It creates a descriptor for each tensor and computes
# $\tau \log_2 e$, so that the kernel can replace exp with a power of 2.
#
# The order of the row blocks depends on the mask. Without a mask, the programs work through one head after another, so
# that they all read the same K and V from L2. Under a causal mask, some row blocks take longer than others, and the
# load is easier to balance if the programs can choose from several heads. The kernel therefore works on several heads
# side by side, but only on as many as fit into a certain part of L2 with their K and V.
#
# `configs.choose` picks one of a few configurations, by rules that were fitted to times measured on an H200. At d = 128,
# for example, long rows use `THREE_CONSUMERS`, which has the sizes of rung 23, and `DEFAULT` has those of rung 22. The
# other configurations are for calls that these two do not suit. You can open the whole list, but the rest of the chapter
# needs only the names that it mentions:

# %% tags=["nbval-ignore-output", "hide-input"]
from fa2_lab.kernels.hopper.forward import configs

NAMES = {
    "DEFAULT": "if no other configuration fits better",
    "ONE_CONSUMER":
        "if there are few row blocks, which then have 64 rows, so that more SMs are busy",
    "HALF_B_C":
        "if rows are short, because under the causal mask the diagonal then cuts most tiles",
    "TWO_CONSUMERS": "if blocks of 192 rows fit badly",
    "THREE_CONSUMERS": "if rows are long, so that K and V are read once for 192 rows",
}
heads = "| d | configuration | when it is used | consumers | keys per tile | stages | ping-pong | O has its own buffer |"
lines = [heads, "| --- " * 8 + "|"]
for d, (name, where) in product((64, 128), NAMES.items()):
    config = getattr(configs, name)
    config = config[d] if isinstance(config, dict) else config
    if config.d_pad == d:
        words = ["yes" if x else "no" for x in (config.ping_pong, config.separate_O_buffer)]
        cells = d, f"`{name}`", where, config.consumers, config.B_c, config.stages, *words
        lines.append(f"| {' | '.join(map(str, cells))} |")
display(Markdown("\n".join(["<details><summary>All configurations</summary>", "", *lines, "",
                            "</details>"])))

# %% [markdown]
# If O does not have its own buffer, the consumer puts O into Q's buffer, as on the last rung, and TMA copies it out
# from there. Some calls do not use this kernel at all. Calls with dropout, a softcap, sinks or a bias use the portable
# kernel, and so do calls with a window if the sequences are packed or d is above 128. The portable kernel also runs
# fp32 inputs, and some small calls for which it is faster.

# %% [markdown]
# Could two programs share an SM, as on rungs 14 to 16? The picture shows how much shared memory and how many registers
# a program takes with each of four of these configurations. In all four cases, the program takes more than half of the
# shared memory. It also takes all registers, or all but 1,024, because the consumers are given as many as possible. So
# there is no room for a second program on the SM, and smaller tiles alone would not make room for one.

# %% tags=["hide-input"]
show("sm_budget")

# %% [markdown]
# ### When is the next row block fetched?
#
# The tile scheduler comes from rung 21. To get the number of its next row block, a program performs an atomic addition
# in L2, and it does so as late as possible. The number may then arrive too late. Couldn't a program fetch its next
# number early instead, at the *start* of a row block, so that it never has to wait?
#
# **Predict.** A single causal head of 32,768 rows is cut into 256 blocks of 128 rows. There are 132 programs, and the
# heavy blocks are handed out first. What happens if all programs fetch early?
#
# - ☐ the kernel is a little faster, because no program waits for a number
# - ☐ nothing changes, because the same blocks are fetched in the same order
# - ☐ the kernel takes about 1.5 times as long
#
# <details><summary>Answer</summary>
#
# **the kernel takes about 1.5 times as long.** Program p begins with block p, and right at the start, every program
# also fetches the number of its second block. This fixes each program's share, just as if the blocks had been assigned
# in advance. Counted from the heaviest, block b has 256 − b tiles. Program 0 gets blocks 0 and 132, which together have
# 256 + 124 = 380 tiles, whereas the average program has only 249. For one head, the model below predicts that fetching
# early takes 1.52 / 1.03 = 1.48 times as long. In the times recorded on the H200, the factor is a little smaller, 1.35
# to 1.43. With many heads, fetching early does less harm, because each program then works through many blocks, and only
# one of them has been fetched too early.
#
# ```python
# long = Tiling(32768, 32768, 128, 128, CAUSAL)
# one_head = [len(long.visited_cols(i)) for i in reversed(range(long.T_r))]
# blocks = [grid.BlockWork(0, n, cost) for n, cost in enumerate(one_head)]
# for name, ran in (("early", grid.static_schedule(blocks, 132)), ("late", grid.schedule(blocks, 132))):
#     print(f"fetched {name}: {ran.makespan / (sum(one_head) / 132):.2f} of an even share")
# for heads in (", one head", ""):
#     idea = "forward", f"the next ticket drawn late{heads}"
#     gains = [x["gain"] for x in idea_gains.gains() if (x["part"], x["idea"]) == idea]
#     print(f"measured{heads or ', many'}: late {min(gains):.2f} to {max(gains):.2f} times as fast")
# ```
#
# ```text
# fetched early: 1.52 of an even share
# fetched late: 1.03 of an even share
# measured, one head: late 1.35 to 1.43 times as fast
# measured, many: late 1.00 to 1.02 times as fast
# ```
# </details>

# %% [markdown]
# The kernel therefore fetches late, after the producer has started all copies of a row block except the last. At that
# moment, the rings are full, so the consumers have enough work to keep them busy until the number arrives.

# %% [markdown]
# The producer passes the number on through the mailbox. On rung 21, the mailbox has a single slot, so the producer can
# send a number only after all consumers have read the previous one. Here it has two slots, so the producer can get one
# row block further ahead. This can only matter if row blocks have few tiles. With more tiles than stages, the rings
# hold the producer back first, because it can never be more tiles ahead of the consumers than there are stages.
#
# The picture shows a model of rung 21 with four tiles per row block, but with the two slots of our mailbox in place of
# the rung's single one. The producer puts a row block's number into a slot when it begins to copy tiles for that row
# block. The number stays there until both consumers have finished computing the previous row block. In this model, one
# slot would be enough, because the two are never in use at the same time. The second slot could only help if row blocks
# had even fewer tiles than here:

# %% tags=["hide-input"]
show("mailbox")

# %% [markdown]
# ## Part 2 · The roles and the producer (21 minutes)
# We begin with the warp that starts all copies of tiles, because the consumers depend on the order of its copies.
#
# ### The roles
#
# `forward_kernel` first allocates the buffers and barriers, and then assigns the roles.

# %% tags=["nbval-ignore-output"]
KERNEL = "hopper/forward/kernel.py"
show_listing(KERNEL, "forward_kernel", begin="q = new_pipeline", end="smem = ForwardSharedStorage")

# %% [markdown]
# `new_pipeline(X, stages, consumers)` creates the ring from chapter 12a, with the buffers and barriers for tiles of X.
# Its last argument is the number of consumers that must release a stage, which is 1 for Q. `OWN_EMPTY_BARRIERS=False`
# means that V's ring has no *emptied* barriers, which the next section is about. `stacked` returns the shape of an
# array that holds one buffer for O per consumer. `new_ping_pong` creates the barriers of part 4, and `new_mailbox`
# those of rung 21's mailbox. `ForwardSharedStorage` bundles everything in shared memory under one name. It is an
# *aggregate*, which is what Gluon calls a class with typed fields.
#
# Two things in the listing only matter for special calls. `PACKED_ROW_BLOCK_FIELDS` are the fields of the message for
# packed sequences ([chapter 16](16_masks.ipynb)). The comment on `key_lengths` is about calls in which each sequence of the batch has its own
# number of real keys, and the exercise at the end of this chapter returns to it. Later listings also mention
# `cu_seqlens_q`, for packed sequences, and `left`, for windows.
#
# The roles are started in the same way as on the rungs. Consumer 0 runs on the warps that the launch itself starts,
# while the other consumers get 160 or 240 registers per thread and the producer gets 24. Consumer 0 keeps what is left.
# With three consumers, there are four warpgroups, whose threads start with 128 registers each, so 4 · 128 − 24 − 2 ·
# 160 = 168 are left for each thread of consumer 0. With two consumers, the threads of all three warpgroups start with
# 168, the largest multiple of 8 that fits, so 3 · 168 − 24 − 240 = 240 are left. If the compiled code of a consumer
# would need more registers than that, the setting `low_reg_schedule`, which is part of the configuration, makes the
# compiler order the instructions so that fewer are needed.
#
# The next table shows how the shared memory is used. It is computed from the configuration that the kernel uses for a
# causal call with d = 128 and N = 4,096:

# %% tags=["hide-input"]
config = configs.choose(128, 4096, 4096, heads=64, SMs=132, causal=True, has_key_lengths=False)
tile, C = 2 * config.d_pad, config.consumers  # bytes of a row
Q, O = C * (1 + config.separate_O_buffer), C * config.separate_O_buffer  # tiles of 64 rows
parts = [("Q", f"{Q} × 64 rows", Q * 64 * tile, f"{Q} full, {Q} empty")]
parts += [("K", f"{config.stages} × {config.B_c} keys", config.stages * config.B_c * tile,
           f"{config.stages} full, {config.stages} empty")]
parts += [("V", f"{config.stages} × {config.B_c} keys", config.stages * config.B_c * tile,
           f"{config.stages} full")]
parts += [("O", f"{O} × 64 rows" if O else "in Q's buffer", O * 64 * tile, "none")]
parts += [("mailbox", "2 × 4 numbers", 2 * 4 * 4, "2 full, 2 empty")]
parts += [("ping-pong", "none" if not config.ping_pong else "no tile", 0, f"{C}"
           if config.ping_pong else "0")]
lines = ["| what | tiles | bytes | barriers |", "| --- | --- | ---: | --- |"]
lines += [f"| {name} | {tiles} | {nbytes:,} | {bars} |" for name, tiles, nbytes, bars in parts]
lines += [f"| total | {C} consumers | {sum(x[2] for x in parts):,} | a thread block may have "
          f"{227 * 1024:,} bytes |"]
display(Markdown("\n".join(lines)))

# %% [markdown]
# Each barrier takes another 8 bytes. To see what the compiler really allocated, run `fa2-lab xray hopper.forward` and
# look at the *shared* column.
#
# ### Why does V need no releases?
#
# Consumers never release a stage of V, because each release of K also covers a tile of V. In step n, a consumer starts
# S for tile n and P V for tile n − 1, and the last thing it waits for is P V. After this wait, the consumer is done
# with K's tile n *and* with V's tile n − 1, so a single arrival, at K's barrier, can announce both.
#
# But before it overwrites a tile of V, has the producer waited for the right release? Let us follow it with two stages
# and one row block. K is always one tile ahead of V, so the copies come in the order K0, K1, V0, K2, V1, K3, V2 and so
# on:
#
# | the producer copies | into the stage of | that stage is freed by the release of | has the producer waited for that release? |
# | --- | --- | --- | --- |
# | K0, K1, V0 | nothing, the stages are empty | | |
# | K2 | K0 | K0 | yes, for this copy |
# | V1 | nothing, the stage is empty | | |
# | K3 | K1 | K1 | yes, for this copy |
# | V2 | V0 | K1, which also covers V0 | yes, one line earlier, for K3 |
#
# The last row shows the rule. V's tile n − 1 overwrites V's tile n − 1 − stages. That tile was released together with
# K's tile n − stages, and the copy of K's tile n, one line earlier, had to wait for the same release.
#
# We can try this out in the model from chapter 12a. `RingModel(2, 2)` has two stages and two consumers. `wait` and
# `release` work as in 12a, and the consumers only release K. The producer's `load` of 12a is split in two:
#
# - `K.acquire(n)` waits until all consumers have released tile n − stages, so that tile n may be copied into its stage.
#   For n < stages, the stage is empty from the start. `acquire` copies nothing, so n may also be a tile that is never
#   copied.
# - `K.copy(n)` copies tile n, without waiting for an empty stage.
#
# The table ends before the end of the row block, so the producer may still have to wait somewhere. `careful` lists the
# tiles of V that it copies only after an extra wait. In this list, the tiles of each row block are counted from 0. A
# function in a folded cell, `wrong(careful)`, runs two row blocks of four tiles each in 500 random orders, and counts
# the orders in which a consumer reads a wrong tile or the model hangs.

# %%
# the producer, for `blocks` row blocks of T tiles each
def copies(K, V, T, blocks, careful):
    def copy_v(m):
        if m % T in careful:
            yield K.acquire(m + 1)
        yield from V.copy(m)

    for n in range(T * blocks):
        yield K.acquire(n)
        yield from K.copy(n)
        if n % T > 0:
            yield from copy_v(n - 1)
        if n % T == T - 1:
            yield from copy_v(n)


def tiles_of(K, V, T, blocks, seen):  # a consumer
    def multiply(n):
        yield from V.wait(n)
        yield PAUSE
        seen.append(V.tiles[n % V.stages])

    for n in range(T * blocks):
        yield from K.wait(n)
        if n % T > 0:
            yield from multiply(n - 1)
        K.release(n)  # and V's tile n − 1
        if n % T == T - 1:
            yield from multiply(n)

# %% tags=["hide-input"]
def wrong(careful, orders=500):
    failed = 0
    for seed in range(orders):
        K, V, seen = RingModel(2, 2), RingModel(2, 2), ([], [])
        consumers = {c: tiles_of(K, V, 4, 2, seen[c]) for c in range(2)}
        run_actors({"producer": copies(K, V, 4, 2, careful)} | consumers, seed)
        failed += any(tiles != list(range(8)) for tiles in seen)
    return failed

# %% [markdown]
# **Predict.** The producer copies two row blocks of four tiles each. Before which of V's copies does the producer have
# to wait?
#
# - ☐ before each one, because V's stages are never released
# - ☐ before the last one of a row block
# - ☐ before the first one of a row block
#
# <details><summary>Answer</summary>
#
# **before the last one of a row block.** Each of the other copies of V comes right after a copy of K, which has waited
# for the release that V needs as well. The last copy of V has no copy of K just before it, because there is no K4 in
# this row block. Its row of the table is:
#
# | the producer copies | into the stage of | that stage is freed by the release of | has the producer waited for that release? |
# | --- | --- | --- | --- |
# | V3 | V1 | K2, which also covers V1 | not yet; the next row block's first tile of K will wait for it |
#
# So the producer waits for K2's release here already. This costs nothing, because its very next copy would have to wait
# for the same release anyway.
#
# ```python
# for careful in ((), (0,), (3,)):
#     print(f"waits before V's tiles {careful}: wrong in {wrong(careful):3} of 500 orders")
# ```
#
# ```text
# waits before V's tiles (): wrong in 401 of 500 orders
# waits before V's tiles (0,): wrong in 399 of 500 orders
# waits before V's tiles (3,): wrong in   0 of 500 orders
# ```
# </details>

# %% [markdown]
# ### What does the producer do?
#
# The next listing is the producer's loop over row blocks. You know its three parts from rung 21, namely the message,
# the copies, and the next number, which is fetched just before the last copy. K, however, runs one tile ahead of V, as
# the table above shows. You can skip the conditions with `cu_seqlens_q`, and read `geometry` and `sequence` as the
# sizes and the mask of the call, and `q_batch_or_end` as the number of the batch entry (for packed sequences, it is the
# row at which the sequence ends):

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "producer", begin="while scheduler", end="r += 1")

# %% [markdown]
# Line by line, the producer does the following for each row block:
#
# | line | what it does |
# | --- | --- |
# | `block_coord`, `row_block` | turn the number t into the row block's first row, its batch entry and its head |
# | `mailbox.send` | sends the consumers these numbers |
# | `tile_end`, `tile_begin` | compute which tiles the block's rows see: `end` is the index just past the last one, but at least 1, so that O is always written, and `begin` is the index of the first one, which is 0 unless there is a window |
# | `k.load`, then `q.load` | copy the rightmost tile of K and, after it, Q |
# | the loop over j | copies the other tiles from right to left, so that the tiles on the diagonal, which need the mask, come first; K always stays one tile ahead of V |
# | `scheduler.next` | fetches the number of the next row block |
# | `k.acquire(n)` | waits before the last tile of V, as in the question above |
# | the last `v.load` | copies the last tile of V |
#
# Two details need an explanation. The first is the number in `acquire(n)`. When the producer reaches this line, n has
# already grown by T_c, so n is now the number of the next row block's first tile. The producer therefore waits for the
# stage of K that this next tile will use.
#
# The second detail is the message. `send` is given five numbers, but without packed sequences, it writes only the first
# three, which are the row, the batch entry and the head. A slot of the mailbox then has four places, as in the table
# above, because the number of places is rounded up to a power of two. For packed sequences, `send` also writes the two
# lengths, and a slot has eight places. `sequence` then holds these lengths, and without packing it is simply
# `geometry`.

# %% [markdown]
# ## Part 3 · What a consumer does with a row block (23 minutes)
# On the other side of the rings, each consumer decides which of the tiles it computes with, and then works through
# them.
#
# ### How do producer and consumers agree on a stage?
#
# Producer and consumers each compute the stage of tile n as `n % stages` and its phase as `n // stages & 1`. Their
# results agree because they all count the same tiles in the same order. Either side can also compute the stage and
# phase of a later tile ahead of time. The mailbox is like the one on rung 21, except that it has two slots. Message n
# therefore uses slot `n & 1`, in phase `n >> 1 & 1`.

# %% [markdown]
# The next picture shows such an agreement over time, for two stages of V. Both consumers read every tile, so a stage is
# filled again only after the slower of the two has released it. The picture is a model of rung 21, on which consumers
# still release each tile of V on its own, right after the wait for P V. At this point, our kernel releases K's tile n
# instead, which also frees V's tile n − 1. A picture of our kernel would therefore look nearly the same. Only V's last
# tile of each row block would be freed later, namely together with K's first tile of the next row block.

# %% tags=["hide-input"]
show("pipeline_stages")

# %% [markdown]
# ### Which tiles does a consumer compute?
#
# The producer copies every tile that at least one consumer needs, from `all_begin` up to `all_end`. A consumer's own 64
# rows only need the tiles from `begin` up to `end`. The consumer visits these tiles and *drains* the others, which
# means that it takes and releases them without using them. It goes through all of them from right to left:
#
# ```text
# all_begin        begin                    end             all_end
#   |  drain: window |  process: these rows   |  drain: causal |
#                                        ◄── this way
# ```
#
# The listing computes these four numbers. `all_end` and `all_begin` follow from all rows of the block, and `end` and
# `begin` from this consumer's rows. `length` is the number of keys in the sequence, and `q_tile` is the number of this
# consumer's tile in Q's ring:

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "consumer", begin="# Two intervals", end="q = smem")

# %% [markdown]
# Then the consumer goes through the tiles:

# %% tags=["nbval-ignore-output"]
show_listing(
    KERNEL, "consumer",
    begin="for j in range(all_end - end)", end="n += all_end", off="geometry.cu_seqlens_q",
)  # fmt: skip

# %% [markdown]
# The listing leaves out the lines for packed sequences. If all of the consumer's rows are past the end of the sequence,
# then `end` equals `begin`, and the consumer drains all tiles without using any. If O has its own buffer,
# `process_row_block` releases Q right after the last S. Otherwise, or if that function was not called, the lines above
# release Q, after the copy of O has finished reading the buffer.

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "drain_tile")

# %% [markdown]
# **Predict.** `drain_tile` neither uses V's tile nor releases it. Why does it still call `smem.v.wait(n)`?
#
# - ☐ because `wait` counts, so this consumer would otherwise fall one tile behind
# - ☐ because K would otherwise be released before V's copy is complete
# - ☐ because a barrier remembers only one bit, so a consumer must not miss a phase
#
# <details><summary>Answer</summary>
#
# **because a barrier remembers only one bit, so a consumer must not miss a phase.** Take a row block of four tiles and
# two stages. The upper consumer's rows do not see tiles 0 and 1, so it drains them, while the lower consumer uses all
# four. V's tiles 1 and 3 share a stage. Tile 1 ends the stage's phase 0, and tile 3 ends its phase 1. Suppose that the
# copy of V's tile 1 is slow, and that the upper consumer drains tile 1 without waiting for it:
#
# | the upper consumer | V's stage for tiles 1 and 3 | the barrier's answer |
# | --- | --- | --- |
# | drains tiles 0 and 1 without `v.wait` | tile 1 is being copied | not asked |
# | takes K's tiles 2 and 3, and V's tile 2 | tile 1 is still being copied | not asked |
# | takes V's tile 3, so it waits for the end of phase 1 | tile 1 is still being copied | "phase 1 is over", as at the start, when no phase has ended yet |
# | runs P V with this stage | neither tile 1 nor tile 3 is complete | |
#
# If the consumer had waited for tile 1, it would have seen the end of phase 0, and after that, phase 1 counts as over only
# when tile 3 has arrived.
#
# The first answer is wrong because `wait` does not count tiles itself. The consumer passes it the tile's number, n. The
# second is wrong because this tile of V is freed only when K's *next* tile is released, and a consumer that needs V
# does not release that tile of K until its matmul P V is done.
# </details>

# %% [markdown]
# How often does this mistake show? The next cell runs the example in the model, with one change. Each copy is an actor
# of its own, so copies may end in any order, as they may with TMA:

# %% tags=["hide-input"]
# the upper consumer does not see tiles 0 and 1, the lower one sees all T
def skipping(T, takes, orders=500):
    def copy_when_started(ring, n):
        yield started[ring][n], 0, "its start"
        yield from ring.copy(n)

    def producer():
        for n in range(T):
            yield K.acquire(n)
            started[K][n].arrive("producer")
            if n > 0:
                started[V][n - 1].arrive("producer")
        yield K.acquire(T)
        started[V][T - 1].arrive("producer")

    def use(n, seen):
        stage = yield from V.wait(n)
        seen.append(V.tiles[stage])

    def consumer(first, seen):
        for n in range(T):
            yield from K.wait(n)
            if n > first:
                yield from use(n - 1, seen)
            K.release(n)
            if n < first and takes:  # as in drain_tile
                yield from V.wait(n)
        yield from use(T - 1, seen)

    failed = 0
    for seed in range(orders):
        K, V, upper, lower = RingModel(2, 2), RingModel(2, 2), [], []
        started = {ring: [Barrier("started", 1) for _ in range(T)] for ring in (K, V)}
        actors = {(ring is V, n): copy_when_started(ring, n) for ring in (K, V) for n in range(T)}
        run_actors(actors | {"producer": producer(), "upper": consumer(2, upper),
                      "lower": consumer(0, lower)}, seed)
        failed += (upper, lower) != ([*range(2, T)], [*range(T)])
    return failed


for T in (4, 5):
    print(f"{T} tiles: with v.wait wrong in {skipping(T, True)} of 500 orders, without it in "
          f"{skipping(T, False)}")

# %% [markdown]
# The mistake shows in very few orders, and with five tiles in none, so a test would hardly find it. What makes the
# fifth tile safe? Before the upper consumer asks for V's tile 3, it now takes K's tile 4. The producer can copy K's
# tile 4 only after the lower consumer has released K's tile 2, and that consumer uses V's tile 1 before this release.
# So V's tile 1 has arrived by then, and its phase has ended.
#
# The same argument holds for any number of stages. Suppose that a consumer drains tile n without waiting for V. Before
# it takes V's tile n + stages, which uses the same stage, it takes K's tile n + stages + 1. That tile of K can only be
# there if all consumers have released K's tile n + 1. At least one of them uses tile n, and it releases K's tile n + 1
# only after its P V with V's tile n. So V's tile n must have arrived by then.
#
# There is one exception. If tile n + stages is the last one of its row block, K's tile n + stages + 1 belongs to the
# *next* row block. The consumer then takes this tile of K only after V's tile n + stages, which is too late. In the
# example, this happens with tile 3 of four (n = 1, with two stages), and because of this case, `drain_tile` needs its
# wait for V.

# %% [markdown]
# ### One tile
#
# `step`, the body of the loop over tiles, combines the loop of rung 20 with the softmax of rung 22.

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "step", begin="s = start_scores")

# %% [markdown]
# | line | matmuls that have started and are still running | waits for |
# | --- | --- | --- |
# | `start_scores` | S of tile n | K's tile, and this consumer's turn in ping-pong |
# | `warpgroup_mma(p, …)` | S of tile n, P V of tile n − 1 | V's tile |
# | `pass_on` | both; the next consumer may start its own | – |
# | `warpgroup_mma_wait(1)` | P V | S |
# | `softmax_step`, `rounded` | P V, until the place to which `ptxas` moves the next wait (see below) | – |
# | `warpgroup_mma_wait(0)` | none of this consumer's | P V |
#
# These names occur in the listing:
#
# | name | meaning |
# | --- | --- |
# | `start_scores(c, n, q, smem)` | waits for K's tile n and for the turn of consumer c, starts S, and returns it before it is ready |
# | `HAS_RIGHT_BOUND`, `left` | whether the mask limits a row on the right, and how many keys a window reaches to the left (`None` if there is no such limit) |
# | `bounds.cuts(j)` | true if tile j contains a column that one of the 64 rows does not see; only then is the mask needed |
# | `row_scale` | each row's own copy of the scale, which part 4 explains; here, you can read it as `scale_log2` |
# | `scale_log2` | $\tau \log_2 e$, which the host has computed |
# | `as_operand(p, dtype, columns)` | gives p the layout of a left operand (chapter 12a) for a matmul whose result has this number of columns |
# | `d_pad` | d, rounded up to the width of the tiles, which is 32, 64, 128 or 256 |
#
# In the source, the whole softmax is between the two waits, so all of it could run during P V. However, NVIDIA's
# assembler, `ptxas`, moves the second wait to an earlier place. To see what still runs during P V, we can look at the
# machine code, and we do not need a GPU for that. A wait appears there as `WARPGROUP.DEPBAR`, and the wait for S ends
# in `0x1`, because one matmul may still be running. For each of the three consumers, the next cell counts the
# instructions between the wait for S and the next wait:

# %% tags=["nbval-ignore-output"]
for d, causal in product((64, 128), (False, True)):
    (made,) = xray("hopper.forward", d=d, causal=causal)
    for after in made.stages["sass"].split("gsb0, 0x1")[1:]:
        under = after.split("WARPGROUP.DEPBAR")[0]
        counts = {"maxima": under.count("FMNMX"), "exponentials": under.count("MUFU.EX2")}
        print(f"d = {d:3},", "causal, " if causal else "no mask,", "during P V:", counts)

# %% [markdown]
# Per tile, every thread of a consumer has 64 scores at d = 64, and 32 at d = 128, where `THREE_CONSUMERS` has tiles of
# 64 keys. The thread computes one exponential for each of these scores, and up to two more for α. The cell shows that
# hardly any of them run during the consumer's own P V. With d = 64 under the mask, not even the maxima do.
#
# Would the kernel be faster if `ptxas` left the wait where it is in the source? To find out, we built a variant with a
# conditional jump just before the second wait. Whether the program jumps depends on the sum of the exponentials, so all
# of them have to be computed first, and `ptxas` cannot move the wait to a place before the jump. At d = 64, all
# exponentials of the variant run between the two waits, but the variant is 1 to 5% slower than the kernel, and we do
# not know why. At d = 128 without a mask, with three consumers, `ptxas` makes every matmul of the variant wait for the
# previous one, so the variant takes more than four times as long.
#
# So what do the exponentials hide behind? Only the matmuls of the *other* consumers are left. This is again an
# inference, as for rung 20 in chapter 12a, and not a measurement. At d = 64, ping-pong makes the consumers' matmuls
# alternate (part 4). At d = 128, the kernel usually has no ping-pong. There, the matmuls of a tile take twice as long
# as its exponentials (chapter 12a), so it is enough if the consumers drift apart by themselves, as in *Between*. The
# recorded speeds suggest that they do so.
#
# To read the machine code that the cell has searched, run `fa2-lab xray hopper.forward --d 64 --sass`, and add `--full`
# to leave out the mask.
#
# The function around this loop, `process_row_block`, handles the first and the last tile. Before the loop, it masks the
# first, rightmost tile if the call has a mask, or if the last key is not at the end of that tile. After the loop, it
# computes the last P V. Inside the loop, therefore, no tile can extend past the last key, so `step` tests only the
# bounds of a mask.
#
# ## Part 4 · Inside a tile (18 minutes)
# Part 3 only named the parts of a step. This part opens four of them, namely the turns, the softmax, the update of m,
# and the mask.
#
# ### Which consumer starts its matmuls first?
#
# **Ping-pong**, an idea from FlashAttention-3, makes the consumers take turns starting their matmuls. While one
# consumer's matmuls run, another consumer computes exponentials, as in *Between* and *Both* in chapter 12a's timeline.
# Ping-pong needs one barrier per consumer:

# %% tags=["nbval-ignore-output"]
show_listing("hopper/shared/pipeline.py", "PingPong.wait", "PingPong.pass_on")

# %% [markdown]
# Consumer 0's barrier gets one arrival in advance, since otherwise no consumer could ever begin. A consumer that skips
# a tile must still pass the turn on, as `drain_tile` does. Ping-pong costs one wait per tile, and whether it saves more
# time than this wait takes depends on d. At d = 64, where the exponentials take as long as both matmuls, ping-pong made
# the kernel 0.99 to 1.07 times as fast. At d = 128, where the exponentials take only half as long, the kernel was only
# 0.99 times as fast with ping-pong, so it became slightly slower. This is why the configurations for d = 128 in the
# table of part 1 have no ping-pong. There is one exception. If a call with the causal mask has at least 1.5 times as
# many keys as rows, and `DEFAULT` is the fastest choice for it, the kernel switches ping-pong on. For that case, the
# table of ideas in part 6 shows a speedup.
#
# The picture shows a model in which both consumers begin at the same time and stay together without turns. In this
# model, ping-pong nearly doubles the tensor cores' share, from 49% to 92%. The measured gain is at most 7%, because on
# a GPU, the consumers drift apart even without ping-pong. So the timelines show how ping-pong works, and the bars below
# them compare the gain in the model with the measured one:

# %% tags=["hide-input"]
show("ping_pong")

# %% [markdown]
# ### The softmax step
#
# The softmax is the one from rung 22, with one addition. Each row has its own copy of the scale $\tau \log_2 e$, under
# the name `row_scale`, for a reason that follows the listing. Since four lanes share a row, m, `row_scale` and ℓ are
# stored once for each of these lanes, in the shape (64, 4):

# %% tags=["nbval-ignore-output"]
show_listing("hopper/forward/softmax.py", "softmax_step", "lane_row_max")

# %% [markdown]
# - `broadcast_state` lines up a value that a lane holds once per row, such as m, with each of that lane's scores in the
#   row. No data moves.
# - `lane_row_max` first compares pairs, then builds four short chains side by side, and finally compares their results.
#   In one long chain, each comparison would have to wait for the previous one.
# - `update_row_max` lets m lag by up to 8, so it almost never changes m. If m stays the same, `alpha` is 1.
# - Each value of `p` takes one FMA and one exponential.
#
# ### Why does each row have its own scale?
#
# The answer has to do with huge scores. For a score s, the kernel computes p as 2^(`row_scale` · s − m). The product
# `row_scale` · s enters this formula exactly, because an FMA rounds only its result. But m, which is the same product
# for the row's largest score, has been rounded to fp32. So the row's largest p is not exactly 1, and if m is huge, it
# can be far from 1. The next cell keeps the scale at $\tau \log_2 e$ and then tries a power of two. It prints how large
# p can become:

# %%
scale = np.float32(64**-0.5 * np.log2(np.e))
power_of_two = np.float32(2 ** np.floor(np.log2(scale)))
for size in (1e3, 1e6, 3e9):
    # the largest score of 1,001 rows
    s = np.linspace(size, 1.1 * size, 1001, dtype=np.float32)
    for name, factor in (("scale", scale), ("power of two", power_of_two)):
        m = factor * s  # rounded to fp32
        most = (np.float64(factor) * np.float64(s) - m).max()
        print(f"scores near {size:7,.0e}, {name:12} {factor:.3f}: the largest p is up to "
              f"2^{most:.2g}")

# %% [markdown]
# For scores in the billions, neighbouring fp32 numbers near m are 64 apart, so rounding m can be off by 32. Then p is
# up to 2³², but fp16 ends at 65,504, so p becomes ∞. As the cell shows, the fix is a power of two, because multiplying
# by it never rounds. Each row therefore keeps its own copy of the scale. If |m| reaches $2^{28}$, the row's copy
# becomes the power of two below $\tau \log_2 e$.
#
# Such a power of two hardly changes O, however. Scores of this size are so far apart in fp32 that the next smaller
# score, times `row_scale`, is at least 16 lower. With either scale, p should therefore be 1 for the row's largest score
# and at most $2^{-16}$ for all smaller ones.

# %% [markdown]
# ### How is m updated in assembly?
#
# In Gluon, all warps of a consumer take the same branch of an `if`. Here, however, one warp should be able to jump over
# the update of m while another performs it, and such a jump has to be written in PTX. In this code, a register that
# belongs to a Gluon variable is called `$` and a number. Each lane has two rows, so most of these operands come in
# pairs:
#
# | operand | what it is |
# | --- | --- |
# | `$0`, `$1` | m of the two rows |
# | `$2`, `$3` | their scale |
# | `$4`, `$5` | their α |
# | `$6` to `$9` | the old m and scale; the compiler puts them into the registers of `$0` to `$3`, so the code does not name them |
# | `$10`, `$11` | the largest score that the lane holds in each row |
# | `x`, `some` | a register, and a *predicate*, which is a register of one bit; both are declared above the lines shown |
#
# The test, the vote and the jump look like this:

# %% tags=["nbval-ignore-output"]
raised = "\n".join(definition_lines("hopper/forward/softmax.py", "PTX_UPDATE_ROW_MAX"))
show_code(raised[raised.index("mov.f32") : raised.index("DONE;") + 5], "text")

# %% [markdown]
# The first line sets both α to 1. The second line is for the lane's first row. It computes the lane's largest score
# times `row_scale`, minus m, into `x`, and sets `some` if `x` is greater than 8. The third line does the same for the
# second row, and keeps `some` set if it was set before. So `some` is true if the lane has found a score that is too far
# above m in either of its rows.
#
# The vote, `vote.sync.any`, combines the answers of all lanes in the warp, because its mask, −1, selects all of them.
# If `some` is false in every lane, all lanes jump to the end with α = 1. Otherwise, they go on with the lines that
# follow in [softmax.py](../fa2_lab/kernels/hopper/forward/softmax.py). There, the four lanes of each row find the row's
# largest score in two exchanges, and use it to compute the new m and α = 2^(old m − new m). The suffix `.uni` promises
# the assembler that either all lanes of the warp jump or none does, which is true because they all have the result of
# the same vote.

# %% [markdown]
# ### How can the mask use fewer registers?
#
# The causal mask hides column `col` of a tile if col ≥ `seen`, where `seen` differs from row to row. With tiles of 128
# keys, and written in the obvious way, this comparison makes each thread keep 32 column indices, which differ from lane
# to lane.
#
# **Predict.** A lane holds 2 out of every 8 columns, as the picture of row 21 in chapter 12a shows. Now split `col`
# into two parts: `col & 6` keeps the bits worth 2 and 4, and `col & ~6` keeps all the others. For which of the two
# parts does every lane have the same list of values?
#
# - ☐ `col & 6`
# - ☐ `col & ~6`
# - ☐ neither, because every lane has different columns
#
# <details><summary>Answer</summary>
#
# **`col & ~6`.** The second lane of a row has columns 2, 3, 10, 11, 18, … For all of them, `col & 6` is 2, so this part
# identifies the *lane*. The other part, `col & ~6`, is 0, 1, 8, 9, 16, …, and that list is the same in every lane.
# </details>

# %% tags=["nbval-ignore-output"]
show_listing("hopper/forward/softmax.py", "mask")

# %% [markdown]
# If we write `seen` for `bounds.end - first`, the first `where` tests `col - (col & 6) < seen - (col & 6)`. The left side
# is a constant that the compiler knows, so a lane no longer has to keep its 32 column indices. The right side is
# computed only once per row.
#
# **Takeaway.** Sort the parts of a formula by when they become known: at compile time, once per row, or only with each
# score.

# %% [markdown]
# ## Part 5 · The last copy, and a hang (10 minutes)
# Two things are left, the end of a row block, and what to do if a wait never ends.
#
# ### How do O and L leave the SM?
#
# After its last tile, a consumer calls `store`, which finishes O and L and copies O to HBM:

# %% tags=["nbval-ignore-output"]
show_listing(KERNEL, "store", begin="LANES")

# %% [markdown]
# These are lines 12 to 15 of Algorithm 1. Only here does the kernel add up the four lanes' shares of ℓ. If a row's ℓ is
# 0, the row sees no key. For such rows, the kernel replaces ℓ by 1, so that O becomes 0, and sets L to −∞.
#
# The store of O follows the rules from chapter 12a. First, `store_wait` makes sure that TMA has read the buffer's
# previous contents. Then the consumer stores its tile of O, issues the fence and starts the copy. If O has its own
# buffer, no warp has to wait for this copy now, so the work on the next row block can overlap with it. `matrix` views
# the buffer as (64, d), and `tile_at` gives the tile's coordinates for TMA.
#
# The last seven statements store L, with one value per row. Like m, `L_i` has the shape (64, 4), because all four lanes
# of a row compute it. `writes` is therefore true only for the first of the four lanes, and only for rows that exist.
# `first_L_index` returns the index at which this head's rows begin in L, and `gl.broadcast` expands the addresses and
# the mask to shape (64, 4).
#
# There is another fence in `zero_oob_rows` ([pipeline.py](../fa2_lab/kernels/hopper/shared/pipeline.py)). With key
# lengths or a window, a tile of V can contain rows that no query sees. Their p is 0, but since 0 · ∞ is not a number,
# these rows of V have to be set to zero. Threads store the zeros and the tensor cores read them, so a fence is needed
# in between.
#
# ### What does a hang look like, and how do you find it?
#
# If a release is missing, nothing crashes. The call itself returns, because launches are asynchronous. But the next
# line that waits for the GPU, such as `torch.cuda.synchronize()` or a `print` of the result, never returns.
# `nvidia-smi` reports that the GPU is 100% busy, since warps that wait at a barrier keep polling it. Ctrl-C does not
# help either, so you have to kill the process.
#
# The model from chapter 12a can show such a hang on a laptop. Below, one of three consumers leaves out a single
# release, in a ring with two stages. When no actor can continue, the model prints what each of them is waiting for:

# %% tags=["hide-input"]
def leaves_one_out(ring, T, c, seen):
    for n in range(T):
        yield from ring.wait(n)
        if (n, c) != (2, 1):
            ring.release(n)


print(try_consumer(leaves_one_out, seed=0)[0].replace("; ", "\n"))

# %% [markdown]
# **Predict.** Which tile was not released?
#
# - ☐ tile 3
# - ☐ tile 2
# - ☐ tile 4
#
# <details><summary>Answer</summary>
#
# **tile 2.** All consumers wait for tile 4, but only because the producer has not copied it. The producer, in turn,
# waits for *room*. Tile 4 goes into stage 4 % 2 = 0, which held tile 2 before, so some consumer has taken tile 2
# without releasing it. The waits do not tell us which consumer that was, because a barrier counts arrivals but does not
# record who has arrived.
# </details>
#
# On a GPU, nothing prints the waits for you. These steps help you find them:
#
# 1. Make the case small. A missing release hangs the kernel only when a stage is used for the second time. The stages
#    of K and V change with every tile, but those of Q and the mailbox change only with every row block. Begin with one
#    head and one row block, and add tiles until there is one more than K has stages. If the kernel does not hang, give
#    one program more row blocks, because a missing release of Q or of the mailbox shows only then.
# 2. Attach `cuda-gdb -p` to the process. `info cuda warps` lists where each warp is, and `x/i $pc` prints the
#    instruction it is at. A waiting warp is in a loop around `SYNCS.PHASECHK`, and `fa2-lab xray FILE --sass` helps you
#    find the source line of that loop.
# 3. Find out which warp should have arrived at this barrier, and look for a path through the code on which that warp
#    does not reach its `release`. Often, the cause is a skipped tile or an empty row block.
# 4. Count the releases. Each time a stage is filled, every consumer must release it exactly once. You can check this
#    without a GPU by running the roles one after another in Python, with counters in place of the barriers. This
#    package's tests run the kernel in that way, and they fail if a release is taken out.
#
# <details><summary>What about clusters and multicast?</summary>
#
# Hopper can launch thread blocks in *clusters*. The blocks of a cluster run on neighbouring SMs, and each of them can
# read the others' shared memory. A copy with *multicast* brings one tile from L2 to several of these blocks at once. If
# two row blocks of the same head ran as a cluster, K and V would have to be read from L2 only once instead of twice. In
# exchange, the two blocks would have to run in step, and there would be one more wait, because a stage could be
# refilled only after the consumers of *both* blocks had released it. Our kernel uses neither clusters nor multicast.
# With 192 rows per block, it already requests few bytes of K and V from L2. We have not measured how much clusters
# would help.
# </details>

# %% [markdown]
# ## Part 6 · Results (15 minutes)
# How fast is the kernel that you have now read, and which of its ideas make it so?
#
# ### How fast is it?
#
# The following speeds were recorded on an H200, with N = 4,096, a total of 16,384 tokens, and a hidden size of 2,048.
# All implementations were measured in the same run.

# %% tags=["hide-input"]
climb = Climb()
climb.table(*ladder.RUNGS[-3:], "fa2_lab", "FlashAttention-3", "cuDNN")
paper = load("paper")
rows = [row for row in paper.rows if row.problem["N_q"] >= 1024 and row.direction == "forward"]


def ratios(peer):
    return [row.ratio("fa2_lab", peer) for row in rows if peer in row.values]


print("\nour speed over theirs, N = 1,024 to 16,384:")
for peer in ("FlashAttention-3", "cuDNN", "fa2_lab portable"):
    found = ratios(peer)
    mean = np.prod(found) ** (1 / len(found))
    print(f"{peer:17} geometric mean {mean:.2f}, from {min(found):.2f} to {max(found):.2f}")
best = max(row.rate("fa2_lab") for row in rows)
peak, gemm = chips.H200.tensor_flops_per_second / 1e12, paper.ceilings["GEMM TFLOP/s"]
print(f"best: {best:.0f} TFLOP/s, {best / peak:.0%} of the datasheet, {best / gemm:.0%} of a "
      "large matmul")

# %% [markdown]
# The kernel is faster than cuDNN, and about as fast as FlashAttention-3 or faster. At its best, it is nearly as fast as
# a plain matmul.
#
# ### How much did each idea help?
#
# There are two ways to measure how much an idea speeds up a kernel. One is to add the idea to a kernel without it, as
# each rung does (chapter 12a, d = 128, no mask). The other is to take the idea out of the finished kernel. For that, we
# timed modified copies of an earlier version of the kernel with Triton 3.6, at several shapes:

# %% tags=["hide-input"]
IDEAS = {
    "S started before P V of the tile before": "20",
    "programs that stay on their SM": "21",
    "m may lag by 8 behind the maximum": "22",
    "192 rows a block, tiles of 64 keys": "23",
    "one release for a tile of V and the next of K": "",
    "maxima as a tree, not as a chain": "",
    "the causal mask as a test of bits": "",
}
print("speed with the idea over speed without it         as a rung   in the kernel")
for idea, rung in IDEAS.items():
    gains = [x["gain"] for x in idea_gains.gains() if (x["part"], x["idea"]) == ("forward", idea)]
    added = f"rung {rung}: {climb.factor(rung):.2f}" if rung else "–"
    print(f"{idea:48}{added:>12}   {min(gains):.2f} to {max(gains):.2f}")

# %% [markdown]
# How much an idea helps depends on what else the program is waiting for. That is why the two columns differ, and why
# you cannot multiply the individual speedups to get the speedup from all ideas together. The last three ideas appear
# only in this chapter, and they make little difference.
#
# We also tried twelve further ideas on the current kernel, with Triton 3.9, and wrote down a prediction for each of
# them first. Eight of them were not kept, although we had expected gains from them. They save instructions, barriers or
# the clearing of a counter, let the compiler use more registers, start the next row block's first matmul earlier, hold
# the wait for P V back as described in part 3, or tell the copies which data to keep in L2.
#
# Four ideas were kept, at least for some problems. Three of these choose sizes or ping-pong for certain calls, namely
# windows, packed sequences and many more keys than rows, and we kept them for the problems on which they are faster.
# The last idea applies if several query heads share a K/V head and there is no mask. The kernel then treats these query
# heads as a single head that has all of their rows, so fewer row blocks are partly empty. This change made short calls
# up to 1.11 times as fast, and left long calls as fast as before.
#
# You can open the table of all twelve. Its *measured* column shows the speedup on average and, in parentheses, on the
# worst and on the best problem. In the column *without pauses*, the calls followed one another directly, so the clock
# frequency fell. *In a CUDA graph* means that the calls are recorded once and then replayed. If the table says that 40
# bytes per thread spill, the compiler had no registers left for them and moved them to slower memory.

# %% tags=["nbval-ignore-output", "hide-input"]
table = idea_gains.table("forward")
display(Markdown("\n".join(["<details><summary>Twelve ideas: predicted and measured</summary>",
                            "", *table, "", "</details>"])))

# %% [markdown]
# Most predictions were too optimistic, since removing an instruction or a barrier saves no time while the program is
# waiting for something else. New sizes helped on problems for which the old sizes had not been chosen. Finally, how
# much faster is the kernel than the last rung?

# %% tags=["hide-input"]
over = {shape: climb.factor("fa2_lab", *shape, old=ladder.RUNGS[-1]) for shape in climb.shapes}
for (d, causal), ratio in over.items():
    print(f"d = {d:3}, {'causal' if causal else 'no mask':8}: {ratio:.2f} times the last "
          "rung's speed")

# %% [markdown]
# At d = 64, the kernel uses ping-pong, which no rung does. At d = 128, it differs from the last rung as well, because
# it works through the heads in a different order. The recorded numbers do not tell us which differences made the kernel
# faster.

# %% [markdown]
# ### The same in 150 lines, and what they cannot express
#
# [TileLang](https://github.com/tile-ai/tilelang) compiles attention for Hopper from about 150 lines of Python. Its
# [example](https://github.com/tile-ai/tilelang/tree/main/examples/flash_attention) contains the tiles, the softmax and
# a single loop:
#
# | here | in that example |
# | --- | --- |
# | rings, phases, releases | follow from `T.Pipelined(…, num_stages=2)` |
# | producer warp, registers for each role, layouts | chosen by the compiler |
# | S of one tile alongside P V of the previous tile | `order` and `stage`, two lists of six numbers |
# | lazy rescaling, by a vote of the warp | not there; it would need PTX, as it does here |
# | programs that stay and fetch row blocks | one program for each row block |
#
# If your kernel is not attention, start with TileLang. Come back here once you know which wait you want to get rid of.

# %% [markdown]
# ## Recap
#
# - A producer warp copies tiles into rings and fetches the next row block late. Up to three consumer warpgroups share
#   each tile of K and V, and each of them computes 64 rows of O.
# - In each step, a consumer starts S of one tile and P V of the previous one, and then computes the softmax. In the
#   machine code, hardly any exponentials run during the consumer's own P V, so they probably hide behind the matmuls of
#   the other consumers.
# - If one wait implies another, you can leave the other one out. Check the last tile of a row block separately, though.
# - A consumer must take even the tiles that it does not use, because a barrier remembers only one bit.
# - How much an idea helps depends on the kernel in which you measure it.

# %% [markdown]
# ## Exercises
#
# **Build.** With key lengths, a consumer takes V's first tile before it releases K's first tile, because it has to set
# some rows of V's tile to zero. From the next tile on, it behaves like `tiles_of`. With only one stage, the kernel's
# producer would then hang, since it copies V₀ after K₁, and K₁ has to wait until K₀ is released. For the model, write a
# producer for one row block that gets by with a single stage. The check tries 1, 2 and 3 stages. As above, `yield
# K.acquire(n)` waits until all consumers have released K's tile n − stages. It copies nothing, so n = T is allowed,
# although there is no tile T. `yield from K.copy(n)` and `yield from V.copy(n)` copy a tile. Since V is never released,
# `V.acquire` would wait forever.

# %%
def my_copies(K, V, T):  # T tiles
    ...


# %% tags=["hide-input"]
check_copies(my_copies)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_copies(K, V, T):
#     for n in range(T):
#         yield K.acquire(n)
#         yield from K.copy(n)
#         if n > 0:
#             yield K.acquire(n + 1)
#         yield from V.copy(n)
# ```
# K does not run ahead in this solution, so the copy of V₀ does not have to wait for the copy of K₁. With one stage, V's
# tile n overwrites V's tile n − 1, which is released together with K's tile n. That is the same release that the copy
# of K's tile n + 1 has to wait for.
# </details>

# %% tags=["hide-input", "nbval-ignore-output"]
# The checks below run the kernel. Its first call prints how kernels run on this machine.
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
col, seen = np.arange(128)[None, :], np.arange(-3, 140)[:, None]
verdict("the test of bits gives the causal mask",
        (((col & ~6) < seen - (col & 6)) == (col < seen)).all())
found = {careful: wrong(careful, 200) for careful in ((), (3,))}
verdict("without releases, V needs a wait before its last tile", found[3,] == 0 < found[()])
N_q, N_k = (1000, 1500) if on_gpu else (70, 100)
for d in (64, 128):
    for causal in (False, True):
        draws = (torch.Generator().manual_seed(seed) for seed in range(3))
        shapes = [(1, 4, N_q, d), (1, 2, N_k, d), (1, 2, N_k, d)]
        halves = [torch.randn(s, generator=g).half() for s, g in zip(shapes, draws, strict=True)]
        want = by_heads.forward(*(x.double().numpy() for x in halves), stage="naive", causal=causal)
        found = attention(*(x.to(device) for x in halves), causal=causal, return_lse=True)
        right = [close(x.double().cpu().numpy(), y, 3e-3) for x, y in zip(found, want, strict=True)]
        verdict(f"O and L agree with float64, d = {d}, causal = {causal}", all(right))

# %% tags=["hide-input"]
verdict("the kernel is faster than cuDNN and the portable kernel, and about as fast as "
        "FlashAttention-3 or faster",
        all(min(ratios(peer)) > 0.97 for peer in ("FlashAttention-3", "cuDNN", "fa2_lab portable")))
turns = [x for x in idea_gains.gains() if x["idea"].startswith("turns on the tensor cores")]
gains = [[round(x["gain"], 2) for x in turns if x["d"] == d] for d in (64, 128)]
verdict("ping-pong makes the kernel 0.99 to 1.07 times as fast at d = 64, and 0.99 times as "
        "fast at d = 128",
        [min(gains[0]), max(gains[0]), *{*gains[1]}] == [0.99, 1.07, 0.99])
found = {(x["idea"], x["kept"]) for x in idea_gains.gains() if x["part"] == "forward"
         and "prediction" in x}
verdict("of twelve further ideas, four are kept for some problems",
        (len({x for x, _ in found}), len({x for x, kept in found if kept})) == (12, 4))
held = [x for x in idea_gains.gains() if x["idea"].startswith("P V's wait held")
        and x["variant"] == "all of them"]
gains = [x["gain"] for x in held
         if x["d"] == 64], [x["gain"] for x in held if x["d"] == 128 and not x["causal"]]
verdict("with P V's wait after the exponentials, the kernel is 1 to 5% slower at d = 64, and "
        "at d = 128 without a mask it takes over four times as long",
        0.94 < min(gains[0]) and max(gains[0]) < 0.995 and max(gains[1]) < 0.25)
joined = [x["gain"] for x in idea_gains.gains() if x["part"] == "forward"
          and x["idea"].endswith("rows of one head")]
verdict("query heads as rows of one head make calls 1.00 to 1.11 times as fast",
        [round(f(joined), 2) for f in (min, max)] == [1.00, 1.11])
verdict("the kernel is at least as fast as the last rung",
        all(0.98 < ratio < 1.15 for ratio in over.values()))
chosen = [configs.choose(d, N, N, heads=2048 // d * 16384 // N, SMs=132, causal=causal,
                         has_key_lengths=False)
          for d, N, causal in ((64, 1024, True), (128, 512, True), (128, 16384, False),
                               (128, 16384, True))]
verdict("short causal rows use tiles of 64 keys, and long rows at d = 128 use blocks of 192 rows",
        [x.B_c for x in chosen[:2]] == [64, 64] and [x.consumers for x in chosen[2:]] == [3, 3])

# %% [markdown] tags=["navigation"]
# [← Hopper, machine and rungs](12a_hopper_rungs.ipynb) · [The map](00_start.ipynb) · [Hopper, backward →](13_hopper_backward.ipynb)
