# %% [markdown] tags=["navigation"]
# [← Errata](B_errata.ipynb) · [The map](00_start.ipynb)

# %% [markdown]
# # C · The package and its commands
#
# **Where is what, and how do I use it for something of my own?**
#
# Behind the chapters stands a package, `fa2_lab`. You can read the book without knowing it. This appendix is for the day
# when you want to look something up in it, count an algorithm of your own, or call its attention.
#
# After this notebook you can
#
# - find the file that answers a question, and the code for any line of the papers,
# - count what an algorithm of yours loads, stores and computes,
# - call `fa2_lab.attention`, and judge what comes back,
# - switch a model over to it,
# - name the command for each task.
#
# *Time: 40 minutes with the questions and exercises. Hardware: any laptop; two cells need torch and say so if it is
# missing. Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb).*

# %%
import re
import sys
from importlib.util import find_spec

import numpy as np
from IPython.display import Markdown

from fa2_lab.machine import io
from fa2_lab.paper import ALGORITHMS, LINES, PACKAGE, where
from fa2_lab.reference import fa2, naive
from fa2_lab.tiles import CAUSAL, Tiling
from fa2_lab.tools import command
from fa2_lab.trace import Trace
from fa2_studio.book.verdicts import close, verdict

# %% [markdown]
# ## Where is what?
#
# | in `fa2_lab/` | what is in it |
# |---|---|
# | `tiles.py`, `trace.py` | geometry of tiles; the meter |
# | `paper.py`, `glossary.py` | the papers' algorithms and the words, as data |
# | `reference/` | NumPy in float64, a file for each stage: `naive`, `online_softmax`, `fa1`, `fa2` |
# | `kernels/` | Triton and Gluon (Triton's lower-level language, chapter 12a): `ladder/` to be read, the others to be called |
# | `attention.py`, `packed.py`, `paged.py`, `transformers.py`, `distributed/` | the public calls (`checks.py` and `operators.py` serve them) |
# | `machine/`, `errata/` | models of a GPU; slips of the papers, run |
# | `plots/`, `studio/` | pictures; book, course, bench and commands |
#
# A file may import from the rows above its own in this table, with one exception: kernels import nothing from the
# reference.
#
# **Predict.** Suppose a kernel and the reference shared a function, and the function were wrong. Would their comparison
# show it?

# %% tags=["hide-input"]
def users(folder, other):
    imports = re.compile(rf"^\s*(from|import) fa2_lab[. ].*\b{other}\b", flags=re.MULTILINE)
    files = (PACKAGE / folder).rglob("*.py")
    return sum(bool(imports.search(file.read_text(encoding="utf-8"))) for file in files)


for folder, other in (("machine", "reference"), ("kernels", "reference"), ("reference", "kernels")):
    print(f"does {folder} import from {other}?", "yes" if users(folder, other) else "no: 0 files")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **No.** Both sides would be wrong in the same way. So neither imports the other's mathematics.
# </details>
#
# **Takeaway.** Two computations check each other only in the code that they do not share.

# %% [markdown]
# ## Which code computes this line?
#
# Each line of the papers' algorithms has a tag: paper, algorithm, line. The same tag is a comment on the code that computes
# it. `where` lists the NumPy line to read first, then the Triton line, then the picture. A line that only ends a loop
# computes nothing.
#
# **Predict.** Line 10 of Algorithm 1 in the FlashAttention-2 paper updates the output. What is its tag?

# %% tags=["nbval-ignore-output"]
print(where("FA2.A1.L10"))

# %% tags=["nbval-ignore-output", "hide-input"]
for name, algorithm in ALGORITHMS.items():
    tags = [tag for tag, (of, line) in LINES.items() if of is algorithm and line.computes]
    print(f"{name}: {len(algorithm.lines):2} lines, {len(tags):2} compute,", end=" ")
    print(
        f"{sum(bool(where(tag).numpy) for tag in tags):2} have NumPy, {sum(bool(where(tag).triton) for tag in tags):2} Triton"
    )

# %% [markdown]
# <details><summary>Answer</summary>
#
# **FA2.A1.L10.** In a terminal: `fa2-lab where FA2.A1.L10`, with `--all` for every place. `fa2-lab where FA2.A1` prints
# the algorithm.
# </details>
#
# Every line that computes has its NumPy line. Five lines of FA1.A2, FA1's forward pass, have no Triton line: they cut matrices
# into blocks or belong to dropout. FA1.A3 and FA1.A4 are backward passes, of standard attention and of FA1. They were never
# written in Triton here, because FA2's replaces them.
#
# **Takeaway.** A tag leads from a line of a paper to the code, and from the code back to the paper.

# %% [markdown]
# ## What can this machine run?
#
# Everything in NumPy runs wherever Python does. The kernels need torch, for its tensors, and Triton, which exists for Linux
# only. Triton can also run a kernel in plain Python, in its *interpreter*: right numbers, small sizes, no speed.
#
# **Predict.** A Linux laptop has torch and Triton, and no GPU. Can it run the kernels of chapter 08?

# %% tags=["nbval-ignore-output", "hide-input"]
def kernels_here():
    missing = [module for module in ("torch", "triton") if find_spec(module) is None]
    if missing:
        return f"not here: {' and '.join(missing)} missing. Their chapters can be read as recorded."
    import torch

    if not torch.cuda.is_available():
        return "in Triton's interpreter: right numbers, small sizes, no speed (torch sees no GPU)."
    major, minor = torch.cuda.get_device_capability()
    hopper = "chapters 12b and 13 included" if major == 9 else "all but Hopper's own"
    return f"on {torch.cuda.get_device_name()} (capability {major}.{minor}): {hopper}."


print(f"NumPy {np.__version__}, Python {sys.version.split()[0]}: all that is NumPy runs in full.")
print("Kernels run", kernels_here())

# %% [markdown]
# <details><summary>Answer</summary>
#
# **Yes, in the interpreter.** `pip install -c constraints.txt -e '.[dev]'` in the project's folder installs what there
# is for this platform. Then `python -m fa2_lab` runs every stage on this machine and compares it with plain attention.
# </details>
#
# The output depends on the machine in front of you, so it may differ from what is printed here.
#
# **Takeaway.** NumPy runs on any laptop, Triton on one with Linux. The kernels of chapters 12b and 13 need a Hopper GPU, and
# measuring time needs a GPU.

# %% [markdown]
# ## How do I call it?
#
# `fa2_lab.attention(q, k, v, causal=True)` takes torch tensors of shape (batch, heads, N, d) and does what torch's
# `scaled_dot_product_attention` does. The most important difference: where N_q ≠ N_k, our causal mask is aligned to the bottom
# right, torch's `is_causal` to the top left. On a GPU the call runs the fastest kernel that can serve it. Without a GPU it
# runs the interpreter.
#
# **Predict.** With fewer queries than keys, which keys does the *last* query see in ours?

# %% tags=["nbval-ignore-output"]
if find_spec("torch") and find_spec("triton"):
    import torch

    import fa2_lab

    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 2, 5, 16), torch.randn(2, 1, 2, 40, 16)
    O, L = fa2_lab.attention(q, k, v, causal=True, return_lse=True)
    last = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v)  # one query, all keys
    print("O:", tuple(O.shape), " L:", tuple(L.shape))
    print(f"last query, largest difference from torch without a mask: {(O[:, :, -1:] - last).abs().max():.0e}")
else:
    print("torch or Triton is missing here")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **All of them.** Row r sees the columns c ≤ r + N_k − N_q. A model that adds new tokens to old ones needs
# exactly this.
# </details>
#
# `L` is the logsumexp of each row (chapter 04). [TROUBLESHOOTING.md](../TROUBLESHOOTING.md) lists the other differences from
# torch. `attention_packed` takes sequences of different lengths without padding, `attention_paged` reads a cache in pages
# (chapter 14), and `fa2_lab.distributed` has attention over several GPUs (chapter 15).
#
# **Takeaway.** One call, nearly torch's conventions, and `L` on request.

# %% [markdown]
# ## How do I switch a model over?
#
# Models of Hugging Face's `transformers` take their attention by name. One import adds ours:
#
# ```python
# import fa2_lab.transformers  # pip install -e '.[transformers]'
#
# model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa2_lab")
# ```
#
# Such a model gives its mask as a function of row and column. It becomes an interval of columns for each row (chapter 16):
# causal, a sliding window, padding on either side. Grouped heads, a cache, and that chapter's sinks (an extra term in ℓ)
# and softcap (bounded scores) work too. Any other mask is refused.
#
# `python -m fa2_lab bench models` trains a small Llama several times. Each run starts with the same weights and sees the
# same batches. Only the attention differs.
#
# **Predict.** One attention writes the N × N matrix of scores, another does not. How far apart are their losses
# in any of 31 steps, at most: about 0.1, 0.001 or 0.00001?

# %%
from fa2_lab.records import load
from fa2_studio.bench import models

print(models.table(load("models").curves))

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About 0.00001.** All compute the same function, and add its terms in another order. In fp32 that changes the seventh
# digit, and 30 steps let the change grow a little.
# </details>
#
# The last column is the largest difference from `eager` in any of the 31 steps. `eager` and `sdpa` are the names
# that `transformers` has for plain PyTorch and for torch's own attention. Each step sees another batch, so a loss may rise
# from one column to the next. Compare down a column.
#
# The curves are recorded. With `transformers` installed, the next cell trains three steps here. The model reads the package's own
# source code, which has changed since. So these losses differ from the recorded ones: compare the two lines.

# %% tags=["nbval-ignore-output", "hide-input"]
if find_spec("torch") and find_spec("triton") and find_spec("transformers"):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("eager", "fa2_lab"):
        print(f"{name:8}", [f"{loss:.4f}" for loss in models.train(name, device, steps=3)])
else:
    print("transformers is not installed here: see the recorded curves above")

# %% [markdown]
# **Takeaway.** Another attention changes a model's speed and memory, and its losses by rounding alone.

# %% [markdown]
# ## How do I count an algorithm of my own?
#
# Write it in NumPy, with slices. `meter.hbm(X=X)` returns a tensor that lives in HBM: reading a slice is a load, writing
# one is a store. What was loaded is on chip, and operations on it are counted by kind. `trace.serial` and `trace.parallel`
# name the loops. (For blocks of a matrix there is `Tiling`.)
#
# The algorithm below computes the mean of all rows. It loads blocks of 4 rows and keeps one sum on chip.
#
# **Predict.** X has 10 rows and 3 columns. How many elements are loaded?

# %%
def row_mean(X, mean, B, trace):
    total = 0
    for i in trace.serial("i", range(0, len(X), B)):
        x_i = X[i : i + B]  # (B, d): loaded
        total = total + x_i.sum(axis=0)  # (d,): on chip
    mean[:] = total / len(X)  # stored


X = np.random.default_rng(0).standard_normal((10, 3))
meter = Trace()
row_mean(*meter.hbm(X=X, mean=np.empty(3)), B=4, trace=meter)
print("loaded:", meter.loads("X"), " stored:", meter.stores("mean"), " operations:", dict(meter.flops))
for event in meter.events:
    print(f"  {event.op:5} {event.elements:2} elements of {event.tensor}, i = {event.i}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **30.** Each element once. The last block has two rows, and the slice shortens itself.
# </details>
#
# The list of events is what the pictures of chapters 03 and 04 are drawn from.
#
# **Takeaway.** The meter watches and changes nothing: the same function runs on plain arrays.

# %% [markdown]
# ## How exact is exact?
#
# A kernel in 16 bits cannot agree with float64 to the last digit. The tests ask for less: its error may be at most twice
# the error that torch makes in the same precision (three times for gradients).
#
# **Predict.** The 16 bits of a number in fp16 are a sign, 5 for the exponent, and 10 for the digits behind a leading 1 that is
# not stored: 11 binary digits. How many decimal digits is that?

# %% tags=["nbval-ignore-output"]
Q, K, V = np.random.default_rng(0).standard_normal((3, 64, 16))
exact = naive.forward(Q, K, V)[0]
for dtype in (np.float64, np.float32, np.float16):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    S = q @ k.T * dtype(1 / 4)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    O = P / P.sum(axis=1, keepdims=True) @ v
    print(f"{np.dtype(dtype).name}: largest error of O {np.abs(O - exact).max():.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# **About three.** $2^{11} = 2048$, a little more than three digits.
# </details>
#
# The errors are rounding, and nothing else. A slip in a formula is usually larger by a factor of a hundred or more,
# so the two can be told apart.
#
# **Takeaway.** Compare with float64, and know how large the rounding should be.

# %% [markdown]
# ## Which command does what?
#
# Nearly everything a reader does in a terminal is a command: `fa2-lab NAME`, or `python -m fa2_lab NAME`. Three to try first:
# `fa2-lab glossary warp`, `fa2-lab ladder 04`, which shows one step of the ladder as a difference of two files, and `fa2-lab
# book --blank mine`. The last writes the chapters into a folder with nothing executed, for readers who answer before they look.

# %% tags=["hide-input"]
helps = {name: words for name, words in re.findall(r"^    (\w+) +(.+)$", command.parser().format_help(), flags=re.M)}
Markdown(
    "\n".join(["| command | what it does |", "|---|---|", *(f"| `fa2-lab {n}` | {w} |" for n, w in helps.items())])
)

# %% [markdown]
# **Takeaway.** `fa2-lab --help` lists them all.

# %% [markdown]
# ## Recap
#
# - The heart: tiles, meter, papers, reference, kernels, calls. Around it: models, errata, pictures, studio.
# - A tag such as FA2.A1.L10 leads from the paper to NumPy and Triton.
# - `Trace` counts any algorithm that is written with slices.
# - `fa2_lab.attention` follows torch, with a few differences (the corner of the causal mask), and gives L on request.

# %% [markdown]
# ## Exercises
#
# **1. Complete.** Standard softmax of one long row x, in blocks of B: the first pass finds the maximum, the second the sum,
# the third writes the result. The online softmax of chapter 02 merges the first two. How many elements does each version
# *load*, for a row of N? Put the numbers in place of the `...`. The check counts with the meter.
#
# <details><summary>Hint</summary>
#
# Every pass loads each element once, the last one too.
# </details>
# <details><summary>Solution</summary>
#
# `return 3 * N, 2 * N`
# </details>

# %%
def loaded(N):
    return ...  # of the three passes, of the two passes

# %% tags=["hide-input"]
def passes(x, y, B, online):
    blocks, m, l = range(0, len(y), B), -np.inf, 0.0
    for i in () if online else blocks:
        m = np.maximum(m, x[i : i + B].max())
    for i in blocks:
        x_i = x[i : i + B]
        m_new = np.maximum(m, x_i.max())
        m, l = m_new, l * np.exp(m - m_new) + np.exp(x_i - m_new).sum()
    for i in blocks:
        y[i : i + B] = np.exp(x[i : i + B] - m) / l


meters = []
for online in (False, True):
    meters.append(Trace())
    passes(*meters[-1].hbm(x=np.arange(12.0), y=np.empty(12)), B=5, online=online)
counted = tuple(meter.loads("x") for meter in meters)
if loaded(12) is ...:
    print("not written yet")
else:
    print("right" if loaded(12) == counted else f"not yet: for N = 12 the meter says {counted}")

# %% [markdown]
# **2. Find.** Which line of Algorithm 2 (the backward pass) computes P again from S and L? Put its tag in place of the
# `...`.
#
# <details><summary>Hint</summary>
#
# `print(ALGORITHMS["FA2.A2"])`
# </details>
# <details><summary>Solution</summary>
#
# `"FA2.A2.L11"`: $p = e^{s - L}$, in one step.
# </details>

# %%
tag = ...
if tag is ...:
    print("not answered yet; the tags run from FA2.A2.L1 to", f"FA2.A2.L{len(ALGORITHMS['FA2.A2'].lines)}")
elif tag not in LINES:
    print("not yet: there is no line", tag)
else:
    print("right:" if tag == "FA2.A2.L11" else "not yet: this line says:", LINES[tag][1].text)

# %% [markdown]
# ## Checks
#
# The counts of this notebook against formulas, the package against plain attention, and the tags.

# %% tags=["hide-input"]
verdict("row_mean loads every element once", (meter.loads("X"), meter.stores("mean")) == (30, 3))
mean = np.empty(3)
row_mean(X, mean, B=4, trace=Trace())
verdict("row_mean is the mean, with and without a meter", close(mean, X.mean(axis=0)))
watch = Trace()
O, L = fa2.forward(Q, K, V, B_r=16, B_c=8, mask=CAUSAL, trace=watch)
verdict("fa2.forward = plain attention, causal", close(O, naive.forward(Q, K, V, mask=CAUSAL)[0]))
verdict("its traffic = the formula", watch.hbm_elements == io.fa2_forward(Tiling(64, 64, 16, 8, CAUSAL), 16).total)
computing = [tag for tag, (_, line) in LINES.items() if line.computes]
verdict("every computing line of the papers has its NumPy line", all(where(tag).numpy for tag in computing))
verdict("the kernels import nothing from the reference", users("kernels", "reference") == 0)
verdict("every command is in the table", {"where", "errata", "glossary", "book", "ladder", "xray"} <= set(helps))

# %% [markdown] tags=["navigation"]
# [← Errata](B_errata.ipynb) · [The map](00_start.ipynb)
