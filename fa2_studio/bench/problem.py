"""One attention problem: its tensors, its FLOPs, and a check that an answer is right."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """The shape of one call. FLOPs are counted as the FA2 paper counts them: 4 N_q N_k d per head, half if causal."""

    batch: int
    heads: int
    kv_heads: int
    N_q: int
    N_k: int
    d: int
    causal: bool
    dtype: str = "bfloat16"
    layout: str = ""  # "rows first" for tensors that lie in memory as (batch, N, heads, d)

    @classmethod
    def square(cls, N: int, d: int, causal: bool, tokens: int = 16384, hidden: int = 2048) -> Problem:
        """Self-attention with the paper's sizes: 16k tokens in all and a hidden dimension of 2048."""
        heads = hidden // d
        return cls(max(1, tokens // N), heads, heads, N, N, d, causal)

    @property
    def forward_flops(self) -> float:
        return 4 * self.batch * self.heads * self.N_q * self.N_k * self.d * (0.5 if self.causal else 1)

    def flops(self, direction: str) -> float:
        """Of "forward", "backward" (2.5 times as many) or "both"."""
        return self.forward_flops * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

    def tensors(self, seed: int = 0, grad: bool = False, device: str = "cuda") -> tuple[torch.Tensor, ...]:
        """Normal random q, k, v and, with `grad`, dO; all are (batch, heads, N, d), whatever the layout."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(heads: int, N: int) -> torch.Tensor:
            shape = (self.batch, N, heads, self.d) if self.layout else (self.batch, heads, N, self.d)
            x = torch.randn(shape, device=device, dtype=getattr(torch, self.dtype), generator=generator)
            return x.transpose(1, 2) if self.layout else x

        q, k, v = (draw(*s) for s in ((self.heads, self.N_q), (self.kv_heads, self.N_k), (self.kv_heads, self.N_k)))
        inputs = tuple(x.requires_grad_(grad) for x in (q, k, v))
        return (*inputs, draw(self.heads, self.N_q)) if grad else inputs

    def as_dict(self) -> dict:
        """Its fields for a record; the layout where it is not the usual one."""
        return {name: value for name, value in asdict(self).items() if name != "layout" or value}


MOST = 2**27  # elements of P in float64 at a time: 1 GiB

# Right or wrong ------------------------------------------------------------------------------------------------


def rows_by_definition(q, k, v, causal: bool, rows: int = 64) -> torch.Tensor:
    """The last rows of the last head's output in float64, where the tensors are: enough to tell right from wrong."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q[-1, -1, -rows:].double(), k[-1, (q.shape[1] - 1) // group].double(), v[-1, -1].double()
    return probabilities(q, k, causal, k.shape[0] - q.shape[0]) @ v


def probabilities(q, k, causal: bool, last: int) -> torch.Tensor:
    """Rows of P; with `causal`, the first of them sees the keys up to `last`."""
    s = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        row = torch.arange(last, last + q.shape[0], device=q.device)
        s.masked_fill_(torch.arange(k.shape[0], device=q.device)[None, :] > row[:, None], -torch.inf)
    return torch.softmax(s, dim=1)


def error(O: torch.Tensor, q, k, v, causal: bool) -> float:
    """‖O − truth‖ / ‖truth‖ over the rows that were worked out."""
    with torch.no_grad():
        truth = rows_by_definition(q.detach(), k.detach(), v.detach(), causal)
        return distance(O[-1, -1, -len(truth) :], truth)


def distance(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


@torch.no_grad()
def gradients_by_definition(q, k, v, dO, causal: bool, few: int = 64) -> tuple[torch.Tensor, ...]:
    """In float64: dQ of the last head's last rows, dK and dV of the last key head's first keys, which most rows see."""
    group, chunk = q.shape[1] // k.shape[1], max(few, MOST // k.shape[2])
    k, v = k[-1, -1].double(), v[-1, -1].double()
    dK, dV = torch.zeros_like(k[:few]), torch.zeros_like(v[:few])
    for head in range(q.shape[1] - group, q.shape[1]):
        for first in range(0, q.shape[2], chunk):
            q_i, dO_i = (x[-1, head, first : first + chunk].double() for x in (q, dO))
            p = probabilities(q_i, k, causal, first + k.shape[0] - q.shape[2])
            dS = dO_i @ v.T
            dS = dS.sub_((dS * p).sum(1, keepdim=True)).mul_(p).mul_(q.shape[3] ** -0.5)
            dK += dS[:, :few].T @ q_i
            dV += p[:, :few].T @ dO_i
    return dS[-few:] @ k, dK, dV


def gradient_error(gradients, truth) -> float:
    """The largest of the three relative errors, over the rows and keys that were worked out."""
    dQ, dK, dV = gradients
    got = dQ[-1, -1, -len(truth[0]) :], dK[-1, -1, : len(truth[1])], dV[-1, -1, : len(truth[2])]
    return worst(distance(x, right) for x, right in zip(got, truth, strict=True))


def worst(errors) -> float:
    """The largest, or NaN if there is one: Python's max would lose it."""
    return float(torch.tensor(list(errors)).max())
