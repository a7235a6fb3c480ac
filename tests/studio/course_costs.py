"""What one mistake costs: `python tests/studio/course_costs.py [WORD …]` grades the slips of assignments 1 to 3,
or those whose line has one of the words, and renews their lines in the table of TEACHING.md."""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import fa2_studio.course  # noqa: F401, I001 — finds the checks
import numpy as np
from checks.cells import described
from course_wrong import SLIPS

from fa2_studio.course import judge, notebooks, worker
from fa2_studio.course.box import Limits
from fa2_studio.course.notebooks import is_solution, source

PAGE = notebooks.FOLDER / "TEACHING.md"
TABLE = re.compile(r"(?<=\| points \|\n\| --- \| --- \| --- \|\n)(\|.*\n)+")


class Here(worker.Worker):
    """What a box does, without one: these are our own slips, and what the checks learn of one serves the next."""

    def __init__(self):
        super().__init__(None, None)

    def ask(self, request: dict, seconds: float) -> dict:
        args = tuple(x.copy() if isinstance(x, np.ndarray) else x for x in request.get("args", ()))
        try:
            with redirect_stdout(io.StringIO()):
                return {"value": getattr(self, f"do_{request['do']}")(request | {"args": args})}
        except Exception as error:
            return {"error": list(described(error))}

    def close(self) -> None:
        """Nothing was started."""


def graded(name: str, book) -> judge.Graded:
    """What a notebook gets, judged in this process."""
    cells = [notebooks.as_cell(cell) for cell in book.cells]
    return judge.grade_notebook(source(notebooks.named(name)), cells, lambda _: Here(), Limits(10_000, 100_000))


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
    """A line for each slip."""
    return [row(number, hint, graded(number, slipped(number, pairs))) for number, pairs, hint in slips]


def in_order(lines: list[str]) -> str:
    """The table: one line for each slip, the newest, and the dearest of an assignment first."""
    newest = {(line[2], line.split(" | ")[1]): line for line in lines}
    kept = [newest[number, hint.rstrip(".")] for number, _, hint in SLIPS if (number, hint.rstrip(".")) in newest]
    return "".join(sorted(kept, key=lambda line: (line[2], -float(line.split(" | ")[2].strip(" |\n")))))


if __name__ == "__main__":
    for slip in [slip for slip in SLIPS if any(word in f"{slip[0]}: {slip[2]}" for word in sys.argv[1:] or [""])]:
        new, text = rows([slip]), PAGE.read_text(encoding="utf-8")
        old = TABLE.search(text)[0].splitlines(keepends=True)
        PAGE.write_text(text.replace("".join(old), in_order(old + new)), encoding="utf-8")
