# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)

# %% [markdown]
# # 08 · The Triton forward kernel
#
# **How do the lines of Algorithm 1 become a GPU kernel?**
#
# Chapter 04 implemented Algorithm 1 in NumPy, and in chapter 06 each row block got its own worker. Now we write the
# program that such a worker runs, in *Triton*, a Python-based language whose variables are blocks of numbers. You write
# what one thread block does, and the compiler divides the work among its warps.
#
# The chapter has two parts. In the first part, you write four small kernels: a difference, a copy, a softmax and a
# matrix product. Together they contain everything that attention needs. In the second part, you write the loop of the
# FlashAttention-2 forward kernel, and compare the speed of a finished kernel with that of PyTorch's own.
#
# After this notebook you can
#
# - write a kernel and its launch, which decide where each program's data begins and ends,
# - predict what a load costs from the addresses that neighbouring threads read,
# - explain what `num_warps` changes in the compiled code,
# - write Algorithm 1 as a Triton kernel, and recognise three mistakes by the wrong numbers that they produce,
# - time a kernel so that the result is meaningful.
#
# *Time: 115 minutes, in two parts. Hardware: any machine with Linux; without an NVIDIA GPU the kernels run in Triton's
# interpreter. Before this: [04 · FlashAttention-2, forward](04_fa2_forward.ipynb), [06 ·
# Parallelism](06_parallelism.ipynb) and [07 · Warps](07_warps.ipynb).*

# %% tags=["hide-input"]
# Setup: run this cell first. You do not have to read it.
import math
import re
import statistics
from inspect import getsource

import numpy as np
import torch

from fa2_lab.api.attention import attention
from fa2_lab.examine.cases import one_head
from fa2_lab.kernels.ladder import load
from fa2_lab.plots.show import show
from fa2_lab.records import load as record_of
from fa2_lab.reference import heads
from fa2_lab.tools import files
from fa2_lab.tools.xray import xray_launches
from fa2_studio.book.build import Case, check
from fa2_studio.book.verdicts import close, same_code, verdict

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tags=["nbval-ignore-output", "hide-input"]
# Setup: run this cell as well.
import triton
import triton.language as tl

print("kernels of this notebook:", "interpreted" if triton.knobs.runtime.interpret
      else "compiled for the GPU here")
# the package says once that it is slow here
_ = attention(*torch.zeros(3, 1, 1, 2, 16, device=device))

# %% [markdown]
# ## How slow is a first kernel?
#
# Suppose that you translate the FlashAttention paper of 2022 line by line into Triton. Your kernel works in tiles,
# never stores S or P, and returns the right result. We compare such a kernel's time on an H200 with the times of three
# other kernels that compute the same result:

# %% tags=["hide-input"]
ladder, paper = record_of("ladder"), record_of("paper")
grid_row = dict(batch=4, heads=16, kv_heads=16, N_q=4096, N_k=4096, d=128, causal=False,
                dtype="bfloat16")
climbed, published = (next(r for r in x.rows if r.problem == grid_row
                           and r.direction == "forward") for x in (ladder, paper))
milliseconds_on_H200 = {
    "a first kernel, line by line (rung 01)": climbed.values["r01_fa1"][0],
    "standard attention, three kernels (rung 00)": climbed.values["r00_standard"][0],
    "PyTorch's FlashAttention-2": published.values["torch flash"][0],
    "this chapter's last kernel (rung 11)": climbed.values["r11_diagonal_first"][0],
}
torch_flash = milliseconds_on_H200["PyTorch's FlashAttention-2"]
print("64 heads of 4,096 tokens, d = 128, no mask, recorded on an H200")
for name, ms in milliseconds_on_H200.items():
    print(f"{name:44} {ms:6.2f} ms, {ms / torch_flash:5.1f} times PyTorch's")
eight = grid_row | dict(batch=1, heads=8, kv_heads=8)
few = next(r for r in ladder.rows if r.direction == "forward" and r.problem == eight)
print(f"with 8 heads, rung 01 takes {few.ratio('r11_diagonal_first', 'r01_fa1'):.0f} times as "
      "long as rung 11")

# %% [markdown]
# Although the first kernel is right, it is many times slower than PyTorch's, and even slower than standard attention.
# The kernels in the first and the last line both belong to this package, and they compute the same matmuls. They differ
# in how much data they move and in how many workers they run. Both quantities depend on a few lines that every Triton
# kernel has, namely its launch and the addresses from which it loads.
#
# The package implements attention 24 times and changes one thing each time. We call this series the *ladder*, and its
# kernels are the *rungs* 00 to 23. For now, you only need two of their names. Rung 01 is the slow first kernel, and
# rung 11 is the kernel at the end of this chapter. Chapter 10 measures all the others.
#
# ## Part 1 · An on-ramp to Triton (65 minutes)
#
# Without a GPU, the package sets `TRITON_INTERPRET=1`, and then every line of a kernel runs as NumPy, one program after
# another. In your own script, set the variable before you import Triton. To look at a block in the interpreter, write
# `print(x)` or `breakpoint()` into the kernel. PyTorch's tensors behave like NumPy's arrays. The variable `device`
# names the device that stores the tensors, and `.float()` converts a tensor to float32.

# %% [markdown]
# ### What does a kernel get to see?
#
# `@triton.jit` turns a function into a kernel. For each tensor, a kernel gets only the address of the first element, so
# it knows neither the tensor's shape nor where the tensor ends. One run of the kernel is called a *program*. This is
# Triton's word for what chapter 06 called a worker, and NVIDIA calls a thread block. All programs execute the same
# lines and differ in only one number, `tl.program_id`. The *launch* decides how many programs there are, because the
# tuple in its square brackets is the *grid*. In this example, each program handles a block of 4, and together the
# programs double 10 numbers:

# %%
@triton.jit
def double_kernel(X, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)  # (B,) program 2 has 8, 9, 10, 11
    x = tl.load(X + at)  # (B,)
    tl.store(X + at, 2 * x)


# 10 numbers, and two that belong to something else
memory = torch.arange(1.0, 13.0, device=device)
grid = (triton.cdiv(10, 4),)  # 3 programs: 10 / 4, rounded up
double_kernel[grid](memory, B=4)
print([int(x) for x in memory])

# %% [markdown]
# `X + at` is a block of addresses. In this arithmetic, `X + 1` is the address of the *next element*, whatever X's type
# is, and not of the next byte. `tl.load` fetches what is stored at these addresses into registers. The size of a block
# must be a power of two that is known when the kernel is compiled, so it is a `tl.constexpr`.
#
# The launch shows the first mistake of this chapter. The last program handles positions 8 to 11, so it doubled two
# numbers past the end. They belong to something else, and yet no error was raised. For this reason, loads and stores
# take a *mask*, which has nothing to do with the causal one. `tl.load(X + at, mask=real, other=0.0)` does not touch the
# memory where `real` is false, and returns 0 there. `tl.store(X + at, x, mask=real)` writes only where `real` is true.
#
# **Build.** Write the kernel that stores the differences between neighbours, Y[n] = X[n + 1] − X[n]. X has N + 1
# elements, and Y has N.

# %%
@triton.jit
def difference_kernel(X, Y, N, B: tl.constexpr):
    pass


def difference(X, Y):
    grid = (triton.cdiv(len(Y), 8),)  # one program for each block of 8 results
    difference_kernel[grid](X, Y, len(Y), B=8)


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def host(x):  # to NumPy, for comparing
    return x.double().cpu().numpy()


def normal(*shape, seed=0, dtype=torch.float16):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(device, dtype)


def guarded(x, value=torch.nan):  # the same numbers, and 1,000 others past their end
    memory = torch.full((x.numel() + 1000,), value, dtype=x.dtype, device=device)
    memory[:-1000] = x.flatten()
    return memory[:-1000].view(x.shape), memory[-1000:]


def judge_launch(launch, cases, tolerance=1e-5):
    def written(shape, *inputs):  # into an output of infinities; nothing if it stores nothing
        out, behind = guarded(torch.full(shape, torch.inf), 7.0)
        launch(*inputs, out)
        if (behind != 7).any():
            raise IndexError("the kernel wrote past the end of its output, into memory that is "
                             "not its own")
        return None if out.isinf().all() else host(out)

    written.__name__ = f"{launch.__name__}_kernel"
    check(written, *(Case(words, (out.shape, *inputs), host(out))
                     for words, (inputs, out) in cases.items()), tolerance=tolerance)


X, ten, half = (
    guarded(normal(17, dtype=torch.float32))[0],
    guarded(normal(11, dtype=torch.float32))[0],
    guarded(normal(17))[0],
)
cases = {
    "16 results in fp32. Is X + 1 the next element, without a 4 for its bytes?": ((X,), X.diff()),
    "16 results from fp16. Is it the same code for another type?": ((half,), half.float().diff()),
    "10 results in blocks of 8. Do the loads and the store stop after the 10th?":
        ((ten,), ten.diff()),
}
judge_launch(difference, cases, tolerance=1e-3)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def difference_kernel(X, Y, N, B: tl.constexpr):
#     at = tl.program_id(0) * B + tl.arange(0, B)  # (B,)
#     real = at < N
#     x = tl.load(X + at, mask=real)
#     following = tl.load(X + at + 1, mask=real)  # the next element
#     tl.store(Y + at, following - x, mask=real)
# ```
# </details>

# %% [markdown]
# ### Where does the next row begin?
#
# In memory, a matrix is one long line of numbers. The distance between two neighbours along a dimension is called a
# *stride* and is counted in elements. The element in row r and column c is therefore at r · row_stride + c ·
# column_stride. In a new matrix of 4 columns, the strides are 4 and 1. A view of a matrix copies nothing, because it
# uses the same memory with a different shape or different strides.

# %%
matrix = torch.arange(12.0, device=device).view(3, 4)
for name, view in (("matrix", matrix), ("matrix[:, :2]", matrix[:, :2]), ("matrix.T", matrix.T)):
    print(f"{name:14} shape {tuple(view.shape)}, strides {view.stride()}")

# %% [markdown]
# Since a kernel gets only the address, the launch has to pass the strides as well. To address a two-dimensional block,
# you combine a column of row indices with a row of column indices. As in NumPy, `row[:, None]` is (B, 1), `column[None,
# :]` is (1, B), and their sum is (B, B). A grid can also have two dimensions, in which case `tl.program_id(1)` is the
# program's index along the second dimension.
#
# **Build.** Write a kernel that copies a matrix with any strides to Y, whose rows are contiguous. Each program copies
# one B × B block.

# %%
@triton.jit
def copy_kernel(X, Y, rows, columns, row_stride, column_stride, B: tl.constexpr):
    pass


def copy(X, Y):
    # row blocks × column blocks
    grid = (triton.cdiv(X.shape[0], 8), triton.cdiv(X.shape[1], 8))
    copy_kernel[grid](X, Y, *X.shape, *X.stride(), B=8)


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
wide = guarded(normal(16, 24, dtype=torch.float32))[0]
cases = {
    "16 × 24. Does each program have its own rows and columns, and is a row of Y `columns` long?":
        ((wide,), wide),
    "the first 13 of 24 columns. Is row_stride used, and does the mask check the column?":
        ((wide[:, :13],), wide[:, :13]),
    "11 × 24. Does the mask check the row?": ((wide[:11],), wide[:11]),
    "a transposed view, 24 × 16. Is column_stride used?": ((wide.T,), wide.T),
}
judge_launch(copy, cases)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def copy_kernel(X, Y, rows, columns, row_stride, column_stride, B: tl.constexpr):
#     row = tl.program_id(0) * B + tl.arange(0, B)[:, None]  # (B, 1)
#     column = tl.program_id(1) * B + tl.arange(0, B)[None, :]  # (1, B)
#     real = (row < rows) & (column < columns)  # (B, B)
#     x = tl.load(X + row * row_stride + column * column_stride, mask=real)
#     tl.store(Y + row * columns + column, x, mask=real)
# ```
# </details>

# %% [markdown]
# ### What do neighbouring threads read?
#
# The copy is right for every stride, but not equally fast. Memory is fetched in *sectors* of 32 bytes. The 32 threads
# of a warp execute a load together, so the hardware looks at their 32 addresses and fetches each sector only once, no
# matter how many threads want a part of it. This is called *coalescing*. If the threads read neighbouring numbers,
# every fetched byte is used. If they read numbers that are far apart, however, each thread needs its own sector, and
# most of that sector's bytes are wasted. The next cell counts the sectors of one load of four-byte numbers:

# %%
thread = np.arange(32)
for stride in (1, 2, 4, 8, 4096):
    address = 4 * stride * thread  # in bytes, one address for each thread of a warp
    fetched = 32 * len(np.unique(address // 32))
    print(
        f"stride {stride:4}: 128 bytes wanted, {fetched:4} fetched, {100 * 128 / fetched:g}% used"
    )

# %% [markdown]
# From a stride of 8 on, a load fetches eight times as many bytes as it uses. If a kernel is limited by these bytes, it
# takes about eight times as long, unless the rest of each sector is used while a cache still holds it. On a machine
# with a GPU, `python -m fa2_studio.strided` measures this cost by timing the sum of 2²⁵ numbers that are one stride
# apart. In the recorded times below, the time goes on rising past a stride of 8, although our count does not. The
# likely reason is that L2 can fetch more than one sector at a time from DRAM, so beyond a stride of 8, whole sectors
# are fetched and never used.

# %% tags=["nbval-ignore-output", "hide-input"]
timed = files.ROOT / "figures" / "data" / "strided.txt"
if timed.exists():
    print(timed.read_text(encoding="utf-8"))

# %% [markdown]
# **Predict.** X is a 4096 × 4096 matrix in fp32 with contiguous rows. Neighbouring threads of a warp read neighbouring
# *rows* of one column. What fraction of the fetched bytes does this load use?
#
# - ☐ all of them, because the 32 numbers are neighbours in the column
# - ☐ an eighth
# - ☐ a thirty-second, because each thread reads one of 32 rows
#
# <details><summary>Answer</summary>
#
# **an eighth.** Neighbours in a column are 4,096 elements apart, so each thread fetches a sector of 32 bytes and uses 4
# of them. In our count, this case is the stride of 4,096. </details>
#
# In Triton, you do not choose which thread gets which element of a block. The compiler chooses for you. It assigns
# neighbouring elements to neighbouring threads along the dimension whose stride is 1, if it knows which dimension that
# is. If the column's number is added without a factor, as in the next section's `X + row * x_stride + column`, the
# compiler sees that its stride is 1. In your `copy_kernel`, however, both strides are arguments. Triton looks at each
# integer argument when you launch the kernel. If an argument is 1, Triton compiles a version of the kernel in which
# this argument is the constant 1, so the compiler knows it there as well. For a contiguous matrix, `column_stride` is
# 1, and for its transpose, `row_stride` is 1. From blocks of 16 × 16 on, neighbouring threads then read neighbouring
# numbers in both cases. Only your blocks of 8 × 8 are too small for that. They have fewer elements than the program has
# threads, and Triton 3.9 then reads the transpose row by row, so neighbouring threads read numbers that are far apart.
#
# <details><summary>Why do the package's kernels write <code>stride // 8 * 8</code>?</summary>
#
# One thread can load 16 bytes with a single instruction, but only from an address that is a multiple of 16 bytes. So
# the compiler has to know that each row begins at such an address. For numbers of two bytes, this means that the row
# stride, which is counted in elements, must be a multiple of 8:
#
# | what the compiler | condition on the row stride | stride 64 or 80 | stride 72 (144 bytes) |
# | --- | --- | --- | --- |
# | needs | stride · 2 bytes is a multiple of 16, so the stride is a multiple of 8 | true | true, since 72 = 9 · 8 |
# | is told by Triton | the stride is a multiple of 16 | true | false |
#
# For each integer argument, Triton only tells the compiler whether it is divisible by 16. At d = 72, the compiler
# therefore falls back to two-byte loads and needs eight times as many of them. The expression `stride // 8 * 8` leaves
# 72 unchanged, but shows the compiler that the result is a multiple of 8.
# </details>

# %% [markdown]
# ### How does a program find a whole row?
#
# For a softmax, a program needs a whole row, because the maximum and the sum are taken over all of its columns. The
# blocks in this kernel are therefore as wide as the row, rounded up to a power of two. `tl.max(x, 0)` and `tl.sum(x,
# 0)` reduce a block over dimension 0, and `tl.exp(x)` computes the exponential of each element.
#
# **Build.** Write the softmax of each row, with one program per row. The rows of X are `x_stride` apart, the rows of Y
# are `y_stride` apart, and neighbouring columns are adjacent in memory in both. As `other`, a load also accepts
# `float("-inf")`.

# %%
@triton.jit
def softmax_kernel(X, Y, columns, x_stride, y_stride, B: tl.constexpr):
    pass


def softmax(X, Y):
    rows, columns = X.shape
    softmax_kernel[(rows,)](X, Y, columns, X.stride(0), Y.stride(0),
                            B=triton.next_power_of_2(columns))


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
scores = guarded(normal(5, 24, dtype=torch.float32))[0]
cases = {
    "5 rows of 16, which are 24 apart. Is x_stride used, and is the sum of a row 1?":
        scores[:, :16],
    "scores in the thousands. Is the maximum subtracted?": 1e3 * scores[:, :16],
    "5 rows of 10 in blocks of 16. What do the 6 missing columns add to the sum?": scores[:, :10],
    "5 rows of 10, all scores below −100. Is a missing column's score still the smallest?":
        scores[:, :10] - 200,
}
judge_launch(softmax, {words: ((x,), x.softmax(1)) for words, x in cases.items()})

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def softmax_kernel(X, Y, columns, x_stride, y_stride, B: tl.constexpr):
#     row, column = tl.program_id(0), tl.arange(0, B)
#     real = column < columns
#     x = tl.load(X + row * x_stride + column, mask=real, other=float("-inf"))
#     e = tl.exp(x - tl.max(x, 0))  # (B,) 0 in missing columns
#     tl.store(Y + row * y_stride + column, e / tl.sum(e, 0), mask=real)
# ```
# </details>

# %% [markdown]
# This kernel is nearly the second kernel of rung 00. It also shows a limit of standard attention, because a whole row
# must fit into one program's registers. FA2's online softmax, by contrast, only ever needs one tile of the row.
#
# ### How are two blocks multiplied?
#
# `tl.dot(a, b)` multiplies two blocks on the tensor cores. The elements of a and b have 16 bits (in this case fp16),
# and those of the result have 32. The dimension that is summed over, which is the number of a's columns, must be at
# least 16. A longer sum is cut into blocks. The program loops over them and adds up the products in an fp32
# *accumulator*.
#
# **Build.** Write C = A B, with one program for each T × T tile of C. A is M × K, B is K × N, and all three have
# contiguous rows. `tl.zeros((T, T), tl.float32)` creates the accumulator, and `range(0, K, T)` works in a kernel as it
# does in Python.

# %%
@triton.jit
def product_kernel(A, B, C, M, N, K, T: tl.constexpr):
    pass


def product(A, B, C):
    (M, K), N = A.shape, B.shape[1]
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))  # one program for each tile of C
    product_kernel[grid](A, B, C, M, N, K, T=16)


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def factors(M, N, K):
    a, b = normal(M, K), normal(K, N, seed=1)
    return (guarded(a)[0], guarded(b)[0]), (a.double() @ b.double()).float()


cases = {
    "one tile, K = 16. Where do a's rows and b's columns come from?": factors(16, 16, 16),
    "32 × 48, K = 64. Is c added to in each pass, and do a and b both move on?":
        factors(32, 48, 64),
    "20 × 40, K = 32. Do rows and columns end where C ends?": factors(20, 40, 32),
    "K = 24 in blocks of 16. Are a and b 0 where the sum has ended?": factors(16, 16, 24),
}
judge_launch(product, cases, tolerance=1e-3)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def product_kernel(A, B, C, M, N, K, T: tl.constexpr):
#     row = tl.program_id(0) * T + tl.arange(0, T)[:, None]  # (T, 1)
#     column = tl.program_id(1) * T + tl.arange(0, T)[None, :]  # (1, T)
#     c = tl.zeros((T, T), tl.float32)
#     for first in range(0, K, T):
#         k = first + tl.arange(0, T)
#         left, down = k[None, :], k[:, None]
#         a = tl.load(A + row * K + left, mask=(row < M) & (left < K), other=0.0)
#         b = tl.load(B + down * N + column, mask=(down < K) & (column < N), other=0.0)
#         c += tl.dot(a, b)
#     tl.store(C + row * N + column, c, mask=(row < M) & (column < N))
# ```
# </details>

# %% [markdown]
# ### What does `num_warps` change?
#
# A launch can also set the number of warps per program, as in `product_kernel[grid](…, num_warps=8)`. By default, a
# program has 4. The result is the same for every number, but the compiled code is not, and a bad choice can be costly.
#
# To see the difference, we compile two kernels with 2, 4 and 8 warps, and change nothing else. They are the softmax and
# the last matmul of rung 00, which are larger versions of your last two kernels. The softmax has rows of 4,096
# elements, and the matmul multiplies 64 × 64 tiles of P by 64 × 128 tiles of V. The compiler can do this for GPUs that
# are not in this machine, namely an A100 (sm_80) and an H200 (sm_90):

# %%
WARPS = 2, 4, 8
asked = [dict(num_warps=W) for W in WARPS]
compiled = {chip: xray_launches("00", asked, chip, causal=False) for chip in ("sm_80", "sm_90")}

# %% tags=["nbval-ignore-output", "hide-input"]
def instructions(kernel, name):  # of one thread
    return len(re.findall(rf"\b{re.escape(name)}\b", kernel.stages["sass"]))


def shared_by(kernel):  # how the product's warps are arranged
    return next(re.search(r"warpsPerCTA = (\[.*?\])", x)[1] for x in kernel.layouts.values()
                if "nvidia_mma" in x)


print("softmax of 4,096 numbers       numbers     registers     loads of   shuffles and")
print("          warps   threads    per thread    per thread     16 bytes       barriers")
for chip, launches in compiled.items():
    for W, (_, kernel, _) in zip(WARPS, launches, strict=True):
        talk = sum(instructions(kernel, name) for name in ("SHFL", "BAR"))
        loads = instructions(kernel, "LDG.E.128")
        print(
            f"{chip:7}{W:8}{32 * W:10}{4096 // 32 // W:14}{kernel.numbers['registers']:14}{loads:13}{talk:15}"
        )
print("\nP V, a tile of 64 × 128   registers   warp grid   instructions of the tensor cores")
for chip, launches in compiled.items():
    for W, (*_, kernel) in zip(WARPS, launches, strict=True):
        kind = "HGMMA" if instructions(kernel, "HGMMA") else "HMMA"
        print(
            f"{chip:7}{W:8}{kernel.numbers['registers']:20}{shared_by(kernel):>12}{instructions(kernel, kind):7} {kind}"
        )

# %% [markdown]
# **Too few warps.** The last three lines of the output are for the matmul on an H200. With two warps, the result alone
# takes 64 · 128 / 64 = 128 registers per thread. With operands and addresses, a thread needs 254, which is one less
# than the most that it can have. It also runs 128 small tensor-core instructions (`HMMA`), whereas with four warps it
# runs 4 large ones (`HGMMA`). The reason is that on this chip, four warps issue an `HGMMA` together, so a program with
# only two warps cannot use it.
#
# **More warps.** With twice as many warps, a thread holds half as many elements, so it needs fewer registers and fewer
# loads. But a row's maximum and sum have to be combined across all threads. Within a warp, the threads read each
# other's registers, which is called a *shuffle*. Between warps, the values go through shared memory, with barriers. The
# number of shuffles and barriers does not decrease, so more warps do not by themselves make a kernel faster.
#
# **Which warp owns what?** The column *warp grid* gives the rows and columns in which the warps are arranged on the
# result. In the sketch, each digit is the warp that owns a piece of 16 rows and 16 columns of the 64 × 128 result. For
# `[1, 4]`, we draw each warp's columns side by side, although they alternate in strips on the chip. For the question of
# which rows a warp owns, this makes no difference:
#
# ```text
#      [4, 1]               [1, 4]               [4, 2]
#
# 1 1 1 1 1 1 1 1      1 1 2 2 3 3 4 4      1 1 1 1 5 5 5 5
# 2 2 2 2 2 2 2 2      1 1 2 2 3 3 4 4      2 2 2 2 6 6 6 6
# 3 3 3 3 3 3 3 3      1 1 2 2 3 3 4 4      3 3 3 3 7 7 7 7
# 4 4 4 4 4 4 4 4      1 1 2 2 3 3 4 4      4 4 4 4 8 8 8 8
# ```
#
# Compare the sketch with the picture of chapter 07. In `[4, 1]`, each warp owns whole rows, which is split-Q. In `[1,
# 4]`, each warp owns some columns of every row, and in `[4, 2]`, two warps share each row. `[2, 4]` means two rows of
# four warps. For a single matmul, all of these are fine, because no warp needs another warp's results. In attention,
# however, the softmax between the two matmuls needs whole rows, so only `[4, 1]` avoids the exchange between warps.
#
# On an H200, an `HGMMA` itself assigns 16 rows to each of its four warps. On an A100, each warp issues its own matmuls,
# so the compiler chooses the arrangement. Chapter 11 shows how it chooses, and what happens if a tile has too few rows
# for its warps. Until then, the default of 4 warps is all that you need.

# %% [markdown]
# ## Part 2 · Algorithm 1 as a kernel (50 minutes)
#
# You have already written everything that attention needs. An attention kernel finds rows by their addresses, runs two
# matmuls, and takes a softmax between them. The loop over row blocks disappears, because each of its iterations is a
# program, so only the loop over column blocks remains.
#
# ### Where are a program's rows?
#
# The rungs load a block of rows with `load_rows`. In each head, the rows are contiguous, so the row stride is d. If
# `RAGGED` is true, the block can extend past the last row. Offsets of 2³¹ or more do not fit in 32 bits, so the offset
# of the first row has 64 bits. The picture below shows the last block of rows, which extends past the end of a head,
# for d = 4.

# %%
@triton.jit
def load_rows(X, first, N, B: tl.constexpr, d: tl.constexpr, RAGGED: tl.constexpr):
    row, column = tl.arange(0, B)[:, None], tl.arange(0, d)[None, :]
    at = X + tl.cast(first, tl.int64) * d + (row * d + column)  # (B, d)
    if RAGGED:
        return tl.load(at, mask=first + row < N, other=0.0)
    else:
        return tl.load(at)

# %% tags=["hide-input"]
show("ragged_edge")

# %% [markdown]
# Models often compute Q as (N, heads, d) and pass on a transposed view, (heads, N, d). In this view's memory, rows of
# other heads come between two rows of head 0. `load_rows` would read such a row as head 0's next row without raising an
# error, and a test with one head would pass. Our rungs therefore make a contiguous copy of such a view (`contiguous()`)
# before they launch a kernel. The package's own kernel accepts strides, as your `copy` does.
#
# ### Which exponential does a GPU have?
#
# A GPU's special function units compute $2^x$, and $e^x = 2^{x \log_2 e}$. So instead of multiplying the scores by
# $\tau$, we multiply them by $\tau \log_2 e$, which is called `tau_log2`, and use `exp2`. But `visit`, the function
# below, does not multiply the block of scores in a separate step, because that would take one more instruction per
# score. Two kinds of numbers therefore occur in it:
#
# | variable | holds | unit |
# | --- | --- | --- |
# | `s_ij` | the raw product $q \cdot k$ | not scaled yet |
# | `m_i`, `m_new` | the largest of tau_log2 · s | an exponent of 2 |
# | `tau_log2 * s_ij - m_new` | the exponent of `p_ij`, by one FMA per score | an exponent of 2 |
#
# For example, let tau_log2 = 0.5 and let a row have the raw scores 6 and 4. Then m is 0.5 · 6 = 3, and the weights are
# $2^{3-3} = 1$ and $2^{2-3} = 0.5$. Since tau_log2 is positive, the largest raw score also has the largest exponent.
# That is why `visit` can take the maximum of the raw scores first and scale only this maximum.
#
# The function `visit` adds one tile to a row block's state. The tags on its lines refer to Algorithm 1 of the FA2
# paper. With `MASKED`, row r sees the first `seen[r]` keys of the tile, and every other score becomes −∞. A Python
# global like `NEG_INF` must be a `tl.constexpr`. The interpreter also accepts an ordinary global, but the GPU compiler
# rejects it.

# %%
NEG_INF, LOWEST = tl.constexpr(float("-inf")), tl.constexpr(-1.0e30)
LN2 = tl.constexpr(math.log(2))


@triton.jit
def visit(o_i, l_i, m_i, q_i, k_j, v_j, seen, tau_log2, MASKED: tl.constexpr):
    s_ij = tl.dot(q_i, k_j.T)  # (B_r, B_c)  FA2.A1.L8
    if MASKED:
        s_ij = tl.where(tl.arange(0, k_j.shape[0])[None, :] < seen[:, None],
                        s_ij, NEG_INF)
    m_new = tl.maximum(m_i, tau_log2 * tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
    p_ij = tl.exp2(tau_log2 * s_ij - m_new[:, None])  # (B_r, B_c)  FA2.A1.L9
    alpha = tl.exp2(m_i - m_new)  # (B_r,)  FA2.A1.L9
    l_i = alpha * l_i + tl.sum(p_ij, 1)  # (B_r,)  FA2.A1.L9
    o_i = alpha[:, None] * o_i + tl.dot(p_ij.to(v_j.dtype), v_j)  # (B_r, d)  FA2.A1.L10
    return o_i, l_i, m_new

# %% [markdown]
# **Predict.** Let Q = 0, so that all scores are 0, and let 10 keys have the value 1. In a block of 16, six rows of K
# and V are missing and are loaded as zeros. What is the output if no line sets the scores of these six to −∞, so that
# they stay 0?
#
# - ☐ 1, as zeros add nothing
# - ☐ NaN
# - ☐ 0.625
#
# <details><summary>Answer</summary>
#
# **0.625.** Since exp(0) = 1, each of the six missing keys gets a weight. The weights sum to 16, but the missing values
# are loaded as zeros, so the output is 10 / 16.
#
# ```python
# values = np.append(np.ones(10), np.zeros(6))
# for missing in (0.0, -np.inf):
#     p = np.exp(np.append(np.zeros(10), np.full(6, missing)))
#     O = p @ values / p.sum()
#     print(f"missing scores are {missing}: {O}")
# ```
#
# ```text
# missing scores are 0.0: 0.625
# missing scores are -inf: 1.0
# ```
# </details>
#
# Even with p = 0 for a missing key, its row of V must be loaded as zeros. Memory past the end can hold NaN, and 0 · NaN
# is NaN.

# %% [markdown]
# **Predict.** After the last tile, a kernel stores $L = m + \log_2 \ell$. What goes wrong?
#
# - ☐ O and the gradients
# - ☐ the gradients, but not O
# - ☐ nothing, as base 2 is used throughout
#
# <details><summary>Answer</summary>
#
# **the gradients, but not O.** In base 2, p, α, ℓ, o and O have the same values as before, but this L is a base-2
# logarithm. For eight keys with a score of 0, L is log₂ 8 = 3, although it should be ln 8 = 2.08. The backward pass
# computes $P = e^{S-L}$, so with this L, the rows of P do not sum to 1. The kernel therefore has to multiply L by ln 2
# before it stores L. A test of O does not reveal the mistake.
# </details>

# %% [markdown]
# ### Which keys does a row see?
#
# Under a causal mask, the last row sees all keys, even if $N_q \neq N_k$. Row r sees the first $r + 1 + N_k - N_q$
# keys, or none if that number is negative. `keys_seen` computes this number for a block of rows. Without a causal mask,
# the number is $N_k$ for each row, and `0 * row` is added only to make it a block of B_r numbers, as in the causal
# case.
#
# A row without keys is a trap (chapter 02), because its maximum stays at −∞, and −∞ − (−∞) is not a number. In each
# tile, chapter 04 replaced such a maximum with 0. Our rungs instead initialize m to `LOWEST`, which is $-10^{30}$, so
# the loop needs no extra line. Since −∞ − (−10³⁰) is −∞, $p = 2^{-\infty} = 0$, and ℓ stays 0.

# %%
@triton.jit
def keys_seen(row, N_q, N_k, CAUSAL: tl.constexpr):
    # minimum: rows past the end would otherwise see more than N_k keys
    return (tl.minimum(tl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL
            else N_k + 0 * row)  # N_k for each row

# %% [markdown]
# ### Now write it
#
# Your kernel works on one head. In it, `i` is the first *row* of a row block, and `j` is the first *key* of a column
# block.
#
# **Build.** Write the forward kernel for one head. It must support a causal mask, and rows that see no key must get O =
# 0 and L = −∞. Always pass `MASKED=True` to `visit`, since this also masks the keys past the end. You can use
#
# - `load_rows`, `keys_seen`, which counts from key 0, and `visit`, which counts from the tile's first key,
# - the constants `LOWEST`, `NEG_INF` (−∞) and `LN2` (ln 2),
# - `tl.zeros(shape, tl.float32)` and `tl.full(shape, value, tl.float32)` for the state (o, ℓ, m), which is in fp32, and
#   in which one number per row has the shape `(B_r,)`,
# - `tl.log2(x)`, and `tl.where(condition, a, b)`, which works as `np.where` does,
# - `tl.store`, which converts the values to the tensor's type.

# %%
@triton.jit
def my_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, CAUSAL: tl.constexpr,
              d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
    pass


def my_forward(Q, K, V, O, L, causal):  # one head: (N, d)
    (N_q, d), N_k = Q.shape, len(K)
    grid = (triton.cdiv(N_q, 16),)  # one program for each row block
    my_kernel[grid](Q, K, V, O, L, N_q, N_k, d**-0.5 / math.log(2), CAUSAL=causal, d=d, B_r=16,
                    B_c=16)


# %% tags=["hide-input"]
# Check: run this cell when you have written your function. You do not have to read it.
def my_attention(q, k, v, causal):  # O and L by your kernel; nothing if it stores nothing
    (O, after_O), (L, after_L) = (guarded(torch.full(s, torch.inf), 7.0)
                                  for s in (q.shape, q.shape[:1]))
    my_forward(*(guarded(x)[0] for x in (q, k, v)), O, L, causal)
    for name, behind in (("O", after_O), ("L", after_L)):
        if (behind != 7).any():
            raise IndexError(f"the kernel wrote past the end of {name}, into memory that is "
                             "not its own")
    return None if O.isinf().all() and L.isinf().all() else (host(O), host(L))


my_attention.__name__ = "my_kernel"


def truth(q, k, v, causal=False):  # float64, with all of S
    O, L = heads.forward(*(host(x)[None, None] for x in (q, k, v)), stage="naive", causal=causal)
    return O[0, 0], L[0, 0]


Q, K, V = normal(45, 16), normal(70, 16, seed=1), normal(70, 16, seed=2)
few, far, huge = normal(12, 16, seed=1), normal(20, 16), 100 * normal(16, 16)
cases = {
    "16 queries and keys. Does visit get MASKED? Is o divided by ℓ, L a natural log?":
        (*3 * [huge / 100], False),
    "45 queries, 70 keys. Is visit masked, does `seen` count from j, is key 69 reached?":
        (Q, K, V, False),
    "scores in the thousands. Is the maximum subtracted?": (huge, huge, huge / 100, False),
    "45 queries, 70 keys, causal. Is key r + 25 the last that row r sees?": (Q, K, V, True),
    "20 queries, 12 keys, causal: rows 0 to 7 see no key. What are their O and L?":
        (far, few, few, True),
}
asked = {words: one_head(*map(host, case[:3]), causal=case[3], tile=(16, 16))
         for words, case in cases.items()}
tried = (Case(words, case, truth(*case), asked[words]) for words, case in cases.items())
check(my_attention, *tried, tolerance=2e-3, names=("O", "L"))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# @triton.jit
# def my_kernel(Q, K, V, O, L, N_q, N_k, tau_log2, CAUSAL: tl.constexpr,
#               d: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr):
#     i = tl.program_id(0) * B_r  # FA2.A1.L3
#     row, column = i + tl.arange(0, B_r), tl.arange(0, d)
#     seen = keys_seen(row, N_q, N_k, CAUSAL)  # (B_r,)
#     q_i = load_rows(Q, i, N_q, B_r, d, True)  # FA2.A1.L4
#     o_i, l_i = tl.zeros((B_r, d), tl.float32), tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
#     m_i = tl.full((B_r,), LOWEST, tl.float32)  # FA2.A1.L5
#     for j in range(0, N_k, B_c):  # FA2.A1.L6
#         k_j = load_rows(K, j, N_k, B_c, d, True)  # FA2.A1.L7
#         v_j = load_rows(V, j, N_k, B_c, d, True)  # FA2.A1.L7
#         o_i, l_i, m_i = visit(o_i, l_i, m_i, q_i, k_j, v_j, seen - j, tau_log2, True)
#     empty = l_i == 0.0  # a row that sees no key
#     o_i = o_i / tl.where(empty, 1.0, l_i)[:, None]  # FA2.A1.L12
#     L_i = tl.where(empty, NEG_INF, (m_i + tl.log2(l_i)) * LN2)  # FA2.A1.L13
#     at = O + row[:, None] * d + column[None, :]
#     tl.store(at, o_i, mask=row[:, None] < N_q)  # FA2.A1.L14
#     tl.store(L + row, L_i, mask=row < N_q)  # FA2.A1.L15
# ```
# </details>
#
# [Assignment 4](assignments/4_triton_forward.ipynb) goes further. There, your kernel must work for all lengths, with
# NaN past every end.
#
# <details><summary>How is a tolerance chosen?</summary>
#
# It has to be above the rounding errors of a right kernel and below the errors of a wrong one. The check measures ‖x −
# truth‖ / ‖truth‖ against float64. In fp16, rounding changes a number by up to 2⁻¹¹, or 0.05%, and P and O are both
# rounded, so a right kernel has an error of about 0.0003 (recorded for five kernels on an H200, N = 2,048, d = 128).
# The check above allows 0.002. A real mistake is usually much larger. For example, if the last of the 70 keys is left
# out, the error of O is 0.13. In bf16, rounding errors are eight times as large, so the tolerance would have to be as
# well.
#
# You can also avoid the choice. FlashAttention's own tests compare with standard attention, written in PyTorch, in the
# same 16-bit format. They measure both errors against a float32 reference, and the kernel's largest error may be at
# most twice that of standard attention (three times for some gradients). Appendix D tests in a similar way.
# </details>

# %% [markdown]
# ### Which tiles need the mask?
#
# Your kernel masks every tile. In chapter 04, the tiles of a row block were first FULL, then DIAGONAL, and then SKIP.
# Two bounds, both counted in keys, are enough to tell these three kinds apart. Every row sees all keys before `full`,
# and no row sees a key from `last` on. The first row of a block sees the fewest keys, so it decides `full`, and the
# last row sees the most, so it decides `last`. `full` is rounded down to a whole number of tiles. For example, let
# there be 70 keys, tiles of 64 keys, and no causal mask. Every row sees all 70 keys, so `last` is 70, and `full` is 70
# rounded down to 64. The tile between the two bounds is the ragged one, with keys 64 to 69. Without a causal mask,
# there is never more than one such tile.

# %%
seen = np.minimum(np.arange(600) + 1, 600)  # 600 queries and keys, tiles of 128 × 64
for i in range(0, 600, 128):
    full, last = seen[i] // 64 * 64, seen[min(i + 127, 599)]
    free, masked = full // 64, -(-(last - full) // 64)
    print(f"rows from {i:3}: {free} unmasked, {masked} masked, {10 - free - masked} skipped")

# %% [markdown]
# With as many keys as queries, and tiles of 128 × 64, the mask cuts through at most two tiles of each row block. At
# N = 8,192, these are 3% of the 65 tiles that a row block visits on average (2, 4, 6, …, 128). In rung 11, the mask
# cuts through only one tile, because the tiles are 64 × 64. The kernel therefore gets two loops. The first loop goes
# from `full` to `last` and calls `visit` with `MASKED`. The second loop ends at `full` and needs neither the causal
# mask nor the mask for the loads.

# %% [markdown]
# ### Which numbers may have 16 bits?
#
# The operands of a matmul can be 16-bit, but sums need 32 bits. Q, K, V and O are stored in 16 bits, and p is converted
# to 16 bits for the second matmul, but `o_i` and `l_i` stay in fp32. Since $o$ is divided by ℓ only at the end, it
# grows. For example, over 2,048 keys with equal scores and a value of 40, it reaches 81,920. The largest finite fp16
# number is 65,504, so in fp16, `o_i` would become ∞. For fp32 inputs, `tl.dot` has an exact setting,
# `input_precision="ieee"`, which chapter 11 explains.

# %% [markdown]
# ### All lines together
#
# The next cell prints the kernel of rung 11 and the lines that launch it. In this chapter and the next, `load` is the
# package's function that imports a rung, as in `load("11")`, and it has nothing to do with `tl.load`. The kernel now
# also has a second program number, `head`, because a launch has $T_r$ programs for each head of each sequence.
# `O.dtype.element_ty` is the type of O's elements. With `num_stages=3`, shared memory has room for three blocks of K
# and of V, so the GPU copies later blocks while it computes. `enable_fp_fusion` lets the compiler fuse a multiplication
# and the following addition into one instruction. The masked loop comes first, for a reason that chapter 10 explains.
# Find the two loops, the two bounds, and the line that initializes m.
#
# <details><summary>What do stages cost, and who chooses such launch options?</summary>
#
# A stage holds one block of K and one of V. With 64 keys, d = 128 and two bytes per number, that takes 32 KiB, and q
# takes another 16 KiB. With three stages, rung 11 therefore needs 112 KiB of shared memory per program, so two programs
# fit into the 228 KiB of an H200's SM. With one stage, it would need 48 KiB, and four would fit by shared memory.
#
# More stages hardly cost registers, because the copies go directly into shared memory. Compiled for an H200 without a
# mask, rung 11 uses 168 registers per thread with two, three or four stages, and 179 with one. `num_warps`, by
# contrast, changes the registers and not the shared memory. With eight warps instead of four, a thread uses 138
# registers, but the program still needs 112 KiB of shared memory, because it has the same blocks.
#
# The rungs' options are fixed in their code. Triton can also search for good options. The decorator
# `@triton.autotune(configs=[…], key=["N_q", "N_k", "d", "CAUSAL"])` goes above `@triton.jit`. An entry of `configs` is,
# for example, `triton.Config({"B_r": 64, "B_c": 64}, num_warps=4, num_stages=3)`, and the grid becomes a function of
# the chosen sizes. At the first call, the autotuner times the kernel with all of them, and keeps the fastest. It
# searches again whenever an argument in `key`, or the type of a tensor, has a value that it has not seen. An argument
# that changes the best choice therefore belongs in `key`, but every new length then starts a new search. Chapter 11
# shows what can go wrong.
# </details>
#
# <details><summary>How can you choose block sizes before you compile?</summary>
#
# Estimate the two resources that a program needs on an H200:
#
# - **Shared memory** holds q and, for n stages, n blocks of K and of V. In two-byte numbers, that takes $2\,(B_r + 2 n
#   B_c)\,d$ bytes, and a program can have up to 227 KiB. If it needs more, it does not run at all.
# - **Registers** hold o and a tile of S in fp32, and a tile of P in 16 bits. With about 40 more for everything else, a
#   thread needs about $40 + (B_r d + 1.5\,B_r B_c) / \text{threads}$ registers, and it can have up to 255. If it needs
#   more, the compiler *spills*, which means that it keeps some values in slower memory (chapter 04).
#
# For rung 11, with 128 threads, the second sum is 40 + (64 · 128 + 1.5 · 64 · 64) / 128 = 152. The compiler uses 168,
# and usually the sum is too low. Appendix A compares it with 32 compiled kernels. All kernels with a sum above 255
# spill, and none with a sum below 120 does. In between, only the compiler can tell, so print the number of spills with
# `fa2-lab xray`.
#
# A good first choice is 64 rows and 64 keys for 4 warps, so that each warp has 16 rows. If you double the rows, double
# the warps as well, because then each thread has as much to hold as before. With 128 rows and 4 warps, the sum is 264,
# and rung 11 spills. With 128 rows and 8 warps, the sum is 152 again, and it does not spill (chapter 04).
#
# Add stages as long as the same number of programs fits on an SM. With one stage, two programs of rung 11 fit, because
# of their 179 registers per thread. With two or three stages, still two programs fit, because of their 80 or 112 KiB.
# With four stages, each would need 144 KiB, and only one would fit.
# </details>

# %% tags=["nbval-ignore-output"]
rung = load("11")
print(getsource(rung.forward_kernel.fn))
print("\n".join(getsource(rung.forward).splitlines()[-4:-1]))

# %% tags=["hide-input"]
show("grid_addresses")

# %% [markdown]
# `load_rows`, `keys_seen` and `visit` are the functions from above. With grouped-query attention (chapter 05), a
# program reads K and V from the K/V head `head // group`, where `group` query heads share one K/V head. The package's
# own kernel also supports other strides, any d up to 256, fp32, windows and dropout.
#
# ### How do we time it?
#
# Calling a kernel only puts it into a queue. Python does not wait for it, so a stopwatch around the call would measure
# only the time to enqueue it. Instead, the GPU itself records the time at two *events*, one before the kernel and one
# after it. We discard the first calls, because they compile the kernel and wake up the GPU. Before each call, we fill
# L2 with other data. Otherwise, every call after the first would find its inputs in L2, and would be faster than in a
# model. `milliseconds` does all of this in a dozen lines:

# %%
def milliseconds(call, repeats=20):
    for _ in range(3):  # warm-up: the first call compiles
        call()
    other, times = torch.empty(2**28, dtype=torch.uint8, device="cuda"), []
    for _ in range(repeats):
        other.zero_()  # 256 MiB, more than any L2 holds
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()  # wait until the GPU has passed the second event
        times.append(start.elapsed_time(end))
    return statistics.median(times)  # one disturbed call does not move it

# %% [markdown]
# With a GPU, the next cell times rung 11 and PyTorch's `scaled_dot_product_attention`, and you can add your own kernels
# to `calls`. Its last two calls test what part 1 told you about sectors. Both copy the same number of elements, but the
# second copy reads only every 8th element of a larger tensor. Without a GPU, you see the times that were recorded on an
# H200:

# %% tags=["nbval-ignore-output"]
if device == "cuda":
    q, k, v = torch.randn(3, 4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    X = torch.randn(2**29, device="cuda")  # 2 GiB
    calls = {
        "rung 01": lambda: load("01").forward(q, k, v, False),
        "rung 11": lambda: rung.forward(q, k, v, False),
        "scaled_dot_product_attention":
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        "a copy of 64 Mi numbers, one after the other": lambda: X[: 2**26].clone(),
        "a copy of 64 Mi numbers, every 8th": lambda: X[::8].clone(),
    }
    for name, call in calls.items():
        print(f"{name:46} {milliseconds(call):7.3f} ms")
else:
    for name, ms in milliseconds_on_H200.items():
        print(f"{name:46} {ms:7.3f} ms")

# %% [markdown]
# PyTorch picks one of several kernels, so the time of `scaled_dot_product_attention` depends on PyTorch's version and
# on the GPU. The recorded time is for PyTorch's FlashAttention-2. On the H200, rung 11 is faster, because
# FlashAttention-2 was written for the previous generation of GPUs. FlashAttention-3, which was written for this
# generation, is faster than rung 11. Chapter 10 measures the rungs that lead from rung 11 to this speed, and adds a few
# more rules for timing.
#
# ## Recap
#
# - A program is a thread block. It knows only its own number, so you must compute the addresses and the masks. `X + 1`
#   is the address of the next element.
# - A load fetches whole sectors of 32 bytes, so neighbouring threads should read neighbouring numbers.
# - A larger `num_warps` divides every block among more threads, so it changes the number of registers per thread and
#   the arrangement of the warps.
# - The launch replaces the loop over row blocks. $o$, ℓ and m stay in registers, in fp32.
# - Exponentials are computed with `exp2`, and the scale includes the factor $\log_2 e$. L is stored as a natural
#   logarithm.
# - Two bounds, `full` and `last`, tell which tiles of a row block need the mask and which are skipped.
# - You can recognise three mistakes by their numbers, namely two doubled numbers past the end, 0.625 instead of 1, and
#   an L that is too large by a factor of 1 / ln 2 = 1.44.
# - To time a kernel, use events, a warm-up, an L2 filled with other data, and the median.

# %% [markdown]
# ## Checks
#
# The cell below compares this notebook's functions with those of rung 11, and the rung's result with the dense result
# in float64.

# %% tags=["hide-input"]
for mine in (load_rows, keys_seen, visit):
    verdict(f"{mine.fn.__name__} here = rung 11's",
            same_code(mine, getattr(rung, mine.fn.__name__)))
q, k, v = normal(1, 2, 70, 16), normal(1, 2, 33, 16, seed=1), normal(1, 2, 33, 16, seed=2)
want = heads.forward(*map(host, (q, k, v)), stage="naive", causal=True)
right = [close(host(a), b, 2e-3) for a, b in zip(rung.forward(q, k, v, True), want, strict=True)]
verdict("rung 11 = the dense result, causal, with rows that see no key", all(right))
first, standard, _, last = milliseconds_on_H200.values()
verdict("rung 01: ten times slower than PyTorch's FlashAttention-2, and slower than rung 00",
        first > max(10 * torch_flash, standard))
verdict("rung 11 is between FlashAttention-2 and -3",
        published.values["FlashAttention-3"][0] < last < torch_flash)
products = {chip: [kernel for *_, kernel in launches] for chip, launches in compiled.items()}
verdict("two warps: no HGMMA, and nearly 255 registers",
        all(not instructions(x[0], "HGMMA") and x[0].numbers["registers"] > 240
            for x in products.values()))
verdict("four warps: [1, 4] on sm_80, [4, 1] on sm_90",
        [shared_by(x[1]) for x in products.values()] == ["[1, 4]", "[4, 1]"])
softmaxes = [[kernel.numbers["registers"] for _, kernel, _ in launches]
             for launches in compiled.values()]
verdict("the softmax takes fewer registers per thread with more warps",
        all(x > y > z for x, y, z in softmaxes))

# %% [markdown] tags=["navigation"]
# [← Warps](07_warps.ipynb) · [The map](00_start.ipynb) · [The Triton backward kernels →](09_triton_backward.ipynb)
