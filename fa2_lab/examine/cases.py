"""Small problems on which an attention function is run, chosen to tell the known mistakes apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

TileSize = int | tuple[int, int]  # a tile's width and height, or (rows, keys)
OPEN = 10**9  # the length of a window's side that has no end
PAGE = 16  # keys per page of a paged cache
BITS = {"float64": 23, "float32": 23, "float16": 11, "bfloat16": 8}  # mantissa bits; float64 counts as float32
EXTREME = ("large", "hidden", "hidden mask")  # groups with extreme scores, where 16 bits may overflow
LONG = 5000  # --quick leaves out cases with more scores per head than this
SCALE_UP = 100.0  # the last feature of q in cases that shift all scores

# The sizes (N_q, N_k) at which each option is tested: within one tile, and beyond a tile of 64 or 128 rows or keys
Size = tuple[int, int]
SHORT, UNEQUAL, PAST_64, PAST_128, ACROSS, PAST_256 = (20, 20), (9, 21), (70, 70), (150, 150), (40, 150), (300, 300)
EVERY = (SHORT, UNEQUAL, PAST_64, PAST_128, ACROSS)
WINDOWS: list[Callable] = [  # (left, right) as a function of the number of keys
    lambda n: (n // 5, n // 5),
    lambda n: (n // 3, n // 3),
    lambda n: (n // 7 + 1, 1),
    lambda n: (n // 5, OPEN),
    lambda n: (OPEN, n // 10),
    lambda n: (0, 0),
]


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """A problem for an attention function, also called a case, with arrays (batch, heads, N, d) in float64.

    It contains q, k, v and the options, dO and dL for the backward pass, and the name of the group of mistakes that it
    tests.
    """

    group: str  # the group of mistakes tested; groups are judged in the order of the cases
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dO: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    gradients: bool = False  # whether gradients are computed
    dL: np.ndarray | None = None  # the loss's gradient with respect to L, if L takes part in it
    made: tuple[float, float] = (1.0, 0.0)  # the factor and the shift that are applied to all scores
    single: bool = False  # whether exponentials overflow as in float32
    tile: tuple[int, int] = (0, 0)  # number of rows and keys in a tile, if known
    usual_d: int = 0  # head dimension of the other cases, if it differs from this case's

    def __str__(self) -> str:
        batch, heads, N_q, d = self.q.shape
        shared = f" on {self.k.shape[1]}" if self.k.shape[1] != heads else ""
        options = "".join(f", {x}" if v is True else f", {x} {short(v)}" for x, v in self.options.items())
        of_v = f", {self.v.shape[3]} for v" if self.v.shape[3] != d else ""
        return f"batch {batch}, heads {heads}{shared}, {N_q} queries, {self.k.shape[2]} keys, d {d}{of_v}{options}"

    @property
    def is_long(self) -> bool:
        return self.q.shape[2] * self.k.shape[2] > LONG

    def rounded(self, to: Callable[[np.ndarray], np.ndarray]) -> AttentionCase:
        """Return this case with q, k, v and dO rounded by the function `to`, which rounds an array to a dtype."""
        return replace(self, q=to(self.q), k=to(self.k), v=to(self.v), dO=to(self.dO), single=True)

    def part(self, batch: slice = slice(None), heads: slice = slice(None)) -> AttentionCase:
        """Return this case restricted to a slice of the batch entries and a slice of the heads."""
        cut = {name: getattr(self, name)[batch, heads] for name in ("q", "k", "v", "dO")}
        of_option = dict(mask=(batch, heads), kept=(batch, heads), key_lengths=batch, sinks=heads, slopes=heads)
        options = {name: x[of_option[name]] if name in of_option else x for name, x in self.options.items()}
        return replace(self, **cut, options=options, dL=None if self.dL is None else self.dL[batch, heads])


def one_head(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, dO: np.ndarray | None = None, tile: tuple = (0, 0), **options: Any
) -> AttentionCase:
    """Return a case with one head, given Q, K, V and dO (N, d) and options such as `scale` and `causal`."""
    q, k, v, of_O = (x[None, None] for x in (Q, K, V, np.zeros_like(Q) if dO is None else dO))
    return AttentionCase("", q, k, v, of_O, options, tile=tile)


def short(value: Any) -> str:
    return f"of shape {value.shape}" if isinstance(value, np.ndarray) and value.ndim > 1 else str(value)


def case(
    group: str, N_q: int, N_k: int = 0, d: int = 16, batch: int = 1, heads: int = 2, kv_heads: int = 0, **more: Any
) -> AttentionCase:
    """Return a random case of these sizes. N_k = 0 means N_q, and kv_heads = 0 means `heads`.

    `more` contains the options of the case. It can also contain `gradients` and `dL`, which are True if gradients and a
    gradient of L are part of the case, and `size` and `shift`. All scores are multiplied by `size`. `shift` is added to
    each score before the scale, so it does not change the softmax. `d_v` is the head dimension of v, if it is not d.
    """
    draw = np.random.default_rng([0, N_q, N_k, d]).standard_normal
    size, shift, gradients = more.pop("size", 1.0), more.pop("shift", 0.0), more.pop("gradients", False)
    N_k, kv_heads, d_v = N_k or N_q, kv_heads or heads, more.pop("d_v", d)
    of_q, of_k = (batch, heads, N_q), (batch, kv_heads, N_k)
    q, k, v, dO = (draw((*x, width)) for x, width in ((of_q, d), (of_k, d), (of_k, d_v), (of_q, d_v)))
    q = q * size
    if shift:
        q[..., -1], k[..., -1] = SCALE_UP, shift / SCALE_UP
    dL = draw((batch, heads, N_q)) if more.pop("dL", False) else None
    return AttentionCase(group, q, k, v, dO, more, gradients, dL, made=(size, shift))


def all_cases(d: int = 16, multiple: int = 1, quick: bool = False) -> list[AttentionCase]:
    """Return all cases, with head dimension d: each option at several sizes. If `quick` is set, leave out long cases.

    Lengths are rounded up to multiples of `multiple`, for functions that require this. The cases include the
    gradients, except those with extreme scores, with a scale of 0, or with a V whose width is not d.
    """
    cases: list[AttentionCase] = []

    def add(group: str, *sizes: Size, **more: Any) -> None:
        """Add one case per size (N_q, N_k). An option that is a function is called with (batch, heads, N_q, N_k)."""
        for asked in sizes:
            N_q, N_k = (-(-n // multiple) * multiple for n in asked)
            N_k += multiple * (N_q == N_k and asked[0] < asked[1])
            usual = dict(
                d=d, heads=1 + (max(asked) < 128), batch=1 + (asked == UNEQUAL), gradients=group not in EXTREME
            )
            usual |= dict(size=2.0 if max(asked) > 60 else 1.0) | more
            of = usual["batch"], usual["heads"], N_q, N_k
            values = {name: x(*of) if callable(x) else x for name, x in usual.items()}
            if not (quick and asked[0] * asked[1] > LONG):
                cases.append(case(group, N_q, N_k, **values))

    add("plain", (16, 16), (48, 48), PAST_64, (200, 200), PAST_256)
    add("plain", (7, 7), (128, 128), batch=2)
    add("plain", (40, 40), batch=3)
    add("cross", (7, 13), batch=2)
    add("cross", (64, 128), ACROSS)
    add("scale", (9, 9), ACROSS, scale=0.6)
    add("scale", (9, 9), scale=0.0, gradients=False)
    add("width", (9, 9), d=d * 3 // 2)
    add("width", (9, 9), d=d * 8)
    add("values", (9, 9), d_v=2 * d, gradients=False)
    cases = [replace(x, usual_d=d) if x.group == "width" else x for x in cases]
    add("large", (12, 12), shift=4e4)
    add("large", (12, 12), shift=-4e4)
    add("large", PAST_64, (200, 200), size=2e3, heads=1)
    add("causal", (16, 16), PAST_64, (200, 200), PAST_256, causal=True)
    add("corner", UNEQUAL, ACROSS, (100, 170), causal=True)
    add("hidden", (12, 12), causal=True, size=400.0)
    add("hidden", (12, 12), causal=True, shift=-2.4e5)
    add("empty", (21, 9), causal=True)
    add("grouped", (8, 8), heads=6, kv_heads=3, batch=2)
    add("grouped", (8, 8), heads=4, kv_heads=1)
    add("grouped", UNEQUAL, PAST_64, heads=4, kv_heads=2, causal=True)
    for window in WINDOWS:
        add("window", *EVERY, window=lambda *of, of_keys=window: of_keys(of[3]))
    add("window", *EVERY, window=lambda *of: (of[3] // 5 + 1, of[3] // 5 + 1), causal=True)
    add("softcap", SHORT, UNEQUAL, PAST_64, softcap=1.5, size=2.0)
    add("softcap", SHORT, ACROSS, softcap=2.0, causal=True)
    for causal in ({}, dict(causal=True)):
        for name, mask in (("mask", allowed), ("bias", lambda *of: 2 * drawn(*of))):
            add(name + ", causal" * len(causal), SHORT, UNEQUAL, PAST_64, ACROSS, mask=mask, **causal)
    add("empty-mask", SHORT, mask=lambda *of: allowed(*of) & (np.arange(of[2])[:, None] // 3 != 1))
    add("hidden mask", SHORT, mask=allowed, shift=-2.4e5)
    add("lengths", (6, 16), SHORT, batch=3, key_lengths=lengths)
    add("lengths", PAST_64, ACROSS, batch=2, key_lengths=lambda *of: lengths(*of) - 3)
    add("empty-lengths", (6, 16), batch=3, key_lengths=lambda *of: lengths(*of) * (np.arange(3) != 1))
    add("lengths, causal", (6, 16), batch=3, causal=True, key_lengths=lambda *of: lengths(*of) - np.array([0, 0, 2]))
    add("lengths, causal", ACROSS, batch=2, causal=True, key_lengths=lambda *of: lengths(*of) - 3)
    for window in (lambda n: (n // 5, OPEN), lambda n: (OPEN, n // 10), lambda n: (n // 5 + 1, n // 5 + 1)):
        of = dict(window=lambda *of, of_keys=window: of_keys(of[3]))
        add("lengths, window", (6, 16), batch=3, key_lengths=lambda *of: lengths(*of) - np.array([0, 0, 2]), **of)
        add("lengths, window", ACROSS, batch=2, key_lengths=lambda *of: lengths(*of) - 3, **of)
    add("lengths, softcap", (6, 16), batch=3, key_lengths=lengths, softcap=1.5, size=2.0)
    add("alibi", SHORT, UNEQUAL, PAST_64, slopes=slopes)
    add("alibi", SHORT, ACROSS, slopes=slopes, causal=True)
    add("alibi", SHORT, heads=6, kv_heads=3, slopes=slopes)
    add("kept", SHORT, UNEQUAL, PAST_64, dropout=0.4, kept=allowed)
    for N_q, N_k in ((23, 23), (23, 31), (150, 200)):
        ends = dict(cu_seqlens=np.array([0, N_q // 5, N_q // 2, N_q]))
        ends |= dict(cu_seqlens_k=np.array([0, N_k // 3, N_k // 2 + 2, N_k])) if N_q < N_k else {}
        add("packed", (N_q, N_k), **ends)
        add("packed, causal", (N_q, N_k), causal=True, **ends)
        add("packed, causal", (N_q, N_k), causal=True, heads=4, kv_heads=2, **ends)
        add("packed, window", (N_q, N_k), window=(N_k // 10, OPEN), **ends)
        add("packed, window", (N_q, N_k), window=(N_k // 10, N_k // 10), causal=True, **ends)
    add("packed", (23, 23), cu_seqlens=np.array([0, 14, 23]))
    add("packed, softcap", (23, 23), softcap=1.5, size=2.0, cu_seqlens=np.array([0, 5, 12, 23]))
    add("packed", (23, 23), causal=True, cu_seqlens=np.array([0, 5, 5, 12, 23]))
    some = dict(cu_seqlens=np.array([0, 5, 12, 23]), cu_seqlens_k=np.array([0, 14, 14, 31]))
    add("empty-packed", (23, 31), **some)
    add("sinks", SHORT, UNEQUAL, PAST_64, causal=True, sinks=sinks)
    add("sinks", SHORT, ACROSS, sinks=sinks)
    add("sinks", SHORT, heads=6, kv_heads=3, sinks=sinks)
    add("sinks", SHORT, PAST_64, sinks=sinks, window=(5, 5), causal=True)
    add("dL", SHORT, UNEQUAL, PAST_64, dL=True)
    add("dL", SHORT, causal=True, dL=True, heads=4, kv_heads=2)
    return cases


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


def allowed(*shape: int) -> np.ndarray:
    """Return a random boolean mask that lets each row see the first key and most of the others."""
    return (drawn(*shape) < 0.3) | (np.arange(shape[3]) == 0)


def lengths(batch: int, heads: int, N_q: int, N_k: int) -> np.ndarray:
    return np.array([N_k * (b + 1) // batch + 2 * (b + 1 < batch) for b in range(batch)])


def slopes(batch: int, heads: int, N_q: int, N_k: int) -> np.ndarray:
    return 2.0 ** -np.arange(1.0, 2 * heads, 2)


def sinks(batch: int, heads: int, N_q: int, N_k: int) -> np.ndarray:
    return np.array([0.5, -1.0, 1.5, 0.0, 2.0, -0.5])[:heads]


def paged(k: np.ndarray, page: int = PAGE) -> tuple[np.ndarray, np.ndarray]:
    """Return k (batch, heads, N, d) in pages (pages, heads, page, d), and the block table that lists them.

    The pages of all batch entries are in memory in a random order, with one unused page among them.
    """
    batch, heads, N, d = k.shape
    table = np.random.default_rng(N).permutation(1 + batch * -(-N // page))[1:].reshape(batch, -1)
    k = np.pad(k, ((0, 0), (0, 0), (0, -N % page), (0, 0)), constant_values=7.0)
    pool = np.full((1 + table.size, heads, page, d), 7.0)
    pool[table] = k.reshape(batch, heads, -1, page, d).swapaxes(1, 2)
    return pool, table


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Return x rounded to `bits` mantissa bits: 8 for bf16, 11 for fp16 and TF32, 24 for fp32."""
    with np.errstate(invalid="ignore"):
        fraction, exponent = np.frexp(x)
        return np.ldexp(np.round(fraction * 2.0**bits) / 2.0**bits, exponent)
