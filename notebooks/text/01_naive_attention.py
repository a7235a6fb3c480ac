# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)

# %% [markdown]
# # 01 · Naive attention
#
# **What does attention compute, and what does it cost?**
#
# Attention is two matrix products with a softmax between them. That takes four lines, and those four lines are the
# truth against which every later chapter is judged. They also write down two matrices larger than everything around
# them, and this chapter finds out how much larger, what that costs, and whether attention can do without them.
#
# After this notebook you can
#
# - compute attention and its gradients by hand for three queries, and check a gradient without trusting any formula,
# - say how many bytes S and P take, how many travel, and why the second number decides the speed,
# - compute both directions without ever holding S or P, and say what that costs instead.
#
# *Time: 35 minutes. Hardware: any laptop, NumPy alone. Before this: [00 · The map](00_start.ipynb).*

# %%
import numpy as np

from fa2_lab.machine import chips, io
from fa2_lab.paper import where
from fa2_lab.plots import quadratic_memory
from fa2_lab.plots.show import show
from fa2_lab.reference import naive
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import UNWATCHED, Trace

# %% [markdown]
# ## Three queries, three keys
#
# Each query asks every key how well they match; the score S_ij is the dot product of query i and key j. Softmax turns
# each row of scores into weights P_ij: exponentials, divided by their sum. The output O_i is the mean of the values
# with these weights. Queries run down, keys run right, in this book always.
#
# The queries, keys and values below are chosen so that the exponentials come out as 1, 2 and 3.
#
# **Predict.** Write down the nine scores, their exponentials, and the output of the first query. You need no
# calculator: exp(log 2) = 2.

# %%
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
# <details><summary>The first row, step by step</summary>
#
# Query 0 is (1, 0). Its scores are 0, log 2 and 0, the exponentials 1, 2 and 1, their sum 4, the weights 1/4, 1/2 and
# 1/4. The output is 1/4·(8, 0) + 1/2·(2, 0) + 1/4·(0, 20) = (3, 5).
# </details>
#
# **Takeaway.** A row of P says how one query shares its attention among the keys, and its output is the mean that
# follows.

# %% [markdown]
# ## Why is there a scale?
#
# In practice the scores are multiplied by a number τ before the softmax, usually 1/√d, where d is the length of a
# query.
#
# **Predict.** The entries of queries and keys are random numbers of size about 1. A score adds d products. How large
# do scores get when d grows from 4 to 64 to 1,024, and what does softmax make of a row of 256 of them? (The cell
# prints standard deviations, and means over 256 rows.)

# %%
rng = np.random.default_rng(0)
print("   d   typical score   largest weight of a row   the same with τ = 1/√d")
for d in (4, 64, 1024):
    q, k = rng.standard_normal((2, 256, d))
    s = q @ k.T
    # "safe": the next section says why
    plain, scaled = (naive.safe_softmax(x).max(axis=1).mean() for x in (s, s / np.sqrt(d)))
    print(f"{d:4} {s.std():15.0f} {plain:25.2f} {scaled:24.2f}")

# %% [markdown]
# <details><summary>Why √d</summary>
#
# The variance of a sum of d independent products is d times that of one, so the size grows like √d. Scores of size 32
# leave one key with all the weight: the mean over the keys has become a choice of one, and its gradient almost
# vanishes. Dividing by √d keeps scores at size 1 for every d.
# </details>
#
# FlashAttention-2's two algorithms leave τ out. We write it everywhere, because the gradients need it too.
#
# **Takeaway.** S = τ QKᵀ with τ = 1/√d, so that the softmax stays a mean.

# %% [markdown]
# ## How large may a score be?
#
# The exponential grows fast, and a floating-point number ends somewhere: at 65,504 in float16, near 3·10³⁸ in float32
# and in bfloat16.
#
# **Predict.** Softmax only depends on differences of scores. Which of these float32 rows will the formula survive:
# (90, 89, 0), (−200, −201, −202), both, or neither?

# %%
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
    for dtype in (np.float16, np.float32, np.float64):
        print(dtype.__name__, "ends at a score of", round(float(np.log(np.finfo(dtype).max)), 1))

# %% [markdown]
# <details><summary>Two ways to fail, one cure</summary>
#
# exp(90) and exp(89) are infinite in float32, and ∞/∞ is NaN; only the third weight, 1/∞, comes out as a number.
# exp(−200) is 0, and 0/0 is NaN as well. Subtracting any constant c from a row multiplies numerator and denominator by
# exp(−c), which cancels. With c the row's maximum, the largest exponential is exactly 1: nothing overflows, and the
# sum is at least 1.
# </details>
#
# **Takeaway.** The maximum changes nothing in the result and everything in the computation; from here on, softmax
# always means the shifted one.

# %% [markdown]
# ## How much memory do S and P take?
#
# Q, K, V and O have N·d entries. S and P have N·N. A layer has many heads, each with its own S and P; numbers take two
# bytes in float16 or bfloat16.
#
# **Predict.** 32 heads, d = 128, one sequence of 8,192 tokens. How many GiB do Q, K, V and O take together? And S and
# P?

# %%
heads, d = 32, 128
print("      N    Q, K, V, O       S and P")
for N in (1024, 8192, 65536):
    small, large = 2 * heads * 4 * N * d, 2 * heads * 2 * N * N
    print(f"{N:7,} {small / 2**30:9.2f} GiB {large / 2**30:9.2f} GiB")

# %%
show(quadratic_memory.draw(**quadratic_memory.data()))

# %% [markdown]
# <details><summary>Reading the picture</summary>
#
# L, one number for each query, comes up further down. A GPU of 80 GiB holds the S and P of one layer up to N = 25,905,
# if it holds nothing else. Doubling N doubles the four small matrices and quadruples the two large ones, and training
# would keep P for the backward pass of every layer.
# </details>
#
# **Takeaway.** What attention needs is of size N·d; what its definition writes down on the way is of size N².

# %% [markdown]
# ## How much has to travel, and is that much?
#
# A GPU computes on its chip and keeps its tensors in HBM, the large memory beside it. Run as it is defined, which the
# papers call standard attention, it loads Q and K and stores S; loads S and stores P; loads P and V and stores O.
#
# The meter of the map, `Trace`, counts these trips, and the arithmetic too.
#
# **Predict.** N = 8, d = 4. How many elements (single numbers) travel in all? For N much larger than d, how many times
# N² is that?

# %%
rng = np.random.default_rng(1)
Q8, K8, V8, dO8 = rng.standard_normal((4, 8, 4))
meter = Trace()
naive.forward(Q8, K8, V8, trace=meter)
for tensor in "QKSPVO":
    print(f"{tensor}: {meter.loads(tensor):3} loaded, {meter.stores(tensor):3} stored")
print("together:", meter.hbm_elements, " 4N² + 4Nd =", 4 * 8**2 + 4 * 8 * 4)
print("FLOPs of the two products:", meter.matmul_flops, " 4N²d =", 4 * 8**2 * 4)

# %% [markdown]
# <details><summary>Four large trips and four small ones</summary>
#
# S goes out and comes back, P goes out and comes back: 4N² = 256. Q, K and V come in and O goes out: 4Nd = 128. For N
# much larger than d, only the four large trips count.
# </details>

# %% [markdown]
# Standard attention moves 4N² + 4Nd elements, nearly all of them for two matrices that nobody asked for. Is that much,
# or little? A chip can be limited by what it computes or by what reaches it. The quotient decides: how many FLOPs (one
# FLOP is one addition or multiplication) does each byte bring?
#
# **Predict.** Divide the FLOPs by the bytes (2 for each element) for N = 8,192 and d = 128. The units of an
# H100 that multiply matrices, its *tensor cores*, do 295 FLOPs in the time in which one byte arrives. What share of their
# speed is within reach?

# %%
N, d = 8192, 128
moved = io.standard_forward(Tiling(N, N, N, N), d).total
intensity = 4 * N * N * d / (2 * moved)
print("FLOPs for each byte that moves:", round(intensity))
for chip in (chips.A100, chips.H100):
    print(f"{chip.name} could do:", round(chip.flops_per_byte))
print(f"within reach: {intensity / chips.H100.flops_per_byte:.0%} of an H100's tensor cores")

# %% [markdown]
# <details><summary>And with a larger N?</summary>
#
# No help: FLOPs and bytes both grow with N². The quotient tends to 4N²d / 8N² = d/2, 64 for d = 128, whatever N is.
# Only moving less can raise it.
# </details>
#
# **Takeaway.** Standard attention is limited by the trips of S and P through HBM, not by its arithmetic: d/2 FLOPs for
# each byte, where the chip could do several times as many.

# %% [markdown]
# ## Backwards through a product
#
# Training asks how a loss φ changes when Q, K and V change. We write dX for the gradient of φ with respect to X; it
# has the shape of X. The gradient dO comes from outside. We begin with the last line, O = PV.
#
# To follow it by hand, take the three queries again and let the loss be a single entry, φ = O₀₀. Then dO is 1 there
# and 0 elsewhere.
#
# **Predict.** O₀₀ = P₀₀V₀₀ + P₀₁V₁₀ + P₀₂V₂₀. What is the gradient with respect to each of the three V's? And to the
# P's?

# %%
dO = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
dV = P.T @ dO  # (N, d)
dP = dO @ V.T  # (N, N)
print("dV, first column:", np.round(dV[:, 0], 9).tolist())
print("dP, first row:   ", np.round(dP[0], 9).tolist())

# %% [markdown]
# <details><summary>Why the transposes</summary>
#
# V_jc enters O_ic with weight P_ij for every query i, so its gradient gathers P_ij dO_ic over all i: dV = Pᵀ dO. P_ij
# enters O_ic with weight V_jc for every column c: dP = dO Vᵀ. Where N ≠ d, the shapes leave no other choice.
# </details>
#
# **Takeaway.** A product's gradients are products with the other factor: dV = Pᵀ dO and dP = dO Vᵀ.

# %% [markdown]
# ## Backwards through softmax
#
# Raise one score of a row and its weight grows, while all others shrink, because they share one sum. For the first
# row, p = (1/4, 1/2, 1/4), the matrix of all these responses is diag(p) − p pᵀ.
#
# **Predict.** In sixteenths, what is its first row? Then multiply by dp = (8, 2, 0) to get ds₀. What do the entries of
# ds have to add up to, if adding a constant to all scores changes nothing?

# %%
p, dp = P[0], dP[0]
jacobian = np.diag(p) - np.outer(p, p)  # (N, N)
print("in sixteenths:", np.round(16 * jacobian).astype(int).tolist())
print("jacobian @ dp:", np.round(jacobian @ dp, 9).tolist())
D = p @ dp
print("D =", round(float(D), 9), "  p * (dp - D):", np.round(p * (dp - D), 9).tolist())

# %% [markdown]
# <details><summary>Where the matrix comes from, and how to do without it</summary>
#
# The quotient rule gives ∂p_j/∂s_j = p_j − p_j² and, for two different keys, ∂p_j/∂s_k = −p_j p_k: the matrix above,
# with the first row (3, −2, −1)/16.
#
# No matrix is needed: (diag(p) − p pᵀ) dp = p∘dp − p (p·dp) = p∘(dp − D), with the single number D = p·dp. The entries
# add up to D − D = 0.
# </details>
#
# D came out as 3, and so did O₀₀. That is no accident:
#
# ```
# D_i = Σ_j P_ij dP_ij             two rows of length N
#     = Σ_j P_ij (do_i · v_j)      because dP = dO Vᵀ
#     = do_i · (Σ_j P_ij v_j)      do_i does not depend on j
#     = do_i · o_i                 two rows of length d
# ```
#
# **Takeaway.** dS = P∘(dP − D), where D_i = do_i · o_i is one number for each query.

# %% [markdown]
# ## The whole way back, and a judge who knows no formula
#
# S = τ QKᵀ is a product again, so dQ = τ dS K and dK = τ dSᵀ Q. A formula can be wrong, and a sign or a transpose is
# soon lost. Central differences need no formula: move one entry by ±h, look at the loss, divide by 2h.
#
# **Predict.** One set of lecture notes prints dK = Q dSᵀ, and FlashAttention-2's Algorithm 2 has no τ. Which of the
# two would you notice without running anything?

# %%
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


# %%
tau = 0.5
Q, K, V, dO = rng.standard_normal((4, 4, 4))  # N = d: even a wrong transpose fits
P = naive.safe_softmax(tau * Q @ K.T)
dQ, dK, dV, dS = backward(Q, K, V, P, dO, tau)


def loss(Q, K, V):
    O = naive.safe_softmax(tau * Q @ K.T) @ V
    return float((dO * O).sum())  # the loss whose gradient in O is dO


dK_judge = differences(lambda X: loss(Q, X, V), K)
print("dQ:", close(dQ, differences(lambda X: loss(X, K, V), Q), 1e-7))
print("dV:", close(dV, differences(lambda X: loss(Q, K, X), V), 1e-7))
print("dK = τ dSᵀ Q:", close(dK, dK_judge, 1e-7))
print("dK = τ Q dSᵀ:", close(tau * Q @ dS.T, dK_judge, 1e-7))
print("dK =   dSᵀ Q:", close(dS.T @ Q, dK_judge, 1e-7))

# %% [markdown]
# <details><summary>Which slip shows itself</summary>
#
# Q dSᵀ multiplies (N, d) by (N, N): the shapes only fit when N = d, so nearly any run would stop. The missing τ never
# stops anything: dQ and dK keep their directions and are too large by 1/τ, dV is right, and training would go on,
# badly.
# </details>
#
# The five lines are Algorithm 3 of the first FlashAttention paper, and the comments name its lines. `where` leads from
# such a name to every place that computes it:

# %% tags=["nbval-ignore-output"]
print(where("FA1.A3.L3"))

# %% [markdown]
# **Takeaway.** Judge a gradient by differences, on several shapes and with τ ≠ 1; a formula cannot vouch for itself.

# %% [markdown]
# ## Forward without S and P
#
# Which of the N² numbers are needed at the same time? One row of S suffices for one row of O. Appendix B.1 of the
# first paper goes further and separates the two jobs of softmax: first one number for each row, the logarithm of its
# sum of exponentials, L_i = log Σ_j exp(S_ij); then every P_ij = exp(S_ij − L_i), in any order.
#
# **Predict.** Apart from Q, K, V and O, how many numbers does this hold at most, for N queries and keys?

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


O8, L8 = forward_by_rows(Q8, K8, V8, 0.5)
print("the dense result:", close(O8, naive.safe_softmax(0.5 * Q8 @ K8.T) @ V8))
far = forward_by_rows(100 * Q8, 100 * K8, V8, 0.5)[1]
print("scores in the thousands, L still finite:", np.isfinite(far).all() and far.max() > 1000)
print("S from columns:", (Q8.T @ K8).shape, " S from rows:", (Q8 @ K8.T).shape)

# %% [markdown]
# <details><summary>2N numbers, and two things the appendix says differently</summary>
#
# N numbers of L and one row of N scores. The appendix can do with N: it sums exp(S_ij − L_i) v_j one key at a time.
#
# It calls q_i, k_j and v_j columns; they are rows (the last line above). And its L is the sum itself, not the
# logarithm, with the shift left out "for simplicity": at scores in the thousands that sum is infinite.
# FlashAttention-2 uses the same letter for the logarithm, and so do we, everywhere.
# </details>
#
# **Takeaway.** One number for each row, L_i, makes all entries of P independent: P_ij = exp(S_ij − L_i).

# %% [markdown]
# ## Backward without S and P
#
# The gradients need P and dP entry by entry, and both can be made again on the spot: P_ij from L_i, dP_ij = do_i ·
# v_j. D_i needs no row of P, as we saw. That is appendix B.2.
#
# **Predict.** dQ_i sums over keys, dV_j and dK_j sum over queries. How often is each P_ij computed in the cell below?

# %%
def backward_by_rows(Q, K, V, O, L, dO, tau):
    dQ, dK, dV = np.empty_like(Q), np.empty_like(K), np.empty_like(V)
    D = (dO * O).sum(axis=1)  # (N_q,)
    for i in range(len(Q)):
        p = np.exp(tau * (K @ Q[i]) - L[i])  # (N_k,): row i of P
        dQ[i] = tau * (p * (V @ dO[i] - D[i])) @ K
    for j in range(len(K)):
        p = np.exp(tau * (Q @ K[j]) - L)  # (N_q,): column j of P
        dV[j] = p @ dO
        dK[j] = tau * (p * (dO @ V[j] - D)) @ Q
    return dQ, dK, dV


by_rows = backward_by_rows(Q8, K8, V8, O8, L8, dO8, 0.5)
dense = backward(Q8, K8, V8, naive.safe_softmax(0.5 * Q8 @ K8.T), dO8, 0.5)
print("dQ, dK, dV equal to the dense ones:", [*map(close, by_rows, dense)])

# %% [markdown]
# <details><summary>Twice</summary>
#
# Once in its row, once in its column. Storing P would have saved the second time, and the third, counting the forward
# pass. Making things again instead of keeping them is called recomputation, and it stays with us to the end.
# </details>
#
# **Takeaway.** For the way back, keep Q, K, V, O and L: everything of size N² can be made again.

# %% [markdown]
# ## Is it fast now?
#
# The memory problem is solved: nothing of size N² is ever held. But each query sends for all keys, twice, and for all
# values.
#
# **Predict.** N = 512, d = 64. Standard attention moves 4N² + 4Nd elements. Does the row-by-row version move fewer,
# about as many, or many more?

# %%
q, k, v = rng.standard_normal((3, 512, 64))
standard, by_row = Trace(), Trace()
naive.forward(q, k, v, trace=standard)
forward_by_rows(q, k, v, 1 / 8, trace=by_row)
print(f"standard: {standard.hbm_elements:,} elements; holds S and P, {2 * 512 * 512:,}")
print(f"row by row: {by_row.hbm_elements:,} elements; holds L and one row, {2 * 512:,}")
print("times as much travels:", round(by_row.hbm_elements / standard.hbm_elements))

# %% [markdown]
# <details><summary>Less memory, more traffic</summary>
#
# K comes in 2N times and V N times: 3N²d elements, against 4N². For d = 64 that tends to 48 times as many. The
# appendix remarks that fewer accesses "necessarily" mean less memory. As a bound that is true, as a rule it is not:
# the two quantities can move in opposite directions, as they do here.
# </details>
#
# What if a whole block of queries shared each trip of the keys? Then a block of scores would have to be finished
# before its rows are complete. Whether softmax allows that is the question of the next notebook.
#
# **Takeaway.** Memory held and memory moved are two different costs. FlashAttention is about the second.

# %% [markdown]
# ## Recap
#
# - S = τ QKᵀ, P = softmax(S), O = PV; softmax always with the row's maximum subtracted.
# - S and P take 2N² entries and make 4N² + 4Nd elements travel; that is d/2 FLOPs for each byte, too few for a GPU.
# - Backward: dV = Pᵀ dO, dP = dO Vᵀ, dS = P∘(dP − D), dQ = τ dS K, dK = τ dSᵀ Q, with D_i = do_i · o_i.
# - With L_i kept, P and everything after it can be made again: memory O(N), at the price of more traffic.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** To hide the future, a popular write-up sets the hidden scores to zero before the softmax. To how many
# keys does the first of eight queries then listen, if it may see only the first?
#
# <details><summary>Hint</summary>
# exp(0) is not 0.
# </details>
# <details><summary>Answer</summary>
#
# A score of zero is a vote like any other, so the query sees all eight values. Hidden scores are set to −∞, whose
# exponential is 0. The next cell runs both.
# </details>

# %%
visible = np.tri(8, dtype=bool)  # query i sees keys 0 … i
S8 = 0.5 * Q8 @ K8.T
for name, hidden in (("zero", 0.0), ("minus infinity", -np.inf)):
    first = naive.safe_softmax(np.where(visible, S8, hidden))[0]
    print(f"hidden scores set to {name}: keys that query 0 listens to:", int((first > 0).sum()))

# %% [markdown]
# **2. Complete.** Write the gradient of L: given dL (one number for each row), what is its part of dS? Check it with
# `differences`.
#
# <details><summary>Hint</summary>
# L_i = log Σ_j exp(S_ij). Differentiate by S_ij.
# </details>
# <details><summary>Answer</summary>
#
# ∂L_i/∂S_ij = exp(S_ij) / Σ = P_ij, so dS_ij gets P_ij dL_i on top: dS = P∘(dP − D + dL). A gradient of L costs
# nothing but a different D.
#
# ```python
# dL = rng.standard_normal(4)
# S = tau * Q @ K.T
# print(close(P * dL[:, None], differences(lambda X: float(dL @ naive.logsumexp(X)), S), 1e-7))
# ```
# </details>

# %% [markdown]
# **3. Break and fix.** Suppose D is forgotten: dS = P∘dP. Which simple test, without any reference, finds that out?
# Decide before you run the cell.
#
# <details><summary>Hint</summary>
# What happens to the weights of a row when all its scores grow by the same number?
# </details>

# %%
S4, dP4 = tau * Q @ K.T, dO @ V.T
for name, dS4 in (("with D", naive.softmax_backward(P, dP4)), ("without D", P * dP4)):
    print(f"{name}: rows of dS add up to zero:", bool(np.allclose(dS4.sum(axis=1), 0)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Adding a constant to all scores of a row changes nothing, so the slope in that direction is zero: every row of dS
# sums to 0. Such invariants are cheap tests, and they find faults that a comparison with the same mistake on both
# sides does not.
# </details>

# %% [markdown]
# ## Checks
#
# The small functions of this notebook against the package, and the package against definitions and differences, for
# unequal lengths, a mask with an empty row, and large scores.

# %%
ours, theirs = forward_by_rows(Q8, K8, V8, 0.5), naive.forward_linear_memory(Q8, K8, V8, tau=0.5)
verdict("forward_by_rows here = naive.forward_linear_memory", all(map(close, ours, theirs)))
theirs = naive.backward_linear_memory(Q8, K8, V8, O8, L8, dO8, tau=0.5)
verdict("backward_by_rows here = naive.backward_linear_memory", all(map(close, by_rows, theirs)))
theirs = naive.backward(Q8, K8, V8, naive.safe_softmax(S8), dO8, tau=0.5)
verdict("backward here = naive.backward", all(map(close, dense[:3], theirs)))
shifted, package = softmax_shifted(S8[0]), naive.safe_softmax(S8)[0]
verdict("the shifted softmax here = naive.safe_softmax", close(shifted, package))
verdict("the jacobian here = naive.softmax_jacobian", close(jacobian, naive.softmax_jacobian(p)))
derived = io.standard_forward(Tiling(512, 512, 1, 1), 64).total
verdict("the meter = the closed form", standard.hbm_elements == derived)

# %%
(q, dO_q), (k, v) = rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 10, 3))
allowed = rng.random((7, 10)) < 0.7
allowed[2] = False  # a query that may see nothing
mask = Mask(allowed=allowed)
for size in (1.0, 30.0, 1000.0):
    O, P = naive.forward(q, k, v, tau=size, mask=mask)
    truth = naive.safe_softmax(np.where(allowed, size * q @ k.T, -np.inf)) @ v
    by_row, _ = naive.forward_linear_memory(q, k, v, tau=size, mask=mask)
    verdict(f"scores of size {size:g}: naive.forward = the definition", close(O, truth))
    verdict(f"scores of size {size:g}: row by row = the definition", close(by_row, truth, 1e-11))

# %%
O, P = naive.forward(q, k, v, mask=mask)
_, L = naive.forward_linear_memory(q, k, v, mask=mask)
judge = [
    differences(lambda x: float((dO_q * naive.forward(x, k, v, mask=mask)[0]).sum()), q),
    differences(lambda x: float((dO_q * naive.forward(q, x, v, mask=mask)[0]).sum()), k),
    differences(lambda x: float((dO_q * naive.forward(q, k, x, mask=mask)[0]).sum()), v),
]
stored = naive.backward(q, k, v, P, dO_q)
made_again = naive.backward_linear_memory(q, k, v, O, L, dO_q, mask=mask)
for name, *gradients, truth in zip(("dQ", "dK", "dV"), stored, made_again, judge, strict=True):
    agree = [close(g, truth, 1e-7) for g in gradients]
    verdict(f"{name}: from P, and from L alone = central differences", all(agree))

# %% [markdown] tags=["navigation"]
# [← The map](00_start.ipynb) · [Online softmax →](02_online_softmax.ipynb)
