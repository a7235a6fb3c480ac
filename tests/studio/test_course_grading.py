"""Grading a folder: messages, submissions of every shape, results that are kept, tables and pages."""

import csv
import io
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
import numpy as np
from course_class import (
    FIRST,
    FIRST_FILE,
    LONG_LIMITS,
    code_cell,
    grade_books,
    needs_interpreter,
    needs_limits,
    run_checks,
    submission,
    write_book,
)
from course_costs import grade_in_process, with_mistake

from fa2_studio.course import channel, command, grade, grade_notebook, notebooks, results, seeds
from fa2_studio.course.notebooks import grade_id, is_solution, source_notebook

pytestmark = needs_limits

TRUSTING = grade.GradingSettings(LONG_LIMITS, trust=True)


# The channel --------------------------------------------------------------------------------------------------------


def round_trip(value):
    pipe = io.BytesIO()
    channel.send(pipe, value)
    pipe.seek(0)
    return channel.receive(pipe)


def test_channel_round_trips_values():
    x = np.arange(24.0).reshape(2, 3, 4)
    value = {"a": (1, [2.5, None, True], "ü\ud800"), 3: slice(1, None, 2), "n": float("-inf"), "e": ...}
    assert round_trip(value) == value
    views = (x, x.transpose(2, 0, 1), x[::-1, ::2], np.broadcast_to(x[:, :1], x.shape), x[:0], np.float32(2.5))
    for view in views:
        received = round_trip(view)
        assert received.dtype == view.dtype and received.shape == view.shape and (received == view).all()
    transposed = round_trip(x.transpose(2, 0, 1))
    assert (np.ravel(transposed, order="K") == x.ravel()).all(), "a kernel may trip over the order of axes in memory"
    assert np.isnan(round_trip(np.array([np.nan]))).all()
    assert isinstance(round_trip(np.int64(3)), np.integer)
    tensor = type("Tensor", (), {"__array__": lambda self, *_, **__: x})()
    assert (round_trip((tensor,))[0] == x).all(), "a student's own check takes it: so does the grader"


MALFORMED = [b"[" * 5000, b'{"far": 0}', b'{"data": ["os", "x", {}]}', b'{"a": 1, "b": 2}', b'{"slice": 5}', b"\xff"]
MALFORMED += [b'{"array": ["", "|O", [1], [0], false]}', b'{"array": ["AAAA", "<f8", [9], [0], false]}']


@pytest.mark.parametrize("text", MALFORMED)
def test_channel_rejects_malformed_messages(text):
    with pytest.raises(ValueError):
        channel.receive(io.BytesIO(text + b"\n"))


def test_channel_limits_message_size():
    for value in (np.zeros(10**7), [0.0] * (4 * 10**6)):
        with pytest.raises(ValueError, match="it takes at most"):
            channel.send(io.BytesIO(), value)
    with pytest.raises(ValueError, match="it takes at most"):
        channel.receive(io.BytesIO(b"0" * 10**8))


# A class ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_own_solutions(monkeypatch):
    """Skip the grading of the own solutions, which has its own test."""
    monkeypatch.setattr(grade, "grade_solutions", lambda *_: {})


def csv_rows(path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_grading_a_class_can_be_resumed_and_repeated(tmp_path, monkeypatch, without_own_solutions):
    """Names of every spelling and encoding, work of every shape: a row each, and nobody twice."""
    folder, out = tmp_path / "in", tmp_path / "out"
    write_book(submission(), folder / "ada")
    half_right = submission(answers={"merge": "def merge(a, b): return a"})
    write_book(half_right, folder / "ben", "1_online_softmax-final.ipynb")
    write_book("[" * 200_000, folder / "=cy()")
    (folder / os.fsdecode(b"J\xfcrgen")).mkdir()
    (folder / "Ju\u0308rgen").mkdir()
    write_book(submission(own=("1/0",), solved=False), folder / "J\u00fcrgen")
    os.mkfifo(folder / "ada" / "timestamp.txt")
    os.truncate(write_book("", folder / "eve"), 2**42)  # four terabytes of nothing, which no memory holds
    (tmp_path / "class.csv").write_bytes(b"\xef\xbb\xbffolder,id,name\nada,7,Ada L.\nzoe,9,Zoe\n")
    runs, real = [], grade.grade_all
    monkeypatch.setattr(grade, "grade_all", lambda tasks, *more: (runs.append(len(tasks)), real(tasks, *more)))

    def grade_class(**more) -> dict:
        roster = results.read_roster(tmp_path / "class.csv")
        settings = grade.GradingSettings(LONG_LIMITS, jobs=2, trust=True, roster=roster, **more)
        grade.grade_folder(folder, out, [FIRST], settings)
        return {row["student"]: row for row in csv_rows(out / "scores.csv")}

    rows = grade_class()
    scores = {name: row["score"] for name, row in rows.items()}
    none = dict.fromkeys(("J?rgen", "zoe"), "")
    assert scores == none | {"ada": "12", "ben": "9.75", "'=cy()": "0", "J\u00fcrgen": "0", "eve": "0"}
    assert "it takes at most" in rows["eve"]["remarks"]
    assert "not a notebook that can be read" in rows["'=cy()"]["remarks"]
    assert "two folders have the same name" in rows["J\u00fcrgen"]["remarks"]
    assert rows["zoe"]["remarks"] == "nothing was handed in" and rows["zoe"]["steps"] == ""
    page = (out / "feedback" / "zoe" / f"{FIRST.name}.html").read_text(encoding="utf-8")
    assert "No score" in page and "0 of 12" not in page
    grade_class()
    grade_class(again=("ben",))
    write_book(submission(answers={"merge": "def merge(a, b): return b"}), folder / "ada")
    grade_class()
    assert runs == [7, 0, 1, 1]
    canvas, moodle = (csv_rows(out / f"{name}.csv") for name in ("canvas", "moodle"))
    assert canvas[0]["Student"].strip() == "Points Possible" and canvas[0][FIRST.name] == "12"
    ids = {row["Student"]: (row["ID"], row["SIS User ID"], row["SIS Login ID"]) for row in canvas[1:]}
    assert ids == {
        "Ada L.": ("", "7", "7"),
        "Zoe": ("", "9", "9"),
    }  # a person whom Moodle does not know would stop its import
    points = {row["Identifier"]: row[f"{FIRST.name} (12)"] for row in moodle}
    assert points == {"7": "9", "9": ""}, "an empty cell leaves what the platform has"
    assert "not in the roster" in rows["ben"]["remarks"] and not rows["ada"]["remarks"]
    assert "not in the roster" not in (out / "feedback" / "ben" / f"{FIRST.name}.html").read_text(encoding="utf-8")


def test_moodle_folders_of_one_student_are_one_person(tmp_path, capsys, without_own_solutions):
    """As Moodle names folders. Points by hand are added in each run, and results without a folder are named."""
    folder, out = tmp_path / "in", tmp_path / "out"
    write_book(submission(), folder / "Ada_3_x")
    write_book(submission("6"), folder / "Ada_4_x", "6_read_the_machine.ipynb")
    (tmp_path / "class.csv").write_text("folder,id,name\nAda_3_x,7,Ada\nAda_4_x,7,Ada\n")
    results.write_record(grade_notebook.Graded("old", FIRST.name, {"test_a": 12.0}), out)
    (out / "by_hand.csv").write_text("folder,assignment,points,comment\nAda_4_x,6,-1.5,Late\n")
    words = ["grade", str(folder), "--only", "1", "6", "--trust", "--out", str(out)]
    for _ in range(2):
        assert command.main([*words, "--roster", str(tmp_path / "class.csv")]) == 0
        (row,) = csv_rows(out / "moodle.csv")
        scores = {f"{FIRST.name} (12)": "12", "6_read_the_machine (20)": "18.5"}
        assert row == {"Identifier": "7", "Full name": "Ada", **scores}
    assert "has results of old, without a folder" in capsys.readouterr().err
    page = (out / "feedback" / "Ada_4_x" / "6_read_the_machine.html").read_text(encoding="utf-8")
    assert "Ada: 6_read_the_machine" in page and "Late" in page and "<td>-1.5</td>" in page
    (out / "by_hand.csv").write_text("folder,assignment,points,comment\nbob,6,1,\n")
    with pytest.raises(ValueError, match=r"by_hand\.csv: got bob, 6, 1; it takes"):
        command.main(words)


@pytest.mark.skipif(sys.platform != "linux", reason="signals are Linux's")
def test_killed_grader_loses_no_results(tmp_path):
    for student in "abc":
        write_book(submission(own=("import time; time.sleep(1)",)), tmp_path / "in" / student)
    words = ["grade", str(tmp_path / "in"), "--only", "1", "--out", str(tmp_path / "out"), "--cell-seconds", "300"]
    line = [sys.executable, "-m", "fa2_lab", "course", *words, "--trust"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 200
    while time.monotonic() < until and len(list((tmp_path / "out").rglob("*.json"))) < 1:
        time.sleep(0.1)
    os.kill(process.pid, 9)
    process.wait()
    records = {p: p.read_bytes() for p in (tmp_path / "out" / "records").rglob("*.json")}
    assert 1 <= len(records) < 3
    assert subprocess.run(line, capture_output=True).returncode == 0
    assert {p: p.read_bytes() for p in records} == records, "finished work was graded again"
    assert [row["score"] for row in csv_rows(tmp_path / "out" / "scores.csv")] == ["12", "12", "12"]


def test_lost_grading_process_affects_one_student_only(tmp_path, monkeypatch, without_own_solutions):
    write_book(submission(), tmp_path / "in" / "ada")
    monkeypatch.setattr(grade.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9, "", ""))
    (graded,), _ = grade.grade_folder(tmp_path / "in", tmp_path / "out", [FIRST], TRUSTING)
    assert graded.score == 0 and "did not finish" in graded.sentences[0]


def test_duplicate_submissions_name_the_graded_file(tmp_path):
    (tmp_path / "ada").mkdir()
    for name in ("1_online_softmax", "1_online_softmax_final", "1_online_softmax-Copy1", "2_forward_x"):
        (tmp_path / "ada" / f"{name}.ipynb").write_text("{}")
    (tmp_path / "ada" / "3_Backward_FINAL.ipynb").write_text("{}")
    assignments = [FIRST, notebooks.find_assignment("2"), notebooks.find_assignment("3")]
    first, second, third = grade.find_submissions(tmp_path, assignments)
    assert third.path.name == "3_Backward_FINAL.ipynb" and not third.remarks
    assert first.path.name == "1_online_softmax.ipynb" and "_final" in first.remarks[0] and "Copy1" in first.remarks[0]
    assert second.path.name == "2_forward_x.ipynb" and not second.remarks


def test_nbgrader_folder_layout_is_read(tmp_path):
    write_book(submission(), tmp_path / "ada" / FIRST.name)
    (one,) = grade.find_submissions(tmp_path, [FIRST])
    assert one.path == tmp_path / "ada" / FIRST.name / FIRST_FILE


def test_similar_submissions_are_listed(tmp_path, capsys):
    """A copy with other spaces and names is listed; what the release gives, and what everybody writes, is not."""
    for n in range(2):
        own_way = f"def merge(a, b):\n    return my_own_way_of_joining_{n}(a[0] + b[0] * {n}, {'b' * n} a)"
        write_book(submission(answers={"merge": own_way}, solved=False), tmp_path / f"s{n}")
    unusual = "def merge(a, b):\n    a_strange_way_to_join_the_two = (a[0] - b[0]) * 17 + b[0]"
    for name, text in {"ada": unusual, "bob": unusual.replace("a_strange_way", "the_way").replace(" - ", "-")}.items():
        write_book(submission(answers={"merge": text}, solved=False), tmp_path / name)
    assert command.main(["similar", str(tmp_path), "--only", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1_online_softmax: ada and bob share 1 of") and printed.count("\n") == 1
    same = seeds.with_seed(source_notebook(notebooks.find_assignment("6")), 5)
    for name in ("ada", "bob"):
        write_book(submission("6", solved=False, source=same), tmp_path / name, "6_read_the_machine.ipynb")
    assert command.main(["similar", str(tmp_path), "--only", "6"]) == 0
    assert "no two submissions" in capsys.readouterr().out
    rung = (notebooks.PROJECT / "fa2_lab" / "kernels" / "ladder" / "r06_base_2.py").read_text(encoding="utf-8")
    write_book(submission("9", own=(rung,), solved=False), tmp_path / "eve", "9_up_the_ladder.ipynb")
    assert command.main(["similar", str(tmp_path), "--only", "9"]) == 0
    assert capsys.readouterr().out.startswith("9_up_the_ladder: eve and rung r06_base_2 share ")


def test_copied_official_solution_is_detected(tmp_path, capsys):
    """With other names, and beside a notebook of sixteen megabytes, which stops nobody."""
    answers = {grade_id(c): c.source for c in source_notebook(FIRST).cells if is_solution(c)}
    renamed = {key: re.sub(r"\bbase\b", "b0", re.sub(r"\balpha\b", "factor", text)) for key, text in answers.items()}
    for n in range(8):
        write_book(submission(answers=renamed if n % 2 else answers), tmp_path / f"s{n}")
    write_book(submission(own=("value_of_this_line = 1 + 2 + 3 + 4\n" * 450_000,), solved=False), tmp_path / "long")
    start = time.monotonic()
    assert command.main(["similar", str(tmp_path), "--only", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(f"s{n} and this project's solution share" in printed for n in range(8)) and "long" not in printed
    assert time.monotonic() - start < 60


# Shapes of notebooks --------------------------------------------------------------------------------------------------


def test_malformed_notebook_parts_are_ignored(tmp_path):
    book = submission()
    book["cells"] += [None, 7, {"cell_type": "code"}, {"cell_type": "code", "source": 5}]
    book["cells"] += [{"source": None, "metadata": []}]
    book["cells"][0]["metadata"] = {"nbgrader": {"grade_id": ["merge"]}}
    path = write_book(book, tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # some editors begin with a byte-order mark
    assert len(notebooks.read_submission(path)) == len(book["cells"]) - 2


def test_answer_cells_are_found_by_name_then_by_id(tmp_path):
    cells = notebooks.read_submission(write_book(submission(), tmp_path))
    (merge_cell,) = (cell for cell in cells if cell.name == "merge")
    without_marks = [replace(cell, name="") for cell in cells]  # as some editors save a notebook
    for handed in ([*cells, replace(merge_cell, source="a copy")], without_marks):
        parts, deleted = grade_notebook.assemble(source_notebook(FIRST), handed)
        assert [part.source for part in parts if part.name == "merge"] == [merge_cell.source] and not deleted


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not a notebook that can be read"), ('{"cells": {}}', "no list of cells"), ("[" * 10**5, "not a notebook"),
     ('{"cells": [' + "{}," * 3000 + "{}]}", "at most 2,000"), (" " * 21 * 2**20, "it takes at most")],
)  # fmt: skip
def test_unreadable_notebook_is_reported_in_one_sentence(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        notebooks.read_submission(write_book(text, tmp_path))


def test_pipes_and_links_are_not_graded(tmp_path):
    os.mkfifo(tmp_path / "pipe.ipynb")
    (tmp_path / "link.ipynb").symlink_to("nowhere")
    for name, message in (("pipe", "a pipe or a device"), ("link", "a symbolic link")):
        with pytest.raises(ValueError, match=message):
            notebooks.read_submission(tmp_path / f"{name}.ipynb")


# Fairness -----------------------------------------------------------------------------------------------------------


def test_retried_step_shows_which_result_counts(tmp_path):
    """A wrong gradient of one tile costs its own step, and the backward is tried again with a right one."""
    book = with_mistake("3", {"tau * (ds.T @ q_i)": "ds.T @ q_i"})
    graded = grade_books(tmp_path, {"ada": book}, "", name="3")["ada"]
    lost = {step for step, most in graded.most.items() if graded.got[step] < most}
    again = {name: output for kind, name, _, output in graded.page if kind == "again"}
    assert lost == {"test_tile_gradients"} and again, graded.sentences
    assert any("with correct versions of row_dots and tile_gradients" in said for said in graded.sentences)
    for name, output in again.items():
        assert f"{graded.got[name]:g} of {graded.most[name]:g} points" in output


def test_check_and_grade_agree_and_mark_hidden_tests(tmp_path):
    """The grader gives a wrong answer the same points as the checks in the student's own notebook."""
    book = with_mistake("1", {"right[:, None] * b[2]": "b[2]"})
    graded = grade_books(tmp_path, {"ada": book}, "")["ada"]
    assert graded.got["test_merge"] == run_checks(book)[0]["test_merge"]
    page = results.feedback_page(graded)
    assert "that you can run yourself" in page and "that only the grade runs" in page and "chapters 01 and 02" in page


def test_common_notebook_mistakes_are_named():
    """A solution that is no code any more, and results in another order, on the page; a changed argument, at home."""
    o, L = "o / divisor[:, None]", "m + np.log(divisor)"
    book = with_mistake("1", {f"{o}, {L}": f"{L}, {o}"})
    for cell in book.cells:
        cell.source = cell.source.replace("    m_new =", "    m[:] = m\n    o += 1\n    m_new =")
        cell.source += "\nimport math" if grade_id(cell) == "setup" else ""
        cell.cell_type = "markdown" if grade_id(cell) == "merge" else cell.cell_type
    graded = grade_in_process("1", book)
    feedback = " ".join([*graded.sentences, *(output for *_, output in graded.page)])
    for words in ("merge is not a code cell any more", "setup was changed", "in the order that the docstring names"):
        assert words in feedback
    assert "update changed an argument in place" in run_checks(book)[1]


def test_repeated_mistake_costs_a_quarter_of_a_check():
    """In assignment 4, each kernel has it. What else is wrong costs as before."""
    needs_interpreter("4")
    graded = grade_in_process("4", with_mistake("4", {"k.T": "k"}))
    assert graded.got == {"test_one_tile": 0, "test_loop": 3, "test_full": 3.75}
    assert "full: 3.75 points back, because an earlier step" in " ".join(graded.sentences)


def test_student_step_cannot_reach_the_right_version(tmp_path):
    reach = "def merge(*a):\n    return update.__globals__['right_merge'](*a)"
    book = submission(answers={"update": "def update(*a): return a", "merge": reach})
    graded = grade_books(tmp_path, {"ada": book}, "")["ada"]
    assert graded.got["test_merge"] == 0 and graded.got["test_own"] == 3


# The grader's own faults --------------------------------------------------------------------------------------------


def test_assignment_with_a_failing_solution_is_not_graded(tmp_path, monkeypatch, capsys):
    write_book(submission(), tmp_path / "in" / "ada")
    write_book(submission("6"), tmp_path / "in" / "ada", "6_read_the_machine.ipynb")
    broken = source_notebook(FIRST)
    next(c for c in broken.cells if "def merge" in c.source).source = "merge = None"
    real = source_notebook
    monkeypatch.setattr(grade, "source_notebook", lambda x: broken if x is FIRST else real(x))
    out = tmp_path / "out"
    assert command.main(["grade", str(tmp_path / "in"), "--out", str(out), "--only", "1", "6", "--trust"]) == 1
    errors, page = capsys.readouterr().err, out / "own_solutions" / f"{FIRST.name}.html"
    assert "1_online_softmax: its own solution scores" in errors and str(page) in errors
    assert "NOT YET" in page.read_text()
    assert [(row["assignment"], row["score"]) for row in csv_rows(out / "scores.csv")] == [("6_read_the_machine", "20")]


def test_seeds_depend_on_the_student_id_and_a_missing_secret_is_an_error(tmp_path, capsys, without_own_solutions):
    """Folders are named as the platform names downloads, which an instructor knows later than the ids."""
    (tmp_path / "secret").write_text("autumn")
    (tmp_path / "before.csv").write_text("folder,id\nada,7\n")
    (tmp_path / "after.csv").write_text("folder,id\nlovelace_99,7\n")
    secret = ["--secret", str(tmp_path / "secret")]
    words = ["bundle", str(tmp_path / "made"), "--only", "1", "--roster", str(tmp_path / "before.csv"), *secret]
    assert command.main(words) == 0
    made = tmp_path / "made" / "ada" / FIRST_FILE
    write_book(made.read_text(encoding="utf-8"), tmp_path / "in" / "lovelace_99")
    words = ["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--only", "1", "--trust"]
    words += ["--roster", str(tmp_path / "after.csv")]
    for more, is_warned in ((secret, False), ([], True)):
        capsys.readouterr()
        assert command.main([*words, *more]) == 0
        (row,) = csv_rows(tmp_path / "out" / "scores.csv")
        errors = capsys.readouterr().err
        assert (f"graded with: lovelace_99 {FIRST.name}" in errors) == ("other numbers" in row["remarks"]) == is_warned
    with pytest.raises(ValueError, match=r"--again: got tom; .*: lovelace_99"):
        command.main([*words, "--again", "tom"])
    with pytest.raises(ValueError, match="--secret: it takes --roster"):
        command.main(["bundle", str(tmp_path / "made"), *secret])


GUARDED = [
    ("l == 0", "np.where(l == 0, -np.inf, m + np.log(np.where(l == 0, 1, l)))"),
    ("np.isneginf(m)", "np.where(np.isneginf(m), -np.inf, m + np.log(np.where(l > 0, l, 1)))"),
]
OWN_TEST = """def test_merge(merge):
    draw = np.random.default_rng(5).standard_normal
    s, v = 4 * draw((30, 8)), draw((8, 3))
    s[0, :4], s[1, 4:], s[2] = -np.inf, -np.inf, -np.inf
    empty = np.full(30, -np.inf), np.zeros(30), np.zeros((30, 3))
    a, b = (update(*empty, s[:, k : k + 4], v[k : k + 4]) for k in (0, 4))
    for way in (merge(a, b), merge(b, a)):
        for got, true in zip(finalize(*way), finalize(*update(*empty, s, v))):
            assert np.allclose(got, true, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.parametrize(("empty", "L"), GUARDED)
def test_every_correct_finalize_detects_a_planted_merge(empty, L):
    """A student's test sees what finalize makes; all planted merges are caught with any right guard in it."""
    end = f"    empty = {empty}\n    return np.where(empty[:, None], 0, o / np.where(empty, 1, l)[:, None]), {L}"
    book = source_notebook(FIRST)
    answers = {"finalize": f"def finalize(m, l, o):\n{end}", "own": OWN_TEST}
    for cell in book.cells:
        cell.source = answers.get(grade_id(cell), cell.source)
    points, printed = run_checks(book)
    assert sum(points.values()) == 12, printed


def test_course_command_rejects_bad_arguments(tmp_path):
    home = str(tmp_path)
    (tmp_path / "class.csv").write_text("folder,id\n../ada,1\n")
    (tmp_path / "twins.csv").write_text("folder,id\nada,1\nben,1\n")
    for said, words in {
        "contains one folder per student": ["grade", f"{home}/nowhere"],
        "assignment: got '0'": ["bundle", home, "--only", "0"],
        "--cell-seconds: got 0": ["grade", home, "--cell-seconds", "0"],
        "--jobs: got 0": ["grade", home, "--jobs", "0"],
        "--jobs: got 999": ["grade", home, "--jobs", "999"],
        "names that can be folders": ["bundle", home, "--roster", f"{home}/class.csv"],
        "id: got '1' twice": ["bundle", home, "--roster", f"{home}/twins.csv"],
        "--secret: ": ["bundle", home, "--secret", f"{home}/none"],
        "--wheel: got .*none": ["bundle", home, "--wheel", f"{home}/none"],
    }.items():
        with pytest.raises(ValueError, match=said):
            command.main(words)


# Pages --------------------------------------------------------------------------------------------------------------

MARKUP = "<script>1 < 2 & 3</script>"


def test_feedback_page_escapes_student_html(tmp_path):
    points = dict(most={"test_a": 4.0, "test_b": 3.0}, got={"test_a": 0.5, "test_b": 3.0})
    page = [["code", MARKUP, MARKUP, MARKUP], ["visible", "test_b", "", MARKUP]]
    graded = grade_notebook.Graded("ann & bo", FIRST.name, **points, sentences=[MARKUP], page=page)
    results.write_record(graded, tmp_path, "key")
    text = (tmp_path / "feedback" / "ann & bo" / f"{FIRST.name}.html").read_text(encoding="utf-8")
    assert "<script" not in text and text.count("&lt;script&gt;1 &lt; 2 &amp; 3&lt;/script&gt;") == 5
    assert f"ann &amp; bo: {FIRST.name}" in text and "3.5 of 7 points" in text and "<td>0.5</td><td>4</td>" in text
    path = results.record_path(tmp_path, "ann & bo", FIRST.name)
    assert results.read_record(path) == (graded, "key")
    path.write_text(path.read_text()[:-9])
    assert results.read_record(path) == (grade_notebook.Graded("", ""), ""), "a record that was cut short is none"


@pytest.mark.parametrize(
    "name, shown", [("=1+1", "'=1+1"), ("@x", "'@x"), ("a\nb", "a?b"), ("\udcff", "?"), ("Łuk", "Łuk")]
)
def test_student_names_in_csv_are_no_formulas(name, shown):
    assert results.safe_for_spreadsheet(name) == shown


def test_student_check_names_broken_and_deleted_cells(tmp_path):
    answers = {"update": "def update(m, l, o, s, v):\n    return (m, l, o"}
    book = submission(answers=answers, own=("%matplotlib inline",))
    book["cells"] = [c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") != "test_finalize"]
    book["cells"].append(code_cell("!ls"))
    next(c for c in book["cells"] if "import numpy" in c["source"])["source"] += "\nimport math"
    points, printed = run_checks(book)
    assert points == {"test_update": 0, "test_merge": 3, "test_own": 0}
    for words in ("SyntaxError", "the cell setup was changed", "test_finalize was deleted"):
        assert words in printed
