"""The kernels as torch sees them: an autograd function in eager mode, and custom operators while torch traces a call.

torch traces calls under torch.compile and torch.export, and calls on fake tensors. A call's tensors are passed in one
record, Tensors, and its other arguments in another, Options. A custom operator takes the fields of both records as
separate arguments. Options.reference selects the NumPy reference instead of the kernels.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, cast, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2_lab.api import bias, reference
from fa2_lab.api.checks import GRADIENT_ADVICE, check_transforms, is_traced, with_positive_scale
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.cache import keep_prepared
from fa2_lab.kernels.contiguous import contiguous_like, rows_contiguous

# The kernels ----------------------------------------------------------------------------------------------------


@cache
def dispatch_module() -> ModuleType:
    """Import and return kernels.dispatch, the module that chooses the kernels.

    No other function imports kernels.dispatch, because that module needs Triton.
    """
    from fa2_lab.kernels import dispatch

    return dispatch


def forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (O, L) with the kernels, or with the NumPy reference if options.reference is set."""
    return reference.forward(tensors, options) if options.reference else dispatch_module().forward(tensors, options)


def backward(dO: Tensor | None, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors, options: Options) -> tuple:
    """Return (dQ, dK, dV), plus dsinks if the call has sinks."""
    dO = torch.zeros_like(O) if dO is None else dO
    run = reference.backward if options.reference else dispatch_module().backward
    return run(dO, dL, O, L, tensors, options)


# Eager mode -----------------------------------------------------------------------------------------------------


def run_checked(
    key: tuple | None, tensors: Tensors, options: Options, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute and return O, or (O, L) if return_lse is set, for a call that has passed all checks.

    If `key` is not None, store the prepared kernels in the table of prepared calls under this key.
    """
    q, options = with_positive_scale(tensors.q, tensors.sinks, options)
    q_unchanged = q is tensors.q
    tensors = tensors._replace(q=q)
    if is_traced(tensors.q, tensors.k, tensors.v):
        O, L = torch.ops.fa2_lab.forward(*tensors, *to_op_args(options))
        return (O, L) if return_lse else O
    if key is None or not q_unchanged:  # a prepared call would pass q unchanged, so do not keep this one
        return PreparedCall(partial(forward, options=options), options, return_lse)(tensors)
    run = (
        partial(reference.forward, options=options)
        if options.reference
        else dispatch_module().prepare_forward(tensors, options)
    )
    return keep_prepared(key, PreparedCall(run, options, return_lse))(tensors)


class PreparedCall(NamedTuple):
    """A call whose arguments have passed all checks and whose kernels are ready to launch.

    Calling it returns O, or (O, L) if return_lse is set. The tensors passed must have the same cache key (see
    api/options.py) as those that were checked.
    """

    forward: Callable
    options: Options
    return_lse: bool

    def __call__(self, tensors: Tensors) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
        needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
        needs_grad = needs_grad or (sinks is not None and sinks.requires_grad)
        if (needs_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:  # jvp() rejects tangents
            return Attention.apply(q, k, v, sinks, (self, tensors))
        O, L = self.forward(tensors)
        return (O, L) if self.return_lse else O


class Attention(torch.autograd.Function):
    """The autograd function for calls in eager mode that need gradients.

    An autograd function written in Python needs only a third of a custom operator's host time. Every further argument
    adds to this time, so the PreparedCall and its Tensors are passed as one argument.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call_and_tensors: tuple[PreparedCall, Tensors]
    ) -> Tensor | tuple[Tensor, Tensor]:
        call, tensors = call_and_tensors
        O, L = call.forward(tensors)
        save_for_backward(ctx, O, L, tensors, call.options)
        return (O, L) if call.return_lse else O

    @staticmethod
    def backward(ctx: Any, dO: Tensor | None, dL: Tensor | None = None) -> tuple:
        return *saved_backward(ctx, dO, dL), None

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise NotImplementedError(f"fa2_lab.attention: forward mode AD is not supported; {GRADIENT_ADVICE}")


def save_for_backward(ctx: Any, O: Tensor, L: Tensor, tensors: Tensors, options: Options) -> None:
    """Save O, L, the input tensors and the options in `ctx` for the backward pass."""
    ctx.options = options
    ctx.save_for_backward(O, L, *tensors)
    ctx.set_materialize_grads(value=False)


def saved_backward(ctx: Any, dO: Tensor | None, dL: Tensor | None) -> Sequence[Tensor | None]:
    """Return (dQ, dK, dV, dsinks). dsinks is None if the call has no sinks.

    In eager mode, the kernels are called directly. During tracing, or if the gradients themselves need gradients, the
    custom operator fa2_lab::backward, which rejects second derivatives, is called instead.
    """
    check_transforms(dO, dL)
    if dO is None and dL is None:
        return (None,) * 4
    if torch.is_grad_enabled() or is_traced(dO, dL):
        gradients = torch.ops.fa2_lab.backward(dO, dL, *ctx.saved_tensors, *to_op_args(ctx.options))
    else:
        O, L, *tensors = ctx.saved_tensors
        gradients = backward(dO, dL, O, L, Tensors(*tensors), ctx.options)
    return gradients if len(gradients) == 4 else (*gradients, None)


# While torch traces a call --------------------------------------------------------------------------------------

TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "int", float: "float"}
TYPES |= {int | None: "int?", float | None: "float?"}
OP_OPTIONS = [name for name in Options._fields if name != "bias"]  # the options that a custom operator takes


def schema() -> str:
    """Return a custom operator's argument list: all fields of Tensors, then all fields of Options except the bias."""
    defaults = {name: f"={value}" for name, value in Options._field_defaults.items()}
    fields = [f"{TYPES[hint]} {name}" for name, hint in get_type_hints(Tensors).items()]
    types = get_type_hints(Options)
    fields += [f"{TYPES[types[name]]} {name}{defaults.get(name, '')}" for name in OP_OPTIONS]
    return ", ".join(fields)


def to_op_args(options: Options) -> Sequence:
    """Return the fields of `options` in the order of a custom operator's arguments.

    The field `in_custom_op` is set to True. Raise an error if there is a bias, because a custom operator cannot take a
    function as an argument.
    """
    if options.bias is not None:
        raise ValueError(bias.NOT_TRACEABLE)
    fields = options._replace(in_custom_op=True)._asdict()
    return [fields[name] for name in OP_OPTIONS]


def from_op_args(args: Sequence) -> tuple[Tensors, Options]:
    """Return the records Tensors and Options, built from a custom operator's arguments.

    `args` may be incomplete, because torch omits trailing arguments with default values.
    """
    n_tensors = len(Tensors._fields)
    return Tensors(*args[:n_tensors]), Options(**dict(zip(OP_OPTIONS, args[n_tensors:], strict=False)))


@torch.library.custom_op("fa2_lab::forward", mutates_args=(), schema=f"({schema()}) -> (Tensor, Tensor)")
def forward_op(*args: Any) -> tuple[Tensor, Tensor]:
    return forward(*from_op_args(args))


@forward_op.register_fake
def forward_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, _ = from_op_args(args)
    q = tensors.q
    rows = q.shape[:3] if tensors.cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return contiguous_like(rows_contiguous(q)), q.new_empty(rows, dtype=torch.float32)


BACKWARD = f"(Tensor? dO, Tensor? dL, Tensor O, Tensor L, {schema()}) -> Tensor[]"


@torch.library.custom_op("fa2_lab::backward", mutates_args=(), schema=BACKWARD)
def backward_op(dO: Tensor | None, dL: Tensor | None, O: Tensor, L: Tensor, *args: Any) -> list[Tensor]:
    return list(backward(dO, dL, O, L, *from_op_args(args)))


@backward_op.register_fake
def backward_shapes(dO: Tensor | None, dL: Tensor | None, O: Tensor, L: Tensor, *args: Any) -> list[Tensor]:
    tensors, _ = from_op_args(args)
    gradients = [contiguous_like(rows_contiguous(x)) for x in (tensors.q, tensors.k, tensors.v)]
    return gradients if tensors.sinks is None else [*gradients, tensors.sinks.new_empty(tensors.sinks.shape)]


def save_operator(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs and outputs of the operator fa2_lab::forward in `ctx` for operator_gradients()."""
    save_for_backward(ctx, *output, *from_op_args(inputs))


def operator_gradients(ctx: Any, dO: Tensor | None, dL: Tensor | None) -> tuple:
    """Return the gradient of each argument of the custom operator fa2_lab::forward."""
    dQ, dK, dV, dsinks = cast(tuple[Tensor, ...], saved_backward(ctx, dO, dL))
    return *Tensors(dQ, dK, dV, sinks=dsinks), *[None] * len(OP_OPTIONS)


def no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError("fa2_lab.attention: there is no second derivative, because its backward pass is a kernel")


forward_op.register_autograd(operator_gradients, setup_context=save_operator)
backward_op.register_autograd(no_second_derivative)
