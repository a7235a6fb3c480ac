"""What a class needs beside grading: a bundle for each student, and a leaderboard of assignment 9's cards."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

import nbformat

from fa2_lab.tools import files
from fa2_studio.course import climb, due, seeds
from fa2_studio.course.notebooks import FOLDER, Assignment, source, student_version, written

PAGES = {"STUDENT.md": "README.md", "AGENTS.md": "AGENTS.md"}  # beside the notebooks, and what a bundle calls them


def bundle(folder: Path, assignments: list[Assignment], students: list[str], secret: str) -> list[Path]:
    """A folder for each student with the notebooks of their seed; one folder for all where no students are named."""
    files.check_writable(folder, "course bundle")
    homes = {student: folder / student for student in students}
    for student, home in homes.items():
        if home.resolve().parent != folder.resolve():
            raise ValueError(f"students: got {student!r}; it takes names that can be folders")
    homes = homes or {"": folder}
    for student, home in homes.items():
        for assignment in assignments:
            notebook = student_version(seeds.seeded(source(assignment), seeds.seed_of(student, secret)))
            path = home / assignment.name / f"{assignment.name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, nbformat.writes(notebook) + "\n")
        for page, name in PAGES.items():
            files.write(home / name, (FOLDER / page).read_text(encoding="utf-8"))
    return list(homes.values())


def class_of(path: Path | None) -> tuple[list[str], str]:
    """The students and the secret of a class's YAML file."""
    if path is None:
        return [], ""
    said = due.read(path, [a.name for a in written()])
    if not said.students:
        raise ValueError(f"students: got none in {path}; it takes a list of names")
    return list(said.students), said.secret


# The leaderboard --------------------------------------------------------------------------------------------------

NINTH = "9_up_the_ladder"
CARD = re.compile(rf"{climb.CARD} ([\d.]+) instructions a score, (\d+) registers, (\d+) copies")
TIME = re.compile(r"yours ([\d.]+) ms")


class Card(NamedTuple):
    """What one student's kernel came to. Milliseconds are there if it was graded on a GPU."""

    student: str
    milliseconds: float | None
    instructions: float
    registers: int
    copies: int


def cards(graded: Path) -> list[Card]:
    """Every card in a folder that `course grade` wrote, the best first: by time where there is one.

    Without a time, a loop that waits for each of its loads stands behind all that do not: fewer instructions, no gain.
    """
    pages = sorted((graded / "feedback").glob(f"*/{NINTH}.html"))
    if not pages:
        raise ValueError(f"folder: got {graded}, without a page of {NINTH}; it takes what `course grade` wrote")
    found = [card for page in pages if (card := card_of(page))]
    return sorted(found, key=lambda c: (c.milliseconds or math.inf, not c.copies, c.instructions, c.registers))


def card_of(page: Path) -> Card | None:
    """A page's card, from what the tests said; what a student's own cells print does not count."""
    parts = re.split(r"<h2>", page.read_text(encoding="utf-8"))[1:]
    said = {part.split(":")[0].split("<")[0]: html.unescape(part.split("</pre>")[0]) for part in parts}
    card, time = CARD.search(said.get("compiled", "")), TIME.search(said.get("gpu", ""))
    if card is None:
        return None
    per_score, registers, copies = card.groups()
    return Card(page.parent.name, float(time[1]) if time else None, float(per_score), int(registers), int(copies))


def leaderboard(graded: Path) -> Path:
    """Write leaderboard.csv beside scores.csv."""
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    rows.writerow(["place", *Card._fields])
    for place, card in enumerate(cards(graded), start=1):
        rows.writerow([place, *("" if value is None else value for value in card)])
    return files.write(graded / "leaderboard.csv", table.getvalue())
