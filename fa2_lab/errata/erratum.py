"""The definition of an erratum: a claim, its correction, and a measurement that shows which of the two is correct."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Erratum:
    """One mistake in a source.

    `wrong()` computes what the source claims, and `right()` computes the correction. `error(result)` returns the error
    of either result.
    """

    id: str
    source: str
    claim: str  # what the source says, in our words
    why: str  # why the claim cannot be correct
    instead: str  # the correction, in our words
    wrong: Callable[[], Any]
    right: Callable[[], Any]
    error: Callable[[Any], float]  # the error of a result, measured against an independent formula or count
    tolerance: float = 1e-9
    unit: str = ""  # the unit of the error; if empty, the error is relative to the largest entry of the matrix
    met: str = ""  # GitHub threads that report the mistake: "project #number, #number; project #number"

    def check(self, result: object) -> bool:
        """Return whether the error of `result` is within the tolerance. The answer is False if the error is NaN."""
        return bool(self.error(result) <= self.tolerance)


class Verdict(NamedTuple):
    """The errors of an erratum's two versions, and whether the check told the versions apart."""

    wrong_error: float
    right_error: float
    told_apart: bool


def measure(erratum: Erratum) -> Verdict:
    """Run both versions of an erratum and return the verdict.

    The check tells the versions apart if it rejects the source's version and accepts the correction.
    """
    if not isinstance(erratum, Erratum):
        raise TypeError(f"erratum: got {erratum!r}; it takes an Erratum")
    with np.errstate(all="ignore"):  # a source's version may overflow or divide by zero
        wrong = erratum.wrong()
        wrong_error, refused = erratum.error(wrong), not erratum.check(wrong)
    right = erratum.right()
    return Verdict(float(wrong_error), float(erratum.error(right)), refused and erratum.check(right))
