"""When each program of decode ends, and on which SM: an edited copy of the kernel writes it down in place of L."""

from __future__ import annotations

import numpy as np
import torch

from fa2_lab.studio.bench.problem import Problem
from fa2_lab.studio.bench.protocol import HEAD_START, reading
from fa2_lab.studio.bench.variants import Edit, dropped, variant
from fa2_lab.studio.bench.worth import call

CALLS = 15
WRAP = 2**23  # nanoseconds: fp32 counts so far one by one, and then begins anew


def register(name: str, kind: str, letter: str) -> str:
    """What reads one of the GPU's special registers."""
    asm = f"mov.{kind.replace('int', 'u')} $0, %{name};"
    return f'tl.inline_asm_elementwise("{asm}", "={letter}", [], dtype=tl.{kind}, is_pure=False, pack=1)'


NOW, SM = register("globaltimer", "int64", "l"), register("smid", "int32", "r")
BEGIN, GIVEN, STORE = "    part_at = part(", "ALONE, part_at, (scale_log2", "        tl.store(L + L_at, L_i, mask=real)"
ROWS = (f"part_at[0] % {WRAP}", f"ended % {WRAP}", SM)  # of the queries that share the head

WRITE = "".join(f"        L_i = tl.where(row % group == {i}, ({x}).to(tl.float32), L_i)\n" for i, x in enumerate(ROWS))

EDITS = (
    Edit("decode", f"\n{BEGIN}", f"\n    begun = {NOW}\n{BEGIN}"),
    Edit("decode", GIVEN, GIVEN.replace("part_at", "(begun, begun, begun)")),
    Edit("decode", STORE, f"        ended = {NOW}\n{WRITE}{STORE}"),
)


def ends(problem: Problem) -> dict[str, list[float]]:
    """Of programs that read a head each: their SM, and µs from when the first has begun; medians over a few calls."""
    inputs, flush = problem.tensors(), reading()
    clocked = call(variant(dropped("decode", "clocks", (problem,), *EDITS)), problem, "decode", inputs)
    found = []
    for _ in range(CALLS):
        flush()
        torch.cuda._sleep(HEAD_START)
        found.append(clocked()[1].view(-1, problem.heads // problem.kv_heads)[:, : len(ROWS)].cpu().numpy())
    return medians(np.stack(found))


def medians(found: np.ndarray) -> dict[str, list[float]]:
    """From (calls, programs, 3): begin, end, SM. A call is left out if a clock wrapped, or programs lay elsewhere."""
    begun, ended, place = np.moveaxis(found, 2, 0)
    ended = ended - begun.min(1, keepdims=True)
    usual = (ended > 0).all(1) & (np.ptp(begun, 1) < WRAP / 2) & (place == place[-1]).all(1)
    if not usual.any():
        raise ArithmeticError("in no call did all clocks run on")
    return dict(SM=place[-1].tolist(), ended=(np.median(ended[usual], 0) / 1e3).round(3).tolist())
