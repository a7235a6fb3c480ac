"""The three public calls: the cache of prepared calls, tensors with gaps, extreme sizes, and torch.compile."""

import re
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from attention_cases import kernels, nan_in_empty  # noqa: F401 (fixtures)
from case_selection import covering_or_exhaustive
from kernel_truth import DEVICE, RESULTS, dense_truth, ints, largest_error, packed_truth, with_gaps

import fa2_lab.api.paged  # and its operator
from fa2_lab.api import operators
from fa2_lab.kernels import launches
from fa2_lab.kernels.arguments import Options

MASK_DEFAULTS = dict(causal=False, window=None, softcap=None, sinks=None, scale=None)
GENERATOR = torch.Generator()


def floats(*shape):
    return torch.randn(shape, generator=GENERATOR).to(DEVICE)


def valid_arguments(call: str) -> dict:
    """Return valid arguments of a call, with every optional tensor and mask that it accepts."""
    GENERATOR.manual_seed(1)
    if call == "attention":
        tensors = dict(q=floats(2, 2, 20, 8), k=floats(2, 1, 24, 8), v=floats(2, 1, 24, 8), key_lengths=ints(3, 24))
        tensors |= dict(num_splits=2)
    elif call == "attention_packed":
        tensors = dict(q=floats(20, 2, 8), k=floats(24, 1, 8), v=floats(24, 1, 8))
        tensors |= dict(cu_seqlens_q=ints(0, 7, 20), cu_seqlens_k=ints(0, 9, 24), max_seqlen_q=13)
    else:
        tensors = dict(q=floats(2, 4, 3, 8), k_pages=floats(6, 4, 2, 8), v_pages=floats(6, 4, 2, 8))
        tensors |= dict(block_table=ints(*[[5, 0, 3], [1, 4, 2]]), key_lengths=ints(12, 7), num_splits=2)
    masks = dict(causal=True, window=(9, None), softcap=2.0, scale=0.3, sinks=floats(tensors["q"].shape[1]))
    return tensors | masks


def run_call(call: str, arguments: dict) -> list:
    """Return O, L, and if the call has gradients, those of Σ O² + Σ L with respect to q, k, v and the sinks."""
    if call == "attention_paged":
        with torch.no_grad():
            arguments = arguments | dict(q=arguments["q"].detach().requires_grad_())
            return list(fa2_lab.attention_paged(**arguments, return_lse=True))
    names = [n for n in ("q", "k", "v", "sinks") if arguments[n] is not None]
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    O, L = getattr(fa2_lab, call)(**arguments | leaves, return_lse=True)
    return [O, L, *torch.autograd.grad(loss_of(O, L), leaves.values())]


def loss_of(O, L):
    return O.square().sum() + L.masked_fill(L.isinf(), 0.0).sum()


def true_results(call: str, arguments: dict) -> list:
    """Return the same as run_call(), by the definition in float64."""
    given = MASK_DEFAULTS | {name: x for name, x in arguments.items() if name != "backend"}
    q, masks = given["q"], {name: given[name] for name in MASK_DEFAULTS}
    if call == "attention_paged":
        found = []
        for b, n in enumerate(given["key_lengths"].tolist()):
            pages_of_b = given["block_table"][b, : -(-n // given["k_pages"].shape[1])].long()
            pages = (given[name][pages_of_b].flatten(0, 1)[:n] for name in ("k_pages", "v_pages"))
            found.append(dense_truth(q[[b]], *(x.transpose(0, 1)[None] for x in pages), q[[b]], **masks)[:2])
        return [torch.cat(each) for each in zip(*found, strict=True)]
    if call == "attention":
        dropout = dict(p=given.get("dropout_p", 0.0), seed=given.get("seed"))
        truth = partial(dense_truth, lengths=given.get("key_lengths"), **dropout)
    else:
        truth = partial(packed_truth, cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_k=given["cu_seqlens_k"])
    O, L, *_ = truth(q, given["k"], given["v"], q, **masks)
    return truth(q, given["k"], given["v"], 2 * O, dL=torch.ones_like(L), **masks)


def check_results(call: str, arguments: dict, want: list, what) -> list:
    """Assert that a call's results are near `want`, and return them."""
    found = run_call(call, arguments)
    for name, a, b in zip([*RESULTS, "dsinks"], found, want, strict=False):
        size = max([1.0, *b[b.isfinite()].abs().flatten().tolist()])
        assert largest_error(a, b) < max(3e-5, torch.finfo(a.dtype).eps) * size, (call, what, name)
    return found


# Another call of nearly the same kind -------------------------------------------------------------------------------

CHANGES = dict(
    scale=(0.31, -0.3, 0.0, None),
    causal=(False,),
    window=((8, None), (9, 1), None, (0, 0), (np.int64(9), None)),
    softcap=(2.1, None),
    sinks=(None, lambda x: -x, lambda x: x.half(), lambda x: torch.full_like(x, -torch.inf)),
    q=(lambda x: 2 * x, lambda x: x[..., :1, :] if x.dim() == 4 else x),
    key_lengths=(lambda x: x - 1, lambda x: x.long(), lambda x: x.to(torch.int8), lambda x: x.to(torch.uint8)),
    cu_seqlens_q=(ints(0, 8, 20), ints(0, 20, 20), ints(0, 3, 20)),
    cu_seqlens_k=(ints(0, 8, 24), ints(0, 0, 24), ints(0, 23, 24)),
    max_seqlen_q=(None, 0, 12, np.int64(19), 10**20),
    num_splits=(None, 0, 1, 256, np.int64(3)),
    block_table=(lambda x: x.flip(0), lambda x: x.long()),
    k=(lambda x: 2 * x,),
    v=(lambda x: -x,),
    k_pages=(lambda x: -x,),
)
WITH_HEAD_DIM = {"q", "k", "v", "k_pages", "v_pages"}
PUBLIC_CALLS = ("attention", "attention_packed", "attention_paged")


@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_cache_distinguishes_calls_that_differ_in_one_argument(call):
    base = valid_arguments(call)
    want = true_results(call, base)
    check_results(call, base, want, "first")
    for name in CHANGES.keys() & base.keys():
        for n, change in enumerate(CHANGES[name]):
            changed = base | {name: change(base[name]) if callable(change) else change}
            check_results(call, changed, true_results(call, changed), (name, n))
    check_results(call, base, want, "again")


@pytest.mark.parametrize("dropout_p, seed", [(0.2, 3), (0.3, 3), (0.3, 2**63)])
def test_dropout_probability_and_seed_are_not_cached(dropout_p, seed):
    change = dict(dropout_p=dropout_p, seed=seed)
    base = valid_arguments("attention")
    for p in (0.3, 0.2):
        run_call("attention", base | dict(dropout_p=p, seed=1))
    check_results("attention", base | change, true_results("attention", base | change), change)


# What is refused ----------------------------------------------------------------------------------------------------


def starting_at_1(x):
    return x + (torch.arange(3, device=DEVICE) == 0)


BAD_VALUES = [  # of every call: an argument, what is raised, and a value or what becomes of the good one
    *[("q", TypeError, x) for x in (3, None, torch.Tensor.double, torch.Tensor.int, lambda x: x.to(torch.uint8))],
    *[("q", ValueError, x) for x in (lambda x: x[0], lambda x: x[..., :0], torch.Tensor.to_sparse)],
    ("q", ValueError, lambda x: x.narrow(x.dim() - 3 if x.dim() == 4 else 1, 0, 0)),  # no heads
    ("q", ValueError, lambda x: x.new_zeros(*x.shape[:-1], 257)),
    *[(name, TypeError, x) for name in "kv" for x in (None, torch.Tensor.half, torch.Tensor.double)],
    *[(name, ValueError, x) for name in "kv" for x in (lambda x: x[..., :4], lambda x: x[0], lambda x: x.to("meta"))],
    ("v", ValueError, lambda x: x[:-1]),
    *[("causal", TypeError, x) for x in (1, None, torch.ones(2).bool(), np.ones(2))],
    *[("return_lse", TypeError, x) for x in (0, None)],
    *[("scale", TypeError, x) for x in ("1", True)],
    *[("scale", ValueError, x) for x in (torch.nan, torch.inf, 10**400, -(10**400))],
    *[("window", TypeError, x) for x in (3, (9.0, None), (True, 0))],
    *[("window", ValueError, x) for x in ((), (1, 2, 3), (-1, 0), [None, -2], (np.int64(-1), None))],
    *[("softcap", TypeError, x) for x in ("50", True)],
    *[("softcap", ValueError, x) for x in (0.0, -50.0, torch.inf, torch.nan, 10**400, 1e-31, 1e31)],
    *[("sinks", TypeError, x) for x in ([0.0, 0.0], torch.Tensor.int, torch.Tensor.double)],
    *[("sinks", ValueError, x) for x in (lambda x: x[:1], lambda x: x[None], lambda x: x.to("meta"))],
    ("window", TypeError, {9: 0, None: 0}),  # as a sequence its keys are the window of the good call
    *[("backend", ValueError, x) for x in ("cuda", np.array(["auto", "triton"]), np.array("auto"))],
]
BAD_KEY_LENGTHS = [
    *[("key_lengths", TypeError, x) for x in ([3, 4], torch.Tensor.float)],
    *[("key_lengths", ValueError, x) for x in (lambda x: x[:1], lambda x: x[:, None], lambda x: x.to("meta"))],
    *[("key_lengths", ValueError, x) for x in (lambda x: x + 1, lambda x: x - 8)],
]
BAD_NUM_SPLITS = [("num_splits", TypeError, x) for x in (True, 2.0, "2", [2])]
BAD_NUM_SPLITS += [("num_splits", ValueError, x) for x in (-1, 257)]
MORE_BAD_VALUES = dict(
    attention=[
        *BAD_KEY_LENGTHS,
        *BAD_NUM_SPLITS,
        *[("k", ValueError, x) for x in (lambda x: x[:1], lambda x: x[[0, 1, 0]])],
        ("k", ValueError, lambda x: x[:, [0, 0, 0]]),
        *[("v", ValueError, x) for x in (lambda x: x[:, :, 1:], lambda x: x[:, :, :0], lambda x: x.transpose(1, 2))],
        *[("dropout_p", ValueError, x) for x in (1.0, -0.1, torch.nan, Fraction(10**20 - 1, 10**20))],
        *[("dropout_p", TypeError, x) for x in ("0", False)],
        ("seed", TypeError, 1.5),
        *[("seed", ValueError, x) for x in (2**64, -1, np.int64(-1))],
    ],
    attention_packed=[
        ("k", ValueError, lambda x: x[:, [0, 0, 0]]),
        *[("cu_seqlens_q", TypeError, x) for x in ([0, 7, 20], torch.Tensor.long, torch.Tensor.float)],
        *[("cu_seqlens_k", TypeError, x) for x in ([0, 7, 20], torch.Tensor.long, torch.Tensor.float)],
        *[("cu_seqlens_q", ValueError, x) for x in (lambda x: x[:1], lambda x: x[:, None], lambda x: x.to("meta"))],
        *[("cu_seqlens_k", ValueError, x) for x in (lambda x: x[:2], lambda x: torch.cat([x, x[-1:]]))],
        *[("max_seqlen_q", TypeError, x) for x in (True, 2.5, "13")],
        ("max_seqlen_q", ValueError, -1),
    ],
    attention_paged=[
        *BAD_KEY_LENGTHS,
        *BAD_NUM_SPLITS,
        *[("k", ValueError, x) for x in (lambda x: x[:, :0], lambda x: x[:, :, [0, 0, 0]])],
        ("k", ValueError, lambda x: x.mT.contiguous().mT),
        *[(name, ValueError, lambda x: x.clone().requires_grad_()) for name in ("q", "k", "v", "sinks")],
        *[("block_table", TypeError, x) for x in (torch.Tensor.tolist, torch.Tensor.float)],
        *[("block_table", ValueError, x) for x in (lambda x: x[:1], lambda x: x[:, 0], lambda x: x.to("meta"))],
        *[("block_table", ValueError, x) for x in (lambda x: x + 1, lambda x: x - 1, lambda x: x[[0, 1, 0]])],
    ],
)
BAD_VALUES_ON_CPU = dict(  # values that are looked at where they lie on the CPU
    attention=[("sinks", lambda x: x + torch.inf)],
    attention_packed=[
        ("sinks", lambda x: x + torch.inf),
        *[("cu_seqlens_q", x) for x in (starting_at_1, ints(0, 7, 24), ints(0, 21, 20), ints(0, 7, 19))],
        *[("cu_seqlens_k", x) for x in (starting_at_1, ints(0, 9, 20), ints(0, 30, 24), ints(0, 9, 25))],
    ],
    attention_paged=[("sinks", lambda x: x + torch.inf)],
)
BAD_VALUES_FOR_KERNELS = [("scale", ValueError, x) for x in (2e30, -2e30, 1e39)]  # the reference takes every float
BAD_VALUES_FOR_KERNELS += [("sinks", ValueError, lambda x: x + 3e38)] if DEVICE == "cpu" else []


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_bad_input_is_rejected_before_launch_even_after_a_cached_call(call, backend, monkeypatch):
    base, run = valid_arguments(call) | dict(backend=backend), getattr(fa2_lab, call)
    base |= dict(dropout_p=0.5, seed=3) if call == "attention" else {}
    cases = BAD_VALUES + MORE_BAD_VALUES[call] + (BAD_VALUES_FOR_KERNELS if backend == "auto" else [])
    cases += [(name, ValueError, x) for name, x in BAD_VALUES_ON_CPU[call] if DEVICE == "cpu"]
    before = run(**base)
    for name, error, bad in cases:
        name = f"{name}_pages" if call == "attention_paged" and name in "kv" else name
        bad = bad(base[name]) if callable(bad) else bad
        with monkeypatch.context() as patch, pytest.raises(error) as refused:
            patch.setattr(launches.Launch, "__call__", None)
            run(**base | {name: bad})
        assert re.match(rf"{name}: got .*; (it|with .* it) takes ", str(refused.value)), (name, bad, refused.value)
        assert str(refused.value).count("meta") < 2, "it does not take the device that it got"
    assert torch.equal(run(**base), before), "a refused call left something behind"


# The same numbers elsewhere in memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_calls_accept_strided_and_offset_inputs(call):
    base = valid_arguments(call)
    want = true_results(call, base)
    check_results(call, base, want, "where they were")
    for name, x in base.items():
        for dim in range(x.dim()) if isinstance(x, torch.Tensor) else ():
            if not (name.endswith("pages") and dim == 3):  # refused
                check_results(call, base | {name: with_gaps(x, dim)}, want, (name, dim))


@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_smallest_and_largest_head_dimension_are_supported(call):
    """One also with a stride, which then means nothing."""

    def with_any_last_stride(x):
        return x.contiguous().as_strided(x.shape, (*x.contiguous().stride()[:-1], 7))

    base = valid_arguments(call)
    names = base.keys() & WITH_HEAD_DIM
    for view in (torch.clone, with_any_last_stride, lambda x: with_gaps(x, -1)):
        one_column = base | {n: view(base[n][..., :1]) for n in names}
        check_results(call, one_column, true_results(call, one_column), view)
    wide = base | {n: torch.nn.functional.pad(base[n], (0, 256 - base[n].shape[-1])) for n in names}
    check_results(call, wide, true_results(call, wide), 256)


def lazily_negated(x):
    """Return −x as a tensor that PyTorch negates when it is read, which is the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


def with_overlapping_rows(x):
    """Return a tensor like x in which each row overlaps the next one in memory, in all but one of its numbers."""
    return floats(*x.shape[:-2], x.shape[-2] + x.shape[-1] - 1).unfold(-1, x.shape[-1], 1)


def in_dimension_order(*order):
    """Return a function that copies a tensor so that memory has its last three dimensions in another order."""

    def reordered(x):
        axes = [*range(x.dim() - 3), *(x.dim() - 3 + n for n in order)]
        return x.permute(axes).contiguous().permute([axes.index(n) for n in range(x.dim())])

    return reordered


VIEWS = dict(
    overlapping=with_overlapping_rows,
    overlapping_rows=lambda x: with_overlapping_rows(x.mT).mT,
    negated=lazily_negated,
    reversed=lambda x: x.flip(-2).flip(-1),
    sliced=lambda x: torch.cat([x, x, x], -3)[..., 1 : x.shape[-3] + 1, :, :],
    **{f"expanded_{n}": lambda x, n=n: x.narrow(-n, 0, 1).expand(x.shape) for n in (1, 2, 3)},
    all_expanded=lambda x: x.flatten()[0].expand(x.shape),
    turned_102=in_dimension_order(1, 0, 2),
    turned_120=in_dimension_order(1, 2, 0),  # an order that is not its own inverse
    turned_210=in_dimension_order(2, 1, 0),
)


def has_contiguous_rows(x):
    """Return whether a tensor has contiguous rows and no gaps between its rows."""
    spans = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return spans == x.numel() and (x.shape[-1] < 2 or x.stride(-1) == 1)


@pytest.mark.parametrize("view, call", covering_or_exhaustive(list(VIEWS), PUBLIC_CALLS))
def test_calls_accept_any_view_and_copy_only_noncontiguous_rows(view, call):
    """The results' memory held NaN before. Where the copies are of a gradient, it counts each copy for itself."""
    base = valid_arguments(call)
    if call == "attention":  # fewer rows than columns: of a view that overlaps, torch takes columns for rows then
        base |= dict(q=base["q"][:, :, :5], k=base["k"][:, :, :7], v=base["v"][:, :, :7], key_lengths=ints(3, 7))
    pages = call == "attention_paged"
    for d in (8, 1):
        narrow = base | {name: x[..., :d] for name, x in base.items() if name in WITH_HEAD_DIM}
        if pages and d == 8:  # those must have contiguous rows
            views = [narrow | dict(q=VIEWS[view](narrow["q"]))]
        else:
            views = [narrow | {name: VIEWS[view](narrow[name]) for name in WITH_HEAD_DIM & narrow.keys()}]
            views += [narrow | dict(k=VIEWS[view](narrow["k"]))] if not pages else []
        for arguments in views:
            found = check_results(call, arguments, true_results(call, arguments), (view, d))
            assert all(has_contiguous_rows(x) for x in found[:5]), [(x.shape, x.stride()) for x in found]
    for _ in range(2):  # the second call is one of a known kind
        O = getattr(fa2_lab, call)(**arguments)
        assert has_contiguous_rows(O) and largest_error(O, found[0]) < 1e-6, (view, O.shape, O.stride())


def test_results_keep_the_dimension_order_of_dense_inputs():
    q, k, v = (floats(2, 20, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    O = fa2_lab.attention(q, k, v)
    given = torch.autograd.grad(O.sum(), (q, k, v))
    assert [x.stride() for x in (O, *given)] == [x.stride() for x in (q, q, k, v)]


# Edges --------------------------------------------------------------------------------------------------------------

EDGE_WINDOWS = [(65, 65, (33, None)), (65, 65, (None, 33)), (10, 4, (2, 1)), (4, 10, (2, 0))]
EDGE_WINDOWS += [(10, 4, (left, None)) for left in (2, 3, 4, 9)] + [(4, 10, (left, None)) for left in (3, 8, 9, 10)]
EDGE_WINDOWS += [(10, 4, (None, n)) for n in (0, 3, 8, 9, 10)] + [(4, 10, (None, n)) for n in (2, 4, 9)]


@pytest.mark.parametrize("N_q, N_k, window", EDGE_WINDOWS, ids=str)
def test_windows_at_tile_and_sequence_edges_are_right(N_q, N_k, window):
    """And those that just do not: where they end before a tile does, and where one of N_q and N_k is the smaller."""
    GENERATOR.manual_seed(2)
    q, k, v = floats(1, 2, N_q, 8), floats(1, 1, N_k, 8), floats(1, 1, N_k, 8)
    O, L, *_ = dense_truth(q, k, v, q, window=window)
    for backend in ("auto", "reference"):
        got = fa2_lab.attention(q, k, v, window=window, return_lse=True, backend=backend)
        assert all(largest_error(a, b) < 1e-5 for a, b in zip(got, (O, L), strict=True)), backend
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    got = fa2_lab.attention_packed(*rows, ints(0, N_q), ints(0, N_k), window=window, return_lse=True)
    assert largest_error(got[0], O[0].transpose(0, 1)) < 1e-5 and largest_error(got[1], L[0]) < 1e-5, "packed"
    pages = [x.transpose(1, 2).contiguous() for x in (k, v)]
    if N_q <= N_k:
        table = ints([0])
        got = fa2_lab.attention_paged(q, *pages, table, ints(N_k), causal=False, window=window, return_lse=True)
        assert all(largest_error(a, b) < 1e-5 for a, b in zip(got, (O, L), strict=True)), "pages"


@pytest.mark.parametrize("softcap", (1e-30, 1e-3, 1e30))
@pytest.mark.parametrize("N_q", (1, 20))
def test_largest_scale_works_with_any_softcap(softcap, N_q):
    GENERATOR.manual_seed(3)
    q, k, v = floats(1, 2, N_q, 8) * 1e-15, floats(1, 2, 24, 8) * 1e-15, floats(1, 2, 24, 8)
    got = fa2_lab.attention(q, k, v, scale=1e30, softcap=softcap, return_lse=True)
    want = dense_truth(q, k, v, q, scale=1e30, softcap=softcap)
    assert all(largest_error(a, b) < 1e-3 for a, b in zip(got, want, strict=False))


@pytest.mark.parametrize("scale, softcap", [(1e30, None), (1e-29, None), (1e-9, None), (0.3, 1e-30)])
@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_extreme_scale_softcap_and_sink_are_right_or_rejected(call, scale, softcap):
    """Sinks grow until an error names one that the reference still accepts. The error of L is relative to its size."""
    base = valid_arguments(call) | dict(scale=scale, softcap=softcap)
    for power in (0, 10, 30, 38):
        arguments = base | dict(sinks=torch.full_like(base["sinks"], 10.0**power))
        want = true_results(call, arguments)
        for backend in ("auto", "reference"):
            try:
                O, L = getattr(fa2_lab, call)(**arguments, return_lse=True, backend=backend)
            except ValueError as refusal:
                assert str(refusal).startswith("sinks: got") and backend == "auto" and power > 7
                continue
            if O.is_cuda and backend == "auto" and O.isnan().all():
                assert power > 7  # there sinks are not looked at, as that would wait for the GPU
                continue
            size = want[1].abs().max()
            assert largest_error(O, want[0]) < 1e-5 and largest_error(L.double() / size, want[1] / size) < 1e-5


# Sizes of none and one --------------------------------------------------------------------------------------------


def arguments_of_size(call: str, n: int):
    """Yield valid arguments in which one size at a time is n: the batch, the rows, the keys, or the pages."""
    base = valid_arguments(call)
    if call == "attention_packed":
        yield base | dict(q=base["q"][:n], cu_seqlens_q=ints(0, 0, n))
        yield base | dict(k=base["k"][:n], v=base["v"][:n], cu_seqlens_k=ints(0, n, n))
        yield base | {name: base[name][:n] for name in "qkv"} | dict(cu_seqlens_q=ints(0, n), cu_seqlens_k=ints(0, n))
        return
    names = [name for name in ("q", "k", "v", "key_lengths", "block_table") if name in base]
    yield base | {name: base[name][:n] for name in names}
    yield base | dict(q=base["q"][:, :, :n])
    if call == "attention":
        yield base | dict(k=base["k"][:, :, :n], v=base["v"][:, :, :n], key_lengths=ints(0, n))
        yield base | dict(k=base["k"][:, :, :n], v=base["v"][:, :, :n], key_lengths=None, window=None, sinks=None)
    else:
        yield base | dict(block_table=base["block_table"][:, :n], key_lengths=ints(0, n))
        pages = {name: base[name][:n] for name in ("k_pages", "v_pages")}
        yield base | pages | dict(key_lengths=ints(0, n), block_table=0 * base["block_table"])


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("n", (0, 1))
@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_calls_support_sizes_of_0_and_1(call, n, backend):
    """A call without rows has an empty result; a row without keys sees its sink; gradients are 0."""
    for number, arguments in enumerate(arguments_of_size(call, n)):
        if len(arguments["q"]) or call == "attention_packed":
            check_results(call, arguments | dict(backend=backend), true_results(call, arguments), (number, backend))
        else:
            found = run_call(call, arguments | dict(backend=backend))
            assert found[0].shape == arguments["q"].shape and found[1].shape == arguments["q"].shape[:3]
            assert all(not x.any() for x in found[2:])


# Sinks that are no numbers, sequences that are empty --------------------------------------------------------------


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_sink_of_minus_infinity_is_no_sink(call, backend):
    """A sink of −∞ is none; a row that sees no key sees its sink, and its L is that."""
    base = valid_arguments(call) | dict(backend=backend)
    base |= dict(key_lengths=ints(0, 7)) if "key_lengths" in base else dict(cu_seqlens_k=ints(0, 0, 24))
    base["sinks"] = torch.tensor([-torch.inf, 0.5, -1.0, -torch.inf], device=DEVICE)[: len(base["sinks"])]
    check_results(call, base, true_results(call, base), backend)
    O, L = (run_call(call, base)[n] for n in (0, 1))
    first = (O[0], L[0, :, 0]) if call != "attention_packed" else (O[:7], L[:, 0])
    assert (first[0] == 0).all() and torch.equal(first[1], base["sinks"])


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_packed_accepts_zero_query_rows(backend):
    """A tensor without elements calls itself contiguous in any strides, as those of the gradient of a sum."""
    q, k = torch.empty(0, 4, 32, device=DEVICE, requires_grad=True), torch.randn(9, 2, 16, device=DEVICE)
    O = fa2_lab.attention_packed(q[..., ::2], k, k, ints(0, 0), ints(0, 9), backend=backend)
    O.sum().backward()
    assert O.shape == (0, 4, 16) and q.grad.shape == q.shape


def on_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def metadata(x):
    return x.shape, x.dtype, [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


# What torch is told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("plain", "inside", "turned", "expanded", "overlapping"))
@pytest.mark.parametrize("call, reference", [*product(PUBLIC_CALLS, (False,)), *product(PUBLIC_CALLS[:2], (True,))])
def test_fake_tensor_metadata_matches_real_results(call, layout, reference):
    """Shape, dtype and strides of all results: that is what a compiled function relies on."""

    def with_layout(x):
        if layout == "overlapping":
            return with_overlapping_rows(x)
        if layout == "expanded":
            return x[:1].expand(x.shape)
        if layout == "turned":
            return x.mT.contiguous().mT
        return x.transpose(0, 1).contiguous().transpose(0, 1) if layout == "inside" else x

    ops, given = torch.ops.fa2_lab, valid_arguments(call)
    options = operators.to_op_args(Options(True, 0.25, reference=reference))
    starts = [given.get("cu_seqlens_q"), given.get("cu_seqlens_k")]
    if call == "attention_paged":
        inputs_with_layout = [
            with_layout(given["q"]).bfloat16(),
            given["k_pages"].bfloat16(),
            given["v_pages"].bfloat16(),
        ]
        steps = {ops.forward: [*inputs_with_layout, given["key_lengths"], None, None, *starts, given["block_table"]]}
    else:
        inputs_with_layout = [with_layout(given[n]).half() for n in ("q", "k", "v")]
        rest = [None, None, given["sinks"], *starts, None]
        O, L = ops.forward(*inputs_with_layout, *rest, *options)
        steps = {ops.forward: [*inputs_with_layout, *rest], ops.backward: [O, None, O, L, *inputs_with_layout, *rest]}
    for op, inputs in steps.items():
        real = op(*inputs, *options)
        fake = op(*(None if x is None else on_meta(x) for x in inputs), *options)
        assert list(map(metadata, fake)) == list(map(metadata, real))
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    fake = getattr(fa2_lab, call)(**given, return_lse=True)
    assert [x.shape for x in fake] == [x.shape for x in run_call(call, valid_arguments(call))[:2]]


@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_custom_operators_pass_torch_opcheck(call):
    ops, given, masks = torch.ops.fa2_lab, valid_arguments(call), (True, 0.3, 0.0, 9, None, 2.0, 3)
    if call == "attention_paged":
        names = ("q", "k_pages", "v_pages", "key_lengths", None, "sinks", None, None, "block_table")
        inputs = *(given.get(name) for name in names), *masks
        torch.library.opcheck(ops.forward.default, inputs, test_utils=("test_schema", "test_faketensor"))
        return
    q, k, v, sinks = (given[n] for n in ("q", "k", "v", "sinks"))
    seed, p = (ints(5, dtype=torch.int64), 0.2) if call == "attention" else (None, 0.0)
    rest = *(given.get(n) for n in ("cu_seqlens_q", "cu_seqlens_k")), None, *masks[:2], p, *masks[3:]
    q_, k_, v_, sinks_ = (x.clone().requires_grad_() for x in (q, k, v, sinks))
    torch.library.opcheck(ops.forward.default, (q_, k_, v_, given.get("key_lengths"), seed, sinks_, *rest))
    saved = q, k, v, given.get("key_lengths"), seed, sinks, *rest
    O, L = ops.forward(*saved)
    for dL in (torch.ones_like(L), None):
        torch.library.opcheck(ops.backward.default, (O, dL, O, L, *saved))


@pytest.mark.parametrize("computes", ("auto", "reference"))
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_torch_compile_matches_eager(call, backend, computes):
    attention, given = partial(getattr(fa2_lab, call), backend=computes), valid_arguments(call)
    given |= dict(dropout_p=0.2, seed=9) if call == "attention" else {}

    def f(q, sinks, **more):
        O, L = attention(1.5 * q, sinks=2 * sinks, **more, return_lse=True)
        return O.sin().sum() + L.exp().sum()

    found = []
    for function in (f, torch.compile(f, backend=backend, fullgraph=True)):
        if call == "attention_paged":
            found.append([function(**given)])
        else:
            leaves = {name: given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks")}
            found.append(torch.autograd.grad(function(**given | leaves), leaves.values()))
    torch._dynamo.reset()
    assert all(largest_error(a, b) < 1e-5 * b.abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_calls_replay_in_a_cuda_graph_with_new_inputs(call):
    """It holds no number: tensors, lengths, starts, pages and sinks may change between replays."""
    base, attention = valid_arguments(call) | dict(return_lse=True), getattr(fa2_lab, call)
    attention(**base)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(**base)
    for name, changes in CHANGES.items():
        if isinstance(base.get(name), torch.Tensor):
            change = changes[1 if name == "sinks" else 0]
            base[name].copy_(change(base[name]) if callable(change) else change)
            graph.replay()
            assert all(map(torch.equal, captured, attention(**base))), name


@pytest.mark.gpu
def test_torch_compile_reduce_overhead_matches_eager():
    """Nothing that is allocated in order to warm up may be kept: its memory is the graph's."""

    def f(q, k, v):
        return torch.autograd.grad(fa2_lab.attention(q, k, v, causal=True).float().sin().sum(), (q, k, v))

    given = [torch.randn(2, 8, 2048, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3)]
    want, compiled = f(*given), torch.compile(fa2_lab.attention, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        O = compiled(*given, causal=True)
        got = torch.autograd.grad(O.float().sin().sum(), given)
        assert all(largest_error(a, b) < 1e-2 * b.abs().max().item() for a, b in zip(got, want, strict=True))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("call", PUBLIC_CALLS[:2])
def test_calls_do_not_synchronize_with_the_gpu(call):
    base = valid_arguments(call)
    kinds = [base, base | dict(dropout_p=0.1), base | dict(dropout_p=0.1, seed=5)] if call == "attention" else [base]
    for arguments in kinds:
        run_call(call, arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments in kinds:
            run_call(call, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
