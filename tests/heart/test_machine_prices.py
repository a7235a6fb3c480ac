"""machine/prices.py: one currency; it says what counters saw, and what other files say of the same thing."""

import pytest

from fa2_lab.machine import chips, io, prices, splits, time
from fa2_lab.machine.chips import A100, H200
from fa2_lab.plots import deferred_normalisation, roofline
from fa2_lab.records import load
from fa2_lab.tiles import Tiling

RUNGS = {"standard": "r00_standard", "FA1": "r01_fa1", "FA2": "r07_skipping"}


@pytest.mark.parametrize("method", RUNGS)
def test_what_crosses_to_dram_is_what_hardware_counters_saw(method):
    counted = roofline.counted(load("ladder"), 128)[RUNGS[method]]
    assert prices.cost(method, N=4096, d=128, heads=64).crossed == pytest.approx(counted, rel=0.05)


def test_intensities_that_the_chapters_name():
    assert round(prices.cost("standard").intensity("requested")) == 42  # 01
    assert [round(prices.cost("FA2", B_r=B, B_c=B).intensity("requested")) for B in (64, 128)] == [63, 124]  # 04
    assert prices.cost("FA2").intensity("crossed") == pytest.approx(2048, rel=0.01)
    one, eight = (prices.cost("decode", N_q=rows).intensity("crossed") for rows in (1, 8))
    assert (round(one, 1), round(eight)) == (1.0, 8)  # 14: a row does one FLOP for each byte


def test_a_multiply_add_is_two_flops_and_one_instruction_everywhere():
    B, d, seen = 64, 128, prices.cost("FA2", N=64, heads=1)
    assert seen.flops == 2 * (B * B * d) + 2 * (B * B * d)
    assert seen.instructions == time.fp32_instructions("fa2", B, B, d)
    price = prices.prices(A100).in_flops()
    assert price["fp32"] == pytest.approx(2 * A100.flops_per_fp32, rel=0.01)  # an instruction: a multiply-add
    for chip in chips.CHIPS.values():
        price = prices.prices(chip).in_flops()
        assert price["dram"] == chip.flops_per_byte
        assert price["exp"] == pytest.approx(chip.flops_per_exp, rel=0.02)
    clocks = time.tile_clocks(H200, B, B, d)
    one_sm = {unit: seconds * H200.clock_hz for unit, seconds in seen.seconds(H200).items()}
    assert one_sm["FP32 units"] == pytest.approx(clocks.fp32)
    assert one_sm["tensor cores"] == pytest.approx(clocks.tensor, rel=0.01)


def test_what_chapters_say_of_the_same_thing_is_the_same():
    """00 and the card: prices; 04: the picture of tweak 1; 10: the ladder's FLOPs; 14: a row of decode."""
    price = prices.prices(chips.A100).in_flops()
    assert deferred_normalisation.data()["price"] == pytest.approx(price["fp32"], rel=0.01)
    assert roofline.training_row(load("ladder"), 128).flops == prices.cost("FA2", heads=64).flops
    cache = splits.Cache((8192,), kv_heads=1, d=128, rows=4)
    decode = prices.cost("decode", N=8192, N_q=4, heads=1)
    assert decode.intensity("requested") == pytest.approx(float(cache.flops_per_byte), rel=0.01)


def test_the_slowest_unit_is_the_limit_and_idle_sms_count():
    assert prices.cost("standard").limit(H200)[0] == "DRAM"
    assert prices.cost("FA2", B_r=128, B_c=128).limit(H200)[0] == "tensor cores"
    few, many = (prices.cost("FA1", heads=heads).seconds(H200)["tensor cores"] / heads for heads in (16, 132))
    assert few == pytest.approx(many * 132 / 16)


def test_bytes_are_elements_times_their_width():
    tiling = Tiling(64, 64, 16, 16)
    moved = io.traffic("fa1", "forward", tiling, 8)
    wide = ("O", "l", "m")
    assert io.in_bytes("fa1", moved).loaded == sum(n * (4 if t in wide else 2) for t, n in moved.loads.items())
    assert io.at_most(1, moved, io.sizes(tiling, 8)).loads == {t: io.sizes(tiling, 8)[t] for t in moved.loads}


def test_refusals():
    with pytest.raises(ValueError, match="method: got 'FA3'; it takes one of standard, FA1, FA2"):
        prices.cost("FA3")
