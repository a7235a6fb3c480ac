"""Diagram of the order in which FA1 and FA2 visit the tiles, and of the resulting loads and stores."""

from collections.abc import Sequence

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile, Tiling
from fa2_lab.trace import Event, Trace

STAGES = {"FA1": fa1, "FA2": fa2}


def data(
    N: int = 12, d: int = 4, B_r: int = 4, B_c: int = 3, names: Sequence[str] = ("FA1", "FA2"), causal: bool = False
) -> dict:
    """Return the loads and stores that the meter records on one small problem for FA1, FA2 or both."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    mask, events = CAUSAL if causal else NO_MASK, {}
    for name in names:
        trace = Trace()
        STAGES[name].forward(Q, K, V, B_r=B_r, B_c=B_c, mask=mask, trace=trace)
        events[name] = trace.events
    return dict(tiling=Tiling(N, N, B_r, B_c, mask), events=events)


@style.picture
def draw(tiling: Tiling, events: dict[str, list[Event]]) -> style.Drawn:
    """Draw a row for each algorithm: its grid of tiles, numbered in visiting order, and its HBM traffic over time."""
    T_r, T_c = tiling.T_r, tiling.T_c
    skip = [(i, j) for i in range(T_r) for j in range(T_c) if tiling.kind(i, j) is Tile.SKIP]
    clauses = {"FA1": "FA1 moves O, l and m through HBM at every tile", "FA2": "FA2 keeps them on the chip"}
    if skip:
        clauses = {"FA1": f"FA1 computes all {T_r * T_c} tiles in spite of the mask", "FA2": f"FA2 skips {len(skip)}"}
    caption = ", but ".join(clauses[name] for name in events) + "."
    caption += " The mask hides all scores of the hatched tiles." * bool(skip)
    sizes = dict(nrows=len(events), ncols=2, width_ratios=[1, 1.35], squeeze=False)
    figure, axes = style.new_figure(0.3 + 2.1 * len(events), caption, **sizes)
    longest = max(len(log) for log in events.values())
    moved = {name: sum(e.elements for e in log) for name, log in events.items()}
    for (name, log), (grid, timeline) in zip(events.items(), axes, strict=True):
        _draw_tiles(grid, name, tiling, visited_tiles(log), skip)
        _draw_timeline(timeline, log, longest)
        timeline.set_title(f"{moved[name]:,} elements")
    axes[-1][1].set_xlabel("filled: load, open: store" if style.is_narrow() else "time → (filled: load, open: store)")
    goes = {"FA1": "down the columns, with O, l and m loaded and stored at every tile", "FA2": "along the rows"}
    alt = (
        f"Grids of {T_r} by {T_c} tiles with the order of visits, each beside its loads and stores over time. "
        + " ".join(f"{name} goes {goes[name]}, and moves {n:,} elements." for name, n in moved.items())
    )
    if skip:
        visited = [f"{name} visits {len(visited_tiles(log))}" for name, log in events.items()]
        alt += f" Under the causal mask, {' and '.join(visited)} of {T_r * T_c} tiles."
    return figure, alt


def visited_tiles(log: list[Event]) -> list[tuple[int, int]]:
    """Return the tiles (i, j) in the order of their first event. Events outside the loops belong to no tile."""
    return list(dict.fromkeys((e.i, e.j) for e in log if e.i is not None and e.j is not None))


def _draw_tiles(
    ax: style.Axes, name: str, tiling: Tiling, order: list[tuple[int, int]], skip: list[tuple[int, int]]
) -> None:
    style.tile_axes(ax, tiling.T_r, tiling.T_c)
    for i, j in skip:
        style.masked_box(ax, j, i)
    for time, (i, j) in enumerate(order):
        hatch = dict(hatch=style.MASK_HATCH) if (i, j) in skip else {}
        style.box(ax, j, i, 1, 1, str(time + 1), style.tensor_fill("P"), size=style.NORMAL, **hatch)
    tiles = f", {len(order)} tiles" if skip else ""
    ax.set_title(f"{name}: by {'columns' if name == 'FA1' else 'rows'}{tiles}")


def _draw_timeline(ax: style.Axes, log: list[Event], longest: int) -> None:
    lanes = [tensor for tensor in "QKVOlmL" if any(e.tensor == tensor for e in log)]
    for time, event in enumerate(log):
        lane, color = lanes.index(event.tensor), style.hue(event.tensor)
        look = dict(edgecolor=color, linewidth=0.7, linestyle=style.DASHED if event.tensor == "l" else "-")
        style.box(ax, time, lane - 0.38, 1, 0.76, fill=color if event.op == "load" else style.PAPER, **look)
    for lane, tensor in enumerate(lanes):
        total = sum(e.elements for e in log if e.tensor == tensor)
        style.beside(ax, f"{total:,}", (longest, lane), (5, 0))
    names = dict(yticks=range(len(lanes)), yticklabels=[style.with_script_l(t) for t in lanes])
    style.strip_axes(ax, (-1, 1.15 * longest), (-0.6, len(lanes) - 0.4), **names)
    ax.spines["left"].set_visible(True)
