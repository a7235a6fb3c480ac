"""How contestants compute what is asked for besides the causal mask; the window counts a row's own key."""

from __future__ import annotations

import torch

from fa2_studio.bench.peers import dense
from fa2_studio.bench.problem import Problem


def ours(problem: Problem, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> dense.Attention:
    """What attention() chooses."""
    from fa2_lab.api.attention import attention

    reach = None if window is None else (window - 1, 0)
    return lambda q, k, v: attention(q, k, v, causal=True, window=reach, softcap=softcap, sinks=sinks)


def portable(problem: Problem, window: int | None, softcap: float | None, sinks: torch.Tensor | None):
    """The portable kernels, which compute softcap and sinks everywhere, and windows where there is no Hopper."""
    if (window, softcap, sinks) != (None, None, None):
        raise dense.Missing("timed under the causal mask alone")
    return dense.portable(problem)


def flash3(problem: Problem, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> dense.Attention:
    """FlashAttention-3."""
    if sinks is not None:
        raise dense.Missing("it takes no sinks")
    reach = (-1, -1) if window is None else (window - 1, 0)
    return dense.package("flash_attn_interface", window_size=reach, softcap=softcap or 0.0)(problem)
