"""Assignment 4, a Triton forward kernel in three steps: one tile, the loop, causal and ragged. Runs without a GPU."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # has to be settled before Triton is imported

import triton

from fa2_lab.tiles import cdiv

from . import probes, truth
from .guard import apart, name_of
from .listing import of_kernel
from .report import Failed, Report, as_numbers, equal, tile_place
from .truth import Case

GPU = torch.cuda.is_available()
LOG2E = 1.4426950408889634
LOW_TOLERANCE = 1e-2  # fp32 keeps a score of −20,000 to 0.002
BEHIND = "Was this row stored? And is anything loaded from behind the last key? There is NaN."
TOLERANCE = 2e-5  # fp32 sums in another order; the products are exact fp32 ("ieee")

ONE_TILE = [Case(32, 32, 16, 32, 32, seed=41, tau=0.25), Case(16, 64, 32, 16, 64, size=6.0, seed=42, tau=0.2)]
LOOP = [Case(64, 96, 16, 32, 32, seed=43, tau=0.25), Case(32, 64, 32, 16, 16, size=12.0, seed=44, tau=0.2)]
FULL = [
    ("keys and queries that do not fill their tiles", Case(40, 51, 16, 32, 16, seed=45, tau=0.25)),
    ("causal", Case(64, 64, 16, 32, 16, causal=True, seed=46, tau=0.25)),
    ("causal and ragged, more keys than queries", Case(19, 45, 16, 16, 16, causal=True, seed=47, tau=0.25)),
    ("scores far below zero", Case(35, 37, 16, 16, 16, seed=51, tau=0.25, shift=70.0)),
    ("rows that see no key", Case(45, 19, 16, 16, 16, causal=True, seed=48, tau=0.25)),
]


def launch(kernel, case: Case, step: str, hidden: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Run a student's kernel on one head: O and L. NaN stands behind Q, K and V, and in the last `hidden` values.

    Nothing may be written behind O and L, and every product must be one of tiles, by tl.dot in full fp32.
    """
    Q, K, V = (np.float32(x) for x in case.tensors()[:3])
    V[case.N_k - hidden :] = np.nan
    Q, K, V = (fenced(x, np.nan) for x in (Q, K, V))
    O, L = (fenced(np.full(shape, np.nan, np.float32), 5.0) for shape in ((case.N_q, case.d), (case.N_q,)))
    scale_log2 = case.tau * LOG2E
    arguments = {
        "one_tile": [Q, K, V, O, scale_log2],
        "loop": [Q, K, V, O, L, case.N_k, scale_log2],
        "full": [Q, K, V, O, L, case.N_q, case.N_k, scale_log2],
    }[step]
    options = dict(B_r=case.B_r, B_c=case.B_c, d=case.d) | ({"CAUSAL": case.causal} if step == "full" else {})
    program = of_kernel(kernel)
    grid = (cdiv(case.N_q, case.B_r),)
    made, products = apart(probes.launch, kernel, program, name_of(kernel), grid, arguments, options)
    check_products(products, case)
    O, L = (as_numbers(name, x, y.shape) for name, x, y in zip("OL", [*made[3:], L], (O, L), strict=False))
    if not (O[case.N_q :] == 5.0).all() or not (L[case.N_q :] == 5.0).all():
        raise Failed(
            "nothing written behind the last row", "memory behind O or L changed", hint="tl.store takes a mask=."
        )
    return O[: case.N_q], L[: case.N_q]


def check_products(products: list, case: Case) -> None:
    """The products that were computed: of tiles of these sizes, and exact."""
    tile = f"products of tiles, ({case.B_r}, {case.d}) by ({case.d}, {case.B_c}), by tl.dot"
    sizes = sorted((case.B_r, case.B_c, case.d))
    if not products:
        raise Failed(tile, "no product by tl.dot")
    for rows, inner, columns, precision in products:
        if sorted((rows, inner, columns)) != sizes:
            raise Failed(tile, f"({rows}, {inner}) by ({inner}, {columns})", hint="Tiles have the sizes B_r and B_c.")
        if precision != "ieee":
            raise Failed("products in full fp32", f"in {precision}", hint='tl.dot takes input_precision="ieee".')


def fenced(x: np.ndarray, value: float) -> np.ndarray:
    """The same array with a fence of known numbers behind it, in the same memory."""
    return np.concatenate([x, np.full((128, *x.shape[1:]), value, x.dtype)])


def check_case(kernel, case: Case, step: str, with_L: bool) -> None:
    """One launch against the dense result."""
    O, L = launch(kernel, case, step)
    want_O, want_L = truth.forward(case)
    hint = why_nan(np.isnan(O).any(axis=1), want_L, case)
    tolerance = LOW_TOLERANCE if case.shift else TOLERANCE * max(1, case.size / 3)  # large scores round more
    equal("O", O, want_O, tolerance, hint, tile_place(case.B_r))
    if with_L:
        hint = why_nan(np.isnan(L), want_L, case)
        hint = hint or "L is the natural logarithm; scores times scale_log2 are in base 2."
        equal("L", L, want_L, TOLERANCE, hint, tile_place(case.B_r))


def why_nan(rows: np.ndarray, want_L: np.ndarray, case: Case) -> str:
    """A hint for rows that came as NaN; empty if there are none."""
    if not rows.any():
        return ""
    if np.isneginf(want_L[rows]).all():
        return "These rows see no key: m is −∞ and l is 0. −∞ − (−∞) and 0 / 0 are NaN."
    return BEHIND if case.N_k % case.B_c else "The outputs start as NaN: was this row stored?"


# The steps ------------------------------------------------------------------------------------------------------


def one_tile(kernel, cases=tuple(ONE_TILE), seed: int = 0) -> Report:
    """All queries and keys in one tile."""
    report = Report("one_tile")
    for case in (truth.varied(case, seed) for case in cases):
        with report.check(str(case), "s, its row maximum, exp2, the row sum, the product with v, one division."):
            check_case(kernel, case, "one_tile", with_L=False)
    return report


def loop(kernel, cases=tuple(LOOP), seed: int = 0) -> Report:
    """Row blocks in parallel, column blocks in a loop, O and then L."""
    report = Report("loop")
    for case in (truth.varied(case, seed) for case in cases):
        with report.check(f"O: {case}", "Which row block is this program's? What happens to l and o when m moves?"):
            check_case(kernel, case, "loop", with_L=False)
        with report.check(f"O and L: {case}"):
            check_case(kernel, case, "loop", with_L=True)
    return report


def full(kernel, cases=tuple(FULL), seed: int = 0) -> Report:
    """Causal and ragged."""
    report = Report("full")
    hints = {
        False: "Loads past the end need mask= and other=; a key that is not there must not count: its score is −inf.",
        True: "Row r sees column c if c ≤ r + N_k − N_q. A row that saw nothing yet has m = −inf.",
    }
    for claim, case in ((claim, truth.varied(case, seed)) for claim, case in cases):
        with report.check(f"{claim}: {case}", hints[case.causal]):
            check_case(kernel, case, "full", with_L=True)
    with report.check("causal tiles in the future are not visited", "Where does the loop end for this row block?"):
        check_skips(kernel)
    return report


def check_skips(kernel) -> None:
    """Keys that no row of a block sees are NaN: whoever loads their tile and multiplies shows it."""
    case = Case(48, 48, 16, 16, 16, causal=True, seed=49, tau=0.25)
    check_case(kernel, case, "full", with_L=False)
    O, _ = launch(kernel, case, "full", hidden=16)  # only the last row block sees these
    for i in range(2):
        if np.isnan(O[16 * i : 16 * i + 16]).any():
            raise Failed("values 32 to 47 not loaded for rows 0 to 31", "they were", f"tile ({i}, 2)")


# On a GPU, extra points ---------------------------------------------------------------------------------------------


def timed(kernel) -> Report:
    """On a GPU: the student's kernel against the package's, on a long sequence; without a GPU, nothing."""
    report = Report("gpu")
    if not GPU:
        print("  no CUDA GPU on this machine: no extra points to be had, none lost")
        return report
    for share in (0.25, 0.5):
        with report.check(f"{share:.0%} of the reference kernel's speed", "Is a tile masked that needs no mask?"):
            mine, theirs = milliseconds(kernel)
            print(f"  yours {mine:.3f} ms, the reference kernel {theirs:.3f} ms (causal, fp16, d 64, N {LONG.N_q})")
            if theirs / mine < share:
                raise Failed(f"at most {theirs / share:.3f} ms", f"{mine:.3f} ms")
    return report


LONG = Case(32768, 32768, 64, 64, 64, causal=True, seed=50, tau=0.125)


def milliseconds(kernel) -> tuple[float, float]:
    """The median times of a student's kernel and of the package's, after their results were compared."""
    from fa2_lab.api.attention import attention

    Q, K, V = (np.float16(x) for x in LONG.tensors()[:3])
    O, L = np.full_like(Q, np.nan), np.empty(LONG.N_q, np.float32)
    arguments = [Q, K, V, O, L, LONG.N_q, LONG.N_k, LONG.tau * LOG2E]
    options = dict(CAUSAL=True, B_r=64, B_c=64, d=64)
    program = of_kernel(kernel)
    mine, made = apart(probes.timed, kernel, program, name_of(kernel), (LONG.N_q // 64,), arguments, options)
    q, k, v = (torch.from_numpy(x).cuda()[None, None] for x in (Q, K, V))

    def theirs():
        return attention(q, k, v, causal=True, scale=LONG.tau)[0, 0]

    want = theirs().double().cpu().numpy()
    equal("O", made[3], want, 5e-3, "fp16: only the product's operand is rounded, not m, l and o.")
    return float(mine), triton.testing.do_bench(theirs, return_mode="median")
