# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)

# %% [markdown]
# # 01 · Naive attention
#
# **What does attention compute, and what does it cost?**
#
# In this chapter we compute attention as it is defined, forward and backward, and count what it moves. Every later
# result is compared with this one. Later chapters lower its cost.
#
# After this notebook you can
#
# - compute attention by hand for three queries, derive its gradients, and check them,
# - read the meter, and say why standard attention cannot use more than a part of a GPU's speed,
# - turn a score into its probability with a single number per row.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any laptop, NumPy alone. Before this: [00 · The
# map](00_start.ipynb), and the chain rule.*

# %%
import numpy as np

from fa2_lab.machine import chips, io
from fa2_lab.plots import quadratic_memory
from fa2_lab.plots.show import show
from fa2_lab.reference import naive
from fa2_lab.tiles import Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Three queries, three keys
#
# We go through the four lines of chapter 00 with small numbers. All exponentials are 1, 2 or 3, and the scores are not
# divided by $\sqrt{d}$ yet.
#
# **Predict.** Query 0 is (1, 0), so its scores are 0, log 2 and 0. The values are (8, 0), (2, 0) and (0, 20). What is its
# output?

# %% tags=["hide-input"]
Q = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # (N, d): one query to a row
K = np.array([[0.0, 0.0], [np.log(2), 0.0], [0.0, np.log(3)]])
V = np.array([[8.0, 0.0], [2.0, 0.0], [0.0, 20.0]])

S = Q @ K.T  # (N, N) scores
E = np.exp(S)
P = E / E.sum(axis=1, keepdims=True)  # (N, N) every row sums to 1
O = P @ V  # (N, d)
print("exp(S) =", np.round(E, 9).tolist())
print("O =", np.round(O, 9).tolist())

# %% [markdown]
# <details><summary>Answer</summary>
#
# **(3, 5).** The exponentials are 1, 2 and 1. Their sum is 4, so the weights are 1/4, 1/2 and 1/4. The output is 1/4 ·
# (8, 0) + 1/2 · (2, 0) + 1/4 · (0, 20).
# </details>
#
# **Takeaway.** A row of P says how one query divides its attention among the keys.

# %% [markdown]
# ## How large may a score be?
#
# A score adds d products. If queries and keys have entries of size about 1 and of either sign, the products partly
# cancel, and the sum grows like $\sqrt{d}$. With large scores one key gets nearly all the weight, and a small change of
# the scores changes almost nothing. A model cannot learn from that. So the scores are multiplied by a scale $\tau$,
# usually $1 / \sqrt{d}$: $S = \tau QK^\top$.
#
# Individual scores can still be large. There is a largest float32 number. From a score of about 88.7 on, the
# exponential lies above it and becomes infinite.
#
# **Predict.** A float32 row has the scores 90, 89 and 0. What is its first weight, computed as the formula stands?


# %% tags=["hide-input"]
def softmax_as_written(s):
    e = np.exp(s)
    return e / e.sum()


def softmax_shifted(s):
    e = np.exp(s - s.max())  # the largest exponent is now 0
    return e / e.sum()


with np.errstate(all="ignore"):
    for row in ([90, 89, 0], [-200, -201, -202]):
        s = np.array(row, dtype=np.float32)
        shifted = softmax_shifted(s).astype(float).round(3)
        print(row, " as written:", softmax_as_written(s), " shifted:", shifted)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Not a number.** $e^{90}$ and the sum are infinite, and ∞/∞ is NaN. In the second row all exponentials are 0, and 0/0 is
# NaN as well.
# </details>
#
# The cure is to subtract the row's maximum first. That divides numerator and denominator by the same number, so the
# weights stay the same. But now the largest exponential is 1, and the sum is at least 1.
#
# **Takeaway.** $S = \tau QK^\top$. Subtract the row's maximum before the exponential: this is *safe softmax*, and from here
# on softmax always means it.

# %% [markdown]
# ## How much memory do S and P take?
#
# A layer of a model has many heads, each with its own S and P. Let their numbers have two bytes here.
#
# **Predict.** With 32 heads and N = 8,192, the S and P of one layer take 8 GiB. Which N fills a GPU of 80 GiB: about
# 26,000, about 82,000, or about 260,000?

# %%
show(quadratic_memory.draw(**quadratic_memory.data()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 26,000.** Ten times the memory holds $\sqrt{10}$, about 3.2, times the tokens.
# </details>
#
# In the picture, S and P outgrow the memory of one GPU after another, and Q, K, V and O stay at the bottom.
# (Batch 1 means one text. L comes at the end of this chapter.)
#
# **Takeaway.** S and P decide how long a text may be.

# %% [markdown]
# ## How do we count what moves?
#
# *Standard attention* runs the definition one step after the other. Each step loads what it needs from HBM and stores
# what it made. A *meter*, an object of the class `Trace`, counts this:
#
# | code | what it means |
# | --- | --- |
# | `meter = Trace()` | a new meter |
# | `Q = meter.hbm(Q=Q)` | Q lives in HBM, and the meter watches it |
# | `q = Q[:]` | a *load*: the elements in the brackets come on chip |
# | `O[:] = o` | a *store*: they go back to HBM |
#
# Functions take it as the argument `trace`. The default, `UNWATCHED`, means: no meter.


# %%
def standard(Q, K, V, tau, trace=UNWATCHED):
    S, P = np.empty((2, len(Q), len(K)))
    Q, K, V, S, P, O = trace.hbm(Q=Q, K=K, V=V, S=S, P=P, O=np.empty(Q.shape))
    S[:] = tau * (Q[:] @ K[:].T)  # two loads, one store
    P[:] = naive.safe_softmax(S[:])
    O[:] = P[:] @ V[:]
    return np.asarray(O)


# %% [markdown]
# **Predict.** N = 8 and d = 4. How many elements of S and P are loaded and stored together?

# %% tags=["hide-input"]
rng = np.random.default_rng(1)
Q8, K8, V8, dO8 = rng.standard_normal((4, 8, 4))
meter = Trace()
standard(Q8, K8, V8, 0.5, meter)
for tensor in "QKSPVO":
    print(f"{tensor}: {meter.loads(tensor):3} loaded, {meter.stores(tensor):3} stored")
print("together:", meter.hbm_elements, " 4N² + 4Nd =", 4 * 8**2 + 4 * 8 * 4)

# %% [markdown]
# <details><summary>Answer</summary>
#
# **256.** S goes out and comes back, and so does P: 4 · 64.
# </details>
#
# Q, K and V come in and O goes out: 4 · 32 = 128 more. These are requests of the chip. In chapter 00 nearly all that
# standard attention requested crossed to DRAM.
#
# **Takeaway.** Standard attention moves $4N^2 + 4Nd$ elements, nearly all of them for S and P.

# %% [markdown]
# ## Is that much?
#
# Either the arithmetic or the memory is slower, and the other one waits. The *arithmetic intensity* decides which: how many
# FLOPs are done for each byte that is moved? Each of the two products takes 2d FLOPs for each of $N^2$ scores or weights:
# $4N^2 d$ together. As in chapter 00, S has four bytes a number and P has two. Each is stored once and loaded once: 12
# bytes for each of the $N^2$ places.
#
# **Predict.** What is the arithmetic intensity for d = 128?

# %% tags=["hide-input"]
N, d = 8192, 128
t = io.standard_forward(Tiling(N, N, N, N), d)
moved = sum(n * (4 if tensor == "S" else 2) for part in (t.loads, t.stores) for tensor, n in part.items())  # bytes
intensity = 4 * N * N * d / moved
print(f"standard attention: {intensity:.0f} FLOPs for each byte")
for chip in (chips.A100, chips.H100, chips.H200):
    reach = intensity / chip.flops_per_byte
    print(f"{chip.name:13} could do {chip.flops_per_byte:3.0f}: at most {reach:.0%} of its tensor cores' speed")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 43.** $4N^2 d / 12N^2 = d/3$. Q, K, V and O are moved as well, so it is 42.
# </details>
#
# A larger N does not help: FLOPs and bytes both grow with $N^2$. Only moving less helps.
#
# **Takeaway.** Standard attention waits for memory. It does d/3 FLOPs for each byte. The GPUs A100, H100 and H200 could
# do four to seven times as many.

# %% [markdown]
# ## Backwards through a product
#
# Training asks how a loss $\varphi$ changes when Q, K and V change. We write dX for the gradient of $\varphi$ with
# respect to X. It has the shape of X. The gradient dO is given; it comes from what follows in the model. We begin with
# the last line, $O = PV$.
#
# Take the three queries again, and let the loss be a single entry, $\varphi = O_{00} = P_{00} V_{00} + P_{01} V_{10} +
# P_{02} V_{20}$. Then dO is 1 there and 0 elsewhere.
#
# **Predict.** What is the gradient with respect to the three entries of V?

# %% tags=["hide-input"]
dO = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
dV = P.T @ dO  # (N, d)
dP = dO @ V.T  # (N, N)
print("dV, first column:", np.round(dV[:, 0], 9).tolist())
print("dP, first row:   ", np.round(dP[0], 9).tolist())

# %% [markdown]
# <details><summary>Answer</summary>
#
# **The weights** $P_{00}, P_{01}, P_{02}$ = 1/4, 1/2, 1/4. In the same way, the gradient with respect to these weights is
# $V_{00}, V_{10}, V_{20}$ = 8, 2, 0.
# </details>
#
# In general $V_{jc}$ enters every row i with the weight $P_{ij}$, so $dV = P^\top dO$. And $P_{ij}$ enters every column c
# with $V_{jc}$, so $dP = dO\, V^\top$.
#
# **Takeaway.** The gradients of a product are products with the other factor: $dV = P^\top dO$ and $dP = dO\, V^\top$.

# %% [markdown]
# ## Backwards through softmax
#
# Raise one score of a row. Its weight grows and all others shrink, because they share one sum: $p_j = e^{s_j} / \Sigma$
# with $\Sigma = \sum_k e^{s_k}$. The derivative of $e^{s_j}$ with respect to $s_j$ is $e^{s_j}$, and so is that of
# $\Sigma$, because only one of its terms contains $s_j$. So the quotient rule gives $\partial p_j / \partial s_j =
# e^{s_j}/\Sigma - (e^{s_j}/\Sigma)^2 = p_j - p_j^2$. For two different keys it gives $\partial p_j / \partial s_k =
# -p_j p_k$. As a matrix, the *Jacobian*, this is $\mathrm{diag}(p) - p p^\top$.
#
# The score $s_k$ changes every weight. So by the chain rule its gradient is $ds_k = \sum_j dp_j\, \partial p_j /
# \partial s_k$: ds is the Jacobian times dp. Here for query 0:

# %% tags=["hide-input"]
p, dp = P[0], dP[0]
jacobian = np.diag(p) - np.outer(p, p)  # (N, N)
D = p @ dp  # one number for the row
print("jacobian @ dp: ", np.round(jacobian @ dp, 9).tolist())
print("p * (dp - D):  ", np.round(p * (dp - D), 9).tolist(), " with D =", round(float(D), 9))
print("do · o =", round(float(dO[0] @ O[0]), 9))

# %% [markdown]
# The second line needs no matrix:
# $(\mathrm{diag}(p) - pp^\top)\,dp = p \circ dp - p\,(p \cdot dp) = p \circ (dp - D)$, with the single number
# $D = p \cdot dp$. (∘ multiplies entry by entry.)
#
# And D can be computed without the row of P. Lower case with an index is a row of a matrix. Since
# $dP_{ij} = do_i \cdot v_j$,
#
# $$D_i = \sum_j P_{ij}\,(do_i \cdot v_j) = do_i \cdot \sum_j P_{ij} v_j = do_i \cdot o_i .$$
#
# **Takeaway.** $dS = P \circ (dP - D)$, where $D_i = do_i \cdot o_i$ is one number for each query.

# %% [markdown]
# ## How do we know that a gradient is right?
#
# $S = \tau QK^\top$ is a product again, so $dQ = \tau\, dS\, K$ and $dK = \tau\, dS^\top Q$. But is that right? *Finite
# differences* need no formula: change one entry by +h and by −h, subtract the two losses, and divide by 2h. Below, 5
# queries and keys have d = 4. We compare dK: once right, once without $\tau$, and once without the transpose.


# %% tags=["hide-input"]
def backward(Q, K, V, P, dO, tau):
    dV = P.T @ dO  # FA1.A3.L1  (N_k, d)
    dP = dO @ V.T  # FA1.A3.L2  (N_q, N_k)
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))  # FA1.A3.L3  (N_q, N_k)
    dQ = tau * (dS @ K)  # FA1.A3.L4  (N_q, d)
    dK = tau * (dS.T @ Q)  # FA1.A3.L5  (N_k, d)
    return dQ, dK, dV, dS


def differences(loss, X, h=1e-5):
    gradient = np.empty_like(X)
    for at in np.ndindex(X.shape):
        step = np.zeros_like(X)
        step[at] = h
        gradient[at] = (loss(X + step) - loss(X - step)) / (2 * h)
    return gradient


# %% tags=["hide-input"]
tau = 0.5
Q, K, V, dO = rng.standard_normal((4, 5, 4))
P = naive.safe_softmax(tau * Q @ K.T)
dQ, dK, dV, dS = backward(Q, K, V, P, dO, tau)


def loss(Q, K, V):  # its gradient with respect to O is dO
    return float((dO * (naive.safe_softmax(tau * Q @ K.T) @ V)).sum())


truth = differences(lambda X: loss(Q, X, V), K)
for name, guess in (("τ dSᵀ Q", dK), ("dSᵀ Q", dS.T @ Q), ("τ dS Q", tau * dS @ Q)):
    print(f"dK = {name:8} first entry {guess[0, 0]:7.4f}, finite differences say {truth[0, 0]:7.4f}")

# %% [markdown]
# All three have the right shape, the last one because there are as many queries as keys. Without $\tau$ the gradient is
# too large by a factor $1/\tau$ = 2. Nothing would crash, so only a comparison finds it.
#
# Open the code: the five lines of `backward` are Algorithm 3 of the FlashAttention paper (FA1.A3 in our tags).
#
# **Takeaway.** Compare a gradient with finite differences. Use unequal lengths and $\tau$ ≠ 1, so that no slip can hide.

# %% [markdown]
# ## Can we do without S and P?
#
# One number per row is enough to turn any score into its probability. It is the *logsumexp*
# $L_i = \log \sum_j e^{S_{ij}}$:
#
# $$P_{ij} = e^{S_{ij}} / e^{L_i} = e^{S_{ij} - L_i} .$$
#
# The function below, from appendix B.1 of the [FlashAttention paper](https://arxiv.org/abs/2205.14135), keeps L and one
# row of scores. But for each query it loads all keys twice, and all values once.


# %%
def forward_by_rows(Q, K, V, tau, trace=UNWATCHED):
    Q, K, V, O, L = trace.hbm(Q=Q, K=K, V=V, O=np.empty_like(Q), L=np.empty(len(Q)))
    for i in range(len(Q)):
        s = tau * (K[:] @ Q[i])  # (N_k,): one row of S, forgotten at once
        L[i] = s.max() + np.log(np.exp(s - s.max()).sum())
    for i in range(len(Q)):
        p = np.exp(tau * (K[:] @ Q[i]) - L[i])  # (N_k,)
        O[i] = p @ V[:]
    return np.asarray(O), np.asarray(L)


# %% [markdown]
# **Predict.** How many times $N^2$ elements does this function move, for N = 512 and d = 64?

# %% tags=["hide-input"]
q, k, v = rng.standard_normal((3, 512, 64))
meters = Trace(), Trace()
results = standard(q, k, v, 1 / 8, meters[0]), forward_by_rows(q, k, v, 1 / 8, meters[1])[0]
for name, meter, O_row, held in zip(("standard", "by rows"), meters, results, (2 * 512**2, 2 * 512), strict=True):
    print(f"{name:8}: first number {O_row[0, 0]:.9f}, holds {held:7,}, moves {meter.hbm_elements:10,} elements")
ratio = meters[1].hbm_elements / meters[0].hbm_elements
print(f"by rows moves {meters[1].hbm_elements / 512**2:.0f} N², {ratio:.0f} times what standard moves")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **192.** 3d for each query and each key. That is 43 times what standard attention moves.
# </details>
#
# It holds 1,024 numbers instead of half a million. But far more is moved than before.
#
# What if a whole block of queries shared each load of the keys? Their scores with all keys would not fit on chip. So
# the keys would have to come block by block, and a row of S would arrive in pieces. The next chapter asks whether
# softmax can take that.
#
# **Takeaway.** Memory held and elements moved are two costs. One can fall while the other rises.

# %% [markdown]
# ## Recap
#
# - $S = \tau QK^\top$, $P = \mathrm{softmax}(S)$, $O = PV$. Softmax subtracts the row's maximum first.
# - Standard attention moves $4N^2 + 4Nd$ elements: d/3 FLOPs for each byte, too few for a GPU.
# - Backward: $dV = P^\top dO$, $dP = dO\,V^\top$, $dS = P \circ (dP - D)$, $dQ = \tau\,dS\,K$, $dK = \tau\,dS^\top Q$, with
#   $D_i = do_i \cdot o_i$.
# - $P_{ij} = e^{S_{ij} - L_i}$: one number per row brings back any entry of P.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** The backward pass by rows, from appendix B.2 of the same paper, keeps no P. Compute row i of P from
# K, one query, L and $\tau$, in place of the `...`.
#
# <details><summary>Hint</summary>
#
# First the row of scores, as in `forward_by_rows`. Then the last formula of the recap.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return np.exp(tau * (K @ q_i) - L_i)
# ```
# </details>


# %%
def probabilities(q_i, K, L_i, tau):  # (d,), (N_k, d), a number, a number -> (N_k,)
    return ...


# %% tags=["hide-input"]
O, L = forward_by_rows(Q, K, V, tau)
D = (dO * O).sum(axis=1)
row_0 = probabilities(Q[0], K, L[0], tau)
if row_0 is ...:
    print("not written yet")
elif np.shape(row_0) != (5,) or not close(np.sum(row_0), 1.0):
    print("not yet: a row of P has 5 entries that sum to 1, yours:", row_0)
else:
    rows = [probabilities(Q[i], K, L[i], tau) for i in range(5)]
    dQ_rows = [tau * (rows[i] * (V @ dO[i] - D[i])) @ K for i in range(5)]
    print("right" if close(dQ_rows, dQ) else "not yet: the row sums to 1, but it is not softmax of the scaled scores")

# %% [markdown]
# **2. Find the bug.** Somebody forgot D and wrote `dS = P * dP`. Write a test of dS that needs no reference: True for the
# right dS, False for this one.
#
# <details><summary>Hint</summary>
#
# Adding a number to all scores of a row changes nothing. What must each row of dS sum to? `np.allclose` compares.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# return np.allclose(dS.sum(axis=1), 0)
# ```
# </details>


# %%
def looks_right(dS):  # (N_q, N_k)
    return ...


# %% tags=["hide-input"]
dP = dO @ V.T
right_one, wrong_one = looks_right(P * (dP - D[:, None])), looks_right(P * dP)
if right_one is ...:
    print("not written yet")
elif not right_one:
    print("not yet: your test rejects the right dS, whose rows sum to", np.round(dS.sum(axis=1), 6) + 0.0)
else:
    print("not yet: your test accepts the wrong dS" if wrong_one else "right")

# %% [markdown]
# ## Checks
#
# The functions of this notebook against the package, and against differences.

# %% tags=["hide-input"]
ours, theirs = forward_by_rows(Q8, K8, V8, 0.5), naive.forward_linear_memory(Q8, K8, V8, tau=0.5)
verdict("forward_by_rows = naive.forward_linear_memory", all(map(close, ours, theirs)))
verdict("standard = naive.forward", close(standard(Q8, K8, V8, 0.5), naive.forward(Q8, K8, V8, tau=0.5)[0]))
judge = differences(lambda X: loss(X, K, V), Q), truth, differences(lambda X: loss(Q, K, X), V)
verdict("dQ, dK, dV = finite differences of the loss", all(map(close, (dQ, dK, dV), judge, [1e-7] * 3)))
verdict("the gradients = naive.backward", all(map(close, (dQ, dK, dV), naive.backward(Q, K, V, P, dO, tau=tau))))
verdict("the jacobian = naive.softmax_jacobian", close(jacobian, naive.softmax_jacobian(p)))
verdict("the meter = the closed form", meters[0].hbm_elements == io.standard_forward(Tiling(512, 512, 1, 1), 64).total)
verdict("by rows: 192 N², 43 times standard", [round(meters[1].hbm_elements / 512**2), round(ratio)] == [192, 43])

# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)
