"""Grading a folder of submissions: every notebook gets a score and a sentence, whatever is in it.

What an assignment keeps to, so that its checks can run in another process than the student's code:

1. `notebooks.ASSIGNMENTS` names it, the packages it needs, and in `gives` the modules of this package that its
   students may import, such as "fa2_lab.machine.chips". Everything else of the package is not there when it is graded.
2. Its checking module has one function for each step: `step(function, ...) -> Report`. A test cell names what the
   student wrote, `check.update(update)`, and ends in `report.points(4)`.
3. A check never calls what a student wrote. It asks `guard.call(function, *arguments)`. Arguments and results are
   numbers, strings, None, NumPy arrays, and tuples, lists and dicts of these. An argument may also be a function, or
   an object whose methods are called, such as a kernel under test: the student's code then calls back into the check.
4. What has to run beside the student's code, such as launching or compiling a kernel, is a function `probe(theirs,
   *arguments)` of `probes.py` (or of another module whose name begins with probes). It imports nothing that holds an
   answer and returns plain values. A check runs it by `guard.beside(probe, function, *arguments)`.
5. Right values are computed in the checking module alone, from seeds that the test cell gives.
"""

from __future__ import annotations

import csv
import html
import io
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import nbformat
from tqdm import tqdm

from fa2_lab.studio import files
from fa2_lab.studio.course import rules, sandbox
from fa2_lab.studio.course.notebooks import Assignment, grade_id, is_solution, read, source, steps
from fa2_lab.studio.course.sandbox import Limits

EXTRA = {"test_gpu": 2.0}  # steps whose points come on top
NEVER = re.compile(r"^\.|^__|~$|\.ipynb_checkpoints")


class GraderError(RuntimeError):
    """The grader itself is not in order: nobody is graded."""


@dataclass
class Graded:
    """One submission after grading."""

    student: str
    assignment: str
    most: dict[str, float] = field(default_factory=dict)  # points of each step
    got: dict[str, float] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    notebook: nbformat.NotebookNode | None = None

    @property
    def score(self) -> float:
        return round(sum(self.got.values()), 2)

    @property
    def full(self) -> float:
        return sum(self.most.values())


# One notebook ---------------------------------------------------------------------------------------------------


def assemble(original, submitted) -> tuple[nbformat.NotebookNode, list[str]]:
    """The original's locked cells around a student's answers and own cells, and the names of deleted cells."""
    known = {grade_id(c): c for c in original.cells if grade_id(c)}
    answers, own, last = {}, {"": []}, ""
    for cell in submitted.cells:
        name = grade_id(cell)
        if name in known and name not in answers:
            answers[name], last = cell, name
        elif cell.cell_type == "code":
            own.setdefault(last, []).append(cell)
    cells = list(own[""])
    for name, cell in known.items():
        mine = answers.get(name)
        if is_solution(cell):
            cells += [mine] if mine is not None and mine.cell_type == "code" else []
        else:
            cells.append(cell)
        cells += own.get(name, [])
    book = nbformat.v4.new_notebook(metadata=original.metadata)
    book.cells = [plain(cell) for cell in cells]
    return book, [name for name in known if name not in answers]


def plain(cell):
    """A code cell with its name and nothing else that a notebook may carry along."""
    marks = {"nbgrader": cell.metadata["nbgrader"]} if grade_id(cell) else {}
    return nbformat.v4.new_code_cell(cell.source, metadata=marks)


def grade_notebook(assignment: str, original, submitted, limits: Limits, student: str = "") -> Graded:
    """Run a student's answers against the original's tests."""
    graded = Graded(student, assignment, steps(original))
    off_limits = rules.findings(submitted, assignment)
    if off_limits:
        graded.sentences = ["scores 0, since " + "; ".join(off_limits)]
        return graded
    book, missing = assemble(original, submitted)
    graded.sentences += [f"the cell {name} was deleted" for name in missing]
    ran, complaint = sandbox.run(book, limits)
    graded.notebook = nbformat.from_dict(ran)
    graded.sentences += [complaint] if complaint else []
    for cell in graded.notebook.cells:
        name = grade_id(cell)
        if name in graded.most:
            graded.got[name], sentence = score(cell, graded.most[name])
            graded.sentences += [f"{name}: {sentence}"] if sentence else []
        elif failed := [o for o in cell.get("outputs", []) if o.output_type == "error"]:
            graded.sentences.append(f"{name or 'a cell of its own'}: {failed[0].ename}: {failed[0].evalue}"[:300])
    return graded


def score(cell, most: float) -> tuple[float, str]:
    """The points that a test cell shows, and a sentence if it shows none."""
    outputs = cell.get("outputs", [])
    failed = [o for o in outputs if o.output_type == "error"]
    if failed:
        return 0.0, f"{failed[0].ename}: {failed[0].evalue}"[:300]
    refused = re.findall(r"REFUSED .*\n +(.*);", "".join(o.text for o in outputs if o.output_type == "stream"))
    values = [o.data.get("text/plain", "") for o in outputs if o.output_type == "execute_result"]
    try:
        points = float(values[-1])
    except (IndexError, ValueError):
        return 0.0, "the step gave no result"
    if not points >= 0:
        return 0.0, "the step gave no result"
    top = EXTRA.get(grade_id(cell), most)
    return min(points, top), refused[0] if refused else ""


# A folder of them -----------------------------------------------------------------------------------------------


def submissions(folder: Path, assignments: list[Assignment]) -> list[tuple[str, str, Path | None]]:
    """(student, assignment, file) for a folder with one folder for each student; a student without a file has None."""
    if not folder.is_dir():
        raise ValueError(f"folder: got {folder}, which is no folder; it takes one with a folder for each student")
    found = []
    for home in sorted(p for p in folder.iterdir() if p.is_dir() and not NEVER.search(p.name)):
        files = [p for p in home.rglob("*") if p.is_file() and not NEVER.search(str(p.relative_to(home)))]
        files.sort(key=lambda p: (p.suffix == ".ipynb", -len(p.stem), p))  # the best name comes last
        handed_in = [(home.name, of(path, assignments), path) for path in files]
        known = {}
        for student, name, path in handed_in:
            if name:
                known[name] = (student, name, path)
        found += known.values() if known else [(home.name, "", None)]
    if not found:
        raise ValueError(f"folder: got {folder}, without a folder in it; it takes one with a folder for each student")
    return found


def of(path: Path, assignments: list[Assignment]) -> str:
    """The assignment that a file's name, or its folder's, speaks of."""
    return next((a.name for a in assignments if a.name in path.stem or a.name == path.parent.name), "")


def missing_packages(assignments: list[Assignment]) -> list[str]:
    """Packages that grading these assignments needs and that are not here."""
    needed = {"numpy", "nbformat", "jupyter_client", "ipykernel", "nbgrader"}
    needed |= {package for a in assignments for package in a.needs}
    return sorted(name for name in needed if find_spec(name) is None)


def prove_grader(assignment: Assignment, limits: Limits) -> None:
    """The assignment's own solution must score full marks here and now, or nobody is graded."""
    original = source(assignment)
    solved = grade_notebook("", original, original, limits)
    if solved.score < solved.full:
        why = "; ".join(solved.sentences) or "see its own output"
        raise GraderError(
            f"{assignment.name}: its own solution scores {solved.score:g} of {solved.full:g} here ({why}). "
            "Nobody was graded: the fault lies with this machine or these limits."
        )


def grade_folder(folder: Path, out: Path, assignments: list[Assignment], limits: Limits) -> list[Graded]:
    """Grade every submission and write scores.csv and feedback/STUDENT/ASSIGNMENT.html."""
    todo = submissions(folder, assignments)
    used = [a for a in assignments if any(name == a.name for _, name, _ in todo)]
    if missing := missing_packages(used):
        raise GraderError(
            f"not installed here: {', '.join(missing)}. pip install 'fa2-lab[course]'. Nobody was graded."
        )
    originals = {a.name: source(a) for a in used}
    for assignment in used:
        prove_grader(assignment, limits)
    files.check_writable(out, "course grade")
    graded = []
    for student, name, path in tqdm(todo, desc="grading", unit="notebook", disable=None):
        graded.append(grade_file(student, name, path, originals, limits))
        write_feedback(graded[-1], out)
        write_scores(graded, out)
    return graded


def grade_file(student: str, name: str, path: Path | None, originals: dict, limits: Limits) -> Graded:
    """One file, whatever it is. Nothing in it can stop the grading of the others."""
    if path is None:
        return Graded(student, "", sentences=["no file is named like an assignment"])
    try:
        submitted = read(path)
    except ValueError as unreadable:
        return Graded(student, name, steps(originals[name]), sentences=[str(unreadable)])
    return grade_notebook(name, originals[name], submitted, limits, student)


# What students and instructors read -------------------------------------------------------------------------------


def write_scores(graded: list[Graded], out: Path) -> None:
    """scores.csv, one line for each notebook."""
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    rows.writerow(["student", "assignment", "score", "max_score", "steps", "remarks"])
    for g in graded:
        by_step = "; ".join(f"{name.removeprefix('test_')} {g.got.get(name, 0):g}/{m:g}" for name, m in g.most.items())
        rows.writerow([g.student, g.assignment, f"{g.score:g}", f"{g.full:g}", by_step, " | ".join(g.sentences)])
    files.write(out / "scores.csv", table.getvalue())


STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto} pre{background:#f4f4f4;padding:1em}"


def write_feedback(graded: Graded, out: Path) -> Path:
    """A page for the student: points, remarks, and for each step the answer and what the checks said of it."""
    path = out / "feedback" / graded.student / f"{graded.assignment or 'nothing'}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    title = html.escape(f"{graded.student}: {graded.assignment or 'nothing handed in'}")
    body = [f"<h1>{title}</h1><p><b>{graded.score:g} of {graded.full:g} points</b></p>"]
    body += ["<ul>", *(f"<li>{html.escape(s)}</li>" for s in graded.sentences), "</ul>"] if graded.sentences else []
    for cell in graded.notebook.cells if graded.notebook else ():
        name = grade_id(cell)
        if name in graded.most:
            body.append(f"<h2>{name.removeprefix('test_')}: {graded.got[name]:g} of {graded.most[name]:g}</h2>")
            body.append(f"<pre>{html.escape(said(cell))}</pre>")
        elif is_solution(cell) or not name:
            body.append(f"<pre>{html.escape(cell.source)}</pre><pre>{html.escape(said(cell))}</pre>")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return files.write(path, head + "\n".join(body).replace("<pre></pre>", "") + "</html>\n")


def said(cell) -> str:
    """What a cell printed, and its error if there is one; tests that are hidden stay so."""
    texts = [o.text if o.output_type == "stream" else "" for o in cell.get("outputs", [])]
    texts += [f"{o.ename}: {o.evalue}" for o in cell.get("outputs", []) if o.output_type == "error"]
    return "".join(texts)


# What a student runs alone ----------------------------------------------------------------------------------------


def check_alone(path: Path, limits: Limits) -> Graded:
    """A student's own notebook with the tests that it carries. A step whose test cell was deleted scores 0."""
    submitted = read(path)
    promised = dict(submitted.metadata.get("fa2_lab", {}).get("steps", {}))
    name = of(path, [Assignment(n, "") for n in rules.PER_ASSIGNMENT])
    graded = grade_notebook(name, submitted, submitted, limits)
    for step, points in promised.items():
        if step not in graded.most:
            graded.most[step], graded.got[step] = points, 0.0
            graded.sentences.append(f"the cell {step} was deleted")
    return graded
