"""Pictures of the Hopper kernels: the model's waits, times and schedules reach them, and so do the ideas' factors."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch
from pictures import drawn, tagged, words

from fa2_lab.plots import forward_ideas, ideas, style
from fa2_lab.records import FOLDER as RECORDED
from fa2_lab.records import Measurement, Record

# What a product and a copy need ---------------------------------------------------------------------------------


def test_a_product_reads_its_right_factor_from_shared_memory_and_its_frame_is_one_wgmma():
    figure, alt, data = drawn("wgmma")
    (left, right, result), (p, v, o) = data["products"]
    assert [m[2] for m in (left, right, result)] == [(64, 128), (128, 128), (64, 128)]
    assert {m[0]: m[3] for m in (left, right, result, p, v, o)} == dict(
        Q="shared memory", K="shared memory", S="registers", P="registers", V="shared memory", O="registers"
    )
    assert data["warps"] == [w for w in range(4) for _ in range(16)]
    for frame, (_, name, shape, _) in zip(tagged(figure, "one wgmma"), (left, right, p, v), strict=True):
        deep = frame.get_width() if name in "qp" else frame.get_height()
        full = frame.get_height() if name in "qp" else frame.get_width()
        assert np.isclose(deep / full, 16 / shape[0 if name in "qp" else 1])
    assert all(len(tagged(figure, f"{t} of warp {w}")) == 1 for t in "SPO" for w in range(4))
    assert "8 instructions" in alt


def test_a_bulk_copy_swizzles_what_is_there_and_zeros_what_is_not():
    figure, alt, data = drawn("bulk_copy")
    assert (data["first"], data["bytes"]) == (8, 4 * 64 * 2)
    assert data["places"].tolist() == [[chunk ^ row for chunk in range(8)] for row in range(4)]
    for row in range(2):
        boxes = {chunk: tagged(figure, f"chunk {row} {chunk}")[0] for chunk in range(8)}
        left = min(box.get_x() for box in boxes.values())
        assert [round((box.get_x() - left) / box.get_width()) for box in boxes.values()] == [c ^ row for c in range(8)]
        assert all(box.label_text.get_text() == str(chunk) for chunk, box in boxes.items())
    assert len([gid for row in (2, 3) for c in range(8) for gid in tagged(figure, f"zero {row} {c}")]) == 16
    assert not tagged(figure, "chunk 2 0") and not tagged(figure, "zero 1 0")
    assert any("512 bytes" in text for text in words(figure)) and "last 2 rows are zeros" in alt


# Who waits for whom -------------------------------------------------------------------------------------------


def test_barriers_by_hand():
    _, _, data = drawn("pipes")
    both, engine = ["consumer 0", "consumer 1"], ["copy engine"]
    want = {f"{t} filled": dict(waits=both, arrives=engine, expected=1) for t in "QKV"}
    want |= {f"{t} emptied": dict(waits=["producer"], arrives=both, expected=2) for t in "KV"}
    want["Q emptied"] = dict(waits=["producer"], arrives=both, expected=1)  # each consumer has two stages
    want["mailbox filled"] = dict(waits=both, arrives=["producer"], expected=1)
    want["mailbox emptied"] = dict(waits=["producer"], arrives=both, expected=2)
    want["ping-pong"] = dict(waits=both, arrives=both, expected=1)
    assert data["barriers"] == want
    assert data["stages"] == {"mailbox": 2, "Q": 4, "K": 2, "V": 2}


def touches(point, box):
    """Whether a point lies on the edge of a box, or inside."""
    (x, y), (x0, y0), (x1, y1) = point, box.get_xy(), (box.get_x() + box.get_width(), box.get_y() + box.get_height())
    return x0 - 0.03 <= x <= x1 + 0.03 and y0 - 0.03 <= y <= y1 + 0.03


def assert_leads(figure, gid, starts, ends):
    """One arrow of this name, from one of these boxes to one of those; its path begins and ends there."""
    ((arrow,), boxes) = tagged(figure, gid), (tagged(figure, starts), tagged(figure, ends))
    start, _, head, *_ = arrow.get_path().vertices  # the line's two ends and its middle; then the wings of the head
    assert any(touches(start, box) for box in boxes[0]), (gid, starts)
    assert any(touches(head, box) for box in boxes[1]), (gid, ends)


@pytest.mark.parametrize("name", ["pipes", "backward_pipes"])
def test_every_wait_and_every_arrival_is_an_arrow_from_the_one_to_the_other(name):
    """Both consumers take and release every ring; arrows are found by where they begin and end, not by their names."""
    figure, _, data = drawn(name)
    expected = 0
    for ring, number in data["stages"].items():
        filled, emptied = (data["barriers"][f"{ring} {state}"] for state in ("filled", "emptied"))
        assert len(tagged(figure, f"{ring} stage")) == number
        assert_leads(figure, f"fill {ring}", "producer", f"{ring} stage")
        assert_leads(figure, f"empty {ring}", f"{ring} stage", "producer")
        for who in filled["waits"]:
            assert_leads(figure, f"take {ring} {who}", f"{ring} stage", who)
        for who in emptied["arrives"]:
            assert_leads(figure, f"release {ring} {who}", who, f"{ring} stage")
        expected += 2 + len(filled["waits"]) + len(emptied["arrives"])
        words_under = f"empty: after {emptied['expected']} release"
        assert any(words_under in text for text in words(figure))
    for a, b in itertools.permutations(["consumer 0", "consumer 1"]):
        assert_leads(figure, f"{a} to {b}", a, b)
    others = 0 if name == "pipes" else 2 * len(data["adds"])
    assert len(figure.findobj(FancyArrowPatch)) == expected + 2 + others == {"pipes": 26, "backward_pipes": 30}[name]


def test_the_backward_meets_at_rings_orders_and_dS():
    _, alt, data = drawn("backward_pipes")
    both, engine = ["consumer 0", "consumer 1"], ["copy engine"]
    want = {f"{ring} filled": dict(waits=both, arrives=engine, expected=1) for ring in ("K", "V", "rows")}
    want |= {f"{ring} emptied": dict(waits=["producer"], arrives=both, expected=2) for ring in data["stages"]}
    want["mailbox filled"] = dict(waits=both, arrives=["producer"], expected=1)
    want["dS filled"] = dict(waits=both, arrives=both, expected=2)
    assert data["barriers"] == want and data["places"] == 2 and data["adds"] == both
    assert data["stages"] == {"mailbox": 2, "K": 2, "V": 1, "rows": 2}
    assert "K: 2 stages; V: 1 stage;" in alt and "one of 2 places" in alt


def test_each_consumer_s_dQ_goes_to_a_place_of_its_own_and_on_to_HBM():
    figure, _, _ = drawn("backward_pipes")
    for who in ("consumer 0", "consumer 1"):
        assert_leads(figure, f"store dQ {who}", who, f"dQ place {who}")
        assert_leads(figure, f"add dQ {who}", f"dQ place {who}", "dQ sums")


# Time ---------------------------------------------------------------------------------------------------------


def test_shares_by_hand():
    """d = 64, two warpgroups, 16 tiles: a tile takes 1,024 clocks of products and 1,024 of exponentials."""
    _, _, data = drawn("timeline")
    neither, within, between, both = (panel["share"] for panel in data["panels"])
    busy = 16 * 1024
    assert neither == pytest.approx(busy / (16 * 2048))
    assert within == pytest.approx(busy / (512 + 1024 + 15 * (512 + 1024) + 512))
    assert between > 0.95 and both > between


def test_a_step_of_the_backward_in_order():
    """A consumer's work of step 3, its dQ a step later, and boxes from where to where the jobs last."""
    figure, _, data = drawn("backward_step")
    mine = sorted((begun, unit, what) for c, unit, what, n, begun, _ in data["jobs"] if (c, n) == (0, 3))
    assert [what for _, _, what in mine] == ["S", "P", "dV", "dP", "dK", "dQ", "dQ"]
    assert [unit for _, unit, what in mine if what == "dQ"] == ["tensor", "copy"]
    next_P = next(begun for c, _, what, n, begun, _ in data["jobs"] if (c, what, n) == (0, "P", 4))
    assert mine[5][0] == next_P and data["window"][1] - data["window"][0] == 2 * 10 * 256
    for c, unit, what, n, begun, ended in data["jobs"]:
        if data["window"][0] <= begun and ended <= data["window"][1]:
            places = [(bar.get_x(), bar.get_width()) for bar in tagged(figure, f"{unit} {what} {n}")]
            assert (begun - data["window"][0], ended - begun) in places, (c, unit, what, n)


def test_boxes_are_as_long_as_their_jobs():
    figure, _, data = drawn("timeline")
    for ax, panel in zip(figure.axes, data["panels"], strict=True):
        for kind in ("S", "PV", "P"):
            jobs = [(begun, ended) for _, _, label, begun, ended in panel["jobs"] if label.split()[0] == kind]
            shown = sorted((a, min(b, data["window"])) for a, b in jobs if a < data["window"])
            boxes = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in tagged(ax, kind)]
            np.testing.assert_allclose(sorted(boxes), shown)
            assert boxes


# Shared out or handed out -------------------------------------------------------------------------------------


def test_tickets_shows_how_long_each_SM_has_work():
    figure, alt, data = drawn("tickets")
    for ax, ran in zip(figure.axes, data["ran"].values(), strict=True):
        work = Counter()
        for p in ran.placed:
            work[p.SM] += p.end - p.start
        assert sum(work.values()) == 16 * 128 * 129 / 2 and len(ran.placed) == 16 * 128
        (bars,) = tagged(ax, "load")
        boxes = bars.get_path().vertices.reshape(-1, 5, 2)
        assert [(box[:, 1].min(), np.ptp(box[:, 0])) for box in boxes] == [(SM, work[SM]) for SM in range(132)]
        (end,) = tagged(ax, "end")
        assert set(end.get_xdata()) == {ran.makespan} == {max(work.values())}
        assert f"ends at {ran.makespan:,.0f}" in words(ax) and f"ends at {ran.makespan:,.0f} tiles" in alt
        assert f"{ran.utilisation:.0%} busy" in ax.get_title(loc="left")
    dealt, side_by_side, tickets = (ran.makespan for ran in data["ran"].values())
    assert dealt > 1.5 * tickets and side_by_side > 1.1 * tickets


# Ideas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_bars_reach_from_the_lowest_to_the_highest_factor_and_failures_are_open(part):
    data = ideas.data(part)
    figure, alt = ideas.draw(**data)
    ax = figure.axes[0]
    for is_kept, gid in ((True, "kept"), (False, "not kept")):
        rows = [row for row in data["rows"] if row["kept"] == is_kept]
        bars = tagged(figure, gid)
        assert rows and [bar.get_x() for bar in bars] == [row["low"] for row in rows]
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert ends == pytest.approx([max(row["high"], 1.008 * row["low"]) for row in rows])
        assert all(style.colors.same_color(bar.get_facecolor(), style.PAPER) != is_kept for bar in bars)
        low, high = ax.get_xlim()
        assert all(low < bar.get_x() and end < high for bar, end in zip(bars, ends, strict=True)), "nothing is cut off"
    named = [label.get_text().split("\n")[0] for label in ax.get_yticklabels()]
    assert named == [row["idea"] for row in data["rows"]] and ax.get_xscale() == "log"
    assert data["setting"] in alt and part in figure.get_suptitle()


@pytest.fixture
def by_hand(monkeypatch):
    """A record of two ideas: one is in use without a mask and not with one, the other failed."""

    def row(idea, kept, with_it, causal, N, kv_heads=2):
        where = dict(part="backward", idea=idea, kept=kept, d=64, causal=causal, N_q=N, heads=2, kv_heads=kv_heads)
        return Measurement(where, "", {"with it": [with_it, 0, 9], "without it": [3.0, 0, 9], "cuDNN": [1.0]})

    rows = [row("turns", True, 2.0, False, 1024), row("turns", True, 2.5, False, 4096)]
    rows += [row("turns", False, 4.0, True, 4096, kv_heads=1), row("spilled", False, 1.0, True, 4096)]
    del rows[-1].values["with it"]
    machine = dict(gpu="H", torch="2", triton="3")
    monkeypatch.setattr(ideas, "load", lambda suite: Record("ideas", machine, "", rows=rows))


def test_worth_is_time_without_over_time_with_from_the_record(by_hand):
    bars = ideas.data("backward")["rows"]
    assert forward_ideas.data()["rows"] == []
    assert bars == [
        dict(idea="turns", kept=True, shape="d 64, full, N 1,024, 4,096", low=1.2, high=1.5),
        dict(idea="turns", kept=False, shape="d 64, causal, N 4,096, 2 heads on 1", low=0.75, high=0.75),
    ]


def test_the_table_has_a_line_for_each_idea_and_italics_where_it_is_not_in_use(by_hand):
    head, _, *lines = ideas.ideas_table("backward").split("\n")
    assert head == "| idea | d 64 full | d 64 causal | d 128 full | d 128 causal |"
    row = "| turns | 1,024: 1.50<br>4,096: 1.20 | *4,096, 2 heads on 1: 0.75* |  |  |"
    assert lines == [row.replace(": ", ":\N{NO-BREAK SPACE}")]
    assert ideas.ideas_table("forward", "host").count("\n") == 1
    assert len(ideas.data("backward", most=1)["rows"]) == 1


def test_the_table_of_decode_has_a_column_for_each_cache(monkeypatch):
    tried = [("teams", True, 8, 4.0), ("teams", True, 1, 2.0), ("8 warps", False, 16, 2.5)]
    where = dict(part="decode", d=128, causal=False, N_q=1, N_k=4096, heads=32, kv_heads=8)
    rows = [
        Measurement(where | dict(idea=idea, kept=kept, batch=batch), "", {"with it": [2.0], "without it": [ms]})
        for idea, kept, batch, ms in tried
    ]
    monkeypatch.setattr(ideas, "load", lambda suite: Record("ideas", {}, "", rows=rows))
    head, _, *lines = ideas.ideas_table("decode").split("\n")
    assert head == "| idea | 1 × 4,096 keys, d 128 | 8 × 4,096 keys, d 128 | 16 × 4,096 keys, d 128 |"
    assert lines == ["| teams | 1.00 | 2.00 |  |", "| 8 warps |  |  | *1.25* |"]


def test_the_recorded_table_has_every_measured_idea():
    parts = {row["part"] for row in ideas.worths()}
    assert parts == {"forward", "backward", "host", "decode"}
    found = [line.split(" | ")[0] for part in parts for line in ideas.ideas_table(part).split("\n")[2:]]
    assert len(found) == len({(row["part"], row["idea"]) for row in ideas.worths()}) >= 40


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_picture_has_the_ten_that_change_most_the_best_first(part):
    rows = ideas.data(part)["rows"]
    worths = [ideas.worth(row) for row in rows]
    assert len(rows) == 10 and worths == sorted(worths, reverse=True)
    most = sorted((max(row["worth"], 1 / row["worth"]) for row in ideas.worths() if row["part"] == part), reverse=True)
    assert max(worths[0], 1 / worths[-1]) == most[0] and min(max(x, 1 / x) for x in worths) < most[9]


def test_what_cannot_be_repeated_says_so_itself():
    said = json.loads((RECORDED / "earlier_ideas.json").read_text(encoding="utf-8"))
    assert "no command repeats them" in said["about"] and 5 <= len(said["rows"]) <= 12
    assert all(set(row) == {"part", "idea", "shape", "bought"} for row in said["rows"])
    assert sum(ideas.earlier_table(part).count("\n") - 1 for part in ("forward", "backward")) == len(said["rows"])
    again = {row["idea"] for row in ideas.worths()} & {row["idea"] for row in said["rows"]}
    assert not again, "these are measured"


def test_spans_are_written_short():
    assert ideas.span(dict(low=1.0, high=1.07)) == "× 1.00 to 1.07"
    assert ideas.span(dict(low=0.972, high=0.968)) == "× 0.97"


# What stands beside what ----------------------------------------------------------------------------------------


def where(ax, text):
    """Where a text stands, which stands there once."""
    (found,) = (t for t in ax.texts if t.get_text() == text)
    return found.get_position()


def test_a_lane_of_the_timeline_is_named_at_its_jobs():
    figure, _, _ = drawn("timeline")
    lanes = {"copies of K, V": ("copy",)} | {f"tensor cores, {c}": ("S", "PV") for c in (0, 1)}
    lanes |= {f"exponentials, {c}": ("P",) for c in (0, 1)}
    for ax in figure.axes:
        heights = [where(ax, name)[1] for name in lanes]
        assert heights == sorted(heights) and np.diff(heights) == pytest.approx(1)
        for name, kinds in lanes.items():
            (x, y), boxes = where(ax, name), [box for kind in kinds for box in tagged(ax, kind)]
            assert x < 0 and any(box.get_y() < y + 0.5 and y - 0.5 < box.get_y() for box in boxes), name
            strange = [box for kind in {"copy", "S", "PV", "P"} - {*kinds} for box in tagged(ax, kind)]
            assert not any(abs(box.get_y() + box.get_height() / 2 - y) < 0.4 for box in strange), name


def test_bars_of_clocks_have_chip_and_tweak_before_them_and_their_sum_behind():
    figure, _, data = drawn("flop_costs")
    right = figure.axes[1]
    bars = {kind: tagged(right, kind) for kind in next(iter(data["clocks"].values()))}
    for n, ((chip, when), parts) in enumerate(data["clocks"].items()):
        row = [boxes[n] for boxes in bars.values()]
        y, end = row[0].get_y() + row[0].get_height() / 2, row[-1].get_x() + row[-1].get_width()
        assert (where(right, f"{chip}\n{when}")[0] < 0, where(right, f"{chip}\n{when}")[1]) == (True, y)
        sums = [t.get_position() for t in right.texts if t.get_text() == f"{sum(parts.values()):,.0f}"]
        assert any(x > end and height == y for x, height in sums)


def test_a_split_s_bars_are_named_and_cut_where_they_say():
    figure, _, data = drawn("warp_split")
    bars = figure.axes[-1]
    segments = [
        (tensor, box) for tensor in ("K", "V", "Q", "max", "sum", "PV") for box in tagged(bars, f"{tensor} bytes")
    ]
    for scheme, moved in data["moved"].items():
        name = scheme.replace("_k", "-K").replace("_q", "-Q")
        for op in ("write", "read"):
            x, y = where(bars, f"{name} {op}s")
            row = {tensor: box for tensor, box in segments if box.get_y() < y < box.get_y() + box.get_height()}
            sizes = {tensor: n / 1024 for (o, tensor), n in moved.items() if o == op and n}
            assert x < 0 and {tensor: box.get_width() for tensor, box in row.items()} == sizes
            for tensor, box in row.items():
                wanted = f"{'partial P V' if tensor == 'PV' else tensor} {sizes[tensor]:.0f}"
                near = [t for t in bars.texts if abs(t.get_position()[1] - y) < 0.5 and wanted in t.get_text()]
                inside = box.label_text.get_text() == wanted if hasattr(box, "label_text") else len(near) == 1
                assert inside, (name, op, wanted)
    assert bars.get_xlabel() == "KiB" and all(tick % 50 == 0 for tick in bars.get_xticks())


def test_a_warp_s_number_stands_in_its_own_part_and_parts_of_O_are_shifted_a_little():
    figure, _, _ = drawn("warp_split")
    for ax, tensors in zip(figure.axes[:2], ("KVSO", "QSO"), strict=True):
        chips, parts = tagged(ax, "warp"), [box for t in "KVQSO" if t in tensors for box in tagged(ax, f"{t} part")]
        assert len(chips) == len(parts)
        for chip, part in zip(chips, parts, strict=True):
            x, y = chip.get_x() + chip.get_width() / 2, chip.get_y() + chip.get_height() / 2
            assert part.get_x() < x < part.get_x() + part.get_width(), part.get_gid()
            assert part.get_y() < y < part.get_y() + part.get_height(), part.get_gid()
            assert chip.get_width() == chip.get_height() == 0.5
    layers = tagged(figure.axes[0], "O part")
    assert all(0 < b.get_x() - a.get_x() < a.get_width() / 2 for a, b in itertools.pairwise(layers))
    assert all(0 < b.get_y() - a.get_y() < a.get_height() / 2 for a, b in itertools.pairwise(layers))


def test_memories_under_the_lens_are_named_at_their_squares():
    figure, _, data = drawn("gpu_map")
    ax = figure.axes[0]
    for name, (places, _) in data["chips"].items():
        (whole,) = tagged(ax, f"{name} HBM")
        for place in places[:-1]:
            (tiny,), (large,) = tagged(ax, f"{name} {place.name}"), tagged(ax, f"{name} {place.name} large")
            assert whole.get_y() < tiny.get_y() < tiny.get_y() + tiny.get_height() < whole.get_y() + whole.get_height()
            assert whole.get_x() < tiny.get_x() and large.get_x() > whole.get_x() + whole.get_width()
            beside = [t for t in ax.texts if t.get_text().startswith(f"{place.name} ")]
            middle = large.get_y() + large.get_height() / 2
            near = [t.get_position()[0] - large.get_x() - large.get_width() for t in beside
                    if t.get_position()[1] == pytest.approx(middle)]  # fmt: skip
            assert any(0 < gap < 80 for gap in near), (name, place.name)


@pytest.mark.parametrize("name, label", [("hbm_traffic", "meter"), ("time_and_memory", ""), ("ring_speed", "2")])
def test_what_was_counted_or_measured_is_a_dot(name, label):
    """And a cross where an overflow ends a curve."""
    lines = [line for ax in drawn(name)[0].axes for line in ax.lines if line.get_label().endswith(label)]
    assert lines and all(line.get_marker() not in ("None", "", None) for line in lines if len(line.get_xdata()) > 2)
    ends = [line for ax in drawn("three_softmaxes")[0].axes for line in ax.lines if len(line.get_xdata()) == 1]
    assert [line.get_marker() for line in ends] == ["x"] * 3


def test_numbers_of_the_three_softmaxes_have_their_tensor_s_fill_and_their_name_before_them():
    figure, _, data = drawn("three_softmaxes")
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left").startswith("One row"))
    fills = {"scores s": "S", "unsafe: exp(s)": "P", "safe: exp(s − m)": "P"}
    for name, tensor in fills.items():
        x, y = where(ax, name)
        row = [box for box in ax.patches if box.get_y() < y < box.get_y() + box.get_height()]
        found = {style.colors.to_hex(box.get_facecolor()) for box in row if box.get_x() < len(data["row"]["s"])}
        assert x < 0 and style.colors.to_hex(style.fill(tensor)) in found, name
        assert found <= {style.colors.to_hex(c) for c in (style.fill(tensor), style.INK)}, name


def test_the_edge_of_a_causal_mask_leads_from_corner_to_corner():
    figure, _, data = drawn("causal_tiles")
    for ax, tiling in zip(figure.axes, data["tilings"].values(), strict=False):
        (edge,) = ax.lines
        first, last = tiling.N_k - tiling.N_q, tiling.N_k
        assert tuple(edge.get_xydata()[0]) == (first, 0) and tuple(edge.get_xydata()[-1]) == (last, tiling.N_q)
        for text in ax.texts:
            kind, number = text.get_text().split("\n")
            tiles = [(tiling.rows(i), tiling.cols(j)) for i in range(tiling.T_r) for j in range(tiling.T_c)
                     if tiling.kind(i, j).name == kind]  # fmt: skip
            middle = [np.mean([(side[k].start + side[k].stop) / 2 for side in tiles]) for k in (1, 0)]
            assert int(number) == len(tiles) and text.get_position() == pytest.approx(middle)
    assert list(figure.axes[-1].get_yticks()) == [0.5, 0.75, 1.0]
