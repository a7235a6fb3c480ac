"""The bench's suites and its command without a GPU, and a training run in miniature."""

import importlib
import json
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from bench_records import MACHINE, contest, suite  # noqa: E402

from fa2_lab import records  # noqa: E402
from fa2_lab.records import Record  # noqa: E402
from fa2_studio.bench import ahead, command, results, smoke, suites, train  # noqa: E402
from fa2_studio.bench.contest import DIRECTIONS, collect, ready  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402

# Suites and the command ---------------------------------------------------------------------------------------


def test_an_interrupted_run_keeps_what_it_has():
    def measure(problem, direction):
        if direction == "backward":
            raise KeyboardInterrupt
        return contest()

    where = Problem(1, 2, 2, 64, 64, 16, True)
    jobs = [partial(measure, where, direction) for direction in ("forward", "backward", "both")]
    kept = collect(suite(), jobs)
    assert len(kept.rows) == 1
    assert [" ".join(m.split()) for m in kept.missing] == [
        f"{m} N 64 b 1 h 2 d 16 causal" for m in ("backward", "both")
    ]


@pytest.mark.parametrize(
    "failure, told",
    [(torch.OutOfMemoryError("CUDA out of memory"), "out of memory"), (KeyError("x"), "KeyError: 'x'")],
    ids=["memory", "anything"],
)
def test_what_fails_as_a_whole_is_a_row_and_the_run_goes_on(failure, told):
    def fails(problem, direction):
        raise failure

    where = Problem(1, 1, 1, 2**20, 2**20, 64, False)
    kept = collect(suite(), [partial(fails, where, "backward"), partial(contest)])
    assert len(kept.rows) == 2 and not kept.missing
    assert kept.rows[0].failed == {"everybody": told} and kept.rows[0].direction == "backward"


def test_after_an_interrupted_suite_the_command_stops_and_keeps_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "check", lambda names, how: None)
    ran = []

    def measure(name):
        ran.append(name)
        return Record(name, MACHINE, "by hand", rows=[contest()], missing=["the rest"] if name == "long" else [])

    monkeypatch.setattr(suites, "contests", measure)
    assert command.main(["paper", "long", "heads", "--folder", str(tmp_path)]) == 130
    assert ran == ["paper", "long"]
    assert records.load("long", tmp_path).missing == ["the rest"]
    told = capsys.readouterr().out
    assert "not measured: the rest" in told
    assert all(f"s, kept in {tmp_path / f'bench_{name}.json'}" in told for name in ("paper", "long"))


def test_other_processes_compile_and_an_interrupt_is_not_theirs(monkeypatch):
    asked = []

    class Pool:
        def map(self, call, problems, names):
            asked.extend(zip(problems, names, strict=True))
            raise KeyboardInterrupt

        def shutdown(self, cancel_futures):
            asked.append(cancel_futures)

    monkeypatch.setattr(ahead, "pool", Pool)
    where = Problem(1, 2, 2, 64, 64, 16, True)
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead([where], ("fa2_lab", "FlexAttention"))
    assert asked == [(where, "fa2_lab"), (where, "FlexAttention"), True]
    ahead.tried(ahead.call_once, where, "nobody")  # what fails there is no failure here


@pytest.mark.parametrize("name", command.SUITES)
def test_every_suite_has_somebody_who_measures_it(name):
    room, function = command.SUITES[name].measure.split(":")
    if room == "ladder":
        pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    assert callable(getattr(importlib.import_module(f"fa2_studio.bench.{room}"), function))


def test_without_a_gpu_the_command_says_where_recorded_results_are():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="recorded results are in figures/data"):
        command.main(["smoke", "quick"])


@pytest.mark.parametrize("names, got", [(["slow"], "slow"), (["smoke", "slow", "fast"], "slow, fast"), ([], "none")])
def test_a_suite_that_does_not_exist_is_refused_before_anything_runs(names, got):
    with pytest.raises(ValueError, match=rf"^suite: got {got}; it takes smoke, paper, "):
        command.main(names)


@pytest.mark.parametrize(
    "options, how",
    [
        ([], {}),
        (["--sustained"], {"sustained": True}),
        (["--sustained", "--direction", "backward"], {"sustained": True, "directions": ("backward",)}),
    ],
    ids=" ".join,
)
def test_a_part_of_a_suite_is_joined_to_its_record(options, how, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    earlier = Record("paper", MACHINE, "by hand", rows=[contest(d=64)])
    results.save(earlier, tmp_path)
    asked = []

    def measure(name, **given):
        asked.append((name, given))
        return Record(name, MACHINE, "", sustained=[contest()], sustained_protocol="without pauses")

    monkeypatch.setattr(suites, "contests", measure)
    assert command.main(["paper", *options, "--folder", str(tmp_path)]) == 0
    assert asked == [("paper", how)] and "without pauses." in capsys.readouterr().out
    kept = records.load("paper", tmp_path)
    assert kept == results.joined(earlier, measure("paper")) and kept.rows and kept.sustained


def test_only_contests_have_parts():
    with pytest.raises(ValueError, match=r"^suite: got paper, small; with --sustained or --direction it takes paper, "):
        command.main(["paper", "small", "--sustained"])


@pytest.mark.parametrize("names, file", [(["paper"], __file__), (["ladder"], "nowhere.py")])
def test_beside_takes_the_ladder_and_a_file(names, file):
    with pytest.raises(ValueError, match=rf"^suite: got {names[0]} beside .*; --beside takes ladder, and a file with"):
        command.main([*names, "--beside", file])


def test_a_contest_without_pauses_is_among_rivals_and_beside_a_meter(monkeypatch):
    seen = []

    def row(problem, direction, names, timing):
        seen.append((problem, direction, names, timing.func, timing.keywords["meter"]))
        return contest()

    class Meter:
        def __enter__(self):
            return "a meter"

        def __exit__(self, *failure):
            seen.append("closed")

    monkeypatch.setattr(suites, "row", row)
    monkeypatch.setattr(suites, "Meter", Meter)
    monkeypatch.setattr(suites, "compile_ahead", lambda problems, names: seen.append(names))
    found = suites.contests("nvidia", directions=("backward",), sustained=True)
    grid = suites.nvidia_grid()
    assert seen[0] == ["fa2_lab"] and seen[-1] == "closed"
    assert [place[:2] for place in seen[1:-1]] == [(problem, "backward") for problem in grid]
    assert {place[2:] for place in seen[1:-1]} == {(suites.RIVALS, suites.sustain, "a meter")}
    assert len(found.sustained) == len(grid) and not found.rows and found.sustained_protocol == suites.SUSTAINED


# Smoke ---------------------------------------------------------------------------------------------------------


def test_smoke_runs_without_a_gpu_and_says_what_its_times_are():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    p = Problem(1, 2, 1, 33, 40, 16, True, "float32")
    forward, backward = (smoke.check(p, direction) for direction in DIRECTIONS)
    for row in (forward, backward):
        assert set(row.values) | set(row.failed) == set(smoke.NAMES) and {"fa2_lab", "torch"} <= set(row.values)
        assert all(ms > 0 for (ms,) in row.values.values()) and row.unit == "ms" and not row.flops
    assert "say nothing about a GPU" in smoke.PROTOCOL + smoke.INTERPRETED
    assert results.machine()["gpu"].startswith("no GPU")


def test_smoke_has_ragged_grouped_and_causal_problems():
    grid = smoke.grid()
    assert {p.causal for p in grid} == {False, True} and max(max(p.N_q, p.N_k) for p in grid) <= 200
    assert any(p.N_q != p.N_k and p.N_q % 32 and p.kv_heads < p.heads for p in grid)


def test_portable_prepares_its_own_kernels_once(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_lab.kernels import prepared
    from fa2_lab.kernels.portable import backward, forward

    made = []

    def watch(module):
        usual = module.prepare
        monkeypatch.setattr(module, "prepare", lambda *given: made.append(module.__name__) or usual(*given))

    watch(forward)
    watch(backward)
    monkeypatch.setattr(importlib.import_module("fa2_lab.api.attention"), "attention", None)
    prepared.forget()
    p = Problem(1, 2, 1, 40, 40, 16, True, "float32")
    tensors = p.tensors(grad=True, device="cuda" if torch.cuda.is_available() else "cpu")
    call = ready(p, "both", ["fa2_lab portable"], tensors)["fa2_lab portable"]()
    first = call()
    assert made == [forward.__name__, backward.__name__]
    assert all(map(torch.equal, first, call())) and len(made) == 2


# Tuning -------------------------------------------------------------------------------------------------------


def test_an_interrupted_search_keeps_every_find(monkeypatch, tmp_path, capsys):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_lab.kernels import launch
    from fa2_lab.tools import command as top
    from fa2_studio.bench import tune

    best = launch.Blocks(16, 32, 4, 1, d_pad=64)
    finds = iter([(best, best, {best: 1.5})] * 2)

    def search(kernel, tensors, causal):
        for found in finds:
            return found
        raise KeyboardInterrupt

    monkeypatch.setenv("FA2_LAB_TUNED", str(tmp_path / "cache" / "tuned.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: torch.empty(1, 1, 40, 64, dtype=dtype))
    monkeypatch.setattr(launch, "name", lambda kernel, Q, causal: f"{kernel} {causal}")
    monkeypatch.setattr(tune, "search", search)
    assert top.main(["tune"]) == 130
    kept = json.loads((tmp_path / "cache" / "tuned.json").read_text(encoding="utf-8"))
    assert kept == {"forward False": [16, 32, 4, 1, None], "rows False": [16, 32, 4, 1, None]}
    assert capsys.readouterr().out.count("1.500 ms") == 4
    (tmp_path / "cache" / "tuned.json").write_text("{}", encoding="utf-8")
    assert top.main(["tune"]) == 130


# Training -----------------------------------------------------------------------------------------------------

TINY = train.Setting(layers=1, heads=2, d=8, context=32, batch=4, steps=40, rate=1e-2)


def test_the_loss_falls_and_the_run_repeats():
    first, second = (train.train("torch math", TINY, device="cpu") for _ in range(2))
    assert len(first.losses) == TINY.steps and first.losses == second.losses
    assert 5 < first.losses[0] < 7  # ln 256 = 5.5 for bytes without a clue
    assert sum(first.losses[-5:]) / 5 < first.losses[0] - 1.5
    assert first.tokens_per_second > 0


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = train.GPT(TINY, train.peers.PEERS["torch math"](TINY.problem()))
    x = torch.randint(256, (1, 32))
    y = x.clone()
    y[0, 20] = (y[0, 20] + 1) % 256
    a, b = model(x), model(y)
    assert torch.allclose(a[0, :20], b[0, :20], atol=1e-5) and not torch.allclose(a[0, 20], b[0, 20], atol=1e-3)


def test_the_text_is_the_package_itself():
    assert b"def attention" in bytes(train.own_text().tolist())
