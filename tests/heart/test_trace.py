import numpy as np
import pytest

from fa2_lab.reference import fa1, fa2, heads, naive
from fa2_lab.tiles import CAUSAL
from fa2_lab.trace import Event, Trace


def random_qkv(N=8, d=4):
    return np.random.default_rng(0).standard_normal((3, N, d))


def test_trace_counts_load_matmul_and_store():
    trace = Trace()
    A, C = trace.hbm(A=np.ones((4, 6)), C=np.empty((2, 3)))
    for _ in trace.parallel("i", [5]):
        for _ in trace.serial("j", [7]):
            a = A[:2]
            C[:] = np.exp(a @ np.ones((6, 3)) - 1) / 2
    assert trace.events == [Event("load", "A", 12, (5,), 5, 7), Event("store", "C", 6, (5,), 5, 7)]
    assert trace.flops == {"matmul": 2 * 2 * 6 * 3, "add": 6, "exp": 6, "divide": 6}
    assert (trace.matmul_flops, trace.exponentials, trace.other_flops) == (72, 6, 12)
    assert (trace.loads(), trace.stores(), trace.hbm_elements, trace.loads("C")) == (12, 6, 18, 0)
    assert trace.by_tile() == {(5, 7): {"load": 12, "store": 6, "matmul": 72, "add": 6, "exp": 6, "divide": 6}}
    assert (np.asarray(C) == np.exp(5.0) / 2).all()


@pytest.mark.parametrize("loop", ("parallel", "serial"))
def test_trace_a_loop_that_breaks_leaves_no_index_behind(loop):
    trace = Trace()
    X = trace.hbm(X=np.ones(4))
    for _ in getattr(trace, loop)("i", range(3)):
        break
    X[:1]
    for _ in trace.parallel("j", [5]):
        X[:1]
    assert trace.events == [Event("load", "X", 1, (), None, None), Event("load", "X", 1, (5,), None, 5)]


def test_trace_counts_reductions_masks_and_in_place_operations():
    trace = Trace()
    X = trace.hbm(X=np.arange(12.0).reshape(3, 4))
    x = X[:]
    x.sum(axis=1), x.max(axis=1), np.sum(x)
    assert trace.flops == {"add": 9 + 11, "maximum": 9}
    y = np.where(x > 3, x, -np.inf)  # comparing and choosing are not arithmetic, and the result is still watched
    y *= 2
    assert trace.flops["multiply"] == 12
    X[1] += np.ones(4)
    assert (trace.loads("X"), trace.stores("X"), trace.largest_on_chip) == (12 + 4, 4, 12)


def test_trace_in_place_operations_write_to_their_array():
    data, other, trace = np.ones(3), np.zeros(3), Trace()
    X = trace.hbm(x=data)
    same = x = X[:]
    x += 1
    np.add(x, 1, out=other)
    assert list(same) == [2, 2, 2] and list(other) == [3, 3, 3] and list(data) == [1, 1, 1], "a load is a copy"
    X[1:] = 0
    assert trace.stores("x") == 2 and list(data) == [1, 0, 0]


def test_trace_does_not_change_results():
    Q, K, V = random_qkv(13)
    for stage in (fa1, fa2):
        traced = stage.forward(Q, K, V, B_r=4, B_c=3, mask=CAUSAL, trace=Trace())
        untraced = stage.forward(Q, K, V, B_r=4, B_c=3, mask=CAUSAL)
        for a, b in zip(traced, untraced, strict=True):
            assert type(a) is np.ndarray and np.array_equal(a, b)


def test_trace_names_each_kind_of_operation():
    """Also the ones that no algorithm uses today: exp2, and the maxima that NumPy calls otherwise."""
    trace = Trace()
    x = trace.hbm(X=np.arange(1.0, 7).reshape(2, 3))[:]
    for result, kind, n in [
        (lambda: np.exp2(x), "exp", 6),
        (lambda: x / 2, "divide", 6),
        (lambda: np.fmax(x, 2), "maximum", 6),
        (lambda: x - 1, "add", 6),
        (lambda: np.log(x), "log", 6),
        (lambda: x.max(), "maximum", 5),
    ]:
        before = trace.flops
        result()
        assert trace.flops - before == {kind: n}
    assert (trace.exponentials, trace.other_flops, trace.matmul_flops) == (6, 6 + 6 + 6 + 6 + 5, 0)
    for name in ("dot", "vdot", "inner", "outer", "tensordot", "kron"):
        with pytest.raises(TypeError, match=rf"cannot count numpy\.{name}"):
            getattr(np, name)(x, x)
    with pytest.raises(TypeError, match=r"cannot count numpy\.einsum"):
        np.einsum("ij,ij->", x, x)


def test_trace_forgets_loop_indices_and_keeps_the_peak():
    trace = Trace()
    X = trace.hbm(X=np.zeros((4, 2)))
    for _ in trace.parallel("i", [1]):
        for _ in trace.serial("j", [2]):
            trace.hold(X[:3], X[:2])
        trace.hold(X[:1])
    X[:]
    assert [(e.worker, e.i, e.j) for e in trace.events] == [*[((1,), 1, 2)] * 2, ((1,), 1, None), ((), None, None)]
    assert trace.peak_on_chip == 6 + 4


@pytest.mark.parametrize("stage", heads.STAGES)
def test_trace_counts_each_stage_of_heads_once(stage):
    """What a stage computes only to get ready, such as P again before standard attention's backward, does not count."""
    q, k, v, dO = np.random.default_rng(0).standard_normal((4, 1, 1, 8, 4))
    O, L = heads.forward(q, k, v, stage=stage, B_r=4, B_c=4)
    heads_trace, alone = Trace(), Trace()
    heads.backward(q, k, v, O, L, dO, stage=stage, B_r=4, B_c=4, trace=heads_trace)
    if stage == "naive":
        naive.backward(q[0, 0], k[0, 0], v[0, 0], naive.forward(q[0, 0], k[0, 0], v[0, 0])[1], dO[0, 0], trace=alone)
    else:
        module, saved = {"fa1": (fa1, (np.ones(8), L[0, 0])), "fa2": (fa2, (L[0, 0],))}[stage]
        module.backward(q[0, 0], k[0, 0], v[0, 0], O[0, 0], *saved, dO[0, 0], B_r=4, B_c=4, trace=alone)
    assert heads_trace.hbm_elements == alone.hbm_elements > 0 and heads_trace.flops == alone.flops
