"""Draw the climb as a moving picture: one bar moves through the speeds of all rungs, above a list of six jumps.

`climb_svg(**climb_data())` draws it from numbers that all come from the ladder's record.
"""

from html import escape
from typing import NamedTuple

import numpy as np

from fa2_lab.plots import climb
from fa2_lab.plots.climb import JUMPS, RungSpeeds

VISIBLE_LOSS = 0.02  # a change that costs more than this share of the peer's speed is marked with an arrow


class Jump(NamedTuple):
    """A large gain in speed from one rung to another, due to one or more changes."""

    before: RungSpeeds
    after: RungSpeeds
    words: str

    @property
    def factor(self) -> float:
        return self.after.full / self.before.full


def climb_data() -> dict:
    """Return the speeds of all rungs and of the peer, the six jumps, and the name of the GPU."""
    drawn = climb.data()
    rungs, peer = drawn["rungs"], drawn["peer"]
    numbers = [rung.number for rung in rungs]
    jumps = []
    for number, (changes, words) in JUMPS.items():
        k = numbers.index(number)
        jumps.append(Jump(rungs[k - changes], rungs[k], words + f" ({changes} changes)" * (changes > 1)))
    return dict(rungs=rungs, peer=peer, jumps=jumps, gpu=drawn["setting"].split(",")[0])


# SVG that plays by itself, without a script ---------------------------------------------------------------------

FONTS = 'system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif'
LIGHT = "svg{--card:#fff;--edge:#d9dce0;--ink:#1f2328;--quiet:#59636e;--empty:#eff1f3;--ours:#6a3d9a}"
DARK = "svg{--card:#12161c;--edge:#343b44;--ink:#f0f3f6;--quiet:#a5adb8;--empty:#232932;--ours:#b48ce0}"
MIDDLE, END_OF = ' text-anchor="middle"', ' text-anchor="end"'
FADE_SECONDS = 0.1  # duration of a fade in seconds


def format_number(x: float) -> str:
    """Format a number as briefly as possible, with at most two decimals."""
    return f"{x:.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"


def svg_text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{format_number(x)}" y="{format_number(y)}" class="{kind}"{more}>{words}</text>'


class Animation:
    """Collect the keyframes of all moving elements, for a loop of `seconds`.

    An element's attributes describe its last frame, and only keyframes return it to the start. If nothing moves, as in
    print, readers therefore see the result.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rules = seconds, list[str]()

    def play(self, name: str, stops: list[tuple]) -> str:
        """Return the attribute that plays keyframes. A stop is (seconds, style at this time, easing that follows)."""
        frames = ""
        for t, what, *how in stops:
            share = f"{100 * t / self.seconds:.2f}".rstrip("0").rstrip(".")
            eased = f";animation-timing-function:{how[0]}" if how else ""
            frames += f"{share}%{{{what}{eased}}}"
        self.rules.append(f"@keyframes {name}{{{frames}}}")
        return f' style="animation:{name} {self.seconds:g}s linear infinite"'

    def shown(self, name: str, a: float, b: float | None = None) -> str:
        """Return attributes that fade an element in at time a and out at time b. If b is None, it stays to the end."""
        begin = [(0, "opacity:0"), (a, "opacity:0"), (a + FADE_SECONDS, "opacity:1")] if a else [(0, "opacity:1")]
        if b is None:
            return self.play(name, [*begin, (self.seconds, "opacity:1")])
        end = [(b - FADE_SECONDS, "opacity:1"), (b, "opacity:0"), (self.seconds, "opacity:0")]
        return ' opacity="0"' + self.play(name, [*begin, *end])

    def cut(self, name: str, a: float, b: float | None) -> str:
        """Return attributes that show an element from a to b without fades. If b is None, it stays to the end."""
        stops = [(0, "opacity:0", "step-end")] * (a > 0) + [(a, "opacity:1", "step-end")]
        if b is None:
            return self.play(name, [*stops, (self.seconds, "opacity:1")])
        return ' opacity="0"' + self.play(name, [*stops, (b, "opacity:0"), (self.seconds, "opacity:0")])

    def lit(self, name: str, a: float) -> str:
        """Return the attribute that makes an element grey until time a, and then shows it in colour."""
        grey, full = "opacity:.75;filter:grayscale(1)", "opacity:1;filter:grayscale(0)"
        return self.play(name, [(0, grey), (a, grey), (a + FADE_SECONDS, full), (self.seconds, full)])

    def svg(self, w: int, h: int, title: str, words: str, looks: str, drawing: str) -> str:
        """Return the whole picture on a card, which adapts to dark pages, print and a preference for reduced motion."""
        still = [
            f"@media {when}{{*{{animation:none!important}}}}" for when in ("print", "(prefers-reduced-motion:reduce)")
        ]
        style_sheet = "\n".join([LIGHT, f"text{{font-family:{FONTS};fill:var(--ink)}}", looks, *self.rules, *still])
        card = (
            f'width="{w - 1.5}" height="{h - 1.5}" rx="14" fill="var(--card)" stroke="var(--edge)" stroke-width="1.5"'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
            f'aria-labelledby="title desc">\n<title id="title">{title}</title>\n<desc id="desc">{words}</desc>\n'
            f'<style>{style_sheet}</style>\n<rect x=".75" y=".75" {card}/>\n{drawing}\n</svg>\n'
        )


# Time and places ------------------------------------------------------------------------------------------------

# Duration in seconds of the first rung, a change, a jump and the last rung.
START, SMALL, JUMP, END = 1.2, 0.24, 1.1, 2.8
MOVING_SHARE = 0.2  # part of these durations in which the bar moves
W, H = 1200, 630
X, WIDTH = 40, 1120  # the left edge and the width of the bar's background
BAR_Y, BAR_H = 182, 52
FULL_LENGTH = 960  # the bar's length at the peer's speed
ROW_Y, ROW_H = 315, 43

CSS = """
.h{font-size:41px;font-weight:700;letter-spacing:-1px}.q{font-size:24px;fill:var(--quiet)}
.big{font-size:44px;font-weight:700;letter-spacing:-1px}.s{font-size:26px}.p{font-size:24px;font-weight:600}
.f{font-size:29px;font-weight:700}.o{fill:var(--ours)}.e{fill:var(--empty)}.b{fill:var(--quiet)}
.d{font-size:23px;font-weight:700;fill:var(--card)}.r{fill:var(--ours);opacity:.55}.t{stroke:var(--card);stroke-width:2}
.w{stroke:var(--ink);stroke-width:3}.a{stroke:var(--quiet);stroke-width:3;fill:none}
"""


def start_times(rungs: list[RungSpeeds]) -> list[float]:
    """Return the times in seconds at which the rungs begin and at which the loop ends."""
    at = [0.0, START]
    for rung in rungs[1:-1]:
        at.append(at[-1] + (JUMP if rung.number in JUMPS else SMALL))
    return [*at, at[-1] + END]


def loop_seconds() -> float:
    """Return the length of the loop."""
    return start_times(climb_data()["rungs"])[-1]


# The picture ----------------------------------------------------------------------------------------------------


def climb_svg(rungs: list[RungSpeeds], peer: tuple[str, float, float], jumps: list[Jump], gpu: str) -> str:
    """Return the moving picture as SVG. Without motion, it shows the last rung and all jumps."""
    at = start_times(rungs)
    film, name = Animation(at[-1]), peer[0]
    shares = [rung.full / peer[1] for rung in rungs]
    come = dict(zip((rung.number for rung in rungs), at, strict=False))
    title = f"From {shares[0]:.0%} to {shares[-1]:.0%} of {name}'s speed"
    setting = f"One forward kernel, {len(rungs) - 1} changes. {gpu}, bf16, N = 4,096, d = 128, no mask"
    drawing = (
        svg_text(X, 52, title, "h")
        + svg_text(X, 86, setting, "q")
        + svg_text(X + FULL_LENGTH - 10, 120, name, "p", END_OF)
        + f'<path class="e" d="M{X} {BAR_Y}h{WIDTH}v{BAR_H}h-{WIDTH}z"/>'
        + bar_svg(film, rungs, shares, at)
        + f'<path class="w" d="M{X + FULL_LENGTH} {BAR_Y - 79}v{BAR_H + 89}"/>'
        + percentage_svg(film, shares, at)
        + loss_arrows_svg(film, shares, at)
        + "".join(change_line_svg(film, rungs, k, at) for k in range(len(rungs)))
        + "".join(jump_row_svg(film, k, jump, come[jump.after.number], peer[1]) for k, jump in enumerate(jumps))
        + svg_text(X, H - 24, "fa2_lab", "p")
        + svg_text(X + 184, H - 24, "Pale parts of the bar: all other gains", "q")
        + svg_text(X + WIDTH, H - 24, "FlashAttention-2, line by line", "q", END_OF)
    )
    words = "; ".join(f"{jump.words}: times {jump.factor:.2f}" for jump in jumps)
    alt = f"One bar, the speed of a forward kernel, goes through {len(rungs) - 1} changes; six jumps: {words}. "
    alt += f"Arrows mark the changes that lose speed. At the end the bar has passed a line, the speed of {name}."
    looks = f"{CSS}@media(prefers-color-scheme:dark){{{DARK}}}"
    return film.svg(W, H, f"{title}, in {len(rungs) - 1} changes", escape(alt, quote=False), looks, drawing)


def bar_keyframes(places: list[str], at: list[float]) -> list[tuple]:
    """Return keyframes for an element that moves with the bar. `places` holds the element's style at each rung."""
    stops: list[tuple] = [(0, places[0])]
    for before, place, t in zip(places, places[1:], at[1:-1], strict=False):
        stops += [(t, before, "cubic-bezier(.4,0,.2,1)"), (t + MOVING_SHARE, place)]
    return [*stops, (at[-1], places[-1])]


def bar_svg(film: Animation, rungs: list[RungSpeeds], shares: list[float], at: list[float]) -> str:
    """Return the bar, in which each part is styled by the change that reached it first.

    The first rung's part is grey and labelled with its percentage. Jumps are labelled with their numbers, and the parts
    of all other changes are pale. A cover in the background colour moves with the bar's end.
    """
    parts, best = "", 0.0
    jumps = list(JUMPS)
    for rung, share in zip(rungs, shares, strict=True):
        if share <= best:
            continue
        left, wide, jump = FULL_LENGTH * best, FULL_LENGTH * (share - best), rung.number in JUMPS
        kind = "o" if jump else "r" if best else "b"
        x, w = format_number(left), format_number(wide)
        parts += f'<path class="{kind} t" d="M{x} 0h{w}v{BAR_H}h-{w}z"/>'
        words = f"{jumps.index(rung.number) + 1}" if jump else "" if best else f"{share:.0%}"
        parts += svg_text(left + wide / 2, BAR_H / 2 + 8, words, "d", MIDDLE) if words else ""
        best = share
    play = film.play(
        "b",
        bar_keyframes([f"transform:translateX({FULL_LENGTH * (share - shares[-1]):.1f}px)" for share in shares], at),
    )
    cover = f'<path class="e" d="M{format_number(FULL_LENGTH * shares[-1])} 0h{WIDTH}v{BAR_H}h-{WIDTH}z"{play}/>'
    return f'<svg x="{X}" y="{BAR_Y}" width="{WIDTH}" height="{BAR_H}">{parts}{cover}</svg>'


def loss_arrows_svg(film: Animation, shares: list[float], at: list[float]) -> str:
    """Return an arrow below the bar for each change that loses speed, and the last frame's line about these changes."""
    lost = [k for k in range(1, len(shares)) if shares[k - 1] - shares[k] > VISIBLE_LOSS]
    arrows = ""
    for nth, k in enumerate(lost):
        y, tip, start = BAR_Y + BAR_H + 14 + 12 * (nth % 2), *(X + FULL_LENGTH * shares[j] for j in (k, k - 1))
        d = f"M{format_number(start)} {y - 5}v10m0-5H{format_number(tip)}m9-6l-9 6l9 6"
        arrows += f'<path class="a" d="{d}"{film.shown(f"a{k}", at[k])}/>'
    words = f"Arrows: changes {', '.join(map(str, lost[:-1]))} and {lost[-1]} lose speed, and later ones win it back."
    return arrows + svg_text(X, 289, words, "q", film.cut("e", at[-2] + 0.9, b=None))


def percentage_svg(film: Animation, shares: list[float], at: list[float]) -> str:
    """Return each rung's speed as a percentage of the peer's speed. The label moves with the end of the bar, above it.

    Once the bar passes the peer's speed, the label is to the right of the line.
    """
    ends = [
        X + (FULL_LENGTH + 140 if share > 1 else np.clip(FULL_LENGTH * share, 80, FULL_LENGTH - 10)) for share in shares
    ]
    play = film.play("m", bar_keyframes([f"transform:translateX({end - ends[-1]:.1f}px)" for end in ends], at))
    shown = "".join(
        svg_text(ends[-1], BAR_Y - 12, f"{share:.0%}", "big", END_OF + film.cut(f"n{k}", *shown_between(k, at)))
        for k, share in enumerate(shares)
    )
    return f"<g{play}>{shown}</g>"


def shown_between(k: int, at: list[float]) -> tuple[float, float | None]:
    """Return the times between which rung k's text is shown. The text changes halfway through the bar's movement."""
    return at[k] + MOVING_SHARE / 2 if k else 0, None if k == len(at) - 2 else at[k + 1] + MOVING_SHARE / 2


def change_line_svg(film: Animation, rungs: list[RungSpeeds], k: int, at: list[float]) -> str:
    """Return the line below the bar that describes rung k's change, which is visible while this rung is shown."""
    before = f"change {k - 1}" if k > 1 else "standard attention"
    factor = f"× {rungs[k].full / rungs[k - 1].full:.2f} over {before}"
    words = f"Change {k}, {rungs[k].name}: {factor}" if k else "Standard attention"
    begin, until = shown_between(k, at)
    return svg_text(X, 289, words, "q", film.cut(f"c{k}", begin, until or at[k] + 0.9))


def jump_row_svg(film: Animation, k: int, jump: Jump, t: float, peer: float) -> str:
    """Return a jump's row with its factor, its description and both speeds. The row is grey until time t."""
    y, t = ROW_Y + k * ROW_H, t + MOVING_SHARE / 2
    ground = f'<rect x="{X - 12}" y="{y}" width="{WIDTH + 24}" height="{ROW_H}" rx="8" class="e"'
    return f"{ground}{film.shown(f'l{k}', t, t + JUMP + 0.15)}/><g{film.lit(f'r{k}', t)}>" + (
        f'<circle cx="{X + 17}" cy="{y + 21}" r="17" class="o"/>{svg_text(X + 17, y + 29, str(k + 1), "d", MIDDLE)}'
        + svg_text(X + 52, y + 31, f"× {jump.factor:.2f}", "f")
        + svg_text(X + 184, y + 30, jump.words, "s")
        + svg_text(X + WIDTH, y + 30, f"{jump.before.full / peer:.0%} → {jump.after.full / peer:.0%}", "q", END_OF)
        + "</g>"
    )
