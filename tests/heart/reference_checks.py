"""Check each stage of the NumPy reference on one head, for any sizes, mask and scores."""

from dataclasses import dataclass

import numpy as np
import oracle

from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.reference.dropout import Dropout
from fa2_lab.reference.scores import ScoreOptions, sink_backward
from fa2_lab.tiles import Mask

BIASES = dict(  # functions of (row, column)
    alibi=lambda row, column: -0.3 * (row - column),
    one_key=lambda row, column: np.where(column == 4, 40.0, 0.0) + 0 * row,
    rows_without_keys=lambda row, column: np.where((row % 5 == 2) | ((row ^ column) % 3 == 1), -np.inf, 0.5),
    tiles_without_keys=lambda row, column: np.where((column >= 6) & (row >= column), 0.1 * column, -np.inf),
)


@dataclass(frozen=True)
class Case:
    """One head: its sizes, its mask, its dropout, and how large its scores get."""

    N_q: int = 13
    N_k: int = 9
    d: int = 5
    B_r: int = 4
    B_c: int = 3
    causal: bool = False
    key_length: int | None = None
    allowed_seed: int | None = None
    p: float = 0.0
    scale: float | None = None
    splits: int = 3
    size: float = 1.0
    seed: int = 0
    window: tuple | None = None
    softcap: float | None = None
    sink: float | None = None
    bias: str | None = None  # its name in BIASES

    def tensors(self):
        """Return random Q, K, V and dO."""
        draw = np.random.default_rng(self.seed).standard_normal
        Q, K, V, dO = (draw((n, self.d)) for n in (self.N_q, self.N_k, self.N_k, self.N_q))
        return self.size * Q, self.size * K, V, dO

    def allowed(self):
        if self.allowed_seed is None:
            return None
        return np.random.default_rng(self.allowed_seed).random((self.N_q, self.N_k)) < 0.6

    def seen(self):
        return oracle.visible(self.N_q, self.N_k, self.causal, self.key_length, self.allowed(), self.window)

    def bias_values(self):
        return None if self.bias is None else BIASES[self.bias](*oracle.positions(self.N_q, self.N_k))

    def mask(self):
        return Mask(self.causal, self.key_length, self.allowed(), self.window, BIASES.get(self.bias))


# Small cases that together reach every branch. Each has more than one row block and more than one column block.
CORNERS = [
    Case(),
    Case(N_q=8, N_k=8, d=4, B_r=4, B_c=2, causal=True),
    Case(N_q=5, N_k=11, causal=True, p=0.4),
    Case(N_q=11, N_k=5, causal=True),
    Case(N_q=9, N_k=9, B_r=2, B_c=5, causal=True, key_length=6, p=0.3),
    Case(key_length=0),
    Case(allowed_seed=1, p=0.5, scale=0.3),
    Case(size=3.0, splits=5),
    Case(N_q=11, N_k=11, B_r=2, B_c=3, window=(3, 2)),
    Case(N_q=12, N_k=17, B_r=4, B_c=3, window=(4, None), causal=True, key_length=5),
    Case(N_q=14, N_k=9, B_r=3, B_c=2, window=(0, 1), allowed_seed=2, p=0.3, softcap=0.7, sink=0.4),
    Case(bias="alibi", causal=True),
    Case(N_q=5, N_k=14, bias="one_key", window=(6, 2), softcap=1.5),
    Case(N_q=16, N_k=12, bias="rows_without_keys", p=0.3, softcap=0.7, key_length=10),
    Case(N_q=11, N_k=14, bias="tiles_without_keys", sink=0.4, softcap=2.0),
]


def check_one_head(case: Case, tolerance=1e-12, floor=0.0) -> None:
    """Assert that each stage agrees with the dense result and its gradients.

    Errors are relative to their norms, or to `floor` if it is larger. If dP and D nearly cancel, as in a row with one
    key beside a small sink, an error of 1e-15 of P ∘ dP is allowed as well (if `tolerance` is 1e-12).
    """
    Q, K, V, dO = case.tensors()
    dropout = Dropout(case.p, seed=77, batch=1, head=2)
    Z = dropout.z(slice(0, case.N_q), slice(0, case.N_k))
    if Z is not None:
        assert set(np.unique(Z)) <= {0.0, 1 / (1 - case.p)}
    truth = case.softcap, case.sink, case.bias_values()
    O, L, *gradients = oracle.one_head(Q, K, V, case.seen(), case.scale, Z, dO, *truth)
    scoring = dict(tau=case.scale, score_options=ScoreOptions(case.softcap, case.sink))
    mask_options = dict(scoring, mask=case.mask())
    options = dict(mask_options, dropout=dropout)
    blocks = dict(B_r=case.B_r, B_c=case.B_c)

    O_naive, P = naive.forward(Q, K, V, **options)
    O_1, l, m = fa1.forward(Q, K, V, **blocks, **options)
    O_2, L_2 = fa2.forward(Q, K, V, **blocks, **options)
    O_split, L_split = fa2.forward_split_keys(Q, K, V, splits=case.splits, **blocks, **options)
    with np.errstate(divide="ignore"):
        L_1 = m + np.log(l)
    for name, got, want in [
        ("naive O", O_naive, O),
        ("fa1 O", O_1, O),
        ("fa1 L", L_1, L),
        ("fa2 O", O_2, O),
        ("fa2 L", L_2, L),
        ("split O", O_split, O),
        ("split L", L_split, L),
    ]:
        assert oracle.relative_error(got, want) <= tolerance, (name, oracle.relative_error(got, want), case)

    gradients_of = {
        "naive": naive.backward(Q, K, V, P, dO, **scoring, dropout=dropout),
        "fa1": fa1.backward(Q, K, V, O_1, l, m, dO, **blocks, **options),
        "fa2": fa2.backward(Q, K, V, O_2, L_2, dO, **blocks, **options),
    }
    if case.p == 0:
        O_lin, L_lin = naive.forward_linear_memory(Q, K, V, **mask_options)
        assert oracle.relative_error(O_lin, O) <= tolerance and oracle.relative_error(L_lin, L) <= tolerance, case
        gradients_of["linear memory"] = naive.backward_linear_memory(Q, K, V, O_lin, L_lin, dO, **mask_options)
    # The norms of dQ and dK if P ∘ dP took the place of dS = P ∘ (dP − D), so that nothing could cancel
    scale = case.d**-0.5 if case.scale is None else case.scale
    P_dP = scale * P * (np.abs(dO) @ np.abs(V).T)
    uncancelled = dict(dQ=np.linalg.norm(P_dP @ np.abs(K)), dK=np.linalg.norm(P_dP.T @ np.abs(Q)), dV=0.0)
    for name, got in gradients_of.items():
        for letter, g, want in zip(("dQ", "dK", "dV"), got, gradients, strict=False):
            error = oracle.relative_error(g, want, max(floor, 1e-3 * uncancelled[letter]))
            assert error <= tolerance, (name, letter, error, case)
    if case.sink is not None:
        error = abs(sink_backward(case.sink, O_2, L_2, dO) - gradients[3]) / (np.abs(dO * O).sum() or 1.0)
        assert error <= tolerance, ("dsink", error, case)
