"""Beside a student's code: a forward of the ladder's form, run in the interpreter, compiled, and timed on a GPU."""

from __future__ import annotations

import json
import linecache
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

HEADER = "import math\n\nimport torch\nimport triton\nimport triton.language as tl\n\n\n"  # what the first cell imports


def run(forward, q, k, v, causal: bool) -> tuple[np.ndarray, np.ndarray, dict]:
    """O and L of one call in Triton's interpreter, and what the meter counted."""
    import torch
    import triton

    from fa2_lab.studio.course.probes_triton import metered

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before the first cell: restart the notebook")
    Q, K, V = (fenced(torch.tensor(x)) for x in (q, k, v))
    with metered(K=K, V=V) as meter, placed() as places:
        O, L = forward(Q, K, V, causal)
    counted = dict(meter.operations) | dict(loaded=meter.loads["K"] + meter.loads["V"])
    counted["multiplications of each product"] = sorted(places.values())
    return O.double().numpy(), L.double().numpy(), counted


@contextmanager
def placed() -> Iterator[Counter]:
    """The multiplications of each product that stands in a kernel, by its place: where every caller is at work."""
    from triton.runtime import interpreter

    places, builder, kept = Counter(), vars(interpreter.interpreter_builder), interpreter.interpreter_builder.create_dot

    def dot(a, b, *rest):
        frame, place = sys._getframe(1), []
        while frame:
            place.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        places[tuple(place)] += a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return kept(a, b, *rest)

    builder["create_dot"] = dot
    try:
        yield places
    finally:
        builder["create_dot"] = kept


def fenced(x):
    """The tensor with NaN behind its end, in the same memory."""
    wide = x.new_full((x.numel() + 2**14,), float("nan"))
    wide[: x.numel()] = x.flatten()
    return wide[: x.numel()].view(x.shape)


def source_of(forward) -> str:
    """The cell that a function stands in, as a file that can be imported."""
    lines = linecache.getlines(forward.__code__.co_filename)
    if not lines:
        raise RuntimeError("the cell with forward was not found: run it as it stands")
    return HEADER + "".join(lines)


def compiled(forward, chip: str, d: int, N: int) -> list[tuple[dict, str, int]]:
    """(numbers, machine code, products that stand in it) of every kernel that a causal call in fp16 launches."""
    xray = import_module("fa2_lab.studio.xray.compile").xray
    with TemporaryDirectory(prefix="ladder-") as folder:
        path = Path(folder, "mine.py")
        path.write_text(source_of(forward), encoding="utf-8")
        kernels = [(x.numbers, x.stages) for x in xray(str(path), chip, d=d, N=N, dtype="float16")]
        return [(n, stages["sass"], len(re.findall(r"= tt\.dot\b", stages["ttir"]))) for n, stages in kernels]


def timed(forward, rung: str) -> tuple[float, float, float]:
    """Milliseconds on a GPU of a student's forward and of a rung, given as text, and how far apart their O are."""
    with TemporaryDirectory(prefix="ladder-") as folder:
        for name, text in (("mine", source_of(forward)), ("rung", rung)):
            Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        Path(folder, "clock.py").write_text(CLOCK, encoding="utf-8")
        command = ["env", "TRITON_INTERPRET=0", sys.executable, "clock.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the clock gave no reason"])[-1][:300])
    return tuple(json.loads(done.stdout.splitlines()[-1]))


CLOCK = """
import json
import mine, rung
import torch
from triton.testing import do_bench

q, k, v = torch.randn(3, 2, 16, 8192, 64, device="cuda", dtype=torch.float16).unbind()
apart = (mine.forward(q, k, v, True)[0].float() - rung.forward(q, k, v, True)[0].float()).abs().max().item()
times = [do_bench(lambda m=m: m.forward(q, k, v, True), return_mode="median") for m in (mine, rung)]
print(json.dumps([*times, apart]))
"""
