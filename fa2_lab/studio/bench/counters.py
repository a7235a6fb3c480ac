"""Hardware counters of one call of each contestant, read by NVIDIA's ncu from a process of its own.

`python -m fa2_lab.studio.bench.counters ROOM BATCH HEADS N D CAUSAL NAME...` is the process that ncu watches. ROOM is
the module whose `everybody(problem, tensors)` lists the contestants.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module

from fa2_lab.studio.bench.problem import Problem

METRICS = {
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    "L2 bytes": "lts__t_bytes.sum",
    "shared-memory wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "exp and other special instructions": "smsp__inst_executed_pipe_xu.sum",
    "tensor instructions": "sm__inst_executed_pipe_tensor.sum",
}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


MARKER = "spin_kernel"  # of torch.cuda._sleep: it stands before the kernels of each contestant


def read(room: str, problem: Problem, names: Sequence[str], timeout: int = 200) -> dict[str, dict[str, float]]:
    """{contestant: {metric: sum over all kernels of one call}}, of contestants that a module lists."""
    sizes = [problem.batch, problem.heads, problem.N_q, problem.d, int(problem.causal)]
    watched = [sys.executable, "-m", "fa2_lab.studio.bench.counters", room, *map(str, sizes), *names]
    options = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command = ["ncu", *options, "--metrics", ",".join(METRICS.values()), *watched]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except FileNotFoundError as absent:
        raise RuntimeError("ncu is not installed") from absent
    except subprocess.TimeoutExpired as slow:
        raise RuntimeError(f"ncu took longer than {timeout} s") from slow
    if done.returncode:
        raise RuntimeError(f"ncu: {(done.stdout + done.stderr).strip().splitlines()[-1][:160]}")
    return dict(zip(names, summed(done.stdout), strict=True))


def summed(output: str) -> list[dict[str, float]]:
    """ncu's table, the kernels after each marker added up; a counter that this GPU does not have is left out."""
    start = output.index('"ID"')
    units, *kernels = csv.DictReader(io.StringIO(output[start:]))
    calls: list[list[dict]] = []
    for kernel in kernels:
        if MARKER in kernel["Kernel Name"]:
            calls.append([])
        else:
            calls[-1].append(kernel)
    return [totals(call, units) for call in calls]


def totals(kernels: list[dict], units: dict) -> dict[str, float]:
    """{metric: sum} of the kernels of one call."""
    found = {}
    for name, metric in METRICS.items():
        if kernels and all(kernel.get(metric) for kernel in kernels):
            factor = UNITS.get(units[metric], 1)
            found[name] = sum(float(kernel[metric].replace(",", "")) * factor for kernel in kernels)
    return found


def main(argv: list[str]) -> None:
    """Call each contestant twice and let ncu watch the second calls."""
    import torch

    room, *sizes = argv[:6]
    batch, heads, N, d, causal = map(int, sizes)
    problem = Problem(batch, heads, heads, N, N, d, bool(causal))
    calls = dict(import_module(room).everybody(problem, problem.tensors()))
    for name in argv[6:]:
        calls[name] = calls[name] if works(calls[name]) else (lambda: None)
    torch.cuda.profiler.start()
    for name in argv[6:]:
        torch.cuda._sleep(1)
        calls[name]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def works(call) -> bool:
    """Whether it runs here; the timed rows say why not."""
    import torch

    try:
        call()
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
