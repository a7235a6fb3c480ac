"""Diagram of the same states merged in three orders: in a loop, as a tree, and split between two workers."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference.online_softmax import SoftmaxState

Merge = tuple[int, int, SoftmaxState]  # the indices of two states (the leaves have the lowest), and the merged state


def data(blocks: int = 8, B_c: int = 4) -> dict:
    """Return the softmax state of each key block of one row (d = 1), and the merges in each of three orders."""
    s, v = np.random.default_rng(2).standard_normal((2, blocks, B_c)) * [[[2.0]], [[1.0]]]
    leaves = [SoftmaxState.empty(1, 1).update(s[b : b + 1], v[b][:, None]) for b in range(blocks)]
    orders: dict[str, list[Merge]] = {}
    for name, pairs in merge_pairs(blocks).items():
        states = list(leaves)
        for left, right in pairs:
            states.append(states[left].merge(states[right]))
        orders[name] = [(*pair, state) for pair, state in zip(pairs, states[blocks:], strict=True)]
    return dict(leaves=leaves, orders=orders)


def merge_pairs(blocks: int) -> dict[str, list[tuple[int, int]]]:
    """Return, for each order, the pair of nodes that each merge joins.

    Nodes 0 … blocks − 1 are the leaves, and merge n creates node blocks + n.
    """
    half, layer = blocks // 2, range(blocks)
    tree: list[tuple[int, int]] = []
    while len(layer) > 1:
        new_nodes = range(blocks + len(tree), blocks + len(tree) + len(layer) // 2)
        tree += zip(layer[::2], layer[1::2], strict=True)
        layer = new_nodes
    first, second = _pairs_in_order(0, half, blocks), _pairs_in_order(half, blocks, blocks + half - 1)
    last_of_each = (blocks + half - 2, blocks + 2 * half - 3)
    return dict(loop=_pairs_in_order(0, blocks, blocks), tree=tree, split=[*first, *second, last_of_each])


def _pairs_in_order(begin: int, end: int, number: int) -> list[tuple[int, int]]:
    """Return the pairs of nodes whose merges join leaves begin … end − 1 in order. `number` is the first new node."""
    lefts = [begin, *range(number, number + end - begin - 2)]
    return list(zip(lefts, range(begin + 1, end), strict=True))


TITLES = {
    "loop": "Loop: one state takes in block after block (FA2's inner loop)",
    "tree": "Tree: neighbours merge, then pairs of pairs (warps of a block)",
    "split": "Split: two workers loop over half of the keys each, then merge (decoding)",
}


@style.picture
def draw(leaves: list[SoftmaxState], orders: dict[str, list[Merge]]) -> style.Drawn:
    """Draw the states of all key blocks and, below them, their merges in each order.

    Each state is drawn as a bar, labelled with m, l and o, across the key blocks that it covers. The last state has a
    thick edge.
    """
    caption = (
        "The same merge works in any order: a loop, a tree and a split end with the same o and L. A bar is a state and"
        " lies below the key blocks that it has seen. Here the rows have one column (d = 1)."
    )
    spans = {name: _covered_blocks(len(leaves), merges) for name, merges in orders.items()}
    depths = [max(row for *_, row in of) + 1.9 for of in spans.values()]
    figure, axes = style.new_figure(
        11.9 if style.is_narrow() else 6.0,
        caption,
        nrows=1 + len(orders),
        height_ratios=[1.9 if style.is_narrow() else 2.2, *depths],
    )
    axes[0].set_title("The state of each key block" + ": m above l above o" * style.is_narrow())
    for k, state in enumerate(leaves):
        style.note(axes[0], k + 0.5, -0.3, f"{k}" if style.is_narrow() else f"block {k}", ha="center", va="center")
        names = ("", "", "") if style.is_narrow() else ("m ", "l ", "o ")
        style.box(
            axes[0], k + 0.04, 0.1, 0.92, 1.75, _format_state(state, names, "\n"), style.tensor_fill("m"), linewidth=0.8
        )
    style.strip_axes(axes[0], (-0.02, len(leaves) + 0.02), (-0.6, 1.9))
    for ax, (name, merges) in zip(axes[1:], orders.items(), strict=True):
        ax.set_title(TITLES[name])
        for k in range(len(leaves)):
            style.box(ax, k + 0.04, 0.3, 0.92, 0.25, "", style.tensor_fill("m"), linewidth=0.5)
        for (begin, end, row), (*_, state) in zip(spans[name], merges, strict=True):
            last = end - begin == len(leaves)
            between = "\n" if style.is_narrow() and end - begin < 4 else ", "
            words = (
                _format_result(merges, 4).replace("-", "−")
                if last
                else _format_state(state, ("m ", "l ", "o "), between)
            )
            look = dict(linewidth=2.4) if last else dict(linewidth=0.8)
            high = 0.92 if style.is_narrow() else 0.72  # bar height as a fraction of the distance between rows
            patch = style.box(
                ax, begin + 0.04, row + 0.62 - high, end - begin - 0.08, high, words, style.tensor_fill("m"), **look
            )
            if last:
                patch.label_text.set_weight("bold")
        style.strip_axes(ax, (-0.02, len(leaves) + 0.02), (0.25, spans[name][-1][2] + 0.7))
    results = "; ".join(f"{name} {_format_result(merges, 6)}" for name, merges in orders.items())
    alt = (
        f"{len(leaves)} boxes hold the states (m, l, o) of {len(leaves)} key blocks. Beneath, the same merge joins"
        f" them in three orders, as bars that become longer: one by one in {len(orders['loop'])} steps, as a tree of"
        f" three levels, and as two loops joined at the end. The numbers in between differ, but the results do not:"
        f" {results}."
    )
    return figure, alt


def _format_result(merges: list[Merge], digits: int) -> str:
    """Format o / l and L after the last merge, with `digits` decimals."""
    o, L = (x.item() for x in merges[-1][2].finalize())
    return f"o / l = {o:.{digits}f}, L = {L:.{digits}f}"


def _covered_blocks(leaves: int, merges: list[Merge]) -> list[tuple[int, int, int]]:
    """Return (begin, end, row) for each merged state, which covers the blocks begin … end − 1.

    A state is drawn one row below the states that it joins.
    """
    spans = [(k, k + 1, 0) for k in range(leaves)]
    for left, right, _ in merges:
        (begin, _, above), (_, end, beside) = spans[left], spans[right]
        spans.append((begin, end, max(above, beside) + 1))
    return spans[leaves:]


def _format_state(state: SoftmaxState, names: tuple[str, ...], between: str) -> str:
    """Format a state's m, l and o, each after its name."""
    numbers = (state.m, state.l, state.o)
    return between.join(f"{name}{x.item():.2f}" for name, x in zip(names, numbers, strict=True)).replace("-", "−")
