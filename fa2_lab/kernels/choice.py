"""Which kernels compute a call: decode for few queries, Hopper's own on Hopper, the portable ones for the rest.

What is prepared for calls of one kind takes their tensors one by one, in the order of Tensors, so that a kernel's own
call can be what is prepared.
"""

import warnings
from collections.abc import Callable, Sequence
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
from fa2_lab.kernels.prepared import Options, Tensors, has_gaps, keys_of, prepared, rows_contiguous

# Forward ------------------------------------------------------------------------------------------------------


def forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """(O, L) of one call. All kernels define L in the same way, so anyone's may go into any backward."""
    key = "forward", options, *keys_of(tensors)
    return prepared(key, prepare_any, tensors, options)(*tensors)


def prepare_any(tensors: Tensors, options: Options) -> Callable:
    """prepare() for tensors in any strides: where a last dimension is not contiguous, copies are taken."""
    if not any(map(has_gaps, tensors)):
        return prepare(tensors, options)
    return lambda *given: forward(Tensors(*map(rows_contiguous, given)), options)


def prepare(tensors: Tensors, options: Options) -> Callable:
    """What computes (O, L) for calls of one kind."""
    q, k, v, key_lengths, _, sinks, cu_seqlens_q, _ = tensors

    def last(*given: Any) -> Callable:  # from the tensors of a call: none is kept here
        return prepare_portable(Tensors(*given), options)

    if cu_seqlens_q is None and not options.dropout_p and decode.is_decode(q, k):
        return served("decode", decode.prepare(q, k, v, options, key_lengths), last)
    hopper = hopper_forward(q.device) if for_hopper(options, sinks) else None
    own = None
    if hopper is not None and hopper.enough_work(q, k):
        own = hopper.prepare(q, k, v, options, key_lengths, sequences(cu_seqlens_q))
    if own is None:
        return prepare_portable(tensors, options)

    def hoppers(
        q: Any, k: Any, v: Any, key_lengths: Any, _: Any, __: Any, cu_seqlens_q: Any, cu_seqlens_k: Any
    ) -> tuple | None:
        return own(q, k, v, key_lengths, cu_seqlens_q, cu_seqlens_k)

    return served("Hopper's forward", hoppers, last)


def prepare_portable(tensors: Tensors, options: Options) -> Callable:
    """The portable forward for calls of one kind."""
    q, k, v, key_lengths, _, _, cu_seqlens_q, _ = tensors
    own = portable.prepare(q, k, v, options, key_lengths, sequences=sequences(cu_seqlens_q))
    return served("the portable forward", own)


# Backward -----------------------------------------------------------------------------------------------------


def backward(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Sequence, options: Options) -> tuple:
    """(dQ, dK, dV) of one call, and dsinks where there are sinks. To make a record of the tensors takes time on the
    host, so it is made for the first call of a kind alone."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = "backward", options, deterministic, *keys_of((dO, dL, O, L, *tensors))
    call = prepared(key, prepare_any_backward, dO, dL, O, L, tensors, options, deterministic)
    return call(dO, dL, O, L, *tensors)


def prepare_any_backward(
    dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, given: Sequence, options: Options, deterministic: bool
) -> Callable:
    """prepare_backward() for tensors in any strides."""
    tensors = Tensors(*given)
    in_rows = all(x is None or x.is_contiguous() for x in (dL, L))
    if in_rows and not any(map(has_gaps, (dO, dL, O, *tensors))):
        return prepare_backward(dO, O, tensors, options, deterministic)

    def on_copies(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, *given: Any) -> tuple:
        dL = None if dL is None else rows_contiguous(dL).contiguous()
        tensors = Tensors(*map(rows_contiguous, given))
        return backward(rows_contiguous(dO), dL, rows_contiguous(O), L.contiguous(), tensors, options)

    return on_copies


def prepare_backward(dO: Tensor, O: Tensor, tensors: Tensors, options: Options, deterministic: bool) -> Callable:
    """What computes the gradients for calls of one kind, given (dO, dL, O, L) and then their tensors."""
    q, k, v, key_lengths, _, sinks, cu_seqlens_q, _ = tensors
    hopper = hopper_backward(q.device) if for_hopper(options, sinks) else None
    own = None
    if hopper is not None and hopper.enough_work(q, k):
        own = hopper.prepare(dO, q, k, v, O, options, key_lengths, deterministic, sequences(cu_seqlens_q))
    if own is None:
        return prepare_portable_backward(dO, O, tensors, options)

    def last(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, *given: Any) -> Callable:
        return prepare_portable_backward(dO, O, Tensors(*given), options)

    return served(
        "Hopper's backward",
        lambda dO, dL, O, L, q, k, v, lengths, _, __, cu_seqlens_q, cu_seqlens_k: own(
            dO, q, k, v, O, L, dL, lengths, cu_seqlens_q, cu_seqlens_k
        ),
        last,
    )


def prepare_portable_backward(dO: Tensor, O: Tensor, tensors: Tensors, options: Options) -> Callable:
    """The portable backward for calls of one kind."""
    q, k, v, *_, cu_seqlens_q, _ = tensors
    own = portable_backward.prepare(dO, q, k, v, O, options, sequences=sequences(cu_seqlens_q))

    def portables(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, q: Any, k: Any, v: Any, *others: Any) -> tuple:
        return own(dO, q, k, v, O, L, dL, *others)

    return served("the portable backward", portables)


# Who can ------------------------------------------------------------------------------------------------------


def sequences(cu_seqlens_q: Tensor | None) -> int | None:
    """How many packed sequences there are; None where tensors are not packed."""
    return None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def for_hopper(options: Options, sinks: Tensor | None) -> bool:
    """Whether Hopper's own kernels compute such calls: without dropout, softcap and sinks, if not asked otherwise."""
    return not (options.dropout_p or options.portable) and options.softcap is sinks is None


def hopper_forward(device: torch.device) -> ModuleType | None:
    """Hopper's forward, on such a GPU and with a Triton whose Gluon has what it needs; else None."""
    return prepared(("Hopper's kernels", device), hopper_kernels, device)[0]


def hopper_backward(device: torch.device) -> ModuleType | None:
    """Hopper's backward, where there is its forward; else None."""
    return prepared(("Hopper's kernels", device), hopper_kernels, device)[1]


def hopper_kernels(device: torch.device) -> tuple[ModuleType | None, ModuleType | None]:
    """Hopper's forward and backward; None for what this GPU or this Triton does not have. The interpreter runs none."""
    if device.type != "cuda" or torch.version.hip or interpreter.switched_on():
        return None, None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None, None
    try:
        from fa2_lab.kernels.hopper.forward import launch as forward
    except (ImportError, AttributeError) as error:
        warn_once("Hopper's forward", error)
        return None, None
    try:
        from fa2_lab.kernels.hopper.backward import launch as backward
    except (ImportError, AttributeError) as error:
        warn_once("Hopper's backward", error)
        return forward, None
    return forward, backward


# Kernels that this Triton cannot compile ------------------------------------------------------------------------

ADVICE = "`python -m fa2_lab doctor` says which versions were tested"
WARNED: set[str] = set()  # the kernels of which it has been said


def served(name: str, own: Callable, otherwise: Callable[..., Callable] | None = None) -> Callable:
    """`own`, and in its place what otherwise(*tensors) prepares, once: for a call that it declines by None, and for all
    from then on if Triton cannot compile it. Where there is nothing else, that is an error."""
    works, instead = True, None

    def call(*tensors: Any) -> Any:
        nonlocal works, instead
        if works or otherwise is None:
            try:
                found = own(*tensors)
                if found is not None or otherwise is None:
                    return found
            except Exception as error:
                if not is_a_compiler_s(error):
                    raise
                if otherwise is None:
                    raise RuntimeError(f"fa2_lab: {refused(name, error)}; {ADVICE}") from error
                works = False
                warn_once(name, error)
        instead = instead or otherwise(*tensors)
        return instead(*tensors)

    return call


def is_a_compiler_s(error: Exception) -> bool:
    """Whether Triton could not compile a kernel; not whether a call or the GPU is at fault.

    Triton mostly says so by a type of its own. Else it is whatever its compiler raises, such as a RuntimeError for code
    that its own verifier refuses, or what its launcher says of an option that it does not know. The compiler also loads
    the kernel, and what CUDA says there is no compiler's error.
    """
    if isinstance(error, TritonError):
        return type(error).__name__ != "InterpreterError"
    modules, trace = [], error.__traceback__
    while trace is not None:
        modules.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    if modules[-1] == "triton.runtime.jit":
        return isinstance(error, (KeyError, TypeError))
    compiling = any(module.startswith("triton.compiler.") for module in modules)
    return compiling and not isinstance(error, torch.AcceleratorError) and "Triton Error" not in str(error)


def refused(name: str, error: Exception) -> str:
    """What is wrong, in one line."""
    lines = (getattr(error, "error_message", None) or str(error)).strip().splitlines()
    return f"Triton {triton.__version__} cannot compile {name} ({': '.join([type(error).__name__, *lines[:1]])})"


def warn_once(name: str, error: Exception) -> None:
    """Say for each kernel once that the portable ones take its place."""
    if name in WARNED:
        return
    WARNED.add(name)
    instead = "the portable kernels take its place, which are right and slower"
    warnings.warn(f"fa2_lab: {refused(name, error)}: {instead}; {ADVICE}", RuntimeWarning, stacklevel=2)
