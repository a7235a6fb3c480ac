"""Whom we are measured against, each as a function of q, k, v that computes attention forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2_lab.bench.problem import Problem

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Missing(Exception):
    """Why a contestant cannot take part; the reason is printed in its place."""


def ours(problem: Problem) -> Attention:
    from fa2_lab.attention import attention

    return lambda q, k, v: attention(q, k, v, causal=problem.causal)


def sdpa(backend: SDPBackend) -> Callable[[Problem], Attention]:
    """torch's scaled_dot_product_attention held to one backend."""

    def prepare(problem: Problem) -> Attention:
        if problem.causal and problem.N_q != problem.N_k:
            raise Missing("its causal diagonal starts in the top left corner")
        grouped = problem.heads != problem.kv_heads

        def call(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal, enable_gqa=grouped
                )

        return call

    return prepare


@cache
def compiled_flex():
    from torch.nn.attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # one version for every shape, and none that is not compiled
    return torch.compile(flex_attention.flex_attention, dynamic=False)


@cache
def flex_mask(N_q: int, N_k: int):
    from torch.nn.attention import flex_attention

    offset = N_k - N_q
    return flex_attention.create_block_mask(lambda b, h, i, j: j <= i + offset, None, None, N_q, N_k, device="cuda")


def flex(problem: Problem) -> Attention:
    """torch's FlexAttention, compiled, with a block mask where causal."""
    mask = flex_mask(problem.N_q, problem.N_k) if problem.causal else None
    grouped = problem.heads != problem.kv_heads
    return lambda q, k, v: compiled_flex()(q, k, v, block_mask=mask, enable_gqa=grouped)


def flash_attn_package(problem: Problem) -> Attention:
    """The flash_attn package, which takes (batch, N, heads, d)."""
    try:
        from flash_attn import flash_attn_func
    except ImportError as absent:
        raise Missing("not installed") from absent
    return lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=problem.causal).transpose(
        1, 2
    )


PEERS: dict[str, Callable[[Problem], Attention]] = {
    "fa2_lab": ours,
    "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "torch efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "torch math": sdpa(SDPBackend.MATH),
    "FlexAttention": flex,
    "flash_attn": flash_attn_package,
}


def gemm_call(n: int = 8192) -> tuple[Callable[[], object], float]:
    """A large bf16 product, the ceiling of everything that multiplies, and its FLOPs."""
    a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ b, 2.0 * n**3


def copy_call(elements: int = 2**30) -> tuple[Callable[[], object], float]:
    """A large copy within HBM, the ceiling of everything that moves, and its bytes (read and written)."""
    source, target = torch.empty(2, elements, device="cuda", dtype=torch.bfloat16)
    return lambda: target.copy_(source), 4.0 * elements
