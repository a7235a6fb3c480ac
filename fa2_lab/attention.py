"""The public call: checks its arguments, picks a kernel, carries the gradient.

How it differs from torch.nn.functional.scaled_dot_product_attention:

    torch                        here
    is_causal, top left          causal, bottom right: row r sees columns c ≤ r + N_k − N_q; the same where N_q = N_k
    enable_gqa=True              nothing to say: k and v may have fewer heads, if their number divides q's
    attn_mask                    key_lengths (batch,): keys from there on are padding; window=(left, right) around the
                                 diagonal; other masks are not taken
    no such things               softcap, sinks
    rows that see no key: NaN    O = 0, L = −inf, gradients 0
    d of v may differ            q, k and v share one d, from 1 to 256
    fp32 may use TF32            fp32 is computed as IEEE fp32
    dropout from a global state  dropout from (seed, batch, head, row, column); seed=None draws a new seed
    no logsumexp                 return_lse=True gives (O, L), L in fp32, and gradients flow through both
    autocast casts q, k and v    q, k and v are taken as they are
    gradients' last bits vary    only on Hopper, and not under torch.use_deterministic_algorithms(True)

Where |scores| pass about 10⁶, L in fp32 is too coarse to find P again: O stays right, gradients are not to be trusted.
"""

from __future__ import annotations

import math
from functools import partial
from numbers import Integral, Real

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fa2_lab.kernels import interpreter
from fa2_lab.kernels.prepared import PREPARED, Options, keep, remember_seen, was_seen

interpreter.decide(torch.cuda.is_available())

BACKENDS = ("auto", "triton", "reference")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
PLAIN = (Tensor, torch.nn.Parameter)
STRIDED = torch.strided
REAL = (float, Real)  # the usual case first: the other takes longer to look at
LARGEST_SCALE = 1e38  # times log₂e it still is a number in fp32
SMALLEST_SCALE = 1e-30  # what is divided by it still is one


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """O = softmax(scale · q kᵀ) v for q (batch, heads, N_q, d) and k, v (batch, kv heads, N_k, d), fp16, bf16 or fp32.

    window       (left, right): row r sees columns r + N_k − N_q − left … r + N_k − N_q + right; None is unbounded, and
                 causal means right = 0
    softcap      c: scores become c · tanh(scores / c) after the scale
    sinks        floats (heads,): one more score in every row of a head, without a key or a value, neither scaled,
                 capped nor masked; gradients flow to it
    scale        None means 1/√d
    key_lengths  integers (batch,), from 0 to N_k. On a GPU their range is looked up once per tensor and version, which
                 waits for the GPU; in a CUDA graph or a compiled function it is not, and a length outside is clamped.
                 The diagonal stays where N_k puts it
    dropout_p    probability of a zero in P; seed: from 0 to 2⁶⁴ − 1
    return_lse   (O, L) with L (batch, heads, N_q), the logarithm of each row's sum of exponentials with its sink
    backend      "triton"; "reference", the NumPy ladder in float64; "auto", the first that can run on these tensors

    On Hopper, calls with a window, a softcap, sinks or dropout run on the portable kernels, the others on its own.
    """
    key, call = None, None
    if seed is None and not torch.compiler.is_compiling():
        asked = causal, window, softcap, scale, dropout_p, return_lse, backend
        key, call = recall(q, k, v, key_lengths, sinks, *asked)
    if call is not None:  # one of its kind has passed all checks but this one
        if key_lengths is not None:
            check_range(key_lengths, k.shape[2])
        return call(q, k, v, key_lengths, seed_tensor(seed, q.device) if dropout_p else None, sinks)
    check_tensors(q, k, v)
    scale = check_numbers(causal, scale, q.shape[3], return_lse)
    dropout_p, seed = check_dropout(dropout_p, seed)
    if key_lengths is not None:
        check_lengths(key_lengths, q, k.shape[2])
    options = check_masks(causal, window, softcap, sinks, q, k.shape[2])._replace(scale=scale, dropout_p=dropout_p)
    given = q
    q, options = with_positive_scale(q, options)
    if not runs_on_triton(backend, "cuda" if q.is_cuda else q.device.type):
        O, L = Reference.apply(q, k, v, key_lengths, seed, sinks, options)
        return (O, L) if return_lse else O
    q, options = for_kernels(q, sinks, options)
    seed = seed_tensor(seed, q.device) if dropout_p else None
    if traced(q, k, v):
        O, L = torch.ops.fa2_lab.forward(q, k, v, key_lengths, seed, sinks, *options)
        return (O, L) if return_lse else O
    call = Call(q, k, v, key_lengths, sinks, options, return_lse)
    if key is not None and q is given:  # what is prepared takes q as it comes
        keep(key, call)
    return call(q, k, v, key_lengths, seed, sinks)


def recall(q, k, v, key_lengths, sinks, causal, window, softcap, scale, dropout_p, return_lse, backend) -> tuple:
    """The kind of a call, and what was prepared for it; None in their place where there is none."""
    try:
        key = (
            *(seen_in(q), seen_in(k), seen_in(v), None if key_lengths is None else seen_in(key_lengths)),
            None if sinks is None else seen_in(sinks),
            *(causal, softcap, scale, dropout_p, return_lse, backend),
            *(type(causal), type(softcap), type(scale), type(dropout_p), type(return_lse)),  # for True == 1 == 1.0
            None if window is None else (*window, *map(type, window)),
            is_in_torch_dispatch_mode(),
        )
        return key, PREPARED.get(key)
    except (AttributeError, RuntimeError, TypeError):  # something else than it should be: the checks will say so
        return None, None


def seen_in(x: Tensor) -> tuple:
    """A tensor's type, layout, dtype, device, shape and strides: what checks and the choice of a kernel look at."""
    return type(x), x.layout, x.dtype, x.device, x.shape, x.stride()


# Checks -------------------------------------------------------------------------------------------------------


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k, v of wrong kind or shapes that do not go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; it takes a torch.Tensor")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}; it takes float16, bfloat16 or float32")
        if x.dim() != 4 or x.layout != STRIDED:
            raise ValueError(f"{name}: got {described(x)}; it takes (batch, heads, N, d)")
    (batch, heads, _, d), (kv_batch, kv_heads, _, kv_d) = q.shape, k.shape
    if q.numel() == 0 or d > 256:
        raise ValueError(f"q: got {described(q)}; it takes (batch, heads, N, d), each at least 1 and d at most 256")
    if kv_batch != batch or kv_d != d or k.numel() == 0:
        raise ValueError(f"k: got {described(k)}; with q {tuple(q.shape)} it takes ({batch}, kv heads, N_k, {d})")
    if heads % kv_heads:
        raise ValueError(f"k: got {kv_heads} heads; with {heads} heads of q it takes a number that divides {heads}")
    if v.shape != k.shape:
        raise ValueError(f"v: got {described(v)}; it takes k's shape, {tuple(k.shape)}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise TypeError(f"{name}: got {x.dtype}; it takes q's dtype, {q.dtype}")
            if x.device != q.device:
                raise ValueError(f"{name}: got a tensor on {x.device}; it takes q's device, {q.device}")


def described(x: Tensor) -> str:
    """A tensor's shape in words, or its layout where it is no ordinary tensor."""
    return f"shape {tuple(x.shape)}" if x.layout == torch.strided else f"a tensor with layout {x.layout}"


def check_numbers(causal, scale, d: int, return_lse) -> float:
    """Refuse switches that are none, and a scale that makes no sense; returns the scale to use."""
    for name, x in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(x, bool):
            raise TypeError(f"{name}: got {x!r}; it takes True or False")
    if scale is None:
        return 1 / math.sqrt(d)
    if isinstance(scale, bool) or not isinstance(scale, REAL):
        raise TypeError(f"scale: got {scale!r}; it takes a number, or None for 1/√d")
    try:
        found = float(scale)
    except OverflowError:
        raise ValueError("scale: got more than a float can hold; it takes a finite number, or None for 1/√d") from None
    if not math.isfinite(found):
        raise ValueError(f"scale: got {scale}; it takes a finite number, or None for 1/√d")
    return found


def with_positive_scale(q: Tensor, options: Options) -> tuple[Tensor, Options]:
    """q and options with a scale of 0 or more: the kernels find the largest score before they scale it."""
    return (-q, options._replace(scale=-options.scale)) if options.scale < 0 else (q, options)


def for_kernels(q: Tensor, sinks: Tensor | None, options: Options) -> tuple[Tensor, Options]:
    """q and options as the kernels take them: a tiny scale is taken into q, because they divide sinks by it."""
    check_scale(options.scale)
    if sinks is not None and options.scale < SMALLEST_SCALE:
        return q * options.scale, options._replace(scale=1.0)
    return q, options


def check_scale(scale: float) -> None:
    """Refuse a scale that the kernels, which compute in fp32, would take for infinite."""
    if scale > LARGEST_SCALE:
        raise ValueError(f"scale: got {scale:g}; it takes at most 1e38 in size; backend='reference' takes every float")


def check_dropout(dropout_p, seed) -> tuple[float, int | None]:
    """Refuse a probability or a seed that makes no sense; returns both as Python's own numbers."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, REAL):
        raise TypeError(f"dropout_p: got {dropout_p!r}; it takes a probability, 0 ≤ p < 1")
    if not (0 <= dropout_p < 1 and float(dropout_p) < 1):
        raise ValueError(f"dropout_p: got {dropout_p}; it takes a probability, 0 ≤ p < 1")
    if seed is None:
        return float(dropout_p), None
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed: got {seed!r}; it takes a whole number from 0 to 2**64 - 1, or None")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed}; it takes a whole number from 0 to 2**64 - 1, or None")
    return float(dropout_p), int(seed)


def check_lengths(key_lengths: Tensor, q: Tensor, N_k: int) -> None:
    """Refuse lengths of wrong kind, shape or range."""
    if not isinstance(key_lengths, Tensor):
        raise TypeError(f"key_lengths: got {type(key_lengths).__name__}; it takes an integer tensor (batch,)")
    if key_lengths.dtype not in INTEGERS:
        wants = " that requires a gradient" if key_lengths.requires_grad else ""
        raise TypeError(f"key_lengths: got {key_lengths.dtype}{wants}; it takes an integer tensor (batch,)")
    if key_lengths.shape != q.shape[:1]:
        raise ValueError(f"key_lengths: got shape {tuple(key_lengths.shape)}; it takes (batch,) = ({q.shape[0]},)")
    if key_lengths.device != q.device:
        raise ValueError(f"key_lengths: got a tensor on {key_lengths.device}; it takes q's device, {q.device}")
    check_range(key_lengths, N_k)


def check_masks(causal: bool, window, softcap, sinks, q: Tensor, N_k: int) -> Options:
    """Refuse a window, a softcap or sinks that make no sense; returns what of them is more than the causal mask.

    A bound that no row reaches is none, and right = 0 is the causal mask.
    """
    left, right = check_window(window)
    if left is not None and left >= N_k - 1:
        left = None
    if causal or (right is not None and right >= q.shape[2] - 1):
        right = None
    if right == 0:
        causal, right = True, None
    if softcap is not None:
        softcap = check_softcap(softcap)
    if sinks is not None:
        check_sinks(sinks, q)
    return Options(causal, 1.0, left=left, right=right, softcap=softcap)


def check_window(window) -> tuple[int | None, int | None]:
    """Refuse a window that is none; returns its two sizes."""
    takes = "it takes (left, right), each a whole number of at least 0 or None for unbounded"
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: got {window!r}; {takes}")
    if len(window) != 2:
        raise ValueError(f"window: got {window}; {takes}")
    for size in window:
        if size is not None and (isinstance(size, bool) or not isinstance(size, Integral)):
            raise TypeError(f"window: got {window}; {takes}")
        if size is not None and size < 0:
            raise ValueError(f"window: got {window}; {takes}")
    return tuple(None if size is None else int(size) for size in window)


def check_softcap(softcap) -> float:
    """Refuse a softcap that makes no sense, or that fp32, in which the kernels compute, takes for 0 or infinite."""
    takes = "it takes a number from 1e-30 to 1e30, or None"
    if isinstance(softcap, bool) or not isinstance(softcap, REAL):
        raise TypeError(f"softcap: got {softcap!r}; {takes}")
    if not 1e-30 <= softcap <= 1e30:
        raise ValueError(f"softcap: got {softcap}; {takes}")
    return float(softcap)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuse sinks of wrong kind or shape."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks: got {type(sinks).__name__}; it takes a tensor (heads,)")
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks: got {sinks.dtype}; it takes float16, bfloat16 or float32")
    if sinks.shape != q.shape[1:2] or sinks.layout != STRIDED:
        raise ValueError(f"sinks: got {described(sinks)}; it takes (heads,) = ({q.shape[1]},)")
    if sinks.device != q.device:
        raise ValueError(f"sinks: got a tensor on {sinks.device}; it takes q's device, {q.device}")


def check_range(key_lengths: Tensor, N_k: int) -> None:
    """Refuse lengths out of range, where it can be known before the launch."""
    if traced(key_lengths) or (key_lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if not was_seen(key_lengths, (N_k,)):
        low, high = torch.stack(torch.aminmax(key_lengths)).tolist()
        if low < 0 or high > N_k:
            raise ValueError(f"key_lengths: got values from {low} to {high}; it takes 0 to N_k = {N_k}")
        remember_seen(key_lengths, (N_k,))


# Who computes -------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def runs_on_triton(backend: str, device: str) -> bool:
    """Whether the kernels do it for tensors on such a device; an error where they are asked for and cannot."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}; it takes one of {', '.join(BACKENDS)}")
    if backend == "reference" or (device in ("cuda", "meta") and interpreter.installed()):
        return backend != "reference"
    must = backend == "triton"
    if not interpreter.installed():
        why = "Triton is not installed here (it exists for Linux only)"
    elif device != "cpu" or (torch.cuda.is_available() and not interpreter.switched_on()):
        why = f"q is on {device}, and the Triton kernels run on this machine's GPU"
    elif not interpreter.switched_on():
        why = "Triton came before fa2_lab, so its interpreter is off: import fa2_lab first or set TRITON_INTERPRET=1"
    else:
        why = interpreter.misfit()
        must = bool(why)
    if why and must:
        raise RuntimeError(f"fa2_lab.attention: {why}; backend='reference' runs everywhere")
    return not why


def traced(*tensors: Tensor) -> bool:
    """Whether torch is recording rather than computing, and must see an operator."""
    for x in tensors:
        if type(x) not in PLAIN or x.is_meta:
            return True
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    """The seed on the device, without waiting for it; None draws from torch's generator there, also in a CUDA graph."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)


# The kernels, as torch sees them --------------------------------------------------------------------------------


def kernels():
    """The choice among the kernels; imported only now, because it needs Triton."""
    from fa2_lab.kernels import choice

    return choice


def forward(q, k, v, key_lengths, seed, sinks, options):
    """(O, L) by the kernel that fits; tensors are copied only where their last dimension is not contiguous."""
    q, k, v = map(rows_contiguous, (q, k, v))
    return kernels().forward(q, k, v, options, contiguous(key_lengths), seed, contiguous(sinks))


def backward(dO, dL, q, k, v, O, L, key_lengths, seed, sinks, options):
    """(dQ, dK, dV) by the kernels that fit, and dsinks where there are sinks; either of dO and dL may be None."""
    dO = torch.zeros_like(O) if dO is None else rows_contiguous(dO)
    q, k, v = map(rows_contiguous, (q, k, v))
    more = contiguous(key_lengths), seed, contiguous(sinks)
    return kernels().backward(dO, q, k, v, O, L, options, contiguous(dL), *more)


def contiguous(x: Tensor | None) -> Tensor | None:
    """x, copied where it is not contiguous."""
    return None if x is None else x.contiguous()


def rows_contiguous(x: Tensor) -> Tensor:
    """x, copied where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Call:
    """The eager way, for calls of one kind: their checks are passed and their kernels prepared."""

    def __init__(self, q, k, v, key_lengths, sinks, options, return_lse):
        self.options, self.return_lse = options, return_lse
        dense = all(x is None or x.is_contiguous() for x in (key_lengths, sinks))
        if dense and all(x.stride(-1) == 1 for x in (q, k, v)):
            self.forward = kernels().prepare(q, k, v, options, key_lengths, sinks)
        else:
            self.forward = partial(forward, options=options)

    def __call__(self, q, k, v, key_lengths, seed, sinks):
        wanted = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        if wanted and torch.is_grad_enabled():
            return Attention.apply(q, k, v, key_lengths, seed, sinks, self)
        O, L = self.forward(q, k, v, key_lengths, seed, sinks)
        return (O, L) if self.return_lse else O


class Attention(torch.autograd.Function):
    """The eager way with gradients: a Python function costs a third of an operator, and O alone less than O and L."""

    @staticmethod
    def forward(ctx, q, k, v, key_lengths, seed, sinks, call):
        O, L = call.forward(q, k, v, key_lengths, seed, sinks)
        save(ctx, (q, k, v, key_lengths, seed, sinks, *call.options), (O, L))
        return (O, L) if call.return_lse else O

    @staticmethod
    def backward(ctx, dO, dL=None):
        return gradients(ctx, dO, dL)[:7]


def save(ctx, inputs, output) -> None:
    """Keep what the backward needs: the inputs, O and L, and nothing of size N²."""
    q, k, v, key_lengths, seed, sinks, *options = inputs
    ctx.options = Options(*options)
    ctx.save_for_backward(q, k, v, *output, key_lengths, seed, sinks)
    ctx.set_materialize_grads(False)


def gradients(ctx, dO, dL):
    """Gradients of every input of the forward; as an operator where somebody records, to refuse a second derivative."""
    options = (None,) * len(ctx.options)
    if dO is None and dL is None:
        return *(None,) * 6, *options
    if torch.is_grad_enabled() or traced(*[x for x in (dO, dL) if x is not None]):
        found = torch.ops.fa2_lab.backward(dO, dL, *ctx.saved_tensors, *ctx.options)
    else:
        found = backward(dO, dL, *ctx.saved_tensors, ctx.options)
    dQ, dK, dV, dsinks = (*found, None)[:4]
    return dQ, dK, dV, None, None, dsinks, *options


@torch.library.custom_op("fa2_lab::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, key_lengths, seed, sinks, Options(causal, scale, dropout_p, left, right, softcap))


@forward_op.register_fake
def forward_shapes(q, k, v, *rest):
    return torch.empty_like(rows_contiguous(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    causal: bool,
    scale: float,
    dropout_p: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:
    options = Options(causal, scale, dropout_p, left, right, softcap)
    return list(backward(dO, dL, q, k, v, O, L, key_lengths, seed, sinks, options))


@backward_op.register_fake
def backward_shapes(dO, dL, q, k, v, O, L, key_lengths, seed, sinks, *options):
    found = [torch.empty_like(rows_contiguous(x)) for x in (q, k, v)]
    return found if sinks is None else [*found, sinks.new_empty(sinks.shape)]


def no_second_derivative(ctx, *_):
    raise NotImplementedError("fa2_lab.attention: there is no second derivative, its gradient cannot be differentiated")


forward_op.register_autograd(gradients, setup_context=save)
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
