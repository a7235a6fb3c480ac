"""The results of grading: a record per submission, tables for instructors and platforms, and pages for students."""

import csv
import html
import io
import json
import re
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path

from fa2_lab.tools import files
from fa2_studio.course.judge import Graded
from fa2_studio.course.notebooks import named, source

ROSTER = ["folder", "id", "name"]
COLUMNS = ["student", "assignment", "score", "max_score", "steps", "remarks"]


@dataclass(frozen=True)
class Person:
    """A student as a platform knows them. `folder` is the name of the folder with their submissions."""

    folder: str
    id: str = ""
    name: str = ""


def roster(path: Path | None) -> tuple[Person, ...]:
    """Return the people of a CSV file with the columns folder, id and name, of which only folder is required."""
    if path is None:
        return ()
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(f"--roster: {path}: {error}") from error
    if not rows or "folder" not in rows[0]:
        raise ValueError(f"--roster: {path}: it takes a CSV file with the columns folder, id and name")
    texts = [[unicodedata.normalize("NFC", str(row.get(key) or "").strip()) for key in ROSTER] for row in rows]
    people = [Person(*text) for text in texts]
    for key in ("folder", "id"):
        values = [value for person in people if (value := getattr(person, key))]
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise ValueError(f"--roster: {path}: {key}: got {twice[0]!r} twice; it takes one line for each person")
    for person in people:
        if person.folder in ("", ".", "..") or "/" in person.folder or "\\" in person.folder:
            raise ValueError(f"--roster: {path}: got {person.folder!r}; it takes names that can be folders")
    return tuple(people)


def printable(text: str) -> str:
    """Return a name that is safe in a table: without line breaks, and not taken for a formula by a spreadsheet."""
    text = "".join(c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


# Records ------------------------------------------------------------------------------------------------------------


def record_path(out: Path, student: str, assignment: str) -> Path:
    return out / "records" / student / f"{assignment}.json"


def keep(graded: Graded, out: Path, key: str = "") -> None:
    """Write one submission's record and its feedback page, each atomically.

    `key` is a digest of all that the result depends on, so that an unchanged submission is not graded again.
    """
    page = out / "feedback" / graded.student / f"{graded.assignment}.html"
    record = record_path(out, graded.student, graded.assignment)
    for path in (page, record):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write(page, feedback(graded))
    files.write(record, json.dumps({"key": key} | asdict(graded)))


def kept(path: Path) -> tuple[Graded, str]:
    """Return a record and its key. If there is no record that can be read, both are empty."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        key = record.pop("key")
        return Graded(**record), key
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Graded("", ""), ""


def all_kept(out: Path) -> list[Graded]:
    """Return all records, sorted by student and assignment."""
    found = [kept(path)[0] for path in sorted((out / "records").glob("*/*.json"))]
    return sorted((g for g in found if g.student), key=lambda g: (g.student, g.assignment))


# Tables -------------------------------------------------------------------------------------------------------------


def write_tables(out: Path, people: tuple[Person, ...] = ()) -> None:
    """Write scores.csv, with a line per student and assignment, and canvas.csv and moodle.csv, with a line per student.

    With a roster, the platforms' tables contain only its people, because Moodle refuses a table with anyone else. A
    student who handed in nothing has an empty cell, so the platform keeps its own score. An assignment that no student
    handed in has no column.
    """
    graded = all_kept(out)
    files.write(out / "scores.csv", table([COLUMNS, *(row(g) for g in graded)]))
    names = sorted({g.assignment for g in graded if not g.is_absent})
    full = {g.assignment: f"{g.full:g}" for g in graded}
    score = {(g.student, g.assignment): points(g) for g in graded}
    canvas = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *names]]  # Canvas's own ID stays empty
    canvas.append(["    Points Possible", *[""] * 4, *(full[name] for name in names)])
    moodle = [["Identifier", "Full name", *(f"{name} ({full[name]})" for name in names)]]
    for person in people or [Person(student) for student in sorted({g.student for g in graded})]:
        scores = [score.get((person.folder, name), "") for name in names]
        name = printable(person.name or person.folder)
        canvas.append([name, "", person.id, person.id, "", *scores])
        moodle.append([person.id or printable(person.folder), name, *scores])
    files.write(out / "canvas.csv", table(canvas))
    files.write(out / "moodle.csv", table(moodle))


def points(g: Graded) -> str:
    """Return a score as the tables have it, which is empty if nothing was handed in."""
    return "" if g.is_absent else f"{g.score:g}"


def row(g: Graded) -> list[str]:
    got = {} if g.is_absent else g.most
    by_step = "; ".join(f"{name.removeprefix('test_')} {g.got.get(name, 0):g}/{m:g}" for name, m in got.items())
    remarks = printable(" | ".join(g.sentences))[:2000]
    return [printable(g.student), g.assignment, points(g), f"{g.full:g}", by_step, remarks]


def table(rows: list[list[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


# Pages --------------------------------------------------------------------------------------------------------------

STYLE = """body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:1rem auto;padding:0 1rem;color:#111}
h1{font-size:1.5rem}h2{font-size:1.2rem}caption{text-align:left}
pre{background:#f4f4f4;padding:.75rem;overflow-x:auto;font-size:.875rem}.checks{white-space:pre-wrap}
table{border-collapse:collapse}td,th{padding:.25rem .75rem;text-align:left;border-bottom:1px solid #bbb}"""
KINDS = {
    "visible": "checks that you can run yourself",
    "hidden": "checks that only the grade runs",
    "again": "a second run, with correct versions of the earlier functions, and these points count",
    "code": "your cell",
}


def feedback(graded: Graded) -> str:
    """Return the student's feedback page in HTML: the points per step, remarks, and the output of the checks."""
    title = html.escape(f"{printable(graded.student)}: {graded.assignment}")
    points = "No score" if graded.is_absent else f"{graded.score:g} of {graded.full:g} points"
    body = [f"<h1>{title}</h1><p><strong>{points}</strong></p>"]
    if not graded.is_absent:
        body += ["<table><caption>How the score was computed</caption>"]
        body += ["<tr><th scope=col>step</th><th scope=col>points</th><th scope=col>of</th></tr>"]
        for name, most in graded.most.items():
            step, got = shown(name.removeprefix("test_")), graded.got.get(name, 0)
            body += [f"<tr><th scope=row>{step}</th><td>{got:g}</td><td>{most:g}</td></tr>"]
        body += ["</table>"]
        if graded.score < graded.full:
            body += [f"<p>Read these again: {shown(before(graded.assignment))}.</p>"]
    if graded.sentences:
        body += ["<h2>Remarks</h2><ul>", *(f"<li>{shown(s[:500])}</li>" for s in graded.sentences[:50]), "</ul>"]
    for kind, name, code, output in graded.page:
        body += [f"<h2>{shown(name.removeprefix('test_'))}: {KINDS.get(kind, '')}</h2>"]
        body += [f"<pre>{shown(code)}</pre>"] if code else []
        body += [f"<pre class=checks>{shown(output)}</pre>"] if output else []
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
    return head + "\n".join(body) + "</main></body></html>\n"


def before(assignment: str) -> str:
    """Return the chapters and assignments that an assignment builds on, as its notebook names them."""
    return re.search(r"Before this: (.+?)\. Hardware", source(named(assignment)).cells[0].source)[1]


def shown(text: str) -> str:
    """Return text for a page: escaped, with a question mark for each invalid character."""
    return html.escape(text.encode("utf-8", "replace").decode())
