"""machine/chips.py: every figure has a source, and figures that say the same in two ways agree."""

import builtins
import dataclasses
import sys
from types import SimpleNamespace

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


def test_what_one_block_can_ask_for():
    most = {chip.name: chip.shared_per_block // KiB for chip in CHIPS.values()}
    assert most == {
        "A100 SXM 80GB": 163,
        "H100 SXM": 227,
        "H200": 227,
        "B200": 227,
        "GeForce RTX 3090": 99,
        "GeForce RTX 4090": 99,
        "L40S": 99,
    }


def test_what_an_exponential_costs():
    """16 is the price of an FP32 FLOP; an exponential costs 128 matmul FLOPs on A100 and 256 on H100."""
    assert A100.flops_per_fp32 == H100.flops_per_fp32 == 16
    assert (A100.flops_per_exp, H100.flops_per_exp) == (128, 256)
    assert H100.exp_per_second == pytest.approx(3.9e12, rel=0.01)
    assert RTX_3090.flops_per_exp == RTX_4090.flops_per_exp == 32  # their tensor cores are the slow part
    assert L40S.tensor_per_clock == 2 * RTX_4090.tensor_per_clock  # a professional card of the same die


def test_h200_is_an_h100_with_other_memory():
    differ = {f for f in chips.figures(H100) if getattr(H100, f) != getattr(H200, f)}
    assert differ == {"name", "hbm_bytes", "hbm_per_second", "l2_bytes"}


def test_chips_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        A100.SMs = 1


# The GPU that is here -------------------------------------------------------------------------------------------

DRIVER = dict(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=130,
    total_memory=150109880320,
    L2_cache_size=62914560,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
    clock_rate=1980000,
    memory_bus_width=6016,
    memory_clock_rate=3201000,
)


def test_a_known_gpu_keeps_its_rates_and_takes_the_drivers_sizes():
    chip = chips.from_properties(SimpleNamespace(**DRIVER))
    assert (chip.name, chip.SMs, chip.hbm_bytes) == ("H200", 130, 150109880320)
    assert (chip.tensor_flops, chip.clock_hz) == (H200.tensor_flops, H200.clock_hz)
    assert "driver" in chip.sources["SMs"] and "datasheet" in chip.sources["tensor_flops"]
    assert set(chip.sources) == set(chips.figures(chip))


def test_an_old_torch_that_reports_less_is_enough():
    few = {key: DRIVER[key] for key in ("name", "major", "minor", "multi_processor_count", "total_memory")}
    assert chips.from_properties(SimpleNamespace(**few)).shared_per_block == 227 * KiB


def test_an_unknown_gpu_is_estimated_from_a_relative_and_says_so():
    other = DRIVER | dict(name="NVIDIA H100 PCIe", multi_processor_count=114, clock_rate=1755000)
    chip = chips.from_properties(SimpleNamespace(**other))
    assert chip.tensor_flops == 114 * 1755e6 * 4096 and chip.name == "NVIDIA H100 PCIe"
    assert chip.hbm_per_second == pytest.approx(4.8e12, rel=0.01)  # the bus of the H200 above
    assert chip.sources["tensor_flops"] == "estimated: per SM and clock as H100 SXM"
    small = chips.from_properties(SimpleNamespace(**DRIVER | dict(name="A card", major=8, minor=9)))
    assert small.tensor_per_clock == RTX_4090.tensor_per_clock


def test_a_gpu_older_than_the_table_is_refused():
    with pytest.raises(ValueError, match=r"Old card: compute capability \(7, 5\)"):
        chips.from_properties(SimpleNamespace(**DRIVER | dict(name="Old card", major=7, minor=5)))


def test_without_a_gpu_or_torch_a_sentence_says_so(monkeypatch):
    no_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", no_gpu)
    with pytest.raises(RuntimeError, match="no CUDA GPU on this machine"):
        chips.running()
    monkeypatch.delitem(sys.modules, "torch")
    real_import = builtins.__import__

    def without_torch(name, *rest):
        if name == "torch":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(RuntimeError, match="torch is not installed"):
        chips.running()


def test_running_reads_the_current_device(monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 3,
        get_device_properties=lambda n: SimpleNamespace(**DRIVER, n=n),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert chips.running().SMs == 130


def test_names():
    assert chips.named("H200") is H200 and chips.named("NVIDIA A100-SXM4-80GB") is A100
    with pytest.raises(ValueError, match="name: got 'V100'; it takes one of A100"):
        chips.named("V100")
    with pytest.raises(TypeError, match="name: got 90"):
        chips.named(90)
