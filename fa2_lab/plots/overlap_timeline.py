"""Timelines of one SM's tensor cores and exponentials while two warpgroups overlap their work in four ways."""

from collections.abc import Generator, Mapping

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, reasons
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Job, ThreadBlock, Wait
from fa2_lab.plots import rung_timeline, style
from fa2_lab.records import load

FOUR_WAYS = {  # {title: (whether a warpgroup starts the next S early, how the warpgroups share the tensor cores)}
    "Neither": (False, SHARED),
    "Within: P V of the tile before runs during the exponentials": (True, SHARED),
    "Between: one runs matmuls during the other's exponentials": (False, IN_ORDER),
    "Both": (True, IN_ORDER),
}


def data(d: int = 128, T: int = 16, window: float = 6144) -> dict:
    """Return four simulated timelines of two warpgroups, each of which has T tiles of 64 × 128.

    The jobs overlap within each warpgroup, between the two warpgroups, in both ways, or not at all. The model assumes
    that copies arrive early, so no warpgroup waits for them. `window` is the number of clock cycles that draw() shows.
    """
    product, softmax = 2 * 64 * 128 * d / chips.H200.tensor_flops_per_clock, 64 * 128 / chips.H200.exp_per_clock
    panels = []
    for name, (ahead, tensor) in FOUR_WAYS.items():
        block = ThreadBlock(tensor=tensor)
        block.run({str(warpgroup_number): warpgroup(block, T, product, softmax, ahead) for warpgroup_number in (0, 1)})
        jobs = [(job.unit, int(job.actor), job.label, job.begun, job.ended) for job in block.jobs]
        panels.append(dict(name=name, share=block.busy_fraction("tensor"), jobs=sorted(jobs)))
    record = load("ladder")
    counted = {n: reasons.hardware_counters(record, ladder.find(n))[reasons.TENSOR_BUSY] for n in ("19", "20")}
    setting = f"schematic: H200, d = {d}, two tiles of 64 × 128 at a time"
    return dict(window=window, tiles=T, panels=panels, counted=counted, setting=setting)


def warpgroup(block: ThreadBlock, T: int, product: float, softmax: float, ahead: bool) -> Generator[Wait]:
    """Simulate one warpgroup that computes T tiles.

    With software pipelining (`ahead`), a tile's S and the previous tile's P V start together. A matmul takes `product`
    clock cycles, and a softmax takes `softmax`.
    """
    before: Job | None = None
    for n in range(T):
        s = block.start("tensor", product, f"S{n}")
        if ahead and n:
            before = block.start("tensor", product, f"PV{n - 1}")
        yield s.done()
        yield block.start("exp", softmax, f"P{n}").done()
        if before:
            yield before.done()
        if not ahead or n == T - 1:
            yield block.start("tensor", product, f"PV{n}").done()


UNITS = {"tensor": "tensor cores", "exp": "exponentials"}


@style.picture
def draw(window: float, tiles: int, panels: list[Mapping], counted: dict[str, float], setting: str) -> style.Drawn:
    """Draw one timeline for each of the four ways in which the work of two warpgroups can overlap.

    `window` is the number of clock cycles drawn. Each title states the share of the time, over all `tiles` tiles, in
    which the tensor cores are busy. `counted` holds the measured share for two rungs, in percent.
    """
    caption = "Exponentials can overlap with matmuls within a warpgroup, between two warpgroups, or in both ways. The"
    caption += f" percentages are those of the tensor cores, over all {tiles} tiles"
    timelines = {
        f"{panel['name']}: {panel['share']:.0%} busy": {
            f"{name}, {warpgroup_number}": [job[2:] for job in panel["jobs"] if job[:2] == (unit, warpgroup_number)]
            for unit, name in UNITS.items()
            for warpgroup_number in (0, 1)
        }
        for panel in panels
    }
    window *= 1.4 if style.is_narrow() else 1  # a longer time is drawn on a phone, but the labels still fit
    shares = " and ".join(f"{percent:.0f}% of the time in rung {n}" for n, percent in counted.items())
    measured = f"the tensor cores are busy {shares}, which starts S early"
    figure = rung_timeline.stacked_timelines(5.5, f"{caption} ({setting}).", timelines, window, measured=measured)
    for ax, rows in zip(figure.axes, timelines.values(), strict=True):
        rung_timeline.mark_waits(ax, rows, window)
        style.box(ax, 0, 0.06, rung_timeline.clocks_drawn(window), 1.88, "", style.MASKED, linewidth=0, zorder=0)
    figure.axes[-1].set_xlabel("clocks of one SM → (0 and 1: its two warpgroups)")
    busy = "; ".join(f"{p['name']}: tensor cores busy {p['share']:.0%} of the time" for p in panels)
    alt = (
        "Four timelines of one SM, one above the other. Each has two lanes for the tensor cores and two for"
        f" exponentials, one for each warpgroup. Over the whole run: {busy}. In the first, both warpgroups run"
        " matmuls at the same time and then both compute exponentials. In the last, they take turns."
    )
    return figure, alt
