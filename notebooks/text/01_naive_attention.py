# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)

# %% [markdown]
# # 01 · Naive attention
#
# **What does attention compute, and what does it cost?**
#
# We compute attention as it is defined, forward and backward, and count what it moves. Later chapters lower the cost.
#
# After this notebook you can
#
# - read a map of weights, derive the gradients of attention, and check them,
# - read the meter, and say why standard attention can use only a part of a GPU's speed,
# - turn a score into its probability with a single number per row.
#
# *Time: 30 minutes with the exercise. Hardware: any laptop, NumPy alone. Before this: [00 · The
# map](00_start.ipynb), and the chain rule.*

# %% tags=["hide-input"]
import numpy as np

from fa2_lab.errata.cases import central_differences
from fa2_lab.machine import io
from fa2_lab.machine.prices import cost
from fa2_lab.plots import attention_map
from fa2_lab.plots.show import show
from fa2_lab.reference import naive
from fa2_lab.tiles import Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Three queries, three keys
#
# The four lines of chapter 00. All exponentials are 1, 2 or 3, and the scores are not divided by $\sqrt{d}$ yet.

# %%
Q = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # (N, d): one query to a row
K = np.array([[0.0, 0.0], [np.log(2), 0.0], [0.0, np.log(3)]])
V = np.array([[8.0, 0.0], [2.0, 0.0], [0.0, 20.0]])
S = Q @ K.T  # (N, N) scores
E = np.exp(S)
P = E / E.sum(axis=1, keepdims=True)  # (N, N) every row sums to 1
O = P @ V  # (N, d)
print("exp(S), first row:", E[0].round(6), " P:", P[0].round(6), " O:", O[0].round(6))

# %% [markdown]
# Query 0 has the scores 0, log 2 and 0. The exponentials are 1, 2 and 1 with the sum 4, so the weights are 1/4, 1/2 and
# 1/4. The output is 1/4 · (8, 0) + 1/2 · (2, 0) + 1/4 · (0, 20) = (3, 5).

# %% [markdown]
# ## What does P look like for a real sentence?

# %% tags=["hide-input"]
show(attention_map.draw(**attention_map.data()))

# %% [markdown]
# A row belongs to one word, and each square is the weight of one key. A word sees only itself and the words before it. Look
# at the second "a": nearly all of its weight lies on "woodchuck", the word that followed the first "a".
#
# The [code](../fa2_lab/plots/attention_map.py) trains one head to guess the next word, by the formulas of this chapter,
# on random texts in which each word mostly has the same successor. In this toy head the key at a place is made from the
# word before it. So the query of the second "a" finds "woodchuck", whose key says "after an a". The head has never seen
# this sentence. After the second "woodchuck" it bets on "chuck", and is wrong.

# %% [markdown]
# ## How large may a score be?
#
# A score adds d products. If their factors are about 1 and of either sign, the products partly cancel, and the sum grows
# like $\sqrt{d}$. With large scores one key gets nearly all the weight, and a small change of the scores changes almost
# nothing. A model cannot learn from that. So the scores are multiplied by a scale $\tau$, usually $1 / \sqrt{d}$:
# $S = \tau QK^\top$. Single scores can still be large. From about 88.7 on, $e^s$ is too large for float32: infinite.
#
# **Predict.** A float32 row has the scores 90, 89 and 0. What is its first weight by `np.exp(s) / np.exp(s).sum()`?
#
# - ☐ 0.731
# - ☐ infinite
# - ☐ not a number
#
# <details><summary>Answer</summary>
#
# **not a number.** $e^{90}$ and the sum are both infinite, and ∞/∞ is NaN. If all scores are very negative, all
# exponentials are 0, and 0/0 is NaN as well. The right weight is 0.731.
# </details>
#
# The cure is to subtract the row's maximum first. That divides numerator and denominator by the same number, so the weights
# stay the same. But now the largest exponential is 1, and the sum is at least 1. This is *safe softmax*, and from here on
# softmax always means it.


# %%
def safe_softmax(S):
    E = np.exp(S - S.max(axis=1, keepdims=True))
    return E / E.sum(axis=1, keepdims=True)


# %% [markdown]
# ## How do we count what moves?
#
# *Standard attention* runs the definition one step after the other. Each step loads what it needs from HBM and stores
# what it made. A *meter*, an object of the class `Trace`, counts this:
#
# | code | what it means |
# | --- | --- |
# | `meter = Trace()` | a new meter |
# | `Q, K = meter.hbm(Q=Q, K=K)` | Q and K live in HBM; these are the same arrays, watched by the meter |
# | `q = Q[:]` | a *load*: the elements in the brackets come on chip |
# | `O[:] = o` | a *store*: they go back to HBM |
# | `meter.loads("Q")`, `meter.stores("Q")`, `meter.hbm_elements` | the counts: of Q, and of all loads and stores |
# | `standard(…, trace=meter)` | a function under this meter; the default `UNWATCHED` means: no meter |


# %%
def standard(Q, K, V, tau, trace=UNWATCHED):
    S, P = np.empty((2, len(Q), len(K)))
    Q, K, V, S, P, O = trace.hbm(Q=Q, K=K, V=V, S=S, P=P, O=np.empty(Q.shape))
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
print("together:", meter.hbm_elements, " 4N² + 4Nd =", 4 * 8**2 + 4 * 8 * 4)

# %% [markdown]
# S goes out and comes back, and so does P: 4 · 64 elements. Q, K and V come in and O goes out: 4 · 32 more. In a long
# text all of these reach DRAM, because S and P have no room in L2. (A kernel on a GPU loads Q, K and V in pieces, and some
# pieces many times. But these are small enough for L2, so each of the three still comes from DRAM once; chapter 04.)

# %% [markdown]
# ## Is that much?
#
# The *arithmetic intensity* decides whether the arithmetic or the memory is slower: how many FLOPs are done for each byte
# that is moved? (The meter counted elements. From here we count bytes.)
#
# - FLOPs: $QK^\top$ takes d multiply-adds for each score, $PV$ d for each weight: $4N^2 d$ FLOPs together.
# - Bytes: S has four bytes a number, since a score that is off by 0.1 makes p off by a tenth. P has two, as tensor cores take
#   it; it lies between 0 and 1 and tolerates that. Each is stored once and loaded once, 12 bytes for each place.
#
# **Predict.** For a product of two large matrices a larger N means more FLOPs for each byte. Here too?
#
# - ☐ yes, the intensity grows with N
# - ☐ no, the intensity stays
# - ☐ no, the intensity falls
#
# <details><summary>Answer</summary>
#
# **no, the intensity stays.** FLOPs and bytes both grow with $N^2$. A product of two N × N matrices does $2N^3$ FLOPs on
# $3N^2$ numbers, so there a larger N helps. Here the inner dimension is d, and d stays.
# </details>

# %% [markdown]
# So the intensity is $4N^2 d / 12N^2 = d/3$. (Q, K, V and O make it a little less: 42 for d = 128 and N = 4,096.)
# By the prices of chapter 00 an H200 could do 206 FLOPs for each byte from HBM. So standard attention reaches at most about
# a fifth of its speed.

# %% [markdown]
# ## Backwards through a product
#
# Training asks how a loss $\varphi$ changes when Q, K and V change. We write dX for the gradient of $\varphi$ with
# respect to X. It has the shape of X. dO is given; it comes from what follows in the model. We begin with $O = PV$.
#
# Take the three queries again, and let the loss be a single entry, $\varphi = O_{00} = P_{00} V_{00} + P_{01} V_{10} +
# P_{02} V_{20}$. The gradients with respect to these entries of V are the weights $P_{00}, P_{01}, P_{02}$ = 1/4, 1/2, 1/4.
# Those with respect to the weights are $V_{00}, V_{10}, V_{20}$ = 8, 2, 0.
#
# In general $V_{jc}$ enters every row i with the weight $P_{ij}$, so $dV_{jc} = \sum_i P_{ij}\, dO_{ic}$, that is
# $dV = P^\top dO$. And $P_{ij}$ enters every column c with $V_{jc}$, so $dP = dO\, V^\top$. The gradients of a product are
# products with the other factor.

# %% [markdown]
# ## Backwards through softmax
#
# **Predict.** A row has the weights 0.6, 0.3 and 0.1. The score of the first key is raised a little. What happens to the
# other two weights?
#
# - ☐ nothing, only the first score changed
# - ☐ both fall by the same amount
# - ☐ the larger one falls more
#
# <details><summary>Answer</summary>
#
# **the larger one falls more.** They share one sum. As it grows, both shrink by the same *factor*, so 0.3 loses three times
# as much as 0.1.
# </details>

# %% [markdown]
# Exactly: $p_j = e^{s_j} / \Sigma$ with $\Sigma = \sum_k e^{s_k}$. The derivative of $e^{s_j}$ with respect to $s_j$ is
# $e^{s_j}$. That of $\Sigma$ is $e^{s_j}$ too, because only one of its terms contains $s_j$. The quotient rule gives
# $\partial p_j / \partial s_j = p_j - p_j^2$, and for two different keys $\partial p_j / \partial s_k = -p_j p_k$.
#
# For this one row let $dp_j$ and $ds_k$ be the gradients of $\varphi$ with respect to $p_j$ and $s_k$. The score $s_k$
# changes every weight, so by the chain rule its gradient is a sum over all of them:
#
# $$\begin{aligned} ds_k &= \sum_j dp_j\, \frac{\partial p_j}{\partial s_k} = p_k\, dp_k - p_k \sum_j p_j\, dp_j \\
# &= p_k\,(dp_k - D), \quad D = \sum_j p_j\, dp_j . \end{aligned}$$
#
# Query 0 has p = (1/4, 1/2, 1/4), and for $\varphi = O_{00}$ its dp is (8, 2, 0). So $D = 8/4 + 2/2 = 3$, which is $O_{00}$,
# and ds = (5/4, −1/2, −3/4).
#
# D can also be computed without the row of P. With $do_i$, $v_j$, $o_i$ for rows of dO, V, O, $dP_{ij} = do_i \cdot v_j$, so
#
# $$D_i = \sum_j P_{ij}\,(do_i \cdot v_j) = do_i \cdot \sum_j P_{ij} v_j = do_i \cdot o_i .$$
#
# For all rows together $dS = P \circ (dP - D)$: ∘ multiplies entry by entry, and row i of dP loses $D_i$.
# $S = \tau QK^\top$ is a product again, so $dQ = \tau\, dS\, K$ and $dK = \tau\, dS^\top Q$.

# %% [markdown]
# ## How do we know that a gradient is right?
#
# The five lines of `backward` below are Algorithm 3 of the FlashAttention paper (FA1.A3 in our tags). They compute D as the
# row sum of $P \circ dP$. That is the same number as $do \cdot o$ (above).


# %%
def backward(Q, K, V, P, dO, tau):
    dV = P.T @ dO  # FA1.A3.L1  (N_k, d)
    dP = dO @ V.T  # FA1.A3.L2  (N_q, N_k)
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))  # FA1.A3.L3  (N_q, N_k)
    dQ = tau * (dS @ K)  # FA1.A3.L4  (N_q, d)
    dK = tau * (dS.T @ Q)  # FA1.A3.L5  (N_k, d)
    return dQ, dK, dV, dS


# %% [markdown]
# *Finite differences* need no formula: change one entry by +h and by −h, subtract the two losses, and divide by 2h. As the
# loss we take the sum of $dO \circ O$ with a fixed dO. (Its gradient with respect to O is dO.) Below we compare dK for
# $\tau$ = 0.5: once right, once without $\tau$, and once without the transpose.

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
# All three have the right shape, the last one because there are as many queries as keys. Without $\tau$ the gradient is
# too large by a factor $1/\tau$ = 2. In a test use unequal lengths and $\tau$ ≠ 1, so that no slip can hide.

# %% [markdown]
# ## Can we do without S and P?
#
# One number per row is enough to turn any score into its probability. It is the *logsumexp*
# $L_i = \log \sum_j e^{S_{ij}}$ (computed with the maximum subtracted, chapter 02):
#
# $$P_{ij} = e^{S_{ij}} / e^{L_i} = e^{S_{ij} - L_i} .$$
#
# So we could keep only L: take the queries one after the other, load all keys for L, and load them again, with the
# values, for p and o. (Appendix B.1 of the [FlashAttention paper](https://arxiv.org/abs/2205.14135) does this. Its $L_i$ is
# the plain sum $\sum_j e^{S_{ij}}$, without the logarithm.)
#
# **Predict.** For N = 512 that holds 512 numbers, where S and P are half a million. How many elements does it move, with
# d = 64, compared with standard attention?
#
# - ☐ about a fortieth
# - ☐ about as many
# - ☐ about 40 times as many
#
# <details><summary>Answer</summary>
#
# **about 40 times as many.** For each query it loads all keys twice and all values once: $3dN^2 = 192N^2$ elements.
# Standard attention moves $4N^2 + 4Nd = 4.5N^2$. Memory held and elements moved are two costs.
# </details>
#
# What if a whole block of queries shared each load of the keys? Their scores with all keys would not fit on chip. So
# the keys would have to come block by block, and a row of S would arrive in pieces. The next chapter asks whether
# softmax can take that.

# %% [markdown]
# ## Recap
#
# - $S = \tau QK^\top$, $P = \mathrm{softmax}(S)$, $O = PV$. Softmax subtracts the row's maximum first; the weights stay.
# - Standard attention moves $4N^2 + 4Nd$ elements: d/3 FLOPs for each byte, too few for a GPU.
# - Backward: $dV = P^\top dO$, $dP = dO\,V^\top$, $dS = P \circ (dP - D)$, $dQ = \tau\,dS\,K$, $dK = \tau\,dS^\top Q$, with
#   $D_i = do_i \cdot o_i$.
# - $P_{ij} = e^{S_{ij} - L_i}$: one number per row brings back any entry of P.

# %% [markdown]
# ## Exercises
#
# **By hand.** Query 1 has the weights 1/5, 1/5, 3/5, and for $\varphi = O_{10}$ its dp is 8, 2, 0. What are D and ds? What
# is the sum of ds, and why does every row of dS have it?
#
# <details><summary>Solution</summary>
#
# $D = 8/5 + 2/5 = 2$, which is $O_{10}$, and ds = (6/5, 0, −6/5). The sum is 0, because adding a number to all scores of a
# row changes no weight. So the row sums of dS test an implementation.
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("standard = naive.forward", close(standard(Q8, K8, V8, 0.5), naive.forward(Q8, K8, V8, tau=0.5)[0]))
verdict("the rows of dS sum to 0", close(dS.sum(axis=1), np.zeros(5)))
verdict("the gradients = naive.backward", all(map(close, (dQ, dK, dV), naive.backward(Q, K, V, P, dO, tau=tau))))
verdict("the meter = the closed form", meter.hbm_elements == io.standard_forward(Tiling(8, 8, 1, 1), 4).total)
intensity = cost("standard", N=4096, d=128).intensity("crossed")
verdict("42 FLOPs a byte, a fifth of the roof", [round(intensity), round(intensity / 20.6)] == [42, 2])

# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)
