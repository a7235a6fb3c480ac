"""What was tried on decode, as edits of it: `bench ideas` measures what each idea is worth today."""

from __future__ import annotations

from fa2_lab.studio.bench.problem import Problem
from fa2_lab.studio.bench.variants import Edit, dropped, kept


def caches(*shapes: tuple[int, int], d: int = 128) -> tuple[Problem, ...]:
    """One query for 32 heads, and 8 K/V heads: so many sequences, and keys of each."""
    return tuple(Problem(batch, 32, 8, 1, N, d, False) for batch, N in shapes)


SPLIT = caches((1, 8192), (1, 65536), (8, 16384))  # heads for 16 SMs each, and for two
ONE_EACH, TWO_EACH = caches((16, 8192)), caches((32, 8192))  # for nearly every SM a head, and two
ALL = SPLIT + ONE_EACH + TWO_EACH
SHARES = caches((12, 8192))  # no team fills the SMs
NARROW = caches((1, 65536), (8, 16384), d=64)
SHARES_64 = caches((5, 16384), d=64)

D, RULES = "decode", "splits"
WHOLE = "return heads > 0 and grid.efficiency(heads, slots) >= WELL_FILLED"
PAYS = "return size if pays else 0"
TWO = Edit(D, "team == 1 or (team and d_pad == 128 and Q.shape[2] == 1)", "team == 1")
THREE = "elif d_pad == 64 and not splits.whole(SMs * held, equal):"
EARLY = "kind = Early if early(Q.device) else launch.Blocks"
MASK = "if MASKED and (not FEW or j + B_c > all_see):"
MASKED = "masked = N_k % blocks.B_c != 0 or (causal and N_q > 1)"
LATE_Q = "tl.where(j < last, q_i, 0.0) if FEW and LATE else q_i"
NOT_LATE = "B_r, B_c, EARLY, False, MASKED, UPCAST)"
ONE_HEAD = "    attend(Q, K, V, O, L, None,"
A_LOOP = f"    t = w\n    while t < team:\n        t += team\n    {ONE_HEAD}"  # once
SUMS = (
    Edit(D, "tl.zeros((B_r, B_c) if FEW else (B_r,), tl.float32)", "tl.zeros((B_r,), tl.float32)"),
    Edit(D, "alpha[:, None] * l_i + p_ij if FEW else alpha * l_i", "alpha * l_i"),
    Edit(D, "tl.sum(l_i, 1) if FEW else l_i", "l_i"),
)
COLUMNS = "WIDEST = 32"

DECODE = [
    kept(D, "whole heads where they fill the SMs, no merge", ONE_EACH + TWO_EACH, Edit(RULES, WHOLE, "return False")),
    kept(D, "teams that read a head's tiles in turn", SPLIT, Edit(RULES, PAYS, "return 0")),
    kept(D, "one program on an SM with three tiles on their way, not two with two", SPLIT, TWO),
    kept(D, "three programs on an SM, half as many keys a tile", NARROW, Edit(D, THREE, "elif False:")),
    dropped(D, "three programs on an SM, half as many keys a tile", SPLIT, TWO, Edit(D, THREE, "elif True:")),
    kept(D, "168 registers a thread, or there is no room for three", SHARES_64, registers=(168, 255)),
    kept(D, "the merge launched early", SPLIT, Edit(D, EARLY, "kind = launch.Blocks")),
    kept(D, "no mask where all see all keys, and tiles are whole", ALL, Edit(D, MASKED, "masked = True")),
    kept(D, "a mask in the last tile alone", SHARES, Edit(D, MASK, "if MASKED:")),
    kept(D, "l summed by column, the columns added at the end", ALL, *SUMS),
    kept(D, "the first keys asked for before Q has come", SHARES, Edit(D, LATE_Q, "q_i")),
    dropped(D, "the first keys asked for before Q has come", ALL, Edit(D, NOT_LATE, NOT_LATE.replace("False", "True"))),
    kept(D, "a team's program has one head, and no loop over heads", ALL, Edit(D, ONE_HEAD, A_LOOP)),
    dropped(D, "four tiles on their way, not three", SPLIT + ONE_EACH, stages=(4, 5)),
    dropped(D, "six half tiles on their way, not four whole", TWO_EACH, B_c=(64, 32), stages=(3, 4)),
    dropped(D, "four half tiles on their way, not four whole", TWO_EACH, B_c=(64, 32)),
    dropped(D, "8 warps, not 4", SPLIT + ONE_EACH, warps=(4, 8)),
    dropped(D, "8 warps, not 4", TWO_EACH, warps=(4, 8), registers=(255, 128)),
    kept(D, "32 columns to a program of the merge, not 64", SPLIT, Edit(D, COLUMNS, "WIDEST = 64")),
    dropped(D, "16 columns to a program of the merge, not 32", SPLIT, Edit(D, COLUMNS, "WIDEST = 16")),
]
