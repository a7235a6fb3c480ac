"""Decode against float64: a GPU takes the whole product of shapes, Triton's interpreter a thin slice."""

import numpy as np
import pytest
import torch
from kernel_truth import ALLOWED, DEVICE, GPU, dense, judge, run, tensors, worst

import fa2_lab
from fa2_lab.kernels import decode as room
from fa2_lab.kernels import launch
from fa2_lab.machine.splits import Cache, Shares, least_share
from fa2_lab.reference.online_softmax import SoftmaxState

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs and scratch hold NaN until they are written; the interpreter gets small tiles, so that there are many."""

    def poison(make):
        return lambda *arguments, **options: make(*arguments, **options).fill_(NAN)

    fake = type("torch", (), {"__getattr__": lambda _, name: getattr(torch, name)})()
    fake.empty, fake.empty_like = poison(torch.empty), poison(torch.empty_like)
    monkeypatch.setattr(room, "torch", fake)
    monkeypatch.setattr(room, "INTERPRETED", (16, 1, 1, 4))
    monkeypatch.setattr(launch, "PLANS", {})


def near(got, q, k, v, dO, what="", rough=False, **options):
    """(O, L) is as near to float64 as the accuracy rule asks."""
    truth, torchs = dense(q, k, v, dO, **options), dense(q, k, v, dO, dtype=q.dtype, **options)
    lost = 2.0**-22 * truth[1].nan_to_num(0, 0, 0).abs().max().item() if rough else 0.0
    for name, a, t, b in zip("OL", got, truth, torchs, strict=False):
        mine, theirs, size = worst(a, t), worst(b, t), max(1.0, t.nan_to_num(0, 0, 0).abs().max().item())
        assert mine <= ALLOWED[name] * theirs + 1e-5 + lost * size, f"{name}: {mine:.2e}, torch {theirs:.2e} {what}"


def drawn(*shape, **more):
    return [x.detach() for x in tensors(*shape, **more)]


def check(shape, dtype=torch.float32, causal=False, lengths=None, scale=None, programs=None, **more):
    q, k, v, dO = drawn(*shape, dtype=dtype)
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    got = room.decode(q, k, v, lengths, causal, shape[5] ** -0.5 if scale is None else scale, programs=programs)
    what = f"{shape} {dtype} causal {causal} lengths {lengths} programs {programs}"
    near(got, q, k, v, dO, what, causal=causal, lengths=lengths, scale=scale, **more)
    return got


# The product --------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", (1, 40, 64, 96, 128, 256))
def test_whole_product(d, dtype):
    for N_k in (1, 64, 65, 1000, 5001):
        check((2, 8, 2, 1, N_k, d), dtype)
        check((2, 8, 2, 7, N_k, d), dtype, causal=True)
    check((3, 8, 2, 7, 3000, d), dtype, causal=True, lengths=[0, 3000, 65])
    check((2, 40, 1, 2, 1000, d), dtype, causal=True)  # more rows than a tile takes


@gpu
@pytest.mark.gpu
def test_a_graph_follows_the_lengths():
    """A recorded call reads lengths and table anew at every replay."""
    q, k, v, dO = drawn(3, 8, 2, 1, 5000, 128, dtype=torch.bfloat16)
    lengths = torch.tensor([5000, 64, 700], dtype=torch.int32, device=DEVICE)
    room.decode(q, k, v, lengths, False, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = room.decode(q, k, v, lengths, False, 0.1)
    for change in ([1, 2, 3], [0, 5000, 4999], [640, 640, 640]):
        lengths.copy_(torch.tensor(change))
        graph.replay()
        near(got, q, k, v, dO, scale=0.1, lengths=lengths)


@gpu
@pytest.mark.gpu
def test_the_same_bits_every_time():
    q, k, v, _ = drawn(2, 32, 8, 1, 20000, 128, dtype=torch.bfloat16)
    want = room.decode(q, k, v, None, False, 0.1)
    for _ in range(200):
        assert all(map(torch.equal, room.decode(q, k, v, None, False, 0.1), want))


@gpu
@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count():
    """The last of 70 sequences lies behind 2³¹ elements, and its pages, too."""
    k = torch.zeros(70, 8, 32768, 128, dtype=torch.float16, device=DEVICE)
    k[-1].normal_()
    q = torch.randn(70, 8, 1, 128, dtype=torch.float16, device=DEVICE)
    O, L = room.decode(q, k, k, None, False, 0.1)
    near((O[-1:], L[-1:]), q[-1:], k[-1:], k[-1:], q[-1:], scale=0.1)
    pages = k.view(70 * 512, 64, 8, 128)
    table = torch.arange(70 * 512, device=DEVICE).view(70, 512)
    lengths = torch.full((70,), 32768, device=DEVICE)
    O, L = room.decode(q, pages, pages, lengths, True, 0.1, table)
    turned = pages[-512:].flatten(0, 1).transpose(0, 1)[None]
    near((O[-1:], L[-1:]), q[-1:], turned, turned, q[-1:], scale=0.1)


SLICE = [
    ((1, 4, 4, 1, 1, 16), torch.float32, False, None),
    ((2, 6, 2, 1, 100, 40), torch.float16, True, None),
    ((3, 4, 1, 3, 90, 64), torch.bfloat16, True, [0, 90, 33]),
    ((1, 8, 2, 16, 50, 32), torch.float32, True, [20]),
    ((2, 32, 8, 1, 70, 128), torch.bfloat16, False, [70, 1]),
    ((1, 2, 1, 2, 33, 256), torch.float16, True, None),
    ((1, 70, 1, 1, 40, 13), torch.float32, False, None),  # more rows than a tile takes
    ((2, 3, 3, 2, 17, 1), torch.float32, True, None),
]


@pytest.mark.parametrize("case", SLICE, ids=str)
def test_slice_of_the_product(case):
    check(*case)


# Splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", (None, [0, 150, 77]))
def test_any_number_of_programs_gives_the_same(lengths):
    results = [check((3, 4, 2, 2, 150, 16), causal=True, lengths=lengths, programs=n) for n in (1, 2, 3, 7, 40)]
    for O, L in results[1:]:
        assert worst(O, results[0][0]) < 1e-6 and worst(L, results[0][1]) < 1e-6


def scratch_of(monkeypatch, call):
    """What a call leaves in its scratch."""
    kept, empty = [], room.torch.empty
    monkeypatch.setattr(room.torch, "empty", lambda *a, **o: kept.append(empty(*a, **o)) or kept[-1], raising=False)
    call()
    return max(kept, key=lambda x: x.dim() == 1)


@pytest.mark.parametrize("programs", (1, 3, 5, 40))
@pytest.mark.parametrize("lengths", (None, [0, 150, 77]))
def test_the_kernel_shares_as_the_model_says(monkeypatch, programs, lengths):
    q, k, v, _ = drawn(3, 4, 2, 1, 150, 16)
    given = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    B_c, d_pad, R = room.sizes(q, 2, False)[0].B_c, 16, 2
    parts = scratch_of(monkeypatch, lambda: room.decode(q, k, v, given, False, 1.0, programs=programs))
    tiles = Cache(tuple(lengths or [150] * 3), 2, 16, B_c=B_c).tiles
    shares = Shares(tiles, programs, least_share(R, d_pad, B_c, 4))
    assert parts.numel() == shares.slots * R * (d_pad + 2)
    written = ~torch.isnan(parts[: shares.slots * R * d_pad].view(shares.slots, -1)).any(1)
    several = [(w, head) for head in range(6) for w in shares.readers(head) if len(shares.readers(head)) > 1]
    assert written.nonzero().flatten().tolist() == sorted(shares.slot(*at) for at in several)


def parts_of(states, R, d_pad, slots):
    """States of (R,) rows as the scratch holds them."""
    o, m, l = torch.full((slots, R, d_pad), NAN), torch.full((slots, R), NAN), torch.full((slots, R), NAN)
    for slot, state in states.items():
        o[slot], m[slot], l[slot] = (torch.from_numpy(x) for x in (state.o, state.m, state.l))
    return torch.cat([x.flatten() for x in (o, m, l)]).to(DEVICE)


@pytest.mark.parametrize("seed", range(3))
def test_the_merge_kernel_is_SoftmaxState_merge(monkeypatch, seed):
    """Parts that were never computed, some of them empty, in a head that 37 programs have read."""
    rng, R, d, scale = np.random.default_rng(seed), 4, 16, 0.3
    O, L = torch.full((1, 4, 1, d), NAN, device=DEVICE), torch.full((1, 4, 1), NAN, device=DEVICE)
    states = []
    for _ in range(37):
        m, l, o = 30 * rng.standard_normal(R), rng.random(R) + 0.5, rng.standard_normal((R, d))
        m[rng.random(R) < 0.3] = -np.inf
        m[3] = -np.inf  # a row that nobody has seen a key of
        l[np.isneginf(m)], o[np.isneginf(m)] = 0, 0
        states.append(SoftmaxState(m.astype(np.float32).astype(float), l, o))
    parts = parts_of(dict(enumerate(states)), R, d, 38)
    options = *launch.scales(scale), d, d, 16, 16, False, 8, 8
    room.merge_kernel[(8,)](O, L, parts, None, O.stride()[:3], 4, 4, 1, 36 * 16, 1, 1, R, 37, 38, 1, *options)
    for order in (states, states[::-1]):
        whole = SoftmaxState.reset(R, d)
        for state in order:
            whole = whole.merge(SoftmaxState(scale * state.m, state.l, state.o))
        o, L_want = whole.finalize()
        assert worst(O[0, :, 0], torch.from_numpy(o).to(DEVICE)) < 1e-5
        assert worst(L[0, :, 0], torch.from_numpy(L_want).to(DEVICE)) < 1e-5
    assert (O[0, 3] == 0).all() and L[0, 3] == -torch.inf


# Lengths and masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.uint8))
def test_keys_behind_a_length_are_not_touched(dtype):
    lengths = torch.tensor([0, 1, 16, 99, 100], dtype=dtype, device=DEVICE)
    q, k, v, dO = drawn(5, 4, 2, 3, 100, 16)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:] = v[b, :, n:] = NAN
    O, L = room.decode(q, k, v, lengths, True, 0.25)
    assert (O[0] == 0).all() and (L[0] == -torch.inf).all()
    near((O, L), q, k.nan_to_num(), v.nan_to_num(), dO, causal=True, lengths=lengths)


def test_a_length_outside_counts_as_the_nearest_inside():
    q, k, v, _ = drawn(2, 2, 1, 1, 50, 16)
    outside, inside = (torch.tensor(x, device=DEVICE) for x in ([-3, 2**40], [0, 50]))
    for a, b in zip(room.decode(q, k, v, outside, False, 1.0), room.decode(q, k, v, inside, False, 1.0), strict=True):
        assert torch.equal(a, b)


def test_many_sequences(monkeypatch):
    """More than the kernels look at together."""
    if not GPU:
        monkeypatch.setattr(room, "LENGTHS", room.tl.constexpr(4))
    batch = 600 if GPU else 11
    lengths = (torch.arange(batch) * 7 % 41).tolist()
    check((batch, 1, 1, 1, 40, 16), lengths=lengths, programs=5)


def test_more_queries_than_keys():
    O, L = check((1, 2, 1, 9, 4, 16), causal=True)
    assert (O[:, :, :5] == 0).all() and (L[:, :, :5] == -torch.inf).all() and torch.isfinite(L[:, :, 5:]).all()


# Numbers that break kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (133120.0, -133120.0, 2.0**40))
def test_huge_equal_logits(size):
    q, k = torch.full((1, 2, 1, 64), abs(size), device=DEVICE), torch.full((1, 1, 200, 64), size, device=DEVICE)
    v = torch.randn(1, 1, 200, 64, device=DEVICE)
    O, L = room.decode(q, k, v, None, False, 0.125, programs=5)
    assert worst(O, v.mean(2, keepdim=True).expand_as(O)) < 1e-5
    assert torch.allclose(L, torch.full_like(L, abs(size) * size * 8), rtol=1e-6)


@pytest.mark.parametrize("logit", (1e4, -1e4, -6e4))
def test_large_logits(logit):
    q, k, v, dO = drawn(1, 2, 1, 2, 130, 16)
    q.zero_()[..., 0], k.zero_()[..., 0] = 1.0, logit + torch.arange(130, device=DEVICE) % 7
    got = room.decode(q, k, v, None, True, 1.0, programs=5)
    near(got, q, k, v, dO, causal=True, scale=1.0, rough=True)


def test_the_maximum_may_be_in_any_part():
    """One key outshines all others by far; every split but its own ends with next to no weight."""
    for where in (0, 31, 32, 99):
        q, k, v, dO = drawn(1, 2, 1, 1, 100, 16)
        k[:, :, where] = 40 * q.mean(1, keepdim=True)[:, :, 0]
        near(room.decode(q, k, v, None, False, 1.0, programs=7), q, k, v, dO, scale=1.0, rough=True)


def test_L_is_a_natural_logarithm():
    q, k, v, _ = drawn(1, 1, 1, 2, 77, 16)
    assert torch.allclose(room.decode(q * 0, k, v, None, False, 1.0)[1], torch.tensor(77.0, device=DEVICE).log())


# Memory -------------------------------------------------------------------------------------------------------


def test_strides_do_not_matter():
    q, k, v, _ = drawn(2, 4, 2, 3, 50, 24)
    want = room.decode(q, k, v, None, True, 0.2)
    for turn in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: torch.cat([x[..., :1], x], 3)[..., 1:],
    ):
        for inputs in ((turn(q), turn(k), turn(v)), (q, k, turn(v))):
            for a, b in zip(room.decode(*inputs, None, True, 0.2), want, strict=True):
                assert worst(a, b) < 1e-5


# Pages --------------------------------------------------------------------------------------------------------


def paged(k, v, lengths, page, seed=0):
    """The same cache in pages: in any order, with strangers between them, NaN in whatever nobody may read."""
    batch, H_kv, N_k, d = k.shape
    width = -(-N_k // page)
    draw = torch.Generator().manual_seed(seed)
    table = torch.randperm(batch * width + 3, generator=draw)[: batch * width].view(batch, width).int()
    pages = [torch.full((batch * width + 3, page, H_kv, d), NAN, dtype=k.dtype, device=DEVICE) for _ in "kv"]
    for b, n in enumerate(lengths):
        for key in range(n):
            for x, made in zip((k, v), pages, strict=True):
                made[table[b, key // page], key % page] = x[b, :, key]
        table[b, -(-n // page) :] = -(2**31)  # nobody's page
    return *pages, table.to(DEVICE)


@pytest.mark.parametrize("page", (1, 3, 16, 32, 40))
@pytest.mark.parametrize("causal", (False, True))
def test_pages(page, causal):
    lengths = [0, 80, 37]
    q, k, v, dO = drawn(3, 4, 2, 2, 80, 16)
    k_pages, v_pages, table = paged(k, v, lengths, page)
    O, L = room.decode(q, k_pages, v_pages, torch.tensor(lengths, device=DEVICE), causal, 0.25, table)
    assert (O[0] == 0).all() and (L[0] == -torch.inf).all()
    for b, n in ((1, 80), (2, 37)):  # the last key of each is the last that its last query sees
        near((O[b : b + 1], L[b : b + 1]), q[[b]], k[[b], :, :n], v[[b], :, :n], dO[[b]], causal=causal)


def test_pages_of_any_layout_and_shared_pages():
    q, k, v, _ = drawn(2, 4, 2, 1, 64, 16)
    lengths = torch.tensor([64, 50], device=DEVICE)
    k_pages, v_pages, table = paged(k, v, [64, 50], 16)
    want = room.decode(q, k_pages, v_pages, lengths, True, 0.25, table)
    both = torch.stack([k_pages, v_pages], 1)  # keys and values of a page side by side
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pages, v_pages)]
    for a, b in ((both[:, 0], both[:, 1]), heads_first, (k_pages, heads_first[1])):
        assert all(map(torch.equal, room.decode(q, a, b, lengths, True, 0.25, table), want))
    table[1, :2] = table[0, :2]  # a common beginning
    O, _ = room.decode(q, k_pages, v_pages, lengths, True, 0.25, table)
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]
    assert worst(O, room.decode(q, k, v, lengths, False, 0.25)[0]) < 1e-6


def test_a_page_outside_counts_as_the_nearest_inside():
    """In a CUDA graph nobody looks at the table before the kernel does."""
    q, k, v, _ = drawn(1, 2, 1, 1, 48, 16)
    lengths = torch.tensor([48], device=DEVICE)
    k_pages, v_pages = (x.transpose(1, 2).reshape(3, 16, 1, 16) for x in (k, v))
    outside, inside = (torch.tensor([x], device=DEVICE) for x in ([-5, 1, 99], [0, 1, 2]))
    for a, b in zip(
        *(room.decode(q, k_pages, v_pages, lengths, False, 1.0, x) for x in (outside, inside)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("programs", (4, 5))
def test_heads_that_one_program_reads_need_no_merge(monkeypatch, programs):
    """Four heads for four programs; for five, shares that end within a head."""
    merged = []
    real = room.merge_kernel
    spy = type("spy", (), {"__getitem__": lambda _, grid: merged.append(grid) or real[grid]})
    monkeypatch.setattr(room, "merge_kernel", spy())
    check((2, 4, 2, 1, 1000 if GPU else 70, 16), programs=programs)
    assert len(merged) == (programs == 5)


def test_shares_longer_than_a_head_are_merged_where_they_must_be():
    """64 rows of short heads: the smallest share worth its part is longer than a head, and no multiple of it."""
    check((3, 64, 4, 4, 20, 16), causal=True, programs=12)


# The public call ----------------------------------------------------------------------------------------------


def serving(dtype=torch.float32, page=16):
    """Arguments of attention_paged(), and the dense tensors they stand for."""
    lengths = [64, 0, 37]
    q, k, v, dO = drawn(3, 4, 2, 2, 64, 16, dtype=dtype)
    k_pages, v_pages, table = paged(k, v, lengths, page)
    arguments = dict(q=q, k_pages=k_pages, v_pages=v_pages, block_table=table)
    return arguments | dict(key_lengths=torch.tensor(lengths, device=DEVICE)), (k, v, dO)


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize(
    "dtype, scale", [*((dtype, None) for dtype in DTYPES), (torch.float32, 0.0), (torch.float16, -0.3)]
)
def test_attention_paged(dtype, backend, scale):
    arguments, (k, v, dO) = serving(dtype)
    O, L = fa2_lab.attention_paged(**arguments, scale=scale, return_lse=True, backend=backend)
    assert O.dtype == dtype and L.dtype == torch.float32 and (O[1] == 0).all() and (L[1] == -torch.inf).all()
    for b, n in ((0, 64), (2, 37)):
        cut = arguments["q"][[b]], k[[b], :, :n], v[[b], :, :n], dO[[b]]
        near((O[b : b + 1], L[b : b + 1]), *cut, causal=True, scale=scale)
    assert torch.equal(fa2_lab.attention_paged(**arguments, scale=scale, backend=backend), O)


def test_pages_and_lengths_may_be_of_any_integers_and_strides():
    arguments, _ = serving()
    want = fa2_lab.attention_paged(**arguments)
    arguments["block_table"] = arguments["block_table"].clamp(0).long().T.contiguous().T
    arguments["key_lengths"] = arguments["key_lengths"].to(torch.uint8)
    arguments["q"] = arguments["q"].mT.contiguous().mT
    assert torch.equal(fa2_lab.attention_paged(**arguments), want)


BAD = [
    ("q", TypeError, lambda a: dict(q=[1.0])),
    ("q", TypeError, lambda a: dict(q=a["q"].double())),
    ("q", ValueError, lambda a: dict(q=a["q"][0])),
    ("q", ValueError, lambda a: dict(q=a["q"][:, :, :0])),
    ("q", ValueError, lambda a: dict(q=a["q"].clone().requires_grad_())),
    ("q", ValueError, lambda a: dict(q=torch.zeros(3, 4, 1, 257, device=DEVICE))),
    ("k_pages", TypeError, lambda a: dict(k_pages=None)),
    ("k_pages", TypeError, lambda a: dict(k_pages=a["k_pages"].half())),
    ("k_pages", ValueError, lambda a: dict(k_pages=a["k_pages"].to("meta"))),
    ("k_pages", ValueError, lambda a: dict(k_pages=a["k_pages"][0])),
    ("k_pages", ValueError, lambda a: dict(k_pages=a["k_pages"][..., :8])),
    ("k_pages", ValueError, lambda a: dict(k_pages=a["k_pages"][:0])),
    ("k_pages", ValueError, lambda a: dict(k_pages=torch.zeros(9, 16, 3, 16, device=DEVICE))),
    ("k_pages", ValueError, lambda a: dict(k_pages=a["k_pages"].mT.contiguous().mT)),
    ("v_pages", ValueError, lambda a: dict(v_pages=a["v_pages"][1:])),
    ("v_pages", ValueError, lambda a: dict(v_pages=a["v_pages"].clone().requires_grad_())),
    ("block_table", TypeError, lambda a: dict(block_table=a["block_table"].tolist())),
    ("block_table", TypeError, lambda a: dict(block_table=a["block_table"].float())),
    ("block_table", ValueError, lambda a: dict(block_table=a["block_table"][:2])),
    ("block_table", ValueError, lambda a: dict(block_table=a["block_table"][0])),
    ("block_table", ValueError, lambda a: dict(block_table=a["block_table"].to("meta"))),
    ("block_table", ValueError, lambda a: dict(block_table=a["block_table"] + 100)),
    ("block_table", ValueError, lambda a: dict(block_table=torch.full_like(a["block_table"], -1))),
    ("key_lengths", TypeError, lambda a: dict(key_lengths=[64, 0, 37])),
    ("key_lengths", TypeError, lambda a: dict(key_lengths=a["key_lengths"].float())),
    ("key_lengths", ValueError, lambda a: dict(key_lengths=a["key_lengths"][:2])),
    ("key_lengths", ValueError, lambda a: dict(key_lengths=a["key_lengths"] + 1)),
    ("key_lengths", ValueError, lambda a: dict(key_lengths=a["key_lengths"] - 1)),
    ("causal", TypeError, lambda a: dict(causal=None)),
    ("scale", ValueError, lambda a: dict(scale=float("inf"))),
    ("return_lse", TypeError, lambda a: dict(return_lse=1)),
    ("backend", ValueError, lambda a: dict(backend="cuda")),
]


@pytest.mark.parametrize("name, kind, change", BAD, ids=[f"{n}{i}" for i, (n, _, _) in enumerate(BAD)])
def test_bad_input_is_named_before_any_launch(name, kind, change, monkeypatch):
    monkeypatch.setattr(room, "decode", None)
    arguments, _ = serving()
    with pytest.raises(kind, match=rf"^{name}: got .*; (it|with .* it) takes"):
        fa2_lab.attention_paged(**arguments | change(arguments))


def test_the_table_is_looked_at_again_after_a_change():
    arguments, _ = serving()
    fa2_lab.attention_paged(**arguments)
    arguments["block_table"][0, 3] = 99
    with pytest.raises(ValueError, match="block_table: got pages from 0 to 99"):
        fa2_lab.attention_paged(**arguments)
    arguments["key_lengths"][0] = 48  # now nobody needs that page
    fa2_lab.attention_paged(**arguments)
    short, long = (torch.tensor([n, 0, 37], device=DEVICE) for n in (48, 64))  # two tensors, of the same version
    fa2_lab.attention_paged(**arguments | dict(key_lengths=short))
    with pytest.raises(ValueError, match="block_table"):
        fa2_lab.attention_paged(**arguments | dict(key_lengths=long))
    with torch.inference_mode():
        arguments, _ = serving()
        fa2_lab.attention_paged(**arguments)


def test_as_an_operator():
    arguments, _ = serving()
    inputs = *(arguments[n] for n in ("q", "k_pages", "v_pages", "block_table", "key_lengths")), True, 0.25
    torch.library.opcheck(torch.ops.fa2_lab.paged, inputs, test_utils=("test_schema", "test_faketensor"))
    shapes = torch.ops.fa2_lab.paged(*(x.to("meta") if torch.is_tensor(x) else x for x in inputs))
    assert [tuple(x.shape) for x in shapes] == [(3, 4, 2, 16), (3, 4, 2)]


# attention() --------------------------------------------------------------------------------------------------


def test_attention_takes_decode_for_few_rows(monkeypatch):
    asked = []
    real = room.prepare
    monkeypatch.setattr(room, "prepare", lambda *a, **o: asked.append(a[0].shape) or real(*a, **o))
    q, k, v, dO = tensors(1, 4, 2, 3, 90, 16)
    got = run(fa2_lab.attention, q, k, v, dO, causal=True)
    assert len(asked) == 1
    judge(got, dense(q, k, v, dO, True), dense(q, k, v, dO, True, dtype=torch.float32))
    fa2_lab.attention(q, k, v, dropout_p=0.5, seed=1)
    fa2_lab.attention(*(x.detach() for x in tensors(1, 1, 1, 65, 90, 16)[:3]))
    assert len(asked) == 1


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_a_negative_scale_turns_the_order_of_the_keys(backend):
    q, k, v, dO = tensors(1, 2, 1, 2, 40, 16)
    got = run(fa2_lab.attention, q, k, v, dO, scale=-0.5, backend=backend)
    judge(got, dense(q, k, v, dO, scale=-0.5), dense(q, k, v, dO, scale=-0.5, dtype=torch.float32))
