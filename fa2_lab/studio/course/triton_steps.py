"""Assignment 4, a Triton forward kernel in three steps: one tile, the loop, causal and ragged. Runs without a GPU."""

from __future__ import annotations

import inspect
import os
import sys

import numpy as np
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # has to be settled before Triton is imported

import triton

from fa2_lab.studio.course import truth
from fa2_lab.studio.course.guard import call_freely
from fa2_lab.studio.course.report import Failed, Report, equal, tile_place
from fa2_lab.studio.course.truth import Case

GPU = torch.cuda.is_available()
LOG2E = 1.4426950408889634
TOLERANCE = 2e-5  # fp32 sums in another order; the products are exact fp32 ("ieee")

ONE_TILE = [Case(32, 32, 16, 32, 32, seed=41, tau=0.25), Case(16, 64, 32, 16, 64, size=6.0, seed=42, tau=0.2)]
LOOP = [Case(64, 96, 16, 32, 32, seed=43, tau=0.25), Case(32, 64, 32, 16, 16, size=12.0, seed=44, tau=0.2)]
FULL = [
    ("keys and queries that do not fill their tiles", Case(40, 51, 16, 32, 16, seed=45, tau=0.25)),
    ("causal", Case(64, 64, 16, 32, 16, causal=True, seed=46, tau=0.25)),
    ("causal and ragged, more keys than queries", Case(19, 45, 16, 16, 16, causal=True, seed=47, tau=0.25)),
    ("rows that see no key", Case(45, 19, 16, 16, 16, causal=True, seed=48, tau=0.25)),
]


def launch(kernel, case: Case, step: str) -> tuple[np.ndarray, np.ndarray]:
    """Run a student's kernel on one head: O and L. Nothing may be written behind them."""
    if not hasattr(kernel, "run") or not hasattr(kernel, "__getitem__"):
        raise Failed("a Triton kernel: a function under @triton.jit", type(kernel).__name__)
    if "raise NotImplementedError" in inspect.getsource(kernel.fn):
        raise NotImplementedError
    device = "cuda" if GPU else "cpu"
    Q, K, V, _ = (torch.tensor(x, dtype=torch.float32, device=device) for x in case.tensors())
    Q, K, V = (fenced(x, 7.0) for x in (Q, K, V))
    O, L = fenced(torch.full_like(Q, torch.nan), 5.0), fenced(Q.new_full((case.N_q,), torch.nan), 5.0)
    grid = (triton.cdiv(case.N_q, case.B_r),)
    sizes = dict(B_r=case.B_r, B_c=case.B_c, d=case.d)
    scale_log2 = case.tau * LOG2E
    arguments = {
        "one_tile": (Q, K, V, O, scale_log2),
        "loop": (Q, K, V, O, L, case.N_k, scale_log2),
        "full": (Q, K, V, O, L, case.N_q, case.N_k, scale_log2),
    }[step]
    options = sizes | ({"CAUSAL": case.causal} if step == "full" else {})
    call_freely(lambda: kernel[grid](*arguments, **options))
    if not (fence(O) == 5.0).all() or not (fence(L) == 5.0).all():
        raise Failed(
            "nothing written behind the last row", "memory behind O or L changed", hint="tl.store takes a mask=."
        )
    return O.double().cpu().numpy(), L.double().cpu().numpy()


def fenced(x: torch.Tensor, value: float) -> torch.Tensor:
    """The same tensor with a fence of known numbers behind it, in the same memory."""
    wide = x.new_full((x.shape[0] + 128, *x.shape[1:]), value)
    wide[: len(x)] = x
    return wide[: len(x)]


def fence(x: torch.Tensor) -> torch.Tensor:
    """What stands behind a fenced tensor."""
    whole = x.as_strided((x.shape[0] + 128, *x.shape[1:]), x.stride())
    return whole[len(x) :]


def check_case(kernel, case: Case, step: str, with_L: bool) -> None:
    """One launch against the dense result."""
    O, L = launch(kernel, case, step)
    want_O, want_L = truth.forward(case)
    unwritten = "The outputs start as NaN: was this row stored?"
    equal("O", O, want_O, TOLERANCE, unwritten if np.isnan(O).any() else "", tile_place(case.B_r))
    if with_L:
        hint = unwritten if np.isnan(L).any() else "L is the natural logarithm; scores times scale_log2 are in base 2."
        equal("L", L, want_L, TOLERANCE, hint, tile_place(case.B_r))


# The steps ------------------------------------------------------------------------------------------------------


def one_tile(kernel, cases=tuple(ONE_TILE)) -> Report:
    """All queries and keys in one tile."""
    report = Report("one_tile")
    for case in cases:
        with report.check(str(case), "s, its row maximum, exp2, the row sum, the product with v, one division."):
            check_case(kernel, case, "one_tile", with_L=False)
    return report


def loop(kernel, cases=tuple(LOOP)) -> Report:
    """Row blocks in parallel, column blocks in a loop, O and then L."""
    report = Report("loop")
    for case in cases:
        with report.check(f"O: {case}", "Which row block is this program's? What happens to l and o when m moves?"):
            check_case(kernel, case, "loop", with_L=False)
        with report.check(f"O and L: {case}"):
            check_case(kernel, case, "loop", with_L=True)
    return report


def full(kernel, cases=tuple(FULL)) -> Report:
    """Causal and ragged."""
    report = Report("full")
    hints = {
        False: "Loads past the end need mask= and other=; a key that is not there must not count: its score is −inf.",
        True: "Row r sees column c if c ≤ r + N_k − N_q. A row that saw nothing yet has m = −inf.",
    }
    for claim, case in cases:
        with report.check(f"{claim}: {case}", hints[case.causal]):
            check_case(kernel, case, "full", with_L=True)
    with report.check("causal tiles in the future are not visited", "Where does the loop end for this row block?"):
        check_skips(kernel)
    return report


def check_skips(kernel) -> None:
    """Keys that no row of a block sees are NaN: whoever loads their tile and multiplies shows it."""
    case = Case(48, 48, 16, 16, 16, causal=True, seed=49, tau=0.25)
    check_case(kernel, case, "full", with_L=False)
    device = "cuda" if GPU else "cpu"
    Q, K, V, _ = (torch.tensor(x, dtype=torch.float32, device=device) for x in case.tensors())
    V[32:] = torch.nan  # only the last row block sees these
    O, L = torch.full_like(Q, torch.nan), Q.new_full((48,), torch.nan)
    call_freely(lambda: kernel[(3,)](Q, K, V, O, L, 48, 48, case.tau * LOG2E, B_r=16, B_c=16, d=16, CAUSAL=True))
    for i in range(2):
        if torch.isnan(O[16 * i : 16 * i + 16]).any():
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
    from fa2_lab.attention import attention

    Q, K, V, _ = (torch.tensor(x, dtype=torch.float16, device="cuda") for x in LONG.tensors())
    O, L = torch.full_like(Q, torch.nan), torch.empty(LONG.N_q, device="cuda")

    def mine():
        kernel[(LONG.N_q // 64,)](
            Q, K, V, O, L, LONG.N_q, LONG.N_k, LONG.tau * LOG2E, CAUSAL=True, B_r=64, B_c=64, d=64
        )

    def theirs():
        return attention(Q[None, None], K[None, None], V[None, None], causal=True, scale=LONG.tau)[0, 0]

    call_freely(mine)
    want = theirs().double().cpu().numpy()
    equal("O", O.double().cpu().numpy(), want, 5e-3, "fp16: only the product's operand is rounded, not m, l and o.")
    return tuple(triton.testing.do_bench(f, return_mode="median") for f in (mine, theirs))
