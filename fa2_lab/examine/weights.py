"""Read out the weight that a function gives to each key, and describe in a sentence what is wrong with the weights.

O is linear in V, so V can be a probe: if it is 1 for a single key and feature, that feature of O is the key's weight.
This also explains mistakes that are not in the catalogue.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fa2_lab.examine.arguments import NotExamined
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import OPEN, AttentionCase
from fa2_lab.examine.catalogue import KEYS, OF_KEYS, OF_L, OF_ROWS, OF_TILES, ROWS
from fa2_lab.examine.formulas import CLOSE, formula, number
from fa2_lab.examine.match import Answer, Finding, Variant, conventions, spans
from fa2_lab.examine.subject import Subject

OWN = {0: "its own key"} | {c: f"the key {abs(c)} {'after' if c > 0 else 'before'} its own" for c in range(-4, 5) if c}


class Reading(NamedTuple):
    """The weights W (batch, heads, N_q, N_k) that a function gives to a case's keys, and the correct weights.

    `known` holds the arrays that the expressions in catalogue.md use, such as P.
    """

    case: AttentionCase
    W: np.ndarray
    right: np.ndarray
    near: float  # largest difference that rounding may cause between W and right
    known: dict[str, Any]

    @property
    def are_weights(self) -> bool:
        return self.right is self.known["P"]

    @property
    def clear(self) -> np.ndarray:
        return np.abs(self.right) > 100 * max(self.near, 1e-6)

    @property
    def is_wrong(self) -> bool:
        return not np.abs(self.W - self.right).max() <= self.near

    def quantities(self, table: list[list[str]], sizes: Sequence[int] = (0,)) -> dict[str, np.ndarray]:
        """Evaluate a table of (words, expression) from catalogue.md for each tile size, and return {words: array}."""
        found = {}
        for B, (words, code) in product(sizes, table):
            for c, name in OWN.items() if "{own}" in words else ((0, ""),):
                known = self.known | dict(B=B, own=self.known["own"] + c)
                found[words.format(B=B, own=name)] = eval(code[1:-1], globals() | known)
        return found


def arrays(case: AttentionCase, P: np.ndarray, L: np.ndarray) -> dict[str, Any]:
    """Return {name: array} for all known quantities of a case, given its correct weights P and its correct L."""
    (batch, H, N_q, d), N_k = case.q.shape, case.k.shape[2]
    i, j = np.arange(N_q)[:, None], np.arange(N_k)[None]
    k, v = (np.repeat(x, H // case.k.shape[1], 1) for x in (case.k, case.v))
    tau, L = case.options.get("scale") or d**-0.5, L[..., None]  # τ must not be 0, because the formulas divide by it
    qk = case.q @ k.swapaxes(2, 3) * tau
    S = np.where(P > 0, np.log(P) + L, -np.inf)
    m = S.max(axis=3, keepdims=True)
    is_top_left = case.options.get("causal") and not (P * (j > i)).any()
    mask, lengths, *of_heads = map(case.options.get, ("mask", "key_lengths", "sinks", "slopes"))
    sink, slope = (np.reshape(np.nan if x is None else x, (1, -1, 1, 1)) for x in of_heads)
    sizes = dict(
        bias=np.array([[[[np.nan]]]]) if mask is None or mask.dtype == bool else mask,
        batch=batch,
        H=H,
        group=H // case.k.shape[1],
        N_q=N_q,
        N_k=N_k,
        d=d,
        tau=tau,
        cap=case.options.get("softcap", np.nan),
        n=np.reshape(N_k if lengths is None else lengths, (-1, 1, 1, 1)),
        sink=sink,
        slope=slope,
    )
    known = dict(i=i, j=j, own=i if is_top_left else i + N_k - N_q, X=np.where(P > 0, S, qk), qk=qk, S=S)
    return sizes | known | dict(q=case.q, k=k, v=v, dO=case.dO, P=P, L=L, m=m, l=np.exp(L - m))


def per_tile(of: np.ufunc, P: np.ndarray, B: int, up_to: bool = False) -> np.ndarray:
    """Reduce each tile of B keys with the ufunc `of`, and return the logarithm, repeated for each of the tile's keys.

    If `up_to` is set, each tile is reduced together with all tiles before it.
    """
    x = of.reduceat(P, np.arange(0, P.shape[3], B), axis=3)
    return np.log(of.accumulate(x, axis=3) if up_to else x).repeat(B, axis=3)[..., : P.shape[3]]


def read_out(subject: Subject, finding: Finding, answers: Sequence[Answer]) -> str:
    """Return a sentence about the weights behind a wrong O, or "" if no description fits.

    `answers` are the answers to the finding's group of cases.
    """
    variant, readings = conventions(finding.variant), []
    with suppress(NotExamined), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows without keys give NaN
        for x in sorted(answers, key=lambda x: x.case.q.size + x.case.k.size):
            P = weights(lambda case: attention(case, *variant)["O"], x.case)
            W = (
                P
                if x.fits(variant, ("O",))
                else weights(lambda case: subject.ask(case, gradients=False).outputs["O"], x.case)
            )
            is_number = np.isfinite(W).all(axis=3, keepdims=True)  # otherwise, the row's weights are 0 / 0
            near = 4 * x.bound("O") / np.abs(x.case.v).max()
            if not is_number.all() and not (np.abs(W - P) > near)[is_number[..., 0]].any():
                return ""
            readings.append(
                Reading(x.case, np.where(is_number, W, 0), P, near, arrays(x.case, P, x.variant(variant, "L")))
            )
        wrong = [x for x in readings if x.is_wrong]
        if not wrong:
            said = (describe_values(subject, x.case) for x in answers if not x.fits(variant, ("O",)))
            return next(filter(None, said), "")
        tries = (readings, DESCRIPTIONS_IN_WORDS, ""), (wrong[:1], DESCRIPTIONS, f" (with {wrong[0].case})")
        for some, ways, where in tries:
            said = (about(some, subject.tiles()) for about in ways)
            if found := next(filter(None, said), ""):
                return found + where
    return ""


def telling(answers: Sequence[Answer], variant: Variant, outputs: Sequence[str]) -> list[Answer]:
    """Return all short answers to the kinds of cases with a wrong one, or the shortest wrong answer if all are long.

    Cases are of the same kind if they have the same options, and if their windows are open or 0 on the same sides.
    """

    def kind(x: Answer) -> tuple:
        sides = [side if side in (0, OPEN) else 1 for side in x.case.options.get("window") or ()]
        return *sides, *x.case.options

    wrong = sorted((x for x in answers if not x.fits(variant, outputs)), key=lambda x: x.case.q.size + x.case.k.size)
    kinds = {kind(x) for x in wrong if not x.case.is_long}
    return [x for x in answers if not x.case.is_long and kind(x) in kinds] or wrong[:1]


def describe_overhang(subject: Subject, answers: Sequence[Answer], variant: Variant) -> str:
    """Return a sentence if each head's last row block overwrites the first rows of the next head in memory, else "".

    If so, every head except the first in memory has as many wrong rows as the last row block has past N_q.
    """
    for B in subject.tiles():
        fits, seen = True, False
        for x in answers:
            wrong = x.wrong(variant, "O").any(axis=3)
            batch, heads, N_q = wrong.shape
            later = np.arange(batch * heads).reshape(batch, heads, 1) > 0
            over = (np.arange(N_q) < -N_q % B) & (later if subject.layout[:2] == "bh" else later[:, :1] * later)
            fits &= not wrong.any() or (-N_q % B < N_q and bool(np.array_equal(wrong, over)))
            seen |= bool(wrong.any())
        if fits and seen:
            where = "into the first rows of the next head in memory"
            return f"It writes rows past N_q, {where}: the last block of {B} rows is stored without a row mask"
    return ""


def describe_values(subject: Subject, case: AttentionCase) -> str:
    """Return a sentence if some heads use the right weights but read another head's values, else "".

    To tell heads apart, V has a distinct feature for each head of each batch entry.
    """
    (batch, heads), (H_k, N_k, d) = case.q.shape[:2], case.k.shape[1:]
    if batch * H_k > d:
        return ""
    v = np.eye(batch * H_k, d).reshape(batch, H_k, 1, d)
    O = subject.ask(replace(case, v=np.repeat(v, N_k, axis=2)), gradients=False).outputs["O"]
    read = O.mean(axis=2).argmax(axis=2)  # (batch, heads)
    right = np.arange(batch)[:, None] * H_k + np.arange(heads) * H_k // heads
    at = [
        f"of batch entry {x // H_k} for head {h} of entry {b}" for (b, h), x in np.ndenumerate(read) if x != right[b, h]
    ]
    if (read // H_k == np.arange(batch)[:, None]).all():
        at = [f"{x % H_k} for i = {h}" for h, x in enumerate(read[0]) if x != right[0, h]]
    return f"Head i has the right weights, but the values of key head {', '.join(at[:4])}" if at else ""


def weights(O: Callable[[AttentionCase], np.ndarray], case: AttentionCase) -> np.ndarray:
    """Return the weights (batch, heads, N_q, N_k) that the function O(case) gives to the rows of V."""
    N_k, d = case.v.shape[2:]
    found = []
    for first in range(0, N_k, d):
        v = np.eye(N_k, N_k + d)[:, first : first + d]
        found.append(O(replace(case, v=np.broadcast_to(v, case.v.shape)))[..., : N_k - first])
    return np.concatenate(found, axis=3)


def describe_exchange(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if some head, batch entry, row or key has another's weights, else ""."""
    wrong = [x for x in readings if x.is_wrong]
    T = [(x, x.right.swapaxes(2, 3)) for x in wrong]
    if wrong and all(x.W.shape == y.shape and np.abs(x.W - y).max() <= x.near for x, y in T):
        return "Row i has the weight of row j that key j should have, because the weights are transposed"
    for axis, noun in ((1, "head"), (0, "batch entry"), (2, "row"), (3, "key")):
        found = []
        for x in wrong:
            W, P = np.moveaxis(x.W, axis, 0), np.moveaxis(x.right, axis, 0)
            alike = np.array([[np.abs(w - p).max() < x.near for p in P] for w in W])
            found.append([(i, int(np.argmax(y)), len(W)) for i, y in enumerate(alike) if not alike[i, i]])
            if not alike.any(axis=1).all():
                break
        else:
            every = [y for x in found for y in x]
            forms = {str(every[0][1]): len({k for _, k, _ in every}) == 1}
            forms |= {f"i {c:+d} (modulo N)": all(k == (i + c) % n for i, k, n in every) for c in (-1, 1, -2, 2)}
            forms |= {"N − 1 − i": all(k == n - 1 - i for i, k, n in every)}
            listed = ", ".join(f"{k} for i = {i}" for i, k, _ in found[0][:4])
            return f"{noun.capitalize()} i has the weights of {noun} {next((x for x in forms if forms[x]), listed)}"
    return ""


def describe_pairs(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if a head has the weights of a different pair of query head and key head, else ""."""
    found: dict[str, None] = {}
    for x in [x for x in readings if x.is_wrong and not set(x.case.options) - {"causal"}]:
        at = np.argwhere(np.abs(x.W - x.right).max(axis=(2, 3)) > x.near)
        S = np.einsum("bhid,bgjd->bhgij", x.case.q, x.case.k) * x.known["tau"]
        for b, h in at:
            pairs = np.exp(np.where(x.right[b, h] > 0, S[b], -np.inf))
            is_alike = np.abs(pairs / pairs.sum(axis=3, keepdims=True) - x.W[b, h]).max(axis=(2, 3)) <= x.near
            if not is_alike.any():
                return ""
            q, k = np.argwhere(is_alike)[0]
            found[f"query head {q} with key head {k} for i = {h}"] = None
    return f"Head i has the weights of {', '.join(list(found)[:4])}" if found else ""


def describe_mask(readings: list[Reading], sizes: Sequence[int], listed: bool = True) -> str:
    """Return a sentence if some keys wrongly have a weight or wrongly have none, else "".

    If no words describe these keys, list them or, if `listed` is False, return "".
    """
    sees = [np.abs(x.W) > max(x.near, 1e-5) for x in readings]
    more = [(x, y & (x.right == 0), (x.right == 0) & (y | (x.W == 0))) for x, y in zip(readings, sees, strict=True)]
    less = [(x, (x.W == 0) & x.clear, x.clear) for x in readings]
    said = [
        describe_place(y, verb, sizes, listed)
        for verb, y in (("can also see", more), ("cannot see", less))
        if any(z[1].any() for z in y)
    ]
    if not all(said):
        return ""
    ends = [x.W.sum(axis=3)[x.right.any(axis=3)] for x in readings]
    is_one = all(np.allclose(x, 1, atol=1e-3) for x in ends)
    of_sum = f"; the weights of a row {'still' if is_one else 'do not'} sum to 1" if readings[0].are_weights else ""
    return "; ".join(said) + of_sum if said else ""


def describe_place(
    sets: list[tuple[Reading, np.ndarray, np.ndarray]], verb: str, sizes: Sequence[int], listed: bool = True
) -> str:
    """Describe a set of weights in words that fit all readings, or list its elements if `listed` is True.

    `sets` has an entry (reading, is_in, possible) per reading, with two boolean arrays (batch, heads, N_q, N_k): is_in
    is True for the weights in the set, and possible for those that could be in it.
    """
    tried: list[tuple[str, str]] = []
    columns = [np.nonzero(x.any(axis=(0, 1, 2)))[0] for _, x, _ in sets if x.any()]
    first, last = min(x[0] for x in columns), max(x[-1] for x in columns)
    for n, (x, is_in, possible) in enumerate(sets):
        keys, rows = (x.quantities(y, sizes) for y in (KEYS, ROWS))
        keys[f"the keys from number {first} on"] = x.known["j"] >= first
        keys[f"the keys before number {last + 1}"] = x.known["j"] <= last
        heads = is_in.any(axis=(2, 3)) | ~is_in.any()
        tried = [(a, b) for a in rows for b in keys] if n == 0 else tried
        pairs = [(y, rows[y[0]] & keys[y[1]]) for y in tried]
        tried = [y for y, z in pairs if np.array_equal((z & possible)[heads], is_in[heads])]
    x, is_in, _ = next(y for y in sets if y[1].any())
    at = np.argwhere(is_in.any(axis=(2, 3)))
    names = [f"head {h} of batch entry {b}" for b, h in at[:3]]
    some = "" if len(at) == is_in[:, :, 0, 0].size else f"in {', '.join(names)}, "
    if tried:
        verb = verb.replace("counts", "count") if " rows" in tried[0][0] else verb
        return f"{some}{tried[0][0]} {verb} {tried[0][1]}"
    if not listed:
        return ""
    of_rows = [f"row {i} {verb} {spans(np.nonzero(y)[0])}" for i, y in enumerate(is_in[tuple(at[0])]) if y.any()]
    return f"{some}of the keys, {', '.join(of_rows[:3])}{', …' * (len(of_rows) > 3)} (with {x.case})"


def describe_scale(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if the weights are the softmax of scores with a different scale, else ""."""
    found = []
    for x in readings:
        at = x.clear & (x.W > 100 * x.near)
        y, S = (np.where(at, z, np.nan) for z in (np.log(x.W / x.right), x.known["S"]))
        y, S = (z - np.nanmean(z, axis=3, keepdims=True) for z in (y, S))
        found.append(np.nansum(y * S) / np.nansum(S * S))
        if not np.nanmax(np.abs(y - found[-1] * S)) < CLOSE:
            return ""
    said = number([1 + c for c in found], readings)
    is_one = all(np.abs(x.W.sum(axis=3) - x.right.sum(axis=3)).max() < CLOSE for x in readings)
    also = "" if is_one else ", apart from a factor of each row"
    return f"The weights are the softmax of scores that are multiplied by {said}{also}" if said not in ("", "1") else ""


def describe_L(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if the weights are exp(S − L) with a wrong L, else ""."""
    parts, shifts = [], []
    for x in readings:
        shift = np.where(x.clear, np.log(x.W) - np.log(x.right), np.nan)
        if not np.nanmax(np.nanmax(shift, axis=3) - np.nanmin(shift, axis=3)) < 2 * CLOSE:
            return ""
        shifts.append((np.nanmax(shift) - np.nanmin(shift), float(np.exp(np.nanmean(shift)))))
        L = x.known["L"] - np.nanmean(shift, axis=3, keepdims=True)
        parts.append((L, parts_of_L(x, sizes), np.isfinite(L)))
    if all(wide < CLOSE for wide, _ in shifts) and (said := number([c for _, c in shifts], readings)) not in ("", "1"):
        return f"All weights are multiplied by {said}"
    if (said := formula(parts, readings)) not in ("", "L"):
        return f"The weights are exp(S − L) with {said} instead of L"
    of_sum = [{"l": x.known["l"], "1": np.ones_like(x.known["l"]), "exp(−m)": np.exp(-x.known["m"])} for x in readings]
    sums = [(np.exp(L - x.known["m"]), y, at) for (L, _, at), x, y in zip(parts, readings, of_sum, strict=True)]
    said = formula(sums, readings)
    return f"The weights are exp(S − m) / ({said}) instead of exp(S − m) / l" if said not in ("", "l") else ""


def of_keys(S: np.ndarray, axis: int = 3) -> np.ndarray:
    """Return the log-sum-exp of S along `axis`, by default the key axis."""
    return np.logaddexp.reduce(S, axis=axis, keepdims=True)


def parts_of_L(reading: Reading, sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Return {words: array} for the quantities that a wrong L may equal or be a sum of."""
    S, L = reading.known["S"], reading.known["L"]
    found = reading.quantities(OF_L)
    for words, keys in reading.quantities(KEYS, sizes).items():
        for name, at in ((f"L of {words} alone", keys), (f"L without {words}", ~np.array(keys > 0))):
            found[name] = of_keys(np.where(at, S, -np.inf))
        found[f"m of {words} alone"] = np.where(keys, S, -np.inf).max(axis=3, keepdims=True)
    fitting = {name: x for name, x in found.items() if x.shape[2] in (1, L.shape[2]) and x.shape[3] == 1}
    return {name: np.broadcast_to(x, L.shape) for name, x in fitting.items()}


def describe_factors(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if the weights are off by a factor exp(sum of known quantities), else ""."""
    kinds = (("All weights of a row", OF_ROWS, 0), ("The weights of each row", OF_KEYS, 0))
    tiles = [(f"In each tile of {B} keys, the weights", OF_TILES, B) for B in sorted(sizes, reverse=True)]
    for which, table, B in (*kinds, *tiles):
        said: dict[str, int] = {}
        for x in [x for x in readings if x.is_wrong and B < x.W.shape[3]]:
            known = {n: np.broadcast_to(z, x.W.shape) for n, z in x.quantities(table, [B]).items()}
            for at in map(tuple, np.argwhere(np.abs(x.W - x.right).max(axis=(2, 3)) > x.near)):
                y = np.log(x.W[at]) - np.log(x.right[at])
                if (x.clear[at] & (x.W[at] <= x.near)).any():  # only a mask makes weights 0; a factor never does
                    return ""
                clear = x.clear[at] & (x.W[at] > 100 * x.near)
                said[fit(y, {n: z[at] for n, z in known.items()}, clear, table is OF_ROWS)] = 0
        if said and all(said):
            factor = " or ".join(f"exp({c})" for c in list(said)[:3])
            also = "" if table is OF_ROWS else ", apart from a factor of each row"
            return f"{which} are multiplied by {factor}{also}"
    return ""


def fit(y: np.ndarray, known: dict[str, np.ndarray], at: np.ndarray, of_rows: bool) -> str:
    """Return a sum of known quantities, each times a factor, that equals y wherever `at` is True, or "" if none does.

    Unless `of_rows` is set, y may differ from the sum by a constant per row.
    """
    shift = (lambda z: 0) if of_rows else lambda z: np.nanmean(np.where(at, z, np.nan), axis=1, keepdims=True)
    y, of = (y - shift(y))[at], {name: (z - shift(z))[at] for name, z in known.items()}
    of = {name: z for name, z in of.items() if np.isfinite(z).all()}
    few = [(a, b) for a in of for b in of if a <= b]
    for names in [*((a, b) for a, b in few if a == b), *few, *([] if of_rows else [tuple(of)])]:
        A = np.stack([of[name] for name in dict.fromkeys(names)], axis=1)
        c = np.linalg.lstsq(A, y, rcond=1e-9)[0]
        if len(y) > 1.5 * len(c) and np.abs(A @ c - y).max() < CLOSE:
            break
    else:
        return ""
    alike: dict[str, list[str]] = {}
    for name, a in zip(dict.fromkeys(names), c, strict=True):
        alike.setdefault(f"{a:+.3g}" if abs(a) > CLOSE / 5 else "", []).append(name)
    return " ".join(f"{a} ({' + '.join(x)})" for a, x in alike.items() if a).removeprefix("+")


def describe_factor_of_some(readings: list[Reading], sizes: Sequence[int], listed: bool = True) -> str:
    """Return a sentence if some of the weights, but not all, are off by the same factor, else ""."""
    sets, numbers = [], []
    for x in readings:
        ratio = np.where(x.clear, x.W / np.where(x.clear, x.right, 1), 1)
        sets.append((x, np.abs(ratio - 1) > CLOSE, x.clear))
        numbers += list(ratio[sets[-1][1]])
    is_all = all(np.array_equal(y & z, z) for _, y, z in sets)
    if not numbers or np.ptp(numbers) > CLOSE or is_all:
        return ""
    return describe_place(sets, f"counts {np.median(numbers):.3g} times", sizes, listed)


def in_words(about: Callable) -> Callable:
    """Return the function `about` with listed=False, so that it describes keys in words and never lists them."""
    return partial(about, listed=False)


DESCRIPTIONS = (
    describe_exchange,
    describe_pairs,
    describe_mask,
    describe_factor_of_some,
    describe_scale,
    describe_L,
    describe_factors,
)
LISTING = (describe_mask, describe_factor_of_some)  # functions that list the keys if no words fit
DESCRIPTIONS_IN_WORDS = tuple(in_words(x) if x in LISTING else x for x in DESCRIPTIONS)
