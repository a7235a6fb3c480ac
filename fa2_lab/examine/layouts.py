"""Convert between arrays (batch, heads, N, d) and the layouts in which attention functions take and return them.

A layout is named after its axes: b for the batch, h for heads, n for positions and d for features. In thd, t stands for
the positions of all packed sequences.
"""

from __future__ import annotations

import numpy as np

WHOLE = {"bhnd": "(batch, heads, N, d)", "bnhd": "(batch, N, heads, d)", "thd": "packed (total, heads, d)"}
WHOLE |= {"nbhd": "(N, batch, heads, d)", "bhd": "(batch, heads, d) of one query, with k and v (batch, N, heads, d)"}
WHOLE |= {"bhd,bhnd": "(batch, heads, d) of one query, with k and v (batch, heads, N, d)"}
LAYOUTS = WHOLE | {
    "hnd": "(heads, N, d)",
    "nhd": "(N, heads, d)",
    "bnd": "(batch, N, d)",
    "nd": "(N, d)",
    "flat": "(batch, N, heads · d)",
}
LAYOUTS |= {"hd,hnd": "(heads, d) of one query, with k and v (heads, N, d)"}
# The layouts that O may have if it does not have that of q
OF_OUTPUT = {"bhnd": LAYOUTS["bhnd"], "bnhd": LAYOUTS["bnhd"], "flat": LAYOUTS["flat"], "nbhd": LAYOUTS["nbhd"]}
OF_OUTPUT |= {"nbf": "(N, batch, heads · d)", "bf": "(batch, heads · d)"}
MERGED = {"flat": "bnhd", "nbf": "nbhd", "bf": "bhd"}  # the last axis holds the features of all heads


def axes(layout: str) -> str:
    return MERGED.get(layout, layout).partition(",")[0].replace("t", "n")


def order_of(layout: str, N: int) -> str:
    """Return the axes of an array with N positions. If q has a single one and no axis for it, K and V have an axis."""
    return (layout.partition(",")[2] or "bnhd") if "n" not in axes(layout) and N > 1 else axes(layout)


def to_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """Return x (batch, heads, N, d) in a layout. An axis that the layout lacks must have the length 1.

    In the layout bhd, keys and values have the layout bnhd, because only the queries have a single position.
    """
    order = order_of(layout, x.shape[2])
    lacking = [axis for axis in "bhnd" if axis not in order]
    x = x.transpose(["bhnd".index(axis) for axis in (*lacking, *order)])[(0,) * len(lacking)]
    return x.reshape(*x.shape[:-2], -1) if layout in MERGED else x


def from_layout(x: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return x, an array in a layout, as (batch, heads, N, d) of the given shape, or None if x has another shape."""
    if x.shape != to_layout(np.broadcast_to(0.0, shape), layout).shape:
        return None
    order = order_of(layout, shape[2])
    lacking = [axis for axis in "bhnd" if axis not in order]
    x = x.reshape([1] * len(lacking) + [shape["bhnd".index(axis)] for axis in order])
    return x.transpose([(*lacking, *order).index(axis) for axis in "bhnd"])


def L_from_layout(x: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return x as L (batch, heads, N) of the given shape, or None if this is not possible.

    The axes of L need not be in the layout's order. For example, functions with the layout bnhd may return L as (batch,
    heads, N).
    """
    if x.ndim == len(axes(layout)) and x.shape[-1] == 1:
        x = x[..., 0]
    orders = (axes(layout).removesuffix("d"), "bhn", "bnh", "nbh", "hn", "bh", "n")
    fitting = (y for y in orders if x.shape == tuple(shape["bhn".index(axis)] for axis in y))
    if (order := next(fitting, None)) is None:
        return None
    lacking = [axis for axis in "bhn" if axis not in order]
    if any(shape["bhn".index(axis)] > 1 for axis in lacking):
        return None
    return x.reshape([1] * len(lacking) + list(x.shape)).transpose([(*lacking, *order).index(axis) for axis in "bhn"])
