"""How a run becomes a record and a page: written whole, joined, with its commit; every number comes from a record."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bench needs torch")

from bench_records import MACHINE, new_record, new_row

from fa2_lab import records
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import files
from fa2_studio.bench import command, readme, record_page, recording, results_page
from fa2_studio.bench.registry import RECORDS_WITHOUT_COMMAND, SUITES
from fa2_studio.bench.suites import PROBLEM_SETS

# Records ------------------------------------------------------------------------------------------------------


def test_record_round_trips_and_survives_a_failed_write(tmp_path, monkeypatch):
    kept = new_record(
        new_row(), new_row(causal=True), missing=["(2,)"], curves={"fa2_lab": [5.5, 5.25]}, made_by="a test"
    )
    path = recording.save_record(kept, tmp_path / "new")
    assert path.name == "bench_paper.json" and records.load("paper", tmp_path / "new") == kept

    def full(*given):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        recording.save_record(new_record(), tmp_path / "new")
    assert records.load("paper", tmp_path / "new") == kept and list(path.parent.iterdir()) == [path]


def test_missing_record_says_how_to_make_it(tmp_path):
    with pytest.raises(ValueError, match=r"bench_long\.json is missing: `python -m fa2_lab bench long` measures it"):
        records.load("long", tmp_path)
    records.path_of("long", tmp_path).write_text("{}")
    with pytest.raises(ValueError, match=r"bench_long\.json is not a record of this version: `python -m fa2_lab bench"):
        records.load("long", tmp_path)


def record_at(commit, *rows, **more):
    """Return a record that was made at a commit."""
    run = new_record(*rows, **more)
    run.machine = MACHINE | dict(commit=commit)
    return run


def own_row(direction, d, ms=2.0):
    """Return a row with only fa2_lab."""
    row = new_row(d=d)
    row.direction, row.values = direction, {"fa2_lab": [ms]}
    return row


def test_remeasured_rows_replace_old_ones_and_keep_their_commits(tmp_path):
    old = record_at(
        "aaaaaaa", own_row("forward", 64), own_row("forward", 128), own_row("over N", 64), curves={"a": [1.0]}
    )
    old.sustained, old.sustained_protocol = [own_row("forward", 128, 3.0)], "without a pause"
    part = record_at("bbbbbbb", own_row("over N", 128, 4.0))
    part.ceilings = {"GEMM TFLOP/s": 1.0}
    recording.save_record(recording.merge_records(old, part), tmp_path)
    kept = records.load("paper", tmp_path)
    assert kept.rows[:2] == old.rows[:2] and (kept.sustained, kept.curves) == (old.sustained, old.curves)
    assert [row.values for row in kept.rows[2:]] == [{"fa2_lab": [4.0]}], "what is no longer among its problems goes"
    assert (kept.machine, kept.ceilings, kept.rows[2].machine) == (old.machine, old.ceilings, {"commit": "bbbbbbb"})
    assert record_page.commit_text(kept, MACHINE) == "aaaaaaa; over N at bbbbbbb"
    later = record_at("ccccccc", own_row("forward", 64), own_row("forward", 128))
    later.machine["triton"], later.ceilings = "3.9", part.ceilings
    kept = recording.merge_records(kept, later)
    assert kept.ceilings == part.ceilings, "of the run that most rows are from"
    assert (
        record_page.commit_text(kept, kept.machine)
        == "ccccccc; over N at bbbbbbb, triton 3.6; sustained forward at aaaaaaa, triton 3.6"
    )
    assert kept.setup().endswith("triton 3.6 or 3.9") and kept.sustained_protocol == "without a pause"
    later.machine = later.machine | dict(gpu="NVIDIA H100")
    assert recording.merge_records(kept, later) is later and recording.merge_records(None, later) is later


def test_interrupted_run_keeps_old_rows_that_it_missed():
    old = record_at("aaaaaaa", own_row("forward", 64), own_row("forward", 128))
    kept = recording.merge_records(old, record_at("bbbbbbb", own_row("forward", 128, 9.0), missing=["forward, d 64"]))
    assert [(row.problem["d"], row.values["fa2_lab"]) for row in kept.rows] == [(64, [2.0]), (128, [9.0])]
    assert [row.machine for row in kept.rows] == [{}, {"commit": "bbbbbbb"}] and kept.missing == ["forward, d 64"]


@pytest.mark.parametrize("suite", sorted(records.FOLDER.glob("bench_*.json")), ids=lambda path: path.stem)
def test_every_record_names_its_commit_and_the_command_that_writes_it(suite):
    record = records.load(suite.stem.removeprefix("bench_"))
    assert re.match(r"[0-9a-f]{7,}( |$)|sources [0-9a-f]{12}", record.machine["commit"])
    name = suite.stem.removeprefix("bench_")
    assert (
        record.made_by == f"python -m fa2_lab bench {name}"
        if name in SUITES
        else name in RECORDS_WITHOUT_COMMAND and record.made_by
    )
    if name in PROBLEM_SETS:
        measured = [row.problem for row in record.rows]
        assert all(problem.as_dict() in measured for problem in PROBLEM_SETS[name].problems)


# The machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unpacked, peers",
    [({}, {}), ({"flash_attn": "2.8.3", "flash_attn_4": "4.1"}, {"flash_attn": "2.8.3", "FlashAttention-4": "4.1"})],
    ids=str,
)
def test_record_names_versions_of_installed_implementations(unpacked, peers, tmp_path, monkeypatch):
    for name, version in unpacked.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    others = [folder for folder in sys.path if not any(Path(folder).glob("*.dist-info"))]
    monkeypatch.setattr("sys.path", [str(tmp_path), *others])
    monkeypatch.setattr(recording, "find_spec", lambda module: None)  # no module without a distribution either
    machine = recording.environment()
    assert machine["peers"] == peers and json.loads(json.dumps(machine)) == machine


def test_record_names_the_ptxas_that_triton_uses(monkeypatch):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    versions = {
        80: "Cuda compilation tools, release 12.9, V12.9.86",
        90: "Cuda compilation tools, release 13.4, V13.4.59",
    }
    monkeypatch.setattr(compiler, "get_ptxas_version", versions.get)
    for capability, version in (((8, 0), "12.9"), ((9, 0), "13.4")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda found=capability: found)
        assert recording.ptxas_version() == version


def test_record_of_a_dirty_checkout_names_commit_and_fingerprint(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *words], capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "fa2_lab").mkdir()
    (tmp_path / "fa2_lab" / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short", "HEAD")
    (tmp_path / "bench_paper.json").write_text("{}")  # a record just written changes nothing that is measured
    assert recording.commit_name(tmp_path) == commit
    (tmp_path / "fa2_lab" / "a.py").write_text("2\n")
    assert recording.commit_name(tmp_path) == f"{commit} with changes ({recording.sources_fingerprint()})"
    assert recording.commit_name(tmp_path / "nowhere") == recording.sources_fingerprint()
    measured = new_record()
    measured.machine = MACHINE | dict(commit=recording.sources_fingerprint())
    monkeypatch.setattr(recording, "commit_name", lambda: "abc1234")
    assert recording.with_commit_name(measured).machine["commit"] == f"abc1234 ({recording.sources_fingerprint()})"
    assert recording.with_commit_name(new_record()) == new_record(), "measured with other sources"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert re.fullmatch(r"sources [0-9a-f]{12}", recording.commit_name())


def test_fingerprint_of_the_sources_changes_with_the_bench(tmp_path, monkeypatch):
    before = recording.sources_fingerprint()
    (tmp_path / "protocol.py").write_text("REPEATS = 1\n")
    monkeypatch.setattr(recording, "BENCH", tmp_path)
    assert recording.sources_fingerprint() != before


# Pages --------------------------------------------------------------------------------------------------------


def row_of(causal=False, d=128, portable=4.0, direction="forward", **peers):
    """Return a row in which fa2_lab takes 2 ms and the others take the given milliseconds."""
    row = new_row(causal=causal, d=d)
    row.values = {name: [ms] for name, ms in {"fa2_lab": 2.0, "fa2_lab portable": portable, **peers}.items() if ms}
    row.direction = direction
    return row


def test_results_tables_list_every_row_with_ratios():
    rows = [row_of(cuDNN=3.0), row_of(causal=True, portable=None), row_of(d=64, FlexAttention=5.0)]
    assert record_page.rows_table(rows, "TFLOP/s", "sustained") == [
        "Sustained, N = 4,096, batch = 4, heads = 16:",
        "",
        "| TFLOP/s | d | mask | fa2_lab | fa2_lab portable | cuDNN | FlexAttention |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
        "| forward | 128 | non-causal | 200 | 100 (2.00) | 133 (1.50) | – |",
        "| forward | 128 | causal | 200 | – | – | – |",
        "| forward | 64 | non-causal | 200 | 100 (2.00) | – | 80 (2.50) |",
    ]
    where = new_row().problem | dict(kv_heads=2, N_q=1, rung="page 16", idea="turns")
    loss = Measurement(where, "loss", {"fa2_lab": [1.5], "cuDNN": [3.0]}, unit="nats")
    assert (
        record_page.rows_table([loss], "nats")[2]
        == "| page 16, turns | 1 × 4,096 | 4 | 16, 2 K/V | 128 | non-causal | 1.5 | 3 |"
    )


def test_results_page_separates_sustained_timing():
    run = new_record(row_of(cuDNN=3.0), new_row(), missing=["the rest"])
    run.sustained, run.sustained_protocol = ([row_of(cuDNN=1.0), row_of(causal=True, cuDNN=3.0)], "without a pause")
    run.sustained[0].chip = {"fa2_lab": [1580.0, 699.6]}
    text = record_page.record_section(run, run.machine)
    assert "by hand. without a pause." in text and results_page.ceilings_table([run])[-1].endswith("| 791 |")
    assert "| 133 (1.50) |" in text and "| 400 (0.50) |" in text and "1,580, 700" in text
    assert "The last run was interrupted before it reached 1 of its rows." in text
    run.sustained[1].machine = dict(triton="3.10")
    assert run.setup().endswith("triton 3.10 or 3.6")


def test_results_page_lists_where_fa2_lab_is_slower():
    rows = [row_of(cuDNN=3.0), row_of(cuDNN=1.5), row_of(causal=True, cuDNN=1.0), row_of(d=64, FlexAttention=1.0)]
    where, title = "forward, N = 4,096, batch size 4, 16 heads, d = 128, causal", record_page.heading_link(new_record())
    assert results_page.slower_table_rows([new_record(*rows), new_record(row_of(cuDNN=3.0))], "cuDNN") == [
        [title, "2 of 3", "0.50", where]
    ]


def test_readme_table_separates_timings_and_names_host_bound_problems():
    run = new_record(row_of(cuDNN=2.0), row_of(causal=True, cuDNN=9.0), row_of(d=64, cuDNN=4.0, direction="backward"))
    first = "| The FA2 paper's grid, kernel only | cuDNN | 2 of 3 | 2.00× |"
    assert first in readme.speed_part(run, run, records.load("ampere")).split("\n"), "as fast is not faster"
    run.sustained = [row_of(cuDNN=1.0), row_of(causal=True, cuDNN=1.5), row_of(d=64, cuDNN=4.0, direction="backward")]
    lines = readme.speed_part(run, run, records.load("ampere")).split("\n")
    assert first in lines and "| The FA2 paper's grid, sustained | cuDNN | 1 of 3 | 0.75× |" in lines
    words = "cuDNN is faster on 2 of the random problems. On 1 of those, our kernels themselves are faster."
    assert words in readme.speed_part(run, run, records.load("ampere"))


def test_medians_cover_problems_that_every_implementation_ran():
    rows = [row_of(cuDNN=3.0), row_of(causal=True, portable=1.0), row_of(direction="backward", FlexAttention=5.0)]
    tables = record_page.median_tables(new_record(*rows))
    assert "| forward, TFLOP/s | 1 of 2 | 200 | 100 | 133 |" in tables
    assert "| backward, TFLOP/s | all 1 | 200 | 100 | 80 |" in tables
    loss = Measurement(new_row().problem, "loss", {"fa2_lab": [2.6841], "cuDNN": [2.5]}, unit="nats")
    curves = {"fa2_lab": [5.0, 3.0], "cuDNN": [5.0, 3.0025], "torch math": [4.999, 3.0]}
    train = Record("train", MACHINE, "by hand", rows=[loss], curves=curves)
    assert record_page.median_tables(train)[-1] == "| loss, nats | all 1 | 2.68 | 2.5 |"
    assert any(remark.endswith("by more than 0.0025.") for remark in record_page.remark_sentences(train))


def test_results_md_is_up_to_date_and_short(capsys):
    text = (files.ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert text == results_page.results_md(), "run `fa2-lab bench --results`"
    assert command.main(["bench", "--results", "--all"][1:]) == 0
    printed = capsys.readouterr().out
    rows = sum(len(run.rows) + len(run.sustained) for run in results_page.load_records())
    assert printed.count("\n| ") >= rows and printed == results_page.site_page()


def test_results_command_changes_only_marked_parts_of_readme(tmp_path, monkeypatch):
    def marked_part(part, content):
        start, end = (marker.format(part) for marker in readme.MARKERS)
        return f"{start}\n{content}\n{end}\n"

    monkeypatch.setattr(files, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"^bench --results needs a checkout of the repository"):
        results_page.write_pages()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text(
        f"before\n{marked_part('ladder', '')}between\n{marked_part('speed', 'old')}{marked_part('judged', '')}after\n"
    )
    results_page.write_pages()
    assert (tmp_path / "RESULTS.md").read_text(encoding="utf-8") == results_page.results_md()
    parts = {part: marked_part(part, content) for part, content in readme.readme_parts().items()}
    wanted = f"before\n{parts['ladder']}between\n{parts['speed']}{parts['judged']}after\n"
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == wanted


# Sent by others -------------------------------------------------------------------------------------------------


def test_submitted_record_is_listed_with_its_gpu(tmp_path):
    submitted = new_record(new_row(), new_row(causal=True))
    submitted.machine = MACHINE | dict(gpu="NVIDIA L4")
    path = recording.save_record(submitted, tmp_path / "submitted")
    recording.save_record(new_record(new_row()), tmp_path)
    rows = results_page.gpu_table(tmp_path)
    (row,) = [row for row in rows if "NVIDIA L4" in row]
    assert "**submitted**, abc1234" in row and "| 400 | 2.00 |" in row
    assert "The following GPUs have not been measured yet: A100, RTX 4090, MI300." in rows[-1]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"submitted.*\.json is not a record of this version: leave it out"):
        results_page.gpu_table(tmp_path)
