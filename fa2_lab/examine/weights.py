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
from fa2_lab.examine.catalogue import KEYS, OF_KEYS, OF_L, OF_ROWS, OF_TILES, PLACES, ROWS
from fa2_lab.examine.formulas import CLOSE, centred, describe_rule, formula, number
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
    rows = case.options.get("cu_seqlens", np.array([0, N_q]))
    keys = case.options.get("cu_seqlens_k", rows if "cu_seqlens" in case.options else np.array([0, N_k]))
    of, at = (np.searchsorted(x, y, side="right") - 1 for x, y in ((rows, i), (keys, j)))  # sequences of rows and keys
    sizes = dict(
        of=of,
        at=at,
        place=j - keys[at],
        length=np.diff(keys)[of],
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
            is_number = np.isfinite(W).all(axis=3, keepdims=True)  # False if a row's weights are 0 / 0
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
        heads, of_heads = wrong_heads(wrong)
        tries = (
            ("", readings, DESCRIPTIONS_IN_WORDS[:2], ""),
            (f"In {heads}, ", of_heads, DESCRIPTIONS_IN_WORDS, ""),
            ("", readings, DESCRIPTIONS_IN_WORDS[2:], ""),
            ("", wrong[:1], DESCRIPTIONS, f" (with {wrong[0].case})"),
        )
        for place, some, ways, where in tries:
            if found := next(filter(None, (about(some, subject.tiles()) for about in ways if some)), ""):
                return place + (found[0].lower() + found[1:] if place else found) + where
    return ""


def wrong_heads(wrong: Sequence[Reading]) -> tuple[str, list[Reading]]:
    """Return words for the heads that are wrong, and the readings of these heads alone, each as a batch entry.

    If all heads are wrong, or no words fit all readings, the list is empty.
    """
    words: dict[str, bool] = {}
    some = []
    for x in wrong:
        is_wrong = np.abs(x.W - x.right).max(axis=(2, 3)) > x.near
        b, h = np.indices(is_wrong.shape)
        sets = {"head 0": h == 0, "the last head": h == h.max(), "all heads but the first": h > 0}
        sets |= {"odd heads": h % 2 == 1, "batch entry 0": b == 0, "all batch entries but the first": b > 0}
        for name, at in sets.items():
            words[name] = words.get(name, True) and bool((at == is_wrong).all() and not at.all())

        def cut(y: Any, is_wrong: np.ndarray = is_wrong) -> Any:
            if np.ndim(y) != 4:
                return y
            return np.broadcast_to(y, (*is_wrong.shape, *y.shape[2:]))[is_wrong][:, None]

        known = {name: cut(y) for name, y in x.known.items()}
        case = replace(x.case, q=known["q"], k=known["k"], v=known["v"], dO=known["dO"])
        right = known["P"] if x.are_weights else cut(x.right)
        some.append(x._replace(case=case, W=cut(x.W), right=right, known=known))
    name = next((name for name, fits in words.items() if fits), "")
    return name, some if name else []


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
            is_last = axis > 1 and all(i == n - 1 for i, _, n in every)
            which = f"The last {noun}, i," if is_last else f"{noun.capitalize()} i"
            forms = {str(every[0][1]): len({k for _, k, _ in every}) == 1}
            forms |= {f"i {c:+d} (modulo N)": all(k == (i + c) % n for i, k, n in every) for c in (-1, 1, -2, 2)}
            forms |= {"N − 1 − i": all(k == n - 1 - i for i, k, n in every)}
            listed = ", ".join(f"{k} for i = {i}" for i, k, _ in found[0][:4])
            return f"{which} has the weights of {noun} {next((x for x in forms if forms[x]), listed)}"
    return ""


def describe_pairs(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if a head has the weights of a different pair of query head and key head, else ""."""
    found: dict[str, None] = {}
    others = set[tuple]()
    wrong = [x for x in readings if x.is_wrong and not set(x.case.options) - {"causal"}]
    for x in wrong:
        at = np.argwhere(np.abs(x.W - x.right).max(axis=(2, 3)) > x.near)
        S = np.einsum("ahid,cgjd->ahcgij", x.case.q, x.case.k) * x.known["tau"]
        for b, h in at:
            pairs = np.exp(np.where(x.right[b, h] > 0, S, -np.inf))
            is_alike = np.abs(pairs / pairs.sum(axis=5, keepdims=True) - x.W[b, h]).max(axis=(4, 5)) <= x.near
            if not is_alike.any():
                return ""
            here = [y for y in np.argwhere(is_alike) if y[0] == b == y[2]] or np.argwhere(is_alike)
            a, q, c, k = here[0]
            is_own = (a, q, k) == (b, h, h * x.case.k.shape[1] // x.case.q.shape[1])
            others |= {(b, c) if is_own else ()} if len(x.W) == len(wrong[0].W) else set()
            of = (f" of entry {a}", f" of entry {c}", f" of entry {b}") if {a, c} != {b} else ("", "", "")
            found[f"query head {q}{of[0]} with key head {k}{of[1]} for i = {h}{of[2]}"] = None
    if () not in others and found:
        return f"K is that of another batch entry: {', '.join(f'{c} for entry {b}' for b, c in sorted(others))}"
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
    if not all(said) or not all(map(has_even_rows, readings)):
        return ""
    ends = [x.W.sum(axis=3)[x.right.any(axis=3)] for x in readings]
    is_one = all(np.allclose(x, 1, atol=1e-3) for x in ends)
    of_sum = f"; the weights of a row {'still' if is_one else 'do not'} sum to 1" if readings[0].are_weights else ""
    return "; ".join(said) + of_sum if said else ""


def has_even_rows(x: Reading) -> bool:
    """Return whether the weights in each row that are not 0 are the correct ones, up to a factor of the row.

    Otherwise, something besides a mask is wrong. If the reading is not one of weights, nothing is known, and the result
    is True.
    """
    at = x.clear & (np.abs(x.W) > 100 * x.near) & x.are_weights
    ratio = np.where(at, np.log(np.abs(x.W / x.right)), np.nan)
    return not (np.nanmax(ratio, axis=3) - np.nanmin(ratio, axis=3) > 2 * CLOSE).any()


def describe_reads(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence that says which keys or values are read from wrong positions, or "" if none are."""
    tried: list[tuple[str, str, str]] = []
    for n, x in enumerate(x for x in readings if x.is_wrong):
        heads = np.argwhere(np.abs(x.W - x.right).max(axis=(2, 3)) > x.near)
        worst = np.abs(x.W - x.right)[tuple(heads[0])].max(axis=1).argmax()
        at = [(b, h, rows) for b, h in (heads[0], *heads) for rows in (slice(worst, worst + 1), slice(None))]
        found, done = [], set[tuple]()
        for B in [B for B in sizes if 1 < B < x.W.shape[3]]:
            keys, places = x.quantities(KEYS, [B]), x.quantities(PLACES, [B])
            for some in product(keys, places, ("V", "K", "K and V")) if n == 0 else tried:
                if some not in done and some[0] in keys and some[1] in places:
                    done.add(some)
                    if all(is_read(x, *y, keys[some[0]], places[some[1]], some[2]) for y in at):
                        found.append(some)
        tried = found
    said = "It reads {2} of {1} instead of key j, for j in {0}".format(*tried[0]) if tried else ""
    return said.removesuffix(", for j in any key")


def is_read(x: Reading, b: int, h: int, rows: slice, keys: np.ndarray, place: np.ndarray, of: str) -> bool:
    """Return whether a head's weights are those of reading K, V or both of the keys in `keys` from the given places.

    What is read from before the first key or after the last one is taken to be 0. Only `rows` are compared.
    """
    some = x.right, x.known["X"], x.known["qk"], keys, place, x.W
    P, X, qk, at, to, got = (np.broadcast_to(y, x.W.shape)[b, h, rows] for y in some)
    is_inside, to = (to >= 0) & (to < P.shape[1]), to.clip(0, P.shape[1] - 1)
    if "K" in of:
        of_K = np.where(is_inside, np.take_along_axis(qk, to, axis=1), 0)
        E = np.exp(np.where(P > 0, np.where(at, X - qk + of_K, X), -np.inf))
        P = E / E.sum(axis=1, keepdims=True)
    W = np.where(at & ("V" in of), 0, P)
    np.add.at(W, (np.arange(len(W))[:, None], to), np.where(at & is_inside & ("V" in of), P, 0))
    return bool(np.nanmax(np.abs(W - got)) <= 4 * x.near)


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
    return f"{some}of the keys, {', '.join(of_rows[:3])}{', …' * (len(of_rows) > 3)}"


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


def describe_scores(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if a simple rule gives the scores from the right ones, or if they lack features, else ""."""
    scores, right, parts = [], [], []
    for x in readings:
        at = x.clear & (x.W > 100 * x.near)
        off = np.where(at, np.log(x.W) - np.log(x.right), np.nan)
        S = np.where(at, x.known["S"], np.nan)
        scores.append((S + off - np.nanmedian(off, axis=3, keepdims=True))[at])
        right.append(S[at])
        of_features = x.case.q[:, :, :, None] * x.known["k"][:, :, None] * x.known["tau"]
        y, of_features = (np.where(at, z, np.nan) for z in (off, np.moveaxis(of_features, 4, 0)))
        parts.append([(z - np.nanmean(z, axis=-1, keepdims=True))[..., at].T for z in (y, of_features)])
    if not any(np.abs(a - b).max(initial=0) > 4 * CLOSE for a, b in zip(scores, right, strict=True)):
        return ""
    if (said := describe_rule(scores, right, [CLOSE] * len(scores))) and " or " not in said:
        return said.format(name="The score τ q·k")
    y, A = (np.concatenate(z) for z in zip(*parts, strict=True))
    if len(y) < 2 * A.shape[1]:
        return ""
    c = np.linalg.lstsq(A, y, rcond=1e-9)[0]
    lost = np.abs(c + 1) < CLOSE
    if np.abs(A @ c - y).max() > CLOSE or np.abs(c)[~lost].max(initial=0) > CLOSE or not lost.any():
        return ""
    return f"The scores lack the features {spans(np.nonzero(lost)[0])} of {len(c)}"


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
        some = [x for x in readings if x.is_wrong and B < x.W.shape[3]]
        parts = []
        for x in some:
            at = x.clear & (np.abs(x.W - x.right).max(axis=(2, 3), keepdims=True) > x.near)
            y = np.log(x.W) - np.log(x.right)
            if (at & (x.W <= x.near)).any():  # only a mask makes weights 0; a factor never does
                return ""
            if np.abs(y[at]).max(initial=0) < 2 * CLOSE:
                return ""
            known = {n: np.broadcast_to(1.0 * z, x.W.shape) for n, z in x.quantities(table, [B]).items()}
            at = at & (x.W > 100 * x.near)
            parts.append((y, known, at) if table is OF_ROWS else centred(y, known, at))
        if said := formula(parts, some):
            also = "" if table is OF_ROWS else ", apart from a factor of each row"
            return f"{which} are multiplied by exp({said}){also}"
    return ""


def describe_factor_of_some(readings: list[Reading], sizes: Sequence[int], listed: bool = True) -> str:
    """Return a sentence if some of the weights, but not all, are off by the same factor, else ""."""
    sets, numbers = [], []
    for x in readings:
        ratio = np.where(x.clear, x.W / np.where(x.clear, x.right, 1), 1)
        sets.append((x, np.abs(ratio - 1) > CLOSE, x.clear))
        numbers += list(ratio[sets[-1][1]])
    is_all = all(np.array_equal(y & z, z) for _, y, z in sets)
    if not numbers or np.ptp(numbers) > 2 * CLOSE * max(1, abs(np.median(numbers))) or is_all:
        return ""
    return describe_place(sets, f"counts {np.median(numbers):.3g} times", sizes, listed)


def describe_sum(readings: list[Reading], sizes: Sequence[int]) -> str:
    """Return a sentence if the weights are right, apart from a factor of each row."""
    if not all(x.are_weights and has_even_rows(x) and ((x.W > 0) == (x.right > 0))[x.clear].all() for x in readings):
        return ""
    sums = np.concatenate([x.W.sum(axis=3)[x.right.any(axis=3)] for x in readings if x.is_wrong])
    said = f"The weights of a row are in the right ratio, but sum to {sums.min():.3g} to {sums.max():.3g}"
    return said if np.abs(sums - 1).max() > 1e-3 else ""


def in_words(about: Callable) -> Callable:
    """Return the function `about` with listed=False, so that it describes keys in words and never lists them."""
    return partial(about, listed=False)


DESCRIPTIONS = (
    describe_exchange,
    describe_pairs,
    describe_mask,
    describe_factor_of_some,
    describe_scale,
    describe_scores,
    describe_L,
    describe_factors,
    describe_reads,
    describe_sum,
)
LISTING = (describe_mask, describe_factor_of_some)  # functions that list the keys if no words fit
DESCRIPTIONS_IN_WORDS = tuple(in_words(x) if x in LISTING else x for x in DESCRIPTIONS[:-1])
