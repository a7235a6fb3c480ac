# %% [markdown] tags=["navigation"]
# [← The Triton forward kernel](08_triton_forward.ipynb) · [The map](00_start.ipynb) · [The ladder, measured →](10_ladder.ipynb)

# %% [markdown]
# # 09 · The Triton backward kernels
#
# **How do many blocks add into one dQ?**
#
# Chapter 05 wrote Algorithm 2 in NumPy and ended with two ways to sum up dQ: atomic additions, or a second pass. On a
# GPU thousands of programs run in no particular order. There the choice decides whether a training run can be
# repeated bit for bit. Here both ways become kernels: rung `b00`, with atomics, and rung `b01`, with two passes.
# They stand beside the ladder of chapter 08 (b for backward).
#
# After this notebook you can
#
# - write the backward pass as three small kernels, and say what each keeps on chip,
# - find the line where programs disturb each other, and name two cures and their price,
# - follow a gradient through shared heads of K and V, and through L.
#
# *Time: 45 minutes with the questions and exercises. Hardware: any machine with Linux; without an NVIDIA GPU the
# kernels run in Triton's interpreter. Before this: [05 · The backward pass](05_backward.ipynb) and [08 · The Triton
# forward kernel](08_triton_forward.ipynb).*

# %%
import ast
import math
from inspect import getsource
from itertools import permutations

import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.kernels.ladder import load
from fa2_lab.kernels.portable import backward as packaged
from fa2_lab.kernels.prepared import Options
from fa2_lab.plots import dq_over_time
from fa2_lab.plots.show import show
from fa2_lab.reference import heads
from fa2_studio.book.verdicts import close, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output"]
import triton
import triton.language as tl

print("kernels of this notebook:", "interpreted" if triton.knobs.runtime.interpret else "compiled for the GPU here")
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))  # the package says once that it is slow here

# %% tags=["hide-input"]
def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, torch.float16)


def host(x):  # to NumPy, for comparing
    return x.detach().double().cpu().numpy()


def compare(names, got, want):
    for name, a, b in zip(names.split(), map(host, got), want, strict=True):
        error = np.abs(a - b).max()
        print(f"   {name}: first number {a.flat[0]:6.2f}, right {b.flat[0]:6.2f}; largest error {error:.2f}")

# %% [markdown]
# ## What is the same in all tiles of a row?
#
# Line numbers are those of Algorithm 2; [the poster](../figures/poster_backward.pdf) has it on one sheet. The
# forward pass left L. What is missing is $D_i = do_i \cdot o_i$ (line 4), which every tile of the row subtracts (line 14).
# The smallest kernel of this chapter computes it once. `load_rows` is that of chapter 08, always with its mask. `store_rows`
# stores such a block, and `of_rows` loads one number for each row.
#
# **Predict.** Suppose each tile computed D for its rows. Which tensor would every tile have to load in addition?

# %% tags=["hide-input"]
@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    return tl.load(at, mask=first + row < N, other=0.0)


@triton.jit
def of_rows(X, first, N, B: tl.constexpr):
    row = first + tl.arange(0, B)
    return tl.load(X + row, mask=row < N, other=0.0)[:, None]  # (B, 1)


@triton.jit
def store_rows(X, x, first, N, B: tl.constexpr, d: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    tl.store(at, x.to(X.dtype.element_ty), mask=first + row < N)

# %%
@triton.jit
def D_kernel(O, dO, D, N_q, d: tl.constexpr, B_r: tl.constexpr):
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    o_i = load_rows(O + head * N_q * d, i, N_q, B_r, d).to(tl.float32)
    do_i = load_rows(dO + head * N_q * d, i, N_q, B_r, d).to(tl.float32)
    D_i = tl.sum(do_i * o_i, 1)  # (B_r,)  FA2.A2.L4
    row = i + tl.arange(0, B_r)
    tl.store(D + head * N_q + row, D_i, mask=row < N_q)  # FA2.A2.L4

# %% tags=["hide-input"]
N_q, N_k, d = 40, 56, 16
tau, B = d**-0.5, 16
Q, K, V, dO = normal(N_q, d), normal(N_k, d, seed=1), normal(N_k, d, seed=2), normal(N_q, d, seed=3)
O, L = (x[0, 0] for x in attention(Q[None, None], K[None, None], V[None, None], return_lse=True))
D = torch.full_like(L, torch.nan)
D_kernel[(triton.cdiv(N_q, B), 1)](O, dO, D, N_q, d=d, B_r=B)  # three row blocks, one head
P = np.exp(tau * host(Q) @ host(K).T - host(L)[:, None])
print("D by the kernel:        ", *(f"{x:5.2f}" for x in D[:6].tolist()))
print("row sums of P ∘ (dO Vᵀ):", *(f"{x:5.2f}" for x in (P * (host(dO) @ host(V).T)).sum(1)[:6]))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **O.** And each $D_i$ would be computed $T_c$ times, as in FA1.
# </details>
#
# The two rows agree: D is what the keys of a row are worth on average (chapter 05). The product is taken in fp32, because
# a rounding error in D is an error of the whole row.
#
# **Takeaway.** What belongs to a row and is needed by every tile is computed once, before the tiles.

# %% [markdown]
# ## Does P still need a maximum?
#
# P comes back in one step, $e^{S - L}$. L is at least as large as every score of its row, so the exponent is never positive
# and nothing overflows. That holds for scores of real keys.
#
# `tile` computes S, P, dP and dS of one tile, in this order. `seen` asks three things: is there such a row, is
# there such a key, and under a causal mask, does the row see the key? τ is not multiplied by $\log_2 e$ as in chapter
# 08, because L is a natural logarithm.
#
# **Predict.** All scores are −200, so L is about −198. A missing key was loaded as zeros and has the score 0. What would
# its P be in fp32, if nobody asked whether the key exists?

# %%
NEG_INF, LOG2E = tl.constexpr(float("-inf")), tl.constexpr(1 / math.log(2))


@triton.jit
def tile(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL: tl.constexpr):
    row, col = i + tl.arange(0, q_i.shape[0])[:, None], j + tl.arange(0, k_j.shape[0])[None, :]
    seen = (row < N_q) & (col < N_k) & (col <= row + N_k - N_q if CAUSAL else True)
    s_ij = tau * tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A2.L10
    power = tl.where(seen, (s_ij - L_i) * LOG2E, NEG_INF)  # also in a row that sees no key, where L = −∞
    p_ij = tl.exp2(power)  # (B_r, B_c)  FA2.A2.L11
    dp_ij = tl.dot(do_i, v_j.T)  # (B_r, B_c)  FA2.A2.L13
    ds_ij = p_ij * (dp_ij - D_i)  # (B_r, B_c)  FA2.A2.L14
    return p_ij.to(q_i.dtype), ds_ij.to(q_i.dtype)

# %% tags=["hide-input"]
@triton.jit
def P_kernel(Q, K, L, P, there, N_k, d: tl.constexpr, B: tl.constexpr):  # loads the keys that are there, asks for N_k
    q, k, L_i = load_rows(Q, 0, B, B, d), load_rows(K, 0, there, B, d), of_rows(L, 0, B, B)
    p, _ = tile(q, k, k, q, L_i, L_i, 0, 0, B, N_k, 0.25, False)
    tl.store(P + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], p.to(tl.float32))


ones, keys = torch.ones_like(normal(16, 16)), -50 * torch.ones_like(normal(10, 16))  # 10 keys in a block of 16
L_16 = torch.logsumexp(0.25 * ones.float() @ keys.float().T, dim=1)
for asked, believed in (("asked", 10), ("not asked", 16)):
    P_16 = torch.full((16, 16), torch.nan, device=device)
    with np.errstate(all="ignore"):  # the interpreter warns, a GPU does not
        P_kernel[(1,)](ones, keys, L_16, P_16, 10, believed, d=16, B=16)
    at_a_key, elsewhere = P_16[0, 0].item(), P_16[0, 10].item()
    print(f"{asked:9}  P of a key {at_a_key:.2f}, of none {elsewhere}; what it adds to dQ: {elsewhere * 0}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **∞.** $e^{198}$ is more than fp32 can hold: its numbers end at $e^{88}$.
# </details>
#
# A finite P of a missing key would do no harm: its k is zeros, and its dk and dv are not stored. But ∞ · 0 is NaN, and
# the whole row of dQ is lost. An early FlashAttention-2 had such NaNs: [flash-attention
# #334](https://github.com/Dao-AILab/flash-attention/issues/334).
#
# **Takeaway.** $e^{S - L}$ needs no maximum where there is a key, and needs the mask where there is none.

# %% [markdown]
# ## What does a column block keep on chip?
#
# Three products follow `tile`, and they say who needs what. dV and dK of the column block gain $p^\top do$ and
# $ds^\top q$. dQ of the row block gains $ds\, k$, and that comes later.
#
# `columns_kernel` runs as one program for each column block. It loads $k_j$ and $v_j$ once, and then goes through the
# row blocks. `tl.dot(a, b, acc)` adds the product to the block `acc`.
#
# **Predict.** 64 queries and keys, causal, blocks of 16. With which row does the program of keys 32 to 47 begin?

# %%
@triton.jit
def columns_kernel(Q, K, V, dO, L, D, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr, d: tl.constexpr,
                   B_r: tl.constexpr, B_c: tl.constexpr):
    j, head = tl.program_id(0) * B_c, tl.program_id(1).to(tl.int64)
    Q, dO, L, D = Q + head * N_q * d, dO + head * N_q * d, L + head * N_q, D + head * N_q
    K, V, dK, dV = K + head * N_k * d, V + head * N_k * d, dK + head * N_k * d, dV + head * N_k * d
    k_j = load_rows(K, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
    v_j = load_rows(V, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
    dk_j = tl.zeros((B_c, d), tl.float32)  # FA2.A2.L7
    dv_j = tl.zeros((B_c, d), tl.float32)  # FA2.A2.L7
    first = tl.maximum(j + N_q - N_k, 0) // B_r * B_r if CAUSAL else 0
    for i in range(first, N_q, B_r):  # FA2.A2.L8
        q_i = load_rows(Q, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
        do_i = load_rows(dO, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
        L_i = of_rows(L, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
        D_i = of_rows(D, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
        p_ij, ds_ij = tile(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL)
        dv_j = tl.dot(p_ij.T, do_i, dv_j)  # (B_c, d)  FA2.A2.L12
        dk_j = tl.dot(ds_ij.T, q_i, dk_j)  # (B_c, d)  FA2.A2.L16
    store_rows(dK, tau * dk_j, j, N_k, B_c, d)  # FA2.A2.L18
    store_rows(dV, dv_j, j, N_k, B_c, d)  # FA2.A2.L18

# %% tags=["hide-input"]
def by_columns(Q, K, V, dO, L, D, causal=False):  # one head: (N, d)
    dK, dV = (torch.full(x.shape, torch.nan, device=device) for x in (K, V))  # poisoned
    sizes = dict(CAUSAL=causal, d=Q.shape[1], B_r=B, B_c=B)
    columns_kernel[(triton.cdiv(len(K), B), 1)](Q, K, V, dO, L, D, dK, dV, len(Q), len(K), Q.shape[1] ** -0.5, **sizes)
    return dK, dV


def truth(Q, K, V, O, L, dO, causal=False):  # float64, with all of P
    five = (host(x)[None, None] for x in (Q, K, V, O, L, dO))
    return [x[0, 0] for x in heads.backward(*five, stage="naive", causal=causal)]


dQ, dK, dV = truth(Q, K, V, O, L, dO)
seen = [x[0, 0] for x in attention(Q[None, None], K[None, None], V[None, None], causal=True, return_lse=True)]
D_causal = (dO.float() * seen[0].float()).sum(1)
print(f"{N_q} queries, {N_k} keys, tiles of {B} × {B}:")
compare("dK dV", by_columns(Q, K, V, dO, L, D), (dK, dV))
print("causal:")
compare("dK dV", by_columns(Q, K, V, dO, seen[1], D_causal, causal=True), truth(Q, K, V, *seen, dO, causal=True)[1:])

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Row 32.** Rows before it do not see these keys. `first` skips them, and the causal gradients stay right.
# </details>
#
# The scale τ of dK waits until the end of the loop: one multiplication for each number, not for each tile.
#
# **Takeaway.** A column program keeps k, v, dk and dv on chip, and has them to itself.

# %% [markdown]
# ## What happens if line 15 is a plain addition?
#
# Line 15 adds $\tau\, ds_{ij}\, k_j$ to $dQ_i$, and every column block does so. A plain addition has three steps: load,
# add, store. On a GPU the steps of another program can come in between. Here two programs take turns in plain Python,
# one step at each turn.
#
# **Predict.** dQ is 0. Program A adds 2, and program B adds 3. Their six steps can be mixed in 20 orders. In how many
# of them is dQ = 5 at the end?


# %%
def plain_addition(dQ, part):
    x = dQ[0]  # load
    yield  # here the other program may take a step
    x = x + part  # add
    yield
    dQ[0] = x  # store
    yield


# %% tags=["hide-input"]
def dQ_after(turns):  # whose step comes next
    dQ = [0]
    programs = {"A": plain_addition(dQ, 2), "B": plain_addition(dQ, 3)}
    for who in turns:
        next(programs[who])
    return dQ[0]


for turns in ("AAABBB", "ABABAB"):
    print(f"{turns}: dQ = {dQ_after(turns)}")
ends = [dQ_after(turns) for turns in set(permutations("AAABBB"))]
print(f"{len(ends)} orders:", ", ".join(f"{ends.count(dQ)} times dQ = {dQ}" for dQ in (2, 3, 5)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **In two.** The sum is right only if one program stores before the other loads. In 18 orders one part is lost.
# </details>
#
# `add_rows` below uses Triton's *atomic addition*, `tl.atomic_add`: for each number, load, add and store are one step
# that nobody can interrupt. It loses nothing. But the parts may arrive in another order in each run, and a sum in fp32
# depends on the order in its last bits (chapter 05).

# %%
@triton.jit
def add_rows(X, x, first, N, B: tl.constexpr, d: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    tl.atomic_add(at, x, mask=first + row < N, sem="relaxed")  # only the sum counts, not who sees which part first

# %% tags=["hide-input"]
@triton.jit
def line_15_kernel(dQ, parts, N, ATOMIC: tl.constexpr, d: tl.constexpr, B: tl.constexpr):
    j = tl.program_id(0)
    for i in range(0, N, B):
        dq_i = load_rows(parts + j * N * d, i, N, B, d)
        if ATOMIC:
            add_rows(dQ, dq_i, i, N, B, d)
        else:
            store_rows(dQ, load_rows(dQ, i, N, B, d) + dq_i, i, N, B, d)


parts = normal(16, 32, 16, seed=4).float()  # of 16 column blocks, for 32 rows, d = 16


def line_15(atomic):
    dQ = torch.zeros(32, 16, device=device)  # FA2.A2.L3
    line_15_kernel[(16,)](dQ, parts, 32, ATOMIC=atomic, d=16, B=16)
    return host(dQ)

# %% [markdown]
# The next output comes from a kernel that is line 15 alone, run by 16 programs. In the interpreter one program ends before
# the next begins, so nothing is lost there either way. That proves nothing about a GPU. So look for a race in the code:
# here all 16 programs write to the same rows of dQ.

# %% tags=["hide-input", "nbval-ignore-output"]
print(torch.cuda.get_device_name() if device == "cuda" else "interpreter: one program after the other")
for atomic in (False, True):
    runs, right = [line_15(atomic) for _ in range(5)], host(parts).sum(0)
    errors = [f"{np.abs(x - right).max():.2f}" for x in runs]
    print(f"atomic = {atomic!s:5}  errors of five runs {errors}, different results {len({x.tobytes() for x in runs})}")

# %% [markdown]
# Rung b00 is our column kernel with line 15 in its loop: `add_rows(dQ, tau * tl.dot(ds_ij, k_j), …)`. Its results:

# %% tags=["hide-input"]
b00, b01 = load("b00"), load("b01")
compare("dQ dK dV", (x[0, 0] for x in b00.backward(*(x[None, None] for x in (Q, K, V, O, L, dO)), False)), (dQ, dK, dV))

# %% [markdown]
# **Takeaway.** Atomic additions make line 15 right. They do not make it repeatable.

# %% [markdown]
# ## Who could own dQ?
#
# $dQ_i$ is a sum over keys. So give it to a program that owns row block i, as in chapter 08. `rows_kernel` is this
# second pass.
#
# **Predict.** In chapter 08 a larger score could turn up late, and then all of `o_i` was multiplied by α. Which line of
# `rows_kernel` does the same for `dq_i`?

# %%
@triton.jit
def rows_kernel(Q, K, V, dO, L, D, dQ, N_q, N_k, tau, CAUSAL: tl.constexpr, d: tl.constexpr, B_r: tl.constexpr,
                B_c: tl.constexpr):
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    Q, dO, L, D = Q + head * N_q * d, dO + head * N_q * d, L + head * N_q, D + head * N_q
    K, V, dQ = K + head * N_k * d, V + head * N_k * d, dQ + head * N_q * d
    q_i = load_rows(Q, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
    do_i = load_rows(dO, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
    L_i = of_rows(L, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
    D_i = of_rows(D, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
    dq_i = tl.zeros((B_r, d), tl.float32)
    last = tl.minimum(tl.maximum(i + B_r + N_k - N_q, 0), N_k) if CAUSAL else N_k
    for j in range(0, last, B_c):  # FA2.A2.L5
        k_j = load_rows(K, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
        v_j = load_rows(V, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
        _, ds_ij = tile(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL)
        dq_i = tl.dot(ds_ij, k_j, dq_i)  # (B_r, d)  FA2.A2.L15
    store_rows(dQ, tau * dq_i, i, N_q, B_r, d)

# %% tags=["hide-input"]
def by_rows(Q, K, V, dO, L, D, causal=False):
    dQ = torch.full(Q.shape, torch.nan, device=device)
    sizes = dict(CAUSAL=causal, d=Q.shape[1], B_r=B, B_c=B)
    rows_kernel[(triton.cdiv(len(Q), B), 1)](Q, K, V, dO, L, D, dQ, len(Q), len(K), Q.shape[1] ** -0.5, **sizes)
    return dQ

# %% tags=["hide-input"]
runs = [by_rows(Q, K, V, dO, L, D) for _ in range(5)]
compare("dQ", runs[:1], [dQ])
print("five runs, different results:", len({host(x).tobytes() for x in runs}))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **None.** L is the outcome of the whole row, so every p is final as soon as it is computed.
# </details>
#
# Every number of dQ is written by one program, which adds its parts in the order of the keys. So on one machine all runs give
# the same bits. This is rung b01. The picture has both rungs on one clock, for four SMs. A column program needs five
# products a tile, or four without line 15. A row program needs three.

# %%
show(dq_over_time.draw(**dq_over_time.data()))

# %% [markdown]
# **Takeaway.** One writer for each number, one order for each sum: the same bits in every run.

# %% [markdown]
# ## What do the two ways cost?
#
# Chapter 05 counted products: seven instead of five. But atomic additions are not free. Their dQ is in fp32, and must be
# set to zero before and converted after.
#
# **Predict.** N = 8,192, d = 128, column blocks of 64, one head. dQ in fp32 takes 4 MiB. How many MiB are added to it in
# all?

# %% tags=["hide-input"]
MiB, numbers = 2**20, 8192 * 128
added, fp32, half = 8192 // 64 * numbers * 4 // MiB, numbers * 4 // MiB, numbers * 2 // MiB
print(f"one pass:   5 products a tile; {added} MiB added, {half} MiB of dQ written in 16 bits, {fp32} MiB more memory")
print(f"two passes: 7 products a tile; {half} MiB of dQ written in 16 bits")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **512.** Each of the 128 column blocks adds to all of dQ.
# </details>
#
# The L2 cache keeps much of this away from HBM. With two passes no kernel has to keep dK and dV and also add to dQ. Which
# way is faster depends on the chip: the package's Triton kernels take two passes, and its kernel for Hopper
# (H100 and H200) takes one. There the last bits of dQ vary, unless you ask for the same ones (chapter 13).
#
# **Takeaway.** Two more products buy repeatable bits, and no dQ in fp32.

# %% [markdown]
# ## Who owns dK if query heads share keys?
#
# Grouped query heads share one head of K and V, for short a *K/V head*. Its dK is a sum over all query heads of its group
# (chapter 05). Again we want one owner for each number.
#
# **Predict.** 4 query heads, 2 K/V heads, 4 column blocks in each K/V head. How many column programs, if no two may write
# the same dK?

# %% tags=["hide-input"]
q, do = normal(1, 4, 60, 32), normal(1, 4, 60, 32, seed=3)
k, v = normal(1, 2, 64, 32, seed=1), normal(1, 2, 64, 32, seed=2)
o, lse = attention(q, k, v, return_lse=True)
want = heads.backward(*map(host, (q, k, v, o, lse, do)), stage="naive")
D_all = (do.float() * o.float()).sum(-1)
for g in range(2):  # query heads 2g and 2g + 1, one below the other: 120 rows
    Q_g, dO_g, L_g, D_g = (x[0, 2 * g : 2 * g + 2].flatten(0, 1).contiguous() for x in (q, do, lse, D_all))
    print(f"K/V head {g}: {triton.cdiv(64, B)} column programs, {len(Q_g)} rows come by each")
    compare("dK dV", by_columns(Q_g, k[0, g], v[0, g], dO_g, L_g, D_g), (want[1][0, g], want[2][0, g]))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Eight.** One for each column block of each K/V head.
# </details>
#
# Each goes through the rows of the first query head, then of the second, and keeps dk and dv all the while. The price is
# fewer and longer programs. Chapter 06 says when that leaves SMs idle.
#
# **Takeaway.** Give each block of the output one program. Then a shared sum needs no atomic additions.

# %% [markdown]
# ## What if the loss uses L as well?
#
# `attention(…, return_lse=True)` returns L, and a program may compute with it, for instance to merge the outputs of two
# calls (chapter 14). Then the loss has a gradient with respect to L, too: dL. It adds one term: dS becomes
# $P \circ (dP - D + dL)$. As $dP - D + dL = dP - (D - dL)$, the two large kernels are handed D − dL and stay as they are.

# %% tags=["hide-input"]
dL = normal(N_q, seed=5).float()
Q64, K64, V64 = (x.double().requires_grad_() for x in (Q, K, V))
S64 = tau * Q64 @ K64.T
loss = (dO.double() * (torch.softmax(S64, 1) @ V64)).sum() + (dL.double() * torch.logsumexp(S64, 1)).sum()
loss.backward()  # PyTorch's own gradient, in float64
for name, given in (("D", D), ("D − dL", D - dL)):
    print(f"handed {name}:")
    compare("dQ dK dV", (by_rows(Q, K, V, dO, L, given), *by_columns(Q, K, V, dO, L, given)),
            [host(x.grad) for x in (Q64, K64, V64)])  # fmt: skip

# %% [markdown]
# Handed D alone, dV is right, but dQ and dK are wrong.
#
# **Takeaway.** A gradient of L costs one subtraction for each row, D − dL, where D is computed.

# %% [markdown]
# ## Recap
#
# - Three kernels: D by rows, dK and dV by columns, dQ by rows. (The package has two. Its rows kernel runs first: it
#   computes D and dQ, and stores D for the columns kernel.)
# - $P = e^{S-L}$ is final at once. It needs the mask where no key is.
# - Line 15 as a plain addition loses parts. Atomic additions lose the order. A second pass loses neither, and costs two
#   products.
# - Groups: a program for each column block of each K/V head.
# - If the loss uses L, the kernels get D − dL in place of D.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** A third way to dQ: column program j stores its part in a place of its own, `parts[j]`, and a second kernel
# adds up the parts, always in the same order. Write that kernel: replace the line in the loop.
#
# <details><summary>Hint</summary>
#
# The folded `line_15_kernel` loads rows i of part j.
# </details>
# <details><summary>Solution</summary>
#
# ```python
# dq_i += load_rows(parts + j * N * d, i, N, B, d)
# ```
# The same bits in every run, and no product is computed twice. The price is memory. With N = 8,192, d = 128 and column
# blocks of 128 there are 64 parts of 4 MiB for each head, and their number grows with N: the quadratic memory is back.
# </details>

# %%
@triton.jit
def sum_kernel(dQ, parts, N, T_c, d: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B
    dq_i = tl.zeros((B, d), tl.float32)
    for j in range(0, T_c):
        dq_i += 0.0 * j  # your line
    store_rows(dQ, dq_i, i, N, B, d)

# %% tags=["hide-input"]
summed = torch.full((32, 16), torch.nan, device=device)
sum_kernel[(2,)](summed, parts, 32, 16, d=16, B=16)
error = np.abs(host(summed) - host(parts).sum(0)).max(axis=1)  # of each row
if not summed.any():
    print("not written yet")
elif error.max() < 1e-3:
    print("right")
else:
    one = [j for j in range(16) if np.allclose(host(summed), host(parts)[j])]
    print(f"not yet: it is part {one[0]} alone" if one else f"not yet: rows {np.flatnonzero(error > 1e-3)} are wrong")

# %% [markdown]
# **2. Find the bug.** Somebody leaves out the kernel for D and passes zeros. Which of dQ, dK and dV stays right? Answer
# before you look at the lines that the cell prints. Then repair D with one line of PyTorch, in place of the `...`.
#
# <details><summary>Hint</summary>
#
# $D_i = do_i \cdot o_i$. In which type should the product be taken?
# </details>
# <details><summary>Solution</summary>
#
# ```python
# repaired = (dO.float() * O.float()).sum(1)
# ```
# dV does not use D. With two copies in fp32 PyTorch needs more memory than the kernel, which widens its numbers on chip.
# </details>

# %%
zeros = torch.zeros_like(D)
compare("dQ dK dV", (by_rows(Q, K, V, dO, L, zeros), *by_columns(Q, K, V, dO, L, zeros)), (dQ, dK, dV))
repaired = ...

# %% tags=["hide-input"]
if repaired is ...:
    print("not written yet")
elif repaired.shape != D.shape:
    print(f"not yet: D has one number for each of the {N_q} rows, yours has the shape {tuple(repaired.shape)}")
else:
    off = (repaired.double() - D.double()).abs()
    print("right" if off.max() < 1e-5 else f"not yet: D of row {off.argmax()} is off by {off.max():.1e}; was it 16 bits?")

# %% [markdown]
# ## Checks
#
# The functions of this notebook are those of rungs b00 and b01. The rungs and the package agree with the dense result in
# float64, and the package's Triton kernels give the same bits twice.

# %% tags=["hide-input"]
def code(function):  # without docstring, comments and spaces
    body = ast.parse(getsource(function.fn)).body[0].body
    return [ast.unparse(x) for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]


for rung, name in ((b00, "b00"), (b01, "b01")):
    for mine in (load_rows, of_rows, store_rows, tile, D_kernel):
        verdict(f"{mine.fn.__name__} here = {name}'s", code(mine) == code(getattr(rung, mine.fn.__name__)))
verdict("add_rows here = b00's", code(add_rows) == code(b00.add_rows))
for mine in (columns_kernel, rows_kernel):
    verdict(f"{mine.fn.__name__} here = b01's", code(mine) == code(getattr(b01, mine.fn.__name__)))
for causal in (False, True):
    six = [x[None, None] for x in (Q, K, V, dO)]
    six[3:3] = attention(*six[:3], causal=causal, return_lse=True)
    want = truth(*(x[0, 0] for x in six), causal)
    found = {name: rung.backward(*six, causal) for rung, name in ((b00, "b00"), (b01, "b01"))}
    found["the package"] = packaged.backward(six[5], *six[:5], Options(causal, tau))
    for name, three in found.items():
        right = all(close(host(a)[0, 0], b, 3e-3) for a, b in zip(three, want, strict=True))
        verdict(f"{name} = the dense result, causal = {causal}", right)

# %% tags=["hide-input"]
def gradients(function, inputs, do, **options):
    fresh = [x.detach().requires_grad_() for x in inputs]
    function(*fresh, **options).backward(do)
    return [x.grad for x in fresh]


def from_O_and_L(q, k, v):
    o, lse = attention(q, k, v, return_lse=True)
    return (o.double() * dO).sum() + (lse.double() * dL).sum()


got = gradients(from_O_and_L, [x[None, None] for x in (Q, K, V)], None)
right = all(close(host(a)[0, 0], host(x.grad), 3e-3) for a, x in zip(got, (Q64, K64, V64), strict=True))
verdict("the package passes on a gradient of L", right)

# %% tags=["hide-input"]
cases = {  # (heads, key heads, N_q, N_k, d, size of the scores)
    "one key": (1, 1, 1, 1, 4, 1),
    "ragged, grouped heads": (2, 1, 20, 34, 20, 1),
    "rows without keys": (1, 1, 34, 17, 20, 1),
    "huge scores": (1, 1, 40, 40, 16, 300),
}
for name, (H, H_kv, N_q, N_k, d, size) in cases.items():
    inputs = [(size * normal(1, H, N_q, d)).float(), *(normal(1, H_kv, N_k, d, seed=s).float() for s in (1, 2))]
    do, three = normal(1, H, N_q, d, seed=3).float(), [host(x) for x in inputs]
    for causal in (False, True):
        forward = heads.forward(*three, stage="naive", causal=causal)
        want = heads.backward(*three, *forward, host(do), stage="naive", causal=causal)
        got = gradients(attention, inputs, do, causal=causal)
        right = all(close(host(a), b, 1e-2 if size > 1 else 1e-5) for a, b in zip(got, want, strict=True))
        verdict(f"gradients = the dense result: {name}, causal = {causal}", right)
again = gradients(attention, inputs, do, causal=True)
verdict("the same gradients a second time, bit for bit", all(map(torch.equal, got, again)))

# %% [markdown] tags=["navigation"]
# [← The Triton forward kernel](08_triton_forward.ipynb) · [The map](00_start.ipynb) · [The ladder, measured →](10_ladder.ipynb)
