"""Which known mistake is this? `examine(function)` asks an attention function and names what is wrong with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from fa2_lab.examine.cases import all_cases
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.match import Answer, Finding, Variant, conventions, explain
from fa2_lab.examine.memory import checks, guarded, repeated
from fa2_lab.examine.subject import LAYOUTS, NotExamined, Subject

__all__ = ["CATALOGUE", "Answer", "Finding", "NotExamined", "Report", "examine", "explain"]
UNASKED = "some problems"
SECONDS = {False: 60.0, True: 10.0}


class Report(NamedTuple):
    """What was found out about a function."""

    name: str
    how: str  # the library, the dtype and the layout that it was asked in
    findings: list[Finding]
    asked: int
    parts: list[str]  # of what it gives: O, L, dQ, dK, dV
    refused: dict[str, str]  # {what was not asked, or raised: why}
    seconds: float
    subject: Subject

    @property
    def is_right(self) -> bool:
        return not any(finding.is_wrong for finding in self.findings)


def examine(
    function: Callable,
    *,
    layout: str = "",
    library: str = "",
    dtype: str = "",
    device: str = "",
    quick: bool = False,
    given: dict[str, Any] | None = None,
) -> Report:
    """Examine softmax(τ q kᵀ) v as a function computes it; NotExamined if it cannot be asked.

    layout   bhnd, bnhd, hnd, nd or thd; found out if it is not given, as are library and dtype
    given    arguments that are passed in every call
    """
    begun = time.monotonic()
    subject = Subject(function, given, device)
    subject.settle(layout, library, dtype)
    answers: list[Answer] = []
    found: list[Finding] = []
    refused: dict[str, str] = {}
    settled = time.monotonic()
    cases = sorted(all_cases(subject.d, subject.multiple, quick), key=lambda case: case.is_long)
    for case in map(subject.fitted, cases):
        if lack := subject.lacks(case):
            refused.setdefault(lack, "")
        elif answers and time.monotonic() - settled > SECONDS[quick] * 0.6:
            refused[UNASKED] = "there was no time left for them"
        else:
            try:
                answer, past = guarded(subject, case)
                answers.append(answer)
                found += past
            except NotExamined as refusal:
                refused.setdefault(f"{case.group} ({case})", str(refusal))
    unsteady = list(repeated(subject, answers[0])) if answers else []
    named = explain(answers, subject.tiles())
    drop = other_mask(named, answers)
    named = [x for x in named if x.group not in drop]
    answers = [x for x in answers if x.case.group not in drop]
    if unsteady or found:  # numbers that come from elsewhere are no mistake of their own
        named = [x for x in named if x.name not in ("unknown", "precision", "grouped-silent")]
    state = conventions(next((x.state for x in reversed(named) if x.mistake.part in ("reads", "O")), Variant()))
    plain = [x for x in answers if x.case.group == "plain"]
    if plain and not unsteady and all(x.fits(state, ("O",)) for x in plain):
        found += checks(subject, answers, state)
    happened = {"inputs-changed": subject.changed, "writes-past-end": subject.overrun}
    found += unsteady + [Finding(name, "in one of the calls") for name, it_did in happened.items() if it_did]
    if any(x.mistake.part == "gradients" for x in named):
        found = [x for x in found if x.name != "gradient-empty"]
    first = {x.name: x for x in reversed(named + found)}  # of each name the first finding
    findings = [first[name] for name in dict.fromkeys(x.name for x in named + found)]
    how = f"{subject.library}, {subject.dtype}, {LAYOUTS[subject.layout]}"
    parts = [x for x in ("O", "L", "dQ", "dK", "dV") if any(x in answer.outputs for answer in answers)]
    return Report(subject.name, how, findings, len(answers), parts, refused, time.monotonic() - begun, subject)


def other_mask(named: list[Finding], answers: list[Answer]) -> set[str]:
    """A mask is boolean or additive, and few functions take both: the groups of the kind that a function does not."""
    asked = {x.case.group for x in answers} & {"mask", "bias"}
    misread = {x.group for x in named if x.name in ("unknown", "mask-ignored")} & asked
    if len(asked) != 2 or len(misread) != 1:
        return set()
    return misread | ({"empty-mask"} if "mask" in misread else set())


class Callable_(ModuleType):
    """This module, which is its own function: fa2_lab.examine(f)."""

    def __call__(self, function: Callable, **options: Any) -> Report:
        return examine(function, **options)


sys.modules[__name__].__class__ = Callable_
