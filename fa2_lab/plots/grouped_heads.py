"""Grouped and multi-query heads: who reads which K and V, and who adds into which dK and dV."""

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import heads


def data(query_heads: int = 8) -> dict:
    """Who reads and who adds, found out by running: disturb one K and see which O move; send one dO and see where."""
    layouts = {}
    for name, key_heads in (("Multi-head", query_heads), ("Grouped", query_heads // 4), ("Multi-query", 1)):
        rng = np.random.default_rng(0)
        q, dO = rng.standard_normal((2, 1, query_heads, 4, 2))
        k, v = rng.standard_normal((2, 1, key_heads, 4, 2))
        layouts[name] = dict(key_heads=key_heads, reads=readers(q, k, v), adds=adders(q, k, v, dO))
    return dict(heads=query_heads, layouts=layouts)


def readers(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[tuple[int, int]]:
    """(query head, key head) wherever another K in the key head changes O in the query head."""
    before, pairs = heads.forward(q, k, v)[0], []
    for g in range(k.shape[1]):
        other = k.copy()
        other[:, g] += 1.0 + np.arange(k.shape[2])[:, None]
        moved = (heads.forward(q, other, v)[0] != before).any(axis=(0, 2, 3))
        pairs += [(int(h), g) for h in np.flatnonzero(moved)]
    return sorted(pairs)


def adders(q: np.ndarray, k: np.ndarray, v: np.ndarray, dO: np.ndarray) -> list[tuple[int, int]]:
    """(query head, key head) wherever the dO of the query head alone gives the key head a dK and a dV."""
    O, L = heads.forward(q, k, v)
    pairs = []
    for h in range(q.shape[1]):
        alone = np.zeros_like(dO)
        alone[:, h] = dO[:, h]
        _, dK, dV = heads.backward(q, k, v, O, L, alone)
        reached = (dK != 0).any(axis=(0, 2, 3)) & (dV != 0).any(axis=(0, 2, 3))
        pairs += [(h, int(g)) for g in np.flatnonzero(reached)]
    return pairs


Pairs = list[tuple[int, int]]  # (query head, key head)


@style.picture
def draw(heads: int, layouts: dict[str, dict]) -> style.Drawn:
    """For each layout the query heads above the key heads: lines for who reads in the forward, arrows for who adds.

    layouts: {name: {"key_heads": number, "reads": pairs of the forward, "adds": pairs of the backward}}.
    """
    caption = "A group of query heads reads one K and V (left), and adds into one dK and dV (right)."
    figure, axes = style.new_figure(1.75 * len(layouts), caption, nrows=len(layouts), ncols=2)
    for (forward, backward), (name, layout) in zip(axes, layouts.items(), strict=True):
        key_heads = layout["key_heads"]
        _heads(forward, heads, key_heads, layout["reads"], ("Q", "K", "V"))
        _heads(backward, heads, key_heads, layout["adds"], ("dO", "dK", "dV"))
        share = "" if key_heads == heads else f", 1/{heads // key_heads} of the memory"
        forward.set_title(f"{name}: {style.counted(key_heads, 'key head')}")
        forward.set_xlabel(f"K and V: {key_heads} each{share}", fontsize=style.SMALL)
        terms = len(layout["adds"]) // key_heads
        words = "one term each" if terms == 1 else f"each a sum of {terms} terms"
        backward.set_xlabel(f"dK and dV: {words}", fontsize=style.SMALL)
    groups = "; ".join(f"{name}, {heads // layout['key_heads']} to each" for name, layout in layouts.items())
    alt = (
        f"Three rows of {heads} query heads above their key heads ({groups}). Left, in the forward, a line from each K,"
        f" V to every query head that reads it; nothing is copied. Right, in the backward, an arrow from each head's dO"
        f" to the dK, dV that it adds into: with shared heads these are sums over the group."
    )
    return figure, alt


def _heads(ax: style.Axes, heads: int, key_heads: int, pairs: Pairs, names: tuple[str, str, str]) -> None:
    query, key, value = names
    width = heads / key_heads
    for h, g in pairs:
        start, end = (h + 0.5, 1.0), ((g + 0.5) * width, 2.6)
        style.arrow(ax, start, end, style="-|>" if key.startswith("d") else "-", linewidth=0.8)
    for h in range(heads):
        style.tensor_box(ax, h + 0.07, 0, 0.86, 1, query, str(h), linewidth=1)
    for g in range(key_heads):
        w = min(width, 2) - 0.14
        for y, tensor in ((2.6, key), (3.65, value)):
            style.tensor_box(ax, (g + 0.5) * width - w / 2, y, w, 1, tensor, tensor, linewidth=1)
    style.note(ax, -0.15, 0.5, query, ha="right")
    style.bare(ax, (-0.9, heads + 0.1), (-0.1, 4.75))
