"""What was tried on the Hopper kernels, as edits of them: `bench ideas` measures what each idea is worth today.

Ideas for decode are in ideas_decode.py.
"""

from __future__ import annotations

from fa2_lab.studio.bench.ideas_decode import DECODE
from fa2_lab.studio.bench.problem import Problem
from fa2_lab.studio.bench.variants import Edit, dropped, kept


def at(d: int, causal: bool, *lengths: int) -> tuple[Problem, ...]:
    """Problems of the paper's grid."""
    return tuple(Problem.square(N, d, causal) for N in lengths)


def both(*lengths: int, causal: tuple[bool, ...] = (False, True)) -> tuple[Problem, ...]:
    """d 64 and 128."""
    return sum((at(d, mask, *lengths) for d in (64, 128) for mask in causal), ())


FULL, CAUSAL = False, True
D128 = at(128, FULL, 4096) + at(128, CAUSAL, 4096)
ONE_KEY_HEAD, FOUR_KEY_HEADS = (
    tuple(Problem(2, 32, heads, 4096, 4096, 128, causal) for causal in (FULL, CAUSAL)) for heads in (1, 4)
)
ONE_ROUND = tuple(Problem(1, heads, heads, 16384 // heads, 16384 // heads, 128, FULL) for heads in (4, 8, 16))
ONE_ROUND_64 = tuple(Problem(1, heads, heads, 16384 // heads, 16384 // heads, 64, FULL) for heads in (8, 16))
FEW_ROWS = tuple(Problem(1, 1, 1, 8192, 8192, d, causal) for d in (64, 128) for causal in (FULL, CAUSAL))
ONE_HEAD = tuple(Problem(1, 1, 1, N, N, d, CAUSAL) for d in (64, 128) for N in (16384, 32768))

# Forward ------------------------------------------------------------------------------------------------------

F = "forward"
LATE = "        t = gl.num_programs(0) + draw(counter)  #"
PLACED = "        block, head = work.place(t)\n"
DEALT_ROWS = Edit(F, LATE, "        t += gl.num_programs(0)  #")
EARLY = (
    Edit(F, LATE, "        t = t_next  #"),
    Edit(F, PLACED, "        t_next = gl.num_programs(0) + draw(counter)\n" + PLACED),
)
FILLS = """            pipes.k.fill(n + j, K, batch, kv_head, (T_c - 1 - j) * heads.B_c)
            pipes.v.fill(n + j - 1, V, batch, kv_head, (T_c - j) * heads.B_c)
"""
SOONER = "        last = gl.maximum(T_c - 2, 1)\n        for j in range(1, last):\n" + FILLS + LATE
TWO_SOONER = (
    Edit(F, LATE, "        #"),
    Edit(F, "        for j in range(1, T_c):\n", SOONER + "\n        for j in range(last, T_c):\n"),
)
LAST_ROWS_FIRST = "i = gl.cdiv(self.N_q, ROWS * self.CONSUMERS) - 1 - i"
FEW_PROGRAMS = "Recipe((min(multiprocessors(device), row_blocks), 1, 1)"
WAIT_FOR_S = "s = warpgroup_mma_wait(1, deps=[s])\n"
WAIT_FOR_PV = "    o, p = warpgroup_mma_wait(0, deps=[o, p])\n    pipes.k.release(n)"
TWICE_Q = "CONSUMERS * (2 if O_APART else 1)"
COPY_O = "    tma.async_copy_shared_to_global(O, [batch, head, row, 0], o_tile)"
AT_ONCE = "(32 if one >= launch.MiB else 16)"
HEAD_BY_HEAD = "    if not causal:\n        return 1\n"
TREE = "gl.max(gl.max(fours, 1), 1)"
LANES = "l = alpha * l + gl.sum(gl.sum(p, 3), 1)"
JUMP = "gl.inline_asm_elementwise(multiply_unless_one(N), in_place(N), [x, a], gl.float32, True, N)"
IN_PAIRS = "    if dtype == gl.bfloat16:\n"
BITS = "(col & ~6) < seen[:, None] - (col & 6)"
TAKE_Q = "        q = pipes.q.take(slot)\n"
HOLD_Q = """        q = q.load(gl.DotOperandLayout(0, accumulator(heads.B_c), 2))
        pipes.q.release(slot)
"""
STEP = "        o, m, l, p = step(c, n + j, o, m, l, p, q, seen, T_c - 1 - j, full, pipes, scales, heads.CAUSAL)\n"
SECOND = STEP.replace("n + j", "n + j + 1").replace("T_c - 1 - j", "T_c - 2 - j")
LAST = STEP.replace("n + j", "n + T_c - 1").replace("T_c - 1 - j", "0")
V_RING = "v = ring(V, SLOTS, CONSUMERS, RELEASED=False)"
TWO_RELEASES = (
    Edit(F, V_RING, "v = ring(V, SLOTS, CONSUMERS)"),
    Edit(F, "        pipes.k.wait_for_room(n)\n", ""),
    Edit(F, "    pipes.v.take(n)\n", "    pipes.v.take(n)\n    pipes.v.release(n)\n"),
    Edit(F, "    return o, m, l\n", "    pipes.v.release(n + T_c - 1)\n    return o, m, l\n"),
    Edit(F, WAIT_FOR_S, WAIT_FOR_S + "    pipes.k.release(n)\n"),
    Edit(F, "    pipes.k.release(n)  # and V's tile n - 1", "    pipes.v.release(n - 1)"),
)
TALL = dict(consumers=(2, 3), slots=(3, 4), lag=(False, True), take_turns=(True, False))
IN_PLACE = dict(O_apart=(True, False), slots=(2, 3))
WIDE = dict(B_c=(128, 64), consumers=(2, 3), slots=(2, 5), O_apart=(True, False))
NARROW = {name: was_becomes[::-1] for name, was_becomes in WIDE.items()}

FORWARD = [
    kept(F, "row blocks drawn as tickets, not dealt", both(1024, 16384, causal=(CAUSAL,)), DEALT_ROWS),
    kept(F, "the next ticket drawn late", both(1024, 16384, causal=(CAUSAL,)), *EARLY),
    kept(F, "the next ticket drawn late, one head", ONE_HEAD, *EARLY),
    dropped(F, "the next ticket drawn two tiles sooner", both(1024, 16384, causal=(CAUSAL,)), *TWO_SOONER),
    kept(F, "heaviest row blocks first", both(4096, 16384, causal=(CAUSAL,)), Edit("work", LAST_ROWS_FIRST, "i = i")),
    kept(
        F, "programs that stay on their SM", both(1024, 4096), Edit("host", FEW_PROGRAMS, "Recipe((row_blocks, 1, 1)")
    ),
    kept(
        F,
        "P V of the tile before under the exponentials",
        both(4096),
        Edit(F, WAIT_FOR_S, "s, o, p = warpgroup_mma_wait(0, deps=[s, o, p])\n"),
    ),
    kept(F, "three consumers, not two", at(64, FULL, 1024, 4096, 16384), consumers=(3, 2)),
    kept(F, "three consumers, not two", at(64, CAUSAL, 1024, 4096, 16384), consumers=(3, 2)),
    dropped(F, "three consumers, not two", at(64, FULL, 512), **TALL),
    kept(F, "one consumer, not two, where rows are few", FEW_ROWS, consumers=(1, 2)),
    dropped(F, "O waits in Q's place, three slots: one row block for an SM", ONE_ROUND, **IN_PLACE),
    kept(F, "two consumers, not three: one row block for an SM", ONE_ROUND_64, **TALL),
    kept(F, "turns on the tensor cores: one row block for an SM", ONE_ROUND_64, take_turns=(True, False)),
    kept(F, "turns on the tensor cores", at(64, FULL, 512) + at(64, CAUSAL, 4096, 16384), take_turns=(True, False)),
    dropped(F, "turns on the tensor cores", at(64, FULL, 4096) + D128, take_turns=(False, True)),
    kept(F, "192 rows a block, tiles of 64 keys", at(128, FULL, 4096, 16384), **NARROW),
    dropped(F, "192 rows a block, tiles of 64 keys", at(128, FULL, 1024) + at(128, CAUSAL, 4096, 16384), **WIDE),
    kept(F, "m may lag by 8 behind the maximum", both(4096, 16384) + at(64, CAUSAL, 1024), lag=(True, False)),
    dropped(F, "m may lag by 8 behind the maximum", at(64, FULL, 512), lag=(False, True)),
    kept(F, "o shrinks only where some alpha is not 1", both(4096), Edit("softmax", JUMP, "x * a")),
    kept(
        F,
        "l summed by each lane, the four added at the end",
        both(4096),
        Edit("softmax", LANES, "l = alpha * l + gl.sum(gl.sum(gl.sum(p, 3), 1), 1)[:, None]"),
        Edit(F, "    l = gl.sum(l, 1)", "    l = gl.max(l, 1)"),
    ),
    kept(F, "maxima as a tree, not as a chain", both(4096), Edit("softmax", TREE, "gl.max(pairs, 1)")),
    kept(
        F,
        "p to 16 bits in pairs, by one instruction",
        both(4096),
        Edit("softmax", IN_PAIRS, "    if True:\n        return p.to(dtype)\n    elif dtype == gl.bfloat16:\n"),
    ),
    kept(
        F,
        "the causal mask as a test of bits",
        both(4096, causal=(CAUSAL,)),
        Edit("softmax", BITS, "col < seen[:, None]"),
    ),
    kept(F, "a mask on the diagonal alone", both(1024, 4096, causal=(CAUSAL,)), Edit(F, "if j >= full:", "if True:")),
    kept(F, "two slots of Q for each consumer", both(1024), Edit(F, TWICE_Q, "CONSUMERS")),
    kept(F, "O copied under the next row block", both(1024), Edit(F, COPY_O, f"{COPY_O}\n    tma.store_wait(0)")),
    kept(F, "one release for a tile of V and the next of K", both(1024, 4096), *TWO_RELEASES),
    kept(F, "32 MiB of K and V in use at once, not 16", at(128, CAUSAL, 4096, 16384), Edit("host", AT_ONCE, "16")),
    dropped(F, "24 MiB of K and V in use at once, not 32", at(128, CAUSAL, 16384), Edit("host", AT_ONCE, "24")),
    kept(
        F, "without a mask one head after the other", both(4096, 16384, causal=(FULL,)), Edit("host", HEAD_BY_HEAD, "")
    ),
    dropped(F, "O waits in Q's place, three slots of K and V", at(128, CAUSAL, 1024, 4096), **IN_PLACE),
    kept(F, "four slots of K and V, not three", at(64, FULL, 4096) + at(64, CAUSAL, 4096), slots=(4, 3)),
    kept(F, "tiles of 64 keys, not 128", at(64, CAUSAL, 1024), B_c=(64, 128), slots=(8, 4)),
    kept(F, "tiles of 64 keys, not 128", at(128, CAUSAL, 512), B_c=(64, 128), slots=(4, 2)),
    dropped(F, "tiles of 64 keys, not 128", at(64, CAUSAL, 4096), B_c=(128, 64), slots=(4, 8)),
    dropped(F, "tiles of 64 keys, not 128", at(128, CAUSAL, 1024, 4096), B_c=(128, 64), slots=(2, 4)),
    dropped(
        F,
        "exponentials before the wait for P V",
        both(4096),
        Edit(
            F,
            WAIT_FOR_PV,
            "    if n < 0:  # never, but nothing moves across it\n        pipes.k.take(0)\n" + WAIT_FOR_PV,
        ),
    ),
    dropped(
        F,
        "Q in registers, not in shared memory",
        at(128, CAUSAL, 1024, 4096),
        Edit(F, TAKE_Q, TAKE_Q + HOLD_Q),
        Edit(F, "if mine == 0 or not pipes.O_APART:", "if not pipes.O_APART:"),
        Edit(F, "if pipes.O_APART:  # the next", "if False:  # the next"),
    ),
    dropped(
        F,
        "two tiles in one pass of the loop",
        both(4096),
        Edit(F, "for j in range(1, T_c):  #", "for j in range(1, T_c - 1, 2):  #"),
        Edit(F, STEP, STEP + SECOND + "    if T_c % 2 == 0:\n" + LAST),
    ),
]

# Backward -----------------------------------------------------------------------------------------------------

B, PRODUCTS, PLAN = "backward", "products", "host_backward"
PLACE = "block, lot = work.place(t)\n"
DEALT_COLUMNS = Edit(B, LATE, DEALT_ROWS.new)
EARLY_COLUMNS = (
    Edit(B, LATE, EARLY[0].new),
    Edit(B, "        " + PLACE, EARLY[1].new.replace(PLACED, "        " + PLACE)),
)
MANY_STEPS = "min((2**n for n in range(9) if 2**n <= steps), key=time)"
LOTS = "(32 if one > launch.MiB else 16)"
FULL_LOTS = "8 * launch.MiB // one"
FOR_S = """    if FIRST:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        dq = start_dq(c, n - 1, pipes)
        s = warpgroup_mma_wait(1, deps=[s])
        if pipes.DK_LATE:
            dk = finish_dk(1, n - 1, dk, ds, pipes)
"""
BESIDE_DP = FOR_S.replace("(1, ", "(2, ").replace("(0, ", "(1, ")
ALONE = FOR_S.replace("(1, ", "(0, ").replace("        dq = start_dq(c, n - 1, pipes)\n", "")
TAKE_DQ = "    if not FIRST:\n        if pipes.DV_LATE"
DV_DONE = "dv, p_half = warpgroup_mma_wait(0, deps=[dv, p_half])\n"
ALL_DONE = "dv, p_half, dk, ds = warpgroup_mma_wait(0, deps=[dv, p_half, dk, ds])\n"
DQ_TOO = ("dq = start_dq(c, n, pipes)\n        dq, ", "        add_dq(c, n, dq, sums, pipes)\n")
START_S = "    s = start_scores(c, n, q, seen_from, full, pipes, MASKED)\n"
START_DP = "start_dp(n, v, held, do, pipes)"
FOR_DP = f"    dp = warpgroup_mma_wait(0, deps=[{START_DP}])\n"
START_DV = "    dv, p_half = start_dv(dv, p, do)\n"
ZEROS = "gl.zeros([COLS, pipes.B_r], gl.float32, accumulator(pipes.B_r))"
P_FIRST = "if pipes.DV_LATE and not MASKED:"
SEEN = "(row & ~6) >= (seen_from - first)[:, None] - (row & 6)"

BACKWARD = [
    kept(B, "column blocks drawn as tickets, not dealt", both(1024, 16384, causal=(CAUSAL,)), DEALT_COLUMNS),
    kept(B, "the next ticket drawn late", both(1024, 16384, causal=(CAUSAL,)) + ONE_HEAD, *EARLY_COLUMNS),
    kept(
        B,
        "heaviest column blocks first",
        both(4096, 16384, causal=(CAUSAL,)),
        Edit(B, PLACE, PLACE + "        block = work.blocks - 1 - block\n"),
    ),
    kept(
        B,
        "programs that stay on their SM",
        both(1024, 4096),
        Edit(PLAN, "grid = min(host.multiprocessors(device), column_blocks * parts)", "grid = column_blocks * parts"),
    ),
    kept(
        B,
        "dQ under the next S, not in its own step",
        both(4096, 16384),
        Edit(B, FOR_S, ALONE),
        Edit(B, TAKE_DQ, TAKE_DQ.replace("not FIRST", "False")),
        *(Edit(B, done, done.replace("deps=[", "deps=[dq, ").join(DQ_TOO)) for done in (DV_DONE, ALL_DONE)),
        Edit(B, "        dq = warpgroup_mma_wait(0, deps=[start_dq(c, n - 1, pipes)])\n", ""),
        Edit(B, "        add_dq(c, n - 1, dq, sums, pipes)\n        give", "        give"),
    ),
    kept(
        B,
        "dK under the next S, not in its own step",
        at(64, CAUSAL, 1024, 4096, 16384) + at(128, CAUSAL, 4096, 16384),
        dk_late=(True, False),
    ),
    dropped(
        B,
        "dK under the next S, not in its own step",
        at(64, FULL, 4096) + at(128, CAUSAL, 1024),
        dk_late=(False, True),
    ),
    dropped(
        B,
        "dK under the next S, and no V in registers",
        at(128, FULL, 4096),
        dk_late=(False, True),
        hold_v=(True, False),
    ),
    kept(
        B,
        "a second place for K",
        both(1024, 4096),
        Edit(B, "k = ring(K, 2, CONSUMERS)", "k = ring(K, 1, CONSUMERS)"),
        Edit("columns", "* 4 + 2), r & 1)", "* 4 + 2), 0)"),
    ),
    kept(B, "dV's product after dS", at(64, FULL, 4096) + at(64, CAUSAL, 4096), dv_late=(True, False)),
    dropped(B, "dV's product after dS", D128, dv_late=(False, True)),
    kept(
        B,
        "dV's product before dQ is handed over",
        D128,
        Edit(B, "    if not pipes.DV_LATE:\n    " + START_DV, ""),
        Edit(B, "0 if pipes.DV_LATE else 1", "0"),
        Edit(B, FOR_DP, f"    dp = {START_DP}\n{START_DV}    dp = warpgroup_mma_wait(1, deps=[dp])\n"),
    ),
    kept(B, "half of V in registers", at(128, FULL, 1024, 4096, 16384), hold_v=(True, False)),
    dropped(B, "half of V in registers", at(128, CAUSAL, 1024, 4096), hold_v=(False, True)),
    kept(B, "column blocks divided among programs", ONE_KEY_HEAD + FOUR_KEY_HEADS, Edit(PLAN, MANY_STEPS, "1")),
    kept(
        B,
        "S begins at −L/τ, dP at −D",
        both(4096),
        Edit(PRODUCTS, "start = spread(pipes.rows.start(n, 0))", f"start = {ZEROS}"),
        Edit(B, "gl.exp2(s * scale)", "gl.exp2((s + pipes.rows.start(n, 0)) * scale)"),
        Edit(PRODUCTS, "dp = spread(pipes.rows.start(n, 1))", f"dp = {ZEROS}"),
        Edit(B, "p * dp", "p * (dp + pipes.rows.start(n, 1))"),
    ),
    kept(B, "P done before dQ is waited for", at(64, FULL, 1024, 4096), Edit(B, P_FIRST, "if False:")),
    dropped(B, "P done before dQ is waited for", at(64, CAUSAL, 4096), Edit(B, P_FIRST, "if True:")),
    kept(
        B,
        "the causal mask as a test of bits",
        both(4096, causal=(CAUSAL,)),
        Edit(PRODUCTS, SEEN, "row >= (seen_from - first)[:, None]"),
    ),
    kept(
        B,
        "a mask on the diagonal alone",
        both(1024, 4096, causal=(CAUSAL,)),
        Edit(PRODUCTS, "if first < full:", "if True:"),
    ),
    kept(B, "32 MiB of heads at once, not 16", at(128, CAUSAL, 4096, 16384), Edit(PLAN, LOTS, "16")),
    kept(
        B,
        "8 MiB of heads at once, not 16",
        both(512, 1024, 4096, causal=(FULL,)),
        Edit(PLAN, FULL_LOTS, "16 * launch.MiB // one"),
    ),
    dropped(
        B, "32 MiB of heads at once, not 8", both(1024, causal=(FULL,)), Edit(PLAN, FULL_LOTS, "32 * launch.MiB // one")
    ),
    dropped(
        B, "4 MiB of heads at once, not 8", both(4096, causal=(FULL,)), Edit(PLAN, FULL_LOTS, "4 * launch.MiB // one")
    ),
    dropped(
        B,
        "column blocks start at different rows",
        both(4096),
        Edit(B, "i = first + m % seen", "i = first + (m + 7 * block) % seen"),
    ),
    dropped(
        B,
        "S and dP started together",
        both(4096),
        Edit(B, START_S, f"{START_S}    dp = {START_DP}\n"),
        Edit(B, FOR_S, BESIDE_DP),
        Edit(B, f"deps=[{START_DP}]", "deps=[dp]"),
        Edit(PLAN, "hold_v=not (causal or ragged)", "hold_v=False"),
    ),
    dropped(
        B,
        "P kept in 16 bits alone",
        D128,
        Edit(B, "gl.exp2(s * scale)", "gl.exp2(s * scale).to(pipes.ds.dtype)"),
        Edit(B, "p * dp", "p.to(gl.float32) * dp"),
    ),
]

# The host -----------------------------------------------------------------------------------------------------

AGAIN = "relaunch(compiled, self.grid, stream, described, others, self.scalars)"
HOST = [
    kept("host", "launches written down", (Problem(1, 8, 8, 256, 256, 128, FULL),), Edit("host", AGAIN, "None")),
]

IDEAS = [*FORWARD, *BACKWARD, *DECODE, *HOST]
