"""Hardware counters of one call, read by NVIDIA's ncu from a process of its own.

`python -m fa2_lab.bench.counters RUNG BATCH HEADS N D CAUSAL` is the process that ncu watches.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys

from fa2_lab.bench.problem import Problem

METRICS = {
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    "L2 bytes": "lts__t_bytes.sum",
    "shared-memory wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "exp and other special instructions": "smsp__inst_executed_pipe_xu.sum",
    "tensor instructions": "sm__inst_executed_pipe_tensor.sum",
}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


def read(rung: str, problem: Problem, timeout: int = 120) -> dict[str, float]:
    """{metric: sum over all kernels of one call}."""
    sizes = [problem.batch, problem.heads, problem.N_q, problem.d, int(problem.causal)]
    watched = [sys.executable, "-m", "fa2_lab.bench.counters", rung, *map(str, sizes)]
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
    return summed(done.stdout)


def summed(output: str) -> dict[str, float]:
    """ncu's table, its kernels added up; a counter that this GPU does not have is left out."""
    start = output.index('"ID"')
    units, *kernels = csv.DictReader(io.StringIO(output[start:]))
    totals = {}
    for name, metric in METRICS.items():
        if all(kernel.get(metric) for kernel in kernels):
            factor = UNITS.get(units[metric], 1)
            totals[name] = sum(float(kernel[metric].replace(",", "")) * factor for kernel in kernels)
    return totals


def main(argv: list[str]) -> None:
    """Call one rung twice and let ncu watch the second call."""
    import torch

    from fa2_lab.bench.ladder import contestants

    batch, heads, N, d, causal = map(int, argv[1:])
    problem = Problem(batch, heads, heads, N, N, d, bool(causal))
    tensors = problem.tensors()
    call = dict(contestants(problem, tensors))[argv[0]]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
