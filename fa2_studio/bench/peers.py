"""Whom we are measured against, each as a function of q, k, v that computes attention forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2_studio.bench.problem import Problem

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Missing(Exception):
    """Why a contestant cannot take part; the reason is printed in its place."""


def ours(problem: Problem) -> Attention:
    """What attention() chooses for these tensors on this machine."""
    from fa2_lab.api.attention import attention

    return lambda q, k, v: attention(q, k, v, causal=problem.causal)


def portable(problem: Problem) -> Attention:
    """The plain Triton kernels, which run on every GPU, also where attention() would choose others."""
    from fa2_lab.kernels.portable import backward, forward
    from fa2_lab.kernels.prepared import Options, kind_of, prepared

    options = Options(problem.causal, problem.d**-0.5)

    def ahead(q, k, v):
        call = prepared(("portable", options, *map(kind_of, (q, k, v))), forward.prepare, q, k, v, options)
        return call(q, k, v, key_lengths=None, seed=None)

    class Portable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            O, L = ahead(q, k, v)
            ctx.save_for_backward(q, k, v, O, L)
            return O

        @staticmethod
        def backward(ctx, dO):
            dO, (q, k, v, O, L) = dO.contiguous(), ctx.saved_tensors
            key = "portable", options, *map(kind_of, (dO, q, k, v, O))
            call = prepared(key, backward.prepare, dO, q, k, v, O, options)
            return call(dO, q, k, v, O, L, dL=None, key_lengths=None, seed=None)

    def call(q, k, v):
        gradients = torch.is_grad_enabled() and q.requires_grad
        return Portable.apply(q, k, v) if gradients else ahead(q, k, v)[0]

    return call


def reference(problem: Problem) -> Attention:
    """The NumPy ladder in float64."""
    from fa2_lab.api.attention import attention

    return lambda q, k, v: attention(q, k, v, causal=problem.causal, backend="reference")


def plain(problem: Problem) -> Attention:
    """Torch's own operations with the N × N matrices; it aligns the causal mask as we do."""
    group, d = problem.heads // problem.kv_heads, problem.d
    hidden = torch.ones(problem.N_q, problem.N_k, dtype=torch.bool).triu(problem.N_k - problem.N_q + 1)

    def call(q, k, v):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        s = q @ k.transpose(2, 3) * d**-0.5
        s = s.masked_fill(hidden.to(q.device), -torch.inf) if problem.causal else s
        return torch.softmax(s, dim=3) @ v

    return call


def sdpa(backend: SDPBackend) -> Callable[[Problem], Attention]:
    """torch's scaled_dot_product_attention held to one backend."""

    def prepare(problem: Problem) -> Attention:
        if problem.causal and problem.N_q != problem.N_k:
            raise Missing("its causal diagonal starts in the top left corner")
        grouped = problem.heads != problem.kv_heads

        def bare(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=grouped
            )

        def call(q, k, v):
            with sdpa_kernel(backend):
                return bare(q, k, v)

        call.bare, call.held = bare, partial(sdpa_kernel, backend)
        return call

    return prepare


def bare(attention: Attention) -> tuple[Attention, Callable]:
    """A contestant without its choice of a backend, and the context that makes the choice once for many calls."""
    return getattr(attention, "bare", attention), getattr(attention, "held", nullcontext)


@contextmanager
def same_bits():
    """Torch asks for the same bits in every call. What it adds to that, new memory filled with NaN, is left out."""
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def deterministic(prepare: Callable[[Problem], Attention]) -> Callable[[Problem], Attention]:
    """A contestant that is asked for the same bits in every call, forward and backward."""

    def prepare_same(problem: Problem) -> Attention:
        attention = prepare(problem)

        def call(q, k, v):
            with same_bits():
                return attention(q, k, v)

        call.around = same_bits
        return call

    return prepare_same


def around(attention: Attention, call: Callable[[], object]) -> Callable[[], object]:
    """The call within what its contestant needs around it."""
    held = getattr(attention, "around", None)
    if held is None:
        return call

    def run():
        with held():
            return call()

    return run


@cache
def compiled_flex():
    from torch.nn.attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # one version for every shape, and none that is not compiled
    torch._functorch.config.donated_buffer = False  # its backward is called many times after one forward
    return torch.compile(flex_attention.flex_attention, dynamic=False)


@cache
def flex_mask(N_q: int, N_k: int, device: str = "cuda"):
    """The causal BlockMask, its tiles of 128 × 128 from their corners: to look at every element takes N² bytes."""
    from torch.nn.attention import flex_attention

    offset = N_k - N_q
    top, left = (128 * torch.arange(-(-N // 128), device=device) for N in (N_q, N_k))
    bottom = (top + 128).clamp(max=N_q) - 1
    seen = left[None, :] <= bottom[:, None] + offset
    full = left[None, :] + 127 <= top[:, None] + offset
    full &= top[:, None] + 128 <= N_q
    return flex_attention.BlockMask.from_kv_blocks(
        *listed(seen & ~full), *listed(full), mask_mod=lambda b, h, i, j: j <= i + offset, seq_lengths=(N_q, N_k)
    )


def listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles each row block visits, and which: those first, as BlockMask wants it."""
    order = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def flex(problem: Problem, backend: str = "") -> Attention:
    """torch's FlexAttention, compiled, with a block mask where causal; its usual kernels or another backend's."""
    mask = flex_mask(problem.N_q, problem.N_k) if problem.causal else None
    options = dict(block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)
    if backend:
        options["kernel_options"] = dict(BACKEND=backend)
    return lambda q, k, v: compiled_flex()(q, k, v, **options)


def flex_on_flash(problem: Problem) -> Attention:
    """FlexAttention on FlashAttention-4's kernels, where torch has that backend and the package is installed."""
    from torch.nn.attention import flex_attention

    known = getattr(flex_attention, "FlexKernelOptions", None)
    if "BACKEND" not in getattr(known, "__annotations__", ()):
        raise Missing("this torch has no other backend for it")
    return flex(problem, "FLASH")


def function_of(module: str, name: str) -> Callable:
    """A function of a package that need not be installed."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as absent:
        raise Missing("not installed") from absent


def O_of(found: torch.Tensor | tuple) -> torch.Tensor:
    """What is O, of a function that returns O or (O, L)."""
    return found[0] if isinstance(found, tuple) else found


def heads_first(found: torch.Tensor | tuple) -> torch.Tensor:
    """What Dao's packages return, O or (O, L), as (batch, heads, N, d)."""
    return O_of(found).transpose(1, 2)


def package(module: str, **options) -> Callable[[Problem], Attention]:
    """One of Dao's packages, which take (batch, N, heads, d) and may return L beside O."""

    def prepare(problem: Problem) -> Attention:
        if module == "flash_attn_interface":
            refuse_unbuilt(FP16=problem.dtype == "float16", SOFTCAP=bool(options.get("softcap")))
        function = partial(function_of(module, "flash_attn_func"), causal=problem.causal, **options)
        return lambda q, k, v: heads_first(function(*(x.transpose(1, 2) for x in (q, k, v))))

    return prepare


def refuse_unbuilt(**asked: bool) -> None:
    """Refuse what the FlashAttention-3 that is installed was built without: calling it would end the process."""
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except ImportError:
        return
    for feature, wanted in asked.items():
        if wanted and flags.get(f"FLASHATTENTION_DISABLE_{feature}"):
            raise Missing(f"built without {feature.lower()}")


def flash3_cache(problem: Problem) -> Attention:
    """FlashAttention-3's way to decode; its cache, (batch, N, heads, d), is laid out once."""
    function, kept = function_of("flash_attn_interface", "flash_attn_with_kvcache"), {}

    def call(q, k, v):
        if kept.get("k") is not k:
            kept.update(k=k, cache=[x.transpose(1, 2).contiguous() for x in (k, v)])
        return heads_first(function(q.transpose(1, 2), *kept["cache"], causal=problem.causal, num_splits=0))

    return call


PEERS: dict[str, Callable[[Problem], Attention]] = {
    "fa2_lab": ours,
    "fa2_lab portable": portable,
    "fa2_lab reference": reference,
    "torch": plain,
    "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "torch efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "torch math": sdpa(SDPBackend.MATH),
    "FlexAttention": flex,
    "FlexAttention on FA4": flex_on_flash,
    "flash_attn": package("flash_attn"),
    "FlashAttention-3": package("flash_attn_interface"),
    "FlashAttention-4": package("flash_attn.cute"),
    "fa2_lab deterministic": deterministic(ours),
    "torch flash deterministic": deterministic(sdpa(SDPBackend.FLASH_ATTENTION)),
    "FlashAttention-3 deterministic": package("flash_attn_interface", deterministic=True),
    "FlashAttention-4 deterministic": package("flash_attn.cute", deterministic=True),
}
DECODERS = PEERS | {"FlashAttention-3": flash3_cache}
DISTRIBUTIONS = {  # what has a version of its own
    "flash_attn": "flash-attn",
    "FlashAttention-3": "flash_attn_3",
    "FlashAttention-4": "flash-attn-4",
}


def gemm_call(n: int = 8192) -> tuple[Callable[[], object], float]:
    """A large bf16 product, the ceiling of everything that multiplies, and its FLOPs."""
    a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ b, 2.0 * n**3


def copy_call(elements: int = 2**30) -> tuple[Callable[[], object], float]:
    """A large copy within HBM, the ceiling of everything that moves, and its bytes (read and written)."""
    source, target = torch.empty(2, elements, device="cuda", dtype=torch.bfloat16)
    return lambda: target.copy_(source), 4.0 * elements
