"""Release and grading, headless: nothing leaks, and no submission stops the others or grades itself."""

import csv
import importlib.util
import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: pip install 'fa2-lab[course]'")
import nbformat

from fa2_lab.studio.course import command, grade, notebooks, rules
from fa2_lab.studio.course.notebooks import HIDDEN, SOLUTION, grade_id, source, student_version, written
from fa2_lab.studio.course.sandbox import Limits

ASSIGNMENTS = {a.name: a for a in written()}
FIRST = ASSIGNMENTS["1_online_softmax"]
QUICK = Limits(cell_seconds=4, notebook_seconds=60, memory_mb=2048)


def filled(answers: dict[str, str]):
    """The student version of assignment 1 with some answers written in; the others are the solution's."""
    notebook, solved = student_version(source(FIRST)), {grade_id(c): c.source for c in source(FIRST).cells}
    for cell in notebook.cells:
        if notebooks.is_solution(cell):
            cell.source = answers.get(grade_id(cell), solved[grade_id(cell)])
    return notebook


# Release ----------------------------------------------------------------------------------------------------------


def secret_lines(name: str) -> set[str]:
    """Lines between the marks of solutions and hidden tests, without those that the open parts have as well."""
    inside, open_lines = set(), set()
    for cell in source(ASSIGNMENTS[name]).cells:
        secret = False
        for line in map(str.strip, cell.source.splitlines()):
            if line in (SOLUTION[0], HIDDEN[0], SOLUTION[1], HIDDEN[1]):
                secret = line in (SOLUTION[0], HIDDEN[0])
            elif line:
                (inside if secret else open_lines).add(line)
    return inside - open_lines


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
        assert not [s for s in secrets if len(s) > 6 and (s in everything or s in raw)]
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


# Rules --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, said",
    [
        ("from fa2_lab.reference.fa2 import forward", "it imports fa2_lab.reference.fa2.forward"),
        ("from fa2_lab import reference as r", "it imports fa2_lab.reference"),
        ("import fa2_lab.kernels.portable.forward as f", "it imports fa2_lab.kernels.portable.forward"),
        ("import importlib\nimportlib.import_module('fa2_lab.reference.fa2')", "it imports fa2_lab.reference.fa2"),
        ("import torch.nn.functional as F\nF.scaled_dot_product_attention(q, k, v)", "scaled_dot_product_attention"),
        ("from torch.nn.functional import scaled_dot_product_attention as a", "scaled_dot_product_attention"),
        ("getattr(F, 'scaled_dot_product_attention')", "scaled_dot_product_attention"),
        ("%matplotlib inline\nfrom flash_attn import flash_attn_func", "it imports flash_attn"),
        ("check.right_merge(a, b)", "it uses the checking library"),
        ("check = None", "it uses the checking library"),
        (
            "from fa2_lab.studio.course.softmax import right_merge",
            "it imports fa2_lab.studio.course.softmax.right_merge",
        ),
    ],
)
def test_finished_attention_is_seen(code, said):
    notebook = filled({"update": code})
    assert said in " ".join(rules.findings(notebook, FIRST.name))


@pytest.mark.parametrize("code", ["import torch, scipy", "%%bash\nls", "def f(:", "x = 'an attention of 1.5'", "!ls"])
def test_what_is_allowed_is_let_through(code):
    assert rules.findings(filled({"update": code}), FIRST.name) == []


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_no_solution_breaks_the_rules(name):
    assert rules.findings(source(ASSIGNMENTS[name]), name) == []


# Grading ------------------------------------------------------------------------------------------------------------

FOREVER = """def update(m, l, o, s, v):
    while True:
        pass"""
HUNGRY = """def merge(a, b):
    kept = []
    while True:
        kept.append(np.empty(10**7))"""
AT_IMPORT = """raise RuntimeError("at import")
def finalize(m, l, o):
    return o, m"""
STUBBORN = """def merge(a, b):
    while True:
        try:
            sum(range(10**5))
        except BaseException:
            pass"""
EXITS = """import os
def merge(a, b):
    os._exit(0)"""
FLOOD = """while True:
    print("x" * 1000)"""


def cut_and_forged():
    """A right notebook without its tests of merge and with a test of update that gives itself a hundred points."""
    notebook = filled({})
    notebook.cells = [c for c in notebook.cells if grade_id(c) != "test_merge"]
    for cell in notebook.cells:
        if grade_id(cell) == "test_update":
            cell.source, cell.metadata.nbgrader["points"] = "100", 100
    notebook.cells.insert(2, nbformat.v4.new_code_cell("helper = 1"))
    return notebook


def without(name: str):
    """A notebook that lacks an answer and its test, with a wrong update and a forged test of it."""
    notebook = filled({"update": "def update(m, l, o, s, v):\n    return m, l, o"})
    for cell in notebook.cells:
        if grade_id(cell) == "test_update":
            cell.source = "4.0"
    notebook.cells = [c for c in notebook.cells if grade_id(c) not in (name, f"test_{name}")]
    return notebook


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """All kinds of submissions, graded together: {student: row of scores.csv}, and the folder."""
    folder = tmp_path_factory.mktemp("class")
    handed_in, out = folder / "submitted", folder / "graded"
    books = {
        "ada": cut_and_forged(),
        "bob": filled({"update": FOREVER, "merge": HUNGRY, "finalize": AT_IMPORT, "own": "test_merge = None"}),
        "cy": filled({"merge": STUBBORN}),
        "dora": filled({"update": FLOOD, "merge": EXITS}),
        "eve": filled({"update": "from fa2_lab.reference.online_softmax import SoftmaxState"}),
        "fay": without("finalize"),
    }
    for student, notebook in books.items():
        (handed_in / student).mkdir(parents=True)
        nbformat.write(notebook, handed_in / student / f"{FIRST.name}.ipynb")
    for student, name, text in [
        ("gus", f"{FIRST.name}.ipynb", "this is no notebook <b>"),
        ("hal", f"{FIRST.name}.pdf", "%PDF"),
        ("ivy", "homework.docx", "?"),
        ("jon", f"{FIRST.name}.ipynb", '{"cells": [{"cell_type": "code"}], "nbformat": 4}'),
    ]:
        (handed_in / student).mkdir()
        (handed_in / student / name).write_text(text)
    (handed_in / "kim").mkdir()
    (handed_in / "ada" / f"{FIRST.name}-Copy1.ipynb").write_text("an old copy")
    (handed_in / "ada" / ".ipynb_checkpoints").mkdir()
    (handed_in / "ada" / ".ipynb_checkpoints" / f"{FIRST.name}-checkpoint.ipynb").write_text("")
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in vars(QUICK).items()]
    assert command.main(["grade", str(handed_in), "--out", str(out), *limits]) == 0
    with open(out / "scores.csv", newline="", encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}, out


def test_everybody_is_graded(graded):
    rows, out = graded
    assert list(rows) == ["ada", "bob", "cy", "dora", "eve", "fay", "gus", "hal", "ivy", "jon", "kim"]
    for student, row in rows.items():
        page = out / "feedback" / student / f"{row['assignment'] or 'nothing'}.html"
        assert row["score"] in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("student", "steps", "remarks"),
    [
        ("ada", "update 4/4; merge 3/3; finalize 2/2; own 3/3", ["the cell test_merge was deleted"]),
        (
            "bob",
            "update 0/4; merge 0/3; finalize 0/2; own 0/3",
            ["test_update: Stopped: this cell did not end within 4 s", "RuntimeError: at import", "NameError"],
        ),
        ("cy", "update 4/4; merge 0/3; finalize 0/2; own 0/3", ["could not be interrupted"]),
        ("dora", "update 0/4; merge 0/3; finalize 0/2; own 0/3", ["did not end within 4 s", "Died: the process ended"]),
        ("eve", "update 0/4; merge 0/3; finalize 0/2; own 0/3", ["it imports fa2_lab.reference.online_softmax"]),
        ("fay", "update 0/4; merge 3/3; finalize 0/2; own 0/3", ["the cell finalize was deleted", "NameError"]),
        ("gus", "update 0/4; merge 0/3; finalize 0/2; own 0/3", ["is not a notebook that can be read"]),
        ("hal", "update 0/4; merge 0/3; finalize 0/2; own 0/3", ["its name does not end in .ipynb"]),
        ("ivy", "", ["no file is named like an assignment"]),
        ("jon", "update 0/4; merge 0/3; finalize 0/2; own 0/3", ["is not a notebook that can be read"]),
        ("kim", "", ["no file is named like an assignment"]),
    ],
)
def test_each_gets_a_score_and_a_sentence(student, steps, remarks, graded):
    row = graded[0][student]
    assert row["steps"] == steps, row
    for remark in remarks:
        assert remark in row["remarks"], row


def test_a_refusal_is_said_and_a_step_without_a_number_scores_nothing():
    cell = nbformat.v4.new_code_cell(metadata={"nbgrader": {"grade_id": "test_x"}})
    assert grade.score(cell, 4) == (0, "the step gave no result")
    said = "x\n  REFUSED  y\n           the score matrix was built; this step scores 0\n"
    cell.outputs = [nbformat.v4.new_output("stream", text=said)]
    for text, points in (("0.0", 0), ("3.5", 3.5), ("99", 4), ("nan", 0), ("-1", 0), ("'4'", 0)):
        result = nbformat.v4.new_output("execute_result", data={"text/plain": text})
        assert grade.score(nbformat.from_dict(cell | {"outputs": [*cell.outputs, result]}), 4)[0] == points
    cell.outputs.append(nbformat.v4.new_output("execute_result", data={"text/plain": "0.0"}))
    assert grade.score(cell, 4) == (0, "the score matrix was built")


def test_feedback_says_what_the_checks_said_and_hides_the_hidden(graded):
    page = (graded[1] / "feedback" / "bob" / f"{FIRST.name}.html").read_text(encoding="utf-8")
    assert "MemoryError: all the memory was used" in page and "0 of 12 points" in page
    assert not [line for line in secret_lines(FIRST.name) if len(line) > 30 and line in page]
    everything = "".join(p.read_text(encoding="utf-8") for p in graded[1].rglob("*.html"))
    assert "no notebook <b>" not in everything and "src=" not in everything and "http" not in everything


MARKUP = "<script>1 < 2 & 3</script>"


def answered() -> grade.Graded:
    """A graded notebook in which markup stands wherever a student can write."""
    outputs = [nbformat.v4.new_output("stream", text=MARKUP)]
    mine = nbformat.v4.new_code_cell(MARKUP, outputs=outputs)
    test = nbformat.v4.new_code_cell("", outputs=outputs, metadata={"nbgrader": {"grade_id": "test_b"}})
    points = dict(most={"test_a": 4.0, "test_b": 3.0}, got={"test_a": 0.5, "test_b": 3.0})
    notebook = nbformat.v4.new_notebook(cells=[mine, test])
    return grade.Graded("ann & bo", "1_x", **points, sentences=[MARKUP, "second"], notebook=notebook)


def test_feedback_shows_what_a_student_wrote_and_runs_none_of_it(tmp_path):
    page = grade.write_feedback(answered(), tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page, "a student's markup is part of the page"
    escaped = "&lt;script&gt;1 &lt; 2 &amp; 3&lt;/script&gt;"
    assert page.count(escaped) == 4, "remark, answer, what it printed, and what the checks said"
    assert "ann &amp; bo: 1_x" in page and "ann & bo" not in page
    assert "3.5 of 7 points" in page and "b: 3 of 3" in page


def test_scores_csv_says_who_got_what_of_how_much(tmp_path):
    grade.write_scores([answered()], tmp_path)
    with open(tmp_path / "scores.csv", newline="", encoding="utf-8") as file:
        header, row = csv.reader(file)
    assert header == ["student", "assignment", "score", "max_score", "steps", "remarks"]
    assert row == ["ann & bo", "1_x", "3.5", "7", "a 0.5/4; b 3/3", f"{MARKUP} | second"]


def test_a_solution_that_scores_almost_everything_does_not_prove_the_grader(monkeypatch):
    for got, proven in ((12.0, True), (11.99, False), (6.0, False)):
        solved = grade.Graded("", "", most={"test_a": 12.0}, got={"test_a": got}, sentences=["one check is wrong"])
        monkeypatch.setattr(grade, "grade_notebook", lambda *_, solved=solved: solved)
        if proven:
            grade.prove_grader(FIRST, QUICK)
            continue
        with pytest.raises(grade.GraderError, match=rf"scores {got:g} of 12 here \(one check is wrong\)"):
            grade.prove_grader(FIRST, QUICK)


def test_a_notebook_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / f"{FIRST.name}.ipynb"
    path.write_text(nbformat.writes(filled({})), encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert len(notebooks.read(path).cells) == len(filled({}).cells)


def test_output_is_kept_short(graded):
    assert (graded[1] / "feedback" / "dora" / f"{FIRST.name}.html").stat().st_size < 400_000


# The grader's own faults --------------------------------------------------------------------------------------------


def test_a_missing_package_is_an_error_and_no_zero(tmp_path, monkeypatch, capsys):
    (tmp_path / "in" / "ada").mkdir(parents=True)
    nbformat.write(filled({}), tmp_path / "in" / "ada" / f"{FIRST.name}.ipynb")
    real = importlib.util.find_spec
    monkeypatch.setattr(grade, "find_spec", lambda name: None if name == "ipykernel" else real(name))
    assert command.main(["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 1
    assert "ipykernel" in (said := capsys.readouterr().err) and "Nobody was graded" in said
    assert not (tmp_path / "out").exists()


def test_a_grader_that_cannot_score_the_solution_grades_nobody(tmp_path, monkeypatch, capsys):
    (tmp_path / "in" / "ada").mkdir(parents=True)
    nbformat.write(filled({}), tmp_path / "in" / "ada" / f"{FIRST.name}.ipynb")
    broken = source(FIRST)
    broken.cells[1].source = "import a_package_that_is_not_here\n" + broken.cells[1].source
    monkeypatch.setattr(grade, "source", lambda assignment: broken)
    assert command.main(["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "its own solution scores 0 of 12" in said and "a_package_that_is_not_here" in said
    assert not (tmp_path / "out").exists()


def test_without_the_extra_the_commands_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for arguments in (["release"], ["grade", "x"], ["check", "x"], ["build"]):
        assert command.main(arguments) == 1
        assert "pip install 'fa2-lab[course]'" in capsys.readouterr().err


def test_calls_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match="it takes one with a folder for each student"):
        grade.grade_folder(tmp_path / "nowhere", tmp_path, written(), QUICK)
    with pytest.raises(ValueError, match="assignment: got '9'"):
        command.main(["release", str(tmp_path), "--only", "9"])
    with pytest.raises(ValueError, match="--cell-seconds: got 0"):
        command.main(["grade", str(tmp_path), "--cell-seconds", "0"])
    with pytest.raises(ValueError, match="is not a notebook"):
        command.main(["check", str(tmp_path / "none.ipynb")])


def test_check_alone_as_a_student_runs_it(tmp_path):
    notebook = filled({"merge": "def merge(a, b):\n    return a"})
    notebook.cells = [c for c in notebook.cells if grade_id(c) != "test_finalize"]
    path = tmp_path / f"{FIRST.name}.ipynb"
    nbformat.write(notebook, path)
    done = subprocess.run(
        [sys.executable, "-m", "fa2_lab", "course", "check", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    for part in (
        "expected m[0] = ",
        "first at row 0",
        "hint Each side",
        "update: 4 of 4",
        "note: the cell test_finalize was deleted",
    ):
        assert part in re.sub(" +", " ", done.stdout), done.stdout
    assert re.search(r"^[\d.]+ of 12 points by the checks that you can see$", done.stdout, re.MULTILINE)
