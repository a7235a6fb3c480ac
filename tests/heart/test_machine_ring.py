"""machine/ring.py: the ring in NumPy against one device, its links against the closed form, its time by hand."""

import numpy as np
import pytest

from fa2_lab.machine import ring
from fa2_lab.reference import fa2, shards
from fa2_lab.tiles import CAUSAL, NO_MASK, Tile, Tiling

LENGTHS = [[13], [7, 6], [4, 0, 9], [3, 3, 3, 4], [1, 0, 0, 2], [2, 2, 2, 2, 2]]
both_layouts = pytest.mark.parametrize("layout", shards.LAYOUTS)
every_length = pytest.mark.parametrize("lengths", LENGTHS, ids=str)
with_and_without = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def run(lengths, layout, causal, d=5):
    """(results of the ring, of one device, links of the forward, of the backward)."""
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, sum(lengths), d))
    mask, options = CAUSAL if causal else NO_MASK, dict(layout=layout, causal=causal)
    there, back = ring.Links(), ring.Links()
    O, L = ring.forward(Q, K, V, lengths, **options, links=there)
    gradients = ring.backward(Q, K, V, O, L, dO, lengths, **options, links=back)
    want, L_want = fa2.forward(Q, K, V, B_r=4, B_c=4, mask=mask)
    truth = want, L_want, *fa2.backward(Q, K, V, want, L_want, dO, B_r=4, B_c=4, mask=mask)
    return (O, L, *gradients), truth, there, back


@every_length
@with_and_without
@both_layouts
def test_the_ring_is_exact(lengths, causal, layout):
    found, truth, *_ = run(lengths, layout, causal)
    for got, want in zip(found, truth, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


@every_length
@both_layouts
def test_links_carry_what_the_closed_form_says(lengths, layout):
    _, _, there, back = run(lengths, layout, True)
    for way, links, size in (("forward", there, {"K V": 2}), ("backward", back, {"K V": 2, "dK dV": 4})):
        for rank in range(len(lengths)):
            counted = {what: n * size[what] for (who, what), n in links.elements.items() if who == rank}
            assert counted == ring.sent(lengths, rank, way, kv_heads=1, d=5), (way, rank)


def test_bytes_by_hand():
    """Four ranks of 8 rows, 2 key heads of 16 in 16 bits: a block of K and V is 8 · 2 · 2 · 16 · 2 = 1024 bytes."""
    assert ring.sent([8] * 4, 0, "forward", kv_heads=2, d=16) == {"K V": 3 * 1024}
    assert ring.sent([8] * 4, 0, "backward", kv_heads=2, d=16) == {"K V": 3 * 1024, "dK dV": 3 * 2048}
    assert ring.sent([8], 0, "backward", kv_heads=2, d=16) == {}


# Tiles --------------------------------------------------------------------------------------------------------


@both_layouts
@with_and_without
def test_all_ranks_together_visit_the_tiles_of_one_device(layout, causal):
    """Where pieces are whole blocks, cutting the sequence costs no tile."""
    counts = Tiling(64, 64, 4, 4, CAUSAL if causal else NO_MASK).counts()
    assert ring.work([16] * 4, layout, causal, 4, 4).sum() == counts[Tile.FULL] + counts[Tile.DIAGONAL]


def test_zigzag_is_even_and_contiguous_is_not():
    even, uneven = (ring.work([32] * 4, layout, True, 4, 4) for layout in shards.LAYOUTS)
    assert (even == even[0]).all() and ring.balance(even) == 1
    assert even[0].tolist() == [36, 32, 32, 32]
    assert uneven.sum(axis=1).tolist() == [36, 100, 164, 228] and ring.balance(uneven) == pytest.approx(528 / 912)
    assert ring.balance(ring.work([32] * 4, "contiguous", False, 4, 4)) == 1


# Seconds ------------------------------------------------------------------------------------------------------

SIZES = dict(heads=4, kv_heads=2, d=64, causal=True, flops=1e12, link=1e9)


def test_a_step_by_hand():
    """100 rows: 4 heads · 100² / 2 scores · 4 · 64 FLOPs; 2 · 2 heads · 100 · 64 numbers of 2 bytes, backward of 6."""
    forward, backward = (ring.step(100, way, **SIZES) for way in ("forward", "backward"))
    assert forward.compute == pytest.approx(4 * 5000 * 256 / 1e12) and forward.transfer == pytest.approx(51200 / 1e9)
    assert backward.compute == pytest.approx(2.5 * forward.compute)
    assert backward.transfer == pytest.approx(3 * forward.transfer)
    full = ring.step(100, "forward", **SIZES | dict(causal=False))
    assert full.compute == pytest.approx(2 * forward.compute) and full.transfer == forward.transfer
    assert forward.overlapped == forward.transfer and forward.hidden == pytest.approx(0.1)
    assert forward.serial == pytest.approx(forward.compute + forward.transfer)


@pytest.mark.parametrize("direction", ring.FLOPS)
def test_the_smallest_shard_hides_its_transfer_and_the_next_smaller_does_not(direction):
    rows = ring.smallest_shard(direction, **SIZES)
    assert ring.step(rows, direction, **SIZES).hidden == 1 > ring.step(rows - 1, direction, **SIZES).hidden
    assert rows == ring.smallest_shard(direction, **SIZES | dict(d=128))
    assert rows == pytest.approx(2 * ring.smallest_shard(direction, **SIZES | dict(causal=False)), abs=1)
