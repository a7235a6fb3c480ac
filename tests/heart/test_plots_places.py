"""What stands at which mark: names beside their lanes, heads over their columns, arrows between what they join."""

import re
from itertools import groupby, pairwise

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

from fa2_lab import records
from fa2_lab.plots import bulk_copy, ideas, style

# A bulk copy ------------------------------------------------------------------------------------------------------


def test_the_bulk_copy_s_arrow_leads_from_the_frame_s_middle_to_the_tile_s_middle():
    figure, _, data = drawn("bulk_copy")
    ax = figure.axes[0]
    (frame,), (arrow,) = tagged(ax, "tile"), arrows(ax)
    chunks = [box for box in boxes(ax) if re.match(r"(chunk|zero) \d", box.get_gid() or "")]
    assert len(chunks) == data["places"].size
    left, top = min(box.get_x() for box in chunks), min(box.get_y() for box in chunks)
    bottom = max(box.get_y() + box.get_height() for box in chunks)
    assert arrow.xyann == (pytest.approx(right(frame), abs=0.1), pytest.approx(centre(frame)[1], abs=0.01))
    assert arrow.xy == (pytest.approx(left, abs=0.1), pytest.approx((top + bottom) / 2)) and arrow.xy[0] <= left
    assert arrow.arrow_patch.get_arrowstyle().arrow == "-|>", "its head is at the tile"


def test_what_the_one_thread_names_is_a_list_in_the_order_of_the_alternative_text_with_the_tile_s_numbers():
    figure, alt, data = drawn("bulk_copy")
    ax, (rows, chunks) = figure.axes[0], data["places"].shape
    said = [t for t in ax.texts if re.match(r"\d\. ", t.get_text())]
    things = re.search(r"One thread names (.*?)\.", " ".join(alt.split()))[1]
    things = [thing.removeprefix("a ") for thing in re.split(r", | and ", things)]
    assert len(said) == len(things) == 4
    for n, (text, thing) in enumerate(zip(said, things, strict=True)):
        assert text.get_text().startswith(f"{n + 1}. ") and thing in text.get_text(), f"{n + 1} is no {thing}"
    assert numbers(said[0].get_text()) == [1, data["N"], 8 * chunks, rows], "8 numbers of 2 bytes in a chunk of 16"
    (row,) = tagged(ax, f"row {data['first']}")
    assert said[1].get_text() == f"2. {label(row)}"
    assert_over(starting(ax, "What the one thread"), said)
    steps = np.diff([t.get_position()[1] for t in said])
    assert (steps > 0).all() and steps == pytest.approx(steps[0]) and len({t.get_position()[0] for t in said}) == 1


@pytest.mark.parametrize("N", [4, 8, 9, 11])
def test_the_tile_of_a_bulk_copy_is_the_last_one_that_has_a_row(N):
    data = bulk_copy.data(N=N)
    assert data["first"] == max(range(0, N, 4)) and data["places"].shape == (4, 8)
    ax = bulk_copy.draw(**data)[0].axes[0]
    zeros = {box.get_gid().split()[1] for box in boxes(ax) if (box.get_gid() or "").startswith("zero")}
    assert zeros == {str(row) for row in range(4) if data["first"] + row >= N}


def test_heads_of_the_bulk_copy_stand_over_what_they_name_and_the_barrier_beneath_the_tile():
    figure, _, data = drawn("bulk_copy")
    ax = figure.axes[0]
    tile = [box for box in boxes(ax) if re.match(r"(chunk|zero) \d", box.get_gid() or "")]
    rows = [tagged(ax, f"row {n}")[0] for n in range(data["N"])]
    (barrier,), (frame,) = tagged(ax, "barrier"), tagged(ax, "tile")
    assert_over(starting(ax, "K in HBM"), rows)
    note = starting(ax, "a box: ")
    assert_over(note, tile)
    assert numbers(note.get_text()) == [data["bytes"] / data["places"].size], "bytes of a box"
    head = named(ax, "the tile in shared memory")
    assert_over(head, tile)
    assert around(head).y0 >= around(note).y1 - 1
    assert around(barrier).y1 < around(*tile).y0 and numbers(label(barrier)) == [data["bytes"]]
    assert (around(barrier).x0, around(barrier).x1) == pytest.approx((around(*tile).x0, around(*tile).x1))
    for n in range(len(data["places"])):
        line = [box for box in tile if box.get_gid().split()[1] == str(n)]
        assert_beside(named(ax, f"line {n}"), line, "right", most=15)
    assert frame.get_x() < rows[0].get_x() and right(rows[0]) < right(frame), "the frame goes round its rows"
    x0, x1 = around(named(ax, "outside")).intervalx
    assert (x0 + x1) / 2 == pytest.approx(sum(around(rows[0]).intervalx) / 2, abs=1)


# The backward's graph -----------------------------------------------------------------------------------------------


def test_arrows_of_the_backward_go_right_or_straight_down_and_through_no_box():
    graph = drawn("backward_graph")[0].axes[0]
    found = boxes(graph)
    for arrow in arrows(graph):
        (x0, y0), (x1, y1) = arrow.xyann, arrow.xy
        crossed = [label(box) for box in found if runs_through(arrow, box)]
        assert not crossed, f"an arrow runs through {crossed}"
        starts = [box for box in found if x0 == pytest.approx(right(box)) and 0 <= y0 - box.get_y() <= box.get_height()]
        ends = [box for box in found if x1 == pytest.approx(box.get_x()) and 0 <= y1 - box.get_y() <= box.get_height()]
        down = x0 == x1 and y0 < y1 and any(centre(box)[0] == pytest.approx(x0) for box in found)
        assert down or (len(starts) == len(ends) == 1 and x0 < x1), f"from {arrow.xyann} to {arrow.xy}"
        assert arrow.arrow_patch.get_arrowstyle().arrow == "-|>", "its head is at its end"
    crossings = [arrow for arrow in arrows(graph) if arrow.xy[0] - arrow.xyann[0] > 4]
    assert len(crossings) == 3 and all(arrow.xy[1] == arrow.xyann[1] for arrow in crossings)
    for box in found:  # what is not the tail of a level arrow is joined at the middle of a side
        for x, y in [arrow.xy for arrow in arrows(graph) if arrow not in crossings]:
            if x == pytest.approx(box.get_x()) and 0 <= y - box.get_y() <= box.get_height():
                assert y == pytest.approx(centre(box)[1]), label(box)


def test_heads_of_the_backward_s_columns_stand_over_the_middle_of_their_boxes():
    graph = drawn("backward_graph")[0].axes[0]
    found = {
        "loaded from": tagged(graph, "loaded"),
        "on chip only": tagged(graph, "again") + tagged(graph, "new"),
        "stored": tagged(graph, "result"),
    }
    assert [len(parts) for parts in found.values()] == [6, 4, 3]
    tops = set()
    for words, parts in found.items():
        text = starting(graph, words)
        head, body = around(text), around(*parts)
        assert (head.x0 + head.x1) / 2 == pytest.approx((body.x0 + body.x1) / 2, abs=2), f"{words} stands elsewhere"
        assert head.y0 > max(around(box).y1 for box in boxes(graph)), f"{words} stands among boxes"
        tops.add(round(head.y1))
        white = {same_color(box.get_facecolor(), style.PAPER) for box in parts}
        assert (True in white) == ("white: computed again" in text.get_text())
    assert max(tops) - min(tops) <= 4, "heads stand on one line"


def test_each_way_to_dq_has_its_count_before_it_its_loops_above_and_its_writers_behind():
    figure, _, data = drawn("backward_graph")
    ax = figure.axes[1]
    rows = {}
    for box in tagged(ax, "product"):
        rows.setdefault(box.get_y(), []).append(box)
    assert list(rows) == sorted(rows) and len(rows) == len(data["passes"])
    for parts, (name, loops) in zip(rows.values(), data["passes"].items(), strict=True):
        parts = sorted(parts, key=lambda box: box.get_x())
        count = starting(ax, f"{name}:")
        assert_beside(count, parts, "left")
        assert numbers(count.get_text()) == [len(parts)] == [sum(map(len, loops.values()))]
        apart = [b.get_x() - right(a) for a, b in pairwise(parts)]
        starts = [0, *(n + 1 for n, gap in enumerate(apart) if gap > 2 * min(apart))]
        cuts = [[label(box) for box in parts[a:b]] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        assert cuts == [list(products) for products in loops.values()], f"{name}: loops lie apart"
        heads = []
        for loop, start in zip(loops, starts, strict=True):
            (head,) = [t for t in ax.texts if t.get_text() == loop and abs(around(t).x0 - around(parts[start]).x0) < 2
                       and -1 < around(t).y0 - around(parts[start]).y1 < 12]  # fmt: skip
            heads.append(head)
        writers = data["dq_additions"] // data["T"] ** 2 * data["T"] if len(loops) == 1 else 1
        (told,) = [t for t in ax.texts if "block of dQ" in t.get_text() and around(t).x0 > around(*parts).x1
                   and abs(sum(around(t).intervaly) - sum(around(*parts).intervaly)) < 8]  # fmt: skip
        assert told.get_text().startswith(
            "one writer" if writers == 1 else f"all {writers} workers (T_c = {data['T']})"
        )
    assert len(ax.texts) == len(tagged(ax, "product")) + 2 * len(rows) + sum(map(len, data["passes"].values()))


# Accumulators -------------------------------------------------------------------------------------------------------


def test_a_tile_of_an_accumulator_has_its_name_at_its_upper_left_corner_and_its_size_to_scale():
    figure, _, data = drawn("accumulators")
    for ax, target in zip(figure.axes, ("sm_80", "sm_90"), strict=True):
        kernels = [k for k in data["kernels"] if k["target"] == target]
        frames, end = tagged(ax, "instruction"), -np.inf
        names = sorted(
            (t for t in ax.texts if not t.get_text().startswith("warp")), key=lambda text: text.get_position()[0]
        )
        tiles = [(kernel, tensor) for kernel in kernels for tensor in "SO"]
        for frame, name, (kernel, tensor) in zip(frames, names, tiles, strict=True):
            rows, cols = kernel[tensor].warp.shape
            left, top = frame.get_xy()
            strips = [box for box in boxes(ax) if box is not frame and left <= box.get_x() < left + cols]
            corners = [(b.get_x(), b.get_y(), right(b), b.get_y() + b.get_height()) for b in strips]
            assert (*np.min(corners, axis=0)[:2], *np.max(corners, axis=0)[2:]) == (left, top, left + cols, top + rows)
            assert name.get_text() == (f"S, d = {kernel['d']}" if tensor == "S" else "O")
            assert_over(name, strips, most=12)
            assert same_color(frame.get_edgecolor(), style.hue(tensor)) and not frame.get_fill()
            assert (frame.get_height(), frame.get_width()) == kernel["gives"][tensor], (
                f"{target}: another's instruction"
            )
            across, down = around(*strips).size
            assert across / down == pytest.approx(cols / rows), "tiles are drawn to scale"
            assert left > end, "tiles lie apart"
            end = left + cols
        assert {ax.get_title(loc="left").split(":")[0]} == {target}
        assert {kernel["instruction"] for kernel in kernels} == {ax.get_title(loc="left").split()[-2]}


# A row's reduction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["accumulators", "row_reduction"])
def test_what_was_compiled_says_with_which_compiler_and_tile(name):
    figure, alt, data = drawn(name)
    tile = records.recorded("layouts")["layouts"][0]
    made = [f"Triton {records.recorded('layouts')['made_by']['triton']}", f"{tile['B_r']} × {tile['B_c']}"]
    said = figure.get_supxlabel() or figure.axes[0].get_xlabel()
    assert said.startswith("Observed") and alt.startswith("Observed") and data["made"] in said
    assert all(words in said for words in (*made, f"{tile['warps']} warps"))
    assert ("The numbers are made up" in said) == ("scores" in data)


def test_columns_of_the_row_lie_side_by_side_and_the_dots_stand_where_columns_are_left_out():
    ax = drawn("row_reduction")[0].axes[0]
    scores = [tagged(ax, f"score {c}")[0] for c in [*range(12), *range(120, 128)]]
    steps = [b.get_x() - right(a) for a, b in pairwise(scores)]
    gap = steps.pop(11)
    assert np.abs(steps).max() < 1e-9 and gap > scores[0].get_width()
    rows = [tagged(ax, f"{name} 11")[0] for name in ("score", "lane", "register")]
    assert all(b.get_y() == pytest.approx(a.get_y() + a.get_height()) for a, b in pairwise(rows))
    dots, body = around(named(ax, "…")), around(*rows)
    last, first = around(scores[11]).x1, around(scores[12]).x0
    assert (dots.x0 + dots.x1) / 2 == pytest.approx((last + first) / 2, abs=1)
    assert body.y0 < dots.y0 and dots.y1 < body.y1


def test_heads_and_names_of_the_row_stand_at_its_boxes():
    figure, _, data = drawn("row_reduction")
    ax, shown = figure.axes[0], [*range(12), *range(120, 128)]
    heads = []
    for c in shown:
        top = around(tagged(ax, f"score {c}")[0]).y1
        heads += [t for t in ax.texts if t.get_text() == str(c) and 0 < around(t).y0 - top < 20]
    assert [text.get_text() for text in heads] == list(map(str, shown))
    for c, text in zip(shown, heads, strict=True):
        middles = [sum(around(part).intervalx) for part in (text, tagged(ax, f"score {c}")[0])]
        assert middles[0] == pytest.approx(middles[1], abs=2), f"{c} stands over another column"
    (arrow,) = arrows(ax)
    assert arrow.xyann[1] == pytest.approx(arrow.xy[1]) and arrow.arrow_patch.get_arrowstyle().arrow == "->"
    assert arrow.xyann[0] > arrow.xy[0] and arrow.get_text() == f"row {data['row']}"
    assert_beside(named(ax, "column"), heads, "left", most=25)
    for gid, name in (("score", "number"), ("lane", "lane"), ("register", "register")):
        assert_beside(named(ax, name), [tagged(ax, f"{gid} {c}")[0] for c in shown], "left", most=15)
    head = named(ax, f"Row {data['row']}, column by column")
    assert_over(head, [tagged(ax, f"score {c}")[0] for c in shown], most=60)
    assert around(head).y0 > max(around(text).y1 for text in heads)
    held = int(((data["owners"].warp == 1) & (data["owners"].lane == 20)).sum())
    head = starting(ax, "What one wgmma computes")
    assert_over(head, [tagged(ax, f"warp {w}")[0] for w in range(4)])
    assert numbers(head.get_text()) == [20, 1, held]
    lanes = [named(ax, f"lane {lane}") for lane in (20, 21, 22, 23)]
    known = [tagged(ax, f"known 0 {lane}")[0] for lane in (20, 21, 22, 23)]
    assert_over(starting(ax, f"The maximum of row {data['row']}"), known, most=60)
    assert around(starting(ax, f"The maximum of row {data['row']}")).y0 > max(around(text).y1 for text in lanes)
    for text, box in zip(lanes, known, strict=True):
        assert_over(text, [box], most=20)


# Ideas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_bar_of_an_idea_has_its_own_factors_behind_it_where_neither_bar_nor_line_is(part):
    data = ideas.data(part)
    ax = ideas.draw(**data)[0].axes[0]
    bars = {centre(bar)[1]: bar for gid in ("kept", "not kept") for bar in tagged(ax, gid)}
    (one,) = (line for line in ax.lines if len({*line.get_xdata()}) == 1)
    assert set(one.get_xdata()) == {1} and len(bars) == len(ax.texts) == len(data["rows"])
    axis = around(one).x1
    for lane, row in enumerate(data["rows"]):
        (text,) = [t for t in ax.texts if t.xy[1] == lane]
        bar = bars[lane]
        said = numbers(text.get_text())
        assert [said[0], said[-1]] == [float(f"{row[end]:.2f}") for end in ("low", "high")], row["idea"]
        words, body = around(text), around(bar)
        assert abs(words.y0 + words.y1 - body.y0 - body.y1) <= 8, f"{row['idea']}: at another bar"
        assert 0 < words.x0 - max(body.x1, axis) < 12, f"{row['idea']}: its factors stand elsewhere"
        assert body.x0 < axis < body.x1 or (body.x0 > axis - 1) == (row["low"] >= 1), row["idea"]


def test_the_end_of_an_idea_s_reach_that_changes_most_is_its_worth():
    reaches = {(0.5, 1.2): 0.5, (0.9, 1.2): 1.2, (1.1, 1.4): 1.4, (0.6, 0.8): 0.6}
    assert {(low, high): ideas.worth(dict(low=low, high=high)) for low, high in reaches} == reaches


def test_tables_of_ideas_have_a_cell_for_every_column_and_the_rows_of_their_part():
    earlier = records.recorded("earlier_ideas")["rows"]
    for part in {row["part"] for row in earlier}:
        head, rule, *lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in
                              ideas.earlier_table(part).split("\n")]  # fmt: skip
        assert len(head) == 3 and rule == ["---"] * 3
        mine = [row for row in earlier if row["part"] == part]
        assert lines == [[row["idea"], row["shape"], row["bought"]] for row in mine], part
    for part in ("forward", "backward", "decode"):
        head, rule, *lines = ideas.ideas_table(part).split("\n")
        columns = len(head.split("|"))
        assert (
            columns > 3 and set(rule) == set("|- ") and {len(line.split("|")) for line in (rule, *lines)} == {columns}
        )


# Intervals ----------------------------------------------------------------------------------------------------------


def test_an_interval_s_numbers_stand_at_the_end_of_its_bar_on_paper():
    figure, _, data = drawn("intervals")
    for ax in figure.axes[: len(data["masks"])]:
        (bar,) = tagged(ax, "row")
        (text,) = [t for t in ax.texts if t.get_text().startswith("[")]
        assert text.get_text() == f"[{bar.get_x():.0f}, {right(bar):.0f})"
        side = "left" if text.get_position()[0] < bar.get_x() else "right"
        assert_beside(text, [bar], side, most=8)
        assert text.get_position()[1] == centre(bar)[1]
        words, grid = around(text), around(*[p for p in boxes(ax) if p.get_gid() in ("FULL", "DIAGONAL", "SKIP")])
        assert grid.x0 <= words.x0 and words.x1 <= grid.x1, "numbers leave the matrix"
        assert same_color(text.get_bbox_patch().get_facecolor(), style.PAPER)


def test_two_lines_go_along_the_first_and_the_last_key_that_each_row_sees():
    figure, _, data = drawn("intervals")
    r, c = np.indices((data["N"], data["N"]))
    for ax, (name, parts) in zip(figure.axes, data["masks"].items(), strict=False):
        begins = [start for start, _ in parts]
        document = np.searchsorted(begins, range(data["N"]), "right")
        seen = (document[:, None] == document) & (np.ones((), bool) if name.startswith("window") else c <= r)
        if found := re.search(r"(\d+) to the left|window \((\d+), (\d+)\)", name):
            seen &= r - c <= int(found[1] or found[2])
            seen &= c - r <= int(found[3] or 0)
        seen &= c < (20 if "padded" in name else data["N"])
        ends = {"first": seen.argmax(axis=1), "last": data["N"] - seen[:, ::-1].argmax(axis=1)}
        steps = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
        assert len(steps) == 2 * len(parts)
        for k, end in enumerate(ends.values()):
            for part, step in zip(parts, steps[k::2], strict=True):
                rows = slice(part[0], part[0] + part[1].N_q)
                way = [(x, y) for row, x in zip(range(rows.start, rows.stop), end[rows], strict=True)
                       for y in (row, row + 1)]  # fmt: skip
                shown, way = ([point for point, _ in groupby(points)] for points in (
                    map(tuple, step.get_path().vertices), way))  # fmt: skip
                assert shown == way, f"{name}: a line runs elsewhere"
    for ax in figure.axes[3:4]:
        assert int(starting(ax, "[").get_text().split()[1][:-1]) == 20, "keys behind the padding are not seen"


def test_the_row_of_the_intervals_is_named_before_its_bar_and_the_sink_lies_left_of_the_keys():
    figure, _, data = drawn("intervals")
    for n in (0, 3):
        (bar,) = tagged(figure.axes[n], "row")
        text = named(figure.axes[n], f"row {data['row']}")
        assert text.get_position()[1] == centre(bar)[1]
        assert_beside(text, [bar], "left", most=8)
    for ax, name in zip(figure.axes, data["masks"], strict=False):
        tiles = [p for p in boxes(ax) if p.get_gid() in ("FULL", "DIAGONAL", "SKIP")]
        sinks = tagged(ax, "sink")
        assert bool(sinks) == ("sink" in name)
        for sink in sinks:
            assert around(sink).x1 < around(*tiles).x0 and around(sink).intervaly == pytest.approx(
                around(*tiles).intervaly
            )
            words = around(starting(ax, "sink"))
            assert around(sink).x0 <= words.x0 and words.x1 <= around(sink).x1
    for n, ax in enumerate(figure.axes[:6]):
        assert (ax.get_ylabel(), ax.get_xlabel()) == ("← queries" * (n % 3 == 0), "keys →" * (n >= 3))


def test_a_mask_s_title_counts_all_of_its_tiles_and_between_documents_all_is_hatched():
    figure, _, data = drawn("intervals")
    for ax, (name, parts) in zip(figure.axes, data["masks"].items(), strict=False):
        tiles, outside = [p for p in boxes(ax) if p.get_gid() in ("FULL", "DIAGONAL", "SKIP")], tagged(ax, "outside")
        head, counted = ax.get_title(loc="left").split("\n")
        visited = sum(p.get_gid() != "SKIP" for p in tiles)
        assert head == name and numbers(counted) == [visited, *([len(tiles)] if len(parts) == 1 else [])], name
        assert counted.endswith("tiles of their own" if len(parts) > 1 else f"of {len(tiles)} tiles")
        assert len(outside) == (len(parts) > 1)
        for box in outside:
            assert (box.get_x(), box.get_y(), box.get_width(), box.get_height()) == (0, 0, data["N"], data["N"])
            (look,) = {(p.get_hatch(), p.get_facecolor()) for p in tiles if p.get_gid() == "SKIP"}
            assert (box.get_hatch(), box.get_facecolor()) == look, (
                "what no document sees looks as what is never visited"
            )
        assert around(*tiles).width == pytest.approx(around(*tiles).height), "as many queries as keys"


# Tickets ------------------------------------------------------------------------------------------------------------


def test_the_setting_of_the_tickets_has_the_numbers_of_the_schedules():
    figure, alt, data = drawn("tickets")
    heads, N, _, SMs, B_r = numbers(figure.get_supxlabel())
    assert figure.get_supxlabel() == data["setting"] and data["setting"] in alt
    for schedule in data["ran"].values():
        assert len(schedule.placed) == heads * N / B_r and schedule.SMs == SMs
        costs = sorted({p.end - p.start for p in schedule.placed})
        assert costs == list(range(1, int(N / B_r) + 1)), "a causal row block visits tiles up to its diagonal"
    assert numbers(figure.axes[0].get_ylabel()) == [SMs]
    abreast = list(data["ran"].values())[2].placed[:5]
    longest = [p.end - p.start for p in sorted(abreast, key=lambda p: p.block)].count(N / B_r)
    assert [numbers(name) for name in data["ran"]] == [[], [longest], []], "as many heads at once as the title says"
    assert [ax.get_title(loc="left").split(":")[0] for ax in figure.axes] == list(data["ran"])


def test_the_end_of_a_schedule_is_written_before_its_line_and_all_have_one_scale():
    figure, _, data = drawn("tickets")
    scales = set()
    for ax in figure.axes:
        (end,), (text,) = tagged(ax, "end"), ax.texts
        line, words = around(end), around(text)
        assert 0 < line.x0 - words.x1 < 10, "its number stands elsewhere"
        assert ax.bbox.y0 < words.y0 and words.y1 < ax.bbox.y1 and ax.bbox.x0 < words.x0
        assert same_color(text.get_bbox_patch().get_facecolor(), style.PAPER), "on bars it would not be read"
        scales.add((*ax.get_xlim(), *ax.get_ylim()))
        corners = tagged(ax, "load")[0].get_path().vertices.reshape(-1, 5, 2)
        assert (corners[:, :, 0].min(axis=1) == 0).all() and (np.ptp(corners[:, :, 1], axis=1) == 1).all(), (
            "an SM, a line"
        )
        ticks = {tick.label1.get_text(): tick.get_loc() for tick in ax.xaxis.get_major_ticks()}
        assert len(ticks) >= 3 and all(float(said) == x for said, x in ticks.items())
        assert not ax.get_yticks().size and ax.get_xlabel() == "time in tiles →"
    assert len(scales) == 1
    ((x0, x1, y0, y1),) = scales
    assert x0 == 0 and y1 == 0 and y0 == next(iter(data["ran"].values())).SMs
    assert x1 == pytest.approx(max(s.makespan for s in data["ran"].values()), rel=0.1)


# Grouped heads ------------------------------------------------------------------------------------------------------


def test_a_layout_of_heads_says_how_many_it_has_and_which_share_of_the_memory():
    figure, _, data = drawn("grouped_heads")
    queries = data["heads"]
    for column, (name, layout) in enumerate(data["layouts"].items()):
        above, below = figure.axes[column], figure.axes[column + 3]
        kept = sum(label(box) == "K" for box in boxes(above))
        head, foot = above.get_title(loc="left"), above.get_xlabel()
        assert head == f"{name}: {kept} key head" + "s" * (kept > 1) and kept == layout["key_heads"]
        share = [] if kept == queries else [1, queries / kept]
        assert numbers(foot) == [kept, *share] and ("of the memory" in foot) == bool(share)
        terms = len(arrows(below)) / sum(label(box) == "dK" for box in boxes(below))
        assert numbers(below.get_xlabel()) == [terms] * (terms > 1), "terms of a sum"
    sides = [figure.axes[n].get_ylabel().split(": ") for n in (0, 3)]
    assert sides == [["forward", "reads"], ["backward", "adds"]]


def test_lines_and_arrows_of_heads_lead_from_the_foot_of_a_query_to_the_top_of_its_key():
    figure, _, data = drawn("grouped_heads")
    for n, ax in enumerate(figure.axes):
        layout = list(data["layouts"].values())[n % 3]
        queries = [box for box in boxes(ax) if label(box).isdigit()]
        keys = [box for box in boxes(ax) if label(box) in ("K", "dK")]
        values = [box for box in boxes(ax) if label(box) in ("V", "dV")]
        if n < 3:
            ways = [tuple(map(tuple, line.get_xydata())) for line in ax.lines]
        else:
            ways = [(arrow.xyann, arrow.xy) for arrow in arrows(ax)]
            assert all(arrow.arrow_patch.get_arrowstyle().arrow == "->" for arrow in arrows(ax)), "heads at the keys"
        pairs = set()
        for (x0, y0), (x1, y1) in ways:
            (query,) = [box for box in queries if centre(box)[0] == x0]
            (key,) = [k for k, box in enumerate(keys) if centre(box)[0] == pytest.approx(x1)]
            assert y0 == query.get_y() + query.get_height() and y1 == pytest.approx(keys[key].get_y())
            pairs.add((int(label(query)), key))
        assert pairs == set(layout["reads" if n < 3 else "adds"]) and len(pairs) == len(ways)
        for key, value in zip(keys, values, strict=True):
            assert (value.get_x(), value.get_width()) == (key.get_x(), key.get_width())
            assert value.get_y() >= key.get_y() + key.get_height(), "V lies beneath its K"
        assert_beside(named(ax, "Q" if n < 3 else "dO"), queries, "left")
        for box in (*queries, *keys, *values):
            letter = label(box)[-1] if label(box)[-1] in "KV" else "Q" if n < 3 else "O"
            assert same_color(box.get_edgecolor(), style.hue(letter)), f"{label(box)} has another tensor's colour"
