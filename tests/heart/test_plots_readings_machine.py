"""Pictures of loops, of tensor cores and of who writes dQ, read back against their data: see test_plots_readings.py."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import same_color
from picture_places import around, assert_beside, assert_level, assert_over, named, numbers, redrawn, right, ticks
from pictures import boxes, drawn, label, tagged

from fa2_lab.plots import style, visiting_order


def plain(text):
    return " ".join(text.split())


def spans(found):
    return [(box.get_x(), right(box)) for box in found]


def meet(some, others):
    """Whether a box of some runs at the same time as one of others."""
    return any(a < d - 1e-6 and c < b - 1e-6 for a, b in spans(some) for c, d in spans(others))


# The order of visits ------------------------------------------------------------------------------------------------

ORDERS = pytest.mark.parametrize(
    "made", [{}, dict(N=10, d=2, B_r=2, B_c=4)], ids=["the book's tiles", "other tiles, the last one ragged"]
)


@ORDERS
def test_a_tile_bears_the_number_of_its_visit_in_the_log_with_queries_down_and_keys_right(made):
    figure, alt, data = redrawn("visiting_order", made)
    T_r, T_c = data["T_r"], data["T_c"]
    for ax, below, (name, log) in zip(figure.axes[:2], figure.axes[2:], data["events"].items(), strict=True):
        order = {}
        for event in log:
            if None not in (event.i, event.j):
                order.setdefault((event.i, event.j), len(order) + 1)
        assert len(order) == len(boxes(ax)) == T_r * T_c, f"{name}: a box for each tile"
        for box in boxes(ax):
            i, j = round(box.get_y()), round(box.get_x())
            assert label(box) == str(order[i, j]), f"{name}: query block {i}, key block {j} has another's number"
            assert (box.get_width(), box.get_height()) == (1, 1)
            assert np.ptp(_shares(box.get_facecolor(), style.hue("S"))) < 0.05, "tiles are S's"
        (down, up), (left, far) = ax.get_ylim(), ax.get_xlim()
        assert down > up and left < far, f"{name}: query block 0 is on top, key block 0 on the left"
        assert (ax.get_xlabel(), ax.xaxis.get_label_position()) == ("keys →", "top") and ax.get_ylabel() == "← queries"
        inner = "rows" if order.get((1, 0)) == 2 else "columns"
        assert ax.get_title(loc="left").startswith(f"{name}: ")
        assert ax.get_title(loc="left").endswith(f"{inner} inside"), f"{name}: the log says {inner} inside"
        tiles, traffic = around(*boxes(ax)), around(*boxes(below))
        assert traffic.x0 < sum(tiles.intervalx) / 2 and traffic.y1 < tiles.y0, f"{name}: its traffic lies beneath"
        way = {"rows": "down the columns", "columns": "along the rows"}[inner]
        assert f"{name}{' goes' * (name == 'FA1')} {way}" in alt
    assert f"{T_r} by {T_c} tiles" in alt


def _shares(color, hue):
    """How much of a hue is in each channel of a colour, the rest being paper."""
    return (1 - np.array(color[:3])) / (1 - np.array(style.colors.to_rgb(hue)) + 1e-9)


@ORDERS
def test_a_load_is_filled_and_a_store_open_at_its_time_in_its_tensor_s_lane(made):
    figure, _, data = redrawn("visiting_order", made)
    longest = max(map(len, data["events"].values()))
    for ax, (name, log) in zip(figure.axes[2:], data["events"].items(), strict=True):
        lanes = ticks(ax.yaxis)
        assert list(lanes) == [style.ell(t) for t in "QKVOlmL" if t in {e.tensor for e in log}], f"{name}: its lanes"
        heights = [ax.transData.transform((0, y))[1] for y in lanes.values()]
        assert all(b < a for a, b in pairwise(heights)), "Q is on top"
        marks = sorted(boxes(ax), key=lambda box: box.get_x())
        assert len(marks) == len(log)
        for time, (box, event) in enumerate(zip(marks, log, strict=True)):
            what, hue = f"{name}, event {time}: {event.op} of {event.tensor}", style.hue(event.tensor)
            middle = box.get_y() + box.get_height() / 2
            assert middle == pytest.approx(lanes[style.ell(event.tensor)]), f"{what} stands in another lane"
            assert (box.get_x(), box.get_width()) == (time, 1), f"{what} stands at another time"
            fill = hue if event.op == "load" else style.PAPER
            assert same_color(box.get_facecolor(), fill) and same_color(box.get_edgecolor(), hue), f"{what}: its look"
        assert ax.get_xlim() == figure.axes[2].get_xlim() and ax.get_xlim()[1] > longest > 0, "one clock for both"
    assert "filled: load, open: store" in figure.axes[2].get_xlabel()


@ORDERS
def test_a_lane_of_the_traffic_ends_in_its_elements_and_the_axis_and_the_alternative_text_in_their_sum(made):
    figure, alt, data = redrawn("visiting_order", made)
    for ax, (name, log) in zip(figure.axes[2:], data["events"].items(), strict=True):
        moved = Counter()
        for event in log:
            moved[style.ell(event.tensor)] += event.elements
        head, clock_end = named(ax, "elements"), ax.transData.transform((len(log), 0))[0]
        counts = [text for text in ax.texts if text is not head]
        assert len(counts) == len(moved)
        for text, (tensor, y) in zip(sorted(counts, key=lambda t: -around(t).y0), ticks(ax.yaxis).items(), strict=True):
            assert text.get_text() == f"{moved[tensor]:,}", f"{name}: {tensor} has another's number"
            lane = [box for box in boxes(ax) if box.get_y() < y < box.get_y() + box.get_height()]
            assert_level(text, *lane)
            assert around(text).x0 - clock_end > 5, f"{text.get_text()} touches the last event"
        assert_over(head, counts)
        total = sum(event.elements for event in log)
        assert f"({total:,} elements;" in ax.get_xlabel() and ax.get_xlabel().startswith("time →"), name
        assert f"{name} moves {total:,}" in alt


def test_what_the_title_says_of_o_l_and_m_is_in_the_logs():
    data = drawn("visiting_order")[2]
    title = drawn("visiting_order")[0].get_suptitle()
    ops = {name: Counter((e.op, e.tensor) for e in log if None not in (e.i, e.j)) for name, log in
           data["events"].items()}  # fmt: skip
    assert all(ops["FA1"][op, t] == data["T_r"] * data["T_c"] for op in ("load", "store") for t in "Olm")
    assert "FA1 moves O, ℓ and m through HBM at every tile" in title and title.endswith("FA2 keeps them on chip")
    assert {(e.op, e.tensor) for e in data["events"]["FA2"] if e.tensor in "OlmL"} == {("store", "O"), ("store", "L")}
    alone, _ = visiting_order.draw(**data | dict(events=dict(FA1=data["events"]["FA1"])))
    grid, timeline = alone.axes
    assert "FA2" not in alone.get_suptitle() and around(timeline).x0 > around(grid).x1, "the traffic stands beside it"


# Copies, products and exponentials over time ------------------------------------------------------------------------

RUNS = pytest.mark.parametrize("made", [{}, dict(d=128, T=8, window=4000)], ids=["d = 64", "d = 128, a shorter window"])
LOOKS = {"K": "K", "V": "V", "S": "S", "PV": "O", "P": "P"}  # a product P V is O's
UNITS = {"copies of K, V": "copy", "tensor cores": "tensor", "exponentials": "exp"}


def lanes(ax):
    return [text for text in ax.texts if text.get_text().startswith(tuple(UNITS))]


def lane_of(ax, box):
    """The text left of a box at the height of its lane."""
    middle = sum(around(box).intervaly) / 2
    return min(lanes(ax), key=lambda t: abs(sum(around(t).intervaly) / 2 - middle))


@RUNS
def test_a_box_of_the_timeline_is_one_job_of_its_lane_s_unit_and_warpgroup_in_its_tensor_s_colour(made):
    figure, _, data = redrawn("timeline", made)
    window, letters = data["window"], {style.colors.to_hex(style.hue(hue)): kind for kind, hue in LOOKS.items()}
    for ax, panel in zip(figure.axes, data["panels"], strict=True):
        shown, wanted, tiles = Counter(), Counter(), set()
        names = [t.get_text() for t in sorted(lanes(ax), key=lambda t: -around(t).y0)]
        assert names == [*UNITS][:1] + [f"{unit}, {c}" for unit in [*UNITS][1:] for c in (0, 1)], "lanes from the top"
        for box in boxes(ax):
            kind = letters[style.colors.to_hex(box.get_edgecolor())]
            assert same_color(box.get_facecolor(), style.fill(LOOKS[kind])), f"{kind}: filled with another's colour"
            name = lane_of(ax, box)
            assert around(name).x1 < ax.transData.transform((0, 0))[0], f"{name.get_text()} does not stand before it"
            unit, *consumer = name.get_text().rsplit(", ", 1 if name.get_text()[-1].isdigit() else 0)
            shown[(UNITS[unit], int(consumer[0]) if consumer else None, kind, *spans([box])[0])] += 1
            if label(box):
                tiles.add((UNITS[unit], int(consumer[0]), label(box), box.get_x()))
        for unit, consumer, what, begun, ended in panel["jobs"]:
            if begun < window:
                wanted[unit, consumer, what.split()[0], begun, min(ended, window)] += 1
        assert shown == wanted, f"{panel['name']}: too many {shown - wanted}, missing {wanted - shown}"
        said = {(u, c, what.replace(" ", ""), begun) for u, c, what, begun, _ in panel["jobs"] if begun < window}
        assert tiles <= said, f"{panel['name']}: numbers of other tiles: {tiles - said}"
        wide = {box for box in boxes(ax) if box.get_width() > window / 25 and box.get_gid() != "copy"}
        assert all(label(box) for box in wide) and len(tiles) >= 8


@RUNS
def test_copies_of_k_lie_above_those_of_v_and_each_slot_has_a_height_of_its_own(made):
    figure, _, data = redrawn("timeline", made)
    slots = {}
    for ax, panel in zip(figure.axes, data["panels"], strict=True):
        copies = tagged(ax, "copy")
        for _, _, what, begun, ended in [job for job in panel["jobs"] if job[0] == "copy" and job[3] < data["window"]]:
            tensor, number = what.split()
            found = [box for box in copies if spans([box]) == [(begun, min(ended, data["window"]))]
                     and same_color(box.get_edgecolor(), style.hue(tensor))]  # fmt: skip
            assert found, f"{panel['name']}: no copy of {what} at {begun:.0f}"
            if len(found) == 1:
                slots.setdefault((tensor, int(number) % 2), set()).add(round(found[0].get_y(), 6))
        for a in copies:
            over = [b for b in copies if b is not a and meet([a], [b]) and abs(b.get_y() - a.get_y()) < a.get_height()]
            assert not over, f"{panel['name']}: two copies lie on each other"
    assert all(len(rows) == 1 for rows in slots.values()) and len(slots) == len(set.union(*slots.values())) == 4, slots
    heights = {key: figure.axes[0].transData.transform((0, *rows))[1] for key, rows in slots.items()}
    assert min(heights["K", n] for n in (0, 1)) > max(heights["V", n] for n in (0, 1)), "K's copies lie above V's"


@RUNS
def test_clocks_of_the_timeline_begin_with_the_first_copy_and_shares_are_those_of_the_jobs(made):
    figure, alt, data = redrawn("timeline", made)
    last = figure.axes[-1]
    assert all(ax.get_xlim() == last.get_xlim() and ax.get_xscale() == "linear" for ax in figure.axes)
    places = ticks(last.xaxis)
    assert all(float(said) == clock for said, clock in places.items()) and len(places) >= 3 and 0 in places.values()
    assert last.get_xlim()[1] == data["window"] == max(right(box) for box in boxes(last))
    assert last.get_xlabel() == f"clocks of one SM → ({data['setting']})" and f"({data['setting']})" in alt
    shown = [ax for ax in figure.axes if any(t.label1.get_visible() for t in ax.xaxis.get_major_ticks())]
    assert shown == [last], "the lowest panel has the numbers"
    for ax, panel in zip(figure.axes, data["panels"], strict=True):
        assert min(box.get_x() for box in boxes(ax)) == 0 == min(job[3] for job in panel["jobs"])
        tensor = sorted(job[3:] for job in panel["jobs"] if job[0] == "tensor")
        busy = reached = 0
        for begun, ended in tensor:
            busy, reached = busy + max(0, ended - max(begun, reached)), max(reached, ended)
        start = min(job[4] for job in panel["jobs"] if job[0] == "copy")  # before, there is nothing to multiply
        share = f"{busy / (max(job[4] for job in panel['jobs']) - start):.0%}"
        assert ax.get_title(loc="left") == f"{panel['name']}: tensor cores busy {share}"
        assert f"{panel['name']}: tensor cores busy {share} of the time" in plain(alt)
    assert f"H200, d = {made.get('d', 64)}, two tiles of 64 × 128" in data["setting"]


def test_what_the_manners_are_called_is_what_their_boxes_do():
    figure, _, data = drawn("timeline")
    names = [panel["name"].split(":")[0] for panel in data["panels"]]
    assert names == ["Neither", "Within", "Between", "Both"]
    for ax, name in zip(figure.axes, names, strict=True):
        found = {}
        for box in boxes(ax):
            found.setdefault(lane_of(ax, box).get_text(), []).append(box)
        tensor, exp = ([found[f"{unit}, {c}"] for c in (0, 1)] for unit in ("tensor cores", "exponentials"))
        own = any(meet(tensor[c], exp[c]) for c in (0, 1))
        other = any(meet(tensor[c], exp[1 - c]) for c in (0, 1))
        together = meet(*tensor)
        within, between = name in ("Within", "Both"), name in ("Between", "Both")
        assert own == within, f"{name}: a warpgroup's own products and exponentials"
        assert together != between, f"{name}: products of both warpgroups"
        assert other == (within or between), f"{name}: one's products, the other's exponentials"


# What one product of a warpgroup reads ------------------------------------------------------------------------------

PRODUCTS = pytest.mark.parametrize("made", [{}, dict(d=64), dict(B_c=96)], ids=["128 × 128", "d = 64", "96 keys"])


def matrix(ax, tensor, name):
    return tagged(ax, f"{name} whole") or [box for box in boxes(ax) if re.match(rf"{tensor} of warp", box.get_gid())]


@PRODUCTS
def test_matrices_of_a_product_are_to_one_scale_in_their_colours_with_name_shape_and_place(made):
    figure, _, data = redrawn("wgmma", made)
    ax, scales = figure.axes[0], set()
    assert ax.get_aspect() == 1 and ax.get_ylim()[0] > ax.get_ylim()[1], "squares are squares, and rows go down"
    for product in data["products"]:
        for tensor, name, (rows, cols), place in product:
            parts = matrix(ax, tensor, name)
            whole = around(*parts)
            scales |= {round(whole.width / cols, 1), round(whole.height / rows, 1)}
            look = [same_color(p.get_facecolor(), style.fill(tensor)) and same_color(p.get_edgecolor(),
                    style.hue(tensor)) for p in parts]  # fmt: skip
            assert all(look), f"{name} has another tensor's colour"
            assert_over(named(ax, f"{name}  {rows} × {cols}"), parts, most=15)
            beneath = [t for t in ax.texts if abs(around(t).x0 - whole.x0) < 3 and 0 <= whole.y0 - around(t).y1 < 15]
            assert [t.get_text() for t in beneath] == [place], f"{name} lies in {place}"
            assert (len(parts) == 1) == (place == "shared memory"), f"{name}: registers are shared out among warps"
    assert max(scales) - min(scales) <= 0.2, f"matrices have scales of their own: {scales}"
    places = [matrix_[3] for product in data["products"] for matrix_ in product[1:]]
    assert places == 2 * ["shared memory", "registers"], "the title says where right factor and result lie"
    assert figure.get_suptitle() == "The right factor comes from shared memory, and the result stays in registers"


@PRODUCTS
def test_factors_stand_left_and_right_of_the_times_and_the_result_behind_the_equals_sign(made):
    figure, _, data = redrawn("wgmma", made)
    ax, bottoms = figure.axes[0], []
    signs = sorted((t for t in ax.texts if t.get_text() in "×="), key=lambda t: (-round(around(t).y0), around(t).x0))
    assert [t.get_text() for t in signs] == ["×", "=", "×", "="]
    for k, product in enumerate(data["products"]):
        found = [matrix(ax, tensor, name) for tensor, name, *_ in product]
        for sign, before, after in zip(signs[2 * k :], found, found[1:], strict=False):
            assert around(*before).x1 < around(sign).x0 and around(sign).x1 < around(*after).x0, (
                f"{sign.get_text()} of product {k} stands elsewhere"
            )
            assert_level(sign, *before)
            assert_level(sign, *after)
        bottoms.append((max(around(*parts).y1 for parts in found), min(around(*parts).y0 for parts in found)))
    assert bottoms[1][0] < bottoms[0][1], "the second product lies beneath the first"


@PRODUCTS
def test_the_frames_are_one_instruction_and_warps_hold_their_rows(made):
    figure, alt, data = redrawn("wgmma", made)
    ax, deep = figure.axes[0], data["deep"]
    frames = {(round(f.get_x(), 6), round(f.get_y(), 6)): f for f in tagged(ax, "one wgmma")}
    assert len(frames) == len(tagged(ax, "one wgmma")) == 4, "a frame for each factor, none for results"
    for left, over, result in data["products"]:
        for (tensor, name, (rows, cols), _), side in ((left, 1), (over, 0)):
            parts, shape = matrix(ax, tensor, name), [rows, cols]
            frame = frames.pop((round(parts[0].get_x(), 6), round(min(p.get_y() for p in parts), 6)), None)
            assert frame is not None and not frame.get_fill(), f"{name}: no frame at its upper left corner"
            shape[side] = deep
            size = around(*parts).width / cols
            found = [frame.get_window_extent().height / size, frame.get_window_extent().width / size]
            assert found == pytest.approx(shape, abs=0.5), f"{name}: the frame is {found}, and one wgmma takes {shape}"
        steps = f"{result[1]} = {left[1]} {over[1]}: {left[1]} lies in {left[3]}, {left[2][1] // deep} instructions"
        assert steps in plain(alt) and left[2][1] == over[2][0]
        for tensor, name, (rows, _), place in (left, over, result):
            strips = matrix(ax, tensor, name) if place == "registers" else []
            top = around(*strips).y1 if strips else 0
            for strip in strips:
                w = int(label(strip).removeprefix("warp "))
                rows_of = [k for k, owner in enumerate(data["warps"]) if owner == w]
                high = around(*strips).height / rows
                edges = [(top - around(strip).y1) / high, (top - around(strip).y0) / high]
                assert edges == pytest.approx([rows_of[0], rows_of[-1] + 1], abs=0.5), f"{name}: {label(strip)}"
            assert len(strips) in (0, len(set(data["warps"])))
    assert numbers(ax.get_xlabel()) == [data["products"][0][0][2][0], deep] and ax.get_xlabel().startswith("Framed:")
    each, warps = data["warps"].count(0), len(set(data["warps"]))
    assert f"{each} rows to each of {warps} warps" in alt
    assert f"{deep} columns of the left factor and {deep} rows of the right one" in plain(alt)


# Who writes dQ when -------------------------------------------------------------------------------------------------

GRIDS = pytest.mark.parametrize("made", [{}, dict(T=3, SMs=3), dict(T=5, SMs=2)], ids=["4 × 4", "3 × 3", "two SMs"])


@GRIDS
def test_a_visit_is_a_box_of_its_time_on_its_sm_in_its_worker_s_grey_and_says_what_it_adds_to(made):
    figure, _, data = redrawn("dq_over_time", made)
    for ax, (name, way) in zip(figure.axes, data["ways"].items(), strict=True):
        lanes, greys = ticks(ax.yaxis), {}
        found = {(round(b.get_y() + b.get_height() / 2, 6), b.get_x(), right(b)): b for b in boxes(ax)}
        for visit in way["visits"]:
            box = found.pop((round(lanes[f"SM {visit.SM}"], 6), visit.start, visit.end), None)
            assert box is not None, f"{name}: no box for {visit}"
            says = f"+ dQ {visit.rows}" if visit.adds else f"dQ {visit.rows}" if "row" in visit.worker else "dK, dV"
            assert label(box) == says, f"{name}: {visit} says {label(box)}"
            number = int(visit.worker.split()[1])
            assert same_color(box.get_facecolor(), style.worker(number)), f"{name}: {visit} has another's grey"
            greys.setdefault(visit.worker, set()).add(box.get_facecolor())
        assert all(len(shades) == 1 for shades in greys.values())
        marks = {(i, time) for i, time, _ in way["writes"]}
        assert len(found) == len(marks), f"{name}: boxes that are neither visits nor writes"
        order = list(lanes)
        assert order == [f"SM {k}" for k in range(data["SMs"])] + [f"dQ {i}" for i in range(data["T"])]
        heights = [ax.transData.transform((0, y))[1] for y in lanes.values()]
        assert all(b < a for a, b in pairwise(heights)), "SM 0 is on top, dQ's last block at the bottom"
        assert ax.get_xscale() == "linear" and ax.get_xlim() == figure.axes[0].get_xlim()
    assert all(numbers(said) == [x] for said, x in ticks(figure.axes[-1].xaxis).items())


@GRIDS
def test_a_write_ends_at_its_time_in_its_block_s_lane_and_says_who_or_how_many(made):
    figure, alt, data = redrawn("dq_over_time", made)
    most = []
    for ax, (name, way) in zip(figure.axes, data["ways"].items(), strict=True):
        lanes, at = ticks(ax.yaxis), {}
        for i, time, worker in way["writes"]:
            at.setdefault((i, time), []).append(worker)
        for (i, time), workers in at.items():
            (mark,) = [b for b in boxes(ax) if right(b) == pytest.approx(time)
                       and b.get_y() + b.get_height() / 2 == pytest.approx(lanes[f"dQ {i}"])]  # fmt: skip
            says = f"× {len(workers)}" if len(workers) > 1 else workers[0].split()[1]
            assert label(mark) == says, f"{name}: dQ {i} at {time:g} is written by {workers}"
            assert same_color(mark.get_edgecolor(), style.hue("dQ"))
            alone = len(workers) == 1 and style.worker(int(workers[0].split()[1]))
            assert same_color(mark.get_facecolor(), alone or style.tint(style.hue("dQ"))), f"{name}: dQ {i}'s colour"
        most.append(max(map(len, at.values())))
        end = max(visit.end for visit in way["visits"])
        (line,) = ax.lines
        assert set(line.get_xdata()) == {end}, f"{name}: the dotted line stands elsewhere"
        several = f"up to {most[-1]} at once into the same" if most[-1] > 1 else "one each"
        said = f"{name}: {end:g} products long, {len(way['writes'])} writes of a block, {several}"
        assert ax.get_title(loc="left") == said and said in alt
    word = {2: "two", 3: "three", 4: "four"}[max(most)]
    assert figure.get_supxlabel().endswith(f"× {max(most)}: {word} programs write at the same time.")
    assert most[1] == 1 and figure.get_suptitle().endswith("with two passes each block has one writer")
    assert alt.startswith(f"{data['SMs']} SMs over time, twice, with {data['T']} blocks of dQ beneath.")


def test_where_no_two_programs_meet_nothing_is_said_of_several():
    figure, alt, _ = redrawn("dq_over_time", dict(T=4, SMs=1))
    assert "at the same time" not in figure.get_supxlabel() and "up to" not in alt
    assert not [box for ax in figure.axes for box in boxes(ax) if label(box).startswith("×")]
    assert drawn("dq_over_time")[0].get_supxlabel() != figure.get_supxlabel()
    visits = [box for box in boxes(figure.axes[0]) if label(box).startswith("+")]
    assert_beside(figure.axes[0].yaxis.get_major_ticks()[0].label1, visits, "left")
