"""machine/budget.py: sums by hand, and the model against what the compiler made of this package's kernels."""

from dataclasses import replace

import pytest

from fa2_lab.machine import budget
from fa2_lab.machine.chips import A100, H100, L40S, RTX_4090, KiB

# Recorded: the package's Triton kernels compiled by triton 3.8.0 for sm_80 and sm_90, fp16, no mask, num_stages 2 or 3.
TILE_SIZES = [(64, 64), (64, 128), (128, 64), (128, 128)]  # B_r, B_c
SPILL_STORES = {  # spill stores (STL) for each size with 4 and then with 8 warps, in the better of the two num_stages
    ("forward", 80, 64): (0, 0, 0, 0, 0, 0, 114, 0),
    ("forward", 80, 128): (0, 0, 6, 0, 83, 0, 5749, 28),
    ("forward", 90, 64): (0, 0, 0, 0, 0, 0, 18, 0),
    ("forward", 90, 128): (0, 0, 0, 0, 15, 0, 317, 0),
    ("dkdv", 80, 64): (1, 0, 197, 0, 3011, 50, 5685, 65),
    ("dkdv", 80, 128): (13, 0, 6232, 33, 333, 6, 11929, 5524),
    ("dkdv", 90, 64): (0, 0, 199, 0, 147, 42, 554, 114),
    ("dkdv", 90, 128): (56, 0, 624, 4, 191, 101, 1802, 363),
    ("dq", 80, 64): (0, 0, 37, 37, 38, 0, 4066, 40),
    ("dq", 80, 128): (1, 0, 61, 0, 272, 14, 8361, 130),
    ("dq", 90, 64): (0, 0, 0, 0, 2, 0, 310, 0),
    ("dq", 90, 128): (0, 0, 53, 0, 86, 0, 642, 12),
}
SHARED_BYTES = {  # bytes for each size, num_stages 2, 8 warps
    ("forward", 80, 64): (24576, 40960, 32768, 49152),
    ("forward", 80, 128): (57344, 98304, 65536, 98304),
    ("forward", 90, 64): (40960, 73728, 49152, 81920),
    ("forward", 90, 128): (81920, 147456, 98304, 163840),
    ("dkdv", 80, 64): (33280, 49664, 50176, 66560),
    ("dkdv", 80, 128): (74240, 98816, 115712, 132096),
    ("dkdv", 90, 64): (50176, 66048, 82944, 99328),
    ("dkdv", 90, 128): (99328, 131584, 164864, 197632),
    ("dq", 80, 64): (32768, 49152, 49152, 65536),
    ("dq", 80, 128): (73728, 114688, 98304, 131072),
    ("dq", 90, 64): (49152, 81920, 65536, 98304),
    ("dq", 90, 128): (98304, 163840, 131072, 196608),
}
CHIP_OF_SM = {80: A100, 90: H100}


def test_shared_memory_model_agrees_with_compiled_kernels():
    for (kernel, sm, d), compiled in SHARED_BYTES.items():
        stages = 2 if sm == 90 else 1  # of num_stages = 2, Triton holds so many
        for (B_r, B_c), bytes_ in zip(TILE_SIZES, compiled, strict=True):
            assert budget.shared_bytes(kernel, B_r, B_c, d, stages) == pytest.approx(bytes_, rel=0.20)
            if sm == 90 and kernel != "dkdv":
                assert budget.shared_bytes(kernel, B_r, B_c, d, stages) == bytes_


def test_spill_model_agrees_with_compiled_kernels():
    agreeing, missed = 0, []
    for (kernel, sm, d), stores in SPILL_STORES.items():
        for n, spilled in enumerate(stores):
            (B_r, B_c), warps = TILE_SIZES[n // 2], (4, 8)[n % 2]
            predicted = budget.registers(kernel, B_r, B_c, d, warps) > CHIP_OF_SM[sm].registers_per_thread
            agreeing += predicted == (spilled >= 16)
            missed += [] if predicted else [spilled]
    assert agreeing == 84 and max(missed) <= 101


# By hand --------------------------------------------------------------------------------------------------------


def test_budget_of_the_papers_tiles_equals_hand_computed_bytes():
    """128 × 64, d = 128, one stage: Q 32 KiB, K and V 16 KiB each. Two stages: 96 KiB, inside a small chip's 99."""
    assert budget.forward_shared_bytes(128, 64, 128, stages=1) == 64 * KiB
    assert budget.forward_shared_bytes(128, 64, 128, stages=2) == 96 * KiB


def test_tiles_fit_the_expected_gpus():
    """d = 128 and two stages: 128 × 128 takes 160 KiB, which A100 and H100 give one block, and small chips do not."""
    all_sizes = set(TILE_SIZES)
    small = {(64, 64), (128, 64)}
    cases = (H100, 128, all_sizes), (A100, 128, all_sizes), (RTX_4090, 128, small), (L40S, 64, all_sizes)
    for chip, d, fitting in cases:
        assert {size for size, (_, fit) in budget.best_fits(chip, d).items() if fit.ok} == fitting
    assert budget.best_fits(RTX_4090, 128)[128, 128][0] == 8  # where neither 4 warps nor 8 fit


def test_fits_names_the_exhausted_resource():
    fit = budget.fit(RTX_4090, 128, 128, 128, stages=2, warps=8)
    assert (fit.ok, fit.limit, fit.blocks_per_sm) == (False, "shared memory", 0)
    fit = budget.fit(A100, 128, 128, 128, stages=1, warps=4)
    assert (fit.ok, fit.limit, fit.registers) == (False, "registers", 40 + 320)
    fit, columns = budget.fit(H100, 64, 128, 64, 1, 8, itemsize=4, kernel="dkdv"), ("dkdv", 64, 128, 64)
    assert fit.shared_bytes == budget.shared_bytes(*columns, stages=1, itemsize=4)
    assert fit.registers == budget.registers(*columns, warps=8, itemsize=4)


def test_fits_is_exact_to_one_byte_of_shared_memory():
    exactly = replace(A100, shared_per_block=96 * KiB)
    assert budget.fit(exactly, 128, 64, 128, stages=2, warps=8).ok
    assert not budget.fit(replace(exactly, shared_per_block=96 * KiB - 1), 128, 64, 128, stages=2, warps=8).ok


def test_register_limit_shrinks_with_warps():
    assert [budget.register_limit(A100, warps) for warps in (1, 4, 8, 12, 16, 32)] == [255, 255, 255, 168, 128, 64]
    fit = budget.fit(H100, 256, 128, 128, stages=1, warps=16)  # it runs, but spills
    assert (fit.limit, fit.blocks_per_sm) == ("registers", 1)


def test_blocks_per_sm_equals_hand_computed_values():
    assert budget.blocks_per_sm(A100, 40 * KiB, 128, 4) == 4  # 164 / 41 of shared memory, 65536 / (128 · 128) registers
    assert budget.blocks_per_sm(A100, 41 * KiB, 128, 4) == 3  # each block costs one KiB more
    assert budget.blocks_per_sm(A100, 0, 72, 4) == 7
    assert budget.blocks_per_sm(A100, 0, 73, 4) == 6  # 73 registers are given out as 80
    assert budget.blocks_per_sm(RTX_4090, 0, 16, 8) == 6  # 48 warps
    assert budget.blocks_per_sm(A100, 0, 8, 1) == 32
