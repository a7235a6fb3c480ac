# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)

# %% [markdown]
# # 02 · Online softmax
#
# **Can softmax be finished before all scores are known?**
#
# Softmax subtracts the maximum of a whole row, and then divides by a sum over the whole row. It seems to need all
# scores before it can begin, but in fact it does not. It is enough to remember d + 2 numbers per row, no matter how
# many keys have arrived. The method is called *online softmax*, because you can ask for the result at any time while
# keys are still arriving.
#
# After this notebook you can
#
# - process a row's keys one block after another, and still get the exact result,
# - find the factor by which old sums must shrink when a larger score arrives, and explain why one factor is enough,
# - merge two partial results.
#
# *Time: 40 minutes, including the function to write. Hardware: any laptop with NumPy. Before this: [01 · Naive
# attention](01_naive_attention.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
from functools import reduce

import numpy as np

from fa2_lab.plots.live import live
from fa2_lab.plots.show import show
from fa2_lab.reference.naive import safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_studio.book.build import Case, check

# %% [markdown]
# ## What goes wrong if the maximum comes late?
#
# Our example is one query with four scores, log 1, log 3, log 4 and log 8. Their exponentials are 1, 3, 4 and 8, and
# the values of the four keys are 8, 0, 4 and 2. The output is therefore (1 · 8 + 3 · 0 + 4 · 4 + 8 · 2) / 16 = 2.5. We
# call this query the *1-3-4-8 row*, and we will use it until chapter 05.
#
# Now suppose that the keys arrive two at a time. We try the obvious ways to combine them first:

# %%
s, v = np.log([1.0, 3.0, 4.0, 8.0]), np.array([8.0, 0.0, 4.0, 2.0])
halves = slice(0, 2), slice(2, 4)


def safe_sums(s, v):  # the sum of exponentials, and the sum of values, each times its exponential
    e = np.exp(s - s.max())
    return e.sum(), e @ v


l, o = safe_sums(s, v)
(l_a, o_a), (l_b, o_b) = (safe_sums(s[half], v[half]) for half in halves)
print(f"all four keys at once:                  {o / l:.4f}")
print(f"the mean of the two halves' outputs:    {(o_a / l_a + o_b / l_b) / 2:.4f}")
print(f"both pairs of sums added, then divided: {(o_a + o_b) / (l_a + l_b):.4f}")
late = np.append(s[:3], 800)  # the last score is not log 8, but 800
with np.errstate(over="ignore", invalid="ignore"):
    e = np.exp(late - late[:2].max())
    print(
        f"the first half's maximum for all keys:  {e @ v / e.sum():.4f}, if the last score is 800"
    )

# %% [markdown]
# None of these three attempts is right. The mean of the two outputs gives both halves the same weight, although most of
# the weight belongs to the second half. The sums cannot be added, because each half has subtracted its own maximum, log
# 3 in the first half and log 8 in the second. And if we subtract the first half's maximum from all scores, the
# exponential of a much larger score that arrives late overflows. This chapter is about the one multiplication that is
# missing.

# %% [markdown]
# ## Four keys, two of which have arrived
#
# Suppose that only the first two keys are known. The maximum of their scores is $m = \log 3$, and relative to this
# maximum, the exponentials are $e^{\log 1 - \log 3} = 1/3$ and 1. From these, we compute two sums:
#
# - $\ell$ (written `l` in code) is the sum of these exponentials, which is 4/3.
# - $o$ is the sum of the values, each multiplied by its exponential, which is $\frac{1}{3} \cdot 8 + 1 \cdot 0 = 8/3$.
#
# The quotient $o / \ell = 2$ is the right output for these two keys. We call $m$, $\ell$ and $o$ the *state* of the
# row.

# %% [markdown]
# ## Two more keys, and a larger maximum
#
# Now log 4 and log 8 arrive, and the new maximum is log 8. The old exponentials are relative to log 3, and the new ones
# are relative to log 8, so they cannot be added until all are relative to the same maximum.
#
# **Predict.** The old keys are gone, and only their $m$, $\ell$ and $o$ are left. What do we have to do to $\ell$ and
# $o$?
#
# - ☐ multiply only $\ell$ by 3/8, since $o$ holds values and not exponentials
# - ☐ multiply only $\ell$ by 8/3, since the maximum grew
# - ☐ multiply both by 3/8
# - ☐ multiply both by 8/3
#
# <details><summary>Answer</summary>
#
# **multiply both by 3/8.** For any s, $e^{s - \log 8} / e^{s - \log 3} = e^{\log 3 - \log 8} = 3/8$. Every term of
# $\ell$ and of $o$ contains one such exponential, so all terms need the same factor, and it is enough to multiply the
# two sums. That gives $\ell = \frac{3}{8} \cdot \frac{4}{3} + \frac{1}{2} + 1 = 2$, $o = \frac{3}{8} \cdot
# \frac{8}{3} + \frac{1}{2} \cdot 4 + 1 \cdot 2 = 5$, and $o / \ell = 2.5$.
# </details>

# %% tags=["hide-input"]
show("rescaling")

# %% [markdown]
# Each box is one key's term. Keys are numbered from 0, so key 1 is the second one. Its value is 0, so its box in $o$
# has no width. All old boxes shrink by the same factor, and then the boxes of the new keys are added. Whenever the
# maximum changes, $\ell$ and $o$ are *rescaled*, which means that they are multiplied by $\alpha = e^{m_{old} -
# m_{new}}$.

# %% [markdown]
# ## A whole row, block by block
#
# **Build.** `update` takes the state of $B_r$ rows, their scores `s` with $B_c$ new keys, and the values `v` of these
# keys. It returns the new $m$, $\ell$ and $o$, where each row has its own $m$ and $\ell$. Before the first key, $m =
# -\infty$, $\ell = 0$ and $o = 0$. All new scores are finite for now.

# %%
def update(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
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
check(
    update,
    case("the 1-3-4-8 row. By which factor do the old ℓ and o shrink, and what is added?",
         s[None], v[:, None], 2),
    case("four rows meet their first block. Does each row have its own maximum, and how does "
         "(B_r,) multiply (B_r, d)?", S, V, 0),
    case("the largest score came first, so m must stay. Which maximum do the new terms use?",
         np.sort(S)[:, ::-1], V, 3),
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
# In the package, this function is `SoftmaxState.update`. [Assignment 1](assignments/1_online_softmax.ipynb) covers all
# of this chapter, and asks you to write a test yourself. Use many rows in that test. If a row's largest score comes in
# the first block, $\alpha$ is 1 from then on, so that row cannot reveal a forgotten $\alpha$.

# %% tags=["nbval-ignore-output", "hide-input"]
live("softmax")

# %% [markdown]
# Because m is subtracted in every block, every exponential is between 0 and 1, and nothing overflows. After every
# block, $o / \ell$ is the exact output for the keys seen so far.
#
# Does the rescaling cost accuracy? The next cell computes 256 outputs in float32 for N = 2,048 and d = 128. The first
# time, 32 blocks of keys arrive one after the other, so each row may be rescaled 31 times. The second time, all keys
# arrive at once, but P and O are rounded to bf16, as in a GPU kernel:

# %% tags=["hide-input"]
def bf16(x):  # rounded to the nearest number that has only the first 16 of the 32 bits
    return ((x.astype(np.float32).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


draw = np.random.default_rng(0)
keys, values = draw.standard_normal((2, 2048, 128)).astype(np.float32)
scores = draw.standard_normal((256, 128)).astype(np.float32) @ keys.T / np.float32(128**0.5)
truth = safe_softmax(scores.astype(float)) @ values.astype(float)
state = SoftmaxState.empty(256, 128)
state = SoftmaxState(*(x.astype(np.float32) for x in (state.m, state.l, state.o)))
for block in np.split(np.arange(2048), 32):
    state = state.update(scores[:, block], values[block])
e = np.exp(scores - scores.max(axis=1, keepdims=True))
found = state.finalize()[0], bf16(bf16(e) @ values / e.sum(axis=1, keepdims=True))
rescaled, rounded = (float(np.linalg.norm(O - truth) / np.linalg.norm(truth)) for O in found)
print(f"relative error: 32 blocks in float32 {rescaled:.4f}; at once, but P and O in bf16 "
      f"{rounded:.4f}")

# %% [markdown]
# The rescaling happens in float32, and four decimals don't show its error. The rounding alone causes an error of
# 0.0023. On an H200, six kernels with online softmax had the same error of 0.0023 in bf16 (random inputs, N = 2,048,
# d = 128), so rounding to bf16 accounts for nearly all of it.
#
# <details><summary>How does the error grow with N and d?</summary>
#
# The next table repeats the experiment for other sizes, with 64 queries, blocks of 64 keys, and normal random inputs.
# In the last two rows, Q, K and V have been rounded to bf16 as well, and the error is the distance from exact attention
# over the rounded inputs. (The recorded kernels were measured in the same way.)
#
# | relative error of O | N = 512 | N = 2,048 | N = 8,192 | N = 32,768 |
# | --- | ---: | ---: | ---: | ---: |
# | float32, d = 64 | 3 · 10⁻⁷ | 3 · 10⁻⁷ | 4 · 10⁻⁷ | 6 · 10⁻⁷ |
# | float32, d = 128 | 5 · 10⁻⁷ | 4 · 10⁻⁷ | 5 · 10⁻⁷ | 7 · 10⁻⁷ |
# | P and O in bf16, d = 64 | 0.0021 | 0.0022 | 0.0023 | 0.0022 |
# | P and O in bf16, d = 128 | 0.0022 | 0.0022 | 0.0023 | 0.0023 |
#
# In float32, the error comes from the sums. A score is a sum of d products, and ℓ and o are sums of N terms, so the
# error tends to grow with both sizes. It grows only slowly, because rounding errors have random signs and partly
# cancel, and between N = 512 and 2,048 the growth is smaller than the noise of one random draw. In bf16, the error
# hardly grows. Every weight has its own relative error, and because these errors are independent, they partly cancel in
# the sum. If the values have random signs, as here, the terms themselves cancel to the same degree, so the sum's
# relative error stays about as large as that of a single term. If all values have the same sign, it even shrinks. It is
# larger only if the terms happen to cancel more completely, so that the output is close to 0. Rounding O adds the same
# amount for every N and d.
#
# Only large scores change this picture. Merely rounding a score near 1,000 to float32 changes it by up to 3 · 10⁻⁵, and
# the sum of d products that gives the score adds several times as much. The relative error of the weight is as large as
# the whole error of its score.
# </details>

# %% [markdown]
# ## A row that has seen no key
#
# In chapter 04, a *mask* will hide some keys from a query, because, for example, a word must not see the words after
# it. A masked key gets a score of $-\infty$, so its exponential is $e^{-\infty} = 0$. Sometimes a mask hides all keys
# of a block from a row.
#
# **Predict.** A row's m is still $-\infty$ when a block arrives in which all of its scores are $-\infty$. What does the
# solution's `update` add to $\ell$?
#
# - ☐ 0, as it should
# - ☐ 1 for each key
# - ☐ not a number
#
# <details><summary>Answer</summary>
#
# **not a number.** The solution computes $e^{s - m_{new}}$, and $-\infty - (-\infty)$ is NaN. The same happens in
# $\alpha = e^{m - m_{new}}$, so $\ell$ and $o$ become NaN, and they stay NaN after every later block.
# </details>
#
# The fix is to use 0 in place of $m_{new}$ whenever $m_{new}$ is $-\infty$, both in p and in $\alpha$. Then
# $e^{-\infty - 0} = 0$, as it should be. Repair your `update` in this way, since the next chapters need it. The cell
# below checks it:

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
hidden, right = S.copy(), after(S, V)
hidden[1], right[0][1], right[1][1], right[2][1] = -np.inf, -np.inf, 0, 0
nothing = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))
check(update, Case("row 1 sees no key. What is −∞ − (−∞)?", (*nothing, hidden, V), right),
      names=("m", "ℓ", "o"))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def update(m, l, o, s, v):
#     m_new = np.maximum(m, s.max(axis=1))
#     shift = np.where(np.isneginf(m_new), 0, m_new)  # no key yet: not −∞ − (−∞)
#     p = np.exp(s - shift[:, None])  # (B_r, B_c)
#     alpha = np.exp(m - shift)  # 1 if the maximum did not change
#     return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * o + p @ v
# ```
# </details>
#
# If $\ell$ is still 0 at the end, the package uses 1 in its place, both in $O = o / \ell$ and in chapter 01's
# logsumexp, $L = m + \log \ell$. A row that has seen no key thus has O = 0 and L = $-\infty$.

# %% [markdown]
# ## Can two workers share a row?
#
# Suppose that two workers, a and b, each take half of the keys, so that each ends up with its own $(m, \ell, o)$. To
# merge the two states, bring both to the larger maximum $m = \max(m_a, m_b)$, and then add them:
#
# $$\begin{aligned} \ell &= e^{m_a - m}\, \ell_a + e^{m_b - m}\, \ell_b \\ o &= e^{m_a - m}\, o_a + e^{m_b - m}\, o_b \end{aligned}$$
#
# In the 1-3-4-8 row, the second half alone has $m_b = \log 8$, $\ell_b = 3/2$ and $o_b = 4$. Multiplying the first
# half's sums by 3/8 gives $\ell = \frac{3}{8} \cdot \frac{4}{3} + \frac{3}{2} = 2$ and $o = \frac{3}{8} \cdot
# \frac{8}{3} + 4 = 5$, as before.
#
# Does it matter in which order the parts are merged, or which part is merged with which? To see that it does not, we
# multiply the first equation by $e^m$, which turns it into $e^m \ell = e^{m_a} \ell_a + e^{m_b} \ell_b$. For any part,
# $e^m \ell$ is the plain sum $\sum e^s$ over the part's keys, from which no maximum has been subtracted. For ℓ, then, a
# merge just adds plain sums, and the same is true for o. Apart from rounding, a sum does not depend on the order or
# grouping of its terms.
#
# The next cell merges three parts of different lengths, for a random S of 4 × 12 scores and a random V of 12 × 2
# values. `SoftmaxState` is the package's class for a state. `SoftmaxState.empty(4, 2)` returns the state of four rows
# before their first key, and `SoftmaxState.merge` implements the formula above. For two parts that are both empty, that
# formula would give NaN, so in that case `merge` uses 0 in place of m, as `update` does. `finalize` returns $O = o /
# \ell$ and L.

# %%
empty = SoftmaxState.empty(4, 2)  # each part starts from it
plain = safe_softmax(S) @ V
cuts = slice(0, 5), slice(5, 6), slice(6, 12)
parts = [empty.update(S[:, keys], V[keys]) for keys in cuts]
O, L = reduce(SoftmaxState.merge, parts).finalize()
print(f"row 0, merged: {O[0].round(9)}\nplain softmax: {plain[0].round(9)}")

# %% tags=["hide-input"]
show("merge_orders")

# %% [markdown]
# In this figure, a loop, a tree and two workers merge the same eight blocks. The state of one block has the block's own
# maximum as m, the sum of its exponentials as ℓ, and the sum of its weighted values as o. In the loop, one worker keeps
# one state, and each `update` is a merge with the state of one block. In the tree, each leaf keeps a state, which takes
# more room, but many workers can compute the leaves at the same time. This book needs all three: the loop in FA2
# (chapter 04), the tree when warps share a row (chapter 07), and the two workers when a model reads a long text for a
# single new token (*decoding*, chapter 14).

# %% [markdown]
# ## Is (O, L) enough?
#
# **Predict.** A worker has processed all of its keys. It kept the output $O = o / \ell$ and $L = m + \log \ell$, but
# threw away $m$, $\ell$ and $o$. Can its result still be merged with another worker's?
#
# - ☐ yes, exactly
# - ☐ no, the division cannot be undone without $\ell$
# - ☐ only if both parts had the same maximum
#
# <details><summary>Answer</summary>
#
# **yes, exactly.** The merge needs only the plain sums $\sum e^s = e^m \ell$ and $\sum e^s v = e^m o$. The first one is
# $e^L$, and because $o = \ell\,O$, the second is $e^L O$, so $(L, 1, O)$ is a state that can take the place of $(m,
# \ell, o)$, although L is not a maximum. Any reference value works in place of the maximum, as long as nothing
# overflows and not all exponentials become 0.
# </details>
#
# <details><summary>How far may the reference be from the largest score?</summary>
#
# Suppose that a row uses a value m that is not its maximum, for example because m is out of date. In float32, both
# directions have a limit.
#
# - **m is too small.** The largest exponential is then above 1, and it becomes infinite if m is 88.7 below the largest
#   score. The sum ℓ becomes infinite even earlier. With 8,192 equal scores, for example, the limit is 88.7 − log 8,192
#   = 79.7.
# - **m is too large.** All exponentials are then small, but this alone costs no accuracy, because a floating-point
#   number has the same relative accuracy down to $e^{-87.3}$, the smallest normal float32 number. Below that, numbers
#   lose digits, and some units of a GPU replace them with 0. We tested this in NumPy's float32 with the 256 outputs of
#   the experiment above (N = 2,048, d = 128). With m up to 88 above the largest score of each row, the relative error
#   of the outputs was less than 10⁻⁵. It was 19% with m 100 above the largest score, and with m 104 above it, all
#   exponentials were 0, so that o/ℓ was 0/0.
#
# The true maximum stays away from both limits. The exponentials that it turns into 0 belong to keys with a weight below
# $e^{-87}$, so they do not matter. If P is converted to fp16 for the next matmul, the limits are much closer, because
# fp16 numbers end at 65,504, or $e^{11.1}$, and they lose digits below $e^{-9.7}$. The numbers of bf16 reach as far as
# those of float32. Rung 22 in chapter 12a lets m lag behind the maximum on purpose.
# </details>

# %% [markdown]
# ## Recap
#
# - The state of a row consists of the largest score $m$ and the sums $\ell = \sum e^{s - m}$ and $o = \sum e^{s - m}\,
#   v$.
# - When new keys arrive, multiply $\ell$ and $o$ by $\alpha = e^{m_{old} - m_{new}}$, and then add the new terms.
# - To merge two states, rescale the one with the smaller maximum, and then add the two. Except for rounding, order and
#   grouping do not matter.
# - At the end, $O = o / \ell$ and $L = m + \log \ell$. The pair (O, L) is itself a state.
# - A row without keys has O = 0 and L = $-\infty$.

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
from itertools import permutations

from fa2_lab.records import load
from fa2_lab.reference.naive import logsumexp
from fa2_studio.book.verdicts import close, verdict

joined = [reduce(SoftmaxState.merge, order).finalize()[0] for order in permutations(parts)]
verdict("six orders of the parts agree with plain softmax", all(close(x, plain) for x in joined))
(O_a, L_a), (O_b, L_b) = parts[0].finalize(), parts[1].merge(parts[2]).finalize()
both = SoftmaxState(L_a, np.ones(4), O_a).merge(SoftmaxState(L_b, np.ones(4), O_b))
verdict("finished parts, merged from O and L, agree with plain softmax",
        close(both.finalize()[0], plain))
S[3] = -np.inf
O, L = empty.update(S[:, :5], V[:5]).update(S[:, 5:], V[5:]).finalize()
verdict("a row that sees no key agrees as well", close(O, safe_softmax(S) @ V)
        and close(L, logsumexp(S)))
errors = [
    error[0]
    for row in load("accuracy").rows
    if row.direction == "O" and row.problem["rung"] == "O, normal, bfloat16"
    and not row.problem["causal"]
    for name, error in row.values.items()
    if row.problem["N_q"] == 2048 and row.problem["d"] == 128
]
verdict("six kernels have an error of 0.0023", len(errors) == 6
        and {round(x, 4) for x in errors} == {0.0023})
verdict("rounding alone has it too, and rescaling less than a thousandth of it",
        round(rounded, 4) == 0.0023 > 1000 * rescaled)

# %% [markdown] tags=["navigation"]
# [← Naive attention](01_naive_attention.ipynb) · [The map](00_start.ipynb) · [FlashAttention →](03_fa1.ipynb)
