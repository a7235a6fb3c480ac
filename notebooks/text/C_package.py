# %% [markdown] tags=["navigation"]
# [← Errata](B_errata.ipynb) · [The map](00_start.ipynb) · [Numbers →](D_numbers.ipynb)

# %% [markdown]
# # C · The package and its commands
#
# **What is in the package, and how do I use it for my own work?**
#
# The chapters are built on a package, `fa2_lab`. You can read the book without knowing the package, but you can do more
# with the package than the chapters show. This appendix explains how. If you have read chapters 07 to 11, you already
# know some of its commands, such as `xray` and `ladder`.
#
# After this notebook you can
#
# - find the file that answers a question, and the code for any line of the papers,
# - count what your own algorithm loads, stores and computes,
# - call `fa2_lab.attention`, judge its results, and switch a model over to it.
#
# *Time: 30 minutes. Hardware: any laptop; one cell needs PyTorch and Triton, and it tells you if they are missing.
# Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
from importlib.util import find_spec

import numpy as np

from fa2_lab.examine import CATALOGUE, all_cases, examine
from fa2_lab.machine import io_model
from fa2_lab.paper import PACKAGE, where
from fa2_lab.records import load
from fa2_lab.reference import fa2, naive
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_lab.trace import UNWATCHED, Trace
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Where is what?
#
# | in `fa2_lab/` | contents |
# |---|---|
# | `tiles.py`, `trace.py` | the geometry of tiles, and the meter |
# | `paper.py`, `glossary.py`, `records.py` | the papers' algorithms and the glossary as data, and the recorded measurements |
# | `reference/` | NumPy in float64, with one file for each stage: `naive`, `online_softmax`, `fa1`, `fa2` |
# | `kernels/` | Triton and Gluon (Triton's lower-level language, chapter 12a); read the kernels in `ladder/`, and call the others |
# | `api/`, `transformers.py`, `distributed/` | the public calls |
# | `examine/` | the known mistakes of attention, and the tests that tell which of them a function makes |
# | `machine/`, `errata/` | models of a GPU, and runnable versions of the papers' mistakes |
# | `plots/`, `tools/` | the figures, and the commands |
#
# `fa2_studio/` comes only with a clone of the repository. It contains the book, the bench, the course and the judges,
# which run other projects' tests on our kernels. The kernels import nothing from the reference, because a bug in
# shared code would affect both, and then no comparison would reveal it.
#
# ## Which code computes this line?
#
# Each line of the papers' algorithms has a tag that consists of the paper, the algorithm and the line. The code that
# computes the line carries the same tag as a comment. For example, line 10 of Algorithm 1 in the FlashAttention-2
# paper updates the output:

# %% tags=["nbval-ignore-output"]
print(where("FA2.A1.L10"))

# %% [markdown]
# In a terminal, the command is `fa2-lab where FA2.A1.L10`, and `fa2-lab where FA2.A1` prints the whole algorithm.
#
# ## How do I call attention?
#
# `fa2_lab.attention(q, k, v, causal=True)` takes PyTorch tensors of shape (batch, heads, N, d) and does nearly the
# same as PyTorch's `scaled_dot_product_attention`. On a GPU, it runs the fastest kernel that supports the call.
# Without a GPU, Triton runs the kernels in plain Python, in its *interpreter*. The results are right, but the
# interpreter is so slow that sizes must be small. `fa2-lab doctor` reports which kernels can run on this machine and
# why.
#
# One difference from PyTorch is the causal mask when there are fewer queries than keys. In the next cell, the 5
# queries belong to the last 5 of 40 tokens. Our function, like the kernels of FlashAttention's authors, lets the first
# of these queries see 36 keys, because 35 tokens come before it (chapter 04). PyTorch's `is_causal`, however, lets it
# see only one. People have often confused the two conventions
# ([pytorch/pytorch#108108](https://github.com/pytorch/pytorch/issues/108108),
# [ml-explore/mlx#2835](https://github.com/ml-explore/mlx/issues/2835)).

# %% tags=["nbval-ignore-output"]
if find_spec("torch") and find_spec("triton"):
    import torch

    import fa2_lab

    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 2, 5, 16), torch.randn(2, 1, 2, 40, 16)
    O, L = fa2_lab.attention(q, k, v, causal=True, return_lse=True)
    theirs = torch.nn.functional.scaled_dot_product_attention
    first = theirs(q[:, :, :1], k[:, :, :36], v[:, :, :36])[0, 0, 0, 0]
    print(f"first query: {O[0, 0, 0, 0]:.5f}, by torch over 36 keys {first:.5f}")
else:
    print("torch or Triton is missing here")

# %% [markdown]
# When is a result good enough? In 16 bits, no kernel agrees with float64 to the last digit. So measure how far
# PyTorch's result in the same precision is from float64, and compare our error with PyTorch's. The next cell does this
# without a mask:

# %% tags=["nbval-ignore-output"]
if find_spec("torch") and find_spec("triton"):
    half = [x.half() for x in (q, k, v)]
    exact = theirs(*(x.double() for x in half))
    ours, torchs = ((f(*half) - exact).abs().max() for f in (fa2_lab.attention, theirs))
    print(f"no mask, 16 bits: our error {ours:.1e}, torch's {torchs:.1e}")

# %% [markdown]
# Our error may be up to twice as large, and for gradients up to three times as large. FlashAttention's own tests use
# the same factors. The factor of 2 leaves room for a different order of sums ([appendix D](D_numbers.ipynb)), and a
# gradient passes through more roundings than O, so it gets a larger factor.
#
# `L` is the logsumexp of each row (chapter 01). [TROUBLESHOOTING.md](../TROUBLESHOOTING.md) lists the other
# differences from PyTorch. `attention_packed` takes sequences of different lengths without padding (chapter 16),
# `attention_paged` reads a cache in pages (chapter 14), and `fa2_lab.distributed` runs attention over several GPUs
# (chapter 15).
#
# ## What is wrong with my function?
#
# If an attention function is wrong, the size of the difference from a right result shows that something is wrong, but
# not what. `examine` has more than a hundred small problems, and runs the function on those that the function's
# arguments allow. (With `quick=True`, it skips the longest of them.) It compares the answers with those that more than
# 200 known mistakes would give, to within rounding errors. It reads from the names of the arguments what the function
# accepts, and it finds out the order of the axes by itself. The following loop over tiles of 16 keys has two bugs:

# %%
def mine(q, k, v, causal=False):  # (batch, heads, N, d)
    (N_q, d), N_k = q.shape[2:], k.shape[2]
    m, l, o = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3]), np.zeros_like(q)
    for j in range(0, N_k, 16):
        s = q @ k[:, :, j : j + 16].swapaxes(2, 3) / np.sqrt(d)
        if causal:
            s = np.where(np.arange(j, j + s.shape[3]) < np.arange(N_q)[:, None] + N_k - N_q, s,
                         -np.inf)
        m_new = np.maximum(m, s.max(axis=3))
        seen = np.where(np.isneginf(m_new), 0, m_new)
        p, alpha = np.exp(s - seen[..., None]), np.exp(m - seen)
        m, l, o = m_new, alpha * l + p.sum(axis=3), o + p @ v[:, :, j : j + 16]
    return o / np.where(l == 0, 1, l)[..., None]


report = examine(mine, quick=True)
for finding in report.findings:
    print(f"{finding}\n    {finding.where}; read {finding.mistake.reference}")

# %% [markdown]
# The report names both bugs. In the line after `p, alpha = …`, `o` has to be multiplied by `alpha[..., None]` before
# the new product is added. In the line after `if causal:`, `<` has to be `<=`.
#
# If this function is in a file `mine.py`, `fa2-lab examine mine.py:mine` prints the same report in a terminal. It also
# prints the smallest input that shows each mistake, as a program that you can run. The command works with functions
# written for NumPy, PyTorch, Triton or JAX, and it also checks their gradients and their memory.
#
# If no known mistake explains the numbers, `examine` calls the function with inputs that reveal what it computes. With
# the identity matrix as V, O contains the weights of the keys. With orthogonal rows in Q, K and dO, the gradients
# contain P and dS as the backward pass uses them, because dV = Pᵀ dO, dQ = τ dS K and dK = τ dSᵀ Q. The report then
# describes the difference, for example "dS is P ∘ (dP − D of the next row)" or "row i cannot see the last key". If
# nothing fits, it says that no known mistake gives these numbers, and where they are wrong.
#
# ## How do I count what my own algorithm moves?
#
# Write the algorithm in NumPy, with slices, and give it the meter from chapter 01. `trace.serial` and `trace.parallel`
# give each loop a name, here `i`, so that the printed events can show in which iteration they happened. The next cell
# computes the mean of all rows of a 10 × 3 matrix, in blocks of 4 rows, with a single sum on chip:

# %%
def row_mean(X, mean, B, trace):
    total = 0
    for i in trace.serial("i", range(0, len(X), B)):
        x_i = X[i : i + B]  # (B, d): loaded
        total = total + x_i.sum(axis=0)  # (d,): on chip
    mean[:] = total / len(X)  # stored


X = np.random.default_rng(0).standard_normal((10, 3))
meter = Trace()
row_mean(*meter.hbm(X=X, mean=np.empty(3)), B=4, trace=meter)
print("loaded:", meter.loads("X"), "stored:", meter.stores("mean"), dict(meter.flops))
for event in meter.events:
    print(f"  {event.op:5} {event.elements:2} of {event.tensor}, i = {event.i}")

# %% [markdown]
# The meter counts each operation on an element. Adding 10 rows of 3 elements to the total takes 30 additions, and
# dividing it takes 3 divisions. The same function also runs on plain arrays, with a trace that records nothing
# (`fa2_lab.trace.UNWATCHED`).
#
# ## How do I switch a model over?
#
# The models in Hugging Face's `transformers` choose their attention by name, and one import adds ours:
#
# ```python
# from transformers import AutoModelForCausalLM
#
# import fa2_lab.transformers  # pip install -e '.[transformers]'
#
# model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa2_lab")  # name of any such model
# ```
#
# Grouped-query attention, a cache, sinks and softcap all work, and so do the masks that [chapter 16](16_masks.ipynb)
# lists.

# %% [markdown]
# **Predict.** A small Llama is trained in fp32 with three implementations of attention, from the same weights and on
# the same batches. One of the three stores the N × N scores, and the others do not. What is the largest difference
# between their losses over 31 steps?
#
# - ☐ about 0.1, since small differences grow in training
# - ☐ about 0.001
# - ☐ below 0.0001
#
# <details><summary>Answer</summary>
#
# **below 0.0001.** All three compute the same function, but they add its terms in different orders. In our recorded
# run on a CPU, in fp32, this changes the seventh digit, and within 30 steps the change grows by a factor of ten to a
# hundred. On a GPU, the package's fp32 matmuls also keep all bits, as chapter 11 explains.
#
# ```python
# from fa2_studio.bench import models  # it needs torch
#
# print(models.table(load("models").curves))
# ```
#
# ```text
# loss after step        0      10      20      30   largest difference
# eager              5.545   3.911   3.462   3.389
# sdpa               5.545   3.911   3.462   3.389   4e-05
# fa2_lab            5.545   3.911   3.462   3.389   8e-06
# ```
# </details>
#
# In the output, `eager` is plain PyTorch, and `sdpa` is PyTorch's own attention function. `fa2-lab bench models`
# trains the model again.
#
# ## Which commands are there?
#
# `fa2-lab --help` lists all commands, and so does `python -m fa2_lab --help`. Try these three first: `fa2-lab
# glossary warp`, `fa2-lab ladder 05`, and `fa2-lab book --blank mine`, which writes the chapters into a folder
# without executing anything.
#
# ## Recap
#
# - A tag such as FA2.A1.L10 leads from the paper to the NumPy and Triton code. The kernels share no code with the
#   reference, so a comparison of the two is meaningful.
# - `fa2_lab.attention` follows PyTorch, with a few differences. `examine` names the mistakes of an attention
#   function, and `Trace` counts what any algorithm written with slices loads, stores and computes.

# %% [markdown]
# ## Exercises
#
# **Build.** Compute the softmax of one long row x, in blocks. A version with three passes finds the maximum in the
# first pass, computes the sum in the second, and writes the result in the third. The online softmax of chapter 02
# merges the first two passes into one. Write this version, which loads 2N elements in all. Each time `x[i : i + B]`
# is evaluated, it counts as a load, so keep the slice in a variable within one iteration of a loop.

# %%
def softmax(x, y, B):  # x and y are in HBM: read x[i : i + B], write y[i : i + B]
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def softmax_and_loads(x, B):
    watch, y = Trace(), np.full(len(x), np.nan)
    softmax(*watch.hbm(x=x, y=y), B)
    return None if np.isnan(y).all() else (y, watch.loads("x"))


softmax_and_loads.__name__ = "softmax"  # what the message calls it
row = np.log([1.0, 3, 4, 8, 2])
words = "five scores in blocks of 2. How often is each element loaded?"
check(softmax_and_loads, Case(words, (row, 2), (naive.safe_softmax(row[None])[0], 10)))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def softmax(x, y, B):
#     m, l = -np.inf, 0.0
#     for i in range(0, len(y), B):
#         x_i = x[i : i + B]
#         m_new = np.maximum(m, x_i.max())
#         m, l = m_new, l * np.exp(m - m_new) + np.exp(x_i - m_new).sum()
#     for i in range(0, len(y), B):
#         y[i : i + B] = np.exp(x[i : i + B] - m) / l
# ```
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
verdict("more than 100 problems, and more than 200 mistakes that show in numbers",
        100 < len(all_cases()) < 150
        and sum(x.part in ("O", "L", "gradients") for x in CATALOGUE.values()) > 200)
verdict("the examiner names both bugs",
        [x.name for x in report.findings] == ["o-not-rescaled", "causal-strict"])
verdict("row_mean loads and stores every element once",
        (meter.loads("X"), meter.stores("mean")) == (30, 3))
mean = np.empty(3)
row_mean(X, mean, B=4, trace=UNWATCHED)
verdict("row_mean computes the mean, with and without a meter", close(mean, X.mean(axis=0)))
watch, X = Trace(), np.random.default_rng(0).standard_normal((3, 64, 16))
O, L = fa2.forward(*X, B_r=16, B_c=8, mask=CAUSAL, trace=watch)
by_formula = io_model.fa2_forward(Tiling(64, 64, 16, 8, CAUSAL), 16).total
verdict("fa2's traffic agrees with the formula", watch.hbm_elements == by_formula)
folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
named = {"reference", "kernels", "api", "distributed", "examine", "machine", "errata"}
verdict("the table lists every folder", folders == named | {"plots", "tools"})

# %% [markdown] tags=["navigation"]
# [← Errata](B_errata.ipynb) · [The map](00_start.ipynb) · [Numbers →](D_numbers.ipynb)
