"""Functions that compile kernels in new Python processes, because a process can compile for only one chip."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fa2_lab.paper import PACKAGE

CHIPS = {
    "sm_80": "A100",
    "sm_86": "A10, RTX 30",
    "sm_89": "L4, L40S, RTX 40",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX 50",
    "gfx942": "MI300",
}
ROOM = dict(sm_80=163, sm_86=99, sm_89=99, sm_90=227, sm_100=227, sm_120=99, gfx942=64)  # shared-memory KiB per block
STAGES = ("ttir", "ttgir", "ptx", "sass")  # in the order of compilation; for AMD, "sass" stands for amdgcn code
PRODUCTS = ("portable.forward", "portable.backward", "hopper.forward", "hopper.backward")
LARGEST_D = 256
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # the compiler options that a launch may set


class Compiled(NamedTuple):
    """One kernel, compiled for one chip."""

    name: str
    chip: str
    numbers: dict[str, int]
    layouts: dict[str, str]  # {name of a layout in TTGIR: layout}
    stages: dict[str, str]  # {ttir, ttgir, ptx or sass: code}
    lines: dict[str, list[str]]  # {"file.py:line": instructions compiled from this line}

    def misfit(self) -> str | None:
        """Return the reason why the chip cannot run the kernel, or None if it can."""
        shared, room = self.numbers["shared"], 1024 * ROOM[self.chip]
        if shared <= room:
            return None
        return f"{self.name} does not fit: it takes {shared:,} bytes of shared memory, and {self.chip} has {room:,}"


def names() -> list[str]:
    """Return the names of all kernels that can be compiled: the rungs of the ladder, and the package's own kernels."""
    rungs = sorted(file.stem for file in (PACKAGE / "kernels" / "ladder").glob("[a-z][0-9][0-9]_*.py"))
    return [*rungs, *PRODUCTS]


def xray(
    name: str, chip: str = "sm_90", *, d: int = 128, N: int = 4096, causal: bool = True, dtype: str = "bfloat16"
) -> list[Compiled]:
    """Compile for `chip` every kernel that one call of `name` launches, with q, k and v of shape (4, 16, N, d).

    `name` is a rung ("r09", "09", "r09_free_loads"), a package kernel ("portable.forward"), or a file of your own
    ("mine.py") with a forward(q, k, v, causal). `chip` is one of CHIPS or a card such as "A100". No GPU is needed.
    """
    return xray_launches(name, [{}], chip, d=d, N=N, causal=causal, dtype=dtype)[0]


def xray_launches(
    name: str, launches: Sequence[Mapping[str, int]], chip: str = "sm_90", **sizes: Any
) -> list[list[Compiled]]:
    """Compile the kernels of `name` once for each entry of `launches`.

    The options in an entry replace those that the call would set. For example, the entry {"num_stages": 2} compiles the
    kernels with two stages.
    """
    chip = chip_of(chip)
    for option, value in [item for launch in launches for item in launch.items()]:
        if option not in OPTIONS or type(value) is not int or value < 1:
            raise ValueError(f"launches: got {option}={value!r}; it takes numbers from 1 on for {', '.join(OPTIONS)}")
    sizes = dict[str, Any](d=128, N=4096, causal=True, dtype="bfloat16") | sizes
    for size, most, takes in (("d", LARGEST_D, f"to {LARGEST_D}"), ("N", float("inf"), "on")):
        if type(sizes[size]) is not int or not 1 <= sizes[size] <= most:
            raise ValueError(f"{size}: got {sizes[size]!r}; it takes numbers from 1 {takes}")
    job = dict(name=full_name(name), chip=chip, launches=[dict(launch) for launch in launches], **sizes)
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-m", "fa2_lab.tools.xray.worker", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise ValueError(f"xray: {job['name']} cannot be compiled for {chip} here: {reason(done.stderr)}")
    return [[Compiled(chip=chip, **found) for found in one] for one in json.loads(done.stdout.splitlines()[-1])]


def chip_of(name: str) -> str:
    """Return the chip of a graphics card, such as sm_80 for "A100" and sm_89 for "RTX 4090".

    `name` may also be the name of a chip.
    """
    wanted = name.upper().replace(" ", "").replace("-", "")
    for chip, cards in CHIPS.items():
        if wanted == chip.upper() or wanted[:5] in cards.replace(" ", "").split(","):
            return chip
    chips = ", ".join(f"{chip} ({cards})" for chip, cards in CHIPS.items())
    raise ValueError(f"chip: got {name!r}; it takes one of {chips}")


def reason(complaint: str) -> str:
    """Return the line of an error message that gives the reason.

    This line is the assembler's error, if there is one, and otherwise the last line. If the last line only marks a
    position in a kernel, the first error is returned together with that position.
    """
    lines = complaint.strip().splitlines() or ["no reason was given"]
    if lines[-1].strip() == "^":  # Triton's message ends with a line of the kernel, which follows the first error
        words = [line for line in lines if re.match(r"\w+Error[:(]", line)][:1]
        place = next(n for n, line in enumerate(lines) if line.strip() == "^") - 1
        lines.append("; ".join([*words, f"it stops at `{lines[place].strip()}`"]))
    return next((line for line in lines if line.startswith("ptxas") and " fatal " in line), lines[-1])


def full_name(name: str) -> str:
    """Return the name that names() lists for a kernel, or for a rung such as "09". For a file, return its full path."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"name: got {name!r}, and there is no file {name} here")
        return str(Path(name).resolve())
    kernels = names()
    matches = [full for full in kernels if full == name or full.split("_")[0] in (name, f"r{name}")]
    if len(matches) != 1:
        raise ValueError(f"name: got {name!r}; it takes one of {', '.join(full.split('_')[0] for full in kernels)}")
    return matches[0]
