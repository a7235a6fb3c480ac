"""In which order FA1 and FA2 visit the tiles, and every load and store that costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import cdiv
from fa2_lab.trace import Event, Trace

# Data -----------------------------------------------------------------------------------------------------------


def data(N: int = 12, d: int = 4, B_r: int = 4, B_c: int = 3) -> dict:
    """What the meter sees of FA1 and FA2 on the same small problem."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    events = {}
    for name, stage in (("FA1", fa1), ("FA2", fa2)):
        trace = Trace()
        stage.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=trace)
        events[name] = trace.events
    return dict(T_r=cdiv(N, B_r), T_c=cdiv(N, B_c), events=events)


# Drawing --------------------------------------------------------------------------------------------------------


@style.picture
def draw(T_r: int, T_c: int, events: dict[str, Sequence[Event]]) -> tuple[Figure, str]:
    """Tile grids of FA1 and FA2 side by side with the time of each visit, and beneath each its HBM traffic over time.

    events: {"FA1": ..., "FA2": ...} as a Trace recorded them; FA1's alone are drawn with the traffic beside the grid.
    """
    both = "FA2" in events
    title = "FA1 moves O, l and m through HBM at every tile" + ("; FA2 keeps them on chip" if both else "")
    panels = dict(nrows=2, height_ratios=[1.15, 1]) if both else {}
    figure, axes = style.new_figure(5.6 if both else 2.6, title, ncols=2, **panels)
    longest = max(len(e) for e in events.values())
    for (name, log), (grid, timeline) in zip(events.items(), zip(*axes, strict=True) if both else [axes], strict=True):
        _grid(grid, name, T_r, T_c, visits(log))
        _timeline(timeline, log, longest)
    return figure, _alt(T_r, T_c, {name: sum(e.elements for e in log) for name, log in events.items()})


def _alt(T_r: int, T_c: int, moved: dict[str, int]) -> str:
    both = "FA2" in moved
    return (
        f"{'Two grids' if both else 'A grid'} of {T_r} by {T_c} tiles, the order of visits written in"
        f" {'them' if both else 'it'}: FA1 goes down the columns{', FA2 along the rows' if both else ''}."
        f" {'Beneath' if both else 'Beside it'}, every load (filled) and store (open) on a time axis, a lane for each"
        f" tensor: FA1 moves {moved['FA1']:,} elements, with O, l and m loaded and stored at every tile"
        + (f"; FA2 moves {moved['FA2']:,}." if both else ".")
    )


def visits(log: Sequence[Event]) -> list[tuple[int, int]]:
    """The tiles (i, j) in the order of their first event; events outside both loops belong to no tile."""
    return list(dict.fromkeys((e.i, e.j) for e in log if e.i is not None and e.j is not None))


def _grid(ax: Axes, name: str, T_r: int, T_c: int, order: list[tuple[int, int]]) -> None:
    style.tile_axes(ax, T_r, T_c)
    for time, (i, j) in enumerate(order):
        style.box(ax, j, i, 1, 1, str(time + 1), style.tint(style.hue("S")), size=style.NORMAL)
    outer = "columns outside, rows inside" if name == "FA1" else "rows outside, columns inside"
    ax.set_title(f"{name}: {outer}")


def _timeline(ax: Axes, log: Sequence[Event], longest: int) -> None:
    lanes = [tensor for tensor in "QKVOlmL" if any(e.tensor == tensor for e in log)]
    for time, event in enumerate(log):
        lane, color = lanes.index(event.tensor), style.hue(event.tensor)
        fill = color if event.op == "load" else style.PAPER
        ax.add_patch(style.Rectangle((time, lane - 0.38), 1, 0.76, facecolor=fill, edgecolor=color, linewidth=0.7))
    for lane, tensor in enumerate(lanes):
        total = sum(e.elements for e in log if e.tensor == tensor)
        ax.text(1.03 * longest, lane, f"{total:,}", va="center", fontsize=style.SMALL)
    ax.set(
        xlim=(-1, 1.12 * longest),
        ylim=(len(lanes) - 0.4, -0.9),
        yticks=range(len(lanes)),
        yticklabels=[style.ell(t) for t in lanes],
        xticks=[],
    )
    ax.spines["bottom"].set_visible(False)
    ax.text(1.03 * longest, -0.75, "elements", va="center", fontsize=style.SMALL, color=style.QUIET)
    ax.set_xlabel(f"time → ({sum(e.elements for e in log):,} elements; filled: load, open: store)")
