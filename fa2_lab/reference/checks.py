"""Functions that check the reference's arguments.

Every error names the argument, the value passed, and the accepted values.
"""

import numpy as np
from numpy.typing import ArrayLike

from fa2_lab.reference.dropout import Dropout
from fa2_lab.reference.scores import NO_SCORE_OPTIONS, ScoreOptions
from fa2_lab.tiles import real_number


def real_array(name: str, x: ArrayLike, ndim: int) -> np.ndarray:
    """Return x as a float64 array.

    Raise an error unless x contains real numbers and has `ndim` dimensions, none of size 0. The error message calls the
    argument `name`.
    """
    try:
        array = np.asarray(x)
    except ValueError as ragged:
        raise TypeError(f"{name}: got nested lists of unequal length; it takes a real array") from ragged
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name}: got dtype {array.dtype}; it takes real numbers")
    if array.ndim != ndim or 0 in array.shape:
        raise ValueError(f"{name}: got shape {array.shape}; it takes {ndim} dimensions, none of them empty")
    return array.astype(np.float64, copy=False)


def same_shape(name: str, x: ArrayLike, shape: tuple[int, ...], meaning: str) -> np.ndarray:
    """Return x as a float64 array. Raise an error unless it has the given shape.

    `meaning` describes this shape in the error message.
    """
    array = real_array(name, x, len(shape))
    if array.shape != shape:
        raise ValueError(f"{name}: got shape {array.shape}; it takes {meaning} = {shape}")
    return array


def head_inputs(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    tau: float | None,
    dropout: Dropout,
    score_options: ScoreOptions = NO_SCORE_OPTIONS,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return one head's Q (N_q, d) and K, V (N_k, d) as float64 arrays, and the scale τ as a float.

    If tau is None, the scale is 1/√d. Raise an error if an argument is invalid, for example if dropout or score_options
    has the wrong type.
    """
    Q, K = real_array("Q", Q, 2), real_array("K", K, 2)
    if K.shape[1] != Q.shape[1]:
        raise ValueError(f"K: got head dimension {K.shape[1]}; it takes that of Q, d = {Q.shape[1]}")
    V = same_shape("V", V, K.shape, "the shape of K")
    if not isinstance(dropout, Dropout):
        raise TypeError(f"dropout: got {dropout!r}; it takes a Dropout, as in Dropout(p=0.1, seed=0)")
    if not isinstance(score_options, ScoreOptions):
        raise TypeError(f"score_options: got {score_options!r}; it takes ScoreOptions, as in ScoreOptions(softcap=3.0)")
    return Q, K, V, scale(tau, Q.shape[1])


def shaped_like_q(Q: np.ndarray, **tensors: ArrayLike) -> list[np.ndarray]:
    """Return the named tensors, such as O or dO, as float64 arrays. Raise an error unless each has the shape of Q."""
    return [same_shape(name, x, Q.shape, "the shape of Q") for name, x in tensors.items()]


def one_per_row(Q: np.ndarray, **vectors: ArrayLike) -> list[np.ndarray]:
    """Return the named vectors, such as l, m or L, as float64 arrays with one entry per row of Q.

    Raise an error if a vector has a different length.
    """
    return [same_shape(name, x, Q.shape[:-1], "one number for each row of Q, shape") for name, x in vectors.items()]


def qkv_heads(Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return Q (batch, heads, N_q, d) and K, V (batch, kv heads, N_k, d) as float64 arrays.

    Raise an error if the shapes do not match, or if the number of K/V heads does not divide the number of query heads.
    """
    Q, K = real_array("q", Q, 4), real_array("k", K, 4)
    if K.shape[0] != Q.shape[0] or K.shape[3] != Q.shape[3]:
        raise ValueError(f"k: got shape {K.shape}; it takes the batch and head dimension of q, {Q.shape}")
    if Q.shape[1] % K.shape[1]:
        raise ValueError(f"k: got {K.shape[1]} heads; it takes a divisor of the {Q.shape[1]} heads of q")
    return Q, K, same_shape("v", V, K.shape, "the shape of k")


def scale(tau: float | None, d: int, name: str = "tau") -> float:
    """Return the softmax scale τ as a float, or 1/√d if `tau` is None. A scale of 0 is allowed."""
    if tau is None:
        return 1.0 / np.sqrt(d)
    return real_number(name, tau, "a finite number of at least 0, or None for 1/√d", lambda x: 0 <= x < np.inf)
