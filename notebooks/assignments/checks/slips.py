"""Slips that are known by the values they come to: {the hint: those values}. Those of whole passes are from examine."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np

from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import AttentionCase, one_head
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.match import RIGHT, Answer, Variant, known
from fa2_lab.reference.online_softmax import finite

from .truth import Case, visible

Slips = dict[str, np.ndarray]


class Slip(str):
    """The hint to a slip in an output. `problems` yields small ones: what is given, the answer, what the slip makes."""

    def __new__(cls, hint: str, output: str, problems):
        self = super().__new__(cls, hint)
        self.output, self.problems = output, problems
        return self

    def smallest(self) -> str:
        """Return the first of its problems that comes out otherwise, in words."""
        for given, right, wrong in self.problems():
            if not np.allclose(right, wrong, atol=0.05, equal_nan=True):
                shown = [np.round(x + 0.0, 3).tolist() for x in (right, wrong)]
                return f"{given}: {self.output} should be {shown[0]}, but this mistake makes it {shown[1]}"
        return ""


def with_problems(find, problems, *arguments) -> dict[str, Slips]:
    """Return what `find` returns, {output: slips}, each hint with the problems that show its slip.

    `problems` yields {name: what is given}, the arguments of `find`, and {output: answer}.
    """

    def of(output: str, hint: str):
        for given, small, want in problems():
            rounded = {name: x if x.dtype == bool else np.round(x, 3) for name, x in given.items()}
            words = ", ".join(f"{name} = {x.tolist()}" for name, x in rounded.items())
            with np.errstate(all="ignore"):
                yield words, want[output], find(*small)[output][hint]

    found = find(*arguments).items()
    return {output: {Slip(x, output, partial(of, output, x)): y for x, y in some.items()} for output, some in found}


def of_update(state: tuple, s: np.ndarray, v: np.ndarray, want: tuple) -> dict[str, Slips]:
    """Slips of a block that is taken into a state, for m, l and o."""
    (m, l, o), (top, true_l, true_o) = state, want
    weights = np.exp(s - finite(top)[:, None])
    early = np.exp(s - finite(m)[:, None]).sum(axis=1)
    new_l, new_o = weights.sum(axis=1), weights @ v
    kept_l, kept_o = true_l - new_l, true_o - new_o
    factor = kept_l / l
    grown = np.exp(finite(top))  # what l and o are larger by if no maximum is subtracted
    grown = np.where((grown == 0) | np.isinf(grown), np.nan, grown)  # 0 and ∞ can also come from elsewhere
    shared = np.full_like(m, top.max())
    bare = "No maximum is subtracted before the exponential, so {0} is relative to 0 instead of m."
    return {
        "m": {
            "m is still the old maximum, although a larger score in the block has to replace it.": m,
            "m is the maximum of the block alone, but the maximum so far counts as well.": s.max(axis=1),
            "All rows share one maximum here, but each needs its own. Along which axis is it taken?": shared,
        },
        "l": {
            "l is not rescaled, although it was summed relative to the old maximum, and m has changed.": l + new_l,
            "The factor of l is upside down. When m grows, l has to shrink.": l / factor + new_l,
            "l is set to the sum of this block, but the earlier blocks have to stay in it.": new_l,
            bare.format("l"): true_l * grown,
            "The weights of this block are relative to the old maximum, but they need the new one.": kept_l + early,
            "The weights are powers of 2. Use np.exp for them.": np.exp2(s - finite(top)[:, None]).sum(axis=1),
        },
        "o": {
            "o is not rescaled, although l is. Both were summed relative to the old maximum.": o + new_o,
            "The factor of o is upside down. When m grows, o has to shrink.": o / factor[:, None] + new_o,
            "o is set to the sum of this block, but the earlier blocks have to stay in it.": new_o,
            bare.format("o"): true_o * grown[:, None],
            "o is already divided by l, but only finalize should divide, once, at the end.": true_o / true_l[:, None],
            "The values of this block are added without their weights.": kept_o + v.sum(axis=0),
        },
    }


def of_merge(a: tuple, b: tuple, want: tuple) -> dict[str, Slips]:
    """Slips of two states that are joined."""
    left, right = (np.exp(x[0] - finite(want[0])) for x in (a, b))
    slips = {
        "m": {
            "m is always the maximum of the first side. Which of the two maxima should it be?": a[0],
            "m is always the maximum of the second side. Which of the two maxima should it be?": b[0],
            "m is the smaller of the two maxima, so exponents can be above 0.": np.minimum(a[0], b[0]),
        }
    }
    states = ("l", a[1], b[1], left, right), ("o", a[2], b[2], left[:, None], right[:, None])
    for name, first, second, f, g in states:
        why = "side is not rescaled, although it is relative to that side's maximum."
        slips[name] = {
            f"{name} of the second {why}": f * first + second,
            f"{name} of the first {why}": first + g * second,
            f"{name} is not rescaled on either side, although each is relative to its own maximum.": first + second,
            "The factors of the two sides are swapped.": g * first + f * second,
        }
    return slips


def of_finalize(state: tuple) -> dict[str, Slips]:
    """Slips of the end."""
    m, l, o = state
    return {
        "o": {
            "o is not divided, although it is a weighted sum, and l is the sum of the weights.": o,
            "o is divided by l twice.": o / l[:, None] ** 2,
            "o is multiplied by l, but it has to be divided by it.": o * l[:, None],
        },
        "L": {
            "The logarithm has base 2. Use np.log for it.": m + np.log2(l),
            "m is missing, although the weights in l are relative to it.": np.log(l),
            "l is missing, so L is the maximum alone.": m,
            "L contains l itself instead of its logarithm.": m + l,
            "The logarithm of l has the wrong sign.": m - np.log(l),
        },
    }


# Assignment 2 ---------------------------------------------------------------------------------------------------------


def of_kind(case: Case, tiles: list[tuple[slice, slice]]) -> dict[str, list[str]]:
    """What a slip makes of all tiles of a tiling."""
    row, col = np.arange(case.N_q + 1)[:, None], np.arange(case.N_k + 1)[None, :]
    seen = col <= row + case.N_k - case.N_q if case.causal else np.ones((case.N_q + 1, case.N_k + 1), dtype=bool)

    def kinds(seen: np.ndarray, rows: int = 0, cols: int = 0) -> list[str]:
        cut = [seen[r.start : r.stop + rows, c.start : c.stop + cols] for r, c in tiles]
        return ["full" if x.all() else "diagonal" if x.any() else "skip" for x in cut]

    corner, no_half = kinds(col <= row), ["full" if x == "diagonal" else x for x in kinds(seen)]
    other = {"skip": "full", "full": "skip", "diagonal": "diagonal"}
    return {
        "Every tile is called full, as if there were no mask.": kinds(np.ones_like(seen)),
        "The diagonal begins at the top left. It should end at the bottom right, so N_k − N_q is missing.": corner,
        "N_k − N_q has the wrong sign.": kinds(col <= row + case.N_q - case.N_k),
        "One row too many is tested. The last row is row_end − 1.": kinds(seen, rows=1),
        "One column too many is tested. The last column is col_end − 1.": kinds(seen, cols=1),
        "The diagonal itself is visible, so < has to be ≤.": kinds(col < row + case.N_k - case.N_q),
        '"skip" and "full" are swapped.': [other[x] for x in kinds(seen)],
        '"diagonal" is missing, although a tile can have both visible and masked entries.': no_half,
    }


# Whole passes: what the examiner knows --------------------------------------------------------------------------------


def asked(case: Case, tensors: list | None = None) -> AttentionCase:
    """A case as the examiner asks it."""
    return one_head(*(tensors or case.tensors()), tile=(case.B_r, case.B_c), scale=case.tau, causal=case.causal)


@cache
def with_mistakes(case: Case) -> Answer:
    """A case without an answer, which keeps what each mistake makes of it."""
    return Answer(asked(case), {})


def made(question: AttentionCase, output: str, *knobs: str) -> np.ndarray:
    """O, L, dQ, dK or dV of one head with mistakes in it."""
    return attention(question, knobs, gradients=output.startswith("d"))[output][0, 0]


def named(output: str, *names: str, said: str = "") -> Slip:
    """Return the hint to mistakes in an output of a whole pass, in the examiner's words or in others."""
    return Slip(said or CATALOGUE[names[0]].description, output, partial(small_passes, output, names))


def small_passes(output: str, names: tuple[str, ...]):
    """Yield problems in small numbers, the smallest first, with an output and what mistakes make of it."""
    lengths = sorted(product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2)), key=lambda n: (n[0] * n[1], *n))
    for size, (N_q, N_k, d), B, causal in product((1, 20), lengths, (1, 2), (False, True)):
        draw = np.random.default_rng(N_q + N_k).permutation(9) - 4.0
        given = [np.roll(draw, n)[: N * d].reshape(N, d) for n, N in enumerate((N_q, N_k, N_k, N_q))]
        given[:2] = [size * x for x in given[:2]]
        question = asked(Case(N_q, N_k, d, B, B, causal), given)
        tensors = ("Q", "K", "V", "dO")[: 4 if output.startswith("d") else 3]
        said = ", ".join(f"{name} = {x.astype(int).tolist()}" for name, x in zip(tensors, given, strict=False))
        said += f", tau = {Case.tau}, tiles of {B} × {B}{', causal' * causal}"
        yield said, made(question, output), made(question, output, *names)


def of_base_e(case: Case) -> Slips:
    """Return L of a kernel whose scores carry log₂ e, whose exponential has base e, and whose logarithm has base 2."""
    Q, K, *_ = case.tensors()
    S = np.where(case.seen, case.tau * np.log2(np.e) * (Q @ K.T), -np.inf)
    m = finite(S.max(axis=1))
    with np.errstate(divide="ignore"):
        return {named("L", "base-2-twice"): np.log(2) * m + np.log(np.exp(S - m[:, None]).sum(axis=1))}


def known_in(answers: list[Answer], output: str, among: list[str] | None = None) -> Slips:
    """Return the mistakes that each explain an output of all of these row blocks, and what they make of it."""
    names = [x.name for x in known(answers, output)] if among is None else among
    fitting = [x for x in names if all(y.fits(Variant((x,)), (output,)) for y in answers)]
    made = {x: [y.variant(Variant((x,)), output)[0, 0] for y in answers] for x in fitting}
    return {named(output, x): np.concatenate(y) for x, y in made.items()}


def in_halves(question: AttentionCase, output: str, came: np.ndarray, want: np.ndarray, tolerance: float) -> Slips:
    """Return the mistakes that explain an output of a pass in fp16 as exactly as a right one would be.

    Mistakes that are as small as rounding do not count. Mistakes in the running state are also tried in two other
    orders of the tiles, in which those that the mask cuts come first, or the last keys.
    """
    cut = np.split(came, range(question.tile[0], len(came), question.tile[0]))
    asked: list = [
        ([question], [came], None),
        *((in_order(question, x), cut, OF_STATE) for x in (cut_first, backwards)),
    ]
    size = tolerance * np.abs(want[np.isfinite(want)]).max(initial=0.0)

    def alike(a: np.ndarray, b: np.ndarray, most: float) -> bool:
        with np.errstate(invalid="ignore"):
            return bool(((a == b) | (np.abs(a - b) <= most)).all())

    for questions, parts, among in asked:
        answers = [Answer(x, {output: y[None, None]}, 2.0**-11) for x, y in zip(questions, parts, strict=True)]
        fitting = known_in(answers, output, among).items()
        if found := {x: y for x, y in fitting if alike(came, y, size) and not alike(y, want, 25 * size)}:
            return found
    return {}


OF_STATE = [
    x.name for x in CATALOGUE.values()
    if x.part == "O" and x.depends_on == "B" and re.search(r"alpha|m_new|s\.max", str(x.edits))
]  # fmt: skip


def cut_first(seen: np.ndarray) -> list[int]:
    """Return the tiles of a row block, those first of which it sees a part. `seen` is (rows, tiles, keys of a tile)."""
    return sorted(range(seen.shape[1]), key=lambda j: bool(seen[:, j].all()))


def backwards(seen: np.ndarray) -> list[int]:
    return list(range(seen.shape[1]))[::-1]


def in_order(question: AttentionCase, order) -> list[AttentionCase]:
    """Return the row blocks of a case of one head, each with its tiles of keys in another order."""
    (B_r, B_c), (q, k, v) = question.tile, (x[0, 0] for x in (question.q, question.k, question.v))
    more = -len(k) % B_c
    seen = np.pad(visible(len(q), len(k), question.options["causal"]), ((0, 0), (0, more)))
    k, v = (np.pad(x, ((0, more), (0, 0))) for x in (k, v))
    blocks = []
    for rows in (slice(i, i + B_r) for i in range(0, len(q), B_r)):
        keys = np.arange(len(k)).reshape(-1, B_c)[order(seen[rows].reshape(-1, len(k) // B_c, B_c))].ravel()
        options = dict(scale=question.options["scale"], mask=seen[None, None, rows, keys])
        blocks.append(one_head(q[rows], k[keys], v[keys], tile=(B_r, B_c), **options))
    return blocks


def of_tile(arguments: list, name: str, came) -> Slips:
    """The mistakes that explain a gradient of one tile that is all there is, which is given the right L and D."""
    Q, K, V, dO, *_, seen, tau = arguments
    output, got = f"d{name[1:].upper()}", np.asarray(came, dtype=np.float64)
    answer = Answer(one_head(Q, K, V, dO, scale=tau, mask=seen[None, None]), {output: got[None, None]})
    return known_in([answer], output)


class Passes:
    """What a function makes of all cases of a step. What explains one of them may change none that came out right."""

    def __init__(self, run, cases):
        self.ran = {case: attempted(run, case) for case in cases}

    def __getitem__(self, case: Case):
        """What the run gave, or it raises what the run raised."""
        if isinstance(self.ran[case], BaseException):
            raise self.ran[case]
        return self.ran[case]

    def known(self, output: str, case: Case) -> Slips:
        """The mistakes that explain an output of a case, and what they make of it."""
        came = {x: y[output] for x, y in self.ran.items() if not isinstance(y, BaseException)}
        answers = {x: replace(with_mistakes(x), outputs={output: y[None, None]}) for x, y in came.items()}
        right = [x for x in answers.values() if x.fits(RIGHT, (output,))]
        mine = answers[case]
        names = known([mine, *right], output)
        if output == "L" and "O" in self.ran[case]:  # which is compared first
            given = replace(mine, outputs={"O": self.ran[case]["O"][None, None]})
            names = [x for x in names if given.fits(Variant((x.name,)), ("O",))] if given.fits(RIGHT, ("O",)) else names
        of_all = {x.name: sum(one.fits(Variant((x.name,)), (output,)) for one in answers.values()) for x in names}
        names.sort(key=lambda x: -of_all[x.name])  # what explains the most cases comes first
        return {named(output, x.name): mine.variant(Variant((x.name,)), output)[0, 0] for x in names}


def attempted(run, case: Case):
    """What a run gives, or the error that it raises."""
    try:
        return run(case)
    except (Exception, SystemExit) as error:
        return error
