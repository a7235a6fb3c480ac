"""Compile the decode kernels for a GPU that need not be here; prints a line of JSON for each. One target a process."""

import json
import multiprocessing
import os
import sys

import torch
from compiling import Compiling

from fa2_lab.kernels.decode import plan
from fa2_lab.kernels.prepared import Options
from fa2_lab.tools import offline

CALLS = {  # (batch, query heads, N_q, page size or 0, key_lengths, causal): 8 K/V heads
    "one query": (2, 32, 1, 0, False, False),
    "whole heads": (32, 32, 1, 0, False, False),
    "a head on each SM": (16, 32, 1, 0, False, False),
    "shares": (12, 32, 1, 0, False, False),
    "lengths": (2, 32, 4, 0, True, True),
    "pages of 16": (2, 32, 1, 16, True, True),
    "pages of 64": (2, 32, 1, 64, True, True),
    "64 rows": (2, 32, 16, 0, True, True),
}
OF_D_64 = ("lengths", "64 rows", "one query", "a head on each SM")
FEW = ("one query", "64 rows")  # on a chip that is not Hopper
KERNELS = ("split_kv_kernel", "stream_k_kernel", "merge_kernel")


def compile_for(target: str) -> list[dict]:
    """Every kind of call at d = 128; at 64 the two that take the most registers, and those with sizes of their own."""
    offline.compile_for(target)
    plan.starts_early = lambda device: target in ("sm_90", "sm_100", "sm_120")
    for name in KERNELS:
        setattr(plan, name, Compiling(getattr(plan, name)))
    rows = []
    every = sys.argv[1] == "all" or target == "sm_90"
    for d, calls in ((64, OF_D_64), (128, CALLS)) if every else ((128, FEW),):
        for what in calls:
            batch, heads, N_q, page, lengths, causal = CALLS[what]
            q = torch.empty(batch, heads, N_q, d, dtype=torch.bfloat16, device="meta")
            k = torch.empty((1000, page, 8, d) if page else (batch, 8, 8192, d), dtype=torch.bfloat16, device="meta")
            table = torch.empty(2, 500, dtype=torch.int32, device="meta") if page else None
            given = torch.empty(2, dtype=torch.int32, device="meta") if lengths else None
            made = plan.prepare(q, k, k, Options(causal, scale=0.1), given, table)
            made(q, k, k, given, table=table)
            shape = plan.shape_of(q, k, table, one_length=given is None)
            programs = plan.blocks_of(q, shape)[1]
            row = dict(target=target, call=what, d=d, warps=made.read.options["num_warps"], programs=programs // 132)
            read = plan.split_kv_kernel if made.split_kv else plan.stream_k_kernel
            rows.append(row | offline.report(read.made) | dict(merge=offline.report(plan.merge_kernel.made)))
    return rows


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for rows in pool.imap_unordered(compile_for, sys.argv[2:]):
            for row in rows:
                print(json.dumps(row), flush=True)
