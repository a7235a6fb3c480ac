"""attention_packed(): against dense attention sequence by sequence, in float64."""

import pytest
import torch
from attention_rooms import gpu
from kernel_truth import DEVICE, NAMES, dense, judge, run, worst
from test_masks import truth

import fa2_lab
from fa2_lab.api import operators
from fa2_lab.api.packed import attention_packed, pairs
from fa2_lab.kernels.portable import backward as backward_room
from fa2_lab.kernels.portable import forward as forward_room

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs hold NaN until they are written."""

    def poison(make):
        return lambda *given, **options: make(*given, **options).fill_(NAN)

    fake = type("torch", (), {"__getattr__": lambda _, name: getattr(torch, name)})()
    fake.empty, fake.empty_like = poison(torch.empty), poison(torch.empty_like)
    for room in (forward_room, backward_room):
        monkeypatch.setattr(room, "torch", fake)


def starts(lengths):
    """Where sequences of these lengths begin, and where the last ends."""
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def fenced(total, heads, d, dtype, draw, size=1.0):
    """Normal random (total, heads, d) amid NaN: rows before and behind, heads between, and columns behind."""
    room = torch.full((total + 4, heads + 2, d + 3), NAN)
    room[2:-2, 1:-1, :d] = torch.randn(total, heads, d, generator=draw) * size
    return room.to(DEVICE, dtype)[2:-2, 1:-1, :d]


def drawn(n_q, n_k, heads=1, kv_heads=1, d=16, dtype=torch.float32, seed=0):
    """q, k, v that want gradients, dO, and both starts."""
    draw = torch.Generator().manual_seed(seed)
    q, dO = (fenced(sum(n_q), heads, d, dtype, draw) for _ in range(2))
    k, v = (fenced(sum(n_k), kv_heads, d, dtype, draw) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dO, starts(n_q), starts(n_k)


def by_definition(q, k, v, dO, cu_q, cu_k, dL=None, **options):
    """(O, L, dQ, dK, dV): each sequence for itself."""
    found = []
    for (a, b), (c, d) in zip(*(zip(x.tolist(), x[1:].tolist(), strict=False) for x in (cu_q, cu_k)), strict=True):
        one = [x.detach().transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d], dO[a:b])]
        part = dense(*one, dL=None if dL is None else dL[None, :, a:b], **options)
        found.append([part[1][0], *(x[0].transpose(0, 1) for x in (part[0], *part[2:]))])
    L, O, *gradients = (list(column) for column in zip(*found, strict=True))
    return torch.cat(O), torch.cat(L, 1), *map(torch.cat, gradients)


MASKS = dict(causal=False, window=None, softcap=None)


def check_masks(n_q, n_k, sink=False, backend="auto", **options):
    """The call with masks beyond the causal one, its dsinks too."""
    q, k, v, dO, cu_q, cu_k = drawn(n_q, n_k, heads=2)
    options, draw = MASKS | options, torch.Generator().manual_seed(1)
    sinks = torch.randn(2, generator=draw).to(DEVICE).requires_grad_() if sink else None
    dL = torch.randn(2, sum(n_q), generator=draw).to(DEVICE)
    O, L = attention_packed(q, k, v, cu_q, cu_k, sinks=sinks, return_lse=True, backend=backend, **options)
    got = O, L, *torch.autograd.grad((O, L), [q, k, v] + [sinks] * sink, (dO, dL))
    parts = []
    for a, c in zip(pairs(cu_q), pairs(cu_k), strict=True):
        one = [x[slice(*at)].transpose(0, 1)[None] for x, at in ((q, a), (k, c), (v, c), (dO, a))]
        parts.append(truth(*one, dL[None, :, slice(*a)], sinks=sinks, lengths=None, **options))
    for name, x, *each in zip((*NAMES, "dsinks"), got, *parts, strict=False):
        if name == "dsinks":
            whole = sum(each)
        elif name == "L":
            whole = torch.cat([part[0] for part in each], 1)
        else:
            whole = torch.cat([part[0].transpose(0, 1) for part in each])
        assert worst(x, whole) < 2e-5 * max(1.0, whole.nan_to_num(0, 0, 0).abs().max().item()), name


def check(n_q, n_k=None, dL=False, causal=True, scale=None, backend="auto", **more):
    """Run the call and judge it."""
    q, k, v, dO, cu_q, cu_k = drawn(n_q, n_q if n_k is None else n_k, **more)
    dL = torch.randn(q.shape[1], q.shape[0], generator=torch.Generator().manual_seed(9)).to(DEVICE) if dL else None
    options = dict(causal=causal, scale=scale)
    got = run(attention_packed, q, k, v, dO, dL, cu_q=cu_q, cu_k=cu_k, backend=backend, **options)
    assert [x.dtype for x in got] == [q.dtype, torch.float32, q.dtype, q.dtype, q.dtype]
    given = q, k, v, dO, cu_q, cu_k, dL
    judge(got, by_definition(*given, **options), by_definition(*given, dtype=q.dtype, **options), f"{n_q} {n_k}")
    return got


# Right --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, causal", [*zip(DTYPES, (True, False, True), strict=True)], ids=str)
def test_lengths_of_every_kind(dtype, causal):
    check([0, 1, 40, 0, 33], dtype=dtype, causal=causal)


def test_queries_and_keys_of_different_numbers():
    """The last row of a sequence sees its last key; rows that see no key, and keys that nobody sees, give zeros."""
    O, L, dQ, dK, dV = check([5, 36, 0, 2], [40, 7, 9, 0], dL=True, heads=2)
    nothing, unseen = slice(41, 43), slice(47, 56)  # the fourth has queries and no keys, the third keys and no queries
    assert (O[nothing] == 0).all() and (L[:, nothing] == -torch.inf).all() and (dQ[nothing] == 0).all()
    assert (dK[unseen] == 0).all() and (dV[unseen] == 0).all()


def test_tiny_sequences():
    check([1, 0, 2, 1, 1, 0, 3, 1])


FEW = [
    dict(window=(3, 1)),
    dict(window=(4, None), causal=True, sink=True),
    dict(softcap=1.5, sink=True),
    dict(window=(30, 2), softcap=1.5, sink=True),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FEW, ids=str)
def test_windows_softcap_and_sinks_in_long_sequences(case):
    check_masks([70, 0, 129, 1, 30], [150, 9, 64, 33, 30], **case)


@pytest.mark.parametrize("heads, kv_heads, d", ((1, 1, 5), (4, 2, 24)))
def test_heads_and_head_dimensions(heads, kv_heads, d):
    check([5], heads=heads, kv_heads=kv_heads, d=d)


@pytest.mark.parametrize("n_q, n_k", (([3, 2], [0, 0]), ([0, 0], [4, 1]), ([0], [0])), ids=str)
def test_without_anything_to_see(n_q, n_k):
    q, k, v, dO, cu_q, cu_k = drawn(n_q, n_k)
    O, L, *gradients = run(attention_packed, q, k, v, dO, cu_q=cu_q, cu_k=cu_k, causal=True)
    assert O.shape == q.shape and L.shape == (1, sum(n_q)) and (L == -torch.inf).all()
    assert all((x == 0).all() for x in (O, *gradients))


def test_the_reference_behind_the_same_call():
    check([0, 20, 0, 7], backend="reference", dL=True, heads=4, kv_heads=2)
    check([20, 3, 7], [9, 0, 9], backend="reference", causal=False)


@pytest.mark.parametrize("poison", (0, 1))
def test_no_sequence_reads_another(poison):
    """With NaN in one sequence, all others are what they would be alone."""
    lengths = [3, 20, 2]
    q, k, v, dO, cu, _ = drawn(lengths, lengths)
    rows, others = slice(*cu[poison : poison + 2].tolist()), torch.ones(sum(lengths), dtype=torch.bool)
    others[rows] = False
    given = [x.detach().clone() for x in (q, k, v, dO)]
    for x in given:
        x[rows] = NAN
    got = run(attention_packed, *(x.requires_grad_() for x in given[:3]), given[3], cu_q=cu, cu_k=cu, causal=True)
    truth = by_definition(q, k, v, dO, cu, cu, causal=True)
    for name, a, t in zip(NAMES, got, truth, strict=True):
        a, t = (x.T if name == "L" else x for x in (a, t))
        assert worst(a[others], t[others]) < 1e-5 and a[rows].isnan().any(), name


@pytest.mark.exhaustive
def test_every_split_of_a_block():
    for n in (1, 31, 32, 33, 63, 64, 65):
        check([n, 66 - n])


@pytest.mark.exhaustive
def test_random_lengths():
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        n_q, n_k = (torch.randint(0, top, (6,), generator=draw).tolist() for top in (60, 90))
        more = dict(heads=4, kv_heads=2, d=64, dtype=DTYPES[seed % 3])
        check(n_q, n_k, seed=seed, causal=bool(seed % 2), dL=seed % 3 == 0, **more)
    check(torch.randint(0, 3, (300,), generator=draw).tolist())


@gpu
@pytest.mark.parametrize("d", (64, 128))
def test_many_blocks_on_a_gpu(d):
    check([1000, 17, 0, 333, 2049, 64, *[3] * 300], heads=4, kv_heads=2, d=d, dtype=torch.bfloat16)


# Starts that cannot be looked at ------------------------------------------------------------------------------


def kernels_alone(q, k, v, dO, cu_q, cu_k):
    """(O, L, dQ, dK, dV) with nobody looking at the starts first, as on a GPU."""
    O, L = torch.ops.fa2_lab.forward(q, k, v, None, None, None, cu_q, cu_k, True, 0.25)
    return O, L, *torch.autograd.grad(O, (q, k, v), dO)


@pytest.mark.parametrize("wild", ([0, 7, 4], [0, 2**31 - 1, 7], [0, -(2**31), 7], [7, 0, 0]), ids=str)
def test_starts_that_are_wrong_read_and_write_nothing_wild(wild):
    """Around the tensors lie NaN, which would be found in what is written, and there nothing may be written."""
    q, k, v, dO, good, _ = drawn([4, 3], [4, 3])
    cu = torch.tensor(wild, dtype=torch.int32, device=DEVICE)
    for pair in ((cu, good), (good, cu)):
        O, _ = torch.ops.fa2_lab.forward(q, k, v, None, None, None, *pair, True, 0.25)
        again = torch.autograd.grad(O, (q, k, v), dO)
        assert all(x.shape == y.shape for x, y in zip(again, (q, k, v), strict=True))
    assert not O.isnan().any()  # its rows are in order, only its keys were not


def test_a_start_outside_counts_as_the_nearest_inside():
    q, k, v, dO, good, _ = drawn([4, 3], [4, 3])
    wild = torch.tensor([2, 4, 99], dtype=torch.int32, device=DEVICE)  # and the first as 0
    want, got = (kernels_alone(q, k, v, dO, cu, cu) for cu in (good, wild))
    assert all(map(torch.equal, got, want))


def test_rows_behind_the_last_start_see_nothing():
    q, k, v, dO, *_ = drawn([40], [40])
    few = starts([2, 30])
    got = kernels_alone(q, k, v, dO, few, few)
    cut = (x[:32].detach().requires_grad_() for x in (q, k, v))
    want = kernels_alone(*cut, dO[:32], few, few)
    for name, a, b in zip(NAMES, got, want, strict=True):
        a, b = (x.T if name == "L" else x for x in (a, b))
        assert torch.equal(a[:32], b) and (a[32:] == (-torch.inf if name == "L" else 0)).all(), name


# The call -----------------------------------------------------------------------------------------------------

GOOD = dict(zip(("q", "k", "v", "dO", "cu_q", "cu_k"), drawn([3, 5], [6, 2], heads=4, kv_heads=2), strict=True))
del GOOD["dO"]


def zeros(*shape, dtype=torch.float32, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


def begins(*values, dtype=torch.int32, device=DEVICE):
    return torch.tensor(values, dtype=dtype, device=device)


BAD = [
    ("q", TypeError, dict(q=3)),
    ("q", TypeError, dict(q=zeros(8, 4, 16, dtype=torch.float64))),
    ("q", ValueError, dict(q=zeros(1, 4, 8, 16))),
    ("q", ValueError, dict(q=zeros(8, 0, 16))),
    ("q", ValueError, dict(q=zeros(8, 4, 257))),
    ("q", ValueError, dict(q=zeros(8, 4, 16).to_sparse())),
    ("k", ValueError, dict(k=zeros(8, 3, 16))),
    ("k", ValueError, dict(k=zeros(8, 2, 8))),
    ("k", TypeError, dict(k=zeros(8, 2, 16, dtype=torch.float16))),
    ("k", ValueError, dict(k=zeros(8, 2, 16, device="meta"))),
    ("v", ValueError, dict(v=zeros(7, 2, 16))),
    ("v", TypeError, dict(v=None)),
    ("cu_q", TypeError, dict(cu_q=[0, 3, 8])),
    ("cu_q", TypeError, dict(cu_q=begins(0, 3, 8, dtype=torch.int64))),
    ("cu_q", ValueError, dict(cu_q=begins(0))),
    ("cu_q", ValueError, dict(cu_q=begins(0, 3, 8)[None])),
    ("cu_q", ValueError, dict(cu_q=begins(0, 3, 8, device="meta"))),
    ("cu_k", ValueError, dict(cu_k=begins(0, 8))),
    ("cu_k", TypeError, dict(cu_k=begins(0, 3, 8).float())),
    ("causal", TypeError, dict(causal=1)),
    ("window", ValueError, dict(window=(-1, 0))),
    ("window", TypeError, dict(window=3)),
    ("softcap", ValueError, dict(softcap=0.0)),
    ("sinks", ValueError, dict(sinks=zeros(3))),
    ("sinks", TypeError, dict(sinks=zeros(4, dtype=torch.int32))),
    ("scale", ValueError, dict(scale=float("inf"))),
    ("scale", ValueError, dict(scale=1e39)),
    ("return_lse", TypeError, dict(return_lse=0)),
    ("backend", ValueError, dict(backend="cuda")),
]
SEEN = [  # values, which are looked at where that waits for nobody
    ("cu_q", "got 1 as its first start", dict(cu_q=begins(1, 3, 8))),
    ("cu_q", "got 2 after 3", dict(cu_q=begins(0, 3, 2))),
    ("cu_k", "got 5 after 9", dict(cu_k=begins(0, 9, 5))),
    ("cu_q", "got 7 as its end", dict(cu_q=begins(0, 3, 7))),
    ("cu_k", "got 9 as its end", dict(cu_k=begins(0, 6, 9))),
]


def refused(change, monkeypatch):
    def launched(*_, **__):
        raise AssertionError("launched")

    monkeypatch.setattr(operators, "kernels", launched)
    return attention_packed(**GOOD | change)


@pytest.mark.parametrize("name, kind, change", BAD, ids=[f"{n}{i}" for i, (n, _, _) in enumerate(BAD)])
def test_bad_input_is_named_before_any_launch(name, kind, change, monkeypatch):
    with pytest.raises(kind, match=rf"^{name}: got .*it takes "):
        refused(change, monkeypatch)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nobody waits to see them")
@pytest.mark.parametrize("name, what, change", SEEN, ids=[f"{n}{i}" for i, (n, _, _) in enumerate(SEEN)])
def test_starts_are_looked_at(name, what, change, monkeypatch):
    with pytest.raises(ValueError, match=rf"^{name}: {what}.*it takes "):
        refused(change, monkeypatch)


def test_it_is_one_of_the_package_s_calls():
    assert fa2_lab.attention_packed is attention_packed
    assert torch.equal(attention_packed(**GOOD), attention_packed(**GOOD, return_lse=True)[0])


@gpu
def test_nothing_waits_for_the_gpu():
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            attention_packed(**GOOD).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# As an operator -----------------------------------------------------------------------------------------------


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize(
    "tests", (QUICK, pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.exhaustive)), ids=("", "dynamic")
)
def test_opcheck(tests):
    q, k, v, dO, cu_q, cu_k = drawn([2], [3])
    sinks = torch.zeros(1, device=DEVICE, requires_grad=True)
    rest = None, None, sinks, cu_q, cu_k, True, 0.25, 0.0, 3, None, 2.0
    torch.library.opcheck(torch.ops.fa2_lab.forward.default, (q, k, v, *rest), test_utils=tests)
    O, L = (x.detach() for x in torch.ops.fa2_lab.forward(q, k, v, *rest))
    plain, sinks = [x.detach() for x in (q, k, v)], sinks.detach()
    rest = None, None, sinks, *rest[3:]
    for dL in (torch.ones_like(L), None):
        torch.library.opcheck(torch.ops.fa2_lab.backward.default, (dO, dL, O, L, *plain, *rest), test_utils=tests)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_compiled(backend):
    def f(q, k, v, cu_q, cu_k):
        O, L = fa2_lab.attention_packed(q * 1.5, k, v, cu_q, cu_k, causal=True, return_lse=True)
        return O.sin() + L.T[..., None]

    q, k, v, dO, *cu = drawn([2, 1], [2, 3])
    want = torch.autograd.grad(f(q, k, v, *cu), (q, k, v), dO)
    got = torch.autograd.grad(torch.compile(f, backend=backend, fullgraph=True)(q, k, v, *cu), (q, k, v), dO)
    torch._dynamo.reset()
    assert all(worst(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@gpu
def test_in_a_cuda_graph():
    """Other lengths in the same graph: it holds no length."""
    q, k, v, _, cu, _ = drawn([300, 400], [300, 400], dtype=torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention_packed(q, k, v, cu, cu, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        O = attention_packed(q.detach(), k.detach(), v.detach(), cu, cu, causal=True)
    for lengths in ([300, 400], [1, 699], [650, 50]):
        cu.copy_(starts(lengths))
        graph.replay()
        assert torch.equal(O, attention_packed(q, k, v, cu, cu, causal=True))
