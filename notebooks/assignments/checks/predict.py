"""Assignment 6, read the machine: waves, traffic, shared memory and the best block size, held against machine/.

Then the same for the backward: who adds into dQ, what one pass and two passes move, what a column block needs.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from fa2_lab.machine import budget, grid, io_model
from fa2_lab.machine.chips import CHIPS, KiB
from fa2_lab.tiles import Mask, Tiling, cdiv

from .guard import call
from .report import Failed, Report, parts, step

A100, H100, RTX = CHIPS["A100 SXM 80GB"], CHIPS["H100 SXM"], CHIPS["GeForce RTX 4090"]
SIZES = (64, 128)
WARPS = (4, 8)


def tiling(N: int, blocks: tuple[int, int], causal: bool) -> Tiling:
    return Tiling(N, N, *blocks, Mask(causal=causal))


# By hand --------------------------------------------------------------------------------------------------------


BY_HAND = [  # heads, N, d, (B_r, B_c): a seed takes one of them
    (32, 4096, 128, (128, 64)),
    (24, 8192, 128, (128, 64)),
    (40, 4096, 64, (128, 128)),
    (16, 8192, 128, (64, 64)),
    (20, 16384, 64, (128, 64)),
    (48, 2048, 128, (64, 128)),
    (12, 8192, 64, (64, 128)),
    (36, 4096, 128, (64, 64)),
]


def question(seed: int = 0) -> str:
    """The cell that gives a student the sizes of the question that is answered by hand."""
    heads, N, d, (B_r, B_c) = BY_HAND[seed % len(BY_HAND)]
    return f"heads, N, d, B_r, B_c = {heads}, {N}, {d}, {B_r}, {B_c}"


@step
def by_hand(report: Report, function, seed: int = 0) -> None:
    """Four numbers for one chip and shape; the check says too much or too little, not how much."""
    heads, N, d, blocks = BY_HAND[seed % len(BY_HAND)]
    cut = tiling(N, blocks, False)
    shared, moved = budget.forward_shared_bytes(*blocks, d), heads * bytes_moved(cut, d)
    truth = {
        "thread blocks": (heads * cut.T_r, "There is one thread block per head and row block."),
        "waves on an A100": (
            grid.waves(heads * cut.T_r, A100.SMs), "Each of the 108 SMs runs one thread block at a time."),
        "KiB of shared memory": (shared // KiB, "It holds Q once, and K and V in two stages, all in fp16."),
        "MiB moved": (moved / KiB**2, "Which tensors are moved once, and which once per row block?"),
    }  # fmt: skip
    for name, (want, hint) in truth.items():
        with report.check(name, hint):
            got = call(function)
            if not isinstance(got, dict) or not hasattr(got.get(name), "__float__"):
                raise Failed(f"a number under {name!r}", f"{got!r}"[:80])
            if not abs(got[name] - want) <= 0.01 * want:  # NaN is no number either
                verdict = "too small" if got[name] < want else "too large"
                raise Failed(f"{name}, right to 1%", f"{got[name]:g}, which is {verdict}")


def bytes_moved(cut: Tiling, d: int) -> int:
    """HBM bytes of one head's forward: 16-bit tensors, L in fp32."""
    form = io_model.fa2_forward(cut, d)
    return 2 * (form.total - form.stores["L"]) + 4 * form.stores["L"]


# Functions ------------------------------------------------------------------------------------------------------


def compare(name: str, got, want, where: str) -> None:
    """A number against the model's, exactly up to rounding."""
    if isinstance(got, bool) or not hasattr(got, "__float__"):
        raise Failed(f"{name}: a number", f"{got!r}"[:80], where)
    if not abs(float(got) - want) <= 1e-9 * max(1.0, abs(want)):
        raise Failed(f"{name} = {want:,.10g}", f"{float(got):,.10g}", where)


def varied(shapes, place: int, seed: int) -> list:
    """The shapes with other lengths, which stand at a place; seed 0 has them as they are."""
    draw = np.random.default_rng([6, seed])
    longer = [int(draw.integers(1, 64)) if seed else 0 for _ in shapes]
    return [(*x[:place], x[place] + more, *x[place + 1 :]) for x, more in zip(shapes, longer, strict=True)]


SHAPES = [(A100, 8, 4096, 128, 1), (H100, 7, 900, 128, 2), (RTX, 3, 2048, 64, 1)]


@step
def waves(report: Report, function, shapes=SHAPES, seed: int = 0) -> None:
    """Waves, and the share of the slots that work."""
    for chip, heads, N_q, B_r, resident in varied(shapes, 2, seed):
        where = f"{chip.name}, {heads} heads, {N_q} queries, B_r = {B_r}, {resident} block(s) per SM"
        blocks, slots = heads * cdiv(N_q, B_r), chip.SMs * resident
        hints = {
            "waves": "How many row blocks has one head, also if the last is short, and how many run at once?",
            "share of slots at work": "Count the row blocks of each head. The last wave is seldom full.",
        }
        wanted = grid.waves(blocks, slots), grid.efficiency(blocks, slots)
        for n, ((claim, hint), want) in enumerate(zip(hints.items(), wanted, strict=True)):
            with report.check(f"{claim}: {where}", hint):
                got = parts("(waves, share)", call(function, chip, heads, N_q, B_r, resident), 2)
                compare(claim.partition(" ")[0], got[n], want, where)


def in_words(N: int, d: int, blocks: tuple[int, int], causal: bool) -> str:
    """What is asked about, as a check says it."""
    return f"N = {N}, {f'd = {d}, ' if d else ''}tiles of {blocks[0]} × {blocks[1]}{', causal' if causal else ''}"


TRAFFIC = [(1024, 64, (128, 64), False), (1024, 64, (128, 64), True), (1000, 96, (64, 128), False)]


@step
def traffic(report: Report, function, shapes=TRAFFIC, seed: int = 0) -> None:
    """HBM bytes of one head."""
    hint = "Q, O and L are moved once, and K and V once for each row block that sees them."
    check_bytes(report, function, varied(shapes, 0, seed), bytes_moved, hint)


def check_bytes(report: Report, function, shapes, truth, hint: str) -> None:
    """Bytes that a student's function says against those of a model, truth(tiling, d)."""
    for N, d, blocks, causal in shapes:
        where = in_words(N, d, blocks, causal)
        with report.check(where, hint):
            compare("bytes", call(function, N, d, *blocks, causal), truth(tiling(N, blocks, causal), d), where)


FITS = [(A100, (128, 64), 128), (H100, (128, 128), 128), (RTX, (128, 128), 128), (A100, (64, 64), 64)]


@step
def fits(report: Report, function, shapes=FITS) -> None:
    """Bytes of shared memory, registers a thread, and whether both are to be had."""
    hint = "Do you compare the bytes with the limit of a block, and the registers with the limit of a thread?"
    check_fits(report, "forward", function, shapes, hint)


def check_fits(report: Report, kernel: str, function, shapes, hint: str) -> None:
    """The same for a program of the forward, or of the backward's first pass."""
    for (chip, blocks, d), warps in product(shapes, (*WARPS, 16)):
        where = f"{chip.name}, tiles of {blocks[0]} × {blocks[1]}, d = {d}, {warps} warps, 2 stages"
        want = budget.fit(chip, *blocks, d, 2, warps, kernel=kernel)
        with report.check(where, hint):
            got = parts("(shared, registers, fits)", call(function, chip, *blocks, d, 2, warps), 3)
            compare("shared memory in bytes", got[0], want.shared_bytes, where)
            compare("registers", got[1], want.registers, where)
            if bool(got[2]) is not want.ok:
                raise Failed(f"fits: {want.ok}", f"{got[2]!r}", where)


BEST = [(A100, 4096, 64, False), (A100, 4096, 128, True), (RTX, 2048, 128, False), (H100, 8192, 128, True)]


@step
def best_blocks(report: Report, function, shapes=BEST, seed: int = 0) -> None:
    """The block sizes that fit and move least."""
    for chip, N, d, causal in varied(shapes, 1, seed):
        where = f"{chip.name}, N = {N}, d = {d}{', causal' if causal else ''}"
        hint = "First drop the pairs that fit neither with 4 warps nor with 8, and then compare the bytes moved."
        with report.check(where, hint):
            got = tuple(parts("(B_r, B_c)", call(function, chip, N, d, causal), 2))
            if verdict := wrong_blocks(chip, got, N, d, causal):
                raise Failed("another pair of block sizes", f"{got}: {verdict}")


def wrong_blocks(chip, got: tuple, N: int, d: int, causal: bool) -> str:
    """What is wrong with a choice, without naming the right one; of equals, the largest B_c is right."""
    if got not in product(SIZES, SIZES):
        return f"each of the two must be {SIZES[0]} or {SIZES[1]}"
    fitting = [b for b in product(SIZES, SIZES) if any(budget.fit(chip, *b, d, 2, warps).ok for warps in WARPS)]
    if got not in fitting:
        return f"it does not fit on {chip.name}"
    moved = {b: bytes_moved(tiling(N, b, causal), d) for b in fitting}
    more = moved[got] - min(moved.values())
    if more:
        return f"it fits, but it moves {more:,} bytes more than necessary"
    is_largest = got == min(fitting, key=lambda b: (moved[b], -b[1]))
    return "" if is_largest else "another pair moves as few bytes, and its tiles are larger"


# The backward -----------------------------------------------------------------------------------------------------


WRITERS = [(512, (128, 64), True), (512, (64, 128), True), (1000, (128, 64), False), (777, (64, 64), True)]


@step
def writers(report: Report, function, shapes=WRITERS, seed: int = 0) -> None:
    """How many column blocks add into each row block of dQ."""
    for N, blocks, causal in varied(shapes, 0, seed):
        where = in_words(N, 0, blocks, causal)
        want = [len(workers) for workers in grid.dq_writers(tiling(N, blocks, causal))]
        hint = "Each column block has a program. Which row blocks see it, if you include their last row?"
        with report.check(where, hint):
            got = call(function, N, *blocks, causal)
            if not hasattr(got, "__len__") or len(got) != len(want):
                raise Failed(f"a list of {len(want)} numbers, one for each row block", f"{got!r}"[:80])
            for i, (mine, true) in enumerate(zip(got, want, strict=True)):
                compare(f"writers of dQ_{i}", mine, true, f"row block {i}, {where}")


def one_pass_bytes(cut: Tiling, d: int) -> int:
    """HBM bytes of Algorithm 2 for one head: 16-bit tensors, L, D and the sums of dQ in fp32."""
    form = io_model.fa2_backward(cut, d)
    wide = sum(moved.get(name, 0) for moved in (form.loads, form.stores) for name in ("L", "D", "dQ"))
    return 2 * (form.total - wide) + 4 * wide


def two_passes_bytes(cut: Tiling, d: int) -> int:
    """Two passes: Algorithm 2 without dQ, then one program for each row block that keeps dQ_i on chip."""
    form = io_model.fa2_backward(cut, d)
    columns = one_pass_bytes(cut, d) - 4 * (form.loads["dQ"] + form.stores["dQ"])
    once = 2 * 3 * cut.N_q * d + 4 * 2 * cut.N_q  # Q, dO and dQ in 16 bits, L and D in fp32
    return columns + once + 2 * 2 * io_model.cols_visited(cut) * d  # K and V for each row block that sees them


PASSES = [(1024, 64, (128, 64), False), (1024, 64, (64, 128), True), (1000, 96, (64, 64), False)]


@step
def backward_traffic(report: Report, function, shapes=PASSES, seed: int = 0) -> None:
    """HBM bytes of one head's backward in one pass."""
    hint = "O and dO are loaded once for D. Each visited tile moves Q, dO, L, D and dQ. Is dQ loaded, stored, or both?"
    check_bytes(report, function, varied(shapes, 0, seed), one_pass_bytes, hint)


@step
def passes(report: Report, function, shapes=PASSES, seed: int = 0) -> None:
    """One pass or two: the bytes of two, and which moves fewer."""
    for N, d, blocks, causal in varied(shapes, 0, seed):
        where, cut = in_words(N, d, blocks, causal), tiling(N, blocks, causal)
        hint = "The first pass no longer touches dQ, and the second has the loops of the forward pass."
        with report.check(where, hint):
            got = parts("(bytes of two passes, 1 or 2)", call(function, N, d, *blocks, causal), 2)
            compare("bytes of two passes", got[0], two_passes_bytes(cut, d), where)
            fewer = 1 if one_pass_bytes(cut, d) <= two_passes_bytes(cut, d) else 2
            if got[1] != fewer:
                raise Failed("the number of passes that moves fewer bytes", f"{got[1]!r}", where)


COLUMN_FITS = [(A100, (64, 128), 128), (H100, (64, 128), 128), (RTX, (128, 128), 64), (A100, (64, 64), 64)]


@step
def backward_fits(report: Report, function, shapes=COLUMN_FITS) -> None:
    """Bytes of shared memory, registers a thread, and whether both are to be had, for a program of the first pass."""
    hint = "A column block stays on chip, so dk and dv have B_c rows each. Which tensors pass by?"
    check_fits(report, "dkdv", function, shapes, hint)
