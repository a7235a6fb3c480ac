"""What was tried on decode, as edits of it: `bench ideas` measures what each idea is worth today."""

from __future__ import annotations

from fa2_lab.bench.problem import Problem
from fa2_lab.bench.variants import Edit, dropped, kept


def caches(*shapes: tuple[int, int]) -> tuple[Problem, ...]:
    """One query for 32 heads, 8 K/V heads of 128: so many sequences, and keys of each."""
    return tuple(Problem(batch, 32, 8, 1, N, 128, False) for batch, N in shapes)


D, RULES = "decode", "splits"
SPLIT = caches((1, 65536), (8, 16384))  # each head for many programs, and for six
ONE_EACH, TWO_EACH = caches((16, 8192)), caches((32, 8192))  # a head for nearly every SM, and two
WHOLE = "return heads > 0 and grid.efficiency(heads, slots) >= WELL_FILLED"
PAYS = "return size if pays else 0"
EARLY = "kind = Early if early(Q.device) else launch.Blocks"
THREE = "elif not splits.whole(SMs * held, equal):"
COLUMNS = "WIDEST = 64"

DECODE = [
    kept(D, "whole heads where they fill the SMs, no merge", ONE_EACH + TWO_EACH, Edit(RULES, WHOLE, "return False")),
    kept(D, "teams that read a head's tiles in turn", SPLIT, Edit(RULES, PAYS, "return 0")),
    kept(D, "the merge launched early", SPLIT, Edit(D, EARLY, "kind = launch.Blocks")),
    kept(D, "three programs on an SM with tiles of 32 keys, not two with 64", SPLIT, Edit(D, THREE, "elif False:")),
    kept(D, "168 registers a thread, or there is no room for three", SPLIT, registers=(168, 255)),
    dropped(D, "128 KiB on their way to an SM, not 96", ONE_EACH, stages=(4, 5)),
    dropped(D, "144 KiB on their way to an SM, not 96", SPLIT, stages=(3, 4)),
    dropped(D, "96 KiB on their way to an SM, not 128", TWO_EACH, B_c=(64, 32), stages=(3, 4)),
    dropped(D, "8 warps, not 4", ONE_EACH, warps=(4, 8)),
    dropped(D, "8 warps, not 4", TWO_EACH, warps=(4, 8), registers=(255, 128)),
    dropped(D, "all columns to one program of the merge, not 64", SPLIT, Edit(D, COLUMNS, "WIDEST = 128")),
    dropped(D, "32 columns to a program of the merge, not 64", SPLIT, Edit(D, COLUMNS, "WIDEST = 32")),
]
