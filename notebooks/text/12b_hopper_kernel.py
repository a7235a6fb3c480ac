# %% [markdown] tags=["navigation"]
# [← Hopper, machine and rungs](12a_hopper_rungs.ipynb) · [The map](00_start.ipynb) · [Hopper, backward →](13_hopper_backward.ipynb)

# %% [markdown]
# # 12b · Hopper, the kernel
#
# **How does the fast kernel work, line by line?**
#
# `fa2_lab/kernels/hopper/forward` is the kernel that `attention()` runs on an H100 or H200. It is made of the rungs
# of [chapter 12a](12a_hopper_rungs.ipynb), but beyond them it accepts any lengths, grouped-query attention, windows
# and packed sequences. In this chapter, you read the core of the kernel, which consists of the producer and of what a
# consumer does with a tile. For each wait, you will see which warps it is for.
#
# After this notebook you can
#
# - name, for each barrier of the kernel, the warps that arrive and the warps that wait, and explain why,
# - decide which waits can be left out because another one implies them,
# - compare the kernel's speed with that of others, and explain why the gain of an idea belongs to one kernel.
#
# *Time: 90 minutes, in five parts. Before this: [12a](12a_hopper_rungs.ipynb). Hardware: any laptop with Linux; on a
# Hopper GPU, the checks run the real kernel. Numbers were measured on an NVIDIA H200 in bf16.*

# %%
from itertools import product

import numpy as np
import torch
from IPython.display import Markdown, display

from fa2_lab.api.attention import attention
from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, grid
from fa2_lab.plots import ideas
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import heads as by_heads
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_lab.tools.xray import xray
from fa2_studio.book.hopper import Climb, lines_of, read, show_code
from fa2_studio.book.orders import judge_copies
from fa2_studio.book.ring import PAUSE, RingModel, run, try_out
from fa2_studio.book.verdicts import close, verdict

# %% tags=["nbval-ignore-output"]
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))  # prints how the kernels run here

# %% [markdown]
# ## Part 1 · Barriers, sizes and the scheduler (14 minutes)
#
# ## The whole protocol in one picture
#
# One program fills an SM, with a producer warp and with one to three consumer warpgroups that have 64 rows each.

# %%
show("pipes_forward")

# %% [markdown]
# The picture shows a program with two consumers, and with three stages each for K and V. These are the sizes that a
# table below calls `SHORT`. A solid arrow means that a copy fills a stage and that a consumer takes it. A dashed
# arrow means that a consumer releases a stage and that the producer waits for this release. V has no dashed arrows,
# and part 2 explains why.
#
# CUTLASS, NVIDIA's library of kernels, uses other words for the same things. Its barriers are called *full* and
# *empty*, and its calls are:
#
# | here | CUTLASS | who calls it |
# | --- | --- | --- |
# | `wait_for_room`, inside `fill` | `producer_acquire` | the producer, before a copy |
# | `expect`, inside `fill` | the second half of `producer_acquire` | the producer; TMA then arrives by itself |
# | `take` | `consumer_wait` | a consumer, before it reads a tile |
# | `release` | `consumer_release` | a consumer, after it has read a tile |
#
# ThunderKittens, another library, calls the roles *load*, *compute* and *store*, which here are `producer`,
# `consumer` and the function `store`.
#
# The next table lists the barriers of this kernel:
#
# | barrier | how many | who arrives | who waits | what an arrival means |
# | --- | --- | --- | --- | --- |
# | Q *filled* | one per stage | the producer's copies | the consumer of these rows | 64 rows of Q are there |
# | Q *emptied* | one per stage | the consumer of these rows | the producer | these rows may be overwritten |
# | K *filled* | one per stage | the producer's copies | all consumers | a tile of K is there |
# | K *emptied* | one per stage | all consumers | the producer | this tile of K, and the tile of V before it, may be overwritten |
# | V *filled* | one per stage | the producer's copies | all consumers | a tile of V is there |
# | mailbox *filled* | two | the producer | all consumers | the next row block is known |
# | mailbox *emptied* | two | all consumers | the producer | all consumers have read it |
# | ping-pong | one per consumer | the consumer before it | this consumer | this consumer may start its matmuls |

# %% [markdown]
# ## What is launched?
#
# The host launches one program for each SM, or fewer if there are fewer row blocks. A program stays on its SM and
# fetches one row block after another. Once for each kind of call, the host prepares what
# [`launch.py`](../fa2_lab/kernels/hopper/forward/launch.py) then launches. It makes a descriptor for each tensor, and
# it computes $\tau \log_2 e$, so that exp becomes a power of 2.
#
# The order of the row blocks depends on the mask. Without a mask, heads run one after another, so that all programs
# read the same K and V from L2. Under a causal mask, row blocks take different times, which the programs even out
# better if they can choose among several heads. So as many heads run side by side as a part of L2 holds.
#
# `sizes.choose` picks one of a few sets of sizes, by rules that were fitted to times on an H200:

# %% tags=["nbval-ignore-output", "hide-input"]
from fa2_lab.kernels.hopper.forward import sizes

SETS = {
    "USUAL": "if no other set fits better",
    "ALONE": "if there are few row blocks, which then have 64 rows, so that more SMs are busy",
    "HALF": "if rows are short, because under the causal mask the diagonal then cuts most tiles",
    "SHORT": "if blocks of 192 rows fit badly",
    "WIDE": "if rows are long, so that K and V are read once for 192 rows",
}
heads = "| d | set | when it is used | consumers | keys per tile | stages | ping-pong | O has its own buffer |"
lines = [heads, "| --- " * 8 + "|"]
for d, (name, where) in product((64, 128), SETS.items()):
    found = getattr(sizes, name)
    one = found[d] if isinstance(found, dict) else found
    if one.d_pad == d:
        words = ["yes" if x else "no" for x in (one.ping_pong, one.O_apart)]
        cells = d, f"`{name}`", where, one.consumers, one.B_c, one.stages, *words
        lines.append(f"| {' | '.join(map(str, cells))} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# In *ping-pong*, consumers take turns to start their matmuls (part 4). If O does not have its own buffer, it waits
# for its copy in Q's buffer, as on the last rung. Calls with dropout, softcaps, sinks or a bias use the portable
# kernel. Windows also use it if sequences are packed, or if d is above 128.

# %% [markdown]
# The picture shows what four of these sets take of an SM. In each of the four, the registers are used up. So even if
# much shared memory is free, a second program does not fit.

# %% tags=["hide-input"]
show("room")

# %% [markdown]
# ## When is the next row block fetched?
#
# The tile scheduler comes from rung 21. A program fetches the number of its next row block by an atomic addition in
# L2, and it does so as late as possible. The answer may therefore not be there when it is needed. So a program could
# instead fetch the next number early, at the *start* of a row block, and then never wait for it.
#
# **Predict.** A single causal head of 32,768 rows is cut into 256 blocks of 128 rows, for 132 programs, with the heavy
# blocks first. What happens if all programs fetch early?
#
# - ☐ it is a little faster, because no program waits for a number
# - ☐ nothing changes, because the same blocks are fetched in the same order
# - ☐ it takes about 1.5 times as long
#
# <details><summary>Answer</summary>
#
# **it takes about 1.5 times as long.** Program p begins with block p, and all programs fetch their second block at
# once, at the very start. So each program has a fixed share, as if the blocks had been dealt out beforehand. Block b,
# counted from the heaviest, has 256 − b tiles. Program 0 gets blocks 0 and 132, which have 256 + 124 = 380 tiles,
# whereas the mean is 249. The model below shows this for one head, and the H200's record agrees. With many heads, a
# program takes many blocks, so a single block that was fetched early matters little.
#
# ```python
# long = Tiling(32768, 32768, 128, 128, CAUSAL)
# one_head = [len(long.visited_cols(i)) for i in reversed(range(long.T_r))]
# blocks = [grid.BlockWork(0, n, cost) for n, cost in enumerate(one_head)]
# for name, ran in (("early", grid.dealt(one_head, 132)), ("late", grid.schedule(blocks, 132))):
#     print(f"fetched {name}: {ran.makespan / (sum(one_head) / 132):.2f} of an even share")
# for heads in (", one head", ""):
#     idea = "forward", f"the next ticket drawn late{heads}"
#     worth = [x["worth"] for x in ideas.worths() if (x["part"], x["idea"]) == idea]
#     print(f"measured{heads or ', many'}: late {min(worth):.2f} to {max(worth):.2f} times as fast")
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
# So the kernel fetches late, after the producer has started all copies of a row block but the last. At that moment the
# rings are full, so the consumers have work until the number is there.

# %% [markdown]
# The number then goes through the mailbox, which has two slots. In the picture, both slots are empty most of the
# time. The number of a row block stays in its slot from the moment at which the producer begins to copy this row
# block until both consumers have ended the row block before.

# %% tags=["hide-input"]
show("mailbox")

# %% [markdown]
# ## Part 2 · Who copies (17 minutes)
#
# ## The roles
#
# `forward_kernel` first allocates buffers and barriers, and then it hands out the roles.

# %% tags=["nbval-ignore-output"]
KERNEL = "hopper/forward/kernel.py"
read(KERNEL, "forward_kernel", begin="q = new_ring", end="pipes = ForwardPipes")

# %% [markdown]
# `new_ring` makes the ring of chapter 12a, and `ForwardPipes` gives all shared memory one name. `ForwardPipes` is an
# *aggregate*, which is Gluon's class with typed fields.
#
# Some names are only for special calls. `NEXT_PACKED` and `cu_seqlens_q`, for example, are for packed sequences
# ([chapter 16](16_masks.ipynb)), and `left` is for a window. With *key lengths*, each sequence of a batch has its own
# number of real keys.
#
# The roles start as on the rungs. Consumer 0 runs on the launch's own warps, the other consumers follow with 160 or
# 240 registers per thread, and the producer has 24. If registers run short, `low_reg_schedule`, one of the sizes,
# asks the compiler for another order of instructions.
#
# The next table shows what this shared memory is used for. It is computed from the sizes with which a causal call
# with d = 128 and N = 4,096 is launched:

# %% tags=["hide-input"]
size = sizes.choose(128, 4096, 4096, heads=64, SMs=132, causal=True, lengths=False)
tile, C = 2 * size.d_pad, size.consumers  # bytes of a row
Q, O = C * (1 + size.O_apart), C * size.O_apart  # tiles of 64 rows
parts = [("Q", f"{Q} × 64 rows", Q * 64 * tile, f"{Q} full, {Q} empty")]
parts += [("K", f"{size.stages} × {size.B_c} keys", size.stages * size.B_c * tile, f"{size.stages} full, {size.stages} empty")]
parts += [("V", f"{size.stages} × {size.B_c} keys", size.stages * size.B_c * tile, f"{size.stages} full")]
parts += [("O", f"{O} × 64 rows" if O else "in Q's buffer", O * 64 * tile, "none")]
parts += [("mailbox", "2 × 4 numbers", 2 * 4 * 4, "2 full, 2 empty")]
parts += [("ping-pong", "none" if not size.ping_pong else "no tile", 0, f"{C}" if size.ping_pong else "0")]
lines = ["| what | tiles | bytes | barriers |", "| --- | --- | ---: | --- |"]
lines += [f"| {name} | {tiles} | {nbytes:,} | {bars} |" for name, tiles, nbytes, bars in parts]
lines += [f"| total | {C} consumers | {sum(x[2] for x in parts):,} | a thread block may have {227 * 1024:,} bytes |"]
display(Markdown("\n".join(lines)))

# %% [markdown]
# Each barrier takes 8 bytes more. `fa2-lab xray hopper.forward` prints, in its column *shared*, what the compiler
# really allocated.
#
# ## Why does V need no releases?
#
# Consumers never release a stage of V, because each release of K also covers a tile of V. In step n, a consumer starts
# S of tile n and P V of tile n − 1, and it waits for P V last. Then it has finished with K's tile n *and* with V's tile
# n − 1, and a single arrival, at K's barrier, announces both.
#
# This works because the producer copies V's tile n − 1 right after K's tile n:
#
# | the producer copies | into the stage of | which was released with | has the producer waited for that release? |
# | --- | --- | --- | --- |
# | K's tile n | K's tile n − stages | itself | yes, for this copy |
# | V's tile n − 1 | V's tile n − 1 − stages | K's tile n − stages | yes, one line earlier |
#
# So when V's tile is due, its stage is already known to be free.
#
# Let us try this on the model from chapter 12a. `RingModel(2, 2)` has two stages and two consumers. `room` waits for
# an empty stage and `copy` fills it, while `take` and `release` are the ones from 12a. Consumers release K only, and
# the producer waits before it copies the tiles of V listed in `careful`, counted within their row block.

# %%
def copies(K, V, T, blocks, careful):  # the producer, for `blocks` row blocks of T tiles each
    def copy_v(m):
        if m % T in careful:
            yield K.room(m + 1)
        yield from V.copy(m)

    for n in range(T * blocks):
        yield K.room(n)
        yield from K.copy(n)
        if n % T > 0:
            yield from copy_v(n - 1)
        if n % T == T - 1:
            yield from copy_v(n)


def tiles_of(K, V, T, blocks, seen):  # a consumer
    def multiply(n):
        yield from V.take(n)
        yield PAUSE
        seen.append(V.tiles[n % V.stages])

    for n in range(T * blocks):
        yield from K.take(n)
        if n % T > 0:
            yield from multiply(n - 1)
        K.release(n)  # and V's tile n − 1
        if n % T == T - 1:
            yield from multiply(n)


def wrong(careful, orders=500):
    failed = 0
    for seed in range(orders):
        K, V, seen = RingModel(2, 2), RingModel(2, 2), ([], [])
        consumers = {c: tiles_of(K, V, 4, 2, seen[c]) for c in range(2)}
        run({"producer": copies(K, V, 4, 2, careful)} | consumers, seed)
        failed += any(tiles != list(range(8)) for tiles in seen)
    return failed

# %% [markdown]
# **Predict.** The producer copies two row blocks of four tiles each. Before which of V's copies must it wait?
#
# - ☐ before each one, because V's stages are never released
# - ☐ before the last one of a row block
# - ☐ before the first one of a row block
#
# <details><summary>Answer</summary>
#
# **before the last one of a row block.** Every other copy of V comes right after a copy of K, which has already
# waited. The last one has no copy of K before it. Its stage is freed by the release that K's *next* copy will wait
# for, and that copy belongs to the next row block. So the producer asks for that stage of K a little early, which is
# no loss, because it would have to wait for it anyway.
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
# ## What does the producer do?

# %% tags=["nbval-ignore-output"]
read(KERNEL, "producer", begin="while scheduler", end="r += 1")

# %% [markdown]
# For each row block, the producer first sends a message of five numbers to the consumers, of which only packed
# sequences need the two lengths. Then it copies the rightmost tile of K and after it Q. The remaining tiles follow from
# right to left, with K one tile ahead of V. So the tiles on the diagonal, which need the mask, come first. `sequence`
# holds the lengths of a packed sequence, and without packing it is `geometry` itself.
#
# `geometry` knows which rows see which keys. `tiles` returns one past the last tile that these rows see, but at least
# 1, so that O is written. `first_tile` returns the first tile, which is tile 0 without a window. `wait_for_room(n)`
# is the wait of the question above. At that line, n has already been raised by T_c, so it names the first tile of the
# next row block, and the wait is for the stage of K that this tile will use.

# %% [markdown]
# ## Part 3 · What a consumer does with a row block (16 minutes)
#
# ## How do producer and consumers agree on a stage?
#
# Both compute the stage and the phase from one number, n, as `n % stages` and `n // stages & 1`. That works because
# the producer and the consumers count the same tiles, and it can be computed ahead for any tile. The mailbox is like
# the one of rung 21, but it has two slots. So for the mailbox, `n & 1` is the slot, and `n >> 1 & 1` is the phase.

# %% [markdown]
# The next picture shows four stages over time. Both consumers read a tile, so its stage is free only when the later one
# has released it.

# %% tags=["hide-input"]
show("stages")

# %% [markdown]
# ## What does a consumer do with a row block?

# %% tags=["nbval-ignore-output"]
read(KERNEL, "consumer", begin="# Two intervals", end="q = pipes")

# %% [markdown]
# The producer copied the tiles that *any* of the consumers needs, from `begin` up to `last`. The 64 rows of this
# consumer need the tiles from `first` up to `end`. Tiles run from right to left:
#
# ```text
# begin            first                    end             last
#   |  drain: window |   visit: these rows    |  drain: causal |
#                                        ◄── this way
# ```

# %% tags=["nbval-ignore-output"]
read(KERNEL, "consumer", begin="for j in range(last - end)", end="n += last", off="geometry.cu_seqlens_q")

# %% [markdown]
# The listing leaves out the lines for packed sequences. If the consumer's rows are all past the last row of the
# sequence, `end` is `first`, and the consumer drains all tiles without using any. If O has its own buffer, `visit`
# releases Q after the last S. Otherwise, and also if there was no `visit`, Q is released here, once the copy of O has
# ended.

# %% tags=["nbval-ignore-output"]
read(KERNEL, "drain_tile")

# %% [markdown]
# **Predict.** `drain_tile` neither uses V's tile nor releases it. Why does it still call `pipes.v.take(n)`?
#
# - ☐ because `take` counts, so this consumer would otherwise fall one tile behind
# - ☐ because K would otherwise be released before V's copy is complete
# - ☐ because a barrier remembers only one bit, so a consumer must not miss a phase
#
# <details><summary>Answer</summary>
#
# **because a barrier remembers only one bit, so a consumer must not miss a phase.** The next tile of V in this stage is
# tile n + stages. Suppose that a consumer skips tile n without waiting for it, and then waits for tile n + stages while
# the copy of tile n is still under way. The last phase that ended belongs to tile n − stages. It has the same bit as
# the phase that the consumer waits for, so the wait ends too early.
#
# In most places, this cannot happen. Before the consumer gets that far, it has taken K's tile n + stages + 1, which
# uses the stage of K's tile n + 1. So all consumers had released K's tile n + 1, and those that need V's tile n had
# used it by then, so it must have arrived. At the last tile of a row block, however, there is no such tile of K.
#
# The first answer is wrong because `take` counts nothing, since it is given n. The second is wrong because this tile of
# V is freed by K's *next* release, and a consumer that uses it makes that release only after its P V. The model above
# cannot show the mistake, since it makes one copy after another.
# </details>

# %% [markdown]
# ## One tile
#
# `step` is the body of the loop over tiles. It is the loop of rung 20, with the softmax of rung 22.

# %% tags=["nbval-ignore-output"]
read(KERNEL, "step", begin="s = start_scores")

# %% [markdown]
# | line | matmuls that have started and still run | waits for |
# | --- | --- | --- |
# | `start_scores` | S of tile n | K's tile, and this consumer's turn in ping-pong |
# | `warpgroup_mma(p, …)` | S of tile n, P V of tile n − 1 | V's tile |
# | `pass_on` | both; the next consumer may start its own | – |
# | `warpgroup_mma_wait(1)` | P V | S |
# | `softmax_step`, `rounded` | P V, for as long as `ptxas` lets it (see below) | – |
# | `warpgroup_mma_wait(0)` | none of this consumer | P V |
#
# In the source, the whole softmax is between the two waits, so it could run during P V. However, `ptxas`, NVIDIA's
# assembler, moves the second wait up. The machine code shows what still runs during P V, and we can read it without a
# GPU. A wait is `WARPGROUP.DEPBAR`, and the wait for S ends in `0x1`, because one matmul may still run. So the next
# cell counts the instructions between that line and the next wait, for each of the three consumers:

# %% tags=["nbval-ignore-output"]
for causal in (False, True):
    (made,) = xray("hopper.forward", d=64, causal=causal)
    for after in made.stages["sass"].split("gsb0, 0x1")[1:]:
        under = after.split("WARPGROUP.DEPBAR")[0]
        counts = {name: under.count(code) for name, code in (("maxima", "FMNMX"), ("exponentials", "MUFU.EX2"))}
        print("causal, " if causal else "no mask,", "during P V:", counts)

# %% [markdown]
# Each consumer has 64 scores per thread in a tile, so with α it computes more than 64 exponentials. Without a mask,
# its maxima and a few exponentials run during P V. Under the causal mask, practically nothing does, so the
# exponentials must hide under the matmuls of the *other* consumers. Ping-pong makes that possible. `fa2-lab xray
# hopper.forward --d 64 --sass` prints the machine code in which the cell has counted, and `--full` leaves out the
# mask.
#
# The function around this loop, `visit`, masks the first, rightmost tile if the last key is not at the tile's end,
# and after the loop it computes the last P V. So inside the loop, no tile can reach past the last key.
#
# ## Part 4 · Inside a tile, and when it hangs (22 minutes)
#
# ## Which consumer multiplies first?
#
# **Ping-pong**, which comes from FlashAttention-3, lets consumers take turns to start their matmuls. So one consumer
# multiplies while another computes exponentials, as in *Between* and *Both* in the timeline of chapter 12a. Ping-pong
# takes one barrier for each consumer:

# %% tags=["nbval-ignore-output"]
read("hopper/shared/pipeline.py", "PingPong.wait", "PingPong.pass_on")

# %% [markdown]
# The barrier of consumer 0 gets an arrival in advance, since otherwise no consumer could begin. A consumer that skips
# a tile must still pass the turn on, as `drain_tile` does. Ping-pong costs one wait per tile. At d = 64, where
# exponentials take as long as both matmuls, it made the kernel 0.99 to 1.07 times as fast. At d = 128, where
# exponentials take half as long, it made the kernel only 0.99 times as fast. Under the mask, however, ping-pong is
# also on at d = 128 if there are many more keys than rows, as the table of ideas in part 5 shows. The picture shows a
# model in which both consumers begin at once, so that turns matter most:

# %% tags=["hide-input"]
show("ping_pong")

# %% [markdown]
# ## The softmax step
#
# This is the softmax of rung 22, with one addition. `scale_log2` is $\tau \log_2 e$, and each row keeps its own copy
# of it in `scale`. Only rows with huge scores ever change their copy, because there the fp32 numbers are so far apart
# that p could otherwise leave the range of fp16, as the file explains. A row is shared by four lanes, so m, `scale`
# and ℓ are kept once for each of these lanes, in the shape (64, 4):

# %% tags=["nbval-ignore-output"]
read("hopper/forward/softmax.py", "softmax_step", "largest")

# %% [markdown]
# - `along` places what a lane holds once per row, such as m, beside each of the lane's scores, and no number moves.
# - `largest` compares pairs, then builds four short chains side by side, and then compares their ends. In one long
#   chain, each comparison would wait for the one before.
# - `update_row_max` lets m lag by 8, so it nearly always changes nothing, and then `alpha` is 1.
# - `p` takes one FMA and one exponential.

# %% [markdown]
# ## m in assembly
#
# In Gluon, an `if` is for all warps of a consumer together. Here, however, one warp should jump while another does not.
# This takes PTX, NVIDIA's portable assembly language. A lane has two rows. `$0` and `$1` are the m of these rows, `$2`
# and `$3` are their scale, `$4` and `$5` are their α, and `$10` and `$11` are the lane's largest score in each row.
# Here are the test, the vote and the jump:

# %% tags=["nbval-ignore-output"]
raised = "\n".join(lines_of("hopper/forward/softmax.py", "RAISED"))
show_code(raised[raised.index("mov.f32") : raised.index("DONE;") + 5], "text")

# %% [markdown]
# `some` is true if the lane's largest score of either row, times `scale`, is more than 8 above m. The vote,
# `vote.sync.any`, joins the answers of all lanes of the warp, which the mask −1 selects. If `some` is true in no
# lane, all lanes jump to the end, with α = 1. Otherwise, they continue with the lines below, in
# [softmax.py](../fa2_lab/kernels/hopper/forward/softmax.py). There, the four lanes of each row find its largest score
# by two exchanges, and then the new m, and α = 2^(old m − new m).

# %% [markdown]
# ## A mask as a test of bits
#
# The causal mask hides column `col` of a tile if col ≥ `seen`, and `seen` differs from row to row. Written plainly, a
# thread needs 32 column numbers for its comparisons, and they are different in each lane.
#
# **Predict.** Of each 8 columns, a lane holds 2, as the first picture of chapter 12a shows. Now take `col` apart, so
# that `col & 6` keeps its bits for 2 and 4, and `col & ~6` keeps all others. Which of the two is the same list in every
# lane?
#
# - ☐ `col & 6`
# - ☐ `col & ~6`
# - ☐ neither, because every lane has other columns
#
# <details><summary>Answer</summary>
#
# **`col & ~6`.** The second lane of a row has columns 2, 3, 10, 11, 18, … For all of them, `col & 6` is 2, so this part
# tells *which lane* it is. `col & ~6` is 0, 1, 8, 9, 16, …, and this list is the same in every lane.
# </details>

# %% tags=["nbval-ignore-output"]
read("hopper/forward/softmax.py", "mask")

# %% [markdown]
# If we write `seen` for `sees.end - first`, the first `where` tests `col - (col & 6) < seen - (col & 6)`. The left side
# is a constant for the compiler, and it replaces 32 column numbers in each lane. The right side is computed once per
# row.
#
# **Takeaway.** Sort the parts of a formula by the time at which they are known: when the kernel is compiled, once per
# row, or only for each score.

# %% [markdown]
# ## What does a hang look like, and how do you find it?
#
# If one release is missing, nothing crashes. The call returns, because launches are asynchronous. But the next line
# that waits for the GPU, for example `torch.cuda.synchronize()` or a `print` of the result, never comes back.
# `nvidia-smi` shows the GPU as 100% busy, since warps that wait at a barrier keep asking. Ctrl-C does not help
# either, so the process must be killed.
#
# The model of chapter 12a can show such a hang on a laptop. Below, one of three consumers leaves out one release, in
# a ring with two stages. When no actor can go on, the model prints what each of them waits for:

# %% tags=["hide-input"]
def leaves_one_out(ring, T, c, seen):
    for n in range(T):
        yield from ring.take(n)
        if (n, c) != (2, 1):
            ring.release(n)


print(try_out(leaves_one_out, seed=0)[0].replace("; ", "\n"))

# %% [markdown]
# **Predict.** Of which tile has a release been left out?
#
# - ☐ of tile 3
# - ☐ of tile 2
# - ☐ of tile 4
#
# <details><summary>Answer</summary>
#
# **of tile 2.** All consumers wait for tile 4, but only because the producer has not copied it. The producer waits
# for *room*. Tile 4 goes into stage 4 % 2 = 0, which held tile 2 before, so some consumer has taken tile 2 and has
# not released it. Which consumer it was does not follow from the waits, because a barrier counts arrivals and does
# not record who has arrived.
# </details>
#
# On a GPU, nothing prints the waits for you. These steps find them:
#
# 1. Make the case small. Take one head and one row block, and then one tile more than the ring has stages. A missing
#    release hangs only when a stage is used for the second time, so the number of tiles at which the hang begins
#    identifies the ring.
# 2. Attach `cuda-gdb -p` to the process. `info cuda warps` lists where each warp is, and `x/i $pc` prints its
#    instruction. A warp that waits is in a loop around `SYNCS.PHASECHK`. `fa2-lab xray FILE --sass` helps to find the
#    source line of that loop.
# 3. Find out which warp should have arrived at this barrier, and look for the path on which that warp goes around its
#    `release`. The cause is often a tile that is skipped, or a row block that is empty.
# 4. Count. The number of releases of each stage must be its number of fills times the number of consumers. This can
#    be checked without a GPU by running the roles one after another in Python, with counters in place of barriers.
#    The tests of this package run this kernel in that way, and they detect a release that is taken out.
#
# ## What about clusters and multicast?
#
# Hopper can launch thread blocks in *clusters*. The blocks of a cluster run on neighbouring SMs, and each may read the
# shared memory of the others. A copy with *multicast* brings one tile from L2 to several of them at once. If two row
# blocks of one head ran as a cluster, K and V would be read from L2 once instead of twice. However, this would cost one
# more wait, because a stage may be filled again only after the consumers of *both* blocks have released it. The two
# blocks would therefore run in step. This kernel uses neither clusters nor multicast. With its 192 rows per block, it
# already requests little of K and V from L2, and we have not measured what clusters would gain here.
#
# ## The last copy

# %% tags=["nbval-ignore-output"]
read(KERNEL, "store", begin="LANES")

# %% [markdown]
# These are lines 12 to 15 of Algorithm 1. Only here are the four lanes of ℓ added up. A row that sees no key is also
# found here, because its ℓ is 0. If 1 takes the place of this ℓ, O becomes 0, and L is set to −∞. The store of O
# follows the rules of chapter 12a. First, `store_wait` ensures that TMA has read the previous contents of the buffer,
# and then the store, the fence and the copy follow. If O has its own buffer, no warp has to wait for this copy now,
# because the next row block is already under way.
#
# One more fence is in `zero_oob_rows` ([pipeline.py](../fa2_lab/kernels/hopper/shared/pipeline.py)). With key lengths
# or a window, a tile of V holds rows that no query sees. Their p is 0, but 0 · ∞ is not a number, so these rows are
# set to zero. Threads store these zeros and the tensor cores read them, so a fence is needed in between.

# %% [markdown]
# ## Part 5 · What was reached (20 minutes)
#
# ## How fast is it?
#
# The following speeds were recorded on the H200, with N = 4,096, 16,384 tokens and hidden size 2,048, for all
# implementations in one run.

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
peak, gemm = chips.H200.tensor_flops / 1e12, paper.ceilings["GEMM TFLOP/s"]
print(f"best: {best:.0f} TFLOP/s, {best / peak:.0%} of the datasheet, {best / gemm:.0%} of a large matmul")

# %% [markdown]
# The kernel is ahead of cuDNN, and level with FlashAttention-3 or ahead of it. At best, it is nearly as fast as a plain
# matmul.
#
# ## What did each idea gain?
#
# We can measure an idea in two ways. As a rung, it is added to what was there before (chapter 12a, d = 128, no mask),
# and in the finished kernel, it is taken out. For the second way, we used copies of an earlier kernel under Triton
# 3.6, in several shapes:

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
    worth = [x["worth"] for x in ideas.worths() if (x["part"], x["idea"]) == ("forward", idea)]
    added = f"rung {rung}: {climb.factor(rung):.2f}" if rung else "–"
    print(f"{idea:48}{added:>12}   {min(worth):.2f} to {max(worth):.2f}")

# %% [markdown]
# What an idea saves depends on what else the program waits for. So the two results differ, and the gains of single
# ideas do not multiply to the gain of all. The last three ideas are from this chapter, and they gain little.
#
# Later ideas were tried on today's kernel, with Triton 3.9, each with a prediction. *Measured* shows how many times
# as fast the kernel became, on average and, in parentheses, from the worst problem to the best. In the column
# *without pauses*, calls follow each other, so the clock falls. *Kept* shows for how many of the problems we kept the
# idea. Bytes that *have none* have no register, so they spill.

# %% tags=["nbval-ignore-output", "hide-input"]
display(Markdown("\n".join(ideas.table("forward"))))

# %% [markdown]
# Most predictions were too hopeful, because saving an instruction or a barrier gains nothing if the program waits for
# something else. *In a CUDA graph* means that calls are recorded once and then replayed. New sizes gained if the old
# ones had been chosen for other shapes. The last comparison is between the kernel and the last rung:

# %% tags=["hide-input"]
over = {shape: climb.factor("fa2_lab", *shape, old=ladder.RUNGS[-1]) for shape in climb.shapes}
for (d, causal), ratio in over.items():
    print(f"d = {d:3}, {'causal' if causal else 'no mask':8}: {ratio:.2f} times the last rung's speed")

# %% [markdown]
# At d = 64, the kernel has ping-pong, which no rung has. At d = 128, it also takes the heads in another order. This
# record does not show which of the kernel's differences made it faster.

# %% [markdown]
# ## The same in 150 lines, and what you cannot express
#
# [TileLang](https://github.com/tile-ai/tilelang) compiles attention for Hopper from about 150 lines of Python. Its
# [example](https://github.com/tile-ai/tilelang/tree/main/examples/flash_attention) has the tiles, the softmax and one
# loop:
#
# | here | in that example |
# | --- | --- |
# | rings, phases, releases | follow from `T.Pipelined(…, num_stages=2)` |
# | producer warp, registers by role, layouts | chosen by the compiler |
# | S of one tile beside P V of the tile before | `order` and `stage`, two lists of six numbers |
# | lazy rescaling, by a vote of the warp | not there; it would take PTX, as here |
# | programs that stay and fetch row blocks | one program for each row block |
#
# Start there if your kernel is not attention. Come back here when you know which wait you want to get rid of.

# %% [markdown]
# ## Recap
#
# - If one wait implies another, the other can be left out. However, the last tile of a row block needs a second look.
# - A consumer must take even a tile that it does not multiply, because a barrier remembers only one bit.
# - What an idea gains belongs to the kernel in which it was measured.

# %% [markdown]
# ## Exercises
#
# **Build.** With key lengths, a consumer takes V's first tile before it releases K's first tile, because it has to set
# rows of V's tile to zero. From the next tile on, it behaves like `tiles_of`. With only one stage, the kernel's
# producer then hangs, since V₀ comes after K₁, and K₁ waits for the release of K₀. Write, on the model, a producer of
# one row block that needs only one stage. The check tries 1, 2 and 3 stages. `yield K.room(n)` waits for room, and
# n = T is allowed. `yield from K.copy(n)` and `yield from V.copy(n)` copy a tile. V is not released, so `V.room` would
# wait for ever.

# %%
def my_copies(K, V, T):  # T tiles
    ...


# %% tags=["hide-input"]
judge_copies(my_copies)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_copies(K, V, T):
#     for n in range(T):
#         yield K.room(n)
#         yield from K.copy(n)
#         if n > 0:
#             yield K.room(n + 1)
#         yield from V.copy(n)
# ```
# K does not run ahead here, so V₀ does not wait. With one stage, V's tile n takes the place of V's tile n − 1, which is
# released with K's tile n. That release is also the one that K's tile n + 1 would wait for.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
col, seen = np.arange(128)[None, :], np.arange(-3, 140)[:, None]
verdict("the test of bits gives the causal mask", (((col & ~6) < seen - (col & 6)) == (col < seen)).all())
found = {careful: wrong(careful, 200) for careful in ((), (3,))}
verdict("V without releases needs a wait before its last tile", found[3,] == 0 < found[()])
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
verdict("the kernel is ahead of cuDNN and the portable kernel, and level with FlashAttention-3 or ahead of it",
        all(min(ratios(peer)) > 0.97 for peer in ("FlashAttention-3", "cuDNN", "fa2_lab portable")))  # fmt: skip
turns = [x for x in ideas.worths() if x["idea"].startswith("turns on the tensor cores")]
gains = [[round(x["worth"], 2) for x in turns if x["d"] == d] for d in (64, 128)]
verdict("ping-pong made it 0.99 to 1.07 times as fast at d = 64, and 0.99 times at d = 128",
        [min(gains[0]), max(gains[0]), *{*gains[1]}] == [0.99, 1.07, 0.99])  # fmt: skip
verdict("the kernel is at least as fast as the last rung", all(0.98 < ratio < 1.15 for ratio in over.values()))
chosen = [sizes.choose(d, N, N, heads=2048 // d * 16384 // N, SMs=132, causal=causal, lengths=False)
          for d, N, causal in ((64, 1024, True), (128, 512, True), (128, 16384, False), (128, 16384, True))]  # fmt: skip
verdict("short causal rows take tiles of 64 keys, and long rows at d = 128 take blocks of 192 rows",
        [x.B_c for x in chosen[:2]] == [64, 64] and [x.consumers for x in chosen[2:]] == [3, 3])  # fmt: skip

# %% [markdown] tags=["navigation"]
# [← Hopper, machine and rungs](12a_hopper_rungs.ipynb) · [The map](00_start.ipynb) · [Hopper, backward →](13_hopper_backward.ipynb)
