"""Pictures of what was compiled: the records are complete and current, and the pictures show what they say."""

import importlib.util
import json
import re
import sys
from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import same_color
from pictures import drawn, tagged

from fa2_lab import records
from fa2_lab.machine.layouts import Mma, Shared, parse
from fa2_lab.plots import accumulators, block_budget, style, swizzled_keys
from fa2_studio import compiled

RECORDS = {"layouts": "layouts", "compiled": "forward"}
by_record = pytest.mark.parametrize("name", RECORDS)


# The records --------------------------------------------------------------------------------------------------


@by_record
def test_a_record_says_what_made_it_and_is_of_this_kernel(name):
    made = records.recorded(name)["made_by"]
    assert made["command"] == "python -m fa2_studio.compiled" and re.fullmatch(r"\d+\.\d+\.\d+", made["triton"])
    assert made["source"] == compiled.source_digest(), f"the forward has changed: run `{records.COMPILE}`"


@by_record
def test_a_record_is_written_as_it_was_read(name, tmp_path):
    record = records.recorded(name)
    compiled.write(tmp_path / "again.json", RECORDS[name], record[RECORDS[name]], dict(triton="1"))
    again = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert again[RECORDS[name]] == record[RECORDS[name]] and list(again) == ["made_by", RECORDS[name]]
    assert again["made_by"] == {k: record["made_by"][k] for k in ("command", "kernel")} | dict(triton="1")


def test_every_cell_of_the_budget_is_compiled_once():
    rows = records.recorded("compiled")["forward"]
    names = ("target", "d", "B_r", "B_c", "warps", "stages")
    assert [{n: row[n] for n in names} for row in rows] == compiled.budget_jobs("sm_90")
    assert len(rows) == len({(row["d"], row["B_r"], row["B_c"]) for row in rows}) == 32


def test_what_was_compiled_hangs_together():
    cells = block_budget.data()["cells"]
    agree = 0
    for row in records.recorded("compiled")["forward"]:
        model = cells[row["d"]][row["B_r"], row["B_c"]]
        assert 32 <= row["registers"] <= 255 and row["spills"] >= 0
        assert row["spills"] == 0 or row["registers"] == 255, row
        assert row["shared"] <= 1.05 * model["shared"], row
        assert row["B_r"] < 64 or row["shared"] >= 0.95 * model["shared"], row
        agree += (row["spills"] > 0) == (model["registers"] > 255)
    assert agree >= 24


def test_layouts_are_recorded_for_both_targets_and_both_d():
    rows = records.recorded("layouts")["layouts"]
    assert [(row["target"], row["d"]) for row in rows] == [(t, d) for t in ("sm_80", "sm_90") for d in (64, 128)]
    for row in rows:
        assert row["S"]["shape"] == [row["B_r"], row["B_c"]] and row["O"]["shape"] == [row["B_r"], row["d"]]
        assert row["K"]["shape"] == [row["B_c"], row["d"]]
        for tensor in "SO":
            layout = parse(row[tensor]["layout"])
            assert isinstance(layout, Mma) and layout.version == {"sm_80": 2, "sm_90": 3}[row["target"]]
            assert layout.warps[0] * layout.warps[1] == row["warps"]
        assert tuple(row["warpsPerCTA"]) == parse(row["S"]["layout"]).warps
        assert row["instruction"] == {"sm_80": "mma", "sm_90": "wgmma"}[row["target"]]
        assert isinstance(parse(row["K"]["layout"]), Shared)


def test_comments_do_not_make_a_record_old(tmp_path, monkeypatch):
    kernels = tmp_path / "fa2_lab" / "kernels" / "portable"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(compiled, "PROJECT", tmp_path)
    digests = []
    for forward in (
        "x = 1\n",
        "x = 1  # one\n\n",
        "from a import (\n    b,\n)\nx = 1\n",
        "x = (  # one\n    1)\n",
        "x = 2\n",
    ):
        (kernels / "forward.py").write_text(forward)
        for other in ("softmax.py", "tile.py"):
            (kernels / other).write_text("y = 1\n")
        digests.append(compiled.source_digest())
    assert digests[0] == digests[1] == digests[2] and len(set(digests)) == 3


def test_without_a_record_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    for picture in (accumulators, swizzled_keys):
        with pytest.raises(ValueError, match=r"layouts\.json is missing: `python -m fa2_studio.compiled`"):
            picture.data()


# The compiler -------------------------------------------------------------------------------------------------

TTGIR = """
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 8]}>
#shared = #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>
  %k = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xf16, #shared, #smem, mutable> loc(#loc269)
  %q = ttg.local_alloc %x_62 : (tensor<128x128xf16, #blocked>) -> !ttg.memdesc<128x128xf16, #shared, #smem> loc(#loc2)
  %s = tt.dot %q, %k, %c : tensor<128x128xf16, #a> * tensor<128x64xf16, #b> -> tensor<128x64xf32, #mma> loc(#loc3)
  %o = ttng.warp_group_dot %p, %v, %c {isAsync = true} : tensor<2x2xf16> -> tensor<128x128xf32, #mma> loc(#loc4)
"""


def test_layouts_are_found_in_the_compiler_s_text():
    found = compiled.found_in(dict(ttgir=TTGIR, spills=3))
    assert found["spills"] == 3 and "ttgir" not in found
    assert [found[t]["shape"] for t in "SOK"] == [[128, 64], [128, 128], [64, 128]]
    assert parse(found["S"]["layout"]) == parse(found["O"]["layout"]) == Mma(2, (4, 1), (16, 8))
    assert parse(found["K"]["layout"]) == Shared(8, 1, 8)
    with pytest.raises(ValueError, match=r"^the forward's products differ from loop to loop"):
        compiled.found_in(dict(ttgir=TTGIR + TTGIR.replace("64xf32", "32xf32")))


@pytest.mark.skipif(sys.platform != "linux" or not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.skipif(
    not (compiled.PROJECT / "fa2_lab" / "kernels" / "portable" / "forward.py").is_file(), reason="needs the kernels"
)
def test_the_compiler_still_does_what_is_recorded():
    (recorded,) = [k for k in records.recorded("layouts")["layouts"] if (k["target"], k["d"]) == ("sm_80", 64)]
    (now,) = compiled.compiled("sm_80", [{k: recorded[k] for k in ("target", "d", *compiled.TILE)}])
    assert now["registers"] > 64 and now["shared"] > 2**14
    if now["triton"] == records.recorded("layouts")["made_by"]["triton"]:
        assert all(now[tensor] == recorded[tensor] for tensor in "SOK")


def test_a_compilation_that_fails_is_told():
    with pytest.raises(ValueError, match=r"^compiling for sm_none failed, as told above"):
        [*compiled.compiled("sm_none", [dict(d=64, **compiled.TILE)])]


# Accumulators -------------------------------------------------------------------------------------------------


def test_every_element_of_a_tile_is_held_once():
    _, _, data = drawn("accumulators")
    for kernel in data["kernels"]:
        for tensor in "SO":
            owners = kernel[tensor]
            held = Counter(zip(*(x.ravel().tolist() for x in owners), strict=True))
            assert set(held.values()) == {1} and len(held) == owners.warp.size
            registers = 1 + owners.register.max()
            assert 4 * 32 * registers == owners.warp.size


def test_a_row_of_s_and_of_o_is_in_the_same_four_lanes_of_one_warp():
    _, _, data = drawn("accumulators")
    for kernel in data["kernels"]:
        for S_row, O_row in zip(zip(*kernel["S"], strict=True), zip(*kernel["O"], strict=True), strict=True):
            assert set(S_row[0]) == set(O_row[0]) and len(set(S_row[0])) == 1
            assert set(S_row[1]) == set(O_row[1]) and len(set(S_row[1])) == 4


def test_the_strips_are_those_of_the_warps_and_one_instruction_is_framed():
    figure, alt, _ = drawn("accumulators")
    strips = [p for w in range(4) for p in tagged(figure, f"warp {w}")]
    assert len(strips) == 4 * 2 * 8  # four kernels, S and O, 128 rows in strips of 16
    for strip in strips:
        w = int(strip.get_gid().removeprefix("warp "))
        assert strip.label_text.get_text() == strip.get_gid() and strip.get_y() // 16 % 4 == w
        assert style.colors.same_color(strip.get_facecolor(), style.worker(w))
    frames = Counter((f.get_height(), f.get_width()) for f in tagged(figure, "instruction"))
    assert frames == {(16, 8): 4, (64, 64): 3, (64, 128): 1}
    assert alt.startswith("Observed (read from the compiled kernel)")


def test_a_row_s_maximum_is_found_by_its_four_lanes():
    figure, _, data = drawn("row_reduction")
    row, scores, lanes = data["row"], data["scores"], [20, 21, 22, 23]
    for c in [*range(12), *range(120, 128)]:
        shown = {name: tagged(figure, f"{name} {c}")[0].label_text.get_text() for name in ("score", "lane", "register")}
        assert shown["lane"] == str(4 * (row % 8) + c % 8 // 2)
        assert shown["register"] == str(c // 8 * 4 + row % 16 // 8 * 2 + c % 2)
        assert int(shown["score"].replace("−", "-")) == scores[c]
    own = {t: max(scores[c] for c in range(128) if c % 8 // 2 == t - lanes[0]) for t in lanes}
    pairs = {t: max(own[t], own[t ^ 1]) for t in lanes}
    for step, known in enumerate((own, pairs, dict.fromkeys(lanes, scores.max()))):
        for lane, number in known.items():
            assert tagged(figure, f"known {step} {lane}")[0].label_text.get_text() == str(number)
    assert len(set(own.values())) == 4 and len(set(pairs.values())) == 2  # or a step too few would not be seen


def test_one_lane_s_registers_are_drawn_where_they_lie():
    figure, _, _ = drawn("row_reduction")
    (held,) = tagged(figure, "held")
    corners = held.get_path().vertices.reshape(-1, 5, 2)[:, 0]
    (frame,) = tagged(figure, "row")
    wide, high = frame.get_width() / 128, frame.get_height()
    places = np.round((corners - [frame.get_x(), 0]) / [wide, high]).astype(int).tolist()
    assert sorted((r, c) for c, r in places) == [(r, c) for r in (21, 29) for c in range(128) if c % 8 < 2]
    assert frame.get_y() == pytest.approx(21 * high)


def where(ax, words):
    """Where a text stands, which stands there once."""
    (found,) = (text for text in ax.texts if text.get_text() == words)
    return found.get_position()


def test_a_strip_is_named_at_its_middle_and_has_its_rows():
    ax = drawn("row_reduction")[0].axes[0]
    (frame,) = tagged(ax, "row")
    high = frame.get_height()
    for w in range(4):
        (strip,) = tagged(ax, f"warp {w}")
        assert strip.get_height() == pytest.approx(16 * high) and strip.get_y() == pytest.approx(16 * w * high)
        x, y = where(ax, f"warp {w}: {16 * w}–{16 * w + 15}")
        assert x < strip.get_x() and y == pytest.approx(strip.get_y() + strip.get_height() / 2)
        assert same_color(strip.get_facecolor(), style.tint(style.INK, 0.12))
    (arrow,) = (text for text in ax.texts if text.get_text() == "row 21")
    assert arrow.xy == pytest.approx((frame.get_x() + frame.get_width(), 21.5 * high))
    assert arrow.get_position()[0] > arrow.xy[0] and arrow.arrow_patch is not None


def test_columns_lanes_and_steps_are_named_beside_their_boxes():
    ax = drawn("row_reduction")[0].axes[0]
    rows = {name: tagged(ax, f"{name} 0")[0] for name in ("score", "lane", "register")}
    for box, name in zip(rows.values(), ("number", "lane", "register"), strict=True):
        x, y = where(ax, name)
        assert x < box.get_x() and y == pytest.approx(box.get_y() + box.get_height() / 2, abs=0.02)
    for c in (0, 11, 120, 127):
        (box,) = tagged(ax, f"score {c}")
        heads = [text.get_position()[0] for text in ax.texts if text.get_text() == str(c)
                 and 0 < box.get_y() - text.get_position()[1] < 0.27]  # fmt: skip
        assert heads == [pytest.approx(box.get_x() + box.get_width() / 2)]
    tones = {}
    for c in range(12):
        tones.setdefault(c % 8 // 2, set()).update(tagged(ax, f"{name} {c}")[0].get_facecolor() for name in rows)
    assert all(len(found) == 1 for found in tones.values()) and len(set.union(*tones.values())) == 4
    steps = ("of its own 32 numbers", "after shuffle with lane XOR 1", "after shuffle with lane XOR 2")
    for step, words in enumerate(steps):
        boxes = [tagged(ax, f"known {step} {lane}")[0] for lane in (20, 21, 22, 23)]
        x, y = where(ax, words)
        assert boxes[-1].get_x() + boxes[-1].get_width() < x < boxes[-1].get_x() + 1
        assert y == pytest.approx(boxes[0].get_y() + boxes[0].get_height() / 2)
        for k, (lane, box) in enumerate(zip((20, 21, 22, 23), boxes, strict=True)):
            assert [box.get_facecolor()] == [*tones[k]], "a lane has one tone"
            x, y = where(ax, f"lane {lane}")
            assert x == pytest.approx(box.get_x() + box.get_width() / 2) and (step or 0 < box.get_y() - y < 0.25)
    strokes = {(tuple(line.get_xdata()), line.get_ydata()[1]) for line in ax.lines}
    left = [tagged(ax, f"known 0 {lane}")[0].get_x() + 0.3 for lane in (20, 21, 22, 23)]
    tops = [tagged(ax, f"known {step} 20")[0].get_y() for step in (1, 2)]
    want = {((left[k ^ x], left[k]), top) for step, top in enumerate(tops, 1) for k in range(4) for x in (0, step)}
    assert np.allclose(sorted((*x, y) for x, y in strokes), sorted((*x, y) for x, y in want))


# Shared memory ------------------------------------------------------------------------------------------------


def test_addresses_are_those_of_whole_chunks():
    _, _, data = drawn("swizzled_keys")
    assert set(data["panels"]) == {(n, d) for n in ("Row-major, for contrast", "sm_80", "sm_90") for d in (64, 128)}
    for (name, d), address in data["panels"].items():
        assert address.shape == (8, d // 8) and (address % 16 == 0).all()
        assert len(np.unique(address)) == address.size
        if name == "sm_80" or d == 64:
            assert address.max() == 8 * d * 2 - 16
    assert data["panels"]["sm_90", 128].max() == 64 * 64 * 2 + 1024 - 16  # a second block behind 64 rows of 64


def test_every_chunk_is_drawn_where_it_lies():
    figure, alt, data = drawn("swizzled_keys")
    for ax in figure.axes:
        name, d = ax.get_title(loc="left").split(", d = ")
        address = data["panels"][name, int(d)]
        lines = [int(t.get_text()) for t in ax.get_yticklabels()]
        for (row, chunk), byte in np.ndenumerate(address):
            (box,) = tagged(ax, f"{row},{chunk}")
            assert byte == 128 * lines[int(box.get_y())] + 16 * box.get_x()
            marked = style.colors.same_color(box.get_facecolor(), style.hue("K"))
            assert marked == (chunk == data["chunk"]) and (not marked or box.label_text.get_text() == str(row))
        groups = {tagged(ax, f"{row},{data['chunk']}")[0].get_x() for row in range(8)}
        plain = name.startswith("Row-major")
        assert len(groups) == (1 if plain else 8)
        assert ax.get_xlabel() == f"the 8 marked: {'8' if plain else 'no two'} in the same banks"
    assert alt.startswith("Observed")


def test_the_swizzle_is_xor_and_its_conflicts_are_counted():
    figure, alt, data = drawn("swizzle_xor")
    chunk = data["chunk"]
    first, second = sorted(p.get_x() for p in tagged(figure, "chunk 0 0"))
    for row in range(8):
        (said,) = tagged(figure, f"place of {row}")
        assert said.get_text() == f"{row ^ chunk} = {row ^ chunk:03b}"
        for c in range(8):
            plain, swizzled = sorted(tagged(figure, f"chunk {row} {c}"), key=lambda p: p.get_x())
            assert plain.get_x() - first == pytest.approx(1.4 * c)
            assert swizzled.get_x() - second == pytest.approx(1.4 * (row ^ c))
            assert plain.get_y() == swizzled.get_y() == row
            assert plain.label_text.get_text() == swizzled.label_text.get_text() == str(c)
    for place in range(8):
        reads = sorted(tagged(figure, f"reads {place}"), key=lambda p: p.get_x())
        assert [p.label_text.get_text() for p in reads] == ["8" if place == chunk else "0", "1"]
    assert "8 steps for any chunk" in alt and "1 step for any chunk" in alt


def test_places_are_numbered_over_their_columns_and_bits_stand_in_theirs():
    figure, _, _ = drawn("swizzle_xor")
    ax = figure.axes[0]
    for place in range(8):
        numbers = [text.get_position() for text in ax.texts if text.get_text() == str(place) and not text.get_gid()]
        heads = sorted(x for x, y in numbers if -1 < y < 0)
        reads = sorted(box.get_x() + box.get_width() / 2 for box in tagged(ax, f"reads {place}"))
        assert heads == pytest.approx(reads)
        strengths = {"8": 1.0, "1": 0.4, "0": 0.0}
        for box in tagged(ax, f"reads {place}"):
            fill = style.tint(style.hue("K"), strengths[box.label_text.get_text()])
            assert same_color(box.get_facecolor(), fill), place
    heads = {name: where(ax, name)[0] for name in ("row", "chunk", "place")}
    for row in range(8):
        for name, x in heads.items():
            assert tagged(ax, f"{name} of {row}")[0].get_position() == (x, row + 0.5)
    signs = {sign: {t.get_position()[0] for t in ax.texts if t.get_text() == sign} for sign in "⊕→"}
    ((xor,), (arrow,)) = signs.values()
    assert heads["row"] < xor < heads["chunk"] < arrow < heads["place"]
    assert all(where(ax, name)[1] == where(ax, "row")[1] > -1 for name in heads)


# Block sizes --------------------------------------------------------------------------------------------------


def test_the_budget_shows_what_was_seen():
    figure, alt, _ = drawn("block_budget")
    rows = records.recorded("compiled")["forward"]
    assert len(tagged(figure, "spilled")) == sum(row["spills"] > 0 for row in rows) > 0
    assert "compiled kernel spills" in alt and "compiled for H100" in figure.get_supxlabel()
