"""Who waits for whom inside a thread block of the Hopper kernels: one row for each ring of buffers."""

from collections.abc import Mapping

from fa2_lab.machine import hopper, hopper_backward
from fa2_lab.machine.asynchrony import Barrier, Block
from fa2_lab.plots import style
from fa2_lab.tiles import Tiling


def data(ways: list[str] = ("forward", "backward")) -> dict:
    """Every barrier of a run of each pass: who waits there, who arrives, and how many arrivals end a phase."""
    return dict(blocks={way: {"forward": _forward, "backward": _backward}[way]() for way in ways})


def _forward(consumers: int = 2, stages: int = 2) -> dict:
    block, p = hopper.forward(Tiling(4 * consumers, 32, 4, 4), consumers, stages, ping_pong=True)
    alone = [*p.mailbox.filled, *p.mailbox.emptied, *p.ping_pong.begun]
    numbers = {"mailbox": 2, "Q": p.q.stages, "K": stages, "V": stages}
    return dict(stages=numbers, barriers=met(block, alone, (p.q, p.k, p.v)))


def _backward() -> dict:
    """Four row blocks, four column blocks of 8 keys."""
    block, p = hopper_backward.backward(Tiling(16, 32, 4, 8))
    barriers = met(block, [*p.mailbox.filled, *p.mailbox.emptied, p.ds], (p.k, p.v, p.rows))
    stages = {"mailbox": 2, "K": p.k.stages, "V": p.v.stages, "rows": p.rows.stages}
    adds = sorted({job.actor for job in block.jobs if job.unit == "copy" and job.label.startswith("dQ")})
    return dict(stages=stages, barriers=barriers, places=p.places, adds=adds)


def met(block: Block, alone: list[Barrier], rings: tuple[hopper.Ring, ...]) -> dict[str, dict]:
    """Of every barrier, by its name: who waited there, who arrived, and how many arrivals end a phase."""
    all_barriers = alone + [bar for ring in rings for bar in (*ring.filled, *ring.emptied)]
    barriers = {bar.what: dict(waits=set(), arrives=set(), expected=bar.expected) for bar in all_barriers}
    for bar in all_barriers:
        barriers[bar.what]["arrives"] |= set(bar.came) - {"the start"}
    for waited in block.waits:
        if waited.what in barriers:
            barriers[waited.what]["waits"].add(waited.actor)
    return {
        what: dict(waits=sorted(bar["waits"]), arrives=sorted(bar["arrives"]), expected=bar["expected"])
        for what, bar in barriers.items()
    }


PRODUCER, STAGES, CONSUMERS = (0.03, 0.95), (1.65, 3.35), (4.4, 5.7)  # from where to where, in inches
LANE, FIRST, HIGH, GAP = 0.9, 0.15, 0.36, 0.75
ALIAS = {"rows": "Q, dO"}
DOES = {
    "forward": "4 warps, 64 rows:\nQ Kᵀ, softmax,\nP V",
    "backward": "4 warps, 64 columns:\nSᵀ, dPᵀ, dV, dK,\nhalf of dQ",
}


@style.picture
def draw(blocks: dict[str, Mapping]) -> style.Drawn:
    """A panel for each pass. blocks: {"forward": dict(stages, barriers), "backward": …, with places and adds}.

    stages: {ring: how many}. barriers: {"K filled": {"waits": [...], "arrives": [...], "expected": n}, ...}.
    places: of dS. adds: who hands over parts of dQ.
    """
    caption = "Who waits for whom: for a full stage (solid), an empty stage (dashed), or the other consumer"
    caption += "; nobody waits for dQ to be added." if "backward" in blocks else "."
    bottoms = [FIRST + LANE * len(b["stages"]) + (1.35 if way == "backward" else 0) for way, b in blocks.items()]
    figure, axes = style.new_figure(
        sum(bottoms) + 0.25 * len(blocks), caption, nrows=len(blocks), height_ratios=bottoms, squeeze=False
    )
    alt = [
        "One thread block of each kernel (model). Left the producer warp, right two consumer warpgroups, between them a"
        " row for each ring of buffers in shared memory. A solid arrow leads from the producer to the stages and from"
        " the stages to every consumer, which waits until a stage is full; a dashed arrow leads back, and the producer"
        " waits until a stage is empty."
    ]
    for (ax,), bottom, (way, block) in zip(axes, bottoms, blocks.items(), strict=True):
        alt.append(_block(ax, way, **block))
        ax.set_title(f"{way.capitalize()}")
        style.bare(ax, (0, style.WIDTH - 0.08), (0, bottom))
    return figure, " ".join(alt)


def _block(ax: style.Axes, way: str, stages: dict[str, int], barriers: dict, places: int = 0, adds: list = ()) -> str:
    """The producer, the rings, the consumers and every arrow between them; gives it in words."""
    bottom = FIRST + LANE * len(stages) - 0.15
    names = sorted({who for bar in barriers.values() for who in bar["waits"] if who.startswith("consumer")})
    high = (bottom - FIRST - GAP * (len(names) - 1)) / len(names)
    tops = {who: FIRST + n * (high + GAP) for n, who in enumerate(names)}
    label = "producer\n\n1 warp\n\nstarts all\ncopies,\nwaits for\nnone to end"
    style.box(ax, PRODUCER[0], FIRST, PRODUCER[1] - PRODUCER[0], bottom - FIRST, label, style.worker(0))
    left, right = CONSUMERS
    for n, (who, top) in enumerate(tops.items()):
        style.box(ax, left, top, right - left, high, f"{who}\n{DOES[way]}", style.worker(2 + n))
    for lane, (ring, number) in enumerate(stages.items()):
        middle = FIRST + lane * LANE + 0.1 + HIGH / 2
        _ring(ax, middle, ring, number, barriers)
        for who, top in tops.items():
            _right(ax, middle, top + (lane + 0.5) * high / len(stages), ring, who, barriers)
    rings = "; ".join(f"{ALIAS.get(ring, ring)}: {style.counted(n, 'stage')}" for ring, n in stages.items())
    if way == "forward":
        _between(ax, tops, high, barriers["ping-pong"], "ping-pong:\n1 arrival")
        return (
            f"Forward: {rings}. Between the consumers two arrows: each waits until the other's products have started."
        )
    arrivals = barriers["dS filled"]["expected"]
    _between(ax, tops, high, barriers["dS filled"], f"dS: {places} places,\n{arrivals} arrivals")
    _sums(ax, bottom + 0.4, tops, high, adds)
    return (
        f"Backward: {rings}. Both consumers write their dS into one of {places} places, and wait until both have."
        " Beneath, an arrow from each consumer to a place for its part of dQ; from there the copy engine adds it to the"
        " sums in HBM, and a consumer waits only before it writes the place again."
    )


def _ring(ax: style.Axes, y: float, ring: str, number: int, barriers: dict) -> None:
    """The stages of one ring, what empties them, and the arrows between them and the producer."""
    left, right = STAGES
    width = (right - left) / number
    for stage in range(number):
        place = (left + stage * width, y - HIGH / 2, width - 0.06, HIGH)
        label = f"{ALIAS.get(ring, ring)} {stage}"
        if ring in style.HUES:
            style.tensor_box(ax, *place, ring, label)
        else:
            style.box(ax, *place, label)
    releases = barriers[f"{ring} emptied"]["expected"]
    words = f"empty after {style.counted(releases, 'release')}"
    style.note(ax, (left + right) / 2, y + HIGH / 2 + 0.1, words, ha="center")
    ends = (PRODUCER[1], left)
    _flow(ax, (ends[0], y - 0.07), (ends[1], y - 0.07), ring)
    style.note(ax, sum(ends) / 2, y - 0.17, "fill", ha="center")
    if "producer" in barriers[f"{ring} emptied"]["waits"]:
        _flow(ax, (ends[1], y + 0.07), (ends[0], y + 0.07), ring, back=True)
        style.note(ax, sum(ends) / 2, y + 0.18, "empty?", ha="center")


def _right(ax: style.Axes, y: float, port: float, ring: str, who: str, barriers: dict) -> None:
    """Between the stages and one consumer: what it takes, and what it gives back."""
    ends = (STAGES[1] - 0.06, CONSUMERS[0])
    if who in barriers[f"{ring} filled"]["waits"]:
        _flow(ax, (ends[0], y - 0.07), (ends[1], port - 0.05), ring)
    if who in barriers[f"{ring} emptied"]["arrives"]:
        _flow(ax, (ends[1], port + 0.05), (ends[0], y + 0.07), ring, back=True)


def _between(ax: style.Axes, tops: dict[str, float], high: float, barrier: dict, words: str) -> None:
    """What consumers hand each other: an arrow from each that arrives to each other one that waits."""
    middle = sum(CONSUMERS) / 2
    for start in barrier["arrives"]:
        for end in barrier["waits"]:
            if tops[start] < tops[end]:
                _flow(ax, (middle - 0.48, tops[start] + high), (middle - 0.48, tops[end]))
            elif start != end:
                _flow(ax, (middle + 0.48, tops[start]), (middle + 0.48, tops[end] + high))
    style.note(ax, middle, (min(tops.values()) + high + max(tops.values())) / 2, words, ha="center")


def _flow(ax: style.Axes, start: tuple, end: tuple, ring: str = "", back: bool = False) -> None:
    """One arrow, in the colour of what travels along it; dashed where a stage is given back."""
    color = style.hue(ring) if ring in style.HUES else style.hue("Q") if ring in ("rows", "dQ") else style.INK
    style.arrow(ax, start, end, color, linestyle=(0, (4, 2)) if back else "-", linewidth=1.1)


def _sums(ax: style.Axes, top: float, tops: dict[str, float], high: float, adds: list[str]) -> None:
    """From each consumer to its place for dQ, and from there, by the copy engine, to HBM."""
    right = CONSUMERS[1]
    for n, who in enumerate(adds):
        x, wide = right - 0.32 - 0.75 * n, 0.6
        style.tensor_box(ax, x - wide / 2, top, wide, 0.3, "dQ", f"dQ of {who[-1]}")
        if n == len(adds) - 1:
            _flow(ax, (x, max(tops.values()) + high), (x, top), "dQ")
        else:  # the upper consumer's goes down beside the lower one
            ax.plot(
                [right, right + 0.03, right + 0.03], [tops[who] + high / 2] * 2 + [top + 0.15], color=style.hue("Q")
            )
            _flow(ax, (right + 0.03, top + 0.15), (x + wide / 2, top + 0.15), "dQ")
        _flow(ax, (x, top + 0.3), (x, top + 0.65), "dQ")
    style.tensor_box(ax, PRODUCER[0], top + 0.65, right - PRODUCER[0], 0.3, "dQ", "sums of dQ in HBM, fp32")
    words = "a place for each, written again once it has been read;\nthe copy engine adds"
    style.note(ax, right - 0.32 - 0.75 * len(adds) + 0.3, top + 0.15, words, ha="right")
