"""How contestants compute what is asked for besides the causal mask; the window counts a row's own key."""

from functools import partial

import torch

from fa2_studio.bench.peers import dense
from fa2_studio.bench.problem import Problem


def ours(problem: Problem, window: int | None, softcap: float | None, sinks: torch.Tensor | None, backend="auto"):
    """What attention() chooses, or one of its backends."""
    from fa2_lab.api.attention import attention

    reach = None if window is None else (window - 1, 0)
    return partial(attention, causal=True, window=reach, softcap=softcap, sinks=sinks, backend=backend)


def flash3(problem: Problem, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> dense.Attention:
    """FlashAttention-3."""
    if sinks is not None:
        raise dense.Missing("it takes no sinks")
    reach = (-1, -1) if window is None else (window - 1, 0)
    return dense.package("flash_attn_interface", window_size=reach, softcap=softcap or 0.0)(problem)
