"""The suites of the bench by name: who measures each, against whom, and what it is."""

from __future__ import annotations

from typing import NamedTuple


class Suite(NamedTuple):
    """Who measures it (a function in this room that returns Record), against whom, and what."""

    measure: str
    baseline: str  # of the ratios in its table; "" for none
    what: str
    gpu: bool = True
    contest: bool = False  # the function takes the suite, the directions, and whether to measure without pauses


SUITES = {
    "smoke": Suite("smoke:run", "", "no GPU needed: small problems checked, in Triton's interpreter", gpu=False),
    "paper": Suite("suites:contests", "torch flash", "the FA2 paper's grid: d 64 and 128, 16k tokens", contest=True),
    "quick": Suite("suites:contests", "torch flash", "three lengths of that grid", contest=True),
    "nvidia": Suite("suites:contests", "torch flash", "64 query heads on 8, d 128, one sequence", contest=True),
    "long": Suite("suites:contests", "torch flash", "one sequence of up to 262,144 tokens", contest=True),
    "heads": Suite("suites:contests", "torch flash", "grouped heads", contest=True),
    "layout": Suite("suites:contests", "torch flash", "tensors that lie as (batch, N, heads, d)", contest=True),
    "packed": Suite("packed:run", "fa2_lab padded", "16 sequences of 100 to 4,000 tokens, packed or padded"),
    "masks": Suite("masks:run", "FlashAttention-3", "a window, a softcap and sinks under the causal mask"),
    "deterministic": Suite(
        "suites:contests", "fa2_lab", "gradients with the same bits in every call, beside the fast ones", contest=True
    ),
    "sweep": Suite(
        "suites:contests", "cuDNN", "200 random shapes that no size was chosen for, beside cuDNN and FA3", contest=True
    ),
    "accuracy": Suite("accuracy:run", "fa2_lab", "errors of O, dQ, dK and dV against float64, for everybody"),
    "decode": Suite("decode:run", "cuDNN", "one query over long caches, dense and in pages"),
    "small": Suite("suites:small", "torch flash", "what one call costs on the host"),
    "memory": Suite("suites:memory", "torch flash", "peak bytes over the length"),
    "ladder": Suite(
        "ladder:run", "standard", "one change of a kernel at a time, beside the fastest peer, with counters"
    ),
    "train": Suite("train:run", "torch flash", "a small GPT with its attention swapped"),
    "ring": Suite(
        "ring:run", "1 GPU", "one sequence over several GPUs: torchrun --nproc-per-node 4 -m fa2_lab bench ring"
    ),
}
OTHERS = {  # records that were made once, and what is in them
    "h100": "the paper's grid on an H100, beside FlashAttention-4",
    "ideas": "ideas for the Hopper kernels and decode, each with and without it, measured on an earlier version",
}
