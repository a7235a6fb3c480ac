"""The results of grading: one record per submission, tables for instructors and platforms, and pages for students."""

import csv
import html
import io
import json
import re
import unicodedata
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fa2_lab.tools import files
from fa2_studio.course.grade_notebook import Graded
from fa2_studio.course.notebooks import find_assignment, source_notebook

ROSTER = ["folder", "id", "name"]
BY_HAND = ["folder", "assignment", "points", "comment"]
NOT_IN_ROSTER = "not in the roster"  # a remark shown only to the instructor
COLUMNS = ["student", "assignment", "score", "max_score", "steps", "remarks"]


@dataclass(frozen=True)
class Person:
    """A student as registered on a platform. `folder` is the name of the folder with the student's submissions."""

    folder: str
    id: str = ""
    name: str = ""
    # Further folders of this student, because Moodle uses a different folder name for each assignment.
    more: tuple[str, ...] = ()


def read_roster(path: Path | None) -> tuple[Person, ...]:
    """Return the people listed in a CSV file with the columns folder, id and name, of which only folder is required.

    Lines with the same id and the same name list several folders of one person.
    """
    people: dict[str, Person] = {}
    rows = read_columns(path, "--roster", ROSTER, required=("folder",)) if path else []
    folders = [folder for folder, *_ in rows]
    for folder, own_id, name in rows:
        if folder in ("", ".", "..") or "/" in folder or "\\" in folder:
            raise ValueError(f"--roster: {path}: got {folder!r}; it takes names that can be folders")
        if folders.count(folder) > 1:
            raise ValueError(f"--roster: {path}: folder: got {folder!r} twice; it takes one line for each folder")
        first = people.setdefault(f"id {own_id}" if own_id else folder, Person(folder, own_id, name))
        if first.folder != folder and (not name or name != first.name):
            raise ValueError(f"--roster: {path}: id: got {own_id!r} twice; lines of one person need the same name")
        if first.folder != folder:
            people[f"id {own_id}"] = replace(first, more=(*first.more, folder))
    return tuple(people.values())


def read_columns(path: Path, name: str, columns: list[str], required: tuple[str, ...]) -> list[list[str]]:
    """Return the texts in these columns of a CSV file. Raises ValueError without the file or a required column."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(f"{name}: {path}: {error}") from error
    if not rows or not {*required} <= {*rows[0]}:
        raise ValueError(
            f"{name}: {path}: it takes a CSV file with the columns {', '.join(columns)}, separated by commas"
        )
    return [[unicodedata.normalize("NFC", str(row.get(key) or "").strip()) for key in columns] for row in rows]


def safe_for_spreadsheet(text: str) -> str:
    """Make a name safe for a table: remove line breaks, and prevent spreadsheets from reading the name as a formula."""
    text = "".join(c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


# Records ------------------------------------------------------------------------------------------------------------


def record_path(out: Path, student: str, assignment: str) -> Path:
    return out / "records" / student / f"{assignment}.json"


def write_record(graded: Graded, out: Path, key: str = "") -> None:
    """Write one submission's record and its feedback page, each atomically.

    `key` is a digest of everything that affects the result. It saves grading an unchanged submission again.
    """
    record = record_path(out, graded.student, graded.assignment)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_page(graded, out)
    files.write(record, json.dumps({"key": key} | asdict(graded)))


def write_page(graded: Graded, out: Path, name: str = "") -> None:
    """Write a feedback page into a folder with the same name as the submission's folder."""
    page = out / "feedback" / (graded.folder or graded.student) / f"{graded.assignment}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    files.write(page, feedback_page(graded, name))


def read_record(path: Path) -> tuple[Graded, str]:
    """Return a record and its key, both empty if there is no readable record."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        key = record.pop("key")
        return Graded(**record), key
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Graded("", ""), ""


def read_all_records(out: Path) -> list[Graded]:
    """Return all records, sorted by student and assignment, with the points and comments from by_hand.csv added."""
    records = [read_record(path)[0] for path in sorted((out / "records").glob("*/*.json"))]
    records = sorted((g for g in records if g.student), key=lambda g: (g.student, g.assignment))
    path = out / "by_hand.csv"
    for folder, name, points, comment in (
        read_columns(path, "by_hand.csv", BY_HAND, tuple(BY_HAND)) if path.exists() else []
    ):
        matching = [
            g for g in records if folder in (g.student, g.folder) and g.assignment == find_assignment(name).name
        ]
        try:
            (graded,), more = matching, float(points or 0)
        except ValueError:
            argument = f"{folder}, {name}, {points}; it takes a graded folder, its assignment and a number"
            raise ValueError(f"{path}: got {argument}") from None
        graded.most.setdefault("your teacher", 0.0)  # a name that no step uses
        graded.got["your teacher"] = graded.got.get("your teacher", 0.0) + more
        graded.sentences[:0], graded.is_absent = [comment] if comment else [], False
    return records


# Tables -------------------------------------------------------------------------------------------------------------


def write_tables(out: Path, people: tuple[Person, ...] = ()) -> None:
    """Write all pages, scores.csv, and the tables canvas.csv and moodle.csv with one line per student.

    With a roster, the platforms' tables contain only its people, because Moodle rejects a table that lists anyone else.
    A student who handed in nothing gets an empty cell, so the platform keeps its own score. An assignment that no
    student handed in gets no column.
    """
    graded, called = read_all_records(out), {person.folder: person.name for person in people}
    for g in graded:
        write_page(g, out, called.get(g.student, ""))
    files.write(out / "scores.csv", csv_table([COLUMNS, *(scores_row(g) for g in graded)]))
    names = sorted({g.assignment for g in graded if not g.is_absent})
    full = {g.assignment: f"{g.full:g}" for g in graded}
    score = {(g.student, g.assignment): points_text(g) for g in graded}
    canvas = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *names]]  # Canvas's own ID stays empty
    canvas.append(["    Points Possible", *[""] * 4, *(full[name] for name in names)])
    moodle = [["Identifier", "Full name", *(f"{name} ({full[name]})" for name in names)]]
    for person in people or [Person(student) for student in sorted({g.student for g in graded})]:
        scores = [score.get((person.folder, name), "") for name in names]
        name = safe_for_spreadsheet(person.name or person.folder)
        canvas.append([name, "", person.id, person.id, "", *scores])
        moodle.append([person.id or safe_for_spreadsheet(person.folder), name, *scores])
    files.write(out / "canvas.csv", csv_table(canvas))
    files.write(out / "moodle.csv", csv_table(moodle))


def points_text(g: Graded) -> str:
    """Return a score as text for the tables, or "" if nothing was handed in."""
    return "" if g.is_absent else f"{g.score:g}"


def scores_row(g: Graded) -> list[str]:
    got = {} if g.is_absent else g.most
    by_step = "; ".join(f"{name.removeprefix('test_')} {g.got.get(name, 0):g}/{m:g}" for name, m in got.items())
    remarks = safe_for_spreadsheet(" | ".join(g.sentences))[:2000]
    return [safe_for_spreadsheet(g.student), g.assignment, points_text(g), f"{g.full:g}", by_step, remarks]


def csv_table(rows: list[list[str]]) -> str:
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


def feedback_page(graded: Graded, name: str = "") -> str:
    """Return the student's feedback page in HTML: the points per step, remarks, and the output of the checks."""
    title = html.escape(f"{safe_for_spreadsheet(name or graded.student)}: {graded.assignment}")
    remarks = [said for said in graded.sentences if said != NOT_IN_ROSTER]
    points = "No score" if graded.is_absent else f"{graded.score:g} of {graded.full:g} points"
    body = [f"<h1>{title}</h1><p><strong>{points}</strong></p>"]
    if not graded.is_absent:
        body += ["<table><caption>How the score was computed</caption>"]
        titles = "".join(f"<th scope=col>{title}</th>" for title in ("step", "points", "of", "checks that failed"))
        body += [f"<tr>{titles}</tr>"]
        for name, most in graded.most.items():
            step, got = escape_text(name.removeprefix("test_")), graded.got.get(name, 0)
            missed = sum(
                x.count("  NOT YET ") for kind, of, _, x in graded.page if of == name and kind in ("visible", "hidden")
            )
            body += [f"<tr><th scope=row>{step}</th><td>{got:g}</td><td>{most:g}</td><td>{missed or ''}</td></tr>"]
        body += ["</table>"]
        if graded.score < graded.full:
            body += [f"<p>Read these again: {escape_text(prerequisites_of(graded.assignment))}.</p>"]
    if remarks:
        body += ["<h2>Remarks</h2><ul>", *(f"<li>{escape_text(s[:500])}</li>" for s in remarks[:50]), "</ul>"]
    for kind, name, code, output in graded.page:
        body += [f"<h2>{escape_text(name.removeprefix('test_'))}: {KINDS.get(kind, '')}</h2>"]
        body += [f"<pre>{escape_text(code)}</pre>"] if code else []
        body += [f"<pre class=checks>{escape_text(output)}</pre>"] if output else []
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
    return head + "\n".join(body) + "</main></body></html>\n"


def prerequisites_of(assignment: str) -> str:
    """Return the chapters and assignments that an assignment builds on, as listed in its notebook."""
    return re.search(r"Before this: (.+?)\. Hardware", source_notebook(find_assignment(assignment)).cells[0].source)[1]


def escape_text(text: str) -> str:
    """Escape text for a page, with a question mark in place of each invalid character."""
    return html.escape(text.encode("utf-8", "replace").decode())
