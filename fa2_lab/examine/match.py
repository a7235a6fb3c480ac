"""From what a function answered to the mistakes that explain it. Cases and answers are arrays: no function is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fa2_lab.examine.attention import Wrong, attention
from fa2_lab.examine.cases import Case
from fa2_lab.examine.catalogue import CATALOGUE, Mistake

GRADIENTS = ("dQ", "dK", "dV")
TILES = (1, 2, 4, 8, 16, 32, 64, 128)
FINITE = ("plain", "scale", "width", "causal", "corner", "grouped", "window", "softcap", "mask", "bias", "packed")


class State(NamedTuple):
    """What is taken to be wrong so far: names of the catalogue, the tile, and a dtype's bits."""

    names: tuple[str, ...] = ()
    B: int = 0
    bits: int = 8


@dataclass(eq=False)
class Answer:
    """What a function made of a case: O, and if it has them L, dQ, dK and dV, all (batch, heads, N, d) or shorter."""

    case: Case
    outputs: dict[str, np.ndarray]
    eps: float = 1.2e-7  # the distance of two numbers of its dtype near 1
    variants: dict[tuple, dict[str, np.ndarray]] = field(default_factory=dict)

    def variant(self, state: State, name: str) -> np.ndarray:
        key = (*state, name in GRADIENTS)
        if key not in self.variants:
            self.variants[key] = attention(self.case, *state, gradients=name in GRADIENTS)
        return self.variants[key][name]

    @cached_property
    def largest_score(self) -> float:
        with np.errstate(all="ignore"):
            right = Wrong(self.case, frozenset(), 0, 8)
            S = right.scores(*right.operands()[:2])[0]
        return float(np.abs(S[np.isfinite(S)]).max(initial=1.0))

    def bound(self, name: str) -> float:
        """How far rounding alone may move a number: a score's error is that of its dtype, and it moves its weight."""
        error = self.eps * (4 + 2 * self.largest_score)
        if name == "L":
            return error
        if name == "O":
            return error * float(np.abs(self.case.v).max())
        return 8 * error * float(np.abs(self.variant(State(), name)).max(initial=1.0))

    def wrong(self, state: State, name: str) -> np.ndarray:
        """True where a number differs from this variant's. Two numbers that are not finite are alike."""
        got, want = self.outputs[name], self.variant(state, name)
        with np.errstate(invalid="ignore"):
            near = (np.abs(got - want) <= self.bound(name)) | (~np.isfinite(got) & ~np.isfinite(want))
        if name == "O":  # what a row that saw nothing divides 0 by is up to the function
            nothing = np.isneginf(self.variant(state, "L"))[..., None]
            near |= nothing & ((got == 0) | ~np.isfinite(got))
        if name in ("O", "L", "dQ"):
            near[self.empty(state)] = True  # rows that see no key are judged for themselves
        return ~near

    def empty(self, state: State) -> np.ndarray:
        """The rows that see no key by the function's own conventions."""
        return np.isneginf(self.variant(conventions(state), "L"))

    def fits(self, state: State, names: Iterable[str]) -> bool:
        return not any(self.wrong(state, name).any() for name in names if name in self.outputs)


def conventions(state: State) -> State:
    return State(tuple(name for name in state.names if CATALOGUE[name].part == "reads"))


class Finding(NamedTuple):
    """One thing that was found out. `others` are names that would explain the same numbers."""

    name: str
    where: str
    much: float = np.nan
    case: Case | None = None
    others: tuple[str, ...] = ()
    state: State = State()  # of the function, up to and with this finding

    @property
    def mistake(self) -> Mistake:
        return CATALOGUE[self.name]

    @property
    def is_wrong(self) -> bool:
        return self.mistake.part not in ("reads", "remarks")

    def __str__(self) -> str:
        says = self.mistake.says.replace("{bits}", str(self.state.bits))
        tile = f" (tiles of {self.state.B})" if "B" in self.mistake.varies and self.state.B else ""
        return says.removesuffix(".") + tile + "."


def explain(answers: Sequence[Answer], tiles: Sequence[int] = TILES) -> list[Finding]:
    """Name what is wrong with a function's answers: in O, then in L, then in the gradients."""
    asked = [x for x in answers if "O" in x.outputs]
    found, state = explain_part(asked, State(), "O", ("O",), tiles)
    unsure = {finding.case.group for finding in found if finding.name == "unknown" and finding.case}
    asked = [x for x in asked if x.case.group not in unsure]
    plain = not any(finding.is_wrong and finding.case and finding.case.group == "plain" for finding in found)
    right = [x for x in asked if x.fits(conventions(state), ("O",))]
    found += explain_L([x for x in asked if "L" in x.outputs], state, plain, tiles)
    if plain:
        found += explain_part([x for x in right if "dQ" in x.outputs and x.case.group != "empty"], conventions(state), "gradients", GRADIENTS, tiles)[0]
    return found


def explain_L(answers: list[Answer], state: State, plain: bool, tiles: Sequence[int]) -> list[Finding]:
    """L of a wrong softmax may be right, or wrong like O; only where O is right is it said to be wrong for itself."""
    for base in (state, conventions(state)):
        if fits_all(base, answers, ("L",)):
            return []
    for base in (state, conventions(state)):
        for s in candidates(base, "L", tiles):
            if fits_all(s, answers, ("L",)):
                return [Finding(s.names[-1], *place(answers, base, ("L",)), state=s)]
    right = [x for x in answers if x.fits(conventions(state), ("O",))]
    return explain_part(right, conventions(state), "L", ("L",), tiles)[0] if plain else []


def explain_part(
    answers: list[Answer], state: State, part: str, outputs: tuple[str, ...], tiles: Sequence[int]
) -> tuple[list[Finding], State]:
    """The mistakes of one part, group after group; each must fit everything that was explained before."""
    found: list[Finding] = []
    settled: list[Answer] = []
    for group in dict.fromkeys(x.case.group for x in answers):
        mine = sorted((x for x in answers if x.case.group == group), key=lambda x: x.case.q.size + x.case.k.size)
        if all(x.fits(state, outputs) for x in mine):
            settled += mine
            continue
        fitting = [s for s in candidates(state, part, tiles) if fits_all(s, mine + settled, outputs)]
        if not fitting and group in FINITE:
            fitting = [s for s in pairs(state, part, tiles, mine, outputs) if fits_all(s, settled, outputs)]
        if not fitting and len(outputs) > 1:
            singly = [explain_part(mine, state, part, (name,), tiles)[0] for name in outputs]
            found += [finding for one in singly for finding in one]
            continue
        if not fitting:
            found.append(Finding("unknown", *place(mine, state, outputs), state=state))
            if group == "plain":
                break
            continue
        best, others = choose(fitting, answers, outputs, len(state.names))
        for name in best.names[len(state.names) :]:
            found.append(Finding(name, *place(mine, state, outputs), others=others, state=best))
        state = best
        settled += mine
    return found, state


def forms(mistake: Mistake, state: State, tiles: Sequence[int]) -> Iterator[State]:
    """A mistake on top of a state, with every tile and every dtype that it may have."""
    tiles = (tiles if not state.B else (state.B,)) if "B" in mistake.varies else (state.B,)
    for B in tiles:
        for bits in (8, 11) if "bits" in mistake.varies else (state.bits,):
            yield State((*state.names, mistake.name), B, bits)


def candidates(state: State, part: str, tiles: Sequence[int]) -> Iterator[State]:
    parts = ("reads", part) if part == "O" else (part,)
    for mistake in CATALOGUE.values():
        if mistake.part in parts and mistake.name not in state.names:
            yield from forms(mistake, state, tiles)


def fits_all(state: State, answers: list[Answer], outputs: tuple[str, ...]) -> bool:
    return all(x.fits(state, outputs) for x in answers)


def pairs(
    state: State, part: str, tiles: Sequence[int], mine: list[Answer], outputs: tuple[str, ...]
) -> Iterator[State]:
    """Two mistakes at once, of those that change the group's smallest case. The first depends on no tile."""
    small = mine[0]
    name = outputs[0]

    def changes(s: State) -> bool:
        return not np.allclose(small.variant(s, name), small.variant(state, name), atol=1e-3, equal_nan=True)

    single = [s for s in candidates(state, part, tiles) if changes(s)]
    for first in [s for s in single if s.B == state.B and s.bits == state.bits]:
        for second in single:
            if second.names[-1] not in first.names:
                both = State((*first.names, second.names[-1]), second.B, second.bits)
                if fits_all(both, mine, outputs):
                    yield both


def choose(
    fitting: list[State], answers: list[Answer], outputs: tuple[str, ...], known: int
) -> tuple[State, tuple[str, ...]]:
    """The one that fits most answers of all groups, conventions first; and the names that fit as many."""
    score = {s: sum(x.fits(s, outputs) for x in answers) for s in fitting}
    most = [s for s in fitting if score[s] == max(score.values())]
    new = [s for s in most if all(CATALOGUE[name].part == "reads" for name in s.names[known:])]
    best = (new or most)[0]
    others = [] if new else ["+".join(s.names[known:]) for s in most if set(s.names) != set(best.names)]
    return best, tuple(dict.fromkeys(others))


def place(answers: list[Answer], state: State, outputs: tuple[str, ...]) -> tuple[str, float, Case]:
    """Where the smallest wrong answer is wrong: in which output, heads and rows; and by how much."""
    for answer in answers:
        for name in [x for x in outputs if x in answer.outputs]:
            wrong = answer.wrong(state, name)
            if wrong.any():
                with np.errstate(invalid="ignore"):
                    off = np.abs(answer.outputs[name] - answer.variant(state, name))[wrong]
                much = float(off.max()) if np.isfinite(off).all() else np.nan
                return f"{name}: {described(wrong, answer.outputs[name])}", much, answer.case
    return "", np.nan, answers[0].case


def described(wrong: np.ndarray, got: np.ndarray) -> str:
    """In words which entries of (batch, heads, N, d) or (batch, heads, N) are wrong."""
    count = f"{int(wrong.sum())} of {wrong.size} numbers"
    axes = [np.unique(np.nonzero(wrong)[axis]) for axis in range(3)]
    parts = [f"{n} {spans(x)}" for n, x, size in zip(("batch", "heads", "rows"), axes, wrong.shape, strict=False) if len(x) < size]
    return ", ".join([count, *parts]) + (", and not finite" if not np.isfinite(got[wrong]).any() else "")


def spans(numbers: np.ndarray) -> str:
    """0 to 3, 7: runs of whole numbers, the first few."""
    runs = np.split(numbers, np.nonzero(np.diff(numbers) > 1)[0] + 1)
    words = [f"{x[0]} to {x[-1]}" if len(x) > 1 else str(x[0]) for x in runs[:3]]
    return ", ".join(words) + (", …" if len(runs) > 3 else "")
