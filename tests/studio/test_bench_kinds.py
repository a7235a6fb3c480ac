"""The kinds of suites besides the plain contest: same bits, packed sequences, masks, accuracy, hardware counters."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from fa2_studio.bench import accuracy, counters, masks, packed, peers, problem, protocol, suites  # noqa: E402
from fa2_studio.bench.contest import DIRECTIONS  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402

# Same bits ----------------------------------------------------------------------------------------------------


def test_the_same_bits_are_asked_for_forward_and_backward_and_nowhere_else(monkeypatch):
    asked = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            asked.append(("forward", *flags()))
            return q.clone()

        @staticmethod
        def backward(ctx, dO):
            asked.append(("backward", *flags()))
            return dO

    def flags():
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    before = flags()
    attention = peers.deterministic(lambda problem: lambda q, k, v: Asking.apply(q))(None)
    x = torch.ones(2, requires_grad=True)
    O = attention(x, x, x)
    suites.call_of(attention, "backward", (x, x, x, torch.ones(2)), O)()
    suites.call_of(attention, "both", (x, x, x, torch.ones(2)), None)()
    suites.call_of(lambda q, k, v: Asking.apply(q), "both", (x, x, x, torch.ones(2)), None)()
    same, usual = (True, False), before
    steps = [("forward", same), ("backward", same), ("forward", same), ("backward", same)]
    assert asked == [(what, *flag) for what, flag in [*steps, ("forward", usual), ("backward", usual)]]
    assert flags() == before


def test_every_contestant_of_a_suite_is_a_peer():
    for contest in suites.CONTESTS.values():
        assert set(contest.names) <= set(peers.PEERS) and contest.repeats >= 5
    assert set(suites.RIVALS) <= set(suites.NAMES)
    assert all(name + " deterministic" in suites.SAME_BITS for name in suites.SAME_BITS[::2])


def test_two_hundred_shapes_are_the_same_each_time_and_unlike_each_other():
    grid = suites.random_grid()
    assert grid == suites.random_grid() and len(set(grid)) == 200
    assert 60 < sum(p.causal for p in grid) < 140 and {p.d for p in grid} == {32, 64, 96, 128}
    assert 60 < sum(p.N_q % 64 == 0 for p in grid) < 140 and 20 < sum(p.N_q != p.N_k for p in grid) < 80
    assert all(p.heads % p.kv_heads == 0 and (p.N_q <= p.N_k or not p.causal) for p in grid)
    assert max(p.forward_flops for p in grid) < 2e12 and min(p.N_q for p in grid) >= 64


def test_nvidia_s_shape():
    assert {(p.batch, p.heads, p.kv_heads, p.d) for p in suites.nvidia_grid()} == {(1, 64, 8, 128)}
    assert {p.N_q for p in suites.nvidia_grid()} == {2**n for n in range(11, 16)} and len(suites.nvidia_grid()) == 10


# Packed sequences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed_and_padded_sequences_are_checked_and_their_tokens_counted(direction, monkeypatch):
    lengths, dense = (5, 40, 23), torch.nn.functional.scaled_dot_product_attention
    where = Problem(3, 2, 2, 40, 40, 16, True, "float32")

    def varlen(q, k, v, begins, also, longest, too, causal):
        assert begins.tolist() == also.tolist() == [0, 5, 45, 68] and longest == too == 40 and causal
        each = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        whole = [dense(*(x.transpose(0, 1)[None] for x in one), is_causal=True) for one in each]
        return torch.cat([O[0].transpose(0, 1) for O in whole]), None

    def by_window(q, k, v, *rest, window_size):
        assert window_size == (-1, 0)
        return varlen(q, k, v, *rest, causal=True)[0]

    def wrong(q, k, v, *rest, **options):
        return varlen(q, k, v, *rest, **options)[0] * 1.1

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=varlen))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=wrong))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=by_window))
    monkeypatch.setitem(sys.modules, "fa2_lab.api.packed", None)
    monkeypatch.setattr(where.__class__, "flops", lambda self, direction: 1.0 * self.N_q)

    def timing(calls):
        for call in calls.values():
            call()
        return {name: protocol.Timing(1.0, 1.0, 1.0) for name in calls}

    row = packed.row(where, direction, lengths, timing, "cpu")
    assert set(row.values) == {"fa2_lab padded", "FlashAttention-3", "torch varlen_attn"} and row.flops == 68.0
    assert row.failed.keys() == {"fa2_lab", "flash_attn"} and row.failed["flash_attn"].startswith(
        "wrong: error 1.0e-01"
    )


def test_padding_keeps_the_tokens_in_their_places():
    x = torch.arange(7 * 2 * 3.0).view(7, 2, 3)
    y = packed.padded(x, (2, 4, 1))
    assert y.shape == (3, 2, 4, 3) and y.is_contiguous()
    assert torch.equal(y[1].transpose(0, 1), x[2:6]) and not y[2, :, 1:].any()
    assert len(packed.LENGTHS) == 16 and (min(packed.LENGTHS), max(packed.LENGTHS)) == (100, 4000)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", ("window", "softcap", "sinks"))
def test_masks_are_checked_before_they_are_timed(mask, direction, monkeypatch):
    where = Problem(1, 3, 3, 80, 80, 16, True, "float32")
    monkeypatch.setitem(masks.MASKS, mask, masks.Mask(**{mask: dict(window=9, softcap=1.5, sinks=True)[mask]}))
    monkeypatch.setitem(masks.CONTESTANTS, "causal alone", lambda *_: masks.ours(where, masks.Mask(), None))
    monkeypatch.setitem(masks.CONTESTANTS, "FlexAttention", lambda *_: lambda q, k, v: q.no_such_thing)
    timed = []
    row = masks.row(where, direction, mask, lambda calls: timed.extend(calls.values()) or {}, "cpu")
    assert len(timed) == 1 and timed[0]() is not None and row.problem["mask"] == mask
    assert set(row.failed) == {*masks.CONTESTANTS} - {"fa2_lab"}
    assert row.failed["causal alone"].startswith("wrong: error ")
    assert row.failed["FlexAttention"].startswith("AttributeError")


def test_the_flops_of_a_window_are_those_of_the_keys_that_rows_see():
    where = Problem(1, 1, 1, 100, 100, 8, True)
    seen = sum(min(row + 1, 9) for row in range(100))
    assert masks.flops(where, masks.Mask(9), "forward") == pytest.approx(4 * seen * 8)
    assert masks.flops(where, masks.Mask(softcap=2.0), "both") == where.flops("both")


# Accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_truth_is_autograd_s_in_float64(causal):
    where = Problem(1, 2, 2, 40, 40, 16, causal, "float64")
    q, k, v, dO = where.tensors(grad=True, device="cpu")
    O = peers.PEERS["torch"](where)(q, k, v)
    right = (O, *torch.autograd.grad(O, (q, k, v), dO))
    for x, y in zip(right, accuracy.truth(q, k, v, dO, causal), strict=True):
        assert problem.distance(x.detach(), y) < 1e-12


@pytest.mark.parametrize("kind", accuracy.INPUTS)
def test_every_error_is_that_of_its_contestant_and_its_part(kind, monkeypatch):
    where = Problem(1, 2, 2, 40, 40, 16, True, "float32")
    right = peers.PEERS["torch"](where)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gradient):
            ctx.gradient = gradient
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return dx * ctx.gradient, None

    def wrong(problem):
        return lambda q, k, v: right(q, Scaled.apply(k, 0.75), Scaled.apply(v, 1.5))

    def gone(problem):
        raise peers.Missing("not installed")

    monkeypatch.setitem(peers.PEERS, "wrong", wrong)
    monkeypatch.setitem(peers.PEERS, "gone", gone)
    found, failed = accuracy.errors(where, kind, ("torch", "wrong", "gone"), "cpu")
    assert failed == {"gone": "not installed"} and max(found["torch"].values()) < 1e-4
    assert found["wrong"] == pytest.approx(found["torch"] | dict(dK=0.25, dV=0.5), rel=1e-3)
    monkeypatch.setattr(accuracy, "errors", lambda problem, kind: (found, failed))
    row = accuracy.row(where, "dV", kind)
    assert row.values["wrong"] == [pytest.approx(0.5)] and row.unit == "relative error"
    assert row.problem["rung"] == f"dV, {kind}, float32"


def test_the_inputs_are_what_the_protocol_says():
    where = Problem(1, 4, 4, 500, 500, 64, True)

    def drawn(kind):
        return accuracy.INPUTS[kind](where, torch.Generator("cpu").manual_seed(0))

    for x in drawn("normal"):
        assert abs(x.std() - 1) < 0.02 and x.abs().max() < 6
    for x in drawn("outliers"):
        assert abs(x.var() - 1.1) < 0.05 and 5e-4 < ((x.abs() > 6).float().mean() + 4e-4) < 1.5e-3
    q, k, *_ = drawn("peaked")
    s = (q @ k.transpose(2, 3) / 8).masked_fill(torch.ones(500, 500, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.softmax(s, 3).amax(3).median() > 0.99
    assert len({where.dtype for where in accuracy.grid()}) == 2 and len(accuracy.grid()) == 8


# Counters -----------------------------------------------------------------------------------------------------

XU = "exp and other special instructions"
NCU = """==PROF== Connected to process 42
==PROF== Disconnected
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum","smsp__inst_executed_pipe_xu.sum"
"","","Mbyte","Kbyte","byte","inst"
"0","spin_kernel(long)","9","9","9","9"
"1","scores_kernel","1.5","250","1,000","12"
"2","softmax_kernel","2.5","750","2,000","{tensor}"
"3","spin_kernel(long)","9","9","9","9"
"4","forward_kernel","3","0","5","6"
"""


def test_the_kernels_of_each_call_are_added_up_in_bytes():
    standard, fa2 = counters.summed(NCU.format(tensor="30"))
    assert standard == {"DRAM bytes read": 4e6, "DRAM bytes written": 1e6, "L2 bytes": 3e3, XU: 42.0}
    assert fa2 == {"DRAM bytes read": 3e6, "DRAM bytes written": 0.0, "L2 bytes": 5.0, XU: 6.0}


def test_a_counter_that_a_kernel_lacks_is_left_out():
    standard, fa2 = counters.summed(NCU.format(tensor=""))
    assert XU not in standard and fa2[XU] == 6


def test_shares_of_cycles_are_weighted_by_cycles():
    busy, cycles = counters.SHARES["tensor cores at work, %"], counters.METRICS[counters.CYCLES]
    rows = [("spin_kernel", 9, 9), ("scores_kernel", 50, 300), ("softmax_kernel", 10, 100), ("spin_kernel", 9, 9)]
    lines = [f'"ID","Kernel Name","{busy}","{cycles}"', '"","","%","cycle"']
    lines += [f'"{n}","{name}","{share}","{took}"' for n, (name, share, took) in enumerate(rows)]
    standard, nothing = counters.summed("\n".join(lines))
    assert standard == {counters.CYCLES: 400.0, "tensor cores at work, %": 40.0} and nothing == {}


def test_without_ncu_the_reason_is_given(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"^ncu is not installed$"):
        counters.read("fa2_studio.bench.ladder", Problem(1, 1, 1, 64, 64, 64, False), ["fa1"])
