"""What one mistake costs: `python tests/studio/course_costs.py` grades every slip of assignments 1 and 2 and writes the
table of TEACHING.md."""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import fa2_studio.course  # noqa: F401, I001 — finds the checks
from course_class import graded_at_once
from course_wrong import SLIPS

from fa2_studio.course import notebooks
from fa2_studio.course.notebooks import is_solution, source

PAGE = notebooks.FOLDER / "TEACHING.md"
TABLE = re.compile(r"(?<=\| points \|\n\| --- \| --- \| --- \|\n)(\|.*\n)+")


def slipped(number: str, pairs: dict):
    """An assignment's solution with a slip in it."""
    book = source(notebooks.named(number))
    for cell in filter(is_solution, book.cells):
        for right, wrong in pairs.items():
            cell.source = cell.source.replace(right, wrong)
    return book


def row(number: str, hint: str, graded) -> str:
    """One line of the table: the steps that lost points, and how many in all."""
    lost = {step.removeprefix("test_"): most - graded.got[step] for step, most in graded.most.items()}
    where = ", ".join(step for step, points in lost.items() if points)
    return f"| {number}: {where} | {hint.rstrip('.')} | {sum(lost.values()):.2f} |\n"


def rows(slips) -> list[str]:
    """A line for each slip, the dearest of an assignment first."""
    made = []
    for name in sorted({number for number, *_ in slips}):
        books = {hint: slipped(number, pairs) for number, pairs, hint in slips if number == name}
        with TemporaryDirectory() as folder:
            found = graded_at_once(Path(folder), books, "", name=name)
        hints = sorted(books, key=lambda hint, found=found: found[hint].score)
        made += [row(name, hint, found[hint]) for hint in hints]
    return made


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: "".join(rows(SLIPS)), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
