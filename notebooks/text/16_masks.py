# %% [markdown] tags=["navigation"]
# [← Rings](15_rings.ipynb) · [The map](00_start.ipynb) · [Lanes, layouts, banks →](A_lanes.ipynb)

# %% [markdown]
# # 16 · The same loop, other masks
#
# **Windows, documents, sinks: what changes in the loop?**
#
# Not every model uses plain causal attention. Some look back only 1,024 keys. Some cap their scores, some add a score that
# belongs to no key. Training packs many short documents into one long sequence. None of this needs a new
# algorithm: the loop of chapter 04 stays. What changes is where it begins and ends, or the state
# that it starts from, or the one line that computes a score.
#
# After this notebook you can
#
# - write such a mask as one interval of keys for each row, and say which tiles it visits,
# - add a sink and a softcap to the forward and the backward pass, with their gradients,
# - say which masks are not intervals, what FlexAttention does for those, and how a model gets the others.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop with torch. Before this: [04 · FlashAttention-2,
# forward](04_fa2_forward.ipynb), where a tile is SKIP, DIAGONAL or FULL, and [05 · The backward
# pass](05_backward.ipynb), where $D$ and $L$ come from.*

# %%
from itertools import pairwise

import numpy as np
import torch

from fa2_lab import attention, attention_packed
from fa2_lab.machine.io import tiles_per_row
from fa2_lab.plots import intervals
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import fa2, naive
from fa2_lab.reference.scores import sink_backward
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling
from fa2_studio.bench.packed import LENGTHS
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## What does a row see?
#
# A causal row sees the keys from 0 up to its own place. A *window* (left, right) lets it see `left` keys before its own
# place and `right` keys after it. Either way a row sees an *interval*: all keys from `first` up to, but not including,
# `last`. With fewer queries than keys, the queries are the last ones. So row $r$ stands at key $r + N_k - N_q$: the
# diagonal ends in the bottom right corner of $S$.
#
# **Predict.** Three queries, five keys, window (1, 0). Which keys does row 0 see?

# %%
def interval(row, N_q, N_k, left=None, right=None):  # None: no limit on that side
    diagonal = row + N_k - N_q
    first = 0 if left is None else max(diagonal - left, 0)
    last = N_k if right is None else min(max(diagonal + right + 1, 0), N_k)
    return first, last

# %% tags=["hide-input"]
for name, window in {"causal": (None, 0), "window (1, 0)": (1, 0), "window (1, 1)": (1, 1)}.items():
    for row in range(3):
        first, last = interval(row, 3, 5, *window)
        keys = "".join("■" if first <= col < last else "·" for col in range(5))
        print(f"{name:14} row {row}: {keys}  [{first}, {last})")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Keys 1 and 2.** Row 0 stands at key 0 + 5 − 3 = 2 and sees one key before it.
# </details>
#
# Padding fits as well: if only the first n keys are real (n is the *key length*), `last` is at most n. The package has this function once, as
# `Mask.interval`. Everything below follows from it.
#
# **Takeaway.** Causal masks, windows and padding give two numbers for each row: where its keys begin and where they
# end.

# %% [markdown]
# ## Which tiles does a row block visit?
#
# From one row to the next, neither end moves left. So of a whole row block only the top row and the bottom row matter.
#
# **Predict.** 32 queries and keys, window (8, 4), tiles of 4 × 4. Row block 2 has the rows 8 to 11. Which column blocks
# does it visit?

# %%
def kinds(i, B_r, B_c, N_q, N_k, **window):
    top = interval(i * B_r, N_q, N_k, **window)
    bottom = interval(min((i + 1) * B_r, N_q) - 1, N_q, N_k, **window)
    if top[0] >= bottom[1]:  # no row of this block sees a key
        return {}
    visited = range(top[0] // B_c, -(-bottom[1] // B_c))  # from the top row's first to the bottom row's last
    full = [bottom[0] <= j * B_c and min((j + 1) * B_c, N_k) <= top[1] for j in visited]  # seen by both, so by all
    return {j: "FULL" if f else "DIAGONAL" for j, f in zip(visited, full, strict=True)}


print(kinds(2, B_r=4, B_c=4, N_q=32, N_k=32, left=8, right=4))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Blocks 0 to 3; 1 and 2 are FULL.** Row 8 sees [0, 13) and row 11 sees [3, 16). So each key of [0, 16) is seen by at
# least one row: four blocks. Only the keys of [3, 13) are seen by all rows: blocks 1 and 2 lie inside.
# </details>
#
# The picture has six masks, cut into tiles; documents and the sink come later in this chapter. The thick lines are the
# ends of the intervals, and the black bar is the interval of row 23. A tile between the lines is
# FULL, a tile that a line cuts is DIAGONAL, and all others are never loaded.

# %%
show(intervals.draw(**intervals.data()))

# %% [markdown]
# **Takeaway.** The loop runs from the top row's `first` to the bottom row's `last`. Four numbers for each row block decide every
# tile: two more than in chapter 08, because the left end moves, too.

# %% [markdown]
# ## What does a window save?
#
# Under a causal mask the loop begins at key 0. With a window its start moves along with its end.
#
# **Predict.** The sequence gets twice as long. How many times as many tiles are visited with a causal window of 1,024 keys
# back?

# %% tags=["hide-input"]
print("tiles of 128 × 128")
print("     N    causal    1,024 keys back    causal / window")
for N in (4096, 8192, 16384, 32768):
    tilings = [Tiling(N, N, 128, 128, mask) for mask in (CAUSAL, Mask(window=(1024, 0)))]
    causal, window = (int(tiles_per_row(tiling).sum()) for tiling in tilings)
    print(f"{N:6,} {causal:9,} {window:18,} {causal / window:18.1f}")
counts = Tiling(8192, 8192, 128, 128, Mask(window=(1024, 0))).counts()
print(f"at N = 8,192: {counts[Tile.FULL]} are FULL, {counts[Tile.DIAGONAL]} DIAGONAL")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Twice as many.** The window's work grows with $N \cdot 1{,}024$. Causal work grows with $N^2 / 2$, so it is four times
# as much.
# </details>
#
# The window has two edges. So with square tiles, two in each row block need a mask instead of one.
#
# **Takeaway.** With a window, time and memory traffic grow with $N$ instead of $N^2$.

# %% [markdown]
# ## Many documents in one row
#
# Documents have different lengths. A batch pads all of them to the longest: with 100, 30 and 70 tokens, a third of it is
# padding. *Packed* sequences stand one after the other instead, with a list of where each starts, and no token may look
# into another document.

# %%
def packed(Q, K, V, starts, mask):
    O = np.empty_like(Q)
    for begin, end in pairwise(starts):  # on a GPU, a program finds its document by program_id
        rows = slice(begin, end)
        O[rows], _ = fa2.forward(Q[rows], K[rows], V[rows], B_r=16, B_c=16, mask=mask)
    return O

# %% tags=["hide-input"]
lengths, starts = [100, 30, 70], [0, 100, 130, 200]
Q, K, V = np.random.default_rng(0).standard_normal((3, sum(lengths), 8))
document = np.repeat(range(3), lengths)
dense, _ = naive.forward(Q, K, V, mask=Mask(causal=True, allowed=document[:, None] == document))
print(f"largest difference from one large mask: {np.abs(packed(Q, K, V, starts, CAUSAL) - dense).max():.6f}")
tiles = [sum(int(tiles_per_row(Tiling(n, n, 16, 16, CAUSAL)).sum()) for n in of) for of in ([100] * 3, lengths)]
print(f"tiles: padded {tiles[0]}, packed {tiles[1]}")

# %% [markdown]
# In the picture above, packed documents are triangles along the diagonal. Each is a small problem with intervals and tiles of its
# own. Only addresses change: row $r$ of a document lies at `start + r`.
#
# What is it worth? Sixteen causal sequences of 100 to 4,000 tokens on an H200. Padded to the longest they are 64,000
# tokens, packed 32,800. There are 32 heads at d = 64 and 16 at d = 128. `torch varlen_attn` is what torch
# has for packed sequences:

# %%
timed = load("packed").rows
print("                 " + "".join(f"{name:>20}" for name in timed[0].values))
for row in timed:
    print(f"d = {row.problem['d']:3}, {row.direction:8}" + "".join(f"{ms:17.2f} ms" for ms, *_ in row.values.values()))

# %% [markdown]
# Packed, a call takes about half of the time. FlashAttention-3 takes 7% and 15% more than we do forward, 1% and 2% more
# backward. On Hopper these calls run on the kernels of chapters 12b and 13.
#
# **Takeaway.** Packing is addressing. Inside a document nothing is new.

# %% [markdown]
# ## A cap on the scores
#
# A few huge scores can make training unstable. The language model [Gemma 2](https://arxiv.org/abs/2408.00118) therefore
# bounds them. A *softcap* of $c$ replaces a score $s$, after scaling, by $c \tanh(s / c)$. That is nearly $s$ where $s$ is small, and
# never beyond $\pm c$.
#
# **Predict.** A mask sets hidden scores to $-\infty$. What happens if the cap comes after the mask?

# %%
def cap(s, c):
    return c * np.tanh(s / c)

# %% tags=["hide-input"]
s, seen = np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, True, False, False])
right, wrong = np.where(seen, cap(s, 5.0), -np.inf), cap(np.where(seen, s, -np.inf), 5.0)
for name, scores in (("cap, then mask", right), ("mask, then cap", wrong)):
    print(name, "scores", scores.round(3), "weights", (np.exp(scores) / np.exp(scores).sum()).round(4))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Hidden keys come back.** $c \tanh(-\infty) = -c$ is a score like any other, with a small weight.
# </details>
#
# Backward, the chain rule adds one factor. With $t = c \tanh(s/c)$ the slope is $1 - (t/c)^2$, and $t$ is the score that
# the backward pass recomputes anyway.
#
# **Takeaway.** A softcap is one function of the score, before the mask. Its slope needs only the capped score.

# %% [markdown]
# ## A score that belongs to no key
#
# The weights of a row sum to 1, so a row must attend to something even if nothing fits. Models then put the weight on the
# first tokens, called *attention sinks* by [Xiao and others](https://arxiv.org/abs/2309.17453). A window takes those
# tokens away. The model gpt-oss gives each head a learned number instead, the *sink*: one more score in each row's
# softmax, with no value.
#
# **Predict.** Take the sink as the key that a row meets first. What are $m$, $\ell$ and $o$ after it?

# %%
def one_row(s, V, m, l, o, B_c=4):  # chapter 02's loop, from any first state
    for j in range(0, len(s), B_c):
        s_j, v_j = s[j : j + B_c], V[j : j + B_c]
        m_new = max(m, s_j.max())
        alpha, p = np.exp(m - m_new), np.exp(s_j - m_new)
        m, l, o = m_new, alpha * l + p.sum(), alpha * o + p @ v_j
    return o / l, m + np.log(l)

# %% tags=["hide-input"]
rng = np.random.default_rng(1)
s, values, sink = rng.standard_normal(10), rng.standard_normal((10, 3)), 1.5
o, L = one_row(s, values, m=sink, l=1.0, o=np.zeros(3))
weights = np.exp(np.append(s, sink))
weights /= weights.sum()
print(f"largest difference from a softmax with 11 scores: {np.abs(o - weights[:10] @ values).max():.6f}")
for sink in (-5.0, 1.5, 5.0):
    _, L = one_row(s, values, m=sink, l=1.0, o=np.zeros(3))
    print(f"sink {sink:4}: weight left for the keys {1 - np.exp(sink - L):.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **$m$ = sink, $\ell = 1$, $o = 0$.** The maximum so far is the sink. The sum is $e^{sink - m} = 1$. There is no value to add.
# </details>
#
# Without a sink the loop starts at $m = -\infty$, $\ell = 0$, with one at $m$ = sink, $\ell = 1$. That is the whole change:
# no more tiles and no other mask. $L$ includes the sink.
#
# Its gradient follows from chapter 05: $dS = P \circ (dP - D)$, where $D = \mathrm{rowsum}(dO \circ O)$. This holds for every
# score of a row, so for the sink's too. For a key, $dP$ is $dO \cdot v$. The sink has no value, so its $dP$ is 0, and
# $-P_{sink} D$ is left. All rows of a head share its sink, so its gradient is the sum over the rows.

# %% tags=["hide-input"]
Q, K, V, dO = np.random.default_rng(3).standard_normal((4, 12, 8))
options = dict(B_r=4, B_c=4, mask=Mask(window=(5, 0)), softcap=3.0)
sink = 0.7
O, L = fa2.forward(Q, K, V, sink=sink, **options)
D, P_sink = (dO * O).sum(axis=1), np.exp(sink - L)  # as for any score: exp(s − L)
dsink = -(P_sink * D).sum()
ends = [(fa2.forward(Q, K, V, sink=x, **options)[0] * dO).sum() for x in (sink - 1e-5, sink + 1e-5)]
print(f"dsink: {dsink:.6f} by the formula, {(ends[1] - ends[0]) / 2e-5:.6f} by differences")
dQ, dK, dV = fa2.backward(Q, K, V, O, L, dO, **options)  # the sink is no argument

# %% [markdown]
# And dQ, dK and dV? They need $P = e^{S - L}$ and $D$. The sink is already in $L$ and in $O$, so `fa2.backward` is called
# as before.
#
# **Takeaway.** A sink changes the initial state of a row. $dsink = -\sum_r P_{r,sink} D_r$, and the backward loop stays as it
# is.

# %% [markdown]
# ## When is one interval not enough?
#
# **Predict.** In which of these masks does every row see a single interval? (a) prefix: everybody sees the first 40 keys,
# otherwise causal; (b) every 16th key of the past; (c) a window of 32, and always the first 4 keys.

# %% tags=["hide-input"]
N, B = 256, 16
row, col = np.arange(N)[:, None], np.arange(N)
causal = col <= row
masks = {
    "(a) prefix": causal | (col < 40),
    "(b) every 16th": causal & ((row - col) % 16 == 0),
    "(c) window and first 4": causal & ((row - col <= 32) | (col < 4)),
}
print("                        intervals in a row   tiles seen   tiles from the first seen to the last")
for name, allowed in masks.items():
    starts_of_runs = allowed & ~np.pad(allowed, ((0, 0), (1, 0)))[:, :-1]
    lists = [Tiling(N, N, B, B, Mask(allowed=allowed)).visited_cols(i) for i in range(N // B)]
    span = sum(blocks[-1] - blocks[0] + 1 for blocks in lists)
    print(f"{name:24}{starts_of_runs.sum(axis=1).max():12} {sum(map(len, lists)):18} {span:20}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Only (a)**: row $r$ sees $[0, \max(40, r + 1))$. In (c) a row sees two intervals. One interval around both is the
# causal mask again, and more than half of its tiles are empty. In (b) no tile is empty, and none is FULL.
# </details>
#
# Two numbers no longer say which tiles to visit. A list does: for each row block the numbers of its column blocks.
# [FlexAttention](https://pytorch.org/blog/flexattention/) works this way. You write a function `mask_mod(b, h, q, kv)`. It is
# evaluated once for all $N^2$ pairs, and gives two lists for each row block: FULL blocks, and blocks that need a mask. A
# generated kernel walks both lists. In a block that needs a mask, it calls the function again for every score.
#
# An interval needs no list. It is computed from the row's number, and lengths may change with every call.
#
# **Takeaway.** An interval is two numbers that the kernel computes. Any other mask needs a list of tiles in memory.

# %% [markdown]
# ## How does a model get all this?
#
# `attention(…, window=(5, 0), softcap=3.0, sinks=…)` takes the windows, caps and sinks of this chapter, and
# `attention_packed` takes documents by their starts. Models of Hugging Face's Python library *transformers* need two lines:
#
# ```python
# import fa2_lab.transformers  # adds the name "fa2_lab"
#
# model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa2_lab")
# ```
#
# Such a model describes its mask by a function of a row and a column, too. `fa2_lab.transformers` reads it once for all
# layers, as an interval. If it is not an interval, an error names the mask. [Appendix C](C_package.ipynb) trains a model
# in this way.
#
# **Takeaway.** One name switches a model over, and its windows, documents, sinks and caps come along.

# %% [markdown]
# ## Recap
#
# - A row sees an interval $[first, last)$. The top and bottom row of a block decide its loop and its tiles.
# - A window makes work grow with $N$. Packed documents are small problems side by side.
# - A softcap is one function of the score, before the mask, with slope $1 - (t/c)^2$.
# - A sink is the initial state $m = sink$, $\ell = 1$, and $dsink = -\sum_r P_{r,sink} D_r$.
# - A mask that is no interval needs a list of tiles.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** The backward pass walks down a column block, so it asks the other way round: which rows see key `col`?
# Write `rows_of` for a window (left, right). The cell below counts the pairs on which it disagrees with `interval`.
#
# <details><summary>Hint</summary>
#
# Row $r$ sees the key if $col - right \le r + N_k - N_q \le col + left$. Solve for $r$.
# </details>
# <details><summary>Solution</summary>
#
# `at = col - (N_k - N_q)`, then `return max(at - right, 0), max(min(at + left + 1, N_q), 0)`. A column of $S$ is an interval
# too, with left and right exchanged.
# </details>

# %%
def rows_of(col, N_q, N_k, left, right):
    return 0, N_q  # replace this line: the first row that sees the key, and the one after the last

# %% tags=["hide-input"]
def disagree(answer, N_q=6, N_k=9, left=3, right=1):
    by_rows = {(r, c) for r in range(N_q) for c in range(*interval(r, N_q, N_k, left, right))}
    return len(by_rows ^ {(r, c) for c in range(N_k) for r in range(*answer(c, N_q, N_k, left, right))})


print("pairs that disagree:", disagree(rows_of))

# %% [markdown]
# **2. Complete.** Two workers each take half of the keys. Both start from the sink, so it is counted twice. Change
# one of the two states so that the second line prints what the first one does.
#
# <details><summary>Hint</summary>
#
# What is the state of a row that has seen nothing?
# </details>
# <details><summary>Solution</summary>
#
# `halves = [(sink, 1.0), (-np.inf, 0.0)]`, or the other way round: one worker alone has the sink.
# </details>

# %%
sink, s = 1.5, np.linspace(-1, 1, 8)
halves = [(sink, 1.0), (sink, 1.0)]  # (m, l) with which each worker starts: change one pair

# %% tags=["hide-input"]
together = one_row(s, np.eye(8), sink, 1.0, np.zeros(8))
parts = [one_row(s[w], np.eye(8)[w], *halves[n], np.zeros(8)) for n, w in enumerate((slice(0, 4), slice(4, 8)))]
L_merged = np.logaddexp(parts[0][1], parts[1][1])
print(f"weight left for the keys: {together[0].sum():.4f}")
print(f"by two workers:           {sum(np.exp(L - L_merged) * o.sum() for o, L in parts):.4f}")

# %% [markdown]
# ## Ten questions on part V
#
# Chapters 14 to 16, without looking back. An answer opens when you click it.
#
# <details><summary>1. One query meets a long cache. What limits its speed?</summary>
#
# The bytes of K and V. Each is read once, for about one FLOP per byte.
# </details>
# <details><summary>2. Four query heads share one K/V head. How do they share one read of the keys?</summary>
#
# They become rows of one tile.
# </details>
# <details><summary>3. Why is a program per head a poor choice in decoding?</summary>
#
# Heads are few, and their caches differ in length. Equal shares of tiles keep all SMs busy.
# </details>
# <details><summary>4. Keys of one head lie in two shares. What does each share hand over?</summary>
#
# A part: its state $o$, $m$ and $\ell$ for each row. A merge puts the parts together.
# </details>
# <details><summary>5. What does a block table change in the arithmetic?</summary>
#
# Nothing. It says where a row of K or V lies.
# </details>
# <details><summary>6. In a ring of GPUs, what travels, and what stays?</summary>
#
# K and V travel. Q, O and L stay.
# </details>
# <details><summary>7. What does a zigzag shard consist of?</summary>
#
# A piece from the front and one from the back, so that every rank has equal work in every step.
# </details>
# <details><summary>8. A window of 1,024 keys back: how does the work grow with N?</summary>
#
# In proportion. The loop of each row block has the same length.
# </details>
# <details><summary>9. What is a sink in the loop?</summary>
#
# An initial state: $m$ = sink, $\ell = 1$, $o = 0$.
# </details>
# <details><summary>10. Why does the backward pass not need the sink to compute dQ?</summary>
#
# $L$ and $O$ contain it, and $P = e^{S - L}$.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against definitions.

# %% tags=["hide-input"]
sizes = [(9, 9), (5, 12), (12, 5), (1, 7)]
windows = [(None, None), (None, 0), (0, 0), (2, 0), (3, 1), (None, 2), (4, None), (99, 99)]
for N_q, N_k in sizes:
    same = tiles_same = True
    for left, right in windows:
        tiling = Tiling(N_q, N_k, 4, 3, Mask(window=(left, right)))
        ends = [interval(r, N_q, N_k, left, right) for r in range(N_q)]
        mine = [(first, last) for first, last in ends if first < last]  # a row that sees nothing has no ends
        theirs = [tuple(map(int, tiling.interval(r))) for r in range(N_q)]
        same &= mine == [(first, last) for first, last in theirs if first < last]
        for i in range(tiling.T_r):
            want = {j: tiling.kind(i, j).name for j in range(tiling.T_c) if tiling.kind(i, j) is not Tile.SKIP}
            tiles_same &= kinds(i, 4, 3, N_q, N_k, left=left, right=right) == want
    verdict(f"interval = Mask.interval and kinds = Tiling.kind, {N_q} queries, {N_k} keys", same and tiles_same)

# %% tags=["hide-input"]
def defined(Q, K, V, seen, softcap, sink):  # softmax over the keys and one more column
    S = np.where(seen, cap(Q @ K.T / np.sqrt(Q.shape[1]), softcap), -np.inf)
    P = naive.safe_softmax(np.column_stack([S, np.full(len(Q), sink)]))[:, : len(K)]
    return P @ V


rng = np.random.default_rng(4)
cases = (11, 14, 4, 1, 2.0, 0.3), (14, 11, 0, 0, 0.5, -3.0), (9, 9, 2, 9, 30.0, 8.0)
for N_q, N_k, left, right, softcap, sink in cases:
    Q_r, (K_r, V_r) = rng.standard_normal((N_q, 5)), rng.standard_normal((2, N_k, 5))
    options = dict(mask=Mask(window=(left, right)), softcap=softcap)
    ends = [interval(r, N_q, N_k, left, right) for r in range(N_q)]
    seen = np.array([[a <= c < b for c in range(N_k)] for a, b in ends])
    O_r, L_r = fa2.forward(Q_r, K_r, V_r, B_r=4, B_c=3, sink=sink, **options)
    name = f"{N_q} × {N_k}, window ({left}, {right}), softcap {softcap}, sink {sink}"
    verdict(f"fa2.forward = the definition: {name}", close(O_r, defined(Q_r, K_r, V_r, seen, softcap, sink)))
    dO_r, (_, P_r) = rng.standard_normal((N_q, 5)), naive.forward(Q_r, K_r, V_r, sink=sink, **options)
    found = fa2.backward(Q_r, K_r, V_r, O_r, L_r, dO_r, B_r=4, B_c=3, **options)
    want = naive.backward(Q_r, K_r, V_r, P_r, dO_r, softcap=softcap)
    verdict("and its gradients = those of standard attention", all(map(close, found, want)))

# %% tags=["hide-input"]
q, k, v = (torch.tensor(X[None, None], dtype=torch.float32, requires_grad=True) for X in (Q, K, V))
sinks = torch.tensor([0.7], requires_grad=True)  # one for each query head: one head here
of_call = dict(window=(5, 0), softcap=3.0, sinks=sinks, backend="reference")
attention(q, k, v, **of_call).backward(torch.tensor(dO[None, None], dtype=torch.float32))
found = [x.grad.numpy().squeeze() for x in (q, k, v, sinks)]
verdict("attention() has these gradients, too", all(close(a, b, 1e-4) for a, b in zip(found, (dQ, dK, dV, dsink), strict=True)))
cu, rows = torch.tensor([0, 5, 12], dtype=torch.int32), [x.detach()[0].transpose(0, 1) for x in (q, k, v)]
by_starts = attention_packed(*rows, cu, cu, causal=True, backend="reference").squeeze().numpy()
verdict("attention_packed() = documents one by one", close(by_starts, packed(Q, K, V, [0, 5, 12], CAUSAL), 1e-4))

# %% tags=["hide-input"]
ratios = {name: [row.ratio("fa2_lab", name) for row in timed] for name in ("fa2_lab padded", "FlashAttention-3")}
verdict("packed: 1.8 to 2.1 times as fast as padded", [round(f(ratios["fa2_lab padded"]), 1) for f in (min, max)] == [1.8, 2.1])
for direction, more in (("forward", [6.8, 15.3]), ("backward", [0.9, 2.3])):
    three = [100 * row.ratio("fa2_lab", "FlashAttention-3") - 100 for row in timed if row.direction == direction]
    verdict(f"{direction}: FlashAttention-3 takes {more[0]} and {more[1]}% more", [round(x, 1) for x in three] == more)
verdict("64,000 tokens padded, 32,800 packed", (16 * max(LENGTHS), sum(LENGTHS)) == (64000, 32800))

# %% tags=["hide-input"]
x, c, h = np.array([0.5, 5.0, 50.0]), 5.0, 1e-6
slope = (cap(x + h, c) - cap(x - h, c)) / (2 * h)
verdict("the slope of a softcap = differences", close(1 - (cap(x, c) / c) ** 2, slope, 1e-7))
verdict("dsink of this notebook = scores.sink_backward = differences", close(dsink, sink_backward(0.7, O, L, dO)))
belongs = np.repeat(range(3), (5, 1, 6))
large = Mask(causal=True, allowed=belongs[:, None] == belongs, window=(3, None))
alone = packed(Q, K, V, [0, 5, 6, 12], Mask(window=(3, 0)))
verdict("packed documents with a window = one large mask", close(alone, naive.forward(Q, K, V, mask=large)[0]))
nothing = fa2.forward(Q, K, V, B_r=4, B_c=4, mask=Mask(key_length=0), sink=2.0)
verdict("a row that sees nothing but the sink: O = 0, L = sink", not nothing[0].any() and (nothing[1] == 2.0).all())
nothing = fa2.forward(Q, K, V, B_r=4, B_c=4, mask=Mask(key_length=0))
verdict("and without a sink: O = 0, L = −∞", not nothing[0].any() and np.isneginf(nothing[1]).all())


def solved(col, N_q, N_k, left, right):
    at = col - (N_k - N_q)
    return max(at - right, 0), max(min(at + left + 1, N_q), 0)


asked = [(*n, *w) for n in sizes for w in ((0, 0), (3, 1), (99, 99))]
verdict("exercise 1 has a solution", all(disagree(solved, *of) == 0 for of in asked))

# %% [markdown] tags=["navigation"]
# [← Rings](15_rings.ipynb) · [The map](00_start.ipynb) · [Lanes, layouts, banks →](A_lanes.ipynb)
