# %% [markdown] tags=["navigation"]
# [← The Triton forward kernel](08_triton_forward.ipynb) · [The map](00_start.ipynb) · [The ladder, measured →](10_ladder.ipynb)

# %% [markdown]
# # 09 · The Triton backward kernels
#
# **How do many blocks add into one dQ?**
#
# Notebook 05 ended with two ways to sum dQ: atomic adds, or a pass of its own. As NumPy the difference was a question of
# taste. On a GPU, where thousands of programs run in no particular order, it decides whether a training run can be
# repeated bit for bit. Here both become kernels, built from the pieces of notebook 08.
#
# After this notebook you can
#
# - write Algorithm 2 as three small kernels, and say why one of them computes its tiles turned around,
# - tell what goes wrong, and when, if line 15 is a plain addition; and show that two passes give the same bits every time,
# - follow a gradient through shared key heads and through L, and judge whether it is as good as it can be.
#
# *Time: 40 minutes. Hardware: any Linux machine; compiled with an NVIDIA GPU, in Triton's interpreter without. Before this:
# [05 · The backward pass](05_backward.ipynb) and [08 · The Triton forward kernel](08_triton_forward.ipynb).*

# %%
import math

import numpy as np
import torch

from fa2_lab.attention import attention
from fa2_lab.errata import ERRATA, judge
from fa2_lab.kernels.portable import backward as packaged
from fa2_lab.kernels.portable.tile import keys_seen, load_rows, store_rows
from fa2_lab.kernels.prepared import Options
from fa2_lab.machine import grid
from fa2_lab.plots import backward_graph, dq_over_time
from fa2_lab.plots.show import show
from fa2_lab.reference import heads
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Tiling, cdiv

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# Triton is loaded after the package, as in notebook 08. `load_rows` and `store_rows` are notebook 08's, from the package, with two
# more arguments: whether rows may be missing, and whether to widen to fp32.

# %% tags=["nbval-ignore-output"]
import triton
import triton.language as tl

_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))  # if interpreted, the package says so once

# %%
def normal(*shape, seed=0, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, dtype)


def host(x):  # to NumPy, for comparing
    return x.detach().double().cpu().numpy() if torch.is_tensor(x) else x


def agree(results, wanted, tolerance=1e-5):
    return [close(host(a), host(b), tolerance) for a, b in zip(results, wanted, strict=True)]

# %% [markdown]
# ## What is left when the forward is over?
#
# PyTorch calls our backward long after the forward, and hands it what the forward has asked it to keep. A hook can
# listen in.
#
# **Predict.** 128 queries and keys, d = 64, one head. Name the tensors that plain PyTorch keeps for softmax(τ Q Kᵀ) V, and those
# that `attention()` keeps. Which of them grows with N²?

# %%
def dense(q, k, v):
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.mT, dim=-1) @ v


def kept(function, *inputs):
    found = {}
    def note(x):
        found[x.data_ptr(), x.numel()] = tuple(x.shape)  # each piece of memory once
        return x
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        function(*inputs)
    return sorted(found.values(), key=math.prod)


q, k, v = (normal(1, 1, 128, 64, seed=s).requires_grad_() for s in range(3))
for name, function in (("plain PyTorch", dense), ("attention()", attention)):
    print(f"{name:14} keeps", *kept(function, q, k, v))

# %% [markdown]
# <details><summary>Whose shapes are these?</summary>
#
# Plain PyTorch: K turned around, τQ, V, and P, which is (128, 128). `attention()`: L, one number for each row, and Q, K,
# V and O, which belong to the caller and exist anyway. At N = 8,192 P has 67 million entries for every head, and L 8,192.
# </details>
#
# **Takeaway.** The forward leaves Q, K, V, O and L; of these, only L is extra memory.

# %% [markdown]
# ## D, once for each row
#
# The smallest kernel first: D_i = rowsum(dO_i ∘ O_i), line 4. (The paper gives D one number for each of d columns; with
# N ≠ d that does not even fit: `fa2-lab errata fa2-D-shape` runs it.)
#
# **Predict.** If there were no such kernel and every tile computed the D of its rows, which tensor would have to be
# loaded for each tile, and how many times would each D_i be computed?

# %%
@triton.jit
def D_kernel(O, dO, D, N_q, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr):
    i = tl.program_id(0) * B_r
    o_i = load_rows(O, i, d, N_q, B_r, d, d_pad, True, True)  # (B_r, d) in fp32
    do_i = load_rows(dO, i, d, N_q, B_r, d, d_pad, True, True)
    row = i + tl.arange(0, B_r)
    tl.store(D + row, tl.sum(do_i * o_i, 1), mask=row < N_q)  # FA2.A2.L4


N_q, N_k, d = 40, 56, 20
tau = d**-0.5
Q, K, V, dO = normal(N_q, d), normal(N_k, d, seed=1), normal(N_k, d, seed=2), normal(N_q, d, seed=3)
O, L = (x[0, 0] for x in attention(Q[None, None], K[None, None], V[None, None], return_lse=True))
D = torch.full_like(L, torch.nan)
D_kernel[(triton.cdiv(N_q, 16),)](O, dO, D, N_q, d=d, d_pad=32, B_r=16)
S = tau * Q @ K.T
P, dP = torch.softmax(S, 1), dO @ V.T
print("D = rowsum(P ∘ dP):", close(host(D), host((P * dP).sum(1)), 1e-5))

# %% [markdown]
# <details><summary>O, T_c times</summary>
#
# O would have to come in for every tile, and each D_i would be computed T_c times, as in FA1. Here O is read once, and
# 4 bytes for each row are written. O and dO are widened to fp32 before they are multiplied: D is subtracted from every dP
# of a row, and a rounding error in it is an error of the whole row.
# </details>
#
# **Takeaway.** What belongs to a row and is needed by every column block is computed once, by a kernel of its own.

# %% [markdown]
# ## P again, and a score that is not there
#
# P = exp(S − L) in one step, no maximum, no sum. No maximum, because L is at least as large as every score of its
# row: the exponent cannot be positive.
#
# **Predict.** It cannot be positive for a key. 10 keys in a block of 16, all scores −200: what is L, about? What
# is exp(0 − L) in fp32, where there is no key and the score is left at zero? And what becomes of dQ, which multiplies
# by a key loaded as zeros?

# %%
INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def probabilities(a, b, L_i, visible, tau, hidden):  # (A, d), (B, d): P of one tile, or turned around
    s = tl.dot(a, b.T, input_precision="ieee") * (tau * LOG2E)  # FA2.A2.L10
    s = tl.where(visible, s, hidden)
    return tl.exp2(s - tl.where(L_i == -INF, INF, L_i) * LOG2E)  # FA2.A2.L11


@triton.jit
def one_tile_kernel(Q, K, L, P, N_k, tau, hidden, d: tl.constexpr, B: tl.constexpr):
    q, k = load_rows(Q, 0, d, B, B, d, d, True, False), load_rows(K, 0, d, N_k, B, d, d, True, False)
    col = tl.arange(0, B)
    p = probabilities(q, k, tl.load(L + tl.arange(0, B))[:, None], (col < N_k)[None, :], tau, hidden)
    tl.store(P + tl.arange(0, B)[:, None] * B + col[None, :], p)

# %%
q = torch.ones(16, 16, device=device)
k = -50 * torch.ones(10, 16, device=device)  # scores 0.25 · 16 · (−50) = −200
L_16 = torch.logsumexp(0.25 * q @ k.T, dim=1)
for hidden in (0.0, -torch.inf):
    P_16 = torch.full((16, 16), torch.nan, device=device)
    with np.errstate(over="ignore"):  # the interpreter warns, a GPU does not
        one_tile_kernel[(1,)](q, k, L_16, P_16, 10, 0.25, hidden, d=16, B=16)
    at_a_key, elsewhere = P_16[0, 0].item(), P_16[0, 10].item()
    print(f"P at a key: {at_a_key:.2f}   where none is: {elsewhere}   times zero: {elsewhere * 0}")

# %% [markdown]
# <details><summary>Worse than in the forward</summary>
#
# L = −200 + ln 10, about −198. exp(198) is infinite in fp32, and ∞ · 0 is NaN: the whole row of dQ is lost. In the
# forward a forgotten mask made the output a bit too small; here it is harmless for small scores and poison for others.
# The first FlashAttention-2 had such NaNs in dQ:
# [flash-attention #334](https://github.com/Dao-AILab/flash-attention/issues/334).
#
# Rows have the same question. A row that does not exist, or sees no key, must have P = 0 everywhere. L = +∞
# does that, since exp(s − ∞) = 0: `other=INF` when L is loaded, and −∞ (a row without keys) is turned into +∞.
# </details>
#
# **Takeaway.** exp(S − L) needs no maximum where a key is, and needs the mask all the more where none is.

# %% [markdown]
# ## One program for each column block
#
# Lines 5 to 18. k_j and v_j are loaded once, dk_j and dv_j stay on chip, rows stream past. Before you read it, look at
# the five products once more.

# %%
show(backward_graph.draw(**backward_graph.data()))

# %% [markdown]
# **Predict.** dV = Pᵀ dO and dK = dSᵀ Q want P and dS turned around, dQ = dS K does not. Turning a tile around on chip costs
# time. In which orientation would you compute S, and how many tiles does the kernel below still have to turn?

# %%
@triton.jit
def columns_kernel(Q, K, V, dO, L, D, dQ, dK, dV, N_q, N_k, tau, CAUSAL: tl.constexpr,
                   ATOMIC: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr,
                   B_r: tl.constexpr, B_c: tl.constexpr):
    j = tl.program_id(0) * B_c  # FA2.A2.L5
    col = j + tl.arange(0, B_c)
    k_j = load_rows(K, j, d, N_k, B_c, d, d_pad, True, False)  # FA2.A2.L6
    v_j = load_rows(V, j, d, N_k, B_c, d, d_pad, True, False)  # FA2.A2.L6
    dk_j = tl.zeros((B_c, d_pad), tl.float32)  # FA2.A2.L7
    dv_j = dk_j  # FA2.A2.L7
    first = tl.maximum(j + N_q - N_k, 0) // B_r * B_r if CAUSAL else 0  # rows above do not see j
    for i in range(first, N_q, B_r):  # FA2.A2.L8
        row = i + tl.arange(0, B_r)
        q_i, do_i, L_i, D_i = rows_of(Q, dO, L, D, i, N_q, d, d_pad, B_r)  # FA2.A2.L9
        visible = col[:, None] < keys_seen(row, N_q, N_k, N_k, CAUSAL)[None, :]
        p_ji = probabilities(k_j, q_i, L_i[None, :], visible, tau, -INF)  # (B_c, B_r)
        dv_j = tl.dot(p_ji.to(do_i.dtype), do_i, dv_j, input_precision="ieee")  # FA2.A2.L12
        dp_ji = tl.dot(v_j, do_i.T, input_precision="ieee")  # FA2.A2.L13
        ds_ji = (p_ji * (dp_ji - D_i[None, :])).to(q_i.dtype)  # FA2.A2.L14
        dk_j = tl.dot(ds_ji, q_i, dk_j, input_precision="ieee")  # FA2.A2.L16
        if dQ is not None:
            dq_i = tl.dot(ds_ji.T, k_j, input_precision="ieee") * tau
            add_rows(dQ, dq_i, i, N_q, ATOMIC, d, d_pad, B_r)  # FA2.A2.L15
    store_rows(dK, dk_j * tau, j, d, N_k, B_c, d, d_pad)  # FA2.A2.L18
    store_rows(dV, dv_j, j, d, N_k, B_c, d, d_pad)  # FA2.A2.L18

# %%
@triton.jit
def rows_of(Q, dO, L, D, i, N_q, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr):
    row = i + tl.arange(0, B_r)
    q_i = load_rows(Q, i, d, N_q, B_r, d, d_pad, True, False)
    do_i = load_rows(dO, i, d, N_q, B_r, d, d_pad, True, False)
    L_i = tl.load(L + row, mask=row < N_q, other=INF)
    D_i = tl.load(D + row, mask=row < N_q, other=0.0)
    return q_i, do_i, L_i, D_i


@triton.jit
def add_rows(dQ, dq_i, i, N_q, ATOMIC: tl.constexpr,
             d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr):
    row, c = i + tl.arange(0, B_r), tl.arange(0, d_pad)
    at, real = dQ + row[:, None] * d + c[None, :], (row < N_q)[:, None] & (c < d)[None, :]
    if ATOMIC:
        tl.atomic_add(at, dq_i, mask=real, sem="relaxed")
    else:
        tl.store(at, tl.load(at, mask=real, other=0.0) + dq_i, mask=real)  # load, add, store

# %%
def by_columns(Q, K, V, dO, L, D, dQ=None, causal=False, atomic=True, B=16):
    dK, dV = torch.full_like(K, torch.nan), torch.full_like(V, torch.nan)
    (N_q, d), N_k = Q.shape, len(K)
    columns_kernel[(triton.cdiv(N_k, B),)](
        Q, K, V, dO, L, D, dQ, dK, dV, N_q, N_k, d**-0.5, CAUSAL=causal, ATOMIC=atomic, d=d,
        d_pad=max(16, triton.next_power_of_2(d)), B_r=B, B_c=B)
    return dK, dV


def truth(Q, K, V, O, L, dO, causal=False):  # float64, P written out in full
    five = (host(x)[None, None] for x in (Q, K, V, O, L, dO))
    return [x[0, 0] for x in heads.backward(*five, stage="naive", causal=causal)]


dQ, dK, dV = truth(Q, K, V, O, L, dO)
print("dK and dV, without line 15:", agree(by_columns(Q, K, V, dO, L, D), (dK, dV)))
print("dK with tau told apart from dK without:", judge(ERRATA["fa2-scale"]).told_apart)

# %% [markdown]
# <details><summary>One of three</summary>
#
# Computed as K Qᵀ, the tile comes out turned around already, with keys down and rows right: `p_ji`, `ds_ji`. So dV and dK
# are plain products, and only dQ has to turn its tile (`ds_ji.T`). The other way round it would be two. `v_j` and `do_i` change places
# for the same reason. The names say it: `ji` in place of the paper's `ij`.
#
# `if dQ is not None` is settled when the kernel is compiled. Given None, line 15 does not exist.
# </details>
#
# **Takeaway.** A column program keeps k, v, dk and dv; with its tiles turned around, dV and dK come without a transpose.

# %% [markdown]
# ## Line 15, taken literally
#
# Load dQ_i, add to it, write it back: so says the paper. `add_rows` can do that, and it can do the three steps as one,
# `tl.atomic_add`.
#
# **Predict.** 128 queries, 128 keys, blocks of 32: four programs add into each block of dQ. Which version is right in the
# interpreter, where programs run one after the other? Which on a GPU? And does the atomic version give the same bits twice?

# %%
def with_dQ(atomic):
    dQ = torch.zeros_like(many[0])  # FA2.A2.L3
    by_columns(*many, lse, D_many, dQ, atomic=atomic, B=32)
    return dQ


many = [normal(128, 64, seed=s) for s in range(4)]  # Q, K, V, dO
o, lse = (x[0, 0] for x in attention(*(x[None, None] for x in many[:3]), return_lse=True))
D_many = (many[3] * o).sum(1)
right = truth(*many[:3], o, lse, many[3])[0]
print("dQ by atomic adds:", close(host(with_dQ(atomic=True)), right, 1e-5))

# %% tags=["nbval-ignore-output"]
print(torch.cuda.get_device_name() if device == "cuda" else "interpreter: one program after the other")
plain = [with_dQ(atomic=False) for _ in range(5)]
print("dQ by load, add, store is right:", [close(host(x), right, 1e-5) for x in plain])
atomic = [with_dQ(atomic=True) for _ in range(5)]
different = len({host(x).tobytes() for x in atomic})
print("different results, bit for bit, of five runs with atomic adds:", different)

# %% [markdown]
# <details><summary>Two machines, two answers</summary>
#
# In the interpreter both versions are right, and every run has the same bits: one program ends before the next begins. That
# proves nothing about a GPU. There the four programs start together, at the same rows, and with load, add, store parts
# get lost. The atomic version is right on both, but on a GPU the parts arrive in another order in each run, and sums in
# fp32 depend on the order in their last bits. On an H200 this cell found all five plain results wrong, and hardly two of
# the five atomic ones the same.
#
# So a race cannot be found by running a kernel in the interpreter. It has to be found by looking: which address do two programs write?
# </details>
#
# **Takeaway.** Atomic adds make line 15 right. They do not make it repeatable.

# %% [markdown]
# ## A second pass, laid out like the forward
#
# dQ_i is a sum over the keys, so give it to a program that owns row block i, as in notebook 08.
#
# **Predict.** Compare with notebook 08's `visit`. What is loaded once, what streams, what stays on chip? Which lines of the
# online softmax are gone, and why?

# %%
@triton.jit
def rows_kernel(Q, K, V, dO, L, D, dQ, N_q, N_k, tau, CAUSAL: tl.constexpr,
                d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    i = tl.program_id(0) * B_r
    q_i, do_i, L_i, D_i = rows_of(Q, dO, L, D, i, N_q, d, d_pad, B_r)
    seen = keys_seen(i + tl.arange(0, B_r), N_q, N_k, N_k, CAUSAL)  # (B_r,)
    last = keys_seen(tl.minimum(i + B_r, N_q) - 1, N_q, N_k, N_k, CAUSAL)
    dq_i = tl.zeros((B_r, d_pad), tl.float32)
    for j in range(0, last, B_c):
        k_j = load_rows(K, j, d, N_k, B_c, d, d_pad, True, False)
        v_j = load_rows(V, j, d, N_k, B_c, d, d_pad, True, False)
        visible = (j + tl.arange(0, B_c))[None, :] < seen[:, None]
        p_ij = probabilities(q_i, k_j, L_i[:, None], visible, tau, -INF)  # (B_r, B_c)
        ds_ij = p_ij * (tl.dot(do_i, v_j.T, input_precision="ieee") - D_i[:, None])
        dq_i = tl.dot(ds_ij.to(k_j.dtype), k_j, dq_i, input_precision="ieee")  # FA2.A2.L15
    store_rows(dQ, dq_i * tau, i, d, N_q, B_r, d, d_pad)

# %%
def by_rows(Q, K, V, dO, L, D, causal=False, B=16):
    dQ = torch.full_like(Q, torch.nan)
    (N_q, d), N_k = Q.shape, len(K)
    rows_kernel[(triton.cdiv(N_q, B),)](
        Q, K, V, dO, L, D, dQ, N_q, N_k, d**-0.5, CAUSAL=causal, d=d,
        d_pad=max(16, triton.next_power_of_2(d)), B_r=B, B_c=B)
    return dQ


print("dQ by a pass of its own:", close(host(by_rows(Q, K, V, dO, L, D)), dQ, 1e-5))
runs = [by_rows(*many, lse, D_many, B=32) for _ in range(5)]
print("five runs, the same to the last bit:", len({host(x).tobytes() for x in runs}) == 1)

# %% [markdown]
# <details><summary>What is gone</summary>
#
# q_i, do_i, L_i and D_i are loaded once, k and v stream, dq stays on chip. No m, no `l`, no α: L already holds the outcome of
# all that, so every p is final as soon as it is computed, and nothing has to be rescaled.
#
# Every number of dQ is written by one program, which adds its parts in the order of the keys, on every machine and in
# every run. The same is true of dK and dV in the other pass.
# </details>
#
# The picture has both ways on one clock, for the four programs of above, each on an SM of its own. A column program needs
# five products a tile, or four without line 15. A row program needs three.

# %% tags=["nbval-ignore-output"]
show(dq_over_time.draw(**dq_over_time.data()))

# %% [markdown]
# **Takeaway.** One writer for each number and one order for each sum: the same bits in every run, by construction.

# %% [markdown]
# ## What do two passes cost?
#
# Notebook 05 counted products: seven instead of five. But atomic adds are not free either.
#
# **Predict.** N = 8,192, d = 128, blocks of 128, one head. How many numbers are added atomically to dQ in all? dQ is then
# in fp32, whatever the inputs are: how many bytes of atomic traffic is that, and how many bytes does the second pass write?

# %%
whole = Tiling(8192, 8192, 128, 128)
adds = sum(len(writers) for writers in grid.dq_writers(whole)) * 128 * 128  # blocks of 128 × d
print(f"one pass:   5 products a tile, {adds * 4 / 2**20:4.0f} MiB added into dQ atomically")
print(f"two passes: 7 products a tile, {8192 * 128 * 2 / 2**20:4.0f} MiB of dQ written, in fp16")

# %% [markdown]
# <details><summary>The other costs of atomics</summary>
#
# 64 column blocks each add to all 8,192 · 128 numbers: 67 million atomic adds of 4 bytes. They meet in the L2
# cache, which keeps much of it away from HBM. Besides, dQ has to be set to zero before (line 3), and turned into fp16
# after (`dQ.to(Q.dtype)` in the package): two more trips through memory, and N · d · 4 bytes of extra memory in between.
#
# On the other side, with line 15 gone the column kernel needs fewer registers and no transposed tile, and the row kernel
# can use the forward's block sizes. Which of the two is faster depends on the chip and the kernel: the package's Triton
# kernels take two passes, its kernel for Hopper takes one (notebook 13).
# </details>
#
# **Takeaway.** 40% more products buy repeatable bits, no extra buffer, and two kernels that are easier to fit.

# %% [markdown]
# ## Query heads that share a key head
#
# dK of a key head is a sum over all query heads of its group. Again a shared sum, and again someone could add atomically.
#
# **Predict.** 4 query heads, 2 key heads, T_c = 4 column blocks. Give the columns to programs so that no two write the
# same dK. How many programs is that, and which rows does each go through? Could `by_columns` do it as it is?

# %%
q, do = (normal(1, 4, 60, 32, seed=s) for s in (0, 3))
k, v = (normal(1, 2, 64, 32, seed=s) for s in (1, 2))
o, lse = attention(q, k, v, return_lse=True)
want = heads.backward(*(host(x) for x in (q, k, v, o, lse, do)), stage="naive")
D_all = (do * o).sum(-1)
for g in range(2):  # query heads 2g and 2g + 1, one below the other: 120 rows
    Q_g, dO_g, L_g, D_g = (x[0, 2 * g : 2 * g + 2].flatten(0, 1) for x in (q, do, lse, D_all))
    dK_g, dV_g = by_columns(Q_g, k[0, g], v[0, g], dO_g, L_g, D_g)
    print(f"dK, dV of key head {g}:", agree((dK_g, dV_g), (want[1][0, g], want[2][0, g])))

# %%
inputs = [x.requires_grad_() for x in (q, k, v)]
attention(*inputs).backward(do)
print("dQ, dK, dV of attention():", agree([x.grad for x in inputs], want))

# %% [markdown]
# <details><summary>Eight programs</summary>
#
# One for each column block of each *key* head: 2 · 4. Each goes through the rows of query head 2g, then of query head 2g + 1,
# and keeps dk_j and dv_j on chip all the while. A key does not care which head a row comes from: as long as there is no causal
# mask, two heads of 60 rows are one head of 120. With a mask the row numbers must start anew with each head; the
# package's kernel counts that way, in one loop over `group` times the row blocks.
#
# The price: fewer and longer programs. In multi-query attention all query heads share one key head, and its T_c
# programs have to fill the chip.
# </details>
#
# **Takeaway.** Hand out the work by what is written, and shared sums need no meeting: column blocks of key heads, row
# blocks of query heads.

# %% [markdown]
# ## A gradient that comes in through L
#
# `attention(…, return_lse=True)` returns L too, and a loss may use it. Merging does: cut the keys in two, compute O and L
# for each part, merge as in notebook 02. Rings of GPUs do exactly this.
#
# **Predict.** Exercise 2 of notebook 05: with dL, the gradient of L, dS becomes P ∘ (dP − D + dL). Which of the three kernels
# has to change? What goes wrong if dL is thrown away?

# %%
def merged(q, k, v, parts=2, keep_gradient_of_L=True):
    halves = zip(k.chunk(parts, dim=2), v.chunk(parts, dim=2), strict=True)
    outputs, lses = zip(*(attention(q, *half, return_lse=True) for half in halves), strict=True)
    if not keep_gradient_of_L:
        lses = [lse.detach() for lse in lses]
    weights = torch.softmax(torch.stack(lses), dim=0)[..., None]  # of each part, by its L
    return (weights * torch.stack(outputs)).sum(0)


def gradients(function, **options):
    fresh = [x.detach().requires_grad_() for x in inputs]
    function(*fresh, **options).backward(do)
    return [x.grad for x in fresh]


at_once = gradients(attention)
print("merged output = attention over all keys:", agree([merged(*inputs)], [attention(*inputs)])[0])
for keep in (True, False):
    right = agree(gradients(merged, keep_gradient_of_L=keep), at_once)
    print(f"gradient of L kept: {keep!s:5}  dQ, dK, dV as without the cut: {right}")

# %% [markdown]
# And in the kernels of this notebook? The judge is PyTorch's own gradient of the dense formula in float64.

# %%
dL = normal(N_q, seed=4)
Q64, (K64, V64, dO64, dL64) = Q.double().requires_grad_(), (x.double() for x in (K, V, dO, dL))
S64 = tau * Q64 @ K64.T
loss = (dO64 * (torch.softmax(S64, 1) @ V64)).sum() + (dL64 * torch.logsumexp(S64, 1)).sum()
loss.backward()
print("dQ, handed D:     ", close(host(by_rows(Q, K, V, dO, L, D)), host(Q64.grad), 1e-5))
print("dQ, handed D − dL:", close(host(by_rows(Q, K, V, dO, L, D - dL)), host(Q64.grad), 1e-5))

# %% [markdown]
# <details><summary>One subtraction</summary>
#
# dS = P ∘ (dP − (D − dL)): the two large kernels stay as they are and are handed D − dL. The package's `D_kernel` takes dL
# off. (A row without keys gets 0, because its L is −∞ whatever its inputs are.)
#
# Thrown away, dV is still right, and the output is right, which is why this bug lives long. A library may return L and drop
# its gradient without a word, as in [flash-attention
# #1817](https://github.com/Dao-AILab/flash-attention/issues/1817). dQ and dK are wrong: the weights of the parts move with
# Q and K.
# </details>
#
# **Takeaway.** L's gradient costs one subtraction, in the smallest kernel; leaving it out shows in dQ and dK only.

# %% [markdown]
# ## How wrong may a gradient be?
#
# In fp16 no gradient is equal to the one in float64. Is an error of 0.0005 a bug or the best one can do? The most
# trusted test suites ask a fair judge: the plain computation in the same type.
#
# **Predict.** Plain PyTorch in fp16 rounds S, P, dP and dS to 16 bits. Our kernels keep all of these, and all sums, in fp32, and
# round P and dS only as factors of a product. Whose error should be larger?

# %%
def error(got, want):
    return float(np.linalg.norm(host(got) - want) / np.linalg.norm(want))


half = [normal(1, 2, 128, 64, seed=s, dtype=torch.float16) for s in range(4)]
q64, k64, v64, do64 = (host(x) for x in half)
o64, lse64 = heads.forward(q64, k64, v64, stage="naive")
exact = heads.backward(q64, k64, v64, o64, lse64, do64, stage="naive")
inputs, do = half[:3], half[3]
ours, plain = gradients(attention), gradients(dense)
for name, a, b, want in zip(("dQ", "dK", "dV"), ours, plain, exact, strict=True):
    small, fair = error(a, want) < 2e-3, error(a, want) <= 3 * error(b, want) + 1e-5
    print(f"{name}: error below 0.002: {small}, at most 3 times that of plain PyTorch in fp16: {fair}")

# %% [markdown]
# <details><summary>Why three times, if ours should be better?</summary>
#
# It usually is. The factor leaves room for what is not anybody's fault: another order of summation, another rounding
# of one factor. A real bug (a lost part, a forgotten scale, a mask off by one) is off by orders of magnitude, not by three.
# What such a test must never do is to compare a kernel with itself, or look only at shapes.
# </details>
#
# **Takeaway.** Judge against float64, and be as strict as the type allows: the plain computation in the same type is the
# yardstick.

# %% [markdown]
# ## Recap
#
# - Kept: Q, K, V, O, L. Three kernels: D by rows, dK and dV by columns, dQ by rows.
# - P = exp(S − L) is final at once; L = +∞ makes rows vanish, −∞ makes keys vanish.
# - The column kernel computes its tiles turned around, so dV and dK need no transpose.
# - Line 15 between programs: plain addition loses parts, atomic addition loses the order, a second pass loses neither and
#   costs two products.
# - Groups: a program for each column block of each key head, which goes through the query heads.
# - dL is taken off D.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** Causal, 64 queries and 128 keys, blocks of 16. At which row does the program of column block 0
# begin, and that of the last column block? Which of the eight column programs has the most to do?
#
# <details><summary>Hint</summary>
#
# Row r sees r + 1 + 128 − 64 keys. `first` is in `columns_kernel`.
# </details>

# %%
print("first row of each column block:", [max(j + 64 - 128, 0) // 16 * 16 for j in range(0, 128, 16)])

# %% [markdown]
# <details><summary>Answer</summary>
#
# Row 0 sees 65 keys, so column blocks 0 to 4 begin at row 0 (block 4 holds column 64, which row 0 just sees). Then 16,
# 32, 48. The first five have four row blocks each, the last has one. Columns come in order of decreasing work by themselves, so
# the backward needs no reversed order as the forward does.
# </details>
#
# **2. Complete.** Sum dQ without atomics and without a second pass over S: let column program j write its part
# to a place of its own, dQ_parts[j], and add the parts at the end, always in the same order. The cell holds a solution for
# `by_columns`, one call for each column block. What does it cost in memory at N = 8,192, d = 128, blocks of 128?
#
# <details><summary>Hint</summary>
# There are T_c parts, each as large as dQ.
# </details>

# %%
parts = []
for j in range(0, N_k, 16):
    parts.append(torch.zeros_like(Q))
    by_columns(Q, K[j : j + 16], V[j : j + 16], dO, L, D, parts[-1])
print("sum of the parts:", close(host(sum(parts)), dQ, 1e-5))
MiB = 2**20
of_dQ = 8192 * 128
print("memory for the parts:", cdiv(8192, 128) * of_dQ * 4 // MiB, "MiB a head; for dQ:", of_dQ * 2 // MiB)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The kernel does not ask whose keys it was given: with L and D of the whole row, each slice of the keys is a job of its
# own. That is also what a ring of GPUs does. The price is a T_c-fold dQ in fp32, 256 MiB for each head here: it repeats
# bit for bit, and it brings the quadratic memory back.
# </details>
#
# **3. Break and fix.** Someone saves the extra kernel and passes D = 0. Before you run it: which of dQ, dK, dV is
# still right? For which V would all three be? Then repair it with one line of PyTorch, without a kernel.
#
# <details><summary>Hint</summary>
# Where does D appear in the algorithm? And for exercise 1 of notebook 05, what was D?
# </details>

# %%
nothing = torch.zeros_like(D)
dK_0, dV_0 = by_columns(Q, K, V, dO, L, nothing)
dQ_0 = by_rows(Q, K, V, dO, L, nothing)
print("dQ, dK, dV right with D = 0:", agree((dQ_0, dK_0, dV_0), (dQ, dK, dV)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# dV = Pᵀ dO does not use D; dQ and dK do. D_i = do_i · o_i is zero for all rows if the output is orthogonal to its
# gradient, as for V = 0. A test that uses zeros or a symmetric toy input may well pass.
#
# `D = (dO * O).sum(1)` repairs it. In fp16 it would have to be `(dO.float() * O.float()).sum(1)`, with two copies in fp32
# on the way, and that is what the kernel saves.
# </details>

# %% [markdown]
# ## Checks
#
# This notebook's kernels against the package's, in both ways; the package against the dense result in float64, and
# the package against itself, bit for bit.

# %%
def package(causal, **options):
    qkv = [x[None, None] for x in (Q, K, V)]
    o, lse = attention(*qkv, causal=causal, return_lse=True)
    found = packaged.backward(dO[None, None], *qkv, o, lse, Options(causal, tau), **options)
    return o[0, 0], lse[0, 0], [x[0, 0] for x in found]


for causal in (False, True):
    o, lse, two_passes = package(causal, two_passes=True)
    atomics = package(causal, two_passes=False)[2]
    D_kernel[(triton.cdiv(N_q, 16),)](o, dO, D, N_q, d=d, d_pad=32, B_r=16)
    mine = Q, K, V, dO, lse, D
    both = [by_rows(*mine, causal=causal), *by_columns(*mine, causal=causal)]
    verdict(f"by_rows and by_columns = the package, causal = {causal}", all(agree(both, two_passes)))
    summed = torch.zeros_like(Q)
    columns = by_columns(*mine, summed, causal=causal)
    verdict("the same with dQ added atomically", all(agree([summed, *columns], atomics)))
    want = truth(Q, K, V, o, lse, dO, causal)
    right = agree([*two_passes, *atomics], [*want, *want])
    verdict("both ways of the package = the dense result", all(right))
inputs, do = [x[None, None] for x in (Q, K, V)], dO[None, None]
right = agree(gradients(merged), gradients(attention))
verdict("keys cut in two and merged by L: the same gradients", all(right))

# %%
cases = {  # (heads, key heads, N_q, N_k, d, size of the scores, type, tolerance)
    "one key": (1, 1, 1, 1, 4, 1, torch.float32, 1e-5),
    "ragged, grouped heads": (4, 2, 40, 50, 20, 1, torch.float32, 1e-5),
    "rows without keys": (2, 1, 50, 33, 20, 1, torch.float32, 1e-5),
    "huge scores": (1, 1, 70, 70, 16, 300, torch.float32, 1e-2),
    "fp16, d = 64": (1, 1, 100, 100, 64, 1, torch.float16, 3e-3),
}
for name, (H, H_kv, N_q, N_k, d, size, dtype, tolerance) in cases.items():
    q, do = (size * normal(1, H, N_q, d)).to(dtype), normal(1, H, N_q, d, seed=3, dtype=dtype)
    inputs = [q, *(normal(1, H_kv, N_k, d, seed=s, dtype=dtype) for s in (1, 2))]
    three = [host(x) for x in inputs]
    for causal in (False, True):
        forward = heads.forward(*three, stage="naive", causal=causal)
        want = heads.backward(*three, *forward, host(do), stage="naive", causal=causal)
        got = gradients(attention, causal=causal)
        right = agree(got, want, tolerance)
        verdict(f"gradients = the dense result: {name}, causal = {causal}", all(right))
again = gradients(attention, causal=True)
verdict("the same gradients a second time, bit for bit", all(map(torch.equal, got, again)))

# %% [markdown] tags=["navigation"]
# [← The Triton forward kernel](08_triton_forward.ipynb) · [The map](00_start.ipynb) · [The ladder, measured →](10_ladder.ipynb)
