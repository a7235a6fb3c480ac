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
# *Time: 4 to 5 hours. Before this: assignment 4, chapters 07 and 12a up to its ring. Hardware: Linux, for Triton; a GPU is not
# needed.*
#
# **How it is graded.** Each case has five checks of one point. You see three: the mended program, the run that shows, the run
# that hides. The line and the cause are checked when your work is graded. The mended program is run with other sizes and other
# clocks, and takes as long as it was meant to. Your programs may differ from your neighbour's. What counts is what you write
# down: each answer is one `return dict(…)` of texts and numbers.
#
# **Off limits:** the programs as they were before the slip and all of `fa2_lab`, except `fa2_lab.machine.asynchrony`: that is
# yours to read and to use, the first two programs run on it. Finished attention is off limits too.

# %% locked="setup"
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python

from checks import detective as check

# %% [markdown]
# ## What you return
#
# Each step is a function that returns a dict, written out as `return dict(line=…, …)`:
#
# - `line`: the wrong line as it stands there. If a line is missing or stands in the wrong place, name it or a neighbour;
# - `cause`: one of the words below;
# - `mend`: a list of up to three pairs (what stands there, what should stand there). Each first text stands in the program
#   once; it may be part of a line or several lines. At most 26 words and signs may be new; names
#   are those that the program has;
# - `shows`, `hides`: the sizes and clocks of two runs, as dicts. What you leave out stays as usual, but each of the two runs
#   has at least one number that is not.
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
# The program below is the skeleton of a warp-specialised kernel, run by the model of chapter 12a. A producer copies tiles of K
# and V into the stages of a ring. Consumers own some rows each; they wait until a stage is filled, compute, and release it.
# `Barrier(what, n)` ends a phase when n arrivals are in; `yield barrier.over(phase)` waits for the end of that phase;
# `yield job.done()` waits for a copy, a product or a softmax, which takes so many clocks. If everybody waits and nothing is
# under way, the model raises `Deadlock` and says who waits for what.
#
# With some runs this program does.

# %% locked="hanging"
# `fa2-lab course build` writes this cell, for seed 0

# %% [markdown]
# Try it here. A run of `tiles` tiles has `4 * tiles` keys.

# %%
rows = np.random.default_rng(0).standard_normal((24, 4))
usual = dict(copy=600, scores=256, softmax=512, values=256)
print("clocks:", pipeline(rows, rows[:4], rows[:4], False, 2, 2, **usual)[1])

# %% solution="hang"
def hang():
    """Line, cause, mend, a run that hangs, one of at least two tiles that does not."""
    ### BEGIN SOLUTION
    return dict(
        line='emptied = [Barrier(f"stage {s} emptied", consumers + 1) for s in range(stages)]',
        cause="arrivals",
        mend=[("consumers + 1)", "consumers)")],
        shows=dict(tiles=3, stages=2),
        hides=dict(tiles=2, stages=2),
    )

# %% test="hang" points=5
report = check.hang(hang, pipeline, seed=0)
from fa2_studio.course import keys

report += keys.named("hang", hang, seed=0)

# %% [markdown]
# ## 2. A race
#
# The same program before the first slip, with another one. It always comes to an end. Whether O is right depends on how many
# clocks the copies take. **Predict** before you try: is a fast copy more dangerous, or a slow one?

# %% locked="racing"
# `fa2-lab course build` writes this cell, for seed 0

# %% solution="race"
def race():
    """Line, cause, mend, a run that is wrong, one of at least two tiles that is right."""
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
        hides=dict(copy=700),
    )

# %% test="race" points=5
report = check.race(race, pipeline, seed=0)
from fa2_studio.course import keys

report += keys.named("race", race, seed=0)

# %% [markdown]
# ## 3. A wrong answer
#
# A Triton forward kernel for several heads, any lengths, causal or not. Tiles are 16 × 16. For some sizes its O is wrong.
# A run has `heads`, `N_q`, `N_k` and `causal`; the one that hides the slip has at least 17 queries and 17 keys.

# %% locked="ragged"
# `fa2-lab course build` writes this cell, for seed 0

# %% solution="wrong"
def wrong():
    """Line, cause, mend, sizes for which O is wrong, sizes for which it is right."""
    ### BEGIN SOLUTION
    return dict(
        line="seen = real & (col <= N_k)[None, :]",
        cause="absent keys",
        mend=[("(col <= N_k)[None, :]", "(col < N_k)[None, :]")],
        shows=dict(N_q=41, N_k=40),
        hides=dict(N_q=40, N_k=48),
    )

# %% test="wrong" points=5
report = check.wrong(wrong, kernel, seed=0)
from fa2_studio.course import keys

report += keys.named("wrong", wrong, seed=0)
