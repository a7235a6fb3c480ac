"""What grading leaves: a record for each submission, the tables made of all records, and pages for students."""

from __future__ import annotations

import csv
import html
import io
import json
from dataclasses import asdict
from pathlib import Path

from fa2_lab.tools import files
from fa2_studio.course.judge import Graded

COLUMNS = ["student", "assignment", "score", "max_score", "late", "steps", "remarks"]


def printable(text: str) -> str:
    """A name as it can be printed and put into a table: no line breaks, and no formula for a spreadsheet."""
    text = "".join(c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


# Records ------------------------------------------------------------------------------------------------------------


def record_path(out: Path, student: str, assignment: str) -> Path:
    return out / "records" / student / f"{assignment}.json"


def keep(graded: Graded, out: Path, key: str = "") -> None:
    """Write one submission's record and its page, each whole or not at all. `key` tells what was graded."""
    page = out / "feedback" / graded.student / f"{graded.assignment}.html"
    record = record_path(out, graded.student, graded.assignment)
    for path in (page, record):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write(page, feedback(graded))
    files.write(record, json.dumps({"key": key} | asdict(graded)))


def kept(path: Path) -> tuple[Graded, str]:
    """A record and its key; nothing if it is not there or cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        key = record.pop("key")
        return Graded(**record), key
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Graded("", ""), ""


def all_kept(out: Path) -> list[Graded]:
    """Every record, by student and assignment."""
    found = [kept(path)[0] for path in sorted((out / "records").glob("*/*.json"))]
    return sorted((g for g in found if g.student), key=lambda g: (g.student, g.assignment))


# Tables -------------------------------------------------------------------------------------------------------------


def write_scores(out: Path) -> list[Graded]:
    """scores.csv, a line for each student and assignment, and scores_wide.csv, a line for each student."""
    graded = all_kept(out)
    files.write(out / "scores.csv", table([COLUMNS, *(row(g) for g in graded)]))
    names = sorted({g.assignment for g in graded})
    score = {(g.student, g.assignment): g.score for g in graded}
    wide = [["student", *names, "total"]]
    for student in sorted({g.student for g in graded}):
        points = [score.get((student, name), 0.0) for name in names]
        wide.append([printable(student), *(f"{x:g}" for x in points), f"{sum(points):g}"])
    files.write(out / "scores_wide.csv", table(wide))
    return graded


def row(g: Graded) -> list[str]:
    by_step = "; ".join(f"{name.removeprefix('test_')} {g.got.get(name, 0):g}/{m:g}" for name, m in g.most.items())
    remarks = printable(" | ".join(g.sentences))
    return [printable(g.student), g.assignment, f"{g.score:g}", f"{g.full:g}", g.late, by_step, remarks]


def table(rows: list[list[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


# Pages --------------------------------------------------------------------------------------------------------------


STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto} pre{background:#f4f4f4;padding:1em}"


def feedback(graded: Graded) -> str:
    """A page for the student: points, remarks, and for each step the answer and what the checks said of it."""
    title = html.escape(f"{printable(graded.student)}: {graded.assignment}")
    late = f" ({html.escape(graded.late)})" if graded.late else ""
    body = [f"<h1>{title}</h1><p><b>{graded.score:g} of {graded.full:g} points</b>{late}</p>"]
    body += ["<ul>", *(f"<li>{shown(s)}</li>" for s in graded.sentences), "</ul>"] if graded.sentences else []
    for name, code, said in graded.page:
        body += [f"<h2>{shown(name.removeprefix('test_'))}</h2>"] if name and not code else []
        body += [f"<pre>{shown(text)}</pre>" for text in (code, said) if text]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return head + "\n".join(body) + "</html>\n"


def shown(text: str) -> str:
    """Text as a page can show it: escaped, and without what is no character."""
    return html.escape(text.encode("utf-8", "replace").decode())
