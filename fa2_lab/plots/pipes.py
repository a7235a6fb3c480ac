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


PAGE = (0.03, 0.95), (1.65, 3.35), (4.4, 5.7)  # producer, stages, consumers: from where to where, in inches
PHONE = (0.03, 0.7), (1.2, 2.5), (2.95, 4.0)
LANE, FIRST, HIGH, GAP = 0.9, 0.15, 0.36, 0.75
ALIAS = {"rows": "Q, dO"}
WHO = ("consumer 0", "consumer 1")
DOES = {
    "forward": "4 warps,\n64 rows:\nQ Kᵀ, softmax,\nP V",
    "backward": "4 warps,\n64 columns:\nSᵀ, dPᵀ, dV, dK,\nhalf of dQ",
}


def places() -> tuple:
    return PHONE if style.narrow() else PAGE


@style.picture
def draw(blocks: dict[str, dict[str, tuple[int, int]]]) -> style.Drawn:
    """A panel for each pass. blocks: {"forward", "backward": {ring: (stages, releases that empty one)}}."""
    caption = "Who waits for whom: for a full stage (solid), an empty stage (dashed), or the other consumer."
    bottoms = [FIRST + LANE * len(b) + (1.35 if way == "backward" else 0) for way, b in blocks.items()]
    figure, axes = style.new_figure(
        sum(bottoms) + 0.25 * len(blocks), caption, nrows=len(blocks), height_ratios=bottoms, squeeze=False
    )
    alt = [
        "One thread block of each kernel. Left the producer warp, right two consumer warpgroups, between them a"
        " row for each ring of buffers in shared memory. A solid arrow leads from the producer to the stages and from"
        " the stages to every consumer, which waits until a stage is full; a dashed arrow leads back, and the producer"
        " waits until a stage is empty."
    ]
    for (ax,), bottom, (way, block) in zip(axes, bottoms, blocks.items(), strict=True):
        alt.append(_block(ax, way, block))
        ax.set_title(f"{way.capitalize()}")
        style.bare(ax, (0, style.width() - 0.08), (0, bottom))
    return figure, " ".join(alt)


def _block(ax: style.Axes, way: str, rings: dict[str, tuple[int, int]]) -> str:
    """The producer, the rings, the consumers and every arrow between them; gives it in words."""
    bottom = FIRST + LANE * len(rings) - 0.15
    high = (bottom - FIRST - GAP) / 2
    tops = (FIRST, FIRST + high + GAP)
    PRODUCER, _, CONSUMERS = places()
    label = "producer\n\n1 warp\n\nstarts all\ncopies,\nwaits for\nnone to\nend"
    style.box(ax, PRODUCER[0], FIRST, PRODUCER[1] - PRODUCER[0], bottom - FIRST, label, style.worker(0))
    left, right = CONSUMERS
    for n, (who, top) in enumerate(zip(WHO, tops, strict=True)):
        style.box(ax, left, top, right - left, high, f"{who}\n{DOES[way]}", style.worker(2 + n))
    for lane, (ring, (number, releases)) in enumerate(rings.items()):
        middle = FIRST + lane * LANE + 0.1 + HIGH / 2
        _ring(ax, middle, ring, number, releases)
        for top in tops:
            _right(ax, middle, top + (lane + 0.5) * high / len(rings), ring, releases)
    words = "; ".join(f"{ALIAS.get(ring, ring)}: {style.counted(n, 'stage')}" for ring, (n, _) in rings.items())
    if way == "forward":
        _between(ax, tops, high, "ping-pong:\n1 arrival")
        return (
            f"Forward: {words}. Between the consumers two arrows: each waits until the other's products have started."
        )
    _between(ax, tops, high, "dS: 2 places,\n2 arrivals")
    _sums(ax, bottom + 0.4, tops, high)
    return (
        f"Backward: {words}. Both consumers write their dS into one of 2 places, and wait until both have."
        " Beneath, an arrow from each consumer to a place for its part of dQ; from there the copy engine adds it to the"
        " sums in HBM, and a consumer waits only before it writes the place again."
    )


def _ring(ax: style.Axes, y: float, ring: str, number: int, releases: int) -> None:
    """The stages of one ring, what empties them, and the arrows between them and the producer."""
    PRODUCER, (left, right), _ = places()
    width = (right - left) / number
    for stage in range(number):
        place = (left + stage * width, y - HIGH / 2, width - 0.06, HIGH)
        label = f"{ALIAS.get(ring, ring)} {stage}"
        if ring in style.HUES:
            style.tensor_box(ax, *place, ring, label)
        else:
            style.box(ax, *place, textwrap.fill(label, 8 if style.narrow() else 10))
    words = f"empty after {style.counted(releases, 'release')}" if releases else "empty after K's releases"
    style.note(ax, (left + right) / 2, y + HIGH / 2 + 0.1, words, ha="center")
    ends = (PRODUCER[1], left)
    _flow(ax, (ends[0], y - 0.07), (ends[1], y - 0.07), ring)
    style.note(ax, sum(ends) / 2, y - 0.17, "fill", ha="center")
    if not releases:
        return
    _flow(ax, (ends[1], y + 0.07), (ends[0], y + 0.07), ring, back=True)
    style.note(ax, sum(ends) / 2, y + 0.18, "empty?", ha="center")


def _right(ax: style.Axes, y: float, port: float, ring: str, releases: int) -> None:
    """Between the stages and one consumer: what it takes, and what it gives back."""
    _, STAGES, CONSUMERS = places()
    ends = (STAGES[1] - 0.06, CONSUMERS[0])
    _flow(ax, (ends[0], y - 0.07), (ends[1], port - 0.05), ring)
    if releases:
        _flow(ax, (ends[1], port + 0.05), (ends[0], y + 0.07), ring, back=True)


def _between(ax: style.Axes, tops: tuple[float, float], high: float, words: str) -> None:
    """What consumers hand each other: an arrow from each to the other."""
    middle, above, below = sum(places()[2]) / 2, tops[0] + high, tops[1]
    _flow(ax, (middle - 0.48, above), (middle - 0.48, below))
    _flow(ax, (middle + 0.48, below), (middle + 0.48, above))
    style.note(ax, middle, (above + below) / 2, words, ha="center")


def _flow(ax: style.Axes, start: tuple, end: tuple, ring: str = "", back: bool = False) -> None:
    """One arrow, in the colour of what travels along it; dashed where a stage is given back."""
    color = style.hue(ring) if ring in style.HUES else style.hue("Q") if ring in ("rows", "dQ") else style.INK
    style.arrow(ax, start, end, color, linestyle=(0, (4, 2)) if back else "-", linewidth=1.1)


def _sums(ax: style.Axes, top: float, tops: tuple[float, float], high: float) -> None:
    """From each consumer to its place for dQ, and from there, by the copy engine, to HBM."""
    (left, _), _, (_, right) = places()
    for n in (0, 1):
        x, wide = right - 0.32 - 0.75 * n, 0.6
        style.tensor_box(ax, x - wide / 2, top, wide, 0.3, "dQ", f"dQ of {n}")
        if n == 1:
            _flow(ax, (x, tops[1] + high), (x, top), "dQ")
        else:  # the upper consumer's goes down beside the lower one
            aside = [right, right + 0.03, right + 0.03]
            ax.plot(aside, [tops[0] + high / 2, tops[0] + high / 2, top + 0.15], color=style.hue("Q"))
            _flow(ax, (right + 0.03, top + 0.15), (x + wide / 2, top + 0.15), "dQ")
        _flow(ax, (x, top + 0.3), (x, top + 0.65), "dQ")
    style.tensor_box(ax, left, top + 0.65, right - left, 0.3, "dQ", "sums of dQ in HBM, fp32")
    words = "a place for each, written again once it has been read; the copy engine adds"
    style.note(ax, right - 1.52, top + 0.15, textwrap.fill(words, 34 if style.narrow() else 56), ha="right")
