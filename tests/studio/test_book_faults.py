"""A notebook must stop when the package is wrong: run as a script against a package with a planted fault.

Some have their turn in one run of the tests, others every day; `python -m pytest -m exhaustive` takes all others.
"""

import os
import shutil
import subprocess
import sys

import pytest
from slices import thinned

from fa2_lab.paper import PACKAGE
from fa2_studio.book.chapters import NOTEBOOKS, TEXT, written

FAULTS = {  # chapter -> (file, right, wrong)
    "00_start": ("reference/fa2.py", "O[rows] = o_i", "O[rows] = 1.001 * o_i"),
    "01_naive_attention": ("reference/naive.py", "dQ[:] = tau * (dS[:] @ K[:])", "dQ[:] = dS[:] @ K[:]"),
    "02_online_softmax": ("reference/online_softmax.py", "alpha * self.l + p.sum", "self.l + p.sum"),
    "03_fa1": ("reference/fa1.py", "(r * alpha * l_i)[:, None]", "(r * l_i)[:, None]"),
    "04_fa2_forward": ("reference/fa2.py", "L_i = m_i + np.log(l_i)", "L_i = m_i - np.log(l_i)"),
    "05_backward": ("reference/fa2.py", "dk_j + tau * (ds_ij.T @ q_i)", "dk_j + (ds_ij.T @ q_i)"),
    "06_parallelism": ("reference/fa2.py", "state.merge(SoftmaxState.from_output(", "(SoftmaxState.from_output("),
    "07_warps": ("reference/fa2.py", "O[rows] = o_i", "O[rows] = 1.001 * o_i"),
    "08_triton_forward": ("kernels/portable/forward.py", "alpha[:, None] * o_i", "o_i"),
    "09_triton_backward": ("kernels/portable/backward.py", "dp_ij - D_i", "dp_ij"),
    "11_workshop": ("studio/xray/worker.py", "**options | asked", "**options"),
    "12_hopper_forward": ("machine/hopper.py", "alpha[:, None] * self.o", "self.o"),
    "A_lanes": ("machine/layouts.py", "^ phase", "+ phase"),
    "B_errata": ("reference/online_softmax.py", "alpha[:, None] * self.o + dropped", "self.o + dropped"),
    "C_package": ("reference/fa2.py", "O[rows] = o_i", "O[rows] = 1.001 * o_i"),
    "14_decode": ("kernels/decode/kernel.py", "O_i = (o / divisor)", "O_i = (1.001 * o / divisor)"),
    "15_rings": ("machine/ring.py", "[own + come for own, come", "[own - come for own, come"),
    "16_masks": ("tiles.py", "diagonal - left", "diagonal - left + 1"),
    "13_hopper_backward": ("machine/hopper_backward.py", "start + self.v()", "self.v()"),
}
CHAPTERS = [c for c in written() if c.name in FAULTS]


def test_every_chapter_with_checks_of_its_own_has_a_fault():
    assert {c.name for c in written()} - {"10_ladder"} <= set(FAULTS)


@pytest.mark.parametrize("chapter", thinned(CHAPTERS, step=10), ids=lambda c: c.name)
def test_a_notebook_fails_when_the_package_is_wrong(chapter, tmp_path):
    file, right, wrong = FAULTS[chapter.name]
    copy = tmp_path / "fa2_lab"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("notebooks", "figures"):
        (tmp_path / folder).symlink_to(PACKAGE.parent / folder)
    source = (copy / file).read_text(encoding="utf-8")
    assert right in source, f"{file} has no {right!r} any more: plant the fault elsewhere"
    (copy / file).write_text(source.replace(right, wrong), encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, TEXT / f"{chapter.name}.py"],
        cwd=NOTEBOOKS,
        env=os.environ | {"PYTHONPATH": path, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0 and "AssertionError: does not hold: " in run.stderr, run.stderr[-2000:]
