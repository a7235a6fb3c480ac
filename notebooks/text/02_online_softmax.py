# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)

# %% [markdown]
# # 02 · Online softmax
#
# **Can softmax be finished before all scores are known?**
#
# Softmax divides by a sum over the whole row, and before that it subtracts the maximum of the whole row. Taken at its
# word, nothing can be finished until the last score is in. Everything FlashAttention does rests on the discovery that
# this is not so.
#
# After this notebook you can
#
# - carry three small things through a row of keys and end with the exact result,
# - say which factor corrects what when a larger score turns up, and why nothing else needs correcting,
# - join two half-finished results, in any order, and know why that matters far beyond one loop.
#
# *Time: 25 minutes. Hardware: any laptop, NumPy alone. Before this: [01 · Naive attention](01_naive_attention.ipynb).*

# %%
from itertools import permutations

import numpy as np

from fa2_lab.plots import merge_orders, state_stream, three_softmaxes
from fa2_lab.plots.show import show
from fa2_lab.reference import online_softmax
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.studio.book.verdicts import close, verdict

# %% [markdown]
# ## Four keys, numbers you can do in your head
#
# One query has four scores. We choose them as logarithms, so that their exponentials are whole numbers: 1, 3, 4 and 8.
# The weights of the softmax are then sixteenths, and the output is a weighted mean of four values.
#
# **Predict.** The values are 8, 0, 4 and 2. What is the output? (Multiply each by its weight, add, divide by 16.)

# %%
s = np.log([1.0, 3.0, 4.0, 8.0])
v = np.array([8.0, 0.0, 4.0, 2.0])
weights = safe_softmax(s)
print("weights in sixteenths:", np.round(16 * weights, 6))
print(f"output: {weights @ v:.6g}")

# %% [markdown]
# <details><summary>The sum</summary>
#
# (1·8 + 3·0 + 4·4 + 8·2) / 16 = 40 / 16 = 2.5.
# </details>
#
# **Takeaway.** The output is a quotient: a weighted sum of values above, the sum of the same weights below.

# %% [markdown]
# ## The first two keys arrive alone
#
# Now only the scores of the first two keys are known, log 1 and log 3. We can already do everything that softmax does,
# pretending that these are all: take the maximum, the exponentials, their sum, and the weighted sum of the values.
#
# **Predict.** The maximum is log 3, so the two exponentials are 1/3 and 3/3. What is their sum `l`, and what is the
# weighted sum `o` of the values 8 and 0?

# %%
m1 = s[:2].max()
p1 = np.exp(s[:2] - m1)
l1 = p1.sum()
o1 = p1 @ v[:2]
print(f"exp(m1) = {np.exp(m1):.6g}   l1 = {l1:.6g}   o1 = {o1:.6g}")

# %% [markdown]
# `l1` is 4/3 and `o1` is 8/3. Their quotient, 2, is the right answer for two keys, and the wrong one for four.
#
# **Takeaway.** Three numbers, `m`, `l` and `o`, say all there is to say about the keys so far.

# %% [markdown]
# ## Two more keys, and a larger maximum
#
# The scores log 4 and log 8 arrive. The new maximum is log 8. The exponentials in `l1` and `o1` were taken relative to
# log 3, the new ones are taken relative to log 8: they do not add up until both are measured from the same point.
#
# **Predict.** By which factor must `l1` and `o1` shrink, so that they look as if log 8 had been the maximum from the
# start? Does each term of the sum need its own factor?

# %%
m2 = max(m1, s[2:].max())
alpha = np.exp(m1 - m2)
p2 = np.exp(s[2:] - m2)
l2 = alpha * l1 + p2.sum()
o2 = alpha * o1 + p2 @ v[2:]
print(f"alpha = {alpha:.6g}   l2 = {l2:.6g}   o2 = {o2:.6g}   o2 / l2 = {o2 / l2:.6g}")

# %% [markdown]
# <details><summary>Why one factor does it</summary>
#
# Every term is exp(s − log 3) and should be exp(s − log 8). The quotient of the two is exp(log 3 − log 8) = 3/8,
# whatever s is. So α = 3/8 is the same for all terms of `l` and of `o`, and it can be applied to the sums: 3/8 · 4/3 =
# 1/2, plus 1/2 + 1 from the new keys, makes l = 2. In the same way o = 3/8 · 8/3 + 1/2 · 4 + 1 · 2 = 5, and 5/2 = 2.5.
# </details>
#
# **Takeaway.** When the maximum moves, everything gathered so far shrinks by one common factor, α = exp(m_old − m_new).

# %% [markdown]
# ## A state and its step
#
# The same for a block of rows at once, written as a function. It is line 9 and line 10 of Algorithm 1 in the
# FlashAttention-2 paper; `s` is a block of scores, `v` the values of the same keys.

# %%
def update(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    m_new = np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_new[:, None])  # (B_r, B_c)
    alpha = np.exp(m - m_new)  # 1 while the maximum stands
    return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * o + p @ v


# %% [markdown]
# Before the first key the state is m = −∞, l = 0, o = 0. Then exp(−∞ − m_new) = 0 and the first update starts afresh.
#
# **Predict.** Four rows, twelve keys, blocks of 3 keys: after how many updates is o / l equal to the dense result?

# %%
rng = np.random.default_rng(0)
S, V = 3 * rng.standard_normal((4, 12)), rng.standard_normal((12, 2))
dense = safe_softmax(S) @ V
m, l, o = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))
for j in range(0, 12, 3):
    m, l, o = update(m, l, o, S[:, j : j + 3], V[j : j + 3])
    print(f"after {j + 3:2} keys: equal to the dense result?", close(o / l[:, None], dense))

# %% [markdown]
# The same in a picture: ten blocks stream past four rows. Follow `m` of the drawn row, and look where α is not 1.

# %%
show(state_stream.draw(**state_stream.data()))

# %% [markdown]
# <details><summary>And before the last update?</summary>
#
# After 3, 6 and 9 keys, o / l is exactly the attention over those keys. It is not an approximation that gets better: it
# is the right answer to a smaller question.
# </details>
#
# **Takeaway.** Softmax can be finished at any time, for the keys seen so far, from a state whose size does not depend on
# how many there were.

# %% [markdown]
# ## Does the subtraction matter, or is it decoration?
#
# The maximum cancels in o / l, so mathematically m could be anything, 0 for instance. In float32, exp(89) is already
# infinite.
#
# **Predict.** Scores of 0, 50 and 100 in float32: which of the three ways (no maximum, maximum of the whole row, running
# maximum) gives a number?

# %%
row = np.array([[0.0, 50.0, 100.0]], dtype=np.float32)
values = np.array([[1.0], [2.0], [3.0]], dtype=np.float32)
with np.errstate(over="ignore", invalid="ignore"):
    unsafe = np.exp(row) @ values / np.exp(row).sum()
m, l, o = np.full(1, -np.inf, np.float32), np.zeros(1, np.float32), np.zeros((1, 1), np.float32)
for j in range(3):
    m, l, o = update(m, l, o, row[:, j : j + 1], values[j : j + 1])
print("no maximum:", unsafe.item())
print("maximum of the row:", (safe_softmax(row) @ values).item())
print("running maximum:", (o / l[:, None]).item())

# %% [markdown]
# float16 has less room still: exp(12) is already too large for it. The upper part of the picture takes one row through
# all three ways; the lower part asks how exact each is as scores grow. Everything in it is rounded to the narrow type,
# `m` and `l` too; GPU kernels keep those two in float32.

# %%
show(three_softmaxes.draw(**three_softmaxes.data()))

# %% [markdown]
# **Takeaway.** m is what keeps every exponential between 0 and 1. It must be subtracted inside the loop, block by block;
# the division by l can wait.

# %% [markdown]
# ## A row that has seen no key
#
# Masks will hide keys from us later, sometimes all the keys of a block, sometimes all the keys of a row.
#
# **Predict.** A row's state is still (−∞, 0, 0) and a block arrives whose scores are all −∞. What does `update` make of
# it?

# %%
nothing = np.full((1, 2), -np.inf)
with np.errstate(invalid="ignore"):
    m, l, o = update(np.full(1, -np.inf), np.zeros(1), np.zeros((1, 1)), nothing, np.ones((2, 1)))
print("l =", l.item(), " o =", o.item())
safe = online_softmax.SoftmaxState.reset(1, 1).update(nothing, np.ones((2, 1)))
print("the package: l =", safe.l.item(), " o =", safe.o.item(), " finalize:", [x.item() for x in safe.finalize()])

# %% [markdown]
# <details><summary>Where the NaN comes from, and what the package does</summary>
#
# −∞ − (−∞) is NaN. The papers' formulas have this hole. The package subtracts 0 instead of −∞ where a row has seen no
# key (`finite(m)`), so that exp(−∞ − 0) = 0, and divides by 1 instead of 0 at the end (`nonzero(l)`). Such a row ends
# with O = 0 and L = −∞, which says: an empty sum, weight zero.
# </details>
#
# **Takeaway.** An empty row is a case to decide, not one to run into: O = 0, L = −∞.

# %% [markdown]
# ## Two halves that never met
#
# So far one state walked along the keys. Suppose two workers each walk along half of them, knowing nothing of each
# other. Each ends with its own (m, l, o).
#
# **Predict.** Which of the two states must shrink when they are joined? With three states, does it matter which two are
# joined first?

# %%
def merge(a, b):  # two states (m, l, o)
    m = np.maximum(a[0], b[0])
    alpha, beta = np.exp(a[0] - m), np.exp(b[0] - m)
    return m, alpha * a[1] + beta * b[1], alpha[:, None] * a[2] + beta[:, None] * b[2]


def state_of(keys):
    return update(np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2)), S[:, keys], V[keys])


parts = [state_of(slice(0, 5)), state_of(slice(5, 6)), state_of(slice(6, 12))]
print("row 0: largest score of each part:", [round(float(m[0]), 1) for m, _, _ in parts])
results = []
for first, second, third in permutations(parts):
    results += [merge(merge(first, second), third), merge(first, merge(second, third))]
print(len(results), "ways, each the dense result:", all(close(o / l[:, None], dense) for _, l, o in results))

# %%
show(merge_orders.draw(**merge_orders.data()))

# %% [markdown]
# <details><summary>Which one shrinks, and why any order will do</summary>
#
# Row by row, the one with the smaller maximum; the other is multiplied by exp(0) = 1. Merging takes a maximum and two
# sums, and maximum and sum do not care about order or brackets. The state before the first key changes nothing, so it is
# the identity. A thing with these three properties may be reduced as a loop, a tree, or in whatever order results come
# in.
# </details>
#
# You will meet this operator again: among splits of the keys on one GPU (notebook 06, and 13 for decoding), among the
# warps of one thread block (07), and among GPUs in a ring (14).
#
# **Takeaway.** `update` is a merge with the state of one block; whoever can merge can split the keys in any way.

# %% [markdown]
# ## What must be kept: three things, or two?
#
# Once a part is finished, its output is O = o / l and its logsumexp is L = m + log l. The division has thrown
# something away, so can finished parts still be merged?
#
# **Predict.** Try to write O back as a state (m, l, o) without knowing m and l, only L.

# %%
(m_a, l_a, o_a), (m_b, l_b, o_b) = parts[0], merge(parts[1], parts[2])
finished_a = (m_a + np.log(l_a), np.ones(4), o_a / l_a[:, None])  # m = L, l = 1, o = O
finished_b = (m_b + np.log(l_b), np.ones(4), o_b / l_b[:, None])
m, l, o = merge(finished_a, finished_b)
print("two finished parts, merged:", close(o / l[:, None], dense))

# %% [markdown]
# <details><summary>Why (O, L) is enough</summary>
#
# A state stands for the sums exp(m)·l and exp(m)·o. Any (m, l, o) with the same two products says the same, and
# (L, 1, O) has them: exp(L)·1 = exp(m)·l, and exp(L)·O = exp(m)·l·o/l = exp(m)·o.
# </details>
#
# **Takeaway.** An output and its logsumexp are a state: one number per row, L, does the work of m and l.

# %% [markdown]
# ## The other way to use the same algebra
#
# Rabe and Staats (2021) also process keys in blocks. They keep one result per block and join them all at the end.
#
# **Predict.** 4,096 rows, d = 64, 32 blocks of keys: how much more state does that hold than one running state?

# %%
running = online_softmax.incremental_memory(rows=4096, d=64)
kept = online_softmax.rabe_staats_memory(rows=4096, d=64, blocks=32)
print(f"one running state: {running:,} elements; one for each block: {kept:,}; ratio {kept // running}")
blocks = [(S[:, j : j + 3], V[j : j + 3]) for j in range(0, 12, 3)]
o, _ = online_softmax.rabe_staats(blocks).finalize()
print("same result:", close(o, dense))

# %% [markdown]
# **Takeaway.** Same operator, other schedule: a loop needs one state, a tree needs as many as it has leaves, and buys
# independence with them.

# %% [markdown]
# ## Recap
#
# - A row's state is m (largest score), l (sum of exp(s − m)) and o (sum of exp(s − m)·v).
# - New keys: shrink the state by α = exp(m_old − m_new), add the new terms.
# - Two states: shrink the one with the smaller maximum, add. Order and brackets do not matter.
# - At the end, O = o / l and L = m + log l; (O, L) is itself a state.
# - A row without keys needs a decision: O = 0, L = −∞.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** Scores arrive sorted, smallest first. In how many of n one-key updates is α smaller than 1? And sorted
# the other way?
#
# <details><summary>Hint</summary>
# α is 1 exactly when the maximum stands.
# </details>
# <details><summary>Answer</summary>
# Rising scores move the maximum every time: n − 1 rescalings (the first key has nothing to rescale). Falling scores never
# move it: none. Kernels that skip the rescaling when the maximum barely moves (chapter 12 has one) live on the fact that
# real rows look more like the second case.
# </details>
#
# **2. Complete.** Write `merge` for (m, l) alone, and use it with `functools.reduce` to compute the logsumexp of a million
# scores in blocks of 1,000.
#
# <details><summary>Hint</summary>
# It is the function above without its last component; the identity is (−∞, 0).
# </details>
# <details><summary>Answer</summary>
#
# ```python
# from functools import reduce
#
#
# def merge_ml(a, b):
#     m = max(a[0], b[0])
#     return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)
#
#
# scores = rng.standard_normal((1000, 1000))  # one block to a row
# pieces = [(block.max(), np.exp(block - block.max()).sum()) for block in scores]
# m_all, l_all = reduce(merge_ml, pieces, (-np.inf, 0.0))
# print(close(m_all + np.log(l_all), np.log(np.exp(scores).sum())))
# ```
# </details>
#
# **3. Break and fix.** The next cell forgets α in one place. Before you run it: will its result be wrong for every row?
#
# <details><summary>Hint</summary>
# When is α = 1 in every step?
# </details>

# %%
def broken(m, l, o, s, v):
    m_new = np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_new[:, None])
    alpha = np.exp(m - m_new)
    return m_new, l + p.sum(axis=1), alpha[:, None] * o + p @ v


m, l, o = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))
for j in range(0, 12, 3):
    m, l, o = broken(m, l, o, S[:, j : j + 3], V[j : j + 3])
wrong_rows = [i for i in range(4) if not close((o / l[:, None])[i], dense[i])]
first_block_holds_the_maximum = [i for i in range(4) if S[i].argmax() < 3]
print("wrong rows:", wrong_rows, " maximum already in the first block:", first_block_holds_the_maximum)

# %% [markdown]
# <details><summary>Answer</summary>
#
# A row whose largest score sits in the first block never rescales, and the fault stays hidden there. A test with one
# such row would pass. That is why this project's tests draw many rows, and plant faults to see them caught.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against the dense result, here and for rows
# that the notebook did not look at.

# %%
state = online_softmax.SoftmaxState.reset(4, 2)
for s_block, v_block in blocks:
    state = state.update(s_block, v_block)
ours = (np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2)))
for s_block, v_block in blocks:
    ours = update(*ours, s_block, v_block)
verdict("update here = SoftmaxState.update", all(map(close, ours, (state.m, state.l, state.o))))
halves = [online_softmax.SoftmaxState(*p) for p in (parts[0], merge(parts[1], parts[2]))]
joined = halves[0].merge(halves[1])
by_hand = merge(parts[0], merge(parts[1], parts[2]))
verdict("merge here = SoftmaxState.merge", all(map(close, by_hand, (joined.m, joined.l, joined.o))))
verdict("the package = the dense result", close(state.finalize()[0], dense))

# %%
rng = np.random.default_rng(1)
for size in (1.0, 30.0, 1000.0):
    S, V = size * rng.standard_normal((50, 37)), rng.standard_normal((37, 5))
    S[3], S[4, :20], S[5, 20:] = -np.inf, -np.inf, -np.inf
    cut = [(S[:, j : j + 7], V[j : j + 7]) for j in range(0, 37, 7)]
    o, _ = online_softmax.incremental(cut).finalize()
    verdict(f"scores of size {size:g}, ragged blocks, an empty row", close(o, safe_softmax(S) @ V))
two = online_softmax.two_blocks(S[6:, :20], S[6:, 20:], V[:20], V[20:])
verdict("the paper's two-block formulas", close(two, (safe_softmax(S) @ V)[6:]))

# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)
