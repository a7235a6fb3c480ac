# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb) · [The package and its commands →](C_package.ipynb)

# %% [markdown]
# # B · Errata
#
# **Which tests does a wrong formula survive?**
#
# The papers behind this book have slips, and texts that retell them have more. A factor is missing, an inverse stands where
# none belongs, a `>` should be `>=`. In this appendix the wrong and the right version are run side by side. The question
# is not who made a mistake. It is how you would have found it.
#
# After this notebook you can
#
# - say which tests a wrong formula survives, and choose inputs that it does not survive,
# - decide whether a printed formula is wrong, by a computation that does not use it,
# - recognise the slips of this subject, and find the lines of the papers they sit in.
#
# *Time: 40 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [04 ·
# FlashAttention-2, forward](04_fa2_forward.ipynb), [05 · The backward pass](05_backward.ipynb) and [07 ·
# Warps](07_warps.ipynb).*

# %%
from dataclasses import replace
from fractions import Fraction as F
from operator import ge, gt
from typing import NamedTuple

import numpy as np
from IPython.display import Markdown

from fa2_lab.errata import ERRATA, SOURCES, judge
from fa2_lab.errata.cases import Case, TwoBlocks, distance
from fa2_lab.machine import io
from fa2_lab.reference import fa2, naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_lab.trace import Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## One step, told in six ways
#
# How does the output of one block of keys become part of the output of two? Take the row of chapter 02, with exponentials 1,
# 3, 4, 8 and values 8, 0, 4, 2, cut in the middle. After block 1, $\ell_1 = 4/3$, the raw sum is $o_1 = 8/3$, and the
# finished output $O_1 = o_1 / \ell_1 = 2$. The factor to the new maximum is $\alpha = 3/8$. Block 2 adds $b_2 = 4$, and
# $\ell_2 = 2$. The right answer is 5/2. The first of these formulas is Algorithm 1, lines 10 and 12, as printed at ICLR
# 2024. The last is what the [arXiv version](https://arxiv.org/abs/2307.08691) prints there.
#
# | name | formula |
# | --- | --- |
# | lines 10 and 12 | $(\alpha\, o_1 + b_2) / \ell_2$ |
# | divided again | $(O_1 / \ell_1 + b_2) / \ell_2$ |
# | upside down | $O_1 / (\ell_1 / \ell_2) + b_2 / \ell_2$ |
# | half divided twice | $(\alpha\, o_1 + b_2 / \ell_2) / \ell_2$ |
# | finished plus raw | $(\alpha\, O_1 + b_2) / \ell_2$ |
# | inverse | $(o_1 / \alpha + b_2) / \ell_2$ |
#
# **Predict.** What comes out of the last one?

# %% tags=["hide-input"]
class Row(NamedTuple):
    """One row of scores in two blocks: what is known after the first (1) and after both (2)."""

    l1: F
    o1: F  # the raw sum
    O1: F  # o1 / l1, the finished answer for block 1
    alpha: F  # from the first maximum to the second
    b2: F  # what block 2 adds
    l2: F


def row_of(E, v, cut):  # exponentials, values, and where the second block begins
    m1, m2 = E[:cut].max(), E.max()
    l1, l2 = E[:cut].sum() / m1, E.sum() / m2
    o1, b2 = E[:cut] @ v[:cut] / m1, E[cut:] @ v[cut:] / m2
    return Row(l1, o1, o1 / l1, m1 / m2, b2, l2)

# %% tags=["hide-input"]
VERSIONS = {
    "lines 10 and 12": lambda r: (r.alpha * r.o1 + r.b2) / r.l2,
    "divided again": lambda r: (r.O1 / r.l1 + r.b2) / r.l2,
    "upside down": lambda r: r.O1 / (r.l1 / r.l2) + r.b2 / r.l2,
    "half divided twice": lambda r: (r.alpha * r.o1 + r.b2 / r.l2) / r.l2,
    "finished plus raw": lambda r: (r.alpha * r.O1 + r.b2) / r.l2,
    "inverse": lambda r: (r.o1 / r.alpha + r.b2) / r.l2,
}
E, v = np.array([F(1), F(3), F(4), F(8)]), np.array([8, 0, 4, 2])
truth = E @ v / E.sum()
for name, version in VERSIONS.items():
    result = version(row_of(E, v, cut=2))
    print(f"{name:22}{result!s:>6}   {'right' if result == truth else 'wrong'}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **50/9.** $(8/3 \cdot 8/3 + 4) / 2 = 50/9$. The old part grows where it should shrink.
# </details>
#
# Only the first is right. The others divide one part more often than the other, or multiply it by a wrong factor.
#
# **Takeaway.** Old and new parts can be added when both refer to the same maximum and have been divided equally often.

# %% [markdown]
# ## Which rows does each version survive?
#
# Suppose you implement a wrong version and test it on one row. Here are three rows, with a bar where block 2 begins. In
# the second, the largest number comes first, so $\alpha = 1$. In the third, it stands alone in its block, so $\ell_1 = 1$
# as well.
#
# **Predict.** Does the version with the inverse, $\alpha^{-1}$, survive the second row?

# %% tags=["hide-input"]
rows = {"1 3 | 4 8": ([1, 3, 4, 8], 2), "8 4 | 3 1": ([8, 4, 3, 1], 2), "8 | 4 3 1": ([8, 4, 3, 1], 1)}
print(" " * 22 + "".join(f"{name:>12}" for name in rows))
for name, version in VERSIONS.items():
    seen = []
    for numbers, cut in rows.values():
        E_row = np.array([F(e) for e in numbers])
        right = E_row @ v / E_row.sum()
        seen.append("right" if version(row_of(E_row, v, cut)) == right else "wrong")
    print(f"{name:22}" + "".join(f"{word:>12}" for word in seen))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Yes.** 1 and 1/1 are the same number.
# </details>
#
# On the third row, three wrong versions are right. Rows like the second are common: of random rows, one in T has its largest
# score in the first of T blocks. Rows like the third come from a test with blocks of one key.
#
# **Takeaway.** A wrong factor is invisible wherever it happens to be 1. Test on rows whose maximum comes late.

# %% [markdown]
# ## Which tests does a wrong gradient survive?
#
# Three ways to get the backward pass wrong with the FA2 paper in hand. It leaves the softmax scale out, on purpose: a dQ copied
# from it lacks a $\tau$. On arXiv, section 2.2 has $dK = Q\,dS^\top$ for $dS^\top Q$ (below with $\tau$). And in Algorithm 2,
# line 4, D is a vector of $d$ numbers, so we subtract one per *column*.
#
# Three tests look at them: one compares shapes, with N = d. One compares numbers, with $\tau = 1$. The last compares
# numbers, with N, d and $\tau$ all different. The true gradients come from small differences of the forward pass and use
# no formula of any paper.
#
# **Predict.** Which of the three tests notices that dQ lacks $\tau$?

# %% tags=["hide-input"]
def dS_with(case, D):
    return case.P * (case.dO @ case.V.T - D)


SLIPS = {
    "dQ = dS K": lambda c: (c.dS @ c.K, c.dQ),
    "dK = τ Q dSᵀ": lambda c: (c.tau * c.Q @ c.dS.T if c.N == c.d else np.empty(0), c.dK),
    "D by columns": lambda c: (c.tau * dS_with(c, np.resize((c.dO * c.O).sum(axis=0), c.N)) @ c.K, c.dQ),
    "right: dQ = τ dS K": lambda c: (c.tau * c.dS @ c.K, c.dQ),
}
TESTS = {
    "shapes, N = d": lambda slip: np.shape(slip(Case(5, 5))[0]) == (5, 5),
    "numbers, τ = 1": lambda slip: distance(*slip(Case(8, 4, tau=1.0))) < 1e-7,
    "numbers, τ = 1/2": lambda slip: distance(*slip(Case(8, 4, tau=0.5))) < 1e-7,
}
print(" " * 20 + "".join(f"{test:>18}" for test in TESTS))
for name, slip in SLIPS.items():
    print(f"{name:20}" + "".join(f"{'survives' if test(slip) else 'caught':>18}" for test in TESTS.values()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The last.** The shape is right without τ, and so are the numbers if τ = 1. With $\tau = 1/\sqrt{d}$ the gradient is
# $\sqrt{d}$ times too large, in the right direction: easy to overlook in training.
# </details>
#
# All three survive the test of shapes. $Q\,dS^\top$ has the shape of dK only if N = d, so unequal sizes would have stopped
# it at once.
#
# **Takeaway.** Make N, d, the block sizes and $\tau$ all different, none of them 1, and compare numbers.

# %% [markdown]
# ## One letter, two numbers
#
# In appendix B.1 of the FA1 paper, $L_i = \sum_j e^{S_{ij}}$. In the FA2 paper, $L_i = m_i + \log \ell_i$. So one L is the
# logarithm of the other. Our row has the exponentials 1, 3, 4, 8, and the last probability is 8/16.
#
# **Predict.** FA2 computes $P = e^{S - L}$. What becomes of the 1/2, roughly, if L is FA1's 16?

# %% tags=["hide-input"]
s = np.log([1.0, 3.0, 4.0, 8.0])
L_fa1, L_fa2 = np.exp(s).sum(), naive.logsumexp(s)
print(f"FA1: L = {L_fa1:.2f}, exp(S) / L = {np.exp(s[3]) / L_fa1:.2f}")
print(f"FA2: L =  {L_fa2:.2f}, exp(S − L) = {np.exp(s[3] - L_fa2):.2f}")
print(f"mixed up: exp(S − L of FA1) = {np.exp(s[3] - L_fa1):.1e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **A millionth.** $8\,e^{-16} \approx 10^{-6}$.
# </details>
#
# **Takeaway.** In this project L is always the natural logarithm of the sum.

# %% [markdown]
# ## One character: > or >=
#
# An article skips a tile if `j * B_kv > (i + 1) * B_q`, and masks the tiles with i = j. (Its B_q and B_kv are our $B_r$ and
# $B_c$.) Below are 4 × 4 tiles of 2 × 2
# scores: `.` is skipped, `D` computed and masked, `F` computed without a mask, and `!` computed without a mask although no
# entry may be seen.
#
# **Predict.** Row block 0 ends before row 2, and tile j = 1 begins at column 2. Is it skipped?

# %% tags=["hide-input"]
def marks(skip, T=4, B=2):
    tiling = Tiling(T * B, T * B, B, B, CAUSAL)
    for i in range(T):
        for j in range(T):
            hidden = tiling.kind(i, j) is Tile.SKIP
            yield "." if skip(j * B, (i + 1) * B) else "D" if i == j else "!" if hidden else "F"


for name, skip in ((">", gt), (">=", ge)):
    drawn = "".join(marks(skip))
    print(f"skip if j·B {name} (i + 1)·B: {16 - drawn.count('.')} tiles visited")
    print("\n".join("    " + " ".join(drawn[4 * i : 4 * i + 4]) for i in range(4)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No.** 2 > 2 is false. The tile is visited, and nobody masks it, because it is not on the diagonal.
# </details>
#
# Every `!` lets a query see the next row block's keys: 13 tiles instead of 10, and a model that has read the words it is
# to predict. Its loss looks splendid.
#
# **Takeaway.** At a boundary, write down the first index that is excluded, and test with a mask whose edge is a tile's edge.

# %% [markdown]
# ## Memory, traffic, time
#
# It is often said that FlashAttention's memory traffic is O(N).
#
# **Predict.** In chapter 04, each of the $N / B_r$ row blocks loads all of K and V. By what factor does that grow if N
# doubles?

# %% tags=["hide-input"]
small, large = (io.fa2_forward(Tiling(N, N, 128, 128), d=64).total for N in (4096, 8192))
print(f"traffic, N from 4,096 to 8,192: {large / small:.2f} times as much; O(N) would be 2")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Nearly four.** Twice as many row blocks, each with twice as many keys. Q, O and L only double, hence "nearly".
# </details>
#
# What is O(N) is the *extra memory*. In the same way, more warps under split-Q *read* K and V more often, but K and V take no
# more room in shared memory.
#
# **Takeaway.** Memory, traffic and time are three quantities, and a claim about one is no claim about another.

# %% [markdown]
# ## The collection
#
# The package keeps every slip with the wrong version, the right one, and a distance from a truth that uses neither. This
# distance must refuse the wrong version and accept the right one. The tables below open when you click them. Pick two
# rows. `fa2-lab errata` has more.
#
# The mark (arXiv): the version of ICLR 2024 does not have it. O¹ is the finished answer of block 1, Õ a raw sum, and diag(x)
# multiplies each row by its x. "Off by" is in the slip's own unit: a count, KiB, a ratio, or a matrix's largest error relative
# to its largest entry. `inf`: the shape is wrong.
#
# **Predict.** Take `fa2-mask-blocks`. The FA2 paper says that blocks whose row indices are all smaller than their column
# indices need no mask. What must be done with these blocks?

# %% tags=["hide-input"]
LINKS = {"FA1 paper": "https://arxiv.org/abs/2205.14135", "FA2 paper": "https://arxiv.org/abs/2307.08691"}


def off(error):
    return "NaN" if np.isnan(error) else f"{error:.2g}" if error < 100 else f"{error:,.0f}"


def linked(source):  # the first place that is cited
    paper, _, place = source.split(";")[0].partition(", ")
    return f"[{place}]({LINKS[paper]})" if paper in LINKS else place


def table(summary, start, names):
    rows = ["| slip | where | it says | right is | off by |", "|---" * 5 + "|"]
    for name in (f"{start}-{name}" for name in names.split()):
        e = ERRATA[name]
        shown.append(name)
        rows.append(f"| `{name}` | {linked(e.source)} | {e.claim} | {e.instead} | {off(judge(e).wrong_error)} |")
    return "\n".join([f"<details><summary>{summary}</summary>\n", *rows, "\n</details>\n"])

# %% tags=["hide-input"]
shown = []
tables = [
    table("Of the FA2 paper", "fa2", "inverse two-terms tweak1 second-block dK D-shape mask-blocks"),
    table("Of the FA1 paper", "fa1", "L dropout-order empty-rows"),
    table("Of an article, FlashAttention II: better work partitioning", "article",
          "traffic same-io rescales exp-cost split-K smem 228 skip"),
]  # fmt: skip
Markdown("\n".join(tables))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **They are skipped.** All their columns lie in the future of all their rows. No mask is needed on the other side of
# the diagonal, where the largest column is at most the smallest row.
# </details>
#
# `fa1-L` and `fa1-dropout-order` are right for FA1 and wrong only for FA2. The row with NaN is a case that neither paper decides:
# a mask hides a row's whole first tile (chapter 08).
#
# **Takeaway.** A formula is wrong when a computation that does not use it says so.

# %% [markdown]
# ## Recap
#
# - A wrong factor hides where it is 1: α on rows whose maximum comes first, $\ell_1$ on a block with one key, τ = 1.
# - A wrong shape hides where N = d. A wrong boundary hides where no mask's edge is a tile's edge.
# - A check is worth something once it has been seen to fail, with a computation that does not use the formula.
# - Extra memory is O(N). Traffic is not.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** Hidden scores are masked "to zero before the softmax", says an article. A row has one visible key with score
# log 3 and value 8, and one hidden key with value 0. What does such a row give? Put the number in place of the `...`.
#
# <details><summary>Hint</summary>
#
# $e^0 = 1$, so the weights are 3 and 1 before they are divided by their sum.
# </details>
# <details><summary>Solution</summary>
#
# 6: three quarters of 8, instead of 8. A score of zero gets a weight like any other. If the visible scores are large,
# this weight is tiny, and a test with large scores does not see the slip.
# </details>

# %%
article_gives = ...
for score in (np.log(3), 30.0):
    weights = naive.safe_softmax(np.array([[score, 0.0]]))[0]
    print(f"visible score {score:4.1f}: the hidden key gets the weight {weights[1]:.2g}")
if article_gives is ...:
    print("not answered yet")
else:
    hidden_wins = "not yet: that is the right output, the article's is smaller" if article_gives == 8 else "not yet"
    print("right" if article_gives == 6 else hidden_wins)

# %% [markdown]
# **2. Find the bug.** Someone repairs the loop with the `>`: every tile that is visited is masked, and the `>` stays. Is the
# result right now? And what would show that the slip is still there? Put `"numbers"`, `"shapes"` or `"tiles visited"` in
# place of the `...`.
#
# <details><summary>Hint</summary>
#
# What does a tile that is masked as a whole add to the result, and what to the work?
# </details>
# <details><summary>Solution</summary>
#
# The tiles visited: 13 instead of 10. The numbers are right, because what is masked cannot leak. The repair hides the slip
# and keeps its cost.
# </details>

# %%
shows_it = ...
T, B = 4, 2
tiling = Tiling(T * B, T * B, B, B, CAUSAL)
Q8, K8, V8 = np.random.default_rng(0).standard_normal((3, T * B, 4))
S8, visited = np.full((T * B, T * B), -np.inf), 0
for i in range(T):
    for j in range(T):
        if j * B > (i + 1) * B:
            continue
        tile = Q8[tiling.rows(i)] @ K8[tiling.cols(j)].T / 2
        S8[tiling.rows(i), tiling.cols(j)] = np.where(tiling.visible(i, j), tile, -np.inf)
        visited += 1
if shows_it is ...:
    print("not answered yet")
else:
    error = np.abs(naive.safe_softmax(S8) @ V8 - naive.forward(Q8, K8, V8, mask=CAUSAL)[0]).max()
    print("right:" if shows_it == "tiles visited" else "not yet:", f"error {error:.3f}, {visited} tiles visited")

# %% [markdown]
# ## Checks
#
# The hand-made versions against the package, the counts against the meter, and every slip of the collection, both ways
# round.

# %% tags=["hide-input"]
state = SoftmaxState.reset(1, 1)
for part in (slice(0, 2), slice(2, 4)):
    state = state.update(s[None, part], v[part, None])
by_lines = VERSIONS["lines 10 and 12"](row_of(E, v, 2))
verdict("lines 10 and 12 by hand = SoftmaxState.update, twice", close(state.finalize()[0], [[float(by_lines)]]))
verdict("FA2's L = logsumexp", close(L_fa2, np.log(L_fa1)))
meter = Trace()
X = np.random.default_rng(4).standard_normal((3, 64, 8))
fa2.forward(*X, B_r=16, B_c=16, trace=meter)
formula = io.fa2_forward(Tiling(64, 64, 16, 16), d=8).total
verdict("traffic: formula = meter", formula == meter.hbm_elements)
verdict("tiles to visit: >= = the package", "".join(marks(ge)).count(".") == tiling.counts()[Tile.SKIP])

# %% tags=["hide-input"]
told = {source: [judge(e).told_apart for e in ERRATA.values() if e.source.startswith(source)] for source in SOURCES}
for source, apart in told.items():
    verdict(f"{source}: {len(apart)} slips, all told apart", all(apart))
verdict("every slip shown exists, and none is shown twice", len(set(shown)) == len(shown) and set(shown) <= set(ERRATA))
with np.errstate(all="ignore"):
    swapped = [judge(replace(e, right=e.wrong)).told_apart for e in ERRATA.values()]
verdict("no check accepts the wrong version in the right one's place", not any(swapped))
two = TwoBlocks(Case(N=8, d=4), cut=3)  # the collection's own numbers
factors = two.l1, two.e1 @ two.V1, two.O1, np.exp(two.m1 - two.m2), two.e2 @ two.V2, two.l2
ids = {"divided again": "fa2-tweak1", "upside down": "fa2-two-terms", "half divided twice": "fa2-P-tilde"}
for name, slip in (ids | {"inverse": "fa2-inverse"}).items():
    by_hand = VERSIONS[name](Row(*factors))
    verdict(f"{name} by hand = the collection's {slip}", close(by_hand, ERRATA[slip].wrong()))

# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb) · [The package and its commands →](C_package.ipynb)
