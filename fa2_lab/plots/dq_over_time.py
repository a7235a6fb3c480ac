"""Timelines that show when each worker writes which block of dQ, with atomic adds and with two passes."""

from collections.abc import Mapping, Sequence

from fa2_lab.plots import style
from fa2_lab.records import Measurement, Record, load

ONE_PASS = 5  # matmuls per tile: S, dP, dV, dK, dQ
FIRST, SECOND = 4, 3  # matmuls per tile in the pass over columns (S, dP, dV, dK) and in the pass over rows (S, dP, dQ)


def data(T: int = 4) -> dict:
    """Return a simulation of one head of T × T tiles on T SMs that start together. The unit of time is one matmul.

    For each way to compute dQ, `visits` lists (SM, start, end, name of the block that the tile adds to), and `writes`
    is {(block of dQ, time): SMs that write the block}. `ms` lists the measured times of the two ways in ms, and
    `setting` describes the measurement.
    """
    sm_steps = [(SM, step) for SM in range(T) for step in range(T)]
    second_pass_start = FIRST * T
    atomics = [(SM, ONE_PASS * i, ONE_PASS * (i + 1), f"+ dQ {i + 1}") for SM, i in sm_steps]
    columns = [(SM, FIRST * i, FIRST * (i + 1), "dK, dV") for SM, i in sm_steps]
    rows = [
        (SM, second_pass_start + SECOND * j, second_pass_start + SECOND * (j + 1), f"dQ {SM + 1}") for SM, j in sm_steps
    ]
    atomic_writes = {(i, ONE_PASS * (i + 1)): list(range(T)) for i in range(T)}
    single_writes = {(i, second_pass_start + SECOND * T): [i] for i in range(T)}
    variants = {
        "One pass, atomic adds": dict(visits=atomics, writes=atomic_writes),
        "Two passes": dict(visits=columns + rows, writes=single_writes),
    }
    record = load("ladder")
    row = find_measurement(record)
    p, ms = row.problem, [row.values[name][0] for name in ("b00_atomics", "b01_two_passes")]
    setting = f"{record.setup()}, batch {p['batch']}, {p['heads']} heads, N = {p['N_q']:,}, d = {p['d']}, no mask"
    return dict(variants=variants, T=T, ms=ms, setting=setting)


def find_measurement(record: Record) -> Measurement:
    """Return the measurement of the backward rungs of the ladder without a mask."""
    return next(row for row in record.rows if row.direction == "backward" and not row.problem["causal"])


@style.picture
def draw(variants: dict[str, Mapping], T: int, ms: Sequence[float], setting: str) -> style.Drawn:
    """Draw two timelines, one with atomic adds and one with two passes.

    Each timeline shows the SMs over time and, below them, the blocks of dQ, with a mark for each write. The length of a
    timeline is the measured time, which is divided evenly among the matmuls.
    """
    earlier = f"{1 - ms[1] / ms[0]:.0%} earlier"
    caption = f"Two passes end {earlier}, and each block of dQ has one writer. A box is"
    caption += (
        " one tile, or a row of tiles with notches between them. Its label names what is added to, in memory (+) or on"
        " the chip."
    )
    caption += (
        " A mark is a write of dQ, with its writer. Each way is as long as it was measured, and its matmuls share"
    )
    caption += f" that time evenly ({setting})."
    figure, axes = style.new_figure(5.4, caption, nrows=len(variants), sharex=True)
    lines = []
    for ax, (name, variant), took in zip(axes, variants.items(), ms, strict=True):
        end = max(visit[2] for visit in variant["visits"])
        count = sum(map(len, variant["writes"].values()))
        unit = took / end  # ms per matmul
        _draw_tiles(ax, variant["visits"], unit)
        _draw_writes(ax, {(i, unit * time): SMs for (i, time), SMs in variant["writes"].items()}, T)
        ax.axvline(took, color=style.QUIET, linewidth=0.8, linestyle=":", zorder=0)
        ax.set_yticks([k + 0.5 for k in range(T)] + [T + 0.8 + i for i in range(T)],
                      [f"worker {k + 1}" for k in range(T)] + [f"dQ {i + 1}" for i in range(T)])  # fmt: skip
        ax.set(ylim=(2 * T + 0.35, -0.1))
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        lines.append(f"{name}: {took:.1f} ms measured, {end} matmuls, {count} writes of dQ")
        ax.set_title(lines[-1])
    style.arrow(axes[-1], (ms[0], T / 2), (ms[1], T / 2), style.OURS)
    style.note(axes[-1], sum(ms) / 2, T / 2 - 0.4, earlier, ha="center", weight="bold", color=style.OURS)
    axes[-1].set(xlim=(0, 1.02 * max(ms)), xlabel="measured time, in ms →")
    alt = (
        f"{T} workers over time, twice, with {T} blocks of dQ beneath. {'. '.join(lines)}. With atomic adds all column"
        f" programs start at the same rows, so their additions meet, in an order that differs from run to run. With two"
        " passes the column programs leave dQ alone, and then each row program sums its block on chip and writes it."
    )
    return figure, alt


def _draw_tiles(ax: style.Axes, visits: Sequence[tuple[int, float, float, str]], unit: float) -> None:
    """Draw a box for all tiles of an SM that share a label, with notches between them. A matmul takes `unit` ms."""
    spans: dict[tuple[int, str], list[float]] = {}
    for SM, begun, ended, label in visits:
        spans.setdefault((SM, label), []).extend((unit * begun, unit * ended))
    for (SM, label), times in spans.items():
        begun, ended = min(times), max(times)
        style.box(ax, begun, SM + 0.06, ended - begun, 0.88, label, style.worker_color(SM), edgecolor=style.PAPER)
        for top in (0.06, 0.8):
            ax.vlines([*{*times} - {begun, ended}], SM + top, SM + top + 0.14, color=style.PAPER, linewidth=1.2)


def _draw_writes(ax: style.Axes, writes: dict[tuple[int, float], list[int]], top: int) -> None:
    """Draw a mark for each write to a block of dQ."""
    for (i, time), SMs in writes.items():
        several = len(SMs) > 1
        words = f"× {len(SMs)}" if style.is_narrow() else f"{len(SMs)} at once"
        label, width = (words, 1.1) if several else (str(SMs[0] + 1), 0.32)
        look = dict(edgecolor=style.hue("dQ"), linewidth=1.2)
        style.box(ax, time - width, top + 0.42 + i, width, 0.76, label, style.tensor_fill("dQ"), **look)
