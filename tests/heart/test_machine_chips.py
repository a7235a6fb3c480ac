"""machine/chips.py: every figure has a source, and figures that say the same in two ways agree."""

import pytest

from fa2_lab.machine import chips
from fa2_lab.machine.chips import A100, CHIPS, H100, H200, L40S, RTX_3090, RTX_4090, KiB

each = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)


@each
def test_every_figure_has_a_source(chip):
    assert set(chip.sources) == set(chips.figures(chip))
    assert all(len(source.split()) > 3 for source in chip.sources.values())


@each
def test_rates_per_clock_times_clock_are_the_datasheets_rates(chip):
    """Within 2%: the L40S sheet's two tensor figures differ by 1.2%; from Hopper on FP32 has a higher clock."""
    assert chip.SMs * chip.clock_hz * chip.tensor_per_clock == pytest.approx(chip.tensor_flops, rel=0.02)
    fp32_clock = 1980e6 if chip.compute_capability in ((9, 0), (10, 0)) else chip.clock_hz
    assert chip.SMs * fp32_clock * 2 * chip.fp32_per_clock == pytest.approx(chip.fp32_flops, rel=0.005)


@each
def test_limits_of_an_sm_hang_together(chip):
    assert chip.warps_per_sm * 32 == chip.threads_per_sm
    assert chip.shared_per_sm - chip.shared_per_block == KiB  # the KiB that the system keeps of each block
    assert chip.registers_per_sm == 65536 and chip.shared_per_clock == 32 * 4


def test_what_an_exponential_costs():
    """16 is the price of an FP32 FLOP; an exponential costs 128 matmul FLOPs on A100 and 256 on H100."""
    assert A100.flops_per_fp32 == H100.flops_per_fp32 == 16
    assert (A100.flops_per_exp, H100.flops_per_exp) == (128, 256)
    assert RTX_3090.flops_per_exp == RTX_4090.flops_per_exp == 32  # their tensor cores are the slow part
    assert L40S.tensor_per_clock == 2 * RTX_4090.tensor_per_clock  # a professional card of the same die


def test_h200_is_an_h100_with_other_memory():
    differ = {f for f in chips.figures(H100) if getattr(H100, f) != getattr(H200, f)}
    assert differ == {"name", "hbm_bytes", "hbm_per_second", "l2_bytes"}


def test_names():
    assert chips.named("H200") is H200 and chips.named("NVIDIA A100-SXM4-80GB") is A100
