"""The attention of FlexAttention, PyTorch's compiler for attention, with and without masks."""

from collections.abc import Callable
from functools import cache

import torch

from fa2_lab.tiles import cdiv
from fa2_studio.bench.peers.dense import Attend
from fa2_studio.bench.problem import Problem, default_device


@cache
def compiled_flex() -> Callable:
    from torch.nn.attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # compile for every shape, and never run uncompiled
    torch._functorch.config.donated_buffer = False  # because the backward pass runs many times after one forward pass
    return torch.compile(flex_attention.flex_attention, dynamic=False)


@cache
def causal_mask(N_q: int, N_k: int):
    """Return the causal BlockMask with tiles of 128 × 128.

    Each tile is classified by its corners, because checking every element would need N² bytes.
    """
    from torch.nn.attention import flex_attention

    offset = N_k - N_q
    top, left = (128 * torch.arange(cdiv(N, 128), device="cuda") for N in (N_q, N_k))
    bottom = (top + 128).clamp(max=N_q) - 1
    visible = left[None, :] <= bottom[:, None] + offset
    full = left[None, :] + 127 <= top[:, None] + offset
    full &= top[:, None] + 128 <= N_q
    return flex_attention.BlockMask.from_kv_blocks(
        *tile_lists(visible & ~full),
        *tile_lists(full),
        mask_mod=lambda b, h, i, j: j <= i + offset,
        seq_lengths=(N_q, N_k),
    )


def tile_lists(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of tiles that each row block visits, and all tile indices, with the visited tiles first.

    BlockMask expects the tiles in this form.
    """
    order = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]


def flex(problem: Problem) -> Attend:
    """Return PyTorch's compiled FlexAttention, with a block mask if the problem has a causal mask or a window.

    A softcap or ALiBi is passed as a function that modifies each score. With a sink, each row of O is scaled by the
    keys' share of the row's sum.
    """
    N_q, softcap, sinks = problem.N_q, problem.softcap, problem.mask(default_device()).get("sinks")
    options = dict(block_mask=causal_mask(N_q, problem.N_k) if problem.causal else None)
    if problem.window is not None:
        options["block_mask"] = window_mask(N_q, problem.window)
    if softcap is not None:
        options["score_mod"] = lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    if problem.alibi == "distance":
        options["score_mod"] = lambda score, b, h, i, j: score + torch.exp2(-0.5 * (h + 1)) * (j - i)
    if problem.alibi == "column":
        options["score_mod"] = lambda score, b, h, i, j: score + torch.exp2(-0.5 * (h + 1)) * j
    options["enable_gqa"] = problem.heads != problem.kv_heads

    def with_sinks(q, k, v):
        O, L = compiled_flex()(q, k, v, return_lse=True, **options)
        return O * torch.sigmoid(L - sinks[:, None])[..., None].to(O.dtype)

    return (lambda q, k, v: compiled_flex()(q, k, v, **options)) if sinks is None else with_sinks


@cache
def window_mask(N: int, window: int):
    """Return the BlockMask of a causal window."""
    from torch.nn.attention import flex_attention

    visible = lambda b, h, i, j: (j <= i) & (i - j < window)  # noqa: E731
    return flex_attention.create_block_mask(visible, B=None, H=None, Q_LEN=N, KV_LEN=N)
