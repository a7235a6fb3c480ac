"""The suite `accuracy`: each implementation's errors in O, dQ, dK and dV against float64, for three kinds of inputs."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations
from fa2_studio.bench.compare import Plan, prepare_all
from fa2_studio.bench.problem import Problem, default_device, float64_gradients, relative_error
from fa2_studio.bench.recording import environment

TENSORS = ("O", "dQ", "dK", "dV")
PROTOCOL = (
    "For each tensor x (O, dQ, dK or dV), the error is ‖x − truth‖ / ‖truth‖. We compute the truth in float64 "
    "from the same 16-bit inputs. In the *normal* inputs, all numbers are drawn from N(0, 1). In the *outliers* "
    "inputs, one number in a thousand is drawn from N(0, 1) + N(0, 100) instead, as in the FlashAttention-3 paper. In "
    "the *peaked* inputs, each query is twice one of the keys that it sees, so nearly all of the weight in its row of "
    "P is in a single entry."
)

# Inputs -------------------------------------------------------------------------------------------------------


def normal_inputs(problem: Problem, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and dO drawn from N(0, 1)."""
    shape = problem.batch, problem.heads, problem.N_q, problem.d
    return tuple(torch.randn(shape, device=draw.device, generator=draw) for _ in range(4))


def inputs_with_outliers(problem: Problem, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return normal inputs in which random values from N(0, 100) are added to one in a thousand elements."""

    def some(x: torch.Tensor) -> torch.Tensor:
        far = torch.rand(x.shape, device=draw.device, generator=draw) < 1e-3
        return x + far * 10 * torch.randn(x.shape, device=draw.device, generator=draw)

    return tuple(map(some, normal_inputs(problem, draw)))


def peaked_inputs(problem: Problem, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return normal inputs, except that each query is twice one of the keys that it sees."""
    _, k, v, dO = normal_inputs(problem, draw)
    seen = torch.arange(1, problem.N_q + 1, device=draw.device) if problem.causal else problem.N_k
    one = (torch.rand(problem.N_q, device=draw.device, generator=draw) * seen).long()
    return 2 * k[:, :, one], k, v, dO


INPUTS: dict[str, Callable[[Problem, torch.Generator], tuple[torch.Tensor, ...]]] = dict(
    normal=normal_inputs, outliers=inputs_with_outliers, peaked=peaked_inputs
)

# Errors -------------------------------------------------------------------------------------------------------


def problems() -> list[Problem]:
    """Return problems with eight heads of 2,048 rows: d = 64 or 128, causal or not, in bf16 or fp16."""
    return [
        Problem(1, 8, 8, 2048, 2048, d, causal, dtype)
        for dtype in ("bfloat16", "float16")
        for d in (64, 128)
        for causal in (False, True)
    ]


def run() -> Plan:
    """Plan one row for each combination of problem, kind of input and result (O, dQ, dK or dV)."""
    jobs = [
        partial(measure_errors, problem, tensor, kind)
        for problem in problems()
        for kind in INPUTS
        for tensor in TENSORS
    ]
    return Plan(Record("accuracy", environment(), PROTOCOL), jobs)


def measure_errors(problem: Problem, tensor: str, kind: str) -> Measurement:
    """Measure the errors of one result (O, dQ, dK or dV), and return the row."""
    by_name, failed = errors_of_implementations(problem, kind)
    properties = problem.as_dict() | dict(rung=f"{tensor}, {kind}, {problem.dtype}")
    values = {name: [of_tensors[tensor]] for name, of_tensors in by_name.items()}
    return Measurement(properties, tensor, values, failed, unit="relative error")


@cache
def errors_of_implementations(
    problem: Problem, kind: str, names: Sequence[str] = implementations.names("dense")
) -> tuple[dict, dict]:
    """Return {implementation: {result: error}}, and {implementation: reason} for those that could not be measured."""
    draw = torch.Generator(default_device()).manual_seed(0)
    tensors = [x.to(getattr(torch, problem.dtype)) for x in INPUTS[kind](problem, draw)]
    q, k, v, dO = (x.requires_grad_(n < 3) for n, x in enumerate(tensors))
    right = float64_results(q, k, v, dO, problem.causal)

    def errors_of(name: str) -> dict[str, float]:
        O = implementations.prepare(name, problem)(q, k, v)
        results = (O.detach(), *torch.autograd.grad(O, (q, k, v), dO))
        return {tensor: relative_error(x, y) for tensor, x, y in zip(TENSORS, results, right, strict=True)}

    return prepare_all({name: partial(errors_of, name) for name in names})


def float64_results(q, k, v, dO, causal: bool) -> tuple[torch.Tensor, ...]:
    """Return O, dQ, dK and dV of all heads in float64."""
    last = k.shape[2] - q.shape[2]
    heads = zip(*(x.flatten(0, 1) for x in (q, k, v, dO)), strict=True)
    tensors = zip(*(float64_gradients(*head, last=last, causal=causal) for head in heads), strict=True)
    return tuple(torch.stack(heads).view(q.shape) for heads in tensors)
