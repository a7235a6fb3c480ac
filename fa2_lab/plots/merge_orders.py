"""A picture of one merge in three orders: in a loop, as a tree, and split between two workers."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference.online_softmax import SoftmaxState

Merge = tuple[int, int, SoftmaxState]  # two states by their numbers, leaves first, and what they make


def data(blocks: int = 8, B_c: int = 4) -> dict:
    """Return the states of one row's key blocks (d = 1) and, for each of three orders, its merges and their results."""
    s, v = np.random.default_rng(2).standard_normal((2, blocks, B_c)) * [[[2.0]], [[1.0]]]
    leaves = [SoftmaxState.reset(1, 1).update(s[b : b + 1], v[b][:, None]) for b in range(blocks)]
    orders: dict[str, list[Merge]] = {}
    for name, pairs in merge_pairs(blocks).items():
        states = list(leaves)
        for left, right in pairs:
            states.append(states[left].merge(states[right]))
        orders[name] = [(*pair, state) for pair, state in zip(pairs, states[blocks:], strict=True)]
    return dict(leaves=leaves, orders=orders)


def merge_pairs(blocks: int) -> dict[str, list[tuple[int, int]]]:
    """Return, for each order, a list with one pair of nodes for each merge.

    Nodes 0 … blocks − 1 are the leaves. The n-th merge creates node blocks + n.
    """
    half, layer = blocks // 2, range(blocks)
    tree: list[tuple[int, int]] = []
    while len(layer) > 1:
        made = range(blocks + len(tree), blocks + len(tree) + len(layer) // 2)
        tree += zip(layer[::2], layer[1::2], strict=True)
        layer = made
    first, second = _chain(0, half, blocks), _chain(half, blocks, blocks + half - 1)
    last_of_each = (blocks + half - 2, blocks + 2 * half - 3)
    return dict(loop=_chain(0, blocks, blocks), tree=tree, split=[*first, *second, last_of_each])


def _chain(start: int, stop: int, number: int) -> list[tuple[int, int]]:
    """Return the pairs of nodes that join the leaves start … stop − 1 one after another."""
    lefts = [start, *range(number, number + stop - start - 2)]
    return list(zip(lefts, range(start + 1, stop), strict=True))


WHERE = {
    "loop": "Loop: one state takes in block after block (FA2's inner loop)",
    "tree": "Tree: neighbours merge, then pairs of pairs (warps of a block)",
    "split": "Split: two workers loop over half of the keys each, then merge (decoding)",
}
W, H = 0.9, 0.76  # of one state's box


@style.picture
def draw(leaves: list[SoftmaxState], orders: dict[str, list[Merge]]) -> style.Drawn:
    """Draw the states of all key blocks and, below them, each order of merging them, with m, l and o in every box."""
    caption = "The same merge works in any order: a loop, a tree and a split end with the same o and L."
    places = {name: _places(len(leaves), merges) for name, merges in orders.items()}
    depths = [max(y for _, y in place) + 0.9 for place in places.values()]
    figure, axes = style.new_figure(
        10 if style.narrow() else 7.4, caption, nrows=1 + len(orders), height_ratios=[0.95, *depths]
    )
    for k, state in enumerate(leaves):
        _state(axes[0], k, 0, state)
    axes[0].set_title("The state of each key block: m, l and o, from top to bottom (d = 1)")
    style.bare(axes[0], (-0.5, len(leaves) - 0.5), (-0.45, 0.45))
    for ax, (name, merges) in zip(axes[1:], orders.items(), strict=True):
        _order(ax, places[name], len(leaves), merges)
        ax.set_title(WHERE[name])
    results = "; ".join(f"{name} {_result(merges, 6)}" for name, merges in orders.items())
    alt = (
        f"{len(leaves)} boxes hold the states (m, l, o) of {len(leaves)} key blocks. Beneath, the same merge joins"
        f" them in three orders: a chain of {len(orders['loop'])}, a tree of three levels, and two chains joined at the"
        f" end. The numbers in between differ, but the results do not: {results}."
    )
    return figure, alt


def _result(merges: list[Merge], digits: int, between: str = ", ") -> str:
    """Return o / l and L of the last merge as text, with `digits` decimals and with `between` as the separator."""
    o, L = (x.item() for x in merges[-1][2].finalize())
    return f"o / l = {o:.{digits}f}{between}L = {L:.{digits}f}"


def _places(leaves: int, merges: list[Merge]) -> list[tuple[float, float]]:
    """Return the position of each node: the leaves side by side, and each merge below the nodes that it joins.

    A merge that joins a leaf is directly below this leaf. Any other merge is halfway between its two nodes.
    """
    places = [(float(k), 0.0) for k in range(leaves)]
    for left, right, _ in merges:
        (x_left, y_left), (x, y) = places[left], places[right]
        places.append((x, 1.0) if right < leaves else ((x_left + x) / 2, max(y_left, y) + 1))
    return places


def _order(ax: style.Axes, places: list, leaves: int, merges: list[Merge]) -> None:
    for k in range(leaves):
        label = f"{k}" if style.narrow() else f"block {k}"
        style.box(ax, k - W / 2, -0.2, W, 0.4, label, style.tint(style.INK, 0.06), linewidth=0.5)
    for (x, y), (*children, state) in zip(places[leaves:], merges, strict=True):
        for child in children:
            _arrow(ax, places[child], (x, y), leaf=child < leaves)
        _state(ax, x, y, state)
    words = _result(merges, 4, ",  ").replace("-", "−")
    bottom = y + H / 2 + 0.1
    at, side = (x + W / 2, "right") if x > leaves / 2 else (x, "center")
    style.note(ax, at, bottom, words, va="top", ha=side, weight="bold")
    style.bare(ax, (-0.5, leaves - 0.5), (-0.25, bottom + 0.35))


def _arrow(ax: style.Axes, start: tuple, end: tuple, leaf: bool) -> None:
    (x0, y0), (x1, y1) = start, end
    if y0 == y1:  # along a chain
        style.arrow(ax, (x0 + W / 2, y0), (x1 - W / 2, y1))
    else:  # down, ending off the middle if it starts from the side
        aside = 0.25 * max(-1, min(1, x0 - x1))
        style.arrow(ax, (x0, y0 + (0.2 if leaf else H / 2)), (x1 + aside, y1 - H / 2))


def _state(ax: style.Axes, x: float, y: float, state: SoftmaxState) -> None:
    names = dict.fromkeys("mlo", "") if style.narrow() else {name: f"{name} " for name in "mlo"}
    words = "\n".join(f"{word}{getattr(state, name).item():.2f}" for name, word in names.items()).replace("-", "−")
    style.box(ax, x - W / 2, y - H / 2, W, H, words, style.fill("m"))
