"""The NumPy reference: every stage against autograd in float64, its parts by known answers, and what it refuses."""

import inspect
import itertools
import re

import hypothesis
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from reference_checks import BIASES, CORNERS, Case, check_one_head

from fa2_lab.reference import fa1, fa2, heads, naive, online_softmax, shards
from fa2_lab.reference.dropout import Dropout, keep_mask, philox, sequential_mask
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.reference.scores import ScoreOptions
from fa2_lab.tiles import Mask, Tile, Tiling
from fa2_lab.trace import Trace

WINDOW_SIDES = st.none() | st.integers(0, 16)
SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


@hypothesis.given(
    sizes=st.tuples(*(st.integers(1, n) for n in (15, 15, 8, 17, 17))),
    causal=st.booleans(),
    key_part=st.none() | st.floats(0, 1),
    allowed_seed=st.none() | st.integers(0, 9),
    p=st.sampled_from([0.0, 0.1, 0.7]),
    scale=st.none() | st.floats(0, 2),
    splits=st.integers(1, 6),
    seed=st.integers(0, 99),
    window=st.none() | st.tuples(WINDOW_SIDES, WINDOW_SIDES),
    softcap=st.none() | st.floats(0.1, 20),
    sink=st.none() | st.floats(-20, 20),
    bias=st.sampled_from([None, *BIASES]),
)
@SETTINGS
def test_reference_stages_match_autograd(sizes, key_part, **case):
    N_q, N_k, d, B_r, B_c = sizes
    length = None if key_part is None else round(key_part * N_k)
    # Where a score is at its cap, the slope 1 − (s / c)² is a small difference of large numbers.
    floor = 0.0 if case["softcap"] is None else 1e-2
    check_one_head(Case(N_q, N_k, d, B_r, B_c, key_length=length, **case), floor=floor)


@hypothesis.given(
    groups=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.3]),
    lengths=st.none() | st.lists(st.integers(0, 10), min_size=2, max_size=2),
    window=st.none() | st.tuples(WINDOW_SIDES, WINDOW_SIDES),
    softcap=st.none() | st.just(1.5),
    with_sinks=st.booleans(),
    bias=st.none() | st.just(lambda head, row, column: -(0.5 ** (head + 1)) * (row - column)),
)
@hypothesis.example((4, 2), False, 0.3, [10, 7], (5, 4), 1.5, True, None)
@hypothesis.settings(SETTINGS, max_examples=20)
@pytest.mark.parametrize("stage", heads.STAGES)
def test_reference_matches_dense_heads_for_batches_and_gqa(
    stage, groups, causal, p, lengths, window, softcap, with_sinks, bias
):
    """Against one dense head after the other, dK and dV summed over the group."""
    (q_heads, k_heads), draw = groups, np.random.default_rng(3).standard_normal
    q, dO = draw((2, q_heads, 7, 4)), draw((2, q_heads, 7, 4))
    k, v = draw((2, k_heads, 10, 4)), draw((2, k_heads, 10, 4))
    sinks = np.arange(q_heads) / 2 - 1 if with_sinks else None
    options = dict(stage=stage, causal=causal, key_lengths=lengths, dropout_p=p, seed=5, B_r=3, B_c=4)
    options |= dict(window=window, softcap=softcap, sinks=sinks, bias=bias)
    O, L = heads.forward(q, k, v, **options)
    dQ, dK, dV = heads.backward(q, k, v, O, L, dO, **options)
    want_dK, want_dV, want_dsinks = np.zeros_like(k), np.zeros_like(v), np.zeros(q_heads)
    for b in range(2):
        seen = oracle.visible(7, 10, causal, None if lengths is None else lengths[b], window=window)
        for h in range(q_heads):
            g = h * k_heads // q_heads
            Z = Dropout(p, 5, b, h).z(slice(0, 7), slice(0, 10))
            sink = None if sinks is None else sinks[h]
            bias_values = None if bias is None else bias(h, *oracle.positions(7, 10))
            one_head = oracle.one_head(q[b, h], k[b, g], v[b, g], seen, None, Z, dO[b, h], softcap, sink, bias_values)
            for name, got, want in zip(("O", "L", "dQ"), (O, L, dQ), one_head, strict=False):
                assert oracle.relative_error(got[b, h], want) <= 1e-12, (name, b, h)
            want_dK[b, g] += one_head[3]
            want_dV[b, g] += one_head[4]
            want_dsinks[h] += one_head[5] if with_sinks else 0.0
    assert oracle.relative_error(dK, want_dK) <= 1e-12 and oracle.relative_error(dV, want_dV) <= 1e-12
    if with_sinks:
        assert oracle.relative_error(heads.sinks_backward(sinks, O, L, dO), want_dsinks) <= 1e-12


HARD_OPTIONS = [
    dict(window=(99, 99)),
    dict(window=(0, 0)),
    dict(window=(0, 0), N_q=13, N_k=6),  # the first seven rows see nothing
    dict(window=(0, 0), N_q=6, N_k=13),
    dict(window=(2, 1), N_q=13, N_k=6, sink=0.3),
    dict(window=(1, None), N_q=5, N_k=14, causal=True),
    dict(window=(2, 0), key_length=0, sink=-1.0),
    dict(window=(3, 3), key_length=4, N_q=12, N_k=12),  # the last rows' windows lie in the padding
    dict(sink=1e4),
    dict(sink=-1e4),
    dict(sink=0),
    dict(sink=700.0, causal=True, N_q=12, N_k=4),
    dict(softcap=1e-3, size=30.0),
    dict(softcap=1e6),
    dict(softcap=5.0, size=30.0, sink=6.0, window=(4, 4), p=0.4),
]


class NanNumPy:
    """NumPy, except that memory from `empty` and `empty_like` holds NaN."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape):
        return np.full(shape, np.nan)

    def empty_like(self, x):
        return np.full(x.shape, np.nan)


HARD_CASES = [Case(**dict(B_r=3, B_c=4) | options) for options in HARD_OPTIONS]


@pytest.mark.parametrize("case", [*CORNERS, *HARD_CASES], ids=str)
def test_reference_matches_autograd_for_corner_cases(case, monkeypatch):
    """Against autograd, with outputs that hold NaN until they are written."""
    for stage in (naive, fa1, fa2):
        monkeypatch.setattr(stage, "np", NanNumPy())
    check_one_head(case, **{} if case in CORNERS else dict(tolerance=1e-11, floor=1e-2))


@pytest.mark.parametrize("size", [30.0, 100.0])
def test_reference_gives_no_nan_for_huge_scores(size):
    """Scores of up to about ±1e4: float64 leaves 1e4 · 2e-16 in each exponent, and the true gradients nearly vanish."""
    case = Case(N_q=12, N_k=14, d=16, causal=True, size=size)
    Q, K, _, _ = case.tensors()
    assert np.abs(Q @ K.T / 4).max() > size**2 / 2
    check_one_head(case, tolerance=1e-10, floor=1.0)


# Its parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_softmax_merge_is_associative_and_equals_update(seed):
    draw = np.random.default_rng(seed)
    s = 5 * draw.standard_normal((4, 12))
    s[0, :4], s[1, 4:8], s[2] = -np.inf, -np.inf, -np.inf
    v = draw.standard_normal((12, 3))
    empty = SoftmaxState.empty(4, 3)
    a, b, c = (empty.update(s[:, x], v[x]) for x in (slice(0, 4), slice(4, 8), slice(8, 12)))
    blocks = [(s[:, x : x + 5], v[x : x + 5]) for x in range(0, 12, 5)]
    O, L = oracle.one_head(s, np.eye(12), np.eye(12), ~np.isneginf(s), scale=1.0)
    for state in (
        a.merge(b).merge(c),
        a.merge(b.merge(c)),
        c.merge(b).merge(a),
        empty.merge(a).merge(b).merge(c).merge(empty),
        a.update(s[:, 4:8], v[4:8]).update(s[:, 8:], v[8:]),
        SoftmaxState.from_output(*a.finalize()).merge(SoftmaxState.from_output(*b.merge(c).finalize())),
        online_softmax.incremental(iter(blocks)),
    ):
        for got, want in zip(state.finalize(), (O @ v, L), strict=True):
            assert oracle.relative_error(got, want) <= 1e-14


def test_softmax_logsumexp_and_jacobian_match_numpy():
    S = np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]])
    want = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    for shift in (0, 1000):
        assert np.allclose(naive.safe_softmax(S + shift), want, rtol=1e-13)
        assert np.allclose(naive.logsumexp(S + shift), shift + np.log(np.exp(S).sum(axis=1)), rtol=1e-14)
    masked = np.full((1, 3), -np.inf)
    assert (naive.safe_softmax(masked) == 0).all() and np.isneginf(naive.logsumexp(masked)).all()
    draw = np.random.default_rng(1).standard_normal
    Q, K, V, dO = draw((4, 3)), draw((6, 3)), draw((6, 3)), draw((4, 3))
    O, P = naive.forward(Q, K, V)
    dP = dO @ V.T
    by_jacobian = np.stack([(np.diag(p) - np.outer(p, p)) @ dp for p, dp in zip(P, dP, strict=True)])
    assert oracle.relative_error(naive.softmax_backward(P, dP), by_jacobian) < 1e-14
    assert oracle.relative_error(naive.D_from_output(dO, O), naive.D_from_probabilities(P, dP)) < 1e-14


def test_fa1_block_sizes_come_from_M():
    assert fa1.block_sizes(M=1024, d=16) == (16, 16)
    assert fa1.block_sizes(M=100, d=16) == (2, 2)
    assert fa1.block_sizes(M=49152, d=64) == (64, 192)
    Q, K, V = np.random.default_rng(0).standard_normal((3, 20, 4))
    assert np.array_equal(fa1.forward(Q, K, V, M=64)[0], fa1.forward(Q, K, V, B_r=4, B_c=4)[0])


def test_philox_equals_the_published_test_vectors():
    """The first words that the authors of Philox publish for Philox4x32-10."""
    ones = 0xFFFFFFFF
    assert philox(0, 0, 0, 0, 0) == 0x6627E8D5
    assert philox(2**64 - 1, ones, ones, ones, ones) == 0x408F276D
    assert philox(0x299F31D0A4093822, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344) == 0xD16CFE09


def test_dropout_mask_has_the_right_rate_and_depends_on_every_index():
    rows = cols = np.arange(300)
    keep = keep_mask(0.3, 11, 2, 5, rows, cols)
    assert abs(keep.mean() - 0.7) < 0.01
    for other in [(12, 2, 5), (11, 5, 2), (11, 2, 0), (11 + 2**32, 2, 5)]:
        assert abs((keep == keep_mask(0.3, *other, rows, cols)).mean() - 0.58) < 0.01  # 0.7² + 0.3²
    assert np.array_equal(keep[40:50, 7:99], keep_mask(0.3, 11, 2, 5, rows[40:50], cols[7:99]))
    assert np.array_equal(Dropout(0.3, 11, 2, 5).z(slice(0, 300), slice(0, 300)) > 0, keep)
    for row, col in ((3, 11), (250, 0), (0, 299)):  # the counters in the order in which Triton's generator takes them
        assert keep[row, col] == (philox(11, col, row, 5, 2) >= int(0.3 * 2**32))
    assert keep_mask(0.0, 1, 0, 0, rows, cols).all()
    assert set(np.unique(Dropout(0.2, 1).z(slice(0, 9), slice(0, 9)))) == {0.0, 1 / 0.8}


def test_sequential_dropout_replays_only_in_the_same_tile_order():
    tiling = Tiling(12, 12, 4, 3)
    masks = {order: sequential_mask(tiling, 0.5, 3, order) for order in ("fa1", "fa2")}
    assert np.array_equal(masks["fa1"], sequential_mask(tiling, 0.5, 3, "fa1"))
    assert 0.3 < (masks["fa1"] == masks["fa2"]).mean() < 0.75
    assert abs(sequential_mask(Tiling(99, 99, 9, 9), 0.2, 3, "fa2").mean() - 0.8) < 0.02  # dropped with probability p
    single = Tiling(12, 12, 12, 3)  # with one row block there is one order only
    assert np.array_equal(sequential_mask(single, 0.5, 3, "fa1"), sequential_mask(single, 0.5, 3, "fa2"))


def test_trace_sees_split_workers_and_only_keys_in_the_window():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
    trace = Trace()
    fa2.forward_split_keys(Q, K, V, splits=2, B_r=8, B_c=2, trace=trace)
    assert set(trace.by_worker()) == {(0, 0), (0, 1), (0,)}
    assert trace.stores("O_part") == trace.loads("O_part") == 2 * 8 * 4
    assert trace.by_worker()[0, 0]["load"] == trace.by_worker()[0, 1]["load"] == 8 * 4 + 2 * 4 * 4  # q, half of K and V
    for N in (32, 64, 128):  # a row block reads its own keys and `left` before them, however long the sequence is
        trace = Trace()
        fa2.forward(*np.ones((3, N, 2)), B_r=4, B_c=4, mask=Mask(causal=True, window=(8, None)), trace=trace)
        assert trace.loads("K") // 2 == N // 4 * 12 - 12  # three blocks of four keys; one and two at the start


# A sequence that is cut among ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "causal", "want"),
    [
        (9, True, [(slice(0, 7), slice(0, 7), Tile.DIAGONAL), (slice(7, 9), slice(0, 9), Tile.DIAGONAL)]),
        (5, False, [(slice(0, 3), slice(0, 5), Tile.FULL), (slice(3, 5), slice(0, 5), Tile.FULL)]),
        (1, True, [(slice(0, 1), slice(0, 1), Tile.DIAGONAL), (slice(1, 1), slice(0, 1), Tile.SKIP)]),
    ],
)
def test_shard_halves_equal_hand_computed_ones(length, causal, want):
    assert shards.halves(length, causal) == want


def test_shard_pieces_equal_hand_computed_ones():
    assert shards.even_lengths(11, 3) == [4, 4, 3]
    assert shards.pieces([4, 4, 3], "contiguous") == [[slice(0, 4)], [slice(4, 8)], [slice(8, 11)]]
    zigzag = [[slice(0, 2), slice(9, 11)], [slice(2, 4), slice(7, 9)], [slice(4, 6), slice(6, 7)]]
    assert shards.pieces([4, 4, 3], "zigzag") == zigzag


SHARD_LENGTHS = [[5, 8], [4, 0, 7], [1, 1, 1], [3, 6, 2, 2], [13], [7, 0, 0, 1]]


@pytest.mark.parametrize("layout", shards.LAYOUTS)
@pytest.mark.parametrize("lengths", SHARD_LENGTHS, ids=str)
def test_shards_cover_sequence_and_mask_exactly_once(lengths, layout):
    N, ranks = sum(lengths), range(len(lengths))
    rows = [np.concatenate([np.arange(N)[p] for p in pieces]) for pieces in shards.pieces(lengths, layout)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(N)) and [len(own_rows) for own_rows in rows] == lengths
    assert all((np.diff(own_rows) > 0).all() for own_rows in rows)
    for causal in (False, True):
        seen, by_halves = np.zeros((2, N, N), dtype=int)
        for rank, source in itertools.product(ranks, ranks):
            calls = [shards.visible_tile(lengths, rank, source, layout, causal)]
            add_visible(seen, calls, rows[rank], rows[source])
            calls = shards.halves(lengths[rank], causal) if rank == source else calls
            add_visible(by_halves, calls, rows[rank], rows[source])
        want = np.tri(N, dtype=int) if causal else np.ones((N, N), dtype=int)
        assert np.array_equal(seen, want) and np.array_equal(by_halves, want)


def add_visible(seen, calls, queries, keys):
    for call in calls:
        q, k = queries[call.queries], keys[call.keys]
        assert (len(q) and len(k)) or call.kind is Tile.SKIP
        if call.kind is not Tile.SKIP:
            diagonal = np.tri(len(q), len(k), len(k) - len(q), dtype=int)
            seen[np.ix_(q, k)] += diagonal if call.kind is Tile.DIAGONAL else 1


# Bad input ------------------------------------------------------------------------------------------------------

TALL, WIDE = np.ones((4, 3)), np.ones((5, 3))  # four queries, five keys
VALID = dict(Q=TALL, K=WIDE, V=WIDE, O=TALL, dO=TALL, P=np.ones((4, 5)), l=TALL[:, 0], m=TALL[:, 0], L=TALL[:, 0])
VALID_SIZES = dict(B_r=2, B_c=2, splits=2)
INVALID = dict(
    **{name: x[:-1] for name, x in VALID.items() if name not in ("Q", "K")},  # a row too few
    **dict(Q=TALL[0], K=WIDE[:, :2], B_r=0, B_c=0, splits=0),
    **dict(tau=-1.0, score_options=3.0, dropout=0.1, mask="causal"),
)
STAGE_CALLS = [
    *(naive.forward, naive.backward, naive.forward_linear_memory, naive.backward_linear_memory),
    *(fa1.forward, fa1.backward, fa2.forward, fa2.backward, fa2.forward_split_keys),
]


@pytest.mark.parametrize("call", STAGE_CALLS, ids=lambda call: f"{call.__module__.split('.')[-1]}-{call.__name__}")
def test_reference_stages_reject_bad_input_by_name(call):
    """One argument at a time is wrong; the error names it."""
    takes = inspect.signature(call).parameters
    valid = {name: x for name, x in (VALID | VALID_SIZES).items() if name in takes}
    call(**valid)
    for name in takes.keys() - {"M", "trace"}:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got "):
            call(**valid | {name: INVALID[name]})


VALID_HEADS = dict(q=np.ones((2, 4, 4, 3)), k=np.ones((2, 2, 5, 3)), v=np.ones((2, 2, 5, 3))) | {
    name: np.ones((2, 4, *VALID[name].shape)) for name in ("O", "L", "dO")
}
INVALID_HEADS = dict(
    **{name: x[:, :, :-1] for name, x in VALID_HEADS.items() if name not in ("q", "k")},
    **dict(q=VALID_HEADS["q"][0], k=VALID_HEADS["k"][:1], stage="fa3", causal="yes", window=3, softcap=0.0),
    **dict(sinks=np.ones(3), scale=-1.0, key_lengths=[6, 6], dropout_p=1.0, seed=-1, bias=3, B_r=0, B_c=0),
)


@pytest.mark.parametrize("stage", heads.STAGES)
@pytest.mark.parametrize("call", [heads.forward, heads.backward], ids=lambda call: call.__name__)
def test_reference_heads_reject_bad_input_by_name(call, stage):
    takes = inspect.signature(call).parameters | inspect.signature(heads.each_head).parameters
    valid = {name: x for name, x in VALID_HEADS.items() if name in takes} | dict(stage=stage)
    call(**valid)
    call(**valid | dict(key_lengths=[0, 5]))
    for name in takes.keys() - {"trace", "options", *(("B_r", "B_c") if stage == "naive" else ())}:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got "):
            call(**valid | {name: INVALID_HEADS[name]})


X, HEADS, TAKES_A_NUMBER = np.ones((4, 3)), np.ones((3, 1, 2, 4, 3)), "it takes a finite number"


def fa2_forward(Q=X, K=X, V=X, **options):
    return fa2.forward(Q, K, V, **dict(B_r=2, B_c=2) | options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fa2_forward(K=[[1.0], [1.0, 2.0]]), "K: got nested lists of unequal length; it takes a real"),
        (lambda: fa2_forward(Q=X == 1), "Q: got dtype bool; it takes real numbers"),
        (lambda: fa2_forward(Q=X * 1j), "Q: got dtype complex128; it takes real numbers"),
        (lambda: ScoreOptions(softcap=np.inf), f"softcap: got inf; {TAKES_A_NUMBER} above 0, or None for no cap"),
        (lambda: ScoreOptions(softcap=True), f"softcap: got True; {TAKES_A_NUMBER} above 0, or None for no cap"),
        (lambda: ScoreOptions(sink="1"), f"sink: got '1'; {TAKES_A_NUMBER}, NaN, or None for no sink"),
        (lambda: ScoreOptions(sink=np.inf), f"sink: got inf; {TAKES_A_NUMBER}, NaN, or None for no sink"),
        (lambda: fa2_forward(Q=X[:0]), "Q: got shape (0, 3); it takes 2 dimensions, none of them empty"),
        (lambda: fa2_forward(tau=np.nan), "tau: got nan; it takes a finite number of at least 0"),
        (lambda: fa1.forward(X, X, X, M=0), "M: got 0; it takes a whole number of at least 1"),
        (lambda: fa1.block_sizes(8, 0), "d: got 0; it takes a whole number of at least 1"),
        (lambda: fa1.forward(X, X, X, B_c=2), "M=None, B_r=None, B_c=2; it takes M alone, or B_r and B_c"),
        (lambda: fa1.forward(X, X, X, M=8, B_r=2, B_c=2), "M=8, B_r=2, B_c=2; it takes M alone, or B_r and B_c"),
        (lambda: Dropout(True), "dropout_p: got True; it takes a probability, 0 ≤ p < 1"),
        (lambda: Dropout(float("nan")), "dropout_p: got nan; it takes a probability, 0 ≤ p < 1"),
        (lambda: Dropout(0.1), "seed: got None; with dropout it takes a whole number from 0 to 2**64 - 1"),
        (lambda: Dropout(0, 2**64), f"seed: got {2**64}; it takes a whole number from 0 to 18446744073709551615"),
        (lambda: sequential_mask(Tiling(4, 4, 2, 2), 0.5, 0, "fa3"), "it takes 'fa1' (columns outside) or 'fa2' (rows"),
        (lambda: heads.forward(*HEADS, sinks=[0, np.inf]), "sinks: got inf; it takes numbers below infinity"),
        (lambda: heads.forward(np.ones((1, 3, 4, 3)), *HEADS[1:]), "k: got 2 heads; it takes a divisor of the 3 heads"),
        (lambda: heads.forward(HEADS[0], *HEADS[1:, ..., :2]), "the batch and head dimension of q, (1, 2, 4, 3)"),
        (lambda: heads.forward(*HEADS, key_lengths=[0.5]), "got dtype float64; it takes whole numbers"),
        (lambda: heads.forward(*HEADS, key_lengths=[1, 2]), "key_lengths: got shape (2,); it takes (batch,) = (1,)"),
        (lambda: heads.forward(*HEADS, key_lengths=[-1]), "key_lengths: got -1; it takes a whole number from 0 to 4"),
        (lambda: heads.sinks_backward(np.ones(2), X, X, X), "O: got shape (4, 3); it takes 4 dimensions, none"),
        (lambda: online_softmax.incremental([]), "blocks: got none; it takes at least one pair (s, v)"),
        (lambda: shards.pieces([2], "ring"), "layout: got 'ring'; it takes one of zigzag, contiguous"),
        (lambda: shards.even_lengths(0, 2), "N: got 0; it takes a whole number of at least 1"),
        (lambda: shards.even_lengths(2, 0), "ranks: got 0; it takes a whole number of at least 1"),
    ],
)
def test_reference_errors_say_what_they_got_and_take(call, says):
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        call()
