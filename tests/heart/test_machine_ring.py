"""machine/ring.py: bytes and tiles by hand, and against one device."""

import pytest

from fa2_lab.machine import ring
from fa2_lab.reference import shards
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile, Tiling

for_both_layouts = pytest.mark.parametrize("layout", shards.LAYOUTS)
for_both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def test_ring_bytes_equal_hand_computed_values():
    """Four ranks of 8 rows, 2 key heads of 16 in 16 bits: a block of K and V is 8 · 2 · 2 · 16 · 2 = 1024 bytes."""
    assert ring.bytes_sent([8] * 4, 0, "forward", kv_heads=2, d=16) == {"K V": 3 * 1024}
    assert ring.bytes_sent([8] * 4, 0, "backward", kv_heads=2, d=16) == {"K V": 3 * 1024, "dK dV": 3 * 2048}
    assert ring.bytes_sent([8] * 4, 0, "backward", kv_heads=2, d=16, itemsize=4) == {"K V": 3 * 2048, "dK dV": 3 * 2048}
    assert ring.bytes_sent([8], 0, "backward", kv_heads=2, d=16) == {}
    # All but the next rank's
    assert ring.bytes_sent([8, 4, 2], 0, "forward", kv_heads=2, d=16) == {"K V": (8 + 2) * 128}


# Tiles --------------------------------------------------------------------------------------------------------


@for_both_layouts
@for_both_masks
def test_ring_ranks_together_visit_the_tiles_of_one_device(layout, causal):
    """Where pieces are whole blocks, cutting the sequence costs no tile."""
    counts = Tiling(64, 64, 4, 4, CAUSAL if causal else NO_MASK).counts()
    assert ring.tiles_per_step([16] * 4, layout, causal, 4, 4).sum() == counts[Tile.FULL] + counts[Tile.DIAGONAL]


def test_zigzag_balances_causal_work_and_contiguous_does_not():
    even, uneven = (ring.tiles_per_step([32] * 4, layout, True, 4, 4) for layout in shards.LAYOUTS)
    assert (even == even[0]).all() and ring.busy_fraction(even) == 1
    assert even[0].tolist() == [36, 32, 32, 32] and uneven[1].tolist() == [36, 64, 0, 0]  # its own, then rank 0's
    assert uneven.sum(axis=1).tolist() == [36, 100, 164, 228] and ring.busy_fraction(uneven) == pytest.approx(528 / 912)
    assert ring.busy_fraction(ring.tiles_per_step([32] * 4, "contiguous", False, 4, 4)) == 1
