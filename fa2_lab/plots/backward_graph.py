"""The backward as a graph of five products, and the two ways to get dQ."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import fa2
from fa2_lab.trace import Trace


def data(T: int = 4, B: int = 8, d: int = 4) -> dict:
    """The five products as FA2's Algorithm 2 runs them, with what the meter counts of them on T × T tiles."""
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, T * B, d))
    O, L = fa2.forward(Q, K, V, B_r=B, B_c=B)
    trace = Trace()
    fa2.backward(Q, K, V, O, L, dO, B_r=B, B_c=B, trace=trace)
    products = trace.matmul_flops // (T * T * 2 * B * B * d)
    passes = {
        "One pass": {"over columns": ("S", "dP", "dV", "dK", "dQ")},
        "Two passes": {"over columns": ("S", "dP", "dV", "dK"), "over rows": ("S", "dP", "dQ")},
    }
    added = sum(e.tensor == "dQ" and e.op == "store" and e.j is not None for e in trace.events)
    return dict(T=T, products=products, passes=passes, dq_additions=added)


#        name: (x, y, width, what is written, kind), in inches
NODES = {
    "Q": (0.0, 0.0, 0.7, "Q", "loaded"),
    "K": (0.8, 0.0, 0.7, "K", "loaded"),
    "L": (1.75, 0.0, 0.7, "L", "loaded"),
    "dO": (2.95, 0.0, 0.7, "dO", "loaded"),
    "V": (3.75, 0.0, 0.7, "V", "loaded"),
    "D": (4.8, 0.0, 0.7, "D", "loaded"),
    "S": (0.0, 0.75, 1.5, "① S = τ Q Kᵀ", "again"),
    "dP": (2.95, 0.75, 1.5, "② dP = dO Vᵀ", "new"),
    "P": (0.75, 1.5, 1.5, "P = exp(S − L)", "again"),
    "dS": (2.75, 2.2, 1.75, "dS = P ∘ (dP − D)", "new"),
    "dV": (0.55, 3.25, 1.5, "③ dV = Pᵀ dO", "result"),
    "dK": (2.35, 3.25, 1.5, "④ dK = τ dSᵀ Q", "result"),
    "dQ": (4.1, 3.25, 1.5, "⑤ dQ = τ dS K", "result"),
}
EDGES = "Q S, K S, S P, L P, dO dP, V dP, P dS, dP dS, D dS, P dV, dS dK, dS dQ"
AGAIN = {"dV": "dO", "dK": "Q", "dQ": "K"}  # what a result reads beside what was computed on chip
HIGH = 0.32
WAYS, BOX = 4.05, 0.48  # where the two ways begin, and the width of a product there


@style.picture
def draw(T: int, products: int, passes: dict[str, dict[str, list[str]]], dq_additions: int) -> style.Drawn:
    """The graph above, and beneath the products of one tile when dQ is added by atomics and when it has its own pass.

    T: tiles along each side. products: per tile, as the meter counts them. passes: {name: {loop: products}}.
    dq_additions: how often one pass over columns adds into a block of dQ.
    """
    caption = "Backward: one of five products computes S again, which nobody kept (white: computed again). dQ costs"
    caption += " atomic additions, or two products more. L is kept by the forward, and D = rowsum(dO ∘ O)."
    figure, ax = style.new_figure(5.6, caption)
    for name, (x, y, w, label, kind) in NODES.items():
        _box(ax, x, y, w, HIGH, name, label, again=kind == "again")
    for start, end in (edge.split() for edge in EDGES.split(", ")):
        _edge(ax, start, end)
    for result, tensor in AGAIN.items():
        x, y, w, *_ = NODES[result]
        _box(ax, x + w - 0.36, y - 0.26, 0.36, 0.26, tensor, tensor)
    for y, words in {0: "from HBM", 0.75: "on chip", 3.25: "to HBM"}.items():
        style.note(ax, 5.72, y + HIGH / 2, words, color=style.QUIET, ha="left")
    _ways(ax, T, passes, dq_additions)
    style.bare(ax, (-0.02, 6.4), (-0.05, WAYS + 1.75))
    names = "; ".join(
        f"{name}: {' then '.join(', '.join(p) for p in loops.values())}" for name, loops in passes.items()
    )
    alt = (
        f"A graph from top to bottom: Q, K, V, dO, L and D are loaded; S and P are computed again from Q, K and L; dP"
        f" and dS follow on chip; dV, dK and dQ come out. That makes {products} matrix products a tile. Beneath, the"
        f" products as boxes. {names}. In one pass {dq_additions // T} workers add into each block of dQ, in any order;"
        f" in two passes each block has one writer, at the price of computing S and dP twice."
    )
    return figure, alt


def _edge(ax: style.Axes, start: str, end: str) -> None:
    """From the bottom of one box to the top of the next; what is loaded lends its hue."""
    x0, y0, w0, _, kind = NODES[start]
    x1, y1, w1, *_ = NODES[end]
    left, right = x1 + 0.15, x1 + w1 - (0.55 if end in AGAIN else 0.15)
    head = min(max(x0 + w0 / 2, left), right)
    style.arrow(ax, (x0 + w0 / 2, y0 + HIGH), (head, y1), style.hue(start) if kind == "loaded" else style.QUIET)


def _box(ax: style.Axes, x: float, y: float, w: float, h: float, tensor: str, label: str, again: bool = False) -> None:
    """A tensor's box, white if it is computed again."""
    if again:
        style.box(ax, x, y, w, h, label, edgecolor=style.hue(tensor), linewidth=1.4)
    else:
        style.tensor_box(ax, x, y, w, h, tensor, label)


def _ways(ax: style.Axes, T: int, passes: dict[str, dict[str, list[str]]], dq_additions: int) -> None:
    """A row for each way: its products as boxes, pass by pass, and who writes dQ."""
    notes = (f"atomics: {dq_additions // T} workers\nadd into each dQ", "one writer\nfor each dQ")
    for n, ((name, loops), words) in enumerate(zip(passes.items(), notes, strict=True)):
        y, x, seen = WAYS + 0.9 * n, 0.0, {"S"}
        style.note(ax, 0, y, f"{name}, {sum(map(len, loops.values()))} products", weight="bold")
        for products in loops.values():
            for product in products:
                _box(ax, x, y + 0.2, BOX, HIGH, product, product, again=product in seen)
                x += BOX + 0.03
            seen.update(products)
            x += 0.2
        x = 0.0
        for loop, products in loops.items():
            style.note(ax, x, y + 0.65, loop, color=style.QUIET)
            x += (BOX + 0.03) * len(products) + 0.2
        style.note(ax, x + 0.05, y + 0.2 + HIGH / 2, words)
