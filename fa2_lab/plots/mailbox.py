"""Timeline of the mailbox: which row-block index each slot holds, and which row block each warpgroup works on."""

from fa2_lab.plots import rung_timeline, style


def data(rung: str = "21", tiles: int = 4, row_blocks: int = 4) -> dict:
    """Return a list of spans (lane, row block, start, end) on one SM, with times in clock cycles.

    The lanes are the producer, the mailbox's slots and the consumers. The SM runs this rung's kernel on `row_blocks`
    row blocks with `tiles` tiles each.
    """
    costs = rung_timeline.rung_costs(rung)
    block, program = rung_timeline.simulate(costs, tiles, row_blocks)
    spans = []
    for r in range(row_blocks):
        last = program.copied[f"V{(r + 1) * tiles - 1}"]
        spans.append(("producer copies", r, program.sent[r], last.ended))
        spans.append((f"mailbox slot {r % 2}", r, program.sent[r], max(program.read[r])))
        for c in range(costs.consumers):
            products = sorted(job.ended for job in block.jobs if job.label == "PV" and job.actor == str(c))
            ends = products[tiles - 1 :: tiles]  # the end of each row block's last P V, before TMA copies O
            begun = max(program.sent[r], ends[r - 1]) if r else program.sent[r]
            spans.append((f"consumer {c}", r, begun, ends[r]))
    return dict(spans=spans, rung=rung, clocks=block.clock)


@style.picture
def draw(spans: list[tuple], rung: str, clocks: float) -> style.Drawn:
    """Draw the spans (lane, row block, start, end) of the producer, the mailbox's slots and the consumers."""
    caption = (
        "The producer starts a row block first and leaves its number in the mailbox. A slot holds the number until both"
        f" consumers have read it (arrows). Model of rung {rung}, with four tiles per row block."
    )
    figure, ax = style.new_figure(2.9, caption)
    order = ("producer", "mailbox", "consumer")
    names = sorted({span[0] for span in spans}, key=lambda name: (order.index(name.split()[0]), name))
    names = [names[0], "", *names[1:3], " ", *names[3:]]  # the empty lanes leave room for the arrows
    window = 1.005 * clocks
    rung_timeline.draw_lanes(ax, {name: [] for name in names}, window * window / rung_timeline.clocks_drawn(window))
    first = min(y for y, name in enumerate(names) if name.startswith("consumer"))
    for name, r, begun, ended in spans:
        y, wide = names.index(name), min(ended, window) - begun
        if wide < 0.005 * window:
            continue
        words = f"{r}" if "slot" in name else f"row block {r}"
        if style.is_narrow():
            words = words.removeprefix("row ")
        style.box(ax, begun, y + 0.06, wide, 0.88, words, style.worker_color(3 - r % 4), linewidth=0.8)
        if "slot" in name:
            reads = [b for actor, block, b, _ in spans if block == r and actor.startswith("consumer")]
            style.arrow(ax, (begun, 0.94), (begun, y + 0.04), linewidth=1.6)
            for c, read in enumerate(reads):
                ax.plot([read, read], [y + 0.94, first + c - 0.1], color=style.PAPER, linewidth=4.5, zorder=2)
                style.arrow(ax, (read, y + 0.94), (read, first + c + 0.06), linewidth=1.6, zorder=3)
            if r == 1:  # the first row block whose index waits in the mailbox
                style.beside(ax, "writes" if style.is_narrow() else "writes number 1", (begun, 1.5), (5, 0))
                style.beside(ax, "reads" if style.is_narrow() else "both read it", (max(reads), first - 0.5), (5, 0))
    ax.set(xticks=range(0, int(window), 10000), xlabel="clocks →")
    alt = (
        "Lines over time show the producer, two slots of the mailbox and two consumers. The producer begins to copy"
        " a row block while the consumers work on the one before. Its number stays in a slot until both have read it,"
        " and an arrow leads from the slot to each consumer when it reads."
    )
    return figure, alt
