"""Find submissions that share lines not provided by the assignment.

Each submission is compared with all others, with this project's solution and, in assignment 9, with the rungs. Names
are replaced with numbers before lines are compared, so renaming hides nothing. A match is only a reason to ask the
students.
"""

import io
import keyword
import tokenize
from collections import Counter
from contextlib import suppress
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

from fa2_studio.course.grade import find_submissions
from fa2_studio.course.notebooks import (
    Assignment,
    grade_id,
    is_solution,
    read_submission,
    source_notebook,
    student_version,
)
from fa2_studio.course.seeds import RUNG

SHORT_LINE = 25  # lines with at most this number of characters are not compared, because they are often equal by chance
COMMON_SHARE = 0.25  # a line written by more than this share of the class is not evidence that two students shared it
MAX_LINES = 5000  # the most lines compared in one submission
COPIED_SHARE = 0.5  # a submission is listed if it contains at least this share of the lines in this project's solution
IGNORED_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Pair(NamedTuple):
    """Two students, the lines that they share with few others, and the number of own lines in the shorter submission.

    `second` may also be "this project's solution" or a rung.
    """

    first: str
    second: str
    shared: tuple[str, ...]
    of: int


def similar_pairs(folder: Path, assignment: Assignment) -> list[Pair]:
    """Return the pairs that share lines in an assignment, sorted by the shared part of the shorter submission."""
    book = source_notebook(assignment)
    released_lines = set(normalized_lines("\n".join(cell.source for cell in student_version(book).cells)))
    locked = {grade_id(cell) for cell in book.cells if grade_id(cell) and not is_solution(cell)}  # differ by seeds
    own: dict[str, dict[str, str]] = {}
    for one in find_submissions(folder, [assignment]):
        with suppress(ValueError):  # if a notebook cannot be read, grading reports it
            cells = [
                cell
                for cell in (read_submission(one.path) if one.path else [])
                if cell.is_code and cell.name not in locked
            ]
            text = "\n".join(cell.source for cell in cells)
            own[one.student] = {key: line for key, line in normalized_lines(text).items() if key not in released_lines}
    often = Counter(key for lines in own.values() for key in lines)
    common = {key for key, count in often.items() if count > max(2, COMMON_SHARE * len(own))}
    shared_pairs = [
        Pair(first, second, tuple(sorted(own[first][key] for key in shared)), min(len(own[first]), len(own[second])))
        for first, second in combinations(sorted(own), 2)
        if (shared := (own[first].keys() & own[second].keys()) - common)
    ]
    solution = "\n".join(cell.source for cell in book.cells if is_solution(cell))
    release = {"this project's solution": (normalized_lines(solution), COPIED_SHARE)}
    rungs = sorted(RUNG.parent.glob("r[0-9]*.py")) if assignment.name.startswith("9") else []
    release |= {f"rung {path.stem}": (normalized_lines(path.read_text(encoding="utf-8")), 0.0) for path in rungs}
    for student, (name, (lines, least)) in product(sorted(own), release.items()):
        theirs = lines.keys() - released_lines
        shared = (own[student].keys() & theirs) - (common if not least else set())
        if shared and len(shared) >= least * len(theirs):
            line = tuple(sorted(own[student][key] for key in shared))
            shared_pairs.append(Pair(student, name, line, min(len(own[student]), len(theirs))))
    return sorted(shared_pairs, key=lambda pair: -len(pair.shared) / pair.of)


def normalized_lines(text: str) -> dict[str, str]:
    """Return {line with numbers instead of names: line as written} for all lines that are long enough to compare."""
    lines = {}
    for line in text.splitlines()[:MAX_LINES]:
        line = line.strip()[:500]
        if len("".join(line.split())) > SHORT_LINE and not line.startswith("#"):
            lines[number_names(line)] = line
    return lines


def number_names(line: str) -> str:
    """Replace the first name in a line with $0, the second with $1, and so on.

    Keywords and names after a dot remain unchanged.
    """
    words, names, after_dot = [], {}, False
    with suppress(tokenize.TokenError, IndentationError, SyntaxError):
        for word in tokenize.generate_tokens(io.StringIO(line).readline):
            is_name = word.type == tokenize.NAME and not after_dot and not keyword.iskeyword(word.string)
            if word.type not in IGNORED_TOKENS:
                words.append(f"${names.setdefault(word.string, len(names))}" if is_name else word.string)
            after_dot = word.string == "."
    return " ".join(words)
