"""Data in motion: standard attention, FA1 and FA2 on one clock, each block on its way between HBM and the chip.

The meter's record decides what moves and when. The clock counts bytes that the chip requests: whoever requests less is
done earlier. L2 is small here, as a real one is beside a real S: it keeps what was used last, and its bytes are few.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fa2_lab.plots import style
from fa2_lab.plots.explorer import SUBSCRIPTS, Box, Text, element, on_chip
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.trace import Event, Trace

# Data -----------------------------------------------------------------------------------------------------------

BYTES = dict(Q=2, K=2, V=2, O=2, P=2, S=4, l=4, m=4, L=4)  # of one number
Block = tuple[str, tuple[int, ...]]  # a tensor, and which of its blocks: a row block, a column block, or both


class Move(NamedTuple):
    """One block that the chip loads or stores, from `start` to `end` on the clock, and what L2 does about it."""

    op: str
    block: Block
    start: int
    end: int
    found: bool  # in L2: a load that HBM does not see
    evicted: tuple[Block, ...]  # what L2 writes back to HBM to make room
    kept: tuple[Block, ...]  # what L2 has afterwards


class Run(NamedTuple):
    """One algorithm: its moves, what is on the chip over time, and the bytes that crossed to HBM after each move."""

    moves: tuple[Move, ...]
    chip: tuple[tuple[str, str, int, int], ...]  # tensor, label, from, until
    crossed: tuple[int, ...]
    total: int


def data(N: int = 24, d: int = 8, B: int = 8, L2: int = 2048) -> dict:
    """What the meter sees of three algorithms on one head, block by block, through an L2 of so many bytes."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    runs = {}
    for name, stage in (("standard", naive), ("FA1", fa1), ("FA2", fa2)):
        trace, tiles = Trace(), {} if stage is naive else dict(B_r=B, B_c=B)
        stage.forward(Q, K, V, **tiles, trace=trace)
        runs[name] = run(name, trace.events, N // B, L2)
    return dict(runs=runs, T=N // B)


def run(name: str, log: Sequence[Event], T: int, L2: int) -> Run:
    """One algorithm's record as blocks that move."""
    moves = tuple(through(L2, [step for e in log for step in pieces(e, T)]))
    size = {m.block: m.end - m.start for m in moves}
    crossing = [(0 if m.found else size[m.block]) + sum(size[b] for b in m.evicted) for m in moves]
    return Run(moves, tuple(residents(name, log, moves)), tuple(accumulate(crossing)), moves[-1].end)


def pieces(e: Event, T: int) -> list[tuple[str, Block, int]]:
    """(op, block, bytes) of each block that one event moves: all blocks, where it is outside the loop."""
    every = range(T)
    rows, cols = every if e.i is None else [e.i], every if e.j is None else [e.j]
    axes = {"K": [cols], "V": [cols], "S": [rows, cols], "P": [rows, cols]}.get(e.tensor, [rows])
    blocks = list(product(*axes))
    return [(e.op, (e.tensor, b), e.elements * BYTES[e.tensor] // len(blocks)) for b in blocks]


def through(capacity: int, requests: Sequence[tuple[str, Block, int]]) -> Iterator[Move]:
    """The requests on the clock, through a cache that keeps what was used last and writes back when it must."""
    size, kept, now = {b: n for _, b, n in requests}, {}, 0  # kept: block -> whether HBM has an older version
    for step, (op, block, n) in enumerate(requests, start=1):
        found = block in kept or op == "store"
        kept[block] = kept.pop(block, False) or op == "store"
        evicted = []
        while sum(size[b] for b in kept) > capacity:
            oldest = next(iter(kept))
            evicted += [oldest] if kept.pop(oldest) else []
        if step == len(requests):
            evicted += [b for b, newer in kept.items() if newer]  # in the end, HBM has everything
        yield Move(op, block, now, now + n, found, tuple(evicted), tuple(kept))
        now += n


def residents(name: str, log: Sequence[Event], moves: Sequence[Move]) -> Iterator[tuple[str, str, int, int]]:
    """(tensor, label, from, until) of each block on the chip."""
    if name == "standard":  # a kernel each for S, P and O; a load after a store begins the next one
        kernels = list(accumulate((a.op == "store" and b.op == "load" for a, b in pairwise(moves)), initial=0))
        for n, m in enumerate(moves):
            rest = [k for k, number in zip(moves, kernels, strict=True) if number == kernels[n]]
            again = [
                k.end if k.op == "load" else k.start for k in rest if k.block[0] == m.block[0] and k.start > m.start
            ]
            yield m.block[0], label(m.block), m.start if m.op == "store" else m.end, min([*again, rest[-1].end])
        return
    there: dict[Block, int] = {}
    elements = now = 0
    for e in log:
        elements, now = elements + e.elements, now + e.elements * BYTES[e.tensor]
        chip = on_chip(name, log, elements)
        if e.op == "store":
            chip.pop(e.tensor, None)
        blocks = {(t, (b, chip["K"]) if t == "S" else (b,)) for t, b in chip.items()}
        for block in [b for b in there if b not in blocks]:
            yield block[0], label(block), there.pop(block), now
        for block in sorted(blocks - there.keys()):
            there[block] = now


def label(block: Block) -> str:
    tensor, where = block
    letter = {"l": "ℓ", "L": "L"}.get(tensor, tensor.lower())
    return letter + "".join(map(str, where)).translate(SUBSCRIPTS)


# Where things stand, in pixels ------------------------------------------------------------------------------------

WIDTH, COLUMN, HEIGHT, TILE, GUTTER = 764, 256, 212, 16, 62
SHELVES = {"HBM": (50, 56), "L2": (110, 32), "shared memory": (146, 26), "registers": (176, 26)}  # top, height
STRIPS = dict(Q=0, K=20, V=40, O=60, S=80, P=132, l=82, m=98, L=82)  # from the gutter
CHIP = dict(Q=0, K=26, V=52, S=0, P=0, O=32, l=58, m=80, L=58)
NARROW, WORD = 12, 10.5
NAMES = {"standard": "Standard attention", "FA1": "FA1: keys outside", "FA2": "FA2: queries outside"}


class Actor(NamedTuple):
    """Shapes that are there from `start` to `end`, and move by (dx, dy) in that time."""

    shapes: tuple[Box | Text, ...]
    start: float
    end: float
    dx: float = 0
    dy: float = 0


def wide(tensor: str) -> int:
    return NARROW if tensor in "lmL" else TILE


def place(shelf: str, block: Block) -> tuple[float, float, float, float]:
    """x, y, width, height of a block on a shelf; L2 shows everything at half its size."""
    tensor, where = block
    top = SHELVES[shelf][0]
    if shelf not in ("HBM", "L2"):
        return GUTTER + CHIP[tensor], top + 5, wide(tensor) + (8 if tensor in "SP" else 3), TILE
    row, col = where if len(where) == 2 else (where[0], 0)
    scale = 1 if shelf == "HBM" else 0.5
    x, y = GUTTER + STRIPS[tensor] + scale * TILE * col, top + 4 + scale * TILE * row
    return x, y, scale * wide(tensor), scale * TILE


def at_work(tensor: str) -> str:
    """The shelf on the chip where a block works: what products read is in shared memory, what is made in registers."""
    return "shared memory" if tensor in "QKV" else "registers"


def tile(what: str, x: float, y: float, w: float, h: float, tensor: str, words: str, strength: float) -> tuple:
    fill = style.tint(style.hue(tensor), strength)
    box = Box(what, x, y, w, h, fill, style.hue(tensor), 1)
    return (box, Text(words, x + w / 2, y + h / 2, WORD, "middle", False, style.ink_on(fill))) if words else (box,)


def shelves(x: float, name: str, run: Run, T: int, longest: int) -> list[Box | Text]:
    """What does not change: the shelves, the tensors in HBM, and the frame of the bar."""
    drawn: list[Box | Text] = [
        Text(NAMES[name], x, 10, 12.5, bold=True),
        Text("the chip requests", x, 27, WORD),
        Text("crosses to DRAM", x, 41, WORD),
        Box(f"{name} total", x + 158, 24, 88 * run.total / longest, 6, style.MASKED, style.QUIET, 0.5),
        Box(f"{name} all crossed", x + 158, 38, 88 * run.crossed[-1] / longest, 6, style.MASKED, style.QUIET, 0.5),
    ]
    for shelf, (top, height) in SHELVES.items():
        ground = style.tint(style.MASKED, 0.55)
        drawn.append(Box(shelf, x, top, COLUMN - 12, height, ground, style.QUIET, 0.7))
        lines = shelf.split()
        for k, line in enumerate(lines):
            drawn.append(Text(line, x + 4, top + height / 2 + 11.5 * (k - (len(lines) - 1) / 2), WORD))
    for tensor in dict.fromkeys(m.block[0] for m in run.moves):
        left, top, w, h = place("HBM", (tensor, (0, 0)))
        side = (T * w if tensor in "SP" else w, T * h)
        for scale, shelf, strength in ((1, "HBM", 0.3), (0.5, "L2", 0.0)):
            p, q, _, _ = place(shelf, (tensor, (0, 0)))
            fill, edge = style.tint(style.hue(tensor), strength), style.hue(tensor) if strength else style.MASKED
            drawn.append(Box(f"{shelf} {tensor}", x + p, q, scale * side[0], scale * side[1], fill, edge, 0.8))
        words = "ℓ" if tensor == "l" else tensor
        fill = style.tint(style.hue(tensor), 0.3)
        drawn.append(Text(words, x + left + side[0] / 2, top + side[1] / 2, 11, "middle", True, style.ink_on(fill)))
    return drawn


def actors(x: float, name: str, run: Run, longest: int, end: float) -> list[Actor]:
    """What comes, goes and moves in one column, until the end of the clock."""
    cast = []
    for tensor, words, start, until in run.chip:
        where = place(at_work(tensor), (tensor, ()))
        cast.append(Actor(tile(f"chip {tensor}", x + where[0], *where[1:], tensor, words, 0.35), start, until))
    since: dict[Block, float] = {}
    for m in run.moves:
        for block in [b for b in since if b not in m.kept]:
            cast.append(Actor(held(x, block), since.pop(block), m.end))
        for block in set(m.kept) - since.keys():
            since[block] = m.end
    cast += [Actor(held(x, block), start, end) for block, start in sorted(since.items())]
    for m in run.moves:
        near, far = at_work(m.block[0]), "HBM" if not m.found else "L2"
        ways = [(m.block, *((far, near) if m.op == "load" else (near, far)))] + [(b, "L2", "HBM") for b in m.evicted]
        for n, (block, source, target) in enumerate(ways):
            a, b = place(source, block), place(target, block)
            size = place("shared memory", block)[2:]
            words = "" if n else label(block)
            shapes = tile(f"{source} to {target}", x + a[0], a[1], *size, block[0], words, 0.65)
            cast.append(Actor(shapes, m.start, m.end, b[0] - a[0], b[1] - a[1]))
    times = [0, *(m.end for m in run.moves)]
    for start, until, crossed in zip(times, [*times[1:], end], [0, *run.crossed], strict=True):
        shapes = ()
        for what, y, count in (("moved", 27, start), ("crossed", 41, crossed)):
            bar = Box(f"{name} {what}", x + 158, y - 3, 88 * count / longest, 6, style.INK, "none")
            shapes += (Text(f"{count:,} B", x + 152, y, WORD, "end"), bar)
        cast.append(Actor(shapes, start, until))
    return cast


def held(x: float, block: Block) -> tuple:
    p, q, w, h = place("L2", block)
    return tile("in L2", x + p, q, w, h, block[0], "", 0.6)


def stage(runs: dict[str, Run], T: int) -> tuple[list[Box | Text], list[Actor], float]:
    """What stands, what moves, and the length of the clock: a little longer than the longest run."""
    longest = max(r.total for r in runs.values())
    end = 1.1 * longest
    fixed, cast = [], []
    for k, (name, r) in enumerate(runs.items()):
        fixed += shelves(k * COLUMN, name, r, T, longest)
        cast += actors(k * COLUMN, name, r, longest, end)
    return fixed, cast, end


def describe(runs: dict[str, Run], T: int) -> str:
    """The alternative text."""
    said = [
        f"{NAMES[name]}: {r.total:,} bytes requested, {r.crossed[-1]:,} across to DRAM." for name, r in runs.items()
    ]
    return (
        f"Three algorithms on {T} by {T} tiles of one head, on one clock that counts bytes; the shelves are HBM, L2,"
        f" shared memory and registers, and blocks travel between them. {' '.join(said)} Standard attention sends S"
        " and P out and fetches them back; FA1 fetches and stores o, ℓ and m at every tile; in FA2 they stay in"
        " registers, k and v come by, and L2 answers for them."
    )


# Drawing --------------------------------------------------------------------------------------------------------

TITLE = "FA2 keeps o, ℓ and m in registers: it requests least, and is done first"


def moments(runs: dict[str, Run]) -> dict[str, float]:
    """Four times worth a look."""
    fa1, fa2 = runs["FA1"], runs["FA2"]
    first = min(start for tensor, _, start, _ in fa1.chip if tensor == "S") + 1
    return {
        "FA1's first tile": first,
        "FA2 is halfway": fa2.total // 2 + 1,
        "FA2 is done": fa2.total + 1,
        "all are done": max(r.total for r in runs.values()) + 1,
    }


@style.picture
def draw(runs: dict[str, Run], T: int) -> tuple[Figure, str]:
    """Four moments, one below the other."""
    fixed, cast, _ = stage(runs, T)
    frame, head, point = HEIGHT + 22, 34, 72 * style.WIDTH / WIDTH
    height = head + 4 * frame
    figure = Figure(figsize=(style.WIDTH, style.WIDTH * height / WIDTH))
    figure.suptitle(TITLE, x=0.01, y=1 - 8 / height, ha="left", va="top")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-6, WIDTH - 2), ylim=(height, 0))
    ax.set_axis_off()
    for k, (words, t) in enumerate(moments(runs).items()):
        top = head + k * frame
        ax.text(0, top + 6, f"{words}: {t - 1:,} bytes on the clock", fontsize=style.SMALL, color=style.QUIET)
        for shape, dx, dy in [(s, 0, 0) for s in fixed] + [s for a in cast for s in seen(a, t)]:
            if isinstance(shape, Box):
                x, y = shape.x + dx, shape.y + dy + top + 8
                look = dict(facecolor=shape.fill, edgecolor=shape.edge, linewidth=point * shape.line, gid=shape.what)
                ax.add_patch(Rectangle((x, y), shape.w, shape.h, **look))
            else:
                look = dict(ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor], va="center")
                look |= dict(color=shape.color, weight="bold" if shape.bold else "normal")
                ax.text(shape.x + dx, shape.y + dy + top + 8, shape.words, fontsize=point * shape.size, **look)
    return figure, describe(runs, T)


def seen(actor: Actor, t: float) -> list[tuple[Box | Text, float, float]]:
    """An actor's shapes at a time, with their shift; what travels has no words, for they would lie on others."""
    if not actor.start <= t < actor.end:
        return []
    share = (t - actor.start) / (actor.end - actor.start)
    travels = actor.dx or actor.dy
    return [(s, share * actor.dx, share * actor.dy) for s in actor.shapes if isinstance(s, Box) or not travels]


# The same, moving -------------------------------------------------------------------------------------------------

SECONDS = 60
LOOK = """.mv{{opacity:0;animation:{seconds}s linear infinite}}.mv.now{{opacity:1}}
svg:hover .mv,.paused .mv{{animation-play-state:paused}}
@media (prefers-reduced-motion:reduce){{.mv{{animation:none!important}}}}
"""


def moving(runs: dict[str, Run], T: int) -> str:
    """An animated SVG without script: it stops under the pointer, and stands still where motion is not wanted."""
    fixed, cast, end = stage(runs, T)
    still, frames, parts = moments(runs)["all are done"], {}, []  # the moment that is shown where nothing moves
    for actor in cast:
        body = keyframes(actor, end)
        name = frames.setdefault(body, f"k{len(frames)}")
        now = seen(actor, still)
        shift = f";transform:translate({now[0][1]:.1f}px,{now[0][2]:.1f}px)" if now and (actor.dx or actor.dy) else ""
        inner = "".join(map(short, actor.shapes))
        parts.append(f'<g class="mv{" now" * bool(now)}" style="animation-name:{name}{shift}">{inner}</g>')
    rules = LOOK.format(seconds=SECONDS) + "\n".join(f"@keyframes {name}{{{body}}}" for body, name in frames.items())
    box = (-10, -28, WIDTH + 8, HEIGHT + 36)
    card = (box[0] + 1, box[1] + 1, box[2] - 2, box[3] - 2)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{" ".join(map(str, box))}" width="{box[2]}"'
            f' height="{box[3]}" role="img" font-size="{WORD}" fill="{style.INK}" font-family="{style.FONTS}"'
            ' dominant-baseline="central">',
            f"<title>{escape(TITLE)}</title><desc>{escape(describe(runs, T))}</desc><style>{rules}</style>",
            '<rect x="{}" y="{}" width="{}" height="{}"'.format(*card) + f' rx="8" fill="{style.PAPER}"'
            f' stroke="{style.MASKED}"/>',
            element(Text(TITLE, 0, -12, 14, bold=True)),
            *map(element, fixed),
            *parts,
            "</svg>\n",
        ]
    )


def short(shape: Box | Text) -> str:
    """A shape as an element of the SVG, without what every other says too."""
    common = [r'\.0(?=")', f' font-size="{WORD}"', ' stroke="none" stroke-width="[^"]*"', ' stroke-width="1"']
    common += [f' fill="{style.INK}"'] if isinstance(shape, Text) else []
    return re.sub("|".join(common), "", element(shape))


def keyframes(actor: Actor, end: float) -> str:
    """When an actor is there, and how it moves, in percent of the clock."""
    a, b = 100 * actor.start / end, 100 * actor.end / end
    go, stop = ("", "")
    if actor.dx or actor.dy:
        go, stop = ";transform:none", f";transform:translate({actor.dx:.1f}px,{actor.dy:.1f}px)"
    before = "" if a == 0 else f"0%,{a - 0.01:.2f}%{{opacity:0{go}}}"
    after = "" if b >= 100 else f"{b + 0.01:.2f}%,100%{{opacity:0{stop}}}"
    return f"{before}{a:.2f}%{{opacity:1{go}}}{b:.2f}%{{opacity:1{stop}}}{after}"


PAGE = """<figure class="motion">
{svg}<button type="button">pause</button>
<script>
for (const button of document.querySelectorAll("figure.motion button"))
  button.onclick = () => {{
    const paused = button.parentNode.classList.toggle("paused");
    button.textContent = paused ? "play" : "pause";
  }};
</script>
</figure>"""


def page(runs: dict[str, Run], T: int) -> str:
    """The moving picture with a button, for a page that allows script."""
    return PAGE.format(svg=moving(runs, T))
