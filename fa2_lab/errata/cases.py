"""Small problems for measuring errata, with true results from dense float64 attention and central differences."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import one_head
from fa2_lab.reference.naive import safe_softmax


def distance(x: ArrayLike, truth: ArrayLike) -> float:
    """Return the largest error divided by the largest finite magnitude in `truth`.

    Return infinity if x and `truth` differ in shape, or in where they are infinite.
    """
    x, truth = np.asarray(x, dtype=float), np.asarray(truth, dtype=float)
    finite = np.isfinite(truth)
    if x.shape != truth.shape or not np.array_equal(x[~finite], truth[~finite]):
        return np.inf
    return float(np.abs(x[finite] - truth[finite]).max() / np.abs(truth[finite]).max())


def central_differences(loss: Callable[[np.ndarray], float], X: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Return ∂loss/∂X, computed entry by entry with central differences and without any formula from the papers."""
    gradient = np.empty_like(X)
    for at in np.ndindex(X.shape):
        step = np.zeros_like(X)
        step[at] = h
        gradient[at] = (loss(X + step) - loss(X - step)) / (2 * h)
    return gradient


class Small:
    """A small problem with random Q, K, V and dO (N, d), and the results of dense attention. The loss is Σ dO ∘ O."""

    def __init__(self, N: int, d: int, tau: float = 0.5, causal: bool = False, seed: int = 0) -> None:
        self.N, self.d, self.tau = N, d, tau
        self.Q, self.K, self.V, self.dO = 1.5 * np.random.default_rng(seed).standard_normal((4, N, d))
        self.visible = np.tri(N, dtype=bool) if causal else np.ones((N, N), dtype=bool)

    def output(self, Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> np.ndarray:
        return safe_softmax(np.where(self.visible, self.tau * Q @ K.T, -np.inf)) @ V

    def computed(self, *mistakes: str, B: int = 2, output: str = "O") -> np.ndarray:
        """Return `output` ("O" or a gradient such as "dQ"), computed in B × B tiles with the named mistakes."""
        case = one_head(self.Q, self.K, self.V, self.dO, scale=self.tau, causal=not self.visible.all())
        return attention(case, mistakes, B, gradients=output != "O")[output][0, 0]

    @cached_property
    def S(self) -> np.ndarray:
        return np.where(self.visible, self.tau * self.Q @ self.K.T, -np.inf)

    @cached_property
    def P(self) -> np.ndarray:
        return safe_softmax(self.S)

    @cached_property
    def O(self) -> np.ndarray:
        return self.P @ self.V

    @cached_property
    def dS(self) -> np.ndarray:
        """The gradient with respect to the scores, P ∘ (dP − D)."""
        dP = self.dO @ self.V.T
        return self.P * (dP - (self.P * dP).sum(axis=1, keepdims=True))

    @cached_property
    def dQ(self) -> np.ndarray:
        return central_differences(lambda Q: float((self.dO * self.output(Q, self.K, self.V)).sum()), self.Q)

    @cached_property
    def dK(self) -> np.ndarray:
        return central_differences(lambda K: float((self.dO * self.output(self.Q, K, self.V)).sum()), self.K)


class TwoBlocks:
    """The papers' example of keys that are split into two blocks, with m and ℓ after each block."""

    def __init__(self, case: Small, cut: int) -> None:
        self.O = case.O
        self.S1, self.S2 = case.S[:, :cut], case.S[:, cut:]
        self.V1, self.V2 = case.V[:cut], case.V[cut:]
        self.m1 = self.S1.max(axis=1, keepdims=True)
        self.m2 = np.maximum(self.m1, self.S2.max(axis=1, keepdims=True))
        self.l1 = np.exp(self.S1 - self.m1).sum(axis=1, keepdims=True)
        self.l2 = np.exp(case.S - self.m2).sum(axis=1, keepdims=True)
        self.L = self.m2 + np.log(self.l2)
        self.e1 = np.exp(self.S1 - self.m1)  # the exponentials of each block, relative to the maximum so far
        self.e2 = np.exp(self.S2 - self.m2)
        self.O1 = self.e1 @ self.V1 / self.l1  # the output for the first block alone
