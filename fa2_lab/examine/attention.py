"""One attention in NumPy float64 that can be wrong in known ways. Without a knob it is right.

A knob is a name of the catalogue. B is the width and the height of a tile, for mistakes that depend on it; a case may
have tiles of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fa2_lab.examine.cases import Question, rounded
from fa2_lab.reference.online_softmax import finite, nonzero


def attention(
    case: Question, knobs: Iterable[str] = (), B: int = 0, bits: int = 8, *, gradients: bool = False
) -> dict[str, np.ndarray]:
    """O and L of a case with these mistakes in it, and its largest score; dQ, dK and dV as well, if asked for."""
    with np.errstate(all="ignore"):
        return Wrong(case, frozenset(knobs), B, bits).outputs(gradients)


class Wrong:
    """The steps of one call."""

    def __init__(self, case: Question, knobs: frozenset[str], B: int, bits: int) -> None:
        self.case, self.knobs, self.on, self.bits = case, knobs, knobs.__contains__, bits
        (self.batch, self.heads, self.N_q, self.d), (self.h_k, self.N_k) = case.q.shape, case.k.shape[1:3]
        self.B = B or case.tile[1] or self.N_k
        self.rows = B or case.tile[0] or self.N_q

    def any(self, *names: str) -> bool:
        return any(map(self.on, names))

    def pick(self, right: Any, wrong: dict[str, Any]) -> Any:
        """What a step gives: the value of the first knob that is on, or the right one."""
        return next((value for name, value in wrong.items() if self.on(name)), right)

    def outputs(self, gradients: bool) -> dict[str, np.ndarray]:
        q, k, v = self.operands()
        S, seen, cols = self.scores(q, k)
        if not len(cols):  # no tile is visited
            S, seen, cols = np.full((*S.shape[:3], 1), -np.inf), np.zeros((*S.shape[:3], 1), bool), np.zeros(1, int)
        O, L, P = self.softmax(S, seen, v[:, :, cols])
        outputs = dict(O=self.stored(O), L=self.statistic(L, S), largest=self.largest)
        if gradients:
            if self.any("gradient-unmasked", "gradient-corner"):
                other = "causal-ignored" if self.on("gradient-unmasked") else "corner-top-left"
                S = Wrong(self.case, self.knobs ^ {other}, self.B, self.bits).scores(q, k)[0]
                P = np.exp(S - finite(L)[..., None])
            outputs |= self.gradients(q, k, v, S, P, O, L, seen)
        return outputs

    # Forward ------------------------------------------------------------------------------------------------------

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of every query head."""
        head, entry = np.arange(self.heads), np.arange(self.batch)[:, None]
        wrong_heads = {"group-modulo": head % self.h_k, "group-quotient": head // self.h_k, "head-0": 0 * head}
        of = np.minimum(self.pick(head * self.h_k // self.heads, wrong_heads), self.h_k - 1)
        q, k, v = self.case.q, self.case.k, self.case.v
        if self.on("kv-offset"):  # in memory, head h begins h · N_q rows after head 0
            rows = self.N_q * np.arange(self.h_k)[:, None] + np.arange(self.N_k)
            k, v = (
                np.pad(x.reshape(len(x), -1, self.d), ((0, 0), (0, rows.max() + 1), (0, 0)))[:, rows] for x in (k, v)
            )
        k = k[0 * entry if self.any("batch-0", "k-batch-0") else entry, of]
        v = v[0 * entry if self.any("batch-0", "v-batch-0") else entry, of]
        k, v = (v, k) if self.on("kv-exchanged") else (k, v)
        for form in ("bhnd", "bnhd"):
            if self.on(f"heads-reshaped-{form}"):
                q, k, v = (reshaped(x, form) for x in (q, k, v))
        after = ((0, 0), (0, 0), (0, max(0, self.columns().max(initial=0) + 1 - self.N_k)), (0, 0))
        return (q, np.pad(k, after), np.pad(v, after)) if self.on("keys-padded") else (q, k, v)

    def columns(self) -> np.ndarray:
        """The keys that are visited, tile by tile."""
        B, N, last = self.B, self.N_k, (self.N_k - 1) // self.B * self.B
        if self.on("keys-repeated") and N > B:
            return np.concatenate([np.arange(last), np.arange(N - B, N)])
        ends = {"keys-tail-dropped": N // B * B, "keys-last-tile-dropped": last}
        if "mask" not in self.case.options:
            ends["keys-padded"] = last + B
        return np.arange(min(B, N) if self.on("keys-first-tile-dropped") else 0, self.pick(N, ends))

    def tau(self) -> float:
        given = self.case.options.get("scale")
        if given is None or self.on("scale-ignored") or (given == 0 and self.on("scale-zero")):
            sizes = {"scale-padded": 1 << (self.d - 1).bit_length(), "scale-length": self.N_k}
            sizes |= {"scale-heads": self.heads * self.d, "scale-fixed": self.case.usual_d or self.d}
            given = self.pick(self.d, sizes) ** -0.5
        powers = {"scale-missing": 0, "scale-after": 0, "scale-twice": 2, "scale-root": 0.5, "scale-inverse": -1}
        return np.float64(given) ** self.pick(1, powers)

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """S with −∞ where nothing is seen, what is seen, and the columns' numbers."""
        on, cols, tau = self.on, self.columns(), self.tau()
        c, mask = (self.case.options.get(x) for x in ("softcap", "mask"))
        if on("operands-rounded"):
            q, k = rounded(q, self.bits), rounded(k, self.bits)
        k_T = np.swapaxes(k, 2, 3)
        if self.any("k-reshaped", "k-tile-reshaped"):
            B = self.N_k if on("k-reshaped") else self.B
            tiles = (k[:, :, j : j + B] for j in range(0, k.shape[2], B))
            k_T = np.concatenate([x.reshape(*x.shape[:2], self.d, -1) for x in tiles], axis=3)
        S = (q @ k_T[..., cols]) * tau
        if mask is not None and self.adds(mask):
            S = S + self.of_mask(mask)[..., cols] * self.pick(1, {"bias-scaled": tau, "bias-negative": -1})
        S = rounded(S, self.bits) if on("scores-rounded") else S
        S = S * self.pick(1, {"base-2": np.log(2), "base-2-twice": 1 / np.log(2)})
        if c is not None and not on("softcap-ignored"):
            x = S / tau if on("softcap-unscaled") else S
            x = self.pick(c, {"softcap-factor": 1}) * np.tanh(x / self.pick(c, {"softcap-quotient": 1}))
            S = x * tau if on("softcap-unscaled") else x
        self.largest = np.abs(S).max(initial=1.0)
        self.top = S.max(axis=-1) if on("maximum-hidden") and len(cols) else -np.inf
        seen = np.broadcast_to(self.seen(cols), S.shape)
        hidden = {"hidden-zero": 0.0, "hidden-1e4": -1e4} | ({} if c is None else {"softcap-last": -c})
        return S if on("hidden-after") else np.where(seen, S, self.pick(-np.inf, hidden)), seen, cols

    def adds(self, mask: np.ndarray) -> bool:
        """Whether a mask is added to the scores; another says which of them are seen."""
        return not self.on("mask-ignored") and (
            self.on("mask-added") if mask.dtype == bool else not self.on("mask-boolean")
        )

    def of_mask(self, mask: np.ndarray) -> np.ndarray:
        mask = np.broadcast_to(mask[:, :1], mask.shape) if self.on("mask-head-0") else mask
        return np.swapaxes(mask, -1, -2) if self.on("mask-transposed") else mask

    def seen(self, cols: np.ndarray) -> np.ndarray:
        """True where a query may look."""
        on, options, N = self.on, self.case.options, self.N_q
        row, col = np.arange(N)[:, None], cols[None, :]
        shift = self.pick(self.N_k - N, {"corner-top-left": 0, "corner-sign": N - self.N_k})
        ahead = col - row - shift
        causal = (options.get("causal", False) or on("always-causal")) and not on("causal-ignored")
        starts, mask, lengths = (options.get(x) for x in ("cu_seqlens", "mask", "key_lengths"))
        seen = np.ones(ahead.shape, dtype=bool)
        if options.get("window") and not on("window-ignored"):
            left, right = options["window"][:: -1 if on("window-exchanged") else 1]
            left += on("window-left-long") - on("window-left-short") - on("window-counts-itself")
            if not causal:
                right += on("window-right-long") - on("window-right-short") - on("window-counts-itself")
            reach = col - row if on("window-top-left") else ahead
            if on("window-tile-skipped"):  # the first tile is rounded up
                seen &= col // self.B * self.B >= row // self.rows * self.rows + shift - left
            seen &= ((reach >= -left) | on("window-left-ignored")) & ((reach <= right) | on("window-right-ignored"))
        if causal and not (on("window-not-causal") and options.get("window")):
            seen &= self.triangle(ahead, row, col, shift)
        if starts is not None and not on("packed-ignored"):
            of_keys = options.get("cu_seqlens_k", starts)
            of_keys = of_keys + (of_keys > 0) * (of_keys < self.N_k) * on("packed-late")
            starts = starts + (starts > 0) * (starts < N) * on("packed-late")
            i = np.searchsorted(starts, row, side="right") - 1
            first, length = (starts if on("packed-of-queries") else of_keys)[i], np.diff(of_keys)[i]
            seen &= ((col >= first) | on("packed-past")) & (col < first + length - on("packed-short"))
        elif on("packed-short"):
            seen &= col < self.N_k - 1
        if mask is not None and not self.any("mask-ignored") and not self.adds(mask):
            seen = seen & ((self.of_mask(mask)[..., cols] != 0) ^ on("mask-inverted"))
        if lengths is not None and not on("lengths-ignored"):
            lengths = lengths + on("lengths-long") - on("lengths-short")
            lengths = np.broadcast_to(lengths[:1], lengths.shape) if on("lengths-first") else lengths
            seen = seen & (col < lengths[:, None, None, None])
        return seen

    def triangle(self, ahead: np.ndarray, row: np.ndarray, col: np.ndarray, shift: int) -> np.ndarray:
        """The causal mask, with what goes wrong where it is decided tile by tile."""
        on, B, rows, i, j = self.on, self.B, self.rows, row // self.rows, col // self.B
        first, last = i * rows, np.minimum(i * rows + rows - 1, self.N_q - 1)  # of the row's block
        right = np.minimum(j * B + B - 1, self.N_k - 1)  # the last key of the column's tile
        is_cut = (j * B <= last + shift) & (right > first + shift)
        ahead = ahead + first * on("rows-in-tile") - j * B * self.any("columns-in-tile", "columns-in-visited")
        seen = ahead <= on("causal-late") - on("causal-strict")
        return self.pick(seen, {
            "causal-reversed": ahead >= 0,
            "causal-in-tile": (col - j * B <= row - first) & (j * B <= last + shift),
            "columns-in-visited": seen & (j * B <= last + shift),
            "diagonal-unmasked": seen | is_cut,
            "diagonal-skipped": seen & ~is_cut,
            "causal-stops-early": seen & (j * B <= i // 2 * 2 * rows + shift),
            "tiles-top-left": seen & (j * B <= last),
            "tile-past": seen | (j == i + 1),
            "tiles-past": seen | (j * B > last + shift),
            "tile-unvisited": seen & ((j != i - 1) | is_cut),
        })  # fmt: skip

    def softmax(self, S: np.ndarray, seen: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """O, L and P by the online softmax over tiles of B keys."""
        on, sinks = self.on, self.case.options.get("sinks")
        if self.any("axis-queries", "axis-heads", "axis-batch", "maximum-queries", "sum-queries", "sum-of-key"):
            P = self.weights(S)
            return P @ v, np.zeros(S.shape[:3]), P
        S = self.weights(S) if on("softmax-twice") else S
        m, l = np.full(S.shape[:3], 0.0 if on("maximum-zero") else -np.inf), np.zeros(S.shape[:3])
        o = np.zeros((*S.shape[:3], self.d))
        if sinks is not None and not on("sinks-ignored"):
            sinks = (sinks[:1] if on("sinks-head-0") else sinks)[None, :, None]
            sinks = sinks * self.tau() if on("sinks-scaled") else sinks
            m, l = (m, l) if on("sinks-unshifted") else (np.broadcast_to(sinks, m.shape), l + 1.0)
        for tile, visited in self.visits(seen):
            s, old = S[..., tile], (m, l, o)
            m = self.maximum(s, m)
            p = self.exp(s - finite(old[0] if on("weights-early") else m)[..., None])
            bases = {"factor-base-2": np.log(2), "factor-base-e": 1 / np.log(2)}
            alpha = self.exp((old[0] - finite(m)) * self.pick(1, bases))
            l = self.factor("l", alpha, old[0]) * l + p.sum(axis=-1)
            if sinks is not None and on("sinks-per-tile") and tile.start:
                l = l + np.exp(sinks - finite(m))
            p = rounded(p, self.bits) if on("p-rounded") else p
            p = np.where(seen[..., tile], p, 0.0) if on("hidden-after") else p
            p = p / nonzero(p.sum(axis=-1, keepdims=True)) if self.any("tile-softmax", "tile-mean") else p
            o = self.factor("o", alpha, old[0])[..., None] * o + p @ v[:, :, tile]
            o = o / nonzero(l)[..., None] if on("divided-per-tile") else o
            l, o = (rounded(l, self.bits), rounded(o, self.bits)) if on("sums-rounded") else (l, o)
            m, l = np.where(visited, m, old[0]), np.where(visited, l, old[1])
            o = np.where(visited[..., None], o, old[2])
        l = l + np.exp(sinks) if sinks is not None and on("sinks-unshifted") else l
        never = self.any("divided-never", "divided-per-tile", "tile-softmax", "tile-mean")
        O = o if never else o / nonzero(l)[..., None] ** (1 + on("divided-twice"))
        O = O / -(-S.shape[3] // self.B) if on("tile-mean") else O
        O = O * (self.case.options.get("scale") or self.d**-0.5) if on("scale-after") else O
        L = np.where(l == 0, -np.inf, m + np.log(nonzero(l)))
        P = np.exp(S - finite(L)[..., None])
        transposed = P.swapaxes(2, 3) if P.shape[2] == P.shape[3] else P
        forms = {"p-transposed": transposed @ v, "weights-rounded": rounded(P, self.bits) @ v}
        return self.pick(O, forms), L, P

    def weights(self, S: np.ndarray) -> np.ndarray:
        """exp(S) / Σ exp(S) at once, with the maximum or the sum along another axis than the keys."""
        axis = self.pick(3, {"axis-queries": 2, "axis-heads": 1, "axis-batch": 0})
        e = self.exp(S - finite(S.max(axis=self.pick(axis, {"maximum-queries": 2}), keepdims=True)))
        l = e.sum(axis=self.pick(axis, {"sum-queries": 2}), keepdims=True)
        return e / nonzero(l.swapaxes(2, 3) if self.on("sum-of-key") and S.shape[2] == S.shape[3] else l)

    def visits(self, seen: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """The tiles of keys, and the rows that visit each: those of a block of which some row sees some key of it."""
        first, block = np.arange(0, self.N_q, self.rows), np.arange(self.N_q) // self.rows
        for j in range(0, seen.shape[3], self.B):
            sees = seen[..., j : j + self.B].any(axis=3)
            yield slice(j, j + self.B), np.logical_or.reduceat(sees, first, axis=2)[:, :, block]

    def maximum(self, s: np.ndarray, m: np.ndarray) -> np.ndarray:
        """The running maximum, with a tile's scores."""
        top = s.max(axis=-1)
        new = np.maximum(np.maximum(m, top), self.top)
        new = np.where(np.isneginf(top), m, top) if self.any("maximum-tile", "tile-softmax", "tile-mean") else new
        of_block = np.broadcast_to(new.max(axis=2, keepdims=True), new.shape)
        return self.pick(new, {"maximum-missing": np.zeros_like(m), "maximum-block": of_block})

    def factor(self, of: str, alpha: np.ndarray, m_old: np.ndarray) -> np.ndarray:
        """What l or o is multiplied by when a tile comes."""
        one, none, turned = np.ones_like(alpha), np.zeros_like(alpha), np.where(np.isneginf(m_old), 0.0, 1 / alpha)
        wrong = {f"{of}-not-rescaled": one, f"{of}-set": none, f"{of}-upside-down": turned}
        wrong |= {"not-rescaled": one, "state-set": none, "upside-down": turned, "tile-softmax": one, "tile-mean": one}
        return self.pick(alpha, wrong)

    def exp(self, x: np.ndarray) -> np.ndarray:
        """eˣ, which overflows as early as in the dtype that is examined."""
        return np.exp(x.astype(np.float32)).astype(float) if self.case.single else np.exp(x)

    def stored(self, O: np.ndarray) -> np.ndarray:
        """O as it is written."""
        rows, N, starts = self.rows, self.N_q, self.case.options.get("cu_seqlens")
        for form, other in (("bhnd", "bnhd"), ("bnhd", "bhnd")):
            O = reshaped(O, other) if self.any(f"heads-reshaped-{form}", f"output-reshaped-{form}") else O
        row, every = np.arange(N)[:, None], np.ones((N, 1), dtype=bool)
        wrong = {"rows-tail-missing": row < N // rows * rows, "rows-first-alone": row < rows}
        wrong["rows-last-alone"] = row >= (N - 1) // rows * rows
        wrong |= {} if starts is None else {"packed-last-missing": row < starts[-2]}
        return np.where(self.pick(every, wrong), O, 0.0)

    def statistic(self, L: np.ndarray, S: np.ndarray) -> np.ndarray:
        """L as it is returned."""
        m = finite(S.max(axis=-1))
        l = np.exp(L - m)
        forms = {"L-without-m": np.log(l), "L-m-alone": m, "L-plus-l": m + l, "L-minus": m - np.log(l), "L-l-alone": l}
        forms |= {"L-base-2": L / np.log(2), "L-log2-l": m + np.log2(l), "L-sum": np.exp(L), "L-negative": -L}
        raw = S / self.tau()
        return self.pick(L, forms | {"L-unscaled": L / self.tau(), "L-of-raw": np.logaddexp.reduce(raw, axis=-1)})

    # Backward -----------------------------------------------------------------------------------------------------

    def gradients(self, *given: np.ndarray) -> dict[str, np.ndarray]:
        """dQ, dK and dV; those of k and v are summed over the query heads that share them."""
        q, k, v, S, P, O, L, seen = given
        on, dO, square, tau = self.on, self.case.dO, self.N_q == self.N_k, self.tau()
        m, c = finite(S.max(axis=-1))[..., None], self.case.options.get("softcap")
        P = self.pick(P, {"P-base-2": np.exp2(S - finite(L)[..., None]), "P-unnormalised": np.exp(S - m)})
        dP = dO @ np.swapaxes(k if on("dP-of-K") else v, 2, 3)
        dS = self.dS(P, dP, self.row_sums(P, dP, O, L, m))
        dS = dS * (1 - (finite(S) / c) ** 2) if c is not None and not on("softcap-slope") else dS
        dS_T = dS if on("dK-transposed") and square else np.swapaxes(dS, 2, 3)
        P_T = P if on("dV-transposed") and square else np.swapaxes(P, 2, 3)
        power = {
            x: self.pick(1, {f"{x}-unscaled": 0, "dQK-unscaled": 0, f"{x}-twice": 2, "dQK-twice": 2})
            for x in ("dQ", "dK")
        }
        dQ: np.ndarray = np.zeros_like(q)
        for tile, visited in self.visits(seen):
            part = tau ** power["dQ"] * dS[..., tile] @ k[:, :, tile]
            dQ = np.where(visited[..., None], part if on("dQ-set") else dQ + part, dQ)
        i = slice((self.N_q - 1) // self.rows * self.rows if on("dKV-set") else 0, None)
        dK = tau ** power["dK"] * dS_T[..., i] @ q[:, :, i]
        dV = (dS_T if on("dV-of-dS") else P_T)[..., i] @ dO[:, :, i] * (tau if on("dV-scaled") else 1)
        for x, name, size in ((dQ, "dQ-tail", self.rows), (dK, "dKV-tail", self.B), (dV, "dKV-tail", self.B)):
            if on(name):
                x[:, :, x.shape[-2] // size * size :] = 0
        dK, dV = (dV, dK) if on("dKV-exchanged") else (dK, dV)
        dK, dV = (x.reshape(self.batch, self.h_k, -1, *x.shape[2:]) for x in (dK, dV))
        of = self.pick(slice(None), {"group-first": slice(1), "group-last": slice(-1, None)})
        together = np.mean if on("group-mean") else np.sum
        dK, dV = (together(x[:, :, of], axis=2) for x in (dK, dV))
        return dict(dQ=dQ, dK=dK, dV=dV)

    def row_sums(self, P: np.ndarray, dP: np.ndarray, O: np.ndarray, L: np.ndarray, m: np.ndarray) -> np.ndarray:
        """D, with the gradient of L in it."""
        dO, dL = self.case.dO, self.case.dL
        D = (dO * O).sum(axis=-1, keepdims=True)
        D = self.pick(D, {
            "D-missing": 0 * D,
            "D-sign": -D,
            "D-dO-alone": dO.sum(axis=-1, keepdims=True),
            "D-O-alone": O.sum(axis=-1, keepdims=True),
            "D-of-O": (O * O).sum(axis=-1, keepdims=True),
            "D-mean": D / self.d,
            "D-unnormalised": D * np.exp(L[..., None] - m),
            "D-columns": (P * dP).sum(axis=2, keepdims=True),
        })  # fmt: skip
        return D if dL is None else D + self.pick(-1, {"dL-dropped": 0, "dL-sign": 1}) * dL[..., None]

    def dS(self, P: np.ndarray, dP: np.ndarray, D: np.ndarray) -> np.ndarray:
        return self.pick(P * (dP - D), {"D-outside": P * dP - D, "P-missing": dP - D, "P-twice": P * P * (dP - D)})


def reshaped(x: np.ndarray, form: str) -> np.ndarray:
    """(batch, heads, N, d) that lies in memory as `form`, read as if it lay in the other order."""
    b, h, n, d = x.shape
    if form == "bnhd":
        return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(b, h, n, d)
    return x.reshape(b, n, h, d).swapaxes(1, 2)
