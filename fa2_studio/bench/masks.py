"""The suite `masks`: a sliding window, a softcap and sinks under the causal mask, each beside the causal mask alone."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import contestants
from fa2_studio.bench.ahead import elsewhere
from fa2_studio.bench.contest import DIRECTIONS, Prepared, Tensors, ceilings, checked, collect, contest
from fa2_studio.bench.problem import FEW, Problem, distance, with_gradients
from fa2_studio.bench.protocol import PROTOCOL, measure
from fa2_studio.bench.results import machine

MASKS: dict[str, dict] = {  # what is asked for besides the causal mask; a window counts a row's own key
    "causal": dict(),
    "window 1024": dict(window=1024),
    "window 128": dict(window=128),
    "softcap 50": dict(softcap=50.0),
    "sinks": dict(sinks=True),
    "window 128, sinks": dict(window=128, sinks=True),
}


def grid() -> list[Problem]:
    """Two sequences of 8,192 tokens, 16 heads of 64 or 128."""
    return [Problem(2, 16, 16, 8192, 8192, d, causal=True) for d in (64, 128)]


def run() -> Record:
    """Forward and backward of everybody."""
    compiling = contestants.preparing("masked").keys() & contestants.preparing("compiles").keys()
    elsewhere(call_once, [*product(grid(), MASKS, sorted(compiling))])
    jobs = [partial(row, *place) for place in product(grid(), DIRECTIONS, MASKS)]
    protocol = f"{PROTOCOL}; FLOPs are those of the keys that rows see"
    return collect(Record("masks", machine(), protocol, ceilings()), jobs)


def flops(problem: Problem, mask: dict, direction: str) -> float:
    """As the paper counts them, of the keys that rows see."""
    if "window" not in mask:
        return problem.flops(direction)
    N, window = problem.N_q, mask["window"]
    visible = N * window - window * (window - 1) / 2
    return problem.flops(direction) * visible / (N * N / 2)


def inputs(problem: Problem, mask: dict, device: str = "cuda") -> tuple[Tensors, dict]:
    """q, k, v and dO; and the window, softcap and sinks that a contestant is asked for."""
    sinks = torch.linspace(-1, 3, problem.heads, device=device) if "sinks" in mask else None
    asked = dict(window=mask.get("window"), softcap=mask.get("softcap"), sinks=sinks)
    return problem.tensors(grad=True, device=device), asked


def call_once(problem: Problem, name: str, who: str) -> None:
    """A forward and a backward, so that what they compile lies on disk when they are timed."""
    tensors, asked = inputs(problem, MASKS[name])
    O = contestants.CONTESTANTS[who].masked(problem, **asked)(*tensors[:3])
    torch.autograd.grad(O, tensors[:3], tensors[3])


def row(
    problem: Problem,
    direction: str,
    name: str,
    timing: Callable[[dict], dict] = measure,
    device: str = "cuda",
) -> Measurement:
    """Every contestant whose answer for the last rows and keys is right."""
    tensors, asked = inputs(problem, MASKS[name], device)
    truth = by_definition(*tensors, **asked)

    def errors(O: torch.Tensor, gradients: Tensors) -> list[float]:
        last = [x.detach()[-1, -1, -FEW:] for x in (O, *gradients)]
        return [distance(x, right) for x, right in zip(last, truth, strict=True)]

    def prepared(prepare: Callable) -> Prepared:
        return checked(prepare(problem, **asked), tensors, direction, errors)

    prepares = {who: partial(prepared, prepare) for who, prepare in contestants.preparing("masked").items()}
    where = problem.as_dict() | dict(mask=name)
    return contest(where, direction, prepares, flops(problem, MASKS[name], direction), timing)


def by_definition(q, k, v, dO, window, softcap, sinks) -> list[torch.Tensor]:
    """O, dQ, dK and dV of the last head's last rows and keys: no other row sees those keys."""
    q, dO, k, v = q[-1, -1, -FEW:], dO[-1, -1, -FEW:], k[-1, -1], v[-1, -1]
    sink = None if sinks is None else sinks[-1].double()
    mask = dict(last=len(k) - len(q), causal=True, window=window, softcap=softcap, sink=sink)
    return [x[-FEW:] for x in with_gradients(q, k, v, dO, **mask)]
