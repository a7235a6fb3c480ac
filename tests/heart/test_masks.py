"""Windows, softcap, sinks and biases against float64: on a GPU large, in the interpreter a thin slice."""

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import kernels, poisoned  # noqa: F401 (two are fixtures)
from decode_checks import paged
from kernel_truth import ALLOWED, DEVICE, dense, tensors, worst

from fa2_lab.api.attention import attention
from fa2_lab.api.paged import attention_paged
from fa2_lab.kernels import tables
from fa2_lab.kernels.decode import plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = ("O", "L", "dQ", "dK", "dV", "dsinks")


def check(
    shape, dtype=torch.float32, *, sink=False, p=0.0, backend="auto", gradients=True, bias=None, **options
) -> tuple:
    """One call and its gradients, held to float64 as closely as torch is, computing in the same dtype. A bias is two
    functions, in Triton and in NumPy."""
    q, k, v, dO = tensors(*shape, dtype)
    jitted, in_numpy = bias or (None, None)
    options = dict(causal=False, window=None, softcap=None, lengths=None) | options
    draw = torch.Generator().manual_seed(1)
    sinks = torch.randn(shape[1], generator=draw).to(DEVICE).requires_grad_() if sink else None
    dL = torch.randn(q.shape[:3], generator=draw).to(DEVICE)
    call = options | dict(key_lengths=options["lengths"], sinks=sinks, dropout_p=p, seed=3, return_lse=True)
    call["bias"] = in_numpy if backend == "reference" else jitted
    del call["lengths"]
    O, L = got = attention(q, k, v, backend=backend, **call)
    if gradients:
        got = O, L, *torch.autograd.grad((O, L), [q, k, v] + [sinks] * sink, (dO, dL))
    options |= dict(sinks=sinks, p=p, seed=3, bias=in_numpy)
    right, torchs = (dense(q, k, v, dO, dL=dL, dtype=t, **options) for t in (torch.float64, dtype))
    # dsinks comes from D = rowsum(dO ∘ O), whose O is rounded; that is what torch, which keeps P, does not lose
    lost = dict(dsinks=torch.finfo(dtype).eps * (dO * right[0]).square().sum((0, 2, 3)).max().sqrt().item())
    for name, a, t, b in zip(NAMES, got, right, torchs, strict=False):
        mine, theirs, size = worst(a, t), worst(b, t), max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
        allowed = ALLOWED.get(name, 3.0) * theirs + 1e-5 * size + lost.get(name, 0.0)
        assert mine <= allowed, f"{name}: {mine:.2e}, torch {theirs:.2e} {shape} {dtype} {options}"
    return got


@pytest.mark.parametrize("window", ((60, 25), (0, 44), (45, None)))
def test_tiles_between_the_edges_are_not_masked(window, monkeypatch):
    """Windows wider than several tiles, which begin and end within one."""
    sizes = (16, 16, 4, 1)
    if DEVICE == "cpu":
        monkeypatch.setattr(tables, "INTERPRETED", dict(forward=sizes, columns=sizes, rows=sizes))
    check((1, 2, 1, 50, 100, 16), window=window)


def test_rows_that_see_nothing():
    """Of 60 rows on 20 keys the first 40 lie before the keys: nothing without a sink, the sink alone with one."""
    O, L, dQ, *_ = check((1, 2, 1, 60, 20, 16), window=(4, 2))
    assert (O[:, :, :38] == 0).all() and (L[:, :, :38] == -torch.inf).all() and (dQ[:, :, :38] == 0).all()
    O, L, *_, dsinks = check((1, 2, 1, 60, 20, 16), window=(4, 2), sink=True)
    assert (O[:, :, :38] == 0).all() and torch.isfinite(L).all() and (dsinks != 0).all()
    (q, k, v, dO), none = tensors(1, 2, 1, 60, 20, 16), torch.full((2,), -torch.inf, device=DEVICE, requires_grad=True)
    assert not torch.autograd.grad(attention(q, k, v, window=(4, 2), sinks=none), none, dO)[0].any()


@pytest.mark.parametrize("bad, lengths", [(torch.nan, None), (torch.inf, None), (torch.nan, [65])])
@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_keys_outside_of_every_window_are_not_read(bad, lengths, backend):
    """Of 70 keys 30 rows with 9 to the left see the last 39."""
    q, k, v, dO = tensors(1, 2, 1, 30, 70, 16)
    with torch.no_grad():
        k[:, :, :31] = v[:, :, :31] = bad
    lengths = lengths and torch.tensor(lengths, device=DEVICE)
    O = attention(q, k, v, causal=True, window=(9, None), key_lengths=lengths, backend=backend)
    dQ, dK, dV = torch.autograd.grad(O, (q, k, v), dO)
    assert all(torch.isfinite(x).all() for x in (O, dQ, dK, dV)) and (dK[:, :, :31] == 0).all()


def test_a_window_as_wide_as_the_keys_is_none():
    """Then the fastest kernels for the plain mask serve."""
    q, k, v, _ = (x.detach() for x in tensors(1, 2, 1, 40, 50, 16))
    for window, causal in (((49, 39), False), ((49, 0), True), ((None, None), False), ((10**30, 0), True)):
        assert torch.equal(attention(q, k, v, window=window), attention(q, k, v, causal=causal))
    assert not torch.equal(attention(q, k, v, window=(48, 39)), attention(q, k, v))


@pytest.mark.parametrize("scale", (0.0, 1e-38, -0.7))
def test_a_sink_is_not_scaled(scale):
    q, k, v, _ = (x.detach() for x in tensors(1, 2, 1, 20, 40, 16))
    sinks = torch.tensor([3.0, -1.0], device=DEVICE)
    L = attention(q, k, v, scale=scale, sinks=sinks, return_lse=True)[1]
    S = scale * q.double() @ k.double().mT
    want = torch.logaddexp(torch.logsumexp(S, 3), sinks.double()[None, :, None])
    assert worst(L, want) < 1e-5
    assert worst(attention(q, k, v, scale=scale), torch.softmax(S, 3) @ v.double()) < 1e-5  # and without a sink


def test_sinks_alone_may_want_a_gradient():
    q, k, v, dO = (x.detach() for x in tensors(1, 4, 2, 20, 30, 16))
    sinks = torch.zeros(8, device=DEVICE).requires_grad_()
    (apart,) = torch.autograd.grad(attention(q, k, v, sinks=sinks[::2]), sinks, dO)
    (dense,) = torch.autograd.grad(attention(q, k, v, sinks=sinks[:4]), sinks, dO)
    assert torch.equal(apart[::2], dense[:4]) and (dense[:4] != 0).all() and not apart[1::2].any()


# Biases -------------------------------------------------------------------------------------------------------


@triton.jit
def alibi(head, row, column):
    return -tl.exp2(-1.0 - head) * (row - column)


def alibi_in_numpy(head, row, column):
    return -(0.5 ** (1 + head)) * (row - column)


ALIBI = alibi, alibi_in_numpy


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("shape", [(2, 4, 2, 70, 90, 16), (1, 4, 4, 40, 20, 24), (1, 2, 1, 1, 100, 16)], ids=str)
def test_alibi(shape, backend):
    """A row's number is its place among the keys, whatever N_q is, also where decode's kernels would serve."""
    check(shape, backend=backend, bias=ALIBI)
    check(shape, backend=backend, bias=ALIBI, causal=True)


# Decode and pages ---------------------------------------------------------------------------------------------


@pytest.fixture
def decode_alone(monkeypatch):
    """No other kernel serves, and tiles are so small that a window leaves some out."""
    monkeypatch.setattr(plan, "is_decode", lambda q, k: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(plan, "INTERPRETED", plan.Entry(B_c=16, warps=1, stages=1, per_SM=4))


DECODE = [
    ((1, 4, 2, 1, 150, 16), dict(window=(40, None))),
    ((1, 4, 2, 1, 150, 16), dict(window=(0, 0), sink=True)),
    ((2, 4, 1, 7, 100, 16), dict(window=(20, 3), softcap=1.5, lengths=(0, 93))),
    ((2, 4, 2, 9, 100, 16), dict(window=(33, None), causal=True, sink=True, lengths=(5, 100), softcap=2.0)),
    ((1, 2, 1, 3, 500, 16), dict(sink=True)),
    ((2, 12, 1, 2, 90, 16), dict(window=(30, None), causal=True, sink=True)),
    ((1, 2, 2, 12, 5, 16), dict(window=(2, 0), sink=True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_over_a_long_cache(dtype, decode_alone):
    for (batch, heads, kv_heads, N_q, _, _), options in DECODE:
        for N_k, d in ((5001, 64), (20_000, 128)):
            more = dict(lengths=torch.tensor([N_k // 3, N_k], device=DEVICE)) if "lengths" in options else {}
            check((batch, heads, kv_heads, N_q, N_k, d), dtype, gradients=False, **options | more)


@pytest.mark.parametrize("page", (16, 5, 32))
@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_pages_before_every_window_are_not_read(page, backend, decode_alone):
    """Their keys are NaN, their entries name pages that do not exist."""
    N_q, left, lengths = 2, 30, [150, 40]
    q, k, v, _ = (x.detach() for x in tensors(2, 4, 2, N_q, 160, 16))
    masks = dict(window=(left, None), softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE))
    ends = [(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]) for b, n in enumerate(lengths)]
    want = torch.cat([attention(*one, causal=True, backend="reference", **masks) for one in ends])
    pages = paged(k, v, lengths, page, begins=[max(0, n - N_q - left) for n in lengths])
    got = attention_paged(q, *pages, torch.tensor(lengths, device=DEVICE), backend=backend, **masks)
    assert worst(got, want) < 1e-5
