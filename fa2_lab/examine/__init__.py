"""Test an attention function for known mistakes: `examine(function)` names what is wrong with it.

An examination has six steps:

1. arguments.py reads the function's signature, and detect.py finds out how to call the function. It chooses a library,
   a dtype and a layout (layouts.py), and the forms in which the function expects its arguments.
2. subject.py calls the function on the cases of cases.py, with the guards of guards.py around its memory and its time.
3. match.py compares the answers with those of attention.py, which computes correct attention, or attention with any of
   the mistakes in catalogue.md. A mistake is found if it gives the function's numbers in every case of a group.
4. If no known mistake gives these numbers, weights.py reads the weight of each key out of O, and gradients.py reads P
   and dS out of the gradients. Both describe the error in a sentence, with the formulas of formulas.py.
5. checks.py calls the function again, to test what numbers alone cannot show: reads and writes past the end of memory,
   strides, repeated calls, rows that see no key, dropout, and sums in 16 bits.
6. program.py searches for the smallest input that shows a mistake, and writes a program with it, which the command
   `fa2-lab examine` prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import inf
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fa2_lab.examine.arguments import NotExamined
from fa2_lab.examine.cases import BITS, all_cases
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.checks import checks, coarse_sums, guarded, repeated
from fa2_lab.examine.detect import detect_call
from fa2_lab.examine.gradients import read_backward, read_L
from fa2_lab.examine.guards import Endless
from fa2_lab.examine.layouts import LAYOUTS, OF_OUTPUT
from fa2_lab.examine.match import (
    GRADIENTS,
    SILENT,
    Answer,
    Finding,
    Variant,
    conventions,
    explain,
    is_cross,
    without_silent,
)
from fa2_lab.examine.subject import LIBRARIES, NO_TIME, Subject
from fa2_lab.examine.weights import describe_overhang, read_out, telling

__all__ = ["CATALOGUE", "Answer", "Finding", "NotExamined", "Report", "examine", "explain"]
UNASKED, UNCHECKED = "some problems", "some checks"
SECONDS = {False: 60.0, True: 10.0}  # {quick: seconds for all calls, except those that find out how to call}


class Report(NamedTuple):
    """The result of examining a function: the findings, how it was called, and which cases could not be run."""

    name: str
    how: str  # library, dtype and layout of the calls
    findings: list[Finding]
    asked: int
    parts: list[str]  # outputs returned by the function, out of O, L, dQ, dK and dV
    refused: dict[str, str]  # {case or output not tested: reason, or "" if the function does not support it}
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
    """Search for known mistakes in a function that should compute softmax(τ q kᵀ) v.

    examine() calls the function on more than a hundred small problems, and compares its results with those that each
    known mistake would give. Arguments other than q, k and v are recognized by their names. If the function cannot be
    tested, examine() raises NotExamined and names the reason.

    The function is called in this process, and so it may use a GPU that is already in use. If it ends the process, the
    examination ends as well. The command `fa2-lab examine` calls it in a child process, and reports the last problem.

    layout   The layout of q, k and v: bhnd (batch, heads, N, d), bnhd, nbhd, hnd, nhd, bnd, nd, flat (batch, N,
             heads · d), or thd for packed sequences. For one query with a cache of keys and of values, it is bhd if the
             cache is (batch, N, heads, d), "bhd,bhnd" if it is (batch, heads, N, d), or "hd,hnd". If you do not pass a
             layout, it is detected.
    library  The array library of the function: numpy, torch or jax. If you do not pass a library, it is detected.
    dtype    The dtype of the inputs, for example float16. By default, it is the first dtype that the function accepts.
    device   The device of the inputs, for example cuda. By default, it is the CPU, or a GPU if the function rejects
             tensors on the CPU.
    quick    If True, the long problems are skipped, and the function is called for ten seconds at most, instead of a
             minute. The attribute `refused` lists what was then not tested. The limit includes neither the first calls,
             which find out how to call the function, nor the comparison of wrong results with the known mistakes. The
             examination of a slow or wrong function therefore takes longer.
    given    A dictionary {name: value} of extra arguments that are passed in every call.

    The report has the attributes `is_right` and `findings`. A finding is a mistake, a convention or a remark. Each
    finding has a name, a description in one sentence, the position and the size of the error, and a reference for
    further reading.
    """
    try:
        return diagnose(Subject(function, given, device), layout, library, dtype, quick=quick)
    except Endless as endless:
        raise NotExamined(str(endless)) from endless


def diagnose(subject: Subject, layout: str, library: str, dtype: str, *, quick: bool) -> Report:
    """Examine a Subject, as examine() does with a function."""
    for name, got, known in (("layout", layout, LAYOUTS), ("library", library, LIBRARIES), ("dtype", dtype, BITS)):
        if got and got not in known:
            raise ValueError(f"{name}: got {got!r}; it takes {', '.join(known)}")
    begun = time.monotonic()
    detect_call(subject, layout, library, dtype)
    cases, detected = all_cases(subject.d, subject.multiple, quick), time.monotonic()
    answers, found, refused = call_on_all(subject, cases, detected + 0.6 * SECONDS[quick])
    if not any(x.case.group == "plain" for x in answers):
        raise NotExamined(next(filter(None, refused.values()), "it took no problem"))
    if subject.no_gradients and not any("dQ" in x.outputs for x in answers):
        refused["its gradients"] = subject.no_gradients
    unsteady = list(repeated(subject, answers[0]))
    subject.until = detected + SECONDS[quick]
    is_reliable = not (unsteady or found or "writes-past-end" in subject.happened)
    named = find_mistakes(subject, answers, is_reliable=is_reliable)
    found += check_further(subject, answers, named + found, unsteady)
    if time.monotonic() > subject.until:
        refused[UNCHECKED] = NO_TIME
    subject.until = inf
    first = {(x.name, x.read_out): x for x in reversed(named + found)}  # the first finding of each name
    findings = [first[key] for key in dict.fromkeys((x.name, x.read_out) for x in named + found)]
    how = f"{subject.library}, {subject.dtype}, {LAYOUTS[subject.layout]}"
    how += f"; O {OF_OUTPUT[subject.layout_of_O]}" if subject.layout_of_O != subject.layout else ""
    how += "; True in its padding mask marks a key that takes part" * subject.arguments.padding_keeps
    how += "; its window of one number has no right side" * subject.arguments.window_is_left
    if subject.arguments.window_is_int and not any("window" in x.name for x in findings):
        how += "; its window of w keys does not count the row's own key, which is seen as well"
    parts = [x for x in ("O", "L", "dQ", "dK", "dV") if any(x in answer.outputs for answer in answers)]
    return Report(subject.name, how, findings, len(answers), parts, refused, time.monotonic() - begun, subject)


def find_mistakes(subject: Subject, answers: list[Answer], *, is_reliable: bool) -> list[Finding]:
    """Return the known mistakes and conventions that explain the answers, and descriptions of what they do not explain.

    If the answers are not reliable, for example because the same call gives different numbers, only known mistakes are
    returned.
    """
    begun = time.monotonic()
    named = explain(answers, subject.tiles())
    subject.until += time.monotonic() - begun
    if not is_reliable or any(x.name == "options-kept" for x in named):
        return [x for x in named if x.name not in ("unknown", "precision", "grouped-silent")]
    named = [y for x in named for y in describe_unknown(subject, x, named, answers)]
    if subject.takes("start"):
        named = [x._replace(name="rows-from-0") if x.name == "corner-top-left" else x for x in named]
    usual = {conventions(x.variant) for x in named} | {Variant()}
    right = [y.case for y in answers if any(subject.is_right(y, variant) for variant in usual)]
    if right and not (
        any(map(is_cross, right)) or subject.counts_keys()
    ):  # the function may be meant only for equal numbers of keys and queries
        says = "It accepts different numbers of keys and queries without an error. "
        for n, x in enumerate(named):
            of_group, variant = (y for y in answers if y.case.group == x.group), conventions(x.variant)
            wrong = [y for y in of_group if not y.fits(variant, y.outputs)]
            if x.is_wrong and wrong and all(is_cross(y.case) for y in wrong):
                named[n] = x._replace(name=SILENT["cross"], read_out=says + str(x))
    strange = [x.case.options.keys() for x in named if x.name == "weights" and x.case]
    return [x for x in named if x.read_out or not x.case or not any(y <= x.case.options.keys() for y in strange)]


def check_further(
    subject: Subject, answers: list[Answer], earlier: list[Finding], unsteady: list[Finding]
) -> list[Finding]:
    """Return `unsteady` and the findings of all checks that call the function again, and of what happened in the calls.

    `earlier` are the findings so far, and `unsteady` are those of repeated calls. If O is wrong or differs between
    calls, most of the checks are left out, because they compare O.
    """
    last = next((x.variant for x in reversed(earlier) if x.mistake.part in ("conventions", "O")), Variant())
    variant, found = conventions(last), list[Finding]()
    if not unsteady and all(x.fits(variant, ("O",)) for x in answers if x.case.group == "plain"):
        subject.eps = answers[0].eps
        found += checks(subject, answers, variant)
    found += unsteady + [Finding(name, "in one of the calls") for name in sorted(subject.happened)]
    if any(x.where.startswith(GRADIENTS) for x in earlier):
        found = [x for x in found if x.name != "gradient-empty"]
    if not any(x.is_wrong for x in earlier + found):
        takes_cross = any(x.case.group == "cross" and x.fits(variant, ("O",)) for x in answers)
        found += coarse_sums(subject, variant, takes_cross)
    ends = [x for x in answers if x.case.group == "lengths, causal" and x.fits(variant, ("O",))]
    if ends and not {"corner-of-length", "corner-top-left"} & {*variant.names}:
        found.append(Finding("corner-of-buffer", "", case=ends[0].case))
    return found


def describe_unknown(subject: Subject, finding: Finding, named: list[Finding], answers: list[Answer]) -> list[Finding]:
    """Return the findings of read_out_unknown(), or the finding unchanged if it fails, or if there is no time left."""
    try:
        return read_out_unknown(subject, finding, named, answers)
    except (NotExamined, ValueError):  # NumPy raises a ValueError if nothing is left to compare
        return [finding]


def read_out_unknown(subject: Subject, finding: Finding, named: list[Finding], answers: list[Answer]) -> list[Finding]:
    """Return the finding unchanged if it names a known mistake, and otherwise findings that describe the computation.

    The descriptions are read out of the function's outputs: the keys' weights from O, and P and dS from the gradients.
    """
    if finding.name not in ("unknown", *SILENT.values()):
        return [finding]
    output, variant = finding.where.split(":")[0], conventions(finding.variant)
    group = without_silent([x for x in answers if x.case.group == finding.group], named)
    if output == "O":
        over = describe_overhang(subject, group, variant)
        said = [over or read_out(subject, finding, telling(group, variant, ("O",)))]
        is_number = all(np.isfinite(x.outputs["O"]).all() for x in group) and np.isnan(subject.fill)
        is_wrong = finding.name in ("unknown", SILENT["grouped"], SILENT["cross"]) and (
            finding.name == "unknown" or is_number
        )
        name = "writes-past-rows" if over else "weights" if is_wrong else finding.name
    elif output == "L":
        name, said = "L-other", [read_L([x for x in group if "L" in x.outputs], variant, subject.tiles())]
    else:
        alike = [x for x in named if x.name == "unknown" and x.group == finding.group and x.where.startswith(GRADIENTS)]
        outputs = [x.where.split(":")[0] for x in alike]
        name, said = "gradients", []
        if finding is alike[0]:
            of_group = telling([x for x in group if "dQ" in x.outputs], variant, outputs)
            said = read_backward(subject, of_group, variant, outputs)
            if not said:
                return alike
    found = [finding._replace(read_out=x[0].upper() * (x[0] != "d") + x[x[0] != "d" :], name=name) for x in said if x]
    return found or [finding] * (output in "OL")


def call_on_all(subject: Subject, cases: list, until: float) -> tuple[list[Answer], list[Finding], dict[str, str]]:
    """Call the function on all cases, but start no call later than `until`, a time of time.monotonic().

    The long cases are last, and a slow function is called on one case of each group before the second of any group.
    Return the answers in the order of the cases, the findings made during the calls, and {case that could not be run:
    reason}.
    """
    answers: dict[int, Answer] = {}
    found: list[Finding] = []
    refused: dict[str, str] = {}
    in_order = sorted(cases, key=lambda case: case.is_long)
    groups = [case.group for case in in_order]
    turns = sorted(range(len(groups)), key=lambda n: (in_order[n].is_long, groups[:n].count(groups[n])))
    for n in turns:
        case = subject.fitted(in_order[n])
        if lack := subject.lacks(case):
            refused.setdefault(lack, "")
        elif answers and time.monotonic() > until:
            refused[UNASKED] = NO_TIME
        else:
            try:
                answers[n], past = guarded(subject, case)
            except NotExamined as refusal:
                refused.setdefault(f"{case.group} ({case})", str(refusal))
            else:
                found += past
    return [answers[n] for n in sorted(answers)], found, refused


class CallableModule(ModuleType):
    """The class of this module, which makes the module itself callable: fa2_lab.examine(function)."""

    def __call__(self, function: Callable, **options: Any) -> Report:
        return examine(function, **options)


sys.modules[__name__].__class__ = CallableModule
