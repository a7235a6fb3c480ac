"""machine/time.py: clocks by hand, and from counts and rates."""

import pytest

from fa2_lab.machine import io, time
from fa2_lab.machine.chips import A100, CHIPS, H100
from fa2_lab.machine.time import Clocks, Worth

each = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)


def test_one_tile_on_an_a100_by_hand():
    """128 × 64, d = 128, 4 warps: matmul 4·128·64·128 / 2048, exp (128·64 + 128) / 16, and so on."""
    tile = time.tile_clocks(A100, 128, 64, 128)
    assert tile.tensor == 4 * 128 * 64 * 128 / 2048 == 2048
    assert tile.exp == (128 * 64 + 128) / 16 == 520
    assert (
        tile.fp32 == (3 * 128 * 64 + 128 * 128 + 2 * 128) / 64 == 644
    )  # scale and shift, max, sum; α o; α l and m − m
    assert tile.shared == 2 * (2 * 64 * 128 + 4 * 2 * 64 * 128 + 128 * 128) / 128 == 1536
    assert (tile.overlapped, tile.serial, tile.busiest) == (2048, 4748, "tensor")
    assert sum(tile.shares().values()) == pytest.approx(1)


def test_one_tile_on_an_h100_by_hand():
    """Tensor cores twice as fast, exp no faster. Two slabs of 64 rows read K and V twice, not four times."""
    tile = time.tile_clocks(H100, 128, 64, 128)
    assert (tile.tensor, tile.exp, tile.fp32) == (1024, 520, 322)
    assert tile.shared == 2 * (2 * 64 * 128 + 2 * 2 * 64 * 128 + 128 * 128) / 128 == 1024
    assert tile.shares()["exp"] > 1.5 * time.tile_clocks(A100, 128, 64, 128).shares()["exp"]


@each
def test_clocks_follow_from_counts_and_rates(chip):
    for B_r, B_c, d in ((64, 64, 64), (128, 64, 128), (128, 128, 64)):
        for algorithm in ("fa1", "fa2"):
            tile, ops = (
                time.tile_clocks(chip, B_r, B_c, d, algorithm=algorithm),
                io.tile_operations(algorithm, "forward", B_r, B_c, d),
            )
            assert tile.tensor * chip.tensor_per_clock == ops["matmul"]
            assert tile.exp * chip.exp_per_clock == ops["exp"]
            assert tile.overlapped == max(tile.tensor, tile.fp32, tile.exp, tile.shared) <= tile.serial


@each
def test_what_the_changes_are_worth(chip):
    tweak, split = (change(chip, 128, 64, 128) for change in (time.tweak_1, time.split))
    assert 1.01 < tweak.serial < 1.07 and tweak.overlapped >= 1
    saved_fp32 = (tweak.before.fp32 - tweak.after.fp32) * chip.fp32_per_clock
    assert saved_fp32 == 128 * 128 + 6 * 128  # one scaling of o, and six operations on each row
    assert tweak.before.tensor == tweak.after.tensor and tweak.before.shared == tweak.after.shared
    assert split.serial > 1.3 and split.before.shared > 2 * split.after.shared
    assert split.before.exp == split.after.exp


def test_worth_is_a_ratio_of_times():
    change = Worth(Clocks(4, 3, 2, 1), Clocks(4, 1, 2, 1))
    assert (change.overlapped, change.serial) == (1, 10 / 8)
