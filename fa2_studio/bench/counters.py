"""Read hardware counters for one call of each implementation, with NVIDIA's ncu.

ncu runs and profiles a separate process, `python -m MODULE PROBLEM NAME...`, which makes its calls through
`run_under_ncu`.
"""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from fa2_studio.bench.problem import Problem
from fa2_studio.bench.protocol import warm_up

SUMS = {  # counters summed over the kernels of a call
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    "L2 bytes": "lts__t_bytes.sum",
    "shared-memory wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "exp and other special instructions": "smsp__inst_executed_pipe_xu.sum",
}
CYCLES = "SM cycles"  # the weight of each kernel's shares if a call has several kernels
STALLS = ("barrier", "gmma", "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "short_scoreboard",
          "sleeping", "wait")  # fmt: skip
SHARES = {  # counters relative to a kernel's cycles
    "tensor cores at work, %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponential unit at work, %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue slots used, %": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
} | {f"stall: {why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS}
METRICS = SUMS | {CYCLES: "sm__cycles_elapsed.max"} | SHARES
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep, which runs before the kernels of each call


def read_counters(
    module: str, problem: Problem, names: Sequence[str], timeout: int = 300
) -> dict[str, dict[str, float]]:
    """Return {implementation: {metric: total over the kernels of one call}}. Raises RuntimeError if ncu fails."""
    watched = [sys.executable, "-m", module, json.dumps(problem.as_dict()), *names]
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
    return dict(zip(names, totals_per_call(done.stdout), strict=True))


def totals_per_call(output: str) -> list[dict[str, float]]:
    """Return the totals of each call in ncu's output, in which a marker kernel precedes the kernels of each call.

    Counters that this GPU does not have are left out.
    """
    start = output.index('"ID"')
    units, *kernels = csv.DictReader(io.StringIO(output[start:]))
    calls: list[list[dict]] = []
    for kernel in kernels:
        if MARKER in kernel["Kernel Name"]:
            calls.append([])
        else:
            calls[-1].append(kernel)
    return [totals_of_call(call, units) for call in calls]


def totals_of_call(kernels: list[dict], units: dict) -> dict[str, float]:
    """Return {metric: number} for one call: counters summed over its kernels, and shares averaged by cycles."""
    sums = {}
    cycles = [counter_value(kernel, METRICS[CYCLES]) or 0.0 for kernel in kernels]
    for name, metric in METRICS.items():
        numbers = [counter_value(kernel, metric) for kernel in kernels]
        if kernels and None not in numbers:
            if name not in SHARES:
                sums[name] = sum(numbers) * UNITS.get(units[metric], 1)
            elif sum(cycles):
                sums[name] = sum(n * c for n, c in zip(numbers, cycles, strict=True)) / sum(cycles)
    return sums


def counter_value(kernel: dict, metric: str) -> float | None:
    """Return the value of a counter for one kernel, or None if this GPU does not have the counter."""
    try:
        return float(kernel.get(metric, "").replace(",", ""))
    except ValueError:
        return None


def run_under_ncu(calls: dict[str, Callable], names: Sequence[str]) -> None:
    """Call each implementation twice, and let ncu profile the second calls."""
    for name in names:
        if warm_up(calls[name], times=1):  # if the call fails, the timed rows state the reason
            calls[name] = lambda: None
    torch.cuda.profiler.start()
    for name in names:
        torch.cuda._sleep(1)
        calls[name]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
