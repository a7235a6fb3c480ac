"""Marks that could mislead in pictures of the algorithm: strong edges, letters, arrows, row numbers, moments."""

import re
from itertools import accumulate, groupby
from xml.etree import ElementTree

import pytest
from matplotlib.colors import same_color
from matplotlib.text import Annotation
from pictures import boxes, drawn, label, tagged

from fa2_lab.plots import explorer, motion, poster, style


def span(box):
    """Where a box begins and ends from left to right."""
    return box.get_x(), box.get_x() + box.get_width()


def middle(box):
    return box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2


def at(ax, text):
    """Where a text stands, which stands there once."""
    found = [t.get_position() for t in ax.texts if t.get_text() == text]
    assert len(found) == 1, f"{text!r} stands there {len(found)} times"
    return found[0]


# Deferred normalisation -----------------------------------------------------------------------------------------

TENSOR_OF = {"q kᵀ": "S", "max": "m", "τs − m": "S", "exp": "P", "Σ": "l", "scale o": "O", "p v": "O", "scale p v": "O"}


def test_the_strong_edge_is_that_of_the_step_that_fa2_leaves_out():
    ax = drawn("deferred_normalisation")[0].axes[0]
    solid = [b for b in boxes(ax) if b.get_linestyle() in ("-", "solid")]
    named = {(b.get_y(), label(b).replace("\n", " ")): b.get_linewidth() for b in solid if label(b)}
    usual = named[1, "q kᵀ"]
    assert {name: width > usual for name, width in named.items()} == {name: name == (0, "scale p v") for name in named}
    assert all(b.get_linewidth() == 0 for b in solid if not label(b)), "what has no name has no edge"


def test_a_step_has_the_colour_of_what_it_makes_and_a_row_its_name_and_clocks():
    ax = drawn("deferred_normalisation")[0].axes[0]
    solid = [b for b in boxes(ax) if b.get_linestyle() in ("-", "solid")]
    for box in solid:
        name = label(box).replace("\n", " ")
        fill = style.fill(TENSOR_OF[name]) if name else style.hue("m")
        assert same_color(box.get_facecolor(), fill), f"{name or 'a step without a name'} has another tensor's colour"
    for y, name in enumerate(("FA1", "FA2", "FA2, once")):
        row = [b for b in solid if b.get_y() == y]
        x, height = at(ax, f"{name}\n{sum(b.get_width() for b in row):,.0f}")
        assert x < 0 and height == pytest.approx(y + 0.3), f"{name} stands at another row"


def test_what_is_gone_stands_where_fa2_ends_and_its_arrow_leads_to_the_small_outline():
    ax = drawn("deferred_normalisation")[0].axes[0]
    row = [b for b in boxes(ax) if b.get_y() == 1]
    lost, small = (b for b in row if b.get_linestyle() not in ("-", "solid"))
    ends = [max(span(b)[1] for b in row if b not in (lost, small)), *span(lost)]
    assert [span(lost)[0], *span(small)][:2] == [ends[0], ends[2]], "an outline begins where the box before it ends"
    assert all(same_color(b.get_facecolor(), style.PAPER) for b in (lost, small))
    (note,) = (t for t in ax.texts if t.get_text().startswith("gone: "))
    (x, y), (first, last) = note.xy, span(small)
    assert note.get_text() == "gone: scaling p v, and\n÷ ℓ with its factors"
    assert first < x < last and y == pytest.approx(1 + small.get_height()), "the arrow leads elsewhere"
    assert note.arrow_patch is not None and note.xyann[1] > y, "the note stands beneath its row"


# The ladder -----------------------------------------------------------------------------------------------------


def test_a_bar_s_parts_lie_end_to_end_with_the_letter_and_colour_of_their_tensor():
    figure, _, data = drawn("ladder")
    bars = iter(tagged(figure, "amount"))
    for rung in (rung for rungs in data["groups"].values() for rung in rungs):
        for amounts in filter(None, (rung.before, rung.after)):
            parts, whole, left = [next(bars) for _ in amounts], sum(rung.before.values()), None
            for part, (tensor, n) in zip(parts, amounts.items(), strict=True):
                (x, end), said = span(part), label(part)
                assert left is None or x == pytest.approx(left), f"{rung.name}: {tensor} begins elsewhere"
                assert end - x == pytest.approx(1.95 * n / whole), f"{rung.name}: {tensor} has another share"
                assert said in (style.ell(tensor), "") and (said == "") <= (end - x < 0.2 or not tensor), rung.name
                fill = style.tint(style.hue(tensor), 0.55) if tensor else style.tint(style.INK, 0.45)
                assert same_color(part.get_facecolor(), fill), f"{rung.name}: {tensor} has another tensor's colour"
                left = end
            beside = [t for t in figure.axes[0].texts if t.get_position()[1] == pytest.approx(middle(parts[0])[1])]
            number = min((t for t in beside if t.get_position()[0] > left), key=lambda t: t.get_position()[0])
            numbers = {f"{sum(amounts.values()):,}", f"{sum(amounts.values()):.0%}"}
            assert number.get_text()[-1] in "kM" or number.get_text() in numbers, f"{rung.name}: {number.get_text()}"
    assert next(bars, None) is None
    assert [*data["groups"]["Numbers kept"][1].after] == ["L"]


# The explorer ---------------------------------------------------------------------------------------------------


def test_the_explorer_opens_with_three_by_three_tiles_of_four():
    data = explorer.data()
    tiling = data["tiling"]
    assert (tiling.N_q, tiling.N_k, tiling.B_r, tiling.B_c, tiling.mask.causal, data["t"]) == (12, 12, 4, 4, False, 212)
    assert explorer.SLIDERS == dict(N_q=(4, 24), N_k=(4, 24), B_r=(2, 12), B_c=(2, 12))


@pytest.mark.parametrize("settings", [{}, dict(causal=True), dict(N_q=8, N_k=24, B_r=2), dict(N_k=4, B_c=2)], ids=str)
def test_it_opens_where_both_first_have_a_tile_after_half_of_fa2(settings):
    data = explorer.data(**settings)
    half = sum(e.elements for e in data["events"]["FA2"]) // 2
    both = [t for t in explorer.times(data["events"]) if t >= half
            and all("S" in explorer.on_chip(name, log, t) for name, log in data["events"].items())]  # fmt: skip
    assert data["t"] == (both[0] if both else half)


def sides(data):
    """{what: box} of FA1's half and of FA2's half, and the texts of both."""
    shapes = explorer.shapes(**data)
    found = [s for s in shapes if isinstance(s, explorer.Box)]
    halves = [{b.what: b for b in found if (b.x > explorer.WIDTH / 2) == right} for right in (False, True)]
    return halves, [s for s in shapes if isinstance(s, explorer.Text)]


def test_blocks_on_the_chip_lie_as_their_products_do_in_their_colours():
    halves, _ = sides(explorer.data(N_q=12, N_k=12, B_r=6, B_c=4))
    for side in halves:
        q, k, s, v, o = (side[f"chip {tensor}"] for tensor in "QKSVO")
        assert (q.y, q.h) == (s.y, s.h) == (o.y, o.h), "q, s and o have the same rows"
        assert (k.x, k.w) == (s.x, s.w) and (v.x, v.w) == (o.x, o.w), "k is above s, and v above o"
        assert q.x + q.w < s.x and s.x + s.w < o.x and k.y + k.h < s.y and v.y + v.h < o.y
        assert q.w / s.w == pytest.approx(explorer.D / 4) and v.h / v.w == pytest.approx(4 / explorer.D)
        for what, box in side.items():
            kind, _, tensor = what.partition(" ")
            if kind in ("chip", "all", "HBM") and tensor:
                assert style.hue(tensor) in (box.edge, box.fill) or box.fill == style.tint(style.hue(tensor), 0.3), what


def test_the_moving_part_of_a_matrix_begins_where_its_rows_or_keys_begin():
    data = explorer.data(N_q=12, N_k=12, B_r=6, B_c=4)
    for n, (_, log) in enumerate(data["events"].items()):
        for event, t in zip(log[:-1], accumulate(e.elements for e in log), strict=False):
            if event.tensor in "QKVO" and None not in (event.i, event.j):
                side = sides(data | dict(t=t))[0][n]
                part, whole = side[f"{event.op} {event.tensor}"], side[f"HBM {event.tensor}"]
                keys = event.tensor in "KV"
                begins = (part.x - whole.x) / whole.w if keys else (part.y - whole.y) / whole.h
                assert begins == pytest.approx(4 * event.j / 12 if keys else 6 * event.i / 12), event
                assert part.edge == style.hue(event.tensor)


def test_matrices_lie_round_the_tiles_and_a_tile_has_the_number_of_its_visit():
    data = explorer.data(N_q=12, N_k=12, B_r=6, B_c=4, t=10**6)
    shapes = explorer.shapes(**data)
    halves, texts = sides(data)
    for right, side in enumerate(halves):
        tiles = [s for s in shapes if getattr(s, "what", "") == "done" and (s.x > explorer.WIDTH / 2) == right]
        q, k, v, o = (side[f"HBM {tensor}"] for tensor in "QKVO")
        left, top, end = min(b.x for b in tiles), min(b.y for b in tiles), max(b.x + b.w for b in tiles)
        assert q.x + q.w < left and o.x > end and k.y + k.h < top and v.y + v.h < k.y
        for tensor, strip in zip("QKVO", (q, k, v, o), strict=True):
            x, y = strip.x + (strip.w if tensor == "O" else 0), strip.y + strip.h / 2
            assert any((t.words, t.y) == (tensor, y) and 0 < abs(t.x - x) < 10 for t in texts), f"{tensor} has no name"
        places = {(t.x, t.y): t.words for t in texts}
        numbers = [[places[b.x + b.w / 2, b.y + b.h / 2] for b in row] for _, row in groupby(tiles, lambda b: b.y)]
        assert numbers == ([["0", "1", "2"], ["3", "4", "5"]] if right else [["0", "2", "4"], ["1", "3", "5"]])


# Data in motion ---------------------------------------------------------------------------------------------------

MOMENTS = {  # what each column has on its chip, by the algorithms' lines
    "FA1's first tile: 1,152": ("q₂ k₂ s₀₁", "q₀ k₀ v₀ o₀ ℓ₀ m₀ s₀₀", "q₀ k₂ v₂"),
    "FA2 is halfway: 1,584": ("q₂ k₂ s₁₀", "q₁ k₀ v₀", "q₁ k₁ v₀ o₁ ℓ₁ m₁"),
    "FA2 is done: 3,168": ("", "q₀ k₁ v₁", ""),
    "all are done: 8,448": ("", "", ""),
}


def test_each_moment_shows_what_is_on_the_chips_and_what_has_been_moved_by_then():
    figure, _, data = drawn("motion")
    ax = figure.axes[0]
    heads = [t for t in ax.texts if t.get_text().endswith(" on the clock")]
    assert [t.get_text().removesuffix(" bytes on the clock") for t in heads] == list(MOMENTS)
    tops = [t.get_position()[1] for t in heads] + [10**6]
    for n, (name, chips) in enumerate(MOMENTS.items()):
        clock = int(name.split(": ")[1].replace(",", ""))
        for column, (chip, run) in enumerate(zip(chips, data["runs"].values(), strict=True)):
            x0, x1 = column * motion.COLUMN, (column + 1) * motion.COLUMN
            said = [t.get_text() for t in ax.texts if tops[n] < t.get_position()[1] < tops[n + 1]
                    and x0 <= t.get_position()[0] < x1]  # fmt: skip
            assert {w for w in said if re.fullmatch(r"\w[₀-₉]+", w)} == {*chip.split()}, f"{name}, column {column}"
            ended = [k for k, move in enumerate(run.moves) if move.end <= clock]
            counts = [run.moves[ended[-1]].end, run.crossed[ended[-1]]]
            assert [w for w in said if w.endswith(" B")] == [f"{count:,} B" for count in counts], name
            bars = [b for b in boxes(ax) if tops[n] < b.get_y() < tops[n + 1] and x0 <= b.get_x() < x1]
            wide = {b.get_gid().partition(" ")[2]: b.get_width() for b in bars}
            wanted = [counts[0] / run.total, counts[1] / run.crossed[-1]]
            assert [wide["moved"] / wide["total"], wide["crossed"] / wide["all crossed"]] == pytest.approx(wanted), name


def test_what_travels_begins_on_the_shelf_it_leaves_and_ends_on_the_shelf_it_goes_to():
    svg, name = ElementTree.fromstring(motion.moving(**motion.data())), "{http://www.w3.org/2000/svg}"
    frames = dict(re.findall(r"@keyframes (k\d+)\{(.*)\}", svg.find(f"{name}style").text))
    number = {rect: [float(rect.get(k)) for k in ("x", "y", "width", "height")] for rect in svg.iter(f"{name}rect")}
    places = {}
    for rect in svg.findall(f"{name}rect"):  # what stands: shelves, and on two of them the matrices
        if rect.get("class"):
            places[int(number[rect][0] // motion.COLUMN), rect.get("class")] = number[rect]
    travels = 0
    for group in svg.iter(f"{name}g"):
        rect, text = group.find(f"{name}rect"), group.find(f"{name}text")
        shelves, (x, y) = rect.get("class").split(" to "), number[rect][:2]
        if len(shelves) == 2:
            body = frames[re.search(r"animation-name:(k\d+)", group.get("style"))[1]]
            dx, dy = map(float, re.findall(r"translate\(([-\d.]+)px,([-\d.]+)px\)", body)[-1])
            letter = text.text[0].replace("ℓ", "l") if text is not None else ""
            tensor = letter if letter in "lmL" else letter.upper()
            for shelf, left, top in ((shelves[0], x, y), (shelves[1], x + dx, y + dy)):
                column = int(x // motion.COLUMN)
                a, b, wide, high = places.get((column, f"{shelf} {tensor}")) or places[column, shelf]
                assert a - 0.1 <= left < a + wide and b - 0.1 <= top < b + high, (rect.get("class"), tensor, shelf)
            travels += 1
    assert travels > 100


# The poster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["FA2.A1", "FA2.A2"])
def test_a_line_s_number_stands_beside_its_words_its_code_and_its_work(tag):
    """An entry is drawn at once: its number, then its cells; each column is centred at the number's height."""
    data = poster.data(tag)
    ax = poster.draw(**data)[0].axes[0]
    texts = [t for t in ax.texts if t.get_text() and 1.8 < t.get_position()[1] < poster.SHEET[1] - 0.35]
    begins = [n for n, t in enumerate(texts) if t.get_position()[0] == 0.02]
    entries = [texts[a:b] for a, b in zip(begins, [*begins[1:], None], strict=True)]
    heads = {lane: at(ax, words)[0] for lane, words in poster.LANES.items()}
    lanes = dict(load="from\nHBM", store="to\nHBM", matmul="tensor\ncores", exp="exponen-\ntials", other="FP32\nunits")
    assert lanes == poster.LANES, "a lane has another's name"
    bottom, indents = 0, {}
    for row, (number, *cells) in zip(data["rows"], entries, strict=True):
        y, said = number.get_position()[1], {}
        for cell in cells:
            column = [name for name, left in poster.COLUMNS.items() if left <= cell.get_position()[0]][-1]
            said.setdefault(column, []).append(cell)
        assert number.get_text() == str(row.number)
        for column, wanted in (("words", [row.words]), ("numpy", row.numpy), ("triton", row.triton)):
            found = "".join(t.get_text() for t in said[column]).replace(r"\$", "$")
            assert "".join(found.split()) == "".join("".join(wanted).split()), f"line {row.number}: another's {column}"
            heights = [t.get_position()[1] for t in said[column]]
            assert sum(heights) / len(heights) == pytest.approx(y), f"line {row.number}: its {column} stand elsewhere"
        work = {lane: tagged(ax, f"{lane} {row.number}") for lane in heads}
        assert {lane: pytest.approx((heads[lane], y)) for lane in row.work} == {
            lane: middle(box) for lane, (box,) in ((lane, box) for lane, box in work.items() if box)
        }, f"line {row.number}: its work stands in another lane or at another line"
        indents.setdefault(row.depth, set()).add(said["words"][0].get_position()[0])
        around = [p for p in boxes(ax) if not p.get_gid() and p.get_y() < y < p.get_y() + p.get_height()]
        assert len(around) == 2 * row.depth, f"line {row.number} lies in {row.depth} loops"
        assert bottom < min(t.get_position()[1] for t in cells), f"line {row.number} begins before the last one ends"
        bottom = max(t.get_position()[1] for t in cells)
    ((outside,), (in_one,), (in_two,)) = (indents[depth] for depth in range(3))
    assert outside < in_one < in_two, "words stand the farther right, the deeper their loop"
    (where,) = (re.search(r"where (FA2\.A\d)\.L(\d+)", t.get_text()) for t in ax.texts if " where FA2" in t.get_text())
    assert where[1] == tag and int(where[2]) in [row.number for row in data["rows"]]
    assert ax.texts[0].get_text().startswith(f"Algorithm {tag[-1]} of the FlashAttention-2 paper")


# Results beside their rows, names at their lines ------------------------------------------------------------------


def test_a_block_of_a_result_stands_at_its_row_or_column_with_who_writes_it():
    figure, *_ = drawn("workers")
    for n, ax in enumerate(figure.axes):
        tensor, verb = (("O", "written by"), ("dQ", "added into by"))[n // 2]
        results, (x, y) = tagged(ax, tensor), at(ax, verb)
        assert [label(b) for b in results] == [f"{tensor}{k}" for k in "₁₂₃₄"] and y < 0
        for i, box in enumerate(results):
            assert box.get_x() > 4 and middle(box)[1] == pytest.approx(i + 0.5), f"{label(box)} stands at another row"
            writers = tagged(ax, f"writes {tensor}{i}")
            assert all(middle(b)[1] == pytest.approx(i + 0.5) and b.get_x() >= x for b in writers), label(box)
            assert all(same_color(b.get_facecolor(), style.worker(int(label(b)) - 1)) for b in writers), label(box)
        for other in ("dK", "dV") if n // 2 else ():
            for j, box in enumerate(tagged(ax, other)):
                assert label(box) == f"{other}{'₁₂₃₄'[j]}" and j < span(box)[0] < span(box)[1] < j + 1, label(box)
                assert box.get_y() > 4, "gradients of keys stand beneath their columns"


def test_numbers_and_names_beside_lines_are_those_of_the_lines():
    figure, _, data = drawn("state_stream")
    o, l, O = data["o"][-1, data["row"]], data["l"][-1, data["row"]], data["O"][data["row"]]
    assert at(figure.axes[3], f"o / ℓ = {o / l:.4f}; standard attention: {O:.4f}")
    figure, _, data = drawn("programs")
    notes = {t.get_text(): t.xy for t in figure.axes[0].texts if isinstance(t, Annotation)}
    assert notes["measured"] in data["curve"]
    assert notes[f"taken by the package: {data['usual']}"] == (data["usual"], dict(data["curve"])[data["usual"]])
    assert 0.9 < at(figure.axes[0], "reading alone")[1] / data["floor"] < 1, "it stands beneath its line"
    figure, *_ = drawn("rescaling")
    ticks = {tick.label1.get_text(): tick.get_loc() for tick in figure.axes[0].yaxis.get_major_ticks()}
    names = ["keys 0, 1\nm = log 3", "× α = 3/8", "+ keys 2, 3\nm = log 8"]
    assert ticks == {name: pytest.approx(middle(tagged(figure, f"ℓ {n} key 0")[0])[1]) for n, name in enumerate(names)}


def test_the_note_on_small_steps_points_at_small_steps():
    ax = drawn("deferred_normalisation")[0].axes[0]
    (note,) = (t for t in ax.texts if t.get_text().startswith("m, ℓ and factors"))
    hit = [label(b) for b in boxes(ax) if b.get_y() == 0 and span(b)[0] <= note.xy[0] <= span(b)[1]]
    assert hit and set(hit) == {""}, f"the note points at {hit}"
