"""The definition of an erratum: a claim, the right version, and a measurement that tells them apart."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Erratum:
    """A mistake in a source. `wrong()` computes what is printed, `right()` what should be. `error` measures either."""

    id: str
    source: str
    claim: str  # what the source says, in our words
    why: str  # why it cannot be
    instead: str  # what is right
    wrong: Callable[[], Any]
    right: Callable[[], Any]
    error: Callable[[Any], float]  # distance from the truth: another formula, central differences, a count
    tolerance: float = 1e-9
    unit: str = ""  # of the distance; without one it is a matrix's largest error, relative to its largest entry
    met: str = ""  # where people met it: "project #number, #number; project #number", threads on GitHub

    def check(self, result: object) -> bool:
        """Return whether the result is close enough to the truth. NaN never is."""
        return bool(self.error(result) <= self.tolerance)


class Verdict(NamedTuple):
    """The outcome of running both versions of an erratum."""

    wrong_error: float
    right_error: float
    told_apart: bool


def judge(erratum: Erratum) -> Verdict:
    """Run both versions. The check must reject the wrong one and accept the right one."""
    if not isinstance(erratum, Erratum):
        raise TypeError(f"erratum: got {erratum!r}; it takes an Erratum")
    with np.errstate(all="ignore"):  # wrong versions may overflow or divide by zero
        wrong = erratum.wrong()
        wrong_error, refused = erratum.error(wrong), not erratum.check(wrong)
    right = erratum.right()
    return Verdict(float(wrong_error), float(erratum.error(right)), refused and erratum.check(right))
