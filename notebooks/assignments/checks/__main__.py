"""Run one notebook's cells and checks, and add up its points: python -m checks 1_online_softmax.ipynb"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from zlib import crc32

from .cells import run_source
from .report import words_of

SLOW = 20  # seconds of a step that a slower machine may not have


def main(argv: list[str]) -> int:
    """0 for all points, 1 for fewer, 2 for a call that makes no sense."""
    if len(argv) != 1 or not argv[0].endswith(".ipynb"):
        print("give the name of one notebook, such as 1_online_softmax.ipynb", file=sys.stderr)
        return 2
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # Windows may write to a file in an alphabet without "−"
    try:
        notebook = json.loads(Path(argv[0]).read_text(encoding="utf-8-sig"))
        if not sys.platform.startswith("linux") and "import triton" in json.dumps(notebook):
            print("note: this assignment needs Linux, because Triton has no packages for other systems")
        points, full = played(notebook, sys.stdout)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{argv[0]} is not a notebook that can be read ({type(error).__name__}: {error})"[:300], file=sys.stderr)
        return 2
    score = sum(points.values())
    print(f"{score:g} of {full:g} points in the checks that you can see. Grading runs more checks of the same kind.")
    return 0 if score >= full else 1


def played(notebook: dict, out) -> tuple[dict[str, float], float]:
    """{step: points} of a notebook's test cells, and the points of all steps that it was handed out with."""
    ours = notebook.get("metadata", {}).get("fa2_lab", {})
    promised, locked = ours.get("steps", {}), ours.get("locked", {})
    space, points, found = {"__name__": "__main__"}, {}, {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        marks, began = cell["metadata"].get("nbgrader") or {}, time.monotonic()
        name = marks.get("grade_id") or f"cell {number}"
        source = "".join(cell["source"])
        if name in locked and crc32(source.strip().encode()) != locked[name]:
            print(f"note: the cell {name} was changed, but grading runs it as it was handed out", file=out)
        paper = out if marks.get("grade") else io.StringIO()
        try:
            with contextlib.redirect_stdout(paper):
                value = value_of(source, name, bool(marks.get("grade")), space)
        except Exception as error:
            print(f"note: {name}: {', '.join(filter(None, words_of(error)))}"[:500], file=out)
            value = 0.0
        if marks.get("grade"):
            points[name], found[name] = float(value), float(marks.get("points", 0))
        if time.monotonic() - began > SLOW:
            print(f"note: {name} took {time.monotonic() - began:.0f} s, and grading allows 60 s", file=out)
    if not promised and not found:
        print("note: the cells of this notebook have lost their names, so nothing is checked here", file=out)
    for name in set(promised) - set(points):
        print(f"note: the cell {name} was deleted, so its step gets no points", file=out)
    return points, sum((promised or found).values())


def value_of(source: str, name: str, is_test: bool, space: dict):
    """One cell; the last line of a test cell is its points."""
    body, _, points = source.rstrip().rpartition("\n") if is_test else (source, "", "0")
    run_source(body, name, space)
    return eval(points, space)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
