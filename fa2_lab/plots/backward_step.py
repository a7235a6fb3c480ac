"""One step of the Hopper backward over time: the five matmuls, the exponentials and the additions of two consumers."""

from collections.abc import Generator

from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier, Block, Job, Wait
from fa2_lab.plots import style

UNITS = {"tensor": "tensor cores", "exp": "exponentials", "copy": "additions"}


def data(n: int = 3, steps: int = 8, d: int = 128, B_r: int = 64) -> dict:
    """Simulate two steps, n and n + 1, of one column block, in a model whose consumers share the tensor cores.

    A job is (consumer, unit, what, of which step, from, to).
    """
    product, softmax = 2 * 64 * B_r * d / chips.H200.tensor_per_clock, 64 * B_r / chips.H200.exp_per_clock
    block, ds_filled = Block(), Barrier("dS filled", arrivals=2)
    block.run({str(c): consumer(block, ds_filled, steps, product, softmax) for c in (0, 1)})
    jobs = []
    for job in block.jobs:
        what, number = job.label.split()
        jobs.append((int(job.actor), job.unit, what, int(number), job.begun, job.ended))
    first = {number: begun for c, _, what, number, begun, _ in jobs if (c, what) == (0, "S")}
    return dict(
        n=n,
        jobs=sorted(jobs),
        window=(first[n], first[n + 2]),
        busy=block.busy("tensor", since=first[1]),
        setting=f"model: H200, d = {d}, tiles of {B_r} rows × 64 keys per consumer",
    )


def consumer(
    block: Block, ds_filled: Barrier, steps: int, product: float, softmax: float, add: float = 600
) -> Generator[Wait]:
    """Run a consumer in the kernel's order: a step's dQ is computed in the next one, once both have shared dS."""
    added: Job | None = None
    for n in range(steps):
        s = block.start("tensor", product, f"S {n}")
        if n:
            yield ds_filled.over((n - 1) & 1)
            dq = block.start("tensor", product, f"dQ {n - 1}")
        yield s.done()
        yield block.start("exp", softmax, f"P {n}").done()
        dv = block.start("tensor", product, f"dV {n}")
        if n:
            yield dq.done()
            if added:
                yield added.done()  # TMA has read the part before
            added = block.start("copy", add, f"dQ {n - 1}")
        yield block.start("tensor", product, f"dP {n}").done()
        ds_filled.arrive(block.actor)
        dk = block.start("tensor", product, f"dK {n}")
        yield dv.done()
        yield dk.done()


@style.picture
def draw(n: int, jobs: list[tuple], window: tuple[float, float], busy: float, setting: str) -> style.Drawn:
    """Draw three lanes for each consumer. Jobs of step n have a strong edge."""
    caption = "While a step computes its exponentials, the tensor cores run the dQ matmul of the step before."
    figure, ax = style.new_figure(3.3, f"{caption} Strong edges mark step {n} ({setting}).")
    start, end = window
    lanes = [(c, unit) for c in (0, 1) for unit in UNITS]
    places = {lane: row + 0.35 * lane[0] for row, lane in enumerate(lanes)}
    for c, unit, what, number, begun, ended in jobs:
        if ended > start and begun < end:
            span = (max(begun, start) - start, min(ended, end) - start)
            _job(ax, places[c, unit], span, unit, what, number, strong=number == n)
    for (c, unit), row in places.items():
        style.note(ax, -60, row + 0.5, f"{UNITS[unit]}, {c}", ha="right")
    ticks = dict(xticks=range(0, int(end - start) + 1, 1000), xlabel="clocks →")
    style.bare(
        ax, (-(0.35 if style.narrow() else 0.23) * (end - start), end - start), (-0.1, len(lanes) + 0.45), **ticks
    )
    mine = [f"{unit}: {what} {number}" for c, unit, what, number, begun, _ in sorted(jobs, key=lambda job: job[4])
            if c == 0 and start <= begun < end]  # fmt: skip
    alt = (
        f"Two consumers over time, each with a lane for its matmuls on the tensor cores, one for its exponentials and"
        f" one for its additions to dQ. Consumer 0 in order of time: {'; '.join(mine)}. Consumer 1 does the same at"
        f" the same time. The tensor cores are busy {busy:.0%} of the time."
    )
    return figure, alt


def _job(
    ax: style.Axes, row: float, span: tuple[float, float], unit: str, what: str, number: int, strong: bool
) -> None:
    """Draw one job as a box in its tensor's colour; "dQ 2" is the addition of a part of dQ."""
    begun, ended = span
    label = f"{what} {number}" if unit == "copy" else what
    look = dict(linewidth=2.2, edgecolor=style.INK, linestyle="-") if strong else dict(linewidth=0.8)
    style.tensor_box(ax, begun, row + 0.1, ended - begun, 0.8, what, label if ended - begun > 200 else "", **look)
