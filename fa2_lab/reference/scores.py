"""What some models do to the scores between Q Kᵀ and the softmax: cap them, and add one that belongs to no key.

softcap  a score s becomes c · tanh(s / c): nearly s where it is small, never beyond ±c
sink     one number for each head, a score that has no value: it takes part in the softmax, and adds nothing to O
"""

import numpy as np

from fa2_lab.reference.online_softmax import finite


def cap(s: np.ndarray, softcap: float | None) -> np.ndarray:
    """The scores s, capped; s itself without a cap."""
    return s if softcap is None else softcap * np.tanh(s / softcap)


def cap_backward(ds: np.ndarray, s: np.ndarray, softcap: float | None) -> np.ndarray:
    """The gradient of the scores before the cap. s are those after it, unmasked: the slope there is 1 − (s / c)²."""
    return ds if softcap is None else ds * (1 - (s / softcap) ** 2)


def beside_sink(s: np.ndarray, sink: float | None) -> np.ndarray:
    """Rows of scores with one more column, the sink; s itself without a sink."""
    return s if sink is None else np.concatenate([s, np.full((*s.shape[:-1], 1), sink)], axis=-1)


def sink_backward(sink: float, O: np.ndarray, L: np.ndarray, dO: np.ndarray) -> float:
    """The sink's gradient: −Σ_r P_r,sink D_r. Like any score's it is P (dP − D), and dP is 0: there is no value."""
    D = (dO * O).sum(axis=-1)
    return float(-(np.exp(sink - finite(L)) * D).sum())
