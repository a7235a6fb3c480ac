import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from ladder_checks import Case, check_tiles

from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling, cdiv

SIDES = st.none() | st.integers(0, 20)
WINDOWS = st.none() | st.tuples(SIDES, SIDES)


def test_cdiv_rounds_up():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_the_column_blocks_that_a_row_block_meets():
    """A window of three keys, of which only the first three are no padding: the last rows see nothing."""
    tiling = Tiling(8, 8, 2, 2, Mask(window=(1, 1), key_length=3))
    assert [tuple(tiling.blocks(i)) for i in range(4)] == [(0, 2), (0, 2), (1, 1), (1, 1)]


def test_blocks_cover_every_row_and_column_once():
    tiling = Tiling(10, 7, 4, 3)
    assert [tiling.rows(i) for i in range(tiling.T_r)] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert [tiling.cols(j) for j in range(tiling.T_c)] == [slice(0, 3), slice(3, 6), slice(6, 7)]


def test_square_causal_counts():
    assert Tiling(16, 16, 4, 4, CAUSAL).counts() == {Tile.FULL: 6, Tile.DIAGONAL: 4, Tile.SKIP: 6}


@hypothesis.given(
    N_q=st.integers(1, 14),
    N_k=st.integers(1, 14),
    B_r=st.integers(1, 16),
    B_c=st.integers(1, 16),
    causal=st.booleans(),
    key_part=st.none() | st.floats(0, 1),
    allowed_seed=st.none() | st.integers(0, 9),
    window=WINDOWS,
)
@hypothesis.example(12, 12, 3, 4, False, 0.4, None, (2, 0))  # the last rows' windows lie in the padding
@hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
def test_kinds_match_the_mask(N_q, N_k, B_r, B_c, causal, key_part, allowed_seed, window):
    length = None if key_part is None else round(key_part * N_k)
    check_tiles(Case(N_q, N_k, 2, B_r, B_c, causal, length, allowed_seed, window=window))


def test_an_interval_is_what_a_row_sees():
    """Three rows, five keys: the diagonal of row r is column r + 2."""
    row = np.arange(3)
    for mask, first, last in [
        (Mask(), [0, 0, 0], [5, 5, 5]),
        (CAUSAL, [0, 0, 0], [3, 4, 5]),
        (Mask(window=(1, 0)), [1, 2, 3], [3, 4, 5]),
        (Mask(causal=True, window=(1, 9)), [1, 2, 3], [3, 4, 5]),
        (Mask(window=(None, 1)), [0, 0, 0], [4, 5, 5]),
        (Mask(window=(0, 99), key_length=3), [2, 3, 3], [3, 3, 3]),
    ]:
        assert [list(ends) for ends in mask.interval(row, 3, 5)] == [first, last]
        assert [tuple(map(int, mask.interval(r, 3, 5))) for r in range(3)] == list(zip(first, last, strict=True))


def test_a_window_s_tiles_do_not_grow_with_the_sequence():
    """64 keys behind the diagonal in tiles of 16: five column blocks in a row, three of them without a mask."""
    for N in (256, 512):
        counts = Tiling(N, N, 16, 16, Mask(causal=True, window=(64, None))).counts()
        T = N // 16
        assert counts[Tile.FULL] + counts[Tile.DIAGONAL] == 5 * T - 10
        assert counts[Tile.FULL] == 3 * T - 6


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
        (dict(mask=Mask(window=(0, -1))), ValueError, "window"),
        (dict(mask=Mask(window=4)), TypeError, "window"),
        (dict(mask=Mask(window=(4,))), TypeError, "window"),
        (dict(mask=Mask(window=(4.0, 0))), TypeError, "window"),
        (dict(mask=Mask(window=(True, 0))), TypeError, "window"),
        (dict(mask=Mask(allowed=np.ones((8, 7), bool))), ValueError, "mask"),
        (dict(mask=Mask(allowed=np.ones((8, 8)))), TypeError, "mask"),
        (dict(mask=Mask(allowed=[[True]])), TypeError, "mask"),
    ],
)
def test_bad_geometry_is_named(arguments, kind, word):
    with pytest.raises(kind, match=rf"^{word}: got .*; it takes"):
        Tiling(**dict(dict(N_q=8, N_k=8, B_r=4, B_c=4), **arguments))
