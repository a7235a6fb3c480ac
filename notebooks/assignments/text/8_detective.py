# %% [markdown]
# # Assignment 8 · Detective cases
#
# **Something is wrong with these three programs.** The first one hangs, the second one is wrong on some days, the third one is
# wrong for some sizes. Each has one slip, and each passed the tests of whoever wrote it. Find the line, name the cause, mend
# it, and prove it: one run that shows the slip, and one in which nobody would notice.
#
# | step | points |
# | --- | --- |
# | 1. `hang`: everybody waits | 5 |
# | 2. `race`: right or wrong, as the clock has it | 5 |
# | 3. `wrong`: a wrong answer at the ends | 5 |
#
# *Time: 4 to 5 hours. Before this: assignment 4, chapters 07 and 12 up to its ring. Hardware: Linux, for Triton; a GPU is not
# needed.*
#
# **How it is graded.** Each case has five checks of one point: the line, the cause, the mended program, the run that shows, the
# run that hides. The mended program is run with other sizes and other clocks, and may not be slower than it was meant to be.
# Your programs may differ from your neighbour's.
#
# **Off limits:** the programs as they were before the slip, and the checks, both in `fa2_lab.studio`. `fa2_lab.machine.asynchrony`
# is yours to read and to use: it is what the first two programs run on.

# %% locked="setup"
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python

from fa2_lab.studio.course import detective as check

# %% [markdown]
# ## What you return
#
# Each step is a function that returns a dict:
#
# - `line`: the wrong line as it stands there. If a line is missing or stands in the wrong place, name it or a neighbour;
# - `cause`: one of the words below;
# - `mend`: a list of pairs (what stands there, what should stand there). Each first text stands in the program once; it may be
#   part of a line or several lines;
# - `shows`, `hides`: the sizes and clocks of two runs, as dicts. What you leave out stays as usual.
#
# | cause | in words |
# | --- | --- |
# | `arrivals` | a barrier expects another number of arrivals than come |
# | `missing arrival` | an arrival is left out |
# | `phase` | a wait names the wrong phase |
# | `early release` | a stage is released while it is still read |
# | `early announcement` | a tile is announced before it is there |
# | `overwritten` | a stage is filled although nobody waited until it was empty |
# | `absent keys` | keys behind the end count |
# | `lost tile` | a tile that rows see is not visited |
# | `wrong head` | rows of another head are read |
# | `corner` | the causal diagonal begins in the wrong corner |
#
# Usual runs: `tiles=6`, `consumers=2`, `stages=2`, `causal=False`, `copy=600`, `scores=256`, `softmax=512`, `values=256`
# for the first two, and `heads=2`, `N_q=40`, `N_k=40`, `causal=False` for the third.

# %% [markdown]
# ## 1. A hang
#
# The program below is the skeleton of a warp-specialised kernel, run by the model of chapter 12. A producer copies tiles of K
# and V into the stages of a ring. Consumers own some rows each; they wait until a stage is filled, compute, and release it.
# `Barrier(what, n)` ends a phase when n arrivals are in; `yield barrier.over(phase)` waits for the end of that phase;
# `yield job.done()` waits for a copy, a product or a softmax, which takes so many clocks. If everybody waits and nothing is
# under way, the model raises `Deadlock` and says who waits for what.
#
# With some runs this program does.

# %% locked="hanging"
import numpy as np

from fa2_lab.machine.asynchrony import Barrier, Block


def pipeline(Q, K, V, causal, consumers, stages, copy, scores, softmax, values):
    """O of one head and the clocks it took: a producer copies tiles of 4 keys into a ring, consumers share the rows."""
    block, B_c = Block(), 4
    tiles, B_r = len(K) // B_c, len(Q) // consumers
    ring = [(np.full((B_c, Q.shape[1]), np.nan),) * 2 for _ in range(stages)]
    filled = [Barrier(f"stage {s} filled", 1) for s in range(stages)]
    emptied = [Barrier(f"stage {s} emptied", consumers + 1) for s in range(stages)]
    O = np.full(Q.shape, np.nan)

    def producer():
        for n in range(tiles):
            stage, phase = n % stages, n // stages & 1
            yield emptied[stage].over(phase ^ 1)
            block.start("copy", copy, f"tile {n}", lambda n=n, stage=stage: arrive(n, stage))

    def arrive(n, stage):
        ring[stage] = K[n * B_c : (n + 1) * B_c], V[n * B_c : (n + 1) * B_c]
        filled[stage].arrive("copy engine")

    def consumer(c):
        row = c * B_r + np.arange(B_r)
        o, l, m = np.zeros((B_r, Q.shape[1])), np.zeros(B_r), np.full(B_r, -1e30)
        for n in range(tiles):
            stage, phase, col = n % stages, n // stages & 1, n * B_c + np.arange(B_c)
            yield filled[stage].over(phase)
            if causal and col[0] > row[-1] + len(K) - len(Q):
                emptied[stage].arrive(block.actor)
                continue
            qk = block.start("tensor", scores, f"Q Kᵀ {n}", lambda stage=stage: Q[row] @ ring[stage][0].T)
            yield qk.done()
            s = np.where(causal & (col > row[:, None] + len(K) - len(Q)), -np.inf, qk.result)
            m_new = np.maximum(m, s.max(axis=1))
            p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            yield block.start("exp", softmax, f"softmax {n}").done()
            pv = block.start("tensor", values, f"P V {n}", lambda stage=stage, p=p: p @ ring[stage][1])
            yield pv.done()
            emptied[stage].arrive(block.actor)
            o, l, m = alpha[:, None] * o + pv.result, alpha * l + p.sum(axis=1), m_new
        O[row] = o / l[:, None]

    block.run({"producer": producer()} | {f"consumer {c}": consumer(c) for c in range(consumers)})
    return O, block.clock

# %% [markdown]
# Try it here. A run of `tiles` tiles has `4 * tiles` keys.

# %%
rows = np.random.default_rng(0).standard_normal((24, 4))
print("clocks:", pipeline(rows, rows[:4], rows[:4], False, 2, 2, copy=600, scores=256, softmax=512, values=256)[1])

# %% solution="hang"
def hang():
    """The line, its cause, what mends it, a run that hangs, a run with at least two tiles that does not."""
    ### BEGIN SOLUTION
    return dict(
        line='emptied = [Barrier(f"stage {s} emptied", consumers + 1) for s in range(stages)]',
        cause="arrivals",
        mend=[("consumers + 1)", "consumers)")],
        shows=dict(tiles=3, stages=2),
        hides=dict(tiles=2, stages=2),
    )
    ### END SOLUTION


# %% test="hang" points=5
report = check.hang(hang, seed=0)
report.points(5)

# %% [markdown]
# ## 2. A race
#
# The same program before the first slip, with another one. It always comes to an end. Whether O is right depends on how many
# clocks the copies take. **Predict** before you try: is a fast copy more dangerous, or a slow one?

# %% locked="racing"
import numpy as np

from fa2_lab.machine.asynchrony import Barrier, Block


def pipeline(Q, K, V, causal, consumers, stages, copy, scores, softmax, values):
    """O of one head and the clocks it took: a producer copies tiles of 4 keys into a ring, consumers share the rows."""
    block, B_c = Block(), 4
    tiles, B_r = len(K) // B_c, len(Q) // consumers
    ring = [(np.full((B_c, Q.shape[1]), np.nan),) * 2 for _ in range(stages)]
    filled = [Barrier(f"stage {s} filled", 1) for s in range(stages)]
    emptied = [Barrier(f"stage {s} emptied", consumers) for s in range(stages)]
    O = np.full(Q.shape, np.nan)

    def producer():
        for n in range(tiles):
            stage, phase = n % stages, n // stages & 1
            yield emptied[stage].over(phase ^ 1)
            block.start("copy", copy, f"tile {n}", lambda n=n, stage=stage: arrive(n, stage))

    def arrive(n, stage):
        ring[stage] = K[n * B_c : (n + 1) * B_c], V[n * B_c : (n + 1) * B_c]
        filled[stage].arrive("copy engine")

    def consumer(c):
        row = c * B_r + np.arange(B_r)
        o, l, m = np.zeros((B_r, Q.shape[1])), np.zeros(B_r), np.full(B_r, -1e30)
        for n in range(tiles):
            stage, phase, col = n % stages, n // stages & 1, n * B_c + np.arange(B_c)
            yield filled[stage].over(phase)
            if causal and col[0] > row[-1] + len(K) - len(Q):
                emptied[stage].arrive(block.actor)
                continue
            qk = block.start("tensor", scores, f"Q Kᵀ {n}", lambda stage=stage: Q[row] @ ring[stage][0].T)
            yield qk.done()
            s = np.where(causal & (col > row[:, None] + len(K) - len(Q)), -np.inf, qk.result)
            m_new = np.maximum(m, s.max(axis=1))
            p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            yield block.start("exp", softmax, f"softmax {n}").done()
            pv = block.start("tensor", values, f"P V {n}", lambda stage=stage, p=p: p @ ring[stage][1])
            emptied[stage].arrive(block.actor)
            yield pv.done()
            o, l, m = alpha[:, None] * o + pv.result, alpha * l + p.sum(axis=1), m_new
        O[row] = o / l[:, None]

    block.run({"producer": producer()} | {f"consumer {c}": consumer(c) for c in range(consumers)})
    return O, block.clock

# %% solution="race"
def race():
    """The line, its cause, what mends it, a run whose O is wrong, a run with at least two tiles whose O is right."""
    ### BEGIN SOLUTION
    return dict(
        line="emptied[stage].arrive(block.actor)",
        cause="early release",
        mend=[
            (
                "            emptied[stage].arrive(block.actor)\n            yield pv.done()\n",
                "            yield pv.done()\n            emptied[stage].arrive(block.actor)\n",
            )
        ],
        shows=dict(copy=100),
        hides=dict(copy=600),
    )
    ### END SOLUTION


# %% test="race" points=5
report = check.race(race, seed=0)
report.points(5)

# %% [markdown]
# ## 3. A wrong answer
#
# A Triton forward kernel for several heads, any lengths, causal or not. Tiles are 16 × 16. For some sizes its O is wrong.
# A run has `heads`, `N_q`, `N_k` and `causal`; the one that hides the slip has at least 17 queries and 17 keys.

# %% locked="ragged"
import triton
import triton.language as tl


@triton.jit
def kernel(Q, K, V, O, L, N_q, N_k, tau, CAUSAL: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr):
    """O and L of several heads, one after the other in memory: program (i, h) has row block i of head h."""
    first, head, e = tl.program_id(0) * B_r, tl.program_id(1), tl.arange(0, d)
    row = first + tl.arange(0, B_r)
    at_row, real = (head * N_q + row[:, None]) * d + e[None, :], (row < N_q)[:, None]
    q = tl.load(Q + at_row, mask=real, other=0.0)
    m = tl.full((B_r,), -1e30, tl.float32)
    l = tl.zeros((B_r,), tl.float32)
    o = tl.zeros((B_r, d), tl.float32)
    end = N_k
    if CAUSAL:
        end = tl.minimum(N_k, tl.maximum(0, first + B_r + N_k - N_q))
    for j in range(0, end, B_c):
        col = j + tl.arange(0, B_c)
        at_col, there = (head * N_k + col[:, None]) * d + e[None, :], (col < N_k)[:, None]
        k = tl.load(K + at_col, mask=there, other=0.0)
        v = tl.load(V + at_col, mask=there, other=0.0)
        seen = real & (col <= N_k)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + N_k - N_q)
        s = tl.where(seen, tau * tl.dot(q, k.T, input_precision="ieee"), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = alpha * l + tl.sum(p, 1)
        o = alpha[:, None] * o + tl.dot(p, v, input_precision="ieee")
        m = m_new
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    tl.store(O + at_row, o / l[:, None], mask=real)
    tl.store(L + head * N_q + row, tl.where(empty, float("-inf"), m + tl.log(l)), mask=row < N_q)

# %% solution="wrong"
def wrong():
    """The line, its cause, what mends it, sizes for which O is wrong, sizes for which it is right."""
    ### BEGIN SOLUTION
    return dict(
        line="seen = real & (col <= N_k)[None, :]",
        cause="absent keys",
        mend=[("(col <= N_k)[None, :]", "(col < N_k)[None, :]")],
        shows=dict(N_q=40, N_k=40),
        hides=dict(N_q=40, N_k=48),
    )
    ### END SOLUTION


# %% test="wrong" points=5
report = check.wrong(wrong, seed=0)
report.points(5)
