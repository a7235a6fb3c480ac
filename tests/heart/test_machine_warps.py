"""machine/warps.py: both schemes give the reference's rows, and count what can be counted by hand."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_lab.machine import warps
from fa2_lab.machine.warps import COPY, RaceError, SharedMemory, split_k, split_q, tile_accesses
from fa2_lab.reference import fa2
from fa2_lab.tiles import Mask, Tiling

for_both_schemes = pytest.mark.parametrize("scheme", warps.SCHEMES)


def random_head(N_q, N_k, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((N_q, d)), *rng.standard_normal((2, N_k, d))


@for_both_schemes
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, n) for n in (11, 11, 4, 5, 5, 6)]),
    st.booleans(),
    st.none() | st.integers(0, 11),
    st.none() | st.tuples(st.integers(0, 11), st.none() | st.integers(0, 11)),
    st.sampled_from([1.0, 1e4]),
)
def test_warp_schemes_equal_the_reference(scheme, sizes, causal, length, window, logits):
    N_q, N_k, d, B_r, B_c, W = sizes
    Q, K, V = random_head(N_q, N_k, d)
    mask = Mask(causal, None if length is None else min(length, N_k), window=window)
    tiling = Tiling(N_q, N_k, B_r, B_c, mask)
    O, L = fa2.forward(Q * logits, K, V, B_r=B_r, B_c=B_c, mask=mask)
    for i in range(tiling.T_r):
        run = warps.SCHEMES[scheme](Q * logits, K, V, tiling, i, W)
        assert np.allclose(run.O, O[tiling.rows(i)], rtol=1e-12, atol=1e-12)
        assert np.allclose(run.L, L[tiling.rows(i)], rtol=1e-12, atol=1e-12)


@for_both_schemes
@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(1, 6) for _ in range(5)]))
def test_warp_scheme_counts_equal_the_closed_form(scheme, sizes):
    b, c, d, W, tiles = sizes
    Q, K, V = random_head(b, c * tiles, d)
    run = warps.SCHEMES[scheme](Q, K, V, Tiling(b, c * tiles, b, c), 0, W)
    counted = Counter()
    for (_, op, tensor), n in run.shared.counts.items():
        counted[op, tensor] += n
    counted["write", "Q"] -= b * d  # once for the block, before its first tile
    assert +counted == Counter({key: tiles * n for key, n in tile_accesses(scheme, b, c, d, W).items()})
    assert run.shared.barrier_counts.total() == tiles * warps.BARRIERS[scheme]


def test_warp_scheme_counts_of_one_tile_equal_hand_computed_values():
    """8 × 8 tile, d = 4, 4 warps. Written out, so that a change of the model is seen here."""
    Q, K, V = random_head(8, 8, 4)
    by_q, by_k = (scheme(Q, K, V, Tiling(8, 8, 8, 8), 0, 4).shared for scheme in (split_q, split_k))
    assert [by_q.counts[2, "read", name] for name in "QKV"] == [8, 32, 32]  # its rows of Q, all of K and V
    assert not any(op == "write" and warp != COPY for warp, op, _ in by_q.counts)  # they tell nobody anything
    assert [by_k.counts[2, "read", name] for name in "QKV"] == [32, 8, 8]  # all of Q, its slice of K and V
    assert [by_k.counts[2, "write", name] for name in ("max", "sum", "PV")] == [8, 8, 32]
    assert [by_k.counts[2, "read", name] for name in ("max", "sum", "PV")] == [4 * 8, 4 * 2, 4 * 2 * 4]
    assert warps.access_bytes("split_k", 8, 8, 4, 4) == 2 * (64 + 128 + 64) + 4 * (32 + 128 + 32 + 32 + 128 + 128)
    assert set(by_k.barrier_counts) == {"the tile is there", "row maxima of all warps", "row sums and P V of all warps"}


@for_both_schemes
def test_removing_any_barrier_causes_a_race(scheme, monkeypatch):
    """Leave out any one barrier of two tiles and there is a race; split_q's last guards a tile that never comes."""
    Q, K, V = random_head(4, 8, 3)
    real = SharedMemory.barrier

    def run(left_out):
        count = iter(range(99))
        monkeypatch.setattr(SharedMemory, "barrier", lambda *a: None if next(count) == left_out else real(*a))
        return warps.SCHEMES[scheme](Q, K, V, Tiling(4, 8, 4, 4), 0, 2)

    total = run(None).shared.barrier_counts.total()
    for left_out in range(total - (scheme == "split_q")):
        with pytest.raises(RaceError):
            run(left_out)


def test_shared_memory_model_detects_each_kind_of_race():
    for first, second in (("write", "read"), ("write", "write"), ("read", "write")):
        shared = SharedMemory(x=(4,))
        shared.arrays["x"][:] = 0
        act = {"read": lambda w, s=shared: s.read(w, "x"), "write": lambda w, s=shared: s.write(w, "x", slice(4), 1.0)}
        act[first](0)
        act[second](0)  # one warp is in order with itself
        with pytest.raises(RaceError, match=r"warp 1 .* in x"):
            act[second](1)
        shared.barrier("a test")
        act[second](1)
    shared.barrier("a test")
    shared.read(0, "x"), shared.read(1, "x")  # reading together is no race
    for warp, who in ((0, "warp 0"), (1, "warp 1"), (COPY, "the copy")):  # but nobody may write what others have read
        with pytest.raises(RaceError, match=f"^{who} writes what another has read"):
            shared.write(warp, "x", 0, 1.0)
