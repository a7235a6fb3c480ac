"""Renew the table of TEACHING.md, which lists the points that each known mistake costs.

`python tests/studio/course_costs.py [WORD …]` grades the mistakes in course_wrong.py, or only those whose line contains
one of the words, and writes their lines.
"""

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import fa2_studio.course  # noqa: F401, I001 — finds the checks
import numpy as np
from checks.cells import described
from course_wrong import MISTAKES

from fa2_studio.course import grade_notebook, notebooks, worker
from fa2_studio.course.sandbox import Limits
from fa2_studio.course.notebooks import grade_id, is_solution, source_notebook

TEACHING_PAGE = notebooks.FOLDER / "TEACHING.md"
COST_TABLE = re.compile(r"(?<=\| points \|\n\| --- \| --- \| --- \|\n)(\|.*\n)+")


class LocalWorker(worker.Worker):
    """A worker in this process instead of in a sandbox, which our own mistakes do not need."""

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
        """Do nothing, because no process was started."""


def grade_in_process(name: str, book, original=None) -> grade_notebook.Graded:
    """Return the result of a notebook, graded in this process."""
    cells = [notebooks.parse_cell(cell) for cell in book.cells]
    original = original or source_notebook(notebooks.find_assignment(name))
    return grade_notebook.grade_notebook(original, cells, lambda _: LocalWorker(), Limits(10_000, 100_000))


def with_mistake(number: str, pairs: dict, name: str = ""):
    """Return an assignment's solution with a mistake in the named cell, or in all cells that have the right text."""
    book = source_notebook(notebooks.find_assignment(number))
    cells = [cell for cell in book.cells if is_solution(cell) and name in ("", grade_id(cell))]
    for right, wrong in pairs.items():
        if not any(right in cell.source for cell in cells):
            raise LookupError(f"{number} {name}: the solution does not have {right!r}")
        for cell in cells:
            cell.source = cell.source.replace(right, wrong)
    return book


def table_line(number: str, hint: str, graded) -> str:
    """Return one line of the table: the steps that lost points, the hint, and the points lost in total."""
    lost = {step.removeprefix("test_"): most - graded.got[step] for step, most in graded.most.items()}
    where = ", ".join(step for step, points in lost.items() if points)
    return f"| {number}: {where} | {hint.rstrip('.')} | {sum(lost.values()):.2f} |\n"


def table_lines(slips) -> list[str]:
    """Return a line per mistake. Raises LookupError if the feedback page does not contain the mistake's hint."""
    lines = []
    for number, cell, pairs, hint in slips:
        found = grade_in_process(number, with_mistake(number, pairs, cell))
        if hint not in re.sub(r"\s+", " ", " ".join(output for *_, output in found.page)):
            raise LookupError(f"{number} {cell}: nothing on the feedback page says {hint!r}")
        lines.append(table_line(number, hint, found))
    return lines


def sorted_table(lines: list[str]) -> str:
    """Return the table with the newest line of each mistake. Those that cost most in an assignment come first."""
    newest = {(line[2], line.split(" | ")[1]): line for line in lines}
    kept = [newest[number, hint.rstrip(".")] for number, _, _, hint in MISTAKES if (number, hint.rstrip(".")) in newest]
    return "".join(sorted(kept, key=lambda line: (line[2], -float(line.split(" | ")[2].strip(" |\n")))))


if __name__ == "__main__":
    import fa2_lab.kernels  # noqa: F401 — makes the interpreter three times as fast

    for slip in [x for x in MISTAKES if any(word in f"{x[0]}: {x[1]} {x[3]}" for word in sys.argv[1:] or [""])]:
        new, text = table_lines([slip]), TEACHING_PAGE.read_text(encoding="utf-8")
        old = COST_TABLE.search(text)[0].splitlines(keepends=True)
        TEACHING_PAGE.write_text(text.replace("".join(old), sorted_table(old + new)), encoding="utf-8")
