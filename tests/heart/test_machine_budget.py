"""machine/budget.py: sums by hand, and which limit of a chip is short."""

from fa2_lab.machine import budget
from fa2_lab.machine.budget import fits
from fa2_lab.machine.chips import A100, H100, L40S, RTX_4090, KiB

SIZES = [(64, 64), (64, 128), (128, 64), (128, 128)]  # B_r, B_c


def test_the_sizes_of_the_fa2_paper_by_hand():
    """128 × 64, d = 128, one stage: Q 32 KiB, K and V 16 KiB each. Two stages: 96 KiB, inside a small chip's 99."""
    assert budget.forward_shared_bytes(128, 64, 128, stages=1) == 64 * KiB
    assert budget.forward_shared_bytes(128, 64, 128, stages=2) == 96 * KiB
    assert budget.forward_registers(128, 64, 128, warps=4) == 40 + (128 * 128 + 128 * 64 + 128 * 64 // 2) // 128
    assert budget.shared_bytes("columns", 64, 128, 64, 1) == (2 * 128 * 64 + 2 * 64 * 64) * 2 + 2 * 64 * 4
    assert budget.shared_bytes("columns", 64, 128, 64, 3) == (2 * 128 * 64 + 3 * 2 * 64 * 64) * 2 + 3 * 2 * 64 * 4
    dS = budget.shared_bytes("backward", 64, 128, 64, 1) - budget.shared_bytes("columns", 64, 128, 64, 1)
    assert dS == 64 * 128 * 2
    assert budget.shared_bytes("rows", 128, 64, 128, 2) == budget.forward_shared_bytes(128, 64, 128, 2) + 32 * KiB
    assert budget.registers("columns", 64, 128, 64, 8) == 40 + (2 * 128 * 64 + 2 * 64 * 128 + 64 * 128 // 2) // 256
    assert budget.registers("rows", 64, 128, 64, 8) == 40 + (64 * 64 + 2 * 64 * 128 + 64 * 128 // 2) // 256
    assert budget.registers("rows", 64, 128, 64, 8, itemsize=4) == 40 + (64 * 64 + 2 * 64 * 128 + 64 * 128) // 256
    assert budget.registers("backward", 64, 32, 256, 8) == 40 + (2 * 32 * 256 + 64 * 256 + 64 * 32 // 2) // 256
    assert budget.registers("backward", 64, 128, 64, 8) == budget.registers("columns", 64, 128, 64, 8)


def test_which_sizes_fit_where():
    """d = 128 and two stages: 128 × 128 takes 160 KiB, which A100 and H100 give one block, and small chips do not."""
    everything = set(SIZES)
    for chip, d, fitting in (
        (H100, 128, everything),
        (A100, 128, everything),
        (RTX_4090, 128, {(64, 64), (128, 64)}),
        (L40S, 64, everything),
    ):
        assert {size for size, (_, fit) in budget.table(chip, d).items() if fit.ok} == fitting
    assert budget.table(RTX_4090, 128)[128, 128][0] == 8  # where neither 4 warps nor 8 fit


def test_the_limit_names_what_is_short():
    fit = fits(RTX_4090, 128, 128, 128, stages=2, warps=8)
    assert (fit.ok, fit.limit, fit.blocks_per_sm) == (False, "shared memory", 0)
    fit = fits(A100, 128, 128, 128, stages=1, warps=4)
    assert (fit.ok, fit.limit, fit.registers) == (False, "registers", 40 + 320)
    fit, columns = fits(H100, 64, 128, 64, 1, 8, itemsize=4, kernel="columns"), ("columns", 64, 128, 64)
    assert fit.shared_bytes == budget.shared_bytes(*columns, stages=1, itemsize=4)
    assert fit.registers == budget.registers(*columns, warps=8, itemsize=4)


def test_many_warps_have_few_registers_each():
    assert [budget.register_limit(A100, warps) for warps in (1, 4, 8, 12, 16, 32)] == [255, 255, 255, 168, 128, 64]
    fit = fits(H100, 256, 128, 128, stages=1, warps=16)  # it runs, but spills
    assert (fit.limit, fit.blocks_per_sm) == ("registers", 1)


def test_blocks_per_sm_by_hand():
    assert budget.blocks_per_sm(A100, 40 * KiB, 128, 4) == 4  # 164 / 41 of shared memory, 65536 / (128 · 128) registers
    assert budget.blocks_per_sm(A100, 41 * KiB, 128, 4) == 3  # each block costs one KiB more
    assert budget.blocks_per_sm(A100, 0, 72, 4) == 7
    assert budget.blocks_per_sm(A100, 0, 73, 4) == 6  # 73 registers are given out as 80
    assert budget.blocks_per_sm(RTX_4090, 0, 16, 8) == 6  # 48 warps
    assert budget.blocks_per_sm(A100, 0, 8, 1) == 32
