"""Which submissions share lines that the release does not hold, with each other or, in 9, with a rung of the ladder.

A reason to ask the students, and no more.
"""

from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

from fa2_studio.course.grade import submissions
from fa2_studio.course.notebooks import Assignment, read, source, student_version
from fa2_studio.course.seeds import RUNG

SHORT = 25  # characters: shorter lines are alike by themselves
COMMON = 0.25  # of a class: what so many wrote is how one writes it


class Pair(NamedTuple):
    """Two students, the lines that hardly anybody but them has, and how many of their own the shorter work has."""

    first: str
    second: str
    shared: tuple[str, ...]
    of: int


def pairs(folder: Path, assignment: Assignment) -> list[Pair]:
    """Pairs that share lines of an assignment, those that share most first."""
    given = {line for cell in student_version(source(assignment)).cells for line in lines_of(cell.source)}
    own: dict[str, set[str]] = {}
    for one in submissions(folder, [assignment]):
        try:
            cells = read(one.path) if one.path else []
        except ValueError:
            continue  # what cannot be read is a row of the grade
        own[one.student] = {line for cell in cells if cell.is_code for line in lines_of(cell.source)} - given
    often = [line for lines in own.values() for line in lines]
    common = {line for line in set(often) if often.count(line) > max(2, COMMON * len(own))}
    students = sorted(own)
    rungs = sorted(RUNG.parent.glob("r[0-9]*.py")) if assignment.name.startswith("9") else []
    own |= {f"rung {path.stem}": lines_of(path.read_text(encoding="utf-8")) - given for path in rungs}
    couples = [*combinations(students, 2), *product(students, [f"rung {path.stem}" for path in rungs])]
    found = []
    for first, second in couples:
        if shared := (own[first] & own[second]) - common:
            found.append(Pair(first, second, tuple(sorted(shared)), min(len(own[first]), len(own[second]))))
    return sorted(found, key=lambda pair: -len(pair.shared) / pair.of)


def lines_of(text: str) -> set[str]:
    """The lines of a cell that are long enough, without spaces."""
    found = {"".join(line.split()) for line in text.splitlines()}
    return {line for line in found if len(line) > SHORT and not line.startswith("#")}
