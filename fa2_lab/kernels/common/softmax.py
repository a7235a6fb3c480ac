"""The softmax step (line 9 of FA2's Algorithm 1).

The step computes probabilities from a tile of scores and updates the row maxima m and the row sums ℓ.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from fa2_lab.kernels.common.constants import LOG2E, NEG_INF


class Scales(NamedTuple):
    """The factors by which kernels multiply scores, chosen so that exponentials become powers of 2."""

    scale_log2: float  # τ log₂e
    exact_scale: float  # largest power of two not above scale_log2, so that products with it are exact
    exact_from_abs_m: float  # rows with at least this |m| use exact_scale: see softmax_step()
    softcap_factor: float | None  # factor of the scores inside the softcap's tanh, or None if there is no softcap


def scale_log2_of(scale: float) -> float:
    """Return c = τ log₂e for a scale τ.

    With this factor, exp(τ s) = 2^(c s), and GPUs have an instruction for powers of 2. If the scale is 0, return 2⁻¹²⁶
    so that −∞ · c is still −∞.
    """
    return max(scale * LOG2E.value, 2.0**-126)


def make_scales(scale: float, softcap: float | None) -> Scales:
    """Return the Scales for a scale τ and a softcap."""
    scale_log2 = scale_log2_of(scale if softcap is None else softcap)
    # The largest factor is finite, and it still makes tanh(factor · score) ±1 unless the score is 0.
    softcap_factor = None if softcap is None else min(scale / softcap, 1e38)
    exact_scale, exact_from_abs_m = 2.0 ** math.floor(math.log2(scale_log2)), min(2.0**28 / scale_log2, 2.0**126)
    return Scales(scale_log2, exact_scale, exact_from_abs_m, softcap_factor)


@triton.jit
def apply_softcap(s_ij, factor):
    """Return tanh(factor · s_ij) for a tile of scores, or s_ij unchanged if `factor` is None (no softcap).

    With a softcap c, `factor` is τ / c. The capped scores are c · tanh(τ s / c), so c takes the place of τ in Scales.
    """
    return s_ij if factor is None else tanh(s_ij * factor)


@triton.jit
def tanh(x):
    """Return tanh(x) = ±(1 − e) / (1 + e) with e = exp(−2 |x|).

    If |x| < 0.25, a power series replaces this quotient because 1 − e would lose most of its digits.
    """
    abs_x = tl.abs(x)
    e = tl.exp2(abs_x * (-2 * LOG2E))
    large = (1 - e) / (1 + e)
    y = tl.minimum(abs_x, 0.25)
    y = y * y
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(abs_x < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def softmax_step(s_ij, m_i, l_i, scales, MASKED: tl.constexpr):
    """Return a tile's P, the factor alpha for the earlier o and ℓ, and the new row maxima m and row sums ℓ.

    s_ij and P are (B_r, B_c), and m, ℓ and alpha are (B_r,). With c = τ log₂e, exp(τ (s − m)) is 2^(s c − m c).
    Computing this power takes one FMA and one exponential per score because m c is the same for a whole row.

    Rounding m c changes all of a row's p by the same factor, which cancels out of O because O is a quotient. If |m c|
    is 2²⁸ or more, however, the factor can exceed 2⁸, and p could become too large or too small for fp16. For such
    rows, `row_scale` is therefore the largest power of two not above c, which makes all products exact. The result
    hardly changes: scores of this size are either equal or so far apart that their p differ by a factor of at least 2¹⁶
    or, with the smaller scale, 2⁸. All p except the largest are thus almost 0.
    """
    m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
    m_safe = m_new
    if MASKED:  # a row that has seen no key yet has m = −∞, and −∞ − (−∞) is NaN
        m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)
    row_scale = tl.where(tl.abs(m_safe) < scales.exact_from_abs_m, scales.scale_log2, scales.exact_scale)  # (B_r,)
    p_ij = tl.exp2(s_ij * row_scale[:, None] - (m_safe * row_scale)[:, None])  # (B_r, B_c)  FA2.A1.L8 FA2.A1.L9
    alpha = tl.exp2((m_i - m_safe) * row_scale)  # (B_r,)  FA2.A1.L9
    l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
    return p_ij, alpha, m_new, l_i
