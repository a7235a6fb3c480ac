"""Pictures of what was measured: the numbers of a small made-up record reach them, and a missing record is named."""

import pytest

from fa2_lab import records
from fa2_lab.plots import climb, hbm_traffic, roofline, speed, style, time_and_memory
from fa2_lab.plots.speed import apart, short
from fa2_lab.records import Measurement, Record, load
from fa2_studio.bench.results import save

MACHINE = dict(gpu="NVIDIA H200", driver="1", python="3", torch="2.11", triton="3.6", cudnn="9", commit="abc")
CEILINGS = {"GEMM TFLOP/s": 800.0, "copy TB/s": 4.0}
RUNGS = dict(r00_standard=4.0, r01_fa1=16.0, r03_row_blocks=2.0, r04_deferred=2.0, r08_pipelined=1.0)  # ms at d = 64
BYTES = dict(r00_standard=12e9, r01_fa1=20e9, r03_row_blocks=2e8, r04_deferred=2e8, r08_pipelined=2e8)


def problem(N=4096, d=64, causal=False, batch=4, heads=16):
    return dict(batch=batch, heads=heads, kv_heads=heads, N_q=N, N_k=N, d=d, causal=causal, dtype="bfloat16")


def ladder(suite="ladder", rungs=RUNGS, moves=BYTES):
    times = {name: [ms, ms, ms] for name, ms in rungs.items()} | {"cuDNN": [0.9, 0.9, 0.9]}
    rows = [Measurement(problem(batch=1, heads=8), "forward", times, flops=1e11)]
    rows += [Measurement(problem(causal=causal), "forward", times, flops=8e11) for causal in (True, False)]
    for rung, moved in moves.items():
        read = {"DRAM bytes read": [0.75 * moved], "DRAM bytes written": [0.25 * moved], "L2 bytes": [1e12]}
        rows.append(Measurement(problem() | dict(rung=rung), "counters", read, unit="count"))
    rows.append(
        Measurement(
            problem(d=128) | dict(rung="r01_fa1"), "counters", {}, {"ncu": "ncu is not installed"}, unit="count"
        )
    )
    rows.append(Measurement(problem(d=128), "forward", times, flops=16e11))
    return Record(suite, MACHINE, "by hand", CEILINGS, rows)


def paper():
    rows = []
    for N in (512, 1024, 2048):
        for d, causal in ((64, False), (128, True)):
            for direction, factor in (("forward", 1), ("backward", 2)):
                speeds = dict(fa2_lab=400.0, cuDNN=500.0 + N / 100, FlexAttention=399.0)
                speeds |= {"torch flash": 200.0, "fa2_lab portable": 300.0}
                values = {name: [factor * 1e12 / s / 1e9] for name, s in speeds.items() if (name, N) != ("cuDNN", 512)}
                row = Measurement(problem(N, d, causal), direction, values, {"flash_attn": "not installed"})
                row.flops = factor * 1e12
                rows.append(row)
    return Record("paper", MACHINE, "by hand", CEILINGS, rows[::-1])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with two records, in the place of figures/data."""
    save(ladder(), tmp_path)
    save(paper(), tmp_path)
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return tmp_path


def words(artist):
    return [t.get_text() for t in style.texts(artist)]


# Roofline -----------------------------------------------------------------------------------------------------


def test_a_rung_stands_at_its_intensity_and_speed():
    data = roofline.data(d=64)
    assert list(data["points"]) == [rung for rung in RUNGS if rung != "r04_deferred"]
    assert data["points"]["r01_fa1"] == pytest.approx((8e11 / 20e9, 50.0))
    assert data["points"]["r08_pipelined"] == pytest.approx((4000.0, 800.0))
    assert data["measured"] == dict(flops=800.0, bytes=4.0)
    assert data["datasheet"] == pytest.approx(dict(flops=989.4, bytes=4.8))
    for part in ("NVIDIA H200", "bf16", "batch 4", "N = 4,096", "d = 64", "no mask"):
        assert part in data["setting"]


def test_the_roof_bends_where_memory_and_products_meet():
    data = roofline.data(d=64)
    figure, alt = roofline.draw(**data)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    x, y = lines["measured"].get_data()
    assert (x[1], y[1], y[2]) == (200.0, 800.0, 800.0) and y[0] == pytest.approx(4.0 * x[0])
    assert list(map(tuple, lines["rungs"].get_xydata())) == list(data["points"].values())
    assert "01 fa1, 50" in words(figure) and "08 pipelined, 800" in words(figure)
    assert "01 fa1 50 at 40 FLOPs per byte" in alt and data["setting"] in alt


def test_counters_that_could_not_be_read_say_why():
    with pytest.raises(ValueError, match="no DRAM counters for it: ncu is not installed"):
        roofline.data(d=128)
    with pytest.raises(ValueError, match=r"^d: got 32"):
        roofline.data(d=32)


def test_labels_are_pushed_apart_and_keep_their_order():
    assert apart([1.0, 5.0, 9.0], 2) == [1, 5, 9]
    assert apart([3.0, 3.0], 2) == [2, 4]
    assert apart([10.0, 3.0, 3.0], 2) == [10, 2, 4]
    crowded = apart([1.0, 1.1, 1.2, 8.0], 1)
    assert crowded == pytest.approx([0.1, 1.1, 2.1, 8.0])
    assert sum(crowded[:3]) == pytest.approx(3.3)


def test_labels_stand_at_the_roofs_and_lines_lead_to_the_labels_of_crowded_rungs():
    figure, _ = roofline.draw(**roofline.data(d=64))
    ax = figure.axes[0]
    notes = {note.get_text(): note.xy for note in ax.texts if hasattr(note, "xy")}
    assert notes["GEMM in the same run, 800"] == (200, 800)
    assert notes["copy in the same run,\n4.00 TB/s"] == (100, 400)
    assert notes["datasheet: 989 TFLOP/s, 4.8 TB/s"][1] == pytest.approx(989.4, abs=0.1)
    plain = {text.get_text(): text.get_position() for text in ax.texts if not hasattr(text, "xy")}
    leads = [line.get_xydata() for line in ax.lines if line.get_label().startswith("_")]
    assert len(leads) == len(plain) == 2 and "08 pipelined, 800" in plain
    for (start, end), (x, y) in zip(leads, plain.values(), strict=True):
        assert tuple(start) in roofline.data(d=64)["points"].values() and (end[1], x > end[0]) == (y, True)


# Climb --------------------------------------------------------------------------------------------------------


@pytest.fixture
def climbed(folder):
    """The rungs at d = 64, twice as fast without a mask as with one, beside a peer at 1,000 and 500 TFLOP/s."""
    record = ladder()
    for row in record.rows:
        if row.direction == "forward":
            row.values["cuDNN"] = [0.8]
            row.flops /= 1 + row.problem["causal"]
    save(record, folder)
    return climb.data(d=64)


def test_a_rung_s_speed_is_the_recorded_one_of_the_shape_that_fills_the_gpu(climbed):
    names = [(rung.number, rung.name, rung.full, rung.causal) for rung in climbed["rungs"]]
    speeds = [("00", "standard", 200), ("01", "fa1", 50), ("03", "row blocks", 400), ("04", "deferred", 400)]
    wanted = [*speeds, ("08", "pipelined", 800)]
    assert names == [(number, name, pytest.approx(x), pytest.approx(x / 2)) for number, name, x in wanted]
    assert climbed["peer"] == ("cuDNN", pytest.approx(1000), pytest.approx(500))
    assert "N = 4,096, d = 64, 32 heads" in climbed["setting"] and "NVIDIA H200" in climbed["setting"]


def test_the_climb_is_drawn_as_it_was_measured_and_what_loses_is_pale(climbed):
    figure, alt = climb.draw(**climbed)
    assert figure.get_suptitle() == "From 20% to 80% of cuDNN in 4 changes"
    ax = figure.axes[0]
    names = {tick.label1.get_text(): tick.get_loc() for tick in ax.yaxis.get_major_ticks()}
    (dots,) = (line for line in ax.lines if line.get_gid() == "causal")
    for y, rung in enumerate(climbed["rungs"]):
        (bar,) = ax.findobj(lambda part, gid=f"rung {rung.number}": part.get_gid() == gid)
        assert (bar.get_x(), bar.get_width(), names[f"{rung.number}  {rung.name}"]) == (0, rung.full, y)
        assert bar.get_y() + bar.get_height() / 2 == pytest.approx(y)
        pale = style.tint(style.INK, 0.12 if rung.number in ("01", "04") else 0.32)
        assert style.colors.same_color(bar.get_facecolor(), pale)
        assert tuple(dots.get_xydata()[y]) == (rung.causal, y)
        assert [t.get_text() for t in ax.texts if t.get_position()[1] == y] == [f"{rung.full:.0f}"]
    peer = {line.get_linestyle(): line.get_xdata()[0] for line in ax.lines if line is not dots}
    assert peer == pytest.approx({"-": 1000, "--": 500})
    assert ax.get_xlabel().startswith("TFLOP/s") and "00 standard 200 and 100; 01 fa1 50 and 25" in alt


# Speed --------------------------------------------------------------------------------------------------------


def test_a_curve_is_the_recorded_rate_over_N():
    data = speed.data()
    assert set(data["panels"]) == {(way, *x) for way in ("forward", "backward") for x in ((64, False), (128, True))}
    assert next(iter(data["panels"]))[0] == "forward"
    curves = data["panels"]["backward", 128, True]
    assert curves["fa2_lab"] == [(N, pytest.approx(400.0)) for N in (512, 1024, 2048)]
    assert [N for N, _ in curves["cuDNN"]] == [1024, 2048]
    assert "flash_attn" not in curves and data["gemm"] == 800.0
    assert curves["torch flash"][0][1] == pytest.approx(load("paper", records.FOLDER).rows[0].rate("torch flash"))


def test_every_curve_is_drawn_and_every_contestant_named():
    data = speed.data()
    figure, alt = speed.draw(**data)
    assert len(figure.axes) == 4
    for ax, curves in zip(figure.axes, data["panels"].values(), strict=True):
        drawn = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
        assert {name: list(map(tuple, line.get_xydata())) for name, line in drawn.items()} == curves
        assert [line.get_ydata()[0] for line in ax.lines if line.get_label() == "_GEMM"] == [800.0]
    assert {"fa2_lab", "fa2_lab portable", "cuDNN", "FlexAttention", "torch flash", "GEMM"} <= set(words(figure))
    assert (
        "forward d 64 full 400 (2.00, portable 300)" in alt
        and "multiple of torch flash" in alt
        and "NVIDIA H200" in alt
    )


def test_the_title_names_every_peer_and_counts_who_is_faster():
    figure, _ = speed.draw(**speed.data())
    title = "fa2_lab is faster than cuDNN at 0 of 8 points,\nthan FlexAttention, torch flash at 12 of 12 points"
    assert figure.get_suptitle() == title
    assert "flash_attn" not in title, "it was not measured"


def test_every_peer_has_a_hue_of_its_own():
    peers = [look["color"] for name, look in speed.LOOKS.items() if not name.startswith("fa2_lab")]
    assert len(set(peers)) == len(peers) == len(speed.CONTESTANTS) - 2
    figure, _ = speed.draw(**speed.data())
    for ax in figure.axes:
        for line in ax.lines:
            if not line.get_label().startswith("_"):
                assert line.get_color() == speed.LOOKS[line.get_label()]["color"]


def test_lengths_are_written_short():
    assert [short(N) for N in (512, 1024, 16384)] == ["512", "1k", "16k"]


# Crosses and missing records ----------------------------------------------------------------------------------


def test_the_cross_is_what_one_head_moved(folder):
    assert hbm_traffic.data(N=512)["counters"] is None, "rung 07 was not counted"
    save(ladder(moves=BYTES | dict(r07_two_loops=3e8)), folder)
    found = hbm_traffic.data(N=512)["counters"]
    per_head = 64 * 2  # heads, bytes of an element
    assert found["points"] == {"L2": (4096, 1e12 / per_head), "DRAM": (4096, 300e6 / per_head)}
    assert found["source"] == "NVIDIA H200, FA2, 64 heads at once"


@pytest.mark.parametrize("suite, data", [("ladder", roofline.data), ("paper", speed.data)])
def test_a_missing_record_says_how_to_get_it(folder, suite, data):
    (folder / f"bench_{suite}.json").unlink()
    with pytest.raises(ValueError, match=rf"bench_{suite}.json is missing: `python -m fa2_lab bench {suite}` measures"):
        data()


# Time and memory ----------------------------------------------------------------------------------------------


def test_time_and_memory_takes_16384_tokens_without_a_mask_for_time_and_any_row_of_d_128_for_memory():
    rows = [
        Measurement(problem(N, d, causal, batch=batch), direction, {"x": [1000.0 * batch + N]})
        for N, batch in ((4096, 4), (8192, 2), (8192, 1))
        for d, causal, direction in ((128, False, "forward"), (64, False, "forward"), (128, False, "backward"))
    ]
    rows[0].values["y"] = [1.0]
    record = Record("memory", MACHINE, "by hand", rows=rows[::-1])
    assert time_and_memory.points(record, "x", whole=True) == [(4096, 8096.0), (8192, 10192.0)]
    assert time_and_memory.points(record, "y", whole=True) == [(4096, 1.0)]
    for row in rows:
        row.problem["causal"] = True
    assert time_and_memory.points(record, "x", whole=True) == []
    assert [N for N, _ in time_and_memory.points(record, "x", whole=False)] == [4096, 8192]


def test_time_and_memory_takes_each_curve_from_its_record(folder):
    """FA2 is torch's; the standard one is a rung where time is measured, and torch's where memory is."""

    def memory(N):
        values = {"torch math": [9.0 * N], "torch flash": [2.0 * N], "fa2_lab": [1.0 * N]}
        return Measurement(problem(N, d=128, causal=True, batch=1), "forward", values, unit="MiB")

    save(Record("memory", MACHINE, "by hand", rows=[memory(N) for N in (1024, 2048)]), folder)
    whole = paper()
    values = {"fa2_lab": [3.0], "torch flash": [5.0]}
    whole.rows.append(Measurement(problem(2048, d=128, batch=8), "forward", values, flops=1e12))
    save(whole, folder)
    data = time_and_memory.data()
    assert data["time"] == dict(standard=[(4096, 4.0)], FA1=[(4096, 16.0)], FA2=[(2048, 5.0)], ours=[(2048, 3.0)])
    assert data["memory"] == {
        name: [(N, factor * N) for N in (1024, 2048)] for name, factor in (("standard", 9), ("FA2", 2), ("ours", 1))
    }
    assert "NVIDIA H200" in data["setting"] and "16,384 tokens" in data["setting"]


def test_time_and_memory_draws_every_curve_and_says_the_factor_at_the_longest_text():
    time = {name: [(512, ms), (1024, 2 * ms)] for name, ms in (("standard", 6.0), ("FA1", 9.0), ("ours", 2.0))}
    memory = {"standard": [(512, 50.0)], "FA2": [(512, 5.0), (1024, 10.0)], "ours": [(512, 5.0), (1024, 10.0)]}
    figure, alt = time_and_memory.draw(time, memory, "made up")
    assert figure.get_suptitle() == "At N = 1,024: 3.0 times as fast as standard attention, in 1/10 of its memory"
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.lines] == [[6, 12], [9, 18], [2, 4]]
    assert [list(line.get_ydata()) for line in right.lines] == [[50], [5, 10], [5, 10]]
    assert "standard from 6 at N = 512 to 12 at 1,024" in alt and alt.endswith("made up.")
