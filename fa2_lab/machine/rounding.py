"""Simulations of number formats in NumPy, which show how rounding affects attention if everything else is exact.

`rounded` in examine/cases.py rounds to any format, given its number of mantissa bits including the leading 1. This
module adds the FP8 format E4M3, which has four mantissa bits, and the scales and the rotation that FlashAttention-3
uses with FP8. It also constructs rows in which all rounding errors have the same sign and therefore accumulate (arXiv
2510.04212).
"""

from typing import NamedTuple

import numpy as np

from fa2_lab.examine.cases import rounded

BF16, FP16, TF32, FP32 = 8, 11, 11, 24  # mantissa bits, including the leading 1
E4M3_MAX = 448  # the largest E4M3 value

# Rounding errors with the same sign -----------------------------------------------------------------------------


class TiedRows(NamedTuple):
    """Rows of scores S in which two scores tie for the maximum."""

    S: np.ndarray  # (rows, keys)
    V: np.ndarray  # (rows, keys, d)
    dO: np.ndarray  # (rows, d)


def repeated_maxima(rows: int = 4096, keys: int = 64, d: int = 16, seed: int = 0) -> TiedRows:
    """Return random rows with two equal maxima far above all other scores. Column 0 of V and dO is negative."""
    rng = np.random.default_rng(seed)
    top = rng.uniform(1, 3, (rows, 1))
    S = top - rng.uniform(11, 16, (rows, keys))
    S[:, :2] = top
    V, dO = rng.standard_normal((rows, keys, d)), rng.standard_normal((rows, d))
    V[..., 0], dO[:, 0] = -1 - abs(V[..., 0]), -abs(dO[:, 0])
    return TiedRows(S, rounded(V, BF16), rounded(dO, BF16))


def rounded_outputs(S: np.ndarray, V: np.ndarray, m: np.ndarray, sum_bits: int) -> np.ndarray:
    """Return O in bf16, with o = P V rounded to `sum_bits` mantissa bits before the division by l.

    `m` holds, for each row, the value to subtract from its scores.
    """
    P = np.exp(S - m)
    o = np.einsum("rk,rkd->rd", rounded(P, BF16), V)
    return rounded(rounded(o, sum_bits) / P.sum(1, keepdims=True), BF16)


def exact_outputs(S: np.ndarray, V: np.ndarray) -> np.ndarray:
    """Return O computed without any rounding."""
    P = np.exp(S - S.max(1, keepdims=True))
    return np.einsum("rk,rkd->rd", P / P.sum(1, keepdims=True), V)


# FP8 --------------------------------------------------------------------------------------------------------------


def e4m3(x: np.ndarray) -> np.ndarray:
    """Return x rounded to the nearest E4M3 values, which are at least 2⁻⁹ apart and have magnitudes up to 448."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 4, -9))
    return np.clip(np.round(x / step) * step, -E4M3_MAX, E4M3_MAX)


def scaled_e4m3(X: np.ndarray, rows: int) -> np.ndarray:
    """Return X rounded to E4M3, with one scale per group of `rows` rows.

    The scale maps the largest magnitude in the group to 448.
    """
    blocks = X.reshape(-1, rows, X.shape[1])
    scale = abs(blocks).max((1, 2), keepdims=True) / E4M3_MAX
    return (e4m3(blocks / scale) * scale).reshape(X.shape)


def rotation(d: int, seed: int = 0) -> np.ndarray:
    """Return a random orthogonal matrix (d, d): a Hadamard matrix, scaled by 1/√d, with random row signs.

    d must be a power of two.
    """
    H = np.ones((1, 1))
    while len(H) < d:
        H = np.block([[H, H], [H, -H]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], d)
    return signs[:, None] * H / np.sqrt(d)


def with_outliers(N: int = 1024, d: int = 64, outlier_share: float = 0.001, seed: int = 0) -> np.ndarray:
    """Return random Q, K and V, each (N, d), with a few outliers, as in the FlashAttention-3 paper."""
    rng = np.random.default_rng(seed)
    normal, large = rng.standard_normal((2, 3, N, d))
    return normal + 10 * large * (rng.random((3, N, d)) < outlier_share)
