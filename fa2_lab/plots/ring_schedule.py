"""Attention over several GPUs: whose keys are where when, and one rank's time."""

from collections.abc import Mapping

from matplotlib.patches import Polygon

from fa2_lab.machine import ring
from fa2_lab.plots import style
from fa2_lab.records import Record, load
from fa2_lab.reference.shards import meeting
from fa2_lab.tiles import Tile

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
    tflops, link = ({way: r[x] for way, r in rates.items()} for x in ("flops", "link"))
    speeds = f"kernels at {tflops['forward'] / 1e12:.0f} and {tflops['backward'] / 1e12:.0f} TFLOP/s, links at"
    setting = f"Model: rank 1 of {ranks}, {N:,} tokens, 16 heads, d = 128; {speeds} {link['forward'] / 1e9:.0f} GB/s"
    return dict(
        cells=cells,
        lanes=lanes,
        took={way: ms[N] for way, ms in times.items()},
        setting=f"{setting}, as recorded: {record.made()}",
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


PITCH = 1.3  # from one cell to the next
LANES = ("kernels", "K V", "dK dV")


@style.picture
def draw(cells: list[list[Mapping]], lanes: dict, took: dict, setting: str) -> style.Drawn:
    """Above, for each rank and step, whose keys are here and which scores they make; below, one rank's time.

    cells: [rank][step] of dict(source, rows, cols, diagonal), with rows and cols as shares (from, to) of a shard.
    lanes: {direction: (lane, start, end, label, source or None)} of one rank; took: {direction: as measured}; times in
    milliseconds.
    """
    caption = "Queries stay, keys and values go round; the next block travels while this one is computed."
    figure, axes = style.new_figure(6.9, f"{caption} {setting}.", nrows=3, height_ratios=[4.2, 1, 1.3])
    ranks, pitch = len(cells), 1.75 * PITCH
    for rank, row in enumerate(cells):
        style.note(axes[0], -0.25, PITCH * rank + 0.5, f"rank {rank}", ha="right")
        for step, cell in enumerate(row):
            _cell(axes[0], pitch * step, PITCH * rank, cell)
            if not step:
                continue
            above, corner = (pitch * (step - 1) + 1.05, PITCH * (rank - 1) + 0.5), (pitch * step - 0.4, 0.5)
            end = (pitch * step - 0.05, PITCH * rank + 0.5)
            style.arrow(axes[0], above if rank else corner, end, style.hue("K"), linewidth=1.2)
            if not rank:
                style.note(axes[0], pitch * step - 0.42, 0.5, f"from {ranks - 1}", ha="right")
    for step in range(ranks):
        style.note(axes[0], pitch * step + 0.5, -0.22, f"step {step}", ha="center")
    style.bare(axes[0], (-1.0, pitch * (ranks - 1) + 1.1), (-0.45, PITCH * ranks - 0.2), aspect="equal")
    for ax, (direction, spans) in zip(axes[1:], lanes.items(), strict=True):
        _lanes(ax, direction, spans, took[direction])
    alt = (
        f"{ranks} ranks in {ranks} steps. Each cell is the square of a rank's queries (down) and the keys that are here"
        f" (right); what is computed has the colour of the keys' owner, the rest is hatched. At step 0 everybody has"
        f" its own keys; then each block comes from the rank above. Beneath, one rank's kernels and transfers over"
        f" time, forward and backward: {_times(lanes, took)}."
    )
    return figure, alt


def _cell(ax: style.Axes, x: float, y: float, cell: dict) -> None:
    """The square of one meeting: what is computed in the colour of the keys' owner, the rest hatched."""
    style.masked(ax, x, y)
    (top, bottom), (left, right) = cell["rows"], cell["cols"]
    fill = style.worker(cell["source"])
    if cell["diagonal"]:
        corners = [(x, y), (x, y + 1), (x + 1, y + 1)]
        ax.add_patch(Polygon(corners, facecolor=fill, edgecolor=style.INK, linewidth=0.8))
        at = x + 0.3, y + 0.7
    else:
        style.box(ax, x + left, y + top, right - left, bottom - top, fill=fill)
        at = x + (left + right) / 2, y + (top + bottom) / 2
    style.note(ax, *at, f"{cell['source']}", ha="center", color=style.ink_on(fill), fontsize=style.LARGE)


def _lanes(ax: style.Axes, direction: str, spans: list[tuple], took: float) -> None:
    """One rank's kernels and its two kinds of transfer, each on a line of its own, and what was measured."""
    used = [lane for lane in LANES if any(span[0] == lane for span in spans)]
    for lane, start, end, label, source in spans:
        y, width = used.index(lane) + 0.1, end - start
        if source is not None:
            style.box(ax, start, y, width, 0.8, label, style.worker(source))
        else:
            style.tensor_box(ax, start, y, width, 0.8, "dK" if lane == "dK dV" else "K")
    style.box(ax, 0, len(used) + 0.1, took, 0.8, f"{took:.1f} ms", style.PAPER)
    names = ["keys of" if lane == "kernels" else f"{lane} →" for lane in used]
    last = 1.01 * max(took, *(span[2] for span in spans))
    style.bare(ax, (0, last), (0, len(used) + 1), yticks=[n + 0.5 for n in range(len(used) + 1)])
    ax.set_yticklabels([*names, "measured"])
    ax.set_title(f"{direction}, one rank, {took:.1f} ms measured")


def _times(lanes: dict[str, list[tuple]], took: dict[str, float]) -> str:
    """Times in words."""
    parts = []
    for direction, spans in lanes.items():
        sums = {lane: sum(end - start for name, start, end, *_ in spans if name == lane) for lane in LANES}
        each = ", ".join(f"{lane} {t:.3g} ms" for lane, t in sums.items() if t)
        parts.append(f"{direction} {each}, measured {took[direction]:.3g} ms in all")
    return "; ".join(parts)
