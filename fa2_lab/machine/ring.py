"""A ring of ranks: exact attention over a sequence cut among them, its links counted, its time estimated.

The first half runs the ring in float64 on one head, all ranks in step, and writes down every element that crosses a
link. The second half says the same in closed form: bytes, tiles of each rank, seconds, and how many rows a shard needs
so that its transfer hides under its computation.

Each rank keeps its queries. At each step it hands the block of K and V that it holds to the right. Backward, the
block's dK and dV follow it one step behind and come home in the last one. K and V are sent as they are, dK and dV in
fp32.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np

from fa2_lab.machine.io import tiles_per_row
from fa2_lab.reference import fa2
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.reference.shards import Meeting, halves, meeting, pieces
from fa2_lab.tiles import CAUSAL, NO_MASK, Mask, Tile, Tiling, whole_number

FP32 = 4  # bytes of an element of dK and dV on the links
EARLY = 9 / 16  # of the own causal block: three quarters of its rows, which are computed first
FLOPS = {"forward": 4, "backward": 10}  # for each score and each of the d columns: two products, five products


class Links:
    """What has crossed the links: (rank that sent, "K V" or "dK dV") -> elements."""

    def __init__(self) -> None:
        self.elements: Counter[tuple[int, str]] = Counter()

    def pass_on(self, blocks: list[np.ndarray], what: str) -> list[np.ndarray]:
        """Every rank hands its block to the right: what rank r holds afterwards is what rank r − 1 held."""
        self.elements.update({(rank, what): block.size for rank, block in enumerate(blocks)})
        return [blocks[rank - 1] for rank in range(len(blocks))]


def cut(X: np.ndarray, lengths: Sequence[int], layout: str) -> list[np.ndarray]:
    """Each rank's rows."""
    return [np.concatenate([X[place] for place in places]) for places in pieces(lengths, layout)]


def joined(parts: list[np.ndarray], lengths: Sequence[int], layout: str) -> np.ndarray:
    """The rows of all ranks, back in the order of the sequence."""
    X = np.empty((sum(lengths), *parts[0].shape[1:]))
    for part, places in zip(parts, pieces(lengths, layout), strict=True):
        X[np.concatenate([np.arange(place.start, place.stop) for place in places])] = part
    return X


def forward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    lengths: Sequence[int],
    *,
    layout: str = "zigzag",
    causal: bool = False,
    links: Links,
) -> tuple[np.ndarray, np.ndarray]:
    """O (N, d) and L (N,) of one head, its rows cut among len(lengths) ranks."""
    ranks, d = range(len(lengths)), Q.shape[1]
    q, kv = cut(Q, lengths, layout), cut(np.stack([K, V], 1), lengths, layout)  # (n, d) and (n, 2, d)
    states = [SoftmaxState.reset(len(x), d) for x in q]
    for step in ranks:
        for rank in ranks:
            seen = meeting(lengths, rank, (rank - step) % len(ranks), layout, causal)
            states[rank] = states[rank].merge(part_of(seen, q[rank], kv[rank]))
        if step < ranks[-1]:
            kv = links.pass_on(kv, "K V")
    O, L = zip(*(state.finalize() for state in states), strict=True)
    return joined(list(O), lengths, layout), joined(list(L), lengths, layout)


def part_of(seen: Meeting, q: np.ndarray, kv: np.ndarray) -> SoftmaxState:
    """What a block adds to the state of all of a rank's rows; nothing to those that do not see it."""
    state = SoftmaxState.reset(*q.shape)
    if seen.kind is not Tile.SKIP:
        O, L = fa2.forward(q[seen.queries], kv[seen.keys, 0], kv[seen.keys, 1], B_r=64, B_c=64, mask=mask_of(seen))
        part = SoftmaxState.from_output(O, L)
        state.m[seen.queries], state.l[seen.queries], state.o[seen.queries] = part.m, part.l, part.o
    return state


def backward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    O: np.ndarray,
    L: np.ndarray,
    dO: np.ndarray,
    lengths: Sequence[int],
    *,
    layout: str = "zigzag",
    causal: bool = False,
    links: Links,
) -> tuple[np.ndarray, ...]:
    """dQ, dK and dV of one head: each block by its own keys, and by the O and L of all keys."""
    size = len(lengths)
    rows = list(zip(*(cut(X, lengths, layout) for X in (Q, O, L, dO)), strict=True))
    home = kv = cut(np.stack([K, V], 1), lengths, layout)
    dQ, dKV = [np.zeros_like(r[0]) for r in rows], [np.zeros_like(x) for x in home]
    travelling: list[np.ndarray] = []
    for rank in range(size):
        for seen in halves(lengths[rank], causal):
            add_part(seen, rows[rank], home[rank], dQ[rank], dKV[rank])
    for step in range(1, size):
        kv = links.pass_on(kv, "K V")
        travelling = links.pass_on(travelling, "dK dV") if travelling else [np.zeros_like(x) for x in kv]
        for rank in range(size):
            seen = meeting(lengths, rank, (rank - step) % size, layout, causal)
            add_part(seen, rows[rank], kv[rank], dQ[rank], travelling[rank])
    if travelling:
        dKV = [own + come for own, come in zip(dKV, links.pass_on(travelling, "dK dV"), strict=True)]
    dK_dV = joined(dKV, lengths, layout)
    return joined(dQ, lengths, layout), dK_dV[:, 0], dK_dV[:, 1]


def add_part(seen: Meeting, rows: tuple, kv: np.ndarray, dQ: np.ndarray, dKV: np.ndarray) -> None:
    """Add what those queries and those keys give to dQ and to the block's dK and dV."""
    if seen.kind is Tile.SKIP:
        return
    q, O, L, dO = (x[seen.queries] for x in rows)
    k, v = kv[seen.keys, 0], kv[seen.keys, 1]
    dq, dk, dv = fa2.backward(q, k, v, O, L, dO, B_r=64, B_c=64, mask=mask_of(seen))
    dQ[seen.queries] += dq
    dKV[seen.keys] += np.stack([dk, dv], 1)


def mask_of(seen: Meeting) -> Mask:
    return CAUSAL if seen.kind is Tile.DIAGONAL else NO_MASK


# Bytes --------------------------------------------------------------------------------------------------------


def sent(lengths: Sequence[int], rank: int, direction: str, *, kv_heads: int, d: int, item: int = 2) -> dict[str, int]:
    """Bytes that one rank sends: every block of K and V but its right neighbour's, backward also every dK and dV but
    its own. `item`: bytes of an element of K; `kv_heads`: of all sequences of the batch."""
    check_direction(direction)
    N, size = sum(lengths), len(lengths)
    row = 2 * kv_heads * d  # elements of K and V, or of dK and dV, in one row
    if size == 1:
        return {}
    found = {"K V": (N - lengths[(rank + 1) % size]) * row * item}
    return found | ({"dK dV": (N - lengths[rank]) * row * FP32} if direction == "backward" else {})


def check_direction(direction: str) -> None:
    if direction not in FLOPS:
        raise ValueError(f"direction: got {direction!r}; it takes forward or backward")


# Tiles --------------------------------------------------------------------------------------------------------


def tiles_of(seen: Meeting, B_r: int, B_c: int) -> int:
    """Tiles that one call visits."""
    if seen.kind is Tile.SKIP:
        return 0
    n_q, n_k = (rows.stop - rows.start for rows in (seen.queries, seen.keys))
    return int(tiles_per_row(Tiling(n_q, n_k, B_r, B_c, mask_of(seen))).sum())


def work(lengths: Sequence[int], layout: str, causal: bool, B_r: int = 128, B_c: int = 128) -> np.ndarray:
    """[rank, step]: tiles that a rank visits at each step of the forward, for one head."""
    size = len(lengths)
    steps = [
        [meeting(lengths, rank, (rank - step) % size, layout, causal) for step in range(size)] for rank in range(size)
    ]
    return np.array([[tiles_of(seen, B_r, B_c) for seen in row] for row in steps])


def balance(tiles: np.ndarray) -> float:
    """The share of all ranks' time in which they work, if the one with the most tiles sets the end."""
    most = tiles.sum(axis=1).max()
    return float(tiles.sum() / (len(tiles) * most)) if most else 1.0


# Seconds ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds of one step of a ring whose ranks hold equal shards in zigzag: what computes, and what crosses a link."""

    compute: float
    transfer: float

    @property
    def overlapped(self) -> float:
        """Both at once: the longer one decides."""
        return max(self.compute, self.transfer)

    @property
    def serial(self) -> float:
        return self.compute + self.transfer

    @property
    def hidden(self) -> float:
        """The share of the transfer that costs no time."""
        return min(1.0, self.compute / self.transfer)


def per_row(direction: str, heads: int, kv_heads: int, d: int, causal: bool, item: int = 2) -> tuple[Fraction, int]:
    """(FLOPs of a step for each row squared, bytes for each row): work grows with n², the transfer with n."""
    check_direction(direction)
    scores = Fraction(heads, 2 if causal else 1)
    return FLOPS[direction] * d * scores, 2 * kv_heads * d * (item + (FP32 if direction == "backward" else 0))


def step(rows: int, direction: str, *, flops: float, link: float, **sizes: Any) -> Step:
    """One step with `rows` rows on each rank; `flops` and `link` are what the kernels and the links reach a second.

    sizes: heads, kv_heads, d, causal and, if it is not 2, item.
    """
    rows, (work, moved) = whole_number("rows", rows, low=1), per_row(direction, **sizes)
    return Step(float(work * rows**2) / flops, moved * rows / link)


def smallest_shard(direction: str, *, flops: float, link: float, **sizes: Any) -> int:
    """Rows that a shard needs so that the transfer of a step hides under its computation; d cancels."""
    work, moved = per_row(direction, **sizes)
    return ceil(moved / Fraction(link) * Fraction(flops) / work)
