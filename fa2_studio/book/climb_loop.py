"""Draw the climb as a moving picture: one bar goes through the speeds of all rungs, above a list of six jumps.

`moving(**data())` takes every number from the record of the ladder, and every line of code from the rungs themselves.
"""

import re
from difflib import SequenceMatcher
from html import escape
from typing import NamedTuple

import numpy as np

from fa2_lab.kernels import ladder
from fa2_lab.plots import climb
from fa2_lab.plots.climb import RungSpeeds
from fa2_lab.tools import rung_diff

JUMPS = {  # number of the jump's last rung: number of changes, a description, the beginning of the line that shows it
    "03": (3, "Scores stay on the chip, one program per row block", "grid = "),
    "05": (1, "O is divided once, so a third program fits on an SM", "o_i = alpha"),
    "10": (1, "The copies of two tiles run ahead", "num_warps"),
    "11": (1, "The two loops are swapped, so matmuls need not wait", "for j in "),
    "18": (1, "A tile has 128 keys instead of 64", "SIZES"),
    "20": (1, "Q Kᵀ of the next tile runs beside P V of this one", "s_ij = hopper.warpgroup_mma_wait(1"),
}


class Jump(NamedTuple):
    """A large gain in speed: one or more changes from one rung to another, and the line of code that shows them."""

    before: RungSpeeds
    after: RungSpeeds
    words: str
    line: str  # of code, as markup
    lost: str  # a note on changes before the last one that make the kernel slower, or ""

    @property
    def factor(self) -> float:
        return self.after.full / self.before.full

    @property
    def changes(self) -> str:
        """Return the numbers of the jump's changes in words, such as "changes 1–3"."""
        last, many = int(self.after.number), JUMPS[self.after.number][0]
        return f"change {last}" if many == 1 else f"changes {last - many + 1}–{last}"


def data() -> dict:
    """Return the speeds of all rungs and of the peer, the six jumps, and the name of the GPU."""
    drawn = climb.data()
    rungs, peer = drawn["rungs"], drawn["peer"]
    numbers = [rung.number for rung in rungs]
    jumps = []
    for number, (changes, words, begin) in JUMPS.items():
        k = numbers.index(number)
        before, line = rungs[k - changes], changed_line(numbers[k - 1], number, begin)
        slow = [int(rung.number) for rung in rungs[k - changes + 1 : k] if rung.full < before.full]
        lost = f"changes {slow[0]}–{slow[-1]} lose first" if slow else ""
        jumps.append(Jump(before, rungs[k], words, line, lost))
    made = drawn["setting"].split(",")[0]
    return dict(rungs=rungs, peer=peer, jumps=jumps, gpu=made)


def changed_line(before: str, after: str, begin: str) -> str:
    """Return the new line that begins with `begin`, as markup in which everything new is marked.

    If the line does not replace a similar old line, nothing in it is marked.
    """
    for what, gone, come in rung_diff.steps(ladder.find(before), ladder.find(after)):
        found = next((line for line in come if what != "equal" and line.strip().startswith(begin)), None)
        if found is not None:
            new = words_of(found)
            pairs = [SequenceMatcher(a=words_of(line), b=new, autojunk=False) for line in gone]
            near = max(pairs, key=SequenceMatcher.ratio, default=None)
            if near is None or near.ratio() < 0.75:
                return escape("".join(new), quote=False)  # no old line is similar
            return "".join(
                mark(what, escape("".join(new[a:b]), quote=False)) for what, _, _, a, b in near.get_opcodes()
            )
    raise ValueError(f"rung {after}: no changed line begins with {begin!r}")


def words_of(line: str) -> list[str]:
    """Return the words and signs of a line without its comment."""
    return re.findall(r"\w+|\W", line.split("  # ")[0].strip())


def mark(what: str, code: str) -> str:
    return code if what == "equal" or not code else f'<tspan class="n">{code}</tspan>'


# SVG that plays by itself, without a script ---------------------------------------------------------------------

FONTS = 'system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif'
LIGHT = "svg{--card:#fff;--edge:#d9dce0;--ink:#1f2328;--quiet:#59636e;--empty:#eff1f3;--ours:#6a3d9a}"
DARK = "svg{--card:#12161c;--edge:#343b44;--ink:#f0f3f6;--quiet:#a5adb8;--empty:#232932;--ours:#b48ce0}"
MIDDLE = ' text-anchor="middle"'
SOFT = 0.1  # the seconds that a fade takes


def n(x: float) -> str:
    """Return a number with at most two decimals, as short as possible."""
    return f"{x:.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"


def text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{n(x)}" y="{n(y)}" class="{kind}"{more}>{words}</text>'


class Film:
    """Collect the keyframes of all elements that move, in a loop of `seconds`.

    The attributes of an element show its last frame, and only keyframes take it back to the start. Therefore, where
    nothing moves, as in print, readers see the result.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rules = seconds, list[str]()

    def play(self, name: str, stops: list[tuple]) -> str:
        """Return the attribute that plays keyframes. Each stop is (seconds, style at that time, easing after it)."""
        frames = ""
        for t, what, *how in stops:
            share = f"{100 * t / self.seconds:.2f}".rstrip("0").rstrip(".")
            eased = f";animation-timing-function:{how[0]}" if how else ""
            frames += f"{share}%{{{what}{eased}}}"
        self.rules.append(f"@keyframes {name}{{{frames}}}")
        return f' style="animation:{name} {self.seconds:g}s linear infinite"'

    def shown(self, name: str, a: float, b: float | None = None) -> str:
        """Return attributes that show an element from a until b, with fades. With b = None, it stays to the end."""
        begin = [(0, "opacity:0"), (a, "opacity:0"), (a + SOFT, "opacity:1")] if a else [(0, "opacity:1")]
        if b is None:
            return self.play(name, [*begin, (self.seconds, "opacity:1")])
        end = [(b - SOFT, "opacity:1"), (b, "opacity:0"), (self.seconds, "opacity:0")]
        return ' opacity="0"' + self.play(name, [*begin, *end])

    def cut(self, name: str, a: float, b: float | None) -> str:
        """Return attributes that show an element from a until b without fades. With b = None, it stays to the end."""
        stops = [(0, "opacity:0", "step-end")] * (a > 0) + [(a, "opacity:1", "step-end")]
        if b is None:
            return self.play(name, [*stops, (self.seconds, "opacity:1")])
        return ' opacity="0"' + self.play(name, [*stops, (b, "opacity:0"), (self.seconds, "opacity:0")])

    def lit(self, name: str, a: float) -> str:
        """Return the attribute that makes an element grey until a, and shows it in its own colours after that."""
        grey, full = "opacity:.45;filter:grayscale(1)", "opacity:1;filter:grayscale(0)"
        return self.play(name, [(0, grey), (a, grey), (a + SOFT, full), (self.seconds, full)])

    def svg(self, w: int, h: int, title: str, words: str, looks: str, drawing: str) -> str:
        """Return the whole picture on a card, which adapts to dark pages, print and readers who want no motion."""
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

START, SMALL, JUMP, END = 1.2, 0.24, 1.1, 2.8  # seconds of the first rung, a change, a jump, the last rung
MOVE = 0.2  # the seconds of these in which the bar moves
W, H = 1200, 675
X, WIDTH = 40, 1120  # the left edge and the width of the bar's background
BAR_Y, BAR_H = 170, 52
FULL = 960  # the bar's length at the peer's speed
ROW_Y, ROW_H = 311, 59

LOOKS = """
.h{font-size:36px;font-weight:700;letter-spacing:-.5px}.q{font-size:21px;fill:var(--quiet)}
.big{font-size:46px;font-weight:700;letter-spacing:-1px}.s{font-size:22px;font-weight:600}.p{font-size:21px}
.f{font-size:29px;font-weight:700;letter-spacing:-.5px}.o{fill:var(--ours)}.e{fill:var(--empty)}
.c{font-size:19.5px;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.n{fill:var(--ours);font-weight:700}.d{font-size:20px;font-weight:700;fill:var(--card)}
.w{stroke:var(--ink);stroke-width:3}
"""


def times(rungs: list[RungSpeeds]) -> list[float]:
    """Return the times at which each rung begins, and the end of the loop, in seconds."""
    at = [0.0, START]
    for rung in rungs[1:-1]:
        at.append(at[-1] + (JUMP if rung.number in JUMPS else SMALL))
    return [*at, at[-1] + END]


def seconds() -> float:
    """Return the length of the loop."""
    return times(data()["rungs"])[-1]


# The picture ----------------------------------------------------------------------------------------------------


def moving(rungs: list[RungSpeeds], peer: tuple[str, float, float], jumps: list[Jump], gpu: str) -> str:
    """Return the moving picture as SVG. Where nothing moves, it shows the last rung and all jumps."""
    at = times(rungs)
    film, name = Film(at[-1]), peer[0]
    shares = [rung.full / peer[1] for rung in rungs]
    come = dict(zip((rung.number for rung in rungs), at, strict=False))
    title = f"From {shares[0]:.0%} to {shares[-1]:.0%} of {name}'s speed"
    setting = f"One forward kernel, {len(rungs) - 1} changes. {gpu}, bf16, N = 4,096, d = 128, no mask"
    rows = "".join(row(film, k, jump, come[jump.after.number], peer[1]) for k, jump in enumerate(jumps))
    drawing = (
        text(X, 58, title, "h")
        + text(X, 91, setting, "q")
        + text(X + WIDTH, 112, name, "p", ' text-anchor="end"')
        + f'<path class="e" d="M{X} {BAR_Y}h{WIDTH}v{BAR_H}h-{WIDTH}z"/>'
        + f'<path class="w" d="M{X + FULL} 122v{BAR_Y + BAR_H + 12 - 122}"/>'
        + bar(film, shares, at)
        + numbers(film, shares, at)
        + "".join(change(film, rungs, k, at) for k in range(len(rungs)))
        + text(X, 289, rest(rungs, jumps), "p", film.cut("e", at[-2] + 0.9, None))
        + rows
    )
    words = "; ".join(f"{jump.words} ({jump.changes}): times {jump.factor:.2f}" for jump in jumps)
    alt = f"One bar, the speed of a forward kernel, goes through {len(rungs) - 1} changes; six jumps: {words}. "
    alt += f"At the end the bar has passed a line, the speed of {name}."
    looks = f"{LOOKS}@media(prefers-color-scheme:dark){{{DARK}}}"
    return film.svg(W, H, f"{title}, in {len(rungs) - 1} changes", escape(alt, quote=False), looks, drawing)


CARD_H = 630  # the height of the card, which is as wide as the moving picture
CARD_LOOKS = """
.t{font-size:42px;font-weight:700;letter-spacing:-1px}.f{font-size:30px;font-weight:700}.s{font-size:27px}
.q{font-size:25px;fill:var(--quiet)}.p{font-size:27px;font-weight:600}.big{font-size:54px;font-weight:700}
.d{font-size:24px;font-weight:700;fill:var(--card)}.o{fill:var(--ours)}.e{fill:var(--empty)}.w{stroke:var(--ink);stroke-width:3}
"""


def card(rungs: list[RungSpeeds], peer: tuple[str, float, float], jumps: list[Jump], gpu: str, site: str = "") -> str:
    """Return the picture that a link to the site shows: the bar and six jumps, in letters readable at a small size."""
    first, last, end = rungs[0].full / peer[1], rungs[-1].full / peer[1], ' text-anchor="end"'
    title = f"From {first:.0%} to {last:.0%} of {peer[0]}'s speed"
    y, tall = 178, 50
    long = FULL * last
    marks = rows = ""
    for k, jump in enumerate(jumps):
        place, line = X + FULL * jump.after.full / peer[1], 336 + 43 * k
        for x, cy in ((place, y + tall / 2), (X + 18, line - 10)):
            disc = f'<circle cx="{n(x)}" cy="{n(cy)}" r="18" class="o" stroke="var(--card)" stroke-width="2"/>'
            marks += disc + text(x, cy + 8.5, str(k + 1), "d", MIDDLE)
        rows += text(X + 52, line, f"× {jump.factor:.2f}", "f") + text(X + 184, line, jump.words, "s")
        rows += text(X + WIDTH, line, f"{jump.before.full / peer[1]:.0%} → {jump.after.full / peer[1]:.0%}", "q", end)
    drawing = (
        text(X, 68, title, "t")
        + text(X, 108, f"One forward kernel of FlashAttention-2, in {len(rungs) - 1} changes", "s")
        + text(X + WIDTH, 160, peer[0], "p", end)
        + f'<path class="e" d="M{X} {y}h{WIDTH}v{tall}h-{WIDTH}z"/>'
        + f'<path class="o" d="M{X} {y}h{n(long)}v{tall}h-{n(long)}z"/>'
        + f'<path class="w" d="M{X + FULL} {y - 10}v{tall + 20}"/>'
        + text(X, 270, f"{gpu}, bf16, N = 4,096, d = 128, no mask. Largest steps (1 is {jumps[0].changes}):", "q")
        + f"{marks}{rows}"
        + text(X, 606, "fa2_lab", "p")
        + text(X + WIDTH, 606, site.removeprefix("https://").rstrip("/") or "FlashAttention-2, line by line", "q", end)
    )
    return Film(1).svg(W, CARD_H, title, title, CARD_LOOKS, drawing)


def moves(places: list[str], at: list[float]) -> list[tuple]:
    """Return keyframes for an element that moves with the bar. `places` has its style at each rung."""
    stops: list[tuple] = [(0, places[0])]
    for before, place, t in zip(places, places[1:], at[1:-1], strict=False):
        stops += [(t, before, "cubic-bezier(.4,0,.2,1)"), (t + MOVE, place)]
    return [*stops, (at[-1], places[-1])]


def bar(film: Film, shares: list[float], at: list[float]) -> str:
    """Return the bar, drawn at the length of the last rung's speed. It grows or shrinks from rung to rung."""
    play = film.play("b", moves([f"transform:scaleX({share / shares[-1]:.4f})" for share in shares], at))
    d = f"M0 {BAR_Y}h{n(FULL * shares[-1])}v{BAR_H}H0z"
    return f'<g transform="translate({X} 0)"><path class="o" d="{d}"{play}/></g>'


def numbers(film: Film, shares: list[float], at: list[float]) -> str:
    """Return each rung's speed as a percentage of the peer's. It is above the end of the bar and moves with it.

    From the peer's speed on, it is on the right of the line.
    """
    ends = [X + (FULL + 150 if share > 1 else np.clip(FULL * share, 80, FULL - 10)) for share in shares]
    play = film.play("m", moves([f"transform:translateX({end - ends[-1]:.1f}px)" for end in ends], at))
    look = ' text-anchor="end"'
    shown = "".join(
        text(ends[-1], BAR_Y - 12, f"{share:.0%}", "big", look + film.cut(f"n{k}", *turn(k, at)))
        for k, share in enumerate(shares)
    )
    return f"<g{play}>{shown}</g>"


def turn(k: int, at: list[float]) -> tuple[float, float | None]:
    """Return the times between which the words of rung k are shown. They change in the middle of the bar's move."""
    return at[k] + MOVE / 2 if k else 0, None if k == len(at) - 2 else at[k + 1] + MOVE / 2


def change(film: Film, rungs: list[RungSpeeds], k: int, at: list[float]) -> str:
    """Return the line below the bar that describes the change of rung k while this rung is shown."""
    before = f"change {k - 1}" if k > 1 else "standard attention"
    factor = f"× {rungs[k].full / rungs[k - 1].full:.2f} over {before}"
    words = f"Change {k}, {rungs[k].name}: {factor}" if k else "Standard attention"
    begin, until = turn(k, at)
    return text(X, 289, words, "p", film.cut(f"c{k}", begin, until or at[k] + 0.9))


def row(film: Film, k: int, jump: Jump, t: float, peer: float) -> str:
    """Return the row of a jump, which is grey until time t, and its mark on the bar.

    The row has the jump's factor, description and line of code, the numbers of its changes, and both speeds.
    """
    y, place, t = ROW_Y + k * ROW_H, X + FULL * jump.after.full / peer, t + MOVE / 2
    from_to = f"{jump.changes}: {jump.before.full / peer:.0%} → {jump.after.full / peer:.0%}"
    ground = f'<rect x="{X - 12}" y="{y - 3}" width="{WIDTH + 24}" height="{ROW_H - 2}" rx="8" class="e"'
    here, under = (
        f'<circle cx="{n(x)}" cy="{n(cy)}" r="15" class="o"/>{text(x, cy + 7.2, str(k + 1), "d", MIDDLE)}'
        for x, cy in ((X + 16, y + 26), (place, BAR_Y + BAR_H + 22))
    )
    end = ' text-anchor="end"'
    lost = text(X + WIDTH, y + 47, jump.lost, "q", end) if jump.lost else ""
    return f"{ground}{film.shown(f'l{k}', t, t + JUMP + 0.15)}/><g{film.shown(f'j{k}', t)}>{under}</g>" + (
        f"<g{film.lit(f'r{k}', t)}>{here}"
        + text(X + 46, y + 36, f"× {jump.factor:.2f}", "f")
        + text(X + 176, y + 22, jump.words, "s")
        + text(X + 176, y + 47, jump.line, "c", ' xml:space="preserve"')
        + text(X + WIDTH, y + 22, from_to, "q", end)
        + f"{lost}</g>"
    )


def rest(rungs: list[RungSpeeds], jumps: list[Jump]) -> str:
    """Return the line with the factor of all other changes together, without and with the causal mask."""
    here, causal = rungs[-1].full / rungs[0].full, rungs[-1].causal / rungs[0].causal
    for jump in jumps:
        here, causal = here / jump.factor, causal / (jump.after.causal / jump.before.causal)
    others = len(rungs) - 1 - sum(changes for changes, *_ in JUMPS.values())
    return f"The other {others} changes together: × {here:.2f} without a mask, × {causal:.2f} with the causal mask"
