"""`fa2-lab ladder 08 --run`: check one rung of the ladder and print its compiled resources and its time."""

from functools import partial

import torch

from fa2_lab.api.attention import attention
from fa2_lab.errata.cases import distance
from fa2_lab.kernels import interpreter, ladder
from fa2_lab.machine.budget import blocks_per_sm
from fa2_lab.machine.chips import H200
from fa2_lab.tools import rung_diff
from fa2_lab.tools.xray import xray

SMALL = [(128, 128, 64, False), (70, 100, 64, True), (100, 37, 64, True)]  # N_q, N_k, d, causal
LARGE = [(1000, 1300, 64, False), (1300, 1000, 64, True), (999, 1025, 128, False), (4096, 4096, 128, True)]


def report_rung(name: str) -> None:
    """Print what a rung changes, how large its errors are, which resources it uses and, on a GPU, how long it takes."""
    print(": ".join(ladder.change(name)) + "\n")
    gpu = torch.cuda.is_available()
    if "gluon" in rung_diff.source(name) and not (gpu and torch.cuda.get_device_capability() == (9, 0)):
        print("It runs on a Hopper GPU only, and there is none here.")
    elif interpreter.version_conflict():
        print(interpreter.version_conflict())
    else:
        print_errors(name, LARGE if gpu else SMALL, "cuda" if gpu else "cpu")
        if gpu:
            print_times(name)
    print("\ncompiled for an H200   registers   spills   shared memory   programs on an SM")
    for d in (128, 64):
        for causal in (False, True):
            kernel = max(xray(name, "sm_90", d=d, causal=causal), key=lambda kernel: kernel.numbers["registers"])
            registers, spills, shared, warps = (kernel.numbers[x] for x in ("registers", "spills", "shared", "warps"))
            programs = blocks_per_sm(H200, shared, registers, warps)
            print(f"{f'd = {d}, ' + mask_word(causal):22}{registers:10} {spills:8} {shared:15,} {programs:19}")


def print_errors(name: str, cases: list[tuple], device: str) -> None:
    """Print the errors of a rung's O and L relative to attention in float64."""
    print("against float64                          O          L")
    for N_q, N_k, d, causal in cases:
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 2, n, d, generator=draw).half().to(device) for n in (N_q, N_k, N_k))
        got = ladder.load(name).forward(q, k, v, causal)
        on_host = (x.float().cpu() for x in (q, k, v))
        truth = attention(*on_host, causal=causal, return_lse=True, backend="reference")  # computed in float64
        errors = [distance(x.cpu(), right) for x, right in zip(got, truth, strict=True)]
        wrong = "" if errors[0] < 1e-3 and errors[1] < 1e-5 else "   WRONG"
        case = f"{N_q} queries, {N_k} keys, d = {d}, {mask_word(causal)}"
        print(f"{case:35}{errors[0]:8.1e}   {errors[1]:8.1e}{wrong}")


def print_times(name: str) -> None:
    """Print the time of a rung and, if there is one, of the previous rung."""
    from triton.testing import do_bench

    rungs = [name] if name not in ladder.RUNGS[1:] else [ladder.RUNGS[ladder.RUNGS.index(name) - 1], name]
    print(f"\n64 heads of 4,096, d = 128, bf16{'':5}" + "".join(f"{rung:>22}" for rung in rungs))
    for causal in (False, True):
        q, k, v = torch.randn(3, 4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
        calls = [partial(ladder.load(rung).forward, q, k, v, causal) for rung in rungs]
        times = map(do_bench, calls)
        print(f"{mask_word(causal):37}" + "".join(f"{time:19.3f} ms" for time in times))


def mask_word(causal: bool) -> str:
    return "causal" if causal else "no mask"
