"""How torch sees the kernels: an autograd function where it computes at once, an operator where it records.

Tensors come in one order: q, k, v, then those that a call may lack, key_lengths, seed, sinks, and of packed sequences
cu_q, cu_k. Behind them, or as one Options, comes what is no tensor. The NumPy reference has the same signature.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from fa2_lab.api.checks import for_kernels, traced
from fa2_lab.kernels.prepared import Options, keep, rows_contiguous

# The kernels ----------------------------------------------------------------------------------------------------


@cache
def kernels():
    """The choice among the kernels; imported only now, because it needs Triton."""
    from fa2_lab.kernels import choice

    return choice


def forward(q, k, v, key_lengths=None, seed=None, sinks=None, cu_q=None, cu_k=None, *, options):
    """(O, L) by the kernel that fits."""
    return kernels().forward(q, k, v, options, key_lengths, seed, sinks, cu_q, cu_k)


def backward(dO, dL, q, k, v, O, L, key_lengths=None, seed=None, sinks=None, cu_q=None, cu_k=None, *, options):
    """(dQ, dK, dV) by the kernels that fit, and dsinks where there are sinks; either of dO and dL may be None."""
    dO = torch.zeros_like(O) if dO is None else dO
    return kernels().backward(dO, q, k, v, O, L, options, dL, key_lengths, seed, sinks, cu_q, cu_k)


# Computed at once -----------------------------------------------------------------------------------------------


def compute(
    kind, options: Options, return_lse: bool, q, k, v, key_lengths=None, seed=None, sinks=None, cu_q=None, cu_k=None
):
    """O, or (O, L), of a call that has passed all checks; what is prepared for its kind, if it has one, is kept."""
    given = q
    q, options = for_kernels(q, sinks, options)
    tensors = q, k, v, key_lengths, seed, sinks, cu_q, cu_k
    if traced(q, k, v):
        O, L = torch.ops.fa2_lab.forward(*tensors, *options)
        return (O, L) if return_lse else O
    call = Call(options, return_lse, *tensors)
    if kind is not None and q is given:  # what is prepared takes q as it comes
        keep(kind, call)
    return call(*tensors)


class Call:
    """Calls of one kind: their checks are passed and their kernels prepared."""

    def __init__(self, options: Options, return_lse: bool, q, k, v, key_lengths, seed, sinks, cu_q, cu_k):
        self.options, self.return_lse = options, return_lse
        self.forward = kernels().prepare_any(q, k, v, options, key_lengths, sinks, cu_q, cu_k)

    def __call__(self, q, k, v, key_lengths=None, seed=None, sinks=None, cu_q=None, cu_k=None):
        wanted = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        if (wanted and torch.is_grad_enabled()) or forward_ad._current_level >= 0:  # a tangent is refused, not lost
            return Attention.apply(q, k, v, sinks, (self, key_lengths, seed, cu_q, cu_k))
        O, L = self.forward(q, k, v, key_lengths, seed, sinks, cu_q, cu_k)
        return (O, L) if self.return_lse else O


class Attention(torch.autograd.Function):
    """A call with gradients. A Python function costs a third of an operator, and each of its arguments counts."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, others):
        call, key_lengths, seed, cu_q, cu_k = others
        O, L = call.forward(q, k, v, key_lengths, seed, sinks, cu_q, cu_k)
        save(ctx, call.options, q, k, v, O, L, key_lengths, seed, sinks, cu_q, cu_k)
        return (O, L) if call.return_lse else O

    @staticmethod
    def backward(ctx, dO, dL=None):
        return *gradients(ctx, dO, dL), None


def save(ctx, options: Options, *tensors) -> None:
    """Keep what the backward needs: the inputs, O and L, and nothing of size N²."""
    ctx.options = options
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def gradients(ctx, dO, dL) -> tuple:
    """(dQ, dK, dV, dsinks); as an operator where somebody records, to refuse a second derivative."""
    if dO is None and dL is None:
        return (None,) * 4
    if torch.is_grad_enabled() or traced(dO, dL):
        found = torch.ops.fa2_lab.backward(dO, dL, *ctx.saved_tensors, *ctx.options)
    else:
        found = backward(dO, dL, *ctx.saved_tensors, options=ctx.options)
    return found if len(found) == 4 else (*found, None)


# Recorded -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fa2_lab::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    portable: bool = False,
) -> tuple[Tensor, Tensor]:
    options = Options(causal, scale, dropout_p, left, right, softcap, portable)
    return forward(q, k, v, key_lengths, seed, sinks, cu_q, cu_k, options=options)


@forward_op.register_fake
def forward_shapes(q, k, v, key_lengths, seed, sinks, cu_q, *rest):
    rows = q.shape[:3] if cu_q is None else (q.shape[1], q.shape[0])
    return torch.empty_like(rows_contiguous(q)), q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("fa2_lab::backward", mutates_args=())
def backward_op(
    dO: Tensor | None,
    dL: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    O: Tensor,
    L: Tensor,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    portable: bool = False,
) -> list[Tensor]:
    options = Options(causal, scale, dropout_p, left, right, softcap, portable)
    return list(backward(dO, dL, q, k, v, O, L, key_lengths, seed, sinks, cu_q, cu_k, options=options))


@backward_op.register_fake
def backward_shapes(dO, dL, q, k, v, O, L, key_lengths, seed, sinks, *rest):
    found = [torch.empty_like(rows_contiguous(x)) for x in (q, k, v)]
    return found if sinks is None else [*found, sinks.new_empty(sinks.shape)]


def save_operator(ctx, inputs, output) -> None:
    """save() for the operator, whose options come one by one."""
    q, k, v, *rest = inputs
    save(ctx, Options(*rest[5:]), q, k, v, *output, *rest[:5])


def operator_gradients(ctx, dO, dL) -> tuple:
    """Gradients of every input of the operator."""
    dQ, dK, dV, dsinks = gradients(ctx, dO, dL)
    return dQ, dK, dV, None, None, dsinks, None, None, *[None] * len(Options._fields)


def no_second_derivative(ctx, *_):
    raise NotImplementedError("fa2_lab.attention: there is no second derivative, its gradient cannot be differentiated")


forward_op.register_autograd(operator_gradients, setup_context=save_operator)
backward_op.register_autograd(no_second_derivative)


# The reference --------------------------------------------------------------------------------------------------


class Reference(torch.autograd.Function):
    """The NumPy ladder's last rung, head by head in float64, with its own backward."""

    @staticmethod
    def forward(ctx, q, k, v, key_lengths, seed, sinks, options):
        from fa2_lab.reference import heads

        if options.dropout_p and seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        ctx.seed, ctx.options = seed, options
        k_, v_ = real_keys(q, k, v, key_lengths, options)
        O, L = heads.forward(*map(to_numpy, (q, k_, v_)), **for_heads(key_lengths, seed, sinks, options))
        O, L = torch.from_numpy(O).to(q), torch.from_numpy(L).to(q.device, torch.float32)
        ctx.save_for_backward(q, k, v, O, L, key_lengths, sinks)
        return O, L

    @staticmethod
    def backward(ctx, dO, dL):
        *saved, sinks = ctx.saved_tensors
        dQ, dK, dV, *dsinks = ReferenceBackward.apply(dO, dL, *saved, ctx.seed, sinks, ctx.options)
        return dQ, dK, dV, None, None, *(dsinks or [None]), None


class ReferenceBackward(torch.autograd.Function):
    """The ladder's backward, as a step of its own, so that a second derivative is refused."""

    @staticmethod
    def forward(ctx, dO, dL, q, k, v, O, L, key_lengths, seed, sinks, options):
        from fa2_lab.reference import heads

        # One more column with dO = 1 and O = −dL makes D = rowsum(dO ∘ O) − dL, which is all that dL changes.
        q_, k_, v_ = (pad(x, (0, 1)) for x in (q, *real_keys(q, k, v, key_lengths, options)))
        O, dO = torch.cat([O.double(), -dL[..., None].double()], 3), pad(dO, (0, 1), value=1.0)
        O, L, dO = map(to_numpy, (O, L, dO))
        more = for_heads(key_lengths, seed, sinks, options)
        found = heads.backward(*map(to_numpy, (q_, k_, v_)), O, L, dO, **more)
        found = tuple(torch.from_numpy(g[..., :-1].copy()).to(q) for g in found)
        if sinks is None:
            return found
        return *found, torch.from_numpy(heads.sinks_backward(to_numpy(sinks), O, L, dO)).to(sinks)

    @staticmethod
    def backward(ctx, *_):
        no_second_derivative(ctx)


def for_heads(key_lengths, seed, sinks, options: Options) -> dict:
    """What the ladder is told, besides arrays of four dimensions."""
    given = dict(causal=options.causal, scale=options.scale, dropout_p=options.dropout_p, seed=seed)
    given["key_lengths"] = None if key_lengths is None else key_lengths.cpu().numpy()
    if options.left is not None or options.right is not None:
        given["window"] = options.left, options.right
    if options.softcap is not None:
        given["softcap"] = options.softcap
    if sinks is not None:
        given["sinks"] = to_numpy(sinks)
    return given


def real_keys(q, k: Tensor, v: Tensor, key_lengths: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """k and v with zeros where nobody sees them: a NaN there would spread, for the ladder multiplies it by P = 0."""
    if key_lengths is None and options.left is None:
        return k, v
    col = torch.arange(k.shape[2], device=k.device)
    padding = col[None, :] < (0 if options.left is None else k.shape[2] - q.shape[2] - options.left)  # (1, N_k)
    if key_lengths is not None:
        padding = padding | (col >= key_lengths[:, None])  # (batch, N_k)
    return tuple(x.masked_fill(padding[:, None, :, None], 0.0) for x in (k, v))


def to_numpy(x: Tensor):
    return x.detach().cpu().double().numpy()
