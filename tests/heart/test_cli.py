"""The fa2-lab command: what it prints, what it refuses, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import unicodedata
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from fa2_lab import errata, paper
from fa2_lab.errata import ERRATA
from fa2_lab.machine import io_model
from fa2_lab.tiles import Tiling
from fa2_lab.tools import command, tour
from fa2_lab.tools.tour import STAGES, Skipped, Stage


def display_width(text: str) -> int:
    """Return the number of a terminal's columns that a line takes. Chinese characters take two each."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


# The tour -----------------------------------------------------------------------------------------------------

NUMPY_STAGES = tuple(stage for stage in STAGES if not stage.name.startswith("Triton"))


def test_tour_passes_for_all_numpy_stages(capsys):
    assert len(NUMPY_STAGES) >= 16
    assert tour.tour(NUMPY_STAGES) == 0
    out, err = capsys.readouterr()
    assert f"All {len(NUMPY_STAGES)} stages that ran agree" in out
    assert out.count(" ok\n") == len(NUMPY_STAGES) and "notebooks/00_start.ipynb" in out
    assert max(map(display_width, out.splitlines())) <= 80
    assert err == "", "no progress bar where nobody watches"


def test_tour_table_shows_the_traced_element_counts():
    stages = [stage for stage in NUMPY_STAGES if stage.name in ("FA1 forward", "FA2 forward")]
    rows = {stage.name: tour.line(tour.run(stage)).split()[3:6] for stage in stages}
    n, d, T_r, T_c = tour.N, tour.D_HEAD, 8, 16
    hbm_elements = (n * d + 2 * n) + 2 * n * d + T_c * (3 * n * d + 4 * n), 2 * n * d + n + T_r * 2 * n * d
    for name, hbm in zip(("fa1", "fa2"), hbm_elements, strict=True):
        operations = io_model.operations(name, "forward", Tiling(n, n, tour.B_R, tour.B_C), d)
        work = hbm, 4 * n * n * d, operations.total() - operations["matmul"]
        assert rows[f"{name.upper()} forward"] == [*map(tour.short, work)]
    assert [tour.short(x) for x in (0, 0.25, 1234, 999_600, 1_234_567)] == ["0", "0.25", "1.23k", "1M", "1.23M"]


def failing_stage(trace):
    raise RuntimeError("no such kernel\nand a long story")


def skipped_stage(trace):
    raise Skipped("it is Sunday")


@pytest.mark.parametrize("run, status, words", [
    (lambda trace: [(np.full(3, 1.01), np.ones(3))], 1, ["WRONG", "Wrong: x"]),
    (lambda trace: [(np.full(3, np.nan), np.ones(3)), (np.ones(3), np.ones(3))], 1, ["WRONG", "Wrong: x"]),
    (failing_stage, 1, ["FAILED: RuntimeError: no such kernel\n", "Wrong: x"]),
    (skipped_stage, 0, ["skipped: it is Sunday", "All 0 stages that ran"]),
])  # fmt: skip
def test_tour_fails_for_a_wrong_stage_but_not_for_a_skipped_one(run, status, words, capsys):
    assert tour.tour((Stage("x", run),)) == status
    out = capsys.readouterr().out
    assert all(word in out for word in words)


def test_every_tour_stage_fails_against_a_wrong_truth(monkeypatch):
    """Spoil the answers: no stage may still be satisfied (the count of closed forms has no answer to spoil)."""
    for problem in tour.PROBLEMS:
        for name in ("O", "dV"):
            monkeypatch.setitem(problem.truth, name, problem.truth[name] * 1.01)
    satisfied = [stage.name for stage in NUMPY_STAGES if tour.run(stage).ok]
    assert satisfied == ["closed forms = meter"]


def test_triton_stages_run_or_say_why_they_are_skipped():
    """In a process of their own: the interpreter has to be chosen before anybody imports triton."""
    source = (
        "from fa2_lab.tools.tour import STAGES, run\n"
        "for stage in STAGES[-2:]: r = run(stage); print(r.ok, r.device, r.note)"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    rows = [row.split(maxsplit=1) for row in result.stdout.splitlines()]
    assert [ok for ok, _ in rows] == ["True", "True"], result.stdout + result.stderr
    assert "skipped" not in result.stdout


# The other commands -------------------------------------------------------------------------------------------


def test_where_prints_files_and_algorithms(capsys):
    assert command.main(["where", "FA2.A1.L9"]) == 0
    out = capsys.readouterr().out
    assert "reference/fa2.py:" in out and "np.maximum" in out
    assert command.main(["where", "fa1.a3"]) == 0
    assert "standard attention, backward" in capsys.readouterr().out
    assert command.main(["where", "FA2.A1.L9", "--all"]) == 0
    assert capsys.readouterr().out == paper.where("FA2.A1.L9").full() + "\n"
    assert command.main(["where"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(paper.ALGORITHMS)


def test_errata_command_prints_a_table_and_each_entry(capsys):
    assert command.main(["errata"]) == 0
    out = capsys.readouterr().out
    assert out.count("  differ\n") == len(ERRATA) and max(map(display_width, out.splitlines())) <= 80
    for name, erratum in ERRATA.items():
        assert command.main(["errata", name]) == 0
        out = capsys.readouterr().out
        assert max(map(display_width, out.splitlines())) <= 80
        for text in (erratum.source, erratum.claim, erratum.why, erratum.instead, erratum.met):
            assert " ".join(text.split()) in " ".join(out.split()), name
        tags = ", ".join(tag for tag, (_, line) in paper.LINES.items() if name in line.errata)
        assert " ".join(out.split()).endswith(f"lines {tags}" if tags else "")


def test_errata_command_fails_if_a_check_accepts_both_versions(monkeypatch, capsys):
    same = replace(ERRATA["fa2-scale"], wrong=ERRATA["fa2-scale"].right)
    monkeypatch.setattr(errata, "ERRATA", {"fa2-scale": same})
    assert command.main(["errata"]) == 1
    assert "DO NOT DIFFER" in capsys.readouterr().out
    assert command.main(["errata", "fa2-scale"]) == 1


def test_glossary_command_prints_terms_within_80_columns(capsys):
    assert command.main(["glossary"]) == 0
    out = capsys.readouterr().out
    assert "线程束" in out and max(map(display_width, out.splitlines())) <= 80
    words_of = dict(warp="线程束", lane="appendix A, figures/row_reduction", tau="[number, argument]")
    words_of |= dict(wgmma="chapter 12a")
    for name, words in words_of.items():
        assert command.main(["glossary", name]) == 0
        out = capsys.readouterr().out
        assert words in out and out.count("→") == 1, "one term alone"


@pytest.mark.parametrize("arguments", [["dance"], ["where", "a", "b"], ["--fast"]])
def test_bad_usage_exits_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and "usage: fa2-lab" in capsys.readouterr().err


def test_internal_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(tour, "tour", lambda: [][0])
    with pytest.raises(IndexError):
        command.main([])


# Commands of the studio: entry points ---------------------------------------------------------------------------


def test_plugin_commands_are_listed_and_run(monkeypatch, capsys):
    monkeypatch.setattr(
        command, "entry_points", lambda group: [EntryPoint("tune", "fa2_studio.bench.tune:main", command.GROUP)]
    )
    monkeypatch.setattr(EntryPoint, "load", lambda entry: lambda argv: int(argv[1]))
    assert "tune " in command.parser().format_help() and "best block sizes" in command.parser().format_help()
    assert command.main(["tune", "--d", "1"]) == 1
    assert command.main(["tune", "--d", "x"]) == 2
    assert capsys.readouterr().err.startswith("fa2-lab: invalid literal")


def test_uninstalled_checkout_says_how_to_get_plugin_commands(monkeypatch, capsys):
    monkeypatch.setattr(command, "entry_points", lambda group: [])
    assert command.main(["bench", "paper"]) == 2
    assert "pip install --no-deps -e ." in capsys.readouterr().err


def test_missing_dependency_is_named_with_its_extra(monkeypatch, capsys):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module}", name="matplotlib.figure")

    monkeypatch.setattr(command, "import_module", missing)
    assert command.main(["figures"]) == 2
    assert "pip install 'fa2-lab[plots]'" in capsys.readouterr().err


def test_entry_points_in_pyproject_can_be_imported():
    from test_layers import pyproject

    declared = pyproject()["project"]["entry-points"][command.GROUP]
    for name, target in declared.items():
        module, function = target.split(":")
        source = (paper.PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"\ndef {function}(argv" in source, f"{name}: {module} has no {function}(argv)"
    assert declared.keys() <= command.studio().keys(), "pip install -e . again"


# How commands end ---------------------------------------------------------------------------------------------


ERRORS_OF_COMMANDS = {
    "where FA2.A1.L99": "lines 1 to 17",
    "where --sass": "got --sass and no tag; it takes a line, such as FA2.A1.L9",
    "where --all": "got --all and no tag",
    "where FA2.A1 --sass": "got --sass and FA2.A1; it takes a line",
    "where FA2.A1 --all": "got --all and FA2.A1",
    "where FA1.A4.L17 --sass": "has no Triton line",
    "errata scale": "did you mean fa2-scale",
    "glossary wrap": "did you mean warp",
    "figures nonsense": "it takes",
    "book 99": "it takes",
    "course bundle --only 99": "assignment: got '99'",
    "xray nonsense": "it takes",
    "xray 07 --d 0": "d: got 0; it takes numbers from 1 to 256",
    "xray 07 --d 300": "d: got 300; it takes numbers from 1 to 256",
    "xray portable.backward --N 0": "N: got 0; it takes numbers from 1 on",
    "xray 07 --chip 75": "chip: got '75'; it takes one of sm_80 (A100), ",
    "ladder 07 08 09": "rungs: got 3",
}


@pytest.mark.parametrize("line", ERRORS_OF_COMMANDS)
def test_unknown_names_are_refused_with_one_line(line, capsys):
    assert command.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fa2-lab: ") and ERRORS_OF_COMMANDS[line] in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("failures, status", [({}, 0), ({"fa2_lab": "wrong: error 1"}, 1), ({"x": "not installed"}, 0)])
def test_bench_exit_status_reports_wrong_results(failures, status, monkeypatch, tmp_path, capsys):
    from bench_records import MACHINE, new_row

    from fa2_lab.records import Record
    from fa2_studio.bench import suites
    from fa2_studio.bench.compare import Plan

    row = new_row()
    row.failed = failures
    monkeypatch.setattr(suites, "smoke", lambda: Plan(Record("smoke", MACHINE, "by hand", rows=[row])))
    assert command.main(["bench", "smoke", "--folder", str(tmp_path)]) == status


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name, function", [("where", "command.show_where"), ("doctor", "doctor.main")])
def test_ctrl_c_exits_every_command_with_status_130(name, function, monkeypatch, capsys):
    monkeypatch.setattr(f"fa2_lab.tools.{function}", interrupt)
    assert command.main([name]) == 130
    assert capsys.readouterr().err == ""


INTERRUPT_THIRD_ROW = """
import os, signal, sys
from fa2_lab.tools import command
from fa2_studio.bench import suites

def row(*arguments, check=suites.time_dense, seen=[]):
    seen.append(arguments)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return check(*arguments)

suites.time_dense = row
sys.exit(command.main(sys.argv[1:]))
"""


def start_interruptible(call):
    """Start a process that reacts to Ctrl-C, even if the process of the tests ignores it."""
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(call, **pipes, start_new_session=True, preexec_fn=listens)


def hidden_files(folder):
    """Return the incomplete files in a folder, whose names begin with a full stop."""
    return [file for file in folder.iterdir() if file.name.startswith(".")]


def test_ctrl_c_in_bench_keeps_finished_rows_and_names_missing_ones(tmp_path):
    call = [sys.executable, "-c", INTERRUPT_THIRD_ROW, "bench", "smoke", "--folder", str(tmp_path)]
    process = start_interruptible(call)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    record = json.loads((tmp_path / "bench_smoke.json").read_text(encoding="utf-8"))
    assert (len(record["rows"]), len(record["missing"]), hidden_files(tmp_path)) == (2, 10, [])


# As a process -------------------------------------------------------------------------------------------------


def test_commands_run_in_an_ascii_terminal():
    environment = os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    call = [sys.executable, "-m", "fa2_lab", "where", "FA1.A2.L15"]
    result = subprocess.run(call, capture_output=True, env=environment, timeout=60)
    assert result.returncode == 0 and result.stderr == b"" and b"fa1.py:" in result.stdout


def test_closed_stdout_is_not_an_error():
    for call in (
        "where FA2.A1.L9 >&-",
        "where FA2.A1.L9 | true",
        "glossary | head -n 1",
        "--help >&-",
        "figures --help | true",
    ):
        shell = f"{sys.executable} -m fa2_lab {call}; exit ${{PIPESTATUS[0]}}"
        result = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=60)
        assert (result.returncode, result.stderr) == (0, b""), call
