"""The decode kernels, compiled for seven GPUs without having one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa2_lab.machine.chips import KiB

pytest.importorskip("triton")

SHARED = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100, "gfx942": 64}  # KiB, SM


@pytest.fixture(scope="module")
def compiled():
    """{target: rows}, in processes without Triton's interpreter."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "decode_compile_worker.py"), *SHARED]
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(here.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {target: [row for row in rows if row["target"] == target] for target in SHARED}


@pytest.mark.parametrize("target", SHARED)
def test_compiled_for_every_chip(compiled, target):
    """Nothing spills, tensor cores multiply, and an SM holds as many programs as are launched for it."""
    assert len(compiled[target]) == 7
    for row in compiled[target]:
        assert row["ldl"] + row["stl"] + row["merge"]["ldl"] + row["merge"]["stl"] == 0, row
        assert row["tensor"] > 0, row
        assert row["programs"] * (row["shared"] + KiB) <= SHARED[target] * KiB, row
        if target.startswith("sm_"):
            assert row["programs"] * row["regs"] * row["warps"] * 32 <= 65536, row
