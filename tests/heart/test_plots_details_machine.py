"""Marks that could mislead in pictures of the machine and of measurements: labels of arrows, keys, settings, names."""

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation
from pictures import boxes, drawn, label, tagged

from fa2_lab import records
from fa2_lab.plots import speed, style
from fa2_lab.records import load


def at(ax, text):
    """Where a text stands, which stands there once."""
    found = [t.get_position() for t in ax.texts if t.get_text() == text]
    assert len(found) == 1, f"{text!r} stands there {len(found)} times"
    return found[0]


def middle(box):
    return box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2


def span(box):
    """Where a box begins and ends from left to right."""
    return box.get_x(), box.get_x() + box.get_width()


def far(point, ends):
    """How far a point is from the line between two others."""
    point, start, end = map(np.asarray, (point, *ends))
    along = np.clip((point - start) @ (end - start) / ((end - start) @ (end - start)), 0, 1)
    return np.hypot(*(start + along * (end - start) - point))


# Who waits for whom -----------------------------------------------------------------------------------------------

LABELS = {"take": "take", "release": "release", "fill": "fill", "wait for empty": "empty"}


@pytest.mark.parametrize("name", ["pipes", "backward_pipes"])
def test_the_arrow_next_to_a_label_is_the_one_that_it_names(name):
    figure, _, data = drawn(name)
    ax = figure.axes[0]
    arrows = {arrow.get_gid(): arrow._posA_posB for arrow in figure.findobj(FancyArrowPatch)}
    seen = []
    for text in ax.texts:
        if text.get_text() in LABELS:
            point = text.get_position()
            nearest = min(arrows, key=lambda gid: far(point, arrows[gid]))
            assert nearest.split()[0] == LABELS[text.get_text()], f"{text.get_text()!r} stands at {nearest!r}"
            assert far(point, arrows[nearest]) < 0.15
            seen.append(nearest)
    assert {f"{what} {ring}" for ring in data["stages"] for what in ("fill", "empty")} <= {*seen} and len(seen) >= 10


@pytest.mark.parametrize("name", ["pipes", "backward_pipes"])
def test_arrows_that_give_back_are_dashed_and_all_have_the_colour_of_what_travels(name):
    figure, _, data = drawn(name)
    hues = {"mailbox": style.INK, "rows": style.hue("Q")}
    for arrow in figure.findobj(FancyArrowPatch):
        what, ring = arrow.get_gid().split()[:2]
        assert (arrow.get_linestyle() != "-") == (what in ("empty", "release")), arrow.get_gid()
        between = what == "consumer"
        hue = style.INK if between else hues.get(ring) or style.hue(ring)
        assert same_color(arrow.get_edgecolor(), hue), arrow.get_gid()
        assert arrow.get_arrowstyle().arrow == "-|>", "its head is at its end"
    ends = [[a._posA_posB[1][1] for ring in data["stages"] for a in tagged(figure, f"take {ring} {who}")]
            for who in ("consumer 0", "consumer 1")]  # fmt: skip
    assert all(heights == sorted(heights) for heights in ends), "the upper ring's arrow ends above the lower one's"


def test_what_consumers_hand_each_other_is_named_between_them():
    for name, words in (("pipes", "ping-pong:\n1 arrival"), ("backward_pipes", "dS: 2 places,\n2 arrivals")):
        figure = drawn(name)[0]
        upper, lower = (tagged(figure, f"consumer {n}")[0] for n in (0, 1))
        assert [label(box).split("\n")[0] for box in (upper, lower)] == ["consumer 0", "consumer 1"]
        x, y = at(figure.axes[0], words)
        assert upper.get_y() + upper.get_height() < y < lower.get_y() and x == pytest.approx(middle(upper)[0])
        for ring, number in drawn(name)[2]["stages"].items():
            stages = sorted(tagged(figure, f"{ring} stage"), key=lambda box: box.get_x())
            told = {"rows": "Q, dO"}.get(ring, ring)
            assert [label(box) for box in stages] == [f"{told} {n}" for n in range(number)]
            heights = {round(box.get_y(), 6) for box in stages}
            (arrow,) = tagged(figure, f"fill {ring}")
            assert len(heights) == 1 and min(heights) < arrow._posA_posB[0][1] < min(heights) + 0.42


# Speed ------------------------------------------------------------------------------------------------------------


def test_a_curve_s_key_has_its_mark_its_colour_and_its_name_in_the_order_of_the_ends():
    figure, _, data = drawn("speed")
    top = 1.08 * data["gemm"]
    for ax, curves in zip(figure.axes, data["panels"].values(), strict=True):
        keys = [line for line in ax.lines if line.get_label() == "_key"]
        last = ax in figure.axes[3::4]
        assert len(keys) == (len(curves) if last else 0), "only the last panel of a row has names"
        named = {t.get_text(): t.get_position()[1] * top for t in ax.texts}
        for key, (name, curve) in zip(keys, curves.items(), strict=last):
            (line,) = (line for line in ax.lines if line.get_label() == name)
            assert key.get_ydata()[0] == pytest.approx(named[name]), f"{name} stands at another's mark"
            assert key.get_xdata()[0] > curve[-1][0], "a key is no point of the curve"
            look = [(x.get_marker(), x.get_color(), x.get_markerfacecolor()) for x in (key, line)]
            assert look[0] == look[1], f"{name}: its key looks otherwise than its curve"
        if last:
            ends = {name: curve[-1][1] for name, curve in curves.items()} | {"GEMM": data["gemm"]}
            order = [sorted(ends, key=by.get) for by in (named, ends)]
            assert order[0] == order[1], "names stand in another order than the curves, and the product's line, end"
            assert len(named) == len(ends)
    looks = [(look.get("marker"), look["color"], look.get("markerfacecolor")) for look in speed.LOOKS.values()]
    assert len({*looks}) == len(looks), "two contestants look alike"


def test_a_panel_of_speeds_has_its_direction_before_it_and_its_shape_above():
    figure, _, data = drawn("speed")
    for n, (direction, d, causal) in enumerate(data["panels"]):
        left, above = figure.axes[n - n % 4], figure.axes[n % 4]
        assert left.get_ylabel() == f"{direction}, TFLOP/s"
        assert above.get_title(loc="left") == f"d = {d}, {'causal' if causal else 'full'}"
    assert figure.get_supxlabel() == f"sequence length N\n{data['setting']}"
    assert data["setting"].endswith("16,384 tokens, hidden size 2,048; torch flash is FlashAttention-2 in torch")


# The ring -----------------------------------------------------------------------------------------------------------


def test_the_ring_s_setting_says_the_recorded_speeds():
    figure, _, data = drawn("ring_schedule")
    rows = [row for row in load("ring", records.FOLDER).rows if row.problem["N_q"] == 131072]
    rows = {row.direction: row for row in rows if "layout" not in row.problem and row.unit == "ms"}
    tflops = [rows[way].flops / rows[way].values["1 GPU"][0] / 1e9 for way in ("forward", "backward")]
    moved = 2 * 2 * 16 * 128 * 131072 * 3 / 4  # K and V of three other ranks, two bytes each
    link = moved / rows["K V once round"].values["4 GPUs"][0] / 1e6
    said = "Model: rank 1 of 4, 131,072 tokens, 16 heads, d = 128; kernels at"
    said += f" {tflops[0]:.0f} and {tflops[1]:.0f} TFLOP/s, links at {link:.0f} GB/s, as recorded\n"
    assert figure.get_supxlabel() == data["setting"] and data["setting"].startswith(said)
    titles = [ax.get_title(loc="left") for ax in figure.axes[1:]]
    assert titles[:2] == ["forward, milliseconds", "backward, milliseconds"]
    assert titles[2].startswith("forward by length")


def test_ranks_and_steps_of_the_ring_are_named_at_their_cells_and_times_told_in_words():
    figure, alt, data = drawn("ring_schedule")
    ax = figure.axes[0]
    for n, square in enumerate(tagged(ax, "unseen")):
        rank, step = divmod(n, 4)
        (x, y), (a, b) = at(ax, f"rank {rank}"), at(ax, f"step {step}")
        assert (x < 0, b < 0) == (True, True) and (a, y) == pytest.approx(middle(square))
    for direction, spans in data["lanes"].items():
        sums = {lane: sum(end - start for name, start, end, *_ in spans if name == lane) for lane in ("kernels", "K V")}
        told = ", ".join(f"{lane} {ms:.3g} ms" for lane, ms in sums.items())
        assert f"{direction} {told}" in alt and f"measured {data['took'][direction]:.3g} ms in all" in alt
    arrows = [t.arrow_patch for t in ax.texts if isinstance(t, Annotation)]
    assert len(arrows) == 12 and all(same_color(arrow.get_edgecolor(), style.hue("K")) for arrow in arrows)
    lanes = [(ax, box) for ax in figure.axes[1:3] for lane in ("K V", "dK dV") for box in tagged(ax, lane)]
    dashed = {box.get_gid(): box.get_linestyle() != "-" for _, box in lanes}
    assert dashed == {"K V": False, "dK dV": True} and len(lanes) == 3 + 3 + 3
    assert all(same_color(box.get_facecolor(), style.fill("K")) for _, box in lanes)
    assert boxes(figure.axes[3]) == []


# The ragged edge --------------------------------------------------------------------------------------------------


def test_programs_and_rows_are_numbered_at_their_rows_and_the_formulas_have_these_numbers():
    figure, _, data = drawn("ragged_edge")
    ax, rows = figure.axes[0], [8, 9, 10, 11]
    programs = [b for b in boxes(ax) if not b.get_gid()]
    assert [(label(b), round(b.get_y()), round(b.get_y() + b.get_height())) for b in programs] == [
        ("0", 0, 4), ("1", 4, 8), ("2", 8, 12)
    ]  # fmt: skip
    grey = [label(b) for b in programs if not same_color(b.get_facecolor(), style.PAPER)]
    assert grey == ["2"] == [str(data["i"])], "another program is marked"
    assert all(span(b)[1] < 0 for b in programs) and span(programs[0])[0] < at(ax, "program")[0] < span(programs[0])[1]
    for name in ("offsets of its tile", "what the load returns"):
        first = tagged(ax, f"{name} 0 0")[0]
        assert at(ax, name) == pytest.approx((first.get_x() + 2, first.get_y() - 0.35)), (
            f"{name}: its title stands elsewhere"
        )
        for r, row in enumerate(rows):
            y = middle(tagged(ax, f"{name} {r} 0")[0])[1]
            said = [t.get_text() for t in ax.texts if 0 < first.get_x() - t.get_position()[0] < 1
                    and t.get_position()[1] == pytest.approx(y)]  # fmt: skip
            assert said == [str(row)], f"{name}: row {row}"
    for n in range(48):
        (box,) = tagged(ax, f"memory {n}")
        strength = 0 if n >= 40 else 0.6 if n >= 32 else 0.2
        wanted = style.tint(style.hue("Q"), strength) if strength else style.PAPER
        assert label(box) == str(n) and same_color(box.get_facecolor(), wanted), f"element {n}"
    formulas = "row = 2 · B_r + (0 … 3) = 8, 9, 10, 11\noffset = row · d + (0 … 3)\nmask = row < N, with N = 10"
    assert formulas in [t.get_text() for t in ax.texts]
    assert 0 < at(ax, "Q in memory")[0] < 4 and at(ax, "white: the next head's rows")[1] > 12


def test_arrows_of_the_ragged_edge_lead_from_memory_to_offsets_to_what_is_loaded():
    ax = drawn("ragged_edge")[0].axes[0]
    arrows = sorted(((t.xyann, t.xy) for t in ax.texts if isinstance(t, Annotation)), key=lambda ends: ends[0][0])
    parts = [("memory 3", "offsets of its tile 0 0"), ("offsets of its tile 0 3", "what the load returns 0 0")]
    for (tail, head), (left, right) in zip(arrows, parts, strict=True):
        (before,), (after,) = tagged(ax, left), tagged(ax, right)
        assert span(before)[1] < tail[0] < head[0] < span(after)[0] and tail[1] == head[1], f"{left} to {right}"
        assert after.get_y() < head[1] < after.get_y() + 4


# Names, places and sizes --------------------------------------------------------------------------------------------


def test_a_matrix_of_a_wgmma_has_its_name_above_and_its_place_beneath():
    figure, _, data = drawn("wgmma")
    ax = figure.axes[0]
    for tensor, name, shape, place in (matrix for product in data["products"] for matrix in product):
        parts = tagged(ax, f"{name} whole") or [tagged(ax, f"{tensor} of warp {w}")[0] for w in range(4)]
        left, top, bottom = parts[0].get_x(), parts[0].get_y(), parts[-1].get_y() + parts[-1].get_height()
        x, y = at(ax, f"{name}  {shape[0]} × {shape[1]}")
        assert x == left and 0 < top - y < 0.1, f"{name} stands elsewhere"
        told = [
            t.get_text() for t in ax.texts if t.get_position()[0] == left and 0 < t.get_position()[1] - bottom < 0.1
        ]
        assert told == [place], f"{name} lies in {place}"
        assert all(same_color(part.get_facecolor(), style.fill(tensor)) for part in parts), name


def test_operands_of_a_split_have_their_names_above_and_their_scheme_over_them():
    figure, *_ = drawn("warp_split")
    schemes = ("Split-K (FA1): each warp takes keys", "Split-Q (FA2): each warp takes queries")
    for ax, scheme, result in zip(figure.axes, schemes, ("4 parts of O", "O"), strict=False):
        assert ax.get_title(loc="left") == scheme
        for tensor, name in {"K": "Kᵀ", "V": "V", "Q": "Q", "S": "S, P", "O": result}.items():
            parts = tagged(ax, f"{tensor} part") or tagged(ax, f"{tensor} whole")
            top = min(part.get_y() for part in parts)
            x, y = at(ax, name)
            assert parts[0].get_x() < x < span(parts[-1])[1] and 0 < top - y < 0.2, f"{name} stands elsewhere"
            assert all(same_color(part.get_facecolor(), style.fill(tensor)) for part in parts), f"{scheme}: {name}"
    for tensor, hue in {"K": "K", "V": "V", "Q": "Q", "max": "m", "sum": "l", "PV": "O"}.items():
        assert all(same_color(bar.get_edgecolor(), style.hue(hue)) for bar in tagged(figure, f"{tensor} bytes")), tensor


def test_a_job_of_the_timeline_bears_its_tile_s_number_and_copies_of_k_lie_above_those_of_v():
    figure, _, data = drawn("timeline")
    hues = {"S": "S", "PV": "O", "P": "P", "K": "K", "V": "V"}
    for ax, panel in zip(figure.axes, data["panels"], strict=True):
        assert ax.get_title(loc="left") == f"{panel['name']}: tensor cores busy {panel['share']:.0%}"
        for unit, consumer, what, begun, ended in panel["jobs"]:
            kind, number = what.split()
            lane = 0 if unit == "copy" else {"tensor": 1, "exp": 3}[unit] + consumer
            if begun < data["window"]:
                here = [b for b in tagged(ax, "copy" if kind in "KV" else kind) if lane < b.get_y() < lane + 1]
                hue = style.hue(hues[kind])
                found = [b for b in here if b.get_x() == begun and same_color(b.get_edgecolor(), hue)]
                assert found, f"{panel['name']}: no box for {what} at {begun:.0f}"
                if unit != "copy" and ended < data["window"]:
                    assert [label(b) for b in found] == [f"{kind}{number}"]
        copies = tagged(ax, "copy")
        ks = [b.get_y() for b in copies if same_color(b.get_edgecolor(), style.hue("K"))]
        assert max(ks) < 0.5 <= min(b.get_y() for b in copies if b.get_y() not in ks)


def test_idle_sms_are_counted_where_they_are_and_tiles_of_a_rank_at_its_bar():
    figure, _, data = drawn("waves")
    for ax, schedule in zip(figure.axes, data["ran"].values(), strict=True):
        idle = schedule.SMs - schedule.SMs_used
        told = [t for t in ax.texts if "never get" in t.get_text()]
        assert [t.get_text() for t in told] == [f"{idle} SMs never get a thread block"] * bool(idle)
        middles = [(schedule.SMs_used + schedule.SMs) / 2] * bool(idle)
        assert [t.get_position()[1] for t in told] == middles, "the text stands at the lines of other SMs"
    figure, _, data = drawn("zigzag")
    for ax, counts in zip(figure.axes[2:], data["tiles"].values(), strict=True):
        for rank, n in enumerate(counts):
            (bar,) = tagged(ax, f"tiles of {rank}")
            row = sorted((t.get_position()[0], t.get_text()) for t in ax.texts if t.get_position()[1] == rank + 0.5)
            assert [text for _, text in row] == [f"rank {rank}", f"{n:,}"], f"rank {rank}: another's number"
            assert row[0][0] < 0 and row[1][0] > bar.get_width()


def test_a_name_at_the_end_of_a_curve_is_that_curve_s():
    for name, panels in (("hbm_traffic", ("over_N", "over_M")), ("time_and_memory", ("time", "memory"))):
        figure, _, data = drawn(name)
        for ax, panel in zip(figure.axes, panels, strict=True):
            said = {t.get_text().split(":")[0].split(",")[0]: t.xy for t in ax.texts}
            assert set(said) >= ({"standard", "FA2"} if panel == "memory" else {"standard", "FA1", "FA2"})
            for curve, points in data[panel].items():
                points = points["form"] if name == "hbm_traffic" else points
                assert curve not in said or said[curve] in points, f"{name}: {curve} stands at another curve"
                drawn_points = [[*map(tuple, line.get_xydata())] for line in ax.lines]
                assert [*map(tuple, points)] in drawn_points, f"{name}: {curve} is not drawn"
    ax = drawn("quadratic_memory")[0].axes[0]
    dots = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "o"]
    for (N, size), (name, *_) in zip(dots, drawn("quadratic_memory")[2]["chips"], strict=True):
        x, y = at(ax, f"N = {N:,.0f}")
        assert x < N and 0 < y - size < 3 and at(ax, f"{size:.0f} GiB\n{name}")[1] == size, f"{name} stands elsewhere"
