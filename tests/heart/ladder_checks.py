"""What every stage of the NumPy ladder must do, as functions of a case.

test_reference.py calls them on cases drawn at random, test_faults.py on a package with a planted fault. The package is
imported inside the functions, so that they judge whichever version is loaded.
"""

from dataclasses import dataclass

import numpy as np
import oracle


@dataclass(frozen=True)
class Case:
    """One head: its sizes, its mask, its dropout, and how large its scores get."""

    N_q: int = 13
    N_k: int = 9
    d: int = 5
    B_r: int = 4
    B_c: int = 3
    causal: bool = False
    key_length: int | None = None
    allowed_seed: int | None = None
    p: float = 0.0
    scale: float | None = None
    splits: int = 3
    size: float = 1.0
    seed: int = 0
    window: tuple | None = None
    softcap: float | None = None
    sink: float | None = None

    def tensors(self):
        """Q, K, V, dO."""
        draw = np.random.default_rng(self.seed).standard_normal
        Q, K, V, dO = (draw((n, self.d)) for n in (self.N_q, self.N_k, self.N_k, self.N_q))
        return self.size * Q, self.size * K, V, dO

    def allowed(self):
        if self.allowed_seed is None:
            return None
        return np.random.default_rng(self.allowed_seed).random((self.N_q, self.N_k)) < 0.6

    def seen(self):
        return oracle.visible(self.N_q, self.N_k, self.causal, self.key_length, self.allowed(), self.window)

    def mask(self):
        from fa2_lab.tiles import Mask

        return Mask(self.causal, self.key_length, self.allowed(), self.window)


# Small cases that between them meet every branch; each has more than one tile each way.
CORNERS = [
    Case(),
    Case(N_q=8, N_k=8, d=4, B_r=4, B_c=2, causal=True),
    Case(N_q=5, N_k=11, causal=True, p=0.4),
    Case(N_q=11, N_k=5, causal=True),
    Case(N_q=9, N_k=9, B_r=2, B_c=5, causal=True, key_length=6, p=0.3),
    Case(key_length=0),
    Case(allowed_seed=1, p=0.5, scale=0.3),
    Case(size=3.0, splits=5),
    Case(N_q=11, N_k=11, B_r=2, B_c=3, window=(3, 2)),
    Case(N_q=12, N_k=17, B_r=4, B_c=3, window=(4, None), causal=True, key_length=5),
    Case(N_q=14, N_k=9, B_r=3, B_c=2, window=(0, 1), allowed_seed=2, p=0.3, softcap=0.7, sink=0.4),
]


def check_one_head(case: Case, tolerance=1e-12, floor=0.0) -> None:
    """Every stage against the dense result and its gradients, relative to their norm (or to `floor`, if larger)."""
    from fa2_lab.reference import fa1, fa2, naive
    from fa2_lab.reference.dropout import Dropout
    from fa2_lab.reference.scores import sink_backward

    Q, K, V, dO = case.tensors()
    dropout = Dropout(case.p, seed=77, batch=1, head=2)
    Z = dropout.z(slice(0, case.N_q), slice(0, case.N_k))
    if Z is not None:
        assert set(np.unique(Z)) <= {0.0, 1 / (1 - case.p)}
    O, L, *gradients = oracle.dense(Q, K, V, case.seen(), case.scale, Z, dO, case.softcap, case.sink)
    masking = dict(tau=case.scale, mask=case.mask(), softcap=case.softcap)
    back, common = dict(masking, dropout=dropout), dict(masking, dropout=dropout, sink=case.sink)
    blocks = dict(B_r=case.B_r, B_c=case.B_c)

    O_naive, P = naive.forward(Q, K, V, **common)
    O_1, l, m = fa1.forward(Q, K, V, **blocks, **common)
    O_2, L_2 = fa2.forward(Q, K, V, **blocks, **common)
    O_split, L_split = fa2.forward_split_keys(Q, K, V, splits=case.splits, **blocks, **common)
    with np.errstate(divide="ignore"):
        L_1 = m + np.log(l)
    for name, got, want in [
        ("naive O", O_naive, O),
        ("fa1 O", O_1, O),
        ("fa1 L", L_1, L),
        ("fa2 O", O_2, O),
        ("fa2 L", L_2, L),
        ("split O", O_split, O),
        ("split L", L_split, L),
    ]:
        assert oracle.error(got, want) <= tolerance, (name, oracle.error(got, want), case)

    found = {
        "naive": naive.backward(Q, K, V, P, dO, tau=case.scale, softcap=case.softcap, dropout=dropout),
        "fa1": fa1.backward(Q, K, V, O_1, l, m, dO, **blocks, **back),
        "fa2": fa2.backward(Q, K, V, O_2, L_2, dO, **blocks, **back),
    }
    if case.p == 0:
        O_lin, L_lin = naive.forward_linear_memory(Q, K, V, sink=case.sink, **masking)
        assert oracle.error(O_lin, O) <= tolerance and oracle.error(L_lin, L) <= tolerance, case
        found["linear memory"] = naive.backward_linear_memory(Q, K, V, O_lin, L_lin, dO, **masking)
    for name, got in found.items():
        for letter, g, want in zip(("dQ", "dK", "dV"), got, gradients, strict=False):
            found_error = oracle.error(g, want, floor)
            assert found_error <= tolerance, (name, letter, found_error, case)
    if case.sink is not None:
        found_error = abs(sink_backward(case.sink, O_2, L_2, dO) - gradients[3]) / (np.abs(dO * O).sum() or 1.0)
        assert found_error <= tolerance, ("dsink", found_error, case)


def check_tiles(case: Case) -> None:
    """Tile kinds, and what a mask shows, against the mask entry by entry; the meter sees no skipped tile touched."""
    from fa2_lab.reference import fa2
    from fa2_lab.tiles import Tile, Tiling
    from fa2_lab.trace import Trace

    seen = case.seen()
    tiling = Tiling(case.N_q, case.N_k, case.B_r, case.B_c, case.mask())
    busy = set()
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            tile = seen[tiling.rows(i), tiling.cols(j)]
            assert np.array_equal(tiling.visible(i, j), tile)
            want = Tile.FULL if tile.all() else Tile.DIAGONAL if tile.any() else Tile.SKIP
            assert tiling.kind(i, j) is want, (i, j, case)
            if want is not Tile.SKIP:
                busy.add((i, j))
    for i in range(tiling.T_r):
        assert tiling.visited_cols(i) == [j for j in range(tiling.T_c) if (i, j) in busy], (i, case)
    trace = Trace()
    Q, K, V, _ = case.tensors()
    fa2.forward(Q, K, V, B_r=case.B_r, B_c=case.B_c, mask=tiling.mask, trace=trace)
    assert {(i, j) for (i, j) in trace.by_tile() if j is not None} == busy


def check_meter(case: Case) -> None:
    """What FA1 and FA2 move and compute, by the meter, against the closed forms."""
    from fa2_lab.machine import io
    from fa2_lab.reference import fa1, fa2
    from fa2_lab.tiles import Tiling
    from fa2_lab.trace import Trace

    Q, K, V, dO = case.tensors()
    tiling = Tiling(case.N_q, case.N_k, case.B_r, case.B_c, case.mask())
    same = dict(B_r=case.B_r, B_c=case.B_c, mask=tiling.mask)
    for name, stage in (("fa1", fa1), ("fa2", fa2)):
        ahead, back = Trace(), Trace()
        O, *saved = stage.forward(Q, K, V, **same, trace=ahead)
        stage.backward(Q, K, V, O, *saved, dO, **same, trace=back)
        for direction, trace in (("forward", ahead), ("backward", back)):
            form = io.traffic(name, direction, tiling, case.d)
            for op, counts, moved in (("load", form.loads, trace.loads), ("store", form.stores, trace.stores)):
                for tensor, elements in counts.items():
                    assert moved(tensor) == elements, (name, direction, op, tensor, case)
                assert moved() == sum(counts.values()), (name, direction, op, case)
            assert +io.operations(name, direction, tiling, case.d) == +trace.flops, (name, direction, case)


def check_heads(q_heads, k_heads, stage, causal, p, lengths, window=None, softcap=None, with_sinks=False) -> None:
    """Batches and grouped heads against one dense head after the other, dK and dV summed over the group."""
    from fa2_lab.reference import heads
    from fa2_lab.reference.dropout import Dropout

    draw = np.random.default_rng(3).standard_normal
    q, dO = draw((2, q_heads, 7, 4)), draw((2, q_heads, 7, 4))
    k, v = draw((2, k_heads, 10, 4)), draw((2, k_heads, 10, 4))
    sinks = np.arange(q_heads) / 2 - 1 if with_sinks else None
    options = dict(stage=stage, causal=causal, key_lengths=lengths, dropout_p=p, seed=5, B_r=3, B_c=4)
    options |= dict(window=window, softcap=softcap, sinks=sinks)
    O, L = heads.forward(q, k, v, **options)
    dQ, dK, dV = heads.backward(q, k, v, O, L, dO, **options)
    want_dK, want_dV, want_dsinks = np.zeros_like(k), np.zeros_like(v), np.zeros(q_heads)
    for b in range(2):
        seen = oracle.visible(7, 10, causal, None if lengths is None else lengths[b], window=window)
        for h in range(q_heads):
            g = h * k_heads // q_heads
            Z = Dropout(p, 5, b, h).z(slice(0, 7), slice(0, 10))
            sink = None if sinks is None else sinks[h]
            one = oracle.dense(q[b, h], k[b, g], v[b, g], seen, None, Z, dO[b, h], softcap, sink)
            for name, got, want in zip(("O", "L", "dQ"), (O, L, dQ), one, strict=False):
                assert oracle.error(got[b, h], want) <= 1e-12, (name, b, h)
            want_dK[b, g] += one[3]
            want_dV[b, g] += one[4]
            want_dsinks[h] += one[5] if with_sinks else 0.0
    assert oracle.error(dK, want_dK) <= 1e-12 and oracle.error(dV, want_dV) <= 1e-12
    if with_sinks:
        assert oracle.error(heads.sinks_backward(sinks, O, L, dO), want_dsinks) <= 1e-12


def check_merge(seed: int = 0) -> None:
    """Merge: associative, commutative, with reset as identity, and the same as update; empty rows included."""
    from fa2_lab.reference.online_softmax import SoftmaxState

    draw = np.random.default_rng(seed)
    s = 5 * draw.standard_normal((4, 12))
    s[0, :4], s[1, 4:8], s[2] = -np.inf, -np.inf, -np.inf
    v = draw.standard_normal((12, 3))
    start = SoftmaxState.reset(4, 3)
    a, b, c = (start.update(s[:, x], v[x]) for x in (slice(0, 4), slice(4, 8), slice(8, 12)))
    whole = start.update(s, v)
    for other in (
        a.merge(b).merge(c),
        a.merge(b.merge(c)),
        c.merge(b).merge(a),
        start.merge(a).merge(b).merge(c).merge(start),
        a.update(s[:, 4:8], v[4:8]).update(s[:, 8:], v[8:]),
        SoftmaxState.from_output(*a.finalize()).merge(SoftmaxState.from_output(*b.merge(c).finalize())),
    ):
        for got, want in zip(other.finalize(), whole.finalize(), strict=True):
            assert oracle.error(got, want) <= 1e-14
    o, L = whole.finalize()
    assert (o[2] == 0).all() and L[2] == -np.inf
