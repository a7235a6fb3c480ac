"""Check a function that readers write in a chapter, and print the result.

As long as the function is empty, the result is an invitation to write it. Afterwards, the result is "right", or "wrong"
with the case that reveals the mistake.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from fa2_lab.examine.cases import AttentionCase
from fa2_lab.examine.match import RIGHT, Answer, known
from fa2_studio.book.verdicts import close


class Case(NamedTuple):
    words: str  # a description of the case and a question that leads to the mistake
    arguments: tuple
    expected: Any  # an array, or a tuple of arrays
    # The case to pass to fa2_lab.examine, if the function computes a whole pass for one head.
    asked: AttentionCase | None = None


def check(function: Callable, *cases: Case, tolerance: float = 1e-9, names: Sequence[str] = ()) -> None:
    """Call a reader's function on the cases until one fails, and print the result.

    If the function returns several arrays, `names` holds their names.
    """
    says, answers = f"right: {function.__name__} passes all {len(cases)} cases", []
    for case in cases:
        try:
            with np.errstate(all="ignore"):
                got = function(*deepcopy(case.arguments))
            if got is None or got is ...:
                says = invitation(function.__name__)
                break
            wrong = difference(got, case.expected, tolerance, names)
            answers += as_answers(case, got, names, tolerance)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        if wrong:
            says = "\n  ".join([f"wrong: {case.words}", wrong, *recognised(answers, names)])
            break
    print(says)


def as_answers(case: Case, got: Any, names: Sequence[str], tolerance: float) -> list[Answer]:
    """Return the function's results as fa2_lab.examine expects them, or [] if their shapes are wrong."""
    shapes = [np.shape(x) for x in got] if isinstance(got, tuple | list) else []
    if case.asked is None or shapes != [x.shape for x in case.expected]:
        return []
    outputs = {name: np.asarray(x)[None, None] for name, x in zip(names, got, strict=True)}
    return [Answer(case.asked, outputs, eps=max(1.2e-7, tolerance / 4))]


def recognised(answers: list[Answer], names: Sequence[str]) -> list[str]:
    """Return the description of the first known mistake that explains a wrong output in all answers.

    If there is none, the list is empty.
    """
    wrong = [name for name in names if answers and not answers[-1].fits(RIGHT, (name,))]
    found = [x for name in wrong for x in known(answers, name)]
    return [f"{x.description} (Read {x.reference}.)" for x in found[:1]]


def invitation(name: str) -> str:
    """Return the message printed while a function is still empty."""
    return f"your turn: write {name} in the cell above, and run this cell again"


def difference(got: Any, expected: Any, tolerance: float, names: Sequence[str] = ()) -> str:
    """Describe where a result differs most from the expected one, or return "" if it is close everywhere."""
    if isinstance(expected, tuple):
        number = len(got) if isinstance(got, tuple | list) else 1
        if number != len(expected):
            return f"got {number} result(s), expected {len(expected)}"
        names = names or [f"result {n}" for n in range(1, number + 1)]
        parts = [difference(x, y, tolerance) for x, y in zip(got, expected, strict=True)]
        return next((f"{name}: {part}" for name, part in zip(names, parts, strict=True) if part), "")
    if isinstance(expected, bool | np.bool_) and np.ndim(got) == 0:
        return "" if bool(got) == expected else f"got {bool(got)}, expected {expected}"
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if got.shape != expected.shape:
        return f"got shape {got.shape}, expected {expected.shape}"
    if close(got, expected, tolerance):
        return ""
    with np.errstate(invalid="ignore"):
        apart = np.where(got == expected, 0, np.abs(got - expected))  # argmax stops at the first NaN
    place = np.unravel_index(np.argmax(apart), apart.shape)
    at = f" at {[int(x) for x in place]}" if place else ""
    return f"got {got[place]:.6g}{at}, expected {expected[place]:.6g}"
