# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb) · [The package and its commands →](C_package.ipynb)

# %% [markdown]
# # B · Errata
#
# **Which tests does a wrong formula survive?**
#
# The papers behind this book contain mistakes, and texts that retell them contain more. This appendix runs the wrong
# and the right version of each formula side by side, so that you can ask yourself how you would have found the
# mistake.
#
# After this notebook you can
#
# - predict which tests a wrong formula survives, and choose inputs that expose it,
# - decide whether a printed formula is wrong, by a computation that does not use it,
# - find the lines of the papers that contain mistakes, and the places where other people ran into them.
#
# *Time: 30 minutes. Hardware: any laptop with NumPy. Before this: [04 · FlashAttention-2,
# forward](04_fa2_forward.ipynb) and [05 · The backward pass](05_backward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np
from IPython.display import Markdown

from fa2_lab.errata import ERRATA, measure
from fa2_lab.errata.cases import Small, distance
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## One step, in six versions
#
# How do you get from the output of one block of keys to the output of two? Take the row of chapter 02, with
# exponentials 1, 3, 4, 8 and values 8, 0, 4, 2, and cut it in the middle. The largest exponential in block 1 is 3.
# Relative to it, the sum of exponentials is $\ell_1 = (1 + 3) / 3 = 4/3$, and the raw sum is $o_1 = (1 \cdot 8 + 3
# \cdot 0) / 3 = 8/3$, so the finished output of block 1 is $O_1 = o_1 / \ell_1 = 2$. Block 2 raises the largest
# exponential to 8, so the rescaling factor is $\alpha = 3/8$. Block 2 adds $b_2 = (4 \cdot 4 + 8 \cdot 2) / 8 = 4$ to
# the raw sum, and the sum of exponentials is now $\ell_2 = 16/8 = 2$. The right answer is therefore $(\alpha\, o_1 +
# b_2) / \ell_2 = (1 + 4) / 2 = 5/2$.
#
# The next cell computes lines 10 and 12 of Algorithm 1, as printed at ICLR 2024, and five wrong versions:
#
# | version | formula | what is wrong | in the collection at the end |
# | --- | --- | --- | --- |
# | lines 10 and 12 | $(\alpha\, o_1 + b_2) / \ell_2$ | nothing | |
# | divided again | $(O_1 / \ell_1 + b_2) / \ell_2$ | there is no $\alpha$, and block 1 is divided by $\ell_1$ twice | `fa2-tweak1` |
# | upside down | $O_1 / (\ell_1 / \ell_2) + b_2 / \ell_2$ | there is no $\alpha$, and block 1 is divided by a fraction that is upside down | `fa2-two-terms` |
# | half divided twice | $(\alpha\, o_1 + b_2 / \ell_2) / \ell_2$ | block 2 is divided twice | `fa2-P-tilde` |
# | finished plus raw | $(\alpha\, O_1 + b_2) / \ell_2$ | block 1 is already divided, but block 2 is not | `notes-every-loop` |
# | inverse | $(o_1 / \alpha + b_2) / \ell_2$ | $1 / \alpha$ instead of $\alpha$, as in line 10 on [arXiv](https://arxiv.org/abs/2307.08691) | `fa2-inverse` |

# %%
VERSIONS = {
    "lines 10 and 12": lambda l1, o1, O1, alpha, b2, l2: (alpha * o1 + b2) / l2,
    "divided again": lambda l1, o1, O1, alpha, b2, l2: (O1 / l1 + b2) / l2,
    "upside down": lambda l1, o1, O1, alpha, b2, l2: O1 / (l1 / l2) + b2 / l2,
    "half divided twice": lambda l1, o1, O1, alpha, b2, l2: (alpha * o1 + b2 / l2) / l2,
    "finished plus raw": lambda l1, o1, O1, alpha, b2, l2: (alpha * O1 + b2) / l2,
    "inverse": lambda l1, o1, O1, alpha, b2, l2: (o1 / alpha + b2) / l2,
}


def two_blocks(version, E, v, cut):  # exponentials, values, where block 2 begins
    E, v, m1, m2 = np.array(E), np.array(v), max(E[:cut]), max(E)
    l1, l2 = E[:cut].sum() / m1, E.sum() / m2
    o1, b2 = E[:cut] @ v[:cut] / m1, E[cut:] @ v[cut:] / m2
    return version(l1, o1, o1 / l1, m1 / m2, b2, l2)


for name, version in VERSIONS.items():
    print(f"{name:20}{two_blocks(version, [1, 3, 4, 8], [8, 0, 4, 2], 2):8.3f}")

# %% [markdown]
# Only the first version gives 5/2.
#
# **Predict.** You test each version on a single row, cut at the bar. The rows below list the exponentials, and the
# values are 8, 0, 4, 2 in each case. Which row lets the largest number of wrong versions pass?
#
# - ☐ 1 3 | 4 8
# - ☐ 8 4 | 3 1
# - ☐ 8 | 4 3 1
#
# <details><summary>Answer</summary>
#
# **8 | 4 3 1.** The largest exponential comes first, so $\alpha = 1$, and it is alone in its block, so $\ell_1 = 1$. A
# wrong factor is invisible whenever it happens to be 1. Rows like the second are common, because with T blocks, one in
# T random rows has its largest score in the first block. Rows like the third come from a test with blocks of one key.
#
# ```python
# rows = {"1 3 | 4 8": 2, "8 4 | 3 1": 2, "8 | 4 3 1": 1}
# print(" " * 20 + "".join(f"{row:>12}" for row in rows))
# for name, version in VERSIONS.items():
#     passes = []
#     for row, cut in rows.items():
#         E, v = [int(x) for x in row.replace("|", "").split()], np.array([8, 0, 4, 2])
#         passes.append(close(two_blocks(version, E, v, cut), E @ v / sum(E)))
#     print(f"{name:20}" + "".join(f"{'passes' if p else 'caught':>12}" for p in passes))
# ```
#
# ```text
#                        1 3 | 4 8   8 4 | 3 1   8 | 4 3 1
# lines 10 and 12           passes      passes      passes
# divided again             caught      caught      passes
# upside down               caught      caught      caught
# half divided twice        caught      caught      caught
# finished plus raw         caught      caught      passes
# inverse                   caught      passes      passes
# ```
# </details>

# %% [markdown]
# ## Which tests does a wrong gradient survive?
#
# Even with the FA2 paper in hand, you can get the backward pass wrong in at least three ways. First, the paper leaves
# the softmax scale out on purpose, so a dQ copied from it lacks a factor of $\tau$. Second, section 2.2 of the arXiv
# version has $dK = Q\,dS^\top$ in place of $dS^\top Q$. The code below adds the missing $\tau$ to this formula. Third,
# line 4 of Algorithm 2 prints $D \in \mathbb{R}^d$, although each of the $N$ rows has its own D. If you take $d$
# literally, you sum each column, which gives d values for N rows. Since d values do not fit N rows, the code below
# repeats them until there are $N$, just so that the formula can run.
#
# We apply four tests to each of these mistakes, and to the right dQ. The first two use N = d = 5. One of them compares
# only the shapes, and the other compares the numbers. The last two compare the numbers for N = 8 and d = 4, once with τ
# = 1 and once with τ = 1/2. The true gradients come from finite differences of the forward pass, so they don't use a
# formula from any paper.

# %% tags=["hide-input"]
def by_columns(c):  # c: a Small problem with random numbers; here D = colsum(dO ∘ O), as long as N
    D = np.resize((c.dO * c.O).sum(axis=0), c.N)
    return c.tau * (c.P * (c.dO @ c.V.T - D)) @ c.K


SLIPS = {  # what the mistake computes, and the truth
    "dQ = dS K": lambda c: (c.dS @ c.K, c.dQ),
    "dK = τ Q dSᵀ": lambda c: (c.tau * c.Q @ c.dS.T if c.N == c.d else [], c.dK),
    "D by columns": lambda c: (by_columns(c), c.dQ),
    "right: dQ = τ dS K": lambda c: (c.tau * c.dS @ c.K, c.dQ),
}
TESTS = {  # the distance is 0 if there is nothing to see, and inf if the shapes differ
    "shapes, N = d": lambda slip: 0 if np.shape(slip(Small(5, 5))[0]) == (5, 5) else np.inf,
    "numbers, N = d": lambda slip: distance(*slip(Small(5, 5, tau=0.5))),
    "numbers, τ = 1": lambda slip: distance(*slip(Small(8, 4, tau=1.0))),
    "numbers, τ = 1/2": lambda slip: distance(*slip(Small(8, 4, tau=0.5))),
}


def outcome(error):
    return "passes" if error < 1e-7 else "caught" if error < np.inf else "caught by shape"


print(" " * 20 + "".join(f"{test:>18}" for test in TESTS))
for name, slip in SLIPS.items():
    results = [outcome(test(slip)) for test in TESTS.values()]
    print(f"{name:20}" + "".join(f"{result:>18}" for result in results))

# %% [markdown]
# With $\tau = 1/\sqrt{d}$, the first dQ is $\sqrt{d}$ times too large, but it still points in the right direction. The
# loss therefore still falls, and the mistake is easy to overlook in training. All three mistakes pass the test of
# shapes if N = d, but a test that compares numbers catches them even then. In the last two tests, N is not d, so the
# wrong dK also has the wrong shape and is caught at once. With τ = 1, the missing τ cannot be seen.
#
# **Takeaway.** Make N, d, the block sizes and $\tau$ all different, set none of them to 1, and compare numbers.
#
# ## A mask that leaks a little
#
# A test must also choose the size of its numbers well, as a mistake in a mask shows.
#
# **Predict.** Before the softmax, a function sets masked scores to 0 instead of −∞. Which test detects this best?
#
# - ☐ large positive scores, all near 30, since any mistake is larger there
# - ☐ small scores, near 1
# - ☐ whether each row's weights sum to 1
#
# <details><summary>Answer</summary>
#
# **small scores, near 1.** A score of 0 gets the weight $e^0 = 1$, which is too small to notice next to $e^{30}$, but
# not next to $e^1$. Scores that are all near −30 would show the mistake as well. The weights of a row sum to 1 in any
# case, since the masked keys are included in the sum.
#
# ```python
# for score in (1.0, 30.0):
#     weights = np.exp([score, 0.0]) / np.exp([score, 0.0]).sum()
#     print(f"visible score {score:4}: the masked key gets the weight {weights[1]:.2g}")
# ```
#
# ```text
# visible score  1.0: the masked key gets the weight 0.27
# visible score 30.0: the masked key gets the weight 9.4e-14
# ```
# </details>
#
# ## The collection
#
# The package contains 35 errata. Each erratum contains the wrong version, the right version, and the distance of both
# from a result that is computed in a third way. The wrong version must be far from that result, and the right one
# must be close to it.
#
# The column "off by" shows how far off the wrong version is. A number without a unit is the largest error of a matrix,
# relative to its largest entry. Here `inf` means that the shape is wrong, and `nan` means that the wrong version gives
# NaN. A number with a unit is the difference between two counts, factors or shares. For example, `fa1-flops` asks by
# what factor the FLOPs grow if d doubles. The printed formula implies a factor of 1 and the right one a factor of 2,
# so the printed formula is off by 1.
#
# - `fa2-lab errata fa2-inverse` shows one erratum in full. To run its test, use `python -m pytest
#   tests/heart/test_errata.py -k fa2-inverse`.
# - "(arXiv)" means that the ICLR 2024 version does not have the mistake.
# - "Met in" lists GitHub threads in which people made the same mistake or asked about the same line.
# - The formulas are in the papers' notation. O¹ is the finished output of block 1 (our $O_1$), Õ is a raw sum (our
#   $o$), and P̃ are exponentials before the division (our $p$). diag(x) multiplies each row by its x. S_i^(j) are the
#   scores of tile (i, j).

# %% tags=["hide-input"]
LINKS = {
    "FA1 paper": "https://arxiv.org/abs/2205.14135",
    "FA2 paper": "https://arxiv.org/abs/2307.08691",
    "article on FA2": "https://kernelengineering.vizuara.ai/a/flashattention-2.html",
}


def off(error):
    return f"{error:,.0f}" if 100 < error < np.inf else f"{error:.2g}"


def place(source):  # the first place that is cited
    document, _, where = source.split(";")[0].partition(", ")
    return f"[{where}]({LINKS[document]})" if document in LINKS else where


def threads(met):
    for part in met.split("; "):
        project, *numbers = part.replace(",", "").split()
        links = [f"[{n}](https://github.com/{project}/issues/{n[1:]})" for n in numbers]
        yield f"{project.split('/')[1]} {', '.join(links)}"


def table(title, source):
    found = {name: e for name, e in ERRATA.items() if e.source.startswith(source)}
    rows = ["| mistake | where | printed | right | off by | met in |", "|---" * 6 + "|"]
    for name, e in found.items():
        met, error = "; ".join(threads(e.met)) if e.met else "", off(measure(e).wrong_error)
        cells = f"`{name}`", place(e.source), e.claim, e.instead, f"{error} {e.unit}".strip(), met
        rows.append(f"| {' | '.join(cells)} |")
    summary = f"<details><summary>{title}: {len(found)}</summary>\n"
    return "\n".join([summary, *rows, "\n</details>\n"])


Markdown(
    "\n".join([
        table("The FlashAttention-2 paper", "FA2 paper"),
        table("The FlashAttention paper", "FA1 paper"),
        table("An article, FlashAttention II: better work partitioning", "article"),
        table("An outline of the FA2 paper, author unknown", "lecture notes"),
        table("Notes on it in English and Chinese, author unknown", "bilingual notes"),
    ])
)  # fmt: skip

# %% [markdown]
# Four of these rows are not mistakes in the papers:
#
# - `fa2-scale` is about the scale, which the paper leaves out on purpose.
# - `fa1-dropout-order` and `fa1-L` are right for FA1 but wrong for FA2. If all tiles share one random generator, it
#   gives each tile the same numbers in both passes only if the passes visit the tiles in the same order. As for L, it
#   is a sum in FA1 but the logarithm of that sum in FA2.
# - `fa1-empty-rows` is a case that neither paper addresses, in which a mask hides the whole first tile of a row.
#
# **Takeaway.** A formula is wrong when a computation that does not use it contradicts it.
#
# ## Recap
#
# - A wrong factor is invisible when it equals 1. This happens to α in rows whose maximum comes first, to $\ell_1$ in
#   blocks with one key, and to τ if a test sets τ = 1.
# - A wrong shape is invisible if N = d, and a leaking mask is invisible next to large positive scores.

# %% [markdown]
# ## Exercises
#
# **Build.** Write a test, `accepts(version)`, that returns true for the first of the six versions above and false for
# the other five. It must also return false for a seventh version, $(O_1 / \ell_2 + b_2) / \ell_2$, which happens to
# be right on the row above. Call `two_blocks(version, E, v, cut)` with your own numbers.
#
# <details><summary>Hint</summary>
#
# Which quantities must not be 1? And what is the right answer for any exponentials and values?
# </details>

# %%
def accepts(version):
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
words = "the version {!r}. Does your test accept the right version, and only that one?"
seventh = {"divided by the new sum": lambda l1, o1, O1, alpha, b2, l2: (O1 / l2 + b2) / l2}
right_first = enumerate((VERSIONS | seventh).items())
check(accepts, *(Case(words.format(x), (f,), n == 0) for n, (x, f) in right_first))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def accepts(version):
#     E, v = np.array([1, 2, 5, 3]), np.array([1, 2, 4, 7])
#     return close(two_blocks(version, E, v, cut=2), E @ v / E.sum())
# ```
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
E, v = np.array([1, 3, 4, 8]), np.array([8, 0, 4, 2])
state = SoftmaxState.empty(1, 1)
for part in (slice(0, 2), slice(2, 4)):
    state = state.update(np.log(E)[None, part], v[part, None])
by_hand, (by_state, _) = two_blocks(VERSIONS["lines 10 and 12"], E, v, 2), state.finalize()
verdict("lines 10 and 12 agree with two updates of SoftmaxState", close([[by_hand]], by_state))
apart = [measure(e).told_apart for e in ERRATA.values()]
verdict(f"the checks tell the wrong version from the right one in all {len(apart)} errata",
        all(apart) and len(apart) == 35)

# %% [markdown] tags=["navigation"]
# [← Lanes, layouts, banks](A_lanes.ipynb) · [The map](00_start.ipynb) · [The package and its commands →](C_package.ipynb)
