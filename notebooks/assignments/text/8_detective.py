# %% [markdown]
# # Assignment 8 · Detective cases
#
# **Something is wrong with these three programs.** The first one hangs, the second one sometimes gives a wrong answer,
# and the third one does so for some sizes. Each program contains one mistake, although each passed its author's tests.
# Find the line, name the cause and repair the program. Then prove your answer with two runs, one that shows the mistake
# and one that hides it.
#
# | step | points |
# | --- | --- |
# | 1. `hang`: all threads wait | 5 |
# | 2. `race`: right or wrong, depending on the clocks | 5 |
# | 3. `wrong`: a wrong answer at the ends | 5 |
#
# *Time: 4 to 5 hours. Before this: assignment 4, chapters 07 and 12a up to its ring. Hardware: Linux, for Triton; a GPU
# is not needed.*
#
# **How it is graded.** Each case has five checks of one point. You see three of them, for the repaired program, the run
# that shows the mistake and the run that hides it. Grading also checks the line and the cause. It runs the repaired
# program with other sizes and other clocks, and the program has to take as long as it was meant to. Your programs may
# differ from those of other students. Only what you write down counts, so each answer is one `return dict(…)` with
# strings and numbers.
#
# **Off limits:** the original programs without the mistakes, and all of `fa2_lab` except `fa2_lab.machine.asynchrony`.
# You may read and use that module, because the first two programs run on it. Ready-made attention is off limits as
# well.

# %% locked="setup"
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python

from checks import detective as check

# %% [markdown]
# ## What you return
#
# Each step is a function that returns a dict, written out as `return dict(line=…, …)`:
#
# - `line` is the wrong line, exactly as it appears in the program. If a line is in the wrong place, give that line. If
#   a line is missing, give a line next to the gap.
# - `cause` is one of the words below.
# - `mend` is a list of up to three pairs (old text, new text). Each old text must occur exactly once in the program. It
#   can be part of a line or span several lines. Your new texts may add at most 26 words and symbols in all, and you may
#   use only names that the program already has.
# - `shows` and `hides` are dicts with the sizes and clocks of two runs. Whatever you leave out keeps its default value,
#   but each of the two runs must change at least one number.
#
# | cause | in words |
# | --- | --- |
# | `arrivals` | a barrier expects a different number of arrivals than it gets |
# | `missing arrival` | an arrival is missing |
# | `phase` | a wait is for the wrong phase |
# | `early release` | a stage is released while it is still being read |
# | `early announcement` | a tile is announced before it has arrived |
# | `overwritten` | a stage is filled, although the producer did not wait until it was empty |
# | `absent keys` | keys past the end count |
# | `lost tile` | a tile that rows see is not visited |
# | `wrong head` | rows of another head are read |
# | `corner` | the causal diagonal is aligned to the wrong corner |
#
# By default, the first two programs run with `tiles=6`, `consumers=2`, `stages=2`, `causal=False`, `copy=600`,
# `scores=256`, `softmax=512`, `values=256`, and the third program runs with `heads=2`, `N_q=40`, `N_k=40`,
# `causal=False`.
# %% [markdown]
# ## 1. A hang
#
# The program below is the skeleton of a warp-specialised kernel and runs on the model from chapter 12a. A producer
# copies tiles of K and V into the stages of a ring. Each consumer owns some rows. For each tile, it waits until a stage
# is filled, computes, and releases the stage. `Barrier(what, n)` ends a phase after n arrivals. `yield
# barrier.over(phase)` waits for the end of that phase, and `yield job.done()` waits for a copy, a product or a softmax,
# each of which takes a number of clocks. If all actors are waiting and no job is running, the model raises `Deadlock`
# and reports what each actor is waiting for.
#
# In some runs, this program ends in such a deadlock.

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
    """Return line, cause, mend, a run that hangs, and a run of at least two tiles that does not."""
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
from fa2_studio.course import planted_bugs

report += planted_bugs.check_naming("hang", hang, seed=0)

# %% [markdown]
# ## 2. A race
#
# This is the same program without the first mistake, but with another one. Every run comes to an end. Whether O is
# right depends on how many clocks the copies take. **Predict** before you try: is a fast copy more dangerous, or a slow
# one?

# %% locked="racing"
# `fa2-lab course build` writes this cell, for seed 0

# %% solution="race"
def race():
    """Return line, cause, mend, a run that is wrong, and a run of at least two tiles that is right."""
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
from fa2_studio.course import planted_bugs

report += planted_bugs.check_naming("race", race, seed=0)

# %% [markdown]
# ## 3. A wrong answer
#
# This is a Triton forward kernel for several heads and any lengths, causal or not. Tiles are 16 × 16. For some sizes,
# its O is wrong. The repaired program has to store the right O and the right L. A run has `heads`, `N_q`, `N_k` and
# `causal`, and the run that hides the mistake must have at least 17 queries and 17 keys.

# %% locked="ragged"
# `fa2-lab course build` writes this cell, for seed 0

# %% solution="wrong"
def wrong():
    """Return line, cause, mend, sizes for which O is wrong, and sizes for which it is right."""
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
from fa2_studio.course import planted_bugs

report += planted_bugs.check_naming("wrong", wrong, seed=0)
