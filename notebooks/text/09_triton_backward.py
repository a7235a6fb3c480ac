# %% [markdown] tags=["navigation"]
# [← The Triton forward kernel](08_triton_forward.ipynb) · [The map](00_start.ipynb) · [The ladder, measured →](10_ladder.ipynb)

# %% [markdown]
# # 09 · The Triton backward kernels
#
# **How do many blocks add into one dQ?**
#
# A training run fails after three days. To find out why, you start it again with the same seed, the same data and the
# same GPU. This time it does not fail, because it does not compute the same numbers. How can the numbers differ
# although nothing has changed?
#
# Chapter 05 showed two ways to sum up dQ, and whether two runs agree depends on the choice between them. In this
# chapter, both become kernels that extend the ladder of chapter 08. Rung `b00` (b for backward) uses atomic additions,
# and rung `b01` uses two passes. At the end, we hand the forward and the backward kernels to PyTorch, and train a small
# model with them.
#
# After this notebook you can
#
# - write the backward pass as three small kernels, and name what each one keeps on the chip,
# - explain why two runs of the same kernel can differ, and compare two fixes and what they cost,
# - count the registers that a program's blocks need,
# - use your own forward and backward kernels in PyTorch, check them, and train with them.
#
# *Time: 60 minutes with the questions and the kernel. Hardware: any machine with Linux; without an NVIDIA GPU the
# kernels run in Triton's interpreter. Before this: [05 · The backward pass](05_backward.ipynb) and [08 · The Triton
# forward kernel](08_triton_forward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import math
import warnings
from dataclasses import replace

import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.examine.cases import one_head
from fa2_lab.kernels.ladder import load
from fa2_lab.machine import chips, rates
from fa2_lab.machine.budget import blocks_per_sm
from fa2_lab.plots.show import show
from fa2_lab.records import load as record_of
from fa2_lab.records import read_json
from fa2_lab.reference import heads
from fa2_lab.tools.xray import loops, xray_launches
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, same_code, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output", "hide-input"]
# Setup: run this cell as well.
import triton
import triton.language as tl

print("kernels of this notebook:", "interpreted" if triton.knobs.runtime.interpret
      else "compiled for the GPU here")
# the package says once that it is slow here
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))

# %% tags=["hide-input"]
# Setup: run this cell as well.
def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(
        device, torch.float16
    )


def host(x):  # to NumPy, for comparing
    return x.detach().double().cpu().numpy()


def compare(names, got, want):
    for name, a, b in zip(names.split(), map(host, got), want, strict=True):
        error = np.abs(a - b).max()
        print(f"   {name}: first number {a.flat[0]:6.2f}, right {b.flat[0]:6.2f}; largest "
              f"error {error:.2f}")


def inputs_of(N_q, N_k, causal):
    Q, K, V, dO = (
        normal(N_q, d),
        normal(N_k, d, seed=1),
        normal(N_k, d, seed=2),
        normal(N_q, d, seed=3),
    )
    O, L = (x[0, 0] for x in attention(Q[None, None], K[None, None], V[None, None],
                                       causal=causal, return_lse=True))
    return Q, K, V, dO, O, L, (dO.float() * O.float()).sum(1)

# %% [markdown]
# ## Why do two runs differ?
#
# A block of dQ is a sum to which each column block contributes one part. With 4,096 keys in blocks of 64, it has 64
# parts. Suppose that the programs add their parts to the same memory as soon as they have computed them. The parts are
# then added in the order in which they arrive, and this order differs from run to run. The cell below adds the same 64
# parts in float32 three times, each time in a different order:

# %%
parts = np.random.default_rng(0).standard_normal((64, 64, 128)).astype(np.float32)
runs = []
for run in range(3):
    dq = np.zeros((64, 128), np.float32)  # one block of dQ
    for j in np.random.default_rng(run).permutation(64):  # in order of arrival
        dq += parts[j]
    runs.append(dq)
    other = (dq != runs[0]).mean()
    print(f"run {run}: second number {dq[0, 1]:.9f}, different from run 0: {other:.0%} of all "
          "numbers")

# %% [markdown]
# Although no run is wrong, each run adds and rounds in a different order, so more than three quarters of the numbers
# differ in their last bits. In a single training step, this does no harm. Over thousands of steps, however, such
# differences grow until the result is a different model. If a bug depends on them, you cannot reproduce it by running
# the training again. We therefore want to know what decides the order, and what a fixed order costs. We begin with the
# parts of the backward pass where nothing can go wrong.
#
# ## What is the same in all tiles of a row?
#
# The line numbers in this chapter refer to Algorithm 2 of the FA2 paper, and [the
# poster](../figures/poster_backward.pdf) shows the whole algorithm on one sheet. Each tile of a row uses the row's L,
# which is subtracted in line 11, and its $D_i = do_i \cdot o_i$ (line 4), which is subtracted in line 14. The forward
# pass has already computed L, so only D is missing. The smallest kernel in this chapter, `D_kernel`, computes D once.
# `load_rows` is the function from chapter 08 without the `RAGGED` option, because it always masks. We take it from rung
# b01, which `load("b01")` imports, together with two functions that work in the same way. `store_rows` stores a block
# of rows, and `load_row_values` loads one number per row, such as L or D, as a (B, 1) block, which has zeros for rows
# past the end.

# %%
b00, b01 = load("b00"), load("b01")
load_rows, store_rows = b01.load_rows, b01.store_rows  # a block of rows
load_row_values = b01.load_row_values  # one number for each row

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
N_q, N_k, d, B = 40, 56, 16, 16
Q, K, V, dO, O, L, _ = inputs_of(N_q, N_k, False)
D = torch.full_like(L, torch.nan)
D_kernel[(triton.cdiv(N_q, B), 1)](O, dO, D, N_q, d=d, B_r=B)  # three row blocks, one head
P = np.exp(host(Q) @ host(K).T / d**0.5 - host(L)[:, None])
print("D by the kernel, and the row sums of P ∘ (dO Vᵀ):")
compare("D", [D], [(P * (host(dO) @ host(V).T)).sum(1)])

# %% [markdown]
# The two results agree, because D is the weighted mean of the row's dP (chapter 05). The kernel computes D in fp32,
# since a rounding error in D would affect the whole row.

# %% [markdown]
# ## Does P still need a maximum?
#
# P is recomputed in one step, as $e^{S - L}$. L is at least as large as the score of every key that the row sees, so
# the exponent is never positive and nothing overflows.
#
# `p_and_ds` computes S, P, dP and dS of one tile, in this order. In the code, `seen` is true if the row and the key
# both exist and, under a causal mask, the row sees the key. L is a natural logarithm, so it is subtracted first, and
# only the difference is multiplied by $\log_2 e$.

# %%
NEG_INF, LOG2E = tl.constexpr(float("-inf")), tl.constexpr(1 / math.log(2))


@triton.jit
def p_and_ds(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL: tl.constexpr):
    row, col = (i + tl.arange(0, q_i.shape[0])[:, None],
                j + tl.arange(0, k_j.shape[0])[None, :])
    seen = (row < N_q) & (col < N_k) & (col <= row + N_k - N_q if CAUSAL else True)
    s_ij = tau * tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A2.L10
    # L = −∞ in a row without keys, but all its keys are hidden
    power = tl.where(seen, (s_ij - L_i) * LOG2E, NEG_INF)
    p_ij = tl.exp2(power)  # (B_r, B_c)  FA2.A2.L11
    dp_ij = tl.dot(do_i, v_j.T)  # (B_r, B_c)  FA2.A2.L13
    ds_ij = p_ij * (dp_ij - D_i)  # (B_r, B_c)  FA2.A2.L14
    return p_ij.to(q_i.dtype), ds_ij.to(q_i.dtype)

# %% [markdown]
# **Predict.** All 8 keys have the score −200, so L is about −198. A missing key is loaded as zeros, so its score is 0.
# What would the missing key's P be in fp32 if `p_and_ds` did not check whether the key exists?
#
# - ☐ 0, as there is no key
# - ☐ ∞
# - ☐ 1, as e to the 0
#
# <details><summary>Answer</summary>
#
# **∞.** $e^{198}$ is more than fp32 can hold, because the largest fp32 number is about $e^{88.7}$. This P makes dS
# infinite, and computing dQ then multiplies dS by the missing key's k, which is all zeros. Since ∞ · 0 is NaN, the
# whole row of dQ is lost. A finite P would do no harm, as long as its dS does not exceed 65,504, the largest fp16
# number.
# </details>
#
# An early version of FlashAttention-2 produced such NaNs ([flash-attention
# #334](https://github.com/Dao-AILab/flash-attention/issues/334)).

# %% [markdown]
# ## What does a column block keep on chip?
#
# A column kernel runs one program for each column block. The program loads $k_j$ and $v_j$ once, and then loops over
# the row blocks. For each row block, it calls `p_and_ds` and then adds $p^\top do$ to dV and $ds^\top q$ to dK. We will
# add dQ later. `tl.dot(a, b, acc)` adds the product to the block `acc`.
#
# Under a causal mask, row r sees the keys before $r + 1 + N_k - N_q$ (chapter 08). So it sees key j if
# $j < r + 1 + N_k - N_q$, and we can solve this for r. The first row that sees key j is $r = j + N_q - N_k$. Row blocks
# that contain only earlier rows are skipped. Skipping them only saves time, so the check does not require it.
#
# **Build.** Write a kernel that computes dK and dV for one head, which are lines 6 to 14, 16 and 18 of Algorithm 2. You
# can use `p_and_ds`, `load_rows(X, first, N, B, d)`, `load_row_values(X, first, N, B)`, which returns a (B, 1) block,
# and `store_rows(X, x, first, N, B, d)`. The accumulators are fp32. You can multiply dK by τ after the loop.

# %%
@triton.jit
def my_columns(Q, K, V, dO, L, D, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr,
               d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    pass


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def truth(Q, K, V, O, L, dO, causal=False):  # float64, with all of P
    six = (host(x)[None, None] for x in (Q, K, V, O, L, dO))
    return [x[0, 0] for x in heads.backward(*six, stage="naive", causal=causal)]


def my_gradients(N_q, N_k, causal):  # dK and dV by your kernel; nothing if it stores nothing
    Q, K, V, dO, _, L, D = inputs_of(N_q, N_k, causal)
    # 1,000 rows that are not the kernel's
    memory = torch.full((2, N_k + 1000, d), 7.0, device=device)
    dK, dV = memory[:, :N_k].fill_(torch.nan)  # poisoned
    sizes = dict(CAUSAL=causal, d=d, B_r=B, B_c=B)
    my_columns[(triton.cdiv(N_k, B),)](Q, K, V, dO, L, D, dK, dV, N_q, N_k, d**-0.5, **sizes)
    if (memory[:, N_k:] != 7).any():
        raise IndexError("the kernel wrote past the end of dK or dV, into memory that is not "
                         "its own")
    return None if memory[:, :N_k].isnan().all() else (host(dK), host(dV))


my_gradients.__name__ = "my_columns"

cases = {
    "16 queries and keys, one tile. Is dK multiplied by τ, and which block is transposed?":
        (16, 16, False),
    "40 queries, 56 keys. Does the loop reach the last row block, and the last program its keys?":
        (40, 56, False),
    "48 of each, causal. Which row block sees a key block first?": (48, 48, True),
    "12 queries, 44 keys, causal. Can j + N_q − N_k be negative?": (12, 44, True),
    "20 queries, 12 keys, causal: row 8 is the first to see a key. Does the loop begin no later?":
        (20, 12, True),
}


def gradients(case):  # dK and dV in float64
    q, k, v, do, o, l, _ = inputs_of(*case)
    return tuple(truth(q, k, v, o, l, do, case[2])[1:])


asked = {words: one_head(*map(host, inputs_of(*case)[:4]), causal=case[2], tile=(B, B))
         for words, case in cases.items()}
tried = (Case(words, case, gradients(case), asked[words]) for words, case in cases.items())
check(my_gradients, *tried, tolerance=3e-3, names=("dK", "dV"))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def my_columns(Q, K, V, dO, L, D, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr,
#                d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
#     j = tl.program_id(0) * B_c
#     k_j = load_rows(K, j, N_k, B_c, d)  # FA2.A2.L6
#     v_j = load_rows(V, j, N_k, B_c, d)  # FA2.A2.L6
#     dk_j = tl.zeros((B_c, d), tl.float32)  # FA2.A2.L7
#     dv_j = tl.zeros((B_c, d), tl.float32)  # FA2.A2.L7
#     # down to a multiple of B_r, as all row blocks begin; the result is right without it
#     first = tl.maximum(j + N_q - N_k, 0) // B_r * B_r if CAUSAL else 0
#     for i in range(first, N_q, B_r):  # FA2.A2.L8
#         q_i = load_rows(Q, i, N_q, B_r, d)  # FA2.A2.L9
#         do_i = load_rows(dO, i, N_q, B_r, d)  # FA2.A2.L9
#         L_i = load_row_values(L, i, N_q, B_r)  # FA2.A2.L9
#         D_i = load_row_values(D, i, N_q, B_r)  # FA2.A2.L9
#         p_ij, ds_ij = p_and_ds(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL)
#         dv_j = tl.dot(p_ij.T, do_i, dv_j)  # FA2.A2.L12
#         dk_j = tl.dot(ds_ij.T, q_i, dk_j)  # FA2.A2.L16
#     store_rows(dK, tau * dk_j, j, N_k, B_c, d)  # FA2.A2.L18
#     store_rows(dV, dv_j, j, N_k, B_c, d)  # FA2.A2.L18
# ```
# In rung b01, this kernel is called `bwd_dkdv`, and it has a second program number for the head.
# </details>
#
# [Assignment 7](assignments/7_triton_backward.ipynb) goes further. There, you write both loop orders and the single
# pass.

# %% [markdown]
# ## How can all programs add into dQ?
#
# In line 15, every column block adds $\tau\, ds_{ij}\, k_j$ to $dQ_i$. With plain additions, the programs run into the
# race of [chapter 05](05_backward.ipynb), in which parts of the sum get lost. `add_rows` uses the first fix, the atomic
# add:

# %%
@triton.jit
def add_rows(X, x, first, N, B: tl.constexpr, d: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    # relaxed: only the sum counts, not the order in which others see the parts
    tl.atomic_add(at, x, mask=first + row < N, sem="relaxed")

# %% [markdown]
# Rung b00 is the column kernel with line 15 added to its loop, as `add_rows(dQ, tau * tl.dot(ds_ij, k_j), …)`. Because
# it only adds, dQ has to be 0 before the launch (line 3). No part is lost in this version. On a GPU, however, the order
# in which the parts are added can differ from run to run, and so can the last bits of dQ. This is why two runs of this
# kernel can give different results. In the interpreter, each program ends before the next one begins, so no test in the
# interpreter can reveal a race. Without a GPU, you can find one only by reading the code.

# %% tags=["nbval-ignore-output", "hide-input"]
dQ, dK, dV = truth(Q, K, V, O, L, dO)
six = [x[None, None] for x in (Q, K, V, O, L, dO)]
compare("dQ dK dV", (x[0, 0] for x in b00.backward(*six, False)), (dQ, dK, dV))

# %% [markdown]
# ## Who could own dQ?
#
# With two passes, each block of dQ has one owner, namely the program for row block i, as in chapter 08. Per tile, a
# column program computes five matmuls with line 15, or four without it, and a row program computes three. `bwd_dq` is
# the kernel for the second pass.

# %%
@triton.jit
def bwd_dq(Q, K, V, dO, L, D, dQ, N_q, N_k, tau, CAUSAL: tl.constexpr,
           d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i, head = tl.program_id(0) * B_r, tl.program_id(1).to(tl.int64)
    Q, dO, L, D = (Q + head * N_q * d, dO + head * N_q * d,
                   L + head * N_q, D + head * N_q)
    K, V, dQ = K + head * N_k * d, V + head * N_k * d, dQ + head * N_q * d
    q_i = load_rows(Q, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
    do_i = load_rows(dO, i, N_q, B_r, d)  # (B_r, d)  FA2.A2.L9
    L_i = load_row_values(L, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
    D_i = load_row_values(D, i, N_q, B_r)  # (B_r, 1)  FA2.A2.L9
    dq_i = tl.zeros((B_r, d), tl.float32)
    last = tl.minimum(tl.maximum(i + B_r + N_k - N_q, 0), N_k) if CAUSAL else N_k
    for j in range(0, last, B_c):  # FA2.A2.L5
        k_j = load_rows(K, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
        v_j = load_rows(V, j, N_k, B_c, d)  # (B_c, d)  FA2.A2.L6
        _, ds_ij = p_and_ds(q_i, k_j, v_j, do_i, L_i, D_i, i, j, N_q, N_k, tau, CAUSAL)
        dq_i = tl.dot(ds_ij, k_j, dq_i)  # (B_r, d)  FA2.A2.L15
    store_rows(dQ, tau * dq_i, i, N_q, B_r, d)

# %% tags=["hide-input"]
mine = torch.full(Q.shape, torch.nan, device=device)
sizes = dict(CAUSAL=False, d=d, B_r=B, B_c=B)
bwd_dq[(triton.cdiv(N_q, B), 1)](Q, K, V, dO, L, D, mine, N_q, N_k, d**-0.5, **sizes)
compare("dQ", [mine], [dQ])

# %% [markdown]
# For each element of dQ, a single program adds all parts in the order of the keys, so on one machine, all runs agree
# bit for bit. Such a kernel is called *deterministic*. In chapter 08, `o_i` was rescaled by α. Here, `dq_i` needs no
# rescaling, because every p is final as soon as it is computed.

# %% [markdown]
# ## What do the two ways cost?
#
# The second pass computes S and dP once more, so two passes take seven matmuls per tile, and one pass takes five. If
# only matmuls counted, one pass would take 5/7 of the time. The figure shows both versions tile by tile. What does the
# single pass cost instead?

# %% tags=["hide-input"]
show("backward_passes")

# %% [markdown]
# Both versions request the same number of bytes, namely 8 bytes per tile for each of a block's B · d elements (chapter
# 05). But an atomic addition is more than a store, because L2 reads the old sum, adds to it, and writes the new one. No
# data sheet specifies how long that takes, so we assume that an atomic addition costs L2 as much as a load and a store.
# For one pass, we therefore count 12 bytes instead of 8. For each version, we compare two lower bounds, one from the
# tensor cores and one from L2, with the time that an H200 took:

# %% tags=["hide-input"]
# 64 heads, N = 4,096, d = 128, tiles of 64 × 64; it counts dQ in and out
one = rates.cost("FA2 backward")
# bytes: in and out, heads, column blocks, dQ in fp32
dQ_moved = 2 * 64 * (4096 // 64) * 4096 * 128 * 4
# the second pass requests K and V as often as the first Q and dO
two = replace(one, flops=one.flops * 7 // 5, requested_bytes=2 * (one.requested_bytes - dQ_moved))
times = next(row.values for row in record_of("ladder").rows if row.direction == "backward")
bounds = {}
for name, words, cost in (("b00_atomics", "one pass", one), ("b01_two_passes", "two passes", two)):
    bounds[name] = cores, l2 = [1e3 * cost.seconds(chips.H200)[unit]
                                for unit in ("tensor cores", "L2")]
    print(f"{name[:3]}, {words}: tensor cores at least {cores:.2f} ms, L2 at least {l2:.2f} ms "
          f"({cost.requested_bytes / 1e9:.1f} GB)")
    took = times[name][0]
    print(f"     measured {took:.1f} ms, {took / max(cores, l2):.1f} times the larger bound")
print(f"b02, one pass on Hopper: measured {times['b02_one_pass'][0]:.1f} ms")

# %% [markdown]
# On this GPU and at this size, two passes are faster, and they are deterministic. Are the atomic additions the reason?
# By our count, they could be. If an atomic addition costs what we assume, L2 is the slowest unit in the single pass,
# and its bound is 1.41 times the larger bound for two passes. The ratio of the measured times is about the same.
# Without the assumption, that is with 8 bytes instead of 12, L2 would need only about two thirds of its time in the
# single pass, or 1.85 ms. The larger bound would then be smaller for one pass than for two.
#
# This does not prove that the additions are the reason, because both kernels take more than twice as long as their
# bounds, and because the two kernels differ in other ways as well. The next section finds these differences in the
# compiled code.
#
# The single pass can be made faster. Rung b02 is written in Gluon (chapter 12a) for Hopper (H100 and H200). Because its
# blocks have more keys, it adds to dQ less often. Its single pass is the fastest of the three kernels, but the last
# bits of its dQ vary. Chapter 13 explains b02, and then the package's own kernel, which is faster still. The package
# uses two passes in Triton and one pass on Hopper. On Hopper, `torch.use_deterministic_algorithms(True)` makes the
# additions happen in a fixed order.

# %% [markdown]
# ## Does a column program's work fit in registers?
#
# A thread has at most 255 registers. A column program with 4 warps, tiles of 64 × 64 and d = 128 keeps four fp32 blocks
# in registers. dk and dv stay there through the whole loop, and take 2 · 64 · 128 / 128 threads = 128 registers per
# thread. S and dP are needed only for a short time, and take 2 · 64 · 64 / 128 = 64 registers. k and v stay in shared
# memory.
#
# **Predict.** Rung 11's forward kernel has the same tile size. It keeps only one 64 × 128 block, $o$, through its loop,
# which takes 64 registers per thread, and S takes 32. Yet the kernel needs 168 registers, because addresses, copies of
# values and everything else take another 168 − 96 = 72. How many registers does a column program need?
#
# - ☐ it does not fit, so some values get no register
# - ☐ about as many, because it has the same number of warps
# - ☐ more, but it fits
#
# <details><summary>Answer</summary>
#
# **it does not fit, so some values get no register.** If the rest takes about 72 registers in a column program as well,
# the program needs 128 + 64 + 72 = 264. Values for which no register is left are kept in memory, which is called
# *spilling*.
#
# ```python
# for row in read_json("rungs")["rungs"]:
#     shape = row["d"], row["causal"]
#     if row["rung"][:3] in ("r11", "b00", "b01") and shape == (128, False):
#         print(row["rung"], f"{row['registers']} registers, {row['spills']} spills")
# ```
#
# ```text
# r11_diagonal_first 168 registers, 0 spills
# b00_atomics 255 registers, 85 spills
# b01_two_passes 255 registers, 110 spills
# ```
# </details>
#
# In this output, a spill is an instruction that stores such a value or loads it again. Both rungs spill, so spills
# alone cannot explain why rung b01 is faster.
#
# ## Why are both kernels so slow?
#
# Rungs b00 and b01 took 2.7 and 2.6 times as long as their bounds. A bound assumes that one unit is busy all the time.
# We can look for reasons why it is not, without a GPU, in the compiled code. The next cell compiles both rungs for an
# H200 and lists three things that cost time, and in the last column, the exponentials that all threads compute
# together. Besides the spills, the three things are the number of programs that fit onto an SM, and the number of waits
# for matmuls in one step of the loop. On an H200, an instruction only starts a matmul, and a program that needs the
# result has to wait for it. The last line is for the same column kernel with 8 warps, in which each thread holds half
# as many values:

# %% tags=["nbval-ignore-output", "hide-input"]
launches = xray_launches("b01", [dict(num_warps=W) for W in (4, 8)], "sm_90", causal=False)
((_, single),) = xray_launches("b00", [{}], "sm_90", causal=False)
(_, columns, rows), (_, eight, _) = launches  # the first kernel of each launch computes D
slowed = {"b00, single pass": single, "b01, columns": columns, "b01, rows": rows,
          "b01, columns, 8 warps": eight}
print("                         spills   programs on an SM   waits for matmuls   exponentials "
      "in all threads")
for name, kernel in slowed.items():
    n, waits = kernel.numbers, loops(kernel.stages["sass"])[-1].waits
    fit = blocks_per_sm(chips.H200, n["shared"], n["registers"], n["warps"])
    print(f"{name:23}{n['spills']:8}{fit:20}{waits:20}{32 * n['warps'] * n['exponential']:30,}")

# %% [markdown]
# - **Spills.** The two kernels that keep dk and dv spill. The row kernel, which keeps only dq, does not.
# - **Programs on an SM.** The tiles of rung b00 and of the row kernel take so much shared memory that only one program
#   fits onto an SM. While this program waits, nothing else can use the SM's units. In the column kernel of rung b01, a
#   second program can work in the meantime.
# - **Waits.** In rung b00, the program waits after each of its 28 tensor-core instructions, so the tensor cores stop 28
#   times per tile. (An instruction sums over 16 products, so S and dP take 8 each at d = 128, and dV, dK and dQ take 4
#   each for 64 rows or keys.) In each kernel of rung b01, the program waits only twice per tile.
#
# So the atomic additions are only one of three differences between b00 and b01, and no recorded run changes just one of
# them. For the backward pass, we therefore do not know how much each difference costs. For the forward pass, we do.
# Chapter 10 finds a rung with the same kind of waits, removes all but one of them, and the kernel becomes about a
# quarter faster. In the backward pass, rung b02 of chapter 13 has no spills, and it leaves the additions to Hopper's
# copy engine, so that the warps can go on.
#
# Could we at least remove the spills by using 8 warps? The last line shows that nothing is spilled with 8 warps, and
# yet rung b01 was slower on an H200 with 8 warps than with 4. The last column gives a reason. A tile has 64 · 64 =
# 4,096 scores, so 4,096 exponentials are enough, but with 8 warps, the threads compute 8,192. On Hopper, each warp gets
# 16 rows of a matmul (chapter 08). Here the compiler stacks all eight warps on top of each other, which makes 8 · 16 =
# 128 rows. The tile has only 64, so four of the warps compute the same S, P and dP a second time. The 8 warps thus also
# change the amount of work, so this launch does not tell us what the spills cost.
#
# Why does the compiler not arrange the warps as `[4, 2]`, as in chapter 08? There, the result of the matmul was the end
# of the kernel. Here, the results P and dS are operands of other matmuls, and the compiler then keeps each row of them
# in one warp.
#
# If the package's Triton column kernel runs on Hopper, it uses 8 warps at d = 128. It avoids the duplicate work. It
# computes Sᵀ, whose rows are keys, and a block has 128 keys, so each of the 8 warps gets 16 rows of its own. All these
# numbers are from Triton 3.9. To see the numbers for both rungs on your machine, run `fa2-lab xray b01 --full` and
# `fa2-lab xray b00 --full`.

# %% [markdown]
# ## How does PyTorch use the kernels?
#
# PyTorch records which operations produced a tensor, and a call to `backward()` runs their backward functions. PyTorch
# cannot look inside a Triton kernel, so we write a class with two functions that tells PyTorch which kernels belong
# together. `forward` saves in `ctx` what the backward pass needs, and `backward` receives dO and returns one gradient
# for each argument of `forward`. An argument that has no gradient, such as `causal`, gets `None`.
#
# dO can have unusual strides. After `O.sum().backward()`, for example, all elements of dO are the same 1 in memory, so
# all of its strides are 0. Our kernels assume contiguous rows, so `b01.backward` calls `contiguous()` first, which
# makes a real copy. A kernel that skips this step reads past the end of that single number.

# %%
rung_forward = load("11").forward  # O and L


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        O, L = rung_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, O, L)  # not P: that is the point of FlashAttention
        ctx.causal = causal
        return O

    @staticmethod
    def backward(ctx, dO):
        dQ, dK, dV = b01.backward(*ctx.saved_tensors, dO, ctx.causal)
        return dQ, dK, dV, None

# %% [markdown]
# Are the gradients right? `torch.autograd.gradcheck` compares each element of the gradients with a finite difference
# from two forward calls, $(f(x + h) - f(x - h)) / 2h$. It needs no second implementation of the backward pass, so it
# belongs in every test of one. It is designed for float64, so in fp32, we choose a larger h and a larger tolerance. On
# a GPU, `tl.dot` rounds fp32 inputs, as chapter 11 explains, so we make both even larger there. For comparison, we also
# check a backward pass that forgets to scale dK by τ:

# %% tags=["nbval-ignore-output"]
class Forgetful(Attention):
    @staticmethod
    def backward(ctx, dO):
        dQ, dK, dV, _ = Attention.backward(ctx, dO)
        return dQ, dK / d**-0.5, dV, None


# gradcheck would say that they are not float64
warnings.filterwarnings("ignore", message="Input #")
h, tolerance = (0.1, 5e-2) if device == "cuda" else (1e-2, 1e-3)
# two queries, two keys
small = [normal(1, 1, 2, d, seed=n).float().requires_grad_() for n in range(3)]
for function in (Attention, Forgetful):
    try:
        torch.autograd.gradcheck(function.apply, (*small, True), eps=h, atol=tolerance, rtol=1e-2)
        print(f"{function.__name__}: right")
    except RuntimeError as wrong:
        print(f"{function.__name__}: {str(wrong).splitlines()[0]}")

# %% [markdown]
# `gradcheck` finds the mistake and names the input, number 1, which is K.
#
# With correct gradients, a model can learn. A tiny task that needs attention is to reverse a text, which means that row
# i of the output should be the token at position N − 1 − i. The values are the tokens themselves, so each row only has
# to find the right one. For this reason, the model learns only Q and K, which have one row for every position. At the
# beginning, each row spreads its weight over several tokens, but after some steps, it attends to only one of them.

# %% tags=["nbval-ignore-output"]
N = 16
draw = torch.Generator().manual_seed(0)
Q, K = (torch.nn.Parameter(torch.randn(1, 1, N, d, generator=draw).to(device)) for _ in "QK")
optimizer = torch.optim.Adam([Q, K], lr=0.1)


# (N,) tokens from 0 to 15; (N, 16), how likely each token is at each position of the output
def read(text):
    V = torch.nn.functional.one_hot(text, 16).float().to(device)
    return Attention.apply(Q, K, V[None, None], False)[0, 0]


for step in range(21):
    text = torch.randint(16, (N,), generator=draw)
    right = read(text).cpu().gather(1, text.flip(0)[:, None])  # what the right tokens got
    loss = -right.clamp(min=1e-6).log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:2}: loss {loss.item():.3f}")
print("text   ", *text.tolist())
print("reads  ", *read(text).argmax(1).tolist())

# %% [markdown]
# The loss falls to nearly zero, and the last line is the text backwards. All gradients came from `bwd_dkdv`, which is
# rung b01's version of your column kernel, and from `bwd_dq`.

# %% [markdown]
# ## Recap
#
# - The backward pass consists of three kernels, which compute D by rows, dK and dV by columns, and dQ by rows. The
#   package's Triton version has only two kernels. Its row kernel runs first, computes D and dQ, and stores D for the
#   column kernel.
# - $P = e^{S-L}$ needs no later rescaling. It does need a mask for keys that do not exist and for keys that are hidden.
# - With plain additions, line 15 can lose parts of the sum. Atomic additions keep all parts but not their order, so
#   runs differ. A second pass keeps both, but costs two more matmuls per tile.
# - dk and dv alone take about half of a thread's registers.
# - `autograd.Function` joins a forward and a backward kernel, and `gradcheck` tests them against finite differences.

# %% [markdown]
# ## Checks
#
# The cell below compares this notebook's functions with those of rungs b00 and b01, and the rungs' results with the
# dense result in float64.

# %% tags=["hide-input"]
verdict("the runs differ in more than three quarters of the numbers",
        min((x != runs[0]).mean() for x in runs[1:]) > 0.75)
ratio = max(bounds["b00_atomics"]) / max(bounds["b01_two_passes"])
verdict("the bounds: 1.41 times as long; the tensor cores would put one pass first",
        round(ratio, 2) == 1.41
        and bounds["b00_atomics"][0] < bounds["b01_two_passes"][0])
# dQ in only
stored = replace(one, requested_bytes=one.requested_bytes - dQ_moved // 2).seconds(chips.H200)["L2"]
verdict("with 8 bytes instead of 12, L2 would need 1.85 ms", round(1e3 * stored, 2) == 1.85)
verdict("2.7 and 2.6 times the bounds",
        [round(times[x][0] / max(bounds[x]), 1) for x in bounds] == [2.7, 2.6])
spilled, doubled = ([kernels[1].numbers[what] for kernels in launches]
                    for what in ("spills", "exponential"))
verdict("b01 with 8 warps: fewer spills, and as many exponentials of a thread as with 4",
        spilled[0] > spilled[1] and doubled[0] == doubled[1])
fit = [blocks_per_sm(chips.H200, *(x.numbers[n] for n in ("shared", "registers", "warps")))
       for x in (single, columns)]
verdict("b00: one program on an SM and 28 waits; b01: two programs, and 2 waits in each kernel",
        fit == [1, 2]
        and [loops(x.stages["sass"])[-1].waits for x in (single, columns, rows)] == [28, 2, 2]
        and rows.numbers["spills"] == 0)
verdict("the small model reads the text backwards",
        read(text).argmax(1).tolist() == text.flip(0).tolist())
for mine in (p_and_ds, D_kernel, bwd_dq):
    verdict(f"{mine.fn.__name__} here = b01's", same_code(mine, getattr(b01, mine.fn.__name__)))
verdict("add_rows here = b00's", same_code(add_rows, b00.add_rows))
Q, K, V, dO, O, L, D = inputs_of(34, 17, True)
want = truth(Q, K, V, O, L, dO, True)
for rung, name in ((b00, "b00"), (b01, "b01")):
    three = rung.backward(*(x[None, None] for x in (Q, K, V, O, L, dO)), True)
    right = all(close(host(a)[0, 0], b, 3e-3) for a, b in zip(three, want, strict=True))
    verdict(f"{name} = the dense result, causal, with rows that see no key", right)

# %% [markdown] tags=["navigation"]
# [← The Triton forward kernel](08_triton_forward.ipynb) · [The map](00_start.ipynb) · [The ladder, measured →](10_ladder.ipynb)
