"""An explorer: FA1 and FA2 beside each other on one clock, and what each has on the chip at that moment.

The clock is HBM's: it advances by one for every number that passes, so whoever moves less is done earlier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fa2_lab.plots import style
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import Mask, Tile, Tiling
from fa2_lab.trace import Event, Trace

# Data -----------------------------------------------------------------------------------------------------------

D = 4  # the head dimension; any would show the same
STAGES = {"FA1": fa1, "FA2": fa2}


@lru_cache(maxsize=64)
def recording(name: str, N_q: int, N_k: int, B_r: int, B_c: int, causal: bool) -> tuple[Event, ...]:
    """Every load and store of the forward of one head, as the meter saw them."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((n, D)) for n in (N_q, N_k, N_k))
    trace = Trace()
    STAGES[name].forward(Q, K, V, B_r=B_r, B_c=B_c, mask=Mask(causal=causal), trace=trace)
    return tuple(trace.events)


def data(N_q: int = 12, N_k: int = 12, B_r: int = 4, B_c: int = 4, causal: bool = False, t: int | None = None) -> dict:
    """Both recordings and a time t, counted in numbers moved; without t, one at which both have a tile on the chip."""
    events = {name: recording(name, N_q, N_k, B_r, B_c, causal) for name in STAGES}
    if t is None:
        halfway = moved(events["FA2"]) // 2
        full = (t for t in times(events) if t >= halfway and all("S" in on_chip(n, e, t) for n, e in events.items()))
        t = next(full, halfway)
    return dict(tiling=Tiling(N_q, N_k, B_r, B_c, Mask(causal=causal)), events=events, t=t)


def moved(log: Sequence[Event], tensor: str | None = None) -> int:
    """The numbers that these loads and stores move, of one tensor or of all."""
    return sum(e.elements for e in log if tensor in (None, e.tensor))


def times(events: dict[str, Sequence[Event]]) -> list[int]:
    """The moments at which something has arrived, from 0 to the end of the longer run."""
    return sorted({0}.union(*(accumulate(e.elements for e in log) for log in events.values())))


def until(log: Sequence[Event], t: int) -> list[Event]:
    """The loads and stores that are complete at time t."""
    return [e for e, end in zip(log, accumulate(e.elements for e in log), strict=True) if end <= t]


def on_chip(name: str, log: Sequence[Event], t: int) -> dict[str, int]:
    """{tensor: its block} on the chip at time t; what has just been stored is still there, unless it was the last."""
    chip, worker, leaving, done = {}, None, "", until(log, t)
    for e in done if len(done) < len(log) else ():
        chip.pop(leaving, None)
        if leaving and not {"O", "l", "m"} & chip.keys():
            chip.pop("Q", None)  # the row block is finished, or waits in HBM for its next tile
        if e.worker != worker:
            chip, worker = {}, e.worker  # another thread block: its chip is empty
        leaving = e.tensor if e.op == "store" else ""
        if e.op == "load":
            chip[e.tensor] = e.j if e.tensor in "KV" else e.i
        if name == "FA2" and (e.op, e.tensor) == ("load", "Q"):
            chip |= {"O": e.i, "l": e.i, "m": e.i}  # they begin on the chip
        if leaving == "L":
            chip = {tensor: block for tensor, block in chip.items() if tensor not in "lm"} | {"L": e.i}
    if chip.keys() >= set("QKVOlm") and chip["K"] == chip["V"]:
        chip["S"] = chip["Q"]
    return chip


# Drawing: boxes and texts in pixels, which become a figure or an SVG -------------------------------------------------

WIDTH, HEIGHT, COLUMN = 730, 452, 350
SHELF, MAP = 74, 304  # where what is on the chip begins, and the map of the matrices
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
LOOPS = {"FA1": "keys outside", "FA2": "queries outside"}


class Box(NamedTuple):
    """A rectangle; `what` says what it shows, for readers of the SVG and for tests."""

    what: str
    x: float
    y: float
    w: float
    h: float
    fill: str = style.PAPER
    edge: str = style.QUIET
    line: float = 0.8


class Text(NamedTuple):
    """A line of text; x is its start, middle or end, and y its middle."""

    words: str
    x: float
    y: float
    size: float = 12
    anchor: str = "start"
    bold: bool = False
    color: str = style.INK


def shapes(tiling: Tiling, events: dict[str, Sequence[Event]], t: int) -> list[Box | Text]:
    """The whole picture, FA1 on the left and FA2 on the right."""
    longest = max(map(moved, events.values()))
    most = max(moved(log, tensor) for log in events.values() for tensor in "QKVO")
    drawn = [Text(f"After {min(t, longest):,} numbers moved", 0, 10, 13, bold=True)]
    for k, (name, log) in enumerate(events.items()):
        x, done = k * (WIDTH - COLUMN), until(log, t)
        drawn += header(x, name, log, done, longest)
        drawn += chip_shapes(x, tiling, on_chip(name, log, t), done)
        drawn += map_shapes(x, tiling, done)
        drawn += bar_shapes(x, log, done, most)
    return drawn


def header(x: float, name: str, log: Sequence[Event], done: Sequence[Event], longest: int) -> list[Box | Text]:
    """Its name, what it has moved of what it will move, and what moves now."""
    far, total = moved(done), moved(log)
    return [
        Text(f"{name}: {LOOPS[name]}", x, 34, 13, bold=True),
        Text(f"{far:,} of {total:,} moved", x + COLUMN, 34, anchor="end"),
        Box(f"{name} total", x, 44, COLUMN * total / longest, 7, style.MASKED, style.QUIET, 0.5),
        Box(f"{name} moved", x, 44, COLUMN * far / longest, 7, style.INK, style.INK, 0.5),
        Text(now(done, log), x, 64),
    ]


def now(done: Sequence[Event], log: Sequence[Event]) -> str:
    if len(done) in (0, len(log)):
        return "done" if done else "nothing has moved yet"
    e = done[-1]
    blocks = [f"{axis} block {k}" for axis, k in (("row", e.i), ("column", e.j)) if k is not None]
    return f"now: {e.op} {e.tensor}, {' and '.join(blocks) or 'all of it'}"


def chip_shapes(x: float, tiling: Tiling, chip: dict[str, int], done: Sequence[Event]) -> list[Box | Text]:
    """The blocks on the chip, laid out as the products are: q and k meet in s, p and v in o."""
    B_r, B_c = tiling.B_r, tiling.B_c
    unit = min(20.0, 176 / (max(D, B_c) + B_r + 0.8), 318 / (2 * D + B_c + 6))
    left, top = x + 16, SHELF + 34
    middle = top + unit * (max(D, B_c) + 0.8)  # of K and V above, and q, s and o below
    s, o = left + unit * (D + 0.8), left + unit * (D + B_c + 1.6)
    places = {
        "Q": (left, middle, D, B_r),
        "K": (s, middle - unit * (D + 0.8), B_c, D),
        "S": (s, middle, B_c, B_r),
        "V": (o, middle - unit * (B_c + 0.8), D, B_c),
        "O": (o, middle, D, B_r),
        "l": (o + unit * (D + 0.8), middle, 1, B_r),
        "m": (o + unit * (D + 2.6), middle, 1, B_r),
    }
    places["L"] = places["l"]
    size = {tensor: round(w * h) for tensor, (_, _, w, h) in places.items()}
    moving = done[-1] if done else None
    drawn = [
        Box("chip", x, SHELF, COLUMN, MAP - SHELF - 8, style.tint(style.MASKED, 0.45), style.QUIET, 1.2),
        Text(f"on the chip now: {sum(size[tensor] for tensor in chip):,} numbers", x + 10, SHELF + 14, 12, bold=True),
    ]
    for tensor, (a, b, w, h) in places.items():
        if tensor in chip:
            leaves = moving.op == "store" and moving.tensor == tensor
            fresh = moving.op == "load" and moving.tensor == tensor
            fill = style.PAPER if leaves else style.tint(style.hue(tensor), 0.75 if fresh else 0.35)
            drawn.append(
                Box(f"chip {tensor}", a, b, unit * w, unit * h, fill, style.hue(tensor), 3 if leaves or fresh else 1.2)
            )
            drawn.append(label(tensor, chip, a + unit * w / 2, b + unit * h / 2, unit * w, fill))
        elif tensor != "L":
            drawn.append(Box(f"free {tensor}", a, b, unit * w, unit * h, style.PAPER, style.MASKED, 1))
    return drawn


def label(tensor: str, chip: dict[str, int], x: float, y: float, room: float, fill: str) -> Text:
    block = f"{chip['Q']}{chip['K']}" if tensor == "S" else str(chip[tensor])
    letter = tensor if tensor == "L" else tensor.lower()
    return Text(letter + block.translate(SUBSCRIPTS), x, y, 16 if room > 40 else 11, "middle", True, style.ink_on(fill))


def map_shapes(x: float, tiling: Tiling, done: Sequence[Event]) -> list[Box | Text]:
    """The tiles of S with the numbers of those visited, counted from 0, and the block of each tensor that moves."""
    unit = 104 / max(tiling.N_q, tiling.N_k)
    left, top, strip, gap = x + 34, MAP + 36, 12, 4
    visited = list(dict.fromkeys((e.i, e.j) for e in done if None not in (e.i, e.j)))
    drawn = []
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            a, b = tiling.cols(j), tiling.rows(i)
            w, h = unit * (a.stop - a.start), unit * (b.stop - b.start)
            here, (p, q) = (i, j) in visited, (left + unit * a.start, top + unit * b.start)
            skip = tiling.kind(i, j) is Tile.SKIP
            fill = style.tint(style.hue("S"), 0.2 if skip else 0.5) if here else style.MASKED if skip else style.PAPER
            last = bool(visited) and (i, j) == visited[-1]
            drawn.append(
                Box(
                    "done" if here else "to come",
                    p,
                    q,
                    w,
                    h,
                    fill,
                    style.INK if last else style.QUIET,
                    2 if last else 0.6,
                )
            )
            if here and min(w, h) >= 13:
                drawn.append(Text(str(visited.index((i, j))), p + w / 2, q + h / 2, 10, "middle"))
    right, bottom = left + unit * tiling.N_k, top + unit * tiling.N_q
    strips = {"Q": (left - gap - strip, top, strip, bottom - top), "O": (right + gap, top, strip, bottom - top)}
    strips |= {
        "K": (left, top - gap - strip, right - left, strip),
        "V": (left, top - 2 * (gap + strip), right - left, strip),
    }
    for tensor, (p, q, w, h) in strips.items():
        drawn.append(Box(f"HBM {tensor}", p, q, w, h, style.tint(style.hue(tensor), 0.3), "none"))
        drawn += moving_block(tensor, (p, q, w, h), tiling, unit, done)
        beside = (p + w + 6, "start") if tensor == "O" else (p - 6, "end")
        drawn.append(Text(tensor, beside[0], q + h / 2, 11, beside[1], True))
    return drawn


def moving_block(tensor: str, place: tuple, tiling: Tiling, unit: float, done: Sequence[Event]) -> list[Box]:
    """The part of a strip that moves now: filled when it is loaded, framed when it is stored."""
    if not done or done[-1].tensor != tensor:
        return []
    e, (x, y, w, h) = done[-1], place
    if tensor in "KV":
        part = tiling.cols(e.j)
        x, w = x + unit * part.start, unit * (part.stop - part.start)
    elif e.i is not None:
        part = tiling.rows(e.i)
        y, h = y + unit * part.start, unit * (part.stop - part.start)
    return [
        Box(f"{e.op} {tensor}", x, y, w, h, style.hue(tensor) if e.op == "load" else style.PAPER, style.hue(tensor), 2)
    ]


def bar_shapes(x: float, log: Sequence[Event], done: Sequence[Event], most: int) -> list[Box | Text]:
    """For each tensor a bar of what has moved, in a frame of what will have moved; `most` fills the width."""
    drawn, left = [Text("moved so far", x + 186, MAP + 12, 11)], x + 204
    for k, tensor in enumerate(tensor for tensor in "QKVOlmL" if moved(log, tensor)):
        y, total, far = MAP + 26 + 20 * k, 96 * moved(log, tensor) / most, 96 * moved(done, tensor) / most
        drawn += [
            Text(tensor, left - 6, y + 7, 11, "end", True),
            Box(f"all {tensor}", left, y, total, 14, style.PAPER, style.hue(tensor), 0.8),
            Box(f"moved {tensor}", left, y, far, 14, style.tint(style.hue(tensor), 0.6), "none"),
            Text(f"{moved(done, tensor):,}", left + total + 5, y + 7, 11),
        ]
    return drawn


def describe(tiling: Tiling, events: dict[str, Sequence[Event]], t: int) -> str:
    """The alternative text."""
    said = [
        f"FA1 and FA2 on {tiling.T_r} by {tiling.T_c} tiles at time {t:,}, counted in numbers that HBM can have moved."
    ]
    for name, log in events.items():
        done = until(log, t)
        blocks = ", ".join(f"{tensor} {k}" for tensor, k in on_chip(name, log, t).items() if tensor != "S") or "nothing"
        said.append(f"{name}: {moved(done):,} of {moved(log):,} moved, {now(done, log)}; on the chip: {blocks}.")
    return style.ell(" ".join(said))


@style.picture
def draw(tiling: Tiling, events: dict[str, Sequence[Event]], t: int) -> tuple[Figure, str]:
    """The picture of one moment as a figure."""
    figure = Figure(figsize=(WIDTH / 96, HEIGHT / 96))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-4, WIDTH + 4), ylim=(HEIGHT, 0))
    ax.set_axis_off()
    for shape in shapes(tiling, events, t):
        if isinstance(shape, Box):
            what, x, y, w, h, fill, edge, line = shape
            ax.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, linewidth=0.75 * line, gid=what))
        else:
            words, x, y, size, anchor, bold, color = shape
            look = dict(ha={"start": "left", "middle": "center", "end": "right"}[anchor], va="center", color=color)
            ax.text(x, y, words, fontsize=0.75 * size, weight="bold" if bold else "normal", **look)
    return figure, describe(tiling, events, t)


def svg_parts(tiling: Tiling, events: dict[str, Sequence[Event]], t: int) -> list[str]:
    """The same picture as the elements of an SVG, its text as text."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 0 {WIDTH + 8} {HEIGHT}" role="img"'
        ' font-family="DejaVu Sans,Verdana,sans-serif" dominant-baseline="central">'
    )
    title = f"<title>FA1 and FA2 at time {t}</title><desc>{escape(describe(tiling, events, t))}</desc>"
    return [head, title, *map(element, shapes(tiling, events, t)), "</svg>"]


def element(shape: Box | Text) -> str:
    if isinstance(shape, Box):
        what, x, y, w, h, fill, edge, line = shape
        place = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
        return f'<rect class="{what}" {place} fill="{fill}" stroke="{edge}" stroke-width="{line}"/>'
    words, x, y, size, anchor, bold, color = shape
    look = f'font-size="{size}" text-anchor="{anchor}" fill="{color}"' + (' font-weight="bold"' if bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(style.ell(words))}</text>'


# In a notebook, and on a page ------------------------------------------------------------------------------------

MISSING = "The sliders need ipywidgets: `pip install ipywidgets`, then restart the kernel. Without it, one moment:"
SLIDERS = dict(N_q=(4, 24), N_k=(4, 24), B_r=(2, 12), B_c=(2, 12))  # smallest and largest


def explore(**settings: Any) -> Any:
    """The explorer, with settings as for `data`: sliders in a running notebook, one moment in print."""
    moment = data(**settings)
    try:
        import ipywidgets
    except ImportError:
        print(MISSING)
        return show(draw(**moment))
    return Explorer(ipywidgets, moment)


class Explorer:
    """Sliders and the picture that follows them; where no kernel runs, the picture alone."""

    def __init__(self, widgets: Any, moment: dict) -> None:
        self.moment, tiling = moment, moment["tiling"]
        self.picture, self.controls = widgets.HTML(), {}
        for name, (low, high) in SLIDERS.items():
            value = getattr(tiling, name)
            self.controls[name] = widgets.IntSlider(value, min(low, value), max(high, value), description=name)
        self.controls["causal"] = widgets.Checkbox(tiling.mask.causal, description="causal")
        self.step = widgets.IntSlider(0, 0, 1, description="step", layout=widgets.Layout(width="60%"))
        player = widgets.Play(min=0, max=1, value=0, interval=500)
        for end in ("max", "value"):
            widgets.link((player, end), (self.step, end))
        for control in self.controls.values():
            control.observe(self.restart, "value")
        self.step.observe(self.redraw, "value")
        lines = [
            widgets.HBox([self.controls[name] for name in row]) for row in (("N_q", "N_k"), ("B_r", "B_c", "causal"))
        ]
        self.box = widgets.VBox([widgets.HBox([player, self.step]), self.picture, *lines])
        self.restart()

    def restart(self, _: Any = None) -> None:
        """Other sizes are another run: the step goes to its halfway moment."""
        self.run = data(**{name: control.value for name, control in self.controls.items()})
        self.times = times(self.run["events"])
        share = self.moment["t"] / times(self.moment["events"])[-1]
        self.step.value, self.step.max = 0, len(self.times) - 1
        self.step.value = sum(time <= share * self.times[-1] for time in self.times) - 1
        self.redraw()

    def redraw(self, _: Any = None) -> None:
        self.picture.value = "".join(svg_parts(**self.run | dict(t=self.times[self.step.value])))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        shown, looks = show(draw(**self.moment))._repr_mimebundle_()
        return self.box._repr_mimebundle_() | shown, looks


PAGE = """<figure class="explorer">
<div>{first}</div>
<label>step <input type="range" min="0" max="{last}" value="{at}"></label>
<button type="button">play</button>
<script type="application/json">{frames}</script>
<script>
for (const figure of document.querySelectorAll("figure.explorer")) {{
  const [picture, slider, button] = ["div", "input", "button"].map(name => figure.querySelector(name));
  const [parts, frames] = JSON.parse(figure.querySelector("script").textContent);
  let clock = null;
  const show = () => {{ picture.innerHTML = frames[slider.value].map(n => parts[n]).join(""); }};
  const stop = () => {{ clearInterval(clock); clock = null; button.textContent = "play"; }};
  const next = () => {{ slider.value++; show(); if (slider.value == slider.max) stop(); }};
  slider.addEventListener("input", () => {{ stop(); show(); }});
  button.addEventListener("click", () => {{
    if (clock) return stop();
    if (slider.value == slider.max) slider.value = 0;
    button.textContent = "stop";
    clock = setInterval(next, 600);
  }});
}}
</script>
</figure>"""


def page(**settings: Any) -> str:
    """The explorer as HTML that needs no kernel: every moment is inside."""
    moment = data(**settings)
    moments = times(moment["events"])
    at = sum(time <= moment["t"] for time in moments) - 1
    parts: dict[str, int] = {}  # most of a picture is in its neighbours too: each part is kept once
    frames = [[parts.setdefault(part, len(parts)) for part in svg_parts(**moment | dict(t=t))] for t in moments]
    inside = json.dumps([list(parts), frames], ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    first = "".join(svg_parts(**moment | dict(t=moments[at])))
    return PAGE.format(first=first, last=len(frames) - 1, at=at, frames=inside)
