"""The bench's command without a GPU: arguments that it refuses, records that it keeps and joins, and short training."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from bench_records import MACHINE, new_record, new_row  # noqa: E402

from fa2_lab import records  # noqa: E402
from fa2_lab.records import Record  # noqa: E402
from fa2_studio.bench import command, implementations, recording, suites, train  # noqa: E402
from fa2_studio.bench.compare import DIRECTIONS, Plan, run_plan  # noqa: E402
from fa2_studio.bench.peers import dense  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402

PROBLEM = Problem(1, 2, 2, 64, 64, 16, causal=True)


# What is kept -------------------------------------------------------------------------------------------------


def test_interrupted_bench_keeps_rows_and_names_missing_ones():
    def measure(problem, direction):
        if direction == "backward":
            raise KeyboardInterrupt
        return new_row()

    saved = []

    def save(record):
        saved.append((len(record.rows), len(record.sustained), len(record.missing)))

    jobs = [partial(measure, PROBLEM, direction) for direction in ("forward", "backward", "both")]
    record = run_plan(Plan(new_record(), jobs), save)
    assert len(record.rows) == 1 and saved == [(1, 0, 2)], "and if it is killed"
    assert record.missing == [
        f"{way}, N = 64, batch size 1, 2 heads, d = 16, causal" for way in ("backward", "forward and backward")
    ]
    run_plan(Plan(new_record(), jobs[:1], sustained=jobs[:1]), save)
    assert saved[1:] == [(1, 0, 1), (1, 1, 0)]


@pytest.mark.parametrize("options, options_of_suite", [([], {}), (["--sustained"], {"sustained": True})], ids=" ".join)
def test_partial_bench_run_is_merged_into_the_record(options, options_of_suite, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recording, "environment", lambda: MACHINE)
    recording.save_record(Record("paper", MACHINE, "by hand", rows=[new_row(d=64)]), tmp_path)
    calls = []

    def measure(name, **given):
        calls.append((name, given))
        return Plan(Record(name, MACHINE, "", sustained=[new_row()], sustained_protocol="without pauses"))

    monkeypatch.setattr(suites, "plan_dense", measure)
    assert command.main(["paper", *options, "--folder", str(tmp_path)]) == 0
    record = records.load("paper", tmp_path)
    assert calls == [("paper", options_of_suite)] and (record.rows, record.sustained) == ([new_row(d=64)], [new_row()])


def test_failed_suite_does_not_stop_the_next_but_ctrl_c_does(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def measure(name):
        if name == "paper":
            raise RuntimeError("no such chip")
        if name == "heads":
            raise KeyboardInterrupt
        return Plan(Record(name, MACHINE, "by hand", rows=[new_row()]))

    monkeypatch.setattr(suites, "plan_dense", measure)
    assert command.main(["paper", "long", "--folder", str(tmp_path)]) == 1
    assert "paper: RuntimeError: no such chip" in capsys.readouterr().out
    assert records.load("long", tmp_path).rows == [new_row()] and not records.path_of("paper", tmp_path).exists()
    with pytest.raises(KeyboardInterrupt):
        command.main(["heads", "sweep", "--folder", str(tmp_path)])
    assert not records.path_of("sweep", tmp_path).exists()


def test_partial_bench_run_on_another_gpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recording, "environment", lambda: MACHINE | dict(gpu="NVIDIA H100"))
    recording.save_record(Record("paper", MACHINE, "by hand", rows=[new_row()]), tmp_path)
    with pytest.raises(ValueError, match=r"^folder: got .*, whose paper is of an NVIDIA H200; on an NVIDIA H100 it"):
        command.main(["paper", "--sustained", "--folder", str(tmp_path)])


# What is refused ----------------------------------------------------------------------------------------------


def test_bench_without_a_gpu_points_to_recorded_results(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for names in (["paper"], ["smoke", "long"]):
        with pytest.raises(ValueError, match=r"^bench: there is no CUDA GPU here .* in figures/data$"):
            command.main(names)


def test_forced_older_target_is_refused_except_by_ampere_suite(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for override, names in (("", ["ampere"]), ("sm80", ["paper"]), ("sm80", ["ampere", "paper"])):
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
        with pytest.raises(ValueError, match=r"^TRITON_OVERRIDE_ARCH: got .*; the suite ampere alone takes sm80"):
            command.main(names)


@pytest.mark.parametrize(
    "words, message",
    [
        (["smoke", "slow", "fast"], r"^suite: got slow, fast; it takes smoke, paper, "),
        ([], r"^suite: got none; it takes smoke, paper, "),
        (["paper", "small", "--sustained"], r"^suite: got paper, small; with --sustained it takes paper, nvidia, "),
        (["paper", "--beside", __file__], r"^suite: got paper; with --beside it takes ladder$"),
        (["ladder", "paper", "--part", "rungs"], r"^suite: got ladder, paper; with --part it takes ladder$"),
        (["ladder", "--beside", "nowhere.py"], r"^beside: got nowhere\.py; it takes a file with forward\("),
    ],
    ids=str,
)
def test_bench_rejects_bad_arguments_before_running(words, message):
    with pytest.raises(ValueError, match=message):
        command.main(words)


# Suites -------------------------------------------------------------------------------------------------------


def test_bench_smoke_covers_ragged_gqa_and_causal_problems(monkeypatch):
    assert any(p.N_q != p.N_k and p.N_q % 32 and p.kv_heads < p.heads and p.causal for p in suites.SMOKE)
    doubled = implementations.Implementation(lambda problem: lambda q, k, v: 2 * dense.plain(problem)(q, k, v))
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "wrong", doubled)
    p = Problem(1, 2, 1, 33, 40, 16, causal=True, dtype="float32")
    for direction in DIRECTIONS:
        row = suites.time_dense(p, direction, ("torch", "wrong"), suites.FEW_CALLS, "µs")
        assert row.values.keys() == {"torch"} and row.failed == {"wrong": "wrong: error 1.0e+00"}


# Training -----------------------------------------------------------------------------------------------------

TINY_TRAINING = train.Setting(layers=1, heads=2, d=8, context=32, batch=4, steps=40, rate=1e-2)


def test_bench_train_loss_falls_reproducibly():
    (first, microseconds, _), (second, *_) = (train.train("torch math", TINY_TRAINING, device="cpu") for _ in range(2))
    assert len(first) == TINY_TRAINING.steps and first == second and microseconds > 0
    assert 5 < first[0] < 7  # ln 256 = 5.5 for bytes without a clue
    assert sum(first[-5:]) / 5 < first[0] - 1.5
