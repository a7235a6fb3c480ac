"""Find the mistakes that explain a function's answers.

The answers are given as arrays, and the function is not called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fa2_lab.examine.attention import attention, combine
from fa2_lab.examine.cases import EXTREME, OPEN, AttentionCase, TileSize
from fa2_lab.examine.catalogue import CATALOGUE, Mistake

Names = tuple[str, ...]
GRADIENTS = ("dQ", "dK", "dV")
TILES = (1, 2, 4, 8, 16, 32, 64, 128)
# Groups of cases that a function may accept without supporting them: {group: name of the finding}
SILENT = {"grouped": "grouped-silent", "cross": "lengths-silent", "values": "values-silent"}


class Variant(NamedTuple):
    """A hypothesis about a function: its mistakes and conventions, its tile size B, and its precision in bits.

    `names` are the names of the mistakes and conventions in the catalogue. B is the width and height of a tile, or
    (rows, keys). For mistakes in merging partial results, B is (number of parts of the keys, keys per tile). By
    default, a Variant stands for correct attention.
    """

    names: tuple[str, ...] = ()
    B: TileSize = 0
    bits: int = 8


RIGHT, UNMASKED = Variant(), Variant(("causal-ignored", "mask-ignored", "lengths-ignored"))


@dataclass(eq=False)
class Answer:
    """The outputs of a function for a case: O and, if the function returns them, L, dQ, dK and dV.

    Each output is (batch, heads, N, d), or (batch, heads, N) for L.
    """

    case: AttentionCase
    outputs: dict[str, np.ndarray]
    eps: float = 1.2e-7  # the spacing of its dtype's numbers near 1
    variants: dict[tuple, dict[str, np.ndarray]] = field(default_factory=dict)

    def of(self, **options: Any) -> Answer:
        """Return these outputs as the answer to the same case with other options."""
        return Answer(replace(self.case, options=self.case.options | options), self.outputs, self.eps)

    def variant(self, variant: Variant, name: str) -> np.ndarray:
        key = (*variant, name in GRADIENTS)
        if key not in self.variants:
            self.variants[key] = attention(self.case, *variant, gradients=name in GRADIENTS)
        return self.variants[key][name]

    def bound(self, name: str, variant: Variant = RIGHT) -> float:
        """Return the largest difference that rounding alone can cause in a variant's output `name`."""
        error = self.eps * (4 + 2 * float(self.variant(variant, "largest")) + self.case.k.shape[2] ** 0.5)
        x = np.abs(self.variant(variant, name))
        size = max(np.abs(self.case.v).max() if name == "O" else 1.0, x[np.isfinite(x)].max(initial=0.0))
        return error * float(size) * (8 if name in GRADIENTS else 1)

    def wrong(self, variant: Variant, name: str) -> np.ndarray:
        """Return a boolean array that is True for each element of the output `name` that differs from the variant's.

        Differences within rounding do not count, and two non-finite elements count as equal. Rows that see no key are
        never wrong, because they are checked separately.
        """
        got, want = self.outputs[name], self.variant(variant, name)
        with np.errstate(invalid="ignore"):
            near = (np.abs(got - want) <= self.bound(name, variant)) | (~np.isfinite(got) & ~np.isfinite(want))
        if name == "O" and (nothing := np.isneginf(self.variant(variant, "L"))[..., None]).any():
            # A row of O without keys may be 0, NaN or, with finite masks, the mean of V or unmasked attention.
            is_mean = np.abs(got - self.mean()) <= self.bound("O")
            is_open = False if nothing.all() else np.abs(got - self.variant(UNMASKED, "O")) < 0.01
            near |= nothing & ((got == 0) | ~np.isfinite(got) | is_mean | is_open)
        if name in ("O", "L", "dQ"):
            near[self.empty(variant)] = True  # rows that see no key are judged separately
        return ~near

    def mean(self) -> np.ndarray:
        """Return an array with the shape of O in which each row is the mean of V over all keys."""
        v = np.repeat(self.case.v, self.case.q.shape[1] // self.case.v.shape[1], axis=1)
        return np.broadcast_to(v.mean(axis=2, keepdims=True), self.case.dO.shape)

    def empty(self, variant: Variant) -> np.ndarray:
        """Return a boolean array (batch, heads, N_q) that is True for each row that sees no key."""
        return np.isneginf(self.variant(conventions(variant), "L"))

    def fits(self, variant: Variant, names: Iterable[str]) -> bool:
        return not any(self.wrong(variant, name).any() for name in names if name in self.outputs)


def conventions(variant: Variant) -> Variant:
    return Variant(tuple(name for name in variant.names if CATALOGUE[name].part == "conventions"))


class Finding(NamedTuple):
    """A mistake or a convention found in a function, or a remark about it."""

    name: str
    where: str
    much: float = np.nan
    case: AttentionCase | None = None
    others: tuple[str, ...] = ()  # mistakes that would explain the outputs equally well
    variant: Variant = RIGHT  # what is known about the function, including this finding
    read_out: str = ""  # a sentence about the mistake, read out of the function's outputs

    @property
    def mistake(self) -> Mistake:
        return CATALOGUE[self.name]

    @property
    def group(self) -> str:
        return self.case.group if self.case else ""

    @property
    def is_wrong(self) -> bool:
        return self.mistake.part not in ("conventions", "remarks")

    def __str__(self) -> str:
        says, B = self.read_out or self.mistake.description.replace("{bits}", str(self.variant.bits)), self.variant.B
        tile = (
            f" (tiles of {' × '.join(map(str, np.atleast_1d(B)))})"
            if {"B", "sides"} & {*self.mistake.depends_on.split()} and B
            else ""
        )
        return says.removesuffix(".") + tile + "."


def known(answers: Iterable[Answer], output: str) -> list[Mistake]:
    """Return the mistakes that, each on its own, reproduce the given output in every answer.

    Mistakes about key_lengths are left out if no case has any, because there they only look like other mistakes.
    """
    answers = list(answers)
    has_lengths = any(answer.case.options.get("key_lengths") is not None for answer in answers)
    parts = {"O": ("conventions", "O"), "L": ("conventions", "O", "L")}.get(output, ("gradients",))
    some = [x for x in CATALOGUE.values() if x.edits and x.part in parts and "bits" not in x.depends_on]
    some = [x for x in some if has_lengths or "lengths" not in str(x.edits)]
    return [x for x in some if all(answer.fits(Variant((x.name,)), (output,)) for answer in answers)]


def explain(answers: Sequence[Answer], tiles: Sequence[int] = TILES) -> list[Finding]:
    """Return the findings that explain a function's answers.

    The findings are about O, then about L and, if O is right, about the gradients. `tiles` are the tile sizes to try.
    """
    found, variant = explain_part(answers, RIGHT, "O", ("O",), tiles)
    usual, plain = conventions(variant), not any(x.is_wrong and x.group == "plain" for x in found)
    answers = without_silent(answers, found)
    strange = {x.group for x in found if x.name in ("unknown", *SILENT.values())}
    right = [x for x in answers if x.case.group not in strange and x.fits(usual, ("O",))]
    of_L = [x for x in answers if x.case.group not in strange and "L" in x.outputs]
    if not fits_all(variant, of_L, ("L",)) and not fits_all(usual, of_L, ("L",)):
        single = [s for base in (variant, usual) for s in candidates(base, "L", tiles) if fits_all(s, of_L, ("L",))]
        if single:
            found.append(Finding(single[0].names[-1], *describe_error(of_L, variant, ("L",)), variant=single[0]))
        elif plain:
            found += explain_part([x for x in right if "L" in x.outputs], usual, "L", ("L",), tiles)[0]
    skip = {"dL" for x in found if x.mistake.part == "L" or x.where.startswith("L")}
    of_gradients = [x for x in right if "dQ" in x.outputs and x.case.group not in skip]
    of_gradients = [x for x in of_gradients if not x.case.group.startswith("empty")]
    return found + (explain_part(of_gradients, usual, "gradients", GRADIENTS, tiles)[0] if plain else [])


def explain_part(
    answers: Sequence[Answer], variant: Variant, part: str, outputs: Names, tiles: Sequence[int]
) -> tuple[list[Finding], Variant]:
    """Explain the outputs of one part of the catalogue ("O", "L" or "gradients"), one group of cases after another.

    Return the findings, and the variant that includes them. A new mistake is accepted only if it also fits all answers
    that have been explained so far. `variant` is the variant known at the start, and `tiles` are the tile sizes to try.
    """
    found: list[Finding] = []
    settled: list[Answer] = []
    for group in dict.fromkeys(x.case.group for x in answers):
        mine = sorted((x for x in answers if x.case.group == group), key=lambda x: x.case.q.size + x.case.k.size)
        mine = without_silent(mine, found)
        if group in EXTREME and any(x.name == "precision" or "bits" in x.mistake.depends_on for x in found):
            continue
        is_plain = part == "O" and group == "plain"
        if is_plain and all(np.isnan(x.outputs["O"]).all() for x in mine):
            return [Finding("all-nan", *describe_error(mine, variant, outputs))], variant
        if fits_all(variant, mine, outputs):
            settled += mine
            continue
        if fits_all(conventions(variant), mine, outputs):  # the mistakes found so far do not occur here
            continue
        in_single = [replace(x, case=replace(x.case, single=True), eps=1.2e-7, variants={}) for x in mine]
        if group in EXTREME and found and fits_all(variant, in_single, outputs):  # it may compute in float32
            continue
        fitting = [s for s in candidates(variant, part, tiles) if fits_all(s, mine + settled, outputs)]
        of_bases = bases(variant, part, mine, settled, outputs) if not fitting else []
        for base in of_bases:
            fitting += [s for s in candidates(base, part, tiles) if fits_all(s, mine + settled, outputs)]
        for base in [variant, *of_bases] if not fitting and not variant.B else ():
            if "always-causal" in base.names or group not in ("plain", "cross"):
                fitting += [s for s in oblong(base, part, tiles) if fits_all(s, mine + settled, outputs)]
        coarse = rounding(mine, variant, tiles) if is_plain and not fitting else None
        if fitting:
            best, others = choose(fitting, answers, outputs, len(variant.names))
            new = best.names[len(variant.names) :]
            found += [
                Finding(name, *describe_error(mine, variant, outputs), others=others, variant=best) for name in new
            ]
            variant, settled = best, settled + mine
            if any(name.startswith("axis") for name in new):  # if the softmax is over a wrong axis, no mask can work
                break
        elif len(outputs) > 1:
            of_each = {name: explain_part([*settled, *mine], variant, part, (name,), tiles)[0] for name in outputs}
            found += [x for name in outputs for x in of_each[name]]
            outputs = tuple(name for name in outputs if not of_each[name])  # one mistake per output is enough
        elif coarse:
            found.append(coarse)
            for x in answers:  # from now on, judge all answers as if in 16 bits
                x.eps = 2.0**-8
        elif variant == conventions(variant):  # after a mistake, its effect on other groups is not known
            name = SILENT.get(group, "unknown") if part == "O" else "unknown"
            name = "options-kept" if part == "O" and is_late(mine, answers, variant) else name
            # Describe the error as one of the convention that fits most of the answers.
            variant = max([variant, *of_bases], key=lambda s: sum(x.fits(s, outputs) for x in mine))
            found.append(Finding(name, *describe_error(mine, variant, outputs), variant=variant))
            if group == "plain":
                break
    return found, variant


def is_cross(case: AttentionCase) -> bool:
    return case.q.shape[2] != case.k.shape[2] and "cu_seqlens_k" not in case.options


def without_silent(answers: Sequence[Answer], found: Sequence[Finding]) -> list[Answer]:
    """Return the answers, except those to kinds of cases that the function accepts without supporting them."""
    strange = {x.group for x in found if x.name in ("unknown", *SILENT.values())}
    kinds: dict[str, Callable[[AttentionCase], bool]] = {
        "cross": is_cross,
        "grouped": lambda case: case.q.shape[1] != case.k.shape[1],
        "values": lambda case: case.v.shape[3] != case.q.shape[3],
    }
    kinds = {group: is_kind for group, is_kind in kinds.items() if group in strange}
    return [x for x in answers if x.case.group in kinds or not any(is_kind(x.case) for is_kind in kinds.values())]


def is_late(mine: list[Answer], answers: Sequence[Answer], variant: Variant) -> bool:
    """Return whether a function seems to use the options of an earlier call.

    This is the case if O of each answer in `mine` is correct for the options of its own case or of another case with
    the same sizes, but not always for its own. `answers` are the answers to all cases.
    """
    sizes = {x: (x.case.q.shape[2], x.case.k.shape[2]) for x in answers}
    plain = [y for y in answers if not any(isinstance(z, np.ndarray) for z in y.case.options.values())]
    same = {x: [y.case.options for y in plain if sizes[y] == sizes[x] and y is not x] for x in mine}
    others = {x: [replace(x, case=replace(x.case, options=y), variants={}) for y in same[x] if y] for x in mine}
    bases = [variant, *(s for s in candidates(variant, "O", ()) if CATALOGUE[s.names[-1]].part == "conventions")]
    late = {s: [x for x in mine if not x.fits(s, ("O",))] for s in bases}
    return any(late[s] and all(any(y.fits(s, ("O",)) for y in others[x]) for x in late[s]) for s in bases)


def rounding(answers: list[Answer], variant: Variant, tiles: Sequence[int]) -> Finding | None:
    """Return a finding that names the step with too few bits, or None if O differs by more than rounding could explain.

    O is compared with the catalogue's variants by the root mean square difference, because single elements may round up
    instead of down.
    """

    def distance(s: Variant) -> float:
        return max(float(np.sqrt(np.mean((x.outputs["O"] - x.variant(s, "O")) ** 2))) for x in answers)

    with np.errstate(all="ignore"):
        here = distance(variant)
        if not here < 2.0**-7 or not all(is_noise(x, variant) for x in answers):
            return None
        of_bits = [m for m in CATALOGUE.values() if "bits" in m.depends_on]
        best = min((s for m in of_bits for s in forms(m, variant, (*tiles, 0))), key=distance)
    where, much, case = describe_error(answers, variant, ("O",))
    if distance(best) < here / 8:
        return Finding(best.names[-1], where, much, case, variant=best)
    size = ", as in bf16" if here > 2.0**-11 else ", as in fp16 or TF32" if here > 2.0**-15 else ""
    return Finding("precision", where + size, much, case, variant=variant)


def is_noise(x: Answer, variant: Variant) -> bool:
    """Return whether the errors in O look like rounding: they are in many numbers, and not a factor of each row."""
    O, off = x.variant(variant, "O"), x.outputs["O"] - x.variant(variant, "O")
    if not x.wrong(variant, "O").any():
        return True
    c = (off * O).sum(axis=3, keepdims=True) / (O * O).sum(axis=3, keepdims=True)
    return bool(np.mean(x.wrong(variant, "O")) > 0.3 and np.std(off - c * O) > 0.1 * np.std(off))


def forms(mistake: Mistake, variant: Variant, tiles: Sequence) -> Iterator[Variant]:
    """Yield the variants that add this mistake to `variant`, one for each tile size and precision that it can have."""
    if "parts" in mistake.depends_on:
        tiles = [x for B in tiles if isinstance(B, int) for x in ((B, 0), (B, 1), (OPEN, B))]
    elif "sides" in mistake.depends_on and not variant.B:
        tiles = [B for B in tiles if isinstance(B, tuple)]
    elif variant.B or "B" not in mistake.depends_on:
        tiles = (variant.B,)
    for B in tiles:
        for bits in (8, 11) if "bits" in mistake.depends_on else (variant.bits,):
            if combine((*variant.names, mistake.name)):
                yield Variant((*variant.names, mistake.name), B, bits)


def oblong(variant: Variant, part: str, tiles: Sequence[int]) -> Iterator[Variant]:
    """Yield the variants of mistakes that depend on which tiles are visited, for tiles that are not square.

    One side of such a tile is two or four times as long as the other, and both sides are in `tiles`.
    """
    sides = [x for x in tiles if x >= 8]
    pairs = [(a, b) for a in sides for b in sides if a != b and ({a, b} - {*TILES} or max(a, b) <= 4 * min(a, b))]
    for s in candidates(variant, part, pairs):
        if re.search("start|first|visited", str(CATALOGUE[s.names[-1]].edits)):
            yield s


def candidates(variant: Variant, part: str, tiles: Sequence) -> Iterator[Variant]:
    parts = ("conventions", part) if part == "O" else (part,)
    for mistake in CATALOGUE.values():
        if (
            mistake.edits
            and mistake.part in parts
            and mistake.name not in variant.names
            and "bits" not in mistake.depends_on
        ):
            yield from forms(mistake, variant, tiles)


def bases(variant: Variant, part: str, mine: list[Answer], settled: list[Answer], outputs: Names) -> list[Variant]:
    """Return the variants that add a convention to `variant` and fit the answers in `settled`.

    `mine` holds the answers of the current group of cases. A variant need not fit them, because the function may also
    make a mistake, but a convention that changes none of them is left out.
    """
    some = [s for s in candidates(variant, part, ()) if CATALOGUE[s.names[-1]].part == "conventions"]
    some = [s for s in some if not all(np.array_equal(x.variant(s, "O"), x.variant(variant, "O"), True) for x in mine)]
    return [s for s in some if part == "O" and fits_all(s, settled, outputs)]


def fits_all(variant: Variant, answers: list[Answer], outputs: tuple[str, ...]) -> bool:
    return all(x.fits(variant, outputs) for x in answers)


def choose(fitting: list[Variant], answers: Sequence[Answer], outputs: Names, known: int) -> tuple[Variant, Names]:
    """Return the best of the variants in `fitting`, and the names of other mistakes that fit equally many answers.

    Conventions are preferred. Otherwise, the best variant fits the most answers of all groups. `known` is the number of
    names that all variants share.
    """
    new = [s for s in fitting if all(CATALOGUE[name].part == "conventions" for name in s.names[known:])]
    score = {s: sum(x.fits(s, outputs) for x in answers) for s in new or fitting}
    most = [s for s in score if score[s] == max(score.values())]
    best = ((new and most) or sorted(most, key=lambda s: "B" in CATALOGUE[s.names[-1]].depends_on))[0]
    others = [] if new else ["+".join(s.names[known:]) for s in most if set(s.names) != set(best.names)]
    return best, tuple(dict.fromkeys(others))


def describe_error(
    answers: list[Answer], variant: Variant, outputs: tuple[str, ...]
) -> tuple[str, float, AttentionCase]:
    """Return (position, size, case) of the error in the first answer whose outputs differ from those of `variant`."""
    for answer in answers:
        for name in [x for x in outputs if x in answer.outputs]:
            wrong = answer.wrong(variant, name)
            if wrong.any():
                with np.errstate(invalid="ignore"):
                    off = np.abs(answer.outputs[name] - answer.variant(variant, name))[wrong]
                much = float(off.max()) if np.isfinite(off).all() else np.nan
                return f"{name}: {describe_elements(wrong, answer.outputs[name])}", much, answer.case
    return "", np.nan, answers[0].case


def describe_elements(wrong: np.ndarray, got: np.ndarray) -> str:
    """Return text that describes which elements of (batch, heads, N, d) or (batch, heads, N) are True in `wrong`."""
    count = f"{int(wrong.sum())} of {wrong.size} numbers"
    names, axes = ("batch", "heads", "rows"), [np.unique(np.nonzero(wrong)[axis]) for axis in range(3)]
    parts = [f"{n} {spans(x)}" for n, x, size in zip(names, axes, wrong.shape, strict=False) if len(x) < size]
    return ", ".join([count, *parts]) + (", and not finite" if not np.isfinite(got[wrong]).any() else "")


def spans(numbers: np.ndarray) -> str:
    """Return the first three runs of consecutive whole numbers as text, such as "0 to 3, 7"."""
    runs = np.split(numbers, np.nonzero(np.diff(numbers) > 1)[0] + 1)
    words = [f"{x[0]} to {x[-1]}" if len(x) > 1 else str(x[0]) for x in runs[:3]]
    return ", ".join(words) + (", …" if len(runs) > 3 else "")
