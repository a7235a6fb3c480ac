# %% [markdown] tags=["navigation"]
# [← The package and its commands](C_package.ipynb) · [The map](00_start.ipynb)

# %% [markdown]
# # D · Numbers
#
# **Which digits of a result can I trust?**
#
# Two correct kernels rarely return the same bits, while a wrong kernel can agree with a correct one to three digits.
# This appendix collects what determines the digits of attention, namely rounding, masks, scales and the order of
# sums. Every number here is computed in NumPy, where we round exactly what we want to round and keep everything else
# exact.
#
# After this notebook you can
#
# - decide whether the difference between two implementations is a bug or a rounding error,
# - explain when rounding errors add up instead of cancelling, and what prevents it,
# - choose a value for masked scores, and name what goes wrong with each alternative,
# - predict the errors caused by TF32, by FP8's scales and by a different order of sums.
#
# *Time: 75 minutes. Hardware: any laptop with NumPy. Before this: [05 · The backward pass](05_backward.ipynb),
# [08 · The Triton forward kernel](08_triton_forward.ipynb) and [14 · Decode](14_decode.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
from inspect import getsource

import numpy as np

from fa2_lab.examine.cases import rounded
from fa2_lab.machine import rounding
from fa2_lab.plots.show import show
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import verdict


def rms(x):  # root mean square
    return np.sqrt((x**2).mean())


# %% [markdown]
# The function `rounded(x, bits)` rounds each element of x to the nearest number with a mantissa of `bits` bits. As
# long as nothing overflows, this is all we need to imitate a format. bf16 has 8 bits, fp16 and TF32 have 11, and fp32
# has 24. The first of these bits is always 1, so it is not stored.

# %%
def bf16(x):
    return rounded(x, 8)


for name, bits in {"bf16": 8, "fp16, TF32": 11, "fp32": 24}.items():
    print(f"1/3 in {name:11}{rounded(1 / 3, bits):.10f}")

# %% [markdown]
# ## Is a kernel wrong if it differs from standard attention?
#
# We compare standard attention with the loop of chapter 04, both in bf16. Standard attention stores S and P in HBM,
# so it rounds both to bf16. The loop keeps S, m, $\ell$ and $o$ in fp32 registers, which we treat as exact here, and
# rounds only two things, namely P for the second matmul and O at the end.

# %%
def exact(Q, K, V):
    S = Q @ K.T / np.sqrt(Q.shape[1])
    E = np.exp(S - S.max(1, keepdims=True))
    return E / E.sum(1, keepdims=True) @ V


def standard(Q, K, V, r=bf16):  # r: rounds whatever is stored in HBM
    S = r(Q @ K.T / np.sqrt(Q.shape[1]))
    E = np.exp(S - S.max(1, keepdims=True))
    return r(r(E / E.sum(1, keepdims=True)) @ V)


def flash(Q, K, V, r=bf16, r_P=bf16, B_c=64):
    m, l, o = np.full((len(Q), 1), -np.inf), 0.0, 0.0
    for j in range(0, len(K), B_c):
        s = Q @ K[j : j + B_c].T / np.sqrt(Q.shape[1])
        m_new = np.maximum(m, s.max(1, keepdims=True))
        p, alpha, m = np.exp(s - m_new), np.exp(m - m_new), m_new
        l, o = alpha * l + p.sum(1, keepdims=True), alpha * o + r_P(p) @ V[j : j + B_c]
    return r(o / l)

# %% tags=["hide-input"]
Q, K, V = bf16(np.random.default_rng(0).standard_normal((3, 512, 64)))
truth, plain, ours = exact(Q, K, V), standard(Q, K, V), flash(Q, K, V)


def errors(O):
    return f"largest {abs(O - truth).max():.1e}, mean {abs(O - truth).mean():.1e}"

# %% [markdown]
# **Predict.** For 512 random rows, we compare the two outputs, `plain` (standard attention) and `ours` (the loop), with
# each other and with the exact result. What do we see?
#
# - ☐ they agree except in a few rows, so each confirms the other
# - ☐ they differ in most elements, and the loop is farther from the exact result, because it rescales
# - ☐ they differ in most elements, and the loop is closer to the exact result
#
# <details><summary>Answer</summary>
#
# **they differ in most elements, and the loop is closer to the exact result.** Most of the difference between the two
# is the error of standard attention, because it rounds S. So comparing the two with each other does not tell you
# which one is wrong.
#
# ```python
# most = abs(ours - plain).max()
# print(f"{(ours != plain).mean():.0%} of the numbers differ, by {most:.1e} at most")
# print("error of standard attention:", errors(plain))
# print("error of the loop:          ", errors(ours))
# ```
#
# ```text
# 64% of the numbers differ, by 3.9e-03 at most
# error of standard attention: largest 2.7e-03, mean 2.4e-04
# error of the loop:           largest 1.6e-03, mean 1.2e-04
# ```
# </details>
#
# A result that is not identical to standard attention's is therefore no sign of a bug, although such differences are
# the first thing that people report ([#145](https://github.com/Dao-AILab/flash-attention/issues/145),
# [#410](https://github.com/Dao-AILab/flash-attention/issues/410)). Tri Dao's answer in these threads became the rule
# in FlashAttention's tests. These tests compute the truth in fp32 or float64 from the same 16-bit inputs. Then they
# allow the kernel at most twice the largest error that standard attention makes in 16 bits. The factor of 2 leaves
# room for a different order of sums. Because standard attention sets the limit, you need not choose a tolerance for
# each shape and dtype.

# %% [markdown]
# ## What does it cost to round P to bf16?
#
# The loop rounds P to bf16, because the tensor cores take 16-bit operands. Even if P were exact, O would still be
# rounded once, when it is stored.
#
# **Predict.** By what factor does rounding P increase the root mean square error of O?
#
# - ☐ by less than one and a half
# - ☐ by about ten, since a row of O sums hundreds of rounded weights
# - ☐ it depends on N: the longer the row, the larger the factor
#
# <details><summary>Answer</summary>
#
# **by less than one and a half.** Each weight is off by at most one part in 256, upwards as often as downwards. O is a
# sum of N terms with random signs, and so is its error from P, so both of them grow like √N. The error from P, divided
# by O, is therefore the same for every N. It is about as large as one rounding error of bf16, and storing O costs one
# more of that size. Two independent errors of the same size add like the legs of a right triangle, which gives a factor
# of √2 = 1.41. With larger scores, a few keys have most of the weight, and the largest weight is exactly 1, so rounding
# P costs less.
#
# ```python
# for N in (64, 512, 4096):
#     for size in (1, 4):
#         q, k, v = bf16(np.random.default_rng(1).standard_normal((3, N, 64)))
#         q, want = size * q[:64], exact(size * q[:64], k, v)
#         one, both = (rms(flash(q, k, v, r_P=r) - want) for r in (np.asarray, bf16))
#         print(f"N = {N:5,}, scores of size {size}: {one:.1e}, with P in bf16 {both / one:.2f} times")
# ```
#
# ```text
# N =    64, scores of size 1: 3.2e-04, with P in bf16 1.27 times
# N =    64, scores of size 4: 1.1e-03, with P in bf16 1.05 times
# N =   512, scores of size 1: 1.1e-04, with P in bf16 1.34 times
# N =   512, scores of size 4: 9.3e-04, with P in bf16 1.05 times
# N = 4,096, scores of size 1: 4.1e-05, with P in bf16 1.38 times
# N = 4,096, scores of size 4: 7.7e-04, with P in bf16 1.04 times
# ```
# </details>

# %% [markdown]
# ## Can rounding errors add up in one direction?
#
# In training, errors that cancel do no harm, but errors of the same sign add up over tokens and steps. In 2025, Qiu
# and Yao studied a training run whose loss exploded and traced it to such an error ([arXiv
# 2510.04212](https://arxiv.org/abs/2510.04212)). The error only appears under three conditions, and our example below
# satisfies all of them:
#
# - Two scores of a row share the maximum, so two weights are exactly 1. They add the sum of two rows of V to P V, and
#   the elements of V are bf16 numbers.
# - All other weights are tiny, and one column of V has the same sign for nearly all keys. Here column 0 is negative.
# - The accumulators $o$ are rounded to bf16 *before* they are divided by $\ell$, as in the code that the authors
#   published.

# %%
print(getsource(rounding.rounded_outputs))
S, V_rows, dO = rounding.repeated_maxima()
m = S.max(1, keepdims=True)

# %% [markdown]
# The function `repeated_maxima` returns random rows of this kind, and `rounded_outputs`, printed above, shows the
# order of the roundings. What happens to one such row? In column 0, two values with weight 1 are added. A bf16 number
# has 8 bits, and the sum of two of them with equal exponents has at most 9 bits. So the sum is either a bf16 number
# itself, or exactly halfway between two of them. Here is one row of the second kind. Between 2 and 4, neighbouring
# bf16 numbers are 1/64 apart, so we also count in these steps:
#
# | | value | in steps of 1/64 | rounded to bf16 | error in steps |
# | --- | ---: | ---: | ---: | ---: |
# | two values, −1.5 and −1.0078125 | −2.5078125 | −160.5 | −160 | +½ |
# | and the other keys, which add −0.0001 | −2.5079125 | −160.5064 | −161 | almost −½ |
#
# The first line is a halfway case, which is rounded to the even neighbour. The even neighbour is the upper one as
# often as the lower one, so if there were no other keys, these errors would cancel. In the second line, however, the
# other keys push the sum a little away from the middle.
#
# **Predict.** In column 0, how are the rounding errors of $o$ distributed over the rows?
#
# - ☐ evenly, between −½ and ½ of a bf16 step
# - ☐ about half are 0, a quarter are ½, and a quarter are −½
# - ☐ about half are near 0, about half are near −½, and hardly any are near ½
#
# <details><summary>Answer</summary>
#
# **about half are near 0, about half are near −½, and hardly any are near ½.** About half of the sums are bf16 numbers
# themselves, and their error is near 0. The others are halfway cases. The tiny contribution of the other keys is
# negative in all rows, so it pushes every halfway case slightly below the middle, and all of them are rounded down,
# away from zero, as in the second line of the table. You can see this on the left of the next figure, in the filled
# bars. The small bars at ±¼ come from pairs with different exponents, whose sums have one more bit, so they can also
# be a quarter of a step away from a bf16 number.
# </details>

# %% tags=["hide-input"]
show("rounding_bias")

# %% [markdown]
# How does such a small error make a loss explode? It takes four steps, and in each of them, the errors keep a common
# sign:
#
# 1. **O.** In column 0, the error of O is near 0 in about half of the rows and negative in nearly all others.
# 2. **D.** $D = \operatorname{rowsum}(dO \circ O)$ of chapter 05, which the paper calls δ, multiplies this error by
#    dO. If dO had random signs in this column, the products would also have random signs, and most of them would
#    cancel. But here, dO is negative in all rows, so nearly every product is either near 0 or positive. The sum of the
#    errors of D therefore grows with the number of rows, as the right side of the figure shows.
# 3. **dQ.** A row of dQ contains $-\tau D_i \sum_j P_{ij} k_j$, so an error of $D_i$ moves it along the weighted mean
#    of the row's keys.
# 4. **The weights.** The gradient of a weight matrix is a sum over all tokens, in which each term is the product of a
#    token's input and its row of dQ. The paper finds that these products are similar for all tokens. So errors of D
#    with the same sign move the weights in the same direction, for all tokens and in every training step, until the
#    loss explodes.
#
# The figure also shows that the sum of the errors stays small if $o$ is kept in fp32 and divided before it is rounded.
# Why does the division help? Let the weights of the other keys have the sum ε, and let their values have the weighted
# mean w, so the other keys add εw to o and ε to $\ell$. In the row above, $o / \ell$ is then (−2.5078125 + εw) / (2 +
# ε). Without the other keys, this is −1.25390625, or −160.5 steps of 1/128, a halfway case again. With them, it is the
# weighted mean of −1.25390625, with weight 2, and w, with weight ε, so it is between the two. In a row whose w is
# below −1.25390625, the quotient is therefore pushed down from the halfway case, and in a row whose w is above, it is
# pushed up. Both happen in many rows, so most of these errors cancel. But if $o$ is rounded before the division, only
# εw counts, which is negative in every row. The division by 2 + ε, which would balance this push, then comes after the
# rounding and cannot undo its error.
#
# The kernels of this book divide first. The paper, by contrast, keeps the sums in bf16 and changes m, so that the
# largest weight is not 1. If m is positive, for example, it can subtract 2m.
#
# **Predict.** The exact result does not depend on m, as long as nothing overflows. The figure shows that the error
# disappears if the kernel subtracts 2m instead of m. Which of these other values do the same, because the largest
# weight is no longer 1?
#
# - ☐ both m + log 2, with a largest weight of ½, and m + 0.3, with a largest weight of 0.74
# - ☐ only m + 0.3, because 0.74 is not a power of two
# - ☐ neither of them
#
# <details><summary>Answer</summary>
#
# **neither of them.** With m + log 2, all weights are halved, which changes only their exponents, so the sums have the
# same halfway cases as before. With m + 0.3, the largest weight is not a power of two, but it is the same number in
# all rows, so rounding it to bf16 makes the same error in every row. The sum $\ell$ adds the weights before they are
# rounded, so the division does not undo this error, which makes the result even worse. With 2m, the largest weight is
# $e^{m-2m} = e^{-m}$. This weight differs from row to row, and so does its rounding error, so the errors cancel. If m
# is negative, $e^{-m}$ would be large and could overflow. The paper therefore subtracts 0 in such rows, so that the
# largest weight is $e^m$, which is less than 1 and also differs from row to row. If m is positive, it subtracts a
# multiple of m. The paper makes this change only in rows with a repeated maximum. In the output, the number after *by
# chance* is the typical size of the sum if the same errors had random signs.
#
# ```python
# want = rounding.exact_outputs(S, V_rows)
# for name, at in {"m": m, "m + log 2": m + np.log(2), "m + 0.3": m + 0.3, "2m": 2 * m}.items():
#     error = (dO * (rounding.rounded_outputs(S, V_rows, at, sum_bits=8) - want)).sum(1)
#     chance = rms(error) * np.sqrt(len(error))
#     print(f"{name:10} sum of the errors of D: {error.sum():5.2f}, by chance about {chance:.1f}")
# ```
#
# ```text
# m          sum of the errors of D:  6.92, by chance about 0.4
# m + log 2  sum of the errors of D:  6.92, by chance about 0.4
# m + 0.3    sum of the errors of D: 11.87, by chance about 0.6
# 2m         sum of the errors of D: -0.68, by chance about 0.6
# ```
# </details>

# %% [markdown]
# ## Which value should a masked score have?
#
# A masked key must get a weight of 0. Some programs give it a score of −∞. Many others use a large negative number
# instead, so that −∞ − (−∞), which is NaN, can never occur. To compare these values, we apply plain softmax to a row of
# two visible and two masked keys, and to a row of two masked keys alone:

# %% tags=["hide-input"]
def hidden_weight(dtype, value, visible, add=0.0):  # of both masked keys together
    with np.errstate(all="ignore"):
        hidden = np.full(2, value).astype(dtype) + dtype(add)
        E = np.concatenate([np.array(visible, dtype), hidden])
        E = np.exp(E - E.max())
        return float(E[len(visible) :].sum() / E.sum())


# −65,504: the lowest of fp16
VALUES = {"−10,000": -1e4, "−65,504": -65504, "−10⁹": -1e9, "−∞": -np.inf}
ROWS = {"scores 1, 2": ([1, 2], 0), "scores −20,000": ([-20000, -20001], 0),
        "no visible key": ([], 0)}
ROWS["no visible key, −16 added"] = [], -16

# %% [markdown]
# **Predict.** Which of the values −10,000, −65,504 (the lowest number of fp16), −10⁹ and −∞ never gives a masked key
# any weight, whatever the visible scores are, even in fp16?
#
# - ☐ −65,504, since nothing in fp16 is lower
# - ☐ −10⁹, since no score is that low
# - ☐ −∞, if rows without a visible key are handled
#
# <details><summary>Answer</summary>
#
# **−∞, if rows without a visible key are handled.** A finite value acts as a threshold, because the masked keys win as
# soon as the visible scores fall below it. With such a value, a row that sees no key becomes a mean of the values that
# it must not see, which looks like a real result. In fp16, −10⁹ overflows to −∞, and so does the lowest number if a
# score of −16 or less, or a second mask, is added to it. In this book, a masked score is −∞, and a row that sees no
# key gets O = 0 and L = −∞.
#
# ```python
# print(f"{'weight of the masked keys':31}" + "".join(f"{name:>12}" for name in VALUES))
# for dtype in (np.float32, np.float16):
#     for name, (visible, add) in ROWS.items():
#         found = [hidden_weight(dtype, value, visible, add) for value in VALUES.values()]
#         cells = [f"{x:.0%}" if np.isfinite(x) else "NaN" for x in found]
#         print(f"fp{8 * dtype().nbytes}, {name:25}" + "".join(f"{x:>12}" for x in cells))
# ```
#
# ```text
# weight of the masked keys           −10,000     −65,504        −10⁹          −∞
# fp32, scores 1, 2                        0%          0%          0%          0%
# fp32, scores −20,000                   100%          0%          0%          0%
# fp32, no visible key                   100%        100%        100%         NaN
# fp32, no visible key, −16 added        100%        100%        100%         NaN
# fp16, scores 1, 2                        0%          0%          0%          0%
# fp16, scores −20,000                   100%          0%          0%          0%
# fp16, no visible key                   100%        100%         NaN         NaN
# fp16, no visible key, −16 added        100%         NaN         NaN         NaN
# ```
# </details>
#
# Such values have caused bugs in practice. In lattice, which used −10,000, a key with a score of −20,000 lost to a
# masked key ([#361](https://github.com/ohdearquant/lattice/issues/361)). In transformers, which had inherited −10,000
# from BERT, a T5 model's prediction depended on a token that it should not have seen
# ([#10484](https://github.com/huggingface/transformers/issues/10484)). The library replaced this value with the lowest
# number of each dtype. In fp16, however, that number is so close to the limit that adding a score of −16 turned it into
# −∞, so rows without a visible key became NaN ([#17306](https://github.com/huggingface/transformers/pull/17306)).
#
# The loop over tiles adds one more case, because m also needs an initial value. FlashInfer started with −50,000. A row
# whose scores were all below −50,000 kept this m, so all its exponentials were 0, and O was 0 as well
# ([#4267](https://github.com/flashinfer-ai/flashinfer/issues/4267)). When −∞ replaced −50,000, rows without a visible
# key became NaN ([#4451](https://github.com/flashinfer-ai/flashinfer/issues/4451)), because −∞ − (−∞) is NaN. This
# book uses two kinds of initial values, and each of them avoids both bugs:
#
# - The rungs of the ladder and the kernels that you write in chapters 08 and 14 start with `LOWEST`, which is −10³⁰.
#   Like −50,000, this number is a threshold, but no realistic score is below it. With fp16, no score can be, and with
#   bf16, elements of Q and K would have to be larger than 10¹⁴. In a row without keys, −∞ − (−10³⁰) is −∞, so no NaN
#   occurs. The package's Hopper kernel works in the same way with −3 · 10³⁸, which is nearly the lowest fp32 number.
# - The package's portable and decode kernels start with −∞, and subtract 0 instead of m as long as m is still −∞. They
#   have no threshold, so they assume nothing about the scores.
#
# The next cell compares these values for one row. In the cell, *guarded* means that 0 is subtracted in this way:

# %%
def l_of(tiles, lowest, guarded):  # ℓ of one row of scores, tile by tile
    m, l = lowest, 0.0
    for s in tiles:
        m_new = max(m, max(s))
        m_ref = 0.0 if guarded and m_new == -np.inf else m_new
        with np.errstate(invalid="ignore"):
            l, m = np.exp(m - m_ref) * l + np.exp(np.array(s) - m_ref).sum(), m_new
    return l


hidden, low = [-np.inf, -np.inf], [-60000.0, -60001.0]
CASES = {"low scores": [low], "masked tile first": [hidden, low], "nothing visible": [hidden]}
print(f"{'ℓ of a row:':18}" + "".join(f"{name:>19}" for name in CASES))
for name, lowest, guarded in (
    ("m from −50,000", -5e4, False),
    ("m from −∞", -np.inf, False),
    ("m from −∞, guarded", -np.inf, True),
    ("m from −10³⁰", -1e30, False),
):
    found = [l_of(tiles, lowest, guarded) for tiles in CASES.values()]
    print(f"{name:18}" + "".join(f"{l:19.2f}" for l in found))

# %% [markdown]
# ## How exact is float32 on the tensor cores?
#
# Chapter 11 shows that `tl.dot` of two fp32 tiles uses TF32 unless you ask for `input_precision="ieee"`. The tensor
# cores then read 11 bits of each operand, including the leading one, and ignore the rest. Such truncation makes
# larger errors than rounding does. It also has a second disadvantage, because all its errors point towards zero.
#
# Three TF32 products recover most of the lost bits. Each operand is split into the part that TF32 can hold and a
# remainder, and only the product of the two remainders is left out. In Triton, this mode is
# `input_precision="tf32x3"`.

# %%
def tf32(x):  # truncated, as on the tensor cores
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(fraction * 2.0**11) / 2.0**11, exponent)


def three(A, B):
    a, b = tf32(A), tf32(B)
    return a @ b + (a @ tf32(B - b) + tf32(A - a) @ b)


def attention_with(product):
    S = product(Q32, K32.T) / np.sqrt(Q32.shape[1])
    E = np.exp(S - S.max(1, keepdims=True))
    return product(E / E.sum(1, keepdims=True), V32)

# %% tags=["hide-input"]
Q32, K32, V32 = (
    np.random.default_rng(2).standard_normal((3, 512, 64)).astype(np.float32).astype(np.float64)
)
PRODUCTS = {
    "fp32": lambda A, B: rounded(A, 24) @ rounded(B, 24),
    "TF32": lambda A, B: tf32(A) @ tf32(B),
    "TF32, if it rounded": lambda A, B: rounded(A, 11) @ rounded(B, 11),
    "bf16": lambda A, B: bf16(A) @ bf16(B),
    "three times TF32": three,
}
of_product = {name: abs(attention_with(f) - exact(Q32, K32, V32)).max()
              for name, f in PRODUCTS.items()}

# %% [markdown]
# **Predict.** The largest error of O with bf16 operands is about 2 · 10⁻³. TF32 has three more bits. How large is its
# error?
#
# - ☐ an eighth of bf16's error
# - ☐ about half of bf16's error
# - ☐ the same
#
# <details><summary>Answer</summary>
#
# **about half of bf16's error.** Rounding to 11 bits would indeed give about an eighth of that error. Truncation,
# however, makes errors up to twice as large, and it makes all weights too small, so these errors do not cancel. Nothing
# makes up for this afterwards, because in `attention_with`, the weights are divided by their sum first and truncated
# then. Three products bring the error below 10⁻⁶.
#
# ```python
# for name, error in of_product.items():
#     print(f"{name:20} largest error of O {error:.0e}")
# ```
#
# ```text
# fp32                 largest error of O 1e-08
# TF32                 largest error of O 1e-03
# TF32, if it rounded  largest error of O 3e-04
# bf16                 largest error of O 2e-03
# three times TF32     largest error of O 5e-07
# ```
# </details>

# %% [markdown]
# ## What do scales and a rotation gain in FP8?
#
# FP8's format E4M3 has only 4 mantissa bits, of which 3 are stored, and its largest number is 448, so each tensor
# needs a *scale* that maps its largest element to 448. In section 3.3, the paper on
# [FlashAttention-3](https://arxiv.org/abs/2407.08608) uses two techniques to lower the error. Each block of rows gets
# its own scale, and Q and K are both multiplied by the same orthogonal matrix M. Since $M M^\top = I$, the scores $QM
# (KM)^\top = QK^\top$ stay the same. M is a *Hadamard matrix* with random signs, which means that all of its elements
# are $+1/\sqrt{d}$ or $-1/\sqrt{d}$. Multiplying by M therefore spreads an outlier evenly over all d columns. It is
# also cheap, because it takes only d log d additions per row.

# %%
print(getsource(rounding.e4m3))
print(getsource(rounding.scaled_e4m3))

# %% tags=["hide-input"]
def fp8(Q, K, V, rows, turn=None):  # P has a fixed scale, since its largest number is 1
    q, k = (Q, K) if turn is None else (Q @ turn, K @ turn)
    S = rounding.scaled_e4m3(q, rows) @ rounding.scaled_e4m3(k, rows).T / np.sqrt(Q.shape[1])
    E = np.exp(S - S.max(1, keepdims=True))
    return rounding.e4m3(256 * E) / 256 @ rounding.scaled_e4m3(V, rows) / E.sum(1, keepdims=True)


def rms_of(share, rows, turn=None, draws=4):  # error of O, over several draws
    drawn = [rounding.with_outliers(1024, outlier_share=share, seed=seed) for seed in range(draws)]
    return rms(np.array([fp8(*x, rows, turn) - exact(*x) for x in drawn]))


WAYS = {"one scale": (1024, None), "one for 64 rows": (64, None)}
WAYS |= {f"{name}, rotated": (rows, rounding.rotation(64)) for name, (rows, _) in WAYS.items()}
of_fp8 = {name: [rms_of(share, *way) for share in (0, 0.001)] for name, way in WAYS.items()}

# %% [markdown]
# As in FlashAttention-3's paper, we draw all numbers from N(0, 1) and add a number from N(0, 100), whose standard
# deviation is 10, to one in a thousand.
#
# **Predict.** Which of the two techniques lowers the error of O, and does this depend on outliers?
#
# - ☐ scales for blocks always do, and the rotation does only with outliers
# - ☐ only the rotation makes much difference, and only with outliers
# - ☐ both techniques do, with and without outliers
#
# <details><summary>Answer</summary>
#
# **only the rotation makes much difference, and only with outliers.** FP8 is a floating-point format, so a number that
# is a hundred times smaller than the largest one still has its 4 bits, and a single scale for the whole tensor does
# little harm. An outlier, however, can be wrong by nearly a sixteenth of itself. With 4 bits, for example, the next
# number after 1 is 1.125, so 1.06 becomes 1. This makes some of the scores that are computed from it wrong by 1 or
# more, so the weights, which are exponentials, are wrong by a factor of e or more. Once the outlier is spread over 64
# columns, its rounding makes 64 small errors that partly cancel. In Table 3 of the paper, the rotation helps more, and
# the blocks help as little as here: the error rises from 9.1e-3 to 9.3e-3 without blocks, and to 2.4e-2 without the
# rotation.
#
# ```python
# for name, (normal, outliers) in of_fp8.items():
#     print(f"{name:26} error of O {normal:.1e} without outliers, {outliers:.1e} with them")
# ```
#
# ```text
# one scale                  error of O 2.8e-03 without outliers, 2.1e-02 with them
# one for 64 rows            error of O 2.8e-03 without outliers, 1.9e-02 with them
# one scale, rotated         error of O 2.8e-03 without outliers, 1.4e-02 with them
# one for 64 rows, rotated   error of O 2.8e-03 without outliers, 1.4e-02 with them
# ```
# </details>
#
# No kernel of this book uses FP8. The same section of the paper explains what else it needs, such as a different
# layout of V.

# %% [markdown]
# ## Does the order of a sum matter?
#
# In exact arithmetic, it does not. With rounding, $(a + b) + c$ and $a + (b + c)$ can differ, so each way of splitting
# a row into parts gives different last bits. In the next cell, we take 256 rows of 4,096 products p v. The products of
# each row are assigned to n parts in turn, so that product j belongs to part j mod n. The parts are then merged in
# order, and every sum is rounded to fp32.

# %%
def in_parts(n):
    parts = np.zeros((n, len(products)), np.float32)
    for j, product in enumerate(products.T):
        parts[j % n] += product
    o = parts[0]
    for part in parts[1:]:
        o = o + part
    return o


draw = np.random.default_rng(3)
p, v = np.exp(-3 * draw.random((256, 4096))), draw.standard_normal((256, 4096))
products = (p * v).astype(np.float32)

# %% [markdown]
# **Predict.** We split each row into 1, 2, 4, … or 128 parts. How often are the results the same, and how many parts
# give the most exact result?
#
# - ☐ always, since fp32 has enough bits for 4,096 products
# - ☐ hardly ever, and one part is the most exact, because nothing is merged
# - ☐ hardly ever, and many parts are more exact than one
#
# <details><summary>Answer</summary>
#
# **hardly ever, and many parts are more exact than one.** Each addition rounds relative to the sum so far. In one long
# sum, a product passes through up to 4,095 roundings. With 64 parts, it passes through at most 63 of them, followed by
# at most 63 in the merge. With 128 parts, the merge alone can round it 127 times, so the error grows again. So no
# order is the right one, and a more parallel sum is not less exact.
#
# ```python
# whole, one = products.sum(1, dtype=np.float64), in_parts(1)
# for n in (1, 2, 4, 8, 16, 32, 64, 128):
#     o = in_parts(n)
#     print(f"{n:3} parts: {(o == one).mean():4.0%} as with one part, error {rms(o - whole):.1e}")
# ```
#
# ```text
#   1 parts: 100% as with one part, error 2.7e-05
#   2 parts:   1% as with one part, error 2.2e-05
#   4 parts:   1% as with one part, error 1.5e-05
#   8 parts:   4% as with one part, error 1.2e-05
#  16 parts:   0% as with one part, error 8.1e-06
#  32 parts:   2% as with one part, error 6.0e-06
#  64 parts:   2% as with one part, error 4.7e-06
# 128 parts:   0% as with one part, error 6.0e-06
# ```
# </details>
#
# If the number of parts depends on the batch, the last bits of a row depend on the other requests in the batch.
# Chapter 14 [shows this effect and fixes the number of parts](14_decode.ipynb#is-a-row-the-same-in-another-batch). If
# the order depends on which program comes first, as with atomic additions, two runs of the same call differ. Chapter
# 05 shows this [for dQ](05_backward.ipynb#who-adds-into-dq).

# %% [markdown]
# ## Recap
#
# - Judge a kernel by its distance from the exact result, and allow twice the distance of standard attention in the
#   same precision.
# - Rounding P to bf16 adds at most about as much error as storing O in bf16, for any N.
# - Rounding errors add up if many rows have the same halfway case and are pushed the same way. To avoid this, keep
#   the sums in fp32 and divide them before you round.
# - A finite mask value is a threshold, and in 16 bits it can also overflow. −∞ needs a guard for rows that see no
#   key.
# - TF32 is less exact than its 11 bits suggest, because it truncates. Three products restore the lost precision.
# - In FP8, a rotation that spreads outliers helps more than a separate scale for each block.
# - Each order of a sum has its own last bits, and none of them is the right one.

# %% [markdown]
# ## Exercises
#
# **Build.** Write Dao's rule as a test, `passes(ours, plain, exact)`. Its arguments are the output of a kernel, the
# output of standard attention in 16 bits, and the exact result. The test must also work on L, which is −∞ for rows
# that see no key.
#
# <details><summary>Hint</summary>
#
# What do you get when you compare NaN with a number, and what is −∞ − (−∞)? If standard attention makes no error,
# what error is the kernel allowed?
# </details>

# %%
def passes(ours, plain, exact):
    ...

# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
far, one, up = plain + 3 * abs(plain - truth).max(), np.array([1.0, 2.0]), np.array([0.0, 1.0])
inf = np.array([-np.inf, 1.0])
check(
    passes,
    Case(
        "the loop above. Do errors of both signs cancel in your test?",
        (ours, plain, truth),
        True,
    ),
    Case(
        "twice the error, with the other sign. Which two do you compare, and is twice the "
        "error allowed?",
        (one + 0.5, one - 0.25, one),
        True,
    ),
    Case(
        "a kernel that is wrong everywhere. Do you compare its largest error with the limit?",
        (far, plain, truth),
        False,
    ),
    Case(
        "errors of both signs. Does their sum show their size?",
        (one + 1 - 2 * up, one + 0.1, one),
        False,
    ),
    Case(
        "an error far below zero. Do you take its absolute value?",
        (one - 5, one + 0.1, one),
        False,
    ),
    Case(
        "NaN in the kernel's output. Is NaN > x true?",
        (np.array([1.0, np.nan]), one + 0.1, one),
        False,
    ),
    Case("neither makes an error. Is 0 ≤ 2 · 0?", (one, one, one), True),
    Case("the right L of a row that sees no key. What is −∞ − (−∞)?", (inf, inf, inf), True),
    Case(
        "0 instead of −∞. Do you compare the numbers that are not finite?",
        (up, inf, inf),
        False,
    ),
    Case("−∞ instead of a number.", (np.array([-np.inf, -np.inf]), inf + 0.1, inf), False),
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def passes(ours, plain, exact):
#     finite = np.isfinite(exact)
#     if not np.array_equal(ours[~finite], exact[~finite]):
#         return False
#     error, allowed = (abs(x[finite] - exact[finite]).max(initial=0) for x in (ours, plain))
#     return bool(error <= 2 * allowed)  # false if the error is NaN
# ```
# </details>

# %% [markdown]
# ## Checks

# %% tags=["hide-input"]
nearer = abs(ours - truth).max() < abs(plain - truth).max()
verdict("the loop is closer to the exact result than standard attention", nearer)
want = rounding.exact_outputs(S, V_rows)
sums = {}
for name, at, bits in (("bf16", m, 8), ("2m", 2 * m, 8), ("half", m + np.log(2), 8),
                       ("fp32", m, 24)):
    error = (dO * (rounding.rounded_outputs(S, V_rows, at, bits) - want)).sum(1)
    sums[name] = error.sum() / (rms(error) * np.sqrt(len(error)))
verdict("with sums in bf16, the errors of D add up", sums["bf16"] > 10 and sums["half"] > 10)
verdict("with 2m or sums in fp32, they do not", max(abs(sums["2m"]), abs(sums["fp32"])) < 3)
verdict("TF32, which truncates, has about half of bf16's error",
        0.3 < of_product["TF32"] / of_product["bf16"] < 0.8)
verdict("three products have less than a thousandth of TF32's error",
        of_product["three times TF32"] < of_product["TF32"] / 1000)
rotated, blocks = (of_fp8[name][1] / of_fp8["one scale"][1]
                   for name in ("one scale, rotated", "one for 64 rows"))
verdict("with outliers, the rotation helps, and a scale for each block hardly helps",
        rotated < 0.8 < blocks)
Q8, K8, _ = rounding.with_outliers()
rounded_Q8, rounded_K8 = (rounding.scaled_e4m3(X, 1024) for X in (Q8, K8))
worst = abs(rounded_Q8 @ rounded_K8.T - Q8 @ K8.T).max() / np.sqrt(64)
verdict("some scores in FP8 are wrong by more than 1", worst > 1)
in_one, in_64 = (abs(in_parts(n) - products.sum(1, dtype=np.float64)).mean() for n in (1, 64))
verdict("64 parts are more exact than one", in_64 < in_one)

# %% [markdown] tags=["navigation"]
# [← The package and its commands](C_package.ipynb) · [The map](00_start.ipynb)
