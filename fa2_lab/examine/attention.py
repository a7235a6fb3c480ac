"""One attention in NumPy float64 that can be wrong in known ways. Without a knob it is right.

A knob is a name of the catalogue; `B` is the tile's height and width, for mistakes that depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fa2_lab.examine.cases import Question, rounded
from fa2_lab.reference.online_softmax import finite, nonzero

HIDDEN = {"hidden-zero": 0.0, "hidden-1e4": -1e4, "hidden-1e9": -1e9}


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
        (self.batch, self.heads, self.N_q, self.d), self.N_k = case.q.shape, case.k.shape[2]
        self.B = min(B or self.N_k, 4096)

    def outputs(self, gradients: bool) -> dict[str, np.ndarray]:
        on = self.on
        q, k, v = self.operands()
        S, seen, cols = self.scores(q, k)
        if not len(cols):  # no tile is visited
            S, seen, cols = np.full((*S.shape[:3], 1), -np.inf), np.zeros((*S.shape[:3], 1), bool), np.zeros(1, int)
        O, L, P = self.softmax(S, seen, v[:, :, cols])
        outputs = dict(O=self.stored(O), L=self.statistic(L, S))
        if gradients:
            if on("gradient-unmasked") or on("gradient-corner"):
                other = {"causal-ignored"} if on("gradient-unmasked") else {"corner-top-left"}
                S = Wrong(self.case, self.knobs ^ other, self.B, self.bits).scores(q, k)[0]
                P = np.exp(S - finite(L)[..., None])
            outputs |= self.gradients(q, k, v, S, P, O, L)
        return outputs

    # What is read -------------------------------------------------------------------------------------------------

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of every query head."""
        on, case, h_k = self.on, self.case, self.case.k.shape[1]
        head = np.arange(self.heads)
        of = head % h_k if on("group-modulo") else head * 0 if on("head-0") else head * h_k // self.heads
        q, k, v = case.q, case.k[:, of], case.v[:, of]
        if on("batch-0"):
            k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
        if on("kv-exchanged"):
            k, v = v, k
        for form in ("bhnd", "bnhd"):
            if on(f"heads-reshaped-{form}"):
                q, k, v = (reshaped(x, form) for x in (q, k, v))
        after = ((0, 0), (0, 0), (0, max(0, len(self.columns()) - self.N_k)), (0, 0))
        return (q, np.pad(k, after), np.pad(v, after)) if on("keys-padded") else (q, k, v)

    def columns(self) -> np.ndarray:
        """The keys that are visited, tile by tile."""
        on, B, N = self.on, self.B, self.N_k
        whole, last = N // B * B, (N - 1) // B * B
        if on("keys-tail-dropped"):
            return np.arange(whole)
        if on("keys-last-tile-dropped"):
            return np.arange(last)
        if on("keys-first-tile-dropped"):
            return np.arange(min(B, N), N)
        if on("keys-padded") and "mask" not in self.case.options:
            return np.arange(last + B)
        if on("keys-repeated") and N > B:
            return np.concatenate([np.arange(last), np.arange(N - B, N)])
        return np.arange(N)

    def tau(self) -> float:
        on, given = self.on, self.case.options.get("scale")
        usual = self.d**-0.5
        if on("scale-padded"):
            usual = (1 << (self.d - 1).bit_length()) ** -0.5
        tau = usual if given is None or on("scale-ignored") or (given == 0 and on("scale-zero")) else given
        for name, power in (("scale-missing", 0), ("scale-after", 0), ("scale-twice", 2), ("scale-root", 0.5)):
            tau = tau**power if on(name) else tau
        return 1 / np.float64(tau) if on("scale-inverse") else np.float64(tau)

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """S with −∞ where nothing is seen, what is seen, and the columns' numbers."""
        on, options, cols = self.on, self.case.options, self.columns()
        c, mask, tau = options.get("softcap"), options.get("mask"), self.tau()
        if on("operands-rounded"):
            q, k = rounded(q, self.bits), rounded(k, self.bits)
        k = k.reshape(*k.shape[:2], self.d, -1)[..., cols] if on("k-reshaped") else np.swapaxes(k, 2, 3)[..., cols]
        S = (q @ k) * tau
        bias = mask if mask is not None and mask.dtype != bool and not on("mask-ignored") else None
        if bias is not None:
            S = S + self.of_mask(bias)[..., cols] * (tau if on("bias-scaled") else -1 if on("bias-negative") else 1)
        if on("scores-rounded"):
            S = rounded(S, self.bits)
        S = S * (np.log(2) if on("base-2") else 1 / np.log(2) if on("base-2-twice") else 1)
        if c is not None and not on("softcap-ignored"):
            x = S / tau if on("softcap-unscaled") and tau else S
            x = (1 if on("softcap-factor") else c) * np.tanh(x / (1 if on("softcap-quotient") else c))
            S = x * tau if on("softcap-unscaled") else x
        seen = np.broadcast_to(self.seen(cols), S.shape)
        hidden = next((value for name, value in HIDDEN.items() if on(name)), -np.inf)
        if c is not None and on("softcap-last"):
            hidden = -c
        if on("maximum-hidden"):
            self.top = S.max(axis=-1)
        return np.where(seen, S, hidden) if not on("hidden-after") else S, seen, cols

    def of_mask(self, mask: np.ndarray) -> np.ndarray:
        if self.on("mask-head-0"):
            mask = np.broadcast_to(mask[:, :1], mask.shape)
        return np.swapaxes(mask, -1, -2) if self.on("mask-transposed") else mask

    # What is seen -------------------------------------------------------------------------------------------------

    def seen(self, cols: np.ndarray) -> np.ndarray:
        """True where a query may look."""
        on, options, N_q, N_k = self.on, self.case.options, self.N_q, self.N_k
        row, col, shift, same = np.arange(N_q)[:, None], cols[None, :], N_k - N_q, np.True_
        starts = options.get("cu_seqlens")
        if starts is not None:
            starts = starts + (starts > 0) * (starts < N_q) * (1 if on("packed-late") else 0)
            of_row, of_col = (np.searchsorted(starts, x, side="right") for x in (row, col))
            same = np.True_ if on("packed-ignored") else of_row == of_col
        if on("corner-top-left"):
            shift = 0
        if on("corner-sign"):
            shift = -shift
        ahead = col - row - shift
        causal = (options.get("causal", False) or on("always-causal")) and not on("causal-ignored")
        left, right = options.get("window") or (None, None)
        if on("window-ignored"):
            left, right = None, None
        if on("window-exchanged") and left != right:
            left, right = right, left
        if left is not None:
            left = left + on("window-left-long") - on("window-left-short") - on("window-counts-itself")
        if right is not None and not causal:
            right = right + on("window-right-long") - on("window-right-short") - on("window-counts-itself")
        if on("window-right-ignored"):
            right = None
        seen = np.broadcast_to(same, ahead.shape).copy()
        window = np.ones_like(seen)
        reach = ahead + shift if on("window-top-left") else ahead
        window &= (reach >= -left if left is not None else True) & (reach <= right if right is not None else True)
        if causal and not (on("window-not-causal") and options.get("window")):
            seen &= self.tiled(ahead, -on("causal-strict") + on("causal-late"))
        seen = seen & window
        mask, lengths = options.get("mask"), options.get("key_lengths")
        if mask is not None and mask.dtype == bool and not on("mask-ignored"):
            seen = seen & (self.of_mask(mask)[..., cols] ^ on("mask-inverted"))
        if lengths is not None and not on("lengths-ignored"):
            lengths = lengths + on("lengths-long") - on("lengths-short")
            lengths = np.broadcast_to(lengths[:1], lengths.shape) if on("lengths-first") else lengths
            seen = seen & (col < lengths[:, None, None, None])
        return seen

    def tiled(self, ahead: np.ndarray, late: int) -> np.ndarray:
        """The causal triangle, with what goes wrong where it is decided tile by tile."""
        on, B = self.on, self.B
        if on("causal-reversed"):
            return ahead >= 0
        seen = ahead <= late
        names = ("causal-in-tile", "diagonal-unmasked", "diagonal-skipped", "tile-past", "tile-unvisited")
        if not any(map(on, names)):
            return seen
        for i in range(0, self.N_q, B):
            for j in range(0, ahead.shape[1], B):
                tile = seen[i : i + B, j : j + B]
                is_cut = tile.any() and not tile.all()
                if on("causal-in-tile"):
                    tile[:] = np.tri(*tile.shape) > 0 if j <= i else False
                elif on("diagonal-unmasked") and is_cut:
                    tile[:] = True
                elif on("diagonal-skipped") and is_cut:
                    tile[:] = False
                elif on("tile-past") and j == i + B:
                    tile[:] = True
                elif on("tile-unvisited") and tile.all() and i == j + B:
                    tile[:] = False
        return seen

    # The softmax --------------------------------------------------------------------------------------------------

    def softmax(self, S: np.ndarray, seen: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        """O, L and P by the online softmax over tiles of B keys."""
        on, round_ = self.on, (lambda x: rounded(x, self.bits))
        for name, axis in (("axis-queries", 2), ("axis-heads", 1), ("axis-batch", 0)):
            if on(name):
                P = weights(S, axis)
                return P @ v, np.zeros(S.shape[:3]), P
        sinks = self.case.options.get("sinks")
        m, l = np.full(S.shape[:3], 0.0 if on("maximum-zero") else -np.inf), np.zeros(S.shape[:3])
        if sinks is not None and not on("sinks-ignored"):
            sinks = (sinks[:1] if on("sinks-head-0") else sinks)[None, :, None] * (
                self.tau() if on("sinks-scaled") else 1
            )
            m, l = np.broadcast_to(sinks, m.shape), l + 1.0
        o = np.zeros((*S.shape[:3], self.d))
        for tile in self.tiles(S.shape[-1]):
            s, v_j = S[..., tile], v[:, :, tile]
            top = s.max(axis=-1)
            new = np.maximum(m, top)
            new = np.where(np.isneginf(top), m, top) if on("maximum-tile") or on("tile-softmax") else new
            new = np.maximum(new, self.top) if on("maximum-hidden") else new
            new = np.zeros_like(m) if on("maximum-missing") else new
            if on("maximum-block"):
                new = np.broadcast_to(new.max(axis=2, keepdims=True), new.shape)
            p = self.exp(s - finite(m if on("weights-early") else new)[..., None])
            alpha = self.exp(m - finite(new))
            turned = np.where(np.isneginf(m), 0.0, 1 / alpha)
            a_l = turned if on("l-upside-down") or on("upside-down") else alpha
            a_o = turned if on("o-upside-down") or on("upside-down") else alpha
            a_l = np.ones_like(m) if on("l-not-rescaled") or on("not-rescaled") else a_l
            a_o = np.ones_like(m) if on("o-not-rescaled") or on("not-rescaled") else a_o
            l = (0 * l if on("l-set") or on("state-set") else a_l * l) + p.sum(axis=-1)
            if sinks is not None and on("sinks-per-tile") and tile.start:
                l = l + np.exp(sinks - finite(new))
            p = round_(p) if on("p-rounded") else p
            p = np.where(seen[..., tile], p, 0.0) if on("hidden-after") else p
            p = p / p.sum(axis=-1, keepdims=True) if on("tile-softmax") else p
            o = (0 * o if on("o-set") or on("state-set") else a_o[..., None] * o) + p @ v_j
            o = o / nonzero(l)[..., None] if on("divided-per-tile") else o
            l, o = (round_(l), round_(o)) if on("sums-rounded") else (l, o)
            m = new
        O = o if on("divided-never") or on("divided-per-tile") or on("tile-softmax") else o / nonzero(l)[..., None]
        O = O / nonzero(l)[..., None] if on("divided-twice") else O * self.own_tau() if on("scale-after") else O
        L = np.where(l == 0, -np.inf, m + np.log(nonzero(l)))
        P = np.exp(S - finite(L)[..., None])
        return (P.swapaxes(2, 3) @ v if on("p-transposed") and P.shape[2] == P.shape[3] else O), L, P

    def exp(self, x: np.ndarray) -> np.ndarray:
        """eˣ, which overflows as early as in the dtype that is examined."""
        return np.exp(x.astype(np.float32)).astype(float) if self.case.single else np.exp(x)

    def own_tau(self) -> float:
        given = self.case.options.get("scale")
        return self.d**-0.5 if given is None else given

    def tiles(self, N: int) -> Iterator[slice]:
        return (slice(j, min(j + self.B, N)) for j in range(0, N, self.B))

    def stored(self, O: np.ndarray) -> np.ndarray:
        """O as it is written."""
        on, B = self.on, self.B
        for form in ("bhnd", "bnhd"):
            if on(f"heads-reshaped-{form}"):
                O = reshaped(O, "bnhd" if form == "bhnd" else "bhnd", back=True)
            if on(f"output-reshaped-{form}"):
                O = merged(O, form)
        O, last = O.copy(), (self.N_q - 1) // B * B
        if on("rows-tail-missing") and self.N_q % B:
            O[:, :, self.N_q // B * B :] = 0
        if on("rows-first-alone") and B < self.N_q:
            O[:, :, B:] = 0
        if on("rows-last-alone"):
            O[:, :, :last] = 0
        starts = self.case.options.get("cu_seqlens")
        if starts is not None and on("packed-last-missing"):
            O[:, :, starts[-2] :] = 0
        return O

    def statistic(self, L: np.ndarray, S: np.ndarray) -> np.ndarray:
        """L as it is returned."""
        m = finite(S.max(axis=-1))
        l = np.exp(L - m)
        forms = {"L-without-m": np.log(l), "L-m-alone": m, "L-plus-l": m + l, "L-minus": m - np.log(l), "L-l-alone": l}
        forms |= {"L-base-2": L / np.log(2), "L-log2-l": m + np.log2(l), "L-sum": np.exp(L), "L-negative": -L}
        forms |= {"L-unscaled": L / self.tau() if self.tau() else L}
        return next((wrong for name, wrong in forms.items() if self.on(name)), L)

    # The backward -------------------------------------------------------------------------------------------------

    def gradients(self, *given: np.ndarray) -> dict[str, np.ndarray]:
        """dQ, dK and dV, those of k and v summed over the query heads that share them."""
        q, k, v, S, P, O, L = given
        on, dO, dL, tau, square = self.on, self.case.dO, self.case.dL, self.tau(), self.N_q == self.N_k
        m, c = finite(S.max(axis=-1))[..., None], self.case.options.get("softcap")
        P = np.exp2(S - finite(L)[..., None]) if on("P-base-2") else np.exp(S - m) if on("P-unnormalised") else P
        dP = dO @ np.swapaxes(v, 2, 3)
        D = (dO * O).sum(axis=-1)
        D = 0 * D if on("D-missing") else -D if on("D-sign") else dO.sum(axis=-1) if on("D-dO-alone") else D
        if on("D-unnormalised"):
            D = D * np.exp(L - m[..., 0])
        if dL is not None and not on("dL-dropped"):
            D = D + dL if on("dL-sign") else D - dL
        dS = P * dP - D[..., None] if on("D-outside") else P * (dP - D[..., None])
        dS = dP - D[..., None] if on("P-missing") else dS
        if on("D-columns") and square:
            dS = P * (dP - (P * dP).sum(axis=2, keepdims=True))
        if c is not None and not on("softcap-slope"):
            dS = dS * (1 - (finite(S) / c) ** 2)
        dQ = (tau * dS @ k) * (1 / tau if on("dQ-unscaled") or on("dQK-unscaled") else tau if on("dQK-twice") else 1)
        turned = dS if on("dK-transposed") and square else np.swapaxes(dS, 2, 3)
        dK = (tau * turned @ q) * (
            1 / tau if on("dK-unscaled") or on("dQK-unscaled") else tau if on("dQK-twice") else 1
        )
        dV = (P if on("dV-transposed") and square else np.swapaxes(P, 2, 3)) @ dO * (tau if on("dV-scaled") else 1)
        rows, cols = slice((self.N_q - 1) // self.B * self.B, None), slice((self.N_k - 1) // self.B * self.B, None)
        if on("dQ-set"):
            dQ = tau * dS[..., cols] @ k[:, :, cols]
        if on("dKV-set"):
            dK, dV = (np.swapaxes(x[:, :, rows], 2, 3) @ y[:, :, rows] for x, y in ((tau * dS, q), (P, dO)))
        for name, first in (("dQ-tail", "dQ"), ("dKV-tail", "dK")):
            if on(name):
                for x in (dQ,) if first == "dQ" else (dK, dV):
                    x[:, :, x.shape[2] // self.B * self.B :] = 0
        if on("dKV-exchanged"):
            dK, dV = dV, dK
        dK, dV = (x.reshape(self.batch, self.case.k.shape[1], -1, *x.shape[2:]) for x in (dK, dV))
        pick = 0 if on("group-first") else -1
        one = on("group-first") or on("group-last")
        dK, dV = (x[:, :, pick] if one else x.mean(axis=2) if on("group-mean") else x.sum(axis=2) for x in (dK, dV))
        return dict(dQ=dQ, dK=dK, dV=dV)


def weights(S: np.ndarray, axis: int) -> np.ndarray:
    """exp(S) / Σ exp(S) along an axis; zeros where all is hidden."""
    e = np.exp(S - finite(S.max(axis=axis, keepdims=True)))
    return e / nonzero(e.sum(axis=axis, keepdims=True))


def reshaped(x: np.ndarray, form: str, back: bool = False) -> np.ndarray:
    """(batch, heads, N, d) that lies in memory in one order, read as if it lay in the other."""
    b, h, n, d = x.shape
    if form == "bnhd":
        return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(b, h, n, d)
    return x.reshape(b, n, h, d).swapaxes(1, 2)


def merged(O: np.ndarray, form: str) -> np.ndarray:
    """The heads put side by side without the transpose that this needs."""
    return reshaped(O, "bhnd" if form == "bnhd" else "bnhd")
