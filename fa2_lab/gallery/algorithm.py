"""Pictures whose data comes from running the NumPy ladder under the meter."""

from __future__ import annotations

import numpy as np

from fa2_lab.gallery.picture import Picture
from fa2_lab.plots import order
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import cdiv
from fa2_lab.trace import Trace


def order_data(N: int = 12, d: int = 4, B_r: int = 4, B_c: int = 3) -> dict:
    """What the meter sees of FA1 and FA2 on the same small problem."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    events = {}
    for name, stage in (("FA1", fa1), ("FA2", fa2)):
        trace = Trace()
        stage.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=trace)
        events[name] = trace.events
    return dict(T_r=cdiv(N, B_r), T_c=cdiv(N, B_c), events=events)


PICTURES = [
    Picture(
        "visiting_order",
        "FA1 moves O, l and m through HBM at every tile; FA2 keeps them on chip.",
        "04_fa2_forward",
        order.visiting_order,
        order_data,
    ),
]
