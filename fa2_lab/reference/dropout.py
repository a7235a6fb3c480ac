"""Dropout whose mask depends on the seed and each entry's position, but not on the order in which tiles are processed.

The generator is Philox4x32 with ten rounds. Its key is the seed, and its counters are (column, row, head, batch), so it
draws the same bits as Triton's `tl.philox`. The forward and backward passes draw the same mask, regardless of their
loop orders.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fa2_lab.tiles import Tiling, whole_number

MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_WORD, WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(seed: int, c0: Any, c1: Any, c2: Any, c3: Any) -> np.ndarray:
    """Return the first of the four 32-bit words that Philox4x32-10 computes from a 64-bit seed and counters c0 … c3."""
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in (c0, c1, c2, c3))
    key0, key1 = np.uint64(seed) & LOW_WORD, np.uint64(seed) >> WORD
    for _ in range(10):
        a, b = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> WORD) ^ c1 ^ key0, b & LOW_WORD, (a >> WORD) ^ c3 ^ key1, a & LOW_WORD
        key0, key1 = (key0 + KEY_STEPS[0]) & LOW_WORD, (key1 + KEY_STEPS[1]) & LOW_WORD
    return c0.astype(np.uint32)


def threshold(p: float) -> int:
    """Return the threshold for dropout with probability p. An entry whose 32-bit random word is smaller is dropped."""
    return int(p * 2.0**32)


def keep_mask(p: float, seed: int, batch: int, head: int, rows: ArrayLike, cols: ArrayLike) -> np.ndarray:
    """Return a boolean mask (rows, columns) that is True for each entry that dropout keeps.

    `rows` and `cols` are indices into the whole score matrix, not into a tile.
    """
    word = philox(seed, np.asarray(cols)[None, :], np.asarray(rows)[:, None], head, batch)
    return word >= np.uint32(threshold(p))


@dataclass(frozen=True)
class Dropout:
    """Dropout with probability p for one head of a batch entry. The fields make up the generator's complete state R."""

    p: float = 0.0
    seed: int | None = None
    batch: int = 0
    head: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.p, (bool, np.bool_)) or not isinstance(self.p, Real):
            raise TypeError(f"dropout_p: got {self.p!r}; it takes a probability, 0 ≤ p < 1")
        if not 0 <= self.p < 1:
            raise ValueError(f"dropout_p: got {self.p}; it takes a probability, 0 ≤ p < 1")
        if self.seed is None and self.p > 0:
            raise ValueError("seed: got None; with dropout it takes a whole number from 0 to 2**64 - 1")
        if self.seed is not None:
            whole_number("seed", self.seed, low=0, high=2**64 - 1)

    def z(self, rows: slice, cols: slice) -> np.ndarray | None:
        """Return the dropout factors Z for the tile with these rows and columns, or None if p is 0.

        A factor is 1/(1−p) if the entry is kept, and 0 if it is dropped.
        """
        if self.p == 0 or self.seed is None:
            return None
        row, col = np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop)
        return keep_mask(self.p, self.seed, self.batch, self.head, row, col) / (1 - self.p)

    def drop(self, p_ij: np.ndarray, rows: slice, cols: slice) -> np.ndarray:
        """Return p_ij ∘ Z for a tile p_ij of P and its dropout factors Z, or p_ij itself if there is no dropout."""
        return dropped(p_ij, self.z(rows, cols))


NO_DROPOUT = Dropout()


def dropped(x: np.ndarray, z: np.ndarray | None) -> np.ndarray:
    """Return x ∘ z, where z holds the dropout factors, or x itself if z is None (no dropout)."""
    return x if z is None else x * z


def sequential_mask(tiling: Tiling, p: float, seed: int, order: str) -> np.ndarray:
    """Return the mask that a sequential generator draws, tile by tile, in the loop order of "fa1" or "fa2".

    The two loop orders give different masks. With a sequential generator, the backward pass can therefore reproduce the
    mask of the forward pass only if both passes process the tiles in the same order.
    """
    if order not in ("fa1", "fa2"):
        raise ValueError(f"order: got {order!r}; it takes 'fa1' (columns outside) or 'fa2' (rows outside)")
    draw = np.random.default_rng(seed).random
    outer, inner = (tiling.T_c, tiling.T_r) if order == "fa1" else (tiling.T_r, tiling.T_c)
    keep = np.empty((tiling.N_q, tiling.N_k), dtype=bool)
    for a in range(outer):
        for b in range(inner):
            i, j = (b, a) if order == "fa1" else (a, b)
            tile = keep[tiling.rows(i), tiling.cols(j)]
            tile[:] = draw(tile.shape) >= p
    return keep
