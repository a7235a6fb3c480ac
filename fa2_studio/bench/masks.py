"""The suite `masks`: a sliding window, a softcap and sinks under the causal mask, each beside the causal mask alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import peers
from fa2_studio.bench.ahead import elsewhere
from fa2_studio.bench.contest import DIRECTIONS, Found, Tensors, call_of, ceilings, collect, contest, refused
from fa2_studio.bench.problem import Problem, distance
from fa2_studio.bench.protocol import PROTOCOL, measure
from fa2_studio.bench.results import machine

FEW = 64  # rows and keys that are worked out in float64: the last ones, for no other row sees those keys


class Mask(NamedTuple):
    """What is asked for besides the causal mask."""

    window: int | None = None  # keys that a row sees, its own among them
    softcap: float | None = None
    sinks: bool = False


MASKS = {
    "causal": Mask(),
    "window 1024": Mask(1024),
    "window 128": Mask(128),
    "softcap 50": Mask(softcap=50.0),
    "sinks": Mask(sinks=True),
    "window 128, sinks": Mask(128, sinks=True),
}


def grid() -> list[Problem]:
    """Two sequences of 8,192 tokens, 16 heads of 64 or 128."""
    return [Problem(2, 16, 16, 8192, 8192, d, True) for d in (64, 128)]


def run() -> Record:
    """Forward and backward of everybody."""
    elsewhere(call_once, [(*place, who) for who in ("FlexAttention", "fa2_lab") for place in product(grid(), MASKS)])
    places = [(problem, direction) for problem in grid() for direction in DIRECTIONS]
    jobs = [partial(row, *place, mask) for place in places for mask in MASKS]
    return collect(
        Record("masks", machine(), f"{PROTOCOL}; FLOPs are those of the keys that rows see", ceilings()), jobs
    )


def flops(problem: Problem, mask: Mask, direction: str) -> float:
    """As the paper counts them, of the keys that rows see."""
    N, window = problem.N_q, mask.window or problem.N_q
    seen = N * window - window * (window - 1) / 2
    return problem.flops(direction) * seen / (N * N / 2) if mask.window else problem.flops(direction)


# Contestants --------------------------------------------------------------------------------------------------


def ours(problem: Problem, mask: Mask, sinks: torch.Tensor | None) -> peers.Attention:
    """What attention() chooses."""
    from fa2_lab.api.attention import attention

    window = (mask.window - 1, 0) if mask.window else None
    return partial(attention, causal=True, window=window, softcap=mask.softcap, sinks=sinks)


def portable(problem: Problem, mask: Mask, sinks: torch.Tensor | None) -> peers.Attention:
    """The portable kernels, which compute softcap and sinks everywhere, and windows where there is no Hopper."""
    if mask != Mask():
        raise peers.Missing("timed under the causal mask alone")
    return peers.portable(problem)


def flash3(problem: Problem, mask: Mask, sinks: torch.Tensor | None) -> peers.Attention:
    """FlashAttention-3 counts a window as we do."""
    if mask.sinks:
        raise peers.Missing("it takes no sinks")
    window = (mask.window - 1, 0) if mask.window else (-1, -1)
    return peers.package("flash_attn_interface", window_size=window, softcap=mask.softcap or 0.0)(problem)


def flex(problem: Problem, mask: Mask, sinks: torch.Tensor | None) -> peers.Attention:
    """FlexAttention with a block mask, a function of the score, and a sink by what it takes from each row's sum."""
    blocks, c = flex_mask(problem.N_q, mask.window), mask.softcap
    capped = None if c is None else lambda score, b, h, i, j: c * torch.tanh(score / c)

    def call(q, k, v):
        found = peers.compiled_flex()(q, k, v, score_mod=capped, block_mask=blocks, return_lse=mask.sinks)
        if not mask.sinks:
            return found
        O, L = found
        return O * torch.sigmoid(L - sinks[:, None])[..., None].to(O.dtype)

    return call


@cache
def flex_mask(N: int, window: int | None):
    """The BlockMask of a causal window."""
    from torch.nn.attention import flex_attention

    def seen(b, h, i, j):
        return (j <= i) if window is None else (j <= i) & (i - j < window)

    return flex_attention.create_block_mask(seen, None, None, N, N)


CONTESTANTS = {"fa2_lab": ours, "fa2_lab portable": portable, "FlashAttention-3": flash3, "FlexAttention": flex}


def call_once(problem: Problem, name: str, who: str) -> None:
    """A forward and a backward, so that what they compile lies on disk when they are timed."""
    tensors, sinks = given(problem, MASKS[name])
    O = CONTESTANTS[who](problem, MASKS[name], sinks)(*tensors[:3])
    torch.autograd.grad(O, tensors[:3], tensors[3])


def given(problem: Problem, mask: Mask, device: str = "cuda") -> tuple[Tensors, torch.Tensor | None]:
    """q, k, v and dO; and sinks where the mask has some."""
    sinks = torch.linspace(-1, 3, problem.heads, device=device) if mask.sinks else None
    return problem.tensors(grad=True, device=device), sinks


def row(
    problem: Problem,
    direction: str,
    name: str,
    timing: Callable[[dict], dict] = measure,
    device: str = "cuda",
) -> Measurement:
    """Every contestant whose answer for the last rows and keys is right."""
    mask = MASKS[name]
    tensors, sinks = given(problem, mask, device)
    truth = by_definition(*tensors, mask, sinks)

    def prepared(prepare: Callable) -> Found:
        return checked(prepare(problem, mask, sinks), tensors, truth, direction)

    contestants = {who: partial(prepared, prepare) for who, prepare in CONTESTANTS.items()}
    where = problem.as_dict() | dict(mask=name)
    return contest(where, direction, contestants, flops(problem, mask, direction), timing)


def checked(attention: peers.Attention, tensors: Tensors, truth: Tensors, direction: str) -> Found:
    """The call to time, or how wrong it is."""
    q, k, v, dO = tensors
    O = attention(q, k, v)
    gradients = torch.autograd.grad(O, (q, k, v), dO, retain_graph=True)
    last = [x.detach()[-1, -1, -FEW:] for x in (O, *gradients)]
    wrong = [distance(x, right) for x, right in zip(last, truth, strict=True)]
    return refused(wrong) or call_of(attention, direction, tensors, O)


def by_definition(q, k, v, dO, mask: Mask, sinks: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """O, dQ, dK and dV of the last head's last rows and keys, in float64."""
    q, dO = (x.detach()[-1, -1, -FEW:].double() for x in (q, dO))
    k, v = (x.detach()[-1, -1].double().requires_grad_() for x in (k, v))
    s = q.requires_grad_() @ k.T * q.shape[1] ** -0.5
    if mask.softcap is not None:
        s = mask.softcap * torch.tanh(s / mask.softcap)
    behind = torch.arange(len(k) - len(q), len(k), device=k.device)[:, None] - torch.arange(len(k), device=k.device)
    s = s.masked_fill((behind < 0) | (behind >= (mask.window or len(k))), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[-1].double().expand(len(s), 1)], 1)
    O = torch.softmax(s, 1)[:, : len(k)] @ v
    dQ, dK, dV = torch.autograd.grad(O, (q, k, v), dO)
    return O.detach(), dQ, dK[-FEW:], dV[-FEW:]
