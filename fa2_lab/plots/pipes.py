"""Who waits for whom inside a thread block of the Hopper kernels: one row for each ring of buffers."""

import textwrap

from fa2_lab.plots import style


def data(ways: list[str] = ("forward", "backward")) -> dict:
    """The rings of each pass: {ring: (stages, how many consumers must release one before it is filled again)}.

    The forward's are those of sizes.SHORT. Its V has no releases: K's tell that its stage is empty, too.
    """
    rings = {
        "forward": {"mailbox": (2, 2), "Q": (4, 1), "K": (3, 2), "V": (3, 0)},
        "backward": {"mailbox": (2, 2), "K": (2, 2), "V": (1, 2), "rows": (2, 2)},
    }
    return dict(blocks={way: rings[way] for way in ways})


PAGE = (1.1, 2.05, 3.85, 4.8)  # units: the producer's edge, the stages from and to, the consumers' edge
PHONE = (0.75, 1.3, 2.75, 3.3)
LANE, HIGH = 0.62, 0.32
LOOKS = {"mailbox": ("m", "mailbox"), "rows": ("Q", "Q, dO")}  # the hue and the name of what is no tensor


@style.picture
def draw(blocks: dict[str, dict[str, tuple[int, int]]]) -> style.Drawn:
    """A panel for each pass. blocks: {"forward", "backward": {ring: (stages, releases that empty one)}}."""
    caption = (
        "The producer waits until a stage is empty, and the consumers wait until it is full. A solid arrow means that"
        " all bytes are there. A dashed arrow means that the given number of consumers has released the stage."
    )
    heights = [0.35 + LANE * (len(block) + 1) for block in blocks.values()]
    figure, axes = style.new_figure(sum(heights), caption, nrows=len(blocks), height_ratios=heights, squeeze=False)
    alt = [
        "One thread block of each kernel. The producer warp is on the left, and the two consumer warpgroups are on the"
        " right. Between them is a row for each ring of buffers in shared memory, with a solid arrow for full and a"
        " dashed arrow back for empty."
    ]
    for (ax,), (way, rings) in zip(axes, blocks.items(), strict=True):
        _block(ax, way, rings)
        words = "; ".join(
            f"{LOOKS.get(ring, (ring, ring))[1]}: {style.counted(n, 'stage')}" for ring, (n, _) in rings.items()
        )
        alt.append(f"{way.capitalize()}: {words}. Between the consumers: {BETWEEN[way]}.")
        ax.set_title(way.capitalize())
    return figure, " ".join(alt)


BETWEEN = {
    "forward": "each waits until the other's matmuls have started (ping-pong)",
    "backward": "each waits for the other's half of dS, and adds its part of dQ to HBM",
}


def _block(ax: style.Axes, way: str, rings: dict[str, tuple[int, int]]) -> None:
    """The producer, the rings, the consumers and the two arrows at each side of a ring."""
    producer, left, right, consumers = PHONE if style.narrow() else PAGE
    bottom, end = LANE * len(rings) + 0.1, style.width() - 0.1
    style.box(ax, 0.02, 0, producer - 0.02, bottom, "producer\n\n1 warp\ncopies", style.worker(3))
    style.box(
        ax, consumers, 0, end - consumers, bottom, "consumers\n0 and 1\n\n4 warps\neach\ncompute", style.worker(3)
    )
    for lane, (ring, (number, releases)) in enumerate(rings.items()):
        y, wide = LANE * (lane + 0.5) + 0.05, (right - left) / number
        tensor, name = LOOKS.get(ring, (ring, ring))
        for stage in range(number):
            label = name if style.narrow() and len(name) > 1 else f"{name} {stage}"
            style.tensor_box(ax, left + stage * wide, y - HIGH / 2, wide - 0.05, HIGH, tensor, label)
        for start, stop in ((producer, left), (right, consumers)):
            style.arrow(ax, (start + 0.03, y - 0.08), (stop - 0.05, y - 0.08))
            if releases:
                style.arrow(ax, (stop - 0.05, y + 0.1), (start + 0.03, y + 0.1), linestyle=(0, (3, 2)))
        words = "with K" if not releases else f"{releases} ×" if style.narrow() else style.counted(releases, "release")
        style.note(ax, (right + consumers) / 2, y + 0.21, words, ha="center")
    style.note(
        ax, 0.02, bottom + 0.15, textwrap.fill(f"Between them: {BETWEEN[way]}.", 44 if style.narrow() else 90), va="top"
    )
    style.bare(ax, (0, style.width() - 0.08), (-0.05, bottom + (0.55 if style.narrow() else 0.35)))
