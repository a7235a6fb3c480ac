"""One moment of FA1 or FA2: which tiles are done, what is moving right now, and what has moved so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.plots import style
from fa2_lab.plots.causal_tiles import FILLS
from fa2_lab.plots.visiting_order import LANES, visits
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import Mask, Tile, Tiling
from fa2_lab.trace import Event, Trace

# Data -----------------------------------------------------------------------------------------------------------

D = 4  # the head dimension; any would show the same


@lru_cache(maxsize=64)
def recording(order: str, N_q: int, N_k: int, B_r: int, B_c: int, causal: bool) -> tuple[Event, ...]:
    """Every load and store of the forward of one head, as the meter saw them."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((n, D)) for n in (N_q, N_k, N_k))
    trace = Trace()
    stage = {"FA1": fa1, "FA2": fa2}[order]
    stage.forward(Q, K, V, B_r=B_r, B_c=B_c, mask=Mask(causal=causal), trace=trace)
    return tuple(trace.events)


def data(order="FA2", N_q=12, N_k=12, B_r=4, B_c=3, causal=True, t: int | None = None) -> dict:
    """The state after t loads and stores, or halfway if t is None."""
    tiling, events = Tiling(N_q, N_k, B_r, B_c, Mask(causal=causal)), recording(order, N_q, N_k, B_r, B_c, causal)
    return dict(name=order, tiling=tiling, d=D, events=events, t=len(events) // 2 if t is None else t)


# Drawing --------------------------------------------------------------------------------------------------------

HEIGHT = 5.4
GRID, SIDE, LANE = (0.02, 0.34, 0.64, 0.58), (0.7, 0.34, 0.29, 0.58), (0.045, 0.07, 0.9, 0.22)  # places on the page
WAITING = style.tint(style.QUIET, 0.35)


@style.picture
def draw(name: str, tiling: Tiling, d: int, events: Sequence[Event], t: int) -> tuple[Figure, str]:
    """The tile grid between Q, K, V and what is stored, after t loads and stores, with all of them on a time axis.

    events: what a Trace recorded of the algorithm `name`, one of LANES, on this tiling.
    """
    done = events[:t]
    moved, total = (sum(e.elements for e in log) for log in (done, events))
    causal = ", causal" if tiling.mask.causal else ""
    title = f"{name}{causal}: {t:,} of {len(events):,} loads and stores, {moved:,} of {total:,} elements"
    figure, axes = style.new_figure(HEIGHT, title, nrows=3)
    figure.set_layout_engine("none")  # nothing may move while a slider does
    for ax, place in zip(axes, (GRID, SIDE, LANE), strict=True):
        ax.set_position(place)
    _grid(axes[0], name, tiling, d, done)
    _side(axes[1], tiling, done, visits(events))
    _timeline(axes[2], LANES[name], events, t)
    return figure, f"{title}. {_now(done)}. {len(visits(done))} of {len(visits(events))} tiles visited."


def _now(done: Sequence[Event]) -> str:
    if not done:
        return "Nothing has moved yet"
    e = done[-1]
    blocks = [f"{axis} block {k}" for axis, k in (("row", e.i), ("column", e.j)) if k is not None]
    return f"Now: {e.op} {e.tensor}, {' and '.join(blocks) or 'before the loops'}, {e.elements:,} elements"


def _grid(ax: Axes, name: str, tiling: Tiling, d: int, done: Sequence[Event]) -> None:
    gap = 0.06 * max(tiling.N_q, tiling.N_k)
    strips = _strips(name, tiling, d, gap)
    left, top = min(x for x, *_ in strips.values()), min(y for _, y, *_ in strips.values())
    right = max(x + w for x, _, w, _ in strips.values())
    ax.set(xlim=(left - 3 * gap, right + gap), ylim=(tiling.N_q + gap, top - gap), aspect="equal", anchor="C")
    ax.set_axis_off()
    _tiles(ax, tiling, visits(done))
    for tensor, place in strips.items():
        _strip(ax, tensor, place, tiling, done[-1] if done else None)
    if done:
        ax.add_patch(style.Rectangle(*_region(tiling, done[-1]), fill=False, edgecolor=style.INK, lw=2.4, gid="now"))


def _strips(name: str, tiling: Tiling, d: int, gap: float) -> dict[str, tuple[float, float, float, float]]:
    """Where each tensor lies around S: x, y, width, height, in elements."""
    stats = [tensor for tensor in LANES[name] if tensor not in "QKVO"]
    thin = max(1.0, 1.6 * gap)  # a statistic is one number wide, too little for its name
    strips = {"Q": (-gap - d, 0, d, tiling.N_q), "O": (tiling.N_k + gap, 0, d, tiling.N_q)}
    strips |= {"K": (0, -gap - d, tiling.N_k, d), "V": (0, -2 * gap - 2 * d, tiling.N_k, d)}
    for n, tensor in enumerate(stats):
        strips[tensor] = (tiling.N_k + 2 * gap + d + n * (thin + gap), 0, thin, tiling.N_q)
    return strips


def _strip(
    ax: Axes, tensor: str, place: tuple[float, float, float, float], tiling: Tiling, event: Event | None
) -> None:
    """A tensor, and in full colour the block of it that moves right now: filled if loaded, framed if stored."""
    x, y, w, h = place
    moving = event is not None and event.tensor == tensor
    pale = style.tint(style.hue(tensor), 0.12 if moving else 0.3)
    ax.add_patch(style.Rectangle((x, y), w, h, facecolor=pale, edgecolor="none"))
    if moving:
        (left, top), width, height = _region(tiling, event)
        block = (left, y, width, h) if tensor in "KV" else (x, top, w, height)
        fill = style.hue(tensor) if event.op == "load" else style.PAPER
        style.box(ax, *block, fill=fill, edgecolor=style.hue(tensor), linewidth=2, gid=f"{event.op} {tensor}")
    if tensor in "QKV":
        ax.text(x - 0.4, y + h / 2, tensor, ha="right", va="center")
    else:
        ax.text(x + w / 2, y - 0.3, tensor, ha="center", va="bottom")


def _region(tiling: Tiling, event: Event) -> tuple[tuple[int, int], int, int]:
    """Corner, width and height of what an event belongs to: a tile, a row or column of tiles, or all of S."""
    rows = slice(0, tiling.N_q) if event.i is None else tiling.rows(event.i)
    cols = slice(0, tiling.N_k) if event.j is None else tiling.cols(event.j)
    return (cols.start, rows.start), cols.stop - cols.start, rows.stop - rows.start


def _tiles(ax: Axes, tiling: Tiling, order: list[tuple[int, int]]) -> None:
    room = _points_per_element(ax)
    number = {tile: str(k + 1) for k, tile in enumerate(order)}
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            rows, cols, kind = tiling.rows(i), tiling.cols(j), tiling.kind(i, j)
            w, h = cols.stop - cols.start, rows.stop - rows.start
            label = number.get((i, j), "")
            fits = w * room > 3 + 5 * len(label) and h * room > 12
            hatch = style.MASK_HATCH if kind is Tile.SKIP else None
            look = dict(hatch=hatch, edgecolor=style.QUIET, linewidth=0.6, gid="done" if label else "to come")
            patch = style.box(ax, cols.start, rows.start, w, h, label if fits else "", _fill(kind, bool(label)), **look)
            if label and fits:
                patch.label_text.set_bbox(dict(facecolor=patch.get_facecolor(), edgecolor="none", pad=1.0))
    if tiling.mask.causal:  # the edge of what is seen: row r sees its first keys_seen(r) keys
        seen = [tiling.keys_seen(row) for row in range(tiling.N_q)]
        ax.stairs(
            seen,
            range(tiling.N_q + 1),
            baseline=None,
            orientation="horizontal",
            color=style.INK,
            linewidth=1.2,
            gid="edge",
        )


def _fill(kind: Tile, visited: bool) -> str:
    """A visited tile has its kind's colour; one that is visited although nothing in it is seen has a faint one."""
    if not visited:
        return FILLS[Tile.SKIP] if kind is Tile.SKIP else style.PAPER
    return style.tint(style.hue("S"), 0.2) if kind is Tile.SKIP else FILLS[kind]


def _points_per_element(ax: Axes) -> float:
    page, (x0, x1), (y0, y1) = ax.get_position(original=True), ax.get_xlim(), ax.get_ylim()
    return min(72 * style.WIDTH * page.width / abs(x1 - x0), 72 * HEIGHT * page.height / abs(y1 - y0))


def _side(ax: Axes, tiling: Tiling, done: Sequence[Event], planned: list[tuple[int, int]]) -> None:
    """What moves now, and how many tiles of each kind are visited."""
    seen, todo = (Counter(tiling.kind(i, j) for i, j in tiles) for tiles in (visits(done), planned))
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_axis_off()
    ax.text(0, 1, _now(done).replace(", ", "\n"), va="top", linespacing=1.5)
    ax.text(0, 0.5, f"Tiles visited: {sum(seen.values())} of {len(planned)}", weight="bold")
    for line, kind in enumerate(k for k in (Tile.FULL, Tile.DIAGONAL, Tile.SKIP) if tiling.counts()[k]):
        y = 0.38 - 0.12 * line
        never = f"{kind.name}: {tiling.counts()[kind]}, never visited"
        hatch = style.MASK_HATCH if kind is Tile.SKIP else None
        style.box(ax, 0, y, 0.07, 0.075, fill=_fill(kind, bool(todo[kind])), edgecolor=style.QUIET, hatch=hatch)
        ax.text(0.1, y + 0.01, f"{kind.name}: {seen[kind]} of {todo[kind]}" if todo[kind] else never)


def _timeline(ax: Axes, lanes: Sequence[str], events: Sequence[Event], t: int) -> None:
    """A lane for each tensor; what is still to come stays grey. Filled = load, open = store."""
    for lane, tensor in enumerate(lanes):
        for op in ("load", "store"):
            for past in (True, False):
                times = [k for k, e in enumerate(events) if (e.tensor, e.op, k < t) == (tensor, op, past)]
                color = style.hue(tensor) if past else WAITING
                look = dict(facecolors=color if op == "load" else style.PAPER, edgecolors=color, linewidth=0.7)
                gid = f"{op} {tensor} {'past' if past else 'to come'}"
                ax.broken_barh([(k, 1) for k in times], (lane - 0.38, 0.76), gid=gid, **look)
        moved = sum(e.elements for e in events[:t] if e.tensor == tensor)
        ax.text(1.01 * len(events), lane, f"{moved:,}", va="center", fontsize=style.SMALL)
    ax.axvline(t, color=style.INK, linewidth=1.2, gid="time")
    ax.set(xlim=(-0.005 * len(events), 1.005 * len(events)), ylim=(len(lanes) - 0.5, -0.5), xticks=[])
    ax.set(yticks=range(len(lanes)), yticklabels=lanes)
    ax.spines["bottom"].set_visible(False)
    ax.set_xlabel("time →   filled = load, open = store; at the right the elements so far", fontsize=style.SMALL)
