"""Make submissions of an assignment, and grade them without the check of the assignment's own solution."""

import io
import json
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from checks.__main__ import played as played_on

import fa2_studio.course  # noqa: F401 — finds the checks
from fa2_lab.kernels import interpreter
from fa2_studio.course import grade, notebooks
from fa2_studio.course.notebooks import grade_id, is_solution, nbgrader_metadata, source_notebook, student_version
from fa2_studio.course.sandbox import Limits, limit_command

FIRST = notebooks.find_assignment("1")
FIRST_FILE = f"{FIRST.name}.ipynb"
SHORT_LIMITS = Limits(cell_seconds=5, notebook_seconds=60, memory_mb=1500)
LONG_LIMITS = Limits(cell_seconds=300, notebook_seconds=1500)  # stops nothing, even on a slow machine

limits_work = (
    subprocess.run([*limit_command(SHORT_LIMITS, 0, counts_apart=False), "true"], capture_output=True).returncode == 0
)
needs_limits = pytest.mark.skipif(not limits_work, reason="this container lets no process limit its memory")


def submission(name: str = "1", own: tuple = (), answers: dict | None = None, solved: bool = True, source=None) -> dict:
    """Return the student version of an assignment with answers, as plain JSON. `own` are code cells at its top."""
    source = source or source_notebook(notebooks.find_assignment(name))
    solution = {grade_id(c): c.source for c in source.cells if is_solution(c)}
    book = json.loads(json.dumps(student_version(source)))
    for cell in book["cells"]:
        key = nbgrader_metadata(cell).get("grade_id", "")
        if key in solution and (solved or key in (answers or {})):
            cell["source"] = (answers or {}).get(key, solution[key])
    book["cells"] = [code_cell(text) for text in own] + book["cells"]
    return book


def code_cell(text: str, **marked) -> dict:
    metadata = {"nbgrader": marked} if marked else {}
    return dict(cell_type="code", id="own", metadata=metadata, source=text, outputs=[], execution_count=None)


def write_book(notebook, folder: Path, name: str = FIRST_FILE) -> Path:
    """Write a notebook to a submission's folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(notebook if isinstance(notebook, str) else json.dumps(notebook), encoding="utf-8")
    return path


def grade_books(folder: Path, books: dict, kind: str, limits: Limits = LONG_LIMITS, name: str = "1"):
    """Return {key: result} for {key: notebook}, graded in a sandbox of this kind, where "" is none."""
    if not limits_work:
        pytest.skip(needs_limits.kwargs["reason"])
    assignment = notebooks.find_assignment(name)
    settings, results = replace(grade.GradingSettings(), limits=limits, jobs=2, trust=not kind), {}
    paths = {key: write_book(deepcopy(book), folder / str(n), f"{assignment.name}.ipynb") for n, (key, book) in
             enumerate(books.items())}  # fmt: skip
    tasks = [(grade.Submission(key, assignment, path), 0, "") for key, path in paths.items()]
    with grade.staged_packages([assignment]) as staged:
        grade.grade_all(tasks, staged, settings, lambda task, graded: results.__setitem__(task[0].student, graded))
    return results


def run_checks(notebook: dict) -> tuple[dict[str, float], str]:
    """Return {step: points} of a notebook's test cells in a student's own check, and everything that was printed."""
    printed = io.StringIO()
    points, _ = played_on(json.loads(json.dumps(notebook)), printed)
    return points, printed.getvalue()


def needs_interpreter(name: str) -> None:
    """Skip the test if this assignment cannot run in this process, which needs Triton's interpreter for some."""
    for need in notebooks.find_assignment(name).needs:
        pytest.importorskip(need, reason=f"{need} is not installed")
    if notebooks.find_assignment(name).needs and (not interpreter.is_enabled() or interpreter.version_conflict()):
        pytest.skip(interpreter.version_conflict() or "the interpreter is off: set TRITON_INTERPRET=1")
