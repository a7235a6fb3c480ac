"""machine/time.py: clocks by hand, the order of the chips, and the exact causal ratio."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_lab.machine import budget, grid, io, time
from fa2_lab.machine.chips import A100, CHIPS, H100, H200, L40S, RTX_3090, RTX_4090
from fa2_lab.machine.time import Clocks, Worth
from fa2_lab.tiles import CAUSAL, Mask, Tile, Tiling

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
    assert tile.peak_share == (2048 / 4748, 1.0)
    assert sum(tile.shares().values()) == pytest.approx(1)


def test_one_tile_on_an_h100_by_hand():
    """Tensor cores twice as fast, exp no faster. Two slabs of 64 rows read K and V twice, not four times."""
    tile = time.tile_clocks(H100, 128, 64, 128)
    assert (tile.tensor, tile.exp, tile.fp32) == (1024, 520, 322)
    assert tile.shared == 2 * (2 * 64 * 128 + 2 * 2 * 64 * 128 + 128 * 128) / 128 == 1024
    assert tile.shares()["exp"] > 1.5 * time.tile_clocks(A100, 128, 64, 128).shares()["exp"]


def test_on_an_h100_with_d_64_exp_takes_as_long_as_the_products():
    tile = time.tile_clocks(H100, 128, 128, 64)
    assert tile.tensor == 1024 and tile.exp == pytest.approx(1024, rel=0.01)


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
    tweak, split, exp = (change(chip, 128, 64, 128) for change in (time.tweak_1, time.split, time.free_exp))
    assert 1.01 < tweak.serial < 1.07 and tweak.overlapped >= 1
    saved_fp32 = (tweak.before.fp32 - tweak.after.fp32) * chip.fp32_per_clock
    assert saved_fp32 == 128 * 128 + 6 * 128  # one scaling of o, and six operations on each row
    assert tweak.before.tensor == tweak.after.tensor and tweak.before.shared == tweak.after.shared
    assert split.serial > 1.3 and split.before.shared > 2 * split.after.shared
    assert split.before.exp == split.after.exp
    assert exp.after.exp == 0 and exp.serial == pytest.approx(1 / (1 - exp.before.shares()["exp"]))


def test_the_slower_the_tensor_cores_the_less_everything_else_matters():
    by_price = [time.free_exp(chip, 128, 64, 128).serial for chip in (RTX_4090, L40S, A100, H100)]
    assert by_price == sorted(by_price)
    assert time.free_exp(RTX_3090, 128, 64, 128).serial == time.free_exp(RTX_4090, 128, 64, 128).serial
    assert time.split(A100, 128, 64, 128).overlapped > 2 > time.split(RTX_4090, 128, 64, 128).overlapped == 1


def test_split_k_is_bound_by_shared_memory_on_an_a100():
    change = time.split(A100, 128, 64, 128)
    assert (change.before.busiest, change.after.busiest) == ("shared", "tensor")


def test_worth_is_a_ratio_of_times():
    change = Worth(Clocks(4, 3, 2, 1), Clocks(4, 1, 2, 1))
    assert (change.overlapped, change.serial) == (1, 10 / 8)


# Causal ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6))
def test_causal_ratio_is_exact(T, B):
    tiling = Tiling(T * B, T * B, B, B, CAUSAL)
    causal = time.skipping(A100, tiling, 64)
    assert time.causal_ratio(T) == Fraction(T + 1, 2 * T) == 1 / causal.tile_speedup
    assert (causal.all_tiles, causal.full_tiles) == (T * T, T * (T - 1) // 2 + (T if B == 1 else 0))
    assert causal.visible_scores == T * B * (T * B + 1) // 2
    assert causal.in_vain == 1 - Fraction(T * B + 1, (T + 1) * B)
    assert causal.serial <= float(causal.tile_speedup) + 1e-12


def test_causal_times_are_sums_over_tiles():
    """Tile by tile: a FULL one costs a tile, a DIAGONAL one also a compare and a select for each score."""
    tiling, d = Tiling(300, 500, 64, 32, Mask(causal=True, key_length=470)), 64
    tile = time.tile_clocks(H100, 64, 32, d)
    masking = 2 * 64 * 32 / H100.fp32_per_clock
    serial = overlapped = 0.0
    for i in range(tiling.T_r):
        for j in tiling.visited_cols(i):
            cut = tiling.kind(i, j) is Tile.DIAGONAL
            serial += tile.serial + cut * masking
            overlapped += max(tile.tensor, tile.fp32 + cut * masking, tile.exp, tile.shared)
    causal, tiles = time.skipping(H100, tiling, d), tiling.T_r * tiling.T_c
    assert causal.serial == pytest.approx(tiles * tile.serial / serial)
    assert causal.overlapped == pytest.approx(tiles * tile.overlapped / overlapped)


def test_the_papers_1_7_to_1_8_is_six_to_nine_tiles_a_side():
    """2T / (T + 1) tends to 2; 1.7 to 1.8 is what T from 6 to 9 gives before anything else costs."""
    speedups = [float(1 / time.causal_ratio(T)) for T in range(1, 65)]
    assert [T for T, s in enumerate(speedups, start=1) if 1.7 <= s <= 1.8] == [6, 7, 8, 9]
    assert speedups[0] == 1 and speedups[-1] == pytest.approx(128 / 65)


# The whole forward ----------------------------------------------------------------------------------------------


def test_a_full_forward_is_its_longest_path():
    """16 heads of 4096 queries, 128 × 128: 512 equal blocks of 32 tiles, 4 waves on 132 SMs."""
    tiling = Tiling(4096, 4096, 128, 128)
    tile, ran = time.tile_clocks(H200, 128, 128, 128, W=8), time.forward_time(H200, tiling, 128, heads=16, W=8)
    assert ran.waves == 4 and ran.utilisation == pytest.approx(512 / 528)
    assert ran.seconds == tuple(4 * 32 * clocks / H200.clock_hz for clocks in (tile.overlapped, tile.serial))
    assert ran.tflops[0] == pytest.approx(16 * 4 * 4096**2 * 128 / ran.seconds[0] / 1e12)


def test_the_number_of_warps_decides_how_often_an_a100_reads_shared_memory():
    tiling = Tiling(1024, 1024, 128, 64)
    for W in (4, 8):
        tile, ran = time.tile_clocks(A100, 128, 64, 64, W=W), time.forward_time(A100, tiling, 64, heads=27, W=W)
        assert ran.seconds[1] == pytest.approx(2 * 16 * tile.serial / A100.clock_hz), "two waves of 16 tiles"
    assert time.tile_clocks(A100, 128, 64, 64, W=8).shared > time.tile_clocks(A100, 128, 64, 64, W=4).shared


def test_best_blocks_fit_with_the_stages_that_are_asked_for():
    for stages in (1, 2, 4):
        best = time.best_blocks(RTX_4090, 2048, 2048, 128, heads=8, stages=stages)
        fitting = budget.table(RTX_4090, 128, stages=stages)
        assert {((b.B_r, b.B_c), (b.W, b.fit)) for b in best} == {x for x in fitting.items() if x[1][1].ok}, stages


def test_a_causal_forward_launches_its_heaviest_blocks_first():
    tiling = Tiling(1024, 1024, 64, 64, CAUSAL)
    plain, heavy = (grid.schedule(grid.fa2_grid(40, tiling, order=order), A100.SMs) for order in grid.ORDERS)
    assert time.forward_time(A100, tiling, 64, heads=40).utilisation == heavy.utilisation > plain.utilisation


def test_measured_kernels_lie_between_serial_and_overlapped():
    """H200, bf16, d = 128, no mask, n = 16384, 16 heads: from plain Triton, 481 TFLOP/s, to warp-specialised, 655."""
    overlapped, serial = time.best_blocks(H200, 16384, 16384, 128, heads=16)[0].tflops
    assert serial < 481 < 655 < overlapped < 989.4


def test_best_blocks_are_sorted_and_fit():
    best = time.best_blocks(RTX_4090, 2048, 2048, 128, heads=64, mask=CAUSAL)
    assert {(b.B_r, b.B_c) for b in best} == {(64, 64), (128, 64)} and all(b.fit.ok for b in best)
    best_a100 = time.best_blocks(A100, 2048, 2048, 64, heads=8)
    serial, overlapped = ([b.seconds[n] for b in best_a100] for n in (1, 0))
    assert serial == sorted(serial) and overlapped != sorted(overlapped), "those in series decide"
    assert time.best_blocks(RTX_4090, 64, 64, 1024, heads=1) == []


def test_few_rows_want_small_blocks():
    """8 heads of 512 queries: with 128 rows a block only 32 of 132 SMs have work, with 64 twice as many."""
    assert time.best_blocks(H100, 512, 512, 128, heads=8)[0].B_r == 64
    assert time.best_blocks(H100, 4096, 4096, 128, heads=64)[0].B_r == 128


# Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: time.tile_clocks("A100", 64, 64, 64), TypeError, "chip: got 'A100'"),
        (lambda: time.tile_clocks(A100, 64, 64, 64, W=0), ValueError, "W: got 0"),
        (lambda: time.tile_clocks(A100, 0, 64, 64), ValueError, "b: got 0"),
        (lambda: time.tile_clocks(A100, 64, 64, 64, algorithm="fa3"), ValueError, "fa3"),
        (lambda: time.tile_clocks(A100, 64, 64, 64, scheme="split_d"), ValueError, "scheme: got 'split_d'"),
        (lambda: time.causal_ratio(0), ValueError, "T: got 0"),
        (lambda: time.skipping(A100, Tiling(8, 8, 4, 4, Mask(key_length=0)), 64), ValueError, "tiling: got one whose"),
        (lambda: time.best_blocks("H100", 64, 64, 64, 1), TypeError, "chip: got 'H100'"),
        (lambda: time.forward_time(A100, Tiling(8, 8, 4, 4), 64, heads=0), ValueError, "heads: got 0"),
        (lambda: time.skipping(A100, 8, 64), TypeError, "tiling: got int"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
