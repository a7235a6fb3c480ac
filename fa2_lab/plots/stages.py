"""The stages of a ring over time: being filled, full, and empty again, beside the consumers that use them."""

from fa2_lab.plots import strips, style


def data(rung: str = "21", tiles: int = 12) -> dict:
    """Return spans of each stage of K and V on an SM, in clocks, and the jobs of its consumers."""
    size = strips.sizes(rung)
    block, program = strips.ran(size, tiles, row_blocks=1)
    start = program.copied["K4"].begun
    spans = []
    for tile, job in program.copied.items():
        if tile[0] in "KV":
            stage = f"{tile[0]}, stage {int(tile[1:]) % size.stages}"
            spans.append((stage, tile, job.begun - start, job.ended - start, max(program.released[tile]) - start))
    jobs = [(job.actor, job.label, job.begun - start, job.ended - start) for job in block.jobs]
    return dict(spans=sorted(spans), jobs=jobs, consumers=size.consumers, rung=rung)


@style.picture
def draw(spans: list[tuple], jobs: list[tuple], consumers: int, rung: str, window: float = 8000) -> style.Drawn:
    """Draw spans, each (stage, tile, copy from, copy to, last release), and jobs, each (actor, label, from, to)."""
    caption = "A stage is filled once both consumers have released the tile before. A hatched box is a copy under way,"
    caption += (
        f" and a filled box is a tile that is there. Without a box, the stage is empty. Model of rung {rung}, d = 128."
    )
    stages = list(dict.fromkeys(span[0] for span in spans))
    figure, ax = style.new_figure(0.3 * (len(stages) + consumers) + 0.5, caption)
    rows = {stage: [] for stage in stages}
    rows |= {f"consumer {c}": [job[1:] for job in jobs if job[0] == str(c)] for c in range(consumers)}
    strips.lanes(ax, rows, window)
    window = strips.span(window)
    for stage, tile, begun, ended, released in spans:
        y = stages.index(stage)
        for start, stop, copying in ((begun, ended, True), (ended, released, False)):
            start, stop = max(start, 0), min(stop, window)
            if stop > start:
                look = dict(hatch=style.MASK_HATCH, linewidth=0.8) if copying else dict(linewidth=0.8)
                words = "" if copying or stop - start < 0.06 * window else tile
                style.tensor_box(ax, start, y + 0.06, stop - start, 0.88, tile[0], words, **look)
    ax.set_xlabel("clocks →")
    alt = (
        f"Lines for {len(stages)} stages of K and V over time, with a hatched box while a copy is under way and a"
        f" filled one until the last of {consumers} consumers has released the tile. The lines beneath show what the"
        " consumers do."
    )
    return figure, alt
