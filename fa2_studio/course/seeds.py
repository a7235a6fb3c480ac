"""A seed for each student: other numbers, sizes and planted bugs, the same difficulty.

A seed enters a notebook where its tests say `seed=0`, and in the cells that are written for a seed. The grader puts
the same seed into the original before it takes a student's answers over. Hidden cases are drawn from it and the day.
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
    """Rung 03 as a cell, without what the first cell imports. It is the same for every seed."""
    text = RUNG.read_text(encoding="utf-8")
    return text[text.index("NEG_INF = ") :].rstrip()


WRITTEN = {  # cells that are written for a seed, by their names
    "question": predict.question,
    "hanging": partial(keys.program, "hang"),
    "racing": partial(keys.program, "race"),
    "ragged": partial(keys.program, "wrong"),
    "rung": rung,
}


def seed_of(student: str, secret: str) -> int:
    """The seed of a student, by their id in the roster, from 1 on.

    Without a secret everybody has 0, which is the notebook as it stands.
    """
    if not secret:
        return 0
    digest = hmac.new(secret.encode(), student.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()
    return 1 + int.from_bytes(digest[:4], "big") % (2**31 - 1)


def seeded(notebook, seed: int):
    """The notebook for one seed. What students write stays as it is."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if grade_id(cell) and not is_solution(cell):
            cell.source = re.sub(r"\bseed=0\b", f"seed={seed}", cell.source)
            if grade_id(cell) in WRITTEN:
                cell.source = WRITTEN[grade_id(cell)](seed)
    return notebook


def on_day(notebook, seed: int, day: str):
    """The notebook with hidden cases of one student and one day: what is learned from them serves no second hand-in."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        visible, mark, hidden = cell.source.partition(HIDDEN[0])
        if mark and not is_solution(cell):
            drawn = partial(drawn_for, seed=seed, day=day)
            cell.source = visible + mark + re.sub(r"\bseed=([1-9]\d*)\b", drawn, hidden)
    return notebook


def drawn_for(match: re.Match, seed: int, day: str) -> str:
    digest = hashlib.sha256(f"{seed} {day} {match[1]}".encode()).digest()
    return f"seed={1 + int.from_bytes(digest[:4], 'big') % (2**31 - 1)}"
