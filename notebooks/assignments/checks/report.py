"""What the checks of one step found. A failed check says what was expected, what came, where, and gives one hint."""

from __future__ import annotations

import functools
from contextlib import contextmanager, suppress
from itertools import permutations

import numpy as np

from .cells import described
from .guard import Raised, Stopped
from .probes import NotAllowed


class Failed(Exception):
    """One check did not hold. `known` has the hints of the slips that come to these values."""

    def __init__(self, expected: str, came: str, where: str = "", hint: str = "", known: tuple = ()):
        super().__init__(expected)
        self.expected, self.came, self.where, self.hint, self.known = expected, came, where, hint, known


MISFIT = "Which of the two operands has to be transposed?"


class Report:
    """The checks of one step, printed as they run. Each is worth the same share of the step's points."""

    def __init__(self, step: str):
        self.step, self.passed, self.total, self.refused = step, 0, 0, ""
        self.unwritten, self.last, self.shown = False, [], ""
        self.named, self.forgiven = [], []  # of each check that failed, or passed, by a known slip: the hints that fit
        print(step)

    @contextmanager
    def check(self, claim: str, hint: str = ""):
        """Run one check; whatever a student's code raises is told, and the next check runs all the same."""
        self.total += 1
        try:
            yield
        except NotAllowed as refusal:
            self.refused = str(refusal)
            self._tell("REFUSED", claim, [("", f"{refusal}, so this step scores 0")])
        except Failed as failed:
            self.named += [failed.known] if failed.known else []
            self._fail(claim, failed, hint)
        except NotImplementedError:
            if not self.unwritten:  # said once
                self._tell("NOT YET", f"{claim}: not written yet", [])
            self.unwritten = True
        except (Exception, SystemExit) as error:
            text, where = words_of(error)
            is_misfit = "matmul: Input operand" in text or "equal reduction dimensions" in text
            self._fail(claim, Failed("a result", text, where, MISFIT if is_misfit else ""))
        else:
            self.passed += 1
            self._tell("ok", claim, [])

    def points(self, most: float) -> float:
        """This step's points: the last line of its cell, and what the grader reads."""
        share = 0.0 if self.refused or not self.total else self.passed / self.total
        got = round(most * share, 2)
        print(f"{self.step}: {got:g} of {most:g} points ({self.passed:g} of {self.total} checks)")
        return got

    def __add__(self, other: Report) -> Report:
        """Both reports as one: the visible checks and the hidden ones."""
        self.passed, self.total = self.passed + other.passed, self.total + other.total
        self.refused = self.refused or other.refused
        self.named, self.forgiven = self.named + other.named, self.forgiven + other.forgiven
        return self

    def unless_known(self, check) -> None:
        """Run a check that a known mistake may pass. The grader takes that back if no earlier step has shown it."""
        try:
            check()
        except Failed as failed:
            if not failed.known:
                raise
            self.forgiven.append(failed.known)

    def _fail(self, claim: str, failed: Failed, hint: str = "") -> None:
        """Report a failed check; if the last one failed in the same way, only this is reported."""
        lines = [("expected", failed.expected), ("got", failed.came)]
        lines += [("first at", failed.where)] if failed.where else []
        if lines == self.last:
            self._tell("NOT YET", f"{claim}: the same as above", [])
            return
        self.last, hint = lines, failed.hint or hint
        lines = lines + ([("hint", hint)] if hint else [])
        smallest = getattr(hint, "smallest", str)()
        if smallest not in ("", self.shown):  # once
            lines, self.shown = [*lines, ("smallest", smallest)], smallest
        self._tell("NOT YET", claim, lines)

    def _tell(self, verdict: str, claim: str, lines: list[tuple[str, str]]) -> None:
        print(f"  {verdict:8} {claim}")
        for title, text in lines:
            print(f"           {title:9}{text}" if title else f"           {text}")


def step(checks):
    """A step's checks, checks(report, function, …), as a function of the rest that returns the report."""

    @functools.wraps(checks)
    def checked(*args, **kwargs) -> Report:
        report = Report(checks.__name__)
        checks(report, *args, **kwargs)
        return report

    return checked


def words_of(error: BaseException) -> tuple[str, str]:
    """What a student's code raised, here or in another process, and where in the notebook."""
    if isinstance(error, MemoryError):
        return "MemoryError: the code used all the memory", ""
    if isinstance(error, (Raised, Stopped)):
        return str(error)[:300], getattr(error, "where", "")
    name, text, where = described(error)
    return f"{name}: {text}".removesuffix(": ")[:300], where


# Comparing ------------------------------------------------------------------------------------------------------


ROUNDED = (
    "The result is right to five digits. Is something rounded to float32, "
    "or is a small number added so that nothing becomes 0?"
)
NAN = "NaN comes from −inf − (−inf), from 0 / 0 or from 0 · inf. Which of these can happen here?"


def equal(name: str, got, want, tolerance: float = 1e-9, hint: str = "", place=None, slips=dict) -> None:
    """Fail at the first entry that differs by more than `tolerance`, relative to the largest true entry.

    `place(index)` says where that is in words; without it the entry's row is named. `slips()` has hints, each with the
    values that a slip comes to: the one that fits goes before all others.
    """
    want = np.asarray(want, dtype=np.float64)
    got = as_numbers(name, got, want.shape, hint)
    size = np.abs(want[np.isfinite(want)]).max(initial=0.0) or 1.0
    with np.errstate(invalid="ignore"):
        far = ~((got == want) | (np.abs(got - want) <= tolerance * size))
    if far.any():
        at = tuple(int(x) for x in np.argwhere(far)[0])
        label = f"{name}[{', '.join(map(str, at))}]" if at else name
        expected, came = (f"{label} = {number}" for number in numbers(want[at], got[at]))
        hint = ROUNDED if np.allclose(got, want, rtol=0.0, atol=1e-5 * size) else hint
        known = slips_of(got, want, slips, 10 * tolerance * size)
        hint = known[0] if known else hint or (NAN if np.isnan(got[at]) else "")
        where = place(at) if place and at else f"row {at[0]}" if at else ""
        count = f"; {int(far.sum())} of {far.size} entries differ" if far.size > 1 else ""
        raise Failed(expected, came, where + count, hint, known)


def all_hold(*checks) -> None:
    """Run checks, and raise the first failure. The mistakes that it knows are those that explain all failures."""
    failures = []
    for check in checks:
        try:
            check()
        except Failed as failed:
            failures.append(failed)
    if failures:
        failures[0].known = tuple(x for x in failures[0].known if all(x in other.known for other in failures))
        raise failures[0]


def slips_of(got: np.ndarray, want: np.ndarray, slips, tolerance: float) -> tuple:
    """The hints whose values these are."""
    size = np.abs(want[np.isfinite(want)]).max(initial=0.0) or 1.0
    fitting = []
    with np.errstate(all="ignore"):
        for hint, wrong in slips().items():
            grown = max(1.0, np.abs(wrong[np.isfinite(wrong)]).max(initial=0.0) / size)
            near = (got == wrong) | (np.abs(got - wrong) <= tolerance * grown) | (np.isnan(got) & np.isnan(wrong))
            changes_nothing = ((wrong == want) | (np.abs(wrong - want) <= tolerance / 10)).all()
            if near.all() and not changes_nothing and not np.isnan(got).all() and (got != want).any():
                fitting.append(hint)
    return tuple(fitting)


def at_most(what: str, came: int, most: int, hint: str = "") -> None:
    """Fail where more was done than need be."""
    if came > most:
        raise Failed(f"at most {most:,} {what}", f"{came:,}", hint=hint)


def as_numbers(name: str, got, shape: tuple, hint: str = "") -> np.ndarray:
    """`got` as float64 of that shape, or a failure that says what it is instead."""
    try:
        array = np.asarray(got, dtype=np.float64)
    except (TypeError, ValueError):
        raise Failed(f"{name}: an array of shape {shape}", f"{name}: {type(got).__name__}", hint=hint) from None
    if array.shape != tuple(shape):
        raise Failed(f"{name}: shape {tuple(shape)}", f"{name}: shape {array.shape}", hint=hint)
    return array


def parts(name: str, got, count: int, hint: str = "") -> tuple:
    """`got` as a tuple of so many results, or a failure."""
    if not isinstance(got, (tuple, list)) or len(got) != count:
        came = f"{len(got)} results" if isinstance(got, (tuple, list)) else type(got).__name__
        raise Failed(f"{count} results, {name}", came, hint=hint)
    return tuple(got)


def in_order(names: str, got: tuple, want: tuple) -> None:
    """Fail where right results came in another order."""

    def same(results: tuple) -> bool:
        return all(
            np.shape(a) == np.shape(b) and np.allclose(a, b, 1e-6, 1e-6) for a, b in zip(results, want, strict=True)
        )

    with suppress(TypeError, ValueError):
        if not same(got) and any(map(same, permutations(got))):
            hint = "Return the results in the order that the docstring names."
            raise Failed(f"{names}, in this order", "the right results in another order", hint=hint)


def numbers(a, b) -> list[str]:
    """Two numbers, short enough to read, exact enough to tell apart."""
    short, long = ([f"{float(x):.{digits}g}" for x in (a, b)] for digits in (6, 15))
    return short if short[0] != short[1] else long


def tile_place(B_r: int, row: str = "row"):
    """How an entry's place is said for a tensor that is cut into blocks of rows: of queries, or of keys."""
    block = "row" if row == "row" else "column"
    return lambda at: f"{row} {at[0]}, in {block} block {at[0] // B_r}"
