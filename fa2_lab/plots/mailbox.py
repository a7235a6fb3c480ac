"""The mailbox over time: the number in each of its two slots, and the row block that each warpgroup works on."""

from fa2_lab.plots import strips, style


def data(rung: str = "21", tiles: int = 4, row_blocks: int = 5) -> dict:
    """Return (row, row block, from, to) on an SM in clocks: the producer's copies, both slots, and each consumer."""
    size = strips.sizes(rung)
    block, program = strips.ran(size, tiles, row_blocks)
    spans = []
    for r in range(row_blocks):
        last = program.copied[f"V{(r + 1) * tiles - 1}"]
        spans.append(("producer copies", r, program.sent[r], last.ended))
        spans.append((f"mailbox slot {r % 2}", r, program.sent[r], max(program.read[r])))
        for c in range(size.consumers):
            ends = sorted(job.begun for job in block.jobs if job.label == "O" and job.actor == str(c))
            spans.append((f"consumer {c}", r, sorted(program.read[r])[0], ends[r]))
    return dict(spans=spans, rung=rung, clocks=block.clock)


@style.picture
def draw(spans: list[tuple], rung: str, clocks: float) -> style.Drawn:
    """Draw the spans, each (row, row block, from, to)."""
    caption = (
        "The producer is a row block ahead, and the mailbox tells the consumers which one is next. A slot of the"
        f" mailbox holds the number of a row block until both consumers have read it. Model of rung {rung}, with four"
        " tiles per row block."
    )
    figure, ax = style.new_figure(1.9, caption)
    order = ("producer", "mailbox", "consumer")
    names = sorted({span[0] for span in spans}, key=lambda name: (order.index(name.split()[0]), name))
    rows = {name: [(f"row block {r}", begun, ended) for row, r, begun, ended in spans if row == name] for name in names}
    strips.lanes(ax, rows, clocks)
    ax.set(xticks=range(0, int(strips.span(clocks)), 10000), xlabel="clocks →")
    alt = (
        "Lines over time show the producer, two slots of the mailbox and two consumers. The producer begins to copy"
        " a row block while the consumers work on the one before. Its number stays in a slot until both have read it."
    )
    return figure, alt
