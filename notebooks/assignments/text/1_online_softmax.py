# %% [markdown]
# # Assignment 1 · Online softmax
#
# **Can softmax be finished before all scores are known?** Chapter 02 answers yes. Here you write the three functions
# from which everything else is built, and then a test that can find mistakes in one of them.
#
# | step | points |
# | --- | --- |
# | 1. `update`: one more block of keys | 4 |
# | 2. `merge`: joining two halves | 3 |
# | 3. `finalize`: the output and its logsumexp | 2 |
# | 4. `own`: `test_merge`, a test of your own | 3 |
#
# *Time: 2 to 3 hours. Before this: chapters 01 and 02. Hardware: any laptop, NumPy alone.*
#
# **How it is graded.** Each step is checked on its own. If only some of its checks pass, you get a share of its points.
# A check that fails shows what it expected, what it got and where the two first differ, and it gives a hint. Grading
# runs more cases than you see here. A mistake costs points only once, because a later step that uses a wrong earlier
# function is retried with a correct version of that function. Arrays and correct results are float64, so you lose
# points if you round to float32 on the way. You can add your own cells, but changes to locked cells are undone. Each
# step may run for up to 60 seconds. To run all checks at once, type `python -m checks 1_online_softmax.ipynb`.
#
# **Off limits.** You may use NumPy. While your work is graded, your code cannot import `fa2_lab`, and `checks` does
# nothing when your code calls it. Ready-made attention, such as the function in torch, is off limits as well.

# %% locked="setup"
import numpy as np

from checks import softmax as check

# %% [markdown]
# ## 1. One more block of keys
#
# The state of a block of rows consists of three arrays. `m` is the largest score so far and has shape `(B_r,)`, `l = Σ
# exp(s − m)` has shape `(B_r,)`, and `o = Σ exp(s − m) v` has shape `(B_r, d)`. Before the first key, `m` is −∞, and
# `l` and `o` are 0.
#
# `update` takes a block of scores `s` `(B_r, B_c)` and the values `v` `(B_c, d)` of the same keys, and returns the new
# `(m, l, o)`. Think about two things before you write. First, `l` and `o` were summed relative to the old `m`, so what
# happens to them when a larger score turns up? Second, what does your formula do in a row whose scores have all been −∞
# so far, as can happen under a mask?

# %% solution="update"
def update(m, l, o, s, v):  # (B_r,), (B_r,), (B_r, d), (B_r, B_c), (B_c, d)
    """Return the state after one more block of scores s and values v."""
    ### BEGIN SOLUTION
    m_new = np.maximum(m, s.max(axis=1))
    base = np.where(np.isneginf(m_new), 0.0, m_new)
    p = np.exp(s - base[:, None])
    alpha = np.exp(m - base)
    return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * o + p @ v

# %% test="update" points=4
report = check.update(update, seed=0)
report += check.update(update, seed=101)

# %% [markdown]
# ## 2. Joining two halves
#
# Two workers have processed different keys for the same rows, and each of them has a state `(m, l, o)`. `merge(a, b)`
# returns the state for all of these keys together. Either worker may have seen no key at all.

# %% solution="merge"
def merge(a, b):  # two states (m, l, o)
    """Return the state after the keys of both."""
    ### BEGIN SOLUTION
    top = np.maximum(a[0], b[0])
    base = np.where(np.isneginf(top), 0.0, top)
    left, right = np.exp(a[0] - base), np.exp(b[0] - base)
    return top, left * a[1] + right * b[1], left[:, None] * a[2] + right[:, None] * b[2]

# %% test="merge" points=3
report = check.merge(merge, seed=0)
report += check.merge(merge, seed=102)

# %% [markdown]
# ## 3. The output
#
# `finalize(m, l, o)` returns the output rows `o / l` and the logsumexp `L = log Σ exp(s)`, with the natural logarithm.
# A row that saw no key has output 0 and `L` = −∞.

# %% solution="finalize"
def finalize(m, l, o):
    """Return the output (B_r, d) and the logsumexp (B_r,)."""
    ### BEGIN SOLUTION
    divisor = np.where(l == 0, 1.0, l)
    return o / divisor[:, None], m + np.log(divisor)

# %% test="finalize" points=2
report = check.finalize(finalize, seed=0)
report += check.finalize(finalize, seed=103)

# %% [markdown]
# ## 4. A test of your own
#
# States can be merged in any order and in any grouping. Merging in a state without keys changes nothing, and merging
# the states of all parts gives the same result as processing all keys at once. Because of these properties, the same
# `merge` serves warps, splits of the keys, and rings of GPUs. But does a given `merge` have these properties? Write a
# test that finds out.
#
# `test_merge(merge)` raises an `AssertionError` if the merge that it is given is wrong in any way that matters, and
# returns quietly if that merge is correct. Grading calls it on wrong merges and on correct ones, twice on each. Your
# score is the share of wrong merges that the test catches, minus the share of correct merges that it rejects or on
# which it does not finish in time.
#
# A correct merge may round differently from yours, and it may keep its state in another form that represents the same
# numbers. Therefore, compare what `finalize` returns for the states, not `m` and `l` themselves, and allow a difference
# of up to one part in a hundred thousand.

# %% solution="own"
def test_merge(merge):
    """Raise an AssertionError if merge is wrong."""
    ### BEGIN SOLUTION
    draw = np.random.default_rng(5).standard_normal
    s, v = 4 * draw((30, 12)), draw((12, 3))
    s[0, :4], s[1, 4:8], s[2] = -np.inf, -np.inf, -np.inf
    empty = np.full(30, -np.inf), np.zeros(30), np.zeros((30, 3))
    a, b, c = (update(*empty, s[:, k : k + 4], v[k : k + 4]) for k in (0, 4, 8))
    want = finalize(*update(*empty, s, v))
    ways = [merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))]
    for way in (*ways, merge(merge(empty, a), merge(merge(b, empty), c))):
        for got, true in zip(finalize(*way), want):
            assert np.allclose(got, true, rtol=1e-5, atol=1e-5), "this way round gives something else"

# %% test="own" points=3 given="update merge finalize"
report = check.own_test(test_merge)
def _averages(a, b):
    m, l, _ = check.right_merge(a, b)
    full = [np.where(x[1] > 0, x[1], 1.0)[:, None] for x in (a, b)]
    share = np.where(a[1] > 0, np.where(b[1] > 0, 0.5, 1.0), 0.0)[:, None]
    return m, l, l[:, None] * (share * a[2] / full[0] + (1 - share) * b[2] / full[1])


def _heavier(a, b):
    left = a[0] >= b[0]
    return tuple(np.where(left if x.ndim == 1 else left[:, None], x, y) for x, y in zip(a, b))


def _usual(a, b):
    top = np.maximum(a[0], b[0])
    left, right = (np.exp(x[0] - np.where(np.isneginf(top), 0.0, top)) for x in (a, b))
    return top, left * a[1] + right * b[1], left[:, None] * a[2] + right[:, None] * b[2]


higher = lambda a, b: tuple(x + (n == 0) for n, x in enumerate(check.right_merge(a, b)))  # noqa: E731
wrong = {
    "a merge that averages two outputs": _averages,
    "a merge that drops the lighter side": _heavier,
    "a merge that gives an L too large by 1": higher,
}
report = check.own_test(test_merge, wrong, {"the usual merge": _usual})
