"""Infer how a function computes L, dQ, dK and dV, and describe the errors in these outputs in sentences.

dV = Pᵀ dO, dQ = τ dS K and dK = τ dSᵀ Q are weighted sums of the rows of dO, K and Q. If these rows are orthogonal, the
weights of the sums can be read off the gradients. They show P, as the backward pass uses it, and dS = P ∘ (dP − D).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from fa2_lab.examine.arguments import NotExamined
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import AttentionCase, rounded
from fa2_lab.examine.catalogue import CATALOGUE, OF_DS, OF_SLOPE, ROWS
from fa2_lab.examine.formulas import centred, describe_rule, formula, number, values
from fa2_lab.examine.match import GRADIENTS, Answer, Variant, candidates, spans
from fa2_lab.examine.subject import Subject
from fa2_lab.examine.weights import (
    Reading,
    arrays,
    describe_exchange,
    describe_factor_of_some,
    describe_factors,
    describe_L,
    describe_mask,
    describe_scale,
    in_words,
    parts_of_L,
    weights,
)

SUMMED = {"dV": "dO", "dQ": "k", "dK": "q"}  # the input whose rows each gradient sums
NOUN = {"q": "Q", "k": "K", "v": "V", "dO": "dO"}
PLURAL = {"is": " are", "sums": " sum", "uses": " use"}


class Backward:
    """A function's gradients for a case in which q, k, v and dO each have orthogonal rows."""

    def __init__(self, subject: Subject, like: AttentionCase, variant: Variant) -> None:
        self.variant = variant
        rows = max(like.q[..., 0].size, like.k[..., 0].size)
        for d in (1 << (2 * rows - 1).bit_length(), like.q.shape[3]):
            if rows <= d:
                with suppress(NotExamined):
                    self.answer = subject.ask(orthogonal(like, d))
                    break
        else:
            raise NotExamined("its head dimension is too small for orthogonal rows")
        self.case = case = self.answer.case
        self.group = case.q.shape[1] // case.k.shape[1]
        self.got = {x: self.answer.outputs[x] for x in GRADIENTS if x in self.answer.outputs}
        right = attention(case, *variant, gradients=True)
        self.right = {x: right[x] for x in GRADIENTS}
        self.made = {x: self.sums(self.got[x], SUMMED[x]) for x in self.got}
        self.should = {x: self.sums(self.right[x], SUMMED[x]) for x in GRADIENTS}
        P = weights(lambda x: attention(x, *variant)["O"], case)
        self.known = arrays(case, P, right["L"]) | dict(O=right["O"])
        dP = case.dO @ self.known["v"].swapaxes(2, 3)
        dL = np.zeros_like(right["L"]) if case.dL is None else case.dL
        kept = case.options.get("kept")
        Z = 1.0 if kept is None else kept / (1 - case.options["dropout"])
        D = (case.dO * right["O"]).sum(axis=3, keepdims=True) - dL[..., None]
        self.known |= dict(dP=Z * dP, D=D, dL=dL[..., None], Z=Z, dS=P * (Z * dP - D))
        cap = case.options.get("softcap")
        self.slope = 1 - (self.known["X"] / cap) ** 2 if cap else 1.0
        self.known["dS"] = self.slope * self.known["dS"]

    def sums(self, G: np.ndarray, name: str) -> np.ndarray:
        """Return the weights that express each row of G as a weighted sum of the rows of the input `name`.

        The axes are (batch, heads, rows) of G, then (batch, heads, rows) of the input.
        """
        rows = getattr(self.case, name)
        return np.einsum("abcd,xyzd->abcxyz", G, rows) / (rows[0, 0, 0] ** 2).sum()

    def with_rounded(self, output: str, step: str, bits: int) -> np.ndarray:
        """Return a gradient as it would be if one step of its computation were rounded to `bits` bits."""
        if step == output:
            return rounded(self.right[output], bits)
        rows = getattr(self.case, SUMMED[output])
        known = {x: self.known[x] for x in ("P", "dP", "D", "dS")}
        known |= {step: rounded(known[step], bits)} if step in known else {}
        P, dP, D, dS = known.values()
        D = (P * dP).sum(axis=3, keepdims=True) if step == "P" and output != "dV" else D
        W = self.known["Z"] * P if output == "dV" else dS if step == "dS" else P * (dP - D)
        M = np.zeros_like(self.should[output])
        b, h = np.ix_(np.arange(len(W)), np.arange(W.shape[1]))
        if output == "dQ":
            M[b, h, :, b, h // self.group] = self.known["tau"] * W
        else:
            M[b, h // self.group, :, b, h] = (self.known["tau"] if output == "dK" else 1) * W.swapaxes(2, 3)
        return np.einsum("abcxyz,xyzd->abcd", M, rows if step in known else rounded(rows, bits))

    def rest(self, output: str, *names: str) -> float:
        """Fit the rows of a gradient by weighted sums of the rows of these inputs, and return the largest residual.

        The residual is divided by the gradient's rounding error.
        """
        G = self.got[output]
        rows = np.concatenate([getattr(self.case, name).reshape(-1, G.shape[3]) for name in names])
        flat = G.reshape(-1, G.shape[3])
        left = np.abs(flat - np.linalg.lstsq(rows.T, flat.T, rcond=None)[0].T @ rows).max()
        return float(left / self.answer.bound(output) / self.size(output))

    def size(self, output: str) -> float:
        """Return the ratio of this gradient's largest element to that of the correct gradient, or 1 if it is smaller.

        The gradient's rounding error is larger by the same factor.
        """
        return max(1.0, float(np.abs(self.got[output]).max() / np.abs(self.right[output]).max()))

    def own(self, M: np.ndarray, output: str) -> np.ndarray:
        """Return the weights between each query head's rows and its own K/V head's keys: (batch, heads, N_q, N_k)."""
        b, h = np.ix_(np.arange(len(self.case.q)), np.arange(self.case.q.shape[1]))
        if output == "dQ":
            return M[b, h, :, b, h // self.group]
        return M[b, h // self.group, :, b, h].swapaxes(2, 3)

    def near(self, output: str) -> float:
        """Return the largest error that rounding can cause in a weight read from this gradient."""
        return 8 * self.answer.bound(output) / float((getattr(self.case, SUMMED[output])[0, 0, 0] ** 2).sum() ** 0.5)

    def reading(self, W: np.ndarray, right: np.ndarray, near: float) -> Reading:
        return Reading(self.case, np.where(np.abs(W) < max(near, 1e-6), 0, W), right, near, self.known)


def orthogonal(case: AttentionCase, d: int) -> AttentionCase:
    """Return a variant of the case with head dimension d, in which q, k, v and dO each have orthogonal rows."""
    draw = np.random.default_rng(3).standard_normal
    size = (1.4 * d**0.5 / (case.options.get("scale") or d**-0.5)) ** 0.5
    made = {}
    for name, length in dict(q=size, k=size, v=d**0.5, dO=2.0).items():
        shape = getattr(case, name).shape[:3]
        made[name] = length * np.linalg.qr(draw((d, int(np.prod(shape)))))[0].T.reshape(*shape, d)
    return replace(case, **made, usual_d=case.usual_d or case.q.shape[3])


def read_backward(subject: Subject, answers: Sequence[Answer], variant: Variant, outputs: Sequence[str]) -> list[str]:
    """Return sentences about the errors in `outputs` (any of dQ, dK and dV) in the answers to one group of cases."""
    runs = []
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in sorted(answers, key=lambda x: x.case.q.size + x.case.k.size):
            with suppress(NotExamined):
                runs.append(Backward(subject, x.case, variant))
        runs = [x for x in runs if all(np.isfinite(x.got[y]).all() for y in outputs)]
        if not runs:  # the function rejects these cases, or returns NaN
            return []
        said = describe_gradients(runs, [x for x in ("dV", "dQ", "dK") if x in outputs], subject.tiles())
        return said or describe_dO(subject, runs[0], outputs)


def describe_dO(subject: Subject, run: Backward, outputs: Sequence[str]) -> list[str]:
    """Return a list with one sentence that names the gradients not proportional to dO, or an empty list."""
    other = subject.ask(replace(run.case, dO=-2 * run.case.dO)).outputs
    near = {x: 4 * run.answer.bound(x) for x in outputs}
    same = [x for x in outputs if np.abs(other[x] - run.got[x]).max() <= near[x]]
    apart = [x for x in outputs if np.abs(other[x] + 2 * run.got[x]).max() > near[x]]
    if same:
        return [f"{' and '.join(same)} do{'es' * (len(same) == 1)} not depend on dO"]
    return [f"{' and '.join(apart)} {'is' if len(apart) == 1 else 'are'} not proportional to dO"] if apart else []


def describe_gradients(runs: list[Backward], outputs: list[str], sizes: Sequence[int]) -> list[str]:
    """Return sentences about the errors in these gradients, given several runs."""
    said, of_dS = {}, []
    P_used = [x.own(x.made["dV"], "dV") for x in runs] if "dV" in outputs else []
    for output in outputs:
        if all(np.abs(x.got[output] - x.right[output]).max() <= x.answer.bound(output) for x in runs):
            continue
        if sentence := describe_rounding(runs, output) or describe_sums(runs, output):
            said[output] = sentence
        elif output == "dV":
            said["dV"] = describe_P(runs, P_used, sizes)
        else:
            of_dS.append(output)
    if P_used and of_dS and all(is_explained_by_P(runs, output, P_used) for output in of_dS):
        said["the backward pass"], of_dS = said.pop("dV"), []
    if len(of_dS) == 2:
        both = [[x.own(x.made[y], y) for y in of_dS] for x in runs]
        near = [2 * x.near("dQ") + 2 * x.near("dK") for x in runs]
        if all(np.abs(a - b).max() <= c for (a, b), c in zip(both, near, strict=True)):
            of_dS, said["dS"] = [], describe_dS(runs, "dQ", sizes)
    said |= {output: describe_dS(runs, output, sizes) for output in of_dS}
    alike: dict[str, list[str]] = {}
    for name, sentence in said.items():
        alike.setdefault(sentence, []).append(name)
    return [joined(" and ".join(names), sentence) for sentence, names in alike.items() if sentence]


def joined(name: str, sentence: str) -> str:
    """Return a sentence with `name` as its subject, and with a plural verb if `name` lists two gradients."""
    if "{name}" in sentence:
        sentence = sentence.format(name=name)
        return re.sub(r" (is|sums|uses)\b", lambda x: PLURAL[x[1]], sentence, count=1) if " and d" in name else sentence
    return f"In {name}, {sentence[0].lower()}{sentence[1:]}"


def first(ways: Sequence, readings: list[Reading], sizes: Sequence[int]) -> str:
    return next(filter(None, (about(readings, sizes) for about in ways)), "")


def describe_P(runs: list[Backward], used: list[np.ndarray], sizes: Sequence[int]) -> str:
    """Return a sentence about what is wrong with the P that dV was computed from, or "" if nothing fits."""
    some = [x.reading(W, x.known["Z"] * x.known["P"], x.near("dV")) for x, W in zip(runs, used, strict=True)]
    some = [
        x._replace(right=x.known["P"]) if np.ndim(y.known["Z"]) == 0 else x for x, y in zip(some, runs, strict=True)
    ]
    if said := (describe_forward_mistake(some, runs, sizes) if runs[0].case.options else ""):
        return said
    if said := first((describe_exchange, in_words(describe_mask), in_words(describe_factor_of_some)), some, sizes):
        return said
    if said := formula([(x.W / x.right, x.quantities(OF_SLOPE), x.clear) for x in some], runs):
        return f"{{name}} uses P ∘ ({said}) instead of P"
    return first(
        (describe_scale, describe_L, describe_factors, *((describe_mask,) if is_mask(some) else ())), some, sizes
    )


def is_mask(readings: list[Reading]) -> bool:
    """Return whether the weights differ from the correct ones only in which of them are 0."""
    return all((np.abs(x.W - x.right) <= x.near)[(x.W != 0) & (x.known["P"] != 0)].all() for x in readings)


def describe_forward_mistake(readings: list[Reading], runs: list[Backward], sizes: Sequence[int]) -> str:
    """Return a sentence that names a known forward mistake with the same weights, up to a factor per row, or ""."""

    def is_alike(x: Reading, run: Backward, variant: Variant) -> bool:
        P = weights(lambda case: attention(case, *variant)["O"], x.case)
        if np.abs(x.W - P).max() <= 2 * x.near:
            return True
        W, P, right = (y / np.maximum(y.sum(axis=3, keepdims=True), 1e-9) for y in (x.W, P, x.right))
        return bool(np.abs(W - P).max() <= 2 * x.near < np.abs(P - right).max())

    def is_right_without_options(variant: Variant, run: Backward) -> bool:
        # If a mistake also occurs without options, it is reported only for the cases that have none.
        a, b = (attention(replace(run.case, options={}), *x)["O"] for x in (variant, run.variant))
        return not run.case.options or np.allclose(a, b)

    wrong = [(x, y) for x, y in zip(readings, runs, strict=True) if x.is_wrong]
    for variant in candidates(runs[0].variant, "O", sizes):
        known = CATALOGUE[variant.names[-1]]
        is_mask = not known.depends_on or (known.depends_on == "B" and re.search("visited|ahead", str(known.edits)))
        if (
            known.part == "O"
            and is_mask
            and all(is_alike(x, y, variant) and is_right_without_options(variant, y) for x, y in wrong)
        ):
            said = known.description
            return f"P in {{name}} is that of a wrong forward pass: {said[0].lower()}{said[1:]}"
    return ""


def describe_rounding(runs: list[Backward], output: str) -> str:
    """Return a sentence that names the rounded step behind a gradient's error, or "" if the error is too large."""

    def error(step: str, bits: int) -> float:
        wants = (x.with_rounded(output, step, bits) if step else x.right[output] for x in runs)
        return max(float(np.std(x.got[output] - y)) for x, y in zip(runs, wants, strict=True))

    far = error("", 0) / max(float(np.std(x.right[output])) for x in runs)
    if not far < 2.0**-6:
        return ""
    steps = [output, SUMMED[output], "P", *(["D", "dP", "dS"] if output != "dV" else [])]
    bits, step = min(((bits, step) for bits in (11, 8) for step in steps), key=lambda x: error(x[1], x[0]))
    if error(step, bits) < error("", 0) / 3:
        of_step = "rounded" if step == output else f"computed from a {NOUN.get(step, step)} that is rounded"
        return f"{{name}} is {of_step} to {bits} bits"
    return f"{{name}} is right, but as inaccurate as in {'bf16' if far > 2.0**-11 else 'fp16 or TF32'}"


def describe_sums(runs: list[Backward], output: str) -> str:
    """Return a sentence if a gradient is off by a factor or sums the wrong rows, else ""."""
    ratios = [(x.made[output] * x.should[output]).sum() / (x.should[output] ** 2).sum() for x in runs]
    is_factor = all(
        np.abs(x.got[output] - c * x.right[output]).max() <= 2 * max(1, abs(c)) * x.answer.bound(output)
        for x, c in zip(runs, ratios, strict=True)
    )
    if is_factor:
        is_zero = all(abs(c) < 1e-6 for c in ratios)
        return "{name} is 0" if is_zero else f"{{name}} is multiplied by {number(ratios, runs) or values(ratios)}"
    for other in GRADIENTS:
        if other != output and all(is_alike(x, output, other) for x in runs):
            return f"{{name}} is what {other} should be"
    wrong = [x for x in runs if x.rest(output, SUMMED[output]) > 1]
    if wrong:
        mine = SUMMED[output]
        for other in [x for x in NOUN if x != mine]:
            if all(x.rest(output, other) <= 2 for x in wrong):
                return f"{{name}} sums the rows of {NOUN[other]} instead of those of {NOUN[mine]}"
            if all(x.rest(output, mine, other) <= 2 for x in wrong):
                return f"{{name}} sums not only the rows of {NOUN[mine]}, but also those of {NOUN[other]}"
        return describe_elements(wrong, output)
    for x in runs:
        made, should = (
            (np.abs(y) > x.size(output) * x.near(output)).any(axis=(2, 5)) for y in (x.made[output], x.should[output])
        )  # (batch, heads, batch, heads): which heads are summed
        if made.any() and not np.array_equal(made, should):
            return describe_heads(x, output, made, should)
    return ""


def is_alike(x: Backward, output: str, other: str) -> bool:
    """Return whether the gradient `output` equals the correct gradient `other`."""
    a, b = x.got[output], x.right[other]
    return a.shape == b.shape and bool(np.abs(a - b).max() <= 2 * x.answer.bound(other))


def describe_elements(runs: list[Backward], output: str) -> str:
    """Return a sentence if a gradient is wrong by a simple rule, or is wrong only in some features, else ""."""
    got, right = ([getattr(x, y)[output] for x in runs] for y in ("got", "right"))
    bounds = [x.answer.bound(output) for x in runs]
    if said := describe_rule(got, right, bounds):
        return said
    wrong = [np.abs(x - y) > b for x, y, b in zip(got, right, bounds, strict=True)]
    of_d = [np.nonzero(x.any(axis=(0, 1, 2)))[0] for x in wrong]
    if any(len(x) < y.shape[3] for x, y in zip(of_d, got, strict=True)):
        x, y, n = got[0], of_d[0], got[0].shape[3]
        zero = " and 0 there" if np.abs(x[..., y]).max() < bounds[0] else ""
        part = "the last feature" if list(y) == [n - 1] else "the first feature" if list(y) == [0] else ""
        part = part or ("the second half of the features" if list(y) == [*range(n // 2, n)] else "")
        return f"{{name}} is wrong in {part or f'the features {spans(y)} of {n}'}{zero}"
    return ""


def describe_heads(x: Backward, output: str, made: np.ndarray, should: np.ndarray) -> str:
    """Describe the error if a gradient sums the rows of too few heads, or of the wrong heads or batch entries, else "".

    `made` and `should` are boolean arrays: which heads each head of the gradient sums, and which it should sum. Their
    axes are (batch, heads) of the gradient, then (batch, heads) of the summed rows.
    """
    rows = f"rows of {NOUN[SUMMED[output]]}"
    lacks, more = should & ~made, made & ~should
    heads = np.argwhere(lacks)[:, 3]
    if not more.any() and output != "dQ" and x.group > 1:
        places = sorted({int(h) % x.group for h in heads})
        if len(heads) == len(places) * lacks.shape[0] * lacks.shape[1]:
            kept = [str(n) for n in range(x.group) if n not in places]
            return f"{{name}} sums only query head {' and '.join(kept)} of each group of {x.group}, counted from 0"
    if not made.any(axis=(2, 3)).all():
        at = [f"head {h} of batch entry {b}" for b, h in np.argwhere(~made.any(axis=(2, 3)) & should.any(axis=(2, 3)))]
        return f"{{name}} is 0 in {', '.join(at[:3])}" if at and not more.any() else ""
    b, h = np.argwhere(more.any(axis=(2, 3)))[0]
    of = np.argwhere(made[b, h])
    all_b, all_h = (len(set(of[:, a])) == made.shape[a + 2] for a in (0, 1))
    if all_b and made.shape[0] > 1 and not (lacks.any() or all_h):
        return f"{{name}} of each batch entry sums the {rows} of all batch entries"
    if all_h and made.shape[3] > x.group and not lacks.any():
        return f"{{name}} of each head sums the {rows} of all heads"
    some = " and ".join(f"head {d} of batch entry {c}" for c, d in of[:3])
    return f"{{name}} of head {h} of batch entry {b} sums the {rows} of {some}{' and others' * (len(of) > 3)}"


def is_explained_by_P(runs: list[Backward], output: str, P_used: list[np.ndarray]) -> bool:
    """Return whether the wrong P that dV reveals also explains the error in this gradient."""
    for x, P in zip(runs, P_used, strict=True):
        dP, D, W = x.known["dP"], x.known["D"], x.own(x.made[output], output) / x.known["tau"]
        near = x.near(output) / x.known["tau"] * 2
        sums = (D, (P * dP).sum(axis=3, keepdims=True))
        if not any(np.abs(W - x.slope * P * (dP - y)).max() <= near * max(1, np.abs(P).max()) for y in sums):
            return False
    return True


def describe_dS(runs: list[Backward], output: str, sizes: Sequence[int]) -> str:
    """Return a sentence about what is wrong with dS, as read from dQ or dK, or "" if nothing fits."""
    taus = [x.known["tau"] for x in runs]
    some = [
        x.reading(x.own(x.made[output], output) / tau, x.known["dS"], x.near(output) / tau)
        for x, tau in zip(runs, taus, strict=True)
    ]
    if said := first((describe_exchange, in_words(describe_mask), in_words(describe_factor_of_some)), some, sizes):
        return said
    if said := describe_rule([x.W for x in some], [x.right for x in some], [x.near for x in some]):
        return said
    parts, slopes, used = [], [], []
    for x in some:
        P, dP, D = (x.known[y] for y in ("P", "dP", "D"))
        clear = P > 200 * max(x.near, 1e-6)
        parts.append((x.W / P, x.quantities(OF_DS), clear))
        far = clear & (np.abs(dP - D) > 0.05) & (P * np.abs(dP - D) > 200 * max(x.near, 1e-6))
        slopes.append((x.W / P / (dP - D), x.quantities(OF_SLOPE), far))
        used.append(x._replace(W=np.where(far, x.W / (dP - D), P), right=P, near=200 * x.near))
    if said := formula(slopes, runs):
        return f"{{name}} is P ∘ (dP − D) ∘ ({said})"
    if (said := formula(parts, runs)) and said != "dP − D":
        return f"{{name}} is P ∘ ({said}) instead of P ∘ (dP − D)"
    if said := first((describe_exchange, describe_factors), used, sizes):
        return f"In P of P ∘ (dP − D), {said[0].lower()}{said[1:]}"
    apart = formula([centred(*part) for part in parts], runs)
    if apart == "dP":
        return "{name} is P ∘ (dP − D), but its D is not the row sum of dO ∘ O"
    if apart:
        return f"{{name}} is P ∘ ({apart} − D), where D is a number of each row, instead of P ∘ (dP − D)"
    return describe_mask(some, sizes) if is_mask(some) else ""


class OfL:
    """The L of an answer, with the arrays that the expressions in catalogue.md use."""

    def __init__(self, answer: Answer, variant: Variant) -> None:
        P = weights(lambda x: attention(x, *variant)["O"], answer.case)
        self.known = arrays(answer.case, P, attention(answer.case, *variant)["L"])
        self.got, self.near = answer.outputs["L"][..., None], 1e-4 + 4 * answer.bound("L")
        self.seen = P.any(axis=3, keepdims=True)
        self.wrong: np.ndarray = self.seen & ~(np.abs(self.got - self.known["L"]) <= self.near)
        self.reading = Reading(answer.case, P, P, self.near, self.known)

    def rows(self, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        """Return {words: boolean array} for each set of rows to which an error in L may be limited."""
        found = self.reading.quantities(ROWS, sizes) | {"the rows in which L is negative": self.known["L"][..., 0] < 0}
        return {name: self.seen & (x[..., None] if x.ndim == 3 else x.astype(bool)) for name, x in found.items()}


def read_L(answers: Sequence[Answer], variant: Variant, sizes: Sequence[int]) -> str:
    """Return a sentence about the error in L, given the answers to one group of cases, or "" if nothing fits."""
    with np.errstate(all="ignore"):
        runs = [OfL(x, variant) for x in answers]
        if not all(np.isfinite(x.got[x.seen]).all() for x in runs):
            return ""
        for bits, dtype in ((11, "fp16 or TF32"), (8, "bf16")):
            off = [[np.abs(x.got - y)[x.seen].max() for y in (x.known["L"], rounded(x.known["L"], bits))] for x in runs]
            if all(b <= max(a / 2, x.near) for (a, b), x in zip(off, runs, strict=True)):
                return f"L is rounded to {bits} bits, as in {dtype}"
        where, wrong = "", [x for x in runs if x.wrong.any()]
        said = formula([(x.got, parts_of_L(x.reading, sizes), x.seen) for x in runs], runs, runs[0].near)
        if not said and not all((x.wrong | ~x.seen).all() for x in wrong):
            rows = [x.rows(sizes) for x in wrong]
            same = [n for n in rows[0] if all(np.array_equal(y[n], x.wrong) for x, y in zip(wrong, rows, strict=True))]
            parts = [(x.got, parts_of_L(x.reading, sizes), x.wrong) for x in wrong]
            said, where = formula(parts, wrong, wrong[0].near) if same else "", f" in {same[0]}" if same else ""
    said = f"that of {said.removeprefix('L of ')}" if said.startswith("L of ") else said
    return f"L is {said}{where} instead of m + log l" if said else ""
