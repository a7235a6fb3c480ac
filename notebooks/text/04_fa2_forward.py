# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)

# %% [markdown]
# # 04 · FlashAttention-2, forward
#
# **Same answer, same tiles: what is left to save?**
#
# FlashAttention (FA1) never writes the score matrix to HBM. It does write something else, again and again: the
# unfinished output of every row block, which leaves the chip after each tile and comes back for the next. This notebook
# changes FA1 one step at a time, four steps in all, and counts after each what it saved. At the end stands Algorithm 1
# of the FlashAttention-2 paper (FA2).
#
# After this notebook you can
#
# - write FA2's forward pass from memory and say which lines of FA1 moved,
# - say for each of the four changes what it saves, in elements or in operations, and what it does not save,
# - sort the tiles of a causal mask into three kinds, and recognise three printed rules that let the future in.
#
# *Time: 35 minutes. Hardware: any laptop, NumPy alone. Before this: [03 · FlashAttention](03_fa1.ipynb).*

# %%
from difflib import ndiff
from inspect import getsource

import numpy as np

from fa2_lab.errata import ERRATA, judge
from fa2_lab.machine import chips, io, time
from fa2_lab.plots import causal_tiles, deferred_normalisation, flop_costs, visiting_order
from fa2_lab.plots.explorer import explore
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling
from fa2_lab.trace import UNWATCHED, Trace

# %% [markdown]
# ## Why does the output leave the chip at all?
#
# Two thirds of FA1's traffic, as notebook 03 found, are o, l and m on their way to HBM and back. Here is its loop once more,
# on the 8 queries and 8 keys that you counted there. Its step is a function of its own, since we will change the loops and
# the step one at a time. (`tiling` says which rows and columns belong to a block. `trace` is the meter: what is taken from
# `Q`, `K`, … is a load, what is put into `O`, `l`, `m` is a store.)

# %%
def fa1_step(o, l, m, s, v):  # (B_r, d), (B_r,), (B_r,), (B_r, B_c), (B_c, d)
    m_tile = s.max(axis=1)
    p = np.exp(s - m_tile[:, None])  # (B_r, B_c)
    m_new = np.maximum(m, m_tile)
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * p.sum(axis=1)
    r = 1 / l_new  # one division for each row
    return (r * alpha * l)[:, None] * o + (r * beta)[:, None] * (p @ v), l_new, m_new


# %%
def columns_outside(Q, K, V, tiling, step, trace):
    Q, K, V, O, l, m = in_hbm(Q, K, V, trace)
    O[:], l[:], m[:] = 0, 0, -np.inf
    for j in trace.serial("j", range(tiling.T_c)):
        k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # (B_c, d)
        for i in trace.serial("i", range(tiling.T_r)):
            rows = tiling.rows(i)
            q_i, o_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]
            s_ij = tau * (q_i @ k_j.T)  # (B_r, B_c)
            O[rows], l[rows], m[rows] = step(o_i, l_i, m_i, s_ij, v_j)
    return np.asarray(O), np.asarray(l), np.asarray(m)


def in_hbm(Q, K, V, trace):
    return trace.hbm(Q=Q, K=K, V=V, O=np.empty(Q.shape), l=np.empty(len(Q)), m=np.empty(len(Q)))


Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
tau, tiling = 1 / np.sqrt(4), Tiling(N_q=8, N_k=8, B_r=4, B_c=2)
dense, _ = naive.forward(Q, K, V)
fa1_meter = Trace()
print("the dense result:", close(columns_outside(Q, K, V, tiling, fa1_step, fa1_meter)[0], dense))

# %% [markdown]
# A row block's output gathers a part from every column block, and the column blocks are the outer loop. Between two of them
# the other row block has its turn on the chip.
#
# **Takeaway.** In FA1 the keys wait on chip and the queries pass by, so everything that belongs to a query must pass by as
# well: q, o, l and m.

# %% [markdown]
# ## What if the queries wait and the keys pass by?
#
# Swap the two loops. The row block's state is born on chip, grows there through all its tiles, and leaves once. The
# arithmetic of a step stays as it is.
#
# **Predict.** Write the function yourself before you read it. Which lines of `columns_outside` move, and which change? And
# what does the swap cost: which tensors are now loaded more often than before? Put numbers to it, with T_r = 2 and T_c = 4.

# %%
def rows_outside(Q, K, V, tiling, step, trace):
    Q, K, V, O, l, m = in_hbm(Q, K, V, trace)
    for i in trace.parallel("i", range(tiling.T_r)):
        rows = tiling.rows(i)
        q_i = Q[rows]
        o_i, l_i, m_i = np.zeros(q_i.shape), np.zeros(len(q_i)), np.full(len(q_i), -np.inf)
        for j in trace.serial("j", range(tiling.T_c)):
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # (B_c, d)
            s_ij = tau * (q_i @ k_j.T)  # (B_r, B_c)
            o_i, l_i, m_i = step(o_i, l_i, m_i, s_ij, v_j)
        O[rows], l[rows], m[rows] = o_i, l_i, m_i
    return np.asarray(O), np.asarray(l), np.asarray(m)


# %% [markdown]
# Here are the lines that moved. (−: gone from its place, +: new in its place.)

# %%
def moved(before, after):  # without the def line and without indentation
    code = ([line.strip() for line in getsource(f).splitlines()[1:]] for f in (before, after))
    return "\n".join(line for line in ndiff(*code) if line.startswith(("-", "+")))


print(moved(columns_outside, rows_outside))

# %%
swapped = Trace()
print("the dense result:", close(rows_outside(Q, K, V, tiling, fa1_step, swapped)[0], dense))
print("   loaded, stored:  FA1       rows outside")
for tensor in ("Q", "K", "V", "O", "l", "m"):
    counts = [f"{t.loads(tensor):4}, {t.stores(tensor):3}" for t in (fa1_meter, swapped)]
    print(f"{tensor:16}{counts[0]:>10}{counts[1]:>15}")
print("all:", fa1_meter.hbm_elements, "elements before,", swapped.hbm_elements, "after")

# %% [markdown]
# The same as a picture: above the order of the tiles, beneath it every load and store as it happens. On the right stands
# the finished FA2, which stores a single number `L` for each row where we still store `l` and `m`; that comes below.

# %%
finished = Trace()
fa2.forward(Q, K, V, B_r=4, B_c=2, trace=finished)
show(visiting_order.draw(2, 4, {"FA1": fa1_meter.events, "FA2": finished.events}))

# %% [markdown]
# In a running notebook you can move through time yourself, and change sizes, mask and loop order: run the next cell, which
# shows sliders where `ipywidgets` is installed.

# %% tags=["nbval-ignore-output"]
explore()

# %% [markdown]
# <details><summary>What the swap costs, by hand</summary>
#
# Q, K, V and O have 8 · 4 = 32 elements, l and m 8. K and V now come in once for each row block, 2 · 32 = 64 elements
# instead of 32. In exchange Q comes in once instead of for each of 4 column blocks. O is stored once and never loaded;
# before it came in 4 times and went out 4 times, and once more for the zeros at the start.
# </details>
#
# **Takeaway.** Whatever belongs to the outer loop stays on chip. FA1 keeps k and v there, FA2 keeps q, o, l and m, and
# there is more of the latter.

# %% [markdown]
# ## Does that matter at real sizes?
#
# In the small example the swap saved two thirds, partly because its tiles are taller than wide. Write down what each order
# moves for one tile that is square (B rows, B columns), when there are many of them.
#
# **Predict.** FA1 brings in q and o and sends out o: 3 · B · d elements for a tile, and a few for `l` and `m`. FA2 brings
# in k and v. What is the ratio?

# %%
for N, B in ((512, 64), (2048, 64), (8192, 64), (8192, 128)):
    whole = Tiling(N, N, B, B)
    ratio = float(io.fa1_over_fa2(whole, d=64))
    print(f"N = {N:4}, B = {B:3}: FA1 moves {ratio:.2f} times the elements of FA2")
doubled = io.growth("fa2", "forward", N=4096, B=64, d=64)
print(f"FA2, N from 4096 to 8192: {float(doubled):.2f} times the elements")

# %% [markdown]
# <details><summary>Three against two</summary>
#
# 3Bd : 2Bd, so about 3/2; the statistics add 2/d. In general it is 3 B_r : 2 B_c, so 4 × 2 tiles gave 3.
#
# The write-up that notebook 03 caught with O(N) traffic slips once more here: it says that FA1 and FA2 do not differ in
# memory traffic. They do, by this factor. And they agree in the last line: nearly four times for twice the length.
# </details>
#
# **Takeaway.** The swap takes a third off the traffic. It does not change how traffic grows: Θ(N²d²/M), before and
# after.

# %% [markdown]
# ## Who waits for whom?
#
# The traffic is not the main reason for the swap. Look at what one pass of the outer loop needs from another. In FA1 a
# column block takes up the state that the one before has left in HBM. In `rows_outside` the outer loop says
# `trace.parallel` where FA1 says `trace.serial`: a row block needs nothing from the others.
#
# **Predict.** How many workers can share one head in each order? And for 8,192 queries in blocks of 128?

# %%
print("workers in one head, FA1:", len(fa1_meter.by_worker()))
print("workers in one head, rows outside:", len(swapped.by_worker()))
print("the same with N = 8192 and 128 rows in a block:", Tiling(8192, 8192, 128, 128).T_r)

# %% [markdown]
# A worker becomes a thread block on the GPU. Notebook 06 lets them loose in any order, and shows what it means for a chip
# with 132 processors whether a head offers it one worker or 64. (The paper gives the credit where it is due: Phil Tillet had
# swapped the loops and handed out the row blocks before, in a Triton kernel.)
#
# **Takeaway.** With rows outside, the outer loop is no longer a loop but a list of independent jobs.

# %% [markdown]
# ## What does an operation cost?
#
# The second kind of saving is arithmetic. Almost all operations of a tile are in its two matrix products. The rest
# (exponentials, maxima, sums, scalings) looks too small to care about.
#
# **Predict.** For a tile of 128 × 64 with d = 128, what percentage of the operations is *not* in the matrix products?
# And what percentage of the *time* might they take on an A100?

# %%
ops = io.tile_operations("fa1", "forward", 128, 64, 128)
share = 1 - ops["matmul"] / sum(ops.values())
print(f"not in matrix products: {100 * share:.1f}% of the operations")
for chip in (chips.A100, chips.H100):
    clocks = time.tile_clocks(chip, 128, 64, 128, algorithm="fa1")
    slow = (clocks.fp32 + clocks.exp) / (clocks.tensor + clocks.fp32 + clocks.exp)
    print(f"{chip.name}: {100 * slow:.0f}% of the clocks, if the units take turns")
    prices = f"{chip.flops_per_fp32:.0f}, of one exp: {chip.flops_per_exp:.0f}"
    print(f"   matmul FLOPs in the time of one FP32 FLOP: {prices}")

# %% [markdown]
# The same as a picture. On the right, look at "before" for now; "after" is what the next section is about.

# %%
show(flop_costs.draw(**flop_costs.data()))

# %% [markdown]
# <details><summary>Where these prices come from</summary>
#
# A processor (SM) of the A100 finishes 2048 FLOPs of matrix products in a clock on its tensor cores, 64 multiply-adds on
# its FP32 lanes and 16 exponentials on its special function units. 2048 / 128 = 16 and 2048 / 16 = 128. The paper's
# "16 times" is the first of the two. Write-ups that repeat it for exp are off by a factor of 8 on this chip.
# </details>
#
# These are rates from data sheets. How much of it hides behind the matrix products, because units can work at the same
# time, is for notebook 10 to measure.
#
# **Takeaway.** Two per cent of the operations can take two fifths of the clocks: what does not run on the tensor cores is
# paid for at 16 or 128 times the price.

# %% [markdown]
# ## Must every step end with a finished answer?
#
# `fa1_step` returns an output that is already divided by `l`: if the keys ended here, it would be the result. To go on,
# the next step multiplies by the old `l` again, brings both parts to a common maximum, and divides by the new `l`.
#
# Notebook 02 had a state that was not divided. It is in the package as `SoftmaxState`, so the step below only unpacks it.
#
# **Predict.** A B_r × d block is multiplied by one number for each row. How often does that happen in `fa1_step`, and how
# often in notebook 02's update? In which of the two is something divided?

# %% tags=["nbval-ignore-output"]
def undivided_step(o, l, m, s, v):
    state = SoftmaxState(m, l, o).update(s, v)
    return state.o, state.l, state.m


print(getsource(SoftmaxState.update))

# %%
def counted(step):
    trace = Trace()
    rows_outside(*np.ones((3, 128, 128)), Tiling(128, 128, 128, 64), step, trace)
    return trace.by_tile()[0, 1]  # the second tile, 128 × 64


before, after = counted(fa1_step), counted(undivided_step)
print("operations of one tile    divided  undivided   saved")
for kind in ("matmul", "exp", "maximum", "add", "multiply", "divide"):
    print(f"{kind:20} {before[kind]:12,} {after[kind]:10,} {before[kind] - after[kind]:7,}")

# %%
show(deferred_normalisation.draw(**deferred_normalisation.data()))

# %% [markdown]
# <details><summary>What became of the multiplications</summary>
#
# A 128 × 128 block has 16,384 elements. `fa1_step` scales two such blocks, the old output and the new part; the undivided
# step scales one, the old output, by α. The 128 divisions, one for each row, are gone as well, and with β a second
# exponential for each row. What stays is α: it comes from the moving maximum, and the maximum protects exp from
# overflow in this very tile.
# </details>
#
# So it is wrong to say, as some do, that 64 rescalings become a single one. Over 64 tiles, 128 scalings of a block become
# 65: one by α in each tile, and one by 1/l at the end.
#
# **Takeaway.** Tweak 1: nothing inside the loop needs the finished output, so l is divided by once, after the last tile;
# α has to stay, because the next exponentials are taken relative to the new maximum.

# %% [markdown]
# ## Is it worth it?
#
# The tile lost 17,280 of about 4.3 million operations, 0.4 per cent. In the picture above that is 8 per cent of the clocks.
# Two things are missing there: reading operands from shared memory takes its clocks too, and the units need not take
# turns. The model in `machine.time` adds the first and gives both ends of the second.
#
# **Predict.** If tensor cores, FP32 lanes and the rest all work at the same time, and the tensor cores are the last to
# finish, what is tweak 1 worth?

# %%
for chip in (chips.A100, chips.H100):
    worth = time.tweak_1(chip, 128, 64, 128)
    in_turns, together = worth.serial, worth.overlapped
    print(f"{chip.name}: faster by {in_turns:.2f} if units take turns, by {together:.2f} if they overlap")

# %% [markdown]
# By this model a kernel lies between the two; notebook 10 asks a clock. Tweak 1 is no revolution: it takes work off a unit
# that the tensor cores may have to wait for.
#
# **Takeaway.** A saving counts where the saved unit was holding others up. Count first, then ask who was waiting.

# %% [markdown]
# ## Does the paper's formula say the same?
#
# Take notebook 02's four keys: exponentials 1, 3 and 4, 8; values 8, 0 and 4, 2; the answer is 2.5. After the first two
# keys FA1 holds O¹ = 2, ℓ¹ = 4/3 and m¹ = log 3. After all four, m² = log 8 and ℓ² = 2.
#
# Section 3.1.1 of the paper writes the undivided output as Õ² = diag(ℓ¹)⁻¹ O¹ + exp(S² − m²) V², to be divided by ℓ² at
# the end. The second term is 1/2 · 4 + 1 · 2 = 4.
#
# **Predict.** Put the numbers in. What comes out, and what should stand in front of O¹?

# %%
O1, l1, m1, l2, m2 = 2, 4 / 3, np.log(3), 2, np.log(8)
part2 = np.exp(np.log([4, 8]) - m2) @ np.array([4, 2])
printed = (O1 / l1 + part2) / l2
right = (l1 * np.exp(m1 - m2) * O1 + part2) / l2
print("as printed:", round(float(printed), 12))
print("with diag(l1 exp(m1 - m2)):", round(float(right), 12))

# %% [markdown]
# The package keeps such slips as data that can be run: `judge` computes the printed version and the right one, and says
# whether a check refuses the first and accepts the second. This one has three relatives.

# %%
for name in ("fa2-tweak1", "fa2-two-terms", "fa2-P-tilde", "bilingual-inverse"):
    found = judge(ERRATA[name])
    print(f"{name:18} told apart: {found.told_apart}   {ERRATA[name].instead.split(':')[0]}")

# %% [markdown]
# <details><summary>What went wrong in print</summary>
#
# O¹ has been divided by ℓ¹. To undo that, multiply by ℓ¹; the formula divides again. And O¹ stands under the maximum m¹,
# so it must move to m² by the factor exp(m¹ − m²), which is missing. Together: 4/3 · 3/8 · 2 = 1, and (1 + 4) / 2 = 2.5.
# The relatives: a ratio upside down, a division left over from FA1, and an inverse of α in a translated Algorithm 1. Line 10
# of the paper's own Algorithm 1 is right.
# </details>
#
# **Takeaway.** When a formula rescales, ask of each factor what it undoes and what it moves; a four-key example takes a
# minute and settles it.

# %% [markdown]
# ## What does the backward pass need to know?
#
# The backward pass will want the probabilities again. FA1 keeps two numbers for each row, and P = exp(S − m) / l. Notebook
# 01 got by with one, L = log Σ exp(S), and P = exp(S − L), but it had the whole row before it.
#
# **Predict.** Write L in terms of `m` and `l`. With scores around 1000, which of the two ways to compute L survives?

# %%
S = 1000 + tau * (Q @ K.T)
m = S.max(axis=1)
l = np.exp(S - m[:, None]).sum(axis=1)
two_numbers = np.exp(S - m[:, None]) / l[:, None]
L = m + np.log(l)
with np.errstate(over="ignore"):
    directly = np.log(np.exp(S).sum(axis=1))
print("exp(S - L) is exp(S - m) / l:", close(np.exp(S - L[:, None]), two_numbers))
print("L = m + log l is finite:", bool(np.isfinite(L).all()))
print("log(sum(exp(S))) is finite:", bool(np.isfinite(directly).all()))

# %% [markdown]
# <details><summary>Why, and what is gained</summary>
#
# 1 / l = exp(−log l), so exp(S − m) / l = exp(S − (m + log l)). L is the logarithm of Σ exp(S), computed without ever
# forming that sum. One store instead of two, and for the backward one load and one subtraction instead of two loads, a
# subtraction and a division. In the traffic of the forward this is next to nothing: N elements, beside 2Nd for Q and O.
#
# A warning for readers of both papers: FA1's appendix also writes L, and means Σ exp(S), without the logarithm.
# </details>
#
# **Takeaway.** Tweak 2: a row's statistics for later fit in one number, L = m + log l.

# %% [markdown]
# ## The whole of Algorithm 1
#
# Both tweaks in the swapped loop, with FA2's line numbers as tags. A slice ends where the data ends, so a last block
# that is not full needs no care in NumPy.

# %%
def fa2_forward(Q, K, V, tiling, trace):
    Q, K, V, O, L = trace.hbm(Q=Q, K=K, V=V, O=np.empty(Q.shape), L=np.empty(len(Q)))
    for i in trace.parallel("i", range(tiling.T_r)):  # FA2.A1.L3
        rows = tiling.rows(i)
        q_i = Q[rows]  # FA2.A1.L4  (B_r, d)
        state = SoftmaxState.reset(*q_i.shape)  # FA2.A1.L5
        for j in trace.serial("j", visited(tiling, i)):  # FA2.A1.L6
            k_j, v_j = K[tiling.cols(j)], V[tiling.cols(j)]  # FA2.A1.L7  (B_c, d)
            s_ij = hide(tau * (q_i @ k_j.T), tiling, i, j)  # FA2.A1.L8  (B_r, B_c)
            state = state.update(s_ij, v_j)  # FA2.A1.L9 FA2.A1.L10
        o_i, L_i = state.finalize()  # FA2.A1.L12 FA2.A1.L13
        O[rows], L[rows] = o_i, L_i  # FA2.A1.L14 FA2.A1.L15
    return np.asarray(O), np.asarray(L)


def visited(tiling, i):
    return range(tiling.T_c)  # all of them, until there is a mask


def hide(s_ij, tiling, i, j):
    return s_ij  # nothing, until there is a mask


# %% [markdown]
# Tweak 1 sits in line 10: `where("FA2.A1.L10")` of the map leads to it, in NumPy and in the kernels.
#
# **Predict.** Four stages, counted on 512 queries and keys, d = 64, tiles of 64 × 64: which of the three columns changes at
# which step?

# %%
big = np.random.default_rng(1).standard_normal((3, 512, 64))
stages = {
    "FA1": lambda t: columns_outside(*big, Tiling(512, 512, 64, 64), fa1_step, t),
    "+ rows outside": lambda t: rows_outside(*big, Tiling(512, 512, 64, 64), fa1_step, t),
    "+ tweak 1": lambda t: rows_outside(*big, Tiling(512, 512, 64, 64), undivided_step, t),
    "+ tweak 2": lambda t: fa2_forward(*big, Tiling(512, 512, 64, 64), t),
}
print(f"{'':16}{'HBM elements':>14}{'multiplications':>17}{'divisions':>11}")
for name, run in stages.items():
    t = Trace()
    run(t)
    print(f"{name:16}{t.hbm_elements:14,}{t.flops['multiply']:17,}{t.flops['divide']:11,}")

# %% [markdown]
# <details><summary>Reading the table</summary>
#
# The swap changes what moves and nothing that is computed. Tweak 1 changes what is computed and nothing that moves; its
# output here still lacks the division, which comes back with the last line: 512 divisions, one for each row, and 512 · 64
# multiplications by 1/l. Tweak 2 saves 512 stores.
# </details>
#
# **Takeaway.** The loop order decides the traffic, the state decides the arithmetic, and the two can be changed one at a
# time.

# %% [markdown]
# ## Which tiles does a causal mask leave?
#
# In a language model a query sees no later key: row r sees columns c ≤ r. Cut S into tiles, and whole tiles may lie in the
# future of all their rows. FA1's Algorithm 2 computes these as well and then masks every entry.
#
# **Predict.** 8 × 8 scores in tiles of 2 × 2: of the 16 tiles, how many can be skipped, how many need no mask at all, and
# how many must be masked entry by entry? Name the tests on a tile's first and last row and column.

# %%
def kind(tiling, i, j):  # for as many queries as keys
    rows, cols = tiling.rows(i), tiling.cols(j)
    if cols.start > rows.stop - 1:  # even the last row is before the first column
        return Tile.SKIP
    if cols.stop - 1 <= rows.start:  # even the first row sees the last column
        return Tile.FULL
    return Tile.DIAGONAL


square = Tiling(8, 8, 2, 2, CAUSAL)
for i in range(4):
    print(" ".join(f"{kind(square, i, j).name:8}" for j in range(4)))

# %%
show(causal_tiles.draw(**causal_tiles.data()))

# %% [markdown]
# Only two lines of `fa2_forward` ask about the mask: which tiles to visit, and which of them to mask. Here they are,
# filled in.

# %%
def visited(tiling, i):
    return [j for j in range(tiling.T_c) if tiling.kind(i, j) is not Tile.SKIP]


def hide(s_ij, tiling, i, j):
    if tiling.kind(i, j) is Tile.FULL:
        return s_ij
    return np.where(tiling.visible(i, j), s_ij, -np.inf)


dense_causal, _ = naive.forward(Q, K, V, mask=CAUSAL)
O, L = fa2_forward(Q, K, V, square, UNWATCHED)
print("causal, 10 of 16 tiles, 4 of them masked:", close(O, dense_causal))

# %% [markdown]
# **Takeaway.** A tile is skipped, masked or left alone; its corners decide which, before anything is loaded.

# %% [markdown]
# ## Three rules in print, tried out
#
# The two inequalities are easy to get wrong. The paper says that no mask is needed for a block if its rows are certain to
# come before its columns. An article skips a tile if `j * B_c > (i + 1) * B_r`, and masks where i = j. The same article
# sets hidden scores to zero before the softmax.
#
# **Predict.** What is wrong with each? Which of them lets a query see the future?

# %%
for name in ("fa2-mask-blocks", "article-skip", "article-mask-zero"):
    found = judge(ERRATA[name])
    print(f"{name:18} wrong version refused and right one accepted: {found.told_apart}")
    print("  ", ERRATA[name].instead)
late = [(i, j) for i in range(4) for j in range(4) if not j * 2 > (i + 1) * 2]
corner_test = sum(len(visited(square, i)) for i in range(4))
print("tiles visited with '>':", len(late), "  with the corner test:", corner_test)

# %% [markdown]
# <details><summary>The three slips</summary>
#
# Row indices smaller than column indices means the future: those tiles are skipped, not computed without a mask. With
# `>` instead of `>=` the tile right of the diagonal is visited as well, three more at T = 4, and whoever masks only
# i = j computes it unmasked. And a score of zero is a vote: exp(0) = 1. Hidden scores become −∞. All three let the
# future in.
# </details>
#
# **Takeaway.** A wrong mask gives plausible numbers and a model that cheats; only a comparison with the dense result
# shows it.

# %% [markdown]
# ## How much does skipping save?
#
# Of T × T square tiles, T(T + 1)/2 remain. The paper speaks of a speedup of 1.7 to 1.8.
#
# **Predict.** For which T is the ratio T² : T(T + 1)/2 equal to 1.75? What is it for 8,192 keys in blocks of 128, and which
# share of the computed scores is thrown away on the diagonal?

# %%
for T in (2, 4, 7, 64):
    print(f"T = {T:2}: all tiles / visited tiles = {float(1 / time.causal_ratio(T)):.2f}")
for B_r, B_c in ((128, 128), (128, 64)):
    saved = time.skipping(chips.A100, Tiling(8192, 8192, B_r, B_c, CAUSAL), d=128)
    tiles = f"{saved.full_tiles} full, {saved.diagonal_tiles} on the diagonal"
    print(f"{B_r} × {B_c:3}: {tiles}, {100 * float(saved.in_vain):.1f}% of the scores in vain")

# %% [markdown]
# <details><summary>What the numbers say</summary>
#
# T²/(T(T + 1)/2) = 2T/(T + 1): 1.75 at T = 7, and towards 2 for long sequences. The paper's figure is a measurement; it
# is not a property of the algorithm. With tiles of 128 × 64 there are two diagonal tiles for each row block, not one:
# their number goes with the smaller side.
# </details>
#
# With fewer queries than keys (say, 4 new tokens and 8 keys), the diagonal ends in the bottom right corner: the last
# query sees everything. Row r then sees c ≤ r + N_k − N_q.
#
# **Takeaway.** Skipping approaches a factor of two; the price is the half-empty diagonal, whose share falls as T grows.

# %% [markdown]
# ## Recap
#
# - Rows outside: q, o, l, m stay on chip; k and v stream past. About a third less traffic, and row blocks that need
#   nothing from each other.
# - Tweak 1: no division inside the loop. One of two scalings of the output block goes; α stays.
# - Tweak 2: L = m + log l is all that the backward needs.
# - Causal: SKIP, DIAGONAL, FULL, decided at the corners; up to half of the tiles are skipped.
# - The traffic is still Θ(N²d²/M), and the extra memory is N numbers.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** 12 queries, 12 keys, tiles of 4 rows and 3 columns, causal. How many tiles of each kind? Draw it, then
# run the cell.
#
# <details><summary>Hint</summary>
# Row block 1 has rows 4 to 7. Its last row sees columns 0 to 7, its first row columns 0 to 4.
# </details>

# %%
uneven = Tiling(12, 12, 4, 3, CAUSAL)
for i in range(3):
    print(" ".join(f"{kind(uneven, i, j).name:8}" for j in range(4)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# 3 skipped, 5 on the diagonal, 4 full. Row block 0: its first row sees column 0 only, its last row columns 0 to 3, so the
# tiles of columns 0 to 2 and 3 to 5 are cut. Row block 1: columns 0 to 2 are full, 3 to 5 and 6 to 8 are cut. Row block
# 2: row 8 sees columns 0 to 8, so three tiles are full and the last is cut.
# </details>
#
# **2. Complete.** A sliding window: row r sees columns c with r − w < c ≤ r. Write the tests for SKIP on both
# sides of the window.
#
# <details><summary>Hint</summary>
# On the left, a tile is out of sight if its last column is out of sight of its first row.
# </details>
# <details><summary>Answer</summary>
#
# ```python
# def skipped(tiling, i, j, w):
#     rows, cols = tiling.rows(i), tiling.cols(j)
#     return cols.start > rows.stop - 1 or cols.stop - 1 <= rows.start - w
#
#
# for i in range(4):
#     print([skipped(square, i, j, w=3) for j in range(4)])
# ```
# The first test is the causal one. In the second, the first row of the tile reaches furthest back, to column
# rows.start − w + 1.
# </details>
#
# **3. Break and fix.** The step below moves the state to the new maximum, but takes the exponentials of the new
# tile relative to the tile's own maximum, as FA1 does, and forgets FA1's factor β = exp(m_tile − m_new). For which rows is
# the result right all the same? (The keys are sorted here so that the scores of query 0 rise.)
#
# <details><summary>Hint</summary>
# When is β = 1?
# </details>

# %%
def forgot_beta(o, l, m, s, v):
    m_tile = s.max(axis=1)
    m_new = np.maximum(m, m_tile)
    alpha, p = np.exp(m - m_new), np.exp(s - m_tile[:, None])
    return alpha[:, None] * o + p @ v, alpha * l + p.sum(axis=1), m_new


by_score = np.argsort(Q[0] @ K.T)  # another order of the keys leaves attention as it is
o, l, m = rows_outside(Q, K[by_score], V[by_score], tiling, forgot_beta, UNWATCHED)
right_rows = [r for r in range(8) if close((o / l[:, None])[r], dense[r])]
maxima = (Q @ K[by_score].T).reshape(8, 4, 2).max(axis=2)  # (row, tile)
rising = [r for r in range(8) if (np.diff(maxima[r]) > 0).all()]
print("right rows:", right_rows, "  rows whose maximum rises with every tile:", rising)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only where every tile brings a new maximum is the tile's own maximum also the row's, and β = 1. FA2 needs no β because
# it takes the exponentials relative to `m_new` from the start. That is the difference between lines 12 and 13 of FA1's
# algorithm and line 9 of FA2's.
# </details>

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against the dense result: ragged blocks, huge
# scores, masks, and a larger size.

# %%
ours, packages = Trace(), Trace()
mine = columns_outside(Q, K, V, tiling, fa1_step, ours)
theirs = fa1.forward(Q, K, V, B_r=4, B_c=2, trace=packages)
verdict("columns_outside with fa1_step = fa1.forward", all(map(close, mine, theirs)))
verdict("and it moves the same elements in the same order", ours.events == packages.events)
for mask in (Mask(), CAUSAL):
    ours, packages = Trace(), Trace()
    mine = fa2_forward(Q, K, V, Tiling(8, 8, 4, 2, mask), ours)
    theirs = fa2.forward(Q, K, V, B_r=4, B_c=2, mask=mask, trace=packages)
    verdict(f"fa2_forward = fa2.forward, causal = {mask.causal}", all(map(close, mine, theirs)))
    verdict("and it moves the same elements in the same order", ours.events == packages.events)
    verdict("and it computes the same operations", ours.flops == packages.flops)
sizes = [(8, 2, 2), (12, 4, 3), (12, 3, 4), (13, 5, 4)]
tilings = [Tiling(N, N, B_r, B_c, CAUSAL) for N, B_r, B_c in sizes]
same = [kind(t, i, j) is t.kind(i, j) for t in tilings
        for i in range(t.T_r) for j in range(t.T_c)]
verdict("the corner tests = Tiling.kind, also for tiles that are not square", all(same))

# %%
rng = np.random.default_rng(2)
cases = (8, 8, 4, 4, 2, 1), (13, 29, 5, 4, 6, 1), (13, 29, 5, 4, 6, 300), (300, 300, 64, 64, 48, 1)
for N_q, N_k, d, B_r, B_c, size in cases:
    q, (k, v) = size * rng.standard_normal((N_q, d)), rng.standard_normal((2, N_k, d))
    for mask in (Mask(), CAUSAL):
        O, L = fa2.forward(q, k, v, B_r=B_r, B_c=B_c, mask=mask)
        S = np.where(Tiling(N_q, N_k, N_q, N_k, mask).visible(0, 0), q @ k.T / np.sqrt(d), -np.inf)
        right = close(O, naive.forward(q, k, v, mask=mask)[0]) and close(L, naive.logsumexp(S))
        case = f"{N_q} × {N_k}, d = {d}, tiles {B_r} × {B_c}, scores × {size}, causal = {mask.causal}"
        verdict(case, right)
N, d, whole = 8192, 128, Tiling(8192, 8192, 128, 128)
verdict("counted form: Q and O once, K and V once for each of 64 row blocks",
        io.fa2_forward(whole, d).total == 2 * N * d + N + 64 * 2 * N * d)

# %% [markdown] tags=["navigation"]
# [← FlashAttention](03_fa1.ipynb) · [The map](00_start.ipynb) · [The backward pass →](05_backward.ipynb)
