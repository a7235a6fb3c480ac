"""Check the public functions' arguments before any launch and choose between the kernels and the reference.

Every error names the argument, the value passed, and the accepted values. Values on a GPU are read only if the check is
worth the wait, and at most once per version of a tensor. The kernels clamp unchecked values.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fa2_lab.kernels import interpreter
from fa2_lab.kernels.arguments import Options
from fa2_lab.kernels.cache import mark_checked, was_checked
from fa2_lab.tiles import check_window, real_number, whole_number

BACKENDS = ("auto", "triton", "portable", "reference")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
GRADIENT_ADVICE = "compute gradients with .backward() or torch.autograd.grad"
NO_TRANSFORMS = (
    "fa2_lab.attention: torch.vmap, torch.func, is_grads_batched=True and vectorize=True are not supported; "
    f"write a loop, or put what is mapped over into the batch dimension, and {GRADIENT_ADVICE}"
)
LARGEST_SCALE = 1e30  # keeps scaled scores finite in fp32, the kernels' precision, as long as q · k is below 10⁸
LARGEST_SINK = 1e38  # limit on the kernels' quotient sink / softcap or, without a softcap, sink / scale
MOST_SPLITS = 256
# The kernels divide sinks and biases by the scale. If the scale is below this bound, q is multiplied by the scale
# instead, so that the quotients stay finite.
SMALLEST_DIVISOR = 1e-10


# Tensors ------------------------------------------------------------------------------------------------------


def check_floats(name: str, x: Tensor, dimensions: int, takes: str, q: Tensor | None = None) -> None:
    """Raise an error unless x is a floating-point tensor with the given number of dimensions.

    If q is given, x must also have q's dtype and device. In the error message, `name` is the name of x, and `takes`
    describes the valid values of x.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; it takes a torch.Tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: got {x.dtype}; it takes float16, bfloat16 or float32")
    if x.is_nested or x.dim() != dimensions or x.layout != torch.strided:
        raise ValueError(f"{name}: got {describe(x)}; it takes {takes}")
    if q is not None and x.dtype != q.dtype:
        raise TypeError(f"{name}: got {x.dtype}; it takes q's dtype, {q.dtype}")
    if q is not None:
        check_device(name, x, q)


def check_integers(name: str, x: Tensor, q: Tensor, takes: str, dtypes: tuple = INTEGERS) -> None:
    """Raise an error unless x is a tensor on q's device with one of the given integer dtypes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; it takes {takes}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got {x.dtype}; it takes {takes}")
    check_device(name, x, q)


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    """Raise an error unless x is on q's device. `name` is the name of x in the error message."""
    if x.device != q.device:
        raise ValueError(f"{name}: got a tensor on {x.device}; it takes q's device, {q.device}")


def check_heads(name: str, kv_heads: int, heads: int) -> None:
    """Raise an error unless the number of K/V heads divides the number of query heads."""
    if heads % kv_heads:
        raise ValueError(
            f"{name}: got {kv_heads} heads; with {heads} heads of q it takes a number that divides {heads}"
        )


def describe(x: Tensor) -> str:
    """Return a description of x for error messages: its shape, or its layout if x is not a strided tensor."""
    if x.is_nested:
        return "a nested tensor"
    return f"shape {tuple(x.shape)}" if x.layout == torch.strided else f"a tensor with layout {x.layout}"


def check_q(q: Tensor) -> None:
    """Raise an error unless q is (batch, heads, N, d) with at least one head and d from 1 to 256."""
    takes = "(batch, heads, N, d), at least one head and d from 1 to 256"
    check_floats("q", q, 4, takes)
    if q.shape[1] < 1 or not 1 <= q.shape[3] <= 256:
        raise ValueError(f"q: got {describe(q)}; it takes {takes}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error unless q, k and v are valid arguments of attention(), with matching shapes, dtypes and devices."""
    check_q(q)
    (batch, heads, _, d), takes = q.shape, f"({q.shape[0]}, kv heads, N_k, {q.shape[3]})"
    check_floats("k", k, 4, takes, q)
    check_floats("v", v, 4, takes, q)
    if k.shape[0] != batch or k.shape[3] != d or k.shape[1] < 1:
        raise ValueError(f"k: got {describe(k)}; with q {tuple(q.shape)} it takes {takes}")
    check_heads("k", k.shape[1], heads)
    if v.shape != k.shape:
        raise ValueError(f"v: got {describe(v)}; it takes k's shape, {tuple(k.shape)}")


def check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error unless q, k and v are valid arguments of attention_packed(), with matching shapes and dtypes."""
    takes = "(tokens, heads, d), at least one head and d from 1 to 256"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floats(name, x, 3, takes, q=None if name == "q" else q)
        if min(x.shape[1:]) < 1 or x.shape[2] > 256:
            raise ValueError(f"{name}: got {describe(x)}; it takes {takes}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: got {describe(k)}; with q {tuple(q.shape)} it takes (tokens, kv heads, {q.shape[2]})")
    check_heads("k", k.shape[1], q.shape[1])
    if v.shape != k.shape:
        raise ValueError(f"v: got {describe(v)}; it takes k's shape, {tuple(k.shape)}")


def check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    """Raise an error unless both tensors of cumulative sequence lengths have the right dtype, device and shape."""
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_integers(name, cu_seqlens, q, "an int32 tensor (batch + 1,)", (torch.int32,))
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(f"{name}: got {describe(cu_seqlens)}; it takes (batch + 1,), for at least one sequence")
        if cu_seqlens.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"{name}: got {describe(cu_seqlens)}; it takes cu_seqlens_q's shape, {tuple(cu_seqlens_q.shape)}"
            )


def check_cu_seqlens_values(name: str, cu_seqlens: Tensor, total: int) -> None:
    """Raise an error unless the cumulative sequence lengths begin at 0, never decrease, and end with `total`.

    `name` is the argument's name in the error message. The values are checked only if they can be read without waiting
    for a GPU.
    """
    if cu_seqlens.device.type != "cpu" or is_traced(cu_seqlens):
        return
    first, *_, last = numbers = cu_seqlens.tolist()
    if first != 0:
        raise ValueError(f"{name}: got {first} as its first start; it takes 0")
    for before, after in pairwise(numbers):
        if after < before:
            raise ValueError(f"{name}: got {after} after {before}; it takes starts that never run backwards")
    if last != total:
        raise ValueError(f"{name}: got {last} as its end; it takes the number of rows, {total}")


def check_key_lengths(key_lengths: Tensor, q: Tensor, N_k: int) -> None:
    """Raise an error if key_lengths has the wrong dtype, device or shape, or a length outside 0 … N_k.

    The lengths themselves are checked only if can_read_values() returns True for them.
    """
    check_integers("key_lengths", key_lengths, q, "an integer tensor (batch,)")
    if key_lengths.shape != q.shape[:1]:
        raise ValueError(f"key_lengths: got {describe(key_lengths)}; it takes (batch,) = ({q.shape[0]},)")
    check_key_lengths_values(key_lengths, N_k)


def check_key_lengths_values(key_lengths: Tensor, N_k: int) -> None:
    """Raise an error if a length in key_lengths is outside 0 … N_k.

    Nothing is checked if can_read_values() returns False for key_lengths.
    """
    if not can_read_values(key_lengths) or was_checked(key_lengths, (N_k,)):
        return
    low, high = torch.stack(torch.aminmax(key_lengths)).tolist()
    if low < 0 or high > N_k:
        raise ValueError(f"key_lengths: got values from {low} to {high}; it takes 0 to N_k = {N_k}")
    mark_checked(key_lengths, (N_k,))


def check_kv_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Raise an error unless q, k_pages and v_pages are valid arguments of attention_paged() that match each other."""
    takes = f"(pages, page_size, kv heads, d) with d = {q.shape[3]}"
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_floats(name, x, 4, takes, q)
        if x.shape[3] != q.shape[3] or min(x.shape[1:]) < 1:
            raise ValueError(f"{name}: got {describe(x)}; with q {tuple(q.shape)} it takes {takes}")
        check_heads(name, x.shape[2], q.shape[1])
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name}: got strides {x.stride()}; it takes pages whose last dimension is contiguous")
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages: got {describe(v_pages)}; it takes k_pages' shape, {tuple(k_pages.shape)}")


def check_no_gradient(**tensors: Tensor | None) -> None:
    """Raise an error if any of the named tensors requires a gradient."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got a tensor that requires a gradient; it takes one without, or torch.no_grad()")


def check_block_table(block_table: Tensor, q: Tensor) -> None:
    """Raise an error if the block table has the wrong dtype, device or shape."""
    takes = "an integer tensor (batch, width)"
    check_integers("block_table", block_table, q, takes)
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(f"block_table: got {describe(block_table)}; it takes {takes} with batch {q.shape[0]}")


def check_block_table_values(
    block_table: Tensor, key_lengths: Tensor, pages: tuple[int, ...], N_q: int, left: int | None
) -> None:
    """Raise an error if the block table contains an invalid page index for a key that a query can see.

    `pages` is (number of pages, keys per page). `left` is the window's left bound, or None if the window has no
    left bound. The table is not checked if its values cannot be read before the launch.
    """
    limits = *pages, N_q, left
    if not can_read_values(block_table) or was_checked(block_table, limits, key_lengths):
        return
    count, size = pages
    begin = torch.arange(block_table.shape[1], device=block_table.device) * size
    needed = begin < key_lengths[:, None]
    if left is not None:
        needed &= begin + size > key_lengths[:, None].long() - N_q - left
    low, high = torch.stack(torch.aminmax(block_table.masked_fill(~needed, value=0))).tolist()
    if (low < 0 or high >= count) and (count or needed.any()):
        raise ValueError(f"block_table: got pages from {low} to {high}; it takes 0 to {count - 1}, for {count} pages")
    mark_checked(block_table, limits, key_lengths)


def can_read_values(x: Tensor) -> bool:
    """Return whether the values of x can be read before the launch, if necessary by waiting for the GPU.

    During tracing by torch.compile or torch.export, and during CUDA graph capture, there are no values to read, so the
    result is False. The result is also False if x is empty.
    """
    return x.numel() > 0 and not is_traced(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


# Options ------------------------------------------------------------------------------------------------------


def check_flags(**flags: object) -> None:
    """Raise an error unless every flag is True or False."""
    for name, x in flags.items():
        if not isinstance(x, bool):
            raise TypeError(f"{name}: got {x!r}; it takes True or False")


def scale_or_default(scale: object, d: int) -> float:
    """Return `scale` as a float, or 1/√d if it is None."""
    return 1 / math.sqrt(d) if scale is None else real_number("scale", scale, "a finite number, or None for 1/√d")


def check_num_splits(num_splits: object) -> int:
    """Return num_splits as an int, or 0 if num_splits is None."""
    return 0 if num_splits is None else whole_number("num_splits", num_splits, low=0, high=MOST_SPLITS)


def check_softcap(softcap: object) -> float | None:
    """Return the softcap as a float, or None if there is no softcap."""
    if softcap is None:
        return None
    return real_number("softcap", softcap, "a number from 1e-30 to 1e30, or None", lambda c: 1e-30 <= c <= 1e30)


def simplify_mask(
    causal: bool, window: tuple[int | None, int | None] | None, N_q: int, N_k: int
) -> tuple[bool, int | None, int | None]:
    """Return an equivalent mask in its simplest form, (causal, left, right). Raise an error if the window is invalid.

    A window bound that no row reaches becomes None, and right = 0 becomes causal = True.
    """
    left, right = (None, None) if window is None else check_window(window)
    if left is not None and left >= N_k - 1:
        left = None
    if causal or (right is not None and right >= N_q - 1):
        right = None
    return (True, left, None) if right == 0 else (causal, left, right)


def check_sinks_shape(sinks: Tensor, q: Tensor, heads: int) -> None:
    """Raise an error unless sinks is a float tensor on q's device with one element per query head."""
    takes = f"(heads,) = ({heads},)"
    check_floats("sinks", sinks, 1, takes)
    check_device("sinks", sinks, q)
    if sinks.shape[0] != heads:
        raise ValueError(f"sinks: got {describe(sinks)}; it takes {takes}")


def check_sinks(sinks: Tensor | None, options: Options) -> None:
    """Raise an error if a sink is +∞ or would become infinite in fp32, the kernels' precision.

    A sink of +∞ would leave no probability for any key. The values are checked only if they can be read without waiting
    for a GPU.
    """
    if sinks is None or not sinks.is_cpu or is_traced(sinks):
        return
    scale = abs(options.scale) if options.softcap is None else options.softcap
    divisor = 1.0 if options.softcap is None and scale < SMALLEST_DIVISOR else scale
    most = math.inf if options.reference else LARGEST_SINK * min(divisor, 1.0)
    if was_checked(sinks, (most,)):
        return
    size = sinks.double().abs()
    wrong = torch.isposinf(sinks) | ((size > most) & (size != math.inf))
    if wrong.any():
        message = f"sinks: got {sinks[wrong][0].item():g}; it takes numbers below infinity"
        if most == math.inf:
            raise ValueError(message)
        raise ValueError(f"{message}, here up to {most:g} in absolute value; backend='reference' takes every float")
    mark_checked(sinks, (most,))


def check_scale(scale: float) -> None:
    """Raise an error if the scale would make ordinary scores infinite in fp32, the kernels' precision."""
    if abs(scale) > LARGEST_SCALE:
        raise ValueError(
            f"scale: got {scale:g}; it takes at most 1e30 in absolute value; backend='reference' takes every float"
        )


def with_positive_scale(q: Tensor, sinks: Tensor | None, options: Options) -> tuple[Tensor, Options]:
    """Return q and Options that give the same result with a nonnegative scale, as the kernels require.

    The kernels compute a row's maximum before they apply the scale, so if the scale is negative, both q and the scale
    are negated. The kernels also divide sinks and biases by the scale in fp32, so with sinks or a bias, a tiny scale is
    multiplied into q.
    """
    if options.scale < 0:
        q, options = -q, options._replace(scale=-options.scale)
    if options.reference:
        return q, options
    check_scale(options.scale)
    divided = sinks is not None or options.bias is not None
    if divided and options.softcap is None and options.scale < SMALLEST_DIVISOR:
        return q * options.scale, options._replace(scale=1.0)
    return q, options


# torch's transforms and tracing ----------------------------------------------------------------------------------


def check_transforms(*gradients: Tensor | None) -> None:
    """Raise an error inside a transform of torch.func, or if torch.vmap has batched a gradient.

    The kernels require tensors with memory of their own, which tensors inside such a transform do not have.
    """
    if peek_interpreter_stack() is not None:
        raise NotImplementedError(NO_TRANSFORMS)
    for x in gradients:
        if x is not None and is_legacy_batchedtensor(x):
            raise NotImplementedError(NO_TRANSFORMS)


def check_not_jit_traced() -> None:
    """Raise an error inside torch.jit.trace, where tensor sizes are tensors instead of integers."""
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "fa2_lab.attention: torch.jit.trace is not supported; use torch.compile or torch.export"
        )


# The choice between the kernels and the reference -------------------------------------------------------------


def runs_on_triton(backend: str, device: str) -> bool:
    """Return True if a call on this device runs the Triton kernels, and False if it runs the reference."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}; it takes one of {', '.join(BACKENDS)}")
    if backend == "reference" or (device in ("cuda", "meta") and interpreter.triton_is_installed()):
        return backend != "reference"
    must = backend in ("triton", "portable")
    if not interpreter.triton_is_installed():
        why = "Triton is not installed here (it exists for Linux only)"
    elif device != "cpu" or (torch.cuda.is_available() and not interpreter.is_enabled()):
        why = f"q is on {device}, and the Triton kernels run on this machine's GPU"
    elif not interpreter.is_enabled():
        why = "Triton's interpreter is off: import fa2_lab.kernels before triton, or set TRITON_INTERPRET=1"
    else:
        why = interpreter.version_conflict()
        must = bool(why)
    if why and must:
        raise RuntimeError(f"fa2_lab.attention: {why}; backend='reference' runs everywhere")
    return not why


# torch.compiler.assume_constant_result would also set this mark, but it first spends two seconds loading torch's
# compiler.
runs_on_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced(*tensors: Tensor | None) -> bool:
    """Return whether torch is tracing this call rather than running it. If so, the call must use a custom operator.

    torch traces calls under torch.compile and torch.export, and calls on fake tensors. The function also returns True
    for meta tensors and tensor subclasses.
    """
    for x in tensors:
        if x is not None and (type(x) not in PLAIN_TYPES or x.is_meta):
            return True
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
