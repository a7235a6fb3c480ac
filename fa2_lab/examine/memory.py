"""What numbers alone do not show: memory past the end, views, repeated calls, rows alone or without keys, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from fa2_lab.examine.cases import Question, case
from fa2_lab.examine.match import GRADIENTS, Answer, Finding, Variant
from fa2_lab.examine.subject import NotExamined, Subject, dtypes

OPEN = Variant(("causal-ignored", "mask-ignored"))


def checks(subject: Subject, answers: list[Answer], state: Variant) -> Iterator[Finding]:
    """All that is found out by asking again. `state` has the conventions that the function was found to follow."""
    plain = [x for x in answers if x.case.group == "plain"]
    base = next((x for x in plain if x.case.q.shape[0] > 1), plain[0])
    tests = [lambda: alone(subject, base), lambda: unwritten(subject, base), lambda: gradients(subject, base, state)]
    if np.isnan(subject.fill):  # else it reads past the end, where anything may lie
        tests.insert(0, lambda: views(subject, base))
    if subject.takes("dropout"):
        tests.append(lambda: dropout(subject))
    tests += [lambda: other_dtypes(subject, plain, state), lambda: rows_without_keys(answers, state)]
    for test in tests:
        with suppress(NotExamined):  # a function may refuse
            yield from test()


def differs(a: Answer, b: np.ndarray, name: str = "O") -> float:
    """By how much two answers differ, if by more than rounding; NaN counts as infinite."""
    with np.errstate(invalid="ignore"):
        off = np.where(np.isfinite(a.outputs[name]) | np.isfinite(b), np.abs(a.outputs[name] - b), 0.0)
    most = float(np.nan_to_num(off, nan=np.inf).max())
    return most if most > a.bound(name) else 0.0


def repeated(subject: Subject, first: Answer) -> Iterator[Finding]:
    """The first call of all, three times more."""
    base = first
    again = [subject.ask(base.case).outputs["O"] for _ in range(3)]
    if any(not np.array_equal(x, again[0], equal_nan=True) for x in again):
        off = np.nan_to_num(np.abs(np.array(again) - again[0]), nan=np.inf).max()
        yield Finding("not-deterministic", "three calls in a row", float(off), base.case)
    elif off := differs(first, subject.ask(first.case).outputs["O"]):
        yield Finding("state-kept", "the first call, repeated after all others", off, first.case)


def views(subject: Subject, base: Answer) -> Iterator[Finding]:
    """Inputs that are not contiguous, or whose rows are followed by NaN."""
    if off := moved(subject, base, "gapped", 0.0):
        yield Finding("strides-ignored", "heads that lie apart in memory", off, base.case)
    elif off := moved(subject, base, "gapped", np.nan):
        yield Finding("reads-past-end", "NaN after the last row of each head", off, base.case)
    for place, where in (
        ("turned", "the last axis has a stride above 1"),
        ("swapped", "the first two axes are exchanged"),
    ):
        if len(subject.shape_of(list(subject.pieces(base.case)))) > 2 and (off := moved(subject, base, place, 0.0)):
            yield Finding("strides-ignored", where, off, base.case)
            break
    c = base.case
    q, k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (c.q, c.k, c.v))
    same = replace(c, q=q, k=k, v=v, gradients=False)
    if subject.layout not in ("nd", "thd"):
        try:
            want = subject.ask(same)
            if off := differs(want, subject.ask(want.case, place="expanded", fill=0.0).outputs["O"]):
                yield Finding("expanded-ignored", "the first axis has stride 0", off, want.case)
        except NotExamined:
            pass


def moved(subject: Subject, base: Answer, place: str, fill: float) -> float:
    try:
        return differs(base, subject.ask(base.case, place, fill).outputs["O"])
    except NotExamined:  # a function may say that it wants contiguous inputs
        return 0.0


def alone(subject: Subject, base: Answer) -> Iterator[Finding]:
    """The last batch entry without the others."""
    c = base.case
    if c.q.shape[0] > 1:
        answer = subject.ask(c.entry(slice(-1, None)))
        if off := differs(answer, base.outputs["O"][-1:]):
            yield Finding("batch-dependent", "the last batch entry", off, c)


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
    for name in answer.outputs:
        if name in base.outputs and (off := differs(base, answer.outputs[name], name)):
            yield Finding("unwritten", f"{name}, where torch.empty is full of NaN", off, base.case)
            return


def gradients(subject: Subject, base: Answer, state: Variant) -> Iterator[Finding]:
    """That every input gets one, and that dO may be an expanded view."""
    has = [x for x in GRADIENTS if x in base.outputs]
    if has and len(has) < 3:
        yield Finding("gradient-missing", ", ".join(x for x in GRADIENTS if x not in has), case=base.case)
    if len(has) == 3 and base.fits(state, GRADIENTS):
        ones = replace(base.case, dO=np.ones_like(base.case.dO))
        answer = subject.ask(ones, expanded_dO=True)
        if not answer.fits(state, GRADIENTS) and subject.ask(ones).fits(state, GRADIENTS):
            yield Finding("dO-strides", "dO with strides 0", case=ones)


def other_dtypes(subject: Subject, plain: list[Answer], state: Variant) -> Iterator[Finding]:
    """The dtypes beside the one that was examined, on plain attention."""
    settled = subject.dtype
    for dtype in [x for x in dtypes(subject.library) if x != settled and subject.library == "torch"]:
        subject.dtype = dtype
        for answer in plain[:3]:
            try:
                answer = subject.ask(replace(answer.case, gradients=False))
            except NotExamined:
                break
            wrong = answer.wrong(state, "O")
            if wrong.any():
                off = np.abs(answer.outputs["O"] - answer.variant(state, "O")).max()
                yield Finding(
                    "precision",
                    f"{subject.dtype}, rounding alone allows {answer.bound('O'):.1e}",
                    float(off),
                    answer.case,
                )
                break
    subject.dtype = settled


def rows_without_keys(answers: list[Answer], state: Variant) -> Iterator[Finding]:
    """O, L and the gradients of rows that see no key."""
    for answer in [x for x in answers if x.case.group.startswith("empty")]:
        rows = answer.empty(state)
        if not rows.any() or not answer.fits(state, ("O",)):
            continue
        O, case = answer.outputs["O"], answer.case
        got = O[rows]
        mean = np.broadcast_to(case.v.mean(axis=2, keepdims=True), O.shape)[rows]
        if np.isnan(got).any():
            yield Finding("empty-nan", f"{int(rows.sum())} rows", case=case)
        elif np.abs(got - mean).max() < answer.bound("O"):
            yield Finding("empty-mean", f"{int(rows.sum())} rows", case=case)
        elif np.abs(got - answer.variant(OPEN, "O")[rows]).max() < 0.01:
            yield Finding("empty-unmasked", f"{int(rows.sum())} rows", case=case)
        elif np.abs(got).max() > answer.bound("O"):
            yield Finding("empty-other", f"{int(rows.sum())} rows", float(np.abs(got).max()), case)
        else:
            if "L" in answer.outputs and not np.isneginf(answer.outputs["L"][rows]).all():
                yield Finding("L-empty", f"it is {answer.outputs['L'][rows].flat[0]:g}", case=case)
            if "dQ" in answer.outputs and not (
                answer.fits(state, GRADIENTS) and np.abs(answer.outputs["dQ"][rows]).max() <= answer.bound("dQ")
            ):
                yield Finding("gradient-empty", "dQ, dK or dV", case=case)


def dropout(subject: Subject) -> Iterator[Finding]:
    """Its factors Z, read off from equal weights and V = 1 in one feature for each key: O = P ∘ Z."""
    N, d, p = 512 // subject.multiple * subject.multiple, subject.d, 0.25
    n = max(d, subject.multiple)
    zero = case("dropout", N, n, d=d)
    eye = np.broadcast_to(np.eye(n, d), zero.v.shape)
    asked = replace(
        zero,
        q=np.zeros_like(zero.q),
        v=eye,
        options=dict(dropout=p, seed=1) if subject.takes("seed") else dict(dropout=p),
    )
    try:
        Z = subject.ask(asked).outputs["O"] * n
    except NotExamined:
        return
    kept, value = float((Z > 1e-3).mean()) * n / min(n, d), float(np.median(Z[Z > 1e-3])) if (Z > 1e-3).any() else 0.0
    sums = Z.sum(axis=-1)
    found = ""
    if kept > 0.999:
        found = "dropout-ignored"
    elif abs(kept - p) < 0.05:
        found = "dropout-inverted"
    elif n == d and np.abs(sums - n).max() < 0.01 * n:
        found = "dropout-normalised"
    elif abs(value - 1) < 0.01:
        found = "dropout-factor"
    elif np.array_equal(Z[:, 0] > 0, Z[:, 1] > 0) or (Z[..., :1, :] == Z).all():
        found = "dropout-shared"
    if found:
        yield Finding(found, f"p = {p}: {kept:.0%} kept, factor {value:.3g}", case=asked)


def guarded(subject: Subject, case: Question) -> tuple[Answer, list[Finding]]:
    """A case between NaN; where that reaches O, the same between zeros, as all that follow."""
    answer = subject.ask(case)
    O, want = answer.outputs["O"], answer.variant(Variant(), "O")
    if np.isnan(subject.fill) and case.group in ("plain", "causal", "width") and np.isnan(O[np.isfinite(want)]).any():
        other = subject.ask(case, fill=0.0)
        if np.isnan(other.outputs["O"]).sum() < np.isnan(O).sum():
            subject.fill = 0.0
            return other, [Finding("reads-past-end", "NaN before and after the inputs", case=case)]
    return answer, []
