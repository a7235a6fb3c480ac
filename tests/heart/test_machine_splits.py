"""machine/splits.py: equal shares against a program that walks through all work, and the numbers of an H200."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_lab.kernels.decode.split_rules import heads_fill, smallest_share, splits_of_head
from fa2_lab.machine import grid, splits
from fa2_lab.machine.splits import Shares

HEAD_TILES = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(tuple)


def tiles_by_unit(tiles, share):
    """Return {(program, head): tiles}, counted unit by unit."""
    walk, t = {}, 0
    for head, n in enumerate(tiles):
        for tile in range(-1, n):  # −1: the unit that begins the head
            tiles_of_head = walk.setdefault((t // share, head), [])
            tiles_of_head += [tile] if tile >= 0 else []
            t += 1
    return walk


@settings(max_examples=200, deadline=None)
@given(HEAD_TILES, st.integers(1, 20), st.integers(1, 4))
def test_shares_equal_a_walk_through_all_tiles(tiles, programs, least):
    shares = Shares(tiles, programs, least)
    walk = tiles_by_unit(tiles, shares.share)
    spans = {(w, head): list(range(a, b)) for w in range(programs) for head, a, b in shares.spans(w)}
    assert spans == walk and shares.busy_programs == 1 + max(w for w, _ in walk)
    for head in range(len(tiles)):
        assert list(shares.readers(head)) == [w for w, h in walk if h == head]
    # The kernels store program w's partial result for a head at index w + head of a buffer for programs + heads.
    slots = {w + head for w, head in walk}
    assert len(slots) == len(walk) and max(slots) < programs + len(tiles)
    assert [block.cost for block in shares.blocks()] == [
        sum(1 for t in range(shares.work) if t // shares.share == w) for w in range(shares.busy_programs)
    ]


def test_split_model_equals_the_expected_splits_on_h200():
    """One sequence of 65,536 keys: 8 heads for 396 slots."""
    shares = Shares((2048,) * 8, 396, smallest_share(4, 128, 32, 2))
    assert (shares.min_share, shares.share, shares.busy_programs) == (1, 42, 391)
    assert [block.cost for block in splits.same_splits((5, 1, 0), 3)] == [3, 3, 2, 2, 1]  # none without a tile
    one_each = grid.schedule(splits.same_splits((2048,) * 8, 1), 396)
    assert one_each.makespan == 2049 and grid.schedule(shares.blocks(), 396).makespan == 42


@pytest.mark.parametrize("heads", (0, 8, 237, 238, 256, 264, 300, 2100))
def test_heads_stay_whole_if_they_fill_the_slots(heads):
    """In nine of ten slots, over all waves: then a head is one split."""
    assert heads_fill(264, heads) == (heads in (238, 256, 264, 2100))
    assert heads == 0 or (splits_of_head(264, heads, 100) == 1) == heads_fill(264, heads)


@pytest.mark.parametrize("heads, tiles, least, expected", [
    (8, 2048, 1, 49), (64, 512, 1, 6), (128, 512, 1, 3), (16, 256, 1, 24),
    (100, 2048, 1, 0),  # three for each leave a quarter of the slots empty
    (8, 97, 1, 0), (8, 98, 1, 49), (8, 2048, 21, 0),  # not two units of work worth their parts
    (256, 256, 1, 0), (1000, 256, 1, 0),  # more heads than half of the slots
])  # fmt: skip
def test_heads_are_split_if_that_fills_the_slots(heads, tiles, least, expected):
    assert splits_of_head(396, heads, tiles, least) == expected


def test_min_share_equals_hand_computed_values():
    assert smallest_share(rows=4, d=128, B_c=32, itemsize=2) == 1
    assert smallest_share(rows=64, d=128, B_c=32, itemsize=2) == 5
    assert Shares((3, 3), 100, min_share=3).share == 3


def test_decode_time_model_is_bound_by_bandwidth():
    size, tiles = 268435456, (2048,) * 8  # bytes of the keys and values, in tiles of 16 KiB
    shared, alone = (splits.read_seconds(tiles, 16384, n, 396, lone_rate=40e9, bandwidth=4.32e12) for n in (396, 1))
    assert size / 4.32e12 < shared < 1.05 * size / 4.32e12
    assert alone == pytest.approx((8 * 2048 + 8) * 16384 / 40e9)  # every tile, and one to begin each head
