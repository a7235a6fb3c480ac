# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)

# %% [markdown]
# # 00 · The map
#
# **What will we build, and what can this machine run?**
#
# Attention is four lines of NumPy. FlashAttention-2 computes the same numbers, and a good deal of ingenuity goes into
# doing it with less traffic, less memory and less waiting. This book takes the four lines apart and puts them together
# again, one change at a time, until they are a GPU kernel, and after every change it asks two questions: is the answer
# still the same, and what became smaller?
#
# After this notebook you can
#
# - name the steps from four lines of NumPy to FlashAttention-2, and say what each of them saves,
# - go from any line of the papers' algorithms to the code that computes it,
# - say what this machine can run, and how to read the notebooks that follow.
#
# *Time: 20 minutes. Hardware: any laptop, NumPy alone. Before this: matrix multiplication, and softmax by name.*

# %%
import re
from importlib.util import find_spec

import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import io
from fa2_lab.paper import ALGORITHMS, LINES, PACKAGE, where
from fa2_lab.plots import ladder
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.studio.book.chapters import CHAPTERS
from fa2_lab.studio.book.verdicts import close, verdict
from fa2_lab.tiles import Tiling
from fa2_lab.trace import Trace

# %% [markdown]
# ## What does attention compute?
#
# There are N tokens. Each has a query (what it is looking for), a key (what it can be found by) and a value (what it
# hands over), d numbers each. Every query is compared with every key; the better a key matches, the more its value
# counts; the output is the weighted mean of the values.
#
# **Predict.** The first query below is all zeros, so that it matches every key equally. What is its output?

# %%
def attention(Q, K, V):  # (N, d) each: one token to a row
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (N, N) scores: how well query i matches key j
    E = np.exp(S)  # (N, N) every score made positive
    P = E / E.sum(axis=1, keepdims=True)  # (N, N) weights: each row sums to 1
    return P @ V  # (N, d) for each query, the mean of all values with these weights


Q = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0], [5.0, 5.0]])
K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
V = np.array([[8.0, 0.0], [0.0, 4.0], [4.0, 0.0], [0.0, 8.0]])
print("output of the first query:", attention(Q, K, V)[0].tolist())

# %% [markdown]
# <details><summary>Why</summary>
#
# All its scores are 0, so all weights are 1/4, and the output is the plain mean of the four values: (8 + 0 + 4 + 0) / 4
# = 3 and (0 + 4 + 0 + 8) / 4 = 3.
# </details>
#
# The steps from E to P are the softmax. Chapter 01 starts here, and looks at each of the four lines closely.
#
# **Takeaway.** Attention is a weighted mean of values, and softmax makes the weights.

# %% [markdown]
# ## How do these notebooks work?
#
# As above: a question marked **Predict**, a few lines of code, an answer folded below, and the **Takeaway** in one
# sentence. Answer before you run the cell, on paper if you can: a wrong guess is worth more than a right answer that was
# read. Exercises have hints and answers, folded as well. The last section checks what the notebook claimed: a line
# beginning with "ok" for each claim, and an error that stops the notebook if one does not hold.
#
# **Predict.** Below, the four lines with one slip: E is divided by the sums of its columns. The shape is right and no
# number is infinite. Does the check notice?

# %%
def by_columns(Q, K, V):
    E = np.exp(Q @ K.T / np.sqrt(Q.shape[1]))
    return E / E.sum(axis=0, keepdims=True) @ V  # should be axis=1


O, wrong = attention(Q, K, V), by_columns(Q, K, V)
print("shape right:", wrong.shape == O.shape, " finite:", bool(np.isfinite(wrong).all()))
try:
    verdict("weights by columns = attention", close(wrong, O))
except AssertionError as complaint:
    print("the notebook would stop here:", complaint)

# %% [markdown]
# <details><summary>What a check is worth</summary>
#
# As much as the faults it catches. A check of shapes would have let this one through. The project plants faults in its
# own code and asks whether its tests see them; in the exercises you do the same.
# </details>
#
# **Takeaway.** A check that has never failed has not been tested.

# %% [markdown]
# ## Where is the difficulty?
#
# Q, K, V and the output O have N rows and d columns. Between them stand S and P, with N rows and N columns. A GPU has
# two places for numbers: its main memory (HBM, "high-bandwidth memory"), which is large and far away, and a little
# memory on the chip, right beside the processors. What does not fit on the chip goes out to HBM and comes back.
#
# **Predict.** A text of 8,192 tokens, d = 64: how many times larger is S than Q?

# %%
N, d = 8192, 64
print(f"Q, K, V, O: {N * d:>11,} numbers each")
print(f"S, P:       {N * N:>11,} numbers each, {N * N // (N * d)} times as many")
print(f"S alone, 2 bytes a number: {2 * N * N // 2**20} MiB")

# %% [markdown]
# <details><summary>Why that hurts</summary>
#
# S is N / d = 128 times as large as Q, and it is only a step on the way. The memory on the chip that one group of
# processors shares holds some 200 KiB, so S and P travel, and the processors wait for them. A model does this dozens of
# times side by side (each time is a "head") in each of dozens of layers. With twice as many tokens there are four times
# as many scores.
# </details>
#
# **Takeaway.** What goes in and out grows with N; what stands between grows with N², and nobody wants it.

# %% [markdown]
# ## Can it be done without S?
#
# The rest of the book says how. First, that it can be done. The package computes attention as the four lines do, one row
# at a time, as FlashAttention (FA1) does, as FlashAttention-2 (FA2) does, and with the keys split among workers that
# each finish their part alone. Only the first has S as a whole; the last three see it in tiles, a few queries against a
# few keys.
#
# **Predict.** 8 queries and 8 keys, in tiles of 4 queries and 2 keys: how many tiles are there? And is the result an
# approximation?

# %%
Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4))
O = attention(Q, K, V)
tiles = dict(B_r=4, B_c=2)  # rows (queries) and columns (keys) of a tile
ways = {
    "as defined": naive.forward(Q, K, V)[0],
    "row by row": naive.forward_linear_memory(Q, K, V)[0],
    "FA1": fa1.forward(Q, K, V, **tiles)[0],
    "FA2": fa2.forward(Q, K, V, **tiles)[0],
    "FA2, keys split": fa2.forward_split_keys(Q, K, V, splits=2, **tiles)[0],
}
tiling = Tiling(8, 8, **tiles)
print(f"{tiling.T_r} × {tiling.T_c} = {tiling.T_r * tiling.T_c} tiles")
for name, result in ways.items():
    print(f"{name:16} same as the four lines: {close(result, O)}")

# %% [markdown]
# <details><summary>Not an approximation</summary>
#
# `close` allows an error of one part in 10¹², in float64. The additions run in another order, so the last digits may
# differ, as they do between any two orders of a sum. Nothing is left out and nothing is estimated.
# </details>
#
# **Takeaway.** FlashAttention is not another attention: it is the same sum in another order.

# %% [markdown]
# ## Same answer: what is the difference?
#
# The package has a meter, `Trace`. Handed to an algorithm, it counts every number that travels between HBM and the chip
# while the algorithm runs, and changes nothing.
#
# **Predict.** Standard attention writes S and P out and reads them back; FA1 does not. On the eight tokens above, which
# of the two moves more numbers?

# %%
meters = {"standard": Trace(), "fa1": Trace(), "fa2": Trace()}
naive.forward(Q, K, V, trace=meters["standard"])
fa1.forward(Q, K, V, **tiles, trace=meters["fa1"])
fa2.forward(Q, K, V, **tiles, trace=meters["fa2"])
large = Tiling(N, N, B_r=128, B_c=128)
print(f"{'':9}{'8 tokens, metered':>20}{'8,192 tokens, by formula':>28}")
for name, meter in meters.items():
    print(f"{name:9}{meter.hbm_elements:20,}{io.traffic(name, 'forward', large, d).total:28,}")

# %% [markdown]
# <details><summary>FA1 moves more?</summary>
#
# Here it does. Its tiles are tiny, and for each of them it fetches the unfinished output and stores it again; S has no
# more than 64 numbers. For 8,192 tokens and tiles of 128 × 128 it is the other way round. The large numbers come from
# formulas (`fa2_lab.machine.io`), one for each algorithm; the last section holds them against the meter.
# </details>
#
# **Takeaway.** A saving is a number at a size: this book counts first and says "less" afterwards.

# %% [markdown]
# ## Which steps lie between?
#
# The picture below is the book in one look. Each rung is one change; the number on it is its chapter. The upper bar is
# before the change, the lower one after it, to the same scale. Colours stand for tensors, here and in every picture that
# follows. Many of the words are explained only in their chapters: for now, look at the bars.
#
# **Predict.** One of the changes below saves only a tenth of what it is about. Is it that S stays on the chip, that the
# division comes once at the end, or that what a mask hides is skipped? And why would anyone bother?

# %%
show(ladder.draw(**ladder.data()))

# %% [markdown]
# <details><summary>The small one</summary>
#
# "Divide once" takes a tenth of the ordinary arithmetic out of a tile. A GPU multiplies matrices on units of their own;
# all other arithmetic is about 16 times slower per operation there, so that little of it is a lot of time. Chapter 04
# counts this change, and 10 measures it.
#
# Not all rungs save the same kind of thing: 03 and the first of 04 save traffic, 05 saves memory (and pays with work
# done twice), 06 saves waiting. Which of them pays on a given GPU is a question for measurements.
# </details>
#
# **Takeaway.** FlashAttention-2 is not one trick but a row of small changes, each of which can be taken alone, checked
# and counted.

# %% [markdown]
# ## What comes in which chapter?
#
# Each chapter answers one question. They build on each other: what a chapter writes by hand, the next ones import.
#
# **Predict.** Seven of the sixteen are about kernels on GPUs. For how many do you need a GPU?

# %% tags=["nbval-ignore-output"]
def row(chapter):
    return f"| {chapter.number} | [{chapter.title}]({chapter.name}.ipynb) | {chapter.question} |"


Markdown("\n".join(["| | chapter | question |", "|---|---|---|", *map(row, CHAPTERS)]))

# %% [markdown]
# <details><summary>For none</summary>
#
# 01 to 07 and 12 are NumPy. In 08 and 09 the kernels are Triton, and Triton can run a kernel in Python, slowly and at
# small sizes, with the same results. 10, 11 and 13 to 15 run here as well, beside measurements that were recorded on
# GPUs, with the GPU's name on each.
# </details>
#
# **Takeaway.** Understanding runs on a laptop; only the stopwatch needs a GPU.

# %% [markdown]
# ## What can this machine run?
#
# The next cell asks the machine in front of you, so its output may differ from what you see in print. Kernels need
# torch, which holds their tensors, and Triton, which compiles them.
#
# **Predict.** Are both installed here, and is there a GPU that they can use?

# %% tags=["nbval-ignore-output"]
def kernels_here():
    missing = [module for module in ("torch", "triton") if find_spec(module) is None]
    if missing:
        return f"not here: {' and '.join(missing)} missing. Their chapters can be read as recorded."
    import torch

    if not torch.cuda.is_available():
        return "in Triton's interpreter: right numbers, small sizes, no speed (torch sees no GPU)."
    major, minor = torch.cuda.get_device_capability()
    hopper = "chapters 12 and 13 included" if major == 9 else "all but Hopper's own"
    return f"on {torch.cuda.get_device_name()} (capability {major}.{minor}): {hopper}."


print(f"NumPy {np.__version__}: chapters 01 to 07 and B run in full.")
print("Kernels run", kernels_here())

# %% [markdown]
# <details><summary>If something is missing</summary>
#
# `pip install -e '.[dev]'` in the project's folder installs all there is for this platform. Triton exists for Linux
# only. From a terminal, `python -m fa2_lab` runs every stage on this machine and holds it against dense attention, and
# `python -m fa2_lab book` runs all notebooks and gives a verdict on each.
# </details>
#
# **Takeaway.** NumPy alone carries most of the book, and where a GPU would be wanted the book says so.

# %% [markdown]
# ## How do I get from the paper to the code?
#
# The papers' algorithms are numbered lines. The package keeps them as data, in words of its own. This is Algorithm 1 of
# the FlashAttention-2 paper, the goal of chapter 04. Capital letters are whole tensors in HBM; small letters with an
# index are blocks on the chip.
#
# **Predict.** Softmax divides by a sum. In which line is the division, and inside how many loops?

# %%
print(ALGORITHMS["FA2.A1"])

# %% [markdown]
# <details><summary>Where the division is</summary>
#
# In line 12, inside the outer loop only: once for each row block. Line 10, which updates the output for every tile, says
# "not divided by anything". That is the rung "divide once".
# </details>
#
# Every line has a tag: paper, algorithm, line. Line 10 is FA2.A1.L10. The same tag stands in the code, behind each line
# that computes it, and `where` finds it.

# %% tags=["nbval-ignore-output"]
print(where("FA2.A1.L10"))

# %% [markdown]
# <details><summary>How to read this</summary>
#
# First comes the line in our words, then the NumPy code to read first, then the Triton code, then the picture that shows
# it. The last line counts the other places, and names a slip if a printed source has one here; appendix B runs it. From a
# terminal: `fa2-lab where FA2.A1.L10`, with `--all` for every place. `fa2-lab glossary` explains the papers' symbols.
# </details>
#
# **Takeaway.** Wherever a line carries a tag, the paper, the NumPy code and the kernel say the same thing there.

# %% [markdown]
# ## Where is what in the package?
#
# | main rooms of `fa2_lab/` | what is in them |
# |---|---|
# | `tiles.py`, `trace.py`, `paper.py` | geometry of tiles; the meter; the papers' lines |
# | `reference/` | NumPy in float64, one file for each stage: `naive`, `online_softmax`, `fa1`, `fa2` |
# | `machine/`, `errata/` | models of a GPU: traffic, thread blocks, warps, budgets; slips, run |
# | `kernels/` | the same lines in Triton |
# | `plots/`, `studio/` | pictures with their data; these notebooks, measuring, the course |
#
# A room may use the rooms above it in this table, with one exception, which the cell checks.
#
# **Predict.** The kernels could borrow a function from the reference. Why must they not?

# %%
def knows_of(room, other):
    imports = re.compile(rf"^\s*(from|import) fa2_lab[. ].*\b{other}\b", flags=re.MULTILINE)
    sources = [file.read_text(encoding="utf-8") for file in (PACKAGE / room).rglob("*.py")]
    return any(imports.search(source) for source in sources)


print("the machine's models use the reference:", knows_of("machine", "reference"))
print("the kernels use the reference:", knows_of("kernels", "reference"))
print("the reference uses the kernels:", knows_of("reference", "kernels"))

# %% [markdown]
# <details><summary>Why the exception</summary>
#
# The reference is what the kernels are judged by. If both used the same function, a mistake in it would be on both sides
# of the comparison and nobody would see it.
# </details>
#
# **Takeaway.** Two computations that share nothing can check each other.

# %% [markdown]
# ## Recap
#
# - Attention is a weighted mean of values; softmax makes the weights; S and P are N × N and only a step on the way.
# - FA1 and FA2 compute the same numbers without ever having S whole. What differs is traffic, memory, work and waiting.
# - The ladder has one change to a rung, and every change is counted.
# - A tag such as FA2.A1.L10 names a line of a paper; `where` finds the code for it.
# - No chapter needs a GPU; the recorded outputs of those about kernels come from one.

# %% [markdown]
# ## Exercises
#
# **1. Predict.** A text twice as long, 16,384 tokens, same tiles. Which numbers of the ladder double, which become four
# times as large, which stay? Take the rungs 02, 03, "one statistic" and 05.
#
# <details><summary>Hint</summary>
# S has N² entries. How many row blocks are there, and what does each of them read?
# </details>
# <details><summary>Answer</summary>
# 02: the upper bar doubles (a row has N scores), the lower one stays 66. 03: both bars become nearly four times as long;
# FA1's traffic is smaller, and still grows with N², because every row block meets every key. "One statistic": both stay,
# they are per row. 05: the upper bar is N² and becomes four times as large, the lower one is N and doubles.
# </details>
#
# **2. Complete.** Algorithm 2 of the FlashAttention-2 paper is the backward pass. Print it, find the line that computes
# P again, and ask `where` for the NumPy line.
#
# <details><summary>Hint</summary>
#
# `ALGORITHMS` is a dictionary; its keys are FA1.A2, FA1.A3, FA1.A4, FA2.A1 and FA2.A2.
# </details>
# <details><summary>Answer</summary>
#
# ```python
# print(ALGORITHMS["FA2.A2"])
# print(where("FA2.A2.L11"))
# ```
# The probabilities come back in one step, p = exp(s − L): L holds the maximum and the sum together.
# </details>
#
# **3. Break and fix.** The four lines fail on large scores. Before you run the cell: what are exp(1000) and ∞ / ∞ in
# floating point? Then find the change to one line that mends it.

# %%
with np.errstate(over="ignore", invalid="ignore"):
    huge = attention(1000 * Q, 1000 * K, V)
print("rows with NaN:", int(np.isnan(huge).any(axis=1).sum()), "of", len(huge))

# %% [markdown]
# <details><summary>Hint</summary>
# A factor that all exponentials of a row have in common cancels when they are divided by their sum.
# </details>
# <details><summary>Answer</summary>
#
# ```python
# E = np.exp(S - S.max(axis=1, keepdims=True))
# ```
# The largest exponential of a row is now exp(0) = 1, and none can overflow. The maximum is that of the whole row: can
# it be had before the whole row is there? That is the question of chapter 02.
# </details>

# %% [markdown]
# ## Checks
#
# The four lines against the package, the package's stages against each other on lengths that fit no tile and on huge
# scores, the picture's numbers against the meter, and the tags.

# %%
verdict("the four lines = the package's definition", close(O, ways["as defined"]))
rng = np.random.default_rng(1)
Q, (K, V) = rng.standard_normal((37, 8)), rng.standard_normal((2, 29, 8))
ragged = dict(B_r=16, B_c=5)
for size in (1.0, 1e3):
    truth = naive.forward(size * Q, K, V)[0]
    if size == 1.0:
        verdict("37 queries, 29 keys: the four lines", close(attention(Q, K, V), truth))
    for name, stage in (("FA1", fa1), ("FA2", fa2)):
        result, *_ = stage.forward(size * Q, K, V, **ragged)
        verdict(f"37 queries, 29 keys, scores × {size:g}: {name}", close(result, truth))

# %%
small = Tiling(64, 64, 16, 16)
Q, K, V = np.random.default_rng(3).standard_normal((3, 64, 8))
stages = dict(standard=naive.forward, fa1=fa1.forward, fa2=fa2.forward)
rungs = {rung.name: rung for rung in ladder.data(N=64, d=8, B=16)["rungs"]}
drawn = dict(standard=rungs["FlashAttention"].before, fa1=rungs["FlashAttention"].after)
drawn["fa2"] = rungs["FA2: loops swapped"].after
for name, stage in stages.items():
    meter = Trace()
    stage(Q, K, V, trace=meter, **({} if name == "standard" else dict(B_r=16, B_c=16)))
    counted = {tensor: meter.loads(tensor) + meter.stores(tensor) for tensor in drawn[name]}
    formula = io.traffic(name, "forward", small, 8).total
    verdict(f"{name}: formula = meter", formula == meter.hbm_elements)
    verdict(f"{name}: the picture's bar = meter, tensor by tensor", drawn[name] == counted)

# %%
computing = [tag for tag, (_, line) in LINES.items() if line.computes]
found = all(where(tag).numpy for tag in computing)
verdict("every computing line of the papers has its NumPy line", found)
verdict("the kernels share no code with the reference", not knows_of("kernels", "reference"))

# %% [markdown] tags=["navigation"]
# [Naive attention →](01_naive_attention.ipynb)
