"""One attention in NumPy float64 that can be wrong in known ways. Without a knob it is right.

A knob is a name of the catalogue; `B` is the height and width of a tile, for mistakes that depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fa2_lab.examine.cases import Question, rounded
from fa2_lab.reference.online_softmax import finite, nonzero


def attention(
    case: Question, knobs: Iterable[str] = (), B: int = 0, bits: int = 8, gradients: bool = False
) -> dict[str, np.ndarray]:
    """O and L of a case with these mistakes in it; dQ, dK and dV as well, if nothing before them is wrong."""
    with np.errstate(all="ignore"):
        return Wrong(case, frozenset(knobs), B, bits).outputs(gradients)


class Wrong:
    """The steps of one call."""

    def __init__(self, case: Question, knobs: frozenset[str], B: int, bits: int) -> None:
        self.case, self.knobs, self.on, self.bits = case, knobs, knobs.__contains__, bits
        (self.batch, self.heads, self.N_q, self.d), (self.h_k, self.N_k) = case.q.shape, case.k.shape[1:3]
        self.B = B or self.N_k

    def any(self, *names: str) -> bool:
        return any(map(self.on, names))

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
            outputs |= self.gradients(q, k, v, S, P, O, L)
        return outputs

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of every query head."""
        on, case, head = self.on, self.case, np.arange(self.heads)
        of = head * self.h_k // self.heads
        of = head % self.h_k if on("group-modulo") else head * 0 if on("head-0") else of
        if on("group-quotient") and self.h_k < self.heads:
            of = np.minimum(head // self.h_k, self.h_k - 1)
        q, k, v = case.q, case.k, case.v
        if on("kv-offset"):  # in memory, head h begins h · N_q rows after head 0
            rows = self.N_q * np.arange(self.h_k)[:, None] + np.arange(self.N_k)
            k, v = (
                np.pad(x.reshape(len(x), -1, self.d), ((0, 0), (0, rows.max() + 1), (0, 0)))[:, rows] for x in (k, v)
            )
        entry = np.arange(self.batch)[:, None]
        k = k[0 * entry if self.any("batch-0", "k-batch-0") else entry, of]
        v = v[0 * entry if self.any("batch-0", "v-batch-0") else entry, of]
        k, v = (v, k) if on("kv-exchanged") else (k, v)
        for form in ("bhnd", "bnhd"):
            if on(f"heads-reshaped-{form}"):
                q, k, v = (reshaped(x, form) for x in (q, k, v))
        after = ((0, 0), (0, 0), (0, max(0, self.columns().max(initial=0) + 1 - self.N_k)), (0, 0))
        return (q, np.pad(k, after), np.pad(v, after)) if on("keys-padded") else (q, k, v)

    def columns(self) -> np.ndarray:
        """The keys that are visited, tile by tile."""
        on, B, N, last = self.on, self.B, self.N_k, (self.N_k - 1) // self.B * self.B
        if on("keys-repeated") and N > B:
            return np.concatenate([np.arange(last), np.arange(N - B, N)])
        ends = {"keys-tail-dropped": N // B * B, "keys-last-tile-dropped": last}
        if "mask" not in self.case.options:
            ends["keys-padded"] = last + B
        end = next((n for name, n in ends.items() if on(name)), N)
        return np.arange(min(B, N) if on("keys-first-tile-dropped") else 0, end)

    def tau(self) -> float:
        on, given = self.on, self.case.options.get("scale")
        sizes = {"scale-padded": 1 << (self.d - 1).bit_length(), "scale-length": self.N_k}
        sizes["scale-heads"] = self.heads * self.d
        usual = next((n for name, n in sizes.items() if on(name)), self.d) ** -0.5
        tau = usual if given is None or on("scale-ignored") or (given == 0 and on("scale-zero")) else given
        for name, power in (("scale-missing", 0), ("scale-after", 0), ("scale-twice", 2), ("scale-root", 0.5)):
            tau = tau**power if on(name) else tau
        return 1 / np.float64(tau) if on("scale-inverse") else np.float64(tau)

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """S with −∞ where nothing is seen, what is seen, and the columns' numbers."""
        on, options, cols, tau = self.on, self.case.options, self.columns(), self.tau()
        c, mask = options.get("softcap"), options.get("mask")
        if on("operands-rounded"):
            q, k = rounded(q, self.bits), rounded(k, self.bits)
        k = k.reshape(*k.shape[:2], self.d, -1)[..., cols] if on("k-reshaped") else np.swapaxes(k, 2, 3)[..., cols]
        S = (q @ k) * tau
        if mask is not None and mask.dtype != bool and not on("mask-ignored"):
            S = S + self.of_mask(mask)[..., cols] * (tau if on("bias-scaled") else -1 if on("bias-negative") else 1)
        S = rounded(S, self.bits) if on("scores-rounded") else S
        S = S * (np.log(2) if on("base-2") else 1 / np.log(2) if on("base-2-twice") else 1)
        if c is not None and not on("softcap-ignored"):
            x = S / tau if on("softcap-unscaled") else S
            x = (1 if on("softcap-factor") else c) * np.tanh(x / (1 if on("softcap-quotient") else c))
            S = x * tau if on("softcap-unscaled") else x
        self.largest = np.abs(S).max(initial=1.0)
        seen = np.broadcast_to(self.seen(cols), S.shape)
        hidden = 0.0 if on("hidden-zero") else -1e4 if on("hidden-1e4") else -np.inf
        self.top = S.max(axis=-1) if on("maximum-hidden") and len(cols) else -np.inf
        hidden = -c if c is not None and on("softcap-last") else hidden
        return S if on("hidden-after") else np.where(seen, S, hidden), seen, cols

    def of_mask(self, mask: np.ndarray) -> np.ndarray:
        mask = np.broadcast_to(mask[:, :1], mask.shape) if self.on("mask-head-0") else mask
        return np.swapaxes(mask, -1, -2) if self.on("mask-transposed") else mask

    def seen(self, cols: np.ndarray) -> np.ndarray:
        """True where a query may look."""
        on, options, N = self.on, self.case.options, self.N_q
        row, col = np.arange(N)[:, None], cols[None, :]
        shift = 0 if on("corner-top-left") else (self.N_k - N) * (-1 if on("corner-sign") else 1)
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
                seen &= col // self.B * self.B >= row // self.B * self.B + shift - left
            seen &= ((reach >= -left) | on("window-left-ignored")) & ((reach <= right) | on("window-right-ignored"))
        if causal and not (on("window-not-causal") and options.get("window")):
            seen &= self.triangle(ahead, row, col, shift)
        if starts is not None and not on("packed-ignored"):
            of_keys = options.get("cu_seqlens_k", starts)
            of_keys = of_keys + (of_keys > 0) * (of_keys < self.N_k) * on("packed-late")
            starts = starts + (starts > 0) * (starts < N) * on("packed-late")
            i = np.searchsorted(starts, row, side="right") - 1
            first, length = (starts if on("packed-of-queries") else of_keys)[i], np.diff(of_keys)[i]
            seen &= (col >= first) & (col < first + length - on("packed-short"))
        elif on("packed-short"):
            seen &= col < self.N_k - 1
        if mask is not None and mask.dtype == bool and not on("mask-ignored"):
            seen = seen & (self.of_mask(mask)[..., cols] ^ on("mask-inverted"))
        if lengths is not None and not on("lengths-ignored"):
            lengths = lengths + on("lengths-long") - on("lengths-short")
            lengths = np.broadcast_to(lengths[:1], lengths.shape) if on("lengths-first") else lengths
            seen = seen & (col < lengths[:, None, None, None])
        return seen

    def triangle(self, ahead: np.ndarray, row: np.ndarray, col: np.ndarray, shift: int) -> np.ndarray:
        """The causal mask, with what goes wrong where it is decided tile by tile."""
        on, B, i, j = self.on, self.B, row // self.B, col // self.B
        if on("causal-reversed"):
            return ahead >= 0
        ahead = ahead + i * B * self.any("rows-in-tile", "causal-in-tile")
        ahead = ahead - j * B * self.any("columns-in-tile", "columns-in-visited", "causal-in-tile")
        seen = ahead <= on("causal-late") - on("causal-strict")
        if on("causal-in-tile"):
            return seen & (j <= i)
        if on("columns-in-visited"):
            return seen & (j * B <= i * B + B - 1 + shift)
        last, right = (np.minimum(n, x.max(initial=0)) for n, x in ((i * B + B - 1, row), (j * B + B - 1, col)))
        is_cut = (j * B <= last + shift) & (right > i * B + shift)
        seen = (seen | is_cut) if on("diagonal-unmasked") else (seen & ~is_cut) if on("diagonal-skipped") else seen
        seen = (seen & (j * B <= i // 2 * 2 * B + shift)) if on("causal-stops-early") else seen
        seen = (seen | (j == i + 1)) if on("tile-past") else seen
        return (seen & ((j != i - 1) | (right > i * B + shift))) if on("tile-unvisited") else seen

    def softmax(self, S: np.ndarray, seen: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        """O, L and P by the online softmax over tiles of B keys."""
        on, sinks = self.on, self.case.options.get("sinks")
        for name, axis in (("axis-queries", 2), ("axis-heads", 1), ("axis-batch", 0)):
            if on(name):
                P = weights(S, axis)
                return P @ v, np.zeros(S.shape[:3]), P
        if self.any("maximum-queries", "sum-queries"):
            m = finite(S.max(axis=2 if on("maximum-queries") else 3, keepdims=True))
            e = self.exp(S - m)
            P = e / nonzero(e.sum(axis=2 if on("sum-queries") else 3, keepdims=True))
            return P @ v, np.zeros(S.shape[:3]), P
        S = weights(S, 3) if on("softmax-twice") else S
        m, l = np.full(S.shape[:3], 0.0 if on("maximum-zero") else -np.inf), np.zeros(S.shape[:3])
        o = np.zeros((*S.shape[:3], self.d))
        if sinks is not None and not on("sinks-ignored"):
            sinks = (sinks[:1] if on("sinks-head-0") else sinks)[None, :, None]
            sinks = sinks * self.tau() if on("sinks-scaled") else sinks
            m, l = np.broadcast_to(sinks, m.shape), l + 1.0
        for j in range(0, S.shape[3], self.B):
            tile = slice(j, j + self.B)
            s, m_old, alone = S[..., tile], m, self.any("maximum-tile", "tile-softmax", "tile-mean")
            top = s.max(axis=-1)
            m = np.where(alone & ~np.isneginf(top), top, np.maximum(np.maximum(m, top), self.top))
            m = 0 * l if on("maximum-missing") else m
            m = np.broadcast_to(m.max(axis=2, keepdims=True), m.shape) if on("maximum-block") else m
            p = self.exp(s - finite(m_old if on("weights-early") else m)[..., None])
            base = np.log(2) if on("factor-base-2") else 1 / np.log(2) if on("factor-base-e") else 1
            alpha = self.exp((m_old - finite(m)) * base)
            turned = np.where(np.isneginf(m_old), 0.0, 1 / alpha)
            a_l, a_o = (
                np.ones_like(m) if self.any(f"{x}-not-rescaled", "not-rescaled", "tile-softmax", "tile-mean")
                else 0 * l if self.any(f"{x}-set", "state-set")
                else turned if self.any(f"{x}-upside-down", "upside-down") else alpha
                for x in "lo"
            )  # fmt: skip
            l = a_l * l + p.sum(axis=-1)
            if sinks is not None and on("sinks-per-tile") and j:
                l = l + np.exp(sinks - finite(m))
            p = rounded(p, self.bits) if on("p-rounded") else p
            p = np.where(seen[..., tile], p, 0.0) if on("hidden-after") else p
            p = p / nonzero(p.sum(axis=-1, keepdims=True)) if self.any("tile-softmax", "tile-mean") else p
            o = a_o[..., None] * o + p @ v[:, :, tile]
            o = o / nonzero(l)[..., None] if on("divided-per-tile") else o
            l, o = (rounded(l, self.bits), rounded(o, self.bits)) if on("sums-rounded") else (l, o)
        never = self.any("divided-never", "divided-per-tile", "tile-softmax", "tile-mean")
        O = o if never else o / nonzero(l)[..., None] ** (1 + on("divided-twice"))
        O = O / -(-S.shape[3] // self.B) if on("tile-mean") else O
        O = O * (self.case.options.get("scale") or self.d**-0.5) if on("scale-after") else O
        L = np.where(l == 0, -np.inf, m + np.log(nonzero(l)))
        P = np.exp(S - finite(L)[..., None])
        return (P.swapaxes(2, 3) @ v if on("p-transposed") and P.shape[2] == P.shape[3] else O), L, P

    def exp(self, x: np.ndarray) -> np.ndarray:
        """eˣ, which overflows as early as in the dtype that is examined."""
        return np.exp(x.astype(np.float32)).astype(float) if self.case.single else np.exp(x)

    def stored(self, O: np.ndarray) -> np.ndarray:
        """O as it is written."""
        on, B, N, starts = self.on, self.B, self.N_q, self.case.options.get("cu_seqlens")
        other = {"bhnd": "bnhd", "bnhd": "bhnd"}
        for form in other:
            O = reshaped(O, other[form]) if self.any(f"heads-reshaped-{form}", f"output-reshaped-{form}") else O
        row = np.arange(N)[:, None]
        kept = (row < N // B * B) | (not on("rows-tail-missing"))
        kept = kept & ((row < B) | (not on("rows-first-alone")))
        kept = kept & ((row >= (N - 1) // B * B) | (not on("rows-last-alone")))
        if starts is not None and on("packed-last-missing"):
            kept = kept & (row < starts[-2])
        return np.where(kept, O, 0.0)

    def statistic(self, L: np.ndarray, S: np.ndarray) -> np.ndarray:
        """L as it is returned."""
        m = finite(S.max(axis=-1))
        l = np.exp(L - m)
        forms = {"L-without-m": np.log(l), "L-m-alone": m, "L-plus-l": m + l, "L-minus": m - np.log(l), "L-l-alone": l}
        forms |= {"L-base-2": L / np.log(2), "L-log2-l": m + np.log2(l), "L-sum": np.exp(L), "L-negative": -L}
        forms["L-unscaled"] = L / self.tau()
        return next((wrong for name, wrong in forms.items() if self.on(name)), L)

    def gradients(self, *given: np.ndarray) -> dict[str, np.ndarray]:
        """dQ, dK and dV; those of k and v are summed over the query heads that share them."""
        q, k, v, S, P, O, L = given
        on, dO, dL, square = self.on, self.case.dO, self.case.dL, self.N_q == self.N_k
        m, c, tau = finite(S.max(axis=-1))[..., None], self.case.options.get("softcap"), self.tau()
        P = np.exp2(S - finite(L)[..., None]) if on("P-base-2") else np.exp(S - m) if on("P-unnormalised") else P
        dP = dO @ np.swapaxes(k if on("dP-of-K") else v, 2, 3)
        D = (dO * O).sum(axis=-1)
        D = 0 * D if on("D-missing") else -D if on("D-sign") else dO.sum(axis=-1) if on("D-dO-alone") else D
        D = D * np.exp(L - m[..., 0]) if on("D-unnormalised") else D
        if dL is not None and not on("dL-dropped"):
            D = D + dL if on("dL-sign") else D - dL
        D = D[..., None]
        D = (P * dP).sum(axis=2, keepdims=True) if on("D-columns") and square else D
        dS = P * dP - D if on("D-outside") else dP - D if on("P-missing") else P * (dP - D)
        dS = dS * (1 - (finite(S) / c) ** 2) if c is not None and not on("softcap-slope") else dS
        dS_T = dS if on("dK-transposed") and square else np.swapaxes(dS, 2, 3)
        P_T = P if on("dV-transposed") and square else np.swapaxes(P, 2, 3)
        power = {
            x: 1 - self.any(f"{x}-unscaled", "dQK-unscaled") + self.any(f"{x}-twice", "dQK-twice") for x in ("dQ", "dK")
        }
        last_rows, last_cols = (slice((n - 1) // self.B * self.B, None) for n in (self.N_q, self.N_k))
        j = last_cols if on("dQ-set") else slice(None)
        i = last_rows if on("dKV-set") else slice(None)
        dQ = tau ** power["dQ"] * dS[..., j] @ k[:, :, j]
        dK = tau ** power["dK"] * dS_T[..., i] @ q[:, :, i]
        dV = P_T[..., i] @ dO[:, :, i] * (tau if on("dV-scaled") else 1)
        for x, name in ((dQ, "dQ-tail"), (dK, "dKV-tail"), (dV, "dKV-tail")):
            if on(name):
                x[:, :, x.shape[2] // self.B * self.B :] = 0
        dK, dV = (dV, dK) if on("dKV-exchanged") else (dK, dV)
        dK, dV = (x.reshape(self.batch, self.h_k, -1, *x.shape[2:]) for x in (dK, dV))
        of = slice(1) if on("group-first") else slice(-1, None) if on("group-last") else slice(None)
        together = np.mean if on("group-mean") else np.sum
        dK, dV = (together(x[:, :, of], axis=2) for x in (dK, dV))
        return dict(dQ=dQ, dK=dK, dV=dV)


def weights(S: np.ndarray, axis: int) -> np.ndarray:
    """exp(S) / Σ exp(S) along an axis; zeros where all is hidden."""
    e = np.exp(S - finite(S.max(axis=axis, keepdims=True)))
    return e / nonzero(e.sum(axis=axis, keepdims=True))


def reshaped(x: np.ndarray, form: str) -> np.ndarray:
    """(batch, heads, N, d) that lies in memory as `form`, read as if it lay in the other order."""
    b, h, n, d = x.shape
    if form == "bnhd":
        return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(b, h, n, d)
    return x.reshape(b, n, h, d).swapaxes(1, 2)
