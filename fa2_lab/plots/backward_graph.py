"""The backward as a graph of five products, and the two ways to get dQ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style
from fa2_lab.reference import fa2
from fa2_lab.trace import Trace

# Data -----------------------------------------------------------------------------------------------------------


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


# Drawing --------------------------------------------------------------------------------------------------------

#        name: (x, y, width, what is written, kind)
NODES = {
    "Q": (-1.1, 0.0, 2.1, "Q", "loaded"),
    "K": (-1.1, 0.9, 2.1, "K", "loaded"),
    "L": (-1.1, 2.0, 2.1, "L: kept by the forward", "loaded"),
    "D": (-1.1, 2.9, 2.1, "D = rowsum(dO ∘ O)", "loaded"),
    "dO": (-1.1, 3.8, 2.1, "dO", "loaded"),
    "V": (-1.1, 4.7, 2.1, "V", "loaded"),
    "S": (2.0, 1.2, 1.8, "① S = τ Q Kᵀ", "again"),
    "P": (4.7, 1.75, 2.0, "P = exp(S − L)", "again"),
    "dP": (2.0, 4.3, 1.8, "② dP = dO Vᵀ", "new"),
    "dS": (4.7, 2.9, 2.0, "dS = P ∘ (dP − D)", "new"),
    "dV": (7.6, 3.7, 1.9, "③ dV = Pᵀ dO", "result"),
    "dK": (7.6, 0.0, 1.9, "④ dK = τ dSᵀ Q", "result"),
    "dQ": (7.6, 0.9, 1.9, "⑤ dQ = τ dS K", "result"),
}
EDGES = "Q S, K S, S P, L P, dO dP, V dP, P dS, dP dS, D dS, P dV, dO dV, dS dK, Q dK, dS dQ, K dQ"
STRAIGHT = {("Q", "dK"): 0.16, ("K", "dQ"): 1.02, ("dO", "dV"): 4.0}  # at which height they cross the picture
HIGH = 0.62


@style.picture
def draw(
    T: int, products: int, passes: Mapping[str, Mapping[str, Sequence[str]]], dq_additions: int
) -> tuple[Figure, str]:
    """The graph above, and beneath the products of one tile when dQ is added by atomics and when it has its own pass.

    T: tiles along each side. products: per tile, as the meter counts them. passes: {name: {loop: products}}.
    dq_additions: how often one pass over columns adds into a block of dQ.
    """
    title = "Backward: S and P are computed again, and dQ is what costs extra"
    figure, (graph, ways) = style.new_figure(6.0, title, nrows=2, height_ratios=[2.4, 1])
    _graph(graph)
    _ways(ways, T, passes, dq_additions)
    names = "; ".join(
        f"{name}: {' then '.join(', '.join(p) for p in loops.values())}" for name, loops in passes.items()
    )
    alt = (
        f"A graph from left to right: Q, K, V, dO, L and D are loaded; S and P are computed again from Q, K and L; dP"
        f" and dS follow on chip; dV, dK and dQ come out. That makes {products} matrix products a tile. Beneath, the"
        f" products as boxes. {names}. In one pass {dq_additions // T} workers add into each block of dQ, in any order;"
        f" in two passes each block has one writer, at the price of computing S and dP twice."
    )
    return figure, alt


def edges() -> list[tuple[str, str]]:
    """Pairs (from, to)."""
    return [tuple(edge.split()) for edge in EDGES.split(", ")]


def _graph(ax: Axes) -> None:
    for name, (x, y, w, label, kind) in NODES.items():
        _box(ax, x, y, w, name, label, again=kind == "again", gid=kind)
    for start, end in edges():
        _arrow(ax, start, end)
    heads = {-0.05: "loaded from HBM", 4.35: "on chip only (white: computed again)", 8.55: "stored"}
    for x, text in heads.items():
        ax.text(x, -0.45, text, ha="center", color=style.QUIET)
    ax.set(xlim=(-1.2, 9.6), ylim=(5.4, -0.8), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _arrow(ax: Axes, start: str, end: str) -> None:
    """From the right edge of one box to the left edge of the next, or straight down; what is loaded lends its hue."""
    x0, y0, w0, *_ = NODES[start]
    x1, y1, w1, *_ = NODES[end]
    tail, head = (x0 + w0, y0 + HIGH / 2), (x1, y1 + HIGH / 2)
    if x0 == x1:
        tail, head = (x0 + w0 / 2, y0 + HIGH), (x1 + w1 / 2, y1)
    if (start, end) in STRAIGHT:
        tail, head = (x0 + w0, STRAIGHT[start, end]), (x1, STRAIGHT[start, end])
    color = style.hue(start) if NODES[start][-1] == "loaded" else style.QUIET
    arrow = dict(arrowstyle="-|>", color=color, shrinkA=0, shrinkB=0, linewidth=1)
    ax.annotate("", head, tail, arrowprops=arrow)


def _box(ax: Axes, x: float, y: float, w: float, tensor: str, label: str, again: bool, gid: str) -> None:
    """A tensor's box, white if it is computed again."""
    patch = style.tensor_box(ax, x, y, w, HIGH, tensor, label, size=style.NORMAL, gid=gid)
    if again:
        patch.set_facecolor(style.PAPER)


def _ways(ax: Axes, T: int, passes: Mapping[str, Mapping[str, Sequence[str]]], dq_additions: int) -> None:
    """A row for each way: its products as boxes, pass by pass, and who writes dQ."""
    told = (
        f"all {dq_additions // T} workers (T_c = {T}) add into each block of dQ:\natomics, in no fixed order",
        "one writer for each block of dQ:\nthe same bits in every run",
    )
    for n, ((name, loops), text) in enumerate(zip(passes.items(), told, strict=True)):
        y, x, seen = 1.35 * n, 0.0, {"S"}
        count = sum(map(len, loops.values()))
        ax.text(-0.15, y + HIGH / 2, f"{name}:\n{count} products", ha="right", va="center", fontweight="bold")
        for loop, products in loops.items():
            ax.text(x, y - 0.08, loop, va="bottom", fontsize=style.SMALL, color=style.QUIET)
            for product in products:
                _box(ax, x, y, 0.66, product, product, again=product in seen, gid="product")
                x += 0.7
            seen.update(products)
            x += 0.25
        ax.text(x + 0.05, y + HIGH / 2, text, va="center", fontsize=style.SMALL)
    ax.set(xlim=(-1.5, 9.1), ylim=(2.1, -0.4), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
