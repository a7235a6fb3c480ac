"""The dense attention of each implementation, as functions that take a problem and return a function of q, k and v."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2_studio.bench.problem import Missing, Problem, default_device

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(problem: Problem, backend: str = "auto") -> Attend:
    """Return our attention(), which chooses a backend itself unless `backend` names one."""
    from fa2_lab.api.attention import attention

    options = problem.mask(default_device())
    if problem.window is not None:
        options["window"] = (problem.window - 1, 0)
    if options.pop("slopes", None) is not None:
        from fa2_studio.bench.peers import alibi

        options["bias"] = getattr(alibi, problem.alibi)
    return partial(attention, causal=problem.causal, backend=backend, **options)


def plain(problem: Problem) -> Attend:
    """Return attention in PyTorch operations on N × N matrices. Its causal mask is aligned as in attention()."""
    group, d = problem.heads // problem.kv_heads, problem.d
    hidden = torch.ones(problem.N_q, problem.N_k, dtype=torch.bool).triu(problem.N_k - problem.N_q + 1)

    def call(q, k, v):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        s = q @ k.transpose(2, 3) * d**-0.5
        s = s.masked_fill(hidden.to(q.device), -torch.inf) if problem.causal else s
        return torch.softmax(s, dim=3) @ v

    return call


def sdpa(problem: Problem, backend: SDPBackend) -> Attend:
    """Return PyTorch's scaled_dot_product_attention, restricted to one backend."""
    if problem.causal and problem.N_q != problem.N_k:
        raise Missing("torch would align the causal mask with the top left corner")
    if problem.mask("cpu"):
        raise Missing("it supports only the causal mask")
    options = dict(is_causal=problem.causal, enable_gqa=problem.heads != problem.kv_heads)
    return WithContext(
        partial(torch.nn.functional.scaled_dot_product_attention, **options), partial(sdpa_kernel, backend)
    )


@dataclass(frozen=True)
class WithContext:
    """A call that must run inside a context manager, such as sdpa_kernel(backend) or deterministic_algorithms().

    A benchmark can use `bare` and `context` separately to enter the context once for many calls.
    """

    bare: Callable
    context: Callable[[], AbstractContextManager]

    def __call__(self, *given):
        with self.context():
            return self.bare(*given)


def call_and_context(call: Callable) -> tuple[Callable, Callable[[], AbstractContextManager]]:
    """Split a call into the bare call and the context that it needs."""
    return (call.bare, call.context) if isinstance(call, WithContext) else (call, nullcontext)


@contextmanager
def deterministic_algorithms():
    """Return a context in which PyTorch uses only deterministic algorithms, without filling new memory with NaN."""
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def deterministic(prepare: Callable[[Problem], Attend]) -> Callable[[Problem], Attend]:
    """Return an implementation whose forward and backward passes must be deterministic."""
    return lambda problem: WithContext(prepare(problem), deterministic_algorithms)


def function_of(module: str, name: str) -> Callable:
    """Return a function from a package. Raises Missing if the package is not installed."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as absent:
        raise Missing("not installed") from absent


def O_of(output: torch.Tensor | tuple) -> torch.Tensor:
    """Return O, given the output of a function that returns either O or (O, L)."""
    return output[0] if isinstance(output, tuple) else output


def heads_first(output: torch.Tensor | tuple) -> torch.Tensor:
    """Return O with axes (batch, heads, N, d), given an output of Dao's packages, which is either O or (O, L)."""
    return O_of(output).transpose(1, 2)


def package(problem: Problem, module: str, **options) -> Attend:
    """Return the attention of one of Dao's packages, which expect (batch, N, heads, d) and may also return L."""
    if problem.sinks:
        raise Missing("it does not support sinks")
    if problem.window is not None:
        options["window_size"] = (problem.window - 1, 0)
    if problem.softcap is not None:
        options["softcap"] = float(problem.softcap)
    if module == "flash_attn_interface":
        d_96 = 64 < problem.d <= 96  # if built without d = 96, the package would use its slower kernels for d = 128
        refuse_unbuilt(FP16=problem.dtype == "float16", SOFTCAP="softcap" in options, HDIM96=d_96)
    function = partial(function_of(module, "flash_attn_func"), causal=problem.causal, **options)
    return lambda q, k, v: heads_first(function(*(x.transpose(1, 2) for x in (q, k, v))))


def refuse_unbuilt(**asked: bool) -> None:
    """Raise Missing if the installed FlashAttention-3 lacks a feature.

    A call that needs the feature would otherwise end the process.
    """
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except ImportError:
        return
    for feature, wanted in asked.items():
        if wanted and flags.get(f"FLASHATTENTION_DISABLE_{feature}"):
            raise Missing(f"it was built without support for {feature.lower().replace('hdim', 'd = ')}")


def flash3_cache(problem: Problem) -> Attend:
    """Return FlashAttention-3's call for decoding. Its cache, of shape (batch, N, heads, d), is built once per k."""
    function, kept = function_of("flash_attn_interface", "flash_attn_with_kvcache"), {}

    def call(q, k, v):
        if kept.get("k") is not k:
            kept.update(k=k, cache=[x.transpose(1, 2).contiguous() for x in (k, v)])
        return heads_first(function(q.transpose(1, 2), *kept["cache"], causal=problem.causal, num_splits=0))

    return call


def gemm_call(n: int = 8192) -> tuple[Callable[[], object], float]:
    """Return a call that runs a large bf16 matmul, whose speed is the ceiling for all matmuls, and its FLOPs."""
    a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ b, 2.0 * n**3


def copy_call(elements: int = 2**30) -> tuple[Callable[[], object], float]:
    """Return a call that copies a large buffer within HBM, whose speed is the ceiling for all copies, and its bytes.

    The bytes include both those read and those written.
    """
    source, target = torch.empty(2, elements, device="cuda", dtype=torch.bfloat16)
    return lambda: target.copy_(source), 4.0 * elements
