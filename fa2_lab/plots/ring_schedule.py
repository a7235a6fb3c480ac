"""Attention over several GPUs: whose keys are where when, and one rank's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from fa2_lab.machine import chips, ring
from fa2_lab.plots import style
from fa2_lab.reference.shards import meeting
from fa2_lab.tiles import Tile

# Data -----------------------------------------------------------------------------------------------------------

REACHED = {"forward": 0.6e15, "backward": 0.4e15}  # FLOP/s of this project's kernels on an H200, rounded
SIZES = dict(heads=16, kv_heads=16, d=128, causal=True)


def data(ranks: int = 4, rows: int = 4096) -> dict:
    """Every meeting of a causal zigzag ring, and when one rank computes and sends what."""
    lengths = [rows] * ranks
    cells = [[cell(lengths, rank, (rank - step) % ranks) for step in range(ranks)] for rank in range(ranks)]
    lanes = {way: spans(way, ranks, rows, rank=1) for way in ("forward", "backward")}
    link = chips.H200.link_per_second
    setting = f"rank 1, {rows:,} rows a rank, 16 heads, d = 128; kernels at {REACHED['forward'] / 1e12:.0f} and "
    setting += f"{REACHED['backward'] / 1e12:.0f} TFLOP/s, links at the {link / 1e9:.0f} GB/s of an H200's sheet"
    return dict(cells=cells, lanes=lanes, setting=setting)


def cell(lengths: list[int], rank: int, source: int) -> dict:
    """One meeting, its rows and columns as shares of a shard."""
    seen = meeting(lengths, rank, source, "zigzag", causal=True)
    rows, cols = ((x.start / lengths[0], x.stop / lengths[0]) for x in (seen.queries, seen.keys))
    return dict(source=source, rows=rows, cols=cols, diagonal=seen.kind is Tile.DIAGONAL)


def spans(direction: str, ranks: int, rows: int, rank: int) -> list[tuple]:
    """(lane, start, end, label, source of the keys) in milliseconds; a transfer starts when its block is there."""
    options = SIZES | dict(flops=REACHED[direction], link=chips.H200.link_per_second)
    step = ring.step(rows, direction, **options)
    compute, kv = 1e3 * step.compute, 1e3 * ring.step(rows, "forward", **options).transfer
    gradients = 1e3 * step.transfer - kv
    own = [1.0] if direction == "forward" else [0.25, 0.75]  # of the own triangle, its first and second half of rows
    parts = [(rank, own[0])] + [((rank - n) % ranks, 1.0) for n in range(1, ranks)] + [(rank, x) for x in own[1:]]
    found, start = [], 0.0
    for n, (source, share) in enumerate(parts):
        end = start + share * compute
        found.append(("kernels", start, end, str(source), source))
        if n < ranks - 1:
            found.append(("K V", start, start + kv, "K V", None))
        if direction == "backward" and n > 1:
            found.append(("dK dV", start, start + gradients, "dK dV", None))
        start = end
    return found


# Drawing --------------------------------------------------------------------------------------------------------

PITCH = 1.5  # from one cell to the next
LANES = ("kernels", "K V", "dK dV")


@style.picture
def draw(cells: Sequence[Sequence[Mapping]], lanes: Mapping[str, Sequence[tuple]], setting: str) -> tuple[Figure, str]:
    """Above, for each rank and step, whose keys are here and which scores they make; below, one rank's time.

    cells: [rank][step] of dict(source, rows, cols, diagonal), with rows and cols as shares (from, to) of a shard.
    lanes: {direction: (lane, start, end, label, source or None)}, times in milliseconds.
    """
    title = "Queries stay, keys and values go round; the next block travels while this one is computed"
    figure, axes = style.new_figure(7.4, title, nrows=3, height_ratios=[5.4, 1.15, 1.6])
    ranks = len(cells)
    for rank, row in enumerate(cells):
        axes[0].text(-0.35, PITCH * rank + 0.5, f"rank {rank}", ha="right", va="center")
        for step, cell in enumerate(row):
            _cell(axes[0], PITCH * 2 * step, PITCH * rank, cell)
            if step:
                _arrow(axes[0], rank, step, ranks)
    for step in range(ranks):
        axes[0].text(PITCH * 2 * step + 0.5, -0.25, f"step {step}", ha="center", va="bottom")
    axes[0].set(xlim=(-1.7, PITCH * 2 * ranks - 1.7), ylim=(PITCH * ranks - 0.3, -0.75), aspect="equal")
    _bare(axes[0])
    for ax, (direction, spans) in zip(axes[1:], lanes.items(), strict=True):
        _lanes(ax, direction, spans)
    axes[2].set_xlabel(f"milliseconds →\n{setting}", fontsize=style.SMALL, color=style.QUIET)
    alt = (
        f"{ranks} ranks in {ranks} steps. Each cell is the square of a rank's queries (down) and the keys that are here"
        f" (right), numbered by the rank they belong to: its own first, a triangle; then those of its left neighbours,"
        f" one after the other. All rows see the front half of an earlier rank's keys, the back half of the rows sees"
        f" all keys of a later rank: half of the square each time. Below, the time of one rank: {_told(lanes)}."
    )
    return figure, alt


def _cell(ax: Axes, x: float, y: float, cell: Mapping) -> None:
    """The square of one meeting: what is computed in the colour of the keys' owner, the rest hatched."""
    style.box(ax, x, y, 1, 1, fill=style.MASKED, edgecolor=style.QUIET, hatch=style.MASK_HATCH, gid="unseen")
    (top, bottom), (left, right) = cell["rows"], cell["cols"]
    fill, gid = style.worker(cell["source"]), f"keys of {cell['source']}"
    if cell["diagonal"]:
        corners = [(x, y), (x, y + 1), (x + 1, y + 1)]
        ax.add_patch(Polygon(corners, facecolor=fill, edgecolor=style.INK, linewidth=0.8, gid=gid))
        at = x + 0.3, y + 0.7
    else:
        style.box(ax, x + left, y + top, right - left, bottom - top, fill=fill, gid=gid)
        at = x + (left + right) / 2, y + (top + bottom) / 2
    ax.text(*at, f"{cell['source']}", ha="center", va="center", color=style.ink_on(fill), fontsize=style.LARGE)


def _arrow(ax: Axes, rank: int, step: int, ranks: int) -> None:
    """The block comes from the rank above, or round the corner."""
    end = PITCH * 2 * step - 0.08, PITCH * rank + 0.5
    start = (PITCH * 2 * (step - 1) + 1.08, PITCH * (rank - 1) + 0.5) if rank else (end[0] - 0.62, end[1])
    look = dict(arrowstyle="->", color=style.hue("K"), linewidth=1.2, shrinkA=0, shrinkB=0)
    ax.annotate("", end, start, arrowprops=look)
    if rank == 0:
        ax.text(start[0] - 0.05, start[1], f"from {ranks - 1}", ha="right", va="center", fontsize=style.SMALL)


def _bare(ax: Axes) -> None:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _lanes(ax: Axes, direction: str, spans: Sequence[tuple]) -> None:
    """One rank's kernels and its two kinds of transfer, each on a line of its own."""
    used = [lane for lane in LANES if any(span[0] == lane for span in spans)]
    for lane, start, end, label, source in spans:
        y, width = used.index(lane) + 0.1, end - start
        if source is not None:
            style.box(ax, start, y, width, 0.8, label, style.worker(source), gid=lane)
        else:
            style.tensor_box(ax, start, y, width, 0.8, "dK" if lane == "dK dV" else "K", gid=lane)
    ax.set_yticks(
        [n + 0.5 for n in range(len(used))], ["keys of" if lane == "kernels" else f"{lane} →" for lane in used]
    )
    ax.set(ylim=(len(used), 0), xlim=(0, 1.01 * max(span[2] for span in spans)))
    ax.set_title(direction, pad=3)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _told(lanes: Mapping[str, Sequence[tuple]]) -> str:
    """Times in words."""
    parts = []
    for direction, spans in lanes.items():
        sums = {lane: sum(end - start for name, start, end, *_ in spans if name == lane) for lane in LANES}
        parts.append(direction + " " + ", ".join(f"{lane} {t:.2g} ms" for lane, t in sums.items() if t))
    return "; ".join(parts)
