"""Timeline of one program's copies and matmuls, first with one stage and then with three stages."""

from collections.abc import Generator, Mapping

from fa2_lab.machine.asynchrony import ThreadBlock, Wait
from fa2_lab.plots import rung_timeline, style


def data(rung: str = "10", tiles: int = 12) -> dict:
    """Return the jobs of a program that has an SM to itself, once with one stage and once with three stages.

    A job is (unit, actor, label, start, end), with times in clock cycles. The program runs this rung's kernel on
    `tiles` tiles.
    """
    panels = []
    for stages in (1, 3):
        costs = rung_timeline.rung_costs(rung)._replace(programs=1, stages=stages)
        if stages == 1:
            block = ThreadBlock()
            block.run({"0": one_by_one(block, costs, tiles)})
        else:
            block, _ = rung_timeline.simulate(costs, tiles, row_blocks=1)
        jobs = [(job.unit, job.actor, job.label, job.begun - 3000, job.ended - 3000) for job in block.jobs]
        panels.append(dict(stages=stages, jobs=jobs, clocks=block.clock / tiles))
    return dict(panels=panels, rung=rung)


def one_by_one(block: ThreadBlock, costs: rung_timeline.RungCosts, tiles: int) -> Generator[Wait]:
    """Simulate a program that starts to copy a tile only when it needs the tile and then waits for the copy.

    `costs` holds the clock cycles that a tile takes on each unit. The program copies Q first and stores O at the end.
    """
    yield block.start("copy", costs.rows, "Q").done()
    for _ in range(tiles):
        for unit, clocks, label in (
            ("copy", costs.copy, "K"),
            ("tensor", costs.product, "S"),
            ("exp", costs.softmax, f"softmax {costs.softmax:.0f}"),
            ("copy", costs.copy, "V"),
            ("tensor", costs.product, "PV"),
        ):
            yield block.start(unit, clocks, label).done()
    yield block.start("copy", costs.rows, "O").done()


@style.picture
def draw(panels: list[Mapping], rung: str, window: float = 6000) -> style.Drawn:
    """Draw one timeline of a program with one stage and one of a program with three stages.

    A panel holds the number of stages, the clock cycles per tile, and the jobs (unit, actor, label, start, end).
    """
    caption = "With one stage, each matmul waits for a copy, and with three, copies run ahead during the matmuls."
    caption += (
        f" Model of one program of rung {rung} on an SM of an H200, d = 128. A stage holds a tile of K and a tile of V."
    )
    timelines = {
        f"{style.count_with_noun(panel['stages'], 'stage')}: {panel['clocks']:,.0f} clocks per tile": {
            name: [job[2:] for job in panel["jobs"] if job[0] == unit] for unit, name in rung_timeline.UNITS.items()
        }
        for panel in panels
    }
    alt = f"Two timelines of a program with lines for copies, tensor cores and softmax. {'; '.join(timelines)}."
    return rung_timeline.stacked_timelines(2.9, caption, timelines, window), alt
