"""The tour, which runs every stage on this machine and compares its results with dense attention in float64."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np

from fa2_lab.errata.cases import distance
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import AttentionCase
from fa2_lab.machine import io_model, warps
from fa2_lab.paper import PACKAGE
from fa2_lab.reference import fa2, heads, naive, online_softmax
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling
from fa2_lab.tools import doctor
from fa2_lab.tools.ladder import short
from fa2_lab.trace import Trace

N, D_HEAD, B_R, B_C = 500, 64, 64, 32  # ragged on purpose: 500 is not a multiple of 64 or 32
BLOCKS: dict[str, Any] = dict(B_r=B_R, B_c=B_C)


# The truth --------------------------------------------------------------------------------------------------


class RandomHeads:
    """Random q and dO of shape (1, heads, n, d), random k and v of shape (1, 1, n, d), and the true results.

    The examiner's dense attention computes the true results.
    """

    def __init__(self, n: int = N, heads: int = 1, causal: bool = False) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.q, self.dO = draw((2, 1, heads, n, D_HEAD))
        self.k, self.v = draw((2, 1, 1, n, D_HEAD))
        self.mask = CAUSAL if causal else NO_MASK

    @cached_property
    def truth(self) -> dict[str, np.ndarray]:
        """The true O, L, dQ, dK and dV, as a dictionary."""
        return attention(AttentionCase("", *self.qkv, self.dO, dict(causal=self.mask.causal)), gradients=True)

    def right(self, names: str) -> list[np.ndarray]:
        return [self.truth[name] for name in names.split()]

    @property
    def qkv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v

    @property
    def head(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays Q, K and V of the first head."""
        return self.q[0, 0], self.k[0, 0], self.v[0, 0]


PLAIN, MASKED, GROUPED = RandomHeads(), RandomHeads(causal=True), RandomHeads(heads=2)
SMALL = RandomHeads(n=128, causal=True)  # small because the interpreter is slow
PROBLEMS = PLAIN, MASKED, GROUPED, SMALL


# The stages -------------------------------------------------------------------------------------------------

Pairs = list[tuple[np.ndarray, np.ndarray]]  # (computed by the stage, expected)


class Skipped(Exception):
    """Raised by a stage that cannot run on this machine, with the reason as its message."""


@dataclass(frozen=True)
class Stage:
    """One stage of the tour, shown as one row of the tour's table.

    `run(trace)` returns a list of pairs (computed, expected). It is called `runs` times, and the last call is timed.
    """

    name: str
    run: Callable[[Trace], Pairs]
    tolerance: float = 1e-12
    runs: int = 1
    device: Callable[[], str] = lambda: "CPU"


def pairs(computed: Iterable, right: Iterable) -> Pairs:
    return [(np.reshape(x, np.shape(y)), y) for x, y in zip(computed, right, strict=True)]


def forward(stage: str, problem: RandomHeads, trace: Trace) -> Pairs:
    """Run the forward pass of a stage and return pairs (computed, expected) for O and L."""
    outputs = heads.forward(*problem.qkv, causal=problem.mask.causal, stage=stage, **BLOCKS, trace=trace)
    return pairs(outputs, problem.right("O L"))


def backward(stage: str, problem: RandomHeads, trace: Trace) -> Pairs:
    """Run the backward pass of a stage on the true O and L, and return pairs (computed, expected) for dQ, dK and dV."""
    given = *problem.qkv, *problem.right("O L"), problem.dO
    gradients = heads.backward(*given, causal=problem.mask.causal, stage=stage, **BLOCKS, trace=trace)
    return pairs(gradients, problem.right("dQ dK dV"))


def grouped_heads(trace: Trace) -> Pairs:
    """Run both passes for two query heads that share one K/V head, so that dK and dV are sums over both query heads."""
    return forward("fa2", GROUPED, trace) + backward("fa2", GROUPED, trace)


def by_rows_forward(trace: Trace) -> Pairs:
    return pairs(naive.forward_linear_memory(*MASKED.head, mask=CAUSAL), MASKED.right("O L"))


def by_rows_backward(trace: Trace) -> Pairs:
    O, L, dO = (x[0, 0] for x in (*MASKED.right("O L"), MASKED.dO))
    return pairs(naive.backward_linear_memory(*MASKED.head, O, L, dO, mask=CAUSAL), MASKED.right("dQ dK dV"))


def online(trace: Trace) -> Pairs:
    Q, K, V = PLAIN.head
    S, V = trace.hbm(S=Q @ K.T * D_HEAD**-0.5, V=V)
    blocks = [slice(start, start + B_C) for start in range(0, N, B_C)]
    outputs = online_softmax.incremental((S[:, cols], V[cols]) for cols in blocks).finalize()
    return pairs(outputs, PLAIN.right("O L"))


def split_keys(trace: Trace) -> Pairs:
    outputs = fa2.forward_split_keys(*PLAIN.head, splits=4, **BLOCKS, trace=trace)
    return pairs(outputs, PLAIN.right("O L"))


def closed_forms(trace: Trace) -> Pairs:
    """Return pairs (formula's value, meter's count) for the HBM traffic and matmul FLOPs of a causal forward pass."""
    what = "fa2", "forward", Tiling(N, N, B_R, B_C, CAUSAL), D_HEAD
    fa2.forward(*MASKED.head, **BLOCKS, mask=CAUSAL, trace=trace)
    forms = io_model.traffic(*what).total, io_model.operations(*what)["matmul"]
    return pairs(forms, (trace.hbm_elements, trace.matmul_flops))


def warp_scheme(scheme: Callable[..., warps.BlockRun], trace: Trace) -> Pairs:
    """Run one thread block whose four warps divide the rows or the keys according to `scheme`."""
    tiling = Tiling(N, N, B_R, B_C)
    block = scheme(*PLAIN.head, tiling, 1, 4)
    return pairs((block.O, block.L), [x[0, 0, tiling.rows(1)] for x in PLAIN.right("O L")])


# The Triton kernels -----------------------------------------------------------------------------------------


def triton_call(trace: Trace, backward: bool) -> Pairs:
    """Run `fa2_lab.attention` in float32, on the GPU or, without a GPU, in Triton's interpreter."""
    torch, attention, device = torch_and_attention()
    q, k, v, dO = (torch.tensor(x, dtype=torch.float32, device=device) for x in (*SMALL.qkv, SMALL.dO))
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    O = attention(*leaves, causal=True, backend="triton")
    if not backward:
        return pairs([O.cpu()], SMALL.right("O"))
    O.backward(dO)
    return pairs([x.grad.cpu() for x in leaves], SMALL.right("dQ dK dV"))


def torch_and_attention() -> tuple[ModuleType, Callable, str]:
    """Return torch, the function attention(), and the device to run on. Raise Skipped if a package is missing."""
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
    Stage("standard, forward", partial(forward, "naive", PLAIN)),
    Stage("standard, backward", partial(backward, "naive", PLAIN)),
    Stage("O(N) memory, forward", by_rows_forward),
    Stage("O(N) memory, backward", by_rows_backward),
    Stage("online softmax", online),
    Stage("split keys, combined", split_keys),
    Stage("FA1 forward", partial(forward, "fa1", PLAIN)),
    Stage("FA1 backward", partial(backward, "fa1", PLAIN)),
    Stage("FA2 forward", partial(forward, "fa2", PLAIN)),
    Stage("FA2 backward", partial(backward, "fa2", PLAIN)),
    Stage("FA2 forward, causal", partial(forward, "fa2", MASKED)),
    Stage("FA2 backward, causal", partial(backward, "fa2", MASKED)),
    Stage("grouped heads, both", grouped_heads),
    Stage("closed forms = meter", closed_forms, tolerance=0.0),
    Stage("4 warps, split-K", partial(warp_scheme, warps.split_k)),
    Stage("4 warps, split-Q", partial(warp_scheme, warps.split_q)),
    Stage("Triton forward", partial(triton_call, backward=False), tolerance=1e-5, runs=2, device=triton_device),
    Stage("Triton, both", partial(triton_call, backward=True), tolerance=1e-5, runs=2, device=triton_device),
)


# Running and printing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The outcome of one stage. If the stage was skipped or failed, `note` gives the reason.

    A skipped stage counts as ok.
    """

    name: str
    error: float = np.nan
    trace: Trace = field(default_factory=Trace)
    seconds: float = 0.0
    device: str = ""
    ok: bool = True
    note: str = ""


def run(stage: Stage) -> Outcome:
    """Run a stage under the meter, compare its results with the truth, and return the outcome."""
    try:
        for _ in range(stage.runs):
            trace, start = Trace(), time.perf_counter()
            results = stage.run(trace)
            seconds = time.perf_counter() - start
        device = stage.device()
    except Skipped as reason:
        return Outcome(stage.name, note=f"skipped: {reason}")
    except Exception as failure:  # one broken stage must not hide the results of the other stages
        return Outcome(stage.name, ok=False, note=f"FAILED: {type(failure).__name__}: {failure}".splitlines()[0])
    error = max(distance(computed, right) for computed, right in results)
    return Outcome(stage.name, error, trace, seconds, device, ok=bool(error <= stage.tolerance))


HEADER = f"{'stage':21}{'error':>7}{'HBM':>7}{'matmul':>7}{'other':>7}{'seconds':>9}  {'device':11} verdict"


def line(row: Outcome) -> str:
    """Return one row of the tour's table, which is at most 80 columns wide unless the stage has a longer note."""
    if row.note:
        return f"{row.name:21}  {row.note}"
    met = row.trace
    work = met.hbm_elements, met.matmul_flops, met.other_flops + met.exponentials
    counts = "".join(f"{short(n) if n else '-':>7}" for n in work)
    verdict = "ok" if row.ok else "WRONG"
    return f"{row.name:21}{row.error:7.0e}{counts}{row.seconds:9.3f}  {row.device[:11]:11} {verdict}"


def tour(stages: tuple[Stage, ...] = STAGES) -> int:
    """Run all stages, print their outcomes as a table, and say what to do next. Return 1 if any stage fails, else 0."""
    print(f"One head, N = {N}, d = {D_HEAD}, tiles {B_R} × {B_C}; Triton: N = 128. Truth: dense float64.\n")
    for problem in PROBLEMS:
        _ = problem.truth  # computed here so that no stage's time includes it
    print(HEADER)
    rows = []
    for stage in stages:
        rows.append(run(stage))
        print(line(rows[-1]), flush=True)
    print("\nHBM counts elements moved to and from it, and matmul and other count FLOPs.\nA - was not metered.")
    wrong = [row.name for row in rows if not row.ok]
    ran = sum(not row.note for row in rows)
    print(f"Wrong: {', '.join(wrong)}" if wrong else f"All {ran} stages that ran agree with the truth.")
    print("Next: fa2-lab where FA2.A1.L9 | fa2-lab errata | fa2-lab glossary")
    notebooks = sorted((PACKAGE.parent / "notebooks").glob("*.ipynb"))
    if notebooks:
        print(f"The book: jupyter lab notebooks/{notebooks[0].name}")
    if (advice := doctor.advice(doctor.inspect_environment())) != f"{doctor.FINE}.":
        print(f"fa2-lab doctor: {advice}")
    return 1 if wrong else 0
