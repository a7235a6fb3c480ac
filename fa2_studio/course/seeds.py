"""A seed for each student, so that each gets other numbers, sizes and planted bugs of the same difficulty.

A seed replaces the 0 of `seed=0` in a notebook's tests, and some cells are written for a seed. The grader puts the
student's seed into the original before it adds the student's answers. Hidden cases depend on the seed and the day.
"""

import hashlib
import hmac
import re
from copy import deepcopy
from functools import partial

from checks import predict

from fa2_studio.course import keys
from fa2_studio.course.notebooks import HIDDEN, PROJECT, grade_id, is_solution

RUNG = PROJECT / "fa2_lab" / "kernels" / "ladder" / "r03_row_blocks.py"


def rung(seed: int = 0) -> str:
    """Return rung 03 as the text of a cell, without its imports. It is the same for every seed."""
    text = RUNG.read_text(encoding="utf-8")
    return text[text.index("NEG_INF = ") :].rstrip()


WRITTEN = {  # cells that are written for a seed, by their names
    "question": predict.question,
    "hanging": partial(keys.broken_cell, "hang"),
    "racing": partial(keys.broken_cell, "race"),
    "ragged": partial(keys.broken_cell, "wrong"),
    "rung": rung,
}


def seed_of(student: str, secret: str) -> int:
    """Return the seed of a student, who is given by their id in the roster. Seeds start at 1.

    Without a secret, all students have seed 0, which leaves the notebook as it is.
    """
    if not secret:
        return 0
    digest = hmac.new(secret.encode(), student.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()
    return 1 + int.from_bytes(digest[:4], "big") % (2**31 - 1)


def with_seed(notebook, seed: int):
    """Return a copy of the notebook for one seed. Cells that students write stay as they are."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if grade_id(cell) and not is_solution(cell):
            cell.source = re.sub(r"\bseed=0\b", f"seed={seed}", cell.source)
            if grade_id(cell) in WRITTEN:
                cell.source = WRITTEN[grade_id(cell)](seed)
    return notebook


def with_day(notebook, seed: int, day: str):
    """Return a copy of the notebook whose hidden cases depend on the student's seed and on the day.

    So what a student learns from the hidden cases of one grading does not help in another on a later day.
    """
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        visible, mark, hidden = cell.source.partition(HIDDEN[0])
        if mark and not is_solution(cell):
            drawn = partial(draw_case_seed, seed=seed, day=day)
            cell.source = visible + mark + re.sub(r"\bseed=([1-9]\d*)\b", drawn, hidden)
    return notebook


def draw_case_seed(match: re.Match, seed: int, day: str) -> str:
    """Return the text `seed=…` for a hidden case: a number computed from the student's seed, the day and the case."""
    digest = hashlib.sha256(f"{seed} {day} {match[1]}".encode()).digest()
    return f"seed={1 + int.from_bytes(digest[:4], 'big') % (2**31 - 1)}"
