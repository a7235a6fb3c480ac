"""Compile all kernels that test_xray.py needs, without a GPU, and print a line of JSON for each of its questions."""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from fa2_lab.kernels import ladder
from fa2_lab.tools.xray import xray_launches

THREE_LAUNCHES = [{}, dict(num_warps=8, num_stages=1), dict(maxnreg=96)]
ONE_LAUNCH = [{}]

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        copied_rung = shutil.copy(Path(ladder.__file__).with_name("r06_base_2.py"), Path(folder) / "mine.py")
        for question, name, launches, chip, sizes in [
            ("launches", "portable.forward", THREE_LAUNCHES, "sm_90", dict(d=64, N=1024)),
            ("gfx942", "portable.forward", ONE_LAUNCH, "gfx942", dict(d=64, N=1024)),
            ("no power of two", "r07", ONE_LAUNCH, "sm_90", dict(d=40)),
            ("hopper.forward", "hopper.forward", ONE_LAUNCH, "sm_90", dict(d=64)),
            ("hopper.backward", "hopper.backward", ONE_LAUNCH, "sm_90", dict(causal=False)),
            ("not hopper's d", "hopper.backward", ONE_LAUNCH, "sm_90", dict(d=136)),
            ("r11_diagonal_first, sm_90", "r11", ONE_LAUNCH, "sm_90", {}),
            ("mine.py", str(copied_rung), ONE_LAUNCH, "sm_90", dict(d=64)),
            ("mine.py, unfused by default", str(copied_rung), ONE_LAUNCH, "sm_90", dict(d=64)),
            ("portable.forward, unfused by default", "portable.forward", ONE_LAUNCH, "sm_90", dict(d=64, N=1024)),
        ]:
            if "unfused" in question:
                os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
            try:
                calls = xray_launches(name, launches, chip, **sizes)
                row = dict(calls=[[kernel._asdict() for kernel in call] for call in calls])
            except ValueError as refusal:
                row = dict(calls=[], refused=str(refusal))
            print(json.dumps(dict(question=question) | row), flush=True)
