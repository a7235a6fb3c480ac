"""Timelines that show when the stages of a ring are filled, read and released, and what the consumers do meanwhile."""

from fa2_lab.plots import rung_timeline, style


def data(rung: str = "21", tiles: int = 12) -> dict:
    """Return when each stage of K and V on an SM is in use, and the jobs of the consumers.

    The SM runs this rung's kernel on one row block of `tiles` tiles. Times are in clock cycles.
    """
    costs = rung_timeline.rung_costs(rung)
    block, program = rung_timeline.simulate(costs, tiles, row_blocks=1)
    start = program.copied["K4"].begun
    spans = []
    for tile, job in program.copied.items():
        if tile[0] in "KV":
            stage = f"{tile[0]}, stage {int(tile[1:]) % costs.stages}"
            spans.append((stage, tile, job.begun - start, job.ended - start, max(program.released[tile]) - start))
    jobs = [(job.actor, job.label, job.begun - start, job.ended - start) for job in block.jobs]
    return dict(spans=sorted(spans), jobs=jobs, consumers=costs.consumers, rung=rung)


@style.picture
def draw(spans: list[tuple], jobs: list[tuple], consumers: int, rung: str, window: float = 4500) -> style.Drawn:
    """Draw the stages of V and the consumers over time.

    K's stages are not drawn because a copy of K also waits for its turn, whereas a copy of V waits only for an empty
    stage. `spans` are (stage, tile, start of the copy, end of the copy, last release), and `jobs` are (actor, label,
    start, end).
    """
    caption = (
        "A stage is filled again as soon as both consumers have released it. An arrow is a release, at the end of the"
        f" matmul that reads the tile. Model of rung {rung}, d = 128. The stages of K work in the same way."
    )
    spans = [span for span in spans if span[1][0] == "V"]
    stages = list(dict.fromkeys(span[0] for span in spans))
    order = ["consumer 0", *stages, *(f"consumer {c}" for c in range(1, consumers))]
    figure, ax = style.new_figure(0.42 * len(order) + 0.5, caption)
    rows: dict[str, list[tuple]] = {name: [] for name in order}
    ends: dict[str, list[tuple[str, float]]] = {}
    for c in range(consumers):
        own_jobs = sorted((job for job in jobs if job[0] == str(c)), key=lambda job: job[2])
        products = [job for job in own_jobs if job[1] == "PV"]
        for job in own_jobs:
            tile = f"V{products.index(job)}" if job in products else ""
            words = f"P {tile}" if tile else job[1].split()[0]
            rows[f"consumer {c}"].append((words, *job[2:]))
            if tile:
                ends.setdefault(tile, []).append((f"consumer {c}", job[3]))
    rung_timeline.draw_lanes(ax, rows, window)
    window = rung_timeline.clocks_drawn(window)
    letter = rung_timeline.letter_width() * window
    for stage, tile, begun, ended, released in spans:
        y = order.index(stage)
        for start, stop, copying in ((begun, ended, True), (ended, released, False)):
            start, stop = max(start, 0), min(stop, window)
            if stop - start > 0.01 * window:
                look = dict(hatch=style.MASK_HATCH) if copying else {}
                words = f"copy {tile}" if copying else tile if style.is_narrow() else f"{tile} is there"
                words = words if stop - start > letter * (len(words) + 0.6) else ""
                # The label of a full stage is written on the left, where no arrow crosses it.
                label = words if copying else ""
                style.tensor_box(ax, start, y + 0.06, stop - start, 0.88, tile[0], label, linewidth=0.8, **look)
                if words and not copying:
                    x = start + 0.6 * letter
                    across = [end for pair in ends.values() for _, end in pair if x < end < x + letter * len(words)]
                    style.note(ax, max([x, *(end + letter for end in across)]), y + 0.5, words)
        for consumer, end in ends.get(tile, ()):
            if 0.02 * window < end < window:
                above = order.index(consumer) < y
                start, stop = order.index(consumer) + (0.94 if above else 0.06), y + (0.2 if above else 0.8)
                style.arrow(ax, (end, start), (end, stop), linewidth=1.6)
    ax.set_xlabel("clocks →")
    alt = (
        f"Lines for {len(stages)} stages of V over time, with a hatched box while a copy is under way and a filled one"
        f" until the last of {consumers} consumers has released the tile. The lines above and below show what the"
        " consumers do, and an arrow leads from each matmul with a tile of V to the stage that it releases."
    )
    return figure, alt
