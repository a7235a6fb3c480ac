# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)

# %% [markdown]
# # 02 · Online softmax
#
# **Can softmax be finished before all scores are known?**
#
# Softmax divides by a sum over the whole row. Before that it subtracts the maximum of the whole row. So it seems that
# nothing can be finished until the last score has arrived. This chapter shows that it can: three small things per row are
# enough to go on with, and to stop at any time. FlashAttention rests on this.
#
# After this notebook you can
#
# - take in the keys of a row one block after the other, and end with the exact result,
# - say by which factor old sums must shrink when a larger score arrives, and why one factor is enough,
# - join two half-finished results, in any order.
#
# *Time: 40 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [01 · Naive
# attention](01_naive_attention.ipynb).*

# %%
from functools import reduce
from itertools import permutations

import numpy as np

from fa2_lab.plots import merge_orders, rescaling, state_stream
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference import online_softmax
from fa2_lab.reference.naive import logsumexp, safe_softmax
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Four keys, in your head
#
# One query has four scores: log 1, log 3, log 4 and log 8. Their exponentials are 1, 3, 4 and 8, with the sum 16. So the
# weights are sixteenths.
#
# **Predict.** The values of the four keys are 8, 0, 4 and 2. What is the output?

# %% tags=["hide-input"]
s = np.log([1.0, 3.0, 4.0, 8.0])
v = np.array([8.0, 0.0, 4.0, 2.0])
weights = safe_softmax(s)
print("weights in sixteenths:", np.round(16 * weights, 6))
print(f"output: {weights @ v:.6g}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **2.5.** (1 · 8 + 3 · 0 + 4 · 4 + 8 · 2) / 16 = 40 / 16 = 2.5.
# </details>
#
# **Takeaway.** The output is a quotient: the sum of the values, each times its exponential, divided by the sum of the
# exponentials.

# %% [markdown]
# ## The first two keys arrive alone
#
# Suppose that only the first two scores are known, log 1 and log 3. We do everything that softmax does, as if these were
# all. First the maximum, $m = \log 3$. Relative to it the exponentials are $e^{\log 1 - \log 3} = 1/3$ and 3/3. Then
#
# - $\ell$ is the sum of these exponentials (in code it is written `l`),
# - $o$ is the sum of the values, each multiplied by its exponential.
#
# **Predict.** What are $\ell$ and $o$ for the values 8 and 0?

# %% tags=["hide-input"]
m1 = s[:2].max()
p1 = np.exp(s[:2] - m1)
l1 = p1.sum()
o1 = p1 @ v[:2]
print(f"m = log {np.exp(m1):.6g}   l = {l1:.6g}   o = {o1:.6g}   o / l = {o1 / l1:.6g}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **4/3 and 8/3.** $\ell = 1/3 + 1$, and $o = \frac{1}{3} \cdot 8 + 1 \cdot 0$.
# </details>
#
# The quotient $o / \ell = 2$ is the right answer for these two keys.
#
# **Takeaway.** The *state* of a row is $m$, $\ell$ and $o$. It is all that we need to know about the keys so far.

# %% [markdown]
# ## Two more keys, and a larger maximum
#
# Now log 4 and log 8 arrive. The new maximum is log 8. But the old exponentials were taken relative to log 3, and the new
# ones are taken relative to log 8. They cannot be added until both are relative to the same maximum.
#
# **Predict.** The old $\ell$ contains $e^{s - \log 3}$ and should contain $e^{s - \log 8}$. By which factor must it be
# multiplied?

# %% tags=["hide-input"]
m2 = max(m1, s[2:].max())
alpha = np.exp(m1 - m2)
p2 = np.exp(s[2:] - m2)
l2 = alpha * l1 + p2.sum()
o2 = alpha * o1 + p2 @ v[2:]
print(f"alpha = {alpha:.6g}   l = {l2:.6g}   o = {o2:.6g}   o / l = {o2 / l2:.6g}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **3/8.** $e^{s - \log 8} / e^{s - \log 3} = e^{\log 3 - \log 8} = 3/8$, whatever s is. So
# $\ell = \frac{3}{8} \cdot \frac{4}{3} + \frac{1}{2} + 1 = 2$, and
# $o = \frac{3}{8} \cdot \frac{8}{3} + \frac{1}{2} \cdot 4 + 1 \cdot 2 = 5$.
# </details>
#
# All terms of $\ell$ and of $o$ need the same factor, $\alpha = e^{m_{old} - m_{new}}$. So it can be applied to the
# sums, and the individual terms are not needed any more. With the new terms $\ell = 2$ and $o = 5$. The quotient is
# 2.5, as it should be. In the picture each box is the term of one key. From the first bar to the second all boxes
# shrink alike; in the third the new keys' boxes are added.

# %%
show(rescaling.draw(**rescaling.data()))

# %% [markdown]
# **Takeaway.** When the maximum moves, $\ell$ and $o$ are *rescaled*: multiplied by one factor,
# $\alpha = e^{m_{old} - m_{new}}$.

# %% [markdown]
# ## A whole row, block by block
#
# Here is the same step for a block of rows at once. Each row has its own $m$ and $\ell$. `s` is a block of scores and `v`
# the values of the same keys. Before the first key $m = -\infty$, $\ell = 0$ and $o = 0$. Then
# $\alpha = e^{-\infty - m_{new}} = 0$, and the first block starts afresh.


# %%
def update(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    m_new = np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_new[:, None])  # (B_r, B_c)
    alpha = np.exp(m - m_new)  # 1 if the maximum did not change
    return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * o + p @ v


# %% [markdown]
# **Predict.** After 6 of 12 keys we divide $o$ by $\ell$. Is that an estimate of the final answer, or an exact answer to
# a smaller question?

# %% tags=["hide-input"]
rng = np.random.default_rng(0)
S, V = 3 * rng.standard_normal((4, 12)), rng.standard_normal((12, 2))
m, l, o = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))
for n in (3, 6, 9, 12):
    m, l, o = update(m, l, o, S[:, n - 3 : n], V[n - 3 : n])
    answer = safe_softmax(S[:, :n]) @ V[:n]  # attention over the first n keys
    print(f"after {n:2} keys, row 0: o / l = {(o / l[:, None])[0].round(6)}, plain softmax says {answer[0].round(6)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Exact.** It is the attention over the first 6 keys. After 12 keys it is the attention over all of them.
# </details>
#
# Every exponential lies between 0 and 1, because m is subtracted in every block. So nothing overflows, as in the safe
# softmax of chapter 01 ([picture](../figures/three_softmaxes.svg)).
#
# In the picture ten blocks stream past four rows. Follow row 2. At the border between two blocks, ℓ and o shrink if a
# larger score has come; in the middle of a block its terms are added. Where m does not step up, $\alpha$ is 1. If the
# largest score of a row comes first, $\alpha$ is 1 in every later step.

# %%
show(state_stream.draw(**state_stream.data()))

# %% [markdown]
# Now do it yourself, on one row. Drag a score above the line m and step over its block: everything before it shrinks by one
# factor. Hide all keys, and see what the last step must do.

# %% tags=["nbval-ignore-output", "hide-input"]
live("softmax")

# %% [markdown]
# **Takeaway.** Softmax can be finished at any time for the keys seen so far. The state does not grow with their number.

# %% [markdown]
# ## A row that has seen no key
#
# In chapter 04 a row may not see every key: a word, for example, not the words after it (a *mask*). A hidden key has
# the score $-\infty$, since $e^{-\infty} = 0$. Sometimes all keys of a block are hidden from a row.
#
# **Predict.** A row's m is still $-\infty$, and a block arrives whose scores are all $-\infty$. `update` computes
# $e^{s - m_{new}}$. What is $-\infty - (-\infty)$?

# %% tags=["hide-input"]
nothing = np.full((1, 2), -np.inf)
with np.errstate(invalid="ignore"):
    m, l, o = update(np.full(1, -np.inf), np.zeros(1), np.zeros((1, 1)), nothing, np.ones((2, 1)))
print("update here: l =", l.item(), " o =", o.item())
safe = online_softmax.SoftmaxState.reset(1, 1).update(nothing, np.ones((2, 1)))
print(
    "the package: l =", safe.l.item(), " o =", safe.o.item(), " at the end O, L =", [x.item() for x in safe.finalize()]
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Not a number.** NaN, and it would spoil everything that follows.
# </details>
#
# The package subtracts 0 in place of $-\infty$, so that
# $e^{-\infty - 0} = 0$. At the end it divides by 1 in place of 0. Such a row gets O = 0, the sum of no values.
#
# **Takeaway.** A row without keys is a case to decide in advance: O = 0, and L = $-\infty$.

# %% [markdown]
# ## Can two workers share a row?
#
# So far one state took in all keys, one block after the other. Now let two workers take one half of the keys each.
# Neither knows the other's maximum. Each ends with its own $(m, \ell, o)$.
#
# **Predict.** The two states are to be joined. Which of them must shrink, that with the larger m or that with the
# smaller?


# %% tags=["hide-input"]
def merge(a, b):  # two states (m, l, o)
    m = np.maximum(a[0], b[0])
    alpha, beta = np.exp(a[0] - m), np.exp(b[0] - m)
    return m, alpha * a[1] + beta * b[1], alpha[:, None] * a[2] + beta[:, None] * b[2]


def state_of(keys):
    return update(np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2)), S[:, keys], V[keys])


parts = [state_of(slice(0, 5)), state_of(slice(5, 6)), state_of(slice(6, 12))]
orders = []  # o / l for each of the six orders
for order in permutations(parts):
    _, l, o = reduce(merge, order)
    orders.append(o / l[:, None])
apart = max(np.abs(x - orders[0]).max() for x in orders)
print(f"three parts joined in {len(orders)} orders: row 0 {orders[0][0].round(9)}, at most {apart:.12f} apart")
print("plain softmax:                     row 0", (safe_softmax(S) @ V)[0].round(9))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The one with the smaller m.** The other is multiplied by $e^0 = 1$. This is decided row by row.
# </details>
#
# With $m = \max(m_a, m_b)$ the merge is $\ell = e^{m_a - m} \ell_a + e^{m_b - m} \ell_b$, and the same for $o$. The
# merge adds the plain sums $e^m \ell$ and $e^m o$, so order and grouping do not matter, except for rounding.
#
# In the picture a loop, a tree and two separate workers join the same eight blocks. Look at the end of each: the results are
# the same. (The words in brackets name later chapters: 07 for warps, 06 and 14 for decoding, that is writing a text
# token by token.)
#
# A loop keeps one running state. A tree keeps one for each leaf. In return the leaves need nothing from each other, so
# many workers can compute them at the same time.

# %%
show(merge_orders.draw(**merge_orders.data()))

# %% [markdown]
# **Takeaway.** `update` is a merge with the state of one block. The same merge works in a loop (little memory) and in a tree
# (many workers at once).

# %% [markdown]
# ## Is (O, L) enough?
#
# A finished part has the output $O = o / \ell$ and the logsumexp of chapter 01, $L = m + \log \ell$. Its m and $\ell$
# are gone. Can two finished parts still be merged?
#
# **Predict.** Pretend that a finished part is a state with $m = L$ and $o = O$. What must its $\ell$ be, so that
# $L = m + \log \ell$ holds?

# %% tags=["hide-input"]
(m_a, l_a, o_a), (m_b, l_b, o_b) = parts[0], merge(parts[1], parts[2])
finished_a = (m_a + np.log(l_a), np.ones(4), o_a / l_a[:, None])  # m = L, l = 1, o = O
finished_b = (m_b + np.log(l_b), np.ones(4), o_b / l_b[:, None])
m, l, o = merge(finished_a, finished_b)
print("finished parts, merged: row 0", (o / l[:, None])[0].round(9), " L =", (m + np.log(l))[0].round(9))
print("plain softmax:          row 0", (safe_softmax(S) @ V)[0].round(9), " L =", logsumexp(S)[0].round(9))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **1.** $\log 1 = 0$. And $o / \ell = O / 1$ is right as well. Only two products matter: $e^m \ell$ is the plain sum
# $\sum e^s$, and $e^m o$ is $\sum e^s v$. These two are the same for $(m, \ell, o)$ and for $(L, 1, O)$.
# </details>
#
# **Takeaway.** An output and its logsumexp are a state. One number per row, L, does the work of m and $\ell$.

# %% [markdown]
# ## Recap
#
# - The state of a row: $m$, the largest score; $\ell = \sum e^{s - m}$; $o = \sum e^{s - m}\, v$.
# - New keys: multiply $\ell$ and $o$ by $\alpha = e^{m_{old} - m_{new}}$, then add the new terms.
# - Two states: shrink the one with the smaller maximum, then add. Order and grouping do not matter.
# - At the end $O = o / \ell$ and $L = m + \log \ell$. (O, L) is itself a state.
# - A row without keys: O = 0, L = $-\infty$.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** The logsumexp of a million scores, in blocks of 1,000. A block's state is the pair $(m, \ell)$, without
# $o$. Write the merge of two such pairs in place of the `...`.
#
# <details><summary>Hint</summary>
#
# Bring both sums to the larger of the two maxima, then add them. m and $\ell$ are plain numbers here.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# m = max(a[0], b[0])
# return m, np.exp(a[0] - m) * a[1] + np.exp(b[0] - m) * b[1]
# ```
# </details>


# %%
def merge_pairs(a, b):  # (m, l) and (m, l) -> (m, l)
    return ...


# %% tags=["hide-input"]
scores = np.random.default_rng(2).standard_normal((1000, 1000))  # one block to a row
pieces = [(block.max(), np.exp(block - block.max()).sum()) for block in scores]
low, high = (np.log(3.0), 4 / 3), (np.log(8.0), 3 / 2)  # the two halves of the four keys
if merge_pairs(low, high) is ...:
    print("not written yet")
elif not close(merge_pairs(low, high), (np.log(8.0), 2.0)):
    print("not yet: the halves above give m = log 8 and l = 2, yours", merge_pairs(low, high))
elif not close(merge_pairs(low, high), merge_pairs(high, low)):
    print("not yet: right only if the larger maximum is the second; also the first may be the larger")
else:
    m_all, l_all = reduce(merge_pairs, pieces)
    print("right" if close(m_all + np.log(l_all), logsumexp(scores.ravel())) else "not yet: some pair does not shrink")

# %% [markdown]
# **2. Find the bug.** The step below forgets $\alpha$ in one place. Is its result wrong in every row? Write the letter
# of your answer with quotation marks, for example `"A"`, in place of the `...`:
#
# - `A`: in every row,
# - `B`: in every row, except those whose largest score is in the first block,
# - `C`: in every row, except those whose largest score is in the last block.
#
# Then mend the step and run both cells again.
#
# <details><summary>Hint</summary>
#
# When is $\alpha = 1$ in every step?
# </details>
# <details><summary>Solution</summary>
#
# B. If the largest score is in the first block, nothing must ever shrink. A test with one such row would pass. So tests of
# softmax need many rows. The right line returns `alpha * l + p.sum(axis=1)`.
# </details>

# %%
answer = ...


def broken(m, l, o, s, v):
    m_new = np.maximum(m, s.max(axis=1))
    p = np.exp(s - m_new[:, None])
    alpha = np.exp(m - m_new)
    return m_new, l + p.sum(axis=1), alpha[:, None] * o + p @ v


# %% tags=["hide-input"]
m, l, o = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))
for j in range(0, 12, 3):
    m, l, o = broken(m, l, o, S[:, j : j + 3], V[j : j + 3])
error = np.abs(o / l[:, None] - safe_softmax(S) @ V).max(axis=1)
if answer is ...:
    print("not answered yet")
else:
    print("right" if answer == "B" else "not yet: look at the rows")
    for i in range(4):
        print(f"row {i}: error {error[i]:.3f}, largest score in block {S[i].argmax() // 3} of 0 to 3")

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and the package against plain softmax, also for rows that the
# notebook did not look at.

# %% tags=["hide-input"]
state, ours = online_softmax.SoftmaxState.reset(4, 2), (np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2)))
for j in range(0, 12, 3):
    state, ours = state.update(S[:, j : j + 3], V[j : j + 3]), update(*ours, S[:, j : j + 3], V[j : j + 3])
verdict("update here = SoftmaxState.update", all(map(close, ours, (state.m, state.l, state.o))))
first, second = parts[0], merge(parts[1], parts[2])
joined = online_softmax.SoftmaxState(*first).merge(online_softmax.SoftmaxState(*second))
verdict("merge here = SoftmaxState.merge", all(map(close, merge(first, second), (joined.m, joined.l, joined.o))))
verdict("six orders of the parts = plain softmax", all(close(x, safe_softmax(S) @ V) for x in orders))
rng = np.random.default_rng(1)
for size in (1.0, 1000.0):
    S_r, V_r = size * rng.standard_normal((50, 37)), rng.standard_normal((37, 5))
    S_r[3], S_r[4, :20], S_r[5, 20:] = -np.inf, -np.inf, -np.inf
    cut = [(S_r[:, j : j + 7], V_r[j : j + 7]) for j in range(0, 37, 7)]
    for name, way in (("one state", online_softmax.incremental), ("one for each block", online_softmax.rabe_staats)):
        o, L = way(cut).finalize()
        right = close(o, safe_softmax(S_r) @ V_r) and close(L, logsumexp(S_r))
        verdict(f"{name}: scores of size {size:g}, ragged blocks, an empty row", right)

# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)
