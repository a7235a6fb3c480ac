"""Timeline of two consumers with and without ping-pong at d = 64, where exponentials take as long as matmuls."""

from collections.abc import Generator, Mapping

from fa2_lab.machine import chips
from fa2_lab.machine.asynchrony import Barrier, Job, ThreadBlock, Wait
from fa2_lab.plots import idea_gains, rung_timeline, style
from fa2_lab.records import load


def data(d: int = 64, keys: int = 128, T: int = 12) -> dict:
    """Return the jobs (unit, consumer, label, start, end) with and without ping-pong, with times in clock cycles."""
    product, softmax = 2 * 64 * keys * d / chips.H200.tensor_flops_per_clock, 64 * keys / chips.H200.exp_per_clock
    panels = []
    for name, turns in (("In step, without ping-pong", False), ("In step, with ping-pong", True)):
        block = ThreadBlock()
        may = [Barrier(f"turn of {c}", arrivals=1) for c in (0, 1)]
        may[0].arrive("launch")  # consumer 0 begins
        block.run({str(c): consumer(block, may if turns else [], c, T, product, softmax) for c in (0, 1)})
        jobs = [(job.unit, job.actor, job.label, job.begun, job.ended) for job in block.jobs]
        panels.append(dict(name=name, jobs=jobs, share=block.busy_fraction("tensor")))
    turns = [x["gain"] for x in idea_gains.gains() if x["d"] == d and x["idea"].startswith("turns on the tensor cores")]
    return dict(panels=panels, d=d, gains=(min(turns), max(turns)), setup=load("ideas").setup())


def consumer(block: ThreadBlock, may: list[Barrier], c: int, T: int, product: float, softmax: float) -> Generator[Wait]:
    """Simulate consumer c for T tiles: for each tile, it computes S and the previous tile's P V, and then the softmax.

    With ping-pong, `may` contains one barrier per consumer, at which the consumer waits for its turn. Otherwise, `may`
    is empty. A matmul takes `product` clock cycles, and a softmax takes `softmax`.
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
def draw(panels: list[Mapping], d: int, gains: tuple[float, float], setup: str, window: float = 6000) -> style.Drawn:
    """Draw one timeline of two consumers without ping-pong and one with it.

    Below them, two bars compare the speedup from ping-pong in the model with the measured one. `gains` holds the lowest
    and the highest measured speedup, and the second bar has no fill between these two values. `setup` describes the
    measurement.
    """
    without, turns = (panel["share"] for panel in panels)
    words = f"{turns / without:.2f}", f"{gains[0]:.2f} to {gains[1]:.2f}"
    caption = f"If two consumers begin in step, ping-pong makes them {words[0]} times as fast, but on a GPU they drift"
    caption += f" apart anyway, so it makes them {words[1]} times as fast. With ping-pong, one consumer runs matmuls"
    caption += " while the other computes its softmax. Without it, both may wait at the same time. The timelines are a"
    caption += f" model of an SM, d = {d}, in which both begin together. Measured: {setup}."
    digits, window = ("0123456789", 4500) if style.is_narrow() else ("", window)  # so that a matmul's label fits
    timelines = {}
    for panel in panels:
        rows = {
            f"{name}, {c}": [(job[2].rstrip(digits), *job[3:]) for job in panel["jobs"] if job[:2] == (unit, str(c))]
            for unit, name in (("tensor", "tensor cores"), ("exp", "softmax"))
            for c in (0, 1)
        }
        timelines[f"{panel['name']}: tensor cores at work {panel['share']:.0%} of the time"] = rows
    ways = "; ".join(f"{panel['name']}: tensor cores at work {panel['share']:.0%}" for panel in panels)
    figure, (*axes, below) = style.new_figure(4.1, caption, nrows=3, height_ratios=(4, 4, 1.5))
    for ax, (title, rows) in zip(axes, timelines.items(), strict=True):
        rung_timeline.draw_lanes(ax, rows, window)
        rung_timeline.mark_waits(ax, rows, window)
        ax.set_title(title)
    axes[-1].set_xlabel("clocks →")
    names = ("in step", "on a GPU") if style.is_narrow() else ("in step (model)", "on a GPU (measured)")
    style.named_bars(below, dict(zip(names, (turns / without, gains[1]), strict=True)), words, style.WORKERS[:2])
    below.barh(names[1], gains[1] - gains[0], left=gains[0], facecolor=style.PAPER, edgecolor=style.worker_color(1))
    below.axvline(1, color=style.INK, linewidth=1.2)
    below.set_xticks([1], labels=["equal"])
    below.set_title("Speed with ping-pong, divided by the speed without it")
    alt = (
        f"Two timelines of two consumers, with lines for matmuls and softmax of each. {ways}. Two bars below: ping-pong"
    )
    return figure, f"{alt} makes the kernel {words[0]} times as fast in the model, and {words[1]} times as measured."
