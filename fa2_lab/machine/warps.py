"""A simulation of one thread block, warp by warp, that counts all traffic through shared memory.

There are two ways to divide a B_r × B_c tile among W warps (figure 3 of the FA2 paper):

split_q  FA2: each warp owns B_r / W rows of Q, S and O, and reads all of K and V. The warps exchange nothing.
split_k  FA1: each warp owns B_c / W of the keys and reads all of Q. The K in the name refers to keys, not to the
         contracted dimension, so the slices of S need not be summed. However, the warps must exchange row maxima and
         row sums, and add up the partial products P_w V_w.

The model counts every element written to or read from shared memory and records every barrier with its reason. Under
both schemes, a tile of K or V is stored in shared memory once, but the schemes differ in how often the tile is read.
For each tile, a warp reads the operands of its matmuls into registers once: its rows of Q or all of Q, and all of K and
V or its slice of them. The warp also keeps its rows of O, l and m in registers. Copies from HBM run asynchronously, so
no warp may rely on them before a barrier, and the model attributes them to COPY instead of a warp. Sums and maxima
within a warp use registers (shuffles) and are not counted. Bank conflicts are not counted either. The arithmetic uses
float64, but the bytes are those of a kernel with 16-bit Q, K and V, and with fp32 statistics and partial results.
"""

from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fa2_lab.machine.io_model import check_tiling
from fa2_lab.reference import checks
from fa2_lab.reference.dropout import NO_DROPOUT
from fa2_lab.reference.online_softmax import SoftmaxState, finite
from fa2_lab.tiles import Tiling, whole_number

BYTES = {"Q": 2, "K": 2, "V": 2, "max": 4, "sum": 4, "PV": 4}
NO_WARP, SEVERAL_WARPS, COPY = -1, -2, -3


class RaceError(RuntimeError):
    """Raised if two warps access the same element with no barrier in between, and at least one of them writes it."""


class SharedMemory:
    """One thread block's arrays in shared memory.

    Each access is counted, and two conflicting accesses without a barrier between them raise a RaceError.
    """

    def __init__(self, **shapes: tuple) -> None:
        self.arrays = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
        self.counts: Counter[tuple] = Counter()  # {(warp, "read" or "write", tensor): elements}
        self.barrier_counts: Counter[str] = Counter()  # {reason for a barrier: number of barriers}
        self._forget_accesses()

    def write(self, warp: int, name: str, where: Any, value: np.ndarray) -> None:
        """Store `value` at [where] in the array `name`. `warp` is the index of the warp that writes, or COPY."""
        self._refuse_race(warp, name, where, self._readers, "writes what another has read")
        self._refuse_race(warp, name, where, self._writers, "writes what another has written")
        self.arrays[name][where] = value
        self._writers[name][where] = warp
        self.counts[warp, "write", name] += self.arrays[name][where].size

    def read(self, warp: int, name: str, where: Any = ...) -> np.ndarray:
        """Copy the elements at [where] in the array `name` into a warp's registers and return the copy."""
        self._refuse_race(warp, name, where, self._writers, "reads what another has written")
        value, seen = self.arrays[name][where].copy(), self._readers[name][where]
        self._readers[name][where] = np.where((seen == NO_WARP) | (seen == warp), warp, SEVERAL_WARPS)
        self.counts[warp, "read", name] += value.size
        return value

    def barrier(self, reason: str) -> None:
        """Make all warps wait for each other, so that each warp can read what the others have written."""
        self.barrier_counts[reason] += 1
        self._forget_accesses()

    def _forget_accesses(self) -> None:
        self._writers, self._readers = (
            {name: np.full(array.shape, NO_WARP) for name, array in self.arrays.items()} for _ in range(2)
        )

    def _refuse_race(self, warp: int, name: str, where: Any, owners: dict, what: str) -> None:
        others = (owners[name][where] != NO_WARP) & (owners[name][where] != warp)
        if np.any(others):
            who = "the copy" if warp == COPY else f"warp {warp}"
            raise RaceError(f"{who} {what} in {name}, with no barrier between")


class BlockRun(NamedTuple):
    """The results of one thread block, and its shared memory with the access counts."""

    O: np.ndarray  # (B_r, d)
    L: np.ndarray  # (B_r,)
    shared: SharedMemory


# The two schemes --------------------------------------------------------------------------------------------


def split_q(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, tiling: Tiling, i: int, W: int, tau: float | None = None
) -> BlockRun:
    """Compute O and L of row block i, with its rows divided among W warps. Each tile requires two barriers."""
    Q, K, V, tau = _check(Q, K, V, tiling, i, W, tau)
    q_i = Q[tiling.rows(i)]
    (b, d), rows_of = q_i.shape, split_evenly(len(q_i), W)
    shared = SharedMemory(Q=(b, d), K=(tiling.B_c, d), V=(tiling.B_c, d))
    _copy(shared, Q=q_i)
    state = [SoftmaxState.empty(rows.stop - rows.start, d) for rows in rows_of]
    for j in tiling.visited_cols(i):
        c = _copy(shared, K=K[tiling.cols(j)], V=V[tiling.cols(j)])
        shared.barrier("the tile is there")
        for w in range(W):
            q_w = shared.read(w, "Q", rows_of[w])
            k_j, v_j = shared.read(w, "K", slice(c)), shared.read(w, "V", slice(c))
            s_w = np.where(tiling.visible(i, j)[rows_of[w]], tau * (q_w @ k_j.T), -np.inf)  # (B_r / W, B_c)
            state[w] = state[w].update(s_w, v_j)  # (B_r / W, d)
        shared.barrier("the tile is free")
    return _gather(state, shared)


def split_k(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, tiling: Tiling, i: int, W: int, tau: float | None = None
) -> BlockRun:
    """Compute O and L of row block i, with the keys of each tile divided among W warps.

    Each tile requires three barriers, and the warps combine their partial results through shared memory.
    """
    Q, K, V, tau = _check(Q, K, V, tiling, i, W, tau)
    q_i = Q[tiling.rows(i)]
    (b, d), rows_of = q_i.shape, split_evenly(len(q_i), W)
    shared = SharedMemory(Q=(b, d), K=(tiling.B_c, d), V=(tiling.B_c, d), max=(W, b), sum=(W, b), PV=(W, b, d))
    _copy(shared, Q=q_i)
    state = [SoftmaxState.empty(rows.stop - rows.start, d) for rows in rows_of]  # softmax state of each warp's own rows
    for j in tiling.visited_cols(i):
        keys = split_evenly(_copy(shared, K=K[tiling.cols(j)], V=V[tiling.cols(j)]), W)
        shared.barrier("the tile is there")
        s = [_slice_of_s(shared, tau, tiling.visible(i, j), keys[w], w) for w in range(W)]
        shared.barrier("row maxima of all warps")
        for w in range(W):
            m_ij = shared.read(w, "max").max(axis=0)  # (B_r,) row maxima of the whole tile, the same in every warp
            p_w = np.exp(s[w] - finite(m_ij)[:, None])  # (B_r, B_c / W)
            shared.write(w, "sum", w, p_w.sum(axis=1))
            shared.write(w, "PV", w, p_w @ shared.read(w, "V", keys[w]))  # (B_r, d), a partial sum
        shared.barrier("row sums and P V of all warps")
        for w in range(W):
            parts = [shared.read(w, name, (slice(None), rows_of[w])).sum(axis=0) for name in ("sum", "PV")]
            state[w] = state[w].merge(SoftmaxState(m_ij[rows_of[w]], *parts))
    return _gather(state, shared)


def _slice_of_s(shared: SharedMemory, tau: float, visible: np.ndarray, keys: slice, w: int) -> np.ndarray:
    """Return the scores (B_r, B_c / W) that warp w computes for a tile, and write their row maxima to shared memory."""
    q_i, k_w = shared.read(w, "Q"), shared.read(w, "K", keys)  # all of Q, and a slice of K
    s_w = np.where(visible[:, keys], tau * (q_i @ k_w.T), -np.inf)
    shared.write(w, "max", w, s_w.max(axis=1, initial=-np.inf))
    return s_w


SCHEMES = {"split_q": split_q, "split_k": split_k}
BARRIERS = {"split_q": 2, "split_k": 3}  # barriers per tile


# Closed formulas for the same counts ------------------------------------------------------------------------


def tile_accesses(scheme: str, b: int, c: int, d: int, W: int) -> Counter[tuple]:
    """Return {(op, tensor): number of elements} for all shared-memory accesses by W warps in one b × c tile.

    `scheme` is "split_q" or "split_k", and `op` is "read" or "write".
    """
    b, c, d, W = (whole_number(name, x, low=1) for name, x in (("b", b), ("c", c), ("d", d), ("W", W)))
    stored = {("write", "K"): c * d, ("write", "V"): c * d}
    if scheme == "split_q":
        return Counter(stored | {("read", "Q"): b * d, ("read", "K"): W * c * d, ("read", "V"): W * c * d})
    if scheme != "split_k":
        raise ValueError(f"scheme: got {scheme!r}; it takes one of {', '.join(SCHEMES)}")
    tile = {("read", "Q"): W * b * d, ("read", "K"): c * d, ("read", "V"): c * d}
    statistics = {("write", "max"): W * b, ("read", "max"): W * W * b, ("write", "sum"): W * b, ("read", "sum"): W * b}
    partials = {("write", "PV"): W * b * d, ("read", "PV"): W * b * d}
    return Counter(stored | tile | statistics | partials)


def access_bytes(scheme: str, b: int, c: int, d: int, W: int) -> int:
    """Return the total size in bytes of the shared-memory accesses that tile_accesses() counts."""
    return sum(n * BYTES[tensor] for (_, tensor), n in tile_accesses(scheme, b, c, d, W).items())


# Helpers ----------------------------------------------------------------------------------------------------


def split_evenly(n: int, W: int) -> list[slice]:
    """Return W contiguous slices of nearly equal length that together cover n rows (or keys)."""
    edges = [n * w // W for w in range(W + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def _copy(shared: SharedMemory, **blocks: np.ndarray) -> int:
    """Copy blocks of equal length from HBM into shared memory and return their length."""
    for name, block in blocks.items():
        shared.write(COPY, name, slice(len(block)), block)
    return len(block)


def _gather(state: list[SoftmaxState], shared: SharedMemory) -> BlockRun:
    O, L = zip(*(s.finalize() for s in state), strict=True)
    return BlockRun(np.concatenate(O), np.concatenate(L), shared)


def _check(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, tiling: Tiling, i: int, W: int, tau: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return Q, K, V and τ after checking all arguments.

    Raise an error unless Q, K and V form one head that matches the tiling, row block i exists, and W is valid.
    """
    Q, K, V, tau = checks.head_inputs(Q, K, V, tau, NO_DROPOUT)
    check_tiling(tiling)
    if (tiling.N_q, tiling.N_k) != (len(Q), len(K)):
        raise ValueError(f"tiling: got one of {tiling.N_q} × {tiling.N_k}; it takes N_q × N_k = {len(Q)} × {len(K)}")
    whole_number("i", i, low=0, high=tiling.T_r - 1)
    whole_number("W", W, low=1, high=32)
    return Q, K, V, tau
