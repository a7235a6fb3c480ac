"""Tiles: their kinds and intervals against the mask entry by entry."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from reference_checks import CORNERS, Case

from fa2_lab.reference import fa2
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling, cdiv, whole_number
from fa2_lab.trace import Trace

WINDOW_SIDES = st.none() | st.integers(0, 20)


def check_tiles(case: Case) -> None:
    """Assert that kinds of tiles, visited tiles, masks and intervals agree with the mask, and that no skipped tile is
    touched.
    """
    seen, tiling = case.seen(), Tiling(case.N_q, case.N_k, case.B_r, case.B_c, case.mask())
    bias = np.zeros(seen.shape) if case.bias is None else case.bias_values()
    kinds = {}
    for i in range(tiling.T_r):
        for j in range(tiling.T_c):
            tile = seen[tiling.rows(i), tiling.cols(j)]
            assert np.array_equal(tiling.visible(i, j), tile)
            masked = np.where(tile, 1.0 + bias[tiling.rows(i), tiling.cols(j)], -np.inf)
            assert np.array_equal(tiling.apply_mask(np.ones(tile.shape), i, j), masked)
            kinds[i, j] = Tile.FULL if tile.all() else Tile.DIAGONAL if tile.any() else Tile.SKIP
            assert tiling.kind(i, j) is kinds[i, j], (i, j, case)
    visited = {at for at, kind in kinds.items() if kind is not Tile.SKIP}
    for i in range(tiling.T_r):
        assert tiling.visited_cols(i) == [j for j in range(tiling.T_c) if (i, j) in visited], (i, case)
    for j in range(tiling.T_c):
        assert tiling.visited_rows(j) == [i for i in range(tiling.T_r) if (i, j) in visited], (j, case)
    assert tiling.counts() == {kind: n for kind in Tile if (n := list(kinds.values()).count(kind))}
    if case.allowed_seed is None:
        first, last = tiling.interval(np.arange(case.N_q))
        assert np.array_equal(last - first, seen.sum(axis=1)) and (first >= 0).all() and (last <= case.N_k).all()
        assert all(list(seen[r, a:b]) == [True] * (b - a) for r, (a, b) in enumerate(zip(first, last, strict=True)))
    trace = Trace()
    Q, K, V, _ = case.tensors()
    fa2.forward(Q, K, V, B_r=case.B_r, B_c=case.B_c, mask=tiling.mask, trace=trace)
    assert {(i, j) for (i, j) in trace.by_tile() if j is not None} == visited


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_tiles_match_the_mask_in_corner_cases(case):
    check_tiles(case)


@hypothesis.given(
    sizes=st.tuples(*(st.integers(1, n) for n in (14, 14, 16, 16))),
    causal=st.booleans(),
    key_part=st.none() | st.floats(0, 1),
    allowed_seed=st.none() | st.integers(0, 9),
    window=st.none() | st.tuples(WINDOW_SIDES, WINDOW_SIDES),
)
@hypothesis.example((12, 12, 3, 4), False, 0.4, None, (2, 0))  # the last rows' windows lie in the padding
@hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
def test_tile_kinds_match_the_mask(sizes, causal, key_part, allowed_seed, window):
    N_q, N_k, B_r, B_c = sizes
    length = None if key_part is None else round(key_part * N_k)
    check_tiles(Case(N_q, N_k, 2, B_r, B_c, causal, length, allowed_seed, window=window))


def test_blocks_cover_each_row_and_column_once():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    tiling = Tiling(10, 7, 4, 3)
    assert [tiling.rows(i) for i in range(tiling.T_r)] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert [tiling.cols(j) for j in range(tiling.T_c)] == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert Tiling(16, 16, 4, 4, CAUSAL).counts() == {Tile.FULL: 6, Tile.DIAGONAL: 4, Tile.SKIP: 6}


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (dict(B_r=0), ValueError, "B_r"),
        (dict(B_c=-1), ValueError, "B_c"),
        (dict(B_r=2.0), TypeError, "B_r"),
        (dict(N_q=0), ValueError, "N_q"),
        (dict(N_k=True), TypeError, "N_k"),
        (dict(mask="causal"), TypeError, "mask"),
        (dict(mask=Mask(causal=1)), TypeError, "causal"),
        (dict(mask=Mask(key_length=float("nan"))), TypeError, "key_length"),
        (dict(mask=Mask(key_length=9)), ValueError, "key_length"),
        (dict(mask=Mask(key_length=-1)), ValueError, "key_length"),
        (dict(mask=Mask(window=(-1, 0))), ValueError, "window"),
        (dict(N_k=7, mask=Mask(allowed=np.ones((7, 8), bool))), ValueError, "mask"),
        (dict(mask=Mask(allowed=np.ones((8, 8), int))), TypeError, "mask"),
        (dict(mask=Mask(allowed=[[True]])), TypeError, "mask"),
    ],
)
def test_tiling_rejects_bad_input_by_name(arguments, kind, word):
    with pytest.raises(kind, match=rf"^{word}: got .*; it takes"):
        Tiling(**dict(dict(N_q=8, N_k=8, B_r=4, B_c=4), **arguments))


def test_tiling_accepts_the_limits_of_each_range():
    assert whole_number("n", np.int64(3), low=3, high=3) == 3
    Tiling(8, 8, 4, 4, Mask(key_length=8, window=(0, 0)))
    Tiling(8, 8, 4, 4, Mask(key_length=0, window=[None, 3]))
