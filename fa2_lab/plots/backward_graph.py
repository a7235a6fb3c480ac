"""Diagram of the backward pass as a graph of five matmuls."""

from fa2_lab.plots import style


def data() -> dict:
    """Return an empty dictionary, because draw() takes no arguments."""
    return {}


# {name: (x, y, width, label, kind)}, with x, y and the width in data units
NODES = {
    "Q": (0.0, 0.0, 0.7, "Q", "loaded"),
    "K": (0.8, 0.0, 0.7, "K", "loaded"),
    "dO": (3.05, 0.0, 0.7, "dO", "loaded"),
    "V": (3.95, 0.0, 0.7, "V", "loaded"),
    "S": (0.0, 0.85, 1.5, "① S = τ Q Kᵀ", "again"),
    "dP": (3.0, 0.85, 1.75, "② dP = dO Vᵀ", "new"),
    "P": (0.0, 1.75, 1.5, "P = exp(S − L)", "again"),
    "dS": (3.0, 1.75, 1.75, "dS = P ∘ (dP − D)", "new"),
    "dV": (0.0, 2.75, 1.5, "③ dV = Pᵀ dO", "result"),
    "dK": (2.15, 2.75, 1.5, "④ dK = τ dSᵀ Q", "result"),
    "dQ": (4.1, 2.75, 1.5, "⑤ dQ = τ dS K", "result"),
}
EDGES = "Q S, K S, S P, dO dP, V dP, dP dS, P dS, P dV, dS dK, dS dQ"
# {computed tensor: loaded tensor that it also needs}. The loaded tensor is a small box above the computed tensor's box.
ALSO_NEEDED = {"P": "L", "dS": "D", "dV": "dO", "dK": "Q", "dQ": "K"}
BOX_HEIGHT = 0.32


@style.picture
def draw() -> style.Drawn:
    """Draw the loaded tensors at the top, the values computed on chip below them, and the results at the bottom."""
    caption = "The backward pass runs five matmuls per tile, and one of them recomputes S, which was not kept. Boxes"
    caption += " without a fill are recomputed. L comes from the forward pass, and D is rowsum(dO ∘ O)."
    figure, ax = style.new_figure(4.6 if style.is_narrow() else 3.3, caption)
    for name, (x, y, w, label, kind) in NODES.items():
        words = label.replace(" = ", " =\n") if style.is_narrow() else label
        _draw_tensor(ax, x, y, w, BOX_HEIGHT, name, words, recomputed=kind == "again")
    for start, end in (edge.split() for edge in EDGES.split(", ")):
        _draw_edge(ax, start, end)
    for name, tensor in ALSO_NEEDED.items():
        x, y, w, *_ = NODES[name]
        _draw_tensor(ax, x if name == "dK" else x + w - 0.36, y - 0.26, 0.36, 0.26, tensor, tensor)
    style.note(ax, 1.58, 1.62, "recomputed", color=style.QUIET)
    places = {-0.13: "from HBM", 3.22: "to HBM"}
    if not style.is_narrow():
        places = {
            NODES[name][1] + BOX_HEIGHT / 2: words
            for name, words in (("Q", "from HBM"), ("S", "on chip"), ("dV", "to HBM"))
        }
    for y, words in places.items():
        style.note(ax, 0 if style.is_narrow() else 5.72, y, words, color=style.QUIET)
    style.strip_axes(ax, (-0.02, 5.64 if style.is_narrow() else 6.5), (-0.2, 3.3))
    alt = (
        "A graph from top to bottom: Q, K, V, dO, L and D are loaded; S and P are computed again from Q, K and L; dP"
        " and dS follow on chip; dV, dK and dQ come out. That makes 5 matmuls per tile."
    )
    return figure, alt


def _draw_edge(ax: style.Axes, start: str, end: str) -> None:
    """Draw an arrow from the box `start` to the box `end`, which is below `start` or to its right in the same row."""
    x0, y0, w0, _, kind = NODES[start]
    x1, y1, w1, *_ = NODES[end]
    color = style.hue(start) if kind == "loaded" else style.QUIET
    if y0 == y1:
        style.arrow(ax, (x0 + w0, y0 + BOX_HEIGHT / 2), (x1, y1 + BOX_HEIGHT / 2), color)
        return
    x = min(max(x0 + w0 / 2, x1 + 0.15), x1 + w1 - 0.15)
    style.arrow(ax, (x0 + w0 / 2, y0 + BOX_HEIGHT), (x, y1), color)


def _draw_tensor(
    ax: style.Axes, x: float, y: float, w: float, h: float, tensor: str, label: str, recomputed: bool = False
) -> None:
    """Draw a labelled box for a tensor. If the tensor is recomputed, its box has no fill."""
    if recomputed:
        style.box(ax, x, y, w, h, label, edgecolor=style.hue(tensor), linewidth=1.4)
    else:
        style.tensor_box(ax, x, y, w, h, tensor, label)
