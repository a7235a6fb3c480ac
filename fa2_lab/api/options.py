"""A call's options as they were passed, the cache key that contains them, and their checks.

Prepared kernels are kept in a cache. A call's cache key consists of the types, dtypes, devices, shapes and strides of
its tensors, and of all fields of its GivenOptions. make_options() computes the kernels' Options from the contents of
this key alone, so an option missing from the key cannot reach a kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fa2_lab.api.bias import bias_key, check_bias
from fa2_lab.api.checks import (
    check_flags,
    check_not_jit_traced,
    check_num_splits,
    check_sinks,
    check_sinks_shape,
    check_softcap,
    check_transforms,
    runs_on_triton,
    scale_or_default,
    simplify_mask,
)
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.cache import PREPARED
from fa2_lab.tiles import real_number


class GivenOptions(NamedTuple):
    """A call's options as they were passed, before any check. No field is a tensor.

    To add an option, append a field here, return it in given_options(), and pass it to Options(...) in make_options().
    find_prepared() relies on `window` and `bias` being the first fields.
    """

    window: tuple[int | None, int | None] | None
    bias: Callable | None
    causal: bool
    softcap: float | None
    scale: float | None
    return_lse: bool
    backend: str
    num_splits: int | None
    dropout_p: float
    dominant_sequence: bool  # whether one sequence accounts for most of the work, according to max_seqlen_q


def given_options(
    *,
    window: tuple[int | None, int | None] | None,
    bias: Callable | None,
    causal: bool,
    softcap: float | None,
    scale: float | None,
    return_lse: bool,
    backend: str,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    dominant_sequence: bool = False,
) -> tuple:
    """Return the fields of GivenOptions as a plain tuple, because building the record would add 1 µs to every call."""
    return window, bias, causal, softcap, scale, return_lse, backend, num_splits, dropout_p, dominant_sequence


def find_prepared(tensors: Tensors, given: tuple) -> tuple[tuple | None, Any]:
    """Return (key, call): this call's key, and the prepared call stored under it, or None if there is none.

    `given` is the result of given_options(). The key contains everything that the checks and the choice of kernels
    depend on. Both results are None while torch traces the call (see is_traced() in checks.py). They are also None if
    an argument is invalid, because the checks will report the error.
    """
    window, bias = given[0], given[1]
    if bias is not None:
        given = window, bias_key(bias), *given[2:]
    if is_compiling() or is_in_torch_dispatch_mode():
        return None, None
    if peek_interpreter_stack() is not None:  # skip this slower check outside torch.func transforms
        check_transforms()
    try:
        typed = given
        if window is not None:
            typed = *window, *given
            if type(window) is list:  # lists are not hashable
                given = tuple(window), *given[1:]
        tensor_keys = [
            None if x is None else (type(x), x.layout, x.dtype, x.device, x.shape, x.stride(), x.is_neg())
            for x in tensors
        ]
        key = *tensor_keys, given, *map(type, typed)  # the key includes types, because True == 1 == 1.0
        call = PREPARED.get(key)
    except (AttributeError, RuntimeError, TypeError):
        return None, None
    if call is None:
        check_not_jit_traced()
    return key, call


def make_options(given: GivenOptions, tensors: Tensors, sizes: tuple[int, int, int]) -> Options:
    """Return the Options of a call whose tensors, except its sinks, have passed their checks.

    Raise an error if an option or the sinks are invalid. `sizes` is (query heads, N_q, N_k).
    """
    q, sinks, (heads, N_q, N_k) = tensors.q, tensors.sinks, sizes
    check_flags(causal=given.causal, return_lse=given.return_lse)
    causal, left, right = simplify_mask(given.causal, given.window, N_q, N_k)
    options = Options(
        *(causal, scale_or_default(given.scale, q.shape[-1])),
        dropout_p=real_number("dropout_p", given.dropout_p, "a probability, 0 ≤ p < 1", lambda p: 0 <= p < 1),
        left=left,
        right=right,
        softcap=check_softcap(given.softcap),
        num_splits=check_num_splits(given.num_splits),
        exclude_hopper=given.backend == "portable",
        dominant_sequence=given.dominant_sequence,
        reference=not runs_on_triton(given.backend, q.device.type),
        bias=given.bias,
    )
    check_bias(given.bias, options.reference)
    if sinks is not None:
        check_sinks_shape(sinks, q, heads)
        check_sinks(sinks, options)
    return options
