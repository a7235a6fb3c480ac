"""The first picture: standard attention stores all scores, FlashAttention-2 one tile, and the output is the same.

`moving(**data())` is an SVG that plays by itself, without a script.
Every tint is a number: seeded queries, keys and values, attention in float64, and o_i after each tile of Algorithm 1.
An element as it is written is its last frame, and only keyframes take it back to the start. So whoever shows no motion
(a printer, a reader who asked for none) sees the result.
"""

from typing import Any

import numpy as np

from fa2_lab.plots.style import HUES
from fa2_lab.reference import naive

# Data -----------------------------------------------------------------------------------------------------------

N, D, B, SEED = 16, 4, 4, 70  # tokens, head dimension, rows and columns of a tile
T_C = N // B


def data() -> dict:
    """Q, K, V, S and O, and `steps`, o_i after each tile of a row block: undivided, but for the last."""
    Q, K, V = np.random.default_rng(SEED).normal(size=(3, N, D))
    S = Q @ K.T / D**0.5
    steps = np.empty((T_C, T_C, B, D))  # (T_r, T_c, B_r, d)
    for i, j in np.ndindex(T_C, T_C):
        seen = (j + 1) * B
        s = S[i * B : (i + 1) * B, :seen]
        p = np.exp(s - s.max(axis=1, keepdims=True))
        steps[i, j] = p @ V[:seen] / (p.sum(axis=1, keepdims=True) if seen == N else 1)
    O, _ = naive.forward(Q, K, V)
    return dict(Q=Q, K=K, V=V, S=S, O=O, steps=steps)


# Cells ----------------------------------------------------------------------------------------------------------

LEVELS = 9


def levels(X: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
    """Each number's level, 1 to LEVELS, between the least and the greatest of `like`."""
    like = X if like is None else like
    share = (X - like.min()) / (like.max() - like.min())
    return np.clip(np.rint(1 + (LEVELS - 1) * share), 1, LEVELS).astype(int)


def n(x: float) -> str:
    """A number as short as it can be written."""
    return f"{x:.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"


def at(x: float, y: float) -> str:
    return f'transform="translate({n(x)} {n(y)})"'


def rectangle(x: float, y: float, w: float, h: float) -> str:
    return f"M{n(x)} {n(y)}h{n(w)}v{n(h)}h-{n(w)}z"


def cells(level: np.ndarray, w: float, h: float, gap: float, x0: float = 0, y0: float = 0) -> str:
    """A matrix of levels as one path for each level: cells of w × h, each `gap` smaller than its place."""
    paths = []
    for k in range(1, LEVELS + 1):
        places = [(x0 + c * w, y0 + r * h) for r, c in np.argwhere(level == k)]
        if places:
            d = "".join(rectangle(x, y, w - gap, h - gap) for x, y in places)
            paths.append(f'<path class="a{k}" d="{d}"/>')
    return "".join(paths)


def group(tensor: str, inside: str) -> str:
    return f'<g fill="{HUES[tensor]}">{inside}</g>'


def use(name: str, more: str = "") -> str:
    return f'<use href="#{name}"{more}/>'


def text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{n(x)}" y="{n(y)}" class="{kind}"{more}>{words}</text>'


def box(x: float, y: float, w: float, h: float, more: str = "", kind: str = "w", r: float = 3) -> str:
    place = f'x="{n(x)}" y="{n(y)}" width="{n(w)}" height="{n(h)}" rx="{r}"'
    return f'<rect {place} class="{kind}"{more}/>'


MIDDLE = ' text-anchor="middle"'

# Time -----------------------------------------------------------------------------------------------------------

T = 14.0  # seconds of the loop
START = "-2.45s"  # the first frame, which a preview or a slow page shows, has scores already
FILL = np.linspace(0.5, 3.9, N + 1)  # left: S is written, row by row
READ = np.linspace(4.9, 9.2, N + 1)  # left: S is read, and O written
TILE = np.linspace(0.5, 9.2, T_C * T_C + 1)  # right: a tile after the other
GLIDE, SOFT = 0.2, 0.1  # seconds from a tile to the next one; seconds of a fade
GHOST, VERDICT, LEAVE = (9.7, 11.0), 11.1, 13.5
HERE = "transform:none"


class Film:
    """Collects the keyframes of all elements that move."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def play(self, name: str, stops: list[tuple], ease: str = "linear") -> str:
        """Keyframes from (seconds, what holds then, easing from then on); returns the attribute that plays them."""
        frames = ""
        for t, what, *how in stops:
            share = f"{100 * t / T:.2f}".rstrip("0").rstrip(".")
            eased = f";animation-timing-function:{how[0]}" if how else ""
            frames += f"{share}%{{{what}{eased}}}"
        self.rules.append(f"@keyframes {name}{{{frames}}}")
        return f' style="animation:{name} {T:g}s {ease} {START} infinite"'

    def shown(self, name: str, a: float, b: float | None = None) -> str:
        """Opaque from a on, until b or the end of the loop. What stays is opaque as written, what goes is not."""
        begin = [(0, "opacity:0"), (a, "opacity:0"), (a + SOFT, "opacity:1")]
        if b is None:
            return self.play(name, [*begin, (T, "opacity:1")])
        return ' opacity="0"' + self.play(name, [*begin, (b - SOFT, "opacity:1"), (b, "opacity:0"), (T, "opacity:0")])

    def glide(self, name: str, places: list[tuple[float, float]]) -> str:
        """At places[k] during tile k; the way to the next one is the last part of the time between."""

        def move(place: tuple[float, float]) -> str:
            return f"transform:translate({n(place[0])}px,{n(place[1])}px)"

        stops = [(0, move(places[0]))]
        for k, place in enumerate(places):
            if k:
                stops.append((TILE[k], move(place)))
            if k + 1 < len(places):
                stops.append((TILE[k + 1] - GLIDE, move(place), "cubic-bezier(.5,0,.3,1)"))
        return self.play(name, [*stops, (T, move(places[-1]))])


# Places ---------------------------------------------------------------------------------------------------------

W, H = 840, 560
PANELS = 30, 442  # where the two sides begin
C, GAP = 15.5, 1.6  # a cell of S and the gap between two
GX, GY = 62, 162  # S in its panel
QX, QW = 27, 6.5  # Q and the width of its cells
KY, VY, KH = 100, 131, 6  # K, V and the height of their cells
OX, OW = GX + N * C + 16, 11.5
SIDE, STEP = N * C, B * C
NUMBER_Y = GY + SIDE + 75

FONTS = 'system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif'
LIGHT = "svg{--card:#fff;--edge:#d9dce0;--ink:#1f2328;--quiet:#59636e;--empty:#eff1f3}"
DARK = "svg{--card:#12161c;--edge:#343b44;--ink:#f0f3f6;--quiet:#a5adb8;--empty:#232932}"
LOOKS = f"""
text{{font-family:{FONTS};fill:var(--ink)}}
.h{{font-size:31px;font-weight:700;letter-spacing:-.4px}}.p{{font-size:25px}}.q{{font-size:23px;fill:var(--quiet)}}
.big{{font-size:72px;font-weight:700;letter-spacing:-2px}}.l{{font-size:23px;font-weight:600}}
.c{{font-size:24px}}.s{{font-weight:700}}.e{{fill:var(--empty)}}
.w{{fill:none;stroke:var(--ink);stroke-width:3.2;stroke-linejoin:round}}.t{{stroke-width:2.2}}
"""


def tints(base: float, power: float) -> str:
    shares = {k: base + (1 - base) * (k / LEVELS) ** power for k in range(1, LEVELS + 1)}
    return "".join(f".a{k}{{fill-opacity:{n(x)}}}" for k, x in shares.items())


STYLE = LIGHT + LOOKS + tints(0.14, 1.3) + f"@media(prefers-color-scheme:dark){{{DARK}{tints(0.24, 1.15)}}}"


def inputs(Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> str:
    """Q beside the rows of S, K and V above its columns; each letter in its tensor's place."""
    letters = (("Q", 12, GY + 17), ("K", GX - 17, KY + 19), ("V", GX - 17, VY + 19), ("O", OX + 2 * OW, GY - 11))
    return (
        group("Q", cells(levels(Q), QW, C, 1.2, QX, GY))
        + group("K", cells(levels(K.T), C, KH, 1.2, GX, KY))
        + group("V", cells(levels(V.T), C, KH, 1.2, GX, VY))
        + "".join(text(x, y, letter, "l", MIDDLE) for letter, x, y in letters)
        + box(GX, GY, SIDE, SIDE, ' fill="url(#e)"', kind="", r=0)
        + box(OX, GY, 4 * OW, SIDE, ' fill="url(#f)"', kind="", r=0)
    )


def definitions(Q: Any, K: Any, V: Any, S: Any, O: Any) -> str:
    """What both sides show: inputs, the tiles of S, O, and patterns of empty cells."""
    patterns = tiles = ""
    for name, x, w in (("e", GX, C), ("f", OX, OW)):
        size = f'x="{n(x)}" y="{GY}" width="{w}" height="{C}" patternUnits="userSpaceOnUse"'
        ground = f'<path d="{rectangle(0, 0, w, C)}" fill="var(--card)"/>'
        cell = f'<path class="e" d="{rectangle(0, 0, w - GAP, C - GAP)}"/>'
        patterns += f'<pattern id="{name}" {size}>{ground}{cell}</pattern>'
    for i in range(T_C):
        for j in range(T_C):
            part = levels(S)[i * B : (i + 1) * B, j * B : (j + 1) * B]
            tiles += f'<g id="t{i}{j}">{cells(part, C, C, GAP, GX + j * STEP, GY + i * STEP)}</g>'
    middles = [(k + 0.5) * C - GAP / 2 for k in range(B)]
    dots = "".join(f"M{n(x)} {n(y)}h0" for y in middles for x in middles)
    round_pen = f'fill="none" stroke="{HUES["S"]}" stroke-width="4" stroke-linecap="round" stroke-opacity=".55"'
    return (
        f'{patterns}<g id="i">{inputs(Q, K, V)}</g><g id="s" fill="{HUES["S"]}">{tiles}</g>'
        f'<g id="o" fill="{HUES["O"]}">{cells(levels(O), OW, C, GAP, OX, GY)}</g><path id="d" d="{dots}" {round_pen}/>'
        f'<clipPath id="c">{box(GX, GY, SIDE, SIDE, kind="", r=0)}</clipPath>'
        f'<clipPath id="b">{box(OX, GY, 4 * OW, SIDE, kind="", r=0)}</clipPath>'
    )


def heading(title: str, line: str) -> str:
    return text(0, 49, title, "h") + text(0, 81, line, "q")


def cover(x: float, y: float, w: float, h: float, pattern: str) -> str:
    """Empty cells on a solid ground: between the tiles of a pattern what lies below it would shine through."""
    return "".join(f'<path d="{rectangle(x, y, w, h)}" fill="{fill}"/>' for fill in ("var(--card)", f"url(#{pattern})"))


GROUND = f'<path d="{rectangle(OX - 2, GY - 2, 4 * OW + 2.4, SIDE + 2.4)}" fill="var(--card)"/>'  # O looks alike on it


# The two sides --------------------------------------------------------------------------------------------------


def standard(film: Film) -> str:
    """Left: S is written row by row and stays; then O, row by row."""
    covers = ""  # a row's cover leaves to the right, a cell at a time; its pattern of empty cells goes with it
    for r in range(N):
        gone = f"transform:translateX({n(SIDE)}px)"
        stops = [(0, HERE), (FILL[r], HERE, f"steps({N})"), (FILL[r + 1], gone), (T, gone)]
        empty = cover(GX - 1, GY + r * C - 0.8, SIDE + 1, C + 0.8, "e")
        covers += f'<g transform="translate({n(SIDE)})"{film.play(f"r{r}", stops)}>{empty}</g>'
    down = f"transform:translateY({n(SIDE)}px)"
    stops = [(0, HERE), (READ[0], HERE, f"steps({N})"), (READ[-1], down), (T, down)]
    empty = cover(OX - 1, GY - 0.8, 4 * OW + 2, SIDE + 2, "f")
    below = f'<g transform="translate(0 {n(SIDE + 2)})"{film.play("f", stops)}>{empty}</g>'
    return (
        heading("Standard attention", "stores all N × N scores")
        + use("i")
        + f'<g clip-path="url(#c)"><g class="z">{use("s")}</g>{covers}</g>'
        + f'<g clip-path="url(#b)">{GROUND}<g class="z">{use("o")}</g>{below}</g>'
        + current_row(film)
        + counter(film)
        + text(154, NUMBER_Y - 29, "scores stored", "p")
        + text(154, NUMBER_Y + 1, "N × N", "q")
    )


def current_row(film: Film) -> str:
    """The frame around the row that is written, and later read."""
    down, steps = f"transform:translateY({n((N - 1) * C)}px)", f"steps({N},jump-none)"
    stops = [(0, HERE), (FILL[0], HERE, steps), (FILL[-1], down), (FILL[-1] + 0.2, down), (FILL[-1] + 0.21, HERE)]
    stops += [(READ[0], HERE, steps), (READ[-1], down), (T, down)]
    written, read = (
        box(QX - 3, GY - 2.5, end - QX + 4, C + 3.4, film.play(name, stops), "w t")
        for name, end in (("g0", GX + SIDE), ("g1", OX + 4 * OW))
    )
    first, second = film.shown("v", FILL[0] - 0.15, FILL[-1] + 0.1), film.shown("u", READ[0] - 0.15, READ[-1] + 0.1)
    return f"<g{first}>{written}</g><g{second}>{read}</g>"


def counter(film: Film) -> str:
    """The number of stored scores: a column of numbers behind a window."""
    up = f"transform:translateY(-{90 * N}px)"
    play = film.play("n", [(0, HERE), (FILL[0], HERE, f"steps({N})"), (FILL[-1], up), (T, up)])
    reel = "".join(text(0, NUMBER_Y + 90 * k, f"{k * N}", "big") for k in range(N + 1))
    window = f'x="-6" y="{n(NUMBER_Y - 64)}" width="200" height="74" viewBox="-6 {n(NUMBER_Y - 64)} 200 74"'
    return f'<svg {window}><g transform="translate(0 -{90 * N})"{play}>{reel}</g></svg>'


def flash(film: Film, O: np.ndarray, steps: np.ndarray) -> str:
    """Right: one tile, gliding; of what was there only a dot remains. A block of O grows with each tile of its row."""
    spots = [(i, j) for i in range(T_C) for j in range(T_C)]
    tiles = dots = outputs = ""
    for k, (i, j) in enumerate(spots):
        tiles += use(f"t{i}{j}", film.shown(f"t{k}", TILE[k] - 0.06, TILE[k + 1] - 0.1))
        dot = use("d", film.shown(f"d{k}", TILE[k + 1] - 0.16))
        dots += f"<g {at(GX + j * STEP, GY + i * STEP)}>{dot}</g>"
        end = None if j == T_C - 1 else TILE[k + 1] + 0.22 + SOFT
        shown = film.shown(f"o{k}", TILE[k] + 0.22, end)
        outputs += f"<g{shown}>{cells(output_levels(O, steps, i, j), OW, C, GAP, OX, GY + i * STEP)}</g>"
    size = STEP + 3
    rows = film.glide("x", [(0, i * STEP) for i, j in spots])
    window = box(GX - 2.3, GY - 2.3, size, size, film.glide("w", [(j * STEP, i * STEP) for i, j in spots]))
    window += box(QX - 2.6, GY - 2.3, 4 * QW + 4, size, rows, "w t")
    window += box(OX - 2.6, GY - 2.3, 4 * OW + 3.6, size, rows, "w t")
    columns = film.glide("y", [(j * STEP, 0) for i, j in spots])
    window += box(GX - 2.3, KY - 2.6, size, VY - KY + 4 * KH + 4, columns, "w t")
    nothing = film.play("k", [(0, "opacity:1"), (TILE[0], "opacity:0"), (T, "opacity:0")], "step-end")
    one_tile = film.play("l", [(0, "opacity:0"), (TILE[0], "opacity:1"), (T, "opacity:1")], "step-end")
    return (
        heading("FlashAttention-2", "one tile at a time")
        + use("i")
        + f'<g class="z">{dots}{group("S", tiles)}{group("O", outputs)}</g>'
        + f"<g{film.shown('b', TILE[0] - 0.2, TILE[-1] + 0.1)}>{window}</g>"
        + text(0, NUMBER_Y, "0", "big", f' opacity="0"{nothing}')
        + text(0, NUMBER_Y, str(B * B), "big", one_tile)
        + text(104, NUMBER_Y - 29, "scores stored", "p")
        + text(104, NUMBER_Y + 1, "one tile", "q")
    )


def output_levels(O: np.ndarray, steps: np.ndarray, i: int, j: int) -> np.ndarray:
    """Tints of o_i after tile j: as O at the last one, among the undivided ones before."""
    return levels(O)[i * B : (i + 1) * B] if j == T_C - 1 else levels(steps[i, j], steps[:, :-1])


RING = box(OX - 4, GY - 4, 4 * OW + 6.4, SIDE + 6.4, "", "w", 4)
SENTENCES = (
    ("The square: scores,", "one for each query and key.", 0.2, FILL[-1] + 0.5),
    ("Left: scores are read back.", "Right: used once, and dropped.", READ[0] - 0.4, GHOST[0]),
    ("Same output.", "At N = 8,192: 67 million scores, or 128 × 128.", VERDICT, None),
)


def end(film: Film) -> str:
    """The left O is laid over the right one: they are the same. Below, a sentence for each part of the time."""
    a, b = (f"transform:translateX({n(x)}px)" for x in PANELS)
    way = film.play("j", [(0, a), (GHOST[0] + 0.35, a, "cubic-bezier(.5,0,.2,1)"), (GHOST[1], b), (T, b)])
    moved = f'<g transform="translate({PANELS[1]})"{way}>{GROUND}{use("o")}{RING}</g>'
    stays = f'<g transform="translate({PANELS[0]})"><g{film.shown("m", GHOST[0])}>{RING}</g></g>'
    words = ""
    for k, (first, rest, start, stop) in enumerate(SENTENCES):
        line = f'<tspan class="s">{first}</tspan> {rest}'
        words += text(W / 2, H - 27, line, "c", MIDDLE + film.shown(f"q{k}", start, stop))
    return f'<g class="z">{stays}<g{film.shown("h", GHOST[0])}>{moved}</g>{words}</g>'


# The picture ----------------------------------------------------------------------------------------------------

TITLE = "Standard attention stores N × N scores; FlashAttention-2 stores one tile, and the output is the same"
ALT = (
    f"Two squares of {N} × {N} scores, side by side. Left, standard attention: the square fills row by row and stays "
    f"full, {N * N} scores stored; then the rows of the output O are filled. Right, FlashAttention-2: a window of "
    f"{B} × {B} scores glides over the square, row block by row block; only its {B * B} scores are stored at any time, "
    "and the output's rows grow with each tile. At the end the left output is laid over the right one: they are equal. "
    "For N = 8,192, one head and tiles of 128 × 128 these are 67,108,864 and 16,384 scores."
)


def moving(**numbers: Any) -> str:
    """The picture that plays: 14 seconds, and the outcome from the fourth on."""
    film, (a, b), steps = Film(), PANELS, numbers.pop("steps")
    left, right, last = standard(film), flash(film, numbers["O"], steps), end(film)
    share = f"{100 * LEAVE / T:.2f}%"
    gone = f"{100 * (LEAVE + 0.4) / T:.2f}%"
    film.rules.append(f"@keyframes z{{0%,{share}{{opacity:1}}{gone},100%{{opacity:0}}}}")
    film.rules.append(f".z{{animation:z {T:g}s linear {START} infinite}}")
    film.rules += [
        f"@media {where}{{*{{animation:none!important}}}}" for where in ("print", "(prefers-reduced-motion:reduce)")
    ]
    style_sheet, size = "\n".join([STYLE, *film.rules]), f'viewBox="0 0 {W} {H}" width="{W}" height="{H}"'
    card = f'width="{W - 1.5}" height="{H - 1.5}" rx="14" fill="var(--card)" stroke="var(--edge)"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{TITLE}</title>\n<desc id="desc">{ALT}</desc>\n<style>{style_sheet}</style>\n'
        f'<defs>{definitions(**numbers)}</defs>\n<rect x=".75" y=".75" {card} stroke-width="1.5"/>\n'
        f'<g transform="translate({a})">{left}</g>\n<g transform="translate({b})">{right}</g>\n{last}\n</svg>\n'
    )
