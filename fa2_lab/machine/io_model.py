"""Exact counts of the elements that standard attention, FA1 and FA2 load and store, and of the operations they perform.

Given a `Tiling` (N_q, N_k, B_r, B_c, mask) and the head dimension d, all formulas return counts for one head. The meter
in `fa2_lab.trace` counts the same quantities while the algorithm runs, and the two counts must agree exactly.
`requests` differs from the meter only for standard attention, whose matmuls load their operands once per tile of the
result. How much of this traffic reaches DRAM depends on the L2 cache, which rates.cost() models.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa2_lab.tiles import Tiling, cdiv, whole_number


@dataclass(frozen=True)
class Traffic:
    """The number of elements (or bytes) loaded and stored per tensor."""

    loads: dict[str, int]
    stores: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.loads.values()) + sum(self.stores.values())

    def map_counts(self, change: Callable[[str, int], int]) -> "Traffic":
        """Return a copy of this traffic with each tensor's count n replaced by change(tensor, n)."""
        parts = ({tensor: change(tensor, n) for tensor, n in part.items()} for part in (self.loads, self.stores))
        return Traffic(*parts)


# Which tiles are visited ------------------------------------------------------------------------------------


def tiles_per_row(tiling: Tiling) -> np.ndarray:
    """Return an array (T_r,) with n_i, the number of column blocks that row block i visits."""
    check_tiling(tiling)
    if tiling.mask.allowed is not None:
        return np.array([len(tiling.visited_cols(i)) for i in range(tiling.T_r)])
    begin, end = tiling.blocks(np.arange(tiling.T_r))
    return end - begin


def keys_per_row(tiling: Tiling) -> np.ndarray:
    """Return an array (T_r,) with the number of keys in the column blocks that row block i visits."""
    if tiling.mask.allowed is not None:
        size = [len(range(tiling.N_k)[tiling.cols(j)]) for j in range(tiling.T_c)]
        return np.array([sum(size[j] for j in tiling.visited_cols(i)) for i in range(tiling.T_r)])
    begin, end = tiling.blocks(np.arange(tiling.T_r))
    return np.minimum(end * tiling.B_c, tiling.N_k) - begin * tiling.B_c


def rows_per_block(tiling: Tiling) -> np.ndarray:
    """Return an array (T_r,) with b_i, the number of queries in row block i. Only the last block may be ragged."""
    return np.minimum(tiling.B_r, tiling.N_q - np.arange(tiling.T_r) * tiling.B_r)


def rows_visited(tiling: Tiling) -> int:
    """Return the number of queries loaded if every visited tile loads its row block (T_c N_q without a mask)."""
    return int(rows_per_block(tiling) @ tiles_per_row(tiling))


def cols_visited(tiling: Tiling) -> int:
    """Return the number of keys loaded if every visited tile loads its column block (T_r N_k without a mask)."""
    return int(keys_per_row(tiling).sum())


def scores_visited(tiling: Tiling) -> int:
    """Return the number of computed entries of S, which are all entries of visited tiles, including masked ones."""
    return int(rows_per_block(tiling) @ keys_per_row(tiling))


# Forward ----------------------------------------------------------------------------------------------------


def standard_forward(tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of standard attention's forward pass, whose three steps write and read all of S and P."""
    q, k, s = _element_counts(tiling, d)
    return Traffic(loads={"Q": q, "K": k, "S": s, "P": s, "V": k}, stores={"S": s, "P": s, "O": q})


def fa1_forward(tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of FA1's Algorithm 2, which never skips a tile, regardless of the mask."""
    q, k, _ = _element_counts(tiling, d)
    T_c, N_q = tiling.T_c, tiling.N_q
    loads = {"K": k, "V": k, "Q": T_c * q, "O": T_c * q, "l": T_c * N_q, "m": T_c * N_q}
    stores = {"O": (T_c + 1) * q, "l": (T_c + 1) * N_q, "m": (T_c + 1) * N_q}
    return Traffic(loads, stores)


def fa2_forward(tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of FA2's Algorithm 1."""
    q, _, _ = _element_counts(tiling, d)
    streamed = cols_visited(tiling) * d
    return Traffic(loads={"Q": q, "K": streamed, "V": streamed}, stores={"O": q, "L": tiling.N_q})


# Backward ---------------------------------------------------------------------------------------------------


def standard_backward(tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of standard attention's backward pass (FA1's Algorithm 3).

    Its five steps read P twice, write dP once and read it once, and write dS once and read it twice.
    """
    q, k, s = _element_counts(tiling, d)
    loads = {"P": 2 * s, "dO": 2 * q, "V": k, "dP": s, "dS": 2 * s, "K": k, "Q": q}
    return Traffic(loads, stores={"dV": k, "dP": s, "dS": s, "dQ": q, "dK": k})


def fa1_backward(tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of FA1's Algorithm 4."""
    q, k, _ = _element_counts(tiling, d)
    T_c, N_q = tiling.T_c, tiling.N_q
    loads = {"K": k, "V": k} | dict.fromkeys(("Q", "O", "dO", "dQ"), T_c * q) | dict.fromkeys(("l", "m"), T_c * N_q)
    return Traffic(loads, stores={"dQ": (T_c + 1) * q, "dK": 2 * k, "dV": 2 * k})


def fa2_backward(tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of FA2's Algorithm 2."""
    q, k, _ = _element_counts(tiling, d)
    rows = rows_visited(tiling)
    loads = {"K": k, "V": k, "O": q, "dO": q + rows * d, "Q": rows * d, "dQ": rows * d, "L": rows, "D": rows}
    return Traffic(loads, stores={"D": tiling.N_q, "dQ": q + rows * d, "dK": k, "dV": k})


TRAFFIC_FORMULAS = {
    ("standard", "forward"): standard_forward,
    ("standard", "backward"): standard_backward,
    ("fa1", "forward"): fa1_forward,
    ("fa1", "backward"): fa1_backward,
    ("fa2", "forward"): fa2_forward,
    ("fa2", "backward"): fa2_backward,
}


def traffic(algorithm: str, direction: str, tiling: Tiling, d: int) -> Traffic:
    """Return the traffic of `algorithm` ("standard", "fa1" or "fa2") in `direction` ("forward" or "backward")."""
    return _formula(TRAFFIC_FORMULAS, algorithm, direction)(tiling, d)


GEMM_TILE = 128  # one thread block of a matmul computes this many rows and columns of the result
MATMULS = {  # standard attention's matmuls, each with its two operands and the rows and columns of its result
    "forward": [("Q", "K", "N_q", "N_k"), ("P", "V", "N_q", "d")],
    "backward": [("P", "dO", "N_k", "d"), ("dO", "V", "N_q", "N_k"), ("dS", "K", "N_q", "d"), ("dS", "Q", "N_k", "d")],
}


def requests(algorithm: str, direction: str, tiling: Tiling, d: int) -> Traffic:
    """Return the traffic between the SMs and L2.

    A matmul loads its left operand once per column of result tiles, and its right operand once per row of result tiles,
    so standard attention loads Q, K and V many times. For FA1 and FA2, this function returns the same as traffic().
    """
    moved = traffic(algorithm, direction, tiling, d)
    if algorithm != "standard":
        return moved
    loads, size = Counter(moved.loads), tensor_sizes(tiling, d)
    tiles = {name: cdiv(n, GEMM_TILE) for name, n in (("N_q", tiling.N_q), ("N_k", tiling.N_k), ("d", d))}
    for left, right, rows, columns in MATMULS[direction]:
        loads[left] += (tiles[columns] - 1) * size[left]
        loads[right] += (tiles[rows] - 1) * size[right]
    return Traffic(dict(loads), moved.stores)


def tensor_sizes(tiling: Tiling, d: int) -> dict[str, int]:
    """Return {tensor: number of elements in one head} for all tensors."""
    q, k, s = _element_counts(tiling, d)
    rows, columns, scores = ("Q", "O", "dO", "dQ"), ("K", "V", "dK", "dV"), ("S", "P", "dS", "dP")
    row_statistics = dict.fromkeys(("l", "m", "L", "D"), tiling.N_q)
    return dict.fromkeys(rows, q) | dict.fromkeys(columns, k) | dict.fromkeys(scores, s) | row_statistics


def limit_passes(moved: Traffic, passes: int, size: dict[str, int]) -> Traffic:
    """Return the traffic `moved`, with each tensor loaded and stored at most `passes` times.

    A cache is assumed to absorb all further loads and stores.
    """
    return moved.map_counts(lambda tensor, n: min(n, passes * size[tensor]))


# The scores, the row statistics and dQ, which is accumulated in HBM
FP32_TENSORS = "S", "dP", "l", "m", "L", "D", "dQ"


def in_bytes(algorithm: str, moved: Traffic) -> Traffic:
    """Return the traffic `moved`, converted from elements to bytes.

    The tensors in FP32_TENSORS have four bytes per element, and so does O in FA1, because it is read again. All other
    tensors have two bytes per element.
    """
    wide = (*FP32_TENSORS, "O") if algorithm == "fa1" else FP32_TENSORS
    return moved.map_counts(lambda tensor, n: n * (4 if tensor in wide else 2))


# Operations -------------------------------------------------------------------------------------------------
#
# The following functions count the operations in a tile of b rows and c columns, without dropout. Every count is a
# linear combination of b·c, b and c, so the same formula with Σ b·c, Σ b and Σ c gives the total over all tiles.


def fa1_forward_tile(bc: int, b: int, c: int, d: int) -> Counter[str]:
    """Count the operations in lines 10 to 16 of FA1's Algorithm 2 for a b × c tile, which has bc = b · c scores.

    These lines rescale both o and the new term and divide both by l.
    """
    add, multiply = 2 * bc + b * d + 2 * b, bc + 2 * b * d + 5 * b
    return Counter(matmul=4 * bc * d, exp=bc + 2 * b, add=add, multiply=multiply, maximum=bc, divide=b)


def fa2_forward_tile(bc: int, b: int, c: int, d: int) -> Counter[str]:
    """Count the operations in lines 8 to 10 of FA2's Algorithm 1 for a b × c tile, which has bc = b · c scores.

    These lines rescale o by α but do not divide it by l (the paper's tweak 1).
    """
    add, multiply = 2 * bc + b * d + b, bc + b * d + b
    return Counter(matmul=4 * bc * d, exp=bc + b, add=add, multiply=multiply, maximum=bc)


def fa2_forward_end(b: int, d: int) -> Counter[str]:
    """Count the operations in lines 12 and 13 of FA2's Algorithm 1 for a row block of b rows.

    These lines divide each row of o by l and compute L = m + log l.
    """
    return Counter(divide=b, multiply=b * d, log=b, add=b)


def fa1_backward_tile(bc: int, b: int, c: int, d: int) -> Counter[str]:
    """Count the operations in lines 11 to 22 of FA1's Algorithm 4 for a b × c tile, which has bc = b · c scores.

    These lines recompute D in every tile and divide P by l.
    """
    add, multiply = 2 * bc + 2 * b * d + 2 * c * d - b, 3 * bc + 2 * b * d + c * d
    return Counter(matmul=10 * bc * d, exp=bc, add=add, multiply=multiply, divide=b)


def fa2_backward_tile(bc: int, b: int, c: int, d: int) -> Counter[str]:
    """Count the operations in lines 10 to 16 of FA2's Algorithm 2 for a b × c tile, which has bc = b · c scores.

    These operations are five matmuls, one exponential per score, and the additions and multiplications between them.
    """
    add, multiply = 2 * bc + b * d + 2 * c * d, 2 * bc + b * d + c * d
    return Counter(matmul=10 * bc * d, exp=bc, add=add, multiply=multiply)


def fa2_backward_start(N_q: int, d: int) -> Counter[str]:
    """Count the operations in line 4 of FA2's Algorithm 2, D = rowsum(dO ∘ O), which runs once."""
    return Counter(multiply=N_q * d, add=N_q * (d - 1))


TILE_FORMULAS = {
    ("fa1", "forward"): fa1_forward_tile,
    ("fa1", "backward"): fa1_backward_tile,
    ("fa2", "forward"): fa2_forward_tile,
    ("fa2", "backward"): fa2_backward_tile,
}


def tile_operations(algorithm: str, direction: str, b: int, c: int, d: int) -> Counter[str]:
    """Return {kind: number of operations} for one tile of b rows and c columns."""
    b, c, d = (whole_number(name, x, low=1) for name, x in (("b", b), ("c", c), ("d", d)))
    return _formula(TILE_FORMULAS, algorithm, direction)(b * c, b, c, d)


def operations(algorithm: str, direction: str, tiling: Tiling, d: int) -> Counter[str]:
    """Return {kind: number of operations} for a whole head.

    `algorithm` is "fa1" or "fa2", and `direction` is "forward" or "backward".
    """
    _element_counts(tiling, d)
    per_tile = _formula(TILE_FORMULAS, algorithm, direction)
    if algorithm == "fa1":  # FA1 does not skip tiles
        return per_tile(tiling.N_q * tiling.N_k, tiling.T_c * tiling.N_q, tiling.T_r * tiling.N_k, d)
    tiles = per_tile(scores_visited(tiling), rows_visited(tiling), cols_visited(tiling), d)
    if direction == "backward":
        return tiles + fa2_backward_start(tiling.N_q, d)
    started = rows_per_block(tiling)[tiles_per_row(tiling) > 0]  # a row block without tiles is not divided by l
    return tiles + fa2_forward_end(int(started.sum()), d)


def other_operations(ops: Counter[str]) -> int:
    """Return the number of operations in `ops` that are neither exponentials nor part of a matmul."""
    return sum(n for kind, n in ops.items() if kind not in ("matmul", "exp"))


# Checks -----------------------------------------------------------------------------------------------------


def _formula(forms: dict, algorithm: str, direction: str) -> Callable:
    """Return the formula for an algorithm and a direction, or raise an error that lists the valid names."""
    if (algorithm, direction) not in forms:
        algorithms = ", ".join(dict.fromkeys(name for name, _ in forms))
        takes = f"algorithm one of {algorithms} and direction forward or backward"
        raise ValueError(f"algorithm, direction: got {algorithm!r}, {direction!r}; it takes {takes}")
    return forms[algorithm, direction]


def _element_counts(tiling: Tiling, d: int) -> tuple[int, int, int]:
    """Return the element counts of Q (same for O, dQ, dO), K (same for V, dK, dV) and S (same for P, dP, dS)."""
    check_tiling(tiling)
    d = whole_number("d", d, low=1)
    return tiling.N_q * d, tiling.N_k * d, tiling.N_q * tiling.N_k


def check_tiling(tiling: Tiling) -> None:
    """Raise a TypeError unless `tiling` is a Tiling."""
    if not isinstance(tiling, Tiling):
        raise TypeError(f"tiling: got {type(tiling).__name__}; it takes a fa2_lab.tiles.Tiling")
