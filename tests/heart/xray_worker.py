"""Compile all kernels that test_xray.py needs, without a GPU, and print a line of JSON for each of its questions."""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from fa2_lab.kernels import ladder
from fa2_lab.tools.xray import xray_launches

LAUNCHES = [{}, dict(num_warps=8, num_stages=1), dict(maxnreg=96)]
PLAIN = [{}]

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        mine = shutil.copy(Path(ladder.__file__).with_name("r06_base_2.py"), Path(folder) / "mine.py")
        for asked, name, launches, chip, sizes in [
            ("launches", "portable.forward", LAUNCHES, "sm_90", dict(d=64, N=1024)),
            ("gfx942", "portable.forward", PLAIN, "gfx942", dict(d=64, N=1024)),
            ("no power of two", "r07", PLAIN, "sm_90", dict(d=40)),
            ("hopper.forward", "hopper.forward", PLAIN, "sm_90", dict(d=64)),
            ("hopper.backward", "hopper.backward", PLAIN, "sm_90", dict(causal=False)),
            ("not hopper's d", "hopper.backward", PLAIN, "sm_90", dict(d=136)),
            ("r11_diagonal_first, sm_90", "r11", PLAIN, "sm_90", {}),
            ("mine.py", str(mine), PLAIN, "sm_90", dict(d=64)),
            ("mine.py, unfused by default", str(mine), PLAIN, "sm_90", dict(d=64)),
            ("portable.forward, unfused by default", "portable.forward", PLAIN, "sm_90", dict(d=64, N=1024)),
        ]:
            if "unfused" in asked:
                os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
            try:
                calls = xray_launches(name, launches, chip, **sizes)
                row = dict(calls=[[kernel._asdict() for kernel in call] for call in calls])
            except ValueError as refusal:
                row = dict(calls=[], refused=str(refusal))
            print(json.dumps(dict(asked=asked) | row), flush=True)
