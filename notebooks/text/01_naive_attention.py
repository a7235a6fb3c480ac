# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)

# %% [markdown]
# # 01 · Naive attention
#
# **What does attention compute, and what does it cost?**
#
# In this chapter, we compute attention directly from its definition, forward and backward, and count the bytes that
# move. Taken literally, the definition fails in two ways. We fix the first failure here and work out what the second
# one costs. The next three chapters then lower that cost.
#
# After this notebook you can
#
# - read a map of attention weights, derive the gradients of attention, and check them,
# - use the meter, and explain why standard attention can reach only a fraction of a GPU's speed,
# - turn a score into its probability with a single number per row.
#
# *Time: 50 minutes, including the function to write and the exercise. Hardware: any laptop with NumPy. Before this: [00
# · The map](00_start.ipynb), and the chain rule.*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import numpy as np
from IPython.display import Markdown

from fa2_lab.errata.cases import central_differences
from fa2_lab.examine.cases import one_head
from fa2_lab.plots import time_and_memory
from fa2_lab.plots.show import show
from fa2_lab.records import load
from fa2_lab.reference import naive
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.build import Case, check

# %% [markdown]
# ## What goes wrong?
#
# We run the four lines from chapter 00 in float32 on random queries, keys and values, and make the queries larger and
# larger:


# %%
def attention(Q, K, V):
    S = Q @ K.T / Q.shape[1] ** 0.5
    E = np.exp(S)
    P = E / E.sum(axis=1, keepdims=True)
    return P @ V


draw = np.random.default_rng(0)
Q, K, V = draw.standard_normal((3, 256, 64)).astype(np.float32)
with np.errstate(over="ignore", invalid="ignore"):
    for size in (1, 20, 40):
        lost = np.isnan(attention(np.float32(size) * Q, K, V)).any(axis=1).sum()
        print(f"queries {size:2} times as large: {lost:3} of 256 outputs are not a number")

# %% [markdown]
# The formula is right, but the program fails for large queries. That is the first failure. The second one is memory
# use. This table shows how much memory PyTorch's own standard attention needed on an H200 in addition to its inputs, so
# O is included. This version computes in float32, here for one text with N tokens, 16 heads and d = 128:

# %% tags=["hide-input"]
held = dict(time_and_memory.data()["memory"]["standard"])
lines = [f"| {N:,} | {MiB / 1024:.1f} GiB |" for N, MiB in held.items()]
(refused,) = {
    row.problem["N_q"]
    for row in load("memory").rows
    if row.direction == "forward" and row.problem["N_q"] == 2 * max(held)
    and "torch math" in row.failed
}
Markdown("\n".join(["| tokens N | memory beyond the inputs |", "| ---: | ---: |", *lines,
                    f"| {refused:,} | out of memory |"]))

# %% [markdown]
# With twice as many tokens, standard attention takes four times as much memory. At 32,768 tokens, the GPU's 141 GiB are
# no longer enough, although Q, K, V and O take only 1 GiB together, even in float32. Nearly all of the memory in the
# table holds N × N matrices, which are only intermediate results. PyTorch calls this version the *math* backend, and
# uses it only if no faster backend supports a call. [A profile shows which backend
# ran](../QUESTIONS.md#which-of-pytorchs-backends-computed-my-attention).
#
# Before we fix anything, we look more closely at what the four lines compute.

# %% [markdown]
# ## Three queries, three keys
#
# In this example, all exponentials are 1, 2 or 3, so you can check it by hand. We don't divide the scores by $\sqrt{d}$
# yet.

# %%
Q = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # (N, d): one query per row
K = np.array([[0.0, 0.0], [np.log(2), 0.0], [0.0, np.log(3)]])
V = np.array([[8.0, 0.0], [2.0, 0.0], [0.0, 20.0]])
S = Q @ K.T  # (N, N) scores
E = np.exp(S)
P = E / E.sum(axis=1, keepdims=True)  # (N, N) every row sums to 1
O = P @ V  # (N, d)
print("exp(S), first row:", E[0].round(6), " P:", P[0].round(6), " O:", O[0].round(6))

# %% [markdown]
# Query 0 has the scores 0, log 2 and 0. Their exponentials are 1, 2 and 1, which sum to 4, so the weights are 1/4, 1/2
# and 1/4. The output is therefore 1/4 · (8, 0) + 1/2 · (2, 0) + 1/4 · (0, 20) = (3, 5).

# %% [markdown]
# ## What does P look like for a real sentence?
#
# The figure shows P of one head of a small model, for a short sentence:

# %% tags=["hide-input"]
show("attention_map")

# %% [markdown]
# Each row belongs to one word, and each square in the row shows the weight of one key. A word sees only itself and the
# words before it. In the row of the second "a", nearly all of the weight is on the first "woodchuck", which comes right
# after the first "a".
#
# <details><summary>How does the head find the first "woodchuck"?</summary>
#
# The [code](../fa2_lab/plots/attention_map.py) for this figure trains one head to guess the next word, using the
# formulas of this chapter. The training texts are random, but within a text, each word is usually followed by the same
# word. We let this small head compute each word's key from the word before it, which in a large model is the work of an
# earlier layer. The word before the first "woodchuck" is the first "a", so the key of "woodchuck" means "I come after
# an a", which is exactly what the query of the second "a" looks for. The head never saw this sentence during training.
# After the second "woodchuck", it bets on "chuck", which is wrong.
#
# </details>

# %% [markdown]
# ## How large may a score be?
#
# The first failure concerns large scores. A score is a sum of d products. If the factors have magnitudes of about 1 and
# random signs, the products partly cancel, and the sum grows like $\sqrt{d}$. Large scores are bad for learning,
# because one key then gets nearly all the weight, and a small change in the scores has almost no effect. The scores are
# therefore multiplied by a scale $\tau$, usually $1 / \sqrt{d}$, which gives $S = \tau QK^\top$. Individual scores can
# still be large, however. If a score $s$ is above about 88.7, $e^s$ is too large for float32 and becomes infinite.
#
# **Predict.** A row has the float32 scores 90, 89 and 0. What does `np.exp(s) / np.exp(s).sum()` give for the first
# weight?
#
# - ☐ infinite
# - ☐ 0.731
# - ☐ not a number
#
# <details><summary>Answer</summary>
#
# **not a number.** $e^{90}$ and the sum are both infinite, and ∞/∞ is NaN, although the right weight is 0.731. A row of
# very negative scores fails as well, because all of its exponentials are then 0, and 0/0 is also NaN.
# </details>
#
# The fix is to subtract the row's maximum first. This divides the numerator and the denominator by the same number, so
# the weights stay the same. But now the largest exponential is 1, and the sum is at least 1. This version is called
# *safe softmax*, and from here on, softmax always means safe softmax.


# %%
def safe_softmax(S):
    E = np.exp(S - S.max(axis=1, keepdims=True))
    return E / E.sum(axis=1, keepdims=True)


# %% [markdown]
# ## How do we count what moves?
#
# *Standard attention* runs the definition step by step, as three kernels. Each kernel loads its inputs from HBM and
# stores its result there. To count this traffic, we use a convention and a tool. By convention, capital letters denote
# arrays in HBM. When such an array appears with brackets to the right of an equals sign, its elements are *loaded* onto
# the chip. When it appears with brackets to the left, elements are *stored*. The elements that a program loads and
# stores are its *requests*. The tool is a *meter*, which watches these arrays and counts the requests:


# %%
def standard(Q, K, V, tau, trace=UNWATCHED):
    N_q, N_k = len(Q), len(K)
    S, P, O = np.empty((N_q, N_k)), np.empty((N_q, N_k)), np.empty(Q.shape)
    # the same arrays, but now the meter watches them
    Q, K, V, S, P, O = trace.hbm(Q=Q, K=K, V=V, S=S, P=P, O=O)
    S[:] = tau * (Q[:] @ K[:].T)  # two loads, one store
    P[:] = safe_softmax(S[:])
    O[:] = P[:] @ V[:]
    return np.asarray(O)


rng = np.random.default_rng(1)
Q8, K8, V8 = rng.standard_normal((3, 8, 4))  # N = 8, d = 4
meter = Trace()
standard(Q8, K8, V8, 0.5, meter)
for tensor in "QKSPVO":
    print(f"{tensor}: {meter.loads(tensor):3} loaded, {meter.stores(tensor):3} stored")
print("in total:", meter.hbm_elements, " 4N² + 4Nd =", 4 * 8**2 + 4 * 8 * 4)

# %% [markdown]
# S is stored and loaded back, and so is P, which makes 4 · 64 elements. Loading Q, K and V and storing O adds another 4
# · 32.
#
# `Trace()` makes a meter, and `trace.hbm(…)` returns the arrays that it watches. If you pass no meter, the default
# `UNWATCHED` makes the same lines run on plain arrays. The only parts of a meter that you need are `meter.loads("Q")`,
# `meter.stores("Q")` and `meter.hbm_elements`.
#
# Does every request reach the memory itself? L2 is on the way, and it serves a load itself if it still holds the
# requested bytes. If a request goes all the way, we say that it *reaches DRAM*, which is the kind of memory that HBM is
# made of. All bytes that reach DRAM are the *DRAM traffic*. Requests and DRAM traffic can be very different, as chapter
# 04 shows, but for `standard` and a long text, they are the same. S and P are too large for L2, so all their elements
# reach DRAM, and each element of Q, K, V and O is requested only once.
#
# Real kernels request Q, K and V more often. In a real kernel, many workers compute S in tiles, and a tile needs the
# matching rows of Q and K. The same rows of K are therefore requested again for every block of rows of Q. But Q, K and
# V are small, so L2 serves these repeated requests, and each of the three matrices still reaches DRAM only once. The
# DRAM traffic of real kernels is thus also $4N^2 + 4Nd$ elements.

# %% [markdown]
# ## Is DRAM traffic the bottleneck?
#
# The answer depends on how much is computed with each byte. *Arithmetic intensity* is the number of FLOPs per byte
# moved.
#
# - FLOPs: $QK^\top$ takes d multiply-adds per score, and $PV$ takes d per weight, so together they take $4N^2 d$ FLOPs.
# - Bytes: S takes four bytes per score. In bf16, which keeps only 8 significant bits, numbers between 16 and 32 are 1/8
#   apart. A score there could be off by half of that, or 0.06, and its weight by a factor of e^0.06 = 1.06. P takes
#   only two bytes per weight, in the tensor cores' format, because a weight is between 0 and 1, and the same rounding
#   changes it by less than half a percent. Both are stored once and loaded once, so a score and its weight together
#   cost 2 · 4 + 2 · 2 = 12 bytes.
#
# **Predict.** For a product of two large N × N matrices, a larger N means more FLOPs per byte. Is the same true of
# attention?
#
# - ☐ no, the intensity stays the same
# - ☐ yes, the intensity grows with N
# - ☐ no, the intensity falls
#
# <details><summary>Answer</summary>
#
# **no, the intensity stays the same.** FLOPs and bytes both grow with $N^2$. A product of two N × N matrices takes
# $2N^3$ FLOPs and moves $3N^2$ numbers, so a larger N helps there. In attention, the inner dimension is d, which does
# not grow with N.
# </details>

# %% [markdown]
# The intensity is thus $4N^2 d / 12N^2 = d/3$. The bytes of Q, K, V and O make it slightly lower, for example 42 for d
# = 128 and N = 4,096. According to the list in chapter 00, however, an H200 could do 206 FLOPs while HBM delivers one
# byte, so standard attention can reach at most about a fifth of the GPU's speed. We call it *memory-bound*, because the
# bytes that it moves, and not its FLOPs, determine its time. A method that is limited by FLOPs is called
# *compute-bound*.
#
# When we measured standard attention with simple kernels on an H200, it reached 14% of the tensor cores' full speed.
# These kernels are rung 00 of the *ladder* in chapter 10, a series of kernels in which each *rung* changes one thing.

# %% [markdown]
# ## Backwards through a product
#
# For training, we need to know how a loss $\varphi$ changes when Q, K and V change. We write dX for the gradient of
# $\varphi$ with respect to X, which has the same shape as X. We take dO as given, because it comes from the later parts
# of the model. We begin with $O = PV$.
#
# Take our three queries again, and let the loss be a single entry, $\varphi = O_{00} = P_{00} V_{00} + P_{01} V_{10} +
# P_{02} V_{20}$. The gradients with respect to these entries of V are the weights $P_{00}, P_{01}, P_{02}$ = 1/4, 1/2,
# 1/4. The gradients with respect to the weights are $V_{00}, V_{10}, V_{20}$ = 8, 2, 0.
#
# In general, $V_{jc}$ contributes to $O_{ic}$ in every row i, with the weight $P_{ij}$, so $dV_{jc} = \sum_i P_{ij}\,
# dO_{ic}$, or in matrix form $dV = P^\top dO$. In the same way, $P_{ij}$ contributes to $O_{ic}$ in every column c,
# with the factor $V_{jc}$, so $dP = dO\, V^\top$. The gradient with respect to one factor of a product is thus another
# product, which contains the other factor.

# %% [markdown]
# ## Backwards through softmax
#
# **Predict.** A row has the weights 0.6, 0.3 and 0.1. If we raise the first key's score slightly, what happens to the
# other two weights?
#
# - ☐ nothing, only the first score changed
# - ☐ the larger one falls more
# - ☐ both fall by the same amount
#
# <details><summary>Answer</summary>
#
# **the larger one falls more.** All weights share one denominator, and as it grows, both of these weights shrink by the
# same *factor*, so 0.3 loses three times as much as 0.1.
# </details>

# %% [markdown]
# To make this exact, write a weight as $p_j = e^{s_j} / \Sigma$ with $\Sigma = \sum_k e^{s_k}$. We raise one score
# $s_k$ and ask how each weight changes. In both of the following cases, $\partial \Sigma / \partial s_k = e^{s_k}$,
# because only one term of the sum contains $s_k$.
#
# - For *another* key, $j \ne k$, only the denominator changes, so $\partial p_j / \partial s_k = -e^{s_j} e^{s_k} /
#   \Sigma^2 = -p_j p_k$. As the answer above says, the weight falls in proportion to $p_j$.
# - For the *same* key, $j = k$, the numerator changes as well, which adds $e^{s_k} / \Sigma = p_k$. So $\partial p_k /
#   \partial s_k = p_k - p_k p_k$.
#
# For this one row, let $dp_j$ and $ds_k$ be the gradients of $\varphi$ with respect to $p_j$ and $s_k$. The score $s_k$
# changes every weight, so by the chain rule, its gradient is a sum over all weights. Every weight contributes a term
# with $-p_j p_k$, and the weight of key k itself adds a term with $p_k$:
#
# $$\begin{aligned} ds_k &= \sum_j dp_j\, \frac{\partial p_j}{\partial s_k} = p_k\, dp_k - p_k \sum_j p_j\, dp_j \\
# &= p_k\,(dp_k - D), \quad D = \sum_j p_j\, dp_j . \end{aligned}$$
#
# Query 0 has p = (1/4, 1/2, 1/4), and for $\varphi = O_{00}$ its dp is (8, 2, 0). This gives $D = 8/4 + 2/2 = 3$ and
# ds = (5/4, −1/2, −3/4). It is no coincidence that D is $O_{00}$.
#
# D is the weighted mean of the row's dp. It can also be computed without the row of P, from the output. Let $do_i$,
# $v_j$ and $o_i$ be rows of dO, V and O. Then $dP_{ij} = do_i \cdot v_j$, so
#
# $$D_i = \sum_j P_{ij}\,(do_i \cdot v_j) = do_i \cdot \sum_j P_{ij} v_j = do_i \cdot o_i .$$
#
# For all rows together, we write $dS = P \circ (dP - D)$, where ∘ multiplies entry by entry, and $D_i$ is subtracted
# from every entry in row i of dP. Since $S = \tau QK^\top$ is again a product, $dQ = \tau\, dS\, K$ and $dK = \tau\,
# dS^\top Q$.

# %% [markdown]
# ## How do we know that a gradient is right?
#
# The five lines of `backward` are Algorithm 3 of the FlashAttention paper (FA1.A3 in our tags). As in the paper, D is
# the row sum of $P \circ dP$ here. In chapter 05, we use the cheaper $do \cdot o$, which is the same number.


# %%
def backward(Q, K, V, P, dO, tau):
    dV = P.T @ dO  # FA1.A3.L1  (N_k, d)
    dP = dO @ V.T  # FA1.A3.L2  (N_q, N_k)
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))  # FA1.A3.L3  (N_q, N_k)
    dQ = tau * (dS @ K)  # FA1.A3.L4  (N_q, d)
    dK = tau * (dS.T @ Q)  # FA1.A3.L5  (N_k, d)
    return dQ, dK, dV, dS


# %% [markdown]
# You can check these gradients with *finite differences*, which need no formula for the gradient. Change one entry by
# +h and by −h, subtract the two losses, and divide by 2h. We use the sum of $dO \circ O$ with a fixed dO as the loss,
# because its gradient with respect to O is dO. The next cell compares finite differences with three versions of dK for
# $\tau$ = 0.5: the right one, one without $\tau$, and one without the transpose.

# %% tags=["hide-input"]
tau = 0.5
Q, K, V, dO = rng.standard_normal((4, 5, 4))
P = safe_softmax(tau * Q @ K.T)
dQ, dK, dV, dS = backward(Q, K, V, P, dO, tau)


def loss(K):
    return (dO * (safe_softmax(tau * Q @ K.T) @ V)).sum()


truth = central_differences(loss, K)[0, 0]
for name, guess in (("τ dSᵀ Q", dK), ("dSᵀ Q", dS.T @ Q), ("τ dS Q", tau * dS @ Q)):
    print(f"dK = {name:8} first entry {guess[0, 0]:7.4f}, finite differences {truth:7.4f}")

# %% [markdown]
# All three versions have the right shape, and even the last one does, because there are as many queries as keys.
# Without $\tau$, the gradient is too large by a factor of $1/\tau$ = 2. If you test with different numbers of queries
# and keys, and with $\tau$ ≠ 1, neither mistake can hide.

# %% [markdown]
# ## Can we do without S and P?
#
# The second failure was the memory that S and P take. What if we compute one query at a time? We load all keys and
# values, compute the query's row of scores, its weights and its output, and then throw the row away. That way, we never
# hold more than one row of S and P.
#
# But the weights will be needed again for the gradients. One number per row is enough to turn any score in that row
# into its weight. This number is the *logsumexp* $L_i = \log \sum_j e^{S_{ij}}$:
#
# $$P_{ij} = e^{S_{ij}} / e^{L_i} = e^{S_{ij} - L_i} .$$
#
# It is therefore enough to keep O, from which $D_i = do_i \cdot o_i$ follows, and L, and to compute a score again when
# its weight is needed. Appendix B.1 of the [FlashAttention paper](https://arxiv.org/abs/2205.14135) does this, but its
# $L_i$ is the plain sum $\sum_j e^{S_{ij}}$, without the logarithm.
#
# **Build.** `by_rows(Q, K, V, tau)` computes O and L one query at a time, and never holds anything of size N × N. To
# keep large scores from overflowing, let $m$ be the row's maximum and compute $L = m + \log \sum_j e^{s_j - m}$.


# %%
def by_rows(Q, K, V, tau):  # (N_q, d), (N_k, d), (N_k, d), number -> (N_q, d), (N_q,)
    ...


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def rows(words, N_q, N_k, tau, size=1):
    draw = np.random.default_rng(N_q)
    q, k, v = size * draw.standard_normal((N_q, 4)), *draw.standard_normal((2, N_k, 4))
    right = naive.forward(q, k, v, tau=tau)[0], naive.logsumexp(tau * q @ k.T)
    return Case(words, (q, k, v, tau), right, one_head(q, k, v, scale=tau))


check(
    by_rows,
    rows(
        "one query and three keys. Is L a logarithm, and is o a weighted mean of values?",
        1,
        3,
        1.0,
    ),
    rows(
        "five queries and three keys. How many rows does O have, and how many entries does L have?",
        5,
        3,
        1.0,
    ),
    rows("τ = 0.5. Is it in the scores?", 4, 6, 0.5),
    rows(
        "scores near 1,000. Is m subtracted before e^s, and added back into L?",
        4,
        6,
        0.5,
        size=1000,
    ),
    names=("O", "L"),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def by_rows(Q, K, V, tau):
#     O, L = np.empty((len(Q), V.shape[1])), np.empty(len(Q))
#     for i, q in enumerate(Q):
#         s = tau * (K[:] @ q)  # (N_k,): loads all keys
#         m = s.max()
#         L[i] = m + np.log(np.exp(s - m).sum())
#         O[i] = np.exp(s - L[i]) @ V[:]  # loads all values
#     return O, L
# ```
# </details>
#
# **Predict.** For N = 512, `by_rows` holds a row of 512 numbers, whereas S and P have half a million. With d = 64, how
# many elements does `by_rows` request, compared with standard attention?
#
# - ☐ about as many
# - ☐ about a thirtieth
# - ☐ about 30 times as many
#
# <details><summary>Answer</summary>
#
# **about 30 times as many.** For each query, `by_rows` loads all keys and all values, which makes $2dN^2 = 128N^2$
# elements. According to the meter's formula, standard attention requests only $4N^2 + 4Nd = 4.5N^2$. How much memory a
# method needs and how many elements it requests are thus two different costs.
#
# Most of these requests don't reach DRAM, because L2 holds K and V. But bytes from L2 also cost time, although less
# than bytes from DRAM, so the times differ by less than a factor of 30. At two bytes per element, the requests of
# `by_rows` are $256N^2$ bytes. At 102 FLOPs per byte (chapter 00), they take as long as $26{,}000\,N^2$ FLOPs, which is
# about ten times as long as DRAM takes for the $12N^2$ bytes of S and P.
# </details>
#
# What if a whole block of queries shared each load of the keys and values? With 128 queries per block, there would be
# 128 times fewer of these requests. But for 8,192 keys, the scores of 128 queries take 128 · 8,192 · 4 bytes, or 4 MiB,
# which does not fit into the 228 KiB of an SM. The keys would therefore have to come block by block, and a row of S
# would arrive in pieces. The next chapter asks whether a softmax can be computed that way.

# %% [markdown]
# ## Recap
#
# - The definition is $S = \tau QK^\top$, $P = \mathrm{softmax}(S)$ and $O = PV$. The softmax subtracts the row's
#   maximum first, which leaves the weights unchanged.
# - In standard attention, $4N^2 + 4Nd$ elements reach DRAM. That makes about d/3 FLOPs per byte, which is too few to
#   keep a GPU's tensor cores busy.
# - The gradients are $dV = P^\top dO$, $dP = dO\,V^\top$, $dS = P \circ (dP - D)$, $dQ = \tau\,dS\,K$ and $dK =
#   \tau\,dS^\top Q$, with $D_i = do_i \cdot o_i$.
# - Since $P_{ij} = e^{S_{ij} - L_i}$, one number per row is enough to turn any score into the corresponding entry of P.
#   With this number, you can also [look at the weights of a few
#   rows](../QUESTIONS.md#how-do-i-get-the-attention-weights-of-a-few-rows) when a fast kernel returns only O and L.

# %% [markdown]
# ## Exercises
#
# **By hand.** Query 1 has the weights 1/5, 1/5 and 3/5, and for $\varphi = O_{10}$ its dp is (8, 2, 0). What are D and
# ds? What is the sum of ds, and why is it the same for every row of dS?
#
# <details><summary>Solution</summary>
#
# $D = 8/5 + 2/5 = 2$, which is $O_{10}$, and ds = (6/5, 0, −6/5). The sum is 0, because adding a number to all scores
# of a row does not change any weight. You can therefore test an implementation by checking that every row of its dS
# sums to 0.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
from fa2_lab.machine import chips, io_model, reasons
from fa2_lab.machine.rates import cost, rates
from fa2_lab.tiles import Tiling
from fa2_studio.book.verdicts import close, verdict

verdict("standard = naive.forward",
        close(standard(Q8, K8, V8, 0.5), naive.forward(Q8, K8, V8, tau=0.5)[0]))
verdict("the rows of dS sum to 0", close(dS.sum(axis=1), np.zeros(5)))
verdict("the gradients = naive.backward",
        all(map(close, (dQ, dK, dV), naive.backward(Q, K, V, P, dO, tau=tau))))
verdict("the meter = the closed form",
        meter.hbm_elements == io_model.standard_forward(Tiling(8, 8, 1, 1), 4).total)
intensity = cost("standard", N=4096, d=128).intensity("dram_bytes")
verdict("42 FLOPs per byte, a fifth of what the GPU could do",
        [round(intensity), round(intensity / 20.6)] == [42, 2])
reached = reasons.forward_row(load("ladder"), causal=False,
                            d=128).rate("r00_standard") * 1e12 / chips.H200.tensor_flops_per_second
verdict("measured: 14%", round(reached, 2) == 0.14)
price = rates(chips.H200).in_flops()
rows_from_l2, both_from_dram = 2 * 2 * 64 * price["l2"], 12 * price["dram"]
verdict("by_rows: 26,000 N² FLOPs for L2, ten times DRAM's",
        [round(rows_from_l2, -3), rows_from_l2 // both_from_dram] == [26000, 10])
growth = [held[2 * N] / held[N] for N in (4096, 8192)]
verdict("twice the tokens take four times the memory", all(3.8 < x < 4.1 for x in growth)
        and refused == 32768)

# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)
