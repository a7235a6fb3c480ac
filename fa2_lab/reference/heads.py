"""Batches and heads, in one place: every stage is written for one head, and here it is run over all of them.

Grouped heads: query head h reads key head h // group, nothing is copied, and dK and dV are summed over the group.
"""

import numpy as np

from fa2_lab.reference import checks, fa1, fa2, naive
from fa2_lab.reference.dropout import Dropout
from fa2_lab.reference.online_softmax import nonzero
from fa2_lab.reference.scores import sink_backward
from fa2_lab.tiles import Mask, whole_number
from fa2_lab.trace import UNWATCHED, Trace

STAGES = ("naive", "fa1", "fa2")


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    stage: str = "fa2",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    key_lengths: np.ndarray | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    B_r: int = 64,
    B_c: int = 64,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray]:
    """O (batch, heads, N_q, d) and L (batch, heads, N_q) of any stage; k and v may have fewer heads than q."""
    q, k, v = checks.qkv_heads(q, k, v)
    lengths = _check(stage, key_lengths, k)
    sink_of = _check_sinks(sinks, q)
    group = q.shape[1] // k.shape[1]
    O, L = np.empty_like(q), np.empty(q.shape[:3])
    for b in trace.parallel("b", range(q.shape[0])):
        for h in trace.parallel("h", range(q.shape[1])):
            qkv = q[b, h], k[b, h // group], v[b, h // group]
            mask, dropout = Mask(causal, lengths[b], window=window), Dropout(dropout_p, seed, b, h)
            common = dict(tau=scale, mask=mask, softcap=softcap, sink=sink_of[h], dropout=dropout, trace=trace)
            O[b, h], L[b, h] = _forward(stage, *qkv, B_r, B_c, common)
    return O, L


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    O: np.ndarray,
    L: np.ndarray,
    dO: np.ndarray,
    *,
    stage: str = "fa2",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    key_lengths: np.ndarray | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    B_r: int = 64,
    B_c: int = 64,
    trace: Trace = UNWATCHED,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ, dK, dV of any stage from the O and L of its forward. Those of the sinks: sinks_backward."""
    q, k, v = checks.qkv_heads(q, k, v)
    O, dO = checks.like(q, O=O, dO=dO)
    (L,) = checks.per_row(q, L=L)
    lengths = _check(stage, key_lengths, k)
    sink_of = _check_sinks(sinks, q)
    group = q.shape[1] // k.shape[1]
    dQ, dK, dV = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in trace.parallel("b", range(q.shape[0])):
        for h in trace.parallel("h", range(q.shape[1])):
            qkv = q[b, h], k[b, h // group], v[b, h // group]
            mask, dropout = Mask(causal, lengths[b], window=window), Dropout(dropout_p, seed, b, h)
            common = dict(tau=scale, mask=mask, softcap=softcap, sink=sink_of[h], dropout=dropout, trace=trace)
            dQ[b, h], dk, dv = _backward(stage, *qkv, O[b, h], L[b, h], dO[b, h], B_r, B_c, common)
            dK[b, h // group] += dk
            dV[b, h // group] += dv
    return dQ, dK, dV


def sinks_backward(sinks: np.ndarray, O: np.ndarray, L: np.ndarray, dO: np.ndarray) -> np.ndarray:
    """The gradient of every head's sink from the O and L of a forward, summed over the batch."""  # (heads,)
    O = checks.real_array("O", O, 4)
    heads = enumerate(_check_sinks(sinks, O))
    return np.array([0.0 if s is None else sink_backward(s, O[:, h], L[:, h], dO[:, h]) for h, s in heads])


def _forward(
    stage: str, Q: np.ndarray, K: np.ndarray, V: np.ndarray, B_r: int, B_c: int, common: dict
) -> tuple[np.ndarray, np.ndarray]:
    if stage == "naive":
        O, _ = naive.forward(Q, K, V, **common)
        scores = {name: common[name] for name in ("tau", "mask", "softcap", "sink")}
        return O, naive.forward_linear_memory(Q, K, V, **scores)[1]
    if stage == "fa1":
        O, l, m = fa1.forward(Q, K, V, B_r=B_r, B_c=B_c, **common)
        return O, m + np.log(nonzero(l))
    return fa2.forward(Q, K, V, B_r=B_r, B_c=B_c, **common)


def _backward(
    stage: str,
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    O: np.ndarray,
    L: np.ndarray,
    dO: np.ndarray,
    B_r: int,
    B_c: int,
    common: dict,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if stage == "naive":
        _, P = naive.forward(Q, K, V, **common | dict(trace=UNWATCHED))
        del common["mask"], common["sink"]  # P holds them already
        return naive.backward(Q, K, V, P, dO, **common)
    del common["sink"]  # L holds it already
    if stage == "fa1":  # l = 1 and m = L say the same as the l and m of the forward: exp(S − m) / l = exp(S − L)
        l = np.where(np.isneginf(L), 0.0, 1.0)
        return fa1.backward(Q, K, V, O, l, L, dO, B_r=B_r, B_c=B_c, **common)
    return fa2.backward(Q, K, V, O, L, dO, B_r=B_r, B_c=B_c, **common)


def _check(stage: str, key_lengths: np.ndarray | None, k: np.ndarray) -> list:
    """The key length of every batch entry, after checking stage and lengths."""
    if stage not in STAGES:
        raise ValueError(f"stage: got {stage!r}; it takes one of {', '.join(STAGES)}")
    if key_lengths is None:
        return [None] * k.shape[0]
    lengths = np.asarray(key_lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"key_lengths: got dtype {lengths.dtype}; it takes whole numbers")
    if lengths.shape != k.shape[:1]:
        raise ValueError(f"key_lengths: got shape {lengths.shape}; it takes (batch,) = {k.shape[:1]}")
    return [whole_number("key_lengths", int(n), low=0, high=k.shape[2]) for n in lengths]


def _check_sinks(sinks: np.ndarray | None, q: np.ndarray) -> list:
    """The sink of every query head; one of −∞ is none."""
    if sinks is None:
        return [None] * q.shape[1]
    sinks = checks.same_shape("sinks", sinks, q.shape[1:2], "(heads,)")
    if not (sinks < np.inf).all():
        raise ValueError(f"sinks: got {sinks.max()}; it takes numbers below infinity")
    return [None if sink == -np.inf else sink for sink in sinks]
