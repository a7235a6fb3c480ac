"""examine/ describes what a function computes if no known mistake gives its numbers."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examined import enough_time, mask_later, names, scores, softmax  # noqa: F401 — a fixture

from fa2_lab.examine import examine
from fa2_lab.examine.cases import OPEN


def test_a_backward_pass_that_forgets_a_side_of_the_window_is_named():
    def backward(q, k, v, dO, window=None):
        s = scores(q, k)
        left, right = (OPEN, OPEN) if window is None else window
        ahead = torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None] - s.shape[-1] + s.shape[-2]
        s = s.masked_fill(ahead > right, -torch.inf)
        shown = s.masked_fill(ahead < -left, -torch.inf)
        O, P = softmax(shown) @ v, (s - shown.logsumexp(-1, keepdim=True)).exp()  # not 0 left of the window, but large
        dS = P * (dO @ v.mT - (dO * O).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, P.mT @ dO

    found = examine(backward, quick=True, library="torch").findings
    assert ["forward pass: the window has no left side" in str(x) for x in found] == [True], [str(x) for x in found]


def tiled(q, k, v, causal=False, B=16, lost_keys=0, power=1, bias=0.0, extra_keys=0, row_shift=0, v_shift=0):
    """Attention over tiles of keys, in which something is wrong that has no name."""
    q, M, i = q.roll(row_shift, 2), k.shape[2], torch.arange(q.shape[2])[:, None]
    m, l, o = torch.full(q.shape[:3], -torch.inf), torch.zeros(q.shape[:3]), torch.zeros_like(q)
    for j in (torch.arange(t, min(t + B, M) - lost_keys * (M > t + 1)) for t in range(0, M, B)):
        s = scores(q, k[:, :, j]) + bias * j
        s = s.masked_fill(causal & (j > i + M - len(i) + extra_keys), -torch.inf)
        new = torch.maximum(m, s.amax(-1))
        p, alpha = torch.exp(s - finite_maximum(new)[..., None]), torch.exp(m - finite_maximum(new))
        m, l, o = new, alpha * l + p.sum(-1), (alpha**power)[..., None] * o + p @ v[:, :, j - v_shift * (j[0] >= B)]
    return o / torch.where(l == 0, 1.0, l)[..., None]


def finite_maximum(m):
    return torch.where(m.isneginf(), 0.0, m)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(lost_keys=1), "cannot see the last of each tile of 16 keys"),
        (dict(power=2), "In each tile of 16 keys, the weights are multiplied by exp(m up to it)"),
        (dict(bias=0.1), "multiplied by exp(0.1 · j)"),
        (dict(extra_keys=2), "can also see the keys up to the key 2 after its own"),
        (dict(v_shift=16), "reads V of key j − 16 instead of key j, for j in the keys from number 16 on"),
        (dict(row_shift=1), "Row i has the weights of row i -1 (modulo N)"),
    ],
)
def test_weights_that_no_known_mistake_gives_are_described(wrong, says):
    report = examine(partial(tiled, **wrong), quick=True, library="torch")
    assert names(report)[0] == "weights" and set(names(report)) <= {"weights", "empty-mean", "unknown"}, names(report)
    assert says in str(report.findings[0]), str(report.findings[0])


@pytest.mark.parametrize(
    ("P", "says"),
    [
        (lambda S: (1.2 * S).softmax(-1), "The weights are the softmax of scores that are multiplied by 1.2"),
        (lambda S: S.exp() / (S.exp().sum(-1, keepdim=True) + 1), "exp(S − L) with log (exp(L) + 1) instead of L"),
        (lambda S: S.softmax(-1) / 2, "All weights are multiplied by 1/2"),
        (lambda S: S.softmax(-1) * (1 + (torch.arange(S.shape[-1]) < 16)), "counts 2 times the first 16 keys"),
        (
            lambda S: (S * (1 + (torch.arange(S.shape[1]) == S.shape[1] - 1)[:, None, None])).softmax(-1),
            "In the last head, the weights are the softmax of scores that are multiplied by 2",
        ),
        (lambda S: S.clamp(-1.5, 1.5).softmax(-1), "The score τ q·k is cut off at ±1.5"),
    ],
)
def test_other_weights_of_the_same_scores_are_described(P, says):
    report = examine(lambda q, k, v: P(scores(q, k)) @ v, quick=True, library="torch")
    assert says in str(report.findings[0]), str(report.findings[0])


def test_features_that_the_scores_lack_are_described():
    report = examine(lambda q, k, v: softmax(q[..., :-2] @ k[..., :-2].mT * q.shape[-1] ** -0.5) @ v, library="torch")
    assert "The scores lack the features 14 to 15 of 16" in str(report.findings[0]), str(report.findings[0])


def test_keys_left_over_from_a_longer_sequence_are_described():
    def packed(q, k, v, cu_seqlens):
        """The buffers of K and V are not cleared between the sequences."""
        ends, out = cu_seqlens.tolist(), torch.zeros_like(q)
        longest = max(b - a for a, b in pairwise(ends))
        kept = {x: x.new_zeros(longest, *x.shape[1:]) for x in (k, v)}
        for n, (a, b) in enumerate(pairwise(ends)):
            for x, y in kept.items():
                y[: b - a] = x[a:b]
            end = max(b - a for a, b in pairwise(ends[: n + 2]))
            K, V = (y[:end].transpose(0, 1) for y in kept.values())
            out[a:b] = (softmax(scores(q[a:b].transpose(0, 1), K)) @ V).transpose(0, 1)
        return out

    report = examine(packed, quick=True, library="torch")
    assert "keys of earlier sequences that lie beyond the length of its own" in str(report.findings[0]), report.findings


STEPS = {
    "L": lambda x: x.S.logsumexp(-1, keepdim=True),
    "P": lambda x: torch.nan_to_num((x.S - x.L).exp()),
    "dP": lambda x: x.dO @ x.v.mT,
    "D": lambda x: (x.P * x.dP).sum(-1, keepdim=True),
    "dS": lambda x: x.P * (x.dP - x.D),
    "dQ": lambda x: x.tau * x.dS @ x.k,
    "dK": lambda x: x.tau * x.dS.mT @ x.q,
    "dV": lambda x: x.P.mT @ x.dO,
}


GRADIENT_MISTAKES = [  # a step, what is there instead, and what is said of it
    ("dQ", lambda x: x.tau**1.5 * x.dS @ x.k, "dQ is multiplied by √τ"),
    ("dS", lambda x: x.P * (x.dP - x.D) / 3, "dQ and dK are multiplied by 1/3"),
    ("dQ", lambda x: x.tau * x.dS @ x.v, "dQ sums the rows of V instead of those of K"),
    ("dK", lambda x: STEPS["dK"](x).sum(0, keepdim=True).expand_as(x.k), "dK of each batch entry sums the rows of Q"),
    ("dK", lambda x: x.tau * x.dS[:, :, 16:].mT @ x.q[:, :, 16:], "In dK, the first 16 rows cannot see any key"),
    (
        "dV",
        lambda x: (x.P * (1 + (torch.arange(x.k.shape[2]) < 16))).mT @ x.dO,
        "In dV, row i counts 2 times the first 16 keys",
    ),
    (
        "dV",
        lambda x: (x.S / x.tau).softmax(-1).nan_to_num().mT @ x.dO,
        "In dV, the weights are the softmax of scores that",
    ),
    ("dV", lambda x: x.P[:, :1].expand_as(x.P).mT @ x.dO, "In dV, head i has the weights of head 0"),
    ("dP", lambda x: x.dO @ x.v.roll(1, 2).mT, "dS is P ∘ (dP of the key before − D)"),
    ("dV", lambda x: x.P.mT @ x.dO.clamp(min=0), "dV is not proportional to dO"),
    ("dQ", lambda x: x.tau * STEPS["dQ"](x) * 0.5, "dQ is multiplied by 1/2 · τ"),
    (
        "L",
        lambda x: x.S[..., :16].logsumexp(-1, keepdim=True),
        "the weights are exp(S − L) with L of the first 16 keys alone",
    ),
    (
        "P",
        lambda x: STEPS["P"](x) * (torch.arange(x.k.shape[2]) > 0),
        "In the backward pass, row i cannot see the first key",
    ),
    ("D", lambda x: STEPS["D"](x).roll(-1, 2), "dS is P ∘ (dP − D of the next row)"),
    ("D", lambda x: STEPS["D"](x) * x.tau, "dS is P ∘ (dP − τ · D)"),
    ("dS", lambda x: STEPS["dS"](x).clamp(-0.05, 0.05), "dS is cut off at ±0.05"),
    ("dO", lambda x: torch.ones_like(x.dO), "do not depend on dO"),
    ("dS", lambda x: STEPS["dS"](x).half().float(), "dQ and dK are computed from a dS that is rounded to 11 bits"),
]


@pytest.mark.parametrize(("step", "wrong", "says"), GRADIENT_MISTAKES, ids=[x[2] for x in GRADIENT_MISTAKES])
def test_gradients_that_no_known_mistake_gives_are_described(step, wrong, says):
    def backward(q, k, v, dO, causal=False):
        x = SimpleNamespace(q=q, k=k, v=v, dO=dO, tau=q.shape[-1] ** -0.5)
        x.S = mask_later(scores(q, k)) if causal else scores(q, k)
        for name, how in ({"dO": lambda x: x.dO} | STEPS | {step: wrong}).items():
            setattr(x, name, how(x))
        return x.dQ, x.dK, x.dV

    report = examine(backward, quick=True, library="torch")
    assert names(report)[0] == "gradients", names(report)
    assert says in str(report.findings[0]), str(report.findings[0])


@pytest.mark.parametrize("most", (32, 4096), ids=("refuses a large d", "is NaN"))
def test_wrong_gradients_that_cannot_be_read_out_are_unknown(most):
    """They are NaN, or the function refuses the large head dimension with which they would be read."""

    def backward(q, k, v, dO):
        if q.shape[3] > most:
            raise ValueError("head dimension")
        P, dP = softmax(scores(q, k)), dO @ v.mT
        dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dQ = dS @ k
        return dQ.square() + 1 if most == 32 else dQ * torch.nan, dS.mT @ q, P.mT @ dO

    report = examine(backward, quick=True, library="torch")
    assert "unknown" in names(report) and not report.is_right


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda S, L: L - np.log(S.shape[-1]), "L is L − log N_k"),
        (lambda S, L: S.amax(-1) + torch.log1p((S - S.amax(-1, keepdim=True)).exp().sum(-1)), "L is m + log (1 + l)"),
        (lambda S, L: S[..., 1:].logsumexp(-1), "L is L without the first key"),
        (lambda S, L: L.roll(1, 2), "L is that of the row before"),
        (lambda S, L: L.half().float(), "L is rounded to 11 bits"),
    ],
)
def test_an_l_that_no_known_mistake_gives_is_described(wrong, says):
    def function(q, k, v):
        S = scores(q, k)
        return softmax(S) @ v, wrong(S, S.logsumexp(-1))

    report = examine(function, quick=True, library="torch")
    assert names(report) == ["L-other"] and says in str(report.findings[0]), [str(x) for x in report.findings]


def test_a_backward_pass_with_other_options_than_the_forward_pass_is_named():
    def backward(q, k, v, dO, causal=False, key_lengths=None):
        S = mask_later(scores(q, k)) if causal else scores(q, k)
        P, dP = softmax(S), dO @ v.mT
        dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, P.mT @ dO

    report = examine(backward, quick=True, library="torch")
    assert "wrong forward pass: the lengths of the keys are ignored" in str(report.findings[0]), report.findings[0]
