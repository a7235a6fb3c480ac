"""Two timelines of a step of the backward pass: one whose jobs run one after another, and one in the kernel's order."""

from collections.abc import Generator, Mapping

from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier, ThreadBlock, Wait
from fa2_lab.plots import backward_step, rung_timeline, style


def data(steps: int = 12, d: int = 128, B_r: int = 64) -> dict:
    """Return the arguments of draw(): the jobs in two orders, and the share of time in which the tensor cores are busy.

    A job is a tuple (unit, consumer, label, start, end), with times in clock cycles.
    """
    product, softmax = 2 * 64 * B_r * d / chips.H200.tensor_flops_per_clock, 64 * B_r / chips.H200.exp_per_clock
    panels = []
    for name, order in (
        ("Each job waits for the one before", one_by_one),
        ("The kernel's order", backward_step.consumer),
    ):
        block, ds_filled = ThreadBlock(), Barrier("dS filled", arrivals=2)
        block.run({str(c): order(block, ds_filled, steps, product, softmax) for c in (0, 1)})
        begun = next(job.begun for job in block.jobs if (job.actor, job.label) == ("0", "S 4"))
        jobs = [(job.unit, job.actor, job.label.split()[0], job.begun - begun, job.ended - begun) for job in block.jobs]
        panels.append(dict(name=name, jobs=jobs, share=block.busy_fraction("tensor")))
    return dict(
        panels=panels, setting=f"Model of an SM of an H200, d = {d}, {B_r} rows per step, an addition of 600 clocks"
    )


def one_by_one(
    block: ThreadBlock, ds_filled: Barrier, steps: int, product: float, softmax: float, add: float = 600
) -> Generator[Wait]:
    """Simulate a consumer of `block` that starts each job only after the previous job has ended.

    The two consumers wait for each other's dS at the barrier `ds_filled`. A matmul takes `product` clock cycles, the
    exponentials take `softmax`, and an addition to dQ takes `add`.
    """
    for n in range(steps):
        for unit, tensor in ("tensor", "S"), ("exp", "P"), ("tensor", "dV"), ("tensor", "dP"):
            yield block.start(unit, product if unit == "tensor" else softmax, f"{tensor} {n}").done()
        ds_filled.arrive(block.actor)
        yield ds_filled.over(n & 1)
        for tensor in ("dK", "dQ"):
            yield block.start("tensor", product, f"{tensor} {n}").done()
        yield block.start("copy", add, f"dQ {n}").done()


@style.picture
def draw(panels: list[Mapping], setting: str, window: float = 6000) -> style.Drawn:
    """Draw two timelines of a step: one in which each job waits for the previous one, and one in the kernel's order."""
    caption = "In the kernel's order, dQ's matmul overlaps with the next exponentials, and dQ's addition with other"
    caption += " matmuls."
    window = 6800 if style.is_narrow() else window  # long enough to include an addition in the first panel
    timelines = {}
    for panel in panels:
        rows = {name: [job[2:] for job in panel["jobs"] if job[:2] == (unit, "0")]
                for unit, name in backward_step.UNITS.items()}  # fmt: skip
        timelines[f"{panel['name']}: tensor cores at work {panel['share']:.0%}"] = rows
    figure = rung_timeline.stacked_timelines(
        3.1, f"{caption} This is one of two consumers. {setting}.", timelines, window
    )
    for ax, rows in zip(figure.axes, timelines.values(), strict=True):
        rung_timeline.mark_waits(ax, rows, window)
    ways = "; ".join(f"{panel['name']}: {panel['share']:.0%}" for panel in panels)
    return (
        figure,
        f"Two timelines of a consumer with lines for matmuls, exponentials, additions. Tensor cores at work: {ways}.",
    )
