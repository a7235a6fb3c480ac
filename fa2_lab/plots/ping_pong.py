"""Timeline of two consumers without and with ping-pong at d = 64, where exponentials take as long as matmuls."""

from collections.abc import Generator, Mapping

from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier, Block, Job, Wait
from fa2_lab.plots import idea_gains, rung_timeline, style


def data(d: int = 64, keys: int = 128, T: int = 12) -> dict:
    """Return the jobs (unit, consumer, label, start, end) without and with ping-pong, in clock cycles."""
    product, softmax = 2 * 64 * keys * d / chips.H200.tensor_per_clock, 64 * keys / chips.H200.exp_per_clock
    panels = []
    for name, turns in (("Without ping-pong", False), ("Ping-pong", True)):
        block = Block()
        may = [Barrier(f"turn of {c}", arrivals=1) for c in (0, 1)]
        may[0].arrive("launch")  # consumer 0 begins
        block.run({str(c): consumer(block, may if turns else [], c, T, product, softmax) for c in (0, 1)})
        jobs = [(job.unit, job.actor, job.label, job.begun, job.ended) for job in block.jobs]
        panels.append(dict(name=name, jobs=jobs, share=block.busy("tensor")))
    turns = [x["gain"] for x in idea_gains.gains() if x["d"] == d and x["idea"].startswith("turns on the tensor cores")]
    return dict(panels=panels, d=d, gains=(min(turns), max(turns)))


def consumer(block: Block, may: list[Barrier], c: int, T: int, product: float, softmax: float) -> Generator[Wait]:
    """Run consumer c on T tiles: for each tile, compute its S and the previous tile's P V, and then the softmax.

    With ping-pong, `may` has one barrier per consumer, at which the consumer waits for its turn. Without ping-pong,
    `may` is empty. A matmul takes `product` clock cycles, and a softmax takes `softmax`.
    """
    late: Job | None = None
    for n in range(T):
        if may:
            yield may[c].over(n & 1)
        s = block.start("tensor", product, f"S{n}")
        if n:
            late = block.start("tensor", product, f"PV{n - 1}")
        yield (late or s).done()
        if may:
            may[1 - c].arrive(block.actor)
        yield block.start("exp", softmax, f"P{n}").done()


@style.picture
def draw(panels: list[Mapping], d: int, gains: tuple[float, float], window: float = 6000) -> style.Drawn:
    """Draw one timeline per panel: two consumers without ping-pong, and two with it.

    `gains` are the lowest and the highest measured speedups from ping-pong.
    """
    caption = (
        "With ping-pong, one consumer runs matmuls while the other computes its softmax. Without it, both may wait"
    )
    caption += f" at the same time. In this model of an SM, d = {d}, both begin together. On a GPU they drift apart, so"
    caption += " ping-pong gains far less."
    measured = f"ping-pong makes the kernel {gains[0]:.2f} to {gains[1]:.2f} times as fast at d = {d}"
    timelines = {}
    for panel in panels:
        rows = {f"{name}, {c}": [job[2:] for job in panel["jobs"] if job[:2] == (unit, str(c))]
                for unit, name in (("tensor", "tensor cores"), ("exp", "softmax")) for c in (0, 1)}  # fmt: skip
        timelines[f"{panel['name']}: tensor cores at work {panel['share']:.0%} of the time"] = rows
    ways = "; ".join(f"{panel['name']}: tensor cores at work {panel['share']:.0%}" for panel in panels)
    figure = rung_timeline.stacked_timelines(3.3, caption, timelines, window, measured=measured)
    for ax, rows in zip(figure.axes, timelines.values(), strict=True):
        rung_timeline.mark_waits(ax, rows, window)
    return figure, f"Two timelines of two consumers, with lines for matmuls and softmax of each. {ways}."
