"""The bench's timing, with a GPU and a host that only advance a clock, so that every true time is known."""

import math
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from bench_clock import Clocks  # noqa: E402

from fa2_studio.bench import compare, protocol, suites  # noqa: E402
from fa2_studio.bench.implementations import IMPLEMENTATIONS, Implementation  # noqa: E402
from fa2_studio.bench.peers import dense  # noqa: E402
from fa2_studio.bench.power import PowerMeter  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    monkeypatch.setattr(protocol, "PowerMeter", ConstantMeter)
    return Clocks().put_in_place(monkeypatch, torch, protocol.time)


def timed_calls(clocks: Clocks, order: list, **milliseconds: float) -> dict:
    """Return calls of known length. Each takes the host 0.2 ms and appends its name to `order`."""

    def call(name: str, ms: float):
        order.append(name)
        clocks.work(ms / 1e3, launch=2e-4)

    return {name: partial(call, name, ms) for name, ms in milliseconds.items()}


# Rested -------------------------------------------------------------------------------------------------------


def test_measured_time_excludes_cache_flush_head_start_and_host(clocks):
    flushed = []
    timings = protocol.measure_kernels(
        timed_calls(clocks, [], a=0.5, b=2.0, c=0.01) | dict(broken=lambda: [][0]),
        repeats=5,
        flushing=lambda: lambda: flushed.append(clocks.work(0.007)),
    )
    assert timings.pop("broken").startswith("IndexError")
    assert {name: timing.median for name, timing in timings.items()} == pytest.approx(dict(a=0.5, b=2.0, c=0.01))
    assert len(flushed) == 5 * 3, "once before every call"
    assert protocol.timing_of([7.0, 1, 2, 3, 4, 5, 6]) == protocol.Timing(median=4, low=2, high=6)
    assert compare.wrong_result_reason([0.0, math.nan]).startswith("wrong")


def test_implementations_run_in_random_order_in_each_round(clocks):
    order = []
    protocol.measure_kernels(timed_calls(clocks, order, a=1.0, b=1.0, c=1.0), repeats=12, flushing=lambda: lambda: None)
    turns = "".join(order[3 * protocol.WARM_UP :])
    rounds = [turns[n : n + 3] for n in range(0, len(turns), 3)]
    assert len(rounds) == 12 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[0] for each in rounds} == {"a", "b", "c"}


# Sustained ----------------------------------------------------------------------------------------------------


class ConstantMeter(nullcontext):
    def __enter__(self):
        return self

    def between(self, first, last):
        return [1500.0, 690.0] if last - first >= protocol.SUSTAINED_SECONDS else []


@pytest.mark.parametrize("ms", [0.3, 70.0, 900.0])
def test_sustained_timing_measures_the_call_for_at_least_a_second(ms, clocks, monkeypatch):
    order = []
    monkeypatch.setattr(protocol.random, "sample", lambda names, count: names[::-1])  # b has the first turn
    timings = protocol.measure_sustained(timed_calls(clocks, order, a=ms, b=2 * ms))
    assert {name: timing.median for name, timing in timings.items()} == pytest.approx(dict(a=ms, b=2 * ms))
    assert timings["a"].chip == (1500.0, 690.0) and [*timings] == ["a", "b"] and order[2 * protocol.WARM_UP] == "b"
    for name, length in (("a", ms), ("b", 2 * ms)):
        assert 1.0 <= order.count(name) * length / 1e3 < 2.5 + 12 * length / 1e3


def test_sustained_timing_keeps_the_gpu_busy_and_excludes_warm_up(clocks, monkeypatch):
    starts, counted = [], []
    monkeypatch.setattr(protocol, "timing_of", lambda pieces: counted.extend(pieces) or protocol.Timing(1.2, 1.2, 1.2))

    def call():
        starts.append(clocks.gpu)
        warm = clocks.gpu - starts[0] > 0.25
        clocks.work(1.2e-3 if warm else 1e-3, launch=1e-5)

    before = clocks.idle
    protocol.time_without_pause(call, ConstantMeter())
    assert len(counted) > 15 and counted == pytest.approx([1.2] * len(counted)) and clocks.idle - before < 2e-3


def test_clock_and_power_are_medians_of_concurrent_readings():
    lines = "printf '1500, 600, 0x1\\n[N/A], 3, 0x0\\n1700, 690.5, 0x5\\n1600, 650, 0x4\\n'; sleep 30"
    with PowerMeter(["bash", "-c", lines]) as meter:
        begun = time.perf_counter()
        while len(meter.readings) < 3 and time.perf_counter() < begun + 10:
            time.sleep(0.01)
        assert meter.between(begun - 10, begun + 10) == [1600.0, 650.0, 1.0]
        assert meter.between(begun + 10, begun + 20) == []
    assert meter.process.returncode is not None, "nothing is left behind"
    with PowerMeter(["no-such-program"]) as meter:
        assert meter.between(0, math.inf) == []


def test_clock_and_power_readings_reach_the_row(clocks):
    calls = timed_calls(clocks, [], fa2_lab=1.0, cuDNN=2.0)
    prepare_by_name = {name: lambda call=call: call for name, call in calls.items()}
    row = compare.compare({}, "forward", prepare_by_name, 1e9, protocol.measure_sustained)
    assert row.values["cuDNN"] == pytest.approx([2.0] * 3) and row.chip == {name: [1500.0, 690.0] for name in calls}
    assert row.ratio("fa2_lab", "cuDNN") == pytest.approx(2.0) and row.rate("fa2_lab") == pytest.approx(1.0)


def test_with_host_timing_is_the_longer_of_host_and_gpu(clocks):
    found = protocol.measure_repeated(timed_calls(clocks, [], a=1.0, b=0.05) | dict(broken=lambda: [][0]))
    assert found.pop("broken").startswith("IndexError")
    assert {name: timing.median for name, timing in found.items()} == pytest.approx(dict(a=1.0, b=0.2), rel=0.02)


# The host, memory, ceilings -----------------------------------------------------------------------------------


def test_host_time_is_measured_over_consecutive_calls(clocks):
    inside, log = [], []

    @contextmanager
    def held():
        clocks.host += 100.0  # the choice of a backend does not count
        inside.append(True)
        yield
        inside.clear()

    def call(name, seconds):
        log.append((name, bool(inside)))
        first = len(log) < 2 or log[-2][0] != name
        clocks.host += 50.0 if first else seconds  # what comes after another contestant is slow

    calls = {name: partial(call, name, seconds) for name, seconds in (("a", 2e-6), ("b", 3e-6))}
    found = protocol.measure_host_time(calls | dict(b=dense.WithContext(calls["b"], held)), rounds=4)
    assert {name: 1e3 * timing.median for name, timing in found.items()} == pytest.approx(dict(a=2.0, b=3.0), rel=1e-3)
    assert all(within == (name == "b") for name, within in log)


def test_ceilings_equal_work_over_time_and_flush_exceeds_l2(monkeypatch):
    monkeypatch.setattr(dense, "gemm_call", lambda: ("a product", 6e12))
    monkeypatch.setattr(dense, "copy_call", lambda: ("a copy", 8e9))
    times = dict(gemm=protocol.Timing(12, 12, 12), copy=protocol.Timing(2, 2, 2))
    monkeypatch.setattr(compare, "measure_kernels", lambda calls: times)
    assert compare.measure_ceilings() == {"GEMM TFLOP/s": 500, "copy TB/s": 4}
    monkeypatch.setattr(protocol, "l2_bytes", lambda: 50)
    monkeypatch.setattr(torch, "empty", lambda size, **kind: SimpleNamespace(zero_=size))
    assert protocol.l2_overwriting_call() > 50


def test_peak_memory_counts_a_second_calls_extra_bytes(monkeypatch):
    usual, peaks = Problem.tensors, iter([8, 9])  # MiB: the first call compiles
    monkeypatch.setattr(Problem, "tensors", lambda self, grad: usual(self, grad=grad, device="cpu"))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks) * 2**20)

    def gone(problem):
        raise dense.Missing("not installed")

    monkeypatch.setitem(IMPLEMENTATIONS, "gone", Implementation(gone))
    problem = Problem(1, 2, 2, 40, 40, 16, causal=False, dtype="float32")
    row = suites.measure_memory(problem, "forward", ("torch", "gone"))
    assert (row.values, row.unit, row.failed) == ({"torch": [6.0]}, "MiB", {"gone": "not installed"})
