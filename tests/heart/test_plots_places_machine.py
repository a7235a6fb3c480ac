"""What stands at which mark in pictures of the machine, of measurements and of orders: see test_plots_places.py."""

import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import StepPatch
from picture_places import (
    around,
    arrows,
    assert_beside,
    assert_over,
    centre,
    named,
    numbers,
    right,
    runs_through,
    starting,
)
from pictures import boxes, drawn, label, tagged

from fa2_lab.plots import ideas, style

# A step of the backward ---------------------------------------------------------------------------------------------

LANES = dict(S="tensor cores", dV="tensor cores", dP="tensor cores", dK="tensor cores", P="exponentials")


def test_a_lane_of_the_backward_s_step_has_the_name_of_what_runs_in_it_and_of_its_consumer():
    figure, _, data = drawn("backward_step")
    ax, start = figure.axes[0], data["window"][0]
    checked = set()
    for box in boxes(ax):
        if not label(box):
            continue
        what, number = label(box).removeprefix("+ ").split()
        name = "additions" if label(box).startswith("+") else LANES.get(what, "tensor cores")
        (lane,) = [t for t in ax.texts if re.fullmatch(r"[a-z ]+, [01]", t.get_text())
                   and abs(t.get_position()[1] - centre(box)[1]) < 0.2]  # fmt: skip
        unit, consumer = lane.get_text().split(", ")
        assert unit == name, f"{label(box)} runs in the lane of {unit}"
        begun = [
            max(a, start) - start
            for c, _, w, n, a, _ in data["jobs"]
            if (c, w, n) == (int(consumer), what, int(number))
        ]
        assert box.get_x() in begun, f"{label(box)} is not that of consumer {consumer}"
        assert around(lane).x1 < around(box).x0
        checked.add(lane.get_text())
    assert len(checked) == 6 and len([t for t in ax.texts if re.search(r", [01]$", t.get_text())]) == 6


def test_the_axis_of_the_backward_s_step_counts_the_clocks_that_boxes_last():
    figure, alt, data = drawn("backward_step")
    ax, (start, end) = figure.axes[0], data["window"]
    ticks = {tick.label1.get_text(): tick.get_loc() for tick in ax.xaxis.get_major_ticks()}
    assert len(ticks) >= 4 and all(float(said) == x for said, x in ticks.items())
    assert ax.get_xlim()[1] == end - start and max(ticks.values()) > end - start - 1000
    strong = {int(box.get_gid().split()[-1]) for box in boxes(ax) if same_color(box.get_edgecolor(), style.INK)}
    assert strong == {data["n"]} == {int(numbers(ax.get_xlabel())[-1])}
    assert data["setting"] in ax.get_xlabel() and f"{data['busy']:.0%} of the time" in " ".join(alt.split())
    d = numbers(data["setting"].removeprefix("model: H200"))[0]
    (first,) = [box for box in boxes(ax) if box.get_x() == 0 and label(box).startswith("S")]
    assert first.get_width() == 2 * 64 * 64 * d / 4096, "a product of 64 × 64 numbers at 4,096 FLOP a clock"


# Two ways to dQ over time -------------------------------------------------------------------------------------------


def test_lanes_of_sms_and_of_blocks_of_dq_are_named_at_their_boxes():
    figure, _, data = drawn("dq_over_time")
    for ax, way in zip(figure.axes, data["ways"].values(), strict=True):
        ticks = {tick.label1.get_text(): tick.get_loc() for tick in ax.yaxis.get_major_ticks()}
        assert len(ticks) == data["SMs"] + data["T"]
        for visit in way["visits"]:
            (box,) = [b for b in tagged(ax, f"{visit.worker} rows {visit.rows}") if b.get_x() == visit.start]
            assert ticks[f"SM {visit.SM}"] == pytest.approx(centre(box)[1]), f"{visit} stands in another lane"
        for mark in [box for box in boxes(ax) if (box.get_gid() or "").startswith("write")]:
            assert ticks[f"dQ {mark.get_gid().split()[1]}"] == pytest.approx(centre(mark)[1]), mark.get_gid()


def test_the_titles_of_the_ways_to_dq_count_what_is_drawn_beneath_them():
    figure, alt, data = drawn("dq_over_time")
    for ax, name in zip(figure.axes, data["ways"], strict=True):
        visits = [box for box in boxes(ax) if " rows " in (box.get_gid() or "")]
        writers = [box.get_gid().split(" by ")[1].split(",") for box in boxes(ax) if " by " in (box.get_gid() or "")]
        end, title = max(right(box) for box in visits), ax.get_title(loc="left")
        most = max(map(len, writers))
        assert title.startswith(f"{name}: ") and title in alt
        assert numbers(title) == [end, sum(map(len, writers)), *([most] if most > 1 else [])]
        assert title.endswith("one each") == (most == 1)
        (line,) = ax.lines
        assert set(line.get_xdata()) == {end}, "the dotted line stands elsewhere"
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() and first.get_xlim()[0] == 0
    assert second.get_xlabel() == "time in matrix products of one tile →"


def test_a_write_of_dq_by_one_has_its_writer_s_grey_and_one_by_several_dq_s_own_colour_and_their_number():
    figure = drawn("dq_over_time")[0]
    several = set()
    for ax in figure.axes:
        for mark in [box for box in boxes(ax) if " by " in (box.get_gid() or "")]:
            writers = mark.get_gid().split(" by ")[1].split(",")
            assert same_color(mark.get_edgecolor(), style.hue("dQ"))
            if len(writers) == 1:
                (tile, *_) = [box for box in boxes(ax) if (box.get_gid() or "").startswith(f"{writers[0]} rows")]
                assert same_color(mark.get_facecolor(), tile.get_facecolor()), f"{writers[0]}: another's grey"
                assert label(mark) == writers[0].split()[1]
            else:
                pale = np.array(style.colors.to_rgb(style.hue("dQ")))
                assert (np.array(mark.get_facecolor()[:3]) > pale - 1e-9).all() and label(mark) == f"× {len(writers)}"
                several.add(len(writers))
    told = dict(zip("2 3 4".split(), "two three four".split(), strict=True))
    (number,) = several
    assert f"× {number}: {told[str(number)]} programs write at the same time" in figure.get_supxlabel()


# Shares of decode ---------------------------------------------------------------------------------------------------


def test_a_head_of_a_decode_is_named_before_its_tiles_and_says_who_ends_it():
    figure, _, data = drawn("shares")
    ax, cut = figure.axes[0], data["cut"]
    tiles = [box for box in boxes(ax) if label(box).isdigit()]
    parts = [box for box in boxes(ax) if label(box).startswith("part ")]
    lines = {}
    for head, n in enumerate(cut.tiles):
        name = named(ax, f"head {head}")
        y = name.get_position()[1]
        row = [box for box in tiles if centre(box)[1] == pytest.approx(y)]
        assert len(row) == n, f"head {head}: its tiles lie elsewhere"
        none = [t for t in ax.texts if t.get_text() == "no keys" and t.get_position()[1] == y]
        assert len(none) == (n == 0), "only a head without tiles has no keys"
        assert_beside(name, row or none, "left", most=20)
        (result,) = [box for box in boxes(ax) if label(box) == f"O, L of {head}"]
        mine = [box for box in parts if centre(box)[1] == pytest.approx(y)]
        readers = list(dict.fromkeys(int(label(box)) for box in sorted(row, key=lambda box: box.get_x())))
        if len(readers) > 1:
            greys = [next(tile.get_facecolor() for tile in row if int(label(tile)) == w) for w in readers]
            assert [box.get_facecolor() for box in mine] == greys, f"head {head}: parts of other programs"
            (merge,) = [arrow for arrow in arrows(ax) if arrow.xy[1] == y]
            assert right(mine[-1]) < merge.xyann[0] < merge.xy[0] <= result.get_x() < merge.xy[0] + 0.3
            assert (merge.get_text(), merge.arrow_patch.get_arrowstyle().arrow) == ("merge", "->")
            assert_beside(merge, mine, "right", most=12)
        else:
            (told,) = [t for t in ax.texts if t.get_text().endswith("finishes it") and t.get_position()[1] == y]
            assert not mine and numbers(told.get_text()) == (readers or [int(told.get_text().split()[1])])
            assert abs(around(told).x0 - around(*parts).x0) < 4
        lines[head] = y
        assert around(*(row or none)).x1 < around(result).x0 and centre(result)[1] == pytest.approx(y)
    assert list(lines.values()) == sorted(lines.values())
    assert len({box.get_x() for box in boxes(ax) if label(box).startswith("O, L")}) == 1
    for words, under in (("tiles of keys", tiles), ("parts (o, m", parts)):
        assert_over(starting(ax, words), under)


# The climb ----------------------------------------------------------------------------------------------------------


def test_the_rival_s_lines_are_named_at_their_sides_with_their_speeds():
    figure, _, data = drawn("climb")
    ax, (peer, full, causal) = figure.axes[0], data["peer"]
    lines = {line.get_xdata()[0]: line for line in ax.lines if len({*line.get_xdata()}) == 1}
    assert set(lines) == {full, causal}
    names = [t for t in ax.texts if not t.get_text().isdigit()]
    for text, (x, mask) in zip(names, ((full, "no mask"), (causal, "causal")), strict=True):
        words, line, outer = around(text), around(lines[x]), x == max(full, causal)
        gap = words.x0 - line.x1 if outer else line.x0 - words.x1
        assert 0 < gap < 10, f"{text.get_text()!r} stands elsewhere"
        assert mask in text.get_text() and numbers(text.get_text())[-1] == float(f"{x:.0f}")
        assert (peer in text.get_text()) == (not outer), "the rival is named once"
        assert words.y0 > max(around(bar).y1 for bar in boxes(ax)), "its name stands among bars"
        assert words.y1 < ax.bbox.y1
    assert (lines[causal].get_linestyle(), lines[full].get_linestyle()) == ("--", "-")


def test_speeds_of_the_climb_stand_in_a_column_behind_bars_and_lines_each_at_its_bar():
    figure, _, data = drawn("climb")
    ax = figure.axes[0]
    said = [t for t in ax.texts if t.get_text().isdigit()]
    bars = [tagged(ax, f"rung {rung.number}")[0] for rung in data["rungs"]]
    behind = max(around(part).x1 for part in (*bars, *ax.lines))
    for text, bar in zip(said, bars, strict=True):
        words, body = around(text), around(bar)
        assert text.get_text() == f"{bar.get_width():.0f}" and words.x0 > behind
        assert abs(words.y0 + words.y1 - body.y0 - body.y1) <= 8, f"{text.get_text()} stands at another bar"
        assert words.x1 <= ax.bbox.x1
    assert max(around(t).x1 for t in said) - min(around(t).x1 for t in said) < 2, "they end in one line"
    assert ax.get_xlim()[0] == 0, "bars begin at nothing"
    pale = [bar for bar in bars if style.luminance(bar.get_facecolor()) > style.luminance(bars[0].get_facecolor())]
    loses = [bar for before, bar in pairwise(bars) if bar.get_width() <= before.get_width()]
    assert pale == loses and "Pale: a change that loses here" in figure.get_supxlabel()
    assert figure.get_supxlabel().startswith(data["setting"])


# The map of memories ------------------------------------------------------------------------------------------------


def test_a_chip_s_name_and_size_stand_in_its_square_and_a_line_leads_from_its_small_squares_to_the_lens():
    figure, _, data = drawn("gpu_map")
    ax = figure.axes[0]
    leads = [line.get_xydata() for line in ax.lines]
    assert len(leads) == len(data["chips"])
    for (name, (places, _)), ((x0, y0), (x1, y1)) in zip(data["chips"].items(), leads, strict=True):
        (whole,) = tagged(ax, f"{name} HBM")
        text = named(ax, f"{name}\nHBM {places[-1].size / 2**30:.0f} GiB")
        words, square = around(text), around(whole)
        assert square.x0 < words.x0 and words.x1 < square.x1 and square.y0 < words.y0 and words.y1 < square.y1, name
        small = [tagged(ax, f"{name} {place.name}")[0] for place in places[:-1]]
        large = [tagged(ax, f"{name} {place.name} large")[0] for place in places[:-1]]
        assert max(map(right, small)) <= x0 < x1 <= min(box.get_x() for box in large), f"{name}: a line leads elsewhere"
        low, high = min(box.get_y() for box in small), max(box.get_y() + box.get_height() for box in small)
        assert y0 == y1 and low <= y0 <= high
        assert large[0].get_y() <= y1 <= large[0].get_y() + large[0].get_height()
        for a, b in pairwise(large):
            assert b.get_x() == a.get_x() and b.get_y() >= a.get_y() + a.get_height()
        zoom = {round(b.get_width() / a.get_width(), 6) for a, b in zip(small, large, strict=True)}
        assert zoom == {numbers(ax.get_title(loc="left"))[-1]}, "the title says another factor"
        for box in (*small, *large):
            assert same_color(box.get_facecolor(), large[0].get_facecolor())
            assert not same_color(box.get_facecolor(), whole.get_facecolor())
    assert ax.get_aspect() == 1, "squares would not be squares"


def test_chips_of_the_map_stand_in_the_order_of_their_years_and_kinds_of_memory_are_named_at_their_bars():
    figure, _, data = drawn("gpu_map")
    sizes, speeds = figure.axes
    squares = [tagged(sizes, f"{name} HBM")[0] for name in data["chips"]]
    assert sorted(squares, key=lambda box: (-box.get_y(), box.get_x())) == squares, "read line by line"
    (zero,) = speeds.lines
    assert set(zero.get_xdata()) == {0}, "bars begin at the line"
    rows = {}
    for n, (chip, (places, link)) in enumerate(data["chips"].items()):
        for kind, speed in [*((place.name, place.speed) for place in places), ("link to other GPUs", link)]:
            for bar in tagged(speeds, f"{chip} {kind} speed"):
                rows.setdefault(kind, []).append(bar)
                assert bar.get_width() == speed and len(rows[kind]) == n + 1
                (text,) = [t for t in speeds.texts if t.get_text().startswith(f"{chip} ")
                           and abs(sum(around(t).intervaly) - sum(around(bar).intervaly)) < 8]  # fmt: skip
                assert_beside(text, [bar], "right", most=10)
                assert numbers(text.get_text().removeprefix(chip)) == [pytest.approx(speed / 1e12, rel=0.06)]
    assert [ax.get_title(loc="left").split(":")[0] for ax in figure.axes] == ["Size", "Speed"]
    none = around(named(speeds, "the makers print no figure"))
    assert 0 < none.x0 - around(zero).x1 < 10, "it stands where a bar would begin"
    assert list(rows) == ["registers", "shared memory", "HBM", "link to other GPUs"]
    for kind, bars in rows.items():
        text = named(speeds, kind)
        assert (
            0 < around(zero).x0 - around(text).x1 < 15
            and abs(sum(around(text).intervaly) - sum(around(*bars).intervaly)) < 10
        )
        steps = [b.get_y() - a.get_y() for a, b in pairwise(bars)]
        assert min(steps) > bars[0].get_height(), f"{kind}: bars lie on each other"


# Orders of dropout --------------------------------------------------------------------------------------------------


def test_a_mask_of_dropout_says_its_share_its_order_and_its_generator_and_has_lines_at_its_tiles():
    figure, _, data = drawn("dropout_orders")
    sides = list(data["masks"])
    for n, ax in enumerate(figure.axes):
        (squares,) = ax.patches
        corners = squares.get_path().vertices.reshape(-1, 5, 2)
        entries = next(iter(data["masks"].values()))["FA1"].size
        share = len(corners) / entries
        name, said = ax.get_title(loc="left").split(": ")
        assert name == ("FA1", "FA2", "Same fate")[n % 3] and said.endswith(" kept") == (n % 3 < 2)
        assert ax.get_aspect() == 1, "entries are squares"
        assert numbers(said) == [round(100 * (1 - share if n % 3 == 2 else share))], f"{sides[n // 3]}, {name}"
        assert same_color(squares.get_facecolor(), style.INK if n % 3 == 2 else style.hue("P"))
        upright = sorted(line.get_xdata()[0] for line in ax.lines if line.get_xdata()[0] == line.get_xdata()[1])
        level = sorted(line.get_ydata()[0] for line in ax.lines if line.get_ydata()[0] == line.get_ydata()[1])
        size = data["masks"][sides[0]]["FA1"].shape
        assert upright == list(range(0, size[1] + 1, data["B_c"])) and level == list(range(0, size[0] + 1, data["B_r"]))
        ends = {(*line.get_xdata(), *line.get_ydata()) for line in ax.lines}
        assert {(0, size[1], y, y) for y in level} | {(x, x, 0, size[0]) for x in upright} == ends
        assert ax.get_ylabel() == (f"{sides[n // 3]} generator" if n % 3 == 0 else "")
    notes = [ax.get_xlabel() for ax in figure.axes[-3:]]
    assert notes[0].startswith("pink: kept") and "Columns outside, rows inside" in notes[0], "FA1's loops"
    assert notes[1].startswith("pink: kept") and "Rows outside, columns inside" in notes[1], "FA2's loops"
    assert notes[2].startswith("black: ")


# Swizzles -----------------------------------------------------------------------------------------------------------


def test_heads_of_the_xor_stand_over_their_parts_and_say_the_steps_that_the_reads_take():
    figure, _, data = drawn("swizzle_xor")
    ax, chunk = figure.axes[0], data["chunk"]
    grids = {}
    for box in boxes(ax):
        if (box.get_gid() or "").startswith("chunk"):
            grids.setdefault(box.get_x() >= 26, []).append(box)
    for name, grid, reads in zip(data["places"], (grids[False], grids[True]), (0, 1), strict=True):
        counts = [
            int(label(sorted(tagged(ax, f"reads {place}"), key=lambda b: b.get_x())[reads])) for place in range(8)
        ]
        head = starting(ax, f"{name}: ")
        assert numbers(head.get_text()) == [max(counts)], "the slowest group of banks says how many steps"
        assert head.get_text().endswith("steps" if max(counts) > 1 else "step")
        assert_over(head, grid)
        dark = [box for box in grid if int(label(box)) == chunk]
        rest = [box for box in grid if int(label(box)) != chunk]
        assert len({box.get_facecolor() for box in dark}) == len({box.get_facecolor() for box in rest}) == 1
        assert style.luminance(dark[0].get_facecolor()) < style.luminance(rest[0].get_facecolor())
        assert sum(counts) == len(dark)
    first = [box for place in range(8) for box in tagged(ax, f"reads {place}") if box.get_x() < 26]
    assert_beside(starting(ax, "reads"), first, "left")
    bits = [t for t in ax.texts if re.fullmatch(r"\d = [01]{3}", t.get_text())]
    for kind in ("row", "chunk", "place"):
        column = [text for row in range(8) for text in tagged(ax, f"{kind} of {row}")]
        assert_over(named(ax, kind), column)
        assert {numbers(text.get_text())[0] for text in column} == ({chunk} if kind == "chunk" else set(range(8)))
    for place in range(8):
        tops = sorted(
            (t for t in ax.texts if t.get_text() == str(place) and t.get_position()[1] < 0),
            key=lambda t: t.get_position(),
        )
        for text, box in zip(tops, sorted(tagged(ax, f"reads {place}"), key=lambda b: b.get_x()), strict=True):
            assert sum(around(text).intervalx) == pytest.approx(sum(around(box).intervalx), abs=3), "over another group"
    head = starting(ax, "XOR of their bits")
    assert around(head).y0 > around(*bits).y1 and around(head).x0 < around(*bits).x0 < around(*bits).x1
    assert around(*bits).x1 < around(*grids[False]).x0
    assert numbers(ax.get_xlabel())[:2] == [128, 128 / 8] and f"Dark: chunk {chunk} of every row" in ax.get_xlabel()


def test_chunks_of_keys_are_said_to_lie_where_the_marked_ones_are():
    figure, alt, data = drawn("swizzled_keys")
    said = figure.get_supxlabel()
    shown = {int(gid.split(",")[0]) for gid in (box.get_gid() for ax in figure.axes for box in boxes(ax)) if gid}
    chunk = {int(box.get_gid().split(",")[1]) for ax in figure.axes for box in boxes(ax)
             if box.get_gid() and same_color(box.get_facecolor(), style.hue("K"))}  # fmt: skip
    assert {data["chunk"]} == chunk and f"chunk {data['chunk']} of K's rows {min(shown)} to {max(shown)}" in said
    assert data["made"] in said and "row-major" in said.lower() and "row-major" in alt
    for n, ax in enumerate(figure.axes):
        assert bool(ax.get_ylabel()) == (n % 3 == 0) and (n % 3 or numbers(ax.get_ylabel()) == [8 * 16])


# Orders of merging --------------------------------------------------------------------------------------------------


def state(text):
    """m, ℓ and o of a box."""
    return [float(n.replace("−", "-")) for n in re.findall(r"[−\d.]+$", text, re.M)]


def test_the_first_row_of_the_merges_has_each_block_s_own_state_over_its_name():
    figure, _, data = drawn("merge_orders")
    first, *orders = figure.axes
    assert len(boxes(first)) == len(data["leaves"]) and "state of each key block" in first.get_title(loc="left")
    for k, (box, leaf) in enumerate(zip(boxes(first), data["leaves"], strict=True)):
        assert state(label(box)) == pytest.approx([leaf.m, leaf.l, leaf.o], abs=6e-4), f"block {k + 1}"
        for ax in orders:
            (name,) = [b for b in boxes(ax) if label(b) == f"block {k + 1}"]
            assert around(name).x0 == pytest.approx(around(box).x0) and around(name).x1 == pytest.approx(around(box).x1)


def test_arrows_of_the_merges_go_from_border_to_border_and_each_order_has_the_shape_that_its_title_says():
    figure, _, data = drawn("merge_orders")
    leaves = len(data["leaves"])
    for ax, merges in zip(figure.axes[1:], data["orders"].values(), strict=True):
        found = boxes(ax)
        for arrow in arrows(ax):
            assert not any(runs_through(arrow, box) for box in found), f"an arrow from {arrow.xyann} runs through a box"
            assert arrow.arrow_patch.get_arrowstyle().arrow == "->", "its head is at its end"
            for x, y in (arrow.xyann, arrow.xy):
                edges = [(box.get_x(), box.get_y(), right(box), box.get_y() + box.get_height()) for box in found]
                assert any(x0 - 0.02 <= x <= x1 + 0.02 and y0 - 0.02 <= y <= y1 + 0.02 and
                           min(abs(x - x0), abs(x - x1), abs(y - y0), abs(y - y1)) < 0.02
                           for x0, y0, x1, y1 in edges), f"an arrow ends at {x}, {y}"  # fmt: skip
        depth, alone = {}, 0
        for n, node in enumerate(merges, leaves):
            depth[n] = 1 + max(depth.get(node.left, 0), depth.get(node.right, 0))
            alone += node.right >= leaves
        shape = {(leaves - 1, 0): "Loop", (np.log2(leaves), leaves // 2 - 1): "Tree", (leaves // 2, 1): "Split"}
        assert ax.get_title(loc="left").split(":")[0] == shape[max(depth.values()), alone]


# The stream of states -----------------------------------------------------------------------------------------------


def test_the_largest_score_so_far_goes_along_the_scores_and_all_panels_have_the_blocks_beneath():
    figure, _, data = drawn("state_stream")
    grid, top, *sums = figure.axes
    row, scores = data["row"], data["s"][:, data["row"]]
    (dots,) = [line for line in top.lines if line.get_marker() == "o"]
    assert dots.get_ydata().tolist() == scores.ravel().tolist()
    assert (dots.get_xdata().astype(int) == np.repeat(range(len(scores)), scores.shape[1])).all(), "each in its block"
    (steps,) = [patch.get_data() for patch in top.patches if isinstance(patch, StepPatch)]
    assert steps.values.tolist() == np.maximum.accumulate(scores.max(axis=1)).tolist()
    assert steps.edges.tolist() == list(range(len(scores) + 1))
    assert named(top, "m").get_position()[1] == steps.values[-1] and named(top, "m").get_position()[0] > len(scores)
    news = {j for j in range(1, len(scores)) if scores[j].max() > scores[:j].max()}
    for ax in (top, *sums):
        dashed = {line.get_xdata()[0] for line in ax.lines if len({*line.get_xdata()}) == 1 and line is not dots}
        assert dashed == news and ax.get_xlim() == grid.get_xlim()
    rows = {tick.label1.get_text(): tick.get_loc() for tick in grid.yaxis.get_major_ticks()}
    strong = {centre(box)[1] for box in boxes(grid) if same_color(box.get_edgecolor(), style.INK)}
    assert rows == {f"row {i}": i + 0.5 for i in range(data["s"].shape[1])} and strong == {rows[f"row {row}"]}
    assert f"row {row} is drawn below" in grid.get_title(loc="left")
    assert [ax.get_title(loc="left")[0] for ax in (top, *sums)] == ["m", "ℓ", "o"]
    assert sums[-1].get_xlabel() == "key blocks in the order they arrive →"


# The alternative text of the ideas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_ideas_that_are_said_to_be_kept_are_the_filled_bars(part):
    data = ideas.data(part)
    figure, alt = ideas.draw(**data)
    kept, dropped = (tagged(figure, gid) for gid in ("kept", "not kept"))
    assert numbers(figure.get_suptitle())[0] == len(kept) + len(dropped) == len(data["rows"])
    assert f"{len(kept)} were kept, {len(dropped)} were not" in alt
    names = {centre(bar)[1]: data["rows"][round(centre(bar)[1])]["idea"] for bar in dropped}
    assert all(name in alt.split("Not kept: ")[1] for name in names.values())
    best = max((*kept, *dropped), key=right)
    assert data["rows"][round(centre(best)[1])]["idea"] in alt.split("The largest gain: ")[1].split("Not kept")[0]
    assert all(same_color(bar.get_facecolor(), style.PAPER) for bar in dropped) and "open: not kept" in (
        figure.get_supxlabel()
    )
    assert data["setting"] in figure.get_supxlabel()
    ticks = {tick.label1.get_text(): tick.get_loc() for tick in figure.axes[0].xaxis.get_major_ticks()}
    assert len(ticks) >= 2 and all(float(said.removeprefix("× ")) == x for said, x in ticks.items())


# Every picture ------------------------------------------------------------------------------------------------------

PLAIN = ("bulk_copy", "backward_graph", "accumulators", "row_reduction", "intervals", "grouped_heads", "shares",
         "dropout_orders", "swizzle_xor", "swizzled_keys", "gpu_map", "merge_orders", "wgmma", "tickets",
         "visiting_order", "backward_step", "dq_over_time", "timeline", "block_budget", "workers", "pipes",
         "backward_pipes", "zigzag", "ragged_edge", "flop_costs", "ladder", "state_stream")  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_numbers_along_an_axis_stand_at_a_line_and_a_line_has_numbers(name):
    """Or the reader would take an empty edge for an axis, and places in a drawing for numbers."""
    figure = drawn(name)[0]
    for n, ax in enumerate(figure.axes):
        for axis, sides in ((ax.xaxis, ("bottom", "top")), (ax.yaxis, ("left", "right"))):
            low, high = sorted(axis.get_view_interval())
            near = 1e-9 * (high - low)
            ticks = [tick for tick in axis.get_major_ticks() if low - near <= tick.get_loc() <= high + near]
            marks = [tick for tick in ticks if tick.tick1line.get_visible() and tick.tick1line.get_markersize()]
            seen = any(ax.spines[side].get_visible() for side in sides)
            assert seen == bool(marks), f"axes {n}, {sides[0]}: {[tick.label1.get_text() for tick in marks]}"
