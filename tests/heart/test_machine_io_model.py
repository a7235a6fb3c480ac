"""The closed forms of machine/io_model.py against the meter, to the element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_lab.machine import io_model
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import Trace

ALGORITHMS_WITH_TRAFFIC = sorted(io_model.TRAFFIC_FORMULAS)
ALGORITHMS_WITH_OPERATIONS = sorted(io_model.TILE_FORMULAS)


def trace_of(algorithm, direction, tiling, d):
    """Run one pass on random inputs, and return the trace that has metered it."""
    rng = np.random.default_rng(0)
    Q, dO = rng.standard_normal((2, tiling.N_q, d))
    K, V = rng.standard_normal((2, tiling.N_k, d))
    module, blocks, trace = naive, {}, Trace()
    if algorithm != "standard":
        module, blocks = {"fa1": fa1, "fa2": fa2}[algorithm], dict(B_r=tiling.B_r, B_c=tiling.B_c)
    if direction == "forward":
        module.forward(Q, K, V, mask=tiling.mask, trace=trace, **blocks)
        return trace
    results = module.forward(Q, K, V, mask=tiling.mask, **blocks)
    if algorithm == "standard":
        naive.backward(Q, K, V, results[1], dO, trace=trace)
    else:
        module.backward(Q, K, V, *results, dO, mask=tiling.mask, trace=trace, **blocks)
    return trace


def elements_moved(trace, op):
    tensors = {e.tensor for e in trace.events if e.op == op}
    return {t: trace.loads(t) if op == "load" else trace.stores(t) for t in tensors}


def nonzero(counts):
    return {key: n for key, n in counts.items() if n}


@st.composite
def tilings(draw):
    """Draw a tiling of any lengths and blocks, with any causal mask, window, key length or boolean mask."""
    N_q, N_k = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    B_r, B_c = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    length = draw(st.none() | st.integers(0, N_k))
    allowed = None
    if draw(st.booleans()):
        rng, rate = np.random.default_rng(draw(st.integers(0, 99))), draw(st.sampled_from([0.05, 0.5]))
        allowed = rng.random((N_q, N_k)) < rate
    sides = st.none() | st.integers(0, 9)
    window = draw(st.none() | st.tuples(sides, sides))
    return Tiling(N_q, N_k, B_r, B_c, Mask(draw(st.booleans()), length, allowed, window))


@settings(max_examples=60, deadline=None)
@given(tilings(), st.integers(1, 4))
@pytest.mark.parametrize("algorithm, direction", ALGORITHMS_WITH_TRAFFIC)
def test_io_model_traffic_equals_the_trace(algorithm, direction, tiling, d):
    form, trace = io_model.traffic(algorithm, direction, tiling, d), trace_of(algorithm, direction, tiling, d)
    assert nonzero(form.loads) == nonzero(elements_moved(trace, "load"))
    assert nonzero(form.stores) == nonzero(elements_moved(trace, "store"))
    assert form.total == trace.hbm_elements


def loads(rows, inner, columns):
    """Return the elements of both operands that a matmul loads, counted tile by tile of its result."""
    left = right = 0
    for i in range(0, rows, io_model.GEMM_TILE):
        for j in range(0, columns, io_model.GEMM_TILE):
            left += len(range(rows)[i : i + io_model.GEMM_TILE]) * inner
            right += inner * len(range(columns)[j : j + io_model.GEMM_TILE])
    return np.array([left, right])


@pytest.mark.parametrize("N_q, N_k, d", [(512, 512, 128), (300, 200, 64), (129, 1, 256)])
def test_standard_attention_requests_equal_its_matmul_loads(N_q, N_k, d):
    q, k, s = N_q * d, N_k * d, N_q * N_k
    scores, output = loads(N_q, d, N_k), loads(N_q, N_k, d)
    requests = io_model.requests("standard", "forward", Tiling(N_q, N_k, 64, 64), d)
    assert requests.total == (scores + output).sum() + s + (s + s + q)  # softmax loads S; S, P and O are stored
    dv, dp, dq, dk = (loads(N_k, N_q, d), loads(N_q, d, N_k), loads(N_q, N_k, d), loads(N_k, N_q, d))
    requests = io_model.requests("standard", "backward", Tiling(N_q, N_k, 64, 64), d)
    assert requests.total == (dv + dp + dq + dk).sum() + (s + s) + (2 * s + q + 2 * k)  # softmax's loads P and dP


@settings(max_examples=40, deadline=None)
@given(tilings(), st.integers(1, 4))
@pytest.mark.parametrize("algorithm, direction", ALGORITHMS_WITH_OPERATIONS)
def test_io_model_operations_equal_the_trace(algorithm, direction, tiling, d):
    ops, trace = io_model.operations(algorithm, direction, tiling, d), trace_of(algorithm, direction, tiling, d)
    assert nonzero(ops) == nonzero(trace.flops)
    assert (ops["matmul"], ops["exp"], io_model.other_operations(ops)) == (
        trace.matmul_flops,
        trace.exponentials,
        trace.other_flops,
    )


# What is on chip at once: blocks of B_r × d and of B_c × d, numbers for each row, tiles.
ON_CHIP = {"forward": (2, 2, 2, 1), "fa1": (4, 4, 3, 2), "fa2": (3, 4, 2, 2)}


@pytest.mark.parametrize("algorithm, direction", ALGORITHMS_WITH_OPERATIONS)
def test_io_model_operations_of_one_tile_equal_the_trace(algorithm, direction):
    tiling = Tiling(11, 9, 4, 3)  # the last row of tiles has 3 rows
    trace = trace_of(algorithm, direction, tiling, 5)
    assert trace.peak_on_chip == np.dot(ON_CHIP.get(direction, ON_CHIP[algorithm]), (4 * 5, 3 * 5, 4, 4 * 3))
    for (i, j), counts in trace.by_tile().items():
        if i is None or j is None:
            continue
        b, c = tiling.visible(i, j).shape
        counts.pop("load"), counts.pop("store", None)
        assert nonzero(counts) == nonzero(io_model.tile_operations(algorithm, direction, b, c, 5))
