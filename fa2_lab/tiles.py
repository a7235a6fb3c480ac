"""Geometry of blocks: which rows and columns a tile covers, and whether the mask cuts through the tile.

Queries are rows (`i`), and keys are columns (`j`). A tile is the B_r × B_c block of S at the intersection of row block
i and column block j. Other implementations call B_r and B_c BLOCK_M and BLOCK_N.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RowNumbers = Any  # the index of a row or row block, or an array of indices


class Tile(Enum):
    """The three kinds of tile under a mask: fully masked (SKIP), partly masked (DIAGONAL), or unmasked (FULL)."""

    SKIP = "skip"  # no entry is visible: nothing is loaded, nothing is computed
    DIAGONAL = "diagonal"  # some entries are visible: compute, then mask
    FULL = "full"  # every entry is visible: compute, never mask


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that are visible to each query, and the bias added to their scores.

    A query sees a key only if every field that is set allows it. Row r meets the diagonal at column r + N_k − N_q, so
    the diagonal ends at the bottom right corner of S.

    causal      If True, no column to the right of the diagonal is visible.
    key_length  The number of keys. Columns at or beyond this index are padding.
    allowed     A boolean array (N_q, N_k) that is True for each visible key.
    window      A pair (left, right): a row sees the columns from diagonal − left to diagonal + right. A bound of None
                means that there is no limit.
    bias        A function of (row, column), two integer arrays, that returns the values to add to the scores. `row` is
                the query's position among the keys: the column where its row meets the diagonal. −∞ masks a key.

    Without `allowed` and `bias`, each row sees one contiguous range of columns, which interval() computes.
    """

    causal: bool = False
    key_length: int | None = None
    allowed: np.ndarray | None = None
    window: tuple[int | None, int | None] | None = None
    bias: Callable[[np.ndarray, np.ndarray], ArrayLike] | None = None

    def check(self, N_q: int, N_k: int) -> None:
        """Raise an error if the mask does not fit N_q queries and N_k keys."""
        if not isinstance(self.causal, (bool, np.bool_)):
            raise TypeError(f"causal: got {self.causal!r}; it takes True or False")
        if self.key_length is not None:
            whole_number("key_length", self.key_length, low=0, high=N_k)
        if self.window is not None:
            check_window(self.window)
        if self.bias is not None and not callable(self.bias):
            raise TypeError(f"bias: got {self.bias!r}; it takes a function of (row, column), or None")
        if self.allowed is None:
            return
        if not isinstance(self.allowed, np.ndarray) or self.allowed.dtype != bool:
            got = getattr(self.allowed, "dtype", type(self.allowed).__name__)
            raise TypeError(f"mask: got {got}; it takes a boolean array, True where a query may look")
        if self.allowed.shape != (N_q, N_k):
            raise ValueError(f"mask: got shape {self.allowed.shape}; it takes (N_q, N_k) = {(N_q, N_k)}")

    def interval(self, row: RowNumbers, N_q: int, N_k: int) -> tuple[RowNumbers, RowNumbers]:
        """Return (begin, end): the given row sees columns begin … end − 1.

        `row` is a row index or an array of row indices. `allowed` and `bias`, which may mask further columns, are
        ignored. Neither begin nor end ever decreases from one row to the next. A row with begin = end sees nothing.
        """
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        length = N_k if self.key_length is None else self.key_length
        diagonal = row + N_k - N_q
        begin = 0 * row if left is None else np.minimum(np.maximum(diagonal - left, 0), length)
        end = length + 0 * row if right is None else np.minimum(np.maximum(diagonal + right + 1, begin), length)
        return begin, end


NO_MASK = Mask()
CAUSAL = Mask(causal=True)


@dataclass(frozen=True, eq=False)
class Tiling:
    """The N_q × N_k matrix S, cut into T_r × T_c tiles. The last row and the last column of tiles may be ragged."""

    N_q: int
    N_k: int
    B_r: int
    B_c: int
    mask: Mask = NO_MASK

    def __post_init__(self) -> None:
        for name in ("N_q", "N_k", "B_r", "B_c"):
            whole_number(name, getattr(self, name), low=1)
        if not isinstance(self.mask, Mask):
            raise TypeError(
                f"mask: got {type(self.mask).__name__}; it takes a fa2_lab.tiles.Mask, as in Mask(causal=True)"
            )
        self.mask.check(self.N_q, self.N_k)

    @property
    def T_r(self) -> int:
        return cdiv(self.N_q, self.B_r)

    @property
    def T_c(self) -> int:
        return cdiv(self.N_k, self.B_c)

    def rows(self, i: int) -> slice:
        """Return the slice of queries in row block i."""
        return slice(i * self.B_r, min((i + 1) * self.B_r, self.N_q))

    def cols(self, j: int) -> slice:
        """Return the slice of keys in column block j."""
        return slice(j * self.B_c, min((j + 1) * self.B_c, self.N_k))

    def interval(self, row: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """Return (begin, end): the given row sees columns begin … end − 1, as in Mask.interval()."""
        return self.mask.interval(row, self.N_q, self.N_k)

    def visible(self, i: int, j: int) -> np.ndarray:
        """Return a boolean array with the shape of tile (i, j) that is True for each visible entry."""
        rows, cols = self.rows(i), self.cols(j)
        row, col = np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop)
        begin, end = self.interval(row)
        seen = (begin[:, None] <= col) & (col < end[:, None])
        return seen if self.mask.allowed is None else seen & self.mask.allowed[rows, cols]

    def apply_mask(self, s_ij: np.ndarray, i: int, j: int) -> np.ndarray:
        """Return the scores s_ij of tile (i, j) with the mask's bias added and masked scores replaced by −∞."""
        if self.mask.bias is not None:
            rows, cols = self.rows(i), self.cols(j)
            diagonal = np.arange(rows.start, rows.stop)[:, None] + self.N_k - self.N_q  # (B_r, 1)
            s_ij = s_ij + self.mask.bias(diagonal, np.arange(cols.start, cols.stop)[None, :])
        return s_ij if self.kind(i, j) is Tile.FULL else np.where(self.visible(i, j), s_ij, -np.inf)

    def blocks(self, i: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """Return (begin, end): row block i sees columns only in the column blocks begin … end − 1.

        i is an index or an array of indices. `allowed` and `bias`, which may mask further blocks, are ignored.
        """
        begin, _ = self.interval(i * self.B_r)  # the first column that the top row sees
        _, end = self.interval(np.minimum((i + 1) * self.B_r, self.N_q) - 1)  # the end of the bottom row's columns
        return begin // self.B_c, np.where(begin < end, cdiv(end, self.B_c), begin // self.B_c)

    def kind(self, i: int, j: int) -> Tile:
        """Return whether tile (i, j) is SKIP, DIAGONAL or FULL.

        Unless the mask sets `allowed`, the intervals of the tile's top and bottom rows determine its kind.
        """
        rows, cols = self.rows(i), self.cols(j)
        top, bottom = self.interval(rows.start), self.interval(rows.stop - 1)
        if min(cols.stop, bottom[1]) <= max(cols.start, top[0]):  # no row sees columns outside top[0] … bottom[1] − 1
            return Tile.SKIP
        if self.mask.allowed is not None:
            seen = self.visible(i, j)
            return Tile.FULL if seen.all() else Tile.DIAGONAL if seen.any() else Tile.SKIP
        seen_by_all = bottom[0] <= cols.start and cols.stop <= top[1]  # all rows see columns bottom[0] … top[1] − 1
        return Tile.FULL if seen_by_all else Tile.DIAGONAL

    def visited_cols(self, i: int) -> list[int]:
        """Return the indices of the column blocks that row block i has to process."""
        met = range(*map(int, self.blocks(i)))
        return [j for j in met if self.mask.allowed is None or self.kind(i, j) is not Tile.SKIP]

    def visited_rows(self, j: int) -> list[int]:
        """Return the indices of the row blocks that column block j has to process."""
        return [i for i in range(self.T_r) if self.kind(i, j) is not Tile.SKIP]

    def counts(self) -> Counter[Tile]:
        """Return the number of tiles of each kind (SKIP, DIAGONAL, FULL) in the whole matrix."""
        return Counter(self.kind(i, j) for i in range(self.T_r) for j in range(self.T_c))


def check_window(window: object) -> tuple[int | None, int | None]:
    """Return the bounds (left, right) of a window.

    Raise an error unless each bound is None or a whole number of at least 0.
    """
    takes = "(left, right), each a whole number of at least 0, or None for unbounded"
    if not isinstance(window, tuple | list):
        raise TypeError(f"window: got {window!r}; it takes {takes}")
    if len(window) != 2:
        raise ValueError(f"window: got {window!r}; it takes {takes}")
    for side in window:
        if isinstance(side, bool) or not (side is None or isinstance(side, Integral)):
            raise TypeError(f"window: got {window!r}; it takes {takes}")
        if side is not None and side < 0:
            raise ValueError(f"window: got {window!r}; it takes {takes}")
    left, right = (None if side is None else int(side) for side in window)
    return left, right


def real_number(name: str, value: object, takes: str, fits: Callable[[float], bool] = math.isfinite) -> float:
    """Return `value` as a float. Raise an error unless it is a real number and fits(value) is true.

    The error message calls the argument `name` and describes valid values with `takes`.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: got {value!r}; it takes {takes}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: got more than a float can hold; it takes {takes}") from None
    if not fits(number):
        raise ValueError(f"{name}: got {value}; it takes {takes}")
    return number


def whole_number(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as an int. Raise an error unless it is a whole number from `low` to `high`.

    If `high` is None, there is no upper bound. The error message calls the argument `name`.
    """
    takes = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{name}: got {value!r}; it takes {takes}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}: got {value}; it takes {takes}")
    return number
