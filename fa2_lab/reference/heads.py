"""Run a stage of the NumPy reference, which is written for a single head, on all heads of a batch.

With grouped-query attention, query head h reads K/V head h // group. K and V are not copied, and dK and dV are summed
over the query heads of a group.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fa2_lab.reference import checks, fa1, fa2, naive
from fa2_lab.reference.dropout import Dropout
from fa2_lab.reference.online_softmax import nonzero
from fa2_lab.reference.scores import ScoreOptions, sink_backward
from fa2_lab.tiles import Mask, whole_number
from fa2_lab.trace import UNWATCHED, Trace

STAGES = ("naive", "fa1", "fa2")
QKV = tuple[np.ndarray, np.ndarray, np.ndarray]


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, stage: str = "fa2", B_r: int = 64, B_c: int = 64, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Run the forward pass of a stage on all heads and return O (batch, heads, N_q, d) and L (batch, heads, N_q).

    k and v may have fewer heads than q. Any other keyword arguments are passed on to each_head().
    """
    q, k, v = _check(stage, q, k, v)
    O, L = np.empty_like(q), np.empty(q.shape[:3])
    for b, h, _, qkv, common in each_head(q, k, v, **options):
        if stage == "naive":
            O[b, h], _ = naive.forward(*qkv, **common)
            scoring = {name: common[name] for name in ("tau", "mask", "score_options")}
            _, L[b, h] = naive.forward_linear_memory(*qkv, **scoring)
        elif stage == "fa1":
            O[b, h], l, m = fa1.forward(*qkv, B_r=B_r, B_c=B_c, **common)
            L[b, h] = m + np.log(nonzero(l))
        else:
            O[b, h], L[b, h] = fa2.forward(*qkv, B_r=B_r, B_c=B_c, **common)
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
    B_r: int = 64,
    B_c: int = 64,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run the backward pass of a stage on all heads. Return dQ, dK and dV, given O and L from the forward pass.

    Any other keyword arguments are passed on to each_head(). sinks_backward() computes the gradient of the sinks.
    """
    q, k, v = _check(stage, q, k, v)
    O, dO = checks.shaped_like_q(q, O=O, dO=dO)
    (L,) = checks.one_per_row(q, L=L)
    dQ, dK, dV = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, g, qkv, common in each_head(q, k, v, **options):
        if stage == "naive":
            _, P = naive.forward(*qkv, **common | dict(trace=UNWATCHED))
            del common["mask"]  # P already includes the mask
            dQ[b, h], dk, dv = naive.backward(*qkv, P, dO[b, h], **common)
        elif stage == "fa1":  # l = 1 and m = L can stand in for l and m, because exp(S − m) / l = exp(S − L)
            l = np.where(np.isneginf(L[b, h]), 0.0, 1.0)
            dQ[b, h], dk, dv = fa1.backward(*qkv, O[b, h], l, L[b, h], dO[b, h], B_r=B_r, B_c=B_c, **common)
        else:
            dQ[b, h], dk, dv = fa2.backward(*qkv, O[b, h], L[b, h], dO[b, h], B_r=B_r, B_c=B_c, **common)
        dK[b, g] += dk
        dV[b, g] += dv
    return dQ, dK, dV


def each_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    key_lengths: np.ndarray | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    bias: Callable[[int, np.ndarray, np.ndarray], ArrayLike] | None = None,
    trace: Trace = UNWATCHED,
) -> Iterator[tuple[int, int, int, QKV, dict[str, Any]]]:
    """Yield (b, h, g, (Q, K, V), options) for each batch entry b and each query head h, whose K/V head is g.

    The options are a stage's keyword arguments for this head. `bias` is a function of (head, row, column): `head` is
    the index of the query head, and `row` and `column` are as in Mask.bias.
    """
    lengths, sink_of, group = _check_lengths(key_lengths, k), _check_sinks(sinks, q), q.shape[1] // k.shape[1]
    scale = checks.scale(scale, q.shape[3], "scale")
    if bias is not None and not callable(bias):
        raise TypeError(f"bias: got {bias!r}; it takes a function of (head, row, column), or None")
    for b in trace.parallel("b", range(q.shape[0])):
        for h in trace.parallel("h", range(q.shape[1])):
            g = h // group
            mask = Mask(causal, lengths[b], window=window, bias=None if bias is None else partial(bias, h))
            dropout = Dropout(dropout_p, seed, b, h)
            scores = ScoreOptions(softcap, sink_of[h])
            common = dict(tau=scale, mask=mask, score_options=scores, dropout=dropout, trace=trace)
            yield b, h, g, (q[b, h], k[b, g], v[b, g]), common


def sinks_backward(sinks: np.ndarray, O: np.ndarray, L: np.ndarray, dO: np.ndarray) -> np.ndarray:
    """Return the gradient (heads,) of the sinks, summed over the batch, given O and L from the forward pass."""
    O = checks.real_array("O", O, 4)
    heads = enumerate(_check_sinks(sinks, O))
    return np.array([0.0 if s is None else sink_backward(s, O[:, h], L[:, h], dO[:, h]) for h, s in heads])


def _check(stage: str, *qkv: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return q, k and v as float64 arrays. Raise an error if the stage does not exist or the shapes do not match."""
    if stage not in STAGES:
        raise ValueError(f"stage: got {stage!r}; it takes one of {', '.join(STAGES)}")
    return checks.qkv_heads(*qkv)


def _check_lengths(key_lengths: np.ndarray | None, k: np.ndarray) -> list:
    """Return each batch entry's number of keys as a list. If key_lengths is None, each element of the list is None."""
    if key_lengths is None:
        return [None] * k.shape[0]
    lengths = np.asarray(key_lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"key_lengths: got dtype {lengths.dtype}; it takes whole numbers")
    if lengths.shape != k.shape[:1]:
        raise ValueError(f"key_lengths: got shape {lengths.shape}; it takes (batch,) = {k.shape[:1]}")
    return [whole_number("key_lengths", int(n), low=0, high=k.shape[2]) for n in lengths]


def _check_sinks(sinks: np.ndarray | None, q: np.ndarray) -> list:
    """Check the sinks and return a list with one entry per head: its sink, or None if it has none or the sink is −∞."""
    if sinks is None:
        return [None] * q.shape[1]
    sinks = checks.same_shape("sinks", sinks, q.shape[1:2], "(heads,)")
    if (sinks == np.inf).any():
        raise ValueError("sinks: got inf; it takes numbers below infinity")
    return [None if sink == -np.inf else sink for sink in sinks]
