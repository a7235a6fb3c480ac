"""What numbers alone do not show: memory past the end, views, repeated calls, rows alone or without keys, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from fa2_lab.examine.cases import Question, case
from fa2_lab.examine.match import GRADIENTS, RIGHT, Answer, Finding, Variant
from fa2_lab.examine.subject import NotExamined, Subject, dtypes

OPEN = Variant(("causal-ignored", "mask-ignored"))
VIEWS = {
    "gapped": "heads that lie apart in memory",
    "turned": "the last axis has a stride above 1",
    "swapped": "the first two axes are exchanged in memory",
}


def checks(subject: Subject, answers: list[Answer], state: Variant) -> Iterator[Finding]:
    """All that is found out by asking again. `state` has the conventions that the function was found to follow."""
    plain = [x for x in answers if x.case.group == "plain"]
    if not plain:
        return
    base = next((x for x in plain if x.case.q.shape[0] > 1), plain[0])
    tests = [lambda: alone(subject, base), lambda: unwritten(subject, base), lambda: gradients(subject, base, state)]
    tests += [lambda: other_dtypes(subject, plain, state), lambda: rows_without_keys(answers, state)]
    if np.isnan(subject.fill):  # else it reads past the end, where anything may lie
        tests.insert(0, lambda: views(subject, base))
    if subject.takes("dropout"):
        tests.append(lambda: dropout(subject))
    for test in tests:
        with suppress(NotExamined):  # a function may refuse
            yield from test()


def differs(a: Answer, b: np.ndarray, name: str = "O") -> float:
    """By how much two answers differ, if by more than rounding; NaN counts as infinite."""
    both = ~np.isfinite(a.outputs[name]) & ~np.isfinite(b)
    with np.errstate(invalid="ignore"):
        most = float(np.nan_to_num(np.where(both, 0.0, np.abs(a.outputs[name] - b)), nan=np.inf).max())
    return most if most > a.bound(name) else 0.0


def repeated(subject: Subject, first: Answer) -> Iterator[Finding]:
    """The first call of all, three times more."""
    again = [subject.ask(first.case).outputs["O"] for _ in range(3)]
    off = max(float(np.nan_to_num(np.abs(x - again[0])).max()) for x in again)
    if off or any((np.isnan(x) != np.isnan(again[0])).any() for x in again):
        yield Finding("not-deterministic", "three calls in a row", off, first.case)
    elif off := differs(first, again[0]):
        yield Finding("state-kept", "the first call, repeated after all others", off, first.case)


def views(subject: Subject, base: Answer) -> Iterator[Finding]:
    """Inputs that are not contiguous, or whose rows are followed by NaN."""
    for place, where in VIEWS.items():
        with suppress(NotExamined):
            if off := differs(base, subject.ask(base.case, place, fill=0.0).outputs["O"]):
                yield Finding("strides-ignored", where, off, base.case)
                return
    if off := differs(base, subject.ask(base.case, "gapped", fill=np.nan).outputs["O"]):
        yield Finding("reads-past-end", "NaN after the last row of each head", off, base.case)
    if subject.layout not in ("nd", "thd"):
        q, k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (base.case.q, base.case.k, base.case.v))
        want = subject.ask(replace(base.case, q=q, k=k, v=v, gradients=False))
        if off := differs(want, subject.ask(want.case, "expanded", fill=0.0).outputs["O"]):
            yield Finding("expanded-ignored", "the first axis has stride 0", off, want.case)


def alone(subject: Subject, base: Answer) -> Iterator[Finding]:
    """The last batch entry without the others."""
    answer = subject.ask(base.case.entry(slice(-1, None)))
    if off := differs(answer, base.outputs["O"][-1:]):
        yield Finding("batch-dependent", "the last batch entry", off, base.case)


def unwritten(subject: Subject, base: Answer) -> Iterator[Finding]:
    """With torch, memory that `empty` hands out is full of NaN for one call."""
    if subject.library != "torch":
        return
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        answer = subject.ask(base.case)
    finally:
        torch.use_deterministic_algorithms(mode=before[0], warn_only=before[1])
    for name in answer.outputs.keys() & base.outputs.keys():
        if off := differs(base, answer.outputs[name], name):
            yield Finding("unwritten", f"{name}, where torch.empty is full of NaN", off, base.case)
            return


def gradients(subject: Subject, base: Answer, state: Variant) -> Iterator[Finding]:
    """That every input gets one, and that dO may be an expanded view."""
    lacks = [x for x in GRADIENTS if x not in base.outputs]
    if 0 < len(lacks) < 3:
        yield Finding("gradient-missing", ", ".join(lacks), case=base.case)
    if not lacks and base.fits(state, GRADIENTS):
        ones = replace(base.case, dO=np.ones_like(base.case.dO))
        if subject.ask(ones).fits(state, GRADIENTS) and not subject.ask(ones, expanded=True).fits(state, GRADIENTS):
            yield Finding("dO-strides", "dO with strides 0", case=ones)


def other_dtypes(subject: Subject, plain: list[Answer], state: Variant) -> Iterator[Finding]:
    """The dtypes of torch beside the one that was examined, on plain attention."""
    settled = subject.dtype
    for dtype in set(dtypes(subject.library)) - {settled} if subject.library == "torch" else ():
        subject.dtype = dtype
        with suppress(NotExamined):
            for answer in [subject.ask(x.case, gradients=False) for x in plain[:3]]:
                if off := differs(answer, answer.variant(state, "O")):
                    yield Finding("precision", f"{dtype}; rounding allows {answer.bound('O'):.1e}", off, answer.case)
                    break
    subject.dtype = settled


def rows_without_keys(answers: list[Answer], state: Variant) -> Iterator[Finding]:
    """O, L and the gradients of rows that see no key."""
    for answer in [x for x in answers if x.case.group.startswith("empty") and x.fits(state, ("O",))]:
        rows, case, found = answer.empty(state), answer.case, answer.outputs
        if not rows.any():
            continue
        got, bound, where = found["O"][rows], answer.bound("O"), f"{int(rows.sum())} rows"
        mean = np.broadcast_to(case.v.mean(axis=2, keepdims=True), found["O"].shape)[rows]
        if np.isnan(got).any():
            yield Finding("empty-nan", where, case=case)
        elif np.abs(got - mean).max() < bound:
            yield Finding("empty-mean", where, case=case)
        elif np.abs(got - answer.variant(OPEN, "O")[rows]).max() < 0.01:
            yield Finding("empty-unmasked", where, case=case)
        elif np.abs(got).max() > bound:
            yield Finding("empty-other", where, float(np.abs(got).max()), case)
        elif "L" in found and not np.isneginf(found["L"][rows]).all():
            yield Finding("L-empty", f"it is {found['L'][rows].flat[0]:g}", case=case)
        elif "dQ" in found and not (
            answer.fits(state, GRADIENTS) and np.abs(found["dQ"][rows]).max() < answer.bound("dQ")
        ):
            yield Finding("gradient-empty", "dQ, dK or dV", case=case)


def dropout(subject: Subject) -> Iterator[Finding]:
    """Its factors Z, read off from equal weights and V = 1 in one feature for each key: O = P ∘ Z."""
    n, d, p = max(subject.d, subject.multiple), subject.d, 0.25
    zero = case("dropout", 512 // subject.multiple * subject.multiple, n, d=d)
    options = dict(dropout=p, seed=1) if subject.takes("seed") else dict(dropout=p)
    asked = replace(zero, q=0 * zero.q, v=np.broadcast_to(np.eye(n, d), zero.v.shape), options=options)
    Z = subject.ask(asked).outputs["O"] * n
    kept, value = float((Z > 1e-3).mean()) * n / d, float(np.median(Z[Z > 1e-3])) if Z.any() else 0.0
    is_shared = np.array_equal(Z[:, 0] > 0, Z[:, 1] > 0) or (Z[..., :1, :] == Z).all()
    verdicts = {
        "dropout-ignored": kept > 0.999,
        "dropout-inverted": abs(kept - p) < 0.05,
        "dropout-normalised": n == d and np.abs(Z.sum(axis=-1) - n).max() < 0.01 * n,
        "dropout-factor": abs(value - 1) < 0.01,
        "dropout-shared": is_shared,
    }
    for name in [name for name, holds in verdicts.items() if holds][:1]:
        yield Finding(name, f"p = {p}: {kept:.0%} kept, factor {value:.3g}", case=asked)


def guarded(subject: Subject, case: Question) -> tuple[Answer, list[Finding]]:
    """A case between NaN; where that reaches O, the same between zeros, as all that follow."""
    answer = subject.ask(case)
    O, want = answer.outputs["O"], answer.variant(RIGHT, "O")
    if np.isnan(subject.fill) and case.group in ("plain", "causal", "width") and np.isnan(O[np.isfinite(want)]).any():
        other = subject.ask(case, fill=0.0)
        if np.isnan(other.outputs["O"]).sum() < np.isnan(O).sum():
            subject.fill = 0.0
            return other, [Finding("reads-past-end", "NaN before and after the inputs", case=case)]
    return answer, []
