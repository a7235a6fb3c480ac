"""Handmade rows and records for tests of the bench."""

from fa2_lab.records import Measurement, Record
from fa2_studio.bench.problem import Problem

MACHINE = dict(
    gpu="NVIDIA H200", driver="580", python="3.12", torch="2.11", triton="3.6", cudnn="91900", commit="abc1234"
)


def new_row(**changes):
    """Return a row with two implementations, of which the second is twice as fast, and one that failed."""
    problem = Problem(4, 16, 16, 4096, 4096, 128, causal=False).as_dict() | changes
    values = {"torch flash": [2.0, 1.9, 2.1], "fa2_lab": [1.0, 0.9, 1.1]}
    return Measurement(problem, "forward", values, {"flash_attn": "not installed"}, flops=4e11)


def new_record(*rows, **options):
    return Record("paper", MACHINE, "by hand", {"GEMM TFLOP/s": 790.6}, [*rows], **options)
