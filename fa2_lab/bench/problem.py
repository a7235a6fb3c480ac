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

    def tensors(self, seed: int = 0, grad: bool = False) -> tuple[torch.Tensor, ...]:
        """Normal random q, k, v and, with `grad`, dO."""
        draw = torch.Generator("cuda").manual_seed(seed)
        q_shape = (self.batch, self.heads, self.N_q, self.d)
        k_shape = (self.batch, self.kv_heads, self.N_k, self.d)
        options = dict(device="cuda", dtype=getattr(torch, self.dtype), generator=draw)
        q, k, v = (torch.randn(s, **options).requires_grad_(grad) for s in (q_shape, k_shape, k_shape))
        return (q, k, v, torch.randn(q_shape, **options)) if grad else (q, k, v)

    def as_dict(self) -> dict:
        return asdict(self)


def rows_by_definition(q, k, v, causal: bool, rows: int = 64) -> torch.Tensor:
    """The last rows of the last head's output in float64, on the GPU: enough to tell right from wrong."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q[-1, -1, -rows:].double(), k[-1, (q.shape[1] - 1) // group].double(), v[-1, -1].double()
    s = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        row = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
        s = s.masked_fill(torch.arange(k.shape[0], device=q.device)[None, :] > row[:, None], -torch.inf)
    return torch.softmax(s, dim=1) @ v


def error(O: torch.Tensor, q, k, v, causal: bool) -> float:
    """‖O − truth‖ / ‖truth‖ over the rows that were worked out."""
    with torch.no_grad():
        truth = rows_by_definition(q.detach(), k.detach(), v.detach(), causal)
        got = O[-1, -1, -len(truth) :].double()
        return float((got - truth).norm() / truth.norm())
