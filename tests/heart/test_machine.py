"""machine/: chips.py, time_model.py and rates.py, by hand, by what counters saw, and by what says the same."""

from dataclasses import astuple, fields

import numpy as np
import pytest

from fa2_lab.machine import budget, chips, grid, io_model, rates, ring, splits, time_model, warps
from fa2_lab.machine.chips import A100, B200, CHIPS, H100, H200, L40S, RTX_3090, RTX_4090, KiB
from fa2_lab.plots import roofline
from fa2_lab.records import load
from fa2_lab.tiles import Tiling

# Chips ----------------------------------------------------------------------------------------------------------

for_each_chip = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
# KiB of L1 and shared memory in an SM; the memory's pins and Gbit/s of each; links times GB/s of each, one way
DATACENTER = [(192, 5120, 3.186, 12 * 25), (256, 5120, 5.234, 18 * 25)]
DATACENTER += [(256, 6144, 6.25, 18 * 25), (256, 7680, 7.992, 18 * 50)]
WORKSTATION = [(128, 384, 19.5, 4 * 14.0625), (128, 384, 21, 16 * 2), (128, 384, 18, 16 * 2)]
MEMORY_OF = dict(zip(CHIPS, DATACENTER + WORKSTATION, strict=True))


@for_each_chip
def test_chip_rates_equal_the_datasheets(chip):
    """Within 2%: the L40S sheet's two tensor figures differ by 1.2%; from Hopper on FP32 has a higher clock."""
    tensor = chip.SMs * chip.clock_hz * chip.tensor_flops_per_clock
    assert tensor == pytest.approx(chip.tensor_flops_per_second, rel=0.02)
    fp32_clock = 1980e6 if chip.compute_capability in ((9, 0), (10, 0)) else chip.clock_hz
    assert chip.SMs * fp32_clock * 2 * chip.fp32_per_clock == pytest.approx(chip.fp32_flops_per_second, rel=0.005)


@for_each_chip
def test_sm_limits_are_consistent(chip):
    assert chip.warps_per_sm * 32 == chip.threads_per_sm
    assert chip.shared_per_sm - chip.shared_per_block == KiB  # the KiB that the system keeps of each block
    assert chip.registers_per_sm == 65536 and chip.shared_bytes_per_clock == 32 * 4
    L1, pins, rate, link = MEMORY_OF[chip.name]
    assert chip.shared_per_sm == (L1 - 28) * KiB and chip.link_bytes_per_second == link * 1e9
    assert chip.hbm_bytes_per_second == pytest.approx(pins * rate / 8 * 1e9, rel=0.001)


def test_matmul_flops_per_exponential():
    """16 is the price of an FP32 FLOP; an exponential costs 128 matmul FLOPs on A100 and 256 on H100."""
    fp32 = {chip: chip.tensor_flops_per_clock / (2 * chip.fp32_per_clock) for chip in CHIPS.values()}
    exp = {chip: chip.tensor_flops_per_clock / chip.exp_per_clock for chip in CHIPS.values()}
    assert fp32[A100] == fp32[H100] == 16 and (exp[A100], exp[H100]) == (128, 256)
    assert exp[RTX_3090] == exp[RTX_4090] == 32  # their tensor cores are the slow part
    assert L40S.tensor_flops_per_clock == 2 * RTX_4090.tensor_flops_per_clock  # a professional card of the same die


def test_h200_is_an_h100_with_other_memory():
    differ = {f.name for f in fields(chips.Chip) if getattr(H100, f.name) != getattr(H200, f.name)}
    assert differ == {"name", "hbm_bytes", "hbm_bytes_per_second", "l2_bytes"}


def test_chips_are_found_by_name_and_have_plausible_bandwidth():
    assert chips.find("H200") is H200 and chips.find("NVIDIA A100-SXM4-80GB") is A100
    for record in map(load, ("paper", "h100")):
        copied = record.ceilings["copy TB/s"] * 1e12
        assert 0.88 < copied / chips.find(record.machine["gpu"]).hbm_bytes_per_second < 0.95


# Time -----------------------------------------------------------------------------------------------------------


def test_time_of_a_tile_on_a100_equals_hand_computed_clocks():
    """128 × 64, d = 128, 4 warps: matmul 4·128·64·128 / 2048, exp (128·64 + 128) / 16, and so on."""
    tile = time_model.tile_clocks(A100, 128, 64, 128)
    assert tile.tensor == 4 * 128 * 64 * 128 / 2048 == 2048
    assert tile.exp == (128 * 64 + 128) / 16 == 520
    # scale and shift, max, sum; α o; α l and m − m
    assert tile.fp32 == (3 * 128 * 64 + 128 * 128 + 2 * 128) / 64 == 644
    assert tile.shared == 2 * (2 * 64 * 128 + 4 * 2 * 64 * 128 + 128 * 128) / 128 == 1536
    assert (tile.overlapped, tile.serial) == (2048, 4748)


def test_time_of_a_tile_on_h100_equals_hand_computed_clocks():
    """Tensor cores twice as fast, exp no faster. Two slabs of 64 rows read K and V twice, not four times."""
    tile = time_model.tile_clocks(H100, 128, 64, 128)
    assert (tile.tensor, tile.exp, tile.fp32) == (1024, 520, 322)
    assert tile.shared == 2 * (2 * 64 * 128 + 2 * 2 * 64 * 128 + 128 * 128) / 128 == 1024
    once = 2 * (2 * 64 * 128 + 2 * 64 * 128 + 128 * 128) / 128
    assert time_model.tile_clocks(B200, 128, 64, 128).shared == once


@for_each_chip
def test_fa2_saves_the_expected_clocks_over_fa1(chip):
    fa1, fa2 = (time_model.tile_clocks(chip, 128, 64, 128, algorithm=name) for name in ("fa1", "fa2"))
    assert 1.01 < fa1.serial / fa2.serial < 1.07 and fa1.overlapped >= fa2.overlapped
    saved_fp32 = (fa1.fp32 - fa2.fp32) * chip.fp32_per_clock
    assert saved_fp32 == 128 * 128 + 6 * 128  # one scaling of o, and six operations on each row
    assert fa1.tensor == fa2.tensor and fa1.shared == fa2.shared
    keys, queries = (time_model.tile_clocks(chip, 128, 64, 128, scheme=name) for name in ("split_k", "split_q"))
    assert keys.serial > 1.3 * queries.serial and keys.shared > 2 * queries.shared and keys.exp == queries.exp
    assert keys.fp32 - queries.fp32 == 3 * 128 * 128 / chip.fp32_per_clock  # four parts of o are added


# Rates ----------------------------------------------------------------------------------------------------------


RUNG_OF_METHOD = {"standard": "r00_standard", "FA1": "r01_fa1", "FA2": "r07_skipping"}


@pytest.mark.parametrize("method", RUNG_OF_METHOD)
def test_dram_traffic_model_agrees_with_hardware_counters(method):
    counted = roofline.dram_bytes(load("ladder"), 128)[RUNG_OF_METHOD[method]]
    assert rates.cost(method, N=4096, d=128, heads=64).dram_bytes == pytest.approx(counted, rel=0.05)


def test_arithmetic_intensity_equals_the_chapters_numbers():
    standard = rates.cost("standard")
    assert [round(standard.intensity(place)) for place in ("dram_bytes", "requested_bytes")] == [42, 28]  # 01, 04
    assert [round(rates.cost("FA2", B_r=B, B_c=B).intensity("requested_bytes")) for B in (64, 128)] == [63, 124]  # 04
    assert rates.cost("FA2").intensity("dram_bytes") == pytest.approx(2048, rel=0.01)
    one, eight = (rates.cost("decode", N_q=rows).intensity("dram_bytes") for rows in (1, 8))
    assert (round(one, 1), round(eight)) == (1.0, 8)  # 14: a row does one FLOP for each byte


def test_fma_counts_as_two_flops_and_one_instruction():
    B, d, seen = 64, 128, rates.cost("FA2", N=64, heads=1)
    assert seen.flops == 2 * (B * B * d) + 2 * (B * B * d)
    assert seen.instructions == time_model.fp32_instructions("fa2", B, B, d)
    price = rates.rates(A100).in_flops()
    assert price["fp32"] == pytest.approx(32, rel=0.01)  # an instruction: a multiply-add
    for chip in chips.CHIPS.values():
        price = rates.rates(chip).in_flops()
        assert price["dram"] == chip.tensor_flops_per_second / chip.hbm_bytes_per_second
        assert price["exp"] == pytest.approx(chip.tensor_flops_per_clock / chip.exp_per_clock, rel=0.02)
    assert rates.measured_rates(A100) == {} and rates.rates(A100).l2 == 5120 * A100.clock_hz  # measured on others
    assert time_model.fp32_instructions("fa2", B, 2 * B, d, "backward") == 3 * B * 2 * B + B * d + 2 * B * d
    assert rates.cost("FA2 backward", N=256, B_r=64, B_c=128, heads=1).workers == 2  # its column blocks
    assert rates.cost("decode", N_q=1, heads=1).workers >= H200.SMs  # its keys are split
    assert rates.cost("FA2", N=256, heads=1, causal=True).flops == 10 * seen.flops  # tiles of 16
    for N in (65536, 2**18):  # L2 has room for one head, not for all; for none
        many, one = (rates.cost("FA2", N=N, heads=heads) for heads in (64, 1))
        assert astuple(many) == tuple(64 * n for n in astuple(one))
    clocks = time_model.tile_clocks(H200, B, B, d)
    one_sm = {unit: seconds * H200.clock_hz for unit, seconds in seen.seconds(H200).items()}
    assert one_sm["FP32 units"] == pytest.approx(clocks.fp32)
    assert one_sm["tensor cores"] == pytest.approx(clocks.tensor, rel=0.01)


def test_slowest_unit_is_the_limit_and_idle_sms_count():
    assert rates.cost("standard").limit(H200)[0] == "DRAM"
    assert rates.cost("FA2", B_r=128, B_c=128).limit(H200)[0] == "tensor cores"
    few, many = (rates.cost("FA1", heads=heads).seconds(H200)["tensor cores"] / heads for heads in (16, 132))
    assert few == pytest.approx(many * 132 / 16)


def test_traffic_bytes_equal_elements_times_width():
    tiling = Tiling(64, 64, 16, 16)
    moved = io_model.traffic("fa1", "forward", tiling, 8)
    sums, passed_on = ("L", "D", "dQ"), ("S", "dP", "dQ")
    cases = [("fa1", "forward", ("O", "l", "m")), ("fa2", "backward", sums)]
    cases += [("standard", "forward", passed_on), ("standard", "backward", passed_on)]
    for algorithm, direction, wide in cases:
        form = io_model.traffic(algorithm, direction, tiling, 8)
        bytes_of = form.map_counts(lambda tensor, n, wide=wide: n * (4 if tensor in wide else 2))
        assert io_model.in_bytes(algorithm, form) == bytes_of
    sizes = io_model.tensor_sizes(tiling, 8)
    assert io_model.limit_passes(moved, 1, sizes).loads == {t: sizes[t] for t in moved.loads}


# What all of them refuse: one argument at a time is wrong, and the error names it --------------------------------

TILING, MATRIX = Tiling(8, 8, 4, 4), np.ones((8, 4))
QKV = dict(Q=MATRIX, K=MATRIX, V=MATRIX)
TILE_SIZES = dict(B_r=64, B_c=64, d=64)
BAD_WARP_ARGUMENTS = dict(W=[0, 2.0], i=[2], tiling=[Tiling(8, 9, 4, 4), 4], Q=[np.zeros(8)], tau=[-1.0])

MODEL_CALLS = [  # a call, good arguments, and wrong ones for each
    (budget.fit, dict(chip=H100, **TILE_SIZES, stages=2, warps=4, itemsize=2, kernel="forward"),
     dict(chip=["H100"], B_r=[0], B_c=[64.0], d=[-1], stages=[0], warps=[33], itemsize=[0], kernel=["sideways"])),
    (grid.waves, dict(blocks=4, slots=4), dict(blocks=[0], slots=[1.5])),
    (grid.schedule, dict(blocks=[grid.BlockWork(0, None, 1)], SMs=1, blocks_per_sm=1),
     dict(blocks=[[]], SMs=[0], blocks_per_sm=[0])),
    (grid.fa1_grid, dict(heads=1, tiling=TILING), dict(heads=[0], tiling=[(8, 8)])),
    (grid.fa2_grid, dict(heads=1, tiling=TILING), dict(tiling=[(8, 8)], direction=["sideways"], order=["random"])),
    (io_model.tile_operations, dict(algorithm="fa2", direction="forward", b=4, c=4, d=4), dict(b=[0], d=[2.0])),
    *[(io_model.traffic, dict(algorithm=algorithm, direction=direction, tiling=TILING, d=4),
       dict(tiling=[(8, 8)], d=[0, 2.0])) for algorithm, direction in io_model.TRAFFIC_FORMULAS],
    (time_model.tile_clocks, dict(chip=A100, **TILE_SIZES), dict(chip=["A100"], W=[0], scheme=["split_d"])),
    (warps.tile_accesses, dict(scheme="split_q", b=8, c=8, d=4, W=4), dict(scheme=["split_d"])),
    *[(scheme, dict(**QKV, tiling=TILING, i=1, W=2), BAD_WARP_ARGUMENTS) for scheme in warps.SCHEMES.values()],
    (splits.Shares, dict(tiles=(1,), programs=1, min_share=1), dict(tiles=[(), (1, -1)], programs=[0], min_share=[0])),
    (splits.same_splits, dict(tiles=(4,), splits=1), dict(splits=[0])),
    (splits.read_seconds, dict(tiles=(5,), tile_bytes=64, programs=1, slots=1, lone_rate=1.0, bandwidth=1.0),
     dict(lone_rate=[0.0])),
    (ring.bytes_sent, dict(lengths=[8, 8], rank=0, direction="forward", kv_heads=2, d=16),
     dict(direction=["sideways"])),
    (chips.find, dict(name="H200"), dict(name=["V100", 90])),
    (rates.cost, dict(method="FA2"), dict(method=["FA3"])),
]  # fmt: skip


@pytest.mark.parametrize("call, valid, bad_values", MODEL_CALLS, ids=[call.__name__ for call, *_ in MODEL_CALLS])
def test_machine_models_reject_bad_input_by_name(call, valid, bad_values):
    call(**valid)
    for name, bad in ((name, bad) for name, values in bad_values.items() for bad in values):
        says = f"^{name}: got .*; it takes "
        with pytest.raises((TypeError, ValueError), match=says):
            call(**valid | {name: bad})


def test_io_model_rejects_an_unknown_algorithm():
    for call in (io_model.traffic, io_model.operations):
        with pytest.raises(ValueError, match=r"'fa3', 'forward'; it takes algorithm one of .*fa1, fa2 and direction"):
            call("fa3", "forward", TILING, 4)
    with pytest.raises(ValueError, match="fa3"):
        time_model.tile_clocks(A100, 64, 64, 64, algorithm="fa3")
