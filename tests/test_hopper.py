"""Hopper's forward: what it compiles to without a GPU, what it takes, and on such a GPU whether it is right."""

import gc
import subprocess
import sys
import weakref
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_worker import kinds
from kernel_truth import dense, judge, run, tensors, worst  # before Triton
from slices import compiled_by, dealt, once, shared_out

pytest.importorskip("triton")

from fa2_lab.kernels.prepared import Options

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
D, DTYPES, LENGTHS = (32, 64, 96, 128, 192, 256), (torch.float16, torch.bfloat16), (None, torch.int64, torch.uint8)
PAIRS = [
    (1, 239),
    (113, 203),
    (127, 513),
    (192, 192),
    (1023, 1024),
    (1024, 1023),
    (300, 50),
    (2048, 2048),
    (2100, 1999),
]


# Compiling without a GPU --------------------------------------------------------------------------------------


@compiled_by("hopper_worker.py")
def test_fits_and_spills_nothing(rows, jobs):
    assert len(rows) > (50 if jobs == "all" else 10)
    assert len({(row["causal"], row["keys"], row["N"]) for row in rows}) == 8, "a mask, or ragged tiles, are left out"
    for row in rows:
        assert row["ldl"] + row["stl"] + row["stack"] == 0, row
        assert row["shared"] <= 227 * 1024, row
        assert row["hgmma"] > 0 and row["hmma"] == 0 and not row["waits"], row
        assert not row["overwrites"] and not row["idle"] and not row["hasty"], row
        assert row["before"] == 1 + row["consumers"] + 2, "drawn earlier, blocks are as good as dealt"


# What they take -----------------------------------------------------------------------------------------------


def strides_of(*shape):
    return torch.empty(shape, device="meta").stride()


def test_copyable():
    from fa2_lab.kernels.hopper.shared.descriptors import copyable

    assert copyable((2, 4, 100, 64), strides_of(2, 4, 100, 64))
    assert copyable((2, 4, 100, 64), torch.empty(2, 100, 4, 64, device="meta").transpose(1, 2).stride())
    assert copyable((1, 4, 100, 64), (3, 6400, 64, 1)), "a dimension of 1 has no step"
    assert not copyable((2, 4, 100, 64), (0, 6400, 64, 1)), "repeated batch"
    assert not copyable((2, 4, 100, 64), (25600, 6400, 1, 100)), "last dimension not contiguous"
    assert not copyable((2, 4, 100, 64), (26400, 6600, 66, 1)), "rows not in steps of 16 bytes"
    assert not copyable((2, 4, 0, 64), strides_of(2, 4, 0, 64)), "nothing to copy"


def test_nothing_for_a_cpu():
    from fa2_lab.kernels.hopper.forward.launch import prepare

    Q = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    assert prepare(Q, Q, Q, Options(False, 0.1)) is None


@pytest.fixture
def some_hopper(monkeypatch):
    """As if tensors without data were on one."""
    from fa2_lab.kernels.hopper.forward import launch
    from fa2_lab.kernels.hopper.shared import host

    monkeypatch.setattr(host, "multiprocessors", lambda device: 132 * (device.type == "meta"))
    return launch


@pytest.mark.parametrize(
    "change, fine",
    [
        ({}, True),
        (dict(d=96), True),
        (dict(d=256), True),
        (dict(d=80), False),
        (dict(d=32), True),
        (dict(d=48), False),
        (dict(device="cpu"), False),
        (dict(dtype=torch.float32), False),
        (dict(V_dtype=torch.bfloat16), False),
        (dict(N_v=69), False),
        (dict(K_strides=(0, 0, 64, 1)), False),
        (dict(Q_strides=(6400, 3200, 1, 50)), False),
        (dict(lengths_strides=(1,)), True),
        (dict(lengths_strides=(2,)), False),
    ],
    ids=str,
)
def test_what_fits(change, fine, some_hopper):
    d, dtype = change.get("d", 64), change.get("dtype", torch.float16)

    def tensor(name, *shape, dtype=dtype):
        strides = change.get(f"{name}_strides", strides_of(*shape))
        return torch.empty_strided(shape, strides, dtype=dtype, device=change.get("device", "meta"))

    Q, K = tensor("Q", 2, 2, 50, d), tensor("K", 2, 1, 70, d)
    V = tensor("V", 2, 1, change.get("N_v", 70), d, dtype=change.get("V_dtype", dtype))
    lengths = tensor("lengths", 2, dtype=torch.int32) if "lengths_strides" in change else None
    assert (some_hopper.prepare(Q, K, V, Options(True, 0.1), lengths) is not None) is fine


@pytest.mark.parametrize("odd", ("Q", "K", "V", None))
def test_every_address_is_looked_at(odd, some_hopper, monkeypatch):
    monkeypatch.setattr(some_hopper.host, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(some_hopper, "prepare_launch", lambda *_: lambda *_: None)
    monkeypatch.setattr(some_hopper.host, "counter_for", lambda X: None)
    tensors = [torch.empty(5000, dtype=torch.float16)[8 - 4 * (name == odd) :][:4096] for name in "QKV"]
    call = some_hopper.forward(*(x.view(1, 2, 32, 64) for x in tensors), Options(True, 0.1))
    assert (call is None) is (odd is not None)


ASKED = dict(plain={}, dropout=dict(dropout_p=0.1), left=dict(left=3), right=dict(right=3), softcap=dict(softcap=2.0))
ASKED |= dict(portable=dict(portable=True))


@pytest.mark.parametrize("on_hopper, kind, aligned, enough, asked, chosen", [
    *[(True, True, True, True, asked, "hopper") for asked in ("plain", "left", "right")],
    *[(True, True, True, True, asked, "portable") for asked in ("dropout", "softcap", "sinks", "portable")],
    (True, True, True, False, "plain", "portable"),
    (True, True, False, True, "plain", "portable"),
    (True, False, True, True, "plain", "portable"),
    (False, True, True, True, "plain", "portable"),
])  # fmt: skip
def test_choice(on_hopper, kind, aligned, enough, asked, chosen, monkeypatch):
    from fa2_lab.kernels import choice

    Q, lengths = torch.empty(1, 1, 80, 64), torch.ones(1, dtype=torch.int64)
    seed, sinks = (torch.ones(1) if asked == name else None for name in ("dropout", "sinks"))
    options = Options(asked != "right", 0.5)._replace(**ASKED.get(asked, {}))
    portable = SimpleNamespace(
        prepare=lambda *given, sequences: lambda *tensors: ("portable", given[3:], tensors[:6]),
    )
    hopper = SimpleNamespace(enough_work=lambda *_: enough)
    made = lambda *tensors: ("hopper", (options, lengths), (*tensors[:4], seed, sinks)) if aligned else None  # noqa: E731
    hopper.prepare = lambda *given: made if kind and given[3:] == (options, lengths, None) else None
    monkeypatch.setattr(choice, "portable", portable)
    monkeypatch.setattr(choice, "hopper_forward", lambda device: hopper if on_hopper else None)
    name, got, tensors = choice.forward(Q, Q, Q, options, lengths, seed, sinks)
    assert name == chosen and got == (options, lengths)
    assert all(a is b for a, b in zip(tensors, (Q, Q, Q, lengths, seed, sinks), strict=True))


ENOUGH = [(64, 511, 513, True, 528), (64, 512, 512, False, 528), (64, 192, 192, False, 4224), (64, 192, 192, True, 528)]
ENOUGH += [(64, 64, 64, True, 4224), (64, 256, 64, False, 528), (64, 2048, 128, False, 528), (64, 512, 513, True, 0)]
ENOUGH += [(96, 64, 255, False, 264), (128, 64, 255, True, 264), (128, 64, 256, True, 66), (128, 512, 512, False, 66)]
ENOUGH += [(96, 64, 384, True, 132), (96, 64, 385, True, 0), (128, 64, 513, True, 0), (256, 64, 1, False, 0)]
ENOUGH += [(64, 1024, 1024, False, 0), (64, 2048, 2048, True, 0), (32, 2048, 2049, False, 0)]


@pytest.mark.parametrize("d, N_q, N_k, causal, most", ENOUGH)
def test_where_there_is_enough_work(d, N_q, N_k, causal, most, some_hopper):
    """More than so many blocks of 64 rows."""
    K = torch.empty(1, 1, N_k, d, device="meta")
    heads = most // -(-N_q // 64)
    assert not most or not some_hopper.enough_work(torch.empty(heads, 1, N_q, d, device="meta"), K, causal)
    assert some_hopper.enough_work(torch.empty(heads + 1, 1, N_q, d, device="meta"), K, causal)


def test_little_work_is_enough_at_d_64_where_there_are_many_keys(some_hopper):
    Q, more, K = (torch.empty(1, H, N, 64, device="meta") for H, N in ((132, 64), (133, 64), (1, 513)))
    assert some_hopper.enough_work(Q, K, False) and not some_hopper.enough_work(more, K, False)
    assert not some_hopper.enough_work(Q, K[:, :, :512], False)


def test_at_d_32_much_work_is_enough_where_there_is_no_mask(some_hopper):
    Q, K = torch.empty(16, 16, 4096, 32, device="meta"), torch.empty(16, 16, 2048, 32, device="meta")
    assert some_hopper.enough_work(Q, Q, False)
    assert not some_hopper.enough_work(Q, Q, True) and not some_hopper.enough_work(Q, K, False)


@pytest.mark.parametrize("d, N_q, heads, causal, lengths, consumers, B_c", [
    (128, 8192, 1, False, False, 1, 128),
    (128, 8192, 2, False, False, 2, 128),  # 256 blocks of 64 rows: two rounds
    (128, 128, 330, False, False, 2, 128),
    (128, 128, 165, False, False, 1, 128),
    (128, 8192, 3, False, False, 3, 64),  # 129 blocks of 192 rows: one round
    (128, 8192, 3, False, True, 2, 128),
    (128, 16384, 16, False, False, 3, 64),
    (128, 32768, 1, False, False, 2, 128),  # 171 blocks of 192 rows: two rounds, as with 128
    (128, 4096, 4, True, False, 1, 128),  # 1.9 blocks of 64 rows to an SM
    (128, 4096, 5, True, False, 2, 128),  # 2.4
    (192, 4096, 3, True, False, 1, 64),  # 1.5
    (192, 4096, 4, True, False, 2, 64),
    (256, 2048, 9, True, False, 1, 64),
    (128, 512, 512, True, False, 2, 64),
    (128, 2000, 64, True, False, 2, 128),
    (128, 2048, 64, True, False, 3, 64),
    (128, 2048, 64, True, True, 2, 128),
    (96, 4096, 64, False, False, 3, 64),
    (96, 4096, 64, True, False, 2, 128),
    (64, 8192, 2, False, False, 2, 128),
    (64, 8192, 32, False, True, 3, 128),
    (64, 512, 1024, True, False, 3, 64),
    (64, 512, 1024, True, True, 2, 128),
    (64, 256, 1024, True, False, 2, 128),
    (64, 4096, 5, True, False, 1, 128),  # 2.4
    (64, 4096, 6, True, False, 2, 128),  # 2.9
    (64, 4096, 9, True, False, 2, 128),  # 4.4
    (64, 4096, 10, True, False, 3, 128),  # 4.8
    (64, 4096, 10, True, True, 2, 128),
    (64, 2048, 20, True, False, 2, 128),
    (64, 2048, 40, True, False, 2, 128),  # 9.7
    (64, 2048, 42, True, False, 3, 64),
    (64, 4096, 128, True, False, 3, 128),
    (64, 60, 512, False, False, 1, 128),
    (64, 192, 2048, False, False, 3, 64),  # three tiles of 64 keys, not two of 128
    (64, 384, 512, False, False, 3, 128),  # three of 128, not six of 64
    (128, 138, 512, False, False, 3, 64),
    (32, 4096, 10, True, False, 3, 128),  # as at d 64
])  # fmt: skip
def test_sizes(d, N_q, heads, causal, lengths, consumers, B_c):
    from fa2_lab.kernels.hopper.forward.sizes import choose

    found = choose(d, N_q, N_q, heads, 132, causal, lengths)
    assert (found.consumers, found.B_c) == (consumers, B_c)


@pytest.mark.parametrize("d, N_q, N_k, heads, consumers", [
    (128, 8080, 20275, 2, 2),  # 128 blocks of 128 rows: one round
    (128, 500, 8000, 16, 1),  # 128 blocks of 64 rows
    (64, 748, 2240, 32, 3),  # 128 blocks of 192 rows
    (64, 2000, 8000, 16, 2),  # 176 blocks of 192 rows, 256 of 128: two rounds each
])  # fmt: skip
def test_causal_rows_of_nearly_the_same_length_run_in_rounds(d, N_q, N_k, heads, consumers):
    from fa2_lab.kernels.hopper.forward.sizes import choose

    assert choose(d, N_q, N_k, heads, 132, True, False).consumers == consumers
    assert choose(d, N_q, N_k, heads, 132, True, True) == choose(d, N_q, N_q, heads, 132, True, True)  # of any length


def test_where_keys_are_few_it_counts_how_soon_a_block_starts():
    from fa2_lab.kernels.hopper.forward.sizes import choose

    assert [choose(128, 2048, N_k, 24, 132, False, False).consumers for N_k in (128, 2048)] == [2, 3]


@pytest.mark.parametrize(
    "heads, least, at_once",
    [(32, 29, 32), (32, 11, 16), (128, 20, 32), (16, 4, 4), (24, 5, 6), (113, 5, 6), (7, 1, 1), (3, 9, 3)],
)
def test_no_few_heads_are_left_over(heads, least, at_once):
    from fa2_lab.kernels.hopper.shared.host import evenly

    assert evenly(heads, least) == at_once


def test_no_hopper_here():
    from fa2_lab.kernels import choice

    assert choice.hopper_forward(torch.device("cpu")) is None


def test_sizes_fit():
    """Registers and shared memory as the chip has them, counted from the sizes."""
    from fa2_lab.kernels.hopper.forward import sizes

    assert set(sizes.FULL) == set(sizes.CAUSAL) == set(sizes.USUAL) == {max(d, 64) for d in sizes.DIMENSIONS}
    for size in {size for d in sizes.USUAL for size, *_ in kinds(d)}:
        assert 128 * (size.registers * size.consumers + 32) <= 65536
        rows = 64 * size.consumers * (3 if size.O_apart else 1) + 2 * size.stages * size.B_c
        assert 2 * rows * size.d_pad < 227 * 1024 - 1024


# Right on a GPU -----------------------------------------------------------------------------------------------


def draw(batch, heads, N, d, dtype, turned=False, seed=0):
    """Random rows, on request as a view of (batch, N, heads, d)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, N, heads, d) if turned else (batch, heads, N, d)
    x = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    return x.transpose(1, 2) if turned else x


def poison(Q):
    """Leave NaN in the memory that the outputs are likely to get."""
    keep = [torch.full_like(Q, float("nan")), torch.full(Q.shape[:3], float("nan"), device="cuda")]
    del keep


@pytest.fixture
def planned(monkeypatch):
    """Has every call take these sizes, from now on."""
    from fa2_lab.kernels.hopper.forward import sizes

    return lambda chosen: monkeypatch.setattr(sizes, "choose", lambda *_: chosen)


def ready(Q, K, V, lengths, causal, scale):
    """The forward on these tensors, to be called as often as one likes."""
    from fa2_lab.kernels.hopper.forward.launch import prepare

    call = prepare(Q, K, V, Options(causal, scale), lengths)
    return lambda: call(Q, K, V, lengths)


def check(Q, K, V, lengths, causal, hidden=0.0):
    truth = dense(Q, K, V, torch.zeros_like(Q), causal=causal, lengths=lengths)
    torchs = dense(Q, K, V, torch.zeros_like(Q), causal=causal, lengths=lengths, dtype=Q.dtype)
    if lengths is not None:
        unused = torch.arange(K.shape[2], device="cuda") >= lengths[:, None]
        K, V = (x.masked_fill(unused[:, None, :, None], hidden) for x in (K, V))
    poison(Q)
    O, L = ready(Q, K, V, lengths, causal, Q.shape[3] ** -0.5)()
    for name, got, want, theirs in zip("OL", (O, L), truth, torchs, strict=False):
        assert worst(got, want) <= 2 * worst(theirs, want) + 1e-5, (name, Q.shape, K.shape, lengths, causal)


def try_all(d, dtype, cases, planned):
    """Cases are pairs of lengths, whether rows lie apart, and a kind of call."""
    for (N_q, N_k), turned, (sizes, causal, padded) in cases:
        planned(sizes)
        Q = draw(2, 6, N_q, d, dtype, turned, 0)
        K, V = (draw(2, 2, N_k, d, dtype, turned, seed) for seed in (1, 2))
        lengths = torch.tensor([N_k // 3, N_k + 9], dtype=torch.int32, device="cuda") if padded else None
        check(Q, K, V, lengths, causal, hidden=float("nan"))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d, dtype", once(D, DTYPES), ids=str)
def test_everything_once(d, dtype, planned):
    """Every plan, mask and pair of lengths."""
    plans, masks = list(dict.fromkeys(sizes for sizes, *_ in kinds(d))), list(product((False, True), (False, True)))
    some = [(turned, (sizes, *mask)) for sizes, mask, turned in once(plans, masks, (False, True))]
    try_all(d, dtype, dealt(PAIRS, some), planned)


@gpu
@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", D)
def test_right(d, dtype, planned):
    try_all(d, dtype, product(PAIRS, (False, True), kinds(d)), planned)


@gpu
@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_scores_that_climb(d, causal, dtype, planned):
    """m lags behind the maximum: scores that grow or fall from tile to tile, in some rows and not in others."""
    direction = torch.nn.functional.normalize(draw(1, 1, 1, d, torch.float32, seed=3), dim=3)
    tall = torch.arange(1024, device="cuda")[:, None] % 3 != 1  # in every warp some rows climb, and some do not
    Q = tall * d**0.5 * direction + 0.3 * draw(1, 2, 1024, d, torch.float32)
    V = draw(1, 2, 1024, d, dtype, seed=2)
    plans = [sizes for sizes, masked, padded in kinds(d) if masked == causal and not padded]
    for sizes, height, top in product(plans, (1, 8, 40, 400, -1, -8, -40, -400), (0, 1)):
        planned(sizes)
        slope = torch.linspace(-1, 1, 1024, device="cuda")[:, None] - top  # the highest score is 0, or `height`
        K = height * slope * direction + 0.1 * draw(1, 2, 1024, d, torch.float32, seed=1)
        check(Q.to(dtype), K.to(dtype), V, None, causal)


def differing(times, Q, K, V, lengths, causal):
    """Whether any of so many repeats differs in a bit; outputs are poisoned, else a block left out would look right."""
    call = ready(Q, K, V, lengths, causal, 0.1)
    first = call()
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(times):
        for x, y in zip(call(), first, strict=True):
            differ |= (x != y).any()
            x.fill_(float("nan"))
    return bool(differ)


@gpu
@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d, N", ((64, 1000), (64, 250), (128, 1000), (128, 2300), (128, 250)))
def test_same_bits_a_thousand_times(d, N, causal):
    Q, K, V = (draw(4, 8, N, d, torch.bfloat16, seed=seed) for seed in range(3))
    assert not differing(1000, Q, K, V, None, causal)


@gpu
@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("d", (64, 128, 256))
def test_short_loops(d, planned):
    """Many blocks of few tiles: the producer is as far ahead as it ever is, and so is what it fills too early."""
    for (sizes, causal, padded), (N_q, N_k) in product(kinds(d), ((1600, 60), (1000, 500), (1600, 1000))):
        planned(sizes)
        Q = draw(4, 12, N_q, d, torch.bfloat16, seed=0)
        K, V = (draw(4, 12, N_k, d, torch.bfloat16, seed=seed) for seed in (1, 2))
        lengths = torch.tensor([0, N_k, 1, N_k // 2], dtype=torch.int32, device="cuda") if padded else None
        check(Q, K, V, lengths, causal)
        assert not differing(100, Q, K, V, lengths, causal), (d, N_q, N_k, sizes, causal, padded)


@gpu
@pytest.mark.gpu
@pytest.mark.exhaustive
def test_processes_that_take_turns_on_the_gpu():
    script = Path(__file__).with_name("hopper_in_turns.py")
    start = partial(subprocess.Popen, [sys.executable, script, "5"], stdout=subprocess.PIPE, text=True)
    said = [process.communicate()[0] for process in [start() for _ in range(6)]]
    assert all(line.startswith("0 of ") for line in said), said


def assert_counters_are_put_back():
    from fa2_lab.kernels.prepared import PREPARED

    counters = [made for key, made in PREPARED.items() if key[0] == "counter"]
    assert counters and not any(counter.any() for counter in counters)


@gpu
@pytest.mark.gpu
def test_counter_is_put_back_and_graphs_have_their_own():
    call = ready(*(draw(2, 8, 700, 64, torch.float16, seed=seed) for seed in range(3)), None, True, 0.1)
    O, _ = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = call()
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, O)
    assert_counters_are_put_back()


# Behind the public call ---------------------------------------------------------------------------------------


@pytest.fixture
def no_portable_forward(monkeypatch):
    from fa2_lab.kernels import choice
    from fa2_lab.kernels.hopper.forward import launch

    monkeypatch.setattr(choice, "portable", None)
    monkeypatch.setattr(launch, "enough_work", lambda *_: True)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d, causal, lengths, scale", shared_out(D, (False, True), LENGTHS, (None, -0.2, 0.0)), ids=str)
def test_attention_takes_it(d, causal, lengths, scale, no_portable_forward):
    """Forward and gradients of the public call, whichever backward it takes."""
    from fa2_lab import attention

    q, k, v, dO = tensors(2, 4, 2, 190, 213, d, torch.bfloat16)
    lengths = None if lengths is None else torch.tensor([213, 77], dtype=lengths, device="cuda")
    options = dict(causal=causal, scale=scale)
    got = run(attention, q, k, v, dO, key_lengths=lengths, **options)
    truth = dense(q, k, v, dO, lengths=lengths, **options)
    judge(got, truth, dense(q, k, v, dO, lengths=lengths, dtype=q.dtype, **options), f"{d} {options}")


@gpu
@pytest.mark.gpu
def test_what_it_does_not_take_goes_elsewhere():
    from fa2_lab import attention

    for d, dtype, step in ((64, torch.float32, 1), (80, torch.float16, 1), (64, torch.float16, 2)):
        q, k, v, dO = tensors(1, 2, 2, 100, 120, d * step, dtype)
        q, k, v, dO = (x.detach()[..., ::step].requires_grad_() for x in (q, k, v, dO))
        got = run(attention, q, k, v, dO)
        judge(got, dense(q, k, v, dO), dense(q, k, v, dO, dtype=dtype), f"{d} {dtype} {step}")


# Launched again -----------------------------------------------------------------------------------------------


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("padded", (False, True))
def test_launched_again_on_other_tensors(padded):
    """New addresses, another stream, lengths that are no multiple of 16 bytes away from anything."""
    from fa2_lab.kernels.hopper.forward.launch import prepare

    call = None
    lengths = torch.tensor([50, 300, 1, 0, 299], dtype=torch.int32, device="cuda")
    for seed in range(4):
        Q, K, V = (draw(2, 4, 300, 64, torch.float16, seed=10 * seed + i) for i in range(3))
        some = lengths[seed % 2 : seed % 2 + 2] if padded else None
        call = call or prepare(Q, K, V, Options(False, 0.125), some)
        with torch.cuda.stream(torch.cuda.Stream() if seed == 2 else torch.cuda.current_stream()):
            torch.cuda.synchronize()
            O, L = call(Q, K, V, some)
            torch.cuda.synchronize()
        for got, want in zip((O, L), dense(Q, K, V, torch.zeros_like(Q), lengths=some), strict=False):
            assert worst(got, want) < 2e-3


@gpu
@pytest.mark.gpu
def test_launched_again_past_triton_and_keeps_nothing_alive(monkeypatch):
    from fa2_lab.kernels.hopper.forward import launch
    from fa2_lab.kernels.hopper.shared.host import Launch

    made = []
    monkeypatch.setattr(launch.host, "Launch", lambda *a, **b: made.append(Launch(*a, **b)) or made[0])
    Q = draw(1, 2, 200, 64, torch.float16)
    call = launch.prepare(Q, Q, Q, Options(False, 0.1))
    alive = [weakref.ref(x) for x in (Q, *call(Q, Q, Q, None))]
    assert made[0].again
    del Q
    gc.collect()
    assert [x() for x in alive] == [None] * 3
