"""Number formats in NumPy, which show what rounding does to attention if everything else is exact.

A format has so many bits of mantissa, the leading one included, and `rounded` of examine/cases.py rounds to them. Here
are E4M3, FP8's format with four bits, the scales and the rotation that FlashAttention-3 gives it, and rows in which
rounding errors of one sign add up (arXiv 2510.04212).
"""

from typing import NamedTuple

import numpy as np

from fa2_lab.examine.cases import rounded

BF16, FP16, TF32, FP32 = 8, 11, 11, 24  # bits of mantissa
LARGEST = 448  # of E4M3

# Rounding errors of one sign ------------------------------------------------------------------------------------


class TiedRows(NamedTuple):
    """Rows of scores, each with its own keys and values, and the gradient of O."""

    S: np.ndarray  # (rows, keys)
    V: np.ndarray  # (rows, keys, d)
    dO: np.ndarray  # (rows, d)


def repeated_maxima(rows: int = 4096, keys: int = 64, d: int = 16, seed: int = 0) -> TiedRows:
    """Draw rows with two equal maxima far above all other scores. V and dO are all negative in column 0."""
    rng = np.random.default_rng(seed)
    top = rng.uniform(1, 3, (rows, 1))
    S = top - rng.uniform(11, 16, (rows, keys))
    S[:, :2] = top
    V, dO = rng.standard_normal((rows, keys, d)), rng.standard_normal((rows, d))
    V[..., 0], dO[:, 0] = -1 - abs(V[..., 0]), -abs(dO[:, 0])
    return TiedRows(S, rounded(V, BF16), rounded(dO, BF16))


def outputs(S: np.ndarray, V: np.ndarray, m: np.ndarray, sum_bits: int) -> np.ndarray:
    """O in bf16, if o = P V is rounded to so many bits before the division by l."""
    P = np.exp(S - m)
    o = np.einsum("rk,rkd->rd", rounded(P, BF16), V)
    return rounded(rounded(o, sum_bits) / P.sum(1, keepdims=True), BF16)


def truth(S: np.ndarray, V: np.ndarray) -> np.ndarray:
    """Return O without any rounding."""
    P = np.exp(S - S.max(1, keepdims=True))
    return np.einsum("rk,rkd->rd", P / P.sum(1, keepdims=True), V)


# FP8 --------------------------------------------------------------------------------------------------------------


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of E4M3, in steps of at least 2⁻⁹ and up to 448 in size."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 4, -9))
    return np.clip(np.round(x / step) * step, -LARGEST, LARGEST)


def scaled(X: np.ndarray, rows: int) -> np.ndarray:
    """X in E4M3; a scale makes the largest number of each block of rows 448."""
    blocks = X.reshape(-1, rows, X.shape[1])
    scale = abs(blocks).max((1, 2), keepdims=True) / LARGEST
    return (e4m3(blocks / scale) * scale).reshape(X.shape)


def rotation(d: int, seed: int = 0) -> np.ndarray:
    """Return an orthogonal matrix (d, d), d a power of two: random signs, then Hadamard's matrix of ±1/√d."""
    H = np.ones((1, 1))
    while len(H) < d:
        H = np.block([[H, H], [H, -H]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], d)
    return signs[:, None] * H / np.sqrt(d)


def with_outliers(N: int = 1024, d: int = 64, share: float = 0.001, seed: int = 0) -> np.ndarray:
    """Draw Q, K and V as in FlashAttention-3's paper: N(0, 1), with N(0, 100) added to a share of the numbers."""
    rng = np.random.default_rng(seed)
    normal, large = rng.standard_normal((2, 3, N, d))
    return normal + 10 * large * (rng.random((3, N, d)) < share)
