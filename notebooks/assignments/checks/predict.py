"""Assignment 6, read the machine: waves, traffic, shared memory and the best block size, held against machine/.

Then the same for the backward: who adds into dQ, what one pass and two passes move, what a column block needs.
"""

from __future__ import annotations

from fa2_lab.machine import budget, grid, io
from fa2_lab.machine.chips import CHIPS, KiB
from fa2_lab.tiles import Mask, Tiling, cdiv

from .guard import call
from .report import Failed, Report, parts

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


def by_hand(function, seed: int = 0) -> Report:
    """Four numbers for one chip and shape; the check says too much or too little, not how much."""
    report = Report("by_hand")
    heads, N, d, blocks = BY_HAND[seed % len(BY_HAND)]
    cut = tiling(N, blocks, False)
    truth = {
        "thread blocks": (heads * cut.T_r, "One for each head and row block."),
        "waves on an A100": (grid.waves(heads * cut.T_r, A100.SMs), "108 SMs, one thread block on each at a time."),
        "KiB of shared memory": (
            budget.forward_shared_bytes(*blocks, d) // KiB,
            "Q once, K and V in two stages, fp16.",
        ),
        "MiB moved": (heads * bytes_moved(cut, d) / KiB**2, "Which tensors pass by once, which once per row block?"),
    }
    for name, (want, hint) in truth.items():
        with report.check(name, hint):
            got = call(function)
            if not isinstance(got, dict) or not isinstance(got.get(name), (int, float)):
                raise Failed(f"a number under {name!r}", f"{got!r}"[:80])
            if not abs(got[name] - want) <= 0.01 * want:  # NaN is no number either
                verdict = "too small" if got[name] < want else "too large"
                raise Failed(f"{name}, to 1%", f"{got[name]:g}, which is {verdict}")
    return report


def bytes_moved(cut: Tiling, d: int) -> int:
    """HBM bytes of one head's forward: 16-bit tensors, L in fp32."""
    form = io.fa2_forward(cut, d)
    return 2 * (form.total - form.stores["L"]) + 4 * form.stores["L"]


# Functions ------------------------------------------------------------------------------------------------------


def compare(name: str, got, want, where: str) -> None:
    """A number against the model's, exactly up to rounding."""
    if isinstance(got, bool) or not hasattr(got, "__float__"):
        raise Failed(f"{name}: a number", f"{got!r}"[:80], where)
    if not abs(float(got) - want) <= 1e-9 * max(1.0, abs(want)):
        raise Failed(f"{name} = {want:,.6g}", f"{float(got):,.6g}", where)


SHAPES = [(A100, 8, 4096, 128, 1), (H100, 2, 1000, 128, 2), (RTX, 3, 2048, 64, 1)]


def waves(function, shapes=SHAPES) -> Report:
    """Waves, and the share of the slots that work."""
    report = Report("waves")
    for chip, heads, N_q, B_r, resident in shapes:
        where = f"{chip.name}, {heads} heads, {N_q} queries, B_r {B_r}, {resident} block(s) on each SM"
        blocks, slots = heads * cdiv(N_q, B_r), chip.SMs * resident
        with report.check(f"waves: {where}", "How many thread blocks are there, and how many run at once?"):
            got = parts("(waves, share)", call(function, chip, heads, N_q, B_r, resident), 2)
            compare("waves", got[0], grid.waves(blocks, slots), where)
        with report.check(f"share of slots at work: {where}", "The last wave is seldom full."):
            got = parts("(waves, share)", call(function, chip, heads, N_q, B_r, resident), 2)
            compare("share", got[1], grid.efficiency(blocks, slots), where)
    return report


def in_words(N: int, blocks: tuple[int, int], causal: bool, d: int = 0) -> str:
    """What is asked about, as a check says it."""
    return f"N {N}, {f'd {d}, ' if d else ''}tiles {blocks[0]}×{blocks[1]}{', causal' if causal else ''}"


TRAFFIC = [(1024, 64, (128, 64), False), (1024, 64, (128, 64), True), (1000, 96, (64, 128), False)]


def traffic(function, shapes=TRAFFIC) -> Report:
    """HBM bytes of one head."""
    report = Report("traffic")
    for N, d, blocks, causal in shapes:
        where = in_words(N, blocks, causal, d)
        hint = "Q, O and L once; K and V once for each row block" + (" that sees them." if causal else ".")
        with report.check(where, hint):
            compare("bytes", call(function, N, d, *blocks, causal), bytes_moved(tiling(N, blocks, causal), d), where)
    return report


FITS = [(A100, (128, 64), 128), (H100, (128, 128), 128), (RTX, (128, 128), 128), (A100, (64, 64), 64)]


def fits(function, shapes=FITS) -> Report:
    """Bytes of shared memory, registers a thread, and whether both are to be had."""
    hint = "Is it the limit of a block, or of a thread? Are both asked for?"
    return fitting("fits", "forward", function, shapes, hint)


def fitting(step: str, kernel: str, function, shapes, hint: str) -> Report:
    """The same for a program of the forward, or of the backward's first pass."""
    report = Report(step)
    for chip, blocks, d in shapes:
        for warps in WARPS:
            where = f"{chip.name}, tiles {blocks[0]}×{blocks[1]}, d {d}, {warps} warps, 2 stages"
            want = budget.fits(chip, *blocks, d, 2, warps, kernel=kernel)
            with report.check(where, hint):
                got = parts("(shared, registers, fits)", call(function, chip, *blocks, d, 2, warps), 3)
                compare("shared memory in bytes", got[0], want.shared_bytes, where)
                compare("registers", got[1], want.registers, where)
                if bool(got[2]) is not want.ok:
                    raise Failed(f"fits: {want.ok}", f"{got[2]!r}", where)
    return report


BEST = [(A100, 4096, 64, False), (A100, 4096, 128, True), (RTX, 2048, 128, False), (H100, 8192, 128, True)]


def best(function, shapes=BEST) -> Report:
    """The block sizes that fit and move least."""
    report = Report("best_blocks")
    for chip, N, d, causal in shapes:
        where = f"{chip.name}, N {N}, d {d}{', causal' if causal else ''}"
        with report.check(where, "First drop what does not fit with 4 warps nor with 8; then compare what is moved."):
            got = parts("(B_r, B_c)", call(function, chip, N, d, causal), 2)
            want = best_truth(chip, N, d, causal)
            if tuple(got) != want:
                raise Failed(
                    "another pair of block sizes", f"{tuple(got)}: {verdict(chip, tuple(got), N, d, causal, want)}"
                )
    return report


def best_truth(chip, N: int, d: int, causal: bool) -> tuple[int, int]:
    """Among what fits: the fewest bytes; of equals, the largest B_c."""
    fitting = [b for b in pairs() if any(budget.fits(chip, *b, d, 2, warps).ok for warps in WARPS)]
    return min(fitting, key=lambda b: (bytes_moved(tiling(N, b, causal), d), -b[1]))


def pairs() -> list[tuple[int, int]]:
    return [(B_r, B_c) for B_r in SIZES for B_c in SIZES]


def verdict(chip, got: tuple, N: int, d: int, causal: bool, want: tuple) -> str:
    """What is wrong with a choice, without naming the right one."""
    if got not in pairs():
        return f"both must be one of {SIZES}"
    if not any(budget.fits(chip, *got, d, 2, warps).ok for warps in WARPS):
        return f"does not fit on {chip.name}"
    more = bytes_moved(tiling(N, got, causal), d) - bytes_moved(tiling(N, want, causal), d)
    return f"fits, but {more:,} bytes more are moved than need be" if more else "moves as little, with smaller tiles"


# The backward -----------------------------------------------------------------------------------------------------


WRITERS = [(512, (128, 64), True), (512, (64, 128), True), (1000, (128, 64), False), (777, (64, 64), True)]


def writers(function, shapes=WRITERS) -> Report:
    """How many column blocks add into each row block of dQ."""
    report = Report("writers")
    for N, blocks, causal in shapes:
        where = in_words(N, blocks, causal)
        want = [len(workers) for workers in grid.dq_writers(tiling(N, blocks, causal))]
        with report.check(where, "One program for each column block. Which row blocks see it, the last row included?"):
            got = call(function, N, *blocks, causal)
            if not isinstance(got, (list, tuple)) or len(got) != len(want):
                raise Failed(f"a list of {len(want)} numbers, one for each row block", f"{got!r}"[:80])
            for i, (mine, true) in enumerate(zip(got, want, strict=True)):
                compare(f"writers of dQ_{i}", mine, true, f"row block {i}, {where}")
    return report


def one_pass_bytes(cut: Tiling, d: int) -> int:
    """HBM bytes of Algorithm 2 for one head: 16-bit tensors, L, D and the sums of dQ in fp32."""
    form = io.fa2_backward(cut, d)
    wide = sum(moved.get(name, 0) for moved in (form.loads, form.stores) for name in ("L", "D", "dQ"))
    return 2 * (form.total - wide) + 4 * wide


def two_passes_bytes(cut: Tiling, d: int) -> int:
    """Two passes: Algorithm 2 without dQ, then one program for each row block that keeps dQ_i on chip."""
    form = io.fa2_backward(cut, d)
    columns = one_pass_bytes(cut, d) - 4 * (form.loads["dQ"] + form.stores["dQ"])
    once = 2 * 3 * cut.N_q * d + 4 * 2 * cut.N_q  # Q, dO and dQ in 16 bits, L and D in fp32
    return columns + once + 2 * 2 * io.cols_visited(cut) * d  # K and V for each row block that sees them


PASSES = [(1024, 64, (128, 64), False), (1024, 64, (64, 128), True), (1000, 96, (64, 64), False)]


def backward_traffic(function, shapes=PASSES) -> Report:
    """HBM bytes of one head's backward in one pass."""
    report = Report("backward_traffic")
    for N, d, blocks, causal in shapes:
        where = in_words(N, blocks, causal, d)
        hint = "O once; dO once for D. Then Q, dO, L, D and dQ for each visited tile: is dQ loaded, stored, or both?"
        with report.check(where, hint):
            compare("bytes", call(function, N, d, *blocks, causal), one_pass_bytes(tiling(N, blocks, causal), d), where)
    return report


def passes(function, shapes=PASSES) -> Report:
    """One pass or two: the bytes of two, and which moves fewer."""
    report = Report("passes")
    for N, d, blocks, causal in shapes:
        where = in_words(N, blocks, causal, d)
        cut = tiling(N, blocks, causal)
        with report.check(where, "The first pass no longer touches dQ; the second is laid out like the forward."):
            got = parts("(bytes of two passes, 1 or 2)", call(function, N, d, *blocks, causal), 2)
            compare("bytes of two passes", got[0], two_passes_bytes(cut, d), where)
            fewer = 1 if one_pass_bytes(cut, d) <= two_passes_bytes(cut, d) else 2
            if got[1] != fewer:
                raise Failed("the number of passes that moves fewer bytes", f"{got[1]!r}", where)
    return report


COLUMN_FITS = [(A100, (64, 128), 128), (H100, (64, 128), 128), (RTX, (128, 128), 64), (A100, (64, 64), 64)]


def backward_fits(function, shapes=COLUMN_FITS) -> Report:
    """Bytes of shared memory, registers a thread, and whether both are to be had, for a program of the first pass."""
    hint = "What stays is a column block: dk and dv have B_c rows each. What streams by?"
    return fitting("backward_fits", "columns", function, shapes, hint)
