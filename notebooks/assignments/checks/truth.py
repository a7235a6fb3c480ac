"""Right attention in float64, as the examiner has it, and the cases that students' functions are checked on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import SystemRandom

import numpy as np

from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import one_head
from fa2_lab.tiles import Mask, Tiling


@dataclass(frozen=True)
class Case:
    """One head and how it is cut."""

    N_q: int = 8
    N_k: int = 8
    d: int = 4
    B_r: int = 4
    B_c: int = 2
    causal: bool = False
    size: float = 1.0
    seed: int = 0
    tau: float = 0.4  # not 1/√d of any case: a τ of one's own would go unseen
    shift: float = 0.0  # added to Q and taken from K: with 100, all scores are far below what exp can take

    def tensors(self) -> list[np.ndarray]:
        """Q, K, V, dO."""
        draw = np.random.default_rng(self.seed).standard_normal
        Q, K, V, dO = (draw((n, self.d)) for n in (self.N_q, self.N_k, self.N_k, self.N_q))
        return [self.size * Q + self.shift, self.size * K - self.shift, V, dO]

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.N_q, self.N_k, self.B_r, self.B_c, Mask(causal=self.causal))

    @property
    def seen(self) -> np.ndarray:
        """True where a query may look."""
        return visible(self.N_q, self.N_k, self.causal)

    def __str__(self) -> str:
        mask = ", causal" if self.causal else ""
        large = f", scores {self.size**2:g} times larger" if self.size != 1 else ""
        large += ", all scores far below zero" if self.shift else ""
        return f"N_q = {self.N_q}, N_k = {self.N_k}, d = {self.d}, tiles of {self.B_r} × {self.B_c}{mask}{large}"


def varied(case: Case, seed: int) -> Case:
    """Other numbers, and other lengths that end in the second half of the same tile. Seed 0 is the case itself."""
    if not seed:
        return case
    draw = np.random.default_rng([seed, case.seed])

    def other(N: int, B: int) -> int:
        return N // B * B + int(draw.integers(B // 2, B)) if N % B else N

    N_q, N_k = other(case.N_q, case.B_r), other(case.N_k, case.B_c)
    N_k = N_q if case.N_k == case.N_q else N_k
    return replace(case, N_q=N_q, N_k=N_k, seed=int(draw.integers(2**31)))


def unforeseen(cases) -> list[Case]:
    """The same sizes with numbers that no notebook can have been written for."""
    return [replace(case, seed=SystemRandom().randrange(2**31)) for case in cases]


def visible(N_q: int, N_k: int, causal: bool) -> np.ndarray:
    """True where a query may look: column c for row r if c ≤ r + N_k − N_q."""
    row, col = np.arange(N_q)[:, None], np.arange(N_k)[None, :]
    return (col <= row + N_k - N_q) if causal else np.ones((N_q, N_k), dtype=bool)


@cache
def outputs(case: Case) -> dict[str, np.ndarray]:
    """O, L, dQ, dK and dV of a case."""
    return attended(*case.tensors(), scale=case.tau, causal=case.causal)


def attended(Q, K, V, dO=None, **options) -> dict[str, np.ndarray]:
    """O and L of one head, and dQ, dK and dV if dO is given, with the examiner's options."""
    found = attention(one_head(Q, K, V, dO, **options), gradients=dO is not None)
    return {name: x[0, 0] for name, x in found.items() if name != "largest"}
