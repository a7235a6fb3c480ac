"""The choice of the kernels that compute a call.

Decode computes a few queries, the Hopper kernels compute large calls on Hopper, and the portable kernels compute
everything else.

The functions named prepare… make the choice once for all calls like the given one, that is, with the same options and
with tensors of the same types, devices, shapes and strides. They return a function that computes such a call: a forward
is a function of (tensors), and a backward is a function of (dO, dL, O, L, tensors).
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
from fa2_lab.kernels.decode import plan as decode
from fa2_lab.kernels.portable import backward as portable_backward
from fa2_lab.kernels.portable import forward as portable
from fa2_lab.kernels.prepared import Options, Tensors, get_or_make, needs_copy, rows_contiguous, tensor_keys

# Forward ------------------------------------------------------------------------------------------------------


def forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute and return (O, L). All kernels define L in the same way, so any backward can follow any forward."""
    key = "forward", options, *tensor_keys(tensors)
    return get_or_make(key, prepare_any, tensors, options)(tensors)


def prepare_any(tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes (O, L) for calls like this one, with any strides.

    If the rows of a tensor are not contiguous, the function first copies this tensor. Otherwise, it is the function
    from prepare().
    """
    if not any(map(needs_copy, tensors)):
        return prepare(tensors, options)
    return lambda tensors: forward(Tensors._make(map(rows_contiguous, tensors)), options)


def prepare(tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes (O, L) for calls like this one, with the fastest kernel that supports them."""
    last = partial(prepare_portable, options=options)  # a function of the tensors of a call; it keeps none
    q, k = tensors.q, tensors.k
    if tensors.block_table is not None:
        return served("decode over pages", decode.prepare(tensors, options))
    if tensors.cu_seqlens_q is None and not options.needs_portable and decode.is_decode(q, k, options.num_splits):
        return served("decode", decode.prepare(tensors, options), last)
    launcher = hopper_forward(q.device) if for_hopper(options, tensors.sinks) else None
    own = launcher.prepare(tensors, options) if launcher is not None and launcher.enough_work(q, k) else None
    return last(tensors) if own is None else served("Hopper's forward", own, last)


def prepare_portable(tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes (O, L) for calls like this one, with the portable forward kernel."""
    return served(f"the portable forward{with_bias(options)}", portable.prepare(tensors, options), bias=options.bias)


# Backward -----------------------------------------------------------------------------------------------------


def backward(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options) -> tuple:
    """Return (dQ, dK, dV), plus dsinks if the call has sinks. dL is None if L has no gradient."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = "backward", options, deterministic, *tensor_keys((dO, dL, O, L, *tensors))
    call = get_or_make(key, prepare_any_backward, dO, dL, O, L, tensors, options, deterministic)
    return call(dO, dL, O, L, tensors)


def prepare_any_backward(
    dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options, deterministic: bool
) -> Callable:
    """Return a function that computes the gradients for calls like this one, with any strides.

    If the rows of a tensor are not contiguous, the function first copies this tensor. Otherwise, it is the function
    from prepare_backward(). `deterministic` asks for gradients that are bit for bit the same in every run.
    """
    in_rows = all(x is None or x.is_contiguous() for x in (dL, L))
    if in_rows and not any(map(needs_copy, (dO, dL, O, *tensors))):
        return prepare_backward(dO, O, tensors, options, deterministic)

    def on_copies(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors) -> tuple:
        dL = None if dL is None else rows_contiguous(dL).contiguous()
        tensors = Tensors._make(map(rows_contiguous, tensors))
        return backward(rows_contiguous(dO), dL, rows_contiguous(O), L.contiguous(), tensors, options)

    return on_copies


def prepare_backward(dO: Tensor, O: Tensor, tensors: Tensors, options: Options, deterministic: bool) -> Callable:
    """Return a function that computes the gradients for calls like this one, with the fastest kernels for them.

    On Hopper, these are the Hopper backward kernels if they support the call. Otherwise, they are the portable ones.
    """
    launcher = hopper_backward(tensors.q.device) if for_hopper(options, tensors.sinks) else None
    own = None
    if launcher is not None and launcher.enough_work(tensors.q, tensors.k):
        own = launcher.prepare(dO, O, tensors, options, deterministic)
    if own is None:
        return prepare_portable_backward(dO, O, tensors, options)

    def last(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors) -> Callable:
        return prepare_portable_backward(dO, O, tensors, options)

    return served("Hopper's backward", own, last)


def prepare_portable_backward(dO: Tensor, O: Tensor, tensors: Tensors, options: Options) -> Callable:
    """Return a function that computes the gradients for calls like this one, with the portable backward kernels."""
    own = portable_backward.prepare(dO, O, tensors, options)
    return served(f"the portable backward{with_bias(options)}", own, bias=options.bias)


def with_bias(options: Options) -> str:
    """Return the text that is appended to the name of a kernel in errors, which names the bias if there is one.

    If a kernel with a bias does not compile, the user's bias is the most likely cause.
    """
    return "" if options.bias is None else f" with the bias {options.bias.__name__}"


# Who can ------------------------------------------------------------------------------------------------------


def for_hopper(options: Options, sinks: Tensor | None) -> bool:
    """Return whether the options of a call allow the Hopper kernels.

    The Hopper kernels do not support dropout, a bias, a softcap or sinks, and they are not used if `portable` is set.
    """
    return not (options.needs_portable or options.portable) and options.softcap is sinks is None


def hopper_forward(device: torch.device) -> ModuleType | None:
    """Return the module that prepares the Hopper forward kernel, or None if the kernel cannot run.

    The kernel cannot run if the GPU is not a Hopper GPU or if the installed Gluon is too old.
    """
    return get_or_make(("Hopper's forward", device), hopper, "forward", device)


def hopper_backward(device: torch.device) -> ModuleType | None:
    """Return the module that prepares the Hopper backward kernel, or None if the kernel cannot run.

    The kernel cannot run if the GPU is not a Hopper GPU or if the installed Gluon is too old.
    """
    return get_or_make(("Hopper's backward", device), hopper, "backward", device)


def hopper(direction: str, device: torch.device) -> ModuleType | None:
    """Import and return the module that prepares the Hopper kernel for a direction, "forward" or "backward".

    Return None if the GPU is not a Hopper GPU, if the installed Gluon is too old, or if Triton's interpreter runs the
    kernels.
    """
    if device.type != "cuda" or torch.version.hip or interpreter.switched_on():
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return import_module(f"fa2_lab.kernels.hopper.{direction}.launch")
    except (ImportError, AttributeError) as error:
        warn_once(f"Hopper's {direction}", error)
        return None


# Kernels that this Triton cannot compile ------------------------------------------------------------------------

ADVICE = "`python -m fa2_lab doctor` says which versions were tested"
WARNED: set[str] = set()  # the kernels for which the warning has been given


def served(
    name: str, own: Callable, otherwise: Callable[..., Callable] | None = None, bias: Callable | None = None
) -> Callable:
    """Return a function that calls `own`, and that falls back to the function otherwise(*arguments) if `own` fails.

    The fallback is used for each call for which `own` returns None, and for all later calls if Triton cannot compile
    `own`. `name` is the kernel's name in messages. If `otherwise` is None, a kernel that Triton cannot compile is an
    error. If a kernel with a bias fails in Triton's interpreter, the error names the bias.
    """
    works, instead = True, None

    def call(*given: Any) -> Any:
        nonlocal works, instead
        if works or otherwise is None:
            try:
                found = own(*given)
                if found is not None or otherwise is None:
                    return found
            except Exception as error:
                if not is_a_compiler_s(error):
                    if bias is not None and is_the_interpreter_s(error):
                        raise TypeError(fails(bias, error)) from error
                    raise
                if otherwise is None:
                    raise RuntimeError(f"fa2_lab: {refused(name, error)}; {ADVICE}") from error
                works = False
                warn_once(name, error)
        instead = instead or otherwise(*given)
        return instead(*given)

    return call


def is_a_compiler_s(error: Exception) -> bool:
    """Return whether `error` means that Triton could not compile a kernel, rather than that a call or the GPU failed.

    Most such errors have one of Triton's own types. Others are raised inside its compiler, such as a RuntimeError for
    code that its verifier refuses, or inside its launcher for an option that it does not know. Because the compiler
    also loads the kernel, a CUDA error can also be raised inside the compiler. Such an error does not count.
    """
    if isinstance(error, TritonError):
        return not is_the_interpreter_s(error)
    modules, trace = [], error.__traceback__
    while trace is not None:
        modules.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    if modules[-1] == "triton.runtime.jit":
        return isinstance(error, (KeyError, TypeError))
    compiling = any(module.startswith("triton.compiler.") for module in modules)
    return compiling and not isinstance(error, torch.AcceleratorError) and "Triton Error" not in str(error)


def is_the_interpreter_s(error: BaseException) -> bool:
    """Return whether Triton's interpreter raised `error`, because the code of a kernel failed."""
    return type(error).__name__ == "InterpreterError"


def refused(name: str, error: Exception) -> str:
    """Return a line that names the kernel that Triton cannot compile, and the type and the first line of the error."""
    lines = (getattr(error, "error_message", None) or str(error)).strip().splitlines()
    return f"Triton {triton.__version__} cannot compile {name} ({': '.join([type(error).__name__, *lines[:1]])})"


def fails(bias: Callable, error: BaseException) -> str:
    """Return the message for a bias that fails in Triton's interpreter. It contains the first of the chained errors."""
    while is_the_interpreter_s(error) and error.__cause__ is not None:
        error = error.__cause__
    found = f"fails in Triton's interpreter ({type(error).__name__}: {error})"
    return f"bias: got {bias.__name__}, which {found}; it takes a @triton.jit function of (head, row, column)"


def warn_once(name: str, error: Exception) -> None:
    """Warn, once per kernel, that Triton cannot compile the kernel and that the portable kernels run instead."""
    if name in WARNED:
        return
    WARNED.add(name)
    instead = "the portable kernels take its place, which are right and slower"
    warnings.warn(f"fa2_lab: {refused(name, error)}: {instead}; {ADVICE}", RuntimeWarning, stacklevel=2)
