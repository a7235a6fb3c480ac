"""A correct attention in NumPy float64, and versions of it with known mistakes.

The function right() is correct. Each mistake in the catalogue is an edit of its source that replaces one expression
with another, which may call one of this module's helper functions. B is the tile size, for mistakes that depend on it.
If B is 0, the case's own tile size is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np

from fa2_lab.examine.cases import OPEN, PAGE, AttentionCase, TileSize, paged, rounded  # noqa: F401 — some mistakes use them
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.reference.online_softmax import finite, nonzero


def attention(
    case: AttentionCase, mistakes: Iterable[str] = (), B: TileSize = 0, bits: int = 8, *, gradients: bool = False
) -> dict[str, np.ndarray]:
    """Return a dictionary with "O", "L" and "largest" for a case, computed with the given mistakes.

    If `gradients` is set, the dictionary also contains "dQ", "dK" and "dV". "largest" is the largest magnitude of a
    score. B is the width and height of a tile, or (rows, keys), and 0 means the case's own tile size. Mistakes that
    round a value round it to `bits` bits.
    """
    B_r, B_c = B if isinstance(B, tuple) else (B, B)
    with np.errstate(all="ignore"):
        return changed(tuple(mistakes), gradients)(case, B_r or case.tile[0], B_c or case.tile[1], bits, gradients)


@cache
def changed(mistakes: tuple[str, ...], gradients: bool) -> Callable:
    """Return the function right() with these mistakes made. If `gradients` is not set, it has no backward pass.

    Raise a ValueError if a mistake changes code that another mistake has already removed.
    """
    source, space = combine(mistakes), globals().copy()
    if not source:
        raise ValueError(f"{', '.join(mistakes)} cannot be had together")
    exec(source if gradients else source.split("    if not gradients")[0] + "    return outputs", space)
    return space["right"]


@cache
def combine(mistakes: tuple[str, ...]) -> str:
    """Return right()'s source with these mistakes introduced, or "" if one of them edits code that another removes."""
    source = combine(mistakes[:-1]) if mistakes else inspect.getsource(right)
    for old, new in CATALOGUE[mistakes[-1]].edits if mistakes else ():
        source = source.replace(old, new) if old in source else ""
    return source


def right(case: AttentionCase, B_r: int, B_c: int, bits: int, gradients: bool) -> dict[str, np.ndarray]:
    """Return O, L and, if `gradients` is set, dQ, dK and dV for a case, following the steps of FlashAttention-2.

    Arrays have shape (batch, heads, rows, keys or features). B_r and B_c are the tile sizes, and 0 means a single tile.
    `bits` is not used here, but by mistakes, which are edited versions of this function with the same parameters.
    """
    (batch, H, N_q, d), (H_k, N_k) = case.q.shape, case.k.shape[1:3]
    B_r, B_c, options, exp = B_r or N_q, B_c or N_k, case.options, overflowing if case.single else np.exp
    causal, (scale, window, softcap) = options.get("causal", False), map(options.get, ("scale", "window", "softcap"))
    mask, lengths, starts, sinks = map(options.get, ("mask", "key_lengths", "cu_seqlens", "sinks"))
    slopes, kept, p_drop = options.get("slopes"), options.get("kept"), options.get("dropout", 0.0)
    is_added, columns = mask is not None and mask.dtype != bool, np.arange(N_k)
    entry, of = np.arange(batch)[:, None], np.arange(H) * H_k // H
    q, k, v, dO, dL = case.q[:], case.k[entry, of], case.v[entry, of], case.dO, case.dL
    k, v = k[:, :, columns], v[:, :, columns]
    tau = np.float64(d**-0.5 if scale is None else scale)
    Z = np.ones(len(columns)) if kept is None else kept[..., columns] / (1 - p_drop)  # the factors of dropout

    # Positions: in each row's sequence, the diagonal is at column row + corner
    row, rows = np.arange(N_q)[:, None], np.array([0, N_q]) if starts is None else starts
    keys = np.array([0, N_k]) if starts is None else options.get("cu_seqlens_k", starts)
    i = np.searchsorted(rows, row, side="right") - 1
    corner = keys[i + 1] - rows[i + 1]
    first, start = row // B_r * B_r, columns // B_c * B_c  # each row block's first row, each tile's first key
    last, end = np.minimum(first + B_r, N_q) - 1, start + B_c - 1

    # The scores
    X = q @ T(k) * tau
    if mask is not None and is_added:
        X = X + mask[..., columns]
    if softcap is not None:
        X = softcap * np.tanh(X / softcap)
    if slopes is not None:
        X = X - slopes[:, None, None] * np.abs(columns - row - corner)

    # The visible entries: under a causal mask, tiles cut by the diagonal are masked, and tiles past it are skipped
    def look(causal: bool, corner: np.ndarray) -> np.ndarray:
        ahead, seen = columns - row - corner, np.ones((N_q, len(columns)), dtype=bool)
        if causal:
            is_cut, visited = (start <= last + corner) & (end > first + corner), start <= last + corner
            seen = np.where(is_cut, ahead <= 0, visited)
        if window:
            left, right = window
            seen = seen & (ahead >= -left) & (ahead <= right)
        if starts is not None:
            seen = seen & (columns >= keys[i]) & (columns < keys[i + 1])
        if mask is not None and not is_added:
            seen = seen & (mask[..., columns] != 0)
        if lengths is not None:
            seen = seen & (columns < lengths[:, None, None, None])
        return np.broadcast_to(seen, X.shape)

    seen = look(causal, corner)
    S = np.where(seen, X, -np.inf)

    # The online softmax
    m, l, o = np.full(S.shape[:3], -np.inf), np.zeros(S.shape[:3]), np.zeros(dO.shape)
    if sinks is not None:
        m, l = np.broadcast_to(sinks[None, :, None], m.shape), l + 1
    for tile, visited in visits(seen, B_r, B_c):
        s = S[..., tile]
        m_new = np.maximum(m, s.max(axis=-1))
        p, alpha = exp(s - finite(m_new)[..., None]), exp(m - finite(m_new))
        l_new = alpha * l + p.sum(axis=-1)
        o_new = alpha[..., None] * o + Z[..., tile] * p @ v[:, :, tile]
        m, l = np.where(visited, m_new, m), np.where(visited, l_new, l)
        o = np.where(visited[..., None], o_new, o)
    O, L = o / nonzero(l)[..., None], np.where(l == 0, -np.inf, m + np.log(nonzero(l)))
    P = np.where(look(causal, corner), np.exp(X - finite(L)[..., None]), 0.0)
    outputs = dict(O=O, L=L, largest=np.abs(X).max(initial=1.0))
    if not gradients:
        return outputs

    # Backward
    D, dP = (dO * O).sum(axis=-1, keepdims=True), Z * (dO @ T(v))
    if dL is not None:
        D = D - dL[..., None]
    dS = P * (dP - D)
    if softcap is not None:
        dS = dS * (1 - (X / softcap) ** 2)
    dQ, dK, dV = tau * dS @ k, tau * T(dS) @ q, T(Z * P) @ dO
    dK, dV = (x.reshape(batch, H_k, -1, *x.shape[2:]).sum(axis=2) for x in (dK, dV))
    return outputs | dict(dQ=dQ, dK=dK, dV=dV)


def visits(seen: np.ndarray, B_r: int, B_c: int) -> Iterator[tuple[slice, np.ndarray]]:
    """For each tile of B_c keys, yield the slice of its keys, and a boolean array of the rows that process the tile.

    A row processes a tile if any row in its row block (B_r rows) sees any of the tile's keys. The array is (batch,
    heads, N_q), and the mask `seen` is (batch, heads, N_q, N_k).
    """
    first, block = np.arange(0, seen.shape[2], B_r), np.arange(seen.shape[2]) // B_r
    for j in range(0, seen.shape[3], B_c):
        sees = seen[..., j : j + B_c].any(axis=3)
        yield slice(j, j + B_c), np.logical_or.reduceat(sees, first, axis=2)[:, :, block]


def T(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def overflowing(x: np.ndarray) -> np.ndarray:
    """Return eˣ as a float64 array, computed in float32 so that it overflows as early as in the examined function."""
    return np.exp(x.astype(np.float32)).astype(float)


# Wrong steps that need more than one expression, called in the catalogue ----------------------------------------------


def T_unless_square(x: np.ndarray) -> np.ndarray:
    """Return xᵀ or, if x is square, x itself.

    This imitates a missing transpose, which raises no error only if x is square.
    """
    return x if x.shape[2] == x.shape[3] else T(x)


def weights(S: np.ndarray, of_maximum: int = 3, of_sum: int = 3) -> np.ndarray:
    """Return exp(S − max) / Σ exp(S − max), with the maximum and the sum along the axes `of_maximum` and `of_sum`."""
    e = np.exp(S - finite(S.max(axis=of_maximum, keepdims=True)))
    return e / nonzero(e.sum(axis=of_sum, keepdims=True))


def by_tiles(S: np.ndarray, v: np.ndarray, B: int) -> np.ndarray:
    """Return the sum, over all tiles of B keys, of the tile's own softmax times its values."""
    tiles = [slice(j, j + B) for j in range(0, S.shape[3], B)]
    return np.sum([weights(S[..., x]) @ v[:, :, x] for x in tiles], axis=0)


def merged(S: np.ndarray, v: np.ndarray, parts: int, tile: int, how: str) -> np.ndarray:
    """Split the keys into `parts` pieces, compute each piece's O with its own softmax, and merge the results wrongly.

    A piece consists of whole tiles of `tile` keys. If there is only one tile, the pieces are as equal as possible.
    `how` names the mistake. With "mean", "maximum", "sum" and "last", the merge uses wrong weights. With "undivided",
    the correct weights are not divided by their sum. With "unscaled", they are divided by a sum of l without rescaling.
    With "late", each piece is merged into the pieces before it, which are not rescaled.
    """
    N_k = S.shape[3]
    length = -(-N_k // (parts * tile)) * tile
    ends = np.minimum(np.arange(length, N_k + length, length), N_k)
    ends = np.cumsum([len(x) for x in np.array_split(np.arange(N_k), min(parts, N_k))]) if tile >= N_k else ends
    cuts = [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    m = np.stack([S[..., x].max(axis=-1) for x in cuts])
    l = np.stack([np.exp(S[..., x] - finite(S[..., x].max(axis=-1, keepdims=True))).sum(axis=-1) for x in cuts])
    last = np.arange(len(cuts))[:, None, None, None] == len(cuts) - 1
    of_maximum, L = np.exp(m - finite(m.max(axis=0))), m + np.log(nonzero(l))
    w = dict(mean=np.ones_like(m), maximum=of_maximum, sum=l, last=last * np.ones_like(m))
    w |= dict(undivided=np.exp(L - finite(L.max(axis=0))), unscaled=of_maximum * l)
    w["late"] = np.exp(L - finite(np.logaddexp.accumulate(L, axis=0)))
    total = dict(undivided=1.0, late=1.0, unscaled=nonzero(l.sum(axis=0))).get(how, nonzero(w[how].sum(axis=0)))
    return np.einsum("pbhr,pbhrd->bhrd", w[how] / total, [weights(S[..., x]) @ v[:, :, x] for x in cuts])


def by_place(x: np.ndarray, B: int, fill: float) -> np.ndarray:
    """Pad x (batch, heads, N, …) with `fill`, and reshape it to blocks of B rows, (batch, heads, blocks, B, …)."""
    after = -x.shape[2] % B
    x = np.pad(x, [(0, 0), (0, 0), (0, after)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)
    return x.reshape(*x.shape[:2], -1, B, *x.shape[3:])


def carried(L: np.ndarray, B: int) -> np.ndarray:
    """Return L as it would be if the row sums were not reset between row blocks.

    Each row would then start with the sum of the row at the same position in the previous block of B rows.
    """
    whole = np.logaddexp.accumulate(by_place(L, B, -np.inf), axis=2)
    return whole.reshape(*L.shape[:2], -1)[:, :, : L.shape[2]]


def unreset(O: np.ndarray, L: np.ndarray, B: int) -> np.ndarray:
    """Return O as it would be if o and l were not reset between row blocks.

    Each row would then start with o and l of the row at the same position in the previous block of B rows.
    """
    l = np.exp(by_place(L - L.max(initial=-1e300), B, -np.inf))
    sums = (by_place(O, B, 0.0) * l[..., None]).cumsum(axis=2) / nonzero(l.cumsum(axis=2))[..., None]
    return sums.reshape(*O.shape[:2], -1, O.shape[3])[:, :, : O.shape[2]]


def last_tile(dS: np.ndarray, seen: np.ndarray, B_r: int, B_c: int) -> np.ndarray:
    """Return dS with zeros everywhere except in the last tile that each row processes."""
    kept = np.zeros(dS.shape, dtype=bool)
    for tile, visited in visits(seen, B_r, B_c):
        of_tile = np.isin(np.arange(dS.shape[3]), np.arange(tile.start, tile.stop))
        kept = np.where(visited[..., None], of_tile, kept)
    return np.where(kept, dS, 0.0)


def late(starts: np.ndarray) -> np.ndarray:
    """Return the cumulative sequence lengths with 1 added to all but the first and the last."""
    return starts + (starts > 0) * (starts < starts[-1])


def turned(alpha: np.ndarray, m: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(m), 0.0, 1 / alpha)


def padded(k: np.ndarray, B: int) -> np.ndarray:
    return np.pad(k, ((0, 0), (0, 0), (0, -k.shape[2] % B), (0, 0)))


def stale(k: np.ndarray, B: int) -> np.ndarray:
    """Return k padded to whole tiles with what a buffer would still hold: the previous tile's rows, or zeros."""
    n, k = k.shape[2], padded(k, B)
    if n > B:
        k[:, :, n:] = k[:, :, n - B : k.shape[2] - B]
    return k


def reshaped(x: np.ndarray, form: str) -> np.ndarray:
    """Return x (batch, heads, N, d) as it would look if heads and N were swapped by a reshape instead of a transpose.

    If `form` is "bnhd", the data are stored as (batch, N, heads, d) but read as (batch, heads, N, d). Otherwise, the
    data are stored as (batch, heads, N, d), read as (batch, N, heads, d), and then transposed.
    """
    b, h, n, d = x.shape
    if form == "bnhd":
        return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(b, h, n, d)
    return x.reshape(b, n, h, d).swapaxes(1, 2)


def tiles_reshaped(k: np.ndarray, B: int) -> np.ndarray:
    """Turn k (…, N, d) into (…, d, N) by reshaping each tile of B rows, although a transpose would be correct."""
    tiles = [k[:, :, j : j + B] for j in range(0, k.shape[2], B)]
    return np.concatenate([x.reshape(*x.shape[:2], k.shape[3], -1) for x in tiles], axis=3)


def in_order(k: np.ndarray, page: int) -> np.ndarray:
    """Return k as it would be read if a cache's pages were read in memory order."""
    pool, table = paged(k, page)
    k_read = pool[: table.size].reshape(len(k), -1, *pool.shape[1:]).swapaxes(1, 2)
    return k_read.reshape(*k.shape[:2], -1, k.shape[3])[:, :, : k.shape[2]]


def at_strides(k: np.ndarray, batch: int, head: int, row: int = 1) -> np.ndarray:
    """Return k (batch, heads, N, d) as it would be read with wrong strides.

    `batch`, `head` and `row` are the strides between batch entries, heads and rows, in units of d elements.
    """
    (b, h, n, d), flat = k.shape, k if row == 1 else k.swapaxes(1, 2)
    of_batch, of_head, of_row = np.ix_(batch * np.arange(b), head * np.arange(h), row * np.arange(n))
    at = of_batch + of_head + of_row
    return np.pad(flat.reshape(-1, d), ((0, int(at.max()) + 1), (0, 0)))[at]
