"""The kernels, compiled for seven GPUs without having one: they fit, spill nothing, use tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa2_lab.machine.chips import KiB

pytest.importorskip("triton")

TARGETS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
AN_SM = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100, "gfx942": 64}


def compiled(worker: str) -> dict[str, list[dict]]:
    """{target: rows}, in processes without Triton's interpreter."""
    here = Path(__file__).parent
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(here.parent)}
    command = [sys.executable, str(here / worker), *TARGETS]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {target: [row for row in rows if row["target"] == target] for target in TARGETS}


@pytest.fixture(scope="module")
def default_blocks():
    return compiled("compile_worker.py")


@pytest.fixture(scope="module")
def decode_kernels():
    return compiled("decode_compile_worker.py")


@pytest.mark.parametrize("target", TARGETS)
def test_default_blocks(default_blocks, target):
    rows = default_blocks[target]
    assert {row["kernel"] for row in rows} == {"forward", "columns", "rows"} and len(rows) >= 6
    for row in rows:
        assert row["shared"] <= TARGETS[target] * KiB, row
        assert row["d"] > 128 or row["ldl"] + row["stl"] == 0, row
        assert row["tensor"] > 0 or (row["dtype"] == "float32" and target.startswith("sm_")), row
        assert not row["waits"], row


@pytest.mark.parametrize("target", TARGETS)
def test_decode(decode_kernels, target):
    """Nothing spills, tensor cores multiply, and an SM holds as many programs as are launched for it."""
    assert len(decode_kernels[target]) == 8
    held = {row["call"]: row["programs"] for row in decode_kernels[target]}
    assert (held["one query"], held["whole heads"]) == (3 if target == "sm_90" else 2, 2)
    for row in decode_kernels[target]:
        assert row["ldl"] + row["stl"] + row["merge"]["ldl"] + row["merge"]["stl"] == 0, row
        assert row["tensor"] > 0, row
        assert row["programs"] * (row["shared"] + KiB) <= AN_SM[target] * KiB, row
        if target.startswith("sm_"):
            assert row["programs"] * row["regs"] * row["warps"] * 32 <= 65536, row
