"""Release and grading: nothing leaks, no submission stops the others or grades itself, a class loses nothing."""

import csv
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: pip install 'fa2-lab[course]'")
import course_hostile as hostile
import nbformat
import numpy as np
from course_play import played
from course_wrong import WRONG

from fa2_studio.course import channel, command, due, grade, judge, notebooks, rules
from fa2_studio.course.notebooks import HIDDEN, SOLUTION, grade_id, source, student_version, written
from fa2_studio.course.sandbox import Limits

ASSIGNMENTS = {a.name: a for a in written()}
FIRST = ASSIGNMENTS["1_online_softmax"]
COURSE = [sys.executable, "-m", "fa2_lab", "course"]
PATIENT = Limits(cell_seconds=600, notebook_seconds=3000)  # where nothing has to be stopped, however slow the machine


# Release ----------------------------------------------------------------------------------------------------------


def lines(name: str) -> tuple[set[str], set[str]]:
    """Lines between the marks of solutions and hidden tests, and those that everybody sees."""
    inside, open_lines = set(), set()
    for cell in source(ASSIGNMENTS[name]).cells:
        secret = False
        for line in map(str.strip, cell.source.splitlines()):
            if line in (SOLUTION[0], HIDDEN[0], SOLUTION[1], HIDDEN[1]):
                secret = line in (SOLUTION[0], HIDDEN[0])
            elif line:
                (inside if secret else open_lines).add(line)
    return inside, open_lines


def secret_lines(name: str) -> set[str]:
    """A solution's and a hidden test's lines, without those that some assignment shows."""
    shown = "\n".join(line for other in ASSIGNMENTS for line in lines(other)[1])
    return {line for line in lines(name)[0] if line not in shown}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    assert command.main(["release", str(folder)]) == 0
    return folder


def test_release_writes_every_assignment(released):
    assert {p.parent.name for p in released.rglob("*.ipynb")} == set(ASSIGNMENTS)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_no_line_of_a_solution_or_hidden_test_leaves_the_house(name, released):
    secrets = secret_lines(name)
    assert len(secrets) > 10
    for path in (p for p in released.rglob("*") if p.is_file()):
        raw = path.read_text(encoding="utf-8")
        everything = "\n".join(texts_in(json.loads(raw)))
        assert not [s for s in secrets if len(s) > 25 and (s in everything or s in raw)]
        assert not {line.strip() for line in everything.splitlines()} & secrets
        assert not re.search(r"(BEGIN|END) (SOLUTION|HIDDEN)", raw)


def texts_in(node) -> list[str]:
    """Every string in a notebook, keys and metadata included."""
    if isinstance(node, dict):
        return [text for key, value in node.items() for text in (key, *texts_in(value))]
    if isinstance(node, list):
        joined = ["".join(node)] if node and all(isinstance(x, str) for x in node) else []
        return joined + [text for value in node for text in texts_in(value)]
    return [node] if isinstance(node, str) else []


def test_the_search_for_leaks_finds_one(released):
    leaky = student_version(source(FIRST))
    leaky.cells[3].metadata["note"] = "alpha = np.exp(m - base)"
    assert "alpha = np.exp(m - base)" in secret_lines(FIRST.name) & set(texts_in(leaky))


def test_student_versions_are_locked_where_they_should_be(released):
    notebook = nbformat.read(released / FIRST.name / f"{FIRST.name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if grade_id(cell):
            assert cell.metadata.deletable is False and not cell.get("outputs")
            assert cell.metadata.get("editable", True) is notebooks.is_solution(cell)
            assert cell.metadata.nbgrader.checksum


# What a student's process is given ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_no_solution_and_no_check_is_in_what_a_student_s_process_gets(name, tmp_path):
    staged = rules.stage(tmp_path, ASSIGNMENTS[name].gives)
    given = {str(p.relative_to(tmp_path / "fa2_lab").with_suffix("")).replace("/", ".") for p in staged.rglob("*.py")}
    assert {"trace", "studio.course.worker", "studio.course.probes"} <= given
    checks = {"softmax", "tiled", "gradients", "triton_steps", "break_it", "patient", "predict", "truth", "judge"}
    assert not {f"studio.course.{check}" for check in checks} & given
    if not ASSIGNMENTS[name].gives:
        assert not [m for m in given if m.startswith(("reference", "kernels", "machine", "attention", "errata"))]
    everything = "".join(p.read_text(encoding="utf-8") for p in staged.rglob("*.py"))
    assert not [s for s in secret_lines(name) if len(s) > 40 and s in everything]


# The channel --------------------------------------------------------------------------------------------------------


def there_and_back(value, **options):
    pipe = io.BytesIO()
    channel.send(pipe, value)
    pipe.seek(0)
    return channel.receive(pipe, **options)


def test_values_arrive_as_they_were_sent():
    x = np.arange(24.0).reshape(2, 3, 4)
    value = {"a": (1, [2.5, None, True], "ü\ud800"), 3: slice(1, None, 2), "n": float("-inf"), "e": ...}
    assert there_and_back(value) == value
    views = (x, x.transpose(2, 0, 1), x[::-1, ::2], np.broadcast_to(x[:, :1], x.shape), x[:0], np.float32(2.5))
    for view in views:
        came = there_and_back(view)
        assert came.dtype == view.dtype and came.shape == view.shape and (came == view).all()
        assert not view.size or came.strides == view.strides
    assert np.isnan(there_and_back(np.array([np.nan]))).all()


NONSENSE = [b"{", b"[" * 5000, b'{"far": 0}', b'{"data": ["os", "x", {}]}', b'{"a": 1, "b": 2}', b'{"slice": 5}']
NONSENSE += [b'{"array": ["|O", [1], [8], 0, false]}', b'{"array": ["<f8", [9], [8], 0, false]}']


@pytest.mark.parametrize("text", NONSENSE)
def test_a_message_that_makes_no_sense_is_an_error_and_runs_nothing(text):
    with pytest.raises(ValueError):
        channel.receive(io.BytesIO(channel.HEAD.pack(len(text), 0) + text))


def test_a_message_has_a_largest_size():
    with pytest.raises(ValueError, match="it takes at most"):
        channel.receive(io.BytesIO(channel.HEAD.pack(2**40, 0)))
    with pytest.raises(ValueError, match="it takes at most"):
        channel.send(io.BytesIO(), np.zeros(10**7))


# A class ------------------------------------------------------------------------------------------------------------


def handed_in(folder: Path, *students: str, own: tuple = ()) -> Path:
    """A folder in which each student's work is right."""
    for student in students:
        hostile.hand_in(hostile.Hostile(own), folder / student)
    return folder


@pytest.fixture
def unproven(monkeypatch):
    """Grading begins at once: that the grader proves itself first has tests of its own."""
    monkeypatch.setattr(grade, "prove_grader", lambda *_: None)


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class_yaml = """
students: [ada, ben, cy]
due: {1_online_softmax: 2026-03-01 12:00}
late: {per_day: 0.25, days: 2}
extensions: {ada: {1_online_softmax: 2026-03-08}}
"""


def test_a_class_is_graded_resumed_and_graded_again(tmp_path, monkeypatch, unproven):
    folder, out = handed_in(tmp_path / "in", "ada", "ben"), tmp_path / "out"
    for student, days in (("ada", 6), ("ben", 2)):
        moment = datetime(2026, 3, 1, 11).timestamp() + 86_400 * days
        os.utime(folder / student / hostile.FILE, (moment, moment))
    (tmp_path / "class.yaml").write_text(class_yaml)
    about = due.read(tmp_path / "class.yaml", list(ASSIGNMENTS))
    runs = []
    real = grade.run_tasks
    monkeypatch.setattr(grade, "run_tasks", lambda t, j, d: (runs.append([x.student for x in t]), real(t, j, d)))

    def go(**more) -> None:
        grade.grade_folder(folder, out, [FIRST], grade.Grading(PATIENT, about=about, **more))

    go()
    assert runs.pop() == ["ada", "ben"]
    rows = {r["student"]: r for r in rows_of(out / "scores.csv")}
    assert [(r["score"], r["late"]) for r in rows.values()] == [("12", ""), ("6", "2 days late, × 0.5"), ("0", "")]
    assert rows["cy"]["remarks"] == "nothing handed in"
    wide = rows_of(out / "scores_wide.csv")
    assert [r["total"] for r in wide] == ["12", "6", "0"] and wide[0]["1_online_softmax"] == "12"
    go()
    assert runs.pop() == [], "what has a record is not graded again"
    go(again=("ben",))
    assert runs.pop() == ["ben"]
    hostile.hand_in(hostile.Hostile(answers={"merge": "def merge(a, b): return a"}), tmp_path / "new")
    os.replace(tmp_path / "new" / hostile.FILE, folder / "ada" / hostile.FILE)
    go()
    assert runs.pop() == ["ada"], "new work is graded"
    assert len(rows_of(out / "scores.csv")) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="parents' deaths are told on Linux alone")
def test_a_grader_that_is_killed_loses_nothing(tmp_path):
    folder = handed_in(tmp_path / "in", *"abc", own=("import time; time.sleep(1.5)",))
    command_line = [
        *COURSE,
        "grade",
        str(folder),
        "--only",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--cell-seconds",
        "600",
    ]
    nowhere = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command_line, **nowhere, start_new_session=True)
    until = time.monotonic() + 300
    while time.monotonic() < until and len(list((tmp_path / "out").rglob("*.json"))) < 1:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    records = {p: p.read_bytes() for p in (tmp_path / "out" / "records").rglob("*.json")}
    assert 1 <= len(records) < 3
    assert subprocess.run(command_line, capture_output=True).returncode == 0
    assert {p: p.read_bytes() for p in records} == records, "finished work was graded again"
    assert [(r["student"], r["score"]) for r in rows_of(tmp_path / "out" / "scores.csv")] == [(s, "12") for s in "abc"]


def test_a_lost_grading_process_costs_one_student(tmp_path, monkeypatch, unproven):
    folder, real = handed_in(tmp_path / "in", "ada", "ben"), grade.run_task

    def lost(task, answer):
        os._exit(9) if task.student == "ada" else real(task, answer)

    monkeypatch.setattr(grade, "run_task", lost)
    graded = grade.grade_folder(folder, tmp_path / "out", [FIRST], grade.Grading(PATIENT))
    assert [(g.student, g.score) for g in graded] == [("ada", 0), ("ben", 12)]
    assert "did not come to an end" in graded[0].sentences[0]


def test_the_file_that_counts_and_the_others_are_named(tmp_path):
    (tmp_path / "ada").mkdir()
    for name in ("1_online_softmax", "1_online_softmax_final", "1_online_softmax-Copy1", "2_forward_x"):
        (tmp_path / "ada" / f"{name}.ipynb").write_text("{}")
    first, second = grade.submissions(tmp_path, [FIRST, ASSIGNMENTS["2_forward"]])
    assert first.path.name == "1_online_softmax.ipynb" and "_final" in first.remarks[0] and "Copy1" in first.remarks[0]
    assert second.path.name == "2_forward_x.ipynb" and not second.remarks


NO_CLASS = {
    "duee: {}": "duee", "due: {1_softmax: 2026-01-01}": "1_softmax", "due: {1_online_softmax: soon}": "it takes a date",
    "late: {per_day: -1}": "at least 0", "students: ada": "it takes a list", "late: 3": "names with values",
    "{": "class.yaml", "- 1": "it takes secret",
}  # fmt: skip


@pytest.mark.parametrize(("text", "said"), NO_CLASS.items())
def test_a_class_file_that_makes_no_sense_is_an_error_that_names_it(text, said, tmp_path):
    (tmp_path / "class.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        due.read(tmp_path / "class.yaml", list(ASSIGNMENTS))


def test_lateness():
    about = due.Class(due={"a": datetime(2026, 3, 1, 12).astimezone()}, per_day=0.1, days=3)
    hours = lambda h: datetime.fromtimestamp(datetime(2026, 3, 1, 12).timestamp() + 3600 * h).astimezone()  # noqa: E731
    found = [about.lateness("ada", "a", hours(h)) for h in (-1, 1, 25, 73)]
    assert [round(factor, 9) for _, factor in found] == [1, 0.9, 0.8, 0]
    assert found[1][0] == "1 day late, × 0.9" and about.lateness("ada", "b", hours(99)) == ("", 1.0)


# Fairness -----------------------------------------------------------------------------------------------------------


def changed(name: str, *pairs: tuple[str, str]):
    """The cells of an assignment's solution with some text replaced."""
    book = source(ASSIGNMENTS[name])
    for right, wrong in pairs:
        places = [c for c in book.cells if notebooks.is_solution(c) and right in c.source]
        assert len(places) == 1, (name, right)
        places[0].source = places[0].source.replace(right, wrong)
    return [notebooks.as_cell(c) for c in book.cells]


def graded_at_once(tmp_path, submissions: dict[str, tuple[str, list]], follow: bool = True) -> dict:
    """{key: what it got} for {key: (assignment, cells)}, two at a time."""
    stages = {}
    for name, _ in submissions.values():
        if name not in stages:
            grade.preload(ASSIGNMENTS[name])
            stages[name] = rules.stage(tmp_path / name, ASSIGNMENTS[name].gives)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    found, hidden = {}, grade.out_of_sight()
    tasks = [
        grade.Task(key, name, cells, source(ASSIGNMENTS[name]), stages[name], PATIENT, hidden, follow)
        for key, (name, cells) in submissions.items()
    ]
    grade.run_tasks(tasks, 2, lambda task, graded: found.__setitem__(task.student, graded))
    return found


SLIPS = {  # one slip costs once: {steps that lose points}, and the points that are left of 12 or 16
    "update": ("1_online_softmax", [("alpha * l + p.sum(axis=1)", "l + p.sum(axis=1)")], {"test_update"}),
    "tau": ("2_forward", [("s = tau * (q_i @ k_j.T)", "s = q_i @ k_j.T")], {"test_row_block"}),
    "dk": ("3_backward", [("tau * (ds.T @ q_i)", "ds.T @ q_i")], {"test_tile_gradients"}),
}


@pytest.fixture(scope="module")
def slips(tmp_path_factory):
    submissions = {key: (name, changed(name, *pairs)) for key, (name, pairs, _) in SLIPS.items()}
    return graded_at_once(tmp_path_factory.mktemp("slips"), submissions)


@pytest.mark.parametrize("key", SLIPS)
def test_one_slip_costs_once(key, slips):
    graded, lost = slips[key], SLIPS[key][2]
    said = "\n".join(text for _, _, text in graded.page)
    assert {s for s, most in graded.most.items() if graded.got[s] < most} == lost, said


def same_apart(rows: list[tuple], tmp_path):
    """Wrong answers score in the box what they score in a student's own notebook."""
    submissions = {str(n): (name, changed(name, (right, wrong))) for n, (name, right, wrong) in enumerate(rows)}
    found = graded_at_once(tmp_path, submissions, follow=False)
    for n, (name, right, wrong) in enumerate(rows):
        book = source(ASSIGNMENTS[name])
        for cell in book.cells:
            cell.source = cell.source.replace(right, wrong) if notebooks.is_solution(cell) else cell.source
        assert found[str(n)].got == played(book)[0], (name, wrong, found[str(n)].sentences)


PLAIN = ("1_online_softmax", "2_forward", "3_backward", "5_break_it", "6_read_the_machine")


def test_check_and_grade_agree(tmp_path):
    rows = [row[:3] for row in WRONG if row[0] in PLAIN]
    same_apart([rows[0], rows[4], rows[12], next(row for row in rows if row[0] == "5_break_it")], tmp_path)


@pytest.mark.exhaustive
def test_check_and_grade_agree_on_every_wrong_answer_in_numpy(tmp_path):
    same_apart([row[:3] for row in WRONG if row[0] in PLAIN], tmp_path)


def test_right_versions_of_earlier_steps_bring_no_step_s_own_answer_along(tmp_path):
    """A step that reaches for the right solution of itself finds that it is not there."""
    reach = "def row_block(*a):\n    return kind.__globals__['row_block'](*a)"
    cells = changed("2_forward", ("col_end - 1 <= row + offset", "col_end <= row + offset"))
    cells = [notebooks.Cell(c.id, c.name, c.is_code, reach if c.name == "row_block" else c.source) for c in cells]
    graded = graded_at_once(tmp_path, {"ada": ("2_forward", cells)})["ada"]
    assert graded.got["test_row_block"] == 0 and graded.got["test_forward"] == 2


def test_a_notebook_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / hostile.FILE
    path.write_text(json.dumps(hostile.notebook()), encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert len(notebooks.read(path)) == len(hostile.notebook()["cells"])


# The grader's own faults --------------------------------------------------------------------------------------------


def test_a_missing_package_is_an_error_and_no_zero(tmp_path, monkeypatch, capsys):
    folder, real = handed_in(tmp_path / "in", "ada"), importlib.util.find_spec
    monkeypatch.setattr(grade, "find_spec", lambda name: None if name == "IPython" else real(name))
    assert command.main(["grade", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert "IPython" in (said := capsys.readouterr().err) and "Nobody was graded" in said
    assert not (tmp_path / "out").exists()


def test_a_grader_that_cannot_score_the_solution_grades_nobody(tmp_path, monkeypatch, capsys):
    folder, broken = handed_in(tmp_path / "in", "ada"), source(FIRST)
    broken.cells[-2].source += "\ntest_merge = None"
    monkeypatch.setattr(grade, "source", lambda assignment: broken)
    assert command.main(["grade", str(folder), "--out", str(tmp_path / "out"), "--only", "1"]) == 1
    said = capsys.readouterr().err
    assert "its own solution scores 9 of 12" in said
    assert not list((tmp_path / "out").rglob("*.json"))


def test_without_the_extra_the_commands_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for arguments in (["release"], ["grade", "x"], ["check", "x"], ["build"]):
        assert command.main(arguments) == 1
        assert "pip install 'fa2-lab[course]'" in capsys.readouterr().err


def test_calls_that_make_no_sense(tmp_path):
    home, out = str(tmp_path), ["--out", str(tmp_path / "out")]
    for said, arguments in {
        "it takes one with a folder for each student": ["grade", f"{home}/nowhere", *out],
        "assignment: got '0'": ["release", home, "--only", "0"],
        "--cell-seconds: got 0": ["grade", home, "--cell-seconds", "0"],
        "--jobs: got 0": ["grade", home, "--jobs", "0"],
        "is not a notebook": ["check", f"{home}/none.ipynb"],
    }.items():
        with pytest.raises(ValueError, match=said):
            command.main(arguments)


def test_check_alone_as_a_student_runs_it(tmp_path):
    book = hostile.notebook({"merge": "def merge(a, b):\n    return a"})
    book["cells"] = [c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") != "test_finalize"]
    path = tmp_path / hostile.FILE
    path.write_text(json.dumps(book))
    done = subprocess.run([*COURSE, "check", str(path)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    said = ("expected m[0] = ", "first at row 0", "hint Each side", "update: 4 of 4", "test_finalize was deleted")
    assert not [part for part in said if part not in re.sub(" +", " ", done.stdout)], done.stdout
    assert re.search(r"^[\d.]+ of 12 points by the checks that you can see$", done.stdout, re.MULTILINE)


def test_check_tells_a_broken_cell_once_and_what_grading_does_about_it(tmp_path):
    """A cell that is no Python: its line, one failure for all checks, and that a later step is not lost with it."""
    slip = "def update(m, l, o, s, v):\n    return (m, l, o"
    path = tmp_path / hostile.FILE
    path.write_text(json.dumps(hostile.notebook({"update": slip})))
    graded = grade.check_alone(path, PATIENT)
    said = "\n".join(text for _, _, text in graded.page)
    assert graded.got == {"test_update": 0, "test_merge": 3, "test_finalize": 2, "test_own": 0}
    assert said.count("name 'update' is not defined\n") == 1 and said.count(": the same") == 5
    assert "refused it: NameError: name 'update' is not defined, at line " in said
    assert ": a, b, c = (update(*empty" in said
    broken, again = graded.sentences
    assert re.fullmatch("update: SyntaxError: .+, in line 2: return \\(m, l, o", broken)
    assert again == "test_own uses your update: when it is graded, it is tried with a right one as well"


def test_check_says_where_a_slower_machine_could_part_it_from_the_grade():
    graded = judge.Graded("", "", seconds={"test_a": 25.0, "test_b": 2.0, "test_c": 60.1})
    assert grade.slow(graded, Limits(cell_seconds=60)) == ["test_a took 25 s here; when it is graded it has 60 s"]
