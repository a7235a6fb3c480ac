"""The kernels, compiled for seven GPUs without having one: they fit, spill nothing, use tensor cores."""

import pytest
from case_selection import compiled_by

from fa2_lab.machine.chips import KiB

pytest.importorskip("triton")

BLOCK_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
SM_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100, "gfx942": 64}


@compiled_by("portable", *BLOCK_KIB)
@pytest.mark.parametrize("target", BLOCK_KIB)
def test_default_tiles_compile_without_spills_for_each_gpu(worker_rows, target, jobs):
    """Every entry of the tables fits and spills nothing, d = 40 or 72 is read in sixteen bytes, as d = 80 is, and
    where tensor cores are told by mma.sync no product is made twice, and the forward's warps have whole rows of S.
    """
    rows = [row for row in worker_rows if row["target"] == target and not row["bias"]]
    assert {row["kernel"] for row in rows} == {"forward", "dkdv", "dq"}
    for row in rows:
        assert row["shared"] <= BLOCK_KIB[target] * KiB, row
        if row["d"] <= 128 or not (row["dtype"] == "float32" or (target == "sm_90" and row["kernel"] != "forward")):
            limited = (target, row["kernel"]) == ("sm_90", "forward") and 32 < row["d"] <= 64 and not row["causal"]
            assert row["ldl"] + row["stl"] <= 14 * limited, row  # of 128 registers: kept outside the loops
        fp32 = row["dtype"] == "float32" and target.startswith("sm_")  # exact products, not TF32's
        assert (row["tensor"] == 0) == fp32 and (fp32 or not row["narrow_accesses"]), row
        assert not row["waits"], row
        for m, n, m_at_once, n_at_once in row["mma_shapes"]:
            assert m_at_once <= m and n_at_once <= n, row
            assert row["kernel"] != "forward" or m_at_once == 16 * row["warps"], row


@compiled_by("portable", *BLOCK_KIB)
def test_bias_kernels_compile_with_few_spills(worker_rows, jobs):
    """It has no tiles of its own, so a few registers are spilled: next to none by ALiBi, more by a mask on Hopper."""
    rows = [row for row in worker_rows if row["bias"]]
    assert len(rows) == (72 if jobs == "all" else 6)
    for row in rows:
        assert row["ldl"] + row["stl"] <= (14 if row["bias"] == "alibi" else 50), row
        assert row["shared"] <= BLOCK_KIB[row["target"]] * KiB and row["tensor"] > 0 and not row["waits"], row


@compiled_by("decode", *BLOCK_KIB)
@pytest.mark.parametrize("target", BLOCK_KIB)
def test_decode_kernels_compile_without_spills_for_each_gpu(worker_rows, target, jobs):
    """Nothing spills, tensor cores multiply, and an SM holds as many programs as are launched for it."""
    rows = [row for row in worker_rows if row["target"] == target]
    all_calls = jobs == "all" or target == "sm_90"
    assert len(rows) == (14 if all_calls else 2)
    programs = {(row["d"], row["call"]): row["programs"] for row in rows}
    calls = [(d, call) for d in (64, 128) for call in ("one query", "a head on each SM", "lengths")]
    calls = [*calls, (128, "whole heads"), (128, "shares")] if all_calls else [(128, "one query")]
    assert [programs[kind] for kind in calls] == ([3, 1, 3, 1, 1, 2, 2, 2] if target == "sm_90" else [2] * len(calls))
    split_kv = ("one query", "whole heads", "a head on each SM")
    assert (
        max(row["regs"] for row in rows if row["call"] in split_kv) <= 168
    )  # a loop over heads, which split-KV does without, takes 80 more
    for row in rows:
        assert row["ldl"] + row["stl"] + row["merge"]["ldl"] + row["merge"]["stl"] == 0, row
        assert row["tensor"] > 0, row
        assert row["programs"] * (row["shared"] + KiB) <= SM_KIB[target] * KiB, row
        if target.startswith("sm_"):
            assert row["programs"] * row["regs"] * row["warps"] * 32 <= 65536, row
