"""A seed for each student, which gives every student different numbers, sizes and planted bugs of equal difficulty.

The seed replaces the 0 of `seed=0` in a notebook's tests, and some cells are generated from it. The grader puts the
student's seed into the original before it adds the student's answers. Hidden cases depend on the seed and the day.
"""

import hashlib
import hmac
import re
from copy import deepcopy
from functools import partial

from checks import predict

from fa2_studio.course import planted_bugs
from fa2_studio.course.notebooks import HIDDEN, PROJECT, grade_id, is_solution

RUNG = PROJECT / "fa2_lab" / "kernels" / "ladder" / "r03_row_blocks.py"


def rung_of_seed(seed: int = 0) -> str:
    """Return the text of rung 03, without its imports, as a cell. The text is the same for every seed."""
    text = RUNG.read_text(encoding="utf-8")
    return text[text.index("NEG_INF = ") :].rstrip()


WRITERS = {  # {name of a cell that depends on the seed: function that writes it}
    "question": predict.question,
    "hanging": partial(planted_bugs.broken_cell, "hang"),
    "racing": partial(planted_bugs.broken_cell, "race"),
    "ragged": partial(planted_bugs.broken_cell, "wrong"),
    "rung": rung_of_seed,
}


def seed_of(student: str, secret: str) -> int:
    """Return a student's seed, which starts at 1. `student` is the student's id in the roster.

    Without a secret, all students get seed 0, which leaves the notebook unchanged.
    """
    if not secret:
        return 0
    digest = hmac.new(secret.encode(), student.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()
    return 1 + int.from_bytes(digest[:4], "big") % (2**31 - 1)


def with_seed(notebook, seed: int):
    """Return a copy of the notebook for one seed. Cells that students write remain unchanged."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if grade_id(cell) and not is_solution(cell):
            cell.source = re.sub(r"\bseed=0\b", f"seed={seed}", cell.source)
            if grade_id(cell) in WRITERS:
                cell.source = WRITERS[grade_id(cell)](seed)
    return notebook


def with_day(notebook, seed: int, day: str):
    """Return a copy of the notebook whose hidden cases depend on the student's seed and on the day.

    Therefore, knowledge of the hidden cases from one grading does not help in a grading on a later day.
    """
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        visible, mark, hidden = cell.source.partition(HIDDEN[0])
        if mark and not is_solution(cell):
            drawn = partial(draw_case_seed, seed=seed, day=day)
            cell.source = visible + mark + re.sub(r"\bseed=([1-9]\d*)\b", drawn, hidden)
    return notebook


def draw_case_seed(match: re.Match, seed: int, day: str) -> str:
    """Return the text `seed=…` for a hidden case. The number depends on the student's seed, the day and the case."""
    digest = hashlib.sha256(f"{seed} {day} {match[1]}".encode()).digest()
    return f"seed={1 + int.from_bytes(digest[:4], 'big') % (2**31 - 1)}"
