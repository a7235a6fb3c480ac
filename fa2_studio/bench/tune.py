"""`fa2-lab tune`: search for the best block sizes on a GPU.

The paper's authors tuned by hand and left an automatic search to future work. The command prints its results as entries
for kernels/tables.py. Once added there, they are used by the next call, identified by a record's commit, and can be
shared in a pull request.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch
from tqdm import tqdm

from fa2_studio.bench.protocol import Timing, measure_kernels

KERNELS = ("forward", "dq", "dkdv")
SIZES = (32, 64, 128)
REPEATS = 7
TOLERANCE = 0.02  # the largest ‖x − y‖ / ‖y‖ accepted for a candidate's result x, where y is the result of the default


def main(argv: list[str]) -> int:
    """Search for each kernel, head dimension and mask, and print the fastest block sizes."""
    parser = argparse.ArgumentParser(
        prog="fa2-lab tune", description="Search for the best block sizes on this machine's GPU."
    )
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128], help="the head dimensions (default: 64 128)")
    parser.add_argument("--n", type=int, default=4096, help="the sequence length to measure (default: 4096)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kernel", nargs="+", default=list(KERNELS), choices=KERNELS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("tune: there is no GPU here to measure on")
    if not all(1 <= d <= 256 for d in arguments.d) or arguments.n < 1:
        raise ValueError("tune: --d takes 1 to 256, --n at least 1")
    return tune(arguments.d, arguments.n, getattr(torch, arguments.dtype), arguments.kernel)


def tune(head_dims, N: int, dtype: torch.dtype, kernels=KERNELS) -> int:
    """Search, and print each result as soon as it is found."""
    jobs = [(d, causal, kernel) for d in head_dims for causal in (False, True) for kernel in kernels]
    bar = tqdm(jobs, desc="tune", unit="kernel", disable=None)
    for d, causal, kernel in bar:
        mask = "causal" if causal else "full"
        bar.set_postfix_str(f"{kernel} d {d} {mask}")
        tensors = [
            torch.randn(max(1, 16384 // N), max(1, 2048 // d), N, d, device="cuda", dtype=dtype) for _ in range(4)
        ]
        before, best, timings = search_config(kernel, tensors, causal)
        line = f"{table_entry(best)}  # {timings[best]:.3f} ms; before {table_entry(before)}, {timings[before]:.3f} ms"
        tqdm.write(f"{kernel}, {mask}, {best.d_pad}: {line}")
    table = "FP32" if dtype == torch.float32 else "your GPU's family"
    print(f"fa2_lab/kernels/tables.py has the entries of {table}; where masks differ, a pair (full, causal)")
    return 0


def table_entry(config) -> tuple:
    """Return block sizes as an entry of kernels/tables.py, with a register limit if there is one."""
    limits = (config.registers, config.low_reg_schedule) if config.registers or config.low_reg_schedule else ()
    return config.B_r, config.B_c, config.warps, config.stages, *limits


def search_config(kernel: str, tensors: list[torch.Tensor], causal: bool):
    """Return the current choice, the fastest choice with right results, and {choice: milliseconds} for all that ran."""
    from fa2_lab.kernels import tables

    before = tables.choose_config(kernel, tensors[0], causal)
    make = kernel_caller(kernel, tensors, causal)
    truth = make(before)()
    calls, timings = {}, {}
    for config in tqdm(candidate_configs(kernel, before), desc="compile", leave=False, disable=None):
        call = make(config)
        if is_right(call, truth):
            calls[config] = call
    for config, timing in measure_kernels(calls, repeats=REPEATS).items():
        if isinstance(timing, Timing):
            timings[config] = timing.median
    return before, min(timings, key=timings.get), timings


def candidate_configs(kernel: str, before) -> list:
    """Return the current choice, and all block sizes that machine/budget.py does not rule out."""
    from fa2_lab.machine import budget

    room = torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin
    d, choices = before.d_pad, [before]
    for B_r, B_c, warps, stages in product(SIZES, SIZES, (4, 8), (1, 2, 3)):
        sizes = kernel, B_r, B_c, d
        if budget.shared_bytes(*sizes, stages) <= room and budget.registers(*sizes, warps) <= 300:
            choices.append(replace(before, B_r=B_r, B_c=B_c, warps=warps, stages=stages, registers=None))
    return list(dict.fromkeys(choices))


def kernel_caller(kernel: str, tensors: list[torch.Tensor], causal: bool) -> Callable:
    """Return a function that, given a KernelConfig, returns a call that runs the kernel and returns its outputs."""
    from fa2_lab.kernels.arguments import Options, Tensors
    from fa2_lab.kernels.portable import backward, forward

    Q, K, V, dO = tensors
    options = Options(causal, Q.shape[3] ** -0.5)
    given = Tensors(Q, K, V)
    O, L = forward.prepare(given, options)(given)
    D, scratch = torch.empty_like(L), torch.empty_like(Q)
    dL, optional = None, backward.optional_tensors(given)

    def dq(config, dQ: torch.Tensor) -> Callable:
        launch = backward.prepare_dq(dO, O, given, options, config)
        return lambda: launch(Q, K, V, O, dO, L, dL, D, dQ, *optional) or (dQ,)

    def dkdv(config, dK: torch.Tensor, dV: torch.Tensor) -> Callable:
        launch = backward.prepare_dkdv(dO, given, options, config)
        return lambda: launch(Q, K, V, dO, L, D, dK, dV, *optional) or (dK, dV)

    def make(config):
        if kernel == "forward":
            run = forward.prepare(given, options, config)
            return lambda: run(given)[:1]
        if kernel == "dq":
            return dq(config, torch.empty_like(Q))
        return dkdv(config, torch.empty_like(K), torch.empty_like(V))

    dq(config=None, dQ=scratch)()  # run once, because the kernel for dK and dV reads D
    return make


def is_right(call: Callable, truth) -> bool:
    """Return True if a call compiles, fits on the GPU and produces the same results as `truth`."""
    try:
        return all((x - y).norm() <= TOLERANCE * y.norm() for x, y in zip(call(), truth, strict=True))
    except Exception:  # out of shared memory or registers, or a size that the compiler rejects
        return False
