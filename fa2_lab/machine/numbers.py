"""Number formats in NumPy, which show the effect of rounding on attention if everything else is exact.

A format is given by its bits of mantissa, including the leading one, to which `rounded` of examine/cases.py rounds.
This module adds E4M3, FP8's format with four bits, the scales and the rotation with which FlashAttention-3 uses it, and
rows in which rounding errors of one sign add up (arXiv 2510.04212).
"""

from typing import NamedTuple

import numpy as np

from fa2_lab.examine.cases import rounded

BF16, FP16, TF32, FP32 = 8, 11, 11, 24  # bits of mantissa
LARGEST = 448  # of E4M3

# Rounding errors of one sign ------------------------------------------------------------------------------------


class TiedRows(NamedTuple):
    """Rows of scores S, each with its own values V and its own row of dO."""

    S: np.ndarray  # (rows, keys)
    V: np.ndarray  # (rows, keys, d)
    dO: np.ndarray  # (rows, d)


def repeated_maxima(rows: int = 4096, keys: int = 64, d: int = 16, seed: int = 0) -> TiedRows:
    """Return random rows with two equal maxima far above all other scores. V and dO are negative in column 0."""
    rng = np.random.default_rng(seed)
    top = rng.uniform(1, 3, (rows, 1))
    S = top - rng.uniform(11, 16, (rows, keys))
    S[:, :2] = top
    V, dO = rng.standard_normal((rows, keys, d)), rng.standard_normal((rows, d))
    V[..., 0], dO[:, 0] = -1 - abs(V[..., 0]), -abs(dO[:, 0])
    return TiedRows(S, rounded(V, BF16), rounded(dO, BF16))


def outputs(S: np.ndarray, V: np.ndarray, m: np.ndarray, sum_bits: int) -> np.ndarray:
    """Return O in bf16 if o = P V is rounded to `sum_bits` bits of mantissa before it is divided by l."""
    P = np.exp(S - m)
    o = np.einsum("rk,rkd->rd", rounded(P, BF16), V)
    return rounded(rounded(o, sum_bits) / P.sum(1, keepdims=True), BF16)


def truth(S: np.ndarray, V: np.ndarray) -> np.ndarray:
    """Return O computed without any rounding."""
    P = np.exp(S - S.max(1, keepdims=True))
    return np.einsum("rk,rkd->rd", P / P.sum(1, keepdims=True), V)


# FP8 --------------------------------------------------------------------------------------------------------------


def e4m3(x: np.ndarray) -> np.ndarray:
    """Return x rounded to the nearest numbers of E4M3, which have steps of at least 2⁻⁹ and a size of at most 448."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 4, -9))
    return np.clip(np.round(x / step) * step, -LARGEST, LARGEST)


def scaled(X: np.ndarray, rows: int) -> np.ndarray:
    """Return X rounded to E4M3 with one scale per block of `rows` rows, by which its largest number becomes 448."""
    blocks = X.reshape(-1, rows, X.shape[1])
    scale = abs(blocks).max((1, 2), keepdims=True) / LARGEST
    return (e4m3(blocks / scale) * scale).reshape(X.shape)


def rotation(d: int, seed: int = 0) -> np.ndarray:
    """Return an orthogonal matrix (d, d) for a power of two d: random signs times Hadamard's matrix of ±1/√d."""
    H = np.ones((1, 1))
    while len(H) < d:
        H = np.block([[H, H], [H, -H]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], d)
    return signs[:, None] * H / np.sqrt(d)


def with_outliers(N: int = 1024, d: int = 64, share: float = 0.001, seed: int = 0) -> np.ndarray:
    """Return random Q, K and V as in FlashAttention-3's paper: N(0, 1), with N(0, 100) added to a share of them."""
    rng = np.random.default_rng(seed)
    normal, large = rng.standard_normal((2, 3, N, d))
    return normal + 10 * large * (rng.random((3, N, d)) < share)
