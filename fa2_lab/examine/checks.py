"""Checks that need more calls to a function: memory past the end of tensors, views, repeated calls and dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from fa2_lab.examine.arguments import NotExamined
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import BITS, AttentionCase, case, rounded
from fa2_lab.examine.guards import FENCE
from fa2_lab.examine.layouts import axes
from fa2_lab.examine.match import GRADIENTS, RIGHT, UNMASKED, Answer, Finding, Variant, describe_error, explain_part
from fa2_lab.examine.subject import Subject, dtypes


def with_equal_heads(x: AttentionCase) -> AttentionCase:
    """Return a copy of the case in which all batch entries and heads have the same q, k and v."""
    q, k, v = (np.broadcast_to(y[:1, :1], y.shape) for y in (x.q, x.k, x.v))
    return replace(x, q=q, k=k, v=v)


# (mistake, description, change to the case, attributes to set on the Subject). If the output for the changed case is
# wrong, the function makes this mistake.
AGAIN: list[tuple] = [
    ("batch-dependent", "the last batch entry", lambda x: x.part(slice(-1, None)), {}),
    ("unwritten", "where torch.empty is full of NaN", replace, dict(unset=np.nan)),
    ("dO-strides", "dO with strides 0", lambda x: replace(x, dO=np.ones_like(x.dO)), {}),
]
OF_ALL = ("batch-dependent", "unwritten")  # mistakes for which all outputs are compared, not only O
VIEWS: list[tuple] = [  # (mistake, description, memory layout of the inputs, value that fills the gaps)
    ("strides-ignored", "heads that lie apart in memory", "gapped", 0.0),
    ("strides-ignored", "the first two axes are exchanged in memory", "swapped", 0.0),
    ("strides-ignored", "heads of V alone lie apart in memory", ("", "", "gapped"), 0.0),
    ("reads-past-end", "NaN after the last row of each head", "gapped", np.nan),
    ("strides-ignored", "the first axis has stride 0", "expanded", 0.0),
    # This is a finding only if all other views are read correctly.
    ("last-axis-strided", "the last axis has a stride above 1", "turned", 0.0),
]


def checks(subject: Subject, answers: list[Answer], variant: Variant) -> Iterator[Finding]:
    """Yield the findings of all checks that need further calls of the function."""
    plain = [x for x in answers if x.case.group == "plain"]
    base = next((x for x in plain if x.case.q.shape[0] > 1), plain[0])
    lacks = [x for x in GRADIENTS if x not in base.outputs]
    if 0 < len(lacks) < 3:
        yield Finding("gradient-missing", ", ".join(lacks), case=base.case)
    is_one = axes(subject.layout)[0] == "n" or subject.takes("pages")  # no batch or head axis comes first
    tests = [*AGAIN]
    # subject.fill is 0 instead of NaN if the function reads past its inputs.
    for name, where, x, fill in VIEWS if np.isnan(subject.fill) else ():
        if x != "expanded" or not is_one:
            tests.append((name, where, with_equal_heads if x == "expanded" else replace, dict(place=x, fill=fill)))
    tests += [("precision", x, replace, dict(dtype=x)) for x in kinds(subject) if x != subject.dtype]
    is_strided = False  # whether a view was read as if it were contiguous
    for name, where, change, how in tests:
        for first in plain[:3] if name == "precision" else [base]:
            of_all = ("O", "L", *GRADIENTS) if name in OF_ALL else ("O",)
            outputs: tuple[str, ...] = GRADIENTS if name == "dO-strides" else of_all
            outputs = tuple(x for x in outputs if x in first.outputs and first.fits(variant, (x,)))
            with suppress(NotExamined):  # the function may reject the case
                answer = subject.like(**how).ask(change(first.case), gradients=name in (*OF_ALL, "dO-strides"))
                if not answer.fits(variant, outputs) and not (is_strided and name == "last-axis-strided"):
                    is_strided = is_strided or name == "strides-ignored"
                    allowed = f"; rounding allows {answer.bound('O'):.1e}" if name == "precision" else ""
                    yield Finding(name, where + allowed, describe_error([answer], variant, outputs)[1], answer.case)
    with suppress(NotExamined):
        yield from rows_without_keys(subject, answers, variant)
    yield from behind_lengths(subject, answers, variant)
    if all(x.fits(variant, ("O",)) for x in answers if x.case.group == "causal"):
        yield from positions(subject, variant)
    with suppress(NotExamined):
        yield from dropout(subject, variant)


def kinds(subject: Subject) -> list[str]:
    """Return the dtypes with which the function can be called, if its library is NumPy or torch."""
    if subject.library == "numpy":
        return ["float64", "float32", "float16"]
    some = dtypes("torch") if subject.library == "torch" else ()
    interpreted = subject.has_kernels("InterpretedFunction")  # the interpreter multiplies bf16 as integers
    return [x for x in some if x != "bfloat16" or not interpreted]


def coarse_sums(subject: Subject, variant: Variant, takes_cross: bool) -> Iterator[Finding]:
    """Compare the error in 16 bits with that of an attention that rounds P and O to 16 bits, but not its sums.

    Yield a finding if the function's error is more than three times as large and grows with the number of keys, or if
    dV has the error caused by a rounded L. The number of keys is varied only if `takes_cross`, because it then differs
    from the number of queries. If the scores are in 16 bits as well, the finding about the sums is only a remark,
    because the function then computes everything in 16 bits. If the scores are in 16 bits, but P and its sums are not,
    this is also a remark, except for functions of NumPy arrays.
    """

    def share(answer: Answer, output: str, rounds: str) -> float:
        """Return the fraction of this mistake's error that is present in an output."""
        want = answer.variant(variant, output)
        off = answer.variant(Variant((*variant.names, rounds), 0, BITS[dtype]), output) - want
        return float(((answer.outputs[output] - want) * off).sum() / (off * off).sum())

    def ask(N_q: int, N_k: int, **more: Any) -> Answer:
        problem = case(
            "sums", -(-N_q // multiple) * multiple, -(-N_k // multiple) * multiple, subject.d, heads=1, **more
        )
        if subject.lacks(problem):
            raise NotExamined("")
        return subject.like(dtype=dtype).ask(subject.fitted(problem))

    multiple = subject.multiple
    for dtype in [x for x in kinds(subject) if BITS[x] < 16]:
        with suppress(NotExamined):
            answer = ask(32, 16, size=6.0)
            of_scores = share(answer, "O", "scores-rounded") > 0.5
            # If all scores are 0 and there are 3 · 2ⁿ keys, P is 1/3 · 2⁻ⁿ, which must be rounded.
            of_P = share(ask(32, max(48, 3 * multiple), size=0.0), "O", "weights-rounded") > 0.5
            times = []
            for long in [ask(32, n) for n in (1024, 4096) if takes_cross]:
                usual = long.variant(Variant((*variant.names, "p-rounded"), 64, BITS[dtype]), "O")
                want, got = long.variant(variant, "O"), long.outputs["O"]
                times.append(float(np.std(got - want) / np.std(rounded(usual, BITS[dtype]) - want)))
            if times and times[1] > max(3, 1.4 * times[0]):
                name = "all-coarse" if of_scores else "sums-coarse"
                said = f"{dtype}, {times[0]:.1f} times the usual error with 1024 keys and {times[1]:.1f} with 4096"
                yield Finding(name, said, case=long.case)
            elif of_scores and not of_P and subject.library == "torch":  # NumPy code is for float32 and float64
                n = 2 ** BITS[dtype] + multiple  # if all scores are 0, this is l, and it must be rounded
                if share(ask(n if not takes_cross else 32, n, size=0.0), "O", "sums-rounded") > 0.5:
                    continue
                yield Finding("scores-coarse", f"O in {dtype}", case=answer.case)
        with suppress(NotExamined):
            answer = ask(512, 512, gradients=True)
            if "dV" in answer.outputs and 0.8 < share(answer, "dV", "L-rounded") < 1.2:
                of_L = Variant((*variant.names, "L-rounded"), 0, BITS[dtype])
                yield Finding("L-rounded", f"dV in {dtype}", case=answer.case, variant=of_L)


def positions(subject: Subject, variant: Variant) -> Iterator[Finding]:
    """Check in bf16 whether a row's causal mask ends at the right key, and yield a finding if it does not.

    The scores are chosen such that, if a row also saw the key after its own, that key would get almost all the weight.
    """
    problem = case("causal", 300, d=subject.d, heads=1, causal=True)
    k = np.sign(problem.k)
    problem = subject.fitted(replace(problem, q=3 * np.roll(k, -1, axis=2), k=k))
    if "bfloat16" in kinds(subject) and not subject.lacks(problem):
        with suppress(NotExamined):
            answer = subject.like(dtype="bfloat16").ask(problem, gradients=False)
            if not answer.fits(variant, ("O",)):
                yield Finding("positions-rounded", *describe_error([answer], variant, ("O",)))


def repeated(subject: Subject, first: Answer) -> Iterator[Finding]:
    """Repeat the first call of the examination three times, and yield a finding if an output differs."""
    answers = [subject.ask(first.case).outputs for _ in range(3)]
    for name, before in first.outputs.items():
        x, near = [y[name] for y in answers if name in y], first.bound(name)
        exact = name not in GRADIENTS  # gradients may be summed in any order
        if not all(np.allclose(y, x[0], rtol=0, atol=near * (not exact), equal_nan=True) for y in x):
            grows = np.allclose(x[2] - x[1], x[1] - x[0], rtol=1e-3, atol=near)
            where = f"{name} in three calls in a row"
            much = float(np.ptp(x, axis=0).max())
            yield Finding("state-kept" if grows else "not-deterministic", where, much, first.case)
            return
        if not np.allclose(x[0], before, rtol=0, atol=near, equal_nan=True):
            yield Finding("state-kept", f"{name} in the first call, repeated after all others", case=first.case)
            return
    turned = {x: np.roll(getattr(first.case, x), 1, axis=2) for x in "qkv"}
    if first.fits(RIGHT, ("O",)) and not subject.ask(replace(first.case, **turned)).fits(RIGHT, ("O",)):
        yield Finding("state-kept", "O of other numbers in the same shape", case=first.case)


def rows_without_keys(subject: Subject, answers: list[Answer], variant: Variant) -> Iterator[Finding]:
    """Check rows that see no key, and yield findings about their O, about their L, or about the gradients.

    A mean of values as O comes from masks with a large finite number instead of −∞. It is a finding if the function
    calls kernels, because those of FlashAttention return 0. Otherwise, it is a remark, because array code often returns
    it. An L that is not −∞ is a finding if O is 0.

    NaN in the gradients of other rows is a finding, and so are gradients that do not match O = 0. If the function does
    not compute O, its gradients may also be those of masks that use a large finite number instead of −∞.
    """
    some = [x for x in answers if x.case.group.startswith("empty") and x.fits(variant, ("O",))]
    if not subject.gives_O and not any(x.case.group == "cross" and subject.is_right(x, variant) for x in answers):
        return  # it is only for N_k = N_q
    for answer in [x for x in some if x.empty(variant).any()]:
        rows, case, found, bound = answer.empty(variant), answer.case, answer.outputs, answer.bound("O")
        got, mean = (x[rows] for x in (found["O"], answer.mean()))
        filled = subject.like(unset=FENCE).ask(case, gradients=False).outputs["O"][rows]
        verdicts = {
            "unwritten": (filled == FENCE).any(),
            "empty-nan": np.isnan(got).any(),
            "empty-mean": np.abs(got - mean).max() < bound,
            "empty-unmasked": bound < np.abs(got).max()
            and np.abs(got - answer.variant(UNMASKED, "O")[rows]).max() < 0.01,
            "empty-other": np.abs(got).max() > bound,
            "L-empty": "L" in found and not np.isneginf(found["L"][rows]).all(),
        }
        names = [name for name, holds in verdicts.items() if holds][:1]
        if names in (["empty-mean"], ["empty-unmasked"]) and subject.calls_kernels():
            names = ["empty-finite"]
        if "dQ" in found:
            spreads = any(np.isnan(x).any() for x in (found["dQ"][~rows], found["dK"], found["dV"]))
            wrong = not answer.fits(variant, GRADIENTS) or np.abs(found["dQ"][rows]).max() > answer.bound("dQ")
            if "empty-nan" in names:  # torch's own softmax gives NaN as well
                names += ["gradient-nan"] * spreads
            elif spreads or (wrong and not names):
                is_finite = not spreads and not subject.gives_O and of_finite_masks(answer, variant, rows)
                names.append("empty-mean" if is_finite else "gradient-empty")
        where = f"{int(rows.sum())} rows" + ", in dV" * (not subject.gives_O)
        yield from [Finding(name, where, case=case) for name in names]


def behind_lengths(subject: Subject, answers: list[Answer], variant: Variant) -> Iterator[Finding]:
    """Put NaN past the length of each batch entry, and yield a finding if it reaches O.

    In a kernel, this is a mistake, because kernels mask what they load. Array code multiplies all of V.
    """
    some = [x for x in answers if x.case.group.startswith("lengths") and x.fits(variant, ("O",))]
    for x in some[-1:]:
        n = x.case.options["key_lengths"][:, None, None, None]
        k, v = (np.where(np.arange(y.shape[2])[:, None] < n, y, np.nan) for y in (x.case.k, x.case.v))
        with suppress(NotExamined):
            O = subject.ask(replace(x.case, k=k, v=v), gradients=False).outputs["O"]
            if np.isnan(O[np.isfinite(x.outputs["O"])]).any():
                yield Finding(
                    "reads-past-length" if subject.calls_kernels() else "length-nan",
                    "NaN in K and V",
                    case=x.case,
                )


def of_finite_masks(answer: Answer, variant: Variant, rows: np.ndarray) -> bool:
    """Return whether the gradients are those of masks that use a large finite number instead of −∞.

    In this case, dQ is right, and the rows in `rows`, which see no key, add to dV as if all their weights were 1 / N_k,
    or as if their scores were not masked.
    """
    dO = answer.case.dO * rows[..., None]
    parts = (attention(replace(answer.case, q=z * answer.case.q, dO=dO), *UNMASKED, gradients=True) for z in (0, 1))
    added = answer.outputs["dV"] - answer.variant(variant, "dV")
    return answer.fits(variant, ("dQ",)) and any(np.abs(added - x["dV"]).max() <= answer.bound("dV") for x in parts)


def dropout(subject: Subject, variant: Variant) -> Iterator[Finding]:
    """Check the factors Z that dropout multiplies P by, and yield a finding if they or the gradients are wrong.

    Z can be read off O = (P ∘ Z) V if V is the identity, so that each key has its own column of O.
    """
    if not subject.takes("dropout") or subject.takes("kept"):
        return
    n, d, p = max(subject.d, subject.multiple), subject.d, 0.25
    options: dict[str, Any] = dict(dropout=p, seed=1) if subject.takes("seed") else dict(dropout=p)
    zero = case("dropout", 512 // subject.multiple * subject.multiple, n, d=d, gradients=True, **options)
    zero = replace(zero, v=np.broadcast_to(np.eye(n, d), zero.v.shape))
    Z = subject.ask(replace(zero, q=np.ones_like(zero.q), k=np.ones_like(zero.k)), gradients=False).outputs["O"] * n
    kept, value = float((Z > 1e-3).mean()) * n / d, float(np.median(Z[Z > 1e-3])) if Z.any() else 0.0
    verdicts = {
        "dropout-ignored": np.ptp(Z) < 0.01,
        "dropout-inverted": abs(kept - p) < 0.05,
        "dropout-normalised": n == d and np.abs(Z.sum(axis=-1) - n).max() < 0.01 * n,
        "dropout-factor": abs(value - 1) < 0.01,
        "dropout-shared": np.array_equal(Z[:, 0] > 0, Z[:, 1] > 0) or (Z[..., :1, :] == Z).all(),
    }
    said = f"p = {p}: {kept:.0%} kept, factor {value:.3g}"
    found = [Finding(name, said, case=zero) for name, holds in verdicts.items() if holds][:1]
    if n == d and not found and not subject.takes("dO"):
        answer = subject.ask(zero)
        drawn = answer.outputs["O"] > answer.variant(variant, "O") / 2
        found = explain_part([answer.of(kept=drawn)], variant, "gradients", GRADIENTS, ())[0]
        names = {"unknown": "dropout-other-mask"}  # a smaller case would draw other factors
        found = [x._replace(name=names.get(x.name, x.name), case=None) for x in found]
    yield from found


def guarded(subject: Subject, case: AttentionCase) -> tuple[Answer, list[Finding]]:
    """Run a case with NaN before and after each input in memory, and return the answer and the findings.

    If NaN reaches O, run this case and all later cases with zeros instead of NaN.
    """
    answer = subject.ask(case)
    O, want = answer.outputs["O"], answer.variant(RIGHT, "O")
    if np.isnan(subject.fill) and case.group in ("plain", "causal", "width") and np.isnan(O[np.isfinite(want)]).any():
        other = subject.like(fill=0.0).ask(case)
        if np.isnan(other.outputs["O"]).sum() < np.isnan(O).sum():
            subject.fill = 0.0
            return other, [Finding("reads-past-end", "NaN before and after the inputs", case=case)]
    return answer, []
