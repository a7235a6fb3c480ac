"""The suite `packed`: causal sequences of different lengths, one after the other without padding, or padded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import peers
from fa2_studio.bench.contest import DIRECTIONS, Found, Tensors, call_of, ceilings, collect, contest, refused
from fa2_studio.bench.problem import Problem, error, gradient_error, gradients_by_definition
from fa2_studio.bench.protocol import PROTOCOL, measure
from fa2_studio.bench.results import machine

LENGTHS = tuple(range(100, 4001, 260))  # sixteen


def grid(lengths: Sequence[int] = LENGTHS) -> list[Problem]:
    """A hidden dimension of 2,048, in heads of 64 or 128."""
    return [Problem(len(lengths), 2048 // d, 2048 // d, max(lengths), max(lengths), d, True) for d in (64, 128)]


def run() -> Record:
    """Forward and backward of everybody."""
    jobs = [partial(row, problem, direction) for problem in grid() for direction in DIRECTIONS]
    return collect(Record("packed", machine(), f"{PROTOCOL}; FLOPs are those of the tokens", ceilings()), jobs)


def tokens(problem: Problem, lengths: Sequence[int], device: str = "cuda") -> Tensors:
    """Normal random q, k, v and dO."""
    draw = torch.Generator(device).manual_seed(0)
    shape, dtype = (sum(lengths), problem.heads, problem.d), getattr(torch, problem.dtype)
    return [torch.randn(shape, device=device, dtype=dtype, generator=draw) for _ in range(4)]


def flops(problem: Problem, lengths: Sequence[int], direction: str) -> float:
    """As the paper counts them, added up over the sequences."""
    each = (Problem(1, problem.heads, problem.heads, n, n, problem.d, True).flops(direction) for n in lengths)
    return sum(each)


# Contestants --------------------------------------------------------------------------------------------------


def padded(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """(tokens, heads, d) as (batch, heads, N, d), with zeros behind each sequence."""
    return torch.nn.utils.rnn.pad_sequence(x.split(list(lengths)), batch_first=True).transpose(1, 2).contiguous()


def with_padding(lengths: Sequence[int], given: Tensors) -> tuple[Callable, Tensors, Callable]:
    """attention() with key_lengths."""
    from fa2_lab.api.attention import attention

    count = torch.tensor(lengths, dtype=torch.int32, device=given[0].device)
    call = partial(attention, causal=True, key_lengths=count)
    return call, [padded(x, lengths) for x in given], lambda x: x[-1:, :, : lengths[-1]]


def by_package(module: str, function: str, longest: bool = True) -> Callable:
    """A call that takes where each sequence begins, and maybe the longest length."""

    def prepare(lengths: Sequence[int], given: Tensors) -> tuple[Callable, Tensors, Callable]:
        found = peers.function_of(module, function)
        begins = torch.tensor([0, *lengths], device=given[0].device).cumsum(0).int()
        more = (max(lengths), max(lengths)) if longest else ()

        def call(q, k, v):
            O = found(q, k, v, begins, begins, *more, causal=True)
            return O[0] if isinstance(O, tuple) else O

        return call, given, lambda x: x[-lengths[-1] :].transpose(0, 1)[None]

    return prepare


def by_torch(lengths: Sequence[int], given: Tensors) -> tuple[Callable, Tensors, Callable]:
    """torch's own, whose argument for the causal mask has had two names."""
    found = peers.function_of("torch.nn.attention.varlen", "varlen_attn")
    old = "is_causal" in inspect.signature(found).parameters
    causal = dict(is_causal=True) if old else dict(window_size=(-1, 0))
    begins = torch.tensor([0, *lengths], device=given[0].device).cumsum(0).int()

    def call(q, k, v):
        return found(q, k, v, begins, begins, max(lengths), max(lengths), **causal)

    return call, given, lambda x: x[-lengths[-1] :].transpose(0, 1)[None]


CONTESTANTS: dict[str, Callable[[Sequence[int], Tensors], tuple[Callable, Tensors, Callable]]] = {
    "fa2_lab": by_package("fa2_lab.api.packed", "attention_packed", longest=False),
    "fa2_lab padded": with_padding,
    "FlashAttention-3": by_package("flash_attn_interface", "flash_attn_varlen_func"),
    "torch varlen_attn": by_torch,
    "flash_attn": by_package("flash_attn", "flash_attn_varlen_func"),
}


def row(
    problem: Problem,
    direction: str,
    lengths: Sequence[int] = LENGTHS,
    timing: Callable[[dict], dict] = measure,
    device: str = "cuda",
) -> Measurement:
    """Every contestant whose answer for the last sequence is right."""
    given = tokens(problem, lengths, device)

    def prepared(prepare: Callable) -> Found:
        return checked(*prepare(lengths, given), direction)

    contestants = {name: partial(prepared, prepare) for name, prepare in CONTESTANTS.items()}
    return contest(problem.as_dict(), direction, contestants, flops(problem, lengths, direction), timing)


def checked(attention: peers.Attention, inputs: Tensors, last: Callable, direction: str) -> Found:
    """The call to time, or how wrong it is; `last` takes the last sequence out of a tensor, as (1, heads, N, d)."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    O, dO = attention(q, k, v), inputs[3]
    gradients = torch.autograd.grad(O, (q, k, v), dO, retain_graph=True)
    one = [last(x.detach()) for x in (q, k, v, dO)]
    truth = gradients_by_definition(*one, True)
    wrong = [error(last(O.detach()), *one[:3], True), gradient_error([last(x) for x in gradients], truth)]
    return refused(wrong) or call_of(attention, direction, (q, k, v, dO), O)
