"""A picture of the backward pass as a graph of five matmuls."""

from fa2_lab.plots import style


def data() -> dict:
    """Return an empty dictionary, because this picture needs no numbers."""
    return {}


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


@style.picture
def draw() -> style.Drawn:
    """Draw the loaded tensors of a tile at the top, the computed values below, and the three results at the bottom."""
    caption = "The backward pass runs five matmuls per tile, and one of them recomputes S, which was not kept. Boxes"
    caption += " without a fill are recomputed. L comes from the forward pass, and D is rowsum(dO ∘ O)."
    figure, ax = style.new_figure(5.2 if style.narrow() else 3.75, caption)
    for name, (x, y, w, label, kind) in NODES.items():
        words = label.replace(" = ", " =\n") if style.narrow() else label
        _box(ax, x, y, w, HIGH, name, words, again=kind == "again")
    for start, end in (edge.split() for edge in EDGES.split(", ")):
        _edge(ax, start, end)
    for result, tensor in AGAIN.items():
        x, y, w, *_ = NODES[result]
        _box(ax, x + w - 0.36, y - 0.26, 0.36, 0.26, tensor, tensor)
    if style.narrow():
        style.note(ax, 0, -0.13, "from HBM", color=style.QUIET)
        style.note(ax, 0.55, 3.72, "to HBM", color=style.QUIET)
    else:
        for y, words in {0: "from HBM", 0.75: "on chip", 3.25: "to HBM"}.items():
            style.note(ax, 5.72, y + HIGH / 2, words, color=style.QUIET)
        style.note(ax, NODES["P"][0] + 0.22, NODES["P"][1] - 0.14, "recomputed", color=style.QUIET)
    style.bare(ax, (-0.02, 5.64 if style.narrow() else 6.5), (-0.2, 3.8))
    alt = (
        "A graph from top to bottom: Q, K, V, dO, L and D are loaded; S and P are computed again from Q, K and L; dP"
        " and dS follow on chip; dV, dK and dQ come out. That makes 5 matmuls per tile."
    )
    return figure, alt


def _edge(ax: style.Axes, start: str, end: str) -> None:
    """Draw an arrow from the bottom of the box `start` to the top of the box `end`."""
    x0, y0, w0, _, kind = NODES[start]
    x1, y1, w1, *_ = NODES[end]
    left, right = x1 + 0.15, x1 + w1 - (0.55 if end in AGAIN else 0.15)
    head = min(max(x0 + w0 / 2, left), right)
    style.arrow(ax, (x0 + w0 / 2, y0 + HIGH), (head, y1), style.hue(start) if kind == "loaded" else style.QUIET)


def _box(ax: style.Axes, x: float, y: float, w: float, h: float, tensor: str, label: str, again: bool = False) -> None:
    """Draw the box of a tensor with its label. The box of a recomputed tensor (`again`) has no fill."""
    if again:
        style.box(ax, x, y, w, h, label, edgecolor=style.hue(tensor), linewidth=1.4)
    else:
        style.tensor_box(ax, x, y, w, h, tensor, label)
