"""What the bench measures and how: problems and their truth, the clock on the host, peers, counters, grids."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from fa2_lab.records import Measurement  # noqa: E402
from fa2_studio.bench import peers, problem, protocol, suites  # noqa: E402
from fa2_studio.bench.contest import TOLERANCE, all_tried, ready  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402

# Problems and protocol ----------------------------------------------------------------------------------------


def test_flops_are_counted_as_the_paper_counts_them():
    full = Problem(2, 3, 1, 5, 7, 11, False)
    assert full.flops("forward") == 4 * 2 * 3 * 5 * 7 * 11
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert full.flops("both") == full.flops("forward") + full.flops("backward")
    assert Problem(2, 3, 1, 5, 7, 11, True).flops("forward") == full.flops("forward") / 2


def test_the_square_problem_has_the_paper_s_sizes():
    for N in (512, 16384, 32768):
        p = Problem.square(N, 64, True)
        assert p.heads * p.d == 2048 and p.batch * N == max(16384, N) and p.heads == p.kv_heads


@pytest.mark.parametrize("causal", [False, True])
def test_a_right_answer_passes_and_a_wrong_one_does_not(causal):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 100, 16, generator=draw) for heads in (4, 2, 2))
    O = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert problem.error(O, q, k, v, causal) < 1e-5
    assert problem.error(O, q, k, v, not causal) > TOLERANCE
    assert problem.error(1.05 * O, q, k, v, causal) > TOLERANCE


@pytest.mark.parametrize("causal, N_q, N_k", [(False, 100, 100), (True, 100, 100), (True, 90, 130), (False, 70, 30)])
def test_gradients_by_definition_are_autograd_s(causal, N_q, N_k):
    p = Problem(2, 4, 2, N_q, N_k, 16, causal, "float64")
    q, k, v, dO = p.tensors(grad=True, device="cpu")
    gradients = torch.autograd.grad(peers.PEERS["torch"](p)(q, k, v), (q, k, v), dO)
    truth = problem.gradients_by_definition(q, k, v, dO, causal)
    assert problem.gradient_error(gradients, truth) < 1e-12
    for n in range(3):
        wrong = [1.05 * g if m == n else g for m, g in enumerate(gradients)]
        assert problem.gradient_error(wrong, truth) > TOLERANCE
        wrong[n] = torch.full_like(wrong[n], torch.nan)
        assert not problem.gradient_error(wrong, truth) <= TOLERANCE


def test_the_gradients_of_a_long_sequence_go_in_chunks(monkeypatch):
    q, k, v, dO = Problem(1, 2, 1, 300, 300, 8, True, "float64").tensors(grad=True, device="cpu")
    whole = problem.gradients_by_definition(q, k, v, dO, True, few=20)
    monkeypatch.setattr(problem, "MOST", 0)  # chunks of 20 rows
    for part, all_at_once in zip(problem.gradients_by_definition(q, k, v, dO, True, few=20), whole, strict=True):
        assert torch.allclose(part, all_at_once, rtol=1e-12, atol=1e-14)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    p = Problem(1, 2, 2, 64, 64, 16, False, "float32")
    tensors = p.tensors(grad=True, device="cpu")
    right = peers.PEERS["torch"](p)

    class HalfOfdV(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, dV):
            return dV / 2

    monkeypatch.setitem(peers.PEERS, "wrong", lambda p: lambda q, k, v: right(q, k, HalfOfdV.apply(v)))
    calls, failed = all_tried(ready(p, "forward", ("torch", "wrong"), tensors[:3]))
    assert calls.keys() == {"torch", "wrong"} and not failed
    calls, failed = all_tried(ready(p, "backward", ("torch", "wrong"), tensors))
    assert calls.keys() == {"torch"} and failed == {"wrong": "wrong: error 5.0e-01"}


def test_flex_s_causal_mask_is_made_from_corners():
    from torch.nn.attention.flex_attention import create_block_mask

    for N_q, N_k in ((256, 256), (300, 500), (130, 700), (500, 300), (128, 1)):
        offset = N_k - N_q
        mine = peers.flex_mask(N_q, N_k, device="cpu")
        theirs = create_block_mask(lambda b, h, i, j, o=offset: j <= i + o, None, None, N_q, N_k, device="cpu")
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), (name, N_q, N_k)


def test_the_hosts_time_is_that_of_calls_in_a_row_inside_what_is_held(monkeypatch):
    from contextlib import contextmanager

    clock, log, inside = [0.0], [], []

    @contextmanager
    def held():
        clock[0] += 100.0  # the choice of a backend does not count
        inside.append(True)
        yield
        inside.clear()

    def call(name, seconds):
        def run():
            log.append((name, bool(inside)))
            first = len(log) < 2 or log[-2][0] != name
            clock[0] += 50.0 if first else seconds  # what comes after another contestant is slow

        return run

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: clock[0])
    found = protocol.wall_microseconds(dict(a=call("a", 2e-6), b=call("b", 3e-6)), dict(b=held), turns=4)
    assert found == pytest.approx(dict(a=2.0, b=3.0), rel=1e-3)
    assert all(within == (name == "b") for name, within in log)
    assert len(log) == 2 * 4 * (protocol.BEFORE + protocol.IN_A_ROW)


def test_a_bare_peer_is_the_same_without_the_choice_of_its_backend():
    problem = Problem(1, 2, 2, 8, 8, 16, True)
    attention = peers.PEERS["torch math"](problem)
    call, held = peers.bare(attention)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    with held():
        assert torch.equal(call(q, k, v), attention(q, k, v))
    plain = peers.PEERS["torch"](problem)
    assert peers.bare(plain)[0] is plain


@pytest.mark.parametrize("with_L", [False, True])
def test_a_package_has_heads_after_rows_and_may_give_L(monkeypatch, with_L):
    def flash_attn_func(q, k, v, causal):
        O = peers.PEERS["torch"](small)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return (O, None) if with_L else O

    small = Problem(2, 3, 3, 8, 8, 4, True)
    q, k, v = torch.randn(3, 2, 3, 8, 4)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    O = peers.PEERS["FlashAttention-4"](small)(q, k, v)
    assert O.shape == q.shape and problem.error(O, q, k, v, True) < 1e-5


@pytest.mark.parametrize(
    "name, module",
    [("FlashAttention-4", "flash_attn.cute"), ("FlashAttention-3", "flash_attn_interface"), ("flash_attn", None)],
)
def test_a_package_that_is_not_installed_is_missing(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module or name, None)
    for table in (peers.PEERS, peers.DECODERS):
        with pytest.raises(peers.Missing, match="not installed"):
            table[name](Problem(2, 3, 3, 8, 8, 4, True))


def test_the_deterministic_mode_is_asked_for(monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, causal, deterministic=False):
        asked.append((causal, deterministic))
        return q

    for module in ("flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_func=flash_attn_func))
    x = torch.randn(2, 3, 8, 4)
    for number in (3, 4):
        for name in (f"FlashAttention-{number}", f"FlashAttention-{number} deterministic"):
            assert torch.equal(peers.PEERS[name](Problem(2, 3, 3, 8, 8, 4, True))(x, x, x), x)
    assert asked == [(True, False), (True, True)] * 2


def test_what_a_peer_was_built_without_is_not_called(monkeypatch):
    def flash_attn_func(q, k, v, causal, softcap=0.0):
        return q

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    flags = {"FLASHATTENTION_DISABLE_FP16": True, "FLASHATTENTION_DISABLE_SOFTCAP": True}
    monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace(CONFIG={"build_flags": flags}))
    x, package = torch.randn(2, 3, 8, 4), peers.package
    plain, half = Problem(2, 3, 3, 8, 8, 4, True), Problem(2, 3, 3, 8, 8, 4, True, "float16")
    assert torch.equal(package("flash_attn_interface", softcap=0.0)(plain)(x, x, x), x)
    with pytest.raises(peers.Missing, match="built without fp16"):
        package("flash_attn_interface")(half)
    with pytest.raises(peers.Missing, match="built without softcap"):
        package("flash_attn_interface", softcap=50.0)(plain)
    flags.clear()
    assert torch.equal(package("flash_attn_interface", softcap=50.0)(half)(x, x, x), x)


def test_a_cache_is_laid_out_once_and_again_for_other_keys(monkeypatch):
    caches = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, causal, num_splits):
        caches.append((k_cache, v_cache))
        assert num_splits == 0 and k_cache.is_contiguous() and v_cache.is_contiguous()
        inputs = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
        return peers.PEERS["torch"](where)(*inputs).transpose(1, 2)

    where = Problem(2, 6, 3, 1, 40, 4, False, "float32")
    q, k, v = where.tensors(device="cpu")
    fake = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake)
    attention = peers.DECODERS["FlashAttention-3"](where)
    assert problem.error(attention(q, k, v), q, k, v, False) < 1e-5
    attention(q, k, v)
    attention(q, k.clone(), v)
    assert caches[0][0] is caches[1][0] and caches[1][0] is not caches[2][0]


def test_flex_takes_flash_attention_where_torch_knows_that(monkeypatch):
    from torch.nn.attention import flex_attention

    given = {}
    monkeypatch.setattr(suites.peers, "compiled_flex", lambda: lambda q, k, v, **options: given.update(options))
    monkeypatch.setattr(
        flex_attention, "FlexKernelOptions", SimpleNamespace(__annotations__=["BACKEND"]), raising=False
    )
    where = Problem(1, 4, 2, 8, 8, 4, False)
    peers.PEERS["FlexAttention on FA4"](where)(None, None, None)
    assert given == dict(block_mask=None, enable_gqa=True, kernel_options=dict(BACKEND="FLASH"))
    monkeypatch.delattr(flex_attention, "FlexKernelOptions")
    with pytest.raises(peers.Missing, match="no other backend"):
        peers.PEERS["FlexAttention on FA4"](where)


def test_a_layout_changes_memory_and_nothing_else():
    usual = Problem(2, 4, 2, 30, 50, 8, True, "float32")
    other = replace(usual, layout="rows first")
    for x, y in zip(usual.tensors(grad=True, device="cpu"), other.tensors(grad=True, device="cpu"), strict=True):
        assert x.shape == y.shape and x.requires_grad == y.requires_grad and y.is_leaf
        assert x.is_contiguous() and y.transpose(1, 2).is_contiguous()
    assert "layout" not in usual.as_dict() and other.as_dict()["layout"] == "rows first"
    assert all(p.layout for p in suites.CONTESTS["layout"].grid())


def test_grids():
    paper = suites.paper_grid()
    assert len(paper) == len(set(paper)) == 2 * 2 * 6
    assert {p.d for p in paper} == {64, 128} and {p.batch * p.N_q for p in paper} == {16384}
    assert set(suites.paper_grid((1024, 4096, 16384))) < set(paper)
    assert {p.N_q for p in suites.long_grid() if p.causal} == {2**15, 2**16, 2**17, 2**18}
    assert {(p.heads, p.kv_heads) for p in suites.heads_grid()} == {(32, 32), (32, 8), (32, 1)}
    assert all(b.N_q == 2 * a.N_q for a, b in zip(suites.memory_grid(), suites.memory_grid()[1:], strict=False))
    assert all(p.N_q <= 512 for p in suites.small_grid())


def test_the_ladder_is_measured_where_it_matters():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_lab.kernels.ladder import RUNGS, SIDE
    from fa2_studio.bench import ladder

    grid = ladder.grid()
    squares = {(N, d, causal) for N in (4096, 16384) for d in (64, 128) for causal in (False, True)}
    assert {(p.N_q, p.d, p.causal) for p in grid if p.batch * p.N_q == 16384 and p.heads * p.d == 2048} == squares
    assert {p.causal for p in grid if p.batch * p.heads == 8} == {False, True} and len(grid) == 10
    names = [name for name, _ in ladder.everybody(grid[0], None)]
    assert names[: len(RUNGS)] == list(RUNGS) and names[len(RUNGS)] == "fa2_lab" and set(ladder.SLOW) <= set(names)
    beside = [
        p for p in grid if {"s00_split_keys", "s01_split_queries"} & {name for name, _ in ladder.everybody(p, None)}
    ]
    assert beside == [Problem.square(4096, 64, False)] and ladder.counted_here(grid[0]) == names
    assert ladder.counted_here(beside[0]) == ["r07_two_loops", *SIDE]


def test_a_run_of_the_ladder_compiles_everything_first_and_has_a_row_for_everybody(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    import fa2_lab.tools.xray as room
    from fa2_lab.kernels.ladder import BACKWARD, RUNGS, SIDE
    from fa2_studio.bench import ladder

    def timed(problem, direction, contestants, wrong):
        called[problem] = dict(contestants)
        return Measurement(problem.as_dict(), direction, {})

    ahead, called = [], {}
    monkeypatch.setattr(ladder, "elsewhere", lambda call, jobs: ahead.extend(jobs))
    monkeypatch.setattr(ladder, "machine", dict)
    monkeypatch.setattr(ladder, "ceilings", dict)
    monkeypatch.setattr(Problem, "tensors", lambda self, **_: (torch.ones(1, 1, 64, 1),) * 3)
    monkeypatch.setattr(ladder, "timed", timed)
    monkeypatch.setattr(ladder, "down", lambda problem: Measurement(problem.as_dict(), "backward", {}))
    monkeypatch.setattr(
        ladder, "count", lambda problem, name: Measurement(problem.as_dict() | dict(rung=name), "counters", {})
    )
    (tmp_path / "mine.py").write_text("def forward(q, k, v, causal):\n    return q + causal, 'L'\n")

    def xray(rung, *_, d, **__):
        if rung == BACKWARD[-1]:
            raise ValueError("no such chip")
        numbers = dict(registers=d, spills=0, shared=0, tensor=1, exponential=1, warps=4)
        return [SimpleNamespace(numbers=numbers)]

    monkeypatch.setattr(room, "xray", xray)
    rows = ladder.run(beside=tmp_path / "mine.py").rows
    assert {rung for rung, _ in ahead} == {*RUNGS, *SIDE, *BACKWARD}
    assert {p for rung, p in ahead if rung == RUNGS[-1]} == set(ladder.grid())
    assert [row.problem for row in rows if row.direction == "forward"] == [p.as_dict() for p in ladder.grid()]
    assert sorted(row.problem["causal"] for row in rows if row.direction == "backward") == [False, True]
    for where, calls in called.items():
        assert calls["mine"]()[0, 0, 0, 0] == 1 + where.causal
    read = {row.problem["rung"]: row for row in rows if row.direction == "compiled"}
    assert list(read) == [*RUNGS, *SIDE, *BACKWARD] and read[RUNGS[0]].values["registers"] == [128]
    assert read[SIDE[0]].values["registers"] == [64] and read[BACKWARD[-1]].failed == {"xray": "no such chip"}
    counted = [row.problem["rung"] for row in rows if row.direction == "counters"]
    assert counted == ["r07_two_loops", *SIDE, *(name for name, _ in ladder.everybody(ladder.MAIN, None))]


def test_a_rung_that_is_wrong_or_fails_is_named_and_not_timed(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_studio.bench import ladder

    def fails():
        raise RuntimeError("no such chip")

    monkeypatch.setattr(ladder, "measure", lambda calls, *how: {name: protocol.Timing(1.0, 0.5, 2.0) for name in calls})
    contestants = [("right", lambda: 0.0), ("wrong", lambda: 1.0), ("NaN", lambda: float("nan")), ("fails", fails)]
    problem = Problem(1, 1, 1, 64, 64, 16, True)
    row = ladder.timed(problem, "backward", contestants, lambda answer: answer)
    assert row.values == {"right": [1.0, 0.5, 2.0]} and row.direction == "backward"
    assert set(row.failed) == {"wrong", "NaN", "fails"} and "no such chip" in row.failed["fails"]
    assert row.flops == 2.5 * ladder.timed(problem, "forward", contestants, lambda answer: answer).flops


@pytest.mark.parametrize(
    "numbers, fit",
    [
        (dict(registers=128, shared=0, warps=4), 4),  # 64 K registers are 4 × 4 × 32 × 128
        (dict(registers=129, shared=0, warps=4), 3),
        (dict(registers=32, shared=57 * 1024 - 1024, warps=4), 4),
        (dict(registers=32, shared=57 * 1024, warps=4), 3),
        (dict(registers=16, shared=0, warps=8), 8),
    ],
)
def test_how_many_programs_fit_on_an_sm(numbers, fit):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_studio.bench import ladder

    assert ladder.programs_on_an_sm(**numbers) == fit


def test_a_timing_is_the_median_and_the_middle_half():
    timing = protocol.summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median == 3.0 and timing.low < 3.0 < timing.high


def test_a_call_that_fails_in_the_warm_up_gives_its_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert protocol.warm_up(lambda: None) == ""
    assert protocol.warm_up(lambda: [][0]).startswith("IndexError: ")
