"""The suite `packed`: batches of causal sequences of different lengths, either packed or padded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations
from fa2_studio.bench.compare import DIRECTIONS, Plan, Prepared, checked_call, compare, measure_ceilings
from fa2_studio.bench.peers.packed import Packed
from fa2_studio.bench.problem import (
    Problem,
    TensorSequence,
    relative_error_of_gradients,
    relative_error_of_O,
    sampled_gradients,
)
from fa2_studio.bench.protocol import KERNEL_PROTOCOL, measure_kernels
from fa2_studio.bench.recording import environment

LENGTHS = tuple(range(100, 4001, 260))  # of sixteen sequences
ONE_LONG = 60 * (100,) + (16384,)
DOCUMENTS = tuple(Random(2048).choices(range(30, 801), k=2048))
WHAT = (
    "We count FLOPs only for the tokens, not for padding. In the batch of 16 sequences, each sequence has 100 to 4,000 "
    "tokens. In the batch of 61 sequences, one sequence has 16,384 tokens, and each of the others has 100. In the "
    "batch of 2,048 sequences, each sequence has 30 to 800 tokens."
)


def problems(lengths: Sequence[int]) -> list[Problem]:
    """Return problems with a hidden dimension of 2,048, divided into heads of d = 64 or d = 128."""
    N = max(lengths)
    return [Problem(len(lengths), 2048 // d, 2048 // d, N, N, d, causal=True) for d in (64, 128)]


def run() -> Plan:
    """Plan a row for each batch of sequences, problem and direction."""
    jobs = [
        partial(time_packed, problem, direction, lengths)
        for lengths in (LENGTHS, ONE_LONG, DOCUMENTS)
        for problem in problems(lengths)
        for direction in DIRECTIONS
    ]
    return Plan(Record("packed", environment(), f"{KERNEL_PROTOCOL} {WHAT}", measure_ceilings()), jobs)


def packed_flops(problem: Problem, lengths: Sequence[int], direction: str) -> float:
    """Return the FLOPs, counted as in the paper and summed over the sequences."""
    each = (Problem(1, problem.heads, problem.heads, n, n, problem.d, causal=True) for n in lengths)
    return sum(one.flops(direction) for one in each)


def time_packed(
    problem: Problem, direction: str, lengths: Sequence[int], timing: Callable[[dict], dict] = measure_kernels
) -> Measurement:
    """Time all implementations whose answer for the last sequence is right, and return their row."""
    one_after_the_other = replace(problem, batch=1, N_q=sum(lengths), N_k=sum(lengths))
    given = [x.detach()[0].transpose(0, 1).contiguous() for x in one_after_the_other.tensors(grad=True)]

    def prepared(prepare: Callable) -> Prepared:
        return checked_packed_call(prepare(lengths, given), direction)

    prepare_by_name = {
        name: partial(prepared, prepare) for name, prepare in implementations.values_of("packed").items()
    }
    return compare(problem.as_dict(), direction, prepare_by_name, packed_flops(problem, lengths, direction), timing)


def checked_packed_call(call: Packed, direction: str) -> Prepared:
    """Return the call to time, or the reason that its result for the last sequence is wrong."""
    q, k, v = (x.detach().requires_grad_() for x in call.tensors[:3])
    one = [call.last(x.detach()) for x in call.tensors]

    def errors(O: torch.Tensor, gradients: TensorSequence) -> list[float]:
        truth = sampled_gradients(*one, causal=True)
        of_O = relative_error_of_O(call.last(O), *one[:3], causal=True)
        return [of_O, relative_error_of_gradients([call.last(x) for x in gradients], truth)]

    return checked_call(call.attention, (q, k, v, call.tensors[3]), direction, errors)
