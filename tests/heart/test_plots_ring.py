"""Pictures of the ring: what they show is what they were given, and a record's numbers reach them."""

from itertools import pairwise

import numpy as np
import pytest
from pictures import drawn, tagged

from fa2_lab import records
from fa2_lab.plots import ring_schedule, ring_speed, style, zigzag
from fa2_lab.records import Measurement, Record, load
from fa2_studio.bench.results import save

MACHINE = dict(gpu="NVIDIA H200", driver="1", python="3", torch="2.11", triton="3.6", cudnn="9", commit="abc", gpus=4)


def words(figure):
    return [t.get_text() for t in style.texts(figure)]


def test_each_cell_shows_half_of_its_square_in_the_colour_of_its_keys():
    data = ring_schedule.data(ranks=4)
    for rank, row in enumerate(data["cells"]):
        assert [cell["source"] for cell in row] == [(rank - step) % 4 for step in range(4)]
        assert row[0]["diagonal"] and not any(cell["diagonal"] for cell in row[1:])
        for cell in row[1:]:
            (top, bottom), (left, right) = cell["rows"], cell["cols"]
            assert (bottom - top) * (right - left) == 0.5
    figure, _ = ring_schedule.draw(**data)
    for source in range(4):
        patches = figure.findobj(lambda a, gid=f"keys of {source}": a.get_gid() == gid)
        assert len(patches) == 4
        assert {style.colors.to_hex(p.get_facecolor()).upper() for p in patches} == {style.worker(source)}


def recorded_ms(direction, who, N=131072):
    """As the record has it, read in another way than the picture does."""
    rows = [r for r in load("ring", records.FOLDER).rows if (r.direction, r.problem["N_q"]) == (direction, N)]
    return next(r.values[who][0] for r in rows if who in r.values and "layout" not in r.problem)


def test_transfers_start_with_their_block_and_kernels_run_at_the_recorded_speed_of_one_gpu():
    data = ring_schedule.data()
    for direction, spans in data["lanes"].items():
        kernels = [s for s in spans if s[0] == "kernels"]
        assert all(a[2] == pytest.approx(b[1]) for a, b in pairwise(kernels))
        assert kernels[-1][2] == pytest.approx(recorded_ms(direction, "1 GPU") / 4, rel=1e-3)
        assert sum(s[0] == "K V" for s in spans) == 3
        assert sum(s[0] == "dK dV" for s in spans) == (3 if direction == "backward" else 0)
        sent = sum(s[2] - s[1] for s in spans if s[0] == "K V")
        assert sent == pytest.approx(recorded_ms("K V once round", "4 GPUs"))
        starts = [k[1] for k in kernels]
        assert all(any(s[1] == pytest.approx(start) for start in starts) for s in spans if s[0] != "kernels")


def test_the_record_stands_beside_the_model():
    figure, alt, data = drawn("ring_schedule")
    for ax, direction in zip(figure.axes[1:3], ("forward", "backward"), strict=True):
        (bar,) = tagged(ax, "measured")
        assert (bar.get_x(), bar.get_width()) == (0, recorded_ms(direction, "4 GPUs"))
        assert bar.label_text.get_text() == f"{recorded_ms(direction, '4 GPUs'):.1f} ms"
        assert bar.get_width() > max(span[2] for span in data["lanes"][direction])
    lines = {line.get_label(): dict(line.get_xydata()) for line in figure.axes[3].lines}
    assert lines["measured"] == {N: recorded_ms("forward", "4 GPUs", N) for N in lines["measured"]}
    assert len(lines["measured"]) == 5 and set(lines["model"]) == set(lines["measured"])
    assert lines["model"][131072] == pytest.approx(data["lanes"]["forward"][-1][2])
    assert all(lines["model"][N] < took for N, took in lines["measured"].items())
    assert "a forward of 8k tokens takes 2.7 ms" in alt


def test_zigzag_counts_are_the_model_s():
    data = zigzag.data(ranks=4, N=1024, B=64)
    assert list(data["tiles"]) == list(data["owners"]) == ["contiguous", "zigzag"]
    assert data["owners"]["zigzag"][:, 0].tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert data["owners"]["contiguous"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all((np.triu(owner, 1) <= 0).all() for owner in data["owners"].values())
    figure, alt = zigzag.draw(**data)
    assert "tiles: ranks are busy 100% of the time" in words(figure) and f"{data['tiles']['zigzag'][0]:,}" in alt
    assert len(figure.findobj(lambda a: a.get_gid() == "skipped")) == 2 * 28


def record(contiguous=True):
    """A made-up run: two GPUs 1.5 times, four twice as fast as one."""
    rows = []
    for N in (1024, 2048):
        problem = dict(batch=1, heads=16, kv_heads=16, N_q=N, N_k=N, d=128, causal=True, dtype="bfloat16")
        times = {"1 GPU": [6.0, 6.0, 6.0], "2 GPUs": [4.0, 4.0, 4.0], "4 GPUs": [3.0, 3.0, 3.0]}
        memory = {"1 GPU": [4096.0], "2 GPUs": [3072.0], "4 GPUs": [1024.0]}
        rows += [Measurement(problem, "both", times), Measurement(problem, "peak memory", memory, unit="MiB")]
        if contiguous and N == 2048:
            rows.append(Measurement(problem | dict(layout="contiguous"), "both", {"4 GPUs": [5.0, 5.0, 5.0]}))
    return Record("ring", MACHINE, "by hand", rows=rows)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_record_reaches_its_picture(contiguous, tmp_path, monkeypatch):
    save(record(contiguous), tmp_path)
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    data = ring_speed.data()
    assert data["curves"] == {2: [(1024, 1.5), (2048, 1.5)], 4: [(1024, 2.0), (2048, 2.0)]}
    assert data["contiguous"] == ((4, 2048, 1.2) if contiguous else None)
    assert data["memory"] == {1: 4096, 2: 3072, 4: 1024}
    figure, alt = ring_speed.draw(**data)
    assert figure.get_suptitle() == "Long sequences share out: 4 GPUs at 50.0% of linear speed, 2k tokens"
    assert "4 GPUs\n2.00" in words(figure) and ("1.20 times" in alt) == contiguous
    heights = [figure.findobj(lambda a, gid=g: a.get_gid() == gid)[0].get_height() for g in ("1 GPUs", "4 GPUs")]
    assert heights == [4, 1]


def test_a_missing_record_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="`python -m fa2_lab bench ring` measures it"):
        ring_speed.data()


def test_a_speed_stands_over_its_length_and_a_bar_over_its_name():
    figure, _ = ring_speed.draw(
        {2: [(1024, 1.5), (2048, 1.75)], 4: [(1024, 2.0), (2048, 3.5)]}, (4, 2048, 1.2), {1: 4096, 2: 3072}, "made up"
    )
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.lines}
    assert [*map(tuple, lines["2"].get_xydata())] == [(1024, 1.5), (2048, 1.75)]
    assert [*map(tuple, lines["4"].get_xydata())] == [(1024, 2.0), (2048, 3.5)]
    assert [*map(tuple, lines["contiguous"].get_xydata())] == [(2048, 1.2)]
    assert len({lines[name].get_marker() for name in ("2", "4", "contiguous")} - {"None", ""}) == 3
    linear = [line for line in left.lines if line.get_linestyle() == "--"]
    assert [[*map(tuple, line.get_xydata())] for line in linear] == [[(1024, n), (2048, n)] for n in (2, 4)]
    ends = {t.get_text(): t.get_position() for t in left.texts}
    assert ends["2 GPUs\n1.75"] == (pytest.approx(1.12 * 2048), 1.75) and ends["4 GPUs, contiguous, 1.20"][0] < 2048
    named = {tick.label1.get_text(): tick.get_loc() for tick in right.xaxis.get_major_ticks()}
    for n, name in ((1, "1 GPU"), (2, "2 GPUs")):
        (bar,) = tagged(right, f"{n} GPUs")
        assert bar.get_x() + bar.get_width() / 2 == pytest.approx(named[name])
        gib = {t.get_position(): t.get_text() for t in right.texts}
        assert gib[named[name], bar.get_height()] == f"{bar.get_height():.1f}"
    assert left.get_xlabel() == "tokens in all"


def test_model_and_measured_are_told_apart():
    ax = drawn("ring_schedule")[0].axes[3]
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in ax.lines}
    assert looks == {"model": (style.QUIET, "--"), "measured": (style.INK, "-")}
    points = {line.get_label(): [*map(tuple, line.get_xydata())] for line in ax.lines}
    assert {note.get_text(): note.xy for note in ax.texts} == {name: curve[1] for name, curve in points.items()}
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_each_rank_s_bar_and_pieces_are_its_own():
    figure, _, data = drawn("zigzag")
    most = max(n for counts in data["tiles"].values() for n in counts)
    for rank in range(len(data["tiles"]["zigzag"])):
        bars = tagged(figure, f"tiles of {rank}")
        assert [bar.get_width() for bar in bars] == [counts[rank] / most for counts in data["tiles"].values()]
        assert [bar.get_y() for bar in bars] == [pytest.approx(rank + 0.1)] * 2
        for way, owner in data["owners"].items():
            (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == way)
            pieces = {(p.get_y(), p.get_x(), p.get_height()) for p in tagged(ax, f"rank {rank}")}
            assert pieces == {(i, j, 1) for i, j in np.argwhere(owner == rank).tolist()}
