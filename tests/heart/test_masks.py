"""Windows, softcap, sinks and biases against float64: on a GPU large, in the interpreter a thin slice."""

import linecache
import math
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_cases import kernels, nan_in_empty  # noqa: F401 (two are fixtures)
from biases import BIASES, CAUSAL_BIAS
from decode_checks import paged_cache
from kernel_truth import ALLOWED_RATIO, DEVICE, DTYPES, dense_truth, largest_error, random_inputs, run_with_gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from fa2_lab.api.attention import attention
from fa2_lab.api.bias import bias_key
from fa2_lab.api.packed import attention_packed
from fa2_lab.api.paged import attention_paged
from fa2_lab.distributed import ring_attention
from fa2_lab.kernels import launches, tables
from fa2_lab.kernels.decode import plan


def check_attention(
    shape, dtype=torch.float32, *, sink=False, p=0.0, backend="auto", gradients=True, bias=None, **options
):
    """Check one call and its gradients against float64, by the accuracy rule relative to PyTorch in the same dtype.

    A bias is a pair of functions, one in Triton and one in NumPy.
    """
    q, k, v, dO = random_inputs(*shape, dtype)
    triton_bias, numpy_bias = bias or (None, None)
    options = dict(causal=False, window=None, softcap=None, lengths=None) | options
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(shape[1], generator=generator).to(DEVICE).requires_grad_() if sink else None
    dL = torch.randn(q.shape[:3], generator=generator).to(DEVICE)
    arguments = options | dict(key_lengths=options["lengths"], sinks=sinks, dropout_p=p, seed=3, return_lse=True)
    arguments["bias"] = numpy_bias if backend == "reference" else triton_bias
    del arguments["lengths"]
    O, L = got = attention(q, k, v, backend=backend, **arguments)
    if gradients:
        got = O, L, *torch.autograd.grad((O, L), [q, k, v] + [sinks] * sink, (dO, dL))
    options |= dict(sinks=sinks, p=p, seed=3, bias=numpy_bias)
    truth, torchs = (dense_truth(q, k, v, dO, dL=dL, dtype=t, **options) for t in (torch.float64, dtype))
    # dsinks is computed from D = rowsum(dO ∘ O), whose O is rounded. PyTorch keeps P, so it has no such error.
    rounding_of_D = dict(dsinks=torch.finfo(dtype).eps * (dO * truth[0]).square().sum((0, 2, 3)).max().sqrt().item())
    digits = 2.0**-22 * truth[1].nan_to_num(0, 0, 0).abs().max().item()  # the digits of P that L in fp32 costs
    for name, a, t, b in zip(("O", "L", "dQ", "dK", "dV", "dsinks"), got, truth, torchs, strict=False):
        mine, theirs = largest_error(a, t), largest_error(b, t)
        size = max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
        allowed = ALLOWED_RATIO.get(name, 3.0) * theirs + (1e-5 + digits) * size + rounding_of_D.get(name, 0.0)
        assert mine <= allowed, f"{name}: {mine:.2e}, torch {theirs:.2e} {shape} {dtype} {options}"
    return got


@pytest.mark.parametrize("window", ((60, 25), (0, 44), (45, None)))
def test_window_interior_tiles_skip_masking(window, monkeypatch):
    """Windows wider than several tiles, which begin and end within one."""
    sizes = (16, 16, 4, 1)
    if DEVICE == "cpu":
        monkeypatch.setattr(tables, "INTERPRETED", dict(forward=sizes, dkdv=sizes, dq=sizes))
    check_attention((1, 2, 1, 50, 100, 16), window=window)


def test_window_gives_zeros_or_the_sink_for_fully_masked_rows():
    """Of 60 rows on 20 keys the first 40 lie before the keys: nothing without a sink, the sink alone with one."""
    O, L, dQ, *_ = check_attention((1, 2, 1, 60, 20, 16), window=(4, 2))
    assert (O[:, :, :38] == 0).all() and (L[:, :, :38] == -torch.inf).all() and (dQ[:, :, :38] == 0).all()
    O, L, *_, dsinks = check_attention((1, 2, 1, 60, 20, 16), window=(4, 2), sink=True)
    assert (O[:, :, :38] == 0).all() and torch.isfinite(L).all() and (dsinks != 0).all()
    q, k, v, dO = random_inputs(1, 2, 1, 60, 20, 16)
    none = torch.full((2,), -torch.inf, device=DEVICE, requires_grad=True)
    assert not torch.autograd.grad(attention(q, k, v, window=(4, 2), sinks=none), none, dO)[0].any()


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_nan_sink_gives_nan_in_its_head_alone(backend):
    """As with NaN in q, a model that has diverged shows it in its results, with every backend."""
    q, k, v, dO = random_inputs(1, 2, 1, 20, 20, 16)
    sinks = torch.tensor([torch.nan, 0.5], device=DEVICE, requires_grad=True)
    O, L = attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    dsinks, dQ = torch.autograd.grad(O, (sinks, q), dO)
    for head, is_nan in enumerate((True, False)):
        assert all((x[:, head].isnan() == is_nan).all() for x in (O, L, dQ))
        assert dsinks[head].isnan() == is_nan


@pytest.mark.parametrize("bad, lengths", [(torch.nan, None), (torch.inf, None), (torch.nan, [65])])
@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_window_kernels_do_not_read_keys_outside(bad, lengths, backend):
    """Of 70 keys 30 rows with 9 to the left see the last 39."""
    q, k, v, dO = random_inputs(1, 2, 1, 30, 70, 16)
    with torch.no_grad():
        k[:, :, :31] = v[:, :, :31] = bad
    lengths = lengths and torch.tensor(lengths, device=DEVICE)
    O = attention(q, k, v, causal=True, window=(9, None), key_lengths=lengths, backend=backend)
    dQ, dK, dV = torch.autograd.grad(O, (q, k, v), dO)
    assert all(torch.isfinite(x).all() for x in (O, dQ, dK, dV)) and (dK[:, :, :31] == 0).all()


def test_window_as_wide_as_the_keys_uses_the_plain_kernels():
    """Then the fastest kernels for the plain mask serve."""
    q, k, v, _ = (x.detach() for x in random_inputs(1, 2, 1, 40, 50, 16))
    for window, causal in (((49, 39), False), ((49, 0), True), ((None, None), False), ((10**30, 0), True)):
        assert torch.equal(attention(q, k, v, window=window), attention(q, k, v, causal=causal))
    assert not torch.equal(attention(q, k, v, window=(48, 39)), attention(q, k, v))


def test_sinks_alone_may_require_grad():
    q, k, v, dO = (x.detach() for x in random_inputs(1, 4, 2, 20, 30, 16))
    sinks = torch.zeros(8, device=DEVICE).requires_grad_()
    (strided,) = torch.autograd.grad(attention(q, k, v, sinks=sinks[::2]), sinks, dO)
    (contiguous,) = torch.autograd.grad(attention(q, k, v, sinks=sinks[:4]), sinks, dO)
    assert torch.equal(strided[::2], contiguous[:4]) and (contiguous[:4] != 0).all() and not strided[1::2].any()


# Biases -------------------------------------------------------------------------------------------------------


BIAS_CASES = [  # a shape, a dtype, and what else is asked
    ((2, 4, 2, 70, 90, 16), torch.float32, dict()),
    ((1, 4, 4, 90, 40, 24), torch.float16, dict(causal=True)),
    ((1, 6, 2, 33, 130, 17), torch.float32, dict(window=(60, 10), softcap=1.5, p=0.3)),
    ((1, 2, 1, 1, 100, 16), torch.float32, dict(sink=True)),
    ((1, 2, 2, 100, 100, 7), torch.bfloat16, dict(window=(30, None), causal=True)),
    ((2, 4, 1, 20, 75, 16), torch.float32, dict(lengths=(0, 73), softcap=2.0, sink=True)),
    ((1, 3, 3, 66, 80, 40), torch.float32, dict(causal=True, p=0.2)),
    ((1, 4, 2, 5, 90, 33), torch.float16, dict(window=(None, 4))),
]
CASES_OF_BIAS = (0, 4) if DEVICE == "cpu" else (0,)
BIASES_AND_CASES = [
    (name, *BIAS_CASES[(n + m) % len(BIAS_CASES)]) for n, name in enumerate(BIASES) for m in CASES_OF_BIAS
]


@pytest.mark.parametrize("name, shape, dtype, options", BIASES_AND_CASES, ids=str)
def test_bias_is_added_after_scale_and_softcap(name, shape, dtype, options):
    """After scale and softcap, beside every mask, whatever d, N_q and N_k are, in rows and tiles without a key, too."""
    if "lengths" in options:
        options = options | dict(lengths=torch.tensor(options["lengths"], device=DEVICE))
    check_attention(shape, dtype, bias=BIASES[name], **options)


@pytest.mark.parametrize("name", BIASES)
def test_reference_accepts_a_numpy_bias(name):
    check_attention((1, 4, 2, 70, 90, 16), backend="reference", bias=BIASES[name], causal=True, softcap=1.5, sink=True)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of a row that does not exist, says the interpreter
@pytest.mark.parametrize("N_q, N_k", [(70, 80), (40, 33)])
def test_bias_may_be_nan_at_masked_positions(N_q, N_k):
    """Keys behind the diagonal, and places behind the last row and the last key, which are computed with the others."""
    for dtype in (torch.float32, torch.float16):
        check_attention((1, 2, 1, N_q, N_k, 16), dtype, bias=CAUSAL_BIAS, causal=True)


@pytest.mark.parametrize("scale, softcap", [(0.0, None), (1e-38, None), (-0.7, None), (1e-4, None), (0.3, 1e-30)])
def test_a_bias_is_not_scaled(scale, softcap):
    (q, k, v, _), (triton_bias, numpy_bias) = random_inputs(1, 2, 1, 20, 40, 16), BIASES["alibi"]
    got = attention(q, k, v, scale=scale, softcap=softcap, bias=triton_bias, return_lse=True)
    want = dense_truth(q, k, v, q, scale=scale, softcap=softcap, bias=numpy_bias)
    assert all(largest_error(a, b) < 1e-5 for a, b in zip(got, want, strict=False))


ALIBI_SOURCE = """
import triton
import triton.language as tl

SLOPE = tl.constexpr({})

@triton.jit
def distance(row, column):
    return row - column

@triton.jit
def alibi(head, row, column):
    return -SLOPE * distance(row, column)
"""


def define_alibi(slope, folder):
    """Return ALiBi with one slope for all heads, as the namespace of a Triton module and as a function for NumPy."""
    file, names = folder / "book.py", dict(__name__="book")
    file.write_text(ALIBI_SOURCE.format(slope), encoding="utf-8")
    linecache.checkcache()
    exec(compile(file.read_text(encoding="utf-8"), file, "exec"), names)
    return names, lambda head, row, column: -slope * (row - column)


def test_biases_with_the_same_name_are_not_confused(tmp_path):
    """Also one with the same name in the same place as another that computed something else, and none after one."""
    q, k, v, dO = random_inputs(1, 2, 2, 20, 30, 16)
    starts = [torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (20, 30)]
    for slope in (0.5, 0.25, None, 0.5, 0.25):
        module, numpy_bias = define_alibi(slope, tmp_path) if slope else (dict(alibi=None), None)
        got = run_with_gradients(attention, q, k, v, dO, bias=module["alibi"])
        want = dense_truth(q, k, v, dO, bias=numpy_bias)
        assert all(largest_error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))
        O = attention_packed(*(x[0].transpose(0, 1) for x in (q, k, v)), *starts, bias=module["alibi"])
        assert largest_error(O.transpose(0, 1), want[0][0]) < 1e-5


def as_on_gpu(module):
    """Return the bias of a module's namespace as the function that a GPU would compile."""
    for name in ("distance", "alibi"):
        module[name] = triton.JITFunction(module[name].fn)
    return module["alibi"]


def test_bias_cache_key_is_its_source_and_globals(tmp_path, monkeypatch):
    """Defined again it is the same, with another constant it is not; and nothing is compiled that has changed since."""
    first, again, other = (define_alibi(slope, tmp_path)[0] for slope in (0.5, 0.5, 0.25))
    biases = as_on_gpu(first), as_on_gpu(again), as_on_gpu(other)
    keys = [bias_key(bias) for bias in biases]
    assert keys[0] == keys[1] != keys[2] and bias_key(biases[0]) == keys[0]
    first["SLOPE"] = tl.constexpr(0.125)
    with pytest.raises(ValueError, match=r"bias: got alibi, for which SLOPE was .*0\.5.* and is .*0\.125"):
        attention(*random_inputs(1, 2, 2, 20, 30, 16)[:3], bias=biases[0])
    first["SLOPE"] = tl.constexpr(0.5)
    assert bias_key(biases[0]) == keys[0]
    again["distance"] = triton.JITFunction(again["distance"].fn)
    with pytest.raises(ValueError, match="bias: got alibi, for which distance was"):
        bias_key(biases[1])
    tree, namespace = triton.JITFunction(TREE_BIAS.fn), TREE_BIAS.fn.__globals__
    for array in (np.zeros(3), np.ones(3)):  # it reads tl.where, not a variable of this name
        monkeypatch.setitem(namespace, "where", array)
        assert bias_key(tree) == bias_key(tree)


NOT_A_NUMBER, ARRAY, TENSOR = tl.constexpr(math.nan), np.ones(2), torch.ones(2)


@triton.jit
def with_nan(head, row, column):
    return tl.where(row < column, NOT_A_NUMBER, 0.0)


@triton.jit
def with_array(head, row, column):
    return row * ARRAY


@triton.jit
def with_tensor(head, row, column):
    return row * TENSOR


@triton.jit
def recursive(head, row, column):
    return recursive(head, row, column)


def test_bias_key_of_nan_arrays_and_recursion(monkeypatch):
    itself, bias = triton.JITFunction(recursive.fn), triton.JITFunction(with_nan.fn)
    monkeypatch.setitem(globals(), "recursive", itself)
    assert bias_key(itself) == bias_key(itself) != bias_key(bias) == bias_key(bias)
    monkeypatch.setitem(globals(), "NOT_A_NUMBER", tl.constexpr(float("nan")))
    bias_key(bias)
    monkeypatch.setitem(globals(), "NOT_A_NUMBER", tl.constexpr(1.0))
    with pytest.raises(ValueError, match=r"bias: got with_nan, for which NOT_A_NUMBER was .*nan.* and is .*1\.0"):
        bias_key(bias)
    for function, name in ((with_array, "ARRAY, which is of type ndarray"), (with_tensor, "TENSOR, which is of type")):
        with pytest.raises(TypeError, match=f"bias: got a function that uses {name}.*; it takes .*tl.constexpr"):
            bias_key(triton.JITFunction(function.fn))


@triton.jit
def bias_of_two_arguments(row, column):
    return row - column


def python_bias(head, row, column):
    return row - column


TREE_BIAS = BIASES["tree"][0]
INVALID_BIASES = [
    *product(("auto", "reference"), (3, "alibi", torch.zeros(4), [python_bias], bias_of_two_arguments)),
    *[("auto", python_bias), ("auto", triton), ("reference", TREE_BIAS), ("reference", np.subtract)],
    *[("reference", lambda head, row, column, x=x: x) for x in (None, "far", 1j, np.zeros((2, 3, 1)))],
]


@pytest.mark.parametrize(
    "backend, bad", INVALID_BIASES, ids=[f"{n}-{backend}" for n, (backend, _) in enumerate(INVALID_BIASES)]
)
def test_invalid_bias_is_rejected_before_launch(backend, bad, monkeypatch):
    q = torch.randn(1, 2, 9, 16, device=DEVICE)
    starts = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(launches.Launch, "__call__", None)
    for call, given in ((attention, 3 * [q]), (attention_packed, 3 * [q[0].transpose(0, 1)] + 2 * [starts])):
        with pytest.raises(TypeError, match=r"^bias: got .*; it takes a .*function of \(head, row, column\)"):
            call(*given, bias=bad, backend=backend)


@triton.jit
def undefined_name_bias(head, row, column):
    return nowhere(row - column)  # noqa: F821


@triton.jit
def string_bias(head, row, column):
    return "far"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's compiler refuses them")
@pytest.mark.parametrize("bad, why", [(undefined_name_bias, "NameError: name 'nowhere'"), (string_bias, ".*")])
def test_bias_error_in_the_interpreter_names_the_bias(bad, why):
    q = torch.randn(1, 2, 9, 16)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^bias: got {bad.__name__}, which fails in .*\({why}.*\); it takes a "):
            attention(q, q, q, bias=bad)


def test_reference_accepts_a_jitted_bias_that_runs_on_numpy():
    (q, k, v, _), (triton_bias, numpy_bias) = random_inputs(1, 4, 2, 20, 30, 16), BIASES["eighths"]
    compiled_bias = triton.JITFunction(triton_bias.fn)
    found = [attention(q, k, v, bias=bias, backend="reference") for bias in (compiled_bias, numpy_bias)]
    assert torch.equal(*found)


def test_bias_is_rejected_under_transforms_and_by_other_calls():
    """Where torch records, and in the calls that take none."""
    (q, k, v, dO), alibi = random_inputs(1, 2, 2, 9, 9, 16), BIASES["alibi"][0]
    for inputs in ((x.detach().to("meta") for x in (q, k, v)), map(FakeTensorMode().from_tensor, (q, k, v))):
        with pytest.raises(ValueError, match=r"^bias: got a function; .* it takes None"):
            attention(*inputs, bias=alibi)
    with pytest.raises(ValueError, match=r"^bias: got a function; .* it takes None"):
        torch.autograd.grad(attention(q, k, v, bias=alibi), q, dO, create_graph=True)
    compiled = torch.compile(lambda q: attention(q, k, v, bias=alibi), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="bias: got a function"):
        compiled(q)
    torch._dynamo.reset()
    for call in (attention_paged, ring_attention):
        with pytest.raises(TypeError, match="bias"):
            call(q, k, v, bias=alibi)


# Decode and pages ---------------------------------------------------------------------------------------------


@pytest.fixture
def always_decode(monkeypatch):
    """Make all calls use the decode kernels, with tiles so small that a window skips some of them."""
    monkeypatch.setattr(plan, "is_fastest", lambda *given: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(plan, "INTERPRETED", plan.DecodeConfig(B_c=16, warps=1, stages=1, programs_per_SM=4))


DECODE_CASES = [
    ((1, 4, 2, 1, 150, 16), dict(window=(40, None))),
    ((1, 4, 2, 1, 150, 16), dict(window=(0, 0), sink=True)),
    ((2, 4, 1, 7, 100, 16), dict(window=(20, 3), softcap=1.5, lengths=(0, 93))),
    ((2, 4, 2, 9, 100, 16), dict(window=(33, None), causal=True, sink=True, lengths=(5, 100), softcap=2.0)),
    ((1, 2, 1, 3, 500, 16), dict(sink=True)),
    ((2, 12, 1, 2, 90, 16), dict(window=(30, None), causal=True, sink=True)),
    ((1, 2, 2, 12, 5, 16), dict(window=(2, 0), sink=True)),
]


@pytest.mark.parametrize("name", ("alibi", "tree"))
def test_decode_sized_calls_with_a_bias_use_portable_kernels(name, always_decode):
    check_attention((1, 4, 2, 3, 100, 16), bias=BIASES[name], causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_options_match_float64_over_a_long_cache(dtype, always_decode):
    for (batch, heads, kv_heads, N_q, _, _), options in DECODE_CASES:
        for N_k, d in ((5001, 64), (20_000, 128)):
            more = dict(lengths=torch.tensor([N_k // 3, N_k], device=DEVICE)) if "lengths" in options else {}
            check_attention((batch, heads, kv_heads, N_q, N_k, d), dtype, gradients=False, **options | more)


@pytest.mark.parametrize("page", (16, 5, 32))
@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_window_decode_does_not_read_pages_before_the_window(page, backend, always_decode):
    """Their keys are NaN, their entries name pages that do not exist."""
    N_q, left, lengths = 2, 30, [150, 40]
    q, k, v, _ = (x.detach() for x in random_inputs(2, 4, 2, N_q, 160, 16))
    masks = dict(window=(left, None), softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE))
    sequences = [(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]) for b, n in enumerate(lengths)]
    want = torch.cat([attention(*sequence, causal=True, backend="reference", **masks) for sequence in sequences])
    pages = paged_cache(k, v, lengths, page, begins=[max(0, n - N_q - left) for n in lengths])
    got = attention_paged(q, *pages, torch.tensor(lengths, device=DEVICE), backend=backend, **masks)
    assert largest_error(got, want) < 1e-5


@pytest.mark.parametrize("scale", (0.0, 1e-38, -0.7))
def test_a_sink_is_not_scaled(scale):
    q, k, v, _ = (x.detach() for x in random_inputs(1, 2, 1, 20, 40, 16))
    sinks = torch.tensor([3.0, -1.0], device=DEVICE)
    L = attention(q, k, v, scale=scale, sinks=sinks, return_lse=True)[1]
    S = scale * q.double() @ k.double().mT
    want = torch.logaddexp(torch.logsumexp(S, 3), sinks.double()[None, :, None])
    assert largest_error(L, want) < 1e-5
    assert largest_error(attention(q, k, v, scale=scale), torch.softmax(S, 3) @ v.double()) < 1e-5  # and without a sink
