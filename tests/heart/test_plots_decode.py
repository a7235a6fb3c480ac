"""Pictures of decode: every tile drawn once in its program's colour, every part that is merged, the measured curve."""

import pytest

from fa2_lab import records
from fa2_lab.machine.splits import Shares
from fa2_lab.plots import ends, programs, shares, style
from fa2_lab.records import Measurement, Record
from fa2_studio.bench.results import save

MACHINE = dict(gpu="NVIDIA H200", driver="1", python="3", torch="2.11", triton="3.6", cudnn="9", commit="abc")
PROBLEM = dict(batch=1, heads=32, kv_heads=8, N_q=1, N_k=65536, d=128, causal=False, dtype="bfloat16")


def labelled(figure, letter=""):
    """{label: how many boxes have it}"""
    words = [p.label_text.get_text() for p in figure.findobj(lambda artist: hasattr(artist, "label_text"))]
    return {word: words.count(word) for word in words if word.startswith(letter)}


def test_each_tile_bears_the_number_of_its_program():
    cut = shares.data()["cut"]
    figure, alt = shares.draw(cut)
    counts = labelled(figure)
    for w in range(cut.programs):
        assert counts[str(w)] == sum(last - first for _, first, last in cut.spans(w))
    assert {label for label in counts if label.startswith("part")} == {"part 0", "part 1", "part 5", "part 6"}
    assert "head 2: 0 tiles, finished by program 1" in alt and "head 3: 12 tiles, merged from parts 5, 6" in alt


def test_a_head_s_tiles_parts_and_result_stand_in_its_row_and_a_merge_leads_from_parts_to_result():
    figure, _ = shares.draw(shares.data()["cut"])
    ax = figure.axes[0]
    rows = {}
    for box in ax.findobj(lambda part: hasattr(part, "label_text")):
        assert box.get_height() < 1
        rows.setdefault(round(box.get_y() + box.get_height() / 2, 6), []).append(box)
    said = {text.get_text(): text.get_position() for text in ax.texts}
    assert sorted(rows) == [said[f"head {head}"][1] for head in range(5)] == [0, 1, 2, 3, 4]
    merges = {text.get_position()[1]: text for text in ax.texts if text.get_text() == "merge"}
    for head, boxes in rows.items():
        (result,) = (box for box in boxes if box.label_text.get_text().startswith("O"))
        assert result.label_text.get_text() == f"O, L of {head:.0f}"
        parts = [box for box in boxes if box.label_text.get_text().startswith("part")]
        assert bool(parts) == (head in merges)
        if parts:
            arrow, end = merges[head], max(box.get_x() + box.get_width() for box in parts)
            assert end < arrow.get_position()[0] < arrow.xy[0] < result.get_x() and arrow.xy[1] == head
            assert arrow.arrow_patch is not None


def test_other_shares_give_another_picture():
    figure, alt = shares.draw(Shares((6, 6), 1))
    assert labelled(figure)["0"] == 12 and not labelled(figure, "part") and "merged" not in alt


@pytest.fixture
def record(tmp_path, monkeypatch):
    values = {"fa2_lab": [70.0, 69.0, 71.0], "cuDNN": [72.0, 71.0, 73.0], "reading alone": [62.0, 61.0, 63.0]}
    rows = [Measurement(PROBLEM | dict(bytes=268435456), "decode", values, unit="µs")]
    curves = dict(programs=[8, 16, 264], microseconds=[500.0, 260.0, 70.0], usual=[264])
    save(Record("decode", MACHINE, "by hand", {"copy TB/s": 4.0}, rows, curves=curves), tmp_path)
    clocks = dict(SM=[0.0, 0.0, 7.0], ended=[220.0, 221.0, 200.0])
    save(Record("ends", MACHINE, "by hand", curves=clocks), tmp_path)
    monkeypatch.setattr(records, "FOLDER", tmp_path)


def test_the_curve_is_what_was_recorded(record):
    data = programs.data()
    assert data["curve"] == [(8, 500.0), (16, 260.0), (264, 70.0)] and data["usual"] == 264
    assert data["floor"] == 62.0 and data["rivals"] == dict(fa2_lab=70.0, cuDNN=72.0)
    assert data["model"][0][1] > data["model"][1][1] > data["model"][2][1] > data["floor"]
    figure, alt = programs.draw(**data)
    assert "From 8 programs to 264: the same bytes in 14% of the time" in figure.get_suptitle()
    assert "cuDNN 72 µs" in alt and "NVIDIA H200" in alt and "65,536 keys" in alt
    assert [tuple(p) for p in figure.axes[0].lines[1].get_xydata()] == data["curve"]
    assert all(text.get_fontsize() >= 7 for text in style.texts(figure))


def test_every_program_is_a_dot_over_its_SM(record):
    figure, alt = ends.draw(**ends.data())
    assert [tuple(p) for p in figure.axes[0].lines[0].get_xydata()] == [(0, 220), (0, 221), (7, 200)]
    assert "the last program ends 10% after the first" in figure.get_suptitle()
    assert "3 programs" in alt and "between 200 and 221 µs, half of them by 220" in alt
    assert all(text.get_fontsize() >= 7 for text in style.texts(figure))


def test_without_a_record_one_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"bench_decode\.json is missing"):
        programs.data()
