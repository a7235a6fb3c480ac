# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb)

# %% [markdown]
# # B · Errata
#
# **Where do the papers and write-ups slip?**
#
# Five sources stand behind this book: the two papers, lecture notes, an article, and notes in English and Chinese. All
# are worth reading, and all have slips: a factor that fell out, an inverse too many, a `>` that should be `>=`. Whoever
# writes a kernel from them finds each one the hard way. Here they are run, wrong version and right version side by side.
#
# After this notebook you can
#
# - decide whether a printed formula is wrong, by a computation that does not use it,
# - recognise the slips of this subject, and say in which lines of the papers they sit,
# - tell which wrong formulas survive which tests, and choose inputs that they do not survive.
#
# *Time: 35 minutes. Hardware: any laptop, NumPy alone. Before this: [04 · FlashAttention-2,
# forward](04_fa2_forward.ipynb) and [05 · The backward pass](05_backward.ipynb).*

# %%
from dataclasses import replace
from fractions import Fraction as F
from operator import ge, gt
from typing import NamedTuple

import numpy as np
from IPython.display import Markdown

from fa2_lab.errata import ERRATA, Erratum, judge
from fa2_lab.errata.cases import Case, TwoBlocks
from fa2_lab.machine import io
from fa2_lab.paper import LINES, where
from fa2_lab.reference import fa2, naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## When is a formula wrong?
#
# The lecture notes give the output of a row whose keys come in two blocks as
# O = diag(ℓ)⁻¹ e^(S¹ − m) V¹ + e^(S² − m) V². Is that wrong, or another way to write the right thing? We take the four
# keys of chapter 02, with exponentials 1, 3, 4 and 8 and values 8, 0, 4 and 2. Subtracting the maximum in the exponent
# is dividing by 8 here, so that every number is a fraction and nothing is rounded.
#
# **Predict.** The definition gives 40/16 = 5/2. What does the printed formula give, if the first two keys are block 1?

# %%
E, v = np.array([F(1), F(3), F(4), F(8)]), np.array([8, 0, 4, 2])
truth = E @ v / E.sum()

m = E.max()  # the exponential of the largest score
l = (E / m).sum()
block_1 = (E / m)[:2] @ v[:2]
block_2 = (E / m)[2:] @ v[2:]
print("by definition:", truth)
print("as printed:   ", block_1 / l + block_2)
print("with brackets:", (block_1 + block_2) / l)

# %% [markdown]
# <details><summary>What happened</summary>
#
# ℓ = 1/8 + 3/8 + 1/2 + 1 = 2, block 1 contributes 1 and block 2 contributes 4. As printed only the first is divided:
# 1/2 + 4 = 9/2. Both halves of a row are divided by the same sum: (1 + 4) / 2 = 5/2. A pair of brackets is missing.
# </details>
#
# **Takeaway.** A formula is wrong when a computation that does not use it gives another number, and not before.

# %% [markdown]
# ## One step, told in six ways
#
# How does the output of the first block become part of the output of both? Section 3.1.1 of the FA2 paper answers three
# times, its Algorithm 1 a fourth time; the lecture notes and the bilingual notes have versions of their own. After block 1
# the row has ℓ¹ = 4/3, un-scaled output 8/3 and finished output O¹ = 2. The factor α = 3/8 leads from the old maximum to
# the new one. Block 2 adds 4, and ℓ² = 2.
#
# **Predict.** Tweak 1 as printed, Õ² = diag(ℓ¹)⁻¹ O¹ + e^(S² − m²) V², gave 11/4 in chapter 04. The bilingual notes
# multiply the un-scaled output by α⁻¹ instead of α, and divide by ℓ² at the end. What comes out?

# %%
class Row(NamedTuple):
    """One row of scores in two blocks: what is known after the first (1) and after both (2)."""

    l1: F
    o1: F  # un-scaled
    O1: F  # o1 / l1, the finished answer for block 1
    alpha: F  # from the first maximum to the second
    b2: F  # what block 2 adds, un-scaled
    l2: F


def row_of(E, v, cut):
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
for name, version in VERSIONS.items():
    result = version(row_of(E, v, cut=2))
    print(f"{name:22}{result!s:>6}   {'right' if result == truth else 'wrong'}")

# %% [markdown]
# <details><summary>Why only one of six</summary>
#
# As printed, tweak 1 divides O¹ = 2 by ℓ¹ once more: (3/2 + 4) / 2 = 11/4. To add the blocks up, the division must be
# undone and the old maximum exchanged for the new one: ℓ¹ α O¹ = 4/3 · 3/8 · 2 = 1, and (1 + 4) / 2 = 5/2.
# "Two terms" has its ratio upside down and no α. P̃ still carries FA1's division, so the second block is divided twice.
# "At the end of every loop" adds an un-scaled block to a scaled one. The inverse makes the old part grow where it should
# shrink: (8/3 · 8/3 + 4) / 2 = 50/9.
# </details>
#
# **Takeaway.** Old and new can be added when both have the same maximum and are divided equally often.

# %% [markdown]
# ## Would a test have found them?
#
# Suppose you implement one of the wrong versions and test it on a row or two. Three rows: the one above; the same
# numbers with the largest in the first block; and the largest alone in the first block.
#
# **Predict.** Which wrong versions give the right result for the second row? Which for the third? (What are α and ℓ¹
# there?)

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
# <details><summary>Where they hide</summary>
#
# With the largest score in the first block α = 1, and dividing by 1 is as good as multiplying: the inverse survives.
# With that score alone in its block, ℓ¹ = 1 as well, and a division by ℓ¹ too many does no harm: tweak 1 as printed and
# the division in every loop survive too. A causal mask makes such rows: the first row of all sees one key.
# </details>
#
# **Takeaway.** A wrong factor is invisible wherever it happens to be 1; test on rows whose maximum comes late.

# %% [markdown]
# ## A gradient without its scale
#
# Algorithms 1 and 2 of the FA2 paper have S = Q Kᵀ and no softmax scale anywhere. In use there is one, S = τ Q Kᵀ, and
# then dQ and dK change too. One query q = 0, keys 0 and 1, values 0 and 1, τ = 1/2, and dO = 1. Both scores are 0, so
# P = (1/2, 1/2).
#
# **Predict.** dP = dO Vᵀ = (0, 1). Compute D, dS = P ∘ (dP − D) and dS K, which the paper calls dQ. Then judge it: O is
# 1 / (1 + e^(−τq)), which has slope τ / 4 at q = 0.

# %%
tau, keys, values = 0.5, np.array([0.0, 1.0]), np.array([0.0, 1.0])


def output(q):
    return naive.safe_softmax(tau * q * keys) @ values


P = naive.safe_softmax(tau * 0.0 * keys)
dP = 1.0 * values
dS = P * (dP - P @ dP)
slope = (output(1e-4) - output(-1e-4)) / 2e-4  # no formula of any paper
print("dS =", dS.tolist())
print("dS K =", dS @ keys, "  τ dS K =", tau * dS @ keys, "  measured:", round(float(slope), 6))

# %% [markdown]
# <details><summary>Why nobody notices at τ = 1</summary>
#
# D = 1/2, dS = (−1/4, 1/4), so dS K = 1/4; the slope is 1/8. S depends on q through τ, and by the chain rule so do dQ
# and dK. dV has no τ: it does not pass through S. A test with τ = 1 cannot see the slip, and with τ = 1/√d
# the gradients of Q and K come out √d times too large, in the right direction, which is easy to overlook.
# </details>
#
# **Takeaway.** Gradients are judged by differences of the forward pass, with every constant set to something else than 1.

# %% [markdown]
# ## The slips of the FlashAttention-2 paper
#
# Each slip of the collection has two computations, `wrong` and `right`, and an `error` that measures either against a
# truth that uses neither: the dense result, central differences, a count. `judge` runs both. The tables have one row to a
# slip, with the tags of the lines it sits in. The last two columns say by how much the wrong and the right version are
# off: a relative distance or a difference of counts; `inf` if not even the shape is right.
#
# **Predict.** One row below belongs to the causal mask. Blocks "whose row indices are all smaller than their column
# indices" need no mask, says the paper. What is it that these blocks need?

# %%
tags_of = {name: [tag for tag, (_, line) in LINES.items() if name in line.errata] for name in ERRATA}


def off(error):
    return "NaN" if np.isnan(error) else f"{error:.2g}" if error < 100 else f"{error:,.0f}"


def row(erratum):
    found = judge(erratum)
    lines = "<br>".join([f"**{erratum.id}**", *tags_of[erratum.id]])
    errors = f"{off(found.wrong_error)} | {off(round(found.right_error, 3))}"
    return f"| {lines} | {erratum.claim} | {erratum.instead} | {errors} |"


def table(source):
    rows = [row(e) for e in ERRATA.values() if e.source.startswith(source)]
    head = "| slip | it says | right is | wrong: off by | right: off by |"
    return Markdown("\n".join([head, "|---" * 5 + "|", *rows]))


table("FA2 paper")

# %% [markdown]
# <details><summary>What they need</summary>
#
# Nothing: all their columns lie in the future of all their rows, and they are skipped. No mask is needed on the other
# side of the diagonal, where the largest column is at most the smallest row.
# </details>
#
# Two rows are no slips of the pen. `fa2-causal-speedup` is a measurement (chapter 10 finds the like for torch's kernel) and
# `fa2-eighty-heads` a rule of thumb: beside them stands what can be derived.
#
# Where a slip sits in a numbered line, its tag stands under its name, and `where` mentions it:

# %%
for tag in ("FA2.A1.L10", "FA2.A2.L15"):
    print(tag, "has the slips", ", ".join(where(tag).line.errata))

# %% [markdown]
# **Takeaway.** Algorithm 1 itself is nearly clean: what it lacks is the scale, and a decision about empty rows.

# %% [markdown]
# ## One letter, two numbers
#
# FA1's appendix B.1 has L_i = Σ_j exp(S_ij). FA2 has L_i = m_i + log ℓ_i. The same letter, and both say what a row of
# exponentials sums to. Our row has the exponentials 1, 3, 4, 8.
#
# **Predict.** What is L in either paper? The last key's probability is 1/2: what does FA2's line, P = exp(S − L), make
# of it with FA1's L?

# %%
s = np.log([1.0, 3.0, 4.0, 8.0])
L_fa1, L_fa2 = np.exp(s).sum(), naive.logsumexp(s)
print(f"FA1: L = {L_fa1:.4f}, exp(S) / L = {np.exp(s[3]) / L_fa1:.4f}")
print(f"FA2: L =  {L_fa2:.4f}, exp(S − L) = {np.exp(s[3] - L_fa2):.4f}")
print(f"mixed up: exp(S − L of FA1) = {np.exp(s[3] - L_fa1):.1e}")

# %% [markdown]
# <details><summary>Which one to keep</summary>
#
# 16, and log 16 = 2.77. FA1's divides, FA2's is subtracted; mixed up, 1/2 becomes a millionth. The logarithm is the one
# to store: a sum of exponentials overflows in float32 as soon as a score passes 88, its logarithm is about as large as
# the largest score.
# </details>
#
# **Takeaway.** In this project L is the natural logarithm of the sum, always; where a kernel works in base 2 the name
# says so.

# %% [markdown]
# ## The slips of the FlashAttention paper
#
# Most of these are about what the paper says around its algorithms: how large the blocks may be, what a saving implies,
# what a generator of random numbers repeats. Two are traps for whoever carries a thing over to FA2, and right where they
# stand: the letter L, and the random state, which serves as long as both passes go by columns (chapter 03).
#
# **Predict.** A row's first tile is hidden by the mask as a whole. What is m after it, and what does exp(S − m) give?

# %%
table("FA1 paper")

# %% [markdown]
# <details><summary>The row named NaN</summary>
#
# m is still −∞, and −∞ − (−∞) is NaN, which no later tile gets rid of. The formulas of both papers have
# this hole. Chapter 02 met it as "a row that has seen no key", and subtracts 0 there.
# </details>
#
# **Takeaway.** An algorithm on paper has no empty rows; the one that is executed has to decide what they are.

# %% [markdown]
# ## Which side does Q stand on?
#
# The lecture notes have dK = Q dSᵀ. Two queries (1, 2) and (3, 4), two keys, and dS = [[1, −1], [0, 0]]: the loss would
# fall if query 1 matched key 1 less and key 2 more.
#
# **Predict.** dK_j collects dS_ij q_i over all queries i. Which rows do you expect? And what does Q dSᵀ do if there are
# three queries and three keys of two numbers each?

# %%
Q, dS = np.array([[1, 2], [3, 4]]), np.array([[1, -1], [0, 0]])
print("dSᵀ Q =", (dS.T @ Q).tolist(), "  Q dSᵀ =", (Q @ dS.T).tolist())
try:
    np.ones((3, 2)) @ np.ones((3, 3)).T
except ValueError:
    print("three queries, d = 2: Q dSᵀ does not exist")

# %% [markdown]
# <details><summary>The rows</summary>
#
# dK_1 = 1 · (1, 2) and dK_2 = −1 · (1, 2); query 2 plays no part, its row of dS is zero. Q dSᵀ mixes the numbers of a
# query with each other. With N = d it has a shape, and nobody complains: a square test is a poor test.
# </details>

# %%
table("lecture notes")

# %% [markdown]
# **Takeaway.** Test with N, d and the block sizes all different, so that a transposed matrix has the wrong shape.

# %% [markdown]
# ## One character: > or >=
#
# The article skips a tile if `j * B_kv > (i + 1) * B_q` and masks those with i == j. We mark what becomes of each of 4 × 4
# tiles of 2 × 2 scores: `.` skipped, `D` computed and masked, `F` computed without a mask, `!` computed without a mask
# although no entry may be seen.
#
# **Predict.** How many of the 16 tiles should be visited? Where does the printed test put its first `!`?

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
# <details><summary>What the exclamation marks do</summary>
#
# Row block i ends before row (i + 1)·B; a tile that begins at that column is hidden as a whole. `>` visits it, and as it
# is not on the diagonal nobody masks it: every row block but the last looks at the next one's keys. 13 tiles instead of
# 10, and a model that has seen the words it is to predict. Its loss looks splendid.
# </details>
#
# **Takeaway.** At a boundary, write down the first index that is excluded, and test with a mask whose edge is a tile's
# edge.

# %% [markdown]
# ## How fast does it grow?
#
# The article says that FlashAttention's memory traffic is O(N). Chapter 04 has the exact count for FA2: each of the N / B
# row blocks reads all of K and V.
#
# **Predict.** By which factor does the traffic grow when N doubles, if it is O(N)? And by the count?

# %%
print(f"{'N':>6}{'elements moved':>16}{'factor':>8}")
before = None
for N in (1024, 2048, 4096, 8192):
    total = io.fa2_forward(Tiling(N, N, 128, 128), d=64).total
    print(f"{N:6,}{total:16,}" + (f"{total / before:8.2f}" if before else ""))
    before = total

# %% [markdown]
# <details><summary>What is O(N), then</summary>
#
# The extra memory: L, one number for each row. The traffic is Θ(N² d² / M), less than that of standard attention by a
# factor that does not depend on N. The growth approaches 4 from below because Q, O and L, which do grow with N, matter
# less and less.
# </details>
#
# The article explains more than any other source, so it has more to get wrong:

# %%
table("article")

# %% [markdown]
# The rescalings deserve a second look: "64 become one" is how FA2 is usually told. FA1 scales two blocks per tile, the
# accumulator and the new part, which is 128 for 64 tiles. FA2 scales the accumulator in every tile, and once at the end.
# And one right version is a little off: it compares figures of a datasheet, which are rounded.
#
# **Takeaway.** Memory, traffic and time are three different things, and a claim about one is no claim about another.

# %% [markdown]
# ## Where do the loops end?
#
# The bilingual notes write Algorithm 1 as a list, and after the inner loop the numbering starts again at 1: O_i is
# divided and stored, it seems, after both loops.
#
# **Predict.** Eight rows in four blocks of two. If the store stands after the outer loop, how many rows of O are ever
# written?

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
table("bilingual")

# %% [markdown]
# <details><summary>Two rows, an inverse and a board</summary>
#
# After the loop, o_i is what the last row block left there, so its two rows are stored and the others never. The inverse
# is the largest error of the six versions above; it stands in both languages. The third slip is a word: 翘曲 is what a wet
# board does, a warp of threads is 线程束.
# </details>
#
# **Takeaway.** Fill results with NaN before you compute them: what was never written then shows.

# %% [markdown]
# ## Who judges the judge?
#
# Each entry of the collection claims that its check refuses the wrong version and accepts the right one. That is worth
# something if the check can fail. Here is an entry whose error looks at shapes alone.
#
# **Predict.** The wrong version divides by the sums of the columns. What does `judge` say?

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
print("error by shape: told apart:", judge(mine).told_apart)
by_sums = replace(mine, error=lambda P: float(np.abs(P.sum(axis=1) - 1).max()))
print("error by sums:  told apart:", judge(by_sums).told_apart)

# %% [markdown]
# <details><summary>Why it says no</summary>
#
# Both versions have error 0, so the wrong one is not refused. The project's tests run every entry this way, and also
# entries that are planted to be useless, like this one.
# </details>
#
# **Takeaway.** A claim with a check that cannot fail is still only a claim.

# %% [markdown]
# ## Recap
#
# - A formula is wrong when an independent computation says so: a definition, a difference, a count.
# - Old and new parts of a row can be added under one maximum and one division; five of six versions break this.
# - Slips hide where a factor is 1, where N = d, where τ = 1, where the first row sees one key.
# - FA1's L is a sum, FA2's and ours is its logarithm. Extra memory is O(N), traffic is not.
# - All slips can be run: `fa2-lab errata`, and one in full with `fa2-lab errata fa2-tweak1`.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** The article masks hidden scores "to zero before the softmax". A row has one visible key with score
# log 3 and value 8, and one hidden key with value 0. What is the output, and what should it be? For which visible scores
# does the slip nearly vanish?
#
# <details><summary>Hint</summary>
# exp(0) = 1.
# </details>
# <details><summary>Answer</summary>
# 3/4 · 8 = 6 instead of 8: a score of zero is a vote like any other. If the visible scores are large, the vote drowns;
# with trained weights the slip may look like noise.
# </details>
#
# **2. Complete.** "A causal mask hides half of all scores." Complete the entry: for N = 8, what does the claim give, what
# is right, and what truth can they be held against? As it stands it tells nothing apart.

# %%
N = 8
half = Erratum(
    id="half",
    source="hearsay",
    claim="A causal mask hides half of the N² scores.",
    why="...",
    instead="...",
    wrong=lambda: N * N / 2,
    right=lambda: N * N / 2,  # your turn
    error=lambda hidden: abs(hidden - N * N / 2),  # and here: count them
)
print("told apart:", judge(half).told_apart)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.tri(N)` is 1 on and below the diagonal. A row sees its own key.
# </details>
# <details><summary>Answer</summary>
#
# ```python
# right=lambda: N * (N - 1) / 2,
# error=lambda hidden: abs(hidden - (1 - np.tri(N)).sum()),
# ```
# 28 of 64. The half is what remains of it for large N.
# </details>
#
# **3. Break and fix.** Someone repairs the article's loop by masking every tile that is visited, and leaves the `>`.
# Before you run it: is the result right? Is the repair?
#
# <details><summary>Hint</summary>
# What does a tile that is masked as a whole add to the result, and what to the work?
# </details>

# %%
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
dense = naive.forward(Q8, K8, V8, mask=CAUSAL)[0]
print("same as the dense result:", close(naive.safe_softmax(S8) @ V8, dense))
print("tiles visited:", visited)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The result is right: what is masked cannot leak. The repair hides the slip and keeps its cost: three tiles are computed
# to be thrown away, and all six full ones are masked for nothing. A test of the result sees neither; the count of visited
# tiles does: 13 instead of 10.
# </details>

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
qkv, one_by_one = (np.zeros((1, 1)), keys[:, None], values[:, None]), dict(B_r=1, B_c=1, tau=tau)
O, L = fa2.forward(*qkv, **one_by_one)
dQ, _, _ = fa2.backward(*qkv, O, L, np.ones((1, 1)), **one_by_one)
verdict("the gradient by hand = the package's backward", close(dQ, [[1 / 8]]))
verdict("FA2's L = logsumexp", close(L, naive.logsumexp(tau * 0 * keys[None])))
meter = Trace()
X = np.random.default_rng(4).standard_normal((3, 64, 8))
fa2.forward(*X, B_r=16, B_c=16, trace=meter)
formula = io.fa2_forward(Tiling(64, 64, 16, 16), d=8).total
verdict("traffic: formula = meter", formula == meter.hbm_elements)
counts = tiling.counts()
verdict("tiles to visit: >= = the package", "".join(marks(ge)).count(".") == counts[Tile.SKIP])

# %%
sources = ("FA2 paper", "FA1 paper", "lecture notes", "article", "bilingual")
told = {s: [judge(e).told_apart for e in ERRATA.values() if e.source.startswith(s)] for s in sources}
for source, apart in told.items():
    verdict(f"{source}: {len(apart)} slips, all told apart", all(apart))
verdict("the tables show all there are", sum(map(len, told.values())) == len(ERRATA))
with np.errstate(all="ignore"):
    swapped = [judge(replace(e, right=e.wrong)).told_apart for e in ERRATA.values()]
verdict("no check accepts the wrong version in the right one's place", not any(swapped))
two = TwoBlocks(Case(N=8, d=4), cut=3)  # the collection's own numbers
factors = two.l1, two.e1 @ two.V1, two.O1, np.exp(two.m1 - two.m2), two.e2 @ two.V2, two.l2
for name in ("fa2-tweak1", "fa2-two-terms", "fa2-P-tilde", "bilingual-inverse"):
    by_hand = VERSIONS[name](Row(*factors))
    verdict(f"{name} by hand = the collection's wrong version", close(by_hand, ERRATA[name].wrong()))

# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb)
