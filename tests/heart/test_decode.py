"""Decode against float64: on a GPU every combination of shapes, in Triton's interpreter a sample."""

import hypothesis
import numpy as np
import pytest
import torch
from case_selection import covering_rows, exhaustive_on_gpu
from decode_checks import check_decode, check_output, detached_inputs, nan_in_empty, run_decode, small_tiles  # noqa: F401 (fixtures)
from hypothesis import strategies as st
from kernel_truth import DEVICE, DTYPES, check_accuracy, dense_truth, largest_error, random_inputs, run_with_gradients

import fa2_lab
from fa2_lab.kernels import cache, tables
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.common import softmax
from fa2_lab.kernels.decode import kernel, plan
from fa2_lab.kernels.decode.split_rules import smallest_share
from fa2_lab.machine.splits import Shares
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import cdiv

# The product --------------------------------------------------------------------------------------------------


SHAPES_AND_MASKS = [((2, 8, 2, 1, N_k), dict()) for N_k in (1, 64, 65, 1000, 5001)]
SHAPES_AND_MASKS += [((2, 8, 2, 7, N_k), dict(causal=True)) for N_k in (1, 64, 65, 1000, 5001)]
SHAPES_AND_MASKS += [((2, 8, 8, N_q, 5001), dict(causal=True)) for N_q in (1, 7)]  # enough keys for split-KV
SHAPES_AND_MASKS += [((3, 8, 2, 7, 3000), dict(causal=True, lengths=[0, 3000, 65]))]
SHAPES_AND_MASKS += [((2, 40, 1, 2, 1000), dict(causal=True))]  # more rows than a tile takes
HEAD_DIMS = (1, 40, 64, 96, 128, 256)


@pytest.mark.gpu
def test_decode_matches_float64_for_each_shape_dtype_and_mask():
    for (shape, options), d, dtype in covering_rows(SHAPES_AND_MASKS, HEAD_DIMS, DTYPES):
        check_decode((*shape, d), dtype, **options)


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_decode_matches_float64_for_all_combinations(d, dtype):
    for shape, options in SHAPES_AND_MASKS:
        check_decode((*shape, d), dtype, **options)


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_decode_is_bitwise_reproducible():
    q, k, v, _ = detached_inputs(2, 32, 8, 1, 20000, 128, dtype=torch.bfloat16)
    want = run_decode(q, k, v, scale=0.1)
    for _ in range(200):
        assert all(map(torch.equal, run_decode(q, k, v, scale=0.1), want))


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_decode_supports_caches_beyond_int32_elements():
    """The last of 70 sequences lies behind 2³¹ elements, and its pages, too."""
    k = torch.zeros(70, 8, 32768, 128, dtype=torch.float16, device=DEVICE)
    k[-1].normal_()
    q = torch.randn(70, 8, 1, 128, dtype=torch.float16, device=DEVICE)
    O, L = run_decode(q, k, k, scale=0.1)
    check_output((O[-1:], L[-1:]), q[-1:], k[-1:], k[-1:], q[-1:], scale=0.1)
    pages = k.view(70 * 512, 64, 8, 128)
    table = torch.arange(70 * 512, device=DEVICE).view(70, 512)
    lengths = torch.full((70,), 32768, device=DEVICE)
    O, L = run_decode(q, pages, pages, causal=True, scale=0.1, key_lengths=lengths, table=table)
    turned = pages[-512:].flatten(0, 1).transpose(0, 1)[None]
    check_output((O[-1:], L[-1:]), q[-1:], turned, turned, q[-1:], scale=0.1)


SAMPLE = [
    ((1, 4, 4, 1, 1, 16), torch.float32, False, None),
    ((2, 6, 2, 1, 100, 40), torch.float16, True, None),
    ((3, 4, 1, 3, 90, 64), torch.bfloat16, True, [0, 90, 33]),
    ((1, 8, 2, 16, 50, 32), torch.float32, True, [20]),
    ((1, 2, 1, 2, 33, 256), torch.float16, True, None),
    ((1, 70, 1, 1, 40, 13), torch.float32, False, None),  # more rows than a tile takes
    ((2, 3, 3, 2, 17, 1), torch.float32, True, None),
    ((2, 4, 2, 3, 64, 16), torch.float32, True, None),  # whole heads and whole tiles, and a mask all the same
    ((1, 2, 1, 9, 4, 16), torch.float32, True, None),  # more queries than keys
    ((1, 4, 1, 2, 128, 16), torch.float32, True, None),  # the same, by split-KV
    ((1, 4, 4, 1, 64, 13), torch.float16, True, None),  # whole tiles that all rows see
    ((2, 4, 2, 1, 128, 16), torch.float32, True, [128, 70]),  # but for a length that ends in one
]


@exhaustive_on_gpu
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_decode_matches_float64_for_a_sample_of_shapes(case):
    check_decode(*case)


# Splits -------------------------------------------------------------------------------------------------------


def allocated_scratch(monkeypatch, call):
    """Run a call and return its scratch memory."""
    new, empty = [], plan.torch.empty
    monkeypatch.setattr(plan.torch, "empty", lambda *a, **o: new.append(empty(*a, **o)) or new[-1], raising=False)
    call()
    return max(new, key=lambda x: x.dim() == 1)


@pytest.mark.parametrize("programs", (1, 3, 5, 40))
@pytest.mark.parametrize("lengths", (None, [0, 150, 77]))
def test_decode_kernel_splits_keys_as_the_model_predicts(monkeypatch, programs, lengths):
    q, k, v, _ = detached_inputs(3, 4, 2, 1, 150, 16)
    key_lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    shape, d_pad, R = plan.shape_of(Tensors(q, k, v), one_length=True), 16, 2
    B_c = plan.decode_config(q, shape)[0].B_c
    scratch = allocated_scratch(monkeypatch, lambda: run_decode(q, k, v, key_lengths=key_lengths, programs=programs))
    call = plan.prepare(Tensors(q[:2], k[:2], v[:2]), Options(False, 1.0), programs=programs)
    assert call.attend.kernel is plan.stream_k_kernel  # else 4 heads would be split
    tiles = tuple(cdiv(n, B_c) for n in lengths or [150] * 3 for _ in range(2))
    shares = Shares(tiles, programs, smallest_share(R, d_pad, B_c, 4))
    shared = [(w, head) for head in range(6) for w in shares.readers(head) if len(shares.readers(head)) > 1]
    if not shared and lengths is None:  # no program shares a head with another
        assert scratch.numel() == 0
        return
    parts = programs + len(tiles)
    assert scratch.numel() == parts * R * (d_pad + 4)
    written = ~torch.isnan(scratch.view(parts, R, d_pad + 4)[:, :, : d_pad + 2]).any(2).any(1)
    assert written.nonzero().flatten().tolist() == sorted(w + head for w, head in shared)


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("batch, kv_heads, group", [(70000, 1, 1), (2, 70000, 1), (1, 40000, 128)])
def test_decode_grid_stays_within_the_gpu_limit(batch, kv_heads, group, splits):
    q, k = (torch.empty(batch, heads, n, 16, device="meta") for heads, n in ((group * kv_heads, 1), (kv_heads, 40)))
    grid = plan.prepare(Tensors(q, k, k), Options(causal=False, scale=1.0, num_splits=splits)).attend.grid
    x, *others = grid if isinstance(grid, tuple) else (grid,)
    assert x < 2**31 and all(side <= 65535 for side in others)


@pytest.mark.parametrize("programs", [37, 65, 130])
def test_merge_kernel_equals_SoftmaxState_merge(programs):
    """Parts that were never computed, some of them empty, of a head that so many programs have read: 64 in a round."""
    rng, R, d, scale = np.random.default_rng(programs), 4, 16, 0.3
    O, L = torch.full((1, R, 1, d), torch.nan, device=DEVICE), torch.full((1, R, 1), torch.nan, device=DEVICE)
    scratch = torch.full((programs, R, d + 4), torch.nan)
    state = SoftmaxState.empty(R, d)
    for part in scratch:
        m, l, o = 3 * rng.standard_normal(R), rng.random(R) + 0.5, rng.standard_normal((R, d))
        m[rng.random(R) < 0.3] = -np.inf
        m[3] = -np.inf  # a row that nobody has seen a key of
        l[np.isneginf(m)], o[np.isneginf(m)] = 0, 0
        m = m.astype(np.float32).astype(float)
        part[:, :d], part[:, d], part[:, d + 1] = map(torch.from_numpy, (o, m, l))
        state = state.merge(SoftmaxState(scale * m, l, o))
    blocks = tables.KernelConfig(16, 16, 1, 1, d_pad=d)
    shape = plan.Shape(1, 1, R, 1, 16 * (programs - 1), d, 0, 0, 0, True)
    partition = plan.Partition(splits=0, programs=programs, share=1, whole_heads=False)
    common = dict(strides=plan.strides_of(Tensors(O, O, O)), N_k=shape.N_k)
    common |= dict(scales=softmax.make_scales(scale, softcap=None))
    common |= dict(sizes=plan.sizes_of(shape, blocks, (None, None)))
    common |= dict(const=plan.constants_of(shape, blocks, (None, None), partition, slots=programs, early_merge=False))
    guard = torch.full((R * (d + 4),), 1e30)  # what lies behind the last part is nobody's
    plan.prepare_merge(shape, blocks, partition, common)(O, L, torch.cat([scratch.flatten(), guard]).to(DEVICE), None)
    for got, want in zip((O[0, :, 0], L[0, :, 0]), state.finalize(), strict=True):
        assert largest_error(got, torch.from_numpy(want).to(DEVICE)) < 1e-5
    assert (O[0, 3] == 0).all() and L[0, 3] == -torch.inf


def test_decode_cache_distinguishes_changed_calls(monkeypatch):
    """Another device, dtype, layout, option, cut, or where lengths are known: something else is prepared."""
    prepared = []
    monkeypatch.setattr(plan, "prepare", lambda *given: prepared.append(given) or (lambda *tensors: None))
    q, k, v, _ = detached_inputs(1, 2, 1, 1, 40, 16)
    lengths, options = torch.tensor([40], device=DEVICE), Options(causal=False, scale=1.0)
    other_options = Options(True, 1.0), Options(False, 2.0), options._replace(left=3), options._replace(softcap=3.0)
    base, with_lengths = Tensors(q, k, v), Tensors(q, k, v, key_lengths=lengths)
    calls = [(base, dict(options=x)) for x in (options, *other_options)]
    calls += [(base, dict(options=options, programs=3)), (with_lengths, dict(options=options))]
    calls += [(base._replace(sinks=torch.zeros(2, device=DEVICE)), dict(options=options))]
    block_tables = (torch.zeros(1, n, dtype=torch.int32, device=DEVICE) for n in (2, 3))
    calls += [(with_lengths._replace(block_table=table), dict(options=options)) for table in block_tables]
    changed_tensors = [x.to("meta") for x in (q, k, v)], [x.half() for x in (q, k, v)], (q, k, v.mT.contiguous().mT)
    calls += [(Tensors(*given), dict(options=options)) for given in (*changed_tensors, (q, k[:, :, :39], v[:, :, :39]))]
    for _ in range(2):
        for given, more in calls:
            plan.decode(given, **more)
    assert len(prepared) == len(calls)


def test_decode_merges_shares_that_span_several_heads():
    """64 rows of short heads: the smallest share worth its part is longer than a head, and no multiple of it."""
    check_decode((3, 64, 4, 4, 20, 16), causal=True, programs=12)


def test_work_is_a_flat_tuple_of_tensors():
    """Inside a loop, Triton 3.6 replaces a size of 1 that is nested two tuples deep by None."""
    assert set(kernel.Work.__annotations__.values()) == {kernel.tl.tensor}


# Any mask and any cut ----------------------------------------------------------------------------------------


WINDOW_SIDES = st.none() | st.integers(0, 40)


@hypothesis.given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 3)]),
    N_q=st.integers(1, 5),
    N_k=st.integers(1, 90),
    window=st.tuples(WINDOW_SIDES, WINDOW_SIDES),
    fractions=st.lists(st.floats(0, 1), min_size=3, max_size=3) | st.none(),
    first_is_empty=st.booleans(),
    programs=st.none() | st.integers(1, 9),
    slots=st.sampled_from([4, 6, 12, 24]),
    max_rows=st.sampled_from([16, 64]),
    with_sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
@hypothesis.example(1, (1, 1), 1, 90, (0, 0), None, False, None, 6, 64, True, None)
@hypothesis.example(1, (2, 2), 4, 90, (40, 0), None, False, None, 4, 64, True, None)  # begins inside the first split
@hypothesis.example(2, (2, 2), 1, 80, (10, 0), None, False, None, 4, 64, False, None)  # whole heads, whole tiles
@hypothesis.example(2, (4, 1), 5, 88, (23, None), None, False, None, 4, 16, True, None)
@hypothesis.example(2, (2, 2), 1, 90, (40, 0), None, False, 2, 4, 64, False, None)  # shares that end within a head
@hypothesis.example(3, (2, 2), 3, 80, (10, 0), [0.2, 1.0, 0.9], True, 3, 4, 64, True, None)  # one before its window
@hypothesis.example(3, (4, 1), 5, 70, (None, 3), [0.9, 0.1, 0.5], True, 5, 4, 16, False, 2.0)
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def test_decode_matches_float64_for_any_split_and_mask(
    batch, heads, N_q, N_k, window, fractions, first_is_empty, programs, slots, max_rows, with_sinks, softcap
):
    """Windows, unequal lengths with zeros among them, sinks; keys that no row may see hold NaN."""
    (H, H_kv), draw = heads, torch.Generator().manual_seed(N_k)
    q, k, v = (torch.randn(batch, h, n, 16, generator=draw).to(DEVICE) for h, n in ((H, N_q), (H_kv, N_k), (H_kv, N_k)))
    lengths = None
    if fractions is not None:
        lengths = torch.tensor([round(x * N_k) for x in fractions[:batch]], device=DEVICE)
        lengths[0] *= not first_is_empty
    sinks = torch.linspace(-1, 1, H, device=DEVICE) if with_sinks else None
    want = dense_truth(q, k, v, q, scale=0.5, lengths=lengths, window=window, softcap=softcap, sinks=sinks)
    for b in range(batch):
        k[b, :, N_k if lengths is None else lengths[b] :] = torch.nan
        if window[0] is not None:
            k[b, :, : max(0, N_k - N_q - window[0])] = torch.nan
    v = torch.where(k.isnan(), torch.nan, v)
    options = Options(causal=window[1] == 0, scale=0.5, left=window[0], softcap=softcap)
    options = options if window[1] == 0 else options._replace(right=window[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_ROWS", max_rows)
        decode_config = plan.decode_config
        patch.setattr(plan, "decode_config", lambda *given: (decode_config(*given)[0], slots))
        cache.clear_caches()
        got = plan.decode(Tensors(q, k, v, lengths, sinks=sinks), options, programs=programs)
    for name, a, b in zip("OL", got, want, strict=False):
        assert largest_error(a, b) < 1e-5, name


# Lengths and masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.uint8))
def test_decode_does_not_read_keys_past_a_key_length(dtype):
    lengths = torch.tensor([0, 1, 16, 99, 100], dtype=dtype, device=DEVICE)
    q, k, v, dO = detached_inputs(5, 4, 2, 3, 100, 16)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:] = v[b, :, n:] = torch.nan
    O, L = run_decode(q, k, v, causal=True, scale=0.25, key_lengths=lengths)
    assert (O[0] == 0).all() and (L[0] == -torch.inf).all()
    check_output((O, L), q, k.nan_to_num(), v.nan_to_num(), dO, causal=True, lengths=lengths)


def test_decode_clamps_key_lengths_to_the_cache():
    q, k, v, _ = detached_inputs(2, 2, 1, 1, 50, 16)
    outside, inside = (torch.tensor(x, device=DEVICE) for x in ([-3, 2**40], [0, 50]))
    for a, b in zip(run_decode(q, k, v, key_lengths=outside), run_decode(q, k, v, key_lengths=inside), strict=True):
        assert torch.equal(a, b)


def test_decode_supports_many_sequences(monkeypatch):
    """More than the kernels look at together."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernel, "CHUNK", kernel.tl.constexpr(4))
    batch = 600 if DEVICE == "cuda" else 11
    lengths = (torch.arange(batch) * 7 % 41).tolist()
    check_decode((batch, 1, 1, 1, 40, 16), lengths=lengths, programs=5)


# Numbers that break kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (133120.0, -133120.0, 2.0**40))
def test_decode_is_exact_for_huge_equal_scores(size):
    q, k = torch.full((1, 2, 1, 64), abs(size), device=DEVICE), torch.full((1, 1, 200, 64), size, device=DEVICE)
    v = torch.randn(1, 1, 200, 64, device=DEVICE)
    O, L = run_decode(q, k, v, scale=0.125, programs=5)
    assert largest_error(O, v.mean(2, keepdim=True).expand_as(O)) < 1e-5
    assert torch.allclose(L, torch.full_like(L, abs(size) * size * 8), rtol=1e-6)


@pytest.mark.parametrize("logit", (1e4, -1e4, -6e4))
def test_decode_is_accurate_for_large_scores(logit):
    q, k, v, dO = detached_inputs(1, 2, 1, 2, 130, 16)
    q.zero_()[..., 0], k.zero_()[..., 0] = 1.0, logit + torch.arange(130, device=DEVICE) % 7
    got = run_decode(q, k, v, causal=True, programs=5)
    check_output(got, q, k, v, dO, causal=True, scale=1.0, rough=True)


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy, for the interpreter
@pytest.mark.parametrize("scale", (1e30, 1e37, 1e38))
def test_decode_is_right_for_scores_beyond_fp32(scale):
    """The largest score takes all the weight. L is infinite where fp32 cannot hold it, and O is right all the same."""
    q, k, v, _ = detached_inputs(1, 2, 1, 3, 50, 16)
    s = q.double() @ k.double().mT
    for programs in (1, 5):
        O, L = run_decode(q, k, v, scale=scale, programs=programs)
        assert torch.equal(O, v[0, 0, s.argmax(-1)])
        assert torch.allclose(L, (scale * s.amax(-1)).float(), rtol=1e-6)


# Memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (1, 1)])
def test_decode_accepts_strided_inputs(heads, kv_heads):
    """Rows, heads or batch entries apart, an odd start, one head out of many, one entry for all."""
    q, k, v, _ = detached_inputs(2, heads, kv_heads, 3, 50, 24)
    want = run_decode(q, k, v, causal=True, scale=0.2)
    for view in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: torch.cat([x[..., :1], x], 3)[..., 1:],
        lambda x: torch.stack([x * torch.nan, x], 2).flatten(1, 2)[:, 1::2],
    ):
        for inputs in ((view(q), view(k), view(v)), (q, k, view(v)), (view(q), k, v)):
            for a, b in zip(run_decode(*inputs, causal=True, scale=0.2), want, strict=True):
                assert largest_error(a, b) < 1e-5
    expanded = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)]
    for a, b in zip(run_decode(*expanded, causal=True, scale=0.2), want, strict=True):
        assert largest_error(a, b[:1].expand_as(a)) < 1e-5 and a.stride(0) > 0


# attention() --------------------------------------------------------------------------------------------------


def test_attention_uses_decode_kernels_for_few_query_rows(monkeypatch):
    prepared = []
    real = plan.prepare
    monkeypatch.setattr(plan, "prepare", lambda *a, **o: prepared.append(a[0].q.shape) or real(*a, **o))
    q, k, v, dO = random_inputs(1, 4, 2, 3, 90, 16)
    got = run_with_gradients(fa2_lab.attention, q, k, v, dO, causal=True)
    assert len(prepared) == 1
    check_accuracy(got, dense_truth(q, k, v, dO, True), dense_truth(q, k, v, dO, True, dtype=torch.float32))
    fa2_lab.attention(q, k, v, dropout_p=0.5, seed=1)
    fa2_lab.attention(*(x.detach() for x in random_inputs(1, 1, 1, 65, 90, 16)[:3]))
    assert len(prepared) == 1


# How it is launched ---------------------------------------------------------------------------------------------


def test_num_splits_makes_the_choice_of_decode_independent_of_lengths():
    """Else the result of a sequence would depend on the longest one of its batch."""
    q = torch.empty(1, 64, 1, 64, device="meta")
    assert all(plan.is_fastest(q, torch.empty(1, 1, N_k, 64, device="meta"), num_splits=1) for N_k in (1, 9999))
