"""The softcap and the sink, two changes that some models make to the scores before the softmax.

softcap  A score s becomes c · tanh(s / c), which is close to s if s is small and always lies between −c and c.
sink     Each head has one extra score without a key or a value, which takes part in the softmax but adds nothing to O.
"""

from dataclasses import dataclass

import numpy as np

from fa2_lab.reference.online_softmax import finite
from fa2_lab.tiles import real_number


@dataclass(frozen=True)
class ScoreOptions:
    """The softcap and the sink of one head, each of which may be None."""

    softcap: float | None = None
    sink: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None:
            takes = "a finite number above 0, or None for no cap"
            real_number("softcap", self.softcap, takes, lambda c: 0 < c < np.inf)
        if self.sink is not None:
            takes = "a finite number, NaN, or None for no sink"
            real_number("sink", self.sink, takes, lambda sink: not np.isinf(sink))


NO_SCORE_OPTIONS = ScoreOptions()


def transform_scores(s: np.ndarray, options: ScoreOptions) -> np.ndarray:
    """Return the capped scores c · tanh(s / c), where c is the softcap, or s itself if there is no softcap."""
    c = options.softcap
    return s if c is None else c * np.tanh(s / c)


def transform_scores_backward(ds: np.ndarray, s: np.ndarray, options: ScoreOptions) -> np.ndarray:
    """Return the gradient with respect to the input of transform_scores(), given its output s and the gradient ds.

    ds is the gradient with respect to s. Pass s before it is masked, because the slope of the cap, 1 − (s/c)², would be
    wrong for a masked score of −∞.
    """
    c = options.softcap
    return ds if c is None else ds * (1 - (s / c) ** 2)


def append_sink(s: np.ndarray, sink: float | None) -> np.ndarray:
    """Return the scores s with the sink appended as one more column, or s itself if `sink` is None."""
    return s if sink is None else np.concatenate([s, np.full((*s.shape[:-1], 1), sink)], axis=-1)


def sink_backward(sink: float, O: np.ndarray, L: np.ndarray, dO: np.ndarray) -> float:
    """Return the gradient of one head's sink, −Σ_r P_r,sink D_r, where r runs over the rows.

    The gradient of any score is P (dP − D). For a sink, dP is 0 because a sink has no value.
    """
    D = (dO * O).sum(axis=-1)
    return float(-(np.exp(sink - finite(L)) * D).sum())
