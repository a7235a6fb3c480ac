"""The small problems on which an attention function is called, chosen so that they tell the known mistakes apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

TileSize = int | tuple[int, int]  # its size, or (rows, keys)
OPEN = 10**9  # a side of a window that has no end
PAGE = 16  # keys of a page, in a cache that is stored in pages
BITS = {"float64": 23, "float32": 23, "float16": 11, "bfloat16": 8}  # of each dtype; float64 is held to float32
SCALE_UP = 100.0  # the last feature of q and k where all scores are moved up or down


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """A problem for an attention function, also called a case, with arrays (batch, heads, N, d) in float64.

    It contains q, k, v and the options, dO and dL for the backward, and the name of the group of mistakes that it
    tests.
    """

    group: str  # what it is about; the groups are judged in the order in which they are asked
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dO: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    gradients: bool = False  # whether its gradients are asked for
    dL: np.ndarray | None = None  # the gradient of L, where L takes part in the loss
    made: tuple[float, float] = (1.0, 0.0)  # by what all scores are multiplied, and what is added to them
    single: bool = False  # whether exponentials overflow as in float32
    tile: tuple[int, int] = (0, 0)  # rows and keys of a tile, if they are known
    usual_d: int = 0  # that of the other problems, if this one has another

    def __str__(self) -> str:
        batch, heads, N_q, d = self.q.shape
        shared = f" on {self.k.shape[1]}" if self.k.shape[1] != heads else ""
        options = "".join(f", {x}" if v is True else f", {x} {short(v)}" for x, v in self.options.items())
        return f"batch {batch}, heads {heads}{shared}, {N_q} queries, {self.k.shape[2]} keys, d {d}{options}"

    @property
    def is_long(self) -> bool:
        return self.q.shape[2] * self.k.shape[2] > 5000

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
    each score before the scale, so it does not change the softmax.
    """
    draw = np.random.default_rng([0, N_q, N_k, d]).standard_normal
    size, shift, gradients = more.pop("size", 1.0), more.pop("shift", 0.0), more.pop("gradients", False)
    N_k, kv_heads = N_k or N_q, kv_heads or heads
    q, k, v, dO = (draw((batch, h, n, d)) for h, n in ((heads, N_q), (kv_heads, N_k), (kv_heads, N_k), (heads, N_q)))
    q = q * size
    if shift:
        q[..., -1], k[..., -1] = SCALE_UP, shift / SCALE_UP
    dL = draw((batch, heads, N_q)) if more.pop("dL", False) else None
    return AttentionCase(group, q, k, v, dO, more, gradients, dL, made=(size, shift))


def all_cases(d: int = 16, multiple: int = 1, quick: bool = False) -> list[AttentionCase]:
    """Return all cases, with head dimension d. If `quick` is set, leave out the long cases.

    Lengths are rounded up to multiples of `multiple`, for functions that require this.
    """
    draw = np.random.default_rng(7)

    def make(group: str, N_q: int, N_k: int = 0, **more: Any) -> AttentionCase:
        N_q, N_k = (-(-n // multiple) * multiple for n in (N_q, N_k or N_q))
        return case(group, N_q, N_k, **dict(d=d) | more)

    allowed = draw.random((1, 2, 12, 12)) < 0.6
    allowed[..., 0] = True  # no row is empty
    none = allowed.copy()
    none[:, :, 3:6] = False
    bias = 2 * draw.standard_normal((1, 2, 12, 12))
    slopes, packed = np.array([0.5, 0.125]), np.array([0, 5, 12, 23])
    cases = [
        make("plain", 16, gradients=True),
        make("plain", 7, batch=2, gradients=True),
        make("plain", 70, size=2.0, gradients=True),
        make("plain", 128, batch=2, heads=1),
        make("plain", 200, heads=1),
        make("cross", 7, 13, batch=2, gradients=True),
        make("cross", 64, 128, size=2.0),
        make("cross", 40, 200, size=2.0, heads=1),
        make("scale", 9, scale=0.6, gradients=True),
        make("scale", 9, scale=0.0),
        replace(make("width", 9, d=d * 3 // 2), usual_d=d),
        make("large", 12, shift=4e4),
        make("large", 12, shift=-4e4),
        make("large", 70, size=2e3, heads=1),
        make("large", 200, size=2e3, heads=1),
        make("causal", 16, causal=True, gradients=True),
        make("causal", 70, size=2.0, causal=True, gradients=True),
        make("causal", 200, heads=1, causal=True),
        make("corner", 9, 21, causal=True, gradients=True),
        make("corner", 40, 200, heads=1, causal=True),
        make("hidden", 12, causal=True, size=400.0),
        make("hidden", 12, causal=True, shift=-2.4e5),
        make("empty", 21, 9, causal=True, gradients=True),
        make("grouped", 8, heads=6, kv_heads=3, batch=2, gradients=True),
        make("grouped", 8, heads=4, kv_heads=1, gradients=True),
        make("window", 20, window=(4, 4)),
        make("window", 20, window=(7, 7)),
        make("window", 20, causal=True, window=(5, 5), gradients=True),
        make("window", 20, window=(3, 1), gradients=True),
        make("window", 9, 21, window=(2, 1)),
        make("window", 20, window=(4, OPEN)),
        make("window", 20, window=(OPEN, 2)),
        make("window", 70, heads=1, causal=True, window=(9, 9), gradients=True),
        make("window", 70, heads=1, window=(9, OPEN), gradients=True),
        make("window", 200, heads=1, causal=True, window=(41, 41)),
        make("window", 140, heads=1, window=(4, 4)),
        make("softcap", 12, softcap=1.5, size=2.0, gradients=True),
        make("softcap", 12, softcap=2.0, causal=True),
        case("mask", 12, d=d, mask=allowed, gradients=True),
        case("bias", 12, d=d, mask=bias, gradients=True),
        case("mask, causal", 12, d=d, mask=allowed, causal=True),
        case("bias, causal", 12, d=d, mask=bias, causal=True),
        case("empty-mask", 12, d=d, mask=none, gradients=True),
        case("hidden mask", 12, d=d, mask=allowed, shift=-2.4e5),
        make("lengths", 6, 16, batch=3, key_lengths=np.array([5, 11, 16]), gradients=True),
        make("lengths", 12, batch=3, key_lengths=np.array([5, 9, 12])),
        make("lengths", 6, 70, batch=2, heads=1, key_lengths=np.array([33, 64])),
        make("lengths, causal", 6, 16, batch=3, causal=True, key_lengths=np.array([7, 11, 16])),
        make("alibi", 9, 140, slopes=slopes),
        make("alibi", 20, causal=True, slopes=slopes, gradients=True),
        make("alibi", 20, heads=6, kv_heads=3, slopes=2.0 ** -np.arange(1.0, 7.0)),
        case("kept", 12, d=d, dropout=0.4, kept=allowed, gradients=True),
        case("packed", 23, d=d, cu_seqlens=packed),
        case("packed", 23, 31, d=d, cu_seqlens=packed, cu_seqlens_k=np.array([0, 9, 15, 31])),
        case("packed, causal", 23, 31, d=d, causal=True, cu_seqlens=packed, cu_seqlens_k=np.array([0, 9, 17, 31])),
        case("packed", 23, d=d, cu_seqlens=np.array([0, 5, 5, 12, 23]), causal=True, gradients=True),
        make("sinks", 12, causal=True, sinks=np.array([0.5, -1.0]), gradients=True),
        make("sinks", 20, 140, sinks=np.array([1.0, 3.0])),
        make("sinks", 12, heads=6, kv_heads=3, sinks=np.array([0.5, -1.0, 1.5, 0.0, 2.0, -0.5])),
        make("dL", 9, gradients=True, dL=True),
        make("dL", 12, causal=True, gradients=True, dL=True),
    ]
    return [x for x in cases if not x.is_long] if quick else cases


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
    """Return x rounded to `bits` bits of mantissa: 8 for bf16, 11 for fp16 and TF32, 24 for fp32."""
    with np.errstate(invalid="ignore"):
        fraction, exponent = np.frexp(x)
        return np.ldexp(np.round(fraction * 2.0**bits) / 2.0**bits, exponent)
