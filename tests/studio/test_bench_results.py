"""How results of the bench are kept and shown: records, tables, RESULTS.md, fingerprints of the sources."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bench needs torch")

from bench_records import MACHINE, contest, suite

from fa2_lab import records
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import files, ladder
from fa2_studio.bench import page, peers, results
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.registry import OTHERS, SUITES

# Results ------------------------------------------------------------------------------------------------------


def test_results_come_back_as_they_were_saved(tmp_path):
    kept = suite(contest(), contest(causal=True), missing=["(2,)"], curves={"fa2_lab": [5.5, 5.25]})
    path = results.save(kept, tmp_path / "new")
    assert path.name == "bench_paper.json" and path.read_text(encoding="utf-8").endswith("}\n")
    assert records.load("paper", tmp_path / "new") == kept


def test_a_later_run_on_the_same_machine_renews_its_rows_and_keeps_the_others():
    old = suite(contest(), contest(causal=True), curves={"a": [1.0]})
    new = suite(contest(causal=True), contest(d=64), missing=["x"])
    new.rows[0].values = {"cuDNN": [9.0]}
    new.ceilings = {"copy TB/s": 4.0}
    kept = results.joined(old, new)
    assert kept.rows == [contest(), new.rows[0], contest(d=64)]
    assert kept.missing == ["x"] and kept.curves == {"a": [1.0]}
    assert kept.ceilings == {"GEMM TFLOP/s": 790.6, "copy TB/s": 4.0}
    sustained = Record("paper", MACHINE, "", sustained=[contest()], sustained_protocol="without")
    both_of_them = results.joined(old, sustained)
    assert both_of_them.rows == old.rows and both_of_them.protocol == "by hand"
    assert both_of_them.sustained == [contest()] and both_of_them.sustained_protocol == "without"
    assert results.joined(both_of_them, old).sustained == [contest()]
    new.machine = MACHINE | dict(commit="other")
    assert results.joined(old, new) is new and results.joined(None, new) is new


def test_a_missing_record_says_how_to_get_it(tmp_path):
    with pytest.raises(
        ValueError, match=r"bench_long.json is missing: `python -m fa2_lab bench long` measures it on a GPU"
    ):
        records.load("long", tmp_path)


def test_rates_and_ratios():
    row = contest()
    assert row.rate("fa2_lab") == pytest.approx(400) and row.rate("torch flash") == pytest.approx(200)
    assert row.ratio("fa2_lab", "torch flash") == 2 and row.ratio("torch flash", "fa2_lab") == 0.5


def test_a_label_says_what_differs():
    assert results.label(contest()).split() == "forward N 4096 b 4 h 16 d 128 full".split()
    grouped = contest(kv_heads=2, N_q=1, causal=True, rung="tuned")
    assert results.label(grouped).split() == "tuned N 1×4096 b 4 h 16/2 d 128 causal".split()


def test_the_table_shows_ratios_first_and_every_reason():
    counts = Measurement(contest().problem | dict(rung="fa1"), "counters", {"L2 bytes": [1.5e9]}, unit="count")
    text = results.table(suite(contest(), counts, missing=["(9,)"]), baseline="torch flash")
    head = "NVIDIA H200, torch 2.11, triton 3.6, abc1234; by hand.\nceilings: GEMM TFLOP/s 791\nspread: the middle half"
    assert text.startswith(f"{head} lies within 10.0% of the median, at worst within 10.0%\n")
    assert re.search(r"^torch flash / contestant \(TFLOP/s\) +torch flash +fa2_lab +flash_attn$", text, re.MULTILINE)
    assert re.search(r"^forward .* full +1\.00 \(200\) +2\.00 \(400\) +-$", text, re.MULTILINE)
    assert re.search(r"^count +L2 bytes\nfa1 .* \(1\.5e\+09\)$", text, re.MULTILINE)
    assert text.endswith("flash_attn: not installed\nnot measured: (9,)")


# Machines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unpacked, found",
    [
        ({}, {}),
        ({"flash_attn_4": "4.0.0b4"}, {"FlashAttention-4": "4.0.0b4"}),
        ({"flash_attn": "2.8.3", "flash_attn_4": "4.1"}, {"flash_attn": "2.8.3", "FlashAttention-4": "4.1"}),
    ],
    ids=str,
)
def test_a_machine_names_the_versions_of_the_peers_that_are_installed(unpacked, found, tmp_path, monkeypatch):
    for name, version in unpacked.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    others = [folder for folder in sys.path if not any(Path(folder).glob("*.dist-info"))]
    monkeypatch.setattr("sys.path", [str(tmp_path), *others])
    machine = results.machine()
    assert machine["peers"] == found
    kept = Record("paper", machine, "by hand")
    results.save(kept, tmp_path)
    assert records.load("paper", tmp_path) == kept


def test_peers_with_versions_are_peers():
    assert peers.DISTRIBUTIONS.keys() < peers.PEERS.keys() and peers.DISTRIBUTIONS.keys() <= set(page.PEERS)


# RESULTS.md ---------------------------------------------------------------------------------------------------


def both(causal=False, d=128, portable=4.0, **peers):
    """A row where fa2_lab takes 2 ms and the others what is said."""
    row = contest(causal=causal, d=d)
    row.values = {name: [ms] for name, ms in {"fa2_lab": 2.0, "fa2_lab portable": portable, **peers}.items() if ms}
    return row


def test_it_names_the_machine_the_ceilings_and_the_spread():
    assert page.about(suite(contest())) == (
        "Measured on NVIDIA H200, torch 2.11, triton 3.6, cuDNN 91900, driver 580, commit abc1234; by hand. "
        "In the same run: GEMM 791 TFLOP/s. "
        "Of the repetitions, the middle half lies within 10.0% of the median, at worst within 10.0%."
    )


def test_it_names_the_versions_of_peers_where_the_record_has_them():
    results = suite(contest())
    results.machine = MACHINE | dict(peers={"flash_attn": "2.8.3", "FlashAttention-4": "4.0.0b4"})
    assert "driver 580, flash_attn 2.8.3, FlashAttention-4 4.0.0b4, commit abc1234;" in page.about(results)
    results.machine = MACHINE | dict(peers={}, commit="sources 0123456789ab")
    assert "driver 580, sources 0123456789ab;" in page.about(results)


def test_both_of_us_stand_beside_every_peer():
    rows = [both(cuDNN=3.0), both(causal=True, cuDNN=1.0, portable=None), both(d=64, FlexAttention=5.0)]
    ring = Record("ring", MACHINE, "by hand", rows=[Measurement(contest().problem, "forward", {"1 GPU": [1.0]})])
    assert page.standings([suite(*rows), ring]) == [
        "| suite | GPU | direction | | over cuDNN | over FlexAttention |",
        "| --- | --- | --- | --- | --- | --- |",
        "| paper | H200 | forward | fa2_lab | ahead on 1 of 2, 0.50 to 1.50 | ahead on 1 of 1, 2.50 to 2.50 |",
        "| paper | H200 | forward | fa2_lab portable | ahead on 0 of 1, 0.75 to 0.75 | ahead on 1 of 1, 1.25 to 1.25 |",
    ]


def test_every_row_is_in_a_table_with_its_ratios():
    rows = [both(cuDNN=3.0), both(causal=True, portable=None), both(d=64, FlexAttention=5.0)]
    assert page.rows_table(rows, "TFLOP/s") == [
        "| TFLOP/s | N | batch | heads | d | mask | fa2_lab | fa2_lab portable | cuDNN | FlexAttention |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| forward | 4,096 | 4 | 16 | 128 | full | 200 | 100 (2.00) | 133 (1.50) | – |",
        "| forward | 4,096 | 4 | 16 | 128 | causal | 200 | – | – | – |",
        "| forward | 4,096 | 4 | 16 | 64 | full | 200 | 100 (2.00) | – | 80 (2.50) |",
    ]
    where = contest().problem | dict(kv_heads=2, N_q=1, rung="page 16", idea="turns")
    loss = Measurement(where, "loss", {"fa2_lab": [1.5], "cuDNN": [3.0]}, unit="nats")
    assert page.rows_table([loss], "nats")[2] == "| page 16, turns | 1 × 4,096 | 4 | 16 on 2 | 128 | full | 1.5 | 3 |"


def test_a_section_says_what_how_and_what_has_no_number():
    many = suite(*[both(cuDNN=3.0) for _ in range(20)], contest(), missing=["the rest"])
    text = "\n".join(page.section(many))
    assert text.startswith(
        "\n## paper\n\nThe FA2 paper's grid: d 64 and 128, 16k tokens. bf16, batch 4, heads 16, d 128, N 4,096"
    )
    assert "1 rows were not measured." in text and text.endswith("Without a number: flash_attn: not installed.")
    assert "<details><summary>paper: 21 rows, TFLOP/s</summary>" in text and text.count("| 133 (1.50) |") == 20
    row = both(cuDNN=3.0)
    row.failed = {}
    few = "\n".join(page.section(suite(row)))
    assert "<details>" not in few and "Without a number" not in few and "not measured" not in few


def test_plainly_counts_the_rows_where_we_lead():
    lead, trail = both(cuDNN=3.0), both(d=64, cuDNN=1.0)
    start = "Plainly: on this grid `fa2_lab` is faster than cuDNN on "
    assert page.plainly([lead, trail], "cuDNN") == (
        f"{start}1 of 1 rows of forward at d = 128, 0 of 1 rows of forward at d = 64."
    )
    trail.problem["d"] = 128
    assert page.plainly([lead, trail], "cuDNN") == f"{start}1 of 2 rows of forward at d = 128."


def test_forward_and_backward_are_added():
    rows = [both(cuDNN=3.0), both(cuDNN=1.0), both(d=64, cuDNN=1.0)]
    rows[1].direction = "backward"
    *_, added = page.with_sums(suite(*rows)).rows
    assert added.direction == "both, added" and added.problem == rows[0].problem
    assert added.values == {"fa2_lab": [4.0], "fa2_lab portable": [8.0], "cuDNN": [4.0]}
    assert len(page.with_sums(suite(*rows)).rows) == 4


def test_it_says_where_we_are_behind_and_by_how_much():
    rows = [both(cuDNN=3.0), both(cuDNN=1.5), both(causal=True, cuDNN=1.0), both(d=64, FlexAttention=1.0)]
    said = "paper 2 of 3, at worst 0.50 (forward N 4096 b 4 h 16 d 128 causal)"
    assert page.behind([suite(*rows), suite(both(cuDNN=3.0))], "cuDNN") == f"Behind cuDNN: {said}."
    assert page.behind([suite(both(cuDNN=3.0))], "cuDNN") == "It is behind cuDNN nowhere."


def test_the_sentence_counts_rows_and_takes_the_geometric_mean():
    peers = {"torch flash": 4.0, "FlashAttention-4": 8.0}
    run = suite(both(cuDNN=1.0, **peers), both(causal=True, cuDNN=9.0, **peers))
    assert page.sentence(run).startswith(
        "On an H200, `fa2_lab.attention` is faster than cuDNN on 1 of 2 rows (× 1.50), FlashAttention-4 on 2 of 2 rows "
        "(× 4.00) and torch's FlashAttention-2 on 2 of 2 rows (× 2.00) of the FlashAttention-2 paper's grid"
    )


def test_the_sentence_says_where_we_are_slower():
    assert "slower" not in page.sentence(suite(both(cuDNN=2.0), both(causal=True, cuDNN=3.0))), "as fast is not slower"
    run = suite(both(cuDNN=3.0), both(causal=True, cuDNN=1.0), both(d=64, causal=True, cuDNN=1.5))
    run.rows[2].direction = "backward"
    where = "backward and forward, bf16, batch 4, heads 16, d 64 to 128, N 4,096, causal"
    said = f" It is slower than cuDNN on 2 of 3 rows (at worst × 0.50), all of them in {where}. [RESULTS.md]"
    assert said in page.sentence(run)


def test_the_sentence_counts_the_worse_of_two_protocols():
    run = suite(both(cuDNN=1.0), both(causal=True, cuDNN=9.0), both(d=64, cuDNN=4.0))
    run.sustained = [both(cuDNN=4.0), both(causal=True, cuDNN=4.0)]
    assert page.worse(run, "cuDNN") == [0.5, 2.0, 2.0]
    said = page.sentence(run)
    assert "than cuDNN on 2 of 3 rows (× 1.26)" in said and "without counts by the worse ratio" in said


def test_what_was_measured_without_pauses_has_tables_of_its_own():
    run = suite(both(cuDNN=3.0))
    run.sustained, run.sustained_protocol = [both(cuDNN=1.0), both(causal=True, cuDNN=3.0)], "without a pause"
    run.sustained[0].chip = {"fa2_lab": [1580.0, 699.6]}
    text = "\n".join(page.section(run))
    assert "; by hand. In the same run: GEMM" in text and "; without a pause." in text
    assert "| 133 (1.50) |" in text and "| 400 (0.50) |" in text
    assert "| MHz, W | N | batch | heads | d | mask | fa2_lab |" in text
    assert "| forward | 4,096 | 4 | 16 | 128 | full | 1,580, 700 |" in text and "| causal | – |" in text
    names = [view.suite for view in page.named_views(run)]
    assert names == ["paper", "paper, sustained"] and page.named_views(suite(both()))[0].suite == "paper"
    run.rows = []
    assert [view.suite for view in page.named_views(run)] == ["paper, sustained"]


def test_shapes_say_how_far_they_reach():
    heads = [both(cuDNN=1.0), both(cuDNN=4.0, portable=None)]
    heads[0].problem["kv_heads"] = 4
    assert page.shapes(heads) == "bf16, batch 4, heads 16 on 4 to 16, d 128, N 4,096, full"


def test_training_and_memory_are_told():
    where = contest().problem | dict(layers=6, steps=200)
    time = Measurement(where, "time", {"fa2_lab": [0.5], "cuDNN": [0.4]}, unit="µs per token")
    curves = {"fa2_lab": [5.0, 3.0], "cuDNN": [5.0, 3.0025], "torch math": [4.999, 3.0]}
    said = page.TOLD["train"](Record("train", MACHINE, "by hand", rows=[time], curves=curves))
    assert "6 layers, 200 steps, tokens per second: fa2_lab 2,000,000, cuDNN 2,500,000" in said
    assert "never further apart than 0.0025" in said
    peaks = [
        Measurement(where | dict(N_q=N), "both", {"fa2_lab": [N / 64]}, {"math": "out of memory"}) for N in (1024, 4096)
    ]
    said = page.TOLD["memory"](Record("memory", MACHINE, "by hand", rows=peaks))
    assert "at N = 4,096: fa2_lab 64 MiB; 4 times the length takes `fa2_lab` 4.0 times" in said
    assert said.endswith("out of memory on the way: math")


def test_the_ring_is_told_by_what_more_gpus_gain():
    where = Problem(1, 16, 16, 2048, 2048, 128, True).as_dict()
    times = {"1 GPU": [8.0], "2 GPUs": [5.0], "4 GPUs": [2.5]}
    rows = [Measurement(where | dict(N_q=N), "forward", times, flops=1e12) for N in (1024, 2048)]
    rows += [
        Measurement(where | dict(layout="contiguous"), "forward", times, flops=1e12),
        Measurement(where, "peak memory", times),
    ]
    said = page.TOLD["ring"](Record("ring", MACHINE, "by hand", rows=rows))
    assert said == "speed over 1 GPU at N = 2,048: forward 1.60 on 2 GPUs, 3.20 on 4 GPUs"


def test_the_sweep_is_told_by_what_is_behind():
    rows = [both(cuDNN=ms, causal=n % 2 == 0) for n, ms in enumerate((3.0, 1.9, 1.0, 1.8, 1.7, 1.6, 1.5, 9.0))]
    rows.append(both(d=64, cuDNN=1.5))
    rows[-1].direction = "backward"
    said = page.sweep_table(suite(*rows))
    shape = "N 4096 b 4 h 16 d 128"
    assert said[2:] == [
        f"| forward | cuDNN | 6 of 8 | 75.0% | 0.50 ({shape} causal), 0.75 ({shape} causal), 0.80 ({shape} full), "
        f"0.85 ({shape} causal), 0.90 ({shape} full) |",
        "| backward | cuDNN | 1 of 1 | 100.0% | 0.75 (N 4096 b 4 h 16 d 64 full) |",
    ]
    for time in (2.0, 3.0):
        assert page.sweep_table(suite(both(cuDNN=time)))[2:] == ["| forward | cuDNN | 0 of 1 | 0.0% | – |"], "as fast"
    assert page.section(Record("sweep", MACHINE, "by hand", rows=rows))[5:7] == said[:2]


def test_ideas_are_counted_and_the_best_is_named():
    where, times = contest().problem | dict(part="forward"), {"with it": [1.0], "without it": [1.5]}
    kinds = [("tickets", True), ("turns", True), ("turns", False), ("more slots", False)]
    rows = [Measurement(where | dict(idea=idea, kept=kept), "forward", times) for idea, kept in kinds]
    rows[0].values = {"with it": [1.0], "without it": [1.75]}
    rows[3].values = {"with it": [1.5], "without it": [1.25]}
    rows.append(
        Measurement(where | dict(idea="spilled", kept=False), "forward", {"without it": [1.0]}, {"with it": "wrong"})
    )
    said = page.TOLD["ideas"](Record("ideas", MACHINE, "by hand", rows=rows))
    assert said == "forward: 2 in use, 1 not; at most 1.75 times the speed by “tickets”"


def test_the_page_is_that_of_the_recorded_runs():
    assert (files.ROOT / "RESULTS.md").read_text(encoding="utf-8") == page.results_page(), (
        "run `fa2-lab bench --results`"
    )
    assert {run.suite for run in page.recorded(records.FOLDER)} <= {*SUITES, *OTHERS}


def test_every_changed_number_in_a_record_changes_the_page(tmp_path):
    for file in records.FOLDER.glob("bench_*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert page.results_page(tmp_path) == (now := page.results_page())
    for run in page.recorded(tmp_path):
        changed = records.load(run.suite, tmp_path)
        numbers = next(iter(changed.rows[-1].values.values()))
        numbers[0] *= 1.5
        file, before = results.save(changed, tmp_path), (records.FOLDER / f"bench_{run.suite}.json").read_bytes()
        assert page.results_page(tmp_path) != now, run.suite
        file.write_bytes(before)


def between(part, said):
    start, end = (marker.format(part) for marker in page.WRITTEN)
    return f"{start}\n{said}\n{end}\n"


def test_renewing_touches_only_what_stands_between_the_markers():
    text = f"before\n{between('speed', 'old')}after\n{between('ladder', 'old')}"
    once = page.renewed(text, "speed", "new\nlines")
    new = between("speed", "new\nlines")
    assert once == f"before\n{new}after\n{between('ladder', 'old')}"
    assert page.renewed(once, "speed", "new\nlines") == once


def test_writing_takes_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"^bench --results needs a checkout of the repository"):
        page.write()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text(between("ladder", "") + between("speed", ""), encoding="utf-8")
    page.write()
    assert (tmp_path / "RESULTS.md").read_text(encoding="utf-8") == page.results_page()
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    table = "\n".join(ladder.markdown(records.load("ladder")))
    assert readme == between("ladder", table) + between("speed", page.sentence(records.load("paper")))
    assert table in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")


# Commits -------------------------------------------------------------------------------------------------------


def test_without_git_the_sources_have_a_fingerprint(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.fullmatch(r"sources [0-9a-f]{12}", results.commit())
    assert results.commit() == results.sources()


def test_sources_that_differ_from_the_commit_have_a_fingerprint_too(monkeypatch):
    monkeypatch.setattr(results, "_output", lambda command: "abc1234-dirty")
    assert results.commit() == results.sources()
    monkeypatch.setattr(results, "_output", lambda command: "abc1234")
    assert results.commit() == "abc1234"
