"""Attention over several GPUs: whose keys are where when, and one rank's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from fa2_lab.machine import ring
from fa2_lab.plots import style
from fa2_lab.plots.speed import short
from fa2_lab.records import Record, load
from fa2_lab.reference.shards import meeting
from fa2_lab.tiles import Tile

# Data -----------------------------------------------------------------------------------------------------------

ROUND = "K V once round"
SIZES = dict(heads=16, kv_heads=16, d=128, causal=True)


def data(ranks: int = 4, N: int = 131072) -> dict:
    """Every meeting of a causal zigzag ring, when one rank computes and sends what, and the ring as it was measured.

    The model takes its speeds from the record: the kernels' from one GPU, the links' from sending K and V round.
    """
    lengths, record = [N // ranks] * ranks, load("ring")
    cells = [[cell(lengths, rank, (rank - step) % ranks) for step in range(ranks)] for rank in range(ranks)]
    rates = {way: reached(record, way, ranks, N) for way in ("forward", "backward")}
    lanes = {way: spans(way, ranks, N // ranks, 1, rates[way]) for way in rates}
    times = {way: dict(timed(record, way, f"{ranks} GPUs")) for way in rates}
    forward = sorted(times["forward"].items())
    by_model = [(n, 1e3 * ring.ring_seconds(ranks, n // ranks, **rates["forward"])) for n, _ in forward]
    tflops, link = ({way: r[x] for way, r in rates.items()} for x in ("flops", "link"))
    speeds = f"kernels at {tflops['forward'] / 1e12:.0f} and {tflops['backward'] / 1e12:.0f} TFLOP/s, links at"
    setting = f"Model: rank 1 of {ranks}, {N:,} tokens, 16 heads, d = 128; {speeds} {link['forward'] / 1e9:.0f} GB/s"
    return dict(
        cells=cells,
        lanes=lanes,
        took={way: ms[N] for way, ms in times.items()},
        lengths=dict(model=by_model, measured=forward),
        setting=f"{setting}, as recorded\n{record.made()}",
    )


def timed(record: Record, direction: str, who: str) -> list[tuple[int, float]]:
    """(N, milliseconds) of a row of the record, without other layouts."""
    rows = [r for r in record.rows if r.direction == direction and "layout" not in r.problem]
    return sorted((r.problem["N_q"], r.values[who][0]) for r in rows if who in r.values)


def reached(record: Record, direction: str, ranks: int, N: int) -> dict:
    """The model's sizes, FLOP/s of one GPU and bytes a second of a link, as they were measured at this length."""
    flops = next(r.flops for r in record.rows if (r.direction, r.problem["N_q"]) == (direction, N))
    (one, round_trip) = (dict(timed(record, *what))[N] for what in ((direction, "1 GPU"), (ROUND, f"{ranks} GPUs")))
    moved = (ranks - 1) * N // ranks * SIZES["kv_heads"] * SIZES["d"] * 2 * 2  # K and V, 2 bytes each
    return SIZES | dict(flops=1e3 * flops / one, link=1e3 * moved / round_trip)


def cell(lengths: list[int], rank: int, source: int) -> dict:
    """One meeting, its rows and columns as shares of a shard."""
    seen = meeting(lengths, rank, source, "zigzag", causal=True)
    rows, cols = ((x.start / lengths[0], x.stop / lengths[0]) for x in (seen.queries, seen.keys))
    return dict(source=source, rows=rows, cols=cols, diagonal=seen.kind is Tile.DIAGONAL)


def spans(direction: str, ranks: int, rows: int, rank: int, rates: dict) -> list[tuple]:
    """(lane, start, end, label, source of the keys) in milliseconds; a transfer starts when its block is there."""
    step = ring.step(rows, direction, **rates)
    compute, kv = 1e3 * step.compute, 1e3 * ring.step(rows, "forward", **rates).transfer
    gradients = 1e3 * step.transfer - kv
    early, late = (rank, ring.EARLY), (rank, 1 - ring.EARLY)
    others = [((rank - n) % ranks, 1.0) for n in range(1, ranks)]
    forward = direction == "forward"  # there the first half is over when the ranks have agreed and transfers start
    parts = [early, late, *others] if forward else [early, *others, late]
    found, start = [], 0.0
    for n, (source, share) in enumerate(parts):
        end = start + share * compute
        found.append(("kernels", start, end, str(source), source))
        if forward <= n < ranks - 1 + forward:
            found.append(("K V", start, start + kv, "K V", None))
        if direction == "backward" and n > 1:
            found.append(("dK dV", start, start + gradients, "dK dV", None))
        start = end
    return found


# Drawing --------------------------------------------------------------------------------------------------------

PITCH = 1.5  # from one cell to the next
LANES = ("kernels", "K V", "dK dV")


@style.picture
def draw(
    cells: Sequence[Sequence[Mapping]], lanes: Mapping, took: Mapping, lengths: Mapping, setting: str
) -> tuple[Figure, str]:
    """Above, for each rank and step, whose keys are here and which scores they make; below, time, model and measured.

    cells: [rank][step] of dict(source, rows, cols, diagonal), with rows and cols as shares (from, to) of a shard.
    lanes: {direction: (lane, start, end, label, source or None)} of one rank; took: {direction: as measured};
    lengths: {"model", "measured": (N, forward)}; times in milliseconds.
    """
    title = "Queries stay, keys and values go round; the next block travels while this one is computed"
    figure, axes = style.new_figure(9.0, title, nrows=4, height_ratios=[5.4, 1.5, 1.9, 1.7])
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
    for ax, (direction, spans) in zip(axes[1:3], lanes.items(), strict=True):
        _lanes(ax, direction, spans, took[direction])
    _lengths(axes[3], **lengths)
    figure.supxlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    (N, took_short), (_, by_model) = lengths["measured"][0], lengths["model"][0]
    alt = (
        f"{ranks} ranks in {ranks} steps. Each cell is the square of a rank's queries (down) and the keys that are here"
        f" (right), numbered by the rank they belong to: its own first, a triangle; then those of its left neighbours."
        f" All rows see the front half of an earlier rank's keys, the back half of the rows sees all keys of a later"
        f" rank: half of the square each time. Below, the time of one rank by the model: {_told(lanes, took)}. The"
        f" model leaves out what it costs to start steps: a forward of {short(N)} tokens takes {took_short:.1f} ms,"
        f" where it says {by_model:.2g}."
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


def _lanes(ax: Axes, direction: str, spans: Sequence[tuple], took: float) -> None:
    """One rank's kernels and its two kinds of transfer, each on a line of its own, and what was measured."""
    used = [lane for lane in LANES if any(span[0] == lane for span in spans)]
    for lane, start, end, label, source in spans:
        y, width = used.index(lane) + 0.1, end - start
        if source is not None:
            style.box(ax, start, y, width, 0.8, label, style.worker(source), gid=lane)
        else:
            style.tensor_box(ax, start, y, width, 0.8, "dK" if lane == "dK dV" else "K", gid=lane)
    style.box(ax, 0, len(used) + 0.1, took, 0.8, f"{took:.1f} ms", style.PAPER, gid="measured")
    names = ["keys of" if lane == "kernels" else f"{lane} →" for lane in used]
    ax.set_yticks([n + 0.5 for n in range(len(used) + 1)], [*names, "measured"])
    ax.set(ylim=(len(used) + 1, 0), xlim=(0, 1.01 * max(took, *(span[2] for span in spans))))
    ax.set_title(f"{direction}, milliseconds", pad=3)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _lengths(ax: Axes, model: Sequence[tuple], measured: Sequence[tuple]) -> None:
    """The whole forward over the length: where the model holds, and where starting the steps costs more."""
    ax.plot(*zip(*model, strict=True), color=style.QUIET, linestyle="--", marker="o", markersize=3, label="model")
    ax.plot(*zip(*measured, strict=True), color=style.INK, marker="o", markersize=4, label="measured")
    N = [n for n, _ in measured]
    for name, curve, shift in (("measured", measured, (0, 5)), ("model", model, (4, -10))):
        ax.annotate(name, curve[1], shift, textcoords="offset points", fontsize=style.SMALL)
    ax.set(xscale="log", yscale="log", xlabel="tokens in all", xlim=(N[0] / 1.2, N[-1] * 1.2))
    ax.set_xticks(N, [short(n) for n in N])
    ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.minorticks_off()
    ax.set_title("forward by length, milliseconds: a short ring waits for its steps to start", pad=3)


def _told(lanes: Mapping[str, Sequence[tuple]], took: Mapping[str, float]) -> str:
    """Times in words."""
    parts = []
    for direction, spans in lanes.items():
        sums = {lane: sum(end - start for name, start, end, *_ in spans if name == lane) for lane in LANES}
        told = ", ".join(f"{lane} {t:.3g} ms" for lane, t in sums.items() if t)
        parts.append(f"{direction} {told}, measured {took[direction]:.3g} ms in all")
    return "; ".join(parts)
