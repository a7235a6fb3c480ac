"""Convert between arrays (batch, heads, N, d) and the layouts in which attention functions take and return them.

A layout is named after its axes: b for the batch, h for heads, n for positions and d for features. In thd, t stands for
the positions of all packed sequences.
"""

from __future__ import annotations

import numpy as np

WHOLE = {"bhnd": "(batch, heads, N, d)", "bnhd": "(batch, N, heads, d)", "thd": "packed (total, heads, d)"}
WHOLE |= {"nbhd": "(N, batch, heads, d)", "bhd": "(batch, heads, d) of one query, with k and v (batch, N, heads, d)"}
LAYOUTS = WHOLE | {"hnd": "(heads, N, d)", "bnd": "(batch, N, d)", "nd": "(N, d)", "flat": "(batch, N, heads · d)"}
# The layouts that O may have if it does not have that of q
OF_OUTPUT = {"bhnd": LAYOUTS["bhnd"], "bnhd": LAYOUTS["bnhd"], "flat": LAYOUTS["flat"], "nbhd": LAYOUTS["nbhd"]}
OF_OUTPUT |= {"nbf": "(N, batch, heads · d)", "bf": "(batch, heads · d)"}
MERGED = {"flat": "bnhd", "nbf": "nbhd", "bf": "bhd"}  # the last axis holds the features of all heads


def axes(layout: str) -> str:
    return MERGED.get(layout, layout).replace("t", "n")


def to_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """Return x (batch, heads, N, d) in a layout. An axis that the layout lacks must have the length 1.

    In the layout bhd, keys and values have the layout bnhd, because only the queries have a single position.
    """
    order = "bnhd" if axes(layout) == "bhd" and x.shape[2] > 1 else axes(layout)
    lacking = [axis for axis in "bhnd" if axis not in order]
    x = x.transpose(["bhnd".index(axis) for axis in (*lacking, *order)])[(0,) * len(lacking)]
    return x.reshape(*x.shape[:-2], -1) if layout in MERGED else x


def from_layout(x: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return x, an array in a layout, as (batch, heads, N, d) of the given shape, or None if x has another shape."""
    if x.shape != to_layout(np.broadcast_to(0.0, shape), layout).shape:
        return None
    order = "bnhd" if axes(layout) == "bhd" and shape[2] > 1 else axes(layout)
    lacking = [axis for axis in "bhnd" if axis not in order]
    x = x.reshape([1] * len(lacking) + [shape["bhnd".index(axis)] for axis in order])
    return x.transpose([(*lacking, *order).index(axis) for axis in "bhnd"])


def L_from_layout(x: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return x as L (batch, heads, N) of the given shape, or None if this is not possible.

    The axes of L need not be in the layout's order. For example, functions with the layout bnhd may return L as (batch,
    heads, N).
    """
    if x.ndim == len(layout) and x.shape[-1] == 1:
        x = x[..., 0]
    if layout == "bhd" and shape[2] == 1:
        return x.reshape(shape) if x.shape[:2] == shape[:2] and x.size == np.prod(shape) else None
    if x.ndim > len(shape):
        return None
    x = x.reshape([1] * (len(shape) - x.ndim) + list(x.shape))
    orders = ((0, 1, 2), (0, 2, 1), (1, 2, 0))  # (batch, heads, N), (batch, N, heads) and (N, batch, heads)
    return next((y for y in map(x.transpose, orders) if y.shape == shape), None)
