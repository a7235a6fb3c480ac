"""How fa2_lab.attention is called: bad input, calls of a known kind, which gradients, the reference behind it."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from attention_cases import kernels, nan_in_empty  # noqa: F401 (fixtures)
from kernel_truth import DEVICE, DTYPES, check_accuracy, dense_truth, largest_error, random_inputs, run_with_gradients
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fa2_lab
from fa2_lab.api import operators
from fa2_lab.api.attention import attention
from fa2_lab.api.options import GivenOptions, find_prepared
from fa2_lab.kernels import cache
from fa2_lab.kernels.arguments import Tensors

attention_module = sys.modules["fa2_lab.api.attention"]


def qkv():
    return [x.detach() for x in random_inputs(2, 4, 2, 8, 12, 16)[:3]]


KEY_LENGTHS = torch.tensor([3, 12], device=DEVICE)


def test_fast_path_is_taken_only_without_autograd_modes_and_subclasses():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            return function(*arguments, **options or {})

    given = Tensors(*qkv()), GivenOptions._make([None] * len(GivenOptions._fields))
    assert find_prepared(*given)[0] is not None
    with Mode():
        assert find_prepared(*given) == (None, None)


@pytest.mark.parametrize("which", "qkv")
def test_tensor_subclasses_go_through_the_custom_operator(which):
    functions, inputs = [], dict(zip("qkv", qkv(), strict=True))

    class Recorded(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            functions.append(str(function))
            return super().__torch_function__(function, types, arguments, options or {})

    want = attention(**inputs)
    inputs[which] = inputs[which].as_subclass(Recorded)
    assert torch.equal(attention(**inputs), want) and "fa2_lab.forward" in functions


def cached_calls():
    """Return the prepared calls of attention() that the cache holds."""
    return [made for made in cache.PREPARED.values() if isinstance(made, operators.PreparedCall)]


STRIDED_KEY_LENGTHS = KEY_LENGTHS.int().repeat_interleave(2)[::2]


@pytest.mark.parametrize("options, entries", [
    (dict(), 2),
    (dict(causal=True, scale=0.7, key_lengths=KEY_LENGTHS), 2),
    (dict(causal=True, key_lengths=STRIDED_KEY_LENGTHS), 2),
    (dict(scale=-0.3), 0),
], ids=("plain", "lengths", "strided lengths", "negative"))  # fmt: skip
@pytest.mark.parametrize("by_columns", (False, True), ids=("rows", "columns"))
def test_cached_calls_return_right_results(options, entries, by_columns, monkeypatch):
    for seed in range(2):
        *inputs, dO = random_inputs(2, 2, 1, 8, 12, 16, seed=seed)
        q, k, v = (x.detach().mT.contiguous().mT if by_columns else x.detach() for x in inputs)
        truth = dense_truth(q, k, v, dO, **{n.removeprefix("key_"): x for n, x in options.items()})
        outputs = attention(q, k, v, **options), *attention(q, k, v, return_lse=True, **options)
        with_gradients = run_with_gradients(attention, *(x.requires_grad_() for x in (q, k, v)), dO, **options)
        for a, b in zip((*outputs, *with_gradients), (truth[0], *truth[:2], *truth), strict=True):
            assert largest_error(a, b) < 1e-5
        assert len(cached_calls()) == entries
        if entries:
            monkeypatch.setattr(attention_module, "check_tensors", None)  # nobody needs it again


@pytest.mark.parametrize("changed", ("q", "k", "v", "key_lengths"))
def test_backward_rejects_inputs_changed_in_place(changed):
    inputs = dict(zip("qkv", qkv(), strict=True)) | dict(key_lengths=KEY_LENGTHS.clone())
    O = attention(**{n: x.requires_grad_() if n in "qkv" else x for n, x in inputs.items()})
    with torch.no_grad():
        inputs[changed].sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        O.sum().backward()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", ""])
def test_gradients_for_some_inputs_only(wanted):
    inputs = dict(zip("qkv", qkv(), strict=True))
    for name in wanted:
        inputs[name].requires_grad_()
    O = attention(**inputs)
    assert O.requires_grad == bool(wanted)
    if wanted:
        O.sum().backward()
    truth = dense_truth(*inputs.values(), torch.ones_like(O))[2:]
    for (name, x), g in zip(inputs.items(), truth, strict=True):
        assert (x.grad is None) if name not in wanted else largest_error(x.grad, g) < 1e-4


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_double_backward_is_refused(backend):
    q, k, v = (x.requires_grad_() for x in qkv())
    (dQ,) = torch.autograd.grad(attention(q, k, v, backend=backend).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dQ.sum().backward()


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_forward_mode_tangents_are_refused(backend):
    q, k, v = qkv()
    attention(q, k, v, backend=backend)  # also where a call of this kind was prepared
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, backend=backend)


def batched_gradients(O, q):
    return torch.autograd.grad(O, q, torch.ones(3, *O.shape, device=DEVICE), is_grads_batched=True)


TRANSFORMS = dict(
    vmap=lambda call, q: torch.vmap(call)(q[None]),
    grad=lambda call, q: torch.func.grad(lambda q: call(q).sum())(q),
    jvp=lambda call, q: torch.func.jvp(call, (q,), (q,)),
    is_grads_batched=lambda call, q: batched_gradients(call(q), q),
    vectorize=lambda call, q: torch.autograd.functional.jacobian(lambda q: call(q).sum(0), q, vectorize=True),
    trace=lambda call, q: torch.jit.trace(call, (q,)),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
def test_torch_func_transforms_are_refused_with_one_line(transform, packed):
    """Also where a call of this kind was prepared; afterwards all is as it was."""
    q = qkv()[0][0].transpose(0, 1).contiguous() if packed else qkv()[0]
    starts = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)

    def call(q):
        return fa2_lab.attention_packed(q, q, q, starts, starts) if packed else attention(q, q, q)

    want = call(q.requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^fa2_lab\.attention: .* not supported; [^\n]*$"):
        TRANSFORMS[transform](call, q)
    assert torch.equal(call(q), want)


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_fully_masked_row_gives_no_nan_gradient_through_L(backend):
    """The gradient of its L² is −∞."""
    q, k, v, _ = random_inputs(1, 2, 1, 6, 3, 16)
    O, L = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    got = torch.autograd.grad(O.sum() + L.square().sum(), (q, k, v))
    dL = torch.where(L.isinf(), 0.0, 2 * L).detach()
    want = dense_truth(q, k, v, torch.ones_like(O), causal=True, dL=dL)[2:]
    assert L.isinf().any() and all(largest_error(a, b) < 1e-4 for a, b in zip(got, want, strict=True))


def test_default_dropout_seeds_use_all_63_bits():
    """A mask that comes again after some thousand steps is no dropout."""
    seeds = [int(attention_module.seed_tensor(None, torch.device(DEVICE))) for _ in range(64)]
    assert all(len({seed >> bit & 1 for seed in seeds}) == 2 for bit in range(63)) and len(set(seeds)) == 64


@pytest.mark.parametrize("expanded", ((1, 1, 1, 16), (2, 1, 8, 1), (1, 4, 1, 1)), ids=str)
def test_backward_accepts_expanded_dO_and_dL(expanded):
    q, k, v, _ = random_inputs(2, 4, 2, 8, 12, 16)
    dO, dL = torch.randn(expanded, device=DEVICE).expand(2, 4, 8, 16), torch.randn(8, device=DEVICE).expand(2, 4, 8)
    got = run_with_gradients(attention, q, k, v, dO, dL, causal=True)
    truth = dense_truth(q, k, v, dO, dL=dL, causal=True)
    assert all(largest_error(a, b) < 1e-4 for a, b in zip(got, truth, strict=True))


def test_backward_accepts_saved_tensors_with_other_strides():
    """Hooks that keep them elsewhere, such as save_on_cpu, give them back contiguous."""
    q, k, v, dO = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in random_inputs(2, 4, 2, 8, 12, 16))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    want = run_with_gradients(attention, *inputs, dO)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda x: x):
        got = run_with_gradients(attention, *inputs, dO)
    assert all(largest_error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "options", [dict(scale=-0.7), dict(causal=True, dropout_p=0.35, seed=5), dict(scale=0.0, key_lengths=KEY_LENGTHS)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backend_reference_matches_the_kernels(options, dtype):
    q, k, v, dO = random_inputs(2, 4, 2, 8, 12, 16, dtype)
    dL = torch.randn(2, 4, 8, device=DEVICE)
    got = run_with_gradients(attention, q, k, v, dO, dL, **options, backend="reference")
    assert got[0].dtype == dtype and got[1].dtype == torch.float32 and got[0].device.type == DEVICE
    names = dict(dropout_p="p", key_lengths="lengths")
    more = {names.get(n, n): x for n, x in options.items()} | dict(dL=dL)
    check_accuracy(got, dense_truth(q, k, v, dO, **more), dense_truth(q, k, v, dO, dtype=dtype, **more))


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("options", [dict(), dict(causal=True, dropout_p=0.3, seed=5)], ids=("plain", "causal"))
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_nan_keys_past_a_key_length_do_not_change_results(bad, options, backend):
    q, k, v, dO = random_inputs(2, 2, 1, 8, 12, 16)
    lengths, dL = torch.tensor([0, 7], device=DEVICE), torch.ones(2, 2, 8, device=DEVICE)
    clean = run_with_gradients(attention, q, k, v, dO, dL, key_lengths=lengths, **options)
    with torch.no_grad():
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:] = v[b, :, n:] = bad
    got = run_with_gradients(attention, q, k, v, dO, dL, key_lengths=lengths, backend=backend, **options)
    assert all(largest_error(a, b) < 1e-5 for a, b in zip(got, clean, strict=True))


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_dL_beyond_the_range_of_fp16_is_not_rounded_to_infinity(backend):
    q, k, v, dO = random_inputs(1, 2, 1, 8, 12, 16, torch.float16)
    dL = torch.full((1, 2, 8), 7e4, device=DEVICE)
    got = run_with_gradients(attention, q, k, v, dO, dL, backend=backend)
    truth = dense_truth(q, k, v, dO, dL=dL)
    fits = [t.abs() < 6e4 for t in truth]
    assert all((torch.isnan(g) <= ~fit).all() for g, fit in zip(got, fits, strict=True))
    for g, t, fit in zip(got, truth, fits, strict=True):
        assert fit.any() and ((g - t).abs() <= 2e-3 * t.abs().max())[fit].all()


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("change", [
    dict(dropout_p=np.float32(0.25)), dict(dropout_p=np.float16(0.25)), dict(dropout_p=np.float64(0.25)),
    dict(dropout_p=Fraction(1, 4)), dict(seed=np.uint64(2**64 - 1)), dict(seed=np.int32(7)),
    dict(scale=np.float32(0.5)), dict(scale=Fraction(1, 2)), dict(scale=2),
], ids=lambda change: "-".join(f"{n}-{type(x).__name__}" for n, x in change.items()))  # fmt: skip
def test_numpy_and_torch_scalars_are_accepted_as_options(change, backend):
    q, k, v, dO = random_inputs(1, 1, 1, 18, 12, 16)
    options = dict(dropout_p=0.25, seed=7, scale=0.5) | change
    plain = {n: int(x) if n == "seed" else float(x) for n, x in options.items()}
    got = run_with_gradients(attention, q, k, v, dO, **options, backend=backend)
    assert all(map(torch.equal, got, run_with_gradients(attention, q, k, v, dO, **plain, backend=backend)))
    without_seed = options | dict(seed=None)  # the way of a call that is known
    assert torch.isfinite(attention(q, k, v, **without_seed, backend=backend)).all()
    assert torch.isfinite(attention(q, k, v, **without_seed, backend=backend)).all()


def test_reference_accepts_a_scale_beyond_fp32():
    q, k, v, dO = (x.detach().double().to(torch.float32) for x in random_inputs(1, 2, 1, 8, 12, 16))
    O = attention(q, k, v, scale=1e39, backend="reference")
    assert largest_error(O, dense_truth(q, k, v, dO, scale=1e39)[0]) < 1e-5


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter does one launch at a time")
def test_attention_is_thread_safe():
    q, k, v = qkv()
    calls = [dict(causal=n % 2 == 0, key_lengths=KEY_LENGTHS if n % 3 == 0 else None) for n in range(6)]
    outputs = [attention(q, k, v, **options) for options in calls]
    rows = [x.repeat_interleave(3, 2).requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(attention(*rows).sum(), rows)

    def matches(n):
        if n % 4 == 0:
            return all(map(torch.equal, torch.autograd.grad(attention(*rows).sum(), rows), gradients))
        return torch.equal(attention(q, k, v, **calls[n % 6]), outputs[n % 6])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(matches, range(12)))


def test_package_loads_attention_lazily_and_lists_all_calls():
    """When it is first asked for; the package lists its calls before, and gives them all to `import *`."""
    code = """
import os, sys, fa2_lab
before = dict(os.environ)
assert {'attention', 'attention_packed', 'attention_paged', 'where'} <= set(dir(fa2_lab))
assert not hasattr(fa2_lab, 'packed') and not hasattr(fa2_lab, '__wrapped__')
assert not {'torch', 'triton'} & set(sys.modules) and os.environ == before
f = fa2_lab.attention
from fa2_lab.api.attention import attention
from fa2_lab import *
assert f is fa2_lab.attention is attention and attention_paged is fa2_lab.attention_paged
fa2_lab.attention = 3
assert fa2_lab.attention == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert fa2_lab.attention is attention


@pytest.mark.parametrize("scale", (1e30, -1e30, 1e20))
@pytest.mark.parametrize("N_q", (1, 20))
def test_attention_is_right_for_the_largest_scales(scale, N_q):
    q, k, v, dO = (x.detach() for x in random_inputs(1, 2, 1, N_q, 12, 16))
    O, L = attention(q / abs(scale) ** 0.5, k / abs(scale) ** 0.5, v, scale=scale, return_lse=True)
    truth = dense_truth(q, k, v, dO, scale=math.copysign(1, scale))
    assert largest_error(O, truth[0]) < 1e-4 and largest_error(L, truth[1]) < 1e-4
