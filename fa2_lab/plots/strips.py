"""The picture of an SM on a rung and on the previous one: copies, tensor cores and softmax as strips over time.

The time of a tile on each unit comes from the compiled code and the chip, as in `machine.ladder`: a warpgroup's matmuls
keep the tensor cores busy, its instructions the issue slots, and its tiles the path from L2. `producer` and `consumer`
define who waits for whom.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, reasons
from fa2_lab.machine import ladder as model
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Block, Job, Wait
from fa2_lab.machine.prices import prices
from fa2_lab.plots import style
from fa2_lab.records import load

AHEAD, PERSISTENT, LAGGING = 20, 21, 22  # from which rung on S starts early, programs stay, o is seldom rescaled


class Sizes(NamedTuple):
    """The numbers of a rung for the strips: its number, what fits on an SM, and the clocks of a tile on each unit."""

    number: int
    keys: int  # of a tile
    programs: int
    consumers: int
    stages: int
    copy: float  # of a tile of K, or of V
    rows: float  # of the Q or the O of one consumer
    product: float  # S or P V of one consumer
    softmax: float  # all other instructions of one consumer that run in most tiles


def sizes(rung: str, d: int = 128, chip: chips.Chip = chips.H200) -> Sizes:
    """Return the Sizes of a rung, from its compiled kernel without a mask."""
    name = ladder.find(rung)
    fact = reasons.facts()[name, False, d]
    number, keys, rows = int(name[1:3]), fact["keys"], 64 * fact["consumers"]
    rate = prices(chip).l2 / chip.SMs / chip.clock_hz  # bytes a clock
    kept = rows * (2 if number in (21, 22) else 1)  # these keep O apart from the next Q
    skipped = model.ROWS * d // 128 if number >= LAGGING else 0  # a thread's numbers of o, each a multiplication
    return Sizes(
        number,
        keys,
        fact["programs"],
        fact["consumers"],
        stages=(fact["shared"] - 2 * d * kept) // (4 * d * keys),
        copy=2 * d * keys / rate,
        rows=2 * d * model.ROWS / rate,
        product=2 * model.ROWS * keys * d / chip.tensor_per_clock,
        softmax=float(fact["instructions"] - skipped),
    )


SAYS = {  # what the strips of a rung show beside those of the rung before
    14: "In rung 14, TMA makes the copies, so a tile takes {now} instructions instead of {then}",
    15: "Rung 15, in Gluon, is slower at first, but from now on we can place each wait",
    16: "Rung 16 has a warp that only copies, so a tile takes {now} instructions instead of {then}",
    17: "Rung 17 halves the copies and so makes room for the long tiles of rung 18",
    18: "Rung 18 has tiles of 128 keys, which take {now} instructions instead of twice {then}",
    19: "Rung 19 computes the first tile before the loop, so a tile takes {now} instructions instead of {then}",
    20: "Rung 20 starts S early, so one consumer runs matmuls while the other computes its softmax",
    21: "Programs of rung 21 stay, so the next row block's copies arrive while this one ends",
    22: "In rung 22, m may lag behind, so most tiles skip the rescaling of o",
    23: "Rung 23 has a third consumer, so the tensor cores seldom wait",
}
WHY = {  # what a caption adds
    15: "A tile takes {now} instructions instead of {then}.",
    17: "Two consumers share each tile and one ring of buffers. The rung alone is not faster.",
    21: "The boxes with a thick edge belong to the next row block.",
    22: "A tile takes {now} instructions instead of {then}.",
}
CHANGED = {15: "exp", 16: "exp", 17: "copy", 18: "exp", 19: "exp", 22: "exp"}  # the unit whose boxes are marked as new


def data(after: str = "17", tiles: int = 1024, row_blocks: int = 2) -> dict:
    """Return the jobs of an SM on a rung and on the previous one, within a row block or, for rung 21, between two.

    tiles: keys of a row. A job is (unit, warpgroup, label, from, to), in clocks. marked: whether each job is what the
    rung changes or, on rungs 20 and 21, whether it belongs to the next row block.
    """
    before = f"{int(after) - 1}"
    pair, panels = [sizes(before), sizes(after)], []
    number, took = pair[1].number, dict(then=int(pair[0].softmax), now=int(pair[1].softmax))
    says, why = SAYS[number].format(**took), WHY.get(number, "").format(**took)
    fewer = f"−{took['then'] - took['now']}"
    words = {n: f"{fewer} instructions" for n in (16, 19)} | {17: "half as many", 22: f"{fewer}: no rescaling"}
    words[15] = f"+{took['now'] - took['then']} instructions"
    for rung, size in zip((before, after), pair, strict=True):
        block, *_ = ran(size, tiles // size.keys, row_blocks)
        stores = [job.begun for job in block.jobs if job.label == "O"]
        start = min(stores) - 1500 if pair[1].number == PERSISTENT else 9000
        if number == PERSISTENT:
            marked = [block_of > 0 for block_of in row_blocks_of(block.jobs, size, tiles // size.keys)]
        else:
            marked = [size.number == number and job.unit == CHANGED.get(number) for job in block.jobs]
        jobs = [(job.unit, job.actor, job.label, job.begun - start, job.ended - start) for job in block.jobs]
        name = ladder.find(rung)
        counted = reasons.counters(load("ladder"), name).get("tensor cores at work, %")
        groups = size.consumers * size.programs
        panel = dict(number=size.number, name=name[4:], jobs=jobs, marked=marked, groups=groups)
        panels.append(panel | dict(instructions=int(size.softmax), counted=counted))
    return dict(says=says, why=why, change=words.get(number, ""), panels=panels)


def row_blocks_of(jobs: list[Job], size: Sizes, tiles: int) -> list[int]:
    """Return the index of the row block to which each job of a program belongs. A row block has `tiles` tiles."""
    before: dict[tuple[str, str], int] = defaultdict(int)
    found = []
    for job in jobs:
        kind = job.label.rstrip("0123456789 ")
        found.append(before[job.actor, kind] // {"Q": size.consumers, "O": 1}.get(kind, tiles))
        before[job.actor, kind] += 1
    return found


def ran(size: Sizes, tiles: int, row_blocks: int) -> tuple:
    """Return a simulated SM, after every program has run `row_blocks` row blocks of `tiles` tiles.

    The programs follow in the returned tuple.
    """
    programs: list[Program] = []
    block, actors = Block(copy=IN_ORDER, tensor=IN_ORDER if size.number >= AHEAD else SHARED), {}
    for n in range(size.programs):
        program = Program(block, size, tiles, row_blocks)
        programs.append(program)
        actors[f"producer {n}"] = program.producer()
        actors |= {f"{n * size.consumers + c}": program.consumer(c) for c in range(size.consumers)}
    return block.run(actors), *programs


class Program:
    """One program on the simulated SM, with the tiles that were copied and those that its consumers have released."""

    def __init__(self, block: Block, size: Sizes, tiles: int, row_blocks: int) -> None:
        self.block, self.size, self.tiles, self.row_blocks = block, size, tiles, row_blocks
        self.copied: dict[str, Job] = {}
        self.released: dict[str, list[float]] = defaultdict(list)  # when, by each consumer
        self.sent: dict[int, float] = {}  # row block: when its number was in the mailbox
        self.read: dict[int, list[float]] = defaultdict(list)  # and when each consumer had read it
        self.ended = 0  # consumers, of any row block

    def producer(self) -> Generator[Wait]:
        """Copy tiles as soon as their stages are free.

        Before a rung has a producer warp, its warpgroup does the same.
        """
        for r in range(self.row_blocks):
            if self.size.number < PERSISTENT:
                yield Wait(lambda r=r: self.ended == r * self.size.consumers, "the program before")
            elif r > 1:
                yield Wait(lambda r=r: len(self.read[r - 2]) == self.size.consumers, "a place in the mailbox")
            self.sent[r] = self.block.clock
            for c in range(self.size.consumers):
                self.copied[f"Q{r}.{c}"] = self.block.start("copy", self.size.rows, "Q")
            for n in range(r * self.tiles, (r + 1) * self.tiles):
                for tensor in "KV":
                    before = f"{tensor}{n - self.size.stages}"
                    if n >= self.size.stages:
                        yield Wait(lambda b=before: len(self.released[b]) == self.size.consumers, before)
                    job = self.copied[f"{tensor}{n}"] = self.block.start("copy", self.size.copy, tensor)
                    yield job.done()

    def there(self, tile: str) -> Wait:
        """Return a Wait for the copy of a tile, whether the copy has been started or not."""
        return Wait(lambda: tile in self.copied and self.copied[tile].ended is not None, tile)

    def release(self, tile: str) -> None:
        self.released[tile].append(self.block.clock)

    def consumer(self, c: int) -> Generator[Wait]:
        """Compute S, softmax and P V of each tile.

        From rung 20 on, S of a tile starts before P V of the previous tile.
        """
        size, start = self.size, self.block.start
        for r in range(self.row_blocks):
            yield Wait(lambda r=r: r in self.sent, "the mailbox")
            self.read[r].append(self.block.clock)
            yield self.there(f"Q{r}.{c}")
            late: Job | None = None
            for n in range(r * self.tiles, (r + 1) * self.tiles):
                yield self.there(f"K{n}")
                s = start("tensor", size.product, "S")
                if size.number >= AHEAD and n % self.tiles:
                    yield self.there(f"V{n - 1}")
                    late = start("tensor", size.product, "PV")
                yield s.done()
                self.release(f"K{n}")
                if late:
                    yield late.done()  # where ptxas puts the wait: before nearly all of the softmax
                    self.release(f"V{n - 1}")
                yield start("exp", size.softmax, f"softmax {size.softmax:.0f}").done()
                if size.number < AHEAD or n % self.tiles == self.tiles - 1:
                    yield self.there(f"V{n}")
                    yield start("tensor", size.product, "PV").done()
                    self.release(f"V{n}")
            store = start("copy", size.rows, "O")
            if size.number < PERSISTENT:
                yield store.done()
            self.ended += 1


LOOKS = {
    "Q": "Q",
    "K": "K",
    "V": "V",
    "O": "O",
    "S": "S",
    "PV": "O",
    "P V": "O",
    "softmax": "P",
    "row block": "m",
}  # label: whose hue
UNITS = {"copy": "copies", "tensor": "tensor cores", "exp": "softmax"}


@style.picture
def draw(says: str, why: str, change: str, panels: list[Mapping], window: float = 5000) -> style.Drawn:
    """Draw a panel for each rung, with a strip for each unit, and in it a line for each warpgroup.

    change: the label after a marked box of the last panel.
    """
    caption = (
        f"{says}. {why}{' ' * bool(why)}Model of an SM of an H200, d = 128, no mask. The number on a softmax counts all"
        " instructions per thread and tile except the matmuls. The percentage is the share of the time in which a"
        " profiler saw the tensor cores at work."
    )
    heights = [0.4 + 0.26 * (1 + 2 * panel["groups"]) for panel in panels]
    timelines = {}
    for panel in panels:
        rows = {}
        for unit, name in UNITS.items():
            for k in range(1 if unit == "copy" else panel["groups"]):
                both = zip(panel["jobs"], panel["marked"], strict=True)
                mine = [(*job[2:], new) for job, new in both if job[0] == unit and (unit == "copy" or job[1] == str(k))]
                rows[name if unit == "copy" else f"{name}, {k}"] = mine
        name = f"rung {panel['number']}, {panel['name'].replace('_', ' ')}"
        timelines[f"{name}: tensor cores at work {panel['counted']:.0f}%" if panel["counted"] else name] = rows
    alt = (
        f"Two timelines of one SM with strips for copies, tensor cores and softmax. {says}."
        f" {'; '.join(timelines).capitalize()}."
    )
    titled = {name.capitalize(): rows for name, rows in timelines.items()}
    figure = stacked(sum(heights) + 0.3, caption, titled, window, height_ratios=heights)
    last = figure.axes[-1]
    clocks = f"clocks → (1,000 clocks = {1e9 / chips.H200.clock_hz:.1f} µs)"
    if panels[-1]["number"] == PERSISTENT:
        last.set_xlabel(f"{clocks}\nthick edge: the next row block")
    else:
        last.set_xlabel(clocks)
        _say(last, list(list(titled.values())[-1].values()), change, window)
    return figure, alt


def _say(ax: style.Axes, rows: list[list[tuple]], words: str, window: float) -> None:
    """Write words after the first marked box that is followed by enough room for them."""
    need = (0.03 if style.narrow() else 0.0135) * span(window) * len(words)
    for y, jobs in enumerate(rows):
        for (_, _, ended, new), (_, after, *_) in pairwise(sorted(jobs, key=lambda job: job[1])):
            if words and new and ended > 0 and min(after, span(window)) - ended > need:
                style.note(ax, ended + 0.008 * span(window), y + 0.5, words, weight="bold")
                return


def stacked(height: float, caption: str, timelines: Mapping[str, dict], window: float, **subplots: Any) -> style.Figure:
    """Return a figure with a timeline for each title, one below another, on one axis of clocks."""
    figure, axes = style.new_figure(height, caption, nrows=len(timelines), sharex=True, **subplots)
    for ax, (title, rows) in zip(axes, timelines.items(), strict=True):
        lanes(ax, rows, window)
        ax.set_title(title)
    axes[-1].set_xlabel("clocks →")
    return figure


def lanes(ax: style.Axes, rows: Mapping[str, list[tuple]], window: float) -> None:
    """Draw a line with its name for each row, and a box for each (label, from, to), labelled as far as there is room.

    A fourth member that is true gives the box a thick edge.
    """
    window, letter = span(window), 0.0135 * window
    for y, (name, jobs) in enumerate(rows.items()):
        style.note(ax, -0.012 * window, y + 0.5, name, ha="right")
        for label, begun, ended, *marked in jobs:
            begun, ended = max(begun, 0), min(ended, window)
            if ended > begun:
                words = (label, label.split()[-1], label.rstrip("0123456789 "), "")
                fits = next(w for w in words if ended - begun > letter * (len(w) + 0.6) or not w)
                name = label.rstrip("0123456789 ")
                edge = dict(edgecolor=style.INK, linewidth=2, zorder=2) if any(marked) else dict(linewidth=0.8)
                style.tensor_box(ax, begun, y + 0.06, ended - begun, 0.88, LOOKS.get(name, name), fits, **edge)
    names = (0.034 if style.narrow() else 0.0155) * window * max(map(len, rows))
    step = 2000 if style.narrow() and window > 6000 else 1000
    style.bare(ax, (-names, window), (-0.05, len(rows) + 0.05), xticks=range(0, int(window) + 1, step))


def span(window: float) -> float:
    """Return how many of these clocks are drawn, which are only half on a phone, so that labels fit."""
    return window / 2 if style.narrow() else window
