"""Which known mistake is this? `examine(function)` asks an attention function and names what is wrong with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from fa2_lab.examine.cases import all_cases
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.match import Answer, Finding, State, conventions, explain
from fa2_lab.examine.memory import checks, guarded
from fa2_lab.examine.subject import LAYOUTS, Refused, Subject

__all__ = ["CATALOGUE", "Answer", "Finding", "Refused", "Report", "examine", "explain"]
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
    """Examine softmax(τ q kᵀ) v as a function computes it; Refused if it cannot be asked.

    layout   bhnd, bnhd, hnd, nd or thd; found out if it is not given, as are library and dtype
    given    arguments that are passed in every call
    """
    begun = time.monotonic()
    subject = Subject(function, given, device)
    subject.settle(layout, library, dtype)
    subject.settle_window()
    answers, found, refused = [], [], {}
    for case in all_cases(subject.d, subject.multiple, quick):
        if lack := subject.can(case):
            refused.setdefault(lack, "")
        elif time.monotonic() - begun > SECONDS[quick] * 0.6:
            refused["the last cases"] = "there was no time left"
        else:
            try:
                answer, past = guarded(subject, case)
                answers.append(answer)
                found += [] if any(x.name == "reads-past-end" for x in found) else past
            except Refused as refusal:
                refused.setdefault(f"{case.group} ({case})", str(refusal))
    named = explain(answers, subject.tiles())
    other = other_mask(named, answers)
    drop = {other, "empty-mask"} if other == "mask" else {other}
    named = [x for x in named if not x.case or x.case.group not in drop]
    answers = [x for x in answers if x.case.group not in drop]
    state = next((x.state for x in reversed(named) if x.mistake.part in ("reads", "O")), State())
    if not any(x.is_wrong and x.case and x.case.group == "plain" for x in named):
        found += list(checks(subject, answers, conventions(state)))
    known = dict.fromkeys(x.name for x in named + found)
    findings = [next(x for x in named + found if x.name == name) for name in known]
    how = f"{subject.library}, {subject.dtype}, {LAYOUTS[subject.layout]}"
    parts = [x for x in ("O", "L", "dQ", "dK", "dV") if any(x in answer.outputs for answer in answers)]
    return Report(subject.name, how, findings, len(answers), parts, refused, time.monotonic() - begun, subject)


def other_mask(named: list[Finding], answers: list[Answer]) -> str:
    """A mask may be boolean or additive: the group, "mask" or "bias", that says less about a function that takes one."""
    known = {x.case.group: x.name for x in named if x.case and x.case.group in ("mask", "bias")}
    asked = {x.case.group for x in answers} & {"mask", "bias"}
    worth = {group: (group in known) + (known.get(group) == "unknown") for group in asked}
    return max(worth, key=lambda group: worth[group]) if len(worth) == 2 and len(set(worth.values())) == 2 else ""


class Callable_(ModuleType):
    """This module, which is its own function: fa2_lab.examine(f)."""

    def __call__(self, function: Callable, **options: Any) -> Report:
        return examine(function, **options)


sys.modules[__name__].__class__ = Callable_
