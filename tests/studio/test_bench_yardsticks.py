"""The bench's yardsticks against known answers: clocks that are set, products and copies of known size."""

import math
import subprocess
import time
from functools import partial

import before_after
import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

from bench_clock import Clocks  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from fa2_studio.bench import contest, peers, protocol, results  # noqa: E402
from fa2_studio.bench.power import Meter  # noqa: E402


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    return Clocks().put_in_place(monkeypatch, torch, protocol.time)


def contestants(clocks: Clocks, order: list, **milliseconds: float) -> dict:
    """Calls of known length, which take the host 0.2 ms each and write down that they were made."""

    def call(name: str, ms: float):
        def run():
            order.append(name)
            clocks.work(ms / 1e3, launch=2e-4)

        return run

    return {name: call(name, ms) for name, ms in milliseconds.items()}


# Rested -------------------------------------------------------------------------------------------------------


def test_a_time_is_that_of_the_call_without_flush_head_start_and_host(clocks):
    calls = contestants(clocks, [], a=0.5, b=2.0, c=0.01)
    flushed = []

    def flushing():
        return lambda: flushed.append(clocks.work(0.007))

    found = protocol.measure(calls, repeats=5, flushing=flushing)
    assert {name: timing.median for name, timing in found.items()} == pytest.approx(dict(a=0.5, b=2.0, c=0.01))
    assert all(timing.low == pytest.approx(timing.high) for timing in found.values())
    assert len(flushed) == 5 * 3, "once before every call"


def test_a_call_has_a_head_start_in_which_the_host_hands_it_over(clocks):
    found = protocol.measure(contestants(clocks, [], a=0.01), repeats=3, flushing=lambda: lambda: clocks.wait())
    assert found["a"].median == pytest.approx(0.01)


def test_contestants_take_turns_and_nobody_always_comes_after_the_same_one(clocks):
    order = []
    protocol.measure(contestants(clocks, order, a=1.0, b=1.0, c=1.0), repeats=12, flushing=lambda: lambda: None)
    turns = "".join(order[3 * protocol.WARM_UP :])
    rounds = [turns[n : n + 3] for n in range(0, len(turns), 3)]
    assert len(rounds) == 12 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[0] for each in rounds} == {"a", "b", "c"}
    assert {turns[n : n + 2] for n in range(len(turns) - 1)} >= {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_a_contestant_that_fails_is_named_and_the_others_are_timed(clocks):
    calls = contestants(clocks, [], a=1.0) | dict(broken=lambda: [][0])
    found = protocol.measure(calls, repeats=3, flushing=lambda: lambda: None)
    assert found["broken"].startswith("IndexError") and found["a"].median == pytest.approx(1.0)


@pytest.mark.parametrize("flushing, factor", [(protocol.overwriting, 2), (protocol.reading, 2)])
def test_a_flush_touches_twice_the_cache(flushing, factor, monkeypatch):
    monkeypatch.setattr(protocol, "l2_bytes", lambda: 4096)
    made = []
    for name in ("empty", "zeros"):
        usual = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda n, dtype, device, usual=usual: made.append(usual(n, dtype=dtype)) or made[-1]
        )
    flushing()()
    assert made[0].nbytes == factor * 4096


# Sustained ----------------------------------------------------------------------------------------------------


class NoMeter:
    def between(self, first, last):
        return [1500.0, 690.0] if last - first >= protocol.SECONDS else []


@pytest.mark.parametrize("ms", [0.3, 4.0, 70.0, 900.0])
def test_a_sustained_time_is_that_of_the_call_and_takes_at_least_a_second(ms, clocks):
    order = []
    found = protocol.sustain(contestants(clocks, order, a=ms, b=2 * ms), NoMeter())
    assert {name: timing.median for name, timing in found.items()} == pytest.approx(dict(a=ms, b=2 * ms))
    assert found["a"].chip == (1500.0, 690.0)
    for name, length in (("a", ms), ("b", 2 * ms)):
        assert 1.0 <= order.count(name) * length / 1e3 < 2.5 + 12 * length / 1e3
    assert "".join(order[2 * protocol.WARM_UP :]) == "a" * (order.count("a") - 3) + "b" * (order.count("b") - 3)


def test_the_gpu_never_waits_for_the_host_within_a_turn(clocks):
    call = contestants(clocks, [], a=0.3)["a"]
    before = clocks.idle
    protocol.without_pause(call, NoMeter())
    assert clocks.idle - before < 2e-3


def test_what_a_chip_does_before_it_is_warm_does_not_count(clocks, monkeypatch):
    began, counted = [], []
    monkeypatch.setattr(protocol, "summary", lambda pieces: counted.extend(pieces) or protocol.Timing(1.2, 1.2, 1.2))

    def call():
        began.append(clocks.gpu)
        warm = clocks.gpu - began[0] > 0.25
        clocks.work(1.2e-3 if warm else 1e-3, launch=1e-5)

    protocol.without_pause(call, NoMeter())
    assert len(counted) > 15 and counted == pytest.approx([1.2] * len(counted))


def test_clock_and_power_are_medians_of_what_was_noted_meanwhile():
    lines = "printf '1500, 600\\n[N/A], 3\\n1700, 690.5\\n1600, 650\\n'; sleep 30"
    with Meter(["bash", "-c", lines]) as meter:
        begun = time.perf_counter()
        while len(meter.noted) < 3 and time.perf_counter() < begun + 10:
            time.sleep(0.01)
        assert meter.between(begun - 10, begun + 10) == [1600.0, 650.0]
        assert meter.between(begun + 10, begun + 20) == []
    assert meter.process.returncode is not None, "nothing is left behind"


def test_without_nvidia_smi_nothing_is_noted(monkeypatch):
    with Meter(["no-such-program"]) as meter:
        assert meter.between(0, math.inf) == []


def test_the_readings_reach_the_record(clocks, monkeypatch):
    calls = contestants(clocks, [], fa2_lab=1.0, cuDNN=2.0)
    ready = {name: lambda call=call: call for name, call in calls.items()}
    row = contest.contest({}, "forward", ready, 1e9, lambda calls: protocol.sustain(calls, NoMeter()))
    assert row.values["cuDNN"] == pytest.approx([2.0] * 3) and row.chip == {name: [1500.0, 690.0] for name in calls}
    assert row.ratio("fa2_lab", "cuDNN") == pytest.approx(2.0)


# Ceilings -----------------------------------------------------------------------------------------------------


def on_the_cpu(monkeypatch, *names: str) -> list:
    """Let these functions of torch make their tensors here; what they made."""
    made = []
    for name in names:
        usual = getattr(torch, name)

        def make(*shape, device, dtype, usual=usual):
            made.append(usual(*shape, dtype=dtype))
            return made[-1]

        monkeypatch.setattr(torch, name, make)
    return made


def test_the_product_has_the_flops_that_torch_counts(monkeypatch):
    made = on_the_cpu(monkeypatch, "randn")
    call, flops = peers.gemm_call(24)
    assert made[0].dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counted:
        call()
    assert counted.get_total_flops() == flops == 2 * 24**3


def test_the_copy_reads_and_writes_every_byte_of_a_tensor(monkeypatch):
    (both,) = [on_the_cpu(monkeypatch, "empty")]
    call, moved = peers.copy_call(1000)
    source, target = both[0].fill_(1.0)
    target.zero_()
    call()
    assert torch.equal(source, target) and moved == source.nbytes + target.nbytes


def test_ceilings_are_a_product_s_flops_and_a_copy_s_bytes_over_their_times(monkeypatch):
    monkeypatch.setattr(peers, "gemm_call", lambda: (None, 3e12))
    monkeypatch.setattr(peers, "copy_call", lambda: (None, 8e9))
    timings = dict(gemm=protocol.Timing(6.0, 1.0, 9.0), copy=protocol.Timing(4.0, 1.0, 9.0))
    monkeypatch.setattr(contest, "measure", lambda calls: timings)
    assert contest.ceilings() == {"GEMM TFLOP/s": pytest.approx(500.0), "copy TB/s": pytest.approx(2.0)}


# Before and after ---------------------------------------------------------------------------------------------


def test_a_row_is_slower_if_it_is_so_by_more_than_a_hundredth_and_than_chance():
    before = [dict(same=1.0, slow=2.0, noisy=1.0), dict(same=1.0, slow=2.0, noisy=1.2)]
    after = [dict(same=1.005, slow=2.1, noisy=1.3), dict(same=1.005, slow=2.1, noisy=1.1)]
    rows, close = before_after.compared(before, after), partial(pytest.approx, abs=1e-4)
    assert rows == [("noisy", close(1.0909), close(0.2)), ("slow", close(1.05), 0.0), ("same", close(1.005), 0.0)]
    assert [row for row, ratio, apart in rows if before_after.slower(ratio, apart)] == ["slow"]


# Commits ------------------------------------------------------------------------------------------------------


def test_a_clean_checkout_has_its_commit_and_a_changed_one_a_fingerprint(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *words], capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "one")
    git("tag", "v9", "-am", "nine")
    assert results.commit(tmp_path) == git("rev-parse", "--short", "HEAD")
    (tmp_path / "a.py").write_text("2\n")
    assert results.commit(tmp_path) == results.sources()
    assert results.commit(tmp_path / "nowhere") == results.sources()
