"""Which submissions share lines that are not given, with each other, with the release's solution or, in 9, with a rung.

Names do not count: a line is compared with its variables numbered. A reason to ask the students, and no more.
"""

import io
import keyword
import tokenize
from collections import Counter
from contextlib import suppress
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

from fa2_studio.course.grade import submissions
from fa2_studio.course.notebooks import Assignment, is_solution, read, source, student_version
from fa2_studio.course.seeds import RUNG

SHORT = 25  # characters: shorter lines are alike by themselves
COMMON = 0.25  # of a class: what so many wrote is how one writes it, unless the release has it
MOST_LINES = 5000  # of one submission that are looked at
COPIED = 0.5  # of the release's lines: who has so many has its solution
LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Pair(NamedTuple):
    """Two students, the lines that hardly anybody but them has, and how many of their own the shorter work has."""

    first: str
    second: str
    shared: tuple[str, ...]
    of: int


def pairs(folder: Path, assignment: Assignment) -> list[Pair]:
    """Pairs that share lines of an assignment, those that share most first."""
    book = source(assignment)
    given = set(lines_of("\n".join(cell.source for cell in student_version(book).cells)))
    own: dict[str, dict[str, str]] = {}
    for one in submissions(folder, [assignment]):
        with suppress(ValueError):  # what cannot be read is a row of the grade
            text = "\n".join(cell.source for cell in (read(one.path) if one.path else []) if cell.is_code)
            own[one.student] = {key: line for key, line in lines_of(text).items() if key not in given}
    often = Counter(key for lines in own.values() for key in lines)
    common = {key for key, count in often.items() if count > max(2, COMMON * len(own))}
    found = [
        Pair(first, second, tuple(sorted(own[first][key] for key in shared)), min(len(own[first]), len(own[second])))
        for first, second in combinations(sorted(own), 2)
        if (shared := (own[first].keys() & own[second].keys()) - common)
    ]
    solution = "\n".join(cell.source for cell in book.cells if is_solution(cell))
    release = {"the release's solution": (lines_of(solution), COPIED)}
    rungs = sorted(RUNG.parent.glob("r[0-9]*.py")) if assignment.name.startswith("9") else []
    release |= {f"rung {path.stem}": (lines_of(path.read_text(encoding="utf-8")), 0.0) for path in rungs}
    for student, (name, (lines, least)) in product(sorted(own), release.items()):
        theirs = lines.keys() - given
        shared = (own[student].keys() & theirs) - (common if not least else set())
        if shared and len(shared) >= least * len(theirs):
            line = tuple(sorted(own[student][key] for key in shared))
            found.append(Pair(student, name, line, min(len(own[student]), len(theirs))))
    return sorted(found, key=lambda pair: -len(pair.shared) / pair.of)


def lines_of(text: str) -> dict[str, str]:
    """{a line with its names numbered and without spaces: as it was} for lines that are long enough."""
    found = {}
    for line in text.splitlines()[:MOST_LINES]:
        line = line.strip()[:500]
        if len("".join(line.split())) > SHORT and not line.startswith("#"):
            found[numbered(line)] = line
    return found


def numbered(line: str) -> str:
    """A line in which its first name is 0, the second 1, and so on; names behind a dot and Python's own stay."""
    words, names, after_dot = [], {}, False
    with suppress(tokenize.TokenError, IndentationError, SyntaxError):
        for word in tokenize.generate_tokens(io.StringIO(line).readline):
            is_name = word.type == tokenize.NAME and not after_dot and not keyword.iskeyword(word.string)
            if word.type not in LEFT_OUT:
                words.append(f"${names.setdefault(word.string, len(names))}" if is_name else word.string)
            after_dot = word.string == "."
    return " ".join(words)
