"""Choose the kernels for a call.

The decode kernels compute the forward pass of calls with few queries, the Hopper kernels compute large calls on Hopper,
and the portable kernels compute everything else.

The functions whose names start with "prepare" choose the kernels once for all calls with the same options and with
tensors of the same types, devices, shapes and strides. Each of these functions returns another function, which computes
the calls. For the forward pass, the returned function takes (tensors). For the backward pass, it takes (dO, dL, O, L,
tensors).
"""

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from fa2_lab.kernels import interpreter
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.cache import get_or_prepare, tensor_keys
from fa2_lab.kernels.contiguous import needs_copy, rows_contiguous
from fa2_lab.kernels.decode import plan as decode
from fa2_lab.kernels.portable import backward as portable_backward
from fa2_lab.kernels.portable import forward as portable

# Forward ------------------------------------------------------------------------------------------------------


def forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute and return (O, L).

    All kernels define L in the same way, so any backward kernel can follow any forward kernel."""
    key = "forward", options, *tensor_keys(tensors)
    return get_or_prepare(key, prepare_forward, tensors, options)(tensors)


def prepare_forward(tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes (O, L) for calls like this one.

    If a tensor's rows are not contiguous, the returned function first copies the tensor. Otherwise, it is the function
    that prepare_contiguous_forward() returns.
    """
    if not any(map(needs_copy, tensors)):
        return prepare_contiguous_forward(tensors, options)
    return lambda tensors: forward(Tensors._make(map(rows_contiguous, tensors)), options)


def prepare_contiguous_forward(tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes (O, L) for calls like this one, using the fastest kernel that supports them."""
    # The fallback receives the tensors as arguments, so it does not keep any of them alive.
    portable_fallback = partial(prepare_portable_forward, options=options)
    q, k = tensors.q, tensors.k
    if tensors.block_table is not None:
        assert not needs_portable(tensors, options), "the portable kernels do not read pages"
        return with_fallback("decode over pages", decode.prepare(tensors, options))
    if decode_supports(tensors, options) and decode.is_fastest(q, k, options.num_splits):
        return with_fallback("decode", decode.prepare(tensors, options), portable_fallback)
    hopper = hopper_module("forward", q.device) if hopper_supports(tensors, options) else None
    call = hopper.prepare(tensors, options) if hopper is not None and hopper.is_fastest(q, k) else None
    return portable_fallback(tensors) if call is None else with_fallback("Hopper's forward", call, portable_fallback)


def prepare_portable_forward(tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes (O, L) for calls like this one, using the portable forward kernel."""
    return with_fallback(
        f"the portable forward{bias_suffix(options)}", portable.prepare(tensors, options), bias=options.bias
    )


# Backward -----------------------------------------------------------------------------------------------------


def backward(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options) -> tuple:
    """Compute and return (dQ, dK, dV), plus dsinks if the call has sinks. If L has no gradient, dL is None."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = "backward", options, deterministic, *tensor_keys((dO, dL, O, L, *tensors))
    call = get_or_prepare(key, prepare_backward, dO, dL, O, L, tensors, options, deterministic)
    return call(dO, dL, O, L, tensors)


def prepare_backward(
    dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options, deterministic: bool
) -> Callable:
    """Return a function that computes the gradients for calls like this one.

    If a tensor's rows are not contiguous, the returned function first copies the tensor. Otherwise, it is the function
    that prepare_contiguous_backward() returns. If `deterministic` is set, the gradients are bitwise identical in every
    run.
    """
    stats_contiguous = all(x is None or x.is_contiguous() for x in (dL, L))
    if stats_contiguous and not any(map(needs_copy, (dO, dL, O, *tensors))):
        return prepare_contiguous_backward(dO, O, tensors, options, deterministic)

    def on_copies(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors) -> tuple:
        dL = None if dL is None else rows_contiguous(dL).contiguous()
        tensors = Tensors._make(map(rows_contiguous, tensors))
        return backward(rows_contiguous(dO), dL, rows_contiguous(O), L.contiguous(), tensors, options)

    return on_copies


def prepare_contiguous_backward(
    dO: Tensor, O: Tensor, tensors: Tensors, options: Options, deterministic: bool
) -> Callable:
    """Return a function that computes the gradients for calls like this one, using the fastest kernels for them.

    The returned function uses the Hopper kernels if they support these calls and are faster than the portable kernels,
    and the portable kernels otherwise.
    """
    hopper = hopper_module("backward", tensors.q.device) if hopper_supports(tensors, options) else None
    call = None
    if hopper is not None and hopper.is_fastest(tensors.q, tensors.k):
        call = hopper.prepare(dO, O, tensors, options, deterministic)
    if call is None:
        return prepare_portable_backward(dO, O, tensors, options)

    def portable_fallback(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors) -> Callable:
        return prepare_portable_backward(dO, O, tensors, options)

    return with_fallback("Hopper's backward", call, portable_fallback)


def prepare_portable_backward(dO: Tensor, O: Tensor, tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes the gradients for calls like this one, using the portable backward kernels."""
    call = portable_backward.prepare(dO, O, tensors, options)
    return with_fallback(f"the portable backward{bias_suffix(options)}", call, bias=options.bias)


def bias_suffix(options: Options) -> str:
    """Return a suffix that names the bias in a kernel's error messages, or "" if there is no bias.

    If a kernel with a bias does not compile, the user's bias is the most likely cause.
    """
    return "" if options.bias is None else f" with the bias {options.bias.__name__}"


# Calls that the other kernels support ---------------------------------------------------------------------------


def needs_portable(tensors: Tensors, options: Options) -> bool:
    """Return whether only the portable kernels support a call, which is the case for dropout and for a bias."""
    return tensors.seed is not None or options.bias is not None


def decode_supports(tensors: Tensors, options: Options) -> bool:
    """Return whether the decode kernels support a call whose keys are not in pages: none with packed sequences."""
    return tensors.cu_seqlens_q is None and not needs_portable(tensors, options)


def hopper_supports(tensors: Tensors, options: Options) -> bool:
    """Return whether the Hopper kernels support a call with these options and optional tensors.

    They support neither a softcap nor sinks. If `exclude_hopper` is set, return False.
    """
    excluded = options.exclude_hopper or needs_portable(tensors, options)
    return not excluded and options.softcap is tensors.sinks is None


def hopper_module(direction: str, device: torch.device) -> ModuleType | None:
    """Return the result of import_hopper(), which is called only once per direction and device."""
    return get_or_prepare(("Hopper", direction, device), import_hopper, direction, device)


def import_hopper(direction: str, device: torch.device) -> ModuleType | None:
    """Import and return the module that prepares the Hopper kernel for `direction`, "forward" or "backward".

    Return None if the GPU is not a Hopper GPU, if the installed Gluon is too old, or if kernels run in Triton's
    interpreter.
    """
    if device.type != "cuda" or torch.version.hip or interpreter.is_enabled():
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return import_module(f"fa2_lab.kernels.hopper.{direction}.launch")
    except (ImportError, AttributeError) as error:
        warn_once(f"Hopper's {direction}", error)
        return None


# Kernels that the installed Triton cannot compile ---------------------------------------------------------------

ADVICE = "`python -m fa2_lab doctor` says which versions were tested"
WARNED: set[str] = set()  # kernels for which a warning has been shown


def with_fallback(
    name: str, call: Callable, prepare_fallback: Callable[..., Callable] | None = None, bias: Callable | None = None
) -> Callable:
    """Return a function that runs `call`, or a fallback if Triton cannot compile the kernels of `call`.

    The fallback is the function that prepare_fallback(*arguments) returns. It takes over when Triton cannot compile a
    kernel, and also runs whenever `call` returns None. If `prepare_fallback` is None, there is no fallback, and the
    compile error is reported as a RuntimeError. `name` identifies the kernels in messages. If a kernel with a bias
    fails in Triton's interpreter, the error names the bias.
    """
    compiles, fallback = True, None

    def call_or_fallback(*args: Any) -> Any:
        nonlocal compiles, fallback
        if compiles or prepare_fallback is None:
            try:
                result = call(*args)
                if result is not None or prepare_fallback is None:
                    return result
            except Exception as error:
                if not is_compile_error(error):
                    if bias is not None and is_interpreter_error(error):
                        raise TypeError(bias_error_message(bias, error)) from error
                    raise
                if prepare_fallback is None:
                    raise RuntimeError(f"fa2_lab: {compile_error_message(name, error)}; {ADVICE}") from error
                compiles = False
                warn_once(name, error)
        fallback = fallback or prepare_fallback(*args)
        return fallback(*args)

    return call_or_fallback


def is_compile_error(error: Exception) -> bool:
    """Return whether `error` means that Triton could not compile a kernel, rather than that a call or the GPU failed.

    Most compile errors are of Triton's own types. Others are raised inside Triton's compiler (for example, a
    RuntimeError for code that the verifier rejects) or inside its launcher (for an unknown option). A CUDA error is not
    a compile error, although it can also be raised inside the compiler, which loads the kernel.
    """
    if isinstance(error, TritonError):
        return not is_interpreter_error(error)
    modules, trace = [], error.__traceback__
    while trace is not None:
        modules.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    if modules[-1] == "triton.runtime.jit":
        return isinstance(error, (KeyError, TypeError))
    compiling = any(module.startswith("triton.compiler.") for module in modules)
    return compiling and not isinstance(error, torch.AcceleratorError) and "Triton Error" not in str(error)


def is_interpreter_error(error: BaseException) -> bool:
    """Return whether Triton's interpreter raised `error` because the code of a kernel failed."""
    return type(error).__name__ == "InterpreterError"


def compile_error_message(name: str, error: Exception) -> str:
    """Return one line with the name of the kernel that Triton cannot compile and the error's type and first line."""
    lines = (getattr(error, "error_message", None) or str(error)).strip().splitlines()
    return f"Triton {triton.__version__} cannot compile {name} ({': '.join([type(error).__name__, *lines[:1]])})"


def bias_error_message(bias: Callable, error: BaseException) -> str:
    """Return the message for a bias that fails in Triton's interpreter, including the root cause of the error."""
    while is_interpreter_error(error) and error.__cause__ is not None:
        error = error.__cause__
    failure = f"fails in Triton's interpreter ({type(error).__name__}: {error})"
    return f"bias: got {bias.__name__}, which {failure}; it takes a @triton.jit function of (head, row, column)"


def warn_once(name: str, error: Exception) -> None:
    """Warn, once per kernel, that Triton cannot compile it and that the portable kernels are used instead."""
    if name in WARNED:
        return
    WARNED.add(name)
    instead = "the portable kernels take its place, which are right and slower"
    warnings.warn(f"fa2_lab: {compile_error_message(name, error)}: {instead}; {ADVICE}", RuntimeWarning, stacklevel=2)
