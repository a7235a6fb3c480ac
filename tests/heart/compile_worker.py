"""Compile the kernels as they are launched, for GPUs that need not be here; prints a line of JSON for each.

Triton's interpreter must be off, and a process keeps its first target, so every target gets a process of its own.
"""

import json
import multiprocessing
import os
import sys

import torch
from compiling import Compiling

from fa2_lab.kernels import tables
from fa2_lab.kernels.portable import backward, forward
from fa2_lab.kernels.prepared import Options
from fa2_lab.tools import offline

FEW = {  # every entry of the tables once, where it is tightest
    "sm_80": [(64, "bfloat16", True)],
    "sm_86": [(256, "bfloat16", True), (256, "float32", False)],
    "sm_89": [(128, "bfloat16", True)],
    "sm_90": [(64, "bfloat16", True), (128, "bfloat16", True), (256, "bfloat16", True), (128, "float16", False)],
    "sm_100": [(128, "bfloat16", True)],
    "sm_120": [(64, "bfloat16", True)],
    "gfx942": [(64, "bfloat16", True), (128, "bfloat16", True), (256, "float32", False)],
}
KERNELS = dict(forward="forward_kernel", columns="columns_kernel", rows="rows_kernel")


def compile_for(target: str) -> list[dict]:
    """Every kernel in the sizes that are asked of this target."""
    offline.compile_for(target)
    rooms = dict(forward=forward, columns=backward, rows=backward)
    made = {name: Compiling(getattr(rooms[name], kernel)) for name, kernel in KERNELS.items()}
    for name, kernel in KERNELS.items():
        setattr(rooms[name], kernel, made[name])
    rows = []
    for d, dtype, causal in asked(target) if sys.argv[1] == "all" else FEW[target]:
        Q = torch.empty(2, 16, 8192, d, dtype=getattr(torch, dtype), device="meta")
        O, L = forward.forward(Q, Q, Q, Options(causal, scale=0.1))
        backward.backward(O, Q, Q, Q, O, L, Options(causal, scale=0.1))
        for name, kernel in made.items():
            blocks = tables.blocks(name, Q, causal)
            row = dict(target=target, kernel=name, d=d, dtype=dtype, causal=causal, blocks=str(blocks))
            waits = target == "sm_90" and dtype != "float32" and offline.serialized(kernel.made)
            rows.append(row | offline.report(kernel.made) | dict(waits=waits))
    return rows


def asked(target: str) -> list[tuple[int, str, bool]]:
    """What is compiled: the mask where it takes the most registers, and the largest tiles where memory is short."""
    jobs = [(64, "bfloat16", True), (128, "bfloat16", True)]
    if target in ("sm_86", "sm_90", "gfx942"):
        jobs += [(256, "bfloat16", True)]
    if target == "sm_90":
        jobs += [(128, "float16", False)]
    if target in ("sm_86", "gfx942"):
        jobs += [(256, "float32", False)]
    return jobs


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for rows in pool.imap_unordered(compile_for, sys.argv[2:]):
            for row in rows:
                print(json.dumps(row), flush=True)
