"""What rows of the suites are made of, on tensors that lie on the CPU and with times that are known."""

from functools import partial
from importlib import import_module
from itertools import count
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from fa2_studio.bench import (  # noqa: E402
    accuracy,
    contest,
    decode,
    masks,
    packed,
    peers,
    problem,
    protocol,
    smoke,
    suites,
    train,
)
from fa2_studio.bench.problem import Problem  # noqa: E402

SMALL = Problem(1, 2, 2, 40, 40, 16, False, "float32")


def gone(problem):
    raise peers.Missing("not installed")


@pytest.fixture
def here(monkeypatch):
    """Tensors lie on the CPU; "wrong" gives twice the values, and "gone" is not installed."""
    usual, full, linspace = Problem.tensors, torch.full, torch.linspace
    monkeypatch.setattr(Problem, "tensors", lambda self, seed=0, grad=False: usual(self, seed, grad, "cpu"))
    monkeypatch.setattr(torch, "full", lambda *given, device, **how: full(*given, **how))
    monkeypatch.setattr(torch, "linspace", lambda *given, device, **how: linspace(*given, **how))
    for table in (peers.PEERS, peers.DECODERS):
        monkeypatch.setitem(table, "wrong", lambda problem: lambda q, k, v: 2 * peers.PEERS["torch"](problem)(q, k, v))
        monkeypatch.setitem(table, "gone", gone)


def known(calls, *how):
    """A timing of three microseconds for every call, which is made."""
    for call in calls.values():
        call()
    return {name: protocol.Timing(3e-3, 2e-3, 4e-3) for name in calls}


@pytest.fixture
def gathered(monkeypatch):
    """The rooms' collect() gives (results, jobs); the machine and its ceilings are made up."""
    for room in (suites, decode, masks, packed, accuracy, smoke):
        monkeypatch.setattr(room, "collect", lambda results, jobs: (results, jobs))
        monkeypatch.setattr(room, "machine", lambda: dict(gpu="made up"))
        monkeypatch.setattr(room, "ceilings", lambda: {"GEMM TFLOP/s": 700.0, "copy TB/s": 4.0}, raising=False)
    ahead = []
    monkeypatch.setattr(suites, "compile_ahead", lambda problems, *names: ahead.append((problems, *names)))
    monkeypatch.setattr(masks, "elsewhere", lambda call, jobs: ahead.append((call, jobs)))
    return ahead


# Grids --------------------------------------------------------------------------------------------------------

GRIDS = {name: contest.grid for name, contest in suites.CONTESTS.items()}
GRIDS |= dict(small=suites.small_grid, memory=suites.memory_grid, decode=decode.grid, masks=masks.grid)
GRIDS |= dict(packed=packed.grid, accuracy=accuracy.grid, smoke=smoke.grid)


@pytest.mark.parametrize("name", GRIDS)
def test_every_problem_of_a_grid_can_be_measured(name):
    for p in GRIDS[name]():
        sizes = (p.batch, p.heads, p.kv_heads, p.N_q, p.N_k, p.d)
        assert all(type(n) is int and n > 0 for n in sizes) and type(p.causal) is bool
        assert p.heads % p.kv_heads == 0 and p.d in (32, 64, 96, 128) and hasattr(torch, p.dtype)
        assert p.kv_heads == p.heads or name in ("nvidia", "heads", "sweep", "decode", "smoke")


def both(*sizes):
    return [Problem(*sizes, causal) for causal in (False, True)]


def test_grids_are_those_of_their_suites():
    square = [Problem.square(N, d, causal) for d in (64, 128) for causal in (False, True) for N in (2048, 8192)]
    assert suites.same_bits_grid() == square
    assert [(p.N_q, p.d, p.causal) for p in suites.layout_grid()] == [(p.N_q, p.d, p.causal) for p in square]
    assert {*suites.heads_grid()} == {p for kv in (32, 8, 1) for p in both(2, 32, kv, 4096, 4096, 128)}
    assert {*suites.nvidia_grid()} == {p for n in range(11, 16) for p in both(1, 64, 8, 2**n, 2**n, 128)}
    assert suites.memory_grid() == [Problem(1, 16, 16, 2**n, 2**n, 128, True) for n in range(11, 17)]
    assert {*suites.small_grid()} == {Problem(1, 8, 8, N, N, d, False) for d in (64, 128) for N in (128, 256, 512)}
    assert masks.grid() == [Problem(2, 16, 16, 8192, 8192, d, True) for d in (64, 128)]
    assert packed.grid() == [Problem(16, 2048 // d, 2048 // d, 4000, 4000, d, True) for d in (64, 128)]
    assert {(p.N_q, p.heads, p.batch) for p in accuracy.grid()} == {(2048, 8, 1)}
    assert {(p.d, p.causal) for p in accuracy.grid()} == {(d, c) for d in (64, 128) for c in (False, True)}
    assert [decode.cache_bytes(p) // 10**6 for p in (decode.grid()[0], decode.grid()[-1])] == [33, 268]


# Which jobs a suite has -----------------------------------------------------------------------------------------


def test_a_contest_has_a_job_for_every_problem_and_direction(gathered):
    results, jobs = suites.contests("sweep", ("backward",))
    assert {job.func for job in jobs} == {suites.row}
    assert [job.args[:3] for job in jobs] == [(p, "backward", suites.RIVALS[:3]) for p in suites.random_grid()]
    assert {(job.args[3].func, job.args[3].keywords["repeats"]) for job in jobs} == {(suites.measure, 7)}
    assert (results.suite, results.machine, results.ceilings["copy TB/s"]) == ("sweep", dict(gpu="made up"), 4.0)
    assert "median of 7 repetitions" in results.protocol and gathered == [(suites.random_grid(), ["fa2_lab"])]


def test_small_and_memory_have_their_jobs_and_say_how_they_measure(gathered):
    results, jobs = suites.small()
    forward = [(suites.host_cost, p, "forward") for p in suites.small_grid()]
    everything = [*forward, *((suites.host_cost, p, "both") for p in suites.small_grid() if p.N_q == 256)]
    assert [(job.func, *job.args) for job in jobs] == everything
    assert (results.suite, results.protocol) == ("small", protocol.HOST_PROTOCOL)
    results, jobs = suites.memory()
    ways = [(suites.peak_memory, p, way) for p in suites.memory_grid() for way in ("forward", "both")]
    assert [(job.func, *job.args) for job in jobs] == ways and results.suite == "memory"
    assert results.protocol.startswith("MiB allocated at the peak") and results.machine == dict(gpu="made up")
    assert gathered == [(suites.small_grid(),), (suites.memory_grid(),)]


def test_masks_packed_accuracy_and_smoke_have_their_jobs(gathered):
    results, jobs = masks.run()
    places = [(p, way, mask) for p in masks.grid() for way in ("forward", "backward") for mask in masks.MASKS]
    assert [job.args for job in jobs] == places and "keys that rows see" in results.protocol
    ((call, compiled),) = gathered
    assert call is masks.call_once and {who for *_, who in compiled} == {"FlexAttention", "fa2_lab"}
    assert {(p, mask) for p, mask, _ in compiled} == {(p, mask) for p in masks.grid() for mask in masks.MASKS}
    results, jobs = packed.run()
    assert [job.args for job in jobs] == [(p, way) for p in packed.grid() for way in ("forward", "backward")]
    assert results.suite == "packed" and "those of the tokens" in results.protocol and results.ceilings
    results, jobs = accuracy.run()
    parts = [(p, part, kind) for p in accuracy.grid() for kind in accuracy.INPUTS for part in ("O", "dQ", "dK", "dV")]
    assert [job.args for job in jobs] == parts and (results.suite, results.protocol) == ("accuracy", accuracy.PROTOCOL)
    results, jobs = smoke.run()
    assert [job.args for job in jobs] == [(p, way) for p in smoke.grid() for way in ("forward", "backward")]
    assert results.suite == "smoke" and results.machine == dict(gpu="made up")


# Rows ---------------------------------------------------------------------------------------------------------


def test_a_row_of_a_contest_has_the_problem_s_flops_and_names_who_is_wrong(here):
    for direction in ("forward", "backward"):
        row = suites.row(SMALL, direction, ("torch", "wrong", "gone"), known)
        assert (row.direction, row.flops, row.unit) == (direction, SMALL.flops(direction), "ms")
        assert row.values == {"torch": [3e-3, 2e-3, 4e-3]} and row.problem == SMALL.as_dict()
        assert row.failed == {"wrong": "wrong: error 1.0e+00", "gone": "not installed"}


def test_smoke_names_who_is_wrong(here, monkeypatch):
    usual = Problem.tensors
    monkeypatch.setattr(Problem, "tensors", lambda self, grad, device: usual(self, grad=grad))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = smoke.check(SMALL, "backward", ("torch", "wrong", "gone"))
    assert row.values.keys() == {"torch"} and row.failed.keys() == {"wrong", "gone"}


def test_what_a_call_costs_the_host_is_told_in_microseconds(here, monkeypatch):
    seen = {}

    def clock(calls, held):
        seen.update({name: (call(), held[name]) for name, call in calls.items()})
        return dict.fromkeys(calls, 7.0)

    monkeypatch.setattr(suites, "wall_microseconds", clock)
    for direction, many in (("forward", None), ("both", 3)):
        row = suites.host_cost(SMALL, direction, ("torch", "torch math", "wrong"))
        assert (row.values, row.unit, row.direction) == ({"torch": [7.0], "torch math": [7.0]}, "µs", direction)
        assert row.failed.keys() == {"wrong"} and not row.flops
        (found, _), (_, held) = seen["torch"], seen["torch math"]
        assert many is None or len(found) == many
        assert many or problem.error(found, *SMALL.tensors(), causal=False) < 1e-5
        assert held.args == (peers.SDPBackend.MATH,), "its backend is chosen outside of the clock"


def test_memory_is_what_a_second_call_takes_beyond_what_was_there(here, monkeypatch):
    calls = []

    def counting(problem):
        return lambda q, k, v: calls.append(q.requires_grad) or peers.PEERS["torch"](problem)(q, k, v)

    peaks = count(8)  # MiB: the first call compiles, and takes another peak than the second
    monkeypatch.setitem(peers.PEERS, "counting", counting)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks) * 2**20)
    row = suites.peak_memory(SMALL, "forward", ("counting", "gone"))
    assert (row.values, row.unit, row.direction) == ({"counting": [6.0]}, "MiB", "forward")
    assert row.failed == {"gone": "not installed"} and row.problem == SMALL.as_dict()
    assert suites.peak_memory(SMALL, "both", ("counting",)).values == {"counting": [8.0]}
    assert calls == [False, False, True, True]


# Decode ---------------------------------------------------------------------------------------------------------

CACHE = Problem(2, 4, 2, 1, 64, 16, False, "float32")


@pytest.fixture
def timed(here, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_studio.bench import reading

    asked = []
    monkeypatch.setattr(decode, "measure", lambda calls, *how, **more: asked.append((how, more)) or known(calls))
    monkeypatch.setattr(reading, "reading", lambda X: lambda: asked.append(X.nbytes))
    monkeypatch.setattr(decode, "NAMES", ("torch", "wrong", "gone"))
    return asked


@pytest.mark.parametrize("what", ["decode", "graph"])
def test_a_cache_is_read_by_everybody_who_is_right_and_times_are_microseconds(what, timed, monkeypatch):
    monkeypatch.setattr(decode, "graph", lambda call: SimpleNamespace(replay=partial(timed.append, call)))
    row = decode.contest(CACHE, what)
    three = [pytest.approx(3.0), pytest.approx(2.0), pytest.approx(4.0)]
    assert row.values == {"reading alone": three, "torch": three} and (row.unit, row.direction) == ("µs", what)
    assert row.failed == {"wrong": "wrong: error 1.0e+00", "gone": "not installed"}
    size = 2 * 2 * 2 * 64 * 16 * 4  # K and V, sequences, heads, keys, d, bytes
    assert row.problem["bytes"] == size and ((decode.MORE, decode.reading), {}) in timed
    if what == "decode":
        assert timed[-1] == size, "the kernel that reads alone reads the whole cache"
    else:
        O = next(call for call in timed if isinstance(call, partial))()
        assert problem.error(O, *CACHE.tensors(), causal=False) < 1e-5


def test_pages_that_give_another_answer_are_not_timed(timed, monkeypatch):
    import fa2_lab.api.paged

    right = peers.PEERS["torch"](CACHE)

    def paged(q, k_pages, v_pages, table, lengths):
        assert lengths.tolist() == [64, 64] and k_pages.shape[1] * table.shape[1] == 64
        k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))
        return right(q, k, v) * (1.5 if k_pages.shape[1] == 64 else 1.0)

    monkeypatch.setattr(import_module("fa2_lab.api.attention"), "attention", right)
    monkeypatch.setattr(fa2_lab.api.paged, "attention_paged", paged)
    monkeypatch.setattr(decode, "PAGES", (16, 64))
    row = decode.pages(CACHE)
    assert list(row.values) == ["fa2_lab", "page 16"] and row.failed == {"page 64": "wrong"}
    assert (row.direction, row.unit, row.problem["N_k"]) == ("paged", "µs", 64)


def test_uneven_lengths_reach_from_one_to_all_and_have_even_ones_beside_them(timed, monkeypatch):
    asked = []
    calls = import_module("fa2_lab.api.attention")
    monkeypatch.setattr(calls, "attention", lambda q, k, v, key_lengths: asked.append(key_lengths.tolist()))
    row = decode.uneven(Problem(5, 4, 2, 1, 65, 16, False, "float32"))
    assert asked == [[33] * 5, [1, 17, 33, 49, 65]]
    assert list(row.values) == ["even", "uneven"] and row.direction == "lengths" and row.unit == "µs"


def test_the_host_s_time_of_decode_is_that_of_an_eager_call(here, monkeypatch):
    monkeypatch.setattr(decode, "NAMES", ("torch", "torch math", "wrong", "gone"))
    held = {}

    def clock(calls, contexts):
        held.update(contexts)
        return {name: 5.0 * (call().shape == (2, 4, 1, 16)) for name, call in calls.items()}

    monkeypatch.setattr(decode, "wall_microseconds", clock)
    row = decode.host(CACHE)
    assert row.values == {"torch": [5.0], "torch math": [5.0], "wrong": [5.0]}, "the first three"
    assert (row.direction, row.unit) == ("host", "µs") and held["torch math"].args == (peers.SDPBackend.MATH,)


def test_decode_has_its_jobs_and_no_curve_where_it_was_interrupted(gathered, monkeypatch):
    kept, jobs = {}, []

    def collect(results, asked):
        jobs[:] = [(job.func.__name__, *job.args) for job in asked]
        results.missing = list(kept)
        return results

    monkeypatch.setattr(decode, "collect", collect)
    monkeypatch.setattr(decode, "by_programs", lambda problem: dict(programs=[problem.N_k]))
    results, grid = decode.run(), decode.grid()
    assert jobs[: 2 * len(grid)] == [("contest", p) for p in grid] + [("contest", p, "graph") for p in grid]
    rest = [("host", (1, 8192)), ("pages", (1, 65536)), ("pages", (32, 2048)), ("uneven", (32, 8192))]
    assert [(name, (p.batch, p.N_k)) for name, p in jobs[2 * len(grid) :]] == rest
    assert results.curves == dict(programs=[65536]) and results.ceilings == {"copy TB/s": 4.0}
    assert (results.suite, results.machine, results.protocol) == ("decode", dict(gpu="made up"), decode.PROTOCOL)
    kept["the rest"] = True
    assert decode.run().curves == {}


# Training -------------------------------------------------------------------------------------------------------


def test_a_run_has_the_last_losses_the_time_and_the_memory_of_every_backend(monkeypatch):
    def fake(backend, setting):
        if backend == "cuDNN":
            raise KeyboardInterrupt
        if backend == "fa2_lab portable":
            raise peers.Missing("not here")
        return train.Run([9.0] * 30 + [float(n) for n in range(20)], 2e6, 512.0)

    monkeypatch.setattr(train, "train", fake)
    monkeypatch.setattr(train, "machine", lambda: dict(gpu="made up"))
    results = train.run(train.Setting(layers=3, steps=50))
    loss, time, memory = results.rows
    assert [(row.direction, row.unit) for row in results.rows] == [
        ("loss", "nats"), ("time", "µs per token"), ("memory", "MiB"),
    ]  # fmt: skip
    assert loss.values == {name: [9.5] for name in ("fa2_lab", "torch flash")}, "the mean of the last twenty"
    assert time.values["fa2_lab"] == [0.5] and memory.values["torch flash"] == [512.0]
    assert all(row.failed == {"fa2_lab portable": "not here"} for row in results.rows)
    assert results.missing == ["cuDNN", "FlashAttention-3", "torch math"] and results.suite == "train"
    assert (time.problem["layers"], time.problem["steps"], time.problem["N_q"]) == (3, 50, 4096)
    assert results.machine == dict(gpu="made up") and results.curves["fa2_lab"][-1] == 19.0


def test_the_first_ten_steps_do_not_count(monkeypatch):
    seconds = iter([0.0, 100.0, 104.0])  # before the first step, before the eleventh, after the last
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    setting = train.Setting(layers=1, heads=1, d=8, context=16, batch=2, steps=13)
    run = train.train("torch", setting, device="cpu")
    assert run.tokens_per_second == 3 * 2 * 16 / 4 and run.peak_mebibytes == 0


# What is added up and compared ----------------------------------------------------------------------------------


def test_ceilings_time_a_product_beside_a_copy(monkeypatch):
    product, copy = (lambda: 0), (lambda: 1)
    monkeypatch.setattr(peers, "gemm_call", lambda: (product, 6e12))
    monkeypatch.setattr(peers, "copy_call", lambda: (copy, 6e9))
    monkeypatch.setattr(contest, "measure", lambda calls: asked.update(calls) or known(calls))
    asked = {}
    assert contest.ceilings() == {"GEMM TFLOP/s": pytest.approx(2e6), "copy TB/s": pytest.approx(2e3)}
    assert asked == dict(gemm=product, copy=copy)


def test_flops_of_packed_sequences_are_those_of_each():
    where = Problem(2, 3, 3, 40, 40, 16, True)
    assert packed.flops(where, (5, 40), "forward") == 4 * 3 * 16 * (5 * 5 + 40 * 40) / 2
    assert packed.flops(where, (5, 40), "backward") == 2.5 * packed.flops(where, (5, 40), "forward")


def test_a_peaked_query_is_twice_a_key_that_it_sees():
    q, k, *_ = accuracy.peaked(Problem(1, 2, 2, 30, 30, 8, True), torch.Generator().manual_seed(0))
    for row in range(30):
        same = (q[0, 0, row] == 2 * k[0, 0]).all(1).nonzero().flatten().tolist()
        assert len(same) == 1 and same[0] <= row


def test_flash_attention_3_is_asked_for_the_same_window(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "package", lambda module, **options: lambda problem: asked.append((module, options)))
    for mask in (masks.Mask(128), masks.Mask(softcap=50.0), masks.Mask()):
        masks.flash3(SMALL, mask, None)
    module = "flash_attn_interface"
    assert asked == [
        (module, dict(window_size=(127, 0), softcap=0.0)),
        (module, dict(window_size=(-1, -1), softcap=50.0)),
        (module, dict(window_size=(-1, -1), softcap=0.0)),
    ]
    with pytest.raises(peers.Missing, match="no sinks"):
        masks.flash3(SMALL, masks.Mask(sinks=True), None)
    with pytest.raises(peers.Missing, match="causal mask alone"):
        masks.portable(SMALL, masks.Mask(128), None)


@pytest.mark.parametrize("mask", [masks.Mask(9), masks.Mask(softcap=1.5), masks.Mask(sinks=True)], ids=str)
def test_flex_gets_the_mask_the_cap_and_the_sinks(mask, monkeypatch):
    """A plain function in the place of the compiled one: the scores' function and the mask's, key by key."""
    where = Problem(1, 3, 3, 24, 24, 8, True, "float32")
    tensors, sinks = masks.given(where, mask, "cpu")
    row, key = torch.arange(24)[:, None], torch.arange(24)[None, :]

    def plain(q, k, v, score_mod, block_mask, return_lse):
        s = q @ k.transpose(2, 3) * 8**-0.5
        s = s if score_mod is None else score_mod(s, 0, 0, row, key)
        s = s.masked_fill(~block_mask(0, 0, row, key), -torch.inf)
        return (torch.softmax(s, 3) @ v, torch.logsumexp(s, 3)) if return_lse else torch.softmax(s, 3) @ v

    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "create_block_mask", lambda seen, *rest: seen)
    monkeypatch.setattr(peers, "compiled_flex", lambda: plain)
    masks.flex_mask.cache_clear()
    truth = masks.by_definition(*tensors, mask, sinks)
    call = masks.checked(masks.flex(where, mask, sinks), tensors, truth, "forward")
    masks.flex_mask.cache_clear()
    assert callable(call), call
