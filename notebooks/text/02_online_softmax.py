# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)

# %% [markdown]
# # 02 · Online softmax
#
# **Can softmax be finished before all scores are known?**
#
# Softmax divides by a sum over the whole row, and before that it subtracts the maximum of the whole row. So it seems to
# need all scores first. It does not. A row has to remember only d + 2 numbers, however many keys it has seen.
#
# After this notebook you can
#
# - take in the keys of a row one block after the other, and end with the exact result,
# - say by which factor old sums must shrink when a larger score arrives, and why one factor is enough,
# - join two half-finished results.
#
# *Time: 30 minutes. Hardware: any laptop, NumPy alone. Before this: [01 · Naive
# attention](01_naive_attention.ipynb).*

# %% tags=["hide-input"]
from functools import reduce
from itertools import permutations

import numpy as np

from fa2_lab.plots import merge_orders, rescaling
from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference.naive import logsumexp, safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Four keys, of which two have arrived
#
# One query has four scores: log 1, log 3, log 4 and log 8. Their exponentials are 1, 3, 4 and 8, with the sum 16. The
# values of the four keys are 8, 0, 4 and 2. So the output is (1 · 8 + 3 · 0 + 4 · 4 + 8 · 2) / 16 = 2.5: a sum of values,
# each times its exponential, divided by the sum of the exponentials.
#
# Now suppose that only the first two keys are known. The maximum is $m = \log 3$. Relative to it the exponentials are
# $e^{\log 1 - \log 3} = 1/3$ and 1. Then
#
# - $\ell$ is the sum of these exponentials (in code it is written `l`): 4/3,
# - $o$ is the sum of the values, each multiplied by its exponential: $\frac{1}{3} \cdot 8 + 1 \cdot 0 = 8/3$.
#
# The quotient $o / \ell = 2$ is the right answer for these two keys. We call $m$, $\ell$ and $o$ the *state* of the row.

# %% [markdown]
# ## Two more keys, and a larger maximum
#
# Now log 4 and log 8 arrive. The new maximum is log 8. The old exponentials are relative to log 3, the new ones to log 8.
# They cannot be added until both are relative to the same maximum.
#
# **Predict.** The old keys are gone: only $m$, $\ell$ and $o$ are left of them. What has to be done to $\ell$ and $o$?
#
# - ☐ multiply both by 8/3, since the maximum grew
# - ☐ multiply both by 3/8
# - ☐ multiply $\ell$ by 3/8; $o$ holds values, not exponentials, and stays
#
# <details><summary>Answer</summary>
#
# **multiply both by 3/8.** $e^{s - \log 8} / e^{s - \log 3} = e^{\log 3 - \log 8} = 3/8$, whatever s is. All terms of
# $\ell$ and of $o$ contain one such exponential, so all need the same factor, and the sums can be multiplied in their
# place. So $\ell = \frac{3}{8} \cdot \frac{4}{3} + \frac{1}{2} + 1 = 2$, $o = \frac{3}{8} \cdot \frac{8}{3} + \frac{1}{2}
# \cdot 4 + 1 \cdot 2 = 5$, and $o / \ell = 2.5$.
# </details>

# %% tags=["hide-input"]
show(rescaling.draw(**rescaling.data()))

# %% [markdown]
# Each box is the term of one key. (Key 1 has the value 0, so its box in $o$ has no width.) All old boxes shrink alike, then
# the new keys' boxes are added. Whenever the maximum moves, $\ell$ and $o$ are *rescaled*: multiplied by the factor
# $\alpha = e^{m_{old} - m_{new}}$.

# %% [markdown]
# ## A whole row, block by block
#
# **Build.** `update` takes the state of $B_r$ rows, their scores `s` with $B_c$ new keys, and the values `v` of these keys.
# It returns the new $m$, $\ell$ and $o$. Each row has its own $m$ and $\ell$. Before the first key $m = -\infty$, $\ell = 0$
# and $o = 0$.


# %%
def update(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    ...


# %% tags=["hide-input"]
def after(S, V):  # the state after all of these keys, in one go
    m = S.max(axis=1)
    p = np.exp(S - m[:, None])
    return m, p.sum(axis=1), p @ V


def case(words, S, V, n):  # n keys have been seen
    nothing = np.full(len(S), -np.inf), np.zeros(len(S)), np.zeros((len(S), V.shape[1]))
    old = after(S[:, :n], V[:n]) if n else nothing
    return Case(words, (*old, S[:, n:], V[n:]), after(S, V))


rng = np.random.default_rng(0)
S, V = 3 * rng.standard_normal((4, 12)), rng.standard_normal((12, 2))
four, values = np.log([[1.0, 3.0, 4.0, 8.0]]), np.array([[8.0], [0.0], [4.0], [2.0]])
check(
    update,
    case("the four keys above. By what do the old ℓ and o shrink, and what is added?", four, values, 2),
    case("four rows meet their first block. Has each its own maximum, and how does (B_r,) multiply (B_r, d)?", S, V, 0),
    case("the largest score came first, so m must stay. Which maximum do the new terms use?", np.sort(S)[:, ::-1], V, 3),
    names=("m", "ℓ", "o"),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def update(m, l, o, s, v):
#     m_new = np.maximum(m, s.max(axis=1))
#     p = np.exp(s - m_new[:, None])  # (B_r, B_c)
#     alpha = np.exp(m - m_new)  # 1 if the maximum did not change
#     return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * o + p @ v
# ```
# </details>
#
# The package has it as `SoftmaxState.update`. [Assignment 1](assignments/1_online_softmax.ipynb) takes up all of this
# chapter, and a test of your own. (Test many rows: where the largest score comes in the first block, $\alpha$ is 1 ever
# after, and a forgotten $\alpha$ does not show.)

# %% tags=["nbval-ignore-output", "hide-input"]
live("softmax")

# %% [markdown]
# **In the live piece** drag a score above the line m and step over its block: everything before it shrinks by one factor.
#
# **In the still picture** (on GitHub) the grid has α for each row and block; the curves below are row 2. At the border
# between two blocks ℓ and o shrink if a larger score has come, and in the middle of a block its terms are added.
#
# Every exponential lies between 0 and 1, because m is subtracted in every block. So nothing overflows. And after every
# block $o / \ell$ is the exact answer for the keys so far.

# %% [markdown]
# ## A row that has seen no key
#
# In chapter 04 a *mask* hides some keys. A word, for example, must not see the words after it. A hidden key has the score
# $-\infty$, since $e^{-\infty} = 0$. Sometimes all keys of a block are hidden from a row.
#
# **Predict.** A row's m is still $-\infty$, and a block arrives whose scores are all $-\infty$. What does the solution of
# `update` add to $\ell$?
#
# - ☐ 0, as it should
# - ☐ 1 for each key
# - ☐ not a number
#
# <details><summary>Answer</summary>
#
# **not a number.** It computes $e^{s - m_{new}}$, and $-\infty - (-\infty)$ is NaN. So is $\alpha = e^{m - m_{new}}$. That
# spoils every later block of the row.
# </details>
#
# If $m_{new}$ is $-\infty$, the package uses 0 in place of it, in p and in $\alpha$: $e^{-\infty - 0} = 0$. At the end it
# takes $\ell = 1$ in place of 0 for $O = o / \ell$ and for the logsumexp of chapter 01, $L = m + \log \ell$. So a row
# without keys has O = 0 and L = $-\infty$.

# %% [markdown]
# ## Can two workers share a row?
#
# Let two workers take one half of the keys each. Each ends with its own $(m, \ell, o)$. To join them, bring both to the
# larger maximum $m = \max(m_a, m_b)$ and add:
#
# $$\begin{aligned} \ell &= e^{m_a - m}\, \ell_a + e^{m_b - m}\, \ell_b \\ o &= e^{m_a - m}\, o_a + e^{m_b - m}\, o_b \end{aligned}$$
#
# A part with a smaller maximum shrinks. $e^m \ell$ is the plain sum $\sum e^s$ of a part. Multiplied by $e^m$, the
# formula says $e^m \ell = e^{m_a} \ell_a + e^{m_b} \ell_b$, and so for $o$: plain sums are added. Addition does not care about order and grouping, except for rounding. Here
# three parts of unequal length are joined. S (4 × 12) and V (12 × 2) are random, as in the check of `update`. `merge` is the
# formula (and, if both parts are still empty, uses 0 in place of m = −∞, as `update` does), and `finalize` returns $O = o / \ell$ and L:

# %%
empty = SoftmaxState.reset(4, 2)  # 4 rows, no key seen, d = 2: where each part starts
plain = safe_softmax(S) @ V
cuts = slice(0, 5), slice(5, 6), slice(6, 12)
parts = [empty.update(S[:, keys], V[keys]) for keys in cuts]
O, L = reduce(SoftmaxState.merge, parts).finalize()
print("row 0, merged:", O[0].round(9), " plain softmax:", plain[0].round(9))

# %% tags=["hide-input"]
show(merge_orders.draw(**merge_orders.data()))

# %% [markdown]
# A loop, a tree and two workers join the same eight blocks. (Chapter 07 explains warps, 14 decoding.) A loop keeps one
# state, and each `update` is a merge with the state of one block. A tree keeps one for each leaf. In return many workers can
# compute the leaves at the same time.

# %% [markdown]
# ## Is (O, L) enough?
#
# **Predict.** A worker has finished. It kept the output $O = o / \ell$ and $L = m + \log \ell$, and forgot $m$, $\ell$ and
# $o$. Can its result still be merged with another?
#
# - ☐ no, the division cannot be undone without $\ell$
# - ☐ only if both parts had the same maximum
# - ☐ yes, exactly
#
# <details><summary>Answer</summary>
#
# **yes, exactly.** The merge needs only two products: $e^m \ell$, the plain sum $\sum e^s$, and $e^m o$, which is
# $\sum e^s v$. The first is $e^L$, the second $e^L O$. So $(L, 1, O)$ is a state that stands for $(m, \ell, o)$, though L is
# no maximum: any reference will do.
# </details>

# %% [markdown]
# ## Recap
#
# - The state of a row: $m$, the largest score; $\ell = \sum e^{s - m}$; $o = \sum e^{s - m}\, v$.
# - New keys: multiply $\ell$ and $o$ by $\alpha = e^{m_{old} - m_{new}}$, then add the new terms.
# - Two states: shrink the one with the smaller maximum, then add. Order and grouping do not matter.
# - At the end $O = o / \ell$ and $L = m + \log \ell$. (O, L) is itself a state.
# - A row without keys: O = 0, L = $-\infty$.

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
joined = [reduce(SoftmaxState.merge, order).finalize()[0] for order in permutations(parts)]
verdict("six orders of the parts = plain softmax", all(close(x, plain) for x in joined))
(O_a, L_a), (O_b, L_b) = parts[0].finalize(), parts[1].merge(parts[2]).finalize()
both = SoftmaxState(L_a, np.ones(4), O_a).merge(SoftmaxState(L_b, np.ones(4), O_b))
verdict("finished parts, merged from O and L = plain softmax", close(both.finalize()[0], plain))
S[3] = -np.inf
O, L = empty.update(S[:, :5], V[:5]).update(S[:, 5:], V[5:]).finalize()
verdict("the same with a row that sees no key", close(O, safe_softmax(S) @ V) and close(L, logsumexp(S)))

# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)
