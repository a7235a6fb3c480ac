"""The bench's FLOPs, float64 truths and implementations, and that a wrong implementation is never timed."""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from fa2_studio.bench import accuracy, decode, implementations, packed, problem, protocol, suites  # noqa: E402
from fa2_studio.bench.compare import DIRECTIONS, TOLERANCE, prepare_all, prepare_checked_calls, timed_call  # noqa: E402
from fa2_studio.bench.implementations import DETERMINISTIC_SUFFIX, IMPLEMENTATIONS, Implementation  # noqa: E402
from fa2_studio.bench.peers import dense, flex  # noqa: E402
from fa2_studio.bench.peers.packed import pad_sequences  # noqa: E402
from fa2_studio.bench.problem import Problem, default_device  # noqa: E402

DEVICE = default_device()
SMALL_PROBLEM = Problem(1, 4, 2, 40, 40, 16, causal=True, dtype="float32")


def constant_timings(calls, **how):
    """Make every call, and return a timing of three milliseconds for each."""
    for call in calls.values():
        call()
    return {name: protocol.Timing(3.0, 2.0, 4.0) for name in calls}


class Scaled(torch.autograd.Function):
    """The identity with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * ctx.factor, None


# Problems and truths ------------------------------------------------------------------------------------------


def test_bench_flops_equal_the_papers_formula():
    full = Problem(2, 3, 1, 5, 7, 11, causal=False)
    assert full.flops("forward") == 4 * 2 * 3 * 5 * 7 * 11
    assert full.flops("backward") == 2.5 * full.flops("forward") and full.flops("both") == 3.5 * full.flops("forward")
    assert replace(full, causal=True).flops("forward") == full.flops("forward") / 2
    square = Problem(1, 1, 1, 100, 100, 8, causal=True)
    visible = sum(min(row + 1, 9) for row in range(100))
    assert replace(square, window=9).flops("forward") == pytest.approx(4 * visible * 8)
    assert replace(square, softcap=2).flops("both") == square.flops("both")
    assert packed.packed_flops(Problem(2, 3, 3, 40, 40, 16, causal=True), (5, 40), "forward") == 4 * 3 * 16 * 1625 / 2


@pytest.mark.parametrize("causal, N_q, N_k", [(False, 100, 100), (True, 100, 100), (True, 90, 130), (False, 70, 30)])
def test_bench_truth_equals_autograd_and_detects_wrong_answers(causal, N_q, N_k, monkeypatch):
    p = Problem(2, 4, 2, N_q, N_k, 16, causal, dtype="float64")
    q, k, v, dO = p.tensors(grad=True, device="cpu")
    O = dense.plain(p)(q, k, v)
    gradients = torch.autograd.grad(O, (q, k, v), dO)
    assert (
        problem.relative_error_of_O(O, q, k, v, causal) < 1e-12
        and problem.relative_error_of_O(1.05 * O, q, k, v, causal) > TOLERANCE
    )
    truth = problem.sampled_gradients(q, k, v, dO, causal)
    assert problem.relative_error_of_gradients(gradients, truth) < 1e-12
    for n in range(3):
        for wrong in (1.05 * gradients[n], torch.full_like(gradients[n], torch.nan)):
            assert (
                not problem.relative_error_of_gradients([*gradients[:n], wrong, *gradients[n + 1 :]], truth)
                <= TOLERANCE
            )
    monkeypatch.setattr(problem, "MAX_P_ELEMENTS", 0)  # in chunks of few rows
    for part, whole in zip(problem.sampled_gradients(q, k, v, dO, causal, sample=20), truth, strict=True):
        rows = min(len(part), len(whole))
        assert torch.allclose(part[-rows:] if part is not truth[0] else part, whole[-rows:], rtol=1e-9) or rows == 20


@pytest.mark.parametrize("causal", [False, True])
def test_bench_full_gradients_equal_autograd(causal):
    p = Problem(1, 2, 2, 40, 40, 16, causal, dtype="float64")
    q, k, v, dO = p.tensors(grad=True, device="cpu")
    O = dense.plain(p)(q, k, v)
    right = (O, *torch.autograd.grad(O, (q, k, v), dO))
    for x, y in zip(right, accuracy.float64_results(q, k, v, dO, causal), strict=True):
        assert problem.relative_error(x.detach(), y) < 1e-12


@pytest.mark.parametrize("kind", accuracy.INPUTS)
def test_each_recorded_error_belongs_to_its_implementation_and_part(kind, monkeypatch):
    p = replace(SMALL_PROBLEM, heads=2)
    right = dense.plain(p)
    wrong = Implementation(lambda problem: lambda q, k, v: right(q, Scaled.apply(k, 0.75), Scaled.apply(v, 1.5)))
    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", wrong)
    errors, failed = accuracy.errors_of_implementations(p, kind, ("torch", "wrong"))
    assert not failed and max(errors["torch"].values()) < 1e-4
    assert errors["wrong"] == pytest.approx(errors["torch"] | dict(dK=0.25, dV=0.5), rel=1e-3)


# Contestants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["torch", "torch math", "fa2_lab reference", "fa2_lab portable", "fa2_lab"])
def test_implementation_supports_gqa_and_masks_in_both_passes(name, causal):
    if name.startswith("fa2_lab"):
        pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    p = replace(SMALL_PROBLEM, causal=causal)
    q, k, v = p.tensors(device=DEVICE)
    attention = implementations.prepare(name, p)
    assert problem.relative_error_of_O(attention(q, k, v), q, k, v, causal) < 1e-2
    bare, context = dense.call_and_context(attention)
    with context():
        assert problem.relative_error_of_O(bare(q, k, v), q, k, v, causal) < 1e-2
    if name != "fa2_lab reference":
        assert problem.relative_error_of_O(attention(q.requires_grad_(), k, v), q, k, v, causal) < 1e-2


def test_implementation_with_a_wrong_gradient_is_not_timed(monkeypatch):
    right = dense.plain(SMALL_PROBLEM)
    wrong = Implementation(lambda p: lambda q, k, v: right(q, k, Scaled.apply(v, 0.5)))
    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", wrong)
    tensors = SMALL_PROBLEM.tensors(grad=True, device="cpu")
    calls, failed = prepare_all(prepare_checked_calls(SMALL_PROBLEM, "forward", ("torch", "wrong"), tensors[:3]))
    assert calls.keys() == {"torch", "wrong"} and not failed
    calls, failed = prepare_all(prepare_checked_calls(SMALL_PROBLEM, "backward", ("torch", "wrong"), tensors))
    assert calls.keys() == {"torch"} and failed == {"wrong": "wrong: error 5.0e-01"}
    for direction in ("backward", "both"):
        O = right(*tensors[:3])
        call = timed_call(right, direction, tensors, O)
        assert problem.relative_error_of_gradients(call(), problem.sampled_gradients(*tensors, causal=True)) < 1e-5


def test_deterministic_mode_is_set_in_forward_and_backward_only(monkeypatch):
    asked = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            asked.append(torch.are_deterministic_algorithms_enabled())
            return q.clone()

        @staticmethod
        def backward(ctx, dO):
            asked.append(torch.are_deterministic_algorithms_enabled())
            return dO, dO, dO

    plain = lambda problem: Asking.apply  # noqa: E731
    monkeypatch.setitem(IMPLEMENTATIONS, "asking", Implementation(plain, deterministic=dense.deterministic(plain)))
    x = torch.ones(2, requires_grad=True)
    for name in ("asking" + DETERMINISTIC_SUFFIX, "asking"):
        timed_call(implementations.prepare(name, SMALL_PROBLEM), "both", (x, x.clone(), x.clone(), torch.ones(2)))()
    assert asked == [True, True, False, False]


# Packed, masks, decode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed_implementations_are_checked_before_timing(direction, monkeypatch):
    lengths, dense_attention = (5, 40, 23), torch.nn.functional.scaled_dot_product_attention

    def varlen(q, k, v, starts, also, longest, too, causal):
        assert starts.tolist() == also.tolist() == [0, 5, 45, 68] and longest == too == 40 and causal
        each = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        whole = [dense_attention(*(x.transpose(0, 1)[None] for x in one), is_causal=True) for one in each]
        return torch.cat([O[0].transpose(0, 1) for O in whole]), None

    by_window = lambda q, k, v, *rest, window_size: varlen(q, k, v, *rest, causal=window_size == (-1, 0))[0]  # noqa: E731
    wrong = lambda *given, **how: varlen(*given, **how)[0] * 1.1  # noqa: E731
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=varlen))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=wrong))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=by_window))
    p = Problem(3, 2, 2, 40, 40, 16, causal=True, dtype="float32")
    row = packed.time_packed(p, direction, lengths, constant_timings)
    assert set(row.values) >= {"fa2_lab padded", "FlashAttention-3", "torch varlen_attn"}
    assert row.failed["flash_attn"].startswith("wrong: error 1.0e-01")
    assert row.flops == packed.packed_flops(p, lengths, direction)
    built = dict(build_flags=dict(FLASHATTENTION_DISABLE_HDIM96=True))  # at d 96 it would run, slowly
    monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace(CONFIG=built))
    asked = {d: partial(implementations.prepare, "FlashAttention-3", replace(p, d=d)) for d in (64, 96, 128)}
    unbuilt = "it was built without support for d = 96"
    assert prepare_all(asked)[1] == {64: "not installed", 96: unbuilt, 128: "not installed"}
    x = torch.arange(7 * 2 * 3.0).view(7, 2, 3)
    y = pad_sequences(x, (2, 4, 1))
    assert torch.equal(y[1].transpose(0, 1), x[2:6]) and not y[2, :, 1:].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("asked", [dict(window=9), dict(softcap=2), dict(sinks=True), dict(alibi="distance")], ids=str)
def test_masked_implementations_are_checked_before_timing(asked, direction, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    p = Problem(1, 3, 3, 80, 80, 16, causal=True, dtype="float32", **asked)
    nothing = dict(window=None, softcap=None, sinks=False, alibi="")
    alone = Implementation(lambda problem: dense.ours(replace(problem, **nothing)), "masks")
    monkeypatch.setitem(IMPLEMENTATIONS, "causal alone", alone)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(flex, "compiled_flex", lambda: flex_by_definition)
    monkeypatch.setattr(flex, "causal_mask", lambda N_q, N_k: N_q)
    monkeypatch.setattr(flex, "window_mask", lambda N, window: window)
    row = suites.time_dense(p, direction, implementations.names("masks"), constant_timings)
    assert row.values.keys() == {"fa2_lab", "fa2_lab portable", "FlexAttention"}
    assert row.problem["mask"] in ("window 9", "softcap 2", "sinks", "causal, ALiBi by distance")
    assert row.failed["causal alone"].startswith("wrong: error ")


def flex_by_definition(q, k, v, block_mask, enable_gqa, score_mod=None, return_lse=False):
    """Return what FlexAttention computes, by the definition."""
    row, head = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(q.shape[1], device=q.device)
    key = row.T
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    s = s if score_mod is None else score_mod(s, 0, head[:, None, None], row, key)
    s = s.masked_fill((key > row) | (row - key >= block_mask), -torch.inf)
    O = torch.softmax(s, 3) @ v
    return (O, torch.logsumexp(s, 3)) if return_lse else O


DECODE_PROBLEM = Problem(2, 4, 2, 1, 64, 16, causal=False, dtype="float32")


@pytest.fixture
def recorded(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_studio.bench import bandwidth

    recorded = []
    monkeypatch.setattr(decode, "measure_kernels", lambda calls, **how: recorded.append(how) or constant_timings(calls))
    monkeypatch.setattr(bandwidth, "read_call", lambda X: partial(recorded.append, X.nbytes))
    return recorded


def test_decode_bench_reads_the_cache_and_reports_microseconds(recorded, monkeypatch):
    doubled = Implementation(lambda problem: lambda q, k, v: 2 * dense.plain(problem)(q, k, v), "decode")
    for name, implementation in {**IMPLEMENTATIONS}.items():
        monkeypatch.setitem(IMPLEMENTATIONS, name, replace(implementation, suites="decode" if name == "torch" else ""))
    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", doubled)
    row = decode.compare_implementations(DECODE_PROBLEM)
    timing = [3000.0, 2000.0, 4000.0]
    assert row.values == {"reading alone": timing, "torch": timing} and row.unit == "µs"
    assert row.failed == {"wrong": "wrong: error 1.0e+00"}
    size = 2 * 2 * 2 * 64 * 16 * 4  # K and V, sequences, heads, keys, d, bytes
    assert row.problem["bytes"] == size and recorded == [dict(repeats=60, flushing=protocol.l2_reading_call), size]


def test_paged_decode_with_a_wrong_result_is_not_timed(recorded, monkeypatch):
    import fa2_lab.api.paged

    right = dense.plain(DECODE_PROBLEM)

    def paged(q, k_pages, v_pages, table, lengths):
        k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))
        assert lengths.tolist() == [64, 64]
        return right(q, k, v) * (1.5 if k_pages.shape[1] == 64 else 1.0)

    monkeypatch.setattr(import_module("fa2_lab.api.attention"), "attention", right)
    monkeypatch.setattr(fa2_lab.api.paged, "attention_paged", paged)
    monkeypatch.setattr(decode, "PAGE_SIZES", (16, 64))
    row = decode.compare_page_sizes(DECODE_PROBLEM)
    assert list(row.values) == ["fa2_lab", "page 16"] and row.failed == {"page 64": "wrong: error 5.0e-01"}


def test_bandwidth_kernel_reads_every_number():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_studio.bench import bandwidth

    X = torch.arange(3 * 64.0, device=DEVICE)
    assert bandwidth.read_call(X, block=64)().tolist() == [2016.0, 6112.0, 10208.0]
