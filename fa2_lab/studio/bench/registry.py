"""The suites of the bench by name: who measures each, against whom, and what it is."""

from __future__ import annotations

from typing import NamedTuple


class Suite(NamedTuple):
    """Who measures it (a function in this room that takes nothing and returns Results), against whom, and what."""

    measure: str
    baseline: str  # of the ratios in its table; "" for none
    what: str
    gpu: bool = True


SUITES = {
    "smoke": Suite("smoke:run", "", "no GPU needed: small problems checked, in Triton's interpreter", gpu=False),
    "paper": Suite("suites:paper", "torch flash", "the FA2 paper's grid: d 64 and 128, 16k tokens"),
    "quick": Suite("suites:quick", "torch flash", "three lengths of that grid"),
    "long": Suite("suites:long", "torch flash", "one sequence of up to 262,144 tokens"),
    "heads": Suite("suites:heads", "torch flash", "grouped heads"),
    "decode": Suite("decode:run", "cuDNN", "one query over long caches, dense and in pages"),
    "small": Suite("suites:small", "torch flash", "what one call costs on the host"),
    "memory": Suite("suites:memory", "torch flash", "peak bytes over the length"),
    "ladder": Suite("ladder:run", "standard", "one change of the kernel at a time, with hardware counters"),
    "train": Suite("train:run", "torch flash", "a small GPT with its attention swapped"),
    "ring": Suite(
        "ring:run", "1 GPU", "one sequence over several GPUs: torchrun --nproc-per-node 4 -m fa2_lab bench ring"
    ),
}
RETIRED = {"ideas": "ideas for the Hopper kernels and decode, each with and without it, measured on an earlier version"}
