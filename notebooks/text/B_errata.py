# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb) · [The package and its commands →](C_package.ipynb)

# %% [markdown]
# # B · Errata
#
# **Which tests does a wrong formula survive?**
#
# Five sources stand behind this book: two papers, lecture notes, an article, and notes in English and Chinese. All are
# worth reading, and all have slips. A factor is missing, an inverse stands where none belongs, a `>` should be `>=`. In
# this appendix the wrong and the right version are run side by side. The question is not who made a mistake. It is how
# you would have found it.
#
# After this notebook you can
#
# - say which tests a wrong formula survives, and choose inputs that it does not survive,
# - decide whether a printed formula is wrong, by a computation that does not use it,
# - recognise the slips of this subject, and find the lines of the papers they sit in.
#
# *Time: 50 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [04 ·
# FlashAttention-2, forward](04_fa2_forward.ipynb) and [05 · The backward pass](05_backward.ipynb).*

# %%
from dataclasses import replace
from fractions import Fraction as F
from operator import ge, gt
from typing import NamedTuple

import numpy as np
from IPython.display import Markdown

from fa2_lab.errata import ERRATA, SOURCES, Erratum, judge
from fa2_lab.errata.cases import Case, TwoBlocks, distance
from fa2_lab.machine import io, warps
from fa2_lab.paper import LINES
from fa2_lab.reference import fa2, naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## One step, told in six ways
#
# How does the output of one block of keys become part of the output of two? Section 3.1.1 of the FA2 paper answers three
# times, its Algorithm 1 a fourth time, and both sets of notes have versions of their own.
#
# Take the row of chapter 02, with exponentials 1, 3, 4, 8 and values 8, 0, 4, 2, cut in the middle. After block 1,
# $\ell_1 = 4/3$, the raw sum $o_1 = 8/3$, and the output $O_1 = o_1 / \ell_1 = 2$. The factor to the new maximum
# is $\alpha = 3/8$. Block 2 adds 4, and $\ell_2 = 2$. The right answer is 5/2.
#
# **Predict.** The bilingual notes multiply $o_1$ by $\alpha^{-1} = 8/3$ instead of $\alpha$, and divide by $\ell_2$ at the
# end. What comes out?


# %%
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


# %%
VERSIONS = {
    "Algorithm 1, line 10": lambda r: (r.alpha * r.o1 + r.b2) / r.l2,
    "fa2-tweak1": lambda r: (r.O1 / r.l1 + r.b2) / r.l2,
    "fa2-two-terms": lambda r: r.O1 / (r.l1 / r.l2) + r.b2 / r.l2,
    "fa2-P-tilde": lambda r: (r.alpha * r.o1 + r.b2 / r.l2) / r.l2,
    "notes-every-loop": lambda r: (r.alpha * r.O1 + r.b2) / r.l2,
    "bilingual-inverse": lambda r: (r.o1 / r.alpha + r.b2) / r.l2,
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
# Only line 10 of Algorithm 1 is right. In the others $O_1$ is divided once too often (`fa2-tweak1`), a ratio is upside
# down (`fa2-two-terms`), block 2 is divided twice (`fa2-P-tilde`), or a finished part is added to a raw one
# (`notes-every-loop`).
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

# %%
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
# On the third row, three wrong versions are right. Such rows are common: under a causal mask, the first row of all sees
# one key.
#
# **Takeaway.** A wrong factor is invisible wherever it happens to be 1. Test on rows whose maximum comes late.

# %% [markdown]
# ## Which tests does a wrong gradient survive?
#
# Three slips of the backward pass. The FA2 paper has no softmax scale, so its dQ lacks a $\tau$. The lecture notes have
# $dK = Q\,dS^\top$ for $dS^\top Q$. And in Algorithm 2, line 4, D is a vector of $d$ numbers, one per *column*.
#
# Three tests look at them: one compares shapes, with N = d. One compares numbers, with $\tau = 1$. The last compares
# numbers, with N, d and $\tau$ all different. The true gradients come from small differences of the forward pass and use
# no formula of any paper.
#
# **Predict.** Which of the three tests notices that dQ lacks $\tau$?


# %%
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
# ## Who judges the judge?
#
# The collection behind this appendix has an entry for each slip, with two computations, `wrong` and `right`, and an
# `error` that measures both against a truth that uses neither. `judge` demands that the wrong version is refused and the
# right one accepted.
#
# **Predict.** In the entry below, the wrong version divides by the sums of columns instead of rows, and its `error` looks
# at shapes alone. Does `judge` tell the two apart?

# %%
S = np.log(np.array([[1.0, 3.0], [4.0, 8.0]]))
E_S = np.exp(S)
mine = Erratum(
    id="columns",
    source="this notebook",
    claim="Softmax divides by the sum of the column.",
    why="The weights of one query sum to 1, not those of one key.",
    instead="It divides by the sum of the row.",
    wrong=lambda: E_S / E_S.sum(axis=0, keepdims=True),
    right=lambda: E_S / E_S.sum(axis=1, keepdims=True),
    error=lambda P: float(P.shape != S.shape),
)
by_sums = replace(mine, error=lambda P: float(np.abs(P.sum(axis=1) - 1).max()))
for name, entry in (("by shapes", mine), ("by sums of rows", by_sums)):
    found = judge(entry)
    word = "told apart" if found.told_apart else "not told apart"
    print(
        f"{name}: error of the wrong version {found.wrong_error:.2f}, of the right one {found.right_error:.2f}: {word}"
    )

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No.** Both versions have error 0, so nothing is refused.
# </details>
#
# **Takeaway.** A check that cannot fail says nothing. See it fail once, with a wrong version, before you trust it.

# %% [markdown]
# ## The slips of the FlashAttention-2 paper
#
# The tables from here on have one row per slip: its name, its place with a link to the paper, what it says, and what is
# right. The last column says by how much the wrong version is off: a relative distance or a difference of counts, and `inf`
# where even the shape is wrong. The right versions are off by rounding.
#
# **Predict.** One row is about the causal mask. Blocks "whose row indices are all smaller than their column indices" need
# no mask, says the paper. What must be done with these blocks?

# %%
LINKS = {"FA1 paper": "https://arxiv.org/abs/2205.14135", "FA2 paper": "https://arxiv.org/abs/2307.08691"}


def off(error):
    return "NaN" if np.isnan(error) else f"{error:.2g}" if error < 100 else f"{error:,.0f}"


def linked(source):
    for paper, address in LINKS.items():
        source = source.replace(paper, f"[{paper}]({address})")
    return source


def table(*names):
    rows = ["| slip | where | it says | right is | off by |", "|---" * 5 + "|"]
    for name in names:
        e = ERRATA[name]
        rows.append(f"| `{name}` | {linked(e.source)} | {e.claim} | {e.instead} | {off(judge(e).wrong_error)} |")
    return Markdown("\n".join(rows))


of_fa2 = "tweak1", "two-terms", "P-tilde", "mask-blocks", "scale", "D-shape", "loads", "dQ-race", "eighty-heads"
shown = [f"fa2-{name}" for name in of_fa2]
table(*shown)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **They are skipped.** All their columns lie in the future of all their rows. No mask is needed on the other side of
# the diagonal, where the largest column is at most the smallest row.
# </details>
#
# `fa2-eighty-heads` is a rule of thumb rather than a slip; `busy` of chapter 06 computes what it leaves idle. Where a slip
# sits in a numbered line, `where` says so:

# %%
for tag in ("FA2.A1.L10", "FA2.A2.L15"):
    print(tag, "has the slips", ", ".join(LINES[tag][1].errata))

# %% [markdown]
# **Takeaway.** Algorithm 1 itself is nearly clean. It lacks the scale, and a decision about empty rows.

# %% [markdown]
# ## One letter, two numbers
#
# In appendix B.1 of the FA1 paper, $L_i = \sum_j e^{S_{ij}}$. In the FA2 paper, $L_i = m_i + \log \ell_i$. So one L is the
# logarithm of the other. Our row has the exponentials 1, 3, 4, 8, and the last probability is 8/16.
#
# **Predict.** FA2 computes $P = e^{S - L}$. What becomes of the 1/2, roughly, if L is FA1's 16?

# %%
s = np.log([1.0, 3.0, 4.0, 8.0])
L_fa1, L_fa2 = np.exp(s).sum(), naive.logsumexp(s)
print(f"FA1: L = {L_fa1:.2f}, exp(S) / L = {np.exp(s[3]) / L_fa1:.2f}")
print(f"FA2: L =  {L_fa2:.2f}, exp(S − L) = {np.exp(s[3] - L_fa2):.2f}")
print(f"mixed up: exp(S − L of FA1) = {np.exp(s[3] - L_fa1):.1e}")

# %%
of_fa1 = [f"fa1-{name}" for name in ("L", "dropout-order", "empty-rows", "block-size", "memory")]
shown += of_fa1
table(*of_fa1)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **A millionth.** $8\,e^{-16} \approx 10^{-6}$.
# </details>
#
# Two rows of the table are right for FA1 and wrong only if you take them over to FA2: the letter L, and the stored
# state of the random generator, which is enough as long as both passes go by columns. The row with NaN is a case that
# neither paper decides: if a mask hides a row's whole first tile, m is still $-\infty$, and $-\infty - (-\infty)$ is
# not a number.
#
# **Takeaway.** In this project L is always the natural logarithm of the sum.

# %% [markdown]
# ## One character: > or >=
#
# The article skips a tile if `j * B_kv > (i + 1) * B_q`, and masks the tiles with i = j. Below are 4 × 4 tiles of 2 × 2
# scores: `.` is skipped, `D` computed and masked, `F` computed without a mask, and `!` computed without a mask although no
# entry may be seen.
#
# **Predict.** Row block 0 ends before row 2, and tile j = 1 begins at column 2. Is it skipped?


# %%
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
# ## Room, traffic, time
#
# Several slips of the article take one quantity for another. It says that FlashAttention's memory *traffic* is O(N). It
# says that under split-Q shared *room* fills up, since every warp needs all of K and V. It says that sharing out the loop
# over keys would bring back the traffic that FlashAttention removed. (Its other slips stand in the table.)
#
# **Predict.** In chapter 04, each of the $N / B_r$ row blocks loads all of K and V. By what factor does that grow if N
# doubles?

# %%
small, large = (io.fa2_forward(Tiling(N, N, 128, 128), d=64).total for N in (4096, 8192))
print(f"traffic, N from 4,096 to 8,192: {large / small:.2f} times as much; O(N) would be 2")
rng = np.random.default_rng(0)
for name, scheme in warps.SCHEMES.items():
    shared = scheme(*rng.standard_normal((3, 8, 4)), Tiling(8, 8, 8, 8), i=0, W=4).shared
    room = sum(shared.arrays[tensor].size for tensor in "KV")
    print(f"{name}: K and V take {room} elements of room, and {shared.elements('read', tensor='K') * 2} are read")
parallel = ERRATA["article-parallel-keys"]
print(f"one query, 64 keys in 4 parts: {parallel.right()} elements exchanged; S and P would be {parallel.wrong()}")

# %%
of_article = "traffic same-io fa1-snippet rescales exp-cost parallel-keys split-K smem 228 skip mask-zero one-diagonal"
of_article = [f"article-{name}" for name in of_article.split()]
shown += of_article
table(*of_article)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Nearly four.** Twice as many row blocks, each with twice as many keys. Q, O and L only double, hence "nearly".
# </details>
#
# What is O(N) is the *extra memory*. What grows under split-Q is *reading*, not room. What thread blocks exchange when they
# share the keys is small, because S and P stay on the chip all the same.
#
# **Takeaway.** Memory, traffic and time are three quantities, and a claim about one is no claim about another.

# %% [markdown]
# ## Where does the loop end?
#
# The bilingual notes write Algorithm 1 as a list. After the inner loop their numbering starts again at 1, as if $O_i$ were
# divided and stored after *both* loops.
#
# **Predict.** Eight rows in four blocks. If the store stands after the outer loop, how many rows of O are ever written?

# %%
O_true = np.arange(8.0)
for inside in (True, False):
    O = np.full(8, np.nan)
    for i in range(4):
        rows_i = slice(2 * i, 2 * i + 2)
        o_i = O_true[rows_i]  # what the inner loop has computed
        if inside:
            O[rows_i] = o_i
    O[rows_i] = o_i
    place = "inside" if inside else "after "
    print(f"store {place} loop i: {int(np.isfinite(O).sum())} rows written")

# %%
of_notes = ["notes-dK", "notes-second-block", "notes-every-loop", "notes-dO", "bilingual-inverse", "bilingual-writes"]
shown += of_notes
table(*of_notes)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Two.** After the loop, $o_i$ holds the last row block alone.
# </details>
#
# The authors of the article and of the two sets of notes are not known to us. The rest of the collection teaches little and
# is left to the command `fa2-lab errata`:

# %%
rest = [name for name in ERRATA if name not in shown]
print(len(ERRATA), "slips in all,", len(shown), "shown above; the rest:", ", ".join(rest))

# %% [markdown]
# **Takeaway.** Fill results with NaN before you compute them. Then what was never written shows.

# %% [markdown]
# ## Recap
#
# - A wrong factor hides where it is 1: α on rows whose maximum comes first, $\ell_1$ on a block with one key, τ = 1.
# - A wrong shape hides where N = d. A wrong boundary hides where no mask's edge is a tile's edge.
# - A formula is wrong when a computation that does not use it says so: a definition, a difference, a count.
# - A check is worth something once it has been seen to fail.
# - Extra memory is O(N). Traffic is not.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** The article masks hidden scores "to zero before the softmax". A row has one visible key with score log 3
# and value 8, and one hidden key with value 0. What does the article's row give? Put the number in place of the `...`.
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
# **2. Complete.** "A causal mask hides half of all $N^2$ scores." Complete the entry for N = 8: what is right, in place of
# the first `...`, and the truth that both are held against, in place of the second.
#
# <details><summary>Hint</summary>
#
# A row sees its own key. `np.tri(N)` is 1 on and below the diagonal, so the truth is a count of its zeros.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# right_number = N * (N - 1) / 2
# counted = (1 - np.tri(N)).sum()
# ```
# 28 of 64. The half is what remains for large N.
# </details>

# %%
N = 8
right_number = ...
counted = ...
if right_number is ... or counted is ...:
    print("not written yet; the claim says", N * N / 2)
else:
    half = replace(mine, wrong=lambda: N * N / 2, right=lambda: right_number, error=lambda x: abs(x - counted))
    found = judge(half)
    print(
        "right"
        if found.told_apart and counted == 28
        else f"not yet: off by {found.wrong_error} and {found.right_error}"
    )

# %% [markdown]
# **3. Find the bug.** Someone repairs the article's loop: every tile that is visited is masked, and the `>` stays. Is the
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

# %%
state = SoftmaxState.reset(1, 1)
for part in (slice(0, 2), slice(2, 4)):
    state = state.update(s[None, part], v[part, None])
line_10 = VERSIONS["Algorithm 1, line 10"](row_of(E, v, 2))
verdict("line 10 by hand = SoftmaxState.update, twice", close(state.finalize()[0], [[float(line_10)]]))
verdict("FA2's L = logsumexp", close(L_fa2, np.log(L_fa1)))
meter = Trace()
X = np.random.default_rng(4).standard_normal((3, 64, 8))
fa2.forward(*X, B_r=16, B_c=16, trace=meter)
formula = io.fa2_forward(Tiling(64, 64, 16, 16), d=8).total
verdict("traffic: formula = meter", formula == meter.hbm_elements)
verdict("tiles to visit: >= = the package", "".join(marks(ge)).count(".") == tiling.counts()[Tile.SKIP])

# %%
told = {source: [judge(e).told_apart for e in ERRATA.values() if e.source.startswith(source)] for source in SOURCES}
for source, apart in told.items():
    verdict(f"{source}: {len(apart)} slips, all told apart", all(apart))
verdict("every slip shown exists, and none is shown twice", len(set(shown)) == len(shown) and set(shown) <= set(ERRATA))
with np.errstate(all="ignore"):
    swapped = [judge(replace(e, right=e.wrong)).told_apart for e in ERRATA.values()]
verdict("no check accepts the wrong version in the right one's place", not any(swapped))
two = TwoBlocks(Case(N=8, d=4), cut=3)  # the collection's own numbers
factors = two.l1, two.e1 @ two.V1, two.O1, np.exp(two.m1 - two.m2), two.e2 @ two.V2, two.l2
for name in ("fa2-tweak1", "fa2-two-terms", "fa2-P-tilde", "bilingual-inverse"):
    by_hand = VERSIONS[name](Row(*factors))
    verdict(f"{name} by hand = the collection's wrong version", close(by_hand, ERRATA[name].wrong()))

# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb) · [The package and its commands →](C_package.ipynb)
