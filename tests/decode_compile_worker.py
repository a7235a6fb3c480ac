"""Compile the decode kernels for a GPU that need not be here; prints a line of JSON for each. One target a process."""

import json
import multiprocessing
import os
import sys

import torch
from compiling import Compiling
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fa2_lab.kernels.decode import kernel as decode
from fa2_lab.studio import offline

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


KERNELS = ("team_kernel", "share_kernel", "merge_kernel")


def compile_for(target: str) -> list[dict]:
    """Every kind of call at d = 128; at 64 the two that take the most registers, and those with sizes of their own."""
    found = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    driver.set_active(offline.Absent(found))
    decode.early = lambda device: target in ("sm_90", "sm_100", "sm_120")
    for name in KERNELS:
        setattr(decode, name, Compiling(getattr(decode, name)))
    rows = []
    for d, calls in ((64, ("lengths", "64 rows", "one query", "a head on each SM")), (128, CALLS)):
        for what in calls:
            batch, heads, N_q, page, lengths, causal = CALLS[what]
            q = torch.empty(batch, heads, N_q, d, dtype=torch.bfloat16, device="meta")
            k = torch.empty((1000, page, 8, d) if page else (batch, 8, 8192, d), dtype=torch.bfloat16, device="meta")
            table = torch.empty(2, 500, dtype=torch.int32, device="meta") if page else None
            given = torch.empty(2, dtype=torch.int32, device="meta") if lengths else None
            decode.decode(q, k, k, given, causal, 0.1, table)
            teams = decode.recipe(q, k, k, given, table, causal, None).teams
            equal = 0 if lengths or page else batch * 8
            blocks, programs = decode.sizes(q, heads // 8 * N_q, bool(page), equal, 8192)
            row = dict(target=target, call=what, d=d, warps=blocks.warps, programs=programs // 132)
            split = decode.team_kernel if teams else decode.share_kernel
            rows.append(row | offline.report(split.made) | dict(merge=offline.report(decode.merge_kernel.made)))
    return rows


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for rows in pool.imap_unordered(compile_for, sys.argv[1:]):
            for row in rows:
                print(json.dumps(row), flush=True)
