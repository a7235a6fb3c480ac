"""Assignment 1, online softmax: update, merge, finalize, and a test of merge that the student writes."""

from __future__ import annotations

from functools import partial
from random import SystemRandom

import numpy as np

from fa2_lab.reference.online_softmax import SoftmaxState

from . import slips
from .guard import Stopped, call
from .report import Failed, Report, as_numbers, equal, in_order, parts, step, words_of

RELATIVE_TO_THE_OLD = "The old l and o are relative to the old maximum. What makes them relative to the new one?"


def state_of(s: np.ndarray, v: np.ndarray) -> tuple:
    """The true (m, l, o) of some rows after these keys."""
    state = SoftmaxState.empty(len(s), v.shape[1]).update(s, v)
    return state.m, state.l, state.o


def reset(rows: int, d: int) -> tuple:
    """The state before the first key."""
    return np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, d))


def keys(rows: int, n: int, d: int, seed: int, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores (rows, n) and values (n, d)."""
    draw = np.random.default_rng(seed).standard_normal
    return size * draw((rows, n)), draw((n, d))


def in_shape(state, rows: int, d: int) -> tuple:
    """(m, l, o) in the shapes they must have; a slip of theirs would grow with every key and eat the memory."""
    hint = "m and l have one number per row, which is the shape of np.sum(x, axis=1) without keepdims."
    shapes = ("m", (rows,)), ("l", (rows,)), ("o", (rows, d))
    three = zip(shapes, parts("(m, l, o)", state, 3), strict=True)
    return tuple(as_numbers(name, x, shape, hint) for (name, shape), x in three)


def same_state(got, want, known=dict) -> None:
    """(m, l, o) against the true one, name by name."""
    in_order("(m, l, o)", parts("(m, l, o)", got, 3), want)
    for name, a, b in zip("mlo", in_shape(got, *want[2].shape), want, strict=True):
        equal(name, a, b, slips=lambda name=name: known().get(name, {}))


def small(kind: str):
    """Problems of one key and one or two more, for the slips of a kind."""
    for scores in ([[0.0, 2.0]], [[2.0, 0.0]], [[0.0, 2.0, 1.0], [3.0, 1.0, 1.0]]):
        s, v = np.array(scores), np.array([[1.0], [3.0], [2.0]])[: len(scores[0])]
        a, b, whole = state_of(s[:, :1], v[:1]), state_of(s[:, 1:], v[1:]), state_of(s, v)
        more, state, end = (s[:, 1:], v[1:]), dict(zip("mlo", whole, strict=True)), SoftmaxState(*whole).finalize()
        sides = zip(("a[0]", "a[1]", "a[2]", "b[0]", "b[1]", "b[2]"), (*a, *b), strict=True)
        yield dict(
            update=(dict(zip("mlosv", (*a, *more), strict=True)), (a, *more, whole), state),
            merge=(dict(sides), (a, b, whole), state),
            finalize=(state, (whole,), dict(zip("oL", end, strict=True))),
        )[kind]


UPDATES, MERGES, ENDS = (partial(small, kind) for kind in ("update", "merge", "finalize"))


def takes(function, s: np.ndarray, v: np.ndarray, first: int = 4, is_own: bool = False) -> None:
    """A student's update of the true state after the first keys, or of the one that their own update returned."""
    true, want = state_of(s[:, :first], v[:first]) if first else reset(5, 3), state_of(s, v)
    state = in_shape(call(function, *reset(5, 3), s[:, :first], v[:first]), 5, 3) if is_own else true
    rest = s[:, first:], v[first:]
    same_state(
        call(function, *state, *rest), want, lambda: slips.with_problems(slips.of_update, UPDATES, true, *rest, want)
    )


def joins(function, a: tuple, b: tuple, want: tuple) -> None:
    """A student's merge of two states against the true one."""
    same_state(call(function, a, b), want, lambda: slips.with_problems(slips.of_merge, MERGES, a, b, want))


def ends(function, state: tuple, names: str) -> None:
    """A student's end of a state against the true one, or one of its two parts."""
    got, want = parts("(o, L)", call(function, *state), 2), SoftmaxState(*state).finalize()
    in_order("(o, L)", got, want)
    for name, mine, true in zip("oL", got, want, strict=True):
        if name in names:
            equal(name, mine, true, slips=lambda name=name: slips.with_problems(slips.of_finalize, ENDS, state)[name])


# The steps ------------------------------------------------------------------------------------------------------


@step
def update(report: Report, function, seed: int = 0) -> None:
    """One block of scores and values taken into a state."""
    s, v = keys(5, 12, 3, seed)
    s[1, 4:8] -= 9.0
    hint = "Start from m = −inf, l = 0 and o = 0, and follow Algorithm 1."
    with report.check("from the empty state: the first block", hint):
        takes(function, s[:, :4], v[:4], first=0)
    with report.check("a second block", RELATIVE_TO_THE_OLD):
        takes(function, s[:, :8], v[:8])
    with report.check("twelve keys, one at a time", RELATIVE_TO_THE_OLD):
        state = reset(5, 3)
        for j in range(12):
            state = in_shape(call(function, *state, s[:, j : j + 1], v[j : j + 1]), 5, 3)
        same_state(state, state_of(s, v))
    hint = "Is the exponential of a number above 0 computed anywhere? It can overflow."
    with report.check("scores in the thousands", hint):
        takes(function, 1000 * s, v)
    hint = "m can be any number, even one whose exponential is 0 or infinite in float64."
    with report.check("scores far below zero", hint):
        takes(function, s - 20_000, v, is_own=True)
    with report.check("rows that have seen no key yet: no NaN", RELATIVE_TO_THE_OLD):
        masked = s[:, :8].copy()
        masked[2], masked[3, 4:] = -np.inf, -np.inf
        takes(function, masked, v[:8], is_own=True)


@step
def merge(report: Report, function, seed: int = 0) -> None:
    """Two states joined."""
    s, v = keys(6, 10, 2, seed + 1, size=3.0)
    a, b, whole = state_of(s[:, :4], v[:4]), state_of(s[:, 4:], v[4:]), state_of(s, v)
    with report.check("two halves make the whole", "Each side's l and o are relative to that side's maximum."):
        joins(function, a, b, whole)
    with report.check("the other way round", "Both sides need a factor. It depends on the row which of the two is 1."):
        joins(function, b, a, whole)
    with report.check("maxima two thousand apart", "Which difference of two maxima is never positive?"):
        far = s + np.where(np.arange(10) < 4, 2000.0, 0.0)
        both = state_of(far[:, :4], v[:4]), state_of(far[:, 4:], v[4:])
        joins(function, *both, state_of(far, v))
    hint = "A side without keys has m = −inf and l = 0. What is its factor?"
    with report.check("a side without keys changes nothing", hint):
        empty = reset(6, 2)
        for first, second, both in ((empty, a, a), (a, empty, a), (empty, empty, empty)):
            same_state(call(function, first, second), both)


@step
def finalize(report: Report, function, seed: int = 0) -> None:
    """The output and the logsumexp of a state."""
    s, v = keys(5, 7, 3, seed + 2, size=2.0)
    with report.check("the output", "o is a weighted sum, and l is the sum of the weights."):
        ends(function, state_of(s, v), "o")
    with report.check("the logsumexp", "L is the natural logarithm of Σ exp(s). What has to be added to m to get it?"):
        ends(function, state_of(s, v), "L")
    hint = "0 / 0 is NaN. What is l in a row that has seen no key?"
    with report.check("rows that saw no key: O = 0, L = −inf", hint):
        s[1], s[4] = -np.inf, -np.inf
        ends(function, state_of(s, v), "oL")


# The student's own test of merge ----------------------------------------------------------------------------------


def right_merge(a, b):
    """A right merge that keeps each row's logsumexp and output as its state: (L, 1, O)."""
    O, L = SoftmaxState(*a).merge(SoftmaxState(*b)).finalize()
    return L, np.where(np.isneginf(L), 0.0, 1.0), O


def right_in_float32(a, b):
    """Right to seven digits."""
    return tuple(np.float32(x) for x in right_merge(a, b))


def forgets_the_right_side(a, b):
    return right_merge(a, (np.maximum(a[0], b[0]), b[1], b[2]))


def nan_when_empty(a, b):
    """NaN in m and o, and l = 1: no end of a state hides it, however that guards rows without keys."""
    L, _, O = right_merge(a, b)
    return np.where(np.isneginf(L), np.nan, L), np.ones(len(L)), np.where(np.isneginf(L)[:, None], np.nan, O)


RIGHT_MERGES = {
    "a merge that keeps (L, 1, O) as its state": right_merge,
    "a merge that rounds to float32": right_in_float32,
}
WRONG_MERGES = {
    "a merge that forgets to rescale the right side": forgets_the_right_side,
    "a merge that gives NaN for a row without keys": nan_when_empty,
}


def own_test(test, wrong: dict | None = None, right: dict | None = None) -> Report:
    """A student's test of merge against right and wrong merges; `wrong` and `right` come on top of the usual ones."""
    report = Report("own")
    hint = "Draw many rows, let either side have the larger maximum, leave some rows without keys, and compare O and L."
    return caught_minus_alarms(report, test, WRONG_MERGES | (wrong or {}), RIGHT_MERGES | (right or {}), hint)


UNWRITTEN, TOO_LATE = "not written yet", "your test did not finish in time"


def caught_minus_alarms(report: Report, test, wrong: dict, right: dict, hint: str, make=lambda thing: thing) -> Report:
    """The share of wrong things that the test caught, minus the share of right ones that it did not accept in time.

    Each is made and tried twice: a test that says yes and no of one thing has thrown a coin.
    """
    order = [*right.items(), *wrong.items()] * 2
    SystemRandom().shuffle(order)  # a test that counts its calls learns nothing
    verdicts, refusals = {}, {name: set() for name, _ in order}
    for name, thing in order:
        verdicts[name] = verdict_on(test, make(thing))
        refusals[name] |= {bool(verdicts[name])} if verdicts[name] != TOO_LATE else set()
    alarms = {name: verdicts[name] for name in right if verdicts[name]}
    unwritten = {verdicts[name] for name in right} == {UNWRITTEN}  # then the checks below say so, once
    for name, verdict in ({} if unwritten else alarms).items():
        print(f"  ALARM    {name} is correct, but {'your test rejected it: ' * (verdict != TOO_LATE)}{verdict}")
    for name in wrong:
        with report.check(f"caught: {name}", hint):
            if verdicts[name] == UNWRITTEN:
                raise NotImplementedError
            if verdicts[name] in ("", TOO_LATE):
                raise Failed("an AssertionError from your test", verdicts[name] or "your test accepted it")
    if alarms and not unwritten:
        accepted = f"{len(right) - len(alarms)} of {len(right)} correct versions"
        print(f"           Your test accepted {accepted} in time. The share of the others is")
        print("           subtracted from the share of wrong versions that it caught.")
    report.passed = max(0.0, report.passed - len(wrong) * len(alarms) / len(right))
    if unsure := [name for name, found in refusals.items() if len(found) > 1]:
        report.passed, report.refused = 0.0, f"your test gave two answers about {unsure[0]}, so draw from a fixed seed"
        print(f"           {report.refused}")
    return report


def verdict_on(test, thing) -> str:
    """What a student's test says against something, an AssertionError or any other; empty if it lets it pass."""
    try:
        call(test, thing)
    except NotImplementedError:
        return UNWRITTEN
    except Stopped:
        return TOO_LATE
    except Exception as refusal:
        said, where = words_of(refusal)
        return ", at ".join(filter(None, (said[:200], where)))
    return ""
