"""2ˣ without the exponential unit, in float32 and bit by bit: a cubic, and three ways to be silently wrong.

2ˣ = 2ⁿ · 2ʳ with n = ⌊x⌋. A cubic gives 2ʳ for r from 0 to 1, and n goes into the bits of the exponent.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

CUBIC = (0.0770671, 0.2276450, 0.6951168, 1.0)  # of 2ʳ on 0 to 1; at 0 it is exactly 1
CENTRED = (0.0557172, 0.2424936, 0.6931318, 0.99992)  # of 2ʳ on −½ to ½, where it is closer, but not at 0
NAN = 0x7FFFFFFF  # the GPU's
SHIFT = np.float32(3 << 22)  # a whole number added to it lies in the lowest bits


def by_product(r: np.ndarray, n: np.ndarray) -> np.ndarray:
    """2ⁿ as a number of its own, times r."""
    return r * number((bits(n + SHIFT) << 23) + 0x3F800000)


def by_addition(r: np.ndarray, n: np.ndarray) -> np.ndarray:
    """n added to the exponent of r: one instruction less."""
    return number(bits(r) + (bits(n + SHIFT) << 23))


def exp2(
    x: np.ndarray,
    highest: Callable = np.maximum,  # np.fmax, like max.f32 of PTX, drops NaN
    lowest: float = -127,
    floor: Callable = np.floor,
    join: Callable = by_product,
    cubic: tuple[float, ...] = CUBIC,
) -> np.ndarray:
    """2ˣ for x below 128, within 10⁻⁴; NaN stays NaN, −∞ gives 0."""
    a = highest(np.float32(x), np.float32(lowest))
    n = floor(a)
    return join(np.polyval(np.asarray(cubic, np.float32), a - n).astype(np.float32), n)


WAYS: dict[str, dict[str, Any]] = {  # how to call exp2; all but the first are wrong where no score is ordinary
    "right": {},
    "max drops NaN": dict(highest=np.fmax),
    "n added to the exponent": dict(join=by_addition),
    "rounded to nearest": dict(floor=np.rint, lowest=-126, join=by_addition, cubic=CENTRED),
}


def some(x: np.ndarray, every: int = 8, **way: Any) -> np.ndarray:
    """2ˣ with one column in `every` by the cubic, as a kernel has it, the others by the exponential unit."""
    p = np.exp2(np.float32(x))
    p[:, every - 1 :: every] = exp2(x[:, every - 1 :: every], **way)
    return p


def faults(x: np.ndarray, way: str) -> list[str]:
    """Where a way gives, for a row of scores in 8 columns each, another 2ˣ than the exponential unit does."""
    with np.errstate(all="ignore"):
        p, truth = some(x, **WAYS[way]), np.exp2(np.float32(x))
        truth[truth < 2.0**-126] = 0  # the exponential unit, too, has no smaller number
        good = np.where(np.isnan(x), np.isnan(p), np.abs(p - truth) <= 1e-3 * truth)
    return [f"2^{a:g} = {b:.3g}" for a, b in zip(x[~good], p[~good], strict=True)]


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of a float32."""
    return np.where(np.isnan(x), NAN, np.float32(x).view(np.int32)).astype(np.int64)


def number(n: np.ndarray) -> np.ndarray:
    """The float32 with these bits."""
    return (n & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
