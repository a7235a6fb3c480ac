"""The first picture: standard attention stores all scores; FlashAttention-2 stores one tile, and shrinks its sums.

`moving(**data())` is an SVG that plays by itself. Every tint is a number: seeded queries, keys and values, attention in
float64, and o_i after each tile of Algorithm 1 with the factor that came before. V is positive, so a fainter row of O
is a smaller one.
"""

from typing import Any

import numpy as np

from fa2_lab.plots.style import HUES
from fa2_lab.reference import naive
from fa2_studio.book.film import DARK, HERE, MIDDLE, SOFT, Film, at, box, n, text

# Data -----------------------------------------------------------------------------------------------------------

N, D, B, SEED = 12, 4, 4, 2143  # tokens, head dimension, rows and columns of a tile
T_C = N // B
SPOTS = [(i, j) for i in range(T_C) for j in range(T_C)]
SLOW = 1  # the tile that is shown slowly: in it one row of the block meets a larger score, and the others do not


def data() -> dict:
    """Q, K, V, S and O; `steps`, the undivided o_i after each tile; `alpha`, a row's factor before a tile is added."""
    rng = np.random.default_rng(SEED)
    Q, K = rng.normal(size=(2, N, D))
    V = rng.uniform(size=(N, D))
    S = Q @ K.T / D**0.5
    m = np.maximum.accumulate(S.reshape(N, T_C, B).max(axis=2), axis=1)  # (N, T_c)
    alpha = np.exp(m[:, :-1] - m[:, 1:]).reshape(T_C, B, T_C - 1).transpose(0, 2, 1)  # (T_r, T_c − 1, B_r)
    p = np.exp(S[:, None] - m[:, :, None])  # (N, T_c, N)
    seen = np.arange(N) < B * np.arange(1, T_C + 1)[:, None]  # (T_c, N)
    steps = ((p * seen) @ V).reshape(T_C, B, T_C, D).transpose(0, 2, 1, 3)  # (T_r, T_c, B_r, d)
    O, _ = naive.forward(Q, K, V)
    return dict(Q=Q, K=K, V=V, S=S, O=O, steps=steps, alpha=alpha)


# Cells ----------------------------------------------------------------------------------------------------------

LEVELS = 9


def levels(X: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """Each number's level, 1 to LEVELS, between two numbers: the least and the greatest, if none are given."""
    low, high = X.min() if low is None else low, X.max() if high is None else high
    return np.clip(np.rint(1 + (LEVELS - 1) * (X - low) / (high - low)), 1, LEVELS).astype(int)


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


# Time -----------------------------------------------------------------------------------------------------------

T, FIRST = 16.5, 1.9  # seconds of the loop, and the one that a preview or a slow page shows: there are scores already
FILL = np.linspace(0.4, 2.5, N + 1)  # left: S is written, row by row
READ = np.linspace(2.8, 4.0, N + 1)  # left: S is read, and O written
TILE = np.array([2.9, 4.1, 9.2, *np.linspace(9.8, 13.0, 7)])  # right: when a tile comes, and when the last one goes
SHRINK, ADD = TILE[:-1] + 0.1, TILE[:-1] + 0.28  # a row's sums shrink, then the tile is added
SHRINK[SLOW], ADD[SLOW] = 6.0, 7.9
FADE = np.where(np.arange(len(SPOTS)) == SLOW, 1.2, 0.1)  # seconds of the shrinking
GLIDE = 0.2  # seconds from a tile to the next one
GHOST, VERDICT, LEAVE = (13.2, 14.2), 13.9, 16.0


def glide(film: Film, name: str, places: list[tuple[float, float]]) -> str:
    """At places[k] during tile k; the way to the next one is the last part of the time between."""

    def move(place: tuple[float, float]) -> str:
        return f"transform:translate({n(place[0])}px,{n(place[1])}px)"

    stops = [(0, move(places[0]))]
    for k, place in enumerate(places):
        if k:
            stops.append((TILE[k], move(place)))
        if k + 1 < len(places):
            stops.append((TILE[k + 1] - GLIDE, move(place), "cubic-bezier(.5,0,.3,1)"))
    return film.play(name, [*stops, (T, move(places[-1]))])


# Places ---------------------------------------------------------------------------------------------------------

W, H = 840, 540
PANELS = 28, 404  # where the two sides begin
C, GAP = 17.5, 1.7  # a cell of S and the gap between two
GX, GY = 54, 164  # S in its panel
QX, QW = 21, 6.5  # Q and the width of its cells
KY, VY, KH = 100, 131, 6  # K, V and the height of their cells
OX, OW = GX + N * C + 15, 14
SIDE, STEP = N * C, B * C
NUMBER_Y = GY + SIDE + 74

LOOKS = """
.h{font-size:31px;font-weight:700;letter-spacing:-.4px}.p{font-size:25px}.q{font-size:23px;fill:var(--quiet)}
.big{font-size:72px;font-weight:700;letter-spacing:-2px}.l{font-size:23px;font-weight:600}
.c{font-size:25px}.s{font-weight:700}.e{fill:var(--empty)}.f{font-size:18px;font-weight:700}.r{font-size:25px;letter-spacing:-1px}
.w{fill:none;stroke:var(--ink);stroke-width:3.2;stroke-linejoin:round}.t{stroke-width:2.2}
"""


def tints(base: float, power: float) -> str:
    shares = {k: base + (1 - base) * (k / LEVELS) ** power for k in range(1, LEVELS + 1)}
    return "".join(f".a{k}{{fill-opacity:{n(x)}}}" for k, x in shares.items())


STYLE = LOOKS + tints(0.14, 1.3) + f"@media(prefers-color-scheme:dark){{{DARK}{tints(0.24, 1.15)}}}"


def inputs(Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> str:
    """Q beside the rows of S, K and V above its columns; each letter in its tensor's place."""
    letters = (("K", GX - 17, KY + 19), ("V", GX - 17, VY + 19), ("O", OX + 2 * OW, GY - 9))
    return (
        group("Q", cells(levels(Q), QW, C, 1.2, QX, GY))
        + group("K", cells(levels(K.T), C, KH, 1.2, GX, KY))
        + group("V", cells(levels(V.T), C, KH, 1.2, GX, VY))
        + "".join(text(x, y, letter, "l", MIDDLE) for letter, x, y in letters)
        + text(QX - 7, GY + 17, "Q", "l", ' text-anchor="end"')
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
    for i, j in SPOTS:
        part = levels(S)[i * B : (i + 1) * B, j * B : (j + 1) * B]
        tiles += f'<g id="t{i}{j}">{cells(part, C, C, GAP, GX + j * STEP, GY + i * STEP)}</g>'
    middles = [(k + 0.5) * C - GAP / 2 for k in range(B)]
    dots = "".join(f"M{n(x)} {n(y)}h0" for y in middles for x in middles)
    round_pen = f'fill="none" stroke="{HUES["S"]}" stroke-width="4" stroke-linecap="round" stroke-opacity=".55"'
    return (
        f'<defs>{patterns}<g id="i">{inputs(Q, K, V)}</g><g id="s" fill="{HUES["S"]}">{tiles}</g>'
        f'<g id="o" fill="{HUES["O"]}">{cells(divided(O), OW, C, GAP, OX, GY)}</g><path id="d" d="{dots}" {round_pen}/>'
        f'<clipPath id="c">{box(GX, GY, SIDE, SIDE, kind="", r=0)}</clipPath>'
        f'<clipPath id="b">{box(OX, GY, 4 * OW, SIDE, kind="", r=0)}</clipPath></defs>'
    )


def divided(O: np.ndarray) -> np.ndarray:
    return levels(O, 0)


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


def flash(film: Film, S: np.ndarray, O: np.ndarray, steps: np.ndarray, alpha: np.ndarray) -> str:
    """Right: one tile, gliding; of what was there only a dot remains. A row of O shrinks, then the tile is added."""
    tiles = dots = ""
    for k, (i, j) in enumerate(SPOTS):
        tiles += use(f"t{i}{j}", film.shown(f"t{k}", TILE[k] - 0.06, TILE[k + 1] - 0.1))
        dot = use("d", film.shown(f"d{k}", TILE[k + 1] - 0.16))
        dots += f"<g {at(GX + j * STEP, GY + i * STEP)}>{dot}</g>"
    size = STEP + 3
    rows = glide(film, "x", [(0, i * STEP) for i, j in SPOTS])
    window = box(GX - 2.3, GY - 2.3, size, size, glide(film, "w", [(j * STEP, i * STEP) for i, j in SPOTS]))
    window += box(QX - 2.6, GY - 2.3, 4 * QW + 4, size, rows, "w t")
    window += box(OX - 2.6, GY - 2.3, 4 * OW + 3.6, size, rows, "w t")
    columns = glide(film, "y", [(j * STEP, 0) for i, j in SPOTS])
    window += box(GX - 2.3, KY - 2.6, size, VY - KY + 4 * KH + 4, columns, "w t")
    nothing = film.play("k", [(0, "opacity:1"), (TILE[0], "opacity:0"), (T, "opacity:0")], "step-end")
    one_tile = film.play("l", [(0, "opacity:0"), (TILE[0], "opacity:1"), (T, "opacity:1")], "step-end")
    return (
        heading("FlashAttention-2", "stores one tile at a time")
        + use("i")
        + f'<g class="z">{dots}{group("S", tiles)}{group("O", sums(film, O, steps, alpha))}</g>'
        + f"<g{film.shown('b', TILE[0] - 0.2, TILE[-1] + 0.1)}>{window}</g>"
        + slowly(film, S, alpha)
        + factors(film, alpha)
        + text(0, NUMBER_Y, "0", "big", f' opacity="0"{nothing}')
        + text(0, NUMBER_Y, str(B * B), "big", one_tile)
        + text(104, NUMBER_Y - 29, "scores stored", "p")
        + text(104, NUMBER_Y + 1, "one tile", "q")
    )


def sums(film: Film, O: np.ndarray, steps: np.ndarray, alpha: np.ndarray) -> str:
    """The rows of O after each tile: those whose maximum rises fade to α of what they were, before the next tile."""
    drawn = ""
    for k, (i, j) in enumerate(SPOTS):
        if last := j == T_C - 1:
            shown = divided(O)[i * B : (i + 1) * B]
        else:
            shown = levels(steps[i, j], 0, steps[i, :-1].max())
        factor = np.ones(B) if last else alpha[i, j]
        stays = np.where(factor[:, None] == 1, shown, 0)
        end = None if last else ADD[k + 1] + 2 * SOFT
        drawn += f"<g{film.shown(f'o{k}', ADD[k], end)}>{cells(stays, OW, C, GAP, OX, GY + i * STEP)}</g>"
        for r in np.flatnonzero(factor < 1):
            a, rest = f"opacity:{factor[r]:.2f}", film.seconds
            stops = [
                (0, "opacity:0"),
                (ADD[k], "opacity:0"),
                (ADD[k] + SOFT, "opacity:1"),
                (SHRINK[k + 1], "opacity:1"),
            ]
            stops += [(SHRINK[k + 1] + FADE[k + 1], a), (end - SOFT, a), (end, "opacity:0"), (rest, "opacity:0")]
            row = cells(shown[r : r + 1], OW, C, GAP, OX, GY + (i * B + r) * C)
            drawn += f'<g opacity="0"{film.play(f"p{k}{r}", stops)}>{row}</g>'
    return drawn


def factors(film: Film, alpha: np.ndarray) -> str:
    """Beside each row of O that shrinks, by how much."""
    words = ""
    for k, (i, j) in enumerate(SPOTS):
        for r in np.flatnonzero(alpha[i, j - 1] < 1) if j else ():
            kind, before, after, drop = ("f r", 0.35, 0.5, 9) if k == SLOW else ("f", 0.15, 0.2, 5.5)
            y, more = GY + (i * B + r + 0.5) * C + drop, film.shown(f"a{k}{r}", SHRINK[k] - before, ADD[k] + after)
            words += text(OX + 4 * OW + 7, y, f"× {alpha[i, j - 1, r]:.2f}", kind, more)
    return words


def slow_row(alpha: np.ndarray) -> int:
    """The one row that meets a larger score in the slow tile."""
    (row,) = np.flatnonzero(alpha[SPOTS[SLOW][0], SPOTS[SLOW][1] - 1] < 1)
    return int(row)


def slowly(film: Film, S: np.ndarray, alpha: np.ndarray) -> str:
    """In the slow tile: a ring around the larger score, and from there a line to its row of O."""
    row = slow_row(alpha)
    column = int(S[row].argmax())
    y = GY + row * C
    ring = box(
        GX + column * C - 2.2, y - 2.2, C + 2.7, C + 2.7, film.shown("sr", TILE[SLOW] + 0.35, TILE[SLOW + 1] - 0.4)
    )
    way = f"M{n(GX + (column + 1) * C + 1)} {n(y + C / 2 - 1)}H{n(OX - 5)}"
    gone, drawn = "stroke-dashoffset:0;opacity:0", "stroke-dashoffset:0;opacity:1"
    stops = [(0, "stroke-dashoffset:1;opacity:0"), (SHRINK[SLOW] - 0.8, "stroke-dashoffset:1;opacity:1")]
    stops += [(SHRINK[SLOW] - 0.3, drawn), (ADD[SLOW], drawn), (ADD[SLOW] + SOFT, gone), (T, gone)]
    play = film.play("sw", stops)
    line = f'<path d="{way}" class="w t" pathLength="1" stroke-dasharray="1" opacity="0"{play}/>'
    end = box(OX - 2.6, y - 2.2, 4 * OW + 3.4, C + 2.7, film.shown("se", SHRINK[SLOW] - 0.35, ADD[SLOW] + 0.5))
    return ring + line + end


RING = box(OX - 4, GY - 4, 4 * OW + 6.4, SIDE + 6.4, "", "w", 4)


def sentences(alpha: np.ndarray) -> list[tuple]:
    """(what is bold, the rest, from when, until when) of the line below."""
    factor = alpha[SPOTS[SLOW][0], SPOTS[SLOW][1] - 1, slow_row(alpha)]
    return [
        ("One score", "for each query and key, and all are stored.", 0.2, READ[-1] - 0.1),
        ("One row", "meets a larger score …", TILE[SLOW] + 0.1, SHRINK[SLOW] - 0.3),
        ("So its sums shrink:", f"× {factor:.2f}.", SHRINK[SLOW] - 0.3, ADD[SLOW] - 0.1),
        ("Then the tile is added,", "and dropped.", ADD[SLOW] - 0.1, TILE[SLOW + 1] + 0.6),
        ("So it goes on,", "tile by tile.", TILE[SLOW + 1] + 0.6, GHOST[0]),
        ("Same output,", "though no row ever had all its scores at once.", VERDICT, None),
    ]


def end(film: Film, alpha: np.ndarray) -> str:
    """The left O is laid over the right one: they are the same. Below, a sentence for each part of the time."""
    a, b = (f"transform:translateX({n(x)}px)" for x in PANELS)
    way = film.play("j", [(0, a), (GHOST[0] + 0.35, a, "cubic-bezier(.5,0,.2,1)"), (GHOST[1], b), (T, b)])
    moved = f'<g transform="translate({PANELS[1]})"{way}>{GROUND}{use("o")}{RING}</g>'
    stays = f'<g transform="translate({PANELS[0]})"><g{film.shown("m", GHOST[0])}>{RING}</g></g>'
    words = ""
    for k, (first, rest, start, stop) in enumerate(sentences(alpha)):
        line = f'<tspan class="s">{first}</tspan> {rest}'
        words += text(W / 2, H - 27, line, "c", MIDDLE + film.shown(f"q{k}", start, stop))
    return f'<g class="z">{stays}<g{film.shown("h", GHOST[0])}>{moved}</g>{words}</g>'


# The picture ----------------------------------------------------------------------------------------------------

TITLE = "Standard attention stores N × N scores, FlashAttention-2 stores one tile, and both have the same output"
ALT = (
    f"Two squares of {N} × {N} scores, side by side. Left, standard attention: the square fills row by row and stays "
    f"full, with {N * N} scores stored. Then the rows of the output O are filled. Right, FlashAttention-2: a window of "
    f"{B} × {B} scores glides over the square, and only its {B * B} scores are stored at any time. When a row meets a "
    "larger score, a factor appears beside its row of O, the row fades by that factor, and then the tile is added. At "
    "the end the left output is laid over the right one: they are equal."
)


def moving(**numbers: Any) -> str:
    """The picture that plays."""
    film, (a, b), steps, alpha = Film(T, FIRST), PANELS, numbers.pop("steps"), numbers.pop("alpha")
    left, right = standard(film), flash(film, numbers["S"], numbers["O"], steps, alpha)
    last = end(film, alpha)
    share, gone = f"{100 * LEAVE / T:.2f}%", f"{100 * (LEAVE + 0.4) / T:.2f}%"
    film.rules.append(f"@keyframes z{{0%,{share}{{opacity:1}}{gone},100%{{opacity:0}}}}")
    film.rules.append(f".z{{animation:z {T:g}s linear -{FIRST:g}s infinite}}")
    drawing = f'<g transform="translate({a})">{left}</g>\n<g transform="translate({b})">{right}</g>\n{last}'
    return film.svg(W, H, TITLE, ALT, STYLE, f"{definitions(**numbers)}\n{drawing}")
