# %% [markdown] tags=["navigation"]
# [← Rings](15_rings.ipynb) · [The map](00_start.ipynb) · [Change it →](17_change_it.ipynb)

# %% [markdown]
# # 16 · The same loop, other masks
#
# **Windows, documents, sinks: what changes in the loop?**
#
# Not every model uses plain causal attention. Some models look back only 1,024 keys, some cap their scores, and some
# add a score that belongs to no key. In training, many short documents are often packed into one long sequence. The
# loop of chapter 04 handles all of these cases. Each of them only changes where the loop begins and ends, the state
# it starts from, or the one line that computes a score.
#
# After this notebook you can
#
# - write these masks as one interval of keys per row, and find the tiles that a row block visits,
# - explain what a softcap and a sink change in the forward and in the backward pass,
# - recognise masks that are not intervals, and describe how FlexAttention handles them,
# - list the masks that a model can get from this package.
#
# *Time: 50 minutes. Hardware: any laptop with torch. Before this: [04 · FlashAttention-2,
# forward](04_fa2_forward.ipynb), where a tile is SKIP, DIAGONAL or FULL, and [05 · The backward
# pass](05_backward.ipynb), where $D$ and $L$ come from.*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
from itertools import pairwise

import numpy as np

from fa2_lab.machine.io_model import tiles_per_row
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2, naive
from fa2_lab.reference.scores import ScoreOptions, sink_backward
from fa2_lab.tiles import CAUSAL, Mask, Tiling
from fa2_studio.bench.packed import LENGTHS
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## What does a row see?
#
# A causal row sees the keys from 0 up to its own position. A *window* (left, right) lets it see `left` keys before
# its own position and `right` keys after it. Either way, a row sees an *interval*, which is a contiguous range of
# keys from `first` up to, but not including, `last`. As in chapter 04, the position of row $r$ is key $r + N_k -
# N_q$.

# %%
def interval(row, N_q, N_k, left=None, right=None):  # None: no limit on that side
    diagonal = row + N_k - N_q
    first = 0 if left is None else max(diagonal - left, 0)
    last = N_k if right is None else min(max(diagonal + right + 1, 0), N_k)
    return first, last


for window in ((None, 0), (1, 0), (1, 1)):
    print("3 queries, 5 keys:", *(interval(row, 3, 5, *window) for row in range(3)))

# %% [markdown]
# `None` means that there is no limit on that side, so the first line, (None, 0), is the causal mask. Padding is
# covered as well. If only the first n keys are real (n is called the *key length*), `last` is at most n. The diagonal
# stays where it is.
#
# Implementations count the keys of a window differently. Ours takes (left, right) in addition to the row's own key,
# so (1024, 0) means 1,025 keys. In a model, however, a `sliding_window` of 1,024 often includes the row's own key, so
# it corresponds to (1023, 0) here. When you compare two implementations, use a sequence that is one token longer than
# the window, because that is the shortest sequence on which the two conventions differ.
#
# ## Which tiles does a row block visit?
#
# The figure shows six masks cut into tiles. The last two, documents and a sink, are explained further below. The thick
# lines mark the ends of the intervals, and the solid bar is the interval of row 23:

# %% tags=["hide-input"]
show("mask_intervals")

# %% [markdown]
# A tile between the lines is FULL, a tile that a line crosses is DIAGONAL, and the other tiles are never loaded.
#
# From one row to the next, neither end moves left. So the top row of a row block has the smallest `first`, the bottom
# row has the largest `last`, and the loop runs from this `first` to this `last`. A key that both the top row and the
# bottom row see is seen by all rows of the block. Therefore, the interval ends of these two rows, four numbers in all,
# decide the kind of every tile.

# %%
def kinds(i, B_r, B_c, N_q, N_k, **window):
    top_first, top_last = interval(i * B_r, N_q, N_k, **window)
    bottom_first, bottom_last = interval(min((i + 1) * B_r, N_q) - 1, N_q, N_k, **window)
    if top_first >= bottom_last:  # no row of this block sees a key
        return {}
    found = {}
    for j in range(top_first // B_c, -(-bottom_last // B_c)):  # ⌈bottom_last / B_c⌉
        begin, end = j * B_c, min((j + 1) * B_c, N_k)
        full = bottom_first <= begin and end <= top_last  # seen by both rows, so by all
        found[j] = "FULL" if full else "DIAGONAL"
    return found


print(kinds(2, B_r=4, B_c=4, N_q=32, N_k=32, left=8, right=4))

# %% [markdown]
# Row block 2 consists of rows 8 to 11. Row 8 sees [0, 13) and row 11 sees [3, 16). Each key of [0, 16) is seen by at
# least one row, so the loop visits four column blocks. Only the keys of [3, 13) are seen by all rows, so blocks 1 and
# 2, with keys 4 to 11, are FULL.
#
# ## What does a window save?
#
# **Predict.** The length of a sequence doubles. By what factor does the number of visited tiles grow, with a causal
# window of 1,024 keys back (1,025 keys with the row's own) and with a plain causal mask?
#
# - ☐ it stays the same with the window, and doubles with the causal mask
# - ☐ it doubles with both
# - ☐ it quadruples with both
# - ☐ it doubles with the window, and quadruples with the causal mask
#
# <details><summary>Answer</summary>
#
# **it doubles with the window, and quadruples with the causal mask.** With a window, each row block's loop stays the
# same length, but there are twice as many row blocks. So time and traffic grow with $N$ instead of $N^2$.
#
# ```python
# print("     N    causal    1,024 keys back    causal / window")
# for N in (4096, 8192, 16384, 32768):
#     tilings = [Tiling(N, N, 128, 128, m) for m in (CAUSAL, Mask(window=(1024, 0)))]
#     causal, window = (int(tiles_per_row(tiling).sum()) for tiling in tilings)
#     print(f"{N:6,} {causal:9,} {window:18,} {causal / window:18.1f}")
# ```
#
# ```text
#      N    causal    1,024 keys back    causal / window
#  4,096       528                252                2.1
#  8,192     2,080                540                3.9
# 16,384     8,256              1,116                7.4
# 32,768    32,896              2,268               14.5
# ```
# </details>
#
# ## Which tiles of a window need a mask?
#
# Masking takes time, but only the tiles that an edge of the window crosses need a mask. How many are there in a row
# block? Suppose that the tiles are square, B × B, and that the causal window is wider than a tile. The right edge of
# the window is the diagonal, and it crosses one tile. The left edge moves by one key per row. So between the top and
# the bottom row of the block, B − 1 consecutive keys drop out of the window, and the tiles that contain these keys
# need a mask. There are two such tiles, unless all B − 1 keys are in the same tile. The sketch shows rows 8 to 11 for
# B = 4 and two windows, with a `#` for each key that a row sees:
#
# ```text
# left = 6   tile 0    tile 1    tile 2
# row  8     · · # #   # # # #   # · · ·
# row  9     · · · #   # # # #   # # · ·
# row 10     · · · ·   # # # #   # # # ·
# row 11     · · · ·   · # # #   # # # #
#            mask      mask      mask
#
# left = 8   tile 0    tile 1    tile 2
# row  8     # # # #   # # # #   # · · ·
# row  9     · # # #   # # # #   # # · ·
# row 10     · · # #   # # # #   # # # ·
# row 11     · · · #   # # # #   # # # #
#            mask      FULL      mask
# ```
#
# With left = 6, the windows of these rows begin at keys 2, 3, 4 and 5. Keys 2, 3 and 4 drop out, so tiles 0 and 1 need
# a mask. With left = 8, keys 0, 1 and 2 drop out, and they are all in tile 0.
#
# In general, when are the keys that drop out in a single tile? A tile has B keys, so B − 1 consecutive keys fit into
# it only if they begin at its first key or at its second. The first key that drops out is the one at which the window
# of the block's top row begins. In block i, the top row is row iB, and its window begins at key iB − `left`. This key
# is the first key of a tile if `left` is a multiple of B, and the second key of a tile if `left` + 1 is a multiple of
# B. For every other `left`, two tiles at the left edge need a mask.

# %% [markdown]
# ## Many documents in one sequence
#
# Documents have different lengths. A batch pads all of them to the length of the longest, so with 100, 30 and 70
# tokens, 100 of 300 tokens are padding. *Packed* sequences are stored one after another instead, together with a list
# of their starts. Many libraries call this list the *cumulative sequence lengths*, `cu_seqlens`, because each start
# is the sum of all previous lengths. No token may attend to another document, so the documents in the figure above
# are triangles along the diagonal. Each document is a small problem with its own intervals and tiles. Only the
# addresses change, because row $r$ of a document is stored at `start + r`.

# %%
def packed(Q, K, V, starts, mask):
    O = np.empty_like(Q)
    for begin, end in pairwise(starts):  # on a GPU, each program finds its own document
        of = slice(begin, end)
        O[of], _ = fa2.forward(Q[of], K[of], V[of], B_r=16, B_c=16, mask=mask)
    return O


lengths = [100, 30, 70]
# cu_seqlens: 0, 100, 130, 200, with the end of the last one
starts = np.cumsum([0, *lengths])
Q, K, V = np.random.default_rng(0).standard_normal((3, sum(lengths), 8))
document = np.repeat(range(3), lengths)
large = Mask(causal=True, allowed=document[:, None] == document)
dense, _ = naive.forward(Q, K, V, mask=large)
got = packed(Q, K, V, starts, CAUSAL)
print(f"largest difference from one large mask: {np.abs(got - dense).max():.6f}")
for name, sizes in (("padded", [100] * 3), ("packed", lengths)):
    tilings = [Tiling(n, n, 16, 16, CAUSAL) for n in sizes]
    print(f"{name}: {sum(int(tiles_per_row(t).sum()) for t in tilings)} tiles")

# %% [markdown]
# How much does packing gain? We timed sixteen causal sequences of 100 to 4,000 tokens on an H200, with 32 heads at d =
# 64 and with 16 heads at d = 128. Padded to the longest, they have 64,000 tokens, but packed, they have only 32,800.
# `torch varlen_attn` is PyTorch's call for packed sequences, and FlashAttention-3 is FA2's successor, written for
# Hopper:

# %% tags=["hide-input"]
timed = [row for row in load("packed").rows if row.problem["batch"] == len(LENGTHS)]
print("                 " + "".join(f"{name:>18}" for name in timed[0].values))
for row in timed:
    times = "".join(f"{ms:15.3f} ms" for ms, *_ in row.values.values())
    print(f"d = {row.problem['d']:3}, {row.direction:8}{times}")

# %% [markdown]
# With padding (the column `fa2_lab padded`), our call takes 1.9 to 2.1 times as long as with packing. The padded call
# skips padding keys, but the padding rows still attend to all real keys. A sequence of n tokens, padded to 4,000, thus
# costs n²/2 + (4,000 − n) n scores instead of n²/2. For the sixteen lengths 100, 360, …, 4,000, this is 1.9 times the
# work. On this GPU, our call runs the kernels of chapters 12b and 13, while PyTorch runs those of FA2, which were not
# written for Hopper.
#
# ## A cap on the scores
#
# A few huge scores can make training unstable, so the language model [Gemma 2](https://arxiv.org/abs/2408.00118)
# bounds them. A *softcap* of $c$ replaces a score $s$, after scaling, by $c \tanh(s / c)$. The result is nearly $s$
# if $s$ is small, and it always stays between $-c$ and $c$:

# %%
s = np.array([-20, -2, 0.1, 2, 20])
print("scores:", s, " capped:", (3 * np.tanh(s / 3)).round(2))

# %% [markdown]
# **Predict.** A mask sets masked scores to $-\infty$. What happens if the cap is applied after the mask?
#
# - ☐ masked keys get some weight
# - ☐ nothing, because masked keys get no weight
# - ☐ NaN
#
# <details><summary>Answer</summary>
#
# **masked keys get some weight.** Since $c \tanh(-\infty) = -c$, a masked key would have an ordinary score like any
# other key. So the cap must come first, and then the mask.
# </details>
#
# In the backward pass, the chain rule multiplies the score's gradient by one more factor. With $t = c \tanh(s/c)$,
# this factor is the slope $1 - (t/c)^2$, and $t$ is the score that the backward pass recomputes anyway.
#
# ## Why is a masked score not just a large negative number?
#
# In this book, a masked score is −∞. Many programs instead write a large negative number such as −10,000 into their
# masks. As long as a row sees some key with an ordinary score, there is no difference, because $e^{-10000}$ is 0 as
# well. But in a row that sees no key, all scores are the same large negative number. Softmax subtracts the largest
# score, so the masked keys get a total weight of 1. Moreover, the lowest number of fp16 is −65,504, so adding two
# masks that contain it overflows. The next cell shows both effects, and [appendix D](D_numbers.ipynb) shows bugs that
# such numbers have caused:

# %%
masked = np.full(4, -1e4)  # a row of four keys, all masked
print("weights of a row that sees no key:", naive.safe_softmax(masked[None])[0])
with np.errstate(over="ignore"):
    print("two masks of fp16's lowest number, added:",
          np.finfo(np.float16).min + np.finfo(np.float16).min)
hidden = Mask(allowed=np.zeros((4, 4), bool))
print("with −∞, the output is",
      fa2.forward(*np.ones((3, 4, 8)), B_r=4, B_c=4, mask=hidden)[0][0, 0])

# %% [markdown]
# ## A score that belongs to no key
#
# The weights of a row sum to 1, so a row must attend to something even if no key fits. Models then put the weight on
# the first tokens, which [Xiao and others](https://arxiv.org/abs/2309.17453) call *attention sinks*. But a window
# hides those tokens. To replace them, the model gpt-oss gives each head a learned number, the *sink*. It is one more
# score in the softmax of each row, but it has no value vector.
#
# Think of the sink as the first key that a row meets. After this key, m is the sink, ℓ is $e^{sink - m} = 1$, and $o$
# is still 0, because there was no value to add. So the loop of chapter 02 only needs a different initial state, $m$ =
# sink and $\ell = 1$, instead of $m = -\infty$ and $\ell = 0$. The tiles stay the same. $L = \log \bigl(e^{sink} +
# \sum_j e^{s_j}\bigr)$ now has one more term, because the sum in ℓ begins with the sink's term:

# %%
def one_row(s, V, m, l, o, B_c=4):  # chapter 02's loop, from any initial state
    for j in range(0, len(s), B_c):
        s_j, v_j = s[j : j + B_c], V[j : j + B_c]
        m_new = max(m, s_j.max())
        alpha, p = np.exp(m - m_new), np.exp(s_j - m_new)
        m, l, o = m_new, alpha * l + p.sum(), alpha * o + p @ v_j
    return o / l, m + np.log(l)


rng = np.random.default_rng(1)
s, values, sink = rng.standard_normal(10), rng.standard_normal(10), 1.5
o, L = one_row(s, values, m=sink, l=1.0, o=0.0)
with_eleven = naive.safe_softmax(np.append(s, sink)[None])[0, :10] @ values
print(f"o {o:.6f}, by a softmax with 11 scores {with_eleven:.6f}")
print(f"weight left for the keys: {1 - np.exp(sink - L):.4f}")

# %% [markdown]
# The gradient of the sink follows from chapter 05, where $dS = P \circ (dP - D)$. There, $D$ is the mean of a row's
# $dP$, weighted by $P$, and it is computed as $D = \mathrm{rowsum}(dO \circ O)$. These formulas hold for every score
# of a row, including the sink. For a key, $dP$ is $dO \cdot v$. The sink, however, has no value, so its $dP$ is 0,
# which leaves $-P_{sink} D$. For the same reason, the sink adds only $P_{sink} \cdot 0$ to the weighted mean, so $D$
# is still $\mathrm{rowsum}(dO \circ O)$. Because all rows of a head share the sink, its gradient is the sum over the
# rows, $dsink = -\sum_r P_{r,sink} D_r$. The next cell checks this for a loop that also has a window and a softcap:

# %%
Q, K, V, dO = np.random.default_rng(3).standard_normal((4, 12, 8))
tiles, sink = dict(B_r=4, B_c=4, mask=Mask(window=(5, 0))), 0.7


def forward(K, sink):
    return fa2.forward(Q, K, V, score_options=ScoreOptions(softcap=3.0, sink=sink), **tiles)


O, L = forward(K, sink)
D, P_sink = (dO * O).sum(axis=1), np.exp(sink - L)  # as for any score: exp(s − L)
dsink = -(P_sink * D).sum()
up, down = (forward(K, sink + h)[0] for h in (1e-5, -1e-5))
print(f"dsink: {dsink:.6f}, by finite differences {((up - down) * dO).sum() / 2e-5:.6f}")

# %% [markdown]
# dQ, dK and dV need $P = e^{S - L}$ and $D$. Since $L$ and $O$ already include the sink, `fa2.backward` does not need
# the sink as an argument. We check one element of dK:

# %%
dQ, dK, dV = fa2.backward(Q, K, V, O, L, dO, score_options=ScoreOptions(softcap=3.0), **tiles)
step = np.zeros_like(K)
step[3, 5] = 1e-5
up, down = (forward(K + x, sink)[0] for x in (step, -step))
print(f"dK[3, 5]: {dK[3, 5]:.6f}, by finite differences {((up - down) * dO).sum() / 2e-5:.6f}")

# %% [markdown]
# ## When is one interval not enough?
#
# **Predict.** Under which of these masks does every row see a single interval?
#
# - ☐ every 16th key of the past
# - ☐ a prefix: every row sees the first 40 keys, and the mask is otherwise causal
# - ☐ a window of 32, and always the first 4 keys
#
# <details><summary>Answer</summary>
#
# **a prefix: every row sees the first 40 keys, and the mask is otherwise causal.** Row $r$ sees $[0, \max(40, r +
# 1))$. With a window and the first 4 keys, a row sees two intervals. A single interval around both would be the
# causal mask again, and in a long sequence most of its tiles would contain no visible score. With every 16th key and
# tiles of 16 keys or more, every tile of the past must be visited and masked, so nothing is saved.
# </details>
#
# For masks that are not intervals, two numbers per row are not enough to find the tiles to visit. But for any mask, you
# can give each row block a list of the column blocks that it has to visit.
# [FlexAttention](https://pytorch.org/blog/flexattention/) takes this approach. You write a function `mask_mod(b, h, q,
# kv)`, which is evaluated for all $N^2$ pairs before the kernel runs. This takes time, but only once per mask, because
# every layer and every training step can use the results again. From the results, each row block gets two lists, one of
# its FULL blocks and one of the blocks that need a mask. Since the lists only name the blocks, the kernel evaluates the
# function again for every score in the blocks that need a mask. In FULL blocks, it skips this step.
#
# ## How does a model get all this?
#
# `attention(…, window=(5, 0), softcap=3.0, sinks=…)` supports this chapter's windows, caps and sinks, and
# `attention_packed` takes packed documents and their starts. A model of Hugging Face's *transformers* ([appendix
# C](C_package.ipynb)) can ask for causal and bidirectional masks, windows, padding and packed sequences. Any other mask
# raises an error that names the mask. A prefix also raises this error, although under a prefix each row sees a single
# interval, which the loop above could handle.
#
# ## Recap
#
# - A row sees an interval $[first, last)$. The top and bottom rows of a block determine which tiles its loop visits and
#   which of them need a mask.
# - With a window, the work grows with $N$ instead of $N^2$. Packed documents are small problems side by side.
# - A softcap is a function of the score, applied before the mask, with slope $1 - (t/c)^2$.
# - A sink is the initial state $m = sink$, $\ell = 1$, and its gradient is $dsink = -\sum_r P_{r,sink} D_r$.
# - An interval is two numbers that the kernel computes. To skip tiles under any other mask, a kernel needs a list of
#   tiles.

# %% [markdown]
# ## Exercises
#
# **Build.** The backward pass walks down a column block, so it needs `kinds` the other way round. Write
# `column_kinds` for a window (left, right), where both are numbers. For column block j, return the row blocks that it
# visits and the kind of each, as {number: "FULL" or "DIAGONAL"}. A row block is visited if at least one of its rows
# sees at least one key of the column block. It is FULL if each of its rows sees each of these keys. The check
# compares one number per row block, which is 0 if the block is not visited, 1 if it is DIAGONAL, and 2 if it is FULL.
#
# <details><summary>Hint</summary>
#
# Row $r$ sees key $k$ if $k - right \le r + N_k - N_q \le k + left$. If you solve this for $r$, you find that the
# rows that see one key form an interval as well. The first and the last key of the column block decide the loop and
# the kinds.
# </details>

# %%
def column_kinds(j, B_r, B_c, N_q, N_k, left, right):
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def column_case(question, j, B_r, B_c, N_q, N_k, left, right):
    kind_of = {}
    for i in range(-(-N_q // B_r)):
        rows, keys = range(i * B_r, min((i + 1) * B_r,
                                        N_q)), range(j * B_c, min((j + 1) * B_c, N_k))
        ends = [interval(r, N_q, N_k, left, right) for r in rows]
        seen = [first <= key < last for first, last in ends for key in keys]
        kind_of |= {i: "FULL" if all(seen) else "DIAGONAL"} if any(seen) else {}
    words = f"column block {j} of {N_k} keys, {N_q} queries, tiles {B_r} × {B_c}, window ({left}, {right}). {question}"
    return words, (j, B_r, B_c, N_q, N_k, left, right), kind_of


def by_row_block(kind_of, B_r, N_q):  # as numbers, which the check compares
    for i in set(kind_of) - {*range(-(-N_q // B_r))}:
        raise ValueError(f"there is no row block {i}")
    return np.array([("", "DIAGONAL", "FULL").index(kind_of.get(i, ""))
                     for i in range(-(-N_q // B_r))])


def numbered(*case):
    kind_of = column_kinds(*case)
    return None if kind_of is None or kind_of is ... else by_row_block(kind_of, case[1], case[3])


numbered.__name__ = "column_kinds"  # what the message calls it
questions = (
    (
        "Is a row block visited if only its first row, or only its last, sees a key?",
        1,
        4,
        4,
        16,
        16,
        5,
        1,
    ),
    (
        "Which key of the block does the earliest row see, and which end comes from left?",
        2,
        4,
        4,
        32,
        32,
        8,
        4,
    ),
    (
        "Is a block FULL only if its first row sees the last key and its last row sees the "
        "first key?",
        1,
        2,
        4,
        16,
        16,
        9,
        0,
    ),
    ("Row 0 is not at key 0. Is N_k − N_q subtracted?", 2, 4, 4, 8, 16, 4, 1),
    (
        "The last row block and the last column block are incomplete. Where do they end?",
        3,
        4,
        4,
        15,
        14,
        1,
        2,
    ),
    ("No row sees this block. Is nothing visited?", 0, 4, 4, 4, 32, 3, 0),
)
cases = [column_case(*of) for of in questions]
check(numbered, *(Case(words, case, by_row_block(want, case[1], case[3]))
                  for words, case, want in cases))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def column_kinds(j, B_r, B_c, N_q, N_k, left, right):
#     at = N_k - N_q
#     first, last = j * B_c, min((j + 1) * B_c, N_k) - 1  # keys of the block
#     begin, end = max(first - right - at, 0), min(last + left + 1 - at, N_q)  # rows that see one
#     if begin >= end:
#         return {}
#     found = {}
#     for i in range(begin // B_r, -(-end // B_r)):
#         top, bottom = i * B_r, min((i + 1) * B_r, N_q) - 1
#         full = top >= last - right - at and bottom <= first + left - at
#         found[i] = "FULL" if full else "DIAGONAL"
#     return found
# ```
# The visible scores in a column of $S$ also form an interval, with left and right exchanged.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
windows = (None, None), (None, 0), (2, 0), (3, 1), (None, 2), (4, None), (99, 99)
for N_q, N_k in ((9, 9), (5, 12), (12, 5), (1, 7)):
    same = True
    for left, right in windows:
        tiling = Tiling(N_q, N_k, 4, 3, Mask(window=(left, right)))
        for i in range(tiling.T_r):
            want = {j: tiling.kind(i, j).name for j in tiling.visited_cols(i)}
            same &= kinds(i, 4, 3, N_q, N_k, left=left, right=right) == want
    verdict(f"kinds agrees with Tiling, {N_q} queries, {N_k} keys", same)

padded = [row.ratio("fa2_lab", "fa2_lab padded") for row in timed]
verdict("padding takes 1.9 to 2.1 times as long",
        (round(min(padded), 1), round(max(padded), 1)) == (1.9, 2.1))
real = sum(n * n / 2 for n in LENGTHS)
verdict("padding does 1.9 times the work",
        round(1 + sum((max(LENGTHS) - n) * n for n in LENGTHS) / real, 1) == 1.9)
tokens = 16 * max(LENGTHS), sum(LENGTHS)
verdict("64,000 tokens padded, 32,800 packed", tokens == (64000, 32800))
for left, masked in ((1024, 2), (1023, 2), (1000, 3), (1025, 3)):
    found = kinds(20, 128, 128, 4096, 4096, left=left, right=0)
    verdict(f"{left} keys back: {masked} tiles of a row block need a mask",
            [*found.values()].count("DIAGONAL") == masked)
verdict("dsink agrees with scores.sink_backward", close(dsink, sink_backward(0.7, O, L, dO)))

# %% [markdown] tags=["navigation"]
# [← Rings](15_rings.ipynb) · [The map](00_start.ipynb) · [Change it →](17_change_it.ipynb)
