"""Timelines of one SM for two successive rungs of the ladder, with strips for copies, tensor cores and softmax.

The time that a tile takes on each unit is computed from the compiled code and the chip, as in machine/ladder_model.py.
A warpgroup's matmuls occupy the tensor cores, its instructions occupy the issue slots, and its tiles occupy the path
from L2. `Program.producer` and `Program.consumer` define which warpgroup waits for which.
"""

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, reasons
from fa2_lab.machine import ladder_model as model
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Job, ThreadBlock, Wait
from fa2_lab.machine.rates import rates
from fa2_lab.plots import style
from fa2_lab.records import load

LEAD_CLOCKS = 250  # clock cycles drawn before the first job that differs from the previous rung
# The first rungs in which S starts early, programs are persistent, o is rarely rescaled, and programs have three
# consumers.
STARTS_S_EARLY, PERSISTENT, LETS_M_LAG, THREE_CONSUMERS = 20, 21, 22, 23


class RungCosts(NamedTuple):
    """A rung's number, its programs and consumers per SM, and its clock cycles per tile on each unit."""

    number: int
    keys: int  # keys per tile
    programs: int  # programs per SM
    consumers: int  # consumers per program
    stages: int
    copy: float  # clock cycles to copy one tile of K or V
    rows: float  # clock cycles to copy one consumer's Q or O
    product: float  # clock cycles to compute one consumer's S or P V
    softmax: float  # clock cycles for a consumer's instructions, including the ones that start matmuls, in most tiles


def rung_costs(rung: str, d: int = 128, chip: chips.Chip = chips.H200) -> RungCosts:
    """Return the RungCosts of a rung, computed from its compiled kernel without a mask."""
    name = ladder.find(rung)
    fact = reasons.compiled_rungs()[name, False, d]
    number, keys, rows = int(name[1:3]), fact["keys"], 64 * fact["consumers"]
    rate = rates(chip).l2 / chip.SMs / chip.clock_hz  # bytes per clock cycle
    buffer_rows = rows * (2 if number in (21, 22) else 1)  # in these rungs, O has a separate buffer
    skipped = 0  # instructions in the loop that a thread does not execute in most tiles
    if number in (15, 16, 17, 18):  # a branch skips the mask: a selection per score, and a comparison per column
        skipped = (model.ROWS * keys + model.ROWS * keys // 2) // 128
    elif number >= LETS_M_LAG:  # a branch skips multiplying o by α
        skipped = model.ROWS * d // 128
    return RungCosts(
        number,
        keys,
        fact["programs"],
        fact["consumers"],
        stages=(fact["shared"] - 2 * d * buffer_rows) // (4 * d * keys),
        copy=2 * d * keys / rate,
        rows=2 * d * model.ROWS / rate,
        product=2 * model.ROWS * keys * d / chip.tensor_flops_per_clock,
        softmax=float(fact["instructions"] - skipped),
    )


HEADLINES = {  # {rung: headline that names the change from the previous rung}
    14: "In rung 14, TMA makes the copies, so a tile takes {now} instructions instead of {then}",
    15: "Rung 15, in Gluon, takes {now} instructions per tile instead of {then}",
    16: "Rung 16 has a warp that only copies, so a tile takes {now} instructions instead of {then}",
    17: "Rung 17 needs half as many copies, because two consumers share each tile",
    18: "Rung 18 has tiles of 128 keys, which take {now} instructions instead of twice {then}",
    19: "Rung 19 computes the first tile before the loop and saves {fewer} instructions per tile",
    20: "In the model of rung 20, one consumer runs matmuls during the other's softmax",
    21: "Programs of rung 21 stay, so the next row block's copies arrive while this one ends",
    22: "In rung 22, m may lag behind, so most tiles skip the rescaling of o",
    23: "In rung 23, a third consumer leaves each softmax more time to spare before its next matmul",
}
EXPLANATIONS = {  # {rung: sentences added to its caption}
    15: "So it is slower at first, but from now on we can place each wait.",
    17: "One ring of buffers then serves both, which makes room for the long tiles of rung 18. By itself, rung 17"
    " is not faster.",
    21: "The boxes with a thick edge belong to the next row block.",
    19: "A tile takes {now} instructions instead of {then}.",
    22: "A tile takes {now} instructions instead of {then}.",
    23: "The dashed boxes show this time, in clocks. With more of it, a delay is less likely to stop the tensor cores."
    " The boxes with a thick edge belong to the third consumer.",
}
CHANGED = {14: "exp", 15: "exp", 16: "exp", 17: "copy", 18: "exp", 19: "exp", 22: "exp"}  # {rung: unit to emphasise}
CHANGE_LABELS = {  # {rung: text beside the first changed box or below the copies, not shown on a phone}
    14: "TMA computes the addresses",
    15: "more than in Triton's code",
    16: "the new warp starts the copies",
    17: ("each program has its own", "both consumers read them"),
    18: "for 128 keys",
    19: "no test for the last key",
    22: "o is not rescaled",
}
# {rung: clock cycles to draw}, for rungs whose change is small compared with a tile.
WINDOW = {n: 2400.0 for n in (14, 15, 16, 22)}


def data(after: str = "17", tiles: int = 1024, row_blocks: int = 2) -> dict:
    """Return an SM's jobs in the rung `after` and in the previous rung, for rows with `tiles` keys.

    Each program runs `row_blocks` row blocks. A job is (unit, warpgroup, label, start, end), with times in clock
    cycles. The jobs shown are taken from the middle of a row block or, for rung 21, from the transition to the next row
    block. In the result, `marked` is True for each job that the rung changes or, for rung 21, for each job of the next
    row block. `unit` is the unit whose work the rung changes, or empty. `ratio` is a marked job's duration on the
    previous rung divided by its duration on this rung.
    """
    before = f"{int(after) - 1}"
    pair, panels = [rung_costs(before), rung_costs(after)], []
    number, then, now = pair[1].number, int(pair[0].softmax), int(pair[1].softmax)
    took = dict(then=then, now=now, fewer=then - now)
    headline, explanation = HEADLINES[number].format(**took), EXPLANATIONS.get(number, "").format(**took)
    unit = CHANGED.get(number, "")
    for rung, costs in zip((before, after), pair, strict=True):
        block, *_ = simulate(costs, tiles // costs.keys, row_blocks)
        stores = [job.begun for job in block.jobs if job.label == "O"]
        first = [j.begun for j in block.jobs if j.unit == unit and j.actor in ("0", "producer 0") and j.label != "V"]
        aligned = min((x for x in first if x >= 9000), default=9000 + LEAD_CLOCKS) - LEAD_CLOCKS
        start = min(stores) - 1500 if number == PERSISTENT else aligned
        if number == PERSISTENT:
            marked = [block_of > 0 for block_of in row_blocks_of(block.jobs, costs, tiles // costs.keys)]
        elif number == THREE_CONSUMERS:
            marked = [job.actor == "2" for job in block.jobs]
        else:
            marked = [costs.number == number and job.unit == unit for job in block.jobs]
        jobs = [(job.unit, job.actor, job.label, job.begun - start, job.ended - start) for job in block.jobs]
        name = ladder.find(rung)
        counted = reasons.hardware_counters(load("ladder"), name).get(reasons.TENSOR_BUSY)
        groups = costs.consumers * costs.programs
        panel = dict(number=costs.number, name=name[4:], jobs=jobs, marked=marked, groups=groups)
        panels.append(panel | dict(instructions=int(costs.softmax), counted=counted))
    ratio = pair[0].softmax / pair[1].softmax * pair[1].keys / pair[0].keys if unit == "exp" else 1.0
    return dict(
        headline=headline,
        explanation=explanation,
        panels=panels,
        unit=unit,
        ratio=ratio,
        window=WINDOW.get(number, 5000.0),
    )


def row_blocks_of(jobs: list[Job], costs: RungCosts, tiles: int) -> list[int]:
    """Return, for each job of a program, the index of its row block. A row block has `tiles` tiles."""
    jobs_so_far: dict[tuple[str, str], int] = defaultdict(int)
    indices = []
    for job in jobs:
        kind = job.label.rstrip("0123456789 ")
        indices.append(jobs_so_far[job.actor, kind] // {"Q": costs.consumers, "O": 1}.get(kind, tiles))
        jobs_so_far[job.actor, kind] += 1
    return indices


def simulate(costs: RungCosts, tiles: int, row_blocks: int) -> tuple:
    """Return (block, *programs): a simulated SM, and the programs that ran on it."""
    programs: list[Program] = []
    block, actors = ThreadBlock(copy=IN_ORDER, tensor=IN_ORDER if costs.number >= STARTS_S_EARLY else SHARED), {}
    for n in range(costs.programs):
        program = Program(block, costs, tiles, row_blocks)
        programs.append(program)
        actors[f"producer {n}"] = program.producer()
        actors |= {f"{n * costs.consumers + c}": program.consumer(c) for c in range(costs.consumers)}
    return block.run(actors), *programs


class Program:
    """One program on the simulated SM, which records the tiles that it copied and those that its consumers released."""

    def __init__(self, block: ThreadBlock, costs: RungCosts, tiles: int, row_blocks: int) -> None:
        self.block, self.costs, self.tiles, self.row_blocks = block, costs, tiles, row_blocks
        self.copied: dict[str, Job] = {}
        self.released: dict[str, list[float]] = defaultdict(list)  # {tile: times at which consumers released it}
        self.sent: dict[int, float] = {}  # {row block: time at which its index was written to the mailbox}
        self.read: dict[int, list[float]] = defaultdict(list)  # {row block: times at which consumers read its index}
        self.ended = 0  # row blocks that consumers have finished, counted once per consumer

    def producer(self) -> Generator[Wait]:
        """Copy tiles as soon as their stages are free.

        In rungs without a producer warp, the warpgroup itself copies the tiles.
        """
        for r in range(self.row_blocks):
            if self.costs.number < PERSISTENT:
                yield Wait(lambda r=r: self.ended == r * self.costs.consumers, "the program before")
            elif r > 1:
                yield Wait(lambda r=r: len(self.read[r - 2]) == self.costs.consumers, "a place in the mailbox")
            self.sent[r] = self.block.clock
            for c in range(self.costs.consumers):
                self.copied[f"Q{r}.{c}"] = self.block.start("copy", self.costs.rows, "Q")
            for n in range(r * self.tiles, (r + 1) * self.tiles):
                for tensor in "KV":
                    before = f"{tensor}{n - self.costs.stages}"
                    if n >= self.costs.stages:
                        yield Wait(lambda b=before: len(self.released[b]) == self.costs.consumers, before)
                    job = self.copied[f"{tensor}{n}"] = self.block.start("copy", self.costs.copy, tensor)
                    yield job.done()

    def arrival(self, tile: str) -> Wait:
        """Return a Wait for the arrival of a tile, even if the copy of this tile has not been started yet."""
        return Wait(lambda: tile in self.copied and self.copied[tile].ended is not None, tile)

    def release(self, tile: str) -> None:
        self.released[tile].append(self.block.clock)

    def consumer(self, c: int) -> Generator[Wait]:
        """Run consumer c, which computes each tile's S, softmax and P V.

        From rung 20 on, a tile's S starts before the previous tile's P V.
        """
        costs, start = self.costs, self.block.start
        for r in range(self.row_blocks):
            yield Wait(lambda r=r: r in self.sent, "the mailbox")
            self.read[r].append(self.block.clock)
            yield self.arrival(f"Q{r}.{c}")
            pv: Job | None = None
            for n in range(r * self.tiles, (r + 1) * self.tiles):
                yield self.arrival(f"K{n}")
                s = start("tensor", costs.product, "S")
                if costs.number >= STARTS_S_EARLY and n % self.tiles:
                    yield self.arrival(f"V{n - 1}")
                    pv = start("tensor", costs.product, "PV")
                yield s.done()
                self.release(f"K{n}")
                if pv:
                    yield pv.done()  # ptxas puts this wait before nearly all of the softmax
                    self.release(f"V{n - 1}")
                yield start("exp", costs.softmax, f"softmax {costs.softmax:.0f}").done()
                if costs.number < STARTS_S_EARLY or n % self.tiles == self.tiles - 1:
                    yield self.arrival(f"V{n}")
                    yield start("tensor", costs.product, "PV").done()
                    self.release(f"V{n}")
            store = start("copy", costs.rows, "O")
            if costs.number < PERSISTENT:
                yield store.done()
            self.ended += 1


JOB_COLORS = {
    "Q": "Q",
    "K": "K",
    "V": "V",
    "O": "O",
    "S": "S",
    "PV": "O",
    "P V": "O",
    "softmax": "P",
    "": "P",  # softmax jobs, whose labels are only numbers
    "row block": "m",
}  # {label: tensor in whose colour the job is drawn}
UNITS = {"copy": "copies", "tensor": "tensor cores", "exp": "softmax"}


@style.picture
def draw(headline: str, explanation: str, panels: list[Mapping], unit: str, ratio: float, window: float) -> style.Drawn:
    """Draw a panel for each rung, with a strip for each unit, and a line for each warpgroup in each strip.

    `headline` and `explanation` are sentences in the caption. `unit` is the unit to emphasise, or "". `ratio` is the
    duration of the box marked in a panel on the previous rung divided by its duration on this rung. `window` is the
    number of clock cycles to draw.
    """
    number = panels[-1]["number"]
    caption = (
        f"{headline}. {explanation}{' ' * bool(explanation)}Model of an SM of an H200, d = 128, no mask. The lines 0,"
        " 1, … of a unit are warpgroups. The number on a softmax counts the instructions that a thread executes in most"
        " tiles, including the few that start the matmuls."
        + " A dashed box shows how much longer the softmax took on the previous rung." * (ratio > 1)
        + " The hatched part is what the rung adds." * (ratio < 1)
        + " If a job takes twice as long, two warpgroups share its unit. Wherever all lines of the tensor cores are"
        " empty, there is still time to be gained. The measured percentage is the share of the time in which a profiler"
        " saw the tensor cores at work."
    )
    faded = [name for key, name in UNITS.items() if unit not in ("", key)]
    timelines = {_panel_title(panel): _rows_of_jobs(panel, unit) for panel in panels}
    heights = [0.4 + 0.26 * sum(row_heights(rows, faded)) for rows in timelines.values()]
    alt = (
        f"Two timelines of one SM with strips for copies, tensor cores and softmax. {headline}."
        f" {'; '.join(timelines).capitalize()}."
    )
    titled = {name.capitalize(): rows for name, rows in timelines.items()}
    figure = stacked_timelines(
        sum(heights) + (0.5 if style.is_narrow() else 0.2), caption, titled, window, faded=faded, height_ratios=heights
    )
    clocks = f"time in the model → (1,000 clocks = {1e9 / chips.H200.clock_hz:.1f} µs)"
    figure.axes[-1].set_xlabel(clocks)
    if unit == "copy":
        for ax, rows, panel, cause in zip(figure.axes, timelines.values(), panels, CHANGE_LABELS[number], strict=True):
            _count_copies(ax, rows, panel, cause)
    elif unit:
        more = round(panels[-1]["instructions"] * (1 - ratio))
        words = f"{'+' if more > 0 else '−'}{abs(more)} instructions", CHANGE_LABELS[number]
        _mark_change(figure.axes[-1], list(timelines.values())[-1], faded, words, ratio, window)
    else:
        for ax, rows in zip(figure.axes, timelines.values(), strict=True):
            mark_waits(ax, rows, window)
            if number == THREE_CONSUMERS:
                _mark_spare_time(ax, rows, window)
    return figure, alt


def _panel_title(panel: Mapping) -> str:
    measured = f": tensor cores {panel['counted']:.0f}% busy, measured in the whole kernel"
    return f"rung {panel['number']}, {panel['name'].replace('_', ' ')}" + measured * bool(panel["counted"])


def _rows_of_jobs(panel: Mapping, unit: str) -> dict[str, list[tuple]]:
    """Return {row: jobs (label, start, end, whether it is marked)}, with a row for each warpgroup on each unit.

    The copies share one row. If `unit` is "copy", an empty row below the copies leaves room for text.
    """
    rows: dict[str, list[tuple]] = {}
    for key, name in UNITS.items():
        for k in range(1 if key == "copy" else panel["groups"]):
            pairs = zip(panel["jobs"], panel["marked"], strict=True)
            group_jobs = [(job, new) for job, new in pairs if job[0] == key and (key == "copy" or job[1] == str(k))]
            group_jobs = [(job[2].removeprefix("softmax "), *job[3:], new) for job, new in group_jobs]
            rows[name if key == "copy" else f"{name}, {k}"] = group_jobs
        if key == unit == "copy":
            rows[""] = []
    return rows


def _mark_spare_time(ax: style.Axes, rows: Mapping[str, list[tuple]], window: float) -> None:
    """Draw a dashed box, labelled with its length, from the end of consumer 0's first softmax to its next matmul."""
    y = list(rows).index("softmax, 0")
    ended = min(job[2] for job in rows["softmax, 0"] if job[1] > 0)
    wide = min(job[1] for job in rows["tensor cores, 0"] if job[1] > ended) - ended
    words = f"{wide:,.0f}" if style.is_narrow() else f"spare: {wide:,.0f}"
    style.box(ax, ended, y + 0.06, wide, 0.88, words, linestyle=style.DASHED)


def mark_waits(ax: style.Axes, rows: Mapping[str, list[tuple]], window: float) -> None:
    """Hatch the intervals in which no warpgroup has a matmul on the tensor cores."""
    window = clocks_drawn(window)
    lines = [n for n, name in enumerate(rows) if name.startswith(UNITS["tensor"])]
    jobs = [job[1:3] for name, of in rows.items() if name.startswith(UNITS["tensor"]) for job in of]
    for begun, ended in idle_intervals(jobs, window):
        words = "wait" if ended - begun > 0.07 * window else ""
        style.masked_box(ax, begun, lines[0] + 0.06, ended - begun, len(lines) - 0.12, words, zorder=0.5)


def idle_intervals(jobs: Iterable[tuple[float, float]], window: float) -> list[tuple[float, float]]:
    """Return the gaps (start, end) in the first `window` clock cycles in which none of the jobs (start, end) runs."""
    idle, busy = [], 0.0
    for begun, ended in [*sorted(jobs), (window, window)]:
        if busy + 1 < min(begun, window):
            idle.append((busy, min(begun, window)))
        busy = max(busy, ended)
    return idle


def _mark_change(
    ax: style.Axes, rows: Mapping, faded: Sequence[str], words: tuple[str, str], ratio: float, window: float
) -> None:
    """For each marked box, draw a dashed box over the time saved by the rung, or hatch the time that the rung adds.

    `ratio` is a marked box's duration on the previous rung divided by its duration on this rung. `words` are the two
    lines of the label that is written beside the first marked box.
    """
    labelled = False
    for jobs, (y, high) in zip(rows.values(), row_places(rows, faded), strict=True):
        for _, begun, ended, new in sorted(jobs, key=lambda job: job[1]):
            before = min(begun + ratio * (ended - begun), clocks_drawn(window))
            if not new or before <= 0 or ended >= clocks_drawn(window):
                continue
            left, right = sorted((max(before, 0), ended))
            look = dict(hatch=style.MASK_HATCH) if ratio < 1 else dict(linestyle=style.DASHED)
            ground = style.tensor_fill("P") if ratio < 1 else style.PAPER
            style.box(ax, left, y + 0.06, right - left, high - 0.12, "", ground, zorder=3, **look)
            if labelled or begun < 0:
                continue
            labelled = True
            tip, far, middle = right + 0.004 * clocks_drawn(window), 0.05 * clocks_drawn(window), y + high / 2
            style.arrow(ax, (tip + far, middle), (tip, middle))
            lines = words[0].split() if style.is_narrow() else words
            for k, line in enumerate(lines):
                bold = "bold" if k == 0 or style.is_narrow() else "normal"
                style.note(ax, tip + 1.2 * far, middle + 0.58 * (k - 0.5), line, weight=bold)


def _count_copies(ax: style.Axes, rows: Mapping[str, list[tuple]], panel: Mapping, cause: str) -> None:
    """Draw a bracket below the copies that 128 rows need for one tile, with the number of copies and the reason."""
    count = 2 * len({job[1] for job in panel["jobs"] if job[2] == "K"})
    copies = sorted(job[1:3] for job in rows["copies"] if job[1] >= LEAD_CLOCKS - 1)[:count]
    y = row_heights(rows, ["softmax", "tensor cores"])[0] + 0.2  # the row below the copies
    style.arrow(ax, (copies[0][0], y), (copies[-1][1], y), style="|-|", mutation_scale=3)
    label = style.note(ax, copies[0][0], y + 0.45, f"{count} copies for 128 rows", weight="bold")
    if not style.is_narrow():
        style.beside(ax, f"because {cause}", (1, 0.5), (5, 0), xycoords=label)


def row_heights(rows: Iterable[str], faded: Sequence[str]) -> list[float]:
    """Return the height of each row. If the rows of some units are faded, the other rows are taller."""
    return [1.5 if faded and name and name.split(",")[0] not in faded else 1.0 for name in rows]


def row_places(rows: Iterable[str], faded: Sequence[str]) -> list[tuple[float, float]]:
    """Return (y-coordinate of the top edge, height) for each row."""
    heights = row_heights(rows, faded)
    return [(sum(heights[:n]), high) for n, high in enumerate(heights)]


def stacked_timelines(
    height: float, caption: str, timelines: Mapping[str, dict], window: float, faded: Sequence[str] = (), **look: Any
) -> style.Figure:
    """Return a figure with the timelines stacked on a shared time axis in clock cycles.

    `timelines` is {title: {row: jobs}}, `window` is the number of clock cycles to draw, and `faded` names the units
    whose rows are drawn pale. Further keyword arguments are passed to new_figure().
    """
    figure, axes = style.new_figure(height, caption, nrows=len(timelines), sharex=True, **look)
    for ax, (title, rows) in zip(axes, timelines.items(), strict=True):
        draw_lanes(ax, rows, window, faded)
        ax.set_title(title)
    axes[-1].set_xlabel("clocks →")
    return figure


def draw_lanes(ax: style.Axes, rows: Mapping[str, list[tuple]], window: float, faded: Sequence[str] = ()) -> None:
    """Draw a named line for each row, and a box for each job (label, start, end), with as much of its label as fits.

    A job whose fourth element is true gets a thick edge. `faded` names the units whose rows are pale.
    """
    window, letter = clocks_drawn(window), letter_width() * clocks_drawn(window)
    for (name, jobs), (y, high) in zip(rows.items(), row_places(rows, faded), strict=True):
        pale = name.split(",")[0] in faded
        style.note(ax, -0.012 * window, y + high / 2, name, ha="right", color=style.QUIET if pale else style.INK)
        for label, begun, ended, *marked in jobs:
            begun, ended = max(begun, 0), min(ended, window)
            if ended > begun:
                words = (label, label.split()[-1], label.rstrip("0123456789 "), "")
                fits = next(w for w in words if ended - begun > letter * (len(w) + 0.6) or not w)
                kind = label.rstrip("0123456789 ")
                tensor = JOB_COLORS.get(kind, kind)
                edge = dict(edgecolor=style.INK, linewidth=2, zorder=2) if any(marked) else dict(linewidth=0.8)
                if pale:
                    edge["edgecolor"] = style.tint(style.hue(tensor), 0.4)
                patch = style.tensor_box(ax, begun, y + 0.06, ended - begun, high - 0.12, tensor, fits, **edge)
                if pale:
                    patch.set_facecolor(style.tint(style.hue(tensor), 0.12))
                if pale and fits:
                    patch.label_text.set_color(style.QUIET)
    names = (0.034 if style.is_narrow() else 0.0155) * window * max(map(len, rows))
    step = 2000 if style.is_narrow() and window > 6000 else 1000 if window > 2000 else 500
    deep = sum(row_heights(rows, faded))
    style.strip_axes(ax, (-names, window), (-0.05, deep + 0.05), xticks=range(0, int(window) + 1, step))


def letter_width() -> float:
    """Return the width of a character as a fraction of the time axis."""
    return 0.0252 if style.is_narrow() else 0.0135


def clocks_drawn(window: float) -> float:
    """Return the number of clock cycles drawn: `window` or, on a phone, fewer, so that labels fit."""
    return min(window, max(2400, 0.53 * window)) if style.is_narrow() else window
