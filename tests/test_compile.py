"""The default block sizes, compiled for seven GPUs without having one: they fit, spill nothing, use tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa2_lab.machine.chips import KiB

pytest.importorskip("triton")

TARGETS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}


@pytest.fixture(scope="module")
def compiled():
    """{target: rows}, all compiled once, in processes without Triton's interpreter."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "compile_worker.py"), *TARGETS]
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(here.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {target: [row for row in rows if row["target"] == target] for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_default_blocks(compiled, target):
    rows = compiled[target]
    assert {row["kernel"] for row in rows} == {"forward", "columns", "rows"} and len(rows) >= 6
    for row in rows:
        assert row["shared"] <= TARGETS[target] * KiB, row
        assert row["d"] > 128 or row["ldl"] + row["stl"] == 0, row
        assert row["tensor"] > 0 or (row["dtype"] == "float32" and target.startswith("sm_")), row
        assert not row["waits"], row
