import ast
import difflib
import inspect
import textwrap
from collections import Counter

import hypothesis
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from ladder_checks import CORNERS, Case, check_heads, check_merge, check_one_head

from fa2_lab.reference import fa1, fa2, heads, naive, online_softmax, scores, shards
from fa2_lab.reference.dropout import Dropout, keep_mask, philox, sequential_mask
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling
from fa2_lab.trace import Trace

SIDES = st.none() | st.integers(0, 16)
SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_corner_cases(case):
    check_one_head(case)


@hypothesis.given(
    N_q=st.integers(1, 15),
    N_k=st.integers(1, 15),
    d=st.integers(1, 8),
    B_r=st.integers(1, 17),
    B_c=st.integers(1, 17),
    causal=st.booleans(),
    key_part=st.none() | st.floats(0, 1),
    allowed_seed=st.none() | st.integers(0, 9),
    p=st.sampled_from([0.0, 0.1, 0.7]),
    scale=st.none() | st.floats(0, 2),
    splits=st.integers(1, 6),
    seed=st.integers(0, 99),
    window=st.none() | st.tuples(SIDES, SIDES),
    softcap=st.none() | st.floats(0.1, 20),
    sink=st.none() | st.floats(-20, 20),
)
@SETTINGS
def test_every_stage_equals_the_dense_result(key_part, **case):
    length = None if key_part is None else round(key_part * case["N_k"])
    # Where a score is at its cap, the slope 1 − (s / c)² is a small difference of large numbers.
    check_one_head(Case(key_length=length, **case), floor=0.0 if case["softcap"] is None else 1e-2)


@hypothesis.given(
    groups=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    stage=st.sampled_from(heads.STAGES),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.3]),
    lengths=st.none() | st.lists(st.integers(0, 10), min_size=2, max_size=2),
    window=st.none() | st.tuples(SIDES, SIDES),
    softcap=st.none() | st.just(1.5),
    with_sinks=st.booleans(),
)
@SETTINGS
def test_heads_and_groups(groups, **options):
    check_heads(*groups, **options)


ADVERSE = [
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


class PoisonedNumPy:
    """NumPy, but memory that nobody has written holds NaN."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape):
        return np.full(shape, np.nan)

    def empty_like(self, x):
        return np.full(x.shape, np.nan)


@pytest.mark.parametrize("options", ADVERSE, ids=str)
def test_windows_sinks_and_caps_at_their_worst(options, monkeypatch):
    """Against autograd, with outputs that hold NaN until they are written."""
    for stage in (naive, fa1, fa2):
        monkeypatch.setattr(stage, "np", PoisonedNumPy())
    check_one_head(Case(**dict(dict(causal=False, B_r=3, B_c=4), **options)), tolerance=1e-11, floor=1e-2)


def test_what_a_window_a_sink_and_a_cap_do_to_one_row():
    """Cases whose answer is known without computing a softmax."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 7, 4))
    O, L = fa2.forward(Q, K, V, B_r=2, B_c=3, mask=Mask(window=(0, 0)))
    assert np.abs(O - V).max() < 1e-15 and oracle.error(L, (Q * K).sum(axis=1) / 2) < 1e-15
    nothing = Mask(key_length=0)
    O, L = fa2.forward(Q, K, V, B_r=2, B_c=3, mask=nothing, sink=3)
    assert (O == 0).all() and (L == 3.0).all()
    O, L = fa2.forward(Q, K, V, B_r=2, B_c=3, mask=nothing)
    assert (O == 0).all() and np.isneginf(L).all()
    assert all((g == 0).all() for g in fa2.backward(Q, K, V, O, L, np.ones_like(O), B_r=2, B_c=3, mask=nothing))
    O, L = fa2.forward(0 * Q, K, V, B_r=2, B_c=3, sink=np.log(7))  # seven keys, and a sink that weighs as much
    assert oracle.error(O, np.tile(V.mean(axis=0) / 2, (7, 1))) < 1e-14 and np.abs(L - np.log(14)).max() < 1e-14
    O, L = fa2.forward(1e9 * Q, K, V, B_r=2, B_c=3, softcap=1e-9)  # every score is ±1e-9
    assert oracle.error(O, np.tile(V.mean(axis=0), (7, 1))) < 1e-8


@pytest.mark.parametrize("sink", [-0.5, 2.0])
def test_dsink_by_central_differences(sink):
    Q, K, V, dO = Case(N_q=4, N_k=5, d=3).tensors()
    same, sinks = dict(B_r=2, B_c=2, mask=Mask(True, window=(2, 0)), softcap=0.8), np.array([sink])
    O, L = fa2.forward(Q, K, V, sink=sink, **same)
    numeric = oracle.central_differences(lambda: fa2.forward(Q, K, V, sink=sinks[0], **same)[0], sinks, dO)
    assert abs(scores.sink_backward(sink, O, L, dO) - numeric[0]) < 1e-8


def test_a_window_s_traffic_grows_with_the_sequence_and_not_with_its_square():
    """By the meter: a row block reads its own keys and `left` before them, however long the sequence is."""
    loads = []
    for N in (32, 64, 128):
        Q, K, V = np.ones((3, N, 2))
        trace = Trace()
        fa2.forward(Q, K, V, B_r=4, B_c=4, mask=Mask(causal=True, window=(8, None)), trace=trace)
        loads.append(trace.loads("K") // 2)
    assert loads == [N // 4 * 12 - 12 for N in (32, 64, 128)]  # three blocks of four keys; one and two at the start


@pytest.mark.parametrize("seed", range(5))
def test_merge_laws(seed):
    check_merge(seed)


@pytest.mark.parametrize("stage", ["fa1", "fa2"])
def test_gradients_by_central_differences(stage):
    case = Case(N_q=4, N_k=5, d=3, B_r=2, B_c=2, causal=True, p=0.3)
    Q, K, V, dO = case.tensors()
    same = dict(B_r=2, B_c=2, mask=CAUSAL, dropout=Dropout(0.3, 7))
    module = {"fa1": fa1, "fa2": fa2}[stage]
    O, *saved = module.forward(Q, K, V, **same)
    gradients = module.backward(Q, K, V, O, *saved, dO, **same)
    for X, G in zip((Q, K, V), gradients, strict=True):
        numeric = oracle.central_differences(lambda: module.forward(Q, K, V, **same)[0], X, dO)
        assert np.abs(G - numeric).max() < 1e-8


@pytest.mark.parametrize("size", [30.0, 100.0])
def test_huge_scores_give_no_nan_and_no_warning(size):
    """Scores of up to about ±1e4: float64 leaves 1e4 · 2e-16 in each exponent, and the true gradients nearly vanish."""
    case = Case(N_q=12, N_k=14, d=16, causal=True, size=size)
    Q, K, _, _ = case.tensors()
    assert np.abs(Q @ K.T / 4).max() > size**2 / 2
    check_one_head(case, tolerance=1e-10, floor=1.0)


def test_softmax_three_ways():
    S = np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]])
    assert np.allclose(naive.unsafe_softmax(S), naive.safe_softmax(S), rtol=1e-14)
    with pytest.warns(RuntimeWarning):
        assert np.isnan(naive.unsafe_softmax(S + 1000)).any()
    assert np.allclose(naive.safe_softmax(S + 1000), naive.safe_softmax(S), rtol=1e-14)
    assert (naive.safe_softmax(np.full((1, 3), -np.inf)) == 0).all()
    assert np.allclose(naive.logsumexp(S), np.log(np.exp(S).sum(axis=1)), rtol=1e-14)


def test_softmax_jacobian_and_D_two_ways():
    draw = np.random.default_rng(1).standard_normal
    Q, K, V, dO = draw((4, 3)), draw((6, 3)), draw((6, 3)), draw((4, 3))
    O, P = naive.forward(Q, K, V)
    dP = dO @ V.T
    by_jacobian = np.stack([naive.softmax_jacobian(p) @ dp for p, dp in zip(P, dP, strict=True)])
    assert oracle.error(naive.softmax_backward(P, dP), by_jacobian) < 1e-14
    assert oracle.error(naive.D_from_output(dO, O), naive.D_from_probabilities(P, dP)) < 1e-14
    x, numeric = draw(5), np.empty((5, 5))
    for j in range(5):
        step = 1e-6 * np.eye(5)[j]
        numeric[:, j] = (naive.safe_softmax(x + step) - naive.safe_softmax(x - step)) / 2e-6
    assert np.abs(naive.softmax_jacobian(naive.safe_softmax(x)) - numeric).max() < 1e-9


def test_two_blocks_and_rabe_staats():
    draw = np.random.default_rng(2).standard_normal
    s, v = 4 * draw((5, 12)), draw((12, 3))
    want, L = oracle.dense(s, np.eye(12), np.eye(12), np.ones((5, 12), bool), scale=1.0)
    want = want @ v
    assert oracle.error(online_softmax.two_blocks(s[:, :7], s[:, 7:], v[:7], v[7:]), want) < 1e-14
    blocks = [(s[:, a : a + 5], v[a : a + 5]) for a in range(0, 12, 5)]
    for way in (online_softmax.incremental, online_softmax.rabe_staats):
        o, found_L = way(iter(blocks)).finalize()
        assert oracle.error(o, want) < 1e-14 and oracle.error(found_L, L) < 1e-14
    assert online_softmax.incremental_memory(5, 3) == 5 * 3 + 5 + 5
    assert online_softmax.rabe_staats_memory(5, 3, len(blocks)) == 3 * 25


def loops_of(function) -> tuple[list[str], list[str]]:
    """A function's two loops, and the inner one's step from the scores on: code alone, without tags and indentation."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    outer = next(node for node in ast.walk(tree) if isinstance(node, ast.For))
    inner = next(node for node in outer.body if isinstance(node, ast.For))
    lines, step = ([line.strip() for line in ast.unparse(node).splitlines()] for node in (outer, inner))
    return lines, step[next(n for n, line in enumerate(step) if line.startswith("s_ij =")) :]


@pytest.mark.parametrize(("direction", "changed_in_step"), [("forward", 10), ("backward", 6)])
def test_the_difference_of_fa1_and_fa2_is_a_dozen_lines(direction, changed_in_step):
    """One diff, one lesson: lines added and removed in the step, and lines of either loop that the other has not."""
    (loops_1, step_1), (loops_2, step_2) = (loops_of(getattr(stage, direction)) for stage in (fa1, fa2))
    changed = [line for line in difflib.ndiff(step_1, step_2) if line.startswith(("- ", "+ "))]
    assert len(changed) == changed_in_step, "\n".join(changed)
    for alone in (Counter(loops_1) - Counter(loops_2), Counter(loops_2) - Counter(loops_1)):
        assert alone.total() <= 12, "\n".join(alone)
    if direction == "forward":  # both keep the state where a reader sees it, under the same names
        for name in ("m_ij", "m_new", "p_ij", "l_ij", "alpha", "l_new", "o_i"):
            assert all(any(line.startswith(f"{name} =") for line in step) for step in (step_1, step_2)), name


def test_fa1_block_sizes_come_from_M():
    assert fa1.block_sizes(M=1024, d=16) == (16, 16)
    assert fa1.block_sizes(M=100, d=16) == (2, 2)
    assert fa1.block_sizes(M=49152, d=64) == (64, 192)
    Q, K, V = np.random.default_rng(0).standard_normal((3, 20, 4))
    assert np.array_equal(fa1.forward(Q, K, V, M=64)[0], fa1.forward(Q, K, V, B_r=4, B_c=4)[0])


def test_philox_known_answers():
    """The first words that the authors of Philox publish for Philox4x32-10."""
    ones = 0xFFFFFFFF
    assert philox(0, 0, 0, 0, 0) == 0x6627E8D5
    assert philox(2**64 - 1, ones, ones, ones, ones) == 0x408F276D
    assert philox(0x299F31D0A4093822, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344) == 0xD16CFE09


def test_dropout_keeps_the_right_share_and_differs_by_key():
    rows = cols = np.arange(300)
    keep = keep_mask(0.3, 11, 0, 0, rows, cols)
    assert abs(keep.mean() - 0.7) < 0.01
    for other in [(12, 0, 0), (11, 1, 0), (11, 0, 1), (11 + 2**32, 0, 0)]:
        assert abs((keep == keep_mask(0.3, *other, rows, cols)).mean() - 0.58) < 0.01  # 0.7² + 0.3²
    assert np.array_equal(keep[40:50, 7:99], keep_mask(0.3, 11, 0, 0, rows[40:50], cols[7:99]))
    assert keep_mask(0.0, 1, 0, 0, rows, cols).all()


def test_a_mask_is_keyed_by_column_row_head_and_batch():
    """The counters in the order in which Triton's generator takes them, one entry at a time."""
    rows, cols = np.arange(3, 8), np.arange(11, 15)
    keep = keep_mask(0.3, 9, 2, 5, rows, cols)
    for r, row in enumerate(rows):
        for c, col in enumerate(cols):
            assert keep[r, c] == (philox(9, col, row, 5, 2) >= int(0.3 * 2**32)), "batch 2, head 5"


def test_a_sequential_generator_replays_only_in_its_own_order():
    tiling = Tiling(12, 12, 4, 3)
    masks = {order: sequential_mask(tiling, 0.5, 3, order) for order in ("fa1", "fa2")}
    assert all(mask.dtype == bool for mask in masks.values())
    assert np.array_equal(masks["fa1"], sequential_mask(tiling, 0.5, 3, "fa1"))
    assert 0.3 < (masks["fa1"] == masks["fa2"]).mean() < 0.75
    assert abs(sequential_mask(Tiling(99, 99, 9, 9), 0.2, 3, "fa2").mean() - 0.8) < 0.02  # dropped with probability p
    single = Tiling(12, 12, 12, 3)  # with one row block there is one order only
    assert np.array_equal(sequential_mask(single, 0.5, 3, "fa1"), sequential_mask(single, 0.5, 3, "fa2"))


def test_the_meter_sees_the_split_workers():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
    trace = Trace()
    fa2.forward_split_keys(Q, K, V, splits=2, B_r=8, B_c=2, trace=trace)
    assert set(trace.by_worker()) == {(0, 0), (0, 1), (0,)}
    assert trace.stores("O_part") == trace.loads("O_part") == 2 * 8 * 4
    shares = trace.by_worker()
    assert shares[0, 0]["load"] == shares[0, 1]["load"] == 8 * 4 + 2 * 4 * 4  # q, and half of K and of V


@pytest.mark.parametrize(
    ("length", "causal", "want"),
    [
        (9, True, [(slice(0, 7), slice(0, 7), Tile.DIAGONAL), (slice(7, 9), slice(0, 9), Tile.DIAGONAL)]),
        (4, False, [(slice(0, 2), slice(0, 4), Tile.FULL), (slice(2, 4), slice(0, 4), Tile.FULL)]),
        (1, True, [(slice(0, 1), slice(0, 1), Tile.DIAGONAL), (slice(1, 1), slice(0, 1), Tile.SKIP)]),
        (0, False, [(slice(0, 0), slice(0, 0), Tile.SKIP), (slice(0, 0), slice(0, 0), Tile.SKIP)]),
    ],
)
def test_a_rank_s_own_meeting_in_two_calls(length, causal, want):
    assert shards.halves(length, causal) == want


@pytest.mark.parametrize(
    ("layout", "rank", "source", "causal", "want"),
    [
        ("zigzag", 1, 0, True, (slice(0, 4), slice(0, 3), Tile.FULL)),  # the front piece of an earlier rank
        ("zigzag", 0, 1, True, (slice(3, 5), slice(0, 4), Tile.FULL)),  # by the back piece, all of a later rank
        ("zigzag", 1, 1, True, (slice(0, 4), slice(0, 4), Tile.DIAGONAL)),
        ("zigzag", 1, 0, False, (slice(0, 4), slice(0, 5), Tile.FULL)),
        ("zigzag", 2, 0, True, (slice(0, 1), slice(0, 3), Tile.FULL)),
        ("zigzag", 2, 3, True, (slice(1, 1), slice(0, 0), Tile.SKIP)),
        ("contiguous", 1, 0, True, (slice(0, 4), slice(0, 5), Tile.FULL)),
        ("contiguous", 0, 1, True, (slice(5, 5), slice(0, 4), Tile.SKIP)),
        ("contiguous", 3, 3, True, (slice(0, 0), slice(0, 0), Tile.SKIP)),
    ],
)
def test_what_a_rank_sees_of_another(layout, rank, source, causal, want):
    """Four ranks hold 5, 4, 1 and no rows."""
    assert shards.meeting([5, 4, 1, 0], rank, source, layout, causal) == want


def test_where_pieces_lie():
    assert shards.even_lengths(11, 3) == [4, 4, 3]
    assert shards.pieces([4, 4, 3], "contiguous") == [[slice(0, 4)], [slice(4, 8)], [slice(8, 11)]]
    zigzag = [[slice(0, 2), slice(9, 11)], [slice(2, 4), slice(7, 9)], [slice(4, 6), slice(6, 7)]]
    assert shards.pieces([4, 4, 3], "zigzag") == zigzag
