"""The tour: every stage of the house runs once on this machine and is held against dense attention in float64."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from fa2_lab.errata.cases import distance
from fa2_lab.machine import io, warps
from fa2_lab.paper import PACKAGE
from fa2_lab.reference import fa2, heads, naive, online_softmax
from fa2_lab.reference.dropout import NO_DROPOUT, Dropout, keep_mask
from fa2_lab.tiles import CAUSAL, NO_MASK, Mask, Tiling
from fa2_lab.tools import doctor
from fa2_lab.trace import Trace

N, D_HEAD, B_R, B_C = 500, 64, 64, 32  # ragged on purpose: 500 is no multiple of 64 or 32
BLOCKS: dict[str, Any] = dict(B_r=B_R, B_c=B_C)


# The truth --------------------------------------------------------------------------------------------------


class RandomHead:
    """One head of random Q, K, V, dO (N, d), and its answers by the definition: softmax and its Jacobian by rows."""

    def __init__(self, mask: Mask = NO_MASK, dropout: Dropout = NO_DROPOUT, n: int = N, seed: int = 0) -> None:
        self.mask, self.dropout, self.tau = mask, dropout, D_HEAD**-0.5
        self.Q, self.K, self.V, self.dO = np.random.default_rng(seed).standard_normal((4, n, D_HEAD))
        self.Z = np.ones((n, n))
        if self.dropout.p:
            rows = np.arange(n)
            self.Z = keep_mask(self.dropout.p, self.dropout.seed or 0, batch=0, head=0, rows=rows, cols=rows) / (
                1 - self.dropout.p
            )

    def solve(self) -> None:
        """Work out all answers now."""
        _ = self.O, self.L, self.gradients

    @property
    def qkv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.Q, self.K, self.V

    @property
    def call(self) -> dict[str, Any]:
        """What a call for a batch of this one head is given."""
        qkv = {name: x[None, None] for name, x in zip("qkv", self.qkv, strict=True)}
        return qkv | dict(causal=self.mask.causal, dropout_p=self.dropout.p, seed=self.dropout.seed)

    @cached_property
    def S(self) -> np.ndarray:
        n = len(self.Q)
        visible = Tiling(n, n, n, n, self.mask).visible(0, 0)
        return np.where(visible, self.tau * np.einsum("id,jd->ij", self.Q, self.K), -np.inf)

    @cached_property
    def L(self) -> np.ndarray:
        return np.log(np.exp(self.S).sum(axis=1))

    @cached_property
    def P(self) -> np.ndarray:
        return np.exp(self.S) / np.exp(self.S).sum(axis=1, keepdims=True)

    @cached_property
    def O(self) -> np.ndarray:
        return np.einsum("ij,jd->id", self.P * self.Z, self.V)

    @cached_property
    def gradients(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dQ, dK, dV, with every row's Jacobian diag(p) − p pᵀ written out."""
        dP = self.Z * np.einsum("id,jd->ij", self.dO, self.V)
        dS = np.stack([(np.diag(p) - np.outer(p, p)) @ dp for p, dp in zip(self.P, dP, strict=True)])
        dQ, dK = np.einsum("ij,jd->id", dS, self.K), np.einsum("ij,id->jd", dS, self.Q)
        return self.tau * dQ, self.tau * dK, np.einsum("ij,id->jd", self.P * self.Z, self.dO)


FULL, OTHER, HALF = RandomHead(), RandomHead(seed=1), RandomHead(CAUSAL)
OTHER.K, OTHER.V = FULL.K, FULL.V  # a second query head on the same keys and values
DROPPED = RandomHead(dropout=Dropout(p=0.2, seed=7))
SMALL = RandomHead(CAUSAL, n=128)  # the interpreter takes its time
PROBLEMS = FULL, OTHER, HALF, DROPPED, SMALL


# The stages -------------------------------------------------------------------------------------------------

Pairs = list[tuple[np.ndarray, np.ndarray]]  # (what the stage computed, what is true)


class Skipped(Exception):
    """Why a stage cannot run here."""


@dataclass(frozen=True)
class Stage:
    """One row of the table. `run(trace)` returns pairs (computed, true); the last of `runs` runs is timed."""

    name: str
    run: Callable[[Trace], Pairs]
    tolerance: float = 1e-12
    runs: int = 1
    device: Callable[[], str] = lambda: "CPU"


def by_rows_forward(trace: Trace) -> Pairs:
    return pairs(naive.forward_linear_memory(*HALF.qkv, mask=CAUSAL), (HALF.O, HALF.L))


def by_rows_backward(trace: Trace) -> Pairs:
    return pairs(naive.backward_linear_memory(*HALF.qkv, HALF.O, HALF.L, HALF.dO, mask=CAUSAL), HALF.gradients)


def online(trace: Trace) -> Pairs:
    S, V = trace.hbm(S=FULL.S, V=FULL.V)
    blocks = [slice(start, start + B_C) for start in range(0, N, B_C)]
    return pairs(online_softmax.incremental((S[:, cols], V[cols]) for cols in blocks).finalize(), (FULL.O, FULL.L))


def split_keys(trace: Trace) -> Pairs:
    return pairs(fa2.forward_split_keys(*FULL.qkv, splits=4, **BLOCKS, trace=trace), (FULL.O, FULL.L))


def forward(stage: str, problem: RandomHead) -> Callable[[Trace], Pairs]:
    """A stage's O and L."""

    def run(trace: Trace) -> Pairs:
        O, L = heads.forward(**problem.call, stage=stage, **BLOCKS, trace=trace)
        return pairs((O[0, 0], L[0, 0]), (problem.O, problem.L))

    return run


def backward(stage: str, problem: RandomHead) -> Callable[[Trace], Pairs]:
    """A stage's gradients from the true O and L."""

    def run(trace: Trace) -> Pairs:
        kept = dict(O=problem.O[None, None], L=problem.L[None, None], dO=problem.dO[None, None])
        found = heads.backward(**problem.call, **kept, stage=stage, **BLOCKS, trace=trace)
        return pairs((x[0, 0] for x in found), problem.gradients)

    return run


def grouped_heads(trace: Trace) -> Pairs:
    """Two query heads on one key head: the truth sums two problems that share K and V."""
    q, dO = np.stack([FULL.Q, OTHER.Q])[None], np.stack([FULL.dO, OTHER.dO])[None]
    k, v = FULL.K[None, None], FULL.V[None, None]
    O, L = heads.forward(q, k, v, **BLOCKS, trace=trace)
    dQ, dK, dV = heads.backward(q, k, v, O, L, dO, **BLOCKS, trace=trace)
    (dQ0, dK0, dV0), (dQ1, dK1, dV1) = FULL.gradients, OTHER.gradients
    truth = np.stack([FULL.O, OTHER.O]), np.stack([dQ0, dQ1]), dK0 + dK1, dV0 + dV1
    return pairs((O[0], dQ[0], dK[0, 0], dV[0, 0]), truth)


def dropout(trace: Trace) -> Pairs:
    """The keyed mask is the same in FA2's forward (rows outside) and backward (columns outside)."""
    return forward("fa2", DROPPED)(trace) + backward("fa2", DROPPED)(trace)


def closed_forms(trace: Trace) -> Pairs:
    """The closed forms of HBM traffic and matmul FLOPs, causal forward, against what the meter counts."""
    what = "fa2", "forward", Tiling(N, N, B_R, B_C, CAUSAL), D_HEAD
    fa2.forward(*HALF.qkv, **BLOCKS, mask=CAUSAL, trace=trace)
    forms = io.traffic(*what).total, io.operations(*what)["matmul"]
    return pairs(forms, (trace.hbm_elements, trace.matmul_flops))


def warp_scheme(scheme: Callable[..., warps.BlockRun]) -> Callable[[Trace], Pairs]:
    """One thread block's rows, shared out among four warps."""

    def run(trace: Trace) -> Pairs:
        tiling = Tiling(N, N, B_R, B_C)
        block = scheme(*FULL.qkv, tiling, 1, 4)
        return pairs((block.O, block.L), (FULL.O[tiling.rows(1)], FULL.L[tiling.rows(1)]))

    return run


def pairs(computed: Iterable, true: Iterable) -> Pairs:
    return list(zip(computed, true, strict=True))


# The Triton kernels -----------------------------------------------------------------------------------------


def triton_call(backward: bool) -> Callable[[Trace], Pairs]:
    """`fa2_lab.attention` on float32 tensors: on the GPU if there is one, in Triton's interpreter if not."""

    def run(trace: Trace) -> Pairs:
        torch, attention, device = torch_and_attention()
        q, k, v = (torch.tensor(x[None, None], dtype=torch.float32, device=device) for x in SMALL.qkv)
        leaves = [x.requires_grad_(backward) for x in (q, k, v)]
        out = attention(*leaves, causal=True, backend="triton")
        if not backward:
            return [(out[0, 0].cpu().numpy(), SMALL.O)]
        out.backward(torch.tensor(SMALL.dO[None, None], dtype=torch.float32, device=device))
        return pairs([x.grad[0, 0].cpu().numpy() for x in leaves], SMALL.gradients)

    return run


def torch_and_attention() -> tuple[ModuleType, Callable, str]:
    """torch, the public call and the device to run on; or the reason why there is none."""
    for module in ("torch", "triton"):
        if not doctor.version(module):
            raise Skipped(f"{module} is not installed")
    import torch

    from fa2_lab.api.attention import attention

    return torch, attention, "cuda" if torch.cuda.is_available() else "cpu"


def triton_device() -> str:
    torch, _, device = torch_and_attention()
    return torch.cuda.get_device_name() if device == "cuda" else "interpreter"


STAGES = (
    Stage("standard, forward", forward("naive", FULL)),
    Stage("standard, backward", backward("naive", FULL)),
    Stage("O(N) memory, forward", by_rows_forward),
    Stage("O(N) memory, backward", by_rows_backward),
    Stage("online softmax", online),
    Stage("split keys, combined", split_keys),
    Stage("FA1 forward", forward("fa1", FULL)),
    Stage("FA1 backward", backward("fa1", FULL)),
    Stage("FA2 forward", forward("fa2", FULL)),
    Stage("FA2 backward", backward("fa2", FULL)),
    Stage("FA2 forward, causal", forward("fa2", HALF)),
    Stage("FA2 backward, causal", backward("fa2", HALF)),
    Stage("grouped heads, both", grouped_heads),
    Stage("keyed dropout, both", dropout),
    Stage("closed forms = meter", closed_forms, tolerance=0.0),
    Stage("4 warps, split-K", warp_scheme(warps.split_k)),
    Stage("4 warps, split-Q", warp_scheme(warps.split_q)),
    Stage("Triton forward", triton_call(backward=False), tolerance=1e-5, runs=2, device=triton_device),
    Stage("Triton, both", triton_call(backward=True), tolerance=1e-5, runs=2, device=triton_device),
)


# Running and printing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a stage did. `note` says why it did not run, or how it failed; a stage that was skipped is not wrong."""

    name: str
    error: float = np.nan
    hbm: int = 0
    matmul: int = 0
    other: int = 0
    seconds: float = 0.0
    device: str = ""
    ok: bool = True
    note: str = ""


def run(stage: Stage) -> Outcome:
    """Run one stage under the meter and judge it."""
    try:
        for _ in range(stage.runs):
            trace, start = Trace(), time.perf_counter()
            results = stage.run(trace)
            seconds = time.perf_counter() - start
        device = stage.device()
    except Skipped as reason:
        return Outcome(stage.name, note=f"skipped: {reason}")
    except Exception as failure:  # one broken stage must not hide the others
        return Outcome(stage.name, ok=False, note=f"FAILED: {type(failure).__name__}: {failure}".splitlines()[0])
    error = max(distance(computed, true) for computed, true in results)
    work = trace.hbm_elements, trace.matmul_flops, trace.other_flops + trace.exponentials
    return Outcome(stage.name, error, *work, seconds, device, ok=bool(error <= stage.tolerance))


HEADER = f"{'stage':21}{'error':>7}{'HBM':>7}{'matmul':>7}{'other':>7}{'seconds':>9}  {'device':11} verdict"


def line(row: Outcome) -> str:
    """One row of the table, 80 columns wide; a reason may be longer."""
    if row.note:
        return f"{row.name:21}  {row.note}"
    counts = "".join(f"{short(n):>7}" for n in (row.hbm, row.matmul, row.other))
    verdict = "ok" if row.ok else "WRONG"
    return f"{row.name:21}{row.error:7.0e}{counts}{row.seconds:9.3f}  {row.device[:11]:11} {verdict}"


def short(n: int) -> str:
    """1,234,567 as 1.23M; a dash where nothing was counted."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= 0.9995 * size:
            return f"{n / size:.3g}{unit}"
    return str(n) if n else "-"


def tour(stages: tuple[Stage, ...] = STAGES) -> int:
    """Run all stages, print the table, and say what comes next. 1 if a stage is wrong, else 0."""
    print(f"One head, N {N}, d {D_HEAD}, tiles {B_R} × {B_C}; Triton: N 128. Truth: dense float64.\n")
    for problem in PROBLEMS:
        problem.solve()  # so that the truth is in nobody's seconds
    print(HEADER)
    rows = []
    for stage in stages:
        rows.append(run(stage))
        print(line(rows[-1]), flush=True)
    print("\nHBM: elements moved to and from it. matmul, other: FLOPs. -: not metered.")
    wrong = [row.name for row in rows if not row.ok]
    ran = sum(not row.note for row in rows)
    print(f"Wrong: {', '.join(wrong)}" if wrong else f"All {ran} stages that ran agree with the truth.")
    print("Next: fa2-lab where FA2.A1.L9 | fa2-lab errata | fa2-lab glossary")
    notebooks = sorted((PACKAGE.parent / "notebooks").glob("*.ipynb"))
    if notebooks:
        print(f"The book: jupyter lab notebooks/{notebooks[0].name}")
    if (advice := doctor.advice(doctor.examine())) != f"{doctor.FINE}.":
        print(f"fa2-lab doctor: {advice}")
    return 1 if wrong else 0
