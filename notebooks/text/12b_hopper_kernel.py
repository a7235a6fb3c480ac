# %% [markdown] tags=["navigation"]
# [← Hopper, machine and rungs](12a_hopper_rungs.ipynb) · [The map](00_start.ipynb) · [Hopper, backward →](13_hopper_backward.ipynb)

# %% [markdown]
# # 12b · Hopper, the kernel
#
# **How does the fast kernel work, line by line?**
#
# `fa2_lab/kernels/hopper/forward` is what `attention()` runs on an H100 or H200. It is made of the rungs of
# [chapter 12a](12a_hopper_rungs.ipynb). Beyond them it takes any lengths, groups of heads, windows and packed sequences.
# Here you read its heart: the producer, what a consumer does with a tile, and whom each wait is for.
#
# After this notebook you can
#
# - say for each barrier of the kernel who arrives, who waits and why,
# - say which waits can be left out because another one implies them,
# - say what the kernel reached, and why the price of an idea belongs to one kernel.
#
# *Time: 110 minutes, in five sittings. You need [12a](12a_hopper_rungs.ipynb). Hardware: any laptop with Linux; on a
# Hopper GPU the checks run the real kernel. Numbers were measured on an NVIDIA H200 in bf16.*

# %%
from itertools import product

import numpy as np
import torch
from IPython.display import Markdown, display

from fa2_lab.api.attention import attention
from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, grid
from fa2_lab.plots import ideas, pipes
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import heads as by_heads
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_lab.tools.xray import xray
from fa2_studio.book.hopper import Climb, lines_of, read, show_code
from fa2_studio.book.orders import judge_copies
from fa2_studio.book.ring import PAUSE, RingModel, run
from fa2_studio.book.verdicts import close, verdict

# %% tags=["nbval-ignore-output"]
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
_ = attention(*torch.zeros(3, 1, 1, 64, 16, device=device))  # it says how it runs here

# %% [markdown]
# ## Sitting 1 · Barriers, sizes and the scheduler (22 minutes)
#
# ## The whole protocol in one picture
#
# One program fills an SM: a producer warp, and one to three consumer warpgroups of 64 rows each.

# %%
show(pipes.draw(**pipes.data(["forward"])))

# %% [markdown]
# This is the set `SHORT` of the table below: two consumers, three stages. Along a solid arrow, a copy fills a stage and a
# consumer takes it. Along a dashed arrow, consumers release a stage, and the producer waits for that. V has no dashed arrow,
# and you will see why.
#
# CUTLASS, NVIDIA's library of kernels, uses other words for the same things. Its barriers are *full* and *empty*, and its
# calls are
#
# | here | CUTLASS | who calls it |
# | --- | --- | --- |
# | `wait_for_room`, inside `fill` | `producer_acquire` | the producer, before a copy |
# | `expect`, inside `fill` | the second half of `producer_acquire` | the producer; the copy engine then arrives by itself |
# | `take` | `consumer_wait` | a consumer, before it reads a tile |
# | `release` | `consumer_release` | a consumer, after it has read a tile |
#
# (ThunderKittens, another library, calls the roles *load*, *compute* and *store*. Here these are `producer`, `consumer` and
# the function `store`.) The barriers of this kernel are
#
# | barriers | how many | who arrives | who waits | what it says |
# | --- | --- | --- | --- | --- |
# | Q *filled*, *emptied* | one a stage | the producer's copies; its consumer | its consumer; producer | 64 rows of Q are there; may be overwritten |
# | K *filled*, *emptied* | one a stage | the producer's copies; all consumers | all consumers; producer | a tile of K is there; K's tile and V's tile before it may be overwritten |
# | V *filled* | one a stage | the producer's copies | all consumers | a tile of V is there |
# | mailbox *filled*, *emptied* | two | producer; all consumers | all consumers; producer | which row block is next; everybody has read it |
# | ping-pong | one a consumer | the consumer before it | this consumer | you may start your products |

# %% [markdown]
# ## What is launched?
#
# One program for each SM, or fewer if there are fewer row blocks. A program stays and draws its work. The host prepares,
# once for each kind of call, what [`launch.py`](../fa2_lab/kernels/hopper/forward/launch.py) then launches: a descriptor
# for each tensor, and $\tau \log_2 e$, so that exp becomes a power of 2. Without a mask heads run one after the other, so
# that all programs read the same K and V from L2; under it as many side by side as L2 holds.
#
# `sizes.choose` picks one of a few sets of sizes, by rules that were fitted to times on an H200:

# %% tags=["nbval-ignore-output", "hide-input"]
from fa2_lab.kernels.hopper.forward import sizes

SETS = {
    "USUAL": "if nothing speaks for another",
    "ALONE": "few row blocks: of 64 rows, so that more SMs are busy",
    "HALF": "short rows: under the causal mask the diagonal cuts most tiles",
    "SHORT": "blocks of 192 rows fit badly",
    "WIDE": "long rows: K and V are read once for 192",
}
lines = ["| d | set | where | consumers | keys of a tile | stages | ping-pong | O lies apart |", "| --- " * 8 + "|"]
for d, (name, where) in product((64, 128), SETS.items()):
    found = getattr(sizes, name)
    one = found[d] if isinstance(found, dict) else found
    if one.d_pad == d:
        words = ["yes" if x else "no" for x in (one.ping_pong, one.O_apart)]
        cells = d, f"`{name}`", where, one.consumers, one.B_c, one.stages, *words
        lines.append(f"| {' | '.join(map(str, cells))} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# In *ping-pong* consumers start their products in turn (sitting 4). Where O does not lie apart, it waits for its copy in Q's
# place, as on the last rung. Calls with dropout, softcaps or sinks take the portable kernel. So do windows if sequences are
# packed, or if d is above 128.
#
# ## When is the next row block drawn?
#
# The tile scheduler is rung 21's: a number is drawn by an atomic addition in L2, as late as possible, and the answer may not
# be there when it is needed. So one could draw the next one early, at the *start* of a row block, and never wait for it.
#
# **Predict.** A single causal head of 32,768 rows is cut into 256 blocks of 128, for 132 programs, the heavy ones first. What
# happens if everybody draws early?
#
# - ☐ it is a little faster, because nobody waits for a number
# - ☐ nothing changes: the same blocks are drawn in the same order
# - ☐ it takes about 1.5 times as long
#
# <details><summary>Answer</summary>
#
# **it takes about 1.5 times as long.** Program p begins with block p, and all draw their second block at once, at the
# very start. So it is a fixed share, as if dealt out beforehand: program 0 gets 256 + 124 = 380 tiles, where the mean is
# 249. That is the model below, for one head. The H200's record agrees. With many heads a program takes many blocks,
# and one that was drawn early matters little.
#
# ```python
# long = Tiling(32768, 32768, 128, 128, CAUSAL)
# one_head = [len(long.visited_cols(i)) for i in reversed(range(long.T_r))]
# blocks = [grid.BlockWork(0, n, cost) for n, cost in enumerate(one_head)]
# for name, ran in (("early", grid.dealt(one_head, 132)), ("late", grid.schedule(blocks, 132))):
#     print(f"drawn {name}: {ran.makespan / (sum(one_head) / 132):.2f} of an even share")
# for heads in (", one head", ""):
#     idea = "forward", f"the next ticket drawn late{heads}"
#     worth = [x["worth"] for x in ideas.worths() if (x["part"], x["idea"]) == idea]
#     print(f"measured{heads or ', many'}: late {min(worth):.2f} to {max(worth):.2f} times as fast")
# ```
#
# ```text
# drawn early: 1.52 of an even share
# drawn late: 1.03 of an even share
# measured, one head: late 1.35 to 1.43 times as fast
# measured, many: late 1.00 to 1.02 times as fast
# ```
# </details>

# %% [markdown]
# So the kernel draws late, after the producer has started all copies of a row block but the last. The rings are full
# then. The consumers have work until the number is there.
#
# ## Sitting 2 · Who copies (24 minutes)
#
# ## The roles
#
# `forward_kernel` makes room and barriers, then hands out the roles.

# %% tags=["nbval-ignore-output"]
KERNEL = "hopper/forward/kernel.py"
read(KERNEL, "forward_kernel", begin="q = new_ring", end="pipes = ForwardPipes")

# %% [markdown]
# This is what the room is used for, computed from the sizes that a causal call with d = 128 and N = 4,096 is launched with:

# %% tags=["hide-input"]
size = sizes.choose(128, 4096, 4096, heads=64, SMs=132, causal=True, lengths=False)
tile, C = 2 * size.d_pad, size.consumers  # bytes of a row
Q, O = C * (1 + size.O_apart), C * size.O_apart  # tiles of 64 rows
parts = [("Q", f"{Q} × 64 rows", Q * 64 * tile, f"{Q} full, {Q} empty")]
parts += [("K", f"{size.stages} × {size.B_c} keys", size.stages * size.B_c * tile, f"{size.stages} full, {size.stages} empty")]
parts += [("V", f"{size.stages} × {size.B_c} keys", size.stages * size.B_c * tile, f"{size.stages} full")]
parts += [("O", f"{O} × 64 rows" if O else "in Q's room", O * 64 * tile, "none")]
parts += [("mailbox", "2 × 4 numbers", 2 * 4 * 4, "2 full, 2 empty")]
parts += [("ping-pong", "none" if not size.ping_pong else "no tile", 0, f"{C}" if size.ping_pong else "0")]
lines = ["| what | tiles | bytes | barriers |", "| --- | --- | ---: | --- |"]
lines += [f"| {name} | {tiles} | {nbytes:,} | {bars} |" for name, tiles, nbytes, bars in parts]
lines += [f"| all of it | {C} consumers | {sum(x[2] for x in parts):,} | {227 * 1024:,} bytes is what a thread block may have |"]
display(Markdown("\n".join(lines)))

# %% [markdown]
# Each barrier takes 8 bytes more. `fa2-lab xray hopper.forward` prints what the compiler really allocated, in its column
# *shared*.
#
# `new_ring` is chapter 12a's ring, and `ForwardPipes` gives all shared memory one name. (It is an *aggregate*, Gluon's class
# with typed fields.) Where registers do not suffice, `thrifty` asks the compiler for another order. Names for special calls:
# `NEXT_PACKED` and `cu_q` for packed sequences ([chapter 16](16_masks.ipynb)), `left` for a window, and with *key lengths*
# each text of a batch has its own number of real keys. The roles start as on the rungs: consumer 0 on the launch's own warps,
# then the others, with 160 or 240 registers a thread, and the producer with 24.
#
# ## Why does V have no releases?
#
# In step n a consumer starts S of tile n and P V of tile n − 1, and waits for P V last. Then it is done with K's tile n
# *and* V's tile n − 1. So one arrival, at K's barrier, stands for both:
#
# | what the producer copies | goes to the stage of | which was released with | has the producer waited for that? |
# | --- | --- | --- | --- |
# | K's tile n | K's tile n − stages | itself | yes, for this copy |
# | V's tile n − 1 | V's tile n − 1 − stages | K's tile n − stages | yes, one line earlier |
#
# Here is that protocol on 12a's model. `RingModel(2, 2)` has two stages and two consumers. `room` waits for an empty stage,
# `copy` fills it, and `take` and `release` are 12a's. Consumers release K only. The producer waits before those tiles of V
# that `careful` names, counted in their row block.

# %%
def copies(K, V, T, blocks, careful):  # the producer: so many row blocks of T tiles
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
# **Predict.** Two row blocks of four tiles. Before which of V's copies must the producer wait?
#
# - ☐ before each: nobody releases V's stages
# - ☐ before the last of a row block
# - ☐ before the first of a row block
#
# <details><summary>Answer</summary>
#
# **before the last of a row block.** There the copy of V has no copy of K before it. What it needs is what K's *next* copy
# would wait for, the first of the next row block. So the producer asks for that stage a little early. It has to wait for it
# anyway.
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
# For each row block: a message of five numbers to the consumers (only packed sequences need the two lengths), the
# rightmost tile of K, Q, then K one tile ahead of V, from right to left. The tiles on the diagonal, which need the mask,
# come first. `here` holds the lengths of a packed sequence; without packing it is `geometry` itself.
#
# `geometry` says who sees whom. `tiles`: one past the last tile that these rows see, at least 1, so that O is written.
# `first_tile`: the first one, 0 without a window. `wait_for_room(n)` is the card's wait: n was already raised by T_c, so it
# names the next row block's first tile.

# %% [markdown]
# ## Sitting 3 · What a consumer does with a row block (22 minutes)
#
# ## How do producer and consumers agree on a stage?
#
# Stage and phase come from one number, n: `n % stages` and `n // stages & 1`. That works because producer and consumers
# count the same tiles, and it can be computed for any tile ahead. The mailbox is rung 21's with two places, so there
# `n & 1` is the place and `n >> 1 & 1` the phase.
#
# ## What does it do with a row block?

# %% tags=["nbval-ignore-output"]
read(KERNEL, "consumer", begin="# Two intervals", end="q = pipes")

# %% [markdown]
# The producer copied the tiles that *any* of the consumers needs, from `begin` up to `last`. These 64 rows need those from
# `first` up to `end`. Tiles run from right to left:
#
# ```text
# begin            first                    end             last
#   |  skip: window  |   visit: these rows    |  skip: causal  |
#                                        ◄── this way
# ```

# %% tags=["nbval-ignore-output"]
read(KERNEL, "consumer", begin="for j in range(last - end)", end="n += last", off="geometry.cu_q")

# %% [markdown]
# (Lines for packed sequences are left out.) If these rows lie past the last row of the sequence, `end` is `first`, and all
# tiles are skipped. If O lies apart, `visit` releases Q, after the last S. Otherwise, and where there was no `visit`, Q is
# released here, once O's copy has ended.

# %% tags=["nbval-ignore-output"]
read(KERNEL, "skip")

# %% [markdown]
# **Predict.** `skip` does not multiply with V's tile and does not release it. Why does it call `pipes.v.take(n)`?
#
# - ☐ because `take` counts: this consumer would otherwise be one tile behind
# - ☐ because K's release would otherwise come before V's copy is complete
# - ☐ because a barrier remembers one bit, so no phase may go by unseen
#
# <details><summary>Answer</summary>
#
# **because a barrier remembers one bit, so no phase may go by unseen.** The next tile in this stage is V's n + stages. Say V's
# tile n is still under way when this consumer waits for that one: the barrier shows the bit of tile n − stages, the same, and
# the wait ends too early. Mostly this cannot be, for the consumer has taken K's tile n + stages + 1 before. It lies where K's
# n + 1 lay, which all had released, and so had multiplied with V's n. But at a row block's last tile there is no such K. (Not
# the first: n is handed to `take`, which counts nothing. Not the second: K's *next* release frees this tile of V, and who
# multiplies with it gives that release only after its P V.) The model above makes one copy after the other, so it does not
# show this.
# </details>

# %% [markdown]
# ## One tile
#
# `step` is the body of the loop over tiles. It is rung 20, with the softmax of rung 22.

# %% tags=["nbval-ignore-output"]
read(KERNEL, "step", begin="s = start_scores")

# %% [markdown]
# | line | started and running | waits for |
# | --- | --- | --- |
# | `start_scores` | S of tile n | K's tile, and its turn in ping-pong |
# | `warpgroup_mma(p, …)` | S of tile n, P V of tile n − 1 | V's tile |
# | `pass_on` | both; the next consumer may start its own | – |
# | `warpgroup_mma_wait(1)` | P V | S |
# | `softmax_step`, `rounded` | P V, for as long as `ptxas` lets it: see below | – |
# | `warpgroup_mma_wait(0)` | nothing of this consumer | P V |
#
# In the source all of the softmax stands between the two waits, so it could run under P V. `ptxas`, NVIDIA's assembler, moves
# the second wait up, though. What is left under P V can be read in the machine code, without a GPU. A wait is
# `WARPGROUP.DEPBAR`, and the wait for S ends in `0x1`, because one product may still run. So this cell counts what lies
# between that line and the next wait, for each of the three consumers:

# %% tags=["nbval-ignore-output"]
for causal in (False, True):
    (made,) = xray("hopper.forward", d=64, causal=causal)
    for after in made.stages["sass"].split("gsb0, 0x1")[1:]:
        under = after.split("WARPGROUP.DEPBAR")[0]
        counts = {name: under.count(code) for name, code in (("maxima", "FMNMX"), ("exponentials", "MUFU.EX2"))}
        print("causal" if causal else "full  ", "under P V:", counts)

# %% [markdown]
# Each consumer has 64 scores per thread in a tile, so with α it computes more than 64 exponentials. Without a mask its maxima
# and a few exponentials run under P V. Under the causal mask, nothing does. There the exponentials must hide under the
# products of the *other* consumers, and ping-pong sees to that. `fa2-lab xray hopper.forward --d 64 --sass` prints the text
# that the cell has counted in, and `--full` leaves out the mask.
#
# `visit` stands around it. It masks the first, rightmost tile if the end is ragged, and after the loop multiplies the
# last P V. So inside the loop no tile can reach past the last key.
#
# ## Sitting 4 · Inside a tile, and when it hangs (24 minutes)
#
# ## Who multiplies first?
#
# **Ping-pong** (FlashAttention-3) lets consumers start their products in turn: one multiplies while another exponentiates.
# That is the order of *Between* and *Both* in 12a's timeline. It takes one barrier for each consumer:

# %% tags=["nbval-ignore-output"]
read("hopper/shared/pipeline.py", "PingPong.wait", "PingPong.pass_on")

# %% [markdown]
# Consumer 0's barrier gets an arrival in advance, or nobody could begin. Whoever skips a tile must still pass on, as
# `skip` does. Ping-pong costs a wait for each tile. At d = 64, where exponentials take as long as both products, the kernel
# became 0.99 to 1.07 times as fast by it; at d = 128, where they take half as long, 0.99 times. (With many more keys than rows
# it is on there, too, under the mask: see the table of ideas.)
#
# ## The softmax step
#
# It is rung 22's softmax, with one addition. `factor` is $\tau \log_2 e$, and each row keeps its own copy of it in `scale`. Only
# rows of huge scores ever change theirs, because there fp32 numbers are so far apart that p could leave fp16 otherwise. The
# file explains this case. A row lies in four lanes, and m, `scale` and ℓ are kept once for each of them, as (64, 4):

# %% tags=["nbval-ignore-output"]
read("hopper/forward/softmax.py", "softmax_step", "largest")

# %% [markdown]
# - `along` lays what a lane holds once for a row, such as m, beside each of its scores. Nothing moves.
# - `largest` compares pairs, then four short chains side by side, then their ends. In one long chain each comparison
#   would wait for the one before.
# - `raised` lets m lag by 8. Nearly always it changes nothing, and `alpha` is 1.
# - `p` is one multiply-add and one exponential.

# %% [markdown]
# ## m in assembly
#
# Gluon's `if` is for all warps of a consumer together. Here one warp should jump while another does not. That takes PTX,
# NVIDIA's portable assembly language. A lane has two rows. `$0` and `$1` are their m, `$2` and `$3` their scale, `$4` and
# `$5` their α, `$10` and `$11` the lane's largest score of each. Here are the test, the vote and the jump:

# %% tags=["nbval-ignore-output"]
raised = "\n".join(lines_of("hopper/forward/softmax.py", "RAISED"))
show_code(raised[raised.index("mov.f32") : raised.index("DONE;") + 5], "text")

# %% [markdown]
# `some` is true if the lane's largest score of either row, times `scale`, lies more than 8 above m. If it is so in no lane
# of the warp (`vote.sync.any`), all jump to the end, with α = 1. Otherwise the lines below, in
# [softmax.py](../fa2_lab/kernels/hopper/forward/softmax.py), find each row's largest score by two exchanges among its four
# lanes, then the new m, and α = 2^(old m − new m).

# %% [markdown]
# ## A mask as a test of bits
#
# The causal mask hides column `col` of a tile if col ≥ `seen`, where `seen` differs from row to row. Written plainly, a
# thread needs 32 column numbers for its comparisons, other ones in each lane.
#
# **Predict.** Of each 8 columns a lane holds 2 (12a's first picture). Take `col` apart: `col & 6` keeps its bits for 2
# and 4, `col & ~6` all others. Which of the two is the same list in every lane?
#
# - ☐ `col & 6`
# - ☐ `col & ~6`
# - ☐ neither, because every lane has other columns
#
# <details><summary>Answer</summary>
#
# **`col & ~6`.** The second lane of a row has columns 2, 3, 10, 11, 18, … For all of them `col & 6` is 2: it says *which
# lane* this is. `col & ~6` is 0, 1, 8, 9, 16, …, as in every lane.
# </details>

# %% tags=["nbval-ignore-output"]
read("hopper/forward/softmax.py", "mask")

# %% [markdown]
# With `seen` for `sees.end - first`, the first `where` says `col - (col & 6) < seen - (col & 6)`. The left side is a constant
# for the compiler, in place of 32 column numbers in each lane. The right side is computed once for a row.
#
# **Takeaway.** Sort a formula by what is known when: to the compiler, once a row, or only for each score.

# %% [markdown]
# ## What does a hang look like, and how do you find it?
#
# If one release is missing, nothing crashes. The call returns, because launches are asynchronous. The next line that waits
# for the GPU, for example `torch.cuda.synchronize()` or a `print` of the result, never comes back. `nvidia-smi` shows the GPU
# as 100% busy, since warps that wait at a barrier keep asking. Ctrl-C does not help either, so the process must be killed.
#
# These steps find the wait:
#
# 1. Make the case small: one head, one row block, then one tile more than the ring has stages. A missing release hangs only
#    when a stage is used for the second time, so the number of tiles at which the hang begins names the ring.
# 2. Attach `cuda-gdb -p` to the process. `info cuda warps` lists where each warp is, and `x/i $pc` its instruction. A warp that
#    waits stands in a loop around `SYNCS.PHASECHK`. `fa2-lab xray FILE --sass` helps to find the source line of that loop.
# 3. Ask of this barrier who should have arrived, and look for the path on which that warp goes around its `release`. It is
#    often a tile that is skipped, or a row block that is empty.
# 4. Count. Each stage must have as many releases as fills, times the number of consumers. This can be checked without a GPU
#    by running the roles one after the other in Python with counters in place of barriers. The tests of this package run
#    this kernel so, and find a release that is taken out.
#
# ## What about clusters and multicast?
#
# Hopper can launch thread blocks in *clusters*. The blocks of a cluster run on neighbouring SMs, and each may read the shared
# memory of the others. A copy with *multicast* brings one tile from L2 to several of them at once. If two row blocks of one
# head ran as a cluster, K and V would cross from L2 once instead of twice. The price is one more wait, because a stage may be
# filled again only after the consumers of *both* blocks have released it, so the two blocks run in step. This kernel uses
# neither. Its 192 rows per block already make K and V scarce in L2, and what clusters would gain here was not measured.
#
# ## The last copy

# %% tags=["nbval-ignore-output"]
read(KERNEL, "store", begin="LANES")

# %% [markdown]
# These are lines 12 to 15 of Algorithm 1. ℓ's four lanes are added at last. A row that sees no key is found here, by
# ℓ = 0: with 1 in ℓ's place O becomes 0, and L is set to −∞. Around O stand 12a's rules: `store_wait` (the engine has read
# what lay here), store, fence, copy. Where O lies apart nobody waits for this copy now: the next row block is under way.
#
# One more fence is in `wipe` ([pipeline.py](../fa2_lab/kernels/hopper/shared/pipeline.py)). With key lengths or a window
# a tile of V holds rows that nobody sees. Their p is 0, but 0 · ∞ is not a number, so they are set to zero: threads store,
# and the tensor cores read.

# %% [markdown]
# ## Sitting 5 · What was reached (18 minutes)
#
# ## How fast is it?
#
# Recorded on the H200: N = 4,096, 16,384 tokens, hidden size 2,048, all contestants in one run.

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
    print(f"{peer:17} {mean:.2f} in the mean, from {min(found):.2f} to {max(found):.2f}")
best = max(row.rate("fa2_lab") for row in rows)
peak, gemm = chips.H200.tensor_flops / 1e12, paper.ceilings["GEMM TFLOP/s"]
print(f"best: {best:.0f} TFLOP/s, {best / peak:.0%} of the datasheet, {best / gemm:.0%} of a large matrix product")

# %% [markdown]
# Ahead of cuDNN, level with FlashAttention-3 or ahead of it, and at best near the speed of a plain matrix product.
#
# ## What did each idea buy?
#
# An idea has two worths. As a rung it is added to what was there (12a; d = 128, no mask). In a copy of a finished kernel, an
# earlier one under Triton 3.6, it is taken out, in several shapes:

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
print("speed with it over speed without it               as a rung   in the kernel")
for idea, rung in IDEAS.items():
    worth = [x["worth"] for x in ideas.worths() if (x["part"], x["idea"]) == ("forward", idea)]
    added = f"rung {rung}: {climb.factor(rung):.2f}" if rung else "–"
    print(f"{idea:48}{added:>12}   {min(worth):.2f} to {max(worth):.2f}")

# %% [markdown]
# What an idea saves depends on what else the program waits for. So the two differ, and single worths do not multiply to the
# whole. The last three are this chapter's, and worth little. Later ideas were tried on the kernel of today, with Triton
# 3.9, each with a prediction. *Measured*: how many times as fast, in the mean (from the worst problem to the best). *Without
# pauses* calls follow each other, so the clock falls. *Kept*: for how many of the problems. Bytes that
# *have none* have no register, so they spill.

# %% tags=["nbval-ignore-output", "hide-input"]
display(Markdown("\n".join(ideas.table("forward"))))

# %% [markdown]
# Most predictions were too hopeful. An instruction saved, or a barrier, gains nothing where the program waits for something
# else. (*In a CUDA graph*: where calls are recorded once and replayed.) New sizes gained where the old ones had been chosen
# for other shapes. How fast the kernel is beside the last rung:

# %% tags=["hide-input"]
over = {shape: climb.factor("fa2_lab", *shape, old=ladder.RUNGS[-1]) for shape in climb.shapes}
for (d, causal), ratio in over.items():
    print(f"d = {d:3}, {'causal' if causal else 'no mask':8}: {ratio:.2f} times its speed")

# %% [markdown]
# At d = 64 the kernel has ping-pong, which no rung has. At d = 128 it also takes the heads in another order. This record does
# not show which of its differences made it faster.

# %% [markdown]
# ## The same in 150 lines, and what you cannot say
#
# [TileLang](https://github.com/tile-ai/tilelang) compiles attention for Hopper from about 150 lines of Python. Its
# [example](https://github.com/tile-ai/tilelang/tree/main/examples/flash_attention) has the tiles, the softmax and one loop:
#
# | here | in that example |
# | --- | --- |
# | rings, phases, releases | follow from `T.Pipelined(…, num_stages=2)` |
# | producer warp, registers by role, layouts | the compiler's |
# | S of one tile beside P V of the tile before | `order` and `stage`: two lists of six numbers |
# | m lags, by a vote of the warp | not there; it would take PTX, as here |
# | programs that stay and draw row blocks | one program for each row block |
#
# Start there if your kernel is not attention. Come back here when you know which wait you want to be rid of.

# %% [markdown]
# ## Recap
#
# - If one wait implies another, the other can go. The last tile of a row block needs a second look.
# - A tile that a consumer does not multiply must still be taken: a barrier remembers one bit.
# - What an idea gains belongs to the kernel in which it was measured.

# %% [markdown]
# ## Exercises
#
# **Build.** With key lengths a consumer takes V's first tile, to wipe it, before it releases K's. From the next tile on it
# behaves as `tiles_of`. With one stage the kernel's producer hangs then: V₀ stands behind K₁, and K₁ waits for the release of
# K₀. Write a producer of one row block that needs only one stage, on the model; the check tries 1, 2 and 3. `yield K.room(n)`
# waits for room (n = T is allowed); `yield from K.copy(n)` and `yield from V.copy(n)` copy. V is not released, so `V.room`
# would wait for ever.

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
# K does not run ahead, and V₀ does not wait. With one stage V's tile n takes the place of tile n − 1, which is released with
# K's tile n: that is what K's tile n + 1 would wait for.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
col, seen = np.arange(128)[None, :], np.arange(-3, 140)[:, None]
verdict("a mask as a test of bits", (((col & ~6) < seen - (col & 6)) == (col < seen)).all())
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
        verdict(f"O and L = float64, d = {d}, causal = {causal}", all(right))

# %% tags=["hide-input"]
verdict("ahead of cuDNN and the portable kernel, level with FlashAttention-3 or ahead of it",
        all(min(ratios(peer)) > 0.97 for peer in ("FlashAttention-3", "cuDNN", "fa2_lab portable")))  # fmt: skip
verdict("the kernel is at least as fast as the last rung", all(0.98 < ratio < 1.15 for ratio in over.values()))
chosen = [sizes.choose(d, N, N, heads=2048 // d * 16384 // N, SMs=132, causal=causal, lengths=False)
          for d, N, causal in ((64, 1024, True), (128, 512, True), (128, 16384, False), (128, 16384, True))]  # fmt: skip
verdict("short causal rows take tiles of 64 keys, long rows at d = 128 blocks of 192 rows",
        [x.B_c for x in chosen[:2]] == [64, 64] and [x.consumers for x in chosen[2:]] == [3, 3])  # fmt: skip

# %% [markdown] tags=["navigation"]
# [← Hopper, machine and rungs](12a_hopper_rungs.ipynb) · [The map](00_start.ipynb) · [Hopper, backward →](13_hopper_backward.ipynb)
