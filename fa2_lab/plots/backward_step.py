"""Timeline of one step of the Hopper backward pass: a consumer's matmuls, exponentials and additions to dQ."""

from collections.abc import Generator

from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier, Job, ThreadBlock, Wait
from fa2_lab.plots import style

UNITS = {"tensor": "tensor cores", "exp": "exponentials", "copy": "additions"}


def data(n: int = 3, steps: int = 8, d: int = 128, B_r: int = 64) -> dict:
    """Return the arguments of draw() for steps n and n + 1 of one column block, simulated for two consumers.

    The consumers share the tensor cores. A job is (consumer, unit, result, step number, start, end), with times in
    clock cycles.
    """
    product, softmax = 2 * 64 * B_r * d / chips.H200.tensor_flops_per_clock, 64 * B_r / chips.H200.exp_per_clock
    block, ds_filled = ThreadBlock(), Barrier("dS filled", arrivals=2)
    block.run({str(c): consumer(block, ds_filled, steps, product, softmax) for c in (0, 1)})
    jobs = []
    for job in block.jobs:
        tensor, number = job.label.split()
        jobs.append((int(job.actor), job.unit, tensor, int(number), job.begun, job.ended))
    first = {number: begun for c, _, tensor, number, begun, _ in jobs if (c, tensor) == (0, "S")}
    return dict(
        n=n,
        jobs=sorted(jobs),
        window=(first[n], first[n + 2]),
        busy=block.busy_fraction("tensor", since=first[1]),
        setting=f"model: H200, d = {d}, tiles of {B_r} rows × 64 keys per consumer",
    )


def consumer(
    block: ThreadBlock, ds_filled: Barrier, steps: int, product: float, softmax: float, add: float = 600
) -> Generator[Wait]:
    """Simulate one consumer of `block` that runs its jobs in the same order as the kernel.

    The consumer computes a step's dQ during the next step, after the two consumers have exchanged their dS. They wait
    for each other's dS at the barrier `ds_filled`. A matmul takes `product` clock cycles, the exponentials take
    `softmax`, and an addition to dQ takes `add`.
    """
    addition: Job | None = None
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
            if addition:
                yield addition.done()  # wait until TMA has read the previous partial dQ
            addition = block.start("copy", add, f"dQ {n - 1}")
        yield block.start("tensor", product, f"dP {n}").done()
        ds_filled.arrive(block.actor)
        dk = block.start("tensor", product, f"dK {n}")
        yield dv.done()
        yield dk.done()


@style.picture
def draw(n: int, jobs: list[tuple], window: tuple[float, float], busy: float, setting: str) -> style.Drawn:
    """Draw three lanes for one consumer: its matmuls, its exponentials and its additions to dQ."""
    caption = (
        f"While step {n} computes its exponentials, the tensor cores run step {n - 1}'s dQ. One consumer; the other"
        f" does the same at the same time. The number on a job is its step ({setting})."
    )
    figure, ax = style.new_figure(1.9, caption)
    start, end = window
    places = {unit: row for row, unit in enumerate(UNITS)}
    for c, unit, tensor, number, begun, ended in jobs:
        if c == 0 and ended > start and begun < end:
            span = (max(begun, start) - start, min(ended, end) - start)
            _draw_job(ax, places[unit], span, tensor, number)
            if (unit, number) == ("exp", n):
                _draw_frame(ax, span)
    for unit, row in places.items():
        style.note(ax, -60, row + 0.5, UNITS[unit], ha="right")
    ticks = dict(xticks=range(0, int(end - start) + 1, 1000), xlabel="clocks →")
    style.strip_axes(
        ax, (-(0.35 if style.is_narrow() else 0.2) * (end - start), end - start), (-0.15, len(places) + 0.1), **ticks
    )
    order = [f"{unit}: {tensor} {number}" for c, unit, tensor, number, begun, _ in sorted(jobs, key=lambda job: job[4])
            if c == 0 and start <= begun < end]  # fmt: skip
    alt = (
        f"One consumer over time, with a lane for its matmuls on the tensor cores, one for its exponentials and one for"
        f" its additions to dQ. In order of time: {'; '.join(order)}. The other consumer does the same at the same"
        f" time. The tensor cores are busy {busy:.0%} of the time."
    )
    return figure, alt


def _draw_job(ax: style.Axes, row: float, span: tuple[float, float], tensor: str, number: int) -> None:
    """Draw one job as a box in the colour of its tensor, labelled with the tensor and the step number."""
    begun, ended = span
    label = f"{tensor}\n{number}" if style.is_narrow() else f"{tensor} {number}"
    style.tensor_box(
        ax, begun, row + 0.1, ended - begun, 0.8, tensor, label if ended - begun > 200 else "", linewidth=0.8
    )


def _draw_frame(ax: style.Axes, span: tuple[float, float]) -> None:
    """Draw a thick frame around the two upper lanes during the interval `span`, in which the exponentials run."""
    begun, ended = span
    ax.add_patch(
        style.Rectangle((begun, 0), ended - begun, 2, fill=False, edgecolor=style.INK, linewidth=2.2, zorder=3)
    )
